"""What torch's FSDP is about to get, under the names of its pull requests (October 2026). No mechanism of its own is here.

These names may change before they merge: then only this file does. ``fsdp_get_unsharded_view``, a method of tensor types, is in
``core/encodings/_tensor_types.py``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from torch_ragged._ranks.agreement import text_of
from torch_ragged.fsdp.core._fsdp_init import CPUOffloadPart, find_params
from torch_ragged.fsdp.core._fsdp_param import FoundParam, InvalidArgument
from torch_ragged.fsdp.core._fsdp_param_group import FSDPParamGroup
from torch_ragged.fsdp.core._fsdp_state import state_of
from torch_ragged.fsdp.core._kit import FeaturePart, Terms
from torch_ragged.fsdp.grads._fsdp_grad import UnsynchronizedView

__all__ = ["GRADIENT_VIEWS", "OffloadByName", "PendingView", "cpu_offload_by_budget", "largest_first", "pending_of"]


# -- pending gradients -------------------------------------------------------------------------------------------------


class PendingView(UnsynchronizedView):
    """Gradients that wait do not show in ``.grad``, which has the reduced part or is None. :func:`pending_of` shows them."""

    def _show(self, index: int, sharded: Any) -> None:
        self._shown[index] = sharded.grad  # What the program has had, to tell it from what it sets later.

    def is_incomplete(self, index: int) -> bool:
        return self._reduction.params[index].sharded.grad is self._shown[index]

    def take_back(self) -> None:
        self._shown.clear()

    def reduced(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        return gradient


GRADIENT_VIEWS: dict[str, type[UnsynchronizedView]] = {"fsdp_grad": UnsynchronizedView, "pending": PendingView}
"""By the argument of ``set_gradient_view``."""


def pending_of(groups: Sequence[FSDPParamGroup]) -> dict[DTensor, tuple[torch.Tensor | None, torch.Tensor | None]]:
    """What ``FSDPModule.get_pending_gradients`` returns."""
    found: dict[DTensor, tuple[torch.Tensor | None, torch.Tensor | None]] = {}
    for group in groups:
        view = group.view
        if not isinstance(view, PendingView):
            continue
        for index, param in enumerate(group.params):
            if view.shows(index):
                both = [view.component(index, name) for name in ("unreduced", "partial")]
                # Plain tensors: each rank reads and writes its own sums, and nothing may communicate.
                parts = [None if part is None else part._local_tensor for part in both]
                if any(part is not None for part in parts):
                    found[param.sharded] = parts[0], parts[1]  # type: ignore[index]
    return found


# -- offload by name ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class OffloadByName(FeaturePart):
    """``offload_policy={name: policy}``: parameters of one policy make a group, with its own collectives."""

    policies: Mapping[str, OffloadPolicy]
    parts: Mapping[str, FeaturePart]

    @classmethod
    def of(cls, policies: Mapping[str, OffloadPolicy]) -> OffloadByName:
        """Parameters with equal policies get one part."""
        made: dict[str, FeaturePart] = {}
        parts: dict[str, FeaturePart] = {}
        for name, policy in policies.items():
            if isinstance(policy, CPUOffloadPolicy):
                policy = CPUOffloadPart(policy.pin_memory)  # type: ignore[assignment]
            if isinstance(policy, FeaturePart):  # Otherwise it is torch's OffloadPolicy, which offloads nothing.
                parts[name] = made.setdefault(text_of(policy), policy)
        return cls(policies, parts)

    @property
    def terms(self) -> Terms:
        of_parts = [part.terms for part in dict.fromkeys(self.parts.values())]
        needs = {need: rest for terms in of_parts for need, rest in terms.needs.items()}
        return Terms("offload_policy with policies by name", needs, [each for terms in of_parts for each in terms.breaks])

    @property
    def makes_groups(self) -> bool:  # type: ignore[override]
        return any(part.makes_groups for part in self.parts.values())

    @property
    def may_fail_alone(self) -> bool:  # type: ignore[override]
        return any(part.may_fail_alone for part in self.parts.values())

    def key(self, param: FoundParam) -> Hashable:
        part = self.parts.get(param.fqn)
        return None if part is None else text_of(part)

    def part_of(self, param: FoundParam) -> FeaturePart:
        return self.parts[param.fqn]

    def tell(self, params: Sequence[FoundParam]) -> None:
        names = {param.fqn for param in params}
        if unknown := [name for name in self.policies if name not in names]:
            some = ", ".join(sorted(names)[:4])
            raise InvalidArgument(
                f"offload_policy names {', '.join(map(repr, unknown[:4]))}, which this fully_shard call does not shard: give "
                f"names as named_parameters() of the module has them, of parameters in no group yet, such as {some}"
            )


def cpu_offload_by_budget(module: nn.Module, budget_bytes: int, *, pin_memory: bool = True) -> dict[str, OffloadPolicy]:
    """A policy for the largest parameters of ``module`` that together have at most ``budget_bytes``: these are offloaded. ::

        policies = cpu_offload_by_budget(block, 2 * 2**30)  # before fully_shard
        fully_shard(block, offload_policy=policies)

    Bytes are those of whole parameters, in the dtype that they have now; of all ranks together they lie in host memory. The
    largest parameter is taken first, of equal ones that whose name is first, until one would exceed the budget. So more budget
    offloads the same parameters and others. Parameters that ``fully_shard`` has sharded already are left out.

    Raises:
        ValueError: ``budget_bytes`` is no number of bytes of at least 0.

    Source: pytorch#188120.
    """
    if isinstance(budget_bytes, bool) or not isinstance(budget_bytes, (int, float)) or not budget_bytes >= 0:
        raise ValueError(f"cpu_offload_by_budget: budget_bytes must be a number of bytes, 0 or more, got {budget_bytes!r}")
    found = find_params((module,), set(), state_of)
    sizes = {name: param.numel() * param.element_size() for name, (param, _) in found.items()}
    return dict.fromkeys(largest_first(sizes.items(), budget_bytes), CPUOffloadPolicy(pin_memory=pin_memory))


def largest_first(sizes: Iterable[tuple[str, int]], budget: float) -> list[str]:
    """The longest run of names, from the largest size on, whose sizes are at most ``budget`` together."""
    chosen: list[str] = []
    for name, size in sorted(sizes, key=lambda pair: (-pair[1], pair[0])):
        budget -= size
        if budget < 0:
            break
        chosen.append(name)
    return chosen
