"""FeaturePart and Kit: what an argument of ``fully_shard`` brings to a group.

Nothing here knows a feature by name, and nothing allocates memory: a part makes the kit of a group, and the group uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from torch_ragged._ranks.agreement import text_of
from torch_ragged.fsdp.comm._collectives import ProcessGroupCollectives
from torch_ragged.fsdp.core._dbuffer import GroupMemory, MemoryLog
from torch_ragged.fsdp.core._fsdp_param import FoundParam, Reading
from torch_ragged.fsdp.core._mesh import DataParallelMesh
from torch_ragged.fsdp.core.encodings._plain import Encoding, Keeper, Shards
from torch_ragged.fsdp.layout._buffer_layout import BufferLayout, TensorSpec
from torch_ragged.granularity import Granularity

__all__ = [
    "SHARD_ALIGNMENT_BYTES",
    "Draft",
    "FeaturePart",
    "GroupPlan",
    "Kit",
    "Need",
    "PlainPart",
    "Terms",
    "check_pairs",
]

SHARD_ALIGNMENT_BYTES = 128


class Need(Enum):
    """What features need of each other. A part outside of this package may have needs of its own: any constants."""

    EQUAL_SHARDS = "shards of equal size"
    FREED = "parameters that are freed between uses, and all-gathered anew"
    IN_MESH = "a rank of the mesh"
    MOVABLE = "groups that another mesh can have"
    ONE_BUFFER = "the same buffers in forward and backward"
    ONE_MODULE = "one module"
    OWN_MESH = "a mesh of data-parallel dimensions only"
    PLAIN_SHARDS = "shards that are elements of one buffer"
    WHOLE_ROWS = "shards of whole rows"


@dataclass(frozen=True)
class Terms:
    """On which terms a feature works together with others. This is no list of pairs: a new feature meets all that exist.

    Attributes:
        given: what the user has written, as in ``weights=[3, 2]``: for errors.
        needs: what other features must not break; for each, the rest of the error: why, and what to write instead.
        breaks: what others can no longer have.
    """

    given: str
    needs: Mapping[Any, str] = field(default_factory=dict)
    breaks: Sequence[Any] = ()


class FeaturePart:
    """What one argument of ``fully_shard``, or one kind of parameter, brings. A subclass overrides what differs from FSDP2.

    The classes that users pass, such as ``Float8Policy``, are parts themselves. A new encoding is a subclass of torch's policy
    and of this class, passed as ``mp_policy``. It needs no change in this package::

        @dataclass(frozen=True)
        class Halved(MixedPrecisionPolicy, FeaturePart):
            def key(self, param):
                return "halved" if param.value.ndim > 1 else None

            def equip(self, kit):
                kit.encoding = HalvedEncoding(kit.layout, kit.rank)

    Attributes:
        makes_groups: whether :meth:`shards_over` makes process groups: then ranks agree on all options before.
        may_fail_alone: whether making a group may raise on one rank only, as if its disk is full.
    """

    makes_groups = False
    may_fail_alone = False

    def text(self) -> str:
        """What ranks compare: equal on ranks with equal parts."""
        return text_of(self)

    @property
    def terms(self) -> Terms:
        """Which other parts it works with."""
        return Terms(self.text())

    def refuses(self, others: Sequence[FeaturePart]) -> str | None:
        """Why this part cannot be used with one of ``others``, and what to write instead; None if it can."""
        mine = self.terms
        # One direction only: the other part is asked, too, so that a sentence stands once, beside the feature that has the
        # need.
        theirs = [(each.terms.given, need) for each in others for need in each.terms.breaks if need in mine.needs]
        return next((f"{mine.given} does not support {given}{mine.needs[need]}" for given, need in theirs), None)

    def read(self, fqn: str, param: torch.Tensor, dp: DataParallelMesh) -> Reading | None:
        """How the model has distributed ``param``, if this part can tell and no DTensor does."""
        return None

    def key(self, param: FoundParam) -> Hashable:
        """Parameters with different keys have groups of their own. True: with all others; None: it has no part."""
        return True

    def part_of(self, param: FoundParam) -> FeaturePart:
        """The part of a parameter that has a :meth:`key`: another one, if the user has given each parameter its own."""
        return self

    def default_granularity(self, param: torch.Tensor, places: Sequence[tuple[nn.Module, str]]) -> Granularity | None:
        """What must not be cut of a parameter for which the user has given no granularity."""
        return None

    def tell(self, params: Sequence[FoundParam]) -> None:
        """Log what a user should know about the effect on these parameters, all of one call. Raise if it fits none."""

    def shards_over(self, dp: DataParallelMesh) -> DataParallelMesh:
        """The mesh of the shards, if it is not the user's, ``dp``. All ranks have agreed on their options before."""
        return dp

    def arrange(self, draft: Draft) -> None:
        """Change how a group is laid out. No communication: ranks compare the layouts afterwards."""

    def equip(self, kit: Kit) -> None:
        """Change what a group is made of. No memory is allocated, nothing is communicated."""

    def keeper(self, dp: DataParallelMesh, encoding: Encoding, log: MemoryLog) -> Keeper | None:
        """What keeps gathered parameters after reshard. It may make process groups: all ranks call it, in one order."""
        return None


