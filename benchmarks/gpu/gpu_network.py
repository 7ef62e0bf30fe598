"""A network for one GPU: each collective is a kernel that lasts as long as over stated links, on a stream of its own.

The kernel reads and writes the memory that the collective would read and write on this rank, evenly over its time, on as many
multiprocessors as NCCL takes. What it writes is what would come if every rank had this rank's data. So kernels beside it lose
what they would lose, and the host issues streams, events and waits as with NCCL. Links, latencies and the shape of a ring are
those of benchmarks/predict/network.py; no byte is sent. A collective of less than 16 bytes takes no time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.common.tracker import CollectiveLog
from benchmarks.predict.network import Network

__all__ = ["EmulatedNetwork"]

THREADS = 512
"""Of each block of a collective, about as many as NCCL's have."""

MEMORY = 2e12
"""Bytes per second that a collective moves at least if it has all multiprocessors."""

TURN = 20
"""Microseconds: a kernel compares its progress with the clock as often."""

SOURCE = """
__device__ unsigned long long now() {
    unsigned long long nanoseconds;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(nanoseconds));
    return nanoseconds;
}

// Writes `in` to `out`, the shorter one again and again, in `microseconds`. Counts are in units of 16 bytes.
extern "C" __global__ void paced(int4* out, const int4* in, int outs, int ins, int microseconds, int turns) {
    __shared__ unsigned long long start;
    if (threadIdx.x == 0) start = now();
    __syncthreads();
    unsigned longest = outs > ins ? outs : ins, stride = gridDim.x * blockDim.x;
    for (unsigned turn = 0; turn < (unsigned)turns; ++turn) {
        unsigned begin = (unsigned long long)longest * turn / turns;
        unsigned end = (unsigned long long)longest * (turn + 1) / turns;
        for (unsigned i = begin + blockIdx.x * blockDim.x + threadIdx.x; i < end; i += 8 * stride) {
            int4 values[8];  // In flight at a time: one load after the other would not fill a link.
            #pragma unroll
            for (unsigned k = 0; k < 8; ++k)
                if (i + k * stride < end) values[k] = in[(i + k * stride) % (unsigned)ins];
            #pragma unroll
            for (unsigned k = 0; k < 8; ++k)
                if (i + k * stride < end) out[(i + k * stride) % (unsigned)outs] = values[k];
        }
        while (now() - start < 1000ull * microseconds * (turn + 1) / turns) __nanosleep(100);
    }
}
"""


@functools.cache
def _kernel() -> Any:
    return torch.cuda._compile_kernel(SOURCE, "paced")  # type: ignore[attr-defined]


class _InFlight:
    """A collective on a stream of its own. After ``wait()``, the current stream runs behind it."""

    def __init__(self, done: torch.cuda.Event) -> None:
        self._done = done

    def wait(self) -> bool:
        torch.cuda.current_stream().wait_event(self._done)
        return True


class EmulatedNetwork(CollectiveLog):
    """Counts collectives as :class:`CollectiveLog` does; while ``is_on``, they take their time.

    Args:
        network: its links.
        ranks: of every process group.
        blocks: of a collective's kernel, as NCCL's channels. A kernel of large shared memory, as matmuls have, gets no
            multiprocessor that a block is on. 0: as copy engines do. All multiprocessors move the bytes, in little time, and
            one warp waits for the rest.

    Attributes:
        is_on: whether collectives take the time of the links. Otherwise they take that of this memory: what they bring must
            be there, because matmuls of other numbers need other power, and so another time.
        seconds: what the collectives since ``clear()`` take together.
    """

    def __init__(self, network: Network, ranks: int, blocks: int = 16) -> None:
        super().__init__()
        self._network, self._ranks, self._blocks = network, ranks, blocks
        self._stream = torch.cuda.Stream()
        self.is_on, self.seconds = True, 0.0

    def clear(self) -> None:
        super().clear()
        self.seconds = 0.0

    def _counting(self, kind: str) -> Callable[..., Any]:
        counted = super()._counting(kind)
        cost = self._network.all_reduce if kind == "all_reduce" else self._network.all_gather

        def collective(*args: Any, async_op: bool = False, **options: Any) -> Any:
            done = counted(*args, **options)
            # The output comes first, and the input last; an all-reduce has one tensor.
            tensors = [each for each in (*args, *options.values()) if isinstance(each, torch.Tensor)]
            if not tensors[0].is_cuda or min(each.nbytes for each in tensors) < 16:  # Flags.
                return done
            seconds = cost(max(each.nbytes for each in tensors), self._ranks) if self.is_on else 0.0
            self.seconds += seconds
            work = self._issue(tensors[0], tensors[-1], seconds)
            if async_op:
                return work
            work.wait()
            return None

        return collective

    def _issue(self, output: torch.Tensor, input: torch.Tensor, seconds: float) -> _InFlight:
        self._stream.wait_stream(torch.cuda.current_stream())
        if self._blocks and seconds:
            self._launch(self._blocks, THREADS, output, input, seconds)
        else:
            self._launch(2 * torch.cuda.get_device_properties().multi_processor_count, THREADS, output, input, 0.0)
            if seconds:
                unit = output.flatten()[: 16 // output.itemsize]
                self._launch(1, 32, unit, unit, seconds - output.nbytes / MEMORY)
        return _InFlight(self._stream.record_event())

    def _launch(self, blocks: int, threads: int, output: torch.Tensor, input: torch.Tensor, seconds: float) -> None:
        counts = [each.nbytes // 16 for each in (output, input)]
        microseconds = max(0, round(1e6 * seconds))
        arguments = [output, input, *counts, microseconds, max(1, microseconds // TURN)]
        _kernel()((blocks, 1, 1), (threads, 1, 1), arguments, stream=self._stream)
