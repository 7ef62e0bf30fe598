"""What is saved of a training run, as a state dict that DCP takes, and back."""

from __future__ import annotations

import io
import json
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from torch_ragged.checkpoint._errors import CheckpointError
from torch_ragged.checkpoint._manifest import Manifest
from torch_ragged.checkpoint._rng import DEFAULT, rng_request, rng_states, set_rng
from torch_ragged.checkpoint._same import bytes_of

__all__ = ["Contents", "Redistribute", "Request", "TrainState"]

Redistribute = Mapping[str, Callable[[list[Any]], Any] | None]  # as in :func:`load`


@dataclass
class TrainState:
    """What a run needs to go on: :func:`save` writes it, :func:`load` fills it in.

    Attributes:
        model: any module; its parameters may be DTensors under any placements.
        optimizer: its optimizer, or several; None saves and loads none.
        scheduler: a learning rate scheduler, or whatever has ``state_dict`` and ``load_state_dict``.
        step: optimizer steps done. Names the checkpoint.
        consumed_tokens: tokens trained on, over all ranks.
        data_position: where the data stands: what JSON can hold, the same on all ranks. Put into the manifest.
        rng: random generators of the run by name, beside the default ones (torch's of the CPU and of the accelerator, Python's,
            and NumPy's if it was imported), which are always saved. Each rank has its own states. More ranks than saved: where
            all ranks had one state, new ones get it; else they are seeded from it and their number.
        extra: anything else by name: tensors (DTensors too), which are loaded in place; what has ``state_dict`` and
            ``load_state_dict``; values that pickle. One rank writes them for all, but for DTensors: :func:`save` refuses those
            that differ between ranks.
        per_rank: what each rank has of its own, such as a data loader, by name: what has ``state_dict`` and
            ``load_state_dict``; values that pickle. Names are the same on all ranks. Each rank gets back what the rank of its
            number saved, tensors on the CPU. At another number of ranks :func:`load` refuses it, unless it is told how to
            redistribute it. What is not named here is not loaded.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None
    scheduler: Any = None
    step: int = 0
    consumed_tokens: int = 0
    data_position: Any = None
    rng: Mapping[str, torch.Generator] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    per_rank: dict[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Refuse what could not be saved.

        Raises:
            TypeError, ValueError: a field is of another type, negative, or no JSON.
        """
        if not isinstance(self.model, nn.Module):
            raise TypeError(f"TrainState.model must be an nn.Module, got {type(self.model).__name__}")
        for optimizer in self.optimizers:
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise TypeError(f"TrainState.optimizer must be an optimizer or several, got {type(optimizer).__name__}")
        if self.scheduler is not None and not isinstance(self.scheduler, Stateful):
            raise TypeError(
                f"TrainState.scheduler must have state_dict and load_state_dict, got {type(self.scheduler).__name__}"
            )
        for name in ("step", "consumed_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"TrainState.{name} must be an int >= 0, got {value!r}")
        for name, generator in self.rng.items():
            if not isinstance(generator, torch.Generator) or name in DEFAULT:
                raise TypeError(
                    f"TrainState.rng must map names, other than {', '.join(DEFAULT)}, to generators, got {name!r}: {generator}"
                )
        for field_name, held in (("extra", self.extra), ("per_rank", self.per_rank)):
            if not isinstance(held, dict) or not all(isinstance(name, str) for name in held):
                raise TypeError(f"TrainState.{field_name} must be a dict whose keys are str, got {reprlib.repr(held)}")
        try:
            same = json.loads(json.dumps(self.data_position))
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"TrainState.data_position must be what JSON can hold, got {self.data_position!r}: {error}"
            ) from error
        if same != self.data_position:
            raise TypeError(
                f"TrainState.data_position must be what JSON can hold: {self.data_position!r} would be read as {same!r}"
            )

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """All optimizers."""
        if self.optimizer is None:
            return ()
        return tuple(self.optimizer) if isinstance(self.optimizer, Sequence) else (self.optimizer,)

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The parameters of all optimizers."""
        return [p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]]


class Contents:
    """What :func:`save` writes of a ``state``, collected. Nothing is changed.

    Attributes:
        state_dict: as DCP takes it: tensors are those of the model, not copies.
        rng: the state of each random generator of this rank.
        names: what is held beside tensors, for the manifest.
        shared: what one rank writes for all, by name.
    """

    def __init__(self, state: TrainState, rank: int) -> None:
        objects = {
            f"extra.{name}": _value_of(value, f"extra.{name}")
            for name, value in state.extra.items()
            if not isinstance(value, torch.Tensor)
        }
        if state.scheduler is not None:
            objects["scheduler"] = _value_of(state.scheduler, "scheduler")
        own = {
            name: _pickled(_value_of(value, f"per_rank.{name}"), f"per_rank.{name}") for name, value in state.per_rank.items()
        }
        self.rng = rng_states(state.rng)
        self.names = _object_names(state)
        self.shared = {
            **{name: getattr(state, name) for name in ("step", "consumed_tokens", "data_position")},
            **objects,
            **{f"extra.{name}": value for name, value in _tensors_of(state).items() if not isinstance(value, DTensor)},
            "the list of objects": self.names,
            "the list of generators in rng": sorted(state.rng),
        }
        self.state_dict: dict[str, Any] = {
            "model": get_model_state_dict(state.model),
            "extra": _tensors_of(state),
            "objects": _pickled(objects, ", ".join(objects)),
            "per_rank": {str(rank): own},
            "rng": {str(rank): self.rng},
        }
        if state.optimizers:
            self.state_dict["optimizer"] = _optimizer_state(state)


def _object_names(state: TrainState) -> list[str]:
    """The names of what is saved beside tensors: ``scheduler``, ``extra.<name>``, ``per_rank.<name>``."""
    names = [f"extra.{name}" for name in state.extra if name not in _tensors_of(state)]
    names += [f"per_rank.{name}" for name in state.per_rank]
    return sorted(names + (["scheduler"] if state.scheduler is not None else []))


def _value_of(value: Any, name: str) -> Any:
    with _named(f"{name}.state_dict"):
        return value.state_dict() if isinstance(value, Stateful) else value


def _tensors_of(state: TrainState) -> dict[str, torch.Tensor]:
    return {name: value for name, value in state.extra.items() if isinstance(value, torch.Tensor)}


def _pickled(value: Any, name: str) -> torch.Tensor:
    """A value as a tensor of bytes."""
    pickled = io.BytesIO()
    with _named(f"pickling {name}"):
        torch.save(value, pickled)
    return torch.frombuffer(bytearray(pickled.getvalue()), dtype=torch.uint8)


def _unpickled(pickled: torch.Tensor, map_location: str | None = None) -> Any:
    return torch.load(io.BytesIO(bytes_of(pickled)), map_location=map_location, weights_only=False)


class _Before:
    """States and groups of optimizers, to restore them: a state dict of an optimizer that never stepped makes it step."""

    def __init__(self, state: TrainState) -> None:
        self._all = [(o, dict(o.state), [dict(group) for group in o.param_groups]) for o in state.optimizers]

    def restore(self) -> None:
        for optimizer, states, groups in self._all:
            optimizer.state.clear()
            optimizer.state.update(states)
            for group, before in zip(optimizer.param_groups, groups):
                group.update(before)  # The learning rate is 0 in between.


def _optimizer_state(state: TrainState) -> dict[str, Any]:
    """The state dict of all optimizers by parameter names; those that never stepped have no states.

    ``get_optimizer_state_dict`` has them step with zero gradients, which leaves their counters at 1: that is undone.
    """
    fresh = {id(p) for o in state.optimizers if not o.state for group in o.param_groups for p in group["params"]}
    before = _Before(state)
    try:
        result = _initialised(state)
    finally:
        before.restore()
    for name, parameter in state.model.named_parameters():
        if id(parameter) in fresh:
            result["state"].pop(name, None)
    return result


def _initialised(state: TrainState) -> dict[str, Any]:
    """The state dict of all optimizers by parameter names; those that never stepped get empty states."""
    gradients = [(p, p.grad) for p in state.parameters]
    try:
        for parameter, _ in gradients:
            parameter.grad = None  # With gradients, no states would be made.
        return get_optimizer_state_dict(state.model, state.optimizers)
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


class Request:
    """What :func:`load` asks DCP to fill, in two steps, and what is done with it then.

    :meth:`prepare` and :meth:`unpack` change no parameter; optimizers may get empty states, which :meth:`forget` undoes.

    Attributes:
        objects: for ``dcp.load``: pickles and random states, which are filled and looked at before any parameter is.
        tensors: for ``dcp.load``: those of the model, the optimizer and ``extra``.
    """

    def __init__(self, state: TrainState, redistribute: Redistribute, manifest: Manifest, rank: int, ranks: int) -> None:
        self.state, self.redistribute, self.manifest, self.rank, self.ranks = state, redistribute, manifest, rank, ranks
        self._before = _Before(state)

    def prepare(self, metadata: Metadata) -> dict[str, Any]:
        """Make ``objects`` and ``tensors``, and return these.

        Raises:
            CheckpointError: the checkpoint does not hold what is asked for.
        """
        state, held = self.state, self.manifest.objects
        missing = sorted(set(_object_names(state)) - set(held))
        if missing:
            raise CheckpointError(
                f"it holds no {', '.join(missing)}, but {', '.join(held) or 'no such objects'}: leave out of TrainState what "
                "it does not hold to load the rest"
            )
        own: dict[str, dict[str, torch.Tensor]] = {}
        for name in state.per_rank:
            for source in self._sources(name):
                own.setdefault(str(source), {})[name] = _empty_like(metadata, f"per_rank.{source}.{name}")
        self.objects: dict[str, Any] = {
            "objects": _empty_like(metadata, "objects"),
            "per_rank": own,
            "rng": rng_request(state.rng, self.manifest, metadata, self.rank),
        }
        self.tensors: dict[str, Any] = {"model": get_model_state_dict(state.model), "extra": _tensors_of(state)}
        if state.optimizers:
            self.tensors["optimizer"] = self._optimizer_state()
        return self.tensors

    def _sources(self, name: str) -> list[int]:
        """The ranks whose state of ``per_rank[name]`` this rank wants."""
        saved = self.manifest.world_size
        if saved == self.ranks:
            return [self.rank]
        if name not in self.redistribute:
            raise CheckpointError(
                f"per_rank.{name} was saved by {saved} ranks, but is loaded by {self.ranks}: pass to load "
                f"redistribute={{{name!r}: function}}, where function takes the list of the {saved} ranks' states and returns "
                f"this rank's, or redistribute={{{name!r}: None}} to leave it as it is here"
            )
        return list(range(saved)) if self.redistribute[name] is not None else []

    def _optimizer_state(self) -> dict[str, Any]:
        """The optimizers' states of the parameters of which the checkpoint has some."""
        prefix = "optimizer.state."
        saved = {name for name in self.manifest.tensors if name.startswith(prefix)}
        result = _initialised(self.state) if saved else _optimizer_state(self.state)
        held = {f"{prefix}{name}.{key}" for name, values in result["state"].items() for key in values}
        if not saved <= held:  # Parameters that never had a gradient have none yet.
            for optimizer in self.state.optimizers:
                optimizer.state.clear()
            result = _initialised(self.state)
        result["state"] = {
            name: values for name, values in result["state"].items() if any(f"{prefix}{name}.{key}" in saved for key in values)
        }
        return result

    def unpack(self) -> None:
        """Unpickle ``objects``, once they are filled, and redistribute what is per rank.

        Raises:
            CheckpointError: an object is not there, or a function of the caller raised.
        """
        self._values = _unpickled(self.objects["objects"])
        wanted = {name for name in _object_names(self.state) if not name.startswith("per_rank.")}
        if not isinstance(self._values, dict) or not wanted <= self._values.keys():
            raise CheckpointError("its pickled objects are not those that its manifest names")
        self._own: dict[str, Any] = {}
        for name in self.state.per_rank:
            sources = self._sources(name)
            states = [_unpickled(self.objects["per_rank"][str(source)][name], "cpu") for source in sources]
            function = self.redistribute.get(name)
            if self.manifest.world_size == self.ranks:
                self._own[name] = states[0]
            elif function is not None:
                with _named(f"the function that redistributes per_rank.{name}"):
                    self._own[name] = function(states)

    def apply(self) -> None:
        """Hand what was loaded to the model, the optimizers, the scheduler, ``extra``, ``per_rank`` and the generators."""
        state, manifest = self.state, self.manifest
        set_model_state_dict(state.model, self.tensors["model"])
        if state.optimizers:
            options = StateDictOptions(strict=False)  # Parameters without a saved state have none afterwards.
            set_optimizer_state_dict(state.model, state.optimizers, self.tensors["optimizer"], options=options)
        if state.scheduler is not None:
            with _named("scheduler.load_state_dict"):
                state.scheduler.load_state_dict(self._values["scheduler"])
        for name, value in self._values.items():
            if name.startswith("extra."):
                _put(state.extra, name.removeprefix("extra."), value, name)
        for name, value in self._own.items():
            _put(state.per_rank, name, value, f"per_rank.{name}")
        state.step, state.consumed_tokens, state.data_position = manifest.step, manifest.consumed_tokens, manifest.data_position
        (states,) = self.objects["rng"].values()
        set_rng(state.rng, states, manifest, self.rank)

    def forget(self) -> None:
        """Give the optimizers back the states that they had."""
        self._before.restore()


def _put(held: dict[str, Any], name: str, value: Any, what: str) -> None:
    """Give a value its place: into what has ``load_state_dict``, else instead of what is held."""
    if isinstance(held.get(name), Stateful):
        with _named(f"{what}.load_state_dict"):
            held[name].load_state_dict(value)
    else:
        held[name] = value


@contextmanager
def _named(what: str) -> Iterator[None]:
    """An error in the caller's code names that code."""
    try:
        yield
    except Exception as error:
        raise CheckpointError(f"{what} raised {type(error).__name__}: {error}") from error


def _empty_like(metadata: Metadata, name: str) -> torch.Tensor:
    stored = metadata.state_dict_metadata.get(name)
    if not isinstance(stored, TensorStorageMetadata):
        raise CheckpointError(f"it holds no {name!r}")
    return torch.empty(stored.size, dtype=stored.properties.dtype)
