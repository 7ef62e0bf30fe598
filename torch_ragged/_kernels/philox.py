"""Single numbers of torch's CUDA generator: the rule that gives an element its number, and a kernel that draws by this rule.

The generator is a counter. A draw of ``n`` numbers runs on ``T`` threads: one per number, in blocks of 256, but no more blocks
than the device holds at once. A call of Philox4x32-10, with the seed as key and the thread and the counter as input, gives a
thread 128 random bits: its *lanes*, 4 numbers of 32 bits or 2 of 64. Element ``i`` gets lane ``i // T % lanes`` of thread
``i % T`` in call ``i // (T * lanes)``. Each call moves the generator's offset by 4.

Two kinds of draws differ. A thread of ``native_dropout`` takes ``vector`` neighbours at once: element ``i`` is neighbour
``n = i % vector`` in turn ``i // vector // T`` of thread ``i // vector % T``, and gets lane ``n % 4`` of call ``n // 4`` of
this turn. A draw of 2 GiB or more is cut into pieces, which are draws one after another: :func:`pieces`.

It must not decide that a device follows the rule: ``torch_ragged.tensor._counter`` tries it. Sources: torch's
``DistributionTemplates.h`` (equal in 2.11, 2.13 and 2.15), ``Dropout.cu`` and ``TensorIterator.cpp``; CURAND's headers; Salmon
et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (2011).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from torch_ragged._kernels._choice import on_device_of
from torch_ragged._kernels.distributions import Sampling
from torch_ragged._kernels.regions import Drawn, joined

__all__ = ["Grid", "grid_of", "pieces", "write_draw"]

_PER_BLOCK = 256  # Threads of a block of torch's kernels.
_STEP = 4  # By which a call moves the offset.
_MOST_DRAWN_BYTES = 2**31 - 1  # Of a draw that torch does not cut.


@dataclass(frozen=True)
class Grid:
    """The threads that draw. ``most`` is the number of threads that the device holds at once, in whole blocks."""

    most: int

    def threads(self, numel: int) -> int:
        return min(-(-numel // _PER_BLOCK) * _PER_BLOCK, self.most)

    def steps(self, numel: int, lanes: int) -> int:
        """How far a draw of ``numel`` elements moves the generator's offset."""
        return _STEP * -(-numel // (self.threads(numel) * lanes))


@lru_cache(maxsize=64)
def grid_of(device: torch.device) -> Grid:
    """The grid of a CUDA device, from its properties."""
    properties = torch.cuda.get_device_properties(device)
    return Grid(properties.multi_processor_count * (properties.max_threads_per_multi_processor // _PER_BLOCK) * _PER_BLOCK)


def pieces(sizes: Sequence[int], strides: Sequence[int], itemsize: int) -> Iterator[int]:
    """The numbers of elements of the draws that torch makes of one: halves of halves, until 32 bits address each byte.

    Args:
        sizes, strides: of a tensor without overlap, its largest stride first.
    """
    yield from _halved(joined(zip(sizes, strides)), itemsize)


def _halved(dims: Sequence[tuple[int, ...]], itemsize: int) -> Iterator[int]:
    numel = math.prod(size for size, _ in dims)
    if numel <= _MOST_DRAWN_BYTES and 1 + sum((size - 1) * stride * itemsize for size, stride in dims) <= _MOST_DRAWN_BYTES:
        yield numel
        return
    (size, stride), *inner = dims
    for half in (size // 2, size - size // 2):
        yield from _halved([(half, stride), *inner] if half > 1 else inner, itemsize)


def write_draw(
    out: torch.Tensor,
    found: Iterable[Drawn],
    distribution: Sampling,
    *,
    numel: int,
    grid: Grid,
    seed: int,
    offset: int,
) -> None:
    """Write to ``out`` its elements of a draw, one launch per region. Allocates nothing.

    Args:
        out: any strides; the regions say what lies where.
        found: as :func:`regions` makes them.
        numel: the elements of the whole draw.
        seed, offset: of the generator before the draw.
    """
    from torch_ragged._kernels import _triton_philox as kernels

    with on_device_of(out):
        for region in found:
            kernels.launch_draw(out, region, distribution, numel, grid.threads(numel), seed, offset // _STEP)
    torch.autograd.graph.increment_version(out)
