"""Random ops on ragged DTensors: the result equals that of a single device, under any placements.

On a CPU, each rank goes through the draw of the whole global tensor in chunks and keeps the elements that it owns
(:mod:`_draw`). On a GPU, it computes these elements only (:mod:`_counter`). Values therefore depend only on the generator's
state, not on world size, mesh, units or placement. Afterwards, the generator has the state that a single device would have, and
replicas are equal. The rules communicate only to redistribute arguments.

On CPU, the cost is the time to draw the global tensor, and a chunk of at most 256 KiB. For ``bernoulli`` of probabilities a GPU
draws the whole tensor, as other accelerators do for all ops: one temporary tensor of the global size and dtype, and one for
the values. ``torch.distributed.tensor.rand`` and ``randn`` draw in the same way.

Ranks must start from equal states: call ``torch.manual_seed(0)``, for example, on every rank. If seeds differ, ranks keep
shards of different tensors, and replicas differ. On CPU nothing checks this, as for any DTensor, unless
:class:`torch_ragged.random.single_device` is on. On accelerators, DTensor gives all ranks rank 0's state before the first
random op on a DTensor. On meta tensors nothing is drawn.
"""

from __future__ import annotations

import functools
import hashlib
import math
import weakref
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor, UnsupportedOperatorException
from torch.distributed._functional_collectives import _are_we_tracing
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import _random as dtensor_random
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from torch_ragged._ranks.groups import device_of_messages
from torch_ragged.tensor._counter import draw_kept
from torch_ragged.tensor._cut_placement import cuts_of, has_own_rules
from torch_ragged.tensor._draw import draw_owned
from torch_ragged.tensor._exchange import paired_views
from torch_ragged.tensor._local_tensor import coordinate_of
from torch_ragged.tensor._ops._pointwise_ops import pointwise_rule
from torch_ragged.tensor._ops._rows import has_ragged_rows
from torch_ragged.tensor._ops._rules import NoLocalWay, OpCall, Sharding, Spec, decomposition, rule, tensor_leaves
from torch_ragged.tensor._ownership import owned, row_major
from torch_ragged.tensor._sampler import Sampler

__all__ = [
    "ROW_MAJOR",
    "Holding",
    "agree_on_state",
    "before_draw",
    "check_probabilities",
    "check_states",
    "check_multinomial",
    "draw",
    "draw_factory",
    "like_of_generator",
    "local_part_of",
    "random_rule",
    "rrelu_rule",
    "scope",
    "stop_graph",
    "stride_of_like",
]

_aten = torch.ops.aten

# Outputs have the shape of the first argument. Samplers overwrite it, factories read its shape, the last ones read its values.
_RANDOM_SAMPLERS = "normal_ uniform_ exponential_ log_normal_ geometric_ cauchy_ random_ bernoulli_ normal_functional".split()
_FACTORIES = "rand_like randn_like randint_like".split()
_RANDOM_OF_VALUES = "bernoulli native_dropout".split()
_OF_PROBABILITIES = (_aten.bernoulli.default, _aten.bernoulli.Tensor, _aten.bernoulli_.Tensor)  # In the last argument.
ROW_MAJOR = (_aten.bernoulli.default, _aten.bernoulli.p)
"""Ops whose result is always contiguous. Other ops keep the strides of their argument."""


def _register_rules() -> None:
    """Register the rules of all random ops, for all overloads except those with ``out=``."""
    for name in _RANDOM_SAMPLERS + _FACTORIES + _RANDOM_OF_VALUES:
        packet = getattr(_aten, name)
        for op in (getattr(packet, overload) for overload in packet.overloads()):
            arguments = op._schema.arguments
            if any(argument.is_out for argument in arguments):
                continue
            if name in _FACTORIES and any(argument.name == "generator" for argument in arguments):
                decomposition(op)(like_of_generator)
            else:
                rule(op)(random_rule)
    rule(_aten.rrelu_with_noise.default)(rrelu_rule)


