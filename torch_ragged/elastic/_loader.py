"""The samples of each piece of a step: equal on any number of ranks, and again after a death. No communication."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from torch_ragged.fsdp.bits._same_bits import SameBits, generators_kept, seed_generators

__all__ = ["PieceLoader"]


class PieceLoader:
    """Loads the batch of each piece of a step, in place of ``same.pieces()``::

        loader = PieceLoader(dataset, same, batch_size=4, num_workers=2)     # 4 samples a piece, on all ranks alike
        for _ in range(steps):
            for piece, batch in loader:                                      # this rank's pieces of one step
                loss = model(batch).mean()
                loss.backward()

    Samples are a function of the step and the piece, without ranks and padding: the pieces of all steps, one after another,
    take the samples of epoch 0 in a random order, then those of epoch 1, and so on. Each epoch has each sample once; a piece
    may have the last ones of an epoch and the first ones of the next. Workers load batches ahead, of later steps too. If the
    run goes back, or the number of ranks changes, what was loaded ahead is dropped.

    Random numbers of ``dataset[i]`` (torch's, Python's, NumPy's global generators) begin at a state made of the seed, the epoch
    and ``i``, so that they depend neither on workers nor on ranks. The dataset must not have other random numbers.

    Args:
        dataset: a dataset with ``len`` and ``[]``, equal on all ranks.
        same: the step, the pieces, and which of them this rank has.
        batch_size: samples of a piece.
        seed: of the order and of the samples' random numbers.
        shuffle: if False, samples are in the order of the dataset.
        options: of ``torch.utils.data.DataLoader``, such as ``num_workers``, ``collate_fn`` and ``pin_memory``.

    Raises:
        TypeError: an IterableDataset, whose samples have no numbers; or an option that this class sets itself.
        ValueError: the dataset is empty, or ``batch_size`` is no positive number.
    """

    def __init__(
        self, dataset: Dataset[Any], same: SameBits, batch_size: int, *, seed: int = 0, shuffle: bool = True, **options: Any
    ) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise TypeError(
                f"PieceLoader takes a dataset with len() and [], got {type(dataset).__name__}: samples of a stream have no "
                "numbers, by which another rank could load them again"
            )
        if taken := sorted({"sampler", "batch_sampler", "drop_last", "worker_init_fn", "generator"} & set(options)):
            raise TypeError(f"PieceLoader sets {', '.join(taken)} itself: leave them out")
        if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1 or not len(dataset):
            raise ValueError(f"PieceLoader(batch_size={batch_size!r}) of {len(dataset)} samples: expected positive numbers")
        self._dataset, self._same, self._options = _SeededSamples(dataset, seed), same, options
        self._sampler = _PieceSampler(len(dataset), batch_size, seed if shuffle else None)
        self._ahead: Iterator[Any] = iter(())
        self._next: tuple[int, list[int], int] | None = None  # What the next batch of ``_ahead`` belongs to.

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        """This rank's pieces of one step, and their batches. The rules of :meth:`SameBits.pieces` hold."""
        same = self._same
        for number, piece in enumerate(same.pieces()):
            pieces = same.assigned(same.step)
            last = number + 1 == len(pieces)
            # A DataLoader draws a number when it begins; without workers, it loads here, and seeds the generators.
            with generators_kept():
                if self._next != (same.step, pieces, number):
                    self._ahead = iter(())  # Its workers end first.
                    self._ahead = iter(DataLoader(self._dataset, batch_sampler=self._upcoming(number), **self._options))
                self._next = None  # If it raises, as for a file that cannot be read now, the DataLoader has passed this batch.
                batch = next(self._ahead)
            self._next = (same.step + 1, same.assigned(same.step + 1), 0) if last else (same.step, pieces, number + 1)
            yield piece, batch

    def _upcoming(self, number: int) -> Sampler[list[Any]]:
        """The batches of this step from piece ``number`` of this rank on, then those of all later steps."""
        sampler, same = self._sampler, self._same

        class Upcoming(Sampler[list[Any]]):
            def __iter__(self) -> Iterator[list[Any]]:
                step, first = same.step, number
                while True:
                    for piece in same.assigned(step)[first:]:
                        yield sampler.numbers(step, piece, same.count)
                    step, first = step + 1, 0

        return Upcoming()


class _PieceSampler:
    """The numbers of samples, with their epochs, by step and piece."""

    def __init__(self, samples: int, batch_size: int, seed: int | None) -> None:
        self._samples, self._batch_size, self._seed = samples, batch_size, seed
        self._epoch, self._order = -1, list[int]()

    def numbers(self, step: int, piece: int, pieces: int) -> list[tuple[int, int]]:
        first = (step * pieces + piece) * self._batch_size
        found = []
        for position in range(first, first + self._batch_size):
            epoch, place = divmod(position, self._samples)
            if epoch != self._epoch:
                self._epoch, self._order = epoch, self._order_of(epoch)
            found.append((epoch, self._order[place]))
        return found

    def _order_of(self, epoch: int) -> list[int]:
        if self._seed is None:
            return list(range(self._samples))
        with generators_kept():
            seed_generators(self._seed, "epoch", epoch)
            return torch.randperm(self._samples, device="cpu").tolist()


class _SeededSamples(Dataset[Any]):
    """A dataset whose random numbers are those of the sample."""

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self._dataset, self._seed = dataset, seed

    def __getitem__(self, number: tuple[int, int]) -> Any:
        epoch, index = number
        seed_generators(self._seed, "sample", epoch, index)
        return self._dataset[index]
