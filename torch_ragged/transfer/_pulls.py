"""Pull plans: an engine's own loader runs once on placeholders, and what it copies where becomes the target of a plan.

It knows no engine, and it moves nothing. Placeholders are tensors on the meta device. All views of one share its storage, and
their offset, sizes and strides say which elements they are::

    loader     qkv.data.narrow(0, 32, 8).copy_(k.narrow(0, 8, 8))
    pull       rows 8 to 15 of k, to rows 32 to 39 of qkv
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from torch_ragged._register._torch import TorchDispatchMode
from torch_ragged.tensor._ownership import Box, Owned, coordinate_at, row_major
from torch_ragged.transfer._sides import Holder, ListedSide, named_values

__all__ = ["PullLayout", "PullSide"]

_MOST_BOXES = 4096
"""Of one copy. A copy of a slice needs one; one of every second row needs one per row."""


class _Pull(NamedTuple):
    """Elements of a weight that a rank copies: a box of the weight, with offset and strides in the tensor ``key``."""

    name: str
    key: str
    box: Box


class _Dim(NamedTuple):
    """A dimension of a copy: its size, and its stride in the weight and in the target."""

    size: int
    stride: int
    step: int


class PullLayout:
    """What an engine reads of each weight, as its own loader says. It is the target of a :func:`plan`, and of its runs.

    ::

        pulls = transfer.PullLayout(engine.load_weights, shapes)      # on each engine rank; no weight is read
        plan = transfer.plan(trainer_weights, pulls)                  # other ranks give None
        plan.run(trainer_weights, pulls)                              # writes into the engine's parameters

    Each rank of the engine gives its own, which are joined. The weights that the loader gets are placeholders without memory.
    It may take views of them (slices, ``narrow``, ``chunk``, ``t``, ``view``), cast them, and copy them into parameters or into
    views of parameters. All else must happen after a run, such as quantization. Of copies into the same view, the last counts.

    Args:
        load: a function that takes an iterable of names and tensors, such as vLLM's ``load_weights``. It is called once, here.
        weights: what the source has: names to anything with a ``shape`` and a ``dtype`` (:class:`Spec`, tensors on the meta
            device); a module, a mapping or pairs. Every weight is given to ``load``, also if it copies none of it.

    Raises:
        NotImplementedError: ``load`` computes with a placeholder. If it reads a value, torch raises a RuntimeError.
        TypeError: ``load`` copies a placeholder into a DTensor, or ``weights`` is none of these.
        ValueError: copies overlap in part; a weight is cast twice, or to another dtype than the parameter's; parameters have
            different dtypes for one weight; a copy has more than 4,096 pieces.

    Issues no collective. Keep it as long as the plan: it holds the parameters. If the engine replaces them, make both anew.
    """

    def __init__(self, load: Callable[[Iterable[tuple[str, torch.Tensor]]], object], weights: Any) -> None:
        recorder = _Recorder(named_values(weights, "PullLayout(weights=)"))
        with recorder:
            load(recorder.placeholders())
        self.tensors = recorder.flats
        """The memory that is written, flat, by keys of the side."""
        pulls = tuple(pull for found in recorder.copies.values() for pull in found)
        _check_overlaps(pulls, self.tensors)
        dtypes = {pull.name: self.tensors[pull.key].dtype for pull in pulls}
        for pull in pulls:
            if self.tensors[pull.key].dtype != dtypes[pull.name]:
                raise ValueError(f"PullLayout: {pull.name} is copied into parameters of different dtypes: give it one")
        self.side = PullSide({name: (recorder.shapes[name], dtype) for name, dtype in dtypes.items()}, {dist.get_rank(): pulls})


class _Recorder(TorchDispatchMode):
    """Hears of each operation on a placeholder. Other operations run as ever."""

    def __init__(self, weights: Mapping[str, Any]) -> None:
        super().__init__()
        self.shapes = {name: tuple(each.shape) for name, each in weights.items()}
        self.dtypes = {name: each.dtype for name, each in weights.items()}
        self.flats: dict[str, torch.Tensor] = {}
        # By offset, sizes and strides in the target: what is copied there last.
        self.copies: dict[tuple[object, ...], list[_Pull]] = {}
        self._names: dict[torch.UntypedStorage, str] = {}  # Of placeholders. A storage is one object as long as it lives.
        self._keys: dict[torch.UntypedStorage, str] = {}  # Of targets.

    def placeholders(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and placeholders, one after another, as a checkpoint's reader yields them."""
        for name in self.shapes:
            yield name, self._placeholder(name, self.dtypes[name])

    def _placeholder(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        base = torch.empty(self.shapes[name], dtype=dtype, device="meta")
        self._names[base.untyped_storage()] = name
        return base

    def _name(self, tensor: Any) -> str | None:
        if not isinstance(tensor, torch.Tensor) or isinstance(tensor, DTensor) or not tensor.is_meta:
            return None
        return self._names.get(tensor.untyped_storage())

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        read = [each for each in tree_leaves((args, kwargs)) if self._name(each) is not None]
        if not read:
            return func(*args, **kwargs)
        if func is torch.ops.aten.copy_.default and read[0] is args[1]:
            self._copied(args[0], args[1])
            return args[0]
        if func in (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default):
            # A copy of what is never written is the same elements. To another device too: there, the target is.
            return self._cast(read[0], kwargs.get("dtype") or read[0].dtype)
        result = func(*args, **kwargs)
        if func._schema.is_mutable or not all(self._is_view(each, read[0].dtype) for each in tree_leaves(result)):
            # No TypeError: Python's operators would take it for one of their own.
            raise NotImplementedError(
                f"PullLayout: the loader calls {func} on {self._name(read[0])}, which has no values yet: it may slice, cast "
                "and copy weights; compute with them after plan.run()"
            )
        return result

    def _is_view(self, result: Any, dtype: torch.dtype) -> bool:
        """Whether it has values of a placeholder of ``dtype``: a conjugate, or the same bits as another dtype, has others."""
        return self._name(result) is not None and result.dtype == dtype and not (result.is_conj() or result.is_neg())

    def _cast(self, view: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        name = self._name(view)
        assert name is not None
        if dtype == view.dtype:
            return view.detach()
        if view.dtype != self.dtypes[name]:
            raise ValueError(f"PullLayout: the loader casts {name} to {view.dtype} and then to {dtype}: cast it once")
        return self._placeholder(name, dtype).as_strided(view.shape, view.stride(), view.storage_offset())

    def _copied(self, target: torch.Tensor, view: torch.Tensor) -> None:
        name = self._name(view)
        assert name is not None
        storage = target.untyped_storage()
        reach = 1 + target.storage_offset() + sum((size - 1) * step for size, step in zip(target.shape, target.stride()))
        # A subclass may keep its elements in other tensors. Then it has no memory of its own.
        is_plain = not isinstance(target, DTensor) and not target.is_meta and storage.nbytes() >= reach * target.itemsize
        if target.numel() and (not is_plain or target.is_conj() or target.is_neg()):
            raise TypeError(
                f"PullLayout: the loader copies {name} into a {type(target).__name__} on {target.device}: expected a plain "
                "tensor with memory of its own"
            )
        if view.dtype not in (self.dtypes[name], target.dtype):
            raise ValueError(
                f"PullLayout: the loader casts {name} to {view.dtype}, and copies it into a parameter of {target.dtype}: cast "
                "it to that dtype, or not at all"
            )
        if not target.numel():
            return
        key = self._keys.setdefault(storage, str(len(self._keys)))
        flat = self.flats.setdefault(key, target.detach().as_strided((storage.nbytes() // target.itemsize,), (1,), 0))
        if flat.dtype != target.dtype:
            raise ValueError(f"PullLayout: {name} is copied into memory that is {flat.dtype} and {target.dtype}: use one dtype")
        dims = [_Dim(*each) for each in zip(target.shape, view.expand(target.shape).stride(), target.stride())]
        found = _boxes_of_view(self.shapes[name], int(view.storage_offset()), dims, int(target.storage_offset()))
        boxes = list(itertools.islice(found, _MOST_BOXES + 1))
        if len(boxes) > _MOST_BOXES:
            raise ValueError(
                f"PullLayout: a copy of {name} has more than {_MOST_BOXES} pieces, as a view of strides {view.stride()}: copy "
                "slices of consecutive rows or columns"
            )
        where = (key, target.storage_offset(), target.shape, target.stride())
        self.copies.pop(where, None)  # Or it would keep its turn.
        self.copies[where] = [_Pull(name, key, box) for box in boxes]


def _boxes_of_view(shape: Sequence[int], start: int, dims: Sequence[_Dim], at: int) -> Iterator[Box]:
    """A view of a row-major tensor of ``shape`` as boxes of it, each with its offset and strides in the target.

    Args:
        start: of the view's first element in the tensor.
        dims: those of the view, in any order.
        at: where the first element lies in the target.
    """
    strides, offsets = row_major(shape), coordinate_at(start, shape)
    sizes, steps = [1] * len(shape), [0] * len(shape)
    placed: list[_Dim] = []
    rest = [dim for dim in dims if dim.size != 1]
    while rest:
        dim = rest.pop()
        axes = [i for i, stride in enumerate(strides) if stride == dim.stride and shape[i] > 1 and sizes[i] == 1]
        axis = axes[0] if axes else None
        if axis is not None and offsets[axis] + dim.size <= shape[axis]:
            sizes[axis], steps[axis] = dim.size, dim.step
            placed.append(dim)
        elif axis is not None and offsets[axis] == 0 and dim.size % shape[axis] == 0:  # Several dimensions in one.
            placed.append(_Dim(shape[axis], dim.stride, dim.step))
            sizes[axis], steps[axis] = shape[axis], dim.step
            rest.append(_Dim(dim.size // shape[axis], dim.stride * shape[axis], dim.step * shape[axis]))
        else:  # Every second row, a part of a dimension that was split, or an expanded one: each index is a box.
            for i in range(dim.size):
                yield from _boxes_of_view(shape, start + i * dim.stride, [*placed, *rest], at + i * dim.step)
            return
    yield Box(offsets, tuple(sizes), at, tuple(steps))


def _check_overlaps(pulls: Sequence[_Pull], flats: Mapping[str, torch.Tensor]) -> None:
    """Raise ``ValueError`` if two pulls write to one element: a plan has no order in which one would be the last."""
    for key, flat in flats.items():
        found = sorted((pull for pull in pulls if pull.key == key), key=lambda pull: pull.box.local_offset)
        stops = [1 + b.local_offset + sum((n - 1) * step for n, step in zip(b.sizes, b.local_strides)) for *_, b in found]
        # Stretches may overlap without a common element, as columns do: only then, elements are marked.
        if all(stop <= after.box.local_offset for stop, after in zip(itertools.accumulate(stops, max), found[1:])):
            continue
        marks = torch.zeros(len(flat), dtype=torch.bool, device="cpu")
        for name, _, box in found:
            mine = marks.as_strided(box.sizes, box.local_strides, box.local_offset)
            if mine.any():
                raise ValueError(f"PullLayout: {name} is copied onto a part of another copy: copy each element once")
            mine.fill_(True)


class PullSide(ListedSide):
    """The target side of the :class:`PullLayout` of all ranks.

    Args:
        tensors: the shape of each weight that is pulled, and the dtype of its targets.
        held: the pulls of each rank.
    """

    def __init__(
        self, tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]], held: Mapping[int, tuple[_Pull, ...]]
    ) -> None:
        self.tensors, self.held = dict(tensors), dict(held)
        # Ranks that copy the same to the same offsets, such as replicas of an engine, are one holder, and pass elements on.
        ranks_of: dict[tuple[str, str, tuple[Box, ...]], list[int]] = defaultdict(list)
        for rank, pulls in sorted(self.held.items()):
            boxes: dict[tuple[str, str], list[Box]] = defaultdict(list)
            for pull in pulls:
                boxes[pull.name, pull.key].append(pull.box)
            for (name, key), listed in boxes.items():
                ranks_of[name, key, tuple(listed)].append(rank)
        holders: dict[str, list[Holder]] = {name: [] for name in tensors}
        for (name, key, own), ranks in ranks_of.items():
            holders[name].append(Holder(tuple(ranks), key, Owned((sum(box.numel for box in own),), own, flat=True)))
        super().__init__(
            {name: shape for name, (shape, _) in tensors.items()},
            {name: dtype for name, (_, dtype) in tensors.items()},
            holders,
        )

    @staticmethod
    def joined(sides: Iterable[PullSide]) -> PullSide:
        """One side of those of several ranks; equal on all ranks that call it with equal sides."""
        tensors: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        held: dict[int, tuple[_Pull, ...]] = {}
        for side in sides:
            held.update(side.held)
            for name, each in side.tensors.items():
                if tensors.setdefault(name, each) != each:
                    raise ValueError(
                        f"plan(target=): ranks pull {name} as {tensors[name][0]}, {tensors[name][1]} and as {each[0]}, "
                        f"{each[1]}: give one shape and one dtype"
                    )
        return PullSide(tensors, held)

    def lines(self) -> Iterator[str]:
        yield from (f"{name}: {each}" for name, each in self.tensors.items())
        yield from (f"rank {rank}: {pulls}" for rank, pulls in self.held.items())
