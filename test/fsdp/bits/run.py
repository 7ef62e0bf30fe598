"""SameBits on 1 to 8 ranks: ``python test/fsdp/bits/run.py --steps 200 --json out/bits.json``, or ``make bits``.

Every pair of values of :data:`FEATURES` occurs in one configuration, and each configuration trains on all numbers of ranks.
Losses, norms, parameters and states must be those of one process with plain torch, to the bit.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "fuzz"), str(HERE.parents[1] / "common"), str(HERE.parents[2])]

import one_process  # noqa: E402
from common import run_ranks, stop_ranks  # noqa: E402
from fuzz_cover import Cover  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402

from torch_ragged.fsdp import ZERO1, ZERO2, ZERO3, rows  # noqa: E402

RANKS = (1, 2, 3, 4, 6, 8)
FEATURES = {
    "model": ("Dense", "Experts"),
    "optimizer": ("adamw", "sgd", "adamw8bit", "muon"),
    "dtype": ("float32", "bfloat16"),
    "pieces": ("8", "1", "3", "11"),
    "norm": ("2", "1", "inf"),
    "layout": ("ZERO3", "ZERO2", "ZERO1", "HSDP"),
    "blocks": ("elements", "rows"),
    "recomputes": ("no", "yes"),
    "subtree": ("1", "2", "4"),
}


def run(case: dict[str, str], steps: int) -> None:
    """On each rank."""
    import torch.distributed as dist

    options = {
        "recomputes": case["recomputes"] == "yes",
        "mp_policy": one_process.BF16 if case["dtype"] == "bfloat16" else None,
    }
    if case["blocks"] == "rows":
        options["orig_param_policy"] = lambda *_: rows(16)
    if case["layout"] != "HSDP":
        options["placements"] = {"ZERO1": ZERO1, "ZERO2": ZERO2, "ZERO3": ZERO3}[case["layout"]]
    elif dist.get_world_size() % 2 == 0:
        options["mesh"] = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicas", "shards"))
    kind, make = getattr(one_process, case["model"]), getattr(one_process, case["optimizer"])
    one_process.check(
        kind, make, int(case["pieces"]), norm_type=float(case["norm"]), steps=steps, subtree=int(case["subtree"]), **options
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--cases", type=int, default=1000, help="the first so many configurations")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--json", type=Path, default=Path("out/bits.json"))
    args = parser.parse_args()
    cover, rows_of_table, wrong = Cover(FEATURES, lambda _: None), [], 0
    for case in cover.runs[: args.cases]:
        row = {**case, "wrong": []}
        begun = time.monotonic()
        for ranks in args.ranks:
            try:
                run_ranks(ranks, run, case, args.steps, timeout=3600)
            except AssertionError as error:
                row["wrong"].append(f"{ranks} ranks: {error}"[:500])
                wrong += 1
        row["seconds"] = round(time.monotonic() - begun)
        print(
            f"{len(rows_of_table) + 1} of {len(cover.runs)}: {', '.join(case.values())}: {row['wrong'] or 'equal'}", flush=True
        )
        rows_of_table.append(row)
    stop_ranks()
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps({"steps": args.steps, "ranks": list(args.ranks), "rows": rows_of_table}, indent=1))
    print(f"{len(rows_of_table)} configurations on {list(args.ranks)} ranks, {args.steps} steps each: {wrong} wrong")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
