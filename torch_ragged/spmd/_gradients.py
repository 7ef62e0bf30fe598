"""Gradients of parameters that no unit shards: reduced once, after backward, in buckets.

It must not know units: fully_shard reduces the gradients of its parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from torch_ragged._register._torch import backward_id
from torch_ragged.spmd._move import make_dtensor
from torch_ragged.tensor._redistribute import mesh_group

__all__ = ["PendingGradients"]

_BUCKET = 64 * 2**20
"""Bytes of one all-reduce, at most: larger ones are no faster, and need as much memory again."""


class PendingGradients:
    """Brings gradients to the placements that the plan says, when backward has ended.

    A gradient may be pending a sum over several mesh dimensions, as that of a norm's weight is over data-parallel and
    sequence-parallel ranks. Gradients that are pending over the same dimensions are added in one buffer: one all-reduce over
    all these dimensions per 64 MB. Others are redistributed one by one.

    Args:
        params: each parameter with the placements of its gradient.
    """

    def __init__(self, params: Iterable[tuple[torch.nn.Parameter, tuple[Placement, ...]]], mesh: DeviceMesh) -> None:
        self._wanted = dict(params)
        self._mesh = mesh
        self._leaves: dict[torch.nn.Parameter, tuple[torch.Tensor, tuple[Placement, ...]]] = {}
        self._task = -1
        self._ready: dict[torch.nn.Parameter, None] = {}  # In the order of backward, which is equal on all ranks.
        for param in self._wanted:
            param.register_post_accumulate_grad_hook(self._note)

    def leaf_of(self, param: torch.nn.Parameter, placements: tuple[Placement, ...]) -> torch.Tensor | None:
        """A leaf of autograd on the local memory of ``param``, for static modules; None if a unit reduces the gradient.

        Autograd accumulates into the leaf, without DTensor. When backward ends, its gradient, which has ``placements``, is
        added to that of ``param``.
        """
        if param not in self._wanted:
            return None
        local = param._local_tensor.detach().requires_grad_()  # type: ignore[attr-defined]
        local.register_post_accumulate_grad_hook(lambda _: self._note(param))
        self._leaves[param] = local, placements
        return local

    def _note(self, param: torch.Tensor) -> None:
        task = backward_id()
        if task != self._task:  # Once per backward, also after one that raised before its end.
            self._task = task
            Variable._execution_engine.queue_callback(self._reduce)  # type: ignore[attr-defined]
        self._ready[param] = None  # type: ignore[index]

    def _reduce(self) -> None:
        params, self._ready = list(self._ready), {}
        for param, grad in self._reduced([(param, param.grad) for param in params]):
            param.grad = grad
        new = []
        for param in params:
            leaf, placements = self._leaves.get(param, (None, ()))
            if leaf is not None and leaf.grad is not None:
                new.append((param, make_dtensor(leaf.grad, self._mesh, placements, param.shape)))
                leaf.grad = None
        for param, grad in self._reduced(new):
            param.grad = grad if param.grad is None else param.grad + grad

    def _reduced(
        self, grads: Sequence[tuple[torch.nn.Parameter, torch.Tensor | None]]
    ) -> list[tuple[torch.nn.Parameter, DTensor]]:
        """The gradients with the placements that the plan says."""
        results: dict[torch.nn.Parameter, DTensor] = {}
        buckets: dict[tuple[tuple[int, ...], torch.dtype], list[tuple[torch.nn.Parameter, DTensor]]] = {}
        for param, grad in grads:
            if not isinstance(grad, DTensor):
                continue
            pending = _pending(grad.placements, self._wanted[param])
            if pending is None:
                results[param] = grad.redistribute(placements=self._wanted[param])
            elif pending:
                buckets.setdefault((pending, grad.dtype), []).append((param, grad))
            else:
                results[param] = grad
        for (dims, _), pairs in buckets.items():
            for bucket in _split(pairs):
                locals_ = self._all_reduced(dims, [grad._local_tensor for _, grad in bucket])
                for (param, grad), local in zip(bucket, locals_):
                    results[param] = make_dtensor(local, self._mesh, self._wanted[param], grad.shape)
        return list(results.items())

    def _all_reduced(self, dims: tuple[int, ...], locals_: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        flat = torch.cat([local.reshape(-1) for local in locals_]) if len(locals_) > 1 else locals_[0].reshape(-1)
        dist.all_reduce(flat, group=mesh_group(self._mesh, dims))
        return [part.view(local.shape) for part, local in zip(flat.split([local.numel() for local in locals_]), locals_)]


def _pending(given: Sequence[Placement], wanted: Sequence[Placement]) -> tuple[int, ...] | None:
    """The mesh dimensions over which a gradient is only pending a sum; None if something else changes."""
    dims = []
    for dim, (old, new) in enumerate(zip(given, wanted)):
        if old == new:
            continue
        if not (type(old) is Partial and old.reduce_op == "sum" and isinstance(new, Replicate)):
            return None
        dims.append(dim)
    return tuple(dims)


def _split(pairs: Sequence[tuple[torch.nn.Parameter, DTensor]]) -> list[list[tuple[torch.nn.Parameter, DTensor]]]:
    """Runs of gradients of at most ``_BUCKET`` bytes."""
    buckets: list[list[tuple[torch.nn.Parameter, DTensor]]] = [[]]
    size = 0
    for pair in pairs:
        nbytes = pair[1]._local_tensor.nbytes
        if buckets[-1] and size + nbytes > _BUCKET:
            buckets.append([])
            size = 0
        buckets[-1].append(pair)
        size += nbytes
    return buckets
