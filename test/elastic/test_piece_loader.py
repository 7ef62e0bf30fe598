"""PieceLoader: the samples of a step, and their random numbers, on any number of ranks and workers."""

import random
import unittest
from unittest import mock

import numpy
import torch
from common import error_of
from torch.utils.data import Dataset, IterableDataset

from torch_ragged.elastic import PieceLoader, _loader

SAMPLES, PIECES, SIZE = 22, 5, 3


class Samples(Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, number):
        return torch.tensor([number, torch.rand(()) + random.random() + numpy.random.rand()], dtype=torch.float64)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(9))


class StreamOfSomeLength(Stream):
    def __len__(self):
        return 9


class Rank:
    """Of SameBits: which pieces a rank has, and the step."""

    count = PIECES

    def __init__(self, rank, ranks):
        self.step = 0
        self.move(rank, ranks)

    def move(self, rank, ranks):
        self.rank, self.ranks = rank, ranks

    def assigned(self, step):
        own = range(self.rank, PIECES, self.ranks)
        pieces = [*own, *([PIECES - PIECES % self.ranks] * (-(-PIECES // self.ranks) - len(own)))]
        following = (self.rank + 1) % self.ranks
        return [*pieces, following if following < PIECES else 0] if step == 3 else pieces  # That step is verified.

    def pieces(self):
        yield from self.assigned(self.step)
        self.step += 1


def steps_of(rank, loader, steps):
    return [{(rank.step, piece): batch for piece, batch in loader} for _ in range(steps)]


def all_ranks(ranks, steps=5, **options):
    """The batch of each step and piece; equal where two ranks have a piece."""
    found = {}
    for each in range(ranks):
        rank = Rank(each, ranks)
        for step in steps_of(rank, PieceLoader(Samples(), rank, SIZE, **options), steps):
            for key, batch in step.items():
                assert key not in found or found[key].equal(batch)
                found[key] = batch
    return found


class PieceLoaderTest(unittest.TestCase):
    def assert_same(self, found, expected):
        self.assertEqual(sorted(found), sorted(expected))
        for key, batch in found.items():
            self.assertTrue(batch.equal(expected[key]), key)

    def test_batches_do_not_depend_on_ranks_and_workers(self):
        expected = all_ranks(1)
        for ranks in (2, 3, 5, 7):
            self.assert_same(all_ranks(ranks), expected)
        self.assert_same(all_ranks(2, num_workers=2), expected)
        other = all_ranks(1, seed=1)
        self.assertFalse(any(batch.equal(other[key]) for key, batch in expected.items()))

    def test_each_epoch_has_each_sample_once_in_another_order(self):
        found = all_ranks(3, steps=6)
        stream = torch.cat([found[key] for key in sorted(found)])
        first, second = stream[:SAMPLES], stream[SAMPLES : 2 * SAMPLES]
        for epoch in (first, second):
            self.assertEqual(sorted(epoch[:, 0].tolist()), list(range(SAMPLES)))
        self.assertNotEqual(first[:, 0].tolist(), second[:, 0].tolist())
        self.assertEqual(
            first[:5, 0].tolist(), [7, 4, 20, 13, 21]
        )  # In each version of the package: runs go on with another one.
        self.assertEqual(set(first[:, 1].tolist()) & set(second[:, 1].tolist()), set())
        plain = all_ranks(1, steps=1, shuffle=False)
        self.assertEqual(torch.cat([plain[key] for key in sorted(plain)])[:, 0].tolist(), list(range(PIECES * SIZE)))

    def test_a_run_that_goes_back_or_moves_has_the_same_batches_again(self):
        expected = all_ranks(1, steps=6)
        for workers in (0, 1):
            rank = Rank(0, 2)
            loader = PieceLoader(Samples(), rank, SIZE, num_workers=workers)
            found = {}
            began = mock.Mock(wraps=_loader.DataLoader)
            before = torch.get_rng_state(), random.getstate()
            with mock.patch.object(_loader, "DataLoader", began):
                for each in steps_of(rank, loader, 3):
                    found |= each
            began.assert_called_once()  # It loads ahead.
            rank.step = 1
            for each in steps_of(rank, loader, 2):
                self.assert_same(each, {key: expected[key] for key in each})
            rank.move(1, 3)
            for each in steps_of(rank, loader, 2):
                self.assertEqual([piece for _, piece in each][:2], [1, 4])
                found |= each
            for _, _batch in loader:  # A loop that is left, as by an error, is begun again.
                break
            for each in steps_of(rank, loader, 1):
                found |= each
            self.assert_same(found, {key: expected[key] for key in found})
            self.assertEqual(len(found), 3 * 3 + 3 * 2 + 1)
            self.assertTrue(before[0].equal(torch.get_rng_state()) and before[1] == random.getstate())

    def test_a_batch_that_could_not_be_loaded_is_loaded_again(self):
        for read in range(2 * PIECES * SIZE, 2 * PIECES * SIZE + 4):  # In the third step.
            reads = iter(range(100))

            class Flaky(torch.utils.data.Dataset):
                def __len__(self):
                    return 100

                def __getitem__(self, number):
                    if next(reads) == read:  # noqa: B023
                        raise OSError("a file cannot be read now")
                    return number

            rank = Rank(0, 1)
            loader = PieceLoader(Flaky(), rank, SIZE, shuffle=False)
            list(steps_of(rank, loader, 2))
            self.assertIn("cannot be read now", error_of(list, loader))
            (again,) = steps_of(rank, loader, 1)
            self.assertEqual(torch.cat(list(again.values())).tolist(), [*range(2 * PIECES * SIZE, 3 * PIECES * SIZE)])

    def test_what_it_cannot_number_is_refused(self):
        rank = Rank(0, 1)
        for stream in (Stream(), StreamOfSomeLength(), object()):
            self.assertIn("samples of a stream have no numbers", error_of(PieceLoader, stream, rank, 2))
        taken = ("batch_sampler", "drop_last", "generator", "sampler", "worker_init_fn")
        text = error_of(PieceLoader, [1], rank, 2, **dict.fromkeys(taken, 1))
        self.assertIn(f"PieceLoader sets {', '.join(taken)} itself", text)
        self.assertIn("batch_size=0", error_of(PieceLoader, [1], rank, 0))
        self.assertIn("of 0 samples", error_of(PieceLoader, [], rank, 1))


if __name__ == "__main__":
    unittest.main()
