"""PlanesEncoding: matrices that are all-gathered as codes of 8 or 4 bits, and that modules hold as codes.

Backward may use other planes than forward: of another tile, or of another number of bits.

It does not know what modules do with the codes: a function makes the tensors that they hold.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.distributed.tensor import Replicate

from torch_ragged._kernels import float4, float8
from torch_ragged._kernels.tiles import TileRun, TileTable, matrix_runs
from torch_ragged._register._torch import storage_ids
from torch_ragged.fsdp.comm._collectives import Collectives, Work, wait_all
from torch_ragged.fsdp.core._dbuffer import DBuffer, MemoryLog, MemoryPool, allocate_storage, free_storage
from torch_ragged.fsdp.core.encodings._plain import Encoding, Phase, Shards
from torch_ragged.fsdp.layout._buffer_layout import BufferLayout

__all__ = ["Float4Planes", "Float8Planes", "PlanesEncoding", "WeightFactory", "runs_of_shards"]

_SCALES_ALIGNMENT = 128  # Bytes.


@dataclass(frozen=True)
class Float8Planes:
    """A matrix, or a stack of matrices, as 8-bit codes and one scale per tile.

    An element is its code times the scale of its tile::

        codes    | tile | tile | .      (rows, columns)         one byte per element, in the memory of the all-gather
                 | tile | tile | .
        scales   | s    | s    | s      (rows / height, columns / width), rounded up

    Attributes:
        codes: ``torch.float8_e4m3fn``, in the shape of the parameter.
        scales: ``torch.float32``, in the shape of the parameter with numbers of tiles as its last two dimensions.
        tile: the height and the width of a tile.
        dtype: the dtype of the computation, ``param_dtype``.
        backward: the planes that backward uses, if the policy has a policy ``backward``. Planes that a phase does not use
            have no memory in it. None: backward uses these.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    tile: tuple[int, int]
    dtype: torch.dtype
    backward: Float8Planes | None = None

    # Of the format: elements in a byte of codes; the dtypes of codes and scales; the dtype of buffers of scales.
    per_byte: ClassVar[int] = 1
    dtypes: ClassVar[tuple[torch.dtype, torch.dtype]] = (torch.float8_e4m3fn, torch.float32)
    scale_storage: ClassVar[torch.dtype] = torch.float32
    quantize: ClassVar[Callable[..., None]] = staticmethod(float8.quantize)
    dequantize: ClassVar[Callable[..., None]] = staticmethod(float8.dequantize)

    @property
    def shape(self) -> torch.Size:
        """The shape of the parameter."""
        return torch.Size((*self.codes.shape[:-1], self.codes.shape[-1] * self.per_byte))

    @functools.cached_property
    def _table(self) -> TileTable:
        return TileTable([TileRun(0, 0, 0, (self.shape[:-2].numel(), *self.shape[-2:]))], self.tile)  # type: ignore[arg-type]

    @property
    def has_memory(self) -> bool:
        """Whether the codes are all-gathered; their memory is freed when the module is resharded."""
        return self.codes.untyped_storage().nbytes() > 0

    def dequantized(self) -> torch.Tensor:
        """The values, rounded to ``dtype``: a new tensor. One kernel launch on CUDA."""
        values = torch.empty(self.shape, dtype=self.dtype, device=self.codes.device)
        codes, scales = self.codes.view(torch.uint8), self.scales.view(self.scale_storage)
        self.dequantize(values.view(-1), codes.view(-1), self._table, scales.view(-1))
        return values


class Float4Planes(Float8Planes):
    """The same with 4-bit codes, two in a byte, and 8-bit exponents as scales: MXFP4, see :mod:`torch_ragged._kernels.float4`.

    Attributes:
        codes: ``torch.float4_e2m1fn_x2``, in the shape of the parameter with half as many columns.
        scales: ``torch.float8_e8m0fnu``, one for 32 elements of a row.
        tile: ``(1, 32)``.
    """

    per_byte = float4.PER_BYTE
    dtypes = (torch.float4_e2m1fn_x2, torch.float8_e8m0fnu)
    scale_storage = torch.int8  # Another dtype than that of codes: each dtype has one persistent buffer.
    quantize = staticmethod(float4.quantize)
    dequantize = staticmethod(float4.dequantize)


WeightFactory = Callable[[Float8Planes], torch.Tensor]
"""Makes what a module holds of the planes of a parameter: of the parameter's shape, in ``planes.dtype``."""
_Form = tuple[type[Float8Planes], tuple[int, int]]  # The kind and the tile of planes.


