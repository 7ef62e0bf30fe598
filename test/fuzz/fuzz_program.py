"""Random programs as values: a model whose code branches, writes and stores, a plan for it, and a script of five steps.

The plans are those of fuzz_plan. A script is a list of steps; a step is what happens before it (*events*) and how it runs.
"""

from __future__ import annotations

import math
import random
from typing import Any

import torch
from fuzz_plan import Writer, random_mesh
from fuzz_plan_model import KINDS, parts_of, random_model
from fuzz_program_model import ACTS, build_program

__all__ = ["own_part", "random_case", "size_of"]

RANKS = (1, 2, 2, 2, 2, 3, 4)
STEPS = 5
HOOKS = ("forward", "pre", "pre", "pre", "backward", "backward pre", "keeping")


def size_of(seed: int) -> int:
    """How many ranks the case of ``seed`` needs."""
    return random.Random(seed).choice(RANKS)


def random_case(seed: int) -> dict[str, Any]:
    """The case of ``seed``: equal on all ranks, printable, and all that a replay needs."""
    rng = random.Random(seed)
    size = rng.choice(RANKS)
    case: dict[str, Any] = {"seed": seed, "size": size, "mesh": random_mesh(rng, size, most=2), "dtype": "float64"}
    case["even"], case["deferred"] = True, rng.random() < 0.2
    sizes, roles = case["mesh"]["sizes"], case["mesh"]["roles"]
    cut = math.prod([n for n, role in zip(sizes, roles) if role == "model"])
    count = math.prod([n for n, role in zip(sizes, roles) if role == "batch"])
    sequence = math.prod([n for n, role in zip(sizes, roles) if role == "sequence"])
    kinds = ("mlp", "mlp", "mlp", "gated", "attention", "fused", "ops", "scale", "noise", "counter")
    model = case["model"] = random_model(rng, cut, True, [kind for kind in kinds if kind in KINDS])
    model["side"] = rng.choice((None, None, "output", "stored"))
    for _, part in parts_of(model):
        part["reentrant"], part["checkpoint"] = rng.random() < 0.5, part["checkpoint"] or rng.random() < 0.1
        # A write to what a checkpoint keeps is an error of autograd.
        acts = [act for act in ACTS if act != "write_input" or not any(each["checkpoint"] for _, each in parts_of(model))]
        part["acts"] = rng.sample(acts, rng.choice((0, 1, 1, 2, 3)))
        if "sizes" not in part["acts"] and rng.random() < 0.15:  # More often: it is static where larger modules are not.
            part["acts"].append("sizes")
        part["by name"], part["limit"] = rng.random() < 0.2, count
    case["optimizer"] = rng.choice(("sgd", "adamw"))
    case["before"] = rng.choice((None, None, None, "leaf", "module")) if model["input"] == "floats" else None
    case["after"] = model["output"] == "tensor" and rng.random() < 0.05
    rows = count * (1 if count > 1 else 2)
    lengths = [each for each in (4, 6, 8, 12) if each % (cut * sequence) == 0] or [cut * sequence]
    case["rows"], case["length"] = rows, lengths[0]
    writer = _ProgramWriter(rng, case, case["mesh"])
    case["plan"], case["inputs"] = writer.write(), writer.inputs
    if (
        writer.is_in_units
    ):  # A unit's inputs are outputs of an autograd function, to which autograd refuses writes, as in FSDP2.
        for _, part in parts_of(model):
            part["acts"] = [act for act in part["acts"] if act != "write_input"]
    case["script"] = _Script(rng, case, writer, lengths).write()
    return case


class _ProgramWriter(Writer):
    """Plans for programs: all in one dtype."""

    def build(self) -> Any:
        return build_program(self.model)

    def _options(self, dims: tuple[str, ...]) -> dict[str, Any]:
        options = super()._options(dims)
        self.policy = None
        return {name: value for name, value in options.items() if name not in ("mp_policy", "offload_policy")}


