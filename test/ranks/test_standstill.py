"""Ranks that wait for each other in different calls: they are found, and all of them raise and name the calls."""

import datetime
import gc
import os
import sys
import threading
import time
import types
import unittest
import weakref
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from alone import ALONE, OTHERS, outcomes
from common import enter_fake_group, error_of, ranks, run_mortal_ranks, run_ranks
from soon import soon
from torch import nn

from torch_ragged._ranks import peers
from torch_ragged._ranks import standstill as module
from torch_ragged._ranks.groups import end_messages
from torch_ragged._ranks.peers import Fate, Tracker, Whereabouts, differing_settings, issued_on, peers_named
from torch_ragged._ranks.standstill import _standstill_text, _Watch, standstill
from torch_ragged._ranks.store import SharedStore
from torch_ragged.fsdp import fully_shard
from torch_ragged.fsdp.comm import _call_log
from torch_ragged.fsdp.comm._call_log import CallLog, Predictor

SIZE = 4
OTHER_SIZES = {("checkpoint.save", "a forward and backward"), ("full_tensor", "full_tensor of uneven shards")} | {
    (alone, f"full_tensor{of}")
    for alone in ("transfer.stream", "NeighbourCopies", "token_scale")
    for of in ("", " of uneven shards")
}


def computes():
    return Fate(True, "", Whereabouts("in a layer"))


def waits(call, ranks, tickets=(), issued=(), is_held=True):
    """A rank in ``call``; ``issued`` are the collectives of process group g, in their order."""
    numbers = {"g": dict(enumerate(issued, 1))}
    return Fate(True, "", Whereabouts(f"in {call}", call, ranks, is_held, list(tickets), numbers))


def ended():
    return Fate(False, "has ended")


