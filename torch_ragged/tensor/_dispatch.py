"""The operator part of the ragged extension: it finds the sharding of an op and runs the op on local tensors.

It extends ``torch/distributed/tensor/_dispatch.py``. It must give the result of a single device or raise; no wrong values.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.distributed._functional_collectives import _are_we_tracing
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import _dispatch as dtensor_dispatch
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpInfo, OpSchema, OutputSharding, RuntimeSchemaInfo
from torch.distributed.tensor._ops import _math_ops as dtensor_math_ops
from torch.distributed.tensor.placement_types import Placement
from torch.utils import _pytree as pytree

from torch_ragged.tensor._api import ragged_extension
from torch_ragged.tensor._cut_placement import CutPlacement, has_flat, has_own_chunks, has_own_rules
from torch_ragged.tensor._local_tensor import LocalTensor, as_own_rank, on_each_rank
from torch_ragged.tensor._ops import (
    Layout,
    NoLocalWay,
    NormPartial,
    OpCall,
    Sharding,
    call_per_mesh,
    decomposition_of,
    dims_from_the_front,
    fits_out,
    has_ragged_rows,
    is_random,
    is_row_major,
    is_written,
    list_rule,
    returns_alias,
    rules_of,
    unsupported,
    written_leaves,
)
from torch_ragged.tensor._ownership import row_major
from torch_ragged.tensor._placement_extension import OpExtension, note_pending
from torch_ragged.tensor._random import before_draw, local_part_of
from torch_ragged.tensor._single_device import draw_new
from torch_ragged.tensor.placement_types import normalize_placements

_aten = torch.ops.aten
# For these ops, torch's cache key lacks an argument that gives a size of the output, or a tensor given by keyword.
_INCOMPLETE_KEYS = (
    _aten.histc.default,
    _aten.histogram.bin_ct,
    _aten.histogram.bins_tensor,
    _aten.linalg_pinv.atol_rtol_tensor,
    _aten.searchsorted.Scalar,
    _aten.searchsorted.Tensor,
    _aten.segment_reduce.default,
    _aten.topk.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)
_CONSTANTS = (torch.zeros, torch.ones, torch.empty, torch.full)
_fake_tensor_log = logging.getLogger("torch._subclasses.fake_tensor")


@dataclass
class RaggedSharding(OutputSharding):
    """An OutputSharding that also runs the op on the local tensors, after they are placed as ``redistribute_schema`` says.

    Attributes:
        run: computes the local outputs; if None, the op itself does.
        given: the arguments for which ``run`` was made; None without ``run``.
        draws: whether the op draws random numbers.
    """

    run: Callable[..., Any] | None = None
    given: OpSchema | None = None
    draws: bool = False

    def local_results(self, op: Any, op_info: Any) -> Any:
        """Redistribute the local arguments as ``redistribute_schema`` says, then run the op on them."""
        if self.draws:
            before_draw(op, op_info)
        schema, values = self.redistribute_schema, self.use_val_from_redistribute_schema
        dtensor_dispatch.OpDispatcher.redistribute_local_args(op_info, schema, values)  # type: ignore[arg-type]
        arguments = op_info.local_args
        # Draws, too: a generator that is given has a state for each rank.
        all_ranks = (self.run is not None or self.draws) and any(isinstance(each, LocalTensor) for each in arguments)
        if op_info.args_tree_spec is not None:
            arguments = pytree.tree_unflatten(arguments, op_info.args_tree_spec)
        if all_ranks:
            return on_each_rank(_run_as_rank, op, self.given, arguments, op_info.local_kwargs)
        return (self.run or op)(*arguments, **op_info.local_kwargs)


def _run_as_rank(op: Any, schema: OpSchema | None, arguments: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run the op as the current rank's own sharding says: that of another rank may count from other offsets."""
    if schema is None:
        return op(*arguments, **kwargs)
    sharding, _ = _local_sharding(op, schema)
    return sharding.run(*arguments, **kwargs)  # type: ignore[union-attr]


