"""The checks of a plan and of a run: what is wrong is an error before any element travels."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Union

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from torch_ragged._register._torch import local_tensor, waited
from torch_ragged.tensor._box_tensor import BoxTensor
from torch_ragged.tensor._cut_placement import cuts_of
from torch_ragged.tensor._global_layout import global_layout_of
from torch_ragged.tensor._ownership import coordinate_at, owned
from torch_ragged.transfer._engine_layout import EngineLayout, EngineSide
from torch_ragged.transfer._pulls import PullLayout, PullSide
from torch_ragged.transfer._sides import (
    BoxSpec,
    RelocatedSide,
    Side,
    Spec,
    TensorSide,
    merged_specs,
    named_values,
    specs_of,
)
from torch_ragged.transfer._staging import Staged, check_reductions, reductions_of

__all__ = ["check_memory", "checked_shapes", "completed", "held_tensors", "read_once", "side_of"]

Readable = Union[torch.Tensor, Staged]
"""A flat local tensor, or a source that cannot be read in place."""


def side_of(given: object, name: str) -> Side | None:
    """The side that a rank gives to ``plan()``; None if it gives none."""
    if given is None:
        return None
    if isinstance(given, RelocatedSide):
        return given
    if isinstance(given, EngineLayout):
        if name == "source":
            raise TypeError("plan(source=) takes DTensors or Specs: an EngineLayout can only be the target")
        return EngineSide(given)
    if isinstance(given, PullLayout):
        if name == "source":
            raise TypeError("plan(source=) takes DTensors or Specs: a PullLayout can only be the target")
        return given.side
    side = TensorSide(specs_of(given, name))
    for key, spec in side.specs.items():
        if isinstance(spec, BoxSpec):
            continue
        if name == "target" and spec.has_partial:
            raise ValueError(f"plan(target=): {key} has placements {spec.placements}: a target cannot be Partial")
        check_reductions(f"plan({name}=): {key}", spec.dtype, spec.placements)
    return side


def completed(
    known: Sequence[Side | None], numbers: Sequence[int], group: dist.ProcessGroup, device: torch.device
) -> tuple[list[Side], list[int]]:
    """Both sides, equal on all ranks. Of different descriptions, each is broadcast by the first rank that gives it.

    Returns:
        the sides, and for each of ``numbers`` the largest of all ranks.

    Raises:
        ValueError: no rank knows a side, or the descriptions contradict each other. On all ranks.
    """
    ranks = dist.get_process_group_ranks(group)
    # Digests of one length, so that ranks need not know how long the descriptions are, or which ranks have one. What is
    # broadcast below follows from this table, which all ranks have: the same descriptions from the same ranks, in one order.
    own = torch.tensor([*map(_digest, known), *numbers], dtype=torch.int64, device=device)
    everyone = [torch.empty_like(own) for _ in ranks]
    dist.all_gather(everyone, own, group=group)
    columns = torch.stack(everyone, dim=1).tolist()
    sides: list[Side] = []
    for i, (side, name) in enumerate(zip(known, ("source", "target"))):
        owners: dict[int, int] = {}
        for rank, digest in zip(ranks, columns[i]):
            owners.setdefault(digest, rank)
        is_known = owners.pop(0, None) is None  # On all ranks.
        if not owners:
            raise ValueError(f"transfer.plan: no rank gave a {name}: at least one rank must")
        given: dict[int, Side] = {}
        # In the usual case each rank has the same description, and nothing is sent.
        for owner in owners.values() if len(owners) > 1 or not is_known else ():
            message = [side]
            dist.broadcast_object_list(message, src=owner, group=group, device=device)
            assert message[0] is not None
            given[owner] = message[0]
        if given:
            side = _merged(given, name)
        assert side is not None
        sides.append(side)
    return sides, [max(column) for column in columns[2:]]


def _digest(side: Side | None) -> int:
    """A number of a side that differs between sides; 0 for None."""
    if side is None:
        return 0
    # Seven bytes and 1: it fits into int64, and is never 0, the digest of None.
    return 1 + int.from_bytes(hashlib.sha256("\n".join(side.lines()).encode()).digest()[:7], "big")


def _merged(given: Mapping[int, Side], name: str) -> Side:
    """One side of what different ranks give; all ranks call it with equal arguments."""
    if len(given) == 1:
        return next(iter(given.values()))
    pulls = [side for side in given.values() if isinstance(side, PullSide)]
    if len(pulls) == len(given):
        return PullSide.joined(pulls)
    specs = {rank: side.specs for rank, side in given.items() if type(side) is TensorSide}
    if len(specs) < len(given):
        raise ValueError(
            f"plan({name}=) differs between ranks {', '.join(map(str, given))}: of an EngineLayout or of relocated tensors, "
            "give the same on all ranks"
        )
    return TensorSide(merged_specs(specs, name))


def checked_shapes(source: Side, target: Side, ranks: Sequence[int], strict: bool) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of the plan, in the order of the source.

    Raises:
        ValueError: names or shapes differ, a rank is not among ``ranks``, or the boxes of all ranks are not one whole tensor.
        TypeError: a dtype cannot be cast.
    """
    assert isinstance(source, TensorSide)
    for side, which in ((source, "source"), (target, "target")):
        for name, spec in side.specs.items() if isinstance(side, TensorSide) else ():
            problem = spec.problem() if isinstance(spec, BoxSpec) else None
            if problem is not None:
                raise ValueError(f"plan({which}=): {name} of shape {spec.shape}: {problem}")
    # Each target must have a source: its memory would keep old values in silence.
    missing = [name for name in target.names if name not in source.specs]
    if missing:
        raise ValueError(f"plan(): the target has {_some(missing)}, which the source does not have")
    wanted = set(target.names)
    unused = [name for name in source.names if name not in wanted]
    if unused and strict:
        raise ValueError(
            f"plan(): the source has {_some(unused)}, which the target does not have: give strict=False to leave them"
        )
    for side, name in ((source, "source"), (target, "target")):
        outside = sorted(set(side.ranks) - set(ranks))
        if outside:
            raise ValueError(f"plan({name}=): ranks {outside[:8]} hold tensors, and are not in the group of {len(ranks)} ranks")
    shapes = {}
    for name in source.names:
        if name not in wanted:
            continue
        shape = source.specs[name].shape
        theirs = target.specs[name].shape if isinstance(target, TensorSide) else target.shapes[name]  # type: ignore[attr-defined]
        if shape != theirs:
            raise ValueError(f"plan(): {name} has shape {shape} in the source and {theirs} in the target")
        old, new = source.dtype(name), target.dtype(name)
        if old != new and not (old.is_floating_point and new.is_floating_point):
            raise TypeError(
                f"plan(): {name} is {old} in the source and {new} in the target: only floating-point numbers are cast"
            )
        shapes[name] = shape
    return shapes


