"""SlotRing: memory at fixed addresses. The groups of a model take turns in it to all-gather and to reduce."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from torch_ragged.fsdp.core._dbuffer import BufferMemory, MemoryPool, current_stream, order_behind

__all__ = ["SlotRing", "Slot", "SlotMemory"]


@dataclass(eq=False)
class SlotMemory:
    """Memory of one dtype, which one buffer uses at a time."""

    flat: torch.Tensor
    description: str  # For errors.
    holder: weakref.ref[BufferMemory] | None = None  # The memory of the buffer that uses it. None: it is free.
    freed_on: torch.Stream | None = None  # The stream that was current when the last holder freed it.


class _SlotMemory(BufferMemory):
    """The memory of one buffer in a slot: it holds a slab from :meth:`allocate` to :meth:`free`."""

    keeps_address = True

    def __init__(self, slab: SlotMemory, numel: int) -> None:
        super().__init__(slab.flat[:numel])
        self._slab = slab
        self.allocate()

    @property
    def is_allocated(self) -> bool:
        return self._slab.holder is not None and self._slab.holder() is self

    @property
    def is_free(self) -> bool:
        # Equal on all ranks, as it does not depend on the garbage collector.
        return self._slab.holder is None or self.is_allocated

    def allocate(self) -> None:
        slab = self._slab
        if slab.holder is not None and slab.holder() not in (None, self):
            # A deleted holder frees its slot. Ranks collect garbage at different moments, so each does it now.
            gc.collect()
            # Do not wait: this rank itself frees the slot, later in its program.
            if slab.holder() not in (None, self):
                raise RuntimeError(
                    f"{slab.description} is in use by another group. Groups take turns in a module's persistent buffers: "
                    "raise set_persistent_buffers(places=) if more groups are unsharded, or have unreduced gradients, at once; "
                    "or call set_persistent_buffers(False)"
                )
        slab.holder = weakref.ref(self)
        order_behind(current_stream(self.flat.device), slab.freed_on)

    def free(self) -> None:
        if self.is_allocated:
            self._slab.holder, self._slab.freed_on = None, current_stream(self.flat.device)


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
    _slabs: dict[torch.dtype, SlotMemory] = field(default_factory=dict)

    def reserve(self, dtype: torch.dtype, numel: int) -> None:
        """Make the slab of ``dtype`` large enough for ``numel`` elements."""
        self._numel[dtype] = max(self._numel.get(dtype, 0), numel)

    def slab(self, dtype: torch.dtype, numel: int) -> SlotMemory:
        """The slab of ``dtype``. If it is too small, as after a conversion of the model, make a new one."""
        self.reserve(dtype, numel)
        slab = self._slabs.get(dtype)
        if slab is None or slab.flat.numel() < numel:
            flat = self._allocate(self._numel[dtype], dtype)
            slab = self._slabs[dtype] = SlotMemory(flat, f"{self._name} of {dtype}")
        return slab

    def memory(self, numel: int, dtype: torch.dtype, device: torch.device, is_pinned: bool) -> BufferMemory:
        return _SlotMemory(self.slab(dtype, numel), numel)


class SlotRing:
    """Slots in which members take turns: member i has slot ``i % size``.

    ::

        members   0 1 2 3 4 5 6 7
        slots     A B C A B C A B          while member 3 computes in A, member 4 is all-gathered into B

    ``name`` says what lies in them, for errors. ``allocate`` is that of :class:`Slot`.
    """

    def __init__(self, name: str, size: int, allocate: Callable[[int, torch.dtype], torch.Tensor]) -> None:
        self._name, self._size, self._allocate = name, size, allocate
        self._slots: list[list[Slot]] = [[] for _ in range(size)]
        self._turns = itertools.cycle(range(size))

    def join(self, groups: int) -> list[Slot]:
        """The next member's slots: one for each of its ``groups``, which are used at the same time."""
        turn = next(self._turns)
        slots = self._slots[turn]
        slots += [Slot(f"slot {turn} of {self._size} for {self._name}", self._allocate) for _ in range(len(slots), groups)]
        return slots[:groups]

    def apart(self, groups: int) -> list[Slot]:
        """Slots that no other member uses, for groups that stay unsharded while others take turns."""
        return [Slot(f"a slot of its own for {self._name}", self._allocate) for _ in range(groups)]
