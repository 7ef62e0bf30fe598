"""Lines that a user writes to distribute a model: those of our plans, counted, beside published numbers of others.

It must not build a model: a plan is printed as a user would write it, and its lines are counted.

    PYTHONPATH=. python -m benchmarks.parts.plan_lines [--json PATH]

A plan is that of a function of the zoo, in full, as its docstring has it. The model and the script do not change. The numbers
of the paper and of torchtitan are those of the paper's table 2; besides, the paper changes 2 lines of the model, and
torchtitan's way changes 6 to 8.
"""

from __future__ import annotations

import argparse
import inspect
import textwrap

from benchmarks.common.measure import print_table, write_json
from torch_ragged.spmd import zoo

PUBLISHED = {"llama": (29, 57), "mixtral": (38, 79), "dit": (36, 48)}
SAME = {"qwen3": "llama", "qwen3_moe": "mixtral"}  # Their docstrings refer to another one.


def lines_of(name: str) -> int:
    """The lines of the plan in a docstring, which a test compares with the plan itself."""
    _, _, rest = (inspect.getdoc(getattr(zoo, SAME.get(name, name))) or "").partition("::\n\n")
    return len(textwrap.dedent(rest[: rest.index("\n\n")]).splitlines())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="PATH", help="write the numbers as JSON")
    arguments = parser.parse_args()
    rows = []
    for name in sorted(zoo.__all__, key=lambda each: (each not in PUBLISHED, each)):
        plan, sequence = getattr(zoo, name)(), getattr(zoo, name)(sequence_parallel=True)
        paper, torchtitan = PUBLISHED.get(name, ("", ""))
        rows.append(
            {
                "model": name,
                "plan": lines_of(name),
                "with sequence parallelism": lines_of(name) + len(sequence.rules) - len(plan.rules),
                "changed in the model": 0,
                "paper": paper,
                "torchtitan": torchtitan,
            }
        )
    print_table("Lines of a plan for tensor and data parallelism", rows)
    write_json(arguments.json, {"lines": rows})


if __name__ == "__main__":
    main()
