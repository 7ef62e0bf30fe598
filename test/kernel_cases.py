"""What every kernel is held to, on a GPU or by Triton's interpreter: equal to its torch twin.

``TRITON_INTERPRET=1 python test/kernel_cases.py`` runs all cases on the CPU and prints, as JSON, what went wrong in which.
"""

import json
import math
import os
import sys
import traceback

import torch

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

from torch_ragged._kernels import _choice, float8  # noqa: E402
from torch_ragged._kernels.casts import scaled_copy_  # noqa: E402
from torch_ragged._kernels.tiles import TileRun, TileTable  # noqa: E402

# Triton's interpreter has no denormal bfloat16.
TINY = 1e-37 if os.environ.get("TRITON_INTERPRET") == "1" else 1e-40
NUMBERS = (0.0, -0.0, math.inf, -math.inf, math.nan, TINY, 3.4e38, -65504.0)


def twin(function, *arguments, **keywords):
    """What the twin does, on the CPU whatever the device."""
    _choice.choose("torch")
    try:
        return function(*arguments, **keywords)
    finally:
        _choice.choose("triton")


def kernel(function, *arguments, **keywords):
    _choice.choose("triton")
    try:
        return function(*arguments, **keywords)
    finally:
        _choice.choose("auto")


def random(numel, dtype=torch.float32, seed=0):
    """Numbers of many magnitudes, and special ones where there is room."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator) * 10 ** torch.empty(numel).uniform_(-6, 4, generator=generator)
    if numel > 100:
        values[50 : 50 + len(NUMBERS)] = torch.tensor(NUMBERS)
    return values.to(dtype)


def same(a, b, what):
    a, b = a.cpu(), b.cpu()
    assert a.dtype == b.dtype and a.shape == b.shape, what
    equal = (a == b) & (torch.signbit(a) == torch.signbit(b)) if a.is_floating_point() else a == b
    fine = equal | (a.isnan() & b.isnan()) if a.is_floating_point() else equal
    assert bool(fine.all()), (what, int((~fine).sum()), a[~fine][:5], b[~fine][:5])


def casts(device):
    """Bitwise, of any size, at any offset, into nothing beside the output."""
    pairs = [(a, b) for a in (torch.float32, torch.bfloat16) for b in (torch.float32, torch.bfloat16)]
    for out_dtype, dtype in [*pairs, (torch.float16, torch.float32), (torch.float32, torch.float16)]:
        for numel, offset in ((0, 0), (1, 0), (777, 3), (2048, 0), (5003, 1)):
            source = random(numel + offset, dtype)[offset:]
            for scale, accumulate in ((1.0, False), (1.0, True), (0.3, False), (1 / 3, True)):
                one = random(numel + offset + 5, out_dtype, seed=1)
                two = one.clone().to(device)
                twin(scaled_copy_, one[offset : offset + numel], source, scale, accumulate)
                there = torch.empty(numel + offset, dtype=dtype, device=device)[offset:].copy_(source)
                kernel(scaled_copy_, two[offset : offset + numel], there, scale, accumulate)
                same(two, one, f"{out_dtype} {dtype} {numel} {offset} {scale} {accumulate}")


def table_of(sizes, tile, gap):
    runs, values, codes, scales = [], gap, 2 * gap, 0
    for size in sizes:
        runs.append(TileRun(values, codes, scales, size))
        values, codes = values + runs[-1].numel + gap, codes + runs[-1].numel
        scales += math.prod(runs[-1].grid(tile))
    first = -(-codes // 4)  # where scales begin
    runs = [TileRun(run.values, run.codes, first + run.scales, run.sizes) for run in runs]
    return TileTable(runs, tile), values, 4 * (first + scales) + 8


def float8_tiles(device):
    """Codes, scales and values bitwise; tiles cut by edges; nothing written beside them; zeros, NaN and infinity."""
    for tile in float8.TILES:
        for dtype in (torch.float32, torch.bfloat16):
            for sizes, gap in (((), 0), (((1, 128, 128), (2, 129, 144)), 16), (((1, 1, 1), (3, 70, 130), (1, 260, 50)), 3)):
                table, numel, nbytes = table_of(sizes, tile, gap)
                values = random(numel, dtype).nan_to_num(0, 1, 1)
                if sizes:
                    last = table.runs[-1].values
                    values[last : last + 50] = 0
                    values[last + 50 : last + 100] = 1e-35
                for special in (None, math.nan, math.inf):
                    if special is not None and sizes:
                        values[table.runs[0].values] = special
                    one = torch.full((nbytes,), 77, dtype=torch.uint8)
                    two = one.clone().to(device)
                    twin(float8.quantize, values, one, table)
                    kernel(float8.quantize, values.to(device), two, table)
                    if special is None:
                        same(two, one, f"codes {tile} {dtype} {sizes}")
                    same(two.view(torch.float32), one.view(torch.float32), f"scales {tile} {dtype} {sizes}")
                    back = random(numel, dtype, seed=2)
                    there = back.clone().to(device)
                    twin(float8.dequantize, back, one, table)
                    kernel(float8.dequantize, there, two, table)
                    same(there, back, f"values {tile} {dtype} {sizes} {special}")


CASES = {function.__name__: function for function in (casts, float8_tiles)}


def main():
    _choice.choose("triton")
    results = {}
    for name, function in CASES.items():
        try:
            function("cpu")
            results[name] = ""
        except Exception:
            results[name] = traceback.format_exc()[-3000:]
    print(json.dumps(results))


if __name__ == "__main__":
    main()
