"""Shards in proportion to weights: training, optimizers, checkpoints, and what is refused."""

import os
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from common import error_of, ranks, run_ranks
from torch import nn
from torch.distributed.checkpoint import load as dcp_load
from torch.distributed.checkpoint import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from torch_ragged import checkpoint
from torch_ragged.fsdp import HIERARCHICAL, ZERO1, ZERO2, buffer_layouts, fully_shard, reshard_to
from torch_ragged.fsdp.comm import _gloo
from torch_ragged.optim import Adam8bit, BlockPolicy, Muon, matrix_groups

DIM = 12
SMALL = BlockPolicy((4, 12), min_numel=64)


def make(dtype=torch.float64):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(DIM, 3 * DIM), nn.GELU(), nn.Linear(3 * DIM, DIM), nn.LayerNorm(DIM)) for _ in range(2)]
    return nn.Sequential(*layers, nn.Linear(DIM, 5)).to(dtype)


def sharded(weights=None, mesh=None, dtype=torch.float64, **options):
    model = make(dtype)
    for layer in (*model[:2], model):
        fully_shard(layer, mesh=mesh, weights=weights, **options)
    return model


def train(model, steps=3, optimizer=None, micro_batches=1, size=None, rank=None):
    """Steps of ``size`` ranks that divide 24 rows. Returns this rank's losses."""
    size, rank = size or dist.get_world_size(), dist.get_rank() if rank is None else rank
    optimizer, losses = optimizer or torch.optim.AdamW(model.parameters(), lr=0.02), []
    dtype = next(model.parameters()).dtype
    for step in range(steps):
        for micro in range(micro_batches):
            data = torch.randn(24, DIM, generator=torch.Generator().manual_seed(10 * step + micro), dtype=torch.float64)
            loss = model(data.to(dtype).chunk(size)[rank]).pow(2).mean()
            loss.backward()
            losses.append(loss.item())
        optimizer.step(), optimizer.zero_grad()
    return losses


def whole(model):
    return {name: param.detach().full_tensor() for name, param in model.named_parameters()}


def assert_same(ours, theirs):
    for (name, mine), other in zip(ours.items(), theirs.values(), strict=True):
        assert torch.equal(mine, other), f"{name}: {(mine - other).abs().max()}"


