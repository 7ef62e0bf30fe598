"""What the optimizers share: local views of parameters, agreement on gradients, AdamW for parameter groups, state loading."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.placement_types import Placement
from torch.optim.adamw import adamw

from torch_ragged._redistribute import mesh_group
from torch_ragged.optim._gather import Placed
from torch_ragged.placement_types import cuts_of, normalize_placements

__all__ = [
    "RaggedOptimizer",
    "add_scaled",
    "adamw_step",
    "agree_on_gradients",
    "by_mesh",
    "check_placement",
    "local",
    "mesh_of",
    "placed_of",
    "run_closure",
    "scalar",
    "zeros_placed",
]

_NONE, _PLACED, _ELSEWHERE, _SPARSE = range(4)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part: the local tensor of a DTensor, a plain tensor itself; shares memory."""
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def mesh_of(tensor: torch.Tensor) -> DeviceMesh | None:
    """The mesh of a DTensor; None for a plain tensor."""
    return tensor.device_mesh if isinstance(tensor, DTensor) else None


def placed_of(param: torch.Tensor, placements: Sequence[Placement] | None = None) -> Placed:
    """How a parameter lies on its mesh, or would under other ``placements``."""
    if not isinstance(param, DTensor):
        return Placed(tuple(param.shape), (), ())
    mesh_shape = tuple(param.device_mesh.shape)
    normalized = normalize_placements(tuple(placements or param.placements), tuple(param.shape), mesh_shape)
    return Placed(tuple(param.shape), mesh_shape, cuts_of(normalized))


