"""Which parameters of a model are matrices, for optimizers that compute with whole matrices; AdamW trains the others.

It reads modules, names and shapes. It must not look at values or communicate: all ranks decide alike.
"""

from __future__ import annotations

import fnmatch
import math
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from torch import nn
from typing_extensions import Unpack  # Of torch.

__all__ = ["MATRIX_NDIMS", "MatrixDecision", "MatrixGroups", "check_segments", "kernels_of", "matrix_groups"]

MATRIX_NDIMS = (2, 3, 4)
"""Dimensions of a matrix, and of a stack: (experts, rows, columns), or (experts, 2, rows, columns) for gate and up in one."""

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_NORMS = (nn.LayerNorm, nn.RMSNorm)
_HAVE_MATRICES = (nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase)
"""Modules of torch of which each parameter of two dimensions is a matrix. Its name does not count."""

_UNKNOWN, _UNKNOWN_SHARE = ", of unknown use", 0.05

_Chosen = Iterable["nn.Module | nn.Parameter | str"]


@dataclass(frozen=True)
class MatrixDecision:
    """What :func:`matrix_groups` decided for a parameter.

    Attributes:
        name, shape: of the parameter.
        is_matrix: whether it is a matrix or a stack of matrices; otherwise AdamW trains it.
        why: the reason.
    """

    name: str
    shape: tuple[int, ...]
    is_matrix: bool
    why: str


class MatrixGroups(list[dict[str, Any]]):
    """The groups of :func:`matrix_groups`: a list, whose ``repr`` shows each decision.

    Attributes:
        decisions: one for each parameter, in the order of the model.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], decisions: Sequence[MatrixDecision]) -> None:
        super().__init__(groups)
        self.decisions = tuple(decisions)

    def __repr__(self) -> str:
        alike: dict[tuple[Any, ...], list[str]] = {}
        for each in self.decisions:  # Layers differ in numbers only: one line for all of them.
            key = re.sub(r"\d+", "*", each.name), each.shape, each.is_matrix, each.why
            alike.setdefault(key, []).append(each.name)
        rows = [
            ("matrix" if is_matrix else "AdamW", pattern if len(names) > 1 else names[0], f"{len(names)} x {shape}", why)
            for (pattern, shape, is_matrix, why), names in alike.items()
        ]
        widths = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
        lines = ["  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[3]]) for row in rows]
        return "\n  ".join([f"MatrixGroups: {len(self)} parameter groups", *lines])


class AdamWOptions(TypedDict, total=False):
    """Options of the group that AdamW trains. Those that are missing are the optimizer's own."""

    lr: float | torch.Tensor
    weight_decay: float
    betas: tuple[float, float]
    adamw_eps: float
    foreach: bool | None


