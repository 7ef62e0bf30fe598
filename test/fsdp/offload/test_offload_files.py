"""Optimizer states in scratch files: the bits without offload, exact traffic, and errors on all ranks if a file fails."""

import contextlib
import copy
import errno
import gc
import os
import shutil
import tempfile
import unittest
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from common import error_of, ranks
from offload_cases import ADAMW, BLOCKS, POLICY, SGD, assert_equal, backward, build, check, make, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from torch_ragged import checkpoint
from torch_ragged.fsdp import Offload, fully_shard, offloaded
from torch_ragged.fsdp.offload import _files, _offloaded_optimizer
from torch_ragged.optim import AdamW8bit


@contextlib.contextmanager
def folder_of_ranks():
    """A folder that all ranks see."""
    name = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(name)
    try:
        yield name[0]
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            os.rmdir(name[0])  # It must be empty: no scratch file has a name.


def chunks_of(numel):
    """Chunks of at most ``numel`` elements, so that small models have several."""
    return mock.patch.object(_offloaded_optimizer, "FILE_NUMEL", numel)


@contextlib.contextmanager
def failing(call, at, error):
    """The ``at``-th call of ``_preadv`` or ``_pwritev`` from now on fails: by an error, or because it moves too little."""
    real, count = getattr(_files, call), 0

    def faulty(*arguments):
        nonlocal count
        count += 1
        if count == at:
            if error is None:
                return 0
            raise OSError(error, os.strerror(error))
        return real(*arguments)

    with mock.patch.object(_files, call, faulty):
        yield


def check_fault(folder, call, at, error, victim):
    """A fault on one rank in the second step, or in the third: an error on all ranks, and then training from a state dict."""
    reference = make(plain := build(None), *ADAMW[:1], None, **ADAMW[1])
    train(plain, reference, steps=1, schedules=False)
    model = build(Offload(optimizer=0.8, to=folder))
    optimizer = make(model, ADAMW[0], 0.8, **ADAMW[1])
    train(model, optimizer, steps=1, schedules=False)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    saved = copy.deepcopy(optimizer.state_dict())  # States on the device change in place.
    is_victim, texts = dist.get_rank() == victim, []
    with failing(call, at, error) if is_victim else contextlib.nullcontext():
        for step in (1, 2, 3):  # What is written behind fails a step later.
            backward(model, step)
            texts.append(error_of(optimizer.step))
            optimizer.zero_grad()
            if texts[-1]:
                break
    what = (
        "OSError: [Errno "
        if is_victim
        else f"RuntimeError: the step of an offloaded optimizer failed on rank {victim}: OSError"
    )
    assert texts[-1].startswith(what), (texts, call, at, error)
    assert os.path.join(folder, f"torch_ragged-offload-rank{victim}-") in texts[-1], texts
    for use in (optimizer.step, optimizer.state_dict):
        assert "load a checkpoint into model and optimizer" in error_of(use)
    model.load_state_dict(weights)
    optimizer.load_state_dict(saved)
    train(plain, reference, start=1, steps=2, schedules=False)
    train(model, optimizer, start=1, steps=2, schedules=False)
    assert_equal(optimizer, reference)


