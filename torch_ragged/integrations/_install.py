"""``install`` and ``installed``: programs that call torch's ``fully_shard`` call ours, until that is undone.

``_substitutes`` has what is replaced beside it. Only names are replaced, in modules that are loaded: no file, and nothing
inside torch's ``fully_shard``.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed.fsdp as torch_fsdp
from typing_extensions import Unpack  # Of torch.

from torch_ragged.fsdp import fully_shard
from torch_ragged.fsdp._options import InstallOptions
from torch_ragged.integrations._substitutes import SUBSTITUTES

__all__ = ["Installation", "install", "installed"]

_torch_fully_shard = torch_fsdp.fully_shard
_KEYWORDS = tuple(name for name in inspect.signature(fully_shard).parameters if name not in ("module", "mesh"))
_active: list[Installation] = []
"""The installations in force; the last one holds."""
_substituted: dict[tuple[str, str], tuple[Any, Any]] = {}
"""The originals and the substitutes of names that programs have beside ``fully_shard``, while any installation is in force."""


class Installation:
    """The names that :func:`install` has replaced; ``str()`` of it is a list.

    Attributes:
        options: passed to each call of ``fully_shard``, in place of the program's own.
        names: the names that were replaced, such as ``torch.distributed.fsdp.fully_shard``; after :meth:`uninstall` too.
        calls: how often the program has called ``fully_shard`` since.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.calls = 0
        self.function = self._make()
        self.names = _replace_functions([_torch_fully_shard, *(each.function for each in _active)], self.function)
        _active.append(self)
        self.names += _substitute()

    def __str__(self) -> str:
        options = ", ".join(self.options)
        text = f"torch_ragged.fsdp.fully_shard{f' with {options}' if options else ''} in place of torch's"
        state = "" if self in _active else ", uninstalled"
        return "\n    ".join([f"{text}, called {self.calls} times{state}. Names replaced:", *self.names])

    def _make(self) -> Callable[..., Any]:
        """The function that the program calls: ours, with the options."""

        @functools.wraps(_torch_fully_shard)
        def stand_in(module: Any, **arguments: Any) -> Any:
            self.calls += 1
            if self in _active:
                self.names += _substitute()  # The program may have loaded more modules meanwhile.
            placement_fn, policy = arguments.get("shard_placement_fn"), self.options.get("orig_param_policy")
            if placement_fn is not None and policy is not None:
                merged = _MergedPlacements(placement_fn, policy)
                arguments |= {"shard_placement_fn": merged.placement}
                return fully_shard(module, **{**arguments, **self.options, "orig_param_policy": merged.granularity})
            return fully_shard(module, **{**arguments, **self.options})

        def state(module: Any) -> Any:
            return fully_shard.state(module) or _torch_fully_shard.state(module)  # type: ignore[attr-defined]

        stand_in.state = state  # type: ignore[attr-defined]
        return stand_in

    def uninstall(self) -> None:
        """Restore each name that still has this installation's function, in modules loaded since too.

        If another installation is in force, its function takes the name, otherwise torch's. Modules that were sharded stay
        sharded. A second call does nothing.
        """
        if self in _active:
            _active.remove(self)
            _replace_functions([self.function], _active[-1].function if _active else _torch_fully_shard)
        if not _active:
            for original, substitute in _substituted.values():
                _replace_functions([substitute], original)
            _substituted.clear()


class _MergedPlacements:
    """A program's ``shard_placement_fn`` and the user's ``orig_param_policy``. ``fully_shard`` asks for the granularity first.

    The user's granularity replaces the program's ``Shard``. The mesh that the program names for a parameter stays.
    """

    def __init__(self, placement_fn: Callable[[Any], Any], policy: Callable[[str, Any], Any]) -> None:
        self._placement_fn, self._policy = placement_fn, policy
        self._granularity: Any = None

    def granularity(self, fqn: str, param: Any) -> Any:
        self._granularity = self._policy(fqn, param)
        return self._granularity

    def placement(self, param: Any) -> Any:
        placement = self._placement_fn(param)
        if self._granularity is None:
            return placement
        mesh_info = getattr(placement, "mesh_info", None)
        return None if mesh_info is None else types.SimpleNamespace(placement=None, mesh_info=mesh_info)


def _replace_functions(functions: list[Any], function: Any) -> list[str]:
    """Give every name of one of ``functions`` in a loaded module to ``function``; returns these names."""
    names = []
    for module_name, module in list(sys.modules.items()):
        # torch defines its function in a private module. This package registers its states under torch's function.
        if module_name.startswith("torch.distributed.fsdp._") or module_name.partition(".")[0] == "torch_ragged":
            continue
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if any(value is each for each in functions):
                setattr(module, name, function)
                names.append(f"{module_name}.{name}")
    return names


def _substitute() -> list[str]:
    """Replace the names of ``SUBSTITUTES`` in modules that are loaded and were not when this was called last; returns them."""
    names = []
    for key, make in SUBSTITUTES.items():
        module, name = key
        if key not in _substituted and hasattr(sys.modules.get(module), name):
            original = getattr(sys.modules[module], name)
            _substituted[key] = original, make(original)
            names += _replace_functions([original], _substituted[key][1])
    return names


def install(**options: Unpack[InstallOptions]) -> Installation:
    """Have programs that call ``torch.distributed.fsdp.fully_shard`` call ``torch_ragged.fsdp.fully_shard`` from now on.

    All loaded modules are searched for names of torch's function, and these names are replaced. A module that is loaded later
    imports ours from ``torch.distributed.fsdp``. So you may install before or after the program is imported. If an object holds
    the function, such as ``functools.partial(fully_shard)``, it is not found.

    A few names that know FSDP2's shards only are replaced too, now and when the program calls ``fully_shard``: the operation by
    which transformers and PEFT cut a tensor to a shard, and NeMo AutoModel's writer of safetensors files. ``str()`` of the
    installation lists them.

    Args:
        options: of :func:`torch_ragged.fsdp.fully_shard`, but for ``module`` and ``mesh``. Each replaces what the program
            passes under this name. torch's function does not have ``orig_param_policy`` and ``placements``. If the program
            passes a ``shard_placement_fn``, the granularities of your ``orig_param_policy`` replace its placements, and the
            meshes that it names for parameters stay.

    Returns:
        the installation; its ``uninstall()`` undoes it.

    Raises:
        TypeError: there is no such option.

    No communication.
    """
    unknown = [name for name in options if name not in _KEYWORDS]
    if unknown:
        raise TypeError(f"install() got {', '.join(unknown)}: expected options of fully_shard, of {', '.join(_KEYWORDS)}")
    return Installation(dict(options))


@contextlib.contextmanager
def installed(**options: Unpack[InstallOptions]) -> Iterator[Installation]:
    """:func:`install` for the ``with`` block.

    ::

        with installed(orig_param_policy=rows(32)) as installation:
            model = accelerator.prepare(model)
        print(installation)
    """
    installation = install(**options)
    try:
        yield installation
    finally:
        installation.uninstall()
