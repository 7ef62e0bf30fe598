"""The CUDA code of the collectives on the CPU: every line runs, on streams, pools and symmetric memory that are stand-ins.

The stand-ins do on the CPU what torch's do (symmetric memory is one rank's, seen by all), and note the order of calls.
"""

import contextlib
import datetime
import os
import sys
import types
import unittest
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory  # Once, before any part of it is replaced: torch 2.11 cannot import it again.
from common import error_of, ranks, run_ranks

from torch_ragged.fsdp.comm import _choice
from torch_ragged.fsdp.comm._collectives import ProcessGroupCollectives
from torch_ragged.fsdp.comm._reduction import Reduction, Steps
from torch_ragged.fsdp.comm.experimental import _multicast
from torch_ragged.fsdp.comm.experimental._copy_engine import CopyEngineCollectives
from torch_ragged.fsdp.comm.experimental._peer_memory import SymmetricPeerMemory

minute = datetime.timedelta(minutes=1)
LOGS = unittest.TestCase()


class Largest(Reduction):
    def steps(self, size, dtype, averages):
        return Steps(dist.ReduceOp.MAX)


class Stream:
    """A stream that runs what is issued at once, and notes it."""

    log: list[str] = []

    def __init__(self, device=None, priority=0):
        self.name = {0: "low", -1: "high"}[priority]

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")

    def record_event(self):
        self.log.append(f"event in {self.name}")
        return self

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for event in {event.name}")


CURRENT = Stream()
CURRENT.name = "current"


class Handle:
    """Symmetric memory of ``size`` ranks in one process: each has its part of one tensor."""

    def __init__(self, memory: torch.Tensor, rank: int) -> None:
        self.memory, self.rank, self.multicast_ptr = memory, rank, memory.data_ptr()

    def get_remote_tensor(self, peer, sizes, dtype):
        return self.memory[peer].view(dtype)[: sizes[0]]

    def barrier(self, channel=0, timeout_ms=0):
        assert channel == 0 and timeout_ms == 60_000, (channel, timeout_ms)
        Stream.log.append("barrier")


@contextlib.contextmanager
def cuda(handle):
    """torch.cuda's streams, and symmetric memory whose rendezvous gives ``handle(tensor)``."""
    import torch.distributed._symmetric_memory as symm_mem

    Stream.log = []
    with contextlib.ExitStack() as stack:
        for where, name, what in (
            (torch.cuda, "Stream", Stream),
            (torch.cuda, "stream", lambda stream: contextlib.nullcontext()),
            (torch.cuda, "current_stream", lambda: CURRENT),
            (symm_mem, "empty", lambda numel, dtype, device: torch.zeros(numel, dtype=dtype)),
            (symm_mem, "rendezvous", lambda tensor, group: handle(tensor)),
        ):
            stack.enter_context(mock.patch.object(where, name, what))
        yield


def copy_engine() -> None:
    """Two ranks' halves of an exchange, one after the other, in memory that both see."""
    size, rank = 2, 0
    made = []

    def handle(tensor):
        made.append(Handle(torch.zeros(size, tensor.numel(), dtype=torch.uint8), rank))
        return made[-1]

    world = mock.Mock(wraps=dist.group.WORLD)
    world.rank.side_effect, world.size.side_effect = (lambda: rank), (lambda: size)
    with cuda(handle), mock.patch("torch_ragged.fsdp.comm.experimental._peer_memory.timeout_of", lambda *_: minute):
        gathers = SymmetricPeerMemory(world, torch.device("cpu"), 64)
        reductions = SymmetricPeerMemory(world, torch.device("cpu"), 64, priority=0)
        groups = ProcessGroupCollectives(dist.group.WORLD)
        copies = CopyEngineCollectives(groups, dist.group.WORLD, gathers, reductions)
        output, shard = torch.zeros(2 * 24), torch.arange(24.0)
        made[0].memory[1].view(torch.float32)[:16] = torch.arange(100.0, 116.0)  # Rank 1 has written both pieces.
        made[0].memory[1].view(torch.float32)[16:24] = torch.arange(116.0, 124.0)
        work = copies.all_gather(output, shard)
        assert Stream.log == ["high waits for current", "barrier", "event in high"] * 2, Stream.log
        work.wait()
        assert Stream.log[6:] == ["current waits for event in high"] * 2
        assert torch.equal(output, torch.cat([shard, torch.arange(100.0, 124.0)])), output
        assert torch.equal(made[0].memory[0].view(torch.float32)[:16], shard[:16])  # what rank 1 reads
        Stream.log.clear()
        made[1].memory[0].view(torch.float32)[4:8] = 10.0  # Rank 1 has pushed its part into this rank's slot.
        reduced = torch.zeros(4)
        copies.reduce_scatter(reduced, torch.arange(8.0), Reduction(divisor=2.0)).wait()
        assert torch.equal(reduced, (torch.arange(4.0) + 10) / 2), reduced
        assert torch.equal(made[1].memory[1].view(torch.float32)[:4], torch.arange(4.0, 8.0))  # pushed to rank 1
        assert Stream.log == ["low waits for current", "barrier", "event in low", "current waits for event in low"]


