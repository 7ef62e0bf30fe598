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
from torch_ragged.fsdp.tools._replay import highest_moment

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

    The prediction runs one step of the groups' own code on the meta device, with stand-ins for computation and collectives, in
    the order of the last forward (before the first: of ``named_modules``). It is exact if all of this holds; otherwise it is a
    bound, too high by less than the gradient buffers of modules around others:

    - ``.grad`` is None when the step begins (``zero_grad()``), and one backward follows one forward;
    - modules around others use parameters after them, as a model its head: their gradients come first in backward;
    - all gradients have the parameters' dtype;
    - the inputs of every group but the root's need gradients, and no activation checkpointing runs calls again;
    - the optimizer has its state: before its first step there is none, and none is predicted.

    Over gloo a reduce-scatter holds a second buffer, of its input's size at most: it is counted with the gradients. Buffers of
    ``HIERARCHICAL`` between its two reductions, and of tensor types with their own all-gather, are not counted. Activations,
    parameters in no group and what the optimizer holds during its step are not in the report.

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
    moment, predicted = highest_moment(states, _forward_order(list(states.values())))
    peak = MemoryRow(moment, sharded=total.sharded, optimizer=total.optimizer, **predicted)
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


def _forward_order(states: list[FSDPState]) -> list[FSDPState]:
    """The calls of the last forward that is known whole; before the first, every module once."""
    contexts = {id(state.context): state.context for state in states}.values()
    calls = max((order for c in contexts for order in (c.order.states, c.last_order.states)), key=len, default=[])
    mine = set(map(id, states))
    return [state for state in calls if id(state) in mine] or states
