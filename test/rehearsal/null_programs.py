"""Programs that the tests of the null device run in a process of their own. Not imported by pytest."""

from __future__ import annotations

import json
import resource
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.common.transformers import Setting
from benchmarks.predict.replay import H100, replay, with_host
from rehearsal.measure import COUNTERS
from rehearsal.null_training import alone
from rehearsal.step import COPY_IN, COPY_OUT, recorded


def peak_of_process() -> int:
    """In MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def large_tensors() -> Any:
    """16 GiB take addresses, but no memory; what the host has not written is zero."""
    torch.empty(1, device="cuda")
    before = peak_of_process()
    x = torch.ones(1 << 31, device="cuda")
    y = (x * 3)[-5:]
    found = {"values": y.tolist(), "reserved": torch.cuda.memory_reserved() >> 30}
    flags = torch.tensor([3, 4], device="cuda")
    return found | {"flags": flags.tolist(), "grown": peak_of_process() - before < 200}


def too_large() -> Any:
    """The device has the memory of an H100."""
    held = torch.empty(60 << 30, dtype=torch.uint8, device="cuda")
    try:
        torch.empty(30 << 30, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        return [held.numel() >> 30, torch.cuda.memory_stats()["num_alloc_retries"]]
    return None


def values_are_needed() -> Any:
    """An operator whose shape depends on values says that there are none."""
    try:
        torch.ones(3, device="cuda").nonzero()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


def counts() -> Any:
    """What a matmul, a collective of 256 ranks, a copy and a sum issue."""
    with alone(256):
        x, whole = torch.ones(64, 32, device="cuda"), torch.empty(256 * 2048, device="cuda")
        dist.all_gather_into_tensor(whole, x.flatten())
        side = torch.cuda.Stream()
        torch.cuda.synchronize()
        torch.ops.rehearsal.counts(True)
        torch.ops.rehearsal.trace(True)
        product = x @ x.T
        work = dist.all_gather_into_tensor(whole, x.flatten(), async_op=True)
        with torch.cuda.stream(side):
            side.wait_stream(torch.cuda.default_stream())
            copy = product.clone()
        work.wait()
        torch.cuda.current_stream().wait_stream(side)
        copy.sum()
        found = dict(zip(COUNTERS, torch.ops.rehearsal.counts(False)))
        torch.ops.rehearsal.trace(False)
        names, numbers = torch.ops.rehearsal.traced()
        trace = [
            [name, stream, ranks, read, written, work]
            for name, (kind, stream, ranks, _, _, _, read, written, work) in zip(names, numbers.tolist())
            if kind == 0
        ]
    return {"counts": found, "trace": trace}


def attention() -> Any:
    """Flash attention has shapes, and its work: 4 b h t t d, half of it if it is causal, 2.5 times in backward."""
    q = torch.ones(2, 4, 128, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    torch.ops.rehearsal.trace(True)
    for is_causal in (False, True):
        F.scaled_dot_product_attention(q, q, q, is_causal=is_causal).sum().backward()
    names, numbers = torch.ops.rehearsal.traced()
    return [work / (2 * 4 * 128 * 128 * 64) for name, (*_, work) in zip(names, numbers.tolist()) if "attention" in name]


def steps() -> Any:
    """Two layers of a Llama on 8 ranks, recorded and replayed with a host that is never late, by package."""
    setting, found = Setting("llama-3.1-8b", 8, 1, 1024, "some", 2), {}
    for package in ("torch_ragged", "FSDP2"):
        entries = recorded(setting, package)
        step = replay(entries, with_host(H100, 0))
        collectives = [each for each in entries if each.ranks]
        found[package] = {
            "collectives": [each.name.removeprefix("nccl") for each in collectives],
            "gathered": sum(each.written for each in collectives if each.name == "ncclAllGather"),
            "work": sum(each.work for each in entries),
            "copies between buffers": step.time_of(lambda entry: entry.name in (*COPY_IN, *COPY_OUT)) > 0,
            "ordered": 0 < step.exposed < step.communication < step.seconds and step.kernels < step.seconds,
            "of the timeline": round((step.kernels + step.exposed) / step.seconds, 2),
        }
    return found


if __name__ == "__main__":
    print("RESULT" + json.dumps(globals()[sys.argv[1]]()))
