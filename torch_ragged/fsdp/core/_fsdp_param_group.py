"""FSDPParamGroup: parameters that are all-gathered together, with their buffers and collectives.

It does not run or hook modules: it only changes their registered parameters. Module hooks are in ``_fsdp_state``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

from torch_ragged._register._torch import as_plain_tensors, fsdp2_keeps_wide_gradients, profiler_range
from torch_ragged.fsdp.comm._collectives import Collectives, ProcessGroupCollectives, Work
from torch_ragged.fsdp.comm._named import NamedCollectives
from torch_ragged.fsdp.core._dbuffer import DBuffer, MemoryPool
from torch_ragged.fsdp.core._distribution import has_extension, local_of
from torch_ragged.fsdp.core._encoding import Encoding
from torch_ragged.fsdp.core._fsdp_param import FSDPParam
from torch_ragged.fsdp.core._gradients import GradientBuffers
from torch_ragged.fsdp.core._group_plan import FoundParam, GroupPlan
from torch_ragged.fsdp.core._group_state import ShardedState, moved
from torch_ragged.fsdp.core._keeper import Keeper
from torch_ragged.fsdp.core._memory_log import GroupMemory
from torch_ragged.fsdp.core._shards import Shards
from torch_ragged.fsdp.core._spmd_types import attributes_of, untyped
from torch_ragged.fsdp.core._weight_gradient import ComputeParameter, allows_split_backward

__all__ = ["FSDPParamGroup", "all_groups"]

# Since torch 2.15, FSDP2 does not round gradients to param_dtype. Autograd leaves them in the dtype of their computation, and
# without a reduce_dtype they are reduced in the parameters' own dtype. Results are those of the installed FSDP2.
_KEEPS_WIDE_GRADIENTS = fsdp2_keeps_wide_gradients()

SMALLEST_WRITTEN_IN_PLACE = 2**16
"""If a weight has fewer elements, detecting its matmuls in Python costs more time than one copy of its gradient."""


all_groups: weakref.WeakSet[FSDPParamGroup] = weakref.WeakSet()


class FSDPParamGroup:
    """Buffers and collectives of one group. From :meth:`register_sharded` on, its parameters are registered in the modules.

    ::

        shards      Shards, original dtype            the registered DTensor parameters are views of them
           | all-gather (reads them in place; a cast or a copy from the CPU goes straight into the slot)
        encoding    Encoding, param_dtype             the gathered buffer; forward and backward compute with views of it
           | backward
        gradients   GradientBuffers                   reduced to ``.grad`` of the sharded parameters

    Parameters on the meta device have buffers there until :meth:`convert` or :meth:`load_replaced` materializes them.

    Args:
        plan: the parameters, their layout and dtypes. ``plan.params`` is empty after ``fully_shard``.
        shards: where the sharded parameters lie.
        encoding: what the all-gather sends, and where the unsharded parameters lie.

    Attributes:
        named: the collectives, with errors that name this group.
        keeper: what stays gathered after reshard. Nothing, unless ``fully_shard`` sets another keeper.
        memory: the log of this group's memory, for monitors and memory reports.
        fqn: the name of the group's module; empty before the root's first forward.
        is_hidden: whether the parameters are temporarily deregistered from their modules.
        has_registered_memory: whether the buffers lie in memory that the collectives have registered.
    """

    def __init__(self, plan: GroupPlan, shards: Shards, encoding: Encoding) -> None:
        self.dp, self.layout, self.plan = plan.dp, plan.layout, plan
        self.rank = plan.dp.rank
        self.shards, self.encoding, self.keeper, self.memory = shards, encoding, Keeper(), GroupMemory()
        self.process_groups = ProcessGroupCollectives(plan.dp.shard_group, plan.dp.replicate_group)
        self.fqn = ""
        self._sharded_state = ShardedState.SHARDED
        self.is_hidden = False
        self.has_registered_memory = False
        self._pool: MemoryPool | None = None  # Where unsharded parameters are allocated.
        self._all_gather: Work | None = None  # In flight, in the state GATHERING.
        self._gathered_versions: list[int] = []
        first = plan.params[0].value
        self._allocate(local_of(first).device, first.dtype)
        self.params = [self._init_param(index, found) for index, found in enumerate(plan.params)]
        self.shards.params = self.params
        # Before the unsharded parameters: matmuls with these write into the gradient buffer.
        self.gradients = GradientBuffers(self.params, self.layout, self.rank, plan.dp.has_replicas, self.memory)
        self.gradients.place(self.device, self.param_dtype, self.reduce_dtype, self.sharded)
        groups = plan.dp.shard_group, plan.dp.replicate_group
        self.named = NamedCollectives(self.process_groups, plan.dp.mesh, *groups, self.names, self.layout)
        self.gradients.collectives = self.named
        self._init_unsharded_params()
        all_groups.add(self)

    # -- construction ----------------------------------------------------------------------------------------------

    def _allocate(self, device: torch.device, dtype: torch.dtype) -> None:
        """Allocate buffers for parameters of ``dtype``, for a computation on ``device``."""
        self.device, self.orig_dtype = device, dtype
        self.param_dtype = (dtype.is_floating_point and self.plan.param_dtype) or dtype
        default = dtype if _KEEPS_WIDE_GRADIENTS else self.param_dtype
        self.reduce_dtype = self.plan.reduce_dtype or default
        offload = self.plan.offload if isinstance(self.plan.offload, CPUOffloadPolicy) and device.type != "meta" else None
        home = device if offload is None else torch.device("cpu")
        is_pinned = offload is not None and offload.pin_memory and device.type != "cpu"
        self.shards.allocate(dtype, home, is_pinned)
        self.encoding.make_buffers(self.param_dtype, device, self._pool, self.memory.gathered)

    def _init_param(self, index: int, found: FoundParam) -> FSDPParam:
        """Store this rank's shard of a parameter, and make the DTensor to register."""
        self.shards.store(index, found.distribution, found.value)
        sharded = nn.Parameter(self.shards.dtensor(index, found.distribution), requires_grad=found.value.requires_grad)
        vars(sharded).update(attributes_of(found.value))
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
        if self._is_written_in_place(param, value):
            param.unsharded = compute = ComputeParameter(value)
            compute.gradient_target = self.gradients.target(index)
        else:
            param.unsharded = nn.Parameter(value, requires_grad=has_gradients)
        if has_gradients:  # torch refuses hooks on tensors without gradients.
            keeps_wide = _KEEPS_WIDE_GRADIENTS and self.reduce_dtype.itemsize > self.param_dtype.itemsize
            if keeps_wide and not self.encoding.makes_params:
                param.unsharded.grad_dtype = None  # The copy into the gradient buffer casts.
                param.may_be_wide = not isinstance(param.unsharded, ComputeParameter)
            self.gradients.register_hook(index)
        param.unsharded.requires_grad_(param.requires_grad)
        param.distribution.annotate(param.unsharded)

    def plan_on_meta(self, params: list[FoundParam]) -> GroupPlan:
        """The plan of a group like this one, with ``params``, that trains on the meta device."""
        return dataclasses.replace(self.plan, params=params, runs_on_meta=True)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor``, or a tensor that it wraps, is an unsharded parameter or a view of one."""
        return self.encoding.holds(tensor)

    def check_late_extensions(self) -> None:
        """Raise if a parameter's local tensor got its own all-gather after ``fully_shard``: it would never be called.

        Raises:
            ValueError: a local tensor has ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``.
        """
        late = [param.fqn for param in self.params if has_extension(param.sharded)]
        if late and not self.encoding.makes_params:
            raise ValueError(
                f"the local tensor of {', '.join(late)} got fsdp_pre_all_gather after fully_shard, which has placed the "
                "parameter in a buffer already: give the parameter a tensor type with this method before fully_shard"
            )

    def _is_written_in_place(self, param: FSDPParam, value: torch.Tensor) -> bool:
        """Whether matmuls with ``value`` write its gradient into the buffer: if that costs less than one copy."""
        is_matrix = value.ndim in (2, 3) and value.numel() >= SMALLEST_WRITTEN_IN_PLACE and value.is_floating_point()
        has_layout = self.encoding.computes_in_buffer and self.param_dtype == self.gradients.dtype
        return is_matrix and has_layout and not param.distribution.reduces_gradient and allows_split_backward()

    @property
    def collectives(self) -> Collectives:
        """The collectives that all-gather parameters and reduce gradients."""
        return self.named.inner

    @collectives.setter
    def collectives(self, collectives: Collectives) -> None:
        self.named.inner = collectives

    @property
    def names(self) -> str:
        """The first parameter's name, and the number of the others: for errors."""
        return f"{self.params[0].fqn}{f' and {len(self.params) - 1} more' if len(self.params) > 1 else ''}"

    @property
    def is_meta(self) -> bool:
        """Whether the parameters have no memory yet."""
        return self.device.type == "meta" and not self.plan.runs_on_meta

    @property
    def sharded(self) -> DBuffer:
        """The buffer of the shards."""
        return self.shards.buffer

    @property
    def unsharded(self) -> DBuffer:
        """The gathered buffer."""
        return self.encoding.buffer

    @property
    def has_own_memory(self) -> bool:
        """Whether the user has chosen where buffers are, or that they stay allocated."""
        return self._pool is not None or self.encoding.keeps_storage

    @property
    def is_trainable(self) -> bool:
        return any(param.sharded.requires_grad for param in self.params)

    @property
    def writes_gradients(self) -> bool:
        """Whether matmuls write weight gradients to the gradient buffer themselves."""
        return any(isinstance(param.unsharded, ComputeParameter) for param in self.params)

    def buffers(self) -> dict[str, list[DBuffer]]:
        """The buffers of this group by their contents, also freed ones. ``.grad`` is not in them."""
        return {"sharded": [self.sharded], "gathered": self.encoding.buffers(), **self.gradients.buffers()}

    # -- unshard and reshard ---------------------------------------------------------------------------------------

    @property
    def is_unsharded(self) -> bool:
        """Whether the unsharded parameters are registered."""
        return self._sharded_state is ShardedState.UNSHARDED

    @property
    def is_gathered(self) -> bool:
        """Whether the parameters are unsharded, or their all-gather is in flight."""
        return self._sharded_state is not ShardedState.SHARDED

    def _move_to(self, state: ShardedState) -> None:
        self._sharded_state = moved(lambda: self.names, self._sharded_state, state)

    @untyped
    def unshard(self, wait: bool = True) -> None:
        """Issue the all-gather, unless it was issued. If ``wait``, wait for it and register the unsharded parameters.

        Raises:
            RuntimeError: the parameters are on the meta device.
        """
        if not self.is_gathered:
            if self.is_meta:
                missing = [param.fqn for param in self.params if param.registered is None or param.registered.is_meta]
                raise RuntimeError(
                    f"{', '.join(missing)} on the meta device: materialize all parameters before forward, with "
                    "to_empty(device=...) and reset_parameters(), or with load_state_dict(..., assign=True)"
                )
            # Before the shards are read: a later write makes the group outdated, also while the all-gather is in flight.
            self._gathered_versions = [param.sharded._version for param in self.params]
            with self._sharded_after_error(), profiler_range("all_gather", self.fqn):
                versions = self._gathered_versions
                self._all_gather = self.keeper.all_gather(self.shards, self.encoding, versions, self.named)
            self._move_to(ShardedState.GATHERING)
        if wait and not self.is_unsharded:
            with self._sharded_after_error():
                self._wait_for_all_gather()
                made = self.encoding.decode(self.shards, self.keeper.keeps_buffer)
                if made is not None:
                    with torch.inference_mode(False):  # Later forwards train them.
                        for index, (param, value) in enumerate(zip(self.params, made)):
                            self._init_unsharded_param(index, param, param.distribution.gathered(value))
            self.keeper.drop()  # The all-gather has read it.
            self._move_to(ShardedState.UNSHARDED)
            # Registered last: if anything above raises, the modules still have the sharded parameters.
            with as_plain_tensors():
                for param in self.params:
                    param.register(param.unsharded)
                    param.version = param.compute_version

    @contextlib.contextmanager
    def _sharded_after_error(self) -> Iterator[None]:
        """If the block raises, return to the sharded state, so that all ranks can issue the all-gather again."""
        try:
            yield
        except BaseException:
            self._all_gather, self._sharded_state = None, ShardedState.SHARDED
            self.keeper.invalidate()
            self._free_unsharded()
            raise

    def _wait_for_all_gather(self) -> None:
        assert self._all_gather is not None
        work, self._all_gather = self._all_gather, None
        with profiler_range("all_gather_wait", self.fqn):
            work.wait()

    def expire_resident(self) -> None:
        """An iteration starts: invalidate resident parameters, unless gradients accumulate.

        ``dcp.load`` and writes to ``.data`` or local tensors change no version counter, and may happen on one rank only. So all
        ranks all-gather again.
        """
        if not self.is_gathered and not self.gradients.is_accumulating:
            self.keeper.invalidate()

    @property
    def is_outdated(self) -> bool:
        """Whether an operation has changed a sharded parameter since its all-gather. Equal on all ranks, as operations are."""
        return self.is_gathered and self._gathered_versions != [param.sharded._version for param in self.params]

    @untyped
    def reshard(self, keep: bool = False) -> None:
        """Free the unsharded parameters and register the sharded ones.

        Args:
            keep: whether the keeper may keep a part of the gathered buffer for backward.

        Raises:
            RuntimeError: a parameter was written to or replaced while it was unsharded. That change is lost.
        """
        was_gathered, was_unsharded = self.is_gathered, self.is_unsharded
        # First: if the wait below raises, the group is sharded, too, and the next unshard issues a new all-gather.
        if was_gathered:
            self._move_to(ShardedState.SHARDED)
        # An all-gather in flight writes to the buffer that is freed below.
        if self._all_gather is not None:
            with self._sharded_after_error():
                self._wait_for_all_gather()
        self.keeper.drop()
        if not was_gathered:
            return
        if keep and was_unsharded:
            self.keeper.keep(self.encoding)
        with as_plain_tensors():
            changed = self._restore_changed() if was_unsharded else []
        self._free_unsharded()
        self.register_sharded()
        # Raised at the end, so that the group is sharded and can be used again.
        if changed:
            raise RuntimeError(
                f"{', '.join(changed)} changed while unsharded by fully_shard (written to in place, converted or replaced); "
                "the change is lost. Change parameters while they are sharded: after backward, or after reshard()"
            )

    def _free_unsharded(self) -> None:
        self.encoding.free(self.keeper.keeps_buffer)

    def set_memory_pools(self, gathered: MemoryPool | None, gradients: MemoryPool | None) -> None:
        """From now on, allocate unsharded parameters and gradients from these pools. All gradients must be in ``.grad``."""
        self.reshard()
        self.keeper.invalidate()
        self.encoding.free_replaced()
        self._pool = gathered
        self.encoding.make_buffers(self.param_dtype, self.device, gathered, self.memory.gathered)
        self.gradients.set_pool(gradients)
        self._init_unsharded_params()

    def reduce_gradients(self) -> None:
        """Issue one reduce-scatter of the gradients; before it, cast them, unless the collectives add them in a wider dtype."""
        with profiler_range("reduce_scatter", self.fqn):
            self.gradients.start_reduction(self.reduces_narrow)

    @property
    def reduces_narrow(self) -> bool:
        """Whether gradients are sent in the dtype of backward, and summed in ``reduce_dtype``. Equal on all ranks.

        It requires that each pass all-gathers the group: then all ranks have run the same passes since the last reduction. If a
        group stays unsharded, ranks may have accumulated the gradients of different numbers of passes.
        """
        return self.keeper.gathers_each_pass and self.gradients.can_reduce_narrow

    def finish_gradients(self, used_anywhere: list[bool]) -> None:
        """Set ``.grad``. After this an optimizer may change the parameters."""
        self.gradients.finish(used_anywhere)
        # All ranks set .grad in the same pass, so what they keep gathered is out of date on all of them.
        self.keeper.invalidate()

    @property
    def has_slot(self) -> bool:
        """Whether an all-gather can be issued: no other group uses the slot of this one's persistent buffer."""
        return self.encoding.has_slot

    @property
    def kept_nbytes(self) -> int:
        """Bytes of gathered parameters outside of the buffers."""
        return self.encoding.nbytes_beside + self.keeper.nbytes

    def _restore_changed(self) -> list[str]:
        """Make all unsharded parameters views of the buffer again; return the names of those that the user has changed."""
        changed = []
        for index, param in enumerate(self.params):
            unsharded = param.unsharded
            # Only a DTensor needs local_of(), which makes a new tensor of any other one.
            is_intact = self.encoding.is_intact(param, local_of(unsharded) if isinstance(unsharded, DTensor) else unsharded)
            if not is_intact:
                param.view = self.encoding.compute_tensor(index)
                unsharded.data = param.distribution.gathered(param.view)
            is_written = param.compute_version != param.version and not param.is_renormalized
            if not is_intact or is_written or param.registered is not unsharded:
                changed.append(param.fqn)
        return changed

    # -- sharded parameters ----------------------------------------------------------------------------------------

    def register_sharded(self) -> None:
        """Make the sharded DTensors the modules' parameters."""
        with as_plain_tensors():
            for param in self.params:
                param.register(param.sharded)

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
            self.register_sharded()

    def load_replaced(self) -> None:
        """Copy parameters that the user has replaced, as ``load_state_dict(assign=True)`` does, into the buffer.

        The old parameters are registered again, since an optimizer may hold them. If the group is on the meta device, the new
        parameters stay registered, and are copied when the user has replaced all parameters of the group.

        Raises:
            ValueError: a new parameter is no DTensor, or has another shape, dtype or device. Nothing is copied.
        """
        if self.is_unsharded:
            return
        replaced = [index for index in range(len(self.params)) if not self._is_in_place(index)]
        if not replaced:
            return
        self.reshard()  # An all-gather in flight would bring the old values.
        with torch.no_grad():
            if self.is_meta:
                self._load_if_all(replaced)
                return
            # Check all, then clone all, then copy all: they may be views of this buffer, in another order.
            values = [self._replacement(index, self.orig_dtype) for index in replaced]
            for index, value, copy in zip(replaced, values, [value.clone() for value in values]):
                self._load(index, copy, value.requires_grad)

    def _is_in_place(self, index: int) -> bool:
        param = self.params[index]
        if self.is_meta:
            return param.registered is None or param.registered.is_meta
        return param.registered is param.sharded and self.shards.holds(local_of(param.sharded))

    def _replacement(self, index: int, dtype: torch.dtype) -> DTensor:
        param = self.params[index]
        current = param.registered
        wanted = (param.distribution.shape, dtype, None if self.is_meta else self.sharded.flat.device)
        found = (getattr(current, "shape", None), getattr(current, "dtype", None), getattr(current, "device", None))
        if current is not None and param.is_another(current):
            raise ValueError(
                f"{param.fqn} was replaced by another parameter that fully_shard has sharded. This does not tie the two: tie "
                "parameters before fully_shard, in one group, or assign a copy"
            )
        if not isinstance(current, DTensor) or found[: 2 if self.is_meta else 3] != wanted[: 2 if self.is_meta else 3]:
            raise ValueError(
                f"{param.fqn} was replaced by {type(current).__name__} of {', '.join(map(str, found))}; expected a DTensor of "
                f"{', '.join(map(str, wanted))}. Load with load_state_dict(...), or assign such a DTensor. Cast or move a "
                "module before fully_shard, or cast or move a module that has all parameters of the group"
            )
        return current

    def _load(self, index: int, value: torch.Tensor, requires_grad: bool) -> None:
        """Copy ``value`` into the buffer. The parameter stays the object that an optimizer holds."""
        param = self.params[index]
        if not self.shards.holds(local_of(param.sharded)):
            self._put(index, param.sharded)
        param.sharded.copy_(value)
        param.sharded.requires_grad_(requires_grad)
        self._register_everywhere(param)

    def _load_if_all(self, replaced: list[int], dtype: torch.dtype | None = None) -> None:
        """If the user has replaced all parameters of the group, make new buffers and copy the new parameters into them.

        Args:
            dtype: the dtype of the new parameters; None: that of the old ones.
        """
        dtype = dtype or self.orig_dtype
        values = [self._replacement(index, dtype) for index in replaced]
        # A buffer has one dtype and one device, so it is made when the last parameter is replaced.
        if len(values) < len(self.params) or any(value.is_meta for value in values):
            return
        placements = [param.sharded.placements for param in self.params]  # type: ignore[attr-defined]
        locals_ = [local_of(value.redistribute(placements=wanted)) for value, wanted in zip(values, placements)]
        self._rebuild(self._compute_device(locals_[0].device), dtype, locals_)
        for index, (param, value) in enumerate(zip(self.params, values)):
            param.set_sharded(value)  # type: ignore[arg-type]
            self._put(index, param.sharded)
            self._register_everywhere(param)

    def _put(self, index: int, parameter: nn.Parameter) -> None:
        """Make the object ``parameter`` a view of the sharded buffer."""
        # Optimizers hold the parameter as an object. So the object stays, and its contents are swapped.
        inside = nn.Parameter(self.shards.dtensor(index, self.params[index].distribution), parameter.requires_grad)
        vars(inside).update(vars(parameter))
        gradient, parameter.grad = parameter.grad, None  # It would be swapped, too.
        torch.utils.swap_tensors(parameter, inside)
        parameter.grad = gradient

    def _register_everywhere(self, param: FSDPParam) -> None:
        for owner, attribute in param.registered_names:
            owner._parameters[attribute] = param.sharded

    # -- conversions -----------------------------------------------------------------------------------------------

    def check_conversion(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Raise if the group cannot have the dtype or device that ``function`` gives. ``Module.to`` and others apply it.

        Raises:
            ValueError: ``function`` moves parameters to another device than the mesh's (if offloaded: than the CPU), or to
                shared memory.
            RuntimeError: ``function`` changes the dtype, while there are gradients that are not in ``.grad`` yet.
        """
        # The function is opaque: call it on an empty tensor to see the device and dtype.
        device = self.sharded.flat.device
        probe = function(torch.empty(0, dtype=self.orig_dtype, device=device))
        offloads = isinstance(self.plan.offload, CPUOffloadPolicy)
        home = "cpu" if offloads else self.dp.mesh.device_type
        if probe.device != device and not (self.is_meta and probe.device.type == home):
            where = (
                "" if not self.is_meta else f" with a mesh on {self.dp.mesh.device_type}{' and offload' if offloads else ''}"
            )
            raise ValueError(
                f"{self.names} is sharded in a buffer on {device}{where} and cannot move to {probe.device}: expected {home}; "
                "move the module before fully_shard"
            )
        if probe.dtype.is_floating_point != self.orig_dtype.is_floating_point:
            raise ValueError(f"{self.names} is sharded in a buffer of {self.orig_dtype} and cannot become {probe.dtype}")
        if device.type == "cpu" and probe.is_shared():
            raise ValueError(f"{self.names} is sharded in a buffer and cannot be moved to shared memory")
        if probe.dtype != self.orig_dtype and self.encoding.makes_params:
            raise ValueError(f"{self.names} is of a type with its own all-gather: convert it before fully_shard")
        if probe.dtype != self.orig_dtype and self.gradients.is_pending:
            raise RuntimeError(
                f"{self.names} has gradients that are not in .grad yet and would be lost in {probe.dtype}: convert the module "
                "after a backward that reduces them, or drop them with reset_iter_state()"
            )

    def is_whole(self, modules: set[nn.Module]) -> bool:
        """Whether all parameters are in their buffer, and registered in ``modules`` only."""
        in_place = all(self._is_in_place(index) for index in range(len(self.params)))
        return in_place and all(module in modules for param in self.params for module, _ in param.registered_names)

    def convert(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply ``function`` to the parameters and their gradients.

        If the dtype changes, or parameters leave the meta device, new buffers are made. The parameters stay the same objects.
        """
        probe = function(torch.empty(0, dtype=self.orig_dtype, device=self.sharded.flat.device))
        with torch.no_grad():
            if (probe.dtype, probe.device) == (self.orig_dtype, self.sharded.flat.device):
                tensors = [param.sharded for param in self.params]
                tensors += [tensor.grad for tensor in tensors if tensor.grad is not None]
                for tensor, value in [(tensor, function(tensor)) for tensor in tensors]:
                    if value is not tensor:
                        tensor.copy_(value)
                return
            values = None if self.is_meta else [function(local_of(param.sharded)) for param in self.params]
            if self.is_meta:
                self.shards.convert_meta(function)
            self._rebuild(self._compute_device(probe.device), probe.dtype, values)
            for index, param in enumerate(self.params):
                gradient, param.sharded.grad = param.sharded.grad, None
                self._put(index, param.sharded)
                param.sharded.grad = None if gradient is None else function(gradient)

    def load_converted(self) -> None:
        """:meth:`load_replaced`, also if all parameters have a new dtype. If only some have it, nothing is copied yet."""
        dtypes = {None if param.registered is None else param.registered.dtype for param in self.params}
        if self.is_unsharded or dtypes == {self.orig_dtype}:
            self.load_replaced()
        elif len(dtypes) == 1:
            with torch.no_grad():
                self._load_if_all(list(range(len(self.params))), *dtypes)

    def _rebuild(self, device: torch.device, dtype: torch.dtype, values: list[torch.Tensor] | None) -> None:
        """Make new buffers, and copy ``values`` into them, the local tensor of each parameter."""
        self.encoding.free_replaced()
        self._allocate(device, dtype)
        self.keeper.reset()
        self.gradients.place(self.device, self.param_dtype, self.reduce_dtype, self.sharded)
        for index, value in enumerate(values or ()):
            self.shards.load(index, value)
        self._init_unsharded_params()

    def _compute_device(self, home: torch.device) -> torch.device:
        """The device of the computation, if the sharded parameters are on ``home``."""
        if not self.is_meta or home.type == "meta":
            return self.device
        device_type = self.dp.mesh.device_type
        if home.type == device_type:
            return home
        return torch.device(device_type, torch.accelerator.current_device_index())
