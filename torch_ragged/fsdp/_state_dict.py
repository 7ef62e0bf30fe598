"""``load_state_dict`` of a sharded model: before torch copies, check all values on all ranks, and cut plain full tensors."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Optional

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.overrides import is_tensor_like

from torch_ragged._ranks.agreement import agree
from torch_ragged._ranks.groups import device_of, groups_of
from torch_ragged._ranks.peers import PeerError
from torch_ragged._register._torch import dtensor_like, is_wrapper, waited
from torch_ragged.fsdp.core._fsdp_param import FSDPParam, has_extension, local_of
from torch_ragged.fsdp.core._fsdp_param_group import FSDPParamGroup
from torch_ragged.fsdp.core._fsdp_state import state_of
from torch_ragged.fsdp.core._param_swap import check_conversion, convert
from torch_ragged.tensor._redistribute import broadcast_local

__all__ = ["before_load", "take_parts"]


_WRAPPER = "_checkpoint_wrapped_module."
"""A part of parameters' names that state dicts leave out: torch's CheckpointWrapper adds it when its own values are loaded."""

_ADVICE = (
    "give load_state_dict the same names on all ranks. If only rank 0 has the state dict, call, on all ranks, "
    "torch.distributed.checkpoint.state_dict.set_model_state_dict(model, state_dict, "
    "options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))"
)

_checked: weakref.WeakKeyDictionary[nn.Module, list[str]] = weakref.WeakKeyDictionary()
"""By module, the last ``load_state_dict`` that has checked its values: each call has its own list of messages."""

_Conversion = Callable[[torch.Tensor], torch.Tensor]


class _Entry(NamedTuple):
    """A sharded parameter and its value in the state dict; None if that has none."""

    key: str
    value: Any
    param: FSDPParam
    group: FSDPParamGroup


def before_load(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], strict: bool, *lists: list[str]
) -> None:
    """Pre-hook of a module that ``fully_shard`` was called on: check the values of all sharded parameters under it.

    The outermost such module of a ``load_state_dict`` does it for those inside. If all values are DTensors, there is no
    communication. Otherwise, ranks agree by one all-reduce of 24 bytes per mesh dimension. With ``assign=True``, a group gets
    the dtype of the state dict, and memory if it is on the meta device. A value that does not fit its parameter is a
    RuntimeError, as in ``nn.Module``, and values for different parameters on different ranks are a ValueError.
    """
    messages = lists[-1]
    if _checked.get(module) is messages:  # The module around it has checked these values.
        return
    entries: list[_Entry] = []
    groups: list[FSDPParamGroup] = []
    conversions: dict[FSDPParamGroup, _Conversion] = {}
    problem: Optional[Exception] = None
    try:
        for each in module.modules():
            if (state := state_of(each)) is None:
                continue
            _checked[each] = messages  # Those inside need not check again.
            for group in state.groups:
                groups.append(group)
                if group.gradient_user is not None:  # It may write to parameters, after a backward that raised.
                    group.gradient_user.wait()
            state.reshard()  # Not its groups alone: the state knows which all-gathers were issued ahead of use.
        # A rank that raises here still agrees below: the others wait for it there.
        entries = list(_entries(module, groups, state_dict, prefix))
        conversions = _check(module, entries, metadata.get("assign_to_params_buffers", False))
    except Exception as error:
        problem = error
    if problem is not None or not all(isinstance(entry.value, DTensor) for entry in entries):
        _agree(entries, problem)
    # After all ranks have agreed: a conversion frees the old buffers.
    for group, conversion in conversions.items():
        convert(group, conversion)


def take_parts(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Pre-hook of a module with sharded parameters: replace plain full tensors by DTensors of this rank's part."""
    # It runs after the hooks that the module had before ``fully_shard``, which may rename or make values.
    for name, param in module._parameters.items():
        value = state_dict.get(f"{prefix}{name}")
        if isinstance(param, DTensor) and _is_whole(value, param.shape) and _is_plain(value, param):
            state_dict[f"{prefix}{name}"] = _part(value, param)


def _entries(module: nn.Module, groups: list[FSDPParamGroup], state_dict: dict[str, Any], prefix: str) -> Iterator[_Entry]:
    """Each parameter of ``groups`` under ``module``, by each of its names."""
    owners = {pair: (param, group) for group in groups for param in group.params for pair in param.registered_names}
    for path, each in module.named_modules(remove_duplicate=False):
        for name in each._parameters:
            if (each, name) in owners:
                inner = f"{path}.{name}" if path else name
                key = f"{prefix}{inner}"
                key = key if key in state_dict else f"{prefix}{inner.replace(_WRAPPER, '')}"
                yield _Entry(key, state_dict.get(key), *owners[each, name])


def _agree(entries: list[_Entry], problem: Optional[Exception]) -> None:
    """Raise on all ranks if one has a problem, or if ranks have values for different parameters."""
    claims: dict[DeviceMesh, list[str]] = {}
    for entry in entries:
        # Not the values: they differ, as parts of a DTensor do. What is compared decides which rank communicates.
        kind = "no value" if entry.value is None else "a DTensor" if isinstance(entry.value, DTensor) else "a full tensor"
        claims.setdefault(entry.param.sharded.device_mesh, []).append(f"{kind} for {entry.key}")  # type: ignore[attr-defined]
    # From small meshes to large ones: what the ranks of a small one find reaches those that only share the large one.
    for mesh in sorted(claims, key=DeviceMesh.size):
        try:
            agree(groups_of(mesh), device_of(mesh), "load_state_dict", "\n".join(claims[mesh]), problem, _ADVICE)
        except PeerError:
            raise
        except Exception as error:
            problem = error
    if problem is not None:
        raise problem


