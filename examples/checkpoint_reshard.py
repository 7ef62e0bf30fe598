"""Save under one layout, resume under another, on another number of ranks: the curve goes on as if nothing had happened.

    torchrun --nproc-per-node 4 examples/checkpoint_reshard.py
    torchrun --nproc-per-node 2 examples/checkpoint_reshard.py --resume --layout rows

The first command trains, saves halfway, and trains on. The second one loads what was saved halfway, under another layout,
and takes the same steps on the same batches. Both curves are drawn; they differ only by the rounding of float32, since
gradients are summed in another order. If they differ by more, the second command ends with an error.

Layouts: fsdp (all ranks share everything), rows (blocks of 16 rows stay whole), zero2 (parameters stay unsharded after
forward), hsdp (two replicas; an even number of ranks).
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from byte_data import ByteData, load_bytes
from example_tools import mean_over_ranks, start, write_curves
from moe import MoEConfig, MoETransformer
from torch.distributed.device_mesh import init_device_mesh
from tqdm import tqdm

from torch_ragged import checkpoint
from torch_ragged.fsdp import ZERO2, fully_shard, rows

LAYOUTS = ("fsdp", "rows", "zero2", "hsdp")
CONFIG = MoEConfig(context=64, dim=96, heads=4, layers=2, experts=3, hidden=192)
LIMIT = 1e-3
"""The largest difference of two losses at one step, relative to the first loss. It grows from step to step."""


def make_model(layout: str, seed: int) -> MoETransformer:
    """The model, sharded over all ranks under one of ``LAYOUTS``."""
    torch.manual_seed(seed)
    model = MoETransformer(CONFIG)
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, ranks // 2) if layout == "hsdp" else (ranks,))
    options: dict[str, Any] = {"mesh": mesh}
    if layout == "rows":
        options["orig_param_policy"] = lambda name, param: rows(16) if param.ndim == 3 else None
    if layout == "zero2":
        options["placements"] = ZERO2
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def train(model: MoETransformer, state: checkpoint.TrainState, data: ByteData, stop: int) -> list[float]:
    """Train to step ``stop``; the loss of each step over all ranks."""
    losses = []
    for _ in (bar := tqdm(range(state.step, stop), disable=dist.get_rank() > 0, mininterval=1.0)):
        inputs, targets = data.next_batch(dist.get_rank(), dist.get_world_size())
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        losses.append(mean_over_ranks(loss))
        state.step += 1
        state.data_position = data.position
        bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
    return losses


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--steps", type=int, default=40, help="optimizer steps; half of them before the checkpoint (default: %(default)s)")
    add("--layout", choices=LAYOUTS, default="fsdp", help="how the model is sharded (default: %(default)s)")
    add("--resume", action="store_true", help="load the checkpoint of an earlier run, and compare with that run")
    add("--batch", type=int, default=16, help="sequences per step over all ranks (default: %(default)s)")
    add("--lr", type=float, default=1e-3, help="learning rate (default: %(default)s)")
    add("--seed", type=int, default=0, help="seed of weights and data (default: %(default)s)")
    add(
        "--out", type=Path, default=Path("out/reshard"), help="folder of the checkpoints and of loss.png (default: %(default)s)"
    )
    return parser.parse_args(argv)


def resume(args: argparse.Namespace, model: MoETransformer, state: checkpoint.TrainState, data: ByteData) -> float:
    """Go on from the checkpoint halfway; the largest difference to the losses of the run that wrote it."""
    manifest = checkpoint.load(args.out / "half", state)
    known = torch.load(args.out / "losses.pt", weights_only=True)
    data.position = state.data_position
    begin = state.step
    losses, ranks = train(model, state, data, len(known)), dist.get_world_size()
    worst = max(abs(a - b) for a, b in zip(losses, known[begin:])) / known[0]
    if dist.get_rank() == 0:
        curves = {
            f"uninterrupted on {manifest.world_size} ranks": (range(1, len(known) + 1), known),
            f"resumed on {ranks} ranks as {args.layout}": (range(begin + 1, begin + 1 + len(losses)), losses),
        }
        write_curves(args.out / "loss.png", "one checkpoint, two layouts", curves, checkpoint=begin)
        print(
            f"saved by {manifest.world_size} ranks, resumed on {ranks} as {args.layout} at step {begin}: losses differ from "
            f"the uninterrupted run by {worst:.1e} of the first loss at most; drawn in {args.out / 'loss.png'}"
        )
    return worst


def main() -> None:
    args = parse_args()
    rank, ranks = start()
    if args.steps < 2 or args.batch % ranks or (args.layout == "hsdp" and ranks % 2):
        dist.destroy_process_group()
        raise SystemExit(
            f"checkpoint_reshard: --steps {args.steps} and --batch {args.batch} on {ranks} ranks: expected at least 2 steps, a "
            "multiple of the ranks, and an even number of ranks for hsdp"
        )
    model = make_model(args.layout, args.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    data = ByteData(load_bytes(None)[0], CONFIG.context, args.batch, args.seed + 1)
    state = checkpoint.TrainState(model, optimizer, rng={"data": data.generator})
    worst = 0.0
    if args.resume:
        try:
            worst = resume(args, model, state, data)
        except checkpoint.CheckpointError as error:  # On every rank.
            dist.destroy_process_group()
            raise SystemExit(f"checkpoint_reshard: {error}; run it without --resume first") from error
    else:
        losses = train(model, state, data, args.steps // 2)
        if rank == 0:
            shutil.rmtree(args.out / "half", ignore_errors=True)  # Of an earlier run, perhaps with more steps.
        dist.barrier()
        checkpoint.save(args.out / "half", state)
        losses += train(model, state, data, args.steps)
        if rank == 0:
            torch.save(losses, args.out / "losses.pt")
            write_curves(args.out / "loss.png", f"{ranks} ranks, {args.layout}", {"loss": (range(1, len(losses) + 1), losses)})
            print(f"look at the checkpoint: torch-ragged checkpoint inspect {args.out / 'half'}")
            print(
                f"trained {args.steps} steps on {ranks} ranks, saved step {args.steps // 2} in {args.out / 'half'}; "
                f"drawn in {args.out / 'loss.png'}"
            )
    dist.destroy_process_group()
    if not worst < LIMIT:  # On all ranks: losses are equal there.
        raise SystemExit(f"checkpoint_reshard: losses differ by {worst:.1e} of the first one, expected less than {LIMIT}")


if __name__ == "__main__":
    main()
