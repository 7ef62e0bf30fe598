"""The kernel of random numbers by Triton's interpreter, against NumPy: what it writes, where, and what a trial makes of it.

``TRITON_INTERPRET=1 python test/kernels/philox_cases.py`` runs all cases on the CPU and prints what went wrong, as JSON.
"""

import contextlib
import itertools
import json
import math
import os
import random
import sys
import traceback
from unittest.mock import patch

import numpy as np
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

FOLDER = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.join(FOLDER, "..", "common"), os.path.join(FOLDER, "..", "..")]

import numpy_philox as reference  # noqa: E402

from torch_ragged import RaggedShard  # noqa: E402
from torch_ragged._kernels import _choice, distributions, philox  # noqa: E402
from torch_ragged._kernels.distributions import distribution_of  # noqa: E402
from torch_ragged._kernels.philox import Grid  # noqa: E402
from torch_ragged._kernels.regions import Drawn, regions  # noqa: E402
from torch_ragged.tensor import _counter, _draw  # noqa: E402
from torch_ragged.tensor._ownership import owned  # noqa: E402
from torch_ragged.tensor._sampler import Sampler  # noqa: E402
from torch_ragged.tensor.placement_types import cuts_of  # noqa: E402

aten = torch.ops.aten
random_from = getattr(aten.random_, "from")
SEEDS = (0, 1, 2**31 + 5, 2**32 - 1, 2**63 + 2**40 + 3, 2**64 - 1)
OFFSETS = (0, 4, 2**31 + 4, 2**34 - 8, 2**34 + 12, 2**60)
GRIDS = (256, 768, 2048)


class Generator:
    """A CUDA generator without a GPU."""

    def __init__(self, device=None):
        self.seed, self.offset = 0, 0

    def manual_seed(self, seed):
        self.seed, self.offset = seed, 0
        return self

    def initial_seed(self):
        return self.seed

    def get_offset(self):
        return self.offset

    def set_offset(self, offset):
        assert offset % 4 == 0
        self.offset = offset
        return self

    def get_state(self):
        return self.seed, self.offset

    def set_state(self, state):
        self.seed, self.offset = state


def expected(distribution, dtype, numel, most, seed, offset):
    """What torch would draw, as a tensor of ``dtype``, and the offset behind it. Normal numbers are float64."""
    one, two, high = distribution.floats
    is_wide = distribution.lanes == 2
    numbers = {
        "normal": reference.normals_64 if is_wide else reference.normals,
        "integers": reference.integers_64 if is_wide else reference.integers,
    }.get(distribution.kind, reference.uniforms_64 if is_wide else reference.uniforms)
    values, after = reference.drawn(numbers, distribution.lanes, numel, most, seed, offset)
    if distribution.kind == "uniform":
        values = torch.from_numpy(values.astype(np.float64) * two + one).to(dtype)  # Exact, then rounded once.
        return torch.where(values == high, torch.tensor(one, dtype=dtype), values), after
    if distribution.kind == "normal":
        return torch.from_numpy(values * two + one), after
    if distribution.kind == "bernoulli":
        return torch.from_numpy(values.astype(np.float64) < one).to(dtype), after
    first, count = distribution.integers
    values = (values % np.uint64(count)).astype(np.int64) + np.int64(first)
    values = torch.from_numpy(values)
    return (values.float().to(dtype) if dtype.is_floating_point and dtype != torch.float64 else values.to(dtype)), after


def check(ours, theirs, distribution, what):
    if distribution.kind != "normal":
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), (what, ours, theirs)
        return
    # NumPy's float32 functions, and angles of up to 2 pi that are rounded twice: a GPU's bits are another question.
    tolerance = 2e-14 if ours.dtype == torch.float64 else 6e-6 if ours.dtype == torch.float32 else torch.finfo(ours.dtype).eps
    difference = (ours.double() - theirs).abs()
    assert bool((difference <= tolerance * abs(distribution.floats[1]) * theirs.abs().clamp(1)).all()), (what, difference.max())


