"""Aligned memory for products and norms, whose bits may depend on the address of their inputs."""

from __future__ import annotations

import torch

__all__ = ["aligned"]

_ALLOCATED = {"cpu": 64, "cuda": 512}
"""What divides the address of every allocation of torch, in bytes."""


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` if its address is as aligned as that of a new tensor; otherwise a copy. Strides do not change.

    The first element of a matrix in a stack has an address that depends on the matrices before it, so on the number of ranks.
    Libraries choose their instructions by the address, and some of them add in another order. Elementwise operations give the
    same bits at any address and need no copy.
    """
    # An unknown type of device counts as CUDA: a needless copy costs less than bits that depend on the number of ranks.
    return tensor if tensor.data_ptr() % _ALLOCATED.get(tensor.device.type, 512) == 0 else tensor.clone()
