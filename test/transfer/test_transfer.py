"""stream(): whole tensors in one order, in bounded memory, with the next all-gathers in flight."""

import contextlib
import gc
import itertools
import time
import unittest
import weakref

import torch
import torch.distributed as dist
from common import error_of, ranks, run_ranks
from soon import soon
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from torch_ragged import RaggedShard
from torch_ragged.fsdp import fully_shard, rows
from torch_ragged.transfer import stream

LARGE = 1 << 30


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.inner = nn.Linear(5, 9)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("steps", torch.arange(3))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


def whole_net():
    torch.manual_seed(1)
    return Net()


def equal_tensors(count):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    placement = [RaggedShard((0,), tuple(range(dist.get_world_size())))]
    return {str(i): distribute_tensor(torch.full((6, 4), float(i)), mesh, placement) for i in range(count)}


def check_early_end(how):
    """Rank 1 ends after two tensors; the others get all of them, and collectives after that pair up."""
    tensors = equal_tensors(6)
    stops = dist.get_rank() == 1
    seen = []

    def read(items):
        for _, tensor in items:
            seen.append(tensor[0, 0].item())
            if stops and len(seen) == 2:
                if how == "error":
                    raise RuntimeError("the consumer failed")
                break

    failed = None
    try:
        with contextlib.closing(stream(tensors, 2 * 6 * 4 * 4)) if how == "error" else contextlib.nullcontext() as items:
            read(stream(tensors, 2 * 6 * 4 * 4) if items is None else items)
    except RuntimeError as error:
        failed = error
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size()
    assert (failed is not None) == (how == "error" and stops)
    assert seen == [float(i) for i in range(2 if stops else 6)], seen


def check_errors():
    model = whole_net()
    found = [error_of(stream, model, value) for value in (0, -1, 2.5, True, None)]
    assert all("takes a positive number of bytes" in error for error in found), found
    assert "takes a floating-point dtype" in error_of(stream, model, 1, dtype=torch.int8)
    with torch.device("meta"):
        empty = torch.nn.Linear(2, 2)
    for given in (empty, empty.state_dict()):  # At once, before any rank waits.
        assert "ValueError: stream() gets weight on the meta device, without memory: load a" in error_of(stream, given, 1)
    assert "takes a floating-point dtype" in error_of(stream, model, 1, dtype="bfloat16")
    names = [name for name, _ in itertools.islice(stream(model, 1), 2)]  # Without DTensors no process group is needed.
    assert names == ["embedding.weight", "inner.weight"] or names[0] in model.state_dict(), names


