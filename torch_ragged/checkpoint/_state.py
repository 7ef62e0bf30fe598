"""The contents of a checkpoint: from a TrainState to DCP's state dict, and back.

Nothing here reads or writes files. Until :meth:`Request.apply`, nothing changes a parameter.
"""

from __future__ import annotations

import io
import itertools
import json
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
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
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from torch_ragged.checkpoint._base import HeldBase, frozen_in, held_base
from torch_ragged.checkpoint._data import check_object, load_object
from torch_ragged.checkpoint._errors import CheckpointError
from torch_ragged.checkpoint._layouts import (
    layouts_of_model,
    name_in_checkpoint,
    optimizer_with_layouts,
    plain_state,
    tensors_with_layouts,
)
from torch_ragged.checkpoint._manifest import Manifest
from torch_ragged.checkpoint._rng import DEFAULT, rng_request, rng_states, set_rng
from torch_ragged.checkpoint._same import bytes_of
from torch_ragged.tensor._box_tensor import BoxTensor

__all__ = ["GROUPS", "Contents", "Redistribute", "Request", "TrainState", "has_lost"]

GROUPS = "optimizer.param_groups."
"""The names of the options of parameter groups begin so."""

_GROUP_KEYS = ("params", "param_names")

Redistribute = Mapping[str, Callable[[list[Any]], Any] | None]  # See :func:`load`.


@dataclass
class TrainState:
    """The state of a training run. :func:`save` writes it; :func:`load` fills it.

    Attributes:
        model: any module; its parameters may be DTensors under any placements.
        optimizer: the optimizer of the model, or a sequence of optimizers. If None, no optimizer is saved or loaded.
        scheduler: a learning rate scheduler, or any object with ``state_dict`` and ``load_state_dict``.
        step: the number of optimizer steps done, an int >= 0. It names the checkpoint.
        consumed_tokens: the number of tokens trained on, summed over all ranks, an int >= 0.
        data_position: the position in the training data, as a JSON value. Equal on all ranks. Stored in the manifest.
        rng: further random generators, by name. The default generators are always saved: torch's for the CPU and for the
            accelerator, Python's, and NumPy's if it was imported. Each rank saves its own states. If more ranks load than saved
            and all saved states of a generator were equal, the new ranks get this state. If they differed, each new rank is
            seeded from rank 0's state and its own rank.
        extra: further values, by name. Tensors, including DTensors, are loaded in place. Objects with ``state_dict`` and
            ``load_state_dict`` are legal too, and values that ``torch.load(weights_only=True)`` reads. One rank writes all of
            them except DTensors, so :func:`save` refuses a value that differs between ranks.
        per_rank: values that differ between ranks, such as a data loader, by name: objects with ``state_dict`` and
            ``load_state_dict``, or values as in ``extra``. The names are equal on all ranks. Each rank loads what the same rank
            saved, with tensors on the CPU. If the number of ranks differs, :func:`load` needs ``redistribute``. Saved names
            that are not in ``per_rank`` are not loaded.
        layouts: for a model whose parameters are plain local tensors, as those of FlexShard: what this rank holds of each, by
            the names of parameters and buffers: a :class:`~torch_ragged.GlobalLayout`, or an object with its four fields.
            States of the optimizer that have the parameter's shape lie like it. Tensors that carry the four fields, in the
            model or in ``extra``, need no entry.
        base: for a fine-tuning that trains few parameters, such as LoRA: what a reader loads first, as a name or a path. The
            base is what the frozen parameters hold at the first :func:`save` or :func:`load` with it. A checkpoint leaves out
            each parameter that is frozen, has no state of an optimizer and still holds its base's values; it has their digests
            in its manifest. :func:`load` compares these digests with the model, which must hold the base, whether ``base`` is
            set or not. Equal on all ranks. None: all parameters are saved.
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
    layouts: Mapping[str, Any] = field(default_factory=dict)
    base: str | None = None

    def check(self) -> None:
        """Check the types and values of all fields.

        Raises:
            TypeError, ValueError: a field has a wrong type, is negative, or is no JSON value.
        """
        if not isinstance(self.model, nn.Module):
            raise TypeError(f"TrainState.model must be an nn.Module, got {type(self.model).__name__}")
        for optimizer in self.optimizers:
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise TypeError(
                    f"TrainState.optimizer must be an optimizer, several optimizers or None, got {type(optimizer).__name__}"
                )
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
        if not isinstance(self.layouts, Mapping) or not all(isinstance(name, str) for name in self.layouts):
            raise TypeError(f"TrainState.layouts must map names of parameters to layouts, got {reprlib.repr(self.layouts)}")
        if self.base is not None and (not isinstance(self.base, str) or not self.base):
            raise TypeError(f"TrainState.base must be the name or the path of the base, or None, got {self.base!r}")
        try:
            same = json.loads(json.dumps(self.data_position))
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"TrainState.data_position must be a value that JSON can hold, got {self.data_position!r}: {error}"
            ) from error
        if same != self.data_position:
            raise TypeError(
                f"TrainState.data_position must be a value that JSON can hold, got {self.data_position!r}, which would be "
                f"loaded as {same!r}: use dicts with str keys, and lists in place of tuples"
            )

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """The optimizers as a tuple, empty if there is none."""
        if self.optimizer is None:
            return ()
        return tuple(self.optimizer) if isinstance(self.optimizer, Sequence) else (self.optimizer,)

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The parameters of all optimizers."""
        return [p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]]


