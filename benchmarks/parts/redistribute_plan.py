"""Time to plan a redistribution at many ranks: the first time for a pair of placements, and from the cache.

    python -m benchmarks.parts.redistribute_plan [--json PATH] [--ranks 1024]

Plans are integers only: no process group, no tensors. Each rank makes its own. The first time is measured at several ranks,
with all caches cleared before each; "largest" is the worst of these. Units are random, the tensor has 8 rows for each rank.
"""

from __future__ import annotations

import argparse
import random
import statistics

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from benchmarks.common.measure import interleaved, microseconds, print_table, write_json
from torch_ragged import RaggedShard, StridedRaggedShard
from torch_ragged.tensor import _ownership, _route
from torch_ragged.tensor._redistribute import plan_of

Pair = tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...], tuple[Placement, ...]]
REPETITIONS = 5


def pairs(ranks: int) -> dict[str, Pair]:
    """A shape, a mesh shape, source and target placements for each name."""
    rows, tp = 8 * ranks, 8
    generator = random.Random(0)

    def ragged(parts: int, total: int) -> tuple[int, ...]:
        edges = sorted(generator.randint(0, total) for _ in range(parts - 1))
        return tuple(stop - start for start, stop in zip((0, *edges), (*edges, total)))

    shape, flat = (rows, 4096), (ranks,)
    skewed, other = RaggedShard((0,), ragged(ranks, rows)), RaggedShard((0,), ragged(ranks, rows))
    elements = RaggedShard((0, 1), ragged(ranks, rows * 4096))
    root = RaggedShard((), tuple(int(rank == 5) for rank in range(ranks)))
    strided = StridedRaggedShard((0,), ragged(ranks // tp, rows // tp), tp)
    inner = RaggedShard((0,), ragged(ranks // tp, rows))
    one_dimension: dict[str, tuple[Placement, Placement]] = {
        "ragged -> Replicate": (skewed, Replicate()),
        "Replicate -> ragged": (Replicate(), skewed),
        "ragged -> other ragged": (skewed, other),
        "ragged -> one owner": (skewed, root),
        "one owner -> ragged": (root, skewed),
        "Shard(0) -> ragged": (Shard(0), skewed),
        "ragged -> Shard(0)": (skewed, Shard(0)),
        "Shard(1) -> ragged": (Shard(1), skewed),
        "ragged -> Shard(1)": (skewed, Shard(1)),
        "Shard(1) -> ragged elements": (Shard(1), elements),
        "Partial -> ragged": (Partial(), skewed),
        "ragged -> Partial": (skewed, Partial()),
    }
    two_dimensions: dict[str, tuple[tuple[Placement, ...], tuple[Placement, ...]]] = {
        "strided, Shard(0) -> Replicate, Shard(0)": ((strided, Shard(0)), (Replicate(), Shard(0))),
        "strided, Shard(0) -> Replicate, Replicate": ((strided, Shard(0)), (Replicate(), Replicate())),
        "strided, Shard(0) -> ragged, Replicate": ((strided, Shard(0)), (inner, Replicate())),
        "ragged, Shard(1) -> Shard(0), Replicate": ((inner, Shard(1)), (Shard(0), Replicate())),
    }
    return {
        **{name: (shape, flat, (source,), (target,)) for name, (source, target) in one_dimension.items()},
        **{name: (shape, (ranks // tp, tp), source, target) for name, (source, target) in two_dimensions.items()},
    }


def clear_caches() -> None:
    """Forget all plans, and what they were made of."""
    for module in (_ownership, _route):
        for function in vars(module).values():
            if hasattr(function, "cache_clear"):
                function.cache_clear()
    plan_of.cache_clear()


def coordinates(mesh_shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The first, the last and some other coordinates of a mesh."""
    return [tuple(int(share * (size - 1)) for size in mesh_shape) for share in (0, 0.005, 0.5, 1)]


def first_times(pair: Pair) -> list[float]:
    """Microseconds of planning with empty caches, at several coordinates."""
    times = []
    for _ in range(REPETITIONS):
        for coordinate in coordinates(pair[1]):
            clear_caches()
            times.append(microseconds(lambda: plan_of(*pair, coordinate)))
    return times


def cached_times(pair: Pair) -> list[float]:
    """Microseconds of getting a plan that is there."""
    last = coordinates(pair[1])[-1]
    return interleaved({"": lambda: plan_of(*pair, last)}, rounds=50)[""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the results to this file too")
    parser.add_argument("--ranks", type=int, default=1024, help="a multiple of 8")
    options = parser.parse_args()
    rows = []
    for name, pair in pairs(options.ranks).items():
        first, cached = first_times(pair), cached_times(pair)
        milliseconds = {"first ms": statistics.median(first) / 1e3, "largest ms": max(first) / 1e3}
        rows.append({"redistribution": name, **milliseconds, "cached us": statistics.median(cached)})
    print_table(f"torch {torch.__version__}: CPU time to plan a redistribution at {options.ranks} ranks", rows)
    write_json(options.json, {"ranks": options.ranks, "plans": rows})


if __name__ == "__main__":
    main()
