"""kill -9 at random points of saves: the last complete checkpoint always loads, a partial one is never taken for whole.

Ranks are forked from this process when they are wanted, so that a round takes no imports.
"""

import datetime
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import unittest
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from torch_ragged import RaggedShard, checkpoint
from torch_ragged.checkpoint import _files

RANKS = 2
SIZE = (311, 97)


class Holder(torch.nn.Module):
    """A parameter whose every element is the step at which it was saved."""

    def __init__(self, mesh):
        super().__init__()
        shape = SIZE[0] * SIZE[1]
        local = torch.zeros(shape if mesh is None else (shape // 3, shape - shape // 3)[mesh.get_local_rank()])
        if mesh is None:
            self.weight = torch.nn.Parameter(local.view(SIZE))
        else:
            units = RaggedShard((0, 1), (shape // 3, shape - shape // 3))
            tensor = DTensor.from_local(local, mesh, [units], shape=SIZE, run_check=False)
            self.weight = torch.nn.Parameter(tensor)


def die_at(event, path):
    """Have this process kill itself at the ``event``-th thing that it does to files below ``path``."""
    count = 0

    def happened():
        nonlocal count
        count += 1
        if count == event:
            os.kill(os.getpid(), signal.SIGKILL)

    def audit(name, arguments):
        if arguments and str(arguments[0]).startswith(path):  # open, os.rename, os.remove, os.mkdir, os.listdir, ...
            happened()

    def write(self, data, write=_files._HashingFile.write):
        happened()
        written = write(self, data)
        self.raw.flush()  # What was written so far is in the file.
        return written

    _files._HashingFile.write = write
    sys.addaudithook(audit)


def rank_main(rank, store, path, event):
    """Go on from the newest checkpoint and save again and again, until killed."""
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS, timeout=timeout)
    model = Holder(init_device_mesh("cpu", (RANKS,)))
    state = checkpoint.TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if checkpoint.latest(path) is not None:
        checkpoint.load(path, state)
        assert bool((model.weight.to_local() == state.step).all())
    dist.barrier()
    if event:
        die_at(event, path)
    while True:
        state.step += 1
        with torch.no_grad():
            model.weight.fill_(state.step)
        checkpoint.save(path, state)
        if state.step % 2:  # The same step again: one is replaced.
            checkpoint.save(path, state)
        checkpoint.keep(path, 2)


def check_whole(path, least):
    """The newest checkpoint loads, holds what its name says, and none that was complete was lost."""
    newest = checkpoint.latest(path)
    if newest is None:
        assert least == 0
        return 0
    model = Holder(None)
    state = checkpoint.TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    checkpoint.load(path, state)
    assert state.step >= least, (state.step, least)
    assert bool((model.weight == state.step).all())
    return state.step


def rounds(count, seed):
    """Kill a rank, or all, at ``count`` random points of saves; returns how often something was left half written."""
    rng = random.Random(seed)
    context = multiprocessing.get_context("fork")
    partial, step = 0, 0
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/run"
        for number in range(count):
            victim, event = rng.randrange(RANKS), rng.randint(1, 400)
            arguments = [(rank, f"{folder}/store{number}", path, event * (rank == victim)) for rank in range(RANKS)]
            ranks = [context.Process(target=rank_main, args=each, daemon=True) for each in arguments]
            for process in ranks:
                process.start()
            ranks[victim].join(120)
            assert ranks[victim].exitcode == -signal.SIGKILL, (number, event, ranks[victim].exitcode)
            for process in ranks:
                if number % 2:
                    process.kill()
                process.join(120)
                assert process.exitcode, (number, event, process.exitcode)  # A survivor raises, and does not hang.
            partial += any(f.name.endswith((".incomplete", ".replaced", ".deleting")) for f in Path(path).iterdir())
            step = check_whole(path, step)
    assert step > 0
    return partial


class KillTest(unittest.TestCase):
    def test_killed_at_a_few_points_a_complete_checkpoint_is_left(self):
        self.assertGreater(rounds(4, seed=1), 0)

    @pytest.mark.slow
    def test_killed_at_50_points_a_complete_checkpoint_is_left(self):
        self.assertGreater(rounds(50, seed=2), 10)
