"""Records what a program does to tensors without memory: first in deferred_init, then until materialize.

In deferred_init, tensors are fake ones, and :class:`Recorder` is a mode. Afterwards, the module has :class:`DeferredTensor` on
the meta device, whose ops continue the tape. Nothing is computed here, except values that the program reads.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import traceback
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary, finalize

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from torch_ragged._register._random import check_before_init, forget_tensors
from torch_ragged.random._replay import prune, values_of
from torch_ragged.random._tape import End, Entry, StoragePart, Stream, Tape, read_state, write_state
from torch_ragged.tensor._ops._rules import is_random

__all__ = ["ORIGIN", "DeferredTensor", "Origin", "Recorder", "check_draws", "known_ends", "has_fakes"]

known_ends: WeakValueDictionary[tuple[str, bytes], End] = WeakValueDictionary()
"""Where recordings have left the default generators, by device type and state: as long as anything needs their tapes."""
_last: dict[str, End] = {}
"""The last of them on each device type: the generator may be there, when no tensor of the tape is left."""
_lift_fresh = torch.ops.aten.lift_fresh.default
_UNMARKED = ("running_mean", "running_var")  # Ops of batch norm write to these arguments, which their schemas do not say.


class Recorder(TorchDispatchMode):
    """Records all ops on a tape while it is entered. Tensors are fake: they have shapes and devices, but no memory.

    It lives as long as a tensor of its tape. Then the tape keeps only what random streams need, since those of other tapes may
    begin at its end.
    """

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape
        self._fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._reads = _Reads(self)
        self._numbers: dict[int, int] = {}
        self._fakes: list[torch.Tensor] = []  # One of each storage. Kept, so that no later storage gets the same address.
        # Kept like the fakes: addresses are keys, and the address of a freed storage would be used again.
        self._metas: dict[int, torch.UntypedStorage] = {}
        self._numbers_of_metas: dict[int, int] = {}
        self._points: dict[str, dict[bytes, Any]] = {}
        self._generators: dict[int, tuple[torch.Generator, torch.Generator]] = {}
        self.gives_arrays = False
        self._has_drawn = False
        # The tape may live longer: recordings that began where this one ended need its draws. When the interpreter ends, none
        # of them is needed.
        finalize(self, prune, tape).atexit = False
        check_before_init(_refuse_shard)

    def __deepcopy__(self, memo: Any) -> Recorder:
        return self  # A copy of a tensor is one of the same tape.

    def __enter__(self) -> Recorder:
        # The mode that is entered last sees an op first. So the recorder is above the fake mode, which makes the results.
        # _Reads sees functions that are no ops.
        self._fake_mode.__enter__()
        super().__enter__()
        self._reads.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._reads.__exit__(*exception)
        super().__exit__(*exception)
        self._fake_mode.__exit__(*exception)
        if exception[0] is None:
            self._note_ends()
            return
        for device_type, stream in self.tape.streams.items():
            # The construction has failed, and nobody can replay its draws: the generator must not stay in a marked state.
            write_state(device_type, stream.start)
        if self.gives_arrays and isinstance(exception[1], ValueError) and "read-only" in str(exception[1]):
            lines = [
                f"{f.filename}:{f.lineno}"
                for f in traceback.extract_tb(exception[2])
                if not f.filename.startswith(_NOT_THE_USERS)
            ]
            where = lines[-1] if lines else "an unknown line"
            raise RuntimeError(
                f"deferred_init: {where} writes to a NumPy array of a tensor without memory: write to the tensor by torch's "
                "ops, such as copy_(torch.from_numpy(...))"
            ) from exception[1]

    # --- tensors ----------------------------------------------------------------------------------------------------------

    def part(self, tensor: torch.Tensor) -> StoragePart:
        """The part of the tape that a tensor shows, which is a fake one or on the meta device."""
        storage = tensor.untyped_storage()
        if not isinstance(tensor, FakeTensor):
            # Views and parameters of a deferred tensor have its storage, so the address says which one it is.
            number = self._numbers_of_metas[storage._cdata]
        else:
            if storage._cdata not in self._numbers:
                self._numbers[storage._cdata] = len(self.tape.devices)
                self._fakes.append(tensor)
                self.tape.devices.append(tensor.device)
            number = self._numbers[storage._cdata]
        shape, stride = tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride()))
        return StoragePart(number, shape, stride, int(tensor.storage_offset()), tensor.dtype)

    def deferred(self, fake: torch.Tensor) -> DeferredTensor:
        """The tensor on the meta device that stands for a fake one."""
        part = self.part(fake)
        with _disable_current_modes(), torch.no_grad():
            # One meta storage for each fake one: ties and views stay visible to fully_shard and to state dicts.
            if part.storage not in self._metas:
                nbytes = int(fake.untyped_storage().nbytes())
                storage = torch.empty(nbytes, dtype=torch.uint8, device="meta").untyped_storage()
                self._metas[part.storage], self._numbers_of_metas[storage._cdata] = storage, part.storage
            return self.shown(self.plain(part), part)

    def shown(self, plain: torch.Tensor, part: StoragePart) -> DeferredTensor:
        """The deferred tensor of a plain one, which :meth:`plain` or a view of it has made."""
        found = torch.Tensor._make_subclass(DeferredTensor, plain)
        vars(found)[ORIGIN] = Origin(self, part)
        found.since = len(self.tape.entries)
        return found

    def plain(self, part: StoragePart) -> torch.Tensor:
        """A plain tensor on the meta device, with the storage of deferred ones."""
        empty = torch.empty(0, dtype=part.dtype, device="meta")
        return empty.set_(self._metas[part.storage], part.offset, part.shape, part.stride)

    def _fake(self, tensor: DeferredTensor) -> torch.Tensor:
        """The fake tensor that a deferred one stands for."""
        part = self.part(tensor)
        first = self._fakes[part.storage]
        with self._fake_mode:
            if first.dtype != part.dtype:
                numel = int(first.untyped_storage().nbytes()) // first.element_size()
                first = first.as_strided((numel,), (1,), 0).view(part.dtype)
            return first.as_strided(part.shape, part.stride, part.offset)

    def values(self, tree: Any) -> Any:
        """``tree`` with real tensors in place of those of the tape."""
        with _disable_current_modes(), torch.no_grad():
            return values_of(self.tape, pytree.tree_map(self._recorded, tree))

    # --- ops --------------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        # torch.tensor(...) calls lift_fresh with memory that nobody knows; torch.from_numpy(...) with that of the array.
        is_fresh = func is _lift_fresh and args[0].untyped_storage().resizable()
        if func.is_view and not is_fresh and not has_fakes((args, kwargs)):
            with _disable_current_modes():  # An older tensor: a write to the view is one to the tensor.
                return func(*args, **kwargs)
        # Before the op runs: if it would write to a tensor of the user, this raises, and nothing is written.
        written = self._written(func, args, kwargs)
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            if type(error).__name__ not in ("DataDependentOutputException", "DynamicOutputShapeException"):
                raise
            result = self._computed(func, args, kwargs)
        self._record(func, args, kwargs, result, written)
        forget_tensors(self._fake_mode)
        return result

    def continued(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Record an op on deferred tensors, after deferred_init."""
        args, kwargs = pytree.tree_map_only(DeferredTensor, self._fake, (args, kwargs))
        with self._fake_mode:
            result = self.__torch_dispatch__(func, (), args, kwargs)
        if self._has_drawn:
            self._note_ends()

        # For an op in place or with out=, torch returns the argument, and drops this result.
        return pytree.tree_map_only(FakeTensor, self.deferred, result)

    def _note_ends(self) -> None:
        """Note where the default generators are: the next recording may begin there."""
        self._has_drawn = False
        for device_type, stream in self.tape.streams.items():
            marker = bytes(read_state(device_type).numpy())
            end = known_ends[device_type, marker] = _last[device_type] = End(self.tape, self._point(device_type, marker))
            # known_ends is weak, and _last holds one end only. This one lives as long as the tape.
            stream.ends.append(end)

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an op that depends on values: numbers, or fake tensors of the shapes that it has."""
        args, kwargs = self.values((args, kwargs))
        with _disable_current_modes():
            result = func(*args, **kwargs)
        return pytree.tree_map_only(
            torch.Tensor,
            lambda real: torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=real.device),
            result,
        )

    def _written(self, func: Any, args: Any, kwargs: Any) -> frozenset[int]:
        """The storages that the op writes to."""
        found = set()
        for leaf in written_tensors(func, args, kwargs):
            if isinstance(leaf, FakeTensor):
                found.add(self.part(leaf).storage)
            else:
                raise RuntimeError(
                    f"deferred_init: {func} at {user_line()} writes to a tensor that deferred_init has not made: make it "
                    "by an op inside of the function"
                )
        return frozenset(found)

    def _record(self, func: Any, args: Any, kwargs: Any, result: Any, written: frozenset[int]) -> None:
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, FakeTensor)]
        known = {leaf.untyped_storage()._cdata for leaf in given}
        results = pytree.tree_leaves(result)
        is_made = [isinstance(leaf, FakeTensor) and leaf.untyped_storage()._cdata not in known for leaf in results]
        made = tuple(self.part(leaf) if new else None for leaf, new in zip(results, is_made))
        if not written and not any(is_made):
            return  # A view, or a question about a tensor.
        with _disable_current_modes():
            check_draws(f"{func} at {user_line()}")
        tensors = given or [leaf for leaf in results if isinstance(leaf, FakeTensor)]
        device_type = tensors[0].device.type
        draws = is_random(func) and kwargs.get("generator") is None and device_type != "meta"
        before = self._before_draw(device_type) if draws else None
        # A constant that torch.tensor(...) makes is known to nobody. Others may change before they are read.
        recorded = self._recorded if func is _lift_fresh else self._snapshot
        with _disable_current_modes(), torch.no_grad():
            args, kwargs = pytree.tree_map(recorded, (tuple(args), dict(kwargs)))
        default, number = torch.get_default_dtype(), len(self.tape.entries)
        self.tape.entries[number] = Entry(func, args, kwargs, made, written, device_type, before, user_line(), default)
        if draws:
            self._has_drawn = True
            with _disable_current_modes():
                # A fake op draws nothing, so two draws would find the generator in one state. The mark moves it. If the program
                # reads the state and sets it later, the point is known again.
                marker = mark(device_type, f"{func} {[part.shape for part in self.tape.entries[number].all_parts]}")
                self._points[device_type][marker] = number

    def _before_draw(self, device_type: str) -> Any:
        """The point of the default generator."""
        with _disable_current_modes():
            state = read_state(device_type)
            marker = bytes(state.numpy())
            if device_type not in self._points:
                self._points[device_type] = {}
                point = self._point(device_type, marker)
                self.tape.streams[device_type] = Stream(state.clone(), point if isinstance(point, End) else None)
                self._points[device_type][marker] = ("start", b"")
            return self._point(device_type, marker)

    def _point(self, device_type: str, marker: bytes) -> Any:
        """The point that the default generator is at, in the state ``marker``."""
        point = self._points[device_type].get(marker, known_ends.get((device_type, marker)))
        if point is None and _is_marked(seed_of(device_type)):
            raise RuntimeError(
                f"deferred_init: the generator on {device_type} was set to a state that an earlier deferred_init had left, "
                "whose numbers are no longer known: call torch.manual_seed before, or set an older state"
            )
        return ("state", marker) if point is None else point

    def _recorded(self, leaf: Any) -> Any:
        if isinstance(leaf, (FakeTensor, DeferredTensor)):
            return self.part(leaf)
        if isinstance(leaf, torch.Generator):  # As it is now: to replay must not draw from the user's.
            return self._generators.setdefault(id(leaf), (leaf, leaf.clone_state()))[1]
        return leaf

    def _snapshot(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and not isinstance(leaf, FakeTensor):
            return leaf.detach().clone()
        return self._recorded(leaf)


class _Reads(TorchFunctionMode):
    """Gives real tensors to functions that read values without an op, and copies fake ones without their mode."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS and isinstance(args[0], FakeTensor):
            return read(self._recorder, func, args, kwargs or {})
        if func is torch.empty and _asks("torch.nn.parameter", "__new__"):
            with _disable_current_modes():  # A lazy parameter has no values: the first forward makes them.
                return func(*args, **(kwargs or {}))
        if func == _SET_DATA and isinstance(args[1], FakeTensor) and not isinstance(args[0], FakeTensor):
            raise RuntimeError(
                f"deferred_init: {user_line()} sets .data of a tensor with memory to one without. If a lazy module does it, "
                "give it its sizes, or run its first forward after materialize(module)"
            )
        if func is torch.Tensor.__deepcopy__ and isinstance(args[0], FakeTensor):  # torch's would copy the mode, too.
            return copied(*args)
        return func(*args, **(kwargs or {}))


