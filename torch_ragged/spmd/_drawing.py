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

__all__ = ["draw_model_svg"]

_MODULE, _CALLS, _WIDTH = 24, 560, 1240  # Pixels: left edge of modules and of collectives, and the width of the picture.
_SQUARE, _PITCH, _LINE = 44, 84, 18  # Pixels: the side of a weight, the height of a line of weights, and of a line of text.
_SQUARES = 4  # In a line.
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
    """Modules that are alike, with the weights and collectives of the modules in them that have parameters.

    Attributes:
        names: the modules.
        weights: the weights of the first of them, each with its name in the module.
        calls: the text and the phase of collectives, with the number of times that they are issued.
    """

    names: dict[str, None] = field(default_factory=dict)
    weights: dict[str, ExplainedTensor] = field(default_factory=dict)
    calls: dict[tuple[str, str], int] = field(default_factory=dict)

    @property
    def label(self) -> str:
        names = list(self.names)
        return f"{pattern_of(names) or '(root)'}{f'  x {len(names)}' if len(names) > 1 else ''}"

    @property
    def height(self) -> int:
        lines = -(-len(self.weights) // _SQUARES)
        return max(_LINE + lines * _PITCH, _LINE * len(self.calls)) + 14


def draw_model_svg(mesh: MeshShape, tensors: Sequence[ExplainedTensor], collectives: Sequence[Collective]) -> str:
    """An SVG document, in the colours of the reader's light or dark mode.

    Each row is a module, with the modules in it that have parameters. A weight is a square with the cuts of the placements that
    the model computes with. A dashed edge says that a unit keeps only a shard of it. Arrows are collectives, to the right in
    forward and to the left in backward. Green ones are those of the plan, and orange ones are implicit.
    """
    rows = _rows(tensors, collectives)
    body, top = [_caption(_MODULE, 28, f"{mesh}: weights as the model computes with them, and the collectives of a step")], 48
    for row in rows:
        body += _drawn(row, mesh, top)
        top += row.height
    body.insert(0, _line(_MODULE - 10, 44, _MODULE - 10, top - 6, "flow", _COLORS["flow"]))
    area = f'width="{_WIDTH}" height="{top + 8}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {area} font-family="sans-serif" font-size="12">'
    paper = f'<rect class="paper" {area} fill="{_COLORS["paper"]}"/>'
    return "\n".join([head, _STYLE, paper, *body, "</svg>", ""])


def _rows(tensors: Sequence[ExplainedTensor], collectives: Sequence[Collective]) -> list[_Row]:
    """In the model's order: a module stands before the first tensor in it."""
    owners = [each.name.rpartition(".")[0] for each in tensors]
    places: dict[str, int] = {"": -1}
    for index, module in enumerate(owners):
        while module not in places:
            places[module] = index
            module = module.rpartition(".")[0]
    leaves = set(owners) - {""}

    def home(name: str, module: str) -> tuple[str, str]:
        """The module in whose row ``name`` stands, a tensor or activation of ``module``; and its name there."""
        row = module.rpartition(".")[0] if module in leaves else module
        return row, name.removeprefix(f"{row}.") if row else name

    rows: dict[str, _Row] = {}
    found = [(*home(each.name, owner), each) for owner, each in zip(owners, tensors) if len(each.shape) > 1]
    found += [(*home(each.source or each.module, _module_of(each)), each) for each in collectives]  # type: ignore[misc]
    for module, name, item in sorted(found, key=lambda each: (places.get(each[0], len(tensors)), each[0].count("."))):
        row = rows.setdefault(re.sub(r"\d+", "*", module), _Row())
        row.names[module] = None
        if isinstance(item, ExplainedTensor):
            row.weights.setdefault(re.sub(r"\d+", "*", name), item)
        else:
            text = _call_text(item, "" if item.cause == "unit" or name == module else name)
            row.calls[text, item.phase] = row.calls.get((text, item.phase), 0) + 1
    return list(rows.values())


def _module_of(call: Collective) -> str:
    return re.sub(r"\.?<.*", "", call.source) if call.cause == "boundary" else call.module


def _call_text(call: Collective, name: str) -> str:
    cause = " ".join(filter(None, [f"{call.cause},", call.op, name])).rstrip(",")
    return f"{call.kind} over {', '.join(call.dims)}, {size(call.nbytes)} ({cause})"


def _drawn(row: _Row, mesh: MeshShape, top: int) -> list[str]:
    parts = [_caption(_MODULE, top + 12, row.label)]
    for index, (name, weight) in enumerate(row.weights.items()):
        line, column = divmod(index, _SQUARES)
        parts += _square(name, weight, mesh, _MODULE + column * 128, top + _LINE + 4 + line * _PITCH)
    for index, ((text, phase), count) in enumerate(row.calls.items()):
        parts += _arrow(phase, f"{text}{f'  x {count}' if count > 1 else ''}", top + 8 + index * _LINE)
    return parts


def _square(name: str, weight: ExplainedTensor, mesh: MeshShape, left: int, top: int) -> list[str]:
    dashes = ' stroke-dasharray="4 3"' if weight.kept != weight.run else ""
    told = [f"{dim}: {run}, kept as {kept}" for dim, run, kept in zip(mesh.names, weight.run, weight.kept)]
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
    cuts = [f"{dim} {run}" for dim, run in zip(mesh.names, weight.run) if run != "Replicate()"]
    lines = [name, ", ".join(cuts) or "whole"]
    return parts + [_caption(left, top + _SQUARE + 14 * (1 + index), line) for index, line in enumerate(lines)]


def _arrow(phase: str, text: str, y: int) -> list[str]:
    kind = "implicit" if "(implicit" in text or "(model" in text else "asked"
    color, left, right = _COLORS[kind], _CALLS, _CALLS + 40
    tip, back = (right, right - 8) if phase == "forward" else (left, left + 8)
    return [
        _line(left, y, right, y, kind, color),
        f'<polygon class="{kind}-head" points="{tip},{y} {back},{y - 4} {back},{y + 4}" fill="{color}"/>',
        _caption(right + 10, y + 4, text),
    ]


def _line(x1: int, y1: int, x2: int, y2: int, kind: str, color: str) -> str:
    return f'<line class="{kind}" x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{color}"/>'


def _caption(x: int, y: int, text: str) -> str:
    return f'<text class="text" x="{x}" y="{y}" fill="#1a1a1a">{escape(text)}</text>'
