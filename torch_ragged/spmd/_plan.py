"""``Plan``: how a model is distributed, as a value beside the model.

It must not see a mesh or a rank, nor keep a model: ``torch_ragged.spmd._resolve`` brings these together.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar, Optional, Union

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from typing_extensions import Unpack  # Of torch.

from torch_ragged.fsdp import BufferPlacements
from torch_ragged.fsdp._fully_shard import parts_of
from torch_ragged.fsdp._options import UnitOptions
from torch_ragged.fsdp.core._kit import check_pairs
from torch_ragged.granularity import Granularity
from torch_ragged.spmd._paths import activation_path, check_regex, grad_path, under
from torch_ragged.spmd._text import nearest, path_text, quoted, read_value, value_text, write_value
from torch_ragged.spmd._torchtitan import layers_of, layouts_of
from torch_ragged.spmd._transformers import batch_of, shards_of, units_of
from torch_ragged.tensor._placement_text import maker_names, placement_text, placement_types, read_placement
from torch_ragged.tensor.interleaved_placement_types import is_int

__all__ = [
    "FACTORY_FUNCTIONS",
    "INIT",
    "RUN",
    "AnnotateRule",
    "DefaultRule",
    "FactoryRule",
    "Phase",
    "Plan",
    "RedistributeRule",
    "Rule",
    "SegmentsRule",
    "ShardRule",
    "UnitRule",
]

FACTORY_FUNCTIONS = (
    "arange",
    "empty",
    "eye",
    "full",
    "linspace",
    "logspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "zeros",
)
_PLAN_VERSION = 1
_UNIT_OPTIONS: dict[str, tuple[Any, str]] = {
    "reshard_after_forward": ((bool, int, type(None)), "a bool, an int or None"),
    "mp_policy": (MixedPrecisionPolicy, "a MixedPrecisionPolicy"),
    "offload_policy": (OffloadPolicy, "an OffloadPolicy"),
    "placements": (BufferPlacements, "one of ZERO1, ZERO2 and ZERO3"),
    "optional": (bool, "a bool"),
    "check_replicas": (bool, "a bool"),
    "weights": (tuple, "a list of integers, one per rank of the shards, such as [3, 2, 0]"),
    "granularity": (Granularity, "a value of torch_ragged.granularity, such as rows(32)"),
    "orig_param_policy": (None, "a function"),
    "shard_placement_fn": (None, "a function"),
}

Placements = Union[Placement, tuple[Placement, ...]]
Dims = Union[str, tuple[str, ...]]


class Phase(enum.Enum):
    """When a parameter has a placement: ``INIT``, as it is kept between steps, or ``RUN``, as forward and backward use it.

    ZeRO in two rules; :meth:`Plan.unit` says the same in one::

        plan.shard(".*", Shard(0), "dp", phase=INIT)
        plan.shard(".*", Replicate(), "dp", phase=RUN)
    """

    INIT = "kept"
    RUN = "computed with"


INIT, RUN = Phase.INIT, Phase.RUN


@dataclass(frozen=True)
class Rule:
    """One call of a plan. Its fields have the names of the call's arguments, and ``repr`` is the call."""

    call: ClassVar[str]

    path: str

    def under(self, prefix: str) -> Rule:
        """The same rule in a model of which this rule's model is the submodule ``prefix``."""
        return dataclasses.replace(self, path=under(prefix, self.path))

    def __repr__(self) -> str:
        return self.text(value_text)

    def text(self, of_option: Callable[[Any], str]) -> str:
        """The call, with the values of options written by ``of_option``."""
        required, optional = [], []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "options":
                optional += [f"{name}={of_option(option)}" for name, option in value]
            elif field.default is dataclasses.MISSING:
                required.append(_field_text(field.name, value))
            elif value != field.default:
                optional.append(f"{field.name}={_field_text(field.name, value)}")
        return f"plan.{self.call}({', '.join(required + optional)})"

    def _check_dims(self, dims: tuple[str, ...]) -> None:
        if not isinstance(dims, tuple) or not dims or not all(isinstance(name, str) and name for name in dims):
            raise ValueError(f"{self.call}: dims must be the name of a mesh dimension or a tuple of names, got {dims!r}")
        if len(set(dims)) < len(dims):
            raise ValueError(f"{self.call}: dims {dims} have a mesh dimension twice: name each mesh dimension once")

    def _check_placements(self, name: str, placements: tuple[Placement, ...], count: int) -> None:
        kinds = placement_types()
        for each in placements:
            if kinds.get(type(each).__name__) is not type(each):
                raise TypeError(f"{self.call}: {name} must be of {maker_names(kinds)}, got {each!r}")
        if len(placements) != count:
            raise ValueError(
                f"{self.call}: {name} has {len(placements)} placements for {count} mesh dimensions: give one placement, or one "
                "per name in dims"
            )

    def _check_module_path(self) -> None:
        if activation_path(self.path):
            raise ValueError(f"{self.call}: {path_text(self.path)} is an activation: name modules, without brackets")


