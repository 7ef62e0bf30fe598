"""The only door into torch's internals: makes the placements first class in DTensor.

Each hook is one small function. It names the torch function that it extends, and why. A hook acts only where a
RaggedShard is involved; everything else goes to torch's own code as before. On import each hook's target is
checked, so that an unknown layout of torch's internals is an ImportError and never a wrong answer later.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor, _are_we_tracing
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor import _api as dtensor_api
from torch.distributed.tensor import _dispatch as dtensor_dispatch
from torch.distributed.tensor import _redistribute as dtensor_redistribute
from torch.distributed.tensor import _utils as dtensor_utils
from torch.distributed.tensor import placement_types as dtensor_placement_types
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding, RuntimeSchemaInfo
from torch.distributed.tensor._ops import _math_ops as dtensor_math_ops
from torch.distributed.tensor.placement_types import Placement
from torch.utils import _pytree as pytree
from torch.utils._debug_mode import DebugMode

from torch_ragged import _checkpoint
from torch_ragged._ops import NormPartial, OpCall, Sharding, decomposition_of, rule_of, unsupported
from torch_ragged._ownership import owned, row_major
from torch_ragged._redistribute import REDUCTIONS, Pending, broadcast_local, redistribute_local
from torch_ragged.placement_types import RaggedShard, StridedRaggedShard, cuts_of, has_ragged, normalize_placements

__all__ = ["Hook", "register", "registration_report"]

_OLDEST, _NEWEST = (2, 11), (2, 15)
_aten = torch.ops.aten


@dataclass(frozen=True)
class Hook:
    """One extension of torch: what is extended, why, and the upstream patch that would make it unnecessary."""

    target: str
    why: str
    patch: str
    check: Callable[[], bool]
    install: Callable[[], None]


def _has(function: Any, *parameters: str) -> bool:
    """Whether ``function`` still takes these parameters."""
    return callable(function) and set(parameters) <= set(inspect.signature(function).parameters)


def _extend_in_place(function: types.FunctionType, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Extend a module-level function for everyone, those included who imported its name before this package.

    The function object keeps its identity; its code becomes a call of ``make(original)``.
    """
    original = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    original.__kwdefaults__ = function.__kwdefaults__
    function.__dict__.setdefault("__signature__", inspect.signature(original))
    slot = f"_torch_ragged_{function.__name__}"
    function.__globals__[slot] = make(original)
    scope: dict[str, Any] = {}
    exec(f"def extended(*args, **kwargs):\n    return {slot}(*args, **kwargs)\n", scope)
    function.__code__ = scope["extended"].__code__
    function.__defaults__, function.__kwdefaults__ = None, None


# --- DTensor.from_local, distribute_tensor, redistribute -----------------------------------------------------------


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


def _install_global_tensor_info() -> None:
    original = dtensor_api.compute_global_tensor_info

    def compute_global_tensor_info(tensor, mesh, placements):  # type: ignore[no-untyped-def]
        if has_ragged(placements):  # from_local has a shape then, which torch takes for none where it is ().
            return [], []
        return original(tensor, mesh, placements)

    dtensor_api.compute_global_tensor_info = compute_global_tensor_info  # type: ignore[attr-defined]


def _make_distribute_tensor(original: Callable[..., DTensor]) -> Callable[..., DTensor]:
    def distribute_tensor(tensor, device_mesh=None, placements=None, **kwargs):  # type: ignore[no-untyped-def]
        if placements is None or not has_ragged(placements):
            return original(tensor, device_mesh, placements, **kwargs)
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


