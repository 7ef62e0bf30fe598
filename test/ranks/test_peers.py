"""A collective that has failed: what this rank says of it, and what it learns from the reports of others."""

import os
import signal
import socket
import sys
import threading
import time
import unittest
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import context_of_ranks, enter_fake_group, error_of, ranks
from soon import soon

from torch_ragged._ranks import peers
from torch_ragged._ranks.agreement import agree, before_groups
from torch_ragged._ranks.peers import (
    STANDSTILL,
    CollectiveFailed,
    PeerError,
    Peers,
    fates_of,
    is_of_backend,
    listen,
    name_of,
    peers_named,
    wait_for,
)
from torch_ragged._ranks.store import SharedStore


def attributes_of(error):
    return error.ranks, error.collective, error.parameters


def raises_on_rank_1(rank, port):
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    listen()
    if rank == 1:
        store.wait(["rank 0 listens"])
        raise ValueError("no such batch")
    # torch's parent process would end this one by SIGTERM, as soon as the other one has ended.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    store.set("rank 0 listens", "")
    while (fate := fates_of([1])[1]).is_alive:
        pass
    store.set("text", fate.text)


class PeersTest(unittest.TestCase):
    @ranks(2)
    def test_a_failure_on_one_rank_is_one_of_all():
        rank = dist.get_rank()
        listen()
        Peers.of([0, 1])
        if rank == 1:
            error = Peers.of([0, 1]).error("all-gather", "closed by peer", "weight")
        else:  # It computes, or waits in another collective.
            SharedStore(f"peers/{name_of([0, 1])}").wait(["failed"], 60)
            found = error_of(Peers.check_all)
            assert found == "CollectiveFailed: another rank has reported that a collective failed", found
            error = Peers.of([0, 1]).error("barrier", "timed out")
        assert str(error) == (
            f"{'all-gather of weight' if rank else 'barrier'} failed: all ranks live, so the network failed, or a collective "
            "took longer than its timeout: rank 0: barrier: timed out; rank 1: all-gather: closed by peer"
        ), error
        assert attributes_of(error) == ((), "all-gather" if rank else "barrier", "weight" if rank else ""), error
        # Ranks that are left may go on with each other, and wait no more for those that failed.
        for others, goes_on in (([2, 3], True), ([1, 2], False)):
            with peers_named("all-reduce", "", lambda others=others: others):
                assert peers_named.current_ranks() == set(others)
                assert (error_of(Peers.check_all) == "") == goes_on, others
        assert peers_named.current_ranks() == set()

    @ranks(1)
    def test_ranks_that_wait_for_each_other_are_the_cause():
        SharedStore(STANDSTILL).set("text", "ranks wait for each other")
        error = Peers([0]).error("all-gather", "closed by peer", "weight")
        assert str(error) == "all-gather of weight failed: ranks wait for each other", error

    def test_a_store_that_is_lost_is_told_with_its_host(self):
        enter_fake_group(self, 2)
        there, agent = {"MASTER_ADDR": "node7"}, {"TORCHELASTIC_USE_AGENT_STORE": "True"}
        kept = {name: value for name, value in os.environ.items() if name not in (*there, *agent)}
        for variables, where in (
            ({}, "(in the process of rank 0)"),
            (there, "at node7 (in the process of rank 0)"),
            ({**there, **agent}, "at node7 (in torchrun)"),
        ):
            lost = mock.patch.object(Peers, "_find_blame", side_effect=dist.DistNetworkError("no route"))
            with mock.patch.dict(os.environ, {**kept, **variables}, clear=True), lost:
                error = Peers([0, 1]).error("all-gather", "closed by peer", "weight")
            text = f"all-gather of weight failed: closed by peer. The store of the process group {where} is lost, too, or the "
            self.assertEqual(str(error)[: len(text)], text)
            self.assertEqual(attributes_of(error), ((), "all-gather", "weight"))

    def test_errors_of_a_backend_are_known_by_their_text_or_type(self):
        for error, expected in (
            (RuntimeError("[third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1"), True),
            (RuntimeError("Application timeout caused pair closure"), True),
            (CollectiveFailed("another rank has reported it"), True),
            (dist.DistBackendError("NCCL error"), True),
            (RuntimeError("shape '[2]' is invalid for input of size 3"), False),
        ):
            self.assertEqual(is_of_backend(error), expected, error)
            found = error_of(self.raised_in_a_call, error)
            self.assertTrue(found.startswith("PeerError: all-gather failed" if expected else "RuntimeError: shape"), found)

    @ranks(2)
    @soon()
    def test_a_group_in_which_a_rank_has_waited_in_vain_matches_nothing_more():
        rank, group, store = dist.get_rank(), dist.new_group([0, 1]), dist.distributed_c10d._get_default_store()

        def call():
            with before_groups("call()"):
                if rank == 1:
                    raise TypeError("no")
                agree([group], torch.device("cpu"), "call()", "same", None)

        error = error_of(call)
        assert error == ("TypeError: no" if rank else "PeerRaised: call() failed on rank 1: TypeError: no"), error
        if rank == 0:
            store.set("has raised", "")
        else:  # What rank 0 has sent is no answer to this.
            store.wait(["has raised"])
            assert error_of(dist.all_reduce, torch.ones(3, dtype=torch.int64), dist.ReduceOp.MIN, group).startswith("RuntimeE")

    @ranks(1)
    def test_the_attempts_of_torchrun_on_one_host_share_no_key():
        """Between hosts, agents count restarts differently: their ranks must find the same keys."""
        host = {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        for hosts, is_new in ((host, True), ({**host, "WORLD_SIZE": "2"}, False)):
            with mock.patch.dict(os.environ, {**hosts, "TORCHELASTIC_RESTART_COUNT": "0"}):
                SharedStore("some").set("key", "")
            with mock.patch.dict(os.environ, {**hosts, "TORCHELASTIC_RESTART_COUNT": "1"}):
                assert SharedStore("some").has("key") != is_new, hosts

    def test_the_error_that_ends_a_rank_is_told_to_others(self):
        """As mp.spawn starts it, which exits while it handles the error."""
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = context_of_ranks()
        method = context.get_start_method()
        started = mp.start_processes(raises_on_rank_1, (store.port,), 2, join=False, start_method=method)
        with self.assertRaises(mp.ProcessRaisedException):
            while not started.join(100, 100):
                pass
        store.wait(["text"])
        self.assertRegex(store.get("text").decode(), r"^ended by ValueError: no such batch \(test_peers.py:\d+\)$")

    @ranks(1)
    def test_the_error_of_a_program_is_told_unless_another_rank_is_its_cause():
        listener = peers._Listener()
        with mock.patch.object(sys, "last_value", ValueError("too early"), create=True):
            listener._tell_end()  # It has announced nothing yet.
        processes = SharedStore("processes")
        assert processes.get("ended 0") == "ValueError: too early", processes.get("ended 0")
        processes.delete("ended 0")
        listener.announce()
        for error, is_told in (
            (None, False),
            (PeerError("rank 1 died"), False),
            (RuntimeError("Application timeout caused pair closure"), False),
            (RuntimeError("no such\nbatch"), True),
        ):
            with mock.patch.object(sys, "last_value", error, create=True):
                listener._tell_end()
            assert listener._announced.has("ended 0") == is_told, error
        assert listener._announced.get("ended 0") == "RuntimeError: no such", listener._announced.get("ended 0")
        listener._stop()

    def test_threads_in_the_background_end_silently_with_the_process_group(self):
        with mock.patch("threading.excepthook") as hook:
            peers._Probe(0)  # There is no process group.
            with mock.patch.object(peers.tracker, "look", side_effect=KeyError):
                ours, theirs = socket.socketpair()
                ours.sendall(b"token")
                peers._answer(theirs, "token", threading.Semaphore(0))
            ours.close()
            for thread in [each for each in threading.enumerate() if each.name == "probe"]:
                thread.join()
        hook.assert_not_called()

    def test_a_wait_looks_at_other_ranks_and_asks_after_five_slices(self):
        work, look = mock.Mock(spec=dist.Work), mock.Mock(spec=threading.Thread.start)
        work.is_completed.return_value = False
        work.wait.side_effect = [*[RuntimeError("timed out")] * 6, None]
        with mock.patch.object(Peers, "check_all") as check:
            wait_for(work, look)
        self.assertEqual([call.kwargs for call in check.call_args_list], [{"probes": number > 4} for number in range(1, 7)])
        self.assertEqual(look.call_count, 6)

    def test_a_probe_without_an_answer_is_stale_after_40_seconds(self):
        probe = peers._Probe(0)
        for age, expected in ((39, False), (41, True)):
            probe._begin = time.monotonic() - age
            self.assertEqual(probe.is_stale, expected)

    @ranks(1)
    def test_an_agreement_that_fails_is_named():
        closed = mock.patch.object(dist, "all_gather_object", side_effect=CollectiveFailed("closed by peer"))
        with closed:
            try:
                agree([dist.group.WORLD], torch.device("cpu"), "call()", "same", TypeError("no"))
                raise AssertionError("it has failed")
            except PeerError as error:
                assert attributes_of(error) == ((), "call()", ""), attributes_of(error)

    @ranks(1)
    def test_a_rank_tells_of_its_own_errors_and_not_of_a_dead_peer():
        def fails(error):
            with before_groups("tells()"):
                raise error

        for number, (error, is_told) in enumerate(((PeerError("rank 1 died"), False), (TypeError("no"), True)), 1):
            assert error_of(fails, error) == f"{type(error).__name__}: {error}"
            assert SharedStore(f"refused/tells()/{number}").has("any") == is_told, error

    def raised_in_a_call(self, error):
        peers = mock.Mock(spec=Peers)
        peers.error.return_value = PeerError("all-gather failed")
        with mock.patch.object(Peers, "of", return_value=peers):
            with peers_named("all-gather", "", lambda: [0, 1]):
                raise error


if __name__ == "__main__":
    unittest.main()
