"""Redistribution on 1-D to 3-D meshes against brute force: bitwise, with autograd, in exact collectives and bytes."""

import itertools
import random
import unittest

import expecttest
import torch
import torch.distributed as dist
from common import error_of, run_ranks
from oracle import local_of, random_placement
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode

from torch_ragged import RaggedShard
from torch_ragged._redistribute import plan
from torch_ragged._transfer import Exchange
from torch_ragged._units import Units
from torch_ragged.placement_types import has_ragged, normalize_placements

DTYPES = (torch.float32, torch.bfloat16, torch.int64)
SIZES = (1, 2, 2, 3, 4, 4, 5, 6, 8)
REDUCE = {"sum": lambda t: t.sum(0), "avg": lambda t: t.mean(0), "max": lambda t: t.amax(0), "min": lambda t: t.amin(0)}
OPERATION = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class Traffic(TorchDispatchMode):
    """Counts the elements that this rank receives from others in functional collectives."""

    def __init__(self):
        super().__init__()
        self.received = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result, name = func(*args, **(kwargs or {})), func._schema.name.split("::")[-1]
        if func.namespace == "_c10d_functional":
            group = dist.distributed_c10d._resolve_process_group(args[-1]) if isinstance(args[-1], str) else None
            if name == "all_to_all_single":
                self.received += sum(n for peer, n in enumerate(args[1]) if peer != group.rank())
            elif name == "all_gather_into_tensor":
                self.received += result.numel() - args[0].numel()
            elif name == "broadcast":
                self.received += args[0].numel() * (args[1] != group.rank())
            elif name != "wait_tensor":
                raise AssertionError(f"{name} in a redistribution without a Partial")
        return result


def random_case(rng, mesh_shape, strided=None):
    """A shape and two placements of it that have a meaning; at least one is ragged."""
    while True:
        shape = tuple(0 if rng.random() < 0.03 else rng.choice(SIZES) for _ in range(rng.choice((0, 1, 2, 2, 3, 3))))
        pair = []
        for _ in range(2):
            for _ in range(20):
                placements = tuple(random_placement(rng, shape, mesh_shape, dim, strided) for dim in range(len(mesh_shape)))
                if rng.random() < 0.5 and pair:  # Often only some mesh dimensions change.
                    placements = tuple(rng.choice(choice) for choice in zip(pair[0], placements))
                try:
                    pair.append(normalize_placements(placements, shape, mesh_shape))
                    break
                except ValueError:
                    continue
        if len(pair) == 2 and any(map(has_ragged, pair)):
            return shape, *pair


def contributions(shape, mesh, source, dtype, generator):
    """Values at every coordinate of the pending mesh dimensions, whose reductions are exact: (mesh shape or 1s, *shape)."""
    sizes = [size if isinstance(p, Partial) else 1 for size, p in zip(mesh.shape, source)]
    values = torch.randint(-8, 8, (*sizes, *shape), generator=generator)
    return (values * 24 if any(p.is_partial("avg") for p in source) else values).to(dtype)


def reduced(values, mesh_ndim, source, target, coordinate):
    """What the values are at this coordinate, once what ``target`` does not leave pending is reduced."""
    for dim in reversed(range(mesh_ndim)):
        chosen = values.movedim(dim, 0)
        if isinstance(source[dim], Partial) and source[dim] != target[dim]:
            values = REDUCE[source[dim].reduce_op](chosen.double()).to(values.dtype)
        else:
            values = chosen[coordinate[dim] if isinstance(source[dim], Partial) else 0]
    return values


