"""Draws on a GPU, whose generator is a counter: a kernel computes the elements that a rank owns, and no others.

It must not communicate. The kernel (:mod:`torch_ragged._kernels.philox`) needs no memory beside the local tensor, and the time
of the local elements. It follows torch's rule, but torch may change this rule, and logarithms and sines have no standard bits.
Therefore a trial decides, once per kind of number, dtype and device: the kernel and torch draw a tensor of a turn and a half,
and both the bits and the generators must be equal.

If they are not, or if Triton cannot run, torch's own kernels draw *turn by turn*. A turn is what the largest grid draws in one
call per thread: 4 MB of float32 on an H100. The generator is moved over turns without elements of this rank. A second trial
finds the length of a turn. If that fails, too, the caller draws the whole tensor. A trial takes some milliseconds, and the
memory of three turns.

On an H200 (torch 2.11, Triton 3.6), the kernel has torch's bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from logging import getLogger
from typing import Any, Optional, Union

import torch

from torch_ragged._kernels import philox
from torch_ragged._kernels._choice import runs_triton
from torch_ragged._kernels.distributions import Sampling, distribution_of, dropout, example
from torch_ragged._kernels.regions import Drawn, regions
from torch_ragged.tensor._ownership import Box, row_major
from torch_ragged.tensor._sampler import Sampler, chunks_of, views_of

__all__ = ["Kernel", "Turns", "draw_by_counter", "draw_kept", "way_of"]

_SEED, _OFFSET = 0x9E3779B97F4A7C15, 2**34 + 4  # Of trials: all words of seed and counter have bits.
_logger = getLogger(__name__)


@dataclass(frozen=True)
class Kernel:
    """The kernel draws."""

    distribution: Sampling
    grid: philox.Grid

    def steps(self, numel: int) -> int:
        """How far a draw of ``numel`` elements moves the generator's offset."""
        return self.grid.steps(numel, self.distribution.lanes)


@dataclass(frozen=True)
class Turns:
    """torch's kernels draw, ``length`` elements per turn, which moves the generator's offset by ``step``."""

    length: int
    step: int

    def steps(self, numel: int) -> int:
        """As :meth:`Kernel.steps`."""
        return self.step * -(-numel // self.length)


Way = Union[Kernel, Turns]


def way_of(sampler: Sampler, local: torch.Tensor, numel: int) -> Optional[Way]:
    """How a draw of ``numel`` elements is made on a GPU.

    None if it must be whole: on another device, in a graph that is captured, if trials fail, or for 2 GiB of complex numbers,
    which torch may cut between a real and an imaginary part.
    """
    device, dtype = local.device, sampler.dtype
    if not _has_counter(device) or (dtype.is_complex and numel * dtype.itemsize >= 2**31):
        return None
    distribution = distribution_of(sampler.op, sampler.args, dtype)
    if distribution is not None and runs_triton(local):
        if _draws_as_torch(distribution.kind, distribution.lanes, dtype, device):
            return Kernel(distribution, philox.grid_of(device))
    return _turns_of(sampler, device)


def draw_by_counter(
    way: Way, sampler: Sampler, shape: Sequence[int], stride: Sequence[int], boxes: Sequence[Box], local: torch.Tensor
) -> None:
    """Draw the elements of ``boxes``, as :func:`torch_ragged.tensor._draw.draw_owned` describes."""
    sampler.fill(local.new_empty(0))  # torch checks the arguments, on every rank, and draws nothing.
    held, generator = _DrawnBoxes(shape, _order(stride), boxes, local), sampler.generator or _default_generator(local.device)
    in_memory = [shape[dim] for dim in held.order], [stride[dim] for dim in held.order]
    lengths = list(philox.pieces(*in_memory, sampler.dtype.itemsize))
    if len(lengths) > 1:  # torch counts the whole draw before it cuts it.
        _skip(generator, way.steps(math.prod(shape)))
    start = 0
    for length in lengths:
        if isinstance(way, Kernel):
            _write(local, held.regions(start, length), way.distribution, length, way.grid, generator)
            _skip(generator, way.steps(length))
        else:
            _draw_turns(way, sampler, generator, held, start, length)
        start += length


def _draw_turns(turns: Turns, sampler: Sampler, generator: Any, held: _DrawnBoxes, start: int, length: int) -> None:
    # A smaller tensor would have a smaller grid, so all turns are whole. A draw shorter than a turn is one chunk of its length.
    scratch = torch.empty(min(turns.length, length), dtype=sampler.dtype, device=held.local.device)
    for parts in held.chunks(start, length, len(scratch)):
        if not parts:
            _skip(generator, turns.step)
            continue
        sampler.fill(scratch)
        for view, sizes, strides, offset in parts:
            view.copy_(scratch.as_strided(sizes, strides, offset))


def draw_kept(
    p: float, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int], boxes: Sequence[Box], mask: torch.Tensor
) -> Optional[float]:
    """Write to ``mask`` what ``native_dropout`` keeps of a tensor of ``dtype``; the result is the factor of what it keeps.

    It is the mask for a tensor in memory of its own, which begins at a multiple of 64 bytes. None if torch must draw the whole.
    """
    if not _has_counter(mask.device) or not runs_triton(mask):
        return None
    vector, numel = _vector_of(dtype, mask.device), math.prod(shape)
    if vector is None:
        return None
    is_dense = 1 + sum((size - 1) * step for size, step in zip(shape, stride)) == numel
    vector = math.gcd(vector, numel) if is_dense else 1
    distribution, factor = dropout(p, dtype, vector)
    # Neighbours are taken in the order of memory, single elements in the order of the shape.
    held = _DrawnBoxes(shape, _order(stride if vector > 1 else row_major(shape)), boxes, mask)
    grid, generator = philox.grid_of(mask.device), _default_generator(mask.device)
    _write(mask, held.regions(0, numel), distribution, numel, grid, generator)
    _skip(generator, grid.steps(numel, distribution.lanes))
    return factor


