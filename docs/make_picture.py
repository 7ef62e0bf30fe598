"""Draws docs/buffer.svg, the life of a buffer: ``python docs/make_picture.py``. Rectangles and text, plain hex colours."""

from __future__ import annotations

from pathlib import Path

PARAMS = (("a", 5, "#7fb3d5"), ("b", 4, "#f0b27a"), ("c", 3, "#82c99a"))
RANKS, CELL, HEIGHT, LEFT, GAP = 3, 40, 34, 196, 18
INK, QUIET = "#1b2631", "#566573"
ROWS = (
    ("parameters, sharded", "a shard on each rank, a DTensor", True),
    ("parameters, unsharded", "on every rank: views of one buffer", False),
    ("gradients", "on every rank: one more buffer", False),
    (".grad, sharded", "a shard on each rank", True),
)
STEPS = (
    "one all-gather, into the memory that forward and backward read",
    "backward writes weight gradients where the reduce-scatter reads them",
    "one reduce-scatter; then the optimizer steps on the shards",
)


def text(x: float, y: float, words: str, size: int = 14, colour: str = INK, anchor: str = "start") -> str:
    font = "font-family='Helvetica, Arial, sans-serif'"
    return f"<text x='{x:g}' y='{y:g}' font-size='{size}' fill='{colour}' text-anchor='{anchor}' {font}>{words}</text>"


def cell_x(index: int, apart: bool) -> int:
    """The left end of a cell; shards stand apart."""
    cells = sum(size for _, size, _ in PARAMS) // RANKS
    return LEFT + index * CELL + (index // cells * GAP if apart else GAP)


def row(top: int, title: str, note: str, apart: bool) -> list[str]:
    parts = [text(8, top + 15, title, 15), text(8, top + 32, note, 11, QUIET)]
    index = 0
    for name, size, colour in PARAMS:
        for _ in range(size):
            box = f"x='{cell_x(index, apart)}' y='{top}' width='{CELL}' height='{HEIGHT}'"
            parts.append(f"<rect {box} fill='{colour}' stroke='#ffffff' stroke-width='1.5'/>")
            parts.append(text(cell_x(index, apart) + CELL / 2, top + 22, name, 14, INK, "middle"))
            index += 1
    if apart:
        cells = index // RANKS
        for rank in range(RANKS):
            middle = cell_x(rank * cells, True) + cells * CELL / 2
            parts.append(text(middle, top - 6, f"rank {rank}", 12, QUIET, "middle"))
    return parts


def arrow(top: int, words: str) -> list[str]:
    x = LEFT + GAP + 12
    line = f"<path d='M {x} {top} V {top + 22} M {x - 5} {top + 16} L {x} {top + 23} L {x + 5} {top + 16}'"
    return [f"{line} stroke='{QUIET}' stroke-width='1.6' fill='none'/>", text(x + 14, top + 16, words, 13, QUIET)]


def picture() -> str:
    """The SVG."""
    parts, top = [], 26
    for number, (title, note, apart) in enumerate(ROWS):
        parts += row(top, title, note, apart)
        top += HEIGHT + 6
        if number < len(STEPS):
            parts += arrow(top, STEPS[number])
            top += 46 if ROWS[number + 1][2] else 30
    width = LEFT + CELL * 12 + 2 * GAP + 8
    start = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {top}' width='{width}' height='{top}' role='img'>"
    title = "<title>The life of a buffer: sharded, unsharded, gradients, sharded</title>"
    return "\n".join([start, title, f"<rect width='{width}' height='{top}' fill='#ffffff'/>", *parts, "</svg>", ""])


if __name__ == "__main__":
    (Path(__file__).parent / "buffer.svg").write_text(picture())
