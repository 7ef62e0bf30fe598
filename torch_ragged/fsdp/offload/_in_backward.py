"""BackwardStep: steps each group in backward, as soon as its gradients are reduced.

It does not know how a group is stepped, and it communicates nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch.optim import Optimizer

from torch_ragged.fsdp.core._dbuffer import current_stream, order_behind
from torch_ragged.fsdp.core._fsdp_param import local_of
from torch_ragged.fsdp.core._fsdp_param_group import FSDPParamGroup
from torch_ragged.fsdp.grads._fsdp_grad import FSDPGrad
from torch_ragged.fsdp.offload._pieces import SteppedParam, UsedGradients

__all__ = ["BackwardStep"]

_IN_FLIGHT = 2  # The most groups whose step the thread has not ended, when backward goes on.


class BackwardStep:
    """The ``GradientUser`` of an optimizer that steps in backward, by its ``step_group(group)``.

    On the CPU, a thread steps, beside autograd: docs/offload.md has a picture. On an accelerator, or if the step
    ``communicates``, the thread of autograd steps: so ranks issue all collectives in one order.
    """

    def __init__(
        self, optimizer: Optimizer, members: Mapping[FSDPParamGroup, Sequence[SteppedParam]], communicates: bool = False
    ) -> None:
        self.communicates = communicates
        # Weakly: groups refer to this object as long as they live.
        self._optimizer, self._members = weakref.ref(optimizer), members
        self._used = UsedGradients()
        # Groups that were stepped since the last take(). Equal on all ranks, between passes.
        self._stepped: set[FSDPParamGroup] = set()
        # Groups that are reduced in a pass that has not ended, equal on all ranks; and whether this rank has stepped them.
        self._reduced: dict[FSDPParamGroup, bool] = {}
        self._options_then: list[dict[str, Any]] = []  # Of the groups stepped since take(); empty if there are none.
        self._problem: Exception | None = None
        self._jobs: list[Future[None]] = []
        self._streams: list[torch.Stream] = []
        self._worker = ThreadPoolExecutor(1)
        weakref.finalize(self, self._worker.shutdown, wait=False)
        for group in members:
            group.gradient_user = self

    # -- in backward: see GradientUser -------------------------------------------------------------------------------

    def before_reduction(self, group: FSDPParamGroup, is_only_one: bool) -> None:
        """Raise if the group was stepped, or if gradients of its last step are still there: on all ranks alike."""
        if self._optimizer() is None:
            group.gradient_user = None
            return
        if group in self._stepped or (is_only_one and group in self._reduced):
            raise RuntimeError(
                f"{group.names} has its step already, and optimizer.step() has not followed: by a second backward, or by one "
                "backward through several forwards. With in_backward=True, each backward with gradient sync is a step. To "
                "accumulate gradients, call set_requires_gradient_sync(False) for all but the last backward"
            )
        if any(UsedGradients.has(member.param.grad) for member in self._members[group]):
            raise RuntimeError(f"{group.names} has gradients of the last step: call optimizer.zero_grad() before backward")
        self._reduced.setdefault(group, False)

    def use(self, group: FSDPParamGroup) -> None:
        """Step the group, or let the thread step it."""
        optimizer = self._optimizer()
        if optimizer is None or not self._with_gradients(group):
            return
        if not self._options_then:
            self._options_then = _comparable(optimizer.param_groups)
        self._reduced[group] = True
        stream = current_stream(group.sharded.flat.device)
        if stream is None and not self.communicates:
            self._jobs.append(self._worker.submit(self._run, optimizer, group))
            # If steps take longer than backward, reduced gradients would wait for the thread: those of all groups. One group is
            # stepped, and one waits. No rank waits for another one here.
            while len(self._jobs) > _IN_FLIGHT:
                self._jobs.pop(0).result()
            return
        for member in self._with_gradients(group) if stream is not None else ():
            # Its memory may be of another stream, and is freed before that one waits for this one.
            local_of(member.param.grad).record_stream(stream)  # type: ignore[arg-type]
        self._streams += [stream] if stream is not None else []
        self._run(optimizer, group)

    def _run(self, optimizer: Any, group: FSDPParamGroup) -> None:
        try:
            if self._problem is None:
                with torch.no_grad():  # A setting of each thread.
                    optimizer.step_group(group)
            for member in self._with_gradients(group):
                param = member.param
                param.grad = FSDPGrad(self._used, member.index, param, param.grad.dtype, None)  # type: ignore[arg-type]
        except Exception as error:
            self._problem = error

    def _with_gradients(self, group: FSDPParamGroup) -> list[SteppedParam]:
        return [member for member in self._members[group] if member.param.grad is not None]

    def finish(self, groups: Sequence[FSDPParamGroup]) -> None:
        self.wait()
        # All ranks have a gradient of a parameter, or none.
        self._stepped.update(group for group in groups if self._with_gradients(group))
        for group in groups:
            self._reduced.pop(group, None)

    def drop(self, group: FSDPParamGroup) -> None:
        """A pass has raised, or is dropped. If it has stepped the group, the next take() raises."""
        self.wait()
        if self._reduced.pop(group, False) and self._problem is None:
            self._problem = RuntimeError(
                "a backward has raised after it had stepped some parameters, so that parameters and states are not of one step"
            )

    # -- outside of backward -----------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Wait for the thread, or order the current stream behind the kernels of the steps."""
        for job in self._jobs:
            job.result()
        for stream in self._streams:
            order_behind(current_stream(stream.device), stream)
        self._jobs, self._streams = [], []

    def reset(self) -> None:
        """Parameters and states are loaded: forget what has failed."""
        self.wait()
        self._stepped, self._reduced, self._options_then, self._problem = set(), {}, [], None

    def take(self) -> None:
        """End a step: the next backward may begin one. Raise what the step of a group has raised, and if steps do not fit."""
        self.wait()
        problem, before, optimizer = self._problem, self._options_then, self._optimizer()
        self.reset()
        if problem is not None:
            raise problem
        if before and optimizer is not None and before != _comparable(optimizer.param_groups):
            raise RuntimeError(
                "options of the optimizer, such as lr, have changed between backward and step(): with in_backward=True, "
                "backward has used the old ones. Change them after step(), or before forward. Parameters and states are not of "
                "one step: load a checkpoint"
            )
        if any(group.gradient_user is not self for group in self._members):
            raise RuntimeError("another optimizer was made of this model after this one with in_backward=True: use that one")


def _comparable(options: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Parameter groups without parameters. Of a tensor, its version: reading it would block the host."""
    return [
        {
            name: (id(value), value._version) if isinstance(value, torch.Tensor) else value
            for name, value in group.items()
            if name != "params"
        }
        for group in options
    ]
