"""Ops on InterleavedShard: torch's own rule for ``Shard``, for ops that treat the rows of a sharded dimension alike.

It must not communicate beyond what torch's rule does. Even segments give each rank as many rows as ``Shard(dim)`` would, only
other rows. An op that would give the same result for rows in another order (element-wise, matrix products, reductions)
cannot tell the two apart. So torch is asked about ``Shard``, and the answer is read as segments. Views follow the segments
through the new shape; ``split`` and ``cat`` take them apart and put them together.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Optional

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from torch_ragged.tensor._cut_placement import chunk_of, has_flat, has_own_chunks, of_dim
from torch_ragged.tensor._ops._rules import (
    Layout,
    NoLocalWay,
    OpCall,
    Sharding,
    Spec,
    fits_out,
    is_random,
    returns_list,
    tensor_leaves,
    with_placement,
    written_leaves,
)
from torch_ragged.tensor.interleaved_placement_types import InterleavedShard

__all__ = ["interleaved_rule", "interleaved_view_rule"]

aten = torch.ops.aten

# Ops whose result does not depend on the order of the rows of a dimension that torch's rule keeps sharded, or reduces.
_ANY_ORDER = """
    mm addmm bmm baddbmm mv dot _softmax _log_softmax _softmax_backward_data _log_softmax_backward_data
    native_layer_norm native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward
    sum mean amax amin prod any all logsumexp linalg_vector_norm var std aminmax count_nonzero
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward
    _scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward
    _scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward
    cat stack embedding embedding_dense_backward
    t transpose permute select slice unbind alias detach slice_backward select_backward
""".split()
_INTERLEAVED_RESHAPES = {aten.view, aten._unsafe_view, aten._reshape_alias, aten.squeeze, aten.unsqueeze, aten.expand}
_MOST_OF_A_VIEW = 4096
"""A view that would make more segments is refused: the placement would be as long as the tensor."""
_Segments = tuple[int, ...]


def interleaved_rule(call: OpCall) -> Sharding:
    """Run the op on local tensors if torch's rule for Shard would, and the op treats rows alike."""
    specs = _own(call)
    draws = is_random(call.op) and call.argument("dropout_p", 1) != 0  # Attention draws for its dropout only.
    if draws or not (call.name.rstrip("_") in _ANY_ORDER or torch.Tag.pointwise in call.op.tags):
        raise NoLocalWay("its result may depend on the order of rows")
    if call.name in ("slice_backward", "select_backward"):
        return _interleaved_zeros_around(call)
    if call.name == "cat" and (joined := _joined_segments(call, specs)) is not None:
        return joined
    kinds = [_segments_on(specs, mesh_dim) for mesh_dim in range(specs[0].mesh.ndim)]
    for inputs in _arrangements(specs, kinds):
        if any(written and given != spec.placements for written, given, spec in zip(written_leaves(call), inputs, specs)):
            continue
        layouts = call.torch.output_layouts([(_as_shards(given), spec.shape) for given, spec in zip(inputs, specs)])
        outputs = None if layouts is None else _outputs(layouts, specs, inputs, kinds)
        if outputs is not None and fits_out(call, outputs):
            single = len(call.op._schema.returns) == 1 and not returns_list(call)
            return Sharding([(given, None) for given in inputs], outputs[0] if single else outputs)  # type: ignore[arg-type]
    raise NoLocalWay("torch's rule for Shard would redistribute its arguments first")


def _own(call: OpCall) -> list[Spec]:
    """The tensor arguments, if at least one is interleaved and none is ragged."""
    specs = tensor_leaves(call)
    if not any(has_own_chunks(spec.placements) for spec in specs):
        raise NoLocalWay  # The rules of ragged tensors say why.
    if any(has_flat(spec.placements) for spec in specs):
        raise NoLocalWay("a tensor that is both interleaved and ragged can only run element-wise ops")
    return specs


