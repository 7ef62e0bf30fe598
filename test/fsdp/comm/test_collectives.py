"""Implementations of the collectives: the same bits as the process group's, chosen by all ranks alike, and clean ends."""

import atexit
import dataclasses
import datetime
import gc
import itertools
import logging
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from common import context_of_ranks, error_of, ranks, run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.debug import CommDebugMode

from torch_ragged.fsdp import HIERARCHICAL, fully_shard
from torch_ragged.fsdp.comm import _gloo
from torch_ragged.fsdp.comm._choice import RankFacts, why_not
from torch_ragged.fsdp.comm._collectives import ProcessGroupCollectives, wait_all
from torch_ragged.fsdp.comm._reduction import Reduction
from torch_ragged.fsdp.comm.experimental import _peer_memory
from torch_ragged.fsdp.comm.experimental._copy_engine import CopyEngineCollectives
from torch_ragged.fsdp.comm.experimental._peer_memory import HostPeerMemory

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def collectives(slot_nbytes: int) -> tuple[ProcessGroupCollectives, CopyEngineCollectives]:
    world = dist.group.WORLD
    groups = ProcessGroupCollectives(world)
    memories = HostPeerMemory(world, slot_nbytes), HostPeerMemory(world, slot_nbytes)
    return groups, CopyEngineCollectives(groups, world, *memories)


def compare_bits(slot_nbytes: int) -> None:
    """All implementations, gathers by broadcasts too: random values, sizes that are no multiples, in and out of place."""
    groups, copies = collectives(slot_nbytes)
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.int64)
    for numel, dtype in itertools.product((1, 7, 640, 4099), dtypes):
        values = torch.randn(size * numel, dtype=torch.float64) * 100
        values = values.to(dtype)
        expected, found = torch.empty_like(values), torch.zeros_like(values)
        shard = values[:numel].clone()
        groups.all_gather(expected, shard).wait()
        for other in (copies, groups):
            found.zero_()
            in_place = torch.zeros_like(values)
            mine = in_place.narrow(0, rank * numel, numel).copy_(shard)
            with mock.patch.object(_gloo, "_SMALLEST_BROADCAST", 0):
                other.all_gather(found, shard).wait()
                other.all_gather(in_place, mine).wait()
            assert torch.equal(found, expected), (numel, dtype)
            assert torch.equal(in_place, expected), (numel, dtype)
        if dtype == torch.int64:
            continue
        kinds = [dtype] if dtype.is_complex else [dtype, torch.float32]  # Added up as they are, and wider.
        for reduction, kind in itertools.product((Reduction(), Reduction(divisor=3.0), Reduction(sum_only=True)), kinds):
            outputs = [torch.empty(numel, dtype=kind) for _ in range(3)]
            groups.reduce_scatter(outputs[0], values.clone(), reduction).wait()
            copies.reduce_scatter(outputs[1], values.clone(), reduction).wait()
            with mock.patch.object(_gloo, "_SMALLEST_PAIR", 0):
                groups.reduce_scatter(outputs[2], values.clone(), reduction).wait()
            assert all(torch.equal(outputs[0], output) for output in outputs[1:]), (numel, dtype, kind, reduction)


def own_part_stays() -> None:
    """Of a large buffer a rank receives the others' parts only, from both sides."""
    rank, size = dist.get_rank(), dist.get_world_size()
    numel = _gloo._SMALLEST_PAIR // 4
    buffer = torch.arange(size, dtype=torch.float32).repeat_interleave(numel) + 100 * rank
    received = []
    exchange = dist.all_to_all_single

    def noted(output, *others, **options):
        received.append(output)
        return exchange(output, *others, **options)

    output = torch.empty(numel)
    with mock.patch.object(dist, "all_to_all_single", noted):
        work = ProcessGroupCollectives(dist.group.WORLD).reduce_scatter(output, buffer, Reduction(divisor=1.0))
    assert received[0].untyped_storage().data_ptr() == received[1].untyped_storage().data_ptr()
    assert received[0].untyped_storage().nbytes() == (size - 1) * output.nbytes
    work.wait()
    assert (output == size * rank + 100 * sum(range(size))).all(), output


