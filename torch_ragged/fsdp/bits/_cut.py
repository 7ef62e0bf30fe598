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
_SHAPE = (63, _CUTS[-1] // 63)
_STEPS = 10


def depends_on_cut(optimizer: Optimizer) -> str | None:
    """Why a step depends on where a shard ends, found by a trial; None if it does not.

    A kernel may compute whole vectors in another way than the elements behind the last one, and a rule may treat matrices as
    wholes. The trial steps a matrix, and its elements in parts, with the options of each parameter group and the dtype of its
    parameters. An optimizer that has equal bits with any number of ranks says so by ``has_equal_bits``, as those of
    ``torch_ragged.optim`` do.
    """
    name = type(optimizer).__name__
    if getattr(optimizer, "has_equal_bits", False):
        return None
    if any(isinstance(value, Optimizer) for value in vars(optimizer).values()):
        return f"{name} holds another optimizer, so that its step cannot be tried: give the inner one, or one of torch.optim"
    tried = set()
    for options in optimizer.param_groups:
        chosen = {name: value for name, value in options.items() if name != "params"}
        for dtype in {param.dtype for param in options["params"]}:
            if (key := (dtype, repr(chosen))) in tried:
                continue
            tried.add(key)
            device = local_of(options["params"][0]).device
            try:
                with torch.random.fork_rng(devices=[]):
                    whole, start = _stepped(optimizer, chosen, dtype, device, None)
                    parts, _ = _stepped(optimizer, chosen, dtype, device, _CUTS)
            except Exception as error:
                return f"a trial of {name} on a matrix and on vectors has raised {type(error).__name__}: {error}"
            if whole.equal(start):
                return f"a trial of {name} has changed nothing, so that it cannot be judged: give an optimizer of torch.optim"
            if not torch.equal(whole.view(torch.uint8), parts.view(torch.uint8)):
                kernels = {each: chosen[each] for each in ("foreach", "fused") if chosen.get(each) is not None}
                return (
                    f"{name} with {kernels or 'its options'} gives {int((whole != parts).sum())} of {whole.numel():,} elements "
                    f"of {dtype} other bits if a matrix is cut: give it foreach=False, fused=False and float32 parameters, or "
                    "take another optimizer"
                )
    return None


def _stepped(
    optimizer: Optimizer, options: dict[str, Any], dtype: torch.dtype, device: torch.device, cuts: tuple[int, ...] | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Elements after some steps of a copy of the optimizer and before them; ``cuts``: in a parameter for each part."""
    generator = torch.Generator().manual_seed(0)
    flat, *gradients = torch.randn(1 + _STEPS, _CUTS[-1], generator=generator, device="cpu").to(device, dtype)
    start = flat.clone()

    def parts(of: torch.Tensor) -> list[torch.Tensor]:
        return [of.view(_SHAPE)] if cuts is None else [of[a:b] for a, b in zip(cuts, cuts[1:])]

    params = [torch.nn.Parameter(part) for part in parts(flat)]
    copy: Any = object.__new__(type(optimizer))
    copy.__dict__.update(optimizer.__dict__)
    copy.__dict__.update({name: OrderedDict() for name in optimizer.__dict__ if name.endswith("_hooks")})
    copy.__dict__.pop("step", None)  # A scheduler wraps it.
    copy.state = defaultdict(dict)
    copy.param_groups = [{**{name: _twin_of(value) for name, value in options.items()}, "params": params}]
    for gradient in gradients:
        for param, part in zip(params, parts(gradient), strict=True):
            param.grad = part
        copy.step()
    return flat, start


def _twin_of(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