@dataclass(frozen=True, repr=False)
class ShardRule(Rule):
    """:meth:`Plan.shard`"""

    call = "shard"
    placement: tuple[Placement, ...]
    dims: tuple[str, ...]
    phase: Optional[Phase] = None
    grad: Optional[tuple[Placement, ...]] = None

    def __post_init__(self) -> None:
        activation = activation_path(self.path)
        self._check_dims(self.dims)
        self._check_placements("placement", self.placement, len(self.dims))
        if self.phase is not None and not isinstance(self.phase, Phase):
            raise TypeError(f"shard: phase must be INIT, RUN or None, got {self.phase!r}")
        if activation and self.phase is not None:
            raise ValueError(f"shard: the activation {path_text(self.path)} has no phase: leave phase out")
        if self.grad is not None:
            self._check_placements("grad", self.grad, len(self.dims))


@dataclass(frozen=True, repr=False)
class RedistributeRule(Rule):
    """:meth:`Plan.redistribute`"""

    call = "redistribute"
    dst: tuple[Placement, ...]
    dims: tuple[str, ...]
    src: Optional[tuple[Placement, ...]] = None
    grad_src: Optional[tuple[Placement, ...]] = None
    grad_dst: Optional[tuple[Placement, ...]] = None

    def __post_init__(self) -> None:
        if activation_path(self.path) is None:
            raise ValueError(
                f"redistribute: {path_text(self.path)} names no activation: end it with <in> or <out>. For a parameter, write "
                "shard(..., phase=INIT) and shard(..., phase=RUN)"
            )
        self._check_dims(self.dims)
        for name in ("dst", "src", "grad_src", "grad_dst"):
            if (placements := getattr(self, name)) is not None:
                self._check_placements(name, placements, len(self.dims))


@dataclass(frozen=True, repr=False)
class AnnotateRule(Rule):
    """:meth:`Plan.annotate`"""

    call = "annotate"
    placement: tuple[Placement, ...]
    dims: tuple[str, ...]

    def __post_init__(self) -> None:
        if activation_path(self.path) is None and grad_path(self.path) is None:
            raise ValueError(
                f"annotate: {path_text(self.path)} names neither an activation nor a gradient: end it with <in>, <out> or "
                ".grad. For a parameter or a buffer, use shard"
            )
        self._check_dims(self.dims)
        self._check_placements("placement", self.placement, len(self.dims))

    def under(self, prefix: str) -> Rule:
        tensor = grad_path(self.path)
        if tensor is None:
            return super().under(prefix)
        return dataclasses.replace(self, path=under(prefix, tensor) + self.path[len(tensor) :])


@dataclass(frozen=True, repr=False)
class FactoryRule(Rule):
    """:meth:`Plan.factory`"""

    call = "factory"
    placement: tuple[Placement, ...]
    dims: tuple[str, ...]
    functions: tuple[str, ...] = FACTORY_FUNCTIONS

    def __post_init__(self) -> None:
        self._check_module_path()
        self._check_dims(self.dims)
        self._check_placements("placement", self.placement, len(self.dims))
        unknown = [name for name in self.functions if name not in FACTORY_FUNCTIONS]
        if unknown or not self.functions:
            raise ValueError(
                f"factory: functions must be names of {', '.join(FACTORY_FUNCTIONS)}, got {', '.join(map(repr, unknown)) or ()}"
            )


