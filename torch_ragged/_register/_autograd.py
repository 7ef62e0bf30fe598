"""The hook on ``torch/autograd/graph.py``: errors of a backward pass that say what to do."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.autograd import graph

from torch_ragged._register._hook import PASSES, hook
from torch_ragged._register._torch import backward_error_handlers


@hook(
    "autograd.graph._engine_run_backward",
    "autograd's error of a parameter that fully_shard has resharded names no module",
    PASSES,
    lambda: torch.autograd._engine_run_backward is graph._engine_run_backward,  # type: ignore[attr-defined]
)
def _install_backward_errors() -> None:
    original = graph._engine_run_backward

    @functools.wraps(original)
    def _engine_run_backward(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except RuntimeError as error:
            for handle in backward_error_handlers:
                handle(error)
            raise

    graph._engine_run_backward = torch.autograd._engine_run_backward = _engine_run_backward  # type: ignore[attr-defined]
