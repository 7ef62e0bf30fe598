"""SOAP on DTensor parameters: Adam in the eigenbasis of Shampoo's factors, at the root of each matrix."""

from __future__ import annotations

from typing import Any, Optional

import torch

from torch_ragged.optim._aligned import aligned
from torch_ragged.optim._root_states import FactoredOptimizer

__all__ = ["SOAP"]


class SOAP(FactoredOptimizer):
    """SOAP: Adam in the eigenbasis of Shampoo's factors. Each matrix is preconditioned on its root.

    Per matrix G (m x n): ``L = beta L + (1 - beta) G G^T`` and ``R = beta R + (1 - beta) G^T G``. Q_L and Q_R are their
    eigenvectors, refreshed every ``interval`` steps by one power iteration and a QR decomposition. Adam's second moment is that
    of ``Q_L^T G Q_R``; the update is rotated back. The first step of a matrix only makes its basis, and changes no weight. A
    side longer than ``max_side`` is not rotated.

    All state of a matrix is whole on its root, as in :class:`Shampoo`, and so are its collectives. Given equal gradients,
    parameters and states are bitwise equal for any number of ranks. AdamW trains groups with ``algorithm="adamw"``, as in
    :class:`Muon`::

        optimizer = SOAP(matrix_groups(model, adamw=[model.head], lr=3e-4), lr=3e-3)

    Source: Vyas et al., "SOAP: Improving and Stabilizing Shampoo using Adam" (2024), algorithm 3.

    Args:
        params, lr, weight_decay: as in ``torch.optim.AdamW`` (weight decay is decoupled).
        betas: the decay of the averages of gradients and of squared rotated gradients; also for AdamW groups.
        shampoo_beta: the decay of the factors L and R; None is the second of ``betas``.
        eps: added to the root of the second moment.
        adamw_eps: Adam's eps for AdamW groups.
        interval: the number of steps between two refreshments of the bases.
        max_side: the longest side that is rotated.
        foreach: an option of AdamW groups.
        max_root_bytes, check_gradients: as in :class:`Muon`.

    Raises:
        ValueError: as :class:`Muon`.
    """

    algorithm = "soap"
    of_factor = "basis"

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        weight_decay: float = 1e-2,
        *,
        shampoo_beta: Optional[float] = None,
        eps: float = 1e-8,
        adamw_eps: float = 1e-8,
        interval: int = 10,
        max_side: int = 10000,
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
        """Operations per step: 2 m m n for the factor and for each of three rotations; about 6 m m m per refreshment."""
        sides = [side for side in (rows, columns) if side <= group["max_side"]]
        refreshed = sum(6.0 * side**3 for side in sides) / group["interval"]
        return rows * columns * (10.0 + sum(8.0 * side for side in sides)) + refreshed

    def _factor_beta(self, group: dict[str, Any]) -> Any:
        return group["betas"][1] if group["shampoo_beta"] is None else group["shampoo_beta"]

    def _direction(
        self, gradient: torch.Tensor, state: dict[str, torch.Tensor], group: dict[str, Any], step: int
    ) -> torch.Tensor:
        beta1, beta2 = group["betas"]
        beta = self._factor_beta(group)
        m, v, direction = state["exp_avg"], state["exp_avg_sq"], torch.zeros_like(gradient)
        sides = [name for name in ("left", "right") if name in state]
        if step > 1:
            bases: dict[str, torch.Tensor] = {name: aligned(state[f"{name}_basis"]) for name in sides}
            # The first moment is in the basis of the weights, and rotated when it is used. So a new basis needs no rotation of
            # it. The second moment is in the eigenbasis, and cannot be rotated.
            m.mul_(beta1).add_(gradient * (1 - beta1))
            rotated, average = _rotated(gradient, bases), _rotated(aligned(m), bases)
            v.mul_(beta2).add_((rotated * rotated).mul_(1 - beta2))
            # The first step made the basis only, so averages begin with the second.
            average = average / (1 - beta1 ** (step - 1))
            direction = average / (v / (1 - beta2 ** (step - 1))).sqrt_().add_(group["eps"])
            direction = _rotated(direction, {name: basis.mT for name, basis in bases.items()})
        # After the use of the bases: a gradient is never rotated by a basis that it has made.
        for name in sides:
            factor, basis = state[name], state[f"{name}_basis"]
            outer = gradient @ gradient.mT if name == "left" else gradient.mT @ gradient
            factor.mul_(beta).add_(outer, alpha=1 - beta)
            if step == 1:
                basis.copy_(_eigenvectors(factor))
            elif step % group["interval"] == 0:
                _refresh(factor, basis, v, dim=0 if name == "left" else 1)
        return direction

    def _receive(self, param: torch.Tensor, group: dict[str, Any], update: torch.Tensor) -> None:
        # The first step makes the basis only: weight decay waits for the first update, too. The counter is equal on all ranks.
        if self.state[param]["step"].item() > 1:
            super()._receive(param, group, update)


def _rotated(matrix: torch.Tensor, bases: dict[str, torch.Tensor]) -> torch.Tensor:
    """``Q_L^T matrix Q_R``, with the bases that there are."""
    if "left" in bases:
        matrix = bases["left"].mT @ matrix
    return matrix @ bases["right"] if "right" in bases else matrix


def _eigenvectors(factor: torch.Tensor) -> torch.Tensor:
    """Of the largest eigenvalue first, computed in float64. The identity if ``factor`` is not finite, or does not converge.

    An error on this rank alone would make the other ranks hang in the scatter.
    """
    identity = torch.eye(len(factor), dtype=factor.dtype, device=factor.device)
    if not factor.isfinite().all():
        return identity
    try:
        return torch.linalg.eigh(factor.double())[1].flip(1).to(factor.dtype)
    except torch.linalg.LinAlgError:
        return identity


def _refresh(factor: torch.Tensor, basis: torch.Tensor, v: torch.Tensor, dim: int) -> None:
    """One power iteration of ``basis``, in the order of its eigenvalues. ``v`` gets the same order along ``dim``."""
    if not factor.isfinite().all():
        return
    product = aligned(factor) @ aligned(basis)
    # stable: equal eigenvalues keep their order on every device.
    order = (basis * product).sum(0).argsort(descending=True, stable=True)
    # The second moment belongs to columns of the basis, and moves with them. What the iteration turns is not in it. Not known:
    # how much this loses if the basis turns fast.
    v.copy_(v.index_select(dim, order))
    basis.copy_(torch.linalg.qr(product.index_select(1, order))[0])
