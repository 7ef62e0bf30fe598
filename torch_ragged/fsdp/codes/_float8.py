"""Float8Policy, Float4Policy and Float8Encoding: matrices that are all-gathered as codes of 8 or 4 bits."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard

from torch_ragged._kernels import float4, float8
from torch_ragged._kernels.tiles import TileRun, TileTable
from torch_ragged.fsdp.codes._float8_planes import Float4Planes, Float8Planes, PlanesEncoding, WeightFactory, runs_of_shards
from torch_ragged.fsdp.codes._float8_weight import float4_weight
from torch_ragged.fsdp.comm._collectives import Collectives, Work
from torch_ragged.fsdp.core._dbuffer import DBuffer, MemoryLog, MemoryPool
from torch_ragged.fsdp.core._fsdp_param import FoundParam
from torch_ragged.fsdp.core._kit import SHARD_ALIGNMENT_BYTES, Draft, FeaturePart, Kit, Need, Terms
from torch_ragged.fsdp.core.encodings._plain import Encoding, Shards
from torch_ragged.fsdp.layout._buffer_layout import BufferLayout, TensorSpec
from torch_ragged.granularity import Granularity, blocks, elements

__all__ = ["Float4Policy", "Float8Encoding", "Float8Policy", "keeps_tiles"]

_QUANTIZED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SLICE_ALIGNMENT = 128
_logger = logging.getLogger("torch_ragged.fsdp")


@dataclass(frozen=True)
class Float8Policy(MixedPrecisionPolicy, FeaturePart):
    """A ``MixedPrecisionPolicy`` that all-gathers matrices as float8: e4m3 codes, with one float32 scale per tile.

    Sharded parameters, gradients and the optimizer do not change. Forward and backward compute in ``param_dtype``, with the
    parameter after quantizing and dequantizing. These values are bitwise equal on any number of ranks: they are those of
    :mod:`torch_ragged._kernels.float8` on the whole parameter (with model parallelism: on this rank's piece of it).

    A parameter is quantized if it has two or more dimensions and its granularity keeps every tile on one rank:
    ``blocks(128, 128)``, ``rows(n)`` of whole tiles, ``tensor()``. If ``fully_shard`` gets neither ``orig_param_policy`` nor
    ``shard_placement_fn``, parameters with two or more dimensions get ``blocks(*tile)``, except embeddings. All other
    parameters are all-gathered in ``param_dtype``, in another group, with one more all-gather and one more reduce-scatter.

    An all-gather sends 1 byte per element and 4 bytes per tile; bfloat16 needs 2 bytes per element.

    Args:
        param_dtype, reduce_dtype, output_dtype, cast_forward_inputs: as in ``MixedPrecisionPolicy``.
        tile: ``(128, 128)``, or ``(1, 128)`` for finer scales (3 % more bytes).
        weight_factory: None: parameters are dequantized into one buffer in ``param_dtype``. Or a function that gets the
            :class:`Float8Planes` of a parameter, after its first all-gather, and returns what the module holds:
            :func:`float8_weight`, :func:`float8_matmul_weight`, or one of the user's. Later all-gathers fill the same planes.
            If the result is no tensor that holds the codes, the first forward raises ``ValueError``.
        backward: a policy whose class and ``tile`` say which planes backward uses, if they are others than forward's; needs a
            ``weight_factory``, which gets them as ``planes.backward``. Each phase all-gathers its own planes only. The backward
            of an eager ``F.linear`` uses them, and that of operations on the weight itself.
        recomputes: whether modules may recompute activations in backward (activation checkpointing), with the planes of
            forward: then backward all-gathers both. If False, a recomputation raises ``RuntimeError``.

    Raises:
        TypeError: ``weight_factory`` is no function, or ``backward`` no ``Float8Policy``.
        ValueError: ``tile`` is another one; ``param_dtype`` is not float32, bfloat16, float16 or None; or ``backward`` comes
            without a ``weight_factory``, or has a ``backward`` itself.
    """

    tile: tuple[int, int] = float8.TILES[0]
    weight_factory: WeightFactory | None = None
    backward: Float8Policy | None = None
    recomputes: bool = True

    tiles: ClassVar[tuple[tuple[int, int], ...]] = float8.TILES
    planes: ClassVar[type[Float8Planes]] = Float8Planes

    @property
    def terms(self) -> Terms:
        gathered = ", which keeps parameters gathered: use ZERO3 or HSDP"
        needs = {Need.EQUAL_SHARDS: ": leave weights out", Need.FREED: gathered}
        if self.backward is None:
            return Terms(type(self).__name__, needs)
        return Terms(f"{type(self).__name__} with backward=", needs, breaks=(Need.ONE_BUFFER,))

    def __post_init__(self) -> None:
        name = type(self).__name__
        if self.tile not in self.tiles:
            raise ValueError(f"{name} tile must be one of {self.tiles}, got {self.tile!r}")
        if self.param_dtype not in (None, *_QUANTIZED_DTYPES):
            raise ValueError(f"{name} param_dtype must be one of {_QUANTIZED_DTYPES} or None, got {self.param_dtype}")
        if self.weight_factory is not None and not callable(self.weight_factory):
            raise TypeError(f"{name} weight_factory must be a function, such as float8_weight, got {self.weight_factory!r}")
        if self.backward is None:
            return
        if not isinstance(self.backward, Float8Policy):
            raise TypeError(f"{name} backward must be a Float8Policy or Float4Policy, got {self.backward!r}")
        if self.weight_factory is None or self.backward.backward is not None:
            raise ValueError(
                f"{name} backward needs a weight_factory, such as float8_weight, and must have no backward itself, got "
                f"weight_factory={self.weight_factory!r}, backward={self.backward!r}"
            )

    @property
    def forms(self) -> list[tuple[type[Float8Planes], tuple[int, int]]]:
        """The kind and tile of the planes of forward, and of backward if it has its own."""
        return [(policy.planes, policy.tile) for policy in (self, self.backward) if policy is not None]

    @staticmethod
    def takes(param: torch.Tensor, places: Sequence[tuple[nn.Module, str]]) -> bool:
        """Whether a user expects ``param`` to be quantized: it has rows and columns, and is no embedding."""
        is_embedding = any(isinstance(module, (nn.Embedding, nn.EmbeddingBag)) for module, _ in places)
        return param.ndim >= 2 and not is_embedding

    def default_granularity(self, param: torch.Tensor, places: Sequence[tuple[nn.Module, str]]) -> Granularity:
        """The granularity of a parameter for which the caller of ``fully_shard`` gives none."""
        height, width = (max(sizes) for sizes in zip(*(tile for _, tile in self.forms)))
        return blocks(height, width) if self.takes(param, places) else elements()

    def key(self, param: FoundParam) -> Hashable:
        return None if self._why_plain(param) else self.tile

    def _why_plain(self, param: FoundParam) -> str:
        """Why ``param`` is not quantized, and what to do; "" if it is."""
        if (dim := param.distribution.shard_dim) is not None:
            return f"{Shard(dim)!r} cuts tiles: return a granularity from shard_placement_fn, or give orig_param_policy"
        spec, dtype = param.spec, param.value.dtype
        return self.why_plain(spec, dtype) or self.why_plain(spec, param.param_dtype or dtype)

    def tell(self, params: Sequence[FoundParam]) -> None:
        names: dict[str, list[str]] = {}  # Of matrices, by why they are not quantized.
        for param in params:
            if self.takes(param.value, param.registered_names) and param.value.numel() and (why := self._why_plain(param)):
                names.setdefault(why, []).append(param.fqn)
        for why, mine in names.items():
            listed = ", ".join(mine[:3]) + (f" and {len(mine) - 3} more" if len(mine) > 3 else "")
            level = logging.WARNING if dist.get_rank() == 0 else logging.DEBUG
            _logger.log(level, f"{type(self).__name__} has no effect on {listed}: {why}")

    def arrange(self, draft: Draft) -> None:
        draft.alignment = SHARD_ALIGNMENT_BYTES * self.planes.per_byte

    def equip(self, kit: Kit) -> None:
        if self.weight_factory is None:
            kit.encoding = Float8Encoding(kit.layout, kit.rank, self.tile)
        else:
            kit.encoding = PlanesEncoding(kit.layout, kit.rank, self.weight_factory, self.forms, self.recomputes)

    def why_plain(self, spec: TensorSpec, dtype: torch.dtype) -> str:
        """Why parameters of ``dtype`` with the layout ``spec`` are not quantized, and what to do; "" if they are."""
        if dtype not in _QUANTIZED_DTYPES:
            return f"{dtype} is not quantized, only float32, bfloat16 and float16 are"
        if not keeps_tiles(spec, self.tile[0]):
            height, width = self.tile
            return (
                f"their granularity cuts tiles of {height} x {width} elements: orig_param_policy must return "
                f"blocks({height}, {width}), rows({height}) or tensor() for them"
            )
        return self.backward.why_plain(spec, dtype) if self.backward is not None else ""


@dataclass(frozen=True)
class Float4Policy(Float8Policy):
    """A ``Float8Policy`` with 4-bit codes: MXFP4, e2m1 codes with a power of two for each 32 elements of a row::

        fully_shard(block, mp_policy=Float4Policy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))

    An all-gather sends 17/32 byte per element; bfloat16 needs 2 bytes. Sharded parameters, gradients and the optimizer do
    not change, so a step of the optimizer is not rounded to 4 bits. Forward and backward compute with values that differ from
    the parameters by up to a fourth of themselves: see :mod:`torch_ragged._kernels.float4`.

    A parameter is quantized if it has two or more dimensions, its number of columns is a multiple of 32, and its granularity
    keeps rows whole, as the default does. All others are all-gathered in ``param_dtype``, in another group.

    Arguments and errors are those of :class:`Float8Policy`; ``backward=Float8Policy()`` computes gradients of 8-bit codes. The
    only tile is ``(1, 32)``. The ``weight_factory`` gets :class:`Float4Planes`. It cannot be None, and is by default
    :func:`float4_weight`, whose uses dequantize the codes.
    """

    tile: tuple[int, int] = float4.TILE
    weight_factory: WeightFactory | None = float4_weight

    tiles = (float4.TILE,)
    planes = Float4Planes

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weight_factory is None:
            raise TypeError("Float4Policy weight_factory must be a function, such as float4_weight, got None")

    def why_plain(self, spec: TensorSpec, dtype: torch.dtype) -> str:
        if spec.shape[-1] % self.tile[1] == 0:
            return super().why_plain(spec, dtype)
        return (
            f"{spec.shape[-1]} columns are no multiple of {self.tile[1]}: change the width of the layers, or give Float8Policy "
            "for their modules"
        )


def keeps_tiles(spec: TensorSpec, height: int) -> bool:
    """Whether no shard boundary falls inside a band of ``height`` rows. Bands are counted from the start of each matrix."""
    if len(spec.shape) < 2 or not spec.numel:
        return False
    rows, columns = spec.shape[-2:]
    matrix, band, period = rows * columns, height * columns, spec.period or spec.numel
    if spec.segments:
        return all(cut % matrix % band == 0 for start, stop, block in spec.runs for cut in range(start, stop, block))
    if period == matrix:
        return spec.block % band == 0 or spec.block >= matrix

    def keeps(step: int, end: int) -> bool:
        """Whether multiples of ``step`` up to ``end`` are between bands."""
        return step >= end or step % matrix == 0 or (rows % height == 0 and step % band == 0)

    return keeps(spec.block, period) and keeps(period, spec.numel)


class Float8Encoding(Encoding):
    """The quantized parameters of a :class:`Float8Policy`.

    ::

        shards     DBuffer Shard(0), original dtype
           | quantize each tile into this rank's slice
        codes      DBuffer Replicate(), bytes: | codes, scales | codes, scales | ...   one slice per rank, all of one size
           | one all-gather, in place
           | dequantize each tile; then free the codes
        buffer     DBuffer Replicate(), param_dtype; from here on as for plain parameters, also for neighbours
    """

    def __init__(self, layout: BufferLayout, rank: int, tile: tuple[int, int]) -> None:
        super().__init__(layout, rank)
        shards, scales = runs_of_shards(layout, tile)
        # One slice for each rank. It has one byte for each element of the shard, at the element's offset, and then the scales.
        nbytes = -(-(layout.shard_numel + 4 * scales) // _SLICE_ALIGNMENT) * _SLICE_ALIGNMENT
        why = "the codes of a shard and the largest number of scales of one"
        self.slices = BufferLayout((), (), nbytes, layout.ranks, _SLICE_ALIGNMENT, nbytes, why, "slices")
        # Scales are float32, so their offsets count four bytes.
        mine = [dataclasses.replace(run, scales=layout.shard_numel // 4 + run.scales) for _, run in shards[rank]]
        everything = []
        for shard, runs in enumerate(shards):
            values, codes = shard * layout.shard_numel, shard * nbytes
            first_scale = (codes + layout.shard_numel) // 4
            everything += [TileRun(values + r.values, codes + r.codes, first_scale + r.scales, r.sizes) for _, r in runs]
        self._mine, self._everything = TileTable(mine, tile), TileTable(everything, tile)

    def make_buffers(self, dtype: torch.dtype, device: torch.device, pool: MemoryPool, log: MemoryLog) -> None:
        super().make_buffers(dtype, device, pool, log)
        self.codes = DBuffer(self.slices, Replicate(), self._rank, torch.uint8, device, pool=pool, log=log)
        self.codes.free()

    def buffers(self) -> list[DBuffer]:
        return [self.buffer, self.codes]

    def all_gather(self, shards: Shards, collectives: Collectives) -> Work:
        self.codes.allocate()
        mine = self.codes.shard()
        float8.quantize(shards.buffer.flat.to(mine.device, non_blocking=True), mine, self._mine)
        return collectives.all_gather(self.codes.flat, mine)

    def decode(self, shards: Shards, keeps_buffer: bool) -> None:
        if self.codes.is_allocated:  # Otherwise neighbours have all-gathered decoded parameters.
            self.buffer.allocate()
            float8.dequantize(self.buffer.flat, self.codes.flat, self._everything)
            self.codes.free()

    def free(self, keeps_buffer: bool) -> None:
        super().free(keeps_buffer)
        self.codes.free()