class Holding:
    """What this rank holds of a tensor under ``spec``, whose placements may be plain or ragged."""

    def __init__(self, spec: Spec) -> None:
        self.shape, mesh = tuple(spec.shape), spec.mesh
        here = coordinate_of(mesh)  # None on a rank outside of the mesh: it computes a spec, and holds nothing.
        coordinate = (0,) * mesh.ndim if here is None else here
        held = owned(self.shape, tuple(mesh.shape), cuts_of(spec.placements), coordinate)
        self.local_shape = held.local_shape
        self.boxes = () if here is None else tuple(box for box in held.boxes if box.numel)

    def keep(self, whole: torch.Tensor) -> torch.Tensor:
        """A new tensor: this rank's shard of ``whole``."""
        local = whole.new_empty(self.local_shape)
        for in_local, in_whole in paired_views(local, whole, self.boxes):
            in_local.copy_(in_whole)
        return local

    def spread(self, local: torch.Tensor) -> torch.Tensor:
        """A new global tensor with this rank's elements from ``local``, and zeros for all other elements."""
        whole = local.new_zeros(self.shape)
        for in_local, in_whole in paired_views(local.contiguous(), whole, self.boxes):
            in_whole.copy_(in_local)
        return whole


def local_part_of(whole: torch.Tensor, spec: Spec) -> torch.Tensor:
    """This rank's local tensor under ``spec``, of a global tensor that every rank has."""
    return Holding(spec).keep(whole)


def random_rule(call: OpCall) -> Sharding:
    """Draw in chunks and keep this rank's shard.

    Communicates only to redistribute a further tensor argument, such as a tensor of probabilities, with other placements. If a
    tensor of probabilities has a value outside of [0, 1], all ranks raise while single_device is on, by one all-reduce more;
    otherwise, only the rank that owns this value.

    Raises:
        NoLocalWay: the first argument is a Partial, is a strided view, or is not ragged.
    """
    leader, sharding = _leader_spec(call), pointwise_rule(call)
    positions = [i for i, arg in enumerate(call.args) if hasattr(arg, "placements")]
    cut = {i for i, (placements, _) in zip(positions, sharding.inputs) if placements == leader.placements}

    def run(*args: Any, **kwargs: Any) -> Any:
        holding = Holding(leader)
        if call.name in _FACTORIES:
            stride = stride_of_like(leader, kwargs)
            local = torch.empty_like(args[0], **{**kwargs, "memory_format": torch.contiguous_format})
            return draw_factory(call.name, holding, stride, local, args[1:])
        check_probabilities(call.op, leader, args, cut)
        return draw(call.op, holding, tuple(leader.tensor_meta.stride), args, kwargs, cut)

    return Sharding(sharding.inputs, sharding.outputs, run)


def check_probabilities(op: torch._ops.OpOverload, spec: Spec, args: Sequence[Any], cut: set[int]) -> None:
    """While single_device is on, ``bernoulli`` of probabilities that are cut: raise torch's error on all ranks, not on the rank
    alone that has the value.

    If the tensor is cut, this costs one all-reduce of a number per mesh dimension that cuts it.

    Raises:
        RuntimeError: a probability is not in [0, 1].
    """
    last = len(args) - 1
    if op in _OF_PROBABILITIES and (last in cut or not last):
        p = args[last]
        _raise_if_any(~((p >= 0) & (p <= 1)), "Expected p_in >= 0 && p_in <= 1 to be true, but got false", spec, op)


def check_multinomial(tensor: DTensor) -> None:
    """``multinomial`` without replacement, of rows that may be cut: raise torch's errors on all ranks. Costs as above.

    Raises:
        RuntimeError: a weight is no finite number of 0 or more, or those of a row are all 0.
    """
    weights, op = tensor._local_tensor, _aten.multinomial.default
    is_wrong = ~((weights >= 0) & (weights < math.inf))
    _raise_if_any(is_wrong, "probability tensor contains either `inf`, `nan` or element < 0", tensor._spec, op)
    is_empty = weights.sum(-1) == 0
    _raise_if_any(is_empty, "invalid multinomial distribution (sum of probabilities <= 0)", tensor._spec, op)


