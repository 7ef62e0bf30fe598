"""The public API: ``fully_shard`` and the methods it adds to a module."""

from __future__ import annotations

import dataclasses
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import MixedPrecisionPolicy, UnshardHandle
from torch.distributed.tensor import DTensor

from torch_ragged.fsdp._granularity import OrigParamPolicy
from torch_ragged.fsdp._layout import BufferLayout
from torch_ragged.fsdp._param_group import ManagedParam, ParamGroup
from torch_ragged.fsdp._state import ModuleState

__all__ = ["FSDPModule", "buffer_layouts", "fully_shard", "module_states"]

_STATE = "_ragged_fsdp_state"
_sharded_originals: dict[int, tuple[weakref.ref[nn.Parameter], str]] = {}


def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    ignored_params: set[nn.Parameter] | None = None,
    orig_param_policy: OrigParamPolicy | None = None,
) -> nn.Module:
    """Shard ``module``'s parameters over ``mesh`` in one buffer, gathered and reduced in place around its computation.

    FSDP2's semantics: apply it to submodules first, then to the root; each call makes one group of the parameters not
    yet in a group. Parameters become DTensors placed as :class:`~torch_ragged.RaggedShard`; the module's class becomes a
    subclass of :class:`FSDPModule`. Every rank is expected to hold the same parameter values. No communication here; per
    step and group, one all-gather in forward, one in backward (if resharded), one reduce-scatter, with HSDP one all-reduce of
    the shard, and per backward one all-reduce of a byte per parameter, by which ranks agree on unused parameters.

    Args:
        module: the module to shard, in place.
        mesh: a 1-D mesh; or a 2-D mesh (HSDP), whose first dimension are replicas and whose second one shards, for parameters
            placed as ``(Replicate(), RaggedShard)``. All ranks, on the parameters' device, where None.
        reshard_after_forward: give the gathered parameters back after forward. None: True, but False for the root.
        mp_policy: dtypes to compute, reduce and return in, as in the installed FSDP2: without a ``reduce_dtype``, gradients
            are reduced in ``param_dtype`` before torch 2.15, in the parameters' dtype from it on.
        ignored_params: parameters that stay as they are: not sharded, nor their gradients reduced.
        orig_param_policy: ``(fqn, parameter) -> granularity``: what may not be cut. None: everything may be.

    Returns:
        ``module``.

    Raises:
        ValueError: ``mesh`` is not 1-D or 2-D; the module is sharded already, or holds parameters that are (DTensors), that are
            on the meta device, on a device other than the mesh's, of several dtypes, or tied to an already sharded one.
        TypeError: ``module`` is not an ``nn.Module``, ``reshard_after_forward`` not a bool or None, or the policy
            returns something else than a granularity.
        NotImplementedError: ``mp_policy`` has a ``param_dtype_override_fn``.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"fully_shard expects an nn.Module, got {type(module).__name__}")
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        raise ValueError(f"fully_shard cannot shard a {type(module).__name__}, which has no forward: shard its members")
    if reshard_after_forward is not None and not isinstance(reshard_after_forward, bool):
        raise TypeError(f"reshard_after_forward must be True, False or None, got {reshard_after_forward!r}")
    if getattr(mp_policy, "param_dtype_override_fn", None) is not None:  # new in torch 2.15
        raise NotImplementedError("fully_shard does not offer param_dtype_override_fn: a group computes in one param_dtype")
    if hasattr(module, _STATE):
        raise ValueError(f"{type(module).__name__} is sharded by fully_shard already")
    if mesh is None:
        mesh = init_device_mesh(_device_type_of(module), (torch.distributed.get_world_size(),))
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"fully_shard expects a 1-D mesh, or a 2-D one (replicas, shards), got shape {tuple(mesh.shape)}: pass one or two "
            "of its dimensions, mesh[name]"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(f"rank {torch.distributed.get_rank()} is not part of the mesh {mesh}: call fully_shard on its ranks")
    params = _collect_params(module, ignored_params or set())
    _check_params(params, mesh)
    group = None
    if params:
        device = params[0].original.device  # type: ignore[union-attr]
        originals = [(weakref.ref(p.original), id(p.original), p.fqn) for p in params if p.original is not None]
        group = ParamGroup(params, mesh, mp_policy, orig_param_policy, device)
        _sharded_originals.update({key: (ref, fqn) for ref, key, fqn in originals if ref() is not None})
    module.__dict__[_STATE] = ModuleState(module, group, mp_policy, reshard_after_forward)
    module.register_state_dict_pre_hook(_reshard_before_state_dict)
    module.register_load_state_dict_pre_hook(_reshard_before_load)
    module.register_load_state_dict_post_hook(_adopt_after_load)
    cls = type(module)
    module.__class__ = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__deepcopy__": _no_deepcopy})
    return module


def buffer_layouts(module: nn.Module) -> dict[str, BufferLayout]:
    """The plan of each group under ``module``, by the name of the module that ``fully_shard`` was called on."""
    groups = {name or "root": getattr(child, _STATE).group for name, child in module.named_modules() if hasattr(child, _STATE)}
    return {name: group.layout for name, group in groups.items() if group is not None}


def module_states(module: nn.Module) -> dict[str, ModuleState]:
    """The state of each module under ``module`` that ``fully_shard`` was called on, by its name.

    Raises:
        ValueError: there is none.
    """
    children = module.named_modules() if isinstance(module, nn.Module) else ()
    states = {name or "root": getattr(child, _STATE) for name, child in children if hasattr(child, _STATE)}
    if not states:
        raise ValueError(
            f"expected a module that torch_ragged.fsdp.fully_shard was called on, or one that holds such modules, got "
            f"{type(module).__name__} without any: call fully_shard first"
        )
    return states


def _device_type_of(module: nn.Module) -> str:
    """Where the module's parameters are; the CPU for a module without any."""
    return next((param.device.type for param in module.parameters() if not param.is_meta), "cpu")


