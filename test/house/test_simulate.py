"""benchmarks/predict: rings against times worked out by hand, and what simulate.py counts against plans."""

import gc
import sys
import unittest
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[2]))  # Of the benchmarks.

from torch.distributed.fsdp import MixedPrecisionPolicy  # noqa: E402

from benchmarks.common.fake_world import PACKAGES, fake_world, make_mesh, meta_training  # noqa: E402
from benchmarks.common.models import Stack, blocks_of, rest_of, shard  # noqa: E402
from benchmarks.common.tracker import CollectiveLog, MemoryTracker  # noqa: E402
from benchmarks.predict.network import Link, Network  # noqa: E402
from benchmarks.predict.replay import H100  # noqa: E402
from torch_ragged.fsdp import buffer_layouts, memory_report  # noqa: E402
from torch_ragged.offline import Parameter, load_model  # noqa: E402

ODD = Parameter("bias", (100,))
BLOCK = [Parameter("up", (100, 48)), ODD, Parameter("experts", (6, 32, 100)), Parameter("down", (48, 32))]
REST = [Parameter("embedding", (1000, 48)), Parameter("norm", (48,)), Parameter("head", (1000, 48))]


class NetworkTest(unittest.TestCase):
    network = Network(within=Link(1, 100), across=Link(5, 10), per_node=4)

    def test_rings_take_latencies_and_bytes_over_bandwidth(self):
        self.assertEqual(self.network.all_gather(400, 1), 0)
        self.assertEqual(self.network.all_gather(400, 4), 3 * 1 + 300 / 100)
        self.assertEqual(self.network.all_gather(800, 8), 1 * 5 + 6 * 1 + 700 / 40)  # Two nodes, four cards each.
        self.assertEqual(self.network.all_gather(800, 8, in_node=1), 7 * 5 + 700 / 10)
        self.assertEqual(self.network.all_reduce(400, 4), 2 * self.network.all_gather(400, 4))

    def test_monotone_in_ranks_and_bytes(self):
        times = [H100.network.all_gather(1e9, ranks) for ranks in (8, 64, 512, 4096, 10240)]
        self.assertEqual(times, sorted(times))
        self.assertLess(H100.network.all_gather(1e6, 64), H100.network.all_gather(2e6, 64))


class CountTest(unittest.TestCase):
    """One step on the meta device, by either package."""

    def step(self, package, ranks, shards=None, layers=3):
        log, tracker = CollectiveLog(), MemoryTracker()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        with fake_world(ranks), meta_training(), log.installed(), tracker:
            model = Stack([BLOCK] * layers, REST, device="meta")
            numels = [parameter.numel() for parameter in model.parameters()]
            shapes = [parameter.shape for parameter in model.parameters()]
            shard(model, PACKAGES[package], mesh=make_mesh(ranks, shards), mp_policy=policy)
            for _ in range(2):
                log.clear()
                model.zero_grad()
                gc.collect()  # The original parameters are in cycles; when they are collected depends on the tests before.
                tracker.reset_peak()
                model(torch.zeros(2, dtype=torch.long, device="meta")).sum().backward()
        return model, log, tracker, shapes, sum(numels)

    def test_bytes_are_the_plans(self):
        for ranks, shards in ((16, None), (16, 4)):
            model, log, tracker, _, _ = self.step("torch_ragged", ranks, shards)
            layouts = buffer_layouts(model)
            numel = sum(layout.numel for layout in layouts.values())
            again = numel - layouts["head"].numel  # It stays gathered.
            self.assertEqual(log.calls["all_gather"], 5 + 4)
            self.assertEqual(log.nbytes["all_gather"], 2 * (numel + again))
            self.assertEqual((log.calls["reduce_scatter"], log.nbytes["reduce_scatter"]), (5, 4 * numel))
            replicas = 0 if shards is None else 5
            agreement = 1 if shards is None else 2
            flags = agreement * sum(len(layout.tensors) for layout in layouts.values())
            self.assertEqual(log.calls["all_reduce"], replicas + agreement)
            self.assertEqual(log.nbytes["all_reduce"], bool(replicas) * 4 * numel // (shards or 1) + flags)
            held = sum(layout.shard_numel for layout in layouts.values()) * 4
            self.assertEqual(tracker.timeline[0][1], held)
            self.assertEqual(memory_report(model).total.sharded, held)

    def test_peak_is_the_reports(self):
        model, _, tracker, _, _ = self.step("torch_ragged", 16)
        predicted = memory_report(model).peak.total
        self.assertGreaterEqual(tracker.peak, predicted)  # The tracker sees activations and gradients on their way too.
        self.assertLess(tracker.peak, predicted + 4 * 2 * 1000 * 48)

    def test_bytes_of_fsdp2(self):
        for ranks, shards in ((16, None), (16, 4)):
            model, log, tracker, shapes, _ = self.step("FSDP2", ranks, shards)
            cut = shards or ranks
            padded = [-(-shape[0] // cut) * cut * shape[1:].numel() for shape in shapes]
            head = sum(padded[-2:])
            self.assertEqual(log.calls["all_gather"], 5 + 4)
            self.assertEqual(log.nbytes["all_gather"], 2 * (2 * sum(padded) - head))
            self.assertEqual((log.calls["reduce_scatter"], log.nbytes["reduce_scatter"]), (5, 4 * sum(padded)))
            self.assertEqual(log.calls["all_reduce"], 0 if shards is None else 5)
            self.assertEqual(log.nbytes["all_reduce"], 0 if shards is None else 4 * sum(padded) // cut)


class ModelTest(unittest.TestCase):
    def test_shapes_are_the_published_ones(self):
        for name in ("llama-3-70b", "gpt-oss-120b", "deepseek-v3"):
            blocks, rest = blocks_of(name), rest_of(name)
            numel = sum(torch.Size(one.shape).numel() for group in (*blocks, rest) for one in group)
            self.assertEqual(numel, load_model(name).numel, name)
        experts = [one.shape for one in blocks_of("deepseek-v3", 1)[0] if len(one.shape) == 3]
        self.assertEqual(experts, [(256, 2048, 7168), (256, 2048, 7168), (256, 7168, 2048)])


if __name__ == "__main__":
    unittest.main()
