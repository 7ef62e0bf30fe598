"""Hook on ``torch/distributed/_state_dict_utils.py``: full state dicts that rank 0 broadcasts."""

from __future__ import annotations

import functools

import torch
from torch.distributed import _state_dict_utils as state_dict_utils
from torch.distributed.tensor import DTensor

from torch_ragged import _checkpoint
from torch_ragged._register._hook import CHECKPOINT, has, hook
from torch_ragged.placement_types import has_ragged


@hook(
    "_state_dict_utils._distribute_tensors",
    "it cuts a broadcast tensor into one box per rank",
    CHECKPOINT,
    lambda: has(state_dict_utils._distribute_tensors, "local_state_dict", "keys", "device", "pg"),
)
def _install_distribute_tensors() -> None:
    original = state_dict_utils._distribute_tensors

    @functools.wraps(original)
    def _distribute_tensors(local_state_dict, keys, device, pg=None):  # type: ignore[no-untyped-def]
        ours = [key for key in keys if _is_ragged_pair(local_state_dict.get(key))]
        for key in ours:
            tensor, full = local_state_dict[key]
            if tensor.is_meta:
                tensor = torch.empty_like(tensor, device=device)
            _checkpoint.copy_from_full(tensor, full)
            local_state_dict[key] = tensor
        original(local_state_dict, [key for key in keys if key not in ours], device, pg)

    state_dict_utils._distribute_tensors = _distribute_tensors


def _is_ragged_pair(value: object) -> bool:
    return isinstance(value, tuple) and isinstance(value[0], DTensor) and has_ragged(value[0].placements)
