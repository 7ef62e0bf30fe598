"""Saves in the background, on what ranks own and send, and on memory."""

import multiprocessing
import os
import tempfile
import unittest
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_model import make_state, train, values
from common import error_of, run_ranks
from tested_device import DEVICE
from torch.distributed.checkpoint import _async_process_executor
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torch_ragged import RaggedShard, checkpoint
from torch_ragged.checkpoint import _files
from torch_ragged.fsdp import fully_shard


class SentBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that are given to collectives: what gloo sends or receives."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional"):
            self.nbytes += sum(leaf.nbytes for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor))
        return func(*args, **(kwargs or {}))


def check_async(path, kind):
    os.environ["MASTER_ADDR"] = "127.0.0.1"  # For torch's process that saves, which daemons as this one may not start.
    multiprocessing.current_process()._config["daemon"] = False
    group = dist.new_group(backend="gloo")
    state = make_state(0)
    train(state, 2)
    want = values(state)
    assert "process group of its own" in error_of(checkpoint.async_save, path, state)
    assert "kind must be one of" in error_of(checkpoint.async_save, path, state, kind="fork", process_group=group)
    future = checkpoint.async_save(path, state, kind=kind, process_group=group)
    train(state, 2)  # What it changes is not in the checkpoint.
    folder = future.result(timeout=100)
    assert folder.name == "step-00000002"
    fresh = make_state(1)
    checkpoint.load(folder, fresh)
    for name, value in values(fresh).items():
        assert torch.equal(value, want[name]), name
    if kind == "thread":
        write = _files._HashingFile.write

        def fail(self, data):
            raise OSError(28, "No space left on device")

        _files._HashingFile.write = fail if dist.get_rank() == 1 else write
        text = error_of(checkpoint.async_save(path, state, process_group=group).result, timeout=100)
        _files._HashingFile.write = write
        assert "No space left on device" in text and "__1_0.distcp" in text and "rank 1" in text, text
        assert checkpoint.latest(path) == folder
        dist.barrier()
        checkpoint.save(path, state)
        dist.barrier()
        assert sorted(os.listdir(path)) == ["step-00000002", "step-00000004"]
    _async_process_executor._CHECKPOINT_PROCESS = None  # Ends it.
    dist.barrier()


def check_dcp_async(path):
    """DCP's own async_save of ragged tensors, its writer and this package's."""
    group = dist.new_group(backend="gloo")
    state = make_state(0)
    train(state, 1)
    for name, writer in (
        ("plain", dcp.FileSystemWriter(f"{path}/plain")),
        ("ours", checkpoint.CheckpointWriter(f"{path}/ours")),
    ):
        parameters, states = get_state_dict(state.model, state.optimizer)
        want = {key: value.full_tensor() for key, value in parameters.items() if isinstance(value, DTensor)}
        states["state"].pop("unused", None)
        dcp.async_save({"model": parameters, "optimizer": states}, storage_writer=writer, process_group=group).result()
        fresh = make_state(1)
        loaded = fresh.model.state_dict()
        dcp.load({"model": loaded}, checkpoint_id=f"{path}/{name}")
        for key, value in want.items():
            assert torch.equal(loaded[key].full_tensor(), value), key


