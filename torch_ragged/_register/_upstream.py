"""A torch that has the patches of ``upstream/``: it is recognised, and this package's modules are torch's there."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

__all__ = ["IN_TORCH", "adopt", "is_upstream", "torch_name"]

IN_TORCH = {
    "torch_ragged._placement_extension": "torch.distributed.tensor._placement_extension",
    "torch_ragged._groups": "torch.distributed._named_groups",
    "torch_ragged._register._torch": "torch.distributed.fsdp._ragged._torch",
    "torch_ragged._kernels": "torch.distributed.fsdp._ragged._kernels",
    "torch_ragged.fsdp": "torch.distributed.fsdp._ragged",
    "torch_ragged": "torch.distributed.tensor._ragged",
}
"""Where the patches put this package's modules: the name, or the beginning of it, here and in torch. The first that fits."""


def torch_name(module: str) -> str:
    """The name in torch of one of this package's modules, whether or not torch has it."""
    for ours, theirs in IN_TORCH.items():
        if module == ours or module.startswith(ours + "."):
            return theirs + module.removeprefix(ours)
    return module


def is_upstream() -> bool:
    """Whether torch has the placements, and with them the extension protocol."""
    return importlib.util.find_spec(IN_TORCH["torch_ragged"]) is not None


def adopt() -> None:
    """Have the names of this package's modules stand for torch's, where torch has them: one class of each, torch's own.

    Packages stay this one's: their ``__init__`` files take all that they offer from modules.
    """
    if not is_upstream():
        return
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        name = ".".join([root.name, *path.relative_to(root).with_suffix("").parts])
        if not path.stem.startswith(("__", "_triton")) and _has(torch_name(name)):  # Those need Triton, and hold no classes.
            sys.modules[name] = importlib.import_module(torch_name(name))
    _let_load(
        "torch_ragged.placement_types.RaggedShard",
        "torch_ragged.strided_placement_types.StridedRaggedShard",
        "torch_ragged._units.Units",
    )


def _let_load(*names: str) -> None:
    """Have ``torch.load(weights_only=True)`` take these names, under which a stock torch saved the placements."""
    import torch

    for name in names:
        module, _, placement = name.rpartition(".")
        torch.serialization.add_safe_globals([(getattr(sys.modules[module], placement), name)])


def _has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # Nor the package that it would be in.
        return False