class StandstillTest(unittest.TestCase):
    def check(self, expected, *fates):
        self.assertEqual(standstill(dict(enumerate(fates))), set(expected))

    def test_ranks_in_different_calls_wait_for_each_other_whatever_a_third_one_does(self):
        gather = waits("all-gather of a", [0, 1], [("g", 1)], ["all-gather of a"])
        self.check([0, 1], gather, waits("barrier", [0, 1, 2]), computes())
        self.check([0, 1, 2], gather, waits("barrier", [0, 1, 2]), waits("barrier", [0, 1, 2]))

    def test_ranks_in_one_call_wait_for_the_network(self):
        gather = waits("all-gather of a", [0, 1], [("g", 1)], ["all-gather of a"])
        self.check([], gather, gather)
        self.check([], waits("barrier", [0, 1]), waits("barrier", [0, 1]))

    def test_a_rank_that_computes_is_waited_for(self):
        gather = waits("all-gather of a", [0, 1], [("g", 1)], ["all-gather of a"])
        self.check([], gather, computes())
        # Rank 1 waits for rank 2 in a call without rank 0, and rank 2 computes.
        self.check([], gather, waits("barrier of the others", [1, 2]), computes())
        self.check([], gather, waits("barrier", [0, 1], is_held=False))

    def test_a_call_whose_ranks_are_not_known_may_wait_for_a_rank_that_computes(self):
        gather = waits("all-gather of a", [0, 1], [("g", 1)], ["all-gather of a"])
        self.check([], gather, waits("recv", None), computes())
        self.check([0, 1, 2], gather, waits("recv", None), waits("barrier", [0, 1, 2]))

    def test_a_collective_that_was_issued_ahead_needs_no_wait(self):
        names = ["all-gather of a", "all-gather of b"]
        self.check([], waits(names[0], [0, 1], [("g", 1)], names), waits(names[1], [0, 1], [("g", 2)], names))
        # This rank has come so far that the collective is remembered no more.
        far = Fate(True, "", Whereabouts("", "b", [0, 1], True, [("g", 99)], {"g": {98: "x", 99: "b"}}))
        self.check([], waits(names[0], [0, 1], [("g", 1)], names), far)

    def test_collectives_of_one_number_and_different_names_never_meet(self):
        one = waits("all-gather of a", [0, 1], [("g", 1)], ["all-gather of a"])
        self.check([0, 1], one, waits("agreement", [0, 1], [("g", 1)], ["agreement"]))

    def test_a_rank_that_has_ended_is_waited_for_in_vain(self):
        self.check([0, 1], waits("barrier", [0, 1, 2]), ended(), computes())
        self.check([1], computes(), ended(), waits("barrier of others", [0, 2]))

    def test_one_call_with_ranks_of_different_meshes_is_two_calls(self):
        odd, others = waits("fully_shard", [0, 2]), waits("fully_shard", [0, 1, 2, 3])
        self.check([0, 1, 2, 3], odd, others, others, others)
        text = _standstill_text(dict(enumerate([odd, others, others, others])), {0, 1, 2, 3})
        self.assertIn("rank 0 in fully_shard with ranks 0, 2; ranks 1, 2, 3 in fully_shard with ranks 0, 1, 2, 3. All", text)
        self.assertIn("All ranks must pass the same mesh", text)

    def test_two_waits_of_one_call_with_the_same_ranks_are_two_calls(self):
        store, reduced = waits("fully_shard", [0, 1]), waits("fully_shard", [0, 1], [("g", 1)], ["agreement"])
        self.check([0, 1], store, reduced)
        self.check([0, 1], waits("fully_shard", [0, 1], [("g", 1)], ["agreement on the mesh"]), reduced)

    def test_an_error_that_has_ended_a_rank_is_the_cause(self):
        fates = {
            0: waits("barrier", [0, 1]),
            1: Fate(False, "ended by ValueError: no (a.py:3)", error="ValueError: no (a.py:3)"),
        }
        expected = "rank 1 ended by ValueError: no (a.py:3); read its log. The others wait for it: rank 0 in barrier"
        self.assertEqual(_standstill_text(fates, {0, 1}), expected)
        self.assertIn("; rank 1 at the end of its program. All ranks", _standstill_text({0: fates[0], 1: ended()}, {0, 1}))

    def test_settings_that_differ_are_named(self):
        fates = {rank: waits(call, [0, 1, 2]) for rank, call in enumerate(["a", "a", "b"])}
        for rank, fate in fates.items():
            fate.where.settings.update({"sync of root": str(rank != 1), "prefetch of root": "None"})
        fates[3] = Fate(True, "", Whereabouts("in c", settings={"sync of another": "False"}))
        expected = "Settings differ: sync of root is True on ranks 0, 2 and False on rank 1. "
        self.assertEqual(differing_settings(fates), expected)
        self.assertIn(f". {expected}All ranks must make the same calls", _standstill_text(fates, {0, 1, 2}))
        self.assertEqual(differing_settings({0: fates[0], 2: fates[2], 3: fates[3]}), "")

    @ranks(1)
    def test_a_group_that_is_destroyed_meanwhile_keeps_no_other_from_its_end():
        watch, groups, closed = _Watch(), ["destroyed", "alive"], []

        def end(group, device):
            closed.append(group)
            if group == "destroyed":
                raise KeyError(group)  # As torch's table of groups.

        found = mock.patch.object(watch, "_find", lambda store: store.set("text", "told") or True)
        others = {"is_gloo": lambda *_: True, "end_messages": end, "Peers": mock.Mock(spec=peers.Peers)}
        with found, mock.patch.multiple(module, process_groups=lambda: groups, **others):
            watch._look()
            watch._look()  # It has told of this group already.
        assert closed == groups, closed
        for error in (KeyError, ValueError, RuntimeError, TypeError):
            with mock.patch.object(module.tracker, "look", side_effect=error):
                watch._look_if_held()

    @ranks(1)
    def test_one_rank_asks_at_a_time_and_looks_again_while_others_may_come():
        store, watch = SharedStore("asks"), _Watch()
        held, ended_1 = waits("all-gather", [0, 1]), {1: ended()}
        coming = {0: held, **ended_1, 2: waits("barrier", [0, 2], is_held=False)}

        def find(now, *answers):
            asks, pauses = mock.Mock(spec=module.fates_of, side_effect=answers), []
            clock = mock.Mock(spec=time, time=lambda: now, sleep=pauses.append)
            with mock.patch.multiple(module, fates_of=asks, time=clock):
                return watch._find(store), asks.call_count, pauses

        assert find(1000.0, {0: computes(), **ended_1}) == (False, 1, [])
        assert find(1003.0) == (False, 0, []), "a rank has asked lately"
        assert find(1010.0, {0: held, **ended_1}) == (True, 1, [1.5])
        assert find(1020.0, coming, coming, {**coming, 2: computes()}) == (True, 3, [1.0, 1.0, 1.5])
        assert find(1030.0, *[coming] * 4) == (True, 4, [1.0] * 4 + [1.5])
        with mock.patch.object(SharedStore, "swap", return_value="1040.5"):
            assert find(1040.0) == (False, 0, []), "another rank asks at once"

    def test_the_end_of_a_program_waits_for_the_thread_that_watches(self):
        watch = _Watch()
        watch._end()
        watch._thread = mock.Mock(spec=threading.Thread)
        for is_alive in (False, True):
            watch._thread.is_alive.return_value = is_alive
            watch._end()
        watch._thread.join.assert_called_once_with(module._LONGEST_END)

    @ranks(2)
    def test_the_settings_are_those_of_the_root_of_the_last_forward():
        models, found = [fully_shard(nn.Linear(SIZE, SIZE)) for _ in range(2)], []
        models[1].set_requires_gradient_sync(False)
        for model in (*models, models[0]):
            model(torch.ones(1, SIZE))
            found.append({name: text for name, text in module.tracker.settings()().items() if "gradient_sync" in name})
        assert found[0] == found[2] and [list(each.values()) for each in found] == [["True"], ["False"], ["True"]], found

    def test_a_rank_that_does_not_answer_may_be_anywhere(self):
        silent = Fate(True, "has not answered")
        self.check([], waits("all-gather of a", [0, 1], [("g", 1)], ["all-gather of a"]), silent)
        self.check([0, 1], waits("barrier", [0, 1]), waits("all-reduce", [0, 1]), silent)

    def test_all_ways_in_which_one_rank_is_alone_are_errors_on_all_ranks(self):
        self.check_alone("a forward without gradients", "barrier")
        self.check_alone("reshard_to", "full_tensor of uneven shards")

    @pytest.mark.slow
    def test_each_way_in_which_one_rank_is_alone_is_an_error_on_all_ranks(self):
        for alone in ALONE:
            for others in OTHERS:
                # Messages of different sizes meet on one group: gloo itself ends the process, or waits until the timeout.
                if alone != others and (alone, others) not in OTHER_SIZES:
                    with self.subTest(alone=alone, others=others):
                        self.check_alone(alone, others)

    def check_alone(self, alone, others):
        found = outcomes(alone, others, True)
        waiting = [0] if others == "the end of the program" else [0, 1, 2]
        texts = []
        for rank in waiting:
            error, logged, seconds = found[rank]
            self.assertTrue(error, (rank, alone, others))
            self.assertLess(seconds, 30)  # The timeout is 50 s.
            texts.append(error + logged)
        named = [text for text in texts if "ranks 1, 2" in text or "rank 1 died" in text]
        self.assertTrue(named and all("rank 0" in text or "died" in text for text in named), texts)


