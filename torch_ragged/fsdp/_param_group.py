"""A parameter group: the parameters of one ``fully_shard`` unit, their buffers and their collectives."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from torch_ragged.fsdp._advice import PADDING_LIMIT
from torch_ragged.fsdp._collectives import Collectives, ProcessGroupCollectives, Reduction, Work
from torch_ragged.fsdp._dbuffer import DBuffer
from torch_ragged.fsdp._granularity import Granularity, OrigParamPolicy, elements
from torch_ragged.fsdp._layout import BufferLayout
from torch_ragged.fsdp._planner import plan_layout

__all__ = ["ManagedParam", "ParamGroup", "plan_params"]

_SHARD_ALIGNMENT_BYTES = 128
_logger = logging.getLogger("torch_ragged.fsdp")
# From 2.15 on FSDP2 does not round gradients to param_dtype: autograd leaves them in the dtype they are computed in, and
# without a reduce_dtype they are reduced in the parameters' own dtype. Results follow the FSDP2 that is installed.
_KEEPS_WIDE_GRADIENTS = torch.__version__ >= "2.15"


@dataclass
class ManagedParam:
    """One parameter of a group, with every place in the module tree where it is registered (several if tied)."""

    fqn: str
    places: list[tuple[nn.Module, str]]
    original: nn.Parameter | None
    sharded: nn.Parameter | None = None
    unsharded: nn.Parameter | None = None
    requires_grad: bool = True  # of both sets, when they were switched last
    version: int = 0  # of the unsharded parameter when it was gathered
    has_gradient: bool = False  # in the gradient buffer
    was_used: bool = False  # in the reduction under way

    def sync_requires_grad(self) -> None:
        """Freezing or unfreezing either of the two parameters holds for both."""
        sharded, unsharded = self.sharded, self.unsharded
        assert sharded is not None and unsharded is not None
        changed = [p.requires_grad for p in (sharded, unsharded) if p.requires_grad != self.requires_grad]
        if changed:
            self.requires_grad = changed[0]
            sharded.requires_grad_(self.requires_grad)
            unsharded.requires_grad_(self.requires_grad)


def plan_params(
    params: list[ManagedParam], ranks: int, policy: OrigParamPolicy | None, dtype: torch.dtype, reduce_dtype: torch.dtype
) -> BufferLayout:
    """The layout of ``params`` over ``ranks``: shard bytes are a multiple of 128 in either dtype."""
    specs = []
    for param in params:
        assert param.original is not None
        granularity = (policy(param.fqn, param.original) if policy else None) or elements()
        if not isinstance(granularity, Granularity):
            raise TypeError(
                f"orig_param_policy({param.fqn!r}) returned {granularity!r}; expected elements(), rows(n), blocks(h, w), "
                "tensor() or None"
            )
        specs.append(granularity.tensor_spec(param.fqn, param.original.shape))
    layout = plan_layout(specs, ranks, _SHARD_ALIGNMENT_BYTES // min(dtype.itemsize, reduce_dtype.itemsize))
    if layout.granularity_fraction > PADDING_LIMIT and dist.get_rank() == 0:
        padding, bound = 100 * layout.padding_fraction, 100 * layout.bound_fraction
        _logger.warning(
            f"{params[0].fqn} and {len(params) - 1} more parameters on {ranks} ranks: {padding:.1f}% padding for their "
            f"granularity (at least {bound:.1f}%: {layout.forced_by}). advise(buffer_layouts(model)) tells what would mend it"
        )
    return layout


class ParamGroup:
    """Buffers and collectives of one group; the modules' parameters are switched between two sets.

    ::

        sharded    DBuffer Shard(0), original dtype     the registered DTensor parameters are views of it
           | all-gather (reads it in place; a cast goes straight into the slot)
        unsharded  DBuffer Replicate(), param_dtype     what forward and backward compute with: views of it
        gradients  DBuffer Partial(), reduce_dtype      each gradient is copied (cast, added) into its view once
           | reduce-scatter, then an all-reduce over replicas (HSDP)
        .grad      views of a DBuffer Shard(0)          DTensors placed as their parameters
    """

    def __init__(
        self,
        params: list[ManagedParam],
        mesh: DeviceMesh,
        mp_policy: MixedPrecisionPolicy,
        policy: OrigParamPolicy | None,
        device: torch.device,
    ) -> None:
        first = params[0].original
        assert first is not None
        self.params, self.mesh = params, mesh
        self.orig_dtype = first.dtype
        self.param_dtype = mp_policy.param_dtype or self.orig_dtype
        self.reduce_dtype = mp_policy.reduce_dtype or (self.orig_dtype if _KEEPS_WIDE_GRADIENTS else self.param_dtype)
        shard_dim = mesh.ndim - 1  # Replicas, if any, are on the mesh dimension before.
        self.rank = mesh.get_local_rank(shard_dim)
        self.has_replicas = mesh.ndim > 1
        self.process_groups = ProcessGroupCollectives(
            mesh.get_group(shard_dim), mesh.get_group(0) if self.has_replicas else None
        )
        self.collectives: Collectives = self.process_groups
        self.reduction = Reduction()
        self.requires_all_reduce = True
        self.reduce_hook: Callable[[torch.Tensor], None] | None = None  # called with each reduced shard
        self.layout = plan_params(params, mesh.size(shard_dim), policy, self.param_dtype, self.reduce_dtype)
        self.sharded = DBuffer(self.layout, Shard(0), self.rank, self.orig_dtype, device)
        self.unsharded = DBuffer(self.layout, Replicate(), self.rank, self.param_dtype, device)
        self.is_unsharded = False
        self.on_gradient: Callable[[], None] | None = None  # called when a parameter has got a gradient
        self._gather: Work | None = None
        self._gathered_versions: list[int] = []
        self._gradients: DBuffer | None = None
        self._views: list[torch.Tensor] = []
        self._reduction: tuple[Work, DBuffer] | None = None
        self._all_reduce: tuple[Work, DBuffer] | None = None
        self._reduced: DBuffer | None = None
        self._kept: DBuffer | None = None  # reduced within each replica only
        self._shard_params(device)
        self.unsharded.release()
        self.register_sharded()

    # -- construction ----------------------------------------------------------------------------------------------

    def _shard_params(self, device: torch.device) -> None:
        self.sharded.zero_padding()
        for index, param in enumerate(self.params):
            original = param.original
            assert original is not None
            local = self.sharded.tensor(index)
            start, stop = self.layout.local_range(index, self.rank)
            local.copy_(original.detach().reshape(-1)[start:stop])
            param.sharded = nn.Parameter(self._dtensor(index, local), requires_grad=original.requires_grad)
            param.unsharded = nn.Parameter(self.unsharded.tensor(index))  # A hook can be set only where a gradient can be.
            if _KEEPS_WIDE_GRADIENTS and self.reduce_dtype.itemsize > self.param_dtype.itemsize:
                param.unsharded.grad_dtype = None  # The copy into the gradient buffer casts.
            param.unsharded.register_post_accumulate_grad_hook(self._gradient_hook(index))
            for name, value in vars(original).items():
                setattr(param.sharded, name, value)
            param.original = None

    def _dtensor(self, index: int, local: torch.Tensor) -> DTensor:
        shape = torch.Size(self.layout.tensors[index].shape)
        placements = [*[Replicate()] * (self.mesh.ndim - 1), self.layout.placement(index)]
        return DTensor.from_local(local, self.mesh, placements, shape=shape, run_check=False)

    def buffers(self) -> dict[str, list[DBuffer]]:
        """The buffers of this group, released ones too, by what they hold; ``.grad`` lies in buffers that are let go."""
        under_way = [pending[1] for pending in (self._reduction, self._all_reduce) if pending is not None]
        reduced = [self._reduced, self._kept, *under_way]
        kinds = {"sharded": [self.sharded], "gathered": [self.unsharded], "gradients": [self._gradients], "reduced": reduced}
        return {kind: [buffer for buffer in buffers if buffer is not None] for kind, buffers in kinds.items()}

    # -- parameters ------------------------------------------------------------------------------------------------

    def register_sharded(self) -> None:
        """Make the sharded DTensors the modules' parameters."""
        self._register([param.sharded for param in self.params])

    def _register(self, values: list[nn.Parameter | None]) -> None:
        for param, value in zip(self.params, values):
            param.sync_requires_grad()
            for module, name in param.places:
                if type(module).__setattr__ is nn.Module.__setattr__:
                    module._parameters[name] = value
                else:  # It may keep references of its own.
                    setattr(module, name, value)

    def adopt_sharded(self) -> None:
        """Take over parameters that the user replaced, as ``load_state_dict(assign=True)`` does, into the buffer.

        Raises:
            ValueError: a replacement has another shape, dtype, device or kind than the parameter; none is taken over.
        """
        if self.is_unsharded:
            return
        replaced = [index for index in range(len(self.params)) if not self._is_in_place(index)]
        if replaced:
            self.reshard()  # An all-gather under way would bring the old values.
            with torch.no_grad():
                for index, value in [(index, self._replacement(index)) for index in replaced]:
                    self._adopt(index, value)

    def _is_in_place(self, index: int) -> bool:
        param = self.params[index]
        module, name = param.places[0]
        return module._parameters.get(name) is param.sharded and self._is_in_buffer(param.sharded)

    def _is_in_buffer(self, sharded: nn.Parameter | None) -> bool:
        assert isinstance(sharded, DTensor)
        with torch.no_grad():
            local = sharded.to_local()
        return self.sharded.holds(local) and local.dtype == self.orig_dtype

    def _replacement(self, index: int) -> DTensor:
        param = self.params[index]
        module, name = param.places[0]
        current = module._parameters.get(name)
        shape, device = self.layout.tensors[index].shape, self.sharded.flat.device
        wanted = (shape, self.orig_dtype, device)
        if not isinstance(current, DTensor) or (tuple(current.shape), current.dtype, current.device) != wanted:
            raise ValueError(
                f"{param.fqn} was replaced by {type(current).__name__} of {getattr(current, 'shape', None)}, "
                f"{getattr(current, 'dtype', None)}, {getattr(current, 'device', None)}; expected a DTensor of {shape}, "
                f"{self.orig_dtype}, {device}. Load with load_state_dict(...) or assign DTensors like it; cast or move a "
                "module before fully_shard"
            )
        return current.clone().requires_grad_(current.requires_grad)

    def _adopt(self, index: int, value: DTensor) -> None:
        """Copy ``value`` into the buffer; the parameter stays the same object, also for an optimizer."""
        param, sharded = self.params[index], self.params[index].sharded
        assert sharded is not None
        if not self._is_in_buffer(sharded):
            inside = nn.Parameter(self._dtensor(index, self.sharded.tensor(index)))
            vars(inside).update(vars(sharded))
            gradient, sharded.grad = sharded.grad, None
            torch.utils.swap_tensors(sharded, inside)
            sharded.grad = gradient
        sharded.copy_(value)
        sharded.requires_grad_(value.requires_grad)
        for owner, attribute in param.places:
            owner._parameters[attribute] = sharded

    def check_conversion(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Raise if ``function``, which ``Module.to`` and others apply to parameters, changes their dtype, device or memory."""
        device = self.sharded.flat.device
        probe = function(torch.empty(0, dtype=self.orig_dtype, device=device))
        if (probe.dtype, probe.device) != (self.orig_dtype, device):
            raise ValueError(
                f"{self.params[0].fqn} is sharded in a buffer of {self.orig_dtype} on {device} and cannot become "
                f"{probe.dtype} on {probe.device}: cast or move the module before fully_shard, or compute in another dtype "
                "with MixedPrecisionPolicy(param_dtype=...)"
            )
        if device.type == "cpu" and probe.is_shared():
            raise ValueError(f"{self.params[0].fqn} is sharded in a buffer and cannot be moved to shared memory")

    def convert(self, function: Callable[[torch.Tensor], torch.Tensor], owner: nn.Module | None) -> None:
        """Replace parameters (of ``owner``, or all) and their gradients by ``function`` of them, where they are."""
        params = [p for p in self.params if owner is None or any(module is owner for module, _ in p.places)]
        tensors = [param.sharded for param in params if param.sharded is not None]
        tensors += [tensor.grad for tensor in tensors if tensor.grad is not None]
        with torch.no_grad():
            for tensor, value in [(tensor, function(tensor)) for tensor in tensors]:
                if value is not tensor:
                    tensor.copy_(value)

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """Have the modules be without this group's parameters for a while."""
        places = [place for param in self.params for place in param.places]
        for module, name in places:
            module._parameters[name] = None
        try:
            yield
        finally:
            self.register_sharded()

    def unshard(self, wait: bool = True) -> None:
        """Gather the parameters; with ``wait`` make them the modules' parameters. One all-gather, at most."""
        if not self.is_unsharded and self._gather is None:
            self._gather = self.unsharded.all_gather_from(self.sharded, self.collectives)
            self._gathered_versions = self._sharded_versions()
        if wait and not self.is_unsharded:
            assert self._gather is not None
            self._gather.wait()
            self._gather = None
            self.is_unsharded = True
            self._register([param.unsharded for param in self.params])
            for param in self.params:
                param.version = param.unsharded._version  # type: ignore[union-attr]

    def _sharded_versions(self) -> list[int]:
        return [param.sharded._version for param in self.params if param.sharded is not None]

    @property
    def is_outdated(self) -> bool:
        """Whether an operation on a sharded parameter, the same on all ranks, has changed it since it was gathered."""
        is_gathered = self.is_unsharded or self._gather is not None
        return is_gathered and self._gathered_versions != self._sharded_versions()

    def reshard(self) -> None:
        """Give the gathered memory back and make the sharded parameters the modules' parameters.

        Raises:
            RuntimeError: a parameter was written to or replaced while it was gathered, which would be lost.
        """
        if self._gather is not None:
            self._gather.wait()
            self._gather = None
        elif not self.is_unsharded:
            return
        changed = self._restore_changed() if self.is_unsharded else []
        self.is_unsharded = False
        self.unsharded.release()
        self.register_sharded()
        if changed:
            raise RuntimeError(
                f"{', '.join(changed)} changed while gathered by fully_shard (written to in place, converted or replaced); "
                "the change is lost. Change parameters while they are sharded: after backward, or after reshard()"
            )

    def _restore_changed(self) -> list[str]:
        """The names of unsharded parameters that the user changed; they are views of the buffer again."""
        changed = []
        for index, param in enumerate(self.params):
            (module, name), unsharded = param.places[0], param.unsharded
            assert unsharded is not None
            is_view = unsharded.dtype == self.param_dtype and self.unsharded.holds(unsharded)
            if not is_view:
                unsharded.data = self.unsharded.tensor(index)
            if not is_view or unsharded._version != param.version or module._parameters.get(name) is not unsharded:
                changed.append(param.fqn)
        return changed

    # -- gradients -------------------------------------------------------------------------------------------------

    def _gradient_hook(self, index: int) -> Callable[[torch.Tensor], None]:
        """Move a gradient into the buffer as soon as autograd has it, and drop it."""
        group_ref = weakref.ref(self)  # Autograd's hooks are invisible to the garbage collector.

        def hook(unsharded: torch.Tensor) -> None:
            group = group_ref()
            assert group is not None
            param = group.params[index]
            param.sync_requires_grad()
            if not param.requires_grad:  # frozen since forward
                unsharded.grad = None
            if unsharded.grad is None:  # or backward came here with no gradient
                return
            view = group._gradient_views()[index]
            if param.has_gradient:
                view.add_(unsharded.grad)
            else:
                view.copy_(unsharded.grad)
                param.has_gradient = True
            unsharded.grad = None
            if group.on_gradient is not None:
                group.on_gradient()

        return hook

    def _gradient_views(self) -> list[torch.Tensor]:
        """The gradient buffer's view of each parameter; the buffer is (re-)acquired if it is not there."""
        self.finish_reduction()  # It may still be read.
        if self._gradients is None:
            self._gradients = DBuffer(self.layout, Partial(), self.rank, self.reduce_dtype, self.unsharded.flat.device)
            self._gradients.zero_padding()
            self._views = [self._gradients.tensor(index) for index in range(len(self.params))]
        elif not self._gradients.is_allocated:
            self._gradients.allocate()
            self._gradients.zero_padding()
        return self._views

    @property
    def is_trainable(self) -> bool:
        return any(param.sharded is not None and param.sharded.requires_grad for param in self.params)

    def start_reduction(self) -> None:
        """Start one reduce-scatter of the gradient buffer. A parameter without a gradient here contributes zeros."""
        for param, view in zip(self.params, self._gradient_views()):
            if not param.has_gradient:
                view.zero_()
            param.was_used, param.has_gradient = param.was_used or param.has_gradient, False
        assert self._gradients is not None
        output = DBuffer(self.layout, Shard(0), self.rank, self.reduce_dtype, self.unsharded.flat.device)
        self._reduction = (self._gradients.reduce_scatter_to(output, self.collectives, self.reduction), output)

    def finish_reduction(self) -> None:
        """Wait for the reduce-scatter under way, release the gradient buffer and start the all-reduce of its shard."""
        if self._reduction is None:
            return
        (work, output), self._reduction = self._reduction, None
        work.wait()
        assert self._gradients is not None
        self._gradients.release()
        self._finish_all_reduce()
        if self._kept is not None:
            output.flat.add_(self._kept.flat)
            self._kept = None
        if self.keeps_shards:
            self._kept = output
        elif self.has_replicas:
            self._all_reduce = (self.collectives.all_reduce(output.flat, self.reduction), output)
        else:
            self._add_reduced(output)

    def _finish_all_reduce(self) -> None:
        if self._all_reduce is not None:
            (work, output), self._all_reduce = self._all_reduce, None
            work.wait()
            self._add_reduced(output)

    def _add_reduced(self, output: DBuffer) -> None:
        if self.reduce_hook is not None:
            self.reduce_hook(output.flat)
        if self._reduced is None:
            self._reduced = output
        else:
            self._reduced.flat.add_(output.flat)

    def drop_gradients(self) -> bool:
        """Forget the gradients that are not in ``.grad`` yet; says whether there were any."""
        had_any = self.was_reduced or self._kept is not None or any(param.has_gradient for param in self.params)
        for pending in (self._reduction, self._all_reduce):
            if pending is not None:
                pending[0].wait()
        self._reduction = self._all_reduce = self._reduced = self._kept = None
        for param in self.params:
            param.has_gradient = param.was_used = False
        if self._gradients is not None:
            self._gradients.release()
        return had_any

    @property
    def keeps_shards(self) -> bool:
        """Whether replicas do not reduce (``requires_all_reduce``): shards are kept for a later backward, not in ``.grad``."""
        return self.has_replicas and not self.requires_all_reduce

    @property
    def was_reduced(self) -> bool:
        """Whether this backward pass reduced this group's gradients."""
        return any(part is not None for part in (self._reduction, self._all_reduce, self._reduced))

    def set_gradients(self, used_anywhere: list[bool]) -> None:
        """At the end of backward: add the reduced shard to ``.grad`` of every parameter that some rank used."""
        self.finish_reduction()
        self._finish_all_reduce()
        reduced, self._reduced = self._reduced, None
        assert reduced is not None
        if self.reduce_dtype != self.orig_dtype:
            cast = DBuffer(self.layout, Shard(0), self.rank, self.orig_dtype, reduced.flat.device)
            cast.flat.copy_(reduced.flat)
            reduced = cast
        for index, (param, is_used) in enumerate(zip(self.params, used_anywhere)):
            param.was_used = False
            sharded = param.sharded
            if not is_used or sharded is None:
                continue
            gradient = self._dtensor(index, reduced.tensor(index))
            sharded.grad = gradient if sharded.grad is None else sharded.grad.add_(gradient)
            for hook in (getattr(sharded, "_post_accumulate_grad_hooks", None) or {}).values():
                hook(sharded)
