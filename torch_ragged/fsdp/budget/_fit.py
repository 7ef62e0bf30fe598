"""fit: one budget of memory for activations, optimizer states and unsharded parameters. It must not change a bit of a step."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import mmap
import numbers
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from torch_ragged._ranks.agreement import agreement, gather_numbers, text_of
from torch_ragged._ranks.groups import device_of_messages
from torch_ragged._register._torch import dynamo_disabled
from torch_ragged.fsdp._groups import module_states
from torch_ragged.fsdp.budget._activations import STAGING, ActivationOffload
from torch_ragged.fsdp.budget._choice import Choice, Needs, NothingFits, Offloading, cheapest, extremes
from torch_ragged.fsdp.budget._dry_run import Curve, DryRun, RecordedCall, unchanged
from torch_ragged.fsdp.budget._unit_forward import ActivationMode, KnownInputs, UnitForward
from torch_ragged.fsdp.core._dbuffer import is_out_of_memory
from torch_ragged.fsdp.core._fsdp_param import local_of
from torch_ragged.fsdp.core._fsdp_param_group import FSDPParamGroup
from torch_ragged.fsdp.core._fsdp_state import FSDPState, state_of
from torch_ragged.fsdp.core._kit import check_pairs
from torch_ragged.fsdp.files._scratch_file import ScratchFile
from torch_ragged.fsdp.offload._offloaded_optimizer import CUTS_STATES, all_process_groups_of, can_offload
from torch_ragged.fsdp.offload._policy import Offload
from torch_ragged.fsdp.offload._tiers import FILE_NUMEL, WINDOW_NUMEL, WINDOWS
from torch_ragged.fsdp.tools._memory_report import OptimizerLike, memory_report

__all__ = ["MemoryFit", "FitUnit", "fit"]

_FITTED = "_ragged_fit"
"""The attribute under which a model and its units keep what :func:`fit` has changed."""

_TRIED_BYTES = 1 << 24
"""So many bytes are copied to measure a tier."""

_ALL_BYTES = 1 << 60

_CAN_MOVE = "give fit a class that offloaded() takes, such as torch.optim.AdamW, and make the optimizer with offloaded()"


@dataclass(frozen=True)
class FitUnit:
    """What :func:`fit` has chosen for a module that ``fully_shard`` was called on.

    Attributes:
        name: its name under the model.
        activations: "kept" from forward to backward, "recomputed" in backward, or "offloaded" from forward to backward.
        reshards: whether it is resharded after forward.
        kept_bytes: what autograd keeps of it if it keeps its activations.
        seconds: of its forward, in the dry run.
        why: why it is never recomputed (``kept_bytes`` is 0 then); "": it may be.
    """

    name: str
    activations: str
    reshards: bool
    kept_bytes: int
    seconds: float
    why: str = ""


@dataclass(frozen=True)
class MemoryFit:
    """What :func:`fit` has chosen, and what it predicts. ``str()`` makes a table of it. Bytes are those of the fullest rank.

    Attributes:
        units: in the order of forward.
        offload: the policy that the groups have got, of the states elsewhere; None: all states are on the device.
        activation_bytes: of offloaded activations elsewhere.
        peak_bytes: predicted, with the reserve.
        moment: when, such as "backward of blocks.0".
        least_bytes: the smallest ``device_bytes`` that any choice needs.
        most_bytes: the ``device_bytes`` from which on nothing is recomputed or offloaded.
        seconds: how much longer a step takes than with ``most_bytes``, by the forward times of units and the tier's bandwidth.
        notes: on optimizer states that cannot be predicted, and on policies that the model had before.
    """

    units: tuple[FitUnit, ...]
    offload: Offload | None
    activation_bytes: int
    device_bytes: int
    peak_bytes: int
    moment: str
    least_bytes: int
    most_bytes: int
    seconds: float
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines: list[tuple[str, ...]] = [("modules", "activations", "after forward", "kept bytes", "forward ms", "")]
        # Modules in a row with the same choice are one line, of the mean numbers.
        for key, run in itertools.groupby(self.units, lambda unit: (unit.activations, unit.reshards, unit.why)):
            units = list(run)
            name = units[0].name if len(units) == 1 else f"{units[0].name} to {units[-1].name} ({len(units)})"
            kept = sum(unit.kept_bytes for unit in units) // len(units)
            took = 1e3 * sum(unit.seconds for unit in units) / len(units)
            does = key[0], "reshard" if key[1] else "unsharded"
            lines.append((name, *does, f"{kept:,}", f"{took:.2f}", key[2]))
        widths = [max(map(len, column)) for column in zip(*lines)]
        text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines]
        where = "all on the device" if self.offload is None else repr(self.offload)
        text.append(f"optimizer states: {where}")
        if self.activation_bytes:
            text.append(f"offloaded activations: {self.activation_bytes:,} bytes")
        text.append(f"predicted peak: {self.peak_bytes:,} of {self.device_bytes:,} bytes ({self.moment})")
        text.append(f"least: {self.least_bytes:,} bytes; nothing recomputed or offloaded: {self.most_bytes:,} bytes")
        text.append(f"predicted cost: {1e3 * self.seconds:.2f} ms a step")
        return "\n".join([*text, *self.notes])


def fit(
    model: nn.Module,
    step: Callable[[], Any],
    optimizer: OptimizerLike | None = None,
    *,
    device_bytes: int,
    host_bytes: int | None = None,
    file_bytes: int | None = None,
    to: str | None = None,
    reserve_bytes: int = 0,
) -> MemoryFit:
    """Make training steps of ``model`` fit into ``device_bytes`` per rank, at the least cost of time. Bits do not change. ::

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        print(fit(model, lambda: loss_of(model(batch)).backward(), torch.optim.AdamW, device_bytes=60 * 2**30))
        optimizer = offloaded(torch.optim.AdamW, model, lr=3e-4)

    ``step`` runs five times, and each unit is recomputed in it: so the dry run itself needs the least memory. With
    ``host_bytes`` or ``file_bytes``, a sixth step tries which activations can leave. A *unit* is a module that ``fully_shard``
    was called on, without others inside; the root and optional modules are none. From the allocator's events ``fit`` knows
    what a step holds at each moment, also if other units are recomputed, and it chooses:

    - which units **recompute** their forward in backward, in place of keeping activations;
    - which units **offload** their activations: to host memory, or on a mesh of CPUs to files in ``to``. They leave while the
      next unit runs in forward, and come back while it runs in backward;
    - which part of the optimizer **states** lies elsewhere, in the same tier. All groups without an ``Offload`` of their own
      get this policy, which :func:`offloaded` follows;
    - which units stay **unsharded** from forward to backward in what is left.

    A unit is never recomputed if that would change bits: if its forward writes buffers, or computes other values when it runs
    again, as with random numbers of a generator of its own. The table says so.

    The numbers hold for inputs like those of ``step``: give it the largest batch, or several. If the model or a unit gets
    inputs in training that are larger in some dimension, its forward raises a ValueError before it computes.
    ``reserve_bytes`` is for what is not counted: what the optimizer allocates within its step, other models, memory of the
    communication library, fragmentation. Another call drops this choice first.

    Args:
        step: a forward and backward, or several, and no step of an optimizer. Gradients are dropped after it; generators of
            torch, Python and NumPy, and buffers are then as before. ``SameBits`` counts its steps: set its ``step`` to 0 again.
        optimizer: whose states count: a class, or a function that makes an optimizer of a list of parameters; then states may
            lie elsewhere. Or an optimizer, whose states stay. None: no states count.
        device_bytes: all of a rank: shards, gradients, states, unsharded parameters, activations and ``reserve_bytes``.
        host_bytes: the most bytes of states and activations in host memory; None: any number of states, and no activations; 0:
            the optimizer is made without ``offloaded``. Not on a mesh of CPUs: there is one budget, ``device_bytes``.
        to: on a mesh of CPUs, an existing folder for states and activations in files. Each rank may have its own.
        file_bytes: the most bytes of both in files; None: any number of states, and no activations.
        reserve_bytes: what others need of ``device_bytes``.

    Returns:
        what was chosen, for printing.

    Raises:
        ValueError: no choice fits: the error has the smallest ``device_bytes`` that does. Or an argument is wrong, or ranks
            differ. All ranks raise, and the model is as before. Or this rank has no memory for the dry run: others raise a
            PeerError.
        RuntimeError: parameters are on the meta device, or have gradients; or a profiler of torch runs already.
        OSError: ``to`` is missing or read-only, or has no space. Other ranks raise a RuntimeError that names this one.

    Source: the knapsack view of activation memory is that of ``torch._functorch.partitioners`` (memory budget), for units.
    Collectives: those of five or six steps; per process group two or three all-reduces of 24 bytes, and two all-gathers of
    what was recorded.
    """
    states = module_states(model)
    own = [group for state in states.values() for group in state.groups]
    # Ranks of model parallelism decide alike, too: a recomputation makes the collectives of a forward again.
    groups, device = all_process_groups_of(own)
    with agreement(groups, device, "fit") as claim:
        budgets = {"device_bytes": device_bytes, "host_bytes": host_bytes, "file_bytes": file_bytes}
        budgets["reserve_bytes"] = reserve_bytes
        _check_budgets(budgets, to, device, step, optimizer)
        _check_can_fit(own, model)
        # Here, where an error on one rank is one on all: a function of the program may raise.
        kind = _class_of(optimizer, model)
        claim.append(f"fit({text_of(list(budgets.items()))}, {'no folder' if to is None else 'a folder'})")
    for fitted in _all_fitted(model):
        fitted.remove()
    fitted = _Fitted(model, states)
    dry_run = DryRun(fitted.units, fitted.groups, device)
    elsewhere = file_bytes if device.type == "cpu" else host_bytes
    try:
        try:
            with unchanged(model, device) as before:
                largest = functools.partial(_largest, groups=groups)
                run = functools.partial(_run_step, model, step)
                curve, seconds = dry_run.run(run, before, largest)
                if elsewhere:
                    # Files or page-locked memory may be missing on one rank: known before the step, in which others would wait.
                    room = device_bytes - reserve_bytes - _allocated(model, own, device)
                    with agreement(groups, device, "fit, before it offloads activations,") as claim:
                        offload = ActivationOffload(device, to, own)
                        tried = fitted.prepare_offload(curve, offload, int(elsewhere), room)
                        claim.append("one more step")
                    fitted.moved = dry_run.try_offload(run, tried)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            peak = memory_report(model, optimizer).peak
            raise ValueError(
                f"fit finds no choice: rank {dist.get_rank()} has no memory for a step with all units recomputed, before any "
                f"optimizer state. Without activations, such a step needs {peak.total - peak.optimizer:,} bytes. Use more "
                "ranks, smaller batches or smaller units"
            ) from error
        with agreement(groups, device, "fit, after the dry run,") as claim:
            fitted.end_dry_run(dry_run.blocked, curve.always)
            needs, bound, notes = _needs(model, fitted, curve, seconds, optimizer, kind, budgets, to, device)
            order = repr((curve.labels, [call._replace(kept=0, working=0) for call in curve.calls], sorted(curve.always)))
            claim.append(f"calls: {hashlib.sha256(order.encode()).hexdigest()[:12]}")
        needs = _of_all_ranks(needs, groups)
        try:
            choice = cheapest(needs, device_bytes)
        except NothingFits as error:
            advice = "" if needs.states else " Optimizer states may lie elsewhere if you give their class, and a tier."
            never = "".join(f" {name} is not: {why}." for name, why in itertools.islice(fitted.blocked.items(), 4))
            raise ValueError(
                f"no choice of fit needs as little as device_bytes={device_bytes:,}: the least is {error.least:,} bytes, with "
                f"all units recomputed.{never} Give as much, or use more ranks, smaller batches or smaller units.{advice}"
            ) from None
    except BaseException:
        fitted.remove()
        # The step may have ended within a forward: what is unsharded would stay in memory, and an optimizer would get it.
        for state in states.values():
            state.reset()
        raise
    policy = None if bound is None else Offload(choice.fraction, to=bound)
    fitted.set(choice, policy)
    return _report(needs, fitted, choice, policy, device_bytes, notes)


def _check_budgets(budgets: Mapping[str, Any], to: Any, device: torch.device, step: Any, optimizer: Any) -> None:
    for name, given in budgets.items():
        is_number = isinstance(given, numbers.Real) and not isinstance(given, bool) and 0 <= float(given) <= _ALL_BYTES
        if not is_number and (given is not None or name in ("device_bytes", "reserve_bytes")):
            raise ValueError(f"fit({name}=) takes a number of bytes, such as 60 * 2**30, got {given!r}")
    if not callable(step):
        raise ValueError(f"fit takes a function that runs a forward and backward as its second argument, got {step!r}")
    if not (optimizer is None or callable(optimizer) or isinstance(optimizer, Optimizer)):
        raise ValueError(f"fit takes an optimizer, its class, or a function that makes one of parameters, got {optimizer!r}")
    if device.type == "cpu" and budgets["host_bytes"] is not None:
        raise ValueError("fit(host_bytes=) is for meshes of accelerators: on the CPU all memory is device_bytes")
    if device.type != "cpu" and (to is not None or budgets["file_bytes"] is not None):
        raise ValueError(
            "fit(to=, file_bytes=) is for meshes of CPUs: the states of parameters on a device may lie in host memory"
        )
    if budgets["file_bytes"] is not None and to is None:
        raise ValueError("fit(file_bytes=) needs the folder of the files: give to=folder")


def _check_can_fit(groups: Sequence[FSDPParamGroup], model: nn.Module) -> None:
    for group in groups:
        group.check_awake()
        if group.is_meta:
            raise RuntimeError(f"{group.names} on the meta device: materialize all parameters before fit()")
    if any(param.grad is not None for param in model.parameters()):
        raise RuntimeError("fit drops gradients, and parameters have some: call it before training, or after zero_grad()")
    if torch.autograd._profiler_enabled():
        raise RuntimeError("fit records its steps with torch.profiler, and one runs already: call it outside of the profiler")


def _run_step(model: nn.Module, step: Callable[[], Any]) -> None:
    versions = [param._version for param in model.parameters()]
    step()
    if versions != [param._version for param in model.parameters()]:
        raise ValueError("fit got a step that changes parameters, which stay changed: leave the optimizer's step out of it")
    if all(param.grad is None for param in model.parameters()):
        raise ValueError("fit got a step after which no parameter has a gradient: run a forward and its backward")
    for param in model.parameters():
        param.grad = None


class _Fitted:
    """What fit has put into a model. It begins with each unit recomputed.

    Attributes:
        units: the forwards of each unit.
        groups: of each unit.
        moved: bytes of activations that units can offload.
        blocked: the units that must not be recomputed, and why.
        always: the units that every choice recomputes.
    """

    def __init__(self, model: nn.Module, states: Mapping[str, FSDPState]) -> None:
        self._states = {name: state for name, state in states.items() if _is_unit(state, model)}
        self.groups = {name: state.groups for name, state in self._states.items()}
        self._reshards: dict[FSDPState, Any] = {}
        self._groups = [group for state in states.values() for group in state.groups]
        self._with_policy: list[FSDPParamGroup] = []
        self.moved: Mapping[str, int] = {}
        self._offload: ActivationOffload | None = None
        self._sizes: dict[str, list[int]] = {}  # Of what each forward of a unit offloads.
        self.blocked: Mapping[str, str] = {}
        self.always: frozenset[str] = frozenset()
        self.units = {
            name: [UnitForward(module, KnownInputs(name), ActivationMode.RECOMPUTED) for module in state.modules]
            for name, state in self._states.items()
        }
        # Before FSDP's hooks: if it raises, nothing was unsharded.
        self._inputs = KnownInputs("the model")
        self._hook = model.register_forward_pre_hook(self._look_at_inputs, prepend=True, with_kwargs=True)
        self._modules = [model, *(each.module for each in self._all_units())]
        for module in self._modules:
            module.__dict__[_FITTED] = self

    def _all_units(self) -> Iterator[UnitForward]:
        return itertools.chain.from_iterable(self.units.values())

    @dynamo_disabled
    def _look_at_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            self._inputs.look(args, kwargs)

    def prepare_offload(self, curve: Curve, offload: ActivationOffload, elsewhere: int, room: float) -> list[str]:
        """Give it to all units. Returns those that may be tried at once, the first ones of forward.

        Args:
            elsewhere: bytes for their activations.
            room: bytes of a step, in which activations that leave or come back are beside what is recomputed.
        """
        calls: dict[str, list[RecordedCall]] = {}
        for call in sorted(curve.calls, key=lambda call: call.begin):
            if call.kept and call.unit not in curve.repeated:
                calls.setdefault(call.unit, []).append(call)
        peaks = list(curve.peaks)
        for name, own in calls.items():
            more = Counter[int]()
            for call in own:
                more.update(curve.offloaded_of(call, 0))
            nbytes = sum(call.kept for call in own)
            if nbytes <= elsewhere and all(peaks[at] + added <= room for at, added in more.items()):
                peaks = [peak + more[at] for at, peak in enumerate(peaks)]
                self._sizes[name] = [call.kept for call in own]
                elsewhere -= nbytes
        offload.tier.reserve(itertools.chain(*self._sizes.values()))
        self._offload = offload
        for each in self._all_units():
            each.offload = offload
        return list(self._sizes)

    def end_dry_run(self, blocked: Mapping[str, str], always: frozenset[str]) -> None:
        self.blocked, self.always = blocked, always
        for inputs in (self._inputs, *(each.inputs for each in self._all_units())):
            inputs.is_open = False

    def keepable(self) -> dict[str, int]:
        """Bytes of the units that may stay unsharded."""
        return {
            name: sum(group.layout.numel * group.param_dtype.itemsize for group in state.groups)
            for name, state in self._states.items()
            if state.reshard_after_forward is True
            # Persistent buffers have slots for a fixed number of modules.
            and not any(group.keeper is not None or group.pools[0].is_required for group in state.groups)
        }

    def set(self, choice: Choice, policy: Offload | None) -> None:
        for name, units in self.units.items():
            for each in units:
                each.activations = self.activations_of(name, choice)
                each.offload = self._offload if choice.offloaded else None
            if name in choice.unsharded:
                state = self._states[name]
                self._reshards[state] = state.reshard_after_forward
                state.reshard_after_forward = False
        if policy is not None:
            self._with_policy = [group for group in self._groups if group.plan.part(Offload) is None]
            for group in self._with_policy:
                group.plan = dataclasses.replace(group.plan, parts=(*group.plan.parts, policy))

        if self._offload is not None:
            self._offload.tier.keep(nbytes for name in choice.offloaded for nbytes in self._sizes.get(name, ()))
            self._offload = None  # The units hold it, if one needs it.

    def activations_of(self, name: str, choice: Choice) -> ActivationMode:
        if name in choice.recomputed or name in self.always:
            return ActivationMode.RECOMPUTED
        return ActivationMode.OFFLOADED if name in choice.offloaded else ActivationMode.KEPT

    def remove(self) -> None:
        self._hook.remove()
        for each in self._all_units():
            each.remove()
        for module in self._modules:
            if module.__dict__.get(_FITTED) is self:
                del module.__dict__[_FITTED]
        for state, before in self._reshards.items():
            state.reshard_after_forward = before
        for group in self._with_policy:
            group.plan = dataclasses.replace(
                group.plan, parts=tuple(part for part in group.plan.parts if not isinstance(part, Offload))
            )

    def reshards(self, name: str) -> bool:
        return self._states[name].reshard_after_forward is not False


def _all_fitted(model: nn.Module) -> list[_Fitted]:
    """What earlier calls have put into the model, or into its units under another root."""
    found = (module.__dict__.get(_FITTED) for module in model.modules())
    return list(dict.fromkeys(each for each in found if each is not None))


def _is_unit(state: FSDPState, model: nn.Module) -> bool:
    """Whether the modules may be recomputed as a whole: modules inside with hooks of their own would all-gather again."""
    inside = [child for module in state.modules for child in module.modules() if child not in state.modules]
    return not (model in state.modules or state.is_optional or any(state_of(child) for child in inside))


def _needs(
    model: nn.Module,
    fitted: _Fitted,
    curve: Curve,
    seconds: Mapping[str, float],
    optimizer: OptimizerLike | None,
    kind: type[Optimizer] | None,
    budgets: Mapping[str, Any],
    to: str | None,
    device: torch.device,
) -> tuple[Needs, str | None, list[str]]:
    """What a step needs on this rank; where states may lie, as ``Offload(to=)`` takes it; and notes."""
    report = memory_report(model, optimizer)
    notes = [f"{each}" for each in report.notes if "cannot be predicted" in each]
    groups = [group for state in module_states(model).values() for group in state.groups]
    numels = {  # Of the parameters that have states.
        group: sum(local_of(param.sharded).numel() for param in group.params if param.sharded.requires_grad) for group in groups
    }
    given = {group: group.plan.part(Offload) for group in groups}
    for text in dict.fromkeys(repr(policy) for policy in given.values() if policy is not None):
        notes.append(f"groups with a policy of their own keep it: {text}")
    total = max(1, sum(numels.values()))
    states = report.peak.optimizer
    free = sum(numels[group] for group, policy in given.items() if policy is None) / total
    stays = sum((1 - policy.optimizer) * numels[group] for group, policy in given.items() if policy is not None) / total
    tier, limit = None, budgets["file_bytes" if device.type == "cpu" else "host_bytes"]
    if optimizer is not None and free and (to is not None if device.type == "cpu" else limit != 0):
        if kind is not None and can_offload(kind):
            tier = "cpu" if to is None else to
            for group in groups:
                if given[group] is None and group.is_trainable:
                    check_pairs([CUTS_STATES, *group.plan.parts])
        else:
            notes.append(f"states stay on the device: {_CAN_MOVE}")
    movable = round(free * states)
    fixed = _allocated(model, groups, device) + int(budgets["reserve_bytes"]) + round(stays * states)
    sent = [group.layout.numel * group.param_dtype.itemsize for group in groups if group.layout.ranks > 1]
    fixed += max(sent, default=0) if device.type == "cpu" else 0  # gloo copies what a collective sends.
    rate = _seconds_per_byte(to, device) if tier is not None or fitted.moved else 0.0
    window, most_windows = 0, 0
    if tier is None:
        fixed, movable = fixed + movable, 0
    else:
        # A window has a chunk of one group.
        count, chunk = (WINDOWS, FILE_NUMEL) if device.type == "cpu" else (2, WINDOW_NUMEL)
        largest = max(numel for group, numel in numels.items() if given[group] is None)
        window, most_windows = (round(count * each * movable / (free * total)) for each in (largest, chunk))
    chosen = {name: took for name, took in seconds.items() if name not in fitted.blocked and name not in fitted.always}
    elsewhere = movable if limit is None else int(limit)
    # In the same order on all ranks, be they tried or not.
    offloads = _offloads(curve, seconds, {name: fitted.moved.get(name, 0) for name in chosen}, rate) if limit else {}
    staging = 2 * STAGING if device.type == "cpu" and limit else 0
    counts = fixed, movable, elsewhere, rate, window, most_windows
    return Needs(curve, chosen, fitted.keepable(), *counts, offloads, staging), tier, notes


def _kept_of(calls: Iterable[RecordedCall]) -> Counter[str]:
    """Bytes of activations of each unit."""
    kept = Counter[str]()
    for call in calls:
        kept[call.unit] += call.kept
    return kept


def _offloads(curve: Curve, seconds: Mapping[str, float], moved: Mapping[str, int], rate: float) -> dict[str, Offloading]:
    """What it takes to offload each unit: bytes that move while the next unit computes cost no time."""
    order = sorted(curve.calls, key=lambda call: call.begin)
    following = {call.unit: other.unit for call, other in reversed(list(itertools.pairwise(order)))}  # Of the first call.
    kept, found = _kept_of(curve.calls), {}
    for name, nbytes in moved.items():
        # Backward of the next unit takes as long as its forward, at least.
        exposed = max(0.0, nbytes * rate / 2 - seconds.get(following.get(name, ""), 0.0))
        found[name] = Offloading(2 * exposed, nbytes, max(0, kept[name] - nbytes))
    return found


def _class_of(optimizer: Any, model: nn.Module) -> type[Optimizer] | None:
    """The class of the optimizer that the program is going to make; None: it has made it, or there are several."""
    if isinstance(optimizer, type) or isinstance(optimizer, Optimizer) or not callable(optimizer):
        return optimizer if isinstance(optimizer, type) else None
    return type(optimizer([param for param in model.parameters() if param.requires_grad]))


def _allocated(model: nn.Module, groups: Sequence[FSDPParamGroup], device: torch.device) -> int:
    """Bytes of the model's parameters and buffers, and of its groups' persistent buffers, on the device now."""
    storages = {}
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        local = local_of(tensor)
        if local.device.type == device.type:
            storages[local.untyped_storage()._cdata] = local.untyped_storage().nbytes()
    nbytes = sum(storages.values()) - sum(group.shards.file_nbytes for group in groups)
    kinds = (buffers for group in groups for kind, buffers in group.buffers().items() if kind != "sharded")
    return nbytes + sum(buffer.resident_nbytes for buffers in kinds for buffer in buffers)


def _seconds_per_byte(to: str | None, device: torch.device) -> float:
    """Of a byte of states that is read and written once."""
    if to is None:
        host = torch.empty(_TRIED_BYTES, dtype=torch.uint8, pin_memory=True, device="cpu")
        other = torch.empty_like(host, device=device)
        other.copy_(host)
        torch.accelerator.synchronize(device)
        begin = time.perf_counter()
        other.copy_(host)
        host.copy_(other)
        torch.accelerator.synchronize(device)
    else:
        memory = memoryview(mmap.mmap(-1, _TRIED_BYTES))
        file = ScratchFile(to, dist.get_rank(), _TRIED_BYTES)
        begin = time.perf_counter()
        file.write(memory, 0)
        file.read(memory, 0)
    return (time.perf_counter() - begin) / _TRIED_BYTES


def _of_all_ranks(needs: Needs, groups: Iterable[dist.ProcessGroup]) -> Needs:
    """The largest numbers of all ranks. Equal numbers lead to equal choices."""
    curve, nano, scale = needs.curve, 1e9, 1e18  # Integers carry seconds.
    parts = [
        curve.peaks,
        curve.starts,
        [call.kept for call in curve.calls],
        [call.working for call in curve.calls],
        [int(nano * took) for took in needs.seconds.values()],
        list(needs.unsharded.values()),
        # Of the room elsewhere, the least.
        [needs.fixed, needs.states, -needs.elsewhere, int(scale * needs.seconds_per_byte), needs.window, needs.most_windows],
        *([int(nano * each.seconds), each.nbytes, each.left] for each in needs.offloads.values()),
    ]
    left = iter(_largest(itertools.chain.from_iterable(parts), groups))
    peaks, starts, kept, working, seconds, unsharded, others, *costs = (
        list(itertools.islice(left, len(part))) for part in parts
    )
    calls = [call._replace(kept=one, working=other) for call, one, other in zip(curve.calls, kept, working)]
    fixed, states, elsewhere, rate, window, most_windows = others
    kept_of = _kept_of(calls)
    # What a rank has not tried stays there.
    offloads = {name: Offloading(took / nano, *nbytes) for name, (took, *nbytes) in zip(needs.offloads, costs)}
    return Needs(
        Curve(peaks, starts, curve.labels, calls),
        {name: took / nano for name, took in zip(needs.seconds, seconds)},
        dict(zip(needs.unsharded, unsharded)),
        fixed,
        states,
        -elsewhere,
        rate / scale,
        window,
        most_windows,
        {name: each for name, each in offloads.items() if each.left < kept_of[name]},
        needs.staging,
    )


def _largest(given: Iterable[int], groups: Iterable[dist.ProcessGroup]) -> list[int]:
    """Each number, of the rank that has the largest one."""
    most = [int(number) for number in given]
    for group in groups:
        sent = torch.tensor(most, dtype=torch.int64, device=device_of_messages(group))
        most = [max(column) for column in zip(*gather_numbers(sent, group, "fit"))]
    return most


def _report(
    needs: Needs, fitted: _Fitted, choice: Choice, policy: Offload | None, device_bytes: int, notes: Sequence[str]
) -> MemoryFit:
    kept, units = _kept_of(needs.curve.calls), []
    for name in fitted.units:
        found = kept[name], needs.seconds.get(name, 0.0)
        why = fitted.blocked.get(name, "")
        units.append(FitUnit(name, fitted.activations_of(name, choice).value, fitted.reshards(name), *found, why))
    moved = sum(needs.offloads[name].nbytes for name in choice.offloaded)
    peak = choice.peak, choice.moment, *extremes(needs)
    return MemoryFit(tuple(units), policy, moved, device_bytes, *peak, choice.seconds, tuple(notes))
