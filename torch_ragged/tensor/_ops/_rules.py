"""The arguments and the result of a rule, and the tables of rules and decompositions. It must not know any rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Optional, Protocol, Union

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement
from torch.utils import _pytree as pytree

from torch_ragged.tensor._cut_placement import CutPlacement

__all__ = [
    "Layout",
    "Meta",
    "NoLocalWay",
    "NormPartial",
    "OpCall",
    "Sharding",
    "Spec",
    "Torch",
    "argument_position",
    "decomposition",
    "decomposition_of",
    "dims_from_the_front",
    "fits_out",
    "is_random",
    "is_row_major",
    "is_written",
    "returns_alias",
    "returns_list",
    "rule",
    "rule_of",
    "tensor_leaves",
    "unsupported",
    "wide",
    "with_placement",
    "written_leaves",
]


class Meta(Protocol):
    """The part of torch's TensorMeta that rules read."""

    @property
    def shape(self) -> torch.Size: ...
    @property
    def stride(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...


class Spec(Protocol):
    """The part of torch's DTensorSpec that rules read."""

    @property
    def mesh(self) -> DeviceMesh: ...
    @property
    def placements(self) -> tuple[Placement, ...]: ...
    @property
    def shape(self) -> torch.Size: ...
    @property
    def tensor_meta(self) -> Any: ...


Layout = tuple[tuple[Placement, ...], Sequence[int]]
"""The placements and global shape of a tensor."""


class Torch(Protocol):
    """Questions of rules to torch's own sharding propagation. Answers are cached."""

    def output_meta(self) -> list[Optional[Meta]]:
        """Metadata of the outputs of a single device."""

    def output_layouts(self, inputs: Sequence[Layout]) -> Optional[Sequence[Optional[Layout]]]:
        """The outputs of torch's own rule for tensor arguments with the placements and shapes of ``inputs``.

        None if torch has no rule for them, or its rule would redistribute an argument first.
        """

    def output_shapes(self, shapes: Sequence[Sequence[int]]) -> Optional[Sequence[Optional[Sequence[int]]]]:
        """The shapes of a single device's outputs for tensor arguments of ``shapes``; None if a single device would raise."""


@dataclass(frozen=True)
class NormPartial:
    """Output placement of a p-norm over local elements: pending ``sum(x ** p) ** (1 / p)`` over the mesh dimension."""

    order: float


@dataclass(frozen=True)
class OpCall:
    """An op with its arguments, in which each DTensor is replaced by its :class:`Spec`."""

    op: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    torch: Torch

    @property
    def name(self) -> str:
        """The op's name without namespace and overload, such as ``add_``."""
        return self.op._schema.name.split("::")[-1]

    @property
    def is_inplace(self) -> bool:
        return self.name.endswith("_") and not self.name.endswith("__")

    def argument(self, name: str, default: Any = None) -> Any:
        """The value of argument ``name``: as given, otherwise the schema's default, otherwise ``default``."""
        position = argument_position(self.op, name)
        if position < 0:
            return default
        argument = self.op._schema.arguments[position]
        default = argument.default_value if argument.has_default_value() else default
        return self.args[position] if position < len(self.args) else self.kwargs.get(name, default)


def argument_position(op: torch._ops.OpOverload, name: str) -> int:
    """The position of argument ``name`` in the op's schema; -1 if there is none."""
    return next((position for position, argument in enumerate(op._schema.arguments) if argument.name == name), -1)


OutputPlacement = Union[Placement, NormPartial]
OutputPlacements = tuple[OutputPlacement, ...]


@dataclass(frozen=True)
class Sharding:
    """The answer of a rule.

    Attributes:
        inputs: for each tensor argument, in the order of the flattened positional arguments: the placements that it needs, and
            the shape to broadcast it to (None: its own shape).
        outputs: the placements of the output. For an op with several outputs, a list (an item is None if that output is None).
            For an op that returns no tensor, None.
        run: computes the local outputs from the local arguments; if None, the op itself does.
        meshes: the mesh of each output; if None, all outputs are on the mesh of the first argument.
    """

    inputs: Sequence[tuple[tuple[Placement, ...], Optional[torch.Size]]]
    outputs: Union[OutputPlacements, list[Optional[OutputPlacements]], None]
    run: Optional[Callable[..., Any]] = None
    meshes: Optional[Sequence[DeviceMesh]] = None


class NoLocalWay(Exception):
    """Raised by a rule that cannot run this call on local tensors; the text says why."""


OpRule = Callable[[OpCall], Sharding]
Decomposition = Callable[..., Any]

_rules: dict[torch._ops.OpOverload, OpRule] = {}
_decompositions: dict[torch._ops.OpOverload, Decomposition] = {}


def rule(*ops: torch._ops.OpOverload) -> Callable[[OpRule], OpRule]:
    """Register the decorated function as the rule of ``ops``."""

    def register(function: OpRule) -> OpRule:
        _rules.update(dict.fromkeys(ops, function))
        return function

    return register


def decomposition(*ops: torch._ops.OpOverload) -> Callable[[Decomposition], Decomposition]:
    """Register the decorated function as the decomposition of ``ops``: it gets the op, then the op's arguments as DTensors."""

    def register(function: Decomposition) -> Decomposition:
        for op in ops:
            _decompositions[op] = function
        return function

    return register


def rule_of(op: torch._ops.OpOverload) -> OpRule | None:
    """The rule registered for ``op``; None if no rule is."""
    return _rules.get(op)


def decomposition_of(op: torch._ops.OpOverload) -> Decomposition | None:
    """The decomposition of ``op``, or None. If the decomposition returns ``NotImplemented``, the op's rules answer."""
    return _decompositions.get(op)


def tensor_leaves(call: OpCall) -> list[Any]:
    """The specs among the flattened positional arguments."""
    return [leaf for leaf in pytree.tree_leaves(call.args) if hasattr(leaf, "placements")]


def is_written(argument: Any) -> bool:
    """Whether an op writes to this argument of its schema. Schemas do not declare it of running statistics."""
    info = argument.alias_info
    return (info is not None and info.is_write) or argument.name in ("running_mean", "running_var")


def written_leaves(call: OpCall) -> list[bool]:
    """For each of :func:`tensor_leaves`, whether the op writes to it. A redistributed copy of it would take the result away."""
    pairs = [(is_written(a), pytree.tree_leaves(value)) for a, value in zip(call.op._schema.arguments, call.args)]
    return [written for written, leaves in pairs for leaf in leaves if hasattr(leaf, "placements")]


def is_random(op: torch._ops.OpOverload) -> bool:
    """Whether the op draws random numbers."""
    return torch.Tag.nondeterministic_seeded in op.tags


def returns_list(call: OpCall) -> bool:
    """Whether the output is a list of tensors."""
    return "[]" in str(call.op._schema.returns[0].type) or "List" in str(call.op._schema.returns[0].type)


def with_placement(placements: Sequence[Placement], mesh_dim: int, placement: Placement) -> tuple[Placement, ...]:
    """``placements`` with ``placement`` on one mesh dimension."""
    return (*placements[:mesh_dim], placement, *placements[mesh_dim + 1 :])


def returns_alias(op: torch._ops.OpOverload) -> bool:
    """Whether the op is a view: an output shares memory with an argument that the op does not write to."""
    if op.overloadpacket is torch.ops.aten._unsafe_view:  # Its schema does not declare the alias.
        return True
    return any(value.alias_info is not None and not value.alias_info.is_write for value in op._schema.returns)


_DIMS = frozenset(("dim", "dims", "dim0", "dim1", "dim2"))
# They count in a tensor of another number of dimensions than their first one: that of the result, or of the forward's input.
_OTHER_NDIM = frozenset(("aten::unsqueeze", "aten::unsqueeze_", "aten::stack", "aten::diag_embed"))


def dims_from_the_front(op: torch._ops.OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Positional arguments of an op, in which -1 as a dimension is the number of the last one: the same call.

    Some of torch's rules do not recognize -1 as a dimension that is cut, nor that no dimensions are all, for a reduction.
    ``args`` itself, if there is nothing to change.
    """
    schema = op._schema
    places = [
        i for i, (argument, value) in enumerate(zip(schema.arguments, args)) if argument.name in _DIMS and value is not None
    ]
    if (
        not places
        or schema.name in _OTHER_NDIM
        or any(argument.name in ("input_sizes", "sizes") for argument in schema.arguments)
    ):
        return args
    ndim = next((len(leaf.shape) for leaf in pytree.tree_leaves(args) if hasattr(leaf, "shape")), 0)
    new = list(args)
    reduces = any(argument.name == "keepdim" for argument in schema.arguments) and schema.name not in ("aten::any", "aten::all")
    for i in places:
        if reduces and isinstance(args[i], (list, tuple)) and not args[i]:
            new[i] = list(range(ndim))
            continue
        new[i] = pytree.tree_map(lambda dim: dim + ndim if type(dim) is int and -ndim <= dim < 0 else dim, args[i])
    return args if all(new[i] == args[i] for i in places) else tuple(new)


def fits_out(call: OpCall, placements: Sequence[Optional[OutputPlacements]]) -> bool:
    """Whether each tensor given as ``out=`` has the placements of its output."""
    given = [call.kwargs.get(a.name) for a in call.op._schema.arguments if a.is_out]
    return all(out is None or tuple(out.placements) == wanted for out, wanted in zip(given, placements))


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which elements of ``dtype`` are added: a 16-bit sum may overflow or lose digits even if the average fits."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def is_row_major(meta: Meta) -> bool:
    """Whether a tensor of this shape and stride is contiguous."""
    expected = 1
    for size, stride in zip(reversed(meta.shape), reversed(meta.stride)):
        if size != 1 and stride != expected:
            return 0 in meta.shape
        expected *= size
    return True


def unsupported(op: torch._ops.OpOverload, specs: Sequence[Spec], why: str = "") -> NotImplementedError:
    """The error of an op that cannot run on such DTensors; it says what to redistribute to."""
    own = [p for spec in specs for p in spec.placements if isinstance(p, CutPlacement) and p.redistribute_view is None]
    kind = type(own[0]).__name__ if own else "RaggedShard"  # A strided view of one.
    given = ", ".join(f"{tuple(s.shape)} {''.join(map(str, s.placements))}" for s in specs)
    return NotImplementedError(
        f"{op} is not supported on a DTensor with {kind} placements{why and ': ' + why} (got {given}). Redistribute "
        "first, as in t.redistribute(placements=[Replicate()]) or [Shard(0)], or work on t.to_local()"
    )
