"""What is saved of a training run, as a state dict that DCP takes, and back."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
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

from torch_ragged.checkpoint._errors import CheckpointError
from torch_ragged.checkpoint._manifest import Manifest
from torch_ragged.checkpoint._rng import DEFAULT

__all__ = ["Request", "TrainState", "objects_of", "state_dict_of"]


@dataclass
class TrainState:
    """What a run needs to go on: :func:`save` writes it, :func:`load` fills it in.

    Attributes:
        model: any module; its parameters may be DTensors under any placements.
        optimizer: its optimizer, or several; None saves and loads none.
        scheduler: a learning rate scheduler, or whatever has ``state_dict`` and ``load_state_dict``.
        step: optimizer steps done. Names the checkpoint.
        consumed_tokens: tokens trained on, over all ranks.
        data_position: where the data stands: what JSON can hold. Put into the manifest.
        rng: random generators of the run by name, beside the default ones (torch's of the CPU and of the accelerator, Python's,
            and NumPy's if it was imported), which are always saved. Each rank has its own states. More ranks than saved: where
            all ranks had one state, new ones get it; else they are seeded from it and their number.
        extra: anything else by name: tensors (DTensors too), which are loaded in place; what has ``state_dict`` and
            ``load_state_dict``; values that pickle. All but tensors are written by one rank: they must be the same on all.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None
    scheduler: Any = None
    step: int = 0
    consumed_tokens: int = 0
    data_position: Any = None
    rng: Mapping[str, torch.Generator] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

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


def state_dict_of(state: TrainState) -> dict[str, Any]:
    """Everything but the states of random generators, as DCP takes it: tensors are those of the model, not copies."""
    result: dict[str, Any] = {"model": get_model_state_dict(state.model)}
    if state.optimizers:
        result["optimizer"] = _optimizer_state(state)
    objects = {f"extra.{name}": _value_of(value) for name, value in state.extra.items() if not isinstance(value, torch.Tensor)}
    if state.scheduler is not None:
        objects["scheduler"] = state.scheduler.state_dict()
    pickled = io.BytesIO()
    torch.save(objects, pickled)
    result["extra"] = _tensors_of(state)
    result["objects"] = torch.frombuffer(bytearray(pickled.getvalue()), dtype=torch.uint8)
    return result


def objects_of(state: TrainState) -> list[str]:
    """The names of what is saved beside tensors: ``scheduler``, ``extra.<name>``."""
    names = [f"extra.{name}" for name, value in state.extra.items() if not isinstance(value, torch.Tensor)]
    return sorted(names + (["scheduler"] if state.scheduler is not None else []))


def _value_of(value: Any) -> Any:
    return value.state_dict() if isinstance(value, Stateful) else value


def _tensors_of(state: TrainState) -> dict[str, torch.Tensor]:
    return {name: value for name, value in state.extra.items() if isinstance(value, torch.Tensor)}


def _optimizer_state(state: TrainState) -> dict[str, Any]:
    """The state dict of all optimizers by parameter names; those that never stepped have no states.

    ``get_optimizer_state_dict`` has them step with zero gradients, which leaves their counters at 1: that is undone.
    """
    fresh = [optimizer for optimizer in state.optimizers if not optimizer.state]
    result = _initialised(state)
    for optimizer in fresh:
        optimizer.state.clear()
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for name, parameter in state.model.named_parameters():
            if id(parameter) in mine:
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
    """What :func:`load` asks DCP to fill in place, and what is done with it then.

    Making it changes no parameter. Optimizers may get empty states, which :meth:`forget` undoes.

    Attributes:
        state_dict: for ``dcp.load``.
    """

    def __init__(self, state: TrainState, manifest: Manifest, metadata: Metadata) -> None:
        self.state, self.manifest = state, manifest
        missing = sorted(set(objects_of(state)) - set(manifest.objects))
        if missing:
            raise CheckpointError(f"it holds no {', '.join(missing)}, but {', '.join(manifest.objects) or 'no such objects'}")
        self._states_before = [dict(optimizer.state) for optimizer in state.optimizers]
        self.state_dict: dict[str, Any] = {"model": get_model_state_dict(state.model), "extra": _tensors_of(state)}
        self.state_dict["objects"] = _empty_like(metadata, "objects")
        if state.optimizers:
            self.state_dict["optimizer"] = self._optimizer_state()

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

    def forget(self) -> None:
        """Give the optimizers back the states that they had."""
        for optimizer, before in zip(self.state.optimizers, self._states_before):
            optimizer.state.clear()
            optimizer.state.update(before)

    def apply(self) -> None:
        """Hand what was loaded to the model, the optimizers, the scheduler and ``extra``."""
        state, manifest = self.state, self.manifest
        set_model_state_dict(state.model, self.state_dict["model"])
        if state.optimizers:
            options = StateDictOptions(strict=False)  # Parameters without a saved state have none afterwards.
            set_optimizer_state_dict(state.model, state.optimizers, self.state_dict["optimizer"], options=options)
        objects = torch.load(io.BytesIO(self.state_dict["objects"].numpy().tobytes()), weights_only=False)
        if state.scheduler is not None:
            state.scheduler.load_state_dict(objects["scheduler"])
        for name, value in objects.items():
            if name.startswith("extra."):
                self._set_extra(name.removeprefix("extra."), value)
        state.step, state.consumed_tokens, state.data_position = manifest.step, manifest.consumed_tokens, manifest.data_position

    def _set_extra(self, name: str, value: Any) -> None:
        held = self.state.extra.get(name)
        if isinstance(held, Stateful):
            held.load_state_dict(value)  # type: ignore[arg-type]
        else:
            self.state.extra[name] = value


def _empty_like(metadata: Metadata, name: str) -> torch.Tensor:
    stored = metadata.state_dict_metadata.get(name)
    if not isinstance(stored, TensorStorageMetadata):
        raise CheckpointError(f"it holds no {name!r}")
    return torch.empty(stored.size, dtype=stored.properties.dtype)
