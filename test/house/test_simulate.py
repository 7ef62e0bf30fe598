"""benchmarks/predict/simulate.py: the step model against schedules worked out by hand, and what is counted against plans."""

import argparse
import dataclasses
import functools
import gc
import sys
import unittest
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2]))  # Of the benchmarks.

from torch.distributed.fsdp import MixedPrecisionPolicy  # noqa: E402

from benchmarks.common.fake_world import PACKAGES, fake_world, make_mesh, meta_training  # noqa: E402
from benchmarks.common.models import NAMES, Stack, active_numel, blocks_of, rest_of, shard  # noqa: E402
from benchmarks.common.tracker import CollectiveLog, MemoryTracker  # noqa: E402
from benchmarks.predict.cluster import CLUSTER, Machine, group_costs  # noqa: E402
from benchmarks.predict.step_model import FSDP2, RAGGED, GroupCost, Link, Network, play  # noqa: E402
from torch_ragged.fsdp import buffer_layouts, memory_report  # noqa: E402
from torch_ragged.offline import Parameter, load_model  # noqa: E402

ODD = Parameter("bias", (100,))
BLOCK = [Parameter("up", (100, 48)), ODD, Parameter("experts", (6, 32, 100)), Parameter("down", (48, 32))]
REST = [Parameter("embedding", (1000, 48)), Parameter("norm", (48,)), Parameter("head", (1000, 48))]


class ScheduleTest(unittest.TestCase):
    def test_collectives_hide_behind_compute(self):
        # Of the collectives only the first all-gather and the last reduce-scatter have no compute beside them.
        groups = [GroupCost(forward=10, backward=20, gather=3, reduce=4)] * 5
        for schedule in (RAGGED, FSDP2):
            self.assertEqual(play(groups, schedule).seconds, 3 + 5 * 10 + 5 * 20 + 4 + 3)  # The last block is gathered anew.
        kept = [*groups[:-1], dataclasses.replace(groups[-1], stays=True)]
        self.assertEqual(play(kept).seconds, 3 + 5 * 10 + 5 * 20 + 4)

    def test_the_communicator_is_never_idle_without_compute(self):
        # One communicator, never idle: 5 all-gathers, 5 more in backward, 5 reduce-scatters.
        groups = [GroupCost(forward=0, backward=0, gather=3, reduce=4)] * 5
        for schedule in (RAGGED, FSDP2):
            self.assertEqual(play(groups, schedule).seconds, 10 * 3 + 5 * 4)

    def test_forward_waits_for_gathers(self):
        # G G G | forward of each behind its gather, the last alone; backward: gathers hide forward's tail no more.
        groups = [GroupCost(forward=2, backward=0, gather=5, reduce=0)] * 3
        step = play(groups)
        forward = [(index, begin) for what, index, begin, _ in step.intervals if what == "forward"]
        self.assertEqual(forward, [(0, 5), (1, 10), (2, 15)])
        self.assertEqual(step.seconds, 17 + 15)

    def test_one_reduction_under_way(self):
        # Backward 1 s, reduce-scatter 10 s: the third backward runs behind the first's reduction, and so on.
        groups = [GroupCost(forward=0, backward=1, gather=0, reduce=10)] * 3
        step = play(groups)
        reductions = [begin for what, _, begin, _ in step.intervals if what == "reduce"]
        self.assertEqual(reductions, [1, 11, 21])
        self.assertEqual(step.seconds, 31)

    def test_all_reduce_over_replicas_is_beside_reduce_scatter(self):
        groups = [GroupCost(forward=0, backward=0, gather=0, reduce=10, all_reduce=10)] * 3
        self.assertEqual(play(groups).seconds, 40)
        self.assertEqual(play(groups, FSDP2).seconds, 40)

    def test_without_overlap_a_step_is_the_sum_of_its_parts(self):
        groups = [GroupCost(forward=10, backward=20, gather=3, reduce=4, copy_out=1, copy_in=2)] * 5
        step = play(groups, dataclasses.replace(RAGGED, overlaps=False, agreement=7))
        self.assertEqual(step.seconds, 5 * (10 + 20 + 2 * 3 + 4 + 2 * 1 + 2) + 7)

    def test_a_slow_host_bounds_the_step(self):
        groups = [GroupCost(forward=1, backward=2, gather=0, reduce=0)] * 4
        behind = dataclasses.replace(RAGGED, host=10)
        self.assertEqual(play(groups, behind).seconds, 8 * 10 + 2)  # What the host issues last ends last.
        self.assertEqual(play(groups, dataclasses.replace(behind, runs_ahead=False)).seconds, 8 * 10 + 4 * 3)

    def test_no_cost_makes_a_step_shorter(self):
        base = GroupCost(forward=1, backward=2, gather=1.5, reduce=2.5, all_reduce=0.5, copy_out=0.1, copy_in=0.2)
        for schedule in (RAGGED, FSDP2):
            least = play([base] * 6, schedule).seconds
            self.assertLess(least, play([base] * 6, dataclasses.replace(schedule, overlaps=False)).seconds)
            for field in ("forward", "backward", "gather", "reduce", "all_reduce", "copy_out", "copy_in"):
                more = dataclasses.replace(base, **{field: 3 * getattr(base, field)})
                self.assertGreaterEqual(play([more] * 6, schedule).seconds, least, field)


