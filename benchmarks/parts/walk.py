"""How far one thing travels through the code: the files, functions and calls of one tiny step, beside FSDP2's.

    python -m benchmarks.parts.walk [--json PATH] [--upward]

One process of a fake process group of 4 ranks traces its Python calls: ``fully_shard`` of a Linear; forward and backward of a
root of two Linears, each a group; forward and backward of a group of one small parameter. Of this package alone: a step of
Muon, ``parallelize``, and a redistribution that ran before.

    files, functions, calls   of the package's own code (FSDP2: torch/distributed/fsdp)
    upward                    calls from a file to one that imports it, directly or not: the callee stands on a higher floor
    depth                     the package's frames on the stack at most

Wrappers of the package that only call what they wrap are not counted, nor are comprehensions: from Python 3.12 on, they are
no calls. ``--upward`` lists the upward calls.

"the argument module" counts of construction's calls those that get the module itself as an argument, alone or in a collection:
through so many files one thing passes. ``--files`` lists the files of each walk, with their functions.
"""

from __future__ import annotations

import argparse
import ast
import functools
import gc
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import torch_ragged
import torch_ragged.fsdp
from benchmarks.common.fake_world import PACKAGES, fake_world, make_mesh
from benchmarks.common.measure import print_table, write_json
from torch_ragged import RaggedShard
from torch_ragged.optim import Muon, matrix_groups
from torch_ragged.spmd import Plan, parallelize

ROOTS = {
    "torch_ragged": Path(torch_ragged.__file__).parent,
    "FSDP2": Path(torch.__file__).parent / "distributed/fsdp",
}
_WRAPPERS = {("_spmd_types.py", "call"), ("_torch.py", "call"), ("_autograd.py", "_engine_run_backward")}
_COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")


@dataclass
class Walk:
    """What one walk has seen.

    Attributes:
        functions: (file, first line, name) -> calls.
        upward: (caller's file and function, callee's) -> calls.
        depth: the package's frames on the stack at most.
    """

    functions: Counter[tuple[str, int, str]] = field(default_factory=Counter)
    upward: Counter[tuple[str, str]] = field(default_factory=Counter)
    depth: int = 0

    def row(self) -> dict[str, int]:
        """The numbers of the table."""
        files = {file for file, _, _ in self.functions}
        calls = {"files": len(files), "functions": len(self.functions), "calls": self.functions.total()}
        return {**calls, "upward": self.upward.total(), "depth": self.depth}


@functools.cache
def imports_of(root: Path) -> dict[str, set[str]]:
    """For each file of a package, the files of the package that it imports when it is imported, directly or not."""
    package = ".".join(root.parts[root.parts.index("torch") if "torch" in root.parts else -1 :])
    files = {str(path): ".".join([package, *path.relative_to(root).with_suffix("").parts]) for path in root.rglob("*.py")}
    modules = {module.removesuffix(".__init__"): file for file, module in files.items()}
    reached = {}
    for file, module in files.items():
        names: set[str] = set()
        for node in ast.parse(Path(file).read_text()).body:
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = module.split(".")[: -node.level] if node.level else []
                origin = ".".join([*base, *([node.module] if node.module else [])])
                names.update(f"{origin}.{alias.name}" for alias in node.names)
                names.add(origin)
        reached[file] = {modules[name] for name in names if name in modules} - {file}
    for middle in reached:
        for others in reached.values():
            if middle in others:
                others |= reached[middle]
    return reached


def _has(value: Any, thing: Any, depth: int = 3) -> bool:
    """Whether ``value`` is ``thing``, or a collection that has it."""
    if value is thing or depth == 0:
        return value is thing
    if isinstance(value, dict):
        return any(_has(each, thing, depth - 1) for pair in value.items() for each in pair)
    return isinstance(value, (tuple, list, set, frozenset)) and any(_has(each, thing, depth - 1) for each in value)


