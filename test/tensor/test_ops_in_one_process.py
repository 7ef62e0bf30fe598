"""Ops on DTensors whose ranks are all in this process (torch's LocalTensorMode): one device's values, shapes and gradients.

Each case is a kind of call that a rule must tell from its neighbours. They take milliseconds: the tests on ranks of processes,
which take seconds, need not repeat them.
"""

import collections
import contextlib
import functools
import itertools
import unittest
from unittest import mock

import torch
import torch.nn.functional as F
from common import enter_fake_group, error_of
from oracle import local_of
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from torch_ragged import InterleavedShard, RaggedShard, StridedRaggedShard
from torch_ragged._register._spmd import compute_as_before, compute_as_one_device
from torch_ragged.tensor import _plain_ops
from torch_ragged.tensor._ops import register_cpu_attention

R, ROWS = Replicate(), RaggedShard((0,), (1, 2, 0, 3))


def numbers(*shape):
    return (torch.arange(torch.Size(shape).numel(), dtype=torch.float64) * 7 % 11 - 5).view(shape)


def whole(tensor):
    """The values of all ranks, which are equal."""
    full = tensor.full_tensor()
    return full.reconcile() if isinstance(full, LocalTensor) else full


TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
AMAX_OUT_RAISES = TORCH >= (2, 15)


class OneProcessTest(unittest.TestCase):
    def setUp(self):
        enter_fake_group(self, 4)
        self.line, self.grid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))

    @contextlib.contextmanager
    def placed(self, *given):
        """Tensors of all ranks; ``given`` has their values and placements."""
        with LocalTensorMode(4):
            meshes = [self.line if len(placements) == 1 else self.grid for _, placements in given]
            yield [distribute_tensor(values, mesh, placements) for (values, placements), mesh in zip(given, meshes)]

    def check(self, function, *given, stays=True):
        """Values and gradients are those of one device. If it ``stays``, none is gathered, and strides are those of it, too."""
        single = [values.clone().requires_grad_() for values, _ in given]
        expected = function(*single)
        wanted = torch.autograd.grad(expected, single, expected.detach() * 3 + 1)
        with self.placed(*given) as tensors:
            found = function(*[tensor.requires_grad_() for tensor in tensors])
            gradients = torch.autograd.grad(found, tensors, found.detach() * 3 + 1)
            if stays:
                self.assertEqual((found.shape, found.stride()), (expected.shape, expected.stride()))
                self.assertTrue(all(map(is_cut, (found, *gradients))), [each.placements for each in (found, *gradients)])
            for one, other in zip((expected.detach(), *wanted), (found.detach(), *gradients)):
                torch.testing.assert_close(whole(other), one)
        return found


def is_cut(tensor):
    return not all(placement.is_replicate() for placement in tensor.placements)


