"""A rank that dies, stops, or runs something else: the other ranks raise, and their errors name it."""

import contextlib
import os
import re
import signal
import unittest

import pytest
import torch
import torch.distributed as dist
from common import error_of, ranks, run_mortal_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torch_ragged import PeerError
from torch_ragged._ranks import peers
from torch_ragged.fsdp import fully_shard
from torch_ragged.optim import Muon

SIZE = 8


def setup_peers():
    """Tests need not wait long for ranks that will not report."""
    peers._PATIENCE = 1.0


def sharded_model(mesh=None, **options):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(3)))
    for layer in model:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def step(model):
    model(torch.full((2, SIZE), 1.0 + dist.get_rank())).square().sum().backward()


def peer_error(function, *arguments):
    """The ranks, collective and parameters of the PeerError that a call raises, and its text."""
    try:
        function(*arguments)
    except PeerError as error:
        return error.ranks, error.collective, error.parameters, str(error)
    raise AssertionError("no PeerError")


def fail_at(module, signal_, is_backward):
    """Rank 1 gets a signal before the forward of ``module``, or in backward."""

    def hook(*_):
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal_)

    if is_backward:
        module.register_forward_pre_hook(lambda _, inputs: inputs[0].register_hook(hook) and None)
    else:
        module.register_forward_pre_hook(hook)


def fail_in_a_step(signal_, is_backward):
    setup_peers()
    model = sharded_model()
    step(model)
    fail_at(model[1], signal_, is_backward)
    first = peer_error(step, model)
    # What is still in flight fails at once, and a later collective names the same rank.
    for layer in model:
        with contextlib.suppress(PeerError):
            layer.reshard()
    second = peer_error(model[0].unshard)
    return first, second


def fail_before(what):
    setup_peers()
    mesh = init_device_mesh("cpu", (2,))
    if what == "construction" and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    model = sharded_model(mesh)
    if what == "first forward" and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return peer_error(step, model)


def construct_late():
    setup_peers()
    mesh = init_device_mesh("cpu", (2,))
    if dist.get_rank() == 1:
        signal.pause()
    return peer_error(sharded_model, mesh)


def die_in_an_optimizer():
    model = sharded_model()
    optimizer = Muon([each for each in model.parameters() if each.ndim == 2])
    step(model)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return peer_error(optimizer.step)