class NetworkTest(unittest.TestCase):
    network = Network(within=Link(1, 100), across=Link(5, 10), per_node=4)

    def test_rings_take_latencies_and_bytes_over_bandwidth(self):
        self.assertEqual(self.network.all_gather(400, 1), 0)
        self.assertEqual(self.network.all_gather(400, 4), 3 * 1 + 300 / 100)
        self.assertEqual(self.network.all_gather(800, 8), 1 * 5 + 6 * 1 + 700 / 40)  # Two nodes, four cards each.
        self.assertEqual(self.network.all_gather(800, 8, in_node=1), 7 * 5 + 700 / 10)
        self.assertEqual(self.network.all_reduce(400, 4), 2 * self.network.all_gather(400, 4))
        # A tree has more bytes and fewer steps: 256 nodes take 8 levels, and a ring 255 steps.
        self.assertEqual(self.network.all_reduce(0, 1024), 2 * (8 * 5 + 3 * 1))
        self.assertEqual(self.network.all_reduce(4000, 8), 2 * self.network.all_gather(4000, 8))

    def test_monotone_in_ranks_and_bytes(self):
        times = [CLUSTER.all_gather(1e9, ranks) for ranks in (8, 64, 512, 4096, 10240)]
        self.assertEqual(times, sorted(times))
        self.assertLess(CLUSTER.all_gather(1e6, 64), CLUSTER.all_gather(2e6, 64))

    def test_group_costs_are_of_the_plan(self):
        machine = Machine(Network(Link(0, 1.0), Link(0, 1.0)), 1.0, 2.0, 1.0, {})
        options = argparse.Namespace(rows=0, reduce_dtype="bfloat16", fsdp2_expert_dim=0)
        for name in NAMES:
            ours, theirs = (group_costs(name, package, 8, 8, 10, machine, options) for package in PACKAGES)
            numel = load_model(name).numel
            self.assertAlmostEqual(sum(cost.gather for cost in ours) / (2 * numel * 7 / 8), 1, places=3)
            work = 10 * sum(active_numel(name, group) for group in (*blocks_of(name), rest_of(name)[1:]))
            for costs in (ours, theirs):
                self.assertAlmostEqual(sum(cost.forward for cost in costs) / (2 * work), 1)
                self.assertAlmostEqual(sum(cost.backward for cost in costs) / (4 * work / 2), 1)
            self.assertEqual({(cost.copy_out, cost.copy_in) for cost in ours}, {(0, 0)})
            self.assertTrue(all(cost.copy_out > 0 for cost in theirs))


class CountTest(unittest.TestCase):
    """One step on the meta device, by either package."""

    @staticmethod
    @functools.cache  # A step takes seconds, and tests only look at what it has left.
    def step(package, ranks, shards=None, layers=3):
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

    @pytest.mark.slow
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

    def test_order_of_collectives_is_the_models(self):
        kinds = {"gather": "all_gather", "reduce": "reduce_scatter", "all_reduce": "all_reduce", "agree": "all_reduce"}
        groups = [GroupCost(1, 2, 1, 1, all_reduce=1)] * 4 + [GroupCost(1, 2, 1, 1, all_reduce=1, stays=True)]
        for package, schedule in (("torch_ragged", RAGGED), ("FSDP2", FSDP2)):
            for shards in (None, 4):
                _, log, _, _, _ = self.step(package, 16, shards)
                used = [dataclasses.replace(group, all_reduce=float(shards is not None)) for group in groups]
                issued = [kinds[what] for what, _ in play(used, schedule).issued]
                if shards is not None and package == "torch_ragged":
                    issued.insert(len(issued) - 1, "all_reduce")  # Ranks agree over shards, then over replicas.
                self.assertEqual(log.order, issued, (package, shards))


class ModelTest(unittest.TestCase):
    def test_shapes_are_the_published_ones(self):
        for name, per_token in (("llama-3-70b", 855_654_400), ("gpt-oss-120b", 0), ("deepseek-v3", 0)):
            blocks, rest = blocks_of(name), rest_of(name)
            numel = sum(torch.Size(one.shape).numel() for group in (*blocks, rest) for one in group)
            self.assertEqual(numel, load_model(name).numel, name)
            if per_token:
                self.assertEqual(active_numel(name, blocks[-1]), per_token)
        experts = [one.shape for one in blocks_of("deepseek-v3", 1)[0] if len(one.shape) == 3]
        self.assertEqual(experts, [(256, 2048, 7168), (256, 2048, 7168), (256, 7168, 2048)])
        active = sum(active_numel("deepseek-v3", group) for group in (*blocks_of("deepseek-v3"), rest_of("deepseek-v3")))
        self.assertAlmostEqual(active / 37.5e9, 1, delta=0.02)  # 37 B activated, by the paper.
