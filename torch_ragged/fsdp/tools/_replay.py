"""Replay: one training step of a model's groups on the meta device, to predict its memory.

It must not touch the model. It runs the groups' own code (hooks, unshard, reshard, reductions) on stand-ins of the modules,
which neither compute nor communicate.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from torch_ragged.fsdp.comm._collectives import Collectives, ReduceScatterTraits, Then, Work, done
from torch_ragged.fsdp.core._dbuffer import MemoryLog
from torch_ragged.fsdp.core._fsdp_init import make_group
from torch_ragged.fsdp.core._fsdp_param import FoundParam
from torch_ragged.fsdp.core._fsdp_param_group import FSDPParamGroup
from torch_ragged.fsdp.core._fsdp_state import STATE, FSDPState
from torch_ragged.fsdp.core._hooks import hook_modules

__all__ = ["Activations", "Recomputation", "Replay", "high_water"]

_COPIED_FROM_STATE = (
    "reshard_after_forward",
    "reshard_after_backward",
    "requires_gradient_sync",
    "reduces_last_only",
    "is_last_backward",
    "unshard_in_backward",
    "reduces_unused",
)


@dataclasses.dataclass(frozen=True)
class Activations:
    """Bytes of a module's own activations, without those of sharded modules inside.

    Attributes:
        kept: bytes from its forward until its backward.
        computed_again: further bytes during its backward, if its forward runs again.
        loss: further bytes from its forward until its backward begins: of the loss, after the last module.
        output: further bytes from its forward on: the caller keeps them.
    """

    kept: int = 0
    computed_again: int = 0
    loss: int = 0
    output: int = 0


class Recomputation(NamedTuple):
    """Calls one after the other that a checkpoint runs again in backward.

    Attributes:
        is_reentrant: as ``torch.utils.checkpoint`` has it.
        trigger: the module inside whose backward is the first to need what the checkpoint has not saved. "": no module, but the
            code behind them.
        names: of the outermost modules.
    """

    is_reentrant: bool
    trigger: str
    names: list[str]


class CallFacts(NamedTuple):
    """What the order of a pass depends on, beyond the order of calls. Names are of modules.

    Attributes:
        recomputed: what checkpoints run again.
        without_gradient: modules whose inputs have no gradient.
        passes_on: modules that return the output of the last module inside as it is, so that backward reaches that one first.
    """

    recomputed: tuple[Recomputation, ...] = ()
    without_gradient: frozenset[str] = frozenset()
    passes_on: frozenset[str] = frozenset()


class Replay:
    """Stand-ins of the states of a model, by name, as modules that call each other.

    Args:
        states: by name.
        activations: by name, too.
        calls: of a recorded pass. None: no checkpoints, and only the root's inputs have no gradient.
    """

    def __init__(
        self,
        states: dict[str, FSDPState],
        activations: Mapping[str, Activations] | None = None,
        calls: CallFacts | None = None,
    ) -> None:
        self.is_recorded = calls is not None
        self.facts = calls or CallFacts()
        self._regions = {name: each for each in self.facts.recomputed for name in each.names}
        self._triggers = {each.trigger for each in self.facts.recomputed}
        self._activations = dict(activations or {})
        self._names = {state: name for name, state in states.items()}
        self._inside = {s: {child for module in s.modules for child in module.modules()} for s in states.values()}
        # A trace tells the modules of one state apart, a report does not.
        self._modules = {
            state: [_StandIn(self, f"{name}/{at}" if at and self.is_recorded else name) for at, _ in enumerate(state.modules)]
            for name, state in states.items()
        }
        self._turns = {state: itertools.cycle(modules) for state, modules in self._modules.items()}
        self._logs: list[tuple[str, MemoryLog]] = []
        # An event of 0 bytes at the beginning of each call: all logs count moments together, so this orders calls and bytes.
        self._clock = MemoryLog()
        self._clock.start()
        self.labels: list[str] = []  # The names of the moments that began, in order, such as "backward of blocks.0".
        self._collectives: list[_NoCollectives] = []
        self._kept = MemoryLog()
        if activations is not None:
            self._kept.start()
            self._logs.append(("activations", self._kept))
        self._made = made = {state: self._stand_in(state) for state in self._names}
        for state, twin in made.items():
            for knob in ("forward_prefetch", "backward_prefetch"):
                chosen = getattr(state, knob)
                setattr(twin, knob, None if chosen is None else [made[each] for each in chosen if each in made])

    def _stand_in(self, state: FSDPState) -> FSDPState:
        """A state like ``state``, with stand-ins of its modules and groups."""
        modules = self._modules[state]
        groups = [self._group(state, group) for group in state.groups]
        twin = FSDPState(modules, groups, state.mp_policy, state.reshard_after_forward)
        hook_modules(twin)
        for knob in _COPIED_FROM_STATE:
            setattr(twin, knob, getattr(state, knob))
        twin.comm.max_gathers = state.comm.max_gathers
        around = [other for other in self._names if self.is_inside(state, other)]
        innermost = max(around, key=lambda other: sum(self.is_inside(other, each) for each in around), default=None)
        for index, module in enumerate(modules):
            setattr(module, STATE, twin)
            if innermost is not None:
                self._modules[innermost][0].add_module(f"inner_{self._names[state]}_{index}".replace(".", "_"), module)
        return twin

    @property
    def states(self) -> dict[str, FSDPState]:
        """The stand-ins, by name."""
        return {name: self._made[state] for state, name in self._names.items()}

    def is_inside(self, state: FSDPState, other: FSDPState) -> bool:
        """Whether the modules of ``state`` are inside the modules of ``other``."""
        return state is not other and state.modules[0] in self._inside[other]

    def _group(self, state: FSDPState, group: FSDPParamGroup) -> FSDPParamGroup:
        """A group like ``group``, with parameters on the meta device."""
        params = []
        for index, param in enumerate(group.params):
            value = torch.empty(param.distribution.local_shape, dtype=group.orig_dtype, device="meta")
            owner = param.registered_names[0][0]
            holders = (number for number, module in enumerate(state.modules) if owner in module.modules())
            module, name = self._modules[state][next(holders, 0)], f"param_{state.groups.index(group)}_{index}"
            module.register_parameter(name, None)
            found = nn.Parameter(value, requires_grad=param.sharded.requires_grad)
            params.append(FoundParam(param.fqn, [(module, name)], found, param.distribution, group.layout.tensors[index]))
        twin = make_group(dataclasses.replace(group.plan, params=params, runs_on_meta=True))
        twin.register()
        twin.keep(None if group.keeper is None else group.keeper.twin(twin.memory.gathered))
        twin.settings.max_reductions = group.settings.max_reductions
        twin.settings.requires_all_reduce = group.settings.requires_all_reduce
        memory = twin.memory
        twin.collectives = made = _NoCollectives(group.collectives, group.device, memory.gradients)
        self._collectives.append(made)
        for kind, log in (("gathered", memory.gathered), ("gradients", memory.gradients), ("grad", memory.reduced)):
            log.start()
            self._logs.append((kind, log))
        return twin

    def region_of(self, call: _ReplayedCall) -> Recomputation | None:
        """The checkpoint around a call, if it is not around the module that calls it, too."""
        name, index = self._names[call.state], self._modules[call.state].index(call.module)
        return self._regions.get(f"{name}/{index}" if index else name)

    def begin(self, label: str) -> None:
        self._clock.note(0)
        self.labels.append(label)

    def compute(self, name: str, x: torch.Tensor, params: Sequence[nn.Parameter]) -> torch.Tensor:
        """The computation of the module ``name`` itself: its activations are held from here until its gradients are made."""
        if not torch.is_grad_enabled():  # In a reentrant checkpoint, which runs it again in backward.
            return x
        own = self._activations.get(name, Activations())
        x = x.view_as(x)
        # Autograd runs this hook after it has accumulated the gradients of the parameters: so activations and these gradients
        # are held together, as at the end of a real backward.
        x.register_hook(lambda gradient: self._kept.note(-own.kept - own.computed_again))
        x = _Compute.apply(x, name in self._triggers, *params)
        if own.loss:
            self.begin("the loss")
        self._kept.note(own.kept + own.loss + own.output)
        x.register_hook(lambda gradient: self._kept.note(own.computed_again - own.loss))
        return x

    def play(self, order: Sequence[FSDPState]) -> tuple[str, dict[str, int]]:
        """The moment of a training step at which most bytes are held, and "gathered", "gradients" and "grad" then.

        If activations were given, also "activations".

        ``order``: the calls of a forward. If a module is inside another one, its call is part of the last call of that one.
        Each step begins without gradients.
        """
        calls: list[_ReplayedCall] = []  # The outermost calls.
        around: list[_ReplayedCall] = []  # The open calls, outermost first: the next call may be inside each of them.
        for state in order:
            call = _ReplayedCall(state, next(self._turns[state]))
            while around and not self.is_inside(state, around[-1].state):
                around.pop()
            (around[-1].inner if around else calls).append(call)
            around.append(call)
        states = self._made.values()
        groups = [group for state in states for group in state.groups]
        for _, log in self._logs:
            log.start()
        self._clock.start()
        self.labels = []
        for param in [param for group in groups for param in group.params]:
            param.sharded.grad = None
        unsynced = any(not state.requires_gradient_sync for state in states)
        waiting = any(state.reduces_last_only and not state.is_last_backward for state in states)
        # Backward leaves gradients for a later one, on this rank or, with HSDP, in each replica.
        if unsynced or waiting or any(group.reduction.keeps_shards for group in groups):
            self._pass(calls)
            self._pass(calls)  # It holds the gradients of the first one. Further ones hold no more.
            for state in states:
                state.requires_gradient_sync = state.is_last_backward = True
            for group in groups:
                group.settings.requires_all_reduce = True
        for _ in range(max((len(each.passes) for each in self._collectives), default=1) or 1):
            self._pass(calls)
        kinds = ("gathered", "gradients", "grad", *(kind for kind, _ in self._logs))
        moment, held = high_water(self._logs, dict.fromkeys(kinds, 0))
        begun = [label for (when, _), label in zip(self._clock.events, self.labels) if when <= moment]
        return (begun[-1] if begun else "before forward"), held

    def _pass(self, calls: Sequence[_ReplayedCall]) -> None:
        with torch.inference_mode(False), torch.enable_grad():
            x = torch.empty(1, device="meta", requires_grad=self.is_recorded)
            for call in calls:
                x = call.run(x)
            if x.requires_grad:
                x.sum().backward()


@dataclasses.dataclass
class _ReplayedCall:
    """One call in forward, with the calls inside it."""

    state: FSDPState
    module: _StandIn
    inner: list[_ReplayedCall] = dataclasses.field(default_factory=list)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        self.module.replay.begin(f"forward of {self.module.name}")
        if self.module.name in self.module.replay.facts.without_gradient:
            x = x.detach()
        output: torch.Tensor = self.module(x, self.inner)
        if self.module.replay.is_recorded:  # Also the output of the module around it: hooks of both are on this tensor.
            return output
        return self.module.before_backward(f"backward of {self.module.name}", output)


def _run_calls(calls: Sequence[_ReplayedCall], region: Recomputation | None, x: torch.Tensor) -> torch.Tensor:
    for call in calls:
        x = call.run(x)
    return x if region is None or region.trigger else _Compute.apply(x, True)  # type: ignore[no-any-return]


class _StandIn(nn.Module):
    """A module that computes nothing: it runs the calls inside it, then uses its own parameters.

    So the gradients of its own parameters come first in backward. Their buffer stays allocated while backward runs through the
    modules inside.
    """

    def __init__(self, replay: Replay, name: str) -> None:
        super().__init__()
        self.replay, self.name = replay, name

    def forward(self, x: torch.Tensor, calls: Sequence[_ReplayedCall]) -> torch.Tensor:
        end = f"backward of {self.name}" if x.requires_grad else "end of backward"
        if not x.requires_grad:  # The first module gets tokens. Its stand-in needs a gradient, so that backward reaches it.
            x = x.detach().requires_grad_()
        x = self.before_backward(end, x)
        params = [param for param in self._parameters.values() if param is not None]
        passes_on = self.name in self.replay.facts.passes_on
        if passes_on:
            x = self.replay.compute(self.name, x, params)
        for region, together in itertools.groupby(calls, lambda call: self.replay.region_of(call)):
            inside = list(together)
            run = functools.partial(_run_calls, inside, region)
            x = run(x) if region is None else checkpoint(run, x, use_reentrant=region.is_reentrant)
        return x if passes_on else self.replay.compute(self.name, x, params)

    def before_backward(self, label: str, x: torch.Tensor) -> torch.Tensor:
        """``x``: when backward reaches it, the moment named ``label`` begins."""
        x = x.view_as(x)
        if x.requires_grad:
            x.register_hook(lambda gradient: self.replay.begin(label))
        return x


class _Compute(torch.autograd.Function):
    """Returns its input. In backward, it makes a gradient for each trainable parameter, as a real module does.

    If it ``saves``, a checkpoint around it runs its calls again when this backward begins.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, saves: bool, *params: nn.Parameter) -> torch.Tensor:
        ctx.params = params
        ctx.save_for_backward(*([x] if saves else []))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        gradients: list[torch.Tensor | None] = []
        ctx.saved_tensors  # noqa: B018  # Reading them is what runs a checkpoint.
        for param in ctx.params:
            target = getattr(param, "gradient_target", None)
            if target is not None and target.begin() is not None:  # A matmul writes to the gradient buffer itself.
                target.done()
                gradients.append(None)
            else:
                gradients.append(torch.empty_like(param) if param.requires_grad else None)
        return gradient, None, *gradients


