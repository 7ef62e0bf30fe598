"""BufferPlacements: what of parameters, gradients and optimizer state each rank keeps (ZeRO-1, 2, 3, hierarchical)."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

__all__ = ["HIERARCHICAL", "ZERO1", "ZERO2", "ZERO3", "BufferPlacements"]


@dataclass(frozen=True)
class BufferPlacements:
    """Placements of the buffers of a group between uses, one per mesh dimension, for ``fully_shard(placements=)``.

    =================  ======  ============  ============  ============  ==========================================
    name               mesh    parameters    gradients     optimizer     per step and group
    =================  ======  ============  ============  ============  ==========================================
    ``ZERO3``          1-D     S             S             S             gather in forward and in backward, reduce
    ``ZERO2``          1-D     R             S             S             gather once, reduce
    ``ZERO1``          1-D     R             P             S             gather once, reduce once per optimizer step
    HSDP, the default  2-D     R, S          R, S          R, S          as ZERO3 within a replica, all-reduce across
    ``HIERARCHICAL``   2-D     R, S          S, S          S, S          gather across once, within twice; reduce both
    =================  ======  ============  ============  ============  ==========================================

    S is ``Shard(0)``, R ``Replicate()``, P ``Partial()``: gradients stay unreduced until the backward that
    ``set_is_last_backward(True)``, the default, marks. The optimizer's placement is that of the DTensor parameters, so of
    ``.grad``, optimizer state and checkpoints. What is gathered once is good for that forward and its backward, and for those
    that follow while gradients accumulate unreduced, unless an operation on a DTensor parameter has changed it. Any other
    forward gathers anew: what a checkpoint or ``.data`` has written meanwhile is seen, on all ranks.
    (Rajbhandari et al., ZeRO, 2020; Wang et al., ZeRO++, 2023.)

    Raises:
        ValueError: the three are none of the rows above.
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
        """Whether parameters stay gathered, over the first dimension at least, that the optimizer has cut."""
        return self.parameters[0] != self.optimizer[0]

    @property
    def stay_unreduced(self) -> bool:
        """Whether gradients do, until the last backward."""
        return self.gradients[0] == Partial()


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