# --- the generator, and what a rank keeps ---------------------------------------------------------------------------------


def _has_counter(device: torch.device) -> bool:
    """Whether the device's generator is a counter that can be moved. While a graph is captured, only torch's kernels can."""
    return device.type == "cuda" and not torch.cuda.is_current_stream_capturing()


def _default_generator(device: torch.device) -> Any:
    return torch.cuda.default_generators[device.index or 0]


def _skip(generator: Any, steps: int) -> None:
    generator.set_offset(generator.get_offset() + steps)


def _write(
    out: torch.Tensor,
    found: Sequence[Drawn],
    distribution: Sampling,
    numel: int,
    grid: philox.Grid,
    generator: Any,
) -> None:
    seed, offset = generator.initial_seed(), generator.get_offset()
    philox.write_draw(out, found, distribution, numel=numel, grid=grid, seed=seed, offset=offset)


def _order(stride: Sequence[int]) -> list[int]:
    """The dimensions in the order of memory."""
    return sorted(range(len(stride)), key=lambda dim: -stride[dim])


@dataclass(frozen=True)
class _DrawnBoxes:
    """The boxes of a draw of ``shape`` that ``local`` holds; dimensions are drawn in ``order``."""

    shape: Sequence[int]
    order: list[int]
    boxes: Sequence[Box]
    local: torch.Tensor

    def chunks(self, start: int, length: int, most: int) -> Iterator[list[tuple[torch.Tensor, Any, Any, int]]]:
        """For each chunk of at most ``most`` elements: views of ``local``, with their sizes, steps and offsets in the chunk."""
        mine = [view.permute(self.order) for view in views_of(self.local, self.boxes)]
        for _, _, moves in chunks_of(self.shape, self.order, self.boxes, start, start + length, most):
            yield [(mine[number][selection], *place) for number, selection, *place in moves]

    def regions(self, start: int, length: int) -> list[Drawn]:
        """What ``local`` holds of the ``length`` elements from ``start`` on, which are a draw of their own."""
        origin, parts = self.local.storage_offset(), next(self.chunks(start, length, length))
        return regions(
            Drawn(offset, int(view.storage_offset() - origin), tuple(zip(sizes, steps, view.stride())))
            for view, sizes, steps, offset in parts
        )


# --- trials -----------------------------------------------------------------------------------------------------------


