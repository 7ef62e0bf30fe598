"""Ops on plain DTensors of which torch's own rule gives another result than a single device, or none.

It must not know when: :func:`torch_ragged.spmd.parallelize` gives the dispatcher these handlers. The rules of ragged DTensors
give a single device's results always.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.utils import _pytree as pytree

from torch_ragged.tensor._ops import decomposition_of, is_random, is_written, returns_alias
from torch_ragged.tensor._owned_boxes import owned_boxes
from torch_ragged.tensor._placement_extension import extension_of
from torch_ragged.tensor._redistribute import redistribute_local
from torch_ragged.tensor.interleaved_placement_types import InterleavedShard

__all__ = ["all_ops", "needs_whole_tensors", "on_whole_tensors", "plain_handlers"]

_logger = logging.getLogger("torch_ragged.spmd")
_aten = torch.ops.aten
# Averages: torch averages the ranks' averages. That is wrong if ranks have other numbers of rows, or of rows that count.
_LOSSES = """
    mse_loss smooth_l1_loss huber_loss soft_margin_loss binary_cross_entropy binary_cross_entropy_with_logits
    mse_loss_backward smooth_l1_loss_backward huber_loss_backward soft_margin_loss_backward binary_cross_entropy_backward
    nll_loss_forward nll_loss2d_forward nll_loss_backward nll_loss2d_backward
""".split()
# The number of rows of the result depends on values, which no rank knows alone.
_OF_VALUES = "nonzero masked_select _unique2 unique_consecutive unique_dim bincount".split()
_CPU_ATTENTION = """
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward
""".split()
_GPU_ATTENTION = """
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward
    _scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward
    _scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward
""".split()

# Of no elements they have no value: torch raises on the ranks that have no part of the tensor, and the others wait for these.
_EXTREMES = frozenset(
    getattr(_aten, name) for name in ("amax", "amin", "max", "min", "linalg_vector_norm", "_foreach_norm", "_foreach_max")
)
_VIEWS = frozenset((_aten.view, _aten._unsafe_view))
_OF_COMPLEX = frozenset((_aten.view_as_real.default, _aten.view_as_complex.default))
_torchs_handlers = dict(DTensor._op_dispatcher._custom_op_handlers)
"""Those of a torch that :func:`plain_handlers` has not changed yet."""


def plain_handlers() -> dict[torch._ops.OpOverload, Callable[..., Any]]:
    """A handler for the dispatcher, for each of these ops."""
    return {
        **{getattr(_aten, name).default: _loss for name in _LOSSES},
        **{getattr(_aten, name).default: _gathered for name in _OF_VALUES},
        _aten.embedding.default: _rows_of_a_cut,
        _aten.gather.default: _rows_of_a_cut,
        _aten.sort.default: _sort,
        _aten.sort.stable: _sort,
        _aten.argmax.default: _arg_extreme,
        _aten.argmin.default: _arg_extreme,
        _aten.max.dim: _arg_extreme,
        _aten.min.dim: _arg_extreme,
        _aten._grouped_mm.default: _grouped_mm,
        _aten.convolution.default: _convolution,
        _aten.convolution_backward.default: _convolution_backward,
        **{getattr(_aten, name).default: _attention_by_rows for name in _CPU_ATTENTION},
        **{getattr(_aten, name).default: _attention_of_whole_sequences for name in _GPU_ATTENTION},
    }


def _loss(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The sum over all rows, divided by their number or weight."""
    if (found := _of_extension(op, args, kwargs)) is not NotImplemented:
        return found
    function = decomposition_of(op)
    result = NotImplemented if function is None else function(op, *args, **kwargs)
    return _by_torch(op, args, kwargs) if result is NotImplemented else result


