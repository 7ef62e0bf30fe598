"""The steps of ``fully_shard``: find parameters, plan groups, make groups. Only the last step allocates memory."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, Optional, Union

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import Shard

from torch_ragged.fsdp.core._dormant_group import DormantGroup
from torch_ragged.fsdp.core._fsdp_api import Offload
from torch_ragged.fsdp.core._fsdp_param import Distribution, FoundParam, GroupPlan, has_extension
from torch_ragged.fsdp.core._fsdp_param_group import FSDPParamGroup
from torch_ragged.fsdp.core._mesh import DataParallelMesh
from torch_ragged.fsdp.core.encodings._borrowed import BorrowedEncoding
from torch_ragged.fsdp.core.encodings._contiguous import ContiguousEncoding
from torch_ragged.fsdp.core.encodings._float8 import Float8Encoding, Float8Policy
from torch_ragged.fsdp.core.encodings._float8_planes import PlanesEncoding
from torch_ragged.fsdp.core.encodings._mapped import MappedShards
from torch_ragged.fsdp.core.encodings._plain import Encoding, Shards
from torch_ragged.fsdp.core.encodings._tensor_types import TypeEncoding, TypeShards, TypeStandIn
from torch_ragged.fsdp.layout._advice import PADDING_LIMIT
from torch_ragged.fsdp.layout._buffer_layout import BufferLayout, TensorSpec
from torch_ragged.fsdp.layout._planner import plan_layout
from torch_ragged.fsdp.layout._rows_layout import RowsLayout, rows_layout
from torch_ragged.fsdp.layout._weighted import check_weights
from torch_ragged.granularity import Granularity, GroupPolicy, OrigParamPolicy, elements, rows
from torch_ragged.tensor.placement_types import block_split, is_block_shard

__all__ = ["RegisteredNames", "ShardPlacementFn", "find_params", "layout_of", "make_group", "plan_groups"]

RegisteredNames = list[tuple[nn.Module, str]]
ShardPlacementFn = Callable[[nn.Parameter], Optional[Union[Shard, Granularity, Any]]]
"""parameter -> ``Shard``, torch's ``BlockShard``, a granularity, FSDP2's result with ``placement`` and ``mesh_info``, None."""

_SHARD_ALIGNMENT_BYTES = 128
_logger = logging.getLogger("torch_ragged.fsdp")


def find_params(
    modules: Sequence[nn.Module], ignored: set[nn.Parameter], is_managed: Callable[[nn.Module], bool]
) -> dict[str, tuple[nn.Parameter, RegisteredNames]]:
    """Each parameter under ``modules``, by its first name, with all its registered names. Inner managed modules are skipped."""
    names: dict[nn.Parameter, str] = {}
    found: dict[str, tuple[nn.Parameter, RegisteredNames]] = {}

    def visit(prefix: str, module: nn.Module) -> None:
        for name, param in module._parameters.items():
            if param is None or param in ignored:
                continue
            fqn = names.setdefault(param, f"{prefix}{name}")
            _, registered = found.setdefault(fqn, (param, []))
            if (module, name) not in registered:
                registered.append((module, name))
        for name, child in module.named_children():
            if child not in modules and not is_managed(child):
                visit(f"{prefix}{name}.", child)

    for index, module in enumerate(modules):
        visit(f"{index}." if len(modules) > 1 else "", module)
    return found


def plan_groups(
    found: dict[str, tuple[nn.Parameter, RegisteredNames]],
    dp: DataParallelMesh,
    mp_policy: MixedPrecisionPolicy,
    offload: OffloadPolicy,
    policy: OrigParamPolicy | None,
    shard_placement_fn: ShardPlacementFn | None,
    weights: Sequence[int] | None = None,
) -> list[GroupPlan]:
    """One plan for each mesh, dtype and compute dtype.

    Parameters whose tensor type has its own all-gather have plans of their own, and so has each parameter placed as ``Shard``.

    Raises:
        ValueError, TypeError: as in :func:`fully_shard`.
    """
    buckets: dict[Any, list[tuple[FoundParam, Granularity]]] = {}
    meshes: dict[Any, DataParallelMesh] = {}
    unquantized: dict[str, list[str]] = {}  # Names of matrices, by why they are not quantized.
    for fqn, (param, registered) in found.items():
        cut, mesh = _cut_of(fqn, param, dp, policy, shard_placement_fn)
        if isinstance(mp_policy, Float8Policy) and policy is shard_placement_fn is None:
            cut = mp_policy.default_granularity(param, registered)
        is_typed = has_extension(param)
        if is_typed:  # Shard(0): FSDP2's placement of parameters whose tensor type has its own all-gather.
            if (isinstance(cut, Shard) and cut.dim != 0) or not param.ndim:
                why = f": shard_placement_fn returned {cut}, return Shard(0) or None" if param.ndim else ": it has no rows"
                raise ValueError(
                    f"{fqn} of shape {tuple(param.shape)} is a {type(param).__name__} with fsdp_pre_all_gather, whose rows are "
                    f"sharded{why}"
                )
            if isinstance(offload, Offload) and offload.parameters_folder is not None:
                raise ValueError(
                    f"{fqn} is a {type(param).__name__} with fsdp_pre_all_gather, which keeps its shard itself, and "
                    'Offload(parameters="files") cannot keep it: give Offload(parameters=True) for its module'
                )
            cut = Shard(0)
        dtype = _param_dtype(fqn, param, mp_policy)
        shard_dim = cut.dim if isinstance(cut, Shard) else None
        one = FoundParam(fqn, registered, param, Distribution(fqn, param, mesh, shard_dim))
        tile, why = _tile_of(one, cut, dtype or param.dtype, mp_policy)
        if why and param.numel() and mp_policy.takes(param, registered):  # type: ignore[attr-defined]
            unquantized.setdefault(why, []).append(fqn)
        apart = is_typed or (fqn if shard_dim is not None else None)
        key = (mesh.key, param.dtype, dtype, param.is_meta, apart, tile)
        meshes[key] = mesh
        buckets.setdefault(key, []).append((one, elements() if isinstance(cut, Shard) else cut))
    for why, names in unquantized.items():
        listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        level = logging.WARNING if dist.get_rank() == 0 else logging.DEBUG
        _logger.log(level, f"{type(mp_policy).__name__} has no effect on {listed}: {why}")
    plans = []
    for key, members in buckets.items():
        params, dp, tile = [param for param, _ in members], meshes[key], key[-1]
        reduce_dtype = mp_policy.reduce_dtype if params[0].value.dtype.is_floating_point else None
        sizes = [dtype.itemsize for dtype in (key[1], key[2], reduce_dtype) if dtype is not None]
        alignment = max(1, _SHARD_ALIGNMENT_BYTES // (min(sizes) if tile is None else 1))
        if tile is not None and isinstance(mp_policy, Float8Policy):
            alignment *= mp_policy.planes.per_byte
        specs = [param.distribution.tensor_spec(granularity) for param, granularity in members]
        if weights is not None:
            _check_weighted(params[0], weights, dp.ranks, policy, tile)
        if has_extension(params[0].value):
            layout: BufferLayout = rows_layout([param.distribution.rows_spec() for param in params], dp.ranks)
        elif isinstance(policy, GroupPolicy) and params[0].distribution.shard_dim is None:
            plan = functools.partial(_planned, members, dp.ranks, alignment)
            layout = policy.choose([(param.fqn, param.value) for param in params], dp.ranks, plan)
        else:
            layout = layout_of(params[0].distribution, specs, dp.ranks, alignment, weights)
        plans.append(GroupPlan(params, dp, layout, key[2], reduce_dtype, offload, mp_policy, tile))
    return plans


def _check_weighted(
    first: FoundParam, weights: Sequence[int], ranks: int, policy: OrigParamPolicy | None, tile: tuple[int, int] | None
) -> None:
    """Raise if parameters as the ``first`` one cannot be in shards of ``weights``.

    Raises:
        ValueError: weights are not one per rank; or the parameters have equal shards always.
    """
    check_weights(weights, ranks)
    reasons = {
        "is placed as Shard": first.distribution.shard_dim is not None,
        "is of a type with its own all-gather": has_extension(first.value),
        "is all-gathered as float8": tile is not None,
        f"has the policy {type(policy).__name__}, which plans equal shards": isinstance(policy, GroupPolicy),
    }
    why = next((reason for reason, is_so in reasons.items() if is_so), None)
    if why is not None:
        raise ValueError(f"{first.fqn} {why}, which weights={weights!r} does not support: leave weights out")


def _planned(
    members: Sequence[tuple[FoundParam, Granularity]], ranks: int, alignment: int, chosen: Sequence[Granularity | None]
) -> BufferLayout:
    """The layout of parameters of ``chosen`` granularities; None: the one that the parameter has."""
    specs = [param.distribution.tensor_spec(choice or own) for (param, own), choice in zip(members, chosen, strict=True)]
    return plan_layout(specs, ranks, alignment)


def make_group(plan: GroupPlan) -> FSDPParamGroup:
    """The group of ``plan``, with its kind of shards and encoding. It has not registered its parameters yet."""
    layout, rank, first = plan.layout, plan.dp.rank, plan.params[0]
    with torch.inference_mode(False):  # Later steps train these parameters.
        if not plan.dp.is_member and not plan.runs_on_meta:
            return DormantGroup(plan, Shards(layout, rank), Encoding(layout, rank))
        if isinstance(layout, RowsLayout) and not plan.runs_on_meta:
            types = TypeEncoding(layout, rank, plan.params, plan.dp.shard_mesh, plan.mp_policy)
            return FSDPParamGroup(plan, TypeShards(layout, rank), types)
        folder = plan.parameters_folder
        shards = Shards(layout, rank) if folder is None else MappedShards(layout, rank, folder)
        if isinstance(layout, RowsLayout):
            encoding: Encoding = TypeStandIn(layout, rank)
        elif first.distribution.shard_dim:
            encoding = ContiguousEncoding(layout, rank, first.distribution)
        elif plan.tile is not None:
            policy = plan.mp_policy
            assert isinstance(policy, Float8Policy)
            if policy.weight_factory is None:
                encoding = Float8Encoding(layout, rank, plan.tile)
            else:
                encoding = PlanesEncoding(layout, rank, policy.weight_factory, policy.forms, policy.recomputes)
        elif layout.ranks == 1:
            encoding = BorrowedEncoding(layout, rank, shards)
        else:
            encoding = Encoding(layout, rank)
        return FSDPParamGroup(plan, shards, encoding)


def _tile_of(
    param: FoundParam, cut: Granularity | Shard, compute_dtype: torch.dtype, policy: MixedPrecisionPolicy
) -> tuple[tuple[int, int] | None, str]:
    """The tile of a parameter that is all-gathered as float8; or None and, under a policy of float8, why it is not."""
    if not isinstance(policy, Float8Policy):
        return None, ""
    if isinstance(cut, Shard):
        return None, f"{cut!r} cuts tiles: return a granularity from shard_placement_fn, or give orig_param_policy"
    spec = param.distribution.tensor_spec(cut)
    why = policy.why_plain(spec, param.value.dtype) or policy.why_plain(spec, compute_dtype)
    return (None, why) if why else (policy.tile, "")


def layout_of(
    first: Distribution, specs: Sequence[TensorSpec], ranks: int, alignment: int, weights: Sequence[int] | None = None
) -> BufferLayout:
    """The layout of parameters over ``ranks``: of ``specs`` or, if the ``first`` one is cut by ``Shard``, of this one alone.

    Args:
        alignment: in elements, so that the bytes of a shard are a multiple of 128 in every dtype.
        weights: one per rank, if shards are in proportion to them.
    """
    if first.shard_dim is not None:
        return first.even_layout(ranks)
    layout = plan_layout(specs, ranks, alignment, weights=weights)
    if layout.granularity_fraction > PADDING_LIMIT and dist.get_rank() == 0:
        padding, bound = 100 * layout.padding_fraction, 100 * layout.bound_fraction
        _logger.warning(
            f"{first.fqn} and {len(specs) - 1} more parameters on {ranks} ranks: {padding:.1f}% padding for their "
            f"granularity (at least {bound:.1f}%: {layout.forced_by}). advise(buffer_layouts(model)) suggests changes"
        )
    return layout


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
        dp, placement = DataParallelMesh.of_info(placement.mesh_info), placement.placement
    if placement is None:
        return granularity or elements(), dp
    if is_block_shard(placement):  # Its blocks stay whole; the planner chooses their owners, so that shards are equal.
        try:
            split = block_split(placement, param.shape)
        except ValueError as error:
            raise ValueError(f"shard_placement_fn for {fqn}: {error}") from error
        placement = elements() if split == param.ndim else rows(math.prod(param.shape[split:-1]))
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
