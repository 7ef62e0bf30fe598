"""``Resolved``: what a plan says about one model on one mesh, as frozen records.

It must not hold a module, a parameter or a process group: records have names and placements only, and are equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Optional, Union

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

from torch_ragged.granularity import Granularity, Segments, segments
from torch_ragged.spmd._paths import Key
from torch_ragged.spmd._text import value_text
from torch_ragged.tensor._cut_placement import chunk_of

__all__ = [
    "Boundary",
    "FactoryRecord",
    "MeshShape",
    "Resolved",
    "SegmentSizes",
    "ResolvedTensor",
    "UnitRecord",
    "activation_text",
    "table",
]

Spoken = tuple[Optional[Placement], ...]
"""A placement per mesh dimension; None where no rule speaks."""


@dataclass(frozen=True)
class MeshShape:
    """The names and sizes of a mesh's dimensions: what is asked of a ``DeviceMesh``, for any world size in one process::

        MeshShape(("dp", "tp"), (64, 8))

    Raises:
        ValueError: there is not one name per size, a name is twice there, or a size is not a positive integer.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.names) != len(self.sizes) or len(set(self.names)) < len(self.names) or min(self.sizes, default=0) < 1:
            raise ValueError(f"a MeshShape has one or more different names and a positive size for each, got {self!r}")

    @classmethod
    def of(cls, mesh: Union[DeviceMesh, MeshShape]) -> MeshShape:
        """The shape of ``mesh``.

        Raises:
            TypeError: ``mesh`` is something else.
            ValueError: its dimensions have no names.
        """
        if isinstance(mesh, MeshShape):
            return mesh
        if not isinstance(mesh, DeviceMesh):
            raise TypeError(f"a plan needs a DeviceMesh, got {type(mesh).__name__}: pass init_device_mesh(...)")
        if mesh.mesh_dim_names is None:
            raise ValueError(
                f"a plan names mesh dimensions, and this mesh of shape {tuple(mesh.shape)} has no names: pass mesh_dim_names "
                "to init_device_mesh"
            )
        return cls(tuple(mesh.mesh_dim_names), tuple(mesh.shape))

    def __str__(self) -> str:
        return ", ".join([f"{name}={size}" for name, size in zip(self.names, self.sizes)])


@dataclass(frozen=True)
class SegmentSizes:
    """The matrices of a fused tensor: their sizes along dimension ``dim``."""

    dim: int
    sizes: tuple[int, ...]

    def granularity(self, each: Granularity, ndim: int) -> Granularity:
        """The granularity in a unit of a tensor of ``ndim`` dimensions: ``each``, in each segment by itself."""
        rows_have_all = 0 < self.dim == ndim - 1
        if rows_have_all or isinstance(each, Segments) or each.kind == "elements":
            return each
        return segments(self.sizes, each, self.dim)

    def __str__(self) -> str:
        return f"{'+'.join(map(str, self.sizes))} along {self.dim}"


@dataclass(frozen=True)
class ResolvedTensor:
    """A parameter or a buffer.

    Attributes:
        name: its first qualified name.
        aliases: its other names, if it is tied.
        is_parameter: False for a buffer.
        shape: the global shape.
        init, run: the placements on the whole mesh, as it is kept and as it is computed with. A unit of :meth:`Plan.unit`
            shards the tensor on top of ``init``; fully_shard chooses that placement.
        grad: the placements of the gradient; None if no rule speaks of it.
        segments: None if it is one matrix.
        unit: the module whose unit it belongs to; None if it is in no unit. "" is the root.
        rules: the indices of the rules that made this record.
    """

    name: str
    aliases: tuple[str, ...]
    is_parameter: bool
    shape: tuple[int, ...]
    init: tuple[Placement, ...]
    run: tuple[Placement, ...]
    grad: Optional[Spoken]
    segments: Optional[SegmentSizes]
    unit: Optional[str]
    rules: tuple[int, ...]


@dataclass(frozen=True)
class Boundary:
    """What happens to a tensor that enters or leaves a module. One tensor may have several, in this order of actions.

    Attributes:
        module: the module's name; "" is the root.
        side: ``"in"`` or ``"out"``.
        key: where the tensor is. Of ``"in"``, the first part is the argument: the name of a parameter of ``forward``, or a
            number, counted from the first argument, of one in ``*args``. The rest leads into containers. () of ``"out"`` is the
            output. If it leads to a container, the first tensor in it is meant.
        action: ``"annotate"``, ``"shard"`` or ``"redistribute"``.
        placements: what the tensor is (annotate), or becomes. On mesh dimensions with None it keeps its placement.
        src: what it is before, if a rule says so (redistribute).
        grad_src, grad_dst: the same of the gradient; ``grad`` of ``shard`` is ``grad_dst``.
        rules: the indices of the rules that made this record.
    """

    module: str
    side: str
    key: Key
    action: str
    placements: Spoken
    src: Optional[Spoken]
    grad_src: Optional[Spoken]
    grad_dst: Optional[Spoken]
    rules: tuple[int, ...]

    @property
    def path(self) -> str:
        """The path of the tensor, as in a plan."""
        return activation_text(self.module, self.side, self.key)


def activation_text(module: str, side: str, key: Key) -> str:
    """The path of one activation, as in a plan."""
    inner = ".".join(map(str, key))
    return f"{module}{'.' if module else ''}<{side}{':' if inner else ''}{inner}>"


