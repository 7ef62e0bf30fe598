"""Train with 4 ranks, then with 3, then with 4 again, in one program and without a checkpoint.

    torchrun --nproc-per-node 4 examples/elastic.py --steps 6

A second model trains on all ranks, without interruption, on the same batches. At the end both are compared: they differ
only by the rounding of float32, since gradients are summed in another order. If they differ by more, the program ends with
an error. Both curves are drawn to out/elastic.png.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from example_tools import start, write_curves
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from tqdm import tqdm

from torch_ragged.fsdp import fully_shard, reshard_to
from torch_ragged.optim import Muon, matrix_groups

WIDTH, LAYERS, BATCH = 32, 3, 48
OPTIMIZERS = ("adamw", "muon")
LIMITS = {"adamw": 1e-5, "muon": 2e-2}
"""The largest difference of losses, relative to the first loss. Muon computes in bfloat16, so a difference grows faster."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Run:
    """A model that trains on the ranks of a mesh, which may change between steps.

    Every rank makes the run. On a rank that is not in the mesh, the model has no shards, and a step does nothing.
    """

    def __init__(self, mesh: DeviceMesh, optimizer: str, seed: int) -> None:
        self.mesh = mesh
        torch.manual_seed(seed)
        self.model = nn.Sequential(*(Block() for _ in range(LAYERS)), nn.Linear(WIDTH, WIDTH))
        for block in self.model[:-1]:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        if optimizer == "muon":
            groups = matrix_groups(self.model, adamw=[self.model[-1]], lr=1e-3)
            self.optimizer: torch.optim.Optimizer = Muon(groups, lr=1e-2)
        else:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def go_to(self, mesh: DeviceMesh) -> None:
        """Go on on another mesh. All ranks of the world call it."""
        reshard_to(self.model, self.optimizer, mesh)
        self.mesh = mesh

    def step(self, number: int) -> float:
        """One optimizer step on this rank's part of the global batch, which does not depend on the mesh; the mean loss."""
        ranks = self.mesh.mesh.tolist()
        loss = torch.zeros(())
        if dist.get_rank() in ranks:
            data = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(number))
            mine = data.chunk(len(ranks))[ranks.index(dist.get_rank())]
            share = (self.model(mine) - mine.roll(1, dims=1)).square().mean()
            share.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            loss = share.detach() / len(ranks)
        dist.all_reduce(loss)  # Over the world, so that ranks that do not train know it, too.
        return loss.item()

    def shard_bytes(self) -> int:
        """Bytes of this rank's shards of parameters."""
        return sum(param.to_local().nbytes for param in self.model.parameters())  # type: ignore[attr-defined]


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--steps", type=int, default=4, help="optimizer steps on each mesh (default: %(default)s)")
    add("--optimizer", choices=OPTIMIZERS, default="adamw", help="(default: %(default)s)")
    add("--seed", type=int, default=0, help="seed of the weights (default: %(default)s)")
    add("--out", type=Path, default=Path("out"), help="folder of elastic.png (default: %(default)s)")
    return parser.parse_args(argv)


def train(args: argparse.Namespace, meshes: list[DeviceMesh]) -> tuple[list[float], list[float], float]:
    """The losses of both runs, and the largest difference of their parameters."""
    elastic, steady = Run(meshes[0], args.optimizer, args.seed), Run(meshes[0], args.optimizer, args.seed)
    losses: list[float] = []
    expected: list[float] = []
    bar = tqdm(total=len(meshes) * args.steps, disable=dist.get_rank() > 0)
    for mesh in meshes:
        if mesh is not elastic.mesh:
            elastic.go_to(mesh)
        shards: list[int | None] = [None] * dist.get_world_size()
        dist.all_gather_object(shards, elastic.shard_bytes())
        for _ in range(args.steps):
            losses.append(elastic.step(len(losses)))
            expected.append(steady.step(len(expected)))
            bar.update()
            if dist.get_rank() == 0:
                text = f"step {len(losses):3} on {mesh.size()} ranks: loss {losses[-1]:.6f}, uninterrupted {expected[-1]:.6f}"
                tqdm.write(f"{text}, bytes of shards {shards}")
    bar.close()
    pairs = zip(elastic.model.parameters(), steady.model.parameters())
    differences = [(a.full_tensor() - b.full_tensor()).abs().max().item() for a, b in pairs]  # type: ignore[attr-defined]
    return losses, expected, max(differences)


def main() -> None:
    args = parse_args()
    _, ranks = start()
    if ranks < 2 or BATCH % ranks or BATCH % (ranks - 1) or args.steps < 1:
        dist.destroy_process_group()
        raise SystemExit(f"elastic: --steps {args.steps} on {ranks} ranks: expected at least 1 step, on 2, 3 or 4 ranks")
    whole, fewer = init_device_mesh("cpu", (ranks,)), DeviceMesh("cpu", list(range(ranks - 1)))
    losses, expected, difference = train(args, [whole, fewer, whole])
    worst = max(abs(a - b) for a, b in zip(losses, expected)) / expected[0]
    if dist.get_rank() == 0:
        steps = range(1, len(losses) + 1)
        curves = {"uninterrupted": (steps, expected), "elastic": (steps, losses)}
        marks = {f"{ranks - 1}_ranks": args.steps + 0.5, f"{ranks}_ranks_again": 2 * args.steps + 0.5}
        write_curves(args.out / "elastic.png", f"{args.optimizer} on {ranks} ranks, fewer, and all again", curves, **marks)
        print(
            f"trained on {ranks} ranks, on {ranks - 1}, on {ranks} again: losses differ from the uninterrupted run by "
            f"{worst:.1e} of the first loss at most, parameters by {difference:.1e}; drawn in {args.out / 'elastic.png'}"
        )
    dist.destroy_process_group()
    if not worst < LIMITS[args.optimizer]:  # On all ranks: losses are equal there.
        raise SystemExit(f"elastic: losses differ by {worst:.1e} of the first one, expected less than {LIMITS[args.optimizer]}")


if __name__ == "__main__":
    main()
