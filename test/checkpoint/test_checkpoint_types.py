"""Checkpoints of ragged DTensors whose local tensors are of a quantized type with few operations, such as optimizer states."""

import tempfile
import unittest

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from torch_ragged import RaggedShard, checkpoint

BLOCK = 4
aten = torch.ops.aten


class Codes(torch.Tensor):
    """Bytes and one scale per block: it can be viewed, copied, and sliced along blocks in the first dimension."""

    @staticmethod
    def __new__(cls, codes, scales):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)

    def __init__(self, codes, scales):
        self.codes, self.scales = codes, scales

    @classmethod
    def of(cls, values):
        scales = values.reshape(-1, BLOCK).abs().amax(1).clamp(min=1e-9) / 100
        return cls((values.reshape(-1, BLOCK) / scales[:, None]).round().to(torch.int8).view(values.shape), scales)

    def values(self):
        return (self.codes.reshape(-1, BLOCK) * self.scales[:, None]).view(self.codes.shape)

    def __tensor_flatten__(self):
        return ["codes", "scales"], None

    @staticmethod
    def __tensor_unflatten__(inner, metadata, size, stride):
        return Codes(inner["codes"], inner["scales"])

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        self = args[0]
        if func in (aten.detach.default, aten._to_copy.default):
            return cls(
                func(self.codes, **{"dtype": None, **(kwargs or {})} if func is aten._to_copy.default else {}), self.scales
            )
        if func is aten.view.default:
            return cls(self.codes.view(args[1]), self.scales)
        if func is aten.is_pinned.default:
            return False
        if func is aten.slice.Tensor and args[1] == 0:
            row = self.codes[:1].numel()
            start, stop = args[2] * row, args[3] * row
            if start % BLOCK or stop % BLOCK:
                raise ValueError(f"elements {start} to {stop} cut a block")
            return cls(self.codes[args[2] : args[3]], self.scales[start // BLOCK : stop // BLOCK])
        if func is aten.copy_.default and isinstance(self, Codes):
            source = args[1] if isinstance(args[1], Codes) else Codes.of(args[1])
            self.codes.copy_(source.codes)
            self.scales.copy_(source.scales)
            return self
        raise NotImplementedError(f"Codes has no {func}")


torch.serialization.add_safe_globals([Codes])


def ragged(whole, units, dims=(0,)):
    """``whole`` under RaggedShard(dims, units), as Codes."""
    mesh = init_device_mesh("cpu", (len(units),))
    step = whole.numel() // sum(units)
    start = step * sum(units[: dist.get_rank()])
    local = whole.reshape(-1)[start : start + step * units[dist.get_rank()]]
    shape, stride = whole.shape, whole.stride()
    return DTensor.from_local(Codes.of(local), mesh, [RaggedShard(dims, units)], shape=shape, stride=stride, run_check=False)


def whole_tensor():
    return torch.arange(1.0, 97.0).view(12, 8).sin()


class Holder(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("codes", value)


def train_state(value):
    holder = Holder(value)
    return checkpoint.TrainState(holder, torch.optim.SGD(holder.parameters(), lr=0.1))


def save(folder, units):
    value = ragged(whole_tensor(), units)
    dcp.save({"codes": value}, checkpoint_id=f"{folder}/dcp")
    checkpoint.save(f"{folder}/own", train_state(value))


def load(folder, units):
    expected = ragged(whole_tensor(), units).to_local().values()
    into = ragged(torch.zeros(12, 8), units)
    dcp.load({"codes": into}, checkpoint_id=f"{folder}/dcp")
    assert torch.equal(into.to_local().values(), expected)
    state = train_state(ragged(torch.zeros(12, 8), units))
    checkpoint.load(f"{folder}/own", state)
    assert torch.equal(state.model.codes.to_local().values(), expected)


def save_what_cuts_rows(folder):
    """Rank 0 holds two rows and half of the third one, of whole blocks; and then two elements less, which cut a block."""
    dcp.save({"codes": ragged(whole_tensor(), (20, 76), dims=(0, 1))}, checkpoint_id=f"{folder}/rows")
    value = ragged(torch.zeros(12, 8), (20, 76), dims=(0, 1))
    dcp.load({"codes": value}, checkpoint_id=f"{folder}/rows")
    assert torch.equal(value.to_local().values(), ragged(whole_tensor(), (20, 76), dims=(0, 1)).to_local().values())
    numel = 18 if dist.get_rank() == 0 else 78
    local, options = (
        Codes(torch.zeros(numel, dtype=torch.int8), torch.zeros(1)),
        {"shape": value.shape, "stride": value.stride()},
    )
    cut = DTensor.from_local(local, value.device_mesh, [RaggedShard((0, 1), (18, 78))], run_check=False, **options)
    try:
        dcp.save({"codes": cut}, checkpoint_id=f"{folder}/cut")
    except dcp.api.CheckpointException as error:  # It is no Exception.
        return str(error)
    return ""


class QuantisedTypesTest(unittest.TestCase):
    def test_saved_states_load_on_the_same_and_on_other_numbers_of_ranks(self):
        with tempfile.TemporaryDirectory() as folder:
            run_ranks(2, save, folder, (7, 5))
            run_ranks(2, load, folder, (7, 5))
            run_ranks(3, load, folder, (0, 4, 8))
            run_ranks(1, load, folder, (1,))

    def test_a_shard_that_cuts_a_block_has_an_error_that_says_what_to_do(self):
        with tempfile.TemporaryDirectory() as folder:
            for error in run_ranks(2, save_what_cuts_rows, folder):
                self.assertIn("keep its rows and blocks whole", error)
                self.assertIn("Codes, the type of a local tensor", error)
