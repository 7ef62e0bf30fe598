"""CPU time of an op on plain tensors, on DTensors, under a plan in eager mode, and in a static module; and of a conversion.

    python -m benchmarks.parts.spmd_ops [--json PATH] [--rounds 50] [--size 64]

One process is rank 0 of 8 on the fake process group. Tensors are small, and no op communicates: what is timed is dispatch.
Candidates take turns, CPU time of the thread; a ratio is the median over the rounds of the ratio in a round:

- ``plain``: a tensor of the size of a rank's part.
- ``DTensor``: torch's, as in a program without a plan.
- ``eager``: the same DTensors after ``parallelize``, by which ops have the results, and random numbers, of one device.
- ``static``: the tensors that a static module of ``parallelize(mode="static")`` sees.

An op that torch cannot do on these DTensors has ``raises``. The second table is the cost of making a DTensor of a local tensor
and back, with autograd and without: ``ours`` is what boundaries and static modules use, ``torch`` is ``DTensor.from_local`` and
``to_local``.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.common.fake_world import fake_world
from benchmarks.common.measure import interleaved, print_table, write_json
from torch_ragged._register._spmd import compute_as_one_device, compute_as_torch
from torch_ragged.random import single_device
from torch_ragged.spmd import Plan, parallelize
from torch_ragged.spmd._move import make_dtensor
from torch_ragged.spmd._static import _FromLocal, _ToLocal

RANKS = 8
OPS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "mm": lambda x, w: torch.mm(x, w),
    "t": lambda x, w: x.t(),
    "view": lambda x, w: x.view(x.shape[0], 2, -1),
    "add": lambda x, w: x + x,
    "add_": lambda x, w: x.add_(x, alpha=0.0),
    "split": lambda x, w: x.split(x.shape[1] // 2, 1),
    "softmax": lambda x, w: x.softmax(-1),
    "nonzero": lambda x, w: x.nonzero(),
    "dropout": lambda x, w: F.dropout(x, 0.1),
}


class Product(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


class Seen(TorchDispatchMode):
    """Keeps the arguments of products. A module that kept them itself would not be static."""

    tensors: tuple[Any, ...] = ()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            self.tensors = args
        return func(*args, **(kwargs or {}))


def tensors_of_static_module(mesh: DeviceMesh, size: int) -> list[torch.Tensor]:
    plan = Plan().shard("<in>", Shard(0), "tp").shard("<out>", Shard(0), "tp", grad=Shard(0)).default(Replicate())
    model = parallelize(Product(size), plan, mesh, mode="static")
    for _ in range(3):  # The second call finds the static modules.
        with Seen() as seen:
            model(torch.randn(RANKS * size, size))
    assert [type(each) for each in seen.tensors] == [torch.Tensor] * 2, model.static_modules.report  # type: ignore[union-attr]
    return [each.detach() for each in seen.tensors]


def behave_as(name: str) -> None:
    """Switch what ``parallelize`` switches on for the process."""
    if name == "eager":
        compute_as_one_device(True)
    else:
        compute_as_torch()
    single_device(name == "eager")


def cost_of_ops(mesh: DeviceMesh, size: int, rounds: int) -> list[dict[str, Any]]:
    static = tensors_of_static_module(mesh, size)
    local = [torch.randn(size, size) for _ in range(2)]
    placed = [
        DTensor.from_local(each, mesh, [placement], run_check=False) for each, placement in zip(local, (Shard(0), Replicate()))
    ]
    rows = []
    for op, function in OPS.items():
        given = {"plain": local, "DTensor": placed, "eager": placed, "static": static}
        functions = {name: lambda pair=pair, function=function: function(*pair) for name, pair in given.items()}
        behave_as("DTensor")
        try:
            functions["DTensor"]()
        except Exception:  # Of any type: it is torch's to say why.
            del functions["DTensor"]

        def prepare(name: str, functions: dict[str, Callable[[], Any]] = functions) -> None:
            behave_as(name)
            functions[name]()  # What the switch has touched is warm again.

        times = interleaved(functions, rounds, prepare=prepare)
        row: dict[str, Any] = {"op": op}
        row |= {f"{name} us": statistics.median(times[name]) if name in times else "raises" for name in given}
        for name in list(given)[1:]:
            pairs = zip(times.get(name, ()), times["plain"])
            row[f"{name} / plain"] = statistics.median([a / b for a, b in pairs]) if name in times else "raises"
        rows.append(row)
    behave_as("plain")
    return rows


def cost_of_conversions(mesh: DeviceMesh, size: int, rounds: int) -> list[dict[str, Any]]:
    placements = (Shard(0),)
    local, needs = torch.randn(size, size), torch.randn(size, size, requires_grad=True)
    placed = distribute_tensor(torch.randn(RANKS * size, size), mesh, placements)
    leaf = placed.detach().requires_grad_()
    # What an output asks of its static module.
    region, kind = (
        SimpleNamespace(gradients=None, leaves=[]),
        SimpleNamespace(found=SimpleNamespace(output_grads={0: placements})),
    )
    cases: dict[str, dict[str, Callable[[], Any]]] = {
        "local -> DTensor": {
            "ours": lambda: make_dtensor(local, mesh, placements, placed.shape),
            "torch": lambda: DTensor.from_local(local, mesh, placements, run_check=False),
        },
        "local -> DTensor, autograd": {
            "ours": lambda: _FromLocal.apply(needs, region, kind, 0, placed._spec),
            "torch": lambda: DTensor.from_local(needs, mesh, placements, run_check=False),
        },
        "DTensor -> local": {"ours": lambda: placed._local_tensor, "torch": lambda: placed.to_local()},
        "DTensor -> local, autograd": {
            "ours": lambda: _ToLocal.apply(leaf, leaf._spec, None),
            "torch": lambda: leaf.to_local(grad_placements=placements),
        },
    }
    rows = []
    for name, pair in cases.items():
        times = interleaved(pair, rounds)
        row: dict[str, Any] = {"a conversion": name} | {f"{each} us": statistics.median(times[each]) for each in pair}
        rows.append({**row, "/ torch": statistics.median(a / b for a, b in zip(times["ours"], times["torch"]))})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--size", type=int, default=64, help="rows and columns of a rank's tensor")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with fake_world(RANKS):
        mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
        ops = cost_of_ops(mesh, options.size, options.rounds)
        conversions = cost_of_conversions(mesh, options.size, options.rounds)
    title = f"{options.size} x {options.size} elements on rank 0 of {RANKS}, torch {torch.__version__}"
    print_table(f"One op, {title}", ops)
    print_table("One conversion", conversions)
    write_json(options.json, {"ops": ops, "conversions": conversions})


if __name__ == "__main__":
    main()
