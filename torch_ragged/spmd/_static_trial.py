"""A trial: whether a module computes on local tensors what it computes on DTensors, for all values. It does not communicate.

It must not touch the model's tensors, gradients, random states or attributes: it runs the module on copies.
"""

from __future__ import annotations

import contextlib
import contextvars
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.utils import _pytree as pytree
from torch.utils._debug_mode import DebugMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from torch_ragged._register._torch import current_autograd_node, next_sequence_number
from torch_ragged.random._tape import read_state, write_state
from torch_ragged.spmd._boundary import Redistribution
from torch_ragged.spmd._move import Carry, PerDim, can_move, clean, is_even, make_dtensor, on_trial
from torch_ragged.tensor._api import ragged_extension
from torch_ragged.tensor._cut_placement import has_flat
from torch_ragged.tensor._random import scope

__all__ = ["Found", "Island", "Refused", "as_drawn", "count_uses", "edge_of", "is_even_dtensor", "standing_in", "try_module"]

_UNEVEN = "is cut unevenly: local sizes do not tell the global ones"
_AGAIN = "activation checkpointing in it runs code again in backward"
_NOT_ITS_OWN = "a tensor that is neither its argument nor its parameter has a gradient"
# Namespaces of ops that send. They are refused by name, before they are issued.
_COMMUNICATES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem")
# They write running statistics, and their schemas do not say so.
_WRITES_UNMARKED = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "batch_norm_update_stats")
_COMMUTE = ("aten.add.Tensor", "aten.add_.Tensor", "aten.mul.Tensor", "aten.mul_.Tensor")
# Larger ones are compared by their storage: to read them takes time in each trial.
_CONSTANT = 65536
"""Bytes of a tensor that the module made without an op, at most, for its values to be compared."""


class Refused(Exception):
    """The module cannot be static. ``module`` is the name of that in which the reason was found."""

    def __init__(self, module: str, reason: str) -> None:
        super().__init__(reason)
        self.module, self.reason = module, reason


@dataclass
class Island:
    """A module inside of a static one that draws random numbers, and nothing else: DTensors flow through it.

    Attributes:
        inputs, outputs: the specs of its DTensors, in the order of pytree leaves; None for other leaves.
        input_grads, output_grads: the placements of their gradients.
    """

    inputs: list[Any] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    input_grads: dict[int, PerDim] = field(default_factory=dict)
    output_grads: dict[int, PerDim] = field(default_factory=dict)


@dataclass
class Found:
    """What a trial found: how tensors enter and leave a static module, and what happens inside of it.

    Attributes:
        outputs: the spec of each output; None for one that is no DTensor.
        output_grads: the placements of the gradients of outputs.
        input_grads, param_grads: the specs of the gradients of inputs and parameters that have one.
        moves: of the boundaries in the module.
        islands: the modules in it that draw random numbers.
        draws: the modules that draw, with the reason, for the report.
        uses: how often each input is used, in the module.
        shares: of replicated parameters that an op takes as pending a sum, such as the bias of a row-parallel layer: the
            sizes of the mesh dimensions of the sum.
        can_repeat: whether backward can run it again in eager mode: it sends and writes nothing, and autograd keeps its inputs
            anyway.
    """

    outputs: list[Any]
    output_grads: dict[int, PerDim] = field(default_factory=dict)
    input_grads: dict[int, Any] = field(default_factory=dict)
    param_grads: dict[str, Any] = field(default_factory=dict)
    moves: dict[Redistribution, Carry] = field(default_factory=dict)
    islands: dict[nn.Module, Island] = field(default_factory=dict)
    draws: dict[str, str] = field(default_factory=dict)
    uses: dict[int, int] = field(default_factory=dict)
    shares: dict[str, tuple[int, ...]] = field(default_factory=dict)
    can_repeat: bool = False

    def has_the_forward_of(self, other: Found) -> bool:
        """Whether the graph of a call of ``other`` brings the gradients that this trial has."""
        return (
            self.outputs == other.outputs
            and self.shares == other.shares
            and self.islands.keys() == other.islands.keys()
            and self.param_grads.keys() <= other.param_grads.keys()
            and self.moves.keys() == other.moves.keys()
            # A move that changed nothing has left no node in the graph.
            and all(other.moves[change].is_needed or not move.is_needed for change, move in self.moves.items())
        )


