"""Read replicated tensors only once: each replica reads a share of them and broadcasts it to the other replicas.

Nothing here reads files: the planner asks which tensors this rank reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from torch_ragged._ranks.groups import group_of
from torch_ragged.tensor._stored_tensor import StoredTensor

__all__ = ["ReplicaShares"]


@dataclass
class _Replicas:
    """The tensors that one set of ranks replicates: by name, the local tensor and the index of the rank that reads it."""

    tensors: dict[str, tuple[torch.Tensor, int]] = field(default_factory=dict)
    nbytes: list[int] = field(default_factory=list)  # for each rank of the set, the bytes that it reads


class ReplicaShares:
    """Decides which rank reads which tensor. If DTensors are replicated over mesh dimensions, each replica reads an even share.

    All ranks find the same shares without communication: the assignment depends only on names, sizes and meshes. All other
    tensors are read by each rank that holds them.

    Args:
        tensors: the tensors of this rank, by name.
        spread: if False, each rank reads all its tensors.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], spread: bool = True) -> None:
        self._replicas: dict[tuple[int, ...], _Replicas] = {}
        self._others: set[str] = set()  # Names of tensors that another replica reads for this rank.
        if spread:
            holders = {name: ranks for name, tensor in tensors.items() if len(ranks := _shard_holders(tensor)) > 1}
            # The largest first, for even shares. The order is equal on all ranks, because global sizes and names are.
            for name in sorted(holders, key=lambda name: (-tensors[name].nbytes, name)):
                self._assign(name, tensors[name], holders[name])

    def _assign(self, name: str, tensor: torch.Tensor, ranks: tuple[int, ...]) -> None:
        local = tensor.to_local().detach()  # type: ignore[attr-defined]
        replicas = self._replicas.setdefault(ranks, _Replicas(nbytes=[0] * len(ranks)))
        reader = replicas.nbytes.index(min(replicas.nbytes))
        replicas.nbytes[reader] += local.nbytes
        replicas.tensors[name] = (local, reader)
        if ranks[reader] != dist.get_rank():
            self._others.add(name)

    def reads(self, name: str) -> bool:
        """Whether this rank reads the tensor ``name`` from the files."""
        return name not in self._others

    def exchange(self) -> None:
        """Fill the tensors that other replicas read. Call it on all ranks, after all have read their shares.

        Issues one broadcast per replicated tensor among its replicas. All broadcasts of one set of ranks are in flight
        together.
        """
        for ranks, replicas in sorted(self._replicas.items()):  # Sorted: ranks in several sets use them in the same order.
            group = group_of(ranks)
            in_flight = []
            for local, reader in replicas.tensors.values():
                if isinstance(local, StoredTensor):  # One at a time: together, they would not fit into memory.
                    received = local.read().contiguous()
                    dist.broadcast(received, src=ranks[reader], group=group)
                    if ranks[reader] != dist.get_rank():
                        local.copy_(received)
                    continue
                buffer = local.contiguous()
                in_flight.append((dist.broadcast(buffer, src=ranks[reader], group=group, async_op=True), buffer, local))
            for work, buffer, local in in_flight:
                work.wait()
                if buffer is not local:  # The local tensor is not contiguous: the broadcast went into a copy.
                    local.copy_(buffer)


def _shard_holders(tensor: torch.Tensor) -> tuple[int, ...]:
    """The ranks that hold the same shard of ``tensor``, in ascending order; () if the mesh cannot broadcast the shard."""
    if not isinstance(tensor, DTensor):
        return ()
    mesh, local = tensor.device_mesh, tensor.to_local().detach()
    # A local tensor of a program's own type holds several tensors, or none: torchrec's table of one rank says Replicate.
    if local.device.type != mesh.device_type or type(local) not in (torch.Tensor, StoredTensor):
        return ()
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return ()
    index = tuple(slice(None) if isinstance(p, Replicate) else c for p, c in zip(tensor.placements, coordinate))
    return tuple(sorted(mesh.mesh[index].flatten().tolist()))
