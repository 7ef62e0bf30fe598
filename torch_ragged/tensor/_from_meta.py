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
        home: where a plain tensor belongs, which does not say it by itself; None: plain tensors stay. See :meth:`at`.
    """

    device: torch.device | str | None = None
    home: torch.device | str | None = None

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        home = tensor.device_mesh.device_type if isinstance(tensor, DTensor) else self.home
        return torch.empty_like(tensor, device=self.device or home) if tensor.is_meta and home is not None else tensor

    def at(self, home: torch.device | str) -> FromMeta:
        """The same for flat buffers of fully_shard that belong on devices of type ``home``."""
        return replace(self, home=home)
