"""Every ATen op that writes, on views of DTensors: does the write reach the tensor, as on one device, or does it raise?

Calls come from torch's own samples, as the dispatcher sees them; ops without a sample get arguments that fit their schema.
``python test/tensor/write_walk.py --ranks 4`` walks all of them, and prints what is wrong and what is refused.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import itertools
import logging
import math
import random
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from common import run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal import common_methods_invocations as samples
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from torch_ragged import InterleavedShard, RaggedShard, StridedRaggedShard
from torch_ragged.spmd import Plan, parallelize
from torch_ragged.tensor._ops import is_written

aten = torch.ops.aten
NO_VALUES = {aten.set_, aten.resize_, aten._resize_output_, aten.resize_as_, aten.resize_as_sparse_, aten.empty, aten.detach_}
NO_VALUES |= {aten.rrelu_with_noise, aten.rrelu_with_noise_}
"""They write no elements, or leave them uninitialized; rrelu draws, and random ops have tests of their own."""
UNSAID: set[str] = set()
"""Ops that were seen to write an argument of which neither their schema nor ``is_written`` says so."""


@dataclass(frozen=True)
class Call:
    """An op and its arguments on one device."""

    op: Any
    args: Any
    kwargs: Any

    def copy(self) -> tuple[Any, Any]:
        return pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, (self.args, self.kwargs))


def written(op: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that an op writes."""
    arguments = op._schema.arguments
    named = [*zip(arguments, args), *[(each, kwargs[each.name]) for each in arguments if each.name in kwargs]]
    leaves = [leaf for each, value in named if is_written(each) for leaf in pytree.tree_leaves(value)]
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


# -- calls ---------------------------------------------------------------------------------------------------------------


class Recorder(TorchDispatchMode):
    """Keeps the first calls of each op that writes."""

    def __init__(self, found: dict[Any, list[Call]]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        before = Call(op, args, kwargs or {}).copy()
        result = op(*args, **(kwargs or {}))
        targets = {id(each) for each in written(op, args, kwargs or {})}
        sizes = [[each.shape for each in written(op, *each)] for each in ((args, kwargs or {}), before)]
        if targets and sizes[0] == sizes[1]:
            keep(self.found, Call(op, *before))
        pairs = zip(pytree.tree_leaves((args, kwargs or {})), pytree.tree_leaves(before))
        for now, then in pairs:
            dense = isinstance(now, torch.Tensor) and now.layout is torch.strided and now.shape == then.shape
            is_lazy = dense and (now.is_conj() or now.is_neg())  # Its clone has other bits.
            if dense and id(now) not in targets and torch.Tag.inplace_view not in op.tags and not is_lazy:
                if not torch.equal(now.nan_to_num(), then.nan_to_num()):
                    UNSAID.add(str(op))
        return result


def keep(found: dict[Any, list[Call]], call: Call) -> None:
    tensors = [leaf for leaf in pytree.tree_leaves((call.args, call.kwargs)) if isinstance(leaf, torch.Tensor)]
    small = sum(each.numel() for each in tensors) <= 2000 and all(each.layout is torch.strided for each in tensors)
    large = any(each.numel() > 1 for each in written(call.op, call.args, call.kwargs))
    calls = found.setdefault(call.op, [])
    if small and large and len(calls) < 2 and call.op.overloadpacket not in NO_VALUES:
        calls.append(call)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    logging.disable(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)


@functools.cache
def all_calls() -> dict[Any, list[Call]]:
    """Calls of all ops that write, of which one device can run a sample."""
    found: dict[Any, list[Call]] = {}
    for seed in (torch.manual_seed, np.random.seed, random.seed):  # Ranks must agree on the samples.
        seed(0)
    infos = [(info, functools.partial(info.sample_inputs_func, info)) for info in samples.op_db]
    for name in ("unary", "binary", "pointwise", "reduce", "other"):
        infos += [(info, info.sample_inputs) for info in getattr(samples, f"foreach_{name}_op_db")]
    with quiet():
        for info, make in infos:
            dtype = next((d for d in (torch.float32, torch.int64, torch.complex64) if d in info.dtypes), None)
            for way in ("function", "in-place", "out") if dtype is not None else ():
                with contextlib.suppress(Exception):  # Not on CPUs, or not with this dtype.
                    for sample in itertools.islice(make("cpu", dtype, False), 3):
                        _run(info, way, sample, found)
        for name in dir(aten):
            packet = getattr(aten, name)
            for overload in packet.overloads() if hasattr(packet, "overloads") else ():
                op = getattr(packet, overload)
                has_out = any(each.is_out for each in op._schema.arguments)
                is_internal = name.startswith("_") and not name.startswith("_foreach_")  # Their kernels check less.
                if op._schema.is_mutable and not found.get(op) and not has_out and not is_internal:
                    _guess(op, found)
    return {op: calls for op, calls in sorted(found.items(), key=lambda pair: str(pair[0])) if calls}


def _run(info: Any, way: str, sample: Any, found: dict[Any, list[Call]]) -> None:
    options = dict(sample.kwargs)
    function = getattr(info, "inplace_variant", None) if way == "in-place" else info.op
    if function is None or (way == "out" and not info.supports_out):
        return
    if way == "out":
        options["out"] = pytree.tree_map(torch.zeros_like, info.op(sample.input, *sample.args, **options))
    with Recorder(found):
        function(sample.input, *sample.args, **options)


def _guess(op: Any, found: dict[Any, list[Call]]) -> None:
    """A call by the types of the op's schema, for the first dtype with which it runs."""
    for dtype in (torch.float32, torch.int64, torch.bool):

        def value(argument: Any) -> Any:
            tensor = torch.arange(24).view(6, 4).remainder(5).add(1).to(dtype)
            kind = str(argument.type)
            if "Tensor" in kind:
                return [tensor, tensor.clone()] if "List" in kind or "[]" in kind else tensor
            if "List" in kind or "[]" in kind:
                return [2, 1]
            return {"bool": False, "str": "floor"}.get(kind.replace("Optional[", "").rstrip("]"), 1)

        needed = [each for each in op._schema.arguments if not each.has_default_value()]
        with contextlib.suppress(Exception):
            args = [value(each) for each in needed if not each.kwarg_only]
            kwargs = {each.name: value(each) for each in needed if each.kwarg_only}
            with Recorder(found):
                op(*args, **kwargs)
            if found.get(op):
                return


# -- views ---------------------------------------------------------------------------------------------------------------

View = tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[Any], Any]]
"""How a base is made such that the view of it is a tensor that is given, and the view."""

