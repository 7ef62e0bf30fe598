"""Finds the groups that ``fully_shard`` has made under a module. It changes nothing."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from torch_ragged._ranks.groups import device_of
from torch_ragged.fsdp.core._fsdp_param_group import FSDPParamGroup
from torch_ragged.fsdp.core._fsdp_state import FSDPState, state_of
from torch_ragged.fsdp.gates._untrained import refuse_other_replicas
from torch_ragged.fsdp.layout._buffer_layout import BufferLayout

__all__ = ["buffer_layouts", "check_replicas_of", "device_of_states", "module_states", "named_groups", "process_groups_of"]


def buffer_layouts(module: nn.Module) -> dict[str, BufferLayout]:
    """The layout of each group under ``module``, by the name of the module that ``fully_shard`` was called on."""
    return {name: group.layout for name, group in named_groups(module).items()}


def named_groups(module: nn.Module) -> dict[str, FSDPParamGroup]:
    """The groups under ``module``, by the name of their module: ``name``, ``name[1]``, ``name[2]``, ..."""
    groups: dict[str, FSDPParamGroup] = {}
    for name, state in _states_by_name(module).items():
        groups.update({f"{name}[{i}]" if i else name: group for i, group in enumerate(state.groups)})
    return groups


def module_states(module: nn.Module) -> dict[str, FSDPState]:
    """The states under ``module``, by the names of the modules that ``fully_shard`` was called on; of a list, of its first."""
    states = _states_by_name(module) if isinstance(module, nn.Module) else {}
    if not states:
        raise ValueError(
            f"expected a module that torch_ragged.fsdp.fully_shard was called on, or one that holds such modules, got "
            f"{type(module).__name__} without any: call fully_shard first"
        )
    return states


def process_groups_of(states: Iterable[FSDPState]) -> list[dist.ProcessGroup]:
    """The process groups of shards and replicas, each once, in one order on all ranks."""
    both = [(group.dp.shard_group, group.dp.replicate_group) for state in states for group in state.groups]
    return list(dict.fromkeys(one for pair in both for one in pair if one is not None))


def device_of_states(states: Iterable[FSDPState]) -> torch.device:
    """The device of the mesh: parameters may be on the meta device."""
    groups = [group for state in states for group in state.groups]
    return device_of(groups[0].dp.mesh) if groups else torch.device("cpu")


def check_replicas_of(model: nn.Module) -> None:
    """Raise a ValueError on all ranks if replicas hold other parameters: a checkpoint would have those of one replica."""
    checked = [group for state in _states_by_name(model).values() if state.checks_replicas for group in state.groups]
    refuse_other_replicas([model], checked)


def _states_by_name(module: nn.Module) -> dict[str, FSDPState]:
    states: dict[FSDPState, str] = {}
    for name, child in module.named_modules():
        if state := state_of(child):
            states.setdefault(state, name or "root")
    return {name: state for state, name in states.items()}
