"""Trains a random case on the ranks of this process group and in one process, and compares the two after each action.

The plain model follows the sharded one: once the gradients of both are compared, it steps with the sharded run's gradients, and
once parameters are compared, it goes on with those. So no error grows from step to step, and every tolerance is that of one
forward and backward:

- Values that only move (state dicts, loaded values, what ranks hold of the same tensor) must be bitwise equal.
- Gradients and outputs: ``SLACK`` roundings of the narrowest dtype of the case, of the largest number that is added up. Ranks
  add partial sums in another order, and kernels add in another order if shapes or alignment differ. If a value differs by
  more, ``SLACK`` times what a rounding of the parameters does to it.
- Our optimizers step bitwise as in one process, given equal gradients. Torch's may differ by roundings of the last bit, because
  its vector kernels compute the tail of a tensor differently.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from fuzz_fsdp import granularity_of, owner_of
from fuzz_model import DTYPES, build, leaves_of, nodes_of
from fuzz_ops import bytes_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import torch_ragged.fsdp as ragged_fsdp
from torch_ragged.fsdp import FSDPModule, fully_shard
from torch_ragged.optim import AdamW8bit, Muon, matrix_groups

__all__ = ["Mismatch", "Training"]

SLACK = 64
NAMES = {"dp": ("dp",), "hsdp": ("replicas", "dp"), "tp": ("dp", "tp"), "hsdp_tp": ("replicas", "dp", "tp")}
_meshes: dict[Any, DeviceMesh] = {}


class Mismatch(AssertionError):
    """What the sharded run has differs from what one process has."""


class OnPurpose(Exception):
    """The error that a case raises in forward or backward."""


def mesh_of(kind: str, shape: tuple[int, ...]) -> DeviceMesh:
    """A mesh of the world group, made once per process group."""
    key = (kind, shape, id(dist.group.WORLD))
    if key not in _meshes:
        _meshes.clear() if len(_meshes) > 40 else None
        _meshes[key] = init_device_mesh("cpu", shape, mesh_dim_names=NAMES[kind])
    return _meshes[key]


class Training:
    """One case: :meth:`run` raises a :class:`Mismatch`, or whatever the sharded run raises."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.case, self.digest = case, hashlib.sha1()
        kind, shape = case["mesh"]
        whole = mesh_of(kind, tuple(shape))
        self.tp = whole["tp"] if "tp" in kind else None
        self.mesh = whole if self.tp is None else whole[NAMES[kind][:-1]]
        self.ranks = self.mesh.size()
        shards = self.mesh.size(-1)
        self.rank = sum(i * n for i, n in zip(self.mesh.get_coordinate() or (), (shards, 1)[-self.mesh.ndim :]))
        self.number = 0  # Of the next batch.
        self.steps: list[tuple[int, bool]] = []  # The batches since the last check, and whether rank 0 had no rows.
        self.plain, self.plain_context = build(case)
        self.model, self.context = build(case, self.tp)
        self.precision = self._cast_plain()
        self.divisor = case["knobs"].get("set_gradient_divide_factor", self.ranks)

    # -- the sharded model -------------------------------------------------------------------------------------------------

    def shard(self) -> None:
        """The calls of ``fully_shard``, from the leaves to the root, and the knobs."""
        case, calls = self.case, []
        for name, node in reversed(nodes_of(case["tree"])):
            module = self.model.get_submodule(name)
            if "list" in node:
                calls.append(([module.get_submodule("0"), module.get_submodule("1")], node["list"]))
            if "shard" in node:
                calls.append((module, node["shard"]))
        for target, options in calls:
            fully_shard(target, **self._options(options))
        self._set_knobs()
        self.optimizers = [self._optimizer(self.model, False), self._optimizer(self.plain, True)]

    def _options(self, chosen: dict[str, Any]) -> dict[str, Any]:
        case, policy = self.case, chosen.get("policy", self.case["policy"])
        options: dict[str, Any] = {"mesh": self.mesh, "reshard_after_forward": chosen["reshard_after_forward"]}
        if case["mp"] is not None:
            dtypes = {name: DTYPES.get(value, value) if isinstance(value, str) else value for name, value in case["mp"].items()}
            options["mp_policy"] = MixedPrecisionPolicy(**dtypes)
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False) if case["offload"] else OffloadPolicy()
        options["placements"] = getattr(ragged_fsdp, case["placements"]) if case["placements"] else None
        if chosen.get("shard_fn"):
            options["shard_placement_fn"] = lambda p: Shard(p.ndim - 1) if p.ndim else None
        elif policy != "none":
            options["orig_param_policy"] = lambda fqn, p: granularity_of(policy, fqn)
        return options

    def _set_knobs(self) -> None:
        knobs, model = self.case["knobs"], self.model
        parts = self.parts()
        for name, value in knobs.items():
            if name in ("set_force_sum_reduction_for_comms", "set_gradient_divide_factor"):
                for part in parts:
                    getattr(part, name)(value)
            elif name == "prefetch":
                for index, part in enumerate(parts):
                    part.set_modules_to_forward_prefetch(parts[index + 1 : index + 1 + value])
                    part.set_modules_to_backward_prefetch(parts[max(0, index - value) : index][::-1])
            elif name == "collectives":
                model.set_collectives(value)
            else:
                getattr(model, name)(value)

    def parts(self) -> list[Any]:
        """The modules that ``fully_shard`` was called on, in the order of modules()."""
        return [module for module in self.model.modules() if isinstance(module, FSDPModule)]

    def _optimizer(self, model: nn.Module, is_plain: bool) -> torch.optim.Optimizer | None:
        kind, params = self.case["optimizer"], [p for p in model.parameters() if p.requires_grad]
        if not params:
            return None
        if kind in ("sgd", "momentum"):
            return torch.optim.SGD(params, lr=0.05, momentum=0.9 if kind == "momentum" else 0.0, weight_decay=0.01)
        if kind == "muon":
            groups = matrix_groups(model, lr=0.01)
            for group in groups:
                group["params"] = [p for p in group["params"] if p.requires_grad and p.numel()]
            return Muon([group for group in groups if group["params"]], lr=0.02) if any(g["params"] for g in groups) else None
        if kind == "adamw8bit":
            return AdamW8bit([p for p in params], lr=0.01)
        return torch.optim.AdamW(params, lr=0.01, foreach=None if kind == "adamw" else False)

    # -- the model in one process ------------------------------------------------------------------------------------------

    def _cast_plain(self) -> float:
        """Let the plain model cast as ``mp_policy`` does. Returns the rounding of the narrowest dtype of the case."""
        case = self.case
        names = [case["dtype"], *(leaf["dtype"] for _, leaf in leaves_of(case["tree"]) if "dtype" in leaf)]
        policy = case["mp"] or {}
        names += [value for name in ("param_dtype", "reduce_dtype", "output_dtype") if (value := policy.get(name))]
        if policy:
            cast, output = DTYPES.get(policy["param_dtype"] or ""), DTYPES.get(policy["output_dtype"] or "")
            for name, _ in leaves_of(case["tree"]):
                self.plain.get_submodule(name).cast = cast
            calls = {owner_of(case, name) for name, _ in leaves_of(case["tree"])}
            calls |= {name for name, node in nodes_of(case["tree"]) if "shard" in node or "list" in node}
            for name, node in nodes_of(case["tree"]):
                module, parent = self.plain.get_submodule(name), name.rpartition(".")[0]
                listed = name and name[-1] in "01" and "list" in dict(nodes_of(case["tree"]))[parent]
                if "shard" in node or listed:
                    if cast is not None and policy["cast_forward_inputs"]:
                        module.register_forward_pre_hook(lambda m, args: (args[0].to(cast),))
                    if output is not None:
                        module.register_forward_hook(lambda m, args, result: result.to(output))
        return max(torch.finfo(DTYPES[name]).eps for name in names)

    # -- actions -----------------------------------------------------------------------------------------------------------

    def run(self) -> str:
        """All actions. Returns a digest of all values compared, which is the same on all ranks."""
        self.shard()
        self.check_values("after fully_shard")
        for index, action in enumerate(self.case["actions"]):
            self.where = f"action {index} ({action['do']})"
            getattr(self, "do_" + action["do"])(action)
        self.check_values("at the end", exact=False)
        return self.digest.hexdigest()

    def batch(self, number: int, rank: int, empty: bool = False) -> tuple[torch.Tensor, list[bool], torch.Tensor]:
        """Input, branches and table rows of one rank."""
        generator = torch.Generator().manual_seed(self.case["seed"] * 1009 + number * 17 + rank)
        rows = 0 if empty and rank == 0 else self.case["rows"]
        x = torch.randn(rows, self.case["width"], generator=generator, dtype=torch.float64).to(DTYPES[self.case["dtype"]])
        flags = [bool(flag) for flag in torch.randint(0, 2, (4,), generator=generator)]
        return x, flags, torch.randint(0, 1000, (8,), generator=generator)

    def forward(self, plain: bool, number: int, rank: int, empty: bool = False) -> torch.Tensor:
        model, context = (self.plain, self.plain_context) if plain else (self.model, self.context)
        x, context.flags, context.ids = self.batch(number, rank, empty)
        # Else a rank whose branch is frozen would have no backward, and ranks that have one would wait for it.
        return model(x.requires_grad_(torch.is_grad_enabled()))

    def do_train(self, action: dict[str, Any]) -> None:
        model, micro, manual = self.model, action["micro"], "set_manual_backward_finalization" in self.case["knobs"]
        scale = 1.0
        for index in range(micro):
            last = index == micro - 1
            model.set_requires_gradient_sync(last or action["sync"] != "last")
            model.set_requires_all_reduce(last or action["sync"] != "replicas")
            model.set_is_last_backward(last)
            model.set_reshard_after_backward(last or self.case["knobs"].get("set_reshard_after_backward", True))
            if action["eval_between"]:
                self.do_eval(action)
            number, self.number = self.number, self.number + 1
            self.steps.append((number, action["empty"]))
            output = self.forward(False, number, self.rank, action["empty"])
            loss = output.pow(2).sum() if output.requires_grad else None
            if loss is not None:
                loss.backward()
                if manual and (last or action["sync"] != "last"):
                    model.finalize_backward()
            for rank in range(self.ranks):
                if rank != self.rank:
                    expected = self.forward(True, number, rank, action["empty"])
                else:
                    expected = self.compare_output(output, number, action["empty"])
                    if output.dtype != expected.dtype:
                        raise Mismatch(f"{self.where}: the output is {output.dtype}, expected {expected.dtype}")
                if expected.requires_grad:
                    (expected.pow(2).sum() / self.divisor).backward()
                scale = max(scale, float(expected.detach().abs().max()) if expected.numel() else 0)
        self.check_gradients(micro * scale)
        self._finish_step(action)

    def _finish_step(self, action: dict[str, Any]) -> None:
        if action["clip"] is not None and self.optimizers[0] is not None:
            norms = [clip(list(m.parameters()), action["clip"]) for m in (self.model, self.plain)]
            self.compare(full(norms[0]), norms[1], "norm of gradients", float(norms[1]))
            self.check_gradients(1.0)
        if action["optimizer"] and self.optimizers[0] is not None:
            for optimizer in self.optimizers:
                optimizer.step()
            self.check_values("after the optimizer's step", exact=self.case["optimizer"] in ("muon", "adamw8bit"))
            for each in (self.model, self.plain):
                if action["zero"] != "no":
                    each.zero_grad(set_to_none=action["zero"] == "none")

    def do_eval(self, action: dict[str, Any]) -> None:
        number, self.number = self.number, self.number + 1
        with torch.no_grad():
            self.compare_output(self.forward(False, number, self.rank), number, False, "output of an evaluation")

    def do_fail_forward(self, action: dict[str, Any]) -> None:
        """A forward that raises in a leaf, on all ranks."""

        def fail(*args: Any) -> None:
            raise OnPurpose

        names = [name for name, _ in leaves_of(self.case["tree"])]
        handle = self.model.get_submodule(names[int(action["choice"] * len(names))]).register_forward_hook(fail)
        with contextlib.suppress(OnPurpose):
            self.forward(False, self.number, self.rank)
        handle.remove()
        self.model.reset_iter_state()
        self.forget()

    def do_fail_backward(self, action: dict[str, Any]) -> None:
        """A backward that raises at the output of a leaf, on all ranks; the next forward recovers."""

        def fail(gradient: torch.Tensor) -> None:
            raise OnPurpose

        def attach(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            if output.requires_grad:
                output.register_hook(fail)

        names = [name for name, _ in leaves_of(self.case["tree"])]
        handle = self.model.get_submodule(names[int(action["choice"] * len(names))]).register_forward_hook(attach)
        try:
            output = self.forward(False, self.number, 0)  # On all ranks alike: branches decide what has a gradient.
            if output.requires_grad:
                output.sum().backward()
                if "set_manual_backward_finalization" in self.case["knobs"]:
                    self.model.finalize_backward()
        except OnPurpose:
            pass
        handle.remove()
        if action["choice"] < 0.5:
            self.model.reset_iter_state()
        else:
            self.do_eval(action)
        self.forget()

    def forget(self) -> None:
        """What an interrupted pass has added is dropped: in ``.grad``, and in buffers of the model."""
        self.reshard()  # zero_grad() reaches registered parameters only, as with FSDP2.
        for each in (self.model, self.plain):
            each.zero_grad()
        self.match_buffers()

    def match_buffers(self) -> None:
        for one, other in zip(self.model.buffers(), self.plain.buffers(), strict=True):
            one.copy_(other)

    def do_state_dict(self, action: dict[str, Any]) -> None:
        self.compare_dicts(self.model.state_dict(), self.plain.state_dict())

    def compare_dicts(self, found: dict[str, Any], expected: dict[str, Any]) -> None:
        if list(found) != list(expected):
            raise Mismatch(f"{self.where}: names {list(found)}, expected {list(expected)}")
        for name, value in expected.items():
            if not name.endswith("calls"):  # The plain model has run for every rank.
                self.compare(full(found[name]), value, name, 0.0)

    def do_load(self, action: dict[str, Any]) -> None:
        """Load other values, made of the plain model's."""
        values = {name: value.detach() * 0.5 + 0.1 for name, value in self.plain.state_dict().items()}
        values = {name: value.to(self.plain.state_dict()[name].dtype) for name, value in values.items()}
        placed = {}
        for name, value in self.model.state_dict().items():
            is_dtensor = isinstance(value, DTensor)
            placed[name] = distribute_tensor(values[name], value.device_mesh, value.placements) if is_dtensor else values[name]
        self.model.load_state_dict(placed, assign=action["choice"] < 0.3)
        self.plain.load_state_dict(values)
        self.check_values("after load_state_dict")

    def do_knob(self, action: dict[str, Any]) -> None:
        """Change something between steps."""
        model, choice = self.model, int(action["choice"] * 5)
        if choice == 0:
            model.set_reshard_after_forward(action["choice"] < 0.1)
        elif choice == 1:
            model.set_max_all_gathers_ahead(int(action["choice"] * 50) % 3)
        elif choice == 2:
            model.train(not model.training)
            self.plain.train(model.training)
        elif choice == 3:
            frozen = list(dict(model.named_parameters()))[0]
            for each in (model, self.plain):
                if self.optimizers[0] is not None and len(list(each.parameters())) > 1:
                    parameter = dict(each.named_parameters())[frozen]
                    parameter.grad = None
        else:
            model.set_requires_gradient_sync(True)

    def do_unshard(self, action: dict[str, Any]) -> None:
        """All-gather parts by hand; some are resharded again, the other ones stay until they run."""
        for index, part in enumerate(self.parts()):
            if "set_persistent_buffers" in self.case["knobs"] or (index + int(action["choice"] * 10)) % 3 == 0:
                part.unshard()
                part.reshard()
            elif (index + int(action["choice"] * 10)) % 3 == 1:
                handle = part.unshard(async_op=True)
                handle.wait()

    def do_optimizer_state(self, action: dict[str, Any]) -> None:
        """Into a new optimizer by way of its state dict."""
        if self.optimizers[0] is None:
            return
        states = [copy.deepcopy(optimizer.state_dict()) for optimizer in self.optimizers]
        self.reshard()
        self.optimizers = [self._optimizer(self.model, False), self._optimizer(self.plain, True)]
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)

    def do_double(self, action: dict[str, Any]) -> None:
        """To float64 and back: values that only move, and the same parameters."""
        if self.case["dtype"] == "float32" and not any("dtype" in leaf for _, leaf in leaves_of(self.case["tree"])):
            self.forget()
            before = [id(p) for p in self.parameters()]
            self.model.double().float()
            self.plain.double().float()
            if before != [id(p) for p in self.parameters()]:
                raise Mismatch(f"{self.where}: the parameters are other objects")
            self.check_values("after double().float()")

    # -- comparisons -------------------------------------------------------------------------------------------------------

    def reshard(self) -> None:
        for part in self.parts():
            part.reshard()

    def parameters(self) -> list[torch.Tensor]:
        self.reshard()
        return list(self.model.parameters())

    def check_values(self, when: str, exact: bool = True) -> None:
        """Parameters are those of one process; then the plain model takes the sharded one's."""
        self.reshard()
        names = [name for name, _ in self.plain.named_parameters()]
        if names != [name for name, _ in self.model.named_parameters()]:
            raise Mismatch(f"{when}: names {[name for name, _ in self.model.named_parameters()]}, expected {names}")
        for (name, param), other in zip(self.model.named_parameters(), self.plain.parameters(), strict=True):
            value, slack = full(param.detach()), 0.0
            if not exact:
                slack = 8 * torch.finfo(param.dtype).eps / (SLACK * self.precision) * max(1.0, largest(other))
            self.compare(value, other.detach(), f"{name} {when}", slack)
            other.data.copy_(value)

    def check_gradients(self, scale: float) -> None:
        self.reshard()
        biggest = max((largest(p.grad) for p in self.plain.parameters() if p.grad is not None), default=0.0)
        for (name, param), other in zip(self.model.named_parameters(), self.plain.parameters(), strict=True):
            if (param.grad is None) != (other.grad is None):
                found = "no gradient" if param.grad is None else "a gradient"
                raise Mismatch(f"{self.where}: {name} has {found}, which one process does not")
            if param.grad is not None:
                value, limit = full(param.grad), max(largest(other.grad), 0.1 * biggest, 0.01 * scale)
                if param.grad.dtype != param.dtype:
                    raise Mismatch(f"{self.where}: the gradient of {name} is {param.grad.dtype}, expected {param.dtype}")
                if self.steps and largest(value - other.grad) > SLACK * self.precision * limit:
                    limit = max(limit, self.rounded()[name] / self.precision)
                self.compare(value, other.grad, f"gradient of {name}", limit)
                other.grad.copy_(value)
        self.steps = []

    def rounded(self) -> dict[str, float]:
        """How much each gradient of the forwards since the last check changes if all parameters change by a rounding."""
        params = dict(self.plain.named_parameters())
        kept = {name: param.grad for name, param in params.items()}
        gradients = []
        for change in (contextlib.nullcontext, self.changed_by_a_rounding):
            for param in params.values():
                param.grad = torch.zeros_like(param)
            with change():
                for number, empty in self.steps:
                    for rank in range(self.ranks):
                        output = self.forward(True, number, rank, empty)
                        if output.requires_grad:
                            (output.pow(2).sum() / self.divisor).backward()
            gradients.append({name: param.grad for name, param in params.items()})
        for name, param in params.items():
            param.grad = kept[name]
        return {name: largest(gradients[1][name] - gradients[0][name]) for name in params}

    @contextlib.contextmanager
    def changed_by_a_rounding(self) -> Iterator[None]:
        kept = [param.detach().clone() for param in self.plain.parameters()]
        for param in self.plain.parameters():
            param.data.mul_(1 + self.precision * torch.randn_like(param))
        yield
        for param, value in zip(self.plain.parameters(), kept, strict=True):
            param.data.copy_(value)

    def compare_output(self, output: torch.Tensor, number: int, empty: bool, what: str = "output") -> torch.Tensor:
        """Compare with the plain model's output of this rank's batch, and return that."""
        expected = self.forward(True, number, self.rank, empty)
        limit = largest(expected) if expected.numel() else 1.0
        if output.shape == expected.shape and largest(output - expected) > SLACK * self.precision * limit:
            with self.changed_by_a_rounding(), torch.no_grad():
                limit = max(limit, largest(self.forward(True, number, self.rank, empty) - expected) / self.precision)
        self.compare(output, expected, what, limit)
        return expected

    def compare(self, found: torch.Tensor, expected: torch.Tensor, what: str, scale: float) -> None:
        """Raise if they differ by more than ``SLACK`` roundings of ``scale``; by anything at all if that is 0."""
        found, expected = found.detach(), expected.detach()
        if found.shape != expected.shape:
            raise Mismatch(f"{self.where}: {what} has shape {tuple(found.shape)}, expected {tuple(expected.shape)}")
        if not what.startswith("output"):
            self.digest.update(bytes_of(found))
        if torch.equal(found, expected.to(found.dtype)):
            return
        error, limit = float((found.double() - expected.double()).abs().max()), SLACK * self.precision * scale
        if not error <= limit:
            raise Mismatch(f"{self.where}: {what} differs by {error:.3g}, limit {limit:.3g}\n{found}\nexpected\n{expected}")

    where = "at first"


def clip(params: list[torch.Tensor], limit: float) -> torch.Tensor:
    """Clip gradients, of DTensors on one mesh or on several: torch's function takes one only."""
    meshes: dict[Any, list[torch.Tensor]] = {}
    for param in params:
        if param.grad is not None:
            meshes.setdefault(param.grad.device_mesh if isinstance(param.grad, DTensor) else None, []).append(param)
    if len(meshes) < 2:
        return nn.utils.clip_grad_norm_(params, limit)
    norms = [full(nn.utils.get_total_norm([p.grad for p in mine])) for mine in meshes.values()]
    total = torch.linalg.vector_norm(torch.stack([norm.double() for norm in norms]))
    for mine in meshes.values():
        nn.utils.clip_grads_with_norm_(mine, limit, total)
    return total


def shared_folder(closes: contextlib.ExitStack) -> str:
    """A new folder, the same one on all ranks, which ``closes`` removes when no rank reads it any more."""
    found = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(found, 0)

    def remove() -> None:
        dist.barrier()
        shutil.rmtree(found[0], ignore_errors=True)

    closes.callback(remove)
    return found[0]


def largest(tensor: torch.Tensor) -> float:
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
