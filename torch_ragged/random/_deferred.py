"""deferred_init and materialize: build a model without memory, shard it, then draw only what this rank owns."""

from __future__ import annotations

import hashlib
import os
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, Union
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from torch_ragged._ranks.agreement import agree
from torch_ragged._ranks.groups import device_of_messages
from torch_ragged._register._random import forget_tensors
from torch_ragged.random._replay import Target, final_state, replay, values_of, whole_box
from torch_ragged.random._tape import Entry, Part, Stream, Tape, is_random, read_state, write_state
from torch_ragged.tensor._from_meta import FromMeta
from torch_ragged.tensor._random import Holding

__all__ = ["deferred_init", "is_deferred", "materialize"]

Module = TypeVar("Module", bound=nn.Module)

_records: WeakKeyDictionary[nn.Module, dict[str, tuple[Tape, Part]]] = WeakKeyDictionary()
"""For each module that deferred_init made: its parameters and buffers by name, as parts of a tape."""
_ends: dict[tuple[str, bytes], Tape] = {}
"""The tapes whose recording has left a default generator in a state, by device type and state."""


def deferred_init(function: Callable[..., Module], *args: Any, **kwargs: Any) -> Module:
    """Call ``function(*args, **kwargs)``, which makes a module, without memory: parameters and buffers are meta tensors.

    Every op on their values is recorded instead: factories, ``nn.init``, ops in place, copies, ties. :func:`materialize`
    replays it later, on the elements that this rank owns, with the bits of a construction on a single device::

        torch.manual_seed(0)                                        # the same on every rank
        model = deferred_init(LlamaForCausalLM, config)             # no memory
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        materialize(model)                                          # the memory of the local shards

    The class of the model need not know of it. Nothing is drawn here. Numbers begin at the state that the default generator has
    now; set the seed before. Between the two calls, the generator is in a state that no single device has: draw nothing then.

    A value that is read during construction (``item()``, ``tolist()``, ``if tensor:``) is computed at once, whole. If random
    numbers are in it, all numbers before it are drawn for that, once: ``nn.init.trunc_normal_`` of torch 2.13 reads whether a
    number is out of bounds. No communication.

    Returns:
        the module, on the meta device. Plain tensors in its attributes are real.

    Raises:
        TypeError: ``function`` returns no module.
        RuntimeError: an op writes to a tensor that was made before, which cannot be replayed; the error names the op and the
            line.

    Source: veScale, "deferred initialization"; torchdistx had functions of these names.
    """
    tape = Tape()
    recorder = Recorder(tape)
    with recorder:
        module = function(*args, **kwargs)
        if not isinstance(module, nn.Module):
            raise TypeError(f"deferred_init: {function} returned {type(module).__name__}, expected a torch.nn.Module")
        parts = {id(tensor): recorder.part(tensor) for tensor in _fake_tensors(module)}
        ordinary = {*vars(torch.empty(0, device="cpu")), "_is_param"}
    metas: dict[int, torch.Tensor] = {}
    for each in module.modules():
        record: dict[str, tuple[Tape, Part]] = {}
        for tensors in (each._parameters, each._buffers):
            for name, tensor in tensors.items():
                if isinstance(tensor, FakeTensor):
                    record[name] = (tape, parts[id(tensor)])
                    if id(tensor) not in metas:  # Tied parameters stay tied.
                        metas[id(tensor)] = _meta(tensor, ordinary)
                    tensors[name] = metas[id(tensor)]  # type: ignore[assignment]
        _records[each] = record
        for name, value in vars(each).items():
            if name not in ("_parameters", "_buffers", "_modules") and _has_fakes(value):
                vars(each)[name] = recorder.values(value)
    return module


