"""Replays a tape on the elements that are asked for, and no others.

It must not communicate. First it goes through the tape backwards and finds what each storage is needed for: nothing; the
elements that this rank holds of one target; or all elements. Then it goes through the tape forwards. Every random op draws, so
that numbers and generators are those of a single device, but :func:`draw_owned` keeps only what is needed. Other ops run on the
needed elements if that gives the bits of the whole tensor. If not, their tensors are made whole, and freed after their last
use.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Optional, Union

import torch
from torch.utils import _pytree as pytree

from torch_ragged.random._tape import START, End, Entry, Point, StoragePart, Tape, read_state, write_state
from torch_ragged.tensor._draw import draw_owned
from torch_ragged.tensor._exchange import clipped, paired_views, views_of
from torch_ragged.tensor._ops._rules import is_random
from torch_ragged.tensor._ownership import Box, row_major
from torch_ragged.tensor._sampler import Sampler

__all__ = ["Target", "prune", "replay", "state_at", "values_of", "whole_box"]

_aten = torch.ops.aten
_SAMPLER_OPS = "normal_ uniform_ exponential_ log_normal_ geometric_ cauchy_ random_ bernoulli_".split()
_CONSTANT_OPS = "empty zeros ones full empty_like zeros_like ones_like full_like new_empty new_zeros new_ones new_full".split()
_CONSTANT_OPS += ["empty_strided", "new_empty_strided", "empty_permuted"]
# Ops on elements whose bits do not depend on an element's place: processors compute them equally in vectors and one by one. Of
# exp, log, tanh and others this is not true.
_EXACT = """abs add bitwise_and bitwise_not bitwise_or ceil clamp clamp_max clamp_min clone copy detach div eq erfinv fill floor
    ge gt le lift_fresh logical_not lt masked_fill maximum minimum mul ne neg reciprocal round sign sqrt sub trunc where zero
    _to_copy""".split()


@dataclass(frozen=True)
class NeededLayout:
    """Which elements of a tensor are needed: those that a rank holds."""

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    local_shape: tuple[int, ...]


@dataclass
class Target:
    """A tensor to fill: ``local`` gets the elements of ``part`` in ``boxes``, which count from a contiguous ``local``."""

    part: StoragePart
    local: torch.Tensor
    boxes: tuple[Box, ...]

    @property
    def layout(self) -> NeededLayout:
        return NeededLayout(self.part.shape, self.boxes, tuple(self.local.shape))


class _Whole:
    def __repr__(self) -> str:
        return "WHOLE"


_WHOLE = _Whole()
_Need = Union[NeededLayout, _Whole]


@dataclass(frozen=True)
class _Draw:
    """A random op as a sampler in place: its op and arguments, the part that it fills, and the part of probabilities."""

    op: torch._ops.OpOverload
    args: tuple[Any, ...]
    part: StoragePart
    values: tuple[StoragePart, ...] = ()


def whole_box(shape: Sequence[int]) -> tuple[Box, ...]:
    """All elements of a tensor."""
    return (Box((0,) * len(shape), tuple(shape), 0, row_major(shape)),) if math.prod(shape) else ()


def replay(tape: Tape, targets: Sequence[Target], until: Optional[int] = None) -> None:
    """Fill ``targets``. The default generators are afterwards as before.

    Args:
        until: draw all numbers up to the entry with this number, so that the states of the streams are known there. None: only
            those before the last entry that is needed.

    Raises:
        RuntimeError: an op of the tape cannot be run, with the user's line.
    """
    # The default generators are the user's. They are moved to each draw's point, because torch's ops without a generator draw
    # from them alone.
    before = {device_type: read_state(device_type) for device_type in tape.streams}
    run = _Run(tape)
    for target in targets:
        run.need(target.part.storage, target.layout if run.is_base(target.part) else _WHOLE)
    try:
        run.plan()
        run.fill(targets, until)
    finally:
        for device_type, state in before.items():
            write_state(device_type, state)


def state_at(tape: Tape, device_type: str, point: Point) -> torch.Tensor:
    """The state of a single device's generator at a point of the tape. Numbers that nothing has drawn yet are drawn."""
    stream = tape.streams[device_type]
    if isinstance(point, int):
        if point not in stream.known:
            replay(tape, [], until=point)
        state = stream.known[point]
        # Nothing but this state was still needed of the tape's entries: they can go.
        if tape.is_pruned:
            prune(tape)
        return state
    if isinstance(point, End):
        return state_at(point.tape, device_type, point.point)
    if point != START:
        return torch.frombuffer(bytearray(point[1]), dtype=torch.uint8)
    return stream.start if stream.after is None else state_at(stream.after.tape, device_type, stream.after.point)


