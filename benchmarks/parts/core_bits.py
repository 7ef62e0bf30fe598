"""Do losses and parameters keep their bits? 30 training runs over 2, 3 and 4 ranks, as hashes that two commits compare.

    python -m benchmarks.parts.core_bits --write BEFORE.json     on one commit
    python -m benchmarks.parts.core_bits --against BEFORE.json   on another one: names what differs, and ends with 1
    python -m benchmarks.parts.core_bits [--runs NAME ...]       prints them

Each run trains 4 steps from one seed, with data that differ between ranks. Its hashes are of the losses of all ranks, and of
all parameters, as whole tensors, by name. Only public names are used, so that the file runs on later commits.

Bits depend on the CPU and the version of torch: both files must come from one machine. A run must be equal when it is repeated;
what depends on the order of threads does not belong here.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from benchmarks.common.contract import Coded
from benchmarks.common.measure import on_ranks, print_table, write_json
from torch_ragged.fsdp import (
    HIERARCHICAL,
    ZERO1,
    ZERO2,
    Float4Policy,
    Float8Policy,
    Offload,
    fully_shard,
    offloaded,
    register_fsdp_forward_method,
    rows,
)
from torch_ragged.optim import AdamW8bit, BlockPolicy, Muon, matrix_groups

VOCABULARY, STEPS = 40, 4
BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
WIDE = 288
"""A width of matrices that are large enough for their gradients to be written in place, and for tiles of codes."""

Run = tuple[list[float], nn.Module]


# -- the model and its steps -----------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A residual block of odd sizes. ``reentrant``: None, or how its activations are recomputed."""

    def __init__(self, width: int, reentrant: bool | None) -> None:
        super().__init__()
        hidden = 2 * width + width % 2
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.reentrant = reentrant

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """The block's work; also a second forward."""
        return x + self.down(F.gelu(self.up(self.norm(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.compute(x) if self.reentrant is None else checkpoint(self.compute, x, use_reentrant=self.reentrant)


class Net(nn.Module):
    """Tokens to logits. ``skipped`` is a layer that forward may leave out."""

    def __init__(self, width: int = 13, tied: bool = False, reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, reentrant) for _ in range(3))
        self.skipped, self.head = nn.Linear(width, width), nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor, skips: bool = False) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x if skips else x + self.skipped(x))


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))


def _replicas() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def _shard(net: Net, mesh: DeviceMesh | None = None, **knobs: Any) -> Any:
    """A group for each block, and the root's."""
    mesh = mesh or _mesh()
    for block in net.blocks:
        fully_shard(block, mesh=mesh, **knobs)
    return fully_shard(net, mesh=mesh, **knobs)


