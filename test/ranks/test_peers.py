"""A collective that has failed: what this rank says of it, and what it learns from the reports of others."""

import os
import unittest
from unittest import mock

import torch
import torch.distributed as dist
from common import enter_fake_group, error_of, ranks
from soon import soon

from torch_ragged._ranks.agreement import agree, before_groups
from torch_ragged._ranks.peers import (
    STANDSTILL,
    CollectiveFailed,
    PeerError,
    Peers,
    is_of_backend,
    listen,
    name_of,
    peers_named,
)
from torch_ragged._ranks.store import SharedStore


def attributes_of(error):
    return error.ranks, error.collective, error.parameters


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

    def raised_in_a_call(self, error):
        peers = mock.Mock(spec=Peers)
        peers.error.return_value = PeerError("all-gather failed")
        with mock.patch.object(Peers, "of", return_value=peers):
            with peers_named("all-gather", "", lambda: [0, 1]):
                raise error


if __name__ == "__main__":
    unittest.main()
