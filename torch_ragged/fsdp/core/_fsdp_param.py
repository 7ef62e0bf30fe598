"""FSDPParam: one parameter of a group, sharded and unsharded."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch
from torch import nn

from torch_ragged.fsdp.core._distribution import Distribution

__all__ = ["FSDPParam", "owner_of"]

_owners: weakref.WeakValueDictionary[int, FSDPParam] = weakref.WeakValueDictionary()
"""By ``id`` of a sharded parameter: torch swaps the contents of tensors only if they have no weak references."""


@dataclass
class FSDPParam:
    """One parameter of a group, with the modules and names that it is registered under (several if tied).

    Attributes:
        distribution: how the elements are distributed.
        sharded: the DTensor that is registered between uses.
        unsharded: the parameter that the model computes with.
        view: the memory of ``unsharded``, in the group's buffer.
        requires_grad: of ``sharded`` and ``unsharded``, when they were last made equal.
        version: :attr:`compute_version` after the last all-gather.
        has_gradient: whether the unreduced buffer holds a gradient.
        was_used: whether this rank has a gradient in the next or current reduction.
        may_be_wide: whether the gradient may have a wider dtype than the gradient buffer.
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

    def __post_init__(self) -> None:
        self.set_sharded(self.sharded)

    def set_sharded(self, value: nn.Parameter) -> None:
        """Let another object be the sharded parameter."""
        self.sharded = value
        _owners[id(value)] = self

    def is_another(self, current: torch.Tensor) -> bool:
        """Whether ``current`` is the sharded form of another parameter, which is registered under its own name, too."""
        other = owner_of(current)
        if other is None or other is self:
            return False
        return other.registered is other.sharded or other.registered is other.unsharded

    @property
    def registered(self) -> torch.Tensor | None:
        """The parameter that is registered in the modules now."""
        module, name = self.registered_names[0]
        return module._parameters.get(name)

    @property
    def is_renormalized(self) -> bool:
        """Whether its module writes to it in every forward, as an embedding with ``max_norm`` does."""
        return any(getattr(module, "max_norm", None) is not None for module, _ in self.registered_names)

    @property
    def compute_version(self) -> int:
        """A number that changes with every write to the unsharded parameter."""
        return self.unsharded._version + self.view._version

    def register(self, value: nn.Parameter) -> None:
        """Register ``value`` in the modules."""
        before = self.requires_grad
        if self.sharded.requires_grad is not before or self.unsharded.requires_grad is not before:
            self.sync_requires_grad()
        for module, name in self.registered_names:
            if type(module).__setattr__ is nn.Module.__setattr__:
                module._parameters[name] = value
            else:  # Such a module may keep its own references.
                setattr(module, name, value)

    def sync_requires_grad(self) -> None:
        """If the user has frozen or unfrozen one of the two parameters, do the same with the other one."""
        sharded, unsharded, before = self.sharded, self.unsharded, self.requires_grad
        if sharded.requires_grad is before and unsharded.requires_grad is before:
            return
        self.requires_grad = not before
        sharded.requires_grad_(self.requires_grad)
        unsharded.requires_grad_(self.requires_grad)


def owner_of(parameter: torch.Tensor) -> FSDPParam | None:
    """The parameter whose sharded form is ``parameter``; None if ``fully_shard`` has not made it."""
    owner = _owners.get(id(parameter))
    return owner if owner is not None and owner.sharded is parameter else None  # An id may be used again.