def _arguments(frame: FrameType) -> list[Any]:
    """What a call was given, with ``*args`` and ``**kwargs``."""
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 0x4) + bool(code.co_flags & 0x8)
    return [frame.f_locals[name] for name in code.co_varnames[:count] if name in frame.f_locals]


def traced(package: str, action: Callable[[], Any], thing: Any = None) -> Walk:
    """Run ``action`` and see which functions of ``package`` it calls; with ``thing``, those that get it as an argument."""
    root, walk = str(ROOTS[package]), Walk()
    imports = imports_of(ROOTS[package])

    @functools.cache
    def is_own(file: str, name: str) -> bool:
        return file.startswith(root) and name not in _COMPREHENSIONS and (Path(file).name, name) not in _WRAPPERS

    def own(frame: FrameType | None) -> bool:
        return frame is not None and is_own(frame.f_code.co_filename, frame.f_code.co_name)

    def is_wrapper(frame: FrameType | None) -> bool:
        if frame is None or frame.f_code.co_name in _COMPREHENSIONS:
            return frame is not None
        return (Path(frame.f_code.co_filename).name, frame.f_code.co_name) in _WRAPPERS

    def see(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not own(frame):
            return
        if thing is not None and not any(_has(value, thing) for value in _arguments(frame)):
            return
        code, caller = frame.f_code, frame.f_back
        walk.functions[code.co_filename, code.co_firstlineno, code.co_name] += 1
        while is_wrapper(caller):
            assert caller is not None
            caller = caller.f_back
        if own(caller):
            assert caller is not None
            here, there = caller.f_code.co_filename, code.co_filename
            if here in imports[there] and there not in imports[here]:
                pair = (f"{Path(here).name}:{caller.f_code.co_name}", f"{Path(there).name}:{code.co_name}")
                walk.upward[pair] += 1
        depth, outer = 1, caller
        while outer is not None:
            depth += own(outer)
            outer = outer.f_back
        walk.depth = max(walk.depth, depth)

    gc.collect()
    gc.disable()  # Or what earlier objects do when they are collected would be counted.
    sys.setprofile(see)
    try:
        action()
    finally:
        sys.setprofile(None)
        gc.enable()
    return walk


def walks(package: str) -> dict[str, Walk]:
    """The walks of one package, by name."""
    fully_shard, found = PACKAGES[package], {}
    with fake_world(4):
        mesh = make_mesh(4)
        fully_shard(nn.Linear(8, 8), mesh=mesh)  # What is imported and cached at the first call does not count.
        linear = nn.Linear(8, 8)
        found["fully_shard(Linear)"] = traced(package, lambda: fully_shard(linear, mesh=mesh))
        other = nn.Linear(8, 8)
        found["the argument module"] = traced(package, lambda: fully_shard(other, mesh=mesh), other)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        small = nn.Linear(4, 1, bias=False)
        for module in (*model, model, small):
            fully_shard(module, mesh=mesh)

        def forward(module: nn.Module) -> torch.Tensor:
            width = 8 if module is model else 4
            return module(torch.ones(2, width)).sum()

        for module in (model, small, model, small):  # The first steps: lazy initialization, the order of modules.
            forward(module).backward()
            module.zero_grad()
        losses: list[torch.Tensor] = []
        found["forward of two Linears"] = traced(package, lambda: losses.append(forward(model)))
        found["backward of two Linears"] = traced(package, losses[0].backward)
        losses.clear()
        found["forward of one small parameter"] = traced(package, lambda: losses.append(forward(small)))
        found["backward of one small parameter"] = traced(package, losses[0].backward)
        for name, (model, of_loss) in _other_steps(fully_shard, mesh).items():
            for _ in range(2):
                of_loss(model(torch.ones(2, 8))).backward()
            found[name] = traced(package, lambda: of_loss(model(torch.ones(2, 8))).backward())
        if package == "torch_ragged":
            found |= _other_wings(mesh)
    return found


def _other_wings(mesh: DeviceMesh) -> dict[str, Walk]:
    """Walks outside of ``fsdp``, for which FSDP2 has nothing."""
    found = {}

    def linears() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

    model = torch_ragged.fsdp.fully_shard(linears(), mesh=mesh)
    optimizer = Muon(matrix_groups(model, lr=0.01), lr=0.01)
    for _ in range(3):  # The first steps plan and allocate.
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    found["a step of Muon"] = traced("torch_ragged", optimizer.step)
    plan, mesh = Plan(), init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    plan.shard(r"0\.(weight|bias)", Shard(0), "tp")
    plan.shard(r"2\.weight", Shard(1), "tp")
    plan.default(Replicate())
    parallelize(linears(), plan, mesh)
    model = linears()
    found["parallelize(two Linears)"] = traced("torch_ragged", lambda: parallelize(model, plan, mesh))
    tensor = distribute_tensor(torch.ones(8, 8), mesh, [RaggedShard((0,), (1, 3, 2, 2))])
    for _ in range(3):
        tensor.redistribute(placements=[Shard(0)])
    found["a warm redistribute"] = traced("torch_ragged", lambda: tensor.redistribute(placements=[Shard(0)]))
    return found


@dataclass
class _Opaque:
    """An output in which no hook finds the tensor."""

    hidden: Callable[[], torch.Tensor]


def _other_steps(fully_shard: Any, mesh: DeviceMesh) -> dict[str, tuple[nn.Module, Callable[[Any], torch.Tensor]]]:
    """Models whose steps take other ways than two Linears, and the loss of their outputs."""

    class Opaque(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            output = super().forward(x)
            return _Opaque(lambda: output)

    class Checkpointed(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self:
                x = checkpoint(layer, x, use_reentrant=False)
            return x

    def sharded(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
        for layer in model.children():
            fully_shard(layer, mesh=mesh, **options)
        return fully_shard(model, mesh=mesh)

    def layers() -> list[nn.Module]:
        return [nn.Linear(8, 8), nn.Linear(8, 8)]

    steps: dict[str, tuple[nn.Module, Callable[[Any], torch.Tensor]]] = {
        "a step of checkpointed units": (sharded(Checkpointed(*layers()), mesh), torch.sum),
        "a step of HSDP": (sharded(nn.Sequential(*layers()), make_mesh(4, 2)), torch.sum),
    }
    if fully_shard is PACKAGES["torch_ragged"]:  # FSDP2 has no optional modules, and frees what an opaque output needs.
        opaque = nn.Sequential(nn.Linear(8, 8), Opaque(8, 8))
        steps["a step with an opaque output"] = (sharded(opaque, mesh), lambda output: output.hidden().sum())
        steps["a step of optional modules"] = (sharded(nn.Sequential(*layers()), mesh, optional=True), torch.sum)
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upward", action="store_true", help="list the upward calls")
    parser.add_argument("--files", action="store_true", help="list the files and functions")
    parser.add_argument("--json", help="write the results to this file too")
    options = parser.parse_args()
    found = {package: walks(package) for package in PACKAGES}
    table = [{"walk": name, "package": package, **walk.row()} for package, each in found.items() for name, walk in each.items()]
    table.sort(key=lambda row: list(found["torch_ragged"]).index(str(row["walk"])))
    print_table(f"torch {torch.__version__}: one tiny step, one process of a fake process group of 4 ranks", table)
    if options.upward:
        for name, walk in found["torch_ragged"].items():
            print(f"\n{name}: upward calls")
            for (caller, callee), calls in walk.upward.most_common():
                print(f"  {calls:3} {caller} -> {callee}")
    if options.files:
        for name, walk in found["torch_ragged"].items():
            print(f"\n{name}: files and functions")
            for file in sorted({file for file, _, _ in walk.functions}):
                names = [function for other, _, function in walk.functions if other == file]
                print(f"  {Path(file).relative_to(ROOTS['torch_ragged'])}: {', '.join(names)}")
    write_json(options.json, {"walk": table})


if __name__ == "__main__":
    main()
