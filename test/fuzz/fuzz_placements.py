"""Pairs of families of ops, placements, meshes, dtypes, shapes, autograd and compilation: each op as on one device, to the bit.

A run applies the ops of one family to two tensors, and compares each result and gradient with one process (``fuzz_dtensor``).
An op may be refused by a sentence that names it and the way out, on all ranks.
"""

from __future__ import annotations

import math
import random
from typing import Any

import torch
from fuzz_cover import Cover, Pair, Rule, find_rule
from fuzz_dtensor import DTYPES, Program
from fuzz_ops import IN_PLACE, LISTS, PLAIN, ROUNDING
from oracle import contributions, reduced
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from torch_ragged import CutPlacement, InterleavedShard, RaggedShard, StridedRaggedShard, owned_boxes

__all__ = ["COVER", "PlacementRun", "random_case", "size_of"]

FAMILIES: dict[str, tuple[str, ...]] = {
    "element-wise": ("add", "sub", "mul", "maximum", "eq", "add alpha", "where", "neg", "clamp", "scalar", "to bool and back"),
    "like": ("like", "clone", "contiguous"),
    "in place": tuple(IN_PLACE),
    "lists": tuple(LISTS),
    "sums": ("sum", "amax", "any"),
    "sums along": ("sum along", "amax along", "amin along", "cumsum"),
    "rounding": tuple(ROUNDING),
    "products": ("matmul", "gram"),
    "views": ("view", "flatten", "permute", "unsqueeze", "squeeze", "expand"),
    "parts": ("narrow", "select", "split", "index", "flip"),
    "joins": ("cat", "stack"),
    "moves": ("redistribute",),
}
_KINDS = ("rows", "elements", "one owner", "replicas", "strided", "inside a shard", "interleaved", "boxes")
_TORCHS = ("Shard(0)", "Shard(1)", "_StridedShard", "Replicate", "Partial")
FEATURES: dict[str, tuple[str, ...]] = {
    "family": tuple(FAMILIES),
    "first": _KINDS,
    "second": (*_KINDS, *_TORCHS, "a row", "a scalar"),
    "mesh": ("2", "3", "4", "2 x 2", "1 x 2"),
    "dtype": ("float64", "bfloat16", "int64", "complex128", "bool"),
    "shape": ("even", "uneven", "three dimensions", "empty"),
    "gradients": ("no", "yes"),
    "way": ("eager", "compiled"),
}
_FLAT = ("2", "3", "4")
_WHOLE = ("int64", "bool")
LEFT_OUT: list[Rule] = [
    *[
        ((side, ("strided", "inside a shard", "replicas")), ("mesh", _FLAT), "of two mesh dimensions")
        for side in ("first", "second")
    ],
    *[
        ((side, ("strided", "inside a shard", "interleaved")), ("shape", "uneven"), "of even pieces")
        for side in ("first", "second")
    ],
    (("first", "interleaved"), ("mesh", "3"), "segments of four rows"),
    (("second", "interleaved"), ("mesh", "3"), "segments of four rows"),
    (("second", "_StridedShard"), ("shape", "uneven"), "torch's own redistribution is wrong"),
    (("second", "_StridedShard"), ("mesh", "3"), "torch's own redistribution is wrong"),
    (("second", "Partial"), ("dtype", _WHOLE), "sums of ranks are of other dtypes"),
    (("gradients", "yes"), ("dtype", ("bfloat16", *_WHOLE)), "gradients round, or do not exist"),
    (("gradients", "yes"), ("family", ("in place", "lists", "like")), "of new tensors"),
    (("family", "rounding"), ("dtype", FEATURES["dtype"][1:]), "compared to 1e-12"),
    (("gradients", "yes"), ("second", "Partial"), "the gradient of a contribution"),
    (("family", "lists"), ("dtype", "bool"), "arithmetic"),
    (("family", "products"), ("dtype", "bool"), "arithmetic"),
    (("family", "in place"), ("dtype", "bool"), "arithmetic"),
]


def why_not(pair: Pair) -> tuple[str, str] | None:
    """As :class:`Cover` asks it."""
    why = find_rule(LEFT_OUT, pair)
    return None if why is None else ("left out", why)


COVER = Cover(FEATURES, why_not)


def size_of(seed: int) -> int:
    """How many ranks the run needs."""
    return math.prod(_mesh_shape(COVER.case(seed)["mesh"]))


def random_case(seed: int) -> dict[str, Any]:
    """Run number ``seed``: see :meth:`Cover.case`."""
    return COVER.case(seed)


def _mesh_shape(text: str) -> tuple[int, ...]:
    return tuple([int(size) for size in text.split(" x ")])


