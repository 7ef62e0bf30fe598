"""Float8Policy and Float8Encoding: matrices that are all-gathered as 8-bit codes, half the bytes of bfloat16."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate

from torch_ragged._kernels import float8
from torch_ragged._kernels.tiles import TileRun, TileTable, matrix_runs
from torch_ragged.fsdp.comm._collectives import Collectives, Work
from torch_ragged.fsdp.core._dbuffer import DBuffer, MemoryPool
from torch_ragged.fsdp.core._encoding import Encoding
from torch_ragged.fsdp.core._memory_log import MemoryLog
from torch_ragged.fsdp.core._shards import Shards
from torch_ragged.fsdp.layout._buffer_layout import BufferLayout, TensorSpec
from torch_ragged.granularity import Granularity, blocks, elements

__all__ = ["Float8Encoding", "Float8Policy", "keeps_tiles"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SLOT_ALIGNMENT = 128


@dataclass(frozen=True)
class Float8Policy(MixedPrecisionPolicy):
    """A ``MixedPrecisionPolicy`` whose matrices travel as float8: every tile of them as e4m3 codes and a float32 scale.

    The sharded parameters, gradients and the optimizer stay as they are. What forward and backward compute with is the
    parameter quantised and dequantised, in ``param_dtype``; the same bits on any number of ranks, those of
    :mod:`torch_ragged._kernels.float8` on the whole parameter (of what model parallelism leaves of it on a rank).

    Quantised are parameters of two or more dimensions whose granularity keeps every tile on one rank: ``blocks(128, 128)``,
    ``rows(n)`` of whole tiles, ``tensor()``. Where ``fully_shard`` is given neither ``orig_param_policy`` nor
    ``shard_placement_fn``, such parameters get ``blocks(*tile)``, but for those of embeddings. All others are gathered in
    ``param_dtype``, in a group of their own: one more all-gather and reduce-scatter per unit that has both.

    Bytes per element and all-gather: 1, plus 4 per tile, against 2 in bfloat16. Memory: an all-gather in flight
    holds its codes only; they and the parameters in ``param_dtype`` are there together for the moment of dequantising.

    Args:
        param_dtype, reduce_dtype, output_dtype, cast_forward_inputs: as of ``MixedPrecisionPolicy``.
        tile: ``(128, 128)``, or ``(1, 128)`` for finer scales (3 % more bytes).

    Raises:
        ValueError: ``tile`` is neither; or ``param_dtype`` is no float of 16 or 32 bits.
    """

    tile: tuple[int, int] = float8.TILES[0]

    def __post_init__(self) -> None:
        if self.tile not in float8.TILES:
            raise ValueError(f"Float8Policy tile must be one of {float8.TILES}, got {self.tile!r}")
        if self.param_dtype not in (None, *_DTYPES):
            raise ValueError(f"Float8Policy param_dtype must be one of {_DTYPES} or None, got {self.param_dtype}")

    def default_granularity(self, param: torch.Tensor, places: Sequence[tuple[nn.Module, str]]) -> Granularity:
        """Of a parameter that the caller of ``fully_shard`` says nothing about."""
        is_embedding = any(isinstance(module, (nn.Embedding, nn.EmbeddingBag)) for module, _ in places)
        return elements() if is_embedding or param.ndim < 2 else blocks(*self.tile)

    def quantizes(self, spec: TensorSpec, dtype: torch.dtype) -> bool:
        """Whether parameters of ``dtype``, laid out as ``spec``, travel as float8."""
        return dtype in _DTYPES and keeps_tiles(spec, self.tile[0])


def keeps_tiles(spec: TensorSpec, height: int) -> bool:
    """Whether no shard boundary can fall inside a band of ``height`` rows, counted from the start of each matrix."""
    if len(spec.shape) < 2 or not spec.numel:
        return False
    rows, columns = spec.shape[-2:]
    matrix, band, period = rows * columns, height * columns, spec.period or spec.numel
    if period == matrix:
        return spec.block % band == 0 or spec.block >= matrix

    def keeps(step: int, end: int) -> bool:
        """Whether multiples of ``step`` up to ``end`` are between bands."""
        return step >= end or step % matrix == 0 or (rows % height == 0 and step % band == 0)

    return keeps(spec.block, period) and keeps(period, spec.numel)


class Float8Encoding(Encoding):
    """Parameters of a :class:`Float8Policy` that are quantised.

    ::

        shards     DBuffer Shard(0), original dtype
           | each tile quantised, straight into this rank's slot
        codes      DBuffer Replicate(), bytes: | codes, scales | codes, scales | ...   one slot per rank, all of one size
           | one all-gather, in place
           | each tile dequantised; then the codes are freed
        buffer     DBuffer Replicate(), param_dtype; as of plain parameters from here on

    If neighbours keep a part of the gathered parameters for backward, it is one in ``param_dtype``, and gathered as such.

    Attributes:
        codes: the codes and scales; allocated from the all-gather to its end.
    """

    def __init__(self, layout: BufferLayout, rank: int, tile: tuple[int, int]) -> None:
        super().__init__(layout, rank)
        self._slots = _Slots(layout, tile)
        self._mine = TileTable(self._slots.runs_of(rank, gathered=False), tile)
        everything = [run for each in range(layout.ranks) for run in self._slots.runs_of(each, gathered=True)]
        self._everything = TileTable(everything, tile)

    def make_buffers(self, dtype: torch.dtype, device: torch.device, pool: MemoryPool | None, log: MemoryLog) -> None:
        super().make_buffers(dtype, device, pool, log)
        self.codes = DBuffer(self._slots.layout, Replicate(), self._rank, torch.uint8, device, pool=pool, log=log)
        self.codes.free()

    def buffers(self) -> list[DBuffer]:
        return [self.buffer, self.codes]

    @property
    def numel_by_dtype(self) -> dict[torch.dtype, int]:
        return {**super().numel_by_dtype, torch.uint8: self._slots.layout.numel}

    def all_gather(self, shards: Shards, collectives: Collectives) -> Work:
        self.codes.allocate()
        slot = self.codes.shard()
        float8.quantize(shards.buffer.flat.to(slot.device, non_blocking=True), slot, self._mine)
        return collectives.all_gather(self.codes.flat, slot)

    def decode(self, shards: Shards, keeps_buffer: bool) -> None:
        if self.codes.is_allocated:  # Otherwise neighbours have kept the parameters decoded.
            self.buffer.allocate()
            float8.dequantize(self.buffer.flat, self.codes.flat, self._everything)
            self.codes.free()

    def free(self, keeps_buffer: bool) -> None:
        super().free(keeps_buffer)
        self.codes.free()


class _Slots:
    """Where the codes and scales of every rank's shard lie in the buffer that is all-gathered.

    A slot has a byte of codes for each element of the shard, at its place in the shard, and then the scales of its tiles.
    """

    def __init__(self, layout: BufferLayout, tile: tuple[int, int]) -> None:
        self._shard, self._tile = layout.shard_numel, tile
        self._pieces: list[list[tuple[int, tuple[int, int, int]]]] = [[] for _ in range(layout.ranks)]
        for index, (spec, offset) in enumerate(zip(layout.tensors, layout.offsets)):
            rows, columns = spec.shape[-2:]
            for rank in range(offset // self._shard, (offset + spec.numel - 1) // self._shard + 1):
                start, stop = layout.local_range(index, rank)
                for first, sizes in matrix_runs(start, stop, rows, columns):
                    self._pieces[rank].append((offset + first - rank * self._shard, sizes))
        scales = max(sum(self._scales(sizes) for _, sizes in pieces) for pieces in self._pieces)
        nbytes = -(-(self._shard + 4 * scales) // _SLOT_ALIGNMENT) * _SLOT_ALIGNMENT
        why = "the codes of a shard and the most scales that one has"
        self.layout = BufferLayout((), (), nbytes, layout.ranks, _SLOT_ALIGNMENT, nbytes, why, "slots")

    def _scales(self, sizes: tuple[int, int, int]) -> int:
        return math.prod(TileRun(0, 0, 0, sizes).grid(self._tile))

    def runs_of(self, rank: int, gathered: bool) -> list[TileRun]:
        """The runs of a rank's shard: in the gathered buffers, or in the shard and its slot."""
        values, slot = (rank * self._shard, rank * self.layout.shard_numel) if gathered else (0, 0)
        runs, scale = [], (slot + self._shard) // 4
        for place, sizes in self._pieces[rank]:
            runs.append(TileRun(values + place, slot + place, scale, sizes))
            scale += self._scales(sizes)
        return runs