def sent_bytes(path, size):
    """Bytes that saving and chunk lists send, for a model whose parameters have ``size`` columns."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = torch.nn.Sequential(*(torch.nn.Linear(size, 8) for _ in range(4)))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    state = checkpoint.TrainState(model, optimizer)
    get_state_dict(model, optimizer)
    with SentBytes() as chunks, CommDebugMode() as mode:
        for value in model.state_dict().values():
            value.__create_chunk_list__()
            value.__create_write_items__("x", value)
    assert chunks.nbytes == 0 and mode.get_total_counts() == 0
    with SentBytes() as sent:
        dcp.save({"model": model.state_dict()}, checkpoint_id=f"{path}/plain{size}")
    with SentBytes() as ours:
        checkpoint.save(f"{path}/ours{size}", state)
    return sent.nbytes, ours.nbytes, sum(p.nbytes for p in model.parameters())


def check_replicas(path):
    """HSDP: every chunk is written once, and replicas share the writing."""
    mesh = init_device_mesh("cpu", (2, 2))
    state = {}
    for index in range(20):
        local = torch.full((500 if mesh.get_coordinate()[1] else 300,), float(index))
        units = [Replicate(), RaggedShard((0,), (3, 5))]
        state[f"w{index}"] = DTensor.from_local(local, mesh, units, shape=(800,), run_check=False)
    dcp.save(state, storage_writer=checkpoint.CheckpointWriter(f"{path}/x"))
    metadata = checkpoint.CheckpointReader(f"{path}/x").read_metadata()
    by_file = {}
    for item in metadata.storage_data.values():
        by_file[item.relative_path] = by_file.get(item.relative_path, 0) + 1
    assert len(metadata.storage_data) == 40, len(metadata.storage_data)
    assert sorted(by_file.values()) == [10, 10, 10, 10], by_file


def peak_growth(function):
    """Bytes by which this process's peak memory rises above what it holds now."""

    def status(name):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    function()
    return status("VmHWM") - before


def memory(path):
    """Peak memory of a save, synchronous and in the background, over the bytes of the shard."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = torch.nn.Sequential(*(torch.nn.Linear(1500, 2000) for _ in range(6)))
    fully_shard(model, mesh=mesh)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    shard = sum(p.to_local().nbytes for p in model.parameters())
    state = checkpoint.TrainState(model)
    checkpoint.save(f"{path}/warm", checkpoint.TrainState(torch.nn.Linear(2, 2)))
    group = dist.new_group(backend="gloo")
    plain = peak_growth(lambda: dcp.save({"model": model.state_dict()}, checkpoint_id=f"{path}/plain"))
    ours = peak_growth(lambda: checkpoint.save(f"{path}/ours", state))
    background = peak_growth(lambda: checkpoint.async_save(f"{path}/background", state, process_group=group).result())
    return shard, plain, ours, background


class BackgroundTest(unittest.TestCase):
    def test_background_saves_hold_the_values_at_the_call(self):
        for kind in ("thread", "process"):
            with self.subTest(kind), tempfile.TemporaryDirectory() as path:
                run_ranks(2, check_async, path, kind)

    def test_dcp_async_save(self):
        with tempfile.TemporaryDirectory() as path:
            run_ranks(2, check_dcp_async, path)


class CostTest(unittest.TestCase):
    def test_what_is_sent_does_not_grow_with_the_tensors(self):
        with tempfile.TemporaryDirectory() as path:
            small, large = (run_ranks(2, sent_bytes, path, size) for size in (10, 10_000))
            for few, many in zip(small, large, strict=True):
                self.assertEqual(many[2] // few[2], 909)
                for kind in (0, 1):
                    self.assertGreater(few[kind], 0)
                    self.assertLess(many[kind] - few[kind], 0.05 * few[kind])  # Pickled integers are longer.

    def test_replicas_share_the_writing(self):
        with tempfile.TemporaryDirectory() as path:
            run_ranks(4, check_replicas, path)

    @unittest.skipUnless(DEVICE == "cpu", "a shard on another device is copied to the host first")
    @unittest.skipUnless(os.access("/proc/self/clear_refs", os.W_OK), "needs /proc/self/clear_refs")
    def test_saving_takes_little_memory_beside_the_shard(self):
        with tempfile.TemporaryDirectory() as path:
            for shard, plain, ours, background in run_ranks(2, memory, path):
                self.assertGreater(shard, 30e6)
                self.assertLess(plain, 0.15 * shard)
                self.assertLess(ours, 0.15 * shard)
                self.assertLess(background, 1.15 * shard)
