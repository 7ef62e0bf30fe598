"""Optimizer states in scratch files: the bits without offload, and exact traffic."""

import gc
import os
import shutil
import sys
import threading
import unittest
import weakref
from unittest import mock

import torch
import torch.distributed as dist
from common import ranks
from offload_cases import (
    ADAMW,
    BLOCKS,
    POLICY,
    SGD,
    assert_equal,
    build,
    check,
    chunks_of,
    folder_of_ranks,
    in_files,
    make,
    train,
    window_tier,
)
from tested_device import DEVICE
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from torch_ragged import checkpoint
from torch_ragged.fsdp import Offload, fully_shard, monitor, offloaded
from torch_ragged.fsdp.files import _scratch_file
from torch_ragged.fsdp.offload import _offloaded_optimizer
from torch_ragged.optim import AdamW8bit


def layer_with_files(folder):
    """A layer on one rank, and an optimizer whose states lie in ``folder``."""
    model = nn.Linear(64, 128, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)), offload_policy=in_files(folder))
    return model, offloaded(torch.optim.AdamW, model)


class FilesTest(unittest.TestCase):
    @unittest.skipUnless(DEVICE == "cpu", "what is stepped on the CPU is compared with what is stepped on the device")
    @ranks(2)
    def test_files_change_no_bit_and_leave_nothing_behind():
        with folder_of_ranks() as folder:
            with chunks_of(300):
                check(*ADAMW, (in_files(folder, 0.5), in_files(folder, 1)))
                check(*SGD, (in_files(folder, 0.9), Offload(parameters=True, to=folder)))
                check(AdamW8bit, {"lr": 0.05, "policy": POLICY}, (in_files(folder, 0.7),), **BLOCKS)
            check(*ADAMW, (in_files(folder, 0.7),), how={"passes": 2, "clip": 0.1})
            gc.collect()

    @ranks(2)
    def test_state_dicts_move_between_tiers():
        with folder_of_ranks() as folder, chunks_of(300):
            plain = build(None)
            reference = make(plain, torch.optim.AdamW, None, lr=0.05)
            train(plain, reference)
            policies = (in_files(folder, 0.8), Offload(0.3), in_files(folder, 0.5), in_files(folder, 1))
            weights = states = None
            for policy in policies:
                model = build(policy)
                optimizer = make(model, torch.optim.AdamW, policy, lr=0.05)
                train(model, optimizer, start=0 if states is None else 9, steps=3 if states is None else 1)
                if states is not None:
                    model.load_state_dict(weights)
                    optimizer.load_state_dict(states)
                assert_equal(optimizer, reference)
                weights, states = model.state_dict(), optimizer.state_dict()

    @ranks(2)
    def test_checkpoints_are_those_without_offload():
        with folder_of_ranks() as folder, folder_of_ranks() as checkpoints, chunks_of(300):
            plain = build(None)
            reference = make(plain, torch.optim.AdamW, None, lr=0.05)
            train(plain, reference, schedules=False)
            policies = (in_files(folder, 0.8), Offload(0.3), None)
            for number, policy in enumerate(policies):
                model = build(policy)
                optimizer = make(model, torch.optim.AdamW, policy, lr=0.05)
                state = checkpoint.TrainState(model, optimizer, step=number)
                if number == 0:
                    checkpoint.save(f"{checkpoints}/fresh", state)  # Before the first step. It changes nothing.
                    assert not optimizer.state
                    train(model, optimizer, schedules=False)
                else:
                    checkpoint.load(f"{checkpoints}/{number - 1}", state)
                assert_equal(optimizer, reference) if policy else assert_equal(reference, optimizer)
                state.step = 3
                checkpoint.save(f"{checkpoints}/{number}", state)
                assert_equal(optimizer, reference) if policy else assert_equal(reference, optimizer)
            dist.barrier()
            if dist.get_rank() == 0:
                for name in os.listdir(checkpoints):
                    shutil.rmtree(os.path.join(checkpoints, name))

    @ranks(1)
    def test_a_step_reads_and_writes_each_state_once():
        with folder_of_ranks() as folder, chunks_of(2048):
            model, optimizer = layer_with_files(folder)
            held = optimizer.tier_nbytes()
            assert held == {"device": 0, "host": 0, "files": 2 * 4 * 64 * 128, "windows": 3 * 2 * 4 * 2048}, held
            moved = {"_preadv": 0, "_pwritev": 0}

            def counted(call):
                real = getattr(_scratch_file, call)

                def count(file, buffers, offset):
                    moved[call] += len(buffers[0])
                    return real(file, buffers, offset)

                return mock.patch.object(_scratch_file, call, count)

            with counted("_preadv"), counted("_pwritev"):
                for _ in range(4):
                    model(torch.ones(1, 64)).sum().backward()
                    optimizer.step()
                optimizer.state_dict()  # Waits for what is written behind. It reads all states once.
            # The first step reads nothing, and each later one begins with what was read ahead; so does the one that never came.
            one_chunk = 2 * 4 * 2048
            assert moved == {"_preadv": held["files"] * (3 + 1) + one_chunk, "_pwritev": held["files"] * 4}, moved

    @ranks(1)
    def test_a_monitor_shows_what_moves():
        with folder_of_ranks() as folder, chunks_of(2048):
            model, optimizer = layer_with_files(folder)
            with monitor(model, optimizer) as watch:
                rows = []
                for _ in range(4):
                    model(torch.ones(1, 64)).sum().backward()
                    optimizer.step()
                    rows.append(watch.step())
                spans, seconds = watch.timeline.spans, rows[-1]["step_s"]
                optimizer.state_dict()  # Waits for what is written behind, and reads all states once.
                rows.append(watch.step())
            files, one_chunk = optimizer.tier_nbytes()["files"], 2 * 4 * 2048
            total = {key: sum(row[key] for row in rows) for key in rows[0]}
            assert total["tier_write_bytes"] == 4 * files and total["tier_read_bytes"] == (3 + 1) * files + one_chunk, total
            assert {"tier_read", "tier_exposed", "optimizer"} <= {span.kind for span in spans}, spans
            # Reads ahead and writes behind may end in another step than they began in.
            here = [span for span in spans if span.kind not in ("tier_read", "tier_write")]
            assert all(0 <= span.end <= seconds for span in here), (here, seconds)
            for row in rows:
                if DEVICE == "cpu":  # Elsewhere, the one is the host's time, and the other one the device's.
                    assert 0 <= row["tier_exposed_s"] <= row["optimizer_s"], row
                assert (row["tier_read_s"] > 0) is (row["tier_read_bytes"] > 0), row
            optimizer.step()  # It is watched no longer.
            gc.collect()

    @ranks(1)
    def test_a_monitor_shows_copies_through_windows():
        with mock.patch.multiple(_offloaded_optimizer, tier_of=window_tier, window_numel=lambda device: 2048):
            model = nn.Linear(64, 128, bias=False)
            fully_shard(model, mesh=init_device_mesh("cpu", (1,)), offload_policy=Offload(0.5))
            optimizer = offloaded(torch.optim.AdamW, model)
        with monitor(model, optimizer) as watch:
            for _ in range(2):
                model(torch.ones(1, 64)).sum().backward()
                optimizer.step()
            row = watch.step()
        host = optimizer.tier_nbytes()["host"]
        assert host > 2 * 4 * 2048 and row["tier_read_bytes"] == row["tier_write_bytes"] == 2 * host, row
        with monitor(model, torch.optim.SGD(model.parameters(), lr=0.1)) as watch:
            assert not any("tier" in key for key in watch.step())

    @ranks(1)
    def test_a_tier_that_its_own_thread_lets_go_closes_its_file():
        with folder_of_ranks() as folder, chunks_of(2048), mock.patch.object(sys, "unraisablehook") as unraisable:
            model, optimizer = layer_with_files(folder)
            tier = next(tier for _, tier in optimizer._chunks)
            closed, may_go_on = threading.Event(), threading.Event()
            weakref.finalize(tier.file, closed.set)
            tier._reader.submit(lambda tier=tier: may_go_on.wait(20) and None)
            del model, optimizer, tier
            gc.collect()
            assert not closed.is_set()
            may_go_on.set()
            assert closed.wait(20)
            gc.collect()
            unraisable.assert_not_called()


class PolicyTest(unittest.TestCase):
    def test_a_tier_is_a_path(self):
        for wrong in (None, 3, ""):
            with self.assertRaisesRegex(ValueError, "is no tier"):
                Offload(to=wrong)
        self.assertEqual(Offload(to=os.path.join("a", "b")).to, "a/b")


if __name__ == "__main__":
    unittest.main()
