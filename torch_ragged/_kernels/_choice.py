"""Whether a Triton kernel or its torch twin runs."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from contextlib import AbstractContextManager
from functools import lru_cache

import torch

__all__ = ["MODES", "AMPERE", "ADA", "choose", "device_of", "runs_triton"]

MODES = ("auto", "torch", "triton")

AMPERE = (8, 0)
"""Compute capability from which on there is bfloat16."""
ADA = (8, 9)
"""Compute capability from which on there are conversions to float8."""

_mode = "auto"


def choose(mode: str) -> None:
    """Have kernels run where they can (``"auto"``), never (``"torch"``) or always (``"triton"``), in this process.

    Raises:
        ValueError: ``mode`` is none of these.
    """
    global _mode
    if mode not in MODES:
        raise ValueError(f"kernels are chosen by one of {MODES} (TORCH_RAGGED_KERNELS), got {mode!r}")
    _mode = mode


choose(os.environ.get("TORCH_RAGGED_KERNELS", "auto"))


def runs_triton(tensor: torch.Tensor, capability: tuple[int, int] = AMPERE) -> bool:
    """Whether a kernel is to run on ``tensor``, on GPUs of at least ``capability``."""
    if not tensor.is_cuda:
        return _mode == "triton" and tensor.device.type == "cpu"
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)  # A fake tensor has no memory to launch a kernel on.
    return is_plain and _mode != "torch" and _capability(tensor.device) >= capability


def device_of(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Makes the device of ``tensor`` the current one, on which Triton launches."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


@lru_cache(maxsize=64)
def _capability(device: torch.device) -> tuple[int, int]:
    """Of an NVIDIA GPU; (0, 0) of any other, and without Triton."""
    has_triton = importlib.util.find_spec("triton") is not None
    if not has_triton or torch.version.cuda is None or not torch.cuda.is_available():
        return (0, 0)
    return torch.cuda.get_device_capability(device)
