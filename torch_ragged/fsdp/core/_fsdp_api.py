"""BufferPlacements: which part of parameters, gradients and optimizer state each rank keeps (ZeRO-1, 2, 3, hierarchical)."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

__all__ = ["BufferPlacements", "HIERARCHICAL", "InvalidArgument", "ZERO1", "ZERO2", "ZERO3", "check_bool", "checks_bools"]


T = TypeVar("T")


class InvalidArgument(ValueError, AssertionError):
    """A wrong argument. FSDP2 raises AssertionError for it, this package ValueError: this class is both."""


def check_bool(call: str, name: str, value: Any) -> None:
    """Raise if the argument ``name`` of ``call`` is no truth value. A string or None would be taken for one silently.

    Numbers are truth values, since FSDP2 takes ``step % 4``, and so are scalars of NumPy and tensors.
    """
    if not isinstance(value, int) and not hasattr(value, "item"):
        raise ValueError(f"{call}: {name} must be a bool, got {value!r}")


def checks_bools(cls: type[T]) -> type[T]:
    """The class ``cls``, whose public methods call :func:`check_bool` on each argument with the annotation ``bool``."""
    for name, method in list(vars(cls).items()):
        if inspect.isfunction(method) and not name.startswith("_"):
            params = enumerate(inspect.signature(method).parameters.values())
            if bools := {each.name: index for index, each in params if each.annotation in (bool, "bool")}:
                setattr(cls, name, _checked(method, bools))
    return cls


def _checked(method: Callable[..., Any], positions: dict[str, int]) -> Callable[..., Any]:
    @functools.wraps(method)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for name, index in positions.items():
            if name in kwargs or index < len(args):
                check_bool(method.__name__, name, kwargs[name] if name in kwargs else args[index])
        return method(*args, **kwargs)

    return checked


@dataclass(frozen=True)
class BufferPlacements:
    """The placements of a group's buffers between uses, one per mesh dimension, for ``fully_shard(placements=)``.

    =================  ======  ============  ============  ============  =================================================
    name               mesh    parameters    gradients     optimizer     per step and group
    =================  ======  ============  ============  ============  =================================================
    ``ZERO3``          1-D     S             S             S             all-gather in forward and backward, reduce
    ``ZERO2``          1-D     R             S             S             all-gather once, reduce
    ``ZERO1``          1-D     R             P             S             all-gather once, reduce once per optimizer step
    HSDP, the default  2-D     R, S          R, S          R, S          as ZERO3 within a replica, all-reduce across
    ``HIERARCHICAL``   2-D     R, S          S, S          S, S          all-gather across once, within twice; reduce both
    =================  ======  ============  ============  ============  =================================================

    S is ``Shard(0)``, R is ``Replicate()``, P is ``Partial()``. With P, gradients stay unreduced until the last backward of an
    optimizer step: see ``set_is_last_backward``. DTensor parameters, ``.grad`` and checkpoints have the optimizer's
    placement.

    Parameters that are all-gathered once serve one forward and its backward. They also serve the next passes, as long as
    gradients accumulate unreduced and no operation changes a DTensor parameter. Every other forward all-gathers again, so that
    all ranks see what a checkpoint or a write to ``.data`` has changed.
    (Rajbhandari et al., ZeRO, 2020; Wang et al., ZeRO++, 2023.)

    Raises:
        ValueError: the three placements are in no row above.
    """

    parameters: tuple[Placement, ...]
    gradients: tuple[Placement, ...]
    optimizer: tuple[Placement, ...]

    def __post_init__(self) -> None:
        if (self.parameters, self.gradients, self.optimizer) not in _KNOWN:
            raise ValueError(
                f"{self} is not supported; expected ZERO1, ZERO2 or ZERO3 on a 1-D mesh, HIERARCHICAL or HSDP, all three "
                "(Replicate(), Shard(0)), on a 2-D one"
            )

    @property
    def stay_gathered(self) -> bool:
        """Whether parameters stay gathered, at least over the first mesh dimension, although optimizer state is sharded."""
        return self.parameters[0] != self.optimizer[0]


_S, _R, _P = Shard(0), Replicate(), Partial()
_KNOWN = [
    ((_S,), (_S,), (_S,)),
    ((_R,), (_S,), (_S,)),
    ((_R,), (_P,), (_S,)),
    ((_R, _S), (_R, _S), (_R, _S)),
    ((_R, _S), (_S, _S), (_S, _S)),
]

ZERO3 = BufferPlacements((_S,), (_S,), (_S,))
ZERO2 = BufferPlacements((_R,), (_S,), (_S,))
ZERO1 = BufferPlacements((_R,), (_P,), (_S,))
HIERARCHICAL = BufferPlacements((_R, _S), (_S, _S), (_S, _S))
