"""draw_owned: a draw in chunks gives the values and the generator's state of one call, for every part of a tensor."""

import itertools
import math
import random
import unittest
from unittest.mock import patch

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.profiler import ProfilerActivity, profile

from torch_ragged import RaggedShard
from torch_ragged._kernels import philox
from torch_ragged.tensor import _counter, _draw
from torch_ragged.tensor._cut_placement import cuts_of
from torch_ragged.tensor._draw import draw_owned
from torch_ragged.tensor._ownership import owned, row_major
from torch_ragged.tensor._sampler import Sampler

aten = torch.ops.aten
OPS = {
    aten.normal_.default: (0.5, 2.0),
    aten.uniform_.default: (-1.0, 2.0),
    aten.exponential_.default: (1.5,),
    aten.geometric_.default: (0.3,),
    aten.cauchy_.default: (),
    aten.log_normal_.default: (),
    aten.random_.default: (),
    aten.random_.to: (7,),
    aten.bernoulli_.float: (0.3,),
}
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.complex64)


def random_layout(rng, shape):
    """A mesh shape, and placements that cut a tensor of ``shape``."""
    mesh_shape = tuple(rng.randint(1, 4) for _ in range(rng.randint(1, 3)))
    if rng.random() < 0.4 and math.prod(shape):
        length = rng.randint(0, len(shape))
        size, ranks = math.prod(shape[:length]), mesh_shape[0]
        bounds = [0, *sorted(rng.randint(0, size) for _ in range(ranks - 1)), size]
        first = RaggedShard(tuple(range(length)), tuple(b - a for a, b in itertools.pairwise(bounds)))
        return mesh_shape[:1], (first,)
    kinds = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
    kinds += [_StridedShard(dim, split_factor=2) for dim in range(len(shape)) if shape[dim] % 2 == 0]
    return mesh_shape, tuple(rng.choice(kinds) for _ in mesh_shape)


