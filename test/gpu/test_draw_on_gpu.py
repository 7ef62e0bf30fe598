"""What ranks draw on a GPU is what one GPU draws, bitwise: torch's own ops are the reference. One GPU is enough.

Ranks are simulated: each draws its part of the same draw from the same state of the generator.
"""

import itertools
import math
from collections import namedtuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from torch_ragged import RaggedShard
from torch_ragged._kernels import _choice
from torch_ragged.random import single_device
from torch_ragged.tensor import _counter
from torch_ragged.tensor._counter import Kernel, Turns, way_of
from torch_ragged.tensor._cut_placement import cuts_of
from torch_ragged.tensor._draw import draw_owned
from torch_ragged.tensor._ownership import owned, row_major
from torch_ragged.tensor._random import _dropout
from torch_ragged.tensor._sampler import Sampler

DEVICE = torch.device("cuda", 0)
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

aten = torch.ops.aten
random_from = getattr(aten.random_, "from")
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
BY_KERNEL = [
    *((aten.uniform_.default, args, dtype) for dtype in FLOATS for args in ((), (-0.03, 0.07))),
    *((aten.normal_.default, args, dtype) for dtype in FLOATS[:3] for args in ((), (0.5, 0.02))),
    *((aten.bernoulli_.float, (0.3,), dtype) for dtype in (*FLOATS, torch.bool, torch.int64)),
    *((aten.random_.default, (), dtype) for dtype in (*FLOATS, torch.bool, torch.uint8, torch.int32, torch.int64)),
    *((random_from, bounds, torch.int64) for bounds in ((0, 128256), (-(2**62), 2**62))),
]
BY_TURNS = [
    (aten.exponential_.default, (1.5,), torch.float32),
    (aten.geometric_.default, (0.3,), torch.float32),
    (aten.cauchy_.default, (), torch.float64),
    (aten.log_normal_.default, (), torch.bfloat16),
    (aten.normal_.default, (), torch.complex64),
    (random_from, (-(2**63), None), torch.int64),
]
EITHER = [(aten.normal_.default, (0.5, 0.02), torch.float64)]
"""The trial decides: its sines and cosines are not computed in one function, as CURAND's are."""
LARGE = (6, 700_000)
"""More than three turns of any GPU of today."""


Holding = namedtuple("Holding", "shape boxes")


@pytest.fixture(autouse=True)
def chosen():
    yield
    _choice.choose("auto")


def sampler_of(op, args, dtype, seed=1234, offset=8):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    if DEVICE.type == "cuda":
        generator.set_offset(offset)
    return Sampler(op, args, dtype, generator)


def check(op, args, dtype, shape, mesh_shape, placements, order=None):
    """Every rank's part of a draw is that of torch's draw, and so is the state of the generator."""
    order = order or range(len(shape))
    inverse = [list(order).index(dim) for dim in range(len(shape))]
    whole = torch.empty([shape[dim] for dim in order], dtype=dtype, device=DEVICE).permute(inverse)
    sampler = sampler_of(op, args, dtype)
    state = sampler.generator.get_state()
    sampler.fill(whole)
    after = sampler.generator.get_state()
    for coordinate in itertools.product(*map(range, mesh_shape)):
        held = owned(shape, mesh_shape, cuts_of(placements), coordinate)
        local = torch.zeros(held.local_shape, dtype=dtype, device=DEVICE)
        sampler.generator.set_state(state)
        draw_owned(sampler, shape, whole.stride(), [box for box in held.boxes if box.numel], local)
        what = f"{op} {args} {dtype} {shape} {whole.stride()} {placements} {coordinate}"
        assert torch.equal(sampler.generator.get_state(), after), what
        for box in held.boxes:
            index = tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes))
            mine = local.view(-1).as_strided(box.sizes, box.local_strides, box.local_offset)
            assert torch.equal(mine, whole[index]), what


@pytest.mark.parametrize("op, args, dtype", [*BY_KERNEL, *BY_TURNS, *EITHER])
def test_ranks_draw_what_one_gpu_draws(op, args, dtype):
    halves = (RaggedShard((0, 1), (1, 0, 2, 4)),)
    for shape in ((7, 256), LARGE):
        for mesh_shape, placements in [((4,), halves if shape[0] == 7 else (Shard(1),)), ((2,), (Shard(0),))]:
            check(op, args, dtype, shape, mesh_shape, placements)


