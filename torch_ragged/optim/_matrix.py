"""What optimizers of whole matrices share: groups, the way of a step through the roots, AdamW for everything else."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Optional

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torch_ragged.optim._base import (
    RaggedOptimizer,
    adamw_step,
    agree_on_gradients,
    by_mesh,
    check_placement,
    placed_of,
    run_closure,
)
from torch_ragged.optim._gather import Batch, GatherToRoot, mesh_ranks, owners_of
from torch_ragged.optim._roots import Stack, assign_roots, split_flights

__all__ = ["MatrixOptimizer", "matrix_groups"]


def matrix_groups(
    model: nn.Module, *, adamw: Iterable[nn.Module | nn.Parameter] = (), **adamw_options: Any
) -> list[dict[str, Any]]:
    """Parameter groups for :class:`Muon` and :class:`Shampoo`: matrices to them; embeddings, vectors and ``adamw`` to AdamW.

    Args:
        model: whose parameters are split; call it after ``fully_shard``.
        adamw: modules (the output head, say) and parameters (biases of fused experts) that AdamW trains as well.
        adamw_options: options of the AdamW group, such as ``lr``.
    """
    apart: set[nn.Parameter] = set()
    for each in (*adamw, *(module for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag)))):
        apart.update(each.parameters() if isinstance(each, nn.Module) else [each])
    params = list(model.parameters())
    is_matrix = [param.ndim in (2, 3) and param not in apart for param in params]
    groups = [
        {"params": [p for p, flag in zip(params, is_matrix) if flag]},
        {"params": [p for p, flag in zip(params, is_matrix) if not flag], "algorithm": "adamw", **adamw_options},
    ]
    return [group for group in groups if group["params"]]


class MatrixOptimizer(RaggedOptimizer):
    """An optimizer that computes with whole matrices at their roots; a subclass adds what is computed and what it costs.

    Groups whose ``algorithm`` is the subclass's own hold parameters of two dimensions (matrices) or three (stacks of them);
    groups with ``"adamw"`` hold any.
    """

    algorithm: str
    wire: torch.dtype
    _knobs = ("max_root_bytes", "check_gradients")

    def __init__(self, params: Any, defaults: dict[str, Any], max_root_bytes: Optional[int], check_gradients: bool) -> None:
        if max_root_bytes is not None and max_root_bytes < 1:
            raise ValueError(f"{type(self).__name__} max_root_bytes must be a positive number or None, got {max_root_bytes!r}")
        self.max_root_bytes, self.check_gradients = max_root_bytes, check_gradients
        self._forget_plans()
        super().__init__(params, {**defaults, "algorithm": defaults.get("algorithm", self.algorithm)})

    # -- what a subclass adds --------------------------------------------------------------------------------------

    def _kind(self, group: dict[str, Any]) -> Hashable:
        """What matrices that are computed in one batch have in common."""
        raise NotImplementedError

    def _cost(self, rows: int, columns: int, group: dict[str, Any]) -> float:
        """Of the computation with one matrix, in any unit."""
        raise NotImplementedError

    def _send(self, param: torch.Tensor, group: dict[str, Any], gradient: torch.Tensor) -> torch.Tensor:
        """This rank's part of what the root is to get of a parameter."""
        raise NotImplementedError

    def _compute(self, batch: Batch, matrices: torch.Tensor, params: Sequence[torch.Tensor]) -> torch.Tensor:
        """At the root: the updates of a batch of matrices, whose spots name stacks by their place in ``params``."""
        raise NotImplementedError

    def _receive(self, param: torch.Tensor, group: dict[str, Any], update: torch.Tensor) -> None:
        """Apply this rank's part of the update, flat, to this rank's part of the parameter."""
        raise NotImplementedError

    def _check_group(self, group: dict[str, Any]) -> None:
        """Raise ``ValueError`` if an option of the group is out of range."""
        raise NotImplementedError

    # -- groups ----------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; raises ``ValueError`` as the constructor does, and leaves the optimizer as it was then."""
        group, name = {**self.defaults, **param_group}, type(self).__name__
        given = group["params"]
        group["params"] = [given] if isinstance(given, torch.Tensor) else list(given)
        if group["algorithm"] not in (self.algorithm, "adamw"):
            raise ValueError(f"{name} algorithm must be {self.algorithm!r} or 'adamw', got {group['algorithm']!r}")
        lr = group["lr"]
        if isinstance(lr, torch.Tensor) and lr.numel() != 1:
            raise ValueError(f"{name} lr must be a number or a tensor of one element, got a tensor of {lr.numel()}")
        if len(group["betas"]) != 2 or not all(0.0 <= beta < 1.0 for beta in group["betas"]):
            raise ValueError(f"{name} betas must be two numbers in [0, 1), got {group['betas']!r}")
        for option in ("lr", "weight_decay", "eps", "adamw_eps"):
            if not group[option] >= 0.0:
                raise ValueError(f"{name} {option} must be >= 0, got {group[option]!r}")
        self._check_group(group)
        for entry in group["params"]:
            self._check_param(entry[1] if isinstance(entry, tuple) else entry, group["algorithm"])
        super().add_param_group({**param_group, "params": group["params"]})
        self._plans.clear()

    def _check_param(self, param: Any, algorithm: str) -> None:
        name = type(self).__name__
        if not isinstance(param, torch.Tensor):
            return  # torch's own check names the type.
        check_placement(param, name)
        if param.is_complex():
            raise ValueError(f"{name} got a complex parameter of shape {tuple(param.shape)}: it trains real ones only")
        if algorithm != "adamw" and param.ndim not in (2, 3):
            raise ValueError(
                f"{name} takes matrices (two dimensions) or stacks of them (three), got a parameter of shape "
                f'{tuple(param.shape)}: put it into a group with algorithm="adamw"; matrix_groups(model) makes such groups'
            )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget_plans()

    def _forget_plans(self) -> None:
        """Plans hold process groups: they are no part of the state, and soon made anew."""
        self._plans: dict[Any, GatherToRoot] = {}
        self._roots: dict[torch.Tensor, tuple[int, ...]] = {}

    # -- the step --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        """One step. Every rank of the parameters' meshes must call it.

        Returns:
            the loss of ``closure``, if given.

        Raises:
            RuntimeError: a gradient is sparse, or missing on some ranks and placed otherwise than its parameter on others; on
                every rank, with nothing changed.
        """
        loss = run_closure(closure)
        entries = [(param, group) for group in self.param_groups for param in group["params"]]
        params = [param for param, _ in entries]
        gradients = agree_on_gradients(params, None if self.check_gradients else ())
        matrices = [i for i, (_, group) in enumerate(entries) if group["algorithm"] == self.algorithm]
        for mesh, places in by_mesh([params[i] for i in matrices]):
            indices = [matrices[place] for place in places]
            present = [i for i in indices if gradients[i] is not None]
            if present:
                self._matrix_step(indices, present, entries, gradients, mesh)
        start = 0
        for group in self.param_groups:
            stop = start + len(group["params"])
            if group["algorithm"] == "adamw":
                adamw_step(self, group, params[start:stop], gradients[start:stop], eps=group["adamw_eps"])
            start = stop
        return loss

    def _matrix_step(
        self, indices: list[int], present: list[int], entries: list[Any], gradients: list[Any], mesh: DeviceMesh | None
    ) -> None:
        """Step the parameters ``present``, of the matrix parameters ``indices`` of one mesh."""
        plan = self._plan(indices, present, entries, mesh)
        params, groups = [entries[i][0] for i in present], [entries[i][1] for i in present]
        inputs = [self._send(param, group, gradients[i]) for param, group, i in zip(params, groups, present)]
        updates = plan.run(inputs, lambda batch, data: self._compute(batch, data, params), self.wire, inputs[0].device)
        del inputs
        for param, group, update in zip(params, groups, updates):
            self._receive(param, group, update)

    def _plan(self, indices: list[int], present: list[int], entries: list[Any], mesh: DeviceMesh | None) -> GatherToRoot:
        stack_groups = [(entries[i][0], entries[i][1]) for i in indices]
        key = (mesh, tuple(present), tuple(self._kind(group) for _, group in stack_groups))
        if key in self._plans:
            return self._plans[key]
        self._assign(indices, present, entries, mesh)
        placed = [placed_of(entries[i][0]) for i in present]
        stacks = [self._stack(*entries[i]) for i in present]
        roots = [self._roots[entries[i][0]] for i in present]
        flights = split_flights(stacks, roots, self.wire.itemsize, self.max_root_bytes)
        if len(self._plans) >= 16:  # Sets of gradients come and go; a plan is soon made.
            self._plans.clear()
        self._plans[key] = GatherToRoot(stacks, placed, roots, flights, mesh)
        return self._plans[key]

    def _assign(self, indices: list[int], present: list[int], entries: list[Any], mesh: DeviceMesh | None) -> None:
        """Choose the roots of the parameters that have gradients, for the best balance of this step's work."""
        stacks = [self._stack(*entries[i]) for i in present]
        roots = assign_roots(stacks, mesh_ranks(mesh)[1])
        self._roots.update(zip([entries[i][0] for i in present], roots.of))

    def _stack(self, param: torch.Tensor, group: dict[str, Any]) -> Stack:
        placed = placed_of(param)
        rows, columns = placed.shape[-2:]
        return Stack(placed.shape, self._cost(rows, columns, group), owners_of(placed), self._kind(group))
