"""Ops on plain DTensors, after ``parallelize`` has given the dispatcher its handlers: results are those of one device."""

import contextlib
import copy
import functools
import itertools
import math
import unittest
from unittest import mock

import torch
import torch.nn.functional as F
from common import error_of, ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor._redistribute import DTensorRedistributePlanner
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard

from torch_ragged import InterleavedShard
from torch_ragged._register._spmd import compute_as_before, compute_as_one_device
from torch_ragged.random import single_device

R = Replicate()


@contextlib.contextmanager
def as_one_device():
    """The handlers, for a while: other tests in this process see torch's own rules."""
    with compute_as_before():
        compute_as_one_device(True)
        yield


def mesh_of(*sizes):
    return init_device_mesh("cpu", sizes)


def check_on_ranks(function, whole, mesh, placements):
    """Values and the gradient of ``function`` on a DTensor are those of one device."""
    single = whole.clone().requires_grad_()
    expected = function(single)
    expected.square().sum().backward()
    with as_one_device():
        tensor = distribute_tensor(whole, mesh, placements).requires_grad_()
        found = function(tensor)
        assert found.shape == expected.shape
        torch.testing.assert_close(found.full_tensor(), expected.detach(), msg=lambda text: f"{placements}: {text}")
        found.square().sum().backward()
        torch.testing.assert_close(tensor.grad.full_tensor(), single.grad, msg=lambda text: f"{placements}: {text}")


