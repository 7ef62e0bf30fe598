"""Plays a random program in one process, under its plan in eager mode, and in static mode, and compares what it shows.

A play leaves a *trace*: after each step the loss, the outputs, stored tensors, all gradients and buffers, and at the end all
parameters, each with a name.

- Eager mode has the trace of one process, up to roundings: ranks add in another order. All is in float64, no function has jumps
  or blows up, and five steps let an error of 1e-16 grow to about 1e-13. The limit is 1e-9 of the largest number of the kind.
- Static mode has the trace of eager mode to the bit: local tensors and placements are compared, on each rank.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import fuzz_program_model as models
import torch
from fuzz_ops import bytes_of
from fuzz_plan_model import Output
from fuzz_plan_training import mesh_of
from fuzz_program import own_part
from fuzz_training import Mismatch, full, largest
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from torch_ragged._register._spmd import compute_as_torch
from torch_ragged.random import single_device
from torch_ragged.spmd import deferred_init, parallelize

__all__ = ["run_case"]

LIMIT = 1e-9
Trace = dict[str, Any]


def run_case(case: dict[str, Any]) -> tuple[str, str]:
    """Run a case on all ranks. Returns a digest of all that was compared, equal on all ranks, and a text of what happened."""
    warnings.simplefilter("ignore")
    try:
        expected = Play(case, None).trace()
    except RuntimeError as error:  # Of autograd: about one program in a hundred is none.
        return "", f"it raises in one process, too: {str(error)[:60]}"
    try:
        eager = Play(case, "eager")
        found = eager.trace()
        digest = _check_against_one_process(case, found, expected)
        static = Play(case, "static")
        _check_bits(static.trace(), found)
        report = static.model.static_modules.report  # type: ignore[union-attr]
        return digest, f"static modules {len(report.modules)}"
    finally:
        compute_as_torch()
        single_device(False)
        models.reset()


def _check_against_one_process(case: dict[str, Any], found: Trace, expected: Trace) -> str:
    digest = hashlib.sha1()
    if list(found) != list(expected):
        raise Mismatch(f"eager mode shows {sorted(set(found) ^ set(expected))}, or in another order")
    scales: dict[str, float] = {}
    for name, value in expected.items():
        if value is not None:
            kind = name.partition(": ")[0]
            scales[kind] = max(scales.get(kind, 0.0), largest(value.double()))
    for name, value in expected.items():
        ours = None if found[name] is None else full(found[name])
        if ours is not None and not name.endswith("of the script"):
            digest.update(bytes_of(ours))
        if ours is None and value is None or value is None and not largest(ours):
            continue
        if ours is None or value is None:
            raise Mismatch(f"eager mode: {name} is {'None' if ours is None else 'a tensor'}, which it is not in one process")
        if case["inputs"] == "parts" and name.endswith("input of the script"):
            value = own_part(value, case, mesh_of(case["mesh"]).get_coordinate())
        if ours.shape != value.shape or ours.dtype != value.dtype:
            raise Mismatch(
                f"eager mode: {name} is {ours.dtype} {tuple(ours.shape)}, expected {value.dtype} {tuple(value.shape)}"
            )
        error, limit = largest(ours.double() - value.double()), LIMIT * max(scales[name.partition(": ")[0]], 1e-3)
        if not error <= limit:
            raise Mismatch(f"eager mode: {name} differs by {error:.3g}, limit {limit:.3g}\n{ours}\nexpected\n{value}")
    return digest.hexdigest()


def _check_bits(found: Trace, expected: Trace) -> None:
    if list(found) != list(expected):
        raise Mismatch(f"static mode shows {sorted(set(found) ^ set(expected))}, or in another order")
    rounded: list[str] = []
    for name, value in expected.items():
        ours = found[name]
        if ours is None or value is None:
            if ours is not value:
                raise Mismatch(f"static mode: {name} is {'None' if ours is None else 'a tensor'}, in eager mode it is not")
            continue
        if isinstance(ours, DTensor) != isinstance(value, DTensor):
            raise Mismatch(f"static mode: {name} is a {type(ours).__name__}, in eager mode a {type(value).__name__}")
        if isinstance(ours, DTensor) and (ours.placements != value.placements or ours.shape != value.shape):
            told = f"{ours.placements} of {tuple(ours.shape)}, in eager mode {value.placements} of {tuple(value.shape)}"
            raise Mismatch(f"static mode: {name} is placed as {told}")
        mine, other = (each.to_local() if isinstance(each, DTensor) else each for each in (ours, value))
        if mine.shape != other.shape or mine.dtype != other.dtype or bytes_of(mine) != bytes_of(other):
            is_near = mine.shape == other.shape and largest(mine.double() - other.double()) <= LIMIT * max(1e-3, largest(other))
            if not is_near:
                raise Mismatch(f"static mode: {name} has other values\n{mine}\nin eager mode\n{other}")
            rounded.append(f"{name} by {largest(mine.double() - other.double()):.3g}")
    if rounded:  # Last: values that are wrong tell more.
        raise Mismatch(f"static mode: other roundings of {len(rounded)} values: {'; '.join(rounded[:4])}")


class Play:
    """One play of a program. ``mode`` None: in one process."""

    def __init__(self, case: dict[str, Any], mode: str | None) -> None:
        self.case, self.mode, self.shown = case, mode, Trace()
        self.handles: list[Any] = []
        self.has_parameter_hooks = False
        models.reset()
        torch.manual_seed(case["seed"])
        make = lambda: models.build_program(case["model"])  # noqa: E731
        self.model = deferred_init(make) if case["deferred"] and mode else make()
        width = case["model"]["width"]
        torch.manual_seed(case["seed"] + 1)
        self.prompt = nn.Linear(3, 3, dtype=torch.float64)
        outputs = case["model"]["vocabulary"]
        self.last = nn.Linear(outputs, width, dtype=torch.float64)
        if mode is not None:
            self.model = parallelize(self.model, case["plan"], mesh_of(case["mesh"]), mode=mode)
        self._make_optimizer()
        torch.manual_seed(case["seed"] + 2)

    def _make_optimizer(self) -> None:
        self.names = [name for name, _ in self.model.named_parameters()]
        params = [*self.model.parameters(), *self.prompt.parameters(), *self.last.parameters()]
        if self.case["optimizer"] == "sgd":
            self.optimizer: torch.optim.Optimizer = torch.optim.SGD(params, lr=0.05, momentum=0.9)
        else:
            self.optimizer = torch.optim.AdamW(params, lr=0.01, eps=1e-3, weight_decay=0.0)  # Tiny gradients make tiny steps.

    def trace(self) -> Trace:
        """All that the program shows."""
        for number, step in enumerate(self.case["script"]):
            self.where = f"step {number}"
            for kind, *arguments in step["events"]:
                getattr(self, "do_" + kind.replace(" ", "_"))(*arguments)
            self.step(number, step)
        self.where = "at last"
        for name, param in self.model.named_parameters():
            self.show(f"values: {name}", param)
        self.show("values: random state", torch.get_rng_state())
        return self.shown

    def show(self, name: str, value: Any) -> None:
        self.shown[f"{self.where}, {name}"] = value if value is None else value.detach().clone()

    # -- steps -------------------------------------------------------------------------------------------------------------

    def batch(self, number: int, step: dict[str, Any]) -> dict[str, torch.Tensor]:
        case, model = self.case, self.case["model"]
        generator = torch.Generator().manual_seed(case["seed"] * 1009 + number)
        shape = (step["rows"], step["length"])
        labels = torch.randint(0, model["vocabulary"], shape, generator=generator)
        floats = torch.randn(*shape, 3, generator=generator, dtype=torch.float64)
        batch = {"x": labels.roll(1, 1) if model["input"] == "ids" else floats}
        if model["output"] in ("loss", "dict"):
            batch["labels"] = labels.masked_fill(torch.rand(shape, generator=generator) < 0.3, -100)
            batch["labels"][0, 0] = 1
        if model["mask"]:
            batch["mask"] = torch.rand(shape, generator=generator) < 0.2
        if self.mode is not None and case["inputs"] == "parts":
            batch = {name: own_part(each, case, mesh_of(case["mesh"]).get_coordinate()) for name, each in batch.items()}
        return batch

    def loss(self, number: int, step: dict[str, Any], needs: bool = True) -> torch.Tensor:
        """The loss of one forward."""
        batch = self.batch(number, step)
        given = batch["x"]
        if self.case["before"] == "leaf" and needs:
            given = batch["x"] = given.requires_grad_(step["needs"])
            self.given.append(given)
        elif self.case["before"] == "module" and needs:
            batch["x"] = self.prompt(given).tanh()
        options = {name: True for name in ("flag", "early") if step[name]}
        output = self.model(batch.pop("x"), **batch, **options)
        tensors = _tensors(output)
        if self.case["after"]:
            tensors[0] = self.last(tensors[0])
        for index, tensor in enumerate(tensors):
            self.show(f"outputs {number}: {index}", tensor)
        losses = [_mean(each) for each, is_used in zip(tensors, step["uses"]) if is_used] or [_mean(tensors[0])]
        stored = [each for each in self.stored() if each.requires_grad]
        if step["uses aux"]:
            losses += [_mean(each) / 8 for each in stored]
        return torch.stack(losses).sum() if len(losses) > 1 and number % 2 else sum(losses[1:], losses[0])

    def stored(self) -> list[torch.Tensor]:
        """Tensors that the forward has stored, which a script takes off the modules."""
        found = []
        for name, module in self.model.named_modules():
            for key in ("aux", "seen"):
                if key in vars(module):
                    found.append((f"{name}.{key}", vars(module).pop(key)))
        for name, tensor in found:
            self.show(f"stored: {name}", tensor)
        return [tensor for _, tensor in found]

    def step(self, number: int, step: dict[str, Any]) -> None:
        self.given: list[torch.Tensor] = []
        if step["looks"]:
            with torch.no_grad():
                self.show("look", self.loss(100 + number, step, needs=False))
        losses = []
        for micro in range(2 if step["accumulates"] else 1):
            loss = self.loss(10 * micro + number, step)
            if step["twice"]:
                loss = loss + self.loss(50 + number, step)
            if step["alone"]:
                x = torch.linspace(-1, 1, step["rows"] * step["length"] * self.case["model"]["width"], dtype=torch.float64)
                part = self.model.get_submodule(step["alone"])
                result = part(x.view(step["rows"], step["length"], -1))
                loss = loss + _mean(_tensors(result)[0])
            if step["zero"]:
                loss = loss * 0.0
            self.show(f"loss {micro}", loss)
            if loss.requires_grad:
                if step["retain"]:
                    loss.backward(retain_graph=True)
                loss.backward()
            losses.append(loss)
        params = dict(self.model.named_parameters())
        if not any(loss.requires_grad for loss in losses):
            # As in FSDP2, units stay gathered until a backward. Gradients are with their shards, which the optimizer has.
            params = dict(zip(self.names, self.optimizer.param_groups[0]["params"]))
        for name, param in params.items():
            self.show(f"gradients: {name}", param.grad)
        for index, given in enumerate(self.given):
            self.show(f"given: {index} input of the script", given.grad)
        for module, kind in ((self.prompt, "before"), (self.last, "after")):
            for name, param in module.named_parameters():
                self.show(f"gradients {kind}: {name} of the script", param.grad)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=step["to none"])
        for name, buffer in self.model.named_buffers():
            self.show(f"buffer {name}", buffer)

    # -- events ------------------------------------------------------------------------------------------------------------

    def part(self, name: str) -> Any:
        return self.model.get_submodule(name)

    def do_attribute(self, part: str, value: float) -> None:
        self.part(part).gain = value

    def do_entry(self, part: str, value: float) -> None:
        self.part(part).settings["gain"] = value

    def do_list(self, part: str, value: float) -> None:
        self.part(part).values[-1] = value / 2

    def do_object(self, part: str, value: float) -> None:
        self.part(part).options.gain = value

    def do_closure(self, part: str, value: float) -> None:
        self.part(part).change_closure(value)

    def do_class(self, value: float) -> None:
        models.ProgramPart.shared = value

    def do_global(self, value: float) -> None:
        models.set_global(value)

    def do_global_entry(self, value: float) -> None:
        models.set_gain(value)

    def do_extra(self, part: str, is_there: bool) -> None:
        module = self.part(part)
        if is_there:
            module.extra = 1
        elif hasattr(module, "extra"):
            del module.extra

    def do_act(self, part: str, act: str) -> None:
        self.part(part).acts.append(getattr(models.ProgramPart, f"act_{act}"))

    def do_dropout(self, part: str, p: float) -> None:
        self.part(part).dropout.p = p

    def do_rate(self, part: str, p: float) -> None:
        self.part(part).rate = p

    def do_mode(self, module: str, is_training: bool) -> None:
        self.model.get_submodule(module).train(is_training)

    def do_depth(self, depth: int) -> None:
        self.model.depth = depth

    def do_hook(self, kind: str, module: str) -> None:
        add: dict[str, Callable[[nn.Module], Any]] = {
            "forward": lambda m: m.register_forward_hook(lambda module, args, out: pytree.tree_map(_halved, out)),
            "pre": lambda m: m.register_forward_pre_hook(_keep_input),
            "backward": lambda m: m.register_full_backward_hook(lambda module, g_in, g_out: pytree.tree_map(_halved, g_in)),
            "backward pre": lambda m: m.register_full_backward_pre_hook(lambda module, g: pytree.tree_map(_halved, g)),
            "keeping": lambda m: m.register_forward_hook(_keep),
        }
        self.handles.append(add[kind](self.model.get_submodule(module)))

    def do_unhook(self) -> None:
        if self.handles:
            self.handles.pop().remove()

    def do_param_hook(self, kind: str | None, name: str) -> None:
        self.has_parameter_hooks = True
        param = self.model.get_parameter(name)
        if param.requires_grad and kind == "tensor":
            self.handles.append(param.register_hook(lambda grad: grad * 2))
        elif param.requires_grad and kind == "accumulated":
            self.handles.append(param.register_post_accumulate_grad_hook(_double))

    def do_freeze(self, name: str) -> None:
        for param in self._params(name):
            param.requires_grad_(False)

    def do_unfreeze(self, name: str) -> None:
        for param in self._params(name):
            param.requires_grad_()

    def _params(self, name: str) -> Sequence[nn.Parameter]:
        named = dict(self.model.named_parameters())
        return [named[name]] if name in named else list(self.model.get_submodule(name).parameters())

    def do_load(self, assign: bool, factor: float) -> None:
        trains = {name: param.requires_grad for name, param in self.model.named_parameters(remove_duplicate=False)}
        state = {
            name: value.detach().clone() * factor if value.is_floating_point() else value.clone()
            for name, value in self.model.state_dict().items()
        }
        # It unties parameters, and under a plan tied ones stay tied. In units, parameters keep their hooks, too.
        assign = assign and not self.case["model"]["tied"] and not self.has_parameter_hooks
        if assign:  # New parameters have no gradients. In units, they stay the old ones, with theirs.
            self.optimizer.zero_grad()
        self.model.load_state_dict(state, assign=assign)
        for name, param in self.model.named_parameters():
            param.requires_grad_(trains[name])
        if assign:
            self._make_optimizer()

    def do_write(self, kind: str, name: str) -> None:
        param = self.model.get_parameter(name)
        with torch.no_grad():
            if kind == "zero":
                param.zero_()
            elif kind == "halve":
                param.mul_(0.5)
            else:
                param.data = param.data * 0.5


def _tensors(output: Any) -> list[torch.Tensor]:
    """The tensors of an output; a dataclass of the user may be at its outside."""
    leaves = [
        each for leaf in pytree.tree_leaves(output) for each in (vars(leaf).values() if isinstance(leaf, Output) else [leaf])
    ]
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _mean(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor / 2).sin().mean() if tensor.ndim else tensor / 2


def _halved(value: Any) -> Any:
    """What a hook makes of a tensor: the mean is that of all ranks' parts."""
    return value * 0.5 + value.mean() / 8 if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _keep(module: nn.Module, args: Any, output: Any) -> None:
    module.seen = _tensors(output)[0]


def _keep_input(module: nn.Module, args: Any) -> Any:
    module.seen = _tensors(args)[0]
    return pytree.tree_map(_halved, args)


def _double(param: torch.Tensor) -> None:
    param.grad.mul_(2)  # type: ignore[union-attr]
