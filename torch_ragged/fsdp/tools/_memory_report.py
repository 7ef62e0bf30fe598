"""memory_report: the memory of a model's groups now, and their predicted peak in a training step.

It must not communicate, and must not allocate memory on the model's device.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass
from typing import Any, Union

import torch
from torch import nn
from torch.optim import Optimizer

from torch_ragged.fsdp._groups import module_states, named_groups
from torch_ragged.fsdp.core._fsdp_param import local_of
from torch_ragged.fsdp.core._fsdp_param_group import FSDPParamGroup
from torch_ragged.fsdp.core._fsdp_state import FSDPState
from torch_ragged.fsdp.files._scratch_file import MAPPED_IN_MEMORY
from torch_ragged.fsdp.grads._fsdp_grad import FSDPGrad
from torch_ragged.fsdp.tools._replay import Replay

__all__ = ["MemoryReport", "MemoryRow", "memory_report", "optimizers_or_makers", "transient_nbytes"]

OptimizerLike = Union[Optimizer, Callable[[list[torch.Tensor]], Optimizer]]
"""An optimizer, or a class or function that makes one of a list of parameters."""

# In the order of the attributes of MemoryRow.
_COLUMNS: tuple[str, ...] = ("group", "sharded params", "gathered params", "unreduced grads", ".grad", "optimizer states")
_COLUMNS += ("states in host memory", "total")
_HOST = 6  # The column of states in host memory: left out if there are none.


@dataclass(frozen=True)
class MemoryRow:
    """Bytes on this rank, padding included.

    Attributes:
        name: the name of the group; ``"total"`` or the name of the peak in the other rows.
        sharded: the shards; the parameters are views of them.
        gathered: gathered parameters.
        gradients: gradients that are not reduced yet, in a buffer as large as the gathered parameters.
        grad: the memory of the parameters' ``.grad``, and reduced shards that become ``.grad``.
        optimizer: the optimizer's state for the parameters, on the device.
        host: the state that an :func:`offloaded` optimizer keeps in host memory, and its windows of files. If parameters lie in
            files, also what of them is in memory at most. Not in ``total``.
    """

    name: str
    sharded: int = 0
    gathered: int = 0
    gradients: int = 0
    grad: int = 0
    optimizer: int = 0
    host: int = 0

    @property
    def total(self) -> int:
        """The sum of all columns but ``host``."""
        return self.sharded + self.gathered + self.gradients + self.grad + self.optimizer


@dataclass(frozen=True)
class MemoryReport:
    """The result of :func:`memory_report`; ``str()`` makes a table of it.

    Attributes:
        groups: the memory of each group now, in the order of ``named_modules``.
        total: the sum of ``groups``.
        peak: the predicted memory at the peak of a training step. Its name is the moment, such as "backward of blocks.0".
        notes: what is predicted of optimizers that have no states yet, a line each.
    """

    groups: tuple[MemoryRow, ...]
    total: MemoryRow
    peak: MemoryRow
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        rows = [*self.groups, self.total, self.peak]
        names = [row.name for row in rows[:-1]] + [f"peak: {self.peak.name}"]
        cells = [(name, *map(_human, (*astuple(row)[1:], row.total))) for name, row in zip(names, rows)]
        header = _COLUMNS
        if not any(row.host for row in rows):
            header, *cells = [line[:_HOST] + line[_HOST + 1 :] for line in (header, *cells)]
        widths = [max(map(len, column)) for column in zip(header, *cells)]
        lines = [
            "  ".join([line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:]))])
            for line in (header, *cells)
        ]
        return "\n".join([*lines, *self.notes])


def memory_report(model: nn.Module, optimizer: OptimizerLike | Iterable[OptimizerLike] | None = None) -> MemoryReport:
    """The memory of each group under ``model`` now, and the predicted peak of one training step, on this rank.

    It does not communicate. The prediction runs one step of the groups' own code on the meta device, with stand-ins for
    computation and collectives, in the order of the last forward, or of ``named_modules``. A step is one forward and one
    backward. If ``set_requires_gradient_sync(False)`` was called before (or ``set_is_last_backward(False)`` with ``ZERO1``, or
    ``set_requires_all_reduce(False)``), it is several, of which the last one reduces: a gradient accumulation. With
    ``SameBits``, it is one for each of its rounds, and its sums of pieces count as ``gradients``.

    The prediction is exact if all of these conditions hold:

    - ``.grad`` is None when the step begins (``zero_grad()``), and one backward follows each forward;
    - the inputs of all groups except the root's need gradients;
    - all gradients have the parameters' dtype;
    - a module that contains sharded modules uses its own parameters after them, as a model uses its head;
    - activation checkpointing runs no call again, and gradient sync is on or off for all modules;
    - all parameters get gradients, or the optimizer has its states.

    If one of the first three does not hold, a step may hold more; if one of the others does not, less. Over gloo, a
    reduce-scatter holds a second buffer, at most as large as its input, which counts as ``gradients``. The report does not
    count the buffers between the two reductions of ``HIERARCHICAL``, buffers of tensor types with their own all-gather,
    activations, parameters in no group, and memory that the optimizer allocates during its step only.

    Args:
        model: a module on which ``fully_shard`` was called, or a module that contains such modules.
        optimizer: one or several optimizers, whose states are counted. Before its first step, an optimizer has no states: the
            peak then has the states that this step will make, and a note says so. In place of an optimizer, give its class, or
            a function that returns one of the list of parameters that need gradients:
            ``functools.partial(torch.optim.SGD, momentum=0.9)``.

    Raises:
        ValueError: ``fully_shard`` was called on no module of ``model``.
        TypeError: ``optimizer`` is no optimizer, and makes none.
    """
    states = module_states(model)
    held: dict[int, int] = {}  # By the parameter's id, on the device.
    hosted: dict[int, int] = {}  # In host memory.
    windows, first = 0, []
    for each in optimizers_or_makers(optimizer, "memory_report"):
        one = each if isinstance(each, Optimizer) else each([param for param in model.parameters() if param.requires_grad])
        if not isinstance(one, Optimizer):
            raise TypeError(
                f"memory_report got {each!r} as optimizer, which returned {type(one).__name__}: give a torch.optim.Optimizer, "
                "its class, or a function of a list of parameters that returns one"
            )
        if not one.state:
            first.append(_first_states(one))
        if hasattr(one, "tier_nbytes"):  # Of fsdp.offload: reading ``state`` would copy it.
            on_device, in_host = one.state_nbytes()  # type: ignore[attr-defined]
            held |= on_device
            hosted |= in_host
            windows += one.tier_nbytes()["windows"]
        else:
            held |= {id(param): _local_nbytes(state.values()) for param, state in one.state.items()}
    groups = named_groups(model)
    rows = [_row_of(name, group, held, hosted) for name, group in groups.items()]
    total = MemoryRow("total", *(sum(column) for column in list(zip(*map(astuple, rows)))[1:]))
    mapped = sorted((group.shards.file_nbytes for group in groups.values()), reverse=True)
    total = dataclasses.replace(total, host=total.host + windows + sum(mapped[:MAPPED_IN_MEMORY]))
    moment, predicted = Replay(states).play(_forward_order(list(states.values())))
    optimizer_nbytes = total.optimizer + sum(nbytes for nbytes, _ in first)
    peak = MemoryRow(moment, sharded=total.sharded, optimizer=optimizer_nbytes, host=total.host, **predicted)
    return MemoryReport(tuple(rows), total, peak, tuple(note for _, note in first))


def _first_states(optimizer: Optimizer) -> tuple[int, str]:
    """The bytes of the states that the first step makes, if all parameters have gradients, and a note.

    An optimizer says it by a method ``first_state_nbytes(param, group)``, as those of ``torch_ragged.optim`` do. Otherwise, a
    twin of the optimizer makes a step on meta tensors of the local shapes.
    """
    name = type(optimizer).__name__
    pairs = [(param, group) for group in optimizer.param_groups for param in group["params"] if param.requires_grad]
    try:
        if hasattr(optimizer, "first_state_nbytes"):
            nbytes = sum(optimizer.first_state_nbytes(param, group) for param, group in pairs)
        else:
            twin = _twin(optimizer)
            with torch.no_grad():
                inspect.unwrap(type(optimizer).step)(twin)
            nbytes = sum(_local_nbytes(state.values()) for state in twin.state.values())
    except Exception as error:  # Any code of the optimizer: it may need values, which meta tensors do not have.
        why = (str(error).splitlines() or [type(error).__name__])[0]
        return 0, f"{name} has no states yet. Those of its first step cannot be predicted, and are not in the peak: {why}"
    return nbytes, f"{name} has no states yet. The peak has the {_human(nbytes)} that its first step will make."


def transient_nbytes(group: FSDPParamGroup) -> int:
    """The bytes of a group's gathered parameters, and of its gradients that are not reduced yet, now."""
    buffers = group.buffers()
    return sum(buffer.resident_nbytes for kind in ("gathered", "gradients") for buffer in buffers[kind]) + group.kept_nbytes


