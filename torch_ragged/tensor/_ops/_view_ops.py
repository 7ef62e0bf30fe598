"""Views: ops with outputs that share memory with their input. They must not communicate or copy; they run locally or raise.

If the outputs of a view are row-major, they are intervals of the flat storage, for every such op (``view``, ``unsqueeze``,
``x[2:5]``, ``unbind``). Each rank's part is an interval of its local tensor. Other views keep whole rows and give strided
local tensors (:class:`RaggedRows`): they run on rows, see ``_row_ops``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torch_ragged.tensor._local_tensor import coordinate_of
from torch_ragged.tensor._ops._row_ops import row_rule
from torch_ragged.tensor._ops._rows import RaggedRows, Rows, flat_cut, flat_placement, rows_of
from torch_ragged.tensor._ops._rules import NoLocalWay, OpCall, Sharding, Spec, is_row_major, returns_list, rule, tensor_leaves
from torch_ragged.tensor._units import Units
from torch_ragged.tensor.placement_types import RaggedShard

__all__ = ["view_rule"]

aten = torch.ops.aten

# Views that are called with global sizes, from which local sizes differ, or that treat sizes of 1 in a special way.
_RESHAPES = {aten.view, aten._unsafe_view, aten._reshape_alias, aten.squeeze, aten.unsqueeze}


def view_rule(call: OpCall) -> Sharding:
    """A view of one ragged tensor: intervals of its flat storage, or strided rows."""
    specs = tensor_leaves(call)
    if len(specs) != 1:
        raise NoLocalWay("it has several tensor arguments")
    (spec,) = specs
    outputs = _outputs_on_one_device(call)
    plain = all(out.dtype == spec.tensor_meta.dtype and not (out.is_conj() or out.is_neg()) for out in outputs)
    if plain and not returns_list(call) and _is_same(spec, outputs[0]):
        return Sharding([(spec.placements, None)], spec.placements, lambda local, *args, **kwargs: aten.alias.default(local))
    cut = flat_cut(spec)
    if plain and cut is not None and all(is_row_major(_meta(out)) for out in outputs):
        return _intervals(spec, cut, outputs, single=len(call.op._schema.returns) == 1 and not returns_list(call))
    rows = rows_of(spec)
    if rows is None:
        if cut is None:
            raise NoLocalWay(
                "ranks hold more than one run of rows of its argument: no placement describes a part that only some ranks hold"
            )
        raise NoLocalWay("its output would not be row-major, and ranks do not hold whole rows")
    packet = call.op.overloadpacket
    if call.op is aten.view.dtype and outputs[0].shape != spec.shape:
        raise NoLocalWay("it changes the number of bytes of an element")
    if (packet in _RESHAPES and call.op is not aten.view.dtype) or packet is aten.expand:
        return _reshaped_rows(spec, rows, outputs[0], expands=packet is aten.expand)
    return row_rule(call)


def _is_same(spec: Spec, out: torch.Tensor) -> bool:
    """Whether a view has the shape, stride and offset of its argument, so that it is legal under any placements."""
    return out.shape == spec.shape and out.stride() == tuple(spec.tensor_meta.stride) and not out.storage_offset()


def _outputs_on_one_device(call: OpCall) -> list[torch.Tensor]:
    """The outputs as meta tensors: their shapes, strides and offsets into the storage of the argument."""

    def stand_in(leaf: Any) -> Any:
        meta = getattr(leaf, "tensor_meta", None)
        return leaf if meta is None else torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")

    args, kwargs = pytree.tree_map(stand_in, (call.args, call.kwargs))
    result = call.op(*args, **kwargs)
    return [result] if isinstance(result, torch.Tensor) else list(result)


class _TensorLayout:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.stride, self.dtype = tensor.shape, tensor.stride(), tensor.dtype


def _meta(tensor: torch.Tensor) -> Any:
    return _TensorLayout(tensor)


# --- intervals of the flat storage ---------------------------------------------------------------------------------


def _intervals(spec: Spec, cut: tuple[int, Units], outputs: list[torch.Tensor], single: bool) -> Sharding:
    mesh_dim, counts = cut
    coordinate = coordinate_of(spec.mesh)
    mine = coordinate[mesh_dim] if coordinate is not None else 0
    begin = counts.before(mine)
    placements, pieces = [], []
    for out in outputs:
        start, stop = int(out.storage_offset()), int(out.storage_offset()) + out.numel()
        placement = _interval_placement(spec, mesh_dim, out, counts.within(start, stop))
        placements.append(_replace(spec, mesh_dim, placement))
        pieces.append([min(max(bound - begin, 0), counts[mine]) for bound in (start, stop)])

    def run(local: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        results = [local[start:stop] for start, stop in pieces]
        return results[0] if single else results

    return Sharding([(spec.placements, None)], placements[0] if single else list(placements), run)


def _interval_placement(spec: Spec, mesh_dim: int, out: torch.Tensor, counts: Units) -> RaggedShard:
    """The placement of a view: the argument's own if it still means the same cut.

    Raises:
        NoLocalWay: the view would merge slices that one rank holds whole into dimensions that several ranks share.
    """
    placement: Any = spec.placements[mesh_dim]
    smallest = flat_placement(out.shape, counts)
    length = len(smallest.dims)
    kept = math.prod(spec.shape[len(placement.dims) :])
    if length > 1 and math.prod(out.shape[length:]) < kept and out.numel() == math.prod(spec.shape):
        raise NoLocalWay(
            f"a view as {tuple(out.shape)} would mix owners: its dimensions would cut across slices of {kept} elements "
            "that one rank holds as a whole"
        )
    prefix = math.prod(out.shape[: len(placement.dims)])
    units = placement.units
    if len(placement.dims) <= out.dim() and prefix % units.total == 0:
        if units.scaled(out.numel(), units.total) == counts:
            return placement
    return smallest


# --- strided rows --------------------------------------------------------------------------------------------------


def _reshaped_rows(spec: Spec, rows: Rows, out: torch.Tensor, expands: bool) -> Sharding:
    """``view``, ``squeeze``, ``expand`` and similar views, on this rank's number of rows."""
    count = rows.count(spec)
    before = rows.local_shape(spec.shape, count) if rows.flat else None
    if expands:
        shift = out.dim() - len(spec.shape)
        dims, counts = tuple(dim + shift for dim in rows.dims), rows.counts
        if any(out.shape[dim + shift] != spec.shape[dim] for dim in rows.dims):
            raise NoLocalWay(f"expansion of dimensions {rows.dims}, which are cut")
    else:
        dims, counts = _regroup(spec.shape, rows, out.shape)
    after = Rows(rows.mesh_dim, dims, counts, flat=False)
    sizes = after.local_shape(out.shape, after.count(spec))
    make: Callable[..., Any] = torch.Tensor.expand if expands else torch.Tensor.view

    def run(local: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return make(local if before is None else local.view(before), sizes)

    return Sharding([(spec.placements, None)], _replace(spec, rows.mesh_dim, RaggedRows(dims, counts)), run)


def _regroup(before: Sequence[int], rows: Rows, after: Sequence[int]) -> tuple[tuple[int, ...], Units]:
    """The cut dimensions after a reshape, and each rank's number of slices over them."""
    first, last = rows.dims[0], rows.dims[-1]
    if rows.dims == tuple(range(first, last + 1)):
        inner = math.prod(before[last + 1 :])
        starts = [d for d in range(len(after)) if math.prod(after[:d]) == math.prod(before[:first])]
        for start, stop in itertools.product(starts, range(len(after))):
            step = math.prod(after[stop + 1 :])
            if start <= stop and step and all([count * inner % step == 0 for count in rows.counts.values]):
                if math.prod(after[start : stop + 1]) * step == math.prod(before[first : last + 1]) * inner:
                    return tuple(range(start, stop + 1)), rows.counts.scaled(inner, step)
    raise NoLocalWay(f"a view as {tuple(after)} would mix owners: it does not keep slices over dimensions {rows.dims} whole")


# --- backward of views ---------------------------------------------------------------------------------------------


@rule(aten.slice_backward.default, aten.select_backward.default)
def view_backward_rule(call: OpCall) -> Sharding:
    """The gradient of a slice with zeros around it: inside each row, or before and after an interval of rows."""
    (spec,) = tensor_leaves(call)
    sizes, dim, is_select = tuple(call.args[1]), call.args[2] % len(call.args[1]), call.op is aten.select_backward.default
    rows = rows_of(spec)
    if rows is not None and (is_select or dim not in rows.dims):
        dims = tuple(d + 1 if is_select and d >= dim else d for d in rows.dims)
        flat = dims == tuple(range(len(dims)))
        before = rows.local_shape(spec.shape, rows.count(spec)) if rows.flat else None
        after = Rows(rows.mesh_dim, dims, rows.counts, flat).local_shape(sizes, rows.count(spec))

        def run(local: torch.Tensor, _: Any, *args: Any) -> torch.Tensor:
            result = call.op(local if before is None else local.view(before), after, *args)
            return result.view(-1) if flat else result

        placement: Any = RaggedShard(dims, rows.counts) if flat else RaggedRows(dims, rows.counts)
        return Sharding([(spec.placements, None)], _replace(spec, rows.mesh_dim, placement), run)
    cut, view = flat_cut(spec), aten.select.int if is_select else aten.slice.Tensor
    taken = view(torch.empty(sizes, device="meta"), dim, *call.args[3:])
    if cut is None or taken.shape != spec.shape or not is_row_major(_meta(taken)) or not spec.shape.numel():
        raise NoLocalWay("the rows of its argument are cut")
    return _zeros_around(spec, cut, sizes, taken.storage_offset())


def _zeros_around(spec: Spec, cut: tuple[int, Units], sizes: tuple[int, ...], start: int) -> Sharding:
    """The gradient at offset ``start`` of a flat storage of ``sizes``. First and last owner also own the zeros around it."""
    mesh_dim, counts = cut
    coordinate = coordinate_of(spec.mesh)
    mine = coordinate[mesh_dim] if coordinate is not None else -1
    first, last = counts.owner(0), counts.owner(counts.total - 1)
    before, after = start, math.prod(sizes) - start - counts.total
    grown = [n + before * (r == first) + after * (r == last) for r, n in enumerate(counts)]

    def run(local: torch.Tensor, *args: Any) -> torch.Tensor:
        return torch.nn.functional.pad(local, (before * (mine == first), after * (mine == last)))

    return Sharding([(spec.placements, None)], _replace(spec, mesh_dim, flat_placement(sizes, Units.of(grown))), run)


def _replace(spec: Spec, mesh_dim: int, placement: Any) -> tuple[Any, ...]:
    return (*spec.placements[:mesh_dim], placement, *spec.placements[mesh_dim + 1 :])
