"""gradient_factors: how much one rank's gradient counts in ``.grad`` of each parameter. It changes no gradient."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Partial

from torch_ragged._ranks.agreement import agreement
from torch_ragged._ranks.groups import device_of, groups_of
from torch_ragged.fsdp._groups import module_states
from torch_ragged.fsdp.core._dbuffer import Borrowed, DBuffer
from torch_ragged.fsdp.core._fsdp_param_group import FSDPParamGroup

__all__ = ["GradientFactor", "GradientFactors", "gradient_factors"]

_CALL = "gradient_factors"


@dataclass(frozen=True)
class GradientFactor:
    """How the gradient of one parameter is made of those of the ranks.

    Attributes:
        name: of the parameter.
        summed_over: the mesh dimensions that gradients are summed over, as ``"replicas (2) x shards (4)"``.
        ranks: how many ranks these are; with ``SameBits``, pieces.
        divided_by: the number that the sum is divided by.
        factor: what one rank's gradient is multiplied by: the ``loss_scale`` over ``divided_by``.
        hook: whether a hook of ``set_all_reduce_hook`` changes the result further.
    """

    name: str
    summed_over: str
    ranks: int
    divided_by: float
    factor: float
    hook: bool = False

    @property
    def of_equal(self) -> float:
        """The gradient if each rank has a gradient of 1: 1.0 is a mean over ranks."""
        return self.ranks * self.factor


@dataclass(frozen=True)
class GradientFactors:
    """What :func:`gradient_factors` found. ``str`` is a table, in which parameters that differ in numbers only share a line."""

    factors: tuple[GradientFactor, ...]

    def __iter__(self) -> Iterator[GradientFactor]:
        return iter(self.factors)

    def __getitem__(self, name: str) -> GradientFactor:
        return next(each for each in self.factors if each.name == name)

    def __str__(self) -> str:
        lines: dict[tuple[str, ...], list[str]] = {}
        for each in self.factors:
            hook = "then a hook" if each.hook else ""
            cells = (each.summed_over, f"{each.divided_by:g}", f"{each.factor:g}", f"{each.of_equal:g}", hook)
            lines.setdefault((re.sub(r"\d+", "*", each.name), *cells), []).append(each.name)
        rows = [("parameter", "summed over", "divided by", "factor", "if each rank has 1", "")]
        rows += [(names[0] if len(names) == 1 else f"{name} ({len(names)})", *cells) for (name, *cells), names in lines.items()]
        widths = [max(map(len, column)) for column in zip(*rows)]
        return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def gradient_factors(model: nn.Module, *, loss_scale: float = 1.0, check: bool = False) -> GradientFactors:
    """Which ranks' gradients are summed for each parameter, and what the sum is divided by::

        print(gradient_factors(model, loss_scale=1 / micro_batches))
        # parameter             summed over  divided by  factor  if each rank has 1
        # *.dense.weight (2)    dp (4)       4           0.25    1
        # *.experts.weight (2)  edp (2)      2           0.5     1

    Factors should be equal: then each token counts once, for all parameters. Here they are not. Tokens of all 4 ranks reach the
    experts, and their gradients are twice as large as they should be: ``set_gradient_divide_factor(4)`` makes them right.

    With ``SameBits``, gradients are summed over the pieces of a step. Sums over dimensions of the model (tensor parallelism)
    are no part of this: DTensor makes them, and they divide by nothing.

    Args:
        model: a module that ``fully_shard`` or ``parallelize`` was called on, or one that holds such modules.
        loss_scale: what the program multiplies each loss by: 1 / micro-batches, or what :func:`token_scale` returns.
        check: whether to reduce a planted gradient of ones by each group's own collectives, and to compare it with the factor.
            ``.grad`` stays as it is, and a hook of ``set_all_reduce_hook`` is not called. All ranks call it, between steps.

    Collectives: none; with ``check``, an all-reduce of 24 bytes per process group, and those of one reduction of each group.

    Raises:
        ValueError: the model has no groups.
        RuntimeError: with ``check``, on all ranks: a reduction gave another factor, as a custom collective may; or gradients
            wait.
    """
    named = dict(_params_of(model))
    groups = list(dict.fromkeys(named.values()))
    factors = []
    for name, group in named.items():
        summed, ranks = _summed(group)
        divisor = group.settings.reduction.divisor or ranks
        if (pieces := group.collectives.pieces) is not None:
            summed, ranks, divisor = f"pieces ({pieces})", pieces, pieces
        has_hook = group.settings.reduce_hook is not None
        factors.append(GradientFactor(name, summed, ranks, float(divisor), loss_scale / divisor, has_hook))
    if check and groups:
        _check_planted(groups, {group: each.of_equal / loss_scale for group, each in zip(named.values(), factors)})
    return GradientFactors(tuple(factors))


def _params_of(model: nn.Module) -> Iterator[tuple[str, FSDPParamGroup]]:
    prefixes = {module: f"{prefix}." if prefix else "" for prefix, module in model.named_modules()}
    for state in module_states(model).values():
        for group in state.groups:
            for param in group.params if group.dp.is_member else ():
                module, name = param.registered_names[0]
                if param.requires_grad:
                    yield prefixes[module] + name, group


def _summed(group: FSDPParamGroup) -> tuple[str, int]:
    """The mesh dimensions of a group with their sizes, and the ranks of all."""
    mesh = group.dp.mesh
    names = mesh.mesh_dim_names or ("replicas", "shards")[-mesh.ndim :]
    return " x ".join(f"{name} ({size})" for name, size in zip(names, mesh.shape)), mesh.size()


def _check_planted(groups: list[FSDPParamGroup], expected: dict[FSDPParamGroup, float]) -> None:
    ranks = list(dict.fromkeys(each for group in groups for each in groups_of(group.dp.mesh)))
    device = device_of(groups[0].dp.mesh)
    with agreement(ranks, device, _CALL) as claim:
        for group in groups:
            if group.is_pending:
                raise RuntimeError(f"{_CALL}: {group.names} has gradients that are not in .grad yet: call it between steps")
        claim += [f"{group.names}: {expected[group]}" for group in groups]
    wrong = []
    for group in groups:  # In the order of the modules, on all ranks.
        like, buffer = group.sharded, group.grad_buffer
        ones = torch.ones(like.layout.numel, dtype=buffer.reduce_dtype, device=buffer.device)
        source = DBuffer(like.layout, Partial(), like.rank, ones.dtype, ones.device, pool=Borrowed(ones))
        with torch.no_grad():
            found = group.reduction.reduced_copy(source).flat
        # HIERARCHICAL's second step sends what the first one has divided, rounded to the wire.
        tolerance = 4 * max(torch.finfo(each).eps for each in (found.dtype, group.process_groups.wire or found.dtype))
        if not torch.allclose(found, torch.full_like(found, expected[group]), rtol=tolerance, atol=0):
            wrong.append(f"{group.names}: ones of all ranks became {found[:4].tolist()}, and not {expected[group]:g}")
    with agreement(ranks, device, _CALL) as claim:
        if wrong:
            raise RuntimeError(f"rank {dist.get_rank()}: {'; '.join(wrong)}")
        claim.append("as told")