@cache
def _draws_as_torch(kind: str, lanes: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernel gives the bits of torch, and the generator its state, for small and for large draws."""
    op, args = example(kind, lanes, dtype)
    distribution, grid = distribution_of(op, args, dtype), philox.grid_of(device)
    assert distribution is not None
    generator = torch.Generator(device).manual_seed(_SEED)
    for numel in (1000, grid.most * lanes * 3 // 2 + 1):
        generator.set_offset(_OFFSET)
        theirs, ours = (torch.zeros(numel, dtype=dtype, device=device) for _ in range(2))
        op(theirs, *args, generator=generator)
        moved = generator.get_offset() - _OFFSET
        generator.set_offset(_OFFSET)
        if not _can_write(ours, distribution, grid, generator):
            return False
        if moved != grid.steps(numel, lanes) or not _same_bits(ours, theirs):
            _logger.info("%s of %s on %s: torch draws by another rule than the kernel, so torch draws", kind, dtype, device)
            return False
    return True


@cache
def _vector_of(dtype: torch.dtype, device: torch.device) -> Optional[int]:
    """How many neighbours a thread of ``native_dropout`` takes of a large tensor; None if no number gives its bits."""
    grid, generator = philox.grid_of(device), _default_generator(device)
    most, state = grid.most * 6 // 16 * 16, generator.get_state()
    candidates = list(dict.fromkeys((16 // dtype.itemsize, 8, 4, 2)))
    try:
        for numel in (most, most + 4, most + 2, most + 1):  # Also sizes that allow fewer neighbours, or none.
            generator.manual_seed(_SEED).set_offset(_OFFSET)
            values = torch.linspace(-3.0, 3.0, numel, dtype=dtype, device=device)
            dropped, kept = torch.native_dropout(values, 0.3, True)
            moved, still = generator.get_offset() - _OFFSET, []
            for vector in candidates:
                distribution, scale = dropout(0.3, dtype, math.gcd(vector, numel))
                mask = torch.zeros_like(kept)
                generator.set_offset(_OFFSET)
                if not _can_write(mask, distribution, grid, generator):
                    return None
                is_equal = moved == grid.steps(numel, 4) and torch.equal(mask, kept)
                if is_equal and _same_bits(values.mul(mask).mul_(scale), dropped):
                    still.append(vector)
            candidates = still
    finally:
        generator.set_state(state)
    if not candidates:
        _logger.info("native_dropout of %s on %s: torch draws by another rule than the kernel, so torch draws", dtype, device)
    return candidates[0] if candidates else None


def _can_write(out: torch.Tensor, distribution: Sampling, grid: philox.Grid, generator: Any) -> bool:
    """Draw all of a flat tensor by the kernel. Triton needs a compiler at run time: where it lacks one, torch draws."""
    whole = [Drawn(0, 0, ((out.numel(), 1, 1),))]
    try:
        _write(out, whole, distribution, out.numel(), grid, generator)
    except Exception as error:
        _logger.warning("the kernel of random numbers cannot run, so torch draws: %s: %s", type(error).__name__, error)
        return False
    return True


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


_turns: dict[Any, Optional[Turns]] = {}


def _turns_of(sampler: Sampler, device: torch.device) -> Optional[Turns]:
    """The turns of an op, by a trial. Integers of few and of many values have different ones."""
    key = (sampler.op, sampler.dtype, device, sampler.args if "random_" in str(sampler.op) else None)
    if key not in _turns:
        _turns[key] = _try_turns(replace(sampler, generator=torch.Generator(device)), device)
    return _turns[key]


def _try_turns(sampler: Sampler, device: torch.device) -> Optional[Turns]:
    """Draw two turns and a half, whole and in turns: of 4 elements per thread, or of 2."""
    generator: Any = sampler.generator
    for lanes in (4, 2):
        length = philox.grid_of(device).most * lanes
        generator.manual_seed(_SEED)
        whole = torch.empty(2 * length + length // 2, dtype=sampler.dtype, device=device)
        sampler.fill(whole)
        end = generator.get_offset()
        generator.manual_seed(_SEED)
        scratch, step, is_equal = whole.new_empty(length), 0, True
        for part in whole.split(length):
            sampler.fill(scratch)
            step = step or generator.get_offset()
            is_equal = is_equal and torch.equal(part, scratch[: len(part)])
        if is_equal and generator.get_offset() == end:
            return Turns(length, step)
    return None
