"""The hooks that importing this package installs in torch. Every change of torch is a hook and is listed in the report.

No other module may change torch. The hooks add the protocol of ``torch_ragged.tensor._placement_extension`` to a stock torch,
so that DTensor asks placements for their rules. Each hook is one small function. Its entry names the function that it extends,
the reason, and the patch of ``upstream/`` that makes it unnecessary. A hook acts only if a placement brings its own
rules. All other calls go to torch's own code as before. On import each hook's target is checked: if a version of torch has
unknown internals, the import fails with an ImportError and gives no wrong results later.

A torch with the patches has the placements. There no hook is installed, and this package's modules are torch's.
"""

from __future__ import annotations

import re
import warnings

# This package needs no NumPy: without it, a command's output would begin with a warning of torch's import.
warnings.filterwarnings("ignore", "Failed to initialize NumPy: No module named 'numpy'", UserWarning)

import torch  # noqa: E402

from torch_ragged._register._upstream import is_upstream, know_old_names, use_modules_of_torch  # noqa: E402

use_modules_of_torch()  # It runs first, so that later imports of this package's modules get torch's, if torch has them.

from torch_ragged._register._hook import Hook, hooks  # noqa: E402

__all__ = ["Hook", "hooks", "register_hooks", "registration_report"]

_OLDEST, _NEWEST = (2, 11), (2, 15)
_installed: list[Hook] = []


def register_hooks() -> None:
    """Install all hooks. If torch has the placements itself, or a check fails, install none.

    Raises:
        ImportError: torch is older than 2.11, or this package does not know the layout of a hook's target.

    Warns:
        UserWarning: torch is newer than 2.15, and this package knows the layout of all targets.
    """
    if _installed:
        return
    if is_upstream():
        know_old_names()
        return
    version = tuple(int(number) for number in re.findall(r"\d+", torch.__version__)[:2])  # Also of 2.15.0a0, 2.16.dev1.
    if version < _OLDEST:
        raise ImportError(f"torch_ragged needs torch >= 2.11, found {torch.__version__}: install a newer torch")
    try:
        from torch_ragged._register import _autograd, _checkpoint, _distributed, _random, _spmd, _tensor  # noqa: F401  (they add their hooks)

        unknown = [hook.target for hook in hooks if not hook.is_known()]
        if not unknown:
            _import_extensions()
    except (ImportError, AttributeError) as error:  # This torch lacks a name that the modules import.
        raise ImportError(_unknown(str(error))) from error
    if unknown:
        raise ImportError(_unknown(f"{unknown[0]} has an unknown layout"))
    if version > _NEWEST:
        warnings.warn(
            f"torch_ragged was checked on torch 2.11 to 2.15, not on {torch.__version__}. All that it extends has the "
            "expected layout. Run its tests before you rely on it",
            stacklevel=2,
        )
    for hook in hooks:
        if hook.install is not None:
            hook.install()
        _installed.append(hook)
    know_old_names()


def _import_extensions() -> None:
    """Import the modules in which the placements register their extension."""
    from torch_ragged.tensor import _api, _checkpoint, _dispatch, _random  # noqa: F401


def _unknown(problem: str) -> str:
    return (
        f"torch_ragged cannot extend torch {torch.__version__}: {problem} (checked on 2.11 to 2.15). Install one of these "
        "versions of torch, or a newer torch_ragged"
    )


def registration_report() -> str:
    """A text with all changes of torch, one hook per line: its target, the reason, the patch that makes it unnecessary."""
    if is_upstream():
        return (
            f"torch {torch.__version__} has the placements itself; no hooks; torch.load also accepts their torch_ragged names"
        )
    lines = [f"torch {torch.__version__} (checked: 2.11, 2.13, 2.15); {len(_installed)} hooks"]
    lines += [f"  {hook.target}: {hook.why} [{hook.patch}]" for hook in _installed]
    return "\n".join(lines)
