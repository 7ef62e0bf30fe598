"""Products whose result is symmetric: one triangle of tiles is computed, the other mirrored."""

from __future__ import annotations

import torch

from torch_ragged._kernels._choice import AMPERE, device_of, runs_triton

__all__ = ["SMALLEST", "gram", "polynomial"]

SMALLEST = 4096
"""Rows from which on the kernel is used: below, a triangle has too few tiles to keep a GPU busy. The matrix alone decides, not
how many are in a batch, so that an optimizer's results do not depend on which rank computes with which others."""


def gram(x: torch.Tensor, halves: bool = True) -> torch.Tensor:
    """``x @ x.mT``, of each matrix of a batch.

    On CUDA, for bfloat16 matrices of at least :data:`SMALLEST` rows, a Triton kernel that computes half the tiles, and whose
    result is exactly symmetric; else torch's product. Both accumulate in float32 and round once; what is rounded is within
    ``K * 2**-24 * |x| @ |x|.mT`` of the exact product (K: the columns of ``x``).

    Args:
        x: (M, K) or (B, M, K).
        halves: False for torch's product in any case.

    Returns:
        (M, M) or (B, M, M) in the dtype of ``x``.

    Raises:
        ValueError: ``x`` has other than two or three dimensions.
    """
    _check("gram", x)
    if halves and _halves(x):
        from torch_ragged._kernels import _triton_symmetric as kernel

        with device_of(x):
            return kernel.product(x, None, 0.0, 1.0)
    return x @ x.mT


def polynomial(a: torch.Tensor, b: float, c: float, halves: bool = True) -> torch.Tensor:
    """``b * a + c * a @ a`` of symmetric matrices; otherwise as :func:`gram`, with the bound ``|c|`` times that of ``a @ a``.

    Args:
        a: (M, M) or (B, M, M), exactly symmetric where the kernel is used, as :func:`gram` makes them.
    """
    _check("polynomial", a)
    if a.shape[-1] != a.shape[-2]:
        raise ValueError(f"polynomial takes square matrices, got {tuple(a.shape)}")
    if halves and _halves(a):
        from torch_ragged._kernels import _triton_symmetric as kernel

        with device_of(a):
            return kernel.product(a, a, b, c)
    return (torch.addmm if a.ndim == 2 else torch.baddbmm)(a, a, a, beta=b, alpha=c)


def _halves(x: torch.Tensor) -> bool:
    return x.dtype == torch.bfloat16 and x.shape[-2] >= SMALLEST and runs_triton(x, AMPERE)


def _check(name: str, x: torch.Tensor) -> None:
    if x.ndim not in (2, 3):
        raise ValueError(f"{name} takes a matrix or a batch of them, got a tensor of shape {tuple(x.shape)}")