class _NoCollectives(Collectives):
    """Collectives that send nothing. They log what those of ``inner`` would allocate on ``device``."""

    def __init__(self, inner: Collectives, device: torch.device, log: MemoryLog) -> None:
        self._traits, self._log = inner.reduce_scatter_traits(device), log
        self.passes = inner.memory_of_passes()
        self._number = -1

    def issue(self, name: str, largest: torch.Tensor, *arguments: Any) -> Work:
        self._number += name == "reduce_scatter"
        now: tuple[int, ...] = ()
        later: tuple[int, ...] = ()
        if self.passes:
            now, later = self.passes[self._number % len(self.passes)].get(name, (now, later))
        elif name == "reduce_scatter" and self._traits.holds_second_buffer:
            now, later = (largest.nbytes,), (-largest.nbytes,)
        self._note(now)
        return Then(done, functools.partial(self._note, later)) if later else done

    def _note(self, nbytes: Iterable[int]) -> None:
        for each in nbytes:
            self._log.note(each)

    def reduce_scatter_traits(self, device: torch.device) -> ReduceScatterTraits:
        return self._traits


def high_water(logs: Iterable[tuple[str, MemoryLog]], start: Mapping[str, int]) -> tuple[int, dict[str, int]]:
    """The moment with the largest sum over all logs, and the bytes of each kind then. Moment -1: as at the ``start``."""
    events = sorted((moment, nbytes, kind) for kind, log in logs for moment, nbytes in log.events)
    now = dict(start)
    total = most = sum(now.values())
    best = (-1, dict(now))
    for moment, nbytes, kind in events:
        now[kind] += nbytes
        total += nbytes
        if total > most:
            most, best = total, (moment, dict(now))
    return best
