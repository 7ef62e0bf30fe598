"""Trace: one forward and backward of the modules under a root, in order: their calls, and collectives issued and waited for.

It must not change what they compute. It watches a model that trains, and the stand-ins of a :class:`Replay`, by the same hooks.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd import Variable

from torch_ragged._register._torch import dynamo_disabled, dynamo_disabled_in_backward
from torch_ragged.fsdp.comm._collectives import Work, WrappedCollectives
from torch_ragged.fsdp.core._fsdp_param import local_of
from torch_ragged.fsdp.core._fsdp_param_group import FSDPParamGroup
from torch_ragged.fsdp.core._fsdp_state import FSDPState
from torch_ragged.fsdp.core._hooks import tensors_in
from torch_ragged.fsdp.tools._replay import CallFacts, Recomputation

__all__ = ["END", "Moment", "Trace"]

END = ("end", "")
"""The mark at the end of backward, before the root reduces what is left."""


class Moment(NamedTuple):
    """What happens at one point of a pass.

    Attributes:
        what: "mark", "issue" or "wait".
        key: of a mark, (its kind, module): computation follows it. Kinds are "forward", "forward ends", "backward", "backward
            ends", and "again", "again runs" and "again ends" if a checkpoint runs a forward in backward. The last one is
            :data:`END`. Of a collective, (kind, group).
        begin, end: by the clock. Only an "issue" takes time: that of the whole collective, if it is waited for at once.
        issued: by the clock, when the host had issued the collective.
        link: the process group that carries a collective. Collectives of one link run one after the other.
        nbytes: of a collective's larger buffer.
    """

    what: str
    key: tuple[str, str]
    begin: Any = None
    end: Any = None
    issued: Any = None
    link: int = 0
    nbytes: int = 0


class Trace:
    """Records passes, each from :meth:`start` on. ::

        forward     | root | 0    | 1    | root |             "forward" and "forward ends" of each call
        backward    | root | 1    | 0    | root |  end        "backward" and "backward ends" of each call
        between       collectives that are issued, and waits for them

    Args:
        states: by name.
        clock: returns the moment.
        in_turn: whether each collective is waited for when it is issued. Its time then is its own, and computation between two
            marks is what is left.

    Attributes:
        moments: of the current pass, in order.
        problem: why the pass has no order that a schedule could follow; "": it has one.
        is_over: whether backward has ended.
        activations: bytes that autograd keeps from the forward of each module, without those of the modules inside.
    """

    def __init__(self, states: Mapping[str, FSDPState], clock: Callable[[], Any] = lambda: None, in_turn: bool = False) -> None:
        self._clock, self._in_turn = clock, in_turn
        self._undo: list[Callable[[], object]] = []
        self._is_open, self._pass = False, 0
        self._states = {state: state.groups for state in states.values()}
        self._saved = contextlib.ExitStack()
        self._reset()
        for name, state in states.items():
            for index, module in enumerate(state.modules):
                self._hook(module, f"{name}/{index}" if index else name, state)
            for index, group in enumerate(state.groups):
                watched = _TracedCollectives(group, self, f"{name}[{index}]" if index else name)
                self._undo.append(watched.stop)

    def _hook(self, module: nn.Module, name: str, state: FSDPState) -> None:
        self._undo.append(module.register_forward_pre_hook(functools.partial(self._call_again, name), prepend=True).remove)
        # After the hooks of fully_shard before forward, and before them after it: what is between is computation.
        before, after = functools.partial(self._before, name, state), functools.partial(self._after, name)
        self._undo.append(module.register_forward_pre_hook(before, with_kwargs=True).remove)
        # Also if forward raised: autograd must not keep the hooks on saved tensors.
        self._undo.append(module.register_forward_hook(after, prepend=True, always_call=True).remove)

    def _reset(self) -> None:
        self.moments: list[Moment] = []
        self.problem, self.is_over = "", False
        self._in_backward = False
        self._calls: Counter[str] = Counter()
        self._reached: set[str] = set()
        self.activations: Counter[str] = Counter()
        self._storages: set[int] = set()
        self._open: list[tuple[str, FSDPState]] = []  # The calls in forward that run now.
        self._again: list[str] = []  # The calls in a recomputation that run now.
        self._reentrant: set[str] = set()
        self._regions: list[Recomputation] = []
        self._inside: list[set[str]] = []  # Of each region, all modules that it has called.

    def start(self) -> None:
        """A pass begins. What is known of an earlier one is dropped."""
        self._saved.close()
        self._reset()
        self._is_open, self._pass = True, self._pass + 1

    def stop(self) -> None:
        """Record nothing more, until :meth:`start`."""
        self._is_open = False
        self._saved.close()

    def close(self) -> None:
        """Remove all hooks."""
        self.stop()
        while self._undo:
            self._undo.pop()()

    # -- marks -----------------------------------------------------------------------------------------------------

    def _mark(self, what: str, name: str) -> None:
        self.moments.append(Moment("mark", (what, name), self._clock()))

    @dynamo_disabled
    def _call_again(self, name: str, module: nn.Module, args: Any) -> None:
        """A checkpoint runs a forward in backward. Its pre-forward follows: what was computed before is no part of it."""
        if self._is_open and self._in_backward:
            if not self._again:
                self._join_recomputation(name)
            self._inside[-1].add(name)
            self._again.append(name)
            self._mark("again", name)

    @dynamo_disabled
    def _before(self, name: str, state: FSDPState, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        # Without kwargs, torch is in a call from which :meth:`close` has removed this hook.
        if not self._is_open:
            return
        if self._in_backward:
            self._mark("again runs", name)
        else:
            if not torch.is_grad_enabled():
                self._reentrant.add(name)
            self._calls[name] += 1
            if self._calls[name] > 1:
                self.problem = f"{name} is called more than once in a forward"
            if not self._open and self._in_turn:
                self._watch_saved()
            self._open.append((name, state))
            self._mark("forward", name)
        if self._is_watched(name):
            for tensor in tensors_in((args, kwargs))[0]:
                if tensor.requires_grad and not tensor.is_leaf:
                    tensor.register_hook(functools.partial(self._after_backward, self._pass, name))

    @dynamo_disabled
    def _after(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if not self._is_open:
            return
        if self._again:
            self._again.pop()
            self._mark("again ends", name)
        elif self._open:
            self._open.pop()
            if not self._open:
                self._saved.close()
            self._mark("forward ends", name)
        if self._is_watched(name):
            for tensor in tensors_in(output)[0]:
                if tensor.requires_grad and not tensor.is_leaf:
                    tensor.register_hook(functools.partial(self._before_backward, self._pass, name))

    def _is_watched(self, name: str) -> bool:
        """Whether backward comes through the tensors of this call: of a recomputation, only a reentrant one."""
        return torch.is_grad_enabled() and (not self._in_backward or name in self._reentrant)

    @dynamo_disabled_in_backward
    def _before_backward(self, number: int, name: str, gradient: torch.Tensor) -> None:
        if self._is_open and number == self._pass:
            self._reach(name)

    @dynamo_disabled_in_backward
    def _after_backward(self, number: int, name: str, gradient: torch.Tensor) -> None:
        if self._is_open and number == self._pass and name in self._reached:
            # The last of several inputs counts: post-backward waits for all of them.
            self.moments = [moment for moment in self.moments if moment.key != ("backward ends", name)]
            self._mark("backward ends", name)

    def _join_recomputation(self, name: str) -> None:
        """A checkpoint runs ``name`` again, and no module around it. With nothing between, it has run the call before, too."""
        if next(moment.key[0] for moment in reversed(self.moments) if moment.what == "mark") == "again ends":
            self._regions[-1].names.append(name)
        else:
            self._regions.append(Recomputation(name in self._reentrant, "", [name]))
            self._inside.append(set())

    @property
    def calls(self) -> CallFacts:
        """What a :class:`Replay` has to know to follow the order of this pass."""
        marks = [moment.key for moment in self.moments if moment.what == "mark"]
        at = {key: number for number, key in enumerate(marks)}
        ended = {name for kind, name in at if kind == "backward ends"}
        passes_on = set()
        for outer in self._reached:
            begin, end = at["forward", outer], at["forward ends", outer]
            inner = [name for name in self._reached if begin < at["forward", name] < end]
            # One tensor is the output of both. The inner call has hooked it first.
            if any(at["backward", name] < at["backward", outer] for name in inner):
                passes_on.add(outer)
        regions = []
        for region, inside in zip(self._regions, self._inside):
            # The modules that backward has reached last, from the latest on. What one around the checkpoint needs is no reason.
            reached = itertools.takewhile(lambda key: key[0] == "backward", reversed(marks[: at["again", region.names[0]]]))
            regions.append(region._replace(trigger=next((name for _, name in reached if name in inside - passes_on), "")))
        return CallFacts(tuple(regions), frozenset(self._reached - ended), frozenset(passes_on))

    def _reach(self, name: str) -> None:
        """Backward has reached an output of the module."""
        if not self._in_backward:
            self._in_backward = True
            # Before the root's own callback, which is queued by the hook behind this one.
            Variable._execution_engine.queue_callback(functools.partial(self._end, self._pass))
        if name not in self._reached:  # Ranks may differ in which output of a call has its gradient first.
            self._reached.add(name)
            self._mark("backward", name)

    def _end(self, number: int) -> None:
        if self._is_open and number == self._pass:
            if self.is_over:
                self.problem = "a forward has several backwards"
            if any(state.groups is not groups for state, groups in self._states.items()):
                self.problem = "the parameters have moved to another mesh"
            self.is_over = True
            self._in_backward = False
            self._mark(*END)

    def _watch_saved(self) -> None:
        """Until the end of this call, count what autograd keeps."""
        try:
            self._saved.enter_context(torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor))
        except RuntimeError as refused:  # The program has turned such hooks off.
            self.problem = str(refused)

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        name, storage = self._open[-1][0], local_of(tensor).untyped_storage()
        # Unsharded parameters are no activations: fully_shard counts their buffers.
        is_param = any(group.encoding.holds(tensor) for _, state in self._open for group in state.groups)
        if not is_param and storage._cdata not in self._storages:
            self._storages.add(storage._cdata)
            self.activations[name] += storage.nbytes()
        return tensor.detach()  # An output would hold the node that saves it: without a backward, the graph would stay.

    # -- collectives -----------------------------------------------------------------------------------------------

    def issue(self, key: tuple[str, str], link: int, nbytes: int, issue: Callable[[], Work]) -> Work:
        """Issue a collective."""
        if not self._is_open:
            return issue()
        begin = self._clock()
        work = issue()
        issued = self._clock()
        if self._in_turn:
            work.wait()
        self.moments.append(Moment("issue", key, begin, self._clock(), issued, link, nbytes))
        return _TracedWork(work, self, key)

    def waited(self, key: tuple[str, str]) -> None:
        if self._is_open:
            self.moments.append(Moment("wait", key))


class _TracedCollectives(WrappedCollectives):
    """The collectives of a group, watched by a trace."""

    follows_model = True  # A model that moves has other groups, which the trace notices.

    def __init__(self, group: FSDPParamGroup, trace: Trace, name: str) -> None:
        super().__init__(group.collectives)
        self._group, self._trace, self._name = group, trace, name
        group.collectives = self

    def stop(self) -> None:
        if self._group.collectives is self:  # Otherwise another object watches it, which keeps it as its inner one.
            self._group.collectives = self.inner

    def issue(self, name: str, largest: torch.Tensor, *arguments: Any) -> Work:
        dp, chosen = self._group.dp, arguments[-1] if name != "all_reduce_max" else None
        default = dp.replicate_group if name == "all_reduce" else dp.shard_group
        link = id(default if chosen is None else chosen)
        issue = functools.partial(super().issue, name, largest, *arguments)
        return self._trace.issue((name, self._name), link, largest.nbytes, issue)


class _TracedWork:
    def __init__(self, work: Work, trace: Trace, key: tuple[str, str]) -> None:
        self._work, self._trace, self._key = work, trace, key

    def wait(self) -> None:
        self._work.wait()
        self._trace.waited(self._key)
