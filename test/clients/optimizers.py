"""Step optimizers of other packages on shards, and compare the parameters with those of one process.

    python test/clients/optimizers.py                              # all packages that are installed; their rows are replaced
    python test/clients/optimizers.py pytorch_optimizer --only Adan --steps 3 --json out/optimizers.json

All ranks have the same batches. Two equal gradients have an exact mean, so each step has the gradients of one process to the
last bit, and what differs later is the optimizer's. ``fully_shard`` cuts both matrices within a row.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import importlib
import importlib.metadata
import inspect
import io
import json
import pathlib
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

_HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parent / "common"), str(_HERE.parent.parent)]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from common import run_ranks, stop_ranks  # noqa: E402
from run import machine  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.tensor import DTensor, Shard  # noqa: E402
from torch.optim import Optimizer  # noqa: E402

from torch_ragged.fsdp import fully_shard  # noqa: E402

torch.compile = lambda model=None, **_: model or (lambda function: function)  # The same arithmetic, in less time.

_DATA = _HERE.parent.parent / "docs" / "data" / "optimizers.json"
IN, OUT, RANKS, STEPS = 96, 128, 2, 20
IMPLEMENTATIONS = ("default", "Shard(0)")  # The second one is tried if the first one is not equal.
_AT_ONCE, _PATIENCE, _TIMEOUT = 16, datetime.timedelta(seconds=40), 400.0
_CLOSE = 1e-4  # "close" is up to this part of the largest distance that an element of the parameter has moved


Whole = dict[str, torch.Tensor]  # all parameters of a model, by name


class Net(nn.Module):
    """Two matrices, of which Adam-mini knows one name, and vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.norm, self.down = nn.Linear(IN, OUT), nn.LayerNorm(OUT), nn.Linear(OUT, IN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(self.mlp(x).relu()))


def _adam_mini(cls: Any, model: Net) -> Optimizer:
    return cls(model.named_parameters(), dim=IN, n_heads=4, verbose=False)


def _galore(cls: Any, model: Net) -> Optimizer:
    matrices = [model.mlp.weight, model.down.weight]
    others = [param for param in model.parameters() if all(param is not each for each in matrices)]
    low_rank = {"params": matrices, "rank": 8, "update_proj_gap": 5, "scale": 0.25, "proj_type": "std"}
    return cls([{"params": others}, low_rank], lr=1e-3, **({"relative_step": False} if "Adafactor" in cls.__name__ else {}))


def _plain(cls: Any, model: Net) -> Optimizer:
    try:
        return cls(model.parameters())
    except TypeError:
        return cls(model.parameters(), lr=1e-3)


def _lr(cls: Any, model: Net) -> Optimizer:
    return cls(model.parameters(), lr=1e-3)


def _matrices(cls: Any, model: Net) -> Optimizer:
    return cls([model.mlp.weight, model.down.weight])


def _momentum(cls: Any, model: Net) -> Optimizer:
    return cls(model.parameters(), lr=1e-3, momentum=0.9)


def _use_muon(cls: Any, model: Net) -> Optimizer:
    kinds = ((True, [p for p in model.parameters() if p.dim() == 2]), (False, [p for p in model.parameters() if p.dim() < 2]))
    return cls([{"params": params, "use_muon": kind} for kind, params in kinds])


@dataclasses.dataclass(frozen=True)
class Package:
    """A package to import: how its optimizers are made, and those that are left out, by the reason."""

    module: str
    distribution: str
    make: Callable[[Any, Net], Optimizer] = _plain
    made: dict[str, Callable[[Any, Net], Optimizer]] = dataclasses.field(default_factory=dict)
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)

    def names(self) -> list[str]:
        module = importlib.import_module(self.module)
        classes = {name: each for name, each in vars(module).items() if inspect.isclass(each)}
        found = [name for name, each in classes.items() if issubclass(each, Optimizer) and each is not Optimizer]
        return sorted(name for name in found if not name.startswith("_") and name not in self.left_out)