def _segments_on(specs: Sequence[Spec], mesh_dim: int) -> InterleavedShard | None:
    """The segments that the interleaved arguments have on a mesh dimension: those of the first argument with several."""
    found = [p for p in (spec.placements[mesh_dim] for spec in specs) if isinstance(p, InterleavedShard)]
    return next((p for p in found if len(p.ratios) > 1), found[0] if found else None)


def _arrangements(specs: Sequence[Spec], kinds: Sequence[InterleavedShard | None]) -> Iterator[list[tuple[Placement, ...]]]:
    """Placements of the arguments, of which all shards of a mesh dimension have the segments of ``kinds``; cheapest first.

    A replicated argument may be cut, which costs nothing: torch's rule finds the dimension.
    """
    choices = []
    for spec in specs:
        own = []
        for placement, kind, ranks in zip(spec.placements, kinds, tuple(spec.mesh.shape)):
            legal: list[Placement] = [placement]
            if kind is not None and not isinstance(placement, Partial):
                cuts: list[Placement] = [kind.move_to(d) for d, size in enumerate(spec.shape) if kind.fits(size, ranks)]
                is_alike = placement.is_replicate() or placement in cuts or _is_alike(placement, kind, spec, ranks)
                legal = [*([placement] if is_alike else []), *cuts, Replicate()]
            own.append([(_cost(spec, placement, wanted), wanted) for wanted in dict.fromkeys(legal)])
        pairs = (zip(*choice) for choice in itertools.product(*own))
        found = [(sum(costs), wanted) for costs, wanted in pairs]  # type: ignore[arg-type]
        choices.append(sorted(found, key=lambda pair: pair[0])[:64])
    arrangements = [list(zip(*choice)) for choice in itertools.islice(itertools.product(*choices), 4096)]
    for _, inputs in sorted(arrangements, key=lambda pair: sum(pair[0])):
        yield list(inputs)


def _is_alike(placement: Placement, kind: InterleavedShard, spec: Spec, ranks: int) -> bool:
    """Whether a Shard owns what one segment does."""
    return type(placement) is Shard and len(kind.ratios) == 1 and spec.shape[placement.dim] % ranks == 0


def _cost(spec: Spec, placement: Placement, wanted: Placement) -> int:
    """The elements that a redistribution moves, roughly. A replicated tensor is cut where it is."""
    return 0 if placement == wanted or placement.is_replicate() else math.prod(spec.shape)