def _install_redistribute() -> None:
    original = DTensor.redistribute

    @functools.wraps(original)
    def redistribute(self, device_mesh=None, placements=None, **kwargs):  # type: ignore[no-untyped-def]
        if placements is not None and (has_ragged(placements) or has_ragged(self._spec.placements)):
            mesh = device_mesh or self.device_mesh
            if mesh != self.device_mesh:
                raise ValueError(
                    f"cannot redistribute a DTensor on {self.device_mesh} to another mesh {mesh}: use the tensor's own mesh"
                )
            placements = normalize_placements(tuple(placements), self.shape, mesh.shape)
            if any(isinstance(p, Partial) and p != q for p, q in zip(placements, self.placements)):
                return _to_partial(self, mesh, placements, **kwargs)
        return original(self, device_mesh, placements, **kwargs)

    DTensor.redistribute = redistribute  # type: ignore[method-assign]


def _to_partial(
    tensor: DTensor,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    *,
    async_op: bool = False,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
) -> DTensor:
    """RaggedShard -> Partial, which ``DTensor.redistribute`` refuses for its own placements: same autograd function."""
    function, dtype = dtensor_redistribute.Redistribute, tensor.dtype
    if "dtype_config" not in inspect.signature(function.forward).parameters:  # Before 2.13.
        return function.apply(tensor, mesh, placements, async_op, forward_dtype, backward_dtype)
    backward = {"op_dtype": backward_dtype or dtype, "out_dtype": dtype}
    forward = {"op_dtype": forward_dtype or dtype, "out_dtype": forward_dtype or dtype}
    return function.apply(tensor, mesh, placements, async_op, {**forward, "backward_options": backward})


