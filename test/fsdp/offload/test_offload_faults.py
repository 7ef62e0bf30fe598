"""Faults of scratch files, and ranks that die: an error on all ranks that names the file or the rank, and nothing is lost."""

import contextlib
import errno
import gc
import itertools
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import unittest
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from common import error_of, ranks, run_mortal_ranks, run_ranks
from offload_cases import ADAMW, assert_equal, backward, build, chunks_of, folder_of_ranks, make, train

from torch_ragged import checkpoint
from torch_ragged.fsdp import Offload, offloaded
from torch_ragged.fsdp.files import _scratch_file

PLAIN = ADAMW[1]
CALLS = (10_000, 115_000)
"""About as many calls and returns of functions as a step makes; and as a step and a save make."""


@contextlib.contextmanager
def checkpoints_of_ranks():
    """A folder for checkpoints that all ranks see."""
    with folder_of_ranks() as folder:
        yield os.path.join(folder, "run")
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(os.path.join(folder, "run"))


def at_call(call, number, happens):
    """``happens(call, *arguments)`` in place of the ``number``-th ``_preadv``, ``_pwritev``, ... from now on."""
    real, numbers = getattr(_scratch_file, call), itertools.count(1)
    return mock.patch.object(_scratch_file, call, lambda *a: happens(real, *a) if next(numbers) == number else real(*a))


def failing(call, number, error):
    """The ``number``-th call fails on this rank: by an error, or because it moves too little."""

    def fail(real, *arguments):
        if error is None:
            return 0
        raise OSError(error, os.strerror(error))

    return at_call(call, number, fail)


def trained(policy, steps=1):
    """A model and its optimizer after ``steps``."""
    model = build(policy)
    optimizer = make(model, ADAMW[0], policy, **PLAIN)
    train(model, optimizer, steps=steps, schedules=False)
    return model, optimizer


def saved(folder, path, parameters=False):
    """A model with states in ``folder``, and parameters if they are in files, after one step, and its checkpoint."""
    model, optimizer = trained(Offload(1.0 if parameters else 0.8, parameters, folder))
    state = checkpoint.TrainState(model, optimizer, step=1)
    checkpoint.save(path, state)
    return model, optimizer, state


def check_goes_on(model, optimizer, steps=2):
    """The next steps are those of training without offload that has met no fault."""
    plain, reference = trained(None)
    for each in ((plain, reference), (model, optimizer)):
        train(*each, start=1, steps=steps, schedules=False)
    assert_equal(optimizer, reference)


def check_named(text, folder, victim, what):
    """The rank with the file raises an OSError that names it; the others name the rank and the file."""
    start = "OSError: [Errno " if dist.get_rank() == victim else f"RuntimeError: {what} failed on rank {victim}: OSError"
    assert text.startswith(start), text
    assert os.path.join(folder, f"torch_ragged-offload-rank{victim}-") in text, text


def check_step(folder, call, number, error, victim):
    """A fault in the second step, or in the third: an error on all ranks, and then training from the checkpoint."""
    with checkpoints_of_ranks() as path:
        model, optimizer, state = saved(folder, path)
        texts = []
        with failing(call, number, error) if dist.get_rank() == victim else contextlib.nullcontext():
            for step in (1, 2, 3):  # What is written behind fails a step later.
                backward(model, step)
                texts.append(error_of(optimizer.step))
                optimizer.zero_grad()
                if texts[-1]:
                    break
        check_named(texts[-1], folder, victim, "the step of an offloaded optimizer")
        for use in (optimizer.step, optimizer.state_dict):
            assert "load a checkpoint into model and optimizer" in error_of(use)
        assert "load a checkpoint into model and optimizer" in error_of(checkpoint.save, f"{path}/other", state)
        further = checkpoint.TrainState(model, optimizer, extra={"further": torch.zeros(1)})
        assert "extra.further" in error_of(checkpoint.load, path, further)
        assert "load a checkpoint into model and optimizer" in error_of(optimizer.step)  # It is still without states.
        checkpoint.load(path, state)
        check_goes_on(model, optimizer)


