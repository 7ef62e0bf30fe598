"""Inputs of a parallelized model: ranks compare them. In another form than the plan says, they would train it wrong in silence.

It must not change an argument: the hooks of ``_boundary``, which run after this one, make DTensors of them.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from torch_ragged._ranks.comparison import Comparison
from torch_ragged._register._torch import dynamo_disabled, is_wrapper, local_tensor, makes_fakes, no_dispatch
from torch_ragged.spmd._boundary import entries_of, entry_of
from torch_ragged.spmd._paths import Key
from torch_ragged.spmd._resolved import Boundary, activation_text
from torch_ragged.tensor._local_tensor import LocalTensor, coordinates_of
from torch_ragged.tensor._random import scope
from torch_ragged.tensor._redistribute import mesh_group

__all__ = ["compare_inputs"]

_PLAIN_INPUTS = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type(None))


def compare_inputs(model: nn.Module, boundaries: Sequence[Boundary], mesh: DeviceMesh, every: int) -> None:
    """Register the hooks that compare what ranks pass to ``model``, before all other hooks of it.

    Args:
        boundaries: of the plan. Inputs may differ along the mesh dimensions on which they are annotated as other than whole.
        every: see :class:`Comparison`. If ranks pass rows of their own, they compare at each call: the numbers of rows, which
            must be equal, say how large the whole batch is.
    """
    hook = _InputComparison(model, [each for each in boundaries if (each.module, each.side) == ("", "in")], mesh, every)
    model.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
    model.register_forward_hook(hook.leave, always_call=True)


class _InputComparison(Comparison):
    def __init__(self, model: nn.Module, boundaries: Sequence[Boundary], mesh: DeviceMesh, every: int) -> None:
        names = mesh.mesh_dim_names or ()
        group = functools.partial(mesh_group, mesh, tuple(range(mesh.ndim)))
        super().__init__(f"the calls of {type(model).__name__}", group, coordinates_of(mesh), names, mesh.device_type, every)
        self._mesh, self._boundaries, self._uneven = mesh, boundaries, ""
        self._arguments = _positional_arguments(model)
        self._dims: dict[Key, int] = {}  # Along which mesh dimensions an input may differ.
        for each in boundaries:
            told = each.placements if each.action == "annotate" else each.src or ()
            dims = sum(1 << dim for dim, placement in enumerate(told) if placement not in (None, Replicate()))
            if dims:
                self._dims[each.key] = self._dims.get(each.key, 0) | dims
        self._known: dict[Key, tuple[str, str]] = {}

    @dynamo_disabled
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        rest = enumerate(args[len(self._arguments) :], len(self._arguments))
        given: list[tuple[str | int, Any]] = [*zip(self._arguments, args), *rest, *kwargs.items()]
        leaves = [leaf for name, value in given for leaf in _leaves(value, (name,))]
        if makes_fakes() or any(_is_simulated(value) for _, value in leaves):
            return
        # Draws in this call need no comparison of their own, which would be an all-reduce each: the generators are compared
        # here.
        scope.is_compared, self._uneven = True, ""
        # By the number of calls alone, so that all ranks compare in the same calls.
        is_due = self.begin_call()
        with no_dispatch():  # Modes that count or record a step see what the plan does in it.
            self.note_generator()
            mode = f"training={module.training}, gradients={torch.is_grad_enabled()}"
            self.note("the mode of the model", mode, "Set it equally on all ranks")
            dims_of = dict(self._dims)
            for key, value in leaves:
                # A rule of a container means the first tensor in it.
                is_tensor = isinstance(value, torch.Tensor)
                told = [each for each in dims_of if is_tensor and key[: len(each)] == each]
                self._note_argument(key, value, sum(dims_of.pop(each) for each in told))
            # The host waits here, before anything of the model runs: rows that do not fit would make collectives of other
            # sizes.
            if is_due or self._dims:
                self.compare()

    def _note_argument(self, key: Key, value: Any, dims: int) -> None:
        name, advice = self._texts_of(key)
        if not isinstance(value, torch.Tensor):
            text = repr(value) if isinstance(value, _PLAIN_INPUTS) else f"a {type(value).__qualname__}"
            self.note(name, text, "Pass equal values on all ranks")
            return
        text = f"of shape {tuple(value.shape)} and {value.dtype}{', with a gradient' if value.requires_grad else ''}"
        local: torch.Tensor | None = value
        if isinstance(value, DTensor):
            text += f", placed as {value.placements}"
            local = local_tensor(value) if value.device_mesh == self._mesh else None
            dims = sum(1 << dim for dim, placement in enumerate(value.placements) if not placement.is_replicate())
        # Their bytes are not in one storage, so only their description is compared.
        elif is_wrapper(value) or value.layout != torch.strided:
            local = None
        self.note(name, text, advice, local, dims)
        for each in self._boundaries:
            for dim, placement in enumerate(each.placements if each.key == key and each.action == "shard" else ()):
                ranks = self._mesh.size(dim)
                is_dim = isinstance(placement, Shard) and -value.ndim <= placement.dim < value.ndim
                rows = value.shape[placement.dim] if is_dim and not dims >> dim & 1 else 0  # type: ignore[union-attr]
                # Not an error by itself: most ops take uneven parts. If one raises, the error names the input (leave).
                if rows % ranks:
                    self._uneven += f"{name} has {rows} rows, {self._dim_names[dim]} has {ranks} ranks. "

    def _texts_of(self, key: Key) -> tuple[str, str]:
        """The path of an argument, and the two forms in which a plan takes it."""
        if key not in self._known:
            path, mentioned = activation_text("", "in", key), [each for each in self._boundaries if each.key == key]
            cut = [dim for each in mentioned for dim, p in zip(self._dim_names, each.placements) if isinstance(p, Shard)]
            dim = f'"{(cut or self._dim_names)[0]}"'
            advice = (
                f'Pass the whole batch on every rank: plan.shard("{path}", Shard(0), {dim}) takes the rows of each rank. Or '
                f'pass own rows, equally many on each rank (drop_last=True): plan.own_rows("{path}", {dim})'
            )
            if any(key[: len(each)] == each for each in self._dims):
                advice = (
                    f"Its rows are own ones: along {dim}, pass equally many on each rank (drop_last=True), padded to one "
                    "length; along other mesh dimensions, equal ones"
                )
            self._known[key] = f"`{path}`", advice
        return self._known[key]

    def note_generator(self, when: str = "") -> None:
        """Note its state, once it has drawn for this mesh: ranks of a model that draws nothing may have seeds of their own."""
        if scope.has_drawn(self._mesh):
            super().note_generator(when)

    @dynamo_disabled
    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """After forward. If it has raised because the parts of an input are uneven, its error begins with the input."""
        # Also after an error (always_call): draws outside of the model are compared by themselves.
        scope.is_compared = False
        error = sys.exc_info()[1]
        if output is None and error is not None and self._uneven and "uneven" in str(error):
            advice = "The plan cuts the whole batch (plan.shard): use drop_last=True, or pass own rows (plan.own_rows)"
            error.args = (f"{self._uneven}{advice}: {error}",)
            self._uneven = ""  # Static mode calls the model within a call.


def _positional_arguments(model: nn.Module) -> list[str]:
    """The names of the arguments of ``forward`` that can be passed by position, in order."""
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):  # A forward that is not Python's.
        return []
    return [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]


def _leaves(value: Any, key: Key) -> Iterator[tuple[Key, Any]]:
    """The values in an argument that are no containers, with their paths."""
    inner = [] if isinstance(value, torch.Tensor) else entries_of(value)
    for each in inner:
        yield from _leaves(entry_of(value, each), (*key, each))
    if not inner:
        yield key, value


def _is_simulated(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_meta or isinstance(value, LocalTensor))