def _loss(net: Any, step: int, **how: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    tokens = torch.randint(0, VOCABULARY, (2, 7), generator=generator)
    return F.cross_entropy(net(tokens[:, :-1], **how).float().flatten(0, 1), tokens[:, 1:].flatten())


def _one(net: Any, step: int, **how: Any) -> list[float]:
    """The forward and backward of one batch."""
    loss = _loss(net, step, **how)
    loss.backward()
    return [loss.item()]


def _adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([param for param in net.parameters() if param.requires_grad], lr=0.01)


def _train(
    net: Any,
    optimizer: Any = None,
    backward: Callable[[Any, int], list[float]] = _one,
    clip: bool = True,
) -> Run:
    optimizer, losses = optimizer or _adamw(net), []
    for step in range(STEPS):
        losses += backward(net, step)
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses, net


def _accumulate(switch: Callable[[Any, bool], None]) -> Callable[[Any, int], list[float]]:
    """Two micro-batches, before each of which ``switch(net, is_last)`` is called."""

    def backward(net: Any, step: int) -> list[float]:
        losses = []
        for micro in range(2):
            switch(net, micro == 1)
            losses += _one(net, 10 * step + micro)
        return losses

    return backward


# -- runs ------------------------------------------------------------------------------------------------------------------


def _unsharded_by_hand(net: Any, step: int) -> list[float]:
    net.blocks[2].unshard(async_op=True)
    losses = _one(net, step)
    net.blocks[2].reshard()
    return losses


def _optional() -> Run:
    net = Net()
    fully_shard(net.skipped, mesh=_mesh(), optional=True)
    return _train(_shard(net), backward=lambda net, step: _one(net, step, skips=(step + dist.get_rank()) % 2 == 0))


def _synchronized(net: Any, step: int) -> list[float]:
    net.set_requires_gradient_sync(False)
    losses = _one(net, 2 * step) + _one(net, 2 * step + 1)
    net.synchronize_gradients()
    return losses


def _knobs() -> Run:
    net = _shard(Net(), mp_policy=BF16)
    net.blocks[0].set_gradient_divide_factor(3.0)
    net.blocks[1].set_force_sum_reduction_for_comms(True)
    net.blocks[2].set_all_reduce_hook(lambda shard: shard.mul_(0.5))
    net.blocks[0].set_modules_to_forward_prefetch([net.blocks[1], net.blocks[2]])
    net.blocks[2].set_modules_to_backward_prefetch([net.blocks[0]])
    net.set_reduce_scatter_max_input_buffers(3)
    net.set_reshard_after_backward(False)
    return _train(net)


class _Calling(Net):
    """Calls another method of the last block than its forward."""

    def forward(self, tokens: torch.Tensor, skips: bool = False) -> torch.Tensor:
        """Without the skipped layer."""
        x = self.blocks[1](self.blocks[0](self.embedding(tokens)))
        return self.head(self.blocks[2].compute(x))  # type: ignore[operator]


def _list_and_methods() -> Run:
    net: Any = _Calling()
    fully_shard([net.blocks[0], net.blocks[1]], mesh=_mesh())
    fully_shard(net.blocks[2], mesh=_mesh(), reshard_after_forward=False)
    fully_shard(net, mesh=_mesh())
    register_fsdp_forward_method(net.blocks[2], "compute")
    return _train(net, backward=_unsharded_by_hand)


def _in_files() -> Run:
    with tempfile.TemporaryDirectory() as folder:
        net = _shard(Net(), offload_policy=Offload(parameters="files", to=folder))
        return _train(net, offloaded(torch.optim.AdamW, net, lr=0.01, in_backward=True), clip=False)


def _states_in_backward() -> Run:
    net = _shard(Net(), offload_policy=Offload(optimizer=0.5))
    return _train(net, offloaded(torch.optim.AdamW, net, lr=0.01, in_backward=True), clip=False)


def _eight_bit() -> Run:
    policy = BlockPolicy((16, 16), min_numel=64)
    net = _shard(Net(), orig_param_policy=policy)
    return _train(net, AdamW8bit(net.parameters(), lr=0.01, policy=policy))


def _muon() -> Run:
    net = _shard(Net(), orig_param_policy=lambda fqn, param: rows(3))
    return _train(net, Muon(matrix_groups(net, adamw=["head"], lr=0.01), lr=0.02))


def _extensions() -> Run:
    net = Net()
    for block in net.blocks:
        block.up.weight = nn.Parameter(Coded(block.up.weight.detach().clone()))
    _shard(net)
    losses = []
    for step in range(STEPS):
        losses += _one(net, step)
        with torch.no_grad():
            for param in net.parameters():
                param.to_local().add_(param.grad.to_local(), alpha=-0.1)  # type: ignore[attr-defined, union-attr]
        net.zero_grad()
    return losses, net


def _mixed_dtypes() -> Run:
    net = Net()
    net.blocks[1].bfloat16()
    net.blocks[1].register_forward_pre_hook(lambda module, args: args[0].bfloat16())
    net.blocks[1].register_forward_hook(lambda module, args, out: out.float())
    net.blocks[0].requires_grad_(False)
    _shard(net, shard_placement_fn=lambda param: Shard(param.ndim - 1))
    return _train(net, backward=_accumulate(lambda net, is_last: None))


def _converted() -> Run:
    net = _shard(Net())
    losses, _ = _train(net)
    net.to(torch.bfloat16)
    more, _ = _train(net)
    return losses + more, net


def _tensor_parallel() -> Run:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net = Net(width=16)
    for block in net.blocks:
        block.up, block.down = nn.Linear(16, 32), nn.Linear(32, 16)
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return _train(_shard(net, mesh["dp"], mp_policy=BF16), clip=False)


def _mesh_dims() -> Run:
    from torch.distributed.fsdp import DataParallelMeshDims  # Since torch 2.13.

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    for linear, cut in zip(net, (Shard(0), Shard(1))):
        linear.weight = nn.Parameter(distribute_tensor(linear.weight.detach(), mesh, [Replicate(), cut]))  # type: ignore[union-attr]
    fully_shard(net, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))

    def backward(net: Any, step: int) -> list[float]:
        mine = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).chunk(2)[mesh.get_local_rank("dp")]
        loss = net(DTensor.from_local(mine, mesh, [Shard(0), Replicate()], run_check=False)).pow(2).sum()
        loss.backward()
        return [loss.full_tensor().item()]

    return _train(net, torch.optim.SGD(net.parameters(), lr=0.02), backward, clip=False)


