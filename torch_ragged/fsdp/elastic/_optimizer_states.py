"""OptimizerStates: the states of an optimizer, by the names of parameters, so that they can move to another mesh.

It moves nothing itself: it says what is to be moved, and takes what was moved. After a move, ranks compare options: a scheduler
of a rank that joined may set other ones.
"""

from __future__ import annotations

import functools
import weakref
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from torch_ragged._ranks.comparison import Comparison
from torch_ragged._ranks.groups import group_of
from torch_ragged._register._torch import backward_id, dtensor_of, no_dispatch
from torch_ragged.fsdp.core._hooks import map_tensors, tensors_in
from torch_ragged.tensor._api import spec_of
from torch_ragged.tensor._local_tensor import coordinates_of

__all__ = ["OptimizerStates", "Told", "compare_options"]

_COMPARED_EVERY = 64
_NUMBER_TYPES = (bool, int, float)
_ADVICE = (
    "A learning rate scheduler of a rank that has joined is at its start: pass schedulers to reshard_to as stateful, or let "
    "that rank load the state_dict() of another rank's scheduler"
)

_option_hooks: weakref.WeakKeyDictionary[Optimizer, RemovableHandle] = weakref.WeakKeyDictionary()
"""The comparison of each optimizer. The next move ends it, as its ranks may be others then."""


