"""The sharding configs that modules of torchtitan carry, as paths, placements and mesh dimensions.

It must not import torchtitan, or know the rules of a plan: ``Plan.from_torchtitan`` makes rules of what it returns.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Optional

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

__all__ = ["layouts_of", "layers_of"]

_CONFIG_FIELDS = (
    "state_shardings",
    "in_src_shardings",
    "in_dst_shardings",
    "out_src_shardings",
    "out_dst_shardings",
    "local_map",
)
_KERNELS = {  # Attention that runs on local tensors only. The name is that of the class.
    "FlexAttention": "it compiles flex_attention",
    "VarlenAttention": "it calls varlen_attn",
}
_MOST_TITAN_NAMES = 2  # Of one problem: the other ones are counted.
_PENDING = None
"""``spmd.P``: each rank has a summand. DTensor knows this of a result, and no rule can ask for it."""

_TitanLayout = dict[str, Optional[Placement]]
_Said = tuple[tuple[Placement, ...], tuple[str, ...]]
"""Placements and mesh dimensions of a tensor."""


def layouts_of(model: nn.Module, dims: Mapping[str, Optional[str]]) -> list[tuple[str, _Said]]:
    """Paths of parameters, buffers and activations, each with its placements and mesh dimensions, as the configs say.

    Args:
        model: modules of it have ``_sharding_config``.
        dims: the mesh dimension of each axis of torchtitan: ``"dp"``, ``"cp"``, ``"tp"``. None leaves the axis out.

    Raises:
        ValueError: no module has a config, or one has no meaning for DTensors. All problems are named by module and field.
    """
    configs = {name: config for name, module in model.named_modules() if (config := _config_of(module)) is not None}
    if not configs:
        raise ValueError(
            f"no module of {type(model).__name__} has a _sharding_config: before torchtitan builds the model, call "
            "config.update_from_config(config=...), or a part of it, such as set_llama3_sharding_config(config, enable_sp=True)"
        )
    reader = _Reader(model, configs, dims)
    for name in configs:
        reader.read(name)
    reader.raise_problems()
    modules, tensors = [name for name, _ in model.named_modules()], list(_tensors_of(model))
    found = []
    for (tensor, said), owners in sorted(reader.said.items(), key=lambda each: each[0][0].startswith("<")):
        if tensor.startswith("<"):
            found += [(f"{path}.{tensor}" if path else tensor, said) for path in _paths(owners, modules)]
        else:
            names = [f"{owner}.{tensor}" if owner else tensor for owner in owners]
            found += [(path, said) for path in _paths([name for name in names if name not in reader.whole], tensors)]
    return found


def layers_of(model: nn.Module) -> list[str]:
    """Paths of the modules that torchtitan shards one by one: the elements of ``layers``."""
    layers = getattr(model, "layers", None)
    names = [f"layers.{name}" for name, _ in layers.named_children()] if isinstance(layers, nn.Module) else []
    return _paths(names, [name for name, _ in model.named_modules()])


class _Reader:
    """Reads configs one by one.

    Attributes:
        said: for each tensor of a module and what its config says of it, the names of the modules.
        whole: names of parameters that stay whole although a config cuts them, all names of tied ones included.
    """

    def __init__(self, model: nn.Module, configs: Mapping[str, Any], dims: Mapping[str, Optional[str]]) -> None:
        self._model, self._configs, self._dims = model, configs, dims
        self._problems: dict[tuple[str, str], list[str]] = {}
        self.said: dict[tuple[str, _Said], list[str]] = {}
        self.whole: set[str] = set()

    def raise_problems(self) -> None:
        texts = []
        for (field, text), names in self._problems.items():
            more = f" and {len(names) - _MOST_TITAN_NAMES} more" if len(names) > _MOST_TITAN_NAMES else ""
            texts.append(f"  {', '.join(names[:_MOST_TITAN_NAMES])}{more}, {field}: {text}")
        if texts:
            kind = type(self._model).__name__
            raise ValueError(f"the sharding configs of {kind} cannot be read:\n" + "\n".join(texts))

    def read(self, name: str) -> None:
        config = self._configs[name]
        missing = [field for field in _CONFIG_FIELDS if not hasattr(config, field)]
        if missing:
            self._add_problem(name, "_sharding_config", f"a {type(config).__name__} has no {', '.join(missing)}")
            return
        self._read_states(name, config.state_shardings or {})
        self._read_inputs(name, config.in_src_shardings or {}, config.in_dst_shardings or {})
        self._read_output(name, config.out_src_shardings, config.out_dst_shardings)
        if config.local_map is not None:
            self._read_local(name)

    def _read_states(self, name: str, layouts: Mapping[str, Any]) -> None:
        module = self._model.get_submodule(name)
        for tensor, value in (*module._parameters.items(), *module._buffers.items()):
            if value is None:
                continue
            field = f"state_shardings[{tensor!r}]"
            if tensor not in layouts:
                text = (
                    "it is missing, and a config says how each parameter and buffer of its module lies. Add it, such as spmd.R"
                )
                self._add_problem(name, field, text)
                continue
            layout = self._layout(name, field, layouts[tensor])
            if _PENDING in layout.values():
                self._add_problem(name, field, "spmd.P is no layout of a tensor that a model keeps. Use spmd.R")
            else:
                # A tensor is whole where no rule speaks.
                self._add(name, tensor, {axis: each for axis, each in layout.items() if each != Replicate()})

    def _read_inputs(self, name: str, sources: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
        takes = inspect.signature(self._model.get_submodule(name).forward).parameters
        for argument in dict.fromkeys((*sources, *wanted)):
            if argument not in takes:
                continue  # torchtitan passes over it, too. Its norms name ``input``, which nn.RMSNorm calls ``x``.
            source = self._layout(name, f"in_src_shardings[{argument!r}]", sources.get(argument))
            field = f"{'in_dst_shardings' if argument in wanted else 'in_src_shardings'}[{argument!r}]"
            # Inputs of the model are whole: what torchtitan only annotates, a plan cuts.
            layout = self._layout(name, field, wanted[argument]) if argument in wanted else source
            self._move(name, f"<in:{argument}>", field, source, layout)

    def _read_output(self, name: str, source: Any, wanted: Any) -> None:
        if wanted is None:
            return  # DTensor knows how the output lies.
        field = "out_dst_shardings"
        if isinstance(source, tuple) or isinstance(wanted, tuple):
            self._add_problem(name, field, "several outputs have no layout after them. Take it out, and add rules of <out:0>")
            return
        before, after = self._layout(name, "out_src_shardings", source), self._layout(name, field, wanted)
        if before != after:
            self._move(name, "<out>", field, before, after)

    def _move(self, name: str, tensor: str, field: str, source: _TitanLayout, layout: _TitanLayout) -> None:
        """A tensor that passes is brought to ``layout``. It stays pending where it is so."""
        made = [axis for axis, each in layout.items() if each is _PENDING and source.get(axis, Replicate()) is not _PENDING]
        if made:
            text = f"spmd.P on {made[0]} would make a tensor pending that is not. Take it out: DTensor reduces when it must"
            self._add_problem(name, field, text)
        self._add(name, tensor, {axis: each for axis, each in layout.items() if each is not _PENDING})

    def _read_local(self, name: str) -> None:
        """A module whose forward torchtitan runs on local tensors. Here, DTensors flow through it, too."""
        module = self._model.get_submodule(name)
        for kind in (each.__name__ for each in type(module).__mro__):
            if kind in _KERNELS:
                text = (
                    f"{_KERNELS[kind]}, for which DTensor has no rule. Let the config have ScaledDotProductAttention.Config()"
                )
                self._add_problem(name, "local_map", text)
        cut = list(self._cut_inside(name))
        if cut and isinstance(module, nn.Embedding):
            # It takes its local rows as all rows, unless torchtitan's parallelize has told it which ones they are.
            same = {id(_tensors_of(self._model)[tensor]) for tensor in cut}
            self.whole |= {tensor for tensor, value in _tensors_of(self._model).items() if id(value) in same}
        elif cut:
            text = (
                f"its forward takes the local part of {cut[0][len(name) :].lstrip('.')}, and adds up or sends by itself, which "
                "has no meaning for DTensors. Set _sharding_config = None for it and its submodules, and add rules to the plan"
            )
            self._add_problem(name, "local_map", text)

    def _cut_inside(self, name: str) -> Iterator[str]:
        """Names of parameters and buffers of a module and its submodules that their configs cut."""
        for module, config in self._configs.items():
            if module != name and not module.startswith(f"{name}." if name else ""):
                continue
            owner = self._model.get_submodule(module)
            for tensor, layout in (getattr(config, "state_shardings", None) or {}).items():
                if getattr(owner, tensor, None) is not None and set(self._layout(module, "", layout).values()) - {Replicate()}:
                    yield f"{module}.{tensor}" if module else tensor

    def _layout(self, name: str, field: str, layout: Any) -> _TitanLayout:
        try:
            return {} if layout is None else _placements_of(layout, self._dims)
        except ValueError as problem:
            self._add_problem(name, field, str(problem))
            return {}

    def _add(self, name: str, tensor: str, layout: _TitanLayout) -> None:
        if layout:
            placements = tuple([each for each in layout.values() if each is not None])
            said = placements, tuple([str(self._dims[axis]) for axis in layout])
            self.said.setdefault((tensor, said), []).append(name)

    def _add_problem(self, name: str, field: str, text: str) -> None:
        if field:
            shown = f"{name or 'the root'} ({type(self._model.get_submodule(name)).__name__})"
            names = self._problems.setdefault((field, text), [])
            names += [shown] if shown not in names else []


def _config_of(module: nn.Module) -> Any:
    """The sharding config that torchtitan's ``Module.Config.build`` gave to a module."""
    return getattr(module, "_sharding_config", None)


