"""Writes reach the tensor, though an op's rule redistributes what the op views or writes, so that it works on a copy.

It must not change ops that work on the local tensors as they are: they never come here after their first call.

``x[:, 0]`` of a tensor that is cut along dimension 1 needs a redistribution. Its local tensor is a copy, not a view of that
of ``x``. :class:`CopiedView` remembers ``x`` and the views between, so that both directions of a view hold: a write to the copy
is written to ``x``, and the copy is made anew once ``x`` was written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OutputSharding
from torch.utils import _pytree as pytree

from torch_ragged.tensor._ops import returns_alias
from torch_ragged.tensor._ops._whole_tensors import on_whole_tensors
from torch_ragged.tensor._ops._writes import count_writes, writes_in_inference, writes_unmarked, written_by
from torch_ragged.tensor._redistribute import redistribute_local

__all__ = ["CopiedView", "reaches_the_tensor", "refuse_plain_target", "with_writes"]

_aten = torch.ops.aten
_View = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], int | None]
"""An op, its arguments after the tensor, and which of its outputs is the view, if it has a list of them."""


class CopiedView(DTensor):
    """A view of a DTensor whose local tensor is a copy of the elements that it views.

    An op that writes to it gathers the tensor, and each rank keeps its part of the result. It is read as other DTensors are.
    It issues the view's redistribution again if the tensor was written since: autograd counts the writes to a tensor and all
    of its views. In inference mode nothing does, and all writes to DTensors are counted together.
    """

    _source: DTensor
    _views: tuple[_View, ...]
    _gathered: torch.Tensor
    _version_of_copy: Any

    @classmethod
    def of(cls, copy: DTensor, source: DTensor, views: tuple[_View, ...], version: Any) -> CopiedView:
        """The view of ``source`` by ``views``, of which ``copy`` holds the elements at ``version``."""
        # A view of a tensor that was made outside of the inference mode is no tensor of this mode.
        with torch.inference_mode(torch.is_inference_mode_enabled() and source.is_inference()):
            self = cls(copy._local_tensor, copy._spec, requires_grad=False)  # type: ignore[call-arg]
        self._source, self._views, self._version_of_copy = source, views, version
        return self

    @property  # type: ignore[override]
    def _local_tensor(self) -> torch.Tensor:
        if (version := _version(self)) != self._version_of_copy:
            with torch.no_grad():
                self._gathered = self._viewed(self._source)._local_tensor
            self._version_of_copy = version
        return self._gathered

    @_local_tensor.setter
    def _local_tensor(self, local: torch.Tensor) -> None:
        self._gathered = local

    def _viewed(self, tensor: Any) -> Any:
        """The view of another tensor, which may be a plain one."""
        for op, args, kwargs, index in self._views:
            tensor = op(tensor, *args, **kwargs)
            tensor = tensor if index is None else tensor[index]
            if isinstance(tensor, CopiedView):
                tensor = DTensor(tensor._gathered, tensor._spec, requires_grad=False)  # type: ignore[call-arg]
        return tensor

    def _write(self, values: DTensor) -> None:
        """Write ``values``, which have the view's shape, to the tensor. Gathers both."""
        source, whole = self._source, _whole_copy(self._source)
        self._viewed(whole).copy_(_whole_copy(values))
        everywhere = (Replicate(),) * source.device_mesh.ndim
        moved = redistribute_local(whole, source.device_mesh, source.shape, everywhere, source.placements).wait()
        source._local_tensor.copy_(moved)
        self._version_of_copy = None  # Other elements of it may be the same ones in memory.

    def __reduce_ex__(self, protocol: Any) -> Any:
        return DTensor(self._local_tensor, self._spec, requires_grad=False).__reduce_ex__(protocol)  # type: ignore[call-arg]

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        if _is_composite(op):  # In inference mode, as in with_writes.
            return op.decompose(*args, **kwargs)
        leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, CopiedView)]
        copies = {id(leaf): DTensor(leaf._local_tensor, leaf._spec, requires_grad=False) for leaf in leaves}  # type: ignore[call-arg]

        def copied(leaf: Any) -> Any:
            return copies.get(id(leaf), leaf)

        written = [leaf for leaf in written_by(op, args, kwargs) if isinstance(leaf, CopiedView)]
        if written and torch.Tag.inplace_view in op.tags:
            raise NotImplementedError(
                f"{op} on a view of a DTensor that had to be redistributed for it: assign the result of the op that is not in "
                "place, as in y = y.transpose(0, 1)"
            )
        memory = [_memory(each) for each in written_by(op, args, kwargs) if isinstance(each, DTensor)]
        if any(memory.count(_memory(leaf)) > 1 for leaf in written):
            raise NotImplementedError(
                f"{op} writes to several views of one DTensor that had to be redistributed for a view: write to one after the "
                "other, or to the whole DTensor"
            )
        result = op(*pytree.tree_map(copied, args), **pytree.tree_map(copied, kwargs))
        if _is_view(op) and isinstance(args[0], CopiedView):
            return _as_views(op, args, kwargs, result, args[0])
        for leaf in written:
            leaf._write(copies[id(leaf)])
        if written:
            count_writes(op, args, kwargs)
        originals = {id(copies[id(leaf)]): leaf for leaf in leaves}
        return pytree.tree_map(lambda leaf: originals.get(id(leaf), leaf), result)


