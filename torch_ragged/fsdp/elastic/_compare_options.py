"""After a move, ranks compare the options of their optimizers: a scheduler of a rank that joined may set other ones.

It changes no option.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from torch_ragged._ranks.comparison import Comparison
from torch_ragged._ranks.groups import group_of
from torch_ragged._register._torch import backward_id, no_dispatch
from torch_ragged.tensor._local_tensor import coordinates_of

__all__ = ["compare_options"]

_COMPARED_EVERY = 64
_NUMBER_TYPES = (bool, int, float)
_ADVICE = (
    "A learning rate scheduler of a rank that has joined is at its start: pass schedulers to reshard_to as stateful, or let "
    "that rank load the state_dict() of another rank's scheduler"
)

_option_hooks: weakref.WeakKeyDictionary[Optimizer, RemovableHandle] = weakref.WeakKeyDictionary()
"""The comparison of each optimizer. The next move ends it, as its ranks may be others then."""


def compare_options(optimizer: Optimizer, mesh: DeviceMesh, parent: dist.ProcessGroup) -> None:
    """From now on, ranks of ``mesh`` compare the options of ``optimizer`` in its first 8 steps and in every 64th one.

    All ranks of ``mesh`` are in the group ``parent``.
    """
    if optimizer in _option_hooks:
        _option_hooks.pop(optimizer).remove()
    if mesh.get_coordinate() is None or mesh.size() == 1:
        return
    group = functools.partial(group_of, sorted(mesh.mesh.flatten().tolist()), "", parent)
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