PACKAGES = [
    Package("torch.optim", "torch", made={"Muon": _matrices}),
    Package("torchao.optim", "torchao"),
    Package("heavyball", "heavyball"),
    Package("pytorch_optimizer", "pytorch_optimizer", made=dict.fromkeys(("AdaGO", "AdaMuon", "Muon", "NorMuon"), _use_muon)),
    Package("optimi", "torch-optimi", make=_lr),
    Package("schedulefree", "schedulefree"),
    Package("lion_pytorch", "lion-pytorch"),
    Package("prodigyopt", "prodigyopt"),
    Package("adam_mini", "adam-mini", make=_adam_mini),
    Package("came_pytorch", "came-pytorch", make=_lr),
    Package("galore_torch", "galore-torch", make=_galore),
    Package("bitsandbytes.optim", "bitsandbytes", make=_lr, made=dict.fromkeys(("LARS", "SGD", "SGD8bit"), _momentum)),
]


def train(package: Package, name: str, implementation: str, steps: int) -> tuple[Whole, list[str]]:
    """The parameters after ``steps``, by name, and what our package has warned of."""
    torch.manual_seed(0)
    model = Net()
    _shard(model, implementation)
    if not steps:
        return {key: param.detach().clone() for key, param in model.named_parameters()}, []
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("always")
        make = package.made.get(name, package.make)
        optimizer = make(getattr(importlib.import_module(package.module), name), model)
        getattr(optimizer, "train", lambda: None)()
        for step in range(steps):
            x = torch.randn(16, IN, generator=torch.Generator().manual_seed(step))
            torch.manual_seed(step)  # Of optimizers that draw: all ranks draw alike.

            def closure(x: torch.Tensor = x) -> torch.Tensor:
                optimizer.zero_grad()
                loss = (model(x) - x.roll(1, 1)).square().mean()
                loss.backward()
                return loss

            if isinstance(optimizer, torch.optim.LBFGS) or "Closure" in name:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
    whole = {
        key: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone().cpu() for key, p in model.named_parameters()
    }
    return whole, [str(each.message) for each in caught if str(each.message).startswith(f"{type(optimizer).__name__} ")]


def _shard(model: Net, implementation: str) -> None:
    if implementation == "one process":
        return
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    options: Any = {"shard_placement_fn": lambda _: Shard(0)} if implementation == "Shard(0)" else {}
    for layer in (model.mlp, model.norm, model.down):
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    if implementation == "default":
        sizes = [layer.weight.to_local().numel() for layer in (model.mlp, model.down)]
        assert all(size % layer.weight.shape[1] for size, layer in zip(sizes, (model.mlp, model.down))), sizes


def attempts(module: str, wanted: dict[str, Whole], implementation: str, steps: int) -> list[tuple[str, list[str]]]:
    """On a rank: for each optimizer, its result and what our package has warned of. Ends early if ranks may be out of step."""
    package = next(each for each in PACKAGES if each.module == module)
    store, rank, answers = dist.distributed_c10d._get_default_store(), dist.get_rank(), []
    start = train(package, "", "one process", 0)[0]
    for number, (name, expected) in enumerate(wanted.items()):
        try:
            got, warned = train(package, name, implementation, steps)
            answer = (_difference(got, expected, start), warned)
        except Exception as error:
            answer = (f"refused: {type(error).__name__}: {' '.join(str(error).split())}", [])
        # By the store: if one rank alone has raised, the other one is in a collective that never ends.
        store.set(f"{number}/{rank}", "refused" if answer[0].startswith("refused") else "ends")
        try:
            store.wait([f"{number}/{other}" for other in range(RANKS)], _PATIENCE)
        except dist.DistStoreError:
            return [*answers, (f"hangs: on the other rank. This one: {answer[0]}", answer[1])]
        answers.append(answer)
        if len({store.get(f"{number}/{other}") for other in range(RANKS)}) > 1:
            break
    return answers