def try_module(
    module: nn.Module,
    name: str,
    args: Sequence[Any],
    tree: Any,
    arrivals: dict[int, PerDim],
    changes: Sequence[Redistribution],
    mesh: DeviceMesh,
    run_local: Callable[[Found, Sequence[Any], dict[str, torch.Tensor]], Any],
    only: bool = False,
) -> Found:
    """Run ``module`` forward and backward on DTensors and on local tensors, and compare what is computed: not values, but ops.

    Each tensor has an *expression*: the op that made it, with its other arguments and the expressions of its tensors. If each
    local output and gradient has the expression of its DTensor's local tensor, it has the same bits, for any values.
    Boundaries in the module do not communicate here: a tensor behind one has the expression of the move.

    Args:
        args: pytree leaves of the arguments, by ``tree``.
        arrivals: the placements of the gradients that reach outputs, as far as they are known.
        run_local: runs the module on local leaves and parameters, as a static module.
        only: outputs that are not in ``arrivals`` have no gradient.

    Raises:
        Refused: they differ, or something happens that local tensors cannot do.
    """
    params = {key: param for key, param in module.named_parameters(remove_duplicate=False)}
    buffers = {key: buffer for key, buffer in module.named_buffers(remove_duplicate=False)}
    devices = {"cpu", mesh.device_type}
    # Both runs draw the same, and the call that follows must draw what it would have drawn without them.
    states = {device: read_state(device) for device in devices}
    # This rank may be on trial alone: nothing from here on sends anything, or waits for another rank.
    reference = _Reference(name, module, changes, mesh)
    around = _outside_of_regions()
    try:
        # Of an activation checkpoint around the module: it must not count what is saved here.
        saved: set[int] = set()
        packed: list[list[torch.Tensor]] = []

        def pack(tensor: torch.Tensor) -> list[torch.Tensor]:
            # By storage: a view that is saved keeps the memory of the whole argument.
            if not isinstance(tensor, DTensor):
                saved.add(_address(tensor))
            packed.append([tensor])
            return packed[-1]

        with _disable_current_modes(), saved_tensors_hooks(pack, lambda each: each[0]):
            given = _Given(args, params, buffers, reference.ledger)
            with as_drawn(states):
                found = around.run(_run_reference, module, reference, given, tree, arrivals, mesh, only)
            ledger = Ledger(name)
            local = _Given(args, params, buffers, ledger, found)
            with as_drawn(states):
                around.run(_run_locally, name, module, ledger, local, found, run_local, only)
    finally:
        reference.refused = None  # A cycle through its frames would keep all tensors of this forward.
        for each in packed:
            each.clear()  # An output holds the node that has saved it: what no backward has freed would stay.
    eager, static = reference.ledger.expressions, ledger.expressions
    for key in {**eager, **static}:
        if key not in eager or key not in static or eager[key] != static[key]:
            raise Refused(name, f"on local tensors, {_what(key)} is computed in another way")
    # If eager mode must take over in backward, the forward is run a second time. It must send nothing then, as other ranks are
    # elsewhere, and write nothing twice.
    is_silent = not any(move.is_needed for move in found.moves.values())
    is_silent = is_silent and not any(kind == "written" for kind, _ in static)
    is_silent = is_silent and all(isinstance(param, DTensor) for param in params.values())
    found.can_repeat = is_silent and all(_address(leaf) in saved for leaf in local.args if _is_tensor(leaf))
    return found


def _outside_of_regions() -> contextvars.Context:
    """The context variables of this thread, without those of a checkpoint of ``torch_remat`` around it.

    That package notes each named region that runs, and a region that runs twice in one checkpoint is an error there.
    """
    given, context = contextvars.copy_context(), contextvars.Context()
    for variable, value in given.items():
        if not variable.name.startswith("torch_remat_"):
            context.run(variable.set, value)
    return context


@contextlib.contextmanager
def as_drawn(states: dict[str, torch.Tensor]) -> Iterator[None]:
    """Code in it draws from ``states``, by device. Ranks do not compare these draws, and later ones are as without it."""
    before = {device: read_state(device) for device in states}
    # A draw may compare the states of ranks, by an all-reduce (check_states). Not on trial: another rank may have no trial now,
    # and the ledger would refuse what sends. Assumed: the watched call before the trial has drawn, as the first draw on a mesh
    # compares in any case.
    is_compared, scope.is_compared = scope.is_compared, True
    try:
        for device, state in states.items():
            write_state(device, state)
        yield
    finally:
        scope.is_compared = is_compared
        for device, state in before.items():
            write_state(device, state)


def _what(key: Any) -> str:
    kind, index = key
    return {
        "out": f"output {index}",
        "param": f"the gradient of {index}",
        "grad in": f"the gradient of input {index}",
        "written": f"what it writes to {index}",
    }[kind]


def _tell(placements: Sequence[Any]) -> str:
    return "".join(map(str, placements))


def is_even_dtensor(value: DTensor) -> bool:
    """Whether all ranks have equally much of a tensor, so that the global shape follows from the local one."""
    if has_flat(value.placements):  # A unit's: it takes even shards only.
        return True
    return is_even(value.shape, value.placements, tuple(value.device_mesh.shape))


# -- expressions -----------------------------------------------------------------------------------------------------------


