"""deferred_init and materialize: build a model without memory, shard it, then draw only what this rank owns."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, Union
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from torch_ragged._ranks.agreement import agree
from torch_ragged._ranks.groups import device_of_messages
from torch_ragged.random._recording import ORIGIN, DeferredTensor, Origin, Recorder, check_draws, has_fakes, known_ends
from torch_ragged.random._replay import Target, replay, state_at, whole_box
from torch_ragged.random._tape import Entry, StoragePart, Tape, read_state, write_state
from torch_ragged.tensor._from_meta import FromMeta
from torch_ragged.tensor._random import Holding

__all__ = ["deferred_init", "is_deferred", "materialize"]

Module = TypeVar("Module", bound=nn.Module)

_wholes: WeakKeyDictionary[nn.Module, dict[str, DeferredTensor]] = WeakKeyDictionary()
"""For each module that deferred_init made: its parameters and buffers by name, as they were before it was sharded."""
_MADE = "_materialized_as"  # The attribute of a parameter that another module may be tied to.


def deferred_init(function: Callable[..., Module], *args: Any, **kwargs: Any) -> Module:
    """Call ``function(*args, **kwargs)``, which makes a module, without memory: parameters and buffers are meta tensors.

    Every op on their values is recorded instead: factories, ``nn.init``, ops in place, copies, ties. :func:`materialize`
    replays it later, on the elements that this rank owns, with the bits of a construction on a single device. Until the module
    is sharded, the program goes on as on a single device: ops on the parameters are recorded, too::

        torch.manual_seed(0)                                        # the same on every rank
        model = deferred_init(LlamaForCausalLM, config)             # no memory
        model.apply(init_weights)                                   # recorded; so are load_state_dict(...) and model.to(dtype)
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        materialize(model)                                          # the memory of the local shards

    The class of the model need not know of it. Nothing is drawn here. Numbers begin at the state that the default generator has
    now; set the seed before. Between the two calls, the generator is in a state that no single device has: only ops on the
    parameters may draw then. If other numbers are drawn and the generator is not seeded again, :func:`materialize` raises.

    Tensors that were made before are copied when an op reads them: ``load_state_dict`` into such a module needs the memory of
    the state dict once more. To load into shards, call :func:`materialize` first, or pass ``assign=True``.

    A value that is read during construction (``item()``, ``tolist()``, ``if tensor:``) is computed at once, whole. If random
    numbers are in it, all numbers before it are drawn for that, once: ``nn.init.trunc_normal_`` of torch 2.13 reads whether a
    number is out of bounds. No communication.

    Returns:
        the module, on the meta device. Plain tensors in its attributes are real.

    Raises:
        TypeError: ``function`` is no function, or returns no module.
        RuntimeError: an op writes to a tensor that was made before or to an array of NumPy, or a lazy module runs its forward:
            that cannot be replayed. The error names the op and the line.

    Source: veScale, "deferred initialization"; torchdistx had functions of these names.
    """
    if not callable(function) or isinstance(function, nn.Module):
        raise TypeError(
            f"deferred_init: pass a function, got a {type(function).__name__}"
            f"{', a module whose memory is allocated already' if isinstance(function, nn.Module) else ''}: "
            "deferred_init(nn.Linear, 4, 4), or deferred_init(lambda: nn.Linear(4, 4))"
        )
    recorder = Recorder(Tape())
    with recorder:
        module = function(*args, **kwargs)
        if not isinstance(module, nn.Module):
            raise TypeError(f"deferred_init: {function} returned {type(module).__name__}, expected a torch.nn.Module")
        # The attributes that each fake tensor has. All others were set by the program, and go to the parameter.
        ordinary = set(vars(torch.empty(0, device="cpu")))
    found: dict[int, torch.Tensor] = {}
    for each in module.modules():
        for tensors in (each._parameters, each._buffers):
            for name, tensor in tensors.items():
                if isinstance(tensor, FakeTensor):
                    if id(tensor) not in found:  # Tied parameters stay tied.
                        found[id(tensor)] = _registered(recorder, tensor, ordinary)
                    tensors[name] = found[id(tensor)]  # type: ignore[assignment]
        for name, value in vars(each).items():
            # materialize() goes through parameters and buffers only, so a tensor in another attribute gets its values now,
            # whole.
            if name not in ("_parameters", "_buffers", "_modules") and has_fakes(value):
                vars(each)[name] = recorder.values(value)
    keep_origins(module)
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
        RuntimeError: an op has written to a shard, which has no values yet; a parameter has a gradient; or numbers were drawn
            since ``deferred_init``. Nothing is allocated, on all ranks of the mesh. Or an op cannot be replayed.
    """
    tensors = dict(_meta_tensors(module))
    origins, problem = _find_origins(tensors)
    tapes = {whole.recorder.tape for each in module.modules() for whole in _wholes.get(each, {}).values()}
    _agree_on_starts(tensors, origins, problem)
    if problem is not None:  # No tensor is a DTensor.
        raise problem
    # After the agreement: a rank that raises here for want of memory does so alone, but replay() communicates nothing that
    # others could wait for.
    made = _allocate(module, device, origins)
    targets: dict[Tape, list[Target]] = {tape: [] for tape in tapes}  # Also if all its tensors were replaced since.
    for tensor, origin in made:
        targets.setdefault(origin.tape, []).append(_target(tensor, origin.part))
    for each in module.modules():
        # ``made`` has the origins now. The whole tensors may go, and their recorder with the last of them.
        _wholes.pop(each, None)
    for tape, wanted in targets.items():
        with torch.no_grad():
            # To the last entry, also if a later tensor was replaced or is another module's: the generator must end where a
            # single device leaves it.
            replay(tape, wanted, until=max(tape.entries, default=-1))
        for device_type in tape.streams:
            # Any state that this recording has left: the program may have drawn in a fork_rng() since the construction.
            end = known_ends.get((device_type, bytes(read_state(device_type).numpy())))
            if end is not None and end.tape is tape:  # Not another recording after the same seed.
                write_state(device_type, state_at(tape, device_type, end.point))
    return module


