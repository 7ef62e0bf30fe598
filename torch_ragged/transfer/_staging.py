"""Staging: sources that cannot be read in place: Partial ones, and local tensors that are not contiguous. It writes no source.

::

    local tensor      . . . . . . . . . . . .      not contiguous, or a summand
    window                  [ start ... stop )     what one round needs of it
    staged                  x x x x x x            a contiguous copy, reduced over the ranks of each Partial

So a round needs memory for its windows only, not for whole tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial

from torch_ragged.tensor._ownership import boxes_of_interval
from torch_ragged.tensor._redistribute import CARRIED, REDUCTIONS, mesh_group

__all__ = ["Staged", "check_reductions", "reductions_of"]

PartialReduction = tuple[str, dist.ProcessGroup]
Wait = Callable[[Sequence[dist.Work]], None]


@dataclass(frozen=True)
class Staged:
    """A local tensor of the source that is copied window by window.

    Attributes:
        local: the local tensor, with any strides.
        reductions: the operation and the process group of each Partial, in the order of the mesh dimensions.
    """

    local: torch.Tensor
    reductions: tuple[PartialReduction, ...] = ()

    def window(self, start: int, stop: int, wait: Wait) -> torch.Tensor:
        """The elements ``[start, stop)`` in row-major order, reduced: a new 1-D tensor.

        If there are reductions, all ranks of their groups call it with equal arguments.
        """
        # A copy also if the local tensor is contiguous: the all-reduce below is in place, and the source is never written.
        flat = torch.empty(stop - start, dtype=self.local.dtype, device=self.local.device)
        filled = 0
        for offsets, sizes in boxes_of_interval(self.local.shape, start, stop):
            numel = math.prod(sizes)
            box = self.local[tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes))]
            flat[filled : filled + numel].view(sizes).copy_(box)
            filled += numel
        for operation, group in self.reductions:
            # Backends reduce no complex numbers, and gloo has no average.
            numbers = torch.view_as_real(flat) if flat.is_complex() else flat
            kernel = dist.ReduceOp.SUM if operation == "avg" else getattr(dist.ReduceOp, operation.upper())
            # All ranks get all elements, so the order of the ranks in the group does not matter, and each can send.
            wait([dist.all_reduce(numbers, kernel, group=group, async_op=True)])
            if operation == "avg":
                numbers /= group.size()
        return flat


def reductions_of(tensor: DTensor) -> tuple[PartialReduction, ...]:
    """The reductions that make a Partial DTensor whole."""
    mesh = tensor.device_mesh
    return tuple(
        (placement.reduce_op, mesh_group(mesh, (i,)))
        for i, placement in enumerate(tensor.placements)
        if isinstance(placement, Partial) and mesh.size(i) > 1
    )


def check_reductions(what: str, dtype: torch.dtype, placements: Sequence[object]) -> None:
    """Raise ``ValueError`` if a Partial among ``placements`` cannot be reduced: before any rank waits for a reduction."""
    for operation in (placement.reduce_op for placement in placements if isinstance(placement, Partial)):
        averages = operation != "avg" or dtype.is_floating_point or dtype.is_complex
        # Complex numbers are summed as pairs of real ones.
        adds = dtype in CARRIED or (dtype.is_complex and operation in ("sum", "avg"))
        if operation not in REDUCTIONS or not averages or not adds:
            raise ValueError(f"{what} has placements {tuple(placements)}: cannot reduce {dtype} by {operation}: cast it")
