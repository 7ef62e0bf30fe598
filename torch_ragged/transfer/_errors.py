"""Errors of transfers."""

from __future__ import annotations

from torch_ragged._ranks.peers import PeerError

__all__ = ["TransferError"]


class TransferError(PeerError):
    """A transfer failed on its way. The source is unchanged. The target is not complete: some of it may be old.

    Attributes:
        tensors: the tensors that were on their way.
        ranks: the global ranks that failed or did not answer, as far as this rank knows.
    """

    def __init__(self, text: str, tensors: tuple[str, ...] = (), ranks: tuple[int, ...] = ()) -> None:
        super().__init__(text, ranks, "transfer")
        self.tensors = tensors

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.tensors, self.ranks)
