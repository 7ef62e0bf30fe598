"""What a script adds to a model after ``parallelize``, such as an adapter or a new head, trains as the rest of the model does.

It must not change what a unit shards: fully_shard copies the values of parameters that were replaced, or raises.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.nn.modules.module import register_module_module_registration_hook, register_module_parameter_registration_hook
from torch.utils.weak import WeakTensorKeyDictionary

from torch_ragged.fsdp import fully_shard
from torch_ragged.fsdp.gates._untrained import note_replaced, note_root
from torch_ragged.spmd._gradients import PendingGradients
from torch_ragged.tensor._read import meet

__all__ = ["add_later"]

# torch calls its registration hooks for each module of the process. By this table, they know the modules of a plan. Weak on
# both sides (_Model has a weak reference): a dropped model is freed.
_models: weakref.WeakKeyDictionary[nn.Module, _Model] = weakref.WeakKeyDictionary()
"""Of each module in a parallelized model."""

_hooks: list[Any] = []

Planned = Mapping[str, tuple[tuple[int, ...], tuple[Placement, ...], tuple[Placement, ...]]]
"""By name, the shape, the placements and the gradient's placements of the parameters that a plan knows."""


def add_later(model: nn.Module, mesh: DeviceMesh, planned: Planned, pending: PendingGradients) -> None:
    """From now on, plain parameters become DTensors when they are registered in a parallelized model, from rank 0's values::

        model = parallelize(model, plan, mesh)
        model.head = nn.Linear(64, 10)                              # the parameters of model.head are DTensors now
        optimizer = AdamW(model.parameters())

    They are ``Replicate()``, or as the plan says of a parameter with this name and shape. A plain parameter would count as
    ``Replicate()``, too, but its gradient would be a DTensor that is pending a sum: optimizers do not expect that.

    A step costs nothing more: torch calls these hooks if something is registered in a module.

    Args:
        pending: reduces the gradients of parameters that are in no unit.
    """
    if not _hooks:
        _hooks.append(register_module_parameter_registration_hook(_parameter_added))  # type: ignore[arg-type]
        _hooks.append(register_module_module_registration_hook(_module_added))
    _models.update(dict.fromkeys(model.modules(), _Model(model, mesh, planned, pending)))


def _parameter_added(module: nn.Module, name: str, param: nn.Parameter | None) -> nn.Parameter | None:
    if (model := _models.get(module)) is None:
        return None
    if (before := module._parameters.get(name)) is not None and before is not param:
        model.forget(before)
    if param is None:
        return None
    return model.placed(module, [(name, module, name, param)])[0]


def _module_added(parent: nn.Module, name: str, module: nn.Module | None) -> None:
    model = _models.get(parent)
    if module is None or model is None:
        if module in _models:
            if name == "base_layer" and type(parent).__module__.startswith("peft."):
                # PEFT reads the shape of a local tensor next, and later moves the adapter, which fails without a reason.
                raise ValueError(
                    f"{type(parent).__name__} of PEFT wraps a {type(module).__name__} of a parallelized model: wrap first, "
                    'model = get_peft_model(model, ...), then parallelize(model, plan.under("base_model.model"), mesh)'
                )
            note_root([parent])  # For errors: its own parameters are not those of the parallelized model.
        return
    named = list(module.named_modules(prefix=name))
    owners = [(f"{path}.{key}", each, key, p) for path, each in named for key, p in each._parameters.items() if p is not None]
    for (_, owner, key, _), param in zip(owners, model.placed(parent, owners)):
        owner._parameters[key] = param
    _models.update(dict.fromkeys([each for _, each in named], model))


class _Model:
    """A parallelized model. The arguments are those of :func:`add_later`."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh, planned: Planned, pending: PendingGradients) -> None:
        self._model, self._mesh, self._planned, self._pending = weakref.ref(model), mesh, planned, pending
        self._known = WeakTensorKeyDictionary()  # The DTensor of each plain parameter: a tied one comes again.

    def forget(self, param: nn.Parameter) -> None:
        """Another parameter, or none, takes its place."""
        self._pending.forget(param)

    def placed(self, parent: nn.Module, owners: Sequence[tuple[str, nn.Module, str, nn.Parameter]]) -> list[nn.Parameter]:
        """Parameters as they are in the model from now on.

        Args:
            owners: of each, its name under ``parent``, the module that has it, its name there, and itself.
        """
        model = self._model()
        if model is None:
            return [param for *_, param in owners]
        prefix = next((f"{name}." for name, module in model.named_modules() if module is parent and name), "")
        in_units = {pair: each for group in _groups_of(model) for each in group.params for pair in each.registered_names}
        for name, module, key, param in owners:
            unit = in_units.get((module, key))
            if unit is not None and param is not unit.sharded and param is not unit.unsharded:
                # The next forward copies its values, or raises. An optimizer that holds it trains nothing.
                note_replaced(param, f"{prefix}{name}", module, key, "a forward of its unit")
        added = {
            param: (f"{prefix}{name}", module, key)
            for name, module, key, param in owners
            if not isinstance(param, DTensor) and param not in self._known and (module, key) not in in_units
        }
        if meta := next((name for param, (name, _, _) in added.items() if param.is_meta), None):
            raise ValueError(
                f"{meta} is on the meta device, and its model is parallelized: give it values before you add it, by "
                "materialize(module) if it is deferred, or by to_empty and reset_parameters"
            )
        if added:
            # Before a broadcast: another rank may add something else, or nothing.
            lines = [
                f"{name} of {param.dtype} and shape {tuple(param.shape)}{'' if param.requires_grad else ', frozen'}"
                for param, (name, _, _) in added.items()
            ]
            names = ", ".join([name for name, _, _ in added.values()][:3])
            call = f"the addition of {names} to a parallelized model"
            # All ranks of the mesh wait here. It has a group of its own, so a rank that adds nothing is found, and its next
            # collective is not taken for this one.
            meet(self._mesh, call, "\n".join(lines), "add the same parameters on all ranks")
        for _, module, key, param in owners:
            # A DTensor already, as in the copy of a layer: its gradients are reduced as this model's.
            if isinstance(param, DTensor) and (module, key) not in in_units and self._pending.placements_of(param) is None:
                self._pending.add(param, tuple(param.placements))
        # In the order of registration, on which ranks have agreed: each is a broadcast from rank 0.
        for param, (name, module, key) in added.items():
            self._known[param] = self._distributed(param, name)
            note_replaced(param, name, module, key, "parallelize")
        return [param if (module, key) in in_units else self._known.get(param, param) for _, module, key, param in owners]

    def _distributed(self, param: nn.Parameter, name: str) -> nn.Parameter:
        everywhere: tuple[Placement, ...] = (Replicate(),) * self._mesh.ndim
        shape, placements, of_gradient = self._planned.get(name, (None, everywhere, everywhere))
        if shape != tuple(param.shape):
            placements = of_gradient = everywhere
        placed = nn.Parameter(distribute_tensor(param.detach(), self._mesh, placements), requires_grad=param.requires_grad)
        if param.grad is not None:
            # A layer that the script has trained by itself.
            placed.grad = distribute_tensor(param.grad, self._mesh, placements)
        vars(placed).update(vars(param))
        # Others cannot have a gradient: torch would refuse the hook.
        if placed.is_floating_point() or placed.is_complex():
            self._pending.add(placed, of_gradient)
        return placed


def _groups_of(model: nn.Module) -> Sequence[Any]:
    return [group for each in model.modules() if (state := fully_shard.state(each)) is not None for group in state.groups]  # type: ignore[attr-defined]