def read_once(source: Side) -> Side:
    """The source, in which each element that ranks hold as boxes is read in one layout."""
    if type(source) is not TensorSide or not any(isinstance(spec, BoxSpec) for spec in source.specs.values()):
        return source
    return TensorSide({name: s.as_source() if isinstance(s, BoxSpec) else s for name, s in source.specs.items()})


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more tensors" if len(names) > 3 else "")


def held_tensors(given: object, side: Side, which: str) -> dict[str, Readable]:
    """The tensors that this rank holds: flat local tensors. Sources that cannot be read in place are to be staged.

    Raises:
        TypeError, ValueError: one is missing, or is not what the plan was made for.
    """
    if isinstance(side, PullSide):
        return _pull_tensors(given, side)
    pairs = {} if given is None else named_values(given, f"run({which}=)")
    if isinstance(side, EngineSide):
        return dict(_engine_tensors(pairs, side))
    assert isinstance(side, TensorSide)
    if isinstance(side, RelocatedSide):
        return {key: _flat(value, f"run({which}=): {key}", is_written=False) for key, value in pairs.items()}
    rank, found = dist.get_rank(), {}
    for name, spec in side.specs.items():
        # A rank may give more than it holds, such as a whole state dict on a rank outside of the mesh.
        if rank not in spec.ranks:
            continue
        if name not in pairs:
            raise ValueError(f"run({which}=): {name} is missing, of which this rank {rank} is planned to hold a part")
        value = pairs[name]
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"run({which}=): {name} is {type(value).__name__}, expected a tensor")
        what = f"run({which}=): {name}"
        if isinstance(spec, BoxSpec):
            found[name] = _flat_boxes(value, spec, rank, what, is_written=which == "target")
            continue
        if isinstance(value, DTensor):
            now = Spec.of(value)
        else:
            # A plain tensor says nothing of ranks: it is taken for what was planned, if shape and dtype are.
            now = Spec(tuple(value.shape), value.dtype, spec.mesh, [Replicate()] * len(spec.mesh.shape))
        if not spec.describes(now):
            raise ValueError(f"{what} has {now}, and was planned with {spec}: make a new plan")
        found[name] = _flat_of(value, spec, what, is_written=which == "target")
    return found


def _flat_boxes(value: torch.Tensor, spec: BoxSpec, rank: int, what: str, is_written: bool) -> Readable:
    """The flat local tensor of a tensor that ranks hold as boxes. It may come with its layout, or without."""
    held = spec.of_rank(rank)
    assert held is not None
    if isinstance(value, DTensor):
        raise TypeError(f"{what} is a DTensor, and was planned as boxes: give the local tensor")
    layout = global_layout_of(value)
    boxes = held.boxes if layout is None else layout.boxes(value.shape)
    if (tuple(value.shape), value.dtype, boxes) != (held.local_shape, spec.dtype, held.boxes):
        with_boxes = "" if boxes == held.boxes else ", with other boxes"
        raise ValueError(
            f"{what} has a local tensor of shape {tuple(value.shape)} and {value.dtype}{with_boxes}, and was planned with "
            f"{held.local_shape} and {spec.dtype}: make a new plan"
        )
    return _flat(value, what, is_written)