def other_sizes() -> list[str]:
    """Ranks gather different numbers of elements: an error on both, and in whatever follows."""
    _, copies = collectives(64)
    numel, size = dist.get_rank() + 1, dist.get_world_size()
    errors = [error_of(copies.all_gather(torch.empty(size * n), torch.ones(n)).wait) for n in (numel, 5)]
    copies.reduce_scatter(torch.empty(1), torch.ones(size), Reduction()).wait()  # has memory of its own
    return errors


class PeerMemoryTest(unittest.TestCase):
    def test_bits_are_the_process_groups(self):
        run_ranks(4, compare_bits, 1 << 16)

    def test_pieces_give_the_same_bits(self):
        run_ranks(3, compare_bits, 192)

    @ranks(4)
    def test_bfloat16_is_added_in_float32():
        _, copies = collectives(4096)
        size = dist.get_world_size()
        buffer = torch.full((size,), 1.0 if dist.get_rank() == 0 else 2.0**-9, dtype=torch.bfloat16)
        output = torch.empty(1, dtype=torch.bfloat16)
        copies.reduce_scatter(output, buffer, Reduction(divisor=1.0)).wait()
        exact = 1.0 + (size - 1) * 2.0**-9  # Added in bfloat16, every one of them would be rounded away.
        assert output.item() == torch.tensor(exact).bfloat16().item() != 1.0, output

    @ranks(2)
    def test_calls_return_at_once_and_are_waited_for_in_any_order():
        """Calls return before the other rank has made its own; they are waited for in any order."""
        _, copies = collectives(64)
        rank, size = dist.get_rank(), dist.get_world_size()
        shards = [torch.full((40,), 10.0 * rank + i) for i in range(3)]
        outputs = [torch.zeros(size * 40) for _ in shards]
        reduced = torch.zeros(40)
        if rank == 0:
            works = [copies.all_gather(output, shard) for output, shard in zip(outputs, shards, strict=True)]
            works.append(copies.reduce_scatter(reduced, torch.ones(size * 40), Reduction(divisor=1.0)))
            dist.barrier()
        else:
            dist.barrier()  # Rank 0 has come this far with nobody to exchange with.
            works = [copies.all_gather(output, shard) for output, shard in zip(outputs, shards, strict=True)]
            works.append(copies.reduce_scatter(reduced, torch.ones(size * 40), Reduction(divisor=1.0)))
        for index in (3, 1, 2, 0) if rank == 0 else (2, 0, 3, 1):
            works[index].wait()
        for i, output in enumerate(outputs):
            expected = torch.cat([torch.full((40,), 10.0 * other + i) for other in range(size)])
            assert torch.equal(output, expected), (rank, i)
        assert torch.equal(reduced, torch.full((40,), float(size)))

    def test_different_collectives_are_noticed(self):
        first, second = run_ranks(2, other_sizes)
        self.assertRegex(first[0], "Error: copy .*: (rank 0 exchanges 4 bytes, rank 1 exchanges 8 |rank 1 of 2 has closed)")
        self.assertRegex(second[0], "Error: copy .*: (rank 1 exchanges 8 bytes, rank 0 exchanges 4 |rank 0 of 2 has closed)")
        self.assertIn("exchanges", first[0] + second[0])
        self.assertEqual((first[1], second[1]), (first[0], second[0]))


def die_or_wait(rank: int, store: str, pipe, kills: bool) -> None:
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=60 if kills else 2)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=timeout)
    _, copies = collectives(4096)
    if rank == 1:
        pipe.send("ready")
        if kills:
            os.kill(os.getpid(), signal.SIGKILL)
        pipe.recv()  # silent until rank 0 has given up
        os._exit(0)
    pipe.send(error_of(lambda: copies.all_gather(torch.empty(2), torch.ones(1)).wait()))
    os._exit(0)


