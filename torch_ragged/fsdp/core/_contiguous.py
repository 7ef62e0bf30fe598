"""ContiguousGroup: a parameter placed as ``Shard(d)`` with d > 0, which is contiguous where it is gathered."""

from __future__ import annotations

import torch

from torch_ragged._register._torch import storage_ids
from torch_ragged.fsdp.core._fsdp_param_group import FSDPParamGroup

__all__ = ["ContiguousGroup"]


class ContiguousGroup(FSDPParamGroup):
    """One parameter cut along a dimension behind the first: all-gathered piece by piece, then put together by one copy.

    ::

        sharded     DBuffer Shard(0): this rank's piece, contiguous
           | all-gather
        unsharded   DBuffer Replicate(): | piece of rank 0 | piece of rank 1 | ...
           | one copy, after which the pieces are freed
        whole       the contiguous parameter, as ``weight.view(-1)`` and kernels want it
           | backward
        gradients   as of any group; a gradient is copied piece by piece
    """

    def _compute_tensor(self, index: int) -> torch.Tensor:
        layout = self.params[index].distribution
        self._whole = torch.empty(layout.local_shape, dtype=self.param_dtype, device=self.device)
        return self._whole.data  # With a version counter of its own: autograd may have saved it when it is filled again.

    def _is_written_in_place(self, value: torch.Tensor) -> bool:
        return False  # The gradient buffer holds pieces, not the matrix.

    def _decode(self) -> None:
        _allocate(self._whole)
        (param,) = self.params
        pieces = param.distribution.pieces(self.unsharded.flat[: self._whole.numel()])
        with torch.no_grad():
            torch.cat(pieces, dim=param.distribution.shard_dim or 0, out=self._whole)
        if self.resident is None and not self.keeps_storage:
            self.unsharded.free()

    def _free_unsharded(self) -> None:
        super()._free_unsharded()
        if not self.keeps_storage:
            self._whole.untyped_storage().resize_(0)

    def holds(self, tensor: torch.Tensor) -> bool:
        return any(each in storage_ids(self._whole) for each in storage_ids(tensor))

    @property
    def kept_nbytes(self) -> int:
        return super().kept_nbytes + self._whole.untyped_storage().nbytes()


def _allocate(tensor: torch.Tensor) -> None:
    if tensor.untyped_storage().nbytes() == 0:
        tensor.untyped_storage().resize_(tensor.nbytes)