@dataclass(frozen=True)
class FactoryRecord:
    """What functions make in the forward of a module. Rules of outer modules are included: the innermost record says all.

    Attributes:
        module: the module's name; "" is the root.
        functions: names of functions of torch.
        placements: None on mesh dimensions of which no rule speaks.
        rules: the indices of the rules that made this record.
    """

    module: str
    functions: tuple[str, ...]
    placements: Spoken
    rules: tuple[int, ...]


@dataclass(frozen=True)
class UnitRecord:
    """One call of fully_shard.

    Attributes:
        module: the module's name; "" is the root.
        shard: the mesh dimensions of the shards. Several are flattened into one.
        replicate: the mesh dimensions of the replicas.
        options: the options of the call, and ``granularity``.
        params: the names of the parameters that it shards. Other parameters of the module are ignored by this call.
        rules: the indices of the rules that made this record; empty for the root's unit that no rule names.
    """

    module: str
    shard: tuple[str, ...]
    replicate: tuple[str, ...]
    options: tuple[tuple[str, Any], ...]
    params: tuple[str, ...]
    rules: tuple[int, ...]


@dataclass(frozen=True)
class Resolved:
    """What a plan says about one model on one mesh. ``str`` is a table.

    Attributes:
        mesh: names and sizes of the mesh dimensions.
        tensors: every parameter, then every buffer, in the model's order.
        boundaries: tensors that enter or leave modules, in the model's order; ``"in"`` before ``"out"``.
        factories: for each module with a rule, all that holds in it. Records of one module stand together.
        units: calls of fully_shard, inner modules first.
    """

    mesh: MeshShape
    tensors: tuple[ResolvedTensor, ...]
    boundaries: tuple[Boundary, ...]
    factories: tuple[FactoryRecord, ...]
    units: tuple[UnitRecord, ...]

    @property
    def segments(self) -> dict[str, tuple[tuple[int, ...], int]]:
        """By name, the matrices side by side in each fused weight: their sizes and dimension, for ``matrix_groups``.

        They are those of ``plan.segments``, and those of an ``InterleavedShard``.
        """
        found: dict[str, tuple[tuple[int, ...], int]] = {}
        for record in self.tensors:
            ndim, segments = len(record.shape), record.segments
            for placement in record.run:
                if segments is None and (chunk := chunk_of(placement)) is not None and chunk.ratios:
                    segments = SegmentSizes(chunk.dim, chunk.segments(record.shape[chunk.dim]))
            if record.is_parameter and segments is not None and 2 <= ndim <= 4 and segments.dim >= ndim - 2:
                found[record.name] = segments.sizes, segments.dim
        return found

    def __str__(self) -> str:
        return self.text(value_text)

    def text(self, of_option: Callable[[Any], str]) -> str:
        """The tables, with the values of options written by ``of_option``."""
        names = self.mesh.names
        tensors = [
            (
                " = ".join((each.name, *each.aliases)),
                _spoken_text(names, each.init),
                _spoken_text(names, each.run) if each.run != each.init else "same",
                _spoken_text(names, each.grad),
                str(each.segments or ""),
                "" if each.unit is None else _module(each.unit),
                _rule_numbers(each.rules),
            )
            for each in self.tensors
        ]
        boundaries = [
            (
                each.path,
                each.action,
                _spoken_text(names, each.placements),
                _spoken_text(names, each.src),
                _spoken_text(names, each.grad_src),
                _spoken_text(names, each.grad_dst),
                _rule_numbers(each.rules),
            )
            for each in self.boundaries
        ]
        factories = [
            (_module(each.module), ", ".join(each.functions), _spoken_text(names, each.placements), _rule_numbers(each.rules))
            for each in self.factories
        ]
        units = [
            (
                _module(each.module),
                ", ".join(each.shard),
                ", ".join(each.replicate),
                str(len(each.params)),
                ", ".join([f"{name}={of_option(value)}" for name, value in each.options]),
                _rule_numbers(each.rules),
            )
            for each in self.units
        ]
        tables = [
            table(("tensor", "init", "run", "grad", "segments", "unit", "rules"), tensors),
            table(("boundary", "action", "placements", "src", "grad_src", "grad_dst", "rules"), boundaries),
            table(("factories of", "functions", "placements", "rules"), factories),
            table(("unit", "shard", "replicate", "params", "options", "rules"), units),
        ]
        return "\n\n".join([f"mesh: {self.mesh}", *filter(None, tables)])


def _spoken_text(names: Sequence[str], placements: Optional[Spoken]) -> str:
    """``dp=S(0) tp=P(sum)``: mesh dimensions with Replicate are left out if another one is not."""
    if placements is None:
        return ""
    told = [f"{name}={each}" for name, each in zip(names, placements) if each not in (None, Replicate())]
    replicated = [f"{name}=R" for name, each in zip(names, placements) if each == Replicate()]
    if len(replicated) == len(placements):
        return "R"
    return " ".join(told + replicated if None in placements else told)


def _module(name: str) -> str:
    return name or "(root)"


def _rule_numbers(rules: Sequence[int]) -> str:
    return ", ".join(map(str, rules))


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Columns without an entry are left out; no rows make no table."""
    if not rows:
        return ""
    columns = [column for column in zip(head, *rows) if any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    return "\n".join(["  ".join([cell.ljust(width) for cell, width in zip(row, widths)]).rstrip() for row in zip(*columns)])