def _placements_of(layout: Any, dims: Mapping[str, Optional[str]]) -> _TitanLayout:
    """The placements of an ``SpmdLayout`` on the axes that have mesh dimensions, in the order in which they cut.

    Raises:
        ValueError: it says something else than a placement per axis.
    """
    types: dict[str, Any] = {_axis(axis): each for axis, each in layout.axis_types.items()}
    spec = [entry if isinstance(entry, tuple) else (entry,) for entry in layout.partition_spec or ()]
    dim_of = {_axis(axis): dim for dim, entry in enumerate(spec) for axis in entry if axis is not None}
    found: _TitanLayout = {}
    for axis in dict.fromkeys((*types, *dim_of)):
        placement = _placement_of(axis, types.get(axis), dim_of)
        if axis in dims:
            if dims[axis] is not None:
                found[axis] = placement
        elif placement != Replicate():
            raise ValueError(f"the axis {axis} cuts or adds, and a plan is for the axes {', '.join(dims)} only")
    # If several axes cut one dimension, partition_spec says which one cuts first. The rule keeps this order, so that resolve()
    # can compare it with the mesh's.
    in_spec = [axis for axis in dim_of if axis in found]
    in_order = sorted(found, key=list(dims).index)
    if in_spec != sorted(in_spec, key=list(dims).index):
        in_order = [*[axis for axis in in_order if axis not in in_spec], *in_spec]
    return {axis: found[axis] for axis in in_order}


