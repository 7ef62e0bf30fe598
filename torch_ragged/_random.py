"""Random ops on ragged DTensors: the numbers of a single device, whatever the placement.

A rank draws the numbers of the whole global tensor, with the generator given or else the device's default one, and keeps those
of the elements that it owns. Values then depend on the generator's state only, not on world size, mesh, units or
placement; the state afterwards is that of a single device, and replicas are equal. No communication. The price is one
transient of the global tensor's size, in its dtype, and the time to fill it, which is small beside a training step; ops that
look at values (``bernoulli`` of probabilities, dropout) need another one for these. ``torch.distributed.tensor.rand`` and
``randn`` draw alike.

Ranks must start from the same state: seed them alike, as with ``torch.manual_seed(0)`` on every rank. On CPU nothing checks
that, as for any DTensor: ranks with other seeds keep pieces of other tensors, and replicas differ. On accelerators all ranks
take rank 0's state before the first random op on a DTensor, which is DTensor's way. On meta tensors nothing is drawn.
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

from torch_ragged._ops._pointwise_ops import pointwise_rule
from torch_ragged._ops._rows import has_ragged_rows
from torch_ragged._ops._rules import NoLocalWay, OpCall, Sharding, Spec, decomposition, rule, tensor_leaves
from torch_ragged._ownership import owned
from torch_ragged.placement_types import cuts_of, has_ragged

__all__ = ["agree_on_state", "before_draw", "like_of_generator", "part_of", "random_rule", "rrelu_rule"]

_aten = torch.ops.aten

# Ops whose outputs have the shape of their first argument, of which they look at nothing, its shape, its own values.
_SAMPLERS = "normal_ uniform_ exponential_ log_normal_ geometric_ cauchy_ random_ bernoulli_ normal_functional".split()
_FACTORIES = "rand_like randn_like randint_like".split()
_OF_VALUES = "bernoulli native_dropout".split()


def _register_rules() -> None:
    """Give every op that is drawn here its rule, in all overloads but those with ``out=``."""
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
    """This rank's part of a global tensor that is cut as a ragged ``spec`` says."""

    def __init__(self, spec: Spec) -> None:
        self.shape, mesh = tuple(spec.shape), spec.mesh
        coordinate = mesh.get_coordinate()  # None on a rank outside of the mesh, which runs nothing.
        place = tuple(coordinate) if coordinate is not None else (0,) * mesh.ndim
        self._owned = owned(self.shape, tuple(mesh.shape), cuts_of(spec.placements), place)

    def keep(self, whole: torch.Tensor, local: torch.Tensor | None = None) -> torch.Tensor:
        """The part of ``whole`` that this rank owns, written to ``local`` where given."""
        local = whole.new_empty(self._owned.local_shape) if local is None else local
        for ours, place in self._pieces(local, whole):
            ours.copy_(place)
        return local

    def spread(self, local: torch.Tensor) -> torch.Tensor:
        """A global tensor with the values of ``local`` where this rank owns them, and zeros elsewhere."""
        whole = local.new_zeros(self.shape)
        for ours, place in self._pieces(local, whole):
            place.copy_(ours)
        return whole

    def _pieces(self, local: torch.Tensor, whole: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Views of the same elements in both."""
        for box in self._owned.boxes:
            ours = local.as_strided(box.sizes, box.local_strides, local.storage_offset() + box.local_offset)
            yield ours, whole[tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes))]


def part_of(whole: torch.Tensor, spec: Spec) -> torch.Tensor:
    """This rank's part of a tensor that every rank made, as its local tensor."""
    return _Whole(spec).keep(whole)


def random_rule(call: OpCall) -> Sharding:
    """Draw the whole tensor, keep what this rank owns. No communication, unless given probabilities are placed otherwise.

    A probability outside of [0, 1] in a tensor of them is an error of the rank that owns it.

    Raises:
        NoLocalWay: the first argument is pending a reduction, a strided view, or not ragged.
    """
    leader, sharding = _leader(call), pointwise_rule(call)
    whole = _Whole(leader)
    positions = [i for i, arg in enumerate(call.args) if hasattr(arg, "placements")]
    cut = {i for i, (placements, _) in zip(positions, sharding.inputs) if placements == leader.placements}
    name, is_inplace = call.name, call.is_inplace

    def argument(position: int, local: torch.Tensor) -> torch.Tensor:
        """What stands for a local argument. Others' probabilities do not matter: the same number is drawn for any."""
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
    """``rand_like`` and the like from a generator that is given: what they are made of. Torch 2.11 finds no key for them."""
    result = _aten.empty_like.default(tensor, **options)
    name = op._schema.name.removeprefix("aten::")
    if name == "randint_like":
        low, high = bounds if len(bounds) == 2 else (0, bounds[0])
        return result.random_(int(low), int(high), generator=generator)
    return (result.uniform_ if name == "rand_like" else result.normal_)(generator=generator)


def rrelu_rule(call: OpCall) -> Sharding:
    """Leaky ReLU of random slopes draws a number per negative element: it needs the values of all. One gather.

    Raises:
        NoLocalWay: as :func:`random_rule`, or the noise, which is written to, is placed otherwise.
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
    """The argument whose elements get numbers."""
    leader = tensor_leaves(call)[0]
    if not has_ragged(leader.placements):
        raise NoLocalWay("its first argument would have to be redistributed")
    if has_ragged_rows(leader.placements):
        raise NoLocalWay("it would number the elements of a strided view in another order: use the tensor that is viewed")
    return leader


def before_draw(op: Any, op_info: Any) -> None:
    """See to it that ranks draw from equal states.

    Raises:
        UnsupportedOperatorException: under torch.compile, which breaks the graph there, so that the op runs as it does
            without. In a graph, inductor would draw other numbers, and a rank that owns none would drop the op and its draw.
    """
    if TracingContext.try_get() is not None or get_proxy_mode() is not None:
        raise UnsupportedOperatorException(op)
    agree_on_state(op_info.compute_mesh, op_info.local_args[0].device.type)


def agree_on_state(mesh: DeviceMesh, device_type: str) -> None:
    """On accelerators, make torch's tracker, which gives all ranks rank 0's state, if there is none."""
    nothing_to_share = device_type in ("cpu", "meta")
    if nothing_to_share or dtensor_random._rng_tracker or _are_we_tracing():  # The last: fake tensors, which draw nothing.
        return
    if dtensor_random.is_rng_supported_mesh(mesh):
        dtensor_random._rng_tracker = dtensor_random.OffsetBasedRNGTracker(mesh)


_register_rules()
