"""The offline planner: ``torch-ragged plan MODEL``; ``--help`` documents it.

It must not need a GPU or a process group.

Files: ``_shapes`` (families of models), ``_models`` (loads a model), ``_model_plan`` (its groups and their layouts), ``_peers``
(the schemes to compare with), ``_memory`` (bytes), ``_report``, ``_plot`` and ``_drawing`` (output), ``_cli`` (options).
"""

from torch_ragged.offline._cli import main
from torch_ragged.offline._model_plan import GroupKind, ModelPlan, ModelPlanner, granularity_policy, tensor_specs
from torch_ragged.offline._models import BUILT_IN, Model, load_model
from torch_ragged.offline._shapes import Parameter

__all__ = [
    "BUILT_IN",
    "GroupKind",
    "Model",
    "ModelPlan",
    "ModelPlanner",
    "Parameter",
    "granularity_policy",
    "load_model",
    "main",
    "tensor_specs",
]
