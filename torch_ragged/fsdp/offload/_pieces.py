"""Pieces of parameters, and the optimizers that step them. Nothing here decides where states lie, or moves them.

A piece is a run of one parameter's elements on this rank. Optimizers that update each element by itself give the same bits for
a parameter and for its pieces, if these are cut where the loops over vector registers of torch's CPU kernels begin anew.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.optim import SGD, Adam, AdamW, Optimizer

from torch_ragged._register._torch import dtensor_like, local_tensor
from torch_ragged.fsdp.core._fsdp_param_group import FSDPParamGroup
from torch_ragged.fsdp.grads._fsdp_grad import FSDPGrad

__all__ = ["ELEMENT_WISE", "ElementWise", "Piece", "StateSizes", "StepChunk", "SteppedParam", "UsedGradients"]

ELEMENT_WISE = (SGD, Adam, AdamW)  # They update each element by itself, and have states of the parameter's dtype.
CUT = 64  # Elements. Pieces begin at multiples of it: whole vector registers, and the unit of fused kernels.
_GRAIN = 32768  # Torch's CPU kernels share out a tensor with more elements over threads.
StateSizes = dict[str, tuple[int, torch.dtype]]  # By the name of a state, its number of elements and its dtype.


class UsedGradients:
    """The source of gradients that a step in backward has used: their memory is free, and reading them is an error.

    It is a source of FSDPGrads that publishes nothing, so that an FSDPGrad asks it for nothing else.
    """

    has_memory = False

    def is_published(self, index: int) -> bool:
        return False

    def why_not_published(self) -> str:
        return (
            "this gradient was used by the step in backward of offloaded(..., in_backward=True): it can be neither read, "
            "clipped nor unscaled. Call optimizer.step() and optimizer.zero_grad(), or give offloaded() no in_backward"
        )

    @staticmethod
    def has(grad: torch.Tensor | None) -> bool:
        return isinstance(grad, FSDPGrad) and not grad.has_memory


@dataclass(eq=False)
class SteppedParam:
    """A parameter of the optimizer."""

    number: int  # Among the parameters of the optimizer.
    group_number: int  # Of its parameter group.
    param: Any  # As the user has it: a DTensor, if it lies in a group of ``fully_shard``.
    group: FSDPParamGroup | None = None  # That group. ``index``: of the parameter there.
    index: int = 0

    def __post_init__(self) -> None:
        # Where its elements begin and end in the shard of the group.
        self.interval = (0, 0) if self.group is None else self.group.layout.interval(self.index, self.group.rank)
        self.numel = self.interval[1] - self.interval[0]

    def leaf(self, start: int, stop: int) -> nn.Parameter:
        """A parameter that is a view of a run of its elements, in the memory of its group."""
        assert self.group is not None
        return nn.Parameter(self.group.sharded.tensor(self.index)[start:stop])


@dataclass(eq=False)
class Piece:
    """A run of the elements of a parameter on this rank, in the order of the group's buffer, and its states."""

    member: SteppedParam
    start: int
    stop: int
    # What is stepped: a view of the run; or the parameter, if all of its states lie on the device, or are those of matrices.
    leaf: torch.Tensor
    sizes: StateSizes = field(default_factory=dict)  # Of states in a tier. The others lie where the optimizer makes them.
    offsets: dict[str, int] = field(default_factory=dict)  # Where states in a tier begin in the memory of the chunk.
    has_states: bool = False  # Whether a step, or a state dict, has made the states.

    @property
    def is_whole(self) -> bool:
        return self.leaf is self.member.param and not self.sizes

    def views(self, memory: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: memory[name][self.offsets[name] :][:numel] for name, (numel, _) in self.sizes.items()}