def reaches_the_tensor(op: torch._ops.OpOverload) -> bool:
    """Whether calls of an op need :func:`with_writes`: it is a view, or it writes to an argument."""
    return _is_view(op) or op._schema.is_mutable or writes_unmarked(op)


def refuse_plain_target(op: torch._ops.OpOverload, args: tuple[Any, ...]) -> None:
    """``plain.add_(dtensor)``, of one element: torch replicates it, communicates, writes, and then fails without a text.

    Raises:
        NotImplementedError: the tensor that the op writes is no DTensor.
    """
    in_place = op._schema.name.endswith("_") and op._schema.is_mutable
    if in_place and args and isinstance(args[0], torch.Tensor) and not isinstance(args[0], DTensor):
        raise NotImplementedError(
            f"{op} of a plain tensor with a DTensor: DTensor writes to DTensors only. Use the op that is not in place, as in "
            "total = total + t.norm(), or call full_tensor() of the DTensor on all ranks first"
        )


def with_writes(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], op_info: Any, answer: Any) -> Any:
    """The dispatcher's ``answer`` for a call: a sharding with which writes reach the tensor, or the op's results.

    If the sharding redistributes what the op views, the results are views that know their tensor. If it redistributes what the
    op writes, as running statistics for features that are cut, the new values are redistributed back.
    """
    if not isinstance(answer, OutputSharding):
        if op._schema.is_mutable:
            count_writes(op, args, kwargs)
        is_view = _is_view(op) and not _is_composite(op) and isinstance(args[0], DTensor)
        return _as_views(op, args, kwargs, answer, args[0]) if is_view else answer
    if op.overloadpacket is _aten.fill_ and any(each.is_partial() for each in getattr(args[0], "placements", ())):
        raise NotImplementedError(
            f"{op} on a DTensor that is placed as {args[0].placements}, pending a reduction: all ranks' values would be "
            "reduced. Use zero_(), or redistribute first, as in t = t.redistribute(placements=[Replicate()])"
        )
    moved = _moved_arguments(op_info, answer)
    if (outs := _outs_of_others(op, kwargs, answer)) is not None:
        if any(placement.is_partial() for out in outs for placement in out.placements):
            raise NotImplementedError(
                f"{op} with an out= that is placed as {[out.placements for out in outs]}, pending a reduction: give it another "
                "placement, as in out=torch.empty_like(x)"
            )
        return on_whole_tensors(op, args, kwargs)
    if not moved:
        return answer
    if _is_composite(op):  # Only in inference mode. ``reshape`` is a view or a copy: the ops that it is made of know.
        return op.decompose(*args, **kwargs)
    dispatcher = DTensor._op_dispatcher
    given, leaves = op_info.flat_args_schema, args if op_info.args_tree_spec is None else pytree.tree_leaves(args)
    written = {id(leaf) for leaf in written_by(op, args, kwargs)}
    copied = [index for index in moved if id(leaves[index]) in written]
    if not copied and not _is_view(op):
        return answer
    op_info.output_sharding = answer
    local = dispatcher._dispatch_get_local_results_slow_path(op, args, op_info)
    result = dispatcher.wrap(local, answer.output_spec)
    if _is_view(op):
        return _as_views(op, args, kwargs, result, args[0], is_copy=True)
    for index in copied:
        before, after, tensor = given[index], moved[index], leaves[index]
        values = redistribute_local(
            op_info.local_args[index], before.mesh, before.shape, after.placements, before.placements
        ).wait()
        (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).copy_(values)  # A plain one counts as replicated.
    return result


