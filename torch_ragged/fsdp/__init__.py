"""Fully sharded data parallelism on RaggedShard: FSDP2's API on buffers that need no copies in or out.

Files by noun. Layout: ``_granularity`` (what may be cut), ``_layout`` (where tensors lie), ``_planner`` with ``_packing``,
``_interleave`` and ``_bound`` (the search for it), ``_advice``, ``plan`` (the offline tool).
Parameters: ``_mesh`` and ``_distribution`` (where they are), ``_grouping`` (which go together), ``_managed_param`` (one),
``_dbuffer`` (the memory), ``_param_group`` (those of a unit), ``_extension`` (types with their own all-gather), ``_float8``
(matrices gathered as 8-bit codes).
Gathered and reduced: ``_collectives`` (of process groups) with ``_gloo`` (without its copies), ``_resident`` and
``_neighbours`` (what stays gathered), ``_gradients`` with ``_weight_gradient`` (matmuls that write them).
Other collectives: ``_implementations`` (by name) and ``_capabilities`` (which of them ranks can have), ``_copy_engine`` over
``_peer_memory``, ``_multicast``; ``_persistence`` with ``_ring`` (buffers at addresses that stay).
Hooks: ``_state``, ``_forward_order`` (what backward does on all ranks alike), ``_tensors`` (in inputs and outputs).
API: ``_fully_shard`` with ``_agreement`` (an error on one rank is one on all), ``_fsdp_module``, ``_placements`` (ZeRO).
What a step costs: ``_memory`` and ``_monitor``.
"""

from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    UnshardHandle,
    register_fsdp_forward_method,
)

from torch_ragged.fsdp._advice import advise
from torch_ragged.fsdp._dbuffer import DBuffer
from torch_ragged.fsdp._float8 import Float8Policy
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
    "Float8Policy",
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
