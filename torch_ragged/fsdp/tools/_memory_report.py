"""memory_report: what the groups of a model hold now, and the most that they will hold in a training step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torch_ragged.fsdp._fully_shard import module_states, named_groups
from torch_ragged.fsdp.core._fsdp_param_group import FSDPParamGroup
from torch_ragged.fsdp.core._fsdp_state import FSDPState

__all__ = ["MemoryReport", "MemoryRow", "memory_report", "optimizers_of", "transient_nbytes"]


@dataclass(frozen=True)
class MemoryRow:
    """Bytes on this rank, padding included.

    Attributes:
        name: of the group; or what the row is.
        sharded: the shards that the parameters are views of.
        gathered: gathered parameters.
        gradients: gradients not reduced yet, a buffer of the size of the gathered parameters.
        grad: what ``.grad`` of the parameters lies in, and reduced shards on their way there.
        optimizer: the optimizer's state for the parameters.
    """

    name: str
    sharded: int = 0
    gathered: int = 0
    gradients: int = 0
    grad: int = 0
    optimizer: int = 0

    @property
    def total(self) -> int:
        return self.sharded + self.gathered + self.gradients + self.grad + self.optimizer


@dataclass(frozen=True)
class MemoryReport:
    """What :func:`memory_report` found; ``str()`` of it is a table.

    Attributes:
        groups: what each group holds now, in the order of ``named_modules``.
        total: the sum of ``groups``.
        peak: the highest moment of a training step, as predicted, named after it ("backward of blocks.0").
    """

    groups: tuple[MemoryRow, ...]
    total: MemoryRow
    peak: MemoryRow

    def __str__(self) -> str:
        header = (*(field.name for field in fields(MemoryRow)), "total")
        rows = [*self.groups, self.total, self.peak]
        names = [row.name for row in rows[:-1]] + [f"peak: {self.peak.name}"]
        cells = [(name, *map(_human, (*astuple(row)[1:], row.total))) for name, row in zip(names, rows)]
        widths = [max(map(len, column)) for column in zip(("group", *header[1:]), *cells)]
        lines = [
            "  ".join([line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:]))])
            for line in (("group", *header[1:]), *cells)
        ]
        return "\n".join(lines)


def memory_report(model: nn.Module, optimizer: Optimizer | Iterable[Optimizer] | None = None) -> MemoryReport:
    """What each group under ``model`` holds now, and the peak of one training step. No communication; per rank.

    The prediction plays a step of forward and backward with the groups' sizes, in the order of the last forward (before
    the first: of ``named_modules``): one group is gathered ahead, one reduction is in flight while the next gradients
    are computed, what is not resharded stays. It is exact, or an upper bound by less than the gradient buffers of modules
    around others, which it takes to be there from the start of their backward, where all of this holds:

    - ``.grad`` is None when the step begins (``zero_grad()``), and one backward follows one forward;
    - every unit has one group (where it has several, some percent too high were seen);
    - modules called several times have matmuls for weights, which write gradients from the first call on;
    - the inputs of every group but the root's need gradients; else a group stays gathered to the end of backward;
    - nothing stays gathered between steps (as with ``ZERO1``, ``ZERO2`` and ``HIERARCHICAL``), and no parameter is placed as
      ``Shard(d)`` with d > 0, which is there twice for the moment of its copy: for these the peak is too low;
    - the optimizer has its state: before its first step there is none, and none is predicted;
    - the backend reduces without memory of its own, as NCCL does. Over gloo a reduction is finished before the next gradients
      have a buffer, and holds, in place of that, what it receives: as much as its own. What that is more is not predicted.

    Activations, parameters in no group and what the optimizer holds during its step are not in it.

    Args:
        model: a module that ``fully_shard`` was called on, or that holds such modules.
        optimizer: one or several, whose state is to be counted.

    Raises:
        ValueError: ``fully_shard`` was called on no module of ``model``.
    """
    states = module_states(model)
    held = _optimizer_nbytes(optimizers_of(optimizer))
    groups = []
    for name, group in named_groups(model).items():
        groups.append(_row_of(name, group, held))
    total = MemoryRow("total", *(sum(column) for column in list(zip(*map(astuple, groups)))[1:]))
    peak = _Step(states, sharded=total.sharded, optimizer=total.optimizer).play()
    return MemoryReport(tuple(groups), total, peak)


def optimizers_of(optimizer: Optimizer | Iterable[Optimizer] | None) -> list[Optimizer]:
    """One, several or none, as a list."""
    if optimizer is None:
        return []
    return [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)


def transient_nbytes(group: FSDPParamGroup) -> int:
    """Bytes that a group's gathered parameters and gradients not reduced yet hold now."""
    buffers = group.buffers()
    return sum(buffer.resident_nbytes for kind in ("gathered", "gradients") for buffer in buffers[kind]) + group.kept_nbytes


