"""A model with hard cases for offloaded optimizers, and the comparison with the optimizer without offload."""

import contextlib
import os
import tempfile
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tested_device import DEVICE
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from torch_ragged.fsdp import Offload, fully_shard, offloaded
from torch_ragged.fsdp.offload import _offloaded_optimizer, _tiers
from torch_ragged.optim import BlockPolicy

__all__ = ["ADAMW", "BLOCKS", "POLICY", "SGD"]
__all__ += ["assert_equal", "backward", "build", "check", "chunks_of", "folder_of_ranks", "in_files", "make"]
__all__ += ["train", "window_tier"]

POLICY = BlockPolicy((16, 16), min_numel=64)
BLOCKS = {"orig_param_policy": POLICY}


class Tied(nn.Module):
    """An embedding that is also the head, a frozen layer, a matrix whose dimension is cut, and layers that data may skip."""

    def __init__(self):
        super().__init__()
        self.embedding, self.body = nn.Embedding(40, 24), nn.Linear(24, 72)
        self.frozen, self.tail = nn.Linear(72, 72), nn.Sequential(nn.Linear(72, 24), nn.LayerNorm(24))
        self.skipped = nn.Linear(24, 24)
        self.head = nn.Linear(24, 40, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen.requires_grad_(False)

    def forward(self, tokens, skips):
        x = self.tail(F.gelu(self.frozen(self.body(self.embedding(tokens)))))
        return self.head(x if skips else x + self.skipped(x))


def build(fraction, dtype=torch.float32, mesh=None, tp=False, **knobs):
    """The model of two groups under ``fully_shard``; ``fraction`` None: without offload."""
    torch.manual_seed(0)
    model = Tied().to(dtype)
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    if tp:
        parallelize_module(model, mesh["tp"], {"body": ColwiseParallel(), "frozen": RowwiseParallel()})
        mesh = mesh["dp"]
    if fraction is not None:
        knobs["offload_policy"] = fraction if isinstance(fraction, Offload) else Offload(optimizer=fraction)
    fully_shard(model.tail, mesh=mesh, **knobs)
    return fully_shard(model, mesh=mesh, **knobs)


def in_files(folder, fraction=1.0):
    """States in files are stepped on the CPU, so parameters must be in host memory, and all states, too."""
    return Offload(fraction, to=folder) if DEVICE == "cpu" else Offload(parameters=True, to=folder)


class HostCopies:
    """In place of a WindowTier's copies on streams, which a CPU has not: copies that end at once."""

    def __init__(self, device, windows):
        pass

    def copy_in(self, turn, target, source):
        for name, part in source.items():
            target[name].copy_(part)

    copy_out = copy_in

    def wait_in(self, turn):
        pass

    def wait_out(self):
        pass


def window_tier(slabs, device):
    """As on an accelerator: states are copied through two windows, chunk by chunk."""
    copies = HostCopies if device.type == "cpu" else _tiers._StreamCopies
    with mock.patch.object(_tiers, "_StreamCopies", copies):
        return _tiers.WindowTier(slabs, device)


def _groups_of(model, **options):
    """Two parameter groups: matrices, and the rest without weight decay."""
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.ndim > 1], **options},
        {"params": [p for p in params if p.ndim == 1], "weight_decay": 0.0, "lr": 0.01},
    ]


def make(model, optimizer, fraction, **options):
    groups = _groups_of(model)
    return optimizer(groups, **options) if fraction is None else offloaded(optimizer, model, groups, **options)


def backward(model, step, scale=1.0):
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    tokens = torch.randint(0, 40, (3, 5), generator=generator)
    (model(tokens, skips=step == 0).float().square().mean() * scale).backward()


def train(model, optimizer, start=0, steps=3, passes=1, clip=None, schedules=True):
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7) if schedules else None
    for step in range(start, start + steps):
        for each in range(passes):
            model.set_requires_gradient_sync(each == passes - 1)
            backward(model, step + 10 * each)
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()


def _bits(tensor):
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def assert_equal(optimizer, plain):
    """Parameters and states are bitwise equal, and states have equal dtypes and placements, and are made in equal order."""
    ours, theirs = optimizer.state_dict(), plain.state_dict()
    for group in (*ours["param_groups"], *theirs["param_groups"]):
        group.pop("differentiable", None)  # Torch's load_state_dict adds it to optimizers that do not have it.
    assert ours["param_groups"] == theirs["param_groups"], (ours["param_groups"], theirs["param_groups"])
    assert ours["state"].keys() == theirs["state"].keys(), (ours["state"].keys(), theirs["state"].keys())
    for mine, other in zip(optimizer.param_groups, plain.param_groups):
        for p, q in zip(mine["params"], other["params"], strict=True):
            assert torch.equal(_bits(p), _bits(q))
    for index, states in theirs["state"].items():
        assert list(ours["state"][index]) == list(states), (list(ours["state"][index]), list(states))
        for name, value in states.items():
            mine = ours["state"][index][name]
            assert type(mine) is type(value) and mine.dtype == value.dtype and mine.shape == value.shape, (index, name)
            assert getattr(mine, "placements", None) == getattr(value, "placements", None), (index, name)
            assert torch.equal(_bits(mine), _bits(value)), (index, name)


def check(optimizer, options, fractions, dtype=torch.float32, how=(), **knobs):
    """Train without offload and at each of ``fractions``."""
    plain = build(None, dtype, **knobs)
    reference = make(plain, optimizer, None, **options)
    train(plain, reference, **dict(how))
    names = {name for states in reference.state.values() for name in states}
    assert ("exp_avg_codes" in names) is ("policy" in options)
    assert len(reference.state) > 5 or options.get("momentum") == 0
    for fraction in fractions:
        model = build(fraction, dtype, **knobs)
        mine = make(model, optimizer, fraction, **options)
        train(model, mine, **dict(how))
        assert_equal(mine, reference)


ADAMW = (torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.1})
SGD = (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1})


@contextlib.contextmanager
def folder_of_ranks():
    """A folder that all ranks see. At the end, it must be empty: no scratch file has a name."""
    name = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(name)
    yield name[0]
    dist.barrier()
    if dist.get_rank() == 0:
        os.rmdir(name[0])


def chunks_of(numel):
    """Chunks of at most ``numel`` elements, so that small models have several."""
    return mock.patch.object(_offloaded_optimizer, "FILE_NUMEL", numel)
