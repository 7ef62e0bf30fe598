"""Boundaries: what happens to tensors when they enter or leave a module, as hooks that are bound once.

It must not read a plan: it carries out the records of ``_resolved``.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from torch_ragged._register._torch import dynamo_disabled
from torch_ragged.spmd._move import Carry, PerDim, clean, move_dtensor
from torch_ragged.spmd._paths import Key
from torch_ragged.spmd._resolved import Boundary, Spoken
from torch_ragged.spmd._text import nearest
from torch_ragged.tensor._cut_placement import CutPlacement, chunk_of, of_dim
from torch_ragged.tensor._placement_text import placement_text

__all__ = [
    "Redistribution",
    "SharedHook",
    "add_boundaries",
    "as_dtensor",
    "entries_of",
    "entry_of",
    "from_front",
    "is_own_hook",
    "local_moves",
    "wrap_changes",
]

_Change = Callable[[torch.Tensor], torch.Tensor]
_Hook = TypeVar("_Hook")


def add_boundaries(model: nn.Module, boundaries: Sequence[Boundary], mesh: DeviceMesh) -> list[_Change]:
    """Register the hooks of ``boundaries``: at most one before and one after the forward of a module.

    Returns:
        what the hooks call, one per boundary.
    """
    made: list[_Change] = []
    of_module: dict[tuple[str, str], list[Boundary]] = {}
    for boundary in boundaries:
        of_module.setdefault((boundary.module, boundary.side), []).append(boundary)
    for (name, side), each in of_module.items():
        module = model.get_submodule(name)
        changes = [(boundary.key, _change(boundary, mesh)) for boundary in each]
        made += [change for _, change in changes]
        if side == "in":
            # Registered before those of units and of static modules: these get what a boundary returns.
            module.register_forward_pre_hook(_InputHook(module, changes), with_kwargs=True)
        else:
            module.register_forward_hook(_OutputHook(changes))
    return made


def wrap_changes(model: nn.Module, wrap: Callable[[Boundary, _Change], _Change]) -> None:
    """Replace what each boundary of ``model`` does by ``wrap(boundary, change)``: for tools that watch a model."""
    for module in model.modules():
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            if isinstance(hook, (_InputHook, _OutputHook)):
                changes: list[Any] = hook.changes
                hook.changes = [(*where, wrap(change.boundary, change)) for *where, change in changes]


def is_own_hook(hook: Any) -> bool:
    """Whether a hook of a module is one of this package, and not one of the user."""
    function = inspect.unwrap(getattr(hook, "__func__", hook))
    home = getattr(function, "__module__", None) or type(function).__module__
    return bool(home.split(".")[0] == "torch_ragged")


def as_dtensor(tensor: torch.Tensor, mesh: DeviceMesh, placements: Optional[Spoken] = None) -> DTensor:
    """``tensor`` as a DTensor on ``mesh``: itself, or a plain tensor that has these ``placements``; None is Replicate."""
    if isinstance(tensor, DTensor):
        return tensor
    placed = [placement or Replicate() for placement in placements or (None,) * mesh.ndim]
    # torch's check would broadcast the tensor in each call. Ranks compare the inputs of the model instead (_inputs), without a
    # copy.
    return DTensor.from_local(tensor, mesh, placed, run_check=False)


# -- hooks ---------------------------------------------------------------------------------------------------------------


class SharedHook:
    """Of a hook without a state of its own: ``copy.deepcopy`` of a module gives the copy the same hook."""

    def __deepcopy__(self: _Hook, memo: Any) -> _Hook:
        return self


class _InputHook(SharedHook):
    """Before forward: changes arguments, passed by position or by keyword. Arguments that are not given stay so."""

    def __init__(self, module: nn.Module, changes: Sequence[tuple[Key, _Change]]) -> None:
        parameters = _parameters_of(module)
        self.changes = [
            (parameters.get(key[0], key[0] if isinstance(key[0], int) else None), key[0], key[1:], change)
            for key, change in changes
        ]
        # Names that ``**kwargs`` alone can take: only a call shows whether one is misspelled.
        self._expected = [name for _, name, *_ in self.changes if isinstance(name, str) and name not in parameters]

    @dynamo_disabled  # It would run what it has traced of one module's boundary for another one: no guard reads these changes.
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._expected:
            expected, self._expected = self._expected, []
            given = [*list(_parameters_of(module))[: len(args)], *kwargs]
            for wanted in expected:
                if wanted not in given:
                    near = "".join([f", such as {each}" for each in nearest(wanted, given, 1)])
                    warnings.warn(
                        f"the plan names the input {wanted} of {type(module).__name__}, and its first call has none: the rule "
                        f"does nothing. Name one that is passed{near} (got {', '.join(given) or 'none by name'})",
                        stacklevel=2,
                    )
        for position, name, rest, change in self.changes:
            if name in kwargs:
                kwargs = {**kwargs, name: replaced_at(kwargs[name], rest, change)}
            elif position is not None and position < len(args):
                args = (*args[:position], replaced_at(args[position], rest, change), *args[position + 1 :])
        return args, kwargs


class _OutputHook(SharedHook):
    """After forward: changes the output, or tensors in it."""

    def __init__(self, changes: Sequence[tuple[Key, _Change]]) -> None:
        self.changes = list(changes)

    @dynamo_disabled
    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        for key, change in self.changes:
            output = change(output) if isinstance(output, torch.Tensor) else replaced_at(output, key, change)
        return output


def _parameters_of(module: nn.Module) -> dict[Any, int | None]:
    """The arguments of ``forward`` that have names: their positions, or None for one that is passed by keyword only."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):  # A forward that is not Python's.
        return {}
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    named = [(index, each) for index, each in enumerate(parameters) if each.kind in (*positional, each.KEYWORD_ONLY)]
    return {each.name: index if each.kind in positional else None for index, each in named}


