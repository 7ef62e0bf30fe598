"""Fully sharded data parallelism on RaggedShard: FSDP2's API on buffers that need no copies in or out.

Files by noun: ``_granularity`` (what may be cut), ``_layout`` (where tensors lie), ``_planner`` with ``_packing``,
``_interleave`` and ``_bound`` (the search for it), ``_advice``, ``plan`` (the offline tool), ``_dbuffer`` (the memory),
``_collectives``, ``_param_group`` (parameters and gradients of a unit), ``_state`` (hooks), ``_fully_shard`` (API),
``_memory`` and ``_monitor`` (what a training step costs).
"""

from torch.distributed.fsdp import MixedPrecisionPolicy

import torch_ragged  # noqa: F401  (registers the placements)
from torch_ragged.fsdp._advice import advise
from torch_ragged.fsdp._dbuffer import DBuffer
from torch_ragged.fsdp._fully_shard import FSDPModule, buffer_layouts, fully_shard
from torch_ragged.fsdp._granularity import Granularity, OrigParamPolicy, blocks, elements, rows, tensor
from torch_ragged.fsdp._layout import BufferLayout, TensorSpec
from torch_ragged.fsdp._memory import MemoryReport, MemoryRow, memory_report
from torch_ragged.fsdp._monitor import Monitor, monitor
from torch_ragged.fsdp._planner import plan_layout

__all__ = [
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
