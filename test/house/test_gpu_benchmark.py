"""benchmarks/gpu.sh runs; and what it is to show on a GPU is counted at 128 and 256 simulated ranks without one."""

import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import unittest
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from common import no_pipelines
from torch.utils._python_dispatch import TorchDispatchMode

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS.parent))

from torch.distributed.fsdp import MixedPrecisionPolicy  # noqa: E402

from benchmarks.common.fake_world import PACKAGES, fake_world, make_mesh, meta_training  # noqa: E402
from benchmarks.common.models import Stack, shard  # noqa: E402
from benchmarks.common.tracker import CollectiveLog  # noqa: E402
from benchmarks.gpu import gpu_network  # noqa: E402
from benchmarks.gpu.gpu_offload import KINDS  # noqa: E402
from benchmarks.gpu.gpu_steps import CHOSEN  # noqa: E402
from benchmarks.gpu.gpu_trace import MOVES, count  # noqa: E402
from benchmarks.predict.network import Link, Network  # noqa: E402
from torch_ragged.offline import Parameter  # noqa: E402

# Proportions of GPT-OSS-120B, a tenth of its width, and its 128 experts; every matrix is large enough to be written in place.
BLOCK = [
    Parameter("norm", (288,)),
    Parameter("qkv", (512, 288)),
    Parameter("out", (288, 512)),
    Parameter("router", (256, 288)),
    Parameter("gate_up", (128, 576, 288), expert=True),
    Parameter("down", (128, 288, 288), expert=True),
]
REST = [Parameter("embedding", (2048, 288)), Parameter("norm", (288,)), Parameter("head", (2048, 288))]
LARGE = 2**16
"""Elements: activations of two tokens and gradients of norms are below, what is of a matrix is not."""


class MoveLog(TorchDispatchMode):
    """Elements that ops move without changing their type, by op, in tensors that are large."""

    def __init__(self) -> None:
        super().__init__()
        self.moved: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().partition(".")[0]
        if name in MOVES:
            sources = args[1:2] if name.endswith("copy_") and not name.startswith("fsdp") else args[:1]
            tensors = [t for a in sources for t in (a if isinstance(a, (list, tuple)) else [a]) if isinstance(t, torch.Tensor)]
            is_cast = name == "aten::copy_" and args[0].dtype != args[1].dtype
            self.moved[name] += 0 if is_cast else sum(tensor.numel() for tensor in tensors if tensor.numel() >= LARGE)
        return func(*args, **(kwargs or {}))


def step(package: str, ranks: int) -> tuple[Counter[str], Counter[str], int]:
    """Elements moved, and bytes of the collectives, in the second step of a rank; and the model's elements."""
    log, moves = CollectiveLog(), MoveLog()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    with no_pipelines(), fake_world(ranks), meta_training(), log.installed():
        model = Stack([BLOCK] * 2, REST, device="meta")
        numel = sum(parameter.numel() for parameter in model.parameters())
        shard(model, PACKAGES[package], mesh=make_mesh(ranks), mp_policy=policy)
        tokens = torch.zeros(2, dtype=torch.long, device="meta")
        model(tokens).sum().backward()
        model.zero_grad()
        log.clear()
        with moves:
            model(tokens).sum().backward()
    return +moves.moved, log.nbytes, numel


