"""ForwardOrder: backward runs the same events in the same order on all ranks, whichever calls it reaches on one of them."""

import random
import unittest

from torch_ragged.fsdp.core._forward_order import Call, ForwardOrder


class Member:
    """A state that notes its events."""

    def __init__(self, name, events, reduces_unused=True, is_optional=False):
        self.name, self.events = name, events
        self.reduces_unused, self.is_optional = reduces_unused, is_optional

    def pre_backward(self, order, position):
        self.events.append(("pre", position))

    def post_backward(self, is_last):
        self.events.append(("post", self.name, is_last))


def run(order, skipped):
    """What the root does with the events that backward has skipped."""
    for position, is_pre_backward in skipped:
        member = order.states[position]
        if is_pre_backward:
            member.pre_backward(order, position)
        else:
            member.post_backward(order.is_first(position))


def forward(order, members, rng, depth=0):
    """Random calls inside each other; returns the events that autograd may reach, in the order of forward."""
    watched = []
    for _ in range(rng.randint(1, 3)):
        member = rng.choice(members)
        position = order.enter(member)
        has_inputs = rng.random() < 0.8 or member.is_optional
        if has_inputs:
            order.watch(position, is_exit=False)
            watched.append((position, False))
        if depth < 2 and rng.random() < 0.6:
            watched += forward(order, members, rng, depth + 1)
        order.watch(position, is_exit=True)
        watched.append((position, True))
    return watched


def first_calls(order):
    first = {}
    for position, member in enumerate(order.states):
        first.setdefault(member, position)
    return first


def backward(order, watched, reached, rng):
    """What autograd runs on a rank whose gradients reach some calls, and what the order runs for the others."""
    events, first = order.states[0].events, first_calls(order)
    events.clear()
    order.restart()
    for position, is_exit in reversed(watched):
        member = order.states[position]
        if position not in reached or (member.is_optional and not is_exit and rng.random() < 0.5):
            continue
        if is_exit:
            run(order, order.reach(position, is_exit=True))
            member.pre_backward(order, position)
        else:
            run(order, order.reach(position, is_exit=False))
            member.post_backward(first[member] == position)
    run(order, order.finish())
    return list(events)


def expected(order, watched, reached):
    first, result = first_calls(order), []
    for position, is_exit in reversed(watched):
        member = order.states[position]
        if is_exit and (position in reached or member.reduces_unused):
            result.append(("pre", position))
        elif not is_exit and (position in reached or member.reduces_unused or member.is_optional):
            result.append(("post", member.name, first[member] == position))
    return result


class ForwardOrderTest(unittest.TestCase):
    def test_all_ranks_run_the_same_events(self):
        for seed in range(300):
            rng, events = random.Random(seed), []
            kinds = [{}, {}, {"is_optional": True}] + [{"reduces_unused": False}] * (seed % 2)
            members = [Member(name, events, **kind) for name, kind in zip("abcd", kinds)]
            order = ForwardOrder()
            watched = forward(order, members, rng)
            for _ in range(3):
                reached = {position for position in range(len(order.states)) if rng.random() < 0.5}
                self.assertEqual(backward(order, watched, reached, rng), expected(order, watched, reached), (seed, reached))

    def test_the_first_call_of_a_module_reduces(self):
        order, member, other = ForwardOrder(), Member("a", []), Member("b", [])
        calls = [Call(order, each) for each in (member, other, member)]
        self.assertEqual([call.position for call in calls], [0, 1, 2])
        self.assertEqual([call.begun_in for call in calls], [-1] * 3)
        for call in reversed(calls):  # The inner call ends first.
            order.watch(call.position, is_exit=True)
        self.assertEqual([order.is_first(call.position) for call in calls], [True, True, False])
        self.assertEqual(Call(None, member).position, -1)

    def test_a_call_without_a_backward_does_not_count_as_the_first(self):
        order, member = ForwardOrder(), Member("a", [])
        first, second = Call(order, member), Call(order, member)
        self.assertEqual([order.is_first(call.position) for call in (first, second)], [True, True])
        order.watch(second.position, is_exit=True)
        self.assertTrue(order.is_first(second.position))

    def test_an_order_that_backward_has_not_reached_has_nothing_to_finish(self):
        order = ForwardOrder()
        order.watch(order.enter(Member("a", [])), is_exit=True)
        self.assertEqual(order.finish(), [])

    def test_an_event_may_reach_further_ones(self):
        class Reentrant(Member):
            def pre_backward(self, order, position):
                super().pre_backward(order, position)
                run(order, order.finish())

        events = []
        order = ForwardOrder()
        for name in "abc":
            position = order.enter(Reentrant(name, events))
            order.watch(position, is_exit=False)
            order.watch(position, is_exit=True)
        order.restart()
        run(order, order.finish())
        once = [("pre", 0), ("pre", 1), ("pre", 2), ("post", "a", True), ("post", "b", True), ("post", "c", True)]
        self.assertEqual(sorted(events), sorted(once))

    def test_events_that_backward_has_passed_do_not_run_again(self):
        events = []
        order, member, other = ForwardOrder(), Member("a", events), Member("b", events)
        for each in (member, other):
            position = order.enter(each)
            order.watch(position, is_exit=False)
            order.watch(position, is_exit=True)
        order.restart()
        run(order, order.reach(0, is_exit=True))
        run(order, order.reach(1, is_exit=True))  # Late: autograd reaches it after an earlier call.
        run(order, order.finish())
        run(order, order.finish())
        self.assertEqual(events, [("pre", 1), ("post", "b", True)])
