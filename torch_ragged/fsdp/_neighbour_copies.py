"""NeighbourCopies: each rank's shards are in the memory of another rank too, so that training survives the death of a rank."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torch_ragged import transfer
from torch_ragged._groups import device_of_messages, group_of
from torch_ragged._register._torch import default_store, local_tensor, timeout_of
from torch_ragged.fsdp._reshard_to import Description, Move, checked_states
from torch_ragged.fsdp.core._mesh import DataParallelMesh
from torch_ragged.fsdp.core._regroup import mesh_of_groups
from torch_ragged.transfer._background import Handle, in_background
from torch_ragged.transfer._sides import RelocatedSide, Spec
from torch_ragged.transfer._watch import Watch, end_messages

__all__ = ["NeighbourCopies"]

_ALIGNMENT = 16  # Bytes, so that a part of a buffer can be viewed as any dtype.
_numbers = itertools.count()


@dataclass(frozen=True)
class _Index:
    """Where the local tensors of one rank lie in its buffer: (offset in bytes, elements, dtype) by name."""

    places: dict[str, tuple[int, int, torch.dtype]]
    nbytes: int

    @staticmethod
    def of(tensors: Mapping[str, torch.Tensor]) -> _Index:
        places, start = {}, 0
        for name, tensor in tensors.items():
            places[name] = (start, tensor.numel(), tensor.dtype)
            start += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        return _Index(places, start)

    def view(self, buffer: torch.Tensor, name: str) -> torch.Tensor:
        start, numel, dtype = self.places[name]
        return buffer[start : start + numel * dtype.itemsize].view(dtype)


@dataclass
class _Generation:
    """One copy: this rank's own shards, and those of the rank whose copy it keeps.

    Attributes:
        step: the call of ``update()`` that it is of, once both are here; otherwise -1.
    """

    own: torch.Tensor
    kept: torch.Tensor
    step: int = -1
    told: Description | None = None
    whole: list[torch.Tensor] = field(default_factory=list)


class NeighbourCopies:
    """Keeps a copy of each rank's parameters and optimizer states in the memory of another rank.

    ::

        rank          0          1          2          3            distance=2, the ranks of a host
        own           a          b          c          d            the shards at the last copy
        copy of       rank 2: c  rank 3: d  rank 0: a  rank 1: b

        copies = NeighbourCopies(model, optimizer)      # after fully_shard, on all ranks of its mesh
        for batch in batches:
            train_step(batch)
            copies.update()                             # sends in the background, while the next step computes
        ...
        group = dist.new_group(copies.ranks_left(), use_local_synchronization=True)     # after a death
        step = copies.recover(DeviceMesh.from_group(group, "cpu"))

    The last copy stays valid until the next one has arrived on all ranks. So a death at any time leaves one step of which all
    shards exist, if no rank died together with the rank that keeps its copy.

    Memory: two generations of own and kept shards: per rank about 4 times its shards of parameters and optimizer states, on
    their device. Time: one copy of the shards per update; sending goes on in the background.

    Args:
        model: sharded by :func:`fully_shard` on a 1-D mesh of at least 2 ranks. Under HSDP, other replicas have each shard.
        optimizer: as for :func:`reshard_to`.
        every: copy in every so-many-th call of :meth:`update`.
        distance: rank ``i`` of the mesh sends its copy to rank ``i + distance``. None: ``LOCAL_WORLD_SIZE``, the ranks of a
            host, as torchrun sets it, if the mesh has more ranks; otherwise 1.

    Raises:
        ValueError: the model is not sharded, or has replicas; ``every`` or ``distance`` does not fit.
    """

    def __init__(self, model: nn.Module, optimizer: Any, *, every: int = 1, distance: int | None = None) -> None:
        self._model, self._optimizer, self._every = model, optimizer, every
        dp = mesh_of_groups([group for state in checked_states(model) for group in state.groups])
        if dp.mesh.ndim != 1 or dp.ranks < 2 or not dp.is_member:
            raise ValueError(f"NeighbourCopies takes a 1-D mesh of at least 2 ranks, with this rank, got {dp.mesh}")
        local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        distance = (local if local < dp.ranks else 1) if distance is None else distance
        if every < 1 or not 0 < distance < dp.ranks:
            raise ValueError(
                f"NeighbourCopies(every={every}, distance={distance}) on {dp.ranks} ranks: expected every >= 1 and a distance "
                f"between 1 and {dp.ranks - 1}"
            )
        self._ranks = tuple(dp.mesh.mesh.tolist())
        self._rank, self._distance = dist.get_rank(), distance
        place = self._ranks.index(self._rank)
        self._keeper, self._kept = self._ranks[(place + distance) % dp.ranks], self._ranks[place - distance]
        self._group = group_of(sorted(self._ranks), f"neighbour copies {next(_numbers)}", dp.shard_group)
        self._device = device_of_messages(self._group)
        self._calls = self._updates = 0
        self._index: dict[int, _Index] = {}
        self._specs: dict[str, Spec] = {}
        self._generations: list[_Generation] = []
        self._handle: Handle | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of all copies on this rank."""
        return sum(each.own.nbytes + each.kept.nbytes for each in self._generations)

    def update(self) -> None:
        """Copy the present state, and send it in the background. Call it after ``optimizer.step()``, on all ranks.

        Raises:
            TransferError: the last copy failed, because a rank died.

        Collectives: none that waits, but for two all-gathers of descriptions when tensors appear, such as at the first step.
        """
        self._calls += 1
        if self._calls % self._every:
            return
        self.wait()
        move = self._move(None)
        tensors = {name: each for name, each in move.source().items() if not name.startswith("gradient.")}
        flats = {name: local_tensor(each).reshape(-1) for name, each in tensors.items()}
        index = _Index.of(flats)
        if self._index.get(self._rank) != index:
            self._describe(index, {name: Spec.of(each) for name, each in tensors.items()})
        generation = self._generations[self._updates % 2]
        generation.step = -1
        for name, flat in flats.items():
            index.view(generation.own, name).copy_(flat)
        generation.told = copy.deepcopy(move.description())
        generation.whole = [tensor.detach().clone() for *_, tensor in move.whole_tensors()]
        self._updates += 1
        self._handle = in_background(self._group, self._device, functools.partial(self._send, generation, self._calls))

    def wait(self) -> None:
        """Wait until the last copy has arrived on all ranks.

        Raises:
            TransferError: it failed, because a rank died.
        """
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.wait()

    def ranks_left(self, patience: float = 10.0) -> list[int]:
        """The ranks of the mesh that are left after a death, equal on all of them. Call it after the error.

        It first ends all that is in flight here on process groups of the model, so that ranks that still wait for this one get
        an error too. Then ranks report to the store of the default group.

        Args:
            patience: how many seconds the ranks wait for reports. A rank without a report counts as dead.

        Raises:
            RuntimeError: this rank reported too late, and the others have gone on without it.
        """
        groups = {group.dp.shard_group for state in checked_states(self._model, runs=True) for group in state.groups}
        for group in {*groups, self._group}:
            assert group is not None
            end_messages(group, self._device)
        store = dist.PrefixStore(f"torch_ragged/{self._group.group_name}", default_store())
        keys = {rank: f"rank {rank}" for rank in self._ranks}
        store.set(keys[self._rank], "")
        with contextlib.suppress(RuntimeError):
            store.wait(list(keys.values()), timedelta(seconds=patience))
        found = " ".join(str(rank) for rank, key in keys.items() if store.check([key]))
        # The first to be done decides for all.
        left = [int(rank) for rank in store.compare_set("left", "", found).decode().split()]
        if self._rank not in left:
            raise RuntimeError(f"rank {self._rank} has reported too late: ranks {left} have gone on without it")
        return left

    def recover(self, mesh: DeviceMesh, *, group: dist.ProcessGroup | None = None) -> int:
        """Continue on the ranks that are left, with the last copy that all of them have.

        After a death, the process groups of the old mesh are not usable. The ranks that are left make a group of their own::

            group = dist.new_group(copies.ranks_left(), use_local_synchronization=True)
            step = copies.recover(DeviceMesh.from_group(group, "cpu"))

        Parameters, optimizers and buffers get the state of the copy, on ``mesh``, as :func:`reshard_to` would move them.
        Gradients are dropped. Then make new ``NeighbourCopies``.

        Args:
            mesh: a 1-D mesh of ranks of the old mesh, of those that are left and call this.
            group: of these ranks; None: that of ``mesh``.

        Returns:
            the number of the call of :meth:`update` whose state it is.

        Raises:
            RuntimeError: there is no copy yet; or a rank and the rank with its copy are both gone. On all ranks that are left.
        """
        group = mesh.get_group() if group is None else group
        try:
            self.wait()
        except transfer.TransferError:
            pass  # The copy before that one counts.
        own = (self._rank, dist.get_rank(), [each.step for each in self._generations if each.step >= 0])
        answers: list[Any] = [None] * group.size()
        dist.all_gather_object(answers, own, group=group)
        holders = _holders({old: now for old, now, _ in answers}, self._ranks, self._distance)
        common = set.intersection(*(set(steps) for _, _, steps in answers))
        if not common:
            raise RuntimeError("recover(): the ranks that are left have no complete copy in common: load a checkpoint")
        step = max(common)
        generation = next(each for each in self._generations if each.step == step)
        assert generation.told is not None
        self._model.reset_iter_state()  # type: ignore[operator]
        for param in self._model.parameters():
            param.grad = None
        move = self._move(mesh)
        move.make_groups(generation.told)
        target = move.target(generation.told)
        target = {name: tensor for name, tensor in target.items() if not name.startswith("gradient.")}
        buffers = {self._rank: generation.own, self._kept: generation.kept}
        source = {
            RelocatedSide.key(name, rank): self._index[rank].view(buffer, name)
            for rank, buffer in buffers.items()
            for name in self._specs
            if holders[rank] == dist.get_rank()
        }
        with torch.no_grad():
            transfer.plan(RelocatedSide(self._specs, holders), target, group=group).run(source, target)
            for (*_, tensor), saved in zip(move.whole_tensors(), generation.whole):
                tensor.copy_(saved)
        move.finish(generation.told, target, takes_told=True)
        return step

    def _move(self, mesh: DeviceMesh | None) -> Move:
        states = checked_states(self._model)
        old = mesh_of_groups([group for state in states for group in state.groups])
        return Move(self._model, states, self._optimizer, old, old if mesh is None else DataParallelMesh.of(mesh))

    def _describe(self, index: _Index, specs: dict[str, Spec]) -> None:
        """Tell the others what this rank has, and allocate buffers."""
        answers: list[Any] = [None] * self._group.size()
        dist.all_gather_object(answers, (self._rank, index), group=self._group)
        self._index, self._specs = dict(answers), specs
        sizes = (index.nbytes, self._index[self._kept].nbytes)
        self._generations = [_Generation(_buffer(sizes[0], self._device), _buffer(sizes[1], self._device)) for _ in range(2)]

    def _send(self, generation: _Generation, step: int) -> None:
        watch = Watch(self._ranks, f"{self._group.group_name}/{step}", timeout_of(self._group, self._device), self._device)
        try:
            messages = []
            if generation.own.numel():
                messages.append(dist.P2POp(dist.isend, generation.own, self._keeper, self._group))
            if generation.kept.numel():
                messages.append(dist.P2POp(dist.irecv, generation.kept, self._kept, self._group))
            watch.wait(dist.batch_isend_irecv(messages) if messages else [])
            generation.step = step
            # The older generation is overwritten next: first, all ranks must have this one.
            done = torch.ones(1, dtype=torch.int64, device=self._device)
            watch.wait([dist.all_reduce(done, group=self._group, async_op=True)])
        except Exception as error:
            failure = watch.failed(error, "NeighbourCopies.update()", ("the copy of each rank's shards",))
            end_messages(self._group, self._device)
            raise failure from error


def _buffer(nbytes: int, device: torch.device) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def _holders(left: Mapping[int, int], ranks: Sequence[int], distance: int) -> dict[int, int]:
    """For each rank of the old mesh, the rank that has its shards: itself, or the keeper of its copy.

    Args:
        left: of the ranks that are left, their ranks before and now.

    Raises:
        RuntimeError: a rank and the keeper of its copy are gone.
    """
    holders, lost = {}, []
    for place, rank in enumerate(ranks):
        keeper = ranks[(place + distance) % len(ranks)]
        if rank not in left and keeper not in left:
            lost.append(f"rank {rank} with its copy on rank {keeper}")
        else:
            holders[rank] = left[rank] if rank in left else left[keeper]
    if lost:
        raise RuntimeError(f"recover(): {', '.join(lost)} are gone: load a checkpoint")
    return holders