@dataclass(frozen=True)
class PlacedState:
    """A state that is a DTensor. Its elements are moved. If it ``follows``, it has its parameter's shape and placements."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device_type: str
    follows: bool
    is_replicated: bool


@dataclass(frozen=True)
class Single:
    """A state that is a plain tensor of one element."""

    tensor: torch.Tensor
    device_type: str


@dataclass(frozen=True)
class Told:
    """What one rank tells the others about an optimizer."""

    options: list[dict[str, Any]]  # Of each parameter group, all but ``params``, with tensors on the CPU.
    states: dict[str, dict[str, Any]]  # By name: :class:`PlacedState`, :class:`Single` or the value itself.

    @property
    def lines(self) -> list[str]:
        """The states without their values: equal on all ranks that hold shards."""
        return [
            f"{name} {key} {value if isinstance(value, PlacedState) else type(value).__name__}"
            for name, states in self.states.items()
            for key, value in states.items()
        ]


class OptimizerStates:
    """The parameter groups and states of one optimizer, by the names of parameters.

    A state that is a DTensor with its parameter's shape and placements follows the parameter. An optimizer with other states
    says where they lie, by a method that this class calls on ranks of the new mesh::

        optimizer.empty_state(param, group, name, shape, dtype) -> DTensor      uninitialized; group is a parameter group

    The names of moved tensors begin with ``label``, which no other optimizer has.
    """

    def __init__(self, optimizer: Any, names: Mapping[nn.Parameter, str], label: str, call: str = "reshard_to") -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"{call} expects a torch.optim.Optimizer, or a list of them, got {type(optimizer).__name__}")
        if not {"state", "param_groups"} <= vars(optimizer).keys():
            raise TypeError(f"{call} got {type(optimizer).__name__}, which wraps another optimizer: pass the wrapped one")
        self.optimizer, self._names, self._label = optimizer, names, label
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param not in names:
                    raise ValueError(
                        f"{type(optimizer).__name__} holds a parameter of shape {tuple(param.shape)} that is not a sharded "
                        "parameter of the model: make the optimizer of model.parameters(), after fully_shard"
                    )

    @property
    def lines(self) -> list[str]:
        """The optimizer in lines that must be equal on all ranks, also on those without shards."""
        groups = self.optimizer.param_groups
        return [f"{type(self.optimizer).__name__} {[self._names[param] for param in group['params']]}" for group in groups]

    # -- on ranks of the old mesh ----------------------------------------------------------------------------------

    def told(self) -> Told:
        """What ranks without shards must know."""
        options = [{key: value for key, value in group.items() if key != "params"} for group in self.optimizer.param_groups]
        states = {
            name: {key: self._told(name, key, param, value) for key, value in self.optimizer.state.get(param, {}).items()}
            for name, param in self._params().items()
        }
        return Told(map_tensors(lambda tensor: tensor.detach().cpu(), options), states)

    def _told(self, name: str, key: str, param: torch.Tensor, value: Any) -> Any:
        where = f"{name} in {type(self.optimizer).__name__}"
        if isinstance(value, DTensor):
            assert isinstance(param, DTensor)
            follows = value.shape == param.shape and value.placements == param.placements
            is_replicated = all(isinstance(each, Replicate) for each in value.placements)
            if not follows and not is_replicated and not hasattr(self.optimizer, "empty_state"):
                raise ValueError(
                    f"the state {key} of {where} has shape {tuple(value.shape)} and placements {value.placements}, which are "
                    f"not those of its parameter ({param.placements}): the optimizer needs a method empty_state(param, group, "
                    "name, shape, dtype) that returns the state's DTensor on another mesh"
                )
            return PlacedState(tuple(value.shape), value.dtype, value.device.type, follows, is_replicated)
        if any(tensor.numel() > 1 or isinstance(tensor, DTensor) for tensor in tensors_in(value)[0]):
            raise ValueError(
                f"the state {key} of {where} holds plain tensors of several elements: reshard_to moves DTensors, and copies "
                "single values"
            )
        # A counter of steps may be on an accelerator, or on the CPU while the parameter is not.
        return Single(value.detach().cpu(), value.device.type) if isinstance(value, torch.Tensor) else value

    def source(self) -> dict[str, torch.Tensor]:
        """The states to move."""
        return {
            f"{self._label}.{name}.{key}": value.detach()
            for name, param in self._params().items()
            for key, value in self.optimizer.state.get(param, {}).items()
            if isinstance(value, DTensor)
        }

    # -- on ranks of the new mesh ----------------------------------------------------------------------------------

    def target(self, told: Told, params: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
        """Uninitialized states for the new ``params``, in the order of :meth:`source`."""
        groups = {self._names[param]: group for group in self.optimizer.param_groups for param in group["params"]}
        return {
            f"{self._label}.{name}.{key}": self._empty(params[name], groups[name], key, value)
            for name, states in told.states.items()
            for key, value in states.items()
            if isinstance(value, PlacedState)
        }

    def _empty(self, param: torch.Tensor, group: dict[str, Any], key: str, was: PlacedState) -> torch.Tensor:
        assert isinstance(param, DTensor)
        if hasattr(self.optimizer, "empty_state"):
            return self.optimizer.empty_state(param.detach(), group, key, was.shape, was.dtype)
        if was.follows:
            return torch.empty_like(param.detach(), dtype=was.dtype, device=was.device_type)
        assert was.is_replicated
        mesh, values = param.device_mesh, torch.empty(was.shape, dtype=was.dtype, device=was.device_type)
        return dtensor_of(values, spec_of(mesh, (Replicate(),) * mesh.ndim, values.shape, values.dtype))

    # -- on all ranks ----------------------------------------------------------------------------------------------

    def move_to(
        self,
        params: Mapping[str, nn.Parameter],
        moved: Mapping[str, torch.Tensor],
        told: Told,
        was_member: bool,
        is_member: bool,
    ) -> None:
        """Exchange the parameters and states for others, as ``load_state_dict`` does; the optimizer and its groups stay.

        ``moved`` has the names of :meth:`target`. A rank that had no shards, and has them now, takes the options and states of
        ``told``. A rank that has none now has no states.
        """
        states: dict[torch.Tensor, Any] = defaultdict(dict)
        for name, param in self._params().items() if is_member else ():
            kept = self.optimizer.state.get(param, {}) if was_member else told.states[name]
            # A rank that stays keeps its own single values, such as counters, which may be on an accelerator. They are equal on
            # all ranks with shards.
            for key, value in kept.items():
                if (here := moved.get(f"{self._label}.{name}.{key}")) is not None:
                    value = here
                elif isinstance(value, Single):
                    value = value.tensor.to(value.device_type)
                states[params[name]][key] = value
        for group, options in zip(self.optimizer.param_groups, told.options):
            group["params"] = [params[self._names[param]] for param in group["params"]]
            if is_member and not was_member:
                for key, value in options.items():
                    own = group.get(key)
                    has_device = isinstance(value, torch.Tensor) and isinstance(own, torch.Tensor)
                    group[key] = value.to(own.device) if has_device else value  # type: ignore[union-attr]
        # Optimizers drop here what they derive from parameters, such as plans for the old mesh.
        self.optimizer.__setstate__({"state": states, "param_groups": self.optimizer.param_groups})

    def _params(self) -> dict[str, torch.Tensor]:
        return {self._names[param]: param for group in self.optimizer.param_groups for param in group["params"]}


# -- after a move --------------------------------------------------------------------------------------------------------


def compare_options(optimizer: Optimizer, mesh: DeviceMesh, parent: dist.ProcessGroup) -> None:
    """From now on, ranks of ``mesh``, all in ``parent``, compare the options in the first 8 steps and in every 64th one."""
    if optimizer in _option_hooks:
        _option_hooks.pop(optimizer).remove()
    if mesh.get_coordinate() is None or mesh.size() == 1:
        return
    group = functools.partial(group_of, sorted(mesh.mesh.flatten().tolist()), parent=parent)
    group()  # Made now, where all ranks are: a step must not make a process group.
    names = mesh.mesh_dim_names or ("replicate", "shard")[-mesh.ndim :]
    what = f"the steps of {type(optimizer).__name__}"
    comparison = Comparison(what, group, coordinates_of(mesh), names, mesh.device_type, _COMPARED_EVERY)
    _option_hooks[optimizer] = optimizer.register_step_pre_hook(functools.partial(_note_options, comparison))


def _note_options(comparison: Comparison, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    # In backward, ranks may be at other collectives. A captured step has no time for the host.
    is_capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    if torch.compiler.is_compiling() or backward_id() != -1 or is_capturing:
        return
    is_due = comparison.begin_call()
    with no_dispatch():
        groups = optimizer.param_groups
        for key in sorted({key for group in groups for key in group} - {"params"}):
            values = [group.get(key) for group in groups]
            tensors = [value.detach().double().flatten() for value in values if isinstance(value, torch.Tensor)]
            joined = torch.cat([each.to(tensors[0].device) for each in tensors]) if tensors else None
            comparison.note(key, str([_text_of(value) for value in values]), _ADVICE, joined)
        if is_due:
            comparison.compare()


def _text_of(value: Any) -> Any:
    """A number, or numbers, as it is. Other options, such as functions, may differ in their text only."""
    values = value if isinstance(value, (tuple, list)) else [value]
    return value if all(isinstance(each, _NUMBER_TYPES) for each in values) else type(value).__name__
