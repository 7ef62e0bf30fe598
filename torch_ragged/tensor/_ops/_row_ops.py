"""Ops on whole rows: softmax, norms and sorts of inner dimensions, matrix products with a replicated weight, and others.

It keeps no list of ops and must not communicate. A rank with whole slices of the leading dimensions holds the same kind of
piece as under ``Shard`` of these dimensions, only with another size than ``torch.chunk``'s. So torch's own rule for ``Shard``
tells whether an op treats the cut dimensions as batch dimensions. The question is asked with *other numbers of rows* than the
true one, so an op with an argument that depends on that number fails. If the op passes, it runs on the local tensor viewed as
rows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Optional

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.utils import _pytree as pytree

from torch_ragged.tensor._cut_placement import has_flat, has_own_chunks
from torch_ragged.tensor._ops._rows import RaggedRows, Rows, rows_of
from torch_ragged.tensor._ops._rules import (
    Layout,
    Meta,
    NoLocalWay,
    OpCall,
    Sharding,
    Spec,
    fits_out,
    is_random,
    is_row_major,
    returns_alias,
    tensor_leaves,
    with_placement,
    written_leaves,
)
from torch_ragged.tensor.placement_types import RaggedShard

__all__ = ["row_rule"]


@dataclass(frozen=True)
class _Input:
    """A tensor argument, the placements to redistribute it to, and the rows that these cut it into (None if replicated)."""

    spec: Spec
    placements: tuple[Placement, ...]
    rows: Optional[Rows]


@dataclass(frozen=True)
class _Output:
    """A local output: its rows (None if it is pending a sum or equal on all ranks) and this rank's local shape of the rows."""

    meta: Meta
    placements: tuple[Placement, ...]
    rows: Optional[Rows]
    local_shape: Optional[tuple[int, ...]]

    @property
    def flat(self) -> bool:
        return self.rows is not None and self.rows.flat

    def store(self, local: torch.Tensor, alias: bool) -> torch.Tensor:
        if local.dtype != self.meta.dtype:  # A local argument had another dtype than its DTensor; ranks must agree.
            local = local.to(self.meta.dtype)
        if self.flat:
            return local.view(-1) if alias else local.reshape(-1)
        return local if alias or self.local_shape is None else _in_order(local, self.meta.stride)

    def of_nothing(self, device: torch.device) -> torch.Tensor:
        """The output of a rank without rows; the op is not called there, because kernels may not support zero rows."""
        if self.local_shape is None:
            return torch.zeros(self.meta.shape, dtype=self.meta.dtype, device=device)
        return torch.empty(0 if self.flat else self.local_shape, dtype=self.meta.dtype, device=device)


