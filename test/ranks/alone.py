"""What one rank does alone, and what the others do meanwhile: programs whose ranks wait for each other for ever.

``python test/ranks/alone.py`` measures them and prints a table. docs/one_rank_alone.md says what its rows have in common.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time

import torch
import torch.distributed as dist
from common import run_mortal_ranks
from soon import soon
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from torch_ragged import RaggedShard, checkpoint, transfer
from torch_ragged._ranks import peers
from torch_ragged.fsdp import NeighbourCopies, fully_shard, reshard_to, token_scale

__all__ = ["ALONE", "OTHERS", "outcomes"]

SIZE, RANKS = 8, 3


def sharded() -> nn.Module:
    model = nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(2)))
    for block in model:
        fully_shard(block)
    return fully_shard(model)


def evaluate(model: nn.Module) -> None:
    with torch.no_grad():
        model(torch.ones(1, SIZE))


def train(model: nn.Module) -> None:
    model(torch.ones(1, SIZE)).sum().backward()


def end(model: nn.Module) -> None:
    """What happens at the end of a process. It stays here, since this test waits for its answer."""
    peers._listener._stop()


def uneven(model: nn.Module) -> None:
    """By one all-to-all, which a redistribution issues on the process group itself."""
    placement = RaggedShard((0,), (4, 3, 2))
    distribute_tensor(torch.ones(9), model[0].weight.device_mesh, [placement], src_data_rank=None).full_tensor()


ALONE = {
    "a forward without gradients": evaluate,
    "a forward and backward": train,
    "clip_grad_norm_": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor(),
    "full_tensor": lambda model: model[0].weight.full_tensor(),
    "checkpoint.save": lambda model: checkpoint.save(tempfile.mkdtemp(), checkpoint.TrainState(model)),
    "reshard_to": lambda model: reshard_to(model, None, mesh=init_device_mesh("cpu", (RANKS,))),
    "fully_shard": lambda model: fully_shard(nn.Linear(SIZE, SIZE)),
    "transfer.stream": lambda model: list(transfer.stream(model, 1)),
    "NeighbourCopies": lambda model: NeighbourCopies(model, None),
    "token_scale": lambda model: token_scale(3),
    "barrier": lambda model: dist.barrier(),
}
OTHERS = {
    "barrier": lambda model: dist.barrier(),
    "a forward and backward": train,
    "full_tensor": lambda model: model[1].weight.full_tensor(),
    "full_tensor of uneven shards": uneven,
    "the end of the program": end,
}


def meet(alone: str, others: str, is_quick: bool = False) -> tuple[str, str, float]:
    """One rank runs ``alone``, the others ``others``: the error of this rank, what was logged, and after how many seconds."""
    if is_quick:
        with soon():
            return meet(alone, others)
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("torch_ragged").addHandler(handler)
    model = sharded()
    for _ in range(2):
        train(model)
    begin, error = time.monotonic(), ""
    try:
        (ALONE[alone] if dist.get_rank() == 0 else OTHERS[others])(model)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    return error, " ".join(logged), time.monotonic() - begin


def outcomes(alone: str, others: str, is_quick: bool = False) -> dict[int, tuple[str, str, float]]:
    """What each rank saw."""
    return run_mortal_ranks(RANKS, set(), meet, alone, others, is_quick, seconds=50, dead=("its process ended", "", 0.0))


def row(alone: str, others: str) -> str:
    """One row of the table."""
    found = outcomes(alone, others)
    waiting = [found[rank] for rank in found if rank == 0 or others != "the end of the program"]
    kinds = {rank: error.partition(":")[0] for rank, (error, _, _) in found.items()}
    named = [error + log for error, log, _ in waiting if "ranks " in error + log or "died" in error + log]
    seconds = [each[2] for each in waiting if each[2]]
    texts = [kinds[0], *([] if others == "the end of the program" else [kinds[1]])]
    return f"| {alone} | {others} | {', '.join(texts)} | {len(named)} of {len(waiting)} | {max(seconds):.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="scenarios whose text has this")
    args = parser.parse_args()
    for alone in ALONE:
        for others in OTHERS:
            if alone != others and args.only in f"{alone} | {others}":
                print(row(alone, others), flush=True)


if __name__ == "__main__":
    main()