@dataclass(frozen=True, repr=False)
class SegmentsRule(Rule):
    """:meth:`Plan.segments`"""

    call = "segments"
    sizes: tuple[int, ...]
    dim: int

    def __post_init__(self) -> None:
        if activation_path(self.path):
            raise ValueError(f"segments: {path_text(self.path)} is an activation: name a parameter or a buffer")
        sizes = self.sizes if isinstance(self.sizes, tuple) else ()
        if len(sizes) < 2 or not all(is_int(size) and size > 0 for size in sizes):
            raise ValueError(f"segments: sizes must be two or more positive integers, got {self.sizes!r}")
        if not is_int(self.dim):
            raise TypeError(f"segments: dim must be an integer, got {self.dim!r}")


_WHOLE_MESH = SimpleNamespace(counts_once=True)
"""Stands for the ``dp_mesh_dims`` of a unit, which ``fully_shard`` gets from ``parallelize``."""


@dataclass(frozen=True, repr=False)
class UnitRule(Rule):
    """:meth:`Plan.unit`. ``options`` are pairs of name and value, sorted by name."""

    call = "unit"
    dims: tuple[str, ...]
    options: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        self._check_module_path()
        self._check_dims(self.dims)
        if len(self.dims) > 2:
            raise ValueError(
                f"unit: dims {self.dims} are {len(self.dims)} mesh dimensions: give the one of the shards, or those of "
                "replicas and shards"
            )
        options = dict(self.options)
        for name, value in options.items():
            if name not in _UNIT_OPTIONS:
                guess = nearest(name, _UNIT_OPTIONS, 1)
                raise TypeError(
                    f"unit: unknown option {name}{f', did you mean {guess[0]}?' if guess else ''} The options are "
                    f"{', '.join(_UNIT_OPTIONS)}"
                )
            types, expected = _UNIT_OPTIONS[name]
            if not (callable(value) if types is None else isinstance(value, types)):
                raise TypeError(f"unit: {name} must be {expected}, got {value!r}")
        if "granularity" in options and "orig_param_policy" in options:
            raise ValueError("unit: granularity and orig_param_policy say the same thing: give one of them")
        placements, policy = options.get("placements"), options.get("mp_policy")
        try:
            # fully_shard asks this again. Here, the error comes where the plan is written, without a mesh or a model.
            check_pairs(parts_of({**options, "dp_mesh_dims": _WHOLE_MESH}))
        except ValueError as error:
            raise ValueError(f"unit: {error}") from error
        if placements is not None and len(placements.optimizer) != len(self.dims):
            raise ValueError(
                f"unit: {placements} is for {len(placements.optimizer)} mesh dimensions, got dims {self.dims}: use ZERO1, "
                "ZERO2 or ZERO3 on one, and leave placements out on two"
            )
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            dtype = getattr(policy, name, None)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise TypeError(f"unit: {name} of mp_policy must be a floating-point dtype, got {dtype!r}")


@dataclass(frozen=True, repr=False)
class DefaultRule(Rule):
    """:meth:`Plan.default`. ``path`` names the modules whose parameters it is for."""

    call = "default"
    placement: tuple[Placement, ...]

    def __post_init__(self) -> None:
        self._check_module_path()
        self._check_placements("placement", self.placement, 1)

    def text(self, of_option: Callable[[Any], str]) -> str:
        place = f", under={path_text(self.path)}" if self.path else ""
        return f"plan.default({_field_text('placement', self.placement)}{place})"


_RULES: dict[str, type[Rule]] = {
    rule.call: rule for rule in (ShardRule, RedistributeRule, AnnotateRule, FactoryRule, SegmentsRule, UnitRule, DefaultRule)
}


