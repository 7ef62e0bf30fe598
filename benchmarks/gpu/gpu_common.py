"""What the parts of the GPU benchmark share: their command line, their models, and timing by events."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.models import Stack, blocks_of, rest_of
from torch_ragged.offline import Parameter

__all__ = ["Deadline", "Timer", "finish", "initialize", "options_of", "parser", "stack"]

GIB = 2**30


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options of every part."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="default: %(default)s")
    made.add_argument("--smoke", action="store_true", help="tiny sizes: that everything runs, in seconds; numbers mean nothing")
    made.add_argument("--budget", type=float, default=600.0, help="seconds, beyond which nothing new is begun")
    made.add_argument("--json", help="write the results to this file too")
    return made


def finish(path: str | None, results: dict[str, Any]) -> None:
    """Write the results."""
    if path is not None:
        Path(path).write_text(json.dumps(results, indent=1) + "\n")


class Deadline:
    """``left()`` says whether there is time for one more; what is left out is told."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self.skipped: list[str] = []

    def left(self, what: str) -> bool:
        if time.monotonic() < self._end:
            return True
        self.skipped.append(what)
        print(f"{what}: not measured, out of time")
        return False


class Timer:
    """Milliseconds between moments: of the current stream on a GPU, else of the host."""

    def __init__(self, device: str) -> None:
        self._is_gpu = device == "cuda"

    def mark(self) -> Any:
        if not self._is_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def milliseconds(self, begin: Any, end: Any) -> float:
        if not self._is_gpu:
            return 1e3 * (end - begin)
        end.synchronize()
        return begin.elapsed_time(end)

    def median(self, function: Callable[[], Any], repetitions: int, warmup: int = 2) -> float:
        """Milliseconds of a call; the calls follow each other without waiting for the device."""
        for _ in range(warmup):
            function()
        moments = [self.mark()]
        for _ in range(repetitions):
            function()
            moments.append(self.mark())
        return statistics.median(self.milliseconds(*pair) for pair in zip(moments, moments[1:]))


def stack(name: str, layers: int, smoke: bool, **factory: Any) -> Stack:
    """A model of benchmarks/common/models.py; with ``smoke`` all dimensions are a 32nd."""
    shrink = _small if smoke else list
    return Stack([shrink(block) for block in blocks_of(name, layers)], shrink(rest_of(name)), **factory)


def _small(parameters: Sequence[Parameter]) -> list[Parameter]:
    return [Parameter(one.name, tuple(max(2, size // 32) for size in one.shape)) for one in parameters]


@torch.no_grad()
def initialize(model: torch.nn.Module) -> None:
    """Values that neither vanish nor overflow, in each rank's part only: what they are does not matter to the time."""
    for parameter in model.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        local.fill_(1.0) if parameter.ndim == 1 else local.uniform_(-0.01, 0.01)


def options_of(module_parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parsed; one thread, so that a smoke test on the CPU leaves the machine to others."""
    options = module_parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.device == "cuda" and not torch.cuda.is_available():
        module_parser.error("no GPU: pass --device cpu --smoke to see that everything runs")
    return options
