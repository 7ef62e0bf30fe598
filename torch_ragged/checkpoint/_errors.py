"""The error of this package, and how all ranks come to raise it when one does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

__all__ = ["CheckpointError", "agree", "from_ranks", "gather", "listed", "raise_on_all"]

T = TypeVar("T")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the text names the file or the parameter. Raised on every rank."""


def listed(items: list[str], room: int = 5) -> str:
    """The first ``room`` items, and how many more there are; one per line."""
    lines = items[:room] + ([f"... and {len(items) - room} more"] if len(items) > room else [])
    return "\n  ".join(["", *lines])


def gather(
    check: Callable[[], T], what: str, group: dist.ProcessGroup | None, own: tuple[type[Exception], ...] = ()
) -> list[T]:
    """What ``check`` returns on each rank, or on every rank the errors of all. One object all-gather; none without a group.

    Args:
        check: what it returns must pickle.
        what: what failed, for the text of the error.
        group: the ranks.
        own: a rank whose own error is of one of these types raises that error itself.

    Raises:
        CheckpointError: ``check`` raised on a rank.
    """
    answer: tuple[Any, str] = (None, "")
    mine: Exception | None = None
    try:
        answer = check(), ""
    except Exception as error:  # Whatever it is, the other ranks must hear of it.
        mine, answer = error, (None, _text(error))
    answers = [answer]
    if dist.is_initialized():
        answers = [answer] * dist.get_world_size(group)
        dist.all_gather_object(answers, answer, group=group)
    failures = {rank: text for rank, (_, text) in enumerate(answers) if text}
    if isinstance(mine, own):
        raise mine
    if failures:
        raise CheckpointError(from_ranks(what, failures)) from mine
    return [value for value, _ in answers]


def agree(check: Callable[[], T], what: str, group: dist.ProcessGroup | None, own: tuple[type[Exception], ...] = ()) -> T:
    """What ``check`` returns here, or on every rank the errors of all, as :func:`gather` does. Results are not sent.

    Raises:
        CheckpointError: ``check`` raised on a rank.
    """
    results: list[T] = []
    gather(lambda: results.append(check()), what, group, own)
    return results[0]


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