def prune(tape: Tape) -> None:
    """Keep what the random streams of the tape need: no tensor is left that its ops have made."""
    tape.is_pruned = is_drawn = True
    for stream in tape.streams.values():
        points = {end.point for end in stream.ends}
        stream.known = {point: state for point, state in stream.known.items() if point in points}
        is_drawn &= all(point in stream.known for point in points if isinstance(point, int))
    run = _Run(tape)
    run.plan()
    needed = {} if is_drawn else tape.entries
    tape.entries = {i: e for i, e in needed.items() if is_random(e.op) or not run.needs.keys().isdisjoint(e.changed)}


def values_of(tape: Tape, tree: Any) -> Any:
    """``tree`` with real tensors in place of its parts, as the tape has them at its end.

    If random numbers are in them, every random op so far is drawn, once for all calls.
    """
    parts = list(dict.fromkeys(leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, StoragePart)))
    locals_ = [torch.empty(part.shape, dtype=part.dtype, device=tape.devices[part.storage]) for part in parts]
    replay(tape, [Target(part, local, whole_box(part.shape)) for part, local in zip(parts, locals_)])
    found = dict(zip(parts, locals_))
    return pytree.tree_map(lambda leaf: found[leaf] if isinstance(leaf, StoragePart) else leaf, tree)


