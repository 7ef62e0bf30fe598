"""ExtensionGroup: a parameter whose tensor type says what is gathered (FSDP2's tensor extensions: float8 and the like)."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torch_ragged._register._torch import storage_ids
from torch_ragged.fsdp.comm._collectives import Work, wait_all
from torch_ragged.fsdp.core._dbuffer import MemoryPool
from torch_ragged.fsdp.core._distribution import Distribution, local_of
from torch_ragged.fsdp.core._fsdp_param import FSDPParam
from torch_ragged.fsdp.core._fsdp_param_group import FSDPParamGroup
from torch_ragged.fsdp.core._group_plan import FoundParam, GroupPlan

__all__ = ["ExtensionGroup"]


class ExtensionGroup(FSDPParamGroup):
    """One parameter of such a type, placed as ``Shard(0)`` like FSDP2's: its memory is the type's, not a buffer's.

    ::

        sharded     rows of the tensor, of its type
           | fsdp_pre_all_gather: any number of tensors, whose rows are those of the shard, or of one size on all ranks
        gathered    one all-gather each
           | fsdp_post_all_gather: the tensor to compute with; its memory is freed and allocated under it
        gradients   as of any group: one buffer, one reduce-scatter

    Where rows do not divide by the ranks, what is gathered is padded here: the type need not know.
    """

    def __init__(self, plan: GroupPlan) -> None:
        self._outputs: list[torch.Tensor] = []
        self._inner: list[torch.Tensor] = []
        self._metadata: Any = None
        self._has_rows: list[bool] = []  # of the outputs, which have the parameter's rows
        self._is_made = False  # the unsharded parameter, by fsdp_post_all_gather
        self._local: torch.Tensor  # this rank's rows
        super().__init__(plan)
        self.sharded.free()

    def _init_param(self, index: int, found: FoundParam) -> FSDPParam:
        local = local_of(found.value)
        first = min(self.rank * self._rows(local.size(0)), local.size(0))
        self._local = local.narrow(0, first, min(self._rows(local.size(0)), local.size(0) - first)).clone()
        sharded = nn.Parameter(self._sharded_dtensor(found.distribution, index), requires_grad=found.value.requires_grad)
        return FSDPParam(found.fqn, found.registered_names, found.distribution, sharded, requires_grad=sharded.requires_grad)

    def _sharded_dtensor(self, distribution: Distribution, index: int) -> DTensor:
        return distribution.shaped(self._local)

    def _rows(self, rows: int) -> int:
        """Of a parameter of ``rows``, those of the first shard, the largest."""
        return -(-rows // self.dp.ranks)

    def _init_unsharded_params(self) -> None:
        for param in self.params:  # Until the type has made one.
            param.view = torch.empty(0)
            param.unsharded = nn.Parameter(torch.empty(0), requires_grad=param.requires_grad)
        self.unsharded.free()

    # -- gathering -------------------------------------------------------------------------------------------------

    def _issue_all_gather(self) -> Work:
        shard = self._padded_shard()
        inputs, self._metadata = self._pre_all_gather(shard)
        inputs = tuple(tensor.to(self.device).contiguous() for tensor in inputs)
        if not self._outputs:
            ranks = self.dp.ranks
            with torch.inference_mode(False):  # Later forwards write to them in other modes too.
                self._outputs = [tensor.new_empty(ranks * tensor.size(0), *tensor.shape[1:]) for tensor in inputs]
            self._has_rows = [tensor.ndim == shard.ndim and tensor.size(0) == shard.size(0) for tensor in inputs]
        for output in self._outputs:
            _allocate(output)
        pairs = zip(self._outputs, inputs)
        return wait_all([self.collectives.all_gather(output.view(-1), tensor.view(-1)) for output, tensor in pairs])

    def _padded_shard(self) -> torch.Tensor:
        """This rank's rows, and zeros after them where the first rank has more: what is gathered has one size on all ranks."""
        shard = local_of(self.params[0].sharded)
        rows = self._rows(self.layout.tensors[0].shape[0])
        if shard.size(0) == rows:
            return shard
        padded = shard.new_zeros(rows, *shard.shape[1:])
        padded.narrow(0, 0, shard.size(0)).copy_(shard)
        return padded

    def _pre_all_gather(self, shard: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
        param = self.params[0]
        if len(inspect.signature(shard.fsdp_pre_all_gather).parameters) == 1:
            return shard.fsdp_pre_all_gather(self.dp.shard_mesh)
        shape = torch.Size(param.distribution.local_shape)
        strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
        return shard.fsdp_pre_all_gather(self.dp.shard_mesh, shape, strides, param.registered_names[0][0], self._plan.mp_policy)

    def _decode(self) -> None:
        param, shard = self.params[0], local_of(self.params[0].sharded)
        rows = self.layout.tensors[0].shape[0]
        outputs = tuple(output[:rows] if cut else output for output, cut in zip(self._outputs, self._has_rows))
        if self._is_made:
            for tensor in self._inner:
                _allocate(tensor)
            made: Any = local_of(param.unsharded).data  # With a version counter of its own: autograd may have saved it.
            shard.fsdp_post_all_gather(outputs, self._metadata, self.param_dtype, out=made)  # type: ignore[attr-defined]
            return
        with torch.inference_mode(False):
            made, self._inner = shard.fsdp_post_all_gather(outputs, self._metadata, self.param_dtype)  # type: ignore[attr-defined]
            param.view = torch.empty(0)
            param.unsharded = nn.Parameter(param.distribution.gathered(made), requires_grad=param.requires_grad)
        param.unsharded.requires_grad_(True)
        param.unsharded.register_post_accumulate_grad_hook(self.gradients.hook(0))
        param.unsharded.requires_grad_(param.requires_grad)
        self._is_made = True

    def set_memory_pools(self, gathered: MemoryPool | None, gradients: MemoryPool | None) -> None:
        """Of the gradients only: gathered is what the type makes."""
        self.reshard()
        self.gradients.set_pool(gradients)

    def _free_unsharded(self) -> None:
        for tensor in (*self._outputs, *self._inner):
            tensor.untyped_storage().resize_(0)

    def holds(self, tensor: torch.Tensor) -> bool:
        mine = [each for param in self.params for each in storage_ids(local_of(param.unsharded))]
        return any(each in mine for each in storage_ids(tensor))

    def _restore_changed(self) -> list[str]:
        param = self.params[0]
        is_same = param.registered is param.unsharded and param.compute_version == param.version
        return [] if is_same else [param.fqn]

    @property
    def kept_nbytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in (*self._outputs, *self._inner))

    # -- the sharded parameter -------------------------------------------------------------------------------------

    def _is_in_buffer(self, sharded: torch.Tensor) -> bool:
        return True

    def convert(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if self.is_meta:
            self._local = function(self._local)
        super().convert(function)

    def _rebuild(self, device: torch.device, dtype: torch.dtype, values: list[torch.Tensor] | None) -> None:
        if values is not None:
            (self._local,) = values
        self._outputs, self._inner, self._is_made = [], [], False
        super()._rebuild(device, dtype, None)
        self.sharded.free()

    def check_late_extensions(self) -> None:
        """The methods are those of the type."""

    def check_conversion(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().check_conversion(function)
        if function(torch.empty(0, dtype=self.orig_dtype, device=self.device)).dtype != self.orig_dtype:
            raise ValueError(f"{self.names} is of a type with its own all-gather: convert it before fully_shard")


def _allocate(tensor: torch.Tensor) -> None:
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        storage.resize_(tensor.numel() * tensor.element_size())
