"""FSDPParamGroup: parameters that are all-gathered together, with their buffers and collectives.

It does not run or hook modules: it only changes their registered parameters. Module hooks are in ``_fsdp_state``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torch_ragged._register._spmd_types import untyped
from torch_ragged._register._torch import (
    as_plain_tensors,
    backward_id,
    dynamo_disabled_in_backward,
    fsdp2_keeps_wide_gradients,
    profiler_range,
)
from torch_ragged.fsdp.comm._collectives import Collectives, NamedCollectives, Work
from torch_ragged.fsdp.core._dbuffer import ALLOCATOR, DBuffer, MemoryPool, in_buffer_form, is_out_of_memory
from torch_ragged.fsdp.core._forward_order import Pass
from torch_ragged.fsdp.core._fsdp_param import (
    FoundParam,
    FSDPParam,
    ReadGuard,
    ShardedState,
    group_by_param,
    has_extension,
    keep_attributes,
    local_of,
)
from torch_ragged.fsdp.core._grad_buffer import GradBuffer, register_last
from torch_ragged.fsdp.core._grad_reduction import GradientState, GradientUser, GradientView, GradReduction, ReductionSettings
from torch_ragged.fsdp.core._kit import GroupPlan, Kit
from torch_ragged.fsdp.core.encodings._plain import Keeper, Phase
from torch_ragged.fsdp.layout._buffer_layout import RowsLayout

__all__ = ["FSDPCommContext", "FSDPParamGroup", "all_groups"]


# Since torch 2.15, FSDP2 does not round gradients to param_dtype. Autograd leaves them in the dtype of their computation, and
# without a reduce_dtype they are reduced in the parameters' own dtype. Results are those of the installed FSDP2.
_KEEPS_WIDE_GRADIENTS = fsdp2_keeps_wide_gradients()

SMALLEST_WRITTEN_IN_PLACE = 2**16
"""If a weight has fewer elements, detecting its matmuls in Python costs more time than one copy of its gradient."""

_sharded_version_of, _is_trained = operator.attrgetter("sharded._version"), operator.attrgetter("sharded.requires_grad")
all_groups: weakref.WeakSet[FSDPParamGroup] = weakref.WeakSet()


@dataclasses.dataclass(eq=False)
class FSDPCommContext:
    """Limits for all groups under a root, or under several roots (``share_comm_ctx``).

    It issues no collective and waits for none: it says whether one may be issued, and which ones have to end before.

    Attributes:
        max_gathers: how many modules' all-gathers may be issued ahead of use.
        gathers: how many are now. Equal on all ranks: garbage collection does not change it.
        reducing: the reduce-scatters in flight, the oldest first. An entry has the groups of one module.
    """

    max_gathers: int = 2
    gathers: int = 0
    reducing: list[Sequence[FSDPParamGroup]] = dataclasses.field(default_factory=list)

    def beyond(self, max_reductions: int) -> list[FSDPParamGroup]:
        """The groups whose reductions must end, so that fewer than ``max_reductions`` modules' are in flight.

        The oldest first: collectives end in the order of issue.
        """
        excess = len(self.reducing) - max_reductions + 1
        return list(itertools.chain.from_iterable(self.reducing[: max(0, excess)]))

    def forget(self, groups: Sequence[FSDPParamGroup]) -> None:
        """Their reductions have ended or were dropped, and those of the same modules."""
        if self.reducing:  # Mostly one entry, and all groups under a root.
            self.reducing = list(filter(set(groups).isdisjoint, self.reducing))


class Root(Protocol):
    """What a group asks of its root."""

    def start_backward(self, takes_part: bool = False) -> Pass:
        """A pass has begun, if it is not known. If ``takes_part``, it has reached the last forward."""

    def drop_raised_backward(self) -> None:
        """If the last pass raised, drop its gradients."""


class FSDPParamGroup:
    """Buffers and collectives of one group. From :meth:`register` on, its parameters are registered in the modules.

    ::

        shards      Shards, original dtype            the registered DTensor parameters are views of them
           | all-gather (reads them in place; a cast or a copy from the CPU goes straight into the slot)
        encoding    Encoding, param_dtype             the gathered buffer; forward and backward compute with views of it
           | backward
        grad_buffer GradBuffer                        matmuls and hooks of autograd write gradients into it
           | reduce-scatter
        reduction   GradReduction                     sets ``.grad`` of the sharded parameters

    Parameters on the meta device have buffers there until :mod:`_param_swap` materializes them.

    Args:
        plan: the parameters, their layout and dtypes.
        kit: what the group is made of. The group chooses nothing.

    Attributes:
        named: the collectives, with errors that name this group.
        keeper: keeps gathered parameters after reshard; None: nothing stays gathered.
        memory: the log of this group's memory, for monitors and memory reports.
        process_groups: the collectives of the mesh's process groups, also if :attr:`collectives` are others.
        offloads_params: whether shards and ``.grad`` are on the CPU, where the optimizer runs.
        settings: what the user has set of reductions.
        view: what ``.grad`` shows of gradients that wait for a later reduction; None: there are none.
        pools: make the memory of unsharded parameters and of gradients.
        gradient_user: uses reduced gradients within backward; None: they are in ``.grad`` at its end.
        names: the first parameter's name, and the number of the others: for errors.
        sharded: the buffer of the shards.
        fqn: the name of the group's module; empty before the root's first forward.
        is_hidden: whether the parameters are temporarily deregistered from their modules.
        has_registered_memory: whether the buffers lie in memory that the collectives have registered.
        needs_reduction: whether backward has reached the group since the last reduction, on any rank. Equal on all ranks after
            pre-backward, which sets it and runs on all ranks.
        may_hold_sum: whether gradients may have accumulated since the last reduction, on any rank. Equal on all ranks: they
            set it in the forward or pre-backward of the same calls, also if their own backward raises.
        has_hooks: whether the user has hooks on ``.grad``. They run when the next module's gradients are reduced. Equal on all
            ranks: :meth:`find_hooks` alone writes it, and ranks compare it in each forward of the root.
        is_unhooked: whether backward may reach the group without a pre-backward: a forward has used it, and may have kept a
            tensor from inside of the module, or returned a parameter. Equal on all ranks.
    """

    has_shards = True
    """Whether this rank is in the mesh."""

    def __init__(self, plan: GroupPlan, kit: Kit) -> None:
        # Without the user's parameters, so that their memory is freed when ``fully_shard`` returns.
        self.dp, self.layout, self.plan = plan.dp, plan.layout, dataclasses.replace(plan, params=())
        self.rank = plan.dp.rank
        self.shards, self.encoding, self.memory = kit.shards, kit.encoding, kit.memory
        self.offloads_params, self._pins_memory = kit.offloads_params, kit.pins_memory
        self.keeper: Keeper | None = None
        self.keep(kit.keeper)
        self.gradient_user: GradientUser | None = None
        self.process_groups = kit.collectives
        self.settings = ReductionSettings()
        self.view: GradientView | None = None
        self.fqn, self.comm = "", FSDPCommContext()
        self._root: Callable[[], Root | None] | None = None
        self._sharded_state = ShardedState.SHARDED
        self.is_hidden = False
        self.has_registered_memory = False
        self.needs_reduction = self.may_hold_sum = self.is_unhooked = self.has_hooks = False
        self._pass: Pass | None = None  # The last pass whose pre-backward has reached the group, on any rank.
        self._reached_in = -1  # Autograd's number of that pass.
        self.pools: tuple[MemoryPool, MemoryPool] = (ALLOCATOR, ALLOCATOR)
        self._all_gather: Work | None = None  # In flight, in the state GATHERING.
        self._gathered_versions: list[int] = []
        first = plan.params[0].value
        # Shards are before parameters, whose DTensors are views of them, and gradients before unsharded parameters, whose
        # matmuls write there.
        self._allocate(local_of(first).device, first.dtype)
        self.params = [self._init_param(index, found) for index, found in enumerate(plan.params)]
        # Whether gradients have other forms in the buffer than autograd gives them. Mostly not: then none is looked at.
        are_cut = any([(of := param.distribution).is_dtensor or of.reading or of.shard_dim for param in self.params])
        self._has_forms = are_cut or isinstance(plan.layout, RowsLayout)
        self.guard = ReadGuard(self.params)
        self.shards.params = self.params
        groups = plan.dp.shard_group, plan.dp.replicate_group
        others = len(self.params) - 1
        self.names = f"{self.params[0].fqn}{f' and {others} more' if others else ''}"
        self.named = NamedCollectives(self.process_groups, plan.dp.mesh, *groups, self.names, self.layout)
        self._init_gradients()
        self._init_unsharded_params()
        self.shards.release()
        all_groups.add(self)
        group_by_param.update((id(param), self) for param in self.params)

    # -- construction ----------------------------------------------------------------------------------------------

    def _allocate(self, device: torch.device, dtype: torch.dtype) -> None:
        """Allocate buffers for parameters of ``dtype``, for a computation on ``device``."""
        self.device, self.orig_dtype = device, dtype
        # Integers do not train. They keep their dtype, and so do complex numbers.
        self.param_dtype = (dtype.is_floating_point and self.plan.param_dtype) or dtype
        default = dtype if _KEEPS_WIDE_GRADIENTS else self.param_dtype
        self.reduce_dtype = self.plan.reduce_dtype or default
        # With offload, shards and ``.grad`` are on the CPU, where the optimizer runs. The computation is not.
        offloads = self.offloads_params and device.type != "meta"
        home = torch.device("cpu") if offloads else device
        is_pinned = offloads and device.type != "cpu" and self._pins_memory
        self.shards.allocate(dtype, home, is_pinned)
        self.sharded = self.shards.buffer
        self.encoding.make_buffers(self.param_dtype, device, self.pools[0], self.memory.gathered)

    def _init_gradients(self) -> None:
        """Make the gradient buffer and its reduction. All gradients of earlier ones are in ``.grad``, or are dropped."""
        self.needs_reduction = False
        dtypes, pool = (self.param_dtype, self.reduce_dtype), self.pools[1]
        self.grad_buffer = GradBuffer(self.params, self.layout, self.rank, self.device, *dtypes, pool, self.memory.gradients)
        how = self.named, self.dp, self.settings
        self.reduction = GradReduction(self.grad_buffer, self.sharded, *how, self.memory.reduced)

    def _init_param(self, index: int, found: FoundParam) -> FSDPParam:
        """Store this rank's shard of a parameter, and make the DTensor to register."""
        self.shards.store(index, found.distribution, found.value)
        sharded = nn.Parameter(self.shards.dtensor(index, found.distribution), requires_grad=found.value.requires_grad)
        keep_attributes(found.value, sharded)
        return FSDPParam(found.fqn, found.registered_names, found.distribution, sharded, requires_grad=sharded.requires_grad)

    def _init_unsharded_params(self) -> None:
        """Make new unsharded parameters as views of the encoding's memory, and free that memory."""
        for index, param in enumerate(self.params):
            param.view = self.encoding.compute_tensor(index)
            if self.encoding.makes_params:  # A placeholder: the tensor type makes the parameter after the first all-gather.
                param.unsharded = nn.Parameter(param.view, requires_grad=param.requires_grad)
            else:
                self._init_unsharded_param(index, param, param.distribution.gathered(param.view))
        self.encoding.free(keeps_buffer=False)

    def _init_unsharded_param(self, index: int, param: FSDPParam, value: torch.Tensor) -> None:
        """Make an unsharded parameter of ``value``. Its gradients go to the gradient buffer."""
        has_gradients = self.param_dtype.is_floating_point or self.param_dtype.is_complex
        # Not of small ones: their copy into the gradient buffer costs less than to notice their matmuls.
        makes, made = self.plan.compute_parameter, None
        if makes is not None and value.numel() >= SMALLEST_WRITTEN_IN_PLACE:
            made = makes(self, index, value)
        param.unsharded = nn.Parameter(value, requires_grad=has_gradients) if made is None else made
        if has_gradients:  # torch refuses hooks on tensors without gradients.
            keeps_wide = _KEEPS_WIDE_GRADIENTS and self.reduce_dtype.itemsize > self.param_dtype.itemsize
            if keeps_wide and not self.encoding.makes_params:
                param.unsharded.grad_dtype = None  # The copy into the gradient buffer casts.
                param.may_be_wide = getattr(param.unsharded, "may_be_wide", True)
            # Autograd's hooks are invisible to the garbage collector, so this one must not hold the group.
            register_last(param.unsharded, functools.partial(_take, weakref.ref(self), index))
        param.unsharded.requires_grad_(param.requires_grad)
        if param.distribution.reading is not None:
            param.distribution.reading.mark(param.unsharded)

    def check_awake(self) -> None:
        """Raise if this rank holds no shards of the group, as one outside of the mesh. This one does."""

    def check_forward(self) -> None:
        """Raise if a forward cannot use the group.

        Raises:
            ValueError: a parameter's local tensor got its own all-gather (``fsdp_pre_all_gather``) after ``fully_shard``: it
                would never be called.
        """
        late = [param.fqn for param in self.params if has_extension(param.sharded)]
        if late and not self.shards.are_typed:
            raise ValueError(
                f"the local tensor of {', '.join(late)} got fsdp_pre_all_gather after fully_shard, which has placed the "
                "parameter in a buffer already: give the parameter a tensor type with this method before fully_shard"
            )

    @property
    def collectives(self) -> Collectives:
        """The collectives that all-gather parameters and reduce gradients."""
        return self.named.inner

    @collectives.setter
    def collectives(self, collectives: Collectives) -> None:
        self.named.inner = collectives

    def join(
        self,
        fqn: str,
        comm: FSDPCommContext,
        root: Callable[[], Root | None] | None = None,
        before_collective: Callable[[], None] | None = None,
    ) -> None:
        """The group has another root.

        Args:
            fqn: the name of the group's module under it.
            comm: the limits on communication.
            root: returns the root. A weak reference: a module that outlives its model must not keep the other modules alive.
            before_collective: is called before each all-gather.
        """
        self.fqn, self.comm, self._root = fqn, comm, root
        self.named.join(fqn, before_collective)

    def keep(self, keeper: Keeper | None) -> None:
        """From now on, ``keeper`` keeps gathered parameters. What an earlier one keeps is dropped."""
        if self.keeper is not None:
            self.keeper.drop()
        # Whether the keeper keeps the gathered buffer itself.
        self.keeper, self._keeps_buffer = keeper, keeper is not None and keeper.keeps_buffer

    @property
    def home(self) -> str:
        """The type of the device that sharded parameters are on, once they are not on the meta device."""
        return "cpu" if self.offloads_params else self.dp.mesh.device_type

    @property
    def is_meta(self) -> bool:
        """Whether the parameters have no memory yet."""
        return self.device.type == "meta" and not self.plan.runs_on_meta

    @property
    def is_trainable(self) -> bool:
        return any(map(_is_trained, self.params))

    def buffers(self) -> dict[str, list[DBuffer]]:
        """The buffers of this group by their contents, also freed ones. ``.grad`` is not in them."""
        return {
            "sharded": [self.sharded],
            "gathered": self.encoding.buffers(),
            "gradients": self.grad_buffer.buffers(),
            "reduced": self.reduction.buffers(),
        }

    # -- unshard and reshard ---------------------------------------------------------------------------------------

    @property
    def is_unsharded(self) -> bool:
        """Whether the unsharded parameters are registered."""
        return self._sharded_state is ShardedState.UNSHARDED

    @property
    def is_gathered(self) -> bool:
        """Whether the parameters are unsharded, or their all-gather is in flight."""
        return self._sharded_state is not ShardedState.SHARDED

    @untyped
    def unshard(self, wait: bool = True, phase: Phase = Phase.BOTH) -> None:
        """Issue the all-gather for ``phase``, unless it was issued. If ``wait``, wait, and register the unsharded parameters.

        Raises:
            RuntimeError: the parameters are on the meta device.
        """
        encoding = self.encoding
        if encoding.has_phases and self.is_gathered and encoding.lacks(phase):
            self.unshard(phase=encoding.phase)
            encoding.add(phase, self.shards, self.named)
        encoding.phase = phase
        if self._sharded_state is ShardedState.UNSHARDED:
            return
        if self.is_meta:
            missing = [param.fqn for param in self.params if param.registered is None or param.registered.is_meta]
            advice = "with to_empty(device=...) and init, or load_state_dict(..., assign=True)"
            if type(self.sharded.flat) is not torch.Tensor:  # Of deferred_init: to_empty() would lose what it has recorded.
                advice = "with materialize(model)"
            raise RuntimeError(f"{', '.join(missing)} on the meta device: materialize all parameters before forward, {advice}")
        try:
            if self._sharded_state is ShardedState.SHARDED:
                # Before the shards are read: a later write makes the group outdated, also while the all-gather is in flight.
                self._gathered_versions = list(map(_sharded_version_of, self.params))
                # All ranks issue it: states call this in an order that ranks have in common.
                with profiler_range("all_gather", self.fqn):
                    self.shards.prepare()
                    if self.keeper is None:
                        self._all_gather = encoding.all_gather(self.shards, self.named)
                    else:
                        self._all_gather = self.keeper.all_gather(self.shards, encoding, self._gathered_versions, self.named)
                self._sharded_state = ShardedState.GATHERING
            if not wait:
                return
            work, self._all_gather = self._all_gather, None
            assert work is not None
            work.wait()
            made = encoding.decode(self.shards, self._keeps_buffer)
            # The first time, a tensor type has made the parameters.
            if made is not None:
                with torch.inference_mode(False):  # Later forwards train them.
                    for index, (param, value) in enumerate(zip(self.params, made)):
                        self._init_unsharded_param(index, param, param.distribution.gathered(value))
        except BaseException as error:
            self._return_to_sharded()
            if is_out_of_memory(error):
                others = [group for group in all_groups if group.is_gathered]
                held = sum(each.nbytes for group in others for each in group.encoding.buffers())
                text = (
                    f"No memory for the all-gather of {self.names} of the module {self.fqn or 'root'}, beside {held:,} bytes "
                    "of the unsharded parameters of other modules. Call fully_shard on smaller modules, or let modules reshard "
                    "after forward; memory_report(model) of torch_ragged.fsdp shows the memory of a step"
                )
                raise type(error)(f"{error}\n{text}") from error
            raise
        if self.keeper is not None:
            self.keeper.drop()  # The all-gather has read it.
        self._sharded_state = ShardedState.UNSHARDED
        with as_plain_tensors():
            self.guard.allow_reads()
        # Registered last: if anything above raises, the modules still have the sharded parameters.
        self.register(unsharded=True)

    def _return_to_sharded(self) -> None:
        """An all-gather has failed: all ranks can issue it again."""
        self._all_gather = None
        # Other ranks may have issued it: they find out when they wait.
        self._sharded_state = ShardedState.SHARDED
        self.invalidate_kept()
        self.encoding.free(self._keeps_buffer)

    def expire_resident(self) -> None:
        """An iteration starts: invalidate resident parameters.

        ``dcp.load`` and writes to ``.data`` or local tensors change no version counter, and may happen on one rank only. So all
        ranks all-gather again.
        """
        if not self.is_gathered:
            self.invalidate_kept()

    def invalidate_kept(self) -> None:
        """Parameters that stay gathered may be out of date: the next all-gather starts from the shards."""
        if self.keeper is not None:
            self.keeper.invalidate()

    @property
    def is_outdated(self) -> bool:
        """Whether an operation has changed a sharded parameter since its all-gather. Equal on all ranks, as operations are."""
        return self.is_gathered and self._gathered_versions != list(map(_sharded_version_of, self.params))

    @untyped
    def reshard(self, keep: bool = False) -> None:
        """Free the unsharded parameters and register the sharded ones.

        Args:
            keep: whether the keeper may keep a part of the gathered buffer for backward.

        Raises:
            RuntimeError: a parameter was written to or replaced while it was unsharded. That change is lost.
        """
        before = self._sharded_state
        # First: if the wait below raises, the group is sharded, too, and the next unshard issues a new all-gather.
        self._sharded_state = ShardedState.SHARDED
        # An all-gather in flight writes to the buffer that is freed below.
        if self._all_gather is not None:
            try:
                work, self._all_gather = self._all_gather, None
                work.wait()
            except BaseException:
                self._return_to_sharded()
                raise
        if self.keeper is not None:
            self.keeper.drop()
            if keep and before is ShardedState.UNSHARDED:
                self.keeper.keep(self.encoding)
        if before is not ShardedState.UNSHARDED:  # The sharded parameters are registered.
            if before is ShardedState.GATHERING:
                self.encoding.free(self._keeps_buffer)
            return
        changed, is_addressed = [], not self.encoding.makes_params
        with as_plain_tensors():
            # Before the storage is freed, because addresses in it are compared.
            for index, param in enumerate(self.params):
                unsharded, view, is_intact = param.unsharded, param.view, True
                if is_addressed:  # Tensor types may have their memory anywhere.
                    # Only a DTensor needs local_of(), which makes a new tensor of any other one.
                    local = local_of(unsharded) if isinstance(unsharded, DTensor) else unsharded
                    is_intact = local.dtype == view.dtype and local.data_ptr() == view.data_ptr()
                if not is_intact:
                    param.view = view = self.encoding.compute_tensor(index)
                    # Of a plan's DTensor, too.
                    torch.Tensor.data.__set__(unsharded, param.distribution.gathered(view))  # type: ignore[attr-defined]
                module, name = param.registered_names[0]
                is_changed = not is_intact or module._parameters.get(name) is not unsharded
                if not is_changed and unsharded._version + view._version != param.version:
                    # An embedding with max_norm writes to its own weight in every forward.
                    is_changed = all(getattr(owner, "max_norm", None) is None for owner, _ in param.registered_names)
                if is_changed:
                    changed.append(param.fqn)
            self.guard.refuse_reads()
        self.encoding.free(self._keeps_buffer)
        self.register()
        # Raised at the end, so that the group is sharded and can be used again.
        if changed:
            raise RuntimeError(
                f"{', '.join(changed)} changed while unsharded by fully_shard (written to in place, converted or replaced); "
                "the change is lost. Change parameters while they are sharded: after backward, or after reshard()"
            )

    def set_memory_pools(self, gathered: MemoryPool, gradients: MemoryPool) -> None:
        """From now on, allocate unsharded parameters and gradients from these pools. All gradients must be in ``.grad``."""
        self.reshard()
        self.invalidate_kept()
        self.encoding.free_replaced()
        # Addresses change, so all that is a view of the old memory is made anew.
        self.pools = gathered, gradients
        self.encoding.make_buffers(self.param_dtype, self.device, gathered, self.memory.gathered)
        self._init_gradients()
        self._init_unsharded_params()

    @property
    def kept_nbytes(self) -> int:
        """Bytes of gathered parameters outside of the buffers."""
        return self.encoding.nbytes_beside + (0 if self.keeper is None else self.keeper.nbytes)

    # -- backward --------------------------------------------------------------------------------------------------

    @property
    def is_pending(self) -> bool:
        """Whether there are gradients that are not in ``.grad`` yet."""
        return self.reduction.state is not GradientState.EMPTY

    @property
    def is_unsynchronized(self) -> bool:
        """Between passes: whether gradients wait for a later reduction. Equal on all ranks."""
        return self.needs_reduction or self.reduction.kept is not None

    @property
    def was_reached(self) -> bool:
        """Whether pre-backward of the current pass has reached the group, on any rank."""
        return self._pass is not None and not self._pass.is_over

    def show_waiting(self) -> None:
        """A pass is over: show the gradients that wait for a later reduction in ``.grad``, if there are any."""
        # On all ranks or on none, also of parameters that this rank has not used: reading one of them is a collective.
        if self.is_unsynchronized and self.view is None and self.settings.view is not None:
            self.view = self.settings.view(self.reduction, self.needs_reduction)

    def take_back(self) -> None:
        """Gradients may change next: ``.grad`` has what is reduced again."""
        # Mostly None: a step without accumulation asks nothing more here.
        view, self.view = self.view, None
        if view is not None:
            view.take_back()

    def expect_gradients(self, current: Pass, accumulates: bool = False) -> None:
        """Backward has reached the group, on this rank or on another one: all ranks will reduce, or accumulate."""
        self.take_back()
        # What ranks do next depends on this, not on gradients: one of them may get none.
        self._pass, self._reached_in = current, backward_id()
        self.needs_reduction |= self.is_trainable
        self.may_hold_sum |= accumulates

    def before_gradient(self) -> None:
        """A gradient is about to be written: drop those of a pass that raised, and let nothing read the gradient buffer."""
        if self._reached_in != backward_id():  # Mostly, pre-backward has started this pass.
            self.take_back()
            root = None if self._root is None else self._root()
            if self.was_reached or self.is_unhooked:
                if root is None:
                    raise RuntimeError(
                        "the root of this fully_shard module was deleted: run the module's forward before backward"
                    )
                root.start_backward(takes_part=not self.was_reached)
            elif root is not None:
                root.drop_raised_backward()
        # A reduce-scatter in flight still reads the buffer. Ranks may wait at different times: waiting issues no collective.
        if self.reduction.in_flight is not None:
            self.reduction.wait()

    def make_room(self) -> None:
        """A buffer of gradients is allocated next: other groups' reductions end first, so that their memory is free."""
        # They are waited for if they hold a second buffer, as over gloo: on a GPU, waiting would block the stream and save no
        # memory. They are not finished, as that issues HSDP's all-reduce: all ranks must issue it at the same moment, and they
        # allocate at different ones.
        for group in self.comm.beyond(self.settings.max_reductions):
            if group.named.inner.reduce_scatter_traits(group.device).holds_second_buffer:
                group.reduction.wait()

    def add_gradient(self, index: int, gradient: torch.Tensor, is_assigned: bool = False) -> None:
        """Add the gradient of an unsharded parameter to the gradient buffer; see :meth:`collect_assigned`."""
        if is_assigned:
            # It starts no pass: finalize_backward() collects outside of backward, where autograd takes no callback.
            self.reduction.wait()
        else:
            self.before_gradient()
        buffer, param = self.grad_buffer, self.params[index]
        with as_plain_tensors():
            param.sync_requires_grad()
        # Frozen by the user since forward. The reduction takes zeros for it on this rank, as for any parameter without a
        # gradient.
        if not param.requires_grad:
            return
        # A second backward may read a gradient with a graph again, so that one is copied, never borrowed. create_graph=True: as
        # with FSDP2, ``.grad`` itself has no graph.
        if has_graph := gradient.requires_grad:
            gradient = gradient.detach()
        if self._has_forms:
            # If the model has distributed the parameter, this may issue a collective on the model's mesh dimensions.
            gradient, param.pending = param.distribution.gradient(gradient, param.pending)
            gradient = in_buffer_form(gradient, self.layout, index)
        if has_graph or not (buffer.may_borrow and buffer.borrow(gradient)):
            if not buffer.is_open:
                self.make_room()
            buffer.add(index, gradient)
        # Reduced in this pass. But a parameter that was unsharded by hand may be used outside of forward, on this rank alone:
        # then no rank expects its gradient, which waits for the next pass that reaches the group, as in FSDP2.
        self.needs_reduction = self.needs_reduction or self.was_reached or self.is_unhooked

    def collect_assigned(self) -> None:
        """Collect gradients that a program has assigned to ``.grad`` of unsharded parameters.

        No hook runs for them. Pipeline schedules that split backward in two (zero bubble) compute them by
        ``torch.autograd.grad`` and assign them.
        """
        assigned = []
        with as_plain_tensors():
            for index, param in enumerate(self.params):
                if param.unsharded.grad is not None:  # Mostly None: _take() has moved it.
                    assigned.append((index, param.unsharded.grad))
                    param.unsharded.grad = None
        for index, gradient in assigned:
            self.add_gradient(index, gradient, is_assigned=True)

    def accumulate_gradients(self) -> None:
        """End of a backward pass that reduces nothing: gradients accumulate in ``reduce_dtype``, as many narrow sums round."""
        self.may_hold_sum = True
        if self.reduction.state is not GradientState.REDUCING:  # There is no new gradient since then.
            self.make_room()
            # Sums over passes are in the dtype of sums over ranks: many additions in a narrow one would lose bits.
            self.grad_buffer.widen()

    def reduce_gradients(self) -> None:
        """Issue one reduce-scatter of the gradients. A parameter without a gradient on this rank contributes zeros."""
        with profiler_range("reduce_scatter", self.fqn):
            self.needs_reduction = False
            # An earlier reduction of this group: results are added in the order of the reductions.
            self.reduction.finish()
            self.take_back()
            # Equal on all ranks: if gradients may have accumulated, or if parameters stay gathered, so that ranks may have run
            # different numbers of passes since the last reduction, all ranks send the wide dtype.
            self.reduction.start(is_one_pass=not self.may_hold_sum and self.keeper is None)
            self.may_hold_sum = False

    def drop_gradients(self) -> bool:
        """Drop the gradients that are not in ``.grad`` yet; return whether there were any."""
        if self.gradient_user is not None:
            self.gradient_user.drop(self)
        # First, as waits below may raise: the group must not reduce what it has dropped.
        self.needs_reduction, self._pass = False, None
        self.take_back()
        return self.reduction.drop()

    # -- sharded parameters ----------------------------------------------------------------------------------------

    def find_hooks(self) -> None:
        """A forward of the root begins: look whether the user has hooks on gradients of sharded parameters."""
        found = False
        for param in self.params:
            sharded: Any = param.sharded
            found |= bool(sharded._backward_hooks or sharded._post_accumulate_grad_hooks)
        self.has_hooks = found

    def replaced(self) -> list[int]:
        """The parameters that the user has replaced, or given other memory, since the last forward."""
        found, is_meta = [], self.is_meta
        for index, param in enumerate(self.params) if self.has_shards else ():
            module, name = param.registered_names[0]
            now: Any = module._parameters.get(name)
            if is_meta:
                is_in_place = now is None or now.is_meta
            else:
                is_in_place = now is param.sharded and self.shards.holds(getattr(now, "_local_tensor", now))
            if not is_in_place:
                found.append(index)
        return found

    def register(self, unsharded: bool = False) -> None:
        """Make the sharded DTensors the modules' parameters, or the unsharded parameters."""
        with as_plain_tensors():
            for param in self.params:
                before = param.requires_grad  # Mostly, it has not changed.
                if param.sharded.requires_grad is not before or param.unsharded.requires_grad is not before:
                    param.sync_requires_grad()
                value = param.unsharded if unsharded else param.sharded
                if unsharded:
                    param.version = value._version + param.view._version
                for module, name in param.registered_names:
                    # Into the dict: nn.Module.__setattr__ looks through its hooks, buffers and submodules, and this runs twice
                    # in each forward and backward.
                    if type(module).__setattr__ is nn.Module.__setattr__:
                        module._parameters[name] = value
                    else:  # Such a module may keep its own references.
                        setattr(module, name, value)

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """Deregister this group's parameters from the modules during the block."""
        # None keeps the name's position in the module's order of parameters.
        for module, name in [pair for param in self.params for pair in param.registered_names]:
            module._parameters[name] = None
        self.is_hidden = True
        try:
            yield
        finally:
            self.is_hidden = False
            self.register()

    def rebuild(self, device: torch.device, dtype: torch.dtype, values: list[torch.Tensor] | None) -> None:
        """Make new buffers, and copy ``values`` into them, the local tensor of each parameter."""
        self.encoding.free_replaced()
        # The old buffers are free: both together may not fit.
        self._allocate(device, dtype)
        if self.keeper is not None:
            self.keeper.reset()
        self._init_gradients()
        for index, value in enumerate(values or ()):
            self.shards.load(index, value)
        self._init_unsharded_params()
        self.shards.release()


# -- autograd's hooks --------------------------------------------------------------------------------------------------


@dynamo_disabled_in_backward
def _take(reference: weakref.ref[FSDPParamGroup], index: int, unsharded: torch.Tensor) -> None:
    """Copy a gradient that autograd has accumulated into the gradient buffer, and free autograd's tensor."""
    # At most one large gradient exists outside of the buffer. If there is none, a matmul has written it into the buffer. It is
    # out of ``.grad`` first, because starting a pass may drop old gradients.
    with as_plain_tensors():
        gradient, unsharded.grad = unsharded.grad, None
    if gradient is not None:
        group = reference()
        assert group is not None
        group.add_gradient(index, gradient)
