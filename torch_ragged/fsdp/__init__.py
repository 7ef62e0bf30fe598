"""Fully sharded data parallelism on RaggedShard: FSDP2's API on buffers that need no copy-in and no copy-out.

docs/code_map.md says what stands where, and "Life of a parameter" in docs/design.md follows one parameter through the files.
The offline planner is :mod:`torch_ragged.offline`.
"""

from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    UnshardHandle,
    register_fsdp_forward_method,
)

from torch_ragged.fsdp._fsdp_module import FSDPModule, share_comm_ctx
from torch_ragged.fsdp._fully_shard import fully_shard
from torch_ragged.fsdp._groups import buffer_layouts
from torch_ragged.fsdp._upcoming import cpu_offload_by_budget
from torch_ragged.fsdp.bits._exact import same_sum
from torch_ragged.fsdp.bits._same_bits import SameBits
from torch_ragged.fsdp.bits._sums import CorruptionFound
from torch_ragged.fsdp.budget._fit import FitUnit, MemoryFit, fit
from torch_ragged.fsdp.codes._float8 import Float4Policy, Float8Policy
from torch_ragged.fsdp.codes._float8_planes import Float4Planes, Float8Planes
from torch_ragged.fsdp.codes._float8_weight import Float8Weight, float4_weight, float8_matmul_weight, float8_weight
from torch_ragged.fsdp.core._dbuffer import DBuffer
from torch_ragged.fsdp.elastic._neighbour_copies import NeighbourCopies
from torch_ragged.fsdp.elastic._reshard_to import reshard_to
from torch_ragged.fsdp.grads._fsdp_grad import FSDPGrad
from torch_ragged.fsdp.layout._advice import advise
from torch_ragged.fsdp.layout._buffer_layout import BufferLayout, TensorSpec
from torch_ragged.fsdp.layout._planner import plan_layout
from torch_ragged.fsdp.memory._resident import HIERARCHICAL, ZERO1, ZERO2, ZERO3, BufferPlacements
from torch_ragged.fsdp.offload._offloaded_optimizer import OffloadedOptimizer, offloaded
from torch_ragged.fsdp.offload._policy import Offload
from torch_ragged.fsdp.schedule._schedule import Schedule, UnitSchedule
from torch_ragged.fsdp.tools._gradient_factors import GradientFactor, GradientFactors, gradient_factors
from torch_ragged.fsdp.tools._memory_report import MemoryReport, MemoryRow, memory_report
from torch_ragged.fsdp.tools._monitor import Monitor, monitor
from torch_ragged.fsdp.tools._timeline import Timeline, TimelineSpan
from torch_ragged.fsdp.tools._token_scale import token_scale
from torch_ragged.granularity import Granularity, OrigParamPolicy, Segments, blocks, elements, rows, segments, tensor

__all__ = [
    "BufferPlacements",
    "ZERO3",
    "ZERO2",
    "ZERO1",
    "HIERARCHICAL",
    "share_comm_ctx",
    "register_fsdp_forward_method",
    "UnshardHandle",
    "Offload",
    "OffloadPolicy",
    "OffloadedOptimizer",
    "SameBits",
    "CPUOffloadPolicy",
    "BufferLayout",
    "CorruptionFound",
    "DBuffer",
    "FSDPGrad",
    "FSDPModule",
    "MemoryFit",
    "FitUnit",
    "Float8Planes",
    "Float4Planes",
    "Float4Policy",
    "Float8Policy",
    "Float8Weight",
    "Granularity",
    "MemoryReport",
    "MemoryRow",
    "MixedPrecisionPolicy",
    "Monitor",
    "OrigParamPolicy",
    "Schedule",
    "Segments",
    "TensorSpec",
    "Timeline",
    "TimelineSpan",
    "UnitSchedule",
    "advise",
    "blocks",
    "buffer_layouts",
    "cpu_offload_by_budget",
    "elements",
    "float4_weight",
    "float8_matmul_weight",
    "float8_weight",
    "fit",
    "fully_shard",
    "gradient_factors",
    "GradientFactor",
    "GradientFactors",
    "memory_report",
    "monitor",
    "offloaded",
    "plan_layout",
    "same_sum",
    "NeighbourCopies",
    "reshard_to",
    "rows",
    "segments",
    "tensor",
    "token_scale",
]
