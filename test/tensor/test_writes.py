"""Writes into a part of a DTensor, through views that are copies, and into arguments that an op's rule redistributes."""

import unittest

import pytest
import torch
from common import error_of, ranks, run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from write_walk import known, report, walk

from torch_ragged import InterleavedShard, RaggedShard
from torch_ragged._register._spmd import compute_as_before, compute_as_one_device
from torch_ragged.spmd import Plan, parallelize
from torch_ragged.tensor._copied_view import CopiedView

WRITES = {
    "a row": lambda t: t.__setitem__(slice(1, 3), 2.0),
    "a column of the next": lambda t: t.__setitem__((slice(None), 0), t[:, 1] * 3),
    "zero_": lambda t: t[:, 1:].zero_(),
    "mul_": lambda t: t[..., :3].mul_(5),
    "sigmoid_": lambda t: t[..., :3].sigmoid_(),
    "copy_": lambda t: t.narrow(1, 0, 2).copy_(torch.ones(6, 2, 6)),
    "select": lambda t: t.select(0, -1).add_(3),
    "diagonal": lambda t: t.diagonal(0, 1, 2).fill_(0),
    "transpose": lambda t: t.transpose(1, 2).__setitem__((slice(None), 0), 4.0),
    "flat": lambda t: t.view(6, 24)[:, 0].mul_(3),
    "foreach": lambda t: torch._foreach_mul_([t[:, 1:]], 2.0) if not t.requires_grad else t[0].mul_(2.0),
}