class PeerTest(unittest.TestCase):
    """What becomes of a rank whose peer does not answer."""

    def peer_of(self, kills: bool) -> str:
        context = context_of_ranks()
        with tempfile.TemporaryDirectory() as folder:
            pipes = [context.Pipe() for _ in range(2)]
            ranks = [
                context.Process(target=die_or_wait, args=(rank, f"{folder}/store", theirs, kills), daemon=True)
                for rank, (_, theirs) in enumerate(pipes)
            ]
            for process in ranks:
                process.start()
            self.assertTrue(pipes[0][0].poll(50))
            text = pipes[0][0].recv()
            if not kills:
                pipes[1][0].send("go")
            for process in ranks:
                process.join()
        return text

    def test_a_killed_peer_is_noticed(self):
        self.assertRegex(self.peer_of(kills=True), "RuntimeError: copy engine of group .*: rank 1 of 2 has closed its")

    def test_a_silent_peer_is_noticed_in_time(self):
        self.assertRegex(
            self.peer_of(kills=False), "RuntimeError: copy engine of group .*: rank 1 of 2 sent no signal within 2 s"
        )


# -- in fully_shard ------------------------------------------------------------------------------------------------------


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 48), nn.Sequential(nn.Linear(48, 300), nn.GELU(), nn.Linear(300, 48)), nn.Linear(48, 8))


def train(name: str | None, policy: MixedPrecisionPolicy, persistent: bool = False, steps: int = 3, **options):
    """Losses and final parameters."""
    model = make_model()
    mesh = init_device_mesh("cpu", options.pop("mesh", (dist.get_world_size(),)))
    for layer in model:
        fully_shard(layer, mesh=mesh, mp_policy=policy, **options)
    fully_shard(model, mesh=mesh, mp_policy=policy, **options)
    chosen = None if name is None else model.set_collectives(name)
    if persistent:
        model.set_persistent_buffers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(dist.get_rank() + 1)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(5, 32)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [param.full_tensor() for param in model.parameters()], chosen, model


def same_training(policy: MixedPrecisionPolicy, options: dict) -> None:
    losses, params, _, _ = train(None, policy, **options)
    for name, persistent in (("copy_engine", False), ("copy_engine", True), (None, True)):
        found = train(name, policy, persistent, **options)
        assert found[0] == losses, (name, persistent, found[0], losses)
        assert all(map(torch.equal, found[1], params)), (name, persistent)
        assert found[2] in (None, ("copy_engine",)), found[2]


def shared_memory() -> int:
    """How many mappings of shared memory this process has, once threads that are at their end have ended."""
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "copy engine":
            thread.join(30)
    with open("/proc/self/maps") as maps:
        return sum("memfd:torch_ragged" in line for line in maps)


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def told(model: nn.Module, name: str) -> tuple[tuple[str, ...], list[str]]:
    lines = Lines()
    logger = logging.getLogger("torch_ragged.fsdp")
    logger.addHandler(lines)
    try:
        return model.set_collectives(name), lines.lines
    finally:
        logger.removeHandler(lines)


def fall_back() -> list[tuple[str, tuple[str, ...], list[str]]]:
    model = make_model()
    fully_shard(model)
    return [(name, *told(model, name)) for name in ("nccl", "symm", "multimem", "copy_engine", "auto")]


def other_hosts() -> tuple[tuple[str, ...], list[str]]:
    model = make_model()
    fully_shard(model)
    with mock.patch("torch_ragged.fsdp.comm._choice.host_of", lambda: f"host {dist.get_rank() // 2}"):
        return told(model, "copy_engine")


def no_memory() -> tuple[tuple[str, ...], list[str]]:
    """One rank has no memory to share: no rank has the copy engine, and training goes on."""
    model = make_model()
    fully_shard(model)
    error = OSError("no memory") if dist.get_rank() == 1 else None
    with mock.patch("os.posix_fallocate", side_effect=error, wraps=os.posix_fallocate):
        found = told(model, "copy_engine")
    model(torch.randn(2, 32)).sum().backward()
    return found


