"""Train on 4 ranks and kill one of them: the others go on, and each loss has the bits of one process without a death.

    python examples/survive.py --steps 40 --kill 1:15

This program starts the ranks itself: torchrun would end all of them. The reference is the one of same_bits.py, plain torch in
one process. Both curves are drawn to out/survive.png. If they are not equal to the bit, the program ends with an error.
"""

from __future__ import annotations

import argparse
import multiprocessing
from multiprocessing.connection import Connection, wait
from pathlib import Path

import same_bits
import torch
import torch.distributed as dist
from example_tools import write_curves
from torch.distributed.device_mesh import init_device_mesh

from torch_ragged import elastic
from torch_ragged.checkpoint import TrainState
from torch_ragged.fsdp import SameBits, fully_shard


def train(rank: int, ranks: int, port: int, steps: int, parent: Connection) -> None:
    """One rank. It tells its parent each step that it begins, and the losses at the end."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port)  # The parent holds it, which survives.
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    model = same_bits.make_model()
    fully_shard(model[0])  # type: ignore[index]
    fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    optimizer = same_bits.adamw(model)
    same = SameBits(model, optimizer, pieces=same_bits.PIECES)
    losses: dict[int, float] = {}

    def step(number: int) -> None:
        parent.send(number)
        inputs = same_bits.batch(number).chunk(same_bits.PIECES)
        for piece in same.pieces():
            loss = (model(inputs[piece]) - inputs[piece]).square().mean()
            loss.backward()
            same.add_loss(loss)
        same.clip_grad_norm_(same_bits.MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses[number] = same.loss()

    elastic.run(step, TrainState(model, optimizer, extra={"same": same}), steps)
    parent.send(losses)


def run(ranks: int, steps: int, victim: int, kill_at: int) -> dict[int, dict[int, float]]:
    """The losses of each rank that was left, by step. Rank ``victim`` is killed when it begins step ``kill_at``."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    processes, pipes = [], {}
    for rank in range(ranks):
        ours, theirs = context.Pipe(duplex=False)
        processes.append(context.Process(target=train, args=(rank, ranks, store.port, steps, theirs), daemon=True))
        processes[-1].start()
        theirs.close()
        pipes[ours] = rank
    found: dict[int, dict[int, float]] = {}
    while pipes:
        for pipe in wait(list(pipes)):
            try:
                message = pipe.recv()  # type: ignore[union-attr]
            except EOFError:  # The process has ended.
                del pipes[pipe]  # type: ignore[arg-type]
                continue
            rank = pipes[pipe]  # type: ignore[index]
            if isinstance(message, dict):
                found[rank] = message
            elif (rank, message) == (victim, kill_at):
                processes[rank].kill()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument("--kill", default="1:15", help="the rank to kill, and the step (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of survive.png (default: %(default)s)")
    args = parser.parse_args()
    victim, kill_at = map(int, args.kill.split(":"))
    torch.set_num_threads(1)
    model = same_bits.make_model()
    expected = [loss for loss, _ in same_bits.one_process(model, same_bits.adamw(model), args.steps)]
    found = run(args.ranks, args.steps, victim, kill_at)
    left = sorted(found)
    equal = bool(left) and victim not in left and all(list(found[rank].values()) == expected for rank in left)
    steps = range(args.steps)
    if left:
        curves = {"one process": (steps, expected), f"{args.ranks} ranks": (steps, list(found[left[0]].values()))}
        title = f"rank {victim} of {args.ranks} is killed in step {kill_at}"
        write_curves(args.out / "survive.png", title, curves, death=kill_at)
    print(
        f"rank {victim} was killed in step {kill_at}, ranks {left} went on: the losses of all {args.steps} steps are "
        f"{'equal' if equal else 'NOT equal'} to those of one process, to the bit; drawn in {args.out / 'survive.png'}"
    )
    if not equal:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