def chosen(symmetric: bool) -> None:
    """The implementations are made and installed, with the allocators that their buffers need."""
    world = dist.group.WORLD
    device, process_groups = types.SimpleNamespace(type="cuda", index=0), mock.Mock(spec=ProcessGroupCollectives)
    process_groups.levels = None
    process_groups.memory_pool.return_value = mock.sentinel.pool if symmetric else None
    traffic = _choice.Traffic(device, [process_groups], gathered_nbytes=2000, reduced_nbytes=4097)
    sizes: dict[str, list[int]] = {"symmetric": [], "any": []}

    def allocating(memory):
        return lambda numel, dtype, device: sizes[memory].append(numel) or torch.zeros(numel, dtype=dtype)

    with (
        cuda(lambda tensor: Handle(tensor.view(1, -1), 0)),
        mock.patch.object(_choice, "problems_of", lambda *_: {}),
        mock.patch.object(torch.cuda, "use_mem_pool", lambda found: contextlib.nullcontext()),
        mock.patch("torch_ragged.fsdp.comm.experimental._peer_memory.timeout_of", lambda *_: minute),
        mock.patch("torch_ragged.fsdp.comm.experimental._multicast.timeout_of", lambda *_: minute),
        mock.patch("torch.distributed._symmetric_memory.empty", allocating("symmetric")),
        mock.patch.object(torch, "empty", allocating("any")),
    ):
        for name, kind in (("copy_engine", CopyEngineCollectives), ("multimem", _multicast.MulticastCollectives)):
            with LOGS.assertLogs("torch_ragged.fsdp", "WARNING") as logs:
                found = _choice.choose_implementation(name, world, traffic)
            assert f"set_collectives('{name}'): experimental" in logs.output[0] and len(logs.output) == 1, logs.output
            assert found.name == name
            assert isinstance(found.collectives(process_groups), kind)
            assert (found.allocate is not None) == (name == "multimem")
            if name == "copy_engine":
                assert sizes["symmetric"] == [2 * 4096, 2 * 8192], sizes  # Two slots of whole pages for each of both.
        sizes["any"].clear()
        with LOGS.assertLogs("torch_ragged.fsdp", "WARNING") as logs:
            found = _choice.choose_implementation("symm", world, traffic)
        assert len(logs.output) == 1, logs.output
        assert ("experimental" if symmetric else "no memory allocator") in logs.output[0], logs.output
        assert found.name == ("symm" if symmetric else "nccl")
        assert found.collectives(process_groups) is process_groups
        if symmetric:
            assert sizes["any"][0] == 1 << 20, sizes  # It has been tried.
            assert found.allocate(8, torch.bfloat16).numel() == 8
        process_groups.memory_pool.assert_called_with(device, is_symmetric=True)
        process_groups.memory_pool.reset_mock()
        with LOGS.assertNoLogs("torch_ragged.fsdp"):  # Experimental ones are used by name only.
            assert _choice.choose_implementation("auto", world, traffic).name == "nccl"
        process_groups.memory_pool.assert_not_called()


