"""docs/moving_here.md: each argument of what torch has is in a table, and what stands beside it exists here."""

import importlib.util
import inspect
import re
import unittest
from pathlib import Path

from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor.parallel import parallelize_module

from torch_ragged import fsdp

TEXT = (Path(__file__).parents[2] / "docs/moving_here.md").read_text()


def rows(title):
    """(first cell, second cell) of the tables of a section."""
    section = re.split(r"^## ", TEXT.partition(f"## {title}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    cells = [re.split(r"(?<!\\)\|", line) for line in section.splitlines() if line.startswith("| ")]
    return [(cell[1], cell[2]) for cell in cells]


def left(title):
    return {name for cell, _ in rows(title) for name in re.findall(r"`(\w+)", cell)}


class MovingHereTest(unittest.TestCase):
    def test_each_argument_of_torch_has_a_row(self):
        self.assertEqual(set(inspect.signature(FullyShardedDataParallel).parameters) - left("From FSDP1"), set())
        asked = set(inspect.signature(parallelize_module).parameters) - {"module"}
        self.assertEqual(asked - left("From parallelize_module"), set())

    @unittest.skipUnless(importlib.util.find_spec("accelerate"), "accelerate is not installed")
    def test_each_field_of_accelerates_plugin_has_a_row(self):
        from accelerate import FullyShardedDataParallelPlugin

        names = {name.removeprefix("fsdp_") for name in left("From accelerate's FSDP plugin")}
        fields = set(inspect.signature(FullyShardedDataParallelPlugin).parameters)
        others = {"mixed_precision_policy": "mixed_precision", "transformer_cls_names_to_wrap": "transformer_layer_cls_to_wrap"}
        others |= {
            "fsdp_version": "version",
            "state_dict_config": "state_dict_type",
            "optim_state_dict_config": "state_dict_type",
        }
        others |= {"param_init_fn": "sync_module_states", "activation_checkpointing_offload": "activation_checkpointing"}
        self.assertEqual({others.get(field, field) for field in fields} - names, set())

    def test_what_stands_beside_them_exists(self):
        right = "\n".join(cell for title in ("From FSDP1", "From DeepSpeed", "From Megatron-FSDP") for _, cell in rows(title))
        arguments = set(re.findall(r"`(\w+)=", right)) - {"full_state_dict", "broadcast_from_rank0", "reduce_dtype"}
        self.assertGreater(len(arguments), 4)
        self.assertEqual(arguments - set(inspect.signature(fsdp.fully_shard).parameters), set())
        methods = set(re.findall(r"\b(?:set_(?!model|device)\w+|unshard|reshard)\b", right))
        self.assertGreater(len(methods), 8)
        self.assertEqual({name for name in methods if not hasattr(fsdp.FSDPModule, name)}, set())
        names = set(re.findall(r"`=?(ZERO\d|HIERARCHICAL|[A-Z]\w+Policy|Offload|offloaded|token_scale)\b", right))
        self.assertGreater(len(names), 6)
        self.assertEqual({name for name in names if not hasattr(fsdp, name)}, set())
