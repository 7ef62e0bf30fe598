"""Torch's own OpInfo database on ragged DTensors: does every op give the single-device result, or a clear error?

``python test/op_conformance.py`` sweeps everything on 4 ranks and writes ``docs/op_coverage.md``; the test takes samples.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import math
import re
import zlib
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

from torch_ragged import RaggedShard

RANKS = 4
CLEAR = (
    "is not supported on a DTensor with",  # ours: names the op, the tensors and the way out
    "in-place operations that require placement changes are not supported",  # torch's: and how to write it instead
    "got mixed torch.Tensor and DTensor",  # torch's: the op makes plain tensors inside, so no DTensor can take it
)
TOLERANCE = {torch.float32: (1e-4, 1e-5), torch.bfloat16: (2e-2, 2e-2)}


def patterns(shape: tuple[int, ...]) -> list[RaggedShard]:
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

    def call(self, tensors: list[Any]) -> Any:
        leaves, tree = pytree.tree_flatten((self.sample.input, self.sample.args, self.sample.kwargs))
        positions = iter(tensors)
        leaves = [next(positions) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        first, args, kwargs = pytree.tree_unflatten(leaves, tree)
        if self.variant == "in-place":
            result = self.op.get_inplace()(first, *args, **kwargs)
            return result, first
        return self.op(first, *args, **kwargs)

    def __str__(self) -> str:
        given = tensors_of(self.sample)
        pattern = patterns(tuple(given[self.ragged[0]].shape))[self.which]

        def brief(leaf: Any) -> Any:
            return f"{str(leaf.dtype)[6:]}{list(leaf.shape)}" if isinstance(leaf, torch.Tensor) else leaf

        arguments = pytree.tree_map(brief, (self.sample.input, *self.sample.args, self.sample.kwargs))
        return f"{self.op.formatted_name} {self.variant} {arguments}, tensors {self.ragged} as {pattern}"


def tensors_of(sample: Any) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def cases_of(op: Any, dtype: torch.dtype, samples: int, every: int) -> list[Case]:
    """Cases of ``op``: up to ``samples`` samples, of whose patterns and variants each ``every``-th is taken."""
    torch.manual_seed(0)
    found = []
    for sample in itertools.islice(op.sample_inputs("cpu", dtype), samples):
        given = tensors_of(sample)
        usable = [i for i, t in enumerate(given) if t.layout is torch.strided and t.is_contiguous() and not t.is_quantized]
        if not usable or any(t.layout is not torch.strided for t in given) or sum(t.numel() for t in given) > 20000:
            continue
        first = usable[0]
        same = tuple(i for i in usable if given[i].shape == given[first].shape)
        choices = [(first,)] + ([same] if len(same) > 1 else []) + [(i,) for i in usable[1:] if i not in same]
        variants = ["function"] + (["in-place"] if op.get_inplace() and first == 0 else [])
        for variant, ragged in itertools.product(variants, choices):
            for which in range(len(patterns(given[ragged[0]].shape))):
                found.append(Case(op, sample, variant, which, ragged))
    start = zlib.crc32(op.formatted_name.encode()) % every
    return found[start::every]


def to_dtensors(case: Case, mesh: DeviceMesh, ragged: bool) -> list[DTensor]:
    results = []
    for position, tensor in enumerate(tensors_of(case.sample)):
        result = DTensor.from_local(tensor.detach().clone(), mesh, [Replicate()], run_check=False)
        if ragged and position in case.ragged:
            result = result.redistribute(placements=[patterns(tuple(tensor.shape))[case.which]])
        results.append(result)
    return results


def difference(got: Any, expected: Any) -> str:
    """How the gathered results differ from the single-device ones; empty if they do not."""
    found, wanted = pytree.tree_leaves(got), pytree.tree_leaves(expected)
    if len(found) != len(wanted):
        return f"{len(found)} results in place of {len(wanted)}"
    for one, other in zip(found, wanted):
        if not isinstance(other, torch.Tensor):
            if one != other and one == one:
                return f"{one} in place of {other}"
            continue
        if isinstance(one, DTensor):
            strides = [(a, b) for a, b, size in zip(one.stride(), other.stride(), other.shape) if size > 1]
            if any(a != b for a, b in strides) and other.numel() and one.placements != (Replicate(),):
                return f"stride {one.stride()} in place of {other.stride()}"
            declared = one.shape
            one = one.full_tensor()
            if one.shape != declared:
                return f"a DTensor of shape {tuple(declared)} that gathers to {tuple(one.shape)}"
        rtol, atol = TOLERANCE.get(other.dtype, (1e-7, 1e-7))
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


def run_case(case: Case, mesh: DeviceMesh, tally: Tally) -> None:
    try:
        torch.manual_seed(1)
        expected = case.call([t.detach().clone() for t in tensors_of(case.sample)])
    except Exception:
        return  # A sample that this machine cannot run is no case.
    error, got = None, None
    try:
        arguments = to_dtensors(case, mesh, ragged=True)
        torch.manual_seed(1)
        with CommDebugMode() as comm:
            got = case.call(arguments)
    except Exception as exception:
        error = exception
    if not agree(mesh, error is None):
        tally.wrong.append(f"{case}: ranks disagree: rank {dist.get_rank()} has {error!r}")
    elif error is not None:
        text = " ".join(str(error).split())
        if not any(clear in text for clear in CLEAR) and not fails_replicated(case, mesh, expected):
            tally.wrong.append(f"{case}: {type(error).__name__}: {text}")
        tally.error += 1
        tally.texts[text] += 1
    else:
        try:
            problem = difference(got, expected)
        except Exception as exception:
            problem = f"gathering fails: {exception!r}"
        if not agree(mesh, bool(problem)):
            tally.wrong.append(f"{case}: ranks disagree: rank {dist.get_rank()}: {problem}")
        elif problem and fails_replicated(case, mesh, expected):
            tally.torch.append(f"{case}: {problem}")
        elif problem:
            tally.wrong.append(f"{case}: {problem}")
        else:
            tally.equal += 1
            tally.local += comm.get_total_counts() == 0


def fails_replicated(case: Case, mesh: DeviceMesh, expected: Any) -> bool:
    """Whether DTensor itself, with no ragged tensor, fails or is wrong too: ragged DTensors cannot do better."""
    try:
        return bool(difference(case.call(to_dtensors(case, mesh, ragged=False)), expected))
    except Exception:
        return True


def sweep(names: str, dtypes: list[torch.dtype], samples: int, every: int, verbose: bool = False) -> dict[str, Tally]:
    """Run on every rank of the default group. The tally of each op whose name matches, by name."""
    mesh = init_device_mesh("cpu", (RANKS,))
    tallies: dict[str, Tally] = {}
    for op in op_db:
        if not re.fullmatch(names, op.name) or "cpu" in str(op.skips) and False:
            continue
        tally = tallies.setdefault(op.formatted_name, Tally())
        for dtype in dtypes:
            if dtype not in op.supported_dtypes("cpu"):
                continue
            try:
                cases = cases_of(op, dtype, samples, every)
            except Exception:
                continue
            for case in cases:
                run_case(case, mesh, tally)
        if verbose and dist.get_rank() == 0:
            print(op.formatted_name, tally.equal, tally.local, tally.error, len(tally.wrong), flush=True)
            for text in tally.wrong[:3]:
                print("   WRONG", text, flush=True)
    return tallies


def main() -> None:
    import pickle

    parser = argparse.ArgumentParser()
    parser.add_argument("--names", default=".*")
    parser.add_argument("--samples", type=int, default=12)
    parser.add_argument("--every", type=int, default=1)
    args = parser.parse_args()
    from common import run_ranks

    tallies = run_ranks(RANKS, sweep, args.names, [torch.float32], args.samples, args.every, True)[0]
    pickle.dump(tallies, open("/tmp/tallies.pkl", "wb"))
    print(
        sum(t.equal for t in tallies.values()),
        sum(t.error for t in tallies.values()),
        sum(len(t.wrong) for t in tallies.values()),
    )


if __name__ == "__main__":
    main()
