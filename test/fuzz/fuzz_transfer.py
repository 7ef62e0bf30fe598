"""Random transfers: tensors and modules move between random meshes, are written in random ways, and move again.

Meshes have any ranks in any order. Sources may be Partial or have any strides, targets may be of inference mode. Modules may
have tensor parallelism. After each run, with or without ``delta``, every target must be right bit by bit: values are small
integers.
"""

from __future__ import annotations

import hashlib
import math
import random
from typing import Any

import torch
import torch.distributed as dist
from fuzz_ops import bytes_of
from oracle import contributions, local_of, random_placement, reduced
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from torch_ragged import StridedRaggedShard, transfer
from torch_ragged.fsdp import fully_shard
from torch_ragged.tensor.placement_types import normalize_placements

__all__ = ["random_case", "run_case", "size_of"]

RANKS = (1, 2, 2, 3, 4, 4, 4, 4, 6)
SIZES = (1, 2, 3, 4, 5, 8)
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "int64": torch.int64}
MODULES = ("fsdp", "tp", "tp and fsdp")
WRITES = ("none", "none", "operator", "local", "inference", "target", "replace")
_meshes: dict[Any, DeviceMesh] = {}


def size_of(seed: int) -> int:
    """How many ranks a case needs."""
    return random.Random(seed).choice(RANKS)


def random_case(seed: int) -> dict[str, Any]:
    """A transfer as names and numbers."""
    rng = random.Random(seed)
    size = rng.choice(RANKS)
    case: dict[str, Any] = {"seed": seed, "size": size, "max_bytes": rng.choice((1 << 20, 1 << 20, 2000, 600))}
    runs = [
        {"delta": rng.choice((None, "checksum", "baseline")), "async": rng.random() < 0.2} for _ in range(rng.choice((1, 2, 3)))
    ]
    case["runs"] = [{**run, "write": rng.choice(WRITES)} for run in runs]
    if size == 4 and rng.random() < 0.2:
        return {**case, "kind": "modules", "source": rng.choice(MODULES), "target": rng.choice(MODULES)}
    case |= {"kind": "tensors", "meshes": [_random_mesh(rng, size) for _ in range(2)], "tensors": []}
    case["inference"], case["pairs"] = rng.random() < 0.2, rng.random() < 0.2
    for _ in range(rng.choice((1, 2, 3))):
        shape = tuple(0 if rng.random() < 0.03 else rng.choice(SIZES) for _ in range(rng.choice((0, 1, 2, 2, 3))))
        dtype = rng.choice(list(DTYPES))
        source = _random_placements(rng, shape, case["meshes"][0][1], dtype)
        target = _random_placements(rng, shape, case["meshes"][1][1], None)
        strided = rng.random() < 0.3
        case["tensors"].append({"shape": shape, "dtype": dtype, "source": source, "target": target, "strided": strided})
    return case


