"""Checkpoints of models with tensor and expert parallelism, replicas and every optimizer, through torch_ragged.checkpoint."""

import tempfile
import unittest
from collections import Counter
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from common import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformer import VOCAB, Transformer

from torch_ragged import checkpoint
from torch_ragged.checkpoint._reader import _Chunks
from torch_ragged.fsdp import HIERARCHICAL, fully_shard, rows
from torch_ragged.optim import AdamW8bit, Muon, matrix_groups

COLUMNS, ROWS = ("attention.q", "attention.k", "attention.v", "mlp.up"), ("attention.out", "mlp.down")


def sharded(kind, seed, optimizer="adamw"):
    """A dense or expert model as ``kind`` distributes it, its optimizer, and the rank's part of the data."""
    torch.manual_seed(seed)
    model, ranks = Transformer(is_moe=kind == "experts"), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    if kind in ("tensor", "experts", "replicas", "hierarchical"):
        square = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("dp", "other"))
        mesh = square if kind in ("replicas", "hierarchical") else square["dp"]
    for block in model.blocks:
        if kind == "tensor":
            plan = {name: ColwiseParallel() for name in COLUMNS} | {name: RowwiseParallel() for name in ROWS}
            parallelize_module(block, square["other"], plan)
        if kind == "experts":
            for name, parameter in list(block.mlp.experts.named_parameters()):
                placed = distribute_tensor(parameter.detach(), square["other"], [Shard(0)])
                setattr(block.mlp.experts, name, nn.Parameter(placed))
    placements = HIERARCHICAL if kind == "hierarchical" else None
    policy = AdamW8bit.policy if optimizer == "adam8bit" else lambda fqn, p: rows(3)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, orig_param_policy=policy, placements=placements)
    if optimizer == "muon":
        made = Muon(matrix_groups(model, adamw=[model.head]), lr=0.01)
    else:
        made = {"adamw": torch.optim.AdamW, "adam8bit": AdamW8bit}[optimizer](model.parameters(), lr=0.01)
    return checkpoint.TrainState(model, made)


def give_gradients(state, seed):
    """The same whole gradient on any mesh, and a step with it."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in state.model.parameters():
        whole = torch.randn(parameter.shape, generator=generator)
        parameter.grad = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
    state.optimizer.step()
    state.step += 1


def values(state):
    found = {name: parameter.full_tensor() for name, parameter in state.model.named_parameters()}
    for name, parameter in state.model.named_parameters():
        for key, value in state.optimizer.state[parameter].items():
            if isinstance(value, torch.Tensor):
                found[f"{name}.{key}"] = value.full_tensor() if isinstance(value, DTensor) else value
    return {name: value.detach().clone() for name, value in found.items()}


def save(kind, optimizer, path):
    state = sharded(kind, 0, optimizer)
    give_gradients(state, 1)
    checkpoint.save(path, state)
    saved = values(state)
    give_gradients(state, 2)
    return saved, values(state)


def load(kind, optimizer, path, saved, after):
    state = sharded(kind, 5, optimizer)
    checkpoint.load(path, state)
    for got, want in ((values(state), saved), (give_gradients(state, 2) or values(state), after)):
        assert got.keys() == want.keys()
        for name, value in want.items():
            if optimizer == "muon" and want is after:  # Matrices that tensor parallelism cuts are rounded in another order.
                torch.testing.assert_close(got[name], value, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{kind} {n}: {m}")
            else:
                assert torch.equal(got[name], value), (kind, name)


def count_reads(path):
    """Bytes of tensors that this rank reads, if replicas read a share each, and if not; both fill the same values."""
    sizes, found = [], []
    for spread in (True, False):
        state, read = sharded("replicas", 5), Counter()
        copy = _Chunks.copy

        def counted(self, index, sizes, dtype, place, target, read=read, copy=copy):
            read["bytes"] += target.nbytes
            copy(self, index, sizes, dtype, place, target)

        with mock.patch.object(_Chunks, "copy", counted):
            checkpoint.load(path, state, spread=spread)
        sizes.append(read["bytes"])
        found.append(values(state))
    assert found[0].keys() == found[1].keys() and all(torch.equal(value, found[1][name]) for name, value in found[0].items())
    return sizes


class ParallelCheckpointTest(unittest.TestCase):
    def round_trip(self, optimizer, source, *targets):
        with tempfile.TemporaryDirectory() as path:
            (saved, after), *_ = run_ranks(source[0], save, source[1], optimizer, path)
            self.assertGreater(len(saved), 2 * VOCAB // 2)
            for ranks, kind in targets:
                with self.subTest(optimizer=optimizer, source=source, target=(ranks, kind)):
                    run_ranks(ranks, load, kind, optimizer, path, saved, after)

    def test_tensor_parallel_checkpoints_load_as_shards_and_back(self):
        self.round_trip("adamw", (4, "tensor"), (2, "shards"))
        self.round_trip("adamw", (4, "hierarchical"), (4, "tensor"))

    @pytest.mark.slow
    def test_tensor_parallel_checkpoints_load_as_replicas(self):
        self.round_trip("adamw", (4, "tensor"), (4, "replicas"), (4, "hierarchical"))

    def test_replicas_read_a_share_each(self):
        with tempfile.TemporaryDirectory() as path:
            run_ranks(4, save, "replicas", "adamw", path)
            reads = run_ranks(4, count_reads, path)
        for first, second in ((0, 2), (1, 3)):  # the replicas of each shard
            alone = reads[first][1]
            self.assertAlmostEqual(alone, reads[second][1], delta=200)
            self.assertLess(max(reads[first][0], reads[second][0]), 0.7 * alone)  # Random states are no replicas.

    def test_expert_parallel_checkpoints_load_back(self):
        self.round_trip("adamw", (4, "experts"), (4, "experts"))

    def test_states_of_every_optimizer_load_at_other_ranks(self):
        self.round_trip("muon", (4, "shards"), (2, "shards"))
        self.round_trip("adam8bit", (4, "shards"), (4, "replicas"))

    @pytest.mark.slow
    def test_states_of_every_optimizer_load_in_all_combinations(self):
        for optimizer in ("muon", "adam8bit"):
            self.round_trip(optimizer, (4, "shards"), (2, "shards"), (4, "replicas"))
