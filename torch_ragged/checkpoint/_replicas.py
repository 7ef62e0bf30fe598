"""Reading once what replicas hold: each of them reads a share of it, and they tell each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from torch_ragged._groups import group_of

__all__ = ["ReplicaShares"]


@dataclass
class _Replicas:
    """What one set of ranks holds alike: by name, the tensor here and the index of the rank that reads it."""

    tensors: dict[str, tuple[torch.Tensor, int]] = field(default_factory=dict)
    nbytes: list[int] = field(default_factory=list)  # that each of the ranks reads


class ReplicaShares:
    """Who reads which of ``tensors``: of DTensors that are replicated over mesh dimensions, each replica an even share.

    Ranks find the same shares without communication. Everything else is read by each rank for itself.

    Args:
        tensors: by name, those of this rank.
        spread: False has everybody read everything.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], spread: bool = True) -> None:
        self._replicas: dict[tuple[int, ...], _Replicas] = {}
        self._others: set[str] = set()  # that others read for this rank
        if spread:
            for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].nbytes, item[0])):  # The largest first.
                self._assign(name, tensor, _holders(tensor))

    def _assign(self, name: str, tensor: torch.Tensor, ranks: tuple[int, ...]) -> None:
        if len(ranks) < 2:
            return
        local = tensor.to_local().detach()  # type: ignore[attr-defined]
        replicas = self._replicas.setdefault(ranks, _Replicas(nbytes=[0] * len(ranks)))
        reader = replicas.nbytes.index(min(replicas.nbytes))
        replicas.nbytes[reader] += local.nbytes
        replicas.tensors[name] = (local, reader)
        if ranks[reader] != dist.get_rank():
            self._others.add(name)

    def reads(self, name: str) -> bool:
        """Whether this rank reads ``name``."""
        return name not in self._others

    def exchange(self) -> None:
        """Once all ranks have read theirs: one broadcast of each replicated tensor among its replicas."""
        for ranks, replicas in sorted(self._replicas.items()):
            group = group_of(ranks)
            pending = []
            for local, reader in replicas.tensors.values():
                buffer = local.contiguous()
                pending.append((dist.broadcast(buffer, src=ranks[reader], group=group, async_op=True), buffer, local))
            for work, buffer, local in pending:
                work.wait()
                if buffer is not local:
                    local.copy_(buffer)


def _holders(tensor: torch.Tensor) -> tuple[int, ...]:
    """The ranks that hold the same part of ``tensor``, in ascending order; () if there is no telling them over the mesh."""
    if not isinstance(tensor, DTensor) or tensor.to_local().device.type != tensor.device_mesh.device_type:
        return ()
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return ()
    place = tuple(slice(None) if isinstance(p, Replicate) else c for p, c in zip(tensor.placements, coordinate))
    return tuple(sorted(mesh.mesh[place].flatten().tolist()))
