"""One case on this rank: its result as text, for all kinds. Also defects that are planted, to see that they are found."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import pprint
import re
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import fuzz_dtensor
import fuzz_fsdp
import fuzz_pairs
import fuzz_pairs_training
import fuzz_placements
import fuzz_plan
import fuzz_plan_training
import fuzz_plans
import fuzz_program
import fuzz_program_training
import fuzz_random
import fuzz_shapes
import fuzz_states
import fuzz_training
import fuzz_transfer
import torch
import torch.distributed as dist
from torch.distributed.tensor import debug

from torch_ragged._register import _spmd
from torch_ragged.fsdp.comm._reduction import Reduction
from torch_ragged.fsdp.core import _fsdp_param_group
from torch_ragged.fsdp.core._grad_reduction import ReductionSettings
from torch_ragged.spmd import _gradients, _resolve, _static, _static_facts, _static_trial
from torch_ragged.tensor import _random
from torch_ragged.transfer import _execution

__all__ = ["KINDS", "PLANTS", "describe", "forget_meshes", "know", "run_case", "run_seeds", "sentences", "size_of"]

KINDS = {
    "fsdp": fuzz_fsdp,
    "pairs": fuzz_pairs,
    "states": fuzz_states,
    "plans": fuzz_plans,
    "placements": fuzz_placements,
    "dtensor": fuzz_dtensor,
    "transfer": fuzz_transfer,
    "plan": fuzz_plan,
    "program": fuzz_program,
    "random": fuzz_random,
}
REFUSALS = (
    "needs a slot that another one uses",
    "which keeps parameters gathered",
    "set_persistent_buffers",
    "is cut unevenly by",
    "cannot choose memory or collectives",
    "this version of torch sorts the ranks",
    # What DTensor cannot do with plain placements: views of uneven shards, of one row per rank, and of a tensor that it has
    # redistributed in another order of memory; RMSNorm of cut features on CPU; a vocabulary over two mesh dimensions.
    "Cannot (flatten|shard) unevenly",
    "Cannot unflatten",
    "would remove or reshape sharded dimension",
    "view size is not compatible with input tensor's size and stride",
    "would be cut over the .* ranks of mesh dimensions",
    "in-place operations that require placement changes are not supported",
    "MaskBuffer has been materialized with conflicting data",
    "is not supported on a DTensor with InterleavedShard placements",
)


def size_of(kind: str, seed: int) -> int:
    """How many ranks a case needs."""
    return KINDS[kind].size_of(seed)


def describe(kind: str, seed: int) -> str:
    """A case as text."""
    return pprint.pformat(KINDS[kind].random_case(seed), width=140, compact=True, sort_dicts=False)


def run_case(kind: str, seed: int) -> tuple[str, str]:
    """Run a case on all ranks. Returns ``ok``, ``refused`` or ``failed``, and details."""
    case = KINDS[kind].random_case(seed)
    try:
        if kind == "fsdp":
            digest, details = fuzz_training.Training(case).run(), ""
        elif kind == "pairs":
            digest, details = fuzz_pairs_training.PairTraining(case).run(), ""
        elif kind == "plans":
            digest, details = fuzz_plans.PlanTraining(case).run(), ""
        elif kind == "placements":
            digest, details = fuzz_placements.PlacementRun(case).run()
        elif kind == "states":
            digest, details = fuzz_states.StateMove(case).run(), ""
        elif kind == "transfer":
            digest, details = fuzz_transfer.run_case(case)
        elif kind == "plan":
            digest, details = fuzz_plan_training.run_case(case)
        elif kind == "program":
            digest, details = fuzz_program_training.run_case(case)
        else:
            digest, details = (fuzz_random if kind == "random" else fuzz_dtensor).run_program(case)
    except Exception as error:
        text = "".join(traceback.format_exception(error))[-6000:]
        known = (
            (_known or sentences())
            if kind == "program"
            else ()
            if kind in ("pairs", "states", "plans", "placements")
            else REFUSALS
        )
        clear = not isinstance(error, AssertionError) and any(re.search(each, " ".join(str(error).split())) for each in known)
        return ("refused" if clear else "failed"), text
    fuzz_shapes.check_shapes()
    if seed % 50 == 0:
        gc.collect()  # Models are in cycles. It takes as long as several cases.
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest)
    if len(set(digests)) > 1:
        return "failed", f"ranks have different values: {digests}"
    return "ok", details


_known: list[str] = []


def know(found: Sequence[str]) -> None:
    """Take what another process has found as :func:`sentences`."""
    _known[:] = found


@functools.cache
def sentences() -> tuple[str, ...]:
    """The errors of docs/errors.md, as regular expressions: a program may be refused with one of them, and with no other.

    Not those with few words of their own, behind which torch's may stand.
    """
    sys.path.append(str(Path(__file__).parents[2] / "docs"))
    from make_errors import messages

    literals = [re.split(r"<[^>]*>", message.text) for message in messages()]
    return tuple(".*".join(map(re.escape, parts)) for parts in literals if len("".join(parts)) > 36)


def run_seeds(kind: str, seeds: Any, plant: str = "") -> list[tuple[int, str, str]]:
    """Run cases one after the other, up to the first failure: (seed, status, details) of each."""
    results = []
    with planted(plant):
        for seed in seeds:
            status, details = run_case(kind, seed)
            results.append((seed, status, details))
            if status == "failed":
                break
    return results


def forget_meshes() -> None:
    """Drop what has the meshes of a process group that is destroyed."""
    fuzz_training._meshes.clear()
    fuzz_pairs_training._meshes.clear()
    fuzz_states._made.clear()
    fuzz_dtensor._meshes.clear()
    fuzz_random._meshes.clear()
    fuzz_transfer._meshes.clear()
    fuzz_plan_training._meshes.clear()
    debug._clear_sharding_prop_cache()


# -- planted defects ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def planted(defect: str) -> Iterator[None]:
    """A defect of the package, for a test of these tests."""
    for name in ("torch_ragged", "torch.distributed"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    if not defect:
        yield
        return
    target, attribute, wrong = PLANTS[defect]()
    right = getattr(target, attribute)
    setattr(target, attribute, wrong)
    try:
        yield
    finally:
        setattr(target, attribute, right)


def _wrong_divisor() -> tuple[Any, str, Any]:
    return _fsdp_param_group, "ReductionSettings", lambda: ReductionSettings(Reduction(divisor=1.0))


def _hang(seed: int) -> Any:
    while True:
        threading.Event().wait(60)


def _endless() -> tuple[Any, str, Any]:
    return fuzz_dtensor, "random_case", _hang


def _blind() -> tuple[Any, str, Any]:
    return _execution, "checksum", lambda *arguments: torch.zeros(2, dtype=torch.int64)


def _torchs_averages() -> tuple[Any, str, Any]:
    handlers = _spmd.plain_handlers
    return _spmd, "plain_handlers", lambda: {op: each for op, each in handlers().items() if "loss" not in str(op)}


def _lenient() -> tuple[Any, str, Any]:
    return _resolve._Problems, "__str__", lambda self: ""


def _swapped() -> tuple[Any, str, Any]:
    """The first two numbers that a rank holds are in each other's place."""
    right = _random.draw_owned

    def wrong(sampler: Any, shape: Any, stride: Any, boxes: Any, local: torch.Tensor, *values: Any) -> None:
        right(sampler, shape, stride, boxes, local, *values)
        if local.numel() > 1 and local.is_contiguous():
            local.view(-1)[:2] = local.flatten()[:2].flip(0)

    return _random, "draw_owned", wrong


