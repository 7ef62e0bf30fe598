"""Resident parameters, in one process: what is gathered across nodes and within one, and when."""

import itertools
import unittest
from types import SimpleNamespace

import torch
from torch.distributed.tensor import Replicate, Shard

from torch_ragged.fsdp import BufferLayout, DBuffer, TensorSpec
from torch_ragged.fsdp.comm._collectives import Levels, done
from torch_ragged.fsdp.core._dbuffer import MemoryLog
from torch_ragged.fsdp.memory._resident import Resident

LAYOUT = BufferLayout((TensorSpec("weight", (40,), (), 1),), (0,), 10, 4, 1, 0, "", "")


def buffer(placement, rank, dtype=torch.float32):
    return DBuffer(LAYOUT, placement, rank, dtype, torch.device("cpu"))


class Ranks:
    """A process group of two ranks, or collectives that note their calls and send nothing."""

    def __init__(self):
        self.calls = []

    def size(self):
        return 2

    def all_gather(self, output, source, group=None):
        self.calls.append((group, output, source))
        return done


class ResidentTest(unittest.TestCase):
    def setUp(self):
        self.log = MemoryLog()
        self.log.start()

    def noted(self):
        return [nbytes for _, nbytes in self.log.events]

    def test_resident_shards_of_all_nodes_are_gathered_in_place(self):
        for rank, dtype in itertools.product(range(4), (torch.float32, torch.bfloat16)):
            self.log.start()
            across, within, collectives = Ranks(), Ranks(), Ranks()
            keeper = Resident(Levels(across, within), self.log)
            self.assertEqual((keeper.keeps_buffer, keeper.nbytes), (False, 0))
            shards, whole = SimpleNamespace(buffer=buffer(Shard(0), rank)), buffer(Replicate(), rank, dtype)
            shards.buffer.flat.copy_(torch.arange(10.0 * rank, 10 * rank + 10))
            whole.free()
            keeper.all_gather(shards, SimpleNamespace(buffer=whole), [1], collectives)
            (first, kept, mine), *nodes = collectives.calls
            self.assertIs(first, across)
            self.assertEqual((kept.numel(), kept.dtype, keeper.nbytes), (20, dtype, 20 * dtype.itemsize))
            own = shards.buffer.flat.data_ptr() if dtype == torch.float32 else kept.data_ptr() + rank // 2 * 10 * dtype.itemsize
            self.assertEqual(mine.data_ptr(), own)  # Cast into its slice, or read where it is.
            self.assertEqual(mine.tolist(), torch.arange(10.0 * rank, 10 * rank + 10).tolist())
            for node, (where, output, source) in enumerate(nodes):
                self.assertIs(where, within)
                self.assertEqual((output.numel(), source.numel()), (20, 10))
                self.assertEqual(output.data_ptr(), whole.flat.data_ptr() + node * 20 * dtype.itemsize)
                self.assertEqual(source.data_ptr(), kept.data_ptr() + node * 10 * dtype.itemsize)
            self.assertEqual(len(nodes), 2)
            for versions, calls in (([1], 2), ([2], 3), ([2], 2)):  # Across nodes only if the parameters have changed.
                collectives.calls.clear()
                keeper.all_gather(shards, SimpleNamespace(buffer=whole), versions, collectives)
                self.assertEqual(len(collectives.calls), calls)
            keeper.invalidate()
            collectives.calls.clear()
            keeper.all_gather(shards, SimpleNamespace(buffer=whole), [2], collectives)
            self.assertEqual(len(collectives.calls), 3)
            self.assertIs(collectives.calls[0][1], kept)
            keeper.reset()
            self.assertEqual(keeper.nbytes, 0)
            self.assertEqual(self.noted(), [20 * dtype.itemsize, -20 * dtype.itemsize])

    def test_a_resident_buffer_is_gathered_once_per_version(self):
        calls = []
        encoding = SimpleNamespace(all_gather=lambda *arguments: calls.append(arguments) or "work")
        keeper = Resident(Levels(Ranks(), None), self.log)
        self.assertTrue(keeper.keeps_buffer)
        self.assertEqual(keeper.all_gather("shards", encoding, [1], "collectives"), "work")
        self.assertEqual(calls, [("shards", "collectives")])
        self.assertIs(keeper.all_gather("shards", encoding, [1], "collectives"), done)
        keeper.all_gather("shards", encoding, [2], "collectives")
        keeper.invalidate()
        keeper.all_gather("shards", encoding, [2], "collectives")
        keeper.reset()
        keeper.all_gather("shards", encoding, [2], "collectives")
        self.assertEqual(len(calls), 4)


if __name__ == "__main__":
    unittest.main()
