"""Trains a model under a random plan and in one process, and compares the two after each step; or sees a wrong plan refused.

The model in one process follows the distributed one: once gradients are compared, it steps with those of the distributed run,
and once parameters are compared, it goes on with those. So no error grows from step to step, and every tolerance is that of one
forward and backward:

- Initial values, state dicts, loaded values, and the states of the generator of random numbers are bitwise equal.
- Losses, outputs, gradients and buffers: ``SLACK`` roundings of the narrowest dtype of the case. Ranks add partial sums in
  another order. If a value differs by more, ``SLACK`` times what a rounding of all parameters does to it. Most cases compute in
  float64, where this is about 1e-14: one other element in a dropout's mask changes losses by 1e-3.
- Parameters after a step, given equal gradients: the optimizers of this package step bitwise as in one process. Torch's may
  differ by roundings, because its vector kernels compute the tail of a tensor differently.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import shutil
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from fuzz_ops import bytes_of
from fuzz_plan_model import DTYPES, Network, Output, build
from fuzz_training import SLACK, Mismatch, full, largest
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from torch_ragged import checkpoint
from torch_ragged._register._spmd import compute_as_torch
from torch_ragged.optim import Muon, matrix_groups
from torch_ragged.random import single_device
from torch_ragged.spmd import Plan, deferred_init, parallelize
from torch_ragged.tensor._random import scope

__all__ = ["run_case"]

_meshes: dict[Any, DeviceMesh] = {}


def mesh_of(mesh: dict[str, Any]) -> DeviceMesh:
    """A mesh of the world group, made once per process group."""
    key = (mesh["sizes"], mesh["names"], id(dist.group.WORLD))
    if key not in _meshes:
        _meshes.clear() if len(_meshes) > 40 else None
        _meshes[key] = init_device_mesh("cpu", mesh["sizes"], mesh_dim_names=mesh["names"])
    return _meshes[key]


def run_case(case: dict[str, Any]) -> tuple[str, str]:
    """Run a case on all ranks. Returns a digest of all that was compared, equal on all ranks, and a text of what happened."""
    try:
        training = Training(case)
        if case["wrong"]:
            training.check_refused()
        training.run()
        return training.digest.hexdigest(), training.told
    finally:
        compute_as_torch()
        single_device(False)


class Training:
    """One case: :meth:`run` raises a :class:`Mismatch`, or whatever the distributed run raises."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.case, self.digest, self.where, self.told = case, hashlib.sha1(), "at first", ""
        names = [case["dtype"], *(each for each in case["policy"] or () if each)]
        self.precision = max(torch.finfo(DTYPES[name]).eps for name in names)
        self.plain, self.model = self._build(), self._build(deferred=case["deferred"])
        self.number = 0  # Of the next batch.
        self.batches: list[tuple[int, torch.Tensor, list[torch.Tensor]]] = []  # Of this step: with random state and buffers.

    def _build(self, deferred: bool = False, seed: int = 0) -> Network:
        case = self.case
        torch.manual_seed(case["seed"] + seed)
        make = lambda: build(case["model"], case["dtype"])  # noqa: E731
        return deferred_init(make) if deferred else make()

    def run(self) -> None:
        case = self.case
        torch.manual_seed(case["seed"])
        self._build()  # For the state of the generator, with which a deferred model goes on.
        self.model = parallelize(self.model, case["plan"], mesh_of(case["mesh"]), mode=case["mode"])
        self.segments = self.model.plan_ir.segments  # type: ignore[union-attr]
        self._cast_plain()
        self.optimizers = [self._optimizer(model) for model in (self.model, self.plain)]
        self._add_hooks()
        self.check_values("at first")
        for step in range(case["steps"]):
            self.where = f"step {step}"
            self.step()
        self.where = "evaluation"
        for model in (self.model, self.plain):
            model.eval()
        with torch.no_grad():
            self.forward()
        self.check_state()
        if case["mode"] == "static":
            self.told += f"static modules {len(self.model.static_modules.report.modules)}"  # type: ignore[union-attr]
        if case["saved"]:
            self.where = "checkpoint"
            self.check_checkpoint()

    # -- the two models ----------------------------------------------------------------------------------------------------

    def _optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        kind, params = self.case["optimizer"], [p for p in model.parameters() if p.requires_grad]
        if kind == "muon":
            stacks = [name for name, _ in model.named_parameters() if name.endswith((".w1", ".w2"))]
            groups = matrix_groups(model, lr=0.01, matrices=stacks, segments=self.segments)
            for group in groups:
                group["params"] = [p for p in group["params"] if p.requires_grad]
            return Muon([group for group in groups if group["params"]], lr=0.02)
        if kind == "sgd":
            return torch.optim.SGD(params, lr=0.05, momentum=0.9)
        return torch.optim.AdamW(params, lr=0.01, foreach=None if kind == "adamw" else False)

    def _add_hooks(self) -> None:
        """Hooks of the user on parameters; those of units are called for the unsharded ones, as in FSDP2."""
        records = {record.name: record for record in self.model.plan_ir.tensors}  # type: ignore[union-attr]
        self.hooks = []
        for index, name in enumerate(self.case["hooks"]):
            if name in records and records[name].unit is None:
                for model in (self.model, self.plain):
                    param = model.get_parameter(name)
                    if param.requires_grad and index % 2:
                        self.hooks.append(param.register_hook(lambda grad: grad * 2))
                    elif param.requires_grad:
                        self.hooks.append(param.register_post_accumulate_grad_hook(_double))

    def _cast_plain(self) -> None:
        """Let the model in one process cast as units with a ``mp_policy`` do."""
        if self.case["policy"] is None:
            return
        compute, _, output = [each and DTYPES[each] for each in self.case["policy"]]
        named = dict(self.plain.named_parameters(remove_duplicate=False))
        for unit in self.model.plan_ir.units:  # type: ignore[union-attr]
            module = self.plain.get_submodule(unit.module)
            mine = {id(named[name]) for name in unit.params}
            owners = [(owner, key) for owner in module.modules() for key, p in owner._parameters.items() if id(p) in mine]
            cast = _Cast(owners, compute, output)
            module.register_forward_pre_hook(cast.before, with_kwargs=True)
            module.register_forward_hook(cast.after)

    # -- steps -------------------------------------------------------------------------------------------------------------

    def batch(self, number: int) -> dict[str, torch.Tensor]:
        """The whole batch."""
        case, model = self.case, self.case["model"]
        generator = torch.Generator().manual_seed(case["seed"] * 1009 + number)
        shape = (case["rows"], case["length"])
        labels = torch.randint(0, model["vocabulary"], shape, generator=generator)
        batch = {"x": labels.roll(1, 1) if model["input"] == "ids" else torch.randn(*shape, 3, generator=generator)}
        if model["output"] in ("loss", "dict"):
            batch["labels"] = labels.masked_fill(torch.rand(shape, generator=generator) < 0.3, -100)
            batch["labels"][0, 0] = 1
        if model["mask"]:
            batch["mask"] = torch.rand(shape, generator=generator) < 0.2
        return {name: x.to(DTYPES[case["dtype"]]) if x.is_floating_point() else x for name, x in batch.items()}

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """What a loader gives this rank."""
        mesh = self.case["mesh"]
        for size, role, index in zip(mesh["sizes"], mesh["roles"], mesh_of(mesh).get_coordinate() or ()):
            if role in ("batch", "sequence"):
                whole = whole.chunk(size, 0 if role == "batch" else 1)[index]
        return whole

    def loss(self, model: nn.Module, number: int, plain: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The loss, and all tensors of the output."""
        batch = self.batch(number)
        if not plain and self.case["inputs"] == "parts":
            batch = {name: self.part(each) for name, each in batch.items()}
        output = model(batch.pop("x"), **batch)
        tensors = [output.logits, output.hidden] if isinstance(output, Output) else pytree.tree_leaves(output)
        tensors = [each for each in tensors if isinstance(each, torch.Tensor)]
        if self.case["model"]["output"] in ("loss", "dict"):
            return tensors[0], tensors
        target = torch.arange(tensors[0].shape[-1], dtype=tensors[0].dtype) / 8  # Whole, as a script makes it.
        loss = F.mse_loss(tensors[0], target.expand(tensors[0].shape))
        return loss + sum(each.tanh().mean() for each in tensors[1:]), tensors

    def forward(self) -> list[torch.Tensor]:
        """One forward of both models on the next batch, compared; returns both losses."""
        number, self.number = self.number, self.number + 1
        state = torch.get_rng_state()
        self.batches.append((number, state, [buffer.clone() for buffer in self.plain.buffers()]))
        results = [self.loss(self.model, number, plain=False)]
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        results.append(self.loss(self.plain, number, plain=True))
        if not torch.equal(after, torch.get_rng_state()):
            raise Mismatch(f"{self.where}: the generator of random numbers has another state than in one process")
        (loss, found), (other, expected) = results
        for index, (ours, theirs) in enumerate(zip([loss, *found], [other, *expected], strict=True)):
            what = f"output {index - 1}" if index else "the loss"
            if ours.dtype != theirs.dtype:
                raise Mismatch(f"{self.where}: {what} is {ours.dtype}, expected {theirs.dtype}")
            self.compare(full(ours), theirs, what, largest(theirs), lambda index=index: self.rounded()[index])
        return [loss, other]

    def step(self) -> None:
        case = self.case
        for _ in range(case["micro"]):
            losses = self.forward()
            for loss in losses:
                (loss / case["micro"]).backward()
        self.check_gradients()
        if case["clip"] is not None:
            norms = [nn.utils.clip_grad_norm_(model.parameters(), case["clip"]) for model in (self.model, self.plain)]
            self.compare(full(norms[0]), norms[1], "the norm of gradients", largest(norms[1]))
            self.check_gradients()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.check_values("after the step", exact=case["optimizer"] == "muon")
        self.batches.clear()

    # -- comparisons -------------------------------------------------------------------------------------------------------

    def check_values(self, when: str, exact: bool = True) -> None:
        """Parameters are those of one process, which takes the distributed ones; and so are buffers, up to roundings."""
        ours, theirs = dict(self.model.named_parameters()), dict(self.plain.named_parameters())
        if list(ours) != list(theirs):
            raise Mismatch(f"{when}: names {list(ours)}, expected {list(theirs)}")
        for name, other in theirs.items():
            value = full(ours[name].detach())
            slack = 0.0 if exact else 8 * torch.finfo(other.dtype).eps / (SLACK * self.precision) * max(1.0, largest(other))
            self.compare(value, other.detach(), f"{name} {when}", slack)
            other.data.copy_(value)
        for (name, buffer), other in zip(self.model.named_buffers(), self.plain.buffers(), strict=True):
            slack = 1 + largest(other) if other.is_floating_point() and self.number else 0.0
            self.compare(full(buffer), other, f"buffer {name} {when}", slack)
            other.copy_(full(buffer))

    def check_gradients(self) -> None:
        ours, theirs = dict(self.model.named_parameters()), dict(self.plain.named_parameters())
        biggest = max((largest(p.grad) for p in theirs.values() if p.grad is not None), default=0.0)
        for name, other in theirs.items():
            grad = ours[name].grad
            if grad is None and other.grad is not None or grad is not None and other.grad is None and largest(full(grad)):
                found = "no gradient" if grad is None else "a gradient"
                raise Mismatch(f"{self.where}: {name} has {found}, which one process does not")
            if other.grad is None or grad is None:
                continue
            if grad.dtype != other.dtype or not isinstance(grad, DTensor):
                raise Mismatch(f"{self.where}: the gradient of {name} is {type(grad).__name__} of {grad.dtype}")
            value = full(grad)
            scale = max(largest(other.grad), 0.1 * biggest)
            self.compare(value, other.grad, f"the gradient of {name}", scale, lambda name=name: self.rounded()[name])
            other.grad.copy_(value)

    def rounded(self) -> dict[Any, float]:
        """How much the losses and outputs, by index, and gradients, by name, of this step change by roundings.

        Those of parameters, and of what modules return: their backward rounds gradients, too, which cancel in a norm of two.
        """
        params = dict(self.plain.named_parameters())
        kept = {name: (param.grad, param.detach().clone()) for name, param in params.items()}
        buffers, state = [each.clone() for each in self.plain.buffers()], torch.get_rng_state()
        runs: list[dict[Any, torch.Tensor]] = []
        for is_changed in (False, True, True):
            found: dict[Any, torch.Tensor] = {}
            for name, param in params.items():
                param.grad = None
                change = 1 + self.precision * torch.randn(param.shape, generator=torch.Generator().manual_seed(len(runs)))
                param.data.copy_(kept[name][1] * change if is_changed else kept[name][1])
            rounds = functools.partial(_rounded_output, self.precision, torch.Generator().manual_seed(len(runs)))
            hooks = [module.register_forward_hook(rounds) for module in self.plain.modules()] if is_changed else []
            for number, state_then, buffers_then in self.batches:
                torch.set_rng_state(state_then)
                self._set_buffers(buffers_then)
                loss, outputs = self.loss(self.plain, number, plain=True)
                if torch.is_grad_enabled():
                    (loss / self.case["micro"]).backward()
                found |= dict(enumerate([loss, *outputs]))
            for hook in hooks:
                hook.remove()
            runs.append(found | {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in params.items()})
        for name, param in params.items():
            param.grad = kept[name][0]
            param.data.copy_(kept[name][1])
        self._set_buffers(buffers)
        torch.set_rng_state(state)
        return {key: max(largest(run[key] - runs[0][key]) for run in runs[1:]) for key in runs[0]}

    def _set_buffers(self, values: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for buffer, value in zip(self.plain.buffers(), values, strict=True):
                buffer.data.copy_(value)  # Not a write that the graph of this step would notice.

    def compare(self, found: torch.Tensor, expected: torch.Tensor, what: str, scale: float, rounded: Any = None) -> None:
        """Raise if they differ by more than ``SLACK`` roundings of ``scale``, and than what ``rounded`` says."""
        found, expected = found.detach(), expected.detach()
        if found.shape != expected.shape:
            raise Mismatch(f"{self.where}: {what} has shape {tuple(found.shape)}, expected {tuple(expected.shape)}")
        self.digest.update(bytes_of(found))
        if torch.equal(found, expected.to(found.dtype)):
            return
        error, limit = float((found.double() - expected.double()).abs().max()), SLACK * self.precision * scale
        if not error <= limit and rounded is not None:
            limit = max(limit, SLACK * rounded())
        if not error <= limit:
            raise Mismatch(f"{self.where}: {what} differs by {error:.3g}, limit {limit:.3g}\n{found}\nexpected\n{expected}")

    # -- checkpoints -------------------------------------------------------------------------------------------------------

    def check_state(self) -> None:
        ours, theirs = self.model.state_dict(), self.plain.state_dict()
        if list(ours) != list(theirs):
            raise Mismatch(f"state dict: names {list(ours)}, expected {list(theirs)}")
        for name, value in theirs.items():
            self.compare(full(ours[name]), value, f"{name} of the state dict", 0.0)

    def check_checkpoint(self) -> None:
        """Save, load under another plan, and go on."""
        case, folder = self.case, [tempfile.mkdtemp(prefix="fuzz-plan-") if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(folder)
        try:
            is_dcp = case["saved"] == "dcp"
            if is_dcp:
                dcp.save({"model": self.model.state_dict()}, checkpoint_id=folder[0])
            else:
                checkpoint.save(folder[0], checkpoint.TrainState(self.model, self.optimizers[0]))
            torch.manual_seed(case["seed"] + 1)
            model = self._build(deferred=not case["deferred"], seed=1)
            self.model = parallelize(model, case["plan2"], mesh_of(case["mesh2"]), mode=case["mode"])
            self.optimizers[0] = self._optimizer(self.model)
            if is_dcp:
                state = {"model": self.model.state_dict()}
                dcp.load(state, checkpoint_id=folder[0])
                self.model.load_state_dict(state["model"])
            else:
                checkpoint.load(folder[0], checkpoint.TrainState(self.model, self.optimizers[0]))
        finally:
            dist.barrier()
            shutil.rmtree(folder[0], ignore_errors=True) if dist.get_rank() == 0 else None
        self.check_values("after loading")
        self.check_state()
        if not is_dcp and case["inputs"] == "whole" and case["policy"] is None:
            for hook in self.hooks:  # The model that was loaded has none.
                hook.remove()
            for each in (self.model, self.plain):
                each.train()
            self.step()

    # -- wrong plans -------------------------------------------------------------------------------------------------------

    def check_refused(self) -> None:
        """A wrong plan raises on all ranks, and leaves the model and the process as they were. The model is made anew."""
        case, kind, model = self.case, self.case["wrong"], self.model
        before = [*model.named_parameters(), *model.named_buffers()]
        is_of_one = kind in ("on one rank", "other ranks have another")
        plan: Plan = case["plan"] if is_of_one and dist.get_rank() < case["size"] - 1 else case["wrong plan"]
        found: tuple[str, str, bool] = ("", "", False)
        try:
            parallelize(model, plan, mesh_of(case["mesh"]), mode="fast" if kind == "an unknown mode" else case["mode"])
        except Exception as error:
            found = (type(error).__name__, str(error), isinstance(error, ValueError))
        answers: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(answers, found)
        for name, text, is_value_error in answers:
            # A rank whose own plan is right tells of the other one's.
            is_told = is_of_one and name == "RuntimeError" and "parallelize failed on rank" in text
            if not (is_value_error or is_told):
                raise Mismatch(f"the wrong plan ({kind}) is not refused: {answers}")
        after = [*model.named_parameters(), *model.named_buffers()]
        changed = [name for (name, value), (_, old) in zip(after, before, strict=True) if value is not old]
        hooks = [m for m in model.modules() if m._forward_pre_hooks or m._forward_hooks or "FSDP" in type(m).__name__]
        if changed or hooks or hasattr(model, "plan_ir") or scope.is_on or DTensor._op_dispatcher._allow_implicit_replication:
            raise Mismatch(f"the wrong plan ({kind}) has changed something: {changed}, {hooks}, random {scope.is_on}")
        if not case["deferred"] and case["seed"] % 2:
            self._train_as_plain(model)
        self.model = self._build(deferred=case["deferred"]) if not case["deferred"] and case["seed"] % 2 else model
        self.told = f"a wrong plan raised ({kind}), "

    def _train_as_plain(self, model: nn.Module) -> None:
        other = copy.deepcopy(self.plain)
        for each in (model, other):
            torch.manual_seed(3)
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
            for number in range(2):
                loss, _ = self.loss(each, number, plain=True)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        for name, value in other.state_dict().items():
            self.compare(model.state_dict()[name], value, f"{name} after a wrong plan", 0.0)


def _double(param: torch.Tensor) -> None:
    param.grad.mul_(2)  # type: ignore[union-attr]


class _Cast:
    """Hooks of a unit in one process: parameters and inputs in the dtype of computation, and outputs in theirs.

    Parameters stay cast until the next forward: activation checkpointing runs a part of the unit again in backward.
    """

    def __init__(self, owners: list[tuple[nn.Module, str]], compute: Any, output: Any) -> None:
        self._owners, self._compute, self._output = owners, compute, output

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._compute is None:
            return None
        for owner, key in self._owners:
            vars(owner)[key] = owner._parameters[key].to(self._compute)  # type: ignore[union-attr]
        return pytree.tree_map(lambda leaf: _floating_to(leaf, self._compute), (args, kwargs))

    def after(self, module: nn.Module, args: Any, result: Any) -> Any:
        return None if self._output is None else pytree.tree_map(lambda leaf: _floating_to(leaf, self._output), result)


def _floating_to(leaf: Any, dtype: torch.dtype) -> Any:
    return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf


def _rounded_output(precision: float, generator: torch.Generator, module: torch.nn.Module, args: Any, output: Any) -> Any:
    """A forward hook: the output, each element off by about a rounding."""
    if not isinstance(output, torch.Tensor) or not output.is_floating_point():
        return output
    return output * (1 + precision * torch.randn(output.shape, generator=generator).to(output.dtype))
