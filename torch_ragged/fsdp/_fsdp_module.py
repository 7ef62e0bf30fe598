"""FSDPModule: the class that a module gets from ``fully_shard``. Its methods call states and groups; they move no data."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import UnshardHandle
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from torch_ragged._ranks.agreement import agreement
from torch_ragged._ranks.groups import device_of, is_nccl
from torch_ragged._register._torch import register_composable
from torch_ragged.fsdp._groups import module_states
from torch_ragged.fsdp._state_dict import before_load
from torch_ragged.fsdp._upcoming import GRADIENT_VIEWS, PendingView, pending_of
from torch_ragged.fsdp.comm._choice import IMPLEMENTATIONS, Traffic, choose_implementation
from torch_ragged.fsdp.core._dbuffer import MemoryPool
from torch_ragged.fsdp.core._fsdp_param_group import FSDPParamGroup
from torch_ragged.fsdp.core._fsdp_state import STATE, FSDPState, GradientReductionHandle, state_of
from torch_ragged.fsdp.core._kit import FeaturePart, Need, PlainPart, Terms, check_pairs
from torch_ragged.fsdp.core._neighbours import Neighbours
from torch_ragged.fsdp.core._param_swap import check_conversion, convert, is_whole, load_converted, load_replaced
from torch_ragged.fsdp.gates._untrained import warn_of_unsharded
from torch_ragged.fsdp.memory._persistent_buffers import SLOTS, allocator, check_ready, make_persistent, make_transient
from torch_ragged.fsdp.schedule._auto import AutoSchedule, set_schedule
from torch_ragged.fsdp.schedule._schedule import Schedule
from torch_ragged.tensor._from_meta import FromMeta

__all__ = ["FSDPModule", "check_bool", "make_fsdp_module", "share_comm_ctx"]

_classes: dict[type, type] = {}

_SCHEDULE = "_ragged_schedule"
"""The attribute under which a root keeps what :meth:`FSDPModule.set_schedule` has set."""


def make_fsdp_module(module: nn.Module, state: FSDPState) -> None:
    """Attach ``state`` to ``module``, and make the module's class a subclass of :class:`FSDPModule`."""
    module.__dict__[STATE] = state
    register_composable(torch_fully_shard, module, state)
    module.register_state_dict_pre_hook(_reshard_before_state_dict)
    module.register_load_state_dict_pre_hook(before_load)
    module.register_load_state_dict_post_hook(_adopt_after_load)
    cls = type(module)
    if cls not in _classes:
        _classes[cls] = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {})
    module.__class__ = _classes[cls]


def check_bool(call: str, name: str, value: Any) -> None:
    """Raise if the argument ``name`` of ``call`` is no truth value. A string or None would be taken for one silently."""
    # Numbers are truth values, since FSDP2 takes ``step % 4``, and so are scalars of NumPy and tensors.
    if not isinstance(value, int) and not hasattr(value, "item"):
        raise ValueError(f"{call}: {name} must be a bool, got {value!r}")


def _checks_bools(cls: type[Any]) -> Any:
    """The class ``cls``, whose public methods call :func:`check_bool` on each argument with the annotation ``bool``."""
    for name, method in list(vars(cls).items()):
        if inspect.isfunction(method) and not name.startswith("_"):
            kinds = {param.name: param.annotation for param in inspect.signature(method).parameters.values()}
            if {bool, "bool"} & {*kinds.values()}:
                setattr(cls, name, _checked_method(method, kinds))
    return cls