def check_checkpoint(folder, call, number, victim):
    """A file cannot be read in a save, or written in a load: an error on all ranks. The checkpoint from before is whole."""
    with checkpoints_of_ranks() as path:
        model, optimizer, state = saved(folder, path)
        use = checkpoint.save if call == "_preadv" else checkpoint.load
        with failing(call, number, errno.EIO) if dist.get_rank() == victim else contextlib.nullcontext():
            state.step = 2
            text = error_of(use, path, state)
        assert text.startswith("CheckpointError: ") and f"(rank {victim})" in text, text
        assert os.path.join(folder, f"torch_ragged-offload-rank{victim}-") in text, text
        if call == "_preadv":
            check_goes_on(model, optimizer)  # No state was lost.
        else:
            backward(model, 1)
            text = error_of(optimizer.step)
            assert "or a load, failed" in text, text  # Of this rank, whose states are filled in part, or of the victim.
            optimizer.zero_grad()
        checkpoint.load(path, state)
        assert state.step == 1
        check_goes_on(model, optimizer)


def check_construction(folder, call, error, victim):
    """A fault of one rank in ``offloaded``: an error on all ranks, and nothing is left in the folder."""
    model = build(Offload(to=folder))
    with failing(call, 1, error) if dist.get_rank() == victim else contextlib.nullcontext():
        check_named(error_of(offloaded, torch.optim.AdamW, model), folder, victim, "offloaded")
    gc.collect()
    dist.barrier()
    assert os.listdir(folder) == []
    make(model, ADAMW[0], 1, **PLAIN)  # The next call is fine.


@contextlib.contextmanager
def folder_that(how):
    """A folder, and a function that removes it or makes it read-only. Root may write anywhere: it opens as another user."""

    def open_as_user(*arguments):
        user = os.geteuid()
        os.seteuid(65534 if user == 0 else user)
        try:
            return os.open(*arguments)
        finally:
            os.seteuid(user)

    with folder_of_ranks() as parent:
        own, is_first = os.path.join(parent, "own"), dist.get_rank() == 0
        if is_first:
            os.chmod(parent, 0o755)
            os.mkdir(own, 0o777)
            os.chmod(own, 0o777)
        dist.barrier()
        with mock.patch.object(_scratch_file, "_open", open_as_user):
            yield own, lambda: os.rmdir(own) if how == "vanishes" else os.chmod(own, 0o555)
        gc.collect()
        dist.barrier()
        if is_first and os.path.exists(own):
            os.rmdir(own)


def check_folder(how, number):
    """A folder vanishes, or becomes read-only, at the ``number``-th read or write of rank 0: nothing happens. But the next
    call of ``offloaded`` is an error on all ranks."""
    with folder_that(how) as (folder, happen), checkpoints_of_ranks() as path:
        model, optimizer, state = saved(folder, path)

        def fault(real, *arguments):
            happen()
            return real(*arguments)

        call = ("_preadv", "_pwritev")[number % 2]
        with at_call(call, number, fault) if dist.get_rank() == 0 else contextlib.nullcontext():
            check_goes_on(model, optimizer)
        dist.barrier()
        assert os.path.exists(folder) is (how != "vanishes")
        checkpoint.load(path, state)
        check_goes_on(model, optimizer)
        text = error_of(offloaded, torch.optim.AdamW, build(Offload(to=folder)))
        what = {
            "vanishes": "FileNotFoundError: [Errno 2] offload could not create a scratch file: No such file or directory",
            "is read-only": "PermissionError: [Errno 13] offload could not create a scratch file: Permission denied",
        }
        assert what[how] in text and f"{folder}/torch_ragged-offload-rank{dist.get_rank()}-" in text, text


