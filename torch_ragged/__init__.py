"""Ragged sharding for PyTorch. Importing this package registers its placements with DTensor."""

from torch_ragged._register import register, registration_report

register()

from torch_ragged import debug  # noqa: E402
from torch_ragged.placement_types import RaggedShard  # noqa: E402
from torch_ragged.strided_placement_types import StridedRaggedShard, fsdp_placement  # noqa: E402

__all__ = ["RaggedShard", "StridedRaggedShard", "debug", "fsdp_placement", "registration_report"]
__version__ = "0.1.0"
