"""Runs a command as a rehearsal: ``python -m rehearsal --order late --seed 0 -- python -m pytest test/fsdp``.

The environment variables that it sets reach all child processes, so each rank of the command is rehearsed too.
"""

from __future__ import annotations

import argparse
import os
import sys

from rehearsal.build import BUILD, HERE

LIBRARIES = ("libcudart.so.13", "libcuda.so.1", "libnccl.so.2")


def environment(order: str = "late", seed: int = 0, check: str = "off", devices: int = 8, null: bool = False) -> dict[str, str]:
    """The variables of a rehearsal.

    Args:
        order: when pending work of streams runs: ``"late"``, ``"early"`` or ``"random"``.
        seed: of the random order.
        check: what the sanitizer does with accesses that no event orders: ``"off"``, ``"report"`` or ``"fail"``.
        devices: the number of GPUs that the process sees.
        null: nothing runs; memory has no pages, and a rank needs no others.
    """
    missing = [name for name in LIBRARIES if not (BUILD / name).exists()]
    if missing:
        raise SystemExit(f"{', '.join(missing)} of {BUILD} are not built: run `make rehearsal`")
    path = [str(HERE.parent), str(BUILD), *filter(None, [os.environ.get("PYTHONPATH")])]
    alone = {"TORCH_NCCL_RANKS_PER_ROOT": "1048576"}  # Else ranks beyond the 128th wait for an identifier from another rank.
    return {
        **(alone if null else {}),
        "LD_PRELOAD": ":".join(str(BUILD / name) for name in LIBRARIES),
        "PYTHONPATH": os.pathsep.join(path),
        "REHEARSAL_ORDER": order,
        "REHEARSAL_SEED": str(seed),
        "REHEARSAL_CHECK": check,
        "REHEARSAL_DEVICES": str(devices),
        "REHEARSAL_NULL": str(int(null)),
        "TORCH_RAGGED_TEST_DEVICE": "cuda",
        "TORCH_RAGGED_KERNELS": "torch",  # Triton's kernels need the GPU itself.
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m rehearsal", description=__doc__)
    parser.add_argument("--order", choices=("late", "early", "random"), default="late")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", choices=("off", "report", "fail"), default="off", help="accesses that no event orders")
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--null", action="store_true", help="a device that runs nothing, and a rank without others")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="after --")
    arguments = parser.parse_args()
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        parser.error("give a command after --")
    if command[0] == "python":
        command[0] = sys.executable
    settings = environment(arguments.order, arguments.seed, arguments.check, arguments.devices, arguments.null)
    os.execvpe(command[0], command, {**os.environ, **settings})


if __name__ == "__main__":
    main()
