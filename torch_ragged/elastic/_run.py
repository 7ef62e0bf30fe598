"""``elastic.run``: a training loop that survives the death of ranks. What a step computes is the program's: it knows no model.

The model and its optimizers move by ``NeighbourCopies`` and ``reshard_to``. This file decides when.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import logging
import os
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torch_ragged import checkpoint
from torch_ragged._ranks.agreement import agreement, before_groups
from torch_ragged._ranks.groups import device_of_messages, end_messages, group_of, groups_of, timeout_of
from torch_ragged._ranks.peers import fates_of, is_watched
from torch_ragged._ranks.standstill import announce
from torch_ragged._ranks.store import SharedStore
from torch_ragged._ranks.survivors import LeftBehind, agree_on_survivors
from torch_ragged.checkpoint._rng import rng_states, set_own_rng
from torch_ragged.checkpoint._same import value_digest
from torch_ragged.fsdp.bits._same_bits import SameBits
from torch_ragged.fsdp.bits._sums import CorruptionFound
from torch_ragged.fsdp.bits._tree import PieceCollectives
from torch_ragged.fsdp.core._hooks import tensors_in
from torch_ragged.fsdp.elastic._neighbour_copies import CopiesLost, NeighbourCopies, move_empty
from torch_ragged.fsdp.elastic._reshard_to import checked_states, mesh_of_states, reshard_to

__all__ = ["run"]

_CALL = "elastic.run"
_logger = logging.getLogger("torch_ragged.elastic")
_run_numbers = itertools.count()  # Of the calls of run(), equal on all ranks: all of them call it.
_LATEST_REPORT = 15.0  # Seconds. So long a rank takes, after its collective has failed, to make an error that names the ranks.
_LOOK, _SPARE_PROBE = 0.2, 5.0  # Seconds. A spare looks for a call so often, and so often whether a rank of the mesh lives.


def run(
    step: Callable[[int], Any],
    state: checkpoint.TrainState,
    steps: int,
    *,
    copy_every: int = 1,
    distance: int | None = None,
    checkpoints: str | os.PathLike[str] | None = None,
    save_every: int | None = None,
    patience: float | None = None,
    rewound: Callable[[int], Any] | None = None,
) -> None:
    """Train until ``state.step`` is ``steps``. If ranks die, those that are left go on from the last copy, without a restart.

    ::

        same = SameBits(model, optimizer, pieces=8)                   # optional: then the numbers are those of no death

        def step(number):                                             # may run again with the same number, on fewer ranks
            for piece in same.pieces():
                loss = model(batch(number, piece)).mean()
                loss.backward()
                same.add_loss(loss)
            same.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            curve[number] = same.loss()

        elastic.run(step, TrainState(model, optimizer, extra={"same": same}), steps=1000)    # on all ranks

    Each rank's shards are copied to another rank (:class:`~torch_ragged.fsdp.NeighbourCopies`). After a death, the ranks that
    are left agree on who is left, put the model on a mesh of these ranks with the state of the last copy, and repeat the steps
    since then. Ranks that are not in the model's mesh are spares: they wait in this call, and take the place of ranks that
    died. They make the same model as the others, with the mesh that does not have them, perhaps on the meta device.

    With replicas (HSDP), a rank copies its shards for itself alone: a replica has those of the dead. Ranks that are left are
    whole replicas again, if their number is a multiple of the shards; otherwise, they are a 1-D mesh.

    If a rank died together with the rank that had its copy, or all replicas of a shard, the newest of ``checkpoints`` is
    loaded. If ``step`` raises and no rank has died, all ranks raise.

    Args:
        step: the program's step; its argument is the number of the step, ``state.step``. It leaves no gradients, and uses no
            process group but those of the model's present mesh: others have a dead rank, once one died.
        state: what belongs to the run. ``model`` is a root of ``fully_shard``. Of ``extra``: tensors, objects with
            ``state_dict``, such as SameBits and a GradScaler, and plain values. A DTensor, as of an average of the parameters,
            has the shape and placements of a parameter; after a move, ``extra`` has another one by this name. The generators
            of ``rng`` are rewound on ranks that live. ``per_rank``, ``layouts`` and ``base`` are not covered.
        steps: how many steps the run has in all.
        copy_every: copy after so many steps. A death costs up to so many steps.
        distance: of the copies, as for NeighbourCopies, where there are no replicas.
        checkpoints: the folder of the run's checkpoints. If it has one, the run begins with the newest. Under torchrun, which
            ends all ranks if one dies, this is what a restart goes on with: in ``/dev/shm``, it is in the memory of the host.
        save_every: save after so many steps; None: never.
        patience: how many seconds to wait for a rank that lives and does not report, such as one that is stopped. None: the
            timeout of the default process group, and 15 s.
        rewound: called with the number of the step that is next, after the state went back, to shorten logs and curves, and
            on a spare that has joined.

    Memory: four times a rank's shards of parameters and optimizer states, two times with replicas. One line of the log
    ``torch_ragged.elastic`` has the bytes, and one line each death, with the seconds.

    Collectives: before the first step, an all-reduce of 24 bytes, and a broadcast if there is a folder of checkpoints; with
    each copy those of ``NeighbourCopies.update`` and of ``SameBits.verify``; after a death, those of ``recover``.

    Raises:
        RuntimeError: there is no process group; or the ranks of the mesh have failed, on a spare.
        TypeError: ``state`` is no TrainState.
        ValueError: the state has what is not covered, or ranks are not watched (``TORCH_RAGGED_WATCH=0``).
        CopiesLost: no rank has a copy of some shards, and there is no checkpoint.
        Exception: what ``step`` raised, if no rank has died.
    """
    if not dist.is_initialized():
        raise RuntimeError("elastic.run needs a process group: call torch.distributed.init_process_group() first")
    if checkpoints is None and os.environ.get("TORCHELASTIC_RUN_ID"):
        warnings.warn(
            "torchrun ends all ranks when one dies, and then no rank is left to go on: give elastic.run checkpoints=, or start "
            "the ranks by srun or torch.multiprocessing",
            stacklevel=2,
        )
    with before_groups(_CALL):
        training = _Training(step, state, steps, copy_every, distance, checkpoints, save_every, patience, rewound)
    training.go()


class _Position:
    """What belongs to a step beside the model, its optimizers and the objects with a ``state_dict``."""

    def __init__(self, state: checkpoint.TrainState) -> None:
        self._state = state

    @property
    def values(self) -> dict[str, Any]:
        return {name: each for name, each in self._state.extra.items() if not isinstance(each, (Stateful, DTensor))}

    def state_dict(self) -> dict[str, Any]:
        fields = {name: getattr(self._state, name) for name in ("step", "consumed_tokens", "data_position")}
        return {**fields, "extra": self.values, "rank": dist.get_rank(), "rng": rng_states(self._state.rng)}

    def load_state_dict(self, kept: dict[str, Any]) -> None:
        for name in ("step", "consumed_tokens", "data_position"):
            setattr(self._state, name, kept[name])
        for name in self.values.keys() - kept["extra"].keys():  # The step has added it since.
            del self._state.extra[name]
        for name, value in kept["extra"].items():
            self._state.extra[name] = _as_before(self._state.extra.get(name), copy.deepcopy(value))
        if kept["rank"] == dist.get_rank():  # A rank that joins keeps its own.
            set_own_rng(self._state.rng, kept["rng"])


class _Followers(torch.optim.Optimizer):
    """The DTensors of ``extra``, such as an average of the parameters, as states of an optimizer that never steps.

    So they are copied, and move, as all states do. Each has the shape and placements of a parameter, whose state it is.
    """

    def __init__(self, state: checkpoint.TrainState) -> None:
        self._train_state = state
        self._owners: dict[str, int] = {}  # The number of the parameter, by the name in ``extra``.
        groups = [group for each in checked_states(state.model, _CALL) for group in each.groups]
        held = {param.sharded for group in groups for param in group.params}
        named = {name: param for name, param in state.model.named_parameters() if param in held}
        self._names = list(named)
        super().__init__(list(named.values()), {})
        self.find()

    def find(self) -> None:
        """Look what is in ``extra`` now: a step may have replaced it."""
        self.state.clear()
        params: list[Any] = self.param_groups[0]["params"]
        for name, each in self._train_state.extra.items():
            if not isinstance(each, DTensor):
                continue
            kind = each.shape, each.placements, each.device_mesh
            fits = [index for index, param in enumerate(params) if (param.shape, param.placements, param.device_mesh) == kind]
            if not fits:
                raise ValueError(
                    f"TrainState.extra[{name!r}] is a DTensor of shape {tuple(each.shape)} and placements {each.placements}, "
                    "which are those of no parameter of the model: elastic.run moves averages of parameters, and the like"
                )
            # On few ranks, the placements of several parameters are equal: the one of before, or of this name, counts.
            if self._owners.get(name) not in fits:
                self._owners[name] = max(fits, key=lambda index: len(self._names[index]) * name.endswith(self._names[index]))
            self.state[params[self._owners[name]]][name] = each

    def put_back(self) -> None:
        """After a move: put the DTensors of the new mesh into ``extra``, in place of the old ones."""
        extra = self._train_state.extra
        for name in [name for name, each in extra.items() if isinstance(each, DTensor)]:
            del extra[name]
        for states in self.state.values():
            extra.update(states)


def _as_before(own: Any, value: Any) -> Any:
    """``value``, in the object that the program may hold, if it can be written in place."""
    if isinstance(own, torch.Tensor) and isinstance(value, torch.Tensor) and own.shape == value.shape:
        with torch.no_grad():
            return own.copy_(value)
    if isinstance(own, torch.Tensor) and isinstance(value, torch.Tensor):
        return value.to(own.device)
    if isinstance(own, list) and isinstance(value, list):
        own[:] = value
        return own
    if isinstance(own, dict) and isinstance(value, dict):
        for key in own.keys() - value.keys():
            del own[key]
        own.update({key: _as_before(own.get(key), each) for key, each in value.items()})
        return own
    return value


@dataclass
class _Training:
    """One call of :func:`run` on this rank: its arguments, and what ranks have agreed on."""

    step: Callable[[int], Any]
    state: checkpoint.TrainState
    steps: int
    copy_every: int
    distance: int | None
    checkpoints: str | os.PathLike[str] | None
    save_every: int | None
    patience: float | None
    rewound: Callable[[int], Any] | None

    def __post_init__(self) -> None:
        # First: ranks whose arguments are refused count too, or later calls would have other names on them.
        self._number = next(_run_numbers)
        state = self.state
        if not is_watched():
            raise ValueError("elastic.run needs to ask which ranks live: unset TORCH_RAGGED_WATCH=0")
        for name in ("steps", "copy_every", "save_every"):
            value, is_left_out = getattr(self, name), name == "save_every" and self.save_every is None
            if not is_left_out and (not isinstance(value, int) or isinstance(value, bool) or value < (name != "steps")):
                raise ValueError(f"elastic.run takes a number of steps as {name}, got {value!r}")
        if self.save_every is not None and self.checkpoints is None:
            raise ValueError("elastic.run(save_every=) needs checkpoints=, the folder to save to")
        if not isinstance(state, checkpoint.TrainState):
            raise TypeError(f"elastic.run takes a torch_ragged.checkpoint.TrainState, got {type(state).__name__}")
        state.check()
        held = [name for name in ("per_rank", "layouts", "base") if getattr(state, name)]
        values = {f"extra[{name!r}]": value for name, value in state.extra.items()} | {"scheduler": state.scheduler}
        for name, value in values.items():  # Shards of a dead rank would be lost.
            value = value.state_dict() if isinstance(value, Stateful) else value
            tensors = [] if isinstance(value, DTensor) else tensors_in(value)[0]
            held += [f"{name}, which has DTensors"] if any(isinstance(each, DTensor) for each in tensors) else []
        groups = [group for each in checked_states(state.model, _CALL) for group in each.groups]
        if any(isinstance(group.collectives, PieceCollectives) for group in groups) and not any(
            isinstance(value, SameBits) for value in state.extra.values()
        ):
            raise ValueError('the model trains with SameBits, which must go back with it: give TrainState extra={"same": same}')
        if held:
            raise ValueError(f"elastic.run does not copy TrainState.{', '.join(held)}: leave them out, or save checkpoints")
        self._followers = _Followers(state)
        self._optimizers = [*state.optimizers, self._followers]
        scheduler = [] if state.scheduler is None else [state.scheduler]
        objects = [value for value in state.extra.values() if isinstance(value, Stateful)]
        self._stateful = [_Position(state), *scheduler, *objects]
        self._rank = dist.get_rank()
        mesh = mesh_of_states(checked_states(state.model, _CALL), _CALL).mesh
        self._first_mesh = mesh
        self._members: tuple[int, ...] = tuple(mesh.mesh.flatten().tolist())
        self._wanted = len(self._members)
        if self.distance is not None and self.distance not in range(1, self._wanted):
            raise ValueError(f"elastic.run takes a distance of copies from 1 to {self._wanted - 1}, got {self.distance!r}")
        if self.patience is not None and not self.patience > 0:
            raise ValueError(f"elastic.run takes a number of seconds as patience, got {self.patience!r}")
        self._spares = [rank for rank in range(dist.get_world_size()) if rank not in self._members]
        self._device_type = mesh.device_type
        self._group: dist.ProcessGroup | None = None  # Of the members, in go(): a refusal of one rank must not be waited for.
        world = dist.group.WORLD
        assert world is not None
        self._device = device_of_messages(world)
        longest = timeout_of(world, self._device).total_seconds() + _LATEST_REPORT
        self._patience = longest if self.patience is None else self.patience
        self._copies: list[NeighbourCopies] = []  # The last ones, and before them those that count until the last are complete.
        self._failures = 0  # On all ranks alike: they name what ranks agree on.
        self._call = ""  # The last one that this rank, a spare, has heard.
        self._joining: list[int] = []
        self._store = SharedStore(f"elastic/{self._number}")
        announce()  # So that other ranks can ask whether this process lives.

    def go(self) -> None:
        try:
            if self._rank in self._members:
                with agreement(groups_of(self._first_mesh), self._device, _CALL) as claim:
                    names = ("steps", "copy_every", "distance", "checkpoints", "save_every", "patience")
                    claim += [f"{name}={getattr(self, name)}" for name in names]
                    # Values of one rank, such as local shards, would come back on others, or be lost.
                    values = _Position(self.state).values
                    claim += [f"extra[{name!r}]: {value_digest(value)}" for name, value in values.items()]
                    claim.append(f"DTensors of extra: {[each for each in self.state.extra if each not in values]}")
                self._group = group_of(sorted(self._members), f"elastic {self._number}")
                self._load_newest()
            while self.state.step < self.steps:
                if self._group is None:
                    if not self._wait_for_call():
                        return
                    continue
                try:
                    self._train()
                except Exception as error:
                    self._survive(error)
        except BaseException as error:
            with contextlib.suppress(dist.DistError):  # The store is lost: this may be why.
                self._store.set(f"gone {self._rank}", "")
                goes_alone = isinstance(error, (CorruptionFound, LeftBehind)) or not isinstance(error, Exception)
                if self._group is not None and not goes_alone:
                    self._store.set("ended", f"{type(error).__name__}: {error}")
            # SystemExit and the like come on one rank alone: others that wait for it get an error, and find that it is gone.
            for group in self._groups() if not isinstance(error, Exception) else ():
                end_messages(group, self._device)
            raise
        self._store.set("ended", "")

    # -- ranks of the mesh ---------------------------------------------------------------------------------------------

    def _load_newest(self) -> bool:
        """Load the newest checkpoint, if the lowest rank finds one."""
        if self.checkpoints is None:
            return False
        found = [checkpoint.latest(self.checkpoints) is not None]
        dist.broadcast_object_list(found, src=self._members[0], group=self._group, device=self._device)
        if found[0]:
            checkpoint.load(self.checkpoints, self.state, process_group=self._group)
        return found[0]

    def _train(self) -> None:
        if not self._copies:
            self._copy_anew()
        while self.state.step < self.steps:
            number = self.state.step
            self.step(number)
            if self.state.step != number:
                raise RuntimeError(
                    f"step {number} has set TrainState.step to {self.state.step}, which elastic.run counts: leave it as it is"
                )
            self.state.step += 1
            # The last one, too: a rank that dies in a step without communication would not be missed.
            copies = self._copies and (self.state.step % self.copy_every == 0 or self.state.step >= self.steps)
            saves = self.save_every is not None and self.state.step % self.save_every == 0
            for each in self._stateful if copies or saves else ():
                if isinstance(each, SameBits):
                    each.verify()  # A copy of changed memory would bring it back.
            if copies:
                self._followers.find()
                self._copies[-1].update()
            if saves and self.checkpoints is not None:
                checkpoint.save(self.checkpoints, self.state, process_group=self._group)
        if self._copies:
            self._copies[-1].wait()  # A rank that dies now is an error before the program goes on.

    def _groups(self) -> list[dist.ProcessGroup]:
        """The process groups in which other ranks may wait for this one."""
        found = {group for copies in self._copies for group in copies.groups} | {self._group}
        return [group for group in found if group is not None]

    def _copy_anew(self) -> None:
        """Make copies of the model on its present mesh. The last ones count until these are complete on all ranks."""
        if len(self._members) == 1:
            self._copies.clear()
            _logger.warning("rank %d is alone: it has no copy, and its death ends the run", self._rank)
            return
        begun = time.monotonic()
        # On fewer ranks, the distance may be too large: then the default one.
        present = mesh_of_states(checked_states(self.state.model, _CALL), _CALL).mesh
        distance = self.distance if self.distance in range(1, len(self._members)) and present.ndim == 1 else None
        self._followers.find()
        made = NeighbourCopies(self.state.model, self._optimizers, distance=distance, stateful=self._stateful)
        self._copies.append(made)
        made.update()
        made.wait()
        del self._copies[:-1]
        text = "copies of %d ranks' shards: %.1f MB on this rank, made in %.2f s, after every %d steps"
        _logger.info(text, len(self._members), made.nbytes / 1e6, time.monotonic() - begun, self.copy_every)

    def _survive(self, error: Exception) -> None:
        """Go on after ``error``, on the ranks that are left. Raise it if no rank has died, or if this rank is corrupt."""
        if isinstance(error, CorruptionFound):  # Its shards must not count: the others take the copies that they keep.
            raise error
        begun, before, members = time.monotonic(), self.state.step, self._members
        while True:
            left = agree_on_survivors(
                self._members,
                f"elastic/{self._number}/failure {self._failures}",
                self._groups(),
                self._device,
                self._patience,
                lambda rank: self._store.has(f"gone {rank}"),
            )
            # After the agreement, through which all ranks that live have gone: so the next one has one name on all of them.
            self._failures += 1
            # All ranks live: it is an error of the program, on one rank at least, and would come again.
            if len(left) == len(self._members) and not self._joining:
                raise error
            try:
                self._go_on(left)
                break
            except CopiesLost:
                raise
            except Exception as another:  # One more rank has died, or a spare that was joining. Old copies are still there.
                error = another
        dead = sorted(set(members) - set(self._members))
        text = "ranks %s have died, or left, in step %d: ranks %s go on with step %d, after %.1f s"
        _logger.warning(text, dead, before, list(self._members), self.state.step, time.monotonic() - begun)
        _logger.debug("they died here:", exc_info=error)
        if self.rewound is not None:
            self.rewound(self.state.step)

    def _go_on(self, left: Sequence[int]) -> None:
        """The state of the last copy, on a mesh of the ranks that are left, and of spares."""
        # A spare that could not join, because another rank died, waits for the next call.
        self._spares = sorted({*self._spares, *(rank for rank in self._joining if rank not in left)})
        self._members, self._joining = tuple(sorted(left)), []
        # Named by the failure, and not by a count of groups, of which ranks may have made different numbers.
        self._group = group = group_of(self._members, f"elastic {self._number}, failure {self._failures}")
        model = self.state.model
        present = mesh_of_states(checked_states(model, _CALL, runs=True), _CALL).mesh.mesh.flatten().tolist()
        # Or this rank was alone, and a spare has died that would have joined.
        if present != list(self._members) or self._copies:
            mesh = self._mesh_of(self._members, group, f"failure {self._failures}")
            # The newest copies that all ranks have. A rank has dropped older ones only if the newer are complete on all ranks.
            complete: list[Any] = [None] * len(left)
            dist.all_gather_object(complete, [copies.has_copy for copies in self._copies], group=self._group)
            try:
                if not all(map(any, complete)):
                    raise CopiesLost("a rank has died before the first copy was complete: start again")
                copies = self._copies[-1 if all(has[-1] for has in complete) else 0]
                copies.recover(mesh, group=self._group)
                self._followers.put_back()
                del self._copies[self._copies.index(copies) + 1 :]
            except CopiesLost as lost:
                if self.checkpoints is None:
                    raise
                move_empty(model, self._optimizers, mesh)
                self._followers.put_back()
                if not self._load_newest():
                    raise CopiesLost(f"{lost}; {self.checkpoints} has no checkpoint") from None
        for each in self._stateful:
            if isinstance(each, torch.amp.GradScaler):
                each._per_optimizer_states.clear()  # The step that did not end may have unscaled gradients.
        self._copy_anew()  # Before spares are called: a death while they join must not meet ranks without copies.
        self._invite()

    def _mesh_of(self, members: Sequence[int], group: dist.ProcessGroup, event: str) -> DeviceMesh:
        """The mesh of these ranks: of whole replicas, if the first one had replicas and these are enough; otherwise 1-D."""
        shards = self._first_mesh.size(-1)
        if self._first_mesh.ndim == 1 or len(members) % shards or len(members) == shards:
            return DeviceMesh.from_group(group, self._device_type)
        table = torch.tensor(sorted(members), device="cpu").view(-1, shards)
        replica, shard = divmod(sorted(members).index(self._rank), shards)
        name = f"elastic {self._number}, {event}"
        groups = [
            group_of(ranks.tolist(), f"{name}, {each}")
            for ranks, each in ((table[:, shard], f"shard {shard}"), (table[replica], f"replica {replica}"))
        ]
        names = self._first_mesh.mesh_dim_names
        return DeviceMesh.from_group(groups, self._device_type, table, mesh_dim_names=names)

    def _invite(self) -> None:
        """Let spares take the place of ranks that died."""
        if not self._spares or len(self._members) >= self._wanted:
            return
        fates = fates_of(self._spares)
        alive = [rank for rank, fate in fates.items() if fate.is_alive and not self._store.has(f"gone {rank}")]
        joining = alive[: self._wanted - len(self._members)]
        chosen = {"left": self._members, "joining": joining, "failures": self._failures}
        # The first to be done decides for all: ranks may have seen different spares alive.
        key = f"call {self._failures}"
        call = json.loads(self._store.first(key, json.dumps(chosen)))
        self._store.set("call", key)  # Spares do not know the number of failures: they look here.
        self._join(call)

    def _join(self, call: dict[str, Any]) -> None:
        """The ranks that are left, and those that join, put the model on one mesh."""
        left, self._joining = call["left"], call["joining"]
        self._spares = [rank for rank in self._spares if rank not in self._joining]
        if not self._joining:
            return
        members = sorted(left + self._joining)
        group = group_of(members, f"elastic {self._number}, call {call['failures']}")
        mesh = self._mesh_of(members, group, f"call {call['failures']}")
        # The model of a spare knows the first mesh, with ranks that have died: ``left`` says who has shards.
        reshard_to(self.state.model, self._optimizers, mesh, group=group, stateful=self._stateful, left=left)
        self._followers.put_back()
        # Only now: if it raises, the ranks that are left are still the members, and the spare is none.
        self._members, self._group = tuple(members), group
        self._copy_anew()
        self._joining = []

    # -- spares --------------------------------------------------------------------------------------------------------

    def _wait_for_call(self) -> bool:
        """Whether this rank is in the mesh now; False if the run has ended."""
        looked = time.monotonic()
        while not self._store.has("call") or self._store.get("call") == self._call:
            if self._store.has("ended"):
                if text := self._store.get("ended"):
                    raise RuntimeError(f"elastic.run has failed on the ranks of the mesh: {text}")
                return False
            if time.monotonic() - looked > _SPARE_PROBE:
                fates = fates_of(self._members)
                if not any(fate.is_alive and not self._store.has(f"gone {rank}") for rank, fate in fates.items()):
                    raise RuntimeError(f"all ranks of the mesh, {list(self._members)}, have ended: nothing is left to join")
                looked = time.monotonic()
            time.sleep(_LOOK)
        self._call = self._store.get("call")
        call = json.loads(self._store.get(self._call))
        # The next failure has one name on all ranks.
        self._members, self._failures = tuple(call["left"]), call["failures"]
        if self._rank not in call["joining"]:
            self._spares = [rank for rank in self._spares if rank not in call["joining"]]
            self._members = tuple(sorted(call["left"] + call["joining"]))
            return True
        try:
            self._join(call)
        except Exception as error:
            if self._group is not None:
                raise
            # A rank of the mesh has died meanwhile. This one has no shards yet: the others may call it again.
            _logger.warning("rank %d could not join ranks %s, and waits for another call: %s", self._rank, call["left"], error)
            return True
        if self.rewound is not None:
            self.rewound(self.state.step)
        return True