class CudaPathsTest(unittest.TestCase):
    def test_the_copy_engine_copies_between_barriers_on_its_streams(self):
        run_ranks(1, copy_engine)

    @ranks(1)
    def test_multicast_sums_between_barriers_and_leaves_the_rest():
        world = dist.group.WORLD
        device = types.SimpleNamespace(type="cuda", index=0)
        handles = []

        def handle(tensor):
            handles.append(Handle(tensor.view(1, -1), 0))
            return handles[-1]

        sums = []

        def load_sum(address: int, output: torch.Tensor) -> None:
            Stream.log.append("sum")
            sums.append((address, output))
            output.fill_(6.0)

        gathered: list[tuple] = []
        ops = types.SimpleNamespace(multimem_all_gather_out=lambda *args: gathered.append(args))
        with (
            cuda(handle),
            mock.patch.object(_multicast, "timeout_of", lambda *_: minute),
            mock.patch.object(_multicast, "load_sum", load_sum),
            mock.patch.object(torch.ops, "symm_mem", ops),
        ):
            slabs = _multicast.SymmetricSlabs(world, device)
            groups = ProcessGroupCollectives(world)
            collectives = _multicast.MulticastCollectives(groups, world, slabs)
            buffer = slabs.allocate(8, torch.float32)
            collectives.all_gather(buffer, buffer[:8]).wait()
            part, name, output = gathered[0]
            assert name == world.group_name and part.dtype == output.dtype == torch.uint8 and output.numel() == 32
            output = torch.zeros(8)
            collectives.reduce_scatter(output, buffer, Reduction(divisor=2.0)).wait()
            assert torch.equal(output, torch.full((8,), 3.0))
            assert sums[0][0] == handles[0].multicast_ptr
            order = ["low waits for current", "barrier", "sum", "barrier", "event in low", "current waits for event in low"]
            assert Stream.log[-6:] == order, Stream.log
            # What lies elsewhere, or has another type, goes to the process group.
            collectives.all_gather(torch.zeros(4), torch.ones(4)).wait()
            collectives.reduce_scatter(torch.zeros(4), torch.ones(4), Reduction()).wait()
            collectives.reduce_scatter(torch.zeros(8).half(), slabs.allocate(8, torch.float16), Reduction()).wait()
            # The kernel computes sums: another op is an error, never a sum.
            assert "needs MAX" in error_of(collectives.reduce_scatter, output, buffer, Largest())
            assert len(gathered) == len(sums) == 1

    def test_the_chosen_implementation_is_installed_with_its_allocator(self):
        run_ranks(1, chosen, True)
        run_ranks(1, chosen, False)

    @ranks(1)
    def test_a_rank_with_gpus_knows_its_problems():
        """What a rank with GPUs finds out about itself."""
        world, device = dist.group.WORLD, types.SimpleNamespace(type="cuda", index=0)
        backend = mock.Mock(spec=["supports_tensor_alloc", "register_mem_pool"])
        with (
            mock.patch.object(_choice, "backend_of", lambda *_: backend),
            mock.patch.object(_choice, "has_multicast", lambda device: True),
            mock.patch.dict("sys.modules", {"triton": types.ModuleType("triton")}),
            mock.patch.object(torch.cuda, "get_device_properties", lambda index: types.SimpleNamespace(uuid=f"gpu {index}")),
            mock.patch.object(torch.cuda, "device_count", lambda: 3),
            mock.patch.object(torch.cuda, "can_device_access_peer", lambda mine, other: other == 1),
            mock.patch.object(torch.cuda, "get_device_capability", lambda device: (9, 0)),
            mock.patch("torch.distributed._symmetric_memory.get_backend", lambda device: "CUDA"),
            mock.patch.dict("os.environ", {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}),
        ):
            found = _choice._facts(world, device)
            assert (found.gpu, found.out_of_reach, found.may_overlap) == ("gpu 0", frozenset({"gpu 2"}), True), found
            assert found.problems == {}, found.problems
            with mock.patch.object(torch.cuda, "get_device_capability", lambda device: (8, 0)):
                problems = _choice._facts(world, device).problems
                assert problems == {"multimem": "multimem instructions need compute capability 9.0 (Hopper)"}, problems
            with mock.patch.dict("os.environ", {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "0"}):
                assert not _choice._facts(world, device).may_overlap
                del os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"]
                assert not _choice._facts(world, device).may_overlap
            with mock.patch.object(_choice, "host_of", side_effect=OSError("no id")):
                assert _choice._facts(world, device).problems == dict.fromkeys(("copy_engine", "multimem"), "no id")
            with mock.patch.object(_choice, "has_multicast", lambda device: False):
                assert "no multicast" in _choice._facts(world, device).problems["multimem"]
            with mock.patch("torch.distributed._symmetric_memory.get_backend", lambda device: None):
                assert "no symmetric memory" in _choice._facts(world, device).problems["copy_engine"]
            with mock.patch.dict(sys.modules, {"torch.distributed._symmetric_memory": None}):  # A build without it.
                problems = _choice._facts(world, device).problems
                assert "no symmetric memory" in problems["copy_engine"] and "no symmetric memory" in problems["multimem"]
            del backend.register_mem_pool
            assert "cannot register memory" in _choice._facts(world, device).problems["symm"]

    def test_torch_has_what_is_called_of_symmetric_memory(self):
        """What is called of torch's symmetric memory is there; what a CPU build lacks is not asked for there."""
        symmetric = torch._C._distributed_c10d._SymmetricMemory
        for name in ("get_remote_tensor", "barrier", "multicast_ptr", "rank", "has_multicast_support"):
            self.assertTrue(hasattr(symmetric, name), name)
        self.assertTrue(hasattr(torch.ops.symm_mem, "multimem_all_gather_out"))

    def test_kernel_compiles_for_hopper(self):
        """The multicast load is assembled for sm_90 by Triton's own ptxas; no GPU is needed."""
        try:
            import triton
            from triton.backends.compiler import GPUTarget
            from triton.compiler import ASTSource
        except ImportError:
            self.skipTest("Triton is not installed")
        names = {"address": "i64", "words": "*i32", "packets": "i32", "ASM": "constexpr", "BLOCK": "constexpr"}
        for dtype, text in (("v4.f32", "add.v4.f32"), ("acc::f32.v4.bf16x2", "add.acc::f32.v4.bf16x2")):
            constants = {"ASM": _multicast._LOAD_SUM.replace("{type}", dtype), "BLOCK": 512}
            source = ASTSource(fn=_multicast.load_sum_kernel(), signature=names, constexprs=constants)
            compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 16})
            self.assertIn(f"multimem.ld_reduce.relaxed.sys.global.{text}", compiled.asm["ptx"])
            self.assertGreater(len(compiled.asm["cubin"]), 0)