def is_deferred(module: nn.Module) -> bool:
    """Whether a parameter or buffer of ``module`` waits for :func:`materialize`."""
    return any(_origin_of(*found, {}) is not None for _, found in _meta_tensors(module))


def keep_origins(module: nn.Module) -> None:
    """Note the tensors that wait for :func:`materialize` as they are now: they are about to be sharded."""
    for _, (owner, key, tensor) in _meta_tensors(module):
        if isinstance(tensor, DeferredTensor):
            _wholes.setdefault(owner, {})[key] = tensor


def _registered(recorder: Recorder, fake: torch.Tensor, ordinary: set[str]) -> torch.Tensor:
    """The deferred tensor in place of a fake one, with its attributes, except the ``ordinary`` ones of fake tensors."""
    tensor: torch.Tensor = recorder.deferred(fake)
    gradient = None if fake.grad is None else recorder.deferred(fake.grad)
    if isinstance(fake, nn.Parameter):
        tensor = nn.Parameter(tensor, requires_grad=fake.requires_grad)
        vars(tensor).update({name: value for name, value in vars(fake).items() if name not in ordinary})
        tensor.grad = gradient
    return tensor


def _meta_tensors(module: nn.Module) -> Iterator[tuple[str, tuple[nn.Module, str, torch.Tensor]]]:
    for prefix, each in module.named_modules():
        for tensors in (each._parameters, each._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    yield f"{prefix}.{name}" if prefix else name, (each, name, tensor)


_Makers = dict[Tape, dict[int, Entry]]
"""The entry of a tape that has made a storage."""
_MOVES = ("empty_like", "new_empty", "new_zeros", "clone", "cat", "constant_pad_nd")


def _origin_of(owner: nn.Module, key: str, tensor: torch.Tensor, makers: _Makers) -> Origin | None:
    origin: Origin | None = vars(tensor).get(ORIGIN)
    if origin is not None or not isinstance(tensor, DTensor):
        return origin
    # A parameter that was distributed by hand has no attributes. But ops that distribute have made its local tensor.
    own, local = _wholes.get(owner, {}).get(key), tensor._local_tensor
    if not isinstance(local, DeferredTensor):  # This rank holds nothing.
        return None if own is None else vars(own)[ORIGIN]
    sources = _sources(local, makers)
    wholes = [own] if own is not None and own.number in sources else [each for all in _wholes.values() for each in all.values()]
    found = {id(vars(each)[ORIGIN]): vars(each)[ORIGIN] for each in wholes if each.recorder is local.recorder}
    fitting = [each for each in found.values() if each.part.storage in sources and each.part.shape == tuple(tensor.shape)]
    return fitting[0] if len(fitting) == 1 else None


def _sources(local: DeferredTensor, makers: _Makers) -> set[int]:
    """The storages that ``local`` is a shard of: only ops that move values are between them."""
    entries = local.recorder.tape.entries.values()
    if local.recorder.tape not in makers:
        makers[local.recorder.tape] = {part.storage: entry for entry in entries for part in entry.made if part is not None}
    storage, found = local.number, {local.number}
    while True:
        maker = makers[local.recorder.tape][storage]
        source = next(maker.parts, None)
        if source is None or maker.op._schema.name.removeprefix("aten::") not in _MOVES:
            return found
        storage = source.storage
        found.add(storage)
        if any(storage in entry.written for entry in entries):
            return found


def _find_origins(tensors: dict[str, tuple[nn.Module, str, torch.Tensor]]) -> tuple[dict[int, Origin], Exception | None]:
    """For each tensor by ``id``, where its values come from; and what is wrong."""
    found: dict[int, Origin] = {}
    makers: _Makers = {}
    try:
        if tensors:
            check_draws("materialize")
    except RuntimeError as error:
        return found, error
    for name, (owner, key, tensor) in tensors.items():
        origin = _origin_of(owner, key, tensor, makers)
        if origin is None or origin.part.shape != tuple(tensor.shape) or origin.device.type == "meta":
            return found, ValueError(
                f"materialize: {name} is on the meta device, but deferred_init did not make it with this shape on another "
                "device: build the whole module by deferred_init without a meta device, and shard it without changing shapes"
            )
        if tensor.grad is not None:
            return found, RuntimeError(
                f"materialize: {name} has a gradient, which would be lost: set it to None before, by module.zero_grad()"
            )
        if found.setdefault(id(tensor), origin) is not origin:
            return found, ValueError(
                f"materialize: {name} was tied to another parameter after the module was sharded: tie parameters before"
            )
        local = tensor._local_tensor if isinstance(tensor, DTensor) else None
        if not isinstance(local, DeferredTensor) or local.number == origin.part.storage:
            continue  # A rank may hold nothing; or a view of the whole tensor, whose ops are on the tape as such.
        entries = origin.tape.entries
        late = next(
            (each for each in itertools.islice(entries.values(), local.since, None) if local.number in each.written), None
        )
        if late is not None:
            return found, RuntimeError(
                f"materialize: {late.op} at {late.where} writes to {name}, or to a parameter beside it, between sharding and "
                "materialize, when shards have no values: write before the module is sharded, or after materialize(module)"
            )
    return found, None


def _agree_on_starts(
    tensors: dict[str, tuple[nn.Module, str, torch.Tensor]], origins: dict[int, Origin], problem: Exception | None
) -> None:
    """Raise on all ranks of a mesh if one has a problem, or if the states at which their numbers begin differ."""
    starts: dict[Any, set[str]] = {}
    changes: dict[Tape, Counter[int]] = {}  # How many ops make or write to a storage.
    for name, (_, _, tensor) in tensors.items():
        if isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is not None:
            lines = starts.setdefault(tensor.device_mesh, set())
            if problem is None:
                origin = origins[id(tensor)]
                tape = origin.tape
                if tape not in changes:
                    changes[tape] = Counter(storage for entry in tape.entries.values() for storage in entry.changed)
                # Not of all tensors: one rank may have imported the module's package in the construction, another one before.
                lines.add(f"{name}: {changes[tape][origin.part.storage]} ops")
                states = (bytes(stream.start.numpy()) for stream in tape.streams.values())
                lines.update(f"random state {hashlib.sha256(state).hexdigest()[:12]}" for state in states)
    # In the order of names, which the ranks of a mesh have in common: ranks of several meshes agree in the same order. A rank
    # with a problem takes part, too, and all raise.
    for mesh, lines in starts.items():
        groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]
        advice = "call torch.manual_seed with one seed on all ranks before deferred_init, and build the same module"
        claim = "\n".join(sorted(lines))
        agree(groups, device_of_messages(groups[0]), "torch_ragged.random.materialize", claim, problem, advice)