class _Run:
    """One replay. ``needs`` says what each storage is needed for; those that are needed for nothing are not in it."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.needs: dict[int, _Need] = {}
        self.bases = {part.storage: part for entry in tape.entries.values() for part in entry.made if part is not None}
        self.memory: dict[int, Any] = {}  # The local tensor of a storage, or the UntypedStorage of a whole one.
        self.at: dict[str, Point] = {}
        self.generators: dict[int, torch.Generator] = {}

    def need(self, storage: int, wanted: _Need) -> bool:
        """Need a storage for ``wanted``, too; two different needs make it whole. Returns whether this is new."""
        known = self.needs.get(storage)
        if known == wanted or known is _WHOLE:
            return False
        self.needs[storage] = wanted if known is None else _WHOLE
        return True

    def plan(self) -> None:
        """Find all needs, from those that are known. A storage that becomes whole may change what other ops can do."""
        # It ends: a need only grows, from nothing to a layout to the whole tensor.
        is_new = True
        while is_new:
            is_new = False
            for entry in reversed(self.tape.entries.values()):
                is_needed = not self.needs.keys().isdisjoint(entry.changed)
                if not is_needed and not (is_random(entry.op) and _draw_of(entry) is None):
                    continue
                layout = self.layout_of(entry)
                reads = [] if layout and _is_constant_entry(entry) else list(entry.parts)
                for part in (*reads, *(part for part in entry.made if part is not None)):
                    is_scalar = not part.shape and part.storage not in entry.changed
                    is_new |= self.need(part.storage, _WHOLE if layout is None or is_scalar else layout)

    def layout_of(self, entry: Entry) -> Optional[NeededLayout]:
        """The layout of the elements that the op can run on by themselves; None if it needs whole tensors."""
        layouts = {self.needs[storage] for storage in entry.changed if storage in self.needs}
        if len(layouts) != 1 or not isinstance(layout := layouts.pop(), NeededLayout):
            return None
        if _is_constant_entry(entry):
            return layout if all(self.is_base(part) for part in entry.made if part is not None) else None
        draw = _draw_of(entry)
        if draw is None and not _is_exact(entry):
            return None
        parts = [draw.part, *draw.values] if draw else [*entry.parts, *(part for part in entry.made if part is not None)]
        others = [leaf for leaf in pytree.tree_leaves((entry.args, entry.kwargs)) if isinstance(leaf, torch.Tensor)]
        # A constant of several elements would have to be cut as the target is. One value is the same for all elements.
        if all(self.fits(part, layout) for part in parts) and all(leaf.ndim == 0 for leaf in others):
            return layout
        # One box of a tensor, such as a row, which no other tensor is read for.
        written = [part for part in parts if part.storage in entry.written]
        alone = len(written) == 1 and all(part is written[0] or not part.shape for part in parts) and not others
        return layout if alone and not (draw and draw.values) and self.box_of(written[0]) is not None else None

    def is_base(self, part: StoragePart) -> bool:
        """Whether a tensor shows its storage as the op that made it: each element of memory once, in the same order."""
        return part == self.bases.get(part.storage) and _is_dense(part)

    def fits(self, part: StoragePart, layout: NeededLayout) -> bool:
        """Whether a tensor's elements are those of the layout, one by one, or it is one value for all."""
        if part.shape == layout.shape and self.is_base(part):
            return self.needs.get(part.storage, layout) == layout
        return not part.shape

    def box_of(self, part: StoragePart) -> Optional[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Offsets and sizes of the box of its storage's tensor that a view shows; None if it is none, or not in that order."""
        base = self.bases.get(part.storage)
        if base is None or base.dtype != part.dtype or base.offset or not math.prod(part.shape):
            return None
        rest, offsets = part.offset, [0] * len(base.shape)
        # From the largest stride on: so the offset tells the index along each dimension, in any order of dimensions in memory.
        for dim in sorted(range(len(base.shape)), key=lambda dim: -base.stride[dim]):
            offsets[dim], rest = divmod(rest, base.stride[dim]) if base.shape[dim] > 1 else (0, rest)
        sizes, dim = [1] * len(base.shape), 0
        for size, stride in zip(part.shape, part.stride):
            if size == 1:
                continue
            while dim < len(base.shape) and (base.stride[dim] != stride or base.shape[dim] == 1):
                dim += 1
            if dim == len(base.shape):
                return None
            sizes[dim] = size
            dim += 1
        fits = all(a + n <= total for a, n, total in zip(offsets, sizes, base.shape))
        return (tuple(offsets), tuple(sizes)) if fits and not rest else None

    # --- running --------------------------------------------------------------------------------------------------------

    def fill(self, targets: Sequence[Target], until: Optional[int]) -> None:
        """Run what is needed, and every draw before it. Targets get their values as soon as these are complete."""
        direct: dict[int, torch.Tensor] = {}
        wanted: dict[int, list[Target]] = {}
        for target in targets:
            part, local = target.part, target.local
            wanted.setdefault(part.storage, []).append(target)
            # Numbers are drawn on the device of the construction: its generator has other numbers than another device's.
            is_alike = part.dtype == local.dtype and self.tape.devices[part.storage].type == local.device.type
            # The shard itself is the memory of the op: no second tensor of its size.
            if is_alike and self.needs[part.storage] == target.layout:
                direct.setdefault(part.storage, local)
        entries = self.tape.entries
        ends: dict[int, list[int]] = {}
        # Whole tensors live from the entry that makes them to the last one that has them. So two of them exist together only if
        # the construction has used both in turn.
        last = {part.storage: index for index, entry in entries.items() for part in entry.all_parts}
        for storage, index in last.items():
            ends.setdefault(index, []).append(storage)
        is_needed = {i: not self.needs.keys().isdisjoint(entry.changed) for i, entry in entries.items()}
        stop = max((i for i, needed in is_needed.items() if needed), default=-1) if until is None else until
        for index, entry in entries.items():
            if index > stop:
                break
            if is_needed[index] or is_random(entry.op):
                try:
                    self._step(index, entry, is_needed[index], direct)
                except Exception as error:
                    raise RuntimeError(f"materialize: {entry.op} at {entry.where} cannot be replayed: {error}") from error
            for storage in ends.get(index, ()):
                for target in wanted.pop(storage, ()):
                    self._copy_to(target)
                self.memory.pop(storage, None)
        for target in (each for rest in wanted.values() for each in rest):  # Of which an unneeded entry was the last.
            self._copy_to(target)

    def _step(self, index: int, entry: Entry, is_needed: bool, direct: dict[int, torch.Tensor]) -> None:
        """Run one op, from its point of the stream. A draw that nobody needs is left out if the state after it is known."""
        stream = None if entry.before is None else self.tape.streams[entry.device_type]
        # Its end is known from an earlier replay, so the numbers need not be drawn again.
        if stream is not None and index in stream.known and not is_needed:
            return
        if stream is not None:
            self._go_to(entry.device_type, entry.before)  # type: ignore[arg-type]
        default = torch.get_default_dtype()
        torch.set_default_dtype(entry.default_dtype)
        try:
            self._run(entry, is_needed, direct)
        finally:
            torch.set_default_dtype(default)
        if stream is not None:
            # 5 KB on the CPU for each draw, as long as the tape lives: a later read of a value begins here, and not at the
            # start.
            stream.known[index] = read_state(entry.device_type)
            self.at[entry.device_type] = index

    def _go_to(self, device_type: str, point: Point) -> None:
        """Set the default generator to a point of the stream."""
        if self.at.get(device_type) != point:
            write_state(device_type, state_at(self.tape, device_type, point))
            self.at[device_type] = point

    def _run(self, entry: Entry, is_needed: bool, direct: dict[int, torch.Tensor]) -> None:
        draw = _draw_of(entry) if is_random(entry.op) else None
        if not is_needed and draw is not None:
            # Drawn, and dropped: the next draw must begin where it begins on a single device, also on a rank that holds nothing
            # of this tensor.
            self._draw(entry, draw, NeededLayout(draw.part.shape, (), (0,)), None)
            return
        layout = self.layout_of(entry)
        if layout is None:
            self._run_whole(entry)
            return
        made = [part for part in entry.made if part is not None]
        if draw is not None:
            if made:
                self.memory[draw.part.storage] = self._new(draw.part, layout, direct)
            self._draw(entry, draw, layout, self.memory[draw.part.storage])
            return
        if _is_constant_entry(entry):
            local = self.memory[made[0].storage] = self._new(made[0], layout, direct)
            name = entry.op._schema.name
            if "zeros" in name or "ones" in name:
                local.fill_("ones" in name)
            elif "full" in name:
                local.fill_(entry.args[-1])
            return
        written = [part for part in entry.parts if part.storage in entry.written]
        if written and not self.is_base(written[0]):
            for view in self._views_in(written[0], layout):
                self._call(entry, {written[0]: view})
            return
        locals_ = {part: self.memory[part.storage] for part in entry.parts}
        # All parts have one layout here, or are one value. So their local tensors lie alike, and the op on them gives the
        # elements of the op on whole tensors.
        result = self._call(entry, {part: local for part, local in locals_.items() if isinstance(local, torch.Tensor)})
        if made:
            target = direct.get(made[0].storage)
            self.memory[made[0].storage] = result if target is None else target.copy_(result)

    def _call(self, entry: Entry, locals_: dict[StoragePart, torch.Tensor]) -> Any:
        """The op on local tensors; all other parts are values."""

        def real(leaf: Any) -> Any:
            if isinstance(leaf, StoragePart):
                return locals_[leaf] if leaf in locals_ else self._tensor(leaf)
            return leaf

        args, kwargs = pytree.tree_map(real, (entry.args, entry.kwargs))
        return entry.op(*args, **kwargs)

    def _run_whole(self, entry: Entry) -> None:
        results = pytree.tree_leaves(self._call_whole(entry))
        for part, result in zip(entry.made, results):
            if part is not None:
                constants = [leaf for leaf in pytree.tree_leaves((entry.args, entry.kwargs)) if isinstance(leaf, torch.Tensor)]
                if any(result.untyped_storage()._cdata == leaf.untyped_storage()._cdata for leaf in constants):
                    result = result.clone(memory_format=torch.preserve_format)  # lift_fresh returns the constant itself.
                self.memory[part.storage] = result.untyped_storage()

    def _call_whole(self, entry: Entry) -> Any:
        args, kwargs = pytree.tree_map(
            lambda leaf: self._tensor(leaf) if isinstance(leaf, StoragePart) else leaf, (entry.args, entry.kwargs)
        )
        if (generator := kwargs.get("generator")) is not None:
            kwargs["generator"] = self._generator(generator)
        return entry.op(*args, **kwargs)

    def _tensor(self, part: StoragePart) -> torch.Tensor:
        """A whole tensor."""
        storage = self.memory[part.storage]
        empty = torch.empty(0, dtype=part.dtype, device=self.tape.devices[part.storage])
        return empty.set_(storage, part.offset, part.shape, part.stride)

    def _new(self, part: StoragePart, layout: NeededLayout, direct: dict[int, torch.Tensor]) -> torch.Tensor:
        """Memory for the needed elements: the target's own, if it can be."""
        if part.storage in direct:
            return direct[part.storage]
        return torch.empty(layout.local_shape, dtype=part.dtype, device=self.tape.devices[part.storage])

    def _generator(self, recorded: torch.Generator) -> torch.Generator:
        """The generator of a user, in the state that it had at its first draw."""
        return self.generators.setdefault(id(recorded), recorded.clone_state())

    def _draw(self, entry: Entry, draw: _Draw, layout: NeededLayout, local: Optional[torch.Tensor]) -> None:
        """Draw a whole tensor, or a box of it, and keep the needed elements in ``local``; None keeps none."""
        recorded = entry.kwargs.get("generator")
        generator = None if recorded is None else self._generator(recorded)
        shape, stride, boxes = draw.part.shape, draw.part.stride, layout.boxes
        if local is None:
            local = torch.empty(0, dtype=draw.part.dtype, device=self.tape.devices[draw.part.storage])
            values = [torch.empty(0, dtype=part.dtype, device="cpu") for part in draw.values]
        else:
            values = [self.memory[part.storage] for part in draw.values]
            if not self.is_base(draw.part):
                found = self.box_of(draw.part)
                assert found is not None
                shape, stride = found[1], self.bases[draw.part.storage].stride
                # What of the box is here, counted from its corner.
                inside = filter(None, [clipped(box, *found) for box in boxes])
                boxes = tuple(replace(each, offsets=tuple(map(operator.sub, each.offsets, found[0]))) for each in inside)
        draw_owned(Sampler(draw.op, draw.args, draw.part.dtype, generator), shape, stride, boxes, local, values)

    def _views_in(self, part: StoragePart, layout: NeededLayout) -> list[torch.Tensor]:
        """What this rank holds of a box of a tensor, as views of its memory."""
        found = self.box_of(part)
        assert found is not None
        local = self.memory[part.storage]
        return views_of(local, filter(None, [clipped(box, *found) for box in layout.boxes]))

    def _copy_to(self, target: Target) -> None:
        memory = self.memory[target.part.storage]
        if isinstance(memory, torch.Tensor):
            if memory is not target.local:
                target.local.copy_(memory)
            return
        for view, whole in paired_views(target.local, self._tensor(target.part), target.boxes):
            view.copy_(whole)


def _is_dense(part: StoragePart) -> bool:
    """Whether a tensor shows a dense piece of memory from the beginning of its storage, each element once."""
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(part.shape, part.stride) if size > 1):
        if stride != expected:
            return False
        expected *= size
    return part.offset == 0