class SimulatedTest(unittest.TestCase):
    """A stack like GPT-OSS-120B, as one of 128 and 256 ranks."""

    def test_matrices_are_not_copied_and_padding_does_not_double(self):
        moved, nbytes = {}, {}
        for ranks in (128, 256):
            for package in PACKAGES:
                moved[package, ranks], nbytes[package, ranks], numel = step(package, ranks)
        for ranks in (128, 256):
            self.assertEqual(moved["torch_ragged", ranks], {})
            self.assertGreater(moved["FSDP2", ranks].total(), 3 * numel)  # out of two gathers, into a reduction
            ours, theirs = (nbytes[package, ranks]["reduce_scatter"] for package in PACKAGES)
            padded = sum(-(-one.shape[0] // ranks) * ranks * math.prod(one.shape[1:]) for one in (*BLOCK, *BLOCK, *REST))
            self.assertEqual(theirs, 2 * padded)
            self.assertLess(ours, 1.001 * 2 * numel)
            self.assertAlmostEqual(theirs / ours, 1.0 if ranks == 128 else 1.974, delta=0.002)


class TraceTest(unittest.TestCase):
    def test_device_time_goes_to_the_op_that_launched(self):
        def op(number, name, types=()):
            return {"cat": "cpu_op", "name": name, "dur": 1, "args": {"External id": number, "Input type": list(types)}}

        def kernel(number, dur, cat="kernel"):
            return {"cat": cat, "name": "k", "dur": dur, "args": {"External id": number}}

        events = [
            op(1, "aten::mm"),
            op(2, "aten::copy_", ("float", "float")),
            op(3, "aten::copy_", ("c10::BFloat16", "float")),
            op(4, "fsdp::chunk_cat"),
            *(kernel(1, 5000), kernel(2, 1000, "gpu_memcpy"), kernel(3, 2000), kernel(4, 3000), kernel(4, 500)),
            kernel(None, 250, "gpu_memset"),
            {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "dur": 9, "args": {"External id": 1}},
            {"name": "a mark"},
        ]
        trace = count(events)
        self.assertEqual((trace.launches, trace.busy_ms, trace.cast_ms), (6, 11.75, 2.0))
        self.assertEqual(trace.copy_ms, {"aten::copy_": 1.0, "fsdp::chunk_cat": 3.5})


class NetworkTest(unittest.TestCase):
    """What a GPU would be given to do, by a stand-in of its kernel and of its streams."""

    def collectives(self, blocks, is_on=True):
        launches = []
        stream = SimpleNamespace(wait_stream=lambda _: None, record_event=object)
        kernel = lambda grid, block, arguments, stream: launches.append((grid[0], block[0], *arguments[2:5]))  # noqa: E731
        whole, part = torch.zeros(8 << 20), torch.zeros(1 << 20)
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(gpu_network, "_kernel", lambda: kernel))
            stack.enter_context(mock.patch.object(torch.Tensor, "is_cuda", True))
            for name, value in (
                ("Stream", lambda: stream),
                ("current_stream", lambda: SimpleNamespace(wait_event=lambda _: None)),
            ):
                stack.enter_context(mock.patch.object(torch.cuda, name, value))
            properties = SimpleNamespace(multi_processor_count=132)
            stack.enter_context(mock.patch.object(torch.cuda, "get_device_properties", lambda: properties))
            network = gpu_network.EmulatedNetwork(Network(Link(1e-6, 1e9), Link(1e-6, 1e9)), 8, blocks)
            network.is_on = is_on
            with network.installed():
                work = torch.distributed.all_gather_into_tensor(whole, part, async_op=True)
                self.assertIsNone(torch.distributed.reduce_scatter_tensor(output=part, input=whole))
                work.wait()
        return launches, network

    def test_collectives_last_as_long_as_over_the_links(self):
        launches, network = self.collectives(16)
        seconds = 7e-6 + 28 * 2**20 / 1e9
        units, most = 1 << 18, 8 << 18
        self.assertEqual(launches, [(16, 512, most, units, 29367), (16, 512, units, most, 29367)])
        self.assertEqual((network.calls["all_gather"], network.calls["reduce_scatter"]), (1, 1))
        self.assertAlmostEqual(network.seconds, 2 * seconds)

    def test_copy_engines_leave_the_multiprocessors_to_others(self):
        launches, _ = self.collectives(0)
        self.assertEqual([each[:2] for each in launches], [(264, 512), (1, 32)] * 2)
        self.assertLess(launches[1][4], 29367)
        self.assertGreater(launches[1][4], 29340)

    def test_without_time_the_bytes_are_still_moved(self):
        launches, network = self.collectives(16, is_on=False)
        self.assertEqual([each[0] for each in launches], [264, 264])
        self.assertEqual((network.seconds, [each[4] for each in launches]), (0.0, [0, 0]))


class SmokeTest(unittest.TestCase):
    @pytest.mark.slow
    def test_everything_runs_on_a_cpu(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "results.json"
            command = ["sh", str(BENCHMARKS / "gpu.sh"), "--device", "cpu", "--smoke", "--json", str(path)]
            command += ["--parts", "steps", "peers", "graph", "offload"]
            environment = {**os.environ, "PYTHON": sys.executable}
            done = subprocess.run(command, capture_output=True, text=True, timeout=170, env=environment)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            parts = json.loads(path.read_text())["parts"]
        self.assertEqual(
            {name: part["status"] for name, part in parts.items()},
            dict.fromkeys(("steps", "peers", "graph", "offload"), "done"),
        )
        rows = parts["steps"]["rows"]
        self.assertEqual(
            {(row["setting"], row["package"]) for row in rows if row["ms"] > 0 and row["gathered GiB"] > 0},
            {(name, package) for name in CHOSEN for package in PACKAGES},
        )
        self.assertIn(("copy_engine", 0.0), {(row["got"], row["loss difference"]) for row in parts["peers"]["rows"]})
        self.assertTrue(all(row["same losses"] for row in parts["graph"]["rows"]))
        self.assertEqual([row["kind"] for row in parts["offload"]["rows"]], list(KINDS))
