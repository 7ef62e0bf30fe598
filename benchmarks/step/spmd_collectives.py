"""Which collectives a tensor-parallel step issues under a plan, beside code by hand and beside torch's ``parallelize_module``.

    python -m benchmarks.step.spmd_collectives [--json PATH] [--layers 4] [--width 128] [--tokens 64] [--ranks 4]

Forward and backward of the transformer blocks of ``spmd_step`` on rank 0 of a fake group, in the second step: then a static
model has found its static modules. Two styles: with the sequence cut between attention and feed-forward parts (as "Reducing
Activation Recomputation"), and without (as "Megatron-LM"). Of each collective, the bytes of its larger buffer count.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from benchmarks.common.fake_world import fake_world
from benchmarks.common.measure import print_table, write_json
from benchmarks.common.tracker import IssuedCollectives
from benchmarks.step.spmd_step import Block, Model, by_hand, plan, with_torch
from torch_ragged.spmd import Plan, parallelize

__all__ = ["STYLES", "add_gradients_of_norms", "collectives_of", "sequence_by_hand", "sequence_plan"]

STYLES = ("whole sequence", "cut sequence")


# -- by hand, with the sequence cut ----------------------------------------------------------------------------------------


def _gathered(x: torch.Tensor) -> torch.Tensor:
    """The parts of all ranks along the sequence."""
    ranks = dist.get_world_size()
    parts = x.new_empty(ranks * len(x), *x.shape[1:])
    dist.all_gather_into_tensor(parts, x.contiguous())
    return parts.unflatten(0, (ranks, -1)).movedim(0, 1).flatten(1, 2)


def _reduced(x: torch.Tensor) -> torch.Tensor:
    """This rank's part along the sequence of the sum."""
    ranks = dist.get_world_size()
    parts = x.unflatten(1, (ranks, -1)).movedim(1, 0).flatten(0, 1).contiguous()
    dist.reduce_scatter_tensor(result := parts.new_empty(len(x), *parts.shape[1:]), parts)
    return result


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        return _gathered(x)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return _reduced(grad)


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        return _reduced(x)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return _gathered(grad)


class _Whole(torch.autograd.Function):
    """The whole sequence, for what all ranks compute alike: a gradient needs no sum."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        return _gathered(x)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return grad.chunk(dist.get_world_size(), 1)[dist.get_rank()]


class SequenceByHand(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + _Reduce.apply(self.attention(_Gather.apply(self.first(x))))
        return x + _Reduce.apply(self.mlp(_Gather.apply(self.second(x))))


class SequenceModelByHand(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.chunk(dist.get_world_size(), 1)[dist.get_rank()]
        for block in self.blocks:
            x = block(x)
        return _Whole.apply(x).square().mean()


def sequence_by_hand(model: Model, ranks: int) -> Model:
    """The blocks with local weights; norms see a part of the sequence, so their gradients are added after backward."""
    model = by_hand(model, ranks)
    model.__class__ = SequenceModelByHand
    for block in model.blocks:
        block.__class__ = SequenceByHand
    return model


def add_gradients_of_norms(model: nn.Module) -> None:
    """One all-reduce for all norms, as Megatron does after backward."""
    grads = [param.grad for param in model.parameters() if param.ndim == 1 and param.grad is not None]
    flat = torch.cat(grads)
    dist.all_reduce(flat)
    for grad, total in zip(grads, flat.split([grad.numel() for grad in grads])):
        grad.copy_(total)


# -- the same under a plan, and by torch -----------------------------------------------------------------------------------


def sequence_plan(layers: int) -> Plan:
    block = r"blocks\.\d+"
    plan = Plan().shard(rf"{block}\.(q|k|v|gate|up)\.weight", Shard(0), "tp")
    plan.shard(rf"{block}\.(o|down)\.weight", Shard(1), "tp")
    plan.shard(r"blocks\.0.<in>", Shard(1), "tp")
    plan.shard(rf"{block}\.(first|second).<out>", Replicate(), "tp")
    plan.shard(rf"{block}\.(o|down).<out>", Shard(1), "tp")
    plan.shard(rf"blocks\.{layers - 1}.<out>", Replicate(), "tp", grad=Shard(1))
    return plan.shard("<in>", Replicate(), "tp").default(Replicate())


class WholeModel(Model):
    """The sequence is cut at the first block, and whole behind the last one: ``parallelize_module`` has no style for it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mesh = self.blocks[0].first.weight.device_mesh
        x = DTensor.from_local(x, mesh, [Replicate()], run_check=False).redistribute(placements=[Shard(1)])
        for block in self.blocks:
            x = block(x)
        return x.redistribute(placements=[Replicate()]).square().mean()