class PeersTest(unittest.TestCase):
    def check_named(self, answer, collective, parameters=""):
        ranks, found, what, text = answer
        self.assertEqual((ranks, found), ((1,), collective))
        self.assertIn(parameters, what)
        self.assertRegex(text, rf"^{collective}( of .*)? failed: rank 1 died: process \d+ on host \S+ has ended\. This rank: ")

    def test_a_rank_that_dies_in_forward_is_named_with_the_collective_and_the_parameters(self):
        for first, second in run_mortal_ranks(3, {1}, fail_in_a_step, signal.SIGKILL, False).values():
            self.check_named(first, "all-gather", "weight and 1 more in ")
            self.check_named(second, "all-gather", "weight and 1 more in 0")

    @pytest.mark.slow
    def test_a_rank_that_dies_in_backward_is_named(self):
        for first, second in run_mortal_ranks(3, {1}, fail_in_a_step, signal.SIGKILL, True).values():
            self.check_named(first, first[1])
            self.assertIn(first[1], ("all-gather", "reduce-scatter", "all-reduce of used parameters"))
            self.check_named(second, "all-gather")

    @pytest.mark.slow
    def test_a_rank_that_is_stopped_is_named_within_the_timeout(self):
        (answers,) = run_mortal_ranks(2, {1}, fail_in_a_step, signal.SIGSTOP, False, seconds=4).values()
        for world, collective, _, text in answers:
            self.assertEqual((world, collective), ((1,), "all-gather"))
            self.assertRegex(text, r"rank 1 is stopped: process \d+ on host ")

    @pytest.mark.slow
    def test_a_rank_that_dies_before_construction_or_the_first_forward_is_named(self):
        (answer,) = run_mortal_ranks(2, {1}, fail_before, "first forward").values()
        self.check_named(answer, answer[1])
        with self.assertRaisesRegex(AssertionError, "fully_shard failed: .* ranks \\[1\\] made no such call with this mesh"):
            run_mortal_ranks(2, {1}, fail_before, "construction", seconds=4)

    @pytest.mark.slow
    def test_a_rank_that_does_not_construct_is_named_within_the_timeout(self):
        ((ranks, call, _, text),) = run_mortal_ranks(2, {1}, construct_late, seconds=4).values()
        self.assertEqual((ranks, call), ((1,), "fully_shard"))
        self.assertIn("ranks [1] made no such call with this mesh (process group ", text)

    @pytest.mark.slow
    def test_a_rank_that_dies_is_named_by_an_optimizer(self):
        (answer,) = run_mortal_ranks(2, {1}, die_in_an_optimizer).values()
        self.check_named(answer, "Muon.step")

    @ranks(2)
    def test_meshes_of_different_process_groups_are_an_error_on_all_ranks():
        """Ranks that made their meshes in different orders pass process groups that never meet."""
        first, second = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (2,))
        mesh = (first, second)[dist.get_rank()]
        if first.get_group() is second.get_group():  # Both are the default group: make two others.
            groups = [dist.new_group([0, 1]) for _ in range(2)]
            mesh = DeviceMesh.from_group(groups[dist.get_rank()], "cpu")
        text = error_of(sharded_model, mesh)
        assert text.startswith("ValueError: fully_shard was called with different meshes on different ranks: rank "), text
        assert "rank 0: process group" in text and "rank 1: process group" in text, text
        names = {part.split()[2] for part in text.split("rank ")[1:] if ": process group" in part}
        assert "of shape (2,) with ranks [0, 1], dimension 0" in text, names

    @ranks(2)
    def test_debug_mode_compares_each_collective():
        """Each training step has the same bits; each difference is an error on all ranks, before a collective starts."""
        plain = sharded_model()
        step(plain)
        os.environ["TORCH_RAGGED_DEBUG"] = "1"
        try:
            model = sharded_model()
            step(model)
            for one, other in zip(plain.parameters(), model.parameters(), strict=True):
                assert torch.equal(one.grad.to_local(), other.grad.to_local())
            # One rank accumulates, the other one reduces.
            model.set_requires_gradient_sync(dist.get_rank() == 0)
            text = error_of(step, model)
            start = "ValueError: a collective (TORCH_RAGGED_DEBUG=1) was called differently on different ranks: "
            assert text.startswith(f"{start}collective "), text
            assert "reduce-scatter of weight and 1 more in 2, (128,) float32 and (64,) float32, layout" in text, text
            assert " on rank 0, " in text and " on rank 1: all ranks must use equal models" in text, text
            model = sharded_model()
            text = error_of(model[dist.get_rank()].unshard)
            assert text.startswith(f"{start}collective "), text
            assert re.search(r"all-gather of weight and 1 more in group \d+, \(64,\) float32 and \(128,\) float32", text), text
            assert len(set(re.findall(r" in group ([1-9]\d*),", text))) == 2, text  # One of each rank.
        finally:
            del os.environ["TORCH_RAGGED_DEBUG"]

    @ranks(2)
    def test_a_collective_counts_on_the_process_group_that_carries_it():
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
        step(sharded_model(mesh))
        issued = list(peers.issued_on(mesh.get_group("replicas")).as_numbers().values())
        reductions = [f"all-reduce of weight and 1 more in {layer}" for layer in (2, 1, 0)]
        assert [each for each in issued if each.startswith("all-reduce of weight")] == reductions, issued

    @ranks(2)
    def test_debug_mode_on_one_rank_is_an_error_on_all_ranks():
        if dist.get_rank() == 1:
            os.environ["TORCH_RAGGED_DEBUG"] = "1"
        try:
            text = error_of(sharded_model)
        finally:
            os.environ.pop("TORCH_RAGGED_DEBUG", None)
        assert "was called with different meshes" in text and "TORCH_RAGGED_DEBUG=1" in text, text