def zeros_placed(shape: tuple[int, ...], dtype: torch.dtype, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """A DTensor of zeros; no communication."""
    mesh_shape = tuple(mesh.shape)
    normalized = normalize_placements(tuple(placements), shape, mesh_shape)
    mine = Placed(shape, mesh_shape, cuts_of(normalized)).owned(tuple(mesh.get_coordinate() or ()))
    values = torch.zeros(mine.local_shape, dtype=dtype, device=mesh.device_type)
    return DTensor.from_local(
        values, mesh, normalized, run_check=False, shape=torch.Size(shape), stride=torch.empty(shape, device="meta").stride()
    )


def scalar(value: float | torch.Tensor) -> float:
    """A hyperparameter that may be given as a tensor of one element."""
    return value.item() if isinstance(value, torch.Tensor) else value


def by_mesh(params: Sequence[torch.Tensor]) -> Iterator[tuple[DeviceMesh | None, list[int]]]:
    """The indices of the parameters of each mesh, in order of first appearance; meshes this rank is not in are left out."""
    groups: dict[DeviceMesh | None, list[int]] = {}
    for index, param in enumerate(params):
        groups.setdefault(mesh_of(param), []).append(index)
    for mesh, indices in groups.items():
        if mesh is None or mesh.get_coordinate() is not None:
            yield mesh, indices


def _gradient_code(param: torch.Tensor) -> int:
    gradient = param.grad
    if gradient is None:
        return _NONE
    if gradient.is_sparse:
        return _SPARSE
    if isinstance(param, DTensor) and isinstance(gradient, DTensor) and gradient.placements != param.placements:
        return _ELSEWHERE
    return _PLACED


def agree_on_gradients(params: Sequence[torch.Tensor], agreed: Sequence[int] | None = None) -> list[torch.Tensor | None]:
    """The local gradient of each parameter; None where no rank has one.

    Ranks agree by one all-reduce (max) per mesh, of two int32 per parameter on it and one more. A gradient that only some ranks
    have counts as zero on the others. A gradient placed otherwise than its parameter (a pending sum, say) is redistributed.

    That one more tells of a gradient that a rank cannot use, of a plain parameter or on another mesh: no rank starts a
    collective that others will not join. The largest mesh comes last. If it has the ranks of all others, every rank hears of
    every parameter.

    Args:
        params: the same on every rank of their meshes, in the same order.
        agreed: the indices of those that ranks agree on; all where None. None of them, and no all-reduce, for callers whose
            gradients are there on all ranks or on none, as after a backward of ``fully_shard`` or on one device.

    Raises:
        RuntimeError: a gradient is sparse, or is missing on some ranks and placed otherwise than its parameter on others. On
            every rank that shares a mesh, before any gradient is redistributed.
    """
    codes = [_gradient_code(param) for param in params]
    lowest = list(codes)
    agreed = range(len(params)) if agreed is None else agreed
    meshes = [(mesh, [agreed[i] for i in places]) for mesh, places in by_mesh([params[i] for i in agreed]) if mesh is not None]
    elsewhere = 0
    for mesh, indices in sorted(meshes, key=lambda each: each[0].size()):
        if mesh.size() > 1:
            mine, unusable = [codes[i] for i in indices], _unusable(codes, lowest)
            values = [*mine, *(-code for code in mine), max(elsewhere, unusable + 1)]
            highest = torch.tensor(values, dtype=torch.int32, device=mesh.device_type)
            dist.all_reduce(highest, dist.ReduceOp.MAX, group=mesh_group(mesh, tuple(range(mesh.ndim))))
            *found, elsewhere = highest.tolist()
            for place, index in enumerate(indices):
                codes[index], lowest[index] = found[place], -found[len(indices) + place]
    index = _unusable(codes, lowest)
    if index >= 0:
        what = f"parameter {index} of shape {tuple(params[index].shape)}"
        if codes[index] == _SPARSE:
            raise RuntimeError(f"{what} has a sparse gradient on some rank: this optimizer takes dense gradients only")
        raise RuntimeError(
            f"{what} has no gradient on some ranks, and on others one that is placed otherwise than the parameter: set it "
            "to None or to a DTensor on all ranks before step()"
        )
    if elsewhere:
        raise RuntimeError(
            "another rank has a sparse or misplaced gradient, as its own error tells, of its "
            f"parameter {elsewhere - 1}: no rank steps"
        )
    return [
        None if code == _NONE else torch.zeros_like(local(param)) if param.grad is None else _local_gradient(param)
        for param, code in zip(params, codes)
    ]


def _unusable(codes: Sequence[int], lowest: Sequence[int]) -> int:
    """The index of the first gradient that cannot be used, by the highest and lowest code of ranks; -1 if there is none."""
    pairs = enumerate(zip(codes, lowest))
    return next((i for i, (high, low) in pairs if high == _SPARSE or (high == _ELSEWHERE and low == _NONE)), -1)


def _local_gradient(param: torch.Tensor) -> torch.Tensor:
    """This rank's part of a dense gradient, placed as the parameter."""
    gradient = param.grad
    assert gradient is not None
    if isinstance(param, DTensor) and isinstance(gradient, DTensor) and gradient.placements != param.placements:
        gradient = gradient.redistribute(placements=param.placements)
    return local(gradient)


def check_placement(param: torch.Tensor, name: str) -> None:
    """Raise ``ValueError`` for a DTensor that is no parameter of an optimizer: one that is pending a reduction."""
    if isinstance(param, DTensor) and any(isinstance(p, Partial) for p in param.placements):
        raise ValueError(
            f"{name} got a parameter placed as {param.placements}: a Partial is no parameter, redistribute it first"
        )


def add_scaled(param: torch.Tensor, update: torch.Tensor, alpha: float, rounds_product: bool) -> None:
    """``param += alpha * update``, in place, the result independent of where a shard starts and ends.

    On CPU, torch rounds 16-bit elements that fill no vector register differently from the others: the last few of a tensor, and
    all of a strided one, get ``alpha * update`` rounded before the addition. Here all get what ``rounds_product`` says. Where
    the dtypes differ, torch adds in float32 and rounds once, everywhere alike.
    """
    if param.device.type != "cpu" or param.dtype not in (torch.bfloat16, torch.float16) or update.dtype != param.dtype:
        param.add_(update, alpha=alpha)
        return
    alpha = torch.tensor(alpha, dtype=param.dtype).item()
    if rounds_product:
        param.copy_(param.float().add_((update.float() * alpha).to(param.dtype)))
    else:
        param.copy_(param.float().add_(update.float(), alpha=alpha))


def adamw_step(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    params: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None],
    *,
    eps: float,
) -> None:
    """``torch.optim.AdamW`` on the local tensors of a group's parameters; its states are DTensors placed as they are."""
    active = [(param, gradient) for param, gradient in zip(params, gradients) if gradient is not None]
    states = [optimizer.state[param] for param, _ in active]
    for (param, _), state in zip(active, states):
        if "exp_avg" not in state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
    beta1, beta2 = group["betas"]
    adamw(
        [local(param) for param, _ in active],
        [gradient for _, gradient in active],
        [local(state["exp_avg"]) for state in states],
        [local(state["exp_avg_sq"]) for state in states],
        [],
        [state["step"] for state in states],
        foreach=group["foreach"],
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=scalar(group["lr"]),
        weight_decay=group["weight_decay"],
        eps=eps,
        maximize=False,
    )


class RaggedOptimizer(torch.optim.Optimizer):
    """An optimizer whose state keeps its own dtypes: torch's ``load_state_dict`` casts all of it to the parameter's.

    ``_knobs`` are the attributes, beside what ``torch.optim.Optimizer`` keeps, that a pickle or a deep copy takes along.
    """

    _knobs: tuple[str, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self._knobs}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As ``torch.optim.Optimizer.load_state_dict``, but for the dtypes of the state, which are kept."""
        super().load_state_dict(state_dict)
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for index, param in zip(saved, params):
            for name, value in state_dict["state"].get(index, {}).items():
                if isinstance(value, torch.Tensor):  # Copies: torch would share the step counters with the given dict.
                    device = value.device if name == "step" else param.device
                    self.state[param][name] = value.to(device, copy=True)


def run_closure(closure: Callable[[], Any] | None) -> Any:
    """The loss of a closure, with gradients enabled."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
