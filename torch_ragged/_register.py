"""The only door into torch's internals: makes the placements first class in DTensor.

Each hook is one small function. It names the torch function that it extends, and why. A hook acts only where a
RaggedShard is involved; everything else goes to torch's own code as before. On import each hook's target is
checked, so that an unknown layout of torch's internals is an ImportError and never a wrong answer later.
"""

from __future__ import annotations

import functools
import inspect
import logging
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor import _api as dtensor_api
from torch.distributed.tensor import _dispatch as dtensor_dispatch
from torch.distributed.tensor import _redistribute as dtensor_redistribute
from torch.distributed.tensor import _utils as dtensor_utils
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding, RuntimeSchemaInfo
from torch.distributed.tensor._ops import _math_ops as dtensor_math_ops
from torch.distributed.tensor.placement_types import Placement
from torch.utils import _pytree as pytree

from torch_ragged import _checkpoint
from torch_ragged._ops import (
    NoLocalWay,
    NormPartial,
    OpCall,
    RaggedRows,
    Sharding,
    decomposition_of,
    has_ragged_rows,
    is_random,
    is_row_major,
    returns_alias,
    rows_of,
    rules_of,
    unsupported,
    writes_statistics,
)
from torch_ragged._ownership import owned
from torch_ragged._redistribute import broadcast_local, redistribute_local
from torch_ragged.placement_types import RaggedShard, cuts_of, has_ragged, normalize_placements

__all__ = ["Hook", "register", "registration_report"]

_OLDEST, _NEWEST = (2, 11), (2, 15)
_aten = torch.ops.aten
_fake_tensor_log = logging.getLogger("torch._subclasses.fake_tensor")


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
    shape = kwargs.get("shape")
    if shape is None:
        raise ValueError(
            "DTensor.from_local with a RaggedShard needs the global shape: pass shape= (it cannot be told from 1-D locals)"
        )
    kwargs["shape"] = torch.Size(shape)
    kwargs["stride"] = _row_major(kwargs["shape"])
    normalized = normalize_placements(placements, kwargs["shape"], mesh.shape)
    coordinate = mesh.get_coordinate()
    problem = None
    if coordinate is not None:
        expected = owned(tuple(shape), tuple(mesh.shape), cuts_of(normalized), tuple(coordinate)).local_shape
        if tuple(local.shape) != expected:
            problem = f"rank {dist.get_rank()} gave a local tensor of shape {tuple(local.shape)}, expected {expected}"
    problems: list[Any] = [problem]
    if kwargs.get("run_check") and coordinate is not None:
        for dim in range(mesh.ndim):
            group = mesh.get_group(dim)
            gathered: list[Any] = [None] * group.size()
            dist.all_gather_object(gathered, problems, group=group)
            problems = [p for part in gathered for p in part]
    problems = sorted({p for p in problems if p})
    if problems:
        raise ValueError(
            f"DTensor.from_local: shape {tuple(shape)} under {''.join(map(str, normalized))}: {'; '.join(problems)}"
        )
    return normalized


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    stride, strides = 1, []
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(strides))


def _make_distribute_tensor(original: Callable[..., DTensor]) -> Callable[..., DTensor]:
    def distribute_tensor(tensor, device_mesh=None, placements=None, **kwargs):  # type: ignore[no-untyped-def]
        if placements is None or not has_ragged(placements):
            return original(tensor, device_mesh, placements, **kwargs)
        mesh = device_mesh or dtensor_api._mesh_resources.get_current_mesh()
        placements = normalize_placements(placements, tensor.shape, mesh.shape)
        if isinstance(tensor, DTensor):
            return original(tensor, mesh, placements, **kwargs)
        if any(isinstance(p, Partial) for p in placements):
            raise ValueError(f"distribute_tensor to {placements}: distribute to Replicate in place of Partial")
        # Ranks agree on the data of the source rank first, as DTensor's own placements do.
        replicated = original(tensor.contiguous() if tensor.is_leaf else tensor, mesh, [Replicate()] * mesh.ndim, **kwargs)
        local = broadcast_local(_local(replicated).detach(), mesh, tensor.shape, placements)
        meta = TensorMeta(tensor.shape, _row_major(tensor.shape), tensor.dtype)
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
            kwargs.pop("async_op", None)  # "May return early": to return when the data is there is a valid answer.
            placements = normalize_placements(placements, self.shape, mesh.shape)
            if any(isinstance(p, Partial) and p != q for p, q in zip(placements, self.placements)):
                return _to_partial(self, mesh, placements)
        return original(self, device_mesh, placements, **kwargs)

    DTensor.redistribute = redistribute  # type: ignore[method-assign]


