"""Ops on plain DTensors of which torch's own rule gives another result than a single device, or none.

It must not know when: :func:`torch_ragged.spmd.parallelize` gives the dispatcher these handlers. The rules of ragged DTensors
give a single device's results always.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import math
import operator
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import return_and_correct_aliasing

from torch_ragged._ranks.peers import peers_named
from torch_ragged.tensor._cut_placement import chunk_of, cuts_of, of_dim
from torch_ragged.tensor._ops import decomposition_of, dims_from_the_front, returns_alias
from torch_ragged.tensor._ops._rules import is_written
from torch_ragged.tensor._ops._whole_tensors import on_whole_tensors, placed_as
from torch_ragged.tensor._owned_boxes import owned_boxes
from torch_ragged.tensor._ownership import Owned, Whole, owned, row_major
from torch_ragged.tensor._placement_extension import extension_of
from torch_ragged.tensor._read import read_item
from torch_ragged.tensor._redistribute import is_permuted

__all__ = ["all_ops", "on_whole_tensors", "plain_handlers"]

_logger = logging.getLogger("torch_ragged.spmd")
_aten = torch.ops.aten
# Averages: torch averages the ranks' averages. That is wrong if ranks have other numbers of rows, or of rows that count.
_LOSSES = """
    mse_loss smooth_l1_loss huber_loss soft_margin_loss binary_cross_entropy binary_cross_entropy_with_logits
    mse_loss_backward smooth_l1_loss_backward huber_loss_backward soft_margin_loss_backward binary_cross_entropy_backward
    nll_loss_forward nll_loss2d_forward nll_loss_backward nll_loss2d_backward
""".split()
_BATCH_NORMS = """
    native_batch_norm native_batch_norm_backward _native_batch_norm_legit _native_batch_norm_legit_no_training
    _batch_norm_with_update
""".split()
# Ops of which torch's rule is wrong for some arguments: they run on whole tensors.
_WRONG_RULES: dict[Any, Callable[..., bool]] = {
    _aten._adaptive_avg_pool2d_backward: lambda *args: True,  # Of rows that are cut, it takes the gradient of all.
    _aten._adaptive_avg_pool3d_backward: lambda *args: True,
    **{  # The random numbers of all images and channels are an argument.
        getattr(_aten, f"fractional_max_pool{name}"): lambda *args: True for name in ("2d", "2d_backward", "3d", "3d_backward")
    },
    _aten.embedding_dense_backward: lambda *args: args[4],  # scale_grad_by_freq: a rank counts its own indices.
    **dict.fromkeys(  # They cut channels, and the kernel of a rank without any divides by zero.
        [getattr(_aten, name) for name in _BATCH_NORMS],
        lambda x, *_: isinstance(x, DTensor) and any(x.shape[1] % ranks for ranks in x.device_mesh.shape),
    ),
    _aten.addmv: lambda *args: not args[0].is_floating_point(),  # Of whole numbers, it cuts one argument only.
    _aten.fill_: lambda *args: _is_pending(args[0]),  # Each rank would have the value, and the sum many times the value.
}
# Ops for which torch predicts other strides than they make of permuted tensors, found by comparing all of op_db. A DTensor says
# what was predicted: views of it would be refused, or taken for contiguous.
_OTHER_STRIDES: dict[Any, tuple[torch.memory_format, ...]] = {  # With the strides of arguments for which it predicts right.
    **dict.fromkeys(
        (
            *(_aten.native_batch_norm.default, _aten._native_batch_norm_legit.default, _aten._batch_norm_with_update.default),
            *(_aten.native_batch_norm_backward.default, _aten.batch_norm_backward.default),
            *(_aten.cudnn_batch_norm.default, _aten.cudnn_batch_norm_backward.default),
        ),
        (torch.contiguous_format, torch.channels_last, torch.channels_last_3d),
    ),
    **dict.fromkeys(
        (
            *(getattr(_aten, name).default for name in ("log_sigmoid_forward", "floor_divide", "special_xlog1py")),
            *(getattr(_aten, f"{name}_loss_backward").default for name in ("huber", "mse", "smooth_l1")),
            *(_aten._log_softmax_backward_data.default, _aten.native_dropout_backward.default, _aten.pow.Scalar),
            *(_aten.copysign.Tensor, _aten.div.Tensor_mode, _aten.xlogy.Tensor, _aten.normal.Tensor_Tensor),
        ),
        (torch.contiguous_format,),
    ),
}
# The number of rows of the result depends on values, which no rank knows alone.
_SIZED_BY_VALUES = "nonzero masked_select _unique2 unique_consecutive unique_dim bincount".split()
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
# Seconds of planning after which a line is logged: then a first step seems to hang.
_LONG = 10.0
_IMAGE_KERNELS = ("pool", "_pad", "upsample", "im2col", "col2im", "grid_sampler")
"""In the names of ops whose kernels raise for no elements, too."""
_VIEW_OPS = frozenset((_aten.view, _aten._unsafe_view))
_OF_COMPLEX = frozenset((_aten.view_as_real.default, _aten.view_as_complex.default))
_torchs_handlers = dict(DTensor._op_dispatcher._custom_op_handlers)
"""Those of a torch that :func:`plain_handlers` has not changed yet."""


def plain_handlers() -> dict[torch._ops.OpOverload, Callable[..., Any]]:
    """A handler for the dispatcher, for each of these ops."""
    return {
        **{getattr(_aten, name).default: _loss for name in _LOSSES},
        **{getattr(_aten, name).default: _gathered for name in _SIZED_BY_VALUES},
        _aten._local_scalar_dense.default: read_item,
        _aten.as_strided.default: _as_strided,
        _aten._pack_padded_sequence.default: _packed,
        _aten._nested_tensor_from_mask_left_aligned.default: _nested,
        _aten._transformer_encoder_layer_fwd.default: _encoder_layer,
        _aten._native_multi_head_attention.default: _encoder_layer,  # If the layer has hooks, such as those of static mode.
        _aten.native_group_norm_backward.default: _group_norm_backward,
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


def _as_strided(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, size, stride, *rest = args
    same = tensor.shape == tuple(size) and tensor.stride() == tuple(stride) and (rest or [None])[0] in (None, 0)
    if same:
        return _aten.alias.default(tensor)
    raise NotImplementedError(
        f"{op} is not supported on a DTensor with another size or stride (got {tuple(size)} and {tuple(stride)}): no rank has "
        "all of its storage. Use narrow, select, view, permute or unfold, or call full_tensor() first"
    )


def _packed(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A packed sequence: kernels of recurrent layers read the sizes of its batches in memory."""
    data, sizes = _gathered(op, args, kwargs)
    return data, sizes.to_local() if isinstance(sizes, DTensor) else sizes