def _moved_arguments(op_info: Any, sharding: OutputSharding) -> dict[int, DTensorSpec]:
    """The positional arguments that a sharding redistributes, and where to."""
    if not sharding.needs_redistribute or sharding.redistribute_schema is None:
        return {}
    wanted: Sequence[Any] = sharding.redistribute_schema.args_schema
    if op_info.args_tree_spec is not None:
        wanted = pytree.tree_leaves(wanted)
    pairs = zip(op_info.flat_args_schema, wanted)
    return {i: b for i, (a, b) in enumerate(pairs) if isinstance(a, DTensorSpec) and a.placements != b.placements}


def _outs_of_others(op: torch._ops.OpOverload, kwargs: dict[str, Any], sharding: OutputSharding) -> list[DTensor] | None:
    """The tensors given as ``out=``, which torch does not redistribute, if a result has other placements. None: they fit."""
    outs = [kwargs[each.name] for each in op._schema.arguments if each.is_out and each.name in kwargs]
    pairs = [pair for pair in zip(outs, pytree.tree_leaves(sharding.output_spec)) if isinstance(pair[0], DTensor)]
    fits = all(out.placements == spec.placements for out, spec in pairs if isinstance(spec, DTensorSpec))
    return None if fits else [out for out, _ in pairs]


def _as_views(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, tensor: Any, is_copy: bool = False) -> Any:
    """The results of a view op on ``tensor``, as views that know the tensor if they are copies."""
    if isinstance(tensor, CopiedView):
        source, views, version, is_copy = tensor._source, tensor._views, tensor._version_of_copy, True
    else:
        source, views, version = _alias(tensor), (), _version(tensor)

    def as_view(each: Any, index: int | None) -> Any:
        if isinstance(each, DTensor) and (is_copy or (type(each) is DTensor and _memory(each) != _memory(tensor))):
            plain = DTensor(each._gathered, each._spec, requires_grad=False) if isinstance(each, CopiedView) else each  # type: ignore
            return CopiedView.of(plain, source, (*views, (op, args[1:], kwargs, index)), version)
        return each

    if isinstance(result, (list, tuple)):
        return type(result)([as_view(each, index) for index, each in enumerate(result)])
    return as_view(result, None)


def _alias(tensor: DTensor) -> DTensor:
    """The tensor's memory and placements, without autograd's view of it."""
    return DTensor(tensor._local_tensor, tensor._spec, requires_grad=False)  # type: ignore[call-arg]


def _memory(tensor: DTensor) -> int:
    """What tells whether two DTensors are views of the same memory on this rank, and so on all."""
    tensor = tensor._source if isinstance(tensor, CopiedView) else tensor
    return tensor._local_tensor.untyped_storage()._cdata  # type: ignore[no-any-return]


def _version(tensor: torch.Tensor) -> Any:
    """How often the tensor or a view of it was written; of a tensor of the inference mode, how often any was."""
    return (writes_in_inference(),) if torch.is_inference_mode_enabled() or tensor.is_inference() else tensor._version


def _whole_copy(tensor: DTensor) -> torch.Tensor:
    """A plain tensor of one device, with its memory of its own: a view op must see the strides that it saw."""
    mesh, everywhere = tensor.device_mesh, (Replicate(),) * tensor.device_mesh.ndim
    local = redistribute_local(tensor._local_tensor, mesh, tensor.shape, tensor.placements, everywhere).wait()
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=local.dtype, device=local.device).copy_(local)


@functools.cache
def _is_view(op: torch._ops.OpOverload) -> bool:
    return returns_alias(op) and op.overloadpacket is not _aten._unsafe_view


@functools.cache
def _is_composite(op: torch._ops.OpOverload) -> bool:
    """Whether the op is made of others."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), torch._C.DispatchKey.CompositeImplicitAutograd)