DTYPES = distributions.FLOATS + distributions.INTEGERS
DRAWS = [
    *((aten.uniform_.default, bounds, dtype) for dtype in distributions.FLOATS for bounds in ((), (-1.0, 1.0), (0.25, 0.75))),
    *((aten.normal_.default, args, dtype) for dtype in distributions.FLOATS for args in ((), (0.3, 1.7))),
    *((aten.bernoulli_.float, (p,), dtype) for dtype in DTYPES for p in (0.0, 0.3, 1.0)),
    *((aten.random_.default, (), dtype) for dtype in DTYPES),
    *((aten.random_.to, (2,), dtype) for dtype in DTYPES),
    *((random_from, bounds, torch.int64) for bounds in ((-7, 1000), (-(2**62), 2**63 - 1), (-5, None), (-(2**63) + 1, None))),
    *((random_from, (first, first + 2**28 - step), torch.int32) for first in (-(2**31), 3) for step in (0, 1)),
    *((random_from, (-100, 100), dtype) for dtype in (torch.int8, torch.float16, torch.bfloat16, torch.float64)),
]


def numbers():
    """Each op, dtype and size of words, bitwise, of whole draws: small ones, of one call, with tails, of several calls."""
    sizes = itertools.cycle((1, 5, 255, 256, 257, 1000, 3071, 3073, 5000))
    cases = zip(DRAWS, itertools.cycle(SEEDS), itertools.cycle(OFFSETS[1:]), itertools.cycle(GRIDS), sizes)
    for (op, args, dtype), seed, offset, most, numel in cases:
        distribution = distribution_of(op, args, dtype)
        out = torch.zeros(numel, dtype=dtype)
        theirs, after = expected(distribution, dtype, numel, most, seed, offset)
        whole = [Drawn(0, 0, ((numel, 1, 1),))]
        philox.write_draw(out, whole, distribution, numel=numel, grid=Grid(most), seed=seed, offset=offset)
        what = f"{op} {args} {dtype} {numel} {most} {seed} {offset}"
        check(out, theirs, distribution, what)
        assert offset + Grid(most).steps(numel, distribution.lanes) == after, what


def high_bounds():
    """A number that is rounded to the upper bound becomes the lower one: in bfloat16 it happens once in 500 numbers."""
    distribution = distribution_of(aten.uniform_.default, (-1.0, 1.0), torch.bfloat16)
    theirs, _ = expected(distribution, torch.bfloat16, 20000, 2048, 3, 4)
    out = torch.zeros(20000, dtype=torch.bfloat16)
    philox.write_draw(out, [Drawn(0, 0, ((20000, 1, 1),))], distribution, numel=20000, grid=Grid(2048), seed=3, offset=4)
    assert torch.equal(out, theirs) and not (out == 1).any() and int((out == -1).sum()) > 20


def fused_bounds():
    """Bounds whose product and sum are not exact: at most the last bit differs where the interpreter does not fuse them."""
    distribution = distribution_of(aten.uniform_.default, (-0.7, 0.9), torch.float32)
    theirs, _ = expected(distribution, torch.float32, 5000, 768, 3, 4)
    out = torch.zeros(5000)
    philox.write_draw(out, [Drawn(0, 0, ((5000, 1, 1),))], distribution, numel=5000, grid=Grid(768), seed=3, offset=4)
    assert bool(((out - theirs).abs() <= 2.0**-24).all())


def counters():
    """All 64 bits of seed and offset count."""
    distribution = distribution_of(aten.random_.default, (), torch.int32)
    seen = set()
    for seed, offset in itertools.product(SEEDS, OFFSETS):
        out = torch.zeros(3, dtype=torch.int32)
        philox.write_draw(out, [Drawn(0, 0, ((3, 1, 1),))], distribution, numel=3, grid=Grid(256), seed=seed, offset=offset)
        assert torch.equal(out, expected(distribution, torch.int32, 3, 256, seed, offset)[0]), (seed, offset)
        seen.add(tuple(out.tolist()))
    assert len(seen) == len(SEEDS) * len(OFFSETS)