def train_until_killed(folder, path, victim, number, parameters):
    """Train, and save after each step. The victim is killed at its ``number``-th call of a function after the second step.
    Returns what another rank sees then."""
    calls = itertools.count(1)

    def count(frame, event, argument):
        if next(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    def go_on(model, optimizer, state):
        for step in itertools.count(1):
            train(model, optimizer, start=step, steps=1, schedules=False)
            state.step = step + 1
            checkpoint.save(path, state)
            if dist.get_rank() == victim:
                sys.setprofile(count)

    with chunks_of(300):
        model, optimizer, state = saved(folder, path, parameters)
        text = error_of(go_on, model, optimizer, state)
        del model, optimizer, state
        gc.collect()  # The threads of the file end.
        names = [thread.name for thread in threading.enumerate()]
        return text, [name for name in names if name.startswith(("ThreadPool", "torch_ragged-files"))]


def go_on_after_kill(folder, path, parameters):
    """The steps after the last checkpoint are those of training without offload. Returns the step of the checkpoint."""
    with chunks_of(300):
        model = build(policy := Offload(1.0 if parameters else 0.5, parameters, folder))
        optimizer = make(model, ADAMW[0], policy, **PLAIN)
        checkpoint.load(path, state := checkpoint.TrainState(model, optimizer))
        plain, reference = trained(None, state.step)
        for each in ((plain, reference), (model, optimizer)):
            train(*each, start=state.step, steps=2, schedules=False)
        assert_equal(optimizer, reference)
        return state.step


def check_kills(count, seed):
    generator, steps = random.Random(seed), []
    for each in range(count):
        victim, number = generator.randrange(2), generator.randrange(1, CALLS[each % 2])
        parameters = "files" if each % 4 > 1 else False
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as path:
            answers = run_mortal_ranks(2, {victim}, train_until_killed, folder, path, victim, number, parameters)
            text, threads = answers[1 - victim]
            assert text.startswith(("PeerError: ", "CheckpointError: ")) and f"rank {victim} died: process" in text, text
            assert threads == [] and os.listdir(folder) == []
            steps.append(run_ranks(2, go_on_after_kill, folder, path, parameters)[0])
    assert min(steps) > 1, steps


class StepFaultsTest(unittest.TestCase):
    @pytest.mark.slow
    @ranks(2)
    def test_a_file_that_fails_is_an_error_on_all_ranks():
        with folder_of_ranks() as folder, chunks_of(200):
            check_step(folder, "_preadv", 2, errno.EIO, victim=1)
            check_step(folder, "_pwritev", 3, errno.ENOSPC, victim=0)
            check_checkpoint(folder, "_preadv", 3, victim=1)
            check_checkpoint(folder, "_pwritev", 2, victim=0)
            gc.collect()

    @pytest.mark.slow
    @ranks(2, timeout=1800)
    def test_each_of_many_faults_is_an_error_on_all_ranks():
        faults = (("_preadv", errno.EIO), ("_preadv", None), ("_pwritev", errno.ENOSPC), ("_pwritev", errno.EIO))
        with folder_of_ranks() as folder, chunks_of(200):
            for call, error in (*faults, ("_pwritev", None)):
                for number in range(1, 11):
                    for victim in (0, 1):
                        check_step(folder, call, number, error, victim)
                gc.collect()
            for call in ("_preadv", "_pwritev"):
                for number in range(20):
                    check_checkpoint(folder, call, 1 + number % 3, victim=number // 3 % 2)
            gc.collect()


class FolderFaultsTest(unittest.TestCase):
    @pytest.mark.slow
    @ranks(2)
    def test_a_folder_that_fails_is_an_error_at_construction_and_nothing_later():
        with folder_of_ranks() as folder:
            for number, fault in enumerate((("_fallocate", errno.ENOSPC), ("_open", errno.EROFS), ("_pwritev", errno.EIO))):
                check_construction(folder, *fault, victim=number % 2)
            gc.collect()
        with chunks_of(200):
            for number, how in enumerate(("vanishes", "is read-only")):
                check_folder(how, 3 + number)

    @pytest.mark.slow
    @ranks(2, timeout=1800)
    def test_each_of_many_folders_that_fail():
        with folder_of_ranks() as folder:
            for number in range(20):
                for fault in (("_fallocate", errno.ENOSPC), ("_open", errno.EROFS), ("_pwritev", errno.EIO)):
                    check_construction(folder, *fault, victim=number % 2)
            gc.collect()
        with chunks_of(200):
            for number in range(1, 21):
                for how in ("vanishes", "is read-only"):
                    check_folder(how, number)


class KillTest(unittest.TestCase):
    def test_a_killed_rank_is_named_and_its_checkpoint_goes_on(self):
        check_kills(1, seed=1)

    @pytest.mark.slow
    def test_each_of_many_killed_ranks_is_named(self):
        """Half of them have parameters in files, too."""
        check_kills(40, seed=0)


if __name__ == "__main__":
    unittest.main()