class Ledger:
    """The expression of each tensor that a run made or was given: one per storage; what a view shows of it is its geometry."""

    def __init__(self, name: str) -> None:
        self.expressions: dict[Any, Any] = {}
        self.name = name
        self._around = current_autograd_node()  # A trial may run when a gradient has arrived.
        self._of: dict[int, int] = {}
        self._own: set[int] = set()
        self._kept: list[Any] = []  # So that no storage is freed, and no address used again.

    @property
    def is_backward(self) -> bool:
        """Whether a backward of the trial itself runs this code."""
        return current_autograd_node() not in (None, self._around)

    def begin(self, tensor: torch.Tensor, *expression: Any, is_copy: bool = False) -> None:
        """Give a tensor that enters the run an expression. Ops may write to a copy."""
        storage = self._storage(tensor)
        self._of.setdefault(storage, hash(expression))
        if is_copy:
            self._own.add(storage)

    def note(self, key: Any, tensor: Any) -> None:
        """Note what is compared."""
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        with _disable_current_modes():
            self.expressions[key] = self.describe(local) if isinstance(local, torch.Tensor) else local

    def describe(self, tensor: torch.Tensor) -> Any:
        storage = self._storage(tensor)
        geometry = _geometry(tensor)
        if storage in self._of:
            return (self._of[storage], *geometry)
        if tensor.requires_grad and torch.is_grad_enabled():
            raise Refused(self.name, _NOT_ITS_OWN)
        # The module's own: an attribute, or made of Python numbers.
        # On the CPU only: to read a value of an accelerator, the host would wait for it.
        if tensor.is_cpu and tensor.numel() * tensor.element_size() <= _CONSTANT:
            # Of a copy: torch lets nobody free the memory that numpy has seen, and this may be a buffer of fully_shard.
            copied = tensor.detach().clone(memory_format=torch.contiguous_format)
            values = copied.view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
            return ("constant", values, *geometry[1:])
        # The same storage in both runs is the same tensor, such as an attribute: both read the same values.
        return ("storage", storage, *geometry)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op on plain tensors, and note the expressions of what it makes or writes.

        Raises:
            Refused: it communicates, reads a value, or writes to a tensor that the run has not made.
        """
        if torch.is_grad_enabled() and self.is_backward:
            raise Refused(self.name, _AGAIN)
        named = {each.name: each for each in func._schema.arguments}
        filled = {**dict(zip(named, args)), **kwargs}  # A default may be passed or left out.
        leaves, tree = pytree.tree_flatten(
            {key: value for key, value in filled.items() if not _is_default(named.get(key), value)}
        )
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        # By such ops DTensor finds the shape of a result. They compute no values.
        if any(isinstance(each, FakeTensor) or each.is_meta for each in tensors):
            return func(*args, **kwargs)
        # Refused before it is issued: other ranks may not be on trial now, and would wait for nobody.
        if func.namespace in _COMMUNICATES:
            raise Refused(self.name, f"{func} communicates")
        if func is torch.ops.aten._local_scalar_dense.default:
            raise Refused(self.name, "it reads the value of a tensor, by which the code may branch")
        with _disable_current_modes():
            given = [self.describe(leaf) if isinstance(leaf, torch.Tensor) else _constant(leaf) for leaf in leaves]
            written = self._written(func, args, kwargs)
            if any(self._storage(each) not in self._own for each in written):
                raise Refused(self.name, f"{func} writes to a tensor that was made before")
        result = func(*args, **kwargs)
        with _disable_current_modes():
            name = str(func)
            # Autograd may sum in either order. With a factor of the second one (alpha), the order counts.
            if name in _COMMUTE and len(tensors) == len(given) == 2:
                given.sort(key=hash)
            expression = hash((name.replace("_.", "."), tuple(given), str(tree)))
            for index, tensor in enumerate(written):
                storage, whole = self._storage(tensor), tensor.untyped_storage().nbytes()
                if tensor.numel() * tensor.element_size() == whole:  # As an op that is not in place makes it.
                    self._of[storage] = hash((expression, index))
                else:
                    self._of[storage] = hash((expression, "into", self._of[storage], _geometry(tensor)))
            known = {self._storage(each) for each in tensors}
            for index, made in enumerate(pytree.tree_leaves(result)):
                if isinstance(made, torch.Tensor) and not isinstance(made, DTensor):
                    storage = self._storage(made)
                    # Otherwise it is a view, or a tensor that was written to: its geometry says what it shows of the storage.
                    if storage not in known:
                        self._of[storage] = hash((expression, index))
                        self._own.add(storage)
        return result

    def _storage(self, tensor: torch.Tensor) -> int:
        # The Python object is kept: while it is alive, no other storage gets this address.
        storage = tensor.untyped_storage()
        self._kept.append(storage)
        return storage._cdata  # type: ignore[no-any-return]

    @staticmethod
    def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
        arguments, found = func._schema.arguments, []
        unmarked = any(part in func.name() for part in _WRITES_UNMARKED)
        for position, argument in enumerate(arguments):
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            marked = argument.alias_info is not None and argument.alias_info.is_write
            if marked or (unmarked and argument.name.startswith("running_")):
                found += [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        return found


def _is_default(argument: Any, value: Any) -> bool:
    return argument is not None and argument.has_default_value() and argument.default_value is value


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


def _constant(value: Any) -> Any:
    return type(value).__name__ if isinstance(value, torch.Generator) else (type(value).__name__, repr(value))


class _Given:
    """Copies of what a module computes with: the leaves of its arguments, its parameters and buffers, for one run.

    The code may ask whether they need gradients, and whether they are leaves of autograd. So they do, and are, if the ones of
    a call do: those of an eager call, or, with ``found``, those of a static one.
    """

    def __init__(
        self,
        args: Sequence[Any],
        params: dict[str, Any],
        buffers: dict[str, Any],
        ledger: Ledger,
        found: Found | None = None,
    ) -> None:
        self._ledger, self._found = ledger, found
        copies: dict[int, Any] = {}

        def given(value: Any, is_written: bool, *expression: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if id(value) not in copies:
                copies[id(value)] = self._copy(value, is_written, *expression)
            return copies[id(value)]  # Tied parameters stay tied.

        # Inputs and buffers are copied, so that the module may write to them: for the time of a trial, they take their memory
        # again. Parameters are not. An op that writes to one is refused before it runs.
        self._inputs = [given(leaf, True, "in", index) for index, leaf in enumerate(args)]
        with torch.enable_grad():
            views = {
                id(leaf): leaf.view_as(leaf)
                for leaf, of in zip(self._inputs, args)
                if _needs_grad(leaf) and (found is not None or not of.is_leaf)
            }
        self.args = [views.get(id(leaf), leaf) for leaf in self._inputs]
        self.params = {key: given(param, False, "param", key) for key, param in params.items()}
        self.buffers = {key: given(buffer, True, "buffer", key) for key, buffer in buffers.items()}
        self._before = {}
        with _disable_current_modes():
            for key, tensor in self._written():
                self._before[key] = ledger.describe(tensor)

    def _copy(self, value: torch.Tensor, is_written: bool, *expression: Any) -> torch.Tensor:
        local = value._local_tensor if isinstance(value, DTensor) else value
        plain = local.detach()
        if is_written:  # With its strides; expanded tensors cannot be written to.
            plain = plain.clone(memory_format=torch.preserve_format)
        self._ledger.begin(plain, *expression, is_copy=is_written)
        needs_grad = value.requires_grad
        if self._found is not None:
            is_param = expression[0] == "param"
            # As in a static call: _ToLocal passes gradients only if they are enabled, and parameters without one are detached.
            needs_grad = needs_grad and (expression[1] in self._found.param_grads if is_param else torch.is_grad_enabled())
        if isinstance(value, DTensor) and self._found is None:
            plain = DTensor(plain, value._spec, requires_grad=False)  # type: ignore[call-arg, assignment]
        return plain.requires_grad_() if needs_grad else plain

    def _written(self) -> Iterator[tuple[Any, torch.Tensor]]:
        for index, leaf in enumerate(self.args):
            if isinstance(leaf, torch.Tensor):
                yield f"input {index}", leaf._local_tensor if isinstance(leaf, DTensor) else leaf
        for key, buffer in self.buffers.items():
            yield key, buffer._local_tensor if isinstance(buffer, DTensor) else buffer

    def note_written(self, name: str) -> None:
        """Note the expressions of buffers that the run wrote to. An input that it writes to is the caller's DTensor."""
        with _disable_current_modes():
            for key, tensor in self._written():
                if (now := self._ledger.describe(tensor)) != self._before[key]:
                    if key.startswith("input "):
                        raise Refused(name, f"it writes to {key}")
                    self._ledger.expressions["written", key] = now

    def check_outputs(self, name: str, outputs: Sequence[Any]) -> None:
        """Refuse outputs on the memory of an argument, parameter or buffer: who writes to one writes to both."""
        mine = {_address(each) for each in (*self.args, *self.params.values(), *self.buffers.values()) if _is_tensor(each)}
        if any(_is_tensor(leaf) and _address(leaf) in mine for leaf in outputs):
            raise Refused(name, "an output of it is a view of an input, a parameter or a buffer")

    def leaves(self) -> list[tuple[Any, torch.Tensor]]:
        """The tensors whose gradients are compared: inputs and parameters."""
        inputs = [(("grad in", i), leaf) for i, leaf in enumerate(self._inputs) if _needs_grad(leaf)]
        return inputs + [(("param", key), param) for key, param in self.params.items() if _needs_grad(param)]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _address(tensor: Any) -> int:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage()._cdata  # type: ignore[no-any-return]


