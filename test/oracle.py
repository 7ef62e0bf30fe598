"""The meaning of placements by definition: literal tensor operations, left to right, with no use of the package's geometry.

Also random placements for property tests.
"""

import math

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from torch_ragged.placement_types import RaggedShard, _Ragged


def _chunk(tensor, parts, index, dim, split_factor=1):
    """torch.chunk that always gives ``parts`` pieces; with a split factor the concatenated chunks of each piece."""

    def one(tensor, parts, index):
        step = -(-tensor.size(dim) // parts)
        start = min(index * step, tensor.size(dim))
        return tensor.narrow(dim, start, min(step, tensor.size(dim) - start))

    return torch.cat([one(one(tensor, split_factor, piece), parts, index) for piece in range(split_factor)], dim)


def _runs(tensor, placement, index):
    """A ragged placement's run of each piece, as tensors of (slices of the prefix, *rest of the shape)."""
    factor = getattr(placement, "split_factor", 1)
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
    for placement, parts, index in zip(placements, mesh_shape, coordinate):
        if isinstance(placement, _Ragged):
            runs, depth = _runs(tensor, placement, index), len(placement.dims)
            strided = getattr(placement, "split_factor", 1) > 1
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
    kinds = ("ragged", "ragged", "ragged", "replicate", "shard", "shard", "strided", "partial")
    kind = rng.choice(kinds + ("strided ragged",) if strided else kinds)
    if kind == "partial":
        return Partial(rng.choice(("sum", "avg", "max", "min")))
    if kind == "replicate" or not shape and kind != "ragged":
        return Replicate()
    if kind == "shard":
        return Shard(rng.randrange(len(shape)))
    if kind == "strided":
        return _StridedShard(rng.randrange(len(shape)), split_factor=rng.choice((2, 3)))
    ndims, factor, base = rng.randint(0, len(shape)), 1, list(shape)
    if kind == "strided ragged":
        factor = math.prod(mesh_shape[mesh_dim + 1 :]) if rng.random() < 0.8 else rng.randint(1, 4)
        base[0] //= factor
    units = random_units(rng, math.prod(base[:ndims]), ranks)
    dims = tuple(range(ndims))
    return strided(dims, units, factor) if kind == "strided ragged" else RaggedShard(dims, units)