class TrackerTest(unittest.TestCase):
    def setUp(self):
        enter_fake_group(self, 2)
        self.end, self.entered = threading.Event(), threading.Event()
        self.tracker = Tracker()

    def in_thread(self, function):
        def run():
            self.tracker.watch_this_thread()
            function()

        thread = threading.Thread(target=run)
        self.addCleanup(thread.join)
        self.addCleanup(self.end.set)
        thread.start()
        self.entered.wait()

    def waits_in_a_call(self):
        with peers_named("all-gather", "weight", lambda: [0, 1], [issued_on(dist.group.WORLD).issue("all-gather of weight")]):
            self.entered.set()
            self.end.wait()

    def test_a_thread_that_stays_in_a_call_is_held(self):
        self.in_thread(self.waits_in_a_call)
        with mock.patch.object(peers, "HELD", 1e-9):  # Each look sees a thread held that the look before has seen there.
            self.assertFalse(self.tracker.look().is_held)
            where = self.tracker.look()
            self.assertTrue(where.is_held)
            self.assertEqual((where.call, where.ranks), ("all-gather of weight", [0, 1]))
            self.assertEqual(where.tickets, [(dist.group.WORLD.group_name, 1)])
            self.assertEqual(where.issued[dist.group.WORLD.group_name], {1: "all-gather of weight"})
            self.assertRegex(where.text, r"in all-gather of weight, called in waits_in_a_call \(test_standstill.py:\d+\)")
            with open(os.devnull, "wb") as other:  # Something is on its way.
                other.write(bytes(2**17))
            self.assertFalse(self.tracker.look().is_held)
            self.assertTrue(self.tracker.look().is_held)
            with mock.patch.object(peers, "_bytes_written") as written:  # Up to 64 KiB are no work: such as a log.
                for nbytes, is_held in ((2**40, False), (2**40 + 2**16, True), (2**40 + 2**16 + 1, False)):
                    written.return_value = nbytes
                    self.assertEqual(self.tracker.look().is_held, is_held, nbytes)
            with mock.patch.object(peers, "_cpu_time", return_value=1e6):  # It computes.
                self.assertFalse(self.tracker.look().is_held)
        with mock.patch.object(time, "pthread_getcpuclockid", side_effect=OSError):  # Not known on each system.
            self.assertEqual(peers._cpu_time(self.tracker._thread), 0)

    def test_a_thread_outside_of_calls_runs(self):
        def leaves_a_call():
            with peers_named("all-gather", "weight", lambda: [0, 1]):
                pass
            self.entered.set()
            self.end.wait()

        self.assertEqual(self.tracker.look().call, "")  # This thread is in a function of the package.
        self.in_thread(leaves_a_call)
        where = self.tracker.look()
        self.assertEqual((where.call, where.is_held), ("", False))

    @ranks(2)
    def test_calls_of_torch_have_names_and_ranks():
        """Rank 0 waits in each of them until it has been seen there."""
        one, both = torch.ones(1), dist.new_group([0, 1])
        calls = {
            f"barrier of process group {dist.group.WORLD.group_name}": [dist.barrier] * 2,
            f"monitored_barrier of process group {dist.group.WORLD.group_name}": [dist.monitored_barrier] * 2,
            f"all_reduce of process group {both.group_name}": [lambda: dist.all_reduce(one, group=both)] * 2,
            "send": [lambda: dist.send(one, 1), lambda: dist.recv(one, 0)],
            "recv": [lambda: dist.recv(one, 1), lambda: dist.send(one, 0)],
        }
        store = dist.distributed_c10d._get_default_store()
        for name, (waits_in, comes_late) in calls.items():
            if dist.get_rank() == 1:
                store.wait([f"seen in {name}"])
                comes_late()
                continue
            tracker, program = Tracker(), lambda waits_in=waits_in: waits_in()
            thread = threading.Thread(target=program)
            thread.start()
            tracker._thread = thread.ident
            while not (where := tracker.look()).call:
                pass
            store.set(f"seen in {name}", "")
            thread.join()
            assert (where.call, where.ranks) == (name, [0, 1] if " of " in name else None), where

    def test_a_collective_that_the_package_calls_itself_has_a_name_and_ranks(self):
        def frame(file, name, **local):
            code = types.SimpleNamespace(co_filename=file, co_name=name)
            return types.SimpleNamespace(f_code=code, f_locals=local)

        group, own = dist.new_group([0, 1]), str(Path(peers.__file__).parents[1] / "tensor/_exchange.py")
        callers = [frame(own, "redistribute"), frame("train.py", "step")]
        found = peers._call_of_torch([frame(own, "all_gather", group=group), *callers])
        self.assertEqual((found.what, found.ranks()), (f"redistribute of process group {group.group_name}", [0, 1]))
        for other in (frame(own, "all_gather"), frame(own, "gather", group=group), frame("a.py", "all_gather", group=group)):
            self.assertIsNone(peers._call_of_torch([other, *callers]))

    def test_a_look_keeps_no_tensor_of_the_program(self):
        """Looks come once a second, also while a training loop is in its own lines: what it drops afterwards is freed."""
        looked, dropped, freed = [], threading.Event(), threading.Event()
        self.addCleanup(looked.append, None)

        def program():
            tensor = torch.ones(1)
            weakref.finalize(tensor, freed.set)
            self.entered.set()
            while not looked:  # Without a call: the look finds this function.
                pass
            del tensor
            dropped.set()
            while not self.end.is_set():
                pass

        self.in_thread(program)
        self.tracker.look()
        looked.append(None)
        dropped.wait()
        self.assertTrue(freed.is_set())

    def test_the_thread_cannot_run_while_its_stack_is_read(self):
        """The GIL changes hands between bytecodes: a look whose own code gets the first frame could lose it before the next."""
        self.in_thread(self.waits_in_a_call)
        calls = []
        sys.setprofile(lambda frame, event, argument: calls.append(argument) if event == "c_call" else None)
        try:
            where = self.tracker.look()
        finally:
            sys.setprofile(None)
        self.assertRegex(where.text, r"called in waits_in_a_call \(test_standstill.py")
        self.assertIn(gc.disable, calls)
        self.assertTrue(gc.isenabled())
        with mock.patch.object(gc, "isenabled", return_value=False), mock.patch.object(gc, "enable") as enable:
            self.tracker.look()
        enable.assert_not_called()  # A program that has switched it off does not find it on.
        self.assertNotIn(sys._current_frames, calls)

    def test_what_is_sent_is_what_arrives(self):
        self.in_thread(self.waits_in_a_call)
        where = self.tracker.look()
        self.assertEqual(Whereabouts.from_json(where.to_json()), where)