def _to_partial(tensor: DTensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensor:
    """RaggedShard -> Partial, which ``DTensor.redistribute`` refuses for its own placements: same autograd function."""
    dtype = tensor.dtype
    options = {"op_dtype": dtype, "out_dtype": dtype, "backward_options": {"op_dtype": dtype, "out_dtype": dtype}}
    if "dtype_config" in inspect.signature(dtensor_redistribute.Redistribute.forward).parameters:
        return dtensor_redistribute.Redistribute.apply(tensor, mesh, placements, False, options)
    arguments = len(inspect.signature(dtensor_redistribute.Redistribute.forward).parameters) - 5
    return dtensor_redistribute.Redistribute.apply(tensor, mesh, placements, False, *[None] * arguments)


def _make_redistribute_local_tensor(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def redistribute_local_tensor(local_tensor, current_spec, target_spec, **kwargs):  # type: ignore[no-untyped-def]
        source, target = current_spec.placements, target_spec.placements
        if not (has_ragged(source) or has_ragged(target)):
            return original(local_tensor, current_spec, target_spec, **kwargs)
        if current_spec.mesh != target_spec.mesh:
            raise NotImplementedError("redistribution of a ragged DTensor to another mesh: use the tensor's own mesh")
        mesh = current_spec.mesh
        if mesh.get_coordinate() is None or (source == target and current_spec.shape == target_spec.shape):
            return local_tensor
        if current_spec.shape != target_spec.shape:
            return broadcast_local(local_tensor, mesh, target_spec.shape, target)
        unusual = tuple(Replicate() if _is_unusual_partial(p) else p for p in source)
        if unusual != source:
            middle = DTensorSpec(mesh, unusual, tensor_meta=current_spec.tensor_meta)
            local_tensor, source = original(local_tensor, current_spec, middle), unusual
        return redistribute_local(local_tensor, mesh, current_spec.shape, source, target)

    return redistribute_local_tensor


def _is_unusual_partial(placement: Placement) -> bool:
    """A Partial with a reduction of its own (torch's norm and mask partials), which only torch knows to reduce."""
    return isinstance(placement, Partial) and type(placement)._reduce_value is not Partial._reduce_value


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
        meta = TensorMeta(spec.shape, _row_major(spec.shape), grad_output.dtype)
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


# --- operators -----------------------------------------------------------------------------------------------------


@dataclass
class RaggedSharding(OutputSharding):
    """An OutputSharding that tells how the op runs on the local tensors, once they are as ``redistribute_schema`` says."""

    run: Callable[..., Any] | None = None


class _Propagation:
    """What rules ask of torch, for one call (the protocol ``_ops.Torch``)."""

    def __init__(self, schema: OpSchema) -> None:
        self._schema = schema
        self._propagator = DTensor._op_dispatcher.sharding_propagator

    @functools.cached_property
    def metas(self) -> Any:
        return self._propagator._propagate_tensor_meta_non_cached(self._schema)

    def output_meta(self, call: OpCall) -> list[TensorMeta | None]:
        if self.metas is None:
            return []
        return [self.metas] if isinstance(self.metas, TensorMeta) else list(self.metas)

    def output_specs(self, call: OpCall, inputs: Sequence[tuple[tuple[Placement, ...], Sequence[int]]]) -> Any:
        specs = [
            DTensorSpec(spec.mesh, placements, tensor_meta=_resized(spec.tensor_meta, shape))
            for spec, (placements, shape) in zip(_specs(call.args), inputs)
        ]
        schema = _with_specs(self._schema, specs)
        silent = _fake_tensor_log.disabled
        _fake_tensor_log.disabled = True  # It reports shapes that do not fit together, which here is an answer.
        try:
            answer = self._propagator.propagate_op_sharding_non_cached(schema)
        except Exception:
            return None
        finally:
            _fake_tensor_log.disabled = silent
        if answer.needs_redistribute or answer.use_val_from_redistribute_schema:
            return None
        outputs = answer.output_spec
        if isinstance(outputs, DTensorSpec):
            return [outputs] if len(self.output_meta(call)) == 1 else None
        return list(outputs or ())


def _specs(arguments: Any) -> list[DTensorSpec]:
    return [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, DTensorSpec)]


def _resized(meta: TensorMeta | None, shape: Sequence[int]) -> TensorMeta | None:
    """``meta`` with another shape, its dimensions in the same order in memory."""
    if meta is None or tuple(meta.shape) == tuple(shape):
        return meta
    stride = list(meta.stride)
    for dim, (old, size) in enumerate(zip(meta.shape, shape)):
        if old != size and old:
            stride = [s * size // old if s > meta.stride[dim] else s for s in stride]
    return TensorMeta(torch.Size(shape), tuple(stride), meta.dtype)


def _with_specs(schema: OpSchema, specs: Sequence[DTensorSpec]) -> OpSchema:
    """``schema`` with other specs in the place of those of its positional arguments."""
    replacements = iter(specs)
    leaves, tree = pytree.tree_flatten(schema.args_schema)
    leaves = [next(replacements) if isinstance(leaf, DTensorSpec) else leaf for leaf in leaves]
    return OpSchema(schema.op, pytree.tree_unflatten(leaves, tree), schema.kwargs_schema, schema_info=schema.schema_info)


def _install_dispatch() -> None:
    dispatcher = DTensor._op_dispatcher
    propagate_original = dispatcher._propagate_op_sharding_dispatch_slow_path
    results_original = dispatcher._dispatch_get_local_results_slow_path

    def propagate(op_call, args, kwargs, op_info, *rest, **named):  # type: ignore[no-untyped-def]
        schema = op_info.schema
        if not _ragged_specs(schema):
            return propagate_original(op_call, args, kwargs, op_info, *rest, **named)
        return _dispatch_ragged(op_call, args, kwargs, schema)

    def local_results(op_call, args, op_info):  # type: ignore[no-untyped-def]
        sharding = op_info.output_sharding
        if not isinstance(sharding, RaggedSharding) or not op_info.compute_mesh._is_current_rank_part_of_mesh():
            return results_original(op_call, args, op_info)
        return _run_ragged(op_call, op_info, sharding)

    dispatcher._propagate_op_sharding_dispatch_slow_path = propagate  # type: ignore[method-assign]
    dispatcher._dispatch_get_local_results_slow_path = local_results  # type: ignore[method-assign]


def _ragged_specs(schema: OpSchema) -> list[DTensorSpec]:
    return [spec for spec in _specs((schema.args_schema, schema.kwargs_schema)) if has_ragged(spec.placements)]


def _dispatch_ragged(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], schema: OpSchema) -> Any:
    """The sharding of an op on ragged DTensors (the C++ dispatcher caches and runs it), or its decomposed result."""
    function = decomposition_of(op)
    if function is not None:
        result = function(op, *args, **kwargs)
        if result is not NotImplemented:
            return result
    try:
        sharding, why = _local_sharding(op, schema)
        if sharding is not None:
            return sharding
        if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), torch._C.DispatchKey.CompositeImplicitAutograd):
            return op.decompose(*args, **kwargs)
        return _gathered(op, schema, why)
    except NotImplementedError:
        raise
    except Exception as error:  # As torch does: a bad argument, found on the global shapes, on every rank alike.
        raise RuntimeError(f"{error}\n\nSharding propagation failed for {schema}") from error