def places():
    """Intervals and strided boxes of up to six dimensions, into tensors of other strides; nothing else is written."""
    rng, distribution = random.Random(0), distribution_of(random_from, (0, 2**27), torch.int32)
    seen = {"dims": set(), "launches": set()}
    for number in range(40):
        shape = tuple(rng.choice((1, 2, 3, 5, 6)) for _ in range(rng.randint(1, 6)))
        numel, most = math.prod(shape), rng.choice(GRIDS)
        theirs, _ = expected(distribution, torch.int32, numel, most, 5, 4 * number)
        steps = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        box = [sorted(rng.sample(range(size + 1), 2)) for size in shape]
        sizes = [stop - start for start, stop in box]
        memory = torch.full((2 * math.prod(size + 1 for size in sizes) + 7,), -1, dtype=torch.int32)
        order = rng.sample(range(len(shape)), len(shape))
        strides, stride = [0] * len(shape), 1 + number % 2
        for dim in order:  # Gaps between rows, or none.
            strides[dim], stride = stride, stride * (sizes[dim] + number % 3 // 2)
        region = Drawn(sum(a * step for (a, _), step in zip(box, steps)), 3, tuple(zip(sizes, steps, strides)))
        found = regions([region])
        seen["dims"].add(max(len(part.dims) for part in found))
        seen["launches"].add(min(len(found), 2))
        philox.write_draw(memory, found, distribution, numel=numel, grid=Grid(most), seed=5, offset=4 * number)
        mine = memory.as_strided(sizes, strides, 3)
        assert torch.equal(mine, theirs.view(shape)[tuple(slice(a, b) for a, b in box)]), (shape, box, strides)
        mine.fill_(-1)
        assert bool((memory == -1).all()), (shape, box, strides)
    assert seen["dims"] == {1, 2, 3, 4} and seen["launches"] == {1, 2}, seen


def placements():
    """draw_owned by the kernel: what ranks own of whole draws, in each order of memory, and of draws that torch cuts."""
    rng, seen = random.Random(1), {"cut": 0, "permuted": 0, "ragged": 0, "launches": []}
    ops = [(aten.uniform_.default, (), torch.float32), (aten.random_.default, (), torch.int64)]
    ops += [(aten.bernoulli_.float, (0.4,), torch.bool)]
    for number in range(20):
        op, args, dtype = rng.choice(ops)
        shape = tuple(rng.choice((2, 3, 4, 8, 12)) for _ in range(rng.randint(1, 4)))
        order = rng.sample(range(len(shape)), len(shape)) if rng.random() < 0.7 else list(range(len(shape)))
        like = torch.empty([shape[dim] for dim in order], dtype=dtype).permute([order.index(dim) for dim in range(len(shape))])
        most, numel = rng.choice(GRIDS), math.prod(shape)
        few = [max(100, numel * dtype.itemsize // parts) for parts in (3, 5)]  # The interpreter takes 20 ms for a launch.
        limit = rng.choice((*(few if "TRITON_INTERPRET" in os.environ else (100, 200)), 2**31 - 1))
        distribution = distribution_of(op, args, dtype)
        cut, offset = list(halves(numel, dtype.itemsize, limit)), 4 * number
        after = offset + (Grid(most).steps(numel, distribution.lanes) if len(cut) > 1 else 0)
        parts = []
        for length in cut:
            part, after = expected(distribution, dtype, length, most, number, after)
            parts.append(part)
        whole = torch.empty_like(like)
        whole.as_strided((numel,), (1,)).copy_(torch.cat(parts))
        mesh_shape, placements = random_layout(rng, shape)
        generator, way = Generator(), _counter.Kernel(distribution, Grid(most))
        checks = []
        sampler = Sampler(lambda chunk, *args, generator: checks.append(len(chunk)), args, dtype, generator)
        for coordinate in itertools.product(*map(range, mesh_shape)):
            held = owned(shape, mesh_shape, cuts_of(placements), coordinate)
            boxes, local = [box for box in held.boxes if box.numel], torch.zeros(held.local_shape, dtype=dtype)
            if not held.flat and rng.random() < 0.5:  # Of other strides.
                local = torch.zeros(held.local_shape[::-1], dtype=dtype).permute(*range(local.ndim)[::-1])
            version = local._version
            generator.manual_seed(number).set_offset(offset)
            with patch.object(_draw, "way_of", lambda *_, way=way: way), patch.object(philox, "_MOST_DRAWN_BYTES", limit):
                with launches() as launched:
                    _draw.draw_owned(sampler, shape, like.stride(), boxes, local)
            what = f"{op} {shape} {like.stride()} {placements} {coordinate} {most} {limit}"
            assert generator.offset == after, what
            assert local._version > version or not boxes, "a write that torch does not see"
            if len(cut) == 1:
                seen["launches"].append(len(launched))
            flat = local.contiguous().view(-1)
            for box in boxes:
                index = tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes))
                assert torch.equal(flat.as_strided(box.sizes, box.local_strides, box.local_offset), whole[index]), what
        assert set(checks) == {0}, "torch checks arguments, and draws nothing"
        seen["cut"] += len(cut) > 1
        seen["permuted"] += not like.is_contiguous()
        seen["ragged"] += held.flat
    assert min(seen["cut"], seen["permuted"], seen["ragged"]) > 3, seen
    assert sum(seen["launches"]) / len(seen["launches"]) < 1.3, "nearly all draws are one launch"


def random_layout(rng, shape):
    """A mesh shape, and placements that cut a tensor of ``shape``."""
    mesh_shape = tuple(rng.randint(1, 3) for _ in range(rng.randint(1, 2)))
    if rng.random() < 0.4:
        size, ranks = math.prod(shape), mesh_shape[0]
        bounds = [0, *sorted(rng.randint(0, size) for _ in range(ranks - 1)), size]
        dims = tuple(range(len(shape)))
        return mesh_shape[:1], (RaggedShard(dims, tuple(b - a for a, b in itertools.pairwise(bounds))),)
    kinds = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
    kinds += [_StridedShard(dim, split_factor=2) for dim in range(len(shape)) if shape[dim] % 2 == 0]
    return mesh_shape, tuple(rng.choice(kinds) for _ in mesh_shape)


def halves(numel, itemsize, limit):
    """How torch cuts a dense tensor."""
    if 1 + (numel - 1) * itemsize <= limit:
        return [numel]
    return [*halves(numel // 2, itemsize, limit), *halves(numel - numel // 2, itemsize, limit)]


@contextlib.contextmanager
def launches():
    from torch_ragged._kernels import _triton_philox

    launched, draw = [], _triton_philox.launch_draw
    with patch.object(_triton_philox, "launch_draw", lambda *args: launched.append(args) or draw(*args)):
        yield launched


def masks():
    """native_dropout's masks: neighbours in the order of memory, or single elements in the order of the shape."""
    shapes = [((32, 40), 8), ((31, 4), 8), ((15, 2), 8), ((9, 13), 8), ((3, 256, 8), 4), ((32, 40), 2)]
    generator = Generator()
    gpu = {"_has_counter": lambda _: True, "_default_generator": lambda _: generator}
    for number, (shape, vector) in enumerate(shapes):
        numel, most = math.prod(shape), GRIDS[number % 3]
        dtype, wide = (torch.float64, np.float64) if vector == 2 else (torch.float32, np.float32)
        grid_of, vector_of = lambda _, most=most: Grid(most), lambda *_, vector=vector: vector
        of_size = math.gcd(vector, numel)
        for is_turned in (False, True):
            like = torch.empty(shape[::-1]).permute(*range(len(shape))[::-1]) if is_turned else torch.empty(shape)
            theirs, after = reference.kept(0.3, numel, most, 11, 8, of_size, wide)
            whole = torch.empty_like(like, dtype=torch.bool)
            if of_size > 1:
                whole.as_strided((numel,), (1,)).copy_(torch.from_numpy(theirs))
            else:
                whole.copy_(torch.from_numpy(theirs).view(shape))
            for rank in range(2):
                held = owned(shape, (2,), cuts_of((Shard(1),)), (rank,))
                mask = torch.zeros(held.local_shape, dtype=torch.bool)
                generator.manual_seed(11).set_offset(8)
                with patch.multiple(_counter, **gpu, _vector_of=vector_of), patch.object(philox, "grid_of", grid_of):
                    factor = _counter.draw_kept(0.3, dtype, shape, like.stride(), held.boxes, mask)
                what = (shape, vector, is_turned, rank)
                assert torch.equal(mask, whole.chunk(2, 1)[rank]) and generator.offset == after, what
                assert factor == float(wide(1 / float(wide(0.7)))), what


def trials():
    """A trial accepts torch's rule, and refuses each other one: bits, lanes, neighbours, steps of the generator."""
    grid, device = Grid(512), torch.device("cpu")

    def torch_op(wrong):
        def fill(chunk, *args, generator):
            distribution = distribution_of(op, args, chunk.dtype)
            most = 256 if wrong == "grid" else 512
            drawn, after = expected(distribution, chunk.dtype, len(chunk), most, generator.seed, generator.offset)
            chunk.copy_(drawn)
            generator.offset = after + 4 * (wrong == "steps")
            if wrong == "bits":
                chunk[-1] += 1
            if wrong == "turns":  # Of a large draw: from the second turn on.
                chunk[grid.most * distribution.lanes :] += 1

        return fill

    for lanes, dtype in ((4, torch.int32), (2, torch.int64), (2, torch.int32)):
        op, args = distributions.example("integers", lanes, dtype)
        for wrong in (None, "grid", "steps", "bits", "turns"):
            _counter._draws_as_torch.cache_clear()
            example = patch.object(_counter, "example", lambda *_, wrong=wrong: (torch_op(wrong), args))
            real = patch.object(_counter, "distribution_of", lambda _, args, dtype: distribution_of(op, args, dtype))
            with example, real, patch.object(philox, "grid_of", lambda _: grid), patch.object(torch, "Generator", Generator):
                assert _counter._draws_as_torch("integers", lanes, dtype, device) == (wrong is None), (lanes, dtype, wrong)
    generator = Generator().manual_seed(77).set_offset(16)

    def native_dropout(values, p, train):
        numel, vector = len(values), math.gcd(theirs, len(values))
        mask, generator.offset = reference.kept(p, numel, 512, generator.seed, generator.offset, vector)
        mask = torch.from_numpy(mask)
        if not are_odd_alike and numel % 2:
            mask[-1] = ~mask[-1]
        return values.mul(mask).mul_(float(np.float32(1 / float(np.float32(1 - p))))), mask

    rules = [(4, torch.float32, True), (8, torch.float32, True), (8, torch.bfloat16, True), (16, torch.bfloat16, True)]
    for theirs, dtype, are_odd_alike in [*rules, (4, torch.float32, False)]:
        _counter._vector_of.cache_clear()
        gpu = patch.object(_counter, "_default_generator", lambda _: generator)
        with gpu, patch.object(philox, "grid_of", lambda _: grid), patch.object(torch, "native_dropout", native_dropout):
            found = None if theirs == 16 or not are_odd_alike else theirs
            assert _counter._vector_of(dtype, device) == found, (theirs, dtype, are_odd_alike)
        assert generator.get_state() == (77, 16), "a trial leaves the generator as it was"


def failures():
    """Where Triton cannot run, the trial says so once, and torch draws."""
    args = "integers", 4, torch.int32, torch.device("cpu")
    _counter._draws_as_torch.cache_clear()

    def no_compiler(*_, **__):
        raise RuntimeError("no C compiler")

    def fill(chunk, *args, generator):
        pass

    example = patch.object(_counter, "example", lambda *_: (fill, (3, 100)))
    real = patch.object(_counter, "distribution_of", lambda _, args, dtype: distribution_of(random_from, args, dtype))
    there = patch.object(philox, "grid_of", lambda _: Grid(512)), patch.object(torch, "Generator", Generator)
    with example, real, there[0], there[1], patch.object(philox, "write_draw", no_compiler):
        with patch.object(_counter._logger, "warning") as warning:
            assert not _counter._draws_as_torch(*args)
    assert "no C compiler" in str(warning.call_args)


FUNCTIONS = (numbers, high_bounds, fused_bounds, counters, places, placements, masks, trials, failures)
CASES = {function.__name__: function for function in FUNCTIONS}


def main():
    _choice.choose("triton")
    results = {}
    for name in sys.argv[1:] or CASES:
        try:
            CASES[name]()
            results[name] = ""
        except Exception:
            results[name] = traceback.format_exc()[-3000:]
    print(json.dumps(results))


if __name__ == "__main__":
    main()