def _make_redistribute_local_tensor(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def redistribute_local_tensor(local_tensor, current_spec, target_spec, *, async_op=False, **kwargs):  # type: ignore
        source, target = current_spec.placements, target_spec.placements
        if not (has_ragged(source) or has_ragged(target)):
            return original(local_tensor, current_spec, target_spec, async_op=async_op, **kwargs)
        if current_spec.mesh != target_spec.mesh:
            raise NotImplementedError("redistribution of a ragged DTensor to another mesh: use the tensor's own mesh")
        mesh = current_spec.mesh
        if mesh.get_coordinate() is None or (source == target and current_spec.shape == target_spec.shape):
            return local_tensor
        with _recorded(local_tensor, source, target, kwargs.get("is_explicit", False)):
            if current_spec.shape != target_spec.shape:
                return broadcast_local(local_tensor, mesh, target_spec.shape, target)
            unusual = tuple(Replicate() if _is_unusual_partial(p) and p != q else p for p, q in zip(source, target))
            if unusual != source:
                middle = DTensorSpec(mesh, unusual, tensor_meta=current_spec.tensor_meta)
                local_tensor, source = original(local_tensor, current_spec, middle), unusual
            pending = redistribute_local(local_tensor, mesh, current_spec.shape, source, target)
            return _AsyncLocal.of(pending) if async_op and pending.in_flight and not _are_we_tracing() else pending.wait()

    return redistribute_local_tensor


def _recorded(local: torch.Tensor, source: Any, target: Any, is_explicit: bool) -> contextlib.AbstractContextManager[Any]:
    """Show the redistribution in ``DebugMode``, as torch's own ones are: ``trace: RS(0)[1,2,0,1]->R``."""
    mode = dtensor_redistribute.get_active_debug_mode()
    if mode is None:
        return contextlib.nullcontext()
    trace = "->".join("".join(map(str, placements)) for placements in (source, target))
    return mode.record_redistribute_calls(local, source, target, trace, is_explicit=is_explicit)


class _AsyncLocal(AsyncCollectiveTensor):
    """A local tensor whose data is under way and must be unpacked when it is there: first use waits and unpacks."""

    __slots__ = ["pending"]
    pending: Pending

    @staticmethod
    def of(pending: Pending) -> AsyncCollectiveTensor:
        """A tensor that waits on use; torch's own where the data needs no unpacking."""
        if pending.unpack is None:
            return AsyncCollectiveTensor(pending.data.view(pending.local_shape))
        return _AsyncLocal(pending)

    @staticmethod
    def __new__(cls, pending: Pending) -> _AsyncLocal:
        shape, data = torch.Size(pending.local_shape), pending.data
        self = torch.Tensor._make_wrapper_subclass(
            cls, shape, strides=row_major(shape), dtype=data.dtype, device=data.device, requires_grad=data.requires_grad
        )
        self.pending, self.completed = pending, False
        return self

    def trigger_wait(self) -> torch.Tensor:
        if not self.completed:
            self.elem = self.pending.wait()
            self.completed = True
        return self.elem

    wait = _get_acs_underlying_tensor = trigger_wait

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        self.trigger_wait()
        return ["elem"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        (first, *rest) = args
        if func in (_aten.detach.default, _aten.alias.default) or (
            func is _aten.view.default and isinstance(first, _AsyncLocal) and tuple(rest[0]) == tuple(first.shape)
        ):  # What to_local() makes of a local tensor: nothing is used yet.
            return _AsyncLocal(Pending(first.pending.data, first.pending.local_shape, lambda _: first.trigger_wait()))
        wait = functools.partial(pytree.tree_map_only, AsyncCollectiveTensor, lambda tensor: tensor.trigger_wait())
        return func(*wait(args), **wait(kwargs or {}))


def _is_unusual_partial(placement: Placement) -> bool:
    """A Partial that only torch knows to reduce: its norm and mask partials, and products."""
    if not isinstance(placement, Partial):
        return False
    return placement.reduce_op not in REDUCTIONS or type(placement)._reduce_value is not Partial._reduce_value


def _install_redistribute_function() -> None:
    function = dtensor_redistribute.Redistribute
    original = function.forward

    @functools.wraps(original)
    def forward(ctx, tensor, device_mesh, placements, *args, **kwargs):  # type: ignore[no-untyped-def]
        output = original(ctx, tensor, device_mesh, placements, *args, **kwargs)
        spec = ctx.current_spec  # what backward redistributes the gradient to
        if has_ragged(placements) and any(isinstance(p, Partial) for p in spec.placements):
            wanted = tuple(Replicate() if isinstance(p, Partial) else p for p in spec.placements)
            ctx.current_spec = DTensorSpec(spec.mesh, wanted, tensor_meta=spec.tensor_meta)
        return output

    function.forward = staticmethod(forward)  # type: ignore[method-assign, assignment]


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


def _make_local_shape(original: Callable[..., Any]) -> Callable[..., Any]:
    def compute_local_shape_and_global_offset(global_shape, mesh, placements, *args, **kwargs):  # type: ignore[no-untyped-def]
        if has_ragged(placements):
            raise ValueError(
                f"a piece under {placements} is no single box with one offset: use DTensor.__create_chunk_list__()"
            )
        return original(global_shape, mesh, placements, *args, **kwargs)

    return compute_local_shape_and_global_offset


def _install_constants() -> None:
    if not hasattr(dtensor_placement_types, "_register_placements_as_opaque"):  # Later versions take any Placement.
        for placement in (RaggedShard, StridedRaggedShard):
            pytree.register_constant(placement)


def _install_cache_key() -> None:
    if not hasattr(DTensor, "_stable_hash_for_caching"):  # 2.11: torch does not cache graphs of DTensors.
        return
    original = DTensor._stable_hash_for_caching

    @functools.wraps(original)
    def _stable_hash_for_caching(self):  # type: ignore[no-untyped-def]
        return f"{original(self)} at {self.device_mesh.get_coordinate()}"

    DTensor._stable_hash_for_caching = _stable_hash_for_caching  # type: ignore[method-assign]


# --- operators -----------------------------------------------------------------------------------------------------


def _install_dispatch() -> None:
    dispatcher = DTensor._op_dispatcher
    original = dispatcher._propagate_op_sharding_dispatch_slow_path

    def propagate(op_call, args, kwargs, op_info, *rest, **named):  # type: ignore[no-untyped-def]
        schema = op_info.schema
        if not _ragged_specs(schema):
            return original(op_call, args, kwargs, op_info, *rest, **named)
        return _dispatch_ragged(op_call, args, kwargs, schema)

    dispatcher._propagate_op_sharding_dispatch_slow_path = propagate  # type: ignore[method-assign]


def _ragged_specs(schema: OpSchema) -> list[DTensorSpec]:
    leaves = pytree.tree_leaves((schema.args_schema, schema.kwargs_schema))
    return [leaf for leaf in leaves if isinstance(leaf, DTensorSpec) and has_ragged(leaf.placements)]


def _dispatch_ragged(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], schema: OpSchema) -> Any:
    """The sharding of an op on ragged DTensors (the C++ dispatcher caches and runs it), or its decomposed result."""
    function = decomposition_of(op)
    if function is not None:
        result = function(op, *args, **kwargs)
        if result is not NotImplemented:
            return result
    rule = rule_of(op)
    specs = [leaf for leaf in pytree.tree_leaves(schema.args_schema) if isinstance(leaf, DTensorSpec)]
    if rule is None:
        if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), torch._C.DispatchKey.CompositeImplicitAutograd):
            return op.decompose(*args, **kwargs)
        raise unsupported(op, specs)
    if any(spec.mesh != specs[0].mesh for spec in specs):
        raise ValueError(f"{op}: its DTensors are on different meshes: {[spec.mesh for spec in specs]}")
    _hash_scalars(op)
    return _output_sharding(schema, specs, rule(OpCall(op, schema.args_schema, schema.kwargs_schema)))