def test_all_placements_and_orders_of_memory():
    shape, op = (30, 70, 8, 90), aten.uniform_.default
    for mesh_shape, placements, order in [
        ((3,), (Shard(2),), None),
        ((2, 3), (Shard(3), Shard(0)), None),
        ((2, 3), (_StridedShard(0, split_factor=3), Shard(0)), None),
        ((3, 2), (Replicate(), Shard(1)), (0, 2, 3, 1)),
        ((2, 2), (Shard(1), Shard(1)), (3, 2, 1, 0)),
        ((3,), (RaggedShard((0, 1), (5, 0, 9)),), None),
    ]:
        check(op, (), torch.float32, shape, mesh_shape, placements, order)


@pytest.mark.parametrize("op, args, dtype", BY_KERNEL)
def test_the_kernel_draws(op, args, dtype):
    """Its trial passed: torch's rule and bits are those that the kernel knows. Otherwise torch draws, and numbers are equal."""
    local = torch.empty(8, dtype=dtype, device=DEVICE)
    assert isinstance(way_of(sampler_of(op, args, dtype), local, 8), Kernel)


@pytest.mark.parametrize("op, args, dtype", [*BY_TURNS, *BY_KERNEL[:2]])
def test_torch_draws_turn_by_turn_without_the_kernel(op, args, dtype):
    _choice.choose("torch")
    local = torch.empty(8, dtype=dtype, device=DEVICE)
    assert isinstance(way_of(sampler_of(op, args, dtype), local, 8), Turns)
    check(op, args, dtype, LARGE, (4,), (Shard(1),))


@pytest.mark.parametrize("op, args, dtype", [BY_KERNEL[0], BY_TURNS[0]])
def test_draws_of_two_gibibytes_and_more(op, args, dtype):
    """torch cuts them: each half has a grid of its own."""
    check(op, args, dtype, (2**29 + 4096 + 8,), (3,), (RaggedShard((0,), (1, 2**20, 2**29 + 4096 + 7 - 2**20)),))


@pytest.mark.parametrize("op, args, dtype", [BY_KERNEL[0], BY_KERNEL[8], (aten.bernoulli_.float, (0.1,), torch.bool)])
def test_a_rank_needs_its_own_elements_and_no_others(op, args, dtype):
    """An expert weight of GPT-OSS-120B's shape, of which this rank holds a 64th: nothing is allocated beside it."""
    shape = (128, 2880, 2880)
    held = owned(shape, (64,), cuts_of((Shard(0),)), (3,))
    local, sampler = torch.empty(held.local_shape, dtype=dtype, device=DEVICE), sampler_of(op, args, dtype)
    draw_owned(sampler, (16,), (1,), (), local.new_empty(0))  # The trial has been made.
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    draw_owned(sampler, shape, row_major(shape), held.boxes, local)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= 2**20


@pytest.mark.parametrize("dtype", FLOATS)
def test_ranks_drop_what_one_gpu_drops(dtype):
    """Masks and products of native_dropout, of sizes that allow 8, 4, 2 and no neighbours, and in other orders of memory."""
    assert _counter._vector_of(dtype, DEVICE) in (2, 4, 8), "the kernel draws"
    generator = torch.cuda.default_generators[0]
    turned_shapes = [(shape, True) for shape in ((64, 96), (61, 6), (61, 7))]
    for shape, turned in [((64, 96), False), ((61, 4), False), *turned_shapes, (LARGE, False)]:
        whole = torch.linspace(-2, 2, math.prod(shape), device=DEVICE).to(dtype)  # In float16 itself, long ones have NaN.
        whole = whole.view(shape[::-1]).t() if turned else whole.view(shape)
        generator.manual_seed(7).set_offset(12)
        dropped, kept = torch.native_dropout(whole, 0.1, True)
        after = generator.get_offset()
        for rank in range(4):
            held = owned(shape, (4,), cuts_of((Shard(1),)), (rank,))
            local = whole.chunk(4, 1)[rank].contiguous() if held.numel else whole.new_empty(held.local_shape)
            holding = Holding(shape, [box for box in held.boxes if box.numel])
            generator.manual_seed(7).set_offset(12)
            mine, mask = _dropout(aten.native_dropout.default, holding, whole.stride(), local, 0.1, True)
            what = f"{dtype} {shape} {turned} {rank}"
            assert generator.get_offset() == after, what
            if held.numel:
                assert torch.equal(mask, kept.chunk(4, 1)[rank]) and torch.equal(mine, dropped.chunk(4, 1)[rank]), what