def _is_constant_entry(entry: Entry) -> bool:
    return entry.op._schema.name.removeprefix("aten::") in _CONSTANT_OPS and any(entry.made)


def _is_exact(entry: Entry) -> bool:
    name = entry.op._schema.name.removeprefix("aten::")
    is_scaled = entry.kwargs.get("alpha", 1) != 1  # A fused multiply-add in vectors only.
    return name.rstrip("_") in _EXACT and not is_scaled


def _draw_of(entry: Entry) -> Optional[_Draw]:
    """A random op as a sampler; None if it is not random, or draws in another way, such as randperm."""
    if not is_random(entry.op):
        return None
    name, args = entry.op._schema.name.removeprefix("aten::"), entry.args
    if name in _SAMPLER_OPS:
        parts = tuple(argument for argument in args[1:] if isinstance(argument, StoragePart))
        if any(part.shape != args[0].shape for part in parts):
            return None
        return _Draw(
            entry.op, tuple(argument for argument in args[1:] if not isinstance(argument, StoragePart)), args[0], parts
        )
    made = entry.made[0] if len(entry.made) == 1 else None
    if made is None:
        return None
    if name in ("rand", "rand_like"):
        return _Draw(_aten.uniform_.default, (), made)
    if name in ("randn", "randn_like"):
        return _Draw(_aten.normal_.default, (), made)
    if entry.op is _aten.normal.float_float:
        return _Draw(_aten.normal_.default, args[:2], made)
    if name in ("randint", "randint_like"):
        numbers = [argument for argument in args if isinstance(argument, int)]
        return _Draw(getattr(_aten.random_, "from"), (0, *numbers)[-2:], made)
    if entry.op is _aten.bernoulli.p:
        return _Draw(_aten.bernoulli_.float, args[1:], made)
    if entry.op is _aten.bernoulli.default and args[0].shape == made.shape:
        return _Draw(_aten.bernoulli_.Tensor, (), made, (args[0],))
    return None