def _engine_tensors(pairs: Mapping[str, torch.Tensor], side: EngineSide) -> Iterator[tuple[str, Readable]]:
    rank = dist.get_rank()
    for key, tensor in side.tensors.items():
        numel = side.local_numel(key, rank)
        if not numel:
            continue
        value = pairs.get(key)
        if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
            raise TypeError(f"run(target=): {key} is {type(value).__name__}, expected the local tensor of {numel} elements")
        if value.numel() != numel or value.dtype != tensor.dtype:
            raise ValueError(
                f"run(target=): {key} has {value.numel()} elements of {value.dtype}, and the EngineLayout gives rank {rank} "
                f"{numel} of {tensor.dtype}"
            )
        yield key, _flat(value, f"run(target=): {key}", is_written=True)


def _pull_tensors(given: object, side: PullSide) -> dict[str, Readable]:
    own = side.held.get(dist.get_rank(), ())
    if own and not isinstance(given, PullLayout):
        raise TypeError(f"run(target=) is {type(given).__name__}, and was planned as a PullLayout: give the PullLayout")
    if not own or not isinstance(given, PullLayout):
        return {}
    if given.side.held != {dist.get_rank(): own}:
        raise ValueError("run(target=) is a PullLayout with other copies than planned: make a new plan")
    return dict(given.tensors)


def _flat_of(value: torch.Tensor, spec: Spec, what: str, is_written: bool) -> Readable:
    """The flat local tensor of a tensor of ``spec``, without gradients."""
    local = waited(local_tensor(value)) if isinstance(value, DTensor) else value
    coordinate = coordinate_at(spec.mesh.ranks.index(dist.get_rank()), spec.mesh.shape)
    numel = owned(spec.shape, spec.mesh.shape, cuts_of(spec.placements), coordinate).numel
    if local.numel() != numel:
        raise ValueError(f"{what} has a local tensor of {local.numel()} elements, and its placements say {numel}")
    flat = _flat(local, what, is_written)
    if isinstance(value, DTensor) and spec.has_partial:
        return Staged(local.detach(), reductions_of(value))
    return flat


def _flat(local: torch.Tensor, what: str, is_written: bool) -> Readable:
    # Exact types: a subclass may keep its elements in other tensors, and a view of its own memory would not be them.
    if type(local) not in (torch.Tensor, nn.Parameter, BoxTensor):
        raise TypeError(f"{what} has a local tensor of type {type(local).__name__}: expected plain tensors")
    if local.is_meta:
        raise ValueError(f"{what} is on the meta device: it has no memory")
    # A source can be staged. A target cannot: messages of straight atoms arrive in its memory.
    if is_written and not local.is_contiguous():
        raise ValueError(f"{what} has a local tensor that is not contiguous: make it contiguous")
    if is_written and (local.is_conj() or local.is_neg()):
        raise ValueError(f"{what} has a local tensor that is conjugated or negated lazily: call resolve_conj().resolve_neg()")
    local = local.detach()
    if not local.is_contiguous() or local.is_conj() or local.is_neg():
        return Staged(local)
    # torch keeps any stride of a single element, and calls it contiguous.
    return local.view(-1).as_strided((local.numel(),), (1,))


def check_memory(source: Mapping[str, Readable], target: Mapping[str, Readable], device: torch.device) -> None:
    """Raise ``ValueError`` if a source and a target share memory, or one is not on the device of the messages."""
    intervals = []
    for which, side in enumerate((source, target)):
        for name, given in side.items():
            tensor = given.local if isinstance(given, Staged) else given
            if tensor.device.type != device.type:
                raise ValueError(
                    f"run(): {name} is on {tensor.device}, and this group's messages are on {device}: move it there"
                )
            if tensor.numel():
                reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
                start = tensor.data_ptr()
                # The stretch from the first to the last element: rows of a padded matrix share a stretch with what lies between
                # them. This refuses a few legal pairs, and misses none that overlaps.
                intervals.append((str(tensor.device), start, start + reach * tensor.itemsize, which, name))
    furthest: list[tuple[str, int, str]] = [("", 0, ""), ("", 0, "")]
    # By device and start. An interval overlaps an earlier one of the other side if one of those ends behind its start, and of
    # these the one that reaches furthest is enough.
    for where, start, stop, which, name in sorted(intervals):
        other_where, other_stop, other = furthest[1 - which]
        if other_where == where and start < other_stop:
            names = (name, other) if which == 0 else (other, name)
            raise ValueError(
                "run(): {} of the source and {} of the target share memory: give a target of its own".format(*names)
            )
        if furthest[which][0] != where or stop > furthest[which][1]:
            furthest[which] = (where, stop, name)