def _in_order(local: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """``local`` with its dimensions in the memory order of ``stride``, so that later views of it have the declared strides."""
    order = sorted(range(local.dim()), key=lambda dim: -stride[dim])
    moved = local.permute(order)
    return local if moved.is_contiguous() else moved.contiguous().permute(sorted(range(local.dim()), key=order.__getitem__))


def row_rule(call: OpCall) -> Sharding:
    """Run an op on whole rows if it treats the cut dimensions as batch dimensions."""
    specs = tensor_leaves(call)
    ragged = [spec for spec in specs if has_flat(spec.placements)]
    if not ragged or any(has_flat(getattr(v, "placements", ())) for v in pytree.tree_leaves(call.kwargs)):
        raise NoLocalWay("a ragged tensor given by keyword must have the placements of the others")
    if any(has_own_chunks(spec.placements) for spec in specs):
        raise NoLocalWay("a tensor that is both interleaved and ragged can only run element-wise ops")
    if is_random(call.op):
        raise NoLocalWay("its random numbers would depend on the placement")
    if call.argument("beta", 1) == 0:
        raise NoLocalWay("beta=0 is not supported: the kernel would still check the shape of the first argument")
    leader = specs[0] if call.is_inplace else ragged[0]
    if any(isinstance(p, Partial) for p in leader.placements):  # Torch's own rules, of some versions, let both.
        if call.name == "fill_":
            raise NoLocalWay("each rank would contribute the value to a Partial tensor")
        if call.name == "_to_copy" and _rounds_down(leader, call.torch.output_meta()[0]):
            raise NoLocalWay("each rank would cast its contribution to a Partial tensor")
    rows = rows_of(leader)
    if rows is None:
        raise NoLocalWay("ranks do not hold whole rows")
    for inputs in _row_arrangements([_choices(spec, leader, rows) for spec in specs]):
        if any(written and item.placements != item.spec.placements for written, item in zip(written_leaves(call), inputs)):
            continue
        outputs = _row_outputs(call, inputs, leader, rows)
        if outputs is not None and fits_out(call, [o and o.placements for o in outputs]):
            return _sharding(call, inputs, outputs, rows)
    raise NoLocalWay(f"it does not take rows one by one (dimensions {rows.dims} are cut)")


def _rounds_down(spec: Spec, output: Meta | None) -> bool:
    """Whether a cast leaves out the fraction, or all but zero or not: then a sum of casts is not the cast of the sum."""
    if output is None or output.dtype == spec.tensor_meta.dtype:
        return False
    return output.dtype == torch.bool or (spec.tensor_meta.dtype.is_floating_point and not output.dtype.is_floating_point)


def _choices(spec: Spec, leader: Spec, rows: Rows) -> list[_Input]:
    """The legal inputs for ``spec`` beside the leader, which is cut as ``rows``; empty for a ragged tensor with other rows.

    A tensor that is not ragged is replicated. If it has dimensions of the sizes of the leader's cut dimensions, it may also be
    cut like the leader: dimensions are matched from the left, from the right, then anywhere.
    """
    same = [leader.shape[dim] for dim in rows.dims]
    clean = [p if isinstance(p, (Replicate, Partial)) else Replicate() for p in spec.placements]

    def cut(dims: tuple[int, ...]) -> _Input | None:
        if any(d < 0 or d >= len(spec.shape) for d in dims) or [spec.shape[d] for d in dims] != same:
            return None
        flat = dims == tuple(range(len(dims)))
        placement = RaggedShard(dims, rows.counts) if flat else RaggedRows(dims, rows.counts)
        return _Input(spec, with_placement(clean, rows.mesh_dim, placement), Rows(rows.mesh_dim, dims, rows.counts, flat))

    left, right = cut(rows.dims), cut(tuple(dim + len(spec.shape) - len(leader.shape) for dim in rows.dims))
    if has_flat(spec.placements):
        own = rows_of(spec)
        if own is None or own.mesh_dim != rows.mesh_dim:
            return []
        if (own.counts, len(own.dims)) == (rows.counts, len(rows.dims)):
            return [_Input(spec, spec.placements, own)]
        return [left] if own.flat and left is not None else []
    replicated = _Input(spec, with_placement(spec.placements, rows.mesh_dim, Replicate()), None)
    anywhere = [cut((dim,)) for dim in range(len(spec.shape))] if len(same) == 1 else []
    return [replicated, left or replicated, right or replicated, *(choice for choice in anywhere if choice is not None)]


def _row_arrangements(choices: list[list[_Input]]) -> Iterator[list[_Input]]:
    """One choice per tensor. Choices of the same index for all tensors come first; then, for few tensors, every combination."""
    if not all(choices):
        return
    uniform = ([own[min(k, len(own) - 1)] for own in choices] for k in range(3))
    several = [own for own in choices if len(own) > 1]
    mixed = map(list, itertools.product(*choices)) if len(several) <= 2 else iter(())
    seen = set()
    for inputs in itertools.chain(uniform, mixed):
        key = tuple(item.placements for item in inputs)
        if key not in seen:
            seen.add(key)
            yield inputs


def _row_outputs(call: OpCall, inputs: list[_Input], leader: Spec, rows: Rows) -> list[Optional[_Output]] | None:
    """The placements of torch's outputs if each cut dimension is sharded in turn; None if torch has no rule for that.

    Torch is asked about one and three slices per rank, so that the answer serves any number of slices.
    """
    ranks = max(leader.mesh.size(rows.mesh_dim), 2)
    ratios, answers = [], []
    for position, slices in itertools.product(range(len(rows.dims)), (ranks, 3 * ranks)):
        asked: list[Layout] = []
        for item in inputs:
            placements, shape = item.placements, list(item.spec.shape)
            if item.rows is not None:
                dim = item.rows.dims[position]
                shape[dim] = slices
                placements = with_placement(placements, rows.mesh_dim, Shard(dim))
            asked.append((placements, shape))
        answer = call.torch.output_layouts(asked)
        if answer is None:
            return None
        ratios.append(Fraction(slices, leader.shape[rows.dims[position]]))
        answers.append(answer)
    outputs = []
    for meta, *layouts in zip(call.torch.output_meta(), *answers):
        output = None if meta is None or None in layouts else _output(call, meta, layouts, leader, rows, ratios)
        if meta is not None and output is None:
            return None
        outputs.append(output)
    return outputs if _runs_on_rows(call, inputs, rows, outputs) else None


def _runs_on_rows(call: OpCall, inputs: list[_Input], rows: Rows, outputs: list[Optional[_Output]]) -> bool:
    """Whether the op gives the expected shapes for one row and for three: some ops treat sizes of 1 in a special way."""
    for count in (1, 3):

        def local(own: Rows | None, shape: Sequence[int]) -> tuple[int, ...]:
            return tuple(shape) if own is None else own.local_shape(shape, count)

        shapes = call.torch.output_shapes([local(item.rows, item.spec.shape) for item in inputs])
        expected = [None if o is None else local(o.rows, o.meta.shape) for o in outputs]
        if shapes is None or [None if shape is None else tuple(shape) for shape in shapes] != expected:
            return False
    return True


def _output(
    call: OpCall, meta: Meta, layouts: Sequence[Layout], leader: Spec, rows: Rows, ratios: list[Fraction]
) -> _Output | None:
    """The output that all of torch's ``layouts`` imply, or None. Each layout has ``ratios`` of the true number of slices."""
    placed = {with_placement(placements, rows.mesh_dim, Replicate()) for placements, _ in layouts}
    if len(placed) != 1:
        return None
    others = placed.pop()
    here = [placements[rows.mesh_dim] for placements, _ in layouts]
    shapes = [list(shape) for _, shape in layouts]
    pending = all(type(p) is Partial and p.reduce_op == "sum" for p in here)
    if pending or (not meta.shape and all(p.is_replicate() for p in here)):
        if returns_alias(call.op) or any(shape != list(meta.shape) for shape in shapes):
            return None
        return _Output(meta, with_placement(others, rows.mesh_dim, here[0]), None, None)
    if not all(type(p) is Shard for p in here) or any(not p.is_replicate() and not isinstance(p, Partial) for p in others):
        return None
    dims = tuple(p.dim for p in here)[::2]  # type: ignore[attr-defined]
    if any(dim >= len(meta.shape) for dim in dims) or math.prod(meta.shape[dim] for dim in dims) != rows.counts.total:
        return None
    for placement, ratio, shape in zip(here, ratios, shapes):
        if shape != [size * ratio if d == placement.dim else size for d, size in enumerate(meta.shape)]:  # type: ignore
            return None
    own, flat = _output_placement(call, meta, dims, leader, rows)
    cut = Rows(rows.mesh_dim, dims, rows.counts, flat)
    return _Output(meta, with_placement(others, rows.mesh_dim, own), cut, cut.local_shape(meta.shape, rows.count(leader)))


def _output_placement(call: OpCall, meta: Meta, dims: tuple[int, ...], leader: Spec, rows: Rows) -> tuple[Placement, bool]:
    """The placement of an output cut along ``dims``, and whether it is flat; the leader's own placement if it fits.

    It is flat if ``dims`` are the leading dimensions of a row-major tensor.
    """
    own: Any = leader.placements[rows.mesh_dim]
    if call.is_inplace:
        return own, not isinstance(own, RaggedRows)
    leading = dims == tuple(range(dims[0], dims[0] + len(dims))) and all(size == 1 for size in meta.shape[: dims[0]])
    if leading and is_row_major(meta):
        length = len(own.dims) if not isinstance(own, RaggedRows) else 0
        if length >= len(dims) and dims[0] == 0 and meta.shape[:length] == leader.shape[:length]:
            return own, True
        return RaggedShard(tuple(range(dims[-1] + 1)), rows.counts), True
    return RaggedRows(dims, rows.counts), False


def _sharding(call: OpCall, inputs: list[_Input], outputs: list[Optional[_Output]], rows: Rows) -> Sharding:
    shapes = [
        i.rows.local_shape(i.spec.shape, rows.count(i.spec)) if i.rows is not None and i.rows.flat else None for i in inputs
    ]
    wanted = [(i.placements, None) for i in inputs]
    returns = call.op._schema.returns
    is_list = len(returns) == 1 and str(returns[0].type) != "Tensor"
    placements: Any = [None if o is None else o.placements for o in outputs]
    if not returns:
        placements = None
    elif len(returns) == 1 and not is_list:
        placements = placements[0]
    has_rows = any(i.rows is not None and rows.count(i.spec) for i in inputs)
    # An output that does not depend on the rows is equal on all ranks, so a rank without rows must compute it too.
    has_rows |= any(o is not None and o.rows is None and o.placements[rows.mesh_dim].is_replicate() for o in outputs)
    has_rows |= any(written and i.rows is None for written, i in zip(written_leaves(call), inputs))  # So is one written to.
    return Sharding(wanted, placements, _runner(call, shapes, outputs, is_list, has_rows))


def _runner(
    call: OpCall, shapes: list[Optional[tuple[int, ...]]], outputs: list[Optional[_Output]], is_list: bool, has_rows: bool
) -> Any:
    op, alias = call.op, returns_alias(call.op)
    nested = len(tensor_leaves(call)) > sum(hasattr(arg, "placements") for arg in call.args)
    positions = [i for i, arg in enumerate(call.args) if hasattr(arg, "placements")]

    def as_rows(args: tuple[Any, ...]) -> Sequence[Any]:
        if nested:
            leaves, tree = pytree.tree_flatten(args)
            where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        else:
            leaves, where = list(args), positions
        for i, shape in zip(where, shapes):
            if shape is not None:
                leaves[i] = leaves[i].view(shape)
        return pytree.tree_unflatten(leaves, tree) if nested else leaves

    def run(*args: Any, **kwargs: Any) -> Any:
        if call.is_inplace:
            if has_rows:
                op(*as_rows(args), **kwargs)
            return args[0]
        if has_rows or alias:
            result = op(*as_rows(args), **kwargs)
            results = [result] if isinstance(result, torch.Tensor) else result
            stored = [None if o is None else o.store(r, alias) for o, r in zip(outputs, results)]
        else:
            device = next(leaf.device for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor))
            stored = [None if o is None else o.of_nothing(device) for o in outputs]
        if is_list:
            return stored
        return stored[0] if len(op._schema.returns) == 1 else tuple(stored)

    return run
