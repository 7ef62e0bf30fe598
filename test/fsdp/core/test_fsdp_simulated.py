"""Blocks of real models on 256 simulated ranks: layouts, buffers and collective bytes are the plan's.

Everything is on the meta device and in one process of a fake process group; collectives are counted in place of run.
"""

import os
import sys
import unittest
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from fsdp_collectives import NoCollectives
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import torch_ragged
from torch_ragged.fsdp import (
    HIERARCHICAL,
    ZERO2,
    DBuffer,
    buffer_layouts,
    elements,
    fully_shard,
    memory_report,
    plan_layout,
    rows,
)
from torch_ragged.fsdp.core._fsdp_param_group import FSDPParamGroup
from torch_ragged.tensor import _dispatch

RANKS = 256


def linear(into, out):
    return nn.Linear(into, out, bias=False, device="meta", dtype=torch.bfloat16)


class Llama70B(nn.Module):
    """One block of Llama-3-70B; attention without its softmax, which has no parameters."""

    def __init__(self, dim=8192, kv=1024, hidden=28672):
        super().__init__()
        self.q, self.k, self.v, self.out = linear(dim, dim), linear(dim, kv), linear(dim, kv), linear(dim, dim)
        self.gate, self.up, self.down = linear(dim, hidden), linear(dim, hidden), linear(hidden, dim)
        self.norm1, self.norm2 = (nn.RMSNorm(dim, device="meta", dtype=torch.bfloat16) for _ in range(2))

    def forward(self, x):
        y = self.norm1(x)
        x = x + self.out(self.q(y)) + (self.k(y) + self.v(y)).sum()
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class GptOss120B(nn.Module):
    """One block of GPT-OSS-120B: 128 fused experts of 2880 x 2880."""

    def __init__(self, dim=2880, heads=4096, kv=512, experts=128):
        super().__init__()
        self.q, self.k, self.v, self.out = linear(dim, heads), linear(dim, kv), linear(dim, kv), linear(heads, dim)
        self.router = linear(dim, experts)
        parameter = lambda *shape: nn.Parameter(torch.empty(*shape, device="meta", dtype=torch.bfloat16))  # noqa: E731
        self.gate_up, self.gate_up_bias = parameter(experts, dim, 2 * dim), parameter(experts, 2 * dim)
        self.down, self.down_bias = parameter(experts, dim, dim), parameter(experts, dim)
        self.norm1, self.norm2 = (nn.RMSNorm(dim, device="meta", dtype=torch.bfloat16) for _ in range(2))

    def forward(self, x):
        y = self.norm1(x)
        x = x + self.out(self.q(y)) + (self.k(y) + self.v(y)).sum()
        y = self.norm2(x).expand(len(self.gate_up), -1, -1)
        gate, up = (torch.bmm(y, self.gate_up) + self.gate_up_bias.unsqueeze(1)).chunk(2, -1)
        experts = torch.bmm(gate * up, self.down) + self.down_bias.unsqueeze(1)
        return x + (experts * self.router(x).T.unsqueeze(-1)).sum(0)


def granularity(fqn, parameter):
    return rows(32, within=0) if parameter.ndim == 3 else rows() if parameter.ndim == 2 else elements()


def simulate(block, mesh, **knobs):
    """The group of ``block``, and what a forward and backward of it communicates."""
    model = fully_shard(block, mesh=mesh, orig_param_policy=granularity, reshard_after_forward=True, **knobs)
    (group,) = (group for state in model._ragged_states(True) for group in state.groups)
    group.collectives = counted = NoCollectives()
    # There are no addresses on the meta device by which to tell whose memory a tensor lies in.
    with mock.patch.object(DBuffer, "holds", lambda *_: False):
        with (
            mock.patch.object(FSDPParamGroup, "is_meta", False),
            mock.patch.object(FSDPParamGroup, "replaced", lambda _: []),
        ):
            dim = model.norm1.weight.shape[0]
            held = []
            before = FSDPParamGroup.before_gradient  # Called before each gradient.

            def sample(group):
                held.append(resident(group))
                before(group)

            with mock.patch.object(FSDPParamGroup, "before_gradient", sample):
                model(torch.randn(2, dim, device="meta", dtype=torch.bfloat16)).sum().backward()
    return model, group, counted, max(held)


def resident(group):
    return sum(b.resident_nbytes for kind in ("sharded", "gathered", "gradients") for b in group.buffers()[kind])


class SimulatedTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        dist.init_process_group("fake", rank=37, world_size=RANKS, store=FakeStore())

    @classmethod
    def tearDownClass(cls):
        dist.destroy_process_group()

    def check(self, make, count, reduce_dtype):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
        block = make()
        names, values = zip(*block.named_parameters())
        self.assertEqual(sum(value.numel() for value in values), count)
        specs = [granularity(name, value).tensor_spec(name, value.shape) for name, value in zip(names, values, strict=True)]
        plan = plan_layout(specs, RANKS, 128 // 2)
        model, group, counted, most = simulate(block, init_device_mesh("cpu", (RANKS,)), mp_policy=policy)
        self.assertEqual(buffer_layouts(model)["root"], plan)
        self.assertLess(plan.padding_fraction, 0.02)
        for index, (name, param) in enumerate(model.named_parameters()):
            start, stop = plan.local_range(index, 37)
            self.assertEqual((param.to_local().numel(), param.grad.to_local().numel()), (stop - start, stop - start), name)
            self.assertEqual(param.placements[0], plan.placement(index), name)
        whole = plan.numel * 2
        self.assertEqual((group.sharded.nbytes, group.encoding.buffer.nbytes), (whole // RANKS, whole))
        self.assertEqual(counted.calls, {"all_gather": 2, "reduce_scatter": 1, "all_reduce_max": 1})
        self.assertEqual(counted.bytes["all_gather"], 2 * whole)
        self.assertEqual(counted.bytes["reduce_scatter"], plan.numel * reduce_dtype.itemsize)
        self.assertEqual(counted.bytes["all_reduce_max"], len(names))
        # When a collective begins: parameters and their gradients, both in param_dtype; or wider gradients, without parameters.
        self.assertEqual(most, whole // RANKS + 2 * whole)
        self.assertEqual(resident(group), whole // RANKS)  # All other buffers are free.
        peak = memory_report(model).peak
        narrow, wide = (whole, 0) if reduce_dtype == torch.bfloat16 else (0, 2 * whole)
        self.assertEqual((peak.gathered, peak.gradients), (narrow, whole + wide))

    def test_a_block_of_llama_3_70b_holds_and_moves_what_was_planned(self):
        self.check(Llama70B, 855_654_400, torch.float32)

    def test_a_block_of_gpt_oss_120b_holds_and_moves_what_was_planned(self):
        self.check(GptOss120B, 3_213_072_000, torch.bfloat16)

    def test_replicas_and_zero_stages_issue_their_collectives_only(self):
        square = init_device_mesh("cpu", (32, 8), mesh_dim_names=("replicate", "shard"))
        for knobs, mesh, shards, calls in (
            ({}, square, 8, {"all_gather": 2, "reduce_scatter": 1, "all_reduce": 1, "all_reduce_max": 1}),
            (
                {"placements": ZERO2},
                init_device_mesh("cpu", (RANKS,)),
                256,
                {"all_gather": 1, "reduce_scatter": 1, "all_reduce_max": 1},
            ),
            # One gather of 8 ranks' slots across 32 nodes; within a node one for each of these, twice. Reductions: both once.
            (
                {"placements": HIERARCHICAL},
                square,
                256,
                {"all_gather": 1 + 2 * 32, "reduce_scatter": 32 + 1, "all_reduce_max": 1},
            ),
        ):
            with self.subTest(**knobs):
                _, group, counted, _ = simulate(Llama70B(), mesh, **knobs)
                self.assertEqual(group.layout.ranks, shards)
                self.assertEqual(counted.calls, calls)
                second = group.layout.numel // 8 if knobs.get("placements") is HIERARCHICAL else 0
                self.assertEqual(counted.bytes["reduce_scatter"], (group.layout.numel + second) * 2)


class Block(nn.Module):
    """A parameter that lies on every rank, and eight of one shape that lie on one or two."""

    def __init__(self, ranks):
        super().__init__()
        self.table = nn.Parameter(torch.empty(ranks * 64 + 21, 4, device="meta"))
        self.layers = nn.ModuleList(nn.Linear(256, 255, bias=False, device="meta") for _ in range(8))


def lines_run(function):
    """How many lines of the package's Python ``function`` runs; those of a loop count each time."""
    folder, count = os.path.dirname(torch_ragged.__file__), 0

    def in_package(frame, event, _):
        nonlocal count
        count += event == "line"
        return in_package

    before = sys.gettrace()
    sys.settrace(lambda frame, *_: in_package if frame.f_code.co_filename.startswith(folder) else None)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


class ConstructionTest(unittest.TestCase):
    def construct(self, ranks):
        """``fully_shard`` of a block: the lines that it runs, and how often torch runs an operator on fake tensors."""
        dist.init_process_group("fake", rank=1, world_size=ranks, store=FakeStore())
        self.addCleanup(dist.destroy_process_group)
        mesh, block = init_device_mesh("cpu", (ranks,)), Block(ranks)
        propagator = DTensor._op_dispatcher.sharding_propagator
        asked = mock.create_autospec(original := propagator._propagate_tensor_meta_non_cached, side_effect=original)
        with mock.patch.object(propagator, "_propagate_tensor_meta_non_cached", asked):
            lines = lines_run(lambda: fully_shard(block, mesh=mesh))
        self.doCleanups()
        self.assertEqual(len({parameter.placements for parameter in block.parameters()}), 9)
        return lines, asked.call_count

    def test_runs_no_line_per_rank(self):
        few, many = self.construct(64)[0], self.construct(8192)[0]
        self.assertLess(many, few + 1000)

    def test_placements_do_not_make_torch_think_again(self):
        _dispatch._metas.clear()
        self.assertLessEqual(self.construct(1000)[1], 2)  # One for each shape.