class RaggedTest(OneProcessTest):
    def test_views_of_rows_and_of_columns_are_not_gathered(self):
        for name, view in {
            "rows": lambda x: x[1:4],
            "row": lambda x: x[2],
            "columns": lambda x: x[:, 1:3],
            "column": lambda x: x[:, 2],
            "rows of columns": lambda x: x.t()[1:3],
            "row of columns": lambda x: x.t()[2],
            "inner": lambda x: x.view(6, 2, 2)[:, :, 1],
            "inner of columns": lambda x: x.view(6, 2, 2).transpose(0, 1)[:, :, 1],
            "expanded": lambda x: x.expand(3, 6, 4),
            "expanded column": lambda x: x[:, :1].expand(6, 4),
            "expanded rows": lambda x: x.unsqueeze(1).expand(6, 3, 4),
            "expanded columns": lambda x: x.t().expand(2, 4, 6),
        }.items():
            with self.subTest(name):
                self.check(view, (numbers(6, 4), [ROWS]))

    def test_three_dimensions_that_are_cut_are_not_gathered(self):
        cut = [RaggedShard((0, 1, 2), (1, 4, 0, 7))]
        for function in (lambda x: x.sum(-1), lambda x: x.softmax(-1), lambda x: x @ x.mT):
            found = self.check(function, (numbers(2, 3, 2, 4, 4), cut))
            self.assertEqual(found.placements, tuple(cut))

    def test_a_tensor_without_dimensions_stays_on_its_rank(self):
        cut = [RaggedShard((), (0, 0, 1, 0))]
        for function in (
            lambda x: x * 2,
            lambda x: x * x,
            lambda x: torch._foreach_mul([x], [x])[0],
            lambda x: x.clone().add_(x),
        ):
            with self.placed((torch.tensor(3.0), cut)) as (x,):
                found = function(x)
                sizes = [local.numel() for local in found.to_local()._local_tensors.values()]
                self.assertEqual((sizes, found.placements), ([0, 0, 1, 0], tuple(cut)))
                self.assertEqual(whole(found), function(torch.tensor(3.0)))

    def test_beside_tensors_of_other_placements(self):
        x, others = (numbers(6, 4), [ROWS]), [RaggedShard((0,), (2, 2, 1, 1))]
        pair = numbers(6, 4), [RaggedShard((0,), (1, 2)), R]
        for name, function, placements, *given in (
            ("a ragged factor", lambda x, y: x @ y, None, x, (numbers(4, 5), [RaggedShard((0,), (1, 1, 2, 0))])),
            ("a vector that is cut elsewhere", lambda x, y: x + y, None, pair, (numbers(4), [R, Shard(0)])),
            ("columns of the same rows", lambda x, y: x * y[:, :4], (ROWS,), x, (numbers(6, 5), [ROWS])),
            ("columns of other rows", lambda x, y: x.t() + y.t(), (R,), x, (numbers(6, 4), others)),
            ("narrow columns of other rows", lambda x, y: x[:, 1:] * y[:, 1:], (R,), x, (numbers(6, 4), others)),
        ):
            with self.subTest(name):
                found = self.check(function, *given, stays=False)
                self.assertIn(found.placements, (placements, found.placements if placements is None else None))

    def test_a_loss_and_its_gradient_are_not_gathered(self):
        given = (numbers(6, 4), [ROWS]), (numbers(4, 6).t().contiguous(), [ROWS])
        for loss, reduction in itertools.product((F.mse_loss, F.huber_loss), ("none", "sum", "mean")):
            with self.subTest(loss=loss.__name__, reduction=reduction):
                found = self.check(functools.partial(loss, reduction=reduction), *given)
                self.assertEqual(found.placements, (ROWS if reduction == "none" else Partial(),))

    def test_lists_of_tensors_of_other_rows_are_written_in_place(self):
        """Of some ops, torch tags only the form that is not in place as element-wise."""
        given = (numbers(6, 4).abs(), [ROWS]), (numbers(3, 2).abs(), [RaggedShard((0,), (1, 0, 1, 1))])
        for name in ("abs_", "neg_", "sqrt_", "minimum_"):
            with self.placed(*given) as tensors:
                getattr(torch, f"_foreach_{name}")(list(tensors), *[3.0] * (name == "minimum_"))
                for tensor, (values, placements) in zip(tensors, given):
                    self.assertEqual(tensor.placements, tuple(placements), name)
                    wanted = values.clamp(max=3.0) if name == "minimum_" else getattr(torch.Tensor, name)(values.clone())
                    torch.testing.assert_close(whole(tensor), wanted)

    @unittest.skipIf(AMAX_OUT_RAISES, "torch 2.15's own rule for amax(out=) raises")
    def test_a_result_goes_to_an_out_of_its_placements_only(self):
        with self.placed((numbers(6, 4), [ROWS]), (numbers(4), [Shard(0)])) as (x, cut):
            out = cut.redistribute(placements=[R])
            torch.amax(x, 0, out=out)
            torch.testing.assert_close(whole(out), numbers(6, 4).amax(0))
            self.assertIn("out= must have the placements of the result", error_of(torch.amax, x, 0, out=cut))


