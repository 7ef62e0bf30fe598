"""Values that a script reads: ``item()``, ``tolist()``, ``numpy()`` and formats of DTensors give those of a single device.

It must not change a tensor. A read is a collective, unless the tensor is replicated, and the errors of all ranks say so.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import _are_we_tracing
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from torch_ragged._ranks.agreement import agree
from torch_ragged._ranks.groups import device_of_messages, group_of
from torch_ragged._ranks.peers import peers_named
from torch_ragged._ranks.standstill import announce

__all__ = ["compare_reads", "meet", "methods_of_one_device", "read_item"]

_flat_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[DeviceMesh, dist.ProcessGroup]] = weakref.WeakKeyDictionary()
"""Of each default group: by mesh, a process group that carries nothing but the comparisons of reads."""


def compare_reads(mesh: DeviceMesh) -> None:
    """From now on, ranks of ``mesh`` meet before they read a tensor on it. All of them call this; it makes a process group.

    Without this, ``if rank == 0: loss.item()`` would add the summand of rank 0 to what another rank sends in its next
    collective: both are messages of one group. In a group of their own, reads match reads only, and a rank that waits there
    alone is found.
    """
    world = dist.group.WORLD
    ranks = sorted(mesh.mesh.flatten().tolist())
    if world is None or len(ranks) == 1 or mesh.get_coordinate() is None or dist.get_backend(mesh.get_group(0)) == "fake":
        return
    announce()
    # On several dimensions, ranks have different groups of one of them, and a name must be equal on all ranks.
    _flat_groups.setdefault(world, {})[mesh] = group_of(ranks, "reads", mesh.get_group(0) if mesh.ndim == 1 else None)


def read_item(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``item()``, for the dispatcher: also ``float(tensor)``, ``if tensor:`` and ``range(tensor)``."""
    tensor = args[0]
    # Under torch.compile, what torch would read.
    return op(tensor._local_tensor if _are_we_tracing() or _is_replicated(tensor) else _whole(tensor, "item()"))


def methods_of_one_device() -> dict[str, Any]:
    """Methods for DTensor in place of those of Tensor.

    ``tolist`` and the like read memory that a DTensor does not have, or refuse it. An assignment to ``data`` exchanges what
    only the wrapper has, and is lost. ``copy.deepcopy`` of a parameter copies its gradient, too, if it is a DTensor.
    """
    data = property(torch.Tensor.data.__get__, _assign_data)  # type: ignore[attr-defined]
    reads = {"tolist": _tolist, "numpy": _numpy, "__dlpack__": _dlpack, "__format__": _format}
    return {**reads, "data": data, "__deepcopy__": _deepcopy}


def _deepcopy(self: DTensor, memo: dict[int, Any]) -> Any:
    if id(self) not in memo and isinstance(self, torch.nn.Parameter):
        values = self.detach().clone(memory_format=torch.preserve_format)
        memo[id(self)] = torch.nn.Parameter(values, self.requires_grad)
    return memo[id(self)] if id(self) in memo else torch.Tensor.__deepcopy__(self, memo)


def _assign_data(self: DTensor, value: Any) -> None:
    if not isinstance(value, torch.Tensor) or value.shape != self.shape or value.dtype != self.dtype:
        given = f"of shape {tuple(value.shape)} and {value.dtype}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise RuntimeError(
            f"data of a DTensor of shape {tuple(self.shape)} and {self.dtype} was assigned a value {given}: assign one of the "
            "same shape and dtype, or set a new nn.Parameter in the module"
        )
    with torch.no_grad():
        if not isinstance(value, DTensor):
            value = DTensor.from_local(value, self.device_mesh, [Replicate()] * self.device_mesh.ndim, run_check=False)
        self.detach().copy_(value)


def _tolist(self: DTensor) -> Any:
    return _whole(self.detach(), "tolist()").tolist()


def _numpy(self: DTensor, *, force: bool = False) -> Any:
    return _whole(self, "numpy()").numpy(force=force)  # It refuses a tensor that requires gradients, as on one device.


def _dlpack(self: DTensor, **options: Any) -> Any:
    return _whole(self, "__dlpack__()").__dlpack__(**options)  # torch's own exports memory that is not allocated.


def _format(self: DTensor, format_spec: str) -> str:
    # As of a plain tensor: only a number has a format.
    value = self if self.ndim or self.is_meta else _whole(self.detach(), "a format").item()
    return object.__format__(self, format_spec) if value is self else format(value, format_spec)


def _whole(tensor: Any, call: str) -> torch.Tensor:
    """The value of ``tensor``, which all ranks of its mesh read by ``call``."""
    mesh = tensor.device_mesh
    if _is_replicated(tensor):
        return tensor.full_tensor()  # type: ignore[no-any-return]
    if tensor.device.type != mesh.device_type:  # Of tensor.cpu(): the process groups of the mesh do not carry it.
        return _whole(tensor.to(mesh.device_type), call).to(tensor.device)
    name = f"{call} of a DTensor, which all ranks must call"
    claim = f"a tensor of shape {tuple(tensor.shape)} and {tensor.dtype}, placed as {tensor.placements}"
    meet(mesh, name, claim, "read the same tensors on all ranks, in the same order")
    with peers_named(name, "", mesh.mesh.flatten().tolist):
        return tensor.full_tensor()


def _is_replicated(tensor: DTensor) -> bool:
    return all(placement.is_replicate() for placement in tensor.placements)


def meet(mesh: DeviceMesh, call: str, claim: str, advice: str) -> None:
    """Return when all ranks of ``mesh`` make this ``call`` with an equal ``claim``, if :func:`compare_reads` was called for it.

    Raises:
        PeerError: another rank died, or waits in another call.
        ValueError: ranks make different calls or claims; the text ends with ``advice``.
    """
    world = dist.group.WORLD
    group = None if world is None else _flat_groups.get(world, {}).get(mesh)
    if group is not None:
        agree([group], device_of_messages(group), call, claim, None, advice)
