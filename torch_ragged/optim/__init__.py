"""Structure-aware optimizers on DTensor parameters of any placement. They know placements, and nothing of fsdp.

Files by noun: ``_roots`` (which rank computes with which whole matrix), ``_gather`` (the transfers there and back),
``_newton_schulz``, ``_muon``; ``_base`` (what all share).
"""

import torch_ragged  # noqa: F401  (registers the placements)
from torch_ragged.optim._adam8bit import Adam8bit, AdamW8bit
from torch_ragged.optim._blocks import BlockPolicy
from torch_ragged.optim._muon import Muon, matrix_groups

__all__ = ["Adam8bit", "AdamW8bit", "BlockPolicy", "Muon", "matrix_groups"]
