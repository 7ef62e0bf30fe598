"""Pictures of ownership: which rank owns which elements of a DTensor, as text, SVG or PNG.

Pictures follow from ownership alone: nothing here reads values or communicates.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import operator
import os
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO, Union

from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from torch_ragged._picture import ends, share
from torch_ragged.tensor._cut_placement import cuts_of
from torch_ragged.tensor._ownership import owned, row_major
from torch_ragged.tensor.placement_types import normalize_placements

__all__ = ["visualize", "visualize_sharding"]

DrawnTensors = Union[DTensor, Sequence[DTensor], Mapping[str, DTensor]]


def visualize(
    tensors: DrawnTensors,
    *,
    file: str | os.PathLike[str] | TextIO | None = None,
    max_width: int = 80,
    max_height: int = 24,
) -> str:
    """Show which rank owns which elements of a DTensor, under any placements and on any mesh.

    Every rank returns the same text. Only the lowest rank of the mesh prints it or writes the file::

        visualize(distribute_tensor(w, mesh, [RaggedShard((0,), (1, 2, 0, 1))]))

        (4, 3) under RS(0)[1,2,0,1] on a mesh of (4)
             0:3
        0:1  0 0 0
        1:3  1 1 1
             1 1 1
        3:4  3 3 3

        ranks  elements  share  interval  pieces
        0             3    25%    [0, 3)  [0:1, 0:3]
        1             6    50%    [3, 9)  [1:3, 0:3]
        3             3    25%   [9, 12)  [3:4, 0:3]
        rank 2 holds nothing

    :func:`visualize_sharding` explains how to read it. No communication.

    Args:
        tensors: a DTensor, a sequence of DTensors, or a mapping of names to DTensors (``dict(model.named_parameters())``).
        file: the target. A text stream gets the text. A path that ends in ``.svg`` or ``.png`` gets a picture to scale,
            coloured by owner; it needs matplotlib. None is standard output.
        max_width: the most characters per line.
        max_height: the most lines of the drawing, and of the legend, per tensor.

    Raises:
        TypeError: ``tensors`` contains something other than DTensors.
        ValueError: no tensor was given; a tensor is a strided view of a ragged one, such as ``t()``; or ``file`` is a path with
            another ending.
        ImportError: ``file`` is a path and matplotlib is not installed.
    """
    named = _named_tensors(tensors)
    pictures = [_picture_of(tensor, name) for name, tensor in named]
    text = "\n\n".join(_picture_text(picture, max_width, max_height) for picture in pictures)
    meshes = [tensor.device_mesh for _, tensor in named]
    first = meshes[0].get_rank() == min(int(mesh.mesh.min()) for mesh in meshes)
    if isinstance(file, (str, os.PathLike)):
        _save(pictures, os.fspath(file), draw=first)
    elif first:
        print(text, file=file or sys.stdout)
    return text


def visualize_sharding(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    placements: Sequence[Placement],
    *,
    ranks: Sequence[int] | None = None,
    max_width: int = 80,
    max_height: int = 24,
) -> str:
    """The text of :func:`visualize` for a tensor that need not exist: no process group, mesh or memory is needed.

    The drawing shows the tensor as a matrix. Its columns are the last dimension; its rows are all other dimensions. A cell has
    the rank that owns it; if several ranks own it, the first one. If the tensor fits, one cell is one element. If not, cells
    are to scale, and the smallest piece still gets one cell. The slices of the leading dimensions are on the left.

    The legend has one line per owner: the number of its elements, their interval in row-major storage (if they form one), and
    its pieces as indices into the whole tensor. A piece is a box of elements. Ranks that own equal pieces (``Replicate``,
    ``Partial``) share a line.

    Args:
        shape: the global shape, with any number of dimensions.
        mesh_shape: the shape of the device mesh.
        placements: one placement per mesh dimension.
        ranks: the ranks of the mesh in row-major order; None is 0, 1, 2, ...
        max_width: the most characters per line.
        max_height: the most lines of the drawing, and of the legend.

    Raises:
        ValueError: the placements are illegal for this shape and mesh, or the number of ``ranks`` is not that of the mesh.
    """
    return _picture_text(_make_picture(shape, mesh_shape, placements, ranks), max_width, max_height)


# --- the model of a picture ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _OwnedPiece:
    """A box of the tensor and the number of its owner in :attr:`_Picture.owners`."""

    owner: int
    starts: tuple[int, ...]
    stops: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(stop - start for start, stop in zip(self.starts, self.stops))

    @property
    def index(self) -> str:
        """The index of the box in the whole tensor, such as ``[0:1, 0:3]``."""
        return f"[{', '.join(f'{start}:{stop}' for start, stop in zip(self.starts, self.stops)) or '()'}]"


@dataclass(frozen=True)
class _Band:
    """A band of the drawing: a slice of each leading dimension, and the segments ``(start, stop, owner)`` along the last."""

    slices: tuple[tuple[int, int], ...]
    segments: tuple[tuple[int, int, int], ...]

    @property
    def size(self) -> int:
        """The number of rows of the matrix in this band."""
        return math.prod(stop - start for start, stop in self.slices)


@dataclass(frozen=True)
class _Picture:
    """A tensor, its owners, the pieces of each owner, and the ranks that own nothing. Ranks with equal pieces are one owner."""

    title: str
    shape: tuple[int, ...]
    owners: tuple[tuple[int, ...], ...]
    pieces: tuple[tuple[_OwnedPiece, ...], ...]
    idle: tuple[int, ...]

    def rows(self) -> list[_Band]:
        """The bands of the drawing, from top to bottom. A tensor of fewer than two dimensions has one band."""
        pieces = [piece for held in self.pieces for piece in held]
        if not self.shape:
            pieces = [_OwnedPiece(piece.owner, (0,), (1,)) for piece in pieces]
        return _bands(pieces, 0, max(len(self.shape) - 1, 0)) if pieces else []


def _named_tensors(tensors: DrawnTensors) -> list[tuple[str, DTensor]]:
    if isinstance(tensors, DTensor):
        tensors = [tensors]
    if isinstance(tensors, Mapping):
        named = list(tensors.items())
    elif isinstance(tensors, Sequence):
        named = [("", tensor) for tensor in tensors]
    else:
        raise TypeError(f"visualize takes a DTensor, or a sequence or mapping of DTensors, got {type(tensors).__name__}")
    if not named:
        raise ValueError("visualize got no tensor: pass at least one DTensor")
    for _, tensor in named:
        if not isinstance(tensor, DTensor):
            raise TypeError(f"visualize takes DTensors, got {type(tensor).__name__}: only a DTensor knows which rank owns what")
    return named


def _picture_of(tensor: DTensor, name: str) -> _Picture:
    mesh = tensor.device_mesh
    ranks = mesh.mesh.flatten().tolist()
    return _make_picture(tensor.shape, mesh.shape, tensor.placements, ranks, name, mesh.mesh_dim_names or ())


def _make_picture(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    placements: Sequence[Placement],
    ranks: Sequence[int] | None,
    name: str = "",
    mesh_dim_names: Sequence[str] = (),
) -> _Picture:
    shape, mesh_shape = tuple(shape), tuple(mesh_shape)
    size = math.prod(mesh_shape)
    ranks = range(size) if ranks is None else ranks
    if len(ranks) != size:
        raise ValueError(f"a mesh of shape {mesh_shape} has {size} ranks, got {len(ranks)}: {list(ranks)}")
    placements = normalize_placements(tuple(placements), shape, mesh_shape)
    cuts = cuts_of(placements)
    held: dict[Any, list[int]] = {}
    for rank, coordinate in zip(ranks, itertools.product(*map(range, mesh_shape))):
        boxes = owned(shape, mesh_shape, cuts, coordinate).boxes
        held.setdefault(tuple((box.offsets, box.sizes) for box in boxes if box.numel), []).append(rank)
    idle = held.pop((), [])
    pieces = [
        tuple(_OwnedPiece(owner, offsets, tuple(map(sum, zip(offsets, sizes)))) for offsets, sizes in boxes)
        for owner, boxes in enumerate(held)
    ]
    mesh = ", ".join(f"{dim}={size}" for dim, size in zip(mesh_dim_names, mesh_shape)) or ", ".join(map(str, mesh_shape))
    title = f"{name and name + ': '}{shape} under {', '.join(map(str, placements))} on a mesh of ({mesh})"
    return _Picture(title, shape, tuple(map(tuple, held.values())), tuple(pieces), tuple(idle))


def _bands(pieces: list[_OwnedPiece], dim: int, last: int) -> list[_Band]:
    """Cut dimension ``dim`` at each start and stop of a piece, and each of the bands, with the pieces in it, along the next."""
    if dim == last:
        return [_Band((), _segments((p.starts[dim], p.stops[dim], p.owner) for p in pieces))]
    beginning: dict[int, list[_OwnedPiece]] = {}
    for piece in pieces:
        beginning.setdefault(piece.starts[dim], []).append(piece)
    rows: list[_Band] = []
    inside: list[_OwnedPiece] = []
    for start, stop in itertools.pairwise(sorted({edge for p in pieces for edge in (p.starts[dim], p.stops[dim])})):
        inside = [piece for piece in inside if piece.stops[dim] > start] + beginning.get(start, [])
        rows += [_Band(((start, stop), *row.slices), row.segments) for row in _bands(inside, dim + 1, last)]
    return rows


def _segments(segments: Iterable[tuple[int, int, int]]) -> tuple[tuple[int, int, int], ...]:
    """The segments in order, with adjacent segments of one owner joined."""
    joined: list[tuple[int, int, int]] = []
    for start, stop, owner in sorted(segments):
        if joined and joined[-1][1:] == (start, owner):
            start = joined.pop()[0]
        joined.append((start, stop, owner))
    return tuple(joined)


# --- text ----------------------------------------------------------------------------------------------------------


def _picture_text(picture: _Picture, max_width: int, max_height: int) -> str:
    body = ["it has no elements"]
    if picture.owners:
        body = [*_drawing(picture, max_width, max_height), "", *_owner_legend(picture, max_height)]
    return "\n".join(line if len(line) <= max_width else line[: max_width - 3] + "..." for line in [picture.title, *body])


def _drawing(picture: _Picture, max_width: int, max_height: int) -> list[str]:
    rows = picture.rows()
    labels = [", ".join(f"{start}:{stop}" for start, stop in row.slices) for row in rows]
    margin = max(map(len, labels)) + 2 if picture.shape[1:] else 0
    columns = picture.shape[-1] if picture.shape else 1
    width = max(len(str(ranks[0])) for ranks in picture.owners)
    room = max((max_width - margin + 1) // (width + 1), 3)
    blocks = []
    is_long = len(rows) == 1 and rows[0].size > max_height  # All of its lines would be equal.
    for row, label, height in zip(rows, labels, share([row.size for row in rows], 1 if is_long else max_height)):
        cells = _band_cells(row, picture, width, room)
        blocks.append([label.ljust(margin) + cells] + [" " * margin + cells] * (height - 1))
    head, hidden, tail = ends(blocks, max_height)
    middle = [[f"... {hidden} more bands"]] if hidden else []
    return [" " * margin + f"0:{columns}", *itertools.chain(*head, *middle, *tail)]


def _band_cells(row: _Band, picture: _Picture, width: int, room: int) -> str:
    names = [str(picture.owners[owner][0]).rjust(width) for _, _, owner in row.segments]
    cells = [[name] * n for name, n in zip(names, share([stop - start for start, stop, _ in row.segments], room))]
    head, hidden, tail = ends(cells, room - 1)
    return " ".join(itertools.chain(*head, ["..."] if hidden else [], *tail))


def _owner_legend(picture: _Picture, max_height: int) -> list[str]:
    numel = math.prod(picture.shape)
    table = [("ranks", "elements", "share", "interval", "pieces")]
    head, hidden, tail = ends(list(zip(picture.owners, picture.pieces)), max_height)
    for ranks, pieces in (*head, *tail):
        count = sum(piece.numel for piece in pieces)
        boxes = " ".join(piece.index for piece in pieces)
        table.append((_ranges(ranks), str(count), f"{100 * count / numel:.3g}%", _interval(pieces, picture.shape), boxes))
    widths = [max(map(len, column)) for column in zip(*table)]
    lines = ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:4], widths[1:4]), line[4]]) for line in table]
    if hidden:
        lines.insert(1 + len(head), f"... {hidden} more owners")
    return lines + _idle(picture)


def _idle(picture: _Picture) -> list[str]:
    many = len(picture.idle) > 1
    return [f"rank{'s' * many} {_ranges(picture.idle)} hold{'s' * (not many)} nothing"] if picture.idle else []


def _ranges(ranks: Sequence[int]) -> str:
    """Ranks as text, such as ``0-3, 7``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    return ", ".join("-".join(map(str, run)) for run in runs)


