"""Ragged sharding for PyTorch: importing this package registers its placements with DTensor."""

from torch_ragged import debug
from torch_ragged._register import register, registration_report
from torch_ragged.placement_types import RaggedShard, StridedRaggedShard, fsdp_placement

__all__ = ["RaggedShard", "StridedRaggedShard", "debug", "fsdp_placement", "registration_report"]
__version__ = "0.1.0"

register()
