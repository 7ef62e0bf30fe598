"""Faults of processes and of the network, injected while a model trains: what the other ranks saw, how soon, what was lost.

    python test/reliability/process_faults.py --times 20 --json FILE [--only NAME ...]

Kinds on two nodes need root, iproute2 and nftables; elsewhere they are left out, with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from tqdm import tqdm
from trials import SIZE, Outcome, Rank, Trial, make_model, summary, train

from torch_ragged import checkpoint
from torch_ragged.fsdp import fully_shard

from nodes import Nodes, why_no_nodes  # isort: skip  (trials adds its folder)


@dataclass
class Kind:
    """A fault.

    Attributes:
        run: one trial: it gets a folder and the nodes, and returns the outcomes of the ranks that the fault left.
        saw: what a user sees, in words.
        expected: a pattern of ``Error: text`` of each of these ranks; empty if training must go on without an error.
        most: at least one rank's error must match; all must be errors of ours.
        on_nodes: whether it needs two nodes.
        saves: whether the trial saves checkpoints, whose last must load afterwards.
    """

    run: Callable[[Path, Nodes | None], list[Outcome]]
    saw: str
    expected: str
    on_nodes: bool = False
    saves: bool = True


def at_a_random_moment() -> None:
    """Somewhere in a step: in forward, backward, the optimizer or a save."""
    time.sleep(random.uniform(0, 0.3))


# -- processes -----------------------------------------------------------------------------------------------------------


def signal_in_training(how: int, victims: Sequence[int], store_in_rank_0: bool = False) -> Callable[..., list[Outcome]]:
    def run(folder: Path, nodes: Nodes | None) -> list[Outcome]:
        trial = Trial(train, 4, folder, nodes, store_in_rank_0)
        trial.wait_until_ready()
        at_a_random_moment()
        trial.inject(lambda: trial.kill(*victims, how=how))
        return trial.outcomes(without=victims)

    return run


def raise_in_forward(rank: Rank) -> Any:
    def fail(model: nn.Module, step: int) -> None:
        if rank.rank == 2 and step == 5:
            raise ValueError("a batch of this rank is broken")

    return train(rank, before_step=fail)


def die_before(what: str) -> Callable[[Rank], Any]:
    def body(rank: Rank) -> Any:
        rank.ready()
        if rank.rank == 2:
            time.sleep(0.5)  # The other ranks may still be connecting.
        if rank.rank == 2 and what == "construction":
            os.kill(os.getpid(), signal.SIGKILL)
        model = make_model()
        if rank.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return model(torch.ones(2, SIZE)).sum()

    return body


def ranks_run(body: Callable[[Rank], Any], ranks: int = 4, without: Sequence[int] = ()) -> Callable[..., list[Outcome]]:
    """Ranks that inject the fault themselves."""

    def run(folder: Path, nodes: Nodes | None) -> list[Outcome]:
        trial = Trial(body, ranks, folder, nodes)
        trial.wait_until_ready()
        trial.inject()
        return trial.outcomes(without=without)

    return run


# -- ranks that do different things --------------------------------------------------------------------------------------


def other_order(rank: Rank) -> Any:
    model = make_model()
    rank.ready()
    layers = list(model)
    random.Random(rank.rank).shuffle(layers)
    for _ in range(4):  # Forwards without the root's, in another order on each rank.
        for layer in layers:
            layer(torch.ones(2, SIZE)).sum().backward()


def branch(rank: Rank) -> Any:
    """A branch that depends on data: rank 1 skips a layer."""
    model = make_model()
    rank.ready()
    model.forward = lambda x: model[3](x if rank.rank == 1 else model[2](model[1](model[0](x))))  # type: ignore[method-assign]
    for _ in range(3):
        model(torch.ones(2, SIZE)).sum().backward()


def other_policy(rank: Rank) -> Any:
    rank.ready()
    return make_model(reshard_after_forward=rank.rank == 1) and None


def other_model(rank: Rank) -> Any:
    rank.ready()
    return fully_shard(nn.Linear(SIZE, SIZE + (rank.rank == 3))) and None


def other_groups(rank: Rank) -> Any:
    groups = [dist.new_group(list(range(rank.ranks))) for _ in range(2)]
    rank.ready()
    return make_model(mesh=DeviceMesh.from_group(groups[rank.rank % 2], "cpu")) and None


def other_sync(rank: Rank) -> Any:
    """In debug mode: one rank accumulates gradients, the others reduce them."""
    os.environ["TORCH_RAGGED_DEBUG"] = "1"
    model = make_model()
    rank.ready()
    model.set_requires_gradient_sync(rank.rank != 1)  # type: ignore[operator]
    model(torch.ones(2, SIZE)).sum().backward()


def bad_gradient(rank: Rank) -> Any:
    """One rank's gradient is NaN or infinite in a random step: all ranks skip this step, and none other."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    rank.ready()
    choice = random.Random(rank.folder.name)  # Equal on all ranks.
    victim, bad, value = choice.randrange(rank.ranks), choice.randrange(5), choice.choice((float("nan"), float("inf")))
    skipped = []
    for step in range(5):
        x = torch.ones(2, SIZE)
        if step == bad and rank.rank == victim:
            x[0, 0] = value
        model(x).sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        if norm.isfinite():
            optimizer.step()
        else:
            skipped.append(step)
        optimizer.zero_grad()
    assert skipped == [bad], (skipped, bad)
    weights = torch.cat([param.full_tensor().flatten() for param in model.parameters()])  # type: ignore[operator]
    assert weights.isfinite().all()
    everywhere = [torch.empty_like(weights) for _ in range(rank.ranks)]
    dist.all_gather(everywhere, weights)
    assert all(torch.equal(each, weights) for each in everywhere)


