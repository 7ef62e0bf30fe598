"""Eager SPMD: one plan, beside a model that nobody changed, distributes it over a mesh."""

from torch_ragged.random import deferred_init
from torch_ragged.spmd._parallelize import parallelize
from torch_ragged.spmd._plan import INIT, RUN, Phase, Plan
from torch_ragged.spmd._resolve import PlanError

__all__ = ["INIT", "RUN", "Phase", "Plan", "PlanError", "deferred_init", "parallelize"]
