"""Twelve steps of training equal FSDP2's, for a dense and a mixture-of-experts transformer, one way of training at a time."""

import unittest

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import run_ranks
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformer import VOCAB, Transformer

from torch_ragged import RaggedShard, StridedRaggedShard
from torch_ragged.fsdp import fully_shard, rows

STEPS = 12


def build(shard, is_moe, mesh, prepare=None, granular=False, **knobs):
    torch.manual_seed(0)
    model = Transformer(is_moe)
    if prepare is not None:
        prepare(model, shard)
    if granular:
        knobs["orig_param_policy"] = lambda fqn, p: rows(3)
    for block in model.blocks:
        shard(block, mesh=mesh, **knobs)
    return shard(model, mesh=mesh, **knobs)


def train(model, data_rank, data_ranks, micro_batches=1):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    curve = []
    for step in range(STEPS):
        data = torch.randint(0, VOCAB, (8 * micro_batches, 7), generator=torch.Generator().manual_seed(step % 5))
        for micro in range(micro_batches):
            model.set_requires_gradient_sync(micro == micro_batches - 1)
            mine = data[micro * 8 :][data_rank * 8 // data_ranks : (data_rank + 1) * 8 // data_ranks]
            loss = F.cross_entropy(model(mine[:, :-1]).float().flatten(0, 1), mine[:, 1:].flatten())
            (loss / micro_batches).backward()
            curve.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    curve = torch.stack(curve)
    dist.all_reduce(curve)
    return curve / dist.get_world_size()


def compare(is_moe, mesh, data_rank=None, data_ranks=None, tolerance=2e-4, **options):
    where = (dist.get_rank(), dist.get_world_size()) if data_rank is None else (data_rank, data_ranks)
    micro_batches = options.pop("micro_batches", 1)
    theirs, ours = build(torch_fully_shard, is_moe, mesh, **options), build(fully_shard, is_moe, mesh, granular=True, **options)
    want, got = (train(model, *where, micro_batches) for model in (theirs, ours))
    assert want[:5].mean() - want[-5:].mean() > 0.3, want  # It learns, so equal curves mean something.
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    return ours


def world():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def check_replicas(is_moe):
    compare(is_moe, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def check_mixed_precision(is_moe):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    compare(is_moe, world(), mp_policy=policy, tolerance=2**-7)


def check_offload(is_moe):
    compare(is_moe, world(), offload_policy=CPUOffloadPolicy(pin_memory=False))


def check_accumulation(is_moe):
    compare(is_moe, world(), micro_batches=3)


def checkpointed(model, shard):
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block)


def check_checkpointing(is_moe):
    compare(is_moe, world(), prepare=checkpointed)


def compiled(model, shard):
    for block in model.blocks:
        block.compile(backend="aot_eager")


def check_compile(is_moe):
    compare(is_moe, world(), prepare=compiled)
    torch._dynamo.reset()


def check_tensor_parallel(is_moe):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"attention.q": ColwiseParallel(), "attention.k": ColwiseParallel(), "attention.v": ColwiseParallel()}
    plan |= {"attention.out": RowwiseParallel()}
    if not is_moe:
        plan |= {"mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()}

    def parallel(model, shard):
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], plan)
        # A head that is whole here: its weight is cut by columns, its bias replicated.
        parallelize_module(model, mesh["tp"], {"head": RowwiseParallel(input_layouts=Replicate())}) if is_moe else None

    model = compare(is_moe, mesh["dp"], mesh["dp"].get_local_rank(), 2, prepare=parallel)
    attention = model.blocks[0].attention
    column, row = attention.q.weight.placements, attention.out.weight.placements
    assert isinstance(column[0], StridedRaggedShard) and column[0].split_factor == 2 and column[1] == Shard(0), column
    assert isinstance(row[0], RaggedShard) and row[0].dims == (0,) and row[1] == Shard(1), row
    assert attention.q.weight.device_mesh == mesh


def check_expert_parallel(is_moe):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    everyone = mesh._flatten("dp_ep")

    def parallel(model, shard):
        for block in model.blocks:
            experts = block.mlp.experts
            experts.group = mesh["ep"].get_group()
            for name in ("up", "down"):
                setattr(experts, name, nn.Parameter(distribute_tensor(getattr(experts, name).detach(), mesh["ep"], [Shard(0)])))
            shard(experts, mesh=mesh["dp"])
            # As torchtitan does: tokens of all ranks of both dimensions reach an expert.
            experts.set_gradient_divide_factor(4)
            experts.set_force_sum_reduction_for_comms(True)  # gloo has no other; FSDP2 asks for one else.

    model = compare(is_moe, everyone, prepare=parallel)
    placements = model.blocks[0].mlp.experts.up.placements
    assert isinstance(placements[0], StridedRaggedShard) and placements[1] == Shard(0), placements


EVERYDAY = {
    True: [check_expert_parallel],
}
OTHERS = {
    False: [
        check_replicas,
        check_offload,
        check_accumulation,
        check_mixed_precision,
        check_compile,
        check_checkpointing,
        check_tensor_parallel,
    ],
    True: [
        check_replicas,
        check_offload,
        check_accumulation,
        check_mixed_precision,
        check_compile,
        check_tensor_parallel,
        check_checkpointing,
    ],
}


class TrainingTest(unittest.TestCase):
    def run_all(self, ways):
        for is_moe, checks in ways.items():
            for check in checks:
                with self.subTest(check.__name__, is_moe=is_moe):
                    run_ranks(2 if check is check_compile else 4, check, is_moe)  # Every rank compiles.

    def test_each_way(self):
        self.run_all(EVERYDAY)

    @pytest.mark.slow
    def test_the_other_ways(self):
        self.run_all(OTHERS)
