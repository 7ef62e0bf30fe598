"""The dry run of fit: the curve of events that are written down, steps of one process, and what stays as it was."""

import functools
import gc
import random
import sys
import unittest
from itertools import count
from types import SimpleNamespace
from unittest import mock

import numpy
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from torch_ragged.fsdp.budget._dry_run import Before, Curve, DryRun, RecordedCall, _untraced, unchanged
from torch_ragged.fsdp.budget._unit_forward import ActivationMode, KnownInputs, UnitForward

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


def curve_of(events, device=CPU, groups=None, blocked=()):
    events = sorted(events, key=lambda event: -event.start_ns())  # The profiler has no order.
    profiler = SimpleNamespace(profiler=SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: events)))
    groups = groups or {name: [SimpleNamespace(fqn=name)] for name in "ab"}
    dry_run = DryRun({}, groups, device)
    dry_run.blocked = dict.fromkeys(blocked, "")
    return dry_run._curve(profiler)


class CurveTest(unittest.TestCase):
    def test_peaks_and_calls_come_from_events(self):
        curve = curve_of(
            [
                memory(5, 100),
                memory(5, 1000, device=CUDA),
                block("all_gather (a)", 6, 7),
                block("fit/forward/0/a", 10, 30),
                memory(15, 50),
                memory(16, 8, GLOO),
                memory(20, -20),
                memory(25, -8, GLOO),
                block("fit/forward/1/b", 30, 60),
                memory(30, 4),  # After the end of a, and before the begin of b.
                memory(45, 70),
                memory(50, -60),
                memory(62, 16, GLOO),
                block("all_gather (b)", 65, 66, BACKWARD),
                memory(68, -26, GLOO),  # It frees 10 of the others.
                block("fit/again/1/b", 70, 90, BACKWARD),
                memory(75, 30, BACKWARD),
                memory(76, 5, BACKWARD),
                memory(77, 7),  # Of another thread than the recomputation's.
                memory(80, -12, BACKWARD),
                block("fit/again/0/a", 100, 120, BACKWARD),
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
        curve = curve_of([memory(1, 100), memory(2, 7, device=CUDA), block("fit/forward/0/a", 3, 4)], CUDA)
        self.assertEqual(curve.peaks, [7, 7, 7])

    def test_each_call_of_a_unit_runs_again(self):
        events = [block("fit/forward/0/a", 10, 20), block("fit/forward/1/a", 30, 40)]
        events += [block("fit/again/1/a", 50, 60), block("fit/again/0/a", 70, 80), block("fit/again/7/a", 90, 95)]
        curve = curve_of(events)
        self.assertEqual(curve.peaks, [0] * 11)
        self.assertEqual([call[:3] for call in curve.calls], [("a", 3, 4), ("a", 1, 2)])  # The third has no forward.
        self.assertEqual(curve.always, frozenset())

    def test_a_unit_that_does_not_run_again_is_always_recomputed(self):
        """What it would keep until the end of the step is not known."""
        events = [block(f"fit/forward/{at}/{name}", 10 * at, 10 * at + 5) for at, name in enumerate("aab", 1)]
        events += [block("all_gather (a)", 41, 42), block("fit/again/3/b", 45, 47), block("fit/again/2/a", 50, 60)]
        curve = curve_of(events)
        self.assertEqual(curve.always, {"a"})
        calls = [call for call in curve.calls if call.unit == "a"]
        self.assertEqual([sum(curve.kept_of(call).values()) for call in calls], [0, 0])
        self.assertEqual([call[:4] for call in calls], [("a", 1, 2, 7), ("a", 3, 4, 7)])

    def test_a_unit_that_runs_again_twice_keeps_until_the_last_time(self):
        curve = curve_of(
            [
                *(block("fit/forward/0/a", 10, 20), block("all_gather (a)", 25, 26)),
                *(block("fit/again/0/a", 30, 40), memory(31, 9), memory(32, -2), memory(45, -7)),
                *(block("all_gather (a)", 47, 48), block("fit/again/0/a", 50, 60), memory(51, 8), memory(52, -3)),
            ]
        )
        self.assertEqual((curve.always, curve.calls), (frozenset(), [RecordedCall("a", 1, 2, 3, 7, 8, 7, 9)]))

    def test_a_blocked_unit_may_stay_unsharded(self):
        events = [block("fit/forward/0/a", 10, 20), block("all_gather (a)", 30, 40), memory(35, 7)]
        curve = curve_of(events, blocked="a")
        self.assertEqual((curve.always, curve.calls), (frozenset(), [RecordedCall("a", 1, 2, 3, 2, 2, 0, 0)]))
        self.assertEqual((curve.kept_of(curve.calls[0]), curve.unsharded_of(curve.calls[0], 9)), ({1: 0}, {2: 9}))
        self.assertEqual(curve_of(events[:1], blocked="a").calls, [])

    def test_the_first_of_a_units_gathers_counts(self):
        events = [block("fit/forward/0/a", 10, 20), block("fit/again/0/a", 50, 60)]
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
        self.units = {
            name: [UnitForward(each, KnownInputs(name), activations=ActivationMode.RECOMPUTED)]
            for name, each in zip("ab", self.model)
        }
        self.dry = DryRun(self.units, {name: [] for name in "ab"}, CPU)
        self.dry._clock, self.steps = Clock(), 0

    def dry_run(self, step=None, others=lambda numbers: list(numbers)):
        return self.dry.run(step or self.step, Before(self.model), others)

    def step(self):
        self.steps += 1
        self.model[1](self.model(torch.randn(8, 8, requires_grad=True))).sum().backward()  # The second is called twice.

    def test_five_steps_give_the_curve_and_the_seconds_of_forwards(self):
        curve, seconds = self.dry_run()
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

        self.assertGreaterEqual(self.dry_run(step)[0].peaks[0], 1 << 20)

    def test_what_a_forward_holds_when_it_runs_again_is_not_kept(self):
        def forward(x):
            spare = torch.zeros(1 << 20, dtype=torch.uint8)
            return x.exp() + spare[0]

        self.units["b"][0]._before = forward
        self.assertEqual([call.kept for call in self.dry_run()[0].calls], [256] * 3)

    def test_an_error_of_a_forward_is_the_programs(self):
        self.units["b"][0]._before = lambda x: {}[x] if self.steps == 1 else x
        self.assertRaises(KeyError, self.dry_run)
        self.assertTrue(all(each.watch is None for units in self.units.values() for each in units))

    def test_a_forward_that_cannot_run_again_is_named(self):
        sizes, once = count(1), [1.0]
        for forward, what in (
            (lambda x: x[: next(sizes)].exp(), "makes other tensors when it runs again"),
            (lambda x: x.exp() + once.pop(), "raises IndexError when it runs again"),
        ):
            self.units["a"][0]._before = forward
            with self.assertRaisesRegex(ValueError, f"fit cannot recompute a: its forward {what}"):
                self.dry_run()

    def test_missing_memory_is_no_fault_of_a_forward(self):
        self.units["a"][0]._before = lambda x: x.exp() if self.steps == 1 and not self.dry._traits[0][1] else torch.empty(2**50)
        with self.assertRaisesRegex(RuntimeError, "DefaultCPUAllocator"):
            self.dry_run()

    def check_blocked(self, forward, why, others=lambda numbers: list(numbers)):
        self.units["a"][0]._before = forward
        curve, seconds = self.dry_run(others=others)
        self.assertEqual(self.dry.blocked, {"a": why} if why else {})
        self.assertEqual([self.units[name][0].activations is ActivationMode.RECOMPUTED for name in "ab"], [not why, True])
        self.assertEqual("backward of a" in curve.labels, not why)
        self.assertEqual(list(seconds), ["a", "b"])

    def test_a_forward_that_computes_other_values_again_is_not_recomputed(self):
        generator, calls = torch.Generator().manual_seed(0), count()
        other = "its forward computes other values when it runs again"
        for forward in (
            lambda x: x * torch.rand((), generator=generator),
            lambda x: {"y": (x, x.exp() + 1e-6 * next(calls))}["y"][1],
            lambda x: x.exp() + random.random(),
            lambda x: x.to(torch.complex64).mul(1j * next(calls)).abs(),
        ):
            self.setUp()
            self.check_blocked(forward, other)

    def test_equal_values_may_be_computed_again(self):
        for forward in (torch.sqrt, lambda x: x.exp() + float("nan"), lambda x: nn.functional.dropout(x)):
            self.setUp()
            self.check_blocked(forward, "")

    def test_other_ranks_decide_too(self):
        self.check_blocked(torch.exp, "it is not recomputed on another rank", lambda numbers: [1, 0])

    def test_a_checkpoint_of_the_program_is_enough(self):
        for use_reentrant in (False, True):
            self.setUp()
            x = torch.ones(8, 8, requires_grad=True)
            step = functools.partial(checkpoint, self.model, x, use_reentrant=use_reentrant)
            self.dry_run(lambda: step().sum().backward())  # noqa: B023
            self.assertEqual(self.dry.blocked, dict.fromkeys("ab", "it is inside of an activation checkpoint"))

    def test_buffers_that_a_forward_writes(self):
        """Also back to what they were, by another tensor, or without a count. A buffer that is only read is none."""
        inner = self.model[0][0]

        def replaces(x):
            inner.flag = inner.flag + 1
            return x.exp()

        for forward, is_written in (
            (lambda x: x * inner.flag.logical_not_(), True),
            (lambda x: x + inner.flag.data.add_(1), True),
            (replaces, True),
            (lambda x: x.exp() * inner.flag, False),
            (lambda x: (setattr(inner, "flag", inner.flag.clone()), x.exp())[1], False),
        ):
            self.setUp()
            inner = self.model[0][0]
            inner.register_buffer("flag", torch.ones(()))
            self.units["a"][0]._before = forward
            self.dry_run()
            self.assertEqual(self.dry.blocked.get("a"), "its forward writes 0.flag" if is_written else None)


class UntracedTest(unittest.TestCase):
    def test_the_compiler_is_asked_only_if_it_is_loaded(self):
        with mock.patch.dict(sys.modules), mock.patch.object(torch.compiler, "disable", lambda function, recursive: recursive):
            sys.modules["torch._dynamo"] = None
            self.assertIs(_untraced(len), False)
            del sys.modules["torch._dynamo"]
            self.assertIs(_untraced(len), len)


class UnchangedTest(unittest.TestCase):
    def test_generators_buffers_modes_and_gradients_are_as_before(self):
        model = nn.BatchNorm1d(3)
        before = torch.get_rng_state(), random.getstate(), {name: each.clone() for name, each in model.named_buffers()}
        numbers = numpy.random.get_state()[1].copy()
        with self.assertRaises(KeyError), unchanged(model, CPU):
            torch.rand(1), random.random(), numpy.random.rand()
            model(torch.ones(2, 3)).sum().backward()
            model.eval().register_buffer("new", torch.ones(1))
            raise KeyError
        self.assertTrue(torch.equal(torch.get_rng_state(), before[0]))
        self.assertEqual(random.getstate(), before[1])
        self.assertTrue((numpy.random.get_state()[1] == numbers).all())
        self.assertTrue(model.training)
        for name, buffer in before[2].items():
            self.assertTrue(torch.equal(model.get_buffer(name), buffer), name)
        self.assertTrue(all(param.grad is None for param in model.parameters()))

    def test_buffers_of_all_kinds(self):
        model, kept = nn.Module(), {}
        kept["empty"] = torch.zeros(0)
        kept["expanded"] = torch.ones(1, 3).expand(2, 3)
        with torch.inference_mode():
            kept["inference"] = torch.ones(2)
        kept["complex"], kept["nan"] = torch.ones((), dtype=torch.complex64), torch.tensor([torch.nan, 1.0])
        for name, buffer in kept.items():
            model.register_buffer(name, buffer)
        model.register_buffer("none", None)
        values = {name: buffer.tolist() for name, buffer in kept.items()}
        with unchanged(model, CPU) as before:
            self.assertIsNone(before.written_in(model))
            model.empty = torch.ones(2)
            with torch.inference_mode():
                model.inference.add_(1)
            model.complex.add_(1), model.nan.add_(1)
            self.assertEqual(before.written_in(model), "empty")
        for name, buffer in kept.items():
            self.assertIs(getattr(model, name), buffer)
            self.assertEqual(str(buffer.tolist()), str(values[name]))


class KnownInputsTest(unittest.TestCase):
    def test_no_dimension_may_be_larger_than_in_some_call(self):
        inputs = KnownInputs("blocks.0")
        known = [((torch.ones(2, 8), torch.ones(())), {}), ((torch.ones(4, 3),), {"mask": torch.ones(7)}), ((3,), {})]
        for args, kwargs in known:
            inputs.look(args, kwargs)
        inputs.is_open = False
        for args, kwargs in (*known, ((torch.ones(1, 8),), {}), ((torch.ones(4, 2), torch.ones(6)), {})):
            inputs.look(args, kwargs)
        for args in (
            (torch.ones(3, 8),),
            (torch.ones(5, 1),),
            (torch.ones(2, 8), torch.ones(()), torch.ones(())),
            (torch.ones(2),),
        ):
            with self.assertRaises(ValueError) as caught:
                inputs.look(args, {})
        self.assertIn(
            "the forward of blocks.0 got tensors of shapes (2,), and the steps of fit had no tensors, or (2, 8), ()",
            str(caught.exception),
        )
        inputs = KnownInputs("late", is_open=False)
        with self.assertRaisesRegex(
            ValueError, "the forward of late got tensors of shapes \\(2,\\), and the steps of fit had no such call"
        ):
            inputs.look((torch.ones(2),), {})


class RecomputeTest(unittest.TestCase):
    def test_the_programs_own_forward_runs_and_comes_back(self):
        module = nn.Linear(2, 2)
        own = module.forward = lambda x, times=2: times * x
        each = UnitForward(module, KnownInputs(""))
        self.assertIs(module.forward, each)
        self.assertEqual(str(each.__signature__), "(x, times=2)")
        self.assertEqual(module(torch.ones(1), times=3).tolist(), [3.0])
        each.remove()
        self.assertIs(module.forward, own)

    def test_a_forward_of_the_class_needs_none_of_its_own(self):
        module = nn.Linear(2, 2)
        each = UnitForward(module, KnownInputs(""))
        self.assertEqual(str(each.__signature__), "(input: torch.Tensor) -> torch.Tensor")
        each.remove()
        self.assertNotIn("forward", vars(module))

    def test_what_has_wrapped_it_stays_and_recomputes_nothing(self):
        module, calls = nn.Linear(2, 2), []
        each = UnitForward(
            module, KnownInputs(""), activations=ActivationMode.RECOMPUTED, watch=lambda inner: calls.append("watched") or inner
        )
        wrapper = module.forward = lambda x: each(x)
        module(torch.ones(2))
        with torch.no_grad():
            module(torch.ones(2))
        self.assertEqual(calls, ["watched"])
        each.remove()
        self.assertIs(module.forward, wrapper)
        each.watch = None
        module(torch.ones(2))
        self.assertEqual(calls, ["watched"])


if __name__ == "__main__":
    unittest.main()
