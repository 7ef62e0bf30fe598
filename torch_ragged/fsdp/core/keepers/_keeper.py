"""Keeper: keeps gathered parameters after reshard, so that the next all-gather is smaller. It does not decide when."""

from __future__ import annotations

from torch_ragged.fsdp.comm._collectives import Collectives, Work
from torch_ragged.fsdp.core._dbuffer import MemoryLog
from torch_ragged.fsdp.core.encodings._plain import Encoding, Shards

__all__ = ["Keeper"]


class Keeper:
    """What the group calls. Without a keeper, each all-gather starts from the shards.

    Attributes:
        keeps_buffer: whether the gathered buffer itself stays allocated.
    """

    keeps_buffer = False

    def twin(self, log: MemoryLog) -> Keeper:
        """A keeper like this one that keeps nothing yet, for a memory report. Its bytes go to ``log``."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Bytes kept beside the gathered buffer."""
        return 0

    @property
    def holds_part(self) -> bool:
        """Whether this rank keeps a part of the gathered parameters from forward to backward now."""
        return False

    def all_gather(self, shards: Shards, encoding: Encoding, versions: list[int], collectives: Collectives) -> Work:
        """Fill the gathered buffer with the parameters in the given ``versions``. At most one all-gather of the shards."""
        raise NotImplementedError

    def keep(self, encoding: Encoding) -> None:
        """Forward is over: keep a part of the gathered parameters for backward."""

    def drop(self) -> None:
        """Free the part kept for backward."""

    def invalidate(self) -> None:
        """The parameters may have changed: the next all-gather starts from the shards."""

    def reset(self) -> None:
        """The group has new buffers: free everything that was kept."""
