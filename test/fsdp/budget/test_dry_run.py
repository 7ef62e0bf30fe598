"""The dry run of fit: the curve of events that are written down, steps of one process, and what stays as it was."""

import gc
import random
import sys
import unittest
from itertools import count
from types import SimpleNamespace
from unittest import mock

import torch
from torch import nn

from torch_ragged.fsdp.budget._dry_run import Curve, DryRun, RecordedCall, _untraced, unchanged
from torch_ragged.fsdp.budget._recompute import Recompute

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TYPES = {CPU: torch._C._autograd.DeviceType.CPU, CUDA: torch._C._autograd.DeviceType.CUDA}
FORWARD, BACKWARD, GLOO = 1, 2, 3  # Threads.


def memory(at, nbytes, thread=FORWARD, device=CPU):
    return SimpleNamespace(
        name=lambda: "[memory]",
        start_ns=lambda: at,
        start_thread_id=lambda: thread,
        nbytes=lambda: nbytes,
        device_type=lambda: TYPES[device],
    )


def block(name, begin, end, thread=FORWARD):
    return SimpleNamespace(
        name=lambda: f"torch_ragged::{name}",
        start_ns=lambda: begin,
        duration_ns=lambda: end - begin,
        start_thread_id=lambda: thread,
    )


def curve_of(events, device=CPU, groups=None):
    events = sorted(events, key=lambda event: -event.start_ns())  # The profiler has no order.
    profiler = SimpleNamespace(profiler=SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: events)))
    groups = groups or {name: [SimpleNamespace(fqn=name)] for name in "ab"}
    return DryRun({}, groups, device)._curve(profiler)


class CurveTest(unittest.TestCase):
    def test_peaks_and_calls_come_from_events(self):
        curve = curve_of(
            [
                memory(5, 100),
                memory(5, 1000, device=CUDA),
                block("all_gather (a)", 6, 7),
                block("fit/forward/a", 10, 30),
                memory(15, 50),
                memory(16, 8, GLOO),
                memory(20, -20),
                memory(25, -8, GLOO),
                block("fit/forward/b", 30, 60),
                memory(30, 4),  # After the end of a, and before the begin of b.
                memory(45, 70),
                memory(50, -60),
                memory(62, 16, GLOO),
                block("all_gather (b)", 65, 66, BACKWARD),
                memory(68, -26, GLOO),  # It frees 10 of the others.
                block("fit/again/b", 70, 90, BACKWARD),
                memory(75, 30, BACKWARD),
                memory(76, 5, BACKWARD),
                memory(77, 7),  # Of another thread than the recomputation's.
                memory(80, -12, BACKWARD),
                block("fit/again/a", 100, 120, BACKWARD),
                memory(110, -3, BACKWARD),
                memory(130, 200, BACKWARD),
            ]
        )
        self.assertEqual(
            curve,
            Curve(
                peaks=[100, 100, 150, 134, 204, 144, 144, 176, 164, 164, 361],
                starts=[0, 100, 100, 130, 134, 144, 144, 134, 164, 164, 161],
                labels=[
                    *("forward", "forward", "forward of a", "after forward of a", "forward of b", "after forward of b"),
                    *("after forward of b", "backward of b", "backward of b", "backward of a", "backward of a"),
                ],
                calls=[
                    RecordedCall("b", begin=4, end=5, gather=6, again=7, again_ends=8, kept=23, working=35),
                    # Its last all-gather is forward's: its parameters stay unsharded.
                    RecordedCall("a", begin=2, end=3, gather=9, again=9, again_ends=10, kept=0, working=0),
                ],
            ),
        )

    def test_on_an_accelerator_its_own_memory_counts(self):
        curve = curve_of([memory(1, 100), memory(2, 7, device=CUDA), block("fit/forward/a", 3, 4)], CUDA)
        self.assertEqual(curve.peaks, [7, 7, 7])

    def test_calls_of_a_unit_are_recomputed_last_first(self):
        events = [block("fit/forward/a", 10, 20), block("fit/forward/a", 30, 40)]
        events += [block("fit/again/a", 50, 60), block("fit/again/a", 70, 80), block("fit/again/a", 90, 95)]
        curve = curve_of(events)
        self.assertEqual(curve.peaks, [0] * 11)
        self.assertEqual([call[:3] for call in curve.calls], [("a", 3, 4), ("a", 1, 2)])  # The third has no forward.

    def test_the_first_of_a_units_gathers_counts(self):
        events = [block("fit/forward/a", 10, 20), block("fit/again/a", 50, 60)]
        events += [block(f"all_gather (a.{at})", at, at + 1) for at in (5, 30, 40)]
        groups = {"a": [SimpleNamespace(fqn=f"a.{at}") for at in (40, 5, 30)]}
        self.assertEqual(curve_of(events, groups=groups).calls[0].gather, 4)

    def test_a_unit_that_keeps_holds_what_its_recomputation_made(self):
        call = RecordedCall("a", begin=1, end=3, gather=4, again=5, again_ends=7, kept=30, working=50)
        curve = Curve([100, 110, 180, 140, 140, 125, 190, 100], [90, 100, 0, 0, 0, 120, 0, 0], [""] * 8, [call])
        self.assertEqual(curve.kept_of(call), {1: 40, 2: 0, 3: 30, 4: 30, 5: 25, 6: 0})
        self.assertEqual(curve.unsharded_of(call, 9), {3: 9})

    def test_the_least_is_of_steps_with_equal_calls(self):
        curve = Curve([5, 9], [1, 2], ["x", "y"], [])
        others = [Curve([6, 7], [0, 0], ["x", "y"], []), Curve([0, 0], [0, 0], ["x", "z"], [])]
        self.assertEqual(curve.least(others), Curve([5, 7], [1, 2], ["x", "y"], []))


