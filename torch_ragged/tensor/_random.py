"""Random ops on ragged DTensors: the result equals that of a single device, under any placements.

Each rank draws the numbers of the whole global tensor, with the given generator or the device's default one. It keeps the
numbers of the elements that it owns. Values therefore depend only on the generator's state, not on world size, mesh, units or
placement. Afterwards, the generator has the state that a single device would have, and replicas are equal. The rules
communicate only to redistribute arguments.

The cost is one temporary tensor of the global size and dtype, and the time to fill it, which is small compared to a training
step. Ops that read values (``bernoulli`` of probabilities, dropout) need a second temporary tensor for these values.
``torch.distributed.tensor.rand`` and ``randn`` draw in the same way.

Ranks must start from equal states: call ``torch.manual_seed(0)``, for example, on every rank. On CPU nothing checks this, as
for any DTensor: if seeds differ, ranks keep shards of different tensors, and replicas differ. On accelerators, DTensor gives
all ranks rank 0's state before the first random op on a DTensor. On meta tensors nothing is drawn.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import UnsupportedOperatorException
from torch.distributed._functional_collectives import _are_we_tracing
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import _random as dtensor_random
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from torch_ragged.tensor._ops._pointwise_ops import pointwise_rule
from torch_ragged.tensor._ops._rows import has_ragged_rows
from torch_ragged.tensor._ops._rules import NoLocalWay, OpCall, Sharding, Spec, decomposition, rule, tensor_leaves
from torch_ragged.tensor._ownership import owned
from torch_ragged.tensor.placement_types import cuts_of, has_ragged

__all__ = ["agree_on_state", "before_draw", "like_of_generator", "part_of", "random_rule", "rrelu_rule"]

_aten = torch.ops.aten

# Outputs have the shape of the first argument. Samplers overwrite it, factories read its shape, the last ones read its values.
_SAMPLERS = "normal_ uniform_ exponential_ log_normal_ geometric_ cauchy_ random_ bernoulli_ normal_functional".split()
_FACTORIES = "rand_like randn_like randint_like".split()
_OF_VALUES = "bernoulli native_dropout".split()


def _register_rules() -> None:
    """Register the rules of all random ops, for all overloads except those with ``out=``."""
    for name in _SAMPLERS + _FACTORIES + _OF_VALUES:
        packet = getattr(_aten, name)
        for op in (getattr(packet, overload) for overload in packet.overloads()):
            arguments = op._schema.arguments
            if name in _FACTORIES and any(argument.name == "generator" for argument in arguments):
                decomposition(op)(like_of_generator)
            elif not any(argument.is_out for argument in arguments):
                rule(op)(random_rule)
    rule(_aten.rrelu_with_noise.default)(rrelu_rule)


class _Whole:
    """Copies between a global tensor and this rank's shard of it under a ragged ``spec``."""

    def __init__(self, spec: Spec) -> None:
        self.shape, mesh = tuple(spec.shape), spec.mesh
        here = mesh.get_coordinate()  # None on a rank outside of the mesh: it computes a spec, but runs no op.
        coordinate = (0,) * mesh.ndim if here is None else tuple(here)
        self._owned = owned(self.shape, tuple(mesh.shape), cuts_of(spec.placements), coordinate)

    def keep(self, whole: torch.Tensor, local: torch.Tensor | None = None) -> torch.Tensor:
        """Copy this rank's shard of ``whole`` to ``local``, or to a new tensor. Returns the shard."""
        local = whole.new_empty(self._owned.local_shape) if local is None else local
        for in_local, in_whole in self._boxes(local, whole):
            in_local.copy_(in_whole)
        return local

    def spread(self, local: torch.Tensor) -> torch.Tensor:
        """A new global tensor with this rank's elements from ``local``, and zeros for all other elements."""
        whole = local.new_zeros(self.shape)
        for in_local, in_whole in self._boxes(local, whole):
            in_whole.copy_(in_local)
        return whole

    def _boxes(self, local: torch.Tensor, whole: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """For each box of this rank, its view in ``local`` and its view in ``whole``."""
        for box in self._owned.boxes:
            in_local = local.as_strided(box.sizes, box.local_strides, local.storage_offset() + box.local_offset)
            yield in_local, whole[tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes))]


def part_of(whole: torch.Tensor, spec: Spec) -> torch.Tensor:
    """This rank's local tensor under ``spec``, of a global tensor that every rank has."""
    return _Whole(spec).keep(whole)


