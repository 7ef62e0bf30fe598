"""Layouts of a whole model at one FSDP size: the package's own, beside the two schemes it is compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch_ragged.fsdp import BufferLayout, Granularity, TensorSpec, elements, plan_layout
from torch_ragged.fsdp.plan._models import Model
from torch_ragged.fsdp.plan._peers import RowBuffer, fsdp2_shard
from torch_ragged.fsdp.plan._shapes import Parameter

__all__ = ["GroupKind", "ModelPlan", "ModelPlanner", "Policy", "Sharding", "granularity_policy", "tensor_specs"]

Policy = Callable[[Parameter], Granularity]


def granularity_policy(granularity: Granularity, every_matrix: bool) -> Policy:
    """``granularity`` for expert matrices, or for all parameters of two or more dimensions; any other is element-wise."""
    return lambda one: granularity if one.expert or (every_matrix and len(one.shape) >= 2) else elements()


def tensor_specs(group: str, parameters: Sequence[Parameter], policy: Policy) -> tuple[TensorSpec, ...]:
    """What the planner is told of ``parameters``; names are without that of the group."""
    return tuple(policy(one).tensor_spec(one.name.removeprefix(f"{group}."), one.shape) for one in parameters)


@dataclass(frozen=True)
class GroupKind:
    """Groups that differ in their name only, and therefore have one layout: their names, and the tensors of each."""

    names: tuple[str, ...]
    tensors: tuple[TensorSpec, ...]


@dataclass(frozen=True)
class Sharding:
    """What one scheme makes of a model.

    Attributes:
        ranks: number of shards of each group.
        numel: elements of the model.
        shards: per kind of group, how many groups there are and the elements of each one's shard.
    """

    ranks: int
    numel: int
    shards: tuple[tuple[int, int], ...]

    @property
    def shard_numel(self) -> int:
        """Elements of a rank's shards of all groups together, padding included."""
        return sum(count * shard for count, shard in self.shards)

    @property
    def largest_shard_numel(self) -> int:
        """Elements of a rank's shard of the largest group, padding included."""
        return max(shard for _, shard in self.shards)

    @property
    def padding_fraction(self) -> float:
        """Padding of the whole model, relative to its elements."""
        return (self.ranks * self.shard_numel - self.numel) / self.numel


@dataclass(frozen=True)
class ModelPlan:
    """A model at one FSDP size.

    Attributes:
        kinds: the model's groups.
        layouts: of each kind of group.
        ragged, bound, fsdp2, lcm: shard sizes of the package, of its lower bound, of FSDP2 and of rows in LCM cells.
    """

    kinds: tuple[GroupKind, ...]
    layouts: tuple[BufferLayout, ...]
    ragged: Sharding
    bound: Sharding
    fsdp2: Sharding
    lcm: Sharding

    @property
    def ranks(self) -> int:
        return self.ragged.ranks

    @property
    def schemes(self) -> dict[str, Sharding]:
        return {"torch_ragged": self.ragged, "FSDP2": self.fsdp2, "LCM": self.lcm}

    def group_layouts(self) -> dict[str, BufferLayout]:
        """The layout of every group by name; groups of one kind share it."""
        return {name: layout for kind, layout in zip(self.kinds, self.layouts) for name in kind.names}


class ModelPlanner:
    """Plans a model at any number of FSDP sizes; what does not depend on the size is computed once.

    Args:
        model: what to plan.
        policy: the granularity of each parameter.
        alignment: shard sizes are a multiple of it, in elements.
    """

    def __init__(self, model: Model, policy: Policy, alignment: int) -> None:
        self.model, self.alignment = model, alignment
        self.kinds = _group_kinds(model, policy)
        self._numel = model.numel
        self._row_buffers = [RowBuffer.pack(kind.tensors, alignment) for kind in self.kinds]

    def plan(self, ranks: int) -> ModelPlan:
        """Layouts of all groups over ``ranks`` ranks.

        Raises:
            ValueError: ``ranks`` is below 1.
        """
        layouts = tuple(plan_layout(kind.tensors, ranks, self.alignment) for kind in self.kinds)
        return ModelPlan(
            self.kinds,
            layouts,
            ragged=self._sharding(ranks, [layout.shard_numel for layout in layouts]),
            bound=self._sharding(ranks, [layout.lower_bound for layout in layouts]),
            fsdp2=self._sharding(ranks, [fsdp2_shard(kind.tensors, ranks) for kind in self.kinds]),
            lcm=self._sharding(ranks, [buffer.shard(ranks) for buffer in self._row_buffers]),
        )

    def _sharding(self, ranks: int, shards: Sequence[int]) -> Sharding:
        return Sharding(ranks, self._numel, tuple((len(kind.names), shard) for kind, shard in zip(self.kinds, shards)))


def _group_kinds(model: Model, policy: Policy) -> tuple[GroupKind, ...]:
    kinds: dict[object, tuple[list[str], tuple[TensorSpec, ...]]] = {}
    for group, parameters in model.groups.items():
        specs = tensor_specs(group, parameters, policy)
        cuts = tuple((spec.shape, spec.dims, spec.block, spec.period) for spec in specs)
        names, _ = kinds.setdefault(cuts, ([], specs))
        names.append(group)
    return tuple(GroupKind(tuple(names), specs) for names, specs in kinds.values())
