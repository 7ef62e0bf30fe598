"""Sharding rules of ops on ragged DTensors, by op family, as in ``torch/distributed/tensor/_ops``.

A rule looks at an :class:`OpCall` and answers with a :class:`Sharding`: how its tensor arguments must be placed for
the op to run on local tensors, and how the outputs are placed then. An op that has no such rule but is made of ops
that do has a *decomposition*: a function on DTensors. An op with neither raises ``NotImplementedError``.
"""

from torch_ragged._ops import _math_ops, _pointwise_ops, _tensor_ops  # noqa: F401  (they register their rules)
from torch_ragged._ops._rules import NormPartial, OpCall, Sharding, decomposition_of, rule_of, unsupported

__all__ = ["NormPartial", "OpCall", "Sharding", "decomposition_of", "rule_of", "unsupported"]
