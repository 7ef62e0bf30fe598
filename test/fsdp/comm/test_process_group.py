"""Collectives of a process group by themselves, against sums and copies by hand: shards, replicas, dtypes, divisors."""

import unittest
from unittest import mock

import torch
import torch.distributed as dist
from common import error_of, ranks
from torch.distributed.tensor.debug import CommDebugMode

from torch_ragged.fsdp.comm import _gloo
from torch_ragged.fsdp.comm._collectives import Collectives, Levels, ProcessGroupCollectives, ReduceScatterTraits, wait_all
from torch_ragged.fsdp.comm._reduction import Reduction

SIZE = 5


def of_rank(rank, dtype, numel=SIZE):
    """Whole numbers, so that sums are exact in any order."""
    return (torch.arange(numel) % 7 + rank).to(dtype)


class ProcessGroupTest(unittest.TestCase):
    @ranks(3)
    def test_an_all_gather_puts_shards_in_the_order_of_ranks():
        collectives, rank = ProcessGroupCollectives(dist.group.WORLD), dist.get_rank()
        for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64):
            output = torch.zeros(3 * SIZE).to(dtype)
            shard = output[rank * SIZE : (rank + 1) * SIZE]
            shard.copy_(of_rank(rank, dtype))
            for source in (shard, shard.clone()):
                collectives.all_gather(output, source).wait()
                assert torch.equal(output.float(), torch.cat([of_rank(each, torch.float32) for each in range(3)])), dtype

    @ranks(3)
    def test_a_reduce_scatter_divides_as_asked():
        collectives, rank = ProcessGroupCollectives(dist.group.WORLD), dist.get_rank()
        whole = sum(of_rank(each, torch.float64, 3 * SIZE) for each in range(3))
        mine = whole[rank * SIZE : (rank + 1) * SIZE]
        adds_wide = collectives.reduce_scatter_traits(torch.device("cpu")).adds_wide
        cases = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)]
        for dtype, wide in [*cases, *([(torch.bfloat16, torch.float32)] if adds_wide else [])]:
            for reduction, divisor in ((Reduction(), 3), (Reduction(8.0), 8), (Reduction(1.0, sum_only=True), 1)):
                output = torch.empty(SIZE, dtype=wide)
                collectives.reduce_scatter(output, of_rank(rank, dtype, 3 * SIZE), reduction).wait()
                torch.testing.assert_close(
                    output.double(), mine / divisor, rtol=1e-6 if wide == torch.float32 else 1e-2, atol=0
                )

    @ranks(4)
    def test_replicas_average_and_the_largest_is_known_everywhere():
        rank = dist.get_rank()
        shards = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
        replicas = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][rank % 2]
        collectives = ProcessGroupCollectives(shards, replicas)
        tensor = of_rank(rank, torch.float32)
        with mock.patch.object(_gloo, "wait_for_call", wraps=_gloo.wait_for_call) as waits:
            collectives.all_reduce(tensor, Reduction()).wait()
        assert waits.call_count == 1  # So that ranks in different calls do not wait for each other for ever.
        assert torch.equal(tensor, (of_rank(rank % 2, torch.float32) + of_rank(rank % 2 + 2, torch.float32)) / 2)
        flags = torch.tensor([rank, 3 - rank, int(rank == 2)], dtype=torch.uint8)
        collectives.all_reduce_max(flags).wait()
        assert flags.tolist() == [3, 3, 1]

    @ranks(1)
    def test_one_rank_only_copies():
        for group in (dist.group.WORLD, None):  # None: parameters are replicated only.
            collectives, shard, output = ProcessGroupCollectives(group), torch.arange(4.0), torch.empty(4)
            with CommDebugMode() as mode:
                collectives.all_gather(output, shard).wait()
                assert torch.equal(output, shard)
                collectives.reduce_scatter(output, shard, Reduction(2.0)).wait()
            assert torch.equal(output, shard / 2) and mode.get_total_counts() == 0
            assert collectives.reduce_scatter_traits(shard.device) == ReduceScatterTraits(False, holds_second_buffer=False)
        levels = Levels(dist.group.WORLD, None)
        assert (levels.nodes, levels.per_node) == (1, 1)

    @ranks(1)
    def test_the_work_of_a_custom_all_gather_is_what_is_waited_for():
        collectives, shard, work = ProcessGroupCollectives(dist.group.WORLD), torch.arange(4.0), wait_all([])
        for returned in (work, None):  # A synchronous one returns None.
            collectives.custom_all_gather = lambda *_, returned=returned, **options: returned
            issued = collectives.all_gather(torch.empty(4), shard)
            assert (issued is work) == (returned is work) and error_of(issued.wait) == ""

    def test_a_carrier_raises_where_it_has_no_collective(self):
        carrier, tensor = Collectives(), torch.ones(2)
        calls = ((carrier.all_gather, tensor, tensor), (carrier.all_reduce_max, tensor))
        for call, *arguments in (*calls, (carrier.reduce_scatter_traits, tensor.device)):
            self.assertEqual(error_of(call, *arguments), "NotImplementedError: ")


if __name__ == "__main__":
    unittest.main()
