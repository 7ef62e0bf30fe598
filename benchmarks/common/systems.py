"""The ways to train one stack: this package, with parts of it switched off, its peers, and the floor."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common.stacks import Case
from torch_ragged.fsdp import BufferLayout, TensorSpec, fully_shard, plan_layout, rows
from torch_ragged.fsdp._groups import named_groups
from torch_ragged.fsdp.comm._collectives import ProcessGroupCollectives, Work
from torch_ragged.fsdp.comm._reduction import Reduction
from torch_ragged.offline._peers import RowBuffer

__all__ = ["POLICIES", "SYSTEMS", "Training", "adamw", "bare_collectives"]

POLICIES = {
    "float32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True),
}


@dataclass
class Training:
    """A step in three phases. What is bare of a package's copies is given as ``collectives``, run behind backward."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    inputs: torch.Tensor
    collectives: Callable[[], None] = lambda: None

    def forward(self) -> torch.Tensor:
        return self.model(self.inputs).float().square().mean()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()
        self.collectives()

    def optimize(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.backward(self.forward())
        self.optimize()


def adamw(params: Iterator[nn.Parameter] | Sequence[torch.Tensor]) -> torch.optim.Optimizer:
    """The optimizer of all systems."""
    return torch.optim.AdamW(params, lr=1e-4, foreach=True)


def _sharded(shard: Callable[..., object], case: Case, policy: MixedPrecisionPolicy) -> Training:
    model = case.model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model:
        shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=block is not model[-1])
    shard(model, mesh=mesh, mp_policy=policy)
    return Training(model, adamw(model.parameters()), case.inputs(dist.get_rank()))


def _by_copy_engine(case: Case, policy: MixedPrecisionPolicy) -> Training:
    """With collectives that copy between the ranks' memory, in buffers that stay."""
    training = _sharded(fully_shard, case, policy)
    training.model.set_persistent_buffers()
    training.model.set_collectives("copy_engine")
    return training


def _of_rows(case: Case, policy: MixedPrecisionPolicy) -> Training:
    return _sharded(functools.partial(fully_shard, orig_param_policy=lambda fqn, param: rows(32)), case, policy)


def _in_cells(tensors: Sequence[TensorSpec], ranks: int, alignment: int) -> BufferLayout:
    """Without a planner: tensors one behind the other in cells of the least common multiple of their blocks."""
    buffer = RowBuffer.pack(tensors, alignment)
    bound = plan_layout(tensors, ranks, alignment).lower_bound
    return BufferLayout(tuple(tensors), buffer.offsets, buffer.shard(ranks), ranks, alignment, bound, "cells", "cells")


def _without_planner(case: Case, policy: MixedPrecisionPolicy) -> Training:
    with mock.patch("torch_ragged.fsdp.core._fsdp_init.plan_layout", _in_cells):
        return _of_rows(case, policy)


class _Copying(ProcessGroupCollectives):
    """Collectives on buffers of their own, to and from which everything is copied, as without a DBuffer."""

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup | None = None) -> Work:
        staged = torch.empty_like(output)
        work = super().all_gather(staged, shard.clone(), group)
        return _Then(work, lambda: output.copy_(staged))

    def reduce_scatter(
        self, output: torch.Tensor, buffer: torch.Tensor, reduction: Reduction, group: dist.ProcessGroup | None = None
    ) -> Work:
        staged = buffer.clone()
        return _Then(super().reduce_scatter(output, staged, reduction, group), lambda: staged)


@dataclass
class _Then:
    work: Work
    then: Callable[[], object]

    def wait(self) -> None:
        self.work.wait()
        self.then()


def _without_dbuffer(case: Case, policy: MixedPrecisionPolicy) -> Training:
    training = _sharded(fully_shard, case, policy)
    for group in named_groups(training.model).values():
        group.collectives = _Copying(group.dp.shard_group)
    return training


def _without_written_gradients(case: Case, policy: MixedPrecisionPolicy) -> Training:
    with mock.patch("torch_ragged.fsdp.core._fsdp_param_group.SMALLEST_WRITTEN_IN_PLACE", 2**62):
        return _sharded(fully_shard, case, policy)


def _plain(case: Case, policy: MixedPrecisionPolicy) -> tuple[nn.Module, torch.Tensor]:
    dtype = policy.param_dtype or torch.float32
    return case.model().to(dtype), case.inputs(dist.get_rank()).to(dtype)


def _ddp(case: Case, policy: MixedPrecisionPolicy) -> Training:
    model, inputs = _plain(case, policy)
    model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return Training(model, adamw(model.parameters()), inputs)


def _one_process(case: Case, policy: MixedPrecisionPolicy) -> Training:
    model, inputs = _plain(case, policy)
    return Training(model, adamw(model.parameters()), inputs)


class _Floor(Training):
    """Compute of one process, an optimizer for a shard, and the collectives alone, on memory that nobody copies."""

    def optimize(self) -> None:
        super().optimize()
        self.model.zero_grad()


def _floor(case: Case, policy: MixedPrecisionPolicy) -> Training:
    model, inputs = _plain(case, policy)
    ranks = dist.get_world_size()
    shards = [-(-sum(param.numel() for param in block.parameters()) // ranks) for block in model]
    masters = [nn.Parameter(torch.zeros(numel)) for numel in shards]
    for master in masters:
        master.grad = torch.ones_like(master)
    optimizer = adamw(masters)
    optimizer.zero_grad = lambda: None  # type: ignore[method-assign]
    return _Floor(model, optimizer, inputs, bare_collectives(shards, policy, len(shards) - 1))


def bare_collectives(shards: list[int], policy: MixedPrecisionPolicy, gathered_again: int) -> Callable[[], None]:
    """An all-gather in forward of each group, one in backward of the first so many, and a reduce-scatter of each."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    collectives = ProcessGroupCollectives(dist.group.WORLD)
    gathered, reduced = torch.zeros(2, ranks * max(shards), dtype=policy.param_dtype or torch.float32)
    output = torch.empty(max(shards), dtype=policy.reduce_dtype or gathered.dtype)  # Added up in this dtype.

    def run() -> None:
        for numel in (*shards, *shards[:gathered_again]):
            buffer = gathered[: ranks * numel]
            collectives.all_gather(buffer, buffer[rank * numel : (rank + 1) * numel]).wait()
        for numel in shards:
            collectives.reduce_scatter(output[:numel], reduced[: ranks * numel], Reduction(divisor=1)).wait()

    return run


SYSTEMS: dict[str, Callable[[Case, MixedPrecisionPolicy], Training]] = {
    "ragged": functools.partial(_sharded, fully_shard),
    "ragged, copy engine": _by_copy_engine,
    "FSDP2": functools.partial(_sharded, torch_fully_shard),
    "DDP": _ddp,
    "one process": _one_process,
    "floor": _floor,
    "rows(32)": _of_rows,
    "rows(32), no planner": _without_planner,
    "no DBuffer": _without_dbuffer,
    "gradients copied": _without_written_gradients,
}