def _interval(pieces: Sequence[_OwnedPiece], shape: tuple[int, ...]) -> str:
    """The interval of row-major storage that the pieces fill; ``-`` if they do not form one interval."""
    strides = row_major(shape)
    start = min(sum(map(operator.mul, piece.starts, strides)) for piece in pieces)
    stop = max(sum((s - 1) * stride for s, stride in zip(piece.stops, strides)) + 1 for piece in pieces)
    return f"[{start}, {stop})" if stop - start == sum(piece.numel for piece in pieces) else "-"


# --- picture -------------------------------------------------------------------------------------------------------


def _save(pictures: Sequence[_Picture], path: str, draw: bool) -> None:
    """Write the drawings, one below the other, to ``path``; equal drawings give equal bytes.

    If ``draw`` is False, only check that drawing is possible, so that all ranks raise the same errors.
    """
    kind = os.path.splitext(path)[1]
    if kind not in (".svg", ".png"):
        raise ValueError(f"visualize draws to a .svg or .png file, got {path!r}: use one of these endings")
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError(f"drawing {path!r} needs matplotlib: run pip install matplotlib, or do not pass file=")
    if not draw:
        return
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3 * len(pictures)), layout="constrained")
    for axes, picture in zip(figure.subplots(len(pictures), squeeze=False)[:, 0], pictures):
        _draw(axes, picture, matplotlib.colormaps["tab20"].colors)  # type: ignore[attr-defined]
    with matplotlib.rc_context({"svg.hashsalt": "torch_ragged", "svg.fonttype": "none"}):
        whole = f"{path}.{os.getpid()}"  # Then renamed: ranks of several meshes may write ``path`` at once.
        figure.savefig(whole, format=kind[1:], metadata={"Date": None} if kind == ".svg" else None)
    os.replace(whole, path)


