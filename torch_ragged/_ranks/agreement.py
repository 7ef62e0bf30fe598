"""Agreement of ranks before anything changes: a wrong call on one rank is an error on all ranks.

Nothing here changes a module, a parameter or a buffer.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from torch_ragged._ranks.groups import end_messages, is_gloo
from torch_ragged._ranks.peers import Peers, issued_on, name_of, peers_named, shown, wait_for
from torch_ragged._ranks.standstill import announce
from torch_ragged._ranks.store import SharedStore
from torch_ragged._register._torch import default_store

# Its older name warns in torch 2.13, and is the only one in 2.11.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

__all__ = ["agree", "agree_on_group", "agreement", "before_groups", "gather_numbers", "problems_of_ranks", "reduce_min"]

_SLICE = 2.0  # Seconds.
"""After so long a wait, a rank looks whether the processes of the other ranks live."""

_numbers: weakref.WeakKeyDictionary[dist.Store, defaultdict[tuple[int, ...], itertools.count[int]]] = (
    weakref.WeakKeyDictionary()
)
"""The number of agreements on the process groups of some ranks, in each store."""

_begun: weakref.WeakKeyDictionary[dist.Store, Counter[str]] = weakref.WeakKeyDictionary()
"""How often this process has been in :func:`before_groups` of each call, in each store."""


@contextlib.contextmanager
def before_groups(call: str) -> Iterator[None]:
    """A block of ``call`` in which a rank may fail before it knows which ranks to tell, as with a wrong model.

    It says so in the store. Ranks that wait for this rank in an agreement of the same ``call`` look there, and raise. The call
    has a number, so that they do not take an error of an earlier one for it. Nothing is written if nothing raises.
    """
    if not dist.is_initialized():
        yield
        return
    begun = _begun.setdefault(default_store(), Counter())
    begun[call] += 1
    try:
        yield
    except Exception as error:
        with contextlib.suppress(RuntimeError, NotImplementedError):  # The store is lost, or one of simulated ranks.
            store = SharedStore(f"refused/{call}/{begun[call]}")
            store.set(f"rank {dist.get_rank()}", _cause(error))
            store.set("any", "")
        raise


class PeerRaised(ValueError):
    """A rank that this one waits for has left the call with an error, in :func:`before_groups`.

    It is no RuntimeError: those count as errors of the backend, by their text.
    """


def _look_for_refusals(ranks: Sequence[int], call: str) -> None:
    """This rank has waited long: raise if another one of ``ranks`` has left this ``call`` with an error."""
    store = SharedStore(f"refused/{call}/{_begun.get(default_store(), Counter())[call]}")
    if not store.has("any"):
        return
    refused = [rank for rank in ranks if store.has(f"rank {rank}")]
    if refused:
        raise PeerRaised(f"{call} failed on {store.get(f'rank {refused[0]}')}")


def _cause(error: Exception) -> str:
    """The first rank that has failed, and its error: that of this rank, or the one that it has been told."""
    if isinstance(error, PeerRaised):
        return str(error).partition(" failed on ")[2]
    return f"rank {dist.get_rank()}: {type(error).__name__}: {error}"


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


def agree(
    groups: Sequence[dist.ProcessGroup],
    device: torch.device,
    call: str,
    claim: str,
    problem: Exception | None,
    advice: str = "give it equal modules and equal arguments on all ranks",
) -> None:
    """Return if no rank of ``groups`` has a ``problem`` and all ranks make the same ``claim``. Otherwise, raise on every rank.

    This costs one all-reduce of 24 bytes per group. If ranks disagree, it also costs one all-gather of texts per group.

    Args:
        groups: the process groups of a mesh's dimensions. One group after the other carries a rank's answer to all ranks.
        device: the device of the all-reduce.
        call: the name of the call that the ranks make, for errors.
        claim: lines of text that must be equal on all ranks.
        problem: the exception that this rank would raise; None if there is none.
        advice: the end of the error if claims differ: what to do.

    Raises:
        Exception: ``problem``, on the rank that has it.
        PeerError: a rank died, or did not call this function within the timeout.
        RuntimeError: another rank has a problem.
        ValueError: ranks make different claims; the error shows the first line that differs.
    """
    # Seven bytes, so that the digest and its negative fit into int64. The minimum of the negatives gives the largest digest: if
    # it equals the smallest digest, all digests are equal.
    digest = int.from_bytes(hashlib.sha256(claim.encode()).digest()[:7], "big")
    state = torch.tensor([0 if problem else 1, digest, -digest], dtype=torch.int64, device=device)
    met = []
    # In place: the all-reduce over a mesh dimension starts from the minima over the dimensions before it.
    for group in groups:
        try:
            reduce_min(state, group, call)
            met.append(group)
        except PeerRaised as refused:  # A rank without a model knows no groups of tensor parallelism, and left this one alone.
            problem = problem or refused
            state[0] = 0  # It goes on over the groups behind, so that their ranks raise, too.
    is_fine, lowest, negative = state.tolist()
    # These numbers are equal on all ranks: either all ranks return here, or all take part in the all-gathers below.
    if is_fine and lowest == -negative:
        return
    answers = {dist.get_rank(): (_cause(problem) if problem else "", claim)}
    for group in met:
        received: list[dict[int, tuple[str, str]]] = [{}] * group.size()
        with peers_named(call, "", functools.partial(dist.get_process_group_ranks, group)):
            dist.all_gather_object(received, answers, group=group)
        answers = {rank: answer for part in received for rank, answer in part.items()}
    # Raised after the all-gathers, because the other ranks need this rank's part in them.
    if problem is not None:
        raise problem
    if failed := dict.fromkeys(text for text, _ in answers.values() if text):
        raise RuntimeError(f"{call} failed on {'; '.join(failed)}")
    raise ValueError(f"{call} was called differently on different ranks: {_difference(answers, claim)}: {advice}")


def reduce_min(numbers: torch.Tensor, group: dist.ProcessGroup, call: str) -> None:
    """The minimum of ``numbers`` over ``group``, in place. The host waits for it.

    Raises:
        PeerError: a rank died, or did not take part; the error names ``call``.
        PeerRaised: a rank has left ``call`` with an error, in :func:`before_groups`. ``group`` is not usable any more.
    """
    ranks = functools.partial(dist.get_process_group_ranks, group)

    def look() -> None:
        try:
            _look_for_refusals(ranks(), call)
        except PeerRaised:
            end_messages(group, numbers.device)  # Or what waits here would match what these ranks send next.
            raise

    is_watched = is_gloo(group, numbers.device)
    if is_watched:
        announce()  # It may be the first call of this package: other ranks find out that this one waits here.
    # One name on all ranks: ranks that wait here in calls with different names come to an agreement, too.
    ticket = issued_on(group).issue("agreement")
    with peers_named(call, "", ranks, [ticket]):
        # Over gloo, a rank that waits looks at times whether others have failed.
        work = dist.all_reduce(numbers, op=dist.ReduceOp.MIN, group=group, async_op=is_watched)
        if isinstance(work, dist.Work):
            wait_for(work, look)
        elif work is not None:  # Of a simulated group.
            work.wait()


def gather_numbers(numbers: torch.Tensor, group: dist.ProcessGroup, call: str) -> list[list[int]]:
    """The ``numbers`` of all ranks of ``group``, in the order of the group: one all-gather, for which the host waits.

    Raises:
        PeerError: a rank died, or did not take part; the error names ``call``.
    """
    received = numbers.new_empty(group.size() * len(numbers))
    ticket = issued_on(group).issue("all-gather", call)
    with peers_named(call, "", functools.partial(dist.get_process_group_ranks, group), [ticket]):
        work = _all_gather_single(received, numbers, group=group, async_op=is_gloo(group, numbers.device))
        if isinstance(work, dist.Work):
            wait_for(work)
        elif work is not None:  # Of a simulated group.
            work.wait()
        return received.view(group.size(), -1).tolist()  # type: ignore[no-any-return]


def _difference(answers: dict[int, tuple[str, str]], claim: str) -> str:
    """The first line that differs between the claims of the lowest rank and of another rank.

    If it is ``name: value`` on both, as of an option, it is shown as this name and both values.
    """
    claims = {rank: text.splitlines() for rank, (_, text) in answers.items()}
    first = min(claims)
    for rank in sorted(claims):
        if claims[rank] != claims[first]:
            pairs = zip(claims[first] + ["nothing more"], claims[rank] + ["nothing more"])
            ours, theirs = next((pair for pair in pairs if pair[0] != pair[1]), ("", ""))
            name, colon, _ = ours.partition(": ")
            if colon and theirs.startswith(name + colon):
                return f"{ours} on rank {first}, {theirs.removeprefix(name + colon)} on rank {rank}"
            return f"rank {first} has {ours}, rank {rank} has {theirs}"
    raise AssertionError(f"ranks agree on {claim}")


def agree_on_group(group: dist.ProcessGroup, claim: str, call: str, seconds: float) -> None:
    """Return when all ranks of ``group`` call this with equal ``claim``. No collective: ranks meet in the store.

    A collective would hang here if ranks pass different process groups of the same ranks.

    Args:
        group: the process group that this rank is about to use.
        claim: a text that must be equal on all ranks, such as the name of ``group`` and its mesh.
        call: the name of the call that the ranks make, for errors.
        seconds: how long to wait for the other ranks.

    Raises:
        ValueError: another rank passes another process group or another mesh.
        PeerRaised: a rank has left ``call`` with an error, in :func:`before_groups`.
        PeerError: a rank died, or did not make this call in time.
    """
    ranks = dist.get_process_group_ranks(group)
    announce()
    # By its ranks: one that waits here for another mesh's ranks is in another call, which ends a standstill.
    with peers_named(call, f"a mesh with {shown(ranks)}", lambda: ranks):
        # Ranks make their calls with one set of ranks in one order.
        number = next(_numbers.setdefault(default_store(), defaultdict(itertools.count))[tuple(ranks)])
        store = SharedStore(f"agreement/{name_of(ranks)}/{number}")
        first = store.first("claim", f"rank {dist.get_rank()}: {claim}")
        if first.partition(": ")[2] != claim:
            store.set("problem", f"{first}; rank {dist.get_rank()}: {claim}")
        store.set(f"rank {dist.get_rank()}", "")
        if store.add("count", 1) == len(ranks):
            store.set("all", "")
        deadline = time.monotonic() + seconds
        while not store.wait(["all"], _SLICE) and not store.has("problem"):
            missing = [rank for rank in ranks if not store.has(f"rank {rank}")]
            _look_for_refusals(missing, call)
            Peers.of(ranks).check_alive(missing)
            if time.monotonic() > deadline:
                text = f"rank {dist.get_rank()} waited {seconds:g} s, and ranks {missing} made no such call with this mesh"
                raise Peers.of(ranks).error(call, f"{text} ({claim})")
        if store.has("problem"):
            raise ValueError(
                f"{call} was called with different meshes on different ranks: {store.get('problem')}: all ranks must make "
                "their meshes in one order, and pass the same one"
            )


def problems_of_ranks(problem: str, group: dist.ProcessGroup) -> str:
    """The problems of all ranks of ``group`` in one line, which is the same on all ranks; empty if no rank has a problem.

    This costs one all-gather of objects. If all ranks have the same problem, the line has it once and names no rank.
    """
    received = [""] * group.size()
    dist.all_gather_object(received, problem, group=group)
    if all(text == problem for text in received):
        return problem
    return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(received) if text)