class Contents:
    """Collects what :func:`save` writes for a ``state``. Nothing in ``state`` is changed.

    Args:
        is_staged: whether all tensors are copied next. Otherwise, states in files are read when they are written.

    Attributes:
        state_dict: the state dict for DCP. Its tensors are those of the model, not copies.
        rng: the state of each random generator of this rank.
        names: the names of the values that are not tensors, for the manifest.
        shared: the values that one rank writes for all, by name.
        tied: the first name of each parameter of the model that has several names, by its other names.
        base: what this rank holds of the frozen parameters; None if the state names no base.
    """

    def __init__(self, state: TrainState, rank: int, is_staged: bool = False) -> None:
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
        self.tied = _tied_names(state.model)
        self.shared = {
            **{name: getattr(state, name) for name in ("step", "consumed_tokens", "data_position", "base")},
            **objects,
            **{
                f"extra.{name}": value
                for name, value in _state_tensors(state).items()
                if not isinstance(value, (DTensor, BoxTensor))
            },
            "the list of objects": self.names,
            "the list of generators in rng": sorted(state.rng),
        }
        self.state_dict: dict[str, Any] = {
            "model": _model_state(state),
            "extra": _state_tensors(state),
            "objects": _pickled_items(objects),
            "per_rank": {str(rank): own},
            "rng": {str(rank): self.rng},
        }
        if state.optimizers:
            found = _optimizer_state(state, "views" if is_staged else "stored")
            self.state_dict["optimizer"] = optimizer_with_layouts(found, self.state_dict["model"])
        for part in ("model", "optimizer"):  # DCP pickles these objects; here they are checked.
            _pickled_items(dict(_objects_in(part, self.state_dict.get(part))))
        self.base = _held_base(state, self.state_dict["model"]) if state.base is not None else None

    def leave_out(self, names: Iterable[str]) -> None:
        """Remove tensors of the model from the state dict."""
        for name in names:
            del self.state_dict["model"][name.removeprefix("model.")]


def _held_base(state: TrainState, model: Mapping[str, Any]) -> HeldBase:
    return held_base(model, frozen_in(state.model, state.optimizers))