def _gathered(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if (found := _of_extension(op, args, kwargs)) is not NotImplemented:
        return found
    return on_whole_tensors(op, args, kwargs)


def _rows_of_a_cut(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Rows of a table whose rows are cut: pending, with zeros where another rank has the row.

    torch leaves the zeros to the reduction, which knows by a mask where they belong. It forgets the mask after one reduction,
    so that a pending tensor could be used once only: autograd saves it for a product, and its backward would raise.
    """
    if (found := _of_extension(op, args, kwargs)) is not NotImplemented:
        return found
    result = _by_torch(op, args, kwargs)
    masked = {dim: p.mask_buffer for dim, p in enumerate(result.placements) if hasattr(p, "mask_buffer")}
    if not masked:
        return result
    for dim, buffer in masked.items():
        if result.device_mesh.size(dim) == 1 and buffer.data is None:  # The rank has all rows: torch makes no mask.
            continue
        buffer.apply_mask(result._local_tensor)
        buffer.release_mask()
    placements = tuple([Partial() if dim in masked else p for dim, p in enumerate(result.placements)])
    spec = dataclasses.replace(result._spec, placements=placements)
    return DTensor(result._local_tensor, spec, requires_grad=False)  # type: ignore[call-arg]


def _sort(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Sorted along a dimension that is cut: the result is cut likewise, so that what is computed with it is not done twice."""
    if (found := _of_extension(op, args, kwargs)) is not NotImplemented:
        return found
    given = args[0].placements
    cut = [Replicate() if placement.is_partial() else placement for placement in given]
    return tuple([each.redistribute(placements=cut) for each in _by_torch(op, args, kwargs)])


def _arg_extreme(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An extreme and where it is, by torch's own handler if it has one: that computes on the local tensors at once."""
    if (found := _of_extension(op, args, kwargs)) is not NotImplemented:
        return found
    given = _without_empty_parts(args)
    return _torchs_handlers.get(op, _by_torch)(op, args if given is None else tuple(given), kwargs)


def _without_empty_parts(args: Sequence[Any]) -> list[Any] | None:
    """Arguments whose tensors are replicated where cuts leave a rank without elements. None: each rank has some of each."""

    def filled(leaf: Any) -> Any:
        if not isinstance(leaf, DTensor) or extension_of(leaf.placements) is not None:
            return leaf
        cuts: dict[int, list[int]] = {}
        for mesh_dim, placement in enumerate(leaf.placements):
            if isinstance(placement, (Shard, _StridedShard)):
                cuts.setdefault(placement.dim, []).append(leaf.device_mesh.size(mesh_dim))
        empty = [dim for dim, ranks in cuts.items() if _leaves_a_rank_empty(leaf.shape[dim], tuple(ranks))]
        return _placed(leaf, tuple([Replicate() if getattr(p, "dim", None) in empty else p for p in leaf.placements]))

    given = pytree.tree_map(filled, list(args))
    is_changed = any(new is not old for new, old in zip(pytree.tree_leaves(given), pytree.tree_leaves(list(args))))
    return given if is_changed else None


@functools.cache
def _leaves_a_rank_empty(size: int, ranks: tuple[int, ...]) -> bool:
    """Whether ``size`` rows, cut for the first number of ranks, then each part for the next one, leave a rank none."""
    sizes = {size}
    for count in ranks:
        sizes = {len(range(part)[i * -(-part // count) :][: -(-part // count)]) for part in sizes for i in range(count)}
    return size > 0 and 0 in sizes


class _AllOps:
    """Whether ops that torch cannot shard run on whole tensors. torch's dispatcher keeps the function that it calls first, so
    that function asks here."""

    run = False

    def runs(self) -> bool:
        return self.run

    def redistributes(self, current: Any, target: Any) -> bool:
        """Whether a redistribution between two specs of plain DTensors is one that torch gets wrong, so that it is done here.

        In it, a strided shard shares its dimension with another cut. If torch undoes one of these cuts only, it takes the whole
        dimension for what the other cuts leave. The result has other elements, or another shape.
        """
        if not self.run or current.mesh.ndim < 2 or current.mesh != target.mesh:
            return False
        return any(_shares_dim(spec.placements) for spec in (current, target))

    def propagate(self, torchs: Callable[..., Any], op: Any, args: Any, kwargs: Any, op_info: Any, try_cache: bool) -> Any:
        """The sharding of an op by ``torchs`` function; or the op's results, if that has none."""
        if op is _aten.cat.default and (tensors := _without_empty(args[0])) is not None:
            return op(tensors, *args[1:], **kwargs)
        if op.overloadpacket in _EXTREMES and (given := _without_empty_parts(args)) is not None:
            return op(*given, **kwargs)
        try:
            sharding = torchs(op, args, kwargs, op_info, try_cache)
        except Exception as error:
            if (given := _without_idle_cuts(args)) is not None and not op._schema.is_mutable:
                return op(*given, **kwargs)
            if not needs_whole_tensors(op, args, error):
                raise
        else:
            if op.overloadpacket in _VIEWS and isinstance(args[0], DTensor):
                _check_view(op, args[0], sharding.output_spec)
            if op in _OF_COMPLEX and isinstance(args[0], DTensor):
                _check_strided(op, args[0], sharding.output_spec)
            if not needs_whole_tensors(op, args, sharding):
                return sharding
        return on_whole_tensors(op, args, kwargs)


def _shares_dim(placements: Sequence[Placement]) -> bool:
    strided = [p.dim for p in placements if isinstance(p, _StridedShard)]
    return any(sum(getattr(p, "dim", None) == dim for p in placements) > 1 for dim in strided)


all_ops = _AllOps()


# -- ops without a rule --------------------------------------------------------------------------------------------------


def needs_whole_tensors(op: torch._ops.OpOverload, args: tuple[Any, ...], sharding: Any) -> bool:
    """Whether an op must run by :func:`on_whole_tensors`, as a single device's result needs. It logs a line, once per op.

    Torch's rule of such an op is missing, or has other placements for a tensor that the op writes. (Torch refuses this, but for
    ops with a rule that follows from others: ``index_add_`` would make a DTensor whose local tensor does not fit.)

    Args:
        sharding: torch's answer, or the error that it raised instead.
    """
    is_view = returns_alias(op) or torch.Tag.inplace_view in op.tags
    written = args[0] if op._schema.is_mutable and args and isinstance(args[0], DTensor) else None
    if isinstance(sharding, Exception):
        refused = written is not None and "in-place operations that require placement changes" in str(sharding)
        needs = (isinstance(sharding, NotImplementedError) or refused) and not is_random(op) and not is_view
    else:
        placements = getattr(getattr(sharding, "output_spec", None), "placements", None)
        needs = written is not None and placements not in (None, written.placements)
    is_pending = written is not None and any(placement.is_partial() for placement in written.placements)
    if needs and not is_pending:
        _log(op)
    return needs and not is_pending


def _without_empty(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
    """What ``cat`` joins: it skips a 1-D tensor without elements among others. A cache of keys begins with one, which no
    dimension of the others can cut. None: there is none."""
    rest = [tensor for tensor in tensors if tensor.ndim != 1 or tensor.shape[0]]
    return rest if len(rest) < len(tensors) and rest and rest[0].ndim > 1 else None


def _without_idle_cuts(args: Sequence[Any]) -> list[Any] | None:
    """Arguments that are replicated over mesh dimensions of one rank, which moves nothing. None: they are already.

    torch's views refuse some cuts over two mesh dimensions, such as of rows and positions, also if one of them cuts nothing.
    """
    given = list(args)
    for index, each in enumerate(args):
        if isinstance(each, DTensor):
            mesh, spec = each.device_mesh, each._spec
            placements = tuple([Replicate() if mesh.size(i) == 1 else p for i, p in enumerate(spec.placements)])
            if placements != spec.placements:
                given[index] = DTensor.from_local(
                    each._local_tensor, mesh, placements, run_check=False, shape=each.shape, stride=each.stride()
                )
    return given if any(new is not old for new, old in zip(given, args)) else None


def _check_view(op: torch._ops.OpOverload, tensor: DTensor, result: Any) -> None:
    """Raise on all ranks if ``result``, the spec of a view by torch's rule, has parts that ``tensor`` does not have.

    The rule looks at one mesh dimension at a time: 2 heads may be cut over 2 ranks, twice.
    """
    for dim, size in enumerate(result.shape):
        cuts = [i for i, placement in enumerate(result.placements) if type(placement) is Shard and placement.dim == dim]
        ranks = math.prod(tensor.device_mesh.size(i) for i in cuts)
        if len(cuts) < 2 or size % ranks == 0:
            continue
        before, after = ([n for n in shape if n != 1] for shape in (tensor.shape, result.shape[: dim + 1]))
        if before[: len(after)] != after:  # Not a dimension that stays as it is.
            names = tensor.device_mesh.mesh_dim_names
            over = " and ".join(repr(names[i]) if names else str(i) for i in cuts)
            raise RuntimeError(
                f"{op} of {tuple(tensor.shape)}, placed as {tensor.placements}, to {tuple(result.shape)}: its dimension {dim} "
                f"of {size} would be cut over the {ranks} ranks of mesh dimensions {over}, which {size} is no multiple of: cut "
                "the tensor over fewer of them in the plan"
            )


def _check_strided(op: torch._ops.OpOverload, tensor: DTensor, result: Any) -> None:
    """Raise on all ranks if torch's rule has moved a strided shard to the dimension of real and imaginary parts."""
    if any(isinstance(p, _StridedShard) and p != q for p, q in zip(tensor.placements, result.placements)):
        raise NotImplementedError(
            f"{op} of {tuple(tensor.shape)}, placed as {tensor.placements}: torch's rule does not know strided shards. "
            "Redistribute first, as in t.redistribute(placements=[Replicate()])"
        )


@functools.cache
def _log(op: torch._ops.OpOverload) -> None:
    _logger.info("%s has no sharding rule in torch for these placements: it runs on replicated tensors", op)


def on_whole_tensors(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The op on whole tensors, which every rank computes. One all-gather per tensor that is not replicated.

    A tensor that the op writes keeps its placements: each rank takes its part of the result.
    """
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, DTensor)]
    mesh = tensors[0].device_mesh
    everywhere = [Replicate()] * mesh.ndim
    whole = {id(tensor): tensor.redistribute(placements=everywhere)._local_tensor for tensor in tensors}

    def placed(leaf: Any) -> Any:
        return DTensor.from_local(leaf, mesh, everywhere, run_check=False) if isinstance(leaf, torch.Tensor) else leaf

    result = op(*_replaced(args, whole), **_replaced(kwargs, whole))
    arguments = op._schema.arguments
    named = [*zip(arguments, args), *[(each, kwargs[each.name]) for each in arguments if each.name in kwargs]]
    for argument, value in named:
        if is_written(argument):
            for tensor in [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, DTensor)]:
                mine = placed(whole[id(tensor)]).redistribute(placements=tensor.placements)._local_tensor
                if mine is not tensor._local_tensor:
                    tensor._local_tensor.copy_(mine)
    originals = {id(whole[id(tensor)]): tensor for tensor in tensors}
    return pytree.tree_map(lambda leaf: originals[id(leaf)] if id(leaf) in originals else placed(leaf), result)


def _replaced(arguments: Any, locals_: dict[int, torch.Tensor]) -> Any:
    return pytree.tree_map(lambda leaf: locals_[id(leaf)] if isinstance(leaf, DTensor) else leaf, arguments)


# -- attention over sequences that are cut ---------------------------------------------------------------------------------


def _attention_by_rows(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Context parallelism: a rank computes its rows of the queries, with all keys and values.

    A causal mask is one for the rows of this rank: the kernel itself would count them from 0. A mask is cut as the queries
    are: DTensor redistributes no tensor that is passed by keyword. What the rule redistributes is done here, because DTensor
    would give the result the strides of queries before it.
    """
    filled = _without_empty_parts(args)
    if filled is not None:  # torch's kernel divides by the number of rows, which ends the process of a rank without any.
        args = tuple(filled)
    is_backward = len(args) > 5  # Its first argument is the gradient of the output.
    query, key = args[is_backward : is_backward + 2]
    if not isinstance(query, DTensor) or not isinstance(key, DTensor):
        return _by_torch(op, args, kwargs)
    cut = [dim for dim, placement in enumerate(query.placements) if placement == Shard(2)]
    arguments = list(args)
    for index, tensor in enumerate(args):
        if isinstance(tensor, DTensor) and cut:
            wanted = list(tensor.placements)
            for dim in cut:
                wanted[dim] = Replicate() if index - is_backward in (1, 2) else Shard(2)
            arguments[index] = _placed(tensor, tuple(wanted))
    causal = 7 if is_backward else 4
    if cut and len(args) > causal and args[causal]:
        arguments[causal] = False
        kwargs = {**kwargs, "attn_mask": _causal_mask(query, key.shape[2], cut)}
    else:
        kwargs = _with_mask_of(query, kwargs)
    sharding = _sharding_of(op, tuple(arguments), kwargs).output_sharding
    assert sharding is not None
    if sharding.needs_redistribute:
        for index, (tensor, spec) in enumerate(zip(arguments, sharding.redistribute_schema.args_schema)):  # type: ignore[union-attr]
            if isinstance(tensor, DTensor):
                arguments[index] = _placed(tensor, spec.placements)  # type: ignore[union-attr]
        kwargs = _with_mask_of(arguments[is_backward], kwargs)
    return _by_torch(op, tuple(arguments), kwargs)


def _with_mask_of(query: DTensor, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keywords with the mask cut as the queries are. Its dimensions may be 1 or be missing."""
    mask = kwargs.get("attn_mask")
    if mask is None:
        return kwargs
    if not isinstance(mask, DTensor):
        mask = DTensor.from_local(mask, query.device_mesh, [Replicate()] * len(query.placements), run_check=False)
    wanted: list[Placement] = []
    for placement in query.placements:
        dim = placement.dim - 4 + mask.ndim if isinstance(placement, Shard) and placement.dim < 3 else -1
        wanted.append(Shard(dim) if dim >= 0 and mask.shape[dim] > 1 else Replicate())
    return {**kwargs, "attn_mask": _placed(mask, tuple(wanted))}


def _causal_mask(query: DTensor, columns: int, cut: Sequence[int]) -> DTensor:
    box = next(iter(owned_boxes(query)), None)
    first, rows = (0, 0) if box is None else (box.offsets[2], box.sizes[2])
    local = query._local_tensor.new_full((rows, columns), -math.inf).triu_(1 + first)
    placements = [Shard(0) if dim in cut else Replicate() for dim in range(len(query.placements))]
    shape = torch.Size((query.shape[2], columns))
    return DTensor.from_local(local, query.device_mesh, placements, run_check=False, shape=shape, stride=(columns, 1))


def _attention_of_whole_sequences(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch's rule of the kernels of GPUs takes sequences that are cut, for its ``context_parallel``: each rank would attend to
    its own part of the keys.
    """

    def whole(tensor: Any) -> Any:
        if not isinstance(tensor, DTensor) or not any(placement.is_shard(2) for placement in tensor.placements):
            return tensor
        return _placed(tensor, tuple([Replicate() if each.is_shard(2) else each for each in tensor.placements]))

    return _by_torch(op, tuple(map(whole, args)), {name: whole(value) for name, value in kwargs.items()})


# -- convolution ---------------------------------------------------------------------------------------------------------


def _convolution(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Rows may be cut, over several mesh dimensions too, which torch refuses. All else is made whole.

    torch lets ranks exchange the edges of images that are cut, if kernels and sizes fit; that takes 2-D images.
    """
    if (found := _of_extension(op, args, kwargs)) is not NotImplemented:
        return found
    images, *others = (*args, *kwargs.values())
    mesh, rows = _rows_of(images, others)
    locals_ = [_local_under(each, mesh, rows if index == 0 else None) for index, each in enumerate((images, *others))]
    return _with_rows(op(*locals_), mesh, rows, images.shape[0])


def _convolution_backward(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if (found := _of_extension(op, args, kwargs)) is not NotImplemented:
        return found
    gradient, images, *others = (*args, *kwargs.values())
    mesh, rows = _rows_of(images, (gradient, *others))
    locals_ = [_local_under(each, mesh, rows if index < 2 else None) for index, each in enumerate((gradient, images, *others))]
    of_images, *of_params = op(*locals_)
    pending = [Partial() if placement.is_shard() else Replicate() for placement in rows]
    results = [None if each is None else DTensor.from_local(each, mesh, pending, run_check=False) for each in of_params]
    return (None if of_images is None else _with_rows(of_images, mesh, rows, images.shape[0]), *results)


def _rows_of(images: torch.Tensor, others: Sequence[Any]) -> tuple[Any, list[Placement]]:
    """The mesh, and placements of images under which only rows are cut."""
    if isinstance(images, DTensor):
        return images.device_mesh, [p if p == Shard(0) else Replicate() for p in images.placements]
    mesh = next(each.device_mesh for each in others if isinstance(each, DTensor))
    return mesh, [Replicate()] * mesh.ndim


def _local_under(value: Any, mesh: Any, placements: Sequence[Placement] | None) -> Any:
    """The local tensor of an argument under ``placements``; None is replicated, which a plain tensor is."""
    if not isinstance(value, torch.Tensor):
        return value
    if not isinstance(value, DTensor):
        value = DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return _placed(value, tuple(placements or [Replicate()] * mesh.ndim))._local_tensor


def _with_rows(local: torch.Tensor, mesh: Any, placements: Sequence[Placement], rows: int) -> DTensor:
    shape = (rows, *local.shape[1:])
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local.contiguous(), mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


# -- grouped_mm ----------------------------------------------------------------------------------------------------------


def _grouped_mm(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Rows in groups, one behind the other, by the matrix of their group; or the gradient of these matrices.

    torch's rule needs all rows on each rank, and its shape function refuses float32. Here, a rank that has a part of the rows
    computes with the groups' ends in its part.
    """
    a, b, ends, *rest = (*args, *[kwargs[name] for name in ("offs", "bias", "out_dtype") if name in kwargs])
    if (a.ndim, b.ndim) not in ((2, 3), (2, 2)) or any(each is not None for each in rest):
        found = _of_extension(op, args, kwargs)
        return _by_torch(op, args, kwargs) if found is NotImplemented else found
    mesh, of_weight = a.device_mesh, b.ndim == 2
    placed = [_grouped_placements(*pair, of_weight, a.numel() > b.numel()) for pair in zip(a.placements, b.placements)]
    a, b = (_placed(each, tuple([p[i] for p in placed])) for i, each in enumerate((a, b)))
    ends = ends.full_tensor() if isinstance(ends, DTensor) else ends
    rows = a.ndim - 1 if of_weight else 0
    if any(placement.is_shard(rows) for placement in a.placements):
        box = next(iter(owned_boxes(a)), None)
        first, count = (box.offsets[rows], box.sizes[rows]) if box is not None else (0, 0)
        ends = (ends - first).clamp(0, count)
    local = op(_aligned(a._local_tensor), _aligned(b._local_tensor), ends)
    shape = (len(ends), a.shape[0], b.shape[1]) if of_weight else (a.shape[0], b.shape[2])
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [p[2] for p in placed], run_check=False, shape=torch.Size(shape), stride=stride)


def _placed(tensor: DTensor, placements: tuple[Placement, ...]) -> DTensor:
    """``tensor`` under ``placements``, below autograd: in a backward, DTensor.s method needs an op that torch 2.11 lacks."""
    if placements == tensor.placements:
        return tensor
    shape, mesh = tensor.shape, tensor.device_mesh
    local = redistribute_local(tensor._local_tensor, mesh, shape, tensor.placements, placements).wait()
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def _aligned(local: torch.Tensor) -> torch.Tensor:
    """``local`` with rows that begin at multiples of 16 bytes, as the kernel asks. A part of a row may have another length."""
    unit, columns = 16 // local.element_size(), local.shape[-1]
    leading = local.stride(-2) if local.stride(-1) == 1 else local.stride(-1)
    if leading % unit == 0:
        return local
    return F.pad(local, (0, -columns % unit))[..., :columns]


def _grouped_placements(
    a: Placement, b: Placement, of_weight: bool, a_is_larger: bool
) -> tuple[Placement, Placement, Placement]:
    """The placements of both factors and of the result on one mesh dimension, such that the local product is a part of it.

    If both are cut, and not alike, the smaller one is made whole.
    """
    # The dimensions of the factors (a, b) that are contracted, and the free ones with their dimension in the result.
    inner, free_a, free_b = ((1, 0), (0, 1), (1, 2)) if of_weight else ((1, 1), (0, 0), (2, 1))
    whole: Placement = Replicate()
    found: list[tuple[Placement, Placement, Placement]] = []
    if _is_cut(a, free_a[0]) and (of_weight or type(a) is Shard):  # The rows of a group stand together: no segments of rows.
        found.append((a, whole, _moved(a, free_a[1])))
    if _is_cut(b, free_b[0]):
        found.append((whole, b, _moved(b, free_b[1])))
    if found:
        return found[0 if a_is_larger else -1]
    for cut in (_moved(a, inner[1]) if _is_cut(a, inner[0]) else None, b if _is_cut(b, inner[1]) else None):
        if cut is not None and (type(cut) is Shard or not of_weight):
            return _moved(cut, inner[0]), cut, Partial()
    if isinstance(a, Partial) and a.reduce_op == "sum" and not isinstance(b, Partial):
        return a, whole, a
    return whole, whole, whole


def _is_cut(placement: Placement, dim: int) -> bool:
    return type(placement) in (Shard, InterleavedShard) and placement.is_shard(dim)


def _moved(placement: Any, dim: int) -> Placement:
    return placement.move_to(dim) if isinstance(placement, InterleavedShard) else Shard(dim)


# -- the rules of others -------------------------------------------------------------------------------------------------


def _of_extension(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, DTensor) and (extension := extension_of(leaf.placements)) is not None:
            return extension.op_extension(op).dispatch(op, args, kwargs)
    return NotImplemented


def _sharding_of(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the dispatcher knows of a call, after torch's rule was asked."""
    op_info = DTensor._op_dispatcher.unwrap_to_op_info(op, args, kwargs)
    DTensor._op_dispatcher.sharding_propagator.propagate(op_info)
    return op_info


def _by_torch(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The op by torch's own rule, without its handler."""
    dispatcher, op_info = DTensor._op_dispatcher, _sharding_of(op, args, kwargs)
    sharding = op_info.output_sharding
    assert sharding is not None
    local = dispatcher._dispatch_get_local_results_slow_path(op, args, op_info)
    return dispatcher.wrap(local, sharding.output_spec)
