"""The only door into torch's internals: makes the placements first class in DTensor.

Each hook is one small function, under the name of the torch function that it extends, why, and the patch of ``upstream/`` that
makes it unnecessary. A hook acts only where a ragged placement is involved; everything else goes to torch's own code as
before. On import each hook's target is checked, so that an unknown layout of torch's internals is an ImportError and never
a wrong answer later. The files have the names of the torch files that they extend.
"""

from __future__ import annotations

import torch

from torch_ragged._register import (  # noqa: F401  (they add their hooks)
    _api,
    _dispatch,
    _distributed_c10d,
    _hf_storage,
    _random,
    _redistribute,
    _state_dict_utils,
)
from torch_ragged._register._hook import Hook, hooks

__all__ = ["Hook", "hooks", "register", "registration_report"]

_OLDEST = (2, 11)
_installed: list[Hook] = []


def register() -> None:
    """Install every hook, or none.

    Raises:
        ImportError: torch is older than 2.11, or a hook's target has not the layout that this package knows.
    """
    if _installed:
        return
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < _OLDEST:
        raise ImportError(f"torch_ragged needs torch >= 2.11, found {torch.__version__}: install a newer torch")
    for hook in hooks:
        if not hook.is_known():
            raise ImportError(
                f"torch_ragged cannot extend {hook.target} of torch {torch.__version__}: its layout is unknown (checked on "
                "2.11 to 2.15). Install a torch of these versions, or a newer torch_ragged"
            )
    for hook in hooks:
        hook.install()
        _installed.append(hook)


def registration_report() -> str:
    """The installed hooks, one per line: torch's function, why it is extended, the patch that makes it unnecessary."""
    lines = [f"torch {torch.__version__} (checked: 2.11, 2.13, 2.15); {len(_installed)} hooks"]
    lines += [f"  {hook.target}: {hook.why} [{hook.patch}]" for hook in _installed]
    return "\n".join(lines)