def no_mapping() -> tuple[tuple[str, ...], list[str]]:
    """One rank fails when it has sent its memory to the others already."""
    model = make_model()
    fully_shard(model)
    failing = {"side_effect": OSError("no mapping")} if dist.get_rank() == 1 else {"wraps": _peer_memory._mapped}
    with mock.patch.object(_peer_memory, "_mapped", **failing):
        found = told(model, "copy_engine")
    model(torch.randn(2, 32)).sum().backward()
    return found


def no_facts() -> tuple[tuple[str, ...], list[str]]:
    """One rank cannot find out about itself."""
    model = make_model()
    fully_shard(model)
    error = RuntimeError("no facts") if dist.get_rank() == 1 else None
    with mock.patch("torch_ragged.fsdp.comm._choice.host_of", side_effect=error, return_value="a host"):
        return told(model, "copy_engine")


def misuse() -> list[str]:
    model, rank = make_model(), dist.get_rank()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    errors = [
        error_of(model.set_collectives, "ncll"),
        error_of(model.set_collectives, "copy_engine" if rank else "CE"),
        error_of(model.set_collectives, "copy_engine" if rank else "nccl"),
        error_of(model.set_persistent_buffers, places=1),
    ]
    model.set_requires_gradient_sync(False)
    model(torch.randn(2, 32)).sum().backward()
    errors.append(error_of(model.set_collectives, "copy_engine"))
    model.reset_iter_state()
    assert isinstance(model[0]._ragged_groups(False)[0].collectives, ProcessGroupCollectives)
    model.set_collectives("copy_engine")
    model.set_requires_gradient_sync(True)
    model(torch.randn(2, 32)).sum().backward()
    return errors


def hierarchical() -> tuple[tuple[str, ...], list[str]]:
    model = make_model()
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")), placements=HIERARCHICAL)
    return told(model, "copy_engine")


ENDS = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch_ragged.fsdp import fully_shard

class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("broken")

rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
models = []
for name in ("nccl", "copy_engine"):
    layers = [nn.Linear(2048, 2048, bias=False) for _ in range(3)]
    for layer in layers:
        fully_shard(layer)
    models.append(nn.Sequential(*layers))
    layers[0].register_forward_hook(lambda module, args, output: Broken.apply(output))
    fully_shard(models[-1]).set_collectives(name)
for model in models:
    try:
        model(torch.randn(4, 2048)).sum().backward()
    except ValueError:
        print("raised", flush=True)
if rank == 0:
    dist.destroy_process_group()