class PlanesEncoding(Encoding):
    """The quantized parameters of a :class:`Float8Policy` with a ``weight_factory``.

    ::

        shards     DBuffer Shard(0), original dtype
           | quantize each tile into this rank's slots
        buffer     DBuffer Replicate(), one byte for one element or two, in the layout of the shards
        scales     DBuffer Replicate(): one slice per rank, all of one size
           | two all-gathers, in place
           | copy the scales of each parameter into one piece; free the slices
        planes     of each parameter: a view of buffer, and its scales
           | weight_factory, after the first all-gather; later ones fill the same memory
        what the module holds

    There is no buffer in the dtype of the computation. If the policy has planes of backward, there are two such sets, and
    ``forms`` has the kind and tile of each. If modules recompute activations, backward needs the set of forward, too.
    """

    computes_in_buffer = False
    makes_params = True

    def __init__(
        self, layout: BufferLayout, rank: int, factory: WeightFactory, forms: Sequence[_Form], recomputes: bool
    ) -> None:
        super().__init__(layout, rank)
        self._factory, self._recomputes = factory, recomputes
        self._sets = [_PlaneSet(layout, rank, tile, kind) for kind, tile in forms]
        self.has_phases = len(self._sets) > 1
        self._made: list[torch.Tensor] = []

    def _needed(self, phase: Phase) -> list[_PlaneSet]:
        """The sets that ``phase`` uses: a rank does not decide it by what its own autograd does, as ranks must agree."""
        forward, backward = self._sets[0], self._sets[-1]
        needs_forward = Phase.FORWARD in phase or self._recomputes or forward is backward
        return [forward] * needs_forward + [backward] * (Phase.BACKWARD in phase and forward is not backward)

    def lacks(self, phase: Phase) -> bool:
        return self.has_phases and any(not each.is_gathered for each in self._needed(phase))

    def make_buffers(self, dtype: torch.dtype, device: torch.device, pool: MemoryPool, log: MemoryLog) -> None:
        for each in self._sets:
            each.make_buffers(dtype, device, pool, log)
        self.buffer, self._made = self._sets[0].buffer, []

    def buffers(self) -> list[DBuffer]:
        return [buffer for each in self._sets for buffer in (each.buffer, each.scales)]

    @property
    def nbytes_beside(self) -> int:
        return sum(each.whole.untyped_storage().nbytes() for each in self._sets)

    def compute_tensor(self, index: int) -> torch.Tensor:
        """An empty tensor: the first :meth:`decode` makes the tensor to compute with."""
        return torch.empty(0, device="cpu")

    def add(self, phase: Phase, shards: Shards, collectives: Collectives) -> None:
        shards.prepare()
        missing = [each for each in self._needed(phase) if not each.is_gathered]
        try:
            wait_all([work for each in missing for work in each.all_gather(shards, collectives)]).wait()
            with torch.no_grad():
                for each in missing:
                    each.decode()
        except BaseException:
            for each in missing:
                each.free(keeps_storage=False)
            raise

    def all_gather(self, shards: Shards, collectives: Collectives) -> Work:
        self._in_flight = self._needed(self.phase)
        return wait_all([work for each in self._in_flight for work in each.all_gather(shards, collectives)])

    @torch.no_grad()
    def decode(self, shards: Shards, keeps_buffer: bool) -> Sequence[torch.Tensor] | None:
        for each in self._in_flight:
            each.decode()
        if self._made:
            return None
        found = [each.planes for each in self._sets]
        all_planes = [dataclasses.replace(one, backward=other) for one, other in zip(*found)] if self.has_phases else found[0]
        with torch.inference_mode(False):  # Later forwards train them.
            made = [self._factory(planes) for planes in all_planes]
        for planes, value in zip(all_planes, made):
            form = (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else type(value).__name__
            if form != (wanted := (tuple(planes.shape), planes.dtype)):
                raise ValueError(f"weight_factory must return a tensor of {wanted}, got {form}")
            own = set(storage_ids(value))
            all_codes = [("planes", planes), ("planes.backward", planes.backward)]
            if missing := [f"{name}.codes" for name, each in all_codes if each and own.isdisjoint(storage_ids(each.codes))]:
                raise ValueError(
                    f"weight_factory must return a tensor that holds {' and '.join(missing)}, such as a tensor subclass with "
                    "__tensor_flatten__: later all-gathers fill this memory, and a copy of it would stay as it is"
                )
        self._made = made
        return made

    def free(self, keeps_buffer: bool) -> None:
        if not keeps_buffer:
            for each in self._sets:
                each.free(self.keeps_storage and not each.buffer.memory.keeps_address)
                if self.has_phases:  # Compiled code may have kept them for a backward, in which they have no memory.
                    torch.autograd.graph.increment_version([each.buffer.flat, each.whole])

    def holds(self, tensor: torch.Tensor) -> bool:
        own = storage_ids(tensor)
        return any(each in own for made in self._made for each in storage_ids(made))


class _PlaneSet:
    """The codes and scales of all parameters of a group, for one phase or both."""

    buffer: DBuffer  # The codes.
    scales: DBuffer  # Allocated from the issue of the all-gather to :meth:`decode`.
    whole: torch.Tensor  # The scales of the parameters, one after the other.
    planes: list[Float8Planes]  # Of each parameter. Each all-gather fills their memory.
    is_gathered = False  # Whether the last all-gather was issued after the last :meth:`free`.

    def __init__(self, layout: BufferLayout, rank: int, tile: tuple[int, int], kind: type[Float8Planes]) -> None:
        self._layout = layout if kind.per_byte == 1 else layout.packed(kind.per_byte)
        self._rank, self._tile, self._kind = rank, tile, kind
        shards, scales = runs_of_shards(layout, tile)
        self._mine = TileTable([dataclasses.replace(run, codes=run.codes // kind.per_byte) for _, run in shards[rank]], tile)
        # Slices have one length, that of the most scales: a rank's all-gather sends its own slice.
        alignment = _SCALES_ALIGNMENT // kind.scale_storage.itemsize
        size, why = -(-scales // alignment) * alignment, "the largest number of scales of a shard"
        self._scale_layout = BufferLayout((), (), size, layout.ranks, alignment, size, why, "scales")
        # Of each parameter, where its scales begin in that buffer, and how many follow: one pair for each run.
        self._pieces: list[list[tuple[int, int]]] = [[] for _ in layout.tensors]
        for shard, runs in enumerate(shards):
            for index, run in runs:
                self._pieces[index].append((shard * size + run.scales, math.prod(run.grid(tile))))

    def make_buffers(self, dtype: torch.dtype, device: torch.device, pool: MemoryPool, log: MemoryLog) -> None:
        self._log, storage = log, self._kind.scale_storage
        self.buffer = DBuffer(self._layout, Replicate(), self._rank, torch.uint8, device, pool=pool, log=log)
        self.scales = DBuffer(self._scale_layout, Replicate(), self._rank, storage, device, pool=pool, log=log)
        counts = [sum(count for _, count in pieces) for pieces in self._pieces]
        self.whole = torch.empty(sum(counts), dtype=storage, device=device)
        log.note(self.whole.nbytes)
        # Each all-gather fills the same storage, so that views stay valid.
        parts = self.whole.split(counts)
        self._to = [piece for part, pieces in zip(parts, self._pieces) for piece in part.split([n for _, n in pieces])]
        self._from = [self.scales.flat[start : start + n] for pieces in self._pieces for start, n in pieces]
        self.planes = []
        for index, part in enumerate(parts):
            codes = self.buffer.tensor(index)
            *stack, rows, nbytes = codes.shape
            shape = (*stack, -(-rows // self._tile[0]), -(-nbytes * self._kind.per_byte // self._tile[1]))
            of_codes, of_scales = self._kind.dtypes
            self.planes.append(self._kind(codes.view(of_codes), part.view(shape).view(of_scales), self._tile, dtype))
        self.scales.free()

    def all_gather(self, shards: Shards, collectives: Collectives) -> list[Work]:
        self.is_gathered = True
        self.buffer.allocate()
        self.scales.allocate()
        codes, scales = self.buffer.shard(), self.scales.shard()
        self._kind.quantize(shards.buffer.flat.to(codes.device, non_blocking=True), codes, self._mine, scales)
        return [collectives.all_gather(self.buffer.flat, codes), collectives.all_gather(self.scales.flat, scales)]

    def decode(self) -> None:
        allocate_storage(self.whole, self._log)
        torch._foreach_copy_(self._to, self._from)
        self.scales.free()

    def free(self, keeps_storage: bool) -> None:
        self.is_gathered = False
        if not keeps_storage:
            self.buffer.free()
        self.scales.free()
        # Its address stays where those of the buffers do: it is small.
        if not self.buffer.memory.keeps_address and not self.buffer.is_allocated:
            free_storage(self.whole, self._log)


def runs_of_shards(layout: BufferLayout, tile: tuple[int, int]) -> tuple[list[list[tuple[int, TileRun]]], int]:
    """Of each rank's shard, the parameter and its run, in the order of scales; and the most scales that a shard has.

    All offsets of a run count from the start of the shard, and of its scales.
    """
    found: list[list[tuple[int, TileRun]]] = [[] for _ in range(layout.ranks)]
    counts = [0] * layout.ranks
    for index, (spec, offset) in enumerate(zip(layout.tensors, layout.offsets)):
        for rank in range(offset // layout.shard_numel, (offset + spec.numel - 1) // layout.shard_numel + 1):
            for begin, sizes in matrix_runs(*layout.local_range(index, rank), *spec.shape[-2:]):
                at = offset + begin - rank * layout.shard_numel
                run = TileRun(at, at, counts[rank], sizes)
                found[rank].append((index, run))
                counts[rank] += math.prod(run.grid(tile))
    return found, max(counts)
