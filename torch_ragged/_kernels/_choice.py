"""Decides whether a Triton kernel or its torch twin runs. Does not import Triton."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from contextlib import AbstractContextManager
from functools import lru_cache

import torch

__all__ = ["MODES", "AMPERE", "ADA", "choose", "on_device_of", "runs_triton"]

MODES = ("auto", "torch", "triton")

AMPERE = (8, 0)
"""The lowest compute capability with bfloat16."""
ADA = (8, 9)
"""The lowest compute capability with conversions to float8."""

_mode = "auto"


def choose(mode: str) -> None:
    """Set for this process which of the two runs.

    Args:
        mode: ``"auto"`` runs kernels on CUDA if they are supported, ``"torch"`` never runs kernels, ``"triton"`` always does.

    Raises:
        ValueError: ``mode`` is another text.
    """
    global _mode
    if mode not in MODES:
        raise ValueError(f"kernels are chosen by one of {MODES} (environment variable TORCH_RAGGED_KERNELS), got {mode!r}")
    _mode = mode


choose(os.environ.get("TORCH_RAGGED_KERNELS", "auto"))


def runs_triton(tensor: torch.Tensor, capability: tuple[int, int] = AMPERE) -> bool:
    """Whether the kernel runs for ``tensor``. ``capability`` is the lowest compute capability that the kernel supports."""
    if not tensor.is_cuda:
        return _mode == "triton" and tensor.device.type == "cpu"
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)  # A fake tensor has no memory for a kernel.
    return is_plain and _mode != "torch" and _capability(tensor.device) >= capability


def on_device_of(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """A context in which the device of ``tensor`` is the current one. Triton launches on the current device."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


@lru_cache(maxsize=64)
def _capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of an NVIDIA GPU; (0, 0) for any other device, or if Triton is not installed."""
    has_triton = importlib.util.find_spec("triton") is not None
    if not has_triton or torch.version.cuda is None or not torch.cuda.is_available():
        return (0, 0)
    return torch.cuda.get_device_capability(device)
