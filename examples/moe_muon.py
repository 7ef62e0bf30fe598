"""Train a mixture of experts with expert parallelism and Muon: each rank holds some experts whole, and tokens travel to them.

    torchrun --nproc-per-node 4 examples/moe_muon.py
    torchrun --nproc-per-node 4 examples/moe_muon.py --expert-ranks 4

The mesh is (dp, ep). Experts are cut over ep first, by Shard(0); fully_shard cuts each rank's experts over dp then, so that
a weight is a (StridedRaggedShard, Shard(0)) DTensor. All other parameters are sharded over all ranks. Muon takes both: it
gathers each matrix to one rank, and so each expert. The loss of AdamW on the same batches is drawn beside Muon's.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from byte_data import ByteData, load_bytes, unigram_entropy
from example_tools import mean_over_ranks, start, write_curves
from moe import Experts, MoEConfig, MoETransformer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.nn.functional import all_to_all_single
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from tqdm import tqdm

from torch_ragged.fsdp import fully_shard
from torch_ragged.optim import Muon, matrix_groups


class LocalExperts(nn.Module):
    """The experts of this rank: their weights are cut over the expert-parallel mesh by Shard(0)."""

    def __init__(self, experts: Experts, mesh: DeviceMesh) -> None:
        super().__init__()
        self.up = nn.Parameter(distribute_tensor(experts.up.detach(), mesh, [Shard(0)]))
        self.down = nn.Parameter(distribute_tensor(experts.down.detach(), mesh, [Shard(0)]))

    def forward(self, tokens: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        """Tokens (n, dim), and the number among this rank's experts that each goes to, (n,)."""
        assert isinstance(self.up, DTensor) and isinstance(self.down, DTensor)
        result = torch.zeros_like(tokens)
        for index, (up, down) in enumerate(zip(self.up.to_local().unbind(0), self.down.to_local().unbind(0))):
            rows = (expert == index).nonzero().flatten()
            result = result.index_add(0, rows, F.gelu(tokens[rows] @ up.t()) @ down.t())
        return result


class ParallelExperts(nn.Module):
    """Routes tokens to experts on the ranks of a mesh: one all-to-all there, one back."""

    def __init__(self, experts: Experts, mesh: DeviceMesh) -> None:
        super().__init__()
        self.top_k, self.mesh = experts.top_k, mesh
        self.router, self.local = experts.router, LocalExperts(experts, mesh)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens, group, ranks = x.flatten(0, -2), self.mesh.get_group(), self.mesh.size()
        scores, chosen = self.router(tokens).softmax(-1).topk(self.top_k)
        scores = scores / scores.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)  # By expert, so by the rank that holds it.
        source = order // self.top_k
        counts = chosen.flatten().bincount(minlength=self.router.out_features)
        arriving = torch.empty_like(counts)  # Of each rank, the tokens for each of this rank's experts.
        dist.all_to_all_single(arriving, counts, group=group)
        send, receive = counts.view(ranks, -1).sum(1).tolist(), arriving.view(ranks, -1).sum(1).tolist()
        here = all_to_all_single(tokens.new_empty(sum(receive), x.shape[-1]), tokens[source], receive, send, group)
        expert = torch.arange(len(counts) // ranks).repeat(ranks).repeat_interleave(arriving)
        back = all_to_all_single(tokens.new_empty(len(source), x.shape[-1]), self.local(here, expert), send, receive, group)
        return torch.zeros_like(tokens).index_add(0, source, back * scores.flatten()[order].unsqueeze(-1)).view_as(x)


def make_model(config: MoEConfig, mesh: DeviceMesh, everyone: DeviceMesh, seed: int) -> MoETransformer:
    """The sharded model: experts on a mesh (dp, ep), all other parameters on a mesh of all ranks."""
    torch.manual_seed(seed)
    model = MoETransformer(config)
    for block in model.blocks:
        block.experts = ParallelExperts(block.experts, mesh["ep"])
        local = fully_shard(block.experts.local, mesh=mesh["dp"])
        local.set_gradient_divide_factor(mesh.size())  # Tokens of all ranks reach an expert, not only those of dp.
        fully_shard(block, mesh=everyone)
    return fully_shard(model, mesh=everyone)


def make_optimizer(name: str, model: MoETransformer, lr: float) -> torch.optim.Optimizer:
    """Muon leaves embeddings, positions, head and norms to AdamW, at the same rate."""
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=lr)
    return Muon(matrix_groups(model, adamw=[model.position, model.head], lr=lr), lr=lr, adjust_lr_fn="match_rms_adamw")


