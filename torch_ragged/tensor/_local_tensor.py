"""All ranks in one process: under torch's ``LocalTensorMode``, a ``LocalTensor`` holds the local tensors of all ranks.

Each rank must get the numbers that a process of its own would have. The mode runs ops on local tensors once per rank, and makes
mesh coordinates symbolic integers, which have a value per rank. Ragged placements compute with plain integers: which elements
a rank holds, and how many it sends to whom. So their code asks :func:`coordinate_of` for the coordinate. Code that makes local
tensors of this rank's coordinate is called by :func:`on_each_rank`::

    local = on_each_rank(broadcast_local, whole, mesh, shape, placements)

Without the mode, this is a call of the function.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._local_tensor import (
    LocalIntNode,
    LocalTensor,
    _for_each_rank_run_func,
    enabled_local_tensor_mode,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

__all__ = [
    "LocalTensor",
    "as_own_rank",
    "as_rank",
    "coordinate_of",
    "coordinates_of",
    "current_rank",
    "local_tensors",
    "on_each_rank",
    "peers_of",
]

_rank: contextvars.ContextVar[int | None] = contextvars.ContextVar("rank", default=None)


def coordinate_of(mesh: DeviceMesh) -> tuple[int, ...] | None:
    """The coordinate of this rank in ``mesh``; None on a rank outside. Within :func:`on_each_rank`, that of the current rank.

    Raises:
        NotImplementedError: ``LocalTensorMode`` is on, and there is no current rank.
    """
    rank = _rank.get()
    if rank is not None:
        place = _places(mesh).get(rank)
        return None if place is None else place[1:]
    found = mesh.get_coordinate()
    if found and type(found[0]) is not int and enabled_local_tensor_mode() is not None:
        raise NotImplementedError(
            "LocalTensorMode is on, and this call has another answer on each rank: make it for one rank at a time, by "
            "owned_boxes(shape, mesh_shape, placements, coordinate), or on processes"
        )
    return None if found is None else tuple(found)


def coordinates_of(mesh: DeviceMesh) -> dict[int, tuple[int, ...]]:
    """The coordinate of each rank in ``mesh``; if that is a part of a larger mesh, in the part with the rank."""
    return {rank: place[1:] for rank, place in _places(mesh).items()}


def peers_of(rank: int, mesh: DeviceMesh, mesh_dims: tuple[int, ...]) -> list[int]:
    """The ranks that differ from ``rank`` only in ``mesh_dims``, in mesh order."""
    places, kept = _places(mesh), [0, *(dim + 1 for dim in range(mesh.ndim) if dim not in mesh_dims)]
    own = places[rank]
    return sorted((peer for peer, place in places.items() if all(place[i] == own[i] for i in kept)), key=places.__getitem__)


def _places(mesh: DeviceMesh) -> dict[int, tuple[int, ...]]:
    """For each rank: which part of a larger mesh has it, and its coordinate there."""
    if mesh not in _known:
        ranks = mesh._layout.remap_to_tensor(mesh._rank_map.clone())
        _known[mesh] = dict(zip(ranks.flatten().tolist(), itertools.product(*map(range, ranks.shape))))
    return _known[mesh]


_known: weakref.WeakKeyDictionary[DeviceMesh, dict[int, tuple[int, ...]]] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def as_rank(rank: int) -> Iterator[None]:
    """A context in which ``rank`` is the current one: ops on plain tensors are its own."""
    mode, token = enabled_local_tensor_mode(), _rank.set(rank)
    try:
        with contextlib.nullcontext() if mode is None else mode.disable():
            yield
    finally:
        _rank.reset(token)


def as_own_rank() -> contextlib.AbstractContextManager[None]:
    """Under ``LocalTensorMode``, a context in which this process's rank is the current one.

    For what torch caches: it may use that after the mode, too.
    """
    return contextlib.nullcontext() if enabled_local_tensor_mode() is None else as_rank(_own_rank())


def current_rank() -> int:
    """The global rank of this process, or of the current rank within :func:`on_each_rank`."""
    rank = _rank.get()
    return _own_rank() if rank is None else rank


def _own_rank() -> int:
    world = dist.group.WORLD
    return 0 if world is None else world.rank()  # Not dist.get_rank, which the mode replaces.


def local_tensors(local: torch.Tensor) -> dict[int, torch.Tensor] | None:
    """The local tensor of each rank; None if ``LocalTensorMode`` is off. A plain tensor is that of every rank.

    Raises:
        RuntimeError: it is a LocalTensor, and the mode is off.
    """
    mode = enabled_local_tensor_mode()
    if type(local) is LocalTensor:
        if mode is None:
            raise RuntimeError(_MODE_IS_OFF)
        return dict(local._local_tensors)
    return None if mode is None else dict.fromkeys(mode.ranks, local)


def on_each_rank(function: Callable[..., Any], *args: Any) -> Any:
    """The result of ``function``. Under ``LocalTensorMode``, the results of all ranks, called with their own local tensors.

    The function must not communicate. Each rank draws random numbers from a state of its own.

    Raises:
        RuntimeError: an argument is a LocalTensor, and the mode is off.
    """
    mode = enabled_local_tensor_mode()
    if mode is not None:
        rank = torch.SymInt(LocalIntNode({rank: rank for rank in mode.ranks}))
        states = [(each, each.get_state()) for each in pytree.tree_leaves(args) if isinstance(each, torch.Generator)]
        return _for_each_rank_run_func(_call_as_rank, mode.ranks, (rank, states, function, args), {}, alias=False)
    if _has_local_tensor(args):
        raise RuntimeError(_MODE_IS_OFF)
    return function(*args)


def _has_local_tensor(argument: Any) -> bool:
    """Faster than a pytree: every ``from_local`` asks."""
    kind = type(argument)
    return kind is LocalTensor or ((kind is tuple or kind is list) and any(map(_has_local_tensor, argument)))


def _call_as_rank(rank: int, states: list[Any], function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    with as_rank(int(rank)):
        for generator, state in states:  # A user's generator is one object in this process, but on each rank it is another one.
            generator.set_state(state)
        return function(*args)


_MODE_IS_OFF = "a LocalTensor has the local tensors of all ranks: use it under LocalTensorMode"
