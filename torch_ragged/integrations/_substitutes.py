"""What :func:`install` replaces in programs beside ``fully_shard``: names of theirs that know FSDP2's shards only.

No program is imported here: a substitute is made from the original, when the program is loaded.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torch_ragged import owned_boxes
from torch_ragged.fsdp import fully_shard
from torch_ragged.integrations._lazy_tensor import LazyTensor
from torch_ragged.tensor._cut_placement import has_flat
from torch_ragged.tensor._hf_storage import item_rounds_of, write_rounds

__all__ = ["SUBSTITUTES", "is_ragged"]


def is_ragged(tensor: Any) -> bool:
    """Whether ``tensor`` is a DTensor with a ragged placement."""
    return isinstance(tensor, DTensor) and has_flat(tensor.placements)


def _shard_operation(original: Any) -> Any:
    """``DtensorShardOperation``, by which transformers and PEFT cut a whole tensor to the shard of a parameter."""

    class RaggedShardOperation(original):
        def __init__(self, param: DTensor) -> None:
            self._ragged = param if is_ragged(param) else None
            if self._ragged is None:
                super().__init__(param)

        def shard_tensor(
            self, source: Any, tensor_idx: int | None = None, device: Any = None, dtype: torch.dtype | None = None
        ) -> Any:
            if self._ragged is None:
                return super().shard_tensor(source, tensor_idx=tensor_idx, device=device, dtype=dtype)
            whole = LazyTensor.of(source, dtype)
            if tensor_idx is not None or whole.shape != self._ragged.shape:
                raise ValueError(
                    f"transformers converts a checkpoint tensor of shape {tuple(whole.shape)} to a ragged parameter of shape "
                    f"{tuple(self._ragged.shape)}, for which it must be whole: load the model by "
                    "torch_ragged.integrations.transformers.from_pretrained"
                )
            return _cut(whole, self._ragged, device)

    return RaggedShardOperation


def _cut(whole: LazyTensor, param: DTensor, device: Any) -> torch.Tensor:
    """The part of ``whole`` that this rank holds of ``param``, flat. Nothing else is read."""
    boxes = owned_boxes(param)
    nothing = whole.read([0] * param.ndim, [0] * param.ndim) if param.ndim else whole.read((), ())
    flat = nothing.new_empty(sum(box.numel for box in boxes), device=device)
    for box in boxes:
        flat.as_strided(box.sizes, box.local_strides, box.local_offset).copy_(whole.read(box.offsets, box.sizes))
    return flat


def _writer(original: Any) -> Any:
    """NeMo AutoModel's copy of the safetensors writer, whose files have one chunk of a tensor: ranks write several files."""

    class RaggedStorageWriter(original):
        def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
            prepared = super().prepare_global_plan(plans)
            return [dataclasses.replace(p, storage_data={**p.storage_data, "shards": len(plans)}) for p in prepared]

        def write_data(self, plan: Any, planner: Any) -> Any:
            rounds = item_rounds_of(plan, planner)
            return super().write_data(plan, planner) if len(rounds) < 2 else write_rounds(self, plan, planner, rounds)

        def __reduce__(self) -> Any:  # An asynchronous save sends the writer to another process.
            return _restored_writer, (original.__module__, original.__name__, vars(self))

    return RaggedStorageWriter


def _restored_writer(module: str, name: str, attributes: dict[str, Any]) -> Any:
    made = object.__new__(_writer(getattr(importlib.import_module(module), name)))
    made.__dict__.update(attributes)
    return made


def _sharded_by_any(original: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """NeMo AutoModel's question whether a module is sharded already, by a private function of torch."""

    def has_fsdp_state(module: Any) -> bool:
        return original(module) or fully_shard.state(module) is not None  # type: ignore[attr-defined]

    return has_fsdp_state


def _features(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """PEFT's sizes of an adapter: of a mesh with replicas, it takes those of the local tensor, which here is flat."""

    def _get_in_out_features(module: Any) -> Any:
        if isinstance(module, torch.nn.Linear) and is_ragged(module.weight):
            return module.in_features, module.out_features
        return original(module)

    return _get_in_out_features


SUBSTITUTES: dict[tuple[str, str], Callable[[Any], Any]] = {
    ("transformers.distributed.sharding_utils", "DtensorShardOperation"): _shard_operation,
    ("peft.tuners.tuners_utils", "_get_in_out_features"): _features,
    ("nemo_automodel.components.checkpoint._backports.hf_storage", "_HuggingFaceStorageWriter"): _writer,
    ("nemo_automodel.components.models.deepseek_v4.fsdp", "_has_fsdp_state"): _sharded_by_any,
    ("nemo_automodel.components.models.diffusion_gemma.fsdp", "_has_fsdp_state"): _sharded_by_any,
}
"""The module and the name of an original, and the function that makes its substitute."""
