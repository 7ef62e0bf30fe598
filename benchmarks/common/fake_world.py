"""Both packages' fully_shard on the meta device, in one process of a fake process group of any size.

Neither runs there by itself: both refuse parameters on the meta device, and what tells whose memory a tensor lies in has no
addresses there. What is replaced for that is listed in :func:`meta_training`; all else is the packages' own code.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param_group, _fsdp_state, _fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_ragged.fsdp import fully_shard
from torch_ragged.fsdp.core._dbuffer import DBuffer
from torch_ragged.fsdp.core._fsdp_param_group import FSDPParamGroup

__all__ = ["PACKAGES", "fake_world", "make_mesh", "meta_training"]

PACKAGES = {"torch_ragged": fully_shard, "FSDP2": fsdp2}


@contextlib.contextmanager
def fake_world(ranks: int, rank: int = 0) -> Iterator[None]:
    """``rank`` of ``ranks``, alone: collectives return at once."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def make_mesh(ranks: int, shards: int | None = None) -> DeviceMesh:
    """1-D; HSDP with ``shards``: (replicas, shards)."""
    if shards is None:
        return init_device_mesh("cpu", (ranks,), mesh_dim_names=("shard",))
    return init_device_mesh("cpu", (ranks // shards, shards), mesh_dim_names=("replicate", "shard"))


class _Stream(torch.cpu.Stream):
    stream_id = device_index = device_type = 0  # From torch 2.15 on FSDP2 tells backends where a gradient is used.

    def record_event(self) -> object:
        return object()  # FSDP2 insists on an event, but on the CPU.


class _Streams:
    """``torch.cpu`` in the role of ``torch.cuda``: streams and events that do nothing."""

    Stream, Event, stream = _Stream, torch.cpu.Event, staticmethod(torch.cpu.stream)

    @staticmethod
    def current_stream() -> _Stream:
        return _Stream()


@contextlib.contextmanager
def meta_training() -> Iterator[None]:
    """Let both packages train on the meta device."""
    group = _fsdp_param_group.FSDPParamGroup
    with contextlib.ExitStack() as stack:
        for module in (_fsdp_param_group, _fsdp_state, _fsdp_collectives):
            stack.enter_context(mock.patch.object(module, "_get_device_handle", lambda *_: _Streams))
        stack.enter_context(mock.patch.object(_fully_shard, "_get_device_from_mesh", lambda _: torch.device("meta")))
        stack.enter_context(mock.patch.object(group, "_validate_no_meta_params", lambda _: None))
        stack.enter_context(mock.patch.object(FSDPParamGroup, "is_meta", False))
        stack.enter_context(mock.patch.object(DBuffer, "holds", _holds))
        yield


def _holds(buffer: DBuffer, tensor: torch.Tensor) -> bool:
    """``DBuffer.holds`` by the storage itself in place of its address."""
    return buffer.is_allocated and tensor.untyped_storage()._cdata == buffer.flat.untyped_storage()._cdata
