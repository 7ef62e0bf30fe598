"""The device that tests use: the CPU over gloo, or what TORCH_RAGGED_TEST_DEVICE says (``cuda``, over NCCL).

Tests are written for the CPU. On another device, the ranks' meshes of CPU devices are made of that device instead, and tensors
that name no device are made there. A tensor that says ``device="cpu"`` stays on the CPU. Where ranks outnumber the GPUs, they
share GPUs: NCCL then takes each process for a host of its own, and sends over sockets.
"""

from __future__ import annotations

import datetime
import functools
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

DEVICE = os.environ.get("TORCH_RAGGED_TEST_DEVICE", "cpu")
IS_REHEARSED = "REHEARSAL_ORDER" in os.environ
"""Whether the device is the simulator of ``rehearsal``."""
BACKEND = "gloo" if DEVICE == "cpu" else f"cpu:gloo,{DEVICE}:{dist.get_default_backend_for_device(DEVICE)}"


def init_ranks(store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> None:
    """Make the default process group; this process uses one device."""
    if DEVICE != "cpu":
        _use_device(rank)
    dist.init_process_group(BACKEND, store=store, rank=rank, world_size=size, timeout=timeout)


def on_cpu(value: Any) -> Any:
    """What a rank returns, with its tensors on the CPU: a tensor on a device cannot leave its process."""
    if isinstance(value, torch.Tensor):
        return value if DEVICE == "cpu" else value.cpu()
    if type(value) in (list, tuple):
        return type(value)(map(on_cpu, value))
    return {key: on_cpu(each) for key, each in value.items()} if type(value) is dict else value


def _use_device(rank: int) -> None:
    devices = torch.get_device_module(DEVICE).device_count()
    if not devices:
        raise RuntimeError(f"TORCH_RAGGED_TEST_DEVICE={DEVICE}, and this machine has no such device")
    if rank >= devices:  # NCCL refuses two ranks of a host on one GPU.
        os.environ["NCCL_HOSTID"] = f"host of rank {rank}"
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    torch.get_device_module(DEVICE).set_device(rank % devices)
    torch.set_default_device(torch.device(DEVICE, rank % devices))
    if not _generators:
        _generators.append(_CpuGenerators().__enter__())
    if not hasattr(DeviceMesh.__init__, "__wrapped__"):
        DeviceMesh.__init__ = _on_device(DeviceMesh.__init__)  # type: ignore[method-assign]


class _CpuGenerators(TorchFunctionMode):
    """A tensor that a CPU generator fills is made on the CPU, with the numbers that it has there, and moved."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        generator = kwargs.get("generator")
        if generator is None or generator.device.type != "cpu" or "device" in kwargs or "out" in kwargs:
            return func(*args, **kwargs)
        if any(isinstance(each, torch.Tensor) for each in args):
            return func(*args, **kwargs)
        return func(*args, device="cpu", **kwargs).to(DEVICE)


_generators: list[TorchFunctionMode] = []


def _on_device(init: Any) -> Any:
    @functools.wraps(init)
    def on_device(self: DeviceMesh, device_type: str, *arguments: Any, **keywords: Any) -> None:
        init(self, DEVICE if device_type == "cpu" else device_type, *arguments, **keywords)

    return on_device