def check_batch_norms(mesh, sizes):
    """Values, gradients and statistics are those of one device. torch's rule cuts channels: 4 over 3 ranks are 2, 2, none."""
    for channels, training in itertools.product(sizes, (True, False)):
        x = torch.randn(6, channels, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        for placements in itertools.product((Shard(0), Shard(1), Partial("avg")), repeat=mesh.ndim):
            single = nn.BatchNorm1d(channels).double().train(training)
            with as_one_device():
                ours = distribute_module(copy.deepcopy(single), mesh)
                # Of a mean that is pending, each rank has the whole value.
                cut = distribute_tensor(x, mesh, [each if each.is_shard() else R for each in placements]).to_local()
                given = DTensor.from_local(cut, mesh, placements, run_check=False, shape=x.shape, stride=x.stride())
                found = values_of(ours, given.requires_grad_())
                found = [each.full_tensor() for each in found]
            expected = values_of(single, x.clone().requires_grad_())
            torch.testing.assert_close(found, expected, msg=lambda text: f"{channels} {training} {placements}: {text}")


def values_of(norm, x):
    output = norm(x)
    output.sin().sum().backward()
    return [output.detach(), x.grad, norm.weight.grad, norm.bias.grad, norm.running_mean, norm.running_var]


def assert_same(found, expected, placements):
    assert found.placements == tuple(placements), found.placements
    assert found.full_tensor().equal(expected), (found.full_tensor(), expected)


class NoRuleTest(unittest.TestCase):
    @ranks(2)
    def test_an_op_without_a_rule_runs_on_whole_tensors():
        whole = torch.arange(12.0).view(4, 3)
        with as_one_device():
            tensor = distribute_tensor(whole, mesh_of(2), [Shard(0)])
            with CommDebugMode() as comms:
                found = tensor.masked_scatter(tensor > 5, torch.ones(12))
            assert comms.get_total_counts() == 2, comms.get_comm_counts()  # The tensor and the mask.
            assert_same(found, whole.masked_scatter(whole > 5, torch.ones(12)), [R])

    @ranks(2)
    def test_its_gradient_arrives_where_the_tensor_is_cut():
        whole, reference = torch.arange(12.0).view(4, 3), torch.arange(12.0).view(4, 3).requires_grad_()
        source = torch.arange(12.0)
        with as_one_device():
            tensor = distribute_tensor(whole, mesh_of(2), [Shard(0)]).requires_grad_()
            tensor.scatter_reduce(
                0, torch.zeros(1, 3, dtype=torch.int64), source[:3].view(1, 3), "sum"
            ).square().sum().backward()
            reference.scatter_reduce(
                0, torch.zeros(1, 3, dtype=torch.int64), source[:3].view(1, 3), "sum"
            ).square().sum().backward()
            assert tensor.grad.full_tensor().equal(reference.grad)

    @ranks(2)
    def test_a_cut_tensor_that_the_op_writes_keeps_its_placements():
        for write in (
            lambda t, i: t.index_add_(0, i, torch.ones(3, 3)),
            lambda t, i: t.index_put_((i,), torch.ones(3, 3)),
            lambda t, i: t.scatter_(0, i[:, None].expand(3, 3), 7.0),
        ):
            whole, index = torch.arange(15.0).view(5, 3), torch.tensor([4, 0, 2])
            with as_one_device():
                tensor = distribute_tensor(whole.clone(), mesh_of(2), [Shard(0)])
                local = tensor._local_tensor
                assert write(tensor, index) is tensor
                assert tensor._local_tensor is local
                assert_same(tensor, write(whole, index), [Shard(0)])

    @ranks(2)
    def test_a_value_is_written_into_a_view_of_a_cut_tensor():
        whole = torch.arange(12).view(4, 3)
        with as_one_device():
            tensor = distribute_tensor(whole.clone(), mesh_of(2), [Shard(0)])
            tensor[..., 0] = 9
            whole[..., 0] = 9
            assert_same(tensor, whole, [Shard(0)])

    @ranks(2)
    def test_views_without_a_rule_run_on_whole_tensors():
        for view in (
            lambda x: x.unfold(0, 2, 1),
            lambda x: torch.stack([row * (i + 1) for i, row in enumerate(x)]),
            lambda x: torch.stack(x.unbind(1)),
            lambda x: x[torch.tensor([True, False, True, True, False])],
            lambda x: x[x > 5],
            lambda x: x.clone().transpose_(0, 1),
            lambda x: (x * 1).unsqueeze(1).squeeze_(1),
        ):
            for cut in (Shard(0), Shard(1), R):
                check_on_ranks(view, torch.arange(15.0).view(5, 3), mesh_of(2), [cut])

    @ranks(2)
    def test_a_view_of_other_strides_is_refused_by_name():
        with as_one_device():
            tensor = distribute_tensor(torch.arange(12.0), mesh_of(2), [Shard(0)])
            assert "aten.as_strided.default is not supported on a DTensor" in error_of(tensor.as_strided, (3,), (2,))
            assert tensor.as_strided((12,), (1,)).full_tensor().equal(torch.arange(12.0))

    @ranks(2)
    def test_a_write_that_would_change_the_shape_is_an_error():
        with as_one_device():
            tensor, mesh = distribute_tensor(torch.ones(1), mesh_of(2), [R]), mesh_of(2)
            a, b = (distribute_tensor(torch.ones(shape), mesh, [R]) for shape in ((2, 3, 4), (2, 4, 5)))
            assert "aten.addbmm_.default would change the shape" in error_of(tensor.addbmm_, a, b)

    @unittest.skipIf(torch.__version__ < "2.13", "torch 2.11 flattens no dimension that is cut behind another")
    @ranks(2)
    def test_a_view_ignores_a_cut_by_one_rank():
        whole = torch.arange(24.0).view(2, 4, 3)
        with as_one_device():
            tensor = distribute_tensor(whole, mesh_of(2, 1), [Shard(1), R])
            placements = [Shard(1), _StridedShard(0, split_factor=2)]  # As a view of rows back to sequences leaves it.
            tensor = DTensor.from_local(
                tensor._local_tensor, tensor.device_mesh, placements, shape=(2, 4, 3), stride=(12, 3, 1)
            )
            with CommDebugMode() as comms:
                found = tensor.flatten(0, 1)
            assert comms.get_total_counts() == 0
            assert found._local_tensor.data_ptr() == tensor._local_tensor.data_ptr()
            assert_same(found, whole.flatten(0, 1), [_StridedShard(0, split_factor=2), R])

    @ranks(4)
    def test_a_view_that_two_mesh_dimensions_cut_too_finely_is_an_error_on_all_ranks():
        whole = torch.arange(40.0).view(2, 5, 4)
        with as_one_device():
            tensor = distribute_tensor(whole, mesh_of(2, 2), [Shard(2), Shard(2)])
            text = error_of(tensor.view, 2, 5, 2, 2)
            assert "to (2, 5, 2, 2): its dimension 2 of 2 would be cut over the 4 ranks" in text, text
            assert_same(tensor.view(2, 5, 4, 1), whole.view(2, 5, 4, 1), [Shard(2), Shard(2)])
            rows = distribute_tensor(whole, mesh_of(2, 2), [Shard(1), Shard(1)])  # Uneven, and stays as it is.
            assert_same(rows.view(2, 5, 2, 2), whole.view(2, 5, 2, 2), [Shard(1), Shard(1)])

    @ranks(3)
    def test_extremes_of_a_tensor_of_which_a_rank_has_nothing():
        mesh, whole = mesh_of(3), torch.arange(6.0).view(2, 3) - 2
        norm, largest = torch.linalg.vector_norm, torch._foreach_max
        for extreme in (
            lambda x: (x.amax(0), x.amin(0), x.amax(1), x.amin()),
            lambda x: (x.max(), x.min(), *x.max(0), *x.min(0)),
            lambda x: (x.argmax(0), x.argmin(0), x.argmax(), x.argmin(1)),
            lambda x: (norm(x, math.inf), norm(x, -math.inf, 0), *torch._foreach_norm([x, x + 1], math.inf), *largest([x])),
        ):
            with as_one_device():
                found = extreme(distribute_tensor(whole, mesh, [Shard(0)]))
                assert [each.full_tensor().tolist() for each in found] == [each.tolist() for each in extreme(whole)]

    @ranks(3)
    def test_kernels_of_images_of_which_a_rank_has_nothing():
        images = (torch.arange(96.0) * 7 % 11).view(2, 4, 12)
        for function in (
            lambda x: F.adaptive_max_pool1d(x, 3),
            lambda x: F.max_pool1d(x, 2),
            lambda x: F.interpolate(x, scale_factor=2),
            lambda x: F.pad(x, (1, 2), "reflect"),
        ):
            for cut in (Shard(0), Shard(1)):
                check_on_ranks(function, images, mesh_of(3), [cut])

    @ranks(4)
    def test_strategies_for_strided_shards_are_compared_without_a_search():
        mesh, whole, weight = mesh_of(2, 2), torch.arange(24.0).view(8, 3), torch.arange(6.0).view(3, 2)
        placements, searches = [_StridedShard(0, split_factor=2), Shard(0)], []
        row, column = mesh.get_coordinate()
        tensor = DTensor.from_local(whole.view(2, 2, 2, 3)[column, row], mesh, placements, run_check=False)
        searched = DTensorRedistributePlanner.find_min_cost_path

        def search(self, *args):
            searches.append(args)
            return searched(self, *args)

        with mock.patch.object(DTensorRedistributePlanner, "find_min_cost_path", search):
            with as_one_device():
                found = tensor @ distribute_tensor(weight, mesh, [R, R])
            assert not searches
            tensor + distribute_tensor(whole, mesh, [R, Shard(1)])
            assert searches  # torch's own way.
        assert_same(found, whole @ weight, placements)

    @ranks(2)
    def test_one_line_is_logged_for_each_op():
        case = unittest.TestCase()
        with as_one_device(), case.assertLogs("torch_ragged.spmd", "INFO") as logs:
            tensor = distribute_tensor(torch.arange(12.0).view(4, 3), mesh_of(2), [Shard(0)])
            for _ in range(2):
                tensor.logcumsumexp(0)
                tensor.renorm(2, 0, 1.0)
        lines = [line for line in logs.output if "renorm" in line]
        case.assertEqual(
            lines,
            [
                "INFO:torch_ragged.spmd:aten.renorm.default has no sharding rule in torch for these placements: it runs on "
                "replicated tensors"
            ],
        )


class WrongRuleTest(unittest.TestCase):
    """Ops that torch alone computes wrong, in silence or with an error of a kernel."""

    @ranks(2)
    def test_dimensions_count_from_the_back_too():
        for scan in (torch.cumsum, torch.cumprod, torch.logcumsumexp, lambda x, dim: x.cummax(dim)[0], torch.softmax):
            for cut, dim in itertools.product((Shard(0), Shard(1)), (-1, -2)):
                check_on_ranks(functools.partial(scan, dim=dim), torch.linspace(-1, 1, 20).view(4, 5), mesh_of(2), [cut])

    @ranks(2)
    def test_dimensions_of_one_row_count_from_the_back_too():
        for whole, cut in itertools.product((torch.arange(8.0).view(1, 8), torch.arange(8.0).view(1, 1, 8)), (-1, -2)):
            with as_one_device():
                tensor = distribute_tensor(whole, mesh_of(2), [Shard(whole.ndim - 1)])
                for extreme in (
                    torch.argmax,
                    torch.argmin,
                    torch.amax,
                    lambda x, dim: x.max(dim)[1],
                    lambda x, dim: x.min(dim)[0],
                ):
                    assert extreme(tensor, dim=cut).full_tensor().equal(extreme(whole, dim=cut)), (whole.shape, cut)
                for several in (torch.sort, lambda x, dim: x.topk(1, dim), torch.cummax):
                    found, expected = several(tensor, dim=cut), several(whole, dim=cut)
                    assert all(a.full_tensor().equal(b) for a, b in zip(found, expected)), (whole.shape, cut)

    @ranks(2)
    def test_no_dimensions_are_all_of_a_reduction():
        for cut in (Shard(0), Shard(1)):
            for function in (lambda x: x.norm(math.inf), lambda x: x.sum((), True), lambda x: torch.mean(x, ())):
                check_on_ranks(function, torch.arange(15.0).view(5, 3), mesh_of(2), [cut])

    @ranks(2)
    def test_gradients_of_kernels_that_are_told_sizes():
        weight = torch.arange(1.0, 5.0)
        for function in (
            lambda x: F.group_norm(x, 2, weight.clone().requires_grad_(), weight),
            lambda x: F.adaptive_avg_pool2d(x, 3),
            lambda x: F.embedding((x[:, :, 0].detach() % 4).long(), x[0], scale_grad_by_freq=True),
            lambda x: F.cosine_embedding_loss(x[:, 0], x[:, 1], torch.tensor([1, -1, 1])),
        ):
            for cut in (Shard(0), Shard(1), Shard(2)):
                check_on_ranks(function, (torch.arange(72.0) * 7 % 11).view(3, 4, 6), mesh_of(2), [cut])

    @ranks(2)
    def test_results_of_permuted_tensors_have_the_strides_that_they_say():
        def order(tensor):
            return sorted(range(tensor.ndim), key=lambda dim: -tensor.stride(dim))

        line = functools.partial(torch.linspace, dtype=torch.float64)
        weight, other = line(0.5, 1.5, 8), line(-1, 1, 192).view(4, 6, 8).transpose(1, 2)
        for name, function in {
            "batch norm": lambda x: F.batch_norm(x, None, None, weight, weight, training=True),
            "in evaluation": lambda x: F.batch_norm(x, weight, weight, weight, weight),
            "log sigmoid": F.logsigmoid,
            "power": lambda x: 2.0**x,
            "copysign": lambda x: torch.copysign(x, other),
            "floor": lambda x: torch.div(x, 0.3, rounding_mode="floor") + x.detach() // 0.3 + x,
            "xlogy": lambda x: torch.xlogy(x, other.exp()) + torch.special.xlog1py(x, other.exp()),
            "losses": lambda x: F.mse_loss(x, other) + F.huber_loss(x, other) + F.smooth_l1_loss(x, other),
            "softmax": lambda x: x.log_softmax(-1),
        }.items():
            for cut in (Shard(0), Shard(1), Shard(2), R):
                seen = []

                def run(x, function=function, seen=seen):
                    permuted = x.transpose(1, 2)
                    permuted.register_hook(seen.append) if permuted.requires_grad else None
                    result = function(permuted)
                    seen.append(result)
                    # Bias and contiguity choose the kernel, and so do views.
                    flat = result if result.ndim == 0 else F.linear(result.transpose(1, 2), weight.expand(3, 8), weight[:3])
                    return flat.contiguous().view(-1)

                check_on_ranks(run, line(-2, 2, 192).view(4, 6, 8), mesh_of(2), [cut])
                for each in seen:
                    if isinstance(each, DTensor) and each.ndim:
                        assert order(each) == order(each._local_tensor), (name, cut, each.placements, each.stride())

    @ranks(4)
    def test_batch_norms_of_which_a_rank_has_no_channels_on_two_mesh_dimensions():
        check_batch_norms(mesh_of(2, 2), (2, 3))

    @ranks(3)
    def test_batch_norms_of_which_a_rank_has_no_channels():
        check_batch_norms(mesh_of(3), (2, 4))

    @ranks(2)
    def test_gradients_of_a_group_norm_of_cut_rows_are_pending_and_move_no_rows():
        with as_one_device(), CommDebugMode() as comms:
            rows = distribute_tensor(torch.randn(4, 6, 5), mesh_of(2), [Shard(0)]).requires_grad_()
            weight = distribute_tensor(torch.ones(6), mesh_of(2), [R]).requires_grad_()
            before = comms.get_total_counts()
            F.group_norm(rows, 2, weight, weight).sum().backward()
        assert comms.get_total_counts() == before and weight.grad.placements == (Partial(),)

    @ranks(2)
    def test_a_number_beside_a_pending_sum_is_no_summand():
        """The dispatcher has one key for a number and for a tensor of its type without dimensions: both orders are right."""
        for dtype, shape in itertools.product((torch.float64, torch.int64), ((), (3,))):
            for first in (False, True):
                with as_one_device():
                    torch.distributed.tensor.debug._clear_sharding_prop_cache()
                    pending = DTensor.from_local(torch.ones(shape, dtype=dtype), mesh_of(2), [Partial()])
                    tensor, number = (
                        distribute_tensor(torch.tensor(2, dtype=dtype), mesh_of(2), [R]),
                        2.0 if dtype.is_floating_point else 2,
                    )
                    for other in (tensor, number) if first else (number, tensor):
                        assert (pending + other).full_tensor().eq(4).all() and (pending - other).full_tensor().eq(0).all()

    @ranks(2)
    def test_values_are_written_to_a_pending_sum_once():
        with as_one_device():
            for write, expected in (
                (lambda x: x.fill_(3), 3.0),
                (lambda x: 1 - x, -3.0),
                (lambda x: x.reciprocal(), 0.25),
                (lambda x: x.sqrt_(), 2.0),
                (lambda x: x.clamp_(max=3), 3.0),
            ):
                pending = DTensor.from_local(torch.full((2, 3), 2.0), mesh_of(2), [Partial()])
                assert write(pending).full_tensor().eq(expected).all()

    @ranks(2)
    def test_recurrent_layers_under_all_placements():
        for kind in (nn.GRU, nn.RNN, nn.LSTM):
            plain = kind(4, 4, batch_first=True)
            layers = {torch.Tensor: plain, DTensor: distribute_module(copy.deepcopy(plain), mesh_of(2))}
            for cut in (R, Shard(0), Shard(1), Shard(2)):
                check_on_ranks(lambda x: layers[type(x)](x)[0], torch.linspace(-1, 1, 48).view(3, 4, 4), mesh_of(2), [cut])

    @ranks(2)
    def test_a_plain_tensor_gets_all_values_that_are_written_to_it():
        with as_one_device():
            plain, tensor = torch.ones(4, 3), distribute_tensor(torch.arange(12.0).view(4, 3), mesh_of(2), [Shard(0)])
            assert plain.add_(tensor) is plain and plain.equal(torch.arange(12.0).view(4, 3) + 1)

    @ranks(4)
    def test_a_product_of_batch_and_heads_that_two_mesh_dimensions_cut():
        """q, k and v of one projection: each is one segment, and a view joins batch and heads."""

        def attention(y):
            q, k, v = (each.unflatten(-1, (-1, 2)).transpose(1, 2) for each in y.split(8, -1))
            return (q @ k.transpose(-1, -2)).softmax(-1) @ v

        for cuts in ([Shard(0), InterleavedShard(2, 3)], [R, InterleavedShard(2, 3)], [Shard(0), R]):
            check_on_ranks(attention, torch.linspace(-1, 1, 4 * 3 * 24).view(4, 3, 24), mesh_of(2, 2), cuts)


class InferenceTest(unittest.TestCase):
    @ranks(2)
    def test_composite_ops_draw_the_numbers_of_one_device():
        """In inference mode they come to DTensor as they are; autograd would have taken them apart before."""
        mesh = init_device_mesh("cpu", (2,))
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))

        def attention(t):
            heads = t.view(4, 1, 2, 4)
            return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.5)

        ops = (F.dropout, F.alpha_dropout, F.dropout1d, attention, lambda t: F.rrelu(t, training=True))
        for mode, op, placement in itertools.product((torch.no_grad, torch.inference_mode), ops, (Shard(0), Replicate())):
            with as_one_device(), single_device(), mode():
                torch.manual_seed(3)
                expected, state = op(x), torch.get_rng_state()
                torch.manual_seed(3)
                found = op(distribute_tensor(x, mesh, [placement])).full_tensor()
                assert torch.equal(found, expected), (mode, op, placement)
                assert torch.equal(torch.get_rng_state(), state), (mode, op, placement)