def _collect_params(module: nn.Module, ignored: set[nn.Parameter]) -> list[ManagedParam]:
    """Parameters under ``module`` that no ``fully_shard`` inside manages, each once, with all its places."""
    found: dict[int, ManagedParam] = {}

    def visit(prefix: str, submodule: nn.Module) -> None:
        if submodule is not module and hasattr(submodule, _STATE):
            return
        for name, param in submodule._parameters.items():
            if param is None or param in ignored:
                continue
            fqn = f"{prefix}{name}"
            managed = found.setdefault(id(param), ManagedParam(fqn, [], param))
            if (submodule, name) not in managed.places:
                managed.places.append((submodule, name))
        for name, child in submodule.named_children():
            visit(f"{prefix}{name}.", child)

    visit("", module)
    return list(found.values())


def _check_params(params: list[ManagedParam], mesh: DeviceMesh) -> None:
    for param in params:
        value = param.original
        assert value is not None
        if isinstance(value, DTensor):
            raise ValueError(
                f"{param.fqn} is a DTensor placed as {value.placements} already: fully_shard takes plain parameters"
            )
        if value.is_meta:
            raise ValueError(f"{param.fqn} is on the meta device: materialise the module (to_empty, then initialise) first")
        if value.device.type != mesh.device_type:
            raise ValueError(f"{param.fqn} is on {value.device}, the mesh on {mesh.device_type}: move the module first")
        reference, fqn = _sharded_originals.get(id(value), (None, ""))
        if reference is not None and reference() is value:
            raise ValueError(
                f"{param.fqn} is tied to {fqn}, which another fully_shard has sharded: keep tied parameters in one group, "
                "by calling fully_shard on a module that holds both only"
            )
    dtypes = {param.original.dtype for param in params if param.original is not None}
    if len(dtypes) > 1:
        raise ValueError(f"fully_shard got parameters of several dtypes {sorted(map(str, dtypes))}: one dtype per group")
    if dtypes and not next(iter(dtypes)).is_floating_point:
        raise ValueError(f"fully_shard got parameters of dtype {dtypes.pop()}: expected a floating-point dtype")


def _reshard_before_state_dict(module: Any, prefix: str, keep_vars: bool) -> None:
    _group_call(module, ParamGroup.reshard)


def _reshard_before_load(module: Any, *args: Any) -> None:
    _group_call(module, ParamGroup.reshard)


def _adopt_after_load(module: Any, incompatible_keys: Any) -> None:
    """With ``assign=True`` the values are taken over; the parameters stay the same objects, also for an optimizer."""
    _group_call(module, ParamGroup.adopt_sharded)


def _group_call(module: nn.Module, method: Any) -> None:
    group = getattr(module, _STATE).group
    if group is not None:
        method(group)


