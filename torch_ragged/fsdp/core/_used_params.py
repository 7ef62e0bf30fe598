"""Ranks agree at the end of backward on the parameters that any rank used: ``.grad`` is set on all ranks or on none."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch

from torch_ragged._register._torch import profiler_range
from torch_ragged.fsdp.core._fsdp_param_group import FSDPParamGroup

__all__ = ["used_anywhere"]


def used_anywhere(groups: Sequence[FSDPParamGroup]) -> Iterator[bool]:
    """For each parameter, whether any rank has a gradient for it. One small all-reduce.

    A rank reads the result only if it has a parameter without a gradient. Otherwise it need not block on a GPU.
    """
    # Issue it on all ranks, also if this rank has all gradients: another rank may need this rank's answer.
    local = [param.was_used for group in groups for param in group.params]
    flags = torch.ones(len(local), dtype=torch.uint8, device=groups[0].device)
    start = 0
    for is_used, run in itertools.groupby(local):  # Fills: a copy from the host would block, and break a capture.
        stop = start + len(list(run))
        if not is_used:
            flags[start:stop].zero_()
        start = stop
    with profiler_range("unused_parameters_all_reduce", groups[0].fqn):
        groups[0].named.all_reduce_max(flags).wait()
    if all(local) or flags.is_meta:  # A memory report runs a step on the meta device, without other ranks.
        return iter(local)
    # A frozen parameter has no gradient on any rank.
    trainable = [param.sharded.requires_grad for group in groups for param in group.params]
    if all(used or not needed for used, needed in zip(local, trainable)):
        return iter(local)
    return iter([bool(flag) for flag in flags.tolist()])