class RaggedOps(OpExtension):
    """Operators on ragged DTensors: DTensor's dispatcher asks the rules of ``_ops``."""

    def propagate(
        self, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], op_info: OpInfo, try_cache: bool
    ) -> Any:
        assert op_info.schema is not None
        return _dispatch_ragged(op, args, kwargs, op_info.schema, try_cache and not _are_we_tracing())

    def dispatch(self, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the op without the C++ cache, which does not serve ops with a handler."""
        dispatcher = DTensor._op_dispatcher
        op_info = dispatcher.unwrap_to_op_info(op, args, kwargs)
        answer = _dispatch_ragged(op, args, kwargs, op_info.schema)  # type: ignore[arg-type]
        if not isinstance(answer, OutputSharding):
            return answer
        op_info.output_sharding = answer
        local = dispatcher._dispatch_get_local_results_slow_path(op, args, op_info)
        return dispatcher.wrap(local, answer.output_spec)

    @_disable_dynamo  # The graph breaks here, as for random ops; Dynamo cannot trace a placement made inside a graph.
    def factory(
        self, function: Callable[..., Any], size: torch.Size, mesh: DeviceMesh, placements: Sequence[Placement], **options: Any
    ) -> DTensor:
        """Make constants at their local shape, draw what this rank owns, make other tensors whole and keep a part.

        Ranks must be seeded alike, as for all random ops (``_random``). It issues no collective, with one exception: on an
        accelerator, the first draw broadcasts rank 0's random state.

        Raises:
            ValueError: the placements do not fit the size or contain Partial, or the layout is not strided.
        """
        name, layout, requires_grad = function.__name__, options.pop("layout"), options.pop("requires_grad")
        if layout is not torch.strided:
            raise ValueError(f"torch.distributed.tensor.{name} under {tuple(placements)}: got {layout}, use torch.strided")
        if any(p.is_partial() for p in placements):
            raise ValueError(f"torch.distributed.tensor.{name} under {tuple(placements)}: use Replicate in place of Partial")
        normalized = normalize_placements(tuple(placements), tuple(size), tuple(mesh.shape))
        if function in (torch.rand, torch.randn):
            return draw_new(function, size, mesh, normalized, requires_grad=requires_grad, **options)
        is_whole = function not in _CONSTANTS and mesh.get_coordinate() is not None  # linspace and logspace.

        def make() -> torch.Tensor:
            shape, _ = ragged_extension.local_shape_and_global_offset(size, mesh, normalized, skip_offset=True)
            shape = size if is_whole else shape
            sizes = {"steps": shape[0]} if name in ("linspace", "logspace") else {"size": shape}
            made = function(**{**options, **sizes, "device": mesh.device_type})
            meta = TensorMeta(size, row_major(size), made.dtype)
            return local_part_of(made, DTensorSpec(mesh, normalized, tensor_meta=meta)) if is_whole else made

        local = on_each_rank(make)
        spec = DTensorSpec(mesh, normalized, tensor_meta=TensorMeta(size, row_major(size), local.dtype))
        return DTensor(local.requires_grad_(requires_grad), spec, requires_grad=requires_grad)  # type: ignore[call-arg]


class _Propagation:
    """Torch's answers to the questions of rules, for one call; it implements the protocol ``_ops._rules.Torch``."""

    def __init__(self, schema: OpSchema) -> None:
        self._schema = schema

    @functools.cached_property
    def metas(self) -> Any:
        schema, kwargs = self._schema, dict(self._schema.kwargs_schema)
        if isinstance(kwargs.get("generator"), torch.Generator):  # Some ops raise if meta tensors come with a generator.
            kwargs["generator"] = None
            schema = OpSchema(schema.op, schema.args_schema, kwargs, schema_info=schema.schema_info)
        return _output_metas(schema)

    @functools.cached_property
    def _from_the_left(self) -> OpSchema:
        args = dims_from_the_front(self._schema.op, self._schema.args_schema)
        return OpSchema(self._schema.op, args, self._schema.kwargs_schema, schema_info=self._schema.schema_info)

    def output_meta(self) -> list[Any]:
        if self.metas is None:
            return []
        return [self.metas] if isinstance(self.metas, TensorMeta) else list(self.metas)

    def output_layouts(self, inputs: Sequence[Layout]) -> Sequence[Layout | None] | None:
        layouts = self._asked(_layouts_by_torch, inputs)
        return layouts if layouts is not None and len(layouts) == len(self.output_meta()) else None

    def output_shapes(self, shapes: Sequence[Sequence[int]]) -> Sequence[Sequence[int] | None] | None:
        specs = _specs(self._schema.args_schema)
        return self._asked(_shapes_by_torch, [((Replicate(),) * spec.mesh.ndim, s) for spec, s in zip(specs, shapes)])

    def _asked(self, question: Any, inputs: Sequence[Layout]) -> Any:
        specs = [
            DTensorSpec(spec.mesh, placements, tensor_meta=_resized(spec.tensor_meta, shape))
            for spec, (placements, shape) in zip(_specs(self._schema.args_schema), inputs)
        ]
        schema = _with_specs(self._from_the_left, specs)
        try:
            hash(schema)
        except TypeError:  # An argument has no hash.
            return question.__wrapped__(schema)
        return question(schema)


def _output_metas(schema: OpSchema) -> Any:
    """The metadata of a single device's outputs. One answer serves all placements, of which there may be thousands."""
    propagate = DTensor._op_dispatcher.sharding_propagator._propagate_tensor_meta_non_cached
    arguments = (schema.args_schema, tuple(schema.kwargs_schema.items()))
    key = None if _are_we_tracing() else _without_placements(arguments)  # Sizes may be symbols while torch traces.
    if key is None:
        return propagate(schema)
    key = (schema.op, torch.get_default_dtype(), key)
    if key not in _metas:
        metas = propagate(schema)
        if len(_metas) >= 4096:
            _metas.clear()
        _metas[key] = metas
    return _metas[key]


def _without_placements(argument: Any) -> Any:
    """The cache key of an argument without the placements of its tensors; None if its type is unknown."""
    if isinstance(argument, DTensorSpec):
        return argument.tensor_meta, argument.mesh.device_type
    if isinstance(argument, (list, tuple)):
        parts = [_without_placements(part) for part in argument]
        return None if None in parts else (type(argument), *parts)
    return (type(argument), argument) if argument is None or isinstance(argument, _PLAIN) else None


_metas: dict[Any, Any] = {}
_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """A context in which torch logs and warns nothing: here, shapes that do not fit together are an answer, not an error."""
    silent = _fake_tensor_log.disabled
    _fake_tensor_log.disabled = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        _fake_tensor_log.disabled = silent


@functools.lru_cache(maxsize=4096)
def _shapes_by_torch(schema: OpSchema) -> tuple[tuple[int, ...] | None, ...] | None:
    """The shapes of the op's outputs; None if its arguments do not fit together."""
    try:
        with _quiet():
            metas = DTensor._op_dispatcher.sharding_propagator._propagate_tensor_meta_non_cached(schema)
    except Exception:
        return None
    metas = (metas,) if isinstance(metas, TensorMeta) else metas or ()
    return tuple(None if meta is None else tuple(meta.shape) for meta in metas)


@functools.lru_cache(maxsize=4096)
def _layouts_by_torch(schema: OpSchema) -> tuple[Layout | None, ...] | None:
    """The outputs of torch's own rule; None if torch has no rule, or its rule would redistribute an argument first."""
    try:
        with _quiet():
            answer = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding_non_cached(schema)
    except Exception:
        return None
    if answer.needs_redistribute or answer.use_val_from_redistribute_schema:
        return None
    specs = (answer.output_spec,) if isinstance(answer.output_spec, DTensorSpec) else answer.output_spec or ()
    return tuple(None if spec is None else (spec.placements, spec.shape) for spec in specs)


def _specs(arguments: Any) -> list[DTensorSpec]:
    return [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, DTensorSpec)]


