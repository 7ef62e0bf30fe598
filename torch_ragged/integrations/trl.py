"""TRL: weight synchronization with an inference server, with all-gathers in flight. It trains nothing.

Sharding needs nothing of this module: TRL's trainers shard through accelerate, see docs/integrations/trl.md.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

from torch_ragged.integrations._program import require
from torch_ragged.transfer import stream

__all__ = ["StreamedWeights"]

_AT_LEAST = (1, 16)


class StreamedWeights:
    """A mixin for TRL's asynchronous trainers: weights go to the server by :func:`torch_ragged.transfer.stream`.

    ::

        class Trainer(StreamedWeights, AsyncGRPOTrainer):
            max_stream_bytes = 1 << 30

    TRL gathers one parameter, waits for it, and sends it. It gathers on the stream that the transfer has made current. There an
    all-gather can wait for a broadcast that waits for other ranks. With this class, the next parameters are gathered while one
    is sent, on the trainer's stream. If the transfer fails on rank 0, this rank takes part in the remaining all-gathers and
    then raises, so that the other ranks do not wait for it in a collective.

    Attributes:
        max_stream_bytes: the most bytes of whole parameters, as ``max_bytes`` of ``stream``; for each subclass or instance.

    Raises:
        TypeError: the class that is defined has no base with TRL's weight synchronization, or has it first.
        ImportError: TRL is older than 1.16.

    Collectives: those of ``stream``, for the parameters that TRL sends.
    """

    max_stream_bytes = 1 << 30
    _weights: Any = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        trainer = _trainer(cls)
        bases = cls.__mro__
        if trainer is None or bases.index(StreamedWeights) > bases.index(trainer):
            raise TypeError(
                f"{cls.__name__} needs a base with TRL's weight synchronization, behind StreamedWeights: write class "
                f"{cls.__name__}(StreamedWeights, AsyncGRPOTrainer), or with AsyncDistillationTrainer"
            )
        require("trl", _AT_LEAST, "whose weight synchronization this class knows")

    def _streaming_iter(self: Any) -> Iterator[tuple[str, torch.Tensor]]:
        named_params = sys.modules[_trainer(type(self)).__module__]._iter_vllm_named_params  # type: ignore[union-attr]
        pairs = named_params(self.accelerator.unwrap_model(self.model))
        device = self.accelerator.device
        with contextlib.closing(stream(pairs, self.max_stream_bytes)) as self._weights:
            for name, tensor in self._weights:
                whole = [tensor.to(device)]
                del tensor  # Or it would be alive while the next ones are gathered.
                yield name, whole.pop()

    def _sync_weight(self) -> Any:
        try:
            return super()._sync_weight()  # type: ignore[misc]
        finally:
            if self._weights is not None:  # An exception keeps the generator above, and so the stream, open.
                self._weights.close()
                self._weights = None


def _trainer(cls: type) -> type | None:
    """The base that has TRL's ``_streaming_iter``."""
    return next((base for base in cls.__mro__ if base is not StreamedWeights and "_streaming_iter" in vars(base)), None)
