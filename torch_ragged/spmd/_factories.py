"""Factories: tensors that forward makes by ``torch.zeros`` and the like become DTensors, where the plan says so.

It must not touch other functions: they run as before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed import tensor as dtensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement
from torch.overrides import TorchFunctionMode

from torch_ragged.spmd._boundary import SharedHook, as_dtensor, from_front
from torch_ragged.spmd._resolved import FactoryRecord

__all__ = ["add_factories"]

_LOCAL: dict[Any, Callable[..., Any]] = {
    torch.zeros: dtensor.zeros,
    torch.ones: dtensor.ones,
    torch.empty: dtensor.empty,
    torch.full: dtensor.full,
    torch.rand: dtensor.rand,
    torch.randn: dtensor.randn,
}
"""Functions that make local tensors only. The others make the whole tensor on every rank, and keep a part."""


def add_factories(model: nn.Module, records: Sequence[FactoryRecord], mesh: DeviceMesh) -> None:
    """Register hooks around the forward of each module that ``records`` name."""
    of_module: dict[str, dict[Any, tuple[Placement, ...]]] = {}
    for record in records:
        placements = tuple([placement or Replicate() for placement in record.placements])
        table = of_module.setdefault(record.module, {})
        table.update({getattr(torch, name): placements for name in record.functions})
    for name, table in of_module.items():
        module, modes = model.get_submodule(name), _Modes(table, mesh)
        module.register_forward_pre_hook(modes.enter)
        # Also after an error: a mode that stays entered would make DTensors in the rest of the program.
        module.register_forward_hook(modes.leave, always_call=True)


class _Modes(SharedHook):
    """Enters a mode before the forward of a module, and leaves it afterwards, also if forward raises or is nested."""

    def __init__(self, table: dict[Any, tuple[Placement, ...]], mesh: DeviceMesh) -> None:
        self._table, self._mesh = table, mesh
        self._entered: list[_FactoryMode] = []

    def enter(self, module: nn.Module, args: Any) -> None:
        mode = _FactoryMode(self._table, self._mesh)
        mode.__enter__()
        self._entered.append(mode)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._entered.pop().__exit__(None, None, None)


class _FactoryMode(TorchFunctionMode):
    """Makes DTensors in place of tensors. The innermost mode decides: its table has the rules of outer modules, too."""

    _is_making = False  # Then inner calls of the same functions make local tensors.

    def __init__(self, table: dict[Any, tuple[Placement, ...]], mesh: DeviceMesh) -> None:
        super().__init__()
        self._table, self._mesh = table, mesh

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        placements = self._table.get(func)
        if placements is None or _FactoryMode._is_making:
            return func(*args, **kwargs)
        _FactoryMode._is_making = True
        try:
            return self._make(func, placements, args, kwargs)
        finally:
            _FactoryMode._is_making = False

    def _make(
        self, func: Callable[..., Any], placements: tuple[Placement, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        plain = set(kwargs) <= {"dtype", "device", "requires_grad", "size", "fill_value", "layout"}
        if func in _LOCAL and plain and kwargs.get("layout") in (None, torch.strided):
            size, rest = _size_of(func, args, kwargs)
            placements = _placed(func, placements, len(size))
            options = {key: value for key, value in kwargs.items() if key not in ("size", "device", "fill_value")}
            return _LOCAL[func](size, *rest, device_mesh=self._mesh, placements=placements, **options)
        # Equal on all ranks, also random ones, as ranks have one seed: nothing is sent, and each rank keeps its part. Until
        # then it has the whole tensor.
        made = as_dtensor(func(*args, **kwargs), self._mesh)
        return made.redistribute(placements=_placed(func, placements, made.ndim))


def _placed(func: Any, placements: tuple[Placement, ...], ndim: int) -> tuple[Placement, ...]:
    where = f"what torch.{func.__name__} makes in a factory rule of the plan"
    return tuple([from_front(each, ndim, where) for each in placements])


def _size_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[int, ...], tuple[Any, ...]]:
    """The size, and the value of ``full``: sizes may be one sequence or several numbers."""
    if func is torch.full:
        size, *rest = (*([kwargs["size"]] if "size" in kwargs else []), *args)
        return tuple(size), tuple(rest) or (kwargs["fill_value"],)
    size = kwargs["size"] if "size" in kwargs else args[0] if args and not isinstance(args[0], int) else args
    return tuple(size), ()
