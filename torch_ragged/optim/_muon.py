"""Muon on DTensor parameters: momentum on the shards, Newton-Schulz at the root of each matrix."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Optional, TypeVar

import torch
from torch import nn

from torch_ragged.optim._base import (
    RaggedOptimizer,
    adamw_step,
    add_scaled,
    agree_on_gradients,
    by_mesh,
    check_placement,
    local,
    placed_of,
    run_closure,
    scalar,
)
from torch_ragged.optim._gather import Batch, GatherToRoot, mesh_ranks, owners_of
from torch_ragged.optim._newton_schulz import COEFFICIENTS, EPS, STEPS, newton_schulz, newton_schulz_cost
from torch_ragged.optim._roots import Roots, Stack, assign_roots, split_flights

__all__ = ["Muon", "adjusted_lr", "matrix_groups"]

_ADJUSTMENTS = (None, "original", "match_rms_adamw", "spectral_unclamped")
_ALGORITHMS = ("muon", "adamw")
_Rate = TypeVar("_Rate", float, torch.Tensor)
_WIRE = torch.bfloat16  # What Newton-Schulz computes in: rounding before the transfer is the same, and halves the bytes.


def adjusted_lr(lr: _Rate, adjust_lr_fn: Optional[str], shape: Sequence[int]) -> _Rate:
    """The learning rate of a matrix of ``shape`` (its last two sizes), as ``torch.optim.Muon`` adjusts it."""
    rows, columns = shape[-2:]
    if adjust_lr_fn is None or adjust_lr_fn == "original":
        return lr * math.sqrt(max(1, rows / columns))
    if adjust_lr_fn == "match_rms_adamw":
        return lr * (0.2 * math.sqrt(max(rows, columns)))
    return lr * math.sqrt(rows / columns)


def matrix_groups(
    model: nn.Module, *, adamw: Iterable[nn.Module | nn.Parameter] = (), **adamw_options: Any
) -> list[dict[str, Any]]:
    """Parameter groups for :class:`Muon`: matrices to Muon; embeddings, vectors and what ``adamw`` names to AdamW.

    Args:
        model: whose parameters are split; call it after ``fully_shard``.
        adamw: modules (the output head, say) and parameters (biases of fused experts) that AdamW trains as well.
        adamw_options: options of the AdamW group, such as ``lr``.
    """
    apart: set[nn.Parameter] = set()
    for each in (*adamw, *(module for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag)))):
        apart.update(each.parameters() if isinstance(each, nn.Module) else [each])
    params = list(model.parameters())
    is_matrix = [param.ndim in (2, 3) and param not in apart for param in params]
    groups = [
        {"params": [p for p, flag in zip(params, is_matrix) if flag], "algorithm": "muon"},
        {"params": [p for p, flag in zip(params, is_matrix) if not flag], "algorithm": "adamw", **adamw_options},
    ]
    return [group for group in groups if group["params"]]


class Muon(RaggedOptimizer):
    """``torch.optim.Muon`` on parameters of any placement, each matrix orthogonalised once, on one rank.

    Algorithm 2 of the RaggedShard paper: momentum is updated on the shards; the update of each matrix is gathered to its root,
    a rank chosen by load balance over the whole mesh (replicas of HSDP share the matrices out); the root runs Newton-Schulz;
    the result goes back to the shards. Parameters are DTensors of any placement or plain tensors; one of three dimensions is a
    stack of matrices (experts), each with a root of its own. Given equal gradients, parameters and states are bitwise equal for
    any number of ranks, and equal to ``torch.optim.Muon``. (Where torch overwrites the momentum, in 2.13 with bfloat16
    parameters without Nesterov, this class does not.)

    Collectives per step and mesh: two all-to-alls to the roots and two back, in bfloat16 (more only by ``max_root_bytes``; none
    where every matrix is whole on its owner), and one all-reduce of 8 bytes per parameter by which ranks agree on which
    gradients there are.

    Parameter groups with ``algorithm="adamw"`` are trained by AdamW, with the options ``lr``, ``weight_decay``, ``betas`` and
    ``adamw_eps``: embeddings, heads, norms, biases. :func:`matrix_groups` makes such groups.

    Args:
        params, lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn: as ``torch.optim.Muon`` of
            torch 2.15 has them, on older versions too.
        foreach: several tensors per kernel, and matrices of one shape in one Newton-Schulz iteration. Default: yes.
        algorithm: ``"muon"`` or ``"adamw"``, usually given per group.
        betas, adamw_eps: of AdamW groups.
        max_root_bytes: what a rank may hold of gathered matrices in one flight of transfers (two flights are alive at a time);
            matrices then go in more flights, and collectives.
        check_gradients: False leaves out the all-reduce that agrees on gradients. Right where a gradient is there on all ranks
            or on none, as after backward with ``fully_shard``; ranks that differ would hang.

    Raises:
        ValueError: an option is out of range; a ``"muon"`` group holds a parameter of other than two or three dimensions; a
            parameter is complex or a Partial DTensor.
    """

    _knobs = ("max_root_bytes", "check_gradients")

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        eps: float = EPS,
        ns_steps: int = STEPS,
        adjust_lr_fn: Optional[str] = None,
        *,
        foreach: Optional[bool] = None,
        algorithm: str = "muon",
        betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
        max_root_bytes: Optional[int] = None,
        check_gradients: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "foreach": foreach,
            "algorithm": algorithm,
            "betas": betas,
            "adamw_eps": adamw_eps,
        }
        if max_root_bytes is not None and max_root_bytes < 1:
            raise ValueError(f"Muon max_root_bytes must be a positive number of bytes or None, got {max_root_bytes!r}")
        self.max_root_bytes, self.check_gradients = max_root_bytes, check_gradients
        self._plans: dict[Any, tuple[Roots, GatherToRoot]] = {}
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; raises ``ValueError`` as the constructor does, and leaves the optimizer as it was then."""
        group = {**self.defaults, **param_group}
        given = group["params"]
        group["params"] = [given] if isinstance(given, torch.Tensor) else list(given)
        _check_options(group)
        for entry in group["params"]:
            _check_param(entry[1] if isinstance(entry, tuple) else entry, group["algorithm"])
        super().add_param_group({**param_group, "params": group["params"]})
        self._plans.clear()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_plans": {}}  # Plans hold process groups; they are made anew.

    @torch.no_grad()
    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        """One step. Every rank of the parameters' meshes must call it.

        Returns:
            the loss of ``closure``, if given.

        Raises:
            RuntimeError: a gradient is sparse, or missing on some ranks and placed otherwise than its parameter on others; on
                every rank, with nothing changed.
        """
        loss = run_closure(closure)
        params = [param for group in self.param_groups for param in group["params"]]
        groups = [group for group in self.param_groups for _ in group["params"]]
        gradients = agree_on_gradients(params, self.check_gradients)
        present = [i for i, gradient in enumerate(gradients) if gradient is not None and groups[i]["algorithm"] == "muon"]
        for mesh, places in by_mesh([params[i] for i in present]):
            self._muon_step([present[place] for place in places], params, groups, gradients, mesh)
        start = 0
        for group in self.param_groups:
            stop = start + len(group["params"])
            if group["algorithm"] == "adamw":
                adamw_step(self, group, params[start:stop], gradients[start:stop], eps=group["adamw_eps"])
            start = stop
        return loss

    def _muon_step(self, indices: list[int], params: Any, groups: Any, gradients: Any, mesh: Any) -> None:
        """Muon on the parameters of one mesh that have gradients."""
        inputs = [self._momentum(params[i], groups[i], gradients[i]) for i in indices]
        plan = self._plan(indices, params, groups, mesh)[1]
        device = inputs[0].device
        updates = plan.run(inputs, _orthogonalize, _WIRE, device)
        del inputs
        for index, update in zip(indices, updates):
            group, param = groups[index], local(params[index])
            lr, shape = group["lr"], params[index].shape  # lr may be a tensor, which rounds to its own dtype as in torch.
            param.mul_(scalar(1 - lr * group["weight_decay"]))
            rate = scalar(adjusted_lr(lr, group["adjust_lr_fn"], shape))
            add_scaled(param, update.view(param.shape), -rate, rounds_product=shape[-2] > shape[-1] > 1)

    def _momentum(self, param: torch.Tensor, group: dict[str, Any], gradient: torch.Tensor) -> torch.Tensor:
        """Update this rank's momentum; the local part of what is to be orthogonalised."""
        state = self.state[param]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(param)
        buffer, momentum = local(state["momentum_buffer"]), group["momentum"]
        buffer.lerp_(gradient, 1 - momentum)
        return gradient.lerp(buffer, momentum) if group["nesterov"] else buffer

    def _plan(self, indices: list[int], params: Any, groups: Any, mesh: Any) -> tuple[Roots, GatherToRoot]:
        kinds = [_kind(groups[i]) for i in indices]
        key = (mesh, tuple(indices), tuple(kinds))
        if key not in self._plans:
            placed = [placed_of(params[i]) for i in indices]
            stacks = [
                Stack(each.shape, newton_schulz_cost(*each.shape[-2:], steps=kind[1]), owners_of(each), kind)
                for each, kind in zip(placed, kinds)
            ]
            roots = assign_roots(stacks, mesh_ranks(mesh)[1])
            flights = split_flights(stacks, roots.of, _WIRE.itemsize, self.max_root_bytes)
            if len(self._plans) >= 16:  # Sets of gradients come and go; a plan is soon made.
                self._plans.clear()
            self._plans[key] = roots, GatherToRoot(stacks, placed, roots.of, flights, mesh)
        return self._plans[key]