def test_dropping_all_or_nothing_draws_as_one_gpu_does():
    generator, ones = torch.cuda.default_generators[0], torch.ones(8, device=DEVICE)
    holding = Holding((8,), owned((8,), (1,), cuts_of((Replicate(),)), (0,)).boxes)
    for p, train in ((1.0, True), (0.3, False), (0.0, True)):
        generator.manual_seed(7)
        theirs, after = torch.native_dropout(ones, p, train), generator.get_offset()
        generator.manual_seed(7)
        ours = _dropout(aten.native_dropout.default, holding, (1,), ones, p, train)
        assert generator.get_offset() == after and all(map(torch.equal, ours, theirs)), (p, train)


def test_dtensors_draw_what_one_gpu_draws(tmp_path):
    """From the ops on: a mesh of one GPU, whose tensors are sharded."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl" if DEVICE.type == "cuda" else "gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh(DEVICE.type, (1,))
        for placement in (Shard(0), Shard(1), Replicate(), RaggedShard((0, 1), (1,))):
            results = []
            sharded = distribute_tensor(torch.empty(61, 8, device=DEVICE), mesh, [placement])
            for weight in (torch.empty(61, 8, device=DEVICE), sharded):
                torch.manual_seed(0)
                with single_device():
                    weight = torch.nn.init.trunc_normal_(torch.nn.init.kaiming_uniform_(weight))
                    weight = torch.nn.functional.dropout(weight, 0.1) + torch.randn_like(weight)
                results.append(weight.full_tensor() if isinstance(weight, DTensor) else weight)
            assert torch.equal(*results), placement
    finally:
        dist.destroy_process_group()


def test_factories_are_draws_of_new_tensors():
    """torch.rand, torch.randn and torch.randint give the numbers of uniform_, normal_ and random_."""
    generator = torch.cuda.default_generators[0]
    shape, held = (300, 500), owned((300, 500), (4,), cuts_of((Shard(0),)), (1,))
    for make, op, args, dtype in [
        (lambda: torch.rand(shape, device="cuda"), aten.uniform_.default, (), torch.float32),
        (lambda: torch.randn(shape, device="cuda"), aten.normal_.default, (), torch.float32),
        (lambda: torch.randint(3, 90, shape, device="cuda"), random_from, (3, 90), torch.int64),
    ]:
        torch.cuda.manual_seed(5)
        whole, after = make(), generator.get_offset()
        torch.cuda.manual_seed(5)
        local = torch.empty(held.local_shape, dtype=dtype, device=DEVICE)
        draw_owned(Sampler(op, args, dtype), shape, row_major(shape), held.boxes, local)
        assert torch.equal(local, whole[75:150]) and generator.get_offset() == after


def test_every_rank_raises_for_bad_arguments():
    for op, args in ((aten.normal_.default, (0.0, -1.0)), (aten.bernoulli_.float, (1.5,)), (aten.uniform_.default, (1.0, 0.0))):
        for boxes in ((), owned((8,), (1,), cuts_of((Replicate(),)), (0,)).boxes):
            with pytest.raises(RuntimeError):
                draw_owned(sampler_of(op, args, torch.float32), (8,), (1,), boxes, torch.empty(8, device=DEVICE))


def test_a_captured_draw_is_whole():
    """Only torch's kernels can move the generator in a graph. The replay draws the next numbers of one device."""
    shape, held = (40, 50), owned((40, 50), (2,), cuts_of((Shard(0),)), (1,))
    local, sampler = torch.empty(held.local_shape, device=DEVICE), Sampler(aten.uniform_.default, (), torch.float32)
    draw_owned(sampler, shape, row_major(shape), held.boxes, local)
    torch.cuda.manual_seed(3)
    expected = [torch.rand(shape, device="cuda")[20:] for _ in range(2)]
    torch.cuda.manual_seed(3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        draw_owned(sampler, shape, row_major(shape), held.boxes, local)
    for wanted in expected:
        graph.replay()
        assert torch.equal(local, wanted)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