def _placement_of(axis: str, kind: Any, dim_of: Mapping[str, int]) -> Optional[Placement]:
    name, dim = getattr(kind, "name", None), getattr(kind, "dim", None)
    if isinstance(dim, int):
        return Shard(dim)
    if axis in dim_of and name in ("V", None):
        return Shard(dim_of[axis])
    if name in ("R", "I"):  # They differ in the gradient only, which DTensor knows.
        return Replicate()
    if name == "P":
        return _PENDING
    if name == "V":
        raise ValueError(f"spmd.V on {axis} says that ranks differ, not how. Use spmd.S(dim), or name {axis} in partition_spec")
    raise ValueError(f"{kind!r} on {axis} is none of spmd.R, spmd.I, spmd.V, spmd.P and spmd.S(dim)")


def _axis(axis: Any) -> str:
    return str(getattr(axis, "value", axis))


def _tensors_of(model: nn.Module) -> dict[str, Any]:
    """Parameters and buffers by all of their names."""
    named = model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    return dict(itertools.chain(*named))


def _paths(names: Sequence[str], of: Collection[str]) -> list[str]:
    r"""Regular expressions that match ``names``, and no other of the names ``of``: with ``\d+`` where all numbers match."""
    chosen = set(names)
    alike: dict[str, list[str]] = {}
    for name in names:
        pattern = r"\.".join([r"\d+" if part.isdecimal() else re.escape(part) for part in name.split(".")])
        alike.setdefault(pattern, []).append(name)
    paths = []
    for pattern, each in alike.items():
        matches_only_these = all(name in chosen for name in of if re.fullmatch(pattern, name))
        if len(each) > 1 and matches_only_these:
            paths.append(pattern)
        else:
            paths.append(re.escape(each[0]) if len(each) == 1 else f"({'|'.join(map(re.escape, each))})")
    return paths