def replaced_at(value: Any, key: Key, change: _Change) -> Any:
    """``value`` with the tensor at ``key`` changed: a copy of the containers on the way to it. Other values are shared.

    None stays None. If ``key`` leads to a container, the first tensor in it is changed.

    Raises:
        KeyError: ``value`` has no entry ``key``.
    """
    if value is None:
        return None
    if isinstance(value, torch.Tensor):
        return change(value)
    if key:
        return _with_entry(value, key[0], replaced_at(entry_of(value, key[0]), key[1:], change))
    for each in entries_of(value):
        entry = entry_of(value, each)
        found = replaced_at(entry, (), change)
        if found is not entry:
            return _with_entry(value, each, found)
    return value


def entries_of(value: Any) -> list[Any]:
    """The keys of what is in a container; none for another value."""
    if isinstance(value, Mapping):
        return list(value)
    if isinstance(value, (list, tuple)):
        return list(range(len(value)))
    if dataclasses.is_dataclass(value):
        return [field.name for field in dataclasses.fields(value)]
    return []


def entry_of(value: Any, key: Any) -> Any:
    """What ``value`` has at ``key``.

    Raises:
        KeyError: it has no such entry.
    """
    if isinstance(value, Mapping) and key in value:
        return value[key]
    if isinstance(value, (list, tuple)) and isinstance(key, int) and key < len(value):
        return value[key]
    if isinstance(key, str) and hasattr(value, key):
        return getattr(value, key)
    if isinstance(key, int) and isinstance(value, Mapping) and key < len(value):  # transformers' outputs are both.
        return value[list(value)[key]]
    raise KeyError(f"{type(value).__name__} has no {key!r}, which a plan names: it has {entries_of(value)}")


def _with_entry(value: Any, key: Any, entry: Any) -> Any:
    if isinstance(value, tuple):
        if hasattr(value, "_fields"):
            name = key if isinstance(key, str) else value._fields[key]
            return value._replace(**{name: entry})  # type: ignore[attr-defined]
        return type(value)((*value[:key], entry, *value[key + 1 :]))
    if isinstance(value, Mapping) and isinstance(key, int) and key not in value:
        key = list(value)[key]
    new = copy.copy(value)
    if isinstance(value, (Mapping, list)):
        new[key] = entry  # type: ignore[index]
    else:
        object.__setattr__(new, key, entry)
    return new


class _LocalMoves:
    """While a static module runs: the moves of local tensors of the boundaries in it, as they are in forward or in backward."""

    of: Optional[Callable[[Redistribution], Carry]] = None


local_moves = _LocalMoves()


# -- changes -------------------------------------------------------------------------------------------------------------


def _change(boundary: Boundary, mesh: DeviceMesh) -> _Change:
    return _Annotate(boundary, mesh) if boundary.action == "annotate" else Redistribution(boundary, mesh)


class _Annotate:
    """What a local tensor is, without moving it. A DTensor keeps its placements where the plan says nothing."""

    def __init__(self, boundary: Boundary, mesh: DeviceMesh) -> None:
        self.boundary, self._of_ndim, self._mesh = boundary, _OfNdim(boundary), mesh

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        placements = self._of_ndim[tensor.ndim].placements
        if not isinstance(tensor, DTensor):
            # Inputs of a loader have no graph: in the usual case this costs nothing.
            if tensor.grad_fn is not None and any(isinstance(each, Shard) for each in placements):
                _check_own_rows(tensor, self.boundary.path)
            made = as_dtensor(tensor, self._mesh, placements)
            # Without a graph, each rank's part of the gradient is that of the rows it has passed. With one, ops on this part
            # would be taken for ops on the whole.
            if made.requires_grad and not all(each.is_replicate() for each in made.placements):
                made.register_hook(functools.partial(_refuse_graph, self.boundary.path, made.placements))
            return made
        wanted = [new or old for new, old in zip(placements, tensor.placements)]
        if wanted == list(tensor.placements):
            return tensor
        # Through autograd: the gradient goes back the same way, to the placements of the tensor.
        return DTensor.from_local(tensor.to_local(), self._mesh, wanted, run_check=False)


