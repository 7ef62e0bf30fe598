"""Jobs of two ranks that save to one folder. Each rank is a process that does one thing after the other, as a pipe tells it."""

import datetime
import multiprocessing
import os
import signal

import torch
import torch.distributed as dist
from common import error_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from torch_ragged import RaggedShard, checkpoint
from torch_ragged.checkpoint import _disk, _lease

__all__ = ["POINTS", "Job", "state_of"]

SECONDS = "0.6"  # A lease that is not renewed for so long may be taken.


class Holder(nn.Module):
    """A parameter whose every element is one value."""

    def __init__(self, value):
        super().__init__()
        if dist.is_initialized():
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            units = RaggedShard((0,), (5, 7))
            local = torch.full((units.local_units[dist.get_rank()] * 10,), float(value))
            self.weight = nn.Parameter(DTensor.from_local(local, mesh, [units], shape=(12, 10), run_check=False))
        else:
            self.weight = nn.Parameter(torch.full((12, 10), float(value)))


def state_of(value, step):
    return checkpoint.TrainState(Holder(value), step=step)


def stop_before(point):
    """Have this process tell its parent "stopping" and stop itself before the ``point``; it goes on when it gets SIGCONT."""
    name, nth = point
    real, seen = getattr(_disk, name), [0]

    def stopped(*arguments):
        seen[0] += 1
        if seen[0] == nth:
            os.kill(os.getpid(), signal.SIGSTOP)
        return real(*arguments)

    setattr(_disk, name, stopped)


def rank_main(pipe, rank, ranks, store):
    os.environ[_lease._VARIABLE] = SECONDS
    timeout = datetime.timedelta(seconds=30)
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks, timeout=timeout)
    for name, *arguments in iter(pipe.recv, None):
        if name == "save":
            path, value, step = arguments
            pipe.send(error_of(checkpoint.save, path, state_of(value, step)))
        elif name == "stop before":
            stop_before(*arguments)
            pipe.send("")


class Job:
    """Two ranks of a job."""

    count = 0

    def __init__(self, folder):
        Job.count += 1
        context = multiprocessing.get_context("fork")
        self.ranks = []
        for rank in range(2):
            ours, theirs = context.Pipe()
            process = context.Process(target=rank_main, args=(theirs, rank, 2, f"{folder}/store{Job.count}"), daemon=True)
            process.start()
            self.ranks.append((process, ours))

    def tell(self, *message, ranks=(0, 1)):
        for rank in ranks:
            self.ranks[rank][1].send(message)

    def answers(self):
        found = []
        for _, pipe in self.ranks:
            assert pipe.poll(60), "a rank hangs"
            found.append(pipe.recv())
        return found

    def save(self, path, value, step):
        self.tell("save", path, value, step)
        return self.answers()

    def wait_until_stopped(self, rank=0):
        os.waitid(os.P_PID, self.ranks[rank][0].pid, os.WSTOPPED | os.WNOWAIT)

    def go_on(self):
        os.kill(self.ranks[0][0].pid, signal.SIGCONT)

    def end(self):
        for process, _ in self.ranks:
            process.kill()
            process.join()


# Where rank 0 is stopped in a save over an existing checkpoint: before the n-th call of an operation of the disk.
POINTS = {
    "it has its lease": ("mkdir", 1),
    "the first file": ("create", 2),
    "the data is synced": ("sync", 1),
    "the working folder is synced": ("sync_folder", 1),
    "the old one is renamed": ("rename", 2),  # The first renames .metadata.tmp.
    "the new one is renamed": ("rename", 3),
}
