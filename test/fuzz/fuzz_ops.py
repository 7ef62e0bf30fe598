"""Operations for random programs. Each takes a random generator and tensors (all plain, or all DTensors) and uses some of them.

``PLAIN`` and ``ROUNDING`` map a name to a function ``(rng, tensors) -> (result, indices of the tensors used)``.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

__all__ = ["IN_PLACE", "LISTS", "PLAIN", "ROUNDING", "Skip", "bytes_of"]


def bytes_of(values: torch.Tensor) -> bytes:
    """The elements in order. A view of one element may have any stride, which a copy in contiguous format has not."""
    return values.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy().tobytes()


class Skip(Exception):
    """The operation does not take these tensors."""


def need(condition: bool) -> None:
    if not condition:
        raise Skip


def _unary(function: Callable[[Any], Any]) -> Any:
    return lambda rng, t: (function(t[0]), (0,))


def _numeric(function: Callable[[Any], Any]) -> Any:
    def call(rng: random.Random, t: Any) -> Any:
        need(t[0].dtype != torch.bool)
        return function(t[0]), (0,)

    return call


def _binary(function: Callable[[Any, Any], Any]) -> Any:
    def call(rng: random.Random, t: Any) -> Any:
        need(torch.bool not in (t[0].dtype, t[1].dtype))
        torch.broadcast_shapes(t[0].shape, t[1].shape)
        return function(t[0], t[1]), (0, 1)

    return call


def _along(function: Callable[[Any, int, bool], Any]) -> Any:
    def call(rng: random.Random, t: Any) -> Any:
        dim, keep = _dim(rng, t[0]), rng.random() < 0.5
        need(t[0].size(dim) > 0)
        return function(t[0], dim, keep), (0,)

    return call


def _dim(rng: random.Random, tensor: Any) -> int:
    need(tensor.ndim > 0)
    return rng.randrange(tensor.ndim)


def _where(rng: random.Random, t: Any) -> Any:
    need(t[0].shape == t[1].shape and t[0].dtype == t[1].dtype != torch.bool)
    return torch.where(t[0] > t[1], t[0], t[1]), (0, 1)


def _view(rng: random.Random, t: Any) -> Any:
    """Another shape of the same elements: dimensions split and merged."""
    sizes: list[int] = []
    for size in t[0].shape:
        factor = rng.choice([f for f in range(1, size + 1) if size % f == 0] or [1])
        sizes += [factor, size // factor] if rng.random() < 0.5 and size else [size]
    merged: list[int] = []
    for size in sizes:
        if merged and rng.random() < 0.4:
            merged[-1] *= size
        else:
            merged.append(size)
    need(math.prod(merged) == t[0].numel())
    return t[0].reshape(merged), (0,)


def _permute(rng: random.Random, t: Any) -> Any:
    order = list(range(t[0].ndim))
    rng.shuffle(order)
    return t[0].permute(order), (0,)


def _narrow(rng: random.Random, t: Any) -> Any:
    dim = _dim(rng, t[0])
    start = rng.randint(0, t[0].size(dim))
    return t[0].narrow(dim, start, rng.randint(0, t[0].size(dim) - start)), (0,)


def _select(rng: random.Random, t: Any) -> Any:
    dim = _dim(rng, t[0])
    need(t[0].size(dim) > 0)
    return t[0].select(dim, rng.randrange(t[0].size(dim))), (0,)


def _split(rng: random.Random, t: Any) -> Any:
    return list(t[0].split(rng.randint(1, 3), _dim(rng, t[0])))[:3], (0,)


def _cat(rng: random.Random, t: Any) -> Any:
    need(t[0].ndim == t[1].ndim > 0 and t[0].dtype == t[1].dtype)
    dim = _dim(rng, t[0])
    need(all(a == b for d, (a, b) in enumerate(zip(t[0].shape, t[1].shape, strict=True)) if d != dim))
    return torch.cat([t[0], t[1]], dim), (0, 1)


def _stack(rng: random.Random, t: Any) -> Any:
    need(t[0].shape == t[1].shape and t[0].dtype == t[1].dtype)
    return torch.stack([t[0], t[1]], rng.randint(0, t[0].ndim)), (0, 1)


def _matmul(rng: random.Random, t: Any) -> Any:
    need(t[0].dtype == t[1].dtype != torch.bool and t[0].ndim > 1 and t[1].ndim == 2)
    if t[0].size(-1) == t[1].size(0):
        return t[0] @ t[1], (0, 1)
    need(t[0].size(-1) == t[1].size(1))
    return F.linear(t[0], t[1]), (0, 1)


def _gram(rng: random.Random, t: Any) -> Any:
    need(t[0].ndim == 2 and t[0].dtype != torch.bool)
    return t[0].t() @ t[0] if rng.random() < 0.5 else t[0] @ t[0].t(), (0,)


def _expand(rng: random.Random, t: Any) -> Any:
    return t[0].unsqueeze(0).expand(2, *t[0].shape), (0,)


def _factory(rng: random.Random, t: Any) -> Any:
    make = rng.choice((torch.zeros_like, torch.ones_like, lambda x: torch.full_like(x, 3)))
    return make(t[0]), (0,)


def _index(rng: random.Random, t: Any) -> Any:
    need(t[0].ndim > 0 and t[0].size(0) > 1)
    return t[0][1:] if rng.random() < 0.5 else t[0][..., :-1], (0,)


PLAIN: dict[str, Any] = {
    "add": _binary(torch.add),
    "sub": _binary(torch.sub),
    "mul": _binary(torch.mul),
    "maximum": _binary(torch.maximum),
    "minimum": _binary(torch.minimum),
    "eq": _binary(torch.eq),
    "lt": _binary(torch.lt),
    "add alpha": _binary(lambda a, b: torch.add(a, b, alpha=2)),
    "where": _where,
    "neg": _numeric(torch.neg),
    "abs": _numeric(torch.abs),
    "relu": _numeric(torch.relu),
    "clamp": _numeric(lambda a: a.clamp(-3, 5)),
    "scalar": _numeric(lambda a: 1 - a * 2),
    "compare": _numeric(lambda a: a > 0),
    "clone": _unary(torch.clone),
    "contiguous": _unary(lambda a: a.contiguous()),
    "to bool and back": _numeric(lambda a: a.bool().to(a.dtype)),
    "like": _factory,
    "sum": _numeric(torch.sum),
    "amax": _numeric(lambda a: a.amax() if a.numel() else a.sum()),
    "any": _unary(torch.any),
    "sum along": _along(lambda a, dim, keep: a.sum(dim, keepdim=keep, dtype=torch.int64 if a.dtype == torch.bool else None)),
    "amax along": _along(lambda a, dim, keep: a.amax(dim, keepdim=keep)),
    "amin along": _along(lambda a, dim, keep: a.amin(dim, keepdim=keep)),
    "cumsum": _along(lambda a, dim, keep: a.cumsum(dim) if a.dtype != torch.bool else a),
    "flip": _along(lambda a, dim, keep: a.flip(dim)),
    "view": _view,
    "flatten": _unary(torch.flatten),
    "permute": _permute,
    "unsqueeze": lambda rng, t: (t[0].unsqueeze(rng.randint(0, t[0].ndim)), (0,)),
    "squeeze": _unary(torch.squeeze),
    "narrow": _narrow,
    "select": _select,
    "split": _split,
    "index": _index,
    "cat": _cat,
    "stack": _stack,
    "expand": _expand,
    "matmul": _matmul,
    "matmul again": _matmul,
    "gram": _gram,
}

ROUNDING: dict[str, Any] = {
    "mean": _numeric(torch.mean),
    "mean along": _along(lambda a, dim, keep: a.mean(dim, keepdim=keep)),
    "norm": _numeric(lambda a: torch.linalg.vector_norm(a)),
    "norm along": _along(lambda a, dim, keep: torch.linalg.vector_norm(a, dim=dim, keepdim=keep)),
    "exp": _numeric(lambda a: (a / 64).exp()),
    "div": _binary(lambda a, b: a / (b.abs() + 1)),
    "softmax": _along(lambda a, dim, keep: a.softmax(dim)),
    "log_softmax": _along(lambda a, dim, keep: a.log_softmax(dim)),
    "sqrt": _numeric(lambda a: (a.abs() + 1).sqrt()),
    "var": _numeric(lambda a: a.var(correction=0)),
    "layer_norm": _along(lambda a, dim, keep: F.layer_norm(a, a.shape[-1:])),
    "logsumexp": _along(lambda a, dim, keep: a.logsumexp(dim)),
    "tanh": _numeric(torch.tanh),
    "lerp": _binary(lambda a, b: torch.lerp(a, b.expand_as(a), 0.25) if a.ndim >= b.ndim else a + b),
}

IN_PLACE: dict[str, tuple[int, Callable[..., Any]]] = {  # How many tensors, and the operation.
    "add_": (2, lambda a, b: a.add_(b)),
    "sub_": (2, lambda a, b: a.sub_(b, alpha=2)),
    "mul_ scalar": (1, lambda a: a.mul_(2)),
    "copy_": (2, lambda a, b: a.copy_(b)),
    "neg_": (1, lambda a: a.neg_()),
    "fill_": (1, lambda a: a.fill_(3)),
    "zero_": (1, lambda a: a.zero_()),
    "clamp_": (1, lambda a: a.clamp_(-2, 4)),
    "iadd": (2, lambda a, b: a.__iadd__(b)),
}

LISTS: dict[str, Callable[[list[Any]], Any]] = {
    "_foreach_add": lambda t: torch._foreach_add(t, 1),
    "_foreach_add lists": lambda t: torch._foreach_add(t, t, alpha=2),
    "_foreach_mul_": lambda t: torch._foreach_mul_(t, 2) or t,
    "_foreach_neg": lambda t: torch._foreach_neg(t),
    "_foreach_addcmul_": lambda t: torch._foreach_addcmul_(t, t, t, value=1) or t,
    "_foreach_norm": lambda t: torch._foreach_norm(t),
    "_foreach_copy_": lambda t: torch._foreach_copy_(t, [x + 1 for x in t]) or t,
    "_foreach_abs": lambda t: torch._foreach_abs(t),
    "_foreach_maximum": lambda t: torch._foreach_maximum(t, [-x for x in t]),
}