class DeferredTensor(torch.Tensor):
    """A tensor on the meta device whose values :func:`materialize` computes. Ops on it are recorded on its tape.

    ``torch.nn`` sees a tensor that is not on the meta device, because ``nn.init`` and ``load_state_dict`` skip those that are.

    Attributes:
        since: the number of entries of the tape when it was made.
    """

    __slots__ = ("since",)
    since: int

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _GET_IS_META and _asks("torch.nn."):
            return False
        if func in _READS and isinstance(args[0], DeferredTensor):
            return read(args[0].recorder, func, args, kwargs or {})
        if func is torch.Tensor.__deepcopy__:
            return copied(*args)
        if func is torch.Tensor.__reduce_ex__:
            raise _needs_values("pickle")
        if func is torch.Tensor.__setitem__ and isinstance(args[2], (bool, int, float, complex)):
            args = (*args[:2], torch.tensor(args[2], dtype=args[0].dtype, device="cpu"))  # torch's would be on the meta device.
        if func == _SET_DATA and not isinstance(args[1], DeferredTensor):
            raise RuntimeError(
                f"{user_line()} sets .data of a tensor that deferred_init has made to one with memory: use .data.copy_(...), "
                "or call materialize(module) before"
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if func == _SET_DATA:
            vars(args[0])[ORIGIN] = vars(args[1])[ORIGIN]
        return result

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        recorders = {id(leaf.recorder): leaf.recorder for leaf in tensors if isinstance(leaf, DeferredTensor)}
        others = [leaf for leaf in tensors if not isinstance(leaf, DeferredTensor)]
        written = written_tensors(func, args, kwargs)
        writes = any(isinstance(leaf, DeferredTensor) for leaf in written)
        has_metas = any(leaf.is_meta for leaf in others)
        is_new = kwargs.get("device") is not None and func is not torch.ops.aten._to_copy.default
        if not writes and (is_new or has_metas):  # Without values; or they are not needed, as in empty_like(..., device="cpu").
            return func(*plain(args), **plain(kwargs))
        is_read = any(leaf.ndim for leaf in others) or bool(written)  # Together with older tensors, as in forward.
        needs_values = is_read and not writes or kwargs.get("device") is not None
        needs_values |= func.namespace.startswith(("c10d", "_c10d"))
        if len(recorders) > 1 or writes and has_metas or needs_values:
            raise _needs_values(func)
        if torch.Tag.inplace_view in func.tags:
            raise RuntimeError(
                f"{func} at {user_line()} changes the shape of a tensor that deferred_init has made, in place: call it in the "
                "function that deferred_init calls, or after materialize(module)"
            )
        (recorder,) = recorders.values()
        if func.is_view:  # Views have no entry on the tape.
            views = func(*plain(args), **plain(kwargs))
            return pytree.tree_map_only(torch.Tensor, lambda each: recorder.shown(each, recorder.part(each)), views)
        return recorder.continued(func, args, kwargs)

    @property
    def recorder(self) -> Recorder:
        """The recorder of its tape."""
        return vars(self)[ORIGIN].recorder

    @property
    def number(self) -> int:
        """The number of its storage on the tape."""
        return vars(self)[ORIGIN].part.storage


ORIGIN = "_deferred"
"""The attribute with the :class:`Origin` of a deferred tensor. A parameter that is sharded gets it, as all attributes."""


@dataclass(frozen=True, eq=False)
class Origin:
    """Where the values of a tensor come from: a part of the tape of a recorder."""

    recorder: Recorder
    part: StoragePart

    @property
    def tape(self) -> Tape:
        return self.recorder.tape

    @property
    def device(self) -> torch.device:
        """The device of the construction."""
        return self.tape.devices[self.part.storage]


def mark(device_type: str, draw: str) -> bytes:
    """Put the default generator into a state that tells the point after a draw from others, and return it.

    It has a seed of its own, which it keeps until it is seeded: so numbers that are drawn in between are noticed. Equal draws
    after equal states give equal seeds, on all ranks.
    """
    digest = hashlib.sha256(bytes(read_state(device_type).numpy()) + draw.encode()).digest()
    # 40 bits of the digest and 23 of a checksum: the seed stays below 2**63. By the digest of state and draw, and not by a
    # counter: all ranks must get the same seed, also if they drew different numbers in other recordings.
    state = _state_after(device_type, _marked(int.from_bytes(digest[:5], "big")))
    write_state(device_type, state)
    return bytes(state.numpy())


def _marked(value: int) -> int:
    """A seed whose last bits are a checksum of the others: it tells a marked state from one that the user's seed has set."""
    check = hashlib.sha256(value.to_bytes(8, "big")).digest()
    return value << 23 | int.from_bytes(check[:3], "big") >> 1


def _is_marked(seed: int) -> bool:
    return seed == _marked(seed >> 23)


@functools.lru_cache(maxsize=4)
def _state_after(device_type: str, seed: int) -> torch.Tensor:
    """The state of a generator that was just seeded."""
    return torch.Generator(device_type).manual_seed(seed).get_state()


def seed_of(device_type: str) -> int:
    """The seed of a device's default generator."""
    return torch.initial_seed() if device_type == "cpu" else torch.get_device_module(device_type).initial_seed()


def check_draws(what: str) -> None:
    """Raise if numbers were drawn since a recording has ended, which are not those of a single device.

    Raises:
        RuntimeError: they were, and the generator was not seeded since.
    """
    for device_type in _last:
        seed = seed_of(device_type)
        # A draw changes the state, but not the seed. So a marked seed with another state means that something drew.
        if _is_marked(seed) and not torch.equal(read_state(device_type), _state_after(device_type, seed)):
            raise RuntimeError(
                f"{what}: random numbers were drawn on {device_type} after deferred_init, when the generator has no state of a "
                "single device: draw them in the function that deferred_init calls, or after materialize(module), or call "
                "torch.manual_seed before"
            )


_GET_IS_META, _SET_DATA = torch.Tensor.is_meta.__get__, torch.Tensor.data.__set__  # type: ignore[attr-defined]
_READS = tuple(getattr(torch.Tensor, name) for name in ("tolist", "numpy", "__array__", "__format__", "__repr__"))


def read(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function that reads values, with those that its first argument has now."""
    with torch._C.DisableTorchFunctionSubclass():
        tensor = recorder.values(args[0])
        if isinstance(args[0], nn.Parameter):
            tensor = nn.Parameter(tensor, func is torch.Tensor.__repr__ and args[0].requires_grad)
        with _disable_current_modes():
            given = {name: value for name, value in kwargs.items() if value is not None}  # A parameter's repr takes none.
            result = getattr(tensor, func.__name__)(*args[1:], **given)
    if func in (torch.Tensor.numpy, torch.Tensor.__array__):
        recorder.gives_arrays = True
        result.flags.writeable = False  # It is a copy: what is written to it would not be in the tensor.
    return result


def plain(tree: Any) -> Any:
    """``tree`` with plain tensors on the meta device in place of deferred ones."""
    return pytree.tree_map_only(DeferredTensor, lambda each: each.recorder.plain(each.recorder.part(each)), tree)


def copied(tensor: torch.Tensor, memo: Any) -> torch.Tensor:
    """A deep copy of a fake or deferred tensor: the copy is recorded."""
    if id(tensor) not in memo:
        value = tensor.detach().clone()
        memo[id(tensor)] = nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
    return memo[id(tensor)]


def written_tensors(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that an op writes to."""
    arguments = {arg.name: value for arg, value in zip(func._schema.arguments, args)} | kwargs
    trains = arguments.get("training", arguments.get("train", True))
    marked = [each.name for each in func._schema.arguments if each.alias_info is not None and each.alias_info.is_write]
    found = [arguments.get(name) for name in (*marked, *(_UNMARKED if trains else ()))]
    return [leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, torch.Tensor)]


def _needs_values(what: Any) -> RuntimeError:
    return RuntimeError(
        f"{what} at {user_line()} needs values of a tensor that deferred_init has made, which has none yet: call "
        "materialize(module) before"
    )


def _refuse_shard(name: str, tensor: Any) -> None:
    if isinstance(tensor, DTensor) and isinstance(tensor._local_tensor, DeferredTensor):
        raise RuntimeError(
            f"nn.init.{name.removeprefix('_no_grad_')} at {user_line()} writes to a shard of a module that deferred_init has "
            "made, which has no values yet: call it before the module is sharded, or after materialize(module)"
        )


def _asks(module: str, function: str = "") -> bool:
    """Whether the call of torch's function that a ``__torch_function__`` handles stands in a module whose name begins so."""
    frame = sys._getframe(2)
    return frame.f_globals.get("__name__", "").startswith(module) and frame.f_code.co_name.startswith(function)


def has_fakes(tree: Any) -> bool:
    return any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves(tree))


_NOT_THE_USERS = ("<", os.path.dirname(os.path.dirname(__file__)), os.path.dirname(torch.__file__))


def user_line() -> str:
    """The innermost line of code that is neither torch's nor this package's."""
    frames = ((frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(None))
    return next((f"{name}:{line}" for name, line in frames if not name.startswith(_NOT_THE_USERS)), "an unknown line")
