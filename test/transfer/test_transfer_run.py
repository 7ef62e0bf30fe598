"""Runs of a plan: whether the last one is complete, and calls that differ between ranks."""

import contextlib
import re
import unittest
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
from common import error_of, ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from torch_ragged import RaggedShard, transfer
from torch_ragged.tensor._box_tensor import with_layout
from torch_ragged.tensor._global_layout import GlobalLayout
from torch_ragged.transfer import _execution, _plan, _watch
from torch_ragged.transfer._check import check_memory


def mesh_of(ranks, shape=None):
    return DeviceMesh("cpu", torch.tensor(ranks).view(shape or (len(ranks),)))


def dtensor(full, mesh, placements):
    """Without communication, also on ranks outside of the mesh."""
    return distribute_tensor(full.clone(), mesh, placements, src_data_rank=None)


class TransferRunTest(unittest.TestCase):
    @ranks(2)
    def test_a_source_that_is_read_in_place_needs_no_more_than_its_plan():
        """The fewest bytes that plan() takes for it. A source with other strides needs more, and run() says so."""
        mesh, full = mesh_of([0, 1]), torch.arange(16.0).view(4, 4)
        source, target = ({"w": dtensor(each, mesh, [Replicate()])} for each in (full, torch.zeros(4, 4)))
        assert "w needs at least 24 bytes" in error_of(lambda: transfer.plan(source, target, max_bytes=23))
        plan = transfer.plan(source, target, max_bytes=24)
        plan.run(source, target)
        assert plan.is_complete and torch.equal(target["w"].to_local(), full)
        turned = {"w": DTensor.from_local(full.t(), mesh, [Replicate()], run_check=False)}
        assert "w needs at least 32 bytes" in error_of(plan.run, turned, target)

    @ranks(2)
    def test_a_padded_source_with_other_strides_keeps_within_max_bytes():
        """What is copied of two of its rows has the padding between them: it is read row by row."""
        whole, padded = torch.arange(24.0).view(6, 4), torch.full((6, 64), -1.0)
        padded[:, :4] = whole
        padded = with_layout(padded.t().contiguous().t(), GlobalLayout((6, 4), ((0, 0),), ((0, 0),), ((6, 4),)))
        target = {"w": dtensor(torch.zeros(6, 4), mesh_of([0, 1]), [Replicate()])}
        plan = transfer.plan({"w": padded}, target, max_bytes=256)
        plan.run({"w": padded}, target)
        assert torch.equal(target["w"].to_local(), whole) and 0 < plan.last_peak_bytes <= 256

    def test_a_tensor_on_another_device_than_the_messages_is_refused(self):
        text = "ValueError: run(): w is on cpu, and this group's messages are on cuda:1: move it there"
        for source, target in (({"w": torch.ones(2)}, {}), ({}, {"w": torch.ones(2)})):
            self.assertEqual(error_of(check_memory, source, target, torch.device("cuda", 1)), text)

    def test_a_store_that_is_lost_is_named_with_what_was_on_its_way(self):
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        dist.init_process_group("fake", store=dist.TCPStore("127.0.0.1", server.port, is_master=False), rank=0, world_size=1)
        self.addCleanup(dist.destroy_process_group)
        with mock.patch.object(_watch, "announce"):  # It would listen in this process.
            watch = _watch.Watch([0], "lost", timedelta(seconds=1), torch.device("cpu"))
        del server
        error = watch.failed(OSError("no memory"), "Plan.run()", ("a", "b"))
        self.assertIsInstance(error, transfer.TransferError)
        self.assertRegex(
            str(error),
            r"^Plan.run\(\) failed while a, b was on its way: no memory. The store of the process group does not answer "
            r"\(.*\). The source is unchanged. The target is not complete$",
        )

    @ranks(2)
    def test_a_plan_says_whether_its_last_run_is_complete():
        """It says so of the last run only, also if that one ended before its first collective."""
        rank, mesh = dist.get_rank(), mesh_of([0, 1])
        source = {"w": dtensor(torch.ones(4, 4), mesh, [Shard(0)])}
        target = {"w": dtensor(torch.zeros(4, 4), mesh, [Replicate()])}
        plan = transfer.plan(source, target, timeout=timedelta(seconds=2))
        assert not plan.is_complete
        plan.run(source, target)
        assert plan.is_complete
        handle = plan.run(source, target, async_op=True)
        handle.wait()
        assert plan.is_complete
        text = error_of(plan.run, None if rank else source, target)
        assert text.startswith(("ValueError: run(source=): w is missing", "RuntimeError: Plan.run() failed on rank 1")), text
        assert not plan.is_complete
        plan.run(source, target)
        assert plan.is_complete
        store = dist.PrefixStore("test", dist.distributed_c10d._get_default_store())
        if rank == 0:
            patience, _watch._TRANSFER_PATIENCE = _watch._TRANSFER_PATIENCE, 0.5
            text = error_of(plan.run, source, target)
            _watch._TRANSFER_PATIENCE = patience
            store.set("ended", "")
            assert text.startswith("TransferError: Plan.run() failed while no tensor was on its way: rank 1 lives"), text
            assert not plan.is_complete
        else:
            store.wait(["ended"])

    @ranks(3, timeout=60)
    def test_a_rank_that_fails_midway_is_heard_by_all_long_before_the_timeout():
        """The others end because it has reported, not because they have waited for ``timeout``; all name it and the tensors."""
        rank, mesh, there = dist.get_rank(), mesh_of([0, 1]), mesh_of([1, 2])
        source = {name: dtensor(torch.ones(64), mesh, [Shard(0)]) for name in "abc"}
        target = {name: dtensor(torch.zeros(64), there, [Shard(0)]) for name in "abc"}
        plan = transfer.plan(source, target, timeout=timedelta(minutes=10), max_bytes=512)
        broken = mock.patch.object(_execution, "pack", side_effect=OSError("no memory is left"))
        soon = mock.patch.multiple(_watch, _TRANSFER_SLICE=0.1, _TRANSFER_PATIENCE=5.0)
        with soon, broken if rank == 0 else contextlib.nullcontext():
            text = error_of(plan.run, source, target)
        assert "rank 0: OSError: no memory is left" in text and "is unchanged" in text, text
        assert not plan.is_complete
        assert re.search(f"failed while {'a' if rank == 0 else '[abc]'} was on its way", text), text
        # Rank 0 lives until the others have ended: they have heard it, and not its connections close.
        store = dist.PrefixStore("heard", dist.distributed_c10d._get_default_store())
        store.set(f"rank {rank}", "")
        store.wait([f"rank {each}" for each in range(3)], timedelta(seconds=30))

    @ranks(2)
    def test_a_rank_that_cannot_make_its_slices_is_an_error_on_all_ranks():
        rank, mesh = dist.get_rank(), mesh_of([0, 1])
        source = {"w": dtensor(torch.ones(4, 4), mesh, [Shard(0)])}
        target = {"w": dtensor(torch.zeros(4, 4), mesh, [Shard(1)])}
        original = _plan.slices_of

        def broken(*arguments):
            if rank == 1:
                raise MemoryError("no slices here")
            return original(*arguments)

        with mock.patch.object(_plan, "slices_of", broken):
            text = error_of(transfer.plan, source, target)
        assert "no slices here" in text and (rank == 1 or "rank 1" in text), text
        plan = transfer.plan(source, target)
        assert plan.last_sent_bytes == plan.last_peak_bytes == 0  # Nothing has run.
        plan.run(source, target)
        assert plan.is_complete and target["w"].to_local().all()

    @ranks(2)
    def test_a_plain_tensor_beside_two_meshes_lies_on_all_their_ranks():
        """Rank 0's mesh has one rank, the other mesh both: a plain tensor is whole on both ranks."""
        one, both = mesh_of([0]), mesh_of([0, 1])
        source = {"a": dtensor(torch.ones(4), one, [Replicate()]), "b": dtensor(torch.ones(4), both, [Shard(0)])}
        source["plain"] = torch.full((6,), 3.0)
        target = {name: dtensor(torch.zeros(value.shape), both, [Shard(0)]) for name, value in source.items()}
        plan = transfer.plan(source, target)
        plan.run(source, target)
        for name, value in target.items():
            assert torch.equal(value.full_tensor(), torch.full(value.shape, 3.0 if name == "plain" else 1.0)), name
        assert plan.last_sent_bytes == (8 if dist.get_rank() == 0 else 0)  # Half of a: nothing of what both have.

    @ranks(3)
    def test_calls_that_differ_are_errors_on_all_ranks():
        """An error on all ranks at once, and nothing is written."""
        rank, mesh = dist.get_rank(), mesh_of([0, 1, 2])
        source = {"w": dtensor(torch.ones(6), mesh, [Shard(0)])}
        target = {"w": dtensor(torch.zeros(6), mesh, [Replicate()])}
        plan = transfer.plan(source, target)
        for mine, here, there in (("checksum", "checksum", None), (None, None, "checksum")):
            text = error_of(plan.run, source, target, delta=mine if rank == 0 else "checksum" if mine is None else None)
            assert text.startswith("ValueError: Plan.run() was called differently on different ranks"), text
            assert f"rank 0 has delta {here}, rank 1 has delta {there}" in text, text
            assert not plan.is_complete and not target["w"].to_local().any()
        units = "RaggedShard(dims=(0,), local_units=(1, 1)) has 2 local_units, but mesh dimension 0 has 3 ranks"
        assert units in error_of(transfer.Spec, (8, 6), torch.float32, [0, 1, 2], [RaggedShard((0,), (1, 1))])
        assert "each rank once" in error_of(transfer.Spec, (8, 6), torch.float32, [0, 1, 1], [Replicate()])

        class Broken(dict):
            def items(self):
                raise KeyError("any error of a mapping")

        text = error_of(transfer.plan, Broken(source) if rank == 1 else source, target)
        assert text.startswith("KeyError" if rank == 1 else "RuntimeError: transfer.plan failed on rank 1: KeyError"), text
        plan.run(source, target, delta="checksum")
        assert plan.is_complete and target["w"].to_local().all()
