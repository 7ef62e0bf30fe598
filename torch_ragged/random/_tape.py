"""The tape of deferred_init: which ops made the tensors of a module, and in which order they drew random numbers.

It holds facts only. A tensor is known by its storage, so views have no entry: an entry says which part of which storage an op
reads and writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Optional, Union

import torch
from torch.utils import _pytree as pytree

__all__ = ["End", "Entry", "StoragePart", "Point", "Tape", "read_state", "write_state"]


@dataclass(frozen=True)
class StoragePart:
    """A tensor: the part of a storage that it shows. Sizes, strides and the offset count elements of ``dtype``."""

    storage: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True)
class End:
    """Where a recording of another tape has left a generator."""

    tape: Tape
    point: Point


Point = Union[int, tuple[str, bytes], End]
"""A place in a device's stream of random numbers: after the draw of the entry with this number; or ``("start", b"")``, or
``("state", state)``, which ``manual_seed`` has set; or where another tape ends."""
START: Point = ("start", b"")


@dataclass(frozen=True)
class Entry:
    """One op.

    Attributes:
        args, kwargs: of the op, with a :class:`StoragePart` for each tensor that the tape made. Other tensors are constants.
        made: for each of the op's flattened results, its part if the op has made its storage; else None.
        written: the storages that the op writes to.
        device_type: of the tensors.
        before: the point of the device's default generator before the draw; None if the op does not draw from it.
        where: the user's line.
        default_dtype: that of the construction: it decides what an op without a dtype makes.
    """

    op: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: tuple[Optional[StoragePart], ...]
    written: frozenset[int]
    device_type: str
    before: Optional[Point]
    where: str
    default_dtype: torch.dtype

    @property
    def parts(self) -> Iterator[StoragePart]:
        """The tensors among the arguments."""
        return (leaf for leaf in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, StoragePart))

    @property
    def all_parts(self) -> Iterator[StoragePart]:
        """The tensors among the arguments, and those that the op has made."""
        yield from self.parts
        yield from (part for part in self.made if part is not None)

    @property
    def changed(self) -> set[int]:
        """The storages that the op makes or writes to."""
        return {part.storage for part in self.made if part is not None} | self.written


@dataclass
class Stream:
    """The random numbers of one device's default generator, as the tape has drawn them.

    Attributes:
        start: the state before the first draw.
        after: where another tape ends, if that is the start: nothing was drawn between them.
        ends: where recordings of this tape have left the generator. Other tapes may begin there. They live as long as the tape.
        known: the state after each entry that was drawn already, of 5 KB on CPU: later ones are reached without it.
    """

    start: torch.Tensor
    after: Optional[End] = None
    ends: list[End] = field(default_factory=list)
    known: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass(eq=False)
class Tape:
    """What a program did to tensors: its ops by number, the device of each storage, and a stream for each type of device.

    Attributes:
        is_pruned: whether no tensor is left: the entries that random streams do not need are gone.
    """

    entries: dict[int, Entry] = field(default_factory=dict)
    devices: list[torch.device] = field(default_factory=list)
    streams: dict[str, Stream] = field(default_factory=dict)
    is_pruned: bool = False


def read_state(device_type: str) -> torch.Tensor:
    """The state of a device's default generator."""
    # Of the current device. Assumed: a construction uses one device of each type, the current one, as each device has a
    # generator of its own.
    return torch.get_rng_state() if device_type == "cpu" else torch.get_device_module(device_type).get_rng_state()


def write_state(device_type: str, state: torch.Tensor) -> None:
    """Set the state of a device's default generator."""
    if device_type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device_type).set_rng_state(state)