def _raise_if_any(is_wrong: torch.Tensor, text: str, spec: Spec, op: Any) -> None:
    """Raise on all ranks that hold a part of the tensor, before one of them draws."""
    if not scope.is_on or spec.mesh.get_coordinate() is None or is_wrong.is_meta or isinstance(is_wrong, FakeTensor):
        return
    dims = [dim for dim, placement in enumerate(spec.placements) if not placement.is_replicate() and not placement.is_partial()]
    if not dims and op is not _aten.multinomial.default:  # Each rank has all values: torch's op raises on all of them.
        return
    found = -is_wrong.any().to(torch.int64).reshape(1)
    for dim in dims:
        group = spec.mesh.get_group(dim)
        found = found.to(device_of_messages(group))
        dist.all_reduce(found, op=dist.ReduceOp.MIN, group=group)
    if found.item():
        raise RuntimeError(f"{op} on a DTensor: {text}")


def draw(
    op: torch._ops.OpOverload,
    holding: Holding,
    stride: Sequence[int],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    cut: set[int],
) -> Any:
    """The local results of a sampler (in place), ``normal_functional``, ``bernoulli`` or ``native_dropout``.

    Args:
        stride: of the global tensor that is drawn.
        args: the op's arguments, with local tensors.
        cut: the positions of the tensors among them that have the first one's layout.
    """
    name, local, generator = op._schema.name.removeprefix("aten::"), args[0], kwargs.get("generator")
    if name == "native_dropout":
        return _dropout(op, holding, stride, *args)
    new = functools.partial(torch.empty_like, local)
    if op in ROW_MAJOR:
        new, stride = functools.partial(new, memory_format=torch.contiguous_format), row_major(holding.shape)
    if name == "normal_functional":
        filled = new(), _aten.normal_.default, args[1:]
    elif name != "bernoulli":
        filled = local, op, args[1:]
    elif op is _aten.bernoulli.p:
        filled = new(), _aten.bernoulli_.float, args[1:]
    else:  # Of the probabilities in the last tensor.
        filled, cut = (new(), _aten.bernoulli_.Tensor, args[-1:]), {1} if len(args) == 1 else cut
    result, sample, rest = filled
    values = [value for position, value in enumerate(rest, 1) if position in cut]
    fixed = [] if values else rest  # No sampler has both.
    sampler = Sampler(sample, tuple(fixed), result.dtype, generator)
    draw_owned(sampler, holding.shape, stride, holding.boxes, result, values)
    return result


def _dropout(
    op: torch._ops.OpOverload, holding: Holding, stride: Sequence[int], local: torch.Tensor, p: float, train: bool | None
) -> Any:
    """``native_dropout``: a mask, then two products, rounded as one device rounds them."""
    is_random = train is not False and (local.device.type == "cpu" or p != 1)
    if not is_random or not math.prod(holding.shape) or local.is_meta:
        return op(local, p, train)
    mask = torch.empty_like(local, dtype=torch.bool)
    if local.device.type != "cpu":
        factor = draw_kept(p, local.dtype, holding.shape, stride, holding.boxes, mask)
        if factor is None:
            return tuple(map(holding.keep, op(holding.spread(local), p, train)))
        return local.mul(mask).mul_(factor), mask
    draw(_aten.bernoulli_.float, holding, stride, (mask, 1.0 - p), {}, set())
    scale = 1.0 / (1.0 - p) if p < 1.0 else 0.0
    return local.mul(mask.to(local.dtype).mul_(scale)), mask