def _needs_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


@contextlib.contextmanager
def standing_in(module: nn.Module, tensors: dict[str, torch.Tensor]) -> Iterator[None]:
    """While the module runs, attributes of the instances hide its registered parameters and buffers."""
    places = []
    for key, tensor in tensors.items():
        owner, _, name = key.rpartition(".")
        attributes = vars(module.get_submodule(owner))
        # The instance's dict comes before nn.Module.__getattr__, which finds registered parameters. So these stay as optimizers
        # and state dicts know them, also if the module raises.
        attributes[name] = tensor
        places.append((attributes, name))
    try:
        yield
    finally:
        for attributes, name in places:
            attributes.pop(name, None)


@contextlib.contextmanager
def _carrying(ledger: Ledger) -> Iterator[None]:
    """A move makes zeros of the right shape here, whose expression is the move."""

    def carry(local: torch.Tensor, src: PerDim, dst: PerDim, shape: Sequence[int], mesh: DeviceMesh) -> torch.Tensor:
        if src == dst:
            return local
        with _disable_current_modes():
            size, _ = ragged_extension.local_shape_and_global_offset(torch.Size(shape), mesh, dst, skip_offset=True)
            # Values do not count, and this rank may be on trial alone: nothing is sent.
            moved = local.new_zeros(tuple(size))
            ledger.begin(moved, "move", src, dst, tuple(shape), ledger.describe(local), is_copy=True)
        return moved

    on_trial.carry = carry
    try:
        yield
    finally:
        on_trial.carry = None