def _row_of(name: str, group: FSDPParamGroup, held: dict[int, int]) -> MemoryRow:
    resident = {kind: sum(b.resident_nbytes for b in buffers) for kind, buffers in group.buffers().items()}
    grads = {}  # All are views of one buffer, unless the user has set them.
    for param in group.params:
        if param.sharded.grad is not None:
            storage = _local(param.sharded.grad).untyped_storage()
            grads[storage.data_ptr()] = storage.nbytes()
    return MemoryRow(
        name,
        sharded=resident["sharded"],
        gathered=resident["gathered"] + group.kept_nbytes,
        gradients=resident["gradients"],
        grad=resident["reduced"] + sum(grads.values()),
        optimizer=sum(held.get(id(param.sharded), 0) for param in group.params),
    )


def _optimizer_nbytes(optimizers: list[Optimizer]) -> dict[int, int]:
    """Bytes of the state of each parameter, by its ``id``."""
    return {
        id(param): sum(_local(value).nbytes for value in state.values() if isinstance(value, torch.Tensor))
        for optimizer in optimizers
        for param, state in optimizer.state.items()
    }


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _human(nbytes: int) -> str:
    power = min(int(math.log(max(nbytes, 1), 1024)), 4)
    return f"{nbytes} B" if power == 0 else f"{nbytes / 1024**power:.2f} {'KMGT'[power - 1]}iB"


