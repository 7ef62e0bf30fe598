"""``static_modules.check(step)``: a step in eager and in static mode, from the same state, compared to the bit.

It must leave nothing behind: gradients, buffers and random states are as before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from torch_ragged._ranks.agreement import agree
from torch_ragged._ranks.groups import device_of_messages
from torch_ragged.random._tape import read_state, write_state

__all__ = ["check_step"]

_CALL = "static_modules.check"
_RUNS = 3
"""In static mode: the first run is watched, the second one tries the modules and uses them, the third one finds them known."""


def check_step(model: nn.Module, mesh: DeviceMesh, step: Callable[[], Any], in_eager_mode: Callable[[bool], None]) -> None:
    """See :meth:`StaticModules.check`. ``in_eager_mode(True)`` keeps modules eager."""
    groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]
    problem: Exception | None = None
    if not callable(step):
        problem = TypeError(f"{_CALL} takes a function that runs a step, got a {type(step).__name__}")
    # Before the first run: a rank that runs nothing would leave the others waiting in the collectives of their step.
    agree(groups, device_of_messages(groups[0]), _CALL, "", problem)
    # References, not copies: run() sets .grad to None, so that the step makes new ones. These come back at the end.
    grads = {name: param.grad for name, param in model.named_parameters()}
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    states = {device: read_state(device) for device in {"cpu", mesh.device_type}}
    # An optimizer's step in it would make each run another one. The version of a DTensor counts, as optimizers write to the
    # DTensor.
    versions = {name: param._version for name, param in model.named_parameters()}

    def restore(of: dict[str, Any]) -> None:
        for name, param in model.named_parameters():
            param.grad = of.get(name)
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if not torch.equal(_bits(buffer), _bits(buffers[name])):  # An expanded mask could not be written to.
                    buffer.copy_(buffers[name])
        for device, state in states.items():
            write_state(device, state)

    def run(is_eager: bool) -> dict[str, torch.Tensor]:
        restore({})
        in_eager_mode(is_eager)
        try:
            result = step()
        finally:
            in_eager_mode(False)
        shown = {f"the result {i} of the step": leaf for i, leaf in enumerate(pytree.tree_leaves(result))}
        shown |= {f"the gradient of {name}": param.grad for name, param in model.named_parameters()}
        shown |= {f"the buffer {name}": buffer for name, buffer in model.named_buffers()}
        shown |= {f"the random state of {device!r}": read_state(device) for device in states}
        # Of this rank's parts only: no collective. The answer of all ranks comes at the end.
        return {name: _bits(value) for name, value in shown.items() if isinstance(value, torch.Tensor)}

    try:
        # Twice in eager mode: what differs there is no fault of static mode. The first of these runs is the reference of all
        # others.
        first = run(is_eager=True)
        written = [name for name, param in model.named_parameters() if param._version != versions[name]]
        if written:
            problem = ValueError(f"{_CALL}: the step writes to {written[0]}: leave optimizer.step() out of it")
        # A problem of one rank is raised after the same runs on all ranks: they send what the others wait for.
        for is_eager in (True, *[False] * _RUNS):
            again = run(is_eager)
            differing = [name for name in {**first, **again} if not _are_equal(first.get(name), again.get(name))]
            if differing and problem is None and is_eager:
                problem = ValueError(
                    f"{_CALL}: {differing[0]} is another one in two eager runs of the step: it must do the same each time"
                )
            elif differing and problem is None:
                problem = AssertionError(
                    f"{_CALL}: {differing[0]} has other bits in static mode than in eager mode, and {len(differing) - 1} more: "
                    "please report it, and call parallelize with mode='eager'"
                )
    finally:
        restore(grads)
    agree(groups, device_of_messages(groups[0]), _CALL, "", problem)


def _bits(value: torch.Tensor) -> torch.Tensor:
    """A copy of the bytes of a tensor, of its local part: NaN is equal to itself, and zeros have signs."""
    local = value._local_tensor if isinstance(value, DTensor) else value
    return local.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def _are_equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is not None and other is not None and torch.equal(one, other)
