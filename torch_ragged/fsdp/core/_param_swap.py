"""Parameters that users replace (``load_state_dict(assign=True)``) or convert (``.to``): back into the group's buffer.

Nothing here communicates, but for a new value whose DTensor has other placements. Optimizers hold parameters as objects, so the
objects stay.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from torch_ragged.fsdp.core._fsdp_param import FSDPParam, keep_attributes, local_of, owner_of
from torch_ragged.fsdp.core._fsdp_param_group import FSDPParamGroup

__all__ = ["check_conversion", "convert", "is_whole", "load_converted", "load_replaced"]


def load_replaced(group: FSDPParamGroup) -> None:
    """Copy parameters that the user has replaced, as ``load_state_dict(assign=True)`` does, into the buffer.

    The old parameters are registered again, since an optimizer may hold them. If the group is on the meta device, the new
    parameters stay registered, and are copied when the user has replaced all parameters of the group.

    Raises:
        ValueError: a new parameter is no DTensor, or has another shape, dtype or device. Nothing is copied.
    """
    if group.is_unsharded:
        return
    if not group.has_shards:  # This rank has no elements to load.
        group.register()
        return
    replaced = group.replaced()
    if not replaced:
        return
    group.reshard()  # An all-gather in flight would bring the old values.
    with torch.no_grad():
        if group.is_meta:
            _load_if_all(group, replaced)
            return
        # Check all, then clone all, then copy all: they may be views of this buffer, in another order.
        values = [_replacement(group, index, group.orig_dtype) for index in replaced]
        for index, value, copy in zip(replaced, values, [value.clone() for value in values]):
            param = group.params[index]
            # Its memory may be another's, as after swap_tensors or ``.data =``: then the object is made a view of the buffer
            # again.
            if not group.shards.holds(local_of(param.sharded)):
                _put(group, index, param.sharded)
            param.sharded.copy_(copy)
            param.sharded.requires_grad_(value.requires_grad)
            _register_everywhere(param)


def _replacement(group: FSDPParamGroup, index: int, dtype: torch.dtype) -> DTensor:
    param = group.params[index]
    current = param.registered
    wanted = (param.distribution.shape, dtype, None if group.is_meta else group.sharded.flat.device)
    found = (getattr(current, "shape", None), getattr(current, "dtype", None), getattr(current, "device", None))
    other = param if current is None else owner_of(current) or param
    # The sharded form of another parameter, which is registered under its own name, too.
    if other is not param and (other.registered is other.sharded or other.registered is other.unsharded):
        raise ValueError(
            f"{param.fqn} was replaced by another parameter that fully_shard has sharded. This does not tie the two: tie "
            "parameters before fully_shard, in one group, or assign a copy"
        )
    if not isinstance(current, DTensor) or found[: 2 if group.is_meta else 3] != wanted[: 2 if group.is_meta else 3]:
        raise ValueError(
            f"{param.fqn} was replaced by {type(current).__name__} of {', '.join(map(str, found))}; expected a DTensor of "
            f"{', '.join(map(str, wanted))}. Load with load_state_dict(...), or assign such a DTensor. Cast or move a "
            "module before fully_shard, or cast or move a module that has all parameters of the group"
        )
    return current


def _load_if_all(group: FSDPParamGroup, replaced: list[int], dtype: torch.dtype | None = None) -> None:
    """If the user has replaced all parameters of the group, make new buffers and copy the new parameters into them.

    Args:
        dtype: the dtype of the new parameters; None: that of the old ones.
    """
    dtype = dtype or group.orig_dtype
    values = [_replacement(group, index, dtype) for index in replaced]
    # A buffer has one dtype and one device, so it is made when the last parameter is replaced.
    if len(values) < len(group.params) or any(value.is_meta for value in values):
        return
    # The new DTensors may have other placements, as those of another run. All ranks load the same ones, so all communicate.
    placements = [param.sharded.placements for param in group.params]  # type: ignore[attr-defined]
    locals_ = [local_of(value.redistribute(placements=wanted)) for value, wanted in zip(values, placements)]
    group.rebuild(_compute_device(group, locals_[0].device), dtype, locals_)
    for index, (param, value) in enumerate(zip(group.params, values)):
        param.set_sharded(value)  # type: ignore[arg-type]
        _put(group, index, param.sharded)
        _register_everywhere(param)


def _put(group: FSDPParamGroup, index: int, parameter: nn.Parameter) -> None:
    """Make the object ``parameter`` a view of the sharded buffer."""
    # Optimizers hold the parameter as an object. So the object stays, and its contents are swapped.
    inside = nn.Parameter(group.shards.dtensor(index, group.params[index].distribution), parameter.requires_grad)
    keep_attributes(parameter, inside)
    gradient, parameter.grad = parameter.grad, None  # It would be swapped, too.
    torch.utils.swap_tensors(parameter, inside)
    parameter.grad = gradient


def _register_everywhere(param: FSDPParam) -> None:
    for owner, name in param.registered_names:
        owner._parameters[name] = param.sharded


# -- conversions ---------------------------------------------------------------------------------------------------------


def check_conversion(group: FSDPParamGroup, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Raise if the group cannot have the dtype or device that ``function`` gives. ``Module.to`` and others apply it.

    Raises:
        ValueError: ``function`` moves parameters to another device than the mesh's (if offloaded: than the CPU), or to
            shared memory.
        RuntimeError: ``function`` changes the dtype, while there are gradients that are not in ``.grad`` yet; or on a rank
            without shards, as other ranks would not know it.
    """
    if not group.has_shards:
        # A rank outside of the mesh has no buffer to convert, and other ranks could not know that it has another dtype.
        probe = function(torch.empty(0, dtype=group.orig_dtype, device=group.params[0].sharded.device))
        if probe.dtype != group.orig_dtype:
            raise RuntimeError(
                f"{group.names} cannot become {probe.dtype} on rank {dist.get_rank()}, which is not in the mesh "
                f"{group.dp.mesh}: convert the module before fully_shard, or after reshard_to"
            )
        return
    # The function is opaque: call it on an empty tensor to see the device and dtype.
    device = group.sharded.flat.device
    probe = function(torch.empty(0, dtype=group.orig_dtype, device=device))
    if probe.device != device and not (group.is_meta and probe.device.type == group.home):
        offload = " and offload" if group.offloads_params else ""
        where = f" with a mesh on {group.dp.mesh.device_type}{offload}" if group.is_meta else ""
        raise ValueError(
            f"{group.names} is sharded in a buffer on {device}{where} and cannot move to {probe.device}: expected "
            f"{group.home}; move the module before fully_shard"
        )
    if probe.dtype.is_floating_point != group.orig_dtype.is_floating_point:
        raise ValueError(f"{group.names} is sharded in a buffer of {group.orig_dtype} and cannot become {probe.dtype}")
    if device.type == "cpu" and probe.is_shared():
        raise ValueError(f"{group.names} is sharded in a buffer and cannot be moved to shared memory")
    if probe.dtype != group.orig_dtype and group.shards.are_typed:
        raise ValueError(f"{group.names} is of a type with its own all-gather: convert it before fully_shard")
    if probe.dtype != group.orig_dtype and group.is_pending:
        raise RuntimeError(
            f"{group.names} has gradients that are not in .grad yet and would be lost in {probe.dtype}: convert the module "
            "after a backward that reduces them, or drop them with reset_iter_state()"
        )