"""


class FailingWork:
    """A collective that has ended, and failed if there is an ``error``."""

    def __init__(self, error=None):
        self.error, self.waits = error, 0

    def is_completed(self):
        return True

    def wait(self):
        self.waits += 1
        if self.error is not None:
            raise self.error


class AssistedTest(unittest.TestCase):
    def test_wait_raises_what_failed_when_nothing_is_under_way(self):
        for one_of in (lambda works: _gloo.Assisted(works, lambda: None, needs_works=False), wait_all):
            works = [FailingWork(), FailingWork(RuntimeError("first")), FailingWork(RuntimeError("second"))]
            self.assertEqual(error_of(one_of(works).wait), "RuntimeError: first")
            self.assertEqual([work.waits for work in works], [1, 1, 1])

    def test_wait_raises_what_the_step_raises(self):
        tried, other = threading.Event(), threading.Event()

        def fail():
            tried.set()
            raise ValueError("no step")

        assisted = _gloo.Assisted([FailingWork()], fail, needs_works=True)
        self.assertTrue(tried.wait(60))
        self.assertEqual(error_of(assisted.wait), "ValueError: no step")
        _gloo.Assisted([], other.set, needs_works=True)
        self.assertTrue(other.wait(60), "the assistant has ended")

    def test_a_step_whose_collective_has_failed_is_never_run(self):
        steps = []
        with mock.patch.object(_gloo, "_assistant", autospec=True):
            assisted = _gloo.Assisted([FailingWork(RuntimeError("no peer"))], steps.append, "step", needs_works=True)
        self.assertEqual(error_of(assisted.wait), "RuntimeError: no peer")
        assisted.advance()
        self.assertEqual(steps, [])

    def test_a_forked_process_has_a_thread_of_its_own(self):
        with mock.patch.object(os, "register_at_fork") as register, mock.patch.object(atexit, "register") as at_exit:
            assistant = _gloo._Assistant()
        at_exit.assert_called_once_with(assistant._stop)
        with mock.patch.object(_gloo, "_assistant", assistant):
            threads = []
            for _ in range(2):
                _gloo.Assisted([], lambda: None, needs_works=False).wait()
                threads.append(assistant._thread)
                assistant._stop()
                register.call_args.kwargs["after_in_child"]()  # In the child, which has no copy of the thread.
        self.assertEqual([(thread.name, thread.daemon) for thread in threads], [("collectives", True)] * 2)
        self.assertIsNot(*threads)

    def test_the_thread_ends_when_the_process_does(self):
        assistant = _gloo._Assistant()
        with mock.patch.object(_gloo, "_assistant", assistant), mock.patch.object(_gloo, "LONGEST_STEP", 5.0):
            _gloo.Assisted([], lambda: None, needs_works=False).wait()
            self.assertTrue(assistant._thread.is_alive())
            assistant._stop()
        self.assertFalse(assistant._thread.is_alive())


class SetCollectivesTest(unittest.TestCase):
    @pytest.mark.slow
    def test_processes_end_with_a_reduction_under_way(self):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-W", "ignore", "-c", ENDS]
            ranks = [
                subprocess.Popen([*command, str(rank), f"{folder}/store"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
                for rank in range(2)
            ]
            for rank in ranks:
                out, errors = rank.communicate(timeout=150)
                self.assertEqual((rank.returncode, out.split()), (0, [b"raised"] * 2), errors.decode())

    def test_copying_threads_have_ended_when_python_does(self):
        class SlowToGo:
            def __del__(self):
                time.sleep(0.5)

        tasks, signals = queue.SimpleQueue(), _peer_memory._Signals("a test", 0, {}, 1.0)
        thread = threading.Thread(target=_peer_memory._serve, args=(tasks, [SlowToGo()], signals), daemon=True)
        _peer_memory._serving[thread] = (tasks, signals)
        thread.start()
        tasks.put(None)
        time.sleep(0.1)  # It has no more work, but memory to free.
        self.assertTrue(thread.is_alive())
        with mock.patch.object(_peer_memory, "_serving", {thread: _peer_memory._serving[thread]}):
            _peer_memory._stop_serving()
        self.assertFalse(thread.is_alive())

    @ranks(2)
    def test_sums_are_made_before_they_are_waited_for():
        """A reduction ends before wait() is called; if the assistant thread has ended, in wait()."""
        collectives, rank = ProcessGroupCollectives(dist.group.WORLD), dist.get_rank()
        buffer = torch.arange(1 << 16, dtype=torch.float32) * (rank + 1)
        expected = torch.arange(1 << 16).chunk(2)[rank] * 1.5
        output = torch.full_like(expected, -1.0)
        work = collectives.reduce_scatter(output, buffer, Reduction())
        deadline = time.monotonic() + 60
        while not torch.equal(output, expected):
            assert time.monotonic() < deadline, "nobody has added up"
            time.sleep(0.01)
        work.wait()
        assert torch.equal(output, expected)
        dist.barrier()
        stopped = _gloo._Assistant()
        stopped._stop()
        output.fill_(-1.0)
        with mock.patch.object(_gloo, "_assistant", stopped):
            work = collectives.reduce_scatter(output, buffer, Reduction())
        dist.barrier()
        time.sleep(0.1)
        assert (output == -1.0).all()
        work.wait()
        assert torch.equal(output, expected)
        work.wait()
        assert torch.equal(output, expected)

    @ranks(2)
    def test_large_shards_are_gathered_by_broadcasts():
        """Large shards are broadcast to their offsets; the assistant or wait() copies a rank's own shard."""
        collectives, rank = ProcessGroupCollectives(dist.group.WORLD), dist.get_rank()
        shard = torch.full((2**18,), 1.0 + rank)
        output = torch.zeros(2 * shard.numel())
        with CommDebugMode() as mode:
            works = [collectives.all_gather(output, shard)]
        assert "broadcast" in str(mode.get_comm_counts()), mode.get_comm_counts()
        with CommDebugMode() as mode:
            collectives.all_gather(torch.zeros(8), shard[:4]).wait()
        assert "broadcast" not in str(mode.get_comm_counts()), mode.get_comm_counts()  # It would take longer.
        with mock.patch.object(_gloo, "_assistant", autospec=True):
            again = torch.zeros_like(output)
            works.append(collectives.all_gather(again, shard))
        for work in works:
            work.wait()
        expected = torch.tensor([1.0, 2.0]).repeat_interleave(shard.numel())
        assert torch.equal(output, expected) and torch.equal(again, expected)

    def test_own_part_of_a_large_buffer_stays(self):
        for world in (2, 4):
            with self.subTest(ranks=world):
                run_ranks(world, own_part_stays)

    @ranks(2)
    def test_many_reductions_on_two_groups_give_their_sums():
        """Waited for in another order than issued, on two groups, while the thread adds: what all-reduces give."""
        groups = [ProcessGroupCollectives(dist.new_group()) for _ in range(2)]
        generator = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(20):
            buffers = [torch.randint(-9, 9, (2 * 5000,), generator=generator).to(torch.bfloat16) for _ in range(6)]
            outputs = [torch.empty(5000, dtype=torch.bfloat16) for _ in buffers]
            works = [groups[i % 2].reduce_scatter(outputs[i], buffers[i], Reduction()) for i in range(6)]
            for i in (3, 0, 5, 1, 4, 2):
                works[i].wait()
                total = buffers[i].clone()
                dist.all_reduce(total)
                assert torch.equal(outputs[i], total.chunk(2)[dist.get_rank()] / 2)

    def test_training_is_bitwise_the_same(self):
        for policy, options in ((MixedPrecisionPolicy(), {}), (MIXED, {}), (BF16, {"mesh": (2, 2)})):
            run_ranks(4, same_training, policy, options)

    @ranks(2)
    def test_no_mapping_file_or_thread_is_left():
        """Of the memory of a model that is gone no mapping is left, nor a thread, and it never had a file."""
        before = shared_memory()
        files = os.listdir("/dev/shm")
        model = train("copy_engine", MIXED)[-1]
        with open("/proc/self/maps") as maps:
            assert sum("memfd:torch_ragged" in line for line in maps) - before == 2 * dist.get_world_size()
        assert not [name for name in os.listdir("/dev/shm") if name not in files and "ragged" in name]
        model.set_collectives("nccl")
        assert shared_memory() == before == 0

    def test_fall_back_is_told_in_one_line_on_one_rank(self):
        on_first, on_second = run_ranks(2, fall_back)
        self.assertEqual([chosen for _, chosen, _ in on_first], [("nccl",)] * 3 + [("copy_engine",)] * 2)
        self.assertEqual([chosen for _, chosen, _ in on_second], [chosen for _, chosen, _ in on_first])
        self.assertTrue(all(not lines for _, _, lines in on_second))
        lines = {name: "; ".join(found) for name, _, found in on_first}
        told = r"^set_collectives\('nccl'\): process group \S+ has the backend gloo, whose collectives are used$"
        self.assertRegex(lines["nccl"], told)
        self.assertRegex(lines["symm"], "no symm for process group .*: rank 0: it is for GPUs, parameters are on cpu$")
        self.assertRegex(lines["multimem"], "no multimem for process group .*: rank 0: it is for GPUs, parameters are on cpu$")
        self.assertEqual((lines["copy_engine"], lines["auto"]), ("", ""))

    def test_ranks_on_other_hosts_fall_back(self):
        for rank, (chosen, lines) in enumerate(run_ranks(4, other_hosts)):
            self.assertEqual(chosen, ("nccl",))
            self.assertEqual(["rank 2 is on another host than rank 0" in line for line in lines], [True] * (rank == 0))

    def test_what_fails_on_one_rank_is_used_on_none(self):
        for fails, why in ((no_memory, "no memory"), (no_mapping, "no mapping"), (no_facts, "RuntimeError: no facts")):
            with self.subTest(why):
                self.check_fall_back(fails, why)

    def check_fall_back(self, fails, why):
        (chosen, lines), (other, _) = run_ranks(2, fails)
        self.assertEqual((chosen, other), (("nccl",), ("nccl",)))
        self.assertRegex(lines[0], f"no copy_engine .*rank 1: {why}")

    def test_misuse_is_an_error_on_all_ranks(self):
        first, second = run_ranks(2, misuse)
        names = "collectives must be one of 'nccl', 'symm', 'copy_engine', 'multimem', 'auto', got "
        self.assertEqual((first[0], second[0]), (f"ValueError: {names}'ncll'",) * 2)
        self.assertEqual(first[1], f"ValueError: {names}'CE'")
        self.assertEqual(second[1], f"RuntimeError: set_collectives failed on rank 0: ValueError: {names}'CE'")
        for text in (first[2], second[2]):
            self.assertRegex(text, "ValueError: .*rank 0 has collectives nccl, rank 1 has collectives copy_engine")
        for text in (first[3], second[3]):
            self.assertEqual(text, "ValueError: places must be an int of at least 2, got 1")
        for text in (first[4], second[4]):
            self.assertRegex(text, "RuntimeError: .*has gradients that are not in .grad yet")

    def test_hierarchical_sharding_keeps_its_own(self):
        (chosen, lines), *_ = run_ranks(4, hierarchical)
        self.assertEqual(chosen, ("nccl",))
        self.assertIn("HIERARCHICAL has its own", lines[0])