def stride_of_like(spec: Spec, options: Mapping[str, Any]) -> tuple[int, ...]:
    """The global stride that ``empty_like`` gives to a tensor with ``options``: the order in which a single device draws."""
    given = torch.empty_strided(tuple(spec.shape), tuple(spec.tensor_meta.stride), device="meta")
    return torch.empty_like(given, memory_format=options.get("memory_format") or torch.preserve_format).stride()


def draw_factory(
    name: str, holding: Holding, stride: Sequence[int], local: torch.Tensor, bounds: Sequence[Any], generator: Any = None
) -> torch.Tensor:
    """Fill ``local`` as ``rand_like``, ``randn_like`` or ``randint_like`` (of ``bounds``) do."""
    if name == "randint_like":
        low, high = bounds if len(bounds) == 2 else (0, bounds[0])
        args = (local, int(low), int(high))
        return draw(getattr(_aten.random_, "from"), holding, stride, args, {"generator": generator}, set())
    op = _aten.uniform_.default if name == "rand_like" else _aten.normal_.default
    return draw(op, holding, stride, (local,), {"generator": generator}, set())


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
    leader, sharding = _leader_spec(call), pointwise_rule(call)
    noise_spec = tensor_leaves(call)[1]
    if noise_spec.placements != leader.placements:
        raise NoLocalWay("the noise that it writes must have the placements of its argument")
    whole = Holding(leader)

    def run(values: torch.Tensor, noise: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        whole_noise = noise.new_empty(whole.shape)
        result = call.op(values, whole_noise, *args, **kwargs)
        noise.copy_(whole.keep(whole_noise))
        return whole.keep(result)

    return Sharding([((Replicate(),) * leader.mesh.ndim, None), sharding.inputs[1]], sharding.outputs, run)


def _leader_spec(call: OpCall) -> Spec:
    """The spec of the first tensor argument: one number per element of it is drawn.

    Raises:
        NoLocalWay: it is not ragged, or it is a strided view.
    """
    leader = tensor_leaves(call)[0]
    if not has_own_rules(leader.placements):
        raise NoLocalWay("its first argument would have to be redistributed")
    if has_ragged_rows(leader.placements):
        raise NoLocalWay("it would number the elements of a strided view in another order: use the tensor that is viewed")
    return leader


def before_draw(op: Any, op_info: Any) -> None:
    """Make ranks draw from equal states. Called before every random op on a ragged DTensor."""
    stop_graph(op)
    device = op_info.local_args[0].device
    agree_on_state(op_info.compute_mesh, device.type)
    if device.type != "meta" and not isinstance(op_info.local_args[0], FakeTensor):
        check_states(op_info.compute_mesh, device, op_info.local_kwargs.get("generator"))


def stop_graph(op: Any) -> None:
    """Break the graph under torch.compile; the op then runs eagerly.

    In a graph, inductor would draw other numbers. Also, a rank that owns no element would drop the op, and its generator would
    get another state than those of the other ranks.

    Raises:
        UnsupportedOperatorException: torch traces.
    """
    if TracingContext.try_get() is not None or get_proxy_mode() is not None:
        raise UnsupportedOperatorException(op)


def agree_on_state(mesh: DeviceMesh, device_type: str) -> None:
    """On accelerators, create DTensor's random tracker if it does not exist. It broadcasts rank 0's state to all ranks."""
    nothing_to_share = device_type in ("cpu", "meta")
    if nothing_to_share or dtensor_random._rng_tracker or _are_we_tracing():  # Fake tensors draw nothing.
        return
    if dtensor_random.is_rng_supported_mesh(mesh):
        dtensor_random._rng_tracker = dtensor_random.OffsetBasedRNGTracker(mesh)


class Scope:
    """Whether :class:`torch_ragged.random.single_device` is on, and how many draws were made since then.

    ``default`` has meshes with device types, ``given`` has the meshes of each generator of a user. A generator is not known by
    its address: another one may get it, on some ranks only.

    Attributes:
        is_compared: a model of a plan runs forward: ranks compare the generators at its calls.
    """

    def __init__(self) -> None:
        self.is_on = self.is_compared = False
        self.default: dict[tuple[DeviceMesh, str], int] = {}
        self.given: MutableMapping[torch.Generator, dict[DeviceMesh, int]] = {}
        self.clear()

    def has_drawn(self, mesh: DeviceMesh) -> bool:
        """Whether a default generator has drawn for DTensors on ``mesh``."""
        return any(each == mesh for each, _ in self.default)

    def clear(self) -> None:
        self.default, self.given = {}, weakref.WeakKeyDictionary() if _HAS_WEAK_GENERATORS else {}


def _has_weak_generators() -> bool:
    try:
        weakref.ref(torch.Generator())
    except TypeError:  # 2.11: a generator is then kept as long as single_device is on.
        return False
    return True


_HAS_WEAK_GENERATORS = _has_weak_generators()
scope = Scope()
_FIRST, _EVERY = 8, 16


def check_states(mesh: DeviceMesh, device: torch.device, generator: torch.Generator | None) -> None:
    """While single_device is on: raise on all ranks of ``mesh`` if their generators differ.

    The first 8 draws of a generator on a mesh compare its states, then every 16th one, and each one without gradients, as those
    of ``nn.init``. In a call of a plan's model, the first one is enough: the calls compare default generators themselves.

    Raises:
        ValueError: generators have different states; the error names two ranks and their seeds.
    """
    if not scope.is_on or mesh.get_coordinate() is None:
        return
    draws: Any = scope.default if generator is None else scope.given.setdefault(generator, {})
    key = (mesh, device.type) if generator is None else mesh
    count = draws.get(key, 0)
    if count and scope.is_compared and generator is None:
        return
    if count < _FIRST or count % _EVERY == 0 or not torch.is_grad_enabled():
        _compare_states(mesh, device, generator)
    draws[key] = count + 1


def _compare_states(mesh: DeviceMesh, device: torch.device, generator: torch.Generator | None) -> None:
    state, seed = _state_of(device, generator)
    digest = int.from_bytes(hashlib.sha256(state.numpy().tobytes()).digest()[:7], "big")
    groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]
    # The minimum of the negatives gives the largest digest. One dimension after the other carries it to all ranks.
    bounds = torch.tensor([digest, -digest], device=device_of_messages(groups[0]))
    for group in groups:
        dist.all_reduce(bounds, op=dist.ReduceOp.MIN, group=group)
    lowest, negative = bounds.tolist()
    if lowest != -negative:
        raise ValueError(
            "a random op under torch_ragged.random.single_device needs the same generator on all ranks of the mesh: "
            f"{_two_states(groups, digest, seed)}: call torch.manual_seed with one seed on all ranks, and draw equally on all "
            "of them"
        )


def _two_states(groups: Sequence[dist.ProcessGroup], digest: int, seed: int) -> str:
    """Two ranks whose states differ. All ranks call it."""
    states = {dist.get_rank(): (digest, seed)}
    for group in groups:
        received: list[dict[int, tuple[int, int]]] = [{}] * group.size()
        dist.all_gather_object(received, states, group=group)
        states = {rank: state for part in received for rank, state in part.items()}
    first = min(states)
    other = next(rank for rank in sorted(states) if states[rank] != states[first])
    seeds = ", ".join(f"rank {rank} has a generator of seed {states[rank][1]}" for rank in (first, other))
    return seeds if states[first][1] != states[other][1] else f"{seeds}, and one of them has drawn more numbers"


def _state_of(device: torch.device, generator: torch.Generator | None) -> tuple[torch.Tensor, int]:
    """The state of a generator, or of the device's default one, and its seed."""
    if generator is not None:
        return generator.get_state(), generator.initial_seed()
    if device.type == "cpu":
        return torch.get_rng_state(), torch.initial_seed()
    module = torch.get_device_module(device)
    return module.get_rng_state(device), module.initial_seed()


_register_rules()
