"""Comparison: values that ranks note are compared by digests, and a difference is named on every rank."""

import functools
import unittest
from unittest import mock

import torch
import torch.distributed as dist
from common import error_of, ranks
from torch import nn

from torch_ragged._ranks import comparison
from torch_ragged._ranks.comparison import Comparison, compare_before_checkpoint, digest_of


def made(every=4):
    """A comparison of 4 ranks as a mesh of 2 x 2."""
    places = {rank: divmod(rank, 2) for rank in range(4)}
    return Comparison("the calls of Net", lambda: dist.group.WORLD, places, ("dp", "tp"), "cpu", every)


class DigestTest(unittest.TestCase):
    def test_each_byte_counts_and_so_does_its_position(self):
        for dtype in (torch.float32, torch.int64, torch.bfloat16, torch.uint8, torch.bool, torch.complex64):
            value = (torch.arange(30) % 7).to(dtype).view(5, 6)
            digests = {int(digest_of(value))}
            for index in range(30):
                other = value.clone()
                raw = other.view(-1).view(torch.uint8)
                raw[index * len(raw) // 30] ^= 1
                digests.add(int(digest_of(other)))
            self.assertEqual(len(digests), 31, dtype)
        x = torch.arange(1.0, 9.0)
        others = (x, -x, x.flip(0), x.roll(1), torch.cat([x[4:], x[:4]]), x + x.flip(0) * 0 + torch.tensor([1.0, -1.0] * 4))
        self.assertEqual(len({int(digest_of(each)) for each in others}), len(others))

    def test_it_is_of_the_values_and_not_of_their_place_in_memory(self):
        x = torch.randn(7, 5)
        same = (x.clone(), x.t().contiguous().t(), torch.cat([x.new_zeros(1), x.view(-1)])[1:].view(7, 5), x.requires_grad_())
        self.assertEqual({int(digest_of(each)) for each in same}, {int(digest_of(x))})
        odd = torch.arange(40, dtype=torch.uint8)
        self.assertEqual(int(digest_of(odd[3:14])), int(digest_of(odd[3:14].clone())))
        self.assertEqual(int(digest_of(torch.tensor([1 + 2j]).conj())), int(digest_of(torch.tensor([1 - 2j]))))

    def test_large_small_and_empty_tensors(self):
        with mock.patch.object(comparison, "_WORDS", 8):
            x = torch.arange(1000, dtype=torch.int32)
            swapped = x.clone()
            swapped[[3, 803]] = swapped[[803, 3]]
            self.assertNotEqual(int(digest_of(x)), int(digest_of(swapped)))
        with mock.patch.object(comparison, "_known_weights", {}):  # They grow with the tensors.
            digests = {int(digest_of(torch.arange(count))) for count in (1, 511, 512, 5000, 3)}
        self.assertEqual(digests, {int(digest_of(torch.arange(count))) for count in (1, 3, 511, 512, 5000)})
        self.assertEqual(int(digest_of(torch.empty(0, 3))), 0)
        self.assertNotEqual(int(digest_of(torch.tensor(1.0))), int(digest_of(torch.tensor(2.0))))


class ComparisonTest(unittest.TestCase):
    @ranks(4)
    def test_values_may_differ_along_the_dimensions_that_are_told():
        rank, compared = dist.get_rank(), made()
        cases = ((rank // 2, 0b01, 0, ""), (rank, 0b11, 0, ""), (rank, 0b01, 1, "'tp'"), (rank // 2, 0b10, 2, "'dp'"))
        for value, dims, other, along in cases:
            compared.note("x", "given", "Mend it", torch.tensor(value), dims)
            error = error_of(compared.compare)
            text = f"x has other values on rank {other} than on rank 0, along mesh dimension {along}. Mend it"
            assert error.endswith(text) if other else not error, error

    @ranks(4)
    def test_the_first_call_that_differs_is_named_with_its_values_on_all_ranks():
        compared = made()
        for number in (1, 2, 3):
            compared.begin_call()
            compared.note("size", str(5 + (number > 1 and dist.get_rank() == 3)), "Give equal sizes")
            compared.note("x", "given", "Give equal tensors", torch.ones(3))
            compared.note("a", str(number > 2 and dist.get_rank()), "Give equal numbers")
        error = error_of(compared.compare)
        assert "the calls of Net differ between ranks in call 2" in error, error
        assert "size is 5 on rank 0 and 6 on rank 3, along mesh dimension 'dp' and 'tp'. Give equal sizes" in error, error
        errors = [None] * 4
        dist.all_gather_object(errors, error)
        assert len(set(errors)) == 1, errors
        compared.compare()  # What was compared is forgotten.
        if dist.get_rank() == 1:
            compared.begin_call()
        assert "rank 0 made call 3 and rank 1 made call 4: call the model equally often" in error_of(compared.compare)
        other = made()
        if dist.get_rank() != 2:
            other.note("mask", "5", "Give it on all ranks")
        error = error_of(other.compare)
        assert "mask is 5 on rank 0 and not given on rank 2, along mesh dimension 'dp'. Give it" in error, error

    @ranks(4)
    def test_the_first_calls_are_compared_and_then_every_so_many():
        compared = made(every=5)
        assert [number for number in range(1, 22) if compared.begin_call()] == [*range(1, 9), 10, 15, 20]

    @ranks(4)
    def test_a_checkpoint_compares_the_generators():
        class Hook(Comparison):
            def __call__(self, module, args):
                pass

        model = nn.Linear(2, 2)
        places = {rank: (rank,) for rank in range(4)}
        model.register_forward_pre_hook(Hook("the calls of Linear", lambda: dist.group.WORLD, places, ("dp",), "cpu", 16))
        compare_before_checkpoint(nn.Sequential(model))
        if dist.get_rank() == 2:
            torch.rand(1)
        error = error_of(functools.partial(compare_before_checkpoint, nn.Sequential(model)))
        assert "the default generator of 'cpu', before a checkpoint, is in state" in error and "rank 2" in error, error


if __name__ == "__main__":
    unittest.main()
