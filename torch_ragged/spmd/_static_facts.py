"""Facts: what the Python code of a module can read besides its arguments. A static module runs while they hold.

It must not know tensors' values: code that reads one (``item()``) is not static.
"""

from __future__ import annotations

import builtins
import collections
import enum
import functools
import logging
import os
import sysconfig
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from operator import attrgetter, is_, itemgetter, methodcaller
from typing import Any, Optional

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.nn.modules import module as nn_module

__all__ = ["Facts", "NoFacts", "Surroundings", "modes"]

_LIMIT = 20_000
"""Values that are watched for one module, at most."""
_STATES = 64
"""States of the modules around static ones that are told apart; further ones count as one."""
_OF_OTHERS = tuple(
    os.path.join(path, "")
    for path in {
        os.path.dirname(torch.__file__),
        os.path.dirname(os.path.dirname(__file__)),
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib")),
    }
)
_SITE = tuple(os.path.join(sysconfig.get_path(name), "") for name in ("purelib", "platlib"))
# What these modules answer, and what these functions do, no guard sees.
_UNSEEN = {"datetime", "os", "random", "secrets", "socket", "subprocess", "time", "uuid"}
_CONSTANT_TYPES = {"torch", "torch_ragged", "builtins", "re", "typing", "types", "operator", "functools", "weakref", "abc"}
# No code names these methods: torch calls them, and Python for operators and statements.
_UNNAMED = ("forward", "__call__", "__bool__", "__len__", "__getitem__", "__contains__", "__eq__", "__getattr__", "__iter__")
_EFFECTS = {"breakpoint", "exec", "eval", "input", "open", "print"}
# Hooks for all modules of the process. torch keeps their dicts for ever, so they are looked at in each call.
_GLOBAL_HOOKS = [hooks for name, hooks in vars(nn_module).items() if name.startswith("_global_") and isinstance(hooks, dict)]


