"""Parameters, gradients and losses are FSDP2's: one way of training after the other."""

import unittest

import torch
import torch.distributed as dist
from common import ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

from torch_ragged.fsdp import fully_shard, rows

WIDTH = 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Adapted(Block):
    """LoRA: frozen weights and two narrow trainable ones."""

    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(2, WIDTH) * 0.3), nn.Parameter(torch.zeros(WIDTH, 2))

    def forward(self, x):
        return super().forward(x) + x @ self.a.T @ self.b.T


class Branching(nn.Module):
    """Uses one of two layers, as the data says, and never a third."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.never = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        return x + (self.left(x) if x.sum() > 0 else self.right(x))


class Tied(nn.Module):
    """Two layers inside a group share a weight."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


def pair(block, **knobs):
    """The same model under FSDP2 and under ours."""
    models = []
    for shard in (torch_fully_shard, fully_shard):
        torch.manual_seed(0)
        model = nn.Sequential(block(), block(), nn.Linear(WIDTH, 5))
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        if shard is fully_shard:
            knobs["orig_param_policy"] = lambda fqn, p: rows(3)
        for layer in model[:2]:
            shard(layer, mesh=mesh, **knobs)
        models.append(shard(model, mesh=mesh, **knobs))
    return models


def batch(step, same=False):
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + (0 if same else dist.get_rank())))


def assert_equal_models(models, grads=True):
    for (name, theirs), (_, ours) in zip(*(model.named_parameters() for model in models), strict=True):
        assert ours.requires_grad == theirs.requires_grad, name
        torch.testing.assert_close(ours.full_tensor(), theirs.full_tensor(), rtol=1e-4, atol=1e-6, msg=name)
        if grads:
            assert (ours.grad is None) == (theirs.grad is None), name
            if ours.grad is not None:
                torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad.full_tensor(), rtol=1e-4, atol=1e-6, msg=name)


def train(models, step_of, steps=4, **options):
    for model in models:
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        for step in range(steps):
            step_of(model, optimizer, step)
            if step < steps - 1:
                optimizer.zero_grad(**options)
    assert_equal_models(models)


def plain_step(model, optimizer, step):
    model(batch(step)).pow(2).mean().backward()
    optimizer.step()


class AsFSDP2Test(unittest.TestCase):
    @ranks(2)
    def test_adapters_train_beside_frozen_weights():
        train(pair(Adapted), plain_step)

    @ranks(2)
    def test_frozen_parameters_stay_as_they_are():
        models = pair(Block)
        for model in models:
            model[0].requires_grad_(False)
            model[1].up.weight.requires_grad_(False)
        train(models, plain_step)

    @ranks(2)
    def test_layers_of_a_branch_not_taken_have_no_gradient():
        def step_of(model, optimizer, step):
            model(batch(step, same=True)).pow(2).mean().backward()
            optimizer.step()

        train(pair(Branching), step_of, steps=6)

    @ranks(2)
    def test_a_layer_never_used_has_no_gradient_where_ranks_take_other_branches():
        """There FSDP2 reduces the wrong gradients with each other; ours are compared in test_fsdp."""
        ours = pair(Branching)[1]
        plain_step(ours, torch.optim.SGD(ours.parameters(), lr=0.1), 0)
        assert ours[0].never.weight.grad is None

    @ranks(2)
    def test_tied_weights_of_a_group_stay_tied():
        train(pair(Tied), plain_step)
        ours = pair(Tied)[1]
        assert ours[0].second.weight is ours[0].first.weight
        assert len(list(ours.parameters())) == 2 * 3 + 2

    @ranks(2)
    def test_several_forwards_come_before_their_backwards():
        def step_of(model, optimizer, step):
            losses = [model(batch(3 * step + i)).pow(2).mean() for i in range(3)]
            losses[1].backward()
            (losses[0] + losses[2]).backward()
            optimizer.step()

        train(pair(Block), step_of)

    @ranks(2)
    def test_an_overflow_on_one_rank_skips_the_step_on_all():
        models, scales = pair(Block), []
        for model in models:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
            for step in range(6):
                loss = model(batch(step)).pow(2).mean()
                scaler.scale(loss * (float("inf") if step == 2 and dist.get_rank() == 1 else 1.0)).backward()
                scaler.unscale_(optimizer)
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                scales.append(scaler.get_scale())
            assert norm.full_tensor() > 0.1
        assert scales[:6] == scales[6:] and scales[2] < scales[1]  # The step with an overflow on one rank is skipped on all.
        assert_equal_models(models)

    @ranks(2)
    def test_autocast_computes_in_bfloat16():
        def step_of(model, optimizer, step):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(batch(step)).float().pow(2).mean()
            loss.backward()
            optimizer.step()

        train(pair(Block), step_of, steps=2)

    @ranks(2)
    def test_gradients_may_be_set_to_zero():
        train(pair(Block), plain_step, set_to_none=False)

    @ranks(2)
    def test_resharding_may_be_put_off():
        for after_forward, after_backward in ((False, False), (True, False), (False, True)):
            models = pair(Block)
            for model in models:
                model.set_reshard_after_forward(after_forward)
                model.set_reshard_after_backward(after_backward)
                for step in range(2):
                    model(batch(step)).pow(2).mean().backward()
                assert isinstance(model[0].up.weight, DTensor) == after_backward
                for module in model.modules():
                    if isinstance(module, FSDPModule):
                        module.reshard()
            assert_equal_models(models)

    @ranks(2)
    def test_unsharded_ahead_of_forward():
        models = pair(Block)
        for model in models:
            handle = model[0].unshard(async_op=True)
            handle.wait()
            assert not isinstance(model[0].up.weight, DTensor)
            model[0].unshard()
            model(batch(0)).sum().backward()
        assert_equal_models(models)
