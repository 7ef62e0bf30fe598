"""The bytes of optimizer states on this rank: those that are there, and those that the first step will make.

It must not communicate, and must not allocate memory on a parameter's device.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, Union

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

__all__ = [
    "OptimizerLike",
    "OptimizerMaker",
    "first_state_nbytes",
    "host_nbytes",
    "made_optimizers",
    "optimizers_of",
    "state_nbytes",
]

OptimizerMaker = Callable[[list[torch.Tensor]], Optimizer]
OptimizerLike = Union[Optimizer, OptimizerMaker]
"""An optimizer, or a class or function that makes one of a list of parameters."""


def optimizers_of(optimizer: Any, call: str) -> list[Any]:
    """One optimizer, several or None, as a list. ``call`` is the name of the function that got it, for the error.

    Raises:
        TypeError: it is something else.
    """
    if optimizer is None:
        return []
    if isinstance(optimizer, Optimizer) or callable(optimizer):
        return [optimizer]
    several = list(optimizer) if isinstance(optimizer, Iterable) and not isinstance(optimizer, (str, bytes)) else [optimizer]
    for each in several:
        if not (isinstance(each, Optimizer) or callable(each)):
            raise TypeError(
                f"{call} got {each!r} as optimizer: give a torch.optim.Optimizer, such as "
                "torch.optim.AdamW(model.parameters()), or several of them. memory_report also takes its class, or a function "
                "of a list of parameters that returns one"
            )
    return several


def made_optimizers(optimizer: OptimizerLike | Iterable[OptimizerLike] | None, params: list[torch.Tensor]) -> list[Optimizer]:
    """The optimizers; those that are given as a class or a function are made of ``params``.

    Raises:
        TypeError: one is no optimizer, and makes none.
    """
    made = []
    for each in optimizers_of(optimizer, "memory_report"):
        one = each if isinstance(each, Optimizer) else each(params)
        if not isinstance(one, Optimizer):
            raise TypeError(
                f"memory_report got {each!r} as optimizer, which returned {type(one).__name__}: give a torch.optim.Optimizer, "
                "its class, or a function of a list of parameters that returns one"
            )
        made.append(one)
    return made


def state_nbytes(optimizer: Optimizer) -> dict[int, int]:
    """By ``id`` of a parameter, the bytes of its state on the device now."""
    if hasattr(optimizer, "tier_nbytes"):  # Of fsdp.offload: reading ``state`` would copy it.
        return optimizer.state_nbytes("device")  # type: ignore[attr-defined]
    return {id(param): _nbytes(state.values()) for param, state in optimizer.state.items()}


def host_nbytes(optimizer: Optimizer) -> tuple[dict[int, int], int]:
    """The bytes of an optimizer's states in host memory: by ``id`` of a parameter, and of windows that all parameters share."""
    if not hasattr(optimizer, "tier_nbytes"):
        return {}, 0
    by_param, windows = optimizer.state_nbytes("host"), optimizer.tier_nbytes()  # type: ignore[attr-defined]
    return by_param, windows["windows"]


def first_state_nbytes(optimizer: Optimizer) -> int:
    """The bytes of the states that the first step of an optimizer without states will make, if all parameters have gradients.

    An optimizer says it by a method ``first_state_nbytes(param, group)``, as those of ``torch_ragged.optim`` do. Otherwise, a
    twin of the optimizer makes a step on meta tensors of the local shapes.

    Raises:
        Exception: whatever the step of the twin raises.
    """
    pairs = [(param, group) for group in optimizer.param_groups for param in group["params"] if param.requires_grad]
    if hasattr(optimizer, "first_state_nbytes"):
        return sum(optimizer.first_state_nbytes(param, group) for param, group in pairs)
    twin = _twin(optimizer)
    with torch.no_grad():
        inspect.unwrap(type(optimizer).step)(twin)
    return sum(_nbytes(state.values()) for state in twin.state.values())


def _twin(optimizer: Optimizer) -> Any:
    """The optimizer with meta tensors as parameters and gradients, without hooks. Its step changes nothing of the optimizer."""
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.state, twin.param_groups = defaultdict(dict), []
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key != "params"}
        # Kernels for several tensors, or for graphs, take no meta tensors. They have the same states.
        options |= {key: False for key in ("foreach", "fused", "capturable") if key in options}
        if isinstance(options.get("lr"), torch.Tensor):
            options["lr"] = 0.0
        params = [torch.nn.Parameter(_local(param).detach().to("meta")) for param in group["params"] if param.requires_grad]
        for param in params:
            param.grad = torch.empty_like(param)
        twin.param_groups.append({**options, "params": params})
    return twin


def _nbytes(values: Iterable[Any]) -> int:
    return sum(_local(value).nbytes for value in values if isinstance(value, torch.Tensor))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
