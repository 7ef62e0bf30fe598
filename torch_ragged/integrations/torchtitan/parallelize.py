"""``ragged``: a config of torchtitan whose models are sharded by ``torch_ragged.fsdp.fully_shard``.

torchtitan's own ``parallelize_fn`` runs: tensor, context and expert parallelism, activation checkpointing, compilation, and its
choice of FSDP modules, meshes and prefetches. Only the function that it calls for FSDP is ours.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from torchtitan.components.checkpointer.utils import canonical_fqn

from torch_ragged.fsdp import elements
from torch_ragged.integrations._install import installed
from torch_ragged.integrations.torchtitan.state_dict_adapter import with_ragged_experts

__all__ = ["ragged"]

ConfigT = TypeVar("ConfigT")


def ragged(config: ConfigT, *, orig_param_policy: Callable[[str, nn.Parameter], Any] | None = None, **options: Any) -> ConfigT:
    """``config``, sharded by ``torch_ragged.fsdp.fully_shard`` in place of torch's.

    Args:
        config: a ``Trainer.Config`` of torchtitan, as a function of a config registry returns it. It is not changed.
        orig_param_policy: ``(name in the model, parameter) -> granularity``, which says what must not be cut, such as
            ``rows(32)``. None, also for one parameter: it may be cut anywhere. It replaces torchtitan's ``Shard(0)`` and
            ``Shard(1)``, also of experts, which keep their mesh.
        options: of ``fully_shard``, in place of what torchtitan passes, such as ``mp_policy``.

    Returns:
        a config for ``torchtitan.train``, with another ``model_spec``.

    Raises:
        TypeError: ``config`` has no ``model_spec``, or ``fully_shard`` has no such option.
        ValueError: ``config`` is the result of ``ragged`` already.

    No communication.
    """
    spec = getattr(config, "model_spec", None)
    if spec is None:
        raise TypeError(f"ragged() got a {type(config).__name__} without model_spec: expected a Trainer.Config of torchtitan")
    if isinstance(spec.parallelize_fn, _Parallelize):
        raise ValueError(f"the config of {spec.name} is sharded by torch_ragged already: call ragged() once")
    with installed(orig_param_policy=orig_param_policy, **options):
        pass  # Raises for a wrong option now, and not when the model is there.
    spec = dataclasses.replace(
        spec,
        parallelize_fn=_Parallelize(spec.name, spec.parallelize_fn, orig_param_policy, options),
        state_dict_adapter=with_ragged_experts(spec.state_dict_adapter),
    )
    return dataclasses.replace(config, model_spec=spec)  # type: ignore[type-var]


class _Parallelize:
    """torchtitan's ``parallelize_fn`` of one model, during which ``fully_shard`` is ours."""

    def __init__(
        self, name: str, parallelize_fn: Callable[..., nn.Module], policy: Callable[..., Any] | None, options: dict[str, Any]
    ) -> None:
        self._name, self._parallelize_fn, self._policy, self._options = name, parallelize_fn, policy, options
        functools.update_wrapper(self, parallelize_fn)

    def __call__(self, model: nn.Module, **arguments: Any) -> nn.Module:
        names = _ParamNames(model)

        def policy(fqn: str, param: nn.Parameter) -> Any:
            granularity = None if self._policy is None else self._policy(names[param], param)
            return elements() if granularity is None else granularity

        with installed(orig_param_policy=policy, **self._options) as installation, _ties_kept(model):
            model = self._parallelize_fn(model, **arguments)
        if not installation.calls:
            raise ValueError(
                f"torchtitan's parallelize_fn of {self._name} did not call fully_shard, so nothing is sharded by torch_ragged: "
                f"use torchtitan's own config, without --module torch_ragged.integrations.torchtitan and ragged()"
            )
        return model


@contextlib.contextmanager
def _ties_kept(model: nn.Module) -> Iterator[None]:
    """Tied parameters are one parameter after ``model.parallelize``, too.

    torchtitan's ``spmd_types`` backend makes a new parameter in each module, and ties them again after ``fully_shard``, which
    would have sharded, and would all-gather, both of them.
    """
    parallelize: Any = getattr(model, "parallelize", None)
    if parallelize is None:
        yield
        return
    names: dict[torch.Tensor, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    ties = [tied for tied in names.values() if len(tied) > 1]

    def and_tie(*args: Any, **keywords: Any) -> Any:
        result = parallelize(*args, **keywords)
        for first, *others in ties:
            for name in others:
                module, _, attribute = name.rpartition(".")
                setattr(model.get_submodule(module), attribute, model.get_parameter(first))
        return result

    model.parallelize = and_tie  # type: ignore[assignment]
    try:
        yield
    finally:
        del model.parallelize


class _ParamNames:
    """The name of each parameter in the model. ``fully_shard`` knows only the name in the module that it is called on."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._names: dict[torch.Tensor, str] = {}

    def __getitem__(self, param: torch.Tensor) -> str:
        if param not in self._names:  # Tensor parallelism has replaced it.
            self._names = {each: canonical_fqn(name) for name, each in self._model.named_parameters()}
        return self._names[param]
