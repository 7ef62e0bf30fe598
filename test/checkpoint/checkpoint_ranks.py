"""Four ranks that save or load a small model while one of them dies or stops at a given point, and what the others saw."""

import datetime
import multiprocessing
import os
import signal
import time

import torch
import torch.distributed as dist
from common import error_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from torch_ragged import RaggedShard, checkpoint
from torch_ragged.checkpoint import _api, _errors, _files, _folder, _reader, _state, _writer

__all__ = ["LOAD", "PUBLISH", "RANKS", "SAVE", "kill_one", "value_in"]

RANKS, TIMEOUT = 4, 20


class Holder(nn.Module):
    def __init__(self, value):
        super().__init__()
        mesh = init_device_mesh("cpu", (RANKS,))
        units = RaggedShard((0,), (3, 4, 2, 1))
        local = torch.full((units.local_units[dist.get_rank()] * 6,), float(value))
        self.weight = nn.Parameter(DTensor.from_local(local, mesh, [units], shape=(10, 6), run_check=False))


def state_of(value, step):
    return checkpoint.TrainState(Holder(value), step=step)


# Where a rank dies: in the n-th call of a function. The words tell what the ranks did.
SAVE = {
    "the first collective": (_errors, "announce", 2, "died"),
    "comparing values": (_api, "refuse_different", 1, "comparing values"),
    "planning": (_writer.SavePlannerOfViews, "create_local_plan", 1, "planning the save"),
    "in a file": (_files._HashingFile, "write", 3, "writing their files"),
    "after its file": (_writer, "describe", 1, "writing their files"),
}
PUBLISH = {  # Rank 0 alone does these.
    "taking the lease": (_writer, "acquire", 1, "planning the save"),
    "writing the manifest": (_writer, "missing_chunks", 1, "publishing the checkpoint"),
    "the old one is renamed": (_folder._disk, "rename", 3, "publishing the checkpoint"),
}
LOAD = {
    "the manifest": (_reader, "read_manifest", 1, "died"),
    "the metadata": (_reader, "parse_metadata", 1, "died"),
    "checksums": (_reader, "damage", 1, "comparing checksums"),
    "objects": (_state, "load_object", 1, "died"),
    "shards": (_reader._Chunks, "copy", 4, "reading their shards"),
    "applying": (_state, "set_model_state_dict", 1, "died"),
}


def die_in(where, name, nth, with_signal):
    real, seen = getattr(where, name), [0]

    def dying(*arguments, **keywords):
        seen[0] += 1
        if seen[0] == nth:
            os.kill(os.getpid(), with_signal)
        return real(*arguments, **keywords)

    setattr(where, name, dying)


def rank_main(pipe, rank, store, path, victim, call, point, with_signal, timeout):
    group_timeout = datetime.timedelta(seconds=timeout)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS, timeout=group_timeout)
    checkpoint.save(path, state_of(1, 5))
    loaded, saved = state_of(0, 0), state_of(2, 5)
    dist.barrier()
    if rank == victim:
        die_in(*point[:3], with_signal)
    if call == "save":
        pipe.send(error_of(checkpoint.save, path, saved))
    else:
        pipe.send(error_of(checkpoint.load, path, loaded))


def kill_one(folder, number, victim, call, point, with_signal=signal.SIGKILL, timeout=TIMEOUT):
    """What the survivors saw, by rank, and the seconds from the victim's end, or from the start, to the last of it."""
    context = multiprocessing.get_context("fork")
    ranks = []
    for rank in range(RANKS):
        ours, theirs = context.Pipe()
        arguments = (
            theirs,
            rank,
            f"{folder}/store{number}",
            f"{folder}/run{number}",
            victim,
            call,
            point,
            with_signal,
            timeout,
        )
        process = context.Process(target=rank_main, args=arguments, daemon=True)
        process.start()
        theirs.close()
        ranks.append((process, ours))
    if with_signal == signal.SIGKILL:
        ranks[victim][0].join(60)
        assert ranks[victim][0].exitcode == -signal.SIGKILL, (victim, call, point)
    start, texts = time.monotonic(), {}
    for rank, (_, pipe) in enumerate(ranks):
        if rank != victim:
            texts[rank] = pipe.recv() if pipe.poll(timeout + 20) else "hangs"
    seconds = time.monotonic() - start
    for process, _ in ranks:
        process.kill()
        process.join()
    return texts, seconds


def value_in(path):
    """The value of all elements of the latest checkpoint in ``path``, or the set of values if they differ."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(10, 6))
    checkpoint.load(path, checkpoint.TrainState(model))
    values = set(model.weight.flatten().tolist())
    return values.pop() if len(values) == 1 else values
