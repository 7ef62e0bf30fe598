"""Persistent buffers: the buffers of gathered parameters and gradients stay allocated. Groups take turns in their slots."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from torch_ragged.fsdp.core._dbuffer import ALLOCATOR, BufferMemory, MemoryPool, current_stream, order_behind
from torch_ragged.fsdp.core._fsdp_param_group import FSDPParamGroup
from torch_ragged.fsdp.core._fsdp_state import FSDPState
from torch_ragged.fsdp.core._kit import Need, PlainPart, Terms, check_pairs
from torch_ragged.fsdp.memory._resident import Resident

__all__ = ["PERSISTENT", "SLOTS", "Slot", "SlotRing", "allocator", "check_ready", "make_persistent", "make_transient"]

PERSISTENT = PlainPart(Terms("set_persistent_buffers()", {Need.ONE_BUFFER: ": leave backward out"}))
SLOTS = 3  # Slots in a ring: one group computes, the next one is all-gathered, and the previous one may not be resharded yet.
Allocate = Callable[[int, torch.dtype], torch.Tensor]  # Of elements and a dtype: a flat tensor.


def check_ready(groups: Sequence[FSDPParamGroup]) -> None:
    """Raise if the buffers of ``groups`` cannot be replaced now."""
    for group in groups:
        if group.is_meta:
            raise RuntimeError(f"{group.names} on the meta device: materialize parameters before choosing their memory")
        if group.is_pending:
            raise RuntimeError(f"{group.names} has gradients that are not in .grad yet: choose buffers between steps")


def make_persistent(states: Sequence[FSDPState], size: int, allocators: dict[FSDPParamGroup, Allocate]) -> None:
    """Let groups take turns in two rings of ``size`` slots that stay allocated: for unsharded parameters, and for gradients.

    If a group stays unsharded while other groups run, it has its own slot: modules around others, and modules that are not
    resharded after forward. Memory is allocated here, in the same order on all ranks. Groups with the same allocator share
    rings. ``states`` are in the order of forward.
    """
    for group in allocators:
        check_pairs([PERSISTENT, *group.plan.parts])  # Planes of backward would need other slots.
    rings: dict[Allocate, tuple[SlotRing, SlotRing]] = {}
    slots_of_group: dict[FSDPParamGroup, tuple[Slot, Slot]] = {}
    for state in states:
        stays_unsharded = state.reshard_after_forward is False or any(isinstance(g.keeper, Resident) for g in state.groups)
        inside = {child for module in state.modules for child in module.modules()}
        is_around = any(module in inside for other in states if other is not state for module in other.modules)
        for allocate in dict.fromkeys(allocators[group] for group in state.groups if group in allocators):
            groups = [group for group in state.groups if allocators.get(group) == allocate]
            names = ("gathered parameters", "gradients")
            pair = rings.setdefault(allocate, tuple(SlotRing(name, size, allocate) for name in names))  # type: ignore[arg-type]
            slots = (ring.apart(len(groups)) if stays_unsharded or is_around else ring.join(len(groups)) for ring in pair)
            slots_of_group.update(zip(groups, zip(*slots)))
    for group, (gathered, gradients) in slots_of_group.items():
        for buffer in group.encoding.buffers():
            gathered.reserve(buffer.flat.dtype, buffer.flat.numel())
        if group.encoding.computes_in_buffer:  # On one rank, this buffer may be the memory of the shards until now.
            gathered.reserve(group.param_dtype, group.layout.numel)
        for dtype in (group.grad_buffer.dtype, group.reduce_dtype):
            gradients.reserve(dtype, group.layout.numel)
    for group, (gathered, gradients) in slots_of_group.items():
        group.set_memory_pools(gathered, gradients)
        if group.is_trainable:  # Now: allocating may be a collective, and the order of gradients may differ between ranks.
            for dtype in dict.fromkeys((group.grad_buffer.dtype, group.reduce_dtype)):
                gradients.slab(dtype, group.layout.numel)


def make_transient(groups: Sequence[FSDPParamGroup]) -> None:
    """Let groups allocate memory for each use, and free it after use."""
    for group in groups:
        group.set_memory_pools(ALLOCATOR, ALLOCATOR)


def allocator(device: torch.device) -> Allocate:
    """Plain memory on ``device``."""

    def allocate(numel: int, dtype: torch.dtype) -> torch.Tensor:
        with torch.inference_mode(False):  # Later steps in other modes write to it, too.
            return torch.empty(numel, dtype=dtype, device=device)

    return allocate


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
    """The memory of groups that take turns: one slab for each dtype, of the size that the largest group needs."""

    is_required = True
    _name: str
    # Called when a group first makes a buffer of a dtype here. Groups are equal on all ranks, so is the order of calls.
    _allocate: Allocate
    _numel: dict[torch.dtype, int] = field(default_factory=dict)
    _slabs: dict[torch.dtype, SlotMemory] = field(default_factory=dict)

    def reserve(self, dtype: torch.dtype, numel: int) -> None:
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
    """

    def __init__(self, name: str, size: int, allocate: Allocate) -> None:
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
