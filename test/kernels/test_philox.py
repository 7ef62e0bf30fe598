"""The numbers of torch's CUDA generator, without a GPU.

NumPy's Philox gives the published known answers, and the loops of torch's kernels, written in NumPy, give numbers that programs
printed on GPUs. The kernel equals these loops by Triton's interpreter (``philox_cases.py``).
"""

import importlib.util
import itertools
import math
import random
from unittest.mock import patch

import numpy as np
import numpy_philox as reference
import philox_cases
import pytest
import torch
from processes import answers_of

from torch_ragged._kernels import distributions, philox
from torch_ragged._kernels.distributions import distribution_of
from torch_ragged._kernels.philox import Grid, pieces
from torch_ragged._kernels.regions import Drawn, regions

aten = torch.ops.aten
random_from = getattr(aten.random_, "from")
A100, RTX_2080_TI, RTX_3060 = 108 * 2048, 68 * 1024, 28 * 1536
"""Multiprocessors times threads that each holds."""


@pytest.mark.parametrize(
    "counter, key, expected",
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_the_known_answers_of_random123(counter, key, expected):
    counter, key, expected = ([int(word, 16) for word in text.split()] for text in (counter, key, expected))
    assert [int(word) for word in reference.philox4x32(counter, key)] == expected


def rand(numel, most, seed=0, offset=0):
    return reference.drawn(reference.uniforms, 4, numel, most, seed, offset)


def randn(numel, most, seed=0, offset=0):
    return reference.drawn(reference.normals, 4, numel, most, seed, offset)


def test_loops_give_the_first_numbers_that_gpus_print():
    """torch.rand and torch.randn with device="cuda", after torch.manual_seed."""
    printed = (0.3990, 0.5167, 0.0249, 0.9401, 0.9459, 0.7967, 0.4150, 0.8203)
    assert np.allclose(rand(8, A100)[0], printed, rtol=0, atol=6e-5)
    for seed, printed in ((0, (-0.9247, -0.4253, -2.6438, 0.1452, -0.1209)), (42, (0.1940, 2.1614, -0.1721, 0.8491, -1.9244))):
        assert np.allclose(randn(5, A100, seed)[0], printed, rtol=0, atol=6e-5)


@pytest.mark.parametrize(
    "most, last",
    [(A100, (0.6724, 1.2141, 0.9733)), (RTX_2080_TI, (1.1495, 0.9265, 1.1323)), (RTX_3060, (1.3374, 1.4960, 0.9115))],
)
def test_loops_give_the_sums_that_three_kinds_of_gpus_print(most, last):
    """Triton's first tutorial prints the ends of ``torch.rand(98432) + torch.rand(98432)``: lanes, and where a draw ends."""
    one, after = rand(98432, most)
    two, _ = rand(98432, most, 0, after)
    total = one + two
    assert np.allclose(total[:3], (1.3713, 1.3076, 0.4940), rtol=0, atol=6e-5)
    assert np.allclose(total[-3:], last, rtol=0, atol=6e-5)


def test_loops_give_the_matrix_product_that_an_a100_prints():
    """Triton's third tutorial: of two ``torch.randn((512, 512))`` in float16. The last rows are of the second lane."""
    one, after = randn(512 * 512, A100)
    two, _ = randn(512 * 512, A100, 0, after)
    one, two = (half.astype(np.float16).astype(np.float64).reshape(512, 512) for half in (one, two))
    corners = [one[row] @ two[:, column] for row, column in ((0, 0), (0, -1), (-2, 1), (-1, 0), (-1, 2), (-1, -1))]
    assert np.allclose(corners, (-10.9531, -26.4219, -16.8281, -17.0938, -0.3831, -13.2188), rtol=0, atol=0.02)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_the_kernel_equals_the_loops_by_the_interpreter():
    answers = answers_of("philox_cases.py", *philox_cases.CASES, TRITON_INTERPRET="1")
    assert len(answers) == 9 and not any(answers.values()), "\n".join(f"{name}: {text}" for name, text in answers.items())


def test_a_draw_moves_the_generator_as_the_loops_do():
    for numel, most, lanes in itertools.product((1, 256, 257, 1000, 1024, 4096, 4097, 100_000), (256, 1024, 3072), (4, 2)):
        numbers = {4: reference.integers, 2: reference.integers_64}[lanes]
        threads = reference.threads_of(numel, most)
        assert Grid(most).threads(numel) == threads
        assert Grid(most).steps(numel, lanes) == reference.drawn(numbers, lanes, numel, most, 0, 8)[1] - 8
        if lanes == 4:
            assert Grid(most).steps(numel, lanes) == reference.kept(0.5, numel, most, 0, 8, 1)[1] - 8


def test_a_grid_is_read_from_the_device(monkeypatch):
    class Properties:
        multi_processor_count, max_threads_per_multi_processor = 132, 2048 + 100  # Whole blocks of 256.

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    philox.grid_of.cache_clear()
    assert philox.grid_of(torch.device("cuda", 7)) == Grid(132 * 2048)
    philox.grid_of.cache_clear()


def split_by_extent(sizes, strides, itemsize, most):
    """As TensorIterator does it: the dimension whose ends lie farthest apart is halved, the first half comes first."""
    numel = math.prod(sizes)
    if numel <= most and 1 + sum((size - 1) * stride * itemsize for size, stride in zip(sizes, strides)) <= most:
        return [numel]
    dim = max(range(len(sizes)), key=lambda dim: (sizes[dim] - 1) * strides[dim])
    parts = (sizes[dim] // 2, sizes[dim] - sizes[dim] // 2)
    return [n for part in parts for n in split_by_extent([*sizes[:dim], part, *sizes[dim + 1 :]], strides, itemsize, most)]


def test_draws_of_two_gibibytes_are_cut():
    assert list(pieces((2**29 - 1,), (1,), 4)) == [2**29 - 1]
    assert list(pieces((2**29 + 1,), (1,), 4)) == [2**28, 2**28 + 1]
    assert list(pieces((128256, 8192), (8192, 1), 4)) == [64128 * 8192] * 2
    assert list(pieces((3, 2**30), (2**30, 1), 1)) == [3 * 2**29, 3 * 2**29], "contiguous dimensions are one"
    rng = random.Random(0)
    for _ in range(200):
        sizes, strides, stride = [rng.randint(1, 6) for _ in range(rng.randint(1, 4))], [], rng.randint(1, 3)
        for size in reversed(sizes):  # With gaps after each dimension, so that no two are one.
            strides.insert(0, stride)
            stride = stride * size + rng.randint(1, 9) * (size > 1)
        most = rng.randint(40, 2000)
        with patch.object(philox, "_MOST_DRAWN_BYTES", most):
            found = list(pieces(sizes, strides, 4))
        is_joined = any(a == size * b for a, b, size in zip(strides, strides[1:], sizes[1:]))
        assert sum(found) == math.prod(sizes) and (is_joined or found == split_by_extent(sizes, strides, 4, most))


def elements(region):
    """Pairs of an element of the draw and an offset in the tensor."""
    for place in itertools.product(*(range(size) for size, _, _ in region.dims)):
        yield (
            region.start + sum(i * step for i, (_, step, _) in zip(place, region.dims)),
            region.offset + sum(i * stride for i, (_, _, stride) in zip(place, region.dims)),
        )


def test_regions_are_the_same_elements_in_few_launches():
    rng = random.Random(0)
    for _ in range(300):
        dims = tuple((rng.randint(1, 3), rng.randint(1, 9), rng.randint(1, 9)) for _ in range(rng.randint(0, 6)))
        count, apart = rng.randint(1, 4), rng.choice(((50, 7), (3, 3), (1, 1), (-9, 4)))
        found = [Drawn(100 + i * apart[0], i * apart[1], dims) for i in range(count)]
        found += [Drawn(5, 0, ((1, 4, 4),))] * rng.randint(0, 1)
        few = regions(found)
        assert sorted(pair for region in few for pair in elements(region)) == sorted(
            pair for region in found for pair in elements(region)
        )
        assert all(1 <= len(region.dims) <= 4 for region in few)
        if len(dims) <= 3:
            assert len(few) <= 2
    ragged = [Drawn(4, 0, ((2, 1, 1),)), Drawn(6, 2, ((3, 6, 6), (6, 1, 1))), Drawn(24, 20, ((1, 6, 6), (5, 1, 1)))]
    assert regions(ragged) == [Drawn(4, 0, ((25, 1, 1),))], "the boxes of an interval are one interval"


def test_the_kernel_leaves_to_torch_what_it_does_not_know():
    integers = distributions.INTEGERS
    for op, args, dtype in [
        *(
            (op, (), dtype)
            for op in (aten.uniform_.default, aten.normal_.default)
            for dtype in (torch.complex64, torch.float8_e5m2)
        ),
        *((op, (1.0,), torch.float32) for op in (aten.exponential_.default, aten.geometric_.default, aten.log_normal_.default)),
        (aten.cauchy_.default, (), torch.float32),
        (aten.random_.default, (), torch.uint16),
        (random_from, (-(2**63), None), torch.int64),
        (random_from, (0, 2**24 + 2), torch.float32),
        (random_from, (-(2**11) - 1, 0), torch.float16),
        (random_from, (5, 5), torch.int64),
    ]:
        assert distribution_of(op, args, dtype) is None, (op, args, dtype)
    assert distribution_of(random_from, (0, 2**28 - 1), torch.int32).lanes == 4
    assert distribution_of(random_from, (0, 2**28), torch.int32).lanes == 2
    assert distribution_of(random_from, (0, 2**24 + 1), torch.float32).integers == (0, 2**24 + 1)
    for dtype in integers:  # torch's own numbers on a CPU have the same bounds.
        first, count = distribution_of(aten.random_.default, (), dtype).integers
        drawn = torch.empty(20000, dtype=dtype).random_(generator=torch.Generator().manual_seed(0))
        assert first == 0 and int(drawn.max()) < count <= 2 * int(drawn.max()) + 2
    for kind, dtype in itertools.product(("uniform", "normal", "bernoulli"), distributions.FLOATS):
        lanes = 2 if dtype == torch.float64 else 4
        op, args = distributions.example(kind, lanes, dtype)
        found = distribution_of(op, args, dtype)
        assert (found.kind, found.lanes) == (kind, lanes)
        op(torch.empty(3, dtype=dtype), *args)  # torch accepts it.


def test_empty_draws_check_arguments_and_draw_nothing():
    """What draw_by_counter relies on: torch's own errors, also on a rank that owns no element."""
    generator = torch.Generator().manual_seed(3)
    before = generator.get_state()
    for op, args in [
        (aten.uniform_.default, (1.0, 0.0)),
        (aten.normal_.default, (0.0, -1.0)),
        (aten.bernoulli_.float, (1.5,)),
        (aten.random_.to, (0,)),
        (random_from, (3, 3)),
        (aten.exponential_.default, (-1.0,)),
    ]:
        with pytest.raises(RuntimeError):
            op(torch.empty(0), *args, generator=generator)
    torch.empty(0).normal_(generator=generator)
    assert torch.equal(generator.get_state(), before)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
