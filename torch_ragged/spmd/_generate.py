"""``generate`` of transformers under a plan of own rows: the prompt of each rank is a part of one device's prompt.

It must not know how tokens are made: it gives DTensors to a method of the model that takes plain tensors, too.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from torch_ragged.spmd._boundary import as_dtensor
from torch_ragged.spmd._resolved import Boundary

__all__ = ["add_generate"]


def add_generate(model: nn.Module, boundaries: Sequence[Boundary], mesh: DeviceMesh) -> None:
    """Let ``generate`` of modules that take own rows take them as DTensors.

    It makes masks, positions and tokens of the prompt's rows outside of forward: they would be other rows than those inside.
    """
    for each in boundaries:
        if each.side == "in" and each.action == "annotate" and Shard(0) in each.placements:
            module = model.get_submodule(each.module)
            if callable(getattr(type(module), "generate", None)):
                module.generate = _Generate(module, mesh, each)  # type: ignore[assignment]


class _Generate:
    def __init__(self, module: nn.Module, mesh: DeviceMesh, boundary: Boundary) -> None:
        # Weak: this object is an attribute of the module.
        self._module, self._mesh, self._placements = weakref.ref(module), mesh, boundary.placements

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Plain tensors with rows are own rows, as the prompt is; a vector, such as one of token ids, is equal on all ranks."""

        def placed(value: Any) -> Any:
            has_rows = isinstance(value, torch.Tensor) and value.ndim > 1
            return as_dtensor(value, self._mesh, self._placements) if has_rows else value

        module: Any = self._module()
        given = {name: placed(value) for name, value in kwargs.items()}
        return type(module).generate(module, *map(placed, args), **given)