def _resized(meta: TensorMeta | None, shape: Sequence[int]) -> TensorMeta | None:
    """``meta`` with another shape and the same order of dimensions in memory."""
    if meta is None or tuple(meta.shape) == tuple(shape):
        return meta
    stride = list(meta.stride)
    for dim, (old, size) in enumerate(zip(meta.shape, shape)):
        if old != size and old:
            stride = [s * size // old if s > meta.stride[dim] else s for s in stride]
    return TensorMeta(torch.Size(shape), tuple(stride), meta.dtype)


def _with_specs(schema: OpSchema, specs: Sequence[DTensorSpec]) -> OpSchema:
    """``schema`` with ``specs`` instead of the specs among its positional arguments."""
    replacements = iter(specs)
    leaves, tree = pytree.tree_flatten(schema.args_schema)
    leaves = [next(replacements) if isinstance(leaf, DTensorSpec) else leaf for leaf in leaves]
    return OpSchema(schema.op, pytree.tree_unflatten(leaves, tree), schema.kwargs_schema, schema_info=schema.schema_info)


def _dispatch_ragged(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], schema: OpSchema, try_cache: bool = False) -> Any:
    """The sharding of an op on ragged DTensors, or the result of its decomposition.

    The C++ dispatcher caches and runs the sharding. If it has no key for the call, ``try_cache`` uses the cache of this module.

    Raises:
        NotImplementedError: the op cannot run on these placements; the text says what to redistribute to.
        RuntimeError: an argument is bad.
    """
    result = call_per_mesh(op, args, kwargs)
    function = decomposition_of(op)
    if result is NotImplemented and function is not None:
        result = function(op, *args, **kwargs)
    if result is not NotImplemented:
        return result
    try:
        with as_own_rank():
            sharding, why = _cached_sharding(op, schema) if try_cache else _local_sharding(op, schema)
        if sharding is not None:
            return sharding
        if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), torch._C.DispatchKey.CompositeImplicitAutograd):
            return op.decompose(*args, **kwargs)
        return _gathered_sharding(op, schema, why)
    except NotImplementedError:
        raise
    except Exception as error:  # As in torch. Global shapes show a bad argument, so all ranks raise.
        raise RuntimeError(f"{error}\n\nSharding propagation failed for {schema}") from error


