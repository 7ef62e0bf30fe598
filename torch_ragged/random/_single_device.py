"""single_device: the switch that makes random ops on all DTensors give the numbers of a single device."""

from __future__ import annotations

import contextlib
from typing import Any

from torch_ragged._register._random import handle_random_ops
from torch_ragged.tensor._random import scope

__all__ = ["single_device"]


class single_device(contextlib.ContextDecorator):
    """Random ops on DTensors give the numbers of a single device, under any placements.

    If every rank has the same seed, merging the local tensors gives the tensor that one device would draw. The generator has
    the state of one device afterwards::

        torch.manual_seed(0)
        with single_device():
            w = distribute_tensor(torch.empty(1024, 512), mesh, [Shard(1)])
            nn.init.kaiming_uniform_(w)                     # w.full_tensor() is that of one process, to the bit
            y = F.dropout(x, 0.1)                           # the mask, too; in backward and in recomputation, the same mask

        single_device()                                     # a switch: on for the whole program
        single_device(False)                                # off

    As for ``torch.set_grad_enabled``, the call switches, and the end of a ``with`` block restores. It is off after
    an import; then DTensor draws as it always does. It holds for all threads of the process. On ragged placements, random ops
    give these numbers whether it is on or not.

    What it covers, with a generator or without, under Replicate, Shard, strided, interleaved and ragged placements, even or
    not:

    - ``normal_``, ``uniform_``, ``exponential_``, ``geometric_``, ``cauchy_``, ``log_normal_``, ``random_``, ``bernoulli_``,
      and so all functions of ``nn.init``
    - ``rand_like``, ``randn_like``, ``randint_like``, ``bernoulli``, dropout in all forms, ``multinomial``, and
      ``torch.distributed.tensor.rand`` and ``randn``
    - ``item()`` and ``if tensor:`` read the value of the whole tensor. torch itself gives each rank its own part of a Partial,
      so that ranks would go different ways.

    Under Partial, one rank gets the numbers and the others nothing; new tensors are Replicate in place of Partial. A tensor
    keeps its strides, and numbers follow its order in memory, as on one device.

    Cost: on CPU, each rank goes through the draw of the whole tensor in chunks of 256 KiB, and keeps its own elements. A GPU
    draws only the elements of the rank, by a kernel where its bits equal torch's (docs/random.md lists the ops). Under
    ``torch.compile``, the graph breaks at a random op.

    Args:
        mode: whether to switch on.

    Raises:
        TypeError: ``mode`` is no bool.
        ValueError: the generators of a mesh's ranks have different states. Every rank of the mesh raises. The first 8 draws on
            a mesh compare them, then every 16th, and each one in ``no_grad``, by one all-reduce of 16 bytes per mesh dimension.
            In the forward of a plan's model, the model's calls do.

    Otherwise it communicates only to redistribute an argument with other placements than the tensor that is drawn, and to tell
    ranks whether a tensor of probabilities that is cut has other values than probabilities.

    Source: veScale's eager-mode SPMD, "single-device semantics" of random ops.
    """

    def __init__(self, mode: bool = True) -> None:
        if not isinstance(mode, bool):
            raise TypeError(f"single_device takes True (on) or False (off), got {mode!r}")
        self._mode, self._before = mode, scope.is_on
        _switch(mode)

    def __enter__(self) -> single_device:
        _switch(self._mode)  # As torch.set_grad_enabled: the object may be entered again.
        return self

    def __exit__(self, *_: Any) -> None:
        _switch(self._before)

    def __call__(self, function: Any) -> Any:
        _switch(self._before)  # A decorator switches during the function's calls only.
        return super().__call__(function)

    def _recreate_cm(self) -> single_device:
        return single_device(self._mode)


def _switch(mode: bool) -> None:
    # What was noted about generators is of an earlier time: while it was off, DTensor may have drawn in other ways, and ranks
    # must compare their states anew.
    if mode and not scope.is_on:
        scope.clear()
    scope.is_on = mode
    handle_random_ops(mode)
