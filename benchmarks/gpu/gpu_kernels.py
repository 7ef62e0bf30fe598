"""Kernels on one GPU: bandwidth against a device copy, 8-bit Adam against others, symmetric products against torch's.

    python -m benchmarks.gpu.gpu_kernels --json kernels.json
    python -m benchmarks.gpu.gpu_kernels --tune                # every configuration of the symmetric products
    python -m benchmarks.gpu.gpu_kernels --device cpu --smoke  # runs it all on small tensors; its times mean nothing

Contenders are timed in turn, each round in another order, by CUDA events; numbers are medians of the rounds. Bandwidth counts
every byte that a kernel has to read and write, once. TFLOP/s count the whole product, also where half of it is computed.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.common.measure import print_table, write_json
from torch_ragged._kernels import float4, float8, symmetric
from torch_ragged._kernels.casts import scaled_copy_
from torch_ragged._kernels.tiles import TileRun, TileTable
from torch_ragged.fsdp import Float8Planes, float8_matmul_weight, float8_weight
from torch_ragged.optim import AdamW8bit
from torch_ragged.optim._newton_schulz import newton_schulz, newton_schulz_cost

TARGETS = {"of copy": 0.9, "8-bit Adam of 32-bit fused": 0.6, "symmetric speedup": 1.5}


def timed(functions: dict[str, Callable[[], Any]], rounds: int, device: str, calls: int = 3) -> dict[str, float]:
    """Median seconds per call of each function, over interleaved rounds of ``calls`` in a row."""
    names, times = list(functions), {name: [] for name in functions}  # type: tuple[list[str], dict[str, list[float]]]
    for name in names:  # compiles
        functions[name]()
    for turn in range(rounds):
        for index in range(len(names)):
            name = names[(turn + index) % len(names)]
            times[name].append(_seconds(functions[name], calls, device))
    return {name: statistics.median(each) for name, each in times.items()}


def _seconds(function: Callable[[], Any], calls: int, device: str) -> float:
    if device == "cpu":
        start = time.perf_counter()
        for _ in range(calls):
            function()
        return (time.perf_counter() - start) / calls
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(calls):
        function()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / calls


def bandwidth(device: str, numel: int, rounds: int) -> list[dict[str, Any]]:
    """Casts, and tiles of float8 and float4, of ``numel`` elements (a multiple of 4096 x 128)."""
    wide, narrow = torch.randn(numel, device=device), torch.randn(numel, device=device, dtype=torch.bfloat16)
    copied = torch.empty_like(wide)
    cases: dict[str, tuple[float, Callable[[], Any], Callable[[], Any] | None]] = {
        "copy, float32": (8, lambda: copied.copy_(wide), None),
        "cast to bfloat16": (6, lambda: scaled_copy_(narrow, wide), lambda: narrow.copy_(wide)),
        "scale and cast to bfloat16": (6, lambda: scaled_copy_(narrow, wide, 0.5), None),
        "widen bfloat16": (6, lambda: scaled_copy_(copied, narrow), lambda: copied.copy_(narrow)),
        "add bfloat16 to float32": (10, lambda: scaled_copy_(copied, narrow, accumulate=True), lambda: copied.add_(narrow)),
    }
    for tile in float8.TILES:
        tiles = numel // (tile[0] * tile[1])
        table = TileTable([TileRun(0, 0, numel // 4, (1, numel // 4096, 4096))], tile)
        buffer = torch.empty(numel + 4 * tiles, dtype=torch.uint8, device=device)

        def quantize(buffer: torch.Tensor = buffer, table: TileTable = table) -> None:
            float8.quantize(wide, buffer, table)

        def dequantize(buffer: torch.Tensor = buffer, table: TileTable = table) -> None:
            float8.dequantize(narrow, buffer, table)

        quantize()
        cases[f"float8 {tile[0]} x {tile[1]}, quantize float32"] = (5, quantize, None)
        cases[f"float8 {tile[0]} x {tile[1]}, dequantize to bfloat16"] = (3, dequantize, None)
    fours = torch.empty(numel // 2, dtype=torch.uint8, device=device), torch.empty(numel // 32, dtype=torch.int8, device=device)
    of_four = TileTable([TileRun(0, 0, 0, (1, numel // 4096, 4096))], float4.TILE)
    float4.quantize(wide, fours[0], of_four, fours[1])
    cases["float4, quantize float32"] = 4.53, lambda: float4.quantize(wide, fours[0], of_four, fours[1]), None
    cases["float4, dequantize to bfloat16"] = 2.53, lambda: float4.dequantize(narrow, fours[0], of_four, fours[1]), None
    functions = {name: case[1] for name, case in cases.items()}
    functions |= {f"{name} torch": case[2] for name, case in cases.items() if case[2] is not None}
    seconds = timed(functions, rounds, device)
    rates = {name: case[0] * numel / seconds[name] / 1e9 for name, case in cases.items()}
    best = rates["copy, float32"]
    return [
        {
            "kernel": name,
            "us": 1e6 * seconds[name],
            "GB/s": rates[name],
            "of copy": rates[name] / best,
            "torch, us": 1e6 * seconds[f"{name} torch"] if f"{name} torch" in seconds else "-",
        }
        for name in cases
    ]


def adam(device: str, shapes: list[tuple[int, int]], rounds: int) -> list[dict[str, Any]]:
    """A step of each optimizer on float32 parameters and gradients."""
    options: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1}
    makers: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "torch AdamW, fused, 32-bit": lambda params: torch.optim.AdamW(params, fused=True, **options),
        "AdamW8bit": lambda params: AdamW8bit(params, **options),
    }
    for name, module, attribute in (
        ("torchao AdamW8bit", "torchao.optim", "AdamW8bit"),
        ("bitsandbytes AdamW8bit", "bitsandbytes.optim", "AdamW8bit"),
    ):
        found = _optional(module, attribute) if device != "cpu" else None
        if found is not None:
            makers[name] = lambda params, found=found: found(params, **options)
    steps: dict[str, Callable[[], Any]] = {}
    for name, make in makers.items():
        params = [torch.nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
        for param in params:
            param.grad = torch.randn_like(param) * 1e-2
        steps[name] = make(params).step
    seconds, numel = timed(steps, rounds, device), sum(rows * columns for rows, columns in shapes)
    first = next(iter(steps))
    return [
        {"optimizer": name, "us": 1e6 * time, "of 32-bit": time / seconds[first], "elements/ns": numel / time / 1e9}
        for name, time in seconds.items()
    ]


def _optional(module: str, attribute: str) -> Any:
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # Not installed, or not for this torch.
        warnings.warn(f"{module} is left out: {error}", stacklevel=2)
        return None


def products(device: str, sizes: list[tuple[int, int]], rounds: int) -> list[dict[str, Any]]:
    """X X^T, b A + c A A and the five steps of Newton-Schulz of each size, by torch and with half the tiles."""
    rows = []
    for size, inner in sizes:
        x = torch.randn(size, inner, device=device, dtype=torch.bfloat16) / size**0.5
        a = symmetric.gram(x)
        other, stack = torch.randn(inner, size, device=device, dtype=torch.bfloat16), x.unsqueeze(0)
        functions: dict[str, Callable[[], Any]] = {"ceiling": lambda x=x, other=other: x @ other}
        for halves in (False, True):
            functions |= {
                f"X X^T {halves}": lambda x=x, halves=halves: symmetric.gram(x, halves),
                f"b A + c A A {halves}": lambda a=a, halves=halves: symmetric.polynomial(a, -4.775, 2.0315, halves),
                f"Newton-Schulz {halves}": lambda stack=stack, halves=halves: newton_schulz(stack, batched=halves),
            }
        seconds = timed(functions, rounds, device)
        flops = {"X X^T": 2 * size**2 * inner, "b A + c A A": 2 * size**3, "Newton-Schulz": newton_schulz_cost(size, inner)}
        ceiling = 2 * size * size * inner / seconds["ceiling"] / 1e12
        for name, count in flops.items():
            plain, ours = seconds[f"{name} False"], seconds[f"{name} True"]
            rows.append(
                {
                    "product": f"{name}, {size} x {inner}",
                    "torch, us": 1e6 * plain,
                    "half, us": 1e6 * ours,
                    "speedup": plain / ours,
                    "torch, TFLOP/s": count / plain / 1e12,
                    "half, TFLOP/s": count / ours / 1e12,
                    "matmul ceiling": ceiling,
                }
            )
    return rows


def codes(device: str, shapes: list[tuple[int, int]], tokens: int, rounds: int) -> list[dict[str, Any]]:
    """``F.linear`` of bfloat16 inputs without gradients: a bfloat16 weight, and one of float8 codes, held in two ways."""
    rows, tile = [], (128, 128)
    for out, inner in shapes:
        values = torch.randn(out, inner, device=device)
        planes = (
            torch.empty(out, inner, dtype=torch.uint8, device=device),
            torch.empty(-(-out // 128), -(-inner // 128), device=device),
        )
        float8.quantize(
            values.view(-1), planes[0].view(-1), TileTable([TileRun(0, 0, 0, (1, out, inner))], tile), planes[1].view(-1)
        )
        weight = Float8Planes(planes[0].view(torch.float8_e4m3fn), planes[1], tile, torch.bfloat16)
        x, plain = torch.randn(tokens, inner, device=device, dtype=torch.bfloat16), values.bfloat16()
        kinds = {
            "bfloat16": plain,
            "float8_weight": float8_weight(weight),
            "float8_matmul_weight": float8_matmul_weight(weight),
        }
        with torch.no_grad():
            seconds = timed({name: lambda held=held, x=x: F.linear(x, held) for name, held in kinds.items()}, rounds, device)
        row: dict[str, Any] = {"weight": f"{out} x {inner}", "tokens": tokens}
        row |= {f"{name}, us": 1e6 * seconds[name] for name in kinds}
        row["of bfloat16"] = seconds["float8_matmul_weight"] / seconds["bfloat16"]
        rows.append({**row, "TFLOP/s": 2 * tokens * out * inner / seconds["float8_matmul_weight"] / 1e12})
    return rows


def tuned(sizes: list[tuple[int, int]], rounds: int) -> list[dict[str, Any]]:
    """Every configuration of the symmetric product, on CUDA."""
    from torch_ragged._kernels import _triton_symmetric as kernel

    rows = []
    for size, inner in sizes:
        x = torch.randn(size, inner, device="cuda", dtype=torch.bfloat16)
        functions = {
            str(tuple(configuration)): lambda x=x, configuration=configuration: kernel.product(x, None, 0.0, 1.0, configuration)
            for configuration in kernel.CONFIGURATIONS
        }
        seconds = timed(functions, rounds, "cuda")
        rows += [{"size": f"{size} x {inner}", "configuration": name, "us": 1e6 * time} for name, time in seconds.items()]
    return rows


def run(device: str = "cuda", smoke: bool = False, rounds: int = 15) -> dict[str, Any]:
    """All tables, printed and returned, and whether each target of :data:`TARGETS` was reached."""
    rounds = 2 if smoke else rounds
    memory = bandwidth(device, 1 << (19 if smoke else 28), rounds)
    optimizers = adam(device, [(64, 96), (40, 130)] if smoke else [(4096, 4096)] * 12 + [(2880, 5760)] * 4, rounds)
    sizes = [(64, 96)] if smoke else [(2048, 2048), (2880, 2880), (4096, 4096), (4096, 14336), (8192, 8192)]
    matmuls = products(device, sizes, rounds)
    shapes = [(128, 256)] if smoke else [(4096, 4096), (14336, 4096), (4096, 14336), (8192, 28672)]
    coded = codes(device, shapes, 32 if smoke else 8192, rounds)
    print_table("Memory-bound kernels", memory)
    print_table("A step of Adam", optimizers)
    print_table("Symmetric products", matmuls)
    print_table("Linear layers of float8 codes", coded)
    reached = {
        "of copy": min(row["of copy"] for row in memory[1:]),
        "8-bit Adam of 32-bit fused": optimizers[1]["of 32-bit"],
        "symmetric speedup": min(
            row["speedup"] for row in matmuls if smoke or int(row["product"].split(", ")[1].split()[0]) >= symmetric.FEWEST_ROWS
        ),
    }
    is_met = {name: value <= TARGETS[name] if "Adam" in name else value >= TARGETS[name] for name, value in reached.items()}
    targets = [{"target": name, "reached": reached[name], "wanted": TARGETS[name], "met": is_met[name]} for name in TARGETS]
    print_table("Targets", targets)
    name = "cpu" if device == "cpu" else torch.cuda.get_device_name()
    return {"device": name, "memory": memory, "adam": optimizers, "products": matmuls, "codes": coded, "targets": targets}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda", help="(default: %(default)s)")
    add("--smoke", action="store_true", help="small tensors, two rounds")
    add("--rounds", type=int, default=15, help="(default: %(default)s)")
    add("--tune", action="store_true", help="time the configurations of the symmetric products as well")
    add("--json", help="file to write the numbers to")
    args = parser.parse_args()
    results = run(args.device, args.smoke, args.rounds)
    if args.tune:
        results["configurations"] = tuned([(4096, 4096), (8192, 8192)], args.rounds)
        print_table("Configurations: tile, step, group, warps, stages", results["configurations"])
    write_json(args.json, results)


if __name__ == "__main__":
    main()
