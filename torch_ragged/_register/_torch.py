"""Wrappers of private torch functions that this package calls. Each names the torch versions in which it is the same.

Nothing here may change torch: functions that torch itself calls are extended by hooks.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum, auto
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torch_ragged._register._spmd_types import untyped

__all__ = [
    "REFUSED_VERSION",
    "GradientUse",
    "accelerator_stream",
    "apply_of",
    "as_plain_tensors",
    "backward_error_handlers",
    "backward_input_checks",
    "backward_id",
    "concatenate",
    "current_autograd_node",
    "default_store",
    "dtensor_like",
    "dynamo_disabled",
    "dynamo_disabled_in_backward",
    "fake_world",
    "flatten",
    "forget_shardings",
    "fsdp2_keeps_wide_gradients",
    "functorch_is_active",
    "gradient_use",
    "has_multicast",
    "is_autocast",
    "is_wrapper",
    "local_tensor",
    "makes_fakes",
    "next_sequence_number",
    "no_dispatch",
    "nodes_outlive_outputs",
    "preserved_versions",
    "process_groups",
    "profiler_range",
    "recomputation_ends",
    "register_composable",
    "set_versions",
    "storage_ids",
    "unsafe_view",
    "waited",
]

as_plain_tensors = torch._C.DisableTorchFunctionSubclass
"""A context in which tensor subclasses behave as plain tensors, at the speed of plain tensors. (2.11 to 2.15)"""

no_dispatch = torch._C._DisableTorchDispatch
"""A context in which no ``TorchDispatchMode`` sees the operations on plain tensors. (2.11 to 2.15)"""

is_autocast = torch._C._is_any_autocast_enabled
"""Whether any device's autocast is on. (2.11 to 2.15)"""

is_wrapper = is_traceable_wrapper_subclass
"""Whether a tensor is of a type that holds other tensors, as quantized weights and DTensors are. (2.11 to 2.15)"""

functorch_is_active = torch._C._are_functorch_transforms_active
"""Whether a functorch transform is active. (2.11 to 2.15)"""

unsafe_view = torch.ops.aten._unsafe_view.default
"""A view that autograd treats as a new tensor, as torch's own matmuls return it. For autograd, an in-place operation on it does
not change its base. (2.11 to 2.15)"""

preserved_versions = torch.autograd._unsafe_preserve_version_counter
"""A context in which writes to a tensor, or to a tuple of them, do not change the version counters. So autograd does not refuse
a tensor that it has saved. (2.11 to 2.15)"""


set_versions = torch._C._autograd._unsafe_set_version_counter
"""Sets the version counters of a tuple of tensors to a tuple of numbers. Autograd refuses to read a tensor that it has saved
with another version. (2.11 to 2.15)"""

REFUSED_VERSION = 2**24
"""Tensors with this version or a later one must not be read in a backward. No program writes to a tensor so often."""

backward_error_handlers: list[Callable[[RuntimeError], None]] = getattr(torch.autograd.graph, "_backward_error_handlers", [])
"""Each is called with a RuntimeError that a backward pass raises, and may raise one that says more. A stock torch has no such
list: a hook calls them. (2.11 to 2.15)"""

backward_input_checks: list[Callable[[Sequence[Any], Sequence[Any]], None]] = getattr(
    torch.autograd.graph, "_backward_input_checks", []
)
"""Each is called before a backward pass, with its outputs and the inputs that ``torch.autograd.grad`` or ``backward(inputs=)``
was given, and may raise an error. The same hook calls them. (2.11 to 2.15)"""


class GradientUse(Enum):
    """What the current backward pass does with the gradient of a leaf."""

    ACCUMULATED = auto()
    """It accumulates in ``.grad``."""
    RETURNED = auto()
    """``torch.autograd.grad`` returns it."""
    NONE = auto()
    """Nothing: the pass was asked for other gradients."""


def gradient_use(accumulator: torch.autograd.graph.Node) -> GradientUse:
    """What the current backward pass does with the gradient that reaches the node ``accumulator``. (2.11 to 2.15)"""
    try:
        return GradientUse.ACCUMULATED if torch._C._will_engine_execute_node(accumulator) else GradientUse.NONE
    except RuntimeError:  # The engine refuses to answer for a node whose gradient it returns.
        return GradientUse.RETURNED


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


@functools.cache
def nodes_outlive_outputs() -> bool:
    """Whether the Python object of a custom autograd function's node keeps the node, if nothing else does.

    (2.11: False. 2.13 and 2.15: True.)
    """
    with torch.inference_mode(False), torch.enable_grad():
        node = _Identity.apply(torch.empty(0, device="cpu", requires_grad=True)).grad_fn
    try:
        return len(node.next_functions) == 1
    except RuntimeError:  # The node is freed.
        return False


