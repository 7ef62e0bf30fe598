"""FromMeta: what ``Module._apply`` gets to move tensors off the meta device."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.distributed.tensor import DTensor

__all__ = ["FromMeta"]


@dataclass(frozen=True)
class FromMeta:
    """Gives a tensor on the meta device memory without values. Other tensors stay as they are.

    Attributes:
        device: where; None: where each tensor belongs. A DTensor belongs on the device of its mesh.
        home: where a plain tensor belongs. A flat buffer of fully_shard does not say it by itself: see :meth:`at`.
    """

    device: torch.device | str | None = None
    home: torch.device | str = "cpu"

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return tensor
        home = tensor.device_mesh.device_type if isinstance(tensor, DTensor) else self.home
        return torch.empty_like(tensor, device=self.device or home)

    def at(self, home: torch.device | str) -> FromMeta:
        """The same for tensors that belong on devices of type ``home``."""
        return replace(self, home=home)
