"""Shampoo on the machinery of the roots: a compute function and a cost model."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Optional

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torch_ragged._redistribute import mesh_group
from torch_ragged.optim._base import local, mesh_of, scalar, zeros_placed
from torch_ragged.optim._gather import Batch, Spot, mesh_ranks
from torch_ragged.optim._matrix import MatrixOptimizer
from torch_ragged.optim._roots import assign_roots
from torch_ragged.placement_types import RaggedShard

__all__ = ["Shampoo", "inverse_root"]

_TINY = 1e-30


def inverse_root(factor: torch.Tensor, order: int, eps: float) -> torch.Tensor:
    """``factor ** (-1 / order)`` of a symmetric positive semi-definite matrix, in float64; NaN where it is not finite.

    ``eps`` times the largest eigenvalue is added to all of them.

    Raises:
        torch.linalg.LinAlgError: the eigenvalues were not found.
    """
    if not factor.isfinite().all():
        return torch.full_like(factor, torch.nan)
    values, vectors = torch.linalg.eigh(factor.double())
    values = values.clamp(min=0.0)
    values = values + eps * values[-1:] + _TINY
    return ((vectors * values ** (-1.0 / order)) @ vectors.mT).to(factor.dtype)


class Shampoo(MatrixOptimizer):
    """Shampoo with grafting to Adam, each matrix preconditioned on its root.

    Per matrix G (m x n): ``L = beta L + (1 - beta) G G^T``, ``R = beta R + (1 - beta) G^T G``; every ``interval`` steps their
    inverse roots; the direction is ``L^(-1/4) M R^(-1/4)``, M being the bias-corrected average of gradients, scaled to the norm
    that Adam's update of this matrix has. A side of more than ``max_side`` is not preconditioned, the other one then with the
    power -1/2; a matrix with two such sides gets Adam's update. All state lies whole on the root of its matrix, as DTensors
    with a RaggedShard over the flattened mesh, so that checkpoints reshard. Roots stay while gradients come and go.

    Collectives per step and mesh: as for :class:`Muon`, in float32. Given equal gradients, parameters and states are bitwise
    equal for any number of ranks. Groups with ``algorithm="adamw"`` as there.

    Source: Gupta, Koren, Singer, "Shampoo" (ICML 2018); Anil et al. (2020) and Shi et al. (2023) for grafting and intervals.

    Args:
        params, lr, weight_decay: as ``torch.optim.AdamW`` (weight decay is decoupled).
        betas: of the averages of gradients and, for grafting, of their squares; and of AdamW groups.
        shampoo_beta: of the factors.
        eps: ridge of the inverse roots, relative to the largest eigenvalue.
        adamw_eps: of grafting and of AdamW groups.
        interval: steps between computations of inverse roots.
        max_side: largest side that is preconditioned.
        foreach: of AdamW groups.
        max_root_bytes, check_gradients: as :class:`Muon`.

    Raises:
        ValueError: as :class:`Muon`.
    """

    algorithm = "shampoo"
    wire = torch.float32

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 1e-2,
        *,
        shampoo_beta: float = 0.95,
        eps: float = 1e-6,
        adamw_eps: float = 1e-8,
        interval: int = 10,
        max_side: int = 4096,
        foreach: Optional[bool] = None,
        max_root_bytes: Optional[int] = None,
        check_gradients: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "weight_decay": weight_decay,
            "shampoo_beta": shampoo_beta,
            "eps": eps,
            "adamw_eps": adamw_eps,
            "interval": interval,
            "max_side": max_side,
            "foreach": foreach,
        }
        self._meshes: dict[DeviceMesh, DeviceMesh] = {}
        super().__init__(params, defaults, max_root_bytes, check_gradients)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._meshes = {}

    def _check_group(self, group: dict[str, Any]) -> None:
        if not 0.0 <= group["shampoo_beta"] < 1.0:
            raise ValueError(f"Shampoo shampoo_beta must be in [0, 1), got {group['shampoo_beta']!r}")
        for name in ("interval", "max_side"):
            if not isinstance(group[name], int) or group[name] < 1:
                raise ValueError(f"Shampoo {name} must be a positive integer, got {group[name]!r}")

    def _kind(self, group: dict[str, Any]) -> Hashable:
        return group["max_side"], group["interval"]

    def _cost(self, rows: int, columns: int, group: dict[str, Any]) -> float:
        """Factors and preconditioning take four products of 2 m m n, an eigendecomposition about 25 m m m at an interval."""
        sides = [side for side in (rows, columns) if side <= group["max_side"]]
        eigen = sum(25.0 * side**3 for side in sides) / group["interval"]
        return rows * columns * (10.0 + sum(4.0 * side for side in sides)) + eigen

    def _assign(self, indices: list[int], present: list[int], entries: list[Any], mesh: DeviceMesh | None) -> None:
        """State lies at the roots: all parameters get theirs at once, and keep it."""
        new = [i for i in indices if entries[i][0] not in self._roots]
        roots = assign_roots([self._stack(*entries[i]) for i in new], mesh_ranks(mesh)[1])
        self._roots.update(zip([entries[i][0] for i in new], roots.of))

    def _send(self, param: torch.Tensor, group: dict[str, Any], gradient: torch.Tensor) -> torch.Tensor:
        state = self.state[param]
        shapes = self._state_shapes(param, group)
        if "step" not in state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32)
            state.update({name: self._zeros(param, shape) for name, shape in shapes.items()})
        for name in shapes:  # Loaded from a run with other roots, perhaps.
            value, placement = state[name], self._placement(param)
            if isinstance(value, DTensor) and value.placements != placement:
                state[name] = value.redistribute(placements=placement)
        state["step"] += 1
        return gradient

    def _state_shapes(self, param: torch.Tensor, group: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        *lead, rows, columns = param.shape
        shapes = {"exp_avg": tuple(param.shape), "exp_avg_sq": tuple(param.shape)}
        for name, side in (("left", rows), ("right", columns)):
            if side <= group["max_side"]:
                shapes[name] = shapes[f"{name}_root"] = (*lead, side, side)
        return shapes

    def _placement(self, param: torch.Tensor) -> tuple[RaggedShard, ...]:
        """At the roots: a run of a stack's matrices for each rank of the flattened mesh."""
        roots, ranks = self._roots[param], mesh_ranks(mesh_of(param))[1]
        units = [0] * ranks
        for root in roots or (0,):
            units[root] += 1
        return (RaggedShard((0,) if param.ndim == 3 else (), tuple(units)),)

    def _zeros(self, param: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        mesh = mesh_of(param)
        if mesh is None:
            return torch.zeros(shape, dtype=torch.float32, device=param.device)
        if mesh not in self._meshes:
            flat = (
                mesh if mesh.ndim == 1 else DeviceMesh.from_group(mesh_group(mesh, tuple(range(mesh.ndim))), mesh.device_type)
            )
            self._meshes[mesh] = flat
        return zeros_placed(shape, torch.float32, self._meshes[mesh], self._placement(param))

    def _compute(self, batch: Batch, matrices: torch.Tensor, params: Sequence[torch.Tensor]) -> torch.Tensor:
        """One matrix after another: products of a batch may round otherwise than products of one."""
        groups = {param: group for group in self.param_groups for param in group["params"]}
        for matrix, spot in zip(matrices, batch.spots):
            param = params[spot.stack]
            matrix.copy_(_direction(matrix, self._at_root(param, spot), groups[param], int(self.state[param]["step"].item())))
        return matrices

    def _at_root(self, param: torch.Tensor, spot: Spot) -> dict[str, torch.Tensor]:
        """Views of the states of one matrix, which this rank is the root of."""
        rank = mesh_ranks(mesh_of(param))[0]
        place = spot.position - self._roots[param].index(rank)
        states = {}
        for name, value in self.state[param].items():
            if name != "step":
                sizes = value.shape[-2:]
                states[name] = local(value).view(-1, *sizes)[place]
        return states

    def _receive(self, param: torch.Tensor, group: dict[str, Any], update: torch.Tensor) -> None:
        lr, mine = scalar(group["lr"]), local(param)
        wide = mine.float() * (1 - lr * group["weight_decay"])
        mine.copy_(wide.sub_(update.view(mine.shape).mul_(lr)))


def _direction(gradient: torch.Tensor, state: dict[str, torch.Tensor], group: dict[str, Any], step: int) -> torch.Tensor:
    """Update the states of one matrix; what the parameter moves along, before the learning rate. All float32."""
    (beta1, beta2), beta = group["betas"], group["shampoo_beta"]
    m, v = state["exp_avg"], state["exp_avg_sq"]
    m.mul_(beta1).add_(gradient * (1 - beta1))
    v.mul_(beta2).add_((gradient * gradient).mul_(1 - beta2))
    average = m / (1 - beta1**step)
    adam = average / (v / (1 - beta2**step)).sqrt_().add_(group["adamw_eps"])
    sides = [name for name in ("left", "right") if name in state]
    if not sides:
        return adam
    direction = average
    for name in sides:
        factor, root = state[name], state[f"{name}_root"]
        outer = gradient @ gradient.mT if name == "left" else gradient.mT @ gradient
        factor.mul_(beta).add_(outer, alpha=1 - beta)
        if step == 1 or step % group["interval"] == 0:
            try:
                root.copy_(inverse_root(factor / (1 - beta**step), 2 * len(sides), group["eps"]))
            except torch.linalg.LinAlgError:
                pass  # The last one serves on; an error on one rank would leave the others waiting for it.
        direction = root @ direction if name == "left" else direction @ root
    return direction * (adam.norm() / direction.norm().clamp(min=_TINY))