def _hsdp(**knobs: Any) -> Any:
    return _shard(Net(), _replicas(), **knobs)


def _persistent() -> Run:
    net = _shard(Net(), mp_policy=BF16)
    net.set_persistent_buffers()
    return _train(net)


def _last_only(net: Any, is_last: bool) -> None:
    net.set_requires_gradient_sync(is_last)
    net.set_reshard_after_backward(is_last)


RUNS: dict[str, tuple[int, Callable[[], Run]]] = {
    "float32": (2, lambda: _train(_shard(Net()))),
    "bfloat16": (3, lambda: _train(_shard(Net(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)))),
    "wide, bfloat16": (2, lambda: _train(_shard(Net(WIDE), mp_policy=BF16))),
    "wide, tied, three ranks": (3, lambda: _train(_shard(Net(WIDE, tied=True)))),
    "ZeRO-1, accumulate": (
        2,
        lambda: _train(
            _shard(Net(), placements=ZERO1), backward=_accumulate(lambda net, is_last: net.set_is_last_backward(is_last))
        ),
    ),
    "ZeRO-2, accumulate": (
        2,
        lambda: _train(_shard(Net(), placements=ZERO2, mp_policy=BF16), backward=_accumulate(lambda net, is_last: None)),
    ),
    "no sync, stays gathered": (2, lambda: _train(_shard(Net(), mp_policy=BF16), backward=_accumulate(_last_only))),
    "synchronize_gradients": (2, lambda: _train(_shard(Net()), backward=_synchronized)),
    "checkpointing": (2, lambda: _train(_shard(Net(WIDE, reentrant=False), mp_policy=BF16))),
    "checkpointing, reentrant": (2, lambda: _train(_shard(Net(reentrant=True)))),
    "optional": (2, _optional),
    "knobs": (2, _knobs),
    "list, methods, by hand": (2, _list_and_methods),
    "float8": (2, lambda: _train(_shard(Net(WIDE), mp_policy=Float8Policy(torch.bfloat16, torch.float32)))),
    "float4": (2, lambda: _train(_shard(Net(WIDE), mp_policy=Float4Policy(torch.bfloat16, torch.float32)))),
    "CPU offload": (2, lambda: _train(_shard(Net(), offload_policy=CPUOffloadPolicy(pin_memory=False), mp_policy=BF16))),
    "Offload, steps in backward": (2, _states_in_backward),
    "mapped files": (2, _in_files),
    "tensor extensions": (2, _extensions),
    "persistent buffers": (2, _persistent),
    "Shard(1), dtypes, accumulate": (2, _mixed_dtypes),
    "to(dtype)": (2, _converted),
    "Muon": (2, _muon),
    "AdamW8bit": (2, _eight_bit),
    "weights": (3, lambda: _train(_shard(Net(), weights=[3, 2, 0]))),
    "HSDP, all-reduce last": (
        4,
        lambda: _train(_hsdp(mp_policy=BF16), backward=_accumulate(lambda net, is_last: net.set_requires_all_reduce(is_last))),
    ),
    "HIERARCHICAL": (4, lambda: _train(_hsdp(placements=HIERARCHICAL))),
    "neighbours": (4, lambda: _train(_shard(Net(), reshard_after_forward=2, mp_policy=BF16))),
    "tensor parallelism": (4, _tensor_parallel),
    "dp_mesh_dims": (4, _mesh_dims),
}
"""By name: the number of ranks, and what they run."""


