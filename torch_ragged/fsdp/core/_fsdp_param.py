"""FSDPParam: one parameter of a group: how its elements are distributed, and its sharded and unsharded forms."""

from __future__ import annotations

import itertools
import math
import operator
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from torch_ragged._register._spmd_types import attributes_of
from torch_ragged._register._torch import REFUSED_VERSION, dtensor_of, local_tensor, set_versions, storage_ids
from torch_ragged.fsdp.core._mesh import DataParallelMesh
from torch_ragged.fsdp.layout._buffer_layout import BufferLayout, TensorSpec
from torch_ragged.granularity import Granularity, Segments, elements
from torch_ragged.tensor._api import spec_of
from torch_ragged.tensor._cut_placement import CutPlacement, chunk_of
from torch_ragged.tensor._placement_extension import note_pending
from torch_ragged.tensor._redistribute import mesh_group
from torch_ragged.tensor.placement_types import RaggedShard
from torch_ragged.tensor.strided_placement_types import StridedRaggedShard

__all__ = [
    "Distribution",
    "FSDPParam",
    "FoundParam",
    "InvalidArgument",
    "Reading",
    "ShardedState",
    "group_by_param",
    "has_extension",
    "local_of",
    "owner_of",
]


class InvalidArgument(ValueError, AssertionError):
    """A wrong argument. FSDP2 raises AssertionError for it, this package ValueError: this class is both."""


class ShardedState(Enum):
    """Which parameters are registered in a group's modules, and whether the unsharded ones are allocated.

    ::

        SHARDED  --unshard(wait=False)-->  GATHERING  --unshard()-->  UNSHARDED  --reshard()-->  SHARDED
                                               `----------------reshard()---------------------------^

    Equal on all ranks between the hooks of modules.
    """

    SHARDED = auto()
    """The sharded DTensors are registered; the unsharded buffer is free."""
    GATHERING = auto()
    """The same, with an all-gather in flight."""
    UNSHARDED = auto()
    """The unsharded parameters are registered."""


class Reading:
    """How a model has distributed a parameter that is a plain tensor to it, and a DTensor between uses.

    Attributes:
        value: the parameter as a DTensor on the whole mesh. It shares memory with the plain tensor.
        gradient_placements: of the plain gradients that autograd computes.
    """

    value: DTensor
    gradient_placements: list[Placement]

    def mark(self, tensor: torch.Tensor) -> None:
        """Give the unsharded parameter, a plain tensor, the marks of the user's."""