def is_whole(group: FSDPParamGroup, modules: set[nn.Module]) -> bool:
    """Whether all parameters are in their buffer, and registered in ``modules`` only."""
    # Otherwise ``Module.to`` of one module would convert a buffer that others use, too.
    if group.replaced():
        return False
    return all(module in modules for param in group.params for module, _ in param.registered_names)


def convert(group: FSDPParamGroup, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Apply ``function`` to the parameters and their gradients.

    If the dtype changes, or parameters leave the meta device, new buffers are made. The parameters stay the same objects.
    """
    if not group.has_shards:
        return
    probe = function(torch.empty(0, dtype=group.orig_dtype, device=group.sharded.flat.device))
    with torch.no_grad():
        if (probe.dtype, probe.device) == (group.orig_dtype, group.sharded.flat.device):
            tensors = [param.sharded for param in group.params]
            view = group.view
            grads = [tensor.grad if view is None else view.reduced(tensor.grad) for tensor in tensors]
            tensors += [grad for grad in grads if grad is not None]  # As ``Module.to`` converts ``.grad``.
            for tensor, value in [(tensor, function(tensor)) for tensor in tensors]:
                if value is not tensor:
                    tensor.copy_(value)
            return
        # Before new buffers are made, which frees the old ones.
        values = None if group.is_meta else [function(local_of(param.sharded)) for param in group.params]
        if group.is_meta:
            group.shards.convert_meta(function)
        group.rebuild(_compute_device(group, probe.device), probe.dtype, values)
        for index, param in enumerate(group.params):
            # torch checks the dtype of a gradient that is set, so it is set last.
            gradient, param.sharded.grad = param.sharded.grad, None
            _put(group, index, param.sharded)
            if gradient is not None and gradient.dtype != param.sharded.grad_dtype:  # Otherwise the user has chosen it.
                gradient = function(gradient)
            param.sharded.grad = gradient


def load_converted(group: FSDPParamGroup) -> None:
    """:meth:`load_replaced`, also if all parameters have a new dtype. If only some have it, nothing is copied yet."""
    dtypes = {None if param.registered is None else param.registered.dtype for param in group.params}
    if group.is_unsharded or not group.has_shards or dtypes == {group.orig_dtype}:
        load_replaced(group)
    elif len(dtypes) == 1:
        with torch.no_grad():
            _load_if_all(group, list(range(len(group.params))), *dtypes)


def _compute_device(group: FSDPParamGroup, home: torch.device) -> torch.device:
    """The device of the computation, if the sharded parameters are on ``home``."""
    if not group.is_meta or home.type == "meta":
        return group.device
    device_type = group.dp.mesh.device_type
    if home.type == device_type:
        return home
    return torch.device(device_type, torch.accelerator.current_device_index())
