"""FSDPParam: one parameter of a group, sharded and unsharded."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from torch_ragged.fsdp.core._distribution import Distribution

__all__ = ["FSDPParam"]


@dataclass
class FSDPParam:
    """One parameter of a group, with the modules and names that it is registered under (several if tied).

    Attributes:
        distribution: how its elements are distributed.
        sharded: the DTensor that is registered between uses.
        unsharded: what the model computes with; ``view`` is its memory, in the group's buffer.
        requires_grad: of both, when they were switched last.
        version: :attr:`compute_version` when it was gathered.
        has_gradient: there is one in the gradient buffer.
        was_used: in the reduction in flight.
        may_be_wide: whether its gradient may come in a wider dtype than the group's.
    """

    fqn: str
    registered_names: list[tuple[nn.Module, str]]
    distribution: Distribution
    sharded: nn.Parameter
    unsharded: nn.Parameter = field(init=False)
    view: torch.Tensor = field(init=False)
    requires_grad: bool = True
    version: int = 0
    has_gradient: bool = False
    was_used: bool = False
    may_be_wide: bool = False

    @property
    def registered(self) -> torch.Tensor | None:
        """What the modules have for this parameter now."""
        module, name = self.registered_names[0]
        return module._parameters.get(name)

    @property
    def is_renormalised(self) -> bool:
        """Whether its module writes to it in forward, the same each time: an embedding with ``max_norm``."""
        return any(getattr(module, "max_norm", None) is not None for module, _ in self.registered_names)

    @property
    def compute_version(self) -> int:
        """Changes with every write to the unsharded parameter."""
        return self.unsharded._version + self.view._version

    def register(self, value: nn.Parameter) -> None:
        """Make ``value`` the modules' parameter."""
        self.sync_requires_grad()
        for module, name in self.registered_names:
            if type(module).__setattr__ is nn.Module.__setattr__:
                module._parameters[name] = value
            else:  # It may keep references of its own.
                setattr(module, name, value)

    def sync_requires_grad(self) -> None:
        """Freezing or unfreezing either of the two parameters holds for both."""
        sharded, unsharded, before = self.sharded, self.unsharded, self.requires_grad
        if sharded.requires_grad is before and unsharded.requires_grad is before:  # Five times a step: no list is made.
            return
        self.requires_grad = not before
        sharded.requires_grad_(self.requires_grad)
        unsharded.requires_grad_(self.requires_grad)
