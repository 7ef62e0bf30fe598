"""The plans that models of transformers carry, ``tp_plan`` and ``fsdp_plan``, as paths and placements.

It must not import transformers, or know the rules of a plan: ``Plan.from_transformers`` makes rules of what it returns.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, Optional

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from torch_ragged.spmd._paths import WRAPPED, with_adapters
from torch_ragged.spmd._text import path_text
from torch_ragged.tensor.interleaved_placement_types import InterleavedShard

__all__ = ["batch_of", "shards_of", "units_of"]

_Cut = Callable[[int], Optional[Placement]]
"""The placement of a parameter with so many dimensions; None if the style leaves it as it is."""


def _unsharded(ndim: int) -> Optional[Placement]:
    return None


def _columnwise(ndim: int) -> Optional[Placement]:
    return Shard(max(ndim - 2, 0))  # Of (out, in), (experts, out, in), and of a bias.


def _rowwise(ndim: int) -> Optional[Placement]:
    return Shard(ndim - 1) if ndim > 1 else None  # A bias is added once.


def _packed_columns(ndim: int) -> Optional[Placement]:
    return InterleavedShard(max(ndim - 2, 0), 2)


def _packed_rows(ndim: int) -> Optional[Placement]:
    return InterleavedShard(ndim - 1, 2) if ndim > 1 else None


# Each style: how parameters are cut, and the placements of what enters and leaves the module, if the style says so. Styles that
# repair gradients or sums of local tensors say nothing here: DTensor knows which values are sums.
_STYLES: dict[str, tuple[_Cut, Optional[Placement], Optional[Placement]]] = {
    "colwise": (_columnwise, None, None),
    "colwise_rep": (_columnwise, None, Replicate()),
    "colwise_gather_output": (_columnwise, None, Replicate()),
    "rowwise": (_rowwise, None, Replicate()),
    "rowwise_rep": (_rowwise, None, Replicate()),
    "rowwise_split_input": (_rowwise, None, Replicate()),
    "packed_colwise": (_packed_columns, None, None),
    "packed_rowwise": (_packed_rows, None, None),
    "embedding_rowwise": (lambda ndim: Shard(0), None, Replicate()),
    "embedding_colwise": (lambda ndim: Shard(1), None, Replicate()),
    "sequence_parallel": (_unsharded, Shard(1), None),
    "all_reduce": (_unsharded, None, Replicate()),
    "moe_tp_experts": (_unsharded, None, Replicate()),
    "moe_identity_expert": (_unsharded, None, None),
    "replicate": (_unsharded, None, None),
    "replicated_with_grad_allreduce": (_unsharded, None, None),
    "mla_kv_a_proj": (_unsharded, None, None),
    "local_params": (_unsharded, None, None),
}
_NO_MEANING = {
    "grouped_gemm": "it gives each rank whole experts, and tokens must follow them",
    "ep_dispatch_experts": "it sends tokens to experts inside of forward, by an all-to-all of local tensors",
}
_WRAPPED = re.compile(rf"\.({WRAPPED})$")
_RESHARDS = {"free_full_weight": True, "keep_full_weight": False}
_BATCH = (
    "input_ids",
    "inputs_embeds",
    "attention_mask",
    "labels",
    "decoder_input_ids",
    "decoder_attention_mask",
    "pixel_values",
)


def shards_of(model: nn.Module) -> list[tuple[str, Placement]]:
    """Paths of parameters and activations, each with its placement, as ``tp_plan`` says.

    Raises:
        ValueError: the model has no ``tp_plan``, or one with a style that has no meaning for DTensors. All of them are named.
    """
    modules, params = dict(model.named_modules()), dict(model.named_parameters(remove_duplicate=False))
    found: list[tuple[str, Placement]] = []
    problems: list[str] = []
    for name, style in _plan_of(model, "tp_plan").items():
        path = _path(name)
        named_modules = {each: module for each, module in modules.items() if re.fullmatch(path, each)}
        own = {
            each: param
            for each, param in params.items()
            if re.fullmatch(path, each) or _WRAPPED.sub("", each.rpartition(".")[0]) in named_modules
        }
        if not named_modules and not own:
            continue  # The plan is for all configs of a class; this model has no such part.
        if style not in _STYLES:
            problems.append(_problem(name, style, path))
            continue
        cut, before, after = _STYLES[style]
        found += _cuts_of_entry(path, own, cut)
        if named_modules:
            sides = (("in", before), ("out", after))
            found += [(rf"{path}\.<{side}>", placement) for side, placement in sides if placement is not None]
    if problems:
        raise ValueError(f"the tp_plan of {type(model).__name__} cannot be read:\n" + "\n".join(problems))
    return found


def units_of(model: nn.Module) -> list[tuple[str, bool]]:
    """Paths of modules that are units, as ``fsdp_plan`` says, each with ``reshard_after_forward``.

    Modules that share a parameter with others make no unit: their parameters belong to the unit of the root.

    Raises:
        ValueError: the model has no ``fsdp_plan``, or one with an unknown style.
    """
    names: dict[torch.Tensor, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    tied = [each for each in names.values() if len(each) > 1]
    found = []
    for name, style in _plan_of(model, "fsdp_plan").items():
        if style not in _RESHARDS:
            raise ValueError(
                f"the fsdp_plan of {type(model).__name__} has the style {style!r} for {name}: the styles are "
                f"{', '.join(_RESHARDS)}. Leave fsdp out, and add plan.unit({path_text(_path(name))}, ...)"
            )
        path = _path(name)
        modules = [each for each, _ in model.named_modules() if re.fullmatch(path, each)]
        shares = any(
            any(each.startswith(f"{module}.") for each in group) and not all(each.startswith(f"{module}.") for each in group)
            for module in modules
            for group in tied
        )
        if modules and not shares:
            found.append((path, _RESHARDS[style]))
    return found


def batch_of(model: nn.Module) -> list[str]:
    """Paths of the arguments of ``forward`` whose first dimension is the batch."""
    takes = inspect.signature(model.forward).parameters
    return [f"<in:{name}>" for name in _BATCH if name in takes]


def _plan_of(model: nn.Module, name: str) -> Mapping[str, str]:
    """The plan that the model carries. Versions that do not collect it have a part in the config, for the base model."""
    plan: Any = getattr(model, name, None)
    if plan is None:
        prefix = getattr(model, "base_model_prefix", "")
        prefix = f"{prefix}." if prefix and hasattr(model, prefix) else ""
        base = getattr(getattr(model, "config", None), f"base_model_{name}", None) or {}
        plan = {**{f"{prefix}{each}": style for each, style in base.items()}, **(getattr(model, f"_{name}", None) or {})}
    if not plan:
        raise ValueError(
            f"{type(model).__name__} has no {name}: take a plan of torch_ragged.spmd.zoo, or write one with Plan()"
        )
    return plan


def _path(name: str) -> str:
    """The regular expression of a name in which ``*`` is the number of a layer."""
    return r"\d+".join([re.escape(part) for part in name.split("*")])


def _cuts_of_entry(path: str, params: Mapping[str, torch.Tensor], cut: _Cut) -> list[tuple[str, Placement]]:
    """The cuts of the parameters of an entry: one path for those that are cut alike."""
    alike: dict[Placement, dict[str, None]] = {}
    is_wrapped = False
    for name, param in params.items():
        placement = cut(param.ndim)
        if placement is not None:
            module, _, leaf = name.rpartition(".")
            is_wrapped = is_wrapped or _WRAPPED.search(module) is not None
            alike.setdefault(placement, {})["" if re.fullmatch(path, name) else leaf] = None
    found = []
    for placement, leaves in alike.items():
        names = [re.escape(leaf) for leaf in leaves if leaf]
        end = names[0] if len(names) == 1 else f"({'|'.join(names)})"
        named = with_adapters(path, end, placement.dim) if is_wrapped else rf"{path}\.{end}"  # type: ignore[attr-defined]
        found.append((named if names else path, placement))
    return found


def _problem(name: str, style: str, path: str) -> str:
    if style in _NO_MEANING:
        return (
            f"  {name} has the style {style!r}: {_NO_MEANING[style]}, which has no meaning for DTensors. Take it out of "
            "tp_plan, and cut inside of each expert: style 'packed_colwise' for gate_up_proj, 'rowwise' for down_proj and "
            "'moe_tp_experts' for the experts"
        )
    weight = path_text(rf"{path}\.weight")
    return (
        f"  {name} has the unknown style {style!r}. Take it out of tp_plan, and add what it means to the plan, such as "
        f'plan.shard({weight}, Shard(0), "tp"). Known styles are {", ".join(_STYLES)}'
    )