def _cached_sharding(op: Any, schema: OpSchema) -> tuple[OutputSharding | None, str]:
    """:func:`_local_sharding` from a cache. Keys have the id of a mesh, because an equal mesh may have other process groups."""
    meshes = {id(spec.mesh) for spec in _specs((schema.args_schema, schema.kwargs_schema))}
    key = (*sorted(meshes), schema)
    if key not in _shardings:
        if len(_shardings) >= 4096:
            _shardings.clear()
        _shardings[key] = _local_sharding(op, schema)
    return _shardings[key]


_shardings: dict[Any, tuple[OutputSharding | None, str]] = {}


def _local_sharding(op: Any, schema: OpSchema) -> tuple[OutputSharding | None, str]:
    """The sharding with which the op runs on local tensors, or None and the reason."""
    specs = _specs(schema.args_schema)
    rules = rules_of(op)
    if any(spec.mesh != specs[0].mesh for spec in specs):
        rules = [
            rule for rule in rules if rule is list_rule
        ]  # It works per index: call_per_mesh found that one sharding serves.
        if not rules:
            raise ValueError(f"{op}: its DTensors are on different meshes {[s.mesh for s in specs]}: put them on one")
    _hash_scalars(op)
    call = OpCall(op, schema.args_schema, schema.kwargs_schema, _Propagation(schema))
    why = ""
    for rule in rules:
        try:
            return _output_sharding(schema, call, specs, rule(call)), ""
        except NoLocalWay as reason:
            why = why or str(reason)
    return None, why


def _hash_scalars(op: Any) -> None:
    """Add non-tensor arguments to the C++ cache key of an op for which torch has no rule, and so no key."""
    if not any(op in table for table in _key_tables()):
        _key_tables()[0][op] = _complete_key(op)


