"""Layouts of a whole model at one FSDP size: those of this package, and shard sizes of the two schemes to compare with.

Nothing here depends on dtypes: all sizes are in elements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Optional

from torch_ragged.fsdp import BufferLayout, Granularity, TensorSpec, elements, plan_layout, segments
from torch_ragged.fsdp.layout._weighted import check_weights
from torch_ragged.offline._models import Model
from torch_ragged.offline._peers import RowBuffer, fsdp2_shard
from torch_ragged.offline._shapes import Parameter

__all__ = ["GroupKind", "ModelPlan", "ModelPlanner", "Policy", "Sizes", "granularity_policy", "tensor_specs"]

Policy = Callable[[Parameter], Granularity]


def granularity_policy(
    granularity: Granularity, every_matrix: bool, fused: Mapping[str, Sequence[tuple[int, Optional[Granularity]]]] | None = None
) -> Policy:
    """A policy that gives ``granularity`` to expert matrices, and ``elements()`` to all other parameters.

    If ``every_matrix`` is True, all parameters of two or more dimensions get ``granularity``. Parameters that ``fused`` names
    are fused weights: it has the size and the granularity of each of their segments, or None for that of the parameter.
    """

    def policy(one: Parameter) -> Granularity:
        whole = granularity if one.expert or (every_matrix and len(one.shape) >= 2) else elements()
        parts = (fused or {}).get(one.name)
        if parts is None:
            return whole
        return segments([size for size, _ in parts], [own or whole for _, own in parts])

    return policy


def tensor_specs(group: str, parameters: Sequence[Parameter], policy: Policy) -> tuple[TensorSpec, ...]:
    """The planner's descriptions of ``parameters``, with names relative to the group."""
    return tuple(policy(one).tensor_spec(one.name.removeprefix(f"{group}."), one.shape) for one in parameters)


@dataclass(frozen=True)
class GroupKind:
    """Groups that differ in their names only, and therefore have one layout.

    Attributes:
        names: the names of the groups.
        tensors: the tensors of each group.
    """

    names: tuple[str, ...]
    tensors: tuple[TensorSpec, ...]


@dataclass(frozen=True)
class Sizes:
    """The shard sizes of a model in one scheme.

    Attributes:
        ranks: the number of shards of each group.
        numel: the elements of the model.
        shards: for each kind of group, the number of groups and the elements of one group's shard, of the largest one.
        weights: the sizes of the ranks' shards, relative to each other; empty if they are equal.
    """

    ranks: int
    numel: int
    shards: tuple[tuple[int, int], ...]
    weights: tuple[int, ...] = ()

    def whole(self, shard: int) -> int:
        """Elements of all ranks, if the largest shard has ``shard`` elements."""
        return sum(self.weights) * (shard // max(self.weights)) if self.weights else self.ranks * shard

    @property
    def shard_numel(self) -> int:
        """Elements of all shards of a rank together, padding included."""
        return sum(count * shard for count, shard in self.shards)

    @property
    def largest_shard_numel(self) -> int:
        """Elements of a rank's shard of the largest group, padding included."""
        return max(shard for _, shard in self.shards)

    @property
    def padding_fraction(self) -> float:
        """Padding of the whole model, relative to its elements."""
        return (self.whole(self.shard_numel) - self.numel) / self.numel


@dataclass(frozen=True)
class ModelPlan:
    """A model at one FSDP size.

    Attributes:
        kinds: the model's groups.
        layouts: the layout of each kind of group.
        ragged: the shard sizes of this package.
        bound: the lower bounds on these shard sizes.
        fsdp2: the shard sizes of FSDP2.
        lcm: the shard sizes of a buffer of rows in LCM cells, see :class:`RowBuffer`.
    """

    kinds: tuple[GroupKind, ...]
    layouts: tuple[BufferLayout, ...]
    ragged: Sizes
    bound: Sizes
    fsdp2: Sizes
    lcm: Sizes

    @property
    def ranks(self) -> int:
        return self.ragged.ranks

    @property
    def schemes(self) -> dict[str, Sizes]:
        return {"torch_ragged": self.ragged, "FSDP2": self.fsdp2, "LCM": self.lcm}

    def group_layouts(self) -> dict[str, BufferLayout]:
        """The layout of every group by name; groups of one kind share it."""
        return {name: layout for kind, layout in zip(self.kinds, self.layouts) for name in kind.names}


class ModelPlanner:
    """Plans a model at several FSDP sizes. Results that do not depend on the size are computed once.

    Args:
        model: the model.
        policy: the granularity of each parameter.
        alignment: shard sizes are a multiple of it, in elements.
    """

    def __init__(self, model: Model, policy: Policy, alignment: int) -> None:
        self.model, self.alignment = model, alignment
        self.kinds = _group_kinds(model, policy)
        self._numel = model.numel
        self._row_buffers = [RowBuffer.pack(kind.tensors, alignment) for kind in self.kinds]

    def plan(self, ranks: int, weights: Sequence[int] | None = None) -> ModelPlan:
        """Layouts of all groups over ``ranks`` ranks, with equal shards or with shards in proportion to ``weights``.

        Raises:
            ValueError: ``ranks`` is below 1, or ``weights`` are not one per rank.
        """
        layouts = tuple(plan_layout(kind.tensors, ranks, self.alignment, weights=weights) for kind in self.kinds)
        shares = () if weights is None else check_weights(weights, ranks)
        return ModelPlan(
            self.kinds,
            layouts,
            ragged=self._sharding(ranks, [layout.shard_numel for layout in layouts], shares),
            bound=self._sharding(ranks, [layout.lower_bound for layout in layouts], shares),
            fsdp2=self._sharding(ranks, [fsdp2_shard(kind.tensors, ranks) for kind in self.kinds]),
            lcm=self._sharding(ranks, [buffer.shard(ranks) for buffer in self._row_buffers]),
        )

    def _sharding(self, ranks: int, shards: Sequence[int], weights: tuple[int, ...] = ()) -> Sizes:
        return Sizes(ranks, self._numel, tuple((len(kind.names), shard) for kind, shard in zip(self.kinds, shards)), weights)


def _group_kinds(model: Model, policy: Policy) -> tuple[GroupKind, ...]:
    kinds: dict[object, tuple[list[str], tuple[TensorSpec, ...]]] = {}
    for group, parameters in model.groups.items():
        specs = tensor_specs(group, parameters, policy)
        cuts = tuple((spec.shape, spec.dims, spec.block, spec.period, spec.segments) for spec in specs)
        names, _ = kinds.setdefault(cuts, ([], specs))
        names.append(group)
    return tuple(GroupKind(tuple(names), specs) for names, specs in kinds.values())
