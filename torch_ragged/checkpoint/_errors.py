"""CheckpointError, and helpers with which all ranks raise it if one rank fails.

These helpers never swallow an error: each error of each rank is in the text that all ranks raise.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from torch_ragged._ranks.peers import Peers, is_of_backend
from torch_ragged._ranks.standstill import announce

__all__ = ["CheckpointError", "on_all", "from_ranks", "gather", "listed", "raise_on_all", "without_warning"]

T = TypeVar("T")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read. The text names the file or the parameter. Every rank raises it.

    Attributes:
        group_is_broken: a rank died, or did not answer within the timeout of the process group. The group cannot be used again:
            issue no further collective on it.
    """

    group_is_broken = False


def listed(items: list[str], room: int = 5) -> str:
    """The first ``room`` items, one per line, and a last line that counts the rest."""
    lines = items[:room] + ([f"... and {len(items) - room} more"] if len(items) > room else [])
    return "\n  ".join(["", *lines])


def gather(
    check: Callable[[], T], what: str, group: dist.ProcessGroup | None, own: tuple[type[Exception], ...] = ()
) -> list[T]:
    """Call ``check`` on every rank and return all results, in rank order. If one rank fails, all ranks raise.

    Issues one all-gather of objects; without an initialized process group, no collective.

    Args:
        check: a function without arguments. Its result must be picklable.
        what: the action that fails if ``check`` raises, for the text of the error.
        group: the ranks that call; None is the default group.
        own: error types that the failing rank raises unchanged. The other ranks raise a CheckpointError.

    Raises:
        CheckpointError: ``check`` raised on at least one rank. The text holds the errors of all ranks.
    """
    answer: tuple[Any, str] = (None, "")
    mine: Exception | None = None
    try:
        answer = check(), ""
    except Exception as error:  # Any type: without this rank's answer, the other ranks would hang in the all-gather.
        mine, answer = error, (None, _error_text(error))
    answers = [answer]
    if dist.is_initialized():
        every: list[Any] = [None] * dist.get_world_size(group)
        with _peers_named(what, group, lambda: "comparing values or reading files"):
            announce()
            dist.all_gather_object(every, answer, group=group)
        answers = every
    failures = {rank: text for rank, (_, text) in enumerate(answers) if text}
    if isinstance(mine, own):
        raise mine
    if failures:
        text = from_ranks(what, failures)
        if min(failures) != (dist.get_rank(group) if dist.is_initialized() else 0):
            text = _in_one_line(text, min(failures))
        # The traceback of a CheckpointError would print the same lines once more.
        raise CheckpointError(text) from (None if isinstance(mine, CheckpointError) else mine)
    return [value for value, _ in answers]


def on_all(check: Callable[[], T], what: str, group: dist.ProcessGroup | None, own: tuple[type[Exception], ...] = ()) -> T:
    """Call ``check`` on every rank and return this rank's result. If one rank fails, all ranks raise.

    As :func:`gather`, with one all-gather of objects, but only errors are sent: the result need not be picklable.

    Raises:
        CheckpointError: ``check`` raised on at least one rank. The text holds the errors of all ranks.
    """
    results: list[T] = []
    gather(lambda: results.append(check()), what, group, own)
    return results[0]


@contextmanager
def _peers_named(what: str, group: dist.ProcessGroup | None, doing: Callable[[], str]) -> Iterator[None]:
    """Turn the error of a failed collective into a CheckpointError that names the ranks that died."""
    try:
        yield
    except RuntimeError as error:
        if not dist.is_initialized() or not is_of_backend(error):
            raise
        step = doing()
        failed = f"a collective{f', while ranks were {step},' if step else ''}"
        peers = Peers.of(dist.get_process_group_ranks(group or dist.group.WORLD))
        failure = CheckpointError(f"{what}: {peers.error(failed, error)}")
        failure.group_is_broken = True
        raise failure from error


@contextmanager
def raise_on_all(what: str, group: dist.ProcessGroup | None = None, doing: Callable[[], str] = lambda: "") -> Iterator[None]:
    """Turn DCP's CheckpointException into a CheckpointError. DCP raises its error on every rank, so every rank raises here.

    Args:
        what: the action that fails, for the text of the error.
        group: the ranks of the action; None is the default group.
        doing: returns the step of the action, for the text of an error of a collective.

    Raises:
        CheckpointError: DCP raised; or a collective failed, because a rank died or did not answer.
    """
    try:
        with _peers_named(what, group, doing):
            yield
    except CheckpointException as error:
        failures = {rank: _error_text(failure) for rank, (failure, _) in error.failures.items()}
        is_told = all(isinstance(failure, (CheckpointError, OSError)) for failure, _ in error.failures.values())
        raise CheckpointError(from_ranks(what, failures)) from (None if is_told else error)


@contextmanager
def without_warning() -> Iterator[None]:
    """Silence DCP's warning that torch.distributed is disabled: one process is intended here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def from_ranks(what: str, failures: dict[int, str]) -> str:
    """One text for the errors of several ranks. If ranks have the same error, the text names it once, with all these ranks."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in sorted(failures.items()):
        ranks_of.setdefault(text, []).append(rank)
    return "; ".join(f"{what}: {text} (rank {', '.join(map(str, ranks))})" for text, ranks in ranks_of.items())


def _in_one_line(text: str, rank: int) -> str:
    """The first item of a list of problems. Each rank has the same list, and the error of ``rank`` shows it."""
    first, *items = text.split("\n")
    if len(items) < 2:
        return text
    return f"{first} {items[0].strip()}, and more: the error of rank {rank} lists them"


def _error_text(error: BaseException) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}"
