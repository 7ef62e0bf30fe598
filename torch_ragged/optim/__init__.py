"""Structure-aware optimizers on DTensor parameters of any placement. They know placements, and nothing of fsdp.

Files by noun: ``_roots`` (which rank computes with which whole matrix), ``_gather`` (the transfers there and back),
``_matrix`` (the step of optimizers that use them), ``_newton_schulz`` and ``_muon``, ``_shampoo``; ``_blocks`` (blocks of
matrices over ranks), ``_quantize`` (8-bit codes), ``_adam8bit``; ``_base`` (what all share). Kernels are in
``torch_ragged._kernels``.
"""

from torch_ragged.optim._adam8bit import Adam8bit, AdamW8bit
from torch_ragged.optim._blocks import BlockPolicy
from torch_ragged.optim._matrix import matrix_groups
from torch_ragged.optim._muon import Muon
from torch_ragged.optim._shampoo import Shampoo

__all__ = ["Adam8bit", "AdamW8bit", "BlockPolicy", "Muon", "Shampoo", "matrix_groups"]
