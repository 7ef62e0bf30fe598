"""Loss curves of every optimizer, one process of plain torch against 4 ranks of torch_ragged.fsdp, drawn over each other.

    python -m benchmarks.step.convergence --steps 200 --out out/convergence

The model is the mixture of experts of examples/, the data are the bytes of Python's standard library. Both runs of an optimizer
see the same batches from the same initial weights; they differ in the order of additions of gradients only. AdamW8bit and
Shampoo, which torch lacks, and Muon, whose version in torch takes no stacks of experts, run on plain tensors in one process.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from byte_data import ByteData, load_bytes  # noqa: E402
from moe import MoEConfig, MoETransformer  # noqa: E402
from train_moe import OPTIMIZERS, make_optimizer  # noqa: E402

from benchmarks.common.measure import print_table, write_json  # noqa: E402
from torch_ragged.fsdp import fully_shard  # noqa: E402
from torch_ragged.optim import AdamW8bit  # noqa: E402


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--steps", type=int, default=200, help="optimizer steps (default: %(default)s)")
    add("--ranks", type=int, default=4, help="ranks of the sharded runs (default: %(default)s)")
    add("--batch", type=int, default=16, help="sequences per step over all ranks (default: %(default)s)")
    add("--lr", type=float, default=3e-3, help="peak learning rate of all optimizers (default: %(default)s)")
    add("--optimizers", nargs="+", choices=OPTIMIZERS, default=OPTIMIZERS, help="which (default: all)")
    add("--cut-blocks", action="store_true", help="also adam8bit without orig_param_policy, its blocks cut between ranks")
    add("--out", type=Path, default=Path("out/convergence"), help="folder of picture and numbers (default: %(default)s)")
    return parser.parse_args()


CONFIG = MoEConfig(context=64, dim=96, heads=4, layers=2, experts=4, hidden=192)


def train(
    name: str, args: argparse.Namespace, rank: int = 0, ranks: int = 1, is_sharded: bool = False, keeps_blocks: bool = True
) -> list[float]:
    """The loss of every step, and last the held-out loss; over all ranks."""
    torch.manual_seed(0)
    model = MoETransformer(CONFIG)
    if is_sharded:
        policy = AdamW8bit.policy if name == "adam8bit" and keeps_blocks else None
        for block in model.blocks:
            fully_shard(block, orig_param_policy=policy)
        fully_shard(model, orig_param_policy=policy)
    optimizer = make_optimizer(name, model, args.lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20) * (1 - step / args.steps))
    text, held_out = load_bytes(None)
    data, losses = ByteData(text, CONFIG.context, args.batch, seed=1), []
    for _ in range(args.steps):
        losses.append(_loss(model, data, rank, ranks))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    with torch.no_grad():
        losses.append(_loss(model, ByteData(held_out, CONFIG.context, 64, seed=2), rank, ranks))
    values = torch.stack([loss.detach() for loss in losses])
    if ranks > 1:
        dist.all_reduce(values)
    return (values / ranks).tolist()


def _loss(model: torch.nn.Module, data: ByteData, rank: int, ranks: int) -> torch.Tensor:
    inputs, targets = data.next_batch(rank, ranks)
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def _rank(rank: int, args: argparse.Namespace, store: str, runs: list[tuple[str, bool]]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", store=dist.FileStore(store, args.ranks), rank=rank, world_size=args.ranks)
    curves = [train(name, args, rank, args.ranks, True, keeps_blocks) for name, keeps_blocks in runs]
    if rank == 0:
        torch.save(curves, f"{store}.curves")
    dist.barrier()
    dist.destroy_process_group()


def _plot(path: Path, plain: dict[str, list[float]], sharded: dict[str, list[float]], ranks: int) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 5.5))
    for index, (name, curve) in enumerate(sharded.items()):
        color = f"C{index}"
        axes.plot(curve[:-1], color=color, linewidth=1, label=f"{name}, {ranks} ranks")
        if name in plain:
            axes.plot(plain[name][:-1], color=color, linewidth=3, alpha=0.3, label=f"{name}, one process")
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="The same model under each optimizer")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def main() -> None:
    args = parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    plain = {name: train(name, args) for name in args.optimizers}
    runs = [(name, True) for name in args.optimizers] + ([("adam8bit", False)] if args.cut_blocks else [])
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        mp.spawn(_rank, (args, store, runs), nprocs=args.ranks)
        curves = torch.load(f"{store}.curves")
    sharded = {name if keeps else f"{name}, cut blocks": curve for (name, keeps), curve in zip(runs, curves)}
    rows: list[dict[str, Any]] = []
    for name, curve in sharded.items():
        one = plain.get(name)
        apart = max(abs(a - b) for a, b in zip(curve, one)) if one else float("nan")
        rows.append(
            {
                "optimizer": name,
                "train, last 20": f"{sum(curve[-21:-1]) / 20:.4f}",
                "held out": f"{curve[-1]:.4f}",
                "held out, one process": f"{one[-1]:.4f}" if one else "-",
                "largest gap of curves": f"{apart:.4f}",
            }
        )
    print_table(f"{args.steps} steps, {args.ranks} ranks, torch {torch.__version__}", rows)
    _plot(args.out / "convergence.png", plain, sharded, args.ranks)
    write_json(str(args.out / "convergence.json"), {"one process": plain, f"{args.ranks} ranks": sharded, "table": rows})


if __name__ == "__main__":
    main()
