"""``CollectiveRecorder``: which collectives a step issues, and what causes each, while tensors have no memory.

It must not know plans: boundaries and units tell it when they begin and end.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
from collections.abc import Iterator
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torch_ragged._register._torch import current_autograd_node, makes_fakes, next_sequence_number, process_groups
from torch_ragged.fsdp.comm._collectives import Collectives, Work, WrappedCollectives
from torch_ragged.spmd._explained import Collective

__all__ = ["CollectiveRecorder", "UnitCollectives"]

_KIND_OF_OP = {
    "allgather": "all-gather",
    "reducescatter": "reduce-scatter",
    "allreduce": "all-reduce",
    "alltoall": "all-to-all",
    "sharddimalltoall": "all-to-all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
}
"""By the beginning of an operator's name, without underscores. Longer beginnings come first."""

_CPU_ATTENTION_OP = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


class CollectiveRecorder(TorchDispatchMode):
    """Records the collectives of the code inside of its ``with`` block.

    Floating-point tensors that the code makes are fake: they have a shape, and no memory. Integers and bools are real, so a
    model may read them, as masks and positions. What is computed from a fake tensor is fake.

    A collective in backward is attributed by the node of the graph that runs: nodes have sequence numbers, and the recorder
    notes at which number forward enters and leaves modules and boundaries.

    Args:
        mesh: the mesh of the model.

    Attributes:
        fake: the mode of the fake tensors.
        collectives: what was recorded, in order.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.collectives: list[Collective] = []
        self._dims_of_ranks = _dims_of_ranks(mesh)
        self._dims_of_group: dict[str, tuple[str, ...]] = {}
        self._modules: list[str] = []
        self._boundary = ""
        self._unit: Optional[str] = None
        self._op: Optional[str] = None
        self._enters_op = False
        self._numbers: list[int] = []  # Of nodes, where the module or the boundary changes; and these two from there on.
        self._places: list[tuple[str, str]] = []
        self._parameters: dict[int, tuple[nn.Parameter, str]] = {}
        self._model: Optional[nn.Module] = None

    def watch(self, model: nn.Module) -> None:
        """Note when the modules of ``model`` begin and end. Call it when all other hooks are registered."""
        self._model = model
        for name, module in model.named_modules():
            # First in, last out: collectives of boundaries and units at the entry and exit of a module belong to it.
            module.register_forward_pre_hook(lambda *_, name=name: self._enter(name), prepend=True)
            # Also after an error, with which activation checkpointing ends a call that it runs again.
            module.register_forward_hook(lambda *_: self._leave(), always_call=True)

    @contextlib.contextmanager
    def boundary(self, path: str) -> Iterator[None]:
        """Collectives inside are those of a boundary."""
        self._boundary = path
        self._note_place()
        try:
            yield
        finally:
            self._boundary = ""
            self._note_place()

    @contextlib.contextmanager
    def unit(self, name: str) -> Iterator[None]:
        """Collectives inside are those of a unit."""
        before, self._unit = self._unit, name
        try:
            yield
        finally:
            self._unit = before

    def _enter(self, name: str) -> None:
        self._modules.append(name)
        self._note_place()

    def _leave(self) -> None:
        self._modules.pop()
        self._note_place()

    def _note_place(self) -> None:
        self._numbers.append(next_sequence_number())
        self._places.append((self._modules[-1] if self._modules else "", self._boundary))

    # -- ops -------------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(each, DTensor) for each in types):
            return self._of_dtensors(func, args, kwargs)
        result = self._computed(func, types, args, kwargs)
        if func.namespace in ("c10d", "_c10d_functional", "_dtensor"):
            self._note(func, args, kwargs, result)
        return result

    def _of_dtensors(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let DTensor compute ``func``. The collectives that it needs for that pass through this mode, too."""
        if self._enters_op:
            self._enters_op = False
            return NotImplemented  # DTensor's turn.
        before, self._op, self._enters_op = self._op, func._schema.name.replace("::", "."), True
        try:
            with self:
                # torch leaves a mode while its handler runs. Entered again, it sees the local ops and collectives of DTensor's
                # dispatch.
                return func(*args, **kwargs)
        finally:
            self._op, self._enters_op = before, False

    def _computed(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if makes_fakes():
            return func(*args, **kwargs)
        if not any(isinstance(each, torch.Tensor) for each in tree_leaves((args, kwargs))):
            with self.fake:
                made = func(*args, **kwargs)
            if isinstance(made, torch.Tensor) and (made.is_floating_point() or made.is_complex()):
                return made
        result = func(*args, **kwargs)
        if func is _CPU_ATTENTION_OP and isinstance(result[0], FakeTensor):
            batch, heads, length, size = result[0].shape  # The kernel's memory is in this order, the fake's in the query's.
            return result[0].new_empty(batch, length, heads, size).transpose(1, 2), *result[1:]
        return result

    # -- collectives -----------------------------------------------------------------------------------------------------

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        name = func._overloadpacket.__name__.replace("_", "")
        kind = next((kind for start, kind in _KIND_OF_OP.items() if name.startswith(start)), None)
        dims = self._dims(func, args, kwargs)
        if kind is None or not dims:  # No collective, or one of a single rank.
            return
        # The larger of input and output: an all-gather is counted by what it makes, a reduce-scatter by what it takes.
        nbytes = max(each.nbytes for each in tree_leaves((args, kwargs, result)) if isinstance(each, torch.Tensor))
        node = current_autograd_node()
        is_forward = bool(self._modules)  # Also where activation checkpointing runs a module in backward.
        module, boundary = (self._modules[-1], self._boundary) if is_forward else self._place_of(node)
        phase = "forward" if is_forward and node is None else "backward"
        is_gradient = not is_forward and (node is None or "AccumulateGrad" in node.name())
        if self._unit is not None:
            found = ("unit", self._unit, self._unit, "")
        elif self._op is not None and not boundary:
            found = ("implicit", module, "", self._op)
        elif boundary:
            found = ("boundary", module, boundary, "")
        elif is_gradient:
            parameter = self._parameter_of(node)
            found = ("gradient", parameter.rpartition(".")[0], parameter, "")
        else:
            found = ("model", module, "", "")
        cause, module, source, op = found
        self.collectives.append(Collective(phase, kind, dims, nbytes, cause, module, source, op))

    def _dims(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, ...]:
        """The mesh dimensions of a collective's process group; () if it has one rank or none."""
        names = [argument.name for argument in func._schema.arguments]
        given = {**dict(zip(names, args)), **kwargs}
        group = next((given[name] for name in ("process_group", "group_name", "group") if name in given), None)
        if isinstance(group, torch.ScriptObject):
            group = dist.ProcessGroup.unbox(group)
        name: Any = getattr(group, "group_name", group)
        if name not in self._dims_of_group:
            for each in process_groups():
                ranks = frozenset(dist.get_process_group_ranks(each))
                self._dims_of_group[each.group_name] = self._dims_of_ranks.get(ranks, ())
        return self._dims_of_group.get(name, ())

    def _place_of(self, node: Any) -> tuple[str, str]:
        """The module and the boundary that made a node of the graph."""
        # Autograd gives an accumulator of gradients the highest number: it tells nothing of a module.
        if node is None or "AccumulateGrad" in node.name():
            return "", ""
        # The last change of place before the node was made. Numbers ascend, as forward runs in one thread.
        index = bisect.bisect_right(self._numbers, node._sequence_nr()) - 1
        return self._places[index] if index >= 0 else ("", "")

    def _parameter_of(self, node: Any) -> str:
        """The name of the parameter whose gradient a node accumulates; empty for the reductions at the end of backward."""
        if node is None or self._model is None:
            return ""
        if id(node.variable) not in self._parameters:
            # Units register other parameters while they are unsharded: therefore asked again. They are kept, so that no other
            # object gets their id.
            self._parameters.update({id(param): (param, name) for name, param in self._model.named_parameters()})
        return self._parameters.get(id(node.variable), (None, ""))[1]


def _dims_of_ranks(mesh: DeviceMesh) -> dict[frozenset[int], tuple[str, ...]]:
    """The mesh dimensions by the ranks of this rank's group over them, of groups with two ranks or more."""
    names: Any = mesh.mesh_dim_names
    coordinate: Any = mesh.get_coordinate()
    several = [dim for dim in range(mesh.ndim) if mesh.size(dim) > 1]
    found: dict[frozenset[int], tuple[str, ...]] = {}
    for count in range(1, len(several) + 1):
        for dims in itertools.combinations(several, count):
            # This rank's group only: explain runs as rank 0, and all groups of one set of mesh dimensions do the same.
            index = tuple([slice(None) if dim in dims else coordinate[dim] for dim in range(mesh.ndim)])
            found[frozenset(mesh.mesh[index].flatten().tolist())] = tuple([names[dim] for dim in dims])
    return found


class UnitCollectives(WrappedCollectives):
    """The collectives of a unit, which tell ``recorder`` that they are.

    Args:
        inner: what carries them.
        name: the name of the unit's module; "" is the root.
    """

    def __init__(self, inner: Collectives, recorder: CollectiveRecorder, name: str) -> None:
        super().__init__(inner)
        self._recorder, self._name = recorder, name

    def issue(self, name: str, largest: torch.Tensor, *arguments: Any) -> Work:
        with self._recorder.unit(self._name):
            return super().issue(name, largest, *arguments)
