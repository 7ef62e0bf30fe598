"""Torch's own OpInfo database on DTensors: does an op give the single-device result, or a clear error?

``python test/tensor/op_conformance.py --write docs/data/op_coverage.json`` sweeps ragged DTensors on 4 ranks; the test takes a
sample. ``--family interleaved`` sweeps InterleavedShard on 2 ranks. ``--family plan`` sweeps what flows through a model under a
plan: Replicate, Partial and Shard over two mesh dimensions, with the handlers of ``parallelize``, torch's modules too, and
dimensions counted from the back in every second case.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import itertools
import json
import logging
import math
import pathlib
import platform
import random
import re
import sys
import unittest
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from common import run_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import Placement
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import ModuleInfo, module_db
from torch.testing._internal.opinfo.core import SampleInput
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from torch_ragged import InterleavedShard, RaggedShard
from torch_ragged.tensor._cut_placement import has_own_rules
from torch_ragged.tensor._local_tensor import coordinate_of, on_each_rank

RANKS = 4
CLEAR = (
    "is not supported on a DTensor with",  # ours: names the op, the tensors and the way out
    "in-place operations that require placement changes are not supported",  # torch's: and how to write it instead
    "would change the shape of a DTensor that it writes",  # ours: addbmm_ of a smaller tensor
    "cut the tensor over fewer of them in the plan",  # ours: a view that two mesh dimensions cut too finely
    "tensor, which no DTensor can be",  # ours: of sparse tensors
    "got mixed torch.Tensor and DTensor",  # torch's: the op makes plain tensors inside, so no DTensor can take it
)
UNINITIALIZED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
DTYPES = {torch.float32: 1, torch.bfloat16: 4, torch.int64: 4}
"""For each type of the samples: of the cases, one in so many is run."""
PLAN_DTYPES = {torch.float64: 1, torch.int64: 3}
LEFT_OUT = {
    ("linalg_matrix_rank", "out"): "torch writes to out= by no op that a DTensor sees",
    ("linalg_matrix_rank_hermitian", "out"): "the same",
    ("kron", "out"): "torch writes to a view of out=, which is a copy if out= is cut",
    ("expand_copy", "out"): "torch's rule gives the op the size of all ranks; expand_copy itself is right",
}
"""What is wrong under a plan, by name of the op and variant, and why."""
ROUNDS = {"bfloat16": torch.bfloat16, "half": torch.float16}
"""Ops that round to a type of fewer digits. If a sum is pending, they round its summands."""
TOLERANCE = {torch.float32: (1e-4, 1e-5), torch.bfloat16: (2e-2, 2e-2), torch.float16: (3e-3, 3e-3)}


def interleaved_patterns(shape: tuple[int, ...]) -> list[Placement]:
    """Equal and unequal segments, and one segment, of each dimension that 2 ranks can cut so; Shard(0) if there is none."""
    sizes = ((1,), (1, 1), (3, 2), (1, 2), (1, 1, 1, 2))
    found = [InterleavedShard(dim, each) for dim in range(len(shape)) for each in sizes]
    legal = [placement for placement in found if shape[placement.dim] and placement.fits(shape[placement.dim], 2)]
    return [*legal] or [Replicate()]


def ragged_patterns(shape: tuple[int, ...]) -> list[Placement]:
    """Even, uneven, with zeros, one owner; of whole rows, and of elements where there are several dimensions."""
    found = {RaggedShard((), (0, 0, 1, 0)): None}
    for length in {min(1, len(shape)), len(shape)} - {0}:
        size = math.prod(shape[:length])
        bounds = [size * rank // RANKS for rank in range(RANKS + 1)]
        first, middle = min(1, size), size // 3
        dims = tuple(range(length))
        for edges in (bounds, [0, first, max(first, middle), max(first, middle), size], [0, 0, middle, middle, size]):
            units = [b - a for a, b in itertools.pairwise(edges)]
            if any(units):
                found[RaggedShard(dims, units)] = None
    return list(found)


def plain_patterns(shape: tuple[int, ...], mesh_dims: int) -> list[tuple[Placement, ...]]:
    """All of Replicate, Partial and Shard on each mesh dimension, without Replicate on all."""
    each = (Replicate(), *map(Shard, range(len(shape))), Partial())
    return list(itertools.product(each, repeat=mesh_dims))[1:]


@dataclass(frozen=True)
class Family:
    """Placements to sweep.

    Attributes:
        mesh: the sizes of the mesh dimensions.
        patterns: its placements of a shape.
        step: of the patterns, each sample takes one in so many.
        as_one_device: whether ``parallelize`` has given the dispatcher its handlers. Then torch's own faults count, too.
    """

    mesh: tuple[int, ...]
    patterns: Callable[[tuple[int, ...]], list[tuple[Placement, ...]]]
    step: int = 2
    as_one_device: bool = False


def _plan(*mesh: int) -> Family:
    return Family(mesh, functools.partial(plain_patterns, mesh_dims=len(mesh)), 7, True)


FAMILIES = {
    "ragged": Family((RANKS,), lambda shape: [(each,) for each in ragged_patterns(shape)]),
    "interleaved": Family((2,), lambda shape: [(each,) for each in interleaved_patterns(shape)]),
    "plan": _plan(2, 2),
    "plan of one rank": _plan(2, 1),
    "plan of three": _plan(3),
}


@dataclass
class Tally:
    """How one op fared: cases by outcome, and the texts of errors and wrong results."""

    equal: int = 0
    local: int = 0
    error: int = 0
    texts: dict[str, int] = field(default_factory=collections.Counter)
    wrong: list[str] = field(default_factory=list)
    torch: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Case:
    """An op on one sample, with the tensors at positions ``ragged`` of its flattened arguments cut by pattern ``which``."""

    op: Any
    sample: Any
    variant: str
    which: int
    ragged: tuple[int, ...]
    family: str = "ragged"
    shift: int = 0

    def pattern(self, shape: Any, position: int = 0) -> tuple[Placement, ...]:
        """The placements of a tensor. If there is a ``shift``, each tensor of the case has another pattern."""
        found = FAMILIES[self.family].patterns(tuple(shape))
        return found[(self.which + self.shift * position) % len(found)]

    @property
    def counts_from_the_back(self) -> bool:
        return FAMILIES[self.family].as_one_device and self.which % 2 == 1

    def tensors(self) -> list[torch.Tensor]:
        """Copies of the sample's tensors. Under a plan, those of every third pattern are permuted in memory."""
        copies = [tensor.detach().clone() for tensor in tensors_of(self.sample)]
        if not FAMILIES[self.family].as_one_device or self.which % 3:
            return copies
        return [copy.mT.contiguous().mT if copy.ndim > 1 else copy for copy in copies]

    def run(self, tensors: list[Any]) -> Any:
        torch.manual_seed(1)
        with DimsFromTheBack() if self.counts_from_the_back else contextlib.nullcontext():
            return self.call(tensors)

    def call(self, tensors: list[Any]) -> Any:
        leaves, tree = pytree.tree_flatten((self.sample.input, self.sample.args, self.sample.kwargs))
        positions = iter(tensors)
        leaves = [next(positions) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        first, args, kwargs = pytree.tree_unflatten(leaves, tree)
        if self.variant == "gradient":
            return self.gradient(tensors, first, args, kwargs)
        if self.variant == "out":
            out = self.out_like(tensors, self.op(first, *args, **kwargs))
            return self.op(first, *args, out=out, **kwargs), out
        if self.variant == "in-place":
            result = self.op.get_inplace()(first, *args, **kwargs)
            return result, first
        return self.op(first, *args, **kwargs)

    def is_filled(self, expected: Any) -> bool:
        """Whether a single device writes to ``out=`` what it returns without it."""
        torch.manual_seed(1)
        wanted = dataclasses.replace(self, variant="function").call([t.detach().clone() for t in tensors_of(self.sample)])
        return all(torch.allclose(a, b, equal_nan=True) for a, b in zip(pytree.tree_leaves(expected)[:1], [wanted]))

    def gradient(self, tensors: list[Any], first: Any, args: Any, kwargs: Any) -> Any:
        leaves = [tensors[i].requires_grad_() for i in self.ragged if tensors[i].is_floating_point()]
        result = self.op(first, *args, **kwargs)
        terms = [(r * r.detach()).sum() for r in pytree.tree_leaves(result) if isinstance(r, torch.Tensor) and r.requires_grad]
        return torch.autograd.grad(functools.reduce(torch.add, terms), leaves)

    def out_like(self, tensors: list[Any], result: Any) -> Any:
        """An uninitialized tensor for the result; ragged where the tensors are DTensors."""
        if not isinstance(result, torch.Tensor):
            raise TypeError("several outputs")
        if not isinstance(tensors[0], DTensor):
            return torch.empty_like(result)
        placements = [Replicate() if placement.is_partial() else placement for placement in self.pattern(result.shape)]
        meta = {"dtype": result.dtype, "placements": placements}
        return torch.distributed.tensor.zeros(result.shape, device_mesh=tensors[0].device_mesh, **meta)

    def __str__(self) -> str:
        given = tensors_of(self.sample)
        pattern = [self.pattern(given[i].shape, i) for i in (self.ragged if self.shift else self.ragged[:1])]
        shown = [each if len(each) > 1 else each[0] for each in pattern]

        def brief(leaf: Any) -> Any:
            return f"{str(leaf.dtype)[6:]}{list(leaf.shape)}" if isinstance(leaf, torch.Tensor) else leaf

        arguments = pytree.tree_map(brief, (self.sample.input, *self.sample.args, self.sample.kwargs))
        where = ", dims from the back" if self.counts_from_the_back else ""
        cut = shown if self.shift else shown[0]
        return f"{self.op.formatted_name} {self.variant} {arguments}, tensors {self.ragged} as {cut}{where}"


class DimsFromTheBack(TorchDispatchMode):
    """Each dimension that an op gets is counted from the back: -1 is the last one. Both sides of a comparison get them so."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = next((leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)), None)
        name = op._schema.name
        # The result of the former has one dimension more. The latter would read memory that is not theirs.
        if first is None or name in ("aten::unsqueeze", "aten::stack") or name.startswith("aten::_fft"):
            return op(*args, **(kwargs or {}))
        ndim = len(args[1]) if op._schema.name in ("aten::select_backward", "aten::slice_backward") else first.ndim

        def back(name: str, value: Any) -> Any:
            if name not in ("dim", "dims", "dim0", "dim1", "axis1", "axis2") or not ndim:
                return value
            return pytree.tree_map(lambda each: each - ndim if type(each) is int and 0 <= each < ndim else each, value)

        flipped = [back(argument.name, value) for argument, value in zip(op._schema.arguments, args)]
        return op(*flipped, **(kwargs or {}))


class ModuleAsOp:
    """A module of torch's database with the part of an OpInfo that the sweep reads: its parameters are arguments, too."""

    supports_out, supports_autograd = False, True

    def __init__(self, info: ModuleInfo, training: bool) -> None:
        self.info, self.training = info, training
        self.name = self.formatted_name = f"{info.name}{'' if training else ' in eval()'}"

    def supported_dtypes(self, device: str) -> Any:
        return self.info.supported_dtypes(device)

    def get_inplace(self) -> None:
        return None

    def sample_inputs_func(self, op: Any, device: str, dtype: torch.dtype, requires_grad: bool) -> Iterator[SampleInput]:
        for given in self.info.module_inputs_func(self.info, device, dtype, requires_grad, self.training):
            if given.forward_input is None:
                continue
            arguments, options = given.constructor_input, {"device": device, "dtype": dtype}
            try:
                module = self.info.module_cls(*arguments.args, **arguments.kwargs, **options)
            except TypeError:  # A module without parameters.
                module = self.info.module_cls(*arguments.args, **arguments.kwargs)
            module.train(self.training)
            state = {name: tensor.detach() for name, tensor in module.state_dict(keep_vars=True).items()}
            forward = given.forward_input
            yield SampleInput((forward.args, forward.kwargs), args=(state, module))

    def __call__(self, inputs: Any, state: dict[str, torch.Tensor], module: torch.nn.Module) -> Any:
        return torch.func.functional_call(module, state, *inputs)


def tensors_of(sample: Any) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def cases_of(op: Any, dtype: torch.dtype, samples: int, family: str) -> list[Case]:
    """The cases of ``op`` on up to ``samples`` samples, which take turns at the patterns."""
    for seed in (torch.manual_seed, np.random.seed, random.seed):  # Ranks must agree on the samples.
        seed(0)
    found = []
    taken = itertools.islice(op.sample_inputs_func(op, "cpu", dtype, False), samples)
    for number, sample in enumerate(taken):
        given = tensors_of(sample)
        usable = [i for i, t in enumerate(given) if t.layout is torch.strided and t.is_contiguous() and not t.is_quantized]
        if not usable or any(t.layout is not torch.strided for t in given) or sum(t.numel() for t in given) > 20000:
            continue
        first = usable[0]
        same = tuple(i for i in usable if given[i].shape == given[first].shape)
        choices = [(first,)] + ([same] if len(same) > 1 else []) + [(i,) for i in usable[1:] if i not in same]
        variants = {"function": 1, "in-place": op.get_inplace() and first == 0, "out": op.supports_out}
        for variant, fits in {**variants, "gradient": op.supports_autograd}.items():
            some = variant in ("out", "gradient")  # Their work is that of the function: fewer patterns will do.
            step = FAMILIES[family].step + some  # Samples take turns.
            fits = fits and not (FAMILIES[family].as_one_device and (op.formatted_name, variant) in LEFT_OUT)
            for ragged in choices[: (1 if some else None) if fits else 0]:
                for which in range(number % step, len(FAMILIES[family].patterns(tuple(given[ragged[0]].shape))), step):
                    found.append(Case(op, sample, variant, which, ragged, family))
            if FAMILIES[family].as_one_device and fits:  # And all tensors, each cut in its own way.
                found += [Case(op, sample, variant, number + each, tuple(usable), family, 1 + 5 * each) for each in range(3)]
    return found


def to_dtensors(case: Case, mesh: DeviceMesh, placement: Placement | None = None) -> list[DTensor]:
    """The tensors of the case: those to be ragged as its pattern says, or under ``placement``; the others replicated."""
    results = []
    for position, tensor in enumerate(case.tensors()):
        result = DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
        if position in case.ragged and (tensor.dim() or placement is None):
            result = placed(result, (placement,) if placement else case.pattern(tensor.shape, position))
        results.append(result)
    return results


def placed(whole: DTensor, placements: tuple[Placement, ...]) -> DTensor:
    """``whole`` under these placements. The summands of a pending sum are no zeros; a tensor of indices is not pending."""
    mesh, is_pending = whole.device_mesh, [placement.is_partial() for placement in placements]
    if whole.is_floating_point():
        cut = [Replicate() if placement.is_partial() else placement for placement in placements]
    else:
        cut = placements = [Replicate() if placement.is_partial() else placement for placement in placements]
    result = whole.redistribute(placements=cut)
    if not any(placement.is_partial() for placement in placements):
        return result
    summands = math.prod(mesh.size(dim) for dim, pending in enumerate(is_pending) if pending)

    def part(local: torch.Tensor) -> torch.Tensor:
        has_rest = not any(at for at, pending in zip(coordinate_of(mesh), is_pending) if pending)
        return local - 1.5 * (summands - 1) if has_rest else torch.full_like(local, 1.5)

    local = on_each_rank(part, result._local_tensor)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def order_of(tensor: torch.Tensor, of: DTensor) -> list[int]:
    """The dimensions of ``tensor`` from the outermost in memory to the innermost, as far as the part of ``of`` tells."""
    dims = [dim for dim, size in enumerate(of._local_tensor.shape) if size > 1] if of._local_tensor.numel() else []
    return sorted(dims, key=lambda dim: -tensor.stride(dim))


def difference(got: Any, expected: Any, case: Case) -> str:
    """How the gathered results differ from the single-device ones; empty if they do not."""
    found, wanted = pytree.tree_leaves(got), pytree.tree_leaves(expected)
    if len(found) != len(wanted):
        return f"{len(found)} results in place of {len(wanted)}"
    for one, other in zip(found, wanted, strict=True):
        if not isinstance(other, torch.Tensor):
            if one != other and one == one:
                return f"{one} in place of {other}"
            continue
        if isinstance(one, DTensor):
            if one.shape != other.shape:
                return f"a DTensor of shape {tuple(one.shape)} in place of {tuple(other.shape)}"
            strides = [(a, b) for a, b, size in zip(one.stride(), other.stride(), other.shape, strict=True) if size > 1]
            if (
                any(a != b for a, b in strides)
                and other.numel()
                and has_own_rules(one.placements)
                and case.variant != "gradient"
            ):
                return f"stride {one.stride()} in place of {other.stride()}"
            if (
                FAMILIES[case.family].as_one_device
                and not has_own_rules(one.placements)
                and order_of(one, one) != order_of(one._local_tensor, one)
            ):
                return f"stride {one.stride()}, while its local tensor has {one._local_tensor.stride()}"
            declared = one.shape
            one = one.full_tensor()
            if one.shape != declared:
                return f"a DTensor of shape {tuple(declared)} that gathers to {tuple(one.shape)}"
        rtol, atol = TOLERANCE.get(ROUNDS.get(case.op.name, other.dtype), (1e-7, 1e-7))
        if one.shape != other.shape or one.dtype != other.dtype:
            return f"{one.dtype} {tuple(one.shape)} in place of {other.dtype} {tuple(other.shape)}"
        if case.op.name in UNINITIALIZED:
            continue
        try:
            torch.testing.assert_close(one, other, rtol=rtol, atol=atol, equal_nan=True, check_stride=False)
        except AssertionError as error:
            return str(error).split("\n\n")[0]
    return ""


def agree(mesh: DeviceMesh, state: int) -> bool:
    """Whether ``state`` is the same on every rank."""
    bounds = torch.tensor([state, -state])
    dist.all_reduce(bounds, dist.ReduceOp.MAX)
    return bounds.tolist() == [state, -state]


def run_case(case: Case, mesh: DeviceMesh, tally: Tally, count: bool) -> None:
    try:
        expected = case.run(case.tensors())
        if case.variant == "out" and not case.is_filled(expected):
            return  # torch itself leaves out= as it was: ihfftn.
    except Exception:
        return  # A sample that this machine cannot run is no case.
    error, got = None, None
    try:
        arguments = to_dtensors(case, mesh)
        with CommDebugMode() if count else contextlib.nullcontext() as comm:
            got = case.run(arguments)
    except Exception as exception:
        error = exception
    if not agree(mesh, error is None):
        tally.wrong.append(f"{case}: ranks disagree: rank {dist.get_rank()} has {error!r}")
    elif error is not None:
        text = " ".join(str(error).split())
        if not any(clear in text for clear in CLEAR) and not same_in_torch(case, mesh, expected, None):
            tally.wrong.append(f"{case}: {type(error).__name__}: {text}")
        tally.error += 1
        tally.texts[text] += 1
    else:
        try:
            problem = difference(got, expected, case)
        except Exception as exception:
            problem = f"gathering fails: {exception!r}"
        if not agree(mesh, bool(problem)):
            tally.wrong.append(f"{case}: ranks disagree: rank {dist.get_rank()}: {problem}")
        elif problem and same_in_torch(case, mesh, expected, problem):
            tally.torch.append(f"{case}: {problem}")
        elif problem:
            tally.wrong.append(f"{case}: {problem}")
        else:
            tally.equal += 1
            tally.local += comm is not None and comm.get_total_counts() == 0


def same_in_torch(case: Case, mesh: DeviceMesh, expected: Any, failure: str | None) -> bool:
    """Whether DTensor itself, with Replicate or Shard(0) in place of the ragged placements, fails alike (None: raises)."""
    if FAMILIES[case.family].as_one_device:
        return False
    for placement in (Replicate(), Shard(0)):
        try:
            found: str | None = difference(case.call(to_dtensors(case, mesh, placement)), expected, case)
        except Exception:
            found = None
        if found == failure:
            return True
    return False


def sweep(
    names: str, samples: int, one: bool = False, count: bool = False, share_of_ops: int = 1, family: str = "ragged"
) -> dict[str, Tally]:
    """Run on every rank of the default group. The tally of each op whose name matches, by name.

    float32 in full, bfloat16 and int64 in every fourth case. ``one`` takes one case of each op, ``count`` tells which cases
    communicate, one op of each ``share_of_ops`` is run.
    """
    if not FAMILIES[family].as_one_device:
        return _sweep(names, samples, one, count, share_of_ops, family)
    # The patch series has no plans.
    from torch_ragged._register._spmd import compute_as_before, compute_as_one_device
    from torch_ragged.random import single_device

    with compute_as_before():
        compute_as_one_device(True)
        single_device()
        return _sweep(names, samples, one, count, share_of_ops, family)


def check(
    test: unittest.TestCase, samples: int, one: bool, share: int, least: int, timeout: float, family: str = "ragged"
) -> None:
    """A test of :func:`sweep`: nothing is wrong, and more than ``least`` cases are equal."""
    answers = run_ranks(math.prod(FAMILIES[family].mesh), sweep, ".*", samples, one, False, share, family, timeout=timeout)
    test.assertEqual(wrong_of(answers), [])
    test.assertGreater(sum(tally.equal for tally in answers[0].values()), least)


def _sweep(names: str, samples: int, one: bool, count: bool, share_of_ops: int, family: str) -> dict[str, Tally]:
    mesh, is_plan = init_device_mesh("cpu", FAMILIES[family].mesh), FAMILIES[family].as_one_device
    warnings.simplefilter("ignore")
    logging.getLogger("torch._subclasses.fake_tensor").disabled = True  # It reports bad samples that torch skips itself.
    tallies: dict[str, Tally] = {}
    for op in [
        *op_db,
        *(ModuleAsOp(info, mode) for info in module_db for mode in (True, False) if is_plan and not info.is_lazy),
    ]:
        choice = zlib.crc32(op.formatted_name.encode())
        if not re.fullmatch(names, op.name) or choice % 97 % share_of_ops:
            continue
        tally = tallies.setdefault(op.formatted_name, Tally())
        dtypes = [(d, share) for d, share in (PLAN_DTYPES if is_plan else DTYPES).items() if d in op.supported_dtypes("cpu")]
        for dtype, share in [dtypes[choice % len(dtypes)]] if one and dtypes else dtypes:
            cases = cases_of(op, dtype, samples, family)[::share]
            for case in [cases[choice % len(cases)]] if one and cases else cases:
                run_case(case, mesh, tally, count)
        if count and dist.get_rank() == 0:
            print(f"{op.formatted_name}: {tally.equal} equal, {tally.error} errors, {len(tally.wrong)} wrong", flush=True)
            print(*tally.wrong[:3], sep="\n", flush=True)
    return tallies


def wrong_of(answers: list[dict[str, Tally]]) -> list[str]:
    """The wrong results that any rank saw."""
    return sorted({text for tallies in answers for tally in tallies.values() for text in tally.wrong})


def reason_of(tally: Tally) -> str:
    """The most frequent error, without what it says of the tensors given."""
    if not tally.texts:
        return ""
    text = max(tally.texts, key=lambda t: tally.texts[t])
    found = re.match(r"(\S+) is not supported on a DTensor with \w+ placements:? ?(.*?) \(got ", text)
    return (
        f"`{found[1]}`: {found[2]}" if found else text.split(". ")[0].split(", need to")[0][:150].replace("](", "]\\(")
    )  # No link.


def record(tallies: dict[str, Tally]) -> str:
    """``docs/data/op_coverage.json``, of which docs/measured.py makes the table."""
    taken = {name: t for name, t in tallies.items() if t.equal or t.error or t.torch}
    head = {
        "torch": torch.__version__,
        "machine": platform.machine(),
        "ranks": RANKS,
        "wrong": sum(len(t.wrong) for t in taken.values()),
        "left_out": sum(len(t.torch) for t in taken.values()),
        "left_out_ops": sorted(name for name, t in taken.items() if t.torch),
    }
    rows = [[name, t.equal, t.local, t.error, reason_of(t).replace("|", "/")] for name, t in sorted(taken.items())]
    return json.dumps(head, indent=1)[:-2] + ',\n "rows": [\n  ' + ",\n  ".join(map(json.dumps, rows)) + "\n ]\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--names", default=".*", help="a regular expression of op names")
    parser.add_argument("--samples", type=int, default=3, help="samples of each op")
    parser.add_argument("--family", default="ragged", choices=FAMILIES, help="the placements")
    parser.add_argument("--write", type=pathlib.Path, help="the JSON to write")
    options = parser.parse_args()
    ranks, family = math.prod(FAMILIES[options.family].mesh), options.family
    answers = run_ranks(ranks, sweep, options.names, options.samples, False, True, 1, family, timeout=3 * 3600)
    for text in wrong_of(answers):
        print("WRONG", text)
    if options.write:
        options.write.write_text(record(answers[0]))
    sys.exit(bool(wrong_of(answers)))


if __name__ == "__main__":
    main()