def _no_deepcopy(self: Any, memo: Any) -> Any:
    raise AssertionError("FSDP does not support deepcopy. Please use state dict for serialization.")


class FSDPModule(TorchFSDPModule):
    """What ``fully_shard`` makes of a module: FSDP2's methods, on this package's buffers.

    A subclass of torch's, so that other libraries recognise it. FSDP2 methods that are not offered here raise
    ``NotImplementedError``.
    """

    def _ragged_states(self, recurse: bool) -> list[ModuleState]:
        modules = self.modules() if recurse else [self]  # type: ignore[attr-defined]
        return [getattr(m, _STATE) for m in modules if hasattr(m, _STATE)]

    def _ragged_groups(self, recurse: bool) -> list[ParamGroup]:
        return [state.group for state in self._ragged_states(recurse) if state.group is not None]

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's parameters now (not those of FSDP modules inside). One all-gather.

        With ``async_op`` it returns a handle at once, whose ``wait()`` makes the parameters available.
        """
        group = self._ragged_states(recurse=False)[0].group
        if group is not None:
            group.adopt_sharded()
            group.unshard(wait=not async_op)
        return _UnshardHandle(group) if async_op else None

    def reshard(self) -> None:
        """Give this module's gathered parameters back (not those of FSDP modules inside)."""
        _group_call(self, ParamGroup.reshard)  # type: ignore[arg-type]

    def reset_iter_state(self) -> None:
        """Recover after a forward or backward that raised: drop its gradients, give all gathered parameters back.

        Gradients accumulated without gradient sync are dropped too; what is in ``.grad`` stays. The next forward of the
        root does the same by itself after a backward that raised. No communication, but it waits for what is under way.

        Raises:
            RuntimeError: this is not the root, the outermost ``fully_shard`` module.
        """
        state, *inner = self._ragged_states(recurse=True)
        if state.context is not None and not state.is_root:
            raise RuntimeError("reset_iter_state must be called on the root, the outermost fully_shard module")
        if state.context is not None:
            state.context.forget_backward()
        for each in (state, *inner):
            each.reset()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """What ``to``, ``cpu``, ``half`` and the like call. Parameters stay where they are, in their dtype.

        Raises:
            ValueError: ``fn`` would change the dtype or device of a sharded parameter; nothing is changed then.
        """
        states = self._ragged_states(recurse)
        for state in states:
            state.give_back()
            if state.group is not None:
                state.group.adopt_sharded()
                state.group.check_conversion(fn)
        convert_rest = super(TorchFSDPModule, self)._apply  # type: ignore[misc]  # past torch's, whose state is not here
        group = states[0].group
        if group is None:
            return convert_rest(fn, recurse)
        group.convert(fn, owner=None if recurse else self)  # type: ignore[arg-type]
        with group.hidden():
            return convert_rest(fn, recurse)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients; without, they add up in the gradient buffer with no communication."""
        for state in self._ragged_states(recurse):
            state.requires_gradient_sync = requires_gradient_sync

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether gathered parameters are given back after forward."""
        for state in self._ragged_states(recurse):
            state.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether gathered parameters are given back after backward.

        If they stay, the next forward uses them as they are (those that forward keeps too, it gathers anew): set it to
        True again before the last backward in front of an optimizer step, as with FSDP2. What operations on the DTensor
        parameters change is gathered anew, writes to their local tensors go unnoticed.
        """
        for state in self._ragged_states(recurse):
            state.reshard_after_backward = reshard_after_backward

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """A hint of FSDP2's: every backward pass here finishes its reductions and sets ``.grad`` at its end."""

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients over the replicas of HSDP.

        Without, it reduces them within each replica only, and adds them up there with no more communication; ``.grad``
        is set by the next backward that reduces over replicas. Nothing changes on a 1-D mesh.
        """
        for group in self._ragged_groups(recurse):
            group.requires_all_reduce = requires_all_reduce

    def set_modules_to_forward_prefetch(self, modules: list[TorchFSDPModule]) -> None:
        """Start the all-gathers of ``modules`` when this module has its parameters in forward, in place of the next one's.

        Raises:
            ValueError: one of them is not an FSDP module.
        """
        self._ragged_states(recurse=False)[0].forward_prefetch = _states_of(modules)

    def set_modules_to_backward_prefetch(self, modules: list[TorchFSDPModule]) -> None:
        """Start the all-gathers of ``modules`` when this module has its parameters in backward, in place of the one before.

        Raises:
            ValueError: one of them is not an FSDP module.
        """
        self._ragged_states(recurse=False)[0].backward_prefetch = _states_of(modules)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether backward needs this module's parameters: not for an embedding, for example."""
        self._ragged_states(recurse=False)[0].unshard_in_backward = unshard_in_backward

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of gradients over all ranks by ``factor``, in place of the number of ranks.

        Raises:
            ValueError: ``factor`` is not a positive number.
        """
        if not isinstance(factor, (int, float)) or not factor > 0:
            raise ValueError(f"the gradient divide factor must be a positive number, got {factor!r}")
        for group in self._ragged_groups(recurse=False):
            group.reduction = dataclasses.replace(group.reduction, divisor=factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Deprecated name of :meth:`set_gradient_divide_factor`."""
        warnings.warn("use set_gradient_divide_factor instead", FutureWarning, stacklevel=2)
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Ask backends for sums only, and divide apart, where they may average otherwise (NCCL)."""
        for group in self._ragged_groups(recurse=False):
            group.reduction = dataclasses.replace(group.reduction, sum_only=enable)

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """A hint of FSDP2's: here, parameters without a gradient always contribute zeros, and no rank waits for another."""

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """How many gradient buffers may be in a reduce-scatter at once; 1 unless set. Each one more is memory.

        Raises:
            TypeError: ``max_input_buffers`` is not an int.
            ValueError: it is below 1.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers must be an int, got {type(max_input_buffers).__name__}")
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be a positive int, got {max_input_buffers}")
        for state in self._ragged_states(recurse):
            state.max_reductions = max_input_buffers

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None], *, stream: Any = None) -> None:
        """Call ``hook`` with each reduced shard of this module's gradients: flat, of the reduce dtype, to change in place.

        It is called when the reduce-scatter, or the all-reduce of HSDP, is done and its result divided. There is no stream
        of its own for it: on a GPU it runs in the current one.

        Raises:
            ValueError: a ``stream`` is given.
        """
        if stream is not None:
            raise ValueError("set_all_reduce_hook runs the hook in the current stream: pass no stream")
        for group in self._ragged_groups(recurse=False):
            group.reduce_hook = hook

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Have the next forward of the root wait for ``event``, recorded behind an optimizer step on a stream of its own.

        FSDP2's all-gathers wait for the event in place of the current stream; here they follow the current stream, which
        waits. The event is dropped then: set a new one in every iteration.
        """
        self._ragged_states(recurse=False)[0].post_optim_event = event

    def set_custom_all_gather(self, comm: Any) -> None:
        """Gather with ``comm(output, shard, group=, async_op=)``, FSDP2's ``AllGather``, less its ``allocate``."""
        for group in self._ragged_groups(recurse=False):
            group.process_groups.custom_all_gather = comm

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Reduce with ``comm(output, buffer, group=, op=, async_op=)``: FSDP2's ``ReduceScatter``, less its ``allocate``."""
        for group in self._ragged_groups(recurse=False):
            group.process_groups.custom_reduce_scatter = comm

    def _get_fsdp_state(self) -> Any:
        """What torch's ``register_fsdp_forward_method`` asks for: the pre- and post-forward of this module."""
        return self._ragged_states(recurse=False)[0]


def _states_of(modules: list[TorchFSDPModule]) -> list[ModuleState]:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"expected modules that fully_shard was called on, got {type(module).__name__}")
    return [module._ragged_states(recurse=False)[0] for module in modules]


def _refuse(name: str) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"torch_ragged.fsdp does not offer FSDPModule.{name}()")

    method.__name__, method.__doc__ = name, "Not offered: raises NotImplementedError."
    return method


for _name in dir(TorchFSDPModule):
    if not _name.startswith("_") and _name not in vars(FSDPModule):
        setattr(FSDPModule, _name, _refuse(_name))


class _UnshardHandle(UnshardHandle):
    def __init__(self, group: ParamGroup | None) -> None:
        self._group = group

    def wait(self) -> None:
        """Make the gathered parameters the module's parameters."""
        if self._group is not None:
            self._group.unshard()
            self._group = None
