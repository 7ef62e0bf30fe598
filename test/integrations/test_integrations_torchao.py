"""torchao trains with ours as with torch's FSDP2, and its states are saved; skipped where it is not installed."""

import importlib.util
import tempfile
import unittest

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from case import both
from common import error_of, run_ranks
from doc_pages import run_page
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from torch_ragged import checkpoint
from torch_ragged.fsdp import elements

HAS_TORCHAO = importlib.util.find_spec("torchao") is not None


def step(model, optimizer, number):
    from torchao_cases import batch, loss_of

    loss_of(model, batch(number, dist.get_rank())).backward()
    optimizer.step()
    optimizer.zero_grad()


def sharded(name, block_size):
    import torchao.optim
    from torchao_cases import make, shard

    from torch_ragged.integrations.torchao import optimizer_blocks

    torch._dynamo.reset()
    model = shard(make(), "ragged", optimizer_blocks(block_size))
    return model, getattr(torchao.optim, name)(model.parameters(), lr=1e-3)


def values(optimizer):
    """The whole first moment of each parameter, and whether it is quantized on this rank (None: an empty shard)."""
    found = []
    for state in optimizer.state.values():
        moment = state["exp_avg"]
        local = moment.to_local()
        is_quantized = hasattr(local, "dequantize") and type(local) is not torch.Tensor
        plain = local.dequantize() if is_quantized else local
        whole = type(moment).from_local(
            plain, moment.device_mesh, moment.placements, run_check=False, shape=moment.shape, stride=moment.stride()
        )
        found.append((whole.full_tensor(), is_quantized if local.numel() else None))
    return found


def save_states(folder, name, block_size):
    with torch._functorch.config.patch(enable_autograd_cache=False):
        model, optimizer = sharded(name, block_size)
        for number in range(2):
            step(model, optimizer, number)
    for parameter, (_, is_quantized) in zip(model.parameters(), values(optimizer), strict=True):
        assert is_quantized in (None, parameter.numel() >= 4096), (parameter.shape, is_quantized)
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=f"{folder}/dcp")
    checkpoint.save(f"{folder}/own", checkpoint.TrainState(model, optimizer))
    return [value for value, _ in values(optimizer)]


def load_states(folder, name, block_size):
    with torch._functorch.config.patch(enable_autograd_cache=False):
        model, optimizer = sharded(name, block_size)
        state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.load(state, checkpoint_id=f"{folder}/dcp")
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
        by_dcp = [value for value, _ in values(optimizer)]
        model, optimizer = sharded(name, block_size)
        checkpoint.load(f"{folder}/own", checkpoint.TrainState(model, optimizer))
        return by_dcp, [value for value, _ in values(optimizer)]


@unittest.skipUnless(HAS_TORCHAO, "torchao is not installed")
class TorchaoTest(unittest.TestCase):
    def check_cases(self, words):
        from torchao_cases import CASES

        numbers = [number for number, case in enumerate(CASES) if any(word in case.what for word in words)]
        self.assertTrue(numbers)
        for number in numbers:
            with self.subTest(case=CASES[number].what):
                for theirs, ours in run_ranks(2, both, "torchao", number):
                    self.assertEqual(ours, theirs)

    def test_float8_training_has_the_losses_of_fsdp2_or_of_one_process(self):
        self.check_cases(["float8, "])

    def test_low_bit_optimizers_have_the_losses_of_fsdp2(self):
        self.check_cases(["AdamW8bit", "AdamW4bit", "AdamWFp8"])

    def test_tensor_types_have_the_losses_of_fsdp2(self):
        self.check_cases(["NF4Tensor", "int8", "BitNet"])

    def test_low_bit_states_load_on_another_number_of_ranks(self):
        for name, block_size in (("AdamW8bit", 256), ("AdamW4bit", 128)):
            with self.subTest(name), tempfile.TemporaryDirectory() as folder:
                saved = run_ranks(2, save_states, folder, name, block_size)[0]
                for loaded in run_ranks(3, load_states, folder, name, block_size)[0]:
                    for value, wanted in zip(loaded, saved, strict=True):
                        self.assertTrue(torch.equal(value, wanted))

    def test_the_commands_of_the_page_run(self):
        self.assertIn("loss", run_page("integrations/torchao.md")[0])

    def test_policies_keep_blocks_and_rows_whole(self):
        from torch_ragged.integrations.torchao import optimizer_blocks

        def chosen(*shape, block_size=256, policy=None):
            found = optimizer_blocks(block_size, policy)("name", torch.nn.Parameter(torch.empty(shape, device="meta")))
            return None if found is None else found.text

        self.assertEqual(chosen(512, 128), "rows(32)")  # 4,096 elements: torchao quantizes no fewer.
        self.assertEqual(chosen(512, 96), "rows(48)")  # 18 blocks; 43 rows would cut the last one.
        self.assertEqual(chosen(512, 96, block_size=128), "rows(44)")
        self.assertEqual(chosen(32, 128), "tensor()")
        self.assertEqual(chosen(8, 4, 4096), "rows(1)")
        self.assertEqual(chosen(8192), "rows(4096)")
        self.assertIsNone(chosen(31, 128))  # Too small: torchao does not quantize it, wherever it is cut.
        self.assertIsNone(chosen(4099, 3))  # No whole number of blocks.
        self.assertEqual(chosen(512, 128, policy=lambda fqn, param: elements()), "elements()")
        for wrong in (0, 3, 2.0, True, None):
            self.assertIn("a positive even integer", error_of(optimizer_blocks, wrong))
