"""The only door into torch: everything that importing this package changes there is a hook, and stands in the report.

The hooks have DTensor ask placements for the rules that they bring. They add the protocol of
``torch_ragged._placement_extension`` to a stock torch. Each is one small function, under the name of the torch function that
it extends, why, and the patch of ``upstream/`` that makes it unnecessary. A hook acts only where a placement brings its own
rules; everything else goes to torch's own code as before. On import each hook's target is checked, so that an unknown layout
of torch's internals is an ImportError and never a wrong answer later.

A torch that has the patches has the placements too: there nothing is installed, and this package's modules are torch's.
"""

from __future__ import annotations

import warnings

import torch

from torch_ragged._register._upstream import adopt, is_upstream

adopt()  # First of all: whoever imports a module of this package shall get torch's, where torch has it.

from torch_ragged._register._hook import Hook, hooks  # noqa: E402

__all__ = ["Hook", "hooks", "register", "registration_report"]

_OLDEST, _NEWEST = (2, 11), (2, 15)
_installed: list[Hook] = []


def register() -> None:
    """Install every hook, or none; none where torch has the placements itself.

    Raises:
        ImportError: torch is older than 2.11, or a hook's target has not the layout that this package knows.

    Warns:
        UserWarning: torch is newer than 2.15, but all targets have the layout that this package knows.
    """
    if _installed or is_upstream():
        return
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < _OLDEST:
        raise ImportError(f"torch_ragged needs torch >= 2.11, found {torch.__version__}: install a newer torch")
    try:
        from torch_ragged._register import _checkpoint, _distributed, _tensor  # noqa: F401  (they add their hooks)

        unknown = [hook.target for hook in hooks if not hook.is_known()]
        if not unknown:
            _import_extensions()
    except (ImportError, AttributeError) as error:  # What they import has gone.
        raise ImportError(_unknown(str(error))) from error
    if unknown:
        raise ImportError(_unknown(f"{unknown[0]} has another layout"))
    if version > _NEWEST:
        warnings.warn(
            f"torch_ragged was checked on torch 2.11 to 2.15, not on {torch.__version__}; all that it extends has the layout "
            "that it knows. Run its tests before you rely on it",
            stacklevel=2,
        )
    for hook in hooks:
        hook.install()
        _installed.append(hook)


def _import_extensions() -> None:
    """Have the modules imported that say what the placements bring."""
    from torch_ragged import _api, _checkpoint, _dispatch, _random  # noqa: F401


def _unknown(what: str) -> str:
    return (
        f"torch_ragged cannot extend torch {torch.__version__}: {what}, which is unknown (checked on 2.11 to 2.15). Install a "
        "torch of these versions, or a newer torch_ragged"
    )


def registration_report() -> str:
    """All that this package changes in torch, one hook per line: what of torch, why, the patch that makes it unnecessary."""
    if is_upstream():
        return (
            f"torch {torch.__version__} has the placements itself; no hooks; torch.load takes their names in torch_ragged too"
        )
    lines = [f"torch {torch.__version__} (checked: 2.11, 2.13, 2.15); {len(_installed)} hooks"]
    lines += [f"  {hook.target}: {hook.why} [{hook.patch}]" for hook in _installed]
    return "\n".join(lines)
