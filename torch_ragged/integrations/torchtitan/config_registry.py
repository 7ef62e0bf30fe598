"""All configs of torchtitan's models, by their names, for ``--module torch_ragged.integrations.torchtitan --config NAME``."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from torchtitan.models import _supported_models

from torch_ragged.integrations.torchtitan.parallelize import ragged

__all__: list[str] = []


@functools.cache
def _configs() -> dict[str, Callable[[], Any]]:
    """The functions that make configs, by name. Registries that cannot be imported here are left out."""
    configs: dict[str, Callable[[], Any]] = {}
    for model in sorted(_supported_models):
        try:
            registry = importlib.import_module(f"torchtitan.models.{model}.config_registry")
        except ImportError:
            continue
        for name, value in vars(registry).items():
            if callable(value) and getattr(value, "__module__", "") == registry.__name__ and name[0] != "_":
                configs[name] = value
    return configs


def __getattr__(name: str) -> Callable[[], Any]:
    if name.startswith("_") or name not in _configs():
        raise AttributeError(f"torchtitan's models have no config {name!r}")
    return functools.partial(_ragged_config, name)


def __dir__() -> list[str]:
    return sorted(_configs())


def _ragged_config(name: str) -> Any:
    return ragged(_configs()[name]())
