"""Persistent buffers: the buffers of gathered parameters and gradients stay allocated, at fixed addresses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from torch_ragged.fsdp.core._dbuffer import ALLOCATOR
from torch_ragged.fsdp.core._fsdp_param_group import FSDPParamGroup
from torch_ragged.fsdp.core._fsdp_state import FSDPState
from torch_ragged.fsdp.core._kit import Need, PlainPart, Terms, check_pairs
from torch_ragged.fsdp.memory._resident import Resident
from torch_ragged.fsdp.memory._slots import Slot, SlotRing

__all__ = ["PERSISTENT", "SLOTS", "allocator", "check_ready", "make_persistent", "make_transient"]

PERSISTENT = PlainPart(Terms("set_persistent_buffers()", {Need.ONE_BUFFER: ": leave backward out"}))

SLOTS = 3
"""Slots in a ring: one group computes, the next one is all-gathered, and the previous one may not be resharded yet."""

Allocate = Callable[[int, torch.dtype], torch.Tensor]


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
        for dtype, numel in group.encoding.numel_by_dtype.items():
            gathered.reserve(dtype, numel)
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