def _hash_scalars(op: Any) -> None:
    """Have the C++ cache look at non-tensor arguments too, for ops that torch has no rule (so no cache key) for."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    tables = (propagator.op_to_schema_info, getattr(propagator, "op_to_schema_info_for_single_dim_strategy", {}))
    if any(op in table for table in tables):
        return
    names = [a.name for a in op._schema.arguments if a.kwarg_only]
    has_list = any("[]" in str(a.type) or "List[Tensor]" in str(a.type) for a in op._schema.arguments)
    propagator.op_to_schema_info[op] = RuntimeSchemaInfo(1, static_kwargkey=names or None, needs_pytree=has_list)


def _output_sharding(schema: OpSchema, specs: list[DTensorSpec], sharding: Sharding) -> OutputSharding:
    mesh = specs[0].mesh
    wanted = []
    for spec, (placements, shape) in zip(specs, sharding.inputs):
        meta = spec.tensor_meta
        if shape is not None and meta is not None:
            meta = TensorMeta(shape, row_major(shape), meta.dtype)
        same = placements == spec.placements and shape is None
        wanted.append(spec if same else DTensorSpec(mesh, placements, tensor_meta=meta))
    moved = any(a is not b for a, b in zip(wanted, specs))
    suggestion = None
    if moved:
        leaves, tree = pytree.tree_flatten(schema.args_schema)
        replacements = iter(wanted)
        leaves = [next(replacements) if isinstance(leaf, DTensorSpec) else leaf for leaf in leaves]
        arguments = pytree.tree_unflatten(leaves, tree)
        suggestion = OpSchema(schema.op, arguments, schema.kwargs_schema, schema_info=schema.schema_info)
    return OutputSharding(_output_specs(schema, mesh, sharding), suggestion, needs_redistribute=moved)


def _output_specs(schema: OpSchema, mesh: DeviceMesh, sharding: Sharding) -> Any:
    if sharding.outputs is None:
        return None
    metas = DTensor._op_dispatcher.sharding_propagator._propagate_tensor_meta_non_cached(schema)
    if isinstance(metas, TensorMeta):
        return _output_spec(schema, mesh, sharding.outputs, metas)  # type: ignore[arg-type]
    return tuple(_output_spec(schema, mesh, p, meta) for p, meta in zip(sharding.outputs, metas))  # type: ignore


def _output_spec(schema: OpSchema, mesh: DeviceMesh, placements: tuple[Any, ...], meta: TensorMeta) -> DTensorSpec:
    torch_placements = tuple(dtensor_math_ops._NormPartial(p.order) if isinstance(p, NormPartial) else p for p in placements)
    if has_ragged(torch_placements) and tuple(meta.stride) != row_major(meta.shape) and meta.shape.numel():
        specs = _ragged_specs(schema)
        raise unsupported(schema.op, specs, f"its output would not be row-major (stride {tuple(meta.stride)})")
    return DTensorSpec(mesh, torch_placements, tensor_meta=meta)


def _install_op_handlers() -> None:
    """Ops that DTensor handles before sharding rules are asked; those that look at placements do not know ours."""
    handlers = DTensor._op_dispatcher._custom_op_handlers
    safe = {_aten.is_same_size.default, _aten.as_strided.default}
    safe.add(_aten._amp_foreach_non_finite_check_and_unscale_.default)
    safe.add(_aten.is_pinned.default)

    def guard(handler: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(op_call, args, kwargs):  # type: ignore[no-untyped-def]
            leaves = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, DTensor)]
            if any(has_ragged(t.placements) for t in leaves):
                function = decomposition_of(op_call)
                if function is not None:
                    return function(op_call, *args, **kwargs)
                raise unsupported(op_call, leaves)
            return handler(op_call, args, kwargs)

        return guarded

    for op, handler in handlers.items():
        if op not in safe:
            handlers[op] = guard(handler)


# --- checkpoints ---------------------------------------------------------------------------------------------------


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


# --- registration --------------------------------------------------------------------------------------------------

_PROTOCOL = "0001-placement-extension-protocol"

_HOOKS = (
    Hook(
        "DTensor.from_local",
        "check a ragged local against its global shape",
        _PROTOCOL,
        lambda: _has(DTensor.from_local, "local_tensor", "device_mesh", "placements", "run_check", "shape", "stride"),
        _install_from_local,
    ),
    Hook(
        "_api.compute_global_tensor_info",
        "from_local takes the shape () for none given",
        _PROTOCOL,
        lambda: callable(getattr(dtensor_api, "compute_global_tensor_info", None)),
        _install_global_tensor_info,
    ),
    Hook(
        "distribute_tensor",
        "cut a tensor as a ragged placement says",
        _PROTOCOL,
        lambda: _has(dtensor_api.distribute_tensor, "tensor", "device_mesh", "placements"),
        lambda: _extend_in_place(dtensor_api.distribute_tensor, _make_distribute_tensor),  # type: ignore[arg-type]
    ),
    Hook(
        "DTensor.redistribute",
        "check ragged placements before any communication",
        _PROTOCOL,
        lambda: _has(DTensor.redistribute, "device_mesh", "placements", "async_op"),
        _install_redistribute,
    ),
    Hook(
        "_redistribute.redistribute_local_tensor",
        "move data to and from ragged placements",
        _PROTOCOL,
        lambda: (
            _has(dtensor_redistribute.redistribute_local_tensor, "local_tensor", "current_spec", "target_spec", "is_explicit")
            and _has(DebugMode.record_redistribute_calls, "arg", "transform_info_str", "is_explicit")
            and _has(dtensor_redistribute.get_active_debug_mode)
        ),
        lambda: _extend_in_place(
            dtensor_redistribute.redistribute_local_tensor,  # type: ignore[arg-type]
            _make_redistribute_local_tensor,
        ),
    ),
    Hook(
        "_redistribute.Redistribute.forward",
        "the gradient of a Partial is Replicate, as for Shard",
        _PROTOCOL,
        lambda: _has(dtensor_redistribute.Redistribute.forward, "ctx", "input", "device_mesh", "placements"),
        _install_redistribute_function,
    ),
    Hook(
        "_api._ToTorchTensor.backward",
        "the global stride of a ragged gradient cannot be told from its local",
        _PROTOCOL,
        lambda: _has(dtensor_api._ToTorchTensor.backward, "ctx", "grad_output"),
        _install_to_local_backward,
    ),
    Hook(
        "_utils.compute_local_shape_and_global_offset",
        "it takes an unknown placement for Replicate: refuse instead",
        _PROTOCOL,
        lambda: _has(dtensor_utils.compute_local_shape_and_global_offset, "global_shape", "mesh", "placements"),
        lambda: _extend_in_place(dtensor_utils.compute_local_shape_and_global_offset, _make_local_shape),  # type: ignore
    ),
    Hook(
        "_pytree.register_constant",
        "torch.compile guards on placements: before 2.13 only on those that it knows, or on constants",
        _PROTOCOL,
        lambda: callable(pytree.register_constant),
        _install_constants,
    ),
    Hook(
        "DTensor._stable_hash_for_caching",
        "ranks of one machine share compiled graphs on disk, but what ragged ranks compile differs",
        _PROTOCOL,
        lambda: _version() < (2, 12) or _has(DTensor._stable_hash_for_caching, "self"),
        _install_cache_key,
    ),
    Hook(
        "OpDispatcher._propagate_op_sharding_dispatch_slow_path",
        "sharding rules of ops on ragged DTensors",
        "0003-ragged-shard-operators",
        lambda: (
            _has(
                dtensor_dispatch.OpDispatcher._propagate_op_sharding_dispatch_slow_path, "op_call", "args", "kwargs", "op_info"
            )
            and hasattr(DTensor._op_dispatcher.sharding_propagator, "_propagate_tensor_meta_non_cached")
            and hasattr(dtensor_math_ops, "_NormPartial")
        ),
        _install_dispatch,
    ),
    Hook(
        "OpDispatcher._custom_op_handlers",
        "handlers that look at placements would take a ragged one for another",
        "0003-ragged-shard-operators",
        lambda: isinstance(getattr(DTensor._op_dispatcher, "_custom_op_handlers", None), dict),
        _install_op_handlers,
    ),
    Hook(
        "DTensor.__create_write_items__, __create_chunk_list__, __get_tensor_shard__",
        "several chunks per rank in checkpoints",
        "0005-checkpoint",
        lambda: all(hasattr(DTensor, f"__{n}__") for n in ("create_write_items", "create_chunk_list", "get_tensor_shard")),
        _install_checkpoint,
    ),
)

_installed: list[Hook] = []


def _is_known(hook: Hook) -> bool:
    try:
        return hook.check()
    except AttributeError:  # The target has gone.
        return False


def _version() -> tuple[int, ...]:
    return tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


def register() -> None:
    """Install every hook, or none.

    Raises:
        ImportError: torch is older than 2.11, or a hook's target has not the layout that this package knows.
    """
    if _installed:
        return
    if _version() < _OLDEST:
        raise ImportError(f"torch_ragged needs torch >= 2.11, found {torch.__version__}: install a newer torch")
    for hook in _HOOKS:
        if not _is_known(hook):
            raise ImportError(
                f"torch_ragged cannot extend {hook.target} of torch {torch.__version__}: its layout is unknown (checked on "
                "2.11 to 2.15). Install a torch of these versions, or a newer torch_ragged"
            )
    for hook in _HOOKS:
        hook.install()
        _installed.append(hook)


def registration_report() -> str:
    """The installed hooks, one per line: torch's function, why it is extended, the patch that makes it unnecessary."""
    lines = [f"torch {torch.__version__} (checked: 2.11, 2.13, 2.15); {len(_installed)} hooks"]
    lines += [f"  {hook.target}: {hook.why} [{hook.patch}]" for hook in _installed]
    return "\n".join(lines)
