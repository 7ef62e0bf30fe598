"""Shards: the memory of this rank's shards of a group's parameters. The registered DTensors are views of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.distributed.tensor import DTensor, Shard

from torch_ragged.fsdp.core._dbuffer import DBuffer
from torch_ragged.fsdp.core._fsdp_param import Distribution, FSDPParam
from torch_ragged.fsdp.layout._buffer_layout import BufferLayout

__all__ = ["Shards"]


class Shards:
    """All shards in one buffer, in the parameters' original dtype.

    ::

        buffer     DBuffer Shard(0)    | shard of a | shard of b | shard of c | padding |

    If a tensor type has its own all-gather, it holds its shard itself: see ``TypeShards``.

    Attributes:
        buffer: the shards. ``.grad`` has the buffer's dtype and device, and is pinned if the buffer is.
    """

    buffer: DBuffer

    def __init__(self, layout: BufferLayout, rank: int) -> None:
        self._layout, self._rank = layout, rank

    def attach(self, params: Sequence[FSDPParam]) -> None:
        """These parameters were made of the shards. Plain shards need not know them."""

    def allocate(self, dtype: torch.dtype, device: torch.device, is_pinned: bool) -> None:
        """Make a new buffer for parameters of ``dtype``."""
        self.buffer = DBuffer(self._layout, Shard(0), self._rank, dtype, device, is_pinned)
        self.buffer.zero_padding()
        self._storage = self.buffer.flat.untyped_storage()._cdata

    def store(self, index: int, distribution: Distribution, value: torch.Tensor) -> None:
        """Copy this rank's interval of a whole parameter into the buffer."""
        start, stop = self._layout.local_range(index, self._rank)
        self.buffer.tensor(index).copy_(distribution.flat(value)[start:stop])

    def load(self, index: int, local: torch.Tensor) -> None:
        """Copy the local tensor of a sharded parameter into the buffer."""
        self.buffer.tensor(index).copy_(local.reshape(-1))

    def dtensor(self, index: int, distribution: Distribution) -> DTensor:
        """The sharded parameter, as a view of the buffer."""
        return distribution.sharded(self.buffer.tensor(index), self._layout, index)

    def holds(self, local: torch.Tensor) -> bool:
        """Whether ``local``, the local tensor of a sharded parameter, lies in the buffer."""
        if local.dtype != self.buffer.flat.dtype:
            return False
        if type(local) is torch.Tensor:  # Asked of each parameter in each forward.
            return local.untyped_storage()._cdata == self._storage
        return self.buffer.holds(local)

    def convert_meta(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """``function`` materializes the parameters, as in ``Module.to_empty``. :meth:`allocate` follows."""
