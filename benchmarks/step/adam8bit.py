"""Loss curves of 8-bit Adam where many gradients are zero, beside float32 AdamW and torchao's 8-bit AdamW.

    python -m benchmarks.step.adam8bit --steps 2000 --out out/adam8bit

Two tasks, in one process. "zipf": token pairs whose first token follows Zipf's law, so that most rows of the embedding and of
the head have no gradient in most steps. "idle experts": the same with 16 experts, one per token, of which most get no token in
most steps. Blocks mix frequent and rare rows: there, small second moments round down. All runs of a task see the same batches
from the same initial weights. torchao is optional (``pip install torchao``).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.common.measure import print_table, write_json
from torch_ragged.optim import AdamW8bit

VOCABULARY, WIDTH, EXPERTS, BATCH, WINDOW = 1024, 64, 16, 256, 50
Losses = dict[str, list[float]]


class Zipf(nn.Module):
    """Predicts the second token of a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def hidden(self, tokens: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.relu(self.up(x)))  # type: ignore[no-any-return]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        return self.head(x + self.hidden(tokens, x))  # type: ignore[no-any-return]


class IdleExperts(Zipf):
    """Each token has its expert. Zipf's law holds for experts, too, so that most of them are idle in most steps."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH**0.5)
        self.register_buffer("expert_of", _ranks_of_zipf(VOCABULARY, EXPERTS, 2.0, torch.Generator().manual_seed(3)))

    def hidden(self, tokens: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        chosen = self.expert_of[tokens]  # type: ignore[index]
        of_experts = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            mine = chosen == expert
            of_experts[mine] = F.relu(x[mine] @ self.experts[expert])
        return super().hidden(tokens, of_experts)


def _ranks_of_zipf(count: int, classes: int, power: float, generator: torch.Generator) -> torch.Tensor:
    """``count`` draws of classes; class ``i`` has the weight ``(i + 1) ** -power``."""
    return torch.multinomial(torch.arange(1.0, classes + 1) ** -power, count, replacement=True, generator=generator)


class Pairs:
    """Batches of pairs: half of the second tokens follow from the first, the others are drawn like the first."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        fixed = torch.Generator().manual_seed(7)
        # The token of each rank: frequent ones lie beside rare ones, as in a vocabulary.
        self.tokens = torch.randperm(VOCABULARY, generator=fixed)
        self.next = torch.randperm(VOCABULARY, generator=fixed)

    def draw(self, count: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
        first, other = (self.tokens[_ranks_of_zipf(count, VOCABULARY, 1.2, self.generator)] for _ in range(2))
        follows = torch.rand(count, generator=self.generator) < 0.5
        return first, torch.where(follows, self.next[first], other)


def optimizers(lr: float) -> dict[str, Callable[[Any], torch.optim.Optimizer]]:
    made: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "AdamW, float32": lambda params: torch.optim.AdamW(params, lr=lr),
        "AdamW8bit": lambda params: AdamW8bit(params, lr=lr, weight_decay=0.01),
        'AdamW8bit, code="linear"': lambda params: AdamW8bit(params, lr=lr, weight_decay=0.01, code="linear"),
    }
    try:
        from torchao.optim import AdamW8bit as OfTorchao
    except ImportError:
        print("torchao cannot be imported: its curve is left out")
    else:
        made["torchao's AdamW8bit"] = lambda params: OfTorchao(params, lr=lr)
    return made


def train(
    task: type[Zipf], make: Callable[[Any], torch.optim.Optimizer], steps: int, lr: float
) -> tuple[list[float], float, float]:
    """The loss of each step, the held-out loss, and the largest change of a weight in one step, in learning rates."""
    torch.manual_seed(0)
    model, data, losses, largest = task(), Pairs(1), [], 0.0
    params = list(model.parameters())
    optimizer = make(params)
    for _ in range(steps):
        first, second = data.draw()
        loss = F.cross_entropy(model(first), second)
        loss.backward()
        before = [param.detach().clone() for param in params]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        largest = max(largest, *(float((param.detach() - old).abs().max()) / lr for param, old in zip(params, before)))
    with torch.no_grad():
        first, second = Pairs(2).draw(64 * BATCH)
        held_out = F.cross_entropy(model(first), second).item()
    return losses, held_out, largest


def smooth(curve: list[float]) -> list[float]:
    """Means of ``WINDOW`` steps."""
    return torch.tensor(curve, dtype=torch.float64).unfold(0, WINDOW, 1).mean(1).tolist()  # type: ignore[no-any-return]


def plot(path: Path, curves: dict[str, Losses]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(curves), figsize=(11, 4.2))
    for axis, (task, of_task) in zip(axes, curves.items()):
        for index, (name, curve) in enumerate(of_task.items()):
            wide = {"linewidth": 4, "alpha": 0.35} if index == 0 else {"linewidth": 1}
            axis.plot(range(WINDOW, len(curve) + 1), smooth(curve), label=name, **wide)
        axis.set(xlabel="step", ylabel=f"loss (nats per token), mean of {WINDOW} steps", title=task)
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=110, bbox_inches="tight")
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate of all optimizers (default: %(default)s)")
    parser.add_argument(
        "--out", type=Path, default=Path("out/adam8bit"), help="folder of picture and numbers (default: %(default)s)"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    curves: dict[str, Losses] = {}
    rows: list[dict[str, Any]] = []
    for task, model in (("Zipf tokens", Zipf), ("MoE with idle experts", IdleExperts)):
        of_task = curves.setdefault(task, {})
        for name, make in optimizers(args.lr).items():
            start = time.perf_counter()
            of_task[name], held_out, largest = train(model, make, args.steps, args.lr)
            exact, mine = (torch.tensor(smooth(curve)) for curve in (next(iter(of_task.values())), of_task[name]))
            rows.append(
                {
                    "task": task,
                    "optimizer": name,
                    f"last {WINDOW} steps": f"{mine[-1]:.4f}",
                    "held out": f"{held_out:.4f}",
                    "largest gap to float32": f"{(mine - exact).abs().max():.4f}",
                    "largest step, in lr": f"{largest:.2f}",
                    "seconds": f"{time.perf_counter() - start:.0f}",
                }
            )
    print_table(f"{args.steps} steps, lr {args.lr}, torch {torch.__version__}", rows)
    plot(args.out / "adam8bit.png", curves)
    write_json(str(args.out / "adam8bit.json"), {"steps": args.steps, "lr": args.lr, "table": rows, "curves": curves})


if __name__ == "__main__":
    main()