# -- the run on DTensors ---------------------------------------------------------------------------------------------------


def _run_reference(
    module: nn.Module,
    reference: _Reference,
    given: _Given,
    tree: Any,
    arrivals: dict[int, PerDim],
    mesh: DeviceMesh,
    only: bool,
) -> Found:
    ledger = reference.ledger
    args, kwargs = pytree.tree_unflatten(given.args, tree)
    reference.leaves = {id(tensor) for _, tensor in given.leaves()}
    with reference.watching(), standing_in(module, {**given.params, **given.buffers}), _carrying(ledger):
        try:
            # forward(), not a call: the module's own hooks belong to the call that follows the trial.
            output = module.forward(*args, **kwargs)
            outputs = pytree.tree_leaves(output)
            found = Found([leaf._spec if isinstance(leaf, DTensor) else None for leaf in outputs])
            _check_outputs(reference.name, outputs, given)
            given.check_outputs(reference.name, outputs)
            for index, leaf in enumerate(outputs):
                ledger.note(("out", index), leaf)
            needing = {i: leaf for i, leaf in enumerate(outputs) if _needs_grad(leaf) and (i in arrivals or not only)}
            # A gradient that has not arrived yet is taken to be placed as its output is, whole where that is pending a sum. If
            # another one arrives, backward looks for what holds then (_Region.found_under).
            found.output_grads = {i: arrivals.get(i, clean(leaf.placements)) for i, leaf in needing.items()}
            for index, leaf in needing.items():
                _check_gradient(reference.name, leaf.placements, found.output_grads[index])
            leaves = given.leaves()
            if needing and leaves:
                edges: dict[Any, Any] = {i: edge_of(leaf) for i, leaf in enumerate(given.args) if _needs_grad(leaf)}
                params = {key: param for key, param in given.params.items() if _needs_grad(param)}
                uses = count_uses(needing.values(), {**edges, **{key: edge_of(param) for key, param in params.items()}})
                found.uses = {i: uses[i] for i in edges}
                for key, param in params.items():
                    # Eager mode adds up gradients one by one, those of other calls between them.
                    if uses[key] > sum(param is other for other in params.values()):
                        raise Refused(reference.name, f"it uses parameter {key} several times")
                gradients = []
                for index, leaf in needing.items():
                    with _disable_current_modes():
                        local = _zeros(leaf, found.output_grads[index], mesh)
                    ledger.begin(local, "grad out", index)
                    gradients.append(make_dtensor(local, mesh, found.output_grads[index], leaf.shape))
                for (key, _), grad in zip(leaves, _gradients(list(needing.values()), leaves, gradients)):
                    if isinstance(grad, DTensor):
                        (found.input_grads if key[0] == "grad in" else found.param_grads)[key[1]] = grad._spec
                        _check_gradient(reference.name, _of(given, key).placements, grad.placements)
                    if grad is not None:
                        ledger.note(key, grad)
        except Refused:
            raise
        except Exception as error:
            if reference.refused is not None:  # DTensor's dispatch may have raised another error over it.
                raise reference.refused from None
            # DebugMode has torch write the path of a redistribution as text, which torch cannot do for all strided shards.
            # Eager mode does not write it: the model is right.
            if any(f.f_code.co_name == "stringify_transform_infos" for f, _ in traceback.walk_tb(error.__traceback__)):
                raise Refused(reference.name, f"watching it raises {_type_and_line(error)}") from error
            raise Refused(reference.name, f"on trial, it raises {_type_and_line(error)}") from error
        given.note_written(reference.name)
    reference.finish(found)
    return found


