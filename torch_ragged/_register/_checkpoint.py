"""Hooks on checkpoints: ``torch/distributed/checkpoint``, ``_state_dict_utils.py``, and the checkpoint methods of DTensor."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import _state_dict_utils as state_dict_utils
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.tensor import DTensor

from torch_ragged._register._hook import CHECKPOINT, PROTOCOL, extend_in_place, has, hook
from torch_ragged.tensor._hf_storage import item_rounds_of, write_rounds
from torch_ragged.tensor._placement_extension import PlacementExtension, extension_of
from torch_ragged.tensor._plain_ops import all_ops


@hook(
    "DTensor.data_ptr",
    "around a view into a buffer it returns the view's offset, which copy.deepcopy takes for separate memory",
    CHECKPOINT,
    lambda: callable(DTensor.data_ptr),
)
def _install_data_ptr() -> None:
    original = DTensor.data_ptr

    @functools.wraps(original)
    def data_ptr(self):  # type: ignore[no-untyped-def]
        # Gradients of a plan are views of the buckets in which they were reduced.
        return original(self) if extension_of(self.placements) is None and not all_ops.runs() else 0

    DTensor.data_ptr = data_ptr  # type: ignore[method-assign]


@hook(
    "DTensor.__create_write_items__, __create_chunk_list__, __get_tensor_shard__",
    "several chunks per rank in checkpoints",
    PROTOCOL,
    lambda: all(hasattr(DTensor, f"__{n}__") for n in ("create_write_items", "create_chunk_list", "get_tensor_shard")),
)
def _install_checkpoint() -> None:
    def extend(name: str, own: Callable[..., Any]) -> None:
        original = getattr(DTensor, name)

        @functools.wraps(original)
        def method(self, *args):  # type: ignore[no-untyped-def]
            extension = extension_of(self.placements)
            if extension is None:
                return original(self, *args)
            self._raise_if_contains_partial_placements()
            return own(extension.checkpoint_extension(), self, *args)

        setattr(DTensor, name, method)

    extend("__create_write_items__", lambda own, _, fqn, tensor: own.create_write_items(fqn, tensor))
    extend("__create_chunk_list__", lambda own, tensor: own.create_chunk_list(tensor))
    extend("__get_tensor_shard__", lambda own, tensor, index: own.get_tensor_shard(tensor, index))


@hook(
    "_state_dict_utils._distribute_tensors",
    "it would cut a broadcast tensor into one box per rank",
    PROTOCOL,
    lambda: has(state_dict_utils._distribute_tensors, "local_state_dict", "keys", "device", "pg"),
)
def _install_distribute_tensors() -> None:
    original = state_dict_utils._distribute_tensors

    @functools.wraps(original)
    def _distribute_tensors(local_state_dict, keys, device, pg=None):  # type: ignore[no-untyped-def]
        others = []
        for key in keys:
            value = local_state_dict.get(key)
            extension = _extension_of_pair(value)
            if extension is None:
                others.append(key)
            else:
                local_state_dict[key] = extension.checkpoint_extension().from_full(*value, device)
        original(local_state_dict, others, device, pg)

    state_dict_utils._distribute_tensors = _distribute_tensors


@hook(
    "_state_dict_utils._broadcast_tensors, _distribute_state_dict",
    "a full tensor of another shape than a ragged parameter or state is an error on all ranks, before anything is copied",
    CHECKPOINT,
    lambda: (
        has(state_dict_utils._broadcast_tensors, "full_state_dict", "local_state_dict", "keys", "device", "pg")
        and has(state_dict_utils._distribute_state_dict, "full_state_dict", "local_state_dict", "device", "pg")
    ),
)
def _install_check_of_shapes() -> None:
    broadcast = state_dict_utils._broadcast_tensors

    @functools.wraps(broadcast)
    def _broadcast_tensors(full_state_dict, local_state_dict, keys, device, pg=None):  # type: ignore[no-untyped-def]
        # All ranks know all shapes of rank 0. So they raise together, at the first tensor, before it is broadcast.
        tensors = (key for key, value in full_state_dict.items() if hasattr(value, "dtype") and _shape_of(value))
        if next(tensors, None) in keys:
            _check_shapes(full_state_dict, local_state_dict)
        broadcast(full_state_dict, local_state_dict, keys, device, pg)

    state_dict_utils._broadcast_tensors = _broadcast_tensors

    def checked(original: Callable[..., None]) -> Callable[..., None]:
        def _distribute_state_dict(full_state_dict, local_state_dict, device, pg=None):  # type: ignore[no-untyped-def]
            _check_shapes(full_state_dict, local_state_dict)
            original(full_state_dict, local_state_dict, device, pg)

        return _distribute_state_dict

    extend_in_place(
        state_dict_utils._distribute_state_dict,
        "_torch_ragged_has_ragged(local_state_dict)",
        checked,
        _torch_ragged_has_ragged=_has_ragged,
    )


def _has_ragged(state_dict: dict[str, Any]) -> bool:
    return any(isinstance(value, DTensor) and extension_of(value.placements) is not None for value in state_dict.values())


def _shape_of(value: Any) -> tuple[int, ...]:
    """The shape of a tensor, or of what rank 0 has told of one."""
    return tuple(value.shape if isinstance(value, torch.Tensor) else value.size)


def _check_shapes(full: dict[str, Any], local: dict[str, Any]) -> None:
    """Raise if a tensor of ``full`` has another shape than the DTensor of this name in ``local``, which has ragged ones."""
    if not _has_ragged(local):
        return
    wrong = [
        f"size mismatch for {key}: the full state dict has shape {_shape_of(full[key])}, the model has {tuple(here.shape)}"
        for key, here in local.items()
        if isinstance(here, DTensor) and hasattr(full.get(key), "dtype") and _shape_of(full[key]) != tuple(here.shape)
    ]
    if wrong:
        raise RuntimeError(
            "Error(s) in loading a full state dict, of which nothing was loaded:\n\t"
            + "\n\t".join(wrong)
            + "\nGive tensors of the model's shapes, such as a vocabulary that is padded alike, or change the model"
        )


def _extension_of_pair(value: object) -> PlacementExtension | None:
    return extension_of(value[0].placements) if isinstance(value, tuple) and isinstance(value[0], DTensor) else None


@hook(
    "HuggingFaceStorageWriter.prepare_global_plan, write_data",
    "a safetensors file holds one chunk of a tensor, and one tensor of a memory: a rank may have several",
    CHECKPOINT,
    lambda: (
        has(HuggingFaceStorageWriter.prepare_global_plan, "self", "plans")
        and has(HuggingFaceStorageWriter.write_data, "self", "plan", "planner")
    ),
)
def _install_hugging_face_writer() -> None:
    prepare, write = HuggingFaceStorageWriter.prepare_global_plan, HuggingFaceStorageWriter.write_data

    @functools.wraps(prepare)
    def prepare_global_plan(self, plans):  # type: ignore[no-untyped-def]
        prepared = prepare(self, plans)
        return [dataclasses.replace(p, storage_data={**p.storage_data, "shards": len(plans)}) for p in prepared]

    @functools.wraps(write)
    def write_data(self, plan, planner):  # type: ignore[no-untyped-def]
        rounds = item_rounds_of(plan, planner)
        return write(self, plan, planner) if len(rounds) < 2 else write_rounds(self, plan, planner, rounds)

    HuggingFaceStorageWriter.prepare_global_plan = prepare_global_plan  # type: ignore[method-assign]
    HuggingFaceStorageWriter.write_data = write_data  # type: ignore[method-assign]