def check_case(mesh, case, dtype, seed, **keywords):
    shape, source, target = case
    coordinate, mesh_shape = tuple(mesh.get_coordinate()), tuple(mesh.shape)
    where = f"{shape} {dtype} on {mesh_shape}: {source} -> {target}"
    values = contributions(shape, mesh, source, dtype, torch.Generator().manual_seed(seed))
    mine = reduced(values, mesh.ndim, source, source, coordinate)
    before = local_of(mine, mesh_shape, source, coordinate).clone().contiguous()
    spec = dict(shape=torch.Size(shape), stride=torch.empty(shape).stride(), run_check=False)
    tensor = DTensor.from_local(before, mesh, source, **spec)
    with Traffic() if not any(isinstance(p, Partial) for p in (*source, *target)) else torch.no_grad() as traffic:
        moved = tensor.redistribute(placements=target, **keywords)
        after = moved.to_local()
        after = after.wait() if hasattr(after, "wait") else after
    assert moved.placements == target and moved.shape == torch.Size(shape), where
    expected = local_of(reduced(values, mesh.ndim, source, target, coordinate), mesh_shape, target, coordinate)
    for dim, (old, new) in enumerate(zip(source, target)):
        if isinstance(new, Partial) and old != new:  # What ranks contribute must reduce to the value.
            after = after.clone()
            dist.all_reduce(after, OPERATION[new.reduce_op], group=mesh.get_group(dim))
            after = after / mesh.size(dim) if new.reduce_op == "avg" else after
    assert after.shape == expected.shape and after.dtype == dtype and torch.equal(after, expected), (
        f"{where}\n{after} {expected}"
    )
    assert not has_ragged(target) or after.is_contiguous(), where
    if isinstance(traffic, Traffic):
        numbers = torch.arange(torch.Size(shape).numel()).view(shape)
        held, wanted = (set(local_of(numbers, mesh_shape, p, coordinate).flatten().tolist()) for p in (source, target))
        assert traffic.received == len(wanted - held), f"{where}: received {traffic.received}, gains {len(wanted - held)}"


def check_random_cases(mesh_shapes, cases, seed, strided=None):
    rng = random.Random(seed)
    meshes = [init_device_mesh("cpu", shape) for shape in mesh_shapes]
    kinds = set()
    for number in range(cases):
        mesh = meshes[number % len(meshes)]
        case, dtype = random_case(rng, tuple(mesh.shape), strided), rng.choice(DTYPES)
        averages = any(isinstance(p, Partial) and p.reduce_op == "avg" for placements in case[1:] for p in placements)
        check_case(mesh, case, torch.float32 if averages else dtype, number, async_op=rng.random() < 0.3)
        kinds |= {(type(a).__name__, type(b).__name__) for a, b in zip(*case[1:])}
    return kinds


def count_collectives():
    mesh = init_device_mesh("cpu", (4,))
    even, skewed, root = RaggedShard((0,), (1, 1, 1, 1)), RaggedShard((0,), (1, 5, 0, 2)), RaggedShard((), (0, 0, 1, 0))
    grid = init_device_mesh("cpu", (2, 2))
    counts = {}
    for where, source, target in (
        (mesh, [even], [Replicate()]),
        (mesh, [skewed], [root]),
        (mesh, [root], [skewed]),
        (mesh, [skewed], [Shard(1)]),
        (mesh, [Shard(0)], [even]),
        (mesh, [root], [Replicate()]),
        (mesh, [Replicate()], [skewed]),
        (mesh, [skewed], [RaggedShard((0, 1), (1, 5, 0, 2))]),
        (mesh, [even], [Partial()]),
        (mesh, [Partial()], [even]),
        (mesh, [Partial()], [skewed]),
        (mesh, [Partial()], [root]),
        (grid, [Shard(0), Shard(0)], [RaggedShard((0,), (1, 3)), Replicate()]),
        (grid, [Shard(0), RaggedShard((0,), (1, 3))], [Replicate(), RaggedShard((0,), (1, 3))]),
        (grid, [Partial(), RaggedShard((0,), (1, 3))], [Replicate(), RaggedShard((0,), (1, 3))]),
    ):
        if isinstance(source[0], Partial):
            rest = distribute_tensor(torch.randn(8, 4), where, [Replicate(), *source[1:]])
            tensor = DTensor.from_local(rest.to_local(), where, source, shape=rest.shape, stride=rest.stride())
        else:
            tensor = distribute_tensor(torch.randn(8, 4), where, source)
        with CommDebugMode() as mode:
            tensor.redistribute(placements=target)
        names = ["".join(map(str, placements)) for placements in (source, target)]
        counts[" -> ".join(names)] = {str(op).split(".")[-1]: n for op, n in mode.get_comm_counts().items()}
    return counts


def check_nested_cuts_that_become_pending():
    mesh = init_device_mesh("cpu", (2, 2, 2))
    for nested in ((_StridedShard(0, split_factor=2), Shard(0), Shard(0)), (Replicate(), Shard(0), Shard(0))):
        owner = RaggedShard((), (0, 1))
        for operation in ("sum", "avg", "max", "min"):
            check_case(mesh, ((2,), nested, (owner, Partial(operation), Partial(operation))), torch.float32, 0)


