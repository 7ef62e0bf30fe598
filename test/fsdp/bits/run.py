"""SameBits on 1 to 8 ranks: ``python test/fsdp/bits/run.py --steps 200 --json out/bits.json``, or ``make bits``.

Every pair of values of :data:`FEATURES` occurs in one configuration. Each configuration trains on all numbers of ranks, and
from a checkpoint of one of them on the next number. Losses, norms, parameters and states must be those of one process with
plain torch, to the bit.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "fuzz"), str(HERE.parents[1] / "common"), str(HERE.parents[2])]

import one_process  # noqa: E402
import torch.distributed as dist  # noqa: E402
from common import run_ranks, stop_ranks  # noqa: E402
from fuzz_cover import Cover  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402

from torch_ragged import checkpoint  # noqa: E402
from torch_ragged.fsdp import ZERO1, ZERO2, ZERO3, MixedPrecisionPolicy, rows  # noqa: E402

RANKS = (1, 2, 3, 4, 6, 8)
Expected = tuple[list[tuple[float, float]], dict[str, str]]
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
    "verify": ("4", "no"),  # A false alarm is an error.
}


def expected_of(case: dict[str, str], steps: int) -> Expected:
    kind, make = getattr(one_process, case["model"]), getattr(one_process, case["optimizer"])
    return one_process.plain(kind, make, int(case["pieces"]), _policy(case), float(case["norm"]), steps)


def _policy(case: dict[str, str]) -> MixedPrecisionPolicy | None:
    return one_process.BF16 if case["dtype"] == "bfloat16" else None


def run(case: dict[str, str], steps: int, expected: Expected, folder: str, resumes: bool = False) -> None:
    """On each rank: all steps, with a save in the middle if there is a folder. Or those after that save."""
    options: dict[str, Any] = {"recomputes": case["recomputes"] == "yes", "subtree": int(case["subtree"])}
    options["verify_every"] = None if case["verify"] == "no" else int(case["verify"])
    if case["blocks"] == "rows":
        options["orig_param_policy"] = lambda *_: rows(16)
    if case["layout"] != "HSDP":
        options["placements"] = {"ZERO1": ZERO1, "ZERO2": ZERO2, "ZERO3": ZERO3}[case["layout"]]
    elif dist.get_world_size() % 2 == 0:
        options["mesh"] = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicas", "shards"))
    kind, make, pieces = getattr(one_process, case["model"]), getattr(one_process, case["optimizer"]), int(case["pieces"])
    model, optimizer, same = one_process.made(kind, make, pieces, _policy(case), **options)
    state = checkpoint.TrainState(model, optimizer, extra={"same": same})
    middle = steps // 2

    def trained(*of_steps: int) -> list[tuple[float, float]]:
        return one_process.train(same, model, optimizer, pieces, range(*of_steps), norm_type=float(case["norm"]))

    numbers, ends = expected
    if resumes:
        checkpoint.load(folder, state)
        assert same.step == middle, same.step
        found, numbers = trained(middle, steps), numbers[middle:]
    else:
        found = trained(middle)
        if folder:
            checkpoint.save(folder, state)
        found += trained(middle, steps)
    wrong = [at for at, pair in enumerate(zip(found, numbers, strict=True)) if pair[0] != pair[1]]
    assert not wrong, f"from number {wrong[0]} on, {found[wrong[0]]} is not {numbers[wrong[0]]}"
    one_process.assert_ends(one_process.digests(model, optimizer), ends)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--first", type=int, default=1, help="the number of the first configuration")
    parser.add_argument("--cases", type=int, default=1000, help="so many configurations")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--json", type=Path, default=Path("out/bits.json"))
    args = parser.parse_args()
    cases = Cover(FEATURES, lambda _: None).runs
    table, wrong = [], 0
    for number, case in list(enumerate(cases))[args.first - 1 :][: args.cases]:
        row: dict[str, Any] = {**case, "wrong": []}
        begun = time.monotonic()
        expected = expected_of(case, args.steps)
        saves = args.ranks[number % len(args.ranks)]
        resumes = args.ranks[(number + 1) % len(args.ranks)]
        row["resumed"] = [saves, resumes]
        with tempfile.TemporaryDirectory() as folder:
            runs = [(ranks, folder if ranks == saves else "", False) for ranks in args.ranks]
            for ranks, *options in [*runs, (resumes, folder, True)]:
                try:
                    run_ranks(ranks, run, case, args.steps, expected, *options, timeout=3600)
                except AssertionError as error:
                    row["wrong"].append(f"{ranks} ranks{', resumed' if options[1] else ''}: {error}"[:500])
                    wrong += 1
        row["seconds"] = round(time.monotonic() - begun)
        result = row["wrong"] or f"equal, and from {saves} ranks on {resumes} ({row['seconds']} s)"
        print(f"{number + 1} of {len(cases)}: {', '.join(case.values())}: {result}", flush=True)
        table.append(row)
    stop_ranks()
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps({"steps": args.steps, "ranks": list(args.ranks), "rows": table}, indent=1))
    print(f"{len(table)} configurations on {list(args.ranks)} ranks, {args.steps} steps each: {wrong} wrong")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
