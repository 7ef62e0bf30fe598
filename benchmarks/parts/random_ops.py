"""One device's numbers, op by op: the share of cases in which the local tensors of all ranks are those of one device.

    python -m benchmarks.parts.random_ops [--json PATH] [--cases 6]

On 8 gloo ranks, as meshes of one, two and three dimensions: every random op, for shapes of 1 to 5 dimensions, even and uneven,
several dtypes, and each kind of placement. In a case, one mesh dimension has the kind that the column names; the others have
Replicate or Shard. A case counts as equal if, on every rank, the bits of the local tensor and the state of the generator are
those that one device has after the same draw. DTensor alone runs the same cases without ``single_device``. It has no
interleaved and no ragged placements. A case that raises an error is listed as refused, and does not count as equal.

Source: the table of random operators in appendix C of the paper on eager-mode SPMD.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import math
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from benchmarks.common.measure import on_ranks, print_table, write_json
from torch_ragged import InterleavedShard, RaggedShard
from torch_ragged.random import single_device
from torch_ragged.tensor.placement_types import normalize_placements

WRONG, REFUSED, EQUAL = range(3)
MESHES = ((8,), (2, 4), (2, 2, 2))
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
ALL = (*FLOATS, torch.int64)
OPS: dict[str, tuple[tuple[torch.dtype, ...], Callable[[Any], Any]]] = {
    "normal_": (FLOATS, lambda x: x.normal_(0.5, 2)),
    "uniform_": (FLOATS, lambda x: x.uniform_(-1, 3)),
    "exponential_": (FLOATS, lambda x: x.exponential_(2.0)),
    "geometric_": (ALL, lambda x: x.geometric_(0.3)),
    "cauchy_": (FLOATS, lambda x: x.cauchy_()),
    "log_normal_": (FLOATS, lambda x: x.log_normal_()),
    "random_": (ALL, lambda x: x.random_(100)),
    "bernoulli_": (ALL, lambda x: x.bernoulli_(0.3)),
    "bernoulli": (FLOATS, lambda x: torch.bernoulli(torch.full_like(x, 0.25))),
    "rand_like": (FLOATS, torch.rand_like),
    "randn_like": (FLOATS, torch.randn_like),
    "randint_like": (ALL, lambda x: torch.randint_like(x, 10)),
    "dropout": (FLOATS, lambda x: F.dropout(x, 0.3)),
    "dropout in place": (FLOATS, lambda x: F.dropout(x, 0.3, inplace=True)),
    "mask of native_dropout": (FLOATS, lambda x: torch.native_dropout(x, 0.3, True)[1]),
    "multinomial": (FLOATS[:2], lambda x: torch.multinomial(torch.ones_like(x), 2, True)),
    "kaiming_uniform_": (FLOATS, nn.init.kaiming_uniform_),
    "trunc_normal_": (FLOATS[:2], lambda x: nn.init.trunc_normal_(x, a=-1, b=1)),
    "orthogonal_": (FLOATS[:2], nn.init.orthogonal_),
}
_INITS = ("kaiming_uniform_", "trunc_normal_", "orthogonal_")  # Of parameters, which are never Partial.
KINDS = ("Replicate", "Partial", "Shard", "strided", "interleaved", "ragged")
_OWN = KINDS[4:]  # Those that DTensor alone does not have.
_NDIMS = {"multinomial": (2, 2), "kaiming_uniform_": (2, 5), "orthogonal_": (2, 4)}  # Others: 1 to 5.


def cases(op: str, kind: str, mesh_shape: tuple[int, ...], count: int) -> Iterator[tuple[torch.Tensor, tuple[Placement, ...]]]:
    """Tensors of one device, and placements for them. They follow from the arguments, so they are equal on all ranks."""
    rng = random.Random(f"{op} {kind} {mesh_shape}")
    for number in itertools.count():
        ndim = rng.randint(*_NDIMS.get(op, (1, 5)))
        shape = tuple(rng.choice((1, 2, 3, 4, 5, 8)) for _ in range(ndim))
        if kind in ("strided", "interleaved"):
            shape = (16, *shape[1:])
        position, others = rng.randrange(len(mesh_shape)), [Replicate(), *map(Shard, range(ndim))]
        chosen = [rng.choice(others) for _ in mesh_shape]
        chosen[position] = _placement(rng, kind, shape, mesh_shape[position], math.prod(mesh_shape[position + 1 :]))
        if kind == "strided" and len(mesh_shape) > 1:  # As FSDP over tensor parallelism has it: Shard(0) lies to the right.
            chosen = [_StridedShard(0, split_factor=mesh_shape[-1]), *[Replicate()] * (len(mesh_shape) - 2), Shard(0)]
        if kind in _OWN:
            try:
                chosen = list(normalize_placements(tuple(chosen), shape, mesh_shape))
            except ValueError:  # Without a meaning, such as Shard(0) beside flat intervals.
                continue
        values = torch.rand(shape, generator=torch.Generator().manual_seed(number)) * 4
        yield values.to(rng.choice(OPS[op][0])), tuple(chosen)
        count -= 1
        if not count:
            return


def _placement(rng: random.Random, kind: str, shape: tuple[int, ...], ranks: int, right: int) -> Placement:
    if kind == "Partial":
        return Partial()
    if kind == "Shard":
        return Shard(rng.randrange(len(shape)))
    if kind == "strided":
        return _StridedShard(0, split_factor=2)
    if kind == "interleaved":
        return InterleavedShard(0, rng.choice((2, (1, 1))) if ranks == 8 else rng.choice((2, 4 if ranks * right <= 4 else 2)))
    if kind == "ragged":
        length = rng.randint(0, len(shape))
        edges = [0, *sorted(rng.randint(0, math.prod(shape[:length])) for _ in range(ranks - 1)), math.prod(shape[:length])]
        return RaggedShard(tuple(range(length)), tuple(b - a for a, b in itertools.pairwise(edges)))
    return Replicate()


def verdict(function: Callable[[Any], Any], full: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> int:
    """EQUAL if this rank has its part of what one device draws, REFUSED if the op raises, WRONG if neither."""
    torch.manual_seed(1)
    want, state = function(full.clone()), torch.get_rng_state()
    wholes = [Replicate() if placement.is_partial() else placement for placement in placements]
    local = distribute_tensor(full.clone(), mesh, wholes, src_data_rank=None).to_local()
    for placement, coordinate in zip(placements, mesh.get_coordinate() or ()):
        if placement.is_partial() and coordinate:  # Rank 0 has the values; the others add nothing.
            local = torch.zeros_like(local)
    x = DTensor.from_local(local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride())
    torch.manual_seed(1)
    try:
        got = function(x)
    except (RuntimeError, NotImplementedError):
        return REFUSED
    whole = got.redistribute(placements=[Replicate() if p.is_partial() else p for p in got.placements])
    mine = distribute_tensor(want, mesh, whole.placements, src_data_rank=None)
    is_equal = torch.equal(whole.to_local(), mine.to_local()) and torch.equal(torch.get_rng_state(), state)
    return EQUAL if is_equal else WRONG


def measure(rank: int, options: Any) -> list[dict[str, Any]]:
    warnings.simplefilter("ignore")  # DTensor alone says that it draws local numbers on a CPU.
    logging.disable(logging.WARNING)  # It advises flattened meshes to redistributions.
    meshes, found = {shape: init_device_mesh("cpu", shape) for shape in MESHES}, []
    for op, kind, shape in itertools.product(OPS, KINDS, MESHES):
        if kind == "Partial" and op in _INITS:
            continue
        for full, placements in cases(op, kind, shape, options.cases):
            for is_on in (True, False):
                if is_on or kind not in _OWN:
                    with single_device(is_on):
                        found.append((op, kind, is_on, verdict(OPS[op][1], full, meshes[shape], placements)))
                    if is_on and found[-1][-1] != EQUAL and rank == 0:
                        print(("wrong:", "refused:")[found[-1][-1]], op, full.dtype, tuple(full.shape), placements)
    on_all = torch.tensor([result for *_, result in found])
    dist.all_reduce(on_all, dist.ReduceOp.MIN)
    rows: list[dict[str, Any]] = []
    for name in (*OPS, "all"):
        row: dict[str, Any] = {"op": name}
        for kind in KINDS:
            results: dict[bool, list[int]] = {True: [], False: []}
            for (op, of, is_on, _), result in zip(found, on_all.tolist()):
                if of == kind and name in (op, "all"):
                    results[is_on].append(result)
            ours, alone = results[True], results[False]
            if not ours:
                row[kind] = "-"
                continue
            row[kind] = f"{ours.count(EQUAL)}/{len(ours)}" + (f" ({alone.count(EQUAL)})" if alone else "")
            row[kind] += f", {ours.count(WRONG)} wrong" if WRONG in ours else ""
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--json", help="write the results to this file")
    add("--cases", type=int, default=6, help="per op, kind of placement and mesh; default: %(default)s")
    options = parser.parse_args()
    rows = on_ranks(8, measure, options)
    print_table("Cases that equal one device / all cases; in brackets: by DTensor alone", rows)
    write_json(options.json, {"table": rows})


if __name__ == "__main__":
    main()
