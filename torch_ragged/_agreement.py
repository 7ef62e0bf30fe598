"""Agreement of ranks before anything changes: a wrong call on one rank is an error on all ranks.

Nothing here changes a module, a parameter or a buffer.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

__all__ = ["agree", "agreement", "problems_of_ranks"]


@contextlib.contextmanager
def agreement(groups: Sequence[dist.ProcessGroup], device: torch.device, call: str) -> Iterator[list[str]]:
    """If the ``with`` block raises on one rank, every rank of ``groups`` raises.

    The block gets a list. Ranks also compare the lines that they add to this list: if the lines differ, every rank raises.
    This costs one :func:`agree`. A rank whose block raises nothing and adds no line calls no ``agree``.

    Args:
        groups: see :func:`agree`.
        device: see :func:`agree`.
        call: the name of the call that the ranks make, for errors.
    """
    claim: list[str] = []
    try:
        yield claim
    except Exception as error:
        # Ranks without an error and without lines have left this block: this agree() meets the one of their next block. If two
        # ranks raise in different blocks, each raises at the end of its own block.
        agree(groups, device, call, "", error)
        raise
    # A rank without lines skips this. If another rank has lines, it meets this rank's next agree(): the claims differ, and all
    # ranks raise.
    if claim:
        agree(groups, device, call, "\n".join(claim), None)


def agree(groups: Sequence[dist.ProcessGroup], device: torch.device, call: str, claim: str, problem: Exception | None) -> None:
    """Return if no rank of ``groups`` has a ``problem`` and all ranks make the same ``claim``. Otherwise, raise on every rank.

    This costs one all-reduce of 24 bytes per group. If ranks disagree, it also costs one all-gather of texts per group.

    Args:
        groups: the process groups of a mesh's dimensions. One group after the other carries a rank's answer to all ranks.
        device: the device of the all-reduce.
        call: the name of the call that the ranks make, for errors.
        claim: lines of text that must be equal on all ranks.
        problem: the exception that this rank would raise; None if there is none.

    Raises:
        Exception: ``problem``, on the rank that has it.
        RuntimeError: another rank has a problem.
        ValueError: ranks make different claims; the error shows the first line that differs.
    """
    # Seven bytes, so that the digest and its negative fit into int64. The minimum of the negatives gives the largest digest: if
    # it equals the smallest digest, all digests are equal.
    digest = int.from_bytes(hashlib.sha256(claim.encode()).digest()[:7], "big")
    state = torch.tensor([0 if problem else 1, digest, -digest], dtype=torch.int64, device=device)
    # In place: the all-reduce over a mesh dimension starts from the minima over the dimensions before it.
    for group in groups:
        dist.all_reduce(state, op=dist.ReduceOp.MIN, group=group)
    is_fine, lowest, negative = state.tolist()
    # These numbers are equal on all ranks: either all ranks return here, or all take part in the all-gathers below.
    if is_fine and lowest == -negative:
        return
    answers = {dist.get_rank(): (f"{type(problem).__name__}: {problem}" if problem else "", claim)}
    for group in groups:
        received: list[dict[int, tuple[str, str]]] = [{}] * group.size()
        dist.all_gather_object(received, answers, group=group)
        answers = {rank: answer for part in received for rank, answer in part.items()}
    # Raised after the all-gathers, because the other ranks need this rank's part in them.
    if problem is not None:
        raise problem
    failed = {rank: text for rank, (text, _) in answers.items() if text}
    if failed:
        raise RuntimeError(f"{call} failed on " + "; ".join(f"rank {rank}: {text}" for rank, text in failed.items()))
    raise ValueError(
        f"{call} was called differently on different ranks: {_difference(answers, claim)}: "
        "give it equal modules and equal arguments on all ranks"
    )


def _difference(answers: dict[int, tuple[str, str]], claim: str) -> str:
    """The first line that differs between the claims of the lowest rank and of another rank."""
    claims = {rank: text.splitlines() for rank, (_, text) in answers.items()}
    first = min(claims)
    for rank in sorted(claims):
        if claims[rank] != claims[first]:
            pairs = zip(claims[first] + ["nothing more"], claims[rank] + ["nothing more"])
            ours, theirs = next((pair for pair in pairs if pair[0] != pair[1]), ("", ""))
            return f"rank {first} has {ours}, rank {rank} has {theirs}"
    raise AssertionError(f"ranks agree on {claim}")


def problems_of_ranks(problem: str, group: dist.ProcessGroup) -> str:
    """The problems of all ranks of ``group`` in one line, which is the same on all ranks; empty if no rank has a problem.

    This costs one all-gather of objects. If all ranks have the same problem, the line has it once and names no rank.
    """
    received = [""] * group.size()
    dist.all_gather_object(received, problem, group=group)
    if all(text == problem for text in received):
        return problem
    return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(received) if text)