def complete_keys() -> None:
    """Complete the C++ cache keys of torch's ops with tensors given by keyword (``out=``), memory formats and sizes of outputs.

    It changes torch's tables. The hook on these tables in ``_register`` calls it once.
    """
    for op in _INCOMPLETE_KEYS:
        for table in _key_tables()[1:]:
            table.pop(op, None)
        _key_tables()[0][op] = _complete_key(op)
    for table in _key_tables():
        for op, info in table.items():
            keywords = [a for a in op._schema.arguments if a.kwarg_only]
            named = [a.name for a in keywords if "Tensor" in str(a.type) or a.name == "memory_format"]
            missing = [name for name in named if name not in (info.static_kwargkey or [])]
            if missing:
                table[op] = dataclasses.replace(info, static_kwargkey=[*(info.static_kwargkey or []), *missing])


def _key_tables() -> list[dict[Any, RuntimeSchemaInfo]]:
    """Torch's tables of the arguments that belong to an op's cache key in addition to its positional tensors."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    second = getattr(propagator, "op_to_schema_info_for_single_dim_strategy", None)
    return [propagator.op_to_schema_info] + ([second] if second is not None else [])


def _complete_key(op: Any) -> RuntimeSchemaInfo:
    """A key with all arguments except generators, which have no hash and do not change the sharding."""
    names = [a.name for a in op._schema.arguments if a.kwarg_only and "Generator" not in str(a.type)]
    has_list = any("[]" in str(a.type) or "List[Tensor]" in str(a.type) for a in op._schema.arguments)
    return RuntimeSchemaInfo(1, static_kwargkey=names or None, needs_pytree=has_list)


def _output_sharding(schema: OpSchema, call: OpCall, specs: list[DTensorSpec], sharding: Sharding) -> OutputSharding:
    wanted = []
    for spec, (placements, shape) in zip(specs, sharding.inputs):
        meta = spec.tensor_meta
        if shape is not None and meta is not None:
            meta = TensorMeta(shape, row_major(shape), meta.dtype)
        same = placements == spec.placements and shape is None
        wanted.append(spec if same else DTensorSpec(spec.mesh, placements, tensor_meta=meta))
    if _copies_written(call, specs, wanted):
        raise NoLocalWay(_COPIES_WRITTEN)
    moved = [a for a, b in zip(specs, wanted) if a.placements != b.placements]
    if any(has_own_chunks(spec.placements) for spec in specs) and not all(is_row_major(a.tensor_meta) for a in moved):  # type: ignore
        raise NoLocalWay("a strided argument would be redistributed, and so become row-major")
    outputs = _output_specs(call, specs[0].mesh, sharding)
    for output in outputs if isinstance(outputs, tuple) else (outputs,):
        if output is not None and any(placement.is_partial() for placement in output.placements):
            note_pending(output.mesh)
    if sharding.run is None and all(a is b for a, b in zip(wanted, specs)):
        return OutputSharding(outputs)
    options: Any = {
        "needs_redistribute": True,
        "run": sharding.run,
        "given": schema if sharding.run else None,
        "draws": is_random(call.op),
    }
    return RaggedSharding(outputs, _with_specs(schema, wanted), **options)


def _output_specs(call: OpCall, mesh: DeviceMesh, sharding: Sharding) -> Any:
    if sharding.outputs is None:
        return None
    metas = call.torch.output_meta()
    if isinstance(sharding.outputs, tuple):
        return _output_spec(mesh, sharding.outputs, metas[0])  # type: ignore[arg-type]
    meshes = sharding.meshes or [mesh] * len(metas)
    return tuple(p and _output_spec(mesh, p, m) for mesh, p, m in zip(meshes, sharding.outputs, metas))  # type: ignore


def _output_spec(mesh: DeviceMesh, placements: tuple[Any, ...], meta: TensorMeta) -> DTensorSpec:
    torch_placements = tuple(dtensor_math_ops._NormPartial(p.order) if isinstance(p, NormPartial) else p for p in placements)
    if has_flat(torch_placements) and not has_ragged_rows(torch_placements) and not is_row_major(meta):
        raise NoLocalWay(f"its output would not be row-major (stride {tuple(meta.stride)})")
    return DTensorSpec(mesh, torch_placements, tensor_meta=meta)


def _gathered_sharding(op: Any, schema: OpSchema, why: str) -> OutputSharding:
    """DTensor's way for an op that cannot run on local tensors: replicate the ragged tensors, then ask torch.

    The dispatcher then issues the collectives of these redistributions.

    Raises:
        NotImplementedError: the op writes to or aliases a ragged argument; it draws random numbers and another argument is
            sharded or pending a reduction; or torch has no rule for it.
    """
    specs = _specs((schema.args_schema, schema.kwargs_schema))
    if _writes_to_ragged(op, schema) or returns_alias(op) or _ragged_specs_by_keyword(schema):
        raise unsupported(op, specs, why)
    given = _specs(schema.args_schema)
    replicated = [
        DTensorSpec(spec.mesh, _gathered_placements(spec.placements), tensor_meta=_row_major(spec.tensor_meta))
        if has_own_rules(spec.placements)
        else spec
        for spec in given
    ]
    gathered = _with_specs(schema, replicated)
    try:
        answer = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding_non_cached(gathered)
    except NotImplementedError as error:
        raise unsupported(op, specs, "DTensor itself has no sharding rule for it") from error
    wanted = answer.redistribute_schema or gathered
    call = OpCall(op, schema.args_schema, schema.kwargs_schema, _Propagation(schema))
    if _copies_written(call, given, _specs(wanted.args_schema)):
        raise unsupported(op, specs, _COPIES_WRITTEN)
    if is_random(op) and not _draws_alike(specs, _specs(wanted.args_schema)):
        raise unsupported(op, specs, why)
    outputs = [spec and spec.placements for spec in pytree.tree_leaves(answer.output_spec)]
    if not fits_out(call, outputs):
        raise unsupported(op, specs, f"out= must have the placements of the result, {outputs}")
    values = answer.use_val_from_redistribute_schema
    options: Any = {"needs_redistribute": True, "use_val_from_redistribute_schema": values, "draws": is_random(op)}
    return RaggedSharding(answer.output_spec, wanted, **options)


def _gathered_placements(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """Replicate on all mesh dimensions; if nothing is ragged, only where segments are cut."""
    everywhere = has_flat(placements)
    return tuple(Replicate() if everywhere or isinstance(p, CutPlacement) else p for p in placements)


def _row_major(meta: TensorMeta | None) -> TensorMeta | None:
    """The metadata of a redistributed tensor: its local tensors are row-major."""
    return meta and TensorMeta(meta.shape, row_major(meta.shape), meta.dtype)


def _draws_alike(given: list[DTensorSpec], wanted: list[DTensorSpec]) -> bool:
    """Whether every rank has the whole arguments, so that all ranks draw the numbers of a single device."""
    usual = not any(has_ragged_rows(spec.placements) or any(p.is_partial() for p in spec.placements) for spec in given)
    return usual and all(p.is_replicate() for spec in wanted for p in spec.placements)


def _copies_written(call: OpCall, given: Sequence[DTensorSpec], wanted: Sequence[DTensorSpec]) -> bool:
    """Whether the op would write to a redistributed copy of a tensor, and the tensor itself would keep its old values."""
    return any(written and a != b for written, a, b in zip(written_leaves(call), given, wanted))


_COPIES_WRITTEN = "a tensor that it writes to would need a redistribution"


def _writes_to_ragged(op: Any, schema: OpSchema) -> bool:
    written = [
        schema.args_schema[i] if i < len(schema.args_schema) else schema.kwargs_schema.get(argument.name)
        for i, argument in enumerate(op._schema.arguments)
        if is_written(argument)
    ]
    return any(has_own_rules(spec.placements) for spec in _specs(tuple(written)))


def _ragged_specs_by_keyword(schema: OpSchema) -> bool:
    return any(has_own_rules(spec.placements) for spec in _specs(tuple(schema.kwargs_schema.values())))


ragged_extension.ops = RaggedOps()