class InterleavedTest(OneProcessTest):
    cut = (R, InterleavedShard(0, (2, 1, 1)))

    def test_a_slice_with_steps_is_refused(self):
        with self.placed((numbers(16, 3), [R, InterleavedShard(0, 2)])) as (x,):
            self.assertIn("or it leaves out rows", error_of(lambda: x[::2]))

    def test_slices_and_their_gradients_are_not_gathered(self):
        for name, view in {
            "segments": lambda x: x[8:],
            "first segment": lambda x: x[:8],
            "middle segment": lambda x: x[8:12],
            "columns": lambda x: x[:, 1:],
            "column": lambda x: x[:, 1],
            "inner": lambda x: x.view(16, 2, 2)[:, 1],
            "rows of columns": lambda x: x.t()[1:3],
        }.items():
            with self.subTest(name):
                self.check(view, (numbers(16, 4), self.cut))

    def test_a_tensor_that_is_written_is_not_moved_even_if_that_is_cheapest(self):
        given = (
            (numbers(4, 4), [R, InterleavedShard(0, 2)]),
            (numbers(4, 8), [R, R]),
            (numbers(8, 4), [R, InterleavedShard(1, 2)]),
        )
        with self.placed(*given) as (x, a, b):
            self.assertIs(x.addmm_(a, b), x)
            torch.testing.assert_close(whole(x), numbers(4, 4) + numbers(4, 8) @ numbers(8, 4))

    @unittest.skipIf(AMAX_OUT_RAISES, "torch 2.15's own rule for amax(out=) raises")
    def test_a_result_goes_to_an_out_of_its_placements_only(self):
        with self.placed((numbers(16, 4), self.cut), (numbers(16), self.cut), (numbers(16), [R, Shard(0)])) as (x, out, other):
            torch.amax(x, 1, out=out)
            self.assertEqual(out.placements, self.cut)
            torch.testing.assert_close(whole(out), numbers(16, 4).amax(1))
            self.assertIn("out= must have the placements of the result", error_of(torch.amax, x, 1, out=other))

    def test_a_view_of_a_tensor_that_is_ragged_too_is_refused(self):
        cut = [StridedRaggedShard((0,), (1, 1), split_factor=2), InterleavedShard(0, (1, 1))]
        with self.placed((numbers(16, 4), cut)) as (x,):
            for view in (torch.t, lambda x: x[:, 1:], lambda x: x[:8]):
                self.assertIn("both interleaved and ragged can only run element-wise ops", error_of(view, x))


class PlainTest(OneProcessTest):
    """What a plan's dispatcher does with torch's own placements."""

    def setUp(self):
        super().setUp()
        self.enterContext(compute_as_before())
        compute_as_one_device(True)

    def test_whole_numbers_are_added_to_a_pending_sum_once(self):
        for dtype in (torch.int64, torch.float64, torch.complex64):
            with self.placed((numbers(5).to(dtype), [R])) as (x,):
                found = DTensor.from_local(torch.ones(5, dtype=dtype), self.line, [Partial()]) + x
                torch.testing.assert_close(whole(found), numbers(5).to(dtype) + 4)

    def test_views_of_complex_numbers_keep_strided_shards_or_raise(self):
        values = numbers(8, 8, 2)
        cuts_of = [(_StridedShard(0, split_factor=2), Shard(0))]
        if TORCH > (2, 11):  # 2.11 has no order of shards for it.
            cuts_of.append((R, _StridedShard(1, split_factor=2)))
        for cuts in cuts_of:
            with self.placed((values, [R, R])) as (x,):
                found = torch.view_as_complex(x.redistribute(placements=cuts))
                self.assertEqual(found.placements, cuts)
                self.assertTrue(torch.equal(whole(found), torch.view_as_complex(values)))
                self.assertTrue(torch.equal(whole(torch.view_as_real(found)), values))
        with self.placed((numbers(8, 2), [R, R])) as (x,):
            moved = x.redistribute(placements=[R, _StridedShard(1, split_factor=1)])
            self.assertIn("torch's rule does not know strided shards", error_of(torch.view_as_complex, moved))

    def test_grouped_products_of_columns_whose_rows_kernels_do_not_take(self):
        """Rows of 5 columns do not begin at multiples of 16 bytes."""
        rows, experts, ends = numbers(12, 8).float(), numbers(3, 8, 10).float(), torch.tensor([3, 3, 12], dtype=torch.int32)
        with self.placed((rows, [R, R]), (experts, [R, Shard(2)]), (ends, [R, R])) as (a, b, offs):
            found = F.grouped_mm(a, b, offs=offs)
            self.assertEqual(found.placements, (R, Shard(1)))
            torch.testing.assert_close(whole(found), torch.cat([rows[:3] @ experts[0], rows[3:] @ experts[2]]))

    def test_a_batch_norm_without_statistics(self):
        for mode in (torch.enable_grad, torch.no_grad):
            with mode(), self.placed((numbers(6, 4), [Shard(0)])) as (x,):
                found = F.batch_norm(x, None, None, training=True)
                torch.testing.assert_close(whole(found.detach()), F.batch_norm(numbers(6, 4), None, None, training=True))

    def test_a_list_that_inference_mode_made_is_written_as_before(self):
        with torch.inference_mode(), self.placed((numbers(6, 4), [Shard(0)])) as (x,):
            made = x * 1
        with torch.no_grad(), LocalTensorMode(4):
            torch._foreach_mul_([made], 2.0)
            torch.testing.assert_close(whole(made), numbers(6, 4) * 2)

    def test_only_ranks_between_which_an_argument_moves_are_named(self):
        rows, columns = (distribute_tensor(torch.ones(4, 4), self.grid, [Shard(dim), R]) for dim in range(2))
        named = []

        def look(what, of, waiting):
            named.append((what, waiting()))
            return contextlib.nullcontext()

        with mock.patch.object(_plain_ops, "peers_named", look):
            torch.cat([rows, columns])
        self.assertEqual(named, [("redistribution for aten.cat.default", [0, 2])])

    def test_a_view_differs_if_a_rank_would_hold_other_elements(self):
        """Compared with the elements that each rank holds by the definition of placements."""
        places = list(itertools.product(range(2), repeat=2))
        outcomes = collections.Counter()
        for before, after in (((8, 4), (32,)), ((8, 4), (2, 4, 4)), ((2, 4, 4), (8, 4)), ((4, 8), (2, 2, 8))):
            sides = []
            for shape in (before, after):
                values = torch.arange(32).view(shape)
                kinds = [
                    R,
                    *map(Shard, range(len(shape))),
                    *(_StridedShard(d, split_factor=2) for d in range(max(1, len(shape) - 1))),
                ]
                pairs = list(itertools.product(kinds, repeat=2))
                sides.append(
                    [(p, [local_of(values, (2, 2), p, place).reshape(-1).tolist() for place in places]) for p in pairs]
                )
            for (old, held), (new, wanted) in itertools.product(*sides):
                differs = _plain_ops._differ(before, old, after, new, (2, 2))
                self.assertEqual(differs, held != wanted, (before, old, after, new))
                outcomes[differs] += 1
        self.assertGreater(outcomes[False], 50)


