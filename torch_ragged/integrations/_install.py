"""``install`` and ``installed``: programs that call torch's ``fully_shard`` call ours, until that is undone.

Only names are replaced, in modules that are loaded: no file, and nothing inside torch's ``fully_shard``.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed.fsdp as torch_fsdp

from torch_ragged.fsdp import fully_shard

__all__ = ["Installation", "install", "installed"]

_torch_fully_shard = torch_fsdp.fully_shard
_OPTIONS = tuple(name for name in inspect.signature(fully_shard).parameters if name not in ("module", "mesh"))


class Installation:
    """What :func:`install` has replaced; ``str()`` of it is a list.

    Attributes:
        options: passed to each call of ``fully_shard``, in place of the program's own.
        names: the replaced names, such as ``torch.distributed.fsdp.fully_shard``, in the order of loading.
        calls: how many modules were sharded by it so far.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.calls = 0
        self._replaced: list[tuple[Any, str, Any]] = []
        self._function = self._make()

    @property
    def names(self) -> list[str]:
        return [f"{module.__name__}.{name}" for module, name, _ in self._replaced]

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items()) or "no options"
        lines = [f"torch_ragged.fsdp.fully_shard with {options} in place of torch's, called {self.calls} times, as:"]
        return "\n    ".join(lines + (self.names or ["nothing: it was uninstalled"]))

    def _make(self) -> Callable[..., Any]:
        """What stands in for torch's function: ours, with the options."""

        @functools.wraps(_torch_fully_shard)
        def stand_in(module: Any, **arguments: Any) -> Any:
            self.calls += 1
            return fully_shard(module, **{**arguments, **self.options})

        def state(module: Any) -> Any:
            return fully_shard.state(module) or _torch_fully_shard.state(module)  # type: ignore[attr-defined]

        stand_in.state = state  # type: ignore[attr-defined]
        stand_in.torch_ragged_installation = self  # type: ignore[attr-defined]
        return stand_in

    def _replace(self) -> None:
        """Replace torch's function, or another installation's stand-in, wherever a loaded module has it under a name."""
        for module in list(sys.modules.values()):
            if getattr(module, "__name__", "").startswith("torch.distributed.fsdp._"):  # Where it is defined.
                continue
            for name, value in list(getattr(module, "__dict__", {}).items()):
                is_stand_in = callable(value) and isinstance(_installation_of(value), Installation)
                if (value is _torch_fully_shard or is_stand_in) and module is not sys.modules[__name__]:
                    setattr(module, name, self._function)
                    self._replaced.append((module, name, value))

    def uninstall(self) -> None:
        """Give back the names that are still this installation's. Modules that were sharded stay sharded."""
        for module, name, before in reversed(self._replaced):
            if getattr(module, name, None) is self._function:
                setattr(module, name, before)
        self._replaced.clear()


def _installation_of(value: Any) -> Any:
    try:
        return vars(value).get("torch_ragged_installation")
    except TypeError:  # It has no attributes.
        return None


def install(**options: Any) -> Installation:
    """Have programs that call ``torch.distributed.fsdp.fully_shard`` call ``torch_ragged.fsdp.fully_shard`` from now on.

    Replaced are the names of torch's function in all modules that are loaded, ``torch.distributed.fsdp`` first. A module that
    is loaded later imports ours from there. So install after importing the program, or before: both work. A name that holds
    the function in an object, such as ``functools.partial(fully_shard)``, is not found.

    Args:
        options: of :func:`torch_ragged.fsdp.fully_shard`, but for ``module`` and ``mesh``. Each replaces what the program
            passes under this name. torch's function does not have ``orig_param_policy`` and ``placements``. If the program
            passes a ``shard_placement_fn`` that contradicts your ``orig_param_policy``, pass ``shard_placement_fn=None``.

    Returns:
        what was replaced; its ``uninstall()`` undoes it.

    Raises:
        TypeError: there is no such option.

    No communication.
    """
    unknown = [name for name in options if name not in _OPTIONS]
    if unknown:
        raise TypeError(f"install() got {', '.join(unknown)}: expected options of fully_shard, of {', '.join(_OPTIONS)}")
    installation = Installation(options)
    installation._replace()
    return installation


@contextlib.contextmanager
def installed(**options: Any) -> Iterator[Installation]:
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