def _kind(group: dict[str, Any]) -> tuple[Any, ...]:
    """What matrices of one batch have in common."""
    return tuple(group["ns_coefficients"]), group["ns_steps"], group["eps"], group["foreach"] is not False


def _orthogonalize(batch: Batch, matrices: torch.Tensor) -> torch.Tensor:
    kind: Any = batch.kind
    coefficients, steps, eps, batched = kind
    return newton_schulz(matrices, coefficients, steps, eps, batched)


def _check_options(group: dict[str, Any]) -> None:
    if group["algorithm"] not in _ALGORITHMS:
        raise ValueError(f"Muon algorithm must be one of {_ALGORITHMS}, got {group['algorithm']!r}")
    lr = group["lr"]
    if isinstance(lr, torch.Tensor) and lr.numel() != 1:
        raise ValueError(f"Muon lr must be a number or a tensor of one element, got a tensor of {lr.numel()}")
    for name in ("lr", "momentum", "weight_decay", "eps", "adamw_eps"):
        if not group[name] >= 0.0:
            raise ValueError(f"Muon {name} must be >= 0, got {group[name]!r}")
    if group["adjust_lr_fn"] not in _ADJUSTMENTS:
        raise ValueError(f"Muon adjust_lr_fn must be one of {_ADJUSTMENTS}, got {group['adjust_lr_fn']!r}")
    if not isinstance(group["ns_steps"], int) or not 0 <= group["ns_steps"] < 100:
        raise ValueError(f"Muon ns_steps must be an integer from 0 to 99, got {group['ns_steps']!r}")
    if len(group["ns_coefficients"]) != 3:
        raise ValueError(f"Muon ns_coefficients must be three numbers, got {group['ns_coefficients']!r}")
    if len(group["betas"]) != 2 or not all(0.0 <= beta < 1.0 for beta in group["betas"]):
        raise ValueError(f"Muon betas must be two numbers in [0, 1), got {group['betas']!r}")


def _check_param(param: Any, algorithm: str) -> None:
    if not isinstance(param, torch.Tensor):
        return  # torch's own check names the type.
    check_placement(param, "Muon")
    if param.is_complex():
        raise ValueError(f"Muon got a complex parameter of shape {tuple(param.shape)}: it trains real ones only")
    if algorithm == "muon" and param.ndim not in (2, 3):
        raise ValueError(
            f"Muon takes matrices (two dimensions) or stacks of them (three), got a parameter of shape {tuple(param.shape)}: "
            'put it into a group with algorithm="adamw"; matrix_groups(model) makes such groups'
        )
