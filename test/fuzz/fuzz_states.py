"""Pairs of ways in which states lie and move: sources, targets, numbers of ranks, checkpoints and transfers.

A run trains a model on some ranks, moves its state to another model, on perhaps other ranks, and trains that one. What moves is
equal bit by bit; what is trained is compared with one process.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fuzz_cover import Cover, Pair, Rule, find_rule
from fuzz_training import Mismatch, full, largest, shared_folder
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from torch_ragged import checkpoint, fsdp, transfer
from torch_ragged.fsdp import fully_shard
from torch_ragged.optim import AdamW8bit, Muon, matrix_groups, muon_policy

__all__ = ["COVER", "StateMove", "random_case", "size_of"]

_KINDS = ("ragged", "rows", "blocks", "Shard(1)", "ZERO1", "weights", "hsdp", "tp", "muon_policy")
_KINDS += ("CPU offload", "FSDP2", "plain")
_ON_DISK = ("save", "async thread", "DCP")
FEATURES: dict[str, tuple[str, ...]] = {
    "source": _KINDS,
    "target": _KINDS,
    "ranks": ("4 to 4", "4 to 3", "3 to 4", "4 to 2", "2 to 4", "4 to 1", "1 to 4"),
    "way": (*_ON_DISK, "transfer", "delta", "stream"),
    "optimizer": ("none", "SGD", "AdamW", "Muon", "AdamW8bit"),
    "dtypes": ("float64", "float32 to bfloat16", "bfloat16 to float32"),
    "tensors": ("plain", "tied", "frozen", "buffers", "empty"),
}
_FOUR = ("hsdp", "tp")
_made: dict[Any, Any] = {}
REFUSED: list[Rule] = [
    (
        ("way", ("save", "async thread")),
        ("dtypes", FEATURES["dtypes"][1:]),
        "the checkpoint does not fit this model",
    ),
]
LEFT_OUT: list[Rule] = [
    (("target", "FSDP2"), ("way", "stream"), "FSDP2 loads no whole tensors"),
    (("source", "FSDP2"), ("tensors", "empty"), "torch's FSDP2 has no empty parameters"),
    (("target", "FSDP2"), ("tensors", "empty"), "torch's FSDP2 has no empty parameters"),
    (("source", _FOUR), ("ranks", ("3 to 4", "2 to 4", "1 to 4")), "it has two mesh dimensions"),
    (("target", _FOUR), ("ranks", ("4 to 3", "4 to 2", "4 to 1")), "it has two mesh dimensions"),
    (("source", "weights"), ("ranks", "1 to 4"), "there is one rank"),
    (("target", "weights"), ("ranks", "4 to 1"), "there is one rank"),
    (("way", ("transfer", "delta", "stream")), ("optimizer", FEATURES["optimizer"][1:]), "it moves weights"),
    (("way", "stream"), ("ranks", ("3 to 4", "2 to 4", "1 to 4")), "ranks behind the source get nothing"),
    (("way", "DCP"), ("dtypes", FEATURES["dtypes"][1:]), "torch's own casts"),
    (("optimizer", ("Muon", "AdamW8bit")), ("source", "FSDP2"), "our optimizers, torch's placements: in other tests"),
    (("optimizer", ("Muon", "AdamW8bit")), ("target", "FSDP2"), "our optimizers, torch's placements: in other tests"),
    (("optimizer", FEATURES["optimizer"][1:]), ("dtypes", FEATURES["dtypes"][1:]), "checkpoints refuse the cast"),
]


def why_not(pair: Pair) -> tuple[str, str] | None:
    """As :class:`Cover` asks it."""
    for kind, rules in (("refused", REFUSED), ("left out", LEFT_OUT)):
        if why := find_rule(rules, pair):
            return kind, why
    return None


COVER = Cover(FEATURES, why_not)


def size_of(seed: int) -> int:
    """All runs have 4 ranks; some of these have no part in the source or in the target."""
    return 4


def random_case(seed: int) -> dict[str, Any]:
    """Run number ``seed``: see :meth:`Cover.case`."""
    return COVER.case(seed)


class Tiny(nn.Module):
    """A few parameters of uneven shapes."""

    def __init__(self, tensors: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10, dtype=dtype), nn.Linear(10, 6, bias=False, dtype=dtype)
        self.head = nn.Linear(6, 6, bias=False, dtype=dtype)
        if tensors == "tied":
            self.last = nn.Linear(6, 6, bias=False, dtype=dtype)
            self.last.weight = self.head.weight
        elif tensors == "frozen":
            self.up.weight.requires_grad_(False)
        elif tensors == "buffers":
            self.register_buffer("seen", torch.zeros(7, dtype=torch.int64))
            self.register_buffer("mean", torch.rand(6, dtype=torch.float64).to(dtype))
        elif tensors == "empty":
            self.nothing = nn.Parameter(torch.empty(0, 6, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.head(x + self.down(torch.tanh(self.up(x))))
        if hasattr(self, "last"):
            x = self.last(x)
        if hasattr(self, "nothing"):
            x = x + self.nothing.sum()
        if hasattr(self, "seen"):
            self.seen += 1
            x = x * self.mean
        return x


def made_once(what: str, count: int) -> Any:
    """A group or a mesh of the first ``count`` ranks, made once per process group. All ranks ask in one order.

    Torch keeps what ops do on a mesh. Of two equal meshes with groups of their own, ranks could take different ones.
    """
    key = (what, count, id(dist.group.WORLD))
    if key not in _made:
        if what == "mesh":
            _made[key] = DeviceMesh("cpu", torch.arange(count), mesh_dim_names=("a",))
        elif what == "2-D mesh":
            _made[key] = DeviceMesh("cpu", torch.arange(count).view(2, 2), mesh_dim_names=("a", "b"))
        else:
            _made[key] = dist.new_group(list(range(count)), backend="gloo")
    return _made[key]


class StateMove:
    """One run. :meth:`run` raises a :class:`Mismatch` if a tensor has changed on its way."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.case, self.closes = case, contextlib.ExitStack()
        self.counts = [int(count) for count in case["ranks"].split(" to ")]
        names = case["dtypes"].split(" to ")
        self.dtypes = [getattr(torch, names[0]), getattr(torch, names[-1])]
        self.groups = [made_once("group", count) for count in self.counts]
        self.background = made_once("background", self.counts[0])

    def has(self, side: int) -> bool:
        return dist.get_rank() < self.counts[side]

    def build(self, side: int, seed: int) -> tuple[nn.Module, Any]:
        """The model of the source (0) or of the target (1), and its optimizer."""
        kind, count, case = self.case[("source", "target")[side]], self.counts[side], self.case
        torch.manual_seed(seed)
        model = Tiny(case["tensors"], self.dtypes[side])
        mesh = made_once("2-D mesh" if kind in _FOUR else "mesh", count)
        if not self.has(side):
            return model, None
        if kind == "tp":
            parallelize_module(model, mesh["b"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            fully_shard(model, mesh=mesh["a"])
        elif kind == "FSDP2":
            torch_fully_shard(model, mesh=mesh)
        elif kind != "plain":
            options: dict[str, Any] = {
                "rows": {"orig_param_policy": lambda name, param: fsdp.rows(2) if param.ndim > 1 else None},
                "blocks": {"orig_param_policy": lambda name, param: fsdp.blocks(2, 3) if param.ndim > 1 else None},
                "Shard(1)": {"shard_placement_fn": lambda param: Shard(1) if param.ndim > 1 else None},
                "ZERO1": {"placements": fsdp.ZERO1},
                "weights": {"weights": [3] + [1] * (count - 1)},
                "muon_policy": {"orig_param_policy": muon_policy()},
                "CPU offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
            }.get(kind, {})
            fully_shard(model, mesh=mesh, **options)
        return model, self.optimizer(model)

    def optimizer(self, model: nn.Module) -> Any:
        kind, params = self.case["optimizer"], [param for param in model.parameters() if param.requires_grad]
        if kind == "SGD":
            return torch.optim.SGD(params, lr=0.05, momentum=0.9)
        if kind == "AdamW":
            return torch.optim.AdamW(params, lr=0.01)
        if kind == "AdamW8bit":
            return AdamW8bit(params, lr=0.01)
        if kind == "Muon":
            groups = matrix_groups(model, lr=0.01)
            for group in groups:
                group["params"] = [param for param in group["params"] if param.requires_grad and param.numel()]
            return Muon([group for group in groups if group["params"]], lr=0.02)
        return None

    def train(self, model: nn.Module, optimizer: Any, number: int) -> None:
        """One step on the same data on all ranks, so that the number of ranks has no part in it."""
        x = torch.randn(3, 6, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
        model(x.to(next(model.parameters()).dtype)).double().square().mean().backward()
        if optimizer is not None:
            optimizer.step()
        model.zero_grad()

    def run(self) -> str:
        """Raises if something differs."""
        with self.closes:
            try:
                self.move()
            except Exception as error:
                text = " ".join(str(error).split())
                if not any(wanted in text for wanted in self.case.get("refused", ())):
                    raise
            else:
                if "refused" in self.case:
                    raise Mismatch(f"nothing was raised, expected {self.case['refused']!r}")
        return ""  # Ranks have different parts of it, and compare all that they have.

    def move(self) -> None:
        case = self.case
        source, first = self.build(0, 1)
        torch.manual_seed(1)
        plain = Tiny(case["tensors"], self.dtypes[0])
        reference = self.optimizer(plain)
        for number in range(2):
            if self.has(0):
                self.train(source, first, number)
            self.train(plain, reference, number)
        if self.has(0):
            self.compare(source, plain, "after training", 1.0)  # From here on, the plain model has the source's values.
        self.agree_on(plain)
        target, second = self.build(1, 2)
        getattr(self, "by_" + case["way"].partition(" ")[0].lower())(source, first, target, second)
        if case["way"] == "delta":
            plain.up.bias.data.add_(1)
        if self.has(0):
            self.compare(source, plain, "after the move", 0.0)
        if not self.has(1):
            return
        plain = plain.to(self.dtypes[1])
        self.compare(target, plain, "in the target", 0.0)
        if reference is not None:
            self.train(target, second, 5)
            self.train(plain, reference, 5)
            self.compare(target, plain, "after a step of the target", 1.0)

    def agree_on(self, plain: nn.Module) -> None:
        for tensor in plain.state_dict().values():
            dist.broadcast(tensor, 0)

    # -- ways ----------------------------------------------------------------------------------------------------------------

    def by_save(self, source: Any, first: Any, target: Any, second: Any, in_background: bool = False) -> None:
        folder = shared_folder(self.closes)
        if self.has(0):
            state = checkpoint.TrainState(source, first)
            if in_background:
                checkpoint.async_save(folder, state, process_group=self.background).result()
            else:
                checkpoint.save(folder, state, process_group=self.groups[0])
        dist.barrier()
        if self.has(1):
            checkpoint.load(folder, checkpoint.TrainState(target, second), process_group=self.groups[1])

    def by_async(self, *sides: Any) -> None:
        self.by_save(*sides, in_background=True)

    def by_dcp(self, source: Any, first: Any, target: Any, second: Any) -> None:
        folder = shared_folder(self.closes)
        for side, model, optimizer in ((0, source, first), (1, target, second)):
            if self.has(side):
                given, group = [] if optimizer is None else [optimizer], self.groups[side]
                model_state, optimizer_state = get_state_dict(model, given)
                states = {"model": model_state, "optimizer": optimizer_state}
                if side == 0:
                    dcp.save(states, checkpoint_id=folder, process_group=group)
                else:
                    dcp.load(states, checkpoint_id=folder, process_group=group)
                    set_state_dict(model, given, model_state_dict=model_state, optim_state_dict=optimizer_state)
            dist.barrier()

    def by_transfer(self, source: Any, first: Any, target: Any, second: Any, runs: tuple[Any, ...] = (None,)) -> None:
        sides = source if self.has(0) else None, target if self.has(1) else None
        plan = transfer.plan(*sides)
        for number, delta in enumerate(runs):
            if number and self.has(0):  # The rest has not changed, and is not sent again.
                with torch.no_grad():
                    source.up.bias.add_(1)
            plan.run(*sides, delta=delta)

    def by_delta(self, *sides: Any) -> None:
        self.by_transfer(*sides, runs=("checksum", "checksum"))

    def by_stream(self, source: Any, first: Any, target: Any, second: Any) -> None:
        if self.has(0):
            names = {name: tensor.clone() for name, tensor in transfer.stream(source, 1 << 20)}
            if self.has(1):
                dtype = self.dtypes[1]
                target.load_state_dict(
                    {name: each.to(dtype) if each.is_floating_point() else each for name, each in names.items()}
                )

    # -- comparisons ---------------------------------------------------------------------------------------------------------

    def compare(self, model: nn.Module, plain: nn.Module, when: str, scale: float) -> None:
        """All tensors of both; roundings are legal if ``scale`` is not 0. The plain model goes on with the other's values."""
        found, expected = model.state_dict(), plain.state_dict()
        if list(found) != list(expected):
            raise Mismatch(f"{when}: names {list(found)}, expected {list(expected)}")
        for name, wanted in expected.items():
            value = full(found[name].detach())
            if name == "seen" and scale:  # A step of the source, or of the plain model only, counts here.
                wanted.copy_(value)
            error, limit = largest(value.double() - wanted.double()), 0.0
            if value.is_floating_point():
                limit = 64 * torch.finfo(value.dtype).eps * scale * max(1.0, largest(wanted))
            if value.shape != wanted.shape or value.dtype != wanted.dtype or not error <= limit:
                raise Mismatch(f"{name} {when} differs by {error:.3g}, limit {limit:.3g}\n{value}\nexpected\n{wanted}")
            wanted.copy_(value)