class SortTest(unittest.TestCase):
    @ranks(2)
    def test_a_tensor_that_is_sorted_where_it_is_cut_stays_cut():
        whole = torch.tensor([3, 1, 2, 0, 5, 4, 1])
        with as_one_device():
            tensor = distribute_tensor(whole, mesh_of(2), [Shard(0)])
            for found, expected in zip(torch.sort(tensor, stable=True), torch.sort(whole, stable=True)):
                assert_same(found, expected, [Shard(0)])
            for found, expected in zip(torch.sort(tensor, descending=True)[:1], torch.sort(whole, descending=True)[:1]):
                assert_same(found, expected, [Shard(0)])

    @ranks(2)
    def test_sums_that_are_pending_are_added_before_they_are_sorted():
        with as_one_device():
            part = torch.tensor([1.0, 0.0, 2.0]) * (torch.distributed.get_rank() + 1)
            tensor = DTensor.from_local(part, mesh_of(2), [Partial()])
            assert_same(torch.sort(tensor)[0], torch.tensor([0.0, 3.0, 6.0]), [R])


ROWS, EXPERTS, INNER, OUTER = 12, 3, 8, 16
ENDS = torch.tensor([3, 3, 12], dtype=torch.int32)  # An expert without rows.


def expected_grouped_mm(a, b, ends):
    """Rows by the matrix of their expert, in plain steps."""
    starts = [0, *ends.tolist()[:-1]]
    return torch.cat([a[start:end] @ b[expert] for expert, (start, end) in enumerate(zip(starts, ends.tolist()))])


