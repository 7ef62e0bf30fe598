"""``resolve``: a plan, a model and a mesh become records, or one error that lists all that is wrong.

It must not change the model, communicate, or depend on the rank: all ranks get equal records or the same error.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional, Union

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from torch_ragged.granularity import Segments
from torch_ragged.spmd._paths import Key, activation_path, grad_path, matches
from torch_ragged.spmd._plan import (
    INIT,
    RUN,
    AnnotateRule,
    DefaultRule,
    FactoryRule,
    Phase,
    Plan,
    RedistributeRule,
    Rule,
    SegmentsRule,
    ShardRule,
    UnitRule,
)
from torch_ragged.spmd._resolved import (
    Boundary,
    FactoryRecord,
    MeshShape,
    Resolved,
    ResolvedTensor,
    SegmentSizes,
    Spoken,
    UnitRecord,
    activation_text,
)
from torch_ragged.spmd._text import nearest, quoted
from torch_ragged.tensor._cut_placement import CutPlacement, chunk_of, has_own_rules, of_dim
from torch_ragged.tensor._ownership import Listed
from torch_ragged.tensor._placement_text import placement_text
from torch_ragged.tensor.placement_types import normalize_placements
from torch_ragged.tensor.strided_placement_types import fsdp_placement

__all__ = ["PlanError", "resolve"]

_ACTIONS = ("annotate", "shard", "redistribute")
_MOST_NAMES = 3  # Of one problem: the other ones are counted.


class PlanError(ValueError):
    """A plan does not fit a model and a mesh. The text lists every problem, with the rules and what to do."""


def resolve(plan: Plan, model: nn.Module, mesh: Union[DeviceMesh, MeshShape]) -> Resolved:
    r"""What each tensor of ``model`` is under ``plan``, and what happens at each module::

        print(resolve(plan, model, MeshShape(("dp", "tp"), (64, 8))))

    Two rules on one tensor and mesh dimension must be equal. Where no rule speaks, a parameter or buffer is ``Replicate()``. A
    rule on one name of a tied parameter holds for all of its names.

    Units:

    - :meth:`Plan.unit` makes a unit of each module that it names. A parameter belongs to the innermost one around it.
    - Parameters in none of these make the unit of the root, unless a rule shards them on the same mesh dimension. It has the
      options of the other units, which must be equal; ``reshard_after_forward`` and ``optional`` are left out.
    - A parameter that is ``Shard`` or ragged at ``INIT`` and ``Replicate()`` at ``RUN`` belongs to a unit, too: that of the
      outermost element of a ``ModuleList`` around it (the transformer block), or that of the root.

    Args:
        plan: the plan.
        model: any module, on any device, meta included. It is not changed.
        mesh: only the names and sizes of its dimensions are used.

    Raises:
        PlanError: the plan does not fit the model or the mesh.
        TypeError: ``plan`` is no plan, ``model`` is no module, or ``mesh`` is no mesh.
        ValueError: the dimensions of ``mesh`` have no names.
    """
    if not isinstance(plan, Plan):
        hint = "Plan.from_json(text) reads JSON" if isinstance(plan, str) else "begin with Plan() and call its methods"
        raise TypeError(f"expected a Plan, got a value of type {type(plan).__name__}: {hint}")
    if not isinstance(model, nn.Module):
        raise TypeError(f"a plan needs an nn.Module, got a value of type {type(model).__name__}: pass the model itself")
    reading = _Reading(plan.rules, model, MeshShape.of(mesh))
    reading.check_dims()
    explicit = reading.explicit_units()
    tensors = reading.tensors(explicit)
    units = reading.units(explicit, tensors)
    boundaries, factories = reading.boundaries(), reading.factories()
    if text := str(reading.problems):
        raise PlanError(f"the plan does not fit {type(model).__name__} on the mesh {reading.mesh}: {text}")
    return Resolved(reading.mesh, tuple([tensor.record() for tensor in tensors]), boundaries, factories, units)


# -- names and problems --------------------------------------------------------------------------------------------------


@dataclass
class _Tensor:
    """A parameter or buffer while rules are read. ``init`` and ``run`` are set once all have been."""

    names: list[str]
    is_parameter: bool
    shape: tuple[int, ...]
    segments: Optional[SegmentSizes] = None
    rules: set[int] = field(default_factory=set)
    is_sound: bool = True  # Its placements have a meaning: other checks may use them.
    init: tuple[Placement, ...] = ()
    run: tuple[Placement, ...] = ()
    grad: Optional[Spoken] = None
    unit: Optional[str] = None

    @property
    def name(self) -> str:
        return self.names[0]

    def layout_rules(self, rules: Sequence[Rule]) -> list[int]:
        """The rules that say where its elements are."""
        return sorted(index for index in self.rules if isinstance(rules[index], (ShardRule, DefaultRule)))

    def record(self) -> ResolvedTensor:
        return ResolvedTensor(
            self.name,
            tuple(self.names[1:]),
            self.is_parameter,
            self.shape,
            self.init,
            self.run,
            self.grad,
            self.segments,
            self.unit,
            tuple(sorted(self.rules)),
        )


class _Names:
    """The modules and tensors of a model by all of their names."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(model.named_modules())
        firsts = {id(module): name for name, module in self.modules.items()}
        self.first_of = {name: firsts[id(module)] for name, module in model.named_modules(remove_duplicate=False)}
        self.order = {name: index for index, name in enumerate(self.modules)}
        # By identity: names of a tied tensor lead to one record.
        found: dict[int, _Tensor] = {}
        self.tensors: dict[str, _Tensor] = {}
        for is_parameter, named in (
            (True, model.named_parameters(remove_duplicate=False)),
            (False, model.named_buffers(remove_duplicate=False)),
        ):
            for name, value in named:
                tensor = found.setdefault(id(value), _Tensor([], is_parameter, tuple(value.shape)))
                tensor.names.append(name)
                self.tensors[name] = tensor

    @property
    def each_tensor(self) -> list[_Tensor]:
        return [tensor for name, tensor in self.tensors.items() if name == tensor.name]

    def matched_tensors(self, path: str) -> list[tuple[_Tensor, list[str]]]:
        """The tensors that a path means, each with its names that match."""
        found: dict[str, list[str]] = {}
        for name in matches(path, self.tensors):
            found.setdefault(self.tensors[name].name, []).append(name)
        return [(self.tensors[first], names) for first, names in found.items()]

    def matched_modules(self, path: str) -> list[str]:
        """The first names of the modules that a path means."""
        return list(dict.fromkeys(self.first_of[name] for name in matches(path, self.first_of)))

    def modules_around(self, name: str) -> Iterator[str]:
        """The first names of the modules around a tensor or module, from the inside out."""
        while name:
            name = name.rpartition(".")[0]
            yield self.first_of[name]

    def has_forward(self, module: str) -> bool:
        return type(self.modules[module]).forward is not nn.Module.forward


