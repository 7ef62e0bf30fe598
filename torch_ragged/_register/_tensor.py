"""Hooks on ``torch/distributed/tensor``: if placements bring an extension, it answers instead of the function's own code."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from torch._C._dynamo import eval_frame
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, _nonlinear_redux
from torch.distributed.tensor import _api as dtensor_api
from torch.distributed.tensor import _dispatch as dtensor_dispatch
from torch.distributed.tensor import _random as dtensor_random
from torch.distributed.tensor import _redistribute as dtensor_redistribute
from torch.distributed.tensor import _utils as dtensor_utils
from torch.distributed.tensor import placement_types as dtensor_placement_types
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._ops import _math_ops as dtensor_math_ops
from torch.distributed.tensor.placement_types import Placement
from torch.utils import _pytree as pytree
from torch.utils._debug_mode import DebugMode

from torch_ragged._register._hook import OPERATORS, PLACEMENT, PROTOCOL, Hook, extend_in_place, has, hook, hooks
from torch_ragged.tensor import interleaved_placement_types, placement_types, strided_placement_types  # noqa: F401, own types
from torch_ragged.tensor._copied_view import reaches_the_tensor, refuse_plain_target, with_writes
from torch_ragged.tensor._cut_placement import own_types
from torch_ragged.tensor._dispatch import complete_keys
from torch_ragged.tensor._ops import register_cpu_attention
from torch_ragged.tensor._ops._writes import count_writes
from torch_ragged.tensor._placement_extension import (
    PlacementExtension,
    ask_extensions,
    extension_of,
    extension_of_op,
    global_shape_fits,
)
from torch_ragged.tensor._plain_ops import all_ops
from torch_ragged.tensor._units import Units
from torch_ragged.tensor.placement_types import RaggedShard


def _extension(*placements: Any) -> PlacementExtension:
    """The first extension of these placements; a guard has found that there is one."""
    return next(found for found in map(extension_of, placements) if found is not None)


@hook(
    "Placement.extension",
    "None for torch's own placements; ragged placements name the extension that answers for them",
    PROTOCOL,
    lambda: getattr(Placement, "extension", None) is None,
)
def _install_extension() -> None:
    Placement.extension = None  # type: ignore[attr-defined]


@hook(
    "DTensor.from_local",
    "check a local tensor against its global shape",
    PROTOCOL,
    lambda: has(DTensor.from_local, "local_tensor", "device_mesh", "placements", "run_check", "shape", "stride"),
)
def _install_from_local() -> None:
    original = DTensor.from_local

    @functools.wraps(original)
    def from_local(local_tensor, device_mesh=None, placements=None, **options):  # type: ignore[no-untyped-def]
        if placements is not None and (extension := extension_of(placements)) is not None:
            device_mesh = device_mesh or dtensor_api._mesh_resources.get_current_mesh()
            run_check, shape = options.get("run_check", False), options.get("shape")
            placements, shape, stride = extension.from_local(local_tensor, device_mesh, placements, run_check, shape)
            options.update(shape=shape, stride=stride)
        return original(local_tensor, device_mesh, placements, **options)

    DTensor.from_local = staticmethod(from_local)  # type: ignore[method-assign]


@hook(
    "_api.compute_global_tensor_info",
    "from_local treats the global shape () as not given",
    PROTOCOL,
    lambda: callable(getattr(dtensor_api, "compute_global_tensor_info", None)),
)
def _install_global_tensor_info() -> None:
    original = dtensor_api.compute_global_tensor_info

    def compute_global_tensor_info(tensor, mesh, placements):  # type: ignore[no-untyped-def]
        return original(tensor, mesh, placements) if extension_of(placements) is None else ([], [])

    dtensor_api.compute_global_tensor_info = compute_global_tensor_info  # type: ignore[attr-defined]


@hook(
    "distribute_tensor",
    "cut a tensor by the rules that its placement brings",
    PROTOCOL,
    lambda: has(dtensor_api.distribute_tensor, "tensor", "device_mesh", "placements"),
)
def _install_distribute_tensor() -> None:
    def distribute_tensor(tensor, device_mesh=None, placements=None, *, src_data_rank=0):  # type: ignore[no-untyped-def]
        mesh = device_mesh or dtensor_api._mesh_resources.get_current_mesh()
        return _extension(placements).distribute_tensor(tensor, mesh, placements, src_data_rank)

    guard = "placements is not None and extension_of(placements) is not None"
    extend_in_place(dtensor_api.distribute_tensor, guard, lambda original: distribute_tensor)


@hook(
    "_api._dtensor_init_helper",
    "zeros, full, rand and others would make local tensors, and draw, as for Shard",
    PROTOCOL,
    lambda: has(dtensor_api._dtensor_init_helper, "init_op", "size", "device_mesh", "placements", "kwargs"),
)
def _install_factories() -> None:
    original = dtensor_api._dtensor_init_helper

    @functools.wraps(original)
    def make(init_op, size, device_mesh=None, placements=None, **options):  # type: ignore[no-untyped-def]
        extension = None if placements is None else extension_of(placements)
        if extension is None:
            return original(init_op, size, device_mesh, placements, **options)
        mesh = device_mesh or dtensor_api._mesh_resources.get_current_mesh()
        operators = extension.op_extension(f"torch.distributed.tensor.{init_op.__name__}")
        return operators.factory(init_op, size, mesh, placements, **options)

    dtensor_api._dtensor_init_helper = make


@hook(
    "_api._ToTorchTensor.backward",
    "the global stride of a gradient does not follow from its local tensor; a gradient may be a DTensor",
    PROTOCOL,
    lambda: has(dtensor_api._ToTorchTensor.backward, "ctx", "grad_output"),
)
def _install_to_local_backward() -> None:
    original = dtensor_api._ToTorchTensor.backward

    def backward(ctx, grad_output):  # type: ignore[no-untyped-def]
        spec, wanted = ctx.dtensor_spec, ctx.grad_placements
        extension = extension_of(spec.placements) or extension_of(wanted or ())
        if isinstance(grad_output, DTensor) and all(isinstance(each, Replicate) for each in spec.placements):
            return grad_output, None  # The local tensor is the whole one, and DTensors that it met have promoted it.
        if grad_output is None or extension is None:
            return original(ctx, grad_output)
        return extension.to_local_gradient(spec, wanted, grad_output), None

    dtensor_api._ToTorchTensor.backward = staticmethod(backward)  # type: ignore[method-assign, assignment]


@hook(
    "_utils.compute_local_shape_and_global_offset",
    "it would mistake an unknown placement for Replicate",
    PROTOCOL,
    lambda: has(dtensor_utils.compute_local_shape_and_global_offset, "global_shape", "mesh", "placements"),
)
def _install_local_shape() -> None:
    def local_shape(global_shape, mesh, placements, skip_offset=False):  # type: ignore[no-untyped-def]
        return _extension(placements).local_shape_and_global_offset(global_shape, mesh, placements, skip_offset)

    function = dtensor_utils.compute_local_shape_and_global_offset
    extend_in_place(function, "extension_of(placements) is not None", lambda original: local_shape)


@hook(
    "_pytree.register_constant",
    "torch.compile guards on placements; before 2.13 only on placements that it knows, or on constants",
    PROTOCOL,
    lambda: callable(pytree.register_constant),
)
def _install_constants() -> None:
    if not hasattr(dtensor_placement_types, "_register_placements_as_opaque"):  # Later versions take any Placement.
        for placement in own_types.values():
            pytree.register_constant(placement)


@hook(
    "DTensorSpec._stable_hash",
    "ranks share compiled graphs on disk, and a graph computes one rank's part: from the second run on, others got its results",
    PROTOCOL,
    lambda: not hasattr(DTensorSpec, "_stable_hash") or has(DTensorSpec._stable_hash, "self"),
)
def _install_stable_hash() -> None:
    if not hasattr(DTensorSpec, "_stable_hash"):  # 2.11: torch does not cache graphs of DTensors.
        return
    original = DTensorSpec._stable_hash

    @functools.wraps(original)
    def _stable_hash(self):  # type: ignore[no-untyped-def]
        # Also for Shard: Replicate + Shard takes this rank's rows, by offsets that are constants of the graph.
        return f"{original(self)} at {self.mesh.get_coordinate()}"

    DTensorSpec._stable_hash = _stable_hash  # type: ignore[method-assign]


@hook(
    "DTensorSpec._check_equals",
    "guards of torch.compile compare no global shapes: another one of which a rank has equally much would get a wrong result",
    PROTOCOL,
    lambda: has(DTensorSpec._check_equals, "self", "other", "skip_shapes"),
)
def _install_guard_of_shapes() -> None:
    original = DTensorSpec._check_equals

    @functools.wraps(original)
    def _check_equals(self, other, skip_shapes=False):  # type: ignore[no-untyped-def]
        # skip_shapes: Dynamo asks, for a DTensor that a compiled graph is about to get. Comparisons of specs pay for one call.
        is_equal = original(self, other, skip_shapes)
        if not is_equal or not skip_shapes or self.tensor_meta is None:
            return is_equal
        return global_shape_fits(self, other, dtensor_utils.compute_local_shape_and_global_offset)

    DTensorSpec._check_equals = _check_equals  # type: ignore[method-assign]


@hook(
    "DTensor.redistribute",
    "check placements before any communication",
    PROTOCOL,
    lambda: has(DTensor.redistribute, "device_mesh", "placements", "async_op"),
)
def _install_redistribute() -> None:
    def redistribute(self, device_mesh=None, placements=None, **options):  # type: ignore[no-untyped-def]
        return _extension(self.placements, placements).redistribute(self, device_mesh, placements, **options)

    guard = "placements is not None and (extension_of(placements) or extension_of(self._spec.placements)) is not None"
    extend_in_place(DTensor.redistribute, guard, lambda original: redistribute)


@hook(
    "_redistribute.redistribute_local_tensor",
    "move data to and from placements that bring their own rules",
    PROTOCOL,
    lambda: (
        has(dtensor_redistribute.redistribute_local_tensor, "local_tensor", "current_spec", "target_spec", "is_explicit")
        and has(dtensor_redistribute.get_active_debug_mode)
        and has(DebugMode.record_redistribute_calls, "arg", "transform_info_str", "is_explicit")
    ),
)
def _install_redistribute_local_tensor() -> None:
    def redistribute_local_tensor(local_tensor, current_spec, target_spec, *, async_op=False, is_explicit=False, **_):  # type: ignore
        extension = _extension(target_spec.placements, current_spec.placements, [RaggedShard])
        options = {"async_op": async_op, "is_explicit": is_explicit}
        return extension.redistribute_local_tensor(local_tensor, current_spec, target_spec, **options)

    guard = (
        "(extension_of(target_spec.placements) or extension_of(current_spec.placements)) is not None "
        "or _torch_ragged_redistributes(current_spec, target_spec)"
    )
    extend_in_place(
        dtensor_redistribute.redistribute_local_tensor,
        guard,
        lambda original: redistribute_local_tensor,
        _torch_ragged_redistributes=all_ops.redistributes,
    )


@hook(
    "OpDispatcher._propagate_op_sharding_dispatch_slow_path, _dispatch_get_local_results_slow_path",
    "ask placements for their own sharding rules, and run ops on local tensors as these rules say; what would write a "
    "DTensor into a plain number is an error with a text",
    PROTOCOL,
    lambda: (
        has(dtensor_dispatch.OpDispatcher._propagate_op_sharding_dispatch_slow_path, "args", "kwargs", "op_info", "try_cache")
        and has(dtensor_dispatch.OpDispatcher._dispatch_get_local_results_slow_path, "op_call", "args", "op_info")
        and hasattr(DTensor._op_dispatcher.sharding_propagator, "_propagate_tensor_meta_non_cached")
        and hasattr(dtensor_math_ops, "_NormPartial")
    ),
)
def _install_dispatch() -> None:
    dispatcher = DTensor._op_dispatcher
    propagate_original = dispatcher._propagate_op_sharding_dispatch_slow_path
    results_original = dispatcher._dispatch_get_local_results_slow_path

    def propagate(op_call, args, kwargs, op_info, try_cache):  # type: ignore[no-untyped-def]
        extension = extension_of_op(op_info)
        if extension is None and not all_ops.run:
            refuse_plain_target(op_call, args)
            return propagate_original(op_call, args, kwargs, op_info, try_cache)
        try_cache = try_cache or reaches_the_tensor(op_call)  # Copied views come here at each call.
        if extension is None:
            answer = all_ops.propagate(propagate_original, op_call, args, kwargs, op_info, try_cache)
        else:
            answer = extension.op_extension(op_call).propagate(op_call, args, kwargs, op_info, try_cache)
        return with_writes(op_call, args, kwargs, op_info, answer) if reaches_the_tensor(op_call) else answer

    def local_results(op_call, args, op_info):  # type: ignore[no-untyped-def]
        run = getattr(op_info.output_sharding, "local_results", None)
        if run is None or not op_info.compute_mesh._is_current_rank_part_of_mesh():
            with all_ops.waits(op_call, op_info):
                return results_original(op_call, args, op_info)
        return run(op_call, op_info)

    dispatcher._propagate_op_sharding_dispatch_slow_path = propagate  # type: ignore[method-assign]
    dispatcher._dispatch_get_local_results_slow_path = local_results  # type: ignore[method-assign]


@hook(
    "OpDispatcher._dispatch_fast_path_python_tail",
    "after torch_ragged.spmd.parallelize: autograd counts no writes in inference mode and by foreach ops, and views that are "
    "copies must know them",
    PROTOCOL,
    lambda: has(
        dtensor_dispatch.OpDispatcher._dispatch_fast_path_python_tail,
        "op_call", "args", "kwargs", "output_sharding", "is_inplace_op",
    ),
)  # fmt: skip
def _install_count_of_writes() -> None:
    def count(original):  # type: ignore[no-untyped-def]
        def tail(self, op_call, args, kwargs, *rest):  # type: ignore[no-untyped-def]
            count_writes(op_call, args, kwargs)
            return original(self, op_call, args, kwargs, *rest)

        return tail

    extend_in_place(
        dtensor_dispatch.OpDispatcher._dispatch_fast_path_python_tail,
        "(is_inplace_op and output_sharding.output_spec is None or _torch_ragged_uncounted()) and _torch_ragged_runs()",
        count,
        _torch_ragged_uncounted=torch.is_inference_mode_enabled,
        _torch_ragged_runs=all_ops.runs,
    )


@hook(
    "OpDispatcher._custom_op_handlers",
    "handlers that read placements would mistake one for another; item() of a pending result of ragged DTensors is an error",
    PROTOCOL,
    lambda: isinstance(getattr(DTensor._op_dispatcher, "_custom_op_handlers", None), dict),
)
def _install_op_handlers() -> None:
    handlers = DTensor._op_dispatcher._custom_op_handlers
    handlers.update(ask_extensions(handlers))


@hook(
    "ShardingPropagator.op_strategy_funcs",
    "torch has no sharding rule for attention on CPU: batch and heads may be sharded",
    OPERATORS,
    lambda: callable(getattr(DTensor._op_dispatcher.sharding_propagator, "register_op_strategy", None)),
)
def _install_cpu_attention() -> None:
    register_cpu_attention()


@hook(
    "ShardingPropagator.op_to_schema_info, op_to_schema_info_for_single_dim_strategy",
    "the dispatcher's cache keys lack tensors given by keyword or sizes of the output; some ops get a key at first use",
    OPERATORS,
    lambda: isinstance(getattr(DTensor._op_dispatcher.sharding_propagator, "op_to_schema_info", None), dict),
)
def _install_keys() -> None:
    complete_keys()


@hook(
    "_C._dynamo.eval_frame.set_code_exec_strategy",
    "between two graphs, Dynamo would compile the functions that the dispatcher calls here, random draws included",
    OPERATORS,
    lambda: callable(eval_frame.set_code_exec_strategy) and {"DEFAULT", "SKIP"} <= set(eval_frame._FrameAction.__members__),
)
def _install_no_compile() -> None:
    dispatcher, skip = DTensor._op_dispatcher, eval_frame._FrameAction.SKIP
    functions = [dispatcher._propagate_op_sharding_dispatch_slow_path, dispatcher._dispatch_get_local_results_slow_path]
    for function in [*functions, *dispatcher._custom_op_handlers.values()]:
        eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))


@hook(
    "serialization.add_safe_globals",
    "torch.load(weights_only=True) reads the placements",
    PLACEMENT,
    lambda: callable(torch.serialization.add_safe_globals),
)
def _install_safe_globals() -> None:
    torch.serialization.add_safe_globals([*own_types.values(), Units])


hooks += [
    Hook(
        "ops.ragged_shard.reduce",
        "a new operator: torch.compile needs one for a reduction onto one rank, which torch's functional collectives lack",
        PLACEMENT,
        lambda: has(torch.library.custom_op, "name", "mutates_args"),
        install=None,  # ``_redistribute`` defines the operator.
    ),
    Hook(
        "_random._rng_tracker",
        "ragged DTensors draw the numbers of a single device; torch's own way counts the elements of Shard's shards",
        OPERATORS,
        lambda: (
            hasattr(dtensor_random, "_rng_tracker")
            and has(dtensor_random.is_rng_supported_mesh, "device_mesh")
            and has(dtensor_random.OffsetBasedRNGTracker, "device_mesh", "run_state_sync")
        ),
        install=None,  # ``_random`` reads and makes the tracker.
    ),
]


@hook(
    "_nonlinear_redux._gather_tensors",
    "one all-gather of argmax, argmin, max and min after the other: two functional ones in flight over gloo overwrite memory",
    OPERATORS,
    lambda: has(
        _nonlinear_redux._gather_tensors, "gather_dim", "gathered_idxs", "local_redux", "device_mesh", "shard_mesh_dims"
    ),
)
def _install_gathers_one_by_one() -> None:
    # torch 2.13, alone: "malloc(): unaligned tcache chunk detected" after some thousand calls on 4 ranks, or a wait that never
    # ends. It does not come if each result is waited for.
    gather = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor

    @functools.wraps(_nonlinear_redux._gather_tensors)
    def gather_tensors(
        gather_dim: int, gathered_idxs: Any, local_redux: Any, device_mesh: DeviceMesh, shard_mesh_dims: list[int]
    ) -> tuple[Any, Any]:
        found = []
        for part in (local_redux, gathered_idxs):
            for mesh_dim in shard_mesh_dims:
                part = gather(part, gather_dim=gather_dim, group=(device_mesh, mesh_dim))
                part = part.wait() if isinstance(part, funcol.AsyncCollectiveTensor) else part
            found.append(part)
        return found[0], found[1]

    _nonlinear_redux._gather_tensors = gather_tensors