# -- the network ---------------------------------------------------------------------------------------------------------


def in_network(fault: Callable[[Nodes], None]) -> Callable[..., list[Outcome]]:
    def run(folder: Path, nodes: Nodes | None) -> list[Outcome]:
        assert nodes is not None
        nodes.heal()
        nodes.unplug(1, is_up=True)
        trial = Trial(train, 4, folder, nodes)
        try:
            trial.wait_until_ready()
            at_a_random_moment()
            trial.inject(lambda: fault(nodes))
            return trial.outcomes()
        finally:
            nodes.heal()
            nodes.unplug(1, is_up=True)

    return run


def lossy_then_fine(folder: Path, nodes: Nodes | None) -> list[Outcome]:
    """30 % of the packets are lost for a second. The result must be that of a run without loss."""
    assert nodes is not None
    steps = 30
    trial = Trial(lambda rank: train(rank, steps), 4, folder, nodes)
    trial.wait_until_ready()
    trial.inject(lambda: nodes.drop(30))
    time.sleep(1)
    nodes.heal()
    outcomes = trial.outcomes()
    if not _plain:
        reference = Trial(lambda rank: train(rank, steps), 4, folder.parent / "plain")
        _plain.extend(reference.outcomes()[0].result)
    for outcome in outcomes:
        if not outcome.error and outcome.result != _plain:
            outcome.error, outcome.text = "wrong result", "training does not continue as without loss"
    return outcomes


_plain: list[Any] = []

NAMED = "PeerError, or in a save CheckpointError, on all other ranks: which rank died, its process and host"
DIED = r"(PeerError|CheckpointError): .* failed: .*rank 2 died: process \d+ on host"
DIFFERENT = r"(RuntimeError|ValueError|PeerError): "

