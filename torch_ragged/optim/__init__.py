"""Structure-aware optimizers (Muon, Shampoo, 8-bit Adam) for DTensor parameters under any placements.

This package knows placements only and never imports ``fsdp``.

Files: ``_roots`` (which rank computes with which whole matrix), ``_gather`` (the transfers to that rank and back), ``_matrix``
(the step of the optimizers that use both), ``_newton_schulz``, ``_muon``, ``_shampoo``; ``_blocks`` (blocks of matrices over
ranks), ``_quantize`` (8-bit codes), ``_adam8bit``; ``_base`` (helpers of all optimizers). Kernels are in
``torch_ragged._kernels``.
"""

from torch_ragged.optim._adam8bit import Adam8bit, AdamW8bit
from torch_ragged.optim._blocks import BlockPolicy
from torch_ragged.optim._matrix import matrix_groups
from torch_ragged.optim._muon import Muon
from torch_ragged.optim._shampoo import Shampoo

__all__ = ["Adam8bit", "AdamW8bit", "BlockPolicy", "Muon", "Shampoo", "matrix_groups"]