class AttentionTest(OneProcessTest):
    def test_masks_of_all_dimensions(self):
        """A mask that is cut as the queries are moves nothing; under a plan, any mask is cut so."""
        q = numbers(2, 4, 6, 4)
        mask = (numbers(2, 4, 6, 6) > -3) | torch.eye(6).bool()
        for m, under_a_plan in itertools.product((mask, mask[:, :1], mask[0, 0]), (False, True)):
            expected = F.scaled_dot_product_attention(q, q, q, attn_mask=m)
            for cut in (Shard(0), Shard(1), Shard(2)):
                dim = cut.dim - 4 + m.ndim
                alike = Shard(dim) if dim >= 0 and m.shape[dim] > 1 else R
                for mask_cut in dict.fromkeys((R, alike)):
                    with self.subTest(shape=m.shape, cut=cut, mask=mask_cut, under_a_plan=under_a_plan), compute_as_before():
                        if under_a_plan:
                            compute_as_one_device(True)
                        with self.placed((q, [R, cut]), (m, [R, mask_cut])) as (x, given):
                            found = F.scaled_dot_product_attention(x, x, x, attn_mask=given)
                            torch.testing.assert_close(whole(found), expected)
                            if mask_cut == alike or under_a_plan:
                                self.assertEqual(found.placements, (R, cut))

    def test_heads_of_keys_that_ranks_cannot_share_evenly_are_gathered(self):
        q, k = numbers(2, 6, 3, 4), numbers(2, 3, 3, 4)
        expected = F.scaled_dot_product_attention(q, k, k, enable_gqa=True)
        with self.placed((q, [R, Shard(1)]), (k, [R, Shard(1)])) as (a, b):
            found = F.scaled_dot_product_attention(a, b, b, enable_gqa=True)
            self.assertNotIn(Shard(1), found.placements)
            torch.testing.assert_close(whole(found), expected)

    def test_heads_that_are_as_many_may_be_cut_unevenly(self):
        q = numbers(2, 3, 3, 4)
        with self.placed((q, [R, Shard(1)])) as (x,):
            found = F.scaled_dot_product_attention(x, x, x)
            self.assertEqual(found.placements, (R, Shard(1)))
            torch.testing.assert_close(whole(found), F.scaled_dot_product_attention(q, q, q))

    def test_a_rule_that_torch_has_stays(self):
        propagator = DTensor._op_dispatcher.sharding_propagator
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        before = propagator.op_strategy_funcs[op]
        register_cpu_attention()
        self.assertIs(propagator.op_strategy_funcs[op], before)


if __name__ == "__main__":
    unittest.main()