def _check(module: nn.Module, entries: list[_Entry], assigns: bool) -> dict[FSDPParamGroup, _Conversion]:
    problems: list[str] = []
    groups: dict[FSDPParamGroup, dict[int, _Entry]] = {}
    for entry in entries:
        if entry.value is None:
            continue
        try:
            _check_value(entry)
            groups.setdefault(entry.group, {})[id(entry.param)] = entry
        except _Refused as error:
            problems.append(str(error))
    conversions = {}
    for group, of_group in groups.items() if assigns and not problems else ():
        try:
            if (conversion := _conversion(group, list(of_group.values()))) is not None:
                conversions[group] = conversion
        except _Refused as error:
            problems.append(str(error))
    if problems:
        raise RuntimeError(f"Error(s) in loading state_dict for {type(module).__name__}:\n\t" + "\n\t".join(problems))
    return conversions


class _Refused(RuntimeError):
    """A value does not fit its parameter."""


def _check_value(entry: _Entry) -> None:
    key, value, sharded = entry.key, entry.value, entry.param.sharded
    if not is_tensor_like(value):
        raise _Refused(
            f'While copying the parameter named "{key}", expected torch.Tensor or Tensor-like object from checkpoint but '
            f"received {type(value)}"
        )
    if not _is_whole(value, sharded.shape):
        raise _Refused(
            f"size mismatch for {key}: copying a param with shape {value.shape} from checkpoint, the shape in current model is "
            f"{sharded.shape}."
        )
    if value.is_meta and not sharded.is_meta:
        raise _Refused(f"{key} is on the meta device in the state dict, and has no values there: give a tensor with values")
    if isinstance(value, DTensor):
        return
    if not _is_plain(value, sharded):
        raise _Refused(
            f"{key} is a {type(value).__name__} in the state dict, which cannot be cut: give a plain full tensor, or a DTensor "
            f"placed as {sharded.placements}"  # type: ignore[attr-defined]
        )
    if has_extension(sharded):
        try:
            _part(value, sharded)  # type: ignore[arg-type]
        except Exception as error:  # Any code of the type.
            raise _Refused(
                f"{key} is a {type(local_of(sharded)).__name__} with its own all-gather, which takes no {type(value).__name__} "
                f"({type(error).__name__}: {error}): give a DTensor placed as {sharded.placements}"  # type: ignore[attr-defined]
            ) from error


def _conversion(group: FSDPParamGroup, entries: list[_Entry]) -> Optional[_Conversion]:
    """How ``group`` must be converted before the values of ``entries`` are assigned; None: not at all."""
    if group.shards.are_typed or not group.dp.is_member:
        return None
    # A buffer has one dtype, and is allocated as a whole.
    is_whole = len(entries) == len(group.params) and all(param.registered is param.sharded for param in group.params)
    dtypes = {entry.value.dtype: entry.key for entry in entries}
    others = [dtype for dtype in dtypes if dtype != group.orig_dtype]
    if others and (len(dtypes) > 1 or not is_whole):
        raise _Refused(
            f"{dtypes[others[0]]} is {others[0]} in the state dict and {group.orig_dtype} in the model: with assign=True, all "
            f"{len(group.params)} parameters of its group change their dtype together. Load without assign=True, which casts, "
            "or convert the state dict or the model first"
        )
    (dtype,) = dtypes
    # A group on the meta device of which values are missing stays there: its parameters are loaded in several calls.
    if group.is_meta and is_whole and not any(entry.value.is_meta for entry in entries):
        # As FSDP2 does with assign=True: values on another device are copied to the mesh's.
        home = torch.device("cpu") if group.offloads_params else device_of(group.dp.mesh)
        conversion: _Conversion = functools.partial(torch.empty_like, dtype=dtype, device=home)
    elif others:
        conversion = functools.partial(torch.Tensor.to, dtype=dtype)
    else:
        return None
    try:
        check_conversion(group, conversion)
    except (RuntimeError, ValueError) as error:
        raise _Refused(str(error)) from error
    return conversion


def _is_whole(value: Any, shape: torch.Size) -> bool:
    """Whether ``value`` is a tensor of ``shape``. As in ``nn.Module``, a 0-D parameter also takes one element in 1-D."""
    return isinstance(value, torch.Tensor) and (value.shape == shape or (not shape and tuple(value.shape) == (1,)))


def _is_plain(value: torch.Tensor, param: torch.Tensor) -> bool:
    """Whether this rank's part can be cut from ``value``; a DTensor is cut already."""
    return not isinstance(value, DTensor) and (has_extension(param) or not is_wrapper(waited(value)))


@torch.no_grad()
def _part(value: torch.Tensor, param: DTensor) -> DTensor:
    """A DTensor as ``param``, with this rank's elements of the full tensor ``value``. No communication."""
    whole, mine, mesh = waited(value.detach()), local_of(param), param.device_mesh
    whole = whole if whole.shape == param.shape else whole.view(param.shape)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return dtensor_like(torch.empty_like(mine), param)  # This rank is not in the mesh, and has no part.
    if is_wrapper(whole):
        (dim,) = [dim for dim, placement in enumerate(param.placements) if placement.is_shard()]
        # A type of its own has chunk() at least: FSDP2 cuts it so.
        part = torch.chunk(whole, mesh.size(dim))[coordinate[dim]]
    else:
        part = broadcast_local(whole, mesh, param.shape, param.placements)
    if has_extension(param):  # These are the operations that FSDP2 calls, and types may have no other ones.
        own = mine.new_zeros(mine.size())
        own.copy_(part)
        return dtensor_like(own, param)
    # On the meta device the values are kept: torch warns that they are not copied, or assigns them.
    return dtensor_like(part.to(part.device if param.is_meta else mine.device, param.dtype), param)
