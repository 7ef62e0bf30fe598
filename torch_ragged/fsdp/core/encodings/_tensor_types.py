"""TypeEncoding and TypeShards: tensor types with their own all-gather (FSDP2's tensor extensions, such as float8).

They do not look into a type: its two methods say what is sent, and what the model computes with.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from torch_ragged._register._torch import preserved_versions, storage_ids
from torch_ragged.fsdp.comm._collectives import Collectives, Work, wait_all
from torch_ragged.fsdp.core._dbuffer import ALLOCATOR, DBuffer, MemoryLog, MemoryPool, allocate_storage, free_storage
from torch_ragged.fsdp.core._fsdp_param import Distribution, FoundParam, local_of
from torch_ragged.fsdp.core._kit import Draft, FeaturePart, Kit, Need, Terms
from torch_ragged.fsdp.core.encodings._plain import Encoding, Shards
from torch_ragged.fsdp.layout._buffer_layout import RowsLayout, rows_layout

__all__ = ["TypeEncoding", "TypePart", "TypeShards", "TypeStandIn"]


@dataclass(frozen=True)
class TypePart(FeaturePart):
    """A parameter whose tensor type has its own all-gather. All such parameters of a call are in one group."""

    fqn: str
    type_name: str

    @property
    def terms(self) -> Terms:
        needs = {
            Need.EQUAL_SHARDS: ", because the type has its own all-gather: leave weights out",
            Need.IN_MESH: ": there, fully_shard takes plain parameters only",
            Need.WHOLE_ROWS: ": return Shard(0) or None from shard_placement_fn",
        }
        return Terms(f"the tensor type {self.type_name} of {self.fqn}", needs, breaks=(Need.MOVABLE, Need.PLAIN_SHARDS))

    def key(self, param: FoundParam) -> Hashable:
        return "rows of tensor types"

    def arrange(self, draft: Draft) -> None:
        draft.layout = rows_layout([param.distribution.rows_spec() for param in draft.params], draft.ranks)

    def equip(self, kit: Kit) -> None:
        plan, layout = kit.plan, kit.layout
        assert isinstance(layout, RowsLayout)
        if plan.runs_on_meta:  # A type's methods may need values. A report only needs the bytes.
            kit.encoding = TypeStandIn(layout, kit.rank)
            return
        kit.shards = TypeShards(layout, kit.rank)
        kit.encoding = TypeEncoding(layout, kit.rank, plan.params, plan.dp.shard_mesh, plan.mp_policy)


class TypeShards(Shards):
    """This rank's rows of tensors of such types, as FSDP2's ``Shard(0)`` cuts them. The types own their memory.

    The buffer of the base class is never allocated. It only tells the dtype and device of ``.grad``.
    """

    are_typed = True

    def __init__(self, layout: RowsLayout, rank: int) -> None:
        super().__init__(layout, rank)
        self._locals: dict[int, torch.Tensor] = {}

    def allocate(self, dtype: torch.dtype, device: torch.device, is_pinned: bool, pool: MemoryPool = ALLOCATOR) -> None:
        super().allocate(dtype, device, is_pinned, pool)
        self.buffer.free()

    def store(self, index: int, distribution: Distribution, value: torch.Tensor) -> None:
        # These are the operations that FSDP2 calls, and types may have no other ones: NF4Tensor has no other slice() than the
        # whole tensor, and its clone() quantizes anew, with other values.
        whole = local_of(value)
        pieces = torch.chunk(whole, self._layout.ranks)
        piece = pieces[self._rank] if self._rank < len(pieces) else None
        local = whole.new_zeros((0, *whole.shape[1:]) if piece is None else piece.size())
        if piece is not None:
            local.copy_(piece)
        self._locals[index] = local

    def load(self, index: int, local: torch.Tensor) -> None:
        self._locals[index] = local

    def dtensor(self, index: int, distribution: Distribution) -> DTensor:
        return distribution.shaped(self._locals[index])

    def holds(self, local: torch.Tensor) -> bool:
        return True

    def convert_meta(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._locals = {index: function(local) for index, local in self._locals.items()}

    def local(self, index: int) -> torch.Tensor:
        """The current rows of a parameter. Operations on it may replace the tensors inside its type."""
        return local_of(self.params[index].sharded)


@dataclass
class _Typed:
    """One parameter of a :class:`TypeEncoding`.

    Attributes:
        module: the first module that it is registered in; the type's method gets it.
        shape: the shape of the whole parameter, on this rank of model parallelism.
        rows: the rows of the first shard, which is the largest.
        takes_mesh_only: whether ``fsdp_pre_all_gather`` has one argument.
        metadata: what the last ``fsdp_pre_all_gather`` returned for ``fsdp_post_all_gather``.
        outputs: the all-gathered tensors, in the order of ``fsdp_pre_all_gather``.
        has_rows: of each output, whether it has the parameter's rows.
        made: the tensor to compute with; None before the first ``fsdp_post_all_gather``.
        inner: the tensors whose storage is freed after use, and allocated again.
        lender: the shard that was asked for a view, if it may give one.
        is_view: whether ``made`` is this view, which has no memory of its own.
    """

    module: nn.Module
    shape: torch.Size
    rows: int
    takes_mesh_only: bool | None = None
    metadata: Any = None
    outputs: list[torch.Tensor] = field(default_factory=list)
    has_rows: list[bool] = field(default_factory=list)
    made: torch.Tensor | None = None
    inner: Sequence[torch.Tensor] = ()
    lender: torch.Tensor | None = None
    is_view: bool = False

    @property
    def gathered(self) -> tuple[torch.Tensor, ...]:
        """The outputs without the padding of their rows."""
        return tuple(output[: self.shape[0]] if cut else output for output, cut in zip(self.outputs, self.has_rows))


class TypeEncoding(Encoding):
    """Parameters whose tensor types have their own all-gather.

    ::

        shards      rows of each tensor, of its type
           | fsdp_pre_all_gather returns any number of tensors; each has the shard's rows, or one size on all ranks
           | copied as bytes, one after the other, into this rank's slice
        packed      one slice of bytes per rank
           | one all-gather, in place
           | one copy into the outputs; then the packed bytes are freed
        outputs     each tensor of all ranks, contiguous
           | fsdp_post_all_gather returns the tensor to compute with; its storage is freed after use, and allocated again

    If there is only one tensor to send, or only one rank, nothing is packed: the all-gather writes to the output.

    The types' methods get ``mesh``, the 1-D mesh of the shards, and ``mp_policy``.

    A frozen parameter of one rank needs no second copy: if its type has ``fsdp_get_unsharded_view(mesh, module, mp_policy)``,
    and this returns a tensor, not None, the model computes with it. Its memory is the shard's, and is never freed.

    Gradients are as in other groups: one buffer, one reduce-scatter. If the number of ranks does not divide the rows, shards
    are padded here, and the types do not see the padding.
    """

    computes_in_buffer = False
    makes_params = True
    _layout: RowsLayout

    def __init__(
        self, layout: RowsLayout, rank: int, params: Sequence[FoundParam], mesh: DeviceMesh, mp_policy: MixedPrecisionPolicy
    ) -> None:
        super().__init__(layout, rank)
        self._mesh, self._mp_policy = mesh, mp_policy
        shapes = [torch.Size(found.distribution.local_shape) for found in params]
        modules = [found.registered_names[0][0] for found in params]
        self._of_params = list(zip(modules, shapes))

    def make_buffers(self, dtype: torch.dtype, device: torch.device, pool: MemoryPool, log: MemoryLog) -> None:
        """Prepare for the first ``fsdp_post_all_gather``, which allocates the tensors. ``pool`` is not used."""
        self._dtype, self._device, self._log = dtype, device, log
        self._start_anew()

    def _start_anew(self) -> None:
        self._is_new = True  # No tensor to compute with is made yet.
        self._params = [_Typed(*of, self._layout.rows(index)) for index, of in enumerate(self._of_params)]
        self._outputs: list[torch.Tensor] = []  # Of all parameters.
        self._packed: torch.Tensor | None = None
        self._sizes: list[int] = []  # The bytes of each tensor in a slice of the packed bytes.
        self._unpacked: list[torch.Tensor] = []  # The outputs as bytes, one row per rank.

    def buffers(self) -> list[DBuffer]:
        return []

    @property
    def nbytes_beside(self) -> int:
        return _nbytes(self._tensors())

    def _tensors(self) -> list[torch.Tensor]:
        """All tensors whose storage is freed after use."""
        inner = [tensor for param in self._params for tensor in param.inner]
        return [*self._outputs, *inner, *(() if self._packed is None else (self._packed,))]

    def compute_tensor(self, index: int) -> torch.Tensor:
        """An empty tensor: the type makes the tensor to compute with in the first :meth:`decode`."""
        return torch.empty(0, device="cpu")

    @torch.no_grad()
    def all_gather(self, shards: Shards, collectives: Collectives) -> Work:
        assert isinstance(shards, TypeShards)
        lenders = [self._lender(shards, index) for index in range(len(self._params))]
        if any(param.lender is not lender for param, lender in zip(self._params, lenders)):
            self._start_anew()  # A parameter was frozen, or trains again; or a program has loaded another tensor.
            for param, lender in zip(self._params, lenders):
                param.lender = lender
                param.made = None if lender is None else self._view(lender, param.module)
                param.is_view = param.made is not None
        of_params: list[list[torch.Tensor]] = []
        for index, param in enumerate(self._params):
            of_params.append([] if param.is_view else self._inputs(param, shards.local(index)))
        inputs = [tensor for tensors in of_params for tensor in tensors]
        if not self._outputs:
            with torch.inference_mode(False):  # Later forwards in other modes write to them, too.
                self._make_outputs(of_params)
        if self._packed is None:
            for output in self._outputs:
                allocate_storage(output, self._log)
            # Views with their own version counters: the type may compute with an output itself, and autograd may have saved it.
            pairs = [(output.data.view(-1), tensor.view(-1)) for output, tensor in zip(self._outputs, inputs)]
            # With more than one rank, there is one output: all ranks issue one collective.
            return wait_all([collectives.all_gather(output, tensor) for output, tensor in pairs])
        # Into this rank's slice of the output: the all-gather needs no other buffer.
        allocate_storage(self._packed, self._log)
        mine = self._packed.view(self._layout.ranks, -1)[self._rank]
        torch._foreach_copy_(mine.split(self._sizes), [tensor.view(-1).view(torch.uint8) for tensor in inputs])
        return collectives.all_gather(self._packed, mine)

    def _lender(self, shards: TypeShards, index: int) -> torch.Tensor | None:
        """The shard, if the model may compute with its memory: of one rank, frozen, on the device of the computation."""
        # The optimizer would write to what autograd has saved of a parameter that trains.
        if self._layout.ranks > 1 or shards.params[index].sharded.requires_grad:
            return None
        shard = shards.local(index)
        return shard if hasattr(shard, "fsdp_get_unsharded_view") and shard.device.type == self._device.type else None

    def _view(self, shard: Any, module: nn.Module) -> torch.Tensor | None:
        with torch.inference_mode(False):
            view: torch.Tensor | None = shard.fsdp_get_unsharded_view(self._mesh, module, self._mp_policy)
        if view is not None and (view.shape, view.dtype, view.device) != (shard.shape, shard.dtype, shard.device):
            raise ValueError(
                f"fsdp_get_unsharded_view of {type(shard).__name__} returned a tensor of shape {tuple(view.shape)}, "
                f"{view.dtype} on {view.device}: return one of the parameter's local shape, dtype, and device, "
                f"{tuple(shard.shape)}, {shard.dtype} on {shard.device}; or None"
            )
        return view

    def _inputs(self, param: _Typed, shard: Any) -> list[torch.Tensor]:
        """The tensors to send for a parameter: contiguous, on the device of the computation."""
        # Padded with zeros to the rows of the first rank: all ranks send the same size.
        if shard.size(0) != param.rows:
            padded = shard.new_zeros(param.rows, *shard.shape[1:])
            padded.narrow(0, 0, shard.size(0)).copy_(shard)
            shard = padded
        if not hasattr(shard, "fsdp_pre_all_gather"):
            raise ValueError(
                f"{type(shard).__name__} has fsdp_get_unsharded_view only, for frozen parameters on one rank: give it "
                "fsdp_pre_all_gather and fsdp_post_all_gather, which other parameters need"
            )
        if param.takes_mesh_only is None:  # Types written for older versions of FSDP2 take the mesh only.
            param.takes_mesh_only = len(inspect.signature(shard.fsdp_pre_all_gather).parameters) == 1
        if param.takes_mesh_only:
            tensors, param.metadata = shard.fsdp_pre_all_gather(self._mesh)
        else:
            strides = tuple(math.prod(param.shape[dim + 1 :]) for dim in range(len(param.shape)))
            policy: MixedPrecisionPolicy = self._mp_policy
            tensors, param.metadata = shard.fsdp_pre_all_gather(self._mesh, param.shape, strides, param.module, policy)
        if not param.has_rows:
            param.has_rows = [each.ndim == shard.ndim and each.size(0) == shard.size(0) for each in tensors]
        # With offload, shards are on the CPU.
        return [each.to(self._device).contiguous() for each in tensors]

    def _make_outputs(self, of_params: Sequence[Sequence[torch.Tensor]]) -> None:
        """Allocate what the all-gather fills, once the first inputs tell the sizes."""
        ranks = self._layout.ranks
        for param, inputs in zip(self._params, of_params):
            param.outputs = [each.new_empty(ranks * each.shape[:1].numel(), *each.shape[1:]) for each in inputs]
            self._outputs += param.outputs
        self._log.note(_nbytes(self._outputs))
        if len(self._outputs) == 1 or ranks == 1:  # One collective without packing, or none that sends anything.
            return
        for output in self._outputs:  # The all-gather fills the packed bytes.
            free_storage(output, self._log)
        self._sizes = [each.nbytes for inputs in of_params for each in inputs]
        in_bytes = [output.data.view(-1).view(torch.uint8) for output in self._outputs]
        self._unpacked = [each.view(ranks, size) for each, size in zip(in_bytes, self._sizes)]
        self._packed = torch.empty(ranks * sum(self._sizes), dtype=torch.uint8, device=self._device)
        self._log.note(self._packed.nbytes)

    def decode(self, shards: Shards, keeps_buffer: bool) -> Sequence[torch.Tensor] | None:
        assert isinstance(shards, TypeShards)
        if self._packed is not None:
            self._unpack(self._packed)
        if self._is_new:
            before = self.nbytes_beside
            with torch.inference_mode(False):
                for index, param in enumerate(self._params):
                    if param.is_view:
                        continue
                    shard: Any = shards.local(index)
                    param.made, param.inner = shard.fsdp_post_all_gather(param.gathered, param.metadata, self._dtype)
            self._log.note(self.nbytes_beside - before)
            self._is_new = False
            return [param.made for param in self._params if param.made is not None]
        for index, param in enumerate(self._params):
            if param.is_view:
                continue
            shard = shards.local(index)
            for tensor in param.inner:
                allocate_storage(tensor, self._log)
            # The parameter itself, as in FSDP2: a type may write to its attributes, such as a float8 scale. The version
            # counters do not change, because autograd may have saved the parameter.
            out = shards.params[index].unsharded
            with torch.no_grad(), preserved_versions((out, local_of(out)) if isinstance(out, DTensor) else out):
                shard.fsdp_post_all_gather(param.gathered, param.metadata, self._dtype, out=out)
        return None

    @torch.no_grad()
    def _unpack(self, packed: torch.Tensor) -> None:
        """Copy the all-gathered bytes into the outputs, and free them."""
        for output in self._outputs:
            allocate_storage(output, self._log)
        torch.split_with_sizes_copy(packed.view(self._layout.ranks, -1), self._sizes, dim=1, out=self._unpacked)
        free_storage(packed, self._log)

    def free(self, keeps_buffer: bool) -> None:
        # The tensors stay, without memory: autograd has saved them, and finds them filled again in backward.
        for tensor in self._tensors():
            free_storage(tensor, self._log)

    def holds(self, tensor: torch.Tensor) -> bool:
        own = storage_ids(tensor)
        made = [param.made for param in self._params if param.made is not None and not param.is_view]
        return any(each in own for tensor in made for each in storage_ids(tensor))


class TypeStandIn(Encoding):
    """Takes the part of a :class:`TypeEncoding` in a memory report: plain tensors on the meta device."""

    computes_in_buffer = False
    _layout: RowsLayout

    def compute_tensor(self, index: int) -> torch.Tensor:
        return self.buffer.flat.new_empty(self._layout.tensors[index].shape)


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes that ``tensors`` hold now. Several of them may share a storage: a type may return what was all-gathered."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())