# -- hashes ----------------------------------------------------------------------------------------------------------------


def _bytes(tensor: Any) -> bytes:
    whole = tensor.detach()
    if isinstance(whole, DTensor):
        whole = whole.full_tensor()
    whole = getattr(whole, "plain", whole)  # Of a tensor type.
    return whole.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _hashed(run: Callable[[], Run]) -> dict[str, Any]:
    """The run's losses, and hashes of losses and parameters, which are equal on all ranks."""
    torch.manual_seed(0)
    losses, net = run()
    parameters = hashlib.sha256()
    for name, param in net.named_parameters():
        parameters.update(name.encode() + _bytes(param))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, losses)
    text = " ".join(loss.hex() for each in everyone for loss in each)
    return {
        "losses": hashlib.sha256(text.encode()).hexdigest()[:16],
        "parameters": parameters.hexdigest()[:16],
        "first and last loss": [everyone[0][0], everyone[0][-1]],
    }


def hashes(rank: int, names: list[str]) -> dict[str, dict[str, Any]]:
    """On each rank: the runs of these names. A run that raises on all ranks has its error."""
    found = {}
    for name in names:
        try:
            found[name] = _hashed(RUNS[name][1])
        except Exception:  # One run's: the others are compared.
            found[name] = {"error": traceback.format_exc()}
        if rank == 0:  # It takes minutes on a busy machine.
            print(f"{name}: {found[name].get('error') or 'done'}", file=sys.stderr, flush=True)
    return found


def differences(mine: dict[str, dict[str, Any]], theirs: dict[str, dict[str, Any]]) -> list[str]:
    """What differs between the runs that both tables have."""
    found = []
    for name in mine:
        for what in ("error", "losses", "parameters"):
            here, there = (table.get(name, {}).get(what) for table in (mine, theirs))
            if here != there:
                values = " and ".join(str(table.get(name, {}).get("first and last loss")) for table in (theirs, mine))
                found.append(f"{name}: {what} differ: {there} and {here}; first and last loss {values}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS), metavar="NAME", help="default: all")
    parser.add_argument("--write", metavar="FILE", help="store the results")
    parser.add_argument("--against", metavar="FILE", help="compare with the results of this file")
    options = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    for ranks in sorted({RUNS[name][0] for name in options.runs}):
        found.update(on_ranks(ranks, hashes, [name for name in options.runs if RUNS[name][0] == ranks]))
    print_table(
        f"torch {torch.__version__}: bits of {len(found)} runs",
        [
            {
                "run": name,
                "ranks": RUNS[name][0],
                "losses": result.get("losses", "error"),
                "parameters": result.get("parameters", "error"),
                "first and last": " ".join(f"{loss:.4f}" for loss in result.get("first and last loss", [])),
            }
            for name, result in found.items()
        ],
    )
    write_json(options.write, {"runs": found})
    if options.against is not None:
        before = json.loads(Path(options.against).read_text())["runs"]
        lines = differences(found, {name: before.get(name, {}) for name in found})
        print("\n" + ("\n".join(lines) if lines else f"{len(found)} runs have the bits of {os.path.basename(options.against)}"))
        if lines:
            sys.exit(1)


if __name__ == "__main__":
    main()
