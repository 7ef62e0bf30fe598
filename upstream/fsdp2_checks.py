"""Run torch's own tests of FSDP2 on CPU ranks, with torch's ``fully_shard`` or this package's, and write the outcomes.

    python upstream/fsdp2_checks.py FOLDER [FILE or FILE::PART ...] --with fsdp2|ragged|ragged-shard0 --json OUTCOMES

FOLDER holds torch's test files (``test/distributed/_composable/fsdp`` and others). They must not change on disk: in memory,
``cuda`` becomes ``cpu`` and ``nccl`` becomes ``gloo``. A case runs on as many ranks as it asks for GPUs, at least two. Cases
run one after another, in processes of their own. ``docs/data/fsdp2_tests.json`` has the outcomes. If a case fails with FSDP2,
its outcome with this package has no meaning.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import json
import os
import re
import signal
import sys
import tempfile
import time
import types
import unittest
from pathlib import Path
from typing import Any

import torch
import torch.distributed.fsdp as torch_fsdp
import torch.testing._internal.common_cuda as common_cuda
import torch.testing._internal.common_distributed as common_distributed
import torch.testing._internal.common_fsdp as common_fsdp
import torch.testing._internal.common_utils as common_utils
import torch.testing._internal.distributed._tensor.common_dtensor as common_dtensor
from torch.distributed.tensor import Shard

DEVICES, MOST = 2, 8  # A case sees as many devices as it asks for, within these bounds.


def swap(shard_dim0: bool) -> None:
    """Replace the public names of ``torch.distributed.fsdp`` by the same names of ``torch_ragged.fsdp``."""
    import torch_ragged.fsdp as ours
    from torch_ragged.fsdp.comm import _collectives

    # The tests count the collectives of GPUs; over gloo this package uses another reduce-scatter.
    _collectives._is_gloo = lambda *_: False
    names = {name: getattr(ours, name) for name in set(torch_fsdp.__all__) & set(ours.__all__)}
    del names["FSDPModule"]  # Ours is a subclass of torch's.
    if shard_dim0:
        names["fully_shard"] = with_shard_dim0(ours.fully_shard)
    for name, new in names.items():
        old = getattr(torch_fsdp, name)
        for key, module in list(sys.modules.items()):
            if key.startswith("torch.") and vars(module).get(name) is old:
                setattr(module, name, new)


def with_shard_dim0(fully_shard: Any) -> Any:
    """``fully_shard``, which places parameters as FSDP2 does if the caller gives no ``shard_placement_fn``."""

    @functools.wraps(fully_shard)
    def call(*args: Any, **keywords: Any) -> Any:
        given = keywords.pop("shard_placement_fn", None) or (lambda param: Shard(0) if param.ndim else None)
        return fully_shard(*args, shard_placement_fn=given, **keywords)

    return call


def with_gpus(number: int, **_: Any) -> Any:
    """Replaces ``skip_if_lt_x_gpu``: it records the number of ranks of the case."""

    def decorated(function: Any) -> Any:
        function.gpus = number
        return function

    return decorated


def pretend() -> None:
    """Make CPU ranks look like GPUs. Where torch spawns processes or starts threads, it forks, so that all ranks see this."""
    fork = torch.multiprocessing.get_context("fork").Process
    common_distributed.MultiProcessTestCase._spawn_processes = lambda self: self._start_processes(fork)
    common_fsdp.FSDPTestMultiThread = common_fsdp.FSDPTest
    common_distributed.skip_if_lt_x_gpu = with_gpus
    common_distributed.requires_nccl = lambda: lambda function: function
    common_distributed.requires_nccl_version = lambda *_: lambda function: function
    common_dtensor.skip_unless_torch_gpu = lambda function: function
    common_cuda.TEST_CUDA = common_cuda.TEST_MULTIGPU = common_utils.TEST_CUDA = True
    common_utils.get_cycles_per_ms = common_fsdp.get_cycles_per_ms = lambda *_: 0.0
    torch.Tensor.cuda = torch.nn.Module.cuda = torch.Tensor.pin_memory = lambda self, *_, **__: self
    torch.backends.cuda.enable_flash_sdp(False)  # DTensor has no rule for the CPU's.
    for name in ("Stream", "current_stream", "stream"):
        setattr(torch.cuda, name, getattr(torch.cpu, name))
    for name in ("set_device", "_sleep", "manual_seed", "empty_cache", "synchronize"):
        setattr(torch.cuda, name, lambda *_: None)


def see(devices: int) -> None:
    """Set the number of GPUs that tests see."""
    torch.cuda.device_count = torch.cpu.device_count = torch.accelerator.device_count = lambda: devices
    common_fsdp.DEVICE_COUNT = common_dtensor.NUM_DEVICES = devices


def load(path: Path) -> types.ModuleType:
    """The test file as a module that uses the CPU instead of a GPU."""
    text = path.read_text()
    text = re.sub(r"torch\.device\(.cuda., [\w.]+(\(\))?\)", 'torch.device("cpu")', text)
    text = re.sub(r"([\"'])cuda(:\d)?\1", r"\1cpu\1", text)
    text = re.sub(r"([\"'])(cpu:gloo,cuda:)?nccl\1", '"gloo"', text)
    text = text.replace("device_ids=[self.rank]", "device_ids=None")
    sys.modules[path.stem] = module = types.ModuleType(path.stem)
    exec(compile(text, str(path), "exec"), vars(module))
    return module


def cases(module: types.ModuleType) -> dict[str, unittest.TestCase]:
    suites = [unittest.defaultTestLoader.loadTestsFromModule(module)]
    found = {}
    while suites:
        for test in suites.pop():
            if isinstance(test, unittest.TestSuite):
                suites.append(test)
            elif type(test).__module__ == module.__name__:
                found[f"{type(test).__name__}.{test._testMethodName}"] = test
    return dict(sorted(found.items()))


def run(test: unittest.TestCase, report: int) -> None:
    """Run a case in this process; its output and outcome go to the file descriptor ``report``."""
    os.setpgid(0, 0)
    os.dup2(report, 1)
    os.dup2(report, 2)
    sys.stdout = sys.stderr = open(1, "w", closefd=False)
    see(DEVICES)
    function = inspect.unwrap(getattr(test, test._testMethodName), stop=lambda function: hasattr(function, "gpus"))
    see(min(MOST, max(DEVICES, getattr(function, "gpus", 0), getattr(test, "world_size", 0))))
    result = unittest.TestResult()
    test.run(result)
    for _, text in result.failures + result.errors + result.skipped:
        print(text)
    print("OUTCOME", "failed" if not result.wasSuccessful() else "skipped" if result.skipped else "passed", flush=True)


def outcome(test: unittest.TestCase, timeout: float) -> tuple[str, str]:
    """The outcome and output of a case. After ``timeout`` seconds, the case is killed with all its ranks."""
    with tempfile.TemporaryFile("w+") as report:
        child = os.fork()
        if child == 0:
            try:
                run(test, report.fileno())
            finally:
                os._exit(0)
        deadline, ended = time.monotonic() + timeout, False
        while not ended and time.monotonic() < deadline:
            time.sleep(0.02)
            ended = os.waitpid(child, os.WNOHANG)[0] != 0
        with contextlib.suppress(ProcessLookupError):  # No rank is left.
            os.killpg(child, signal.SIGKILL)
        if not ended:
            os.waitpid(child, 0)
        report.seek(0)
        text = report.read()
    found = re.findall(r"^OUTCOME (\w+)$", text, re.M)
    return found[-1] if found else "crashed" if ended else "timed out", text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", help="file names; ::PART selects the cases with PART in their names")
    parser.add_argument("--with", dest="which", choices=("fsdp2", "ragged", "ragged-shard0"), required=True)
    parser.add_argument("--json", type=Path, required=True, help="the file to which outcomes are added")
    parser.add_argument("--logs", type=Path, help="the folder for the output of cases that do not pass")
    parser.add_argument("--timeout", type=float, default=150.0, help="seconds per case")
    options = parser.parse_intermixed_args()
    torch.set_num_threads(1)
    pretend()
    see(DEVICES)
    if options.which != "fsdp2":
        swap(options.which == "ragged-shard0")
    found = json.loads(options.json.read_text()) if options.json.exists() else {}
    for name in options.names or sorted(path.name for path in options.folder.rglob("test_*.py")):
        file, _, part = name.partition("::")
        for path in options.folder.rglob(file):
            for case, test in cases(load(path)).items():
                if part not in case:
                    continue
                found[f"{file}::{case}"], text = outcome(test, options.timeout)
                print(f"{file}::{case} {found[f'{file}::{case}']}", flush=True)
                options.json.write_text(json.dumps(found, indent=1, sort_keys=True))
                if options.logs and not text.endswith("OUTCOME passed\n"):
                    options.logs.mkdir(parents=True, exist_ok=True)
                    (options.logs / f"{path.stem}.{case}").write_text(text)


if __name__ == "__main__":
    main()