class Quarters(CutPlacement):
    """Four fields of a matrix, which the ranks take in turn; ranks after the fourth hold no field."""

    ndims = 2

    def boxes(self, shape: tuple[int, ...], ranks: int) -> Any:
        tops, lefts = (0, shape[0] // 2, shape[0]), (0, shape[1] // 2, shape[1])
        found: list[Any] = [[] for _ in range(ranks)]
        for number, (i, j) in enumerate(((0, 0), (1, 1), (0, 1), (1, 0))):
            found[number % ranks].append(((tops[i], lefts[j]), (tops[i + 1] - tops[i], lefts[j + 1] - lefts[j])))
        return found


def _placements(kind: str, shape: tuple[int, ...], mesh: tuple[int, ...], rng: random.Random) -> tuple[Placement, ...]:
    """What ``kind`` says, on the last dimension of the mesh; the first one of two is mostly Replicate."""
    ranks, rows = mesh[-1], shape[0] if shape else 1

    def cut(total: int, parts: int) -> tuple[int, ...]:
        edges = sorted([0, total] + [rng.randint(0, total) for _ in range(parts - 1)])
        return tuple([b - a for a, b in zip(edges, edges[1:], strict=False)]) if total else (1, *[0] * (parts - 1))

    whole = (Replicate(),) * (len(mesh) - 1)
    if kind == "elements":
        return *whole, RaggedShard(tuple(range(len(shape))), cut(math.prod(shape), ranks))
    if kind == "one owner":
        owner = rng.randrange(ranks)
        return *whole, RaggedShard((), [int(rank == owner) for rank in range(ranks)])
    if kind == "replicas":
        return RaggedShard((0,), cut(rows, mesh[0])), Replicate()
    if kind == "strided":
        return StridedRaggedShard((0,), cut(rows // ranks, mesh[0]), ranks), Shard(0)
    if kind == "inside a shard":
        return Shard(1), RaggedShard((0,), cut(rows, ranks))
    torchs: dict[str, Placement] = {
        "rows": RaggedShard((0,), cut(rows, ranks)),
        "interleaved": InterleavedShard(0, 2),
        "boxes": Quarters(),
        "Shard(0)": Shard(0),
        "Shard(1)": Shard(1),
        "_StridedShard": _StridedShard(0, split_factor=2),
        "Partial": Partial(),
    }
    return *whole, torchs.get(kind, Replicate())


class PlacementRun(Program):
    """One run. :meth:`run` raises if a result differs from one process, or a refusal does not name the way out."""

    def __init__(self, case: dict[str, Any]) -> None:
        shapes = {"even": (8, 4), "uneven": (7, 5), "three dimensions": (8, 4, 3), "empty": (0, 4)}
        rng, shape, mesh = random.Random(case["seed"]), shapes[case["shape"]], _mesh_shape(case["mesh"])
        other = {"a row": shape[-1:], "a scalar": ()}.get(case["second"], shape)
        inputs = [(shape, _placements(case["first"], shape, mesh, rng)), (other, _placements(case["second"], other, mesh, rng))]
        self.pair = case
        program = {"seed": case["seed"], "mesh": mesh, "gradients": case["gradients"] == "yes", "dtype": case["dtype"]}
        super().__init__({**program, "inputs": inputs})

    def _input(self, shape: tuple[int, ...], placements: Any, generator: torch.Generator) -> tuple[torch.Tensor, DTensor]:
        if not any(isinstance(placement, Quarters) for placement in placements):
            return super()._input(shape, placements, generator)
        nothing, coordinate = (Replicate(),) * self.mesh.ndim, tuple(self.mesh.get_coordinate())
        values = contributions(shape, self.mesh, nothing, DTYPES[self.case["dtype"]], generator)
        plain = reduced(values, self.mesh.ndim, nothing, nothing, coordinate).clone()
        boxes = owned_boxes(shape, tuple(self.mesh.shape), placements, coordinate)
        parts = [plain[tuple([slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True)])] for box in boxes]
        local = torch.cat([part.reshape(-1) for part in parts]) if parts else plain.new_empty(0)
        placed = DTensor.from_local(local, self.mesh, placements, shape=plain.shape, stride=plain.stride(), run_check=False)
        needs = self.case["gradients"]
        return plain.requires_grad_(needs), placed.detach().requires_grad_(needs)

    def run(self) -> tuple[str, str]:
        """The digest of all values, which ranks compare, and how many operations were refused."""
        family, compiled = self.pair["family"], self.pair["way"] == "compiled"
        names = FAMILIES[family]
        for name in self.rng.sample(names, min(len(names), 2)) if compiled else names * 2:
            if family != "in place":
                self.pool = list(self.inputs)
            if family == "moves":
                for _ in range(4):
                    self.redistribute()
            elif family == "in place":
                self.pool = [self._input(*given, torch.Generator().manual_seed(1)) for given in self.case["inputs"]]
                self.in_place()
            elif family == "lists":
                self.lists()
            else:
                operation = ROUNDING[name] if family == "rounding" else PLAIN[name]
                self.apply(name, _compiled(operation) if compiled else operation, family == "rounding")
        if self.case["gradients"]:
            self.backward()
        return self.digest.hexdigest(), f"operations {self.done} refused {self.refused} torch {self.torchs}"


def _compiled(operation: Any) -> Any:
    """The same, by torch.compile if it gets DTensors."""

    def call(rng: random.Random, tensors: list[Any]) -> Any:
        state, (result, used) = rng.getstate(), operation(rng, tensors)
        if not all(isinstance(each, DTensor) for each in tensors):
            return result, used

        def again(*given: Any) -> Any:
            same = random.Random()
            same.setstate(state)
            return operation(same, given)[0]

        torch.compiler.reset()
        return torch.compile(again, backend="aot_eager")(*tensors), used

    return call
