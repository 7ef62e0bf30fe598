"""One device's numbers: what a draw costs beside torch's own, and whether training then has one device's losses.

    python -m benchmarks.parts.random_numbers draw [--json PATH] [--rounds 9] [--numel 4194304]
    python -m benchmarks.parts.random_numbers train [--json PATH] [--ranks 2 4 8] [--steps 20]

``draw`` needs no other process: it is rank 1 of a fake group. The peer is torch's own op on a plain tensor of the
whole size, which is what torch does for a Replicate DTensor. Both are timed by turns. Memory is what a draw holds beside the
local tensor, as torch's allocator counts it.

``train`` starts gloo processes and trains a small Llama-like model in float32 with tensor parallelism, by DTensors alone:
with random initialization and no dropout, with equal weights and dropout 0.1, and with both. It shows the largest difference
of a loss to one process, under single_device and as torch draws. The rows of "nothing random" show what the order of sums does.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.common.measure import interleaved, on_ranks, print_table, write_json
from benchmarks.common.peak import peak_of
from torch_ragged import RaggedShard
from torch_ragged.random import single_device

OPS = {
    "normal_": lambda x: x.normal_(0.0, 0.02),
    "uniform_": lambda x: x.uniform_(-1, 1),
    "exponential_": lambda x: x.exponential_(),
    "bernoulli_": lambda x: x.bernoulli_(0.9),
    "random_": lambda x: x.random_(1000),
}


def measure_draws(numel: int, rounds: int) -> list[dict[str, Any]]:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=8)
    mesh, columns = init_device_mesh("cpu", (8,)), 1024
    layouts = {"Shard(0)": Shard(0), "Shard(1)": Shard(1), "ragged": RaggedShard((0,), (3, 5, 1, 1, 2, 2, 1, 1))}
    rows = []
    single_device()
    for name, op in OPS.items():
        for dtype in (torch.float32, torch.bfloat16):
            whole = torch.empty(numel // columns, columns, dtype=dtype)
            cases = {"torch": lambda op=op, whole=whole: op(whole)}
            for layout, placement in layouts.items():
                x = distribute_tensor(whole, mesh, [placement], src_data_rank=None)
                cases[layout] = lambda op=op, x=x: op(x)
            times = interleaved(cases, rounds, target=1.0)
            row: dict[str, Any] = {"op": f"{name} {str(dtype).removeprefix('torch.')}"}
            row["torch ns"] = 1e3 * statistics.median(times["torch"]) / numel
            for layout in layouts:
                row[layout] = statistics.median(a / b for a, b in zip(times[layout], times["torch"]))
            row["KiB beside"] = max(peak_of(cases[layout]) for layout in layouts) / 1024
            rows.append(row)
    single_device(False)
    dist.destroy_process_group()
    return rows


class Block(nn.Module):
    """Attention of 8 heads and a gated MLP, with dropout on probabilities, on hidden activations and on residuals."""

    def __init__(self, width: int, p: float) -> None:
        super().__init__()
        self.p, self.first, self.second = p, nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        query, key, value = (layer(h).unflatten(-1, (8, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        scores = (query @ key.transpose(-1, -2)) * query.shape[-1] ** -0.5
        scores = F.dropout(scores.softmax(-1), self.p)
        x = x + F.dropout(_whole(self.out((scores @ value).transpose(1, 2).flatten(-2))), self.p)
        h = self.second(x)
        return x + F.dropout(_whole(self.down(F.dropout(F.silu(self.gate(h)) * self.up(h), self.p))), self.p)


def _whole(x: torch.Tensor) -> torch.Tensor:
    """A sum over ranks, reduced: torch multiplies Partials by masks, which rounds otherwise."""
    return x.redistribute(placements=[Replicate()]) if isinstance(x, DTensor) else x


def build(mesh: DeviceMesh | None, p: float, draws: bool) -> nn.Sequential:
    """The model with weights of seed 0: drawn on DTensors, or distributed."""
    blocks = [Block(64, p) for _ in range(2)]
    model = nn.Sequential(nn.Embedding(64, 64), *blocks, nn.RMSNorm(64), nn.Linear(64, 64, bias=False))
    for name, parameter in list(model.named_parameters()):
        path, _, key = name.rpartition(".")
        cut = next(
            (dim for dim, names in ((0, "query key value gate up"), (1, "out down")) if path.split(".")[-1] in names), None
        )
        placement = Replicate() if cut is None or path.isdigit() else Shard(cut)
        if mesh is not None:
            parameter = nn.Parameter(distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None))
            setattr(model.get_submodule(path), key, parameter)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                weight = torch.empty(parameter.shape) if mesh is not None and not draws else parameter
                nn.init.normal_(weight, std=0.08)
                if weight is not parameter:
                    parameter.copy_(distribute_tensor(weight, mesh, parameter.placements, src_data_rank=None))  # type: ignore
    return model


def losses(mesh: DeviceMesh | None, steps: int, p: float, draws: bool) -> list[float]:
    model = build(mesh, p, draws)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    torch.manual_seed(1)
    found = []
    for step in range(steps):
        tokens = torch.randint(0, 64, (4, 17), generator=torch.Generator().manual_seed(step))
        tokens = tokens.cumsum(1) % 64
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].flatten()
        if mesh is not None:
            inputs, targets = (distribute_tensor(t, mesh, [Replicate()], src_data_rank=None) for t in (inputs, targets))
        logits = _whole(model(inputs))
        loss = F.cross_entropy(logits.flatten(0, 1), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.full_tensor().item() if isinstance(loss, DTensor) else loss.item())
    return found


def measure_training(rank: int, options: Any) -> list[dict[str, Any]]:
    mesh, rows = init_device_mesh("cpu", (dist.get_world_size(),)), []
    cases = {"nothing random": (0.0, False), "random init": (0.0, True), "dropout": (0.1, False), "both": (0.1, True)}
    for name, (p, draws) in cases.items():
        want = losses(None, options.steps, p, draws)
        row: dict[str, Any] = {"TP": mesh.size(), "case": name, "loss": f"{want[0]:.3f} -> {want[-1]:.3f}"}
        for column, mode in (("single_device", True), ("DTensor alone", False)):
            with single_device(mode):
                got = losses(mesh, options.steps, p, draws)
            row[column] = f"{max(abs(a - b) for a, b in zip(got, want)):.1e}"
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("what", choices=("draw", "train"))
    add("--json", help="write the results to this file")
    add("--rounds", type=int, default=9, help="default: %(default)s")
    add("--numel", type=int, default=2**22, help="elements of a draw; default: %(default)s")
    add("--ranks", type=int, nargs="+", default=[2, 4, 8], help="default: 2 4 8")
    add("--steps", type=int, default=20, help="default: %(default)s")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.what == "draw":
        rows = measure_draws(options.numel, options.rounds)
        print_table(f"Time of a draw of {options.numel:,} elements relative to torch's own", rows)
    else:
        rows = [row for ranks in options.ranks for row in on_ranks(ranks, measure_training, options)]
        print_table(f"Largest difference of a loss to one process in {options.steps} steps, float32", rows)
    write_json(options.json, {"what": options.what, "table": rows})


if __name__ == "__main__":
    main()