class StreamTest(unittest.TestCase):
    @ranks(4)
    def test_whole_tensors_come_in_the_order_of_the_state_dict():
        """Of fully_shard, of mixed placements on two mesh dimensions, and of plain tensors."""
        mesh = init_device_mesh("cpu", (2, 2))
        model = fully_shard(whole_net(), mesh=mesh, orig_param_policy=lambda fqn, param: rows(2))
        wanted = whole_net().state_dict()
        found = dict(stream(model, LARGE))
        assert list(found) == list(wanted) and all(torch.equal(found[name], wanted[name]) for name in wanted)
        assert not any(tensor.requires_grad or type(tensor) is not torch.Tensor for tensor in found.values())
        assert torch.is_grad_enabled()
        cast = dict(stream(model, 1, dtype=torch.bfloat16))
        assert all(torch.equal(cast[name], wanted[name].bfloat16()) for name in wanted if name != "steps")
        assert cast["steps"].dtype == torch.int64
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(2))
        units = RaggedShard((0,), (1, 2))
        kinds = [
            (units, Replicate()),
            (Replicate(), units),
            (units, Shard(1)),
            (Shard(0), Shard(1)),
            (Replicate(), Replicate()),
        ]
        pairs = [(str(kind), distribute_tensor(x, mesh, kind)) for kind in kinds]
        for name, tensor in stream(((name, value) for name, value in pairs), 2 * x.nbytes):
            assert torch.equal(tensor, x) and type(tensor) is torch.Tensor, name

    @ranks(3)
    def test_as_many_are_in_flight_as_fit():
        """How many tensors were gathered before each one is yielded: as many as ``max_bytes`` allows, and one at least."""
        tensors = equal_tensors(6)
        nbytes = 6 * 4 * 4
        for max_bytes, expected in (
            (1, [1, 2, 3, 4, 5, 6]),
            (2 * nbytes - 1, [1, 2, 3, 4, 5, 6]),
            (2 * nbytes, [2, 3, 4, 5, 6, 6]),
            (3 * nbytes, [3, 4, 5, 6, 6, 6]),
            (LARGE, [6, 6, 6, 6, 6, 6]),
        ):
            issued = []
            with CommDebugMode() as mode:
                for _ in stream(tensors, max_bytes):
                    issued.append(mode.get_total_counts() // 2)  # Two ranks have elements, and each broadcasts them.
            assert issued == expected, (max_bytes, issued)
        halved = []
        with CommDebugMode() as mode:
            for _ in stream(tensors, 2 * nbytes, dtype=torch.bfloat16):  # Cast before they are gathered: half the bytes.
                halved.append(mode.get_total_counts() // 2)
        assert halved == [4, 5, 6, 6, 6, 6], halved

    @ranks(2)
    def test_a_dropped_tensor_is_freed_before_the_next_one_is_gathered():
        """A tensor that the consumer drops is free when the next one is gathered."""
        tensors, alive = equal_tensors(5), []
        for _, tensor in stream(tensors, 1):
            alive.append(weakref.ref(tensor.untyped_storage()))
            del tensor
            gc.collect()
            deadline = time.monotonic() + 20
            while any(each() is not None for each in alive):  # A thread of gloo drops its reference a moment after the wait.
                assert time.monotonic() < deadline, "a dropped tensor is alive"
                time.sleep(0.001)

    @ranks(2)
    def test_ranks_that_stream_other_tensors_raise_before_they_are_gathered():
        """Another order, another name, another dtype: of a mapping at the first tensor, of pairs at the first that differs."""
        rank, tensors = dist.get_rank(), equal_tensors(3)
        other = {name: tensors[name] for name in reversed(tensors)} if rank else tensors
        start = "ValueError: transfer.stream was called differently on different ranks: "

        def streamed(model, dtype=None):
            names = []
            text = error_of(lambda: names.extend(name for name, _ in stream(model, 1, dtype=dtype)))
            return names, text.removeprefix(start).partition(" of torch")[0]

        with CommDebugMode() as mode:
            assert streamed(other) == ([], "rank 0 has 0")
        assert not any("broadcast" in str(op) for op in mode.get_comm_counts())
        assert streamed({"a" if rank else "b": tensors["0"]}) == ([], "rank 0 has b")
        assert streamed(tensors, torch.bfloat16 if rank else None)[1].startswith(
            "dtype: None on rank 0, torch.bfloat16 on rank 1"
        )
        pairs = [("0", tensors["0"]), *(other.items())]
        assert streamed(pair for pair in pairs) == (["0"], "rank 0 has 0")
        assert streamed(tensors) == (list("012"), "")  # Ranks are still in step.

    @ranks(2)
    def test_a_rank_whose_tensors_have_another_dtype_is_an_error_on_both():
        model = fully_shard(whole_net()).to(torch.bfloat16 if dist.get_rank() else torch.float32)
        text = error_of(lambda: list(stream(model, LARGE)))
        assert "rank 0 has embedding.weight of torch.float32" in text and "of torch.bfloat16 and" in text, text

    @ranks(4)
    @soon()
    def test_tensors_on_several_meshes_are_compared_on_each_of_them():
        """Ranks hold different tensors where meshes differ, and take the meshes in one order."""
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        x, rank = torch.arange(8.0), dist.get_rank()
        named = {name: distribute_tensor(x, mesh[name], [Shard(0)]) for name in ("dp", "tp")}
        named["both"] = distribute_tensor(x, mesh, [Replicate(), Shard(0)])
        assert all(torch.equal(tensor, x) for _, tensor in stream(named, LARGE))
        wrong = {**named, "other": named["tp"]} if rank == 3 else named
        text = error_of(lambda: list(stream(wrong, LARGE)))
        assert ("nothing more" in text and "other of torch.float32" in text) == (rank > 1), text

    @ranks(2)
    def test_a_wrong_argument_of_one_rank_is_an_error_on_all_ranks():
        mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
        named = {"x": distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])}
        for own, options in (("a floating-point dtype", {"dtype": "bf16"}), ("a positive number of bytes", {"max_bytes": "1"})):
            options = {"max_bytes": LARGE, **(options if rank else {})}
            for given in (named, [("plain", torch.ones(2)), *named.items()]):
                text = error_of(lambda options=options, given=given: list(stream(given, **options)))
                assert own in text, text
        assert torch.equal(dict(stream(named, LARGE))["x"], torch.arange(8.0))

    def test_a_rank_that_breaks_does_not_stop_the_others(self):
        run_ranks(3, check_early_end, "break")

    def test_a_rank_that_fails_does_not_stop_the_others(self):
        run_ranks(3, check_early_end, "error")

    def test_wrong_arguments_are_refused_at_the_call(self):
        check_errors()
