"""Time, copies and memory of a training step: torch_ragged.fsdp beside FSDP2, DDP, one process, and the floor.

    python -m benchmarks.step.fsdp_step [--json PATH] [--ranks 4] [--rounds 15] [--cases dense moe ...]
        [--policies float32 bf16] [--parts] [--peers]

All systems of a case live in the same processes and take turns, each round in another order; a step begins when all ranks
are there and takes as long as the slowest rank. Ratios are of the same round, and their median is given.

    ragged         torch_ragged.fsdp.fully_shard of each block
    copy engine    the same with set_collectives("copy_engine"), memory shared by the ranks, and persistent buffers
    FSDP2          torch's, in the same way
    DDP            DistributedDataParallel with gradients as views of buckets
    one process    the plain stack on every rank, without any communication
    floor          the same, with the optimizer on a shard, then the bare collectives of FSDP, as fast as we know them, on
                   memory that nothing is copied to or from; nothing overlaps
    --parts        the package with parts switched off: see systems.py
    --peers        Megatron-FSDP and DeepSpeed ZeRO-3, where they are installed and run, timed only: see peers.py

Copies are those that a profiler sees in a step and that the floor has not; those inside of collectives are
theirs. The last block stays gathered after forward in both, as torchtitan has it. The peak is what the CPU allocator has
given out at the most in a step, activations included; held is before the step. CPU time is that of all threads of a rank.

Malloc keeps the memory that is freed, for all alike (``--malloc``).
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common.measure import add_malloc, on_ranks, print_table, write_json
from benchmarks.common.peers import PEERS
from benchmarks.common.stacks import CASES, Case
from benchmarks.common.step_trace import Trace, traced
from benchmarks.common.systems import POLICIES, SYSTEMS, Training

PHASES = ("forward", "backward", "optimizer")
USUAL = ("ragged", "ragged, copy engine", "FSDP2", "DDP", "one process", "floor")
PARTS = ("no DBuffer", "gradients copied", "rows(32)", "rows(32), no planner")


def timed_step(training: Training) -> list[float]:
    """Seconds of each phase on this rank, of the whole step, and of CPU time in it, of all threads."""
    dist.barrier()
    cpu = time.process_time()
    moments = [time.perf_counter()]
    loss = training.forward()
    moments.append(time.perf_counter())
    training.backward(loss)
    moments.append(time.perf_counter())
    training.optimize()
    moments.append(time.perf_counter())
    phases = [later - sooner for sooner, later in zip(moments, moments[1:])]
    return [*phases, moments[-1] - moments[0], time.process_time() - cpu]


def time_steps(trainings: dict[str, Training], rounds: int, warmup: int = 2) -> dict[str, torch.Tensor]:
    """(rounds, phases, total and CPU) seconds for each system: of the slowest rank, and CPU time in the mean of the ranks."""
    names = list(trainings)
    times: dict[str, list[list[float]]] = {name: [] for name in names}
    for turn in range(-warmup, rounds):
        gc.collect()
        for index in range(len(names)):
            name = names[(turn + index) % len(names)]
            seconds = timed_step(trainings[name])
            if turn >= 0:
                times[name].append(seconds)
    stacked = {name: torch.tensor(seconds, dtype=torch.float64) for name, seconds in times.items()}
    for seconds in stacked.values():
        cpu = seconds[:, -1].clone()
        dist.all_reduce(cpu)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        seconds[:, -1] = cpu / dist.get_world_size()
    return stacked


def trace_step(system: str, case: Case, policy: str) -> Trace:
    """What a step of one system copies, sends and holds."""

    def build() -> Any:
        training = SYSTEMS[system](case, POLICIES[policy])
        return training.step

    return traced(build)


def rows_of(times: dict[str, torch.Tensor], traces: dict[str, Trace]) -> list[dict[str, Any]]:
    """A row per system: medians, ratios to FSDP2 and the floor, copies, collectives and memory."""
    rows = []
    base = traces["floor"]
    for name, seconds in times.items():
        total, trace = seconds[:, len(PHASES)], traces.get(name)
        low, high = statistics.quantiles(total.tolist(), n=4)[::2] if len(total) > 1 else (total[0], total[0])
        ratio = lambda other: float((total / times[other][:, len(PHASES)]).median())  # noqa: E731, B023
        rows.append(
            {
                "system": name,
                "ms": 1e3 * float(total.median()),
                "quartiles": f"{1e3 * low:.1f}-{1e3 * high:.1f}",
                **{phase: 1e3 * float(seconds[:, i].median()) for i, phase in enumerate(PHASES)},
                "cpu ms": 1e3 * float(seconds[:, -1].median()),
                "/ FSDP2": ratio("FSDP2"),
                "/ floor": ratio("floor"),
                **_traced_columns(trace, base, traces["FSDP2"]),
            }
        )
    return rows


def _traced_columns(trace: Trace | None, floor: Trace, fsdp2: Trace) -> dict[str, Any]:
    """Copies, collectives and memory; blank for systems that are timed only."""
    if trace is None:
        return dict.fromkeys(("copied MB", "sent MB", "held MB", "peak MB", "peak / FSDP2", "collectives"), "")
    return {
        "copied MB": (sum(trace.copied.values()) - sum(floor.copied.values())) / 1e6,
        "sent MB": sum(trace.collective_nbytes.values()) / 1e6,
        "held MB": trace.start_nbytes / 1e6,
        "peak MB": trace.peak_nbytes / 1e6,
        "peak / FSDP2": trace.peak_nbytes / fsdp2.peak_nbytes,
        "collectives": ", ".join(f"{count} {kind}" for kind, count in trace.collectives.items()),
    }


def measure(rank: int, options: argparse.Namespace) -> dict[tuple[str, str], Any]:
    """By case and policy: rows, and what could not be measured."""
    found = {}
    for name in options.cases:
        for policy in options.policies:
            names = [*USUAL, *(PARTS if options.parts else ())]
            systems = {system: SYSTEMS[system](CASES[name], POLICIES[policy]) for system in names}
            missing = {}
            for peer, make in PEERS.items() if options.peers else ():
                made = make(CASES[name], POLICIES[policy])
                (missing if isinstance(made, str) else systems)[peer] = made
            times = time_steps(systems, options.rounds)
            systems.clear()
            gc.collect()
            traces = {system: trace_step(system, CASES[name], policy) for system in names}
            found[name, policy] = (rows_of(times, traces), missing)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the results to this file too")
    parser.add_argument("--ranks", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=15, help="default: %(default)s")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="default: all")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES), help="default: all")
    parser.add_argument("--parts", action="store_true", help="also with parts of the package switched off")
    parser.add_argument("--peers", action="store_true", help="also Megatron-FSDP and DeepSpeed ZeRO-3")
    add_malloc(parser)
    options = parser.parse_args()
    found = on_ranks(options.ranks, measure, options)
    cases = []
    for (name, policy), (rows, missing) in found.items():
        title = f"{name}, {policy}: {options.ranks} ranks, torch {torch.__version__}, medians of {options.rounds} rounds"
        print_table(title, rows)
        for peer, why in missing.items():
            print(f"{peer}: not measured, {why}")
        cases.append({"case": name, "policy": policy, "systems": rows, "missing": missing})
    write_json(options.json, {"ranks": options.ranks, "rounds": options.rounds, "cases": cases})


if __name__ == "__main__":
    main()
