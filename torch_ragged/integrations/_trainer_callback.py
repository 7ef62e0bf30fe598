"""The ``TrainerCallback`` of ``checkpoint_callback``. This module imports transformers; it never wraps or shards a model."""

from __future__ import annotations

import random
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from torch_ragged import checkpoint
from torch_ragged.fsdp import FSDPModule

__all__ = ["CheckpointCallback"]

_FOLDER = "torch_ragged"


class CheckpointCallback(TrainerCallback, ExportableState):  # type: ignore[misc]
    """See :func:`torch_ragged.integrations.transformers.checkpoint_callback`.

    A callback is not told which folder the Trainer resumes from. So each run has a name, which is in ``trainer_state.json`` and
    in the manifest of each checkpoint: if the two differ, the folder is another one's.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = folder
        self.run: str | None = None
        self._set_rng: Callable[[], None] | None = None

    def state(self) -> dict[str, Any]:
        """For ``trainer_state.json``."""
        return {"args": {"folder": None}, "attributes": {"run": self.run}}

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if not getattr(model, "_is_distributed_loading_by_transformers", False) or not isinstance(model, FSDPModule):
            raise ValueError(
                f"checkpoint_callback is for models of torch_ragged.integrations.transformers.from_pretrained, got "
                f"{type(model).__name__}: if accelerate shards the model, leave the callback out, because Trainer saves then"
            )
        model.register_load_state_dict_pre_hook(_distribute_state)  # type: ignore[attr-defined]

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        resumed = _run_of(state)
        self.run = _same_on_all_ranks(uuid.uuid4().hex)
        if state.global_step:
            folder = Path(self.folder or Path(args.output_dir) / f"checkpoint-{state.global_step}") / _FOLDER
            _check_saved(folder, resumed, state.global_step)
            checkpoint.load(folder, _train_state(objects))
            if state.epoch != int(state.epoch) and not args.ignore_data_skip:
                self._set_rng = _rng_setter()

    def on_step_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        # Trainer has skipped the batches of before, which draws random numbers. It sets its own states here, too.
        if self._set_rng is not None:
            self._set_rng()
            self._set_rng = None

    def on_save(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}" / _FOLDER
        train_state = _train_state(objects)
        train_state.step, train_state.data_position = state.global_step, {"run": self.run}
        checkpoint.save(folder, train_state)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        # Trainer has loaded the weights that save_pretrained wrote, under the checkpoint's names. Ours have the model's.
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            checkpoint.load(Path(state.best_model_checkpoint) / _FOLDER, checkpoint.TrainState(model))


def _train_state(objects: dict[str, Any]) -> checkpoint.TrainState:
    optimizer = objects["optimizer"]
    optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it.
    return checkpoint.TrainState(objects["model"], optimizer, objects["lr_scheduler"])


def _run_of(state: Any) -> str | None:
    """The name of the run that wrote ``trainer_state.json``."""
    saved = state.stateful_callbacks.get(CheckpointCallback.__name__, {})
    return saved.get("attributes", {}).get("run") if isinstance(saved, dict) else None


def _check_saved(folder: Path, run: str | None, step: int) -> None:
    """Check that ``folder`` is what the callback has saved in the checkpoint that Trainer resumes.

    Raises:
        CheckpointError: it is not. Each rank reads the same files, so each rank raises.
    """
    found = checkpoint.latest(folder)
    if found is None or run is None:
        raise checkpoint.CheckpointError(
            f"Trainer resumes at step {step}, but {folder} is no checkpoint of checkpoint_callback: resume from one that was "
            "saved with the callback; if it is not in output_dir, pass checkpoint_callback(folder=...)"
        )
    manifest = checkpoint.read_manifest(found)
    if (manifest.step, manifest.data_position) != (step, {"run": run}):
        raise checkpoint.CheckpointError(
            f"Trainer resumes at step {step} of the run {run}, but {found} is step {manifest.step} of "
            f"{manifest.data_position}: pass the folder that Trainer resumes from as checkpoint_callback(folder=...)"
        )


def _same_on_all_ranks(value: str) -> str:
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def _distribute_state(model: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before ``model.load_state_dict``: plain tensors, which each rank has whole, become shards. No communication."""
    for name, param in model.named_parameters(prefix.removesuffix("."), remove_duplicate=False):
        value = state_dict.get(name)
        if isinstance(param, DTensor) and isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
            state_dict[name] = distribute_tensor(value, param.device_mesh, param.placements, src_data_rank=None)


def _rng_setter() -> Callable[[], None]:
    """A function that sets the random states to what they are now."""
    devices = torch.get_device_module()
    accelerator = devices.get_rng_state() if torch.accelerator.is_available() else None
    numpy = sys.modules.get("numpy")
    states = random.getstate(), torch.get_rng_state(), numpy and numpy.random.get_state()

    def set_states() -> None:
        random.setstate(states[0])
        torch.set_rng_state(states[1])
        if numpy is not None:
            numpy.random.set_state(states[2])
        if accelerator is not None:
            devices.set_rng_state(accelerator)

    return set_states
