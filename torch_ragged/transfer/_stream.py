"""``stream``: whole tensors of a sharded model, one after another, in bounded memory. It changes no parameter.

::

    all-gather 0   all-gather 1 | yield 0   all-gather 2 | yield 1   ...      | is a wait, for the tensor that is yielded

Each rank writes its shard into the whole tensor, and receives the others' beside it: shards of any sizes need no other buffer.
Before ranks gather tensors, they compare them: those of a mapping at once, pairs one by one.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from torch_ragged._ranks.agreement import agree
from torch_ragged._ranks.groups import device_of_messages, is_gloo
from torch_ragged._ranks.peers import issued_on, peers_named, wait_for
from torch_ragged._register._torch import local_tensor, waited
from torch_ragged.tensor._carry import Pending, all_gather, memory_of
from torch_ragged.tensor._global_layout import global_layout_of
from torch_ragged.tensor._redistribute import mesh_group, plan_of, warn_of_order
from torch_ragged.tensor._route import Gather, most_of_slab
from torch_ragged.transfer._sides import is_extra_state

__all__ = ["stream"]

_CALL = "transfer.stream"
_ADVICE = "give it the same tensors in the same order, and the same dtype, on all ranks"


def stream(
    model: nn.Module | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
    max_bytes: int,
    *,
    dtype: torch.dtype | None = None,
) -> Generator[tuple[str, torch.Tensor], None, None]:
    """Yield ``(name, whole tensor)`` of each tensor, in one order on all ranks, with the next all-gathers in flight.

    ::

        with contextlib.closing(stream(model, 1 << 30, dtype=torch.bfloat16)) as tensors:
            for name, tensor in tensors:
                engine.load(name, tensor)

    All ranks must iterate, also those that need no tensor. If a rank ends its loop early, the generator is closed, and takes
    part in the all-gathers of all remaining tensors without yielding them. So the other ranks do not wait for this rank. A
    ``break`` closes the generator at once. After an exception Python keeps it until the exception is handled: therefore use
    ``contextlib.closing``, as above.

    Args:
        model: a module, of which parameters and persistent buffers are taken, as in ``state_dict()``; a mapping; or pairs of
            names and tensors, which are read as they are needed. DTensors may have any placements. Plain tensors are yielded as
            they are. Names and their order must be equal on all ranks.
        max_bytes: the most bytes of the yielded tensor, of the tensors in flight, and of buffers, together. If one tensor alone
            needs more, it is the only one. A tensor whose shards are not consecutive in memory (columns, or model parallelism
            beside the shards) needs 8 % of its bytes more while it is put in order, or up to 2.6 million elements if that is
            more. A tied tensor comes once for each of its names.
        dtype: the dtype of yielded floating-point tensors. They are cast before they are all-gathered. None: each its own.

    Yields:
        a name, and a tensor without gradients, on the device of its DTensor's mesh. It may be the parameter's own memory: do
        not write to it, and do not change the model while the generator is open. Memory is bounded only if you drop each
        tensor before you ask for the next one. The tensor is complete: the CPU has waited for it, so you may use it on any
        stream. The all-gathers are issued on the stream that is current in the call of ``stream``, also if the consumer
        iterates on another one, where they would wait for the consumer's own collectives, and ranks could deadlock.

    Raises:
        ValueError: ``max_bytes`` is not a positive integer, or a tensor is on the meta device: on all ranks that iterate.
            Or, when ranks iterate, they differ in the tensors of a mesh or in ``dtype``: on all ranks, before these tensors
            are gathered.
        TypeError: ``dtype`` is not a floating-point dtype.
        NotImplementedError: ranks of a mesh are not in ascending order, and torch is 2.11.
        PeerError: another rank died, or does not iterate.

    Source: TRL's and verl's loops over ``param.full_tensor()``, which gather one tensor at a time.
    Collectives: for each DTensor and each mesh dimension that cuts it, one all-gather; over gloo, one broadcast per shard. If
    shards are not consecutive in a large tensor, so for each of its slabs, about 16 at most. For a Partial, those of
    ``redistribute`` to ``Replicate()``. Before them, to compare: for each mesh, or for each of ``pairs``, one all-reduce of 24
    bytes per mesh dimension, for which the host waits.
    """
    given = model.state_dict() if isinstance(model, nn.Module) else model
    device = torch.accelerator.current_accelerator(check_available=True)
    issuing = None if device is None else torch.accelerator.current_stream(device)
    pairs = given.items() if isinstance(given, Mapping) else given
    # A state dict may have other objects.
    tensors = ((name, value) for name, value in pairs if isinstance(value, torch.Tensor) and not is_extra_state(name))
    gather = _Gather(dtype, issuing)
    if (problem := _problem_of(given, max_bytes, dtype)) is not None:
        # Other ranks, whose arguments may be right, look for this one when they iterate: for all tensors, or for each pair.
        for some in (list(tensors),) if isinstance(given, Mapping) else ([pair] for pair in tensors):
            gather.compare(some, problem)  # Raises, if ranks share one of them.
        raise problem
    return _stream(tensors, max_bytes, gather, at_once=isinstance(given, Mapping))


def _problem_of(given: Any, max_bytes: Any, dtype: Any) -> Exception | None:
    """The error of the arguments of :func:`stream`; None: they are right."""
    if not isinstance(max_bytes, int) or isinstance(max_bytes, bool) or max_bytes < 1:
        return ValueError(f"stream(max_bytes=) takes a positive number of bytes, got {max_bytes!r}")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        return TypeError(f"stream(dtype=) takes a floating-point dtype or None, got {dtype!r}")
    for name, value in given.items() if isinstance(given, Mapping) else ():
        if isinstance(value, torch.Tensor) and value.is_meta:
            return ValueError(
                f"stream() gets {name} on the meta device, without memory: load a checkpoint before it, or call "
                "torch_ragged.random.materialize(model)"
            )
    return None


def _stream(
    tensors: Iterator[tuple[str, torch.Tensor]], max_bytes: int, gather: _Gather, at_once: bool
) -> Generator[tuple[str, torch.Tensor], None, None]:
    in_flight: deque[tuple[str, _Issued, _NeededBytes]] = deque()
    if at_once:
        # The names of a mapping are known before anything is gathered: one comparison serves all of them.
        known = list(tensors)
        gather.compare(known)
        tensors = iter(known)
    upcoming, held = next(tensors, None), 0

    def fits(need: _NeededBytes) -> bool:
        # One tensor at a time is issued or unpacked.
        beside = max([need.beside, *(each.beside for _, _, each in in_flight)])
        # From numbers that are equal on all ranks: when they yield a tensor, all ranks have issued the same all-gathers. If one
        # rank had issued more, it could wait inside of an all-gather of several steps for ranks that are in a collective of the
        # consumer, and those would wait for it.
        return not in_flight or held + need.whole + beside <= max_bytes

    try:
        while True:
            while upcoming is not None and fits(need := gather.need(upcoming[1])):
                name, tensor = upcoming
                if not at_once:  # Pairs are read as they are needed: a program may make each tensor when it is asked for.
                    gather.compare([upcoming])
                in_flight.append((name, gather.issue(name, tensor), need))
                upcoming, held = next(tensors, None), held + need.whole
            if not in_flight:
                return
            name, issued, need = in_flight.popleft()
            # No local name may hold the tensor while it is yielded, or it would be alive while the next ones are gathered.
            whole = [gather.wait(issued)]
            del issued
            yield name, whole.pop()
            held -= need.whole
    except GeneratorExit:
        # The consumer of this rank has ended its loop. Other ranks need this rank's shards of all further tensors, and its part
        # in the comparisons. An error of a collective does not come here: other ranks raise, too.
        for _, issued, _ in in_flight:
            gather.wait(issued)
        in_flight.clear()
        for pair in () if upcoming is None else itertools.chain([upcoming], tensors):
            if not at_once:
                gather.compare([pair])
            # One at a time, and dropped at once: this rank needs none of them.
            gather.wait(gather.issue(*pair))
        raise


class _NeededBytes(NamedTuple):
    """The bytes of a whole tensor that is gathered, and those that are needed ``beside`` it while it is issued or unpacked."""

    whole: int
    beside: int


class _Issued(NamedTuple):
    """A tensor on its way. ``call`` names the collectives in errors, and to ranks that wait for this one."""

    pending: Pending
    call: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    wait: Callable[[dist.Work], object] = dist.Work.wait


class _Gather:
    """How one tensor becomes whole, as ``dtype`` (None: its own), by work on the stream ``issuing`` (None: no accelerator)."""

    def __init__(self, dtype: torch.dtype | None, issuing: torch.Stream | None) -> None:
        self._dtype, self._issuing = dtype, issuing

    def need(self, tensor: torch.Tensor) -> _NeededBytes:
        """What gathering ``tensor`` allocates, equal on all ranks; nothing for a tensor that this rank holds."""
        nbytes = tensor.numel() * self._dtype_of(tensor).itemsize
        gathers = _gathers(tensor)
        if gathers is None:  # A reduction, or an exchange: its input, output and a packed buffer.
            return _NeededBytes(nbytes, 2 * nbytes)
        if not gathers:
            return _NeededBytes(nbytes if self._dtype_of(tensor) != tensor.dtype else 0, 0)
        # Equal on all ranks, which must issue and wait in one order: only the last all-gather makes the same piece on all.
        if len(gathers) == 1 and gathers[0].is_straight:
            return _NeededBytes(nbytes, 0)
        return _NeededBytes(nbytes, min(nbytes, most_of_slab(tensor.numel()) * self._dtype_of(tensor).itemsize))

    def compare(self, tensors: Sequence[tuple[str, torch.Tensor]], problem: Exception | None = None) -> None:
        """Return if all ranks of each mesh are about to gather the same tensors, in one order. Otherwise, all of them raise.

        The shards of one tensor would meet those of another: in a tensor of wrong values, or in messages of other sizes.

        Args:
            problem: why this rank will not.

        Raises:
            ValueError: they are not.
            Exception: ``problem``. Other ranks raise a RuntimeError.
        """
        # By mesh: ranks of a pipeline stream other tensors than those of another stage, and share no mesh with them.
        claims: dict[DeviceMesh, list[str]] = {}
        for name, tensor in tensors:
            if isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is not None:
                line = f"{name} of {tensor.dtype} and shape {tuple(tensor.shape)} placed as {tensor.placements}"
                claims.setdefault(tensor.device_mesh, [f"dtype: {self._dtype}"]).append(line)
        with self._issuing or contextlib.nullcontext():
            # Ranks that hold the tensors in different orders compare their meshes in one order.
            for mesh in sorted(claims, key=lambda mesh: str(mesh.mesh.tolist())):
                groups = [mesh.get_group(dim) for dim in range(mesh.ndim) if mesh.size(dim) > 1]
                if groups:
                    agree(groups, device_of_messages(groups[0]), _CALL, "\n".join(claims[mesh]), problem, _ADVICE)

    def issue(self, name: str, tensor: torch.Tensor) -> _Issued:
        """Issue the collectives; those of the last step are in flight."""
        with torch.no_grad(), self._issuing or contextlib.nullcontext():
            tensor, dtype, gathers = tensor.detach(), self._dtype_of(tensor), _gathers(tensor)
            if not isinstance(tensor, DTensor):
                return _complete(tensor.to(dtype))
            mesh = tensor.device_mesh
            if gathers is None:
                placed: Any = tensor.to(dtype).to(mesh.device_type)
                return _complete(placed.redistribute(placements=[Replicate()] * mesh.ndim, async_op=True).to_local())
            # A parameter may be the result of a redistribution that is in flight.
            local = waited(local_tensor(tensor))
            if not gathers:
                return _complete(local.to(dtype).to(mesh.device_type))
            device = local.device if local.device.type == mesh.device_type else torch.device(mesh.device_type)  # Offloaded.
            memory = memory_of(gathers, local.new_empty(0, dtype=dtype, device=device))
            # All but the last step end here: each one sends what the step before has received.
            for step, whole in zip(gathers[:-1], memory):
                local = self._completed(_gather(name, local, whole, step, mesh))
            return _gather(name, local, memory[-1], gathers[-1], mesh)

    def wait(self, issued: _Issued) -> torch.Tensor:
        with self._issuing or contextlib.nullcontext():
            tensor = self._completed(issued)
        if self._issuing is not None:
            # The consumer may use the tensor on any stream, which knows nothing of the issuing one.
            self._issuing.synchronize()
        return tensor

    def _completed(self, issued: _Issued) -> torch.Tensor:
        with issued.call:
            for work in issued.pending.works:
                issued.wait(work)
        return waited(issued.pending.wait())

    def _dtype_of(self, tensor: torch.Tensor) -> torch.dtype:
        return self._dtype if self._dtype is not None and tensor.is_floating_point() else tensor.dtype


def _gathers(tensor: torch.Tensor) -> list[Gather] | None:
    """The all-gathers that make a tensor whole; None if it takes other steps, too."""
    if not isinstance(tensor, DTensor):
        if global_layout_of(tensor) is not None:
            raise ValueError(
                f"stream() gets a local tensor with a layout, of the global shape {tuple(tensor.global_shape)}: "  # type: ignore
                "only a plan knows what other ranks hold, so use transfer.plan"
            )
        return []
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(
            f"stream() gets a tensor on {mesh}, which does not have this rank {dist.get_rank()}: leave it out here"
        )
    warn_of_order(mesh, tensor.placements)
    steps = plan_of(tuple(tensor.shape), tuple(mesh.shape), tensor.placements, (Replicate(),) * mesh.ndim, tuple(coordinate))
    gathers = [step for step in steps if isinstance(step, Gather)]
    return gathers if len(gathers) == len(steps) else None


def _complete(tensor: torch.Tensor) -> _Issued:
    return _Issued(Pending(tensor, tuple(tensor.shape)))


def _gather(name: str, local: torch.Tensor, whole: torch.Tensor, step: Gather, mesh: DeviceMesh) -> _Issued:
    """Issue one all-gather into ``whole``, of shards that are cast to its dtype."""
    group = mesh_group(mesh, (step.mesh_dim,))
    call = peers_named(
        _CALL, name, functools.partial(dist.get_process_group_ranks, group), [issued_on(group).issue(_CALL, name)]
    )
    pending = all_gather(step, local.contiguous().view(-1), whole, group, is_async=True)
    # Over gloo, a rank that waits looks at times whether others have failed, or do not iterate.
    return _Issued(pending, call, wait_for if is_gloo(group, whole.device) else dist.Work.wait)