class _Problems:
    """What is wrong, in the order of the rules. Equal problems of several tensors are one."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._rules = rules
        self._found: dict[tuple[tuple[int, ...], str, str], dict[str, None]] = {}

    def add(self, rules: Iterable[int], text: str, name: str = "", end: str = "") -> None:
        """The sentence ``text name end`` about ``rules``. Problems that differ only in ``name`` are put together."""
        self._found.setdefault((tuple(sorted(set(rules))), text, end), {})[name] = None

    def add_unnamed(self, name: str) -> None:
        """No rule says how the parameter ``name`` lies."""
        self.add((), "names the parameters ", name, ". Name them, or add plan.default(Replicate())")

    def __str__(self) -> str:
        in_order = sorted(self._found.items(), key=lambda problem: problem[0][0] or (len(self._rules),))
        texts = []
        for (rules, text, end), names in in_order:
            shown = list(names)[:_MOST_NAMES]
            more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
            head = [f"  {self._rules[index]!r}" for index in rules] or ["  no rule"]
            texts.append("\n".join([*head, f"    {text}{', '.join(shown)}{more}{end}"]))
        count = f"{len(texts)} problems" if len(texts) > 1 else "1 problem"
        return f"{count}\n" + "\n".join(texts) if texts else ""


class _Claims:
    """What rules say of subjects: a placement for each slot (a phase, the gradient, ...) and mesh dimension."""

    def __init__(self, mesh: MeshShape, problems: _Problems) -> None:
        self._mesh, self._problems = mesh, problems
        self._said: dict[Hashable, dict[tuple[Hashable, str], tuple[Placement, int, list[str]]]] = {}

    def add(
        self, subject: Hashable, slot: Hashable, dims: Sequence[str], placements: Spoken, rule: int, names: list[str]
    ) -> None:
        """``rule`` says ``placements`` of ``subject``, which it calls ``names``. None says nothing."""
        said = self._said.setdefault(subject, {})
        for dim, placement in zip(dims, placements):
            # A dimension that the mesh does not have is a problem already (_check_dims).
            if placement is None or dim not in self._mesh.names:
                continue
            other, first, others = said.setdefault((slot, dim), (placement, rule, names))
            if other == placement:
                continue
            text = f"differ on mesh dimension {quoted(dim)} of "
            if set(names) & set(others):
                self._problems.add((first, rule), text, names[0], ": keep one of them")
            else:
                tied = f"{others[0]} = {names[0]}"
                self._problems.add(
                    (first, rule), f"{text}one tied tensor, ", tied, ": a tied tensor has one layout, keep one of them"
                )

    def rule(self, subject: Hashable, slot: Hashable, dim: str) -> Optional[int]:
        """The first rule that speaks of it; None if there is none."""
        said = self._said.get(subject, {}).get((slot, dim))
        return said[1] if said else None

    def spoken(self, subject: Hashable, slot: Hashable) -> Spoken:
        """The placements on the whole mesh; None where no rule speaks."""
        said = self._said.get(subject, {})
        return tuple([said[slot, dim][0] if (slot, dim) in said else None for dim in self._mesh.names])


def _guesses(text: str, names: Iterable[str]) -> str:
    found = nearest(text, names)
    return f". Nearest names: {', '.join(found)}" if found else ": no name is near it"


def _meaningful(placements: tuple[Placement, ...], shape: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[Placement, ...]:
    """``placements``, normalized.

    Raises:
        ValueError: they have no meaning together, or do not divide the tensor where they must.
    """
    for index, placement in enumerate(placements):
        if isinstance(placement, _StridedShard):
            pieces, elements = int(placement.split_factor) * sizes[index], shape[placement.dim]
            if elements % pieces:
                raise ValueError(
                    f"{placement_text(placement)} over {sizes[index]} ranks needs a dimension that is a multiple of {pieces}, "
                    f"got {elements} elements"
                )
            right = [size for each, size in zip(placements[index + 1 :], sizes[index + 1 :]) if each == Shard(placement.dim)]
            if int(placement.split_factor) % math.prod(right):
                raise ValueError(
                    f"{placement_text(placement)} is left of Shard({placement.dim}) over {math.prod(right)} ranks, which must "
                    "divide its split_factor"
                )
    return normalize_placements(placements, shape, sizes) if has_own_rules(placements) else placements


def _unit_of_rule(rule: Rule) -> tuple[tuple[str, ...], tuple[tuple[str, Any], ...]]:
    assert isinstance(rule, UnitRule)
    return rule.dims, rule.options


def _is_gathered(kept: Placement, used: Placement) -> bool:
    is_cut = isinstance(kept, Shard) or (isinstance(kept, CutPlacement) and not isinstance(kept.cut, Listed))
    return is_cut and isinstance(used, Replicate)


def _module_text(name: str) -> str:
    return quoted(name) if name else "the root"


def _slots(rule: Union[ShardRule, RedistributeRule, AnnotateRule]) -> dict[str, tuple[Placement, ...]]:
    """What a rule says of a tensor before (src) and after (dst), and of its gradient."""
    if isinstance(rule, AnnotateRule):
        return {"src": rule.placement}
    if isinstance(rule, ShardRule):
        slots = {"dst": rule.placement, "grad_dst": rule.grad}
    else:
        slots = {"src": rule.src, "dst": rule.dst, "grad_src": rule.grad_src, "grad_dst": rule.grad_dst}
    return {name: placements for name, placements in slots.items() if placements is not None}


# -- the reading ---------------------------------------------------------------------------------------------------------


class _Reading:
    """A plan that is read against a model and a mesh. Methods read rules of one kind, and note all problems."""

    def __init__(self, rules: Sequence[Rule], model: nn.Module, mesh: MeshShape) -> None:
        self.rules, self.mesh = rules, mesh
        self.names, self.problems = _Names(model), _Problems(rules)

    def check_dims(self) -> None:
        """The mesh has the dimensions of all rules, and cuts in their order."""
        for index, rule in enumerate(self.rules):
            self._check_dims(index, rule)

    def _check_dims(self, index: int, rule: Rule) -> None:
        dims: tuple[str, ...] = getattr(rule, "dims", ())
        for dim in dims:
            if dim not in self.mesh.names:
                self.problems.add(
                    (index,), f"names the mesh dimension {quoted(dim)}: the mesh has {', '.join(self.mesh.names)}"
                )
        known = [dim for dim in dims if dim in self.mesh.names]
        if known == sorted(known, key=self.mesh.names.index) or isinstance(rule, UnitRule):
            return
        for name in ("placement", "dst", "src", "grad", "grad_src", "grad_dst"):
            cut = [each.dim for each in getattr(rule, name, None) or () if isinstance(each, Shard)]
            if len(set(cut)) < len(cut):
                self.problems.add(
                    (index,),
                    f"cuts dimension {next(dim for dim in cut if cut.count(dim) > 1)} in the order {', '.join(dims)}: DTensor "
                    f"cuts in the mesh's order {', '.join(self.mesh.names)}. Name dims in this order, or use _StridedShard",
                )

    def tensors(self, explicit: dict[str, list[int]]) -> list[_Tensor]:
        """The tensors with their layouts. Units do not shard them yet."""
        claims, tensors = _Claims(self.mesh, self.problems), self.names.each_tensor
        for index, rule in enumerate(self.rules):
            if isinstance(rule, ShardRule) and not activation_path(rule.path):
                said: dict[Union[Phase, str], tuple[Placement, ...]]
                said = dict.fromkeys((INIT, RUN) if rule.phase is None else (rule.phase,), rule.placement)
                if rule.grad is not None:
                    said["grad"] = rule.grad
                for tensor, matched in self._matched_tensors(index, rule.path, parameters=set(said) != {INIT, RUN}):
                    tensor.rules.add(index)
                    for slot, placements in said.items():
                        self._claim(claims, tensor, slot, rule.dims, placements, index, matched)
            elif isinstance(rule, AnnotateRule) and (path := grad_path(rule.path)) is not None:
                for tensor, matched in self._matched_tensors(index, path, parameters=True):
                    tensor.rules.add(index)
                    self._claim(claims, tensor, "grad", rule.dims, rule.placement, index, matched)
        unnamed = [each for each in tensors if each.is_parameter and not each.layout_rules(self.rules)]
        self._apply_defaults(explicit, claims, unnamed)
        for index, rule in enumerate(self.rules):
            if isinstance(rule, SegmentsRule):
                for tensor, _ in self._matched_tensors(index, rule.path):
                    self._set_segments(index, rule, tensor)
        for tensor in tensors:
            self._set_layout(tensor, claims)
        return tensors

    def _matched_tensors(self, index: int, path: str, *, parameters: bool = False) -> list[tuple[_Tensor, list[str]]]:
        """The tensors of a path, each with its names that match. With ``parameters``, no buffers."""
        found = self.names.matched_tensors(path)
        if parameters and found:
            buffers = [matched[0] for tensor, matched in found if not tensor.is_parameter]
            found = [(tensor, matched) for tensor, matched in found if tensor.is_parameter]
            for name in () if found else buffers:
                text = "matches only buffers, which have neither phases nor gradients: "
                self.problems.add((index,), text, name, ". Name parameters")
        elif not found:
            modules = self.names.matched_modules(path)
            if modules:
                what = f"matches the module {_module_text(modules[0])}, and no parameter or buffer: name a tensor of it"
            else:
                what = f"matches no parameter or buffer{_guesses(path, self.names.tensors)}"
            self.problems.add((index,), what)
        return found

    def _claim(
        self,
        claims: _Claims,
        tensor: _Tensor,
        slot: Union[Phase, str],
        dims: tuple[str, ...],
        placements: tuple[Placement, ...],
        index: int,
        matched: list[str],
    ) -> None:
        """Rule ``index`` says ``placements`` of a tensor. Negative dimensions become those of the tensor."""
        ndim = len(tensor.shape)
        on_tensor: list[Optional[Placement]] = []
        for each in placements:
            chunk = chunk_of(each)
            if chunk is None or 0 <= chunk.dim < ndim:
                on_tensor.append(each)
            elif -ndim <= chunk.dim < 0:
                on_tensor.append(of_dim(each, chunk.dim + ndim))
            else:
                text = f"cuts dimension {chunk.dim} of tensors with {ndim} dimensions: "
                self.problems.add((index,), text, matched[0], ". Cut another dimension, or match fewer tensors")
                on_tensor.append(None)
                tensor.is_sound = False
        claims.add(tensor.name, slot, dims, tuple(on_tensor), index, matched)

    def _apply_defaults(self, explicit: dict[str, list[int]], claims: _Claims, unnamed: list[_Tensor]) -> None:
        """Parameters that no rule names get the default. Without a default and a unit, they are a problem."""
        defaults: list[tuple[int, DefaultRule, set[str]]] = []
        for index, rule in enumerate(self.rules):
            if isinstance(rule, DefaultRule):
                defaults.append((index, rule, set(self._matched_modules(index, rule.path))))
        for tensor in unnamed:
            around = set(self.names.modules_around(tensor.name))
            # The unit shards it. That is a rule for it, and the default is for what no rule names.
            if around & set(explicit):
                continue
            holding = [(index, rule) for index, rule, modules in defaults if around & modules]
            for index, rule in holding:
                everywhere = rule.placement * len(self.mesh.names)
                tensor.rules.add(index)
                for phase in Phase:
                    self._claim(claims, tensor, phase, self.mesh.names, everywhere, index, [tensor.name])
            # With units, what is left belongs to that of the root.
            if not holding and not explicit:
                self.problems.add_unnamed(tensor.name)

    def _set_segments(self, index: int, rule: SegmentsRule, tensor: _Tensor) -> None:
        ndim = len(tensor.shape)
        if not -ndim <= rule.dim < ndim:
            text = f"cuts dimension {rule.dim} of tensors with {ndim} dimensions: "
            self.problems.add((index,), text, tensor.name, ". Cut another dimension, or match fewer tensors")
            return
        segments = SegmentSizes(rule.dim % ndim, rule.sizes)
        size = tensor.shape[segments.dim]
        if sum(rule.sizes) != size:
            text = f"has sizes that add up to {sum(rule.sizes)}, and dimension {segments.dim} has {size} elements in "
            self.problems.add((index,), text, tensor.name)
        elif tensor.segments not in (None, segments):
            others = [each for each in tensor.rules if isinstance(self.rules[each], SegmentsRule)]
            self.problems.add((*others, index), "differ in the segments of ", tensor.name, ": keep one of them")
        else:
            tensor.segments = segments
        tensor.rules.add(index)

    def _set_layout(self, tensor: _Tensor, claims: _Claims) -> None:
        """Set ``init``, ``run`` and ``grad``, and check that they have a meaning."""
        for here, other, does in ((INIT, RUN, "is computed with"), (RUN, INIT, "is kept")):
            for dim in self.mesh.names:
                rule = claims.rule(tensor.name, here, dim)
                if rule is not None and claims.rule(tensor.name, other, dim) is None:
                    tensor.is_sound = False
                    text = f"has no counterpart on mesh dimension {quoted(dim)} for "
                    end = f": say how it {does}, with phase={other.name}, or leave phase out"
                    self.problems.add((rule,), text, tensor.name, end)
        grad = claims.spoken(tensor.name, "grad")
        tensor.grad = None if set(grad) == {None} else grad
        tensor.init, tensor.run = (
            tuple([each or Replicate() for each in claims.spoken(tensor.name, phase)]) for phase in (INIT, RUN)
        )
        if not tensor.is_sound:
            return
        try:
            tensor.init, tensor.run = (_meaningful(each, tensor.shape, self.mesh.sizes) for each in (tensor.init, tensor.run))
        except ValueError as error:
            tensor.is_sound = False
            self.problems.add(tensor.layout_rules(self.rules), "cut ", tensor.name, f": {error}")
            return
        if tensor.segments is not None:
            ranks = math.prod(
                [
                    size
                    for each, size in zip(tensor.run, self.mesh.sizes)
                    if isinstance(each, Shard) and each.dim == tensor.segments.dim
                ]
            )
            uneven = [size for size in tensor.segments.sizes if size % ranks]
            if uneven:
                involved = [
                    index for index in tensor.rules if isinstance(self.rules[index], (ShardRule, DefaultRule, SegmentsRule))
                ]
                text = f"cut segments of {', '.join(map(str, uneven))} elements over {ranks} ranks: "
                self.problems.add(involved, text, tensor.name, ". Each segment must be a multiple of the ranks")

    def _matched_modules(self, index: int, path: str, *, run: bool = False) -> list[str]:
        """The modules of a path. With ``run``, only those with a forward: a ModuleList has none."""
        modules = self.names.matched_modules(path)
        if not modules:
            what = f"matches no module{_guesses(path, filter(None, self.names.modules))}"
            if path in self.names.tensors:
                what = f"matches the tensor {path}, and no module: name a module"
            self.problems.add((index,), what)
        running = [module for module in modules if not run or self.names.has_forward(module)]
        for module in () if running else modules:
            kind = type(self.names.modules[module]).__name__
            self.problems.add((index,), f"names a {kind}, which has no forward: ", _module_text(module), ". Name its members")
        return running

    def explicit_units(self) -> dict[str, list[int]]:
        """The rules of each module that is a unit. Several on one module are equal."""
        units: dict[str, list[int]] = {}
        for index, rule in enumerate(self.rules):
            if isinstance(rule, UnitRule):
                for module in self._matched_modules(index, rule.path, run=True):
                    units.setdefault(module, []).append(index)
        for module, indices in units.items():
            first = self.rules[indices[0]]
            for other in indices[1:]:
                if _unit_of_rule(self.rules[other]) != _unit_of_rule(first):
                    text = "give different dims or options to the unit of "
                    self.problems.add((indices[0], other), text, _module_text(module), ": keep one of them")
        return units

    def units(self, explicit: dict[str, list[int]], tensors: list[_Tensor]) -> tuple[UnitRecord, ...]:
        """All units, inner ones first; ``unit`` of their parameters is set."""
        found: dict[str, UnitRecord] = {}
        for module, indices in explicit.items():
            dims, options = _unit_of_rule(self.rules[indices[0]])
            found[module] = UnitRecord(module, dims[-1:], dims[:-1], options, (), tuple(indices))
            kept = dict(options).get("reshard_after_forward")
            ranks = dict(zip(self.mesh.names, self.mesh.sizes)).get(dims[-1], 0)
            if kept is not None and not isinstance(kept, bool) and (kept < 1 or ranks % kept):
                text = f"keeps parts on {kept} ranks after forward, which must divide the {ranks} ranks of the unit of "
                self.problems.add(indices, text, _module_text(module))
        for tensor in tensors:
            if tensor.is_parameter:
                self._join_explicit_unit(tensor, explicit)
        self._lower_phases(explicit, tensors, found)
        self._add_root_unit(explicit, tensors, found)
        params: dict[str, list[str]] = {module: [] for module in found}
        for tensor in tensors:
            if tensor.unit is not None:
                params[tensor.unit].append(tensor.name)
                is_lowered = tensor.unit not in explicit
                self._check_in_unit(tensor, found[tensor.unit], is_lowered=is_lowered)
        for module, members in params.items():
            found[module] = dataclasses.replace(found[module], params=tuple(members))
        last: dict[str, int] = {}  # The position of the last submodule: inner modules end before outer ones, or with them.
        for name, index in self.names.order.items():
            last.update(dict.fromkeys((name, *self.names.modules_around(name)), index))
        return tuple([found[module] for module in sorted(found, key=lambda each: (last[each], -self.names.order[each]))])

    def _join_explicit_unit(self, tensor: _Tensor, explicit: dict[str, list[int]]) -> None:
        inner = [
            next((module for module in self.names.modules_around(name) if module in explicit), None) for name in tensor.names
        ]
        tensor.unit = inner[0]
        for name, module in zip(tensor.names, inner):
            if module != tensor.unit:
                involved = [index for each in (module, tensor.unit) if each is not None for index in explicit[each]]
                where = f"{_module_text(tensor.unit or '')} and {_module_text(module or '')}"
                text = f"put the names of a tied parameter into the units of {where}: "
                self.problems.add(involved, text, f"{tensor.name} = {name}", ". Name a module that has both")

    def _lower_phases(self, explicit: dict[str, list[int]], tensors: list[_Tensor], found: dict[str, UnitRecord]) -> None:
        """Parameters that are shards at INIT and replicated at RUN get units."""
        for tensor in tensors:
            moved = tuple([dim for dim, a, b in zip(self.mesh.names, tensor.init, tensor.run) if a != b])
            if not moved or not tensor.is_sound:
                continue
            involved = [
                index
                for index in tensor.layout_rules(self.rules)
                if set(getattr(self.rules[index], "dims", moved)) & set(moved)
            ]
            changes = [(a, b) for a, b in zip(tensor.init, tensor.run) if a != b]
            odd = next((pair for pair in changes if not _is_gathered(*pair)), None)
            if odd is not None:
                kept, used = map(placement_text, odd)
                text = f"keep as {kept} and compute with {used}: "
                self.problems.add(
                    involved, text, tensor.name, ". Only a Shard or ragged shard at INIT that is Replicate() at RUN is possible"
                )
            elif tensor.unit is not None:
                text = "shard by phases what a unit shards already: "
                self.problems.add((*involved, *explicit[tensor.unit]), text, tensor.name, ". Keep one of the two")
            else:
                tensor.unit = self._module_block_of(tensor)
                unit = found.get(tensor.unit) or UnitRecord(tensor.unit, moved, (), (), (), ())
                # fully_shard is called once per module.
                if unit.shard != moved:
                    text = f"make a second unit of {_module_text(tensor.unit)}, on other mesh dimensions: "
                    self.problems.add((*unit.rules, *involved), text, tensor.name, ". Use plan.unit for an inner module")
                    continue
                both = tuple(sorted({*unit.rules, *involved}))
                found[tensor.unit] = dataclasses.replace(unit, rules=both)

    def _module_block_of(self, tensor: _Tensor) -> str:
        """The outermost element of a ModuleList around all names of a tensor; the root if there is none."""
        blocks = set()
        for name in tensor.names:
            around = [*self.names.modules_around(name)][::-1]
            pairs = zip(around, around[1:])
            elements = (b for a, b in pairs if isinstance(self.names.modules[a], nn.ModuleList) and self.names.has_forward(b))
            blocks.add(next(elements, ""))
        return blocks.pop() if len(blocks) == 1 else ""

    def _add_root_unit(self, explicit: dict[str, list[int]], tensors: list[_Tensor], found: dict[str, UnitRecord]) -> None:
        """The parameters outside of all explicit units make the root's unit."""
        if not explicit or "" in explicit:
            return
        if "" in found:  # By phases, for some parameters only.
            for tensor in tensors:
                if tensor.is_parameter and tensor.unit is None and not tensor.rules:
                    self.problems.add_unnamed(tensor.name)
            return
        # The root's unit takes the options of the others. If these differ, no choice is obvious, and a guess would train with
        # another dtype or sharding in silence.
        kinds: list[tuple[Any, int]] = []
        for indices in explicit.values():
            dims, options = _unit_of_rule(self.rules[indices[0]])
            kind = dims, tuple([each for each in options if each[0] not in ("reshard_after_forward", "optional")])
            if kind not in [other for other, _ in kinds]:
                kinds.append((kind, indices[0]))
        dims, options = kinds[0][0]
        rest = [each for each in tensors if each.is_parameter and each.unit is None and not self._is_placed_on(each, dims)]
        for tensor in rest if len(kinds) > 1 else ():
            text = "have different dims or options, and leave parameters to the root's unit: "
            self.problems.add([index for _, index in kinds], text, tensor.name, '. Add plan.unit("", ...)')
        for tensor in rest:
            tensor.unit = ""
        # Also if no parameter is left: without a root, each unit would be one, and keep its parameters unsharded after forward.
        # A root without parameters has no policy that may cast inputs.
        found[""] = UnitRecord("", dims[-1:], dims[:-1], options if rest else (), (), ())

    def _is_placed_on(self, tensor: _Tensor, dims: Sequence[str]) -> bool:
        """Whether rules place a tensor on one of the mesh dimensions as something else than Replicate."""
        placed = zip(self.mesh.names, tensor.init, tensor.run)
        return any(dim in dims and (a, b) != (Replicate(), Replicate()) for dim, a, b in placed)

    def _check_in_unit(self, tensor: _Tensor, unit: UnitRecord, *, is_lowered: bool) -> None:
        if not tensor.is_sound or not set(unit.shard) <= set(self.mesh.names):
            return
        involved = {*tensor.layout_rules(self.rules), *unit.rules}
        if not is_lowered and tensor.init == tensor.run and self._is_placed_on(tensor, (*unit.shard, *unit.replicate)):
            end = ". Use another mesh dimension, or an inner unit on another one"
            self.problems.add(involved, "use a mesh dimension of the unit that shards ", tensor.name, end)
            return
        ranks = math.prod([size for name, size in zip(self.mesh.names, self.mesh.sizes) if name in unit.shard])
        try:
            # What fully_shard would refuse is found here: before anything is changed, and beside all other problems.
            fsdp_placement(tensor.shape, tensor.run, self.mesh.sizes, ranks=ranks)
        except ValueError as error:
            self.problems.add(involved, "put ", tensor.name, f" into a unit: {error}")
        granularity = dict(unit.options).get("granularity")
        if isinstance(granularity, Segments):
            try:
                granularity.check(tensor.name, tensor.shape)
            except ValueError:
                end = ". Name fused weights with plan.segments(), and give the unit the granularity of a segment"
                self.problems.add(
                    unit.rules, f"give granularity={granularity.text}, which are not the segments of ", tensor.name, end
                )

    def boundaries(self) -> tuple[Boundary, ...]:
        # The second one keeps each call's own words. Its problems are dropped: the first one has found them.
        together, claims = _Claims(self.mesh, self.problems), _Claims(self.mesh, _Problems(()))
        found: dict[tuple[str, str, Key, str], list[int]] = {}
        for index, rule in enumerate(self.rules):
            if not isinstance(rule, (ShardRule, RedistributeRule, AnnotateRule)):
                continue
            activation = activation_path(rule.path)
            if activation is None:
                continue
            for module in self._matched_modules(index, activation.module, run=True):
                key: Optional[Key] = activation.key
                if activation.side == "in":
                    key = self._argument(index, module, activation.key)
                if key is None:
                    continue
                tensor = (module, activation.side, key)
                found.setdefault((*tensor, rule.call), []).append(index)
                for slot, placements in _slots(rule).items():
                    # What is said before a redistribution and after it may differ, whichever call says it.
                    together.add(tensor, slot, rule.dims, placements, index, [activation_text(*tensor)])
                    claims.add((*tensor, rule.call), slot, rule.dims, placements, index, [activation_text(*tensor)])
        keys = list(dict.fromkeys(key for _, _, key, _ in found))
        in_order = sorted(found, key=lambda e: (self.names.order[e[0]], e[1], keys.index(e[2]), _ACTIONS.index(e[3])))

        def spoken(entry: Hashable, slot: str) -> Optional[Spoken]:
            placements = claims.spoken(entry, slot)
            return None if set(placements) == {None} else placements

        return tuple(
            [
                Boundary(
                    *entry,
                    claims.spoken(entry, "src" if entry[-1] == "annotate" else "dst"),
                    spoken(entry, "src") if entry[-1] == "redistribute" else None,
                    spoken(entry, "grad_src"),
                    spoken(entry, "grad_dst"),
                    tuple(found[entry]),
                )
                for entry in in_order
            ]
        )

    def _argument(self, index: int, module: str, key: Key) -> Optional[Key]:
        """``key`` with the argument by its name in the signature of ``forward``. None: ``forward`` does not take it."""
        try:
            params = inspect.signature(self.names.modules[module].forward).parameters.values()
        except (TypeError, ValueError):  # A forward that is not Python's has no signature.
            return key
        positional = [each.name for each in params if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
        named = positional + [each.name for each in params if each.kind == inspect.Parameter.KEYWORD_ONLY]
        kinds = {each.kind for each in params}
        first = key[0]
        if isinstance(first, int):
            if first < len(positional):
                return (positional[first], *key[1:])
            fits = inspect.Parameter.VAR_POSITIONAL in kinds
        else:
            fits = first in named or inspect.Parameter.VAR_KEYWORD in kinds
        if not fits:
            kind = type(self.names.modules[module]).__name__
            end = f". The forward of {kind} takes {', '.join(named) or 'none'}"
            self.problems.add((index,), f"names the argument {first} of ", _module_text(module), end)
        return key if fits else None

    def factories(self) -> tuple[FactoryRecord, ...]:
        claims = _Claims(self.mesh, self.problems)
        own: dict[str, list[str]] = {}
        for index, rule in enumerate(self.rules):
            if isinstance(rule, FactoryRule):
                for module in self._matched_modules(index, rule.path, run=True):
                    own.setdefault(module, []).extend(rule.functions)
                    for function in rule.functions:
                        what = f"{function} in {_module_text(module)}"
                        claims.add(module, function, rule.dims, rule.placement, index, [what])
        records = []
        for module in sorted(own, key=self.names.order.__getitem__):
            alike: dict[tuple[Spoken, tuple[int, ...]], list[str]] = {}
            # A record has the rules of outer modules, too: at run time, the innermost mode decides alone.
            around = [module, *self.names.modules_around(module)]
            for function in sorted(set(itertools.chain(*[own.get(each, ()) for each in around]))):
                spoken: list[Optional[Placement]] = []
                used: set[int] = set()
                for position, dim in enumerate(self.mesh.names):
                    inner = next((each for each in around if claims.rule(each, function, dim) is not None), module)
                    spoken.append(claims.spoken(inner, function)[position])
                    rule_index = claims.rule(inner, function, dim)
                    used |= set() if rule_index is None else {rule_index}
                alike.setdefault((tuple(spoken), tuple(sorted(used))), []).append(function)
            records += [FactoryRecord(module, tuple(functions), *said) for said, functions in alike.items()]
        return tuple(records)