def _draw(axes: Any, picture: _Picture, colours: Sequence[Any]) -> None:
    """Draw rectangles to scale, coloured by owner. The ranks of an owner are written in its largest rectangle, if they fit."""
    rows = picture.rows()
    height, top = sum(row.size for row in rows), 0
    largest: dict[int, tuple[int, float, float, float]] = {}  # By owner: area, centre and font size.
    for row in rows:
        for start, stop, owner in row.segments:
            axes.broken_barh([(start, stop - start)], (top, row.size), facecolors=[colours[owner % len(colours)]])
            middle = ((stop - start) * row.size, (start + stop) / 2, top + row.size / 2, min(10, 150 * row.size / height))
            largest[owner] = max(largest.get(owner, middle), middle)
        top += row.size
    for owner, (_, x, y, size) in largest.items():
        if size > 3:  # Smaller than this, nobody can read it.
            axes.text(x, y, _ranges(picture.owners[owner]), ha="center", va="center", fontsize=size)
    axes.set(xlim=(0, (picture.shape or (1,))[-1] or 1), ylim=(height or 1, 0), xlabel="".join(_idle(picture)))
    if len(picture.shape) < 2:
        axes.set_yticks([])
    axes.set_title(textwrap.fill(picture.title, 80), fontsize=10)