def train(name: str, args: argparse.Namespace, config: MoEConfig, text: torch.Tensor) -> list[float]:
    """The loss of each step with one optimizer, over all ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    everyone = init_device_mesh("cpu", (ranks,))
    mesh = init_device_mesh("cpu", (ranks // args.expert_ranks, args.expert_ranks), mesh_dim_names=("dp", "ep"))
    model = make_model(config, mesh, everyone, args.seed)
    if rank == 0 and name == "muon":
        weight = model.blocks[0].experts.local.up
        print(f"an expert weight: {tuple(weight.shape)} placed as {weight.placements} on a mesh of {tuple(mesh.shape)}")
    optimizer = make_optimizer(name, model, args.lr)
    data, losses = ByteData(text, config.context, args.batch, args.seed + 1), list[float]()
    for step in (bar := tqdm(range(args.steps), desc=name, disable=rank != 0, mininterval=1.0)):
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, (step + 1) / 10)
        inputs, targets = data.next_batch(rank, ranks)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss))
        bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
    return losses


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--steps", type=int, default=60, help="optimizer steps (default: %(default)s)")
    add("--expert-ranks", type=int, default=2, help="ranks that share the experts; divides the ranks (default: %(default)s)")
    add("--experts", type=int, default=8, help="experts per layer; a multiple of --expert-ranks (default: %(default)s)")
    add("--batch", type=int, default=16, help="sequences per step over all ranks (default: %(default)s)")
    add("--lr", type=float, default=3e-3, help="learning rate of both optimizers (default: %(default)s)")
    add("--seed", type=int, default=0, help="seed of weights and data (default: %(default)s)")
    add("--data", help="folder of text files (default: the sources of Python's standard library)")
    add("--out", type=Path, default=Path("out"), help="folder of moe_muon.png (default: %(default)s)")
    return parser.parse_args(argv)


def main() -> None:
    args = parse_args()
    rank, ranks = start()
    if ranks % args.expert_ranks or args.experts % args.expert_ranks or args.batch % ranks or args.steps < 1:
        dist.destroy_process_group()
        raise SystemExit(
            f"moe_muon: {ranks} ranks and {args.experts} experts must be multiples of --expert-ranks {args.expert_ranks}, "
            f"--batch {args.batch} a multiple of {ranks}, and --steps {args.steps} at least 1"
        )
    config = MoEConfig(context=64, dim=96, heads=4, layers=2, experts=args.experts, hidden=192)
    text, held_out = load_bytes(args.data)
    losses = {name: train(name, args, config, text) for name in ("muon", "adamw")}
    if rank == 0:
        steps = list(range(1, args.steps + 1))
        curves = {name: (steps, curve) for name, curve in losses.items()}
        write_curves(args.out / "moe_muon.png", f"{args.experts} experts over {args.expert_ranks} ranks, {ranks} ranks", curves)
        last = ", ".join(f"last loss {curve[-1]:.4f} with {name}" for name, curve in losses.items())
        print(
            f"trained {args.experts} experts on {ranks} ranks, twice on the same batches: {last} (entropy of single bytes: "
            f"{unigram_entropy(text, held_out):.3f}); drawn in {args.out / 'moe_muon.png'}"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
