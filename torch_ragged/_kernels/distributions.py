"""The distributions of torch's random ops on CUDA: which of them the kernel draws, with parameters as torch rounds them.

Sources: torch's ``DistributionTemplates.h``, for both devices and for CUDA, ``TransformationHelper.h`` and ``Dropout.cu``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

import torch

__all__ = ["FLOATS", "INTEGERS", "Sampling", "distribution_of", "dropout", "example"]

_aten = torch.ops.aten
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


@dataclass(frozen=True)
class Sampling:
    """How random bits become the numbers of an op.

    Attributes:
        kind: ``uniform`` of [low, high), ``normal``, ``bernoulli``, or ``integers``.
        lanes: the numbers of one call: 4, or 2 of 64 bits.
        floats: of uniform (low, high - low, high), of normal (mean, standard deviation, 0), of bernoulli (probability, 0, 0).
            They are rounded as torch rounds them.
        integers: (first, how many).
        vector: the neighbours that a thread takes at once; 0 if it takes single elements, ``T`` apart.
    """

    kind: str
    lanes: int
    floats: tuple[float, float, float] = (0.0, 0.0, 0.0)
    integers: tuple[int, int] = (0, 1)
    vector: int = 0


def distribution_of(op: Any, args: Sequence[Any], dtype: torch.dtype) -> Optional[Sampling]:
    """The distribution of an in-place op; None if the kernel does not have it.

    It has ``uniform_``, ``normal_``, ``bernoulli_`` of a number, and ``random_``. The other ops transform a number by
    functions whose bits have no standard; ``bernoulli_`` of a tensor has a grid of its own. Not in it are also complex numbers,
    which torch draws as real ones; ``random_`` of floats beyond their exact integers, whose bounds torch moves; and of all of
    int64, which has no bounds.
    """
    lanes, wide = (2, torch.float64) if dtype == torch.float64 else (4, torch.float32)
    if op is _aten.uniform_.default and dtype in FLOATS:
        low, high = (_rounded(bound, dtype) for bound in (*args, *(0.0, 1.0)[len(args) :]))
        return Sampling("uniform", lanes, (low, _rounded(high - low, dtype), high))
    if op is _aten.normal_.default and dtype in FLOATS:
        mean, deviation = (_rounded(number, wide) for number in (*args, *(0.0, 1.0)[len(args) :]))
        return Sampling("normal", lanes, (mean, deviation, 0.0))
    if op is _aten.bernoulli_.float and dtype in FLOATS + INTEGERS:
        return Sampling("bernoulli", lanes, (_rounded(args[0] if args else 0.5, wide), 0.0, 0.0))
    if op in (_aten.random_.default, _aten.random_.to, getattr(_aten.random_, "from")) and dtype in FLOATS + INTEGERS:
        return _integer_distribution(op, args, dtype)
    return None


def _integer_distribution(op: Any, args: Sequence[Any], dtype: torch.dtype) -> Optional[Sampling]:
    if op is _aten.random_.default:
        if dtype in _DIGITS:
            count = 2 ** _DIGITS[dtype] + 1
        else:
            count = 2 if dtype == torch.bool else torch.iinfo(dtype).max + 1
        return Sampling("integers", 2 if dtype in (torch.int64, torch.float64) else 4, integers=(0, count))
    first, stop = (0, *args) if op is _aten.random_.to else (*args, None)[:2]
    if dtype in _DIGITS:
        most = 2 ** _DIGITS[dtype]
        stop = most + 1 if stop is None else stop
        if first < -most or stop - 1 > most:
            return None
    elif stop is None:
        stop = 2 if dtype == torch.bool else torch.iinfo(dtype).max + 1
    if not 0 < stop - first < 2**64:
        return None  # torch raises, or draws all of int64.
    return Sampling("integers", 2 if stop - first >= 2**28 else 4, integers=(first, stop - first))


def example(kind: str, lanes: int, dtype: torch.dtype) -> tuple[Any, tuple[Any, ...]]:
    """An op with arguments for a trial of a distribution: no rounding and no bit is without effect."""
    if kind == "uniform":
        return _aten.uniform_.default, (-0.7, 0.9)
    if kind == "normal":
        return _aten.normal_.default, (0.3, 1.7)
    if kind == "bernoulli":
        return _aten.bernoulli_.float, (0.37,)
    bounds = (-(2**30), 2**30 - 1) if lanes == 2 else (0, 2) if dtype == torch.bool else (3, 100)
    return getattr(_aten.random_, "from"), bounds


def dropout(p: float, dtype: torch.dtype, vector: int) -> tuple[Sampling, float]:
    """The mask of ``native_dropout``, and the factor of what it keeps. ``vector`` is 1 if the size forbids neighbours."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    kept = _rounded(1.0 - p, wide)
    mask = Sampling("bernoulli", 4, (kept, 0.0, 0.0), vector=vector if vector > 1 else 0)
    return mask, _rounded(1.0 / kept, wide)


def _rounded(number: float, dtype: torch.dtype) -> float:
    return torch.tensor(number, dtype=dtype, device="cpu").item()
