"""The error of this package, and how all ranks come to raise it when one does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

__all__ = ["CheckpointError", "agree", "from_ranks", "listed", "raise_on_all"]

T = TypeVar("T")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the text names the file or the parameter. Raised on every rank."""


def listed(items: list[str], room: int = 5) -> str:
    """The first ``room`` items, and how many more there are; one per line."""
    lines = items[:room] + ([f"... and {len(items) - room} more"] if len(items) > room else [])
    return "\n  ".join(["", *lines])


def agree(check: Callable[[], T], what: str, group: dist.ProcessGroup | None) -> T:
    """What ``check`` returns, or on every rank the errors of all. One small object all-gather; none without a process group.

    Raises:
        CheckpointError: ``check`` raised on a rank.
    """
    result: Any = None
    problem = ""
    try:
        result = check()
    except Exception as error:  # Whatever it is, the other ranks must hear of it.
        problem = _text(error)
    problems = [problem]
    if dist.is_initialized():
        problems = [""] * dist.get_world_size(group)
        dist.all_gather_object(problems, problem, group=group)
    failures = {rank: text for rank, text in enumerate(problems) if text}
    if failures:
        raise CheckpointError(from_ranks(what, failures))
    return result


@contextmanager
def raise_on_all(what: str) -> Iterator[None]:
    """DCP tells every rank what failed on which: raise it as a CheckpointError.

    Raises:
        CheckpointError: DCP raised.
    """
    try:
        yield
    except CheckpointException as error:
        failures = {rank: _text(failure) for rank, (failure, _) in error.failures.items()}
        raise CheckpointError(from_ranks(what, failures)) from error


def from_ranks(what: str, failures: dict[int, str]) -> str:
    """One text for the errors of several ranks; those that are the same are told once."""
    ranks: dict[str, list[int]] = {}
    for rank, text in sorted(failures.items()):
        ranks.setdefault(text, []).append(rank)
    return "; ".join(f"{what}: {text} (rank {', '.join(map(str, which))})" for text, which in ranks.items())


def _text(error: BaseException) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}"