class _Script:
    """Writes what the script does: for each step, its events and how it runs."""

    def __init__(self, rng: random.Random, case: dict[str, Any], writer: Writer, lengths: list[int]) -> None:
        self.rng, self.case, self.lengths, module = rng, case, lengths, writer.module
        # Hooks on the gradients of a unit's parameters are called for the unsharded ones, as in FSDP2.
        # One process calls hooks again for the backward of each reentrant checkpoint, and a unit once per backward.
        is_reentrant = any(part["checkpoint"] and part["reentrant"] for _, part in parts_of(case["model"]))
        kinds = ("accumulated",) if writer.is_in_units else ("tensor", "accumulated")
        self.hooks_on_parameters = () if writer.is_in_units and is_reentrant else kinds
        self.params = [name for name, _ in module.named_parameters()]
        self.parts = [name for name, part in parts_of(case["model"]) if "parts" not in part]
        self.modules = [name for name, _ in module.named_modules() if name and not name.endswith((".parts", "blocks"))]
        self.outputs = 4
        self.is_in_units = writer.is_in_units
        self.is_calm = rng.random() < 0.15  # Nothing changes: static for sure.

    def write(self) -> list[dict[str, Any]]:
        steps = [self._step(number) for number in range(STEPS)]
        if not self.is_calm and self.rng.random() < 0.4:  # Early, so that calls with the hook could be static.
            steps[self.rng.choice((0, 1))]["events"].append(self._hook())
        return steps

    def _hook(self) -> tuple[Any, ...]:
        return "hook", self.rng.choice(HOOKS), self.rng.choice(["", *self.modules])

    def _step(self, number: int) -> dict[str, Any]:
        rng, case = self.rng, self.case
        count = 0 if self.is_calm else rng.choice((0, 1, 1, 2)) if number else rng.choice((0, 0, 0, 1))
        step: dict[str, Any] = {"events": [self._event() for _ in range(count)]}
        step["rows"] = case["rows"] * (2 if not self.is_calm and rng.random() < 0.2 else 1)
        step["length"] = case["length"] if self.is_calm or rng.random() < 0.8 else rng.choice(self.lengths)
        chances = {"flag": 0.15, "early": 0.08, "twice": 0.1, "accumulates": 0.15, "retain": 0.05, "looks": 0.15}
        step |= {name: not self.is_calm and rng.random() < chance for name, chance in chances.items()}
        step["alone"] = rng.choice(self.parts) if not self.is_calm and rng.random() < 0.08 else None
        # Of a module that is called outside of its unit's forward, a second backward does not find the parameters.
        step["retain"] &= not (step["alone"] and self.is_in_units)
        step["uses"] = [rng.random() < (1.0 if self.is_calm else 0.8) for _ in range(self.outputs)]
        step["uses aux"], step["to none"] = rng.random() < 0.7, rng.random() < 0.8
        step["needs"] = rng.random() < 0.7  # Whether the script's own tensors train.
        step["zero"] = not self.is_calm and rng.random() < 0.05  # The loss is multiplied by zero.
        return step

    def _event(self) -> tuple[Any, ...]:
        rng, value = self.rng, self.rng.choice((1.0, 2.0))
        part = rng.choice(self.parts)
        makers = (
            lambda: ("attribute", part, value),
            lambda: ("entry", part, value),
            lambda: ("list", part, value),
            lambda: ("object", part, value),
            lambda: ("closure", part, value),
            lambda: ("class", value),
            lambda: ("global", value),
            lambda: ("global entry", value),
            lambda: ("extra", part, rng.random() < 0.5),
            lambda: ("act", part, rng.choice(("training", "length", "no_grad", "write_row", "hook", "store"))),
            lambda: ("dropout", part, rng.choice((0.0, 0.3))),
            lambda: ("rate", part, rng.choice((0.0, 0.3))),
            lambda: ("mode", "", rng.random() < 0.5),
            lambda: ("mode", rng.choice(self.modules), rng.random() < 0.5),
            self._hook,
            lambda: ("unhook",),
            lambda: ("param hook", rng.choice(self.hooks_on_parameters or (None,)), rng.choice(self.params)),
            lambda: ("freeze", rng.choice(["", *self.modules, *self.params])),
            lambda: ("unfreeze", rng.choice(["", *self.modules, *self.params])),
            lambda: ("load", rng.random() < 0.6, rng.choice((1.0, 0.5))),
            lambda: ("depth", rng.randint(1, len(self.case["model"]["parts"]))),
            lambda: ("write", rng.choice(("zero", "halve", "data")), rng.choice(self.params)),
        )
        return rng.choice(makers)()


def own_part(x: torch.Tensor, case: dict[str, Any], coordinate: Any) -> torch.Tensor:
    """What a loader gives a rank."""
    for size, role, index in zip(case["mesh"]["sizes"], case["mesh"]["roles"], coordinate):
        if role in ("batch", "sequence"):
            x = x.chunk(size, 0 if role == "batch" else 1)[index]
    return x
