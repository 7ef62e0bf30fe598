"""The sharding of CPU attention with fewer heads of keys than of queries: heads are cut where both counts divide."""

import unittest

import torch
import torch.nn.functional as F
from common import fake_group, ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import torch_ragged  # noqa: F401  (It registers the rule.)


def queries_keys_values(batch):
    torch.manual_seed(0)
    return [torch.randn(batch, heads, 5, 8) for heads in (4, 2, 2)]


class AttentionRuleTest(unittest.TestCase):
    def test_data_parallel_ranks_need_not_divide_the_heads(self):
        with fake_group(6):
            mesh = init_device_mesh("cpu", (3, 2))
            tensors = [distribute_tensor(each, mesh, [Shard(0), Shard(1)]) for each in queries_keys_values(3)]
            with CommDebugMode() as mode:
                result = F.scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True)
        self.assertEqual(mode.get_total_counts(), 0)
        self.assertEqual(result.placements, (Shard(0), Shard(1)))

    @ranks(3)
    def test_heads_that_ranks_cannot_share_evenly_are_gathered():
        mesh = init_device_mesh("cpu", (3,))
        tensors = queries_keys_values(2)
        found = F.scaled_dot_product_attention(
            *[distribute_tensor(each, mesh, [Shard(1)]) for each in tensors], enable_gqa=True
        )
        torch.testing.assert_close(found.full_tensor(), F.scaled_dot_product_attention(*tensors, enable_gqa=True))


if __name__ == "__main__":
    unittest.main()