def matrix_groups(
    model: nn.Module,
    *,
    adamw: _Chosen | nn.Module | nn.Parameter | str = (),
    matrices: _Chosen | nn.Module | nn.Parameter | str = (),
    segments: Mapping[str, tuple[Sequence[int], int]] | None = None,
    **adamw_options: Unpack[AdamWOptions],
) -> MatrixGroups:
    """Parameter groups for :class:`Muon`, :class:`Shampoo` and :class:`SOAP`: of matrices, and one that AdamW trains.

    ::

        groups = matrix_groups(model, adamw=["head"], matrices=["blocks.*.mixer.w1"], lr=3e-4)
        print(groups)                 # each parameter, whether it is a matrix, and why
        optimizer = Muon(groups, lr=0.02)

    The module that has a parameter decides:

    - Matrices: ``weight`` of two dimensions of ``nn.Linear`` and of other modules, and those of ``nn.MultiheadAttention``,
      ``nn.RNNBase`` and ``nn.RNNCellBase``. Stacks of matrices: the weight of ``nn.Bilinear``, and parameters of three or four
      dimensions of experts, whose last two are a matrix. The word "expert" in the name or in the class of the module says so,
      or its ``num_experts``, which is the first size.
    - AdamW: embeddings and what is tied to them, the module that ``get_output_embeddings()`` of a Hugging Face model returns,
      kernels of convolutions, norms, biases, single rows and columns. Also all other parameters that a module registers under
      a name of its own, such as position embeddings, class tokens, bias tables and decays: their use is not known.

    ``adamw`` and ``matrices`` overrule this. An output head without ``get_output_embeddings()`` is a Linear as all others: name
    it in ``adamw``.

    Args:
        model: the model with the parameters. Call this function after ``fully_shard``.
        adamw: modules, parameters, or their names, for AdamW. A name may have ``*`` and ``?``.
        matrices: in the same way, further parameters of two dimensions (a matrix), three or four (a stack of matrices). Of a
            module, those that have so many.
        segments: by name, the sizes of the matrices that a fused weight has side by side, and the dimension along which they
            lie: ``{"attention.qkv.weight": ((4096, 1024, 1024), 0)}``. :class:`Muon` steps each as a matrix of its own. A model
            that a plan has distributed has them in ``model.plan_ir.segments``.
        adamw_options: options of the AdamW group: ``lr``, ``weight_decay``, ``betas``, ``adamw_eps``, ``foreach``.

    Returns:
        the groups that have parameters, as dicts for the constructor of the optimizer.

    Warns:
        UserWarning: parameters of two or three dimensions "of unknown use" have more than 5 % of the model's elements, as
            experts of a class without the word.

    Raises:
        TypeError: ``model`` is no module; ``adamw`` or ``matrices`` has something other than modules, parameters and names; or
            the value of ``segments`` is not a pair of sizes and a dimension.
        ValueError: a name is of no parameter or module of ``model``; a parameter is in ``adamw`` and in ``matrices``; or one in
            ``matrices`` does not have two to four dimensions.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"matrix_groups expects the model, an nn.Module, got {type(model).__name__}: pass model, not model.parameters()"
        )
    # All names of tied parameters: the user may give any of them.
    named = dict(model.named_parameters(remove_duplicate=False))
    fused = _fused_weights(model, segments or {}, named)
    given = {param: "given in segments" for param in fused}
    given.update(dict.fromkeys(_chosen(model, "matrices", matrices, named), "given in matrices"))
    apart = _chosen(model, "adamw", adamw, named)
    names: dict[nn.Parameter, str] = {}
    for name, param in named.items():
        # The first name in the order of the model, as in named_parameters().
        names.setdefault(param, name)
    if both := [names[param] for param in apart if given.get(param) == "given in matrices"]:
        raise ValueError(f"matrix_groups has {', '.join(both)} in adamw and in matrices: name each parameter in one of them")
    # By parameters: a head that is tied to an embedding is the same parameter.
    heads = {param for module in _output_embeddings(model) for param in module.parameters()}
    reasons: dict[nn.Parameter, tuple[bool, str]] = {}
    for prefix, module in model.named_modules():
        for attribute, owned in module._parameters.items():
            if owned is None:
                continue
            found = _decide(module, attribute, f"{prefix}.{attribute}", owned)
            if owned not in reasons or not found[0]:  # Tied: a matrix if each module that has it says so.
                reasons[owned] = found
    decisions: list[MatrixDecision] = []
    alike: dict[Any, list[nn.Parameter]] = {None: []}  # Matrices, by their segments.
    rest: list[nn.Parameter] = []
    for param, name in names.items():
        is_matrix, why = reasons[param]
        if is_matrix and param in heads:
            is_matrix, why = False, "the output embeddings"
        if param in apart:
            is_matrix, why = False, "given in adamw"
        elif param in given:
            is_matrix, why = True, given[param]
        decisions.append(MatrixDecision(name, tuple(param.shape), is_matrix, why))
        (alike.setdefault(fused.get(param), []) if is_matrix else rest).append(param)
    # In the order of the model, which ranks have in common. Optimizers rely on it: their plans count parameters.
    groups: list[dict[str, Any]] = [
        {"params": members} if each is None else {"params": members, "segments": each} for each, members in alike.items()
    ]
    groups.append({"params": rest, "algorithm": "adamw", **adamw_options})
    _warn_of_unknown(decisions)
    return MatrixGroups([group for group in groups if group["params"]], decisions)


def _warn_of_unknown(decisions: Sequence[MatrixDecision]) -> None:
    """Warn if AdamW gets a large part of the model only because nothing says what it is."""
    unknown = [each for each in decisions if each.why.endswith(_UNKNOWN)]
    share = sum(math.prod(each.shape) for each in unknown) / max(1, sum(math.prod(each.shape) for each in decisions))
    if share > _UNKNOWN_SHARE:
        count = f"{len(unknown)} parameter{'s' * (len(unknown) > 1)}"
        kinds = dict.fromkeys((re.sub(r"\d+", "*", each.name), each.shape, each.why) for each in unknown)
        shown = [f"{name} {shape} {why.removesuffix(_UNKNOWN)}" for name, shape, why in kinds]
        first = next(iter(kinds))[0]
        warnings.warn(
            f"matrix_groups gives {count} of unknown use, {100 * share:.0f} % of the model's elements, to "
            f"AdamW: {', '.join(shown[:4])}{', ...' if len(shown) > 4 else ''}. If they are matrices or stacks, such as "
            f"experts, pass matrices=[{first!r}]; if not, adamw=[{first!r}]",
            stacklevel=3,
        )


def _decide(module: nn.Module, attribute: str, name: str, param: torch.Tensor) -> tuple[bool, str]:
    """Whether ``param`` is a matrix as ``attribute`` of ``module``, and why."""
    kind, shape = type(module).__name__, param.shape
    own = "" if isinstance(module, nn.Linear) else kind.lower()  # Other classes are known by their names.
    if isinstance(module, _EMBEDDINGS) or "embedding" in own:
        return False, f"of {kind}, an embedding"
    if isinstance(module, _CONVOLUTIONS):
        return False, f"of {kind}, a convolution"
    if isinstance(module, _NORMS) or "norm" in own:
        return False, f"of {kind}, a norm"
    if len(shape) not in MATRIX_NDIMS:
        return False, f"{len(shape)} dimension{'' if len(shape) == 1 else 's'}"
    if min(shape[-2:]) < 2:
        return False, "a single row or column"
    if len(shape) == 2:
        is_matrix = attribute == "weight" or isinstance(module, _HAVE_MATRICES)
    else:
        says_experts = "expert" in name.lower() or "expert" in kind.lower() or getattr(module, "num_experts", 0) == shape[0]
        is_matrix = says_experts or isinstance(module, nn.Bilinear)
    return is_matrix, f"of {kind}{'' if is_matrix else _UNKNOWN}"


def kernels_of(model: nn.Module) -> set[nn.Parameter]:
    """The kernels of convolutions in ``model`` that have four dimensions, as stacks of matrices."""
    convolutions = [module for module in model.modules() if isinstance(module, _CONVOLUTIONS)]
    return {param for module in convolutions for param in module.parameters() if param.ndim == 4}


def _output_embeddings(model: nn.Module) -> list[nn.Module]:
    """What Hugging Face's models name as their output embeddings."""
    # Of each module, as the model of Hugging Face may be a part of the given one.
    functions = [getattr(module, "get_output_embeddings", None) for module in model.modules()]
    return [head for function in functions if callable(function) and isinstance(head := function(), nn.Module)]


