"""DBuffer, its memory and what keeps a part of it, in one process: views, padding, neighbours."""

import itertools
import math
import unittest
from collections import Counter
from types import SimpleNamespace

import torch
from common import error_of
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from torch_ragged.fsdp import BufferLayout, TensorSpec
from torch_ragged.fsdp.comm._collectives import Levels
from torch_ragged.fsdp.core._dbuffer import Borrowed, DBuffer, MemoryLog, allocate_storage, free_storage, in_buffer_form
from torch_ragged.fsdp.core._neighbours import Neighbours
from torch_ragged.fsdp.core.encodings._plain import Shards
from torch_ragged.fsdp.layout._buffer_layout import RowsLayout, rows_layout

CPU = torch.device("cpu")
TENSORS = tuple(TensorSpec(name, shape, (), 1) for name, shape in (("a", (2, 3)), ("b", (7,)), ("c", (3, 5)), ("d", ())))
# a at 0, 2 elements of padding, b over two shards, padding at its end, c over two shards, d, padding.
LAYOUT = BufferLayout(TENSORS, (0, 8, 18, 34), 10, 4, 1, 0, "", "")
PADDING = {*range(6, 8), *range(15, 18), 33, *range(35, 40)}


class Copying:
    """Collectives of one rank that has the numbers of all."""

    def __init__(self, whole=None):
        self.whole, self.calls = whole, []

    def all_gather(self, output, source, group=None):
        self.calls.append((output, source))

    def reduce_scatter(self, output, source, reduction, group=None):
        self.calls.append((output, source, reduction, group))

    def all_reduce(self, output, reduction):
        self.calls.append((output, reduction))