class _Step:
    """A training step played on byte counts: what ``FSDPState`` does to the buffers of its group, in the same order."""

    def __init__(self, states: dict[str, FSDPState], sharded: int, optimizer: int) -> None:
        self._groups = [group for state in states.values() for group in state.groups]
        self._names = {id(state): name for name, state in states.items()}
        self._order = _forward_order(list(states.values()))
        self._inside = {id(s): {id(child) for module in s.modules for child in module.modules()} for s in self._order}
        self._fixed = {"sharded": sharded, "optimizer": optimizer}
        self._gathered: dict[FSDPParamGroup, int] = {}
        self._gradients: dict[FSDPParamGroup, int] = {}
        self._reduced: dict[FSDPParamGroup, int] = {}
        self._reducing: list[FSDPState] = []
        self._peak = MemoryRow("before forward", **self._fixed)

    def play(self) -> MemoryRow:
        """The highest moment of a forward and a backward."""
        is_around: list[int] = []  # positions of the calls that are in their forward
        children: dict[int, list[int]] = {-1: []}
        for position, state in enumerate(self._order):
            while is_around and not self._is_inside(state, self._order[is_around[-1]]):
                self._leave_forward(is_around.pop())
            children[is_around[-1] if is_around else -1].append(position)
            children[position] = []
            self._gather(position, step=1)
            self._note("forward", position)
            is_around.append(position)
        for position in reversed(is_around):
            self._leave_forward(position)
        for position in reversed(children[-1]):
            self._backward(position, children)
        self._set_gradients()
        return self._peak

    def _is_inside(self, state: FSDPState, other: FSDPState) -> bool:
        return state is not other and id(state.modules[0]) in self._inside[id(other)]

    def _gather(self, position: int, step: int) -> None:
        """Gather a group, and the chosen ones, or the next one in the direction of ``step``."""
        state = self._order[position]
        chosen = state.forward_prefetch if step > 0 else state.backward_prefetch
        if chosen is None:
            ahead = position + step
            while 0 <= ahead < len(self._order) and self._is_passed_over(self._order[ahead], state):
                ahead += step
            chosen = [self._order[ahead]] if 0 <= ahead < len(self._order) else []
        if state.groups and (step > 0 or state.unshard_in_backward):
            for group in state.groups:
                self._issue_all_gather(group)
            for group in state.groups:
                self._decode(group, "forward" if step > 0 else "backward", position)
            for group in (group for each in chosen for group in each.groups):
                self._issue_all_gather(group)

    def _issue_all_gather(self, group: FSDPParamGroup) -> None:
        held, whole = self._gathered.get(group, 0), group.unsharded.nbytes
        if held < whole and held != group.gathering_nbytes:
            # What a rank keeps of a group is there until the others' parts are.
            self._gathered[group] = whole + held if held else group.gathering_nbytes

    def _decode(self, group: FSDPParamGroup, moment: str, position: int) -> None:
        """What is gathered in another form is there in both for a moment."""
        if self._gathered[group] == group.gathering_nbytes != group.unsharded.nbytes:
            self._gathered[group] += group.unsharded.nbytes
            self._note(moment, position)
            self._gathered[group] = group.unsharded.nbytes

    def _is_passed_over(self, neighbour: FSDPState, state: FSDPState) -> bool:
        """Whether prefetching looks beyond ``neighbour``: nothing is gathered for it, or it shares what ``state`` has."""
        return not neighbour.groups or (neighbour is state and len(state.modules) > 1)

    def _leave_forward(self, position: int) -> None:
        state = self._order[position]
        stays = position == 0 if state.reshard_after_forward is None else not state.reshard_after_forward
        runs_again = len(state.modules) > 1 and state in self._order[position + 1 :]
        for group in [] if stays or runs_again else state.groups:
            self._gathered[group] = 0 if group.neighbours is None else group.unsharded.nbytes // group.neighbours.size

    def _backward(self, position: int, children: dict[int, list[int]]) -> None:
        state = self._order[position]
        self._gather(position, step=-1)
        is_last_call = state not in self._order[:position]
        trainable = [group for group in state.groups if group.is_trainable]
        for group in trainable:
            if is_last_call or group.writes_gradients:  # Otherwise autograd sums the gradients of all calls first.
                self._gradients[group] = group.layout.numel * group.gradients.dtype.itemsize
        self._note("backward", position)
        for child in reversed(children[position]):
            self._backward(child, children)
        if state.reshard_after_backward and (is_last_call or len(state.modules) == 1):
            for group in state.groups:
                self._gathered.pop(group, None)
        if is_last_call and trainable:
            if state.requires_gradient_sync:
                self._reduce(state, trainable, position)
            else:
                self._widen(trainable, position)
            self._note("backward", position)

    def _widen(self, trainable: list[FSDPParamGroup], position: int) -> None:
        """Cast gradients to the wider dtype in which they are reduced: both buffers are there for a moment."""
        for group in trainable:
            if group.gradients.dtype != group.reduce_dtype:
                widened = group.layout.numel * group.reduce_dtype.itemsize
                self._gradients[group] += widened
                self._note("backward", position)
                self._gradients[group] = widened

    def _reduce(self, state: FSDPState, trainable: list[FSDPParamGroup], position: int) -> None:
        """Issue a reduction; first finish the oldest ones, so that at most ``max_reductions`` are in flight."""
        while len(self._reducing) >= state.max_reductions:
            for group in self._reducing.pop(0).groups:
                self._gradients.pop(group, None)
        self._reducing.append(state)
        self._widen([group for group in trainable if not group.reduces_narrow], position)
        for group in trainable:
            self._reduced[group] = group.layout.shard_numel * group.reduce_dtype.itemsize

    def _set_gradients(self) -> None:
        """The end of backward: reduced shards become ``.grad``, by way of a cast where the dtypes differ."""
        for group in [group for group in self._groups if group in self._reduced]:
            self._gradients.pop(group, None)
            shard = group.layout.shard_numel * group.orig_dtype.itemsize
            if group.reduce_dtype != group.orig_dtype:
                self._reduced[group] += shard
                self._note("end of backward")
            self._reduced[group] = shard
        self._gathered.clear()

    def _note(self, moment: str, position: int | None = None) -> None:
        name = moment if position is None else f"{moment} of {self._names[id(self._order[position])]}"
        held = {"gathered": self._gathered, "gradients": self._gradients, "grad": self._reduced}
        row = MemoryRow(name, **self._fixed, **{kind: sum(sizes.values()) for kind, sizes in held.items()})
        if row.total > self._peak.total:
            self._peak = row


def _forward_order(states: list[FSDPState]) -> list[FSDPState]:
    """The calls of the last forward that is known whole; before the first, every module once."""
    contexts = {id(state.context): state.context for state in states}.values()
    calls = max((order for c in contexts for order in (c.order.states, c.last_order.states)), key=len, default=[])
    mine = set(map(id, states))
    return [state for state in calls if id(state) in mine] or states
