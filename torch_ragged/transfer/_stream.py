"""``stream``: whole tensors of a sharded model, one after another, in bounded memory. It changes no parameter.

::

    all-gather 0   all-gather 1 | yield 0   all-gather 2 | yield 1   ...      | is a wait, for the tensor that is yielded
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from torch_ragged._register._torch import waited

__all__ = ["stream"]


def stream(
    model: nn.Module | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
    max_bytes: int,
    *,
    dtype: torch.dtype | None = None,
) -> Generator[tuple[str, torch.Tensor], None, None]:
    """Yield ``(name, whole tensor)`` of each tensor, in one order on all ranks, with the next all-gathers in flight.

    ::

        with contextlib.closing(stream(model, 1 << 30, dtype=torch.bfloat16)) as tensors:
            for name, tensor in tensors:
                engine.load(name, tensor)

    All ranks must iterate, also those that need no tensor. If a rank ends its loop early, the generator is closed, and takes
    part in the all-gathers of all remaining tensors without yielding them. So the other ranks do not wait for this rank. A
    ``break`` closes the generator at once. After an exception Python keeps it until the exception is handled: therefore use
    ``contextlib.closing``, as above.

    Args:
        model: a module, of which parameters and persistent buffers are taken, as in ``state_dict()``; a mapping; or pairs of
            names and tensors, which are read as they are needed. DTensors may have any placements. Plain tensors are yielded as
            they are. Names and their order must be equal on all ranks.
        max_bytes: the most bytes of the yielded tensor and of the tensors in flight together. If one tensor alone is larger, it
            is the only one. If model parallelism cuts a tensor too, unpacking takes its bytes once more. A tied tensor comes
            once for each of its names.
        dtype: the dtype of yielded floating-point tensors. They are cast before they are all-gathered. None: each its own.

    Yields:
        a name, and a tensor without gradients, on the device of its DTensor's mesh. It may be the parameter's own memory: do
        not write to it, and do not change the model while the generator is open. Memory is bounded only if you drop each
        tensor before you ask for the next one. The tensor is complete: the CPU has waited for it, so you may use it on any
        stream. The all-gathers are issued on the stream that is current in the call of ``stream``, also if the consumer
        iterates on another one, where they would wait for the consumer's own collectives, and ranks could deadlock.

    Raises:
        ValueError: ``max_bytes`` is not a positive integer.
        TypeError: ``dtype`` is not a floating-point dtype.

    Source: TRL's and verl's loops over ``param.full_tensor()``, which gather one tensor at a time.
    Collectives: for each DTensor, those of ``redistribute`` to ``Replicate()``: mostly one.
    """
    if not isinstance(max_bytes, int) or isinstance(max_bytes, bool) or max_bytes < 1:
        raise ValueError(f"stream(max_bytes=) takes a positive number of bytes, got {max_bytes!r}")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"stream(dtype=) takes a floating-point dtype or None, got {dtype!r}")
    device = torch.accelerator.current_accelerator(check_available=True)
    issuing = None if device is None else torch.accelerator.current_stream(device)
    return _stream(_named_tensors(model), max_bytes, _Gather(dtype, issuing))


def _named_tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    pairs = model.state_dict() if isinstance(model, nn.Module) else model
    pairs = pairs.items() if isinstance(pairs, Mapping) else pairs
    return ((name, value) for name, value in pairs if isinstance(value, torch.Tensor))  # A state dict may have other objects.


def _stream(
    tensors: Iterator[tuple[str, torch.Tensor]], max_bytes: int, gather: _Gather
) -> Generator[tuple[str, torch.Tensor], None, None]:
    in_flight: deque[tuple[str, torch.Tensor, int]] = deque()
    upcoming, held = next(tensors, None), 0
    try:
        while True:
            while upcoming is not None and (not in_flight or held + gather.nbytes(upcoming[1]) <= max_bytes):
                name, tensor = upcoming
                nbytes = gather.nbytes(tensor)
                in_flight.append((name, gather.issue(tensor), nbytes))
                upcoming, held = next(tensors, None), held + nbytes
            if not in_flight:
                return
            name, tensor, nbytes = in_flight.popleft()
            # No local name may hold the tensor while it is yielded, or it would be alive while the next ones are gathered.
            whole = [gather.wait(tensor)]
            del tensor
            yield name, whole.pop()
            held -= nbytes
    except GeneratorExit:
        for _, tensor, _ in in_flight:
            gather.wait(tensor)
        in_flight.clear()
        for tensor in () if upcoming is None else (upcoming[1], *(value for _, value in tensors)):
            gather.wait(gather.issue(tensor))
        raise


class _Gather:
    """How one tensor becomes whole, as ``dtype`` (None: its own), by work on the stream ``issuing`` (None: no accelerator)."""

    def __init__(self, dtype: torch.dtype | None, issuing: torch.Stream | None) -> None:
        self._dtype, self._issuing = dtype, issuing

    def nbytes(self, tensor: torch.Tensor) -> int:
        """The bytes that gathering ``tensor`` allocates; 0 for a tensor that this rank holds."""
        if not isinstance(tensor, DTensor) or all(placement.is_replicate() for placement in tensor.placements):
            return 0
        return tensor.numel() * self._dtype_of(tensor).itemsize

    def issue(self, tensor: torch.Tensor) -> torch.Tensor:
        """Issue the collectives; the result may be in flight."""
        with torch.no_grad(), self._issuing or contextlib.nullcontext():
            tensor = tensor.detach().to(self._dtype_of(tensor))
            if not isinstance(tensor, DTensor):
                return tensor
            mesh = tensor.device_mesh
            if tensor.device.type != mesh.device_type:  # Offloaded: the process group has no collectives of CPU tensors.
                tensor = tensor.to(mesh.device_type)
            return tensor.redistribute(placements=[Replicate()] * mesh.ndim, async_op=True).to_local()

    def wait(self, tensor: torch.Tensor) -> torch.Tensor:
        with self._issuing or contextlib.nullcontext():
            tensor = waited(tensor)
        if self._issuing is not None:
            self._issuing.synchronize()
        return tensor

    def _dtype_of(self, tensor: torch.Tensor) -> torch.dtype:
        return self._dtype if self._dtype is not None and tensor.is_floating_point() else tensor.dtype
