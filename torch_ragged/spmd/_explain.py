"""``Plan.check`` and ``Plan.explain``: what a plan does, before any rank runs.

It must leave the process as it was: the user's model, the random state, and what ``parallelize`` switches on.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import warnings
from collections.abc import Mapping
from typing import Any, Optional, Union

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.utils._pytree import tree_leaves, tree_map

from torch_ragged._register._spmd import compute_as_before
from torch_ragged._register._torch import fake_world
from torch_ragged.fsdp._groups import named_groups
from torch_ragged.random import single_device
from torch_ragged.spmd._boundary import wrap_changes
from torch_ragged.spmd._explained import ExplainedBoundary, ExplainedRule, ExplainedTensor, Memory
from torch_ragged.spmd._explanation import Explanation
from torch_ragged.spmd._parallelize import parallelize, run_placements
from torch_ragged.spmd._plan import Plan
from torch_ragged.spmd._recorder import CollectiveRecorder, UnitCollectives
from torch_ragged.spmd._resolve import resolve
from torch_ragged.spmd._resolved import Boundary, MeshShape, Resolved
from torch_ragged.tensor._cut_placement import has_flat
from torch_ragged.tensor._placement_text import placement_text

__all__ = ["check", "explain"]


def check(plan: Plan, model: nn.Module, mesh: Union[DeviceMesh, MeshShape]) -> Resolved:
    """Find all errors of the plan at once. Nothing is changed, and nothing is communicated::

        print(plan.check(model, MeshShape(("dp", "tp"), (64, 8))))

    Args:
        model: any module, on any device, meta included.
        mesh: a mesh; or a ``MeshShape``, which needs no ranks.

    Returns:
        The records that :func:`parallelize` carries out; ``print`` shows a table.

    Raises:
        PlanError: the plan does not fit the model or the mesh.
        TypeError, ValueError: ``mesh`` is no mesh, or its dimensions have no names.
    """
    return resolve(plan, model, mesh)


def explain(plan: Plan, model: nn.Module, mesh: Union[DeviceMesh, MeshShape], *inputs: Any, **kwargs: Any) -> Explanation:
    """Show what a plan does on any number of ranks, from one process and without memory::

        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        ids = torch.zeros(128, 4096, dtype=torch.int64)
        print(plan.explain(model, MeshShape(("dp", "tp"), (64, 8)), input_ids=ids, labels=ids))

    It parallelizes a copy of the model that has no memory, on a process group that moves no data. Then it runs forward and
    backward once, as rank 0. So the collectives are those that the ranks issue, not an estimate. The loss is ``output.loss``,
    or the sum of the first tensor of the output that needs a gradient.

    It computes as on the CPU. On GPUs, attention has other kernels, which may need other redistributions. Over gloo, the
    reduce-scatters of units are all-to-alls.

    Args:
        model: any module, on any device, meta included. It is not changed.
        mesh: a ``MeshShape``.
        inputs, kwargs: the arguments of forward, as on a single device: whole tensors; of own rows, those of one rank.
            Floating-point ones need no memory (meta). Integers on the meta device count as zeros.

    Raises:
        PlanError: the plan does not fit the model or the mesh.
        RuntimeError: this process has a process group already; or forward or backward fails, as it would on the ranks, or
            because it reads the value of a floating-point tensor.
    """
    if dist.is_initialized():
        raise RuntimeError(
            "explain makes a process group of its own, and this process has one already: call it before init_process_group, or "
            "in another process, as the command torch-ragged-spmd explain does"
        )
    resolved, shape = check(plan, model, mesh), MeshShape.of(mesh)
    with contextlib.ExitStack() as stack:
        # Each undoes at its end, also after an error, what it or parallelize() changes in this process: the process group, the
        # handlers of DTensor, the generators and the warnings.
        stack.enter_context(fake_world(math.prod(shape.sizes)))
        stack.enter_context(compute_as_before())
        stack.enter_context(single_device())
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # They are compared, and not read.
        world = init_device_mesh("cpu", shape.sizes, mesh_dim_names=shape.names)
        return _Step(plan, model, resolved, world).explanation(inputs, kwargs)


# Attached here, as a plan knows no models, and these two need one.
Plan.check, Plan.explain = check, explain  # type: ignore[attr-defined]


class _Step:
    """One forward and backward of a copy of ``model``, and what was seen."""

    def __init__(self, plan: Plan, model: nn.Module, resolved: Resolved, mesh: DeviceMesh) -> None:
        self._plan, self._resolved, self._mesh = plan, resolved, mesh
        self._recorder = CollectiveRecorder(mesh)
        self._model = _fake_copy(model, self._recorder)
        self._dtypes = {name: value.dtype for name, value in _tensors_by_name(self._model).items()}

    def explanation(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Explanation:
        recorder, model = self._recorder, self._model
        with recorder:
            parallelize(model, self._plan, self._mesh)
            self._watch()
            given = tree_map(functools.partial(_fake_input, recorder=recorder), (inputs, kwargs))
            # Those of parallelize() are no part of a step.
            recorder.collectives.clear()
            with torch.enable_grad():
                loss = _loss_of(model(*given[0], **given[1]))
                if loss is not None:
                    loss.backward()
            collectives = tuple(recorder.collectives)
            tensors = self._tensors()
        gathered: dict[str, int] = {}
        for each in collectives:
            if each.cause == "unit" and each.kind == "all-gather":
                gathered[each.source] = max(gathered.get(each.source, 0), each.nbytes)
        return Explanation(
            self._resolved.mesh,
            tuple([ExplainedRule(repr(rule), self._matched(index)) for index, rule in enumerate(self._plan.rules)]),
            tensors,
            tuple([ExplainedBoundary(each.path, each.action, _texts(each.placements)) for each in self._resolved.boundaries]),
            collectives,
            self._memory(tensors, max(gathered.values(), default=0)),
        )

    def _watch(self) -> None:
        recorder = self._recorder

        def watched(boundary: Boundary, change: Any) -> Any:
            def call(tensor: torch.Tensor) -> torch.Tensor:
                with recorder.boundary(boundary.path):
                    return change(tensor)

            call.boundary = boundary  # type: ignore[attr-defined]
            return call

        wrap_changes(self._model, watched)
        for name, group in named_groups(self._model).items():
            name = name.partition("[")[0]
            # By the group, not by the module that runs: a unit is unsharded ahead, in the hook of another one.
            group.collectives = UnitCollectives(group.collectives, recorder, "" if name == "root" else name)
        recorder.watch(self._model)

    def _matched(self, index: int) -> tuple[str, ...]:
        resolved = self._resolved
        records: list[tuple[str, tuple[int, ...]]] = [
            *[(each.name, each.rules) for each in resolved.tensors],
            *[(each.path, each.rules) for each in resolved.boundaries],
            *[(each.module, each.rules) for each in resolved.factories],
            *[(each.module, each.rules) for each in resolved.units],
        ]
        return tuple([name for name, rules in records if index in rules])

    def _tensors(self) -> tuple[ExplainedTensor, ...]:
        values, found = _tensors_by_name(self._model), []

        @functools.cache
        def run_bytes(shape: tuple[int, ...], dtype: torch.dtype, placements: tuple[Placement, ...]) -> int:
            return _local_bytes(distribute_tensor(torch.empty(shape, dtype=dtype, device="cpu"), self._mesh, placements))

        for record in self._resolved.tensors:
            value, run, dtype = values[record.name], run_placements(record), self._dtypes[record.name]
            kept = value.placements if isinstance(value, DTensor) else run
            found.append(
                ExplainedTensor(
                    record.name,
                    record.is_parameter,
                    record.shape,
                    str(dtype).removeprefix("torch."),
                    record.unit,
                    _texts(kept),
                    _texts(run),
                    _local_bytes(value),
                    run_bytes(record.shape, dtype, run),
                )
            )
        return tuple(found)

    def _memory(self, tensors: tuple[ExplainedTensor, ...], gathered: int) -> Memory:
        grads = [param.grad for param in self._model.parameters() if param.grad is not None]
        gradients = sum(map(_local_bytes, grads))
        return Memory(
            parameters=sum([each.kept_bytes for each in tensors if each.is_parameter]),
            buffers=sum([each.kept_bytes for each in tensors if not each.is_parameter]),
            gradients=gradients,
            optimizer=2 * gradients + 4 * len(grads),
            gathered=gathered,
        )


def _tensors_by_name(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_buffers()), **dict(model.named_parameters())}


def _fake_copy(model: nn.Module, recorder: CollectiveRecorder) -> nn.Module:
    """A copy of ``model`` with fake parameters and buffers on the CPU. Integer buffers keep their values."""
    # deepcopy takes from the memo what it would copy: parameters cost no memory, and tied ones stay tied.
    memo: dict[int, Any] = {}
    for value in _tensors_by_name(model).values():
        # The code of a model may read them, as positions and masks.
        if not value.is_floating_point() and not value.is_complex() and not value.is_meta:
            memo[id(value)] = value.detach().to("cpu", copy=True)
            continue
        with recorder.fake:
            fake: Any = torch.empty(value.shape, dtype=value.dtype, device="cpu")
        if isinstance(value, nn.Parameter):
            fake = nn.Parameter(fake, requires_grad=value.requires_grad)
        memo[id(value)] = fake
    return copy.deepcopy(model, memo)


def _fake_input(value: Any, recorder: CollectiveRecorder) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_floating_point() or value.is_complex():
        return torch.empty(value.shape, dtype=value.dtype, device="cpu").requires_grad_(value.requires_grad)
    return torch.zeros(value.shape, dtype=value.dtype, device="cpu") if value.is_meta else value.cpu()


def _loss_of(output: Any) -> Optional[torch.Tensor]:
    """The loss of a model's output; None if nothing in it needs a gradient."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    leaves = [loss] if isinstance(loss, torch.Tensor) else tree_leaves(output)
    found = next((each for each in leaves if isinstance(each, torch.Tensor) and each.requires_grad), None)
    return found if found is None or found.ndim == 0 else found.sum()


def _local_bytes(tensor: torch.Tensor) -> int:
    local = tensor.detach()
    return local.to_local().nbytes if isinstance(local, DTensor) else local.nbytes


def _texts(placements: Any) -> Any:
    """Placements as text, None as None. The units of ragged ones, a number per rank, are left out."""
    return tuple([None if each is None else _text(each) for each in placements])


def _text(placement: Placement) -> str:
    dims = getattr(placement, "dims", None)
    return f"{type(placement).__name__}({dims})" if has_flat((placement,)) else placement_text(placement)
