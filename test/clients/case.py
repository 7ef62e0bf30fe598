"""What a client is: a training run of a program that others wrote, which is the same with torch's FSDP2 and with ours."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.metadata
from collections.abc import Callable
from typing import Any

STEPS = 10


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of docs/integrations/tested.md.

    Attributes:
        programs: the distributions that take part, as pip names them; their versions are printed.
        what: what is trained and how, such as "Trainer, Llama, gradient accumulation".
        train: a module-level function, called on each rank with ``"fsdp2"`` or ``"ragged"``; it trains STEPS steps and returns
            a number per step (or more), such as losses and gradient norms.
        ranks: how many ranks it runs on.
        exact: whether the numbers must be equal to the last bit; otherwise they must agree to float32's precision.
        ours_only: FSDP2 cannot run it, with the reason; the numbers are compared with those of ``train("one process")``.
    """

    programs: tuple[str, ...]
    what: str
    train: Callable[[str], list[float]]
    ranks: int = 2
    exact: bool = True
    ours_only: str = ""


@dataclasses.dataclass(frozen=True)
class NotRun:
    """What was not run, and why."""

    programs: tuple[str, ...]
    what: str
    why: str


def versions(programs: tuple[str, ...]) -> str:
    """``name version, ...`` of installed distributions.

    Raises:
        importlib.metadata.PackageNotFoundError: one is not installed.
    """
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in programs)


def both(program: str, number: int) -> tuple[list[float], list[float]]:
    """On one rank: the numbers of a case of ``<program>_cases`` in what it is compared with, and in ours."""
    case: Case = importlib.import_module(f"{program}_cases").CASES[number]
    return case.train("one process" if case.ours_only else "fsdp2"), case.train("ragged")


def sharding(implementation: str, **options: Any) -> contextlib.AbstractContextManager[Any]:
    """The context in which a program's calls of ``fully_shard`` are ours (``"ragged"``), or torch's."""
    from torch_ragged.integrations import installed

    return installed(**options) if implementation == "ragged" else contextlib.nullcontext()
