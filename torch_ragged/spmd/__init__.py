"""Eager SPMD: one plan, beside a model that nobody changed, distributes it over a mesh."""

from torch_ragged.random import deferred_init
from torch_ragged.spmd._explain import check, explain
from torch_ragged.spmd._explanation import Explanation
from torch_ragged.spmd._parallelize import parallelize
from torch_ragged.spmd._plan import INIT, RUN, Phase, Plan
from torch_ragged.spmd._resolve import PlanError
from torch_ragged.spmd._resolved import MeshShape

__all__ = [
    "INIT",
    "RUN",
    "Explanation",
    "MeshShape",
    "Phase",
    "Plan",
    "PlanError",
    "check",
    "deferred_init",
    "explain",
    "parallelize",
]