class Operations(TorchDispatchMode):
    """Counts the operations that run."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.name()] += 1
        return func(*args, **kwargs or {})


def buffer(placement, rank=0, dtype=torch.float32, **arguments):
    return DBuffer(LAYOUT, placement, rank, dtype, CPU, **arguments)


class DBufferTest(unittest.TestCase):
    def test_tensors_of_a_whole_buffer_are_views_at_their_offsets(self):
        for placement in (Replicate(), Partial()):
            whole = buffer(placement)
            self.assertEqual((whole.flat.numel(), whole.nbytes, whole.resident_nbytes), (40, 160, 160))
            whole.flat.copy_(torch.arange(40.0))
            for index, (tensor, offset) in enumerate(zip(TENSORS, LAYOUT.offsets, strict=True)):
                expected = torch.arange(float(offset), offset + tensor.numel).view(tensor.shape)
                self.assertTrue(torch.equal(whole.tensor(index), expected))
                self.assertEqual(whole.tensor(index).data_ptr(), whole.flat.data_ptr() + 4 * offset)
                self.assertTrue(whole.holds(whole.tensor(index)))

    def test_tensors_of_shards_are_the_parts_in_them(self):
        parts = [[] for _ in TENSORS]
        for rank in range(4):
            shard = buffer(Shard(0), rank)
            self.assertEqual((shard.flat.numel(), shard.nbytes), (10, 40))
            shard.flat.copy_(torch.arange(10.0 * rank, 10 * rank + 10))
            for index in range(len(TENSORS)):
                parts[index] += shard.tensor(index).tolist()
                self.assertEqual(shard.tensor(index).dim(), 1)
        for found, tensor, offset in zip(parts, TENSORS, LAYOUT.offsets, strict=True):
            self.assertEqual(found, list(range(offset, offset + tensor.numel)))

    def test_views_have_their_own_version_counters(self):
        whole = buffer(Replicate())
        view = whole.tensor(0)
        before = view._version
        whole.flat.zero_()
        self.assertEqual(view._version, before)

    def test_padding_is_zero_and_nothing_else(self):
        whole = buffer(Partial())
        whole.flat.fill_(float("nan"))
        whole.zero_padding()
        self.assertEqual({i for i, value in enumerate(whole.flat.tolist()) if value == 0}, PADDING)
        for rank in range(4):
            shard = buffer(Shard(0), rank)
            shard.flat.fill_(float("nan"))
            shard.zero_padding()
            zeros = {10 * rank + i for i, value in enumerate(shard.flat.tolist()) if value == 0}
            self.assertEqual(zeros, PADDING & {*range(10 * rank, 10 * rank + 10)})

    def test_padding_is_zeroed_by_one_operation(self):
        """For any number of gaps, and any dtype: not by one kernel per gap."""
        tensors = tuple(TensorSpec(f"w{i}", (3,), (), 1) for i in range(40))
        layout = BufferLayout(tensors, tuple(range(0, 160, 4)), 80, 2, 1, 0, "", "")
        for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8):
            for rank, placement in ((0, Partial()), (0, Shard(0)), (1, Shard(0))):
                padded = DBuffer(layout, placement, rank, dtype, CPU)
                padded.flat.view(torch.uint8).fill_(1)
                with Operations() as seen:
                    padded.zero_padding()
                self.assertEqual(seen.counts["aten::_foreach_zero_"], 1)
                self.assertLess(seen.counts.total(), 6, seen.counts)
                zeros = (padded.flat.view(torch.uint8).view(-1, dtype.itemsize) == 0).all(1)
                self.assertEqual(zeros.nonzero().flatten().tolist(), list(range(3, padded.flat.numel(), 4)))
                self.assertEqual(int((padded.flat.view(torch.uint8) == 0).sum()), padded.flat.numel() // 4 * dtype.itemsize)

    def test_the_shard_of_a_whole_buffer_is_a_slice_of_it(self):
        for rank in range(4):
            whole, shard = buffer(Replicate(), rank), buffer(Shard(0), rank)
            self.assertEqual(whole.shard().numel(), 10)
            self.assertEqual(whole.shard().data_ptr(), whole.flat.data_ptr() + 40 * rank)
            self.assertIs(shard.shard(), shard.flat)

    def test_memory_is_freed_as_a_whole_and_views_are_valid_again(self):
        log = MemoryLog()
        log.start()
        whole = buffer(Replicate(), log=log)
        view = whole.tensor(2)
        whole.allocate()  # It is allocated: no change.
        whole.free()
        self.assertEqual((whole.is_allocated, whole.resident_nbytes, whole.nbytes), (False, 0, 160))
        self.assertFalse(whole.holds(view))
        whole.free()
        whole.allocate()
        self.assertEqual((whole.is_allocated, whole.resident_nbytes), (True, 160))
        whole.flat.copy_(torch.arange(40.0))
        self.assertEqual(view.flatten().tolist(), list(range(18, 33)))
        self.assertEqual([nbytes for _, nbytes in log.events], [160, -160, 160])

    def test_a_buffer_holds_its_own_memory_only(self):
        one, two = buffer(Replicate()), buffer(Replicate())
        self.assertFalse(one.holds(two.tensor(0)))
        self.assertTrue(one.holds(torch.nn.Parameter(one.tensor(0))))
        self.assertFalse(one.holds(torch.nn.Parameter(two.tensor(0))))
        self.assertFalse(one.holds(torch.ones(3).to_sparse()))
        shards = Shards(LAYOUT, 0)
        shards.allocate(torch.float32, CPU, False)
        for kind in (lambda tensor: tensor, torch.nn.Parameter):
            self.assertTrue(shards.holds(kind(shards.buffer.tensor(0))))
            self.assertFalse(shards.holds(kind(torch.ones(6))))
            self.assertFalse(shards.holds(kind(shards.buffer.tensor(0).to(torch.bfloat16))))

    def test_borrowed_memory_is_dropped_and_not_freed(self):
        mine = torch.arange(40.0)
        borrowed = buffer(Replicate(), pool=Borrowed(mine))
        self.assertEqual(borrowed.tensor(0).data_ptr(), mine.data_ptr())
        borrowed.free()
        self.assertEqual(borrowed.flat.numel(), 0)
        self.assertEqual(mine.tolist(), list(range(40)))

    def test_other_placements_are_refused(self):
        text = error_of(buffer, torch.distributed.tensor.placement_types.Placement())
        self.assertIn("DBuffer placement must be Shard(0), Replicate() or Partial(), got", text)

    def test_an_all_gather_reads_the_shard_or_casts_it_into_its_slice(self):
        for rank, dtype in itertools.product(range(4), (torch.float32, torch.bfloat16)):
            collectives, whole, shard = Copying(), buffer(Replicate(), rank, dtype), buffer(Shard(0), rank)
            shard.flat.copy_(torch.arange(10.0 * rank, 10 * rank + 10))
            whole.free()
            shard.redistribute((Replicate(),), collectives, out=whole)
            ((output, source),) = collectives.calls
            self.assertIs(output, whole.flat)
            self.assertTrue(whole.is_allocated)
            self.assertEqual(source.data_ptr(), (shard.flat if dtype == torch.float32 else whole.shard()).data_ptr())
            self.assertEqual(source.dtype, dtype)
            self.assertEqual(source.tolist(), shard.flat.tolist())


class Ranks:
    """The collectives of four ranks that run one after the other: an all-gather reads what the other ranks hold."""

    def __init__(self, rank):
        self.rank, self.calls = rank, []

    def size(self):
        return 2

    def all_gather(self, output, source, group=None):
        self.calls.append((group, output, source))


def numbers(rank):
    return torch.arange(10.0 * rank, 10 * rank + 10)


class KeeperTest(unittest.TestCase):
    def setUp(self):
        self.log = MemoryLog()
        self.log.start()

    def noted(self):
        return [nbytes for _, nbytes in self.log.events]

    def test_neighbours_keep_their_part_of_the_gathered_buffer(self):
        for size, index in ((2, 0), (2, 1), (4, 2)):
            self.log.start()
            group, collectives, whole = object(), Ranks(0), buffer(Replicate())
            encoding = SimpleNamespace(buffer=whole, all_gather=lambda shards, collectives: "from the shards")
            whole.flat.copy_(torch.arange(40.0))
            keeper = Neighbours(size, index, group, self.log)
            self.assertEqual((keeper.nbytes, keeper.holds_part), (0, False))
            self.assertEqual(keeper.all_gather(None, encoding, [], collectives), "from the shards")
            keeper.drop()
            keeper.keep(encoding)
            whole.free()
            self.assertEqual((keeper.nbytes, keeper.holds_part), (160 // size, True))
            keeper.all_gather(None, encoding, [], collectives)
            ((where, output, source),) = collectives.calls
            self.assertIs(where, group)
            self.assertIs(output, whole.flat)
            self.assertTrue(whole.is_allocated)
            self.assertEqual(source.tolist(), torch.arange(40.0).split(40 // size)[index].tolist())
            keeper.drop()
            self.assertEqual((keeper.nbytes, keeper.holds_part), (0, False))
            self.assertEqual(self.noted(), [160 // size, -160 // size])


class TwoDimensionsTest(unittest.TestCase):
    def test_shards_over_nodes_are_reduced_within_each_node_and_then_across(self):
        for rank in range(4):
            levels, collectives, reduction = Levels(Ranks(rank), Ranks(rank)), Copying(), object()
            whole, partial = buffer(Partial(), rank), buffer((Partial(), Shard(0)), rank, levels=levels)
            self.assertEqual((partial.flat.numel(), partial.nbytes, partial.is_sharded), (20, 80, False))
            self.assertEqual(partial.shard().data_ptr(), partial.flat.data_ptr() + rank // 2 * 40)
            whole.redistribute(partial.placements, collectives, partial, reduction)
            for node, (output, source, how, group) in enumerate(collectives.calls):
                self.assertEqual((output.numel(), source.numel()), (10, 20))
                self.assertEqual(output.data_ptr(), partial.flat.data_ptr() + node * 40)
                self.assertEqual(source.data_ptr(), whole.flat.data_ptr() + node * 80)
                self.assertTrue(how is reduction and group is levels.within)
            self.assertEqual(len(collectives.calls), 2)
            collectives.calls.clear()
            shards = buffer((Shard(0), Shard(0)), rank, levels=levels)
            partial.redistribute(shards.placements, collectives, shards, reduction)
            ((output, source, how, group),) = collectives.calls
            self.assertEqual((output.data_ptr(), output.numel()), (shards.flat.data_ptr(), 10))
            self.assertEqual((source.data_ptr(), source.numel()), (partial.flat.data_ptr(), 20))
            self.assertTrue(how is reduction and group is levels.across)

    def test_shards_of_replicas_are_reduced_in_place(self):
        for rank in range(4):
            collectives, reduction = Copying(), object()
            whole, shard = buffer(Partial(), rank), buffer((Partial(), Shard(0)), rank)
            whole.redistribute(shard.placements, collectives, shard, reduction)
            ((output, source, how, group),) = collectives.calls
            self.assertEqual((output.data_ptr(), output.numel()), (shard.flat.data_ptr(), 10))
            self.assertEqual((source.data_ptr(), source.numel()), (whole.flat.data_ptr(), 40))
            self.assertTrue(how is reduction and group is None)
            collectives.calls.clear()
            shard.redistribute((Replicate(), Shard(0)), collectives, reduction=reduction)
            ((output, how),) = collectives.calls
            self.assertTrue(output is shard.flat and how is reduction)
            self.assertEqual(shard.placements, (Replicate(), Shard(0)))


class MemoryLogTest(unittest.TestCase):
    def test_it_records_between_start_and_stop(self):
        log = MemoryLog()
        log.note(3)
        log.start()
        log.note(5)
        log.note(-5)
        self.assertEqual([nbytes for _, nbytes in log.events], [5, -5])
        self.assertLess(*(moment for moment, _ in log.events))
        log.start()
        self.assertEqual(log.events, [])
        log.note(1)
        log.stop()
        self.assertEqual(log.events, [])

    def test_storage_is_allocated_and_freed_once(self):
        log, tensor = MemoryLog(), torch.ones(6)
        log.start()
        allocate_storage(tensor, log)
        free_storage(tensor, log)
        self.assertEqual(tensor.untyped_storage().nbytes(), 0)
        free_storage(tensor, log)
        allocate_storage(tensor, log)
        self.assertEqual(tensor.untyped_storage().nbytes(), 24)
        self.assertEqual([nbytes for _, nbytes in log.events], [-24, 24])


class RowsTest(unittest.TestCase):
    """Tensors that are cut by Shard(0) and share a buffer."""

    SHAPES = ((5, 3), (2, 1, 4), (7,), (1, 2), (4, 2))

    def specs(self, shapes):
        return [TensorSpec(f"t{i}", shape, (0,), max(1, math.prod(shape[1:]))) for i, shape in enumerate(shapes)]

    def test_every_shard_has_the_rows_of_each_tensor(self):
        values = [torch.randn(shape) for shape in self.SHAPES]
        for ranks in range(1, 9):
            layout = rows_layout(self.specs(self.SHAPES), ranks)
            whole = DBuffer(layout, Partial(), 0, torch.float32, CPU)
            whole.flat.fill_(torch.nan)
            for index, value in enumerate(values):
                whole.tensor(index).copy_(in_buffer_form(value, layout, index))
            self.assertTrue(whole.flat.isfinite().all())  # Padding, too.
            self.assertEqual(layout.padding_numel, layout.numel - sum(value.numel() for value in values))
            for rank, part in enumerate(whole.flat.chunk(ranks)):
                shard = DBuffer(layout, Shard(0), rank, torch.float32, CPU)
                shard.flat.copy_(part)
                for index, value in enumerate(values):
                    chunks = value.chunk(ranks)
                    rows = chunks[rank] if rank < len(chunks) else value[:0]
                    self.assertTrue(torch.equal(shard.tensor(index).view(rows.shape), rows))
                    placement = layout.placement(index)
                    self.assertEqual(placement.local_units[rank] * value.shape[0], len(rows) * sum(placement.local_units))

    def test_one_tensor_that_divides_is_contiguous_and_not_copied(self):
        layout, value = rows_layout(self.specs([(6, 5)]), 3), torch.randn(6, 5)
        self.assertTrue(DBuffer(layout, Partial(), 0, torch.float32, CPU).tensor(0).is_contiguous())
        self.assertEqual(in_buffer_form(value, layout, 0).data_ptr(), value.data_ptr())
        self.assertIs(in_buffer_form(value, LAYOUT, 0), value)

    def test_empty_tensors_take_no_memory(self):
        layout = rows_layout(self.specs([(0, 3), (4, 0), (4, 2)]), 2)
        self.assertEqual((layout.shard_numel, layout.gaps), (4, ()))
        self.assertEqual([layout.local_range(index, 1) for index in range(3)], [(0, 0), (0, 0), (4, 8)])
        whole = DBuffer(layout, Partial(), 0, torch.float32, CPU)
        for index, shape in enumerate([(0, 3), (4, 0), (4, 2)]):
            whole.tensor(index).copy_(in_buffer_form(torch.zeros(shape), layout, index))
        nothing = rows_layout(self.specs([(0, 3)]), 2)
        self.assertEqual((nothing.shard_numel, nothing.gaps), (1, ((0, 2),)))
        self.assertEqual(sum(nothing.placement(0).local_units), 1)

    def test_shards_without_room_or_order_are_refused(self):
        specs = tuple(self.specs([(4, 2), (2, 3)]))
        good = rows_layout(specs, 2)
        self.assertEqual((good.offsets, good.shard_numel, good.forced_by), ((0, 4), 7, "Shard(0) of t0 and 1 more"))
        for offsets, shard in (((0, 3), 7), ((0, 4), 8), ((0,), 4), ((0, 4, 7), 7)):
            error = error_of(RowsLayout, specs, offsets, shard, 2, 1, 7, "", "")
            self.assertIn(f"at offsets (0, 4) of 7 elements, got {offsets} of {shard}", error)
