"""Ragged sharding for PyTorch. Importing this package registers its placements with DTensor."""

from torch_ragged._register import register_hooks, registration_report

register_hooks()

from torch_ragged import debug  # noqa: E402
from torch_ragged._ranks.peers import PeerError  # noqa: E402
from torch_ragged.tensor._box_tensor import with_layout  # noqa: E402
from torch_ragged.tensor._cut_placement import CutPlacement  # noqa: E402
from torch_ragged.tensor._global_layout import GlobalLayout  # noqa: E402
from torch_ragged.tensor._owned_boxes import owned_boxes  # noqa: E402
from torch_ragged.tensor._ownership import Box  # noqa: E402
from torch_ragged.tensor.interleaved_placement_types import InterleavedShard  # noqa: E402
from torch_ragged.tensor.placement_types import RaggedShard  # noqa: E402
from torch_ragged.tensor.strided_placement_types import StridedRaggedShard, fsdp_placement  # noqa: E402

__all__ = [
    "Box",
    "CutPlacement",
    "GlobalLayout",
    "InterleavedShard",
    "PeerError",
    "RaggedShard",
    "StridedRaggedShard",
    "debug",
    "fsdp_placement",
    "owned_boxes",
    "registration_report",
    "with_layout",
]
__version__ = "0.1.0"
