"""Schedule: which modules stay unsharded, and which all-gathers are issued when, as a value. It must not search or measure."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch_ragged.fsdp.core._fsdp_state import FSDPState
from torch_ragged.fsdp.tools._timeline import Timeline

__all__ = ["Schedule", "UnitSchedule"]


@dataclass(frozen=True)
class UnitSchedule:
    """What a schedule says of a module on which ``fully_shard`` was called.

    Attributes:
        name: its name under the root; "root" is the root's.
        reshard: whether it is resharded after forward. None: as ``fully_shard`` has it.
        forward: in forward, the modules whose all-gathers are issued after that of this module, in order.
        backward: the same in backward.
    """

    name: str
    reshard: bool | None
    forward: tuple[str, ...]
    backward: tuple[str, ...]


@dataclass(frozen=True)
class Schedule:
    """When the collectives of a step are issued, and which parameters stay unsharded. ``model.set_schedule`` takes it. ::

        model.set_schedule("auto", extra_bytes=2 * 2**30)   # finds one from the next steps
        ...
        print(model.schedule)
        model.schedule.save("schedule.json")
        model.schedule.timeline.save("predicted.png")       # beside monitor(model).timeline
        model.set_schedule(Schedule.load("schedule.json"))  # in another run

    Attributes:
        units: in the order of forward.
        reductions: how many modules' reduce-scatters may be in flight.
        seconds, bound_seconds, start_seconds: of a forward and backward, as predicted from recorded ones: under this schedule,
            at least under any schedule with as much memory, and under the settings before. 0: not predicted.
        peak_bytes, start_peak_bytes: of the buffers of the groups and of what autograd keeps.
        timeline: of the predicted pass. A collective is there for the time on its link. None: not predicted, or loaded.
    """

    units: tuple[UnitSchedule, ...]
    reductions: int
    seconds: float = 0.0
    bound_seconds: float = 0.0
    start_seconds: float = 0.0
    peak_bytes: int = 0
    start_peak_bytes: int = 0
    timeline: Timeline | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        lines: list[tuple[str, ...]] = [("modules", "after forward", "ahead in forward", "ahead in backward")]
        after = {None: "as set", True: "reshard", False: "unsharded"}
        # Modules in a row with the same numbers are one line.
        for (reshard, *counts), run in itertools.groupby(
            self.units, lambda unit: (unit.reshard, len(unit.forward), len(unit.backward))
        ):
            names = [unit.name for unit in run]
            names = names if len(names) == 1 else [f"{names[0]} to {names[-1]} ({len(names)})"]
            lines.append((names[0], after[reshard], *map(str, counts)))
        widths = [max(map(len, column)) for column in zip(*lines)]
        text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines]
        text.append(f"reduce-scatters in flight: {self.reductions}")
        if self.seconds:
            text.append(
                f"predicted forward and backward: {1e3 * self.seconds:.2f} ms, before {1e3 * self.start_seconds:.2f} ms, no "
                f"schedule is below {1e3 * self.bound_seconds:.2f} ms"
            )
            text.append(f"predicted peak: {self.peak_bytes:,} bytes, before {self.start_peak_bytes:,}")
        text.append("the next step's all-gathers wait for the optimizer, and all reductions end in their backward")
        return "\n".join(text)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the schedule to a JSON file, without its timeline."""
        Path(path).write_text(json.dumps(dataclasses.asdict(dataclasses.replace(self, timeline=None)), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Schedule:
        """Read what :meth:`save` has written.

        Raises:
            ValueError: the file has no schedule.
        """
        try:
            found: dict[str, Any] = json.loads(Path(path).read_text())
            units = [
                UnitSchedule(each["name"], each["reshard"], tuple(each["forward"]), tuple(each["backward"]))
                for each in found["units"]
            ]
            return cls(**found | {"units": tuple(units)})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{os.fspath(path)!r} holds no schedule: give a file that Schedule.save() has written") from error

    def check(self, states: Mapping[str, FSDPState]) -> None:
        """Raise a ValueError if the schedule is of other modules than ``states``."""
        named = {name for unit in self.units for name in (unit.name, *unit.forward, *unit.backward)}
        if unknown := sorted(named - set(states)):
            known = ", ".join(itertools.islice(states, 4))
            raise ValueError(
                f"set_schedule got a schedule of {', '.join(unknown[:4])}, which are no fully_shard modules of this model, as "
                f"{known} are: find one for this model with set_schedule('auto')"
            )

    def set_on(self, states: Mapping[str, FSDPState]) -> None:
        """Set the settings of ``states`` that the schedule decides."""
        for unit in self.units:
            state = states[unit.name]
            if unit.reshard is not None:
                state.reshard_after_forward = unit.reshard
            state.forward_prefetch = [states[name] for name in unit.forward]
            state.backward_prefetch = [states[name] for name in unit.backward]
            # The lists say how far ahead; the limit of the root must not cut them.
            state.comm.max_gathers = max(state.comm.max_gathers, len(self.units))
            for group in state.groups:
                group.settings.max_reductions = self.reductions
