"""The command line of ``torch-ragged plan``, which is also ``python -m torch_ragged.offline``.

It must check all options before it plans anything.
"""

from __future__ import annotations

import argparse
import difflib
import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Optional

import torch

from torch_ragged._command_line import OneLineParser, check_file, command_name, ends_quietly
from torch_ragged.fsdp import Granularity, blocks, elements, rows, segments, tensor
from torch_ragged.fsdp.layout._advice import advise
from torch_ragged.fsdp.layout._weighted import check_weights
from torch_ragged.offline._drawing import draw_svg, draw_text
from torch_ragged.offline._fit import Setting, fitting
from torch_ragged.offline._memory import Budget, Precision
from torch_ragged.offline._model_plan import ModelPlan, ModelPlanner, granularity_policy
from torch_ragged.offline._models import BUILT_IN, Model, load_model
from torch_ragged.offline._muon import muon_plan
from torch_ragged.offline._plot import check_plot_path, plot
from torch_ragged.offline._report import Report

__all__ = ["main"]

_DESCRIPTION = """\
Plan the FSDP buffers of a model without a GPU or a process group. It shows padding, bytes per collective and memory per rank at
several FSDP sizes, and compares them with FSDP2 (torch.chunk on dimension 0) and with LCM (a buffer of whole rows, as in
Megatron-FSDP; torch_ragged/offline/_peers.py describes the model of it).
"""
_EPILOG = """\
examples:
  %(prog)s llama-3-8b --ranks 8 --memory 80GB --batch 1 --sequence 4096
  %(prog)s deepseek-v3 --granularity rows:128
  %(prog)s path/to/config.json --ranks 64,320,1024 --replicas 4 --json plan.json --plot plan.png
  %(prog)s my_package.models:build --granularity blocks:128x128 --apply all
  %(prog)s gpt-oss-120b --granularity rows:128 --ranks 64 --explain block.0 --svg block.svg
  %(prog)s llama-3-70b --ranks 2,4,8,16 --offload 60,200,2000
  %(prog)s deepseek-v3 --ranks 64,512 --muon
  %(prog)s llama-3-70b --weights 141,141,141,141,80,80,80,80
"""
_FORMS: dict[str, Callable[..., Granularity]] = {
    r"elements": elements,
    r"tensor": tensor,
    r"rows:(\d+)": lambda n: rows(int(n)),
    r"rows:(\d+)/(\d+)": lambda n, within: rows(int(n), within=int(within)),
    r"blocks:(\d+)x(\d+)": lambda h, w: blocks(int(h), int(w)),
}
_FORMS_TEXT = "elements, rows:N, rows:N/WITHIN, blocks:HxW or tensor"
_SEQUENCE = 4096
_RESERVE = 5
Fused = dict[str, list[tuple[int, Optional[Granularity]]]]
"""By parameter: the size and the granularity of each segment; None for that of the parameter."""


