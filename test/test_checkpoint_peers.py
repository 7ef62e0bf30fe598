"""A rank that dies or stops during a save or a load: every other rank ends with a CheckpointError that names it."""

import datetime
import multiprocessing
import os
import re
import signal
import tempfile
import unittest
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from common import error_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from torch_ragged import RaggedShard, checkpoint
from torch_ragged.checkpoint import _api, _errors, _files, _folder, _peers, _reader, _state, _writer

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
    "the first collective": (_errors._peers, "myself", 2, "died"),
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
    """What the survivors saw, by rank, and the processes."""
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
    texts = {}
    for rank, (process, pipe) in enumerate(ranks):
        if rank != victim:
            texts[rank] = pipe.recv() if pipe.poll(timeout + 20) else "hangs"
            process.join(10)
    if with_signal == signal.SIGKILL:
        ranks[victim][0].join(10)
        assert ranks[victim][0].exitcode == -signal.SIGKILL, (victim, call, point)
    for process, _ in ranks:
        process.kill()
        process.join()
    return texts


def check_named(folder, number, victim, call, point):
    texts = kill_one(folder, number, victim, call, point)
    for rank, text in texts.items():
        case = (call, point[1:], victim, rank, text)
        assert text.startswith(f"CheckpointError: {'saving' if call == 'save' else 'loading'}"), case
        assert re.search(rf"rank {victim} \(process \d+ on [^)]*\) died", text), case
    assert any(point[3] in text for text in texts.values()), (call, point, texts)
    loaded = checkpoint.TrainState(nn.Linear(1, 1))
    loaded.model = nn.Module()
    loaded.model.weight = nn.Parameter(torch.zeros(10, 6))
    checkpoint.load(f"{folder}/run{number}", loaded)
    values = set(loaded.model.weight.flatten().tolist())
    assert values == {1.0}, (call, point, victim, values)


class PeersTest(unittest.TestCase):
    def check_all(self, cases):
        with tempfile.TemporaryDirectory() as folder:
            for number, (victim, call, point) in enumerate(cases):
                with self.subTest(call=call, victim=victim, point=point[1]):
                    check_named(folder, number, victim, call, point)

    def test_a_rank_that_dies_is_named(self):
        self.check_all(
            [
                (2, "save", SAVE["in a file"]),
                (0, "save", PUBLISH["the old one is renamed"]),
                (1, "load", LOAD["checksums"]),
                (0, "load", LOAD["shards"]),
            ]
        )

    @pytest.mark.slow
    def test_each_rank_may_die_at_each_point(self):
        self.check_all([(victim, "save", point) for point in SAVE.values() for victim in range(RANKS)])
        self.check_all([(0, "save", point) for point in PUBLISH.values()])
        self.check_all([(victim, "load", point) for point in LOAD.values() for victim in range(RANKS)])

    def test_a_rank_that_is_stopped_is_named_after_the_timeout(self):
        with tempfile.TemporaryDirectory() as folder:
            texts = kill_one(folder, 0, 1, "save", SAVE["in a file"], signal.SIGSTOP, timeout=3)
            for text in texts.values():
                self.assertRegex(text, r"CheckpointError: saving .* rank 1 \(process \d+ on \S+\) is stopped")

    def test_ranks_on_other_hosts_are_told_with_the_address(self):
        known = [_peers.myself(), _peers.Process("elsewhere/1/2", 7, "1")]
        with (
            mock.patch.object(_peers, "_PATIENCE", 0.0),
            mock.patch.object(_peers, "_processes", {None: known}),
            mock.patch.object(_peers, "_key", return_value=None),
            mock.patch.object(dist, "is_initialized", return_value=True),
        ):
            text = _peers.explain(None, RuntimeError("Connection closed by peer [10.0.0.7]:4711"))
        self.assertEqual(text, "a rank on another host at 10.0.0.7 died or does not answer: one of ranks 1")


if __name__ == "__main__":
    unittest.main()
