"""Drawings of one buffer: the tensors and the padding on each rank, as text for a terminal or as SVG.

The work must not grow with the number of ranks: neighbouring ranks with equal contents share one row.
"""

from __future__ import annotations

import bisect
import colorsys
import re
import string
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from torch_ragged._picture import ends, share
from torch_ragged.fsdp import BufferLayout, TensorSpec

__all__ = ["draw_svg", "draw_text"]

_SYMBOLS = string.ascii_letters
_OTHERS, _PADDING = "*", "/"
_PADDING_KIND = -1

Pieces = tuple[tuple[int, int, int], ...]
"""The contents of a rank's shard: (kind, start, stop), in elements of the shard. Together they fill it."""


@dataclass
class _TensorKind:
    """Tensors with one symbol: one tensor or, if there are too many, all tensors whose names differ in numbers only."""

    symbol: str
    name: str
    members: list[TensorSpec]
    first_rank: int
    last_rank: int


@dataclass(frozen=True)
class _RankRow:
    """Neighbouring ranks with equal contents, from ``first`` to ``last``, both included."""

    first: int
    last: int
    pieces: Pieces

    @property
    def label(self) -> str:
        return f"rank {self.first}" if self.first == self.last else f"ranks {self.first}-{self.last}"

    @property
    def padding(self) -> int:
        """Elements of padding on each of the ranks."""
        return sum(stop - start for kind, start, stop in self.pieces if kind == _PADDING_KIND)


def draw_text(layout: BufferLayout, width: int = 100, height: int = 24) -> str:
    """The buffer of ``layout`` as text, in lines of about ``width`` characters.

    A row is the shard of a rank, to scale: ``/`` is padding, a letter is a tensor of the legend. Neighbouring ranks with equal
    contents share a row. If there are more than ``height`` rows, the text leaves out the middle ones. The same holds for the
    legend.
    """
    kinds, rows = _picture(layout)
    head, hidden, tail = ends(rows, height)
    margin = max(len(row.label) for row in (*head, *tail))
    symbols = [kind.symbol for kind in kinds] + [_PADDING]  # The kind of padding is -1, the index of the last symbol.
    lines = []
    for row in (*head, *tail):
        cells = _cells(row.pieces, symbols, layout.shard_numel, max(width - margin - 24, 20))
        note = f"  padding {row.padding:,}{' each' * (row.first < row.last)}" if row.padding else ""
        lines.append(f"{row.label.ljust(margin)} |{cells}|{note}")
    if hidden:
        lines.insert(len(head), f"... {hidden:,} more rows")
    return "\n".join([*lines, "", *_legend(layout, kinds, height)])


def _picture(layout: BufferLayout) -> tuple[list[_TensorKind], list[_RankRow]]:
    kinds, kind_of = _tensor_kinds(layout)
    return kinds, _rank_rows(layout, kind_of)