def materialize(module: Module, *, device: Union[torch.device, str, None] = None) -> Module:
    """Give the parameters and buffers of a module that :func:`deferred_init` made memory, and their values.

    Call it after the model is sharded: after ``fully_shard``, or with DTensors that were distributed by hand on the meta
    device. Each rank allocates its local tensors, once, and replays what the construction did, on their elements. Values and
    the order of draws are those of a single device, so they do not depend on ranks, meshes and placements::

        model = materialize(deferred_init(lambda: nn.Linear(4, 4)))   # equal to nn.Linear(4, 4), to the bit

    Afterwards the default generator has the state of a single device after the construction, unless something was drawn since
    ``deferred_init``. Parts of a model may be materialized one after another.

    Memory: at most 512 KiB beside the local tensors, as long as the construction uses factories, random ops, copies and
    arithmetic whose bits do not depend on an element's place (``add``, ``mul``, ``div``, ``clamp``, ``erfinv``, ...). A tensor
    that anything else computes (``exp``, ``qr``, sums) is made whole, and freed after its last use. ``fully_shard`` also
    allocates each group's gathered buffer for a moment, as in a forward. Time: that of drawing all numbers of the model.

    Communication: one all-reduce of 24 bytes per mesh dimension of each mesh, before anything is allocated.

    Args:
        module: all of its parameters and buffers that are on the meta device are filled.
        device: where the tensors are made. None: plain tensors on the device that the construction asked for, DTensors on that
            of their mesh, or on the CPU if fully_shard offloads them. Numbers are always those of the construction's device.

    Returns:
        ``module``.

    Raises:
        ValueError: a parameter or buffer is on the meta device and deferred_init has not made it, or on the meta device, or
            with another shape; or the ranks of a mesh had different random states. Nothing is allocated.
        RuntimeError: an op cannot be replayed.
    """
    tensors = dict(_meta_tensors(module))
    unknown = [name for name, (owner, key, tensor) in tensors.items() if not _is_known(owner, key, tensor)]
    problem = None
    if unknown:
        problem = ValueError(
            f"materialize: {unknown[0]} is on the meta device, but deferred_init did not make it with this shape on another "
            "device: build the whole module by deferred_init without a meta device, and shard it without changing shapes"
        )
    _agree_on_starts(tensors, problem)
    if problem is not None:  # No tensor is a DTensor.
        raise problem
    found = [(owner, key, *_records[owner][key]) for owner, key, _ in tensors.values()]
    _allocate(module, device)
    targets: dict[int, tuple[Tape, list[Target]]] = {}
    seen: set[int] = set()
    for owner, key, tape, part in found:
        tensor = owner._parameters.get(key, owner._buffers.get(key))
        assert tensor is not None
        if id(tensor) not in seen:
            seen.add(id(tensor))
            targets.setdefault(id(tape), (tape, []))[1].append(_target(tensor, part))
    for tape, wanted in targets.values():
        with torch.no_grad():
            replay(tape, wanted)
        for device_type, stream in tape.streams.items():
            is_last = _ends.get((device_type, stream.marker)) is tape  # Not another recording after the same seed.
            if is_last and bytes(read_state(device_type).numpy()) == stream.marker:
                write_state(device_type, final_state(tape, device_type))
    return module


def is_deferred(module: nn.Module) -> bool:
    """Whether a parameter or buffer of ``module`` waits for :func:`materialize`."""
    return any(_is_known(owner, key, tensor) for _, (owner, key, tensor) in _meta_tensors(module))


def _meta_tensors(module: nn.Module) -> Iterator[tuple[str, tuple[nn.Module, str, torch.Tensor]]]:
    for prefix, each in module.named_modules():
        for tensors in (each._parameters, each._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    yield f"{prefix}.{name}" if prefix else name, (each, name, tensor)


def _is_known(owner: nn.Module, key: str, tensor: torch.Tensor) -> bool:
    if key not in (record := _records.get(owner, {})):
        return False
    tape, part = record[key]
    return part.shape == tuple(tensor.shape) and tape.devices[part.storage].type != "meta"


def _agree_on_starts(tensors: dict[str, tuple[nn.Module, str, torch.Tensor]], problem: Exception | None) -> None:
    """Raise on all ranks of a mesh if one has a problem, or if the states at which their numbers begin differ."""
    starts: dict[Any, set[str]] = {}
    changes: dict[int, Counter[int]] = {}  # Of each tape: how many ops make or write to a storage.
    for name, (owner, key, tensor) in tensors.items():
        if isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is not None:
            lines = starts.setdefault(tensor.device_mesh, set())
            if problem is None:
                tape, part = _records[owner][key]
                if id(tape) not in changes:
                    changes[id(tape)] = Counter(storage for entry in tape.entries for storage in entry.changed)
                # Not of all tensors: one rank may have imported the module's package in the construction, another one before.
                lines.add(f"{changes[id(tape)][part.storage]} ops on {name}")
                states = (bytes(stream.start.numpy()) for stream in tape.streams.values())
                lines.update(f"random state {hashlib.sha256(state).hexdigest()[:12]}" for state in states)
    for mesh, lines in starts.items():
        groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]
        advice = "call torch.manual_seed with one seed on all ranks before deferred_init, and build the same module"
        claim = "\n".join(sorted(lines))
        agree(groups, device_of_messages(groups[0]), "torch_ragged.random.materialize", claim, problem, advice)