def fsdp2_keeps_wide_gradients() -> bool:
    """Whether torch's FSDP2 leaves gradients in the dtype of their computation, and reduces them in the parameters' own dtype.

    An FSDP2 that does not lets autograd round gradients to ``param_dtype``. A method of its parameters then casts them to
    ``reduce_dtype``, and this method tells. (2.11 and 2.13: False. 2.15: True.)
    """
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam  # Here, because torch.distributed.tensor is below.

    return not hasattr(FSDPParam, "to_accumulated_grad_if_needed")


def concatenate(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """One mesh with the mesh dimensions of ``meshes``, in order. No communication. (2.11 to 2.15)

    Raises:
        RuntimeError: ``meshes`` are not slices of one mesh, or have dimensions in common.
    """
    return DeviceMesh._concatenate(list(meshes))


def dtensor_of(local: torch.Tensor, spec: DTensorSpec, requires_grad: bool = False) -> DTensor:
    """The DTensor of ``local`` and ``spec``, unchecked, on the device of ``local``. (2.11 to 2.15)

    ``DTensor.from_local`` would copy a shard in host memory to the device of its mesh.
    """
    # Not DTensor(...): its __init__ serves torch.export only, and takes twice the time of the rest. Each .grad is made anew.
    return DTensor.__new__(DTensor, local, spec, requires_grad=requires_grad)


def dtensor_like(local: torch.Tensor, like: DTensor) -> DTensor:
    """The DTensor of ``local`` with the spec of ``like`` (mesh, placements, shape, dtype), unchecked. (2.11 to 2.15)"""
    return DTensor.__new__(DTensor, local, like._spec, requires_grad=False)


def local_tensor(tensor: DTensor) -> torch.Tensor:
    """The local tensor, detached, as from ``to_local()`` without gradients, in a tenth of the time. (2.11 to 2.15)"""
    return tensor._local_tensor


def flatten(mesh: DeviceMesh) -> DeviceMesh:
    """``mesh`` with all its dimensions as one; its name joins their names. It makes one process group. (2.11 to 2.15)

    Raises:
        ValueError: the dimensions of ``mesh`` have no names.
    """
    if mesh.ndim == 1:
        return mesh
    if mesh.mesh_dim_names is None:
        raise ValueError(f"{mesh} has no dimension names: pass mesh_dim_names to init_device_mesh")
    return mesh._flatten("_".join(mesh.mesh_dim_names))


def storage_ids(tensor: torch.Tensor) -> list[int]:
    """The identity of a tensor's storage; for a wrapper subclass, of each tensor inside. No data is read. (2.11 to 2.15)

    A wrapper such as AsyncCollectiveTensor has no data pointer of its own. Sparse tensors have no storage.
    """
    if is_traceable_wrapper_subclass(tensor):
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]  # A part may also be a DTensor's mesh.
        return [each for part in parts if isinstance(part, torch.Tensor) for each in storage_ids(part)]
    has_storage = tensor.layout == torch.strided and torch._C._has_storage(tensor)
    return [tensor.untyped_storage()._cdata] if has_storage else []


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` for code in which no functorch transform is active, in a third of its time. (2.11 to 2.15)"""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc,no-any-return]


def recomputation_ends(saves: int) -> bool:
    """Whether an activation checkpoint recomputes a forward, and ends it when ``saves`` more tensors are saved. (2.11 to 2.15)

    Torch's own operators save their inputs before they compute, and the checkpoint stops there. A Python function saves them
    when it has computed. If torch has changed, this is False, and the function computes in vain.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None:
        return False
    pack = inspect.unwrap(hooks[0])
    if getattr(pack, "__qualname__", "") != "_recomputation_hook.__init__.<locals>.pack_hook":
        return False
    variables = dict(zip(pack.__code__.co_freevars, pack.__closure__))
    if not {"target_frame_ref", "gid"} <= variables.keys():
        return False
    frame, graph = variables["target_frame_ref"].cell_contents(), variables["gid"].cell_contents
    return frame is not None and frame.early_stop and frame.recomp_counter[graph] + saves >= len(frame.weak_holders)


def dynamo_disabled(function: Callable[..., Any], recursive: bool = True) -> Callable[..., Any]:
    """``function``, hidden from Dynamo, which neither traces it nor breaks a graph for it: for module hooks. (2.11 to 2.15)

    Unlike ``torch.compiler.disable`` it imports Dynamo only at the first call. If ``recursive``, what it calls is hidden, too.
    """
    return torch._disable_dynamo(function, recursive)


def dynamo_disabled_in_backward(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same for hooks that autograd calls, which no graph can have inside; they are :func:`untyped`, too. (2.11 to 2.15)

    They are many, and :func:`dynamo_disabled` takes longer than most of them. So they skip both while nothing is compiled and
    no types are checked.
    """
    disabled, callback = dynamo_disabled(untyped(function)), torch._C._dynamo.eval_frame.get_eval_frame_callback

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if callback() is None and "spmd_types" not in sys.modules:
            return function(*args, **kwargs)
        return disabled(*args, **kwargs)

    return call


def profiler_range(what: str, name: str) -> AbstractContextManager[object]:
    """A range for ``torch.profiler`` with the name ``torch_ragged::what (name)``. If no profiler records, it is free.

    (2.11 to 2.15)
    """
    if not torch.autograd.profiler._is_profiler_enabled:
        return _NO_RANGE
    return torch.profiler.record_function(f"torch_ragged::{what} ({name})")


_NO_RANGE: AbstractContextManager[object] = nullcontext()


def register_composable(api: Any, module: nn.Module, state: object) -> None:
    """Record in torch that ``api``, a composable API such as torch's ``fully_shard``, was applied to ``module``. (2.11 to 2.15)

    For ``fully_shard`` this has three effects. Torch's ``replicate`` skips the parameters of such modules. Torch's
    ``fully_shard`` raises for them. ``fully_shard.state(module)``, which pipeline schedules of torch 2.11 to 2.13 call,
    returns ``state``.
    """
    module.__dict__.setdefault(STATE_KEY, OrderedDict())[api.__wrapped__] = state
    module.__dict__.setdefault(REGISTRY_KEY, OrderedDict())[api.__name__] = RegistryItem()


accelerator_stream = torch._C._accelerator_getStream
"""Returns the current stream of a device of the accelerator, by the device's number. (2.11 to 2.15)"""

backward_id = torch._C._current_graph_task_id
"""Returns the number of the backward pass that runs this code; -1 outside of backward. (2.11 to 2.15)"""


current_autograd_node = torch._C._current_autograd_node
"""Returns the node of the graph whose backward runs this code; None outside of backward, and in callbacks. (2.11 to 2.15)"""

TorchDispatchMode = torch.utils._python_dispatch.TorchDispatchMode
"""The base of modes that see each operation of ATen. (2.11 to 2.15)"""

next_sequence_number = torch.autograd._get_sequence_nr
"""Returns the sequence number of the next node of this thread's graph. Later nodes have higher numbers. (2.11 to 2.15)"""


def makes_fakes() -> bool:
    """Whether a ``FakeTensorMode`` is entered, as DTensor does to find the shape of an op's result. (2.11 to 2.15)"""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


@contextlib.contextmanager
def fake_world(ranks: int) -> Iterator[None]:
    """This process is rank 0 of a process group whose collectives return at once and move no data. (2.11 to 2.15)"""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # A mesh of this group may be equal to an earlier or a later one.
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    forget_shardings()
    try:
        yield
    finally:
        dist.destroy_process_group()
        forget_shardings()


def forget_shardings() -> None:
    """Drop what DTensor remembers of ops: it holds meshes, whose process groups may be gone. (2.11 to 2.15)"""
    from torch.distributed.tensor import debug  # Not above: it imports Inductor, which takes longer than all of this package.

    debug._clear_sharding_prop_cache()


def waited(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``; if it is the result of a collective in flight, wait for it. (2.11 to 2.15)"""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def default_store() -> dist.Store:
    """The store that all ranks of the default process group share. (2.11 to 2.15)"""
    return dist.distributed_c10d._get_default_store()


def process_groups() -> list[dist.ProcessGroup]:
    """All process groups that this process has made and not destroyed. (2.11 to 2.15)"""
    return list(dist.distributed_c10d._world.pg_map)


def has_multicast(device: torch.device) -> bool:
    """Whether a GPU and its driver have NVSwitch multicast. (2.11 to 2.15)"""
    kind = torch._C._autograd.DeviceType.CUDA
    return torch._C._distributed_c10d._SymmetricMemory.has_multicast_support(kind, device.index)


def drop_advice_to_flatten(drops: bool = True) -> None:
    """From now on, torch does not log its advice to flatten mesh dimensions. (2.11 to 2.15)

    ``clip_grad_norm_`` of a dp x tp model sums over two dimensions of a mesh that ``fully_shard`` or a plan has made: no user
    can flatten it.
    """
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    (logger.addFilter if drops else logger.removeFilter)(_is_of_use)


def _is_of_use(record: logging.LogRecord) -> bool:
    return "sequential" not in str(record.msg)