def edge_of(tensor: torch.Tensor) -> tuple[Any, int]:
    """Where in autograd's graph the gradient of ``tensor`` goes."""
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def count_uses(outputs: Iterable[torch.Tensor], edges: dict[Any, tuple[Any, int]]) -> dict[Any, int]:
    """For each of ``edges``, by its key: how many gradients come together there, if backward begins at ``outputs``."""
    ends: dict[tuple[Any, int], int] = dict.fromkeys(edges.values(), 0)
    # A walk over the whole graph. It takes as long as the graph has nodes, so it is only done where calls are watched or tried.
    waiting = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        this = waiting.pop()
        # What leaves a static module names a parameter, to which it brings no gradient.
        functions = this.next_functions[: len(this.next_functions) - getattr(this, "witnesses", 0)]
        for node, index in functions:
            if (node, index) in ends:
                ends[node, index] += 1
            if node is not None and node not in seen:
                seen.add(node)
                waiting.append(node)
    return {key: ends[edge] for key, edge in edges.items()}


def _of(given: _Given, key: Any) -> Any:
    return given.args[key[1]] if key[0] == "grad in" else given.params[key[1]]


def _gradients(outputs: Sequence[Any], leaves: Sequence[Any], gradients: Sequence[Any]) -> Sequence[Any]:
    distinct = {id(tensor): tensor for _, tensor in leaves}
    # grad(), not backward(): nothing accumulates in the .grad of any tensor.
    found = torch.autograd.grad(outputs, list(distinct.values()), gradients, allow_unused=True)
    of = dict(zip(distinct, found))
    return [of[id(tensor)] for _, tensor in leaves]


def _zeros(tensor: Any, placements: PerDim, mesh: DeviceMesh) -> torch.Tensor:
    size, _ = ragged_extension.local_shape_and_global_offset(tensor.shape, mesh, placements, skip_offset=True)
    return torch.zeros(tuple(size), dtype=tensor.dtype, device=tensor.device)


def _check_outputs(name: str, outputs: Sequence[Any], given: _Given) -> None:
    for leaf in outputs:
        if isinstance(leaf, DTensor):
            if not is_even_dtensor(leaf):
                raise Refused(name, f"its output {_UNEVEN}")
            if not can_move(leaf.placements):
                raise Refused(name, f"its output is placed as {_tell(leaf.placements)}")
        elif isinstance(leaf, torch.Tensor):
            if leaf.requires_grad:
                raise Refused(name, "an output is a plain tensor with a gradient")
        elif hasattr(leaf, "__dict__") and not any(leaf is each for each in given.args):
            kind = type(leaf).__name__
            raise Refused(name, f"a {kind} enters or leaves it: static modules see tensors in tuples, lists and dicts only")


def _check_gradient(name: str, placements: Any, grads: PerDim) -> None:
    """Whether local autograd can compute with a gradient of these placements."""
    for placement, grad in zip(placements, grads):
        fits = grad.is_replicate() if isinstance(placement, Partial) else grad == placement
        if not (fits or (placement.is_replicate() and type(grad) is Partial and grad.reduce_op == "sum")):
            raise Refused(name, f"the gradient of a tensor under {_tell(placements)} is {_tell(grads)}: add a rule with grad=")


