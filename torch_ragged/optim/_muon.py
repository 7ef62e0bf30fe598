"""Muon on DTensor parameters: momentum on the shards, Newton-Schulz at the root of each matrix."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any, Optional, TypeVar

import torch

from torch_ragged.optim._base import add_scaled, local, scalar
from torch_ragged.optim._gather import Batch
from torch_ragged.optim._matrix import MatrixOptimizer
from torch_ragged.optim._newton_schulz import COEFFICIENTS, EPS, STEPS, newton_schulz, newton_schulz_cost

__all__ = ["Muon", "adjusted_lr"]

_ADJUSTMENTS = (None, "original", "match_rms_adamw", "spectral_unclamped")
_Rate = TypeVar("_Rate", float, torch.Tensor)


def adjusted_lr(lr: _Rate, adjust_lr_fn: Optional[str], shape: Sequence[int]) -> _Rate:
    """The learning rate of a matrix of ``shape`` (its last two sizes), as ``torch.optim.Muon`` adjusts it."""
    rows, columns = shape[-2:]
    if adjust_lr_fn is None or adjust_lr_fn == "original":
        return lr * math.sqrt(max(1, rows / columns))
    if adjust_lr_fn == "match_rms_adamw":
        return lr * (0.2 * math.sqrt(max(rows, columns)))
    return lr * math.sqrt(rows / columns)


class Muon(MatrixOptimizer):
    """``torch.optim.Muon`` on parameters of any placement, each matrix orthogonalised once, on one rank.

    Algorithm 2 of the RaggedShard paper: momentum is updated on the shards; the update of each matrix is gathered to its root,
    a rank chosen by load balance over the whole mesh (replicas of HSDP share the matrices out); the root runs Newton-Schulz;
    the result goes back to the shards. Parameters are DTensors of any placement or plain tensors; one of three dimensions is a
    stack of matrices (experts), each with a root of its own. Given equal gradients, parameters and states are bitwise equal for
    any number of ranks, and on CPU equal to ``torch.optim.Muon``. (Torch rounds the last ``numel % 64`` elements of a bfloat16
    matrix otherwise, if it is not taller than wide or has one column; and before 2.15 it overwrites the momentum of bfloat16
    parameters without Nesterov.)

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

    algorithm = "muon"
    wire = torch.bfloat16  # What Newton-Schulz computes in: rounding before the transfer is the same, and halves the bytes.

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
        super().__init__(params, defaults, max_root_bytes, check_gradients)

    def _kind(self, group: dict[str, Any]) -> Hashable:
        return tuple(group["ns_coefficients"]), group["ns_steps"], group["eps"], group["foreach"] is not False

    def _cost(self, rows: int, columns: int, group: dict[str, Any]) -> float:
        return newton_schulz_cost(rows, columns, group["ns_steps"])

    def _send(self, param: torch.Tensor, group: dict[str, Any], gradient: torch.Tensor) -> torch.Tensor:
        """Update this rank's momentum; what is to be orthogonalised."""
        state = self.state[param]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(param)
        buffer, momentum = local(state["momentum_buffer"]), group["momentum"]
        buffer.lerp_(gradient, 1 - momentum)
        return gradient.lerp(buffer, momentum) if group["nesterov"] else buffer

    def _compute(self, batch: Batch, matrices: torch.Tensor, params: Sequence[torch.Tensor]) -> torch.Tensor:
        kind: Any = batch.kind
        coefficients, steps, eps, batched = kind
        return newton_schulz(matrices, coefficients, steps, eps, batched)

    def _receive(self, param: torch.Tensor, group: dict[str, Any], update: torch.Tensor) -> None:
        lr, shape, mine = group["lr"], param.shape, local(param)  # lr may be a tensor, which rounds to its dtype as in torch.
        mine.mul_(scalar(1 - lr * group["weight_decay"]))
        rate = scalar(adjusted_lr(lr, group["adjust_lr_fn"], shape))
        add_scaled(mine, update.view(mine.shape), -rate, rounds_product=shape[-2] > shape[-1] > 1)

    def _check_group(self, group: dict[str, Any]) -> None:
        if not group["momentum"] >= 0.0:
            raise ValueError(f"Muon momentum must be >= 0, got {group['momentum']!r}")
        if group["adjust_lr_fn"] not in _ADJUSTMENTS:
            raise ValueError(f"Muon adjust_lr_fn must be one of {_ADJUSTMENTS}, got {group['adjust_lr_fn']!r}")
        if not isinstance(group["ns_steps"], int) or not 0 <= group["ns_steps"] < 100:
            raise ValueError(f"Muon ns_steps must be an integer from 0 to 99, got {group['ns_steps']!r}")
        if len(group["ns_coefficients"]) != 3:
            raise ValueError(f"Muon ns_coefficients must be three numbers, got {group['ns_coefficients']!r}")
