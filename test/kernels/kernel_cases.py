"""What every kernel is held to, on a GPU or by Triton's interpreter: equal to its torch twin.

``TRITON_INTERPRET=1 python test/kernels/kernel_cases.py`` runs all cases on the CPU and prints what went wrong, as JSON.
"""

import dataclasses
import itertools
import json
import math
import os
import sys
import tempfile
import traceback

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))

from torch_ragged._kernels import _choice, float4, float8  # noqa: E402
from torch_ragged._kernels import symmetric as symmetric_products  # noqa: E402
from torch_ragged._kernels.casts import scaled_copy_  # noqa: E402
from torch_ragged._kernels.tiles import TileRun, TileTable  # noqa: E402
from torch_ragged.fsdp import Float8Policy, fully_shard  # noqa: E402
from torch_ragged.optim import AdamW8bit  # noqa: E402
from torch_ragged.optim._adam8bit import AdamStep, BlockUpdates, Moments  # noqa: E402
from torch_ragged.optim._blocks import BlockPolicy, regions_of  # noqa: E402
from torch_ragged.optim._gather import Placed  # noqa: E402
from torch_ragged.optim._quantize import code_book, encode  # noqa: E402

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
                    first = min((run.scales for run in table.runs), default=0)  # Codes are before: a NaN's sign is not defined.
                    scales = (each.view(torch.float32)[first:] for each in (two, one))
                    same(*scales, f"scales {tile} {dtype} {sizes}")
                    back = random(numel, dtype, seed=2)
                    there = back.clone().to(device)
                    twin(float8.dequantize, back, one, table)
                    kernel(float8.dequantize, there, two, table)
                    same(there, back, f"values {tile} {dtype} {sizes} {special}")