def _row_of(name: str, group: FSDPParamGroup, held: dict[int, int], hosted: dict[int, int]) -> MemoryRow:
    resident = {kind: sum(b.resident_nbytes for b in buffers) for kind, buffers in group.buffers().items()}
    grads = {}  # By storage: gradients are views of one buffer, unless the user has set them.
    for param in group.params:
        grad = param.sharded.grad
        grad = grad.reduced if isinstance(grad, FSDPGrad) else grad
        if grad is not None:
            storage = local_of(grad).untyped_storage()
            grads[storage.data_ptr()] = storage.nbytes()
    return MemoryRow(
        name,
        sharded=resident["sharded"] - group.shards.file_nbytes,
        gathered=resident["gathered"] + group.kept_nbytes,
        gradients=resident["gradients"],
        grad=resident["reduced"] + sum(grads.values()),
        optimizer=sum(held.get(id(param.sharded), 0) for param in group.params),
        host=sum(hosted.get(id(param.sharded), 0) for param in group.params),
    )


def _human(nbytes: int) -> str:
    power = min(int(math.log(max(nbytes, 1), 1024)), 4)
    return f"{nbytes} B" if power == 0 else f"{nbytes / 1024**power:.2f} {'KMGT'[power - 1]}iB"


def _forward_order(states: list[FSDPState]) -> list[FSDPState]:
    """The calls of the last complete forward of each root; of a root without one, every module once."""
    order: list[FSDPState] = []
    for context in dict.fromkeys(state.context for state in states):
        calls: list[Any] = max((context.order.states, context.last_order.states), key=len)
        known = [state for state in calls if state in states]
        order += known or [state for state in states if state.context is context for _ in state.modules]
    return order


