"""Schedules: what is predicted is what a pass takes by a clock of its own, and none is below the bound."""

import functools
import random
import unittest
import weakref
from collections import defaultdict

import torch
from common import error_of, fake_group
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from torch_ragged.fsdp import fully_shard, monitor
from torch_ragged.fsdp._groups import module_states, named_groups
from torch_ragged.fsdp.comm._collectives import WrappedCollectives
from torch_ragged.fsdp.schedule._play import PartCosts, recorded_costs
from torch_ragged.fsdp.schedule._search import Knobs, ScheduleSearch
from torch_ragged.fsdp.schedule._trace import END, Trace

WIDTH = 8


class Clock:
    """Time that only computation and collectives take. Collectives of a link run one after the other, beside computation."""

    def __init__(self):
        self.now, self.free = 0.0, defaultdict(float)

    def time_of(self, function):
        """From now until all has ended."""
        self.now = max([self.now, *self.free.values()])
        begin = self.now
        function()
        self.now = max([self.now, *self.free.values()])
        return self.now - begin


class Timed(WrappedCollectives):
    """Collectives on the clock: a latency, and bytes over a bandwidth that each group has for itself."""

    def __init__(self, group, clock, latency, bandwidth):
        super().__init__(group.collectives)
        self.group, self.clock, self.latency, self.bandwidth = group, clock, latency, bandwidth
        group.collectives = self

    def issue(self, name, largest, *arguments):
        work, dp = super().issue(name, largest, *arguments), self.group.dp
        link = dp.replicate_group if name == "all_reduce" else dp.shard_group
        begin = max(self.clock.now, self.clock.free[link])
        self.clock.free[link] = end = begin + self.latency + largest.nbytes / self.bandwidth
        return TimedWork(work, self.clock, end)


class TimedWork:
    def __init__(self, work, clock, end):
        self.work, self.clock, self.end = work, clock, end

    def wait(self):
        self.work.wait()
        self.clock.now = max(self.clock.now, self.end)


class Tick(torch.autograd.Function):
    """The identity, which takes time."""

    @staticmethod
    def forward(ctx, x, clock, forward, backward):
        ctx.clock, ctx.backward = clock, backward
        clock.now += forward
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.clock.now += ctx.backward
        return gradient, None, None, None


class Unit(nn.Module):
    """A linear layer of some columns, with modules inside, and computation before and behind these."""

    def __init__(self, clock, rng, width, *inner):
        super().__init__()
        self.clock, self.seconds = clock, [rng.random() for _ in range(4)]
        self.up, self.down = nn.Linear(WIDTH, width, bias=False), nn.Linear(width, WIDTH, bias=False)
        self.inner = nn.ModuleList(inner)
        self.call = lambda module, x: module(x)
        # Without an end of its own, it returns the output of the last module inside.
        self.begins, self.ends = True, not inner or rng.random() < 0.5

    def forward(self, x):
        if self.begins:
            x = Tick.apply(self.up(x), self.clock, *self.seconds[:2])
            x = self.down(x)
        for module in self.inner:
            x = self.call(module, x)
        return Tick.apply(x, self.clock, *self.seconds[2:]) if self.ends else x


CHECKPOINTS = (None, "inside", "around", "reentrant")


def random_model(clock, rng, mesh, checkpointed=None):
    """Units of random sizes, some with units inside, under a root that has parameters of its own.

    ``checkpointed``: checkpoints "inside" of units, or "around" their calls; "reentrant" ones are around the calls.
    """
    units = []
    for _ in range(rng.randint(2, 5)):
        inner = [Unit(clock, rng, rng.randint(1, 40)) for _ in range(rng.choice((0, 0, 2)))]
        units.append(Unit(clock, rng, rng.randint(1, 80), *inner))
        for module in (*inner, units[-1]):
            fully_shard(module, mesh=mesh, reshard_after_forward=rng.random() < 0.7)
    root = fully_shard(Unit(clock, rng, rng.randint(1, 60), *units), mesh=mesh)
    if checkpointed == "inside":
        for unit in units:
            run = unit.forward
            unit.forward = lambda x, run=run: checkpoint(run, x, use_reentrant=False)
    elif checkpointed is not None:
        root.call = lambda module, x: checkpoint(module, x, use_reentrant=checkpointed == "reentrant")
    root.input_has_gradient = rng.random() < 0.3
    # Without them, the inputs of the first unit may have no gradient. A reentrant checkpoint needs one.
    root.begins = rng.random() < 0.7 or checkpointed == "reentrant"
    latency, bandwidth = rng.random(), 10 ** rng.uniform(2, 5)
    for group in named_groups(root).values():
        Timed(group, clock, latency, bandwidth)
    return root


