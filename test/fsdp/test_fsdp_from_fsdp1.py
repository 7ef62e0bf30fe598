"""A program of FSDP1 that changed to ours: the same losses, and its checkpoint goes on (docs/moving_here.md)."""

import tempfile
import unittest

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from torch_ragged.fsdp import fully_shard


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def build(seed):
    torch.manual_seed(seed)
    return nn.Sequential(Block(), Block())


def sharded(seed):
    model = build(seed)
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    for module in reversed(list(model.modules())):
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(model, optimizer, steps):
    losses = []
    for step in steps:
        batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        loss = model(batch).square().mean()
        loss.backward()
        if isinstance(model, FullyShardedDataParallel):
            model.clip_grad_norm_(1.0)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


class FromFSDP1Test(unittest.TestCase):
    @ranks(2)
    def test_it_trains_alike_and_its_checkpoint_goes_on():
        before = FullyShardedDataParallel(
            build(0), auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True, device_id=torch.device("cpu")
        )
        old = torch.optim.AdamW(before.parameters(), lr=1e-2)
        losses = train(before, old, range(3))
        after = sharded(0)
        torch.testing.assert_close(train(after, torch.optim.AdamW(after.parameters(), lr=1e-2), range(3)), losses)

        other = sharded(1)
        new = torch.optim.AdamW(other.parameters(), lr=1e-2)
        folder = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folder)
        dcp.save(dict(zip(("model", "optimizer"), get_state_dict(before, old))), checkpoint_id=folder[0])
        state = dict(zip(("model", "optimizer"), get_state_dict(other, new)))
        dcp.load(state, checkpoint_id=folder[0])
        set_state_dict(other, new, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        torch.testing.assert_close(train(other, new, range(3, 6)), train(before, old, range(3, 6)))
