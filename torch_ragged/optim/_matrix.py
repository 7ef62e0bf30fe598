"""The base class of optimizers that compute with whole matrices: groups, the step through the roots, AdamW for the rest.

A subclass must not communicate: :class:`MatrixOptimizer` issues all collectives, equal on all ranks.
"""

from __future__ import annotations

import dataclasses
import itertools
import numbers
from collections.abc import Callable, Collection, Generator, Hashable, Sequence
from typing import Any, Optional

import torch
from torch.distributed.device_mesh import DeviceMesh

from torch_ragged.optim._base import (
    RaggedOptimizer,
    adamw_step,
    agree_on_gradients,
    by_mesh,
    check_capture,
    check_numbers,
    check_placement,
    check_warm,
    groups_on_host,
    mesh_of,
    names_peers,
    placed_of,
    run_closure,
)
from torch_ragged.optim._gather import Batch, GatherToRoot, Placed, mesh_ranks, owners_of, shares_of
from torch_ragged.optim._matrix_groups import MATRIX_NDIMS, check_segments
from torch_ragged.optim._roots import Stack, assign_roots, split_flights

__all__ = ["MatrixOptimizer", "StatesOf"]

StatesOf = Callable[[torch.Tensor, dict[str, Any], Optional[int]], dict[str, Any]]
"""``(parameter, its group, index) -> states`` that a step reads and writes next. They are valid until the next call.

Without an index, those that have the placements of the parameter. With one, views of those of a matrix: ``index`` counts the
matrices of the parameter whose root is this rank.
"""


