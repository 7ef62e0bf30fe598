"""Fully sharded data parallelism on RaggedShard: FSDP2's API on buffers that need no copies in or out.

Files by noun: ``_granularity`` (what may be cut), ``_layout`` (where tensors lie), ``_planner`` with ``_packing``,
``_interleave`` and ``_bound`` (the search for it), ``_advice``, ``plan`` (the offline tool), ``_dbuffer`` (the memory),
``_collectives``, ``_param_group`` (parameters and gradients of a unit), ``_state`` (hooks), ``_fully_shard`` (API),
``_memory`` and ``_monitor`` (what a training step costs).
"""

from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    UnshardHandle,
    register_fsdp_forward_method,
)

import torch_ragged  # noqa: F401  (registers the placements)
from torch_ragged.fsdp._advice import advise
from torch_ragged.fsdp._dbuffer import DBuffer
from torch_ragged.fsdp._fsdp_module import FSDPModule, share_comm_ctx
from torch_ragged.fsdp._fully_shard import buffer_layouts, fully_shard
from torch_ragged.fsdp._granularity import Granularity, OrigParamPolicy, blocks, elements, rows, tensor
from torch_ragged.fsdp._layout import BufferLayout, TensorSpec
from torch_ragged.fsdp._memory import MemoryReport, MemoryRow, memory_report
from torch_ragged.fsdp._monitor import Monitor, monitor
from torch_ragged.fsdp._placements import HIERARCHICAL, ZERO1, ZERO2, ZERO3, BufferPlacements
from torch_ragged.fsdp._planner import plan_layout

__all__ = [
    "BufferPlacements",
    "ZERO3",
    "ZERO2",
    "ZERO1",
    "HIERARCHICAL",
    "share_comm_ctx",
    "register_fsdp_forward_method",
    "UnshardHandle",
    "OffloadPolicy",
    "CPUOffloadPolicy",
    "BufferLayout",
    "DBuffer",
    "FSDPModule",
    "Granularity",
    "MemoryReport",
    "MemoryRow",
    "MixedPrecisionPolicy",
    "Monitor",
    "OrigParamPolicy",
    "TensorSpec",
    "advise",
    "blocks",
    "buffer_layouts",
    "elements",
    "fully_shard",
    "memory_report",
    "monitor",
    "plan_layout",
    "rows",
    "tensor",
]