def _as_shards(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    return tuple(Shard(p.dim) if isinstance(p, InterleavedShard) else p for p in placements)


def _outputs(
    layouts: Sequence[Optional[Layout]],
    specs: Sequence[Spec],
    inputs: Sequence[Sequence[Placement]],
    kinds: Sequence[InterleavedShard | None],
) -> list[Optional[tuple[Placement, ...]]] | None:
    """The placements of the outputs with segments in place of Shard; None if a shard is not that of an argument."""
    outputs: list[Optional[tuple[Placement, ...]]] = []
    for layout in layouts:
        if layout is None:
            outputs.append(None)
            continue
        placements, shape = list(layout[0]), layout[1]
        for mesh_dim, kind in enumerate(kinds):
            placement = placements[mesh_dim]
            if kind is None or not placement.is_shard():
                # A Partial of another type, such as that of an embedding, may know which rows Shard would give to a rank.
                if kind is not None and isinstance(placement, Partial) and type(placement) is not Partial:
                    return None
                continue
            given = [(p, spec.shape) for p, spec in zip((own[mesh_dim] for own in inputs), specs)]
            sizes = {size[p.dim] for p, size in given if isinstance(p, (InterleavedShard, Shard))}
            if type(placement) is not Shard or shape[placement.dim] not in sizes:
                return None
            placements[mesh_dim] = kind.move_to(placement.dim)
        outputs.append(tuple(placements))
    return outputs


def _joined_segments(call: OpCall, specs: Sequence[Spec]) -> Sharding | None:
    """``cat`` along the dimension that a mesh dimension interleaves: the segments of the output are those of all inputs."""
    ndim = len(specs[0].shape)
    if any(len(spec.shape) != ndim for spec in specs):  # torch skips empty 1-D tensors.
        return None
    dim = call.argument("dim", 0) % ndim
    mesh_dims = [i for i, p in enumerate(specs[0].placements) if _cuts(p, dim)]
    if len(mesh_dims) != 1:
        return None
    (mesh_dim,) = mesh_dims
    others = _without(specs[0].placements, mesh_dim)
    if any(has_own_chunks(others) or _without(spec.placements, mesh_dim) != others for spec in specs):
        return None
    if any(isinstance(p, Partial) or _cuts(p, dim) for p in others):
        return None
    inputs, sizes = [], []
    for spec in specs:
        own = spec.placements[mesh_dim]
        cut = own if isinstance(own, InterleavedShard) and own.dim == dim else InterleavedShard(dim, 1)
        if isinstance(own, Partial) or not cut.fits(spec.shape[dim], spec.mesh.size(mesh_dim)):
            return None
        inputs.append(with_placement(spec.placements, mesh_dim, cut))
        sizes += [size for size in cut.segments(spec.shape[dim]) if size]
    output = InterleavedShard(dim, sizes or 1)
    return Sharding([(given, None) for given in inputs], with_placement(specs[0].placements, mesh_dim, output))


def _cuts(placement: Placement, dim: int) -> bool:
    chunk = chunk_of(placement)
    return chunk is not None and chunk.dim == dim


def _without(placements: Sequence[Placement], mesh_dim: int) -> tuple[Placement, ...]:
    return (*placements[:mesh_dim], *placements[mesh_dim + 1 :])


# --- views ---------------------------------------------------------------------------------------------------------


def interleaved_view_rule(call: OpCall) -> Sharding:
    """A view of one interleaved tensor. It runs locally, or raises."""
    specs = _own(call)
    if len(specs) != 1:
        raise NoLocalWay("it has several tensor arguments")
    (spec,) = specs
    packet, metas = call.op.overloadpacket, call.torch.output_meta()
    if call.op is aten.view.dtype:
        if metas[0].shape != spec.shape:  # type: ignore[union-attr]
            raise NoLocalWay("it changes the number of bytes of an element")
        return Sharding([(spec.placements, None)], spec.placements)
    if packet in _INTERLEAVED_RESHAPES:
        try:
            return _reshaped(call, spec, spec.placements, metas[0].shape)  # type: ignore[union-attr]
        except NoLocalWay:
            plain = tuple(
                [Shard(p.dim) if isinstance(p, InterleavedShard) and len(p.ratios) == 1 else p for p in spec.placements]
            )
            if plain == spec.placements:
                raise
            # One segment, as each of q, k and v has: Shard and torch's strided one may share a dimension, as (batch, heads) do.
            return _reshaped(call, spec, plain, metas[0].shape)  # type: ignore[union-attr]
    if packet in (aten.split, aten.split_with_sizes, aten.slice):
        dim = call.argument("dim", 0) % len(spec.shape)
        mesh_dims = [i for i, p in enumerate(spec.placements) if _cuts(p, dim)]
        if mesh_dims:
            return _split(call, spec, dim, mesh_dims, [meta.shape[dim] for meta in metas])  # type: ignore[union-attr]
        return Sharding([(spec.placements, None)], spec.placements if packet is aten.slice else [spec.placements] * len(metas))
    return interleaved_rule(call)


def _split(call: OpCall, spec: Spec, dim: int, mesh_dims: list[int], sizes: Sequence[int]) -> Sharding:
    """Pieces of the interleaved dimension: each must consist of whole segments."""
    placement = spec.placements[mesh_dims[0]]
    is_slice = call.op.overloadpacket is aten.slice
    if len(mesh_dims) > 1 or not isinstance(placement, InterleavedShard) or (is_slice and call.argument("step", 1) != 1):
        raise NoLocalWay("several mesh dimensions cut the dimension that it takes apart, or it leaves out rows")
    start, total = 0, spec.shape[dim]
    if is_slice:
        start = call.argument("start") or 0
        start = min(max(start + total if start < 0 else start, 0), total)
    edges = [0, *itertools.accumulate(placement.segments(total))]
    ranks, outputs, pieces = spec.mesh.size(mesh_dims[0]), [], []
    for size in sizes:
        stop = start + size
        if start not in edges or stop not in edges or start == stop:
            raise NoLocalWay(f"it would cut inside of a segment of {placement}, at rows {start} and {stop}")
        inside = [b - a for a, b in zip(edges, edges[1:]) if start <= a and b <= stop]
        outputs.append(with_placement(spec.placements, mesh_dims[0], InterleavedShard(dim, inside)))
        pieces.append((start // ranks, size // ranks))
        start = stop

    def run(local: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        results = [local.narrow(dim, first, length) for first, length in pieces]
        return results[0] if is_slice else results

    return Sharding([(spec.placements, None)], outputs[0] if is_slice else outputs, run)  # type: ignore[arg-type]


def _reshaped(call: OpCall, spec: Spec, given: tuple[Placement, ...], shape: Sequence[int]) -> Sharding:
    """``view`` and its like: each cut moves to the dimension of the new shape that has the same segments of the storage."""
    sizes, placements = list(shape), []
    if call.op.overloadpacket is aten.expand:
        shift = len(shape) - len(spec.shape)
        if any(_cuts(p, d) and shape[d + shift] != spec.shape[d] for p in given for d in range(len(spec.shape))):
            raise NoLocalWay("expansion of a dimension that is cut")
        placements = [of_dim(p, p.dim + shift) if chunk_of(p) else p for p in given]  # type: ignore[attr-defined]
        make: Callable[..., Any] = torch.Tensor.expand
        sizes = _local_sizes(placements, shape, spec)
    else:
        left = list(spec.shape)  # Sizes on a rank, after the mesh dimensions so far: each one cuts what those before it leave.
        for placement, ranks in zip(given, tuple(spec.mesh.shape)):
            placements.append(_follow(placement, left, sizes, ranks))
            if chunk_of(placement):
                left[placement.dim] //= ranks  # type: ignore[attr-defined]
                sizes[placements[-1].dim] //= ranks  # type: ignore[attr-defined]
        make = torch.Tensor.view
        # Beside another cut of its dimension, a shard that became segments is torch's strided one.
        dims = [p.dim for p in placements if chunk_of(p)]  # type: ignore[attr-defined]
        for i, (old, new) in enumerate(zip(given, placements)):
            if isinstance(new, InterleavedShard) and not isinstance(old, InterleavedShard) and dims.count(new.dim) > 1:
                placements[i] = _StridedShard(new.dim, split_factor=len(new.ratios))
    for each in (given, placements):
        dims = [p.dim for p in each if chunk_of(p)]  # type: ignore[attr-defined]
        is_same = each is given and tuple(shape) == tuple(spec.shape)
        if any(dims.count(p.dim) > 1 for p in each if isinstance(p, InterleavedShard)) and not is_same:
            raise NoLocalWay(f"a view as {tuple(shape)} would put the cuts of two mesh dimensions into one dimension")

    def run(local: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return make(local, sizes)

    return Sharding([(spec.placements, None)], tuple(placements), run)


def _local_sizes(placements: Sequence[Placement], shape: Sequence[int], spec: Spec) -> list[int]:
    """The sizes on each rank.

    Raises:
        NoLocalWay: they differ.
    """
    sizes = list(shape)
    for placement, ranks in zip(placements, tuple(spec.mesh.shape)):
        if chunk_of(placement):
            if sizes[placement.dim] % ranks:  # type: ignore[attr-defined]
                raise NoLocalWay(f"{placement} does not cut {tuple(shape)} evenly")
            sizes[placement.dim] //= ranks  # type: ignore[attr-defined]
    return sizes


def _follow(placement: Any, before: Sequence[int], after: Sequence[int], ranks: int) -> Placement:
    """The placement of a reshaped tensor. The storage is a repeated pattern of segments, and must be it in the new shape, too.

    Shape (4, 6) with segments (1, 1) of dimension 1: the storage is 3 3 3 3 3 3 3 3. As (24,) these are 8 equal segments.

    Raises:
        NoLocalWay: no dimension of the new shape has these segments.
    """
    if not chunk_of(placement):
        return placement
    is_strided = isinstance(placement, _StridedShard)
    ratios: _Segments = placement.ratios if isinstance(placement, InterleavedShard) else (1,)
    if is_strided:  # Equal segments.
        ratios = (1,) * int(placement.split_factor)
    outer, size = math.prod(before[: placement.dim]), before[placement.dim]
    numel = math.prod(before)
    if not numel or outer * len(ratios) > _MOST_OF_A_VIEW * math.prod(after[:-1]):
        raise NoLocalWay("a tensor without elements, or a view with too many segments")
    inner = math.prod(before[placement.dim + 1 :])
    if size % sum(ratios):
        raise NoLocalWay(f"{placement} does not cut {tuple(before)} evenly")
    pattern = tuple(size // sum(ratios) * ratio * inner for ratio in ratios)  # Elements of each segment, ``outer`` times.
    for dim in sorted(range(len(after)), key=lambda dim: abs(dim - placement.dim)):
        found = _segments_of(pattern, outer, math.prod(after[:dim]), math.prod(after[dim + 1 :]))
        if found is None or after[dim] == 1 or len(found) > _MOST_OF_A_VIEW or any(segment % ranks for segment in found):
            continue
        if len(found) == 1 and not isinstance(placement, InterleavedShard):
            return Shard(dim)
        return _StridedShard(dim, split_factor=len(found)) if is_strided else InterleavedShard(dim, found)
    raise NoLocalWay(f"a view as {tuple(after)} would cut across the segments of {placement}")


def _segments_of(pattern: _Segments, outer: int, new_outer: int, new_inner: int) -> _Segments | None:
    """The segments of a dimension with ``new_outer`` slices before it and ``new_inner`` elements behind it, or None."""
    if any(segment % new_inner for segment in pattern):
        return None
    if outer % new_outer == 0:
        return tuple(segment // new_inner for segment in pattern) * (outer // new_outer)
    times, rest = divmod(new_outer, outer)
    if rest or len(pattern) % times:
        return None
    length = len(pattern) // times
    if pattern != pattern[:length] * times:
        return None
    return tuple(segment // new_inner for segment in pattern[:length])


# --- backward of views ---------------------------------------------------------------------------------------------


def _interleaved_zeros_around(call: OpCall) -> Sharding:
    """The gradient of a slice or a selection, with zeros around it: they run on the local sizes.

    Segments of the gradient stay what they are, between two segments of zeros.
    """
    (spec,) = _own(call)
    sizes, is_select = list(call.args[1]), call.name == "select_backward"
    dim, *rest = call.args[2:]
    dim %= len(sizes)
    placements: list[Placement] = []
    for placement, ranks in zip(spec.placements, tuple(spec.mesh.shape)):
        if isinstance(placement, _StridedShard):
            raise NoLocalWay("a strided shard beside an interleaved one")
        if placement.is_shard():
            at = placement.dim + (is_select and placement.dim >= dim)  # type: ignore[attr-defined]
            placement = of_dim(placement, at)
            if at == dim:
                start, stop, step = rest
                rows = spec.shape[dim]
                own = placement.segments(rows) if isinstance(placement, InterleavedShard) else (rows,)
                parts = [size for size in (start, *own, sizes[dim] - start - rows) if size]
                placement = InterleavedShard(dim, parts or 1)
                if step != 1 or min(start, stop) < 0 or not placement.fits(sizes[dim], ranks) or start % ranks:
                    raise NoLocalWay("the rows around it are not whole segments")
                rest = [start // ranks, (start + rows) // ranks, 1]
            if sizes[at] % ranks:
                raise NoLocalWay(f"{placement} does not cut {tuple(call.args[1])} evenly")
            sizes[at] //= ranks
        placements.append(placement)

    def run(local: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return call.op(local, sizes, dim, *rest)

    return Sharding([(spec.placements, None)], tuple(placements), run)