def float4_tiles(device):
    """Codes, exponents and values bitwise, of runs at odd offsets; ties, zeros, subnormal numbers, NaN and infinity."""
    for dtype in (torch.float32, torch.bfloat16):
        for sizes, gap in (((), 0), (((1, 64, 64), (2, 65, 32)), 32), (((3, 5, 96), (1, 130, 32)), 3)):
            runs, start = [], gap
            for size in sizes:
                runs.append(TileRun(start, start // 2 + gap, start // 32 + gap, size))
                start += math.prod(size) + gap
            table, values = TileTable(runs, float4.TILE), random(start, dtype).nan_to_num(0, 1, 1)
            for run in runs[:1]:
                values[run.values : run.values + 32] = 0
                values[run.values + 32 : run.values + 64] = torch.arange(32) / 8
                values[run.values + 64 : run.values + 96] *= 1e-37
            for special in (None, math.nan, math.inf):
                if special is not None and sizes:
                    values[runs[0].values + 100] = special
                ones = (
                    torch.full((start // 2 + gap + 9,), 77, dtype=torch.uint8),
                    torch.full((start // 32 + gap + 9,), 77, dtype=torch.int8),
                )
                twos = tuple(each.to(device, copy=True) for each in ones)
                twin(float4.quantize, values, ones[0], table, ones[1])
                kernel(float4.quantize, values.to(device), twos[0], table, twos[1])
                same(twos[1], ones[1], f"exponents {dtype} {sizes} {special}")
                if special is None:  # The codes of a tile that is NaN mean nothing.
                    same(twos[0], ones[0], f"codes {dtype} {sizes}")
                back = random(start, dtype, seed=2)
                there = back.clone().to(device)
                twin(float4.dequantize, back, ones[0], table, ones[1])
                kernel(float4.dequantize, there, ones[0].to(device), table, ones[1].to(device))
                same(there, back, f"values {dtype} {sizes} {special}")


def adam8bit(device):
    """Parameters, codes and scales bitwise, over steps, of several parameters in one launch; a NaN stays in its block."""
    configurations = [
        ((32, 32), "dynamic", torch.float32, torch.float32, None),
        ((8, 24), "linear", torch.float32, torch.bfloat16, None),
        ((1, 256), "dynamic", torch.bfloat16, torch.bfloat16, None),
        ((16, 16), "dynamic", torch.bfloat16, torch.float32, 0xFEDCBA98),
        ((32, 32), "dynamic", torch.float32, torch.float32, None),
    ]
    for place, (block, code, dtype, gradient_dtype, key) in enumerate(configurations):
        shapes = [(64, 96)] if place == 4 else [(2, 35, 50), (40, 70), (33, 1)]
        policy = BlockPolicy(block, 0)
        regions = [tuple(regions_of(Placed(shape, (), ()), (), policy, most=2000)) for shape in shapes]
        assert len(regions[0]) > 1
        generator = torch.Generator().manual_seed(place)
        params = [torch.randn(math.prod(shape), generator=generator).to(dtype) for shape in shapes]
        ones = [(param, _moments(policy, shape)) for param, shape in zip(params, shapes, strict=True)]
        twos = [(param.to(device, copy=True), Moments(*(each.to(device) for each in moments))) for param, moments in
                [(param, _moments(policy, shape)) for param, shape in zip(params, shapes, strict=True)]]  # fmt: skip
        for step in range(1, 5):
            numbers = [
                AdamStep(0.99, 0.01 * i, 0.9, 0.99, 1e-8, 0.01 / (1 - 0.9**step), (1 - 0.99**step) ** -0.5, key)
                for i in range(len(shapes))
            ]
            gradients = [(torch.randn(param.shape, generator=generator) * 10.0**-step).to(gradient_dtype) for param in params]
            if step == 3:
                gradients[0][:500] = 0
            if step == 4:
                gradients[0][5] = math.nan
            for params_of, choose in ((ones, twin), (twos, kernel)):
                updates = BlockUpdates(block, code)
                versions = [tensor._version for param, moments in params_of for tensor in (param, *moments)]
                for number, gradient, (param, moments), parts in zip(numbers, gradients, params_of, regions, strict=True):
                    if choose is kernel and place in (3, 4):
                        number = _on_device(number, param.device)  # noqa: PLW2901
                    choose(updates.add, parts, number, param, gradient.to(param.device), moments)
                choose(updates.run)
                now = [tensor._version for param, moments in params_of for tensor in (param, *moments)]
                assert all(after > before for before, after in zip(versions, now, strict=True)), (
                    "a write that torch does not see"
                )
            for (a, one), (b, two) in zip(ones, twos, strict=True):
                same(b, a, f"parameter {configurations[place]} {step}")
                for name, x, y in zip(Moments._fields, one, two, strict=True):
                    if step < 4 or "scales" in name:
                        same(y, x, f"{name} {configurations[place]} {step}")
        assert sum(int(scales.isnan().sum()) for scales in (ones[0][1].m_scales, ones[0][1].v_scales)) == 2


def _on_device(number, device):
    """The same scalars as a capturable optimizer has them: those that change from step to step are tensors."""
    floats = {name: torch.tensor(getattr(number, name), dtype=torch.float64, device=device)
              for name in ("shrink", "step_size", "correction")}  # fmt: skip
    key = None if number.rounding_key is None else torch.tensor(number.rounding_key, device=device)
    return dataclasses.replace(number, **floats, rounding_key=key)


def _moments(policy, shape):
    numel, count = math.prod(shape), math.prod(policy.grid(shape))
    codes, scales = torch.zeros(numel, dtype=torch.uint8), torch.zeros(count)
    return Moments(codes, scales, codes.clone(), scales.clone())


def adam8bit_codes(device):
    """Every number near the edge of a cell gets the same code from the kernel's arithmetic as from the twin's."""
    from kernel_probes import encode_kernel

    for kind in ("dynamic", "linear"):
        for signed in (True, False):
            book = code_book(kind, signed, torch.device("cpu"))
            edges = torch.cat([book, (book[1:] + book[:-1]) / 2, 10 ** torch.linspace(-10, 0, 3000)])
            values = torch.cat([edges, edges.nextafter(torch.tensor(2.0)), edges.nextafter(torch.tensor(-2.0))]).clamp(-1, 1)
            values = values if signed else values.abs()
            codes = torch.empty(len(values), dtype=torch.uint8, device=device)
            numel, is_dynamic = len(values), kind == "dynamic"
            encode_kernel[(-(-numel // 1024),)](
                values.to(device), codes, numel, is_dynamic, signed, 1024, enable_fp_fusion=False
            )
            same(codes, encode(values, kind, signed), f"{kind} {signed}")


def symmetric(device, takes_all=True):
    """Exactly symmetric, within the documented bound of float64; sizes and columns of any kind, transposed, in batches."""
    from torch_ragged._kernels import _triton_symmetric as kernels

    smallest, symmetric_products.FEWEST_ROWS = symmetric_products.FEWEST_ROWS, 0
    cases = list(itertools.product(((130, 70), (2, 64, 200), (1, 1), (2, 300, 33), (3, 0), (0, 5, 5)), (False, True)))
    configurations = kernels.CONFIGURATIONS
    if not takes_all:
        cases = [((130, 70), False), ((2, 64, 200), True), ((3, 0), False), ((0, 5, 5), True)]
        configurations = {each.tile: each for each in configurations}.values()
    try:
        for shape, transposed in cases:
            x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
            x = x.mT.contiguous().mT if transposed else x
            product = kernel(symmetric_products.gram, x.to(device)).cpu()
            near(product, x, x, None, 0.0, 1.0)
            squared = kernel(symmetric_products.polynomial, product.to(device), -4.775, 2.0315).cpu()
            near(squared, product, product, product, -4.775, 2.0315)
        x = torch.randn(300, 70).bfloat16()
        for configuration in configurations:
            near(kernels.product(x.to(device), None, 0.0, 1.0, configuration).cpu(), x, x, None, 0.0, 1.0)
    finally:
        symmetric_products.FEWEST_ROWS = smallest
    assert same_bits(kernel(symmetric_products.gram, x), x @ x.mT), "small ones are torch's"


def some_symmetric(device):
    """Of :func:`symmetric`, a case of each kind: the interpreter takes half a second for a product."""
    symmetric(device, takes_all=False)


def near(product, x, y, addend, beta, alpha):
    """``product`` against float64, and its own transpose."""
    x, y = x.double(), y.double()
    exact, size = alpha * x @ y.mT, abs(alpha) * x.abs() @ y.abs().mT
    if addend is not None:
        exact, size = exact + beta * addend.double(), size + abs(beta) * addend.double().abs()
    bound = (x.shape[-1] + 2) * 2.0**-24 * size
    bound = bound + 2.0**-8 * (exact.abs() + bound) + 1e-38
    assert product.dtype == torch.bfloat16 and product.shape == exact.shape
    assert bool(((product.double() - exact).abs() <= bound).all()), (product.shape, (product.double() - exact).abs().max())
    assert same_bits(product, product.mT)


def same_bits(a, b):
    return torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))


def training(device):
    """What fully_shard and AdamW8bit make by the kernels: gathered parameters, gradients and states as with the twins."""
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(os.path.join(folder, "store"), 1)
        dist.init_process_group("gloo" if device == "cpu" else "nccl", store=store, rank=0, world_size=1)
        try:
            one, two = twin(_train, device), kernel(_train, device)
        finally:
            dist.destroy_process_group()
    assert list(one) == list(two) and len(one) > 12
    for name in one:
        same(two[name], one[name], name)


def _train(device):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(140, 130), torch.nn.Linear(130, 140))
    policy = Float8Policy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(net, mesh=init_device_mesh(device, (1,)), mp_policy=policy, reshard_after_forward=False)
    optimizer, found = AdamW8bit(net.parameters(), lr=0.01), {}
    for step in range(2):
        net(torch.ones(3, 140, device=device)).float().square().sum().backward()
        found |= {f"gradient of {name} {step}": param.grad.to_local() for name, param in net.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    found |= {name: param.detach().to_local().clone() for name, param in net.named_parameters()}
    for name, param in net.named_parameters():
        for key, value in optimizer.state[param].items():
            found[f"{name} {key}"] = value.to_local() if isinstance(value, DTensor) else value
    net.unshard()
    return found | {f"gathered {name}": param.detach().clone() for name, param in net.named_parameters()}


_EVERY = (casts, float4_tiles, float8_tiles, adam8bit, adam8bit_codes, symmetric, training)
CASES = {function.__name__: function for function in _EVERY}
QUICK = {function.__name__: function for function in (casts, float4_tiles, adam8bit_codes, some_symmetric, training)}


def main():
    _choice.choose("triton")
    results = {}
    for name, function in {**CASES, **QUICK}.items():
        if name not in (sys.argv[1:] or CASES):
            continue
        try:
            function("cpu")
            results[name] = ""
        except Exception:
            results[name] = traceback.format_exc()[-3000:]
    print(json.dumps(results))


if __name__ == "__main__":
    main()
