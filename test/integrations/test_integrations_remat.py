"""Regions of torch_remat on units and under plans: the same bits, less memory; skipped where it is not installed."""

import contextlib
import fnmatch
import functools
import importlib.util
import re
import unittest
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from common import run_ranks
from fsdp_collectives import LoggedCollectives
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional as F

from torch_ragged.fsdp import Float8Policy, FSDPModule, fully_shard
from torch_ragged.spmd import Plan, parallelize

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


def saved_nbytes(model, x):
    """The bytes that stay for backward after forward, as torch_remat counts them; parameters are not among them."""
    import torch_remat as remat

    text = remat.format_saved_tensors_report(model(x).sum())
    number, unit = re.search(r"saved for backward: ([\d.]+) (\w+) resident", text).groups()
    return float(number) * {"B": 1, "KB": 1e3, "KiB": 1 << 10, "MB": 1e6, "MiB": 1 << 20}[unit]


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(model, rows, width, micro=1, sync=True, steps=2):
    """Losses and gradients."""
    found, optimizer = [], torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        for index in range(micro):
            data = torch.randn(8, width, generator=torch.Generator().manual_seed(10 * step + index))
            if not sync:
                model.set_requires_gradient_sync(index == micro - 1)
            loss = model(data[rows]).float().pow(2).mean()
            loss.backward()
            found.append(whole(loss.detach()))
        found += [whole(param.grad) for param in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return found


def equal_to_the_bit(found, expected, what):
    differing = [i for i, pair in enumerate(zip(found, expected, strict=True)) if not torch.equal(*pair)]
    assert not differing, (what, differing)


def check_units(width, micro, sync, replicas, options):
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (2, size // 2) if replicas else (size,))
    rows, calls = slice(rank * 8 // size, (rank + 1) * 8 // size), {}

    def run(fates, where):
        model, seen = shard(make(width, fates, where), mesh=mesh, **options), []
        for module in model.modules():
            if isinstance(module, FSDPModule):
                for group in module._ragged_fsdp_state.groups:
                    group.collectives = LoggedCollectives(group.collectives, seen)
        found = train(model, rows, width, micro, sync)
        return found, seen

    expected, calls = run(None, "nowhere")
    for where in ("around", "inside"):
        for name, fates in FATES.items():
            Host.nbytes = 0
            found, seen = run(fates, where)
            equal_to_the_bit(found, expected, (where, name))
            assert (Host.nbytes > 0) == ("offload" in fates.values())
            # A recomputation all-gathers for the backward that follows it, not beside it.
            assert Counter(seen) == Counter(calls), (where, name, Counter(seen), Counter(calls))


def check_plan(mode, sizes):
    mesh, names = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp")[: len(sizes)]), r"blocks\.\d+"
    plan = Plan().shard("<in:x>", Shard(0), "dp").unit(names, "dp").default(Replicate())
    if len(sizes) == 2:
        plan.shard(rf"{names}\.up\.(weight|bias)", Shard(0), "tp").shard(rf"{names}\.down\.weight", Shard(1), "tp")
        plan.shard(rf"{names}\.norm.<out>", Replicate(), "tp", grad=Replicate()).shard(
            rf"{names}\.down.<out>", Replicate(), "tp"
        )
    expected = train(parallelize(make(NARROW), plan, mesh, mode=mode), slice(None), NARROW, steps=4)
    for where in ("around", "inside"):
        for name, fates in FATES.items():
            model = parallelize(make(NARROW, fates, where), plan, mesh, mode=mode)
            equal_to_the_bit(train(model, slice(None), NARROW, steps=4), expected, (where, name))
            if mode == "static" and where == "around" and "offload" not in fates.values():
                assert "blocks.0, blocks.1" in str(model.static_modules.report), model.static_modules.report


def check_memory():
    mesh, x = init_device_mesh("cpu", (2,)), torch.randn(64, WIDE)
    nbytes = {name: saved_nbytes(shard(make(WIDE, fates, "around"), mesh=mesh), x) for name, fates in FATES.items()}
    activation = x.nbytes
    # Of each block: its input; with "save products" also the input and output of gelu, of which "up" saves nothing else.
    assert nbytes["recompute"] < 4.5 * activation, nbytes
    assert nbytes["recompute"] + 3 * 4 * activation <= nbytes["save products"] < nbytes["save"] / 1.3, nbytes
    return nbytes


@pytest.mark.slow
@unittest.skipUnless(HAS_REMAT, "torch_remat is not installed")
class RematTest(unittest.TestCase):
    def test_regions_of_units_compute_the_same_bits_with_the_same_collectives(self):
        mixed = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        cases = [{"reshard_after_forward": value} for value in (True, False)]
        cases += [{"mp_policy": mixed}, {"mp_policy": Float8Policy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}]
        for options in cases:
            for width in (NARROW, WIDE):
                run_ranks(2, check_units, width, 1, True, False, options)
        run_ranks(4, check_units, WIDE, 1, True, False, {"reshard_after_forward": 2})
        run_ranks(4, check_units, WIDE, 1, True, True, {})

    def test_regions_in_passes_that_accumulate_compute_the_same_bits(self):
        for sync in (True, False):
            run_ranks(2, check_units, WIDE, 2, sync, False, {})

    def test_regions_under_plans_compute_the_same_bits(self):
        for mode in ("eager", "static"):
            run_ranks(2, check_plan, mode, (2,))
            run_ranks(4, check_plan, mode, (2, 2))

    def test_what_is_recomputed_is_not_saved(self):
        run_ranks(2, check_memory)