class Plan:
    r"""How a model is distributed over a mesh. It is a value, written beside the model, which does not change::

        plan = Plan()
        plan.shard(r"layers\.\d+\.up\.weight", Shard(0), "tp")
        plan.shard(r"layers\.\d+\.down\.weight", Shard(1), "tp")
        plan.shard("<in:tokens>", Shard(0), "dp")
        plan.unit(r"layers\.\d+", "dp", granularity=rows(32))

    Each call adds one rule and returns the plan. The order of rules has no meaning.

    Plans can be added (``a + b`` has the rules of both), moved (:meth:`under`), compared, printed, pickled, and written as
    JSON.

    Paths:

    - Parameters and buffers: a regular expression, which must match the whole qualified name.
    - Activations: a regular expression of modules' names, a dot, and brackets: ``<in>``, ``<in:2>``, ``<in:name>``, ``<out>``,
      ``<out:0>``, ``<out:key>``, ``<out:0.key>``. An empty expression is the root. ``<in>`` is the first argument of
      ``forward``, passed by position or by keyword.
    - Modules (``unit``, ``factory``): a regular expression of modules' names. An empty one is the root.

    In all calls, ``dims`` is the name of a mesh dimension or a tuple of names. A placement is one placement for all of them, or
    a tuple with one per name. On mesh dimensions that no rule names, a parameter is ``Replicate()``.

    Source: veScale, "Consistent and Efficient Tensor Programming with Eager-Mode SPMD".
    """

    def __init__(self, rules: Sequence[Rule] = ()) -> None:
        if not isinstance(rules, (list, tuple)) or not all(isinstance(rule, Rule) for rule in rules):
            raise TypeError(f"a Plan is made of rules, got {rules!r}: begin with Plan() and call its methods")
        # A list of its own: plans are values, and one that is made of another one's rules must not grow with it.
        self._rules = list(rules)

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rules, in the order of the calls."""
        return tuple(self._rules)

    def shard(
        self,
        path: str,
        placement: Placements,
        dims: Dims,
        *,
        phase: Optional[Phase] = None,
        grad: Optional[Placements] = None,
    ) -> Plan:
        """Say how a tensor lies. A parameter or buffer is stored so; an activation is brought to it when it passes::

            plan.shard("lm_head.weight", Shard(0), "tp")
            plan.shard("norm.<in>", Shard(1), "tp")

        Args:
            path: parameters and buffers, or activations.
            placement, dims: as for all rules.
            phase: ``INIT`` or ``RUN``; None is both. Each of the two needs the other one.
            grad: the placement of the gradient. None: it follows from the computation. A rule with a phase or a gradient is for
                parameters only: buffers that its path matches keep their placement.

        Raises:
            TypeError: the placement or the phase has another type.
            ValueError: the path is malformed, ``dims`` are empty or twice the same, the number of placements is not that of
                ``dims``, or an activation has a phase.
        """
        names = _as_names(dims)
        return self._add(ShardRule(path, _each(placement, names), names, phase, _each_or_none(grad, names)))

    def redistribute(
        self,
        path: str,
        dst: Placements,
        dims: Dims,
        *,
        src: Optional[Placements] = None,
        grad_src: Optional[Placements] = None,
        grad_dst: Optional[Placements] = None,
    ) -> Plan:
        """Redistribute an activation in forward, and its gradient in backward::

            plan.redistribute("mlp.<out>", Shard(1), "tp", src=Partial(), grad_dst=Replicate())

        Args:
            path: activations.
            dst: the placement after it.
            dims: as for all rules.
            src: the placement before it. None: that of the tensor that arrives.
            grad_src, grad_dst: the placements of the gradient, before and after its redistribution. None: they follow from
                ``dst`` and ``src``.

        Raises:
            TypeError, ValueError: as :meth:`shard`; ``path`` names no activation.
        """
        names = _as_names(dims)
        others = [_each_or_none(placement, names) for placement in (src, grad_src, grad_dst)]
        return self._add(RedistributeRule(path, _each(dst, names), names, *others))

    def annotate(self, path: str, placement: Placements, dims: Dims) -> Plan:
        """Say what a local tensor is, without moving it::

            plan.annotate("dropout.<in>", Shard(0), "dp")
            plan.annotate("norm.weight.grad", Partial(), "tp")

        Args:
            path: activations; or the gradient of parameters, whose path ends in ``.grad``.
            placement, dims: as for all rules.

        Raises:
            TypeError, ValueError: as :meth:`shard`; ``path`` names a parameter or a buffer.
        """
        names = _as_names(dims)
        return self._add(AnnotateRule(path, _each(placement, names), names))

    def own_rows(self, path: str, dims: Dims) -> Plan:
        """Say that each rank passes rows of its own, as a ``DistributedSampler`` gives them::

            plan.own_rows("<in:ids>", "dp")                               # in place of shard("<in:ids>", Shard(0), "dp")

        The whole batch has the rows of all ranks, in the order of ranks, and a mean is one over all of them. Ranks along other
        mesh dimensions pass equal rows. It is ``annotate(path, Shard(0), dims)``; if another dimension of a tensor counts the
        rows, write that.

        Args:
            path: inputs of the model. Each rank passes equally many rows.
            dims: the mesh dimensions along which ranks have different rows.

        Raises:
            TypeError, ValueError: as :meth:`annotate`.
        """
        return self.annotate(path, Shard(0), dims)

    def factory(
        self, path: str, placement: Placements, dims: Dims, *, functions: Union[str, Sequence[str]] = FACTORY_FUNCTIONS
    ) -> Plan:
        """Say what the tensors are that ``forward`` of modules makes, by ``torch.zeros`` and the like::

            plan.factory("rotary", Replicate(), "tp", functions="arange")

        It holds in submodules, too. If a submodule has a rule for the same function and mesh dimension, that rule holds there.

        Args:
            path: modules.
            placement, dims: as for all rules.
            functions: names of functions of torch, out of ``FACTORY_FUNCTIONS``.

        Raises:
            TypeError, ValueError: as :meth:`shard`; a function is unknown.
        """
        names = _as_names(dims)
        chosen = (functions,) if isinstance(functions, str) else tuple(sorted(set(functions)))
        return self._add(FactoryRule(path, _each(placement, names), names, chosen))

    def segments(self, path: str, sizes: Sequence[int], dim: int) -> Plan:
        """Say that a tensor is several matrices in one, such as q, k and v. Each is cut on its own::

            plan.segments("attention.qkv.weight", (4096, 1024, 1024), dim=0)
            plan.shard("attention.qkv.weight", Shard(0), "tp")
            plan.unit("attention", "dp", granularity=rows(128))       # blocks are counted anew in q, k and v

        Args:
            path: parameters and buffers.
            sizes: the size of each segment along ``dim``. They add up to the size of the tensor.
            dim: the dimension of the tensor.

        Raises:
            TypeError: ``dim`` is no integer.
            ValueError: the path is malformed, or there are not two or more positive sizes.
        """
        return self._add(SegmentsRule(path, tuple(sizes) if isinstance(sizes, (list, tuple)) else sizes, dim))  # type: ignore

    def unit(self, path: str, dims: Dims, **options: Unpack[UnitOptions]) -> Plan:
        r"""Shard the parameters of modules by ``torch_ragged.fsdp.fully_shard``, one call for each module::

            plan.unit(r"layers\.\d+", "dp", granularity=rows(32), mp_policy=MixedPrecisionPolicy(torch.bfloat16))

        A parameter belongs to the innermost unit around it. Parameters outside of all units make the unit of the root, whether
        a rule names it or not.

        Args:
            path: modules.
            dims: the mesh dimension of the shards; or two, of replicas and shards (HSDP).
            options: the options of ``fully_shard`` (``reshard_after_forward``, ``mp_policy``, ``offload_policy``,
                ``placements``, ``optional``, ``weights``, ``check_replicas``, ``orig_param_policy``, ``shard_placement_fn``),
                and ``granularity``, which is one ``orig_param_policy`` for all parameters; of a tensor with :meth:`segments`,
                each segment has it by itself. JSON cannot hold functions.

        Raises:
            TypeError: an option is unknown or has another type.
            ValueError: the path is malformed; ``dims`` are empty, twice the same, more than two, or not as many as
                ``placements`` need; ``placements`` are ``HIERARCHICAL``, which needs another mesh, or keep parameters gathered
                under a ``Float8Policy``; or ``granularity`` and ``orig_param_policy`` are both given.
        """
        if isinstance(weights := options.get("weights"), list):
            options["weights"] = tuple(weights)
        # Sorted: calls that name options in another order are equal rules.
        return self._add(UnitRule(path, _as_names(dims), tuple(sorted(options.items()))))

    def default(self, placement: Placement, *, under: str = "") -> Plan:
        """Say how parameters lie that no rule names, on all mesh dimensions. Without it, such a parameter is an error::

            plan.default(Replicate())

        Args:
            placement: one placement.
            under: modules. The rule is for parameters inside of them only.

        Raises:
            TypeError: ``placement`` is no placement.
            ValueError: ``under`` is no regular expression.
        """
        return self._add(DefaultRule(under, (placement,)))

    def under(self, prefix: str) -> Plan:
        """The plan for a model whose submodule ``prefix`` is the model of this plan::

            whole = text.under("language_model") + vision.under("vision_tower")

        ``prefix`` is a regular expression of modules' names, as in all paths.

        Raises:
            ValueError: ``prefix`` is no regular expression.
        """
        check_regex(prefix)
        return Plan([rule.under(prefix) for rule in self._rules])

    def to_json(self) -> str:
        """The plan as text, one rule a line. :meth:`from_json` reads it.

        Raises:
            TypeError: an option of a unit is a function or another value that JSON cannot hold.
        """
        rules = ",\n".join([f"  {json.dumps(_write_rule(rule))}" for rule in self._rules])
        return f'{{"version": {_PLAN_VERSION}, "rules": [\n{rules}\n]}}\n'

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that :meth:`to_json` has written. Nothing of the text is executed.

        Raises:
            TypeError: ``text`` is no string.
            ValueError: the text is no JSON of a plan, is of another version, or has an unknown kind of rule, field or value.
        """
        if not isinstance(text, str):
            raise TypeError(f"from_json reads text, got a value of type {type(text).__name__}: pass what to_json() returned")
        try:
            content = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"the text is no JSON: {error}. Pass what Plan.to_json() returned") from error
        if not isinstance(content, dict) or "version" not in content:
            raise ValueError("the JSON has no version: pass what Plan.to_json() returned")
        if content["version"] != _PLAN_VERSION:
            raise ValueError(
                f"the JSON is a plan of version {content['version']!r}, and this package reads version {_PLAN_VERSION}"
            )
        if unknown := sorted(set(content) - {"version", "rules"}):
            raise ValueError(f"the JSON has unknown fields {', '.join(unknown)}: a plan has version and rules")
        rules = content.get("rules")
        if not isinstance(rules, list):
            raise ValueError("the JSON has no list of rules: pass what Plan.to_json() returned")
        return cls([_read_rule(index, rule) for index, rule in enumerate(rules)])

    @classmethod
    def from_transformers(cls, model: nn.Module, *, tp: Optional[str] = "tp", fsdp: Optional[str] = None) -> Plan:
        """The plan that a model of transformers carries, in its ``tp_plan`` and ``fsdp_plan``::

            model = deferred_init(lambda: LlamaForCausalLM(config))
            plan = Plan.from_transformers(model, tp="tp", fsdp="dp")
            print(plan)                                                   # as you would write it
            model = parallelize(model, plan, mesh)

        Entries for parts that this model does not have are left out. Styles that repair sums or gradients of local tensors
        (``replicated_with_grad_allreduce``, ``mla_kv_a_proj``, ``moe_identity_expert``, ``local_params``) add no rule: DTensor
        does what they do.

        Args:
            model: a ``PreTrainedModel``, or a ``PeftModel`` of one, with or without values. It is not changed.
            tp: the mesh dimension of ``tp_plan``. None leaves it out.
            fsdp: the mesh dimension of ``fsdp_plan``, which cuts the batch of the arguments, too: ``input_ids``, ``labels``,
                ``attention_mask``, ``pixel_values`` and their like. None leaves it out; parameters that no rule names are
                replicated then.

        Raises:
            TypeError: ``model`` is no module.
            ValueError: the model has no such plan, or one with a style that is unknown or has no meaning for DTensors.
        """
        _check_model("from_transformers", model)
        base = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
        if base is not model:  # Of PEFT, which passes attributes of the model on, such as plans that do not know its prefix.
            prefix = next(name for name, module in model.named_modules() if module is base)
            return cls.from_transformers(base, tp=tp, fsdp=fsdp).under(re.escape(prefix))
        plan = cls()
        for path, placement in () if tp is None else shards_of(model):
            plan.shard(path, placement, tp)  # type: ignore[arg-type]
        if fsdp is None:
            return plan.default(Replicate())
        for path in batch_of(model):
            plan.shard(path, Shard(0), fsdp)
        for path, reshards in units_of(model):
            plan.unit(path, fsdp, reshard_after_forward=reshards)
        return plan

    @classmethod
    def from_torchtitan(
        cls,
        model: nn.Module,
        *,
        dp: Optional[str] = "dp",
        cp: Optional[str] = None,
        tp: Optional[str] = "tp",
        unit: bool = True,
    ) -> Plan:
        """The plan that a model of torchtitan carries, in the ``ShardingConfig`` of its modules::

            set_llama3_sharding_config(config, enable_sp=True)
            model = deferred_init(build)                                  # config.build(), and init_states() of the model
            plan = Plan.from_torchtitan(model, dp="dp", tp="tp")
            print(plan)                                                   # as you would write it
            model = parallelize(model, plan, mesh)                        # instead of model.parallelize(parallel_dims)

        What the fields become:

        - ``state_shardings``: a rule of the parameter or buffer. ``spmd.S(dim)`` is ``Shard(dim)``, and so is ``spmd.V`` with
          the axis in ``partition_spec``. Where it is ``spmd.R`` or ``spmd.I``, no rule is needed.
        - ``in_dst_shardings``, or ``in_src_shardings`` of an argument that has no other one: a rule of ``<in:name>``. As the
          script passes whole tensors, it takes the rank's part of the batch, too. Arguments that ``forward`` does not take are
          left out, as in torchtitan.
        - ``out_dst_shardings``: a rule of ``<out>``, unless it equals ``out_src_shardings``.
        - ``out_src_shardings``: nothing. DTensor knows what comes out, sums (``spmd.P``) included.
        - ``local_map``: nothing, but for its inputs. It lets torchtitan run ``forward`` on local tensors. Here DTensors go
          through, and their rules find all placements. Attention of heads that ``tp`` cuts, and of rows that ``cp`` cuts with
          all keys, is computed on each rank's part by the kernel on CPU; those of GPUs gather what ``cp`` cuts. The weight of
          an embedding with ``local_map`` stays whole on these axes, under all its names if it is tied: its ``forward`` takes
          local rows, and only torchtitan tells it which ones they are. The units cut it over ``dp`` and ``cp``.

        Args:
            model: a model that torchtitan's config built, with or without values. It is not changed, and torchtitan is not
                imported.
            dp, cp, tp: the mesh dimension of each axis of the configs. None leaves the axis out.
            unit: whether the elements of ``model.layers`` are units, over ``dp`` and ``cp``. If not, or if both are None,
                parameters that no rule names are replicated.

        Raises:
            TypeError: ``model`` is no module.
            ValueError: no module has a config, or one has no meaning for DTensors: a parameter without a layout, an axis such
                as ``ep`` that cuts, ``spmd.V`` without ``partition_spec``, ``spmd.P`` that something else should become,
                ``local_map`` around a kernel without a rule (``FlexAttention``, ``VarlenAttention``), or around weights that
                are cut (experts). All are listed, with module and field.

        Source: torchtitan 0.3.0, ``protocols/sharding.py`` and ``protocols/module.py``.
        """
        _check_model("from_torchtitan", model)
        plan = cls()
        for path, (placements, dims) in layouts_of(model, {"dp": dp, "cp": cp, "tp": tp}):
            plan.shard(path, placements, dims)
        data = tuple(dim for dim in (dp, cp) if dim is not None)
        layers = layers_of(model) if unit and data else []
        for path in layers:
            plan.unit(path, data)
        return plan if layers else plan.default(Replicate())

    def __add__(self, other: Plan) -> Plan:
        return Plan([*self._rules, *other._rules]) if isinstance(other, Plan) else NotImplemented

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Plan):
            return NotImplemented
        mine, others = self._rules, other._rules  # Their order has no meaning, and their options have no hash.
        return len(mine) == len(others) and all(mine.count(rule) == others.count(rule) for rule in mine)

    __hash__ = None  # type: ignore[assignment]  # A plan grows.

    def __repr__(self) -> str:
        return "\n".join(["plan = Plan()", *map(repr, self._rules)])

    def _add(self, rule: Rule) -> Plan:
        self._rules.append(rule)
        return self