def one_pass(root):
    root(torch.ones(2, WIDTH, requires_grad=root.input_has_gradient)).sum().backward()
    root.zero_grad()


def search_of(root, clock, extra_bytes=0):
    """From a recorded pass, as ``set_schedule("auto")`` makes it."""
    states = module_states(root)
    for _ in range(2):
        one_pass(root)
    trace = Trace(states, lambda: clock.now, in_turn=True)
    trace.start()
    one_pass(root)
    trace.close()
    assert trace.is_over and not trace.problem, trace.problem
    costs = recorded_costs(trace.moments, float)
    order = next(iter(states.values())).context.order.states
    how = trace.activations, trace.calls, extra_bytes
    return ScheduleSearch(states, order, costs, *how), trace


def random_knobs(rng, search):
    whole = sum(search.nbytes.values())
    return Knobs(rng.randint(0, whole), rng.randint(0, whole), rng.randint(1, 4), rng.randint(0, len(search.nbytes) - 1))


def mesh_of(rng):
    return init_device_mesh("cpu", (8,)) if rng.random() < 0.6 else init_device_mesh("cpu", (2, 4))


class PredictionTest(unittest.TestCase):
    def test_a_trace_has_the_calls_of_a_recomputation_in_order(self):
        rng, clock = random.Random(0), Clock()
        with fake_group(2):
            root = fully_shard(Unit(clock, rng, 4, fully_shard(Unit(clock, rng, 4))))
            root.call = lambda module, x: checkpoint(module, x, use_reentrant=False)
            root.input_has_gradient = True
            _, trace = search_of(root, clock)
        marks = [moment.key for moment in trace.moments if moment.what == "mark"]
        again = ["again", "again runs", "again ends"]
        kinds = ["forward", "forward ends", "backward", *again, "backward ends"]
        self.assertEqual([what for what, name in marks if name == "inner.0"], kinds)
        self.assertEqual(marks[4], ("backward", "root"))
        self.assertEqual(marks[-2:], [("backward ends", "root"), END])

    def test_a_recorded_graph_that_is_dropped_is_freed(self):
        """A node that saves its own output, as that of tanh does."""
        with fake_group(2):
            root = fully_shard(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
            trace = Trace(module_states(root), in_turn=True)
            trace.start()
            output, held = root(torch.ones(2, WIDTH)), Clock()
            output.register_hook(functools.partial(error_of, held))
            held = weakref.ref(held)
            self.assertGreater(sum(trace.activations.values()), 0)
            del output
            self.assertIsNone(held())
            trace.close()

    def test_each_module_of_a_unit_keeps_activations_of_its_own(self):
        rng, clock = random.Random(0), Clock()
        with fake_group(2):
            units = fully_shard([Unit(clock, rng, 4), Unit(clock, rng, 4)])
            root = fully_shard(Unit(clock, rng, 4, *units))
            root.input_has_gradient = True
            before, trace = search_of(root, clock)
            self.assertIn("inner.0/1", trace.activations)
            kept = {"inner.0": 10**6, "inner.0/1": 10**7}
            search = ScheduleSearch(module_states(root), before._order, before._costs, kept, trace.calls)
            self.assertEqual(search.start.peak // 10**5, 110)

    def test_passes_take_the_predicted_time_and_none_is_below_the_bound(self):
        for seed in range(12):
            with self.subTest(seed=seed), fake_group(8):
                rng, clock = random.Random(seed), Clock()
                root = random_model(clock, rng, mesh_of(rng), CHECKPOINTS[seed % 4])
                run = functools.partial(one_pass, root)
                before = [clock.time_of(run) for _ in range(3)][-1]
                search, _ = search_of(root, clock, extra_bytes=10**6)
                self.assertAlmostEqual(search.start.seconds, before)
                for _ in range(6):
                    knobs = random_knobs(rng, search)
                    found = search.evaluate(knobs)
                    search.schedule(knobs).set_on(module_states(root))
                    self.assertAlmostEqual(clock.time_of(run), found.seconds, msg=str(knobs))
                    self.assertGreaterEqual(found.seconds, search.bound - 1e-9)

    def test_the_chosen_schedule_is_the_fastest_of_many_that_fit(self):
        for seed in (1, 2, 5, 9):
            with self.subTest(seed=seed), fake_group(8):
                rng, clock = random.Random(seed), Clock()
                root = random_model(clock, rng, mesh_of(rng))
                search, _ = search_of(root, clock, extra_bytes=rng.choice((0, 2000, 10**6)))
                knobs = search.best()
                chosen = search.start if knobs is None else search.evaluate(knobs)
                self.assertLessEqual(chosen.peak, search.limit)
                others = [search.evaluate(random_knobs(rng, search)) for _ in range(20)]
                fastest = min([search.start.seconds, *(found.seconds for found in others if found.peak <= search.limit)])
                self.assertLessEqual(chosen.seconds, 1.02 * fastest)

    def test_the_unit_of_time_does_not_matter(self):
        rng, clock = random.Random(0), Clock()
        with fake_group(8):
            root = random_model(clock, rng, init_device_mesh("cpu", (8,)))
            search, trace = search_of(root, clock, extra_bytes=10**6)
            costs = [{key: value / 1000 for key, value in each.items()} for each in vars(search._costs).values()]
            how = trace.activations, trace.calls, 10**6
            small = ScheduleSearch(module_states(root), search._order, PartCosts(*costs), *how)
            self.assertIsNotNone(knobs := search.best())
            self.assertEqual(small.best(), knobs)

    def test_the_bound_of_a_chain_without_memory_is_its_time(self):
        rng, clock = random.Random(0), Clock()
        with fake_group(2):
            unit = fully_shard(Unit(clock, rng, 4))
            root = fully_shard(nn.Sequential(unit))
            Timed(*named_groups(root).values(), clock, 1.0, 100.0)
            root.input_has_gradient = True
            search, _ = search_of(root, clock, extra_bytes=-(10**6))
            self.assertAlmostEqual(search.bound, search.start.seconds)
            # A fast link and one that takes a quarter longer count alike.
            slower = search.bound + 0.25 * sum(search._costs.collectives.values())
            self.assertAlmostEqual(search.start.score, (search.bound + slower) / 2)

    def test_less_memory_than_before_may_cost_time_and_too_little_is_no_schedule(self):
        rng, clock = random.Random(3), Clock()
        with fake_group(8):
            root = random_model(clock, rng, mesh_of(rng))
            for state in module_states(root).values():
                state.reshard_after_forward = False
            search, _ = search_of(root, clock)
            units = search.schedule(Knobs(0, 0, 1, 0)).units
            self.assertEqual([unit.forward for unit in units], [(unit.name,) for unit in units[1:]] + [()])
            least = search.evaluate(Knobs(0, 0, 1, 0)).peak
            self.assertLess(least, search.start.peak)
            self.assertGreaterEqual(search.start.seconds, search.bound)
            search, _ = search_of(root, clock, least - search.start.peak)
            self.assertLessEqual(search.evaluate(search.best()).peak, least)
            search, _ = search_of(root, clock, least - search.start.peak - 1)
            self.assertIn(f"the least of all schedules has {least:,}", error_of(search.best))

    def test_the_predicted_peak_of_buffers_is_that_of_a_pass(self):
        rng, clock = random.Random(3), Clock()
        with fake_group(8):
            root = random_model(clock, rng, init_device_mesh("cpu", (2, 4)))
            before, trace = search_of(root, clock)
            root.set_requires_gradient_sync(False)  # As in a micro-batch: a schedule is that of the last one.
            root.set_requires_all_reduce(False)
            search = ScheduleSearch(module_states(root), before._order, before._costs, {}, trace.calls)
            self.assertEqual(search.start.seconds, before.start.seconds)
            root.set_requires_gradient_sync(True)
            root.set_requires_all_reduce(True)
            for _ in range(6):
                knobs = random_knobs(rng, search)
                search.schedule(knobs).set_on(module_states(root))
                one_pass(root)
                with monitor(root) as watch:
                    root(torch.ones(2, WIDTH)).sum().backward()
                    row = watch.step()
                root.zero_grad()
                sharded = sum(group.sharded.nbytes for group in named_groups(root).values())
                self.assertLessEqual(row["buffer_peak_bytes"] - sharded, search.evaluate(knobs).peak)
            self.assertGreater(sum(trace.activations.values()), 0)


if __name__ == "__main__":
    unittest.main()
