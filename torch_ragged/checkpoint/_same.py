"""Check that all ranks have equal values where one rank writes for all. Ranks exchange digests, never the values."""

from __future__ import annotations

import copyreg
import ctypes
import hashlib
import pickle
import reprlib
from collections.abc import Callable, Mapping
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from torch_ragged.checkpoint._errors import CheckpointError, gather

__all__ = ["bytes_of", "refuse_different", "value_digest"]

_COPIED_BYTES = 1 << 25  # Bytes of a tensor that are copied to the CPU at a time.
_PLAIN_VALUES = (type(None), bool, int, float, complex, str, bytes)  # Equal reprs mean equal values.
_shown = reprlib.Repr()
_shown.maxdict = _shown.maxlist = _shown.maxtuple = 8
_shown.maxstring = _shown.maxother = 80


def refuse_different(values: Mapping[str, Any], what: str, group: dist.ProcessGroup | None) -> None:
    """Raise on every rank if a value of ``values`` differs between ranks. A rank that lacks a name is not compared for it.

    Issues one small all-gather of objects. Equal values may have different pickles (because of the order of a set, or of a
    string that occurs twice). Therefore, if pickles differ, a second all-gather compares slower digests of the values
    themselves.

    Args:
        values: this rank's values, by name.
        what: the action that fails, for the text of the error.
        group: the ranks to compare; None is the default group.

    Raises:
        CheckpointError: a value differs. The text names it and shows the values of two ranks.
    """
    digests = gather(lambda: {name: _pickle_digest(value) for name, value in values.items()}, what, group)
    names = sorted(name for name in set().union(*digests) if len({rank[name] for rank in digests if name in rank}) > 1)
    if not names:
        return
    gathered = gather(lambda: {n: (value_digest(values[n]), _brief(values[n])) for n in names if n in values}, what, group)
    problems = {}
    for name in names:
        first_of: dict[str, tuple[str, int]] = {}
        for rank, answers in enumerate(gathered):
            if name in answers:
                first_of.setdefault(answers[name][0], (answers[name][1], rank))
        if len(first_of) > 1:
            (one, rank), (other, other_rank) = list(first_of.values())[:2]
            problems[name] = f"{name} is {one} on rank {rank}, but {other} on rank {other_rank}"
    if problems:
        raise CheckpointError(
            f"{what}: {', '.join(problems)} must be the same on all ranks, because one rank writes it for all. "
            f"Here {'; '.join(problems.values())}. Put values that differ between ranks into TrainState.per_rank, as in "
            "per_rank={'loader': loader}: each rank writes its own"
        )


def bytes_of(tensor: torch.Tensor) -> bytes:
    """A copy of the bytes of a contiguous tensor on the CPU. Does not use NumPy, which may not be installed."""
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.numel() else b""


def _pickle_digest(value: Any) -> str:
    return value_digest(value) if isinstance(value, torch.Tensor) else hashlib.sha256(pickle.dumps(value)).hexdigest()


def _brief(value: Any) -> str:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, torch.Tensor) else _shown.repr(value)


def value_digest(value: Any, above: tuple[int, ...] = ()) -> str:
    """A digest of a value and its contents. It does not depend on the order of dicts and sets, nor on object identities."""
    digest = hashlib.sha256()
    _feed(value, digest.update, above)
    return digest.hexdigest()


def _feed(value: Any, add: Callable[[bytes], None], above: tuple[int, ...]) -> None:
    """Call ``add`` with bytes that differ for different values. ``above`` has the ids of the containers around ``value``."""
    if id(value) in above:
        add(b"cycle")
        return
    above, kind = (*above, id(value)), type(value)
    add(f"{kind.__module__}.{kind.__qualname__}(".encode())
    if isinstance(value, DTensor):
        _feed((repr(value.placements), tuple(value.shape), value.to_local()), add, above)
    elif isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_quantized:
        add(f"{value.dtype} {tuple(value.shape)}".encode())
        flat = value.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
        for part in flat.split(_COPIED_BYTES):
            add(bytes_of(part.cpu()))
    elif kind in _PLAIN_VALUES:
        add(repr(value).encode())
    elif kind in (dict, set, frozenset):
        pairs = value.items() if kind is dict else ((item, None) for item in value)
        for pair in sorted(value_digest(key) + value_digest(item, above) for key, item in pairs):
            add(pair.encode())
    elif kind in (list, tuple):
        for item in value:
            _feed(item, add, above)
    elif isinstance(value, (type, FunctionType, BuiltinFunctionType)):
        add(f"{value.__module__}.{value.__qualname__}".encode())
    else:  # Other objects: the parts that pickle would store.
        reduced = copyreg.dispatch_table[kind](value) if kind in copyreg.dispatch_table else value.__reduce_ex__(4)
        parts = reduced if isinstance(reduced, str) else (*reduced[:3], list(reduced[3] or ()) if reduced[3:] else [])
        _feed(parts, add, above)
        _feed(dict(reduced[4] or ()) if not isinstance(reduced, str) and reduced[4:] else {}, add, above)
    add(b")")