_PLACEMENT_FIELDS = ("placement", "grad", "dst", "src", "grad_src", "grad_dst")


def _check_model(call: str, model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"Plan.{call} reads a model, got a value of type {type(model).__name__}: pass the nn.Module")


def _as_names(dims: Dims) -> tuple[str, ...]:
    return (dims,) if isinstance(dims, str) else tuple(dims) if isinstance(dims, list) else dims


def _each(placement: Placements, names: tuple[str, ...]) -> tuple[Placement, ...]:
    """One placement per name. What is wrong with the names is the rule's to say."""
    if isinstance(placement, (tuple, list)):
        return tuple(placement)
    return (placement,) * (len(names) if isinstance(names, tuple) else 1)


def _each_or_none(placement: Optional[Placements], names: tuple[str, ...]) -> Optional[tuple[Placement, ...]]:
    return None if placement is None else _each(placement, names)


def _field_text(name: str, value: Any) -> str:
    if name == "path":
        return path_text(value)
    if name in ("dims", "functions"):
        return quoted(value[0]) if len(value) == 1 else f"({', '.join(map(quoted, value))})"
    if name == "phase":
        return value.name
    if name in _PLACEMENT_FIELDS:
        texts = [placement_text(each) for each in value]
        return texts[0] if len(set(texts)) == 1 else f"({', '.join(texts)})"
    return repr(value)