class Clock:
    """Each moment is later by one more than the last one was."""

    def __init__(self):
        self.moments, self.now = count(), 0

    def mark(self):
        self.now += next(self.moments)
        return self.now

    def seconds(self, begin, end):
        return end - begin


class StepsTest(unittest.TestCase):
    def setUp(self):
        self.model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2)))
        self.units = {name: [Recompute(each, is_on=True)] for name, each in zip("ab", self.model)}
        self.dry = DryRun(self.units, {name: [] for name in "ab"}, CPU)
        self.dry._clock, self.steps = Clock(), 0

    def step(self):
        self.steps += 1
        self.model[1](self.model(torch.randn(8, 8))).sum().backward()  # The second is called twice.

    def test_five_steps_give_the_curve_and_the_seconds_of_forwards(self):
        curve, seconds = self.dry.run(self.step)
        self.assertEqual(self.steps, 5)
        self.assertEqual(
            [label for label in curve.labels if "backward" in label], [*["backward of b"] * 4, *["backward of a"] * 2]
        )
        self.assertEqual([call.unit for call in curve.calls], ["b", "b", "a"])
        self.assertEqual([call.kept for call in curve.calls], [256] * 3)
        self.assertEqual(seconds, {"a": 1.0, "b": 3.0 + 5.0})
        self.assertTrue(all(each.watch is None for units in self.units.values() for each in units))

    def test_cycles_of_the_step_before_are_not_freed_in_a_step(self):
        def step():
            gc.collect()
            cycle = [torch.empty(1 << 20, dtype=torch.uint8)]
            cycle.append(cycle)
            self.step()

        self.assertGreaterEqual(self.dry.run(step)[0].peaks[0], 1 << 20)

    def test_what_a_forward_holds_when_it_runs_again_is_not_kept(self):
        def forward(x):
            spare = torch.empty(1 << 20, dtype=torch.uint8)
            return x.exp() + spare[0]

        self.units["b"][0]._before = forward
        self.assertEqual([call.kept for call in self.dry.run(self.step)[0].calls], [256] * 3)

    def test_an_error_of_a_forward_is_the_programs(self):
        self.units["b"][0]._before = lambda x: {}[x] if self.steps == 2 else x
        self.assertRaises(KeyError, self.dry.run, self.step)
        self.assertTrue(all(each.watch is None for units in self.units.values() for each in units))

    def test_a_forward_that_makes_other_tensors_again_is_an_error(self):
        module, sizes = nn.Identity(), count(1)
        module.forward = lambda x: x.expand(next(sizes), 8).exp().sum()
        dry = DryRun({"a": [Recompute(module, is_on=True)]}, {"a": []}, CPU)
        with self.assertRaisesRegex(ValueError, "other tensors when it runs again"):
            dry.run(lambda: module(torch.ones(8, requires_grad=True)).backward())


class UntracedTest(unittest.TestCase):
    def test_the_compiler_is_asked_only_if_it_is_loaded(self):
        with mock.patch.dict(sys.modules), mock.patch.object(torch.compiler, "disable", lambda function, recursive: recursive):
            sys.modules["torch._dynamo"] = None
            self.assertIs(_untraced(len), False)
            del sys.modules["torch._dynamo"]
            self.assertIs(_untraced(len), len)


class UnchangedTest(unittest.TestCase):
    def test_generators_buffers_and_gradients_are_as_before(self):
        model = nn.BatchNorm1d(3)
        before = torch.get_rng_state(), random.getstate(), {name: each.clone() for name, each in model.named_buffers()}
        with self.assertRaises(KeyError), unchanged(model, CPU):
            torch.rand(1), random.random()
            model(torch.ones(2, 3)).sum().backward()
            model.register_buffer("new", torch.ones(1))
            raise KeyError
        self.assertTrue(torch.equal(torch.get_rng_state(), before[0]))
        self.assertEqual(random.getstate(), before[1])
        for name, buffer in before[2].items():
            self.assertTrue(torch.equal(model.get_buffer(name), buffer), name)
        self.assertTrue(all(param.grad is None for param in model.parameters()))

    def test_a_buffer_of_another_shape_stays(self):
        model = nn.Module()
        model.register_buffer("seen", torch.zeros(0))
        with unchanged(model, CPU):
            model.seen = torch.ones(2)
        self.assertEqual(model.seen.tolist(), [1.0, 1.0])


class RecomputeTest(unittest.TestCase):
    def test_the_programs_own_forward_runs_and_comes_back(self):
        module = nn.Linear(2, 2)
        own = module.forward = lambda x, times=2: times * x
        each = Recompute(module)
        self.assertIs(module.forward, each)
        self.assertEqual(str(each.__signature__), "(x, times=2)")
        self.assertEqual(module(torch.ones(1), times=3).tolist(), [3.0])
        each.remove()
        self.assertIs(module.forward, own)

    def test_a_forward_of_the_class_needs_none_of_its_own(self):
        module = nn.Linear(2, 2)
        each = Recompute(module)
        self.assertEqual(str(each.__signature__), "(input: torch.Tensor) -> torch.Tensor")
        each.remove()
        self.assertNotIn("forward", vars(module))

    def test_what_has_wrapped_it_stays_and_recomputes_nothing(self):
        module, calls = nn.Linear(2, 2), []
        each = Recompute(module, is_on=True, watch=lambda inner: calls.append("watched") or inner)
        wrapper = module.forward = lambda x: each(x)
        module(torch.ones(2))
        with torch.no_grad():
            module(torch.ones(2))
        self.assertEqual(calls, ["watched"])
        each.remove()
        self.assertIs(module.forward, wrapper)
        module(torch.ones(2))
        self.assertEqual(calls, ["watched"])


if __name__ == "__main__":
    unittest.main()