def _objects_in(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The names and values in a nested state dict that are neither tensors nor numbers nor strings."""
    if isinstance(value, (Mapping, list)):
        for key, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _objects_in(f"{name}.{key}", inner)
    elif type(value) not in (str, float, int, bool, type(None)) and not isinstance(value, torch.Tensor):
        yield name, value


def _tied_names(model: nn.Module) -> dict[str, str]:
    """By the other names of tied parameters, their first name: both as in the checkpoint."""
    first: dict[nn.Parameter, str] = {}
    tied = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        saved = f"model.{name_in_checkpoint(name)}"
        if first.setdefault(param, saved) != saved:
            tied[saved] = first[param]
    return tied


def _object_names(state: TrainState) -> list[str]:
    """The names of the values that are not tensors: ``scheduler``, ``extra.<name>``, ``per_rank.<name>``."""
    names = [f"extra.{name}" for name in state.extra if name not in _state_tensors(state)]
    names += [f"per_rank.{name}" for name in state.per_rank]
    return sorted(names + (["scheduler"] if state.scheduler is not None else []))


def _value_of(value: Any, name: str) -> Any:
    with _names_user_code(f"{name}.state_dict"):
        return value.state_dict() if isinstance(value, Stateful) else value


def _state_tensors(state: TrainState) -> dict[str, torch.Tensor]:
    return tensors_with_layouts({name: value for name, value in state.extra.items() if isinstance(value, torch.Tensor)}, {})


def _model_state(state: TrainState) -> dict[str, Any]:
    """The model's state dict; its plain local tensors have their layouts."""
    return tensors_with_layouts(get_model_state_dict(state.model), layouts_of_model(state.model, state.layouts))


def _pickled(value: Any, name: str) -> torch.Tensor:
    """The pickle of a value as a uint8 tensor.

    Raises:
        CheckpointError: it has no pickle, or :func:`load` would refuse it.
    """
    pickled = io.BytesIO()
    with _names_user_code(f"pickling {name}"):
        torch.save(value, pickled)
    check_object(pickled.getvalue(), name)
    return torch.frombuffer(bytearray(pickled.getvalue()), dtype=torch.uint8)


def _pickled_items(values: Mapping[str, Any]) -> torch.Tensor:
    """One pickle of all ``values``, as :func:`_pickled`; its error has the name of one of them."""
    try:
        return _pickled(values, ", ".join(values))
    except CheckpointError:
        for name, value in values.items():
            _pickled(value, name)
        raise


class _Before:
    """Remembers the states and groups of optimizers, and restores them.

    Needed because ``get_optimizer_state_dict`` steps an optimizer that has never stepped, and loading gives states to
    parameters that had none.
    """

    def __init__(self, state: TrainState) -> None:
        # An offloaded optimizer would copy its states: of it, the parameters that have states.
        self._all = [
            (
                o,
                dict(o.state) if isinstance(o.state, dict) else dict.fromkeys(o.state),
                [dict(group) for group in o.param_groups],
            )
            for o in state.optimizers
        ]

    def restore(self) -> None:
        for optimizer, states, groups in self._all:
            if isinstance(optimizer.state, dict):
                optimizer.state.clear()
                optimizer.state.update(states)
            else:
                for param in optimizer.state.keys() - states.keys():
                    del optimizer.state[param]
            for group, before in zip(optimizer.param_groups, groups):
                group.update(before)  # get_optimizer_state_dict sets the learning rate to 0 for its step.


def _optimizer_state(state: TrainState, form: str = "stored") -> dict[str, Any]:
    """The state dict of all optimizers by parameter names, without states for an optimizer that has never stepped.

    ``get_optimizer_state_dict`` steps such an optimizer with zero gradients, which leaves its step counters at 1. This step is
    undone here.
    """
    fresh = {id(p) for o in state.optimizers if not o.state for group in o.param_groups for p in group["params"]}
    before = _Before(state)
    try:
        result = _initialized(state, form)
    finally:
        before.restore()
    for name, parameter in state.model.named_parameters():
        if id(parameter) in fresh:
            result["state"].pop(name, None)
    return result


def _initialized(state: TrainState, form: str = "stored") -> dict[str, Any]:
    """The state dict of all optimizers by parameter names. An optimizer that has never stepped gets initial states.

    Args:
        form: of the states of offloaded optimizers, see ``OffloadedOptimizer.states_as``.
    """
    gradients = [(p, p.grad) for p in state.parameters]
    try:
        for parameter, _ in gradients:
            parameter.grad = None  # DCP's function creates states only if no gradient is set.
        with ExitStack() as stack:
            for optimizer in state.optimizers:
                if hasattr(optimizer, "states_as"):
                    stack.enter_context(optimizer.states_as(form))
                    if not optimizer.state:  # DCP's function would make gradients of all parameters at once.
                        optimizer.make_states()  # type: ignore[attr-defined]
            return get_optimizer_state_dict(state.model, state.optimizers)
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


def has_lost(state: TrainState) -> bool:
    """Whether a scratch file of an offloaded optimizer has lost states on this rank."""
    return any(getattr(optimizer, "has_failed", False) for optimizer in state.optimizers)


class Request:
    """What :func:`load` asks DCP to fill: first ``objects``, then ``tensors``. :meth:`apply` hands both to the ``state``.

    :meth:`prepare` and :meth:`unpack` change no parameter. They may give an optimizer initial states; :meth:`forget` undoes
    this.

    Args:
        is_lost: whether :func:`has_lost` on any rank.

    Attributes:
        objects: for ``dcp.load``: pickles and random states. They are filled and checked before any parameter changes.
        tensors: for ``dcp.load``: the tensors of the model, the optimizers and ``extra``.
        left_out: the tensors of the model that the checkpoint leaves out, by their names in it.
    """

    def __init__(
        self,
        state: TrainState,
        redistribute: Redistribute,
        manifest: Manifest,
        rank: int,
        ranks: int,
        trust: bool = False,
        is_lost: bool = False,
    ) -> None:
        self.state, self.redistribute, self.manifest, self.rank, self.ranks = state, redistribute, manifest, rank, ranks
        self.trust = trust
        self._before = _Before(state)
        self._lost = [optimizer for optimizer in state.optimizers if is_lost and hasattr(optimizer, "has_failed")]

    def prepare(self, metadata: Metadata) -> dict[str, Any]:
        """Create ``objects`` and ``tensors``. Returns ``tensors``.

        Raises:
            CheckpointError: the checkpoint lacks a value of ``state``, or ``per_rank`` was saved by another number of ranks.
        """
        state, held = self.state, self.manifest.objects
        if state.optimizers and not any(name.startswith("optimizer.") for name in metadata.state_dict_metadata):
            raise CheckpointError(
                "the checkpoint holds no optimizer, and TrainState has one: to load the rest, pass a TrainState without "
                "optimizer. The optimizer then keeps its states"
            )
        missing = sorted(set(_object_names(state)) - set(held))
        if missing:
            raise CheckpointError(
                f"the checkpoint holds no {', '.join(missing)}; it holds {', '.join(held) or 'no such objects'}: to load the "
                "rest, leave out of TrainState what it does not hold"
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
        if state.optimizers:  # The options of all saved parameter groups: they are checked before tensors are filled.
            names = [name for name in metadata.state_dict_metadata if name.startswith(GROUPS)]
            self.objects.update({name: _placeholder(metadata, name) for name in names})
        self.tensors: dict[str, Any] = {"model": _model_state(state), "extra": _state_tensors(state)}
        for optimizer in self._lost:  # It has no states to fill. Now it is loaded as if it had never stepped.
            optimizer.state.clear()
        if state.optimizers:
            wanted = optimizer_with_layouts(self._optimizer_state(), self.tensors["model"])
            self._groups = wanted.pop("param_groups")
            self.tensors["optimizer"] = wanted
        model = self.tensors["model"]
        names = [name for name in self.manifest.frozen if name.removeprefix("model.") in model]
        self.left_out: dict[str, Any] = {name: model.pop(name.removeprefix("model.")) for name in names}
        return self.tensors

    def held_base(self) -> HeldBase:
        """What this rank holds of the tensors that the checkpoint leaves out; if none, of those that a save could leave out."""
        if self.left_out:
            return held_base({name.removeprefix("model."): value for name, value in self.left_out.items()}, self.left_out)
        return _held_base(self.state, self.tensors["model"]) if self.state.base is not None else HeldBase({}, set())

    def _sources(self, name: str) -> list[int]:
        """The saved ranks whose state of ``per_rank[name]`` this rank reads."""
        saved = self.manifest.world_size
        if saved == self.ranks:
            return [self.rank]
        if name not in self.redistribute:
            raise CheckpointError(
                f"per_rank.{name} was saved by {saved} ranks, but {self.ranks} ranks load it: pass to load "
                f"redistribute={{{name!r}: function}}, where function takes the list of the {saved} ranks' states and returns "
                f"this rank's state; or pass redistribute={{{name!r}: None}} to keep this rank's value"
            )
        return list(range(saved)) if self.redistribute[name] is not None else []

    def _optimizer_state(self) -> dict[str, Any]:
        """The optimizers' state dict, restricted to parameters that have a state in the checkpoint."""
        prefix = "optimizer.state."
        saved = {name for name in self.manifest.tensors if name.startswith(prefix)}
        result = _initialized(self.state) if saved else _optimizer_state(self.state)
        held = {f"{prefix}{name}.{key}" for name, values in result["state"].items() for key in values}
        if not saved <= held:  # Optimizers create no state for a parameter without gradients: create all states anew.
            for optimizer in self.state.optimizers:
                optimizer.state.clear()
            result = _initialized(self.state)
        result["state"] = {
            name: values for name, values in result["state"].items() if any(f"{prefix}{name}.{key}" in saved for key in values)
        }
        return result

    def unpack(self) -> None:
        """Unpickle ``objects`` after ``dcp.load`` has filled them, and redistribute the values of ``per_rank``.

        Raises:
            CheckpointError: an object is missing, a function of ``redistribute`` raised, or a parameter group has parameters of
                saved groups with other options.
        """
        if self.state.optimizers:
            saved = _saved_groups({name: value for name, value in self.objects.items() if name.startswith(GROUPS)})
            self._groups = _with_saved_options(self._groups, saved)
        names = [name for name in self.manifest.objects if not name.startswith("per_rank.")]
        what = f"the pickle of {', '.join(names) or 'no objects'}"
        self._values = load_object(bytes_of(self.objects["objects"]), what, self.trust)
        wanted = {name for name in _object_names(self.state) if not name.startswith("per_rank.")}
        if not isinstance(self._values, dict) or not wanted <= self._values.keys():
            raise CheckpointError("the checkpoint is damaged: its pickled objects are not those that its manifest names")
        self._own: dict[str, Any] = {}
        for name in self.state.per_rank:
            sources = self._sources(name)
            own = self.objects["per_rank"]
            states = [
                load_object(bytes_of(own[str(source)][name]), f"per_rank.{name} of rank {source}", self.trust, "cpu")
                for source in sources
            ]
            function = self.redistribute.get(name)
            if self.manifest.world_size == self.ranks:
                self._own[name] = states[0]
            elif function is not None:
                with _names_user_code(f"the function that redistributes per_rank.{name}"):
                    self._own[name] = function(states)

    def apply(self) -> None:
        """Set the model, the optimizers, the scheduler, ``extra``, ``per_rank`` and the generators to the loaded values."""
        state, manifest = self.state, self.manifest
        options = StateDictOptions(strict=not self.left_out)
        set_model_state_dict(state.model, plain_state(self.tensors["model"]), options=options)
        if state.optimizers:
            self._load_optimizers(plain_state(self.tensors["optimizer"]["state"]))
        if state.scheduler is not None:
            with _names_user_code("scheduler.load_state_dict"):
                state.scheduler.load_state_dict(self._values["scheduler"])
        for name, value in self._values.items():
            if name.startswith("extra."):
                _put_value(state.extra, name.removeprefix("extra."), value, name)
        for name, value in self._own.items():
            _put_value(state.per_rank, name, value, f"per_rank.{name}")
        state.step, state.consumed_tokens, state.data_position = manifest.step, manifest.consumed_tokens, manifest.data_position
        (states,) = self.objects["rng"].values()
        set_rng(state.rng, states, manifest, self.rank)

    def _load_optimizers(self, states: Mapping[str, Any]) -> None:
        """Let each optimizer load its groups, and the states of their parameters. Without a saved state, one gets none."""
        state, groups = self.state, iter(self._groups)
        if any(isinstance(module, FullyShardedDataParallel) for module in state.model.modules()):  # Its states are converted.
            options = StateDictOptions(strict=False)
            found = {"state": dict(states), "param_groups": self._groups}
            set_optimizer_state_dict(state.model, state.optimizers, found, options=options)
            return
        # Not DCP's function: it finds the groups by their parameters, and knows no groups without parameters.
        for optimizer in state.optimizers:
            mine = [next(groups) for _ in optimizer.param_groups]
            numbers = {name: number for number, name in enumerate(name for group in mine for name in group["params"])}
            optimizer.load_state_dict(
                {
                    "state": {number: states[name] for name, number in numbers.items() if name in states},
                    "param_groups": [{**group, "params": [numbers[name] for name in group["params"]]} for group in mine],
                }
            )

    def forget(self) -> None:
        """Restore the optimizers' states from before the load."""
        self._before.restore()
        for optimizer in self._lost:
            optimizer.has_failed = True  # type: ignore[attr-defined]


def _saved_groups(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The parameter groups of a checkpoint, from their options by name: ``optimizer.param_groups.<number>.<option>``."""
    groups: dict[int, dict[str, Any]] = {}
    for name, value in values.items():
        number, *path, last = name.removeprefix(GROUPS).split(".")
        at = groups.setdefault(int(number), {})
        for key in path:  # An option that is a dict.
            at = at.setdefault(key, {})
        at[last] = value
    return [groups[number] for number in sorted(groups)]


def _with_saved_options(groups: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The parameter groups with the options of the saved groups that have their parameters.

    Groups without parameters get those of the saved groups without parameters, in order. A group of which nothing was saved
    keeps its own.

    Raises:
        CheckpointError: the parameters of one group were in groups with different options.
    """
    of_param = {name: number for number, group in enumerate(saved) for name in group["params"]}
    empty = iter([number for number, group in enumerate(saved) if not group["params"]])
    result = []
    for number, group in enumerate(groups):
        if group["params"]:
            sources = list(dict.fromkeys(of_param[name] for name in group["params"] if name in of_param))
        else:
            sources = list(itertools.islice(empty, 1))
        options = [{key: saved[each][key] for key in saved[each] if key not in _GROUP_KEYS} for each in sources]
        for source, other in zip(sources[1:], options[1:]):
            if different := [key for key in {**options[0], **other} if not _is_equal(options[0].get(key), other.get(key))]:
                raise CheckpointError(
                    f"parameter group {number} has parameters of the saved groups {sources[0]} and {source}, which differ in "
                    f"{', '.join(different)}: make the parameter groups of the run that was saved, load, then change them"
                )
        result.append({**group, **(options[0] if options else {})})
        for key, value in result[-1].items():
            if isinstance(value, torch.Tensor) and isinstance(group.get(key), torch.Tensor):
                result[-1][key] = value.to(group[key].device)
    return result


def _is_equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.equal(a, b)
    return bool(a == b)


def _placeholder(metadata: Metadata, name: str) -> Any:
    """What DCP fills: a tensor, or nothing yet in the place of an object."""
    return _empty_like(metadata, name) if isinstance(metadata.state_dict_metadata[name], TensorStorageMetadata) else None


def _put_value(held: dict[str, Any], name: str, value: Any, what: str) -> None:
    """Load ``value`` into ``held[name]`` if that has ``load_state_dict``; otherwise replace ``held[name]``."""
    if isinstance(held.get(name), Stateful):
        with _names_user_code(f"{what}.load_state_dict"):
            held[name].load_state_dict(value)
    else:
        held[name] = value


@contextmanager
def _names_user_code(what: str) -> Iterator[None]:
    """Turn an error of the user's code into a CheckpointError that names this code as ``what``."""
    try:
        yield
    except Exception as error:
        raise CheckpointError(f"{what} raised {type(error).__name__}: {error}") from error


def _empty_like(metadata: Metadata, name: str) -> torch.Tensor:
    stored = metadata.state_dict_metadata.get(name)
    if not isinstance(stored, TensorStorageMetadata):
        raise CheckpointError(f"the checkpoint holds no {name!r}")
    return torch.empty(stored.size, dtype=stored.properties.dtype, device="cpu")