class MatrixOptimizer(RaggedOptimizer):
    """An optimizer that computes with whole matrices at their roots. A subclass defines the computation and its cost.

    A group has an ``algorithm``. If this is the subclass's ``algorithm``, its parameters must have two dimensions (matrices),
    or three or four (stacks of matrices). If it is ``"adamw"``, its parameters may have any shape.
    """

    algorithm: str
    wire: torch.dtype
    takes_segments = False
    has_states_at_roots = False  # Whether the states that ``fsdp.offloaded`` keeps elsewhere are those at the roots.
    _knobs = ("max_root_bytes", "check_gradients")

    def __init__(self, params: Any, defaults: dict[str, Any], max_root_bytes: Optional[int], check_gradients: bool) -> None:
        if max_root_bytes is not None and (not isinstance(max_root_bytes, numbers.Real) or max_root_bytes < 1):
            raise ValueError(f"{type(self).__name__} max_root_bytes must be a positive number or None, got {max_root_bytes!r}")
        self.max_root_bytes, self.check_gradients = max_root_bytes, check_gradients
        # Before the base class, whose constructor adds groups: that looks at plans.
        self._forget_plans()
        super().__init__(params, {**defaults, "algorithm": defaults.get("algorithm", self.algorithm)})

    # -- methods of a subclass -------------------------------------------------------------------------------------

    def _kind(self, group: dict[str, Any]) -> Hashable:
        """The options of a group that matrices of one batch must share."""
        raise NotImplementedError

    def _cost(self, rows: int, columns: int, group: dict[str, Any]) -> float:
        """The cost of the computation with one matrix, in any unit. Equal on all ranks, since roots are chosen by it."""
        raise NotImplementedError

    def init_states(self, param: torch.Tensor, group: dict[str, Any], elsewhere: Collection[str] = ()) -> None:
        """Make the states of a parameter that are missing, but for those that lie ``elsewhere``. Ranks call it in one order."""
        raise NotImplementedError

    def _send(self, param: torch.Tensor, group: dict[str, Any], gradient: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        """The local part of the tensor to gather at the root; updates local states, such as the momentum."""
        raise NotImplementedError

    def _compute(
        self, batch: Batch, matrices: torch.Tensor, params: Sequence[torch.Tensor], states_of: StatesOf
    ) -> torch.Tensor:
        """At the root: the updates of a batch of matrices. ``spot.stack`` is an index into ``params``."""
        raise NotImplementedError

    def _share(self, batch: Batch, matrices: torch.Tensor) -> Generator[torch.Tensor, None, torch.Tensor]:
        """At each of the ranks that share a matrix: the update, of which this rank computes ``batch.rows``."""
        raise NotImplementedError

    def _receive(self, param: torch.Tensor, group: dict[str, Any], update: torch.Tensor) -> None:
        """Apply ``update``, the flat local part of the update, to the local tensor of the parameter."""
        raise NotImplementedError

    def _check_group(self, group: dict[str, Any]) -> None:
        """Raise ``ValueError`` if an option of the group is illegal. Its parameters are checked already."""
        raise NotImplementedError

    def _check_step(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        """Raise, on all ranks alike, if states do not fit to options. Nothing was sent or changed in this step."""

    # -- groups ----------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group. Raises ``ValueError`` as the constructor does, without a change of the optimizer."""
        group, name = {**self.defaults, **param_group}, type(self).__name__
        given = group["params"]
        group["params"] = [given] if isinstance(given, torch.Tensor) else list(given)
        self._check_algorithm(group["algorithm"])
        check_numbers(name, group, "lr", "weight_decay", "eps", "adamw_eps")
        for entry in group["params"]:
            self._check_param(entry[1] if isinstance(entry, tuple) else entry, group["algorithm"], group.get("segments"))
        self._check_group(group)
        super().add_param_group({**param_group, "params": group["params"]})
        self._plans.clear()
        self._foreseen.clear()

    def _check_algorithm(self, algorithm: Any) -> None:
        if algorithm not in (self.algorithm, "adamw"):
            raise ValueError(f"{type(self).__name__} algorithm must be {self.algorithm!r} or 'adamw', got {algorithm!r}")

    def _follows_dtype(self, group: dict[str, Any], name: str) -> bool:
        return group["algorithm"] != self.algorithm and super()._follows_dtype(group, name)

    def _check_states(self, state_dict: dict[str, Any]) -> None:
        for group in state_dict["param_groups"]:
            self._check_algorithm(group.get("algorithm", self.algorithm))
        super()._check_states(state_dict)

    def _check_param(self, param: Any, algorithm: str, segments: Any = None) -> None:
        name = type(self).__name__
        if not isinstance(param, torch.Tensor):
            return  # The base class raises an error that names the type.
        check_placement(param, name)
        if param.is_complex():
            raise ValueError(f"{name} got a complex parameter of shape {tuple(param.shape)}: expected a real dtype")
        if algorithm != "adamw" and param.ndim not in MATRIX_NDIMS:
            raise ValueError(
                f"{name} takes matrices (two dimensions) or stacks of matrices (three or four), got a parameter of shape "
                f'{tuple(param.shape)}: put it into a group with algorithm="adamw", for example with matrix_groups(model)'
            )
        if segments is not None and algorithm != "adamw":
            self._check_segments(tuple(param.shape), segments)

    def _check_segments(self, shape: tuple[int, ...], segments: Any) -> None:
        name, ndim = type(self).__name__, len(shape)
        if not self.takes_segments:
            raise ValueError(f"{name} takes no segments: leave them out, and each parameter is one matrix")
        check_segments(f"{name} segments", segments)
        sizes, dim = segments
        if dim % ndim < ndim - 2 or not -ndim <= dim < ndim or min(sizes) < 1 or sum(sizes) != shape[dim]:
            raise ValueError(
                f"{name} got segments of {', '.join(map(str, sizes))} along dimension {dim} for a parameter of shape {shape}: "
                "give positive sizes that add up to its rows or columns"
            )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget_plans()

    def _forget_plans(self) -> None:
        """Drop all plans. They hold process groups, which cannot be pickled; the next step makes new plans."""
        self._plans: dict[Any, GatherToRoot] = {}
        # For each part of a parameter, the roots of its matrices and the number of ranks that share each.
        self._roots: dict[torch.Tensor, list[tuple[tuple[int, ...], int]]] = {}
        self._foreseen: dict[torch.Tensor, list[tuple[tuple[int, ...], int]]] = {}  # Roots of a next step, for predictions.

    # -- the step --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    @names_peers
    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        """One step. Every rank of the parameters' meshes must call it.

        Returns:
            the loss of ``closure``; None without a closure.

        Raises:
            PeerError: another rank died, or did not call it.
            RuntimeError: a gradient is sparse; or it is missing on some ranks and has other placements than its parameter on
                other ranks. Every rank raises it, and nothing is changed. Or a CUDA graph captures the step, and it is not
                capturable, ranks agree on gradients, or a parameter was not stepped before.
        """
        meshes = {mesh_of(param) for group in self.param_groups for param in group["params"]}
        agrees = self.check_gradients and any(mesh is not None and mesh.size() > 1 for mesh in meshes)
        is_captured = check_capture(
            self, "ranks agree on gradients, which the host reads: set check_gradients=False" if agrees else None
        )
        loss = run_closure(closure)
        groups = groups_on_host(self)
        entries = [(param, group) for group in groups for param in group["params"]]
        gradients = self._step_matrices(entries, self.states_of, is_captured=is_captured)
        # No collective from here on: a rank that is late here delays no other one in this step.
        start = 0
        for group in groups:
            stop = start + len(group["params"])
            if group["algorithm"] == "adamw":
                adamw_step(self, group, group["params"], gradients[start:stop], eps=group["adamw_eps"])
            start = stop
        return loss

    @torch.no_grad()
    @names_peers
    def step_matrices(
        self, params: Collection[torch.Tensor], states_of: StatesOf, *, check_gradients: bool = True
    ) -> list[torch.Tensor]:
        """A part of a step: of the matrices among ``params``, whose states need not lie in this optimizer.

        A step in such parts has the bits of :meth:`step`. Every rank of the parameters' meshes must call it.

        Args:
            params: parameters of this optimizer, equal on all ranks; also those of AdamW, for the agreement on gradients.
            states_of: brings the states; :attr:`states_of` is the one of :meth:`step`.
            check_gradients: whether ranks agree on gradients, if the optimizer's own ``check_gradients`` is True, too.

        Returns:
            AdamW's parameters that have a gradient on other ranks only: it counts as zero on this one.
        """
        entries = [(param, group) for group in groups_on_host(self) for param in group["params"]]
        gradients = self._step_matrices(entries, states_of, params, check_gradients)
        return [
            param
            for (param, group), gradient in zip(entries, gradients)
            if group["algorithm"] == "adamw" and gradient is not None and param.grad is None
        ]

    def states_of(self, param: torch.Tensor, group: dict[str, Any], index: Optional[int]) -> dict[str, Any]:
        """The states that lie in this optimizer: see :data:`StatesOf`."""
        assert index is None, "this optimizer has no states at roots"
        self.init_states(param, group)
        return self.state[param]

    def _step_matrices(
        self,
        entries: list[Any],
        states_of: StatesOf,
        chosen: Optional[Collection[torch.Tensor]] = None,
        check_gradients: bool = True,
        is_captured: bool = False,
    ) -> list[torch.Tensor | None]:
        """Step the matrices. Returns the local gradients of ``entries``; None for parameters that are not ``chosen``."""
        params = [param for param, _ in entries]
        matrices = [i for i, (_, group) in enumerate(entries) if group["algorithm"] == self.algorithm]
        # Before the first collective. It looks at options and at the shapes of states, which ranks have in common: all of them
        # raise, or none.
        for i in matrices:
            self._check_step(*entries[i])
        stepped = [i for i, param in enumerate(params) if chosen is None or param in chosen]
        agreed = None if check_gradients and self.check_gradients else ()
        found = dict(zip(stepped, agree_on_gradients([params[i] for i in stepped], agreed)))
        gradients = [found.get(i) for i in range(len(params))]
        if is_captured:
            check_warm(self, (param for param, gradient in zip(params, gradients) if gradient is not None))
        # One mesh after another, in the order of parameters: ranks that share several meshes meet in the same order. Not known:
        # whether transfers of one mesh could hide behind the computation of another one.
        for mesh, of_mesh in by_mesh([params[i] for i in matrices]):
            indices = [matrices[i] for i in of_mesh]
            # Equal on all ranks of the mesh: they have agreed on gradients or, without check_gradients, have them all or none.
            # A rank with another set would make another plan, and the all-to-alls would hang or mix elements.
            present = [i for i in indices if gradients[i] is not None]
            if present:
                self._matrix_step(indices, present, entries, gradients, mesh, states_of)
        return gradients

    def _matrix_step(
        self,
        indices: list[int],
        present: list[int],
        entries: list[Any],
        gradients: list[Any],
        mesh: DeviceMesh | None,
        states_of: StatesOf,
    ) -> None:
        """Step the matrix parameters of one mesh that have gradients: ``present``, a subset of ``indices``."""
        plan = self._plan(indices, present, entries, mesh)
        params, groups = [entries[i][0] for i in present], [entries[i][1] for i in present]
        # Momentum changes here, before anything is sent. If a transfer fails after it, this step cannot be repeated with the
        # same result.
        inputs = [
            self._send(param, group, gradients[i], states_of(param, group, None))
            for param, group, i in zip(params, groups, present)
        ]
        of_stacks = [params[index] for index in plan.tensors]
        device = inputs[0].device
        updates = plan.run(
            inputs, lambda batch, data: self._compute(batch, data, of_stacks, states_of), self._share, self.wire, device
        )
        # With Nesterov's momentum they are new memory of the size of the shards. The updates come beside it.
        del inputs
        for param, group, update in zip(params, groups, updates):
            self._receive(param, group, update)

    def _plan(self, indices: list[int], present: list[int], entries: list[Any], mesh: DeviceMesh | None) -> GatherToRoot:
        stack_groups = [(entries[i][0], entries[i][1]) for i in indices]
        # What may change between steps: the gradients that exist, and the options that a batch depends on. Assumed:
        # max_root_bytes and flops_per_byte do not change, as a known plan stays with old values.
        key = (mesh, tuple(present), tuple((self._kind(group), _segments_option(group)) for _, group in stack_groups))
        if key in self._plans:
            return self._plans[key]
        self._assign(indices, present, entries, mesh)
        parts = [self._parts(*entries[i]) for i in present]
        tensors = [index for index, of_param in enumerate(parts) for _ in of_param]
        placed = [part for of_param in parts for part in of_param]
        chosen = [of_part for i in present for of_part in self._roots[entries[i][0]]]
        stacks = [
            dataclasses.replace(self._stack(part, entries[present[index]][1]), split=split)
            for index, part, (_, split) in zip(tensors, placed, chosen)
        ]
        roots = [of_part for of_part, _ in chosen]
        flights = split_flights(stacks, roots, self.wire.itemsize, self.max_root_bytes)
        # Each set of parameters with gradients has a plan: bound their memory. A step in backward has one for each group.
        if len(self._plans) >= max(16, len(indices)):
            self._plans.clear()
        self._plans[key] = GatherToRoot(stacks, placed, tensors, roots, flights, mesh)
        return self._plans[key]

    def _assign(self, indices: list[int], present: list[int], entries: list[Any], mesh: DeviceMesh | None) -> None:
        """Choose the roots of the parameters with gradients, so that ranks have nearly equal work in this step."""
        self._set_roots([entries[i] for i in present], mesh)

    def _set_roots(self, entries: Sequence[Any], mesh: DeviceMesh | None) -> None:
        """Choose the roots of the matrices of parameters; those of segments one behind the other."""
        pairs = [(param, self._stack(part, group)) for param, group in entries for part in self._parts(param, group)]
        # Of all parameters of the mesh, also of AdamW's: a share says how much memory a rank has for states of all
        # of them, and this step may update only some.
        every = [placed_of(param) for group in self.param_groups for param in group["params"] if mesh_of(param) == mesh]
        roots = assign_roots([stack for _, stack in pairs], mesh_ranks(mesh)[1], shares_of(every))
        self._roots.update({param: [] for param, _ in entries})
        for (param, _), chosen, split in zip(pairs, roots.of, roots.splits):
            self._roots[param].append((chosen, split))

    def _parts(self, param: torch.Tensor, group: dict[str, Any]) -> list[Placed]:
        """The parameter, or each of its segments."""
        placed, segments = placed_of(param), _segments_option(group)
        if segments is None:
            return [placed]
        sizes, dim = segments
        starts = itertools.accumulate(sizes, initial=0)
        return [dataclasses.replace(placed, segment=(dim % param.ndim, start, size)) for start, size in zip(starts, sizes)]

    def _stack(self, placed: Placed, group: dict[str, Any]) -> Stack:
        rows, columns = placed.matrices[-2:]
        return Stack(placed.matrices, self._cost(rows, columns, group), owners_of(placed), self._kind(group))


def _segments_option(group: dict[str, Any]) -> tuple[tuple[int, ...], int] | None:
    """The segments of a group. One of a checkpoint may have lists, or no segments at all."""
    segments = group.get("segments")
    return None if segments is None else (tuple(segments[0]), segments[1])
