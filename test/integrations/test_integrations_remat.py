"""Regions of torch_remat on blocks under fully_shard and under plans: the same bits, less memory; skipped where it is missing."""

import contextlib
import fnmatch
import functools
import importlib.util
import re
import unittest

import torch
import torch.distributed as dist
from common import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F

from torch_ragged.fsdp import Float8Policy, fully_shard

HAS_REMAT = bool(importlib.util.find_spec("torch_remat"))
NARROW, WIDE = 16, 256  # Matmuls with weights of WIDE write gradients into the buffer of the group.
FATES = {
    "recompute": {"*": "recompute"},
    "save": {"*": "save"},
    "save products": {"up": "save", "down": "save", "*": "recompute"},
    "offload products": {"up": "offload", "*": "recompute"},
    "offload": {"*": "offload"},
}


class Host:
    """Saved activations in other memory. Parameters stay where they are, as in offloaders that users write."""

    nbytes = 0

    def pack(self, tensor):
        if isinstance(tensor, nn.Parameter):
            return tensor
        Host.nbytes += tensor.nbytes
        return [tensor.clone()]

    def unpack(self, packed):
        if isinstance(packed, torch.Tensor):
            return packed
        return packed[0].clone()


def region(fates, name, function, *inputs):
    """Run ``function`` as the region ``name``: the first pattern that matches says what becomes of what it saves."""
    import torch_remat as remat

    fate = next(fate for pattern, fate in fates.items() if fnmatch.fnmatchcase(name, pattern))
    host = Host()
    with remat.saved_tensors_hooks(host.pack, host.unpack) if fate == "offload" else contextlib.nullcontext():
        result = remat.region(function, name, recompute=fate == "recompute")(*inputs)
    remat.recompute_needs_tensor(result)
    return result


class Block(nn.Module):
    """``where``: the checkpoint is around the block, inside of it, or there is none."""

    def __init__(self, width, fates, where):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.fates, self.where = fates, where

    def body(self, x):
        run = functools.partial(region, self.fates)
        hidden = run("norm", self.norm, x)
        hidden = run("act", F.gelu, run("up", self.up, hidden))
        return x + run("down", self.down, hidden)

    def forward(self, x):
        import torch_remat as remat

        return remat.checkpoint(region_name="inner")(self.body)(x) if self.where == "inside" else self.body(x)


class Model(nn.Module):
    def __init__(self, width, fates, where):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, fates, where) for _ in range(3))
        self.head = nn.Linear(width, width)
        self.where = where

    def forward(self, x):
        import torch_remat as remat

        for i, block in enumerate(self.blocks):
            x = remat.checkpoint(region_name=f"blocks.{i}")(block)(x) if self.where == "around" else block(x)
        return self.head(x)


def make(width, fates=None, where="nowhere"):
    torch.manual_seed(0)
    return Model(width, fates or {"*": "save"}, where)


def shard(model, **options):
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, mesh=options["mesh"], mp_policy=options.get("mp_policy", MixedPrecisionPolicy()))


def resident(loss):
    import torch_remat as remat

    return int(re.search(r"([\d.]+) B", remat.format_saved_tensors_report(loss, verbose=True) if 0 else remat.format_saved_tensors_report(loss)).group(1))


def train(model, rows, width, micro=1, sync=True):
    """Losses, gradients and parameters of two steps."""
    found, optimizer = [], torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        for index in range(micro):
            data = torch.randn(8, width, generator=torch.Generator().manual_seed(10 * step + index))
            if not sync:
                model.set_requires_gradient_sync(index == micro - 1)
            loss = model(data[rows]).float().pow(2).mean()
            loss.backward()
            found.append(loss.detach())
        found += [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return found
