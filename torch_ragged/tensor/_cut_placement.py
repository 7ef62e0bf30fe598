"""CutPlacement: a placement that says which elements each rank owns, from which all else follows.

It must not know any subclass. A placement of your own subclasses it; see there for an example.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any, ClassVar, TypeVar

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from torch_ragged.tensor._ownership import Chunk, Cut, Listed, Whole

__all__ = [
    "CutPlacement",
    "chunk_of",
    "cut_of",
    "cuts_of",
    "has_flat",
    "has_own_chunks",
    "has_own_rules",
    "of_dim",
    "own_types",
]

_Own = TypeVar("_Own", bound="CutPlacement")
own_types: dict[str, type[CutPlacement]] = {}
"""By name, the placements that say themselves how they cut: those of this package, and of others."""

_flat_types: set[type] = set()


class CutPlacement(Placement):
    """A placement that says which elements each rank of a mesh dimension owns. DTensor's rules for it follow from that alone.

    A layout of your own is a subclass with ``ndims`` and ``boxes``. Here, the four quarters of a matrix, for two ranks::

        class Checkerboard(CutPlacement):
            ndims = 2                                   # It cuts the first two dimensions; later ones stay whole.

            def boxes(self, shape, ranks):              # By rank: offsets and sizes of its boxes, in the order of its memory.
                rows, columns = shape[0] // 2, shape[1] // 2
                at = [(0, 0), (0, columns), (rows, columns), (rows, 0)]
                quarters = [(offsets, (rows, columns)) for offsets in at]
                return [quarters[0::2], quarters[1::2]]

        t = distribute_tensor(w, mesh, [Checkerboard()])
        t.redistribute(placements=[Shard(0)]), t * 2, dcp.save({"w": t}), debug.visualize(t)

    A rank's local tensor is 1-D: its boxes, one after another, each row-major. Element-wise ops, and reductions over all
    elements, run on it; other ops all-gather first, or raise. On other mesh dimensions, Replicate and Partial are legal.

    A subclass with arguments is a frozen dataclass (its own ``__post_init__`` calls that of this class). Instances are values,
    which compare by their arguments. The texts of plans and of checkpoints find the type by its name.

    Attributes:
        ndims: how many leading dimensions :meth:`boxes` cuts.
        is_flat: whether local tensors are 1-D; if not, they have the dimensions of the tensor.
    """

    __slots__ = ()

    ndims: ClassVar[int] = 1
    is_flat: ClassVar[bool] = True
    redistribute_view: Any = None
    """Moves local tensors of a strided view; None if the cut tells how to move them."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if not cls.__name__.startswith("_"):
            own_types[cls.__name__] = cls
        if cls.is_flat:
            _flat_types.add(cls)

    def __post_init__(self) -> None:
        super().__init__()  # The __init__ of a dataclass does not call that of torch's class.

    def boxes(self, shape: tuple[int, ...], ranks: int) -> Sequence[Sequence[tuple[tuple[int, ...], tuple[int, ...]]]]:
        """For each of ``ranks`` ranks, (offsets, sizes) of its boxes of a tensor whose first ``ndims`` sizes are ``shape``.

        The boxes of all ranks together have every element once. The answer depends on the arguments alone: it is cached, and
        ranks ask for each other's boxes.

        Raises:
            ValueError: the placement has no meaning for such a tensor or so many ranks.
        """
        raise NotImplementedError(f"{type(self).__name__} must define boxes(shape, ranks)")

    @property
    def cut(self) -> Cut:
        """How the placement cuts a tensor, for ``_ownership``. By default, into :meth:`boxes`."""
        return Listed(self, self.ndims)

    def normalize(self: _Own, ndim: int, ranks: int | None = None, mesh_dim: int = 0) -> _Own:
        """This placement with non-negative dimensions, for a tensor of ``ndim`` dimensions on mesh dimension ``mesh_dim``.

        Raises:
            ValueError: it cannot be the placement of such a tensor, or of so many ``ranks`` (None: they are not known).
        """
        return self

    def move_to(self: _Own, dim: int) -> _Own:
        """The same chunks of another dimension. Asked only if the cut is a ``Chunk``."""
        raise NotImplementedError(f"{self!r} does not cut one dimension")

    def is_shard(self, dim: int | None = None) -> bool:
        """Whether each rank holds a part only: True. With ``dim``: whether the placement may cut this dimension.

        Programs ask this to know whether they must reduce over the mesh. It does not mean that the placement is a ``Shard``.
        """
        return dim is None or dim < self.ndims

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable: cannot set {name!r}; make a new placement")

    def __copy__(self: _Own) -> _Own:
        return self

    def __deepcopy__(self: _Own, memo: dict[int, Any]) -> _Own:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple([getattr(self, f.name) for f in fields(self)]) if is_dataclass(self) else ()

    def __eq__(self, other: object) -> bool:
        return self is other or (type(self) is type(other) and self.__reduce__() == other.__reduce__())

    def __hash__(self) -> int:
        return hash((type(self).__name__, self.__reduce__()[1]))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.__reduce__()[1]))})"

    def __str__(self) -> str:
        return repr(self)

    def __fx_repr__(self) -> tuple[str, dict[str, type]]:
        return repr(self), {type(self).__name__: type(self)}


def has_flat(placements: Sequence[Placement]) -> bool:
    """Whether local tensors are 1-D: one of the placements is ragged, or is like it."""
    for placement in placements:  # Every redistribution of plain DTensors runs this: isinstance takes four times as long.
        if type(placement) in _flat_types:
            return True
    return False


def has_own_rules(placements: Sequence[Placement]) -> bool:
    """Whether one of the placements says itself how it cuts, so that DTensor's own rules do not know it."""
    return any(own_types.get(type(placement).__name__) is type(placement) for placement in placements)


def has_own_chunks(placements: Sequence[Placement]) -> bool:
    """Whether one of the placements has its own way to cut a dimension of local tensors that are not flat."""
    return any(isinstance(placement, CutPlacement) and not placement.is_flat for placement in placements)


def cut_of(placement: Placement) -> Cut:
    """The cut of a placement, for :func:`torch_ragged.tensor._ownership.owned`.

    Raises:
        ValueError: the type of the placement is unknown here.
    """
    if isinstance(placement, CutPlacement):
        return placement.cut
    if isinstance(placement, _StridedShard):
        return Chunk(placement.dim, int(placement.split_factor))
    if isinstance(placement, Shard):
        return Chunk(placement.dim)
    if isinstance(placement, (Replicate, Partial)):
        return Whole()
    raise ValueError(
        f"{placement} cannot be combined with a ragged placement: use Replicate, Partial, Shard, InterleavedShard or a ragged "
        "placement"
    )


def cuts_of(placements: tuple[Placement, ...]) -> tuple[Cut, ...]:
    """The cut of each placement. Raises as :func:`cut_of`."""
    return tuple([cut_of(placement) for placement in placements])


def chunk_of(placement: Placement) -> Chunk | None:
    """How a placement cuts one dimension into chunks; None if it does not, or its type is unknown here."""
    if isinstance(placement, (Shard, _StridedShard)) or (isinstance(placement, CutPlacement) and not placement.is_flat):
        return cut_of(placement)  # type: ignore[return-value]
    return None


def of_dim(placement: Placement, dim: int) -> Placement:
    """A placement that cuts dimension ``dim`` as ``placement`` cuts its own one."""
    if isinstance(placement, CutPlacement):
        return placement.move_to(dim)
    if isinstance(placement, _StridedShard):
        return _StridedShard(dim, split_factor=placement.split_factor)
    return Shard(dim)
