"""The sharding of CPU attention with fewer heads of keys than of queries: heads are cut where both counts divide."""

import itertools
import unittest

import pytest
import torch
import torch.nn.functional as F
from common import fake_group, ranks, run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import torch_ragged  # noqa: F401  (It registers the rule.)
from torch_ragged._register._spmd import compute_as_one_device, compute_as_torch
from torch_ragged.spmd import Plan, parallelize
from torch_ragged.tensor._plain_ops import plain_handlers


def queries_keys_values(batch):
    torch.manual_seed(0)
    return [torch.randn(batch, heads, 5, 8) for heads in (4, 2, 2)]


def check_cuts_and_masks(takes_all):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize(nn.Linear(1, 1), Plan().default(Replicate()), mesh)  # It switches this on.
    torch.manual_seed(0)
    x, mask = torch.randn(2, 6, 16, dtype=torch.float64), torch.rand(2, 1, 6, 6).bernoulli().bool() | torch.eye(6).bool()

    def attention(x, mask):
        q = x.unflatten(-1, (4, 4)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask).transpose(1, 2).contiguous().view(x.shape)

    masks = (None, mask, distribute_tensor(mask, mesh, [Replicate(), Shard(0)]))
    for number, cuts in enumerate(itertools.product((Replicate(), Shard(0), Shard(1), Shard(2)), repeat=2)):
        for given in masks if takes_all else [masks[number % 3]]:
            single, ours = x.clone().requires_grad_(), distribute_tensor(x, mesh, cuts).requires_grad_()
            expected = attention(single, mask if given is not None else None)
            for _ in range(2):  # What the dispatcher keeps of the first call does not change the second.
                found = attention(ours, given)
            torch.testing.assert_close(found.full_tensor(), expected)
            found.square().sum().backward()
            expected.square().sum().backward()
            torch.testing.assert_close(ours.grad.full_tensor(), single.grad)


def check_cut_queries(takes_all):
    """Context parallelism, beside tensor parallelism of the heads; uneven rows, fewer heads of keys, any mask."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    compute_as_one_device(True)
    torch.manual_seed(0)
    cuts = ((Shard(2), Shard(1)), (Shard(2), Shard(2)), (Shard(0), Shard(2)))
    for number, (rows, columns) in enumerate(((8, 8), (7, 7), (1, 5))):
        for other, options in enumerate(({"is_causal": True}, {}, {"attn_mask": torch.randn(rows, columns)})):
            whole = [torch.randn(2, heads, size, 8) for heads, size in ((4, rows), (2, columns), (2, columns))]
            single = [each.clone().requires_grad_() for each in whole]
            expected = F.scaled_dot_product_attention(*single, enable_gqa=True, **options)
            weight = torch.randn(expected.shape)
            (expected * weight).sum().backward()
            # Or each pair of a size, a kind of mask and a cut once.
            for placements in cuts if takes_all else [cuts[(number + other) % 3]]:
                given = [distribute_tensor(each, mesh, placements).requires_grad_() for each in whole]
                placed = dict(options)
                if "attn_mask" in options:
                    placed["attn_mask"] = distribute_tensor(options["attn_mask"], mesh, [Replicate(), Replicate()])
                found = F.scaled_dot_product_attention(*given, enable_gqa=True, **placed)
                told = (rows, options.keys(), placements)
                assert "is_causal" not in options or rows == 1 or found.placements == placements, (told, found.placements)
                torch.testing.assert_close(found.full_tensor(), expected, msg=lambda text, told=told: f"{told}: {text}")
                (found * distribute_tensor(weight, mesh, found.placements)).sum().backward()
                for one, other in zip(given, single, strict=True):
                    torch.testing.assert_close(
                        one.grad.full_tensor(), other.grad, msg=lambda text, told=told: f"{told}: {text}"
                    )


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

    @pytest.mark.slow
    def test_queries_that_are_cut_along_the_sequence_equal_one_process(self):
        run_ranks(4, check_cut_queries, False)

    @pytest.mark.slow
    def test_queries_of_all_sizes_that_are_cut_along_the_sequence_equal_one_process(self):
        run_ranks(4, check_cut_queries, True)

    def test_kernels_of_gpus_get_whole_sequences(self):
        """torch's rule would let each rank attend to its own part of the keys."""
        with fake_group(2):
            mesh = init_device_mesh("cpu", (2,))
            local = torch.empty(2, 4, 4, 8, device="meta")
            given = [DTensor.from_local(local, mesh, [Shard(2)], run_check=False) for _ in range(3)]
            op = torch.ops.aten._scaled_dot_product_flash_attention.default
            compute_as_one_device(True)
            self.addCleanup(compute_as_torch)
            found = plain_handlers()[op](op, (*given, 0.0, True), {})[0]
        self.assertEqual((found.placements, found.to_local().shape), ((Replicate(),), (2, 4, 8, 8)))

    def test_after_parallelize_positions_may_be_cut_and_the_mask_follows_the_rows(self):
        run_ranks(4, check_cuts_and_masks, False)

    @pytest.mark.slow
    def test_after_parallelize_each_cut_goes_with_each_mask(self):
        run_ranks(4, check_cuts_and_masks, True)

    @ranks(4)
    def test_a_rank_without_positions_or_heads_does_not_end():
        """Of 5 positions over 4 ranks, the last one has none: torch's kernel would divide by zero."""
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        parallelize(nn.Linear(1, 1), Plan().default(Replicate()), mesh)
        for shape, cut in (
            ((2, 2, 5, 4), Shard(2)),
            ((2, 2, 6, 4), Shard(1)),
            ((3, 2, 6, 4), Shard(0)),
            ((2, 2, 3, 4), Shard(2)),
        ):
            x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
            for is_causal in (False, True):
                single, ours = x.clone().requires_grad_(), distribute_tensor(x, mesh, [cut]).requires_grad_()
                expected, found = (F.scaled_dot_product_attention(t, t, t, is_causal=is_causal) for t in (single, ours))
                torch.testing.assert_close(found.full_tensor(), expected)
                expected.square().sum().backward()
                found.square().sum().backward()
                torch.testing.assert_close(ours.grad.full_tensor(), single.grad)

    @ranks(3)
    def test_pending_arguments_of_which_the_rule_leaves_a_rank_without_heads_do_not_end_it():
        """torch's rule cuts the heads of pending arguments: 4 heads over 3 ranks are 2, 2 and none."""
        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
        parallelize(nn.Linear(1, 1), Plan().default(Replicate()), mesh)
        x = torch.randn(2, 4, 6, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        for is_causal in (False, True):
            single, ours = x.clone().requires_grad_(), DTensor.from_local(x, mesh, [Partial("avg")]).requires_grad_()
            expected, found = (F.scaled_dot_product_attention(t, t, t, is_causal=is_causal) for t in (single, ours))
            torch.testing.assert_close(found.full_tensor(), expected)
            expected.square().sum().backward()
            found.square().sum().backward()
            torch.testing.assert_close(ours.grad.full_tensor(), single.grad)


if __name__ == "__main__":
    unittest.main()