def _refuse_graph(path: str, placements: PerDim, gradient: Any) -> None:
    """A gradient with a graph is to be used: a plain part of one would be taken for the same whole tensor on all ranks.

    Raises:
        RuntimeError: backward makes a graph.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"create_graph=True asks for the gradient of {path}, of which each rank passes its own part: a plain part of it "
            f"cannot be used as one device's gradient. Make the input a DTensor: DTensor.from_local(x, mesh, {placements})."
            "requires_grad_(); its gradients are DTensors, too"
        )


def _check_own_rows(tensor: torch.Tensor, path: str) -> None:
    """Whether no plain parameter has computed a part: its gradient would be that of the part, another one on each rank.

    Raises:
        ValueError: one has, with its shape.
    """
    waiting = [tensor.grad_fn]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter) and not isinstance(leaf, DTensor):
            raise ValueError(
                f"{path} is computed from this rank's own rows by a parameter of shape {tuple(leaf.shape)} that is not in the "
                "model: its gradient would be that of these rows alone. Make its module a part of the model, or pass the whole "
                "batch, or pass a DTensor if the script itself adds up these gradients over ranks"
            )
        for inner, _ in () if node is None else node.next_functions:
            if inner is not None and inner not in seen:
                seen.add(inner)
                waiting.append(inner)


class Redistribution:
    """Bring a tensor to placements. Its gradient goes back to the placements that it came from, or to those of the plan.

    A plain tensor is the same on all ranks, or what ``src`` says. Inside a static module it is a local tensor, for which
    ``local_moves`` has the move.

    Attributes:
        boundary: what the plan says.
        observe: called with the placements before and after, and with the result, while a module is on trial.
    """

    def __init__(self, boundary: Boundary, mesh: DeviceMesh) -> None:
        self.boundary, self._of_ndim, self._mesh = boundary, _OfNdim(boundary), mesh
        self.observe: Optional[Callable[[PerDim, PerDim, DTensor], None]] = None

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if local_moves.of is not None and not isinstance(tensor, DTensor):
            # The second argument is asked in backward: it looks up the move of the call to which the gradient belongs.
            return local_moves.of(self)(tensor, functools.partial(local_moves.of, self))
        boundary = self._of_ndim[tensor.ndim]
        source = as_dtensor(tensor, self._mesh, boundary.src)
        given = source.placements
        # Placements are equal on all ranks, so all of them raise, before anything is sent.
        if boundary.src is not None and any(told not in (None, own) for told, own in zip(boundary.src, given)):
            raise ValueError(
                f"{boundary.path} arrives as {given}, and the plan says that it is {boundary.src} (rules {boundary.rules}): "
                "correct src, or leave it out"
            )
        wanted = _filled(boundary.placements, given)
        before = None if boundary.grad_src is None else _filled(boundary.grad_src, wanted)
        after = None if boundary.grad_dst is None else _filled(boundary.grad_dst, clean(given))
        if after is None and source is not tensor and source.requires_grad:
            after = clean(given)  # What from_local does in backward has no graph, so a second backward would miss it.
        result = move_dtensor(source, wanted, before, after)
        # On trial, on which move_dtensor() has sent nothing.
        if self.observe is not None:
            self.observe(given, wanted, result)
        return result


class _OfNdim(dict[int, Boundary]):
    """A boundary for tensors of each number of dimensions: negative dimensions of its placements count from the end.

    Raises:
        ValueError: a placement cuts a dimension that the tensor does not have. On all ranks, before anything is sent.
    """

    def __init__(self, boundary: Boundary) -> None:
        super().__init__()
        self._boundary = boundary

    def __missing__(self, ndim: int) -> Boundary:
        names = ("placements", "src", "grad_src", "grad_dst")
        spoken = {name: getattr(self._boundary, name) for name in names}
        where = f"{self._boundary.path} (rules {self._boundary.rules} of the plan)"
        counted: dict[str, Any] = {
            name: each and tuple([p and from_front(p, ndim, where) for p in each]) for name, each in spoken.items()
        }
        self[ndim] = dataclasses.replace(self._boundary, **counted)
        return self[ndim]


def from_front(placement: Placement, ndim: int, where: str) -> Placement:
    """``placement`` on a tensor of ``ndim`` dimensions: a negative dimension counts from its end.

    Raises:
        ValueError: the tensor does not have the dimension; the text says ``where`` it is.
    """
    chunk = chunk_of(placement)  # None: Replicate, Partial, or ragged, which checks its dimensions.
    if chunk is None:
        return placement.normalize(ndim) if isinstance(placement, CutPlacement) else placement
    if not -ndim <= chunk.dim < ndim:
        raise ValueError(
            f"{where} has {ndim} dimensions, and {placement_text(placement)} cuts dimension {chunk.dim}: cut a dimension that "
            "the tensor has"
        )
    return of_dim(placement, chunk.dim % ndim)


def _filled(spoken: Spoken, default: Sequence[Placement]) -> PerDim:
    return tuple([new or old for new, old in zip(spoken, default)])