class ConvolutionTest(unittest.TestCase):
    @ranks(4)
    def test_images_under_many_placements():
        torch.manual_seed(0)
        images, kernel, bias = (torch.randn(*shape, dtype=torch.float64) for shape in ((3, 4, 6), (8, 4, 3), (8,)))
        mesh, up = mesh_of(2, 2), torch.randn(4, 2, 2, 2, dtype=torch.float64)
        functions = {
            "conv1d": (F.conv1d, (images, kernel, bias), {"padding": 1}),
            "conv_transpose2d": (F.conv_transpose2d, (images.unsqueeze(-1), up), {"stride": 2}),
        }
        with as_one_device():
            for function, values, options in functions.values():
                for cuts in ((R, R), (Shard(0), Shard(0)), (Shard(0), Shard(1)), (Shard(2), R), (Shard(1), Shard(2))):
                    single = [each.clone().requires_grad_() for each in values]
                    ours = [distribute_tensor(each, mesh, cuts if not i else [R, Shard(0)]) for i, each in enumerate(values)]
                    results = []
                    for inputs in (single, ours):
                        results.append(function(*[each.requires_grad_() for each in inputs], **options))
                        results[-1].square().sum().backward()
                    torch.testing.assert_close(results[1].full_tensor(), results[0])
                    assert results[1].placements == tuple(cut if cut == Shard(0) else R for cut in cuts)
                    for mine, other in zip(ours, single):
                        torch.testing.assert_close(mine.grad.full_tensor(), other.grad)

    @ranks(4)
    def test_rows_that_two_mesh_dimensions_cut_communicate_nothing():
        mesh = mesh_of(2, 2)
        images, kernel = torch.randn(4, 3, 5), torch.randn(2, 3, 3)
        with as_one_device(), CommDebugMode() as comms:
            ours = distribute_tensor(images, mesh, [Shard(0)] * 2).requires_grad_()
            weight = distribute_tensor(kernel, mesh, [R] * 2).requires_grad_()
            before = comms.get_total_counts()
            F.conv1d(ours, weight).sum().backward()
        assert comms.get_total_counts() == before and weight.grad.placements == (Partial(), Partial())


