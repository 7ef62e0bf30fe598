"""Hooks on ``torch/distributed/tensor/_api.py`` and what stands around it: making DTensors, taking them apart, saving them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor import _api as dtensor_api
from torch.distributed.tensor import _utils as dtensor_utils
from torch.distributed.tensor import placement_types as dtensor_placement_types
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement
from torch.utils import _pytree as pytree

from torch_ragged import _checkpoint
from torch_ragged._ops import RaggedRows
from torch_ragged._ownership import owned, row_major
from torch_ragged._redistribute import broadcast_local
from torch_ragged._register._hook import CHECKPOINT, PROTOCOL, extend_in_place, has, hook
from torch_ragged.placement_types import RaggedShard, StridedRaggedShard, cuts_of, has_ragged, normalize_placements


@hook(
    "DTensor.from_local",
    "check a ragged local against its global shape",
    PROTOCOL,
    lambda: has(DTensor.from_local, "local_tensor", "device_mesh", "placements", "run_check", "shape", "stride"),
)
def _install_from_local() -> None:
    original = DTensor.from_local

    @functools.wraps(original)
    def from_local(local_tensor, device_mesh=None, placements=None, **kwargs):  # type: ignore[no-untyped-def]
        if placements is not None and has_ragged(placements):
            mesh = device_mesh or dtensor_api._mesh_resources.get_current_mesh()
            placements = _check_local(local_tensor, mesh, placements, kwargs)
            device_mesh = mesh
        return original(local_tensor, device_mesh, placements, **kwargs)

    DTensor.from_local = staticmethod(from_local)  # type: ignore[method-assign]


def _check_local(
    local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], kwargs: dict[str, Any]
) -> tuple[Placement, ...]:
    """Refuse a local tensor that is not what ownership says; on every rank if ``run_check``. Fills in the stride."""
    if kwargs.get("shape") is None:
        raise ValueError(
            "DTensor.from_local with a ragged placement needs the global shape: pass shape= (it cannot be told from 1-D locals)"
        )
    shape = kwargs["shape"] = torch.Size(kwargs["shape"])
    kwargs["stride"] = row_major(shape)
    check = functools.partial(_local_placements, local, mesh, tuple(placements), shape)
    if kwargs.get("run_check") and mesh.get_coordinate() is not None:
        return _on_every_rank(mesh, shape, check)
    return check()


def _local_placements(
    local: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size
) -> tuple[Placement, ...]:
    normalized = normalize_placements(placements, tuple(shape), tuple(mesh.shape))
    coordinate = mesh.get_coordinate()
    if coordinate is not None:
        expected = owned(tuple(shape), tuple(mesh.shape), cuts_of(normalized), tuple(coordinate)).local_shape
        if tuple(local.shape) != expected:
            raise ValueError(
                f"shape {tuple(shape)} under {''.join(map(str, normalized))}: rank {dist.get_rank()} gave a local tensor of "
                f"shape {tuple(local.shape)}, expected {expected}"
            )
    return normalized


def _on_every_rank(mesh: DeviceMesh, shape: torch.Size, check: Callable[[], tuple[Placement, ...]]) -> tuple[Placement, ...]:
    """The placements that ``check`` gives, or on every rank the errors of all. One small object all-gather per mesh dim."""
    try:
        found = check()
        answers = [(f"{tuple(shape)} {found}", "")]
    except (TypeError, ValueError) as error:
        answers = [("", str(error))]
    for dim in range(mesh.ndim):
        group = mesh.get_group(dim)
        gathered: list[Any] = [None] * group.size()
        dist.all_gather_object(gathered, answers, group=group)
        answers = [answer for part in gathered for answer in part]
    problems = sorted({text for _, text in answers if text})
    given = sorted({what for what, text in answers if not text})
    if len(given) > 1:
        problems.append(f"ranks gave different shapes or placements: {', '.join(given)}")
    if problems:
        raise ValueError("DTensor.from_local: " + "; ".join(problems))
    return found


@hook(
    "_api.compute_global_tensor_info",
    "from_local takes the shape () for none given",
    PROTOCOL,
    lambda: callable(getattr(dtensor_api, "compute_global_tensor_info", None)),
)
def _install_global_tensor_info() -> None:
    original = dtensor_api.compute_global_tensor_info

    def compute_global_tensor_info(tensor, mesh, placements):  # type: ignore[no-untyped-def]
        if has_ragged(placements):  # from_local has a shape then, which torch takes for none where it is ().
            return [], []
        return original(tensor, mesh, placements)

    dtensor_api.compute_global_tensor_info = compute_global_tensor_info  # type: ignore[attr-defined]


@hook(
    "distribute_tensor",
    "cut a tensor as a ragged placement says",
    PROTOCOL,
    lambda: has(dtensor_api.distribute_tensor, "tensor", "device_mesh", "placements"),
)
def _install_distribute_tensor() -> None:
    guard = "placements is not None and has_ragged(placements)"
    extend_in_place(dtensor_api.distribute_tensor, guard, _make_distribute_tensor)  # type: ignore[arg-type]


def _make_distribute_tensor(original: Callable[..., DTensor]) -> Callable[..., DTensor]:
    def distribute_tensor(tensor, device_mesh=None, placements=None, **kwargs):  # type: ignore[no-untyped-def]
        mesh = device_mesh or dtensor_api._mesh_resources.get_current_mesh()
        placements = normalize_placements(tuple(placements), tuple(tensor.shape), tuple(mesh.shape))
        if isinstance(tensor, DTensor):
            return original(tensor, mesh, placements, **kwargs)
        if any(isinstance(p, Partial) for p in placements):
            raise ValueError(f"distribute_tensor to {placements}: distribute to Replicate in place of Partial")
        # Ranks agree on the data of the source rank first, as DTensor's own placements do.
        replicated = original(tensor.contiguous() if tensor.is_leaf else tensor, mesh, [Replicate()] * mesh.ndim, **kwargs)
        local = broadcast_local(_local(replicated).detach(), mesh, tensor.shape, placements)
        meta = TensorMeta(tensor.shape, row_major(tensor.shape), tensor.dtype)
        spec = DTensorSpec(mesh, placements, tensor_meta=meta)
        return DTensor(local.requires_grad_(tensor.requires_grad), spec, requires_grad=tensor.requires_grad)  # type: ignore

    return distribute_tensor


def _local(tensor: DTensor) -> torch.Tensor:
    return tensor._local_tensor


@hook(
    "_api._ToTorchTensor.backward",
    "the global stride of a ragged gradient cannot be told from its local",
    PROTOCOL,
    lambda: has(dtensor_api._ToTorchTensor.backward, "ctx", "grad_output"),
)
def _install_to_local_backward() -> None:
    function = dtensor_api._ToTorchTensor
    original = function.backward

    def backward(ctx, grad_output):  # type: ignore[no-untyped-def]
        spec = ctx.dtensor_spec
        wanted = ctx.grad_placements or spec.placements
        if grad_output is None or not (has_ragged(spec.placements) or has_ragged(wanted)):
            return original(ctx, grad_output)
        placements = tuple(Replicate() if isinstance(p, Partial) else p for p in wanted)
        meta = TensorMeta(spec.shape, row_major(spec.shape), grad_output.dtype)
        grad_spec = DTensorSpec(spec.mesh, placements, tensor_meta=meta)
        return DTensor(grad_output.contiguous(), grad_spec, requires_grad=grad_output.requires_grad), None  # type: ignore

    function.backward = staticmethod(backward)  # type: ignore[method-assign, assignment]


@hook(
    "_utils.compute_local_shape_and_global_offset",
    "it takes an unknown placement for Replicate: refuse instead",
    PROTOCOL,
    lambda: has(dtensor_utils.compute_local_shape_and_global_offset, "global_shape", "mesh", "placements"),
)
def _install_local_shape() -> None:
    def refuse(global_shape, mesh, placements, *args, **kwargs):  # type: ignore[no-untyped-def]
        raise ValueError(f"a piece under {placements} is no single box with one offset: use DTensor.__create_chunk_list__()")

    function = dtensor_utils.compute_local_shape_and_global_offset
    extend_in_place(function, "has_ragged(placements)", lambda original: refuse)  # type: ignore[arg-type]


@hook(
    "_pytree.register_constant",
    "torch.compile guards on placements: before 2.13 only on those that it knows, or on constants",
    PROTOCOL,
    lambda: callable(pytree.register_constant),
)
def _install_constants() -> None:
    if not hasattr(dtensor_placement_types, "_register_placements_as_opaque"):  # Later versions take any Placement.
        for placement in (RaggedShard, StridedRaggedShard, RaggedRows):
            pytree.register_constant(placement)


@hook(
    "DTensor._stable_hash_for_caching",
    "ranks of one machine share compiled graphs on disk, but what ragged ranks compile differs",
    PROTOCOL,
    lambda: not hasattr(DTensor, "_stable_hash_for_caching") or has(DTensor._stable_hash_for_caching, "self"),
)
def _install_cache_key() -> None:
    if not hasattr(DTensor, "_stable_hash_for_caching"):  # 2.11: torch does not cache graphs of DTensors.
        return
    original = DTensor._stable_hash_for_caching

    @functools.wraps(original)
    def _stable_hash_for_caching(self):  # type: ignore[no-untyped-def]
        return f"{original(self)} at {self.device_mesh.get_coordinate()}"

    DTensor._stable_hash_for_caching = _stable_hash_for_caching  # type: ignore[method-assign]


@hook(
    "DTensor.data_ptr",
    "around a view into a buffer it gives the view's offset, which copy.deepcopy takes for memory of its own",
    CHECKPOINT,
    lambda: callable(DTensor.data_ptr),
)
def _install_data_ptr() -> None:
    original = DTensor.data_ptr

    @functools.wraps(original)
    def data_ptr(self):  # type: ignore[no-untyped-def]
        return 0 if has_ragged(self.placements) else original(self)

    DTensor.data_ptr = data_ptr  # type: ignore[method-assign]


@hook(
    "DTensor.__create_write_items__, __create_chunk_list__, __get_tensor_shard__",
    "several chunks per rank in checkpoints",
    CHECKPOINT,
    lambda: all(hasattr(DTensor, f"__{n}__") for n in ("create_write_items", "create_chunk_list", "get_tensor_shard")),
)
def _install_checkpoint() -> None:
    def extend(name: str, own: Callable[..., Any]) -> None:
        original = getattr(DTensor, name)

        @functools.wraps(original)
        def method(self, *args):  # type: ignore[no-untyped-def]
            if has_ragged(self.placements):
                self._raise_if_contains_partial_placements()
                return own(self, *args)
            return original(self, *args)

        setattr(DTensor, name, method)

    extend("__create_write_items__", lambda tensor, fqn, obj: _checkpoint.create_write_items(fqn, obj))
    extend("__create_chunk_list__", _checkpoint.create_chunk_list)
    extend("__get_tensor_shard__", _checkpoint.get_tensor_shard)
