"""Train a small mixture-of-experts transformer on bytes with torch_ragged.fsdp, checkpoint it, resume it elsewhere.

    torchrun --nproc-per-node 4 examples/train_moe.py --steps 150 --checkpoint out/checkpoint
    torchrun --nproc-per-node 2 examples/train_moe.py --steps 180 --resume out/checkpoint

The first trains on 4 ranks and saves every --save-every steps and at the end; the second goes on from the last complete
checkpoint on 2, also if the first was killed, at any moment. Both write out/loss.png and out/report.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from byte_data import ByteData, load_bytes, unigram_entropy
from moe import MoEConfig, MoETransformer
from torch.distributed.device_mesh import init_device_mesh
from tqdm import tqdm

from torch_ragged import checkpoint
from torch_ragged.fsdp import (
    MixedPrecisionPolicy,
    OrigParamPolicy,
    blocks,
    buffer_layouts,
    elements,
    fully_shard,
    memory_report,
    monitor,
    rows,
    tensor,
)
from torch_ragged.optim import AdamW8bit, Muon, Shampoo, matrix_groups

OPTIMIZERS = ("adamw", "muon", "adam8bit", "shampoo")


def make_optimizer(name: str, model: MoETransformer, lr: float) -> torch.optim.Optimizer:
    """One of ``OPTIMIZERS``; Muon and Shampoo leave embeddings, positions, head and vectors to AdamW, at the same rate."""
    options: dict[str, Any] = {"lr": lr, "betas": (0.9, 0.95), "weight_decay": 0.1}
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), **options)
    if name == "adam8bit":
        return AdamW8bit(model.parameters(), **options)
    groups = matrix_groups(model, adamw=[model.position, model.head])
    return Muon(groups, adjust_lr_fn="match_rms_adamw", **options) if name == "muon" else Shampoo(groups, **options)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", help="folder of text files (default: the sources of Python's standard library)")
    add("--mesh", type=int, help="ranks to shard over; must equal the number started (default: all of them)")
    add("--steps", type=int, default=150, help="optimizer step to train to (default: %(default)s)")
    add("--schedule-steps", type=int, default=200, help="steps of the cosine decay (default: %(default)s)")
    add("--batch", type=int, default=16, help="sequences per step over all ranks (default: %(default)s)")
    add("--lr", type=float, default=3e-3, help="peak learning rate (default: %(default)s)")
    add("--warmup", type=int, default=20, help="steps of linear warm-up (default: %(default)s)")
    add("--optimizer", choices=OPTIMIZERS, default="adamw", help="of torch_ragged.optim but for adamw (default: %(default)s)")
    add("--clip", type=float, default=1.0, help="largest gradient norm (default: %(default)s)")
    add("--granularity", default="rows:16", help="elements, rows:N, blocks:N or tensor, for experts (default: %(default)s)")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="dtype to compute in (default: %(default)s)")
    add("--untied", action="store_true", help="give the head a weight of its own")
    add("--keep-unsharded", action="store_true", help="keep gathered parameters between forward and backward")
    add("--checkpoint", type=Path, help="folder to save checkpoints to")
    add(
        "--save-every",
        type=int,
        default=50,
        help="steps between checkpoints; one is saved at the end too (default: %(default)s)",
    )
    add("--keep", type=int, default=2, help="checkpoints to keep, the newest ones (default: %(default)s)")
    add("--timeout", type=float, default=300, help="seconds that a collective may take (default: %(default)s)")
    add("--resume", type=Path, help="folder of checkpoints whose last to go on from, or one of them; at any number of ranks")
    add("--out", type=Path, default=Path("out"), help="folder of loss.png and report.json (default: %(default)s)")
    add("--eval-every", type=int, default=25, help="steps between held-out evaluations (default: %(default)s)")
    add("--seed", type=int, default=0, help="seed of weights and data order (default: %(default)s)")
    return parser.parse_args(argv)


def agree(check: Callable[[], Any]) -> Any:
    """Run ``check`` on every rank; if it fails on any, stop all of them with the message. One small all-gather."""
    problem, result = None, None
    try:
        result = check()
    except (OSError, ValueError, TypeError) as error:
        problem = str(error)
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    found = sorted({p for p in problems if p})
    if found:
        dist.destroy_process_group()
        raise SystemExit(f"train_moe: {'; '.join(found)}")
    return result


def policy_of(text: str) -> OrigParamPolicy:
    """The granularity policy of ``--granularity``: expert weights as it says, everything else element-wise."""
    kind, _, size = text.partition(":")
    if kind not in ("elements", "rows", "blocks", "tensor") or (kind in ("rows", "blocks") and not size.isdigit()):
        raise ValueError(f"--granularity {text}: expected elements, rows:N, blocks:N or tensor")
    n = int(size) if size else 1
    granularity = {"elements": elements, "rows": lambda: rows(n), "blocks": lambda: blocks(n, n), "tensor": tensor}[kind]()
    return lambda fqn, param: granularity if param.ndim == 3 else None


def check_args(args: argparse.Namespace) -> None:
    ranks = dist.get_world_size()
    if args.mesh not in (None, ranks):
        raise ValueError(f"--mesh {args.mesh}, but {ranks} ranks were started: use torchrun --nproc-per-node {args.mesh}")
    if args.batch % ranks:
        raise ValueError(f"--batch {args.batch} does not divide over {ranks} ranks")
    for name in ("steps", "save_every", "keep"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)}: expected at least 1")
    policy_of(args.granularity)


class Trainer:
    """The model, its optimizer and where training stands."""

    def __init__(self, args: argparse.Namespace, config: MoEConfig, train: torch.Tensor, held_out: torch.Tensor) -> None:
        self.args, self.config = args, config
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        mesh = init_device_mesh("cpu", (self.ranks,))
        torch.manual_seed(args.seed)
        self.model = MoETransformer(config)
        dtype = getattr(torch, args.dtype)
        mp_policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        policy = AdamW8bit.policy if args.optimizer == "adam8bit" else policy_of(args.granularity)
        knobs: dict[str, Any] = {"mesh": mesh, "mp_policy": mp_policy, "orig_param_policy": policy}
        for block in self.model.blocks:
            fully_shard(block, reshard_after_forward=not args.keep_unsharded, **knobs)
        fully_shard(self.model, **knobs)
        self.optimizer = make_optimizer(args.optimizer, self.model, args.lr)
        self.watch = monitor(self.model, self.optimizer)
        self.data = ByteData(train, config.context, args.batch, args.seed + 1)
        self.held_out = held_out
        self.step = 0
        self.history: dict[str, Any] = {"steps": [], "train": [], "eval_steps": [], "held_out": [], "resumed_at": []}

    def learning_rate(self) -> float:
        """Linear warm-up, then cosine decay to a tenth."""
        warm = min(1.0, (self.step + 1) / max(1, self.args.warmup))
        progress = min(1.0, self.step / max(1, self.args.schedule_steps))
        return self.args.lr * warm * (0.55 + 0.45 * math.cos(math.pi * progress))

    def train_step(self) -> float:
        """One optimizer step; returns the loss over all ranks."""
        inputs, targets = self.data.next_batch(self.rank, self.ranks)
        loss = F.cross_entropy(self.model(inputs).float().flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return self.mean_over_ranks(loss.detach())

    @torch.no_grad()
    def evaluate(self) -> float:
        """Held-out loss on 64 fixed sequences."""
        data = ByteData(self.held_out, self.config.context, 64, seed=1234)
        inputs, targets = data.next_batch(self.rank, self.ranks)
        return self.mean_over_ranks(F.cross_entropy(self.model(inputs).float().flatten(0, 1), targets.flatten()))

    def mean_over_ranks(self, value: torch.Tensor) -> float:
        value = value.clone()
        with self.watch.collective(value.nbytes, "mean"):
            dist.all_reduce(value)
        return value.item() / self.ranks

    def train_state(self) -> checkpoint.TrainState:
        """Everything that a checkpoint holds. The data's generator is one of the run's own."""
        return checkpoint.TrainState(
            self.model,
            self.optimizer,
            step=self.step,
            consumed_tokens=self.data.position * self.config.context,
            data_position=self.data.position,
            rng={"data": self.data.generator},
            extra={"config": dataclasses.asdict(self.config), "history": self.history, "batch": self.args.batch},
        )

    def save(self) -> None:
        """Save a checkpoint: complete or not there."""
        checkpoint.save(self.args.checkpoint, self.train_state())
        checkpoint.keep(self.args.checkpoint, self.args.keep)
        self.watch.restart()

    def load(self, path: Path) -> checkpoint.Manifest:
        """Go on from a checkpoint.

        Raises:
            SystemExit: there is none, or it is damaged or of another model.
        """
        state = self.train_state()
        try:
            manifest = checkpoint.load(path, state)
        except checkpoint.CheckpointError as error:  # On every rank.
            dist.destroy_process_group()
            raise SystemExit(f"train_moe: --resume {path}: {error}") from error
        self.step, self.data.position, self.history = state.step, state.data_position, state.extra["history"]
        self.history["resumed_at"].append(self.step)
        return manifest


def train(trainer: Trainer, steps: int) -> dict[str, Any]:
    """Train to ``steps``, with a progress bar on rank 0; returns throughput and the share of time in collectives."""
    history, watch = trainer.history, trainer.watch
    tokens = trainer.args.batch * trainer.config.context
    bar = tqdm(total=steps, initial=trainer.step, disable=trainer.rank != 0, desc="train", mininterval=1.0)
    begin, total = trainer.step, Counter[str]()
    watch.restart()
    while trainer.step < steps:
        loss = trainer.train_step()
        total.update(watch.step(tokens))
        history["steps"].append(trainer.step)
        history["train"].append(loss)
        bar.set_postfix_str(f"loss {loss:.3f}, {watch.postfix()}", refresh=False)
        bar.update()
        if trainer.step % trainer.args.eval_every == 0 or trainer.step == steps:
            history["eval_steps"].append(trainer.step)
            history["held_out"].append(trainer.evaluate())
            watch.restart()
        if trainer.args.checkpoint and (trainer.step % trainer.args.save_every == 0 or trainer.step == steps):
            trainer.save()
    bar.close()
    watch.close()
    seconds = total["step_s"]
    return {
        "tokens_per_second": tokens * (trainer.step - begin) / seconds,
        "collective_share": total["exposed_s"] / seconds,
        "seconds": seconds,
        "collectives": round(sum(value for key, value in total.items() if key.endswith("_calls"))),
        "per_step": {key: value / (trainer.step - begin) for key, value in total.items() if key != "tokens_per_s"},
    }


def write_plot(path: Path, history: dict[str, Any], unigram: float) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5))
    axes.plot(history["steps"], history["train"], label="train", linewidth=1)
    axes.plot(history["eval_steps"], history["held_out"], "o-", label="held-out")
    axes.axhline(unigram, color="gray", linestyle=":", label="unigram entropy")
    for index, step in enumerate(history["resumed_at"]):
        axes.axvline(step, color="black", linestyle="--", label="" if index else "resumed")
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="MoE transformer on bytes, torch_ragged.fsdp")
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def report(trainer: Trainer, result: dict[str, Any], unigram: float, what: str) -> None:
    """Write the picture and the report, and say what has happened."""
    args, history = trainer.args, trainer.history
    args.out.mkdir(parents=True, exist_ok=True)
    write_plot(args.out / "loss.png", history, unigram)
    plans = {name: layout.describe(name, 4) for name, layout in buffer_layouts(trainer.model).items()}
    document = {
        "torch": torch.__version__,
        "ranks": trainer.ranks,
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "unigram_entropy": unigram,
        "held_out_loss": history["held_out"][-1],
        "plans": plans,
        **result,
        "history": history,
    }
    (args.out / "report.json").write_text(json.dumps(document, indent=1))
    print(f"wrote {args.out / 'report.json'}: throughput, collectives, and the layout of each buffer")
    print(
        f"{what}; held-out loss {history['held_out'][-1]:.3f} at step {trainer.step} (entropy of single bytes: {unigram:.3f}); "
        f"drawn in {args.out / 'loss.png'}"
    )


def main() -> None:
    args = parse_args()
    dist.init_process_group("gloo", timeout=timedelta(seconds=args.timeout))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // dist.get_world_size()))
    config = MoEConfig(tied=not args.untied)
    agree(lambda: check_args(args))
    train_bytes, held_out = agree(lambda: load_bytes(args.data))
    trainer = agree(lambda: Trainer(args, config, train_bytes, held_out))
    unigram = unigram_entropy(train_bytes, held_out)
    if trainer.rank == 0:
        parameters = sum(p.numel() for p in trainer.model.parameters())
        print(
            f"{trainer.ranks} ranks train a mixture of experts of {parameters:,} parameters on {train_bytes.numel():,} bytes "
            f"of {args.data or 'Python source'}"
        )
    begin, what = 0, f"trained on {trainer.ranks} ranks"
    if args.resume:
        manifest = trainer.load(args.resume)
        begin, again = trainer.step, trainer.evaluate()
        known = dict(zip(trainer.history["eval_steps"], trainer.history["held_out"])).get(begin)
        before = "" if known is None else f"{known:.6f} there, "
        what = f"saved on {manifest.world_size} ranks at step {begin}, resumed on {trainer.ranks}: held-out loss {before}"
        what += f"{again:.6f} here"
        agree(lambda: _check_steps(args, trainer.step))
    result = train(trainer, args.steps)
    if args.resume and trainer.rank == 0:
        losses = [f"{loss:.3f}" for loss in trainer.history["train"]]
        before, after = " ".join(losses[max(0, begin - 5) : begin]), " ".join(losses[begin : begin + 5])
        print(f"losses before the resume ... {before} | after {after} ...")
    if trainer.rank == 0:
        print(memory_report(trainer.model, trainer.optimizer))
        report(trainer, result, unigram, what if args.resume or not args.checkpoint else f"{what}, saved in {args.checkpoint}")
    dist.barrier()
    dist.destroy_process_group()


def _check_steps(args: argparse.Namespace, step: int) -> None:
    if step >= args.steps:
        raise ValueError(f"--steps {args.steps}: the checkpoint is at step {step} already, ask for more")


if __name__ == "__main__":
    main()
