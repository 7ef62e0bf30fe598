"""Static modules: inside of them, local tensors flow and only the plan's boundaries run. DTensor takes no part.

It must not change a result: a module is static for a call only if a trial has shown, for a call with the same facts, that its
local ops are those of eager mode. Any other call runs in eager mode.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import types
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from torch_ragged._register._torch import GradientUse, backward_id, functorch_is_active, gradient_use
from torch_ragged.random._tape import read_state
from torch_ragged.spmd._boundary import Redistribution, SharedHook, as_dtensor, is_own_hook, local_moves
from torch_ragged.spmd._gradients import Leaf, LeavesOfCall, PendingGradients, has_hooks, witness
from torch_ragged.spmd._move import Carry, PerDim, clean, differentiable_once, make_dtensor, move_dtensor
from torch_ragged.spmd._resolved import Resolved
from torch_ragged.spmd._static_check import check_step
from torch_ragged.spmd._static_facts import Facts, NoFacts, Surroundings, modes
from torch_ragged.spmd._static_trial import (
    Found,
    Island,
    Refused,
    as_drawn,
    count_uses,
    edge_of,
    is_even_dtensor,
    standing_in,
    try_module,
)

__all__ = ["StaticModules", "StaticReport"]

# A limit, because a script whose shapes never come again would add a kind in each call.
_KINDS = 64
"""Kinds of calls of one module that are remembered: a call of a further kind runs in eager mode."""
_OUTSIDE = -1
"""The program of calls that are not of a forward of the model: nobody watches what becomes of their tensors."""


@dataclass(frozen=True)
class StaticReport:
    """Which modules are static, and why others are not.

    Attributes:
        modules: the names of the outermost static modules.
        reasons: for each other module in which something happened that a static module cannot do: what.
    """

    modules: tuple[str, ...]
    reasons: dict[str, str]

    def __str__(self) -> str:
        lines = [f"static: {', '.join(name or '(root)' for name in self.modules) or 'no module'}"]
        return "\n".join([*lines, *(f"eager: {name or '(root)'}: {reason}" for name, reason in self.reasons.items())])


class StaticModules:
    """Finds the static modules of a parallelized model, and runs them.

    A call of a module has *facts*: placements, shapes and types of its arguments, the modes of torch, hooks, and all
    attributes, globals and closures that its code may read (:class:`Facts`). The first call with new facts runs in eager
    mode. Before the second one, the module runs forward and backward on copies, on DTensors and on local tensors, without
    communication. If both runs compute the same, op by op, the module is static for calls with these facts; if not, it is
    eager, and its children are tried. A module that is static at its outermost is one region: local tensors flow through it.

    Ranks need not agree: a static call and an eager one issue the same collectives in the same order, with the same bytes.
    So a rank on which facts differ does not leave others waiting. No collective is issued to find static modules.
    """

    def __init__(
        self, model: nn.Module, mesh: DeviceMesh, resolved: Resolved, changes: Sequence[Any], gradients: PendingGradients
    ) -> None:
        self.mesh, self.gradients = mesh, gradients
        self.changes = [change for change in changes if isinstance(change, Redistribution)]
        self._regions: dict[str, _Region] = {}
        makers = {each.module for each in resolved.factories}  # Their rules hold in all modules in them, too.
        reasons = {
            name: "a rule for factories makes DTensors in it"
            for name, _ in model.named_modules()
            if any(_is_in(name, each) for each in makers)
        }
        reasons |= {each.module: "a rule annotates a tensor of it" for each in resolved.boundaries if each.action == "annotate"}
        for name, module in model.named_modules():
            self._regions[name] = _Region(self, module, name)
        for name, reason in reasons.items():
            self.forbid(name, reason)
        for name, region in self._regions.items():
            region.around = [other for outer, other in self._regions.items() if _is_in(name, outer)]
        self._watched: list[tuple[_Kind, Optional[int], Any, int]] = []
        self.program = _OUTSIDE
        """What this forward is called with, and the facts of the modules around static ones: what their code will do."""
        self._is_changed = True
        self._around = Surroundings()
        self.is_checking = False
        """Whether :meth:`check` runs a step in eager mode."""
        # Before the hooks of regions, which ask for the program.
        model.register_forward_pre_hook(self._begin_forward, prepend=True, with_kwargs=True)
        model.register_forward_hook(self._end_forward)
        for region in self._regions.values():
            inner = [each for each in region.module.modules() if each is not region.module]
            has_units = any(isinstance(each, FSDPModule) for each in inner)  # They are called with DTensors.
            if has_units or not any(isinstance(param, DTensor) for param in region.module.parameters()):
                region.make_eager()

    def _begin_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():  # What torch.compile traces runs in eager mode: the trace has no trial in it.
            return
        # Not in each forward: it looks at all modules. A module that is compiled later is traced without static mode, too.
        if self._is_changed:
            self._leave_out_compiled()
        _now.begin_forward()
        # A forward that raised has left them, because _end_forward() does not run after an error. Its nodes hold its graph.
        self._watched.clear()
        # Only of forwards with a backward of their own: without gradients, it does not count how often a tensor is used.
        self.program = _OUTSIDE
        # A checkpoint around the whole model runs this in backward: that is no forward of its own, either.
        if torch.is_grad_enabled() and backward_id() < 0:
            if self._is_changed and not self._around:
                self._look_around()
            self.program = hash((*map(_fact_of, pytree.tree_leaves((args, kwargs))), modes(), self._around.number()))

    def _leave_out_compiled(self) -> None:
        """Modules that the user has compiled are eager, and so are those in them, whose hooks are traced with them."""
        for name, region in self._regions.items():
            if getattr(region.module, "_compiled_call_impl", None) is not None:
                for other, inner in self._regions.items():
                    if _is_in(other, name):
                        inner.make_eager(f"{name or 'the model'} is compiled")

    def deviate(self, name: str, number: int) -> None:
        """A module has other facts than at first. So the code after it may use other tensors, or write to other ones."""
        self.program = hash((self.program, name, number))

    def _look_around(self) -> None:
        """Which modules are not static, and with which hooks."""
        self._is_changed = False
        self._around.look_at([region.module for region in self._regions.values() if region.is_around()])

    def watch_uses(self, kind: _Kind, leaves: Sequence[Any]) -> None:
        """When this forward ends, note how often the inputs of a call in eager mode were used."""
        inputs = [(i, leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, DTensor) and leaf.requires_grad]
        if torch.is_grad_enabled() and inputs:
            # Nodes of autograd, not tensors: the code around the module may drop an input. They are kept until this forward
            # ends.
            self._watched += [(kind, index, edge_of(leaf), self.program) for index, leaf in inputs]
        else:
            kind.watched.add(self.program)

    def watch_view(self, kind: _Kind, output: torch.Tensor) -> None:
        """When this forward ends, note whether an output that is a view was written to: then autograd has left its node."""
        self._watched.append((kind, None, edge_of(output), self.program))

    def _end_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        watched, self._watched = self._watched, []
        if self._is_changed:
            self._look_around()
        elif self.program != _OUTSIDE:
            self._around.settle()
        self.program = _OUTSIDE
        if not watched:
            return
        # What the script may use: outputs, and what modules and hooks have stored.
        kept = [
            value
            for each in module.modules()
            for name, value in vars(each).items()
            if name not in _OF_MODULES and isinstance(value, _KEPT)
        ]
        # Otherwise a loss that the script takes of a stored tensor would be a use that nothing has counted.
        kept += [value for each in module.modules() for value in _kept_by_hooks(each)]
        ends = [leaf for leaf in _tensors_in((output, kept)) if leaf.requires_grad]
        # An output is a use by the script, whose backward may begin there. A view that nothing uses was perhaps written to: a
        # write puts another node in place of its own.
        used = [*map(edge_of, ends)]
        edges: dict[Any, Any] = {position: edge for position, (_, _, edge, _) in enumerate(watched)}
        # Of a parameter, uses by eager code and by leaves count together. With two of them, autograd adds gradients as they
        # come, and the sum on a leaf would be added to another sum: in another order.
        params = self.gradients.edges()
        uses = count_uses(ends, {**edges, **{edge: edge for each in params.values() for edge in each}})
        for position, (kind, index, edge, program) in enumerate(watched):
            count = uses[position] + used.count(edge)
            if index is None:
                kind.is_written |= not count
                continue
            kind.uses[index] = max(count, kind.uses.get(index, 0))
            kind.watched.add(program)
        for kind in {id(each[0]): each[0] for each in watched}.values():
            if kind.found is not None and kind.reason is None:
                try:
                    kind.check_uses("", kind.found)
                except Refused as refused:  # From the next forward on, the module is eager.
                    kind.reason = refused.reason
        for param, each in params.items():
            if sum(uses[edge] for edge in each) > 1:
                self.leave_leaves(param)

    def leave_leaves(self, param: Any) -> None:
        """The gradients of ``param`` go to it from now on."""
        if self.gradients.share(param):
            for region in self._regions.values():
                region.forget(param)

    @property
    def report(self) -> StaticReport:
        """What was found so far: no module is static before its second call."""
        static = [name for name, region in self._regions.items() if region.is_static]
        told = {name: region.reason or region.other_facts() for name, region in self._regions.items()}
        reasons = {name: reason for name, reason in told.items() if reason}
        outermost = [n for n in static if not any(n != other and _is_in(n, other) for other in static)]
        draws = {name: reason for n in outermost for name, reason in self._regions[n].draws().items()}
        return StaticReport(tuple(outermost), {**draws, **reasons})

    def check(self, step: Callable[[], Any]) -> None:
        """Run a step in eager and in static mode, from the same state, and compare all that it shows, to the bit::

            model.static_modules.check(lambda: model(ids, labels=ids).loss.backward())

        Compared are the tensors that ``step`` returns, gradients, buffers and random states. They are as before when it
        returns. Other effects of the step stay, such as a counter of the script. It holds two copies of the gradients.

        Args:
            step: forward and backward, without the optimizer's step. It does the same each time: it is called five times.

        Raises:
            AssertionError: static mode has other bits than eager mode. On every rank; ranks that found nothing raise a
                RuntimeError.
            ValueError: the step writes to parameters, or two eager runs differ. On every rank, as above.
            TypeError: ``step`` cannot be called. On every rank, before anything runs.

        Collectives: those of five steps; before and after them, one all-reduce of 24 bytes per mesh dimension.
        """
        check_step(self._regions[""].module, self.mesh, step, functools.partial(setattr, self, "is_checking"))

    def forbid(self, name: str, reason: str) -> None:
        """A module is eager from now on, for ``reason``, and so are those around it. Those in it are tried."""
        for other, region in self._regions.items():
            if _is_in(name, other):
                region.make_eager(reason if other == name else "")
            elif _is_in(other, name):
                region.wake()
        self._is_changed = True

    def now_static(self, static: _Region) -> None:
        """Modules in a static one cost nothing: their own hooks go. They come again if it becomes eager."""
        for name, region in self._regions.items():
            if region is not static and _is_in(name, static.name):
                region.sleep()
        # Modules around static ones are others now. They are looked at once, when this forward ends: more modules may become
        # static in it.
        self._is_changed = True


def _is_in(name: str, outer: str) -> bool:
    return not outer or name == outer or name.startswith(f"{outer}.")


class _Now:
    """What runs on local tensors now.

    Attributes:
        region: the static module that runs, or is on trial: modules in it do nothing of their own, also those of other models.
        call: its call on local tensors.
    """

    region: Optional[_Region] = None
    call: Optional[_StaticCall] = None

    def enter(self, region: _Region, call: Optional[_StaticCall]) -> None:
        self.region, self.call, local_moves.of = region, call, None if call is None else call.move

    def leave(self) -> None:
        self.region, self.call, local_moves.of = None, None, None

    def begin_forward(self) -> None:
        """A call that was interrupted from the keyboard has left local tensors behind."""
        if self.region is not None and backward_id() < 0 and not self.region.is_on_trial:
            self.region.unbind()
            self.leave()


# One for all threads: backward on an accelerator runs in threads of autograd, while the script's thread waits for it. Assumed:
# no two threads run static modules at once.
_now = _Now()


class _Call:
    """A call in eager mode. The hooks on its outputs have it, so it lives as long as its graph of autograd."""


@dataclass
class _Kind:
    """Calls of a module with the same facts.

    Attributes:
        state: the facts of these calls.
        arrivals: the placements of the gradients that reached outputs.
        needing: how many outputs need gradients.
        uses: how often each input was used, in the whole model.
        found: what the trial found; None before it, or if it refused.
        reason: why calls of this kind are eager, for good.
        watched: the programs of forwards in which there was one, in eager mode.
        is_written: whether nothing used an output that is a view, or the code around the module has written to it.
        pending: those in eager mode whose backward may still come. It may compute a checkpoint again, which must be eager, too.
        others: by the placements of the gradients that have arrived, what a trial with them found; None: it refused.
        given: makes arguments of a trial.
        modes: those of torch, in forward.
        latest: the last call on local tensors.
        is_static: whether the last forward of such a call was static. A checkpoint computes it again in the same way.
        is_due: whether a call was static in a program in which there was none in eager mode.
    """

    state: _State
    arrivals: dict[int, PerDim] = field(default_factory=dict)
    needing: int = 0
    uses: dict[int, int] = field(default_factory=dict)
    found: Optional[Found] = None
    reason: Optional[str] = None
    watched: set[int] = field(default_factory=set)
    is_written: bool = False
    pending: weakref.WeakSet[_Call] = field(default_factory=weakref.WeakSet)
    others: dict[Any, Optional[Found]] = field(default_factory=dict)
    given: Callable[[], tuple[list[Any], Any]] = lambda: ([], None)
    modes: tuple[Any, ...] = ()
    latest: Callable[[], Optional[_StaticCall]] = lambda: None
    is_static: bool = False
    is_due: bool = False

    def check_uses(self, name: str, found: Found) -> None:
        """Raises Refused: what was seen of the code around the module forbids what a trial found."""
        if self.is_written:  # Outputs of a static module are no views, whose gradients take another way.
            raise Refused(name, "an output of it is a view, which nothing uses or to which the code around it writes")
        for index, inside in found.uses.items():
            # Eager mode adds up all gradients of a tensor one by one; a static module adds up its own first.
            if inside > 1 and self.uses.get(index, 0) > inside:
                raise Refused(name, f"the gradient of input {index} would be added up in another order")

    def is_known(self, program: int) -> bool:
        """Whether it was watched what the code around it does with its tensors."""
        return program in self.watched or len(self.watched) >= _KINDS or (bool(self.watched) and not torch.is_grad_enabled())

    def waits(self) -> bool:
        """Whether a call on local tensors waits for its backward, in which a checkpoint may run it again."""
        # A weak reference: the call lives as long as its graph. A graph that was dropped without a backward waits for nothing.
        call = self.latest()
        return call is not None and call.waits()


@dataclass
class _State:
    """The kinds of calls of a module with the same :class:`Facts`. ``number``: how many the module had before."""

    facts: Facts
    reason: Optional[str]
    number: int
    kinds: dict[Any, _Kind] = field(default_factory=dict)


class _StaticCall(LeavesOfCall):
    """A call on local tensors, as long as its graph of autograd lives.

    Local ops compute the same gradients for all placements of those that arrive, if no op of eager mode redistributes.
    Only what is made of local gradients where they leave the module differs. So it is looked up then.

    Attributes:
        found: what the trial with the placements found under which gradients have arrived, in this backward.
        nodes: by output, the node of autograd to which its gradient comes.
        given: the arguments, and the random states if it draws, until the call ends.
        repeated: the gradients of inputs and parameters, if eager mode has computed them in this backward.
    """

    def __init__(self, region: _Region, kind: _Kind, found: Found) -> None:
        super().__init__()
        self.region, self.kind, self.first, self.found = region, kind, found, found
        self.nodes: dict[int, weakref.ref[Any]] = {}
        self.given: Optional[tuple[list[Any], Any, dict[str, torch.Tensor]]] = None
        self.repeated: Optional[dict[Any, Any]] = None
        self._arrived: dict[int, PerDim] = {}
        self._backward = -1

    def move(self, change: Redistribution) -> Carry:
        return self.found.moves[change]

    def waits(self) -> bool:
        """Whether it needs a backward that has not begun."""
        return bool(self.nodes) and self._backward == -1

    def grad_spec(self, key: Any) -> Any:
        """The spec of the gradient of an input, by its position, or of a parameter, by its name; None: it has none."""
        return self.found.param_grads.get(key) if isinstance(key, str) else self.found.input_grads.get(key)

    def arrive(self, index: int, placements: PerDim, repeat: Callable[[], Any]) -> Optional[PerDim]:
        """A gradient of an output has arrived.

        Args:
            repeat: has eager mode compute the gradients; None: it cannot.

        Returns:
            the placements to which it must be brought; None: eager mode has used it.
        """
        # The first gradient of a backward. A retained graph may have several backwards, with gradients under other placements.
        if self._backward != backward_id():
            self._backward, self._arrived, self.found, self.specs = backward_id(), {}, self.first, {}
            self.repeated = self.by_eager = None
        if placements == self.found.output_grads.get(index):
            self._arrived[index] = placements
            return placements
        # Of other outputs that this backward will reach, those of the trial are the best guess.
        others = {i: self.first.output_grads[i] for i, node in self.nodes.items() if i != index and _will_run(node())}
        found = self.region.found_under(self, {**others, **self._arrived, index: placements})
        if found is None:
            # The last choice. Its values are right, but in this step sums may be in another order than in eager mode.
            told = "".join(map(str, placements))
            self.kind.reason = (
                f"with a gradient under {told}, its backward redistributes, and static modules cannot: add a rule with grad="
            )
            # Eager mode can take over from one output only: gradients that came before, or that are still to come, pass through
            # the local graph. It issues the collectives that a rank issues on which this call was eager.
            self.repeated = None if others or self._arrived else repeat()
            if self.repeated is not None:
                self.by_eager = self.region.by_parameter(self.repeated)
                return None
            placements = self.first.output_grads[index]
            found = self.region.found_under(self, {**others, **self._arrived, index: placements})
        assert found is not None  # It was so for another output, or is the first one.
        self._arrived[index], self.found = placements, found
        # Gradients on leaves are local: their placements are told to what reduces them when this backward ends.
        self.specs = {} if found is self.first else self.region.by_parameter(found.param_grads)
        return placements


def _will_run(node: Any) -> bool:
    return node is not None and gradient_use(node) is not GradientUse.NONE


class _Region(SharedHook):
    """One module of a model in static mode.

    At its entry, DTensors become local tensors; at its exit, local tensors become DTensors, if the call is of a kind that is
    static.
    """

    def __init__(self, owner: StaticModules, module: nn.Module, name: str) -> None:
        self.module, self.name = module, name
        self.gradients = owner.gradients
        self.reason: Optional[str] = None
        """Why the module is eager for good; an empty text: because of a module in it; None: it is not."""
        self.is_on_trial = False
        self.around: list[_Region] = []
        """This region and those that it is in."""
        self._used_before = -1
        """The number of the backward before which its parameters were last used."""
        self._leaves: list[Leaf] = []
        self._is_checkpointed = False
        self._owner = owner
        self._states: list[_State] = []
        self._home: Optional[_State] = None
        """The first state with static calls."""
        self._running: list[tuple[str, Any]] = []
        self._params = [
            _LocalParam(vars(each), each._parameters, key, f"{prefix}.{key}" if prefix else key)
            for prefix, each in module.named_modules()
            for key, param in each._parameters.items()
            if param is not None
        ]
        self._buffers = [(each, key) for each in module.modules() for key in each._buffers]
        self._handles: list[Any] = []
        self._island_hooks: dict[nn.Module, list[Any]] = {}
        self.wake()

    @property
    def is_static(self) -> bool:
        return any(kind.found for state in self._states for kind in state.kinds.values())

    def is_around(self) -> bool:
        """Whether its code runs in eager mode: it may use tensors of static modules."""
        return self.reason is not None or (bool(self._handles) and not self.is_static)

    def draws(self) -> dict[str, str]:
        """The modules in it that draw random numbers, with the op."""
        found = [kind.found for state in self._states for kind in state.kinds.values() if kind.found is not None]
        return {name: reason for each in found for name, reason in each.draws.items()}

    def other_facts(self) -> Optional[str]:
        """Why no call is static, if all kinds of calls are eager, or if each has other facts than those before it."""
        if self.is_static:
            return None
        reasons = [kind.reason for state in self._states for kind in state.kinds.values() if kind.reason is not None]
        if reasons or len(self._states) < 3:
            return reasons[0] if reasons else None
        return f"each call finds another value of {self._states[1].facts.changed()}"

    def wake(self) -> None:
        """Look at calls of the module, unless it is eager for good."""
        if self.reason is None and not self._handles:
            # After the plan's boundaries at the entry, before those at the exit: what the module itself sees.
            self._handles = [
                self.module.register_forward_pre_hook(self._enter, with_kwargs=True),
                self.module.register_forward_hook(self._leave, prepend=True, always_call=True),
            ]

    def sleep(self) -> None:
        for handle in (*self._handles, *(handle for handles in self._island_hooks.values() for handle in handles)):
            handle.remove()
        self._handles, self._states, self._running, self._home = [], [], [], None
        self._island_hooks.clear()

    def make_eager(self, reason: str = "") -> None:
        """The module runs in eager mode from now on."""
        self.reason = self.reason or reason
        self.sleep()

    # -- calls

    def _enter(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        # The copy of a module has its hooks, and parameters that are not those of the region.
        if torch.compiler.is_compiling() or module is not self.module:
            return None
        if _now.region is not None or functorch_is_active():
            if _now.region in (None, self):  # It calls itself: _leave() takes this off, and not the outer call.
                self._running.append(("eager", None))
            return None
        leaves, tree = pytree.tree_flatten((args, kwargs))
        kind = None if self._owner.is_checking else self._kind_of(leaves, tree)
        # Before what may raise: _leave() is called after errors, too, and takes it off.
        self._running.append(("eager", None))
        found = None if kind is None else self._found_for(kind, leaves, tree)
        # Before one backward, parameters may be used several times. Only the first use is by leaves. Its gradient arrives last,
        # and is added to the sum of the others, as in eager mode.
        backward, is_first = self.gradients.backwards, self._used_before != self.gradients.backwards
        if torch.is_grad_enabled():
            for region in (self,) if found is not None else self.around:
                region._used_before = backward
        elif self._owner.program != _OUTSIDE and not self._is_checkpointed:
            # A reentrant checkpoint runs it again in a backward of its own, which adds to .grad in the middle of this one. A
            # gradient on a leaf, of another use, would be added later than in eager mode.
            self._is_checkpointed = True
            for each in self._params:
                self._owner.leave_leaves(each.registered[each.key])
        if found is None:
            return None
        assert kind is not None
        call = _StaticCall(self, kind, found)
        # The nodes of autograd hold the call, and nothing else does when forward has ended.
        kind.latest = weakref.ref(call)
        self._running[-1] = ("static", call)
        if found.can_repeat and torch.is_grad_enabled():
            # Before the module draws: if eager mode runs it again in backward, it must draw the same numbers.
            devices = {"cpu", self._owner.mesh.device_type} if found.islands else ()
            call.given = leaves[:], tree, {device: read_state(device) for device in devices}
        _now.enter(self, call)
        made: dict[int, torch.Tensor] = {}  # The code may ask whether two arguments are the same object.
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, DTensor):
                if id(leaf) not in made:
                    made[id(leaf)] = _ToLocal.apply(leaf, call, index)
                leaves[index] = made[id(leaf)]
        self._bind(call, is_first)
        return pytree.tree_unflatten(leaves, tree)

    def _found_for(self, kind: _Kind, leaves: Sequence[Any], tree: Any) -> Optional[Found]:
        """What a trial of this kind of calls found, perhaps now; None: this call is eager."""
        in_backward = backward_id() >= 0
        if kind.reason is not None and kind.found is not None and not in_backward and not kind.waits():
            kind.found = None  # Not before: a checkpoint whose forward was static is computed again as it was.
            if not self.is_static:
                self._owner.forbid(self.name, kind.reason)
        if kind.reason is not None and kind.found is None:
            return None
        # Time: the first call of a kind is watched, and a later one is tried, when the gradients of the first have arrived.
        # In another program, the code around the module may use its inputs and outputs otherwise: a call there is watched, too.
        is_known, is_tried = kind.is_known(self._owner.program), kind.found is not None
        is_eager = not is_known or bool(kind.pending) or kind.is_due
        if in_backward:  # A call that activation checkpointing runs again is as the first one was.
            is_eager = not (is_tried and kind.is_static)
        elif is_tried and kind.waits():  # And a checkpoint cannot tell two calls that wait from each other.
            is_eager, kind.is_due = False, kind.is_due or not is_known
        if is_eager:
            self._running[-1] = ("watched", kind)
            if not in_backward:
                kind.is_static, kind.is_due = False, False
                self._owner.watch_uses(kind, leaves)
            return None
        if not is_tried:
            # No gradient of an eager call is on its way now (pending is empty), so what arrives is known.
            self._try(kind, leaves, tree)
        if not in_backward:
            kind.is_static = kind.found is not None
        return kind.found

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        is_other = torch.compiler.is_compiling() or module is not self.module
        if is_other or not self._running or _now.region not in (None, self):
            return None
        how, of = self._running.pop()
        if how == "static":
            _now.leave()
            self.unbind()
        if output is None or of is None:  # It raised, or it ran in eager mode.
            return None
        leaves, tree = pytree.tree_flatten(output)
        if how == "watched":
            watched, of.needing = _Call(), 0
            for index, leaf in enumerate(leaves):
                if isinstance(leaf, DTensor) and leaf.requires_grad and not leaf.is_leaf:
                    # The hook is what keeps ``watched`` alive. A graph that is dropped without a backward takes it along, and
                    # nothing is pending.
                    leaf.register_hook(functools.partial(_note_arrival, of, watched, index))
                    of.needing += 1
                    if leaf._is_view() and backward_id() < 0:
                        self._owner.watch_view(of, leaf)
                    if backward_id() < 0:
                        of.pending.add(watched)
            return None
        given, of.given = of.given, None  # From here on, autograd keeps them, as long as it keeps what it needs itself.
        for index, (leaf, spec) in enumerate(zip(leaves, of.found.outputs)):
            if spec is None:
                continue
            if not leaf.requires_grad:
                leaves[index] = DTensor(leaf, spec, requires_grad=False)  # type: ignore[call-arg]
                continue
            known = [each.param for each in of.leaves[:1]]
            leaves[index] = _FromLocal.apply(leaf, of, index, spec, given, witness, *known)
        return pytree.tree_unflatten(leaves, tree)

    def _kind_of(self, leaves: Sequence[Any], tree: Any) -> Optional[_Kind]:
        """The kind of a call; None: it cannot be static."""
        if parametrize._cache_enabled:  # What one module computes of a parametrized weight, others read, also of a trial.
            return None
        key = [tree, modes()]
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and vars(leaf):  # Attributes of the user, which a local tensor has not.
                return None
            if isinstance(leaf, DTensor):
                mesh = self._owner.mesh
                if (leaf.device_mesh is not mesh and leaf.device_mesh != mesh) or not is_even_dtensor(leaf):
                    return None
                key += (leaf.placements, leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad)
            elif isinstance(leaf, torch.Tensor):
                if leaf.layout is not torch.strided or leaf.is_nested:  # It has no shape and strides of its own.
                    return None
                key += (leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad, type(leaf))
            elif leaf is None or isinstance(leaf, (bool, int, float, complex, str, torch.dtype, torch.device)):
                key += (type(leaf), leaf)
            else:  # An object may keep tensors, such as a cache of keys: they are DTensors.
                return None
        tensors = [id(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]
        # Which arguments are one tensor: code such as self-attention takes another branch then.
        if len(set(tensors)) < len(tensors):
            key += map(tensors.index, tensors)
        whole = tuple(key)
        # The latest state first: most calls have the facts of the call before.
        state = next((each for each in self._states if each.facts.hold()), None)
        if state is None:
            state = self._new_state()
            if state is None:
                return None
        if self._home is not None and state is not self._home and backward_id() < 0:
            # Not in backward: what a checkpoint runs again belongs to a forward that is over.
            self._owner.deviate(self.name, state.number)
        if state.reason is not None:
            return None
        kind = state.kinds.get(whole)
        if kind is None:
            if len(state.kinds) >= _KINDS:
                return None
            kind = state.kinds[whole] = _Kind(state)
        return kind

    def _new_state(self) -> Optional[_State]:
        if len(self._states) >= _KINDS:
            return None
        try:
            state = _State(Facts(self.module), _users_hook(self.module, self.name), len(self._states))
        except NoFacts as error:
            self._owner.forbid(self.name, str(error))
            return None
        self._states.insert(0, state)
        return state

    def _try(self, kind: _Kind, leaves: Sequence[Any], tree: Any) -> None:
        """See whether calls of this kind can be static, on copies of tensors. The module is as before afterwards."""
        owner, state = self._owner, kind.state
        kind.found, self.is_on_trial = None, True
        refused: Optional[tuple[str, str]] = None  # Not the error: its frames would keep all tensors of this forward.
        # Layouts, not tensors: a trial in a later backward makes arguments of zeros by them.
        kind.given, kind.modes = functools.partial(_alike, [*map(_meta_of, leaves)], [*map(id, leaves)], tree), modes()
        _now.enter(self, None)  # Modules in it are called on trial, and must not watch or try themselves.
        try:
            kind.check_uses(self.name, Found([]))  # What needs no trial.
            kind.found = self._run_trial(kind, leaves, tree, kind.arrivals)
            # On trial the module has run twice. What it has changed, it would change in static calls, too, perhaps to local
            # tensors.
            changed = state.facts.changed()
            if changed is not None:
                raise Refused(self.name, f"its forward changes {changed}")
            kind.check_uses(self.name, kind.found)
        except Refused as error:
            kind.found, kind.reason, refused = None, error.reason, (error.module, error.reason)
        finally:
            state.facts.restore()
            self.is_on_trial = False
            _now.leave()
        if refused is not None:
            # Not only for calls of this kind. But the trial may have guessed with which placements a gradient arrives.
            if not self.is_static and not 0 < len(kind.arrivals) < kind.needing:
                owner.forbid(*refused)  # After restore(), which brings back hooks that are removed here.
            return
        assert kind.found is not None
        self._home = self._home or state
        owner.now_static(self)
        for module in kind.found.islands:
            if module not in self._island_hooks:
                self._island_hooks[module] = [
                    module.register_forward_pre_hook(self._to_island, with_kwargs=True),
                    module.register_forward_hook(self._from_island, prepend=True),
                ]
        state.facts = Facts(self.module)  # Hooks of this object have changed, and nothing else.

    def found_under(self, call: _StaticCall, arrived: dict[int, PerDim]) -> Optional[Found]:
        """In backward: what holds for a call if gradients have arrived under these placements; None: they cannot be used.

        A trial finds it, once per placements, as the one before the call, but with zeros: its values do not count.
        """
        if all(call.first.output_grads[index] == placements for index, placements in arrived.items()):
            return call.first
        kind, key = call.kind, frozenset(arrived.items())
        if key not in kind.others:
            # First of all, so that a trial that cannot run or raises is not repeated in each backward.
            kind.others[key] = None
            with torch.enable_grad():
                # Module and modes must be those of forward. A graph of a call that is interrupted has nothing to try.
                if _now.region is None and modes() == kind.modes and kind.state.facts.hold():
                    self.is_on_trial = True
                    _now.enter(self, None)
                    try:
                        # It sends nothing: other ranks may be in the collectives of their backward.
                        found = self._run_trial(kind, *kind.given(), arrived, only=True)
                        if kind.state.facts.changed() is None and found.has_the_forward_of(call.first):
                            kind.others[key] = found
                    except Refused:
                        pass
                    finally:
                        kind.state.facts.restore()
                        self.is_on_trial = False
                        _now.leave()
        return kind.others[key]

    def by_parameter(self, named: dict[Any, Any]) -> dict[Any, Any]:
        """What ``named`` says of names of parameters, by parameter."""
        return {each.registered[each.key]: named[each.name] for each in self._params if each.name in named}

    def repeat(
        self, call: _StaticCall, given: Any, saved: Sequence[Any], index: int, gradient: Any
    ) -> Optional[dict[Any, Any]]:
        """In backward: run the module again in eager mode, and backward from one output.

        Returns:
            the gradients of inputs and parameters, as ``grad_spec`` names them. None: module or modes are not those of forward.
        """
        # No mode around it sees its ops: a selective checkpoint is a mode that counts them.
        with torch.enable_grad(), _disable_current_modes():
            if _now.region is not None or modes() != call.kind.modes or not call.kind.state.facts.hold():
                return None
            tensors, (arguments, tree, states) = iter(saved), given
            pairs = [each.made(next(tensors)) if isinstance(each, _Saved) else (None, each) for each in arguments]
            inputs = {i: leaf for i, (leaf, _) in enumerate(pairs) if leaf is not None and leaf.requires_grad}
            params = {each.name: each.registered[each.key] for each in self._params}
            copies = {id(param): _copy_of(param) for param in params.values()}  # Tied parameters stay tied.
            params = {name: copies[id(param)] for name, param in params.items()}
            args, kwargs = pytree.tree_unflatten([used for _, used in pairs], tree)
            self.is_on_trial = True
            _now.enter(self, None)
            try:
                with standing_in(self.module, params), as_drawn(states):
                    # forward(), not a call: hooks at its boundaries have run for the static call. It issues no collective
                    # (can_repeat).
                    output = pytree.tree_leaves(self.module.forward(*args, **kwargs))[index]
                leaves: dict[Any, Any] = {**inputs, **{name: param for name, param in params.items() if param.requires_grad}}
                distinct = list({id(leaf): leaf for leaf in leaves.values()}.values())
                # Not backward(): that would add to .grad, and this backward of the script is to bring the gradients on.
                grads = torch.autograd.grad(output, distinct, gradient, allow_unused=True)
            finally:
                self.is_on_trial = False
                _now.leave()
        of = dict(zip(map(id, distinct), grads))
        return {key: of[id(leaf)] for key, leaf in leaves.items()}

    def _run_trial(self, kind: _Kind, leaves: Sequence[Any], tree: Any, arrivals: Any, only: bool = False) -> Found:
        owner = self._owner
        run = self._run_on_trial(kind, tree)
        return try_module(self.module, self.name, leaves, tree, arrivals, owner.changes, owner.mesh, run, only)

    def _run_on_trial(self, kind: _Kind, tree: Any) -> Any:
        def run(found: Found, leaves: Sequence[Any], params: dict[str, Any]) -> Any:
            _now.enter(self, _StaticCall(self, kind, found))
            hooks = []
            for each in self._params:
                local = params[each.name]
                each.attributes[each.key] = _pending_if(local, found.shares.get(each.name))
            for module in found.islands:
                # Of modules that earlier trials have not found. If this trial is refused, none of its hooks stays.
                if module not in self._island_hooks:
                    hooks.append(module.register_forward_pre_hook(self._to_island, with_kwargs=True))
                    hooks.append(module.register_forward_hook(self._from_island, prepend=True))
            args, kwargs = pytree.tree_unflatten(list(leaves), tree)
            try:
                # forward(), not a call: boundaries at its entry and exit are not a part of the static module.
                output = self.module.forward(*args, **kwargs)
                # A static call gets lists and dicts of its own, with local tensors: its caller never sees what it writes there.
                after, shape = pytree.tree_flatten((args, kwargs))
                if shape != tree or not all(map(operator.is_, after, leaves)):
                    raise Refused(self.name, "it writes into a list or dict that it was given")
                return output
            finally:
                for hook in hooks:
                    hook.remove()
                self.unbind()

        return run

    # -- parameters and buffers

    def _bind(self, call: _StaticCall, by_leaves: bool) -> None:
        """While the module runs, attributes of the instances are local tensors."""
        specs, shares = call.found.param_grads, call.found.shares
        for each in self._params:
            param: Any = each.registered[each.key]
            spec = specs.get(each.name)
            if not by_leaves and spec is not None and param.requires_grad:
                each.attributes[each.key] = _pending_if(_ToLocal.apply(param, call, each.name), shares.get(each.name))
                continue
            # By the address, too: the same parameter may have other memory, as after ``param.data = ...``.
            is_known = param is each.of and spec is each.spec and param._local_tensor.data_ptr() == each.address
            is_known = is_known and param.requires_grad == each.requires_grad and not (each.leaf and has_hooks(param))
            local = each.local if is_known else self._local_of(each, param, call, spec)
            if local is not None:
                each.attributes[each.key] = _pending_if(local, shares[each.name]) if each.name in shares else local
        call.leaves = self._leaves if by_leaves else []
        for owner, key in self._buffers:
            buffer = owner._buffers.get(key)
            # Anew in each call: code may have replaced the buffer. A local tensor on the same memory takes what the module
            # writes.
            if isinstance(buffer, DTensor):
                vars(owner)[key] = buffer._local_tensor

    def unbind(self) -> None:
        for each in self._params:
            each.attributes.pop(each.key, None)
        for owner, key in self._buffers:
            vars(owner).pop(key, None)

    def _local_of(self, each: _LocalParam, param: Any, call: _StaticCall, spec: Any) -> Optional[torch.Tensor]:
        """What a parameter's attribute is while the module runs; kept until the parameter or its memory is another one."""
        each.of, each.spec = None, spec
        if not isinstance(param, DTensor):
            return None
        if param.requires_grad and spec is not None:
            each.leaf = self.gradients.leaf_of(param, spec.placements)  # type: ignore[arg-type]
            if each.leaf is None:  # A unit's: gathered anew for each forward. Or one with hooks: autograd goes to it.
                self._leaves = [leaf for leaf in self._leaves if leaf.param is not param]
                return _ToLocal.apply(param, call, each.name)
            each.local = each.leaf.local
        else:
            each.local, each.leaf = param._local_tensor.detach(), None
        each.of, each.address, each.requires_grad = param, param._local_tensor.data_ptr(), param.requires_grad
        self._leaves = list({id(other.leaf): other.leaf for other in self._params if other.leaf is not None}.values())
        return each.local

    def forget(self, param: Any) -> None:
        """Make what stands for a parameter anew."""
        for each in self._params:
            if each.registered.get(each.key) is param:
                each.of = each.leaf = None
        self._leaves = [leaf for leaf in self._leaves if leaf.param is not param]

    # -- modules in it that draw

    def _to_island(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        call, island = _now.call, self._island(module)
        if island is None:
            return None
        leaves, tree = pytree.tree_flatten((args, kwargs))
        for index, spec in enumerate(island.inputs):
            if spec is not None:
                leaves[index] = _ToIsland.apply(leaves[index], call, module, index, spec)
        return pytree.tree_unflatten(leaves, tree)

    def _from_island(self, module: nn.Module, args: Any, output: Any) -> Any:
        call, island = _now.call, self._island(module)
        if island is None:
            return None
        leaves, tree = pytree.tree_flatten(output)
        for index, spec in enumerate(island.outputs):
            if spec is not None:
                leaves[index] = _FromIsland.apply(leaves[index], call, module, index, spec)
        return pytree.tree_unflatten(leaves, tree)

    def _island(self, module: nn.Module) -> Optional[Island]:
        return None if _now.call is None else _now.call.found.islands.get(module)


@dataclass
class _LocalParam:
    """A parameter of a static module. While the module runs, its attribute is a local tensor on the same memory.

    The attribute of the instance hides the registered parameter, which optimizers and ``state_dict`` see as before.

    Attributes:
        attributes, registered: those of the module that has the parameter.
        spec: that of its gradient; None: it has none.
        of, address, requires_grad: the parameter and its memory, for which ``local`` and ``leaf`` were made.
    """

    attributes: dict[str, Any]
    registered: dict[str, Any]
    key: str
    name: str
    spec: Any = None
    of: Any = None
    address: int = 0
    requires_grad: bool = False
    local: Optional[torch.Tensor] = None
    leaf: Optional[Leaf] = None


_KEPT = (torch.Tensor, list, tuple, dict)
_OF_MODULES = set(vars(nn.Module()))


def _tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in containers, and in objects in them."""
    leaves = pytree.tree_leaves(value)
    inner = [list(vars(leaf).values()) for leaf in leaves if not isinstance(leaf, torch.Tensor) and hasattr(leaf, "__dict__")]
    return [leaf for leaf in (*leaves, *pytree.tree_leaves(inner)) if isinstance(leaf, torch.Tensor)]


def _kept_by_hooks(module: nn.Module) -> list[Any]:
    """What the hooks of the user on a module may have stored a tensor in: their closures, globals, arguments and objects."""
    found: list[Any] = []
    for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
        if is_own_hook(hook):
            continue
        while isinstance(hook, functools.partial):
            found += (*hook.args, *hook.keywords.values())
            hook = hook.func
        if isinstance(hook, types.MethodType):
            found.append(hook.__self__)
            hook = hook.__func__
        if isinstance(hook, types.FunctionType):
            with contextlib.suppress(ValueError):  # A cell that is not filled yet.
                found += [cell.cell_contents for cell in hook.__closure__ or ()]
            found += [hook.__globals__[name] for name in hook.__code__.co_names if name in hook.__globals__]
    return [value for value in found if not isinstance(value, (nn.Module, type, types.ModuleType))]


def _users_hook(module: nn.Module, name: str) -> Optional[str]:
    """Why hooks of the user keep a module eager: they are called with DTensors, and may do anything with them."""
    for inner, each in module.named_modules():
        for kind in ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"):
            for hook in getattr(each, kind).values():
                if not is_own_hook(hook):
                    where = ".".join(filter(None, (name, inner))) or "the model"
                    return f"a hook on {where} is called with DTensors"
    return None


def _fact_of(leaf: Any) -> Any:
    """What of an argument of the model may change which code runs."""
    if isinstance(leaf, torch.Tensor):
        placements = leaf.placements if isinstance(leaf, DTensor) else None
        return placements, None if leaf.is_nested else leaf.shape, leaf.dtype, leaf.requires_grad
    is_plain = leaf is None or isinstance(leaf, (bool, int, float, complex, str))
    return type(leaf), leaf if is_plain else None


def _note_arrival(kind: _Kind, call: _Call, index: int, gradient: Any) -> None:
    # One gradient is enough: a checkpoint around the call runs it again in this backward, if at all.
    kind.pending.discard(call)
    if isinstance(gradient, DTensor):
        kind.arrivals[index] = gradient.placements


@dataclass
class _Saved:
    """What an argument is, whose local tensor autograd keeps."""

    spec: Any
    requires_grad: bool
    is_leaf: bool

    @staticmethod
    def of(leaf: torch.Tensor) -> _Saved:
        return _Saved(leaf._spec if isinstance(leaf, DTensor) else None, leaf.requires_grad, leaf.is_leaf)

    def made(self, local: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What gets the gradient of the argument, and the argument: the code may ask whether it is a leaf of autograd."""
        tensor: Any = local.detach()
        tensor = tensor if self.spec is None else DTensor(tensor, self.spec, requires_grad=False)  # type: ignore[call-arg]
        tensor.requires_grad_(self.requires_grad)
        return tensor, tensor if self.is_leaf else tensor.view_as(tensor)


def _copy_of(param: Any) -> Any:
    if not isinstance(param, DTensor):
        return param.detach().requires_grad_(param.requires_grad)
    copy: Any = DTensor(param._local_tensor.detach(), param._spec, requires_grad=False)  # type: ignore[call-arg]
    return copy.requires_grad_(param.requires_grad)


def _meta_of(leaf: Any) -> Any:
    """What a trial needs of an argument, without its memory. Values that are no tensors are facts: they stay."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    # Nothing here refers to the tensor: a kind is remembered for the whole training.
    local = leaf._local_tensor if isinstance(leaf, DTensor) else leaf
    spec = leaf._spec if isinstance(leaf, DTensor) else None
    layout = (tuple(local.shape), local.stride())
    return _Meta(layout, {"dtype": local.dtype, "device": local.device}, spec, leaf.requires_grad, leaf.is_leaf)


@dataclass
class _Meta:
    layout: tuple[Any, ...]
    options: dict[str, Any]
    spec: Any
    requires_grad: bool
    is_leaf: bool

    def zeros(self) -> torch.Tensor:
        zeros: Any = torch.empty_strided(*self.layout, **self.options).zero_()
        zeros = zeros if self.spec is None else DTensor(zeros, self.spec, requires_grad=False)  # type: ignore[call-arg]
        zeros.requires_grad_(self.requires_grad)
        return zeros if self.is_leaf else zeros.view_as(zeros)  # type: ignore[no-any-return]


def _alike(metas: Sequence[Any], ids: Sequence[int], tree: Any) -> tuple[list[Any], Any]:
    """Arguments as those of a call, of zeros. What was one tensor is one."""
    made: dict[int, Any] = {}
    for meta, key in zip(metas, ids):
        if key not in made:
            made[key] = meta.zeros() if isinstance(meta, _Meta) else meta
    return [made[key] for key in ids], tree


def _with_its_strides(gradient: torch.Tensor, spec: Any, placements: PerDim) -> DTensor:
    """A DTensor on a gradient. On trial it was row-major; copied to that order, later sums would have other roundings."""
    if gradient.is_contiguous():
        return make_dtensor(gradient, spec.mesh, placements, spec.shape)
    stride, steps = list(gradient.stride()), gradient.stride()
    for dim, (whole, part) in enumerate(zip(spec.shape, gradient.shape)):
        for other, step in enumerate(steps):
            if part and other != dim and step >= steps[dim] > 0:  # An expanded dimension takes no memory.
                stride[other] *= whole // part  # Shards are even.
    return make_dtensor(gradient, spec.mesh, placements, spec.shape, tuple(stride))


def _pending_if(local: torch.Tensor, shares: Any) -> torch.Tensor:
    return _ToPending.apply(local, shares) if shares else local


class _ToPending(torch.autograd.Function):
    """A replicated local tensor as one that is pending a sum, as DTensor does it. Its gradient is that of the whole."""

    @staticmethod
    def forward(ctx, local, shares):  # type: ignore[no-untyped-def]
        ctx.set_materialize_grads(False)
        for size in shares:
            local = local / size
        return local

    @staticmethod
    @differentiable_once
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return gradient, None


class _ToLocal(torch.autograd.Function):
    """The local tensor of a DTensor that enters a region. ``key``: the position of an input, or the name of a parameter."""

    @staticmethod
    def forward(ctx, tensor, call, key):  # type: ignore[no-untyped-def]
        ctx.set_materialize_grads(False)
        ctx.spec, ctx.call, ctx.key = tensor._spec, call, key
        local = tensor._local_tensor
        # A tensor of its own, as in DTensor.to_local: autograd writes its node into what is returned, and the DTensor's own
        # local tensor must stay without a node.
        return local.view_as(local)

    @staticmethod
    @differentiable_once
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        if ctx.call.repeated is not None:  # Instead of the local gradient, which is none.
            return ctx.call.repeated.get(ctx.key), None, None
        if gradient is None:
            return None, None, None
        spec = ctx.call.grad_spec(ctx.key)
        if spec is not None and (gradient.is_contiguous() or isinstance(ctx.key, str)):
            return DTensor(gradient, spec, requires_grad=False), None, None
        placements = clean(ctx.spec.placements) if spec is None else spec.placements
        return _with_its_strides(gradient, ctx.spec, placements), None, None


class _FromLocal(torch.autograd.Function):
    """A DTensor on an output of a region.

    Gradients of parameters accumulate on leaves of their own. One parameter is an input here, so that a backward for parameters
    alone passes here and raises. All of them would cost a tenth of a small step.
    """

    @staticmethod
    def forward(ctx, local, call, index, spec, given, *witnesses):  # type: ignore[no-untyped-def]
        ctx.set_materialize_grads(False)
        ctx.call, ctx.index, ctx.mesh, ctx.witnesses = call, index, spec.mesh, len(witnesses)
        # Weak, as the node holds the call.
        call.nodes[index] = weakref.ref(ctx)
        ctx.given = None
        if given is not None:
            leaves, *others = given
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            # By autograd, which frees them with the graph and raises if one is written to before backward.
            ctx.save_for_backward(*[leaf._local_tensor if isinstance(leaf, DTensor) else leaf for leaf in tensors])
            ctx.given = [_Saved.of(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], *others
        return DTensor(local, spec, requires_grad=local.requires_grad)

    @staticmethod
    @differentiable_once
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        if gradient is None:  # Eager mode has none in the module, and sends nothing for it.
            return None, None, None, None, None, *(None,) * ctx.witnesses
        call = ctx.call
        # Before anything is computed: it raises if this backward cannot be served, and asks autograd for a call at the end.
        call.region.gradients.collect(call)
        gradient = as_dtensor(gradient, ctx.mesh)  # Behind a backward hook, that of an unused output is plain zeros.

        def repeat() -> Any:
            return ctx.given and call.region.repeat(call, ctx.given, ctx.saved_tensors, ctx.index, gradient)

        wanted = call.arrive(ctx.index, gradient.placements, repeat)
        local = None
        if wanted is not None:
            # Perhaps to a sum that is pending, which DTensor's method refuses.
            local = (gradient if gradient.placements == wanted else move_dtensor(gradient, wanted))._local_tensor
        return local, None, None, None, None, *(None,) * ctx.witnesses


class _ToIsland(torch.autograd.Function):
    """A DTensor on a local tensor in a region, for a module that draws."""

    @staticmethod
    def forward(ctx, local, call, module, index, spec):  # type: ignore[no-untyped-def]
        ctx.set_materialize_grads(False)
        ctx.call, ctx.module, ctx.index, ctx.placements = call, module, index, clean(spec.placements)
        return DTensor(local, spec, requires_grad=local.requires_grad)

    @staticmethod
    @differentiable_once
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        if gradient is None:
            return None, None, None, None, None
        wanted = ctx.call.found.islands[ctx.module].input_grads.get(ctx.index, ctx.placements)
        if gradient.placements != wanted:
            gradient = move_dtensor(gradient, wanted)
        return gradient._local_tensor, None, None, None, None


class _FromIsland(torch.autograd.Function):
    """The local tensor of what a module that draws returns."""

    @staticmethod
    def forward(ctx, tensor, call, module, index, spec):  # type: ignore[no-untyped-def]
        ctx.set_materialize_grads(False)
        ctx.call, ctx.module, ctx.index, ctx.spec = call, module, index, spec
        local = tensor._local_tensor
        return local.view_as(local)

    @staticmethod
    @differentiable_once
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        if gradient is None:
            return None, None, None, None, None
        spec = ctx.spec
        placements = ctx.call.found.islands[ctx.module].output_grads.get(ctx.index, clean(spec.placements))
        return _with_its_strides(gradient, spec, placements), None, None, None, None