def _checked_method(method: Callable[..., Any], kinds: dict[str, Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for name, value in [*zip(kinds, args), *kwargs.items()]:
            if kinds.get(name) in (bool, "bool"):
                check_bool(method.__name__, name, value)
        return method(*args, **kwargs)

    return checked


@_checks_bools
class FSDPModule(TorchFSDPModule):
    """The class of a module after ``fully_shard``: FSDP2's methods, on this package's buffers.

    It is a subclass of torch's ``FSDPModule``, so that other libraries recognize it. A method of FSDP2 that is not supported
    raises ``NotImplementedError``. A setting with ``recurse`` also holds for the modules inside that ``fully_shard`` was called
    on, unless that is False. A setting that is a bool raises ``ValueError`` if it gets anything but a bool or a number.
    """

    # The index of the original class in the MRO. torch's __new__ makes an object of that class for slices of containers.
    _orig_cls_mro_index = 3

    def _ragged_states(self, recurse: bool) -> list[FSDPState]:
        modules: Any = self.modules() if recurse else [self]  # type: ignore[attr-defined]
        return list(dict.fromkeys(state for module in modules if (state := state_of(module))))

    def _ragged_groups(self, recurse: bool) -> list[FSDPParamGroup]:
        return [group for state in self._ragged_states(recurse) for group in state.groups]

    def _get_fsdp_state(self) -> Any:
        """This module's state. torch's ``register_fsdp_forward_method`` calls its pre- and post-forward."""
        return self._ragged_states(recurse=False)[0]

    def _root_state(self, error: str) -> FSDPState:
        state: FSDPState = self._get_fsdp_state()
        if state.context.is_initialized and not state.is_root:
            raise RuntimeError(error)
        return state

    def __deepcopy__(self, memo: Any) -> Any:
        raise AssertionError("FSDP does not support deepcopy. Please use state dict for serialization.")

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """All-gather this module's parameters now, but not those of FSDP modules inside it. One all-gather per group.

        With ``async_op`` the method returns a handle at once. ``handle.wait()`` registers the unsharded parameters.
        """
        state = self._get_fsdp_state()
        groups = list(state.groups)
        for group in groups:
            load_replaced(group)
            if not (state.context.in_forward or state.context.in_backward or state.context.is_accumulating):
                group.expire_resident()
            group.unshard(wait=False)
            if not state.context.in_forward:  # This rank alone may use them, outside of a forward: others do not reduce.
                group.is_unhooked = False
        handle = _UnshardHandle(groups)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free this module's unsharded parameters, but not those of FSDP modules inside it."""
        self._get_fsdp_state().reshard()

    def reset_iter_state(self) -> None:
        """Recover after a forward or backward that raised: drop its gradients, and reshard all parameters.

        Gradients accumulated without gradient sync are dropped too. What is in ``.grad`` stays. If a backward raised, the
        next forward of the root does the same by itself. This method issues no collective, and waits for those in flight.
        It raises a RuntimeError if this is not the root.
        """
        state = self._root_state("reset_iter_state must be called on the root, the outermost fully_shard module")
        state.context.drop_backward()
        for each in self._ragged_states(recurse=True):
            each.reset()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Convert the parameters under this module, which stay the same objects. ``to``, ``cpu`` and others call this.

        If only some parameters of a group are under this module, these alone are converted, and leave the group's buffer until
        all parameters of the group have one dtype again. A forward before that raises. If ``fn`` would move a sharded parameter
        to another device, or change the dtype of one whose gradients are not in ``.grad`` yet, this raises before any change.
        """
        under: set[Any] = set(self.modules()) if recurse else {self}  # type: ignore[attr-defined]
        states = self._ragged_states(recurse)
        groups = [group for state in states for group in state.groups if not group.is_hidden]
        for state in states:
            state.reshard()
        functions: dict[FSDPParamGroup, Callable[[torch.Tensor], torch.Tensor]] = {}
        for group in groups:
            load_converted(group)
            functions[group] = fn.at(group.home) if isinstance(fn, FromMeta) else fn
            check_conversion(group, functions[group])
        with contextlib.ExitStack() as stack:
            for group in groups:
                if is_whole(group, under):
                    convert(group, functions[group])
                    stack.enter_context(group.hidden())  # Otherwise torch's _apply would call fn again.
            super(TorchFSDPModule, self)._apply(fn, recurse)  # type: ignore[misc]  # Not torch's, which needs its own state.
        for group in groups:
            load_converted(group)
        return self

    def zero_grad(self, set_to_none: bool = True, **others: Any) -> None:
        """As ``torch.nn.Module.zero_grad``. Also gradients of parameters that are unsharded now, which is FSDP2's trap.

        Until a module is resharded, ``module.parameters()`` are the unsharded ones, and ``.grad`` is of the sharded ones.
        """
        groups = self._ragged_groups(recurse=True)
        _wait_for_users(groups)
        for group in groups:
            if isinstance(group.view, PendingView):  # They are in no ``.grad``, where torch would find them.
                group.drop_gradients()
        super().zero_grad(set_to_none, **others)  # type: ignore[misc]  # The model's own may take more.
        for param in [param for group in groups if group.is_unsharded for param in group.params]:
            if set_to_none:
                param.sharded.grad = None
            elif param.sharded.grad is not None:
                param.sharded.grad.zero_()

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Whether gradients are set by :meth:`finalize_backward`, not at the end of each pass. On the root, between passes."""
        state = self._root_state("set_manual_backward_finalization must be called on the root FSDP module")
        if enabled != state.finalizes_manually and (state.context.in_backward or state.context.awaits_finalize):
            raise RuntimeError("set_manual_backward_finalization cannot change mode after backward starts")
        state.finalizes_manually = enabled

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Reduce the gradients that are not reduced yet, set ``.grad`` and reshard.

        If several backward passes run before this call, disable gradient sync for them, and enable it before this call. If
        this call raises, the next forward drops the gradients. With ``async_op`` it only issues the reductions, and ``wait()``
        of the handle that it returns does the rest. It raises a RuntimeError on another module than the root, or if an earlier
        handle was not waited for.
        """
        state = self._root_state("finalize_backward must be called on the root FSDP module")
        handle = GradientReductionHandle(state.context)
        if async_op:
            return handle
        handle.wait()
        return None

    def synchronize_gradients(self) -> None:
        """Reduce the gradients of backward passes without gradient sync, set ``.grad`` and reshard. Call it on every rank.

        It is for loops that do not know in advance which micro-batch is the last: :class:`FSDPGrad` has an example. Bits and
        collectives are those of a backward with gradient sync. Settings stay as they are. A RuntimeError if this is not the
        root, or a forward or backward runs.
        """
        self._root_state("synchronize_gradients must be called on the root FSDP module").context.synchronize_gradients()

    def set_gradient_view(self, view: str, *, recurse: bool = True) -> None:
        """Where gradients of passes without gradient sync are shown, on all ranks alike::

            model.set_gradient_view("pending")
            model.set_requires_gradient_sync(False)
            model(micro_batch).sum().backward()
            for param, (unreduced, partial) in model.get_pending_gradients().items():
                unreduced.mul_(0.5)

        "fsdp_grad", the default: ``.grad`` is an :class:`FSDPGrad`. "pending": ``.grad`` is None or what earlier passes have
        reduced, and :meth:`get_pending_gradients` returns the rest. ``zero_grad()`` of this module or of the root drops both;
        an optimizer's ``zero_grad()`` drops what ``.grad`` has only, and ``clip_grad_norm_`` and ``GradScaler.unscale_`` change
        only this part: call :meth:`synchronize_gradients` before them. An optimizer's step before it raises in both.

        Raises:
            ValueError: the view is unknown; or it is "pending", and a parameter is placed as ``Shard(d)`` with ``d > 0``, whose
                gradient is in pieces.
            RuntimeError: gradients wait now.

        Source: both are designs of torch's FSDP that have not merged.
        """
        if view not in GRADIENT_VIEWS:
            raise ValueError(f"set_gradient_view takes {' or '.join(map(repr, GRADIENT_VIEWS))}, got {view!r}")
        groups = self._ragged_groups(recurse)
        for group in groups:
            if group.is_pending or group.view is not None:
                raise RuntimeError(f"{group.names} has gradients that wait: call synchronize_gradients() or zero_grad() first")
            for param in group.params:
                if view == "pending" and param.distribution.shard_dim:
                    raise ValueError(
                        f"{param.fqn} is placed as Shard({param.distribution.shard_dim}), so its gradient is in pieces, which "
                        '"pending" cannot show as one tensor: use "fsdp_grad", or another shard_placement_fn'
                    )
        for group in groups:
            group.settings.view = GRADIENT_VIEWS[view]

    def get_pending_gradients(self) -> dict[Any, tuple[torch.Tensor | None, torch.Tensor | None]]:
        """After ``set_gradient_view("pending")``: this rank's gradients that wait, by sharded parameter. No communication.

        Each is ``(unreduced, partial)``, plain tensors or None: this rank's sum over passes without gradient sync, of the shape
        of the unsharded parameter; and its shard of what is reduced within a replica only (HSDP,
        ``set_requires_all_reduce(False)``). Both have ``reduce_dtype``, and are the memory that is reduced later: writing to
        them changes the gradient. They are valid until the next backward, :meth:`synchronize_gradients` or :meth:`zero_grad`.
        """
        return pending_of(self._ragged_groups(recurse=True))

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients. If not, they accumulate, and ``.grad`` is an :class:`FSDPGrad` afterwards."""
        for state in self._ragged_states(recurse):
            state.requires_gradient_sync = requires_gradient_sync

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether parameters are resharded after forward. As in FSDP2, True and False both replace an integer."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"reshard_after_forward must be a bool, got {reshard_after_forward!r}")
        for state in self._ragged_states(recurse):
            state.reshard_after_forward = reshard_after_forward
            for group in state.groups:
                if isinstance(group.keeper, Neighbours):
                    group.keep(None)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether parameters are resharded after backward. If not, the next forward uses them as they are.

        If an operation or an optimizer's step changes a parameter, the next forward all-gathers again. Writes to ``.data`` or
        to a local tensor are not noticed: call :meth:`reshard` after them. As in FSDP2, True is for a step's last backward.
        """
        for state in self._ragged_states(recurse):
            state.reshard_after_backward = reshard_after_backward

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backward passes are the last before a step: ``ZERO1`` reduces only in these. Call it on the root."""
        self._get_fsdp_state().is_last_backward = is_last_backward

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients over the replicas of HSDP. If not, reduced shards accumulate in each replica."""
        for group in self._ragged_groups(recurse):
            group.settings.requires_all_reduce = requires_all_reduce

    def set_max_all_gathers_ahead(self, max_all_gathers: int) -> None:
        """How many modules' all-gathers may be issued before these modules run, each of which holds the memory of a group.

        Call it on the root, with an int of at least 0. The default is 2. FSDP1's rate limiter.
        """
        if isinstance(max_all_gathers, bool) or not isinstance(max_all_gathers, int) or max_all_gathers < 0:
            raise ValueError(f"max_all_gathers must be an int of at least 0, got {max_all_gathers!r}")
        self._get_fsdp_state().comm.max_gathers = max_all_gathers

    def set_modules_to_forward_prefetch(self, modules: list[TorchFSDPModule]) -> None:
        """In forward, issue the all-gathers of ``modules`` after this module's, instead of those of the next module."""
        self._get_fsdp_state().forward_prefetch = _states_of(modules)

    def set_modules_to_backward_prefetch(self, modules: list[TorchFSDPModule]) -> None:
        """In backward, issue the all-gathers of ``modules`` after this module's, instead of those of the module before it."""
        self._get_fsdp_state().backward_prefetch = _states_of(modules)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether backward needs this module's parameters. An embedding, for example, does not."""
        self._get_fsdp_state().unshard_in_backward = unshard_in_backward

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of gradients over all ranks by ``factor``, a positive number, instead of the number of ranks."""
        if not isinstance(factor, (int, float)) or not factor > 0:
            raise ValueError(f"the gradient divide factor must be a positive number, got {factor!r}")
        for group in self._ragged_groups(recurse=False):
            group.settings.reduction = dataclasses.replace(group.settings.reduction, divisor=factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Deprecated name of :meth:`set_gradient_divide_factor`."""
        warnings.warn("use set_gradient_divide_factor instead", FutureWarning, stacklevel=2)
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Whether to reduce with sums and to divide separately, also if the backend (NCCL) can average."""
        for group in self._ragged_groups(recurse=False):
            group.settings.reduction = dataclasses.replace(group.settings.reduction, sum_only=enable)

    def set_reduce_wire(self, dtype: torch.dtype | None, *, recurse: bool = True) -> None:
        """Send gradients in ``dtype``, such as ``torch.bfloat16``, and add them in ``reduce_dtype``. On all ranks alike.

        Half the bytes of a float32 reduce-scatter; each rank's gradient is rounded once, and sums are not. With HIERARCHICAL,
        the sum of a node is rounded, too, before it is sent to other nodes. float16 has no values above 65,504. The
        reduce-scatter is then an all-to-all and a sum in the order of ranks, over NCCL, too, with a rounded copy of the buffer
        and a receive buffer of its size. The all-reduce over replicas (HSDP) is as before, and so are collectives that
        ``set_collectives`` or a custom reduce-scatter has chosen. None: as without this call.

        Raises:
            ValueError: ``dtype`` is no floating-point dtype of two bytes, or ``reduce_dtype`` of a group is no wider one.
        """
        if dtype not in (None, torch.bfloat16, torch.float16):
            raise ValueError(f"set_reduce_wire takes torch.bfloat16, torch.float16 or None, got {dtype!r}")
        groups = [group for group in self._ragged_groups(recurse) if group.reduce_dtype.is_floating_point]
        for group in groups:
            if dtype is not None and group.reduce_dtype.itemsize <= dtype.itemsize:
                raise ValueError(
                    f"{group.names} is reduced in {group.reduce_dtype}, which {dtype} would not make smaller: give "
                    "MixedPrecisionPolicy(reduce_dtype=torch.float32)"
                )
        for group in groups:
            group.process_groups.wire = dtype

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Whether a group without gradients on this rank takes part in collectives, with zeros. The default is True.

        False (FSDP2's default) is for ranks that all leave the same modules unused: others would wait for this one forever.
        """
        for state in self._ragged_states(recurse):
            state.reduces_unused = reduce_scatter_unused_params

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """How many modules' reduce-scatters may be in flight at once. The default is 1. Each one holds a gradient buffer.

        Over gloo the next gradient buffer counts too: with 1, backward waits for a reduce-scatter before it allocates the next
        module's gradients. Anything but an int raises a TypeError, an int below 1 a ValueError.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers must be an int, got {type(max_input_buffers).__name__}")
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be a positive int, got {max_input_buffers}")
        for group in self._ragged_groups(recurse):
            group.settings.max_reductions = max_input_buffers

    def set_schedule(self, schedule: str | Schedule, *, extra_bytes: int = 0) -> None:
        """Set when all-gathers are issued, and which modules stay unsharded; "auto" finds that from the next steps. ::

            model.set_schedule("auto", extra_bytes=2 * 2**30)
            train(model, steps=10)
            print(model.get_schedule())

        "auto": of the next forwards with gradients and gradient sync, the second to the fourth are recorded, with their
        backwards. In these each collective is waited for at once, so that its time, and that of each module's computation, is
        its own. The next forward searches for the schedule with the least time, for a second or some, and sets it; the logger
        ``torch_ragged.fsdp`` has it at level INFO. Bits are the same in all of these steps. If no schedule is faster, or ranks
        or steps differ in their calls, or a module is called more than once, a log line says so, and nothing changes.

        A schedule replaces ``reshard_after_forward`` where that is a bool, but not the root's, the modules to prefetch, and the
        limits of all-gathers ahead and of reduce-scatters in flight.

        Args:
            schedule: "auto" or a :class:`Schedule`, equal on all ranks.
            extra_bytes: how far the peak of memory may be above that of the present settings, on each rank. If it is negative,
                the peak has to be so far below.

        Raises:
            ValueError: an argument is none of these, ranks pass different ones, or the schedule is of other modules.
            RuntimeError: this is not the root, or :meth:`set_persistent_buffers` was called before.

        Collectives: an all-reduce of 24 bytes per process group; after the recorded steps, two of them, and two all-gathers, of
        the recorded times and of the search's result.
        """
        self._root_state("set_schedule must be called on the root, the outermost fully_shard module")
        before = self.__dict__.get(_SCHEDULE)
        made = set_schedule(module_states(self), schedule, extra_bytes)  # type: ignore[arg-type]
        if isinstance(before, AutoSchedule):
            before.close()
        self.__dict__[_SCHEDULE] = made or schedule

    def get_schedule(self) -> Schedule | None:
        """The schedule that :meth:`set_schedule` has set; None: there is none, or "auto" has not found it yet."""
        found = self.__dict__.get(_SCHEDULE)
        return found.schedule if isinstance(found, AutoSchedule) else found

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None], *, stream: Any = None) -> None:
        """Call ``hook`` with each reduced shard of this module's gradients: a flat tensor, which the hook may change in place.

        The hook runs after the reduce-scatter (HSDP: after the all-reduce) and the division, in the current stream: a
        ``stream`` is a ValueError. The shard has the reduce dtype.
        """
        if stream is not None:
            raise ValueError("set_all_reduce_hook runs the hook in the current stream: pass no stream")
        for group in self._ragged_groups(recurse=False):
            group.settings.reduce_hook = hook

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Let the root's next forward wait for ``event``, of an optimizer step on another stream. Set one in each step."""
        self._get_fsdp_state().post_optim_event = event

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Whether reshard keeps the memory of unsharded parameters, at the same addresses, as CUDA graphs need it."""
        for group in self._ragged_groups(recurse):
            group.encoding.keeps_storage = keep

    def set_persistent_buffers(self, enable: bool = True, *, places: int = SLOTS, recurse: bool = True) -> None:
        """Whether the buffers of gathered parameters and gradients stay allocated. Groups take turns in ``places`` slots.

        Addresses then stay the same, as CUDA graphs and registered memory need it. "Buffers" in docs/hopper.md has the sizes of
        slots, and which modules have one of their own. If groups stay gathered or unreduced (gradient accumulation without
        sync, modules unsharded by hand), each of them needs a slot at the same time.

        Raises:
            ValueError: ``places`` is not an int of at least 2.
            RuntimeError: parameters are on the meta device, or have gradients that are not in ``.grad`` yet; or
                ``set_collectives`` has chosen registered memory. Later, in a step: a group needs a slot that another one uses.
        """
        if isinstance(places, bool) or not isinstance(places, int) or places < 2:
            raise ValueError(f"places must be an int of at least 2, got {places!r}")
        groups = self._ragged_groups(recurse)
        check_ready(groups)
        if any(group.has_registered_memory for group in groups):
            raise RuntimeError('set_collectives has chosen where buffers are: call set_collectives("nccl") first')
        if not enable:
            make_transient(groups)
            return
        devices = {group.device: allocator(group.device) for group in groups}
        make_persistent(self._ragged_states(recurse=True), places, {group: devices[group.device] for group in groups})

    def set_collectives(self, name: str, *, recurse: bool = True) -> tuple[str, ...]:
        """Choose the collectives over shards: "nccl" (the mesh's process group), "symm", "copy_engine", "multimem" or "auto".

        docs/hopper.md says how each of them moves data, and what it needs. All ranks call this, between steps, and before
        :func:`monitor`. If an implementation is unavailable, one log line of ``torch_ragged.fsdp`` says why, and ``nccl`` is
        used. The chosen name for each process group of shards is returned, in the order of modules. Replicas are always reduced
        by their process group.

        Collectives: an all-reduce of 24 bytes per process group to agree on the name, all-gathers of objects to agree on what
        is available, and the collectives that set up shared memory.

        Raises:
            ValueError: the name is unknown, ranks pass different names, or shards have ``weights`` and the name is not
                ``nccl`` or ``auto``. Nothing is changed.
            AssertionError: a custom collective is set.
            RuntimeError: as in :meth:`set_persistent_buffers`; or another rank raised.
        """
        groups = [group for group in self._ragged_groups(recurse) if group.dp.shard_group is not None]
        members: dict[dist.ProcessGroup, list[FSDPParamGroup]] = {}
        for group in groups:
            members.setdefault(group.dp.shard_group, []).append(group)  # type: ignore[arg-type]
        device = device_of(groups[0].dp.mesh) if groups else torch.device("cpu")
        with agreement(list(members), device, "set_collectives") as claim:
            if name not in IMPLEMENTATIONS:
                raise ValueError(f"collectives must be one of {', '.join(map(repr, IMPLEMENTATIONS))}, got {name!r}")
            _check_no_custom_collectives(groups)
            check_ready(groups)
            if name != "auto" and name != "nccl":
                _check_equal_shards(groups, f"set_collectives({name!r})")
            claim.append(f"collectives {name}")
        chosen = []
        for shards, mine in members.items():
            gathered = max(group.layout.shard_numel * group.param_dtype.itemsize for group in mine)
            reduced = max(group.layout.numel * group.reduce_dtype.itemsize for group in mine)
            traffic = Traffic(mine[0].device, [group.process_groups for group in mine], gathered, reduced)
            has_weights = any(Need.EQUAL_SHARDS in part.terms.breaks for group in mine for part in group.plan.parts)
            chosen.append(choose_implementation("nccl" if has_weights else name, shards, traffic))
        allocators = {}
        for mine, implementation in zip(members.values(), chosen):
            for group in mine:
                group.collectives = implementation.collectives(group.process_groups)
                if implementation.allocate is not None:
                    allocators[group] = implementation.allocate
        make_transient([group for group in groups if group.has_registered_memory and group not in allocators])
        make_persistent(self._ragged_states(recurse=True), SLOTS, allocators)
        for group in groups:
            group.has_registered_memory = group in allocators
        return tuple(implementation.name for implementation in chosen)

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Whether reduce-scatters use a second process group, so that these do not wait for all-gathers. On all ranks."""
        for group in self._ragged_groups(recurse):
            group.process_groups.separate_reductions(enable)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Whether gathered parameters and gradients are in memory of the backend's own allocator (NCCL), if it has one.

        As in FSDP2, it raises an AssertionError if a custom collective is set.
        """
        self._set_memory_pool(enable, is_symmetric=False)

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Allocate gathered parameters and gradients in symmetric memory, registered with NCCL as windows.

        A ValueError if ``backend`` is not "NCCL", a RuntimeError if the mesh has none, an AssertionError with a custom
        collective.
        """
        if backend != "NCCL":
            raise ValueError(f"set_symm_mem_for_comm supports NCCL only, got {backend!r}")
        for group in self._ragged_groups(recurse=False):
            shards = group.dp.shard_group
            if shards is not None and not is_nccl(shards, device_of(group.dp.mesh)):
                raise RuntimeError(f"set_symm_mem_for_comm needs NCCL, the mesh's backend is {dist.get_backend(shards)}")
        self._set_memory_pool(True, is_symmetric=True)

    def _set_memory_pool(self, enable: bool, is_symmetric: bool) -> None:
        groups = self._ragged_groups(recurse=False)
        _check_no_custom_collectives(groups)
        for group in groups:
            if group.is_pending:
                raise RuntimeError(f"{group.names} has gradients that are not in .grad yet: choose buffers between steps")
        for group in groups:
            found = group.process_groups.memory_pool(group.device, is_symmetric) if enable else None
            group.set_memory_pools(MemoryPool(found), MemoryPool(found))

    def set_custom_all_gather(self, comm: Any) -> None:
        """All-gather with FSDP2's ``AllGather``: ``comm(output, shard, group=, async_op=)``. ``allocate`` is not called."""
        groups = self._ragged_groups(recurse=False)
        _check_equal_shards(groups, "set_custom_all_gather")
        for group in groups:
            group.process_groups.custom_all_gather = comm

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Reduce-scatter with FSDP2's ``ReduceScatter``: ``comm(output, buffer, group=, op=, async_op=)``, no ``allocate``."""
        groups = self._ragged_groups(recurse=False)
        _check_equal_shards(groups, "set_custom_reduce_scatter")
        for group in groups:
            group.process_groups.custom_reduce_scatter = comm

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Does nothing: every all-gather here is asynchronous, as in FSDP2 with ``async_op``."""


def share_comm_ctx(modules: list[TorchFSDPModule]) -> None:
    """Let several roots (stages of a pipeline) share their limits of reduce-scatters in flight and all-gathers ahead of use."""
    states = _states_of(modules)
    for state in states:
        for each in state.context.states:
            each.join(each.context, states[0].comm)


def _states_of(modules: list[TorchFSDPModule]) -> list[FSDPState]:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"expected modules that fully_shard was called on, got {type(module).__name__}")
    return [module._get_fsdp_state() for module in modules]  # type: ignore[attr-defined]


def _check_equal_shards(groups: list[FSDPParamGroup], what: str) -> None:
    """Raise if a group has ``weights``: shards of other sizes than ``what`` can move."""
    for group in groups:
        check_pairs([part_of_collectives(what), *group.plan.parts])


def part_of_collectives(call: str) -> FeaturePart:
    return PlainPart(Terms(call, {Need.EQUAL_SHARDS: ": leave weights out"}))


def _check_no_custom_collectives(groups: list[FSDPParamGroup]) -> None:
    for group in groups:
        collectives = group.process_groups
        if collectives.custom_all_gather is not None or collectives.custom_reduce_scatter is not None:
            raise AssertionError("cannot choose memory or collectives of the process group when a custom collective is set")


def _refuse(name: str) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"torch_ragged.fsdp does not support FSDPModule.{name}()")

    method.__name__, method.__doc__ = name, "Not supported: raises NotImplementedError."
    return method


for _name in dir(TorchFSDPModule):
    if not _name.startswith("_") and _name not in vars(FSDPModule):
        setattr(FSDPModule, _name, _refuse(_name))


class _UnshardHandle(UnshardHandle):
    def __init__(self, groups: list[FSDPParamGroup]) -> None:
        self._groups = groups

    def wait(self) -> None:
        for group in self._groups:
            group.unshard()
        self._groups = []


def _wait_for_users(groups: Sequence[FSDPParamGroup]) -> None:
    """A thread may use gradients and parameters, after a backward that raised."""
    for user in dict.fromkeys(group.gradient_user for group in groups):
        if user is not None:
            user.wait()


def _reshard_before_state_dict(module: Any, prefix: str, keep_vars: bool) -> None:
    state = state_of(module)
    if state is None:
        return
    state.reshard()  # Not its groups alone: the state knows which all-gathers were issued ahead of use.
    _wait_for_users(state.groups)
    for group in state.groups:
        group.shards.check()
    if state.is_root:
        warn_of_unsharded(state.modules, state.context.groups)


def _adopt_after_load(module: Any, incompatible_keys: Any) -> None:
    """After ``load_state_dict(assign=True)``: copy the values into the parameters, which stay the same objects."""
    state = state_of(module)
    for group in state.groups if state else ():
        load_replaced(group)
