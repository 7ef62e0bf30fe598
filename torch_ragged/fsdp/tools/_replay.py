"""Replay: one training step of a model's groups on the meta device, to predict its memory.

It must not touch the model. It runs the groups' own code (hooks, unshard, reshard, reductions) on stand-ins of the modules,
which neither compute nor communicate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torch_ragged.fsdp.comm._collectives import ReduceScatterTraits, Work, done
from torch_ragged.fsdp.comm._reduction import Reduction
from torch_ragged.fsdp.core._dbuffer import MemoryLog
from torch_ragged.fsdp.core._fsdp_init import make_group
from torch_ragged.fsdp.core._fsdp_param import FoundParam
from torch_ragged.fsdp.core._fsdp_param_group import FSDPParamGroup
from torch_ragged.fsdp.core._fsdp_state import STATE, FSDPState
from torch_ragged.fsdp.core._hooks import hook_modules

__all__ = ["highest_moment", "high_water"]

_COPIED_FROM_STATE = (
    "reshard_after_forward",
    "reshard_after_backward",
    "requires_gradient_sync",
    "reduces_last_only",
    "is_last_backward",
    "unshard_in_backward",
    "reduces_unused",
)


def highest_moment(states: dict[str, FSDPState], order: Sequence[FSDPState]) -> tuple[str, dict[str, int]]:
    """Replay a training step of ``states``, and find the moment at which their buffers hold most bytes.

    The step is one forward and one backward. If backward leaves gradients unreduced now, the step accumulates: it has several
    such passes, and a last one that reduces.

    Args:
        states: the states of a model by name.
        order: the calls of a forward. If a module is inside another one, its call is part of the last call of that module.

    Returns:
        The name of the moment, such as "backward of blocks.0", and the bytes of "gathered", "gradients" and "grad" then.
    """
    return _Replay(states).play(order)


class _Replay:
    """Stand-ins of ``states``, as modules that call each other.

    Attributes:
        labels: the names of the moments that began, in order, such as "backward of blocks.0".
    """

    def __init__(self, states: dict[str, FSDPState]) -> None:
        self._names = {state: name for name, state in states.items()}
        self._inside = {s: {child for module in s.modules for child in module.modules()} for s in states.values()}
        self._modules: dict[FSDPState, list[_StandIn]] = {}
        self._calls: dict[FSDPState, int] = {}
        self._logs: list[tuple[str, MemoryLog]] = []
        # An event of 0 bytes at the beginning of each call: all logs count moments together, so this orders calls and bytes.
        self._clock = MemoryLog()
        self._clock.start()
        self.labels: list[str] = []
        for state, name in self._names.items():
            self._modules[state] = [_StandIn(self, name) for _ in state.modules]
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
        around = self._innermost_around(state)
        for index, module in enumerate(modules):
            setattr(module, STATE, twin)
            if around is not None:
                self._modules[around][0].add_module(f"inner_{self._names[state]}_{index}".replace(".", "_"), module)
        return twin

    def _innermost_around(self, state: FSDPState) -> FSDPState | None:
        around = [other for other in self._names if self.is_inside(state, other)]
        return max(around, key=lambda other: sum(self.is_inside(other, each) for each in around), default=None)

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
            module = self._modules[state][next(holders, 0)]
            registered: list[tuple[nn.Module, str]] = [(module, f"param_{state.groups.index(group)}_{index}")]
            module.register_parameter(registered[0][1], None)
            found = nn.Parameter(value, requires_grad=param.sharded.requires_grad)
            params.append(FoundParam(param.fqn, registered, found, param.distribution))
        twin = make_group(dataclasses.replace(group.plan, params=params, runs_on_meta=True))
        twin.register_sharded()
        twin.keep(None if group.keeper is None else group.keeper.twin(twin.memory.gathered))
        twin.settings.max_reductions = group.settings.max_reductions
        twin.settings.requires_all_reduce = group.settings.requires_all_reduce
        memory = twin.memory
        traits = group.collectives.reduce_scatter_traits(group.device)
        twin.collectives = _NoCollectives(traits, memory.gradients)
        for kind, log in (("gathered", memory.gathered), ("gradients", memory.gradients), ("grad", memory.reduced)):
            log.start()
            self._logs.append((kind, log))
        return twin

    def begin(self, label: str) -> None:
        """Note that the moment named ``label`` begins."""
        self._clock.note(0)
        self.labels.append(label)

    def play(self, order: Sequence[FSDPState]) -> tuple[str, dict[str, int]]:
        """Run the step. Forward runs through the calls of ``order``. Returns the result of :func:`highest_moment`."""
        calls: list[_Call] = []  # The outermost calls.
        around: list[_Call] = []  # The open calls, outermost first: the next call may be inside each of them.
        for state in order:
            number = self._calls[state] = self._calls.get(state, -1) + 1
            call = _Call(state, self._modules[state][number % len(state.modules)])
            while around and not self.is_inside(state, around[-1].state):
                around.pop()
            (around[-1].inner if around else calls).append(call)
            around.append(call)
        if self._accumulates():
            self._pass(calls)
            self._pass(calls)  # It holds the gradients of the first one. Further ones hold no more.
            self._reduce_from_now_on()
        self._pass(calls)
        moment, held = high_water(self._logs, {"gathered": 0, "gradients": 0, "grad": 0})
        begun = [label for (when, _), label in zip(self._clock.events, self.labels) if when <= moment]
        return (begun[-1] if begun else "before forward"), held

    def _accumulates(self) -> bool:
        """Whether a backward leaves gradients for a later one, on this rank or, with HSDP, in each replica."""
        unsynced = any(not state.requires_gradient_sync for state in self._made.values())
        waiting = any(state.reduces_last_only and not state.is_last_backward for state in self._made.values())
        return unsynced or waiting or any(g.reduction.keeps_shards for state in self._made.values() for g in state.groups)

    def _reduce_from_now_on(self) -> None:
        for state in self._made.values():
            state.requires_gradient_sync = state.is_last_backward = True
            for group in state.groups:
                group.settings.requires_all_reduce = True

    def _pass(self, calls: Sequence[_Call]) -> None:
        """One forward and one backward."""
        with torch.inference_mode(False), torch.enable_grad():
            x = torch.empty(1, device="meta")
            for call in calls:
                x = call.run(x)
            if x.requires_grad:
                x.sum().backward()


class _Call:
    """One call in forward, with the calls inside it."""

    def __init__(self, state: FSDPState, module: _StandIn) -> None:
        self.state, self._module = state, module
        self.inner: list[_Call] = []

    def run(self, x: torch.Tensor) -> torch.Tensor:
        module = self._module
        module.replay.begin(f"forward of {module.name}")
        return _Begin.apply(module(x, self.inner), module.replay, f"backward of {module.name}")


class _StandIn(nn.Module):
    """A module that computes nothing: it runs the calls inside it, then uses its own parameters.

    So the gradients of its own parameters come first in backward. Their buffer stays allocated while backward runs through the
    modules inside.
    """

    def __init__(self, replay: _Replay, name: str) -> None:
        super().__init__()
        self.replay, self.name = replay, name

    def forward(self, x: torch.Tensor, calls: Sequence[_Call]) -> torch.Tensor:
        end = f"backward of {self.name}" if x.requires_grad else "end of backward"
        if not x.requires_grad:  # The first module gets tokens. Its stand-in needs a gradient, so that backward reaches it.
            x = x.detach().requires_grad_()
        x = _Begin.apply(x, self.replay, end)
        for call in calls:
            x = call.run(x)
        params = [param for param in self._parameters.values() if param is not None]
        return _Compute.apply(x, *params)


class _Begin(torch.autograd.Function):
    """Identity. When backward reaches it, the moment named ``label`` begins."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, replay: _Replay, label: str) -> torch.Tensor:
        ctx.replay, ctx.label = replay, label
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        ctx.replay.begin(ctx.label)
        return gradient, None, None