def sequence_with_torch(model: Model, mesh: DeviceMesh) -> Model:
    model.__class__ = WholeModel
    whole = PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate(), use_local_output=False)
    for block in model.blocks:
        styles: dict[str, Any] = {name: ColwiseParallel(use_local_output=False) for name in ("q", "k", "v", "gate", "up")}
        styles |= {name: RowwiseParallel(output_layouts=Shard(1), use_local_output=False) for name in ("o", "down")}
        parallelize_module(block, mesh, styles | dict.fromkeys(("first", "second"), SequenceParallel(use_local_output=False)))
        parallelize_module(block, mesh, dict.fromkeys(("first", "second"), whole))
    return model


# -- counting --------------------------------------------------------------------------------------------------------------


def collectives_of(style: str, layers: int, width: int, tokens: int, ranks: int) -> dict[str, IssuedCollectives]:
    """What the second step of each system issues, on rank 0 of a fake group of so many ranks."""
    is_cut = style == "cut sequence"
    with fake_world(ranks):
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
        rules = sequence_plan(layers) if is_cut else plan()
        systems: dict[str, Callable[[Model], nn.Module]] = {
            "by hand": lambda model: (sequence_by_hand if is_cut else by_hand)(model, ranks),
            "static": lambda model: parallelize(model, rules, mesh, mode="static"),
            "eager": lambda model: parallelize(model, rules, mesh),
            "DTensor": lambda model: (sequence_with_torch if is_cut else with_torch)(model, mesh),
        }
        torch.manual_seed(0)
        original, x = Model(width, layers), torch.randn(1, tokens, width)
        found = {}
        for name, make in systems.items():
            model = make(copy.deepcopy(original))
            for _ in range(3):  # The second call finds the static modules.
                model.zero_grad()
                with IssuedCollectives() as found[name]:
                    model(x).backward()
                    if is_cut and name == "by hand":
                        add_gradients_of_norms(model)
                    if name == "DTensor":
                        reduce_gradients(model)
            if name == "static":
                assert model.static_modules.report.modules == ("",), model.static_modules.report  # type: ignore[union-attr]
        return found


def reduce_gradients(model: nn.Module) -> None:
    """Bring each gradient to the placement of its parameter: otherwise the optimizer's step does it."""
    for param in model.parameters():
        if isinstance(param, DTensor) and isinstance(param.grad, DTensor):
            param.grad = param.grad.redistribute(placements=param.placements)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--ranks", type=int, default=4)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = []
    for style in STYLES:
        for name, issued in collectives_of(style, options.layers, options.width, options.tokens, options.ranks).items():
            row: dict[str, Any] = {"a step of": name, "style": style}
            for kind in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all"):
                row |= {kind: issued.calls[kind], f"KiB of {kind}": issued.nbytes[kind] / 1024}
            rows.append(row)
    title = f"{options.layers} blocks of width {options.width}, {options.tokens} tokens, rank 0 of {options.ranks}"
    print_table(f"{title}, torch {torch.__version__}", rows)
    write_json(options.json, {"collectives": rows})


if __name__ == "__main__":
    main()
