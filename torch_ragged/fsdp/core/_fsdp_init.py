"""The steps of ``fully_shard``: find parameters, plan groups, make groups. Only the last step allocates memory."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional, Union

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard

from torch_ragged._register._torch import fsdp2_keeps_wide_gradients
from torch_ragged.fsdp.core._fsdp_param import Distribution, FoundParam, InvalidArgument, has_extension
from torch_ragged.fsdp.core._fsdp_param_group import FSDPParamGroup
from torch_ragged.fsdp.core._kit import (
    SHARD_ALIGNMENT_BYTES,
    Draft,
    FeaturePart,
    GroupPlan,
    Kit,
    Need,
    PlainPart,
    Terms,
    check_pairs,
)
from torch_ragged.fsdp.core._mesh import DataParallelMesh
from torch_ragged.fsdp.core.encodings._contiguous import ShardPart
from torch_ragged.fsdp.core.encodings._tensor_types import TypePart
from torch_ragged.fsdp.layout._advice import PADDING_LIMIT
from torch_ragged.fsdp.layout._buffer_layout import BufferLayout, TensorSpec
from torch_ragged.fsdp.layout._planner import plan_layout
from torch_ragged.granularity import Granularity, GroupPolicy, OrigParamPolicy, elements

__all__ = [
    "CPUOffloadPart",
    "GroupPolicyPart",
    "RegisteredNames",
    "ShardPlacementFn",
    "find_params",
    "layout_of",
    "make_group",
    "part_of_dtensor",
    "plan_groups",
    "refuse_shared_memory",
]

RegisteredNames = list[tuple[nn.Module, str]]
ShardPlacementFn = Callable[[nn.Parameter], Optional[Union[Shard, Granularity, Any]]]
"""parameter -> ``Shard``, a granularity, FSDP2's result with ``placement`` and ``mesh_info``, None."""

_logger = logging.getLogger("torch_ragged.fsdp")


def find_params(
    modules: Sequence[nn.Module], ignored: set[nn.Parameter], is_managed: Callable[[nn.Module], object]
) -> dict[str, tuple[nn.Parameter, RegisteredNames]]:
    """Each parameter under ``modules``, by its first name, with all its registered names. Inner managed modules are skipped."""
    names: dict[nn.Parameter, str] = {}
    found: dict[str, tuple[nn.Parameter, RegisteredNames]] = {}

    def visit(prefix: str, module: nn.Module) -> None:
        for name, param in module._parameters.items():
            if param is None or param in ignored:
                continue
            # A tied parameter keeps its first name. The order of names, which ranks share, is that of the buffer.
            fqn = names.setdefault(param, f"{prefix}{name}")
            _, registered = found.setdefault(fqn, (param, []))
            if (module, name) not in registered:
                registered.append((module, name))
        for name, child in module.named_children():
            # What an earlier call has sharded is no part of this group. A module of the list is visited by itself.
            if child not in modules and not is_managed(child):
                visit(f"{prefix}{name}.", child)

    for index, module in enumerate(modules):
        visit(f"{index}." if len(modules) > 1 else "", module)
    refuse_shared_memory((fqn, param) for fqn, (param, _) in found.items())
    return found


def refuse_shared_memory(params: Iterable[tuple[str, nn.Parameter]], but_equal_views: bool = False) -> None:
    """Raise ``ValueError`` if two parameters have elements in common: their shards would train apart, in silence.

    With ``but_equal_views``, two that are the same view of one memory are legal.
    """
    found = []
    for fqn, param in params:
        if type(param) is nn.Parameter and type(param.data) is torch.Tensor and not param.is_meta and param.numel():
            reach = 1 + sum((size - 1) * stride for size, stride in zip(param.shape, param.stride()))
            start, view = param.data_ptr(), (tuple(param.shape), param.stride())
            found.append((str(param.device), start, start + reach * param.itemsize, view, fqn))
    found.sort()
    for (device, start, stop, view, fqn), (other_device, other_start, _, other_view, other) in zip(found, found[1:]):
        is_equal = but_equal_views and (start, view) == (other_start, other_view)
        if device == other_device and other_start < stop and not is_equal:
            raise InvalidArgument(
                f"{fqn} and {other} share memory, but are two parameters: tie them by one nn.Parameter in both modules, or "
                "give each its own memory, with .clone()"
            )