def compare(package: Package, names: list[str], steps: int) -> Iterator[dict[str, Any]]:
    """A row for each optimizer, with a result for each implementation, or that of one process if it fails there."""
    version = f"{package.distribution} {importlib.metadata.version(package.distribution)}"
    rows: dict[str, dict[str, Any]] = {}
    expected: dict[str, Whole] = {}
    for name in names:
        rows[name] = {"package": version, "optimizer": name, "torch": torch.__version__, "steps": steps}
        try:
            expected[name] = train(package, name, "one process", steps)[0]
        except Exception as error:
            rows[name]["one process"] = f"{type(error).__name__}: {' '.join(str(error).split())}"
    for implementation in IMPLEMENTATIONS:
        left = list(expected)
        if implementation != IMPLEMENTATIONS[0]:  # The way out, of those that need it.
            left = [name for name in left if not rows[name][IMPLEMENTATIONS[0]].startswith("equal")]
        while left:
            found: list[tuple[str, list[str]]] = []
            try:
                args = (package.module, {name: expected[name] for name in left[:_AT_ONCE]}, implementation, steps)
                answers = run_ranks(RANKS, attempts, *args, timeout=_TIMEOUT)
                found = [_of_ranks(each) for each in zip(*answers)]
            except AssertionError as error:
                stop_ranks()
                lines = [line for line in str(error).splitlines() if line.strip() and not line.startswith(" ")]
                found = [(f"hangs: {lines[-1] if lines else ''}", [])]
            if any("hangs" in each for each, _ in found) or len(found) < min(len(left), _AT_ONCE):
                stop_ranks()
            for name, (result, warned) in zip(left, found):
                rows[name][implementation] = result[:200]
                if warned:
                    rows[name][f"warning, {implementation}"] = warned[0]
                print(package.module, name, implementation, result[:260], warned[:1], flush=True)
            left = left[len(found) :]
    yield from rows.values()


def _of_ranks(answers: tuple[tuple[str, list[str]], ...]) -> tuple[str, list[str]]:
    """One result of all ranks: the worst."""
    order = ["equal", "close", "differs", "refused", "hangs"]
    ranked = sorted(answers, key=lambda answer: order.index(answer[0].split(":")[0]))
    alone = ranked[-1][0].startswith("refused") and not ranked[0][0].startswith("refused")
    return (f"refused on one rank{ranked[-1][0][7:]}" if alone else ranked[-1][0]), [
        text for _, each in answers for text in each
    ]


def _difference(got: Whole, expected: Whole, start: Whole) -> str:
    shares = {}
    for key, want in expected.items():
        moved = (want - start[key]).abs().max().item()
        if not torch.equal(got[key].nan_to_num(), want.nan_to_num()):
            shares[key] = (got[key] - want).abs().max().item() / max(moved, 1e-12)
    if not shares:
        return "equal"
    key = max(shares, key=shares.__getitem__)
    return f"{'close' if shares[key] <= _CLOSE else 'differs'}: {shares[key]:.0e} of {key}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="*", help="modules; all if left out")
    parser.add_argument("--only", default="", help="optimizers with this text in their names")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--json", default=str(_DATA), help="a file of rows, in which those of the same optimizer are replaced")
    arguments = parser.parse_args()
    for package in PACKAGES:
        if arguments.packages and package.module not in arguments.packages:
            continue
        try:
            names = [name for name in package.names() if arguments.only in name]
        except ImportError as error:
            print(f"{package.distribution} is left out: {error}")
            continue
        write(pathlib.Path(arguments.json), compare(package, names, arguments.steps))


def write(path: pathlib.Path, rows: Iterator[dict[str, Any]]) -> None:
    """Put ``rows`` into the file, in place of those of the same optimizers."""
    found = json.loads(path.read_text())["rows"] if path.exists() else []
    by_name = {(row["package"].split()[0], row["optimizer"]): row for row in [*found, *rows]}
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n  ".join(json.dumps(by_name[key]) for key in sorted(by_name))
    path.write_text(f'{{\n "machine": {json.dumps(machine())},\n "rows": [\n  {lines}\n ]\n}}\n')


if __name__ == "__main__":
    main()