def check_groups_of_some_ranks():
    """Half of the ranks make a group of their own; others, that some of them are in too, are made after it."""
    mesh, rank = init_device_mesh("cpu", (2, 2, 2)), dist.get_rank()
    owner = RaggedShard((), (0, 1))
    numbers = torch.arange(8.0)
    few = distribute_tensor(numbers, mesh, [owner, Shard(0), Shard(0)]).redistribute(placements=[owner, Replicate(), Shard(0)])
    assert few.to_local().tolist() == (numbers.chunk(2)[rank % 2].tolist() if rank >= 4 else [])
    ragged = RaggedShard((0,), (3, 1))
    all_ranks = distribute_tensor(numbers, mesh, [Shard(0), ragged, Replicate()])
    moved = all_ranks.redistribute(placements=[ragged, Replicate(), Replicate()])
    assert moved.to_local().tolist() == (numbers[:6] if rank < 4 else numbers[6:]).tolist()
    again = init_device_mesh("cpu", (4, 2))  # Groups that every rank of the world makes: they agree on names too.
    assert torch.equal(distribute_tensor(numbers, again, [Replicate(), owner]).full_tensor(), numbers)


def check_errors():
    rank = dist.get_rank()
    mesh, grid = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (1, 2))
    placement = [RaggedShard((0,), (1, 3))]
    good = torch.zeros(3 if rank == 0 else 9)
    tensor = distribute_tensor(torch.zeros(4, 3), mesh, placement)
    mine = [RaggedShard((0,), (1, 3) if rank else (3, 1))]
    numbers = DTensor.from_local(torch.zeros(4, 3, dtype=torch.int64), mesh, [Partial("avg")])
    errors = [
        error_of(DTensor.from_local, good, mesh, placement),
        error_of(DTensor.from_local, torch.zeros(5 if rank else 3), mesh, placement, shape=(4, 3), run_check=True),
        error_of(DTensor.from_local, good, mesh, placement, shape=(4 + rank, 3), run_check=True),
        error_of(DTensor.from_local, torch.zeros(9), mesh, mine, shape=(4, 3), run_check=True),
        error_of(distribute_tensor, torch.zeros(6, 3), mesh, placement),
        error_of(distribute_tensor, torch.zeros(4, 3), mesh, [RaggedShard((0,), (1, 1, 2))]),
        error_of(tensor.redistribute, placements=[RaggedShard((0,), (1, 4))]),
        error_of(tensor.redistribute, grid, placement),
        error_of(distribute_tensor, torch.zeros(4, 3), grid, [RaggedShard((0,), (1,)), Shard(0)]),
        error_of(distribute_tensor, torch.zeros(4, 3), grid, [RaggedShard((0,), (1,)), RaggedShard((0,), (1, 3))]),
        error_of(numbers.redistribute, placements=placement),
    ]
    assert DTensor.from_local(good, mesh, placement, shape=(4, 3), run_check=True).stride() == (3, 1)
    return errors


MESHES = {4: ((4,), (2, 2)), 6: ((6,), (2, 3), (3, 2), (6, 1)), 8: ((8,), (2, 4), (4, 2), (2, 2, 2))}


def kinds_of_random_cases(mesh_shapes, cases, seed, strided=None):
    ranks = torch.Size(mesh_shapes[0]).numel()
    return run_ranks(ranks, check_random_cases, mesh_shapes, cases, seed, strided)[0]


