"""Agreement of ranks before anything changes: a wrong call on one rank is an error on all ranks.

Nothing here changes a module, a parameter or a buffer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import os
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torch_ragged._ranks.groups import device_of, end_messages, groups_of, is_gloo, timeout_of
from torch_ragged._ranks.peers import PeerError, Peers, issued_on, name_of, peers_named, wait_for
from torch_ragged._ranks.standstill import announce, look_for_standstill
from torch_ragged._ranks.store import SharedStore
from torch_ragged._register._torch import default_store, forget_shardings

# Its older name warns in torch 2.13, and is the only one in 2.11.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

__all__ = [
    "agree",
    "agree_on_groups",
    "agreement",
    "before_groups",
    "compared_as",
    "forget_equal_meshes",
    "gather_numbers",
    "is_debug",
    "problems_of_ranks",
    "reduce_min",
    "text_of",
]

_ANSWER_SLICE = 2.0  # Seconds.
"""After so long a wait, a rank looks whether the processes of the other ranks live."""

_call_numbers: weakref.WeakKeyDictionary[dist.Store, defaultdict[tuple[int, ...], itertools.count[int]]] = (
    weakref.WeakKeyDictionary()
)
"""The number of agreements on the process groups of some ranks, in each store."""

_agreed: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
"""The process groups that ranks have compared."""

_COMPARED_AS = "torch_ragged.compared_as"

_groups_of_meshes: dict[int, list[weakref.ref[dist.ProcessGroup]]] = {}
"""By the hash of a mesh, which equal meshes have in common, the process groups of the last of them."""

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
    except PeerError:  # Others find it in the same way, and it is no error of this rank's arguments.
        raise
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
        PeerRaised: a rank has left ``call`` with an error before it knew all groups; see :func:`before_groups`.
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
            try:
                wait_for(work, look)
            except RuntimeError:
                look()  # Another rank that waited here may have found out first, and ended the group.
                raise
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


def compared_as(what: Callable[[Any], object]) -> dict[str, Any]:
    """Metadata of a field that may differ between ranks: they compare ``what(value)``, not the value::

    to: str = field(default="cpu", metadata=compared_as(lambda to: to if to == "cpu" else "a folder"))

    All other fields of a dataclass are compared as they are, also those that are new to it.
    """
    return {_COMPARED_AS: what}


def text_of(value: Any) -> str:
    """A text that is equal on ranks with equal values, and differs on others.

    A dataclass is its class and all fields; a function is its module and qualified name, as its address differs between ranks.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = []
        for each in dataclasses.fields(value):
            given, what = getattr(value, each.name), each.metadata.get(_COMPARED_AS)
            parts.append(f"{each.name}={text_of(given if what is None else what(given))}")
        return f"{type(value).__qualname__}({', '.join(parts)})"
    if isinstance(value, functools.partial):
        named = [f"{name}={text_of(each)}" for name, each in value.keywords.items()]
        return f"partial({', '.join([text_of(value.func), *map(text_of, value.args), *named])})"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(text_of, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(text_of, value)))}}}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{text_of(key)}: {text_of(each)}' for key, each in value.items()))}}}"
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    text = repr(value)
    return text_of(type(value)) if " at 0x" in text else text


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


def forget_equal_meshes(mesh: DeviceMesh) -> None:
    """Drop what DTensor remembers of a mesh that is equal to ``mesh`` and has other process groups. No communication.

    Each call of ``init_device_mesh`` makes groups, and equal meshes are one key of DTensor's cache of ops. So a parameter on
    the second mesh would be on the first one, but only on ranks that remember the op: ranks would then wait for each other in
    collectives of different groups.
    """
    groups = list(map(weakref.ref, groups_of(mesh)))
    if _groups_of_meshes.setdefault(hash(mesh), groups) != groups:
        _groups_of_meshes[hash(mesh)] = groups
        forget_shardings()


def _agree_on_group(group: dist.ProcessGroup, claim: str, call: str, seconds: float) -> None:
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
    # A ticket, as a collective: another rank may wait for this one in an all-reduce of the same call and the same ranks.
    with peers_named(call, "", lambda: ranks, [issued_on(group).issue("agreement on the mesh")]):
        # Ranks make their calls with one set of ranks in one order.
        number = next(_call_numbers.setdefault(default_store(), defaultdict(itertools.count))[tuple(ranks)])
        store = SharedStore(f"agreement/{name_of(ranks)}/{number}")
        first = store.first("claim", f"rank {dist.get_rank()}: {claim}")
        if first.partition(": ")[2] != claim:
            store.set("problem", f"{first}; rank {dist.get_rank()}: {claim}")
        store.set(f"rank {dist.get_rank()}", "")
        if store.add("count", 1) == len(ranks):
            store.set("all", "")
        deadline = time.monotonic() + seconds
        while not store.wait(["all"], _ANSWER_SLICE) and not store.has("problem"):
            missing = [rank for rank in ranks if not store.has(f"rank {rank}")]
            look_for_standstill()
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


def is_debug() -> bool:
    """Whether ranks compare each collective: ``TORCH_RAGGED_DEBUG=1``. It must be equal on all ranks."""
    return os.environ.get("TORCH_RAGGED_DEBUG", "0") not in ("", "0")


def agree_on_groups(mesh: DeviceMesh, call: str = "fully_shard") -> None:
    """Raise on all ranks if they pass meshes with different process groups. No collective.

    Ranks compare a group once, or with ``TORCH_RAGGED_DEBUG=1`` in each call.

    Raises:
        ValueError: they do.
        PeerError: a rank died, or did not make this call within the timeout.
    """
    for dim, group in enumerate(groups_of(mesh)):
        if group.size() == 1 or dist.get_backend(group) == "fake" or (group in _agreed and not is_debug()):
            continue
        where = f"a mesh of shape {tuple(mesh.shape)} with ranks {mesh.mesh.tolist()}, dimension {dim}"
        claim = f"process group {group.group_name} of {where}{', TORCH_RAGGED_DEBUG=1' if is_debug() else ''}"
        _agree_on_group(group, claim, call, timeout_of(group, device_of(mesh)).total_seconds())
        _agreed.add(group)


def problems_of_ranks(problem: str, group: dist.ProcessGroup) -> str:
    """The problems of all ranks of ``group`` in one line, which is the same on all ranks; empty if no rank has a problem.

    This costs one all-gather of objects. If all ranks have the same problem, the line has it once and names no rank.
    """
    received = [""] * group.size()
    dist.all_gather_object(received, problem, group=group)
    if all(text == problem for text in received):
        return problem
    return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(received) if text)