def _allocate(module: nn.Module, device: Union[torch.device, str, None]) -> None:
    """Memory for all tensors on the meta device. Tied ones stay tied; fully_shard's modules do it for their groups."""
    new: dict[int, torch.Tensor] = {}

    def allocated(owner: nn.Module, key: str, tensor: torch.Tensor) -> torch.Tensor:
        tape, part = _records[owner][key]
        data = FromMeta(device, tape.devices[part.storage])(tensor)
        if isinstance(tensor, nn.Parameter):
            parameter = nn.Parameter(data, requires_grad=tensor.requires_grad)
            vars(parameter).update(vars(tensor))
            return parameter
        return data

    for each in module.modules():
        if isinstance(each, FSDPModule):
            each._apply(FromMeta(device))
    for _, (owner, key, tensor) in list(_meta_tensors(module)):
        if id(tensor) not in new:
            new[id(tensor)] = allocated(owner, key, tensor)
        tensors: Any = owner._parameters if key in owner._parameters else owner._buffers
        tensors[key] = new[id(tensor)]


def _target(tensor: torch.Tensor, part: Part) -> Target:
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        return Target(part, tensor._local_tensor, Holding(tensor._spec).boxes)
    return Target(part, tensor, whole_box(tensor.shape))


# --- recording -------------------------------------------------------------------------------------------------------------


