"""Whether the step of an optimizer gives an element other bits if its shard ends elsewhere. It changes no optimizer."""

from __future__ import annotations

import itertools
from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch.optim import Optimizer

from torch_ragged.fsdp.core._fsdp_param import local_of

__all__ = ["depends_on_cut"]

_CUTS = tuple(itertools.accumulate(range(91)))  # Parts of 1 to 90 elements: each kernel ends with each number of single ones.
_NUMEL = _CUTS[-1]
_STEPS = 10


def depends_on_cut(optimizer: Optimizer) -> str | None:
    """Why a step depends on where a shard ends, found by a trial; None if it does not.

    A kernel may compute whole vectors in another way than the elements behind the last one. The trial steps a vector whole and
    in parts, with the options of each parameter group and the dtype of its parameters. An optimizer that has equal bits with
    any number of ranks says so by ``has_equal_bits``, as those of ``torch_ragged.optim`` do.
    """
    if getattr(optimizer, "has_equal_bits", False):
        return None
    for options in optimizer.param_groups:
        for dtype in {param.dtype for param in options["params"]}:
            device = local_of(options["params"][0]).device
            whole = _stepped(optimizer, options, dtype, device, (0, _NUMEL))
            parts = _stepped(optimizer, options, dtype, device, _CUTS)
            if not torch.equal(whole.view(torch.uint8), parts.view(torch.uint8)):
                changed = int((whole != parts).sum())
                chosen = {name: options[name] for name in ("foreach", "fused") if options.get(name) is not None}
                return (
                    f"{type(optimizer).__name__} with {chosen or 'its options'} gives {changed} of {_NUMEL:,} elements of "
                    f"{dtype} other bits if the vector is cut: give it foreach=False and fused=False, or another optimizer"
                )
    return None


def _stepped(
    optimizer: Optimizer, options: dict[str, Any], dtype: torch.dtype, device: torch.device, cuts: tuple[int, ...]
) -> torch.Tensor:
    """A vector after some steps of a copy of the optimizer, which has a parameter for each part."""
    generator = torch.Generator().manual_seed(0)
    flat, *gradients = torch.randn(1 + _STEPS, _NUMEL, generator=generator, device="cpu").to(device, dtype)
    params = [torch.nn.Parameter(flat[start:stop]) for start, stop in zip(cuts, cuts[1:])]
    copy: Any = object.__new__(type(optimizer))
    copy.__dict__.update(optimizer.__dict__)
    copy.__dict__.update({name: OrderedDict() for name in optimizer.__dict__ if name.endswith("_hooks")})
    copy.__dict__.pop("step", None)  # A scheduler wraps it.
    copy.state = defaultdict(dict)
    copy.param_groups = [{**{name: _twin_of(value) for name, value in options.items()}, "params": params}]
    for gradient in gradients:
        for param, start, stop in zip(params, cuts, cuts[1:]):
            param.grad = gradient[start:stop]
        copy.step()
    return flat


def _twin_of(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
