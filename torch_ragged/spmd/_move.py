"""Moves: a redistribution between known placements, with that of its gradient. It is planned once per shape.

It must not decide anything: placements come from the plan, or from what arrived in eager mode.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from torch_ragged._ranks.peers import peers_named
from torch_ragged.tensor._api import spec_of
from torch_ragged.tensor._cut_placement import has_flat
from torch_ragged.tensor._redistribute import (
    CARRIED,
    REDUCTIONS,
    AllReduce,
    in_order_of,
    plan_of,
    redistribute_local,
    run_steps,
)
from torch_ragged.tensor._route import Step
from torch_ragged.tensor.placement_types import whole_shape

__all__ = ["Carry", "PerDim", "can_move", "clean", "differentiable_once", "is_even", "make_dtensor", "move_dtensor", "on_trial"]

_FLOATS = {dtype for dtype in CARRIED if dtype.is_floating_point}
PerDim = tuple[Placement, ...]
"""A placement per mesh dimension."""


class Carry:
    """What a boundary does to a local tensor: from ``src`` to ``dst``, and its gradient from ``grad_src`` to ``grad_dst``.

    A move that changes nothing returns the tensor itself.
    """

    def __init__(self, mesh: DeviceMesh, src: PerDim, dst: PerDim, grad_src: PerDim, grad_dst: PerDim) -> None:
        self.mesh, self.src, self.dst, self.grad_src, self.grad_dst = mesh, src, dst, grad_src, grad_dst
        self._sizes = tuple(mesh.shape)
        self._plans: dict[Any, Sequence[Step]] = {}
        self.is_needed = src != dst or grad_src != grad_dst
        self._reductions = _only_reduction(mesh, src, dst), _only_reduction(mesh, grad_src, grad_dst)
        # Compared and made once: a static step has many moves, and most of a small one is Python.
        self._is_same = src == dst, grad_src == grad_dst
        self._named = _waiting_as(mesh, src, dst), _waiting_as(mesh, grad_src, grad_dst)

    def __call__(self, local: torch.Tensor, in_backward: Callable[[], Carry]) -> torch.Tensor:
        """Move a local tensor. ``in_backward`` returns the move of its gradient, when that has arrived."""
        return _MoveLocal.apply(local, self, in_backward) if self.is_needed else local

    def run(self, local: torch.Tensor, *, is_gradient: bool) -> torch.Tensor:
        """Move a local tensor whose shards are even, or its gradient. The collectives of ``redistribute_local``."""
        if self._is_same[is_gradient]:
            return local
        if on_trial.carry is not None:
            given, wanted = (self.grad_src, self.grad_dst) if is_gradient else (self.src, self.dst)
            moved = on_trial.carry(local, given, wanted, whole_shape(local.shape, given, self._sizes), self.mesh)
        else:
            with self._named[is_gradient]:
                reduce = self._reductions[is_gradient]
                moved = reduce(local) if reduce is not None and local.dtype in _FLOATS else self._run(local, is_gradient)
        # As in eager mode (_moved_to): the order in memory decides the order of sums and draws behind the boundary.
        return moved if local.is_contiguous() else in_order_of(moved, local.stride())

    def _run(self, local: torch.Tensor, is_gradient: bool) -> torch.Tensor:
        src, dst = (self.grad_src, self.grad_dst) if is_gradient else (self.src, self.dst)
        key = (is_gradient, local.shape, local.dtype)
        steps = self._plans.get(key)
        if steps is None:  # Once per shape: hashing placements takes longer than a small collective.
            shape = whole_shape(local.shape, src, self._sizes)
            # Other dtypes are carried as another one: redistribute_local() plans what it sends then.
            if local.dtype in CARRIED:
                self._plans[key] = plan_of(shape, self._sizes, src, dst, tuple(self.mesh.get_coordinate() or ()))
            return redistribute_local(local, self.mesh, shape, src, dst).wait()
        return run_steps(steps, local, self.mesh).wait()


class _OnTrial:
    """While static modules are found: ``carry(local, src, dst, shape, mesh)`` stands for a move, and does not communicate."""

    carry: Callable[[torch.Tensor, PerDim, PerDim, Sequence[int], DeviceMesh], torch.Tensor] | None = None


on_trial = _OnTrial()


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward that raises if autograd asks for a graph of the gradients, which local tensors do not have."""

    @functools.wraps(backward)
    def choose(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "backward with create_graph=True goes through a static module, whose gradients have no graph: call parallelize "
                "with mode='eager' for second derivatives"
            )
        return backward(ctx, *gradients)

    return choose


class _MoveLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, local, move, in_backward):  # type: ignore[no-untyped-def]
        ctx.set_materialize_grads(False)
        ctx.in_backward = in_backward
        moved = move.run(local, is_gradient=False)
        return local.view_as(local) if moved is local else moved

    @staticmethod
    @differentiable_once
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        # The move of the gradient is asked for now: a trial may have found another one for the placements that have arrived.
        # Without a gradient, nothing is sent. Then no rank has one, as all of them run one program.
        return None if gradient is None else ctx.in_backward().run(gradient, is_gradient=True), None, None