def plan_groups(
    found: dict[str, tuple[nn.Parameter, RegisteredNames]],
    dp: DataParallelMesh,
    parts: Sequence[FeaturePart],
    mp_policy: MixedPrecisionPolicy,
    policy: OrigParamPolicy | None,
    shard_placement_fn: ShardPlacementFn | None,
) -> list[GroupPlan]:
    """One plan for each mesh, dtype, compute dtype, and key of the ``parts``.

    Raises:
        ValueError, TypeError: as in :func:`fully_shard`.
    """
    buckets: dict[Any, _Bucket] = {}
    everything: list[FoundParam] = []
    for fqn, (param, registered) in found.items():
        cut: Granularity | Shard = elements()
        mesh = dp
        if policy is not None or shard_placement_fn is not None:
            # They run on each rank alone. Ranks compare what they have returned before anything changes.
            cut, mesh = _cut_of(fqn, param, dp, policy, shard_placement_fn)
        else:
            for part in reversed(parts):  # The first one decides.
                cut = part.default_granularity(param, registered) or cut
        kinds = _kinds_of(fqn, param, cut)
        if kinds:
            check_pairs([*kinds, *parts])
            cut = Shard(0) if isinstance(kinds[0], TypePart) else cut  # As FSDP2 places these parameters.
        shard_dim, granularity = (cut.dim, elements()) if isinstance(cut, Shard) else (None, cut)
        dtype, reading = _param_dtype(fqn, param, mp_policy), None
        for part in parts:
            reading = reading or part.read(fqn, param, mesh)
        distribution = Distribution(fqn, param, mesh, shard_dim, reading)
        one = FoundParam(fqn, registered, param, distribution, distribution.tensor_spec(granularity), dtype)
        # Not only dtypes and meshes keep parameters apart: one collective sends one encoding.
        key, mine = [mesh.key, param.dtype, dtype, param.is_meta], list[FeaturePart]()
        for part in (*kinds, *parts):
            value = part.key(one)
            if value is not None:
                mine.append(part.part_of(one))
                key += [] if value is True else [(type(part), value)]
        bucket = buckets.setdefault(tuple(key), _Bucket(mesh))
        bucket.params.append(one)
        bucket.specs.append(one.spec)
        for part in mine:  # Of those that parameters bring, one of each class.
            bucket.parts.setdefault(type(part) if part in kinds else id(part), part)
        everything.append(one)
    for part in parts:
        part.tell(everything)  # Once for each call, not for each buffer.
    plans = []
    for bucket in buckets.values():
        own, param_dtype = bucket.params[0].value.dtype, bucket.params[0].param_dtype
        # Integers do not train: they are all-gathered only.
        reduce_dtype = (mp_policy.reduce_dtype or _of_grad_dtypes(bucket.params)) if own.is_floating_point else None
        # Shards begin at a multiple of 128 bytes in all dtypes of their group, also in the narrowest one, as kernels and NCCL
        # like it.
        narrowest = min(own.itemsize, (param_dtype or own).itemsize, (reduce_dtype or own).itemsize)
        draft = Draft(bucket.params, bucket.specs, bucket.dp.ranks, max(1, SHARD_ALIGNMENT_BYTES // narrowest))
        mine = list(bucket.parts.values())
        plans.append(GroupPlan(draft.params, bucket.dp, layout_of(draft, mine), param_dtype, reduce_dtype, mp_policy, mine))
    return plans


@dataclass
class _Bucket:
    """Parameters that share a buffer and collectives, what the planner knows of them, and the parts that have an effect."""

    dp: DataParallelMesh
    params: list[FoundParam] = field(default_factory=list)
    specs: list[TensorSpec] = field(default_factory=list)
    parts: dict[Any, FeaturePart] = field(default_factory=dict)


def _kinds_of(fqn: str, param: nn.Parameter, cut: Granularity | Shard) -> list[FeaturePart]:
    """What a parameter brings itself: the parts of its tensor type and of its placements."""
    is_typed = has_extension(param)
    kinds: list[FeaturePart] = [TypePart(fqn, type(param).__name__)] if is_typed else []
    if is_typed and not param.ndim:
        raise ValueError(f"{fqn} of shape () is a {type(param).__name__} with fsdp_pre_all_gather, which has no rows to shard")
    if isinstance(cut, Shard) and not (is_typed and cut.dim == 0):
        kinds.append(ShardPart(fqn, cut.dim))
    return [*kinds, part_of_dtensor(fqn)] if isinstance(param, DTensor) else kinds


def part_of_dtensor(fqn: str) -> FeaturePart:
    """What a parameter brings that the model has distributed."""
    needs = {Need.IN_MESH: ": there, fully_shard takes plain parameters only"}
    return PlainPart(Terms(f"the DTensor {fqn} of tensor or expert parallelism", needs, breaks=(Need.MOVABLE,)))


def make_group(plan: GroupPlan, kit: Kit | None = None) -> FSDPParamGroup:
    """The group of ``plan``, which keeps nothing gathered if no ``kit`` says so. It has not registered its parameters yet."""
    with torch.inference_mode(False):  # Later steps train these parameters.
        kit = Kit(plan) if kit is None else kit
        return (kit.group_type or FSDPParamGroup)(plan, kit)


def layout_of(draft: Draft, parts: Sequence[FeaturePart]) -> BufferLayout:
    """The layout of a group: that of one of its ``parts``, or the planner's."""
    for part in parts:
        part.arrange(draft)
    if draft.layout is not None:  # A part has planned it, as that of rows or of weights.
        return draft.layout
    # Each rank plans by itself, from integers that ranks compare afterwards.
    layout = plan_layout(draft.specs, draft.ranks, draft.alignment, weights=draft.weights)
    if layout.granularity_fraction > PADDING_LIMIT and dist.get_rank() == 0:  # Once, not from a thousand ranks.
        padding, bound = 100 * layout.padding_fraction, 100 * layout.bound_fraction
        _logger.warning(
            f"{draft.params[0].fqn} and {len(draft.specs) - 1} more parameters on {draft.ranks} ranks: {padding:.1f}% padding "
            f"for their granularity (at least {bound:.1f}%: {layout.forced_by}). advise(buffer_layouts(model)) suggests changes"
        )
    return layout


@dataclass(frozen=True)
class CPUOffloadPart(FeaturePart):
    """FSDP2's ``CPUOffloadPolicy``."""

    pin_memory: bool

    def equip(self, kit: Kit) -> None:
        kit.offloads_params, kit.pins_memory = True, self.pin_memory


@dataclass(frozen=True)
class GroupPolicyPart(FeaturePart):
    """An ``orig_param_policy`` that chooses the layout of a whole buffer."""

    policy: GroupPolicy

    @property
    def terms(self) -> Terms:
        needs = {Need.EQUAL_SHARDS: ", because it plans equal shards: leave weights out"}
        return Terms(f"orig_param_policy={type(self.policy).__name__}", needs)

    def key(self, param: FoundParam) -> Hashable:
        # A parameter cut by ``Shard`` has a layout of its own.
        return True if param.distribution.shard_dim is None else None

    def arrange(self, draft: Draft) -> None:
        def planned(chosen: Sequence[Granularity | None]) -> BufferLayout:
            pairs = zip(draft.params, draft.specs, chosen, strict=True)
            specs = [own if choice is None else param.distribution.tensor_spec(choice) for param, own, choice in pairs]
            return plan_layout(specs, draft.ranks, draft.alignment)

        # The policy compares several layouts of the whole buffer, as Muon's: which rank then computes what depends on all of
        # them.
        draft.layout = self.policy.choose([(param.fqn, param.value) for param in draft.params], draft.ranks, planned)


def _cut_of(
    fqn: str, param: nn.Parameter, dp: DataParallelMesh, policy: OrigParamPolicy | None, fn: ShardPlacementFn | None
) -> tuple[Granularity | Shard, DataParallelMesh]:
    """The granularity or ``Shard`` of ``param``, and its mesh."""
    granularity = policy(fqn, param) if policy else None
    if granularity is not None and not isinstance(granularity, Granularity):
        raise TypeError(
            f"orig_param_policy({fqn!r}) returned {granularity!r}; expected elements(), rows(n), blocks(h, w), tensor(), "
            "segments(...) or None"
        )
    placement: Any = fn(param) if fn else None
    if hasattr(placement, "mesh_info"):  # torch's ShardPlacementResult, whose module is private
        # One parameter may have a mesh of its own, as experts over fewer ranks: it then has a buffer and collectives of its
        # own.
        dp, placement = DataParallelMesh.of_info(placement.mesh_info), placement.placement
    if placement is None:
        return granularity or elements(), dp
    if not isinstance(placement, (Shard, Granularity)):
        raise ValueError(
            f"Invalid shard_placement_fn result: {placement} for {fqn}; expected Shard(d), elements(), rows(n), blocks(h, w), "
            "tensor(), segments(...) or None"
        )
    if granularity is not None:
        raise ValueError(
            f"{fqn} gets {granularity.text} from orig_param_policy, {placement} from shard_placement_fn: return None from one"
        )
    return placement, dp


def _of_grad_dtypes(params: Sequence[FoundParam]) -> torch.dtype | None:
    """Where the policy has no ``reduce_dtype``: the dtype that holds all gradients, if the user has set a ``grad_dtype``."""
    own = params[0].value.dtype
    chosen = [param.value.grad_dtype for param in params if param.value.requires_grad]
    if all(dtype in (None, own) for dtype in chosen):  # None accepts gradients of any dtype.
        return None
    default = own if fsdp2_keeps_wide_gradients() else params[0].param_dtype or own
    return functools.reduce(torch.promote_types, [default if dtype in (None, own) else dtype for dtype in chosen])


def _param_dtype(fqn: str, param: nn.Parameter, mp_policy: MixedPrecisionPolicy) -> torch.dtype | None:
    """The compute dtype; None: the parameter's own dtype, as for complex parameters and for integers, which do not train."""
    if not param.dtype.is_floating_point:
        return None
    override = getattr(mp_policy, "param_dtype_override_fn", None)  # since torch 2.15
    chosen = override(param) if override is not None else None
    if chosen is not None and chosen not in (mp_policy.param_dtype, param.dtype):
        raise ValueError(
            f"param_dtype_override_fn returned {chosen} for {fqn} of {param.dtype}; expected None, param_dtype "
            f"({mp_policy.param_dtype}) or the parameter's own dtype"
        )
    return chosen or mp_policy.param_dtype
