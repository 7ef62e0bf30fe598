"""The peak of dense bfloat16 products of a device, and the FLOPs of a token: what ``monitor`` needs for MFU.

It must not guess: a device that is not in the table has no peak.
"""

from __future__ import annotations

import re

import torch
from torch import nn

__all__ = ["device_peak", "flops_per_token_of", "peak_flops_of"]

_PEAKS = (
    # Words of the device's name, and its FLOPs per second in bfloat16, without sparsity, as its maker states them. The first
    # entry counts whose words are all in the name.
    (("H100", "NVL"), 835e12),
    (("H100", "PCIe"), 756e12),
    (("H100",), 989e12),
    (("H200", "NVL"), None),  # Less than the other one.
    (("H200",), 989e12),
    (("A100",), 312e12),
    (("B200",), 2250e12),
    (("L40S",), 362e12),
    (("MI300X",), 1307e12),
    (("MI325X",), 1307e12),
    (("MI250X",), 191.5e12),  # One of its two dies, which is a device for torch.
)


def peak_flops_of(name: str) -> float | None:
    """The peak of a device by its name, as ``torch.cuda.get_device_name`` has it. None: unknown, or a part of a GPU (MIG)."""
    words = set(re.findall(r"\w+", name))
    if "MIG" in words:
        return None
    return next((peak for needed, peak in _PEAKS if words.issuperset(needed)), None)


def flops_per_token_of(model: nn.Module) -> float:
    """FLOPs of a forward and a backward per token: 6 per element of a trained parameter, 4 per element of a frozen one.

    Those are the products with weights: 2 in forward, 2 for the gradient of the input, 2 for that of the weight. Weights that
    only an ``nn.Embedding`` has are looked up, and count nothing.
    """
    products: dict[nn.Parameter, int] = {}
    for module in model.modules():
        if not isinstance(module, nn.Embedding):
            products.update(
                {param: 6 if param.requires_grad else 4 for param in module._parameters.values() if param is not None}
            )
    return float(sum(factor * param.numel() for param, factor in products.items()))


def device_peak(device: torch.device) -> float | None:
    """The peak of ``device``. None: it is no GPU, or an unknown one."""
    return peak_flops_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
