"""A parameter group: the parameters of one ``fully_shard`` unit, their buffers and their collectives."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from torch_ragged.fsdp._collectives import Collectives, ProcessGroupCollectives, Work
from torch_ragged.fsdp._dbuffer import DBuffer
from torch_ragged.fsdp._granularity import Granularity, OrigParamPolicy, elements
from torch_ragged.fsdp._layout import BufferLayout, TensorSpec
from torch_ragged.fsdp._planner import plan_layout

__all__ = ["ManagedParam", "ParamGroup", "plan_params"]

_SHARD_ALIGNMENT_BYTES = 128


@dataclass
class ManagedParam:
    """One parameter of a group, with every place in the module tree where it is registered (several if tied)."""

    fqn: str
    places: list[tuple[nn.Module, str]]
    original: nn.Parameter | None
    sharded: nn.Parameter | None = None
    unsharded: nn.Parameter | None = None
    has_gradient: bool = False  # in the gradient buffer
    was_used: bool = False  # in the reduction under way


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
        shape = tuple(param.original.shape)
        specs.append(TensorSpec(param.fqn, shape, granularity.dims(shape), granularity.block_numel(shape)))
    return plan_layout(specs, ranks, _SHARD_ALIGNMENT_BYTES // min(dtype.itemsize, reduce_dtype.itemsize))


class ParamGroup:
    """Buffers and collectives of one group; the modules' parameters are switched between two sets.

    ::

        sharded    DBuffer Shard(0), original dtype     the registered DTensor parameters are views of it
           | all-gather (reads it in place; a cast goes straight into the slot)
        unsharded  DBuffer Replicate(), param_dtype     what forward and backward compute with: views of it
        gradients  DBuffer Partial(), reduce_dtype      each gradient is copied (cast, added) into its view once
           | reduce-scatter
        .grad      views of a DBuffer Shard(0)          DTensors placed as their parameters
    """

    def __init__(
        self,
        name: str,
        params: list[ManagedParam],
        mesh: DeviceMesh,
        mp_policy: MixedPrecisionPolicy,
        policy: OrigParamPolicy | None,
        device: torch.device,
    ) -> None:
        first = params[0].original
        assert first is not None
        self.name, self.params, self.mesh = name, params, mesh
        self.orig_dtype = first.dtype
        self.param_dtype = mp_policy.param_dtype or self.orig_dtype
        self.reduce_dtype = mp_policy.reduce_dtype or self.param_dtype
        self.rank = mesh.get_local_rank()
        self.collectives: Collectives = ProcessGroupCollectives(mesh.get_group())
        self.layout = plan_params(params, mesh.size(), policy, self.param_dtype, self.reduce_dtype)
        self.sharded = DBuffer(self.layout, Shard(0), self.rank, self.orig_dtype, device)
        self.unsharded = DBuffer(self.layout, Replicate(), self.rank, self.param_dtype, device)
        self.is_unsharded = False
        self._gather: Work | None = None
        self._gradients: DBuffer | None = None
        self._views: list[torch.Tensor] = []
        self._reduction: tuple[Work, DBuffer] | None = None
        self._reduced: DBuffer | None = None
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
            param.unsharded = nn.Parameter(self.unsharded.tensor(index), requires_grad=original.requires_grad)
            if original.requires_grad:
                param.unsharded.register_post_accumulate_grad_hook(self._gradient_hook(index))
            for name, value in vars(original).items():
                setattr(param.sharded, name, value)
            param.original = None

    def _dtensor(self, index: int, local: torch.Tensor) -> DTensor:
        shape = torch.Size(self.layout.tensors[index].shape)
        return DTensor.from_local(local, self.mesh, [self.layout.placement(index)], shape=shape, run_check=False)

    # -- parameters ------------------------------------------------------------------------------------------------

    def register_sharded(self) -> None:
        """Make the sharded DTensors the modules' parameters."""
        self._register([param.sharded for param in self.params])

    def _register(self, values: list[nn.Parameter | None]) -> None:
        for param, value in zip(self.params, values):
            for module, name in param.places:
                module._parameters[name] = value

    def adopt_sharded(self) -> None:
        """Take over parameters that the user replaced, as ``load_state_dict(assign=True)`` does, into the buffer.

        Raises:
            ValueError: a replacement has another shape, dtype, mesh or kind than the parameter.
        """
        if self.is_unsharded:
            return
        for param in self.params:
            module, name = param.places[0]
            current = module._parameters[name]
            if current is param.sharded:
                continue
            expected = param.sharded
            assert isinstance(expected, DTensor)
            if not isinstance(current, DTensor) or current.shape != expected.shape or current.dtype != expected.dtype:
                raise ValueError(
                    f"{param.fqn} was replaced by {type(current).__name__} of {getattr(current, 'shape', None)}, "
                    f"{getattr(current, 'dtype', None)}; expected a DTensor of {tuple(expected.shape)}, {expected.dtype}. "
                    "Load with load_state_dict(...) or assign DTensors of the same shape and dtype"
                )
            with torch.no_grad():
                expected.copy_(current)
            for owner, attribute in param.places:
                owner._parameters[attribute] = param.sharded

    def unshard(self, wait: bool = True) -> None:
        """Gather the parameters; with ``wait`` make them the modules' parameters. One all-gather, at most."""
        if not self.is_unsharded and self._gather is None:
            self._gather = self.unsharded.all_gather_from(self.sharded, self.collectives)
        if wait and not self.is_unsharded:
            assert self._gather is not None
            self._gather.wait()
            self._gather = None
            self.is_unsharded = True
            self._register([param.unsharded for param in self.params])

    def reshard(self) -> None:
        """Give the gathered memory back and make the sharded parameters the modules' parameters."""
        if self._gather is not None:
            self._gather.wait()
            self._gather = None
        elif not self.is_unsharded:
            return
        self.is_unsharded = False
        self.unsharded.release()
        self.register_sharded()

    # -- gradients -------------------------------------------------------------------------------------------------

    def _gradient_hook(self, index: int) -> Callable[[torch.Tensor], None]:
        """Move a gradient into the buffer as soon as autograd has it, and drop it."""
        group_ref = weakref.ref(self)  # Autograd's hooks are invisible to the garbage collector.

        def hook(unsharded: torch.Tensor) -> None:
            group = group_ref()
            assert group is not None and unsharded.grad is not None
            param, view = group.params[index], group._gradient_views()[index]
            if param.has_gradient:
                view.add_(unsharded.grad)
            else:
                view.copy_(unsharded.grad)
                param.has_gradient = True
            unsharded.grad = None

        return hook

    def _gradient_views(self) -> list[torch.Tensor]:
        """The gradient buffer's view of each parameter; the buffer is (re-)acquired if it is not there."""
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
        self.finish_reduction()
        for param, view in zip(self.params, self._gradient_views()):
            if not param.has_gradient:
                view.zero_()
            param.was_used, param.has_gradient = param.was_used or param.has_gradient, False
        assert self._gradients is not None
        output = DBuffer(self.layout, Shard(0), self.rank, self.reduce_dtype, self.unsharded.flat.device)
        self._reduction = (self._gradients.reduce_scatter_to(output, self.collectives), output)

    def finish_reduction(self) -> None:
        """Wait for the reduction under way, release the gradient buffer and keep the reduced shard."""
        if self._reduction is None:
            return
        work, output = self._reduction
        self._reduction = None
        work.wait()
        assert self._gradients is not None
        self._gradients.release()
        if self._reduced is None:
            self._reduced = output
        else:
            self._reduced.flat.add_(output.flat)

    @property
    def was_reduced(self) -> bool:
        """Whether this backward pass reduced this group's gradients."""
        return self._reduced is not None or self._reduction is not None

    def set_gradients(self, used_anywhere: list[bool]) -> None:
        """At the end of backward: add the reduced shard to ``.grad`` of every parameter that some rank used."""
        self.finish_reduction()
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
