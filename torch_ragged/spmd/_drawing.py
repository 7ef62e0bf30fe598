"""The picture of an explanation: the modules of a model from top to bottom, with their weights and collectives, as SVG.

It must not depend on the number of layers: modules that differ in numbers only are drawn once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from torch_ragged.spmd._explained import Collective, ExplainedTensor, pattern_of, size
from torch_ragged.spmd._resolved import MeshShape

__all__ = ["draw_svg"]

_MODULE, _CALLS, _WIDTH = 24, 560, 1240  # Pixels: left edge of modules and of collectives, and the width of the picture.
_SQUARE, _LINE = 44, 18  # Pixels: the side of a weight, and the height of a line of text.
_MOST_CUTS = 8  # A weight that is cut into more pieces shows so many.
_STYLE = """<style>
@media (prefers-color-scheme: dark) {
.paper { fill: #16181d } .text { fill: #e6e6e6 } .weight { fill: #2b4a6b; stroke: #9cc3ee } .cut { stroke: #9cc3ee }
.flow { stroke: #8a8f98 } .asked { stroke: #7fd08a } .implicit { stroke: #ff9e6d }
.asked-head { fill: #7fd08a } .implicit-head { fill: #ff9e6d }
}
</style>"""
_COLORS = {
    "paper": "#ffffff",
    "weight": "#dbe9f8",
    "edge": "#2d6cb3",
    "flow": "#7a7f87",
    "asked": "#2f8f3f",
    "implicit": "#c8501e",
}


@dataclass
class _Row:
    """Modules that are alike: their weights and the collectives that belong to them.

    Attributes:
        names: the modules.
        weights: the tensors of the first of them.
        calls: collectives, each with the number of times that it is issued.
    """

    names: dict[str, None] = field(default_factory=dict)
    weights: list[ExplainedTensor] = field(default_factory=list)
    calls: dict[Collective, int] = field(default_factory=dict)

    @property
    def label(self) -> str:
        names = list(self.names)
        return f"{pattern_of(names) or '(root)'}{f'  x {len(names)}' if len(names) > 1 else ''}"

    @property
    def height(self) -> int:
        return max(_LINE + (_SQUARE + 2 * _LINE if self.weights else 0), _LINE * (len(self.calls) + 1)) + 14


def draw_svg(mesh: MeshShape, tensors: Sequence[ExplainedTensor], collectives: Sequence[Collective]) -> str:
    """An SVG document, in the colours of the reader's light or dark mode.

    Each row is a module. A weight is a square with the cuts of the placements that the model computes with. A dashed edge says
    that a unit keeps only a shard of it. Arrows are collectives, to the right in forward and to the left in backward. Green
    ones are those of the plan, and orange ones are implicit.
    """
    rows = _rows(tensors, collectives)
    body, top = [_text(_MODULE, 28, f"{mesh}: weights as the model computes with them, and collectives of one step")], 48
    for row in rows:
        body += _drawn(row, mesh, top)
        top += row.height
    body.insert(0, _line(_MODULE - 10, 44, _MODULE - 10, top - 6, "flow", _COLORS["flow"]))
    area = f'width="{_WIDTH}" height="{top + 8}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {area} font-family="sans-serif" font-size="12">'
    paper = f'<rect class="paper" {area} fill="{_COLORS["paper"]}"/>'
    return "\n".join([head, _STYLE, paper, *body, "</svg>", ""])


def _rows(tensors: Sequence[ExplainedTensor], collectives: Sequence[Collective]) -> list[_Row]:
    rows: dict[str, _Row] = {}

    def row_of(module: str) -> _Row:
        row = rows.setdefault(re.sub(r"\d+", "*", module), _Row())
        row.names[module] = None
        return row

    modules = [each.name.rpartition(".")[0] for each in tensors]
    places: dict[str, int] = {"": -1}  # In the model's order: a module stands before the first tensor in it.
    for index, module in enumerate(modules):
        while module not in places:
            places[module] = index
            module = module.rpartition(".")[0]
    owned = [(module, tensor, None) for module, tensor in zip(modules, tensors) if len(tensor.shape) > 1]
    called = [(_module_of(each), None, each) for each in collectives]
    found = sorted([*owned, *called], key=lambda item: (places.get(item[0], len(tensors)), item[0]))
    for module, weight, call in found:
        row = row_of(module)
        if weight is not None and len(row.names) == 1:
            row.weights.append(weight)
        if call is not None:
            alike = next((each for each in row.calls if _key(each) == _key(call)), call)
            row.calls[alike] = row.calls.get(alike, 0) + 1
    return list(rows.values())


def _module_of(call: Collective) -> str:
    """The module in whose row a collective stands."""
    return re.sub(r"\.?<.*", "", call.source) if call.cause == "boundary" else call.module


def _key(call: Collective) -> tuple[object, ...]:
    return (call.phase, call.kind, call.dims, call.nbytes, call.cause, call.op, re.sub(r"\d+", "*", call.source))


def _drawn(row: _Row, mesh: MeshShape, top: int) -> list[str]:
    parts = [_text(_MODULE, top + 12, row.label)]
    for index, weight in enumerate(row.weights):
        parts += _square(weight, mesh, _MODULE + index * (_SQUARE + 76), top + _LINE + 4)
    for index, (call, count) in enumerate(row.calls.items()):
        parts += _arrow(call, count, top + 8 + index * _LINE)
    return parts


def _square(weight: ExplainedTensor, mesh: MeshShape, left: int, top: int) -> list[str]:
    dashes = ' stroke-dasharray="4 3"' if weight.kept != weight.run else ""
    told = [f"{name}: {run}, kept as {kept}" for name, run, kept in zip(mesh.names, weight.run, weight.kept)]
    title = f"{weight.name} {'x'.join(map(str, weight.shape))}; {'; '.join(told)}; {size(weight.kept_bytes)} kept on rank 0"
    parts = [
        f'<rect class="weight" x="{left}" y="{top}" width="{_SQUARE}" height="{_SQUARE}" fill="{_COLORS["weight"]}" '
        f'stroke="{_COLORS["edge"]}"{dashes}><title>{escape(title)}</title></rect>'
    ]
    for placement, ranks in zip(weight.run, mesh.sizes):
        cut = re.search(r"Shard\((\d)", placement)
        pieces = min(ranks, _MOST_CUTS)
        for offset in [round(_SQUARE * piece / pieces) for piece in range(1, pieces)] if cut else []:
            ends = (left, top + offset, left + _SQUARE, top + offset)
            if cut and int(cut[1]) % 2:
                ends = (left + offset, top, left + offset, top + _SQUARE)
            parts.append(_line(*ends, "cut", _COLORS["edge"]))
    cuts = [f"{name} {run}" for name, run in zip(mesh.names, weight.run) if run != "Replicate()"]
    lines = [weight.name.rpartition(".")[2], ", ".join(cuts) or "whole"]
    return parts + [_text(left, top + _SQUARE + 14 * (1 + index), line) for index, line in enumerate(lines)]


def _arrow(call: Collective, count: int, y: int) -> list[str]:
    kind = "implicit" if call.cause in ("implicit", "model") else "asked"
    color, left, right = _COLORS[kind], _CALLS, _CALLS + 40
    tip, back = (right, right - 8) if call.phase == "forward" else (left, left + 8)
    reason = {"implicit": f"implicit, {call.op}", "boundary": call.source.rpartition("<")[1] + call.source.rpartition("<")[2]}
    times = f"  x {count}" if count > 1 else ""
    cause = f"({call.phase}, {reason.get(call.cause, call.cause)})"
    text = f"{call.kind} over {', '.join(call.dims)}, {size(call.nbytes)}{times}  {cause}"
    head = f"{tip},{y} {back},{y - 4} {back},{y + 4}"
    return [
        _line(left, y, right, y, kind, color),
        f'<polygon class="{kind}-head" points="{head}" fill="{color}"/>',
        _text(right + 10, y + 4, text),
    ]


def _line(x1: int, y1: int, x2: int, y2: int, kind: str, color: str) -> str:
    return f'<line class="{kind}" x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{color}"/>'


def _text(x: int, y: int, text: str) -> str:
    return f'<text class="text" x="{x}" y="{y}" fill="#1a1a1a">{escape(text)}</text>'
