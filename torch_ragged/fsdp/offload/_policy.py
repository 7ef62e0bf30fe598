"""Offload: the policy that says where optimizer states, and parameters, lie. MappedShards: parameters in a scratch file.

Neither decides when they are used: the group and the optimizer say it.
"""

from __future__ import annotations

import os
from dataclasses import FrozenInstanceError, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import OffloadPolicy

from torch_ragged._ranks.agreement import compared_as
from torch_ragged.fsdp.core._dbuffer import ALLOCATOR, Borrowed, MemoryPool
from torch_ragged.fsdp.core._kit import FeaturePart, Kit, Need, Terms
from torch_ragged.fsdp.core.encodings._plain import Shards
from torch_ragged.fsdp.files._scratch_file import MappedFile
from torch_ragged.fsdp.layout._buffer_layout import BufferLayout

__all__ = ["Offload"]


@dataclass(unsafe_hash=True)
class Offload(OffloadPolicy, FeaturePart):
    """Where the optimizer states of a ``fully_shard`` call lie: a part on the device, the rest in host memory or in files.

    The policy says where; :func:`offloaded`, which has an example, makes the optimizer that follows it. An optimizer that is
    made without :func:`offloaded` keeps its states beside the parameters, as always.

    Args:
        optimizer: the fraction, from 0 to 1, of each group's shard, its last elements, whose states do not lie on the device.
        parameters: whether the sharded parameters and their gradients lie in host memory, too, as with ``CPUOffloadPolicy()``.
            Then the optimizer runs on the CPU, so ``optimizer`` must be 1. Or ``"files"``: the parameters lie in scratch files
            in the folder ``to``, one for each group, which are mapped into memory. Gradients are in host memory.
        to: ``"cpu"`` for host memory, or a folder: each rank keeps these states in a scratch file there. It needs an optimizer
            that runs on the CPU: a mesh of CPUs, or ``parameters`` that are not on the device.

    Raises:
        ValueError: ``optimizer`` is no number from 0 to 1, ``parameters`` is neither a bool nor ``"files"``, they contradict
            each other, or ``to`` is no path.
    """

    optimizer: float = 1.0
    parameters: bool | str = False
    # Each rank may have a folder of its own.
    to: str = field(default="cpu", metadata=compared_as(lambda to: to if to == "cpu" else "a folder"))

    def __post_init__(self) -> None:
        if not isinstance(self.to, (str, os.PathLike)) or not os.fspath(self.to):
            raise ValueError(
                f'Offload to={self.to!r} is no tier: give "cpu" for host memory, or the path of a folder for files'
            )
        self.__dict__["to"] = os.fspath(self.to)
        given = self.optimizer
        if isinstance(given, bool) or not isinstance(given, (int, float)) or not 0 <= given <= 1:
            raise ValueError(
                f"Offload optimizer={given!r} is no fraction: give a number from 0 (all states on the device) to 1 (all "
                "states in host memory)"
            )
        if not isinstance(self.parameters, bool) and self.parameters != "files":
            raise ValueError(f'Offload parameters must be True, False or "files", got {self.parameters!r}')
        if self.parameters == "files" and self.to == "cpu":
            raise ValueError('Offload(parameters="files") needs the folder of the files: give to=folder')
        if self.parameters and given != 1:
            raise ValueError(
                f"Offload(optimizer={given!r}, parameters={self.parameters!r}) keeps states on the device for an optimizer "
                "that runs on the CPU, where its parameters are: give optimizer=1.0, or parameters=False"
            )

    @property
    def moves_states(self) -> bool:
        """Whether states shall lie elsewhere than the parameters, as those of an ordinary optimizer do."""
        return self.optimizer > 0 and (self.to != "cpu" or not self.parameters)

    @property
    def terms(self) -> Terms:
        needs = {Need.PLAIN_SHARDS: ": give Offload(parameters=True) for its module"} if self.may_fail_alone else {}
        return Terms(repr(self), needs, breaks=(Need.MOVABLE,))

    @property
    def may_fail_alone(self) -> bool:  # type: ignore[override]
        return self.parameters == "files"

    @property
    def folder(self) -> str | None:
        """The folder of the files of states; None: they lie in memory."""
        return None if self.to == "cpu" else self.to

    def equip(self, kit: Kit) -> None:
        kit.offloads_params = kit.pins_memory = self.parameters is not False
        if self.parameters == "files":
            kit.shards = MappedShards(kit.layout, kit.rank, self.to)

    def __setattr__(self, name: str, value: Any) -> None:
        # Not a frozen dataclass: torch's OffloadPolicy is none, and Python refuses to mix them.
        if name in self.__dict__:
            raise FrozenInstanceError(f"cannot assign to field {name!r}")
        super().__setattr__(name, value)


class MappedShards(Shards):
    """Shards whose buffer is a :class:`MappedFile`, one per group and rank: the DTensors of parameters are views of it."""

    _file: MappedFile | None = None  # None: on the meta device, or without elements.

    def __init__(self, layout: BufferLayout, rank: int, folder: str) -> None:
        super().__init__(layout, rank)
        self._folder = folder

    def allocate(self, dtype: torch.dtype, device: torch.device, is_pinned: bool, pool: MemoryPool = ALLOCATOR) -> None:
        edges = self._layout.edges
        nbytes = (edges[self._rank + 1] - edges[self._rank]) * dtype.itemsize
        self._file = None
        if device.type != "meta" and nbytes:
            self._file = MappedFile(self._folder, dist.get_rank(), nbytes)
            pool = Borrowed(torch.frombuffer(self._file.memory, dtype=torch.uint8).view(dtype))
        super().allocate(dtype, device, is_pinned=False, pool=pool)

    def prepare(self, in_step: bool = False) -> None:
        if self._file is not None:
            self._file.use(in_step)

    def release(self) -> None:
        if self._file is not None:
            self._file.release()

    def check(self) -> None:
        if self._file is not None:
            self._file.check()

    @property
    def file_nbytes(self) -> int:
        return 0 if self._file is None else self._file.nbytes