VIEWS: dict[str, View] = {
    "alias": (lambda t: t, lambda b: aten.alias(b)),
    "select": (lambda t: torch.stack([t, t], -1), lambda b: b.select(-1, 1)),
    "select row": (lambda t: torch.stack([t, t], 0), lambda b: b[0]),
    "slice": (lambda t: torch.cat([t, t], 0), lambda b: b[b.shape[0] // 2 :]),
    "steps": (lambda t: torch.stack([t, t], 1).flatten(0, 1), lambda b: b[1::2]),
    "narrow": (lambda t: torch.cat([t, t, t], -1), lambda b: b.narrow(-1, b.shape[-1] // 3, b.shape[-1] // 3)),
    "transpose": (lambda t: t.transpose(0, -1).contiguous(), lambda b: b.transpose(0, -1)),
    "permute": (lambda t: t.movedim(0, -1).contiguous(), lambda b: b.permute(b.ndim - 1, *range(b.ndim - 1))),
    "diagonal": (torch.diag_embed, lambda b: b.diagonal(0, -2, -1)),
    "flatten": (lambda t: t.unflatten(-1, (2, -1)), lambda b: b.view(*b.shape[:-2], b.shape[-2] * b.shape[-1])),
    "unflatten": (lambda t: t.flatten(0, 1), lambda b: b.view(2, b.shape[0] // 2, *b.shape[1:])),
    "unsqueeze": (lambda t: t.squeeze(0) if t.shape[0] == 1 else _unfit(), lambda b: b.unsqueeze(0)),
    "squeeze": (lambda t: t.unsqueeze(1), lambda b: b.squeeze(1)),
    "chunk": (lambda t: torch.cat([t, t], -1), lambda b: b.chunk(2, -1)[1]),
    "split": (lambda t: torch.cat([t, t], 0), lambda b: b.split(b.shape[0] // 2)[0]),
    "unbind": (lambda t: torch.stack([t, t], 0), lambda b: b.unbind(0)[1]),
    "unbind last": (lambda t: torch.stack([t, t], -1), lambda b: b.unbind(-1)[0]),
    "unfold": (lambda t: t.flatten(-2), lambda b: b.unfold(-1, b.shape[-1] // 2, b.shape[-1] // 2)),
    "real": (lambda t: torch.complex(t, t), lambda b: torch.view_as_real(b)[..., 0]),
    "bits": (lambda t: t.view(torch.int32), lambda b: b.view(torch.float32)),
}


def _unfit() -> Any:
    raise RuntimeError("this view cannot give the tensor")


def base_of(tensor: torch.Tensor, views: tuple[str, ...]) -> torch.Tensor | None:
    """A base of which ``views`` have the shape and values of ``tensor``; None if there is none."""
    base = tensor
    try:
        for name in reversed(views):
            base = VIEWS[name][0](base)
        base = base.contiguous().clone()
        found = view_of(base, views)
    except (RuntimeError, IndexError, TypeError):
        return None
    return base if found.shape == tensor.shape and found.dtype == tensor.dtype else None


def view_of(base: Any, views: tuple[str, ...]) -> Any:
    for name in views:
        base = VIEWS[name][1](base)
    return base


# -- placements ----------------------------------------------------------------------------------------------------------


def placements_of(tensor: torch.Tensor, ranks: int) -> list[tuple[Placement, ...]]:
    """All kinds of placements of a tensor, on one mesh dimension or on two."""
    if not tensor.ndim or not tensor.numel():
        return []
    shape, first = tuple(tensor.shape), tensor.shape[0]
    found: list[Placement] = [Replicate(), *map(Shard, range(tensor.ndim))]
    if tensor.dtype.is_floating_point:
        found.append(Partial())
    for dim, size in enumerate(shape):
        found += [_StridedShard(dim, split_factor=2)] * (size % (2 * ranks) == 0)
        found += [InterleavedShard(dim, 2)] * InterleavedShard(dim, 2).fits(size, ranks)
    units = [[1] * (ranks - 1) + [first - ranks + 1], [0] * (ranks - 1) + [first]]
    found += [RaggedShard((0,), each) for each in units if min(each) >= 0]
    found.append(RaggedShard((), [1] + [0] * (ranks - 1)))
    if math.prod(shape) % 3 == 0 and ranks == 2:
        found.append(RaggedShard(tuple(range(tensor.ndim)), [1, 2]))
    if ranks == 2:
        return [(each,) for each in found]
    plain = [each for each in found if type(each) in (Replicate, Shard, Partial)]
    pairs: list[tuple[Placement, ...]] = [*itertools.product(plain, plain)]
    if first % 4 == 0:
        pairs += [(StridedRaggedShard((0,), [1, first // 2 - 1], split_factor=2), Shard(0))]
    return pairs


# -- the walk ------------------------------------------------------------------------------------------------------------


@dataclass
class Case:
    call: Call
    views: tuple[str, ...]
    which: int  # Which of the tensors that the op writes is the view.

    def run(self, place: Callable[[torch.Tensor], Any], replicate: Callable[[torch.Tensor], Any]) -> list[Any]:
        """The base, its view and the results after the call, where these functions place the base and the other tensors."""
        args, kwargs = self.call.copy()
        target = written(self.call.op, args, kwargs)[self.which]
        base = place(base_of(target, self.views))
        view = view_of(base, self.views)
        other = view_of(base, self.views)  # Made before the write, read after it.

        def given(leaf: Any) -> Any:
            return view if leaf is target else replicate(leaf) if isinstance(leaf, torch.Tensor) else leaf

        args, kwargs = pytree.tree_map(given, (args, kwargs))
        torch.manual_seed(3)
        result = self.call.op(*args, **kwargs)
        kept = result if torch.Tag.inplace_view not in self.call.op.tags else None
        return [base, view, other, *pytree.tree_leaves(kept)]


def cases_of(call: Call, every: bool, choose: random.Random, share: float) -> Iterator[Case]:
    """A share of: without a view, behind each view, and behind pairs, all of them or two."""
    names = [(), *[(name,) for name in VIEWS]]
    pairs = [*itertools.product(VIEWS, VIEWS)]
    tensors = written(call.op, call.args, call.kwargs)
    for views in [*names, *(pairs if every else choose.sample(pairs, 2))]:
        which = choose.randrange(len(tensors))
        if not is_chosen(f"{call.op} behind {views} of {list(tensors[which].shape)}", share):
            continue
        if tensors[which].ndim and tensors[which].numel() and base_of(tensors[which], views) is not None:
            yield Case(call, views, which)


def known() -> tuple[int, set[str]]:
    """How many ops have calls, and which of them write an argument of which nothing says so."""
    return len(all_calls()), UNSAID


def is_chosen(name: str, share: float) -> bool:
    return zlib.crc32(name.encode()) % 100_000 < share * 100_000


def walk(share: float, all_pairs: bool, pattern: str = "") -> list[tuple[str, str]]:
    """(case, what happened) on this rank: "equal", "refused: ...", "skipped: ..." or "WRONG: ...", for a ``share`` of cases.

    A small share is one of the placements of some views: to make a view takes as long as to try it.
    """
    ranks = dist.get_world_size()
    sizes = (ranks,) if ranks == 2 else (2, ranks // 2)
    mesh = init_device_mesh("cpu", sizes)
    parallelize(nn.Linear(2, 2), Plan().default(Replicate()), init_device_mesh("cpu", (ranks,), mesh_dim_names=("d",)))
    answers, chosen, views = [], random.Random(0), min(1.0, 25 * share)
    always = {aten.fill_.Scalar, aten.copy_.default, aten.add_.Tensor} if all_pairs else set()
    with quiet(), torch.no_grad():
        for op, calls in all_calls().items():
            for call in calls if pattern in str(op) else ():
                for case in cases_of(call, op in always, chosen, views):
                    tensor = base_of(written(op, call.args, call.kwargs)[case.which], case.views)
                    for placements in placements_of(tensor, ranks):
                        name = f"{op} behind {case.views} of {list(tensor.shape)} under {placements}"
                        if is_chosen(name, share / views):
                            answers.append((name, outcome(case, mesh, placements)))
    return answers


def outcome(case: Case, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> str:
    try:
        wanted = case.run(lambda base: base, lambda tensor: tensor)
        direct = Case(case.call, (), case.which).run(lambda base: base, lambda tensor: tensor)
        other = wanted[2] if wanted[2].shape == wanted[1].shape else wanted[1]  # Some kernels give ``out`` other memory.
        if not all(torch.allclose(wanted[1], each, 1e-4, 1e-4, equal_nan=True) for each in (direct[1], other)):
            return "skipped: the kernel of one device ignores the strides of what it writes"
    except Exception:  # The op may not write to such a view.
        wanted = None
    try:
        everywhere = (Replicate(),) * mesh.ndim
        found = case.run(lambda base: placed(base, mesh, placements), lambda tensor: placed(tensor, mesh, everywhere))
        found = [each.full_tensor() if isinstance(each, DTensor) else each for each in found]
    except Exception as error:
        return f"refused: {type(error).__name__}: {error}"
    if wanted is None:
        return "WRONG: one device raises"
    for part, a, b in zip(("tensor", "view", "other view", *["result"] * len(found)), found, wanted):
        if isinstance(b, torch.Tensor) and (a.shape != b.shape or not torch.allclose(a, b, 1e-4, 1e-4, equal_nan=True)):
            return f"WRONG: the {part} differs"
    return "equal"


def placed(tensor: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensor:
    """The DTensor of a tensor that all ranks have, without communication. Of a sum, the first ranks have all."""
    sums = [each if each.is_partial() else Replicate() for each in placements]
    is_first = not any(each.is_partial() and mesh.get_local_rank(dim) for dim, each in enumerate(placements))
    local = tensor if is_first else torch.zeros_like(tensor)
    return DTensor.from_local(local, mesh, sums, run_check=False).redistribute(placements=placements)


def report(answers: list[list[tuple[str, str]]]) -> list[str]:
    """What is wrong: a case that differs from one device, or of which ranks have other outcomes."""
    kinds = [[(name, text.split(":")[0]) for name, text in each] for each in answers]
    found = [f"{name}: {text}" for name, text in answers[0] if text.startswith("WRONG")]
    for index, (name, _) in enumerate(answers[0]):
        if len({each[index] for each in kinds}) > 1:
            found.append(f"{name}: {[each[index][1] for each in answers]}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--pairs", action="store_true")
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    answers = run_ranks(options.ranks, walk, options.share, options.pairs, options.only, timeout=24 * 3600)
    found, texts = report(answers), collections.Counter(text.split("\n")[0][:150] for _, text in answers[0])
    print(*found, sep="\n")
    print(*[f"{count:7} {text}" for text, count in texts.most_common(60)], sep="\n")
    print(f"{len(answers[0])} cases, {len(found)} wrong")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
