"""A seam of delays: each rank sleeps a random time before it issues a collective, and before it waits for one.

Ranks of one host run nearly in step, so that a program in which they issue different collectives at one time, or wait in
different orders, often works by chance. With delays, such a program hangs or computes other values for most seeds::

    with delays(seed):
        train(model)

Threads of a backend, and code that torch.compile has made, are not delayed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import time
import unittest
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch import _ops

__all__ = ["delayed", "delays", "undelayed"]

LONGEST = 0.01  # seconds; the mean is a quarter of it
_FUNCTIONAL = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem")
_ISSUE = ("broadcast", "reduce", "all", "_all", "gather", "scatter", "_reduce", "send", "recv", "barrier", "monitored_barrier")


undelayed = unittest.skipIf(
    bool(os.environ.get("TORCH_RAGGED_TEST_DELAYS")), "it counts calls or objects, or reads a stack, in which the delays are"
)
"""Decorates a test that sees the delays themselves."""


def delayed() -> contextlib.AbstractContextManager[Any]:
    """:func:`delays` with the seed that TORCH_RAGGED_TEST_DELAYS has, if it has one: for each call on ranks (``make delays``).

    Shorter ones: the suite has a hundred thousand collectives.
    """
    seed = os.environ.get("TORCH_RAGGED_TEST_DELAYS")
    return delays(int(seed), LONGEST / 5) if seed else contextlib.nullcontext()


@contextlib.contextmanager
def delays(seed: int, longest: float = LONGEST) -> Iterator[list[str]]:
    """Delay this rank's collectives and messages in this context. Yields the names of the calls that were delayed.

    Seen are the methods of process groups, which the functions of ``torch.distributed`` call; the operators of functional
    collectives, DTensor's among them; and ``wait()`` of what they return.

    Args:
        seed: with the rank, it gives the delays: ranks differ, and a rank sleeps as long in each run with the seed.
        longest: seconds.
    """
    found: list[str] = []
    numbers = random.Random(f"{seed} {dist.get_rank()}")

    def sleep(name: str) -> None:
        found.append(name)
        # Most delays are short and some are long, so that a rank overtakes others by one call, and by many.
        time.sleep(longest * numbers.random() ** 3)

    with contextlib.ExitStack() as stack:
        for name in vars(dist.ProcessGroup):
            if name.startswith(_ISSUE):
                _delay(stack, dist.ProcessGroup, name, functools.partial(_named, sleep, name))
        for name in ("wait", "synchronize"):
            _delay(stack, dist.Work, name, functools.partial(_named, sleep, name))
        # Operators are called as packets or as overloads; C++ issues their collectives, and calls no method of a group.
        for kind in (_ops.OpOverloadPacket, _ops.OpOverload):
            _delay(stack, kind, "__call__", functools.partial(_operator, sleep))
        yield found


def _delay(stack: contextlib.ExitStack, kind: type, name: str, before: Callable[..., None]) -> None:
    """Until the stack is closed, call ``before`` with the object before its method of that name."""
    method = vars(kind)[name]

    @functools.wraps(method)
    def delayed(self: Any, /, *arguments: Any, **keywords: Any) -> Any:
        before(self)
        return method(self, *arguments, **keywords)

    setattr(kind, name, delayed)
    stack.callback(setattr, kind, name, method)


def _named(sleep: Callable[[str], None], name: str, _: Any) -> None:
    sleep(name)


def _operator(sleep: Callable[[str], None], operator: Any) -> None:
    name = str(operator).replace("::", ".")
    if name.partition(".")[0] in _FUNCTIONAL:
        sleep(name)