def _allocate(
    module: nn.Module, device: Union[torch.device, str, None], origins: dict[int, Origin]
) -> list[tuple[torch.Tensor, Origin]]:
    """Memory for all tensors on the meta device. Tied ones stay tied; fully_shard's modules do it for their groups.

    Returns:
        the tensors to fill, each with its origin.
    """
    # Before fully_shard's modules allocate: afterwards, their parameters are not on the meta device, and no longer found.
    waiting = list(_meta_tensors(module))
    for each in module.modules():
        if isinstance(each, FSDPModule):
            each._apply(FromMeta(device))
    made: dict[int, tuple[torch.Tensor, Origin]] = {}
    for _, (owner, key, tensor) in waiting:
        tensors: Any = owner._parameters if key in owner._parameters else owner._buffers
        new, origin = tensors[key], origins[id(tensor)]
        if new.is_meta:
            new = vars(tensor).get(_MADE)  # A tied parameter of a part that was materialized before.
            if new is None:
                new = FromMeta(device, origin.device)(tensor.detach())
                if isinstance(tensor, nn.Parameter):
                    new = nn.Parameter(new, requires_grad=tensor.requires_grad)
                    vars(new).update({name: value for name, value in vars(tensor).items() if name != "_is_param"})
                # A module that is materialized later may be tied to it. The old tensor keeps it alive as long as anything waits
                # for it.
                vars(tensor)[_MADE] = new
                made[id(new)] = new, origin
            tensors[key] = new
        else:
            made[id(new)] = new, origin
        vars(new).pop(ORIGIN, None)
    return list(made.values())


def _target(tensor: torch.Tensor, part: StoragePart) -> Target:
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        return Target(part, tensor._local_tensor, Holding(tensor._spec).boxes)
    return Target(part, tensor, whole_box(tensor.shape))