class WhyNotTest(unittest.TestCase):
    """What ranks decide from what each of them knows."""

    def test_each_problem_of_a_rank_rules_out_what_needs_it(self):
        def gpu(name: str, **facts) -> RankFacts:
            return RankFacts(host="a", gpu=name, **facts)

        self.assertEqual(why_not([gpu("x"), gpu("y")]), {})
        one = why_not([gpu("x"), gpu("x")])
        self.assertEqual(one, dict.fromkeys(("copy_engine", "multimem"), "ranks 0 and 1 are on one GPU"))
        overlapping = why_not([gpu("x", may_overlap=True), gpu("x", may_overlap=True)])
        self.assertEqual(list(overlapping), ["multimem"])
        self.assertEqual(list(why_not([gpu("x", may_overlap=True), gpu("x")])), ["copy_engine", "multimem"])
        apart = why_not([gpu("x"), gpu("y", out_of_reach=frozenset({"x"}))])
        self.assertEqual(apart["copy_engine"], "the GPU of rank 1 has no access to that of rank 0")
        hosts = why_not([gpu("x"), dataclasses.replace(gpu("y"), host="b")])
        self.assertEqual(set(hosts.values()), {"rank 1 is on another host than rank 0"})
        lacking = why_not([gpu("x"), gpu("y", problems={"symm": "no NCCL"})])
        self.assertEqual(lacking, {"symm": "rank 1: no NCCL"})
        self.assertEqual(set(why_not([gpu("x")]).values()), {"there is one rank only"})