def base():
    return torch.randn(6, 4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def placed(tensor, mesh, *placements):
    return DTensor.from_local(tensor.clone(), mesh, [Replicate()], run_check=False).redistribute(placements=placements)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class WritesTest(unittest.TestCase):
    def test_a_sample_of_all_writes_reaches_the_tensor_or_raises(self):
        answers = run_ranks(2, walk, 0.002, False, timeout=600)
        self.assertEqual(report(answers), [])
        self.assertGreater(sum(text == "equal" for _, text in answers[0]), 50)

    @pytest.mark.slow
    def test_all_writes_reach_the_tensor_or_raise(self):
        for size, share, least in ((2, 1.0, 30_000), (4, 0.1, 3_000)):
            answers = run_ranks(size, walk, share, True, timeout=10 * 3600)
            self.assertEqual(report(answers), [])
            self.assertGreater(sum(text == "equal" for _, text in answers[0]), least)

    def test_all_arguments_that_ops_write_are_known(self):
        ((count, unsaid),) = run_ranks(1, known)  # In a process that has made the calls for the walk.
        self.assertGreater(count, 400)
        self.assertEqual(unsaid, set())

    @ranks(2)
    def test_gradients_go_through_a_write_to_a_view_that_is_a_copy():
        mesh = init_device_mesh("cpu", (2,))
        weights = torch.arange(144, dtype=torch.float64).view(6, 4, 6)
        with compute_as_before():
            compute_as_one_device(promote=True)
            for name, write in WRITES.items():
                for placement in (Shard(0), Shard(1), Shard(2), Replicate()):
                    found = []
                    for leaf in (base(), placed(base(), mesh, placement)):
                        x = leaf.requires_grad_() * 2
                        view, row = x[:, 0], x[0]
                        write(x)
                        ((x.sin() * weights).sum() + (view * view).sum() + row.sum() * 2).backward()
                        found.append([whole(each.detach()) for each in (x, view, row, leaf.grad)])
                    for a, b in zip(*found):
                        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13, msg=f"{name} under {placement}")

    @ranks(2)
    def test_views_see_what_is_written_to_the_tensor_and_to_other_views():
        mesh = init_device_mesh("cpu", (2,))
        with compute_as_before():
            compute_as_one_device(promote=True)
            for mode in (torch.no_grad, torch.inference_mode):
                for name, write in WRITES.items():
                    for placement in (Shard(0), Shard(1), Shard(2), Replicate()):
                        found = []
                        with mode():
                            for tensor in (base(), placed(base(), mesh, placement)):
                                x = tensor * 2
                                column, row, parts = x[:, 0], x[0], x.chunk(3, 0)
                                write(x)
                                torch._foreach_add_([x], 1.0)
                                parts[1].mul_(2)
                                found.append([whole(each) for each in (x, column, row, *parts)])
                        for a, b in zip(*found):
                            assert torch.equal(a, b), f"{name} under {placement}, {mode.__name__}"

    @ranks(2)
    def test_a_write_to_what_backward_needs_raises_as_on_one_device():
        mesh = init_device_mesh("cpu", (2,))
        with compute_as_before():
            compute_as_one_device(promote=True)
            leaf = placed(base(), mesh, Shard(0)).requires_grad_()
            x = leaf * 2
            loss = (x[3:] ** 2).sum()
            with torch.no_grad():
                x[:1].zero_()
            try:
                loss.backward()
            except RuntimeError as error:
                assert "modified by an inplace operation" in str(error), error
            else:
                raise AssertionError("no error")

    @ranks(2)
    def test_a_view_is_not_redistributed_again_before_a_write():
        mesh = init_device_mesh("cpu", (2,))
        with compute_as_before():
            compute_as_one_device(promote=True)
            for mode in (torch.enable_grad, torch.inference_mode):
                with mode():
                    x = placed(base(), mesh, Shard(0)) * 1
                    view = x[3:]
                    assert type(view) is CopiedView
                    copy = view._gathered
                    (view + view).sin()
                    view.transpose(0, 1).sin()
                    assert view._gathered is copy, mode
                    x.add_(1)
                    assert torch.equal((view + 0).full_tensor(), base()[3:] + 1)
                    assert view._gathered is not copy, mode

    @ranks(2)
    def test_views_that_ran_before_parallelize_reach_the_tensor_after_it():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("d",))
        x = placed(base(), mesh, Shard(0))
        x[3:].zero_()
        assert torch.equal(x.full_tensor(), base())  # torch's own: the write is lost.
        with compute_as_before():
            parallelize(nn.Linear(2, 2), Plan().default(Replicate()), mesh)
            x[3:].zero_()
            assert torch.equal(x.full_tensor()[3:], base()[3:] * 0)

    @ranks(2)
    def test_rows_of_segments_are_written_without_a_plan():
        mesh = init_device_mesh("cpu", (2,))
        ways = (
            lambda t: t[2].zero_(),
            lambda t: t[0, 0].fill_(3),
            lambda t: [each.mul_(index) for index, each in enumerate(t.unbind(1))],
            lambda t: nn.init.ones_(t[1]),
        )
        for way in ways:
            for placement in (InterleavedShard(0, 1), InterleavedShard(1, 2)):
                wanted, tensor = base(), placed(base(), mesh, placement)
                way(wanted)
                way(tensor)
                assert torch.equal(tensor.full_tensor(), wanted)

    @ranks(2)
    def test_statistics_of_features_that_are_cut_are_written():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("d",))
        with compute_as_before():
            for momentum in (0.1, None):
                plain, placed_ = nn.BatchNorm1d(4, momentum=momentum).double(), nn.BatchNorm1d(4, momentum=momentum).double()
                parallelize(placed_, Plan().default(Replicate()), mesh)
                for x in (base()[0].T.contiguous(), base()[1].T.contiguous()):
                    plain(x)
                    placed_(placed(x, mesh, Shard(1)))
                for name, value in plain.named_buffers():
                    torch.testing.assert_close(whole(placed_.get_buffer(name)), value, rtol=1e-12, atol=1e-12)

    @ranks(2)
    def test_a_write_to_two_views_of_one_tensor_at_once_raises():
        mesh = init_device_mesh("cpu", (2,))
        with compute_as_before():
            compute_as_one_device(promote=True)
            x = placed(base(), mesh, Shard(0))
            try:
                torch._foreach_mul_([x[0], x[:, 1:]], 2.0)
            except NotImplementedError as error:
                assert "_foreach_mul_" in str(error) and "one after the other" in str(error), error
            else:
                raise AssertionError("no error")
            assert torch.equal(x.full_tensor(), base())

    @ranks(2)
    def test_a_result_goes_to_an_out_of_other_placements():
        mesh = init_device_mesh("cpu", (2,))
        with compute_as_before():
            compute_as_one_device(promote=True)
            for first, out in ((Shard(0), Shard(1)), (Shard(2), Replicate()), (Replicate(), Shard(0))):
                x, target = placed(base(), mesh, first), placed(base() * 0, mesh, out)
                torch.add(x, 1.0, out=target)
                assert target.placements == (out,) and torch.equal(target.full_tensor(), base() + 1), (first, out)

    @ranks(2)
    def test_bits_of_ragged_and_interleaved_tensors_are_viewed():
        mesh = init_device_mesh("cpu", (2,))
        for placement in (RaggedShard((0,), (1, 2)), InterleavedShard(0, 1), Shard(0)):
            x = placed(base().float(), mesh, placement)
            assert torch.equal(x.view(torch.int32).full_tensor(), base().float().view(torch.int32)), placement

    @ranks(4)
    def test_a_plain_number_that_would_be_written_is_an_error_before_communication():
        """As optimizers of other packages sum up norms: torch would fail with an assertion without a text."""
        mesh, total = init_device_mesh("cpu", (4,)), torch.zeros(1)
        for placement in (RaggedShard((0,), (1, 2, 0, 5)), Shard(0)):
            norm = distribute_tensor(torch.ones(8, 6), mesh, [placement]).norm()
            for number in (total, total[0]):
                for _ in range(2):  # The second one could be answered by a cache of the dispatcher.
                    with CommDebugMode() as mode:
                        assert "DTensor writes to DTensors only" in error_of(number.add_, norm)
                    assert mode.get_total_counts() == 0 and not total.any()
        assert torch.allclose((total + norm).full_tensor(), torch.tensor([48.0]).sqrt())


if __name__ == "__main__":
    unittest.main()
