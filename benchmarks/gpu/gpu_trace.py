"""What a profiler trace says of one step on a GPU: launches, and the time of kernels that only move data."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

__all__ = ["GpuTrace", "count", "traced"]

MOVES = {
    "aten::copy_",
    "aten::_foreach_copy_",
    "aten::cat",
    "aten::_chunk_cat",
    "aten::split_with_sizes_copy",
    "fsdp::all_gather_copy_in",
    "fsdp::chunk_cat",
    "fsdp::chunk_cat_mixed_dtype",  # in its place from torch 2.15 on
    "fsdp::split_with_sizes_copy",
}
"""Ops whose kernels compute nothing."""

_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass
class GpuTrace:
    """Of one step.

    Attributes:
        launches: kernels, copies and fills on the device.
        busy_ms: the sum of their times.
        copy_ms: by op, of those that move data without changing its type.
        cast_ms: of ``copy_`` between two types.
    """

    launches: int = 0
    busy_ms: float = 0.0
    copy_ms: Counter[str] = field(default_factory=Counter)
    cast_ms: float = 0.0


def traced(step: Callable[[], Any]) -> GpuTrace:
    """Trace one call of ``step``."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True) as profiler:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return count(json.loads(path.read_text())["traceEvents"])


def count(events: Iterable[dict[str, Any]]) -> GpuTrace:
    """What the events of a chrome trace come to: what runs on the device belongs to the op with its external id."""
    events = [event for event in events if "dur" in event]
    ops = {event["args"]["External id"]: event for event in events if event.get("cat") == "cpu_op"}
    trace = GpuTrace()
    for event in events:
        if event.get("cat") not in _ON_GPU:
            continue
        milliseconds = event["dur"] / 1e3
        trace.launches += 1
        trace.busy_ms += milliseconds
        op = ops.get(event["args"].get("External id"))
        if op is None or op["name"] not in MOVES:
            continue
        types = op["args"].get("Input type", [])
        if op["name"] == "aten::copy_" and len(types) > 1 and types[0] != types[1]:
            trace.cast_ms += milliseconds
        else:
            trace.copy_ms[op["name"]] += milliseconds
    return trace
