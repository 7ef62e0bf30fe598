"""SlotRing: memory at fixed addresses. The groups of a model take turns in it to all-gather and to reduce."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from torch_ragged.fsdp.core._dbuffer import BufferMemory, MemoryPool, current_stream, order_behind

__all__ = ["SlotRing", "Slot", "Slab"]


@dataclass(eq=False)
class Slab:
    """Memory of one dtype, with one holder at a time.

    Attributes:
        flat: the memory.
        description: for errors.
    """

    flat: torch.Tensor
    description: str
    _freed_on: torch.Stream | None = None  # Current when the last holder freed it.
    _holder: weakref.ref[object] | None = None

    def is_held_by(self, holder: object) -> bool:
        return self._holder is not None and self._holder() is holder

    def is_free_for(self, holder: object) -> bool:
        """Whether ``holder`` can claim it. Equal on all ranks, as it does not depend on the garbage collector."""
        return self._holder is None or self.is_held_by(holder)

    def claim(self, holder: object) -> None:
        """Make ``holder`` the holder, until it calls :meth:`free`. The contents are undefined.

        The current stream is ordered behind the last holder's.

        Raises:
            RuntimeError: another holder uses it.
        """
        if self._holder is not None and self._holder() not in (None, holder):
            # A deleted holder frees its slot. Ranks collect garbage at different moments, so each does it now.
            gc.collect()
            # Do not wait: this rank itself frees the slot, later in its program.
            if self._holder() not in (None, holder):
                raise RuntimeError(
                    f"{self.description} is in use by another group. Groups take turns in a module's persistent buffers: "
                    "raise set_persistent_buffers(places=) if more groups are unsharded, or have unreduced gradients, at once; "
                    "or call set_persistent_buffers(False)"
                )
        self._holder = weakref.ref(holder)
        order_behind(current_stream(self.flat.device), self._freed_on)

    def free(self, holder: object) -> None:
        """If ``holder`` is the holder, free the memory for others."""
        if self.is_held_by(holder):
            self._holder, self._freed_on = None, current_stream(self.flat.device)


class _SlotMemory(BufferMemory):
    """The memory of one buffer in a slot, from the claim of its slab to :meth:`free`."""

    keeps_address = True

    def __init__(self, slab: Slab, numel: int) -> None:
        super().__init__(slab.flat[:numel])
        self._slab = slab
        slab.claim(self)

    @property
    def is_allocated(self) -> bool:
        return self._slab.is_held_by(self)

    @property
    def is_free(self) -> bool:
        return self._slab.is_free_for(self)

    def allocate(self) -> None:
        self._slab.claim(self)

    def free(self) -> None:
        self._slab.free(self)


@dataclass(eq=False)
class Slot(MemoryPool):
    """The memory of groups that take turns: one slab for each dtype, of the size that the largest group needs.

    Args:
        allocate: a function ``numel, dtype -> flat tensor``. It is called when a group first makes a buffer of a dtype here.
            Groups are equal on all ranks, so all ranks call it in the same order.
    """

    is_required = True
    _name: str
    _allocate: Callable[[int, torch.dtype], torch.Tensor]
    _numel: dict[torch.dtype, int] = field(default_factory=dict)
    _slabs: dict[torch.dtype, Slab] = field(default_factory=dict)

    def reserve(self, dtype: torch.dtype, numel: int) -> None:
        """Make the slab of ``dtype`` large enough for ``numel`` elements."""
        self._numel[dtype] = max(self._numel.get(dtype, 0), numel)

    def slab(self, dtype: torch.dtype, numel: int) -> Slab:
        """The slab of ``dtype``. If it is too small, as after a conversion of the model, make a new one."""
        self.reserve(dtype, numel)
        slab = self._slabs.get(dtype)
        if slab is None or slab.flat.numel() < numel:
            flat = self._allocate(self._numel[dtype], dtype)
            slab = self._slabs[dtype] = Slab(flat, f"{self._name} of {dtype}")
        return slab

    def memory(self, numel: int, dtype: torch.dtype, device: torch.device, is_pinned: bool) -> BufferMemory:
        return _SlotMemory(self.slab(dtype, numel), numel)

    @property
    def nbytes(self) -> int:
        """Bytes allocated so far."""
        return sum(slab.flat.nbytes for slab in self._slabs.values())


class SlotRing:
    """Slots in which members take turns: member i has slot ``i % size``.

    ::

        members   0 1 2 3 4 5 6 7
        slots     A B C A B C A B          while member 3 computes in A, member 4 is all-gathered into B

    Args:
        name: a description of the contents, for errors.
        size: the number of slots.
        allocate: as in :class:`Slot`.
    """

    def __init__(self, name: str, size: int, allocate: Callable[[int, torch.dtype], torch.Tensor]) -> None:
        self._name, self._size, self._allocate = name, size, allocate
        self._turns: list[list[Slot]] = [[] for _ in range(size)]
        self._alone: list[Slot] = []
        self._members = 0

    def join(self, groups: int) -> list[Slot]:
        """The next member's slots: one for each of its ``groups``, which are used at the same time."""
        turn = self._members % self._size
        self._members += 1
        slots = self._turns[turn]
        slots += [Slot(f"slot {turn} of {self._size} for {self._name}", self._allocate) for _ in range(len(slots), groups)]
        return slots[:groups]

    def apart(self, groups: int) -> list[Slot]:
        """Slots that no other member uses, for groups that stay unsharded while others take turns."""
        self._alone += [Slot(f"a slot of its own for {self._name}", self._allocate) for _ in range(groups)]
        return self._alone[-groups:]

    @property
    def nbytes(self) -> int:
        """Bytes allocated so far."""
        return sum(slot.nbytes for slots in (*self._turns, self._alone) for slot in slots)
