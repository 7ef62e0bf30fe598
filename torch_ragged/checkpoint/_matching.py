"""Check that a checkpoint fits a model: names, shapes and dtypes. Guesses renamed parameters for the error text.

Nothing here changes a tensor: the comparison uses records of tensors only.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan

from torch_ragged.checkpoint._data import ObjectPlanner
from torch_ragged.checkpoint._errors import CheckpointError, listed
from torch_ragged.checkpoint._manifest import Manifest, TensorRecord, describe
from torch_ragged.checkpoint._replicas import ReplicaShares
from torch_ragged.checkpoint._state import GROUPS

__all__ = ["CheckingPlanner", "differences"]

# At most so many renamed parameters are guessed, each among so many names: comparing all names of a large model takes minutes.
_GUESSES, _CANDIDATES = 5, 1000
_OPTIMIZER = "optimizer."  # How the names of states and options of optimizers begin.
_STATE_PREFIX = f"{_OPTIMIZER}state."


class CheckingPlanner(ObjectPlanner):
    """DCP's load planner, which first compares the tensors to fill with the manifest. If it raises, DCP raises on all ranks.

    Args:
        manifest: the manifest of the checkpoint.
        spread: whether each replica reads a share. If True, call ``shares.exchange()`` after the load: until then, tensors that
            another replica reads for this rank are not filled.
        trust: whether objects may be unpickled that are more than data.
        has_optimizer: whether an optimizer is loaded. One that keeps no states has no tensor to fill.

    Attributes:
        left_out: the model's tensors that are not filled because the checkpoint leaves them out. They are compared, too.
    """

    def __init__(self, manifest: Manifest, spread: bool = False, trust: bool = False, has_optimizer: bool = False) -> None:
        super().__init__(trust)
        self.manifest, self.spread, self.has_optimizer = manifest, spread, has_optimizer
        self.left_out: dict[str, TensorRecord] = {}

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Compare the tensors of ``state_dict`` with the manifest. Changes no tensor.

        Raises:
            CheckpointError: the checkpoint is of another model or another optimizer.
        """
        super().set_up_planner(state_dict, metadata, is_coordinator)
        self.wanted = {name: describe(value) for name, value in self.state_dict.items() if isinstance(value, torch.Tensor)}
        problems = differences({**self.wanted, **self.left_out}, {**self.manifest.tensors, **self.manifest.frozen})
        # DCP would raise later, with a traceback of each rank.
        missing = [] if metadata is None else [name for name in self.state_dict if name not in metadata.state_dict_metadata]
        problems += [f"{name} is not in the checkpoint" for name in missing if name not in self.wanted]
        has_none = self.has_optimizer and not any(name.startswith(_STATE_PREFIX) for name in self.state_dict)
        if has_none or any(problem.startswith(_OPTIMIZER) for problem in problems):
            problems = _of_another_optimizer(self.state_dict, self.manifest.tensors) + problems
        if problems:
            raise CheckpointError(f"the checkpoint does not fit this model and optimizer:{listed(problems)}")

    def create_local_plan(self) -> LoadPlan:
        """The plan of this rank, without the tensors that another replica reads for it."""
        self.shares = ReplicaShares({n: value for n, value in self.state_dict.items() if n in self.wanted}, self.spread)
        plan = super().create_local_plan()
        return dataclasses.replace(plan, items=[item for item in plan.items if self.shares.reads(item.dest_index.fqn)])


def _of_another_optimizer(wanted: Iterable[str], saved: Iterable[str]) -> list[str]:
    """One line if the optimizers have other states, and not only states of other parameters."""
    here, there = (sorted({n.rpartition(".")[2] for n in names if n.startswith(_STATE_PREFIX)}) for names in (wanted, saved))
    if here == there:
        return []
    return [
        f"the optimizer has {_states(there)} in the checkpoint, and {_states(here)} here: is it another class of optimizer, or "
        "has it other options? load(path, TrainState(model)) loads the model alone"
    ]


def _states(keys: Sequence[str]) -> str:
    return f"the states {', '.join(keys)}" if keys else "no states"


def differences(wanted: Mapping[str, TensorRecord], saved: Mapping[str, TensorRecord]) -> list[str]:
    """Why the ``saved`` tensors cannot fill the ``wanted`` ones, one line per tensor; empty if they can.

    The names of the model must be equal on both sides. So must the names of the optimizer, if any of its states is wanted. Of
    all other tensors, only the wanted ones must be saved.
    """
    whole = {name.partition(".")[0] for name in wanted} & {"model", "optimizer"}
    missing = [name for name in wanted if name not in saved]
    surplus = [
        name
        for name in saved
        if name not in wanted and name.partition(".")[0] in whole and not name.startswith(GROUPS)  # Read as objects.
    ]
    problems = [
        f"{name} is {saved[name].what} in the checkpoint, {record.what} here"
        for name, record in wanted.items()
        if name in saved and saved[name].what != record.what
    ]
    for count, name in enumerate(missing):
        alike = (other for other in surplus if count < _GUESSES and saved[other].what == wanted[name].what)
        # A state of a renamed parameter has its own name still.
        key = name.rpartition(".")[2] if name.startswith(_OPTIMIZER) else ""
        candidates = list(itertools.islice((other for other in alike if other.endswith(key)), _CANDIDATES))
        closest = difflib.get_close_matches(name, candidates, n=1, cutoff=0.5)
        if closest:
            surplus.remove(closest[0])
            problems.append(f"{name} is not in the checkpoint, which has {closest[0]} of the same shape: was it renamed?")
        else:
            problems.append(f"{name} {wanted[name].what} is not in the checkpoint")
    return problems + [f"{name} {saved[name].what} is in the checkpoint, but not here" for name in surplus]
