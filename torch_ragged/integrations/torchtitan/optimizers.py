"""The optimizers of ``torch_ragged.optim`` by their names in torchtitan's param groups, and two overrides that choose them.

::

    --override.imports torch_ragged.integrations.torchtitan.optimizers.muon
    --override.imports 'torch_ragged.integrations.torchtitan.optimizers.muon={"lr": 2e-3}'
    --override.imports torch_ragged.integrations.torchtitan.optimizers.adamw8bit

Their states are DTensors placed as the parameters, which torchtitan's checkpoints save and load at any number of ranks.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.config.override import derive, override

from torch_ragged import optim
from torch_ragged.optim._matrix_groups import MATRIX_NDIMS, kernels_of

__all__ = ["RaggedOptimizers", "adamw8bit", "muon"]

_OURS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    name: getattr(optim, name) for name in ("Adam8bit", "AdamW8bit", "Muon", "Shampoo", "SOAP")
}
_FOR_MATRICES = ("Muon", "Shampoo", "SOAP")


class RaggedOptimizers(OptimizersContainer):
    """torchtitan's container, whose param groups may also name ``Adam8bit``, ``AdamW8bit``, ``Muon``, ``Shampoo``, ``SOAP``.

    A pattern of ``Muon``, ``Shampoo`` or ``SOAP`` takes only matrices and stacks of matrices (experts), parameters of two to
    four dimensions. Other parameters that it matches, such as norms and biases, go to the next pattern.
    ``config.implementation`` is for torch's optimizers only.
    """

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        pass

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., torch.optim.Optimizer]:
        return _OURS.get(name) or OptimizersContainer._resolve_optimizer_factory(name)

    @staticmethod
    def _build_param_groups(
        model: nn.Module, param_group_configs: list[ParamGroupConfig], impl_kwargs: dict[str, Any]
    ) -> tuple[dict[str, list[dict[str, Any]]], dict[str, list[str]]]:
        exact = [_matrix_group(model, each) if each.optimizer_name in _FOR_MATRICES else each for each in param_group_configs]
        groups, _ = OptimizersContainer._build_param_groups(model, exact, impl_kwargs)
        patterns: dict[str, list[str]] = {}
        for each in param_group_configs:
            patterns.setdefault(each.optimizer_name, []).append(each.pattern)
            group = groups[each.optimizer_name][len(patterns[each.optimizer_name]) - 1]
            for key in impl_kwargs.keys() - each.optimizer_kwargs.keys() if each.optimizer_name in _OURS else ():
                del group[key]
        return groups, patterns


def _matrix_group(model: nn.Module, group: ParamGroupConfig) -> ParamGroupConfig:
    """``group``, with a pattern that matches only those of its parameters that may be matrices or stacks of matrices.

    Raises:
        ValueError: there are none.
    """
    pattern, kernels = re.compile(group.pattern), kernels_of(model)
    matrices = [
        (name, param) for name, param in model.named_parameters() if param.ndim in MATRIX_NDIMS and param not in kernels
    ]
    names = [name for name, _ in matrices if pattern.search(name)]
    if not names:
        raise ValueError(
            f"the pattern {group.pattern!r} of {group.optimizer_name} matches no matrix, which has two to four dimensions: "
            "give these parameters to AdamW, or correct the pattern"
        )
    return dataclasses.replace(group, pattern=f"^({'|'.join(map(re.escape, names))})$")


@override(target=OptimizersContainer.Config, exact=True, description="Muon for the matrices of layers")
def muon(config: OptimizersContainer.Config, **options: Any) -> OptimizersContainer.Config:
    """Muon trains the matrices of layers, experts too; the param groups of ``config`` train the rest.

    Args:
        config: of torchtitan, with an AdamW group.
        options: of :class:`torch_ragged.optim.Muon`. Learning rate and weight decay are by default those of the first group,
            with ``adjust_lr_fn="match_rms_adamw"``, which makes AdamW's learning rate fit.
    """
    first = config.param_groups[0].optimizer_kwargs
    given = {name: first[name] for name in ("lr", "weight_decay") if name in first}
    matrices = ParamGroupConfig(
        pattern=r"^layers\.",
        optimizer_name="Muon",
        optimizer_kwargs={**given, "adjust_lr_fn": "match_rms_adamw", **options},
    )
    return derive(config, RaggedOptimizers.Config, param_groups=[matrices, *config.param_groups])


@override(target=OptimizersContainer.Config, exact=True, description="AdamW with 8-bit moments")
def adamw8bit(config: OptimizersContainer.Config, **options: Any) -> OptimizersContainer.Config:
    """AdamW8bit in place of AdamW, and Adam8bit in place of Adam, with the options of ``config``.

    Args:
        config: of torchtitan.
        options: of :class:`torch_ragged.optim.AdamW8bit`, for all of its groups.
    """
    groups = []
    for each in config.param_groups:
        name = {"Adam": "Adam8bit", "AdamW": "AdamW8bit"}.get(each.optimizer_name, each.optimizer_name)
        kept = {key: value for key, value in each.optimizer_kwargs.items() if key not in ("fused", "foreach")}
        groups.append(dataclasses.replace(each, optimizer_name=name, optimizer_kwargs=kept))
    factory = {name: {**config.optimizer_factory_kwargs_by_name.get(name, {}), **options} for name in ("Adam8bit", "AdamW8bit")}
    by_name = {**config.optimizer_factory_kwargs_by_name, **factory}
    return derive(config, RaggedOptimizers.Config, param_groups=groups, optimizer_factory_kwargs_by_name=by_name)