class Recorder(TorchDispatchMode):
    """Records all ops on a tape while it is entered. Tensors are fake: they have shapes and devices, but no memory."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape
        self._fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._reads = _Reads(self)
        self._numbers: dict[int, int] = {}
        self._storages: list[Any] = []  # Kept, so that no later storage gets the same address.
        self._points: dict[str, dict[bytes, Any]] = {}
        self._generators: dict[int, tuple[torch.Generator, torch.Generator]] = {}

    def __enter__(self) -> Recorder:
        self._fake_mode.__enter__()
        super().__enter__()
        self._reads.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._reads.__exit__(*exception)
        super().__exit__(*exception)
        self._fake_mode.__exit__(*exception)
        if exception[0] is not None:
            for device_type, stream in self.tape.streams.items():
                write_state(device_type, stream.start)
            return
        for device_type, stream in self.tape.streams.items():
            stream.marker = bytes(read_state(device_type).numpy())
            stream.end = self._points[device_type].get(stream.marker, ("state", stream.marker))
            _ends[device_type, stream.marker] = self.tape

    def part(self, tensor: torch.Tensor) -> Part:
        """The part of the tape that a fake tensor shows."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._numbers:
            self._numbers[storage._cdata] = len(self.tape.devices)
            self._storages.append(storage)
            self.tape.devices.append(tensor.device)
        number, shape = self._numbers[storage._cdata], tuple(map(int, tensor.shape))
        return Part(number, shape, tuple(map(int, tensor.stride())), int(tensor.storage_offset()), tensor.dtype)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        written = self._written(func, args, kwargs)
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            if type(error).__name__ not in ("DataDependentOutputException", "DynamicOutputShapeException"):
                raise
            # The result depends on values.
            args, kwargs = self.values((args, kwargs))
            with _disable_current_modes():
                return func(*args, **kwargs)
        self._record(func, args, kwargs, result, written)
        forget_tensors(self._fake_mode)
        return result

    def values(self, tree: Any) -> Any:
        """``tree`` with real tensors in place of fake ones."""
        with _disable_current_modes(), torch.no_grad():
            return values_of(self.tape, pytree.tree_map(self._recorded, tree))

    def _written(self, func: Any, args: Any, kwargs: Any) -> frozenset[int]:
        """The storages that the op writes to."""
        found = set()
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            for leaf in pytree.tree_leaves(value):
                if isinstance(leaf, FakeTensor):
                    found.add(self.part(leaf).storage)
                elif isinstance(leaf, torch.Tensor):
                    raise RuntimeError(
                        f"deferred_init: {func} at {_user_line()} writes to a tensor that deferred_init has not made: make it "
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
        tensors = given or [leaf for leaf in results if isinstance(leaf, FakeTensor)]
        device_type = tensors[0].device.type
        draws = is_random(func) and kwargs.get("generator") is None and device_type != "meta"
        before = self._before_draw(device_type) if draws else None
        args, kwargs = pytree.tree_map(self._recorded, (tuple(args), dict(kwargs)))
        default = torch.get_default_dtype()
        self.tape.entries.append(Entry(func, args, kwargs, made, written, device_type, before, _user_line(), default))
        if draws:
            with _disable_current_modes():
                torch.rand((), device=device_type)  # So that the state tells this point from others, also after manual_seed.
                self._points[device_type][bytes(read_state(device_type).numpy())] = len(self.tape.entries) - 1

    def _before_draw(self, device_type: str) -> Any:
        """The point of the default generator."""
        with _disable_current_modes():
            state = read_state(device_type)
            marker = bytes(state.numpy())
            if device_type not in self._points:
                self.tape.streams[device_type] = Stream(state.clone(), _ends.get((device_type, marker)))
                self._points[device_type] = {marker: ("start", b"")}
            return self._points[device_type].get(marker, ("state", marker))

    def _recorded(self, leaf: Any) -> Any:
        if isinstance(leaf, FakeTensor):
            return self.part(leaf)
        if isinstance(leaf, torch.Generator):  # As it is now: to replay must not draw from the user's.
            return self._generators.setdefault(id(leaf), (leaf, leaf.clone_state()))[1]
        return leaf


class _Reads(TorchFunctionMode):
    """Gives real tensors to functions that read values without an op, and copies fake ones without their mode."""

    _FUNCTIONS = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._FUNCTIONS and isinstance(args[0], FakeTensor):
            args = (self._recorder.values(args[0]), *args[1:])
            with _disable_current_modes():
                return func(*args, **(kwargs or {}))
        if func is torch.Tensor.__deepcopy__ and isinstance(args[0], FakeTensor):  # torch's would copy the mode, too.
            tensor, memo = args
            if id(tensor) not in memo:
                copied = tensor.detach().clone()
                is_parameter = isinstance(tensor, nn.Parameter)
                memo[id(tensor)] = nn.Parameter(copied, tensor.requires_grad) if is_parameter else copied
            return memo[id(tensor)]
        return func(*args, **(kwargs or {}))


_NOT_THE_USERS = (os.path.dirname(__file__), os.path.dirname(torch.__file__))


def _user_line() -> str:
    """The innermost line of code that is neither torch's nor this package's."""
    for frame, line in traceback.walk_stack(None):
        name = frame.f_code.co_filename
        if not name.startswith(("<", *_NOT_THE_USERS)):
            return f"{name}:{line}"
    return "an unknown line"


def _fake_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    for each in module.modules():
        for tensor in (*each._parameters.values(), *each._buffers.values()):
            if isinstance(tensor, FakeTensor):
                yield tensor


def _meta(tensor: torch.Tensor, ordinary: set[str]) -> torch.Tensor:
    """A meta tensor in place of a fake one, with its attributes, except the ``ordinary`` ones of fake tensors."""
    data = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    if not isinstance(tensor, nn.Parameter):
        return data
    parameter = nn.Parameter(data, requires_grad=tensor.requires_grad)
    vars(parameter).update({name: value for name, value in vars(tensor).items() if name not in ordinary})
    return parameter


def _has_fakes(value: Any) -> bool:
    return any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves(value))