class RedistributeTest(expecttest.TestCase):
    def test_random_cases_are_bitwise_right_and_move_the_least(self):
        kinds = set()
        for ranks in (1, 2, 3, 5, 7):
            kinds |= kinds_of_random_cases(((ranks,),), 40, ranks)
        for ranks, mesh_shapes in MESHES.items():
            kinds |= kinds_of_random_cases(mesh_shapes, 120, ranks)
        names = ("Replicate", "Shard", "_StridedShard", "Partial", "RaggedShard")
        self.assertLessEqual(set(itertools.product(names, names)), kinds)

    def test_nested_cuts_that_become_pending(self):
        run_ranks(8, check_nested_cuts_that_become_pending)

    def test_plans_cost_nothing_per_rank(self):
        """A step for each of so many ranks would never end."""
        many = 10**12
        one, other = (RaggedShard((0,), Units([(0, many - 3 - n), (1, 1), (2, 1), (0, 1 + n)])) for n in (0, 1))
        for source, target in ((one, other), (one, Replicate()), (Replicate(), one), (Shard(0), one), (Partial(), one)):
            (step,) = plan((6, 4), (many,), (source,), (target,), (many - 2,))
            if isinstance(step, Exchange):
                self.assertEqual((len(step.send_splits), len(step.receive_splits)), (many, many))
        (step,) = plan((6, 4), (many,), (one,), (other,), (many - 2,))
        self.assertEqual((step.send_splits[many - 3], step.receive_splits.total), (16, 0))

    def test_groups_of_some_ranks(self):
        run_ranks(8, check_groups_of_some_ranks, timeout=30)

    def test_collectives(self):
        (counts, *others) = run_ranks(4, count_collectives)
        self.assertTrue(all(other == counts for other in others))
        self.assertEqual(
            counts,
            {
                "RS(0)[1,1,1,1] -> R": {"all_gather_into_tensor": 1},
                "RS(0)[1,5,0,2] -> RS()[0,0,1,0]": {"all_to_all_single": 1},
                "RS()[0,0,1,0] -> RS(0)[1,5,0,2]": {"all_to_all_single": 1},
                "RS(0)[1,5,0,2] -> S(1)": {"all_to_all_single": 1},
                "S(0) -> RS(0)[1,1,1,1]": {},
                "RS()[0,0,1,0] -> R": {"broadcast": 1},
                "R -> RS(0)[1,5,0,2]": {},
                "RS(0)[1,5,0,2] -> RS(0,1)[1,5,0,2]": {},
                "RS(0)[1,1,1,1] -> P(sum)": {},
                "P(sum) -> RS(0)[1,1,1,1]": {"reduce_scatter_tensor": 1},
                "P(sum) -> RS(0)[1,5,0,2]": {"all_to_all_single": 2},
                "P(sum) -> RS()[0,0,1,0]": {"reduce_": 1},
                "S(0)S(0) -> RS(0)[1,3]R": {"all_to_all_single": 1},
                "S(0)RS(0)[1,3] -> RRS(0)[1,3]": {"all_to_all_single": 1},
                "P(sum)RS(0)[1,3] -> RRS(0)[1,3]": {"all_reduce": 1},
            },
        )

    def test_errors_on_every_rank(self):
        first, second = run_ranks(2, check_errors)
        self.assertEqual(first, second)
        self.assertExpectedInline(
            "\n".join(first),
            """\
ValueError: DTensor.from_local with a ragged placement needs the global shape: pass shape= (it does not follow from 1-D local tensors)
ValueError: DTensor.from_local: shape (4, 3) under RS(0)[1,3]: rank 1 gave a local tensor of shape (5,), expected (9,)
ValueError: DTensor.from_local: RaggedShard(dims=(0,), local_units=(1, 3)) cannot cut shape (5, 3): its 5 slices over these dims do not divide into 4 units. Choose units whose sum divides 5
ValueError: DTensor.from_local: ranks gave different shapes or placements: (4, 3) (RaggedShard(dims=(0,), local_units=(1, 3)),), (4, 3) (RaggedShard(dims=(0,), local_units=(3, 1)),)
ValueError: RaggedShard(dims=(0,), local_units=(1, 3)) cannot cut shape (6, 3): its 6 slices over these dims do not divide into 4 units. Choose units whose sum divides 6
ValueError: RaggedShard(dims=(0,), local_units=(1, 1, 2)) has 3 local_units, but mesh dimension 0 has 2 ranks: give one number of units per rank
ValueError: RaggedShard(dims=(0,), local_units=(1, 4)) cannot cut shape (4, 3): its 4 slices over these dims do not divide into 5 units. Choose units whose sum divides 4
ValueError: cannot redistribute a DTensor on a mesh of (2,) on cpu to a mesh of (1, 2) on cpu: use the tensor's own mesh
ValueError: Shard(0) to the right of a ragged placement over dims (0,) would cut its units. Use (StridedRaggedShard, Shard(0)) instead, or give the ragged placement at most 0 dims
ValueError: two ragged placements on one tensor: use one RaggedShard on a flattened mesh dimension instead
ValueError: redistribution from (Partial(avg),) to (RaggedShard(dims=(0,), local_units=(1, 3)),): Partial('avg') needs floating point, got torch.int64: cast it""",  # noqa: E501
        )


if __name__ == "__main__":
    unittest.main()