class ElementWise:
    """How the pieces of one class of ``ELEMENT_WISE`` are cut and stepped. ``Adam8bit`` has these methods itself."""

    def __init__(self, optimizer: Any, groups: Sequence[FSDPParamGroup]) -> None:
        self._optimizer = optimizer
        self._distributions: dict[Any, Any] = {each.sharded: each.distribution for group in groups for each in group.params}

    def piece_cut(self, param: torch.Tensor, numel: int, at: int) -> int:
        """The legal cut of a parameter that is nearest to element ``at``: 0 and ``numel`` are legal."""
        # On the CPU, 16-bit elements in the last, partial vector register of a thread's share are rounded otherwise, and pieces
        # have other shares than their parameter. So such a parameter is not cut if it is large enough for several threads.
        is_shared = param.device.type == "cpu" and param.dtype.itemsize < 4 and numel > _GRAIN
        unit = numel if is_shared else CUT
        return min((2 * at + unit) // (2 * unit) * unit, numel)

    def piece_states(self, param: torch.Tensor, group: Mapping[str, Any], start: int, stop: int) -> StateSizes:
        """The states of a run that have one value per element or per block; not those of one value, such as step counters."""
        if self._optimizer is SGD:
            names: tuple[str, ...] = ("momentum_buffer",) if group["momentum"] else ()
        else:
            names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group["amsgrad"] else ("exp_avg", "exp_avg_sq")
        return {name: (stop - start, param.dtype) for name in names}

    def piece_run(self, param: torch.Tensor, name: str, start: int, stop: int) -> tuple[int, int]:
        return start, stop

    def piece_placements(self, param: DTensor, name: str) -> tuple[Placement, ...]:
        return param.placements

    def piece_joined(self, param: DTensor, name: str, flat: torch.Tensor) -> DTensor:
        return dtensor_like(self._distributions[param].local(flat), param)

    def piece_optimizer(self, pieces: Sequence[Any], groups: list[dict[str, Any]]) -> Optimizer:
        return self._optimizer(groups)


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


class StepChunk:
    """Pieces that are stepped together, by an optimizer of their own.

    Between steps this optimizer has the states of one value only, such as step counters. The other ones lie in a tier.
    """

    def __init__(self, pieces: Sequence[Piece], groups: Sequence[Mapping[str, Any]], rules: Any) -> None:
        self.pieces = list(pieces)
        self.sizes = StateSizes()  # What the tier holds. Pieces get their offsets in it below.
        # The groups of ``fully_shard`` with its parameters.
        self.homes = list(dict.fromkeys(each.member.group for each in pieces if each.member.group is not None))
        leaves: dict[int, list[torch.Tensor]] = {}  # By the number of the parameter group.
        for piece in sorted(pieces, key=lambda piece: piece.member.group_number):
            leaves.setdefault(piece.member.group_number, []).append(piece.leaf)
        self._groups = list(leaves)
        runs = [(each.leaf, each.member.param, each.member.number, each.start, each.stop) for each in pieces]
        given = [{**_options(groups[number]), "params": mine} for number, mine in leaves.items()]
        self._optimizer: Optimizer = rules.piece_optimizer(runs, given)
        # Without hooks: those of the user's optimizer, and those of all optimizers, run in its own step.
        self._step = inspect.unwrap(type(self._optimizer).step)
        for piece in self.pieces:
            for name, (numel, dtype) in piece.sizes.items():
                piece.offsets[name], _ = self.sizes.get(name, (0, dtype))
                self.sizes[name] = (piece.offsets[name] + -(-numel // CUT) * CUT, dtype)
        self.nbytes = sum(numel * dtype.itemsize for numel, dtype in self.sizes.values())

    def step(self, groups: Sequence[Mapping[str, Any]], memory: Mapping[str, torch.Tensor], scaling: Mapping[str, Any]) -> None:
        """One step of the pieces whose parameters have gradients, with the options that ``groups`` have now.

        ``memory`` has the states, and ``scaling`` what ``GradScaler`` has set on the user's optimizer.
        """
        optimizer, states = self._optimizer, self._optimizer.state
        for mine, number in zip(optimizer.param_groups, self._groups):
            mine.update(_options(groups[number]))
        gradients: dict[torch.Tensor, torch.Tensor] = {}  # The pieces of a parameter share the work of finding it.
        stepped = [piece for piece in self.pieces if _has_gradient(piece.member.param)]
        for piece in stepped:
            param = piece.member.param
            if not piece.is_whole:
                if param not in gradients:
                    gradient = param.grad
                    if gradient.placements != param.placements:  # The user has set it.
                        gradient = gradient.redistribute(placements=param.placements)
                    gradients[param] = local_tensor(gradient).reshape(-1)
                piece.leaf.grad = gradients[param][piece.start : piece.stop]
            if piece.has_states and piece.sizes:
                states[piece.leaf].update(piece.views(memory))
        vars(optimizer).update(scaling)
        try:
            self._step(optimizer)
        finally:
            for name in scaling:
                vars(optimizer).pop(name)
            for piece in stepped:
                if not piece.is_whole:
                    piece.leaf.grad = None
        for piece in stepped:
            for name, view in piece.views(memory).items():
                made = states[piece.leaf].pop(name)
                if not piece.has_states:  # The optimizer has made it in this step. From now on it lies in the tier.
                    view.copy_(made.view(-1))
            piece.has_states = True

    @property
    def is_fresh(self) -> bool:
        return not any(piece.has_states for piece in self.pieces)

    @property
    def has_gradients(self) -> bool:
        """Whether the next step changes something."""
        return any(_has_gradient(piece.member.param) for piece in self.pieces)

    def states_of(self, piece: Piece, memory: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """The states of a piece, in the order in which they were made; empty before its first step."""
        if not piece.has_states:
            return {}
        mine = self._optimizer.state[piece.leaf]
        return {**mine, **piece.views(memory)} if piece.sizes else mine

    def own_states_of(self, piece: Piece) -> dict[str, Any]:
        """The states of a piece that lie in no tier."""
        return self._optimizer.state[piece.leaf]

    def has_states(self, piece: Piece) -> bool:
        """Whether a step, or a state dict, has made states of ``piece``."""
        return piece.has_states and bool(piece.sizes or self._optimizer.state[piece.leaf])

    def set_states(self, piece: Piece, states: Mapping[str, Any] | None, memory: Mapping[str, torch.Tensor]) -> None:
        """Let a piece have other states; None: those before its first step. States in a tier are copied."""
        piece.has_states = states is not None
        mine = dict(states or {})
        for name, view in piece.views(memory).items() if mine else ():
            view.copy_(mine.pop(name).view(-1))
        self._optimizer.state[piece.leaf] = mine


def _has_gradient(param: torch.Tensor) -> bool:
    """Whether there is a gradient that no step in backward has used."""
    return param.grad is not None and not UsedGradients.has(param.grad)
