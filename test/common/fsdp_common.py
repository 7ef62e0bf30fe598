"""A small transformer under FSDP2, under ours and in one process, with its data; functions whose backward is unusual."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from moe import MoEConfig, MoETransformer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from torch_ragged.fsdp import fully_shard

__all__ = ["CONFIG", "Boom", "WideProduct", "batch", "build", "compare_gradients", "loss_of", "step_of"]

CONFIG = MoEConfig(dim=24, heads=2, layers=3, experts=3, hidden=16, context=12)


def build(kind, raf=None, mp_policy=None, policy=None, tied=True, seed=0, frozen=None):
    """The model as ``kind`` trains it: "single" in one process, "fsdp2", or "ragged", which is ours."""
    torch.manual_seed(seed)
    model = MoETransformer(MoEConfig(**{**vars(CONFIG), "tied": tied}))
    if frozen is not None:
        model.blocks[frozen].requires_grad_(False)
    if kind == "single":
        return model
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    knobs = {"mesh": mesh, "mp_policy": mp_policy or MixedPrecisionPolicy()}
    shard = torch_fully_shard
    if kind == "ragged":
        shard, knobs["orig_param_policy"] = fully_shard, policy
    for block in model.blocks:
        shard(block, reshard_after_forward=True if raf is None else raf, **knobs)
    return shard(model, reshard_after_forward=raf, **knobs)


def batch(step, whole):
    """The whole batch of a step, or this rank's part of it."""
    rank, ranks = (0, 1) if whole else (dist.get_rank(), dist.get_world_size())
    data = torch.randint(0, 16, (12, 13), generator=torch.Generator().manual_seed(step))
    return data[rank * 12 // ranks : (rank + 1) * 12 // ranks]


def loss_of(model, data):
    return F.cross_entropy(model(data[:, :-1]).float().flatten(0, 1), data[:, 1:].flatten())


def step_of(model, step=0, optimizer=None):
    loss_of(model, batch(step, False)).backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


def compare_gradients(model, single):
    """Gradients are those of one process, and None where that has none."""
    for (name, param), (_, plain) in zip(model.named_parameters(), single.named_parameters(), strict=True):
        if plain.grad is None:
            assert param.grad is None, name
            continue
        assert param.grad is not None, name
        torch.testing.assert_close(param.grad.full_tensor(), plain.grad, rtol=1e-4, atol=1e-6, msg=lambda m: f"{name}: {m}")


class Boom(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise KeyError("boom")


class WideProduct(torch.autograd.Function):
    """x W, whose gradient for a bfloat16 W is float32."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight.t(), x.float().t() @ gradient.float()
