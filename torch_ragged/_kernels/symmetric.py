"""Products with symmetric results: the kernel computes one triangle of tiles and mirrors it to the other."""

from __future__ import annotations

import torch

from torch_ragged._kernels._choice import AMPERE, on_device_of, runs_triton

__all__ = ["FEWEST_ROWS", "gram", "polynomial"]

FEWEST_ROWS = 4096
"""The fewest rows for which the kernel runs. With fewer, a triangle has too few tiles to keep a GPU busy. The size of the batch
must not count: otherwise an optimizer's results would depend on which matrices one rank computes together."""


def gram(x: torch.Tensor, halves: bool = True) -> torch.Tensor:
    """``x @ x.mT`` for each matrix of a batch.

    On CUDA, if ``x`` is bfloat16 with at least :data:`FEWEST_ROWS` rows, a Triton kernel computes half of the tiles; its result
    is exactly symmetric. Otherwise torch's product runs. Both sum in float32 and round the sum once. Before this rounding, the
    error is at most ``K * 2**-24 * |x| @ |x|.mT``, where K is the number of columns of ``x``.

    Args:
        x: (M, K) or (B, M, K).
        halves: if False, torch's product always runs.

    Returns:
        (M, M) or (B, M, M) in the dtype of ``x``.

    Raises:
        ValueError: ``x`` has other than two or three dimensions.
    """
    _check_matrix("gram", x)
    if halves and _halves(x):
        from torch_ragged._kernels import _triton_symmetric as kernel

        with on_device_of(x):
            return kernel.product(x, None, 0.0, 1.0)
    return x @ x.mT


def polynomial(a: torch.Tensor, b: float, c: float, halves: bool = True) -> torch.Tensor:
    """``b * a + c * a @ a`` for symmetric matrices. :func:`gram` describes kernel and rounding; the error bound is ``|c|``
    times that of ``a @ a``.

    Args:
        a: (M, M) or (B, M, M). If the kernel runs, ``a`` must be exactly symmetric, as results of :func:`gram` are.
        b, c: the coefficients.
        halves: if False, torch's product always runs.

    Returns:
        a tensor of the shape and dtype of ``a``.

    Raises:
        ValueError: ``a`` has other than two or three dimensions, or its matrices are not square.
    """
    _check_matrix("polynomial", a)
    if a.shape[-1] != a.shape[-2]:
        raise ValueError(f"polynomial takes square matrices, got {tuple(a.shape)}")
    if halves and _halves(a):
        from torch_ragged._kernels import _triton_symmetric as kernel

        with on_device_of(a):
            return kernel.product(a, a, b, c)
    return (torch.addmm if a.ndim == 2 else torch.baddbmm)(a, a, a, beta=b, alpha=c)


def _halves(x: torch.Tensor) -> bool:
    return x.dtype == torch.bfloat16 and x.shape[-2] >= FEWEST_ROWS and runs_triton(x, AMPERE)


def _check_matrix(name: str, x: torch.Tensor) -> None:
    if x.ndim not in (2, 3):
        raise ValueError(f"{name} takes a matrix or a batch of them, got a tensor of shape {tuple(x.shape)}")