class FilesTest(unittest.TestCase):
    @ranks(2)
    def test_files_change_no_bit_and_leave_nothing_behind():
        with folder_of_ranks() as folder:
            with chunks_of(300):
                check(*ADAMW, (Offload(0.5, to=folder), Offload(1, to=folder)))
                check(*SGD, (Offload(0.9, parameters=False, to=folder), Offload(parameters=True, to=folder)))
                check(AdamW8bit, {"lr": 0.05, "policy": POLICY}, (Offload(0.7, to=folder),), **BLOCKS)
            check(*ADAMW, (Offload(0.7, to=folder),), how={"passes": 2, "clip": 0.1})
            gc.collect()

    @ranks(2)
    def test_state_dicts_move_between_tiers():
        with folder_of_ranks() as folder, chunks_of(300):
            plain = build(None)
            reference = make(plain, torch.optim.AdamW, None, lr=0.05)
            train(plain, reference)
            policies = (Offload(0.8, to=folder), Offload(0.3), Offload(0.5, to=folder), Offload(1, to=folder))
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
            policies = (Offload(0.8, to=folder), Offload(0.3), None)
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
            model = nn.Linear(64, 128, bias=False)
            fully_shard(model, mesh=init_device_mesh("cpu", (1,)), offload_policy=Offload(to=folder))
            optimizer = offloaded(torch.optim.AdamW, model)
            held = optimizer.tier_nbytes()
            assert held == {"device": 0, "host": 0, "files": 2 * 4 * 64 * 128, "windows": 3 * 2 * 4 * 2048}, held
            moved = {"_preadv": 0, "_pwritev": 0}

            def counted(call):
                real = getattr(_files, call)

                def count(file, buffers, offset):
                    moved[call] += len(buffers[0])
                    return real(file, buffers, offset)

                return mock.patch.object(_files, call, count)

            with counted("_preadv"), counted("_pwritev"):
                for _ in range(4):
                    model(torch.ones(1, 64)).sum().backward()
                    optimizer.step()
                optimizer.state_dict()  # Waits for what is written behind. It reads all states once.
            # The first step reads nothing, and each later one begins with what was read ahead; so does the one that never came.
            one_chunk = 2 * 4 * 2048
            assert moved == {"_preadv": held["files"] * (3 + 1) + one_chunk, "_pwritev": held["files"] * 4}, moved

    @ranks(1)
    def test_a_file_has_no_name_and_two_jobs_do_not_meet():
        with folder_of_ranks() as folder:
            files = [_files.ScratchFile(folder, 0, 2 * _files.BLOCK) for _ in range(2)]
            assert os.listdir(folder) == [] and files[0].path != files[1].path
            block = memoryview(_files.mmap.mmap(-1, _files.BLOCK))
            for number, file in enumerate(files):
                block[:] = bytes([number + 1]) * _files.BLOCK
                file.write(block, _files.BLOCK)
            for number, file in enumerate(files):
                file.read(block, _files.BLOCK)
                assert bytes(block) == bytes([number + 1]) * _files.BLOCK
            text = error_of(files[0].read, block, 2 * _files.BLOCK)
            assert (
                "could not read 4096 bytes at 8192 of a scratch file: it ends after 0 bytes" in text and files[0].path in text
            )
            for file in files:
                file.close()


class FaultsTest(unittest.TestCase):
    @ranks(2)
    def test_a_file_that_fails_is_an_error_on_all_ranks():
        with folder_of_ranks() as folder, chunks_of(600):
            for fault in (("_preadv", 2, errno.EIO, 1), ("_preadv", 1, None, 0), ("_pwritev", 3, errno.ENOSPC, 0)):
                check_fault(folder, *fault)
            gc.collect()

    @pytest.mark.slow
    @ranks(2)
    def test_each_of_many_faults_is_an_error_on_all_ranks():
        with folder_of_ranks() as folder, chunks_of(600):
            for call, error in (
                ("_preadv", errno.EIO),
                ("_preadv", None),
                ("_pwritev", errno.ENOSPC),
                ("_pwritev", errno.EIO),
                ("_pwritev", None),
            ):
                for at in range(1, 11):
                    for victim in (0, 1):
                        check_fault(folder, call, at, error, victim)
                gc.collect()

    @ranks(2)
    def test_a_folder_that_cannot_be_used_is_an_error_at_construction():
        rank = dist.get_rank()

        def full(file, offset, nbytes):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def read_only(*arguments):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

        with folder_of_ranks() as folder:
            for name, fault in (("_fallocate", full), ("_open", read_only)):
                model = build(Offload(to=folder))
                with mock.patch.object(_files, name, fault) if rank == 1 else contextlib.nullcontext():
                    text = error_of(offloaded, torch.optim.AdamW, model)
                assert text.startswith("OSError: [Errno" if rank else "RuntimeError: offloaded failed on rank 1: OSError"), text
                assert f"{folder}/torch_ragged-offload-rank1-" in text, text
            missing = f"{folder}/missing"
            text = error_of(offloaded, torch.optim.AdamW, build(Offload(to=missing)))
            assert "FileNotFoundError: [Errno 2] offload could not create a scratch file: No such file or directory" in text, (
                text
            )
            gc.collect()


class PolicyTest(unittest.TestCase):
    def test_a_tier_is_a_path(self):
        for wrong in (None, 3, ""):
            with self.assertRaisesRegex(ValueError, "is no tier"):
                Offload(to=wrong)
        self.assertEqual(Offload(to=_files.os.path.join("a", "b")).to, "a/b")


if __name__ == "__main__":
    unittest.main()