KINDS = {
    "a rank is killed (SIGKILL)": Kind(
        signal_in_training(signal.SIGKILL, [2]),
        "PeerError or CheckpointError on all other ranks: rank 2 died, with process and host",
        DIED,
    ),
    "a rank is ended (SIGTERM)": Kind(
        signal_in_training(signal.SIGTERM, [2]),
        "PeerError or CheckpointError on all other ranks: rank 2 died, with process and host",
        DIED,
    ),
    "two of four ranks are killed": Kind(signal_in_training(signal.SIGKILL, [1, 2]), NAMED, DIED),
    "a rank is stopped (SIGSTOP)": Kind(
        signal_in_training(signal.SIGSTOP, [2]),
        "PeerError after the timeout (6 s): rank 2 is stopped",
        r"(PeerError|CheckpointError): .*rank 2 is stopped: process \d+",
    ),
    "rank 0 is killed with the store in it": Kind(
        signal_in_training(signal.SIGKILL, [0], store_in_rank_0=True),
        "PeerError: the store in the process of rank 0 is lost",
        r"(PeerError|CheckpointError): .*(store|rank 0)",
    ),
    "a rank raises in its training loop": Kind(
        ranks_run(raise_in_forward),
        "its own error there; PeerError on the other ranks: rank 2 died",
        rf"({DIED}|ValueError: a batch of this rank is broken)",
    ),
    "a rank dies before fully_shard": Kind(
        ranks_run(die_before("construction"), without=[2]),
        "PeerError after the timeout (6 s): rank 2 made no such call",
        r"PeerError: fully_shard failed: .*ranks \[2\] made no such call",
        saves=False,
    ),
    "a rank dies before its first forward": Kind(
        ranks_run(die_before("forward"), without=[2]), "PeerError: rank 2 died", DIED, saves=False
    ),
    "ranks run modules in different orders": Kind(
        ranks_run(other_order), "an error on all ranks that says which module each rank called", DIFFERENT, saves=False
    ),
    "a branch that depends on data": Kind(
        ranks_run(branch), "an error on all ranks that says which module each rank called", DIFFERENT, saves=False
    ),
    "other arguments on one rank": Kind(
        ranks_run(other_policy), "ValueError on all ranks: the first option that differs", "ValueError: .*options", saves=False
    ),
    "another model on one rank": Kind(
        ranks_run(other_model), "ValueError on all ranks: the first parameter that differs", "ValueError: .*weight", saves=False
    ),
    "meshes of different process groups": Kind(
        ranks_run(other_groups), "ValueError on all ranks: both process groups", "ValueError: .*different meshes", saves=False
    ),
    "one rank accumulates, TORCH_RAGGED_DEBUG=1": Kind(
        ranks_run(other_sync), "ValueError on all ranks: the two collectives", "ValueError: .*collective", saves=False
    ),
    "NaN or inf in one rank's gradient": Kind(
        ranks_run(bad_gradient), "all ranks skip this step, and go on with equal weights", "", saves=False
    ),
    "a node's processes are all killed": Kind(
        signal_in_training(signal.SIGKILL, [2, 3]), "PeerError on the other node: ranks 2 and 3 died", DIED, on_nodes=True
    ),
    "a node's link loses all packets": Kind(
        in_network(lambda nodes: nodes.drop(100)),
        "PeerError on both nodes: the ranks of the other node, or the store, are not reachable",
        r"(PeerError|CheckpointError): .*(not reachable|store|lives|has not answered|network)",
        on_nodes=True,
    ),
    "a node's interface goes down": Kind(
        in_network(lambda nodes: nodes.unplug(1)),
        "PeerError on both nodes: the ranks of the other node, or the store, are not reachable",
        r"(PeerError|CheckpointError): .*(not reachable|store|lives|has not answered|network|died)",
        on_nodes=True,
    ),
    "30 % of the packets are lost for 1 s": Kind(lossy_then_fine, "training goes on, with the same bits", "", on_nodes=True),
}


def last_checkpoint_is_lost(folder: Path) -> bool:
    """Whether no complete checkpoint loads, in one process."""

    def body(rank: Rank) -> int:
        model = make_model()
        state = checkpoint.TrainState(model, torch.optim.AdamW(model.parameters(), 1e-2))
        checkpoint.load(folder, state)
        rank.ready()
        return state.step

    (outcome,) = Trial(body, 1, folder).outcomes()
    return bool(outcome.error) or outcome.hangs or outcome.result < 3


def inject(name: str, kind: Kind, times: int, nodes: Nodes | None) -> dict[str, Any]:
    """All trials of one kind, as a row."""
    trials, problems, lost = [], [], 0
    for _ in tqdm(range(times), desc=name, leave=False):
        with tempfile.TemporaryDirectory() as root:
            folder = Path(tempfile.mkdtemp(dir=root))
            outcomes = kind.run(folder, nodes if kind.on_nodes else None)
            lost += kind.saves and last_checkpoint_is_lost(folder)
        trials.append(outcomes)
        for each in outcomes:
            said = f"{each.error}: {each.text}"
            fine = bool(re.match(kind.expected, said, re.DOTALL)) if kind.expected else not each.error
            fine = fine and not each.hangs
            if not fine:
                problems.append(f"rank {each.rank}{' hangs' if each.hangs else ''}: {said[:600]}")
    for problem in problems[:6]:
        print(f"{name}: {problem}")
    return summary(name, trials, kind.saw, problems, lost)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20, help="injections of each kind (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="file for the rows")
    parser.add_argument("--only", nargs="*", help="kinds whose names contain one of these")
    args = parser.parse_args()
    reason = why_no_nodes()
    chosen = {name: kind for name, kind in KINDS.items() if not args.only or any(each in name for each in args.only)}
    rows = []

    def run(nodes: Nodes | None) -> None:
        for name, kind in chosen.items():
            if kind.on_nodes and nodes is None:
                print(f"{name}: left out, this machine {reason}")
                continue
            row = inject(name, kind, args.times, nodes)
            rows.append(row)
            print({key: value for key, value in row.items() if key != "saw"}, flush=True)
            if args.json:
                args.json.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1))

    if reason:
        run(None)
    else:
        with Nodes() as nodes:
            run(nodes)


if __name__ == "__main__":
    main()
