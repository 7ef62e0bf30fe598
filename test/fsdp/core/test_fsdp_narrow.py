"""Gradients that are sent narrow and added up wide: the bits of those that are widened first, whatever each rank has."""

import contextlib
import copy
import itertools
import unittest
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import ranks, run_ranks
from fsdp_common import WideProduct
from soon import soon
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard

from torch_ragged.fsdp import ZERO1, ZERO2, ZERO3, BufferLayout, DBuffer, TensorSpec, fully_shard
from torch_ragged.fsdp.comm import _collectives as implementation
from torch_ragged.fsdp.comm._collectives import ProcessGroupCollectives, ReduceScatterTraits
from torch_ragged.fsdp.comm._gloo import sum_parts
from torch_ragged.fsdp.comm._reduction import Reduction
from torch_ragged.fsdp.comm._wide_gradients import WideGradients
from torch_ragged.fsdp.comm.experimental._copy_engine import CopyEngineCollectives

DIM = 256  # Of a matrix with as many rows matmuls write the gradient themselves.
POLICY = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


class Part(nn.Module):
    """``uses`` says which of its layers a call goes through: all ranks need not agree."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear, self.extra = nn.RMSNorm(DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, DIM, bias=False)

    def forward(self, x, uses):
        x = self.norm(x) if "norm" in uses else x
        x = x + self.linear(x) if "linear" in uses else x
        return x + self.extra(x) if "extra" in uses else x


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(Part() for _ in range(3))

    def forward(self, x, uses):
        for part in self.parts:
            x = part(x, uses)
        return x


def sharded(plain, **options):
    model = copy.deepcopy(plain)
    for part in model.parts:
        fully_shard(part, mp_policy=POLICY, **options)
    return fully_shard(model, mp_policy=POLICY, **options)  # It has no parameters of its own.


@contextlib.contextmanager
def widening():
    """Gradients are widened before they are reduced, as with NCCL."""
    with contextlib.ExitStack() as stack:
        for kind in (ProcessGroupCollectives, CopyEngineCollectives):
            traits = ReduceScatterTraits(adds_wide=False, holds_second_buffer=False)
            stack.enter_context(mock.patch.object(kind, "reduce_scatter_traits", return_value=traits))
        yield


@contextlib.contextmanager
def reduced_dtypes(log):
    """Note the dtype of every buffer that a reduce-scatter over gloo, or by the copy engine, reads."""
    exchange, copies = implementation._gloo.reduce_scatter, CopyEngineCollectives.reduce_scatter

    def noted_exchange(output, buffer, *others, **options):
        log.append(buffer.dtype)
        return exchange(output, buffer, *others, **options)

    def noted_copies(collectives, output, buffer, *others, **options):
        log.append(buffer.dtype)
        return copies(collectives, output, buffer, *others, **options)

    with (
        mock.patch.object(implementation._gloo, "reduce_scatter", noted_exchange),
        mock.patch.object(CopyEngineCollectives, "reduce_scatter", noted_copies),
    ):
        yield


def gradients_of(model, accumulates, collectives):
    """Of several steps: plain, some layers on some ranks only, several backward passes before a reduction, plain again."""
    rank, found, seed = dist.get_rank(), [], itertools.count(1)
    everything = ("norm", "linear", "extra")
    if collectives is not None:
        model.set_collectives(collectives)

    def backward(uses):
        inputs = torch.randn(2, DIM, generator=torch.Generator().manual_seed(10 * next(seed) + rank))
        (model(inputs, uses) ** 2).sum().backward()

    def end_step():
        found.extend(None if p.grad is None else p.grad.to_local().clone() for p in model.parameters())
        model.zero_grad()

    on_first, on_others = (everything, ("norm", "linear")), (("linear",), ("extra",))
    for uses in (everything, ("linear",), *(on_others if rank else on_first)):
        backward(uses)
        end_step()
    for sooner in (everything, everything if rank else ("extra",)):
        accumulates(model, True)
        backward(sooner)
        accumulates(model, False)
        backward(everything)
        end_step()
    backward(everything)
    end_step()
    return found


def without_sync(model, accumulates):
    model.set_requires_gradient_sync(not accumulates)


def not_last(model, accumulates):
    model.set_is_last_backward(not accumulates)


def compare_with_widened(keeps_wide, collectives):
    torch.manual_seed(0)
    plain = Parts()
    with mock.patch("torch_ragged.fsdp.core._fsdp_param_group._KEEPS_WIDE_GRADIENTS", keeps_wide):
        for accumulates, placements in ((without_sync, ZERO3), (not_last, ZERO1)):
            with widening():
                expected = gradients_of(sharded(plain, placements=placements), accumulates, collectives)
            log = []
            with reduced_dtypes(log):
                found = gradients_of(sharded(plain, placements=placements), accumulates, collectives)
            for index, (one, other) in enumerate(zip(expected, found, strict=True)):
                assert (one is None) == (other is None), index
                assert one is None or torch.equal(one, other), (index, (one - other).abs().max())
            narrow, wide = ([torch.bfloat16, torch.float32] if keeps_wide else [torch.bfloat16]), [torch.float32]
            of_parts = 4 * 3 * narrow + 2 * 3 * wide + 3 * narrow
            assert log == (7 * 3 * wide if placements is ZERO1 else of_parts), log


def uneven_accumulation(placements):
    """Ranks that make different numbers of passes, which gather nothing, before one reduction."""
    torch.manual_seed(0)
    plain = Parts()
    inputs, everything = torch.ones(2, DIM), ("norm", "linear", "extra")
    model, alone = sharded(plain, placements=placements), sharded(plain)
    passes = 1 if dist.get_rank() else 3
    for index in range(passes):
        if passes > 1:
            model.set_requires_gradient_sync(index == passes - 1)
            model.set_is_last_backward(index == passes - 1)
        (model(inputs, everything) ** 2).sum().backward()
    (alone(inputs, everything) ** 2).sum().backward()
    for param, once in zip(model.parameters(), alone.parameters(), strict=True):  # Four passes on two ranks.
        torch.testing.assert_close(param.grad.full_tensor(), 2 * once.grad.full_tensor(), rtol=2**-6, atol=1e-3)


@soon()
def raise_on_one_rank(where):
    """A backward pass without sync raises on rank 0 alone, behind the last gather: the next reduction is of one dtype."""
    torch.manual_seed(0)
    model = fully_shard(Part(), mp_policy=POLICY) if where == "loss" else sharded(Parts())
    inputs, everything = torch.ones(2, DIM), ("norm", "linear", "extra")
    model.set_requires_gradient_sync(False)
    if where == "loss":  # Before backward reaches any module.
        loss = model(inputs, everything).sum()
        loss.register_hook(_raise)
    else:
        hook = model.parts[0].linear.register_forward_hook(lambda module, args, output: output.register_hook(_raise) and None)
        loss = model(inputs, everything).sum()
        hook.remove()
    try:
        loss.backward()
    except RuntimeError as error:
        assert str(error) == "on rank 0" and dist.get_rank() == 0, error
    else:
        assert dist.get_rank() == 1
    model.set_requires_gradient_sync(True)
    log = []
    with reduced_dtypes(log):
        model(inputs, everything).sum().backward()
    assert set(log) == {torch.float32}, log
    assert all(param.grad is not None for param in model.parameters())


def _raise(gradient):
    if dist.get_rank() == 0:
        raise RuntimeError("on rank 0")


class Product(nn.Module):
    """A matrix, whose gradient comes in float32 on rank 0 and in bfloat16 on the others; and another one."""

    def __init__(self):
        super().__init__()
        self.weight, self.other = (nn.Parameter(torch.randn(DIM, DIM) / 16) for _ in range(2))

    def forward(self, x):
        x = x @ self.other.t()
        return WideProduct.apply(x, self.weight) if dist.get_rank() == 0 else F.linear(x, self.weight.t())


class NarrowTest(unittest.TestCase):
    def test_bits_are_those_of_gradients_widened_first(self):
        for keeps_wide, collectives in itertools.product((False, True), (None, "copy_engine")):
            with self.subTest(keeps_wide=keeps_wide, collectives=collectives):
                run_ranks(2, compare_with_widened, keeps_wide, collectives)

    @ranks(2)
    def test_no_wider_buffer_is_allocated():
        """No second, wider buffer is acquired."""
        model = sharded(Parts())
        acquired = []
        original = DBuffer.__init__

        def noted(buffer, *arguments, **options):
            original(buffer, *arguments, **options)
            acquired.append((type(buffer.placements[-1]), buffer.flat.dtype))

        with mock.patch.object(DBuffer, "__init__", noted):
            model(torch.randn(2, DIM), ("norm", "linear", "extra")).sum().backward()
        assert {dtype for placement, dtype in acquired if placement is not Shard} == {torch.bfloat16}, acquired

    def test_a_backward_that_raised_on_one_rank_leaves_ranks_in_step(self):
        for where in ("loss", "first"):
            with self.subTest(where=where):
                run_ranks(2, raise_on_one_rank, where)

    def test_ranks_may_accumulate_different_numbers_of_passes(self):
        for placements in (ZERO1, ZERO2):
            with self.subTest(placements=placements):
                run_ranks(2, uneven_accumulation, placements)

    @ranks(2)
    def test_a_backward_without_gradients_leaves_what_is_sent_alone():
        """Backward passes without sync that bring a group nothing while it is reduced leave what is sent alone."""
        torch.manual_seed(0)
        model = sharded(Parts())
        model.set_manual_backward_finalization(True)
        model.set_reduce_scatter_max_input_buffers(2)
        found = []
        for has_second in (False, True):
            model(torch.ones(2, DIM), ("linear",)).sum().backward()
            if has_second:
                model.set_requires_gradient_sync(False)
                model(torch.ones(2, DIM, requires_grad=True), ()).sum().backward()
                model.set_requires_gradient_sync(True)
            model.finalize_backward()
            found.append([None if p.grad is None else p.grad.full_tensor() for p in model.parameters()])
            model.zero_grad()
        for one, other in zip(*found):
            assert (one is None) == (other is None) and (one is None or torch.equal(one, other))
        assert any(one is not None and one.abs().sum() > 0 for one in found[1])

    @ranks(2)
    def test_a_wide_gradient_of_a_matrix_is_rounded_as_matmuls_are():
        """The gradient of a matrix that comes wide on one rank is rounded there, as matmuls' are."""
        torch.manual_seed(0)
        plain = Product()
        with mock.patch("torch_ragged.fsdp.core._fsdp_param_group._KEEPS_WIDE_GRADIENTS", True):
            model = fully_shard(copy.deepcopy(plain), mp_policy=POLICY)
        inputs = torch.randn(2, DIM, generator=torch.Generator().manual_seed(dist.get_rank()))
        log = []
        with reduced_dtypes(log):
            (model(inputs) ** 2).sum().backward()
        assert log == [torch.bfloat16], log
        plain.bfloat16()
        for param in plain.parameters():
            param.grad_dtype = None
        (plain(inputs.bfloat16()) ** 2).sum().backward()
        for name, param in plain.named_parameters():
            total = param.grad.bfloat16().float()
            dist.all_reduce(total)
            assert torch.equal(model.get_parameter(name).grad.full_tensor(), total / 2), name

    @ranks(3)
    def test_wide_gradients_arrive_where_they_belong():
        """Cut anywhere, held by any ranks: what arrives is their sum."""
        rank, size = dist.get_rank(), dist.get_world_size()
        numels = (5, 1, 40, 0, 9)
        tensors = tuple(TensorSpec(f"{i}", (numel,), (0,), 1) for i, numel in enumerate(numels))
        layout = BufferLayout(tensors, (0, 6, 7, 47, 50), 20, size, 1, 20, "a test", "a test")
        wide = WideGradients(layout, rank, (0, 2, 3, 4))
        assert not wide.are_few
        wide.keep(1, torch.ones(1))
        assert [index for index, _ in wide.popped(only_unexpected=True)] == [1] and not wide.kept
        shard = DBuffer(layout, Shard(0), rank, torch.float32, torch.device("cpu"))
        shard.flat.fill_(1.0)
        mine = {0: (0,), 1: (2, 4), 2: (4,)}[rank]
        gradients = {index: torch.arange(float(numels[index])).view(-1, 1) + 100 * rank for index in mine}
        collectives, ones = ProcessGroupCollectives(dist.group.WORLD), torch.full((layout.numel,), 2.0 * (rank == 0))
        assert wide.allow_narrow(collectives, shard.flat.device) is False
        for index, gradient in gradients.items():
            wide.keep(index, gradient)
        wide.reduce_scatter(collectives, shard.flat, ones, Reduction(divisor=2.0)).wait()
        assert not wide.kept
        totals = [torch.arange(5.0), None, torch.arange(40.0) + 100, torch.empty(0), 2 * torch.arange(9.0) + 300]
        for index, total in enumerate(totals):
            start, stop = layout.local_range(index, rank)
            expected = torch.ones(stop - start) if total is None else 1 + total[start:stop] / 2
            assert torch.equal(shard.tensor(index), expected), (index, shard.tensor(index), expected)
        assert WideGradients(layout, rank, (1,)).allow_narrow(collectives, shard.flat.device)
        with mock.patch.object(collectives, "reduce_scatter") as issued:  # No second one.
            WideGradients(layout, rank, ()).reduce_scatter(collectives, shard.flat, ones, Reduction())
        assert issued.call_count == 1

    def test_wide_gradients_are_many_above_a_sixteenth_of_the_buffer(self):
        numels = (2, 2, 50, 1)
        tensors = tuple(TensorSpec(f"{i}", (numel,), (0,), 1) for i, numel in enumerate(numels))
        layout = BufferLayout(tensors, (0, 2, 4, 54), 32, 2, 1, 32, "a test", "a test")  # Of 64 elements.
        for indices, are_few in (((0,), True), ((0, 1), False), ((2,), False), ((), True)):
            wide, many = WideGradients(layout, 0, indices), []
            for index in (0, 1, 3):
                wide.keep(index, torch.ones(numels[index]))
                many.append(wide.are_many)
            # If few are expected, all are kept beside the buffer.
            self.assertEqual((wide.are_few, many), (are_few, [False, False, not are_few]), indices)

    def test_sum_is_that_of_widened_parts(self):
        numel = 2**18 + 77  # Added up in pieces.
        for dtype, world in itertools.product((torch.bfloat16, torch.float16), (1, 2, 5, 33)):
            parts = torch.randn(world, numel, generator=torch.Generator().manual_seed(world)).to(dtype)
            expected = parts[0].float()
            for part in parts[1:]:
                expected += part.float()
            for output in torch.empty(numel), torch.empty(numel, dtype=dtype):
                sum_parts(parts.unbind(), output, 3.0)
                self.assertTrue(torch.equal(output, (expected / 3).to(output.dtype)))
