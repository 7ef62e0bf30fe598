"""TypeEncoding and TypeShards: tensor types with their own all-gather (FSDP2's tensor extensions, such as float8)."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from torch_ragged._register._torch import preserved_versions, storage_ids
from torch_ragged.fsdp.comm._collectives import Collectives, Work, wait_all
from torch_ragged.fsdp.core._dbuffer import DBuffer, MemoryPool
from torch_ragged.fsdp.core._distribution import Distribution, local_of
from torch_ragged.fsdp.core._encoding import Encoding
from torch_ragged.fsdp.core._fsdp_param import FSDPParam
from torch_ragged.fsdp.core._group_plan import GroupPlan
from torch_ragged.fsdp.core._memory_log import MemoryLog, allocate_storage, free_storage
from torch_ragged.fsdp.core._shards import Shards
from torch_ragged.fsdp.layout._buffer_layout import BufferLayout

__all__ = ["TypeEncoding", "TypeShards"]


class TypeShards(Shards):
    """This rank's rows of one tensor of such a type, as FSDP2's ``Shard(0)`` cuts them. The type owns their memory.

    The buffer of the base class is never allocated. It only tells the dtype and device of ``.grad``.
    """

    _local: torch.Tensor

    def allocate(self, dtype: torch.dtype, device: torch.device, is_pinned: bool) -> None:
        super().allocate(dtype, device, is_pinned)
        self.buffer.free()

    def store(self, index: int, distribution: Distribution, value: torch.Tensor) -> None:
        # These are the operations that FSDP2 calls, and types may have no other ones: NF4Tensor has no other slice() than the
        # whole tensor, and its clone() quantizes anew, with other values.
        whole = local_of(value)
        pieces = torch.chunk(whole, self._layout.ranks)
        piece = pieces[self._rank] if self._rank < len(pieces) else None
        self._local = whole.new_zeros((0, *whole.shape[1:]) if piece is None else piece.size())
        if piece is not None:
            self._local.copy_(piece)

    def load(self, index: int, local: torch.Tensor) -> None:
        self._local = local

    def dtensor(self, index: int, distribution: Distribution) -> DTensor:
        return distribution.shaped(self._local)

    def holds(self, local: torch.Tensor) -> bool:
        return True

    def convert_meta(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._local = function(self._local)

    @property
    def local(self) -> torch.Tensor:
        """The current rows. Operations on the parameter may replace the tensors inside its type."""
        return local_of(self.params[0].sharded)


def first_rows(layout: BufferLayout) -> int:
    """The number of rows of the first shard, which is the largest."""
    return -(-layout.tensors[0].shape[0] // layout.ranks)


class TypeEncoding(Encoding):
    """One parameter whose tensor type has its own all-gather.

    ::

        shards      rows of the tensor, of its type
           | fsdp_pre_all_gather returns any number of tensors; each has the shard's rows, or one size on all ranks
        outputs     one all-gather for each of these tensors
           | fsdp_post_all_gather returns the tensor to compute with; its storage is freed after use, and allocated again

    Gradients are as in other groups: one buffer, one reduce-scatter. If the number of ranks does not divide the rows, shards
    are padded here, and the type does not see the padding.
    """

    computes_in_buffer = False
    makes_params = True

    def __init__(self, plan: GroupPlan) -> None:
        super().__init__(plan.layout, plan.dp.rank)
        (found,) = plan.params
        self._mesh, self._mp_policy, self._module = plan.dp.shard_mesh, plan.mp_policy, found.registered_names[0][0]
        self._shape = torch.Size(found.distribution.local_shape)

    def make_buffers(self, dtype: torch.dtype, device: torch.device, pool: MemoryPool | None, log: MemoryLog) -> None:
        """Prepare for the first ``fsdp_post_all_gather``, which allocates the tensors. ``pool`` is not used."""
        self._dtype, self._device, self._log = dtype, device, log
        self._outputs: list[torch.Tensor] = []
        self._has_rows: list[bool] = []  # Of each output: whether it has the parameter's rows.
        self._inner: list[torch.Tensor] = []
        self._made: torch.Tensor | None = None
        self._metadata: Any = None

    def buffers(self) -> list[DBuffer]:
        return []

    @property
    def nbytes_beside(self) -> int:
        return _nbytes((*self._outputs, *self._inner))

    @property
    def numel_by_dtype(self) -> dict[torch.dtype, int]:
        return {}

    def compute_tensor(self, index: int) -> torch.Tensor:
        """An empty tensor: the type makes the tensor to compute with in the first :meth:`decode`."""
        return torch.empty(0)

    def all_gather(self, shards: Shards, collectives: Collectives) -> Work:
        assert isinstance(shards, TypeShards)
        shard = self._padded(shards.local)
        inputs, self._metadata = self._pre_all_gather(shard)
        inputs = tuple(tensor.to(self._device).contiguous() for tensor in inputs)
        if not self._outputs:
            ranks = self._layout.ranks
            with torch.inference_mode(False):  # Later forwards in other modes write to them, too.
                self._outputs = [tensor.new_empty(ranks * tensor.size(0), *tensor.shape[1:]) for tensor in inputs]
            self._log.note(self.nbytes_beside)
            self._has_rows = [tensor.ndim == shard.ndim and tensor.size(0) == shard.size(0) for tensor in inputs]
        for output in self._outputs:
            allocate_storage(output, self._log)
        # Views with their own version counters: the type may compute with an output itself, and autograd may have saved it.
        pairs = [(output.data.view(-1), tensor.view(-1)) for output, tensor in zip(self._outputs, inputs)]
        return wait_all([collectives.all_gather(output, tensor) for output, tensor in pairs])

    def _padded(self, shard: torch.Tensor) -> torch.Tensor:
        """This rank's rows, padded with zeros to the rows of the first rank: all ranks send the same size."""
        rows = first_rows(self._layout)
        if shard.size(0) == rows:
            return shard
        padded = shard.new_zeros(rows, *shard.shape[1:])
        padded.narrow(0, 0, shard.size(0)).copy_(shard)
        return padded

    def _pre_all_gather(self, shard: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
        if len(inspect.signature(shard.fsdp_pre_all_gather).parameters) == 1:
            return shard.fsdp_pre_all_gather(self._mesh)
        strides = tuple(math.prod(self._shape[dim + 1 :]) for dim in range(len(self._shape)))
        policy: MixedPrecisionPolicy = self._mp_policy
        return shard.fsdp_pre_all_gather(self._mesh, self._shape, strides, self._module, policy)

    def decode(self, shards: Shards, keeps_buffer: bool) -> torch.Tensor | None:
        assert isinstance(shards, TypeShards)
        shard: Any = shards.local
        rows = self._layout.tensors[0].shape[0]
        outputs = tuple(output[:rows] if cut else output for output, cut in zip(self._outputs, self._has_rows))
        if self._made is None:
            with torch.inference_mode(False):
                self._made, self._inner = shard.fsdp_post_all_gather(outputs, self._metadata, self._dtype)
            self._log.note(self.nbytes_beside - _nbytes(self._outputs))
            return self._made
        for tensor in self._inner:
            allocate_storage(tensor, self._log)
        # The parameter itself, as in FSDP2: a type may write to its attributes, such as a float8 scale. The version counters do
        # not change, because autograd may have saved the parameter.
        out = shards.params[0].unsharded
        with torch.no_grad(), preserved_versions((out, local_of(out)) if isinstance(out, DTensor) else out):
            shard.fsdp_post_all_gather(outputs, self._metadata, self._dtype, out=out)
        return None

    def free(self, keeps_buffer: bool) -> None:
        for tensor in (*self._outputs, *self._inner):
            free_storage(tensor, self._log)

    def holds(self, tensor: torch.Tensor) -> bool:
        mine = [] if self._made is None else storage_ids(self._made)
        return any(each in mine for each in storage_ids(tensor))

    def is_intact(self, param: FSDPParam, local: torch.Tensor) -> bool:
        return True


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes that ``tensors`` hold now. Several of them may share a storage: a type may return what was all-gathered."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())