def _tensor_kinds(layout: BufferLayout) -> tuple[list[_TensorKind], list[int]]:
    """All kinds in the order of their offsets, and the kind of each tensor."""
    by_offset = sorted((index for index, tensor in enumerate(layout.tensors) if tensor.numel), key=layout.offsets.__getitem__)
    keys: dict[int, object] = {index: index for index in by_offset}
    if len(by_offset) > len(_SYMBOLS) // 2:
        keys = {i: (re.sub(r"\d+", "*", layout.tensors[i].name), layout.tensors[i].shape) for i in by_offset}
    named: dict[object, int] = {}
    kinds: list[_TensorKind] = []
    kind_of = [_PADDING_KIND] * len(layout.tensors)
    for index in by_offset:
        tensor, offset = layout.tensors[index], layout.offsets[index]
        number = named.setdefault(keys[index], min(len(named), len(_SYMBOLS)))
        last = (offset + tensor.numel - 1) // layout.shard_numel
        if number == len(kinds):
            symbol = _SYMBOLS[number] if number < len(_SYMBOLS) else _OTHERS
            kinds.append(_TensorKind(symbol, tensor.name, [], offset // layout.shard_numel, last))
        kinds[number].members.append(tensor)
        kinds[number].last_rank = last
        kind_of[index] = number
    for kind in kinds:
        if kind.symbol == _OTHERS:
            kind.name = "others"
        elif len(kind.members) > 1:
            kind.name = re.sub(r"\d+", "*", kind.name)
    return kinds, kind_of


def _rank_rows(layout: BufferLayout, kind_of: list[int]) -> list[_RankRow]:
    rows: list[_RankRow] = []
    for row in _single_rows(layout, kind_of):
        if rows and rows[-1].pieces == row.pieces:
            row = _RankRow(rows.pop().first, row.last, row.pieces)
        rows.append(row)
    return rows


def _single_rows(layout: BufferLayout, kind_of: list[int]) -> Iterator[_RankRow]:
    """The rows in the order of ranks. All ranks whose shards are wholly inside one tensor or one gap are one row."""
    shard = layout.shard_numel
    segments = [(start, stop, _PADDING_KIND) for start, stop in layout.gaps]
    for index, tensor in enumerate(layout.tensors):
        if tensor.numel:
            segments.append((layout.offsets[index], layout.offsets[index] + tensor.numel, kind_of[index]))
    pieces: list[tuple[int, int, int]] = []
    for start, stop, kind in sorted(segments):
        while start < stop:
            rank, inside = divmod(start, shard)
            whole = (stop - start) // shard
            if not inside and whole:
                yield _RankRow(rank, rank + whole - 1, ((kind, 0, shard),))
                start += whole * shard
                continue
            end = min(stop - rank * shard, shard)
            if pieces and pieces[-1][0] == kind:  # Neighbouring pieces of one kind become one piece.
                inside = pieces.pop()[1]
            pieces.append((kind, inside, end))
            start = rank * shard + end
            if end == shard:
                yield _RankRow(rank, rank, tuple(pieces))
                pieces = []


def _cells(pieces: Pieces, symbols: list[str], shard: int, room: int) -> str:
    if len(pieces) <= room:
        sizes = share([stop - start for _, start, stop in pieces], room)
        return "".join(symbols[kind] * size for (kind, _, _), size in zip(pieces, sizes))
    starts = [start for _, start, _ in pieces]
    kinds = [pieces[bisect.bisect_right(starts, (2 * i + 1) * shard // (2 * room)) - 1][0] for i in range(room)]
    for kind, start, _ in pieces:
        if kind == _PADDING_KIND:  # Padding is always visible, also if it is smaller than a character.
            kinds[start * room // shard] = kind
    return "".join(symbols[kind] for kind in kinds)


def _legend(layout: BufferLayout, kinds: list[_TensorKind], height: int) -> list[str]:
    table = [("", "tensor", "shape", "block", "elements", "ranks")]
    head, hidden, tail = ends(kinds, height)
    for kind in (*head, *tail):
        numel = sum(tensor.numel for tensor in kind.members)
        ranks = f"{kind.first_rank}-{kind.last_rank}" if kind.first_rank < kind.last_rank else str(kind.first_rank)
        table.append((kind.symbol, _kind_name(kind), _kind_shape(kind), _block(kind), f"{numel:,}", ranks))
    gaps = layout.gaps
    if gaps:
        ranks = f"{gaps[0][0] // layout.shard_numel}-{(gaps[-1][1] - 1) // layout.shard_numel}"
        table.append(
            (_PADDING, f"padding, in {len(gaps):,} gap{'s' * (len(gaps) > 1)}", "", "", f"{layout.padding_numel:,}", ranks)
        )
    widths = [max(map(len, column)) for column in zip(*table)]
    lines = ["  ".join([*map(str.ljust, line[:3], widths), *map(str.rjust, line[3:5], widths[3:]), line[5]]) for line in table]
    if hidden:
        lines.insert(1 + len(head), f"... {hidden:,} more kinds of tensors")
    return lines


def _kind_name(kind: _TensorKind) -> str:
    return kind.name if len(kind.members) == 1 else f"{kind.name} ({len(kind.members):,} tensors)"


def _kind_shape(kind: _TensorKind) -> str:
    return "various" if kind.symbol == _OTHERS else str(kind.members[0].shape)


def _block(kind: _TensorKind) -> str:
    if kind.symbol == _OTHERS:
        return ""
    first = kind.members[0]
    return ", ".join(f"{part.block:,}" for part in first.segments or (first,))


# --- SVG -----------------------------------------------------------------------------------------------------------

_SHARDS_LEFT, _SHARD_WIDTH, _HEIGHT = 120, 960, 20  # Pixels: left edge of the shards, width of a shard, height of a row.
_DEFINITIONS = """<defs><pattern id="padding" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
<rect width="6" height="6" fill="#ffffff"/><rect width="2" height="6" fill="#000000"/></pattern></defs>"""


def draw_svg(layout: BufferLayout, title: str, height: int = 64) -> str:
    """The buffer of ``layout`` as an SVG document, with the rows of :func:`draw_text`.

    A rectangle shows its name if the mouse points at it. If there are more than ``height`` rows, the drawing leaves out the
    middle ones. The same holds for the legend. The same layout always gives the same document.
    """
    kinds, rows = _picture(layout)
    head, hidden, tail = ends(rows, height)
    body, top = [_label(8, 20, title)], 36
    for index, row in enumerate((*head, *tail)):
        if hidden and index == len(head):
            body.append(_label(8, top + 14, f"... {hidden:,} more rows"))
            top += _HEIGHT
        body.append(_label(8, top + 14, row.label))
        body += [_piece(piece, kinds, layout.shard_numel, top) for piece in row.pieces]
        top += _HEIGHT
    top += _HEIGHT
    head_kinds, hidden_kinds, tail_kinds = ends(list(enumerate(kinds)), height)
    entries = [(number, f"{_kind_name(kind)} {_kind_shape(kind)}") for number, kind in (*head_kinds, *tail_kinds)]
    if hidden_kinds:
        entries.insert(len(head_kinds), (_PADDING_KIND - 1, f"... {hidden_kinds:,} more kinds of tensors"))
    for number, text in [*entries, (_PADDING_KIND, f"padding, {layout.padding_numel:,} elements")]:
        if number >= _PADDING_KIND:
            body.append(f'<rect x="{_SHARDS_LEFT}" y="{top}" width="24" height="16" fill="{_fill(number)}" stroke="#000000"/>')
        body.append(_label(_SHARDS_LEFT + 32, top + 13, text))
        top += _HEIGHT
    size = f'width="{_SHARDS_LEFT + _SHARD_WIDTH + 16}" height="{top + 8}"'
    paper = f'<rect {size} fill="#ffffff"/>'
    font = 'font-family="sans-serif" font-size="12"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>', _DEFINITIONS, paper, *body, "</svg>", ""])


def _piece(piece: tuple[int, int, int], kinds: list[_TensorKind], shard: int, top: int) -> str:
    kind, start, stop = piece
    name = "padding" if kind == _PADDING_KIND else kinds[kind].name
    x, width = _SHARDS_LEFT + _SHARD_WIDTH * start / shard, max(_SHARD_WIDTH * (stop - start) / shard, 0.5)
    return (
        f'<rect x="{x:.2f}" y="{top}" width="{width:.2f}" height="{_HEIGHT - 3}" fill="{_fill(kind)}" stroke="#000000" '
        f'stroke-width="0.3"><title>{escape(name)}: elements {start:,} to {stop:,} of the shard</title></rect>'
    )


def _fill(kind: int) -> str:
    """The colour of a kind. Neighbouring kinds differ much. Not every renderer knows ``hsl()`` or style sheets."""
    if kind == _PADDING_KIND:
        return "url(#padding)"
    rgb = colorsys.hls_to_rgb(kind * 137.508 % 360 / 360, 0.62 + 0.12 * (kind % 2), 0.65)
    return "#" + "".join(f"{round(255 * channel):02x}" for channel in rgb)


def _label(x: int, y: int, text: str) -> str:
    return f'<text x="{x}" y="{y}">{escape(text)}</text>'
