"""Support for a torch with the patches of ``upstream/``: there, this package's modules are torch's.

It must not import torch at the top: ``upstream/series.py`` loads this file without a torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

__all__ = ["IN_TORCH", "OLD_NAMES", "is_upstream", "know_old_names", "torch_name", "use_modules_of_torch"]

IN_TORCH = {
    "torch_ragged.tensor._placement_extension": "torch.distributed.tensor._placement_extension",
    "torch_ragged.tensor": "torch.distributed.tensor._ragged",
    "torch_ragged._ranks.groups": "torch.distributed._named_groups",
    "torch_ragged._register._torch": "torch.distributed.tensor._ragged._torch",
    "torch_ragged.fsdp": "torch.distributed.fsdp._ragged",
    "torch_ragged": "torch.distributed.tensor._ragged",
}
"""The names of this package's modules, or of packages that contain them, and their names in torch. The first match counts."""


OLD_NAMES = {
    "torch_ragged.placement_types.RaggedShard": "torch_ragged.tensor.placement_types",
    "torch_ragged.strided_placement_types.StridedRaggedShard": "torch_ragged.tensor.strided_placement_types",
    "torch_ragged._units.Units": "torch_ragged.tensor._units",
}
"""The names under which earlier versions have pickled classes, and the modules that have these now."""


def torch_name(module: str) -> str:
    """The name in torch of one of this package's modules, even if this torch lacks it."""
    for ours, theirs in IN_TORCH.items():
        if module == ours or module.startswith(ours + "."):
            return theirs + module.removeprefix(ours)
    return module


def is_upstream() -> bool:
    """Whether torch has the placements and the extension protocol."""
    return importlib.util.find_spec(IN_TORCH["torch_ragged"]) is not None


def use_modules_of_torch() -> None:
    """Replace this package's modules in ``sys.modules`` by torch's, if torch has them, so that no class exists twice.

    The ``__init__`` files of packages are not replaced, because they import their names from these modules.
    """
    if not is_upstream():
        return
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        name = ".".join([root.name, *path.relative_to(root).with_suffix("").parts])
        if not path.stem.startswith(("__", "_triton")) and _has(torch_name(name)):  # Modules for Triton have no classes.
            sys.modules[name] = importlib.import_module(torch_name(name))
    _allow_loading(*(f"{module}.{name.rpartition('.')[2]}" for name, module in OLD_NAMES.items()))


def know_old_names() -> None:
    """Let ``pickle`` find the classes in OLD_NAMES, and ``torch.load(weights_only=True)`` too: old files load."""
    for name, module in OLD_NAMES.items():
        sys.modules[name.rpartition(".")[0]] = importlib.import_module(module)
    _allow_loading(*OLD_NAMES)


def _allow_loading(*names: str) -> None:
    """Let ``torch.load(weights_only=True)`` accept these names, under which a stock torch saved the placements."""
    import torch

    for name in names:
        module, _, placement = name.rpartition(".")
        torch.serialization.add_safe_globals([(getattr(sys.modules[module], placement), name)])


def _has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # Torch lacks the package of the module, too.
        return False