def _local_sharding(op: Any, schema: OpSchema) -> tuple[OutputSharding | None, str]:
    """The sharding under which the op runs on local tensors, or why it does not."""
    specs = _specs(schema.args_schema)
    if any(spec.mesh != specs[0].mesh for spec in specs):
        raise ValueError(f"{op}: its DTensors are on different meshes: {[spec.mesh for spec in specs]}")
    _hash_scalars(op)
    call = OpCall(op, schema.args_schema, schema.kwargs_schema, _Propagation(schema))
    why = ""
    for rule in rules_of(op):
        try:
            return _output_sharding(schema, call, specs, rule(call)), ""
        except NoLocalWay as reason:
            why = why or str(reason)
    return None, why


def _hash_scalars(op: Any) -> None:
    """Have the C++ cache look at non-tensor arguments too, for ops that torch has no rule (so no cache key) for."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    tables = (propagator.op_to_schema_info, getattr(propagator, "op_to_schema_info_for_single_dim_strategy", {}))
    if any(op in table for table in tables):
        return
    names = [a.name for a in op._schema.arguments if a.kwarg_only]
    has_list = any("[]" in str(a.type) or "List[Tensor]" in str(a.type) for a in op._schema.arguments)
    propagator.op_to_schema_info[op] = RuntimeSchemaInfo(1, static_kwargkey=names or None, needs_pytree=has_list)


def _output_sharding(schema: OpSchema, call: OpCall, specs: list[DTensorSpec], sharding: Sharding) -> OutputSharding:
    mesh = specs[0].mesh
    wanted = []
    for spec, (placements, shape) in zip(specs, sharding.inputs):
        meta = spec.tensor_meta
        if shape is not None and meta is not None:
            meta = TensorMeta(shape, _row_major(shape), meta.dtype)
        same = placements == spec.placements and shape is None
        wanted.append(spec if same else DTensorSpec(mesh, placements, tensor_meta=meta))
    outputs = _output_specs(call, mesh, sharding)
    if sharding.run is None and all(a is b for a, b in zip(wanted, specs)):
        return OutputSharding(outputs)
    return RaggedSharding(outputs, _with_specs(schema, wanted), needs_redistribute=True, run=sharding.run)


def _output_specs(call: OpCall, mesh: DeviceMesh, sharding: Sharding) -> Any:
    if sharding.outputs is None:
        return None
    metas = call.torch.output_meta(call)
    if isinstance(sharding.outputs, tuple):
        return _output_spec(mesh, sharding.outputs, metas[0])  # type: ignore[arg-type]
    return tuple(None if p is None else _output_spec(mesh, p, m) for p, m in zip(sharding.outputs, metas))  # type: ignore


def _output_spec(mesh: DeviceMesh, placements: tuple[Any, ...], meta: TensorMeta) -> DTensorSpec:
    torch_placements = tuple(dtensor_math_ops._NormPartial(p.order) if isinstance(p, NormPartial) else p for p in placements)
    if has_ragged(torch_placements) and not has_ragged_rows(torch_placements) and not is_row_major(meta):
        raise NoLocalWay(f"its output would not be row-major (stride {tuple(meta.stride)})")
    return DTensorSpec(mesh, torch_placements, tensor_meta=meta)


def _gathered(op: Any, schema: OpSchema, why: str) -> OutputSharding:
    """DTensor's way for an op with no local one: replicate the ragged tensors, and ask torch.

    Raises:
        NotImplementedError: the op writes to or aliases an argument, draws random numbers, or torch has no rule for it.
    """
    specs = _specs((schema.args_schema, schema.kwargs_schema))
    if is_random(op):
        raise unsupported(op, specs, "its random numbers would depend on the placement")
    if _writes_to_ragged(op, schema) or returns_alias(op) or _ragged_specs_by_keyword(schema):
        raise unsupported(op, specs, why)
    given = _specs(schema.args_schema)
    replicated = [
        DTensorSpec(spec.mesh, (Replicate(),) * spec.mesh.ndim, tensor_meta=spec.tensor_meta)
        if has_ragged(spec.placements)
        else spec
        for spec in given
    ]
    gathered = _with_specs(schema, replicated)
    try:
        answer = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding_non_cached(gathered)
    except NotImplementedError as error:
        raise unsupported(op, specs, "DTensor itself has no sharding rule for it") from error
    wanted = answer.redistribute_schema or gathered
    if op._schema.is_mutable and any(a != b for a, b in zip(given, _specs(wanted.args_schema)) if not has_ragged(a.placements)):
        raise unsupported(op, specs, "the tensor that it writes to would have to be redistributed")
    values = answer.use_val_from_redistribute_schema
    return RaggedSharding(answer.output_spec, wanted, needs_redistribute=True, use_val_from_redistribute_schema=values)


def _writes_to_ragged(op: Any, schema: OpSchema) -> bool:
    written = [
        schema.args_schema[i] if i < len(schema.args_schema) else schema.kwargs_schema.get(argument.name)
        for i, argument in enumerate(op._schema.arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write) or writes_statistics(op)
    ]
    return any(has_ragged(spec.placements) for spec in _specs(tuple(written)))


def _ragged_specs_by_keyword(schema: OpSchema) -> bool:
    return any(has_ragged(spec.placements) for spec in _specs(tuple(schema.kwargs_schema.values())))


def _run_ragged(op: Any, op_info: Any, sharding: RaggedSharding) -> Any:
    """Redistribute the local arguments as ``sharding`` says and run the op on them."""
    schema = sharding.redistribute_schema
    wanted = pytree.tree_leaves(schema.args_schema) if op_info.args_tree_spec is not None else schema.args_schema  # type: ignore
    arguments = []
    for local, given, want in zip(op_info.local_args, op_info.flat_args_schema, wanted):
        if isinstance(given, DTensorSpec):
            arguments.append(local if given is want or given == want else _move(local, given, want))
        else:
            arguments.append(want if sharding.use_val_from_redistribute_schema else given)
    if op_info.args_tree_spec is not None:
        arguments = pytree.tree_unflatten(arguments, op_info.args_tree_spec)
    return (sharding.run or op)(*arguments, **op_info.local_kwargs)


def _move(local: torch.Tensor, given: DTensorSpec, want: DTensorSpec) -> torch.Tensor:
    """Redistribute a local tensor; that of a strided view by way of the flat one with its cut dimensions in front."""
    redistribute = dtensor_redistribute.redistribute_local_tensor
    if not has_ragged_rows((*given.placements, *want.placements)):
        return redistribute(local, given, want)
    if given.placements == want.placements:
        return local
    replicated = DTensorSpec(given.mesh, (Replicate(),) * given.mesh.ndim, tensor_meta=given.tensor_meta)
    if not has_ragged_rows(given.placements):
        rows = rows_of(want)
        assert rows is not None
        return rows.narrow(redistribute(local, given, replicated), want)
    cut = next(p.cut for p in given.placements if isinstance(p, RaggedRows))
    order = [*cut, *(d for d in range(len(given.shape)) if d not in cut)]
    shape = torch.Size(given.shape[d] for d in order)
    meta = TensorMeta(shape, _row_major(shape), local.dtype)
    front = tuple(range(len(cut)))
    flat = tuple(RaggedShard(front, p.local_units) if isinstance(p, RaggedRows) else p for p in given.placements)
    moved = redistribute(
        local.permute(order).reshape(-1),
        DTensorSpec(given.mesh, flat, tensor_meta=meta),
        DTensorSpec(given.mesh, replicated.placements, tensor_meta=meta),
    )
    whole = moved.permute(sorted(range(len(order)), key=lambda d: order[d])).contiguous()
    return _move(whole, replicated, want)


def _install_redistribute_rows() -> None:
    original = DTensor.redistribute

    @functools.wraps(original)
    def redistribute(self, device_mesh=None, placements=None, **kwargs):  # type: ignore[no-untyped-def]
        if placements is None or not has_ragged_rows(self._spec.placements) or tuple(placements) == self.placements:
            return original(self, device_mesh, placements, **kwargs)
        cut = next(p.cut for p in self.placements if isinstance(p, RaggedRows))
        front = self.movedim(cut, tuple(range(len(cut)))).contiguous()
        replicated = original(front, device_mesh, [Replicate()] * front.device_mesh.ndim)
        return replicated.movedim(tuple(range(len(cut))), cut).contiguous().redistribute(device_mesh, placements, **kwargs)

    DTensor.redistribute = redistribute  # type: ignore[method-assign]


def _install_op_handlers() -> None:
    """Ops that DTensor handles before sharding rules are asked; those that look at placements do not know ours."""
    handlers = DTensor._op_dispatcher._custom_op_handlers
    safe = {_aten.is_same_size.default, _aten.as_strided.default, _aten.is_pinned.default}

    def guard(handler: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(op_call, args, kwargs):  # type: ignore[no-untyped-def]
            leaves = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, DTensor)]
            if any(has_ragged(t.placements) for t in leaves):
                return _dispatch_now(op_call, args, kwargs)
            return handler(op_call, args, kwargs)

        return guarded

    for op, handler in handlers.items():
        if op not in safe:
            handlers[op] = guard(handler)


def _dispatch_now(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Dispatch an op on ragged DTensors without the C++ cache, which does not serve ops that have a handler."""
    dispatcher = DTensor._op_dispatcher
    op_info = dispatcher.unwrap_to_op_info(op, args, kwargs)
    answer = _dispatch_ragged(op, args, kwargs, op_info.schema)
    if not isinstance(answer, OutputSharding):
        return answer
    op_info.output_sharding = answer
    local = dispatcher._dispatch_get_local_results_slow_path(op, args, op_info)
    return dispatcher.wrap(local, answer.output_spec)


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
        lambda: _has(dtensor_redistribute.redistribute_local_tensor, "local_tensor", "current_spec", "target_spec"),
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
        "DTensor.redistribute (strided views)",
        "a strided view of rows goes by way of a contiguous copy",
        "0003-ragged-shard-operators",
        lambda: _has(DTensor.redistribute, "device_mesh", "placements", "async_op"),
        _install_redistribute_rows,
    ),
    Hook(
        "OpDispatcher._propagate_op_sharding_dispatch_slow_path, _dispatch_get_local_results_slow_path",
        "sharding rules of ops on ragged DTensors, and how they run on local tensors",
        "0003-ragged-shard-operators",
        lambda: (
            _has(
                dtensor_dispatch.OpDispatcher._propagate_op_sharding_dispatch_slow_path, "op_call", "args", "kwargs", "op_info"
            )
            and _has(dtensor_dispatch.OpDispatcher._dispatch_get_local_results_slow_path, "op_call", "args", "op_info")
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


def register() -> None:
    """Install every hook, or none.

    Raises:
        ImportError: torch is older than 2.11, or a hook's target has not the layout that this package knows.
    """
    if _installed:
        return
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < _OLDEST:
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
