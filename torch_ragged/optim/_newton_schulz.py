"""Newton-Schulz orthogonalisation of batches of matrices, bitwise equal to ``torch.optim.Muon`` for each matrix.

The result for a matrix must not depend on the other matrices of its batch.
"""

from __future__ import annotations

import torch

from torch_ragged._kernels.symmetric import gram, polynomial

__all__ = ["COEFFICIENTS", "EPS", "STEPS", "newton_schulz", "newton_schulz_cost"]

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPS = 1e-7
STEPS = 5


def newton_schulz_cost(rows: int, columns: int, steps: int = STEPS) -> float:
    """Floating-point operations of the iteration: with m <= n, each step has two products of 2 m m n and one of 2 m m m."""
    m, n = min(rows, columns), max(rows, columns)
    return float(steps * (4 * m * m * n + 2 * m**3))


def newton_schulz(
    matrices: torch.Tensor,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    steps: int = STEPS,
    eps: float = EPS,
    batched: bool = True,
) -> torch.Tensor:
    """Muon's quintic iteration on each matrix. The result approximates the orthogonal factor of its polar decomposition.

    The operations and their order are those of ``torch.optim.Muon``, in bfloat16. Source: K. Jordan, "Muon", 2024.

    Args:
        matrices: (B, rows, columns), of any floating dtype; not changed.
        coefficients, steps, eps: ``ns_coefficients``, ``ns_steps`` and ``eps`` of ``torch.optim.Muon``.
        batched: on CUDA, one product for all matrices, and half the work for symmetric products of large matrices
            (:func:`~torch_ragged._kernels.symmetric.gram`). The library may choose another kernel for another number of
            matrices, so bits may differ. If False, and always on CPU, one matrix after the other, with the kernels of
            ``torch.optim.Muon``: the bits of a matrix do not depend on the other ones.

    Returns:
        (B, rows, columns) in bfloat16.
    """
    if (not batched or matrices.is_cpu) and len(matrices) > 1:
        return torch.cat([newton_schulz(one, coefficients, steps, eps, batched) for one in matrices.split(1)])
    a, b, c = coefficients
    rows, columns = matrices.shape[-2:]
    x = matrices.to(torch.bfloat16, copy=True)
    if rows > columns:
        x = x.mT
    for one in x:  # One norm at a time: in a batched reduction the order of additions may depend on the batch.
        one.div_(one.norm().clamp(min=eps))
    is_single = len(x) == 1
    x, add_product = (x[0], torch.addmm) if is_single else (x, torch.baddbmm)
    for _ in range(steps):
        x = add_product(x, polynomial(gram(x, batched), b, c, batched), x, beta=a)
    x = x.unsqueeze(0) if is_single else x
    return x.mT if rows > columns else x