class WeightsTest(unittest.TestCase):
    @ranks(3)
    def test_training_has_the_bits_of_equal_shards():
        large = _gloo._SMALLEST_BROADCAST
        for options, broadcast in (
            ({}, large),
            ({}, 0),  # The way of large shards: broadcasts in place of an all-gather of padded ones.
            ({"placements": ZERO1}, large),
            ({"placements": ZERO2}, large),
            ({"reshard_after_forward": False}, 0),
        ):
            models = [sharded(weights, **options) for weights in (None, [3, 2, 0], [1, 0, 7])]
            with mock.patch.object(_gloo, "_SMALLEST_BROADCAST", broadcast):
                losses = [train(model, micro_batches=2) for model in models]
            for model, curve in zip(models[1:], losses[1:]):
                assert curve == losses[0], (options, curve, losses[0])
                assert_same(whole(model), whole(models[0]))
            held = [sum(p.to_local().numel() for p in model.parameters()) for model in models]
            assert (held[1] == 0) == (dist.get_rank() == 2) and (held[2] == 0) == (dist.get_rank() == 1), held

    @ranks(4)
    def test_replicas_tensor_parallelism_and_dtypes_train_as_equal_shards():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        narrow = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for dtype, policy in ((torch.float64, MixedPrecisionPolicy()), (torch.float32, narrow)):
            models = [sharded(weights, mesh, dtype, mp_policy=policy) for weights in (None, [1, 3])]
            assert train(models[1]) == train(models[0])
            assert_same(whole(models[1]), whole(models[0]))
        models = []
        for weights in (None, [5, 2]):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(DIM, 4 * DIM, bias=False), nn.Linear(4 * DIM, DIM, bias=False)).double()
            for layer, cut in zip(model, (Shard(0), Shard(1)), strict=True):
                layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh["inner"], [cut]))
            models.append(fully_shard(model, mesh=mesh["outer"], weights=weights))
            x = torch.randn(6, DIM, generator=torch.Generator().manual_seed(mesh.get_local_rank("outer")), dtype=torch.float64)
            model(DTensor.from_local(x, mesh["inner"], run_check=False)).pow(2).mean().backward()
        assert models[0][1].weight.placements != models[1][1].weight.placements
        for (name, theirs), ours in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
            assert torch.equal(ours.grad.full_tensor(), theirs.grad.full_tensor()), name

    @ranks(3)
    def test_optimizers_clipping_and_offload_train_as_equal_shards():
        """Muon gathers matrices to owners; 8-bit Adam has blocks; a norm is a sum over shards, in another order."""
        made = {
            "muon": lambda model: Muon(matrix_groups(model, adamw=[model[2]], lr=0.02), lr=0.02),
            "8-bit": lambda model: Adam8bit(model.parameters(), lr=0.02, policy=SMALL),
            "fused": lambda model: torch.optim.AdamW(model.parameters(), lr=0.02, fused=True),
        }
        for name, make_optimizer in made.items():
            options = {"orig_param_policy": SMALL if name == "8-bit" else None, "dtype": torch.float32}
            models = [sharded(weights, **options) for weights in (None, [3, 2, 0])]
            for model in models:
                train(model, optimizer=make_optimizer(model))
            for (fqn, ours), theirs in zip(whole(models[1]).items(), whole(models[0]).values(), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, msg=lambda m, n=(name, fqn): f"{n}: {m}")
        models = [sharded(weights, offload_policy=CPUOffloadPolicy()) for weights in (None, [3, 2, 0])]
        norms = []
        for model in models:
            model(torch.ones(2, DIM, dtype=torch.float64)).pow(2).sum().backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).full_tensor())
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        torch.testing.assert_close(norms[1], norms[0])
        for ours, theirs in zip(whole(models[1]).values(), whole(models[0]).values(), strict=True):
            torch.testing.assert_close(ours, theirs)

    @ranks(3)
    def test_checkpoints_and_state_dicts_move_between_weights():
        """Ours and DCP's, of a model and its optimizer, from weights to other weights and to equal shards."""
        folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(folder)
        path = Path(folder[0])
        model = sharded([3, 2, 0])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        train(model, optimizer=optimizer)
        checkpoint.save(path / "ours", checkpoint.TrainState(model, optimizer))
        dcp_save({"model": model.state_dict()}, checkpoint_id=path / "dcp")
        expected, later = whole(model), train(model, optimizer=optimizer)
        for weights in (None, [0, 1, 4]):
            other = sharded(weights)
            with torch.no_grad():
                for param in other.parameters():
                    param.zero_()
            state = {"model": other.state_dict()}
            dcp_load(state, checkpoint_id=path / "dcp")
            other.load_state_dict(state["model"])
            assert_same(whole(other), expected)
            other = sharded(weights)
            again = torch.optim.AdamW(other.parameters(), lr=0.5)
            checkpoint.load(path / "ours", checkpoint.TrainState(other, again))
            assert train(other, optimizer=again) == later
            assert_same(whole(other), whole(model))

    @ranks(3)
    def test_a_live_model_moves_between_weights():
        mesh = init_device_mesh("cpu", (3,))
        model, steady = sharded([3, 2, 0], mesh), sharded(None, mesh)
        optimizer, other = (torch.optim.AdamW(each.parameters(), lr=0.02) for each in (model, steady))
        for weights in ([0, 0, 1], None, [1, 2, 3]):
            assert train(model, optimizer=optimizer) == train(steady, optimizer=other)
            reshard_to(model, optimizer, mesh, weights=weights)
            held = sum(param.to_local().numel() for param in model.parameters())
            assert (held == 0) == (weights == [0, 0, 1] and dist.get_rank() < 2), (weights, held)
            assert_same(whole(model), whole(steady))
        assert train(model, optimizer=optimizer) == train(steady, optimizer=other)
        assert_same(whole(model), whole(steady))

    @ranks(3)
    def test_collectives_are_compared_in_debug_mode():
        with mock.patch.dict(os.environ, TORCH_RAGGED_DEBUG="1"):
            models = [sharded(weights) for weights in (None, [3, 2, 0])]
            assert train(models[1]) == train(models[0])

    def test_wrong_weights_are_refused_on_all_ranks(self):
        for messages in zip(*run_ranks(2, refusals), strict=True):
            self.assertEqual(messages[0], messages[1])
            self.assertIn("weights", messages[0])


def refusals():
    """The errors of wrong calls; the last one is right on rank 0 only."""
    mesh = init_device_mesh("cpu", (2,))
    mine = dist.get_rank() + 1
    cases = [
        {"weights": [1, 2, 3]},
        {"weights": [0, 0]},
        {"weights": [-1, 2]},
        {"weights": [1.5, 2]},
        {"weights": [True, 2]},
        {"weights": "12"},
        {"weights": 3},
        {"weights": [85_899_345_919, 51_539_607_552]},
        {"weights": [1, 2], "reshard_after_forward": 2},
        {"weights": [1, 2], "placements": HIERARCHICAL},
        {"weights": [1, 2], "shard_placement_fn": lambda param: Shard(0)},
        {"weights": [1, mine]},
    ]
    errors = []
    for options in cases:
        layer = nn.Linear(4, 4)
        errors.append(error_of(fully_shard, layer, mesh=mesh, **options))
        assert type(layer) is nn.Linear
    model = fully_shard(nn.Linear(4, 4), mesh=mesh, weights=[1, 2])
    errors.append(error_of(model.set_custom_all_gather, lambda *args, **kwargs: None))
    errors.append(error_of(model.set_collectives, "copy_engine"))
    assert model.set_collectives("auto") == ("nccl",)
    errors.append(error_of(reshard_to, model, None, mesh, weights=[1]))
    assert buffer_layouts(model)["root"].weights == (1, 2)
    model(torch.ones(1, 4)).sum().backward()
    return errors


if __name__ == "__main__":
    unittest.main()