def _write_rule(rule: Rule) -> dict[str, Any]:
    written: dict[str, Any] = {"kind": rule.call}
    for field in dataclasses.fields(rule):
        value = getattr(rule, field.name)
        if value == field.default:
            continue
        if field.name in _PLACEMENT_FIELDS:
            value = [placement_text(each) for each in value]
        elif field.name == "phase":
            value = value.name
        elif field.name == "options":
            try:
                value = {name: write_value(option) for name, option in value}
            except TypeError as error:
                raise TypeError(f"{rule!r}: {error}") from error
        written[field.name] = list(value) if isinstance(value, tuple) else value
    return written


def _read_rule(index: int, written: Any) -> Rule:
    kind = written.get("kind") if isinstance(written, dict) else None
    if not isinstance(kind, str) or kind not in _RULES:
        raise ValueError(f"rule {index} of the JSON is of the unknown kind {kind!r}: the kinds are {', '.join(_RULES)}")
    fields = {field.name: field for field in dataclasses.fields(_RULES[kind])}
    values = {name: value for name, value in written.items() if name != "kind"}
    if unknown := sorted(set(values) - set(fields)):
        raise ValueError(
            f"rule {index} of the JSON ({kind}) has unknown fields {', '.join(unknown)}: it has {', '.join(fields)}"
        )
    if missing := [name for name, field in fields.items() if field.default is dataclasses.MISSING and name not in values]:
        raise ValueError(
            f"rule {index} of the JSON ({kind}) has no {', '.join(missing)}: it needs each field without a default"
        )
    try:
        return _RULES[kind](**{name: _read_field(name, value) for name, value in values.items()})
    except (TypeError, ValueError) as error:
        raise ValueError(f"rule {index} of the JSON ({kind}) is wrong: {error}") from error


def _read_field(name: str, value: Any) -> Any:
    if name in _PLACEMENT_FIELDS:
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise ValueError(f"{name} must be a list of placements as text, got {value!r}")
        return tuple([read_placement(each) for each in value])
    if name == "phase":
        if value not in Phase.__members__:
            raise ValueError(f"phase must be INIT or RUN, got {value!r}")
        return Phase[value]
    if name == "options":
        if not isinstance(value, dict):
            raise ValueError(f"options must be an object, got {value!r}")
        return tuple([(option, read_value(each)) for option, each in value.items()])
    return tuple(value) if isinstance(value, list) else value