def check_calls_of_the_store():
    """Each rank adds to one counter for a call that was not expected, and asks whether it is full."""
    counts = {name: 0 for name in ("add", "set", "get", "swap", "append", "delete")}

    def counted(name, method):
        def call(store, *arguments):
            counts[name] += 1
            return method(store, *arguments)

        return call

    model = nn.Sequential(*(fully_shard(nn.Linear(SIZE, SIZE)) for _ in range(3)))
    fully_shard(model)
    dist.barrier()
    with mock.patch.multiple(SharedStore, **{name: counted(name, getattr(SharedStore, name)) for name in counts}):
        model(torch.ones(1, SIZE))
        first = dict(counts)
        model(torch.ones(1, SIZE))
    return first, counts


class Paths(nn.Module):
    """A model with two ways through it."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = (nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(2)) for _ in range(2))

    def forward(self, x, decodes):
        for layer in self.decoder if decodes else self.encoder:
            x = layer(x)
        return x


def check_alternating_paths():
    model = Paths()
    for layer in (*model.encoder, *model.decoder):
        fully_shard(layer)
    fully_shard(model)
    counts, count = [], CallLog._count

    def counted(log, *arguments):
        counts[-1] += 1
        return count(log, *arguments)

    with mock.patch.object(_call_log.CallLog, "_count", counted):
        for step in range(12):
            counts.append(0)
            model(torch.ones(1, SIZE), step % 2 == 1).sum().backward()
        for step in range(6):  # A switch at a moment that nothing predicts.
            counts.append(0)
            model(torch.ones(1, SIZE), step > 2).sum().backward()
    return counts


def end_messages_beside_a_dead_rank():
    """The first peer of rank 1 is dead; rank 2 waits for rank 1."""
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        os._exit(0)
    if dist.get_rank() == 1:
        while error_of(dist.recv, torch.empty(1), 0) == "":  # Until its end is seen here.
            pass
        store.wait(["rank 2 waits"])
        end_messages(dist.group.WORLD, torch.device("cpu"))
        return ""
    work = dist.irecv(torch.empty(1), 1)
    store.set("rank 2 waits", "")
    return error_of(work.wait)


@soon()
@mock.patch.dict(os.environ, {"TORCH_RAGGED_WATCH": "0"})
def call_beside_a_dead_rank():
    """Rank 1 ends before it makes a call, for which rank 0 waits. Nobody watches, as over NCCL."""
    log = CallLog([0, 1], datetime.timedelta(seconds=300), "root")
    log.start()
    dist.barrier()
    if dist.get_rank() == 1:
        os._exit(0)
    return error_of(log.add, "a")


def check_other_expectations():
    """Rank 1 expects the first call, so it does not count itself; rank 0 waits for it there, and rank 1 at the second call."""
    log = CallLog([0, 1], datetime.timedelta(seconds=30), "root")
    if dist.get_rank() == 1:
        log._paths.add(("a", "b"))
    counts, count = [], SharedStore.add
    with (
        mock.patch.object(_call_log, "_CALL_SLICE", datetime.timedelta(milliseconds=50)),
        mock.patch.object(SharedStore, "add", lambda store, *each: counts.append(each) or count(store, *each)),
    ):
        log.start()
        for call in ("a", "c", "d"):
            log.add(call)
        log.finish()
    return [key for key, _ in counts if key.startswith("1/") and key.count("/") == 2]


class CallLogTest(unittest.TestCase):
    def test_a_call_costs_each_rank_one_counter(self):
        answers = run_ranks(2, check_calls_of_the_store)
        calls = 4 + 1  # The root and its modules; the root among roots.
        for first, both in answers:
            self.assertEqual((first["add"], first["get"], first["append"], first["swap"]), (calls, 0, 0, 0))
            self.assertEqual(both, first)  # The second forward is expected.
        sets = sum(first["set"] for first, _ in answers)
        self.assertLessEqual(sets, calls + 4)  # Of all ranks together; and each rank's address.

    def test_paths_that_alternate_are_expected(self):
        for counts in run_ranks(2, check_alternating_paths):
            self.assertEqual(counts[4:12], [0] * 8)
            self.assertTrue(all(count <= 1 for count in counts[12:]), counts)

    def test_ranks_that_expect_different_calls_and_make_the_same_ones_go_on(self):
        for keys in run_ranks(2, check_other_expectations):
            self.assertEqual(len(keys), len(set(keys)))  # No rank counts twice.

    @ranks(2)
    def test_the_end_of_a_forward_waits_for_no_rank():
        """Rank 0 ends its first forward, and so may end its program, before rank 1 does."""
        model = nn.Sequential(nn.Linear(SIZE, SIZE))
        fully_shard(model)
        store = dist.distributed_c10d._get_default_store()
        if dist.get_rank() == 1:
            model[0].register_forward_hook(lambda *_: store.wait(["rank 0 has ended its forward"]))
        with torch.no_grad():
            model(torch.ones(1, SIZE))
        if dist.get_rank() == 0:
            store.set("rank 0 has ended its forward", "")

    def test_a_call_beside_a_dead_rank_raises_long_before_the_timeout(self):
        text = run_mortal_ranks(2, {1}, call_beside_a_dead_rank)[0]
        self.assertRegex(text, "PeerError: the forward of root failed: rank 1 died")

    @ranks(1)
    def test_a_call_that_other_ranks_do_not_make_in_time_tells_where_they_are():
        log, there = CallLog([0], datetime.timedelta(0), "root"), types.SimpleNamespace(text="is in a layer")
        log.start()
        with (
            mock.patch.object(SharedStore, "wait", lambda *_: False),
            mock.patch.object(_call_log, "fates_of", lambda _: dict.fromkeys((1, 2), there)),
        ):
            text = error_of(log.add, "a")
        told = "rank 0 waited 0 s for the other ranks to call it: rank 1 is in a layer; rank 2 is in a layer"
        assert text.startswith("PeerError: the forward of root failed") and told in text, text

    @ranks(1)
    def test_collectives_behind_the_end_of_a_forward_are_not_compared():
        log = CallLog([0], datetime.timedelta(seconds=30), "root")
        with mock.patch.object(_call_log._RootLog, "of") as roots:
            log.start()
            log.finish()
            log.before_collective()
            assert not roots.called
            log.start()
            log.before_collective()
            log.before_collective()
            assert roots.call_count == 1

    @ranks(2)
    @soon()
    @mock.patch.object(_call_log, "_FIRST_SLICE", datetime.timedelta(milliseconds=50))
    @mock.patch.object(_call_log, "_CALL_SLICE", datetime.timedelta(milliseconds=50))
    def test_a_difference_in_the_last_forward_is_found_by_a_rank_that_is_in_the_next_one():
        log, named, wait = CallLog([0, 1], datetime.timedelta(seconds=30), "root"), [], SharedStore.wait

        def noted(store, keys, seconds):
            found = wait(store, keys, seconds)
            named.extend(found for key in keys if key.endswith("/named"))
            return found

        log._paths.add(("a", "b", _call_log._END))
        log.start()
        log.add("a")
        if dist.get_rank() == 0:
            log.add("b")  # As expected: it does not wait for the other rank.
            log.finish()
            log.start()
        with mock.patch.object(SharedStore, "wait", noted):
            text = error_of(log.add, "c")
        assert "different modules in forward (rank 0: b; rank 1: c)" in text, text
        assert named == [True], named  # Each rank has told its call: none waits for the others' patience.

    @ranks(2)
    @soon()
    def test_what_ranks_have_called_in_one_root_says_nothing_of_another():
        logs = [CallLog([0, 1], datetime.timedelta(seconds=30), "root") for _ in range(2)]
        texts = []
        for log, call in zip(logs, ("a", "ab"[dist.get_rank()]), strict=True):
            log.start()
            texts.append(error_of(log.add, call))
        assert texts[0] == "" and "different modules in forward (rank 0: a; rank 1: b)" in texts[1], texts
        log = CallLog([0, 1], datetime.timedelta(seconds=30), "Net")
        log.start()
        with torch.set_grad_enabled(dist.get_rank() == 1):
            text = error_of(log.add, "root")
        assert "with gradients and without them (rank 0: Net without gradients; rank 1: Net)" in text, text
        assert "optional" not in text, text

    @ranks(1)
    def test_the_store_keeps_what_the_last_call_of_each_root_has_written():
        """Forwards that nothing predicts, and roots that are gone, leave no more there."""
        keys, kept = set(), []

        def noted(name, change):
            method = getattr(SharedStore, name)

            def call(store, key, *arguments):
                change((store._store, key))
                return method(store, key, *arguments)

            return call

        changes = {"add": keys.add, "set": keys.add, "delete": keys.remove}
        with mock.patch.multiple(SharedStore, **{name: noted(name, change) for name, change in changes.items()}):
            for root in range(4):
                log = CallLog([0], datetime.timedelta(seconds=30), "root")
                for forward in range(3):
                    log.start()
                    for call in range(3):
                        log.add(f"{root} {forward} {call}")
                    log.finish()
                kept.append(len(keys))
                del log
                gc.collect()
        assert kept == kept[:1] * 4, kept


class EndMessagesTest(unittest.TestCase):
    def test_all_connections_close_if_the_first_peer_is_dead(self):
        answers = run_mortal_ranks(3, {0}, end_messages_beside_a_dead_rank, seconds=40)
        self.assertRegex(answers[2], "Connection (closed|reset) by peer")


class PredictorTest(unittest.TestCase):
    def test_what_has_followed_is_expected(self):
        paths, a, b = Predictor(), ("root", "a"), ("root", "b")
        self.assertEqual(paths.expected(), ())
        for path in (a, b) * 4:
            paths.add(path)
        self.assertEqual(paths.expected(), a)
        paths.add(a)
        self.assertEqual(paths.expected(), b)
        self.assertEqual(paths.beginning_with(["root", "a"]), None)
        self.assertEqual(paths.beginning_with(["root"]), a)

    def test_memory_is_bounded(self):
        paths = Predictor()
        for index in range(5000):
            paths.add((str(index),))
        self.assertLessEqual(len(paths._paths), 16)
        self.assertLessEqual(len(paths._followed), 1024 + 7)