class _Reference(DebugMode):
    """Sees each op of the run on DTensors, those on their local tensors, and each redistribution, which it refuses."""

    def __init__(self, name: str, module: nn.Module, changes: Sequence[Redistribution], mesh: DeviceMesh) -> None:
        # Not that of DebugMode: it imports Inductor, which takes seconds of a user's first steps. Only these switches are read.
        TorchDispatchMode.__init__(self)
        self.record_torchfunction = self.record_nn_module = self.record_stack_trace = False
        self.supports_higher_order_operators = True
        self.name, self.ledger = name, Ledger(name)
        self.refused: Refused | None = None
        prefix = f"{name}." if name else ""
        self._names = {each: (prefix + inner if inner else name) for inner, each in module.named_modules()}
        self._module, self._mesh = module, mesh
        self._changes = [change for change in changes if change.boundary.module in self._names.values()]
        self._stack = [name]
        self._spans: dict[str, tuple[int, int]] = {}
        self._draws: dict[str, str] = {}
        self._islands: dict[nn.Module, Island] = {}
        self._shares: dict[str, tuple[int, ...]] = {}
        self._moves: dict[Redistribution, list[Any]] = {}
        self._op: Any = None
        self._args: Any = ()
        self._is_sharing = False
        self.leaves: set[int] = set()

    # -- what the run tells

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        handles = []
        for each in self._names:
            if each is not self._module:
                # The innermost hooks of each module: _enter runs after the boundaries of its entry, and _leave before those of
                # its exit. An island's DTensors are those that the module itself sees.
                handles.append(each.register_forward_pre_hook(self._enter, with_kwargs=True))
                handles.append(each.register_forward_hook(self._leave, prepend=True, always_call=True))
        for change in self._changes:
            change.observe = self._observer(change)
        start = next_sequence_number()
        self._spans[self.name] = (start, 2**62)
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()
            for change in self._changes:
                change.observe = None

    def finish(self, found: Found) -> None:
        """Tell what happened inside of the module.

        Raises:
            Refused: it draws random numbers, but not in a module of its own.
        """
        # DTensors flow through a module that draws. With parameters or modules of its own, it would be an eager part in the
        # middle of a static one.
        for name, reason in self._draws.items():
            module = next(each for each, known in self._names.items() if known == name)
            if module is self._module or next(_of_module(module), None) is not None:
                raise Refused(name, reason)
            found.islands[module] = self._islands[module]
        for change, records in self._moves.items():
            # A boundary that is passed several times in one forward has one move in a static call.
            if any(record != records[0] for record in records):
                raise Refused(self._names[self._module], f"{change.boundary.path} has other placements from call to call")
            given, wanted, grad = records[0]
            back = clean(given) if change.boundary.grad_dst is None else _spoken(change.boundary.grad_dst, given)
            found.moves[change] = Carry(self._mesh, given, wanted, grad, back)
        found.shares, found.draws = self._shares, dict(self._draws)

    def _refuse(self, module: str, reason: str) -> None:
        self.refused = self.refused or Refused(module, reason)
        raise self.refused

    # -- hooks

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        name = self._names[module]
        self._stack.append(name)
        self._spans.setdefault(name, (next_sequence_number(), 0))
        leaves = pytree.tree_leaves((args, kwargs))
        specs = [leaf._spec if isinstance(leaf, DTensor) else None for leaf in leaves]
        known = self._islands.get(module)
        if known is not None and known.inputs != specs:
            self._islands[module].inputs = []  # Of no use as an island: each call is another one.
            return
        island = self._islands.setdefault(module, Island(specs))
        self._note_grads(leaves, island.input_grads)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        name = self._stack.pop()
        self._spans[name] = (self._spans[name][0], next_sequence_number())
        leaves = pytree.tree_leaves(output)
        island = self._islands[module]
        island.outputs = [leaf._spec if isinstance(leaf, DTensor) else None for leaf in leaves]
        self._note_grads(leaves, island.output_grads)

    @staticmethod
    def _note_grads(leaves: Sequence[Any], grads: dict[int, PerDim]) -> None:
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, DTensor) and leaf.requires_grad:

                def note(grad: Any, index: int = index) -> None:
                    grads[index] = grad.placements

                leaf.register_hook(note)

    def _observer(self, change: Redistribution) -> Callable[..., None]:
        def note(given: PerDim, wanted: PerDim, result: DTensor) -> None:
            # The third is the placement of the gradient, which backward puts in. Until then, it is that of the result.
            record: list[Any] = [given, wanted, wanted]
            self._moves.setdefault(change, []).append(record)
            if not is_even_dtensor(result):
                self._refuse(change.boundary.module, f"a tensor at its boundary {_UNEVEN}")
            if result.requires_grad:
                result.register_hook(lambda grad: record.__setitem__(2, grad.placements))

        return note

    def _module_of_backward(self) -> str:
        """The innermost module whose forward made the node of autograd that runs now: nodes are numbered as they are made."""
        node = current_autograd_node()
        number = -1 if node is None else node._sequence_nr()
        around = [(stop - start, name) for name, (start, stop) in self._spans.items() if start <= number < stop]
        return min(around)[1] if around else self.name

    # -- ops

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and _draws(func, args, kwargs):
            self._draws.setdefault(self._stack[-1], f"{func} draws random numbers: those of one device need its placements")
        leaves = pytree.tree_leaves((args, kwargs))
        if any(isinstance(leaf, DTensor) for leaf in leaves):
            is_backward = self.ledger.is_backward
            if is_backward and torch.is_grad_enabled():
                self._refuse(self.name, _AGAIN)
            # What forward takes from elsewhere. In backward, saved tensors are other objects, and without gradients, views of
            # DTensors seem to need some.
            if (
                not is_backward
                and torch.is_grad_enabled()
                and any(_needs_grad(t) and t.is_leaf and id(t) not in self.leaves for t in leaves)
            ):
                self._refuse(self._stack[-1], _NOT_ITS_OWN)
            # For the redistribution that DTensor may announce next: by them, its cause has a name.
            self._op, self._args = func, args
            return NotImplemented  # DTensor runs it, and its local ops are seen here.
        try:
            return self.ledger.run(func, args, kwargs)
        except Refused as refused:
            self._refuse(self._stack[-1], refused.reason)

    def record_output_placements(self, output_spec: Any) -> None:
        """Nobody reads a log of it."""

    def record_redistribute_calls(self, arg: Any, src_placement: Any, dst_placement: Any, *rest: Any, **options: Any) -> Any:
        # DTensor calls this before it redistributes. A refusal here leaves nothing in flight.
        param = self._args[arg] if isinstance(arg, int) and arg < len(self._args) else None
        src, dst = (getattr(each, "placements", each) for each in (src_placement, dst_placement))
        if _becomes_pending(src, dst):
            key = next((k for k, t in self._params().items() if t is param), None)
            if key is not None:
                self._shares[key] = tuple([n for n, old, new in zip(self._mesh.shape, src, dst) if old != new])
                return self._sharing()
        if self._is_sharing or tuple(src) == tuple(dst):
            return contextlib.nullcontext()
        told = f"{_tell(src)}->{_tell(dst)}"
        if not self.ledger.is_backward:
            self._refuse(self._stack[-1], f"{self._op} redistributes {told}: add a rule that does it at a module's boundary")
        name = self._module_of_backward()
        self._refuse(name, f"in backward, {self._op} redistributes {told}: add a rule with grad= or grad_dst=")

    @contextlib.contextmanager
    def _sharing(self) -> Iterator[None]:
        """What carries it out tells it again."""
        self._is_sharing = True
        try:
            yield
        finally:
            self._is_sharing = False

    def _params(self) -> dict[str, Any]:
        found = {}
        for inner, each in self._module.named_modules():
            for key in each._parameters:
                if key in vars(each):
                    found[f"{inner}.{key}" if inner else key] = vars(each)[key]
        return found


