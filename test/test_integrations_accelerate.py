"""accelerate and transformers train with ours as with torch's FSDP2; skipped where they are not installed."""

import contextlib
import importlib.util
import unittest

import torch
import torch.distributed as dist
from common import run_ranks

from torch_ragged import RaggedShard
from torch_ragged.fsdp import rows
from torch_ragged.integrations import installed

HAS_BOTH = all(importlib.util.find_spec(name) for name in ("accelerate", "transformers"))


def make_accelerator():
    """accelerate's FSDP2 on the CPU: it takes FSDP for accelerators only, so its state is told."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    AcceleratorState._reset_state(True)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"]
    )
    accelerator = Accelerator(fsdp_plugin=plugin, cpu=True)
    accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
    return accelerator


def train(context):
    """(loss, norm of gradients) of three steps of a small Llama that accelerate has prepared; and the first placement."""
    from transformers import LlamaConfig, LlamaForCausalLM

    accelerator = make_accelerator()
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=2, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with context:
        model, optimizer = accelerator.prepare(model, optimizer)
    steps = []
    for step in range(3):
        generator = torch.Generator().manual_seed(step + 10 * dist.get_rank())
        ids = torch.randint(0, 64, (2, 16), generator=generator)
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps.append((loss.item(), norm.item()))
    return steps, next(model.parameters()).placements[0]


def train_with_both():
    theirs, _ = train(contextlib.nullcontext())
    ours, placement = train(installed(orig_param_policy=lambda fqn, param: rows(4) if param.ndim == 2 else None))
    assert isinstance(placement, RaggedShard), placement
    return theirs, ours


@unittest.skipUnless(HAS_BOTH, "accelerate and transformers are not installed")
class AccelerateTest(unittest.TestCase):
    def test_losses_and_norms_are_those_of_fsdp2(self):
        for theirs, ours in run_ranks(2, train_with_both):
            self.assertEqual(ours, theirs)


if __name__ == "__main__":
    unittest.main()
