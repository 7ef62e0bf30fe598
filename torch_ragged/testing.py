"""Conformance of a placement: what DTensor programs expect of any placement, as one call on all ranks of a mesh.

It asks by DTensor's public API only, and knows no placement of this package.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import Placement

from torch_ragged._ranks.groups import groups_of

__all__ = ["CHECKS", "check_conformance"]

_MOST_FAILURES = 4  # Failures that the error shows.


@dataclass(frozen=True)
class _Case:
    """A tensor on all ranks, and how it is placed."""

    whole: torch.Tensor
    mesh: DeviceMesh
    placements: tuple[Placement, ...]

    @property
    def held(self) -> DTensor:
        return self.place(self.whole)

    def place(self, tensor: torch.Tensor, *placements: Placement) -> DTensor:
        # Each rank has the whole tensor: nothing is sent, so a broadcast cannot hide what a rank does.
        return distribute_tensor(tensor, self.mesh, placements or self.placements, src_data_rank=None)


def check_conformance(
    placement: Placement | Sequence[Placement],
    mesh: DeviceMesh,
    shapes: Sequence[Sequence[int]] = ((8, 6), (8, 4, 3), (0, 4)),
    *,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16, torch.int64, torch.bool),
    without: Sequence[str] = (),
) -> dict[str, int]:
    """Check that a placement does what DTensor programs expect. All ranks of ``mesh`` call it::

        mesh = init_device_mesh("cpu", (2,))
        check_conformance(RaggedShard((0,), (1, 3)), mesh)
        check_conformance(MyPlacement(), mesh, shapes=[(6, 8)], without=["random"])

    Each of these is a check, of each shape and dtype:

    ================  ===================================================================================================
    name              what must be so
    ================  ===================================================================================================
    ``value``         copies, pickles and ``eval(repr(...))`` are equal to it, with equal hashes; it cannot be changed
    ``ownership``     each element lies on one rank, or on as many as there are replicas
    ``redistribute``  from and to ``Replicate``, ``Shard(d)``, ``Partial``: the same bits; to itself, nothing is sent
    ``elementwise``   operators, in place too, ``foreach`` and ``*_like`` give one device's bits, without a collective
    ``reductions``    sums, norms, extrema and comparisons of all elements
    ``refusals``      any other operator gives one device's value, shape and stride, or raises
    ``autograd``      gradients come back in the placement, and are those of one device
    ``random``        ``normal_``, ``uniform_`` and ``bernoulli_`` draw the numbers of one device
    ``optimizer``     AdamW and SGD, foreach too, train as on one device
    ``checkpoint``    what DCP saves under it loads under ``Replicate`` and ``Shard(0)``, and the reverse
    ================  ===================================================================================================

    Args:
        placement: of a 1-D mesh, or one for each dimension of ``mesh``.
        shapes: shapes of tensors that it can cut, an empty one among them.
        without: names of checks to leave out.

    Returns:
        how many cases of each check have passed.

    Raises:
        AssertionError: a check has failed, on all ranks, with the first failures of each rank.
        ValueError: a name in ``without`` is no check.

    Collectives: those of the checks, and an all-gather of objects after each case. A placement that makes one rank raise, and
    others wait for it, ends at the process group's timeout.
    """
    placements = (placement,) if isinstance(placement, Placement) else tuple(placement)
    if unknown := set(without) - set(CHECKS):
        raise ValueError(f"check_conformance has no check {', '.join(map(repr, sorted(unknown)))}: it has {', '.join(CHECKS)}")
    passed, failures = dict.fromkeys(CHECKS, 0), list[str]()
    for name, (check, kinds) in CHECKS.items():
        for shape, dtype in itertools.product(shapes, dtypes) if name not in without else ():
            if not kinds(dtype):
                continue
            generator = torch.Generator().manual_seed(math.prod(shape))
            whole = (8 * torch.randn(*shape, generator=generator, device="cpu")).to(dtype).to(mesh.device_type)
            found = ""
            try:
                check(_Case(whole, mesh, placements))
            except (Exception, CheckpointException) as error:  # DCP's is no Exception.
                found = f"{type(error).__name__}: {error}"
            answers = _answers_of(mesh, found)
            texts = {text: rank for rank, text in reversed(answers.items()) if text}
            failures += [f"{name} of {dtype} {tuple(shape)} on rank {rank}: {text}" for text, rank in texts.items()]
            passed[name] += not texts
    if failures:
        more = f"\n... and {len(failures) - _MOST_FAILURES} more" if len(failures) > _MOST_FAILURES else ""
        shown = "\n".join(failures[:_MOST_FAILURES])
        raise AssertionError(f"{placements if len(placements) > 1 else placements[0]} does not conform:\n{shown}{more}")
    return passed


def _answers_of(mesh: DeviceMesh, answer: Any) -> dict[int, Any]:
    """What each rank of the mesh answers, by its rank, in their order."""
    found = {dist.get_rank(): answer}
    for group in groups_of(mesh):  # One dimension after another: then each rank has heard all others.
        parts: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(parts, found, group)
        found = {rank: each for part in parts for rank, each in part.items()}
    return dict(sorted(found.items()))


# -- the checks --------------------------------------------------------------------------------------------------------


def _assert_same(found: Any, wanted: torch.Tensor, what: str) -> None:
    """Equal bits, shape, stride and dtype."""
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype), f"{what}: {found.shape} of {found.dtype}"
    whole = found.full_tensor() if isinstance(found, DTensor) else found
    assert whole.shape == wanted.shape, f"{what}: the full tensor has the shape {tuple(whole.shape)}"
    both = (whole.contiguous().view(-1), wanted.contiguous().view(-1))
    one, other = (each.view(torch.uint8) if each.numel() else each for each in both)
    assert torch.equal(one, other), f"{what}: {whole} instead of {wanted}"


def _assert_close(found: Any, wanted: torch.Tensor, what: str) -> None:
    whole = found.full_tensor() if isinstance(found, DTensor) else found
    torch.testing.assert_close(whole, wanted, rtol=1e-4, atol=1e-4, msg=lambda text: f"{what}: {text}")


def _assert_silent(mode: CommDebugMode, what: str) -> None:
    assert mode.get_total_counts() == 0, f"{what} issued {dict(mode.get_comm_counts())}"


def _check_copies(case: _Case) -> None:
    for one in case.placements:
        names = {type(one).__name__: type(one)}
        for other in (copy.copy(one), copy.deepcopy(one), pickle.loads(pickle.dumps(one)), eval(repr(one), names)):
            assert one == other and hash(one) == hash(other), f"a copy of {one!r} is another value, {other!r}"
        assert one != Replicate() or isinstance(one, Replicate), f"{one!r} is equal to Replicate()"
        for name in getattr(type(one), "__dataclass_fields__", {}):
            try:
                setattr(one, name, getattr(one, name))
            except (AttributeError, TypeError):
                continue
            raise AssertionError(f"{name} of {one!r} can be set: caches by placement would be wrong")


def _check_ownership(case: _Case) -> None:
    numbers = torch.arange(case.whole.numel(), device=case.whole.device).view(case.whole.shape)
    local = case.place(numbers).to_local()
    assert local.dtype == numbers.dtype, f"the local tensor of {numbers.dtype} is of {local.dtype}: its values are others"
    assert not local.numel() or int(local.max()) < numbers.numel(), f"the local tensor has what is no element: {local}"
    counts = torch.bincount(local.reshape(-1), minlength=numbers.numel())
    total = torch.tensor(list(_answers_of(case.mesh, counts.tolist()).values()), device="cpu").sum(0)
    replicas = math.prod(n for n, p in zip(case.mesh.shape, case.placements) if isinstance(p, Replicate))
    wrong = (total != replicas).nonzero().flatten().tolist()
    assert not wrong, f"element {wrong[0]} lies {int(total[wrong[0]])} times on all ranks, not {replicas}"
    held = case.held
    assert held.to_local().numel() == local.numel(), "the number of local elements depends on the dtype"
    _assert_same(
        DTensor.from_local(held.to_local(), case.mesh, case.placements, shape=held.shape, stride=held.stride()),
        case.whole,
        "from_local",
    )


def _other_placements(case: _Case) -> Iterator[tuple[Placement, ...]]:
    cuts: list[Placement] = [Replicate(), *map(Shard, range(case.whole.ndim))]
    for one in cuts:  # The other mesh dimensions stay as they are, or are replicated.
        yield tuple(Replicate() if isinstance(each, Replicate) else one for each in case.placements)


def _check_redistribute(case: _Case) -> None:
    for other in _other_placements(case):
        if sum(isinstance(each, Shard) for each in other) > 1:
            continue
        there = case.held.redistribute(placements=other)
        assert there.placements == other, f"to {other}: {there.placements}"
        _assert_same(there, case.whole, f"to {other}")
        back = case.place(case.whole, *other).redistribute(placements=case.placements)
        assert back.placements == case.placements, f"from {other}: {back.placements}"
        assert torch.equal(back.to_local(), case.held.to_local()), f"from {other}: the local tensor is another one"
        _assert_same(back, case.whole, f"from {other}")
    held = case.held
    with CommDebugMode() as mode:
        held.redistribute(placements=case.placements)
    _assert_silent(mode, "a redistribute to the same placement")
    if case.whole.dtype.is_floating_point:
        ranks = math.prod(n for n, p in zip(case.mesh.shape, case.placements) if not isinstance(p, Replicate))
        sums = tuple(Replicate() if isinstance(each, Replicate) else Partial() for each in case.placements)
        pending = DTensor.from_local(case.whole, case.mesh, sums).redistribute(placements=case.placements)
        _assert_close(pending, case.whole * ranks, f"from {sums}")


def _foreach_mul_(a: Any, b: Any) -> Any:
    torch._foreach_mul_([a], [b])
    return a


_ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "add a number": lambda a, b: a + 1,
    "mul": lambda a, b: a * b,
    "where": lambda a, b: torch.where(a == b, a, b),
    "ge": lambda a, b: a >= b,
    "relu": lambda a, b: a.relu(),
    "to": lambda a, b: a.to(torch.float32),
    "clone": lambda a, b: a.clone(),
    "add_": lambda a, b: a.clone().add_(b),
    "copy_": lambda a, b: torch.empty_like(a).copy_(b),
    "fill_": lambda a, b: torch.empty_like(a).fill_(1),
    "zeros_like": lambda a, b: torch.zeros_like(a),
    "new_ones": lambda a, b: torch.ones_like(a),
    "foreach": lambda a, b: torch._foreach_add([a], [b])[0],
    "foreach_": lambda a, b: _foreach_mul_(a.clone(), b),
}

_REDUCTIONS: dict[str, Callable[..., Any]] = {
    "sum": lambda a, b: a.float().sum(),
    "mean": lambda a, b: a.float().mean(),
    "norm": lambda a, b: a.float().norm(),
    "norm of order inf": lambda a, b: torch.linalg.vector_norm(a.float(), float("inf")) if a.numel() else a.float().sum(),
    "amax": lambda a, b: a.float().amax() if a.numel() else a.float().sum(),
    "any": lambda a, b: (a == b).any(),
    "all": lambda a, b: (a == a).all(),
    "isfinite": lambda a, b: torch.isfinite(a).all(),
}

_OTHER_OPS: dict[str, Callable[..., Any]] = {
    "sum(0)": lambda a, b: a.float().sum(0),
    "sum(-1, keepdim)": lambda a, b: a.float().sum(-1, keepdim=True),
    "softmax": lambda a, b: a.float().softmax(-1),
    "cumsum": lambda a, b: a.float().cumsum(0),
    "matmul": lambda a, b: a.float() @ b.float().transpose(-1, -2),
    "transpose": lambda a, b: a.transpose(0, -1),
    "view": lambda a, b: a.view(-1),
    "reshape": lambda a, b: a.reshape(a.shape[0], -1) if a.numel() else a.reshape(a.shape),
    "slice": lambda a, b: a[1:3],
    "select": lambda a, b: a[0] if a.shape[0] else a[:0],
    "cat": lambda a, b: torch.cat([a, b]),
    "flip": lambda a, b: a.flip(0),
    "sort": lambda a, b: a.float().sort(0).values,
    "index_select": lambda a, b: a[torch.arange(2, device="cpu")] if a.shape[0] else a[:0],
    "tril": lambda a, b: a.tril(),
    "unsqueeze": lambda a, b: a.unsqueeze(0),
    "broadcast": lambda a, b: a.float() + b.float().sum(0, keepdim=True),
}


def _check_elementwise(case: _Case) -> None:
    second = case.whole.roll(1, 0)
    for name, function in _ELEMENTWISE.items():
        if case.whole.dtype == torch.bool and name in ("relu",):
            continue
        a, b = case.held, case.place(second)
        with CommDebugMode() as mode:
            found = function(a, b)
        _assert_silent(mode, name)
        assert found.placements == case.placements, f"{name} gives {found.placements}"
        _assert_same(found, function(case.whole, second), name)


def _check_sums(case: _Case) -> None:
    second = case.whole.roll(1, 0)
    for name, function in _REDUCTIONS.items():
        torch.testing.assert_close(
            function(case.held, case.place(second)).full_tensor(),
            function(case.whole, second),
            rtol=1e-4,
            atol=1e-4,
            equal_nan=True,
            msg=lambda text, name=name: f"{name}: {text}",  # type: ignore[misc]
        )


def _check_refusals(case: _Case) -> None:
    second = case.whole.roll(1, 0)
    for name, function in _OTHER_OPS.items():
        wanted = function(case.whole, second)
        try:
            found = function(case.held, case.place(second))
        except (NotImplementedError, RuntimeError, ValueError):  # No value is no wrong value.
            continue
        assert (found.shape, found.stride()) == (wanted.shape, wanted.stride()) or not wanted.numel(), (
            f"{name} has the shape {tuple(found.shape)} and stride {found.stride()}"
        )
        _assert_close(found, wanted, name)


def _check_autograd(case: _Case) -> None:
    def loss(a: Any, b: Any, moves: bool) -> Any:
        a = a.redistribute(placements=(Replicate(),) * case.mesh.ndim) if moves else a
        b = b.redistribute(placements=(Replicate(),) * case.mesh.ndim) if moves else b
        return (a * b).square().sum()

    second = case.whole.roll(1, 0)
    wanted = case.whole.clone().requires_grad_()
    loss(wanted, second, False).backward()
    assert wanted.grad is not None
    for moves in (False, True):
        found: Any = case.held.requires_grad_()
        loss(found, case.place(second), moves).backward()
        assert found.grad.placements == case.placements, f"the gradient is placed as {found.grad.placements}"
        assert found.grad.to_local().shape == found.to_local().shape, f"its local shape is {found.grad.to_local().shape}"
        scale = wanted.grad.abs().max() if wanted.grad.numel() else 1
        _assert_close(found.grad.float() / scale, wanted.grad.float() / scale, "the gradient")


def _check_random(case: _Case) -> None:
    draws: list[Callable[[Any], Any]] = [lambda a: a.normal_(), lambda a: a.uniform_(-1, 1), lambda a: a.bernoulli_(0.5)]
    for draw in draws:
        torch.manual_seed(7)
        wanted = draw(torch.zeros_like(case.whole))
        torch.manual_seed(7)
        _assert_same(draw(case.place(torch.zeros_like(case.whole))), wanted, "random numbers")


def _check_optimizer(case: _Case) -> None:
    for kind, foreach in itertools.product((torch.optim.AdamW, torch.optim.SGD), (False, True)):
        ours, theirs = (torch.nn.Parameter(each) for each in (case.held, case.whole.clone()))
        make = functools.partial(kind, lr=0.1, foreach=foreach)
        for parameter, optimizer in ((ours, make([ours])), (theirs, make([theirs]))):
            for step in range(2):
                gradient = case.whole.roll(step + 1, 0)
                parameter.grad = case.place(gradient) if parameter is ours else gradient.clone()
                optimizer.step()
        _assert_close(ours.detach(), theirs.detach(), kind.__name__)


def _check_checkpoint(case: _Case) -> None:
    others: list[tuple[Placement, ...]] = [tuple(Replicate() for _ in case.placements)]
    if case.mesh.ndim == 1:
        others.append((Shard(0),))
    is_first = not any(case.mesh.get_coordinate() or ())
    folder = next(filter(None, _answers_of(case.mesh, tempfile.mkdtemp() if is_first else None).values()))
    pairs = [pair for other in others for pair in ((case.placements, other), (other, case.placements))]
    try:
        for number, (source, target) in enumerate(pairs):
            path = f"{folder}/{number}"
            dcp.save({"w": case.place(case.whole, *source)}, checkpoint_id=path)
            state = {"w": case.place(torch.zeros_like(case.whole), *target)}
            dcp.load(state, checkpoint_id=path)
            _assert_same(state["w"], case.whole, f"saved as {source}, loaded as {target}")
    finally:
        _answers_of(case.mesh, None)  # All have read.
        shutil.rmtree(folder, ignore_errors=True)


def _any(dtype: torch.dtype) -> bool:
    return True


def _float(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point


CHECKS: dict[str, tuple[Callable[[_Case], None], Callable[[torch.dtype], bool]]] = {
    "value": (_check_copies, _any),
    "ownership": (_check_ownership, _any),
    "redistribute": (_check_redistribute, _any),
    "elementwise": (_check_elementwise, _any),
    "reductions": (_check_sums, _any),
    "refusals": (_check_refusals, _any),
    "autograd": (_check_autograd, _float),
    "random": (_check_random, _float),
    "optimizer": (_check_optimizer, _float),
    "checkpoint": (_check_checkpoint, _any),
}
"""By name: the check, and the dtypes that it takes."""
