"""What does the first step under a plan cost more than later ones? A tiny model of the zoo, in seconds of CPU time of rank 0.

    python -m benchmarks.parts.first_step                  # on 2 ranks of dp, 2 x 2 of dp and tp, 2 x 2 x 2
    python -m benchmarks.parts.first_step --layers 8 --mesh 2 2

torch finds the placements of an op once for its shapes and placements. The last column is a step whose batch has other
shapes. CPU time, as ranks share cores here: seconds of a clock would be those of the machine's load.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
import time
from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh

for folder in ("common", "spmd"):
    sys.path.insert(0, str(Path(__file__).parents[2] / "test" / folder))

from common import run_ranks  # noqa: E402
from zoo_models import batch_of, build  # noqa: E402

from benchmarks.common.measure import print_table, write_json  # noqa: E402
from torch_ragged.spmd import deferred_init, parallelize, zoo  # noqa: E402
from torch_ragged.tensor._plain_ops import all_ops  # noqa: E402


def measured(family: str, layers: int, mesh: tuple[int, ...]) -> dict[str, float]:
    """On each rank: the seconds of CPU time of the first step, of a later one and of one with other shapes; and the new ops."""
    names = ("replicas", "dp", "tp")[-len(mesh) :] if len(mesh) > 1 else ("dp",)
    plan = getattr(zoo, family)(dp=("replicas", "dp") if len(mesh) > 2 else "dp", tp="tp" if len(mesh) > 1 else None)
    make = functools.partial(build, family, num_hidden_layers=layers)
    model = parallelize(deferred_init(make), plan, init_device_mesh("cpu", mesh, mesh_dim_names=names))
    optimizer = torch.optim.AdamW(model.parameters())
    seconds, ops = list[float](), [all_ops.ops]
    for rows in (8, 8, 8, 16):
        batch, start = batch_of(family, rows), time.process_time()
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.process_time() - start)
        ops.append(all_ops.ops)
    first, _, third, other = seconds
    return {"first": first, "ops": ops[1] - ops[0], "third": third, "other shapes": other, "new ops": ops[4] - ops[3]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", default="llama", choices=zoo.__all__, help="function of the zoo (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=2, help="of the model (default: %(default)s)")
    parser.add_argument("--mesh", type=int, nargs="+", help="dp; dp and tp; or replicas, dp and tp (default: 2 of each)")
    parser.add_argument("--json", metavar="PATH", help="write the numbers as JSON")
    args = parser.parse_args()
    rows = []
    for mesh in [tuple(args.mesh)] if args.mesh else [(2,), (2, 2), (2, 2, 2)]:
        found = run_ranks(math.prod(mesh), measured, args.family, args.layers, mesh, timeout=1200.0)[0]
        rows.append({"mesh": " x ".join(map(str, mesh)), **{name: round(value, 2) for name, value in found.items()}})
    print_table(f"CPU seconds of a step of {args.family}, {args.layers} layers", rows)
    write_json(args.json, {"steps": rows})


if __name__ == "__main__":
    main()
