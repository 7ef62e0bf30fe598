"""Agreement of ranks before anything is changed: misuse on one is an error on all."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

__all__ = ["agree", "agreement", "problems_of_ranks"]


@contextlib.contextmanager
def agreement(groups: Sequence[dist.ProcessGroup], device: torch.device, call: str) -> Iterator[list[str]]:
    """What raises inside is an error on every rank of ``groups``, as are unlike lines added to the list it yields.

    One :func:`agree`, which see; none where nothing raised and no line was added. Ranks that skip one meet those with an error
    in their next, so that which of several raised need not be the same. ``call`` is the name of what ranks do, for errors.
    """
    claim: list[str] = []
    try:
        yield claim
    except Exception as error:
        agree(groups, device, call, "", error)
        raise
    if claim:
        agree(groups, device, call, "\n".join(claim), None)


def agree(groups: Sequence[dist.ProcessGroup], device: torch.device, call: str, claim: str, problem: Exception | None) -> None:
    """Return if every rank of ``groups`` has no ``problem`` and makes the same ``claim``; else raise on every rank.

    One all-reduce of 24 bytes per group; if they disagree, one all-gather of texts per group.

    Args:
        groups: of the dimensions of a mesh, so that what one rank knows reaches all through them.
        call: the name of what ranks do, for errors.
        claim: what must be equal on all ranks, line by line.

    Raises:
        Exception: ``problem``, on the rank that has it.
        RuntimeError: another rank has a problem.
        ValueError: ranks claim different things; it shows the first line that differs.
    """
    digest = int.from_bytes(hashlib.sha256(claim.encode()).digest()[:7], "big")
    state = torch.tensor([0 if problem else 1, digest, -digest], dtype=torch.int64, device=device)
    for group in groups:
        dist.all_reduce(state, op=dist.ReduceOp.MIN, group=group)
    fine, lowest, negative = state.tolist()
    if fine and lowest == -negative:
        return
    told = {dist.get_rank(): (f"{type(problem).__name__}: {problem}" if problem else "", claim)}
    for group in groups:
        heard: list[dict[int, tuple[str, str]]] = [{}] * group.size()
        dist.all_gather_object(heard, told, group=group)
        told = {rank: text for part in heard for rank, text in part.items()}
    if problem is not None:
        raise problem
    failed = {rank: text for rank, (text, _) in told.items() if text}
    if failed:
        raise RuntimeError(f"{call} failed on " + "; ".join(f"rank {rank}: {text}" for rank, text in failed.items()))
    raise ValueError(f"{call} was called differently on different ranks: " + _difference(told, claim))


def _difference(told: dict[int, tuple[str, str]], claim: str) -> str:
    """The first line in which another rank's claim is not like this one's, or those of two others."""
    claims = {rank: text.splitlines() for rank, (_, text) in told.items()}
    first = min(claims)
    for rank in sorted(claims):
        if claims[rank] != claims[first]:
            pairs = zip(claims[first] + ["nothing more"], claims[rank] + ["nothing more"])
            ours, theirs = next((pair for pair in pairs if pair[0] != pair[1]), ("", ""))
            return f"rank {first} has {ours}, rank {rank} has {theirs}"
    raise AssertionError(f"ranks agree on {claim}")


def problems_of_ranks(problem: str, group: dist.ProcessGroup) -> str:
    """What hinders ranks of ``group``, each with its rank, in a line that is the same on all; empty if nothing does.

    One all-gather of objects. What all ranks say is said once.
    """
    heard = [""] * group.size()
    dist.all_gather_object(heard, problem, group=group)
    if all(text == problem for text in heard):
        return problem
    return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(heard) if text)