def _has_graph(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.grad_fn is not None


def _is_frozen(value: Any) -> bool:
    """Whether the attributes of an object cannot change: a frozen dataclass, or a placement, which is immutable."""
    return isinstance(value, Placement) or getattr(getattr(type(value), "__dataclass_params__", None), "frozen", False)


class NoFacts(Exception):
    """The code of a module reads something that no guard can see; the text says what."""


def modes() -> tuple[Any, ...]:
    """The modes of torch that change what an op does."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch._C._is_any_autocast_enabled() and tuple(map(_autocast, ("cpu", "cuda"))),
        torch.get_default_dtype(),
        # A mode of torch functions may make other ops of the code, such as torch.set_default_device.
        torch._C._len_torch_function_stack(),
        any(_GLOBAL_HOOKS),
    )


def _autocast(device: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


class Facts:
    """The attributes of a module and of all that it refers to, the globals and closures of its code, and hooks, at one time.

    ``hold()`` compares them by identity, so that it costs 1.3 us per submodule: an equal number of the same type
    and a tensor with the same shape, dtype and placements count as the same. What it does not see: values of tensors, files,
    the environment, and the state of objects that are not Python's. Code that uses such a module of Python
    (``os``, ``random``, ``time``), or that prints, has no facts.

    Args:
        alone: without the modules in it. What no guard can see is left out.

    Raises:
        NoFacts: the code reads what no guard can see.
    """

    def __init__(self, module: nn.Module, alone: bool = False) -> None:
        self._module, self._alone = module, alone
        self._whole: list[tuple[dict[Any, Any], list[Any], list[Any], str]] = []
        self._listed: list[tuple[Any, list[Any], str]] = []
        self._named: list[tuple[Any, Callable[[Any], tuple[Any, ...]], tuple[str, ...], list[Any], str]] = []
        self._cells: list[tuple[Any, Any, str]] = []
        self._tensors: list[torch.Tensor] = []
        self._tensor_paths: list[str] = []
        self._seen: dict[int, Any] = {}  # Values are kept, so that no other one gets their address.
        self._names: dict[Any, tuple[str, Any, set[str]]] = {}
        self._code: set[str] = set()  # All names that the code uses.
        self._functions: list[tuple[types.FunctionType, str]] = []
        self._classes: dict[type, str] = {}
        for name, each in (("", module),) if alone else module.named_modules():
            self._visit(each, name or type(module).__name__)
        self._follow()
        for path, place, names in self._names.values():
            chosen = tuple(sorted(names))
            get = _getter(chosen)
            self._named.append((place, get, chosen, list(get(place)), path))
        del self._names, self._functions, self._classes
        if alone:
            self._seen = {}
        self._flatten()

    def _flatten(self) -> None:
        """Lists over which C loops run: most facts are entries of dicts, and most dicts are of hooks, without an entry."""
        self._empty = [each[0] for each in (*self._whole, *self._listed) if not each[0]]
        self._full = [each[0] for each in (*self._whole, *self._listed) if each[0]]
        self._lengths = [*map(len, self._full)]
        # Of texts, == is faster than a comparison one by one. Other keys and entries may be tensors, whose == is an op.
        is_named = [isinstance(each, dict) and all(type(key) is str for key in each) for each in self._full]
        self._by_name = [each for each, named in zip(self._full, is_named) if named]
        self._others = [each for each, named in zip(self._full, is_named) if not named]
        self._texts = [*chain.from_iterable(self._by_name)]
        self._keys = [*chain.from_iterable(self._others)]
        self._dicts = [each[0] for each in self._whole if each[0]]
        self._values = [*chain.from_iterable(map(_values_of, self._dicts))]
        self._metas = [*map(_changes_in_place, self._tensors)]

    def hold(self) -> bool:
        """Whether all facts are as they were."""
        same = (
            not any(self._empty)
            and [*map(len, self._full)] == self._lengths
            and [*chain.from_iterable(self._by_name)] == self._texts
            and all(map(is_, chain.from_iterable(self._others), self._keys))
            and all(map(is_, chain.from_iterable(map(_values_of, self._dicts)), self._values))
            # A tensor is known by its identity, as an entry of what has it. These are what code may change in place.
            and [*map(_changes_in_place, self._tensors)] == self._metas
            and all(cell.cell_contents is value for cell, value, _ in self._cells)
        )
        if same:
            try:
                same = all(all(map(is_, get(place), values)) for place, get, _, values, _ in self._named)
            except KeyError:
                return False
        if same:
            return True
        if self.changed() is not None:
            return False
        self._flatten()  # Other objects, but as good ones.
        return True

    def changed(self) -> Optional[str]:
        """The name of a fact that is another one now; None: all hold."""
        for place, keys, values, path in self._whole:
            if len(place) != len(keys):
                return f"{path}: {_other_key(place, keys)}"
            if not (all(map(is_, place, keys)) and all(map(is_, place.values(), values))):
                for index, (key, now) in enumerate(place.items()):
                    if key != keys[index] or not _same(now, values, index):
                        return f"{path}.{key}"
        for sequence, values, path in self._listed:
            if len(sequence) != len(values) or not all(map(is_, sequence, values)):
                if len(sequence) != len(values) or not all(_same(now, values, i) for i, now in enumerate(sequence)):
                    return path
        for place, get, names, values, path in self._named:
            try:
                now = get(place)
            except KeyError as missing:
                return f"{path}.{missing.args[0]}"
            if not all(map(is_, now, values)):
                for index, value in enumerate(now):
                    if not _same(value, values, index):
                        return f"{path}.{names[index]}"
        for cell, value, path in self._cells:
            if cell.cell_contents is not value:
                return path
        for tensor, meta, path in zip(self._tensors, self._metas, self._tensor_paths):
            if _changes_in_place(tensor) != meta:
                return path
        return None

    def differing(self) -> set[tuple[int, Any]]:
        """All entries of dicts, lists and cells that are others now: by the identity of what has them, and the key."""
        found: set[tuple[int, Any]] = set()
        for place, keys, values, _ in self._whole:
            before = dict(zip(keys, values))
            found |= {(id(place), key) for key in {**place, **before} if place.get(key, self) is not before.get(key, self)}
        for sequence, values, _ in self._listed:
            if len(sequence) != len(values) or not all(map(is_, sequence, values)):
                found.add((id(sequence), None))
        for place, _, names, values, _ in self._named:
            attributes = place if isinstance(place, dict) else dict(place)
            found |= {(id(place), name) for name, value in zip(names, values) if attributes.get(name, self) is not value}
        found |= {(id(cell), None) for cell, value, _ in self._cells if cell.cell_contents is not value}
        metas = zip(self._tensors, self._metas)
        return found | {(id(tensor), None) for tensor, meta in metas if _changes_in_place(tensor) != meta}

    def drop(self, changing: set[tuple[int, Any]]) -> None:
        """Compare some entries no more."""
        if not changing:
            return
        named = [(place, names, values, path) for place, _, names, values, path in self._named]
        whole, self._whole, self._named = self._whole, [], []
        for place, keys, values, path in whole:
            if len(place) == len(keys) and not any((id(place), key) in changing for key in keys):
                self._whole.append((place, keys, values, path))
            else:
                named.append((place, tuple(keys), values, path))
        for place, names, values, path in named:
            pairs = [(name, value) for name, value in zip(names, values) if (id(place), name) not in changing]
            if pairs:
                chosen = tuple([name for name, _ in pairs])
                self._named.append((place, _getter(chosen), chosen, [value for _, value in pairs], path))
        self._listed = [each for each in self._listed if (id(each[0]), None) not in changing]
        self._cells = [each for each in self._cells if (id(each[0]), None) not in changing]
        tensors = [(t, path) for t, path in zip(self._tensors, self._tensor_paths) if (id(t), None) not in changing]
        self._tensors, self._tensor_paths = [t for t, _ in tensors], [path for _, path in tensors]
        self._flatten()

    def restore(self) -> None:
        """Undo what code that was called on trial has changed."""
        for place, keys, values, _ in self._whole:
            if len(place) != len(keys) or not all(map(is_, place, keys)) or not all(map(is_, place.values(), values)):
                # In place: the code, and other modules, have this very dict.
                place.clear()
                place.update(zip(keys, values))
        for sequence, values, _ in self._listed:
            if len(sequence) != len(values) or not all(map(is_, sequence, values)):
                sequence.clear()
                (sequence.update if isinstance(sequence, set) else sequence.extend)(values)
        for place, _, names, values, _ in self._named:
            if isinstance(place, dict) and not all(map(is_, map(place.get, names), values)):
                # The attributes of a class are a proxy, to which nobody can write: what a trial has changed there stays.
                place.update(zip(names, values))
        for cell, value, _ in self._cells:
            cell.cell_contents = value

    # -- values

    def _visit(self, value: Any, path: str) -> None:
        if isinstance(value, _FIXED) or id(value) in self._seen:
            return
        if self._alone and isinstance(value, nn.Module) and value is not self._module:
            return
        try:
            self._visit_new(value, path)
        except NoFacts:
            if not self._alone:
                raise

    def _visit_new(self, value: Any, path: str) -> None:
        # Before what it refers to: cycles end here.
        self._seen[id(value)] = value
        if len(self._seen) > _LIMIT:
            raise NoFacts(f"it refers to more than {_LIMIT} values, such as {path}")
        if isinstance(value, nn.Module):
            self._visit_module(value, path)
        elif isinstance(value, torch.Tensor):
            if not self._alone or isinstance(value, nn.Parameter):
                self._tensors.append(value)
                self._tensor_paths.append(path)
        # Loggers refer to much of the process. The state of a generator counts in draws only, which are not on local tensors.
        elif isinstance(value, logging.Logger | torch.device | torch.Generator):
            pass
        elif isinstance(value, dict):
            self._whole.append((value, list(value), list(value.values()), path))
            for key, each in value.items():
                self._visit(each, f"{path}[{key!r}]")
        elif isinstance(value, list | set | collections.deque):
            self._listed.append((value, list(value), path))
            for each in value:
                self._visit(each, path)
        elif isinstance(value, tuple | frozenset):
            for each in value:
                self._visit(each, path)
        elif isinstance(value, functools.partial):
            for each in (value.func, value.args, value.keywords):
                self._visit(each, path)
        elif isinstance(value, types.MethodType):
            self._visit(value.__self__, path)
            self._visit(value.__func__, path)
        elif isinstance(value, types.FunctionType):
            _check_seen(value.__module__, path)
            self._functions.append((value, path))
        elif isinstance(value, weakref.ref):
            self._visit(value(), f"{path}()")
        elif isinstance(value, types.ModuleType | enum.Enum):
            pass
        elif isinstance(value, types.BuiltinFunctionType):
            _check_seen(type(value.__self__).__module__, path)
            _check_seen(value.__module__, path)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, Iterator):
            # To ask it for its state would take its next value.
            raise NoFacts(f"{path} is an iterator, whose state no guard sees")
        elif not hasattr(value, "__dict__") and not hasattr(type(value), "__slots__") and not _is_constant(value):
            raise NoFacts(f"{path} is a {type(value).__name__}, whose state no guard sees")
        else:
            if hasattr(value, "__dict__") and not _is_others(type(value).__module__):
                self._class(type(value))
                self._visit(vars(value), path)
            slots = [name for kind in type(value).__mro__ for name in vars(kind).get("__slots__", ()) or ()]
            if slots and not _is_constant(value) and not _is_frozen(value):
                raise NoFacts(f"{path} is a {type(value).__name__} with __slots__, whose changes no guard sees")
            for name in slots:
                self._visit(getattr(value, name, None), f"{path}.{name}")

    def _visit_module(self, module: nn.Module, path: str) -> None:
        if getattr(module, "_compiled_call_impl", None) is not None or isinstance(module, torch.jit.ScriptModule):
            raise NoFacts(f"{path} is compiled")
        attributes = vars(module)
        self._class(type(module))
        self._whole.append((attributes, list(attributes), list(attributes.values()), path))
        self._seen[id(attributes)] = attributes
        for name, value in attributes.items():
            # Most hook dicts are empty. They need no walk, only a look whether one has been registered since.
            if not name.endswith("_hooks") or value:
                self._visit(value, f"{path}.{name}")
            elif isinstance(value, dict):
                self._whole.append((value, [], [], f"{path}.{name}"))

    # -- code

    def _class(self, kind: type) -> None:
        for each in kind.__mro__:
            if each not in self._classes and each.__module__ != "builtins":
                self._classes[each] = f"{each.__module__}.{each.__qualname__}"
                for name in _UNNAMED:
                    if name in vars(each) and each is not nn.Module:
                        self._watch_name(vars(each), self._classes[each], name)

    def _watch_name(self, place: Any, path: str, name: str) -> None:
        """``place`` is a module's globals or a class's attributes, ``path`` its name."""
        # Attributes of a class are another proxy each time; functions that others wrap have the others' module names.
        key = id(place) if isinstance(place, dict) else path
        self._names.setdefault(key, (path, place, set()))[2].add(name)
        value = place[name]
        # By type: an object of the user may answer any question about its attributes, or raise.
        if isinstance(value, property):
            value = value.fget
        elif isinstance(value, staticmethod | classmethod | types.MethodType):
            value = value.__func__
        self._visit(value, f"{path}.{name}")

    def _follow(self) -> None:
        """Watch what the code of the functions that were found reads, and follow the functions that it names."""
        done: set[types.CodeType] = set()
        known: set[tuple[type, str]] = set()
        while True:
            while self._functions:
                function, path = self._functions.pop()
                inner = getattr(function, "__wrapped__", None)
                if inner is not None:
                    self._visit(inner, path)
                for cell in function.__closure__ or ():
                    try:
                        content = cell.cell_contents
                    except ValueError:  # Not filled yet.
                        continue
                    if id(cell) not in self._seen:
                        self._seen[id(cell)] = cell
                        self._cells.append((cell, content, path))
                        self._visit(content, path)
                self._visit(function.__defaults__, path)
                self._visit(function.__kwdefaults__, path)
                # torch's own code reads the attributes and modes that are watched anyway. To follow it would find much of
                # torch.
                if function.__code__ in done or _is_others(function.__module__, function.__code__.co_filename):
                    continue
                done.add(function.__code__)
                names = _names_of(function.__code__)
                self._code |= names | _text_constants(function.__code__)  # getattr() takes a text.
                for name in names:
                    try:
                        self._read_global(function, name, names)
                    except NoFacts:
                        if not self._alone:
                            raise
            # A name may be that of a class attribute or method of any object that was found. What is found here is new code,
            # with new names: therefore the loop.
            for kind, path in list(self._classes.items()):
                if _is_others(kind.__module__):
                    continue
                for name in self._code & set(vars(kind)):
                    if (kind, name) not in known:
                        known.add((kind, name))
                        self._watch_name(vars(kind), path, name)
            if not self._functions:
                return

    def _read_global(self, function: types.FunctionType, name: str, names: set[str]) -> None:
        place = function.__globals__
        if name not in place:
            if name in _EFFECTS and hasattr(builtins, name):
                raise NoFacts(f"its code calls {name}() in {function.__qualname__}")
            return
        value = place[name]
        if isinstance(value, types.ModuleType):
            self._read_module(value, function, names, set())
        self._watch_name(place, function.__module__ or "a function", name)

    def _read_module(self, module: types.ModuleType, function: types.FunctionType, names: set[str], done: set[str]) -> None:
        """The code may read ``module.name``, also of modules in it, as ``package.options.name``."""
        home = module.__name__
        done.add(home)
        is_random = home == "numpy.random" or (home == "numpy" and "random" in names)
        _check_seen("random" if is_random else home, function.__qualname__)
        if _is_others(home):
            return
        for inner in names & set(vars(module)):
            value = vars(module)[inner]
            if isinstance(value, types.ModuleType) and value.__name__ not in done:
                self._read_module(value, function, names, done)
            self._watch_name(vars(module), home, inner)


class Surroundings:
    """Facts of the modules around static ones, each alone: by them, their code uses a tensor once, or more often.

    What forwards themselves change, such as a count of calls, does not count: it is another one each time.
    """

    def __init__(self) -> None:
        self._of: dict[nn.Module, list[Facts]] = {}
        self._now: dict[nn.Module, int] = {}
        self._changing: set[tuple[int, Any]] = set()

    def __bool__(self) -> bool:
        return bool(self._of)

    def look_at(self, modules: Sequence[nn.Module]) -> None:
        """Take ``modules`` as the modules around static ones. Their hooks may have changed, which is no other state."""
        before, self._of = self._of, {}
        for module in modules:
            states = self._of[module] = before.get(module, [])
            number = self._now[module] = min(self._now.get(module, 0), len(states))
            # In place of the state that holds now, so that later forwards of this state count as the same program.
            states[number : number + 1] = [self._facts(module)]

    def number(self) -> int:
        """A number for what holds now; 0: each module is as it was at first."""
        other = []
        for module, states in self._of.items():
            number = self._now[module]
            if number >= len(states) or not states[number].hold():
                number = next((n for n, state in enumerate(states) if state.hold()), len(states))
                if number == len(states) < _STATES:
                    states.append(self._facts(module))
                self._now[module] = number
            if number:
                other.append((id(module), number))
        return hash(tuple(other)) if other else 0

    def settle(self) -> None:
        """A forward has ended: what has changed since it began is not compared again."""
        for module, states in self._of.items():
            number = self._now[module]
            if number < len(states) and not states[number].hold():
                changed = states[number].differing()
                # For good, and in all states: a counter is another one in each forward, and would make each forward a program
                # of its own.
                self._changing |= changed
                for state in states:
                    state.drop(changed)

    def _facts(self, module: nn.Module) -> Facts:
        # A tensor of a forward is another one in the next. Kept here, it would keep its graph.
        attributes = vars(module)
        # By the id of the dict: it lives as long as its module, which the facts keep.
        self._changing.update((id(attributes), name) for name, value in attributes.items() if _has_graph(value))
        facts = Facts(module, alone=True)
        facts.drop(self._changing)
        return facts


_FIXED = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.Size, torch.layout, torch.memory_format, range)


def _check_seen(module: Optional[str], path: str) -> None:
    if module is not None and module.lstrip("_") in _UNSEEN:
        raise NoFacts(f"{path} reads {module}, which no guard sees")


def _is_constant(value: Any) -> bool:
    """Whether an object that is not Python's has no state that its code may read."""
    # A placement, a mesh or a compiled pattern does not change. A bytearray does.
    home = type(value).__module__.split(".")[0]
    return home in _CONSTANT_TYPES and not isinstance(value, (bytearray, memoryview))


_values_of = methodcaller("values")
_changes_in_place = attrgetter("requires_grad", "dtype", "shape")


def _getter(names: Sequence[Any]) -> Callable[[Any], tuple[Any, ...]]:
    return itemgetter(*names) if len(names) > 1 else functools.partial(_one, names[0])


def _one(name: Any, place: Any) -> tuple[Any, ...]:
    return (place[name],)


def _codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """``code``, and that of inner functions, comprehensions and lambdas."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes_in(constant)


def _names_of(code: types.CodeType) -> set[str]:
    return {name for each in _codes_in(code) for name in each.co_names}


def _text_constants(code: types.CodeType) -> set[str]:
    return {text for each in _codes_in(code) for text in each.co_consts if isinstance(text, str)}


@functools.cache
def _is_others(module: Optional[str], file: str = "") -> bool:
    """Whether code is that of torch, of this package or of Python: it reads the attributes that are watched, and modes."""
    if module is not None and module.split(".")[0] in ("torch", "torch_ragged", "builtins"):
        return True
    # Code without a file, as of dataclasses and named tuples, is made by Python. Packages lie in folders of the standard
    # library: their code is a user's.
    return bool(file) and (file.startswith("<") or (file.startswith(_OF_OTHERS) and not file.startswith(_SITE)))


def _same(now: Any, values: list[Any], index: int) -> bool:
    """Whether a value is as good as the one that was there: then it takes its place."""
    before = values[index]
    if now is before:
        return True
    if type(now) is not type(before):
        return False
    if isinstance(now, torch.Tensor):
        same = _tensor_facts(now) == _tensor_facts(before)
    else:
        same = isinstance(now, _FIXED) and now == before
    if same:
        # So that the next comparison is one by identity again, and the old object can go.
        values[index] = now
    return same


def _tensor_facts(tensor: torch.Tensor) -> Any:
    # Not the values: code that reads one is refused on trial.
    placements = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad, placements


def _other_key(place: dict[Any, Any], keys: list[Any]) -> Any:
    return next((key for key in place if key not in keys), None) or next(key for key in keys if key not in place)
