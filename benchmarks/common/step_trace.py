"""What a profiler trace of a step says: bytes copied, bytes in collectives, and memory at its highest."""

from __future__ import annotations

import gc
import json
import math
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

__all__ = ["Trace", "traced"]

_COPIES = ("aten::copy_", "aten::cat", "aten::_chunk_cat", "aten::split_with_sizes_copy")
_ITEMSIZE = {"float": 4, "double": 8, "c10::BFloat16": 2, "c10::Half": 2, "long int": 8, "unsigned char": 1, "int": 4}
_COLLECTIVES = {
    "c10d::_allgather_base_": ("all-gather", 0),
    "c10d::_reduce_scatter_base_": ("reduce-scatter", 1),
    "c10d::alltoall_base_": ("all-to-all", 1),
    "c10d::allreduce_": ("all-reduce", 0),
    "c10d::broadcast_": ("broadcast", None),
}
"""Name, and which argument's bytes are counted: the larger one. A broadcast's op does not tell the dtype, gloo's range does."""

_INSIDE = ("gloo:own_shard", "gloo:sum")
"""What is left to this process of an all-gather over gloo where that has been broadcasts, and of a reduce-scatter."""

_MEMORY_STEPS = 5


@dataclass
class Trace:
    """Counts of one step on this rank.

    Attributes:
        copied: bytes written by copies and concatenations, by op, without those inside a collective.
        copy_ms: milliseconds in them.
        collectives: calls by kind.
        collective_nbytes: bytes of the larger buffer of each, by kind.
        peak_nbytes: the most that the CPU allocator had given out.
        start_nbytes: what it had given out before the step.
    """

    copied: Counter[str] = field(default_factory=Counter)
    copy_ms: float = 0.0
    collectives: Counter[str] = field(default_factory=Counter)
    collective_nbytes: Counter[str] = field(default_factory=Counter)
    peak_nbytes: int = 0
    start_nbytes: int = 0


def traced(build: Callable[[], Callable[[], Any]]) -> Trace:
    """Trace some calls of the step that ``build`` makes for its memory, behind two others, and the next for its ops.

    The peak is the median of those calls': what gloo's threads hold for a moment differs.
    Memory is traced from the start, since the allocator's events count what was allocated under the profiler only. It hears
    nothing of what gloo's threads free behind their work: that a block has gone shows where its address is given out again,
    and before the step where no tensor has it.
    """
    trace = Trace()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step = build()
        for _ in range(2):
            step()
        held = []
        for _ in range(_MEMORY_STEPS):
            held.append(_addresses_held())
            with torch.profiler.record_function("traced step"):
                step()
    events, spans, _ = _events(profiler)
    found = [_memory(events, *span, addresses) for span, addresses in zip(spans, held)]
    trace.start_nbytes, trace.peak_nbytes = (int(statistics.median(each)) for each in zip(*found))
    with (
        profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler,
        torch.profiler.record_function("traced step"),
    ):
        step()
    events, [(start, stop)], thread = _events(profiler)
    counted = [event for event in events if event.get("cat") == "cpu_op" or event.get("name") in _INSIDE]
    broadcasts = [event for event in events if event.get("name") == "gloo:broadcast" and start <= event["ts"] < stop]
    trace.collective_nbytes["broadcast"] = sum(_nbytes(event, 0) for event in broadcasts)
    _count_ops(trace, [event for event in counted if start <= event["ts"] < stop and event["tid"] == thread])
    return trace


def _events(profiler: profile) -> tuple[list[dict[str, Any]], list[tuple[float, float]], int]:
    """All events in order; start and stop of each traced step, and their thread."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = [event for event in json.loads(path.read_text())["traceEvents"] if "ts" in event]
    events.sort(key=lambda event: event["ts"])
    markers = [event for event in events if event.get("name") == "traced step" and event.get("ph") == "X"]
    return events, [(marker["ts"], marker["ts"] + marker["dur"]) for marker in markers], markers[0]["tid"]


def _addresses_held() -> set[int]:
    """Where the memory of all tensors begins."""
    gc.collect()
    tensors = [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]
    tensors = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def _memory(events: list[dict[str, Any]], start: float, stop: float, held: set[int]) -> tuple[int, int]:
    """Bytes given out at the start, where tensors ``held`` them, and the most of them until ``stop``."""
    blocks: dict[int, int] = {}
    at_start = peak = 0
    is_before = True
    for event in events:
        if event["ts"] >= stop:
            break
        if event.get("name") != "[memory]":
            continue
        if is_before and event["ts"] >= start:
            is_before = False
            blocks = {address: nbytes for address, nbytes in blocks.items() if address in held}
            at_start = sum(blocks.values())
        address, nbytes = event["args"]["Addr"], event["args"]["Bytes"]
        blocks.pop(address, None)
        if nbytes > 0:
            for other in [other for other, size in blocks.items() if other < address + nbytes and address < other + size]:
                del blocks[other]  # Its end was not told.
            blocks[address] = nbytes
        if not is_before:
            peak = max(peak, sum(blocks.values()))
    return at_start, peak


def _count_ops(trace: Trace, events: list[dict[str, Any]]) -> None:
    events.sort(key=lambda event: (event["ts"], -event["dur"]))
    collective_until = 0.0
    for index, event in enumerate(events):
        name, end = event["name"], event["ts"] + event["dur"]
        if name in _COLLECTIVES and event["ts"] >= collective_until:
            kind, argument = _COLLECTIVES[name]
            trace.collectives[kind] += 1
            if argument is not None:
                trace.collective_nbytes[kind] += _nbytes(event, argument) + _own_nbytes(event)
            collective_until = end
        elif name in _INSIDE:
            collective_until = end
        elif name in _COPIES and event["ts"] >= collective_until and not _has_copy_inside(events, index, end):
            trace.copied[name] += _nbytes(event, 0)
            trace.copy_ms += event["dur"] / 1e3


def _own_nbytes(event: dict[str, Any]) -> int:
    """What an all-to-all with splits, one of two that leave a rank's own part out, adds for it: its share by what it sends."""
    if event["name"] != "c10d::alltoall_base_":
        return 0
    splits = json.loads(event["args"]["Concrete Inputs"][4])
    return _nbytes(event, 1) // (len(splits) - 1) if len(splits) > 1 else 0


def _has_copy_inside(events: list[dict[str, Any]], index: int, end: float) -> bool:
    """Whether an op does its work by another one of the copies."""
    for inner in events[index + 1 :]:
        if inner["ts"] >= end:
            return False
        if inner["name"] in _COPIES:
            return True
    return False


def _nbytes(event: dict[str, Any], argument: int) -> int:
    """Bytes of an argument, a tensor or a list of tensors (of float32, where the trace does not tell)."""
    dims, kind = event["args"]["Input Dims"][argument], event["args"]["Input type"][argument]
    shapes = dims if dims and isinstance(dims[0], list) else [dims]
    return sum(math.prod(shape) for shape in shapes) * _ITEMSIZE.get(kind, 4)