def _random_mesh(rng: random.Random, size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ranks, in any order, and a shape. There are few orders, since each mesh has process groups."""
    shapes = [shape for shape in ((1,), (2,), (3,), (4,), (6,), (2, 2), (2, 3), (1, 4)) if math.prod(shape) <= size]
    shape = rng.choice(shapes)
    ranks = random.Random(rng.randrange(4)).sample(range(size), math.prod(shape))
    return tuple(ranks if rng.random() < 0.6 else sorted(ranks)), shape


def _random_placements(rng: random.Random, shape: tuple[int, ...], mesh: tuple[int, ...], dtype: str | None) -> tuple[Any, ...]:
    """Placements that have a meaning; Partial only if ``dtype`` is given, and if its reduction is exact."""
    for _ in range(50):
        chosen = [random_placement(rng, shape, mesh, dim, StridedRaggedShard) for dim in range(len(mesh))]
        operations = {p.reduce_op for p in chosen if isinstance(p, Partial)}
        is_exact = "avg" not in operations or dtype in ("float32", "float64")
        if dtype is None or len(operations) > 1 or not is_exact:
            chosen = [Replicate() if isinstance(p, Partial) else p for p in chosen]
        try:
            return tuple(normalize_placements(tuple(chosen), shape, mesh))
        except ValueError:
            continue
    return (Replicate(),) * len(mesh)


def run_case(case: dict[str, Any]) -> tuple[str, str]:
    """Run a transfer. Returns a digest of the values that all ranks expect, and nothing more."""
    transfers = _Modules(case) if case["kind"] == "modules" else _Tensors(case)
    plan = transfers.plan()
    for run in case["runs"]:
        transfers.write(run["write"])
        transfers.run(plan, run)
        assert plan.is_complete
        problem = "" if plan.last_peak_bytes <= plan.max_bytes else f"{plan.last_peak_bytes} bytes of {plan.max_bytes}"
        problem += transfers.check()
        problems: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(problems, problem)  # All ranks raise, so that none waits for another.
        assert not any(problems), problems
    return transfers.digest.hexdigest(), ""


def _mesh(ranks: tuple[int, ...], shape: tuple[int, ...], names: tuple[str, ...] | None = None) -> DeviceMesh:
    key = (dist.group.WORLD, ranks, shape, names)  # A test's processes have another process group for each call.
    if key not in _meshes:
        _meshes[key] = DeviceMesh("cpu", torch.tensor(ranks).view(shape), mesh_dim_names=names)
    return _meshes[key]


class _Tensors:
    """Tensors between two meshes."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.case, self.rng, self.digest = case, random.Random(case["seed"]), hashlib.sha256()
        self.deltas = {None: None, "checksum": "checksum", "baseline": transfer.Baseline()}
        self.meshes = [_mesh(*each) for each in case["meshes"]]
        self.turn = 0
        self.wanted: dict[str, torch.Tensor] = {}
        self.source: dict[str, torch.Tensor] = {}
        self.target: dict[str, torch.Tensor] = {}
        for name in self.each():
            self.fill(name)
            self.make_target(name)

    def each(self) -> dict[str, dict[str, Any]]:
        return {f"t{i}": tensor for i, tensor in enumerate(self.case["tensors"])}

    def values(self, name: str) -> torch.Tensor | None:
        """New values of a source: this rank's local tensor, if it has one."""
        tensor, mesh = self.each()[name], self.meshes[0]
        self.turn += 1
        generator = torch.Generator().manual_seed(1000 * self.case["seed"] + self.turn)
        values = contributions(tensor["shape"], mesh, tensor["source"], DTYPES[tensor["dtype"]], generator)
        everything = (Replicate(),) * mesh.ndim
        self.wanted[name] = reduced(values, mesh.ndim, tensor["source"], everything, (0,) * mesh.ndim)
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            return None
        mine = reduced(values, mesh.ndim, tensor["source"], tensor["source"], tuple(coordinate))
        return local_of(mine, tuple(mesh.shape), tensor["source"], tuple(coordinate)).clone().contiguous()

    def fill(self, name: str) -> None:
        tensor, local = self.each()[name], self.values(name)
        if local is None:
            return
        if tensor["strided"] and local.ndim:
            local = torch.stack([local, local], dim=-1)[..., 0]
        self.source[name] = self.placed(local, tensor["shape"], 0, tensor["source"])

    def make_target(self, name: str) -> None:
        tensor, mesh = self.each()[name], self.meshes[1]
        if (coordinate := mesh.get_coordinate()) is None:
            return
        with torch.inference_mode(self.case["inference"]):
            whole = torch.full(tensor["shape"], 99).to(DTYPES[tensor["dtype"]])
            local = local_of(whole, tuple(mesh.shape), tensor["target"], tuple(coordinate)).clone().contiguous()
            self.target[name] = self.placed(local, tensor["shape"], 1, tensor["target"])

    def placed(self, local: torch.Tensor, shape: tuple[int, ...], side: int, placements: Any) -> DTensor:
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(local, self.meshes[side], placements, run_check=False, shape=torch.Size(shape), stride=stride)

    def plan(self) -> transfer.Plan:
        """Ranks outside of a mesh give specs, or nothing."""
        sides = []
        for i, (which, held) in enumerate((("source", self.source), ("target", self.target))):
            specs = {
                name: transfer.Spec(tensor["shape"], DTYPES[tensor["dtype"]], self.meshes[i], tensor[which])
                for name, tensor in self.each().items()
            }
            is_here = self.meshes[i].get_coordinate() is not None
            sides.append(self.form(held) if is_here else specs if self.case["seed"] % 2 else None)
        return transfer.plan(*sides, max_bytes=self.case["max_bytes"])

    def form(self, tensors: dict[str, torch.Tensor]) -> Any:
        return list(tensors.items()) if self.case["pairs"] else tensors

    def run(self, plan: transfer.Plan, run: dict[str, Any]) -> None:
        has_partial = any(isinstance(p, Partial) for tensor in self.case["tensors"] for p in tensor["source"])
        handle = plan.run(
            self.form(self.source),
            self.form(self.target),
            delta=self.deltas[run["delta"]],
            async_op=run["async"] and not has_partial,
        )
        if handle is not None:
            handle.wait()

    def write(self, how: str) -> None:
        """Change one tensor of the source or of the target."""
        name = self.rng.choice(list(self.each()))
        if how == "target" or how == "replace" and self.rng.random() < 0.5:
            if how == "replace":
                self.make_target(name)
            elif name in self.target:
                with torch.inference_mode():
                    self.target[name].to_local().fill_(7)
        elif how == "replace":
            self.fill(name)
        elif how != "none":
            local = self.values(name)
            if local is not None:
                self.overwrite(self.source[name], local, how)

    def overwrite(self, tensor: torch.Tensor, local: torch.Tensor, how: str) -> None:
        own = tensor.to_local()
        if how == "operator" and not any(isinstance(p, Partial) for p in tensor.placements):
            tensor.copy_(self.placed(local, tuple(tensor.shape), 0, tensor.placements))
        else:
            with torch.inference_mode(how == "inference"):
                own.copy_(local)

    def check(self) -> str:
        for name, tensor in self.each().items():
            self.digest.update(bytes_of(self.wanted[name]))
            if name in self.target:
                mesh = self.meshes[1]
                wanted = local_of(self.wanted[name], tuple(mesh.shape), tensor["target"], tuple(mesh.get_coordinate() or ()))
                found = self.target[name].to_local()
                if not torch.equal(found, wanted):
                    return f"{name} is {found}, expected {wanted}"
        return ""


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)
        self.register_buffer("steps", torch.zeros(3))

    def get_extra_state(self) -> object:
        return {"version": 1}

    def set_extra_state(self, state: object) -> None:
        """Nothing."""


