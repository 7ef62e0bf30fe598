"""SlotRing: places at fixed addresses that a model's groups take by turns for what they gather and reduce."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

__all__ = ["SlotRing", "Slot", "Slab"]


class Slab:
    """Memory of one dtype that one holder has at a time.

    Args:
        flat: the memory.
        of: what it is, for errors.
    """

    def __init__(self, flat: torch.Tensor, of: str) -> None:
        self.flat, self._of = flat, of
        self._holder: weakref.ref[object] | None = None  # Who goes without giving it back, gives it back.

    def is_held_by(self, holder: object) -> bool:
        return self._holder is not None and self._holder() is holder

    def is_free_for(self, holder: object) -> bool:
        """Whether ``holder`` can acquire it."""
        return self._holder is None or self._holder() in (None, holder)

    def claim(self, holder: object) -> None:
        """Have ``holder`` have the memory; its contents are undefined.

        Raises:
            RuntimeError: another one has it.
        """
        if not self.is_free_for(holder):
            raise RuntimeError(
                f"{self._of}: a group that shares it has not given it back. Groups use a module's persistent buffers by turns: "
                "set_persistent_buffers(places=) more where more groups are gathered, or have gradients not reduced, at once; "
                "or set_persistent_buffers(False)"
            )
        self._holder = weakref.ref(holder)

    def free(self, holder: object) -> None:
        """Give the memory back; nothing happens if ``holder`` does not have it."""
        if self.is_held_by(holder):
            self._holder = None


class Slot:
    """Where groups that take turns have buffers: a slab for each dtype, as large as the largest of them.

    Args:
        allocate: ``numel, dtype -> flat tensor``; called when a group first makes a buffer of a dtype here, so that ranks,
            whose groups are alike, call it in the same order.
    """

    def __init__(self, name: str, allocate: Callable[[int, torch.dtype], torch.Tensor]) -> None:
        self._name, self._allocate = name, allocate
        self._numel: dict[torch.dtype, int] = {}
        self._slabs: dict[torch.dtype, Slab] = {}

    def reserve(self, dtype: torch.dtype, numel: int) -> None:
        """Make the slab of ``dtype`` large enough for ``numel`` elements."""
        self._numel[dtype] = max(self._numel.get(dtype, 0), numel)

    def slab(self, dtype: torch.dtype, numel: int) -> Slab:
        """The slab of ``dtype``; a new one if it is too small, which happens if a model is converted later."""
        self.reserve(dtype, numel)
        slab = self._slabs.get(dtype)
        if slab is None or slab.flat.numel() < numel:
            flat = self._allocate(self._numel[dtype], dtype)
            slab = self._slabs[dtype] = Slab(flat, f"{self._name} of {dtype}")
        return slab

    @property
    def nbytes(self) -> int:
        """Bytes allocated so far."""
        return sum(slab.flat.nbytes for slab in self._slabs.values())


class SlotRing:
    """RegisteredNames that members take by turns: member i has place ``i % size``.

    ::

        members   0 1 2 3 4 5 6 7
        places    A B C A B C A B          while 3 computes in A, 4 is gathered into B

    Args:
        name: of what lies in it, for errors.
        size: how many places there are.
        allocate: as of :class:`Slot`.
    """

    def __init__(self, name: str, size: int, allocate: Callable[[int, torch.dtype], torch.Tensor]) -> None:
        self._name, self._size, self._allocate = name, size, allocate
        self._turns: list[list[Slot]] = [[] for _ in range(size)]
        self._alone: list[Slot] = []
        self._members = 0

    def join(self, groups: int) -> list[Slot]:
        """The next member's places: one for each of its ``groups``, which are used at the same time."""
        turn = self._members % self._size
        self._members += 1
        places = self._turns[turn]
        places += [Slot(f"place {turn} of {self._size} for {self._name}", self._allocate) for _ in range(len(places), groups)]
        return places[:groups]

    def apart(self, groups: int) -> list[Slot]:
        """RegisteredNames that nobody else uses, for one whose groups stay there while others come and go."""
        self._alone += [Slot(f"a place of its own for {self._name}", self._allocate) for _ in range(groups)]
        return self._alone[-groups:]

    @property
    def nbytes(self) -> int:
        """Bytes allocated so far."""
        return sum(place.nbytes for places in (*self._turns, self._alone) for place in places)