def _chosen(model: nn.Module, argument: str, given: Any, named: Mapping[str, nn.Parameter]) -> set[nn.Parameter]:
    """The parameters that an argument names, directly, by their modules, or by patterns of names."""
    modules = dict(model.named_modules(remove_duplicate=False))
    chosen, kernels = set[nn.Parameter](), kernels_of(model)
    for each in [given] if isinstance(given, (nn.Module, torch.Tensor, str)) else list(given):
        if isinstance(each, str):
            found: list[Any] = [
                value for table in (named, modules) for name, value in table.items() if fnmatch.fnmatchcase(name, each)
            ]
            if not found:
                raise ValueError(
                    f"matrix_groups {argument} names {each!r}, and the {type(model).__name__} has no such parameter or module: "
                    "give names of model.named_parameters() or model.named_modules(), or patterns of them"
                )
        elif isinstance(each, (nn.Module, nn.Parameter)):
            found = [each]
        else:
            raise TypeError(
                f"matrix_groups {argument} takes modules, parameters and names, got {each!r}: pass {argument}=[model.head]"
            )
        for one in found:
            members = [one] if isinstance(one, nn.Parameter) else list(one.parameters())
            if argument == "matrices":
                legal = [param for param in members if param.ndim in MATRIX_NDIMS and param not in kernels]
                if isinstance(one, nn.Parameter) and not legal:
                    raise ValueError(
                        f"matrix_groups matrices has a parameter of shape {tuple(one.shape)}: a matrix has two dimensions, and "
                        "a stack of matrices three or four; a kernel of a convolution is none"
                    )
                members = legal  # A module has biases, too, which the user does not mean.
            chosen.update(members)
    return chosen


def _fused_weights(model: nn.Module, segments: Any, named: Mapping[str, nn.Parameter]) -> dict[nn.Parameter, tuple[Any, int]]:
    """The sizes and the dimension of the segments of fused weights."""
    if not isinstance(segments, Mapping):
        raise TypeError(f'matrix_groups segments must be a dict as {{"qkv.weight": ((64, 16, 16), 0)}}, got {segments!r}')
    if unknown := [name for name in segments if name not in named]:
        raise ValueError(
            f"matrix_groups segments names {', '.join(map(str, unknown))}, and the {type(model).__name__} has no such "
            "parameter: give names of model.named_parameters()"
        )
    fused = {}
    for name, value in segments.items():
        check_segments(f"matrix_groups segments[{name!r}]", value)
        fused[named[name]] = (tuple(value[0]), value[1])
    return fused


def check_segments(name: str, value: Any) -> None:
    """Raise ``TypeError`` if ``value`` is no pair of sizes and a dimension."""
    is_pair = isinstance(value, (tuple, list)) and len(value) == 2 and isinstance(value[0], (tuple, list))
    if not is_pair or not value[0] or not all(isinstance(number, int) for number in (*value[0], value[1])):
        raise TypeError(
            f"{name} must be the sizes of the matrices and the dimension along which they lie, as ((32, 32), 0), got {value!r}"
        )