@dataclass(frozen=True)
class PlainPart(FeaturePart):
    """A part that changes nothing: it only meets others. So is a later call, such as ``reshard_to``."""

    terms: Terms = Terms("")
    makes_groups: bool = False


def check_pairs(parts: Sequence[FeaturePart]) -> None:
    """Raise if one of ``parts`` refuses another one.

    Raises:
        ValueError: it does.
    """
    for part in parts:
        # In the order of the arguments: ranks with equal arguments raise the same sentence.
        if sentence := part.refuses([other for other in parts if other is not part]):
            raise ValueError(sentence)


@dataclass
class Draft:
    """The layout of a group before it is planned. Parts change it, in their order.

    Attributes:
        specs: what the planner knows of ``params``.
        alignment: of shards, in elements: the bytes of a shard are a multiple of 128 in every dtype.
        weights: one per rank, if shards are in proportion to them.
        layout: if a part has planned it already.
    """

    params: Sequence[FoundParam]
    specs: Sequence[TensorSpec]
    ranks: int
    alignment: int
    weights: Sequence[int] | None = None
    layout: BufferLayout | None = None


# Compared by identity: == of the parameters inside would compare their elements.
@dataclass(frozen=True, eq=False)
class GroupPlan:
    """The input of one group: parameters of one dtype and one compute dtype, on one mesh.

    Attributes:
        param_dtype, reduce_dtype: as in the mixed precision policy.
        parts: those of the call, and of the parameters' kinds, that have an effect on this group.
        runs_on_meta: whether the group trains on the meta device, as memory reports do.
        compute_parameter: makes the unsharded parameter of a large tensor, given the group and the parameter's index. If it is
            None or returns None: a plain parameter.
    """

    params: Sequence[FoundParam]
    dp: DataParallelMesh
    layout: BufferLayout
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    mp_policy: MixedPrecisionPolicy
    parts: Sequence[FeaturePart] = ()
    runs_on_meta: bool = False
    compute_parameter: Callable[[Any, int, torch.Tensor], nn.Parameter | None] | None = None

    def part(self, kind: type) -> Any:
        """The part of the class ``kind``; None if there is none."""
        return next((part for part in self.parts if isinstance(part, kind)), None)


class Kit:
    """What a group is made of: that of FSDP2, until the parts of its plan have changed it.

    Attributes:
        shards: where the sharded parameters lie.
        encoding: what the all-gather sends, and where the unsharded parameters lie.
        collectives: over the process groups of the mesh.
        keeper: keeps gathered parameters after reshard: that of the last part that has one. ``fully_shard`` sets it.
        offloads_params: whether shards and ``.grad`` are on the CPU, where the optimizer runs.
        pins_memory: whether they are pinned then.
        memory: the log of the group's memory.
        group_type: makes the group of its plan and kit; None: :class:`FSDPParamGroup`.
    """

    def __init__(self, plan: GroupPlan) -> None:
        self.plan, self.layout, self.rank = plan, plan.layout, plan.dp.rank
        # No memory yet: the group allocates it, after all ranks have agreed.
        self.shards = Shards(self.layout, self.rank)
        self.encoding = plain = Encoding(self.layout, self.rank)
        self.collectives = ProcessGroupCollectives(plan.dp.shard_group, plan.dp.replicate_group, plan.dp.levels)
        self.keeper: Keeper | None = None
        self.offloads_params = self.pins_memory = False
        self.memory = GroupMemory()
        self.group_type: Callable[..., Any] | None = None
        for part in plan.parts:
            part.equip(self)  # Later parts see what earlier ones have chosen.
        if self.encoding is plain and self.layout.ranks == 1:  # Not before: a part may have exchanged the shards.
            self.encoding = Encoding(self.layout, self.rank, self.shards)