class _Modules:
    """A module to another one; each is sharded, has tensor parallelism, or both."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.case, self.rng, self.digest = case, random.Random(case["seed"]), hashlib.sha256()
        self.deltas = {None: None, "checksum": "checksum", "baseline": transfer.Baseline()}
        self.source, self.target = self.sharded(case["source"]), self.sharded(case["target"])
        self.wanted = {name: self.whole(tensor) for name, tensor in self.tensors(self.source).items()}

    def sharded(self, how: str) -> nn.Module:
        torch.manual_seed(self.rng.randrange(1000))
        block = _Block()
        with torch.no_grad():
            for parameter in block.parameters():
                parameter.copy_(torch.randint(-9, 9, parameter.shape))
        if how == "fsdp":
            return fully_shard(block, mesh=_mesh((0, 1, 2, 3), (4,)))
        mesh = _mesh((0, 1, 2, 3), (2, 2), ("dp", "tp"))
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return fully_shard(block, mesh=mesh["dp"]) if how == "tp and fsdp" else block

    @staticmethod
    def tensors(module: nn.Module) -> dict[str, torch.Tensor]:
        return {name: value for name, value in module.state_dict().items() if isinstance(value, torch.Tensor)}

    @staticmethod
    def whole(tensor: torch.Tensor) -> torch.Tensor:
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()

    def plan(self) -> transfer.Plan:
        return transfer.plan(self.source, self.target, max_bytes=self.case["max_bytes"])

    def run(self, plan: transfer.Plan, run: dict[str, Any]) -> None:
        handle = plan.run(self.source, self.target, delta=self.deltas[run["delta"]], async_op=run["async"])
        if handle is not None:
            handle.wait()

    def write(self, how: str) -> None:
        module = self.target if how in ("target", "replace") else self.source
        name, tensor = self.rng.choice(list(self.tensors(module).items()))
        number = self.rng.randint(-9, 9)
        if how == "none":
            return
        with torch.inference_mode(how == "inference"), torch.no_grad():
            (tensor.to_local() if isinstance(tensor, DTensor) and how == "local" else tensor).fill_(number)
        if module is self.source:
            self.wanted[name].fill_(number)

    def check(self) -> str:
        wrong = ""
        for name, tensor in self.tensors(self.target).items():
            self.digest.update(bytes_of(self.wanted[name]))
            found = self.whole(tensor)
            if not torch.equal(found, self.wanted[name]):
                wrong = f"{name} is {found}, expected {self.wanted[name]}"
        return wrong