def random_rule(call: OpCall) -> Sharding:
    """Draw the whole tensor and keep this rank's shard.

    Communicates only to redistribute a further tensor argument, such as a tensor of probabilities, with other placements. If a
    tensor of probabilities has a value outside of [0, 1], only the rank that owns this value raises.

    Raises:
        NoLocalWay: the first argument is a Partial, is a strided view, or is not ragged.
    """
    leader, sharding = _leader(call), pointwise_rule(call)
    whole = _Whole(leader)
    positions = [i for i, arg in enumerate(call.args) if hasattr(arg, "placements")]
    cut = {i for i, (placements, _) in zip(positions, sharding.inputs) if placements == leader.placements}
    name, is_inplace = call.name, call.is_inplace

    def argument(position: int, local: torch.Tensor) -> torch.Tensor:
        """A global tensor in place of a local argument. Probabilities of other ranks' elements are 0: an element's number is
        drawn for any probability, so the state advances equally."""
        if position or name in _OF_VALUES:
            return whole.spread(local)
        return local.new_empty(()).expand(whole.shape) if name in _FACTORIES else local.new_empty(whole.shape)

    def run(*args: Any, **kwargs: Any) -> Any:
        if name in _FACTORIES:
            kwargs = {**kwargs, "memory_format": torch.contiguous_format}
        drawn = call.op(*(argument(i, arg) if i in cut else arg for i, arg in enumerate(args)), **kwargs)
        if isinstance(drawn, torch.Tensor):
            return whole.keep(drawn, args[0] if is_inplace else None)
        return tuple(map(whole.keep, drawn))

    return Sharding(sharding.inputs, sharding.outputs, run)


def like_of_generator(op: torch._ops.OpOverload, tensor: DTensor, *bounds: Any, generator: Any, **options: Any) -> DTensor:
    """``rand_like``, ``randn_like`` and ``randint_like`` with a given generator, as ``empty_like`` and a sampler in place.

    A decomposition, because torch 2.11 finds no dispatch key for these overloads.
    """
    result = _aten.empty_like.default(tensor, **options)
    name = op._schema.name.removeprefix("aten::")
    if name == "randint_like":
        low, high = bounds if len(bounds) == 2 else (0, bounds[0])
        return result.random_(int(low), int(high), generator=generator)
    return (result.uniform_ if name == "rand_like" else result.normal_)(generator=generator)


def rrelu_rule(call: OpCall) -> Sharding:
    """Leaky ReLU with random slopes. It draws one number per negative element, so each rank needs all values: one all-gather.

    Raises:
        NoLocalWay: as :func:`random_rule`; or the noise, which the op writes to, has other placements than its argument.
    """
    leader, sharding = _leader(call), pointwise_rule(call)
    noise_spec = tensor_leaves(call)[1]
    if noise_spec.placements != leader.placements:
        raise NoLocalWay("the noise that it writes must have the placements of its argument")
    whole = _Whole(leader)

    def run(values: torch.Tensor, noise: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        whole_noise = noise.new_empty(whole.shape)
        result = call.op(values, whole_noise, *args, **kwargs)
        whole.keep(whole_noise, noise)
        return whole.keep(result)

    return Sharding([((Replicate(),) * leader.mesh.ndim, None), sharding.inputs[1]], sharding.outputs, run)


def _leader(call: OpCall) -> Spec:
    """The spec of the first tensor argument: one number per element of it is drawn.

    Raises:
        NoLocalWay: it is not ragged, or it is a strided view.
    """
    leader = tensor_leaves(call)[0]
    if not has_ragged(leader.placements):
        raise NoLocalWay("its first argument would have to be redistributed")
    if has_ragged_rows(leader.placements):
        raise NoLocalWay("it would number the elements of a strided view in another order: use the tensor that is viewed")
    return leader


def before_draw(op: Any, op_info: Any) -> None:
    """Make ranks draw from equal states. Called before every random op on a ragged DTensor.

    Raises:
        UnsupportedOperatorException: under torch.compile. It then breaks the graph, and the op runs eagerly. In a graph,
            inductor would draw other numbers. Also, a rank that owns no element would drop the op, and its generator would get
            another state than those of the other ranks.
    """
    if TracingContext.try_get() is not None or get_proxy_mode() is not None:
        raise UnsupportedOperatorException(op)
    agree_on_state(op_info.compute_mesh, op_info.local_args[0].device.type)


def agree_on_state(mesh: DeviceMesh, device_type: str) -> None:
    """On accelerators, create DTensor's random tracker if it does not exist. It broadcasts rank 0's state to all ranks."""
    nothing_to_share = device_type in ("cpu", "meta")
    if nothing_to_share or dtensor_random._rng_tracker or _are_we_tracing():  # Fake tensors draw nothing.
        return
    if dtensor_random.is_rng_supported_mesh(mesh):
        dtensor_random._rng_tracker = dtensor_random.OffsetBasedRNGTracker(mesh)


_register_rules()
