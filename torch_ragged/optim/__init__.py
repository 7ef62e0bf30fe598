"""Structure-aware optimizers (Muon, Shampoo, 8-bit Adam) for DTensor parameters under any placements.

This package knows placements only and never imports ``fsdp``.

Files: ``_roots`` (which rank computes with which whole matrix), ``_gather`` (the transfers to that rank and back), ``_matrix``
(the step of the optimizers that use both), ``_root_states`` (states of whole matrices at their roots), ``_newton_schulz``,
``_muon``, ``_shampoo``, ``_soap``; ``_owners`` (which matrices stay whole on a rank); ``_qk_clip`` (attention logits that grow
too large); ``_blocks`` (blocks of matrices over ranks), ``_quantize`` (8-bit codes), ``_adam8bit``; ``_base`` (helpers of all
optimizers). Kernels are in ``torch_ragged._kernels``.
"""

from torch_ragged.optim._adam8bit import Adam8bit, AdamW8bit
from torch_ragged.optim._blocks import BlockPolicy
from torch_ragged.optim._matrix_groups import MatrixDecision, MatrixGroups, matrix_groups
from torch_ragged.optim._muon import Muon
from torch_ragged.optim._owners import MuonPolicy, Owners, muon_policy
from torch_ragged.optim._qk_clip import HeadRows, QKClip, QKLayer, attention_maxima
from torch_ragged.optim._shampoo import Shampoo
from torch_ragged.optim._soap import SOAP

__all__ = [
    "Adam8bit",
    "AdamW8bit",
    "BlockPolicy",
    "HeadRows",
    "MatrixDecision",
    "MatrixGroups",
    "Muon",
    "MuonPolicy",
    "Owners",
    "QKClip",
    "QKLayer",
    "SOAP",
    "Shampoo",
    "attention_maxima",
    "matrix_groups",
    "muon_policy",
]