def _no_facts() -> tuple[Any, str, Any]:
    return _static_facts.Facts, "changed", lambda self: None


class _AnyKind(dict[Any, Any]):
    """Each call is of the first kind."""

    def get(self, key: Any, default: Any = None) -> Any:
        return next(iter(self.values()), default)


def _one_kind() -> tuple[Any, str, Any]:
    right = _static._State
    return _static, "_State", lambda facts, reason, number: right(facts, reason, number, _AnyKind())


def _no_reduction() -> tuple[Any, str, Any]:
    return _gradients.PendingGradients, "_all_reduced", lambda self, dims, locals_: list(locals_)


def _no_writes() -> tuple[Any, str, Any]:
    return _static_trial.Ledger, "_written", staticmethod(lambda func, args, kwargs: [])


def _lost_leaves() -> tuple[Any, str, Any]:
    """Gradients of static modules arrive in later steps."""
    return _gradients.PendingGradients, "collect", lambda self, leaves: None


def _no_comparison() -> tuple[Any, str, Any]:
    """All expressions of a trial are equal."""
    return _static_trial.Ledger, "describe", lambda self, tensor: 0


def _no_hooks() -> tuple[Any, str, Any]:
    return _static, "_users_hook", lambda module, name: None


def _no_surroundings() -> tuple[Any, str, Any]:
    """The code around static modules does in each forward what it did in the first one."""
    return _static._Kind, "is_known", lambda self, program: bool(self.watched)


PLANTS = {
    "facts": _no_facts,
    "surroundings": _no_surroundings,
    "kinds": _one_kind,
    "reduction": _no_reduction,
    "writes": _no_writes,
    "leaves": _lost_leaves,
    "expressions": _no_comparison,
    "hooks": _no_hooks,
    "divisor": _wrong_divisor,
    "hang": _endless,
    "checksum": _blind,
    "average": _torchs_averages,
    "lenient": _lenient,
    "draw": _swapped,
}
