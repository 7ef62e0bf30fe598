"""How far from one process is training under a plan of the zoo? Unchanged models of transformers and diffusers, with dropout.

    python -m benchmarks.step.spmd_zoo                                # 20 steps of five families on 8 ranks, in float32
    python -m benchmarks.step.spmd_zoo --checkpoints --accumulate 2   # the same with these
    python -m benchmarks.step.spmd_zoo --mesh 2 2 2 --families llama  # replicas 2, dp 2, tp 2

Models come from ``deferred_init``. The sequence is cut over ``tp`` between matrices, blocks are units over ``dp`` (of
``replicas`` too, if the mesh has three dimensions), and experts are cut. Both runs have the same script and seeds. For each
family: the largest difference of losses of all steps, and of gradients, parameter by parameter, relative to the largest element
of the parameter's gradient (plus 1e-3). Models are those of test/spmd/zoo_models.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

for folder in ("common", "spmd"):
    sys.path.insert(0, str(Path(__file__).parents[2] / "test" / folder))

from common import run_ranks  # noqa: E402
from zoo_models import train_both  # noqa: E402

from benchmarks.common.measure import print_table, write_json  # noqa: E402
from torch_ragged.spmd import Plan, zoo  # noqa: E402
from torch_ragged.spmd._plan import UnitRule  # noqa: E402

FAMILIES = ("llama", "mixtral", "dit", "t5", "vit")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--families", nargs="+", default=FAMILIES, choices=zoo.__all__, help="functions of the zoo (default: %(default)s)")
    add("--mesh", type=int, nargs="+", default=(4, 2), help="dp and tp; or replicas, dp and tp (default: %(default)s)")
    add("--steps", type=int, default=20, help="steps of SGD (default: %(default)s)")
    add("--mode", choices=("eager", "static"), default="eager", help="of parallelize (default: %(default)s)")
    add("--accumulate", type=int, default=1, help="backwards per step (default: %(default)s)")
    add("--checkpoints", action="store_true", help="compute blocks again for backward")
    add("--bfloat16", action="store_true", help="units compute in bfloat16 and add gradients in float32; the process: float32")
    add("--json", help="also write the numbers to this file")
    return parser.parse_args()


def plan_of(family: str, mesh: tuple[int, ...], narrow: bool) -> Plan:
    """The plan of a family, on a mesh of two or three dimensions."""
    plan = getattr(zoo, family)(dp=("replicas", "dp")[-len(mesh) + 1 :], sequence_parallel=True)
    options = (("mp_policy", MixedPrecisionPolicy(torch.bfloat16, torch.float32)),) if narrow else ()
    return Plan([dataclasses.replace(rule, options=options) if isinstance(rule, UnitRule) else rule for rule in plan.rules])


def trained(family: str, mesh: tuple[int, ...], narrow: bool, options: dict[str, Any]) -> tuple[Any, tuple[str, ...]]:
    """On each rank: the differences of each step, and the outermost static modules."""
    model, differences = train_both(family, plan_of(family, mesh, narrow), mesh, **options)
    return differences, model.static_modules.report.modules if options["mode"] == "static" else ()


def main() -> None:
    args = parse_args()
    mesh = tuple(args.mesh)
    options = {name: getattr(args, name) for name in ("steps", "mode", "accumulate", "checkpoints")}
    rows, found = [], {}
    for family in args.families:
        start = time.monotonic()
        steps, static = run_ranks(math.prod(mesh), trained, family, mesh, args.bfloat16, options, timeout=3600.0)[0]
        loss, (grad, worst) = max(step[0] for step in steps), max(step[1:] for step in steps)
        found[family] = {
            "loss": loss,
            "gradient": grad,
            "parameter": worst,
            "static": static,
            "seconds": time.monotonic() - start,
        }
        told = {"static": len(static)} if args.mode == "static" else {}
        told |= {"losses": f"{loss:.1e}", "gradients": f"{grad:.1e}", "most in": worst}
        rows.append({"family": family, **told, "seconds": round(found[family]["seconds"])})
        print(rows[-1], flush=True)
    kind = f"{args.mode}, {args.steps} steps of {args.accumulate} backwards"
    print_table(f"largest differences from one process ({kind}, mesh {mesh})", rows)
    if args.json:
        write_json(args.json, {"torch": torch.__version__, "arguments": vars(args), "families": found})


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
