"""Hooks on ``torch/autograd/graph.py`` and ``torch/utils/checkpoint.py``: errors of a backward pass that say what to do."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.autograd import graph
from torch.utils import checkpoint

from torch_ragged._register._hook import PASSES, has, hook
from torch_ragged._register._torch import REFUSED_VERSION, backward_error_handlers, backward_input_checks


@hook(
    "autograd.graph._engine_run_backward",
    "autograd's error of a parameter that fully_shard has resharded names no module; of a sharded parameter, it returns None",
    PASSES,
    lambda: torch.autograd._engine_run_backward is graph._engine_run_backward,  # type: ignore[attr-defined]
)
def _install_backward_errors() -> None:
    original = graph._engine_run_backward

    @functools.wraps(original)
    def _engine_run_backward(*args: Any, **kwargs: Any) -> Any:
        if inputs := args[4] if len(args) > 4 else kwargs.get("inputs", ()):
            for check in backward_input_checks:
                check(args[0], inputs)
        try:
            return original(*args, **kwargs)
        except RuntimeError as error:
            for handle in backward_error_handlers:
                handle(error)
            raise

    graph._engine_run_backward = torch.autograd._engine_run_backward = _engine_run_backward  # type: ignore[attr-defined]


@hook(
    "checkpoint._recomputation_hook.__init__",
    "autograd does not compare the versions of tensors that a recomputation saves, and reads freed parameters",
    PASSES,
    lambda: has(checkpoint._recomputation_hook.__init__, "target_frame_ref", "gid"),
)
def _install_checks_of_recomputed() -> None:
    recomputation: Any = checkpoint._recomputation_hook
    original = recomputation.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        unpack = self.unpack_hook

        def unpack_hook(saved: torch.Tensor) -> torch.Tensor:
            if saved._version >= REFUSED_VERSION:  # As autograd says it of other saved tensors.
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor "
                    f"of shape {tuple(saved.shape)}, saved by a recomputation, is at version {saved._version}"
                )
            return unpack(saved)  # type: ignore[no-any-return]

        self.unpack_hook = unpack_hook

    recomputation.__init__ = __init__
