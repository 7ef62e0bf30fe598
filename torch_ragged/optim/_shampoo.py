"""Shampoo on DTensor parameters: the computation at the root of each matrix, and its cost. All state is at the roots."""

from __future__ import annotations

from typing import Any, Optional

import torch

from torch_ragged.optim._aligned import aligned
from torch_ragged.optim._root_states import FactoredOptimizer

__all__ = ["Shampoo", "inverse_root"]

_TINY = 1e-30


def inverse_root(factor: torch.Tensor, order: int, eps: float) -> torch.Tensor:
    """``factor ** (-1 / order)`` of a symmetric positive semi-definite matrix, computed in float64.

    ``eps`` times the largest eigenvalue is added to every eigenvalue. If ``factor`` has a NaN or an infinity, all elements of
    the result are NaN.

    Raises:
        torch.linalg.LinAlgError: the eigendecomposition does not converge.
    """
    # Not an error: this rank alone would raise it, and the others would hang in the scatter. NaNs spread to the weights, where
    # the user sees them.
    if not factor.isfinite().all():
        return torch.full_like(factor, torch.nan)
    values, vectors = torch.linalg.eigh(factor.double())
    # Rounding may leave eigenvalues below 0, whose root is NaN.
    values = values.clamp(min=0.0)
    values = values + eps * values[-1:] + _TINY
    return ((vectors * values ** (-1.0 / order)) @ vectors.mT).to(factor.dtype)


class Shampoo(FactoredOptimizer):
    """Shampoo with grafting to Adam. Each matrix is preconditioned on its root.

    Per matrix G (m x n): ``L = beta L + (1 - beta) G G^T`` and ``R = beta R + (1 - beta) G^T G``. Their inverse roots are
    computed every ``interval`` steps. The direction is ``L^(-1/4) M R^(-1/4)``, where M is the bias-corrected average of the
    gradients. It is scaled to the norm of Adam's update of this matrix. If one side is longer than ``max_side``, only the other
    side is preconditioned, with the power -1/2. If both sides are longer, the matrix gets Adam's update.

    All state of a matrix is whole on its root. States are DTensors with a RaggedShard over the flattened mesh, so checkpoints
    reshard. A parameter keeps its roots, also if it has no gradient in some steps.

    Collectives per step and mesh: as for :class:`Muon`, in float32. Given equal gradients, parameters and states are bitwise
    equal for any number of ranks. AdamW trains groups with ``algorithm="adamw"``, as in :class:`Muon`.

    Source: Gupta, Koren, Singer, "Shampoo" (ICML 2018); Anil et al. (2020) and Shi et al. (2023) for grafting and intervals.

    Args:
        params, lr, weight_decay: as in ``torch.optim.AdamW`` (weight decay is decoupled).
        betas: the decay of the averages of gradients and, for grafting, of squared gradients; also for AdamW groups.
        shampoo_beta: the decay of the factors L and R.
        eps: the ridge of the inverse roots, relative to the largest eigenvalue.
        adamw_eps: Adam's eps, for grafting and for AdamW groups.
        interval: the number of steps between two computations of the inverse roots.
        max_side: the longest side that is preconditioned.
        foreach: an option of AdamW groups.
        max_root_bytes, check_gradients: as in :class:`Muon`.

    Raises:
        ValueError: as :class:`Muon`.
    """

    algorithm = "shampoo"
    of_factor = "root"

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 1e-2,
        *,
        shampoo_beta: float = 0.95,
        eps: float = 1e-6,
        adamw_eps: float = 1e-8,
        interval: int = 10,
        max_side: int = 4096,
        foreach: Optional[bool] = None,
        max_root_bytes: Optional[int] = None,
        check_gradients: bool = True,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            weight_decay=weight_decay,
            shampoo_beta=shampoo_beta,
            eps=eps,
            adamw_eps=adamw_eps,
            interval=interval,
            max_side=max_side,
            foreach=foreach,
            max_root_bytes=max_root_bytes,
            check_gradients=check_gradients,
        )

    def _cost(self, rows: int, columns: int, group: dict[str, Any]) -> float:
        """Operations per step: 2 m m n per product of factors and preconditioning; about 25 m m m per inverse root."""
        sides = [side for side in (rows, columns) if side <= group["max_side"]]
        eigen = sum(25.0 * side**3 for side in sides) / group["interval"]
        return rows * columns * (10.0 + sum(4.0 * side for side in sides)) + eigen

    def _direction(
        self, gradient: torch.Tensor, state: dict[str, torch.Tensor], group: dict[str, Any], step: int
    ) -> torch.Tensor:
        (beta1, beta2), beta = group["betas"], group["shampoo_beta"]
        m, v = state["exp_avg"], state["exp_avg_sq"]
        m.mul_(beta1).add_(gradient * (1 - beta1))
        v.mul_(beta2).add_((gradient * gradient).mul_(1 - beta2))
        average = m / (1 - beta1**step)
        adam = average / (v / (1 - beta2**step)).sqrt_().add_(group["adamw_eps"])
        sides = [name for name in ("left", "right") if name in state]
        if not sides:
            return adam
        direction = average
        for name in sides:
            factor, root = state[name], state[f"{name}_root"]
            outer = gradient @ gradient.mT if name == "left" else gradient.mT @ gradient
            factor.mul_(beta).add_(outer, alpha=1 - beta)
            # In the first step, too: the root is zeros before it, and would make a direction of zeros.
            if step == 1 or step % group["interval"] == 0:
                try:
                    root.copy_(inverse_root(factor / (1 - beta**step), 2 * len(sides), group["eps"]))
                except torch.linalg.LinAlgError:
                    pass  # Keep the previous root: an error on this rank only would make the other ranks hang in the scatter.
            direction = aligned(root) @ direction if name == "left" else direction @ aligned(root)
        return direction * (adam.norm() / direction.norm().clamp(min=_TINY))
