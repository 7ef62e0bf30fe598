"""The command line of ``torch-ragged spmd``, which is also ``python -m torch_ragged.spmd``.

It must check all options before it runs a model, and load no weights.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torch_ragged._command_line import OneLineParser, check_file, command_name, ends_quietly
from torch_ragged.spmd._explain import check, explain
from torch_ragged.spmd._plan import Plan
from torch_ragged.spmd._resolved import MeshShape

__all__ = ["main"]

_SPMD_DESCRIPTION = """\
Show what a plan does to a Hugging Face model on a mesh of any size, from one process and without weights.

check: all errors of the plan at once, or the placement of every tensor.
explain: also every collective of one forward and backward with its cause, the sums of a step, and the memory per rank.
"""
_SPMD_EXAMPLES = """\
examples:
  %(prog)s check --model path/to/config.json --plan plan.json --mesh dp=64,tp=8
  %(prog)s explain --model path/to/config.json --plan plan.json --mesh dp=64,tp=8 --batch 128 --sequence 4096 --svg plan.svg
  %(prog)s explain --model path/to/config.json --plan transformers --mesh dp=4,tp=8

plan.json is what Plan.to_json() returns. The plan "transformers" is the model's own, with the mesh dimensions tp and dp.
"""


@ends_quietly
def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool with the arguments ``argv`` (default: the command line's). Returns the exit status, 2 for bad input.

    The errors of a plan have a line each. All other errors have one line.
    """
    parser = _parser()
    try:
        options = parser.parse_args(argv)
        for name in ("json", "svg"):
            check_file(name, getattr(options, name))
        mesh = _mesh_option(options.mesh)
        model = _model(options.model)
        plan = _plan_option(options.plan, model, mesh)
        records = check(plan, model, mesh)
        if options.command == "check":
            print(records)
            return 0
        ids = torch.zeros(options.batch or math.prod(mesh.sizes), options.sequence, dtype=torch.int64, device="cpu")
        try:
            found = explain(plan, model, mesh, input_ids=ids, labels=ids)
        except Exception as error:  # Any error of the model's code, or of an op that cannot take its placements.
            raise ValueError(f"a step of {type(model).__name__} fails: {type(error).__name__}: {_first_line(error)}") from None
    except ValueError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    print(found)
    if options.json:
        Path(options.json).write_text(found.to_json())
    if options.svg:
        found.svg(options.svg)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog=command_name("torch_ragged.spmd"),
        description=_SPMD_DESCRIPTION,
        epilog=_SPMD_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("command", choices=("check", "explain"), help="what to show")
    add("--model", required=True, metavar="FILE", help="a Hugging Face config.json, or a folder with one")
    add("--plan", required=True, metavar="FILE", help="the JSON of a plan; or transformers, for the model's own plan")
    add("--mesh", required=True, metavar="NAME=SIZE,...", help="the mesh dimensions, such as dp=64,tp=8")
    add("--batch", type=_positive_count, default=None, help="sequences in the whole batch (default: one per rank)")
    add("--sequence", type=_positive_count, default=128, help="tokens of a sequence (default: 128)")
    add("--json", metavar="FILE", help="explain: also write all results to this file")
    add("--svg", metavar="FILE", help="explain: also draw the model to this file")
    return parser


def _positive_count(text: str) -> int:
    if not re.fullmatch(r"0*[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text!r}")
    return int(text)


def _mesh_option(text: str) -> MeshShape:
    """``dp=64,tp=8``

    Raises:
        ValueError: the text is something else, or has a name twice.
    """
    parts = [re.fullmatch(r"(\w+)=0*([1-9]\d*)", part) for part in text.split(",")]
    names = [part[1] for part in parts if part]
    if None in parts or len(set(names)) < len(parts):
        raise ValueError(f"--mesh {text!r}: expected different names with their sizes, such as dp=64,tp=8")
    return MeshShape(tuple(names), tuple([int(part[2]) for part in parts if part]))


def _model(source: str) -> nn.Module:
    """The model of a configuration, on the meta device.

    Raises:
        ValueError: transformers is not installed, there is no such file, or transformers cannot build it.
    """
    try:
        # Here, so that --help and wrong options need neither transformers nor its seconds of imports.
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise ValueError("--model needs transformers: pip install transformers") from None
    path = Path(source) / "config.json" if Path(source).is_dir() else Path(source)
    try:
        fields: dict[str, Any] = json.loads(path.read_text())
        kind = fields.pop("model_type")
        # Libraries print notes: the standard output has the tables alone. A training step has no cache of keys.
        with contextlib.redirect_stdout(sys.stderr), torch.device("meta"):
            return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**fields, "use_cache": False}))
    except Exception as error:  # Any error of a configuration, of which transformers has many kinds.
        why = f"{type(error).__name__}: {_first_line(error)}"
        raise ValueError(f"--model {source}: expected the config.json of a Hugging Face model: {why}") from None


def _plan_option(source: str, model: nn.Module, mesh: MeshShape) -> Plan:
    if source == "transformers":
        dims = {option: name if name in mesh.names else None for option, name in (("tp", "tp"), ("fsdp", "dp"))}
        return Plan.from_transformers(model, **dims)
    try:
        return Plan.from_json(Path(source).read_text())
    except OSError as error:
        raise ValueError(f"--plan {source}: {error.strerror}: give a file that Plan.to_json() has written") from None
    except ValueError as error:
        raise ValueError(f"--plan {source}: {error}") from None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no text"])[0]
