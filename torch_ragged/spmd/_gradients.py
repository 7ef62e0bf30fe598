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
        self._ready: dict[torch.nn.Parameter, None] = {}  # In the order of backward, which is equal on all ranks.
        for param in self._wanted:
            param.register_post_accumulate_grad_hook(self._note)

    def _note(self, param: torch.Tensor) -> None:
        if not self._ready:
            Variable._execution_engine.queue_callback(self._reduce)  # type: ignore[attr-defined]
        self._ready[param] = None  # type: ignore[index]

    def _reduce(self) -> None:
        buckets: dict[tuple[tuple[int, ...], torch.dtype], list[torch.nn.Parameter]] = {}
        for param in self._ready:
            grad, wanted = param.grad, self._wanted[param]
            if not isinstance(grad, DTensor) or grad.placements == wanted:
                continue
            pending = _pending(grad.placements, wanted)
            if pending is None:
                param.grad = grad.redistribute(placements=wanted)
            else:
                buckets.setdefault((pending, grad.dtype), []).append(param)
        self._ready = {}
        for (dims, _), params in buckets.items():
            for bucket in _split(params):
                self._all_reduce(dims, bucket)

    def _all_reduce(self, dims: tuple[int, ...], params: Sequence[torch.nn.Parameter]) -> None:
        locals_ = [param.grad._local_tensor for param in params]  # type: ignore[union-attr]
        flat = torch.cat([local.reshape(-1) for local in locals_]) if len(locals_) > 1 else locals_[0].reshape(-1)
        dist.all_reduce(flat, group=mesh_group(self._mesh, dims))
        for param, local, part in zip(params, locals_, flat.split([local.numel() for local in locals_])):
            param.grad = _with_local(param, part.view(local.shape), self._wanted[param])


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


def _split(params: Sequence[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
    """Runs of parameters of at most ``_BUCKET`` bytes."""
    buckets: list[list[torch.nn.Parameter]] = [[]]
    size = 0
    for param in params:
        nbytes = param.grad._local_tensor.nbytes  # type: ignore[union-attr]
        if buckets[-1] and size + nbytes > _BUCKET:
            buckets.append([])
            size = 0
        buckets[-1].append(param)
        size += nbytes
    return buckets


def _with_local(param: torch.nn.Parameter, local: torch.Tensor, placements: Sequence[Placement]) -> DTensor:
    grad = param.grad
    assert isinstance(grad, DTensor)
    return DTensor.from_local(local, grad.device_mesh, placements, run_check=False, shape=grad.shape, stride=grad.stride())
