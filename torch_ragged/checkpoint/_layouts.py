"""Plain local tensors with layouts in a checkpoint: each rank writes and reads its boxes of the global tensor.

Nothing here communicates or copies a tensor. Models whose parameters are plain local tensors, as FlexShard's, say by layouts
what a rank holds; DTensors need none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor

from torch_ragged.checkpoint._errors import CheckpointError, listed
from torch_ragged.tensor._box_tensor import BoxTensor, with_layout
from torch_ragged.tensor._checkpoint import chunk_boxes, shard_at
from torch_ragged.tensor._global_layout import GlobalLayout, coverage_problem, global_layout_of
from torch_ragged.tensor._ownership import Box, row_major

__all__ = [
    "boxes_of",
    "held_boxes",
    "layouts_of_model",
    "name_in_checkpoint",
    "optimizer_with_layouts",
    "plain_state",
    "refuse_gaps",
    "relaid",
    "tensors_with_layouts",
]

_WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod")  # Parts of names, which DCP leaves out.


class _HeldTensor(NamedTuple):
    """What a rank holds of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[Box, ...]


def layouts_of_model(model: nn.Module, given: Mapping[str, Any]) -> dict[str, GlobalLayout]:
    """The layout of each parameter and buffer that has one, by its name in the checkpoint.

    Args:
        given: layouts by the names of parameters and buffers. The others are read from tensors that carry the four fields.

    Raises:
        ValueError: a layout is none, or names no tensor of the model.
    """
    tensors = {
        name_in_checkpoint(name): tensor
        for named in (model.named_parameters, model.named_buffers)
        for name, tensor in named(remove_duplicate=False)
    }
    layouts = {name_in_checkpoint(name): layout for name, layout in given.items()}
    unknown = [name for name in layouts if name not in tensors]
    if unknown:
        raise ValueError(f"TrainState.layouts names {unknown[0]}, which is no parameter or buffer of the model")
    found = {}
    for name, tensor in tensors.items():
        try:
            layout = GlobalLayout.of(layouts[name]) if name in layouts else global_layout_of(tensor)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name}: {error}") from error
        if layout is not None:
            found[name] = layout
    return found


def name_in_checkpoint(name: str) -> str:
    """The name of a parameter or buffer without the parts that wrappers of modules add, as DCP's state dicts have it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def tensors_with_layouts(values: Mapping[str, Any], layouts: Mapping[str, GlobalLayout]) -> dict[str, Any]:
    """The values, with the layout of each tensor that has one: by its name, or as its own four fields."""
    result: dict[str, Any] = {}
    for name, value in values.items():
        try:
            layout = layouts.get(name) or global_layout_of(value)
            result[name] = value if layout is None else with_layout(value, layout)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{name}: {error}") from error
    return result


def optimizer_with_layouts(state_dict: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """The optimizer's state dict, in which states of the shape of a parameter with a layout have this layout.

    Args:
        model: the model's state dict, with layouts.

    Raises:
        CheckpointError: a state has another shape, so that its elements cannot be told to belong to elements of the parameter.
    """
    states = dict(state_dict["state"])
    for name, values in states.items():
        param = model.get(name)
        if not isinstance(param, BoxTensor):
            continue
        states[name] = dict(values)
        for key, value in values.items():
            if not isinstance(value, torch.Tensor) or isinstance(value, DTensor) or key == "step":
                continue
            if value.shape == param.shape:
                states[name][key] = with_layout(value, param.global_layout)
            elif value.numel() > 1:
                raise CheckpointError(
                    f"the state {key} of {name} has shape {tuple(value.shape)}, and the local tensor with a layout "
                    f"{tuple(param.shape)}: only states of the parameter's shape can be saved by boxes"
                )
    return {**state_dict, "state": states}


def boxes_of(values: Any, prefix: str = "") -> dict[str, _HeldTensor]:
    """What this rank holds of each tensor with a layout in a nested state dict, by its name in the checkpoint."""
    if isinstance(values, BoxTensor):
        return {prefix: _HeldTensor(values.global_shape, values.dtype, values.global_layout.boxes(values.shape))}
    found = {}
    for name, value in values.items() if isinstance(values, Mapping) else ():
        found.update(boxes_of(value, f"{prefix}.{name}" if prefix else str(name)))
    return found


def refuse_gaps(held: Sequence[Mapping[str, _HeldTensor]], what: str) -> None:
    """Raise if the boxes of all ranks are not whole tensors. Every rank calls it with the same arguments.

    Args:
        held: :func:`boxes_of` of each rank.

    Raises:
        CheckpointError: elements are left out or in several different boxes, or ranks have other shapes or dtypes.
    """
    problems = []
    for name in dict.fromkeys(name for each in held for name in each):
        ranks = {rank: each[name] for rank, each in enumerate(held) if name in each}
        kinds = {(one.shape, one.dtype): rank for rank, one in reversed(ranks.items())}
        if len(kinds) > 1:
            (one, here), (other, there) = list(kinds.items())[:2]
            problems.append(f"{name} has shape {one[0]} and {one[1]} on rank {here}, {other[0]} and {other[1]} on rank {there}")
        elif (problem := coverage_problem(next(iter(kinds))[0], {rank: one.boxes for rank, one in ranks.items()})) is not None:
            problems.append(f"{name}: {problem}")
    if problems:
        raise CheckpointError(f"{what}: the layouts of the ranks are not of whole tensors:{listed(problems)}")


def held_boxes(name: str, tensor: torch.Tensor) -> list[tuple[Box, torch.Tensor]]:
    """The boxes that this rank holds of a tensor under any placements or with a layout, each with its view of local memory.

    Raises:
        TypeError: the local tensor has a type without such views, or several boxes and strides that are not contiguous.
    """
    local = tensor.detach()
    if isinstance(tensor, DTensor):
        boxes, local = chunk_boxes(tensor), local.to_local()  # type: ignore[attr-defined]
    elif isinstance(tensor, BoxTensor):
        boxes = tensor._boxes()
    else:
        boxes = (Box((0,) * tensor.ndim, tuple(tensor.shape), 0, row_major(tensor.shape)),)
    if len(boxes) == 1 and boxes[0].sizes == tuple(local.shape):
        return [(boxes[0], local)]
    if isinstance(tensor, DTensor) and not local.is_contiguous():
        raise TypeError(f"{name} has {len(boxes)} boxes in a local tensor with strides {local.stride()}: make it contiguous")
    return [(box, shard_at(MetadataIndex(name, torch.Size(box.offsets)), boxes, local, tensor.shape)) for box in boxes]


def relaid(copied: Any, original: Any) -> Any:
    """A copy of a nested state dict, whose tensors have the layouts of the ``original``: copies are plain tensors."""
    if isinstance(original, BoxTensor):
        return with_layout(copied, original.global_layout)
    if isinstance(original, DTensor):
        return DTensor(copied, original._spec, requires_grad=False)  # type: ignore[call-arg]
    if isinstance(original, dict):
        return {name: relaid(copied[name], value) for name, value in original.items()}
    return copied


def plain_state(values: Any, with_dtensors: bool = True) -> Any:
    """A nested state dict with plain local tensors, on the same memory.

    Args:
        with_dtensors: False: the local tensors of DTensors, too. A deep copy of a DTensor has a mesh of its own, which the
            caches of shardings keep.
    """
    if isinstance(values, BoxTensor):
        return values.detach()
    if isinstance(values, DTensor) and not with_dtensors:
        return values._local_tensor
    return {name: plain_state(value, with_dtensors) for name, value in values.items()} if isinstance(values, dict) else values
