"""NeighbourCopies: each rank's shards are in the memory of another rank too, so that training survives the death of a rank."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import pickle
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh

from torch_ragged import transfer
from torch_ragged._ranks.agreement import agreement, before_groups, reduce_min
from torch_ragged._ranks.groups import device_of_messages, end_messages, group_of, groups_of, timeout_of
from torch_ragged._ranks.peers import PeerError
from torch_ragged._ranks.standstill import announce
from torch_ragged._ranks.survivors import agree_on_survivors
from torch_ragged._register._torch import local_tensor
from torch_ragged.fsdp.core._mesh import DataParallelMesh
from torch_ragged.fsdp.elastic._reshard_to import Description, ModelMove, check_no_hooks, checked_states, mesh_of_states
from torch_ragged.transfer._background import Handle, in_background
from torch_ragged.transfer._sides import RelocatedSide, Spec
from torch_ragged.transfer._watch import Watch

__all__ = ["CopiesLost", "NeighbourCopies", "move_empty"]

_CALL = "NeighbourCopies"
_ALIGNMENT = 16  # Bytes, so that a part of a buffer can be viewed as any dtype.
_REPORTING = 15.0  # Seconds. So long a rank takes, after its collective has failed, to make an error that names the ranks.


class CopiesLost(RuntimeError):
    """A rank and the rank with its copy are both gone, or no copy was complete."""


_Index = dict[str, tuple[int, int, torch.dtype]]
"""Where the local tensors of one rank lie in its buffer: (offset in bytes, elements, dtype) by name."""


class _Shards:
    """The shards of one rank at one time, one after the other in a buffer."""

    def __init__(self, device: torch.device) -> None:
        self.index = _Index()
        self.buffer = torch.empty(0, dtype=torch.uint8, device=device)

    def fit(self, index: _Index) -> None:
        """Make room for the tensors of ``index``. If they are others than before, the contents are lost."""
        used = max((start + numel * dtype.itemsize for start, numel, dtype in index.values()), default=0)
        nbytes = -(-used // _ALIGNMENT) * _ALIGNMENT
        if nbytes != self.buffer.nbytes:
            self.buffer = self.buffer.new_empty(0)  # Free the old buffer before the new one is allocated.
            self.buffer = self.buffer.new_empty(nbytes)
        self.index = index

    def view(self, name: str) -> torch.Tensor:
        start, numel, dtype = self.index[name]
        return self.buffer[start : start + numel * dtype.itemsize].view(dtype)


@dataclass
class _Generation:
    """One copy: this rank's own shards, and those of the rank whose copy it keeps.

    It has all that :meth:`NeighbourCopies.recover` needs, because the next copy may have other tensors.
    """

    own: _Shards
    kept: _Shards
    step: int = -1  # The number of the ``update()`` that made this copy; -1 until both buffers have arrived.
    steps: int = 0  # That the optimizers of this rank had made. Those of the other rank had made as many.
    specs: dict[str, Spec] = field(default_factory=dict)  # Of all tensors, by name.
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
        step = copies.recover()                         # after a death, on all ranks that are left

    A copy has one state of the run: all ranks call :meth:`update` after the same steps of the optimizers. If a rank has missed
    a call, its next copy is an error on all ranks. The last copy stays valid until the next one has arrived on all ranks. So a
    death at any time leaves one step of which all shards exist, if no rank died together with the rank that keeps its copy.

    With replicas (HSDP), each rank copies its own shards, and sends none: a replica has those of a rank that dies.

    Memory: two generations of own and kept shards: per rank about 4 times its shards of parameters and optimizer states, on
    their device, or 2 times with replicas. Time: one copy of the shards per update; sending goes on in the background.

    Args:
        model: sharded by :func:`fully_shard` on a mesh of at least 2 ranks.
        optimizer, stateful: as for :func:`reshard_to`. Each rank copies its own.
        every: copy in every so-many-th call of :meth:`update`.
        distance: rank ``i`` of the mesh sends its copy to rank ``i + distance``. None: ``LOCAL_WORLD_SIZE``, the ranks of a
            host, as torchrun sets it, if the mesh has more ranks; otherwise 1. With replicas, leave it out.

    Raises:
        ValueError: the model is not sharded, or was sharded with what :func:`reshard_to` does not support, such
            as ``Offload``; ``every`` or ``distance`` does not fit, or they, the model or the optimizers differ between ranks.
        TypeError: as :func:`reshard_to`.

    Collectives: two all-reduces of up to 24 bytes, on the mesh. The copies have a process group of their own, with the timeout
    of the mesh's group.
    """

    _numbers: ClassVar[set[int]] = set()
    """The numbers of this rank's NeighbourCopies that exist, or of which the group has failed. They name the groups."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        *,
        every: int = 1,
        distance: int | None = None,
        stateful: Sequence[Stateful] = (),
    ) -> None:
        self._model, self._optimizer, self._every = model, optimizer, every
        with before_groups(_CALL):
            dp = mesh_of_states(checked_states(model, _CALL), _CALL)
            if dp.mesh.size() < 2 or not dp.is_member:
                raise ValueError(f"NeighbourCopies takes a mesh of at least 2 ranks, with this rank, got {dp.mesh}")
        mesh_groups = groups_of(dp.mesh)
        self._device = device_of_messages(mesh_groups[0])
        self._replicas, ranks = dp.mesh.size() // dp.ranks, dp.mesh.size()
        with agreement(mesh_groups, self._device, _CALL) as claim:
            self._stateful = list(stateful) if isinstance(stateful, (list, tuple)) else stateful
            move = self._move(None)
            local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
            if dp.mesh.ndim > 1 and distance is not None:
                raise ValueError(f"NeighbourCopies(distance={distance!r}) on {dp.mesh}: with replicas, leave the distance out")
            distance = (local if local < ranks else 1) if distance is None else distance
            whole = all(isinstance(each, int) and not isinstance(each, bool) for each in (every, distance))
            if not whole or every < 1 or not 0 < distance < ranks:
                raise ValueError(
                    f"NeighbourCopies(every={every!r}, distance={distance!r}) on {ranks} ranks: expected "
                    f"integers, every >= 1 and a distance between 1 and {ranks - 1}"
                )
            claim.append(f"every={every}, distance={distance}")
            claim += move.lines()  # Or the copies of two models, or of two dtypes, would meet.
        announce()  # So that other ranks can ask whether this process lives.
        self._mesh = dp.mesh
        self._ranks = tuple(dp.mesh.mesh.flatten().tolist())
        self._rank, self._distance = dist.get_rank(), distance
        place = self._ranks.index(self._rank)
        self._keeper, self._kept = self._ranks[(place + distance) % ranks], self._ranks[place - distance]
        # A number that no rank uses: so the groups of deleted NeighbourCopies are used again. Ranks may have others, with other
        # ranks, or may not have deleted one yet.
        lowest = torch.tensor([-max(NeighbourCopies._numbers, default=0) - 1], device=self._device)
        for each in mesh_groups:
            reduce_min(lowest, each, _CALL)
        number = -int(lowest)
        parent = mesh_groups[0] if len(mesh_groups) == 1 else None
        self._group = group_of(sorted(self._ranks), f"neighbour copies {number}", parent)
        NeighbourCopies._numbers.add(number)
        self._frees_number = weakref.finalize(self, NeighbourCopies._numbers.discard, number)
        self._calls = 0
        self._index, self._specs = _Index(), dict[str, Spec]()
        # What the keeper knows of this rank, and this rank of the one whose copy it keeps.
        self._told_index = self._kept_index = self._index
        self._generations = [_Generation(_Shards(self._device), _Shards(self._device)) for _ in range(2)]
        self._handle: Handle | None = None
        self._has_failed = False
        self._steps = steps = [0]  # Of all optimizers together.

        def count(*args: Any) -> None:  # An optimizer may live longer than the copies, which it must not keep alive.
            steps[0] += 1

        for states in move.optimizers:
            weakref.finalize(self, states.optimizer.register_step_post_hook(count).remove)
        self._left, self._deaths = self._ranks, 0

    @property
    def nbytes(self) -> int:
        """The bytes of all copies on this rank."""
        return sum(each.own.buffer.nbytes + each.kept.buffer.nbytes for each in self._generations)

    def update(self) -> None:
        """Copy the present state, and send it in the background. Call it after ``optimizer.step()``, on all ranks.

        Raises:
            TransferError: the last copy failed, because a rank died, its ``update()`` raised, or ranks made it after different
                steps of the optimizers.
            RuntimeError: a copy has failed before.
            ValueError: the model is on another mesh, after :func:`reshard_to` or :meth:`recover`. On all ranks, at once.
            Exception: the state of this rank cannot be copied. The other ranks raise a TransferError in their next call.

        Collectives: none that waits. In the background: messages to the keeper of the copy, and an all-reduce of 8 bytes.
        """
        self._calls += 1
        if self._calls % self._every:
            return
        self.wait()
        if self._has_failed:
            raise RuntimeError(
                "a copy has failed, and its process group is not usable: call recover(), and make new NeighbourCopies"
            )
        mesh = mesh_of_states(checked_states(self._model, _CALL, runs=True), _CALL).mesh
        if mesh != self._mesh:
            raise ValueError(
                f"the model is on {mesh}, and its NeighbourCopies were made on {self._mesh}: make new ones after reshard_to() "
                "or recover()"
            )
        # The older one, or one that was never complete: the last complete copy stays until this one is complete on all ranks.
        generation = min(self._generations, key=lambda each: each.step)
        # Before it is overwritten: if this rank fails or dies while it copies, recover() must not take half a copy.
        generation.step, generation.steps = -1, self._steps[0]
        problem: Exception | None = None
        try:
            self._fill(generation)
        except Exception as error:  # Any: the other ranks wait for this one's shards.
            problem = error
        # Also with a problem: the other ranks are in their exchange, or will be. The thread tells them by the store.
        self._handle = in_background(self._group, self._device, functools.partial(self._send, generation, self._calls, problem))
        if problem is not None:
            raise problem

    def wait(self) -> None:
        """Wait until the last copy has arrived on all ranks. Raise the TransferError of :meth:`update` if it failed."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.wait()

    def ranks_left(self, patience: float | None = None) -> list[int]:
        """The ranks of the mesh that are left after a death, equal on all of them. Call it after each death.

        Ranks report to the store of the default group. The call returns when each rank has reported, or its process has ended.
        A rank that lives must call it too, so it gets an error: this call ends all that is in flight here on the process groups
        of the model and, over gloo, on all groups with a dead rank. A rank that computes gets it in its next collective.

        ``patience``: how many seconds to wait for a rank that lives and does not report, such as one that is stopped. After
        that, it counts as dead. None: the timeout of the model's process group, and 15 s for reports. Until then, each
        collective that it waits in has failed.

        Raises:
            RuntimeError: this rank reported too late, and the others have gone on without it.
        """
        self._frees_number.detach()
        if patience is None:
            patience = timeout_of(self._group, self._device).total_seconds() + _REPORTING
        self._deaths += 1
        name = f"copies/{self._group.group_name}/{self._deaths}"
        self._left = agree_on_survivors(self._left, name, self.groups, self._device, patience)
        return list(self._left)

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The process groups of the model, and that of the copies."""
        states = checked_states(self._model, _CALL, runs=True)
        found = {each for state in states for group in state.groups for each in groups_of(group.dp.mesh)}
        return [self._group, *(found - {self._group})]

    @property
    def has_copy(self) -> bool:
        """Whether this rank has a complete copy."""
        return any(each.step >= 0 for each in self._generations)

    def _group_left(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        # Not new_group(): it names the group after the number of this rank's groups, which may differ between ranks.
        return group_of(ranks, f"left of {self._group.group_name}", self._group)

    def recover(self, mesh: DeviceMesh | None = None, *, group: dist.ProcessGroup | None = None) -> int:
        """Continue on the ranks that are left, with the last copy that all of them have. All of them call it after the error.

        Parameters, optimizers and buffers get the state of the copy, on ``mesh``, as :func:`reshard_to` would move them.
        Gradients are dropped. Then make new ``NeighbourCopies``. If another rank dies before this call returns, it raises, and
        may be called again.

        Args:
            mesh: a mesh of ranks of the old mesh, of those that are left and call this. None: a 1-D one of :meth:`ranks_left`,
                with a process group that has the timeout of the old one.
            group: of these ranks; None: that of ``mesh``, or a new one if it has two dimensions.

        Returns:
            the number of the call of :meth:`update` whose state it is.

        Raises:
            ValueError: a parameter has hooks on its gradient: remove them, and register them on the new parameters.
            RuntimeError: there is no copy yet; or a rank and the rank with its copy are both gone. On all ranks that are left.
                Or this rank took part too late: see :meth:`ranks_left`.
        """
        check_no_hooks(checked_states(self._model, _CALL, runs=True), "recover()")  # Before anything is changed.
        if mesh is None:
            mesh = DeviceMesh.from_group(self._group_left(self.ranks_left()), self._mesh.device_type)
        if group is None:  # All ranks that are left are in this call, so that they make the group together.
            group = mesh.get_group() if mesh.ndim == 1 else self._group_left(mesh.mesh.flatten().tolist())
        with contextlib.suppress(transfer.TransferError):  # The copy before that one counts.
            self.wait()
        # With the optimizers' steps: of a copy that mixes states of several steps, ranks may know different parts.
        own = (self._rank, dist.get_rank(), [(each.step, each.steps) for each in self._generations if each.step >= 0])
        answers: list[Any] = [None] * group.size()
        dist.all_gather_object(answers, own, group=group)
        left_now = {old: now for old, now, _ in answers}
        if self._mesh.ndim > 1:
            holders = _replica_holders(left_now, self._mesh.mesh.view(self._replicas, -1).tolist())
        else:
            holders = _holders(left_now, self._ranks, self._distance)
        common = set.intersection(*(set(steps) for _, _, steps in answers))
        if not common:
            raise CopiesLost("recover(): the ranks that are left have no complete copy in common: load a checkpoint")
        step, _ = max(common)
        generation = next(each for each in self._generations if each.step == step)
        assert generation.told is not None
        _drop_step(self._model)
        move = self._move(mesh)
        move.make_groups(generation.told)
        move.load_stateful(generation.told)
        target = move.target(generation.told)
        source = {
            RelocatedSide.key(name, rank): shards.view(name)
            for rank, shards in ((self._rank, generation.own), (self._kept, generation.kept))
            for name in generation.specs
            if holders.get(rank) == dist.get_rank() and shards.index
        }
        with torch.no_grad():
            transfer.plan(RelocatedSide(generation.specs, holders), target, group=group).run(source, target)
            for (*_, tensor), saved in zip(move.whole_tensors(), generation.whole):
                tensor.copy_(saved)
        move.finish(generation.told, target, group, takes_told=True)
        return step

    def _move(self, mesh: DeviceMesh | None) -> ModelMove:
        states = checked_states(self._model, _CALL)
        old = mesh_of_states(states, _CALL)
        new = old if mesh is None else DataParallelMesh.of(mesh)
        return ModelMove(self._model, states, self._optimizer, old, new, _CALL, stateful=self._stateful)

    def _fill(self, generation: _Generation) -> None:
        """Copy this rank's state. No communication."""
        move = self._move(None)
        tensors = move.source(gradients=False)
        flats = {name: local_tensor(each).reshape(-1) for name, each in tensors.items()}
        index, start = _Index(), 0
        for name, flat in flats.items():
            index[name] = (start, flat.numel(), flat.dtype)
            start += -(-flat.nbytes // _ALIGNMENT) * _ALIGNMENT
        if index != self._index:  # Tensors have appeared, such as at the first step.
            self._index, self._specs = index, {name: Spec.of(each) for name, each in tensors.items()}
        generation.specs = self._specs
        generation.own.fit(index)
        for name, flat in flats.items():
            generation.own.view(name).copy_(flat)
        # A copy: counters on the CPU are the optimizer's own tensors here, and the next step changes them. The host waits for
        # counters on an accelerator.
        generation.told = copy.deepcopy(replace(move.description(), gradients={}))
        generation.whole = [tensor.detach().clone() for *_, tensor in move.whole_tensors()]

    def _send(self, generation: _Generation, step: int, problem: Exception | None) -> None:
        watch = Watch(self._ranks, f"{self._group.group_name}/{step}", timeout_of(self._group, self._device), self._device)
        try:
            if problem is not None:
                raise problem
            if self._mesh.ndim == 1:
                self._exchange_indices(generation, watch)
                self._exchange(generation.own.buffer, generation.kept.buffer, watch)
            # Before the all-reduce and not after it. If a rank dies, the all-reduce may end on some ranks and fail on others.
            # Ranks where it has ended overwrite the older copy next. Then this one must count on the other ranks, too, or
            # recover() finds no copy that all have.
            generation.step = step
            # The older generation is overwritten next: first, all ranks must have this one.
            done = torch.ones(1, dtype=torch.int64, device=self._device)
            watch.wait([dist.all_reduce(done, group=self._group, async_op=True)])
        except Exception as error:
            self._has_failed = True
            self._frees_number.detach()
            failure = watch.failed(error, "NeighbourCopies.update()", ("the copy of each rank's shards",))
            end_messages(self._group, self._device)
            raise failure from error

    def _exchange_indices(self, generation: _Generation, watch: Watch) -> None:
        """Tell the keeper what this rank sends, if it is not what it sent before, and make room for what this rank keeps."""
        index = generation.own.index
        text = b"" if index == self._told_index else pickle.dumps(index)
        own = torch.tensor([len(text), generation.steps], device=self._device)
        kept = torch.empty_like(own)
        self._exchange(own, kept, watch)
        size, steps = kept.tolist()
        if steps != generation.steps:
            raise ValueError(
                f"this rank copies the state after {generation.steps} optimizer steps, and rank {self._kept} that after "
                f"{steps}: call update() after the same steps on all ranks"
            )
        received = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._exchange(torch.tensor(list(text), dtype=torch.uint8, device=self._device), received, watch)
        if received.numel():
            self._kept_index = pickle.loads(bytes(received.tolist()))
        self._told_index = index
        generation.kept.fit(self._kept_index)

    def _exchange(self, own: torch.Tensor, kept: torch.Tensor, watch: Watch) -> None:
        """Send ``own`` to the keeper of this rank's copy, and receive ``kept`` from the rank whose copy this one keeps."""
        messages = []
        if own.numel():
            messages.append(dist.P2POp(dist.isend, own, self._keeper, self._group))
        if kept.numel():
            messages.append(dist.P2POp(dist.irecv, kept, self._kept, self._group))
        watch.wait(dist.batch_isend_irecv(messages) if messages else [])


def _drop_step(model: nn.Module) -> None:
    """Forget the step that a death has ended, and its gradients."""
    while True:
        try:
            model.reset_iter_state()  # type: ignore[operator]
            break
        except PeerError:  # A reduction in flight had the dead rank. It is forgotten: the next call goes on behind it.
            continue
    for param in model.parameters():
        param.grad = None


def move_empty(model: nn.Module, optimizer: Any, mesh: DeviceMesh) -> None:
    """Put ``model`` on ``mesh``, full of zeros: a checkpoint is loaded next. The ranks of ``mesh`` call it together."""
    states = checked_states(model, _CALL, runs=True)
    _drop_step(model)
    old, new = mesh_of_states(states, _CALL), DataParallelMesh.of(mesh)
    move = ModelMove(model, states, optimizer, old, new, _CALL)
    told = move.description()
    move.make_groups(told)
    with torch.no_grad():
        target = move.target(told)
        for tensor in target.values():
            local_tensor(tensor).zero_()
    move.finish(told, target, mesh.get_group(), takes_told=True)


def _replica_holders(left: Mapping[int, int], replicas: Sequence[Sequence[int]]) -> dict[int, int]:
    """For each rank of the old mesh that is left, the rank that has its shards now: itself."""
    for number, ranks in enumerate(zip(*replicas)):
        if not left.keys() & set(ranks):
            raise CopiesLost(
                f"recover(): ranks {list(ranks)}, which had all replicas of shard {number}, are gone: load a checkpoint"
            )
    return dict(left)


def _holders(left: Mapping[int, int], ranks: Sequence[int], distance: int) -> dict[int, int]:
    """For each rank of the old mesh, the rank that has its shards: itself, or the keeper of its copy.

    ``left`` are the ranks before and now of those that are left.
    """
    holders, lost = {}, []
    for place, rank in enumerate(ranks):
        keeper = ranks[(place + distance) % len(ranks)]
        if rank in left or keeper in left:
            holders[rank] = left[rank] if rank in left else left[keeper]
        else:
            lost.append(f"rank {rank} with its copy on rank {keeper}")
    if lost:
        raise CopiesLost(f"recover(): {', '.join(lost)} are gone: load a checkpoint")
    return holders