def _only_reduction(mesh: DeviceMesh, src: PerDim, dst: PerDim) -> AllReduce | None:
    """What carries out a move from ``src`` to ``dst`` that is one all-reduce."""
    changes = [(dim, given, wanted) for dim, (given, wanted) in enumerate(zip(src, dst)) if given != wanted]
    # Most boundaries of tensor parallelism are one all-reduce. It needs no plan: it is the same for all shapes.
    if len(changes) != 1:
        return None
    dim, given, wanted = changes[0]
    if type(given) is not Partial or given.reduce_op not in REDUCTIONS or not isinstance(wanted, Replicate):
        return None
    return AllReduce(given.reduce_op, mesh, dim)


def _waiting_as(mesh: DeviceMesh, src: PerDim, dst: PerDim) -> peers_named:
    """While this rank waits in a redistribution, other ranks see it, and its errors name the ranks that wait elsewhere."""

    def ranks() -> list[int]:
        here = mesh.get_coordinate() or [0] * mesh.ndim
        # A redistribution goes along the mesh dimensions whose placement changes: these ranks wait for each other.
        where = tuple([index if old == new else slice(None) for old, new, index in zip(src, dst, here)])
        return mesh.mesh[where].flatten().tolist()  # type: ignore[no-any-return]

    return peers_named("redistribution", "", ranks)


def can_move(placements: Sequence[Placement]) -> bool:
    """Whether the package's own redistribution knows these placements: torch's partial norms and masks it does not."""
    return all(not isinstance(p, Partial) or (type(p) is Partial and p.reduce_op in REDUCTIONS) for p in placements)


def is_even(shape: Sequence[int], placements: Sequence[Placement], mesh_shape: Sequence[int]) -> bool:
    """Whether all ranks have equally much of a tensor of ``shape``."""
    sizes = list(shape)
    for placement, ranks in zip(placements, mesh_shape):
        if placement.is_shard() or isinstance(placement, _StridedShard):  # torch's strided shard says no in some versions.
            dim: int = placement.dim  # type: ignore[attr-defined]
            if sizes[dim] % ranks:
                return False
            sizes[dim] //= ranks
    return True


def clean(placements: Sequence[Placement]) -> PerDim:
    """The placements of a gradient that flows back to a tensor: whole where the tensor is pending a reduction."""
    return tuple([Replicate() if isinstance(p, Partial) else p for p in placements])


def make_dtensor(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: PerDim,
    shape: Sequence[int],
    stride: tuple[int, ...] | None = None,
) -> DTensor:
    """A DTensor on ``local``, without a check and without autograd. ``stride`` is that of the whole; None: row-major."""
    key = (id(mesh), placements, tuple(shape), stride, local.dtype)  # An equal mesh may have other process groups.
    known, spec = _known_specs.get(key, (None, None))
    if known is not mesh:
        spec = spec_of(mesh, placements, torch.Size(shape), local.dtype, stride)
        # A limit, because entries keep their mesh, and shapes may never come again.
        if len(_known_specs) >= 4096:
            _known_specs.clear()
        _known_specs[key] = mesh, spec
    return DTensor(local, spec, requires_grad=local.requires_grad)  # type: ignore[call-arg, arg-type]


_known_specs: dict[Any, tuple[DeviceMesh, Any]] = {}


def move_dtensor(tensor: DTensor, dst: PerDim, before: PerDim | None = None, after: PerDim | None = None) -> DTensor:
    """Redistribute a DTensor, and its gradient to ``before``, if given, and then ``after``: None is the way back.

    It is DTensor's own ``redistribute``, by the package's plans, which are cached.
    """
    src = tensor.placements
    if dst == src and before is None and after is None:
        return tensor
    return _MoveDTensor.apply(tensor, dst, before, clean(src) if after is None else after)


class _MoveDTensor(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, dst, before, after):  # type: ignore[no-untyped-def]
        # A gradient that does not exist, as that of a reentrant checkpoint which has not used its input: zeros would be plain.
        ctx.set_materialize_grads(False)
        ctx.before, ctx.after = before, after
        return _moved_to(tensor, dst)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        if gradient is None:
            return None, None, None, None
        # A gradient may stay pending: to make a whole one pending would add it up once per rank.
        if ctx.before is not None and not any(isinstance(p, Partial) for p in ctx.before):
            gradient = move_dtensor(gradient, ctx.before)
        return move_dtensor(gradient, ctx.after), None, None, None


def _moved_to(tensor: Any, dst: PerDim) -> DTensor:
    src = tensor.placements
    if src == dst:
        return tensor.view_as(tensor)
    # Other ranks see this wait, also if the redistribution is torch's own.
    with _waiting_as(tensor.device_mesh, src, dst):
        if not can_move((*src, *dst)):
            return tensor.redistribute(placements=dst)
        if on_trial.carry is not None:
            local = on_trial.carry(tensor._local_tensor, src, dst, tensor.shape, tensor.device_mesh)
        else:
            local = redistribute_local(tensor._local_tensor, tensor.device_mesh, tensor.shape, src, dst).wait()
    # One device's order in memory stays: dropout draws in this order.
    return make_dtensor(
        in_order_of(local, tensor.stride()), tensor.device_mesh, dst, tensor.shape, None if has_flat(dst) else tensor.stride()
    )