@ends_quietly
def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool with the arguments ``argv`` (default: the command line's). Returns the exit status:
    2 for bad input, 1 if the model does not fit in ``--memory`` or ``--offload`` at any of the FSDP sizes."""
    parser = _plan_parser()
    try:
        options = parser.parse_args(argv)
        granularity, fused, precision, model = _check_options(options)
    except ValueError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    every_matrix = options.apply == "all"
    policy = granularity_policy(granularity, every_matrix, fused)
    planner = ModelPlanner(model, policy, precision.alignment)
    plans = tuple(planner.plan(ranks, options.weights) for ranks in options.ranks)
    of_muon = (
        tuple(muon_plan(model, ranks, policy, precision.alignment) for ranks in options.ranks)
        if options.muon and not options.explain
        else None
    )
    setting = Setting(options.batch or 1, options.sequence or _SEQUENCE, replicas=options.replicas)
    of_step = None
    if options.memory:
        reserve = math.ceil(options.memory * (_RESERVE if options.reserve is None else options.reserve) / 100)
        of_step = {plan.ranks: fitting(planner, plan, precision, setting, options.memory, reserve) for plan in plans}
    where = "all matrices" if every_matrix else "expert matrices"
    words = granularity.text if granularity.kind == "elements" else f"{granularity.text} on {where}, else elements()"
    words += f"; segments of {len(fused):,} fused weight{'s' * (len(fused) > 1)}" if fused else ""
    report = Report(model, words, precision, options.replicas, options.limit / 100, plans, options.offload, of_muon, of_step)
    if options.explain:
        print(_explain(plans[0], options.explain, report, options.svg))
    else:
        print(report.text())
    if options.json:
        Path(options.json).write_text(json.dumps(report.as_dict(), indent=1) + "\n")
    if options.plot:
        plot(report, options.plot)
    return 0 if report.fits else 1


def _explain(plan: ModelPlan, group: str, report: Report, svg: str | None) -> str:
    """The drawing of ``group``, with the reason for its padding and advice. If ``svg`` is given, draw it to this file too."""
    layout = plan.group_layouts()[group]
    title = layout.describe(group, report.precision.param.itemsize)
    if svg:
        Path(svg).write_text(draw_svg(layout, title))
    lines = [title, f"the bound: {layout.forced_by}", "", draw_text(layout)]
    advice = advise({group: layout}, report.limit)
    return "\n".join([*lines, *(["", *advice] if advice else [])])


def _plan_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog=command_name("torch_ragged.offline"),
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("model", help=f"{', '.join(BUILT_IN)}; or a Hugging Face config.json; or module:callable, built on the meta device")
    add("--ranks", type=_sizes, help="FSDP sizes, separated by commas (default: 8 to 1024, powers of two)")
    add(
        "--weights",
        type=_weights_option,
        metavar="W,W,...",
        help="an integer per rank, at least 0: shards in proportion to them, as by fully_shard(weights=...). The FSDP size is "
        "their number; FSDP2 and LCM are shown with equal shards",
    )
    add("--replicas", type=_positive_option, default=1, help="HSDP replicas: the world is FSDP size * replicas (default: 1)")
    add(
        "--granularity",
        default="elements",
        help="blocks that are never cut: elements (default), rows:N, rows:N/WITHIN, blocks:HxW or tensor",
    )
    add(
        "--segments",
        metavar="REGEX=SIZE,...",
        action="append",
        default=[],
        help="parameters whose names match are fused weights with segments of these sizes along dimension 0; each is cut by "
        "itself. SIZE:GRANULARITY gives a segment its own granularity: 'qkv=4096:tensor,1024:rows:64,1024:rows:64'. May be "
        "given several times",
    )
    add(
        "--apply",
        choices=("experts", "all"),
        help="matrices that have this granularity (default: experts, or all if the model has no experts)",
    )
    add(
        "--experts",
        metavar="REGEX",
        help="pattern of the names of expert matrices (default: the family's names; for module:callable, 'experts')",
    )
    add("--shard-dtype", type=_dtype_option, default="float32", help="dtype of sharded parameters (default: float32)")
    add(
        "--param-dtype",
        type=_dtype_option,
        default="bfloat16",
        help="dtype in compute and all-gathers, as MixedPrecisionPolicy's (default: bfloat16)",
    )
    add("--reduce-dtype", type=_dtype_option, default="float32", help="dtype in reduce-scatters (default: float32)")
    add("--optimizer-dtype", type=_dtype_option, default="float32", help="dtype of the optimizer's values (default: float32)")
    add(
        "--states",
        type=_natural,
        default=2,
        help="optimizer values per parameter (default: 2, Adam's moments; with --shard-dtype bfloat16 and a master copy: 3)",
    )
    add("--limit", type=_percent, default=5.0, help="recommend FSDP sizes with at most this percentage of padding (default: 5)")
    add(
        "--memory",
        type=_memory_option,
        metavar="SIZE",
        help="bytes that a rank may use on the device, such as 80GB or 74GiB: does a training step fit? If it fits at no FSDP "
        "size, the exit status is 1; also for --offload",
    )
    add(
        "--reserve",
        type=_percent,
        metavar="PERCENT",
        help="with --memory: percentage of it that a step must leave for CUDA's context, NCCL's buffers and fragmentation, "
        f"which are not counted (default: {_RESERVE})",
    )
    add("--batch", type=_positive_option, help="with --memory: sequences per rank (default: 1)")
    add("--sequence", type=_positive_option, help=f"with --memory: tokens per sequence (default: {_SEQUENCE})")
    add(
        "--offload",
        type=_budget,
        metavar="DEVICE,HOST[,FILES]",
        help="GiB per rank on the device, in host memory and in files: shows how large a model fits under ZeRO-3 by each kind "
        "of Offload, and the policy that this one needs. Activations and gathered parameters are not counted: subtract them",
    )
    add(
        "--muon",
        action="store_true",
        help="also show Muon's matrices of the blocks under muon_policy: how many stay whole, what the others and the padding "
        "cost, and the balance of the work, all modelled",
    )
    add("--explain", metavar="GROUP", help="draw the buffer of this group at one FSDP size, instead of the tables")
    add("--svg", metavar="FILE", help="with --explain: also draw the buffer to this file")
    add("--json", metavar="FILE", help="also write all results to this file")
    add("--plot", metavar="FILE", help="plot padding against FSDP size (.png, .svg, .pdf; needs matplotlib)")
    return parser


# --- checks, before any work ---------------------------------------------------------------------------------------


def _check_options(options: argparse.Namespace) -> tuple[Granularity, Fused, Precision, Model]:
    """Check the options together, load the model, and fill in defaults.

    Raises:
        ValueError: an option is wrong, or does not go with another one.
    """
    granularity = _granularity("--granularity", options.granularity)
    dtypes = options.param_dtype, options.reduce_dtype, options.optimizer_dtype
    precision = Precision(*dtypes, options.states, options.shard_dtype)
    if options.svg and not options.explain:
        raise ValueError("--svg needs --explain GROUP: it draws the same buffer")
    for name in ("batch", "sequence", "reserve"):
        if getattr(options, name) is not None and not options.memory:
            raise ValueError(f"--{name} needs --memory SIZE: it belongs to the step that may fit")
    if options.reserve is not None and options.reserve >= 100:
        raise ValueError(f"--reserve {options.reserve:g}: expected a percentage below 100")
    if options.memory and options.param_dtype.itemsize < 2:
        raise ValueError(
            f"--memory needs the dtype of compute, such as bfloat16 for float8 weights, got --param-dtype {options.param_dtype}"
        )
    if options.memory and torch.distributed.is_initialized():
        raise ValueError("--memory makes a process group of its own: run it in a process that has none")
    if options.explain and options.memory:
        raise ValueError("--explain and --memory do not go together: leave one out")
    if options.explain and len(options.ranks or ()) != 1:
        raise ValueError("--explain draws one FSDP size: give one size with --ranks")
    for option in ("svg", "json", "plot"):
        check_file(option, getattr(options, option))
    if options.plot:
        check_plot_path(options.plot)
    if options.weights:
        _check_weights(options)
    options.ranks = options.ranks or [2**n for n in range(3, 11)]
    model = load_model(options.model, options.experts)
    if options.apply == "experts" and not model.has_experts:
        raise ValueError(f"{model.name} has no expert matrices: use --apply all, or match their names with --experts REGEX")
    options.apply = options.apply or ("experts" if model.has_experts else "all")
    if options.explain and options.explain not in model.groups:
        close = difflib.get_close_matches(options.explain, model.groups, 3, 0.5) or [*model.groups][:3]
        raise ValueError(f"{model.name} has no group {options.explain!r}; close names: {', '.join(close)}")
    return granularity, _fused_options(options.segments, model), precision, model


def _check_weights(options: argparse.Namespace) -> None:
    """Check ``--weights``, and take the FSDP size from it."""
    others = [name for name in ("ranks", "explain", "memory", "offload", "muon", "plot") if getattr(options, name)]
    if others:
        raise ValueError(f"--weights and --{others[0]} do not go together: leave one out")
    try:
        check_weights(options.weights, len(options.weights))
    except ValueError as error:
        raise ValueError(f"--weights: {error}") from None
    options.ranks = [len(options.weights)]


def _fused_options(texts: Sequence[str], model: Model) -> Fused:
    """The segments of each parameter that an option ``--segments`` names."""
    found: Fused = {}
    parameters = [one for group in model.groups.values() for one in group]
    for text in texts:
        regex, equals, sizes = text.rpartition("=")
        if not equals:
            raise ValueError(f"--segments {text!r}: expected REGEX=SIZE,SIZE,... or REGEX=SIZE:GRANULARITY,...")
        try:
            pattern, parts = re.compile(regex), [_segment(part) for part in sizes.split(",")]
            named = [one for one in parameters if pattern.search(one.name)]
            for one in named:
                segments([size for size, _ in parts], elements()).check(one.name, one.shape)
        except (re.error, argparse.ArgumentTypeError, ValueError) as error:
            raise ValueError(f"--segments {text!r}: {error}") from None
        if not named:
            raise ValueError(f"--segments {text!r}: {model.name} has no parameter whose name matches {regex!r}")
        for one in named:
            if one.name in found:
                raise ValueError(f"--segments {text!r}: {one.name} matches twice: give each parameter its segments once")
            found[one.name] = parts
    return found


def _segment(text: str) -> tuple[int, Optional[Granularity]]:
    size, colon, own = text.partition(":")
    return _positive_option(size), _granularity("granularity", own) if colon else None


def _granularity(option: str, text: str) -> Granularity:
    for form, make in _FORMS.items():
        match = re.fullmatch(form, text)
        if match:
            return make(*match.groups())
    raise ValueError(f"{option} {text!r}: expected {_FORMS_TEXT}")


def _sizes(text: str) -> list[int]:
    return sorted({_positive_option(part) for part in text.split(",")})


def _weights_option(text: str) -> list[int]:
    return [_natural(part) for part in text.split(",")]


def _positive_option(text: str) -> int:
    return _integer(text, 1)


def _natural(text: str) -> int:
    return _integer(text, 0)


def _integer(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"expected an integer of at least {least}, got {text!r}")
    return int(text)


def _memory_option(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(MB|MiB|GB|GiB|TB|TiB)", text)
    if not match or not float(match[1]):
        raise argparse.ArgumentTypeError(f"expected a number with MB, MiB, GB, GiB, TB or TiB, such as 80GB, got {text!r}")
    power = "MGT".index(match[2][0]) + 2
    return int(float(match[1]) * (1024 if "i" in match[2] else 1000) ** power)


def _budget(text: str) -> Budget:
    if not re.fullmatch(r"\d+(\.\d+)?(,\d+(\.\d+)?){1,2}", text):
        raise argparse.ArgumentTypeError(
            f"expected GiB per rank, DEVICE,HOST or DEVICE,HOST,FILES, such as 60,100,1000, got {text!r}"
        )
    device, host, files, *_ = [*(int(float(part) * 2**30) for part in text.split(",")), 0]
    return Budget(device, host, files)


def _percent(text: str) -> float:
    if not re.fullmatch(r"\d+(\.\d*)?", text):
        raise argparse.ArgumentTypeError(f"expected a percentage, got {text!r}")
    return float(text)


def _dtype_option(text: str) -> torch.dtype:
    dtype = getattr(torch, text, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise argparse.ArgumentTypeError(f"expected a floating-point type of torch, such as bfloat16, got {text!r}")
    return dtype
