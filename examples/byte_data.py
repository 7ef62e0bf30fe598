"""Training text as bytes: the Python standard library's sources, or any folder of text, split in train and held-out."""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path

import torch

__all__ = ["ByteData", "load_bytes", "unigram_entropy"]

_HELD_OUT_OF = 20  # one file in so many is held out
_MAX_BYTES = 16 * 1024 * 1024


def load_bytes(folder: str | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Read all text files below ``folder`` (the running interpreter's standard library where None).

    Whole files are held out, chosen by a hash of their relative path, so that every rank and run makes the same split.

    Returns:
        train and held-out bytes, 1-D uint8.

    Raises:
        ValueError: there is no such folder, or not enough text in it for both parts.
    """
    root = Path(folder or sysconfig.get_paths()["stdlib"])
    if not root.is_dir():
        raise ValueError(f"--data {root}: there is no such folder")
    patterns = ("*.py",) if folder is None else ("*",)
    skip = {"site-packages", "__pycache__", "test", "tests", "idlelib"} if folder is None else {"__pycache__", ".git"}
    parts: dict[bool, list[bytes]] = {True: [], False: []}
    total = 0
    for path in sorted(p for pattern in patterns for p in root.rglob(pattern)):
        name = path.relative_to(root)
        if skip & set(name.parts) or not path.is_file():
            continue
        text = path.read_bytes()
        if b"\0" in text[:4096]:  # Not text.
            continue
        held_out = hashlib.sha256(name.as_posix().encode()).digest()[0] % _HELD_OUT_OF == 0
        parts[held_out].append(text)
        total += len(text)
        if total > _MAX_BYTES:
            break
    if not parts[True] and len(parts[False]) == 1:  # A single file: its last part is held out.
        text = parts[False].pop()
        cut = len(text) - len(text) // _HELD_OUT_OF
        parts = {False: [text[:cut]], True: [text[cut:]]}
    elif not parts[True] and parts[False]:
        parts[True].append(parts[False].pop())
    train, held_out = (b"\n".join(parts[flag]) for flag in (False, True))
    for name, text in (("train", train), ("held-out", held_out)):
        if len(text) < 1024:
            raise ValueError(f"--data {root}: only {len(text)} bytes of {name} text found, need at least 1024")
    return tuple(torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in (train, held_out))  # type: ignore


def unigram_entropy(train: torch.Tensor, held_out: torch.Tensor) -> float:
    """Loss in nats per byte, on the held-out bytes, of a model that knows only how often each byte occurs in train."""
    counts = torch.bincount(train.long(), minlength=256).double() + 1.0
    return -(counts / counts.sum()).log()[held_out.long()].mean().item()


class ByteData:
    """Batches that depend on the seed and the position only, not on the number of ranks.

    ``position`` counts the sequences consumed over all ranks.
    """

    def __init__(self, text: torch.Tensor, context: int, batch: int, seed: int) -> None:
        if text.numel() <= context + 1:
            raise ValueError(f"text of {text.numel()} bytes is too short for a context of {context}")
        self._text, self._context, self._batch = text, context, batch
        self.generator = torch.Generator().manual_seed(seed)
        self.position = 0

    def next_batch(self, rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of this rank: (batch / ranks, context) each, int64."""
        starts = torch.randint(0, self._text.numel() - self._context - 1, (self._batch,), generator=self.generator)
        self.position += self._batch
        share = self._batch // ranks
        mine = starts[rank * share : (rank + 1) * share]
        windows = torch.stack([self._text[s : s + self._context + 1] for s in mine.tolist()]).long()
        return windows[:, :-1], windows[:, 1:]