class _Compute(torch.autograd.Function):
    """Returns its input. In backward, it makes a gradient for each trainable parameter, as a real module does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *params: nn.Parameter) -> torch.Tensor:
        ctx.params = params
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return gradient, *(_gradient_of(param) for param in ctx.params)


def _gradient_of(param: nn.Parameter) -> torch.Tensor | None:
    """The gradient that autograd gets. None if the parameter is frozen, or if a matmul writes to the gradient buffer itself."""
    target = getattr(param, "gradient_target", None)
    if target is not None and target.begin() is not None:
        target.done()
        return None
    return torch.empty_like(param) if param.requires_grad else None


class _NoCollectives:
    """Collectives that send nothing. They log the second buffer that the real collectives would allocate."""

    def __init__(self, traits: ReduceScatterTraits, log: MemoryLog) -> None:
        self._traits, self._log = traits, log

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup | None = None) -> Work:
        return done

    def reduce_scatter(
        self, output: torch.Tensor, buffer: torch.Tensor, reduction: Reduction, group: dist.ProcessGroup | None = None
    ) -> Work:
        return _Held(buffer.nbytes, self._log) if self._traits.holds_second_buffer else done

    def all_reduce(self, tensor: torch.Tensor, reduction: Reduction, group: dist.ProcessGroup | None = None) -> Work:
        return done

    def reduce_scatter_traits(self, device: torch.device) -> ReduceScatterTraits:
        return self._traits

    def all_reduce_max(self, tensor: torch.Tensor) -> Work:
        return done


class _Held:
    """A reduce-scatter that holds a second buffer until ``wait()``."""

    def __init__(self, nbytes: int, log: MemoryLog) -> None:
        self._nbytes, self._log = nbytes, log
        log.note(nbytes)

    def wait(self) -> None:
        self._log.note(-self._nbytes)
        self._nbytes = 0  # A second wait() frees nothing.


def high_water(logs: Iterable[tuple[str, MemoryLog]], start: Mapping[str, int]) -> tuple[int, dict[str, int]]:
    """The moment with the largest sum over all logs, and the bytes of each kind at that moment.

    Args:
        logs: pairs of a kind and a log.
        start: the bytes of each kind when the logs were started.

    Returns:
        the moment (-1: the start), and the bytes by kind.
    """
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
