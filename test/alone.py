"""What one rank does alone, and what the others do meanwhile: programs whose ranks wait for each other for ever.

``python test/alone.py --write`` measures all of them and writes the table of docs/running.md.
"""

from __future__ import annotations

import argparse
import logging
import re
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from common import run_mortal_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from torch_ragged import checkpoint
from torch_ragged.fsdp import fully_shard, reshard_to

__all__ = ["ALONE", "OTHERS", "meet", "outcomes"]

SIZE, RANKS = 8, 3


def sharded(blocks: int = 2) -> nn.Module:
    model = nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(blocks)))
    for block in model if blocks > 1 else ():
        fully_shard(block)
    return fully_shard(model)


def evaluate(model: nn.Module) -> None:
    with torch.no_grad():
        model(torch.ones(1, SIZE))


def train(model: nn.Module) -> None:
    model(torch.ones(1, SIZE)).sum().backward()


def end(model: nn.Module) -> None:
    """The process ends in an orderly way, as after its last batch: it answers no question any more."""
    from torch_ragged._peers import _listener

    _listener._stop()


ALONE = {
    "a forward without gradients": evaluate,
    "a forward and backward": train,
    "clip_grad_norm_": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor(),
    "full_tensor": lambda model: model[0].weight.full_tensor(),
    "checkpoint.save": lambda model: checkpoint.save(tempfile.mkdtemp(), checkpoint.TrainState(model)),
    "reshard_to": lambda model: reshard_to(model, mesh=init_device_mesh("cpu", (RANKS,))),
    "fully_shard": lambda model: fully_shard(nn.Linear(SIZE, SIZE)),
    "barrier": lambda model: dist.barrier(),
}
OTHERS = {
    "barrier": lambda model: dist.barrier(),
    "a forward and backward": train,
    "full_tensor": lambda model: model[1].weight.full_tensor(),
    "the end of the program": end,
}


def meet(alone: str, others: str, blocks: int = 2) -> tuple[str, str, float]:
    """One rank runs ``alone``, the others ``others``: the error of this rank, what was logged, and after how many seconds."""
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("torch_ragged").addHandler(handler)
    model = sharded(blocks)
    for _ in range(2):
        train(model)
    begin, error = time.monotonic(), ""
    try:
        (ALONE[alone] if dist.get_rank() == 0 else OTHERS[others])(model)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    return error, " ".join(logged), time.monotonic() - begin


def outcomes(alone: str, others: str, blocks: int = 2) -> dict[int, tuple[str, str, float]]:
    """What each rank saw."""
    return run_mortal_ranks(RANKS, set(), meet, alone, others, blocks, seconds=50, dead=("died", "", 0.0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the table of docs/running.md")
    parser.add_argument("--only", default="", help="scenarios whose text has this")
    args = parser.parse_args()
    rows = []
    for alone in ALONE:
        for others in OTHERS:
            if alone == others or args.only not in f"{alone} | {others}":
                continue
            found = outcomes(alone, others)
            print(alone, "|", others, *(f"\n   {rank}: {seconds:.1f} s {error[:700]} LOG {log[:100]}" for rank, (error, log, seconds) in found.items()), flush=True)


if __name__ == "__main__":
    main()
