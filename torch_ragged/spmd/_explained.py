"""The parts of an explanation: frozen records of names and numbers.

They must not hold tensors or placements: everything in them is text or a number, so that JSON has all of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Optional

__all__ = [
    "Collective",
    "ExplainedBoundary",
    "ExplainedRule",
    "ExplainedTensor",
    "Memory",
    "Total",
    "folded",
    "pattern_of",
    "size",
]


@dataclass(frozen=True)
class ExplainedRule:
    """A rule of the plan.

    Attributes:
        text: the call.
        matched: the tensors, activations and modules that it is about.
    """

    text: str
    matched: tuple[str, ...]


@dataclass(frozen=True)
class ExplainedTensor:
    """A parameter or a buffer.

    Attributes:
        name, is_parameter, shape, dtype, unit: as in :class:`TensorRecord`. ``shape`` is that of the whole tensor.
        kept, run: the placements on the mesh, between steps and in forward and backward. Ragged units are left out.
        kept_bytes, run_bytes: bytes on rank 0.
    """

    name: str
    is_parameter: bool
    shape: tuple[int, ...]
    dtype: str
    unit: Optional[str]
    kept: tuple[str, ...]
    run: tuple[str, ...]
    kept_bytes: int
    run_bytes: int


@dataclass(frozen=True)
class ExplainedBoundary:
    """What happens to a tensor that enters or leaves a module.

    Attributes:
        path: its path, as in a plan.
        action: ``"annotate"``, ``"shard"`` or ``"redistribute"``.
        placements: what it is afterwards. None on mesh dimensions where it keeps its placement.
    """

    path: str
    action: str
    placements: tuple[Optional[str], ...]


@dataclass(frozen=True)
class Collective:
    """One collective of rank 0.

    Attributes:
        phase: ``"forward"`` or ``"backward"``.
        kind: ``"all-gather"``, ``"reduce-scatter"``, ``"all-reduce"``, ``"all-to-all"``, ``"broadcast"``, ...
        dims: the mesh dimensions over which it goes.
        nbytes: bytes of the largest tensor that it reads or writes on this rank.
        cause: ``"boundary"``, ``"unit"`` or ``"gradient"``: the plan asks for it. ``"implicit"``: an op cannot take the
            placements that arrive, and DTensor redistributes them. ``"model"``: the model itself calls it.
        module: the module that it belongs to; "" is the root.
        source: the path of the boundary, the module of the unit, or the parameter whose gradient it is.
        op: the op that needs it, if it is implicit.
    """

    phase: str
    kind: str
    dims: tuple[str, ...]
    nbytes: int
    cause: str
    module: str
    source: str
    op: str


@dataclass(frozen=True)
class Total:
    """The collectives of one kind over the same mesh dimensions, in one step.

    Attributes:
        kind, dims: as in :class:`Collective`.
        count: the number of collectives.
        nbytes: the sum of their bytes.
    """

    kind: str
    dims: tuple[str, ...]
    count: int
    nbytes: int


@dataclass(frozen=True)
class Memory:
    """Bytes on rank 0. Activations are not counted.

    Attributes:
        parameters: as they are kept, without the padding of units.
        buffers: buffers of modules.
        gradients: gradients after backward.
        optimizer: states of AdamW: two values per element of a gradient, and a number of steps.
        gathered: the largest unit when it is all-gathered, with padding.
    """

    parameters: int
    buffers: int
    gradients: int
    optimizer: int
    gathered: int


def folded(names: Iterable[str]) -> dict[str, list[str]]:
    """Names that differ in numbers only, by their pattern: a star stands for numbers that differ."""
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(re.sub(r"\d+", "*", name), []).append(name)
    return {pattern_of(each): each for each in alike.values()}


def pattern_of(names: Sequence[str]) -> str:
    """What ``names`` have in common, which differ in numbers only."""
    columns = zip(*[re.split(r"(\d+)", name) for name in names])
    return "".join([column[0] if len(set(column)) == 1 else "*" for column in columns])


def size(nbytes: int) -> str:
    """``1.50 GiB``; exact below one KiB."""
    value, unit = float(nbytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{nbytes} B" if unit == "B" else f"{value:.2f} {unit}"
