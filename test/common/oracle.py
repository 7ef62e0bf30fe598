"""The meaning of placements by definition: literal tensor operations, left to right, with no use of the package's geometry.

Also random placements for property tests, redistributions between them against that meaning, and what every placement is.
"""

import copy
import io
import math
import pickle
import random

import torch
import torch.distributed as dist
from common import run_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode

from torch_ragged.tensor._cut_placement import has_flat, has_own_rules
from torch_ragged.tensor.interleaved_placement_types import InterleavedShard
from torch_ragged.tensor.placement_types import RaggedShard, _Ragged, normalize_placements

MESHES = {4: ((4,), (2, 2)), 6: ((6,), (2, 3), (3, 2), (6, 1)), 8: ((8,), (2, 4), (4, 2), (2, 2, 2))}
DTYPES = (torch.float32, torch.bfloat16, torch.int64)
SIZES = (1, 2, 2, 3, 4, 4, 5, 6, 8)
REDUCE = {"sum": lambda t: t.sum(0), "avg": lambda t: t.mean(0), "max": lambda t: t.amax(0), "min": lambda t: t.amin(0)}
OPERATION = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def _chunk(tensor, parts, index, dim, split_factor=1):
    """torch.chunk that always gives ``parts`` pieces; with a split factor the concatenated chunks of each piece."""

    def one(tensor, parts, index):
        step = -(-tensor.size(dim) // parts)
        start = min(index * step, tensor.size(dim))
        return tensor.narrow(dim, start, min(step, tensor.size(dim) - start))

    return torch.cat([one(one(tensor, split_factor, piece), parts, index) for piece in range(split_factor)], dim)


def _interleaved(tensor, parts, index, placement):
    """The chunk of each segment, one after the other."""
    unit = tensor.size(placement.dim) // sum(placement.ratios)
    segments = tensor.split([unit * ratio for ratio in placement.ratios], placement.dim)
    return torch.cat([_chunk(segment, parts, index, placement.dim) for segment in segments], placement.dim)


def _runs(tensor, placement, index, factor):
    """A ragged placement's run of each piece, as tensors of (slices of the prefix, *rest of the shape)."""
    rows = tensor.size(0) // factor if factor > 1 else 0
    pieces = [tensor.narrow(0, piece * rows, rows) for piece in range(factor)] if factor > 1 else [tensor]
    depth, units = len(placement.dims), placement.local_units
    runs = []
    for piece in pieces:
        slices = piece.reshape(math.prod(piece.shape[:depth]), *piece.shape[depth:])
        unit = slices.size(0) // sum(units)
        runs.append(slices[unit * sum(units[:index]) : unit * sum(units[: index + 1])])
    return runs


def local_of(full, mesh_shape, placements, coordinate):
    """The local tensor at a coordinate: each placement is applied to what the ones to its left leave over."""
    tensor, runs, depth, strided = full, None, 0, False
    cuts = list(zip(placements, mesh_shape, coordinate, strict=True))
    for place, (placement, _, _) in enumerate(cuts):  # Segments of dimension 0 come before a strided run to their left.
        rows = [cut for cut in cuts[place + 1 :] if isinstance(cut[0], (Shard, InterleavedShard)) and cut[0].dim == 0]
        if getattr(placement, "split_factor", 1) > 1 and isinstance(placement, _Ragged):
            if any(isinstance(cut[0], InterleavedShard) and len(cut[0].ratios) > 1 for cut in rows):
                run = (RaggedShard(placement.dims, placement.local_units), *cuts[place][1:])
                cuts = [*cuts[:place], *rows, run, *(cut for cut in cuts[place + 1 :] if cut not in rows)]
                break
    for placement, parts, index in cuts:
        if isinstance(placement, InterleavedShard) and runs is None:
            tensor = _interleaved(tensor, parts, index, placement)
            continue
        if isinstance(placement, InterleavedShard):
            at = InterleavedShard(placement.dim - depth + 1, placement.ratios)
            if placement.dim >= depth and not (strided and placement.dim == 0):
                runs = [_interleaved(run, parts, index, at) for run in runs]
                continue
            placement = Shard(placement.dim)  # One segment.
        if isinstance(placement, _Ragged):
            factor = getattr(placement, "split_factor", 1)
            runs, depth = _runs(tensor, placement, index, factor), len(placement.dims)
            strided = factor > 1
        elif isinstance(placement, (Shard, _StridedShard)) and parts > 1:
            factor = getattr(placement, "split_factor", 1)
            if runs is None:
                tensor = _chunk(tensor, parts, index, placement.dim, factor)
            elif placement.dim == 0 and strided:
                keep = len(runs) // parts
                runs = runs[index * keep : (index + 1) * keep]
            else:
                runs = [_chunk(run, parts, index, placement.dim - depth + 1, factor) for run in runs]
    return tensor if runs is None else torch.cat([run.reshape(-1) for run in runs])


def random_units(rng, prefix, ranks):
    """Units whose sum divides ``prefix``; zeros, one owner and even ones are common."""
    total = rng.choice([d for d in range(1, prefix + 1) if prefix % d == 0] or [1, 3])
    kind = rng.choice(("any", "one owner", "even"))
    if kind == "even" and prefix % ranks == 0:
        return (1,) * ranks
    if kind == "one owner":
        owner = rng.randrange(ranks)
        return tuple(int(r == owner) for r in range(ranks))
    edges = sorted([0, total] + [rng.randint(0, total) for _ in range(ranks - 1)])
    return tuple(b - a for a, b in zip(edges, edges[1:]))


def random_placement(rng, shape, mesh_shape, mesh_dim, strided=None):
    """Any kind of placement for one mesh dimension; it may have no meaning beside those of other dimensions.

    Also ``strided`` ones, where that is StridedRaggedShard.
    """
    ranks = mesh_shape[mesh_dim]
    kinds = ("ragged", "ragged", "ragged", "replicate", "shard", "shard", "strided", "interleaved", "partial")
    kind = rng.choice(kinds + ("strided ragged",) if strided else kinds)
    if kind == "partial":
        return Partial(rng.choice(("sum", "avg", "max", "min")))
    if kind == "replicate" or not shape and kind != "ragged":
        return Replicate()
    if kind == "shard":
        return Shard(rng.randrange(len(shape)))
    if kind == "interleaved":
        dim = rng.randrange(len(shape))
        even = shape[dim] // (ranks * math.gcd(*(mesh_shape[i] for i in range(len(mesh_shape)) if i != mesh_dim), 1))
        edges = sorted(rng.sample(range(1, even), rng.randint(0, min(even - 1, 3)))) if even > 1 else []
        return InterleavedShard(dim, [b - a for a, b in zip([0, *edges], [*edges, max(even, 1)])])
    if kind == "strided":
        return _StridedShard(rng.randrange(len(shape)), split_factor=rng.choice((2, 3)))
    ndims, factor, base = rng.randint(0, len(shape)), 1, list(shape)
    if kind == "strided ragged":
        factor = math.prod(mesh_shape[mesh_dim + 1 :]) if rng.random() < 0.8 else rng.randint(1, 4)
        base[0] //= factor
    units = random_units(rng, math.prod(base[:ndims]), ranks)
    dims = tuple(range(ndims))
    return strided(dims, units, factor) if kind == "strided ragged" else RaggedShard(dims, units)


# -- redistributions ------------------------------------------------------------------------------------------------------


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
    """A shape and two placements of it that have a meaning; at least one is ragged or interleaved."""
    while True:
        shape = tuple(0 if rng.random() < 0.03 else rng.choice(SIZES) for _ in range(rng.choice((0, 1, 2, 2, 3, 3))))
        pair = []
        for _ in range(2):
            for _ in range(20):
                placements = tuple(random_placement(rng, shape, mesh_shape, dim, strided) for dim in range(len(mesh_shape)))
                if rng.random() < 0.5 and pair:  # Often only some mesh dimensions change.
                    placements = tuple(rng.choice(choice) for choice in zip(pair[0], placements, strict=True))
                try:
                    pair.append(normalize_placements(placements, shape, mesh_shape))
                    break
                except ValueError:
                    continue
        if len(pair) == 2 and any(map(has_own_rules, pair)):
            return shape, *pair


def contributions(shape, mesh, source, dtype, generator):
    """Values at every coordinate of the pending mesh dimensions, whose reductions are exact: (mesh shape or 1s, *shape)."""
    sizes = [size if isinstance(p, Partial) else 1 for size, p in zip(mesh.shape, source, strict=True)]
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
    for dim, (old, new) in enumerate(zip(source, target, strict=True)):
        if isinstance(new, Partial) and old != new:  # What ranks contribute must reduce to the value.
            after = after.clone()
            dist.all_reduce(after, OPERATION[new.reduce_op], group=mesh.get_group(dim))
            after = after / mesh.size(dim) if new.reduce_op == "avg" else after
    assert after.shape == expected.shape and after.dtype == dtype and torch.equal(after, expected), (
        f"{where}\n{after} {expected}"
    )
    assert not has_flat(target) or after.is_contiguous(), where
    if isinstance(traffic, Traffic):
        numbers = torch.arange(torch.Size(shape).numel()).view(shape)
        held, wanted = (set(local_of(numbers, mesh_shape, p, coordinate).flatten().tolist()) for p in (source, target))
        assert traffic.received == len(wanted - held), f"{where}: received {traffic.received}, gains {len(wanted - held)}"


def check_random_cases(mesh_shapes, cases, seed, strided=None, permuted=False):
    rng = random.Random(seed)
    meshes = [init_device_mesh("cpu", shape) for shape in mesh_shapes]
    if permuted:
        orders = [torch.tensor(rng.sample(range(mesh.size()), mesh.size())) for mesh in meshes]
        meshes = [DeviceMesh("cpu", order.view(shape)) for order, shape in zip(orders, mesh_shapes, strict=True)]
    kinds = set()
    for number in range(cases):
        mesh = meshes[number % len(meshes)]
        case, dtype = random_case(rng, tuple(mesh.shape), strided), rng.choice(DTYPES)
        averages = any(isinstance(p, Partial) and p.reduce_op == "avg" for placements in case[1:] for p in placements)
        check_case(mesh, case, torch.float32 if averages else dtype, number, async_op=rng.random() < 0.3)
        kinds |= {(type(a).__name__, type(b).__name__) for a, b in zip(*case[1:])}
    return kinds


def kinds_of_random_cases(mesh_shapes, cases, seed, strided=None, permuted=False):
    ranks = torch.Size(mesh_shapes[0]).numel()
    return run_ranks(ranks, check_random_cases, mesh_shapes, cases, seed, strided, permuted)[0]


# -- values ----------------------------------------------------------------------------------------------------------------


def check_is_a_frozen_value(test, placement):
    test.assertEqual(pickle.loads(pickle.dumps(placement)), placement)
    test.assertEqual(copy.deepcopy(placement), placement)
    with test.assertRaises(AttributeError):
        placement.dims = (1,)
    buffer = io.BytesIO()
    torch.save(placement, buffer)
    buffer.seek(0)
    test.assertEqual(torch.load(buffer, weights_only=True), placement)


def check_is_no_other_placement(test, placement):
    test.assertNotIsInstance(placement, (Shard, _StridedShard))
    test.assertFalse(placement.is_replicate() or placement.is_partial())
    test.assertFalse(hasattr(placement, "dim"))
    test.assertNotEqual(placement, Replicate())