def _nested(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise NotImplementedError(
        f"{op}: nn.TransformerEncoder with a padding mask computes with nested tensors in evaluation, which no DTensor can be: "
        "make it with enable_nested_tensor=False"
    )


def _encoder_layer(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return (_nested if args[0].is_nested else _gathered)(op, args, kwargs)


def _rows_of_a_cut(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Rows of a table whose rows are cut: pending, with zeros where another rank has the row.

    torch leaves the zeros to the reduction, which knows by a mask where they belong. It forgets the mask after one reduction,
    so that a pending tensor could be used once only: autograd saves it for a product, and its backward would raise. What the
    rule gathers besides is gathered before: torch would make the mask first, of the rows that a rank has until then.
    """
    if (found := _of_extension(op, args, kwargs)) is not NotImplemented:
        return found
    if (wanted := _sharding_of(op, args, kwargs).output_sharding.redistribute_schema) is not None:
        unmasked = [
            tuple([Replicate() if hasattr(p, "mask_buffer") else p for p in getattr(spec, "placements", ())])
            for spec in wanted.args_schema
        ]
        args = tuple([placed_as(a, placed) if isinstance(a, DTensor) else a for a, placed in zip(args, unmasked)])
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
    if any(isinstance(placement, _StridedShard) for placement in args[0].placements):  # Which torch's handler refuses.
        return on_whole_tensors(op, args, kwargs)
    given = _without_empty_parts(args)
    args = dims_from_the_front(op, args if given is None else tuple(given))  # Of one row, torch's handler would count wrong.
    handler = _torchs_handlers.get(op)
    return _by_torch(op, args, kwargs) if handler is None else _as_reduced(args, kwargs, handler(op, args, kwargs))


def _as_reduced(args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> Any:
    """What torch's handler has computed, with the placements that it has: since torch 2.15, it names those of another way."""
    mesh, placements = args[0].device_mesh, args[0].placements
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    is_plain = isinstance(result, DTensor) and all(isinstance(p, (Shard, Replicate)) for p in placements)
    if not is_plain or (dim is None and args[0].ndim):
        return result
    kept = kwargs.get("keepdim", args[2] if len(args) > 2 else False)
    after = [
        Replicate() if p.is_shard(dim) else Shard(p.dim - 1) if isinstance(p, Shard) and p.dim > (dim or 0) and not kept else p
        for p in placements
    ]
    if list(result.placements) == after:
        return result
    # Without communication: the handler has gathered over the ranks that cut the dimension, so each has its whole part.
    return DTensor.from_local(result._local_tensor, mesh, after, run_check=False, shape=result.shape, stride=result.stride())


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
        return placed_as(leaf, tuple([Replicate() if getattr(p, "dim", None) in empty else p for p in leaf.placements]))

    given = pytree.tree_map(filled, list(args))
    is_changed = any(new is not old for new, old in zip(pytree.tree_leaves(given), pytree.tree_leaves(list(args))))
    return given if is_changed else None


@functools.cache
def _needs_elements(op: torch._ops.OpOverload) -> bool:
    return op.overloadpacket in _EXTREMES or any(part in op._schema.name for part in _IMAGE_KERNELS)


@functools.cache
def _leaves_a_rank_empty(size: int, ranks: tuple[int, ...]) -> bool:
    """Whether ``size`` rows, cut for the first number of ranks, then each part for the next one, leave a rank none."""
    sizes = {size}
    for count in ranks:
        sizes = {len(range(part)[i * -(-part // count) :][: -(-part // count)]) for part in sizes for i in range(count)}
    return size > 0 and 0 in sizes


_NOTHING_TO_WAIT_FOR = contextlib.nullcontext()


class _AllOps:
    """Whether ops that torch cannot shard run on whole tensors. torch's dispatcher keeps the function that it calls first, so
    that function asks here."""

    run = False
    seconds, ops = 0.0, 0
    """How long torch's rules have taken, and for how many ops: each is asked once per shapes and placements."""

    def runs(self) -> bool:
        return self.run

    def redistributes(self, current: Any, target: Any) -> bool:
        """Whether a redistribution between two specs of plain DTensors is one that torch gets wrong, so that it is done here.

        In it, a strided shard shares its dimension with another cut. If torch undoes one of these cuts only, it takes the whole
        dimension for what the other cuts leave. The result has other elements, or another shape. Or a tensor becomes a sum that
        is pending: torch cannot do this to a tensor that is cut, and it divides whole numbers by the number of ranks. Or the
        tensor is permuted: torch's result says so, and is row-major.
        """
        if not self.run or current.mesh != target.mesh:
            return False
        if current.tensor_meta is not None and is_permuted(current.stride):
            return True
        for now, then in zip(current.placements, target.placements):
            if type(then) is Partial and now != then:
                dtype = _dtype_of(current)
                if not now.is_replicate() or not (dtype.is_floating_point or dtype.is_complex):
                    return True
        if current.mesh.ndim < 2:
            return False
        return any(_shares_dim(spec.placements) for spec in (current, target))

    def waits(self, op: Any, op_info: Any) -> contextlib.AbstractContextManager[Any]:
        """While this rank waits in the redistribution of an op's arguments, its errors name the ranks that wait elsewhere."""
        sharding = op_info.output_sharding
        if not self.run or sharding is None or not sharding.needs_redistribute:
            return _NOTHING_TO_WAIT_FOR

        def ranks() -> list[int]:
            mesh, given, wanted = op_info.compute_mesh, op_info.schema, sharding.redistribute_schema
            if given is None or wanted is None:  # A call that torch's C++ cache knew, or a rule that redistributes as it runs.
                return mesh.mesh.flatten().tolist()  # type: ignore[no-any-return]
            # Lists of tensors are flat in one of the two at times, and a number stands where the other has a tensor.
            specs = zip(*[pytree.tree_leaves(list(each.args_schema)) for each in (given, wanted)])
            pairs = [
                zip(old.placements, new.placements)
                for old, new in specs
                if hasattr(old, "placements") and hasattr(new, "placements")
            ]
            moved = {dim for each in pairs for dim, (old, new) in enumerate(each) if old != new}
            where = tuple([slice(None) if dim in moved else index for dim, index in enumerate(mesh.get_coordinate())])
            return mesh.mesh[where].flatten().tolist()  # type: ignore[no-any-return]

        return peers_named(f"redistribution for {op}", "", ranks)

    def propagate(self, torchs: Callable[..., Any], op: Any, args: Any, kwargs: Any, op_info: Any, try_cache: bool) -> Any:
        """The sharding of an op by ``torchs`` function; or the op's results, if that has none."""
        # Under inference mode, composite ops come here as they are. Torch would derive a rule from a decomposition, and run the
        # op on local tensors: of dropout, each rank would draw numbers of its own.
        if _is_made_of_others(op):
            return op.decompose(*args, **kwargs)
        if op is _aten.cat.default and (tensors := _without_empty(args[0])) is not None:
            return op(tensors, *args[1:], **kwargs)
        if op._schema.is_mutable and args and type(args[0]) is torch.Tensor:
            return on_whole_tensors(op, args, kwargs)  # A plain tensor, which counts as replicated, gets all values.
        if op is _aten.empty_like.default and _is_pending(args[0]):
            return op(_as_replicated(args[0]), *args[1:], **kwargs)
        if op is _aten.bmm.default and (given := _with_equal_batches(args)) is not None:
            return op(*given)
        if _needs_elements(op) and (given := _without_empty_parts(args)) is not None:
            return op(*given, **kwargs)
        if op in _OTHER_STRIDES and (given := _contiguous(op, args)) is not None:
            return op(*given, **kwargs)
        if op.overloadpacket in _WRONG_RULES and _WRONG_RULES[op.overloadpacket](*args):
            return on_whole_tensors(op, args, kwargs)
        _count_from_the_front(op_info)
        numbers = _numbers(op_info.schema)
        if numbers:
            op_info.schema = _exchanged(op_info.schema, {i: _NUMBERS[_dtype_of(spec)] for i, spec in numbers.items()})
        start = time.perf_counter()
        try:
            sharding = torchs(op, args, kwargs, op_info, try_cache)
            self._took(time.perf_counter() - start)
            if numbers and getattr(sharding, "redistribute_schema", None) is not None:
                redistributed = _exchanged(sharding.redistribute_schema, numbers)
                sharding = dataclasses.replace(sharding, redistribute_schema=redistributed)
        except Exception:
            if (given := _without_idle_cuts(args)) is not None and not op._schema.is_mutable:
                return op(*given, **kwargs)
        else:
            result = getattr(sharding, "output_spec", None)
            if op.overloadpacket in _VIEW_OPS and isinstance(args[0], DTensor):
                moved = getattr(sharding, "redistribute_schema", None)
                if _has_other_parts(args[0]._spec if moved is None else moved.args_schema[0], result):
                    _log(op)
                    return on_whole_tensors(op, args, kwargs)
                _check_view(op, args[0], result)
            if op in _OF_COMPLEX and isinstance(args[0], DTensor):
                _check_strided(op, args[0], sharding.output_spec)
            # Torch refuses to place a tensor anew that an op writes, but for ops with a rule that follows from others:
            # index_add_ would make a DTensor whose local tensor does not fit.
            written = args[0]._spec if op._schema.is_mutable and args and isinstance(args[0], DTensor) else None
            if written is None or not isinstance(result, DTensorSpec):
                return sharding
            if result.placements == written.placements and result.shape == written.shape:
                return sharding
        if (view := _view_of(op)) is not None:
            return _view_in_place(op, view, args, kwargs)
        _log(op)
        return on_whole_tensors(op, args, kwargs)

    def _took(self, seconds: float) -> None:
        """Tell a user who waits for a first step why it takes long: one line per process, on the first rank."""
        before, self.seconds, self.ops = self.seconds, self.seconds + seconds, self.ops + 1
        if before <= _LONG < self.seconds and torch.distributed.get_rank() == 0:
            text = "torch took %.0f s to find the placements of %d ops. It does so once per op, shapes and placements: "
            text += "the first step takes long, steps of the same shapes do not"
            _logger.warning(text, self.seconds, self.ops)


@functools.cache
def _is_made_of_others(op: torch._ops.OpOverload) -> bool:
    """Whether an op is composite, has no ``out=``, and torch has no rule of its own for it."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    tables = [propagator.op_strategy_funcs, propagator.op_to_rules, getattr(propagator, "op_single_dim_strategy_funcs", {})]
    is_composite = torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), torch._C.DispatchKey.CompositeImplicitAutograd)
    has_out = any(argument.is_out for argument in op._schema.arguments)  # Its placements are those of the whole op's result.
    return is_composite and not has_out and not any(op in table for table in tables)


def _shares_dim(placements: Sequence[Placement]) -> bool:
    strided = [p.dim for p in placements if isinstance(p, _StridedShard)]
    return any(sum(getattr(p, "dim", None) == dim for p in placements) > 1 for dim in strided)


all_ops = _AllOps()


# -- ops without a rule --------------------------------------------------------------------------------------------------


def _count_from_the_front(op_info: Any) -> None:
    """Give torch's rule the dimensions of a call as positive numbers."""
    schema = op_info.schema
    args = dims_from_the_front(schema.op, schema.args_schema)
    if args is not schema.args_schema:
        op_info.schema = OpSchema(schema.op, args, schema.kwargs_schema, schema_info=schema.schema_info)


# The dispatcher's key of a call is the same for a number and for a replicated tensor of this type without dimensions.
_NUMBERS: dict[Any, Any] = {torch.float64: 1.0, torch.int64: 1, torch.bool: True, torch.complex128: 1j}
_TYPES_OF_NUMBERS = {type(number): dtype for dtype, number in _NUMBERS.items()}


def _numbers(schema: OpSchema) -> dict[int, DTensorSpec]:
    """The positions of numbers in place of a tensor beside a pending tensor, and what they would be as tensors.

    torch caches its answer for a number, and gives it to a call with a tensor, and the reverse. For a sum that is pending they
    differ: a tensor is added as a summand of its own, a number is not. So a tensor without dimensions counts as a number here.
    """
    specs = [leaf for leaf in schema.args_schema if isinstance(leaf, DTensorSpec)]
    if not any(placement.is_partial() for spec in specs for placement in spec.placements):
        return {}
    found, mesh = {}, specs[0].mesh
    for i, (argument, value) in enumerate(zip(schema.op._schema.arguments, schema.args_schema)):
        if i == 0 or not isinstance(argument.type, torch.TensorType):
            continue
        dtype = _TYPES_OF_NUMBERS.get(type(value))
        if isinstance(value, DTensorSpec) and not value.shape and all(each.is_replicate() for each in value.placements):
            others = [_dtype_of(spec) for spec in specs if spec is not value]
            dtype = _dtype_of(value) if _dtype_of(value) in others else None
        if dtype is not None and dtype in _NUMBERS:
            meta = TensorMeta(torch.Size(()), (), dtype)
            found[i] = DTensorSpec(mesh, (Replicate(),) * mesh.ndim, tensor_meta=meta)
    return found


def _dtype_of(spec: DTensorSpec) -> torch.dtype:
    assert spec.tensor_meta is not None
    return spec.tensor_meta.dtype


def _exchanged(schema: OpSchema, values: dict[int, Any]) -> OpSchema:
    args = tuple([values.get(i, value) for i, value in enumerate(schema.args_schema)])
    return OpSchema(schema.op, args, schema.kwargs_schema, schema_info=schema.schema_info)


@functools.cache
def _view_of(op: torch._ops.OpOverload) -> Callable[..., Any] | None:
    """``transpose.int`` for ``transpose_``: the op with the same arguments. None for other ops, ``resize_`` among them."""
    if torch.Tag.inplace_view not in op.tags:
        return None

    def arguments(op: torch._ops.OpOverload) -> list[tuple[str, str]]:
        return [(argument.name, str(argument.type)) for argument in op._schema.arguments]

    packet = getattr(_aten, op._schema.name.removeprefix("aten::").rstrip("_"), None)
    views = [getattr(packet, overload) for overload in packet.overloads()] if packet is not None else []
    return next((view for view in views if returns_alias(view) and arguments(view) == arguments(op)), None)


def _view_in_place(op: torch._ops.OpOverload, view: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``transpose_`` and the like: the tensor becomes its view. Torch has no rule, or leaves the tensor its old shape."""
    tensor, found = args[0], view(*args, **kwargs)
    tensor._local_tensor, tensor._spec = found._local_tensor, found._spec
    return return_and_correct_aliasing(op, args, kwargs, tensor)


def _with_equal_batches(args: Sequence[Any]) -> list[Any] | None:
    """Factors of a batch of products, cut alike. None: they are, or torch can tell.

    If two mesh dimensions cut (batch, heads), and a view has joined these, torch compares one mesh dimension at a time.
    """
    tensors = [each for each in args if isinstance(each, DTensor)]
    if len(tensors) < 2 or not any(isinstance(p, _StridedShard) and p.dim == 0 for each in tensors for p in each.placements):
        return None
    batches = [tuple([p if getattr(p, "dim", None) == 0 else Replicate() for p in each.placements]) for each in tensors]
    if batches[0] == batches[1]:
        return None
    target = max(batches, key=lambda batch: sum(not placement.is_replicate() for placement in batch))
    return [placed_as(each, target) for each in tensors]


def _is_pending(tensor: Any) -> bool:
    return isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements)


def _as_replicated(tensor: DTensor) -> DTensor:
    """A tensor of which only shape and placements count, replicated where it is pending: an empty one is filled with a value,
    as torch does for ``1 - x`` and ``1 / x``.
    """
    placements = tuple([Replicate() if placement.is_partial() else placement for placement in tensor.placements])
    return DTensor(tensor._local_tensor, dataclasses.replace(tensor._spec, placements=placements), requires_grad=False)  # type: ignore[call-arg]


def _contiguous(op: torch._ops.OpOverload, args: Sequence[Any]) -> list[Any] | None:
    """The arguments of ``op`` with contiguous copies of permuted tensors; None: there are none, or ``op`` writes one."""
    formats = _OTHER_STRIDES[op]
    permuted = [
        isinstance(arg, torch.Tensor) and not any(arg.is_contiguous(memory_format=each) for each in formats) for arg in args
    ]
    if not any(permuted) or any(is_written(argument) for argument, is_one in zip(op._schema.arguments, permuted) if is_one):
        return None
    return [arg.contiguous() if is_one else arg for arg, is_one in zip(args, permuted)]


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
        cuts = [i for i, p in enumerate(result.placements) if p == Shard(dim) and tensor.device_mesh.size(i) > 1]
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


def _has_other_parts(given: DTensorSpec, result: Any) -> bool:
    """Whether a view by torch's rule would place other elements on a rank than it has.

    Of strided shards, the rule looks at one mesh dimension at a time, and at no ``split_factor`` of joined dimensions.
    """
    if not any(isinstance(p, _StridedShard) for p in (*given.placements, *result.placements)):
        return False
    return _differ(tuple(given.shape), given.placements, tuple(result.shape), result.placements, tuple(given.mesh.shape))


@functools.lru_cache(maxsize=4096)
def _differ(
    shape: tuple[int, ...],
    old: tuple[Placement, ...],
    other: tuple[int, ...],
    new: tuple[Placement, ...],
    mesh_shape: tuple[int, ...],
) -> bool:
    # Inner dimensions that stay as they are, and are cut alike, do not count.
    while min(len(shape), len(other)) > 1 and shape[-1] == other[-1]:
        last = (
            [getattr(p, "dim", None) == len(shape) - 1 for p in old],
            [getattr(p, "dim", None) == len(other) - 1 for p in new],
        )
        if last[0] != last[1] or any(type(p) is _StridedShard for p, is_last in zip((*old, *new), sum(last, [])) if is_last):
            break
        old, new = (
            tuple([Replicate() if is_last else p for p, is_last in zip(placements, cut)])
            for placements, cut in zip((old, new), last)
        )
        shape, other = shape[:-1], other[:-1]
    before, after = cuts_of(old), cuts_of(new)
    # Each rank looks at all coordinates: whether the tensor is gathered must be decided alike. Once per shape, in integers.
    ranks = [range(1 if a == b == Whole() else size) for a, b, size in zip(before, after, mesh_shape)]
    return any(
        _runs(shape, owned(shape, mesh_shape, before, where)) != _runs(other, owned(other, mesh_shape, after, where))
        for where in itertools.product(*ranks)
    )


def _runs(shape: tuple[int, ...], part: Owned) -> list[tuple[int, int, int]]:
    """The longest runs of elements that are consecutive in a rank's part and in the whole tensor: their starts and lengths."""
    strides, runs = row_major(shape), []
    for box in part.boxes:
        for index in itertools.product(*map(range, box.sizes[:-1])) if box.numel else ():
            here = box.local_offset + sum(map(operator.mul, index, box.local_strides))
            there = sum(map(operator.mul, map(operator.add, (*index, 0), box.offsets), strides))
            runs.append((here, there, box.sizes[-1]))
    joined: list[tuple[int, int, int]] = []
    for here, there, length in sorted(runs):
        if joined and (joined[-1][0] + joined[-1][2], joined[-1][1] + joined[-1][2]) == (here, there):
            joined[-1] = (*joined[-1][:2], joined[-1][2] + length)
        else:
            joined.append((here, there, length))
    return joined


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
            arguments[index] = placed_as(tensor, tuple(wanted))
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
                arguments[index] = placed_as(tensor, spec.placements)  # type: ignore[union-attr]
        arguments = _without_empty_parts(arguments) or arguments  # The rule may cut 4 heads over 3 ranks: 2, 2 and none.
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
    return {**kwargs, "attn_mask": placed_as(mask, tuple(wanted))}


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
        return placed_as(tensor, tuple([Replicate() if each.is_shard(2) else each for each in tensor.placements]))

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
    return (None if of_images is None else _with_rows(of_images, mesh, rows, images.shape[0]), *_pending(of_params, mesh, rows))


def _group_norm_backward(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Rows may be cut; all else is made whole. torch would tell the kernel of each rank the number of all rows."""
    if (found := _of_extension(op, args, kwargs)) is not NotImplemented:
        return found
    gradient, images, mean, rstd, weight, _, channels, *others = args
    mesh, rows = _rows_of(images, (gradient, mean, rstd, weight))
    gradient, cut, mean, rstd = (_local_under(each, mesh, rows) for each in (gradient, images, mean, rstd))
    weight = _local_under(weight, mesh, None)
    of_images, *of_params = op(gradient.contiguous(), cut.contiguous(), mean, rstd, weight, cut.shape[0], channels, *others)
    return (None if of_images is None else _with_rows(of_images, mesh, rows, images.shape[0]), *_pending(of_params, mesh, rows))


def _pending(locals_: Sequence[torch.Tensor | None], mesh: Any, rows: Sequence[Placement]) -> list[DTensor | None]:
    """Gradients of parameters: each rank has the sum over its rows."""
    placements = [Partial() if placement.is_shard() else Replicate() for placement in rows]
    return [None if each is None else DTensor.from_local(each, mesh, placements, run_check=False) for each in locals_]


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
    return placed_as(value, tuple(placements or [Replicate()] * mesh.ndim))._local_tensor


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
    a, b = (placed_as(each, tuple([p[i] for p in placed])) for i, each in enumerate((a, b)))
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
        found.append((a, whole, of_dim(a, free_a[1])))
    if _is_cut(b, free_b[0]):
        found.append((whole, b, of_dim(b, free_b[1])))
    if found:
        return found[0 if a_is_larger else -1]
    for cut in (of_dim(a, inner[1]) if _is_cut(a, inner[0]) else None, b if _is_cut(b, inner[1]) else None):
        if cut is not None and (type(cut) is Shard or not of_weight):
            return of_dim(cut, inner[0]), cut, Partial()
    if isinstance(a, Partial) and a.reduce_op == "sum" and not isinstance(b, Partial):
        return a, whole, a
    return whole, whole, whole


def _is_cut(placement: Placement, dim: int) -> bool:
    chunk = chunk_of(placement)
    return chunk is not None and chunk.split_factor == 1 and chunk.dim == dim


# -- the rules of others -------------------------------------------------------------------------------------------------


def _of_extension(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, DTensor) and (extension := extension_of(leaf.placements)) is not None:
            return extension.op_extension(op).dispatch(op, args, kwargs)
    return NotImplemented


def _sharding_of(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the dispatcher knows of a call, after torch's rule was asked."""
    op_info = DTensor._op_dispatcher.unwrap_to_op_info(op, args, kwargs)
    _count_from_the_front(op_info)
    DTensor._op_dispatcher.sharding_propagator.propagate(op_info)
    return op_info


def _by_torch(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The op by torch's own rule, without its handler."""
    args = args if op not in _OTHER_STRIDES else tuple(_contiguous(op, args) or args)
    dispatcher, op_info = DTensor._op_dispatcher, _sharding_of(op, args, kwargs)
    sharding = op_info.output_sharding
    assert sharding is not None
    local = dispatcher._dispatch_get_local_results_slow_path(op, args, op_info)
    return dispatcher.wrap(local, sharding.output_spec)