class Distribution:
    """How the elements of a parameter are distributed, and its forms in the buffers of its group.

    A group works on ``local_shape``: the whole parameter or, if it is a DTensor (tensor or expert parallelism), this rank's
    piece of it. The sharded parameter is a DTensor on a mesh of both: first the data-parallel shards, then the model's
    placements::

        plain                   (RaggedShard,)
        HSDP                    (Replicate(), RaggedShard)
        Shard(0) by the model   (StridedRaggedShard, Shard(0))    cut by the model first, and each piece by the group
        Shard(d) by the model   (RaggedShard, Shard(d))           whole slices of the dimensions before d
        _StridedShard(d), d > 0 (RaggedShard, _StridedShard(d))   as Shard(d): joined weights under tensor parallelism
        InterleavedShard(d)     as Shard(d)                       joined weights, also of dimension 0

    Args:
        fqn: the parameter's name, for errors.
        param: a plain tensor, or a DTensor as the model has distributed it.
        shard_dim: the dimension of a ``Shard`` placement; None: a ragged placement.
        reading: of a plain tensor that the model has distributed.

    Raises:
        ValueError: the parameter is a DTensor that data parallelism has sharded already, or is a Partial or unevenly cut
            DTensor, or a DTensor on a mesh without names; or is a plain tensor without annotation on a mesh with
            ``dp_mesh_dims``, or has no dimension ``shard_dim``.
    """

    def __init__(
        self, fqn: str, param: torch.Tensor, dp: DataParallelMesh, shard_dim: int | None = None, reading: Reading | None = None
    ) -> None:
        self.reading, param = reading, param if reading is None else reading.value
        self.fqn, self.shape = fqn, param.shape
        self.is_dtensor = isinstance(param, DTensor)
        if isinstance(param, DTensor):
            _check_model_placements(fqn, param, dp)
            self._model_mesh, self._model_placements = param.device_mesh, param.placements
        elif dp.spmd is not None:
            raise ValueError(
                f"When dp_mesh_dims is provided, all parameters must be DTensors on the full mesh, but {fqn} is plain: "
                "distribute it (distribute_tensor, distribute_module), with Replicate() on data-parallel mesh dimensions"
            )
        self.local_shape = tuple(local_of(param).shape)
        try:
            self.mesh, self._template, self._is_dp = dp.place(param if isinstance(param, DTensor) else None)
        except RuntimeError as error:
            raise ValueError(
                f"{fqn} is a DTensor on {self._model_mesh}, which cannot be joined with the mesh of fully_shard, {dp.mesh}: "
                f"{error}. Make one mesh, init_device_mesh(..., mesh_dim_names=('dp', 'tp')), and use its slices: mesh['tp'] "
                "for the model, mesh['dp'] for fully_shard"
            ) from error
        note_pending(self.mesh)  # Of Shard(0), too: an optimizer that reads a norm would step by one rank's part of it.
        self._shards_at = self._template.index(None) if dp.has_shards else len(self._template)  # The shards' mesh dimension.
        # The dimensions that the model cuts behind the shards, with the sizes of the mesh dimensions. A cut before the shards
        # needs no care: placements apply from left to right.
        self._cuts: dict[int, list[int]] = {}
        for dim in range(self._shards_at + 1, len(self._template)):
            placement = self._template[dim]
            assert placement is not None
            if (chunk := chunk_of(placement)) is not None:
                self._cuts.setdefault(chunk.dim, []).append(self.mesh.size(dim))
        self._dp_dims, self._ranks, self._counts_once = dp.spmd_dims, dp.ranks, dp.counts_once
        self._rank = dp.rank if dp.is_member else dp.ranks  # Ranks: an empty interval, outside of the mesh.
        if shard_dim is not None and not -len(self.local_shape) <= shard_dim < len(self.local_shape):
            raise InvalidArgument(
                f"shard_placement_fn returned Shard({shard_dim}) for {fqn} of shape {tuple(self.shape)}: return Shard(d) with "
                f"a dimension d below {len(self.local_shape)}, a granularity or None"
            )
        self.shard_dim = None if shard_dim is None else shard_dim % len(self.local_shape)
        self._is_flat = shard_dim is None and dp.has_shards  # Mostly: local tensors have one dimension.
        if self.shard_dim is not None:
            # The first rank's piece along ``shard_dim``, of which later ranks hold as much or less; and the size of one slice.
            self._rows = -(-self.local_shape[self.shard_dim] // self._ranks)
            self._row_numel = math.prod(size for dim, size in enumerate(self.local_shape) if dim != self.shard_dim)
        # Whether the gradient that autograd computes is not yet this rank's piece: gradient() may issue a collective.
        self.reduces_gradient = self.is_dtensor
        if reading is not None:
            given = enumerate(reading.gradient_placements)
            self.reduces_gradient = any(each != self._model_placements[dim] for dim, each in given if dim not in self._dp_dims)

    @property
    def is_uneven(self) -> bool:
        """Whether it is cut by a ``Shard(d)`` whose dimension the ranks do not divide."""
        return self.shard_dim is not None and self.local_shape[self.shard_dim] % self._ranks != 0

    @property
    def text(self) -> str:
        """A description, equal on all ranks."""
        model = ""
        if self.is_dtensor:
            model = f" placed by the model as {self._model_placements} on {tuple(self._model_mesh.shape)}"
            model += f" {self._model_mesh.mesh_dim_names}"
        return f"{tuple(self.shape)}{model or ' plain'}"

    # -- for the planner -------------------------------------------------------------------------------------------

    def tensor_spec(self, granularity: Granularity) -> TensorSpec:
        """The planner's input. If the model cuts a later dimension than the first, shards must be whole slices, too.

        Raises:
            ValueError: ``granularity`` has segments that are not those of the parameter, or that the model cuts together.
        """
        # A rank's piece along a later dimension is not contiguous in the parameter: a shard must be whole slices of the
        # dimensions before it.
        cut = min(self._cuts.keys() - {0}, default=None)
        if isinstance(granularity, Segments):
            granularity = self._local_segments(granularity, cut)
        spec = granularity.tensor_spec(self.fqn, self.local_shape)
        return spec if cut is None else spec.whole_slices(cut)

    def _local_segments(self, granularity: Segments, cut: int | None) -> Granularity:
        """The granularity of this rank's piece, of which each segment is a part of the parameter's."""
        dim, sizes = granularity.check(self.fqn, self.shape), granularity.sizes
        if cut is not None and cut <= dim:
            return elements()  # Shards are whole slices, and each slice has all segments.
        for index, placement in enumerate(self._model_placements if self.is_dtensor else ()):
            ranks = self._model_mesh.size(index)
            # Other cuts leave the segments of this rank's piece as long as they are.
            chunk = chunk_of(placement)
            if chunk is None or chunk.dim != dim or ranks == 1:
                continue
            # InterleavedShard cuts each segment by itself. One cut through several would give this rank a part of some of them
            # only.
            if not {*itertools.accumulate(sizes)} <= {*itertools.accumulate(chunk.segments(sum(sizes)))}:
                raise InvalidArgument(
                    f"{self.fqn} has {granularity.text}, but the model cuts segments together, by {placement!r} over {ranks} "
                    f"ranks: distribute it by InterleavedShard({dim}, {granularity.sizes}), or give a granularity without "
                    "segments"
                )
            sizes = tuple(size // ranks for size in sizes)
        return granularity.with_sizes(sizes)

    def rows_spec(self) -> TensorSpec:
        """The planner's description of a parameter that is cut by ``Shard(shard_dim)``."""
        shape = self.local_shape if self.shard_dim == 0 else (math.prod(self.local_shape),)
        return TensorSpec(self.fqn, shape, (0,), max(1, self._row_numel))

    def even_layout(self, ranks: int) -> BufferLayout:
        """The layout of a buffer of this parameter alone, cut by ``Shard(shard_dim)``: the pieces in the order of ranks."""
        assert self.shard_dim is not None
        row = self._row_numel
        shard = max(1, self._rows * row)  # An empty parameter has a buffer, too.
        spec = self.rows_spec()
        why = f"Shard({self.shard_dim}) of {self.fqn}"
        return BufferLayout((spec,), (0,), shard, ranks, 1, lower_bound=shard, forced_by=why, order="even")

    # -- forms -----------------------------------------------------------------------------------------------------

    def flat(self, param: torch.Tensor) -> torch.Tensor:
        """The elements of this rank's piece of ``param``, 1-D, in the order of the buffer."""
        whole = local_of(param)
        return (self._in_buffer_order(whole) if self.shard_dim else whole).reshape(-1)

    def _in_buffer_order(self, whole: torch.Tensor) -> torch.Tensor:
        """The pieces of all ranks, one after the other, of a tensor that is cut along a later dimension than the first."""
        assert self.shard_dim
        return torch.cat([piece.reshape(-1) for piece in whole.split(max(1, self._rows), self.shard_dim)])

    def pieces(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Views of each rank's piece, given all elements in the order of the buffer.

        Concatenated along ``shard_dim``, they are the parameter.
        """
        assert self.shard_dim is not None
        if not flat.numel():
            return [flat.view(self.local_shape)]  # Without elements, it tells no number of rows.
        return [self.local(piece) for piece in flat.split(self._rows * self._row_numel)]

    def sharded(self, flat: torch.Tensor, layout: BufferLayout, index: int) -> DTensor:
        """The sharded DTensor, as a view of ``flat``, which holds this rank's elements."""
        local = self.local(flat)
        if self.shard_dim is not None:
            return self.shaped(local)
        ragged: RaggedShard | StridedRaggedShard = layout.placement(index)
        # The mesh has the shards before the dimensions of the model, which has cut first: a strided placement says so.
        if 0 in self._cuts:
            ragged = StridedRaggedShard(ragged.dims, ragged.units, split_factor=math.prod(self._cuts[0]))
        return self._dtensor(local, ragged)

    def local(self, flat: torch.Tensor) -> torch.Tensor:
        """The local tensor of a sharded parameter, as a view of ``flat``."""
        if self.shard_dim is not None:
            shape, row = list(self.local_shape), self._row_numel
            # Of a tensor without elements, too, each rank has a part of the dimension.
            before = self._rank * self._rows
            shape[self.shard_dim] = flat.numel() // row if row else min(max(shape[self.shard_dim] - before, 0), self._rows)
            return flat.view(shape)
        return flat if self._is_flat else flat.view(self.local_shape)

    def shaped(self, local: torch.Tensor) -> DTensor:
        """The DTensor cut along ``shard_dim`` with the local tensor ``local``."""
        split = math.prod(self._cuts.get(self.shard_dim, ()))  # type: ignore[arg-type]
        shard = _StridedShard(self.shard_dim, split_factor=split) if split > 1 else Shard(self.shard_dim)  # type: ignore[arg-type]
        return self._dtensor(local, shard)

    def _dtensor(self, local: torch.Tensor, placement: Placement) -> DTensor:
        """The DTensor with ``placement`` over the shards."""
        placements: list[Any] = list(self._template)
        if self._shards_at < len(placements):  # Otherwise all ranks are replicas.
            placements[self._shards_at] = placement
        return dtensor_of(local, spec_of(self.mesh, tuple(placements), self.shape, local.dtype))

    def unreduced(self, view: torch.Tensor, pending: tuple[int, ...], sums: Placement) -> DTensor:
        """This rank's own gradient, given its ``view`` in the buffer, as a DTensor. A copy if the buffer has another order.

        Args:
            pending: the model's mesh dimensions on which it is pending a sum.
            sums: how the group reduces it: ``Partial``.
        """
        if self.shard_dim:
            view = torch.cat(self.pieces(view.reshape(-1)), self.shard_dim)
        elif view.shape != self.local_shape:  # Rows that are padded for each rank.
            view = view.reshape(-1, *self.local_shape[1:])[: self.local_shape[0]]
        names = [self._model_mesh.mesh_dim_names[dim] for dim in pending] if pending else []  # type: ignore[index]
        # Open sums: over data-parallel ranks, which the group adds later, and over dimensions of the model.
        own = zip(self._template, self._is_dp, self.mesh.mesh_dim_names or ("",) * self.mesh.ndim)
        placements = tuple([sums if is_dp else Partial() if name in names else each for each, is_dp, name in own])
        return dtensor_of(view, spec_of(self.mesh, placements, self.shape, view.dtype))  # type: ignore[arg-type]

    def partial(self, flat: torch.Tensor, like: DTensor, sums: Placement) -> DTensor:
        """A gradient that is not reduced over replicas, given this rank's elements ``flat``; ``like`` is the parameter."""
        ours = zip(self._template, self._is_dp, like.placements)
        placements = tuple([sums if is_dp and each is not None else own for each, is_dp, own in ours])
        return dtensor_of(self.local(flat), spec_of(self.mesh, placements, self.shape, flat.dtype))

    def gathered(self, view: torch.Tensor) -> torch.Tensor:
        """The tensor that the model computes with, given a ``view`` of all elements in ``local_shape``."""
        if not self.is_dtensor or self.reading is not None:
            return view
        # Not from_local(), which makes a view: of a weight that holds codes, that is a copy of the values it has now.
        return dtensor_of(view, spec_of(self._model_mesh, self._model_placements, self.shape, view.dtype))

    def gradient(self, gradient: torch.Tensor, before: tuple[int, ...] | None = None) -> tuple[torch.Tensor, tuple[int, ...]]:
        """This rank's piece of a gradient in the order of the buffer, and the model's mesh dimensions that it is pending on.

        A DTensor is first redistributed to the model's placements: perhaps a collective on the model's mesh dimensions. Its
        placements on data-parallel mesh dimensions are ignored, as in FSDP2: each rank's local tensor is its own contribution,
        and the group reduces it. ``weight.to_local()``, for example, gives such gradients Replicate().

        If gradients count once, a sum over the model's mesh dimensions stays pending, too: the weight of a norm under sequence
        parallelism needs no collective here, and the group adds the shards of all such parameters together.

        Args:
            before: the mesh dimensions on which the gradient is pending that this one is added to; None if there is none.
        """
        if self.reading is not None:
            # Autograd's gradient is plain: what the model says of the parameter tells which sums are still open.
            placements = self.reading.gradient_placements
            gradient = DTensor.from_local(gradient, self._model_mesh, placements, run_check=False)
        pending: tuple[int, ...] = ()
        if self.is_dtensor:
            assert isinstance(gradient, DTensor)
            given, wanted = gradient.placements, list(self._model_placements)
            if self._counts_once:
                sums = [dim for dim, each in enumerate(given) if each == Partial("sum") and wanted[dim] == Replicate()]
                pending = tuple([dim for dim in sums if dim not in self._dp_dims]) if before is None else before
                for dim in (*self._dp_dims, *pending):
                    wanted[dim] = Partial("sum") if dim in sums else Replicate()
            else:
                for dim in self._dp_dims:
                    wanted[dim] = given[dim]
            gradient = gradient if list(given) == wanted else gradient.redistribute(placements=wanted)
            here = self._model_mesh.get_coordinate() or ()
            added = (*self._dp_dims, *pending) if self._counts_once else ()
            if any(here[dim] and wanted[dim] == Replicate() for dim in added):
                gradient = torch.zeros_like(local_of(gradient))  # The first of the ranks contributes what all of them have.
            gradient = local_of(gradient)
        return (self._in_buffer_order(gradient) if self.shard_dim else gradient), pending

    def group_over(self, dims: tuple[int, ...]) -> dist.ProcessGroup:
        """The ranks along mesh dimensions of the model."""
        # It may make a process group. Ranks along these dimensions have the same parameters, and call this, too.
        return mesh_group(self._model_mesh, dims)


def _check_model_placements(fqn: str, param: DTensor, dp: DataParallelMesh) -> None:
    if dp.spmd is not None:
        if param.device_mesh != dp.spmd:
            raise ValueError(f"{fqn} is on {param.device_mesh}, expected it on the mesh passed to fully_shard, {dp.spmd}")
        for dim in dp.spmd_dims:
            if param.placements[dim] != Replicate():
                raise ValueError(
                    f"Expected Replicate() on data-parallel mesh dimension {dim} but {fqn} is placed as {param.placements}"
                )
    sizes = list(param.shape)
    for dim, placement in enumerate(param.placements):
        chunk = chunk_of(placement)
        if chunk is not None and (chunk.split_factor == 1 or chunk.dim > 0):
            # Uneven pieces would have other layouts on other ranks of the model, which make the same collectives. (Segments are
            # even, or the DTensor would not exist.)
            if sizes[chunk.dim] % (param.device_mesh.size(dim) * chunk.split_factor):
                raise ValueError(
                    f"{fqn} of shape {tuple(param.shape)} is cut unevenly by {placement} over {param.device_mesh.size(dim)} "
                    "ranks of model parallelism: pad it, or choose a size that is a multiple of the number of ranks"
                )
            sizes[chunk.dim] //= param.device_mesh.size(dim)
        elif not isinstance(placement, Replicate):
            hint = "is sharded by fully_shard already" if isinstance(placement, CutPlacement) else "unknown"
            raise ValueError(
                f"{fqn} is a DTensor placed as {param.placements} ({hint}): fully_shard takes plain parameters, and DTensors "
                "with Shard, InterleavedShard and Replicate of tensor or expert parallelism, or _StridedShard of a later "
                "dimension than the first"
            )
    # With a dimension in both meshes, the same ranks would cut the parameter twice.
    shared = [name for name in dp.mesh.mesh_dim_names or () if name in (param.device_mesh.mesh_dim_names or ())]
    if shared and dp.spmd is None:
        rest = [name for name in dp.mesh.mesh_dim_names or () if name not in shared]
        raise ValueError(
            f"{fqn} is a DTensor on the mesh dimension {shared[0]!r}, and fully_shard got {dp.mesh}, which has this dimension, "
            f"too: pass the data-parallel dimensions only, mesh[{(rest or ['dp'])[0]!r}]; or distribute all parameters over "
            "the whole mesh, and name its data-parallel dimensions with dp_mesh_dims"
        )
    if param.device_mesh.mesh_dim_names is None or dp.mesh.mesh_dim_names is None:
        raise ValueError(
            f"{fqn} is a DTensor on {param.device_mesh}, and fully_shard got {dp.mesh}: make both from one mesh whose "
            "dimensions have names, such as init_device_mesh(..., mesh_dim_names=('dp', 'tp'))"
        )


def has_extension(param: torch.Tensor) -> bool:
    """Whether ``param``, or its local tensor, says by methods what is sent and computed with: see :class:`TypeEncoding`.

    Raises:
        AssertionError: it has only one of the two methods of the all-gather, as in FSDP2.
    """
    inner = local_of(param) if isinstance(param, DTensor) else param
    pre, post = hasattr(inner, "fsdp_pre_all_gather"), hasattr(inner, "fsdp_post_all_gather")
    if pre != post:
        raise AssertionError(f"Both fsdp_pre_all_gather and fsdp_post_all_gather should be defined for {type(inner)}")
    return pre or hasattr(inner, "fsdp_get_unsharded_view")


def keep_attributes(source: torch.Tensor, target: torch.Tensor) -> None:
    """Give ``target`` what the user has set on ``source``: attributes, such as a mark for an optimizer, and ``grad_dtype``."""
    if vars(source):  # Mostly none.
        found = attributes_of(source)
        if has_extension(source):  # Its type keeps the whole tensor there, which must be freed.
            own = set(storage_ids(source))
            tensors = [name for name, value in found.items() if isinstance(value, torch.Tensor)]
            found = {name: value for name, value in found.items() if name not in tensors or own.isdisjoint(storage_ids(value))}
        vars(target).update(found)
    if source.grad_dtype != source.dtype:  # By default, it is the tensor's own dtype, and follows a conversion.
        target.grad_dtype = source.grad_dtype


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor of a DTensor; a plain tensor is returned detached."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    return local_tensor(tensor)


_owners: weakref.WeakValueDictionary[int, FSDPParam] = weakref.WeakValueDictionary()
"""By ``id`` of a sharded parameter: torch swaps the contents of tensors only if they have no weak references."""

group_by_param: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""The group of each parameter, by the id of its FSDPParam, which the group keeps alive."""


@dataclass(frozen=True, eq=False)
class FoundParam:
    """A parameter as the user made it, with the modules and names it is registered under (several if tied).

    Attributes:
        spec: what the planner knows of it.
        param_dtype: its dtype in forward and backward; None: its own.
    """

    fqn: str
    registered_names: list[tuple[nn.Module, str]]
    value: nn.Parameter
    distribution: Distribution
    spec: TensorSpec
    param_dtype: torch.dtype | None = None


@dataclass
class FSDPParam:
    """One parameter of a group, with the modules and names that it is registered under (several if tied).

    Attributes:
        distribution: how the elements are distributed.
        sharded: the DTensor that is registered between uses.
        unsharded: the parameter that the model computes with.
        view: the memory of ``unsharded``, in the group's buffer.
        requires_grad: of ``sharded`` and ``unsharded``, when they were last made equal.
        version: a number that changes with every write to the unsharded parameter, as it was after the last all-gather.
        has_gradient: whether the unreduced buffer holds a gradient.
        was_used: whether this rank has a gradient in the next or current reduction.
        may_be_wide: whether the gradient may have a wider dtype than the gradient buffer.
        pending: the model's mesh dimensions on which the gradient in the buffer is pending a sum; None if there is no gradient.
    """

    fqn: str
    registered_names: list[tuple[nn.Module, str]]
    distribution: Distribution
    sharded: nn.Parameter
    unsharded: nn.Parameter = field(init=False)
    view: torch.Tensor = field(init=False)
    requires_grad: bool = True
    version: int = 0
    has_gradient: bool = False
    was_used: bool = False
    may_be_wide: bool = False
    pending: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        self.set_sharded(self.sharded)

    def set_sharded(self, value: nn.Parameter) -> None:
        """Let another object be the sharded parameter."""
        self.sharded = value
        _owners[id(value)] = self

    @property
    def registered(self) -> torch.Tensor | None:
        """The parameter that is registered in the modules now."""
        module, name = self.registered_names[0]
        return module._parameters.get(name)

    def sync_requires_grad(self) -> None:
        """If the user has frozen or unfrozen one of the two parameters, do the same with the other one."""
        sharded, unsharded, before = self.sharded, self.unsharded, self.requires_grad
        if sharded.requires_grad is before and unsharded.requires_grad is before:
            return
        self.requires_grad = not before
        sharded.requires_grad_(self.requires_grad)
        unsharded.requires_grad_(self.requires_grad)


class ReadGuard:
    """Lets autograd refuse to read the unsharded parameters that a forward has saved, while they are resharded.

    Their memory is freed then, or holds those of another module: some kernels would crash, and others compute with what lies
    there. Autograd refuses a saved tensor whose version has changed.

    Attributes:
        version: that of the parameters while they are resharded. No other group has it.
    """

    def __init__(self, params: Sequence[FSDPParam]) -> None:
        self._params, self.version = params, 0
        # The parameters that are refused now, and their versions before.
        self._refused: tuple[tuple[nn.Parameter, ...], tuple[int, ...]] | None = None

    def refuse_reads(self) -> None:
        """The parameters are resharded."""
        tensors = tuple(map(_unsharded_of, self._params))
        # A number of its own: autograd's error names the number, which tells the group.
        self._refused, self.version = (tensors, tuple(map(_version_of, tensors))), next(_resharded_versions)
        set_versions(tensors, (self.version,) * len(tensors))

    def allow_reads(self) -> None:
        """The parameters are unsharded again."""
        if self._refused is not None:
            set_versions(*self._refused)
            self._refused = None

    def refuses(self, version: int) -> bool:
        """Whether autograd's error of a tensor of ``version`` is of these parameters."""
        return self._refused is not None and version == self.version

    def refuses_view(self, offset: int) -> bool:
        """Whether a view of freed memory, which begins at ``offset``, may be of these parameters."""
        if self._refused is None:
            return False
        # torch's error tells the offset only. Other groups may fit, too: the caller names all that do.
        offsets = [(offset - local.storage_offset(), local.numel()) for local in map(local_of, self._refused[0])]
        return any(0 <= inside < numel for inside, numel in offsets)


_resharded_versions = itertools.count(REFUSED_VERSION)
_unsharded_of, _version_of = operator.attrgetter("unsharded"), operator.attrgetter("_version")


def owner_of(parameter: torch.Tensor) -> FSDPParam | None:
    """The parameter whose sharded form is ``parameter``; None if ``fully_shard`` has not made it."""
    owner = _owners.get(id(parameter))
    return owner if owner is not None and owner.sharded is parameter else None  # An id may be used again.