# -- optimizers ----------------------------------------------------------------------------------------------------------


def optimizers_or_makers(optimizer: Any, call: str) -> list[Any]:
    """One optimizer, several or None, as a list. ``call`` is the name of the function that got it, for the error."""
    if optimizer is None:
        return []
    is_one = isinstance(optimizer, (Optimizer, str, bytes)) or callable(optimizer) or not isinstance(optimizer, Iterable)
    several = [optimizer] if is_one else list(optimizer)
    for each in several:
        if not (isinstance(each, Optimizer) or callable(each)):
            raise TypeError(
                f"{call} got {each!r} as optimizer: give a torch.optim.Optimizer, such as "
                "torch.optim.AdamW(model.parameters()), or several of them. memory_report also takes its class, or a function "
                "of a list of parameters that returns one"
            )
    return several


def _twin(optimizer: Optimizer) -> Any:
    """The optimizer with meta tensors as parameters and gradients, without hooks. Its step changes nothing of the optimizer."""
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.state, twin.param_groups = defaultdict(dict), []
    for group in optimizer.param_groups:
        # Fused kernels, and those for graphs, take no meta tensors. They have the same states.
        options = group | {key: False for key in ("fused", "capturable") if key in group}
        if isinstance(options.get("lr"), torch.Tensor):
            options["lr"] = 0.0
        params = [torch.nn.Parameter(local_of(param).detach().to("meta")) for param in group["params"] if param.requires_grad]
        for param in params:
            param.grad = torch.empty_like(param)
        twin.param_groups.append({**options, "params": params})
    return twin


def _local_nbytes(values: Iterable[Any]) -> int:
    return sum(local_of(value).nbytes for value in values if isinstance(value, torch.Tensor))
