"""ContiguousEncoding: a parameter placed as ``Shard(d)`` with d > 0, which is contiguous after the all-gather."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch

from torch_ragged._register._torch import storage_ids
from torch_ragged.fsdp.core._dbuffer import MemoryLog, MemoryPool, allocate_storage, free_storage
from torch_ragged.fsdp.core._fsdp_param import Distribution, FoundParam
from torch_ragged.fsdp.core._kit import Draft, FeaturePart, Kit, Need, Terms
from torch_ragged.fsdp.core.encodings._plain import Encoding, Shards
from torch_ragged.fsdp.layout._buffer_layout import BufferLayout

__all__ = ["ContiguousEncoding", "ShardPart"]


@dataclass(frozen=True)
class ShardPart(FeaturePart):
    """A parameter placed as ``Shard(dim)``. It has a buffer of its own."""

    fqn: str
    dim: int

    @property
    def terms(self) -> Terms:
        needs = {Need.EQUAL_SHARDS: ": leave weights out, or return a granularity from shard_placement_fn"}
        return Terms(f"the placement Shard({self.dim}) of {self.fqn}", needs, (Need.WHOLE_ROWS,) if self.dim else ())

    def key(self, param: FoundParam) -> Hashable:
        return param.fqn

    def arrange(self, draft: Draft) -> None:
        # Not the planner's: ranks own what torch.chunk gives them.
        draft.layout = draft.params[0].distribution.even_layout(draft.ranks)

    def equip(self, kit: Kit) -> None:
        distribution = kit.plan.params[0].distribution
        if distribution.shard_dim:
            kit.encoding = ContiguousEncoding(kit.layout, kit.rank, distribution)


class ContiguousEncoding(Encoding):
    """One parameter that is cut along a later dimension than the first: one copy joins the all-gathered pieces.

    ::

        shards      DBuffer Shard(0): this rank's piece, contiguous
           | all-gather
        buffer      DBuffer Replicate(): | piece of rank 0 | piece of rank 1 | ...
           | one copy, after which the pieces are freed
        whole       the contiguous parameter, as ``weight.view(-1)`` and kernels need it

    The gradient buffer has the layout of the pieces. The gradient is copied into it piece by piece.
    """

    computes_in_buffer = False

    def __init__(self, layout: BufferLayout, rank: int, distribution: Distribution) -> None:
        super().__init__(layout, rank)
        self._distribution = distribution

    def make_buffers(self, dtype: torch.dtype, device: torch.device, pool: MemoryPool, log: MemoryLog) -> None:
        super().make_buffers(dtype, device, pool, log)
        # Not of the pool: no collective reads or writes it.
        self._whole = torch.empty(self._distribution.local_shape, dtype=dtype, device=device)
        log.note(self._whole.nbytes)

    @property
    def nbytes_beside(self) -> int:
        return self._whole.untyped_storage().nbytes()

    def compute_tensor(self, index: int) -> torch.Tensor:
        return self._whole.data  # A view with its own version counter: autograd may have saved it before the next copy.

    def decode(self, shards: Shards, keeps_buffer: bool) -> None:
        allocate_storage(self._whole, self._log)
        # Only the last piece can be shorter, so that the padding is at the end.
        pieces = self._distribution.pieces(self.buffer.flat[: self._whole.numel()])
        with torch.no_grad():
            torch.cat(pieces, dim=self._distribution.shard_dim or 0, out=self._whole)
        # Before the forward, not after it: pieces and whole parameter together are the peak of this unit.
        if not keeps_buffer and not self.keeps_storage:
            self.buffer.free()

    def free(self, keeps_buffer: bool) -> None:
        super().free(keeps_buffer)
        if not self.keeps_storage:
            free_storage(self._whole, self._log)

    def holds(self, tensor: torch.Tensor) -> bool:
        # Not the pieces: what the model computes with is the copy.
        return any(each in storage_ids(self._whole) for each in storage_ids(tensor))