class DrawTest(unittest.TestCase):
    def test_random_draws_in_chunks_equal_one_call(self):
        rng, seen = random.Random(0), dict.fromkeys(("several chunks", "not contiguous", "flat"), 0)
        for number in range(350):
            op, dtype = rng.choice(list(OPS)), rng.choice(DTYPES)
            shape = tuple(rng.choice((1, 2, 3, 4, 5, 7)) for _ in range(rng.randint(0, 5)))
            order = rng.sample(range(len(shape)), len(shape)) if rng.random() < 0.4 else list(range(len(shape)))
            whole = torch.zeros([shape[dim] for dim in order], dtype=dtype).permute([order.index(d) for d in range(len(shape))])
            generator = torch.Generator().manual_seed(number)
            torch.empty(3).normal_(generator=generator)  # It may keep a number for the next draw.
            before = generator.get_state()
            try:
                op(whole, *OPS[op], generator=generator)
            except RuntimeError:  # Of a dtype that this op does not have.
                continue
            after = generator.get_state()
            mesh_shape, placements = random_layout(rng, shape)
            sampler = Sampler(op, OPS[op], dtype, generator)
            for coordinate in itertools.product(*map(range, mesh_shape)):
                held = owned(shape, mesh_shape, cuts_of(placements), coordinate)
                boxes = [box for box in held.boxes if box.numel]
                local = torch.zeros(held.local_shape, dtype=dtype)
                if not held.flat and local.ndim and rng.random() < 0.5:  # Of other strides.
                    local = torch.zeros(held.local_shape[::-1], dtype=dtype).permute(*range(local.ndim)[::-1])
                generator.set_state(before)
                with patch.object(_draw, "_CHUNK_BYTES", 256):
                    draw_owned(sampler, shape, whole.stride(), boxes, local)
                case = f"{op} {dtype} {shape} {whole.stride()} {placements} {coordinate}"
                self.assertTrue(torch.equal(generator.get_state(), after), case)
                flat = local.contiguous().view(-1)
                for box in boxes:
                    mine = flat.as_strided(box.sizes, box.local_strides, box.local_offset)
                    index = tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes))
                    self.assertTrue(torch.equal(mine, whole[index]), case)
            seen["several chunks"] += whole.numel() * dtype.itemsize > 512
            seen["not contiguous"] += not whole.is_contiguous()
            seen["flat"] += held.flat
        self.assertGreater(min(seen.values()), 35, seen)

    def test_normal_numbers_of_a_tensor_that_is_contiguous_in_its_last_dimension_only(self):
        """It has no blocks of 16, as any tensor that is not contiguous."""
        whole = torch.empty(3, 2, 4).transpose(0, 1)
        whole.normal_(generator=torch.Generator().manual_seed(0))
        held, local = owned((2, 3, 4), (1,), cuts_of((Replicate(),)), (0,)), torch.empty(2, 3, 4)
        sampler = Sampler(aten.normal_.default, (), torch.float32, torch.Generator().manual_seed(0))
        draw_owned(sampler, (2, 3, 4), whole.stride(), held.boxes, local)
        self.assertTrue(torch.equal(local, whole))

    def test_numbers_that_come_by_one_seed_per_call_are_drawn_whole(self):
        """As MKL draws on processors of Intel: here an op whose halves do not give the numbers of the whole."""
        shape, generator = (4000,), torch.Generator()

        def fill(chunk, generator=generator):
            seed = int(torch.empty((), dtype=torch.int64).random_(generator=generator))
            chunk.uniform_(generator=torch.Generator().manual_seed(seed))

        fill(whole := torch.empty(shape))
        sampler = Sampler(fill, (), torch.float32, generator)
        for is_serial in (False, True):
            generator.manual_seed(0)
            fill(whole)
            after, local = generator.get_state(), torch.empty(1000)
            generator.manual_seed(0)
            held = owned(shape, (4,), cuts_of((Shard(0),)), (2,))
            with patch.object(_draw, "_CHUNK_BYTES", 1024), patch.object(_draw, "_is_serial", lambda *_: is_serial):
                draw_owned(sampler, shape, (1,), held.boxes, local)
            is_equal = torch.equal(local, whole[2000:3000]) and torch.equal(generator.get_state(), after)
            self.assertEqual(is_equal, not is_serial, "the trial decides it, and without it numbers are wrong")

    def test_a_counter_moves_over_turns_that_this_rank_does_not_hold(self):
        """The rule of torch's CUDA kernels, on a grid of at most 6 threads: turns, lanes of 4 per thread, a counter; and draws
        that 32 bits cannot address, which torch cuts into halves."""
        grid = Grid(threads=6, lanes=4)
        rng = random.Random(1)
        for numel, limit in itertools.product((1, 23, 24, 25, 48, 60, 72, 100, 241), (2**31, 8 * 70)):
            shape = (numel,)
            grid.offset = 40
            whole = torch.empty(numel, dtype=torch.int64)
            halves = [numel] if numel * 8 <= limit else [numel // 2, numel - numel // 2]
            while max(halves) * 8 > limit:
                halves = [half for part in halves for half in (part // 2, part - part // 2)]
            grid.offset += 4 * -(-numel // 24) if len(halves) > 1 else 0
            for part in whole.split(halves):
                grid.fill(part)
            after = grid.offset
            sampler = Sampler(grid.fill, (), torch.int64, grid)
            bounds = [0, *sorted(rng.randint(0, numel) for _ in range(3)), numel]
            placement = RaggedShard((0,), tuple(b - a for a, b in itertools.pairwise(bounds)))
            for rank in range(4):
                held = owned(shape, (4,), cuts_of((placement,)), (rank,))
                local = torch.empty(held.local_shape, dtype=torch.int64)
                grid.offset, grid.calls = 40, 0
                turns = patch.object(_draw, "way_of", lambda *_: _counter.Turns(24, 4))
                with turns, patch.object(philox, "_MOST_DRAWN_BYTES", limit):
                    draw_owned(sampler, shape, (1,), [box for box in held.boxes if box.numel], local)
                self.assertTrue(torch.equal(local, whole[bounds[rank] : bounds[rank + 1]]), (numel, rank))
                self.assertEqual(grid.offset, after)
                if len(halves) == 1:
                    turns = {element // 24 for element in range(bounds[rank], bounds[rank + 1])}
                    self.assertEqual(grid.calls, len(turns), "only what this rank holds is drawn")

    def test_turns_are_found_by_a_trial(self):
        """Of 4 or 2 elements per thread; a turn of complex numbers moves the counter twice; None for any other rule."""
        device = torch.device("cpu")
        for lanes, step, found in ((4, 4, 4), (2, 4, 2), (4, 8, 4), (3, 4, None)):
            grid = Grid(threads=6, lanes=lanes, step=step)
            with patch.object(philox, "grid_of", lambda _: philox.Grid(6)):
                turns = _counter._try_turns(Sampler(grid.fill, (), torch.int64, grid), device)
            self.assertEqual(turns, None if found is None else _counter.Turns(6 * found, step))

        def fill(tensor, generator=None):
            grid.fill(tensor)
            tensor += len(tensor)

        grid = Grid(threads=6, lanes=4)
        with patch.object(philox, "grid_of", lambda _: philox.Grid(6)):
            self.assertIsNone(_counter._try_turns(Sampler(fill, (), torch.int64, grid), device), "the counter alone is equal")

    def test_it_holds_a_chunk_beside_the_local_tensor(self):
        """At most 1 MiB, also for an expert weight of GPT-OSS-120B's shape, of which this rank holds a 64th."""
        shape = (128, 2880, 64)
        held = owned(shape, (64,), cuts_of((Shard(0),)), (3,))
        local = torch.empty(held.local_shape, dtype=torch.bfloat16)
        sampler = Sampler(aten.normal_.default, (), torch.bfloat16)
        draw_owned(sampler, (16,), (1,), (), local)  # What is kept for ever is made now.
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watch:
            draw_owned(sampler, shape, row_major(shape), held.boxes, local)
        most = max(event.total_allocated for event in allocations(watch.profiler.kineto_results.experimental_event_tree()))
        self.assertLess(most - first_total(watch), 2**19)


class Grid:
    """Draws as a CUDA kernel: element ``i`` is lane ``i // threads % lanes`` of thread ``i % threads``, in turn ``i // turn``.

    A number depends on the counter, the thread and the lane. A smaller tensor has a smaller grid. It is the generator, too.
    """

    def __init__(self, threads, lanes, step=4):
        self.threads, self.lanes, self.step, self.offset, self.calls = threads, lanes, step, 0, 0

    def fill(self, tensor, generator=None):
        if not len(tensor):
            return
        threads = min(self.threads, -(-len(tensor) // self.lanes))
        turn = threads * self.lanes
        for i in range(len(tensor)):
            tensor[i] = (self.offset + self.step * (i // turn)) * 10_000 + i % threads * 100 + i // threads % self.lanes
        self.offset += self.step * -(-len(tensor) // turn)
        self.calls += 1

    def manual_seed(self, seed):
        self.offset = 0

    def get_offset(self):
        return self.offset

    def set_offset(self, offset):
        self.offset = offset


def allocations(events):
    for event in events:
        if event.tag == torch._C._profiler._EventType.Allocation:
            yield event.extra_fields
        yield from allocations(event.children)


def first_total(watch):
    first = next(allocations(watch.profiler.kineto_results.experimental_event_tree()))
    return first.total_allocated - first.alloc_size


if __name__ == "__main__":
    unittest.main()
