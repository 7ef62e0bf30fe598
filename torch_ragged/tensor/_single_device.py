"""Random ops on plain DTensors with the numbers of a single device, under Replicate, Partial, Shard and strided placements.

It must not know when: :class:`torch_ragged.random.single_device` gives the dispatcher the handler of this module, and takes it
away. The rules of ragged DTensors (:mod:`_random`) give these numbers always.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.distributed._functional_collectives import _are_we_tracing
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.utils import _pytree as pytree

from torch_ragged.tensor._local_tensor import coordinate_of, on_each_rank
from torch_ragged.tensor._ops._rows import has_ragged_rows
from torch_ragged.tensor._ops._whole_tensors import on_whole_tensors
from torch_ragged.tensor._ops._writes import count_writes
from torch_ragged.tensor._ownership import row_major
from torch_ragged.tensor._placement_extension import extension_of
from torch_ragged.tensor._random import (
    ROW_MAJOR,
    Holding,
    agree_on_state,
    check_multinomial,
    check_probabilities,
    check_states,
    draw,
    draw_factory,
    stop_graph,
    stride_of_like,
)

__all__ = ["draw_new", "handle_random_op", "random_ops"]

_aten = torch.ops.aten
_SAMPLERS = "normal_ uniform_ exponential_ log_normal_ geometric_ cauchy_ random_ bernoulli_".split()
_LIKE = "rand_like randn_like randint_like".split()
_OF_VALUES = "bernoulli native_dropout normal_functional".split()
_ON_WHOLE_TENSORS = "rrelu_with_noise rrelu_with_noise_ rrelu_with_noise_functional normal poisson binomial".split()
"""Ops that draw numbers for values that they read. Every rank draws for the whole tensors, as one device does."""
_NOTHING = {"sum": -0.0, "product": 1.0}
"""For each reduction of Partial: what a rank holds that has no part of the value. ``x + -0.0`` is x, also if x is -0.0."""


def random_ops() -> list[torch._ops.OpOverload]:
    """The ops that have a handler while single_device is on."""
    names = (*_SAMPLERS, *_LIKE, *_OF_VALUES, *_ON_WHOLE_TENSORS, "multinomial", "_local_scalar_dense")
    packets = [getattr(_aten, name) for name in dict.fromkeys((*names, *(name.removesuffix("_") for name in _SAMPLERS)))]
    ops = [getattr(packet, overload) for packet in packets for overload in packet.overloads()]
    return [op for op in ops if op._schema.name.removeprefix("aten::") in names or (_outs_of(op) and _is_of_self(op))]


@functools.cache
def _outs_of(op: torch._ops.OpOverload) -> tuple[str, ...]:
    """The names of the arguments in which an ``out=`` form of an op writes its results."""
    return tuple([argument.name for argument in op._schema.arguments if argument.is_out])


def _is_of_self(op: torch._ops.OpOverload) -> bool:
    return op._schema.arguments[0].name == "self"


def handle_random_op(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a random op on DTensors, for the dispatcher."""
    name, generator = op._schema.name.removeprefix("aten::"), kwargs.get("generator")
    leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, DTensor)]
    extension = next((found for leaf in leaves if (found := extension_of(leaf.placements)) is not None), None)
    if name in _ON_WHOLE_TENSORS and extension is None:
        stop_graph(op)
        check_states(leaves[0].device_mesh, leaves[0]._local_tensor.device, generator)
        return on_whole_tensors(op, args, kwargs)
    tensor = args[0]
    if not isinstance(tensor, DTensor):
        raise NotImplementedError(
            f"{op} on a plain tensor with a DTensor argument: give it a DTensor first, by distribute_tensor"
        )
    if _outs_of(op):
        return _draw_into(op, args, kwargs)
    mesh = tensor.device_mesh
    is_pending = any(placement.is_partial() for placement in tensor.placements)
    if extension is not None and name == "multinomial":  # It needs whole rows, in their order.
        tensor = tensor.redistribute(placements=[Replicate()] * mesh.ndim)
    elif extension is not None and mesh.get_coordinate() is not None and (not is_pending or name == "_local_scalar_dense"):
        return extension.op_extension(op).dispatch(op, args, kwargs)  # Ragged: its rules draw so, too, or raise.
    if name == "_local_scalar_dense":
        # torch gives each rank its own summand: nn.init.trunc_normal_ would draw another number of times on each rank.
        return op(_read(tensor))
    stop_graph(op)
    if extension is not None and has_ragged_rows(tensor.placements):
        raise NotImplementedError(f"{op} on a strided view of a ragged DTensor: use the tensor that is viewed")
    if name == "multinomial":
        return _multinomial(tensor, *args[1:], **kwargs)
    if name in _OF_VALUES and is_pending:  # The values of all summands are read.
        tensor = tensor.redistribute(mesh, _whole_placements(tensor.placements))
    spec, options = tensor._spec, {key: value for key, value in kwargs.items() if key != "generator"}
    # A rank outside of the mesh draws, too, and keeps nothing: one device draws all that the program draws.
    draws = not tensor._local_tensor.is_meta and not isinstance(tensor._local_tensor, FakeTensor)
    if draws and mesh.get_coordinate() is not None:
        agree_on_state(mesh, tensor._local_tensor.device.type)
        check_states(mesh, tensor._local_tensor.device, generator)
    if name in _LIKE:
        result = _like(tensor, options)
        if draws:
            stride, like = stride_of_like(spec, options), result._spec

            def filled(local: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
                return draw_factory(name, Holding(like), stride, local, args[1:], generator)

            on_each_rank(filled, result._local_tensor, generator)
        return result
    rest = [_beside(argument, tensor) for argument in args[1:]]
    cut = {position for position, argument in enumerate(args) if isinstance(argument, DTensor)}
    local_args = [tensor._local_tensor, *rest]
    if not draws:
        is_kept = name in _SAMPLERS and not tensor._local_tensor.is_meta
        return _wrap(op, tensor, local_args[0] if is_kept else op(*local_args, **options))
    check_probabilities(op, spec, local_args, cut)

    def drawn(local_args: list[Any], kwargs: dict[str, Any]) -> Any:
        holding, owns = Holding(spec), _part_of_partial(op, tensor)
        if not owns:
            holding.boxes = ()
        found = draw(op, holding, spec.tensor_meta.stride, local_args, kwargs, cut)  # type: ignore[union-attr]
        if not owns:
            found.fill_(
                next(_NOTHING[p.reduce_op] for p in spec.placements if isinstance(p, Partial) and p.reduce_op in _NOTHING)
            )
        return found

    found = on_each_rank(drawn, local_args, kwargs)
    if name in _SAMPLERS:
        count_writes(op, args, kwargs)
    return tensor if name in _SAMPLERS else _wrap(op, tensor, found)


def _draw_into(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An ``out=`` form, as torch defines it: the op without ``out``, and a copy.

    Raises:
        ValueError: ``out`` is no DTensor of the shape of the result: DTensors are not resized.
    """
    names = _outs_of(op)
    outs, rest = [kwargs[name] for name in names], {name: value for name, value in kwargs.items() if name not in names}
    name = op._schema.name.removeprefix("aten::")
    if f"{name}_" in _SAMPLERS and (name != "bernoulli" or len(args) > 1):
        found = getattr(_aten, f"{name}_")(args[0].clone(), *args[1:], **rest)
    else:
        found = getattr(_aten, name)(*args, **rest)
    for out, result in zip(outs, found if isinstance(found, tuple) else (found,)):
        if not isinstance(out, DTensor) or out.shape != result.shape:
            what = f"a {type(out).__name__} of shape {tuple(out.shape)}"
            raise ValueError(f"{op}: out is {what}: give a DTensor of shape {tuple(result.shape)}, as DTensors are not resized")
        out.copy_(result)
    return tuple(outs) if len(outs) > 1 else outs[0]


def _read(tensor: DTensor) -> torch.Tensor:
    """The value of a tensor of one element, on all ranks of its mesh. Under torch.compile, what torch would read."""
    if _are_we_tracing() or all(placement.is_replicate() for placement in tensor.placements):
        return tensor._local_tensor
    return tensor.full_tensor()


def _wrap(op: torch._ops.OpOverload, tensor: DTensor, found: Any) -> Any:
    """The op's result. If the op drew in place, this is the tensor itself. New DTensors have its layout."""
    if found is tensor._local_tensor:
        return tensor
    locals_ = found if isinstance(found, tuple) else (found,)
    spec, meta = tensor._spec, tensor._spec.tensor_meta
    assert meta is not None
    results = []
    for local in locals_:
        stride = row_major(meta.shape) if op in ROW_MAJOR else stride_of_like(spec, {})
        new = DTensorSpec(spec.mesh, spec.placements, tensor_meta=TensorMeta(meta.shape, stride, local.dtype))
        results.append(DTensor(local, new, requires_grad=False))  # type: ignore[call-arg]
    return tuple(results) if isinstance(found, tuple) else results[0]


def _like(tensor: DTensor, options: dict[str, Any]) -> DTensor:
    """``empty_like``, with Replicate in place of Partial."""
    spec, meta = tensor._spec, tensor._spec.tensor_meta
    assert meta is not None
    local = torch.empty_like(tensor._local_tensor, **options)
    new = TensorMeta(meta.shape, stride_of_like(spec, options), local.dtype)
    return DTensor(local, DTensorSpec(spec.mesh, _whole_placements(spec.placements), tensor_meta=new), requires_grad=False)  # type: ignore[call-arg]


def _whole_placements(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    return tuple(Replicate() if placement.is_partial() else placement for placement in placements)


def _beside(argument: Any, tensor: DTensor) -> Any:
    """The local tensor of a DTensor argument, with the shape and placements of the tensor that is drawn."""
    if not isinstance(argument, DTensor):
        return argument
    argument = argument.redistribute(argument.device_mesh, _whole_placements(argument.placements)).expand(tensor.shape)
    return argument.redistribute(tensor.device_mesh, _whole_placements(tensor.placements))._local_tensor


def _part_of_partial(op: torch._ops.OpOverload, tensor: DTensor) -> bool:
    """Whether this rank gets the numbers: of the ranks that hold summands (or factors), the first one.

    Raises:
        NotImplementedError: a Partial of another kind, such as a norm.
    """
    here = coordinate_of(tensor.device_mesh)
    owns = True
    for placement, coordinate in zip(tensor.placements, here or ()):
        if isinstance(placement, Partial) and type(placement) is Partial:
            owns = owns and (coordinate == 0 or placement.reduce_op not in _NOTHING)
        elif placement.is_partial():
            raise NotImplementedError(f"{op} on a DTensor with {placement}: redistribute it to Replicate first")
    return owns


def _multinomial(
    tensor: DTensor, num_samples: int, replacement: bool = False, *, generator: torch.Generator | None = None
) -> DTensor:
    """``multinomial``, row by row: rows that are cut are gathered first.

    As torch does, it draws one number per probability; with replacement, one per sample, for which all rows are gathered.
    """
    mesh = tensor.device_mesh
    torch.multinomial(torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), num_samples, replacement)  # Its errors.
    draws_samples = replacement and num_samples > 1
    columns = tensor.ndim - 1
    # torch's argmax knows no strided shard: then all rows are gathered, too.
    gathers = draws_samples or any(isinstance(p, _StridedShard) for p in tensor.placements)
    rows = [Replicate() if gathers or p.is_partial() or p.is_shard(columns) else p for p in tensor.placements]
    tensor = tensor.redistribute(mesh, rows)
    local = tensor._local_tensor
    if draws_samples:
        check_states(mesh, local.device, generator)
    else:
        check_multinomial(tensor)
        noise = torch.empty_like(tensor).exponential_(1, generator=generator)
    if mesh.get_coordinate() is None:
        if draws_samples:  # Each sample takes one number, for any weights.
            torch.multinomial(local.new_ones(tensor.shape), num_samples, True, generator=generator)
        shape = torch.Size((*tensor.shape[:-1], num_samples))
        return DTensor.from_local(local.long(), mesh, rows, run_check=False, shape=shape, stride=row_major(shape))
    if draws_samples:
        return DTensor.from_local(torch.multinomial(local, num_samples, True, generator=generator), mesh, rows, run_check=False)
    shares: Any = tensor / noise
    return shares.argmax(-1, keepdim=True) if num_samples == 1 else shares.topk(num_samples)[1]


def draw_new(
    function: Callable[..., Any],
    size: torch.Size,
    mesh: DeviceMesh,
    placements: Sequence[Placement] | None,
    *,
    requires_grad: bool = False,
    **options: Any,
) -> DTensor:
    """``torch.distributed.tensor.rand`` or ``randn``.

    Raises:
        ValueError: there is not one placement per mesh dimension, or one is Partial.
    """
    placements = (Replicate(),) * mesh.ndim if placements is None else tuple(placements)
    if len(placements) != mesh.ndim or any(placement.is_partial() for placement in placements):
        raise ValueError(
            f"torch.distributed.tensor.{function.__name__} under {placements} on a mesh of {mesh.ndim} dimensions: give one "
            "placement per mesh dimension, and Replicate in place of Partial"
        )
    dtype = options.get("dtype") or torch.get_default_dtype()
    spec = DTensorSpec(mesh, normalized(placements, len(size)), tensor_meta=TensorMeta(size, row_major(size), dtype))
    options |= {"dtype": dtype, "device": mesh.device_type}
    is_outside = mesh.get_coordinate() is None
    local = on_each_rank(lambda: torch.empty((0,) if is_outside else Holding(spec).local_shape, **options))
    if not local.is_meta and not isinstance(local, FakeTensor):
        if not is_outside:
            agree_on_state(mesh, mesh.device_type)
            check_states(mesh, local.device, None)
        on_each_rank(lambda local: draw_factory(f"{function.__name__}_like", Holding(spec), row_major(size), local, ()), local)
    return DTensor(local.requires_grad_(requires_grad), spec, requires_grad=requires_grad)  # type: ignore[call-arg]


def normalized(placements: Sequence[Placement], ndim: int) -> tuple[Placement, ...]:
    """Shards with dimensions counted from the front."""
    return tuple(type(p)(p.dim + ndim) if type(p) is Shard and p.dim < 0 else p for p in placements)