class GroupedMmTest(unittest.TestCase):
    @ranks(4)
    def test_rows_and_experts_under_all_placements():
        torch.manual_seed(0)
        mesh = mesh_of(2, 2)
        a, b = torch.randn(ROWS, INNER), torch.randn(EXPERTS, INNER, OUTER)
        reference = [a.clone().requires_grad_(), b.clone().requires_grad_()]
        out = expected_grouped_mm(*reference, ENDS)
        weight = torch.randn_like(out)
        (out * weight).sum().backward()
        of_a = [R, Shard(0), Shard(1), InterleavedShard(1, 2)]
        of_b = [R, Shard(0), Shard(1), Shard(2), InterleavedShard(2, 2), InterleavedShard(1, 2)]
        with as_one_device():
            for placed_a in [(x, y) for x in of_a for y in of_a if x == R or y == R or x != y]:
                if len({p.dim for p in placed_a if p != R}) < len([p for p in placed_a if p != R]):
                    continue
                for placed_b in of_b:
                    left = distribute_tensor(a, mesh, placed_a).requires_grad_()
                    right = distribute_tensor(b, mesh, [R, placed_b]).requires_grad_()
                    found = F.grouped_mm(left, right, offs=distribute_tensor(ENDS, mesh, [R, R]))
                    torch.testing.assert_close(found.full_tensor(), out.detach(), msg=f"{placed_a} {placed_b}")
                    (found * distribute_tensor(weight, mesh, [R, R])).sum().backward()
                    torch.testing.assert_close(left.grad.full_tensor(), reference[0].grad, msg=f"{placed_a} {placed_b}")
                    torch.testing.assert_close(right.grad.full_tensor(), reference[1].grad, msg=f"{placed_a} {placed_b}")

    @ranks(2)
    def test_a_rank_computes_its_rows_and_communicates_nothing():
        a, b = torch.randn(ROWS, INNER), torch.randn(EXPERTS, INNER, OUTER)
        mesh = mesh_of(2)
        with as_one_device():
            left, ends = distribute_tensor(a, mesh, [Shard(0)]), distribute_tensor(ENDS, mesh, [R])
            right = distribute_tensor(b, mesh, [R])
            with CommDebugMode() as comms:
                found = F.grouped_mm(left, right, offs=ends)
            assert comms.get_total_counts() == 0, comms.get_comm_counts()
            assert found.placements == (Shard(0),) and found._local_tensor.shape == (ROWS // 2, OUTER)
            torch.testing.assert_close(
                found.full_tensor(), expected_grouped_mm(*[t.full_tensor() for t in (left, right)], ENDS)
            )

    @ranks(2)
    def test_columns_of_experts_then_rows_of_experts_communicate_nothing():
        mesh = mesh_of(2)
        with as_one_device():
            tokens, ends = distribute_tensor(torch.randn(ROWS, INNER), mesh, [R]), distribute_tensor(ENDS, mesh, [R])
            up = distribute_tensor(torch.randn(EXPERTS, INNER, OUTER), mesh, [InterleavedShard(2, 2)])
            down = distribute_tensor(torch.randn(EXPERTS, OUTER // 2, INNER), mesh, [Shard(1)])
            with CommDebugMode() as comms:
                gate, features = F.grouped_mm(tokens, up, offs=ends).chunk(2, dim=-1)
                found = F.grouped_mm(F.silu(gate) * features, down, offs=ends)
            assert comms.get_total_counts() == 0, comms.get_comm_counts()
            assert found.placements == (Partial(),)


class RedistributeTest(unittest.TestCase):
    @unittest.skipIf(torch.__version__ < "2.13", "such a view is an error in earlier versions")
    @ranks(4)
    def test_cuts_that_share_a_dimension_are_undone_one_by_one():
        """A view of two cut dimensions as one makes them. torch alone gives other elements, or raises."""
        mesh, whole = mesh_of(2, 2), torch.arange(32.0).view(4, 4, 2)
        count = 0
        with as_one_device():
            for cuts in itertools.product((Shard(0), Shard(1)), repeat=2):
                flat = distribute_tensor(whole, mesh, cuts).view(16, 2)
                if not any(isinstance(placement, _StridedShard) for placement in flat.placements):
                    continue
                for chosen in itertools.product((None, R, Shard(1)), repeat=2):
                    target = [placement or own for placement, own in zip(chosen, flat.placements)]
                    if target.count(Shard(1)) < 2:
                        moved = flat.redistribute(placements=target)
                        assert_same(moved, whole.view(16, 2), target)
                        assert_same(moved.redistribute(placements=flat.placements), whole.view(16, 2), flat.placements)
                        count += 1
        assert count == 24, count

    @ranks(4)
    def test_positions_of_extremes_have_the_placements_that_they_say():
        """torch 2.15 names placements of a redistribution that its handler does not make."""
        mesh = mesh_of(2, 2)
        for shape in ((4, 2, 6), (3, 4)):
            whole = torch.randn(shape, generator=torch.Generator().manual_seed(0))
            for placements in itertools.product((R, *map(Shard, range(len(shape)))), repeat=2):
                tensor = distribute_tensor(whole, mesh, placements)
                for dim, keeps in itertools.product((0, -1), (False, True)):
                    with as_one_device():
                        found = tensor.argmax(dim, keepdim=keeps)
                    assert found.full_tensor().equal(whole.argmax(dim, keepdim=keeps)), (shape, placements, dim, keeps)

    @ranks(4)
    def test_views_of_strided_shards_have_the_values_of_one_device():
        """torch's rule looks at one mesh dimension at a time. (Shard(0), strided by 4) of 32 rows is no cut of 4 x 8."""
        mesh, whole = mesh_of(2, 2), torch.arange(128.0).view(32, 4)
        strided = [_StridedShard(0, split_factor=2), _StridedShard(0, split_factor=4), _StridedShard(1, split_factor=2)]
        count = wrong_by_torch = 0
        for placements in itertools.product((Shard(0), R, *strided), repeat=2):
            tensor = None
            with contextlib.suppress(ValueError, RuntimeError):  # Which torch cannot make, or only in some versions.
                made = distribute_tensor(whole, mesh, [R, R]).redistribute(placements=placements)
                tensor = made if made.full_tensor().equal(whole) else None
            if tensor is None or not any(p in strided for p in placements):
                continue
            for shape in ((4, 8, 4), (2, 64)):
                count += 1
                with as_one_device():
                    leaf = tensor.detach().requires_grad_()
                    view = leaf.view(shape)
                    assert view.full_tensor().equal(whole.view(shape)), (placements, shape, view.placements)
                    (view * whole.view(shape)).sum().backward()
                    assert leaf.grad.full_tensor().equal(whole), (placements, shape)
                    assert view.argmax(-1).full_tensor().equal(whole.view(shape).argmax(-1)), (placements, shape)
                with contextlib.suppress(Exception):
                    wrong_by_torch += not tensor.view(shape).full_tensor().equal(whole.view(shape))
        assert count >= 20 and (wrong_by_torch > 0 or torch.__version__ < "2.13"), (count, wrong_by_torch)

    @unittest.skipIf(torch.__version__ < "2.13", "such a view is an error in earlier versions")
    @ranks(4)
    def test_a_product_after_such_a_view_has_the_values_of_one_device():
        mesh, whole = mesh_of(2, 2), torch.arange(32.0, dtype=torch.float64).view(4, 4, 2)
        weight = torch.randn(2, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        with as_one_device():
            tensor = distribute_tensor(whole, mesh, [Shard(1), Shard(1)])
            found = tensor @ distribute_tensor(weight, mesh, [R, InterleavedShard(1, 2)])
            torch.testing.assert_close(found.full_tensor(), whole @ weight)

    @ranks(4)
    def test_a_pending_embedding_is_reduced_before_its_rows_are_cut():
        mesh, ids = mesh_of(2, 2), torch.tensor([[1, 5, 3], [0, 7, 2]])
        table = torch.arange(32.0).view(8, 4)
        with as_one_device():
            for target in ([Shard(0), R], [Shard(1), R], [Shard(0), Shard(2)], [R, Shard(0)]):
                pending = F.embedding(distribute_tensor(ids, mesh, [R, R]), distribute_tensor(table, mesh, [R, Shard(0)]))
                assert pending.placements == (R, Partial()), pending.placements
                assert_same(pending.redistribute(placements=target), table[ids], target)

    @ranks(4)
    def test_indices_that_are_gathered_for_a_cut_table():
        """A rule gathers them if a rank has none, or if their mesh dimension cuts the table, too."""
        mesh, table = mesh_of(2, 2), torch.arange(32.0).view(8, 4)
        one, two = torch.tensor([[1, 5, 3]]), torch.tensor([[1, 5, 3], [0, 7, 2]])
        cases = [
            (ids, [R, Shard(0)], cut) for ids in (one, two) for cut in ([Shard(0), R], [R, Shard(0)], [Shard(0), Shard(1)])
        ]
        cases += [(two, [Shard(1), Shard(0)], [Shard(0), R]), (two, [Shard(0), R], [R, Shard(0)])]
        for ids, of_table, of_ids in cases:
            plain = table.clone().requires_grad_()
            F.embedding(ids, plain).square().sum().backward()
            with as_one_device():
                weight = distribute_tensor(table, mesh, of_table).requires_grad_()
                cut = distribute_tensor(ids, mesh, of_ids)
                rows = F.embedding(cut, weight)
                assert rows.full_tensor().equal(table[ids]), (of_table, of_ids)
                rows.square().sum().backward()
                assert weight.grad.full_tensor().equal(plain.grad), (of_table, of_ids)
                columns = torch.gather(weight.detach(), 0, cut)
                assert columns.full_tensor().equal(table.gather(0, ids)), (of_table, of_ids)

    @ranks(2)
    def test_a_pending_embedding_may_be_used_twice():
        """Autograd saves it for the backward of a product. torch alone reduces it once, and raises then."""
        mesh, ids, table = mesh_of(2), torch.tensor([[1, 5, 3], [0, 7, 2]]), torch.arange(32.0).view(8, 4)
        scale, plain = torch.full((2, 3, 4), 2.0, requires_grad=True), table.clone().requires_grad_()
        (scale * F.embedding(ids, plain)).square().sum().backward()
        with as_one_device():
            weight = distribute_tensor(table, mesh, [Shard(0)]).requires_grad_()
            factor = distribute_tensor(scale.detach(), mesh, [R]).requires_grad_()
            for _ in range(2):
                weight.grad = factor.grad = None
                pending = F.embedding(distribute_tensor(ids, mesh, [R]), weight)
                (factor * pending).square().sum().backward()
                assert_same(pending, plain.detach()[ids], [Partial()])
                assert factor.grad.full_tensor().equal(scale.grad) and weight.grad.full_tensor().equal(plain.grad)
            rows = torch.gather(weight.detach(), 0, distribute_tensor(ids.view(3, 2), mesh, [R]))
            assert rows.full_tensor().equal(table.gather(0, ids.view(3, 2)))

    @ranks(2)
    def test_a_table_cut_for_one_rank_has_no_mask():
        mesh, ids, table = mesh_of(2, 1), torch.tensor([[1, 5, 3], [0, 7, 2]]), torch.arange(32.0).view(8, 4)
        with as_one_device():
            for _ in range(2):
                rows = F.embedding(distribute_tensor(ids, mesh, [R, R]), distribute_tensor(table, mesh, [R, Shard(0)]))
                assert rows.full_tensor().equal(table[ids])


if __name__ == "__main__":
    unittest.main()