def _of_module(module: nn.Module) -> Iterator[Any]:
    """What a module has: submodules, parameters, buffers."""
    yield from module.children()
    yield from module.parameters()
    yield from module.buffers()


def _becomes_pending(src: Any, dst: Any) -> bool:
    """Whether a whole tensor becomes one that is pending a sum, without communication."""
    pairs = [(a, b) for a, b in zip(src, dst) if a != b]
    return bool(pairs) and all(a.is_replicate() and type(b) is Partial and b.reduce_op == "sum" for a, b in pairs)


def _draws(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a random op draws here: attention does for its dropout only."""
    position = next((i for i, argument in enumerate(func._schema.arguments) if argument.name == "dropout_p"), None)
    if position is None:
        return True
    return bool(args[position] if position < len(args) else kwargs.get("dropout_p", 0))


def _spoken(told: Sequence[Any], default: PerDim) -> PerDim:
    return tuple([new or old for new, old in zip(told, clean(default))])


def _type_and_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)}".splitlines()[0].removesuffix(": ")


# -- the run on local tensors ----------------------------------------------------------------------------------------------


class _Local(TorchDispatchMode):
    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(leaf, DTensor) for leaf in pytree.tree_leaves((args, kwargs))):
            return NotImplemented  # In an island: DTensor runs it, and its local ops are seen here.
        return self._ledger.run(func, args, kwargs or {})


def _run_locally(
    name: str, module: nn.Module, ledger: Ledger, given: _Given, found: Found, run_local: Callable[..., Any], only: bool
) -> None:
    where = "forward"
    try:
        # Parameters come by run_local, which binds them as a static call does.
        with _Local(ledger), standing_in(module, given.buffers), _carrying(ledger):
            outputs = pytree.tree_leaves(run_local(found, given.args, given.params))
            if len(outputs) != len(found.outputs) or any(isinstance(leaf, DTensor) for leaf in outputs):
                raise Refused(name, "on local tensors, it has other outputs")
            for index, leaf in enumerate(outputs):
                ledger.note(("out", index), leaf)
            where = "backward"
            needing = {i: leaf for i, leaf in enumerate(outputs) if _needs_grad(leaf) and (i in found.output_grads or not only)}
            if set(needing) != set(found.output_grads):
                raise Refused(name, "on local tensors, other outputs have gradients")
            leaves = given.leaves()
            if needing and leaves:
                gradients = []
                for index, leaf in needing.items():
                    with _disable_current_modes():
                        # Without the mode that keeps the ledger: these zeros stand for what arrives, and get an expression of
                        # their own.
                        gradients.append(torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device))
                    ledger.begin(gradients[-1], "grad out", index)
                for (key, _), grad in zip(leaves, _gradients(list(needing.values()), leaves, gradients)):
                    if grad is not None:
                        ledger.note(key, grad)
            given.note_written(name)
    except Refused:
        raise
    except Exception as error:
        raise Refused(name, f"on local tensors, its {where} raises {_type_and_line(error)}") from error
