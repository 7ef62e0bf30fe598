"""Random plans as values, legal ones and wrong ones, with the model, the mesh and the training that they are for.

A legal plan is legal by construction: cuts are even where they must be, no two rules speak of one tensor and mesh dimension,
and units shard only what is whole on their mesh dimensions. A wrong plan is a legal one with one change.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from typing import Any

import torch
from fuzz_plan_model import KINDS, Network, build, parts_of, random_model
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from torch_ragged import InterleavedShard, RaggedShard
from torch_ragged.fsdp import ZERO1, ZERO2, ZERO3
from torch_ragged.granularity import elements, rows, tensor
from torch_ragged.spmd import INIT, RUN, Plan

__all__ = ["Writer", "random_case", "random_mesh", "size_of"]

RANKS = (2, 2, 2, 2, 2, 2, 2, 3, 4, 4, 4, 4, 6, 8)
MESHES = {
    1: ((1,),),
    2: ((2,), (2,), (2,), (1, 2), (2, 1)),
    3: ((3,), (3,), (3, 1)),
    4: ((4,), (2, 2), (2, 2), (2, 2), (4, 1), (2, 1, 2), (1, 2, 2)),
    6: ((6,), (2, 3), (3, 2)),
    8: ((8,), (2, 4), (4, 2), (2, 2, 2)),
}
# What mesh dimensions do, and their names: ranks have other rows, other features, other positions, or all the same.
ROLES = {
    1: (("batch",), ("batch",), ("model",), ("model",), ("sequence",), ("idle",)),
    2: (("batch", "model"),) * 6 + (("batch", "batch"), ("model", "model"), ("batch", "sequence"), ("model", "batch")),
    3: (("batch", "batch", "model"), ("batch", "batch", "model"), ("batch", "model", "model")),
}
NAMES = {"batch": ("dp", "replicas"), "model": ("tp", "ep"), "sequence": ("cp",), "idle": ("pp",)}
COLUMNS = {"mlp": ("up",), "gated": ("gate", "up"), "fused": ("gate_up",), "attention": ("q", "k", "v")}
COLUMNS |= {"fused_attention": ("qkv",)}
ROWS = {"mlp": "down", "gated": "down", "fused": "down", "attention": "o", "fused_attention": "o"}


def size_of(seed: int) -> int:
    """How many ranks the case of ``seed`` needs."""
    return random.Random(seed).choice(RANKS)


def random_case(seed: int) -> dict[str, Any]:
    """The case of ``seed``: equal on all ranks, printable, and all that a replay needs."""
    rng = random.Random(seed)
    size = rng.choice(RANKS)
    case: dict[str, Any] = {"seed": seed, "size": size, "mesh": random_mesh(rng, size)}
    case["mode"], case["deferred"] = rng.choice(("eager", "eager", "static")), rng.random() < 0.5
    even = case["even"] = rng.random() < 0.75
    cut = math.prod([n for n, role in zip(case["mesh"]["sizes"], case["mesh"]["roles"]) if role == "model"])
    # On three mesh dimensions, torch takes minutes to plan batched matrix products, as of attention with dropout.
    is_slow = len(case["mesh"]["sizes"]) > 2
    kinds = [kind for kind in KINDS if not is_slow or kind not in ("experts", "attention", "fused_attention", "ops")]
    case["model"] = random_model(rng, cut, even, kinds)
    case["dtype"] = rng.choice(("float64", "float64", "float64", "float32"))
    count = math.prod([n for n, role in zip(case["mesh"]["sizes"], case["mesh"]["roles"]) if role == "batch"])
    lengths = [each for each in (4, 6, 8, 12) if each % cut == 0] or [cut]
    # DTensor cannot flatten rows that are cut unevenly, which each linear layer does.
    case["rows"] = count * (rng.choice((1, 2)) if count > 1 else 2)
    if not even and rng.random() < 0.1:
        case["rows"] = rng.randint(max(count - 1, 1), 2 * count + 1)
    case["length"] = rng.choice(lengths) if even else rng.randint(3, 9)
    case |= {"steps": rng.choice((1, 2, 2, 3)), "micro": rng.choice((1, 1, 1, 2)), "clip": rng.choice((None, None, 0.5))}
    case["optimizer"] = rng.choice(("adamw", "adamw", "sgd", "muon", "adamw_loop"))
    writer = Writer(rng, case, case["mesh"])
    case["plan"], case["inputs"], case["policy"] = writer.write(), writer.inputs, writer.policy
    names = [name for name, _ in writer.module.named_parameters()]
    case["hooks"] = rng.sample(names, min(len(names), 3)) if rng.random() < 0.15 else []
    case["saved"] = rng.choice((None, None, None, "dcp", "ours"))
    if case["saved"]:
        case["mesh2"] = random_mesh(rng, size)
        case["plan2"] = Writer(rng, case, case["mesh2"], again=True).write()
    case["wrong"] = None
    if rng.random() < 0.2:
        case["wrong"], case["wrong plan"] = _wrong(rng, case)
    return case


def random_mesh(rng: random.Random, size: int, most: int = 3) -> dict[str, Any]:
    """A mesh of at most ``most`` dimensions, and what each of them does."""
    sizes = rng.choice([sizes for sizes in MESHES[size] if len(sizes) <= most])
    roles, free = rng.choice(ROLES[len(sizes)]), {role: list(names) for role, names in NAMES.items()}
    if roles == ("batch", "batch") or roles[:2] == ("batch", "batch"):
        free["batch"].reverse()  # Replicas stand left of shards.
    return {"sizes": sizes, "roles": roles, "names": tuple([free[role].pop(0) for role in roles])}


def _exact(name: str) -> str:
    """A path that names ``name`` alone."""
    return name.replace(".", r"\.")


def granularity_by_name(name: str, param: torch.Tensor) -> Any:
    """An ``orig_param_policy``."""
    return tensor() if "norm" in name else rows(2)


def shard_by_columns(param: torch.Tensor) -> Any:
    """A ``shard_placement_fn``."""
    return Shard(param.ndim - 1) if param.ndim else None


class Writer:
    """Writes one legal plan for the model of ``case`` on ``mesh``.

    Attributes:
        inputs: what the script passes: ``"whole"`` batches, or ``"parts"`` of this rank.
        policy: the dtypes of all units, as (compute, reduce, output); None if they are those of the parameters.
    """

    def __init__(self, rng: random.Random, case: dict[str, Any], mesh: dict[str, Any], again: bool = False) -> None:
        self.rng, self.case, self.again, self.plan = rng, case, again, Plan()
        self.model, self.even = case["model"], case["even"]
        self.sizes = dict(zip(mesh["names"], mesh["sizes"]))
        self.names: tuple[str, ...] = mesh["names"]
        self.of_role = {role: tuple([n for n, r in zip(self.names, mesh["roles"]) if r == role]) for role in NAMES}
        with torch.device("meta"):
            self.module = self.build()
        self.parts, self.inputs, self.policy = parts_of(self.model), "whole", None
        self.cut: dict[int, dict[str, Placement]] = {}  # Of each parameter: what rules say of mesh dimensions.
        self.claimed: set[tuple[str, str]] = set()  # Modules whose input or output a rule names.
        self.by_pattern = rng.random() < 0.6
        self.is_slow = len(self.names) > 2
        """On three mesh dimensions, torch takes minutes to plan a linear layer whose positions are cut."""

    def build(self) -> Network:
        """The modules that the plan is for."""
        return build(self.model, self.case["dtype"])

    def write(self) -> Plan:
        rng = self.rng
        unit_dims = self._unit_dims()
        self.is_in_units = bool(unit_dims)
        self._write_inputs()
        # Random cuts lead to activations whose features are cut, of which torch makes no RMSNorm on CPU.
        self.has_rms = "rms" in {self.model["norm"], *(part["norm"] for _, part in self.parts)}
        style = rng.choice(("parallel", "parallel", "parallel", "none" if self.has_rms else "random", "none"))
        if style == "parallel":
            self._write_parallel(self.of_role["model"], unit_dims)
        elif style == "random":
            self._write_random_cuts(unit_dims)
        self._write_factories()
        self._write_vocabulary()
        if rng.random() < 0.35:
            self._write_random_activations()
        if unit_dims and rng.random() < 0.2:
            self._write_phases(unit_dims)
        elif unit_dims:
            self._write_units(unit_dims)
        else:
            self._write_rest()
        order = list(self.plan.rules)
        rng.shuffle(order)  # It has no meaning.
        return Plan(order)

    # -- inputs ------------------------------------------------------------------------------------------------------------

    def _write_inputs(self) -> None:
        """Which part of the batch a rank has; all of it, if no rule says."""
        batch, sequence, case = self.of_role["batch"], self.of_role["sequence"], self.case
        dims = tuple([name for name in self.names if name in batch + sequence])
        if not dims or self.rng.random() < 0.08:
            return
        ranks = math.prod([self.sizes[name] for name in batch])
        parts = math.prod([self.sizes[name] for name in sequence])
        is_even = case["rows"] % ranks == 0 and case["length"] % parts == 0
        is_annotated = is_even and not self.again and self.rng.random() < 0.15
        call = self.plan.annotate if is_annotated else self.plan.shard
        self.inputs = "parts" if is_annotated else "whole"
        paths = ["<in:x>", "<in:labels>"] if self.model["output"] in ("loss", "dict") else ["<in>"]
        for path in [*paths, "<in:mask>"] if self.model["mask"] else paths:
            call(path, tuple([Shard(0) if name in batch else Shard(1) for name in dims]), dims)

    # -- parameters --------------------------------------------------------------------------------------------------------

    def _pattern(self, name: str) -> str:
        """A path that names ``name``; and what has the same name in another layer, if rules are written so."""
        return re.sub(r"\d+", lambda _: r"\d+", _exact(name)) if self.by_pattern else _exact(name)

    def _named(self, path: str) -> list[nn.Parameter]:
        return [p for name, p in self.module.named_parameters(remove_duplicate=False) if re.fullmatch(path, name)]

    def _can_cut(self, path: str, dim: int, dims: tuple[str, ...]) -> bool:
        """Whether all parameters of a path can be cut so; in units and on the model's mesh dimensions, evenly."""
        ranks = math.prod([self.sizes[name] for name in dims])
        params = self._named(path)
        shapes = [tuple(param.shape) for param in params]
        is_free = not any(set(dims) & set(self.cut.get(id(param), {})) for param in params)
        if dim == 0 and len(dims) > 1 and any(param is self.module.embedding.weight for param in params):
            return False  # torch has one mask for the words that a rank lacks, not one for each mesh dimension.
        fits = all(len(shape) > dim and (shape[dim] % ranks == 0 or self._may_be_uneven()) for shape in shapes)
        return bool(shapes) and is_free and fits

    def _may_be_uneven(self) -> bool:
        return not self.even and not self.is_in_units

    def _cut(self, path: str, placement: Placement, dims: tuple[str, ...], **options: Any) -> None:
        self.plan.shard(path, placement if self.rng.random() < 0.7 else (placement,) * len(dims), dims, **options)
        for param in self._named(path):
            self.cut.setdefault(id(param), {}).update(dict.fromkeys(dims, placement))

    def _write_parallel(self, dims: tuple[str, ...], unit_dims: tuple[str, ...]) -> None:
        """Tensor and expert parallelism as in textbooks, with the sequence cut between matrices or not."""
        rng = self.rng
        dims = tuple([name for name in dims if name not in unit_dims])
        if not dims:
            return
        length = self.case["length"] % math.prod([self.sizes[name] for name in dims]) == 0 or not self.even
        sequence = rng.random() < 0.5 and length and not self.is_slow
        done: set[str] = set()
        for prefix, _ in self.parts:
            path = self._pattern(prefix)
            kinds = {other["kind"] for name, other in self.parts if re.fullmatch(path, name)}
            if path in done or "stack" in kinds or "twice" in kinds:
                continue
            done.add(path)
            for kind in sorted(kinds):
                self._write_part(path, kind, dims, sequence, is_last=True)
            if all(kind in ROWS for kind in kinds):
                self._write_edges(path, dims, sequence)
        if rng.random() < 0.5 and self._can_cut(r"head\.weight", 0, dims):
            self._cut(r"(embedding|head)\.weight" if self.model["tied"] else r"head\.weight", Shard(0), dims)
            if rng.random() < 0.7:
                self._boundary("head", "out", Replicate(), dims)
        if sequence and rng.random() < 0.5:
            self._boundary("head", "in", Replicate(), dims)
            self._boundary("embedding", "out", Shard(1), dims)

    def _write_part(self, path: str, kind: str, dims: tuple[str, ...], sequence: bool, is_last: bool) -> None:
        if kind == "experts":
            dim = self.rng.choice((0, 2))
            if self._can_cut(rf"{path}\.w1", dim, dims):
                self._cut(rf"{path}\.w1", Shard(dim), dims)
                self._cut(rf"{path}\.w2", Shard(dim and 1), dims)
            return
        if kind not in ROWS:
            return
        columns, last = COLUMNS[kind], ROWS[kind]
        weights, whole = rf"{path}\.({'|'.join(columns)})\.(weight|bias)", rf"{path}\.{last}\.weight"
        if not self._can_cut(whole, 1, dims) or not self._can_cut(weights, 0, dims):
            return
        if kind in ("fused", "fused_attention"):
            self._write_segments(weights, kind, dims)
        else:
            self._cut(weights, Shard(0), dims)
        self._cut(whole, Shard(1), dims)

    def _write_segments(self, path: str, kind: str, dims: tuple[str, ...]) -> None:
        heads, shared = self.model["heads"], self.model["shared_heads"]
        size = self._named(path)[0].shape[0]
        sizes = (
            (size // 2,) * 2 if kind == "fused" else tuple([n * size // (heads + 2 * shared) for n in (heads, shared, shared)])
        )
        alike = len({param.shape[0] for param in self._named(path)}) == 1
        is_even = all(each % math.prod([self.sizes[name] for name in dims]) == 0 for each in sizes)
        if not is_even or not alike:
            return
        if self.rng.random() < 0.5 or len(dims) > 1:
            self.plan.segments(path, sizes, 0)
            self._cut(path, Shard(0), dims) if len(dims) == 1 else None
        else:
            self._cut(path, InterleavedShard(0, sizes), dims)

    def _write_edges(self, path: str, dims: tuple[str, ...], sequence: bool) -> None:
        """Where activations enter and leave the matrices of a part."""
        rng = self.rng
        kinds = {other["kind"] for name, other in self.parts if re.fullmatch(path, name)}
        last = "|".join(sorted({ROWS[kind] for kind in kinds}))
        if sequence:
            self._boundary(rf"{path}\.norm", "in", Shard(1), dims)
            self._boundary(rf"{path}\.norm", "out", Replicate(), dims)
        elif rng.random() < 0.7:
            self._boundary(rf"{path}\.norm", "out", Replicate(), dims, grad=Replicate())
        if sequence or rng.random() < 0.8:
            self._boundary(rf"{path}\.({last})", "out", Shard(1) if sequence else Replicate(), dims)

    def _boundary(
        self, path: str, side: str, placement: Placement, dims: tuple[str, ...], grad: Placement | None = None
    ) -> None:
        """A rule for what enters or leaves modules, if none has one yet."""
        modules = {(name, side) for name, _ in self.module.named_modules() if re.fullmatch(path, name)}
        if modules & self.claimed or not modules:
            return
        self.claimed |= modules
        if self.rng.random() < 0.5:
            self.plan.shard(f"{path}.<{side}>", placement, dims, grad=grad)
        else:
            self.plan.redistribute(f"{path}.<{side}>", placement, dims, grad_dst=grad)

    def _write_random_cuts(self, unit_dims: tuple[str, ...]) -> None:
        """Any parameter along any of its dimensions, over any mesh dimensions."""
        free = [name for name in self.names if name not in unit_dims]
        paths = list(dict.fromkeys(self._pattern(name) for name, _ in self.module.named_parameters()))
        for path in paths if free else ():
            if self.rng.random() < 0.5:
                continue
            chosen = tuple([name for name in free if self.rng.random() < 0.6]) or (free[0],)
            dim = self.rng.randrange(max(self._named(path)[0].ndim, 1))
            if self._can_cut(path, dim, chosen):
                own: Placement = Shard(
                    dim - self._named(path)[0].ndim if self.rng.random() < 0.1 and self._alike(path) else dim
                )
                grad = self.rng.choice((None, None, None, own, Replicate()))
                self._cut(path, own, chosen, grad=grad)

    def _alike(self, path: str) -> bool:
        return len({param.ndim for param in self._named(path)}) == 1

    # -- activations -------------------------------------------------------------------------------------------------------

    def _write_random_activations(self) -> None:
        """Redistributions at modules that no rule names: they change no value."""
        modules = [name for name, _ in self.parts] + ["head", "norm"]
        for prefix, part in self.parts:
            modules += [f"{prefix}.norm", f"{prefix}.dropout"] if "parts" not in part else []
            modules += [f"{prefix}.{ROWS[part['kind']]}"] if part["kind"] in ROWS else []
        for module in self.rng.sample(modules, min(len(modules), self.rng.choice((1, 2, 3)))):
            side, path = self.rng.choice(("in", "out")), _exact(module)
            dims = tuple([name for name in self.names if self.rng.random() < 0.6]) or (self.names[-1],)
            if (module, side) in self.claimed:
                continue
            self.claimed.add((module, side))
            placements = tuple([self.rng.choice((Replicate(), *self._cuts(name))) for name in dims])
            grad = self.rng.choice((None, None, placements, (Replicate(),) * len(dims)))
            is_named = dict(self.parts).get(module, {}).get("returns") in ("dict", "record") and side == "out"
            key = ":hidden" if is_named else ""
            self.plan.shard(f"{path}.<{side}{key}>", placements, dims, grad=grad)

    def _cuts(self, name: str) -> list[Placement]:
        """Shards of an activation over a mesh dimension: of rows, positions and features. Rules may cut rows over others."""
        ranks, rows = math.prod(self.sizes.values()), self.case["rows"]
        found: list[Placement] = [Shard(2)] if self.model["width"] % self.sizes[name] == 0 and not self.has_rms else []
        is_even = self.case["length"] % self.sizes[name] == 0
        found += [Shard(1)] if (is_even or not self.even) and not self.is_slow else []
        return found + ([Shard(0)] if rows % ranks == 0 else [])

    def _write_vocabulary(self) -> None:
        """An embedding whose vocabulary is cut has sums that torch reduces once: with two readers, the second one raises."""
        rows = self.cut.get(id(self.module.embedding.weight), {})
        dims = tuple([name for name in self.names if rows.get(name) in (Shard(0), Shard(-2))])
        if dims and self.model["input"] == "ids":
            self._boundary("embedding", "out", Replicate(), dims)

    def _write_factories(self) -> None:
        for prefix, part in self.parts:
            if part["kind"] not in ("noise", "positions") or self.rng.random() < 0.4:
                continue
            dims = tuple([name for name in self.names if self.rng.random() < 0.7]) or (self.names[0],)
            if part["kind"] == "positions":
                self.plan.factory(prefix, self.rng.choice((Replicate(), Shard(0))), dims, functions="arange")
            else:
                placements = tuple([self.rng.choice((Replicate(), Shard(0), Shard(1))) for _ in dims])
                self.plan.factory(prefix, placements, dims, functions=("rand", "randn", "zeros", "ones"))

    # -- units -------------------------------------------------------------------------------------------------------------

    def _unit_dims(self) -> tuple[str, ...]:
        """The mesh dimensions of units: none, one or two, of those that cut no parameter."""
        if self.rng.random() < 0.4:
            return ()
        candidates = self.of_role["batch"] + self.of_role["idle"] + self.of_role["sequence"]
        candidates = tuple([name for name in self.names if name in candidates])
        if len(candidates) > 1 and self.rng.random() < 0.6:
            return candidates[:2]
        return (self.rng.choice(candidates),) if candidates else ()

    def _options(self, dims: tuple[str, ...]) -> dict[str, Any]:
        rng, options = self.rng, {}
        kind = rng.choice(("none", "none", "granularity", "orig_param_policy", "shard_placement_fn"))
        if kind == "granularity":
            options["granularity"] = rng.choice((elements(), rows(2), rows(3), tensor()))
        elif kind == "orig_param_policy":
            options["orig_param_policy"] = granularity_by_name
        elif kind == "shard_placement_fn" and not self.cut:
            options["shard_placement_fn"] = shard_by_columns
        if len(dims) == 1 and rng.random() < 0.3:
            options["placements"] = rng.choice((ZERO1, ZERO2, ZERO3))
        if rng.random() < 0.1:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        if rng.random() < 0.25 and not self.again:
            narrow = "float32" if self.case["dtype"] == "float64" else "bfloat16"
            compute = rng.choice((narrow, narrow, None))  # Outputs of another dtype would not fit to what comes next.
            self.policy = (compute, rng.choice((None, narrow)), rng.choice((None, compute)))
            names = ("param_dtype", "reduce_dtype", "output_dtype")
            dtypes = {name: getattr(torch, each) for name, each in zip(names, self.policy) if each}
            options["mp_policy"] = MixedPrecisionPolicy(**dtypes)
        return options

    def _write_units(self, dims: tuple[str, ...]) -> None:
        rng, options = self.rng, self._options(dims)
        where = rng.choice(("blocks", "blocks", "root", "all", "some"))
        shards = self.sizes[dims[-1]]
        kept = rng.choice((None, None, True, False, *[k for k in range(1, shards + 1) if shards % k == 0]))
        if type(kept) is int and options.get("placements") in (ZERO1, ZERO2):  # They say themselves what stays gathered.
            kept = True
        own = options | ({} if kept is None else {"reshard_after_forward": kept})
        if where in ("blocks", "all"):
            self.plan.unit(r"blocks\.\d+", dims, **own)
        if where == "some":
            chosen = [name for name, _ in self.parts if rng.random() < 0.6] or [self.parts[0][0]]
            for name in chosen:
                self.plan.unit(_exact(name), dims, **own)
        if where in ("root", "all"):
            self.plan.unit("", dims, **options)

    def _write_phases(self, dims: tuple[str, ...]) -> None:
        """ZeRO in two rules."""
        dims = tuple([name for name in self.names if name in dims])
        params = list(self.module.named_parameters(remove_duplicate=False))
        paths = list(dict.fromkeys(re.escape(name.rpartition(".")[2]) for name, p in params if p.ndim))
        path = rf".*({'|'.join(paths)})"
        path = path if all(p.ndim for p in self._named(path)) else rf".*({'|'.join(n for n in paths if n != 'factor')})"
        self.plan.shard(path, Shard(0), dims, phase=INIT).shard(path, Replicate(), dims, phase=RUN)
        self.plan.default(Replicate())

    def _write_rest(self) -> None:
        """Without units, each parameter needs a rule."""
        rng = self.rng
        self.plan.default(Replicate())
        whole = [name for name, param in self.module.named_parameters() if id(param) not in self.cut and param.requires_grad]
        if whole and rng.random() < 0.25 and self.case["optimizer"] != "muon":
            path, dims = _exact(rng.choice(whole)), (rng.choice(self.names),)
            if rng.random() < 0.5:
                self.plan.shard(path, Replicate(), dims, grad=rng.choice((Replicate(), Partial())))
            else:
                self.plan.shard(path, Replicate(), dims).annotate(path + ".grad", rng.choice((Replicate(), Partial())), dims)


# -- wrong plans -----------------------------------------------------------------------------------------------------------


def _at_first_rank(dim: str, case: dict[str, Any]) -> RaggedShard:
    """A placement that no legal plan has."""
    ranks = case["mesh"]["sizes"][case["mesh"]["names"].index(dim)]
    return RaggedShard((), (1, *(0 for _ in range(ranks - 1))))


# What is added to a legal plan, on one of its mesh dimensions; ``rank`` and ``ranks`` on one rank only.
WRONG: dict[str, Callable[[Plan, str, dict[str, Any]], Any]] = {
    "no such tensor": lambda plan, dim, case: plan.shard("blocks.0.upp.weight", Shard(0), dim),
    "no such module": lambda plan, dim, case: plan.shard("block.0.<in>", Shard(0), dim),
    "no such unit": lambda plan, dim, case: plan.unit(r"layers\.\d+", dim),
    "no such buffer": lambda plan, dim, case: plan.segments("temperatures", (1, 1), 0),
    "no such dimension of the mesh": lambda plan, dim, case: plan.shard("head.<in>", Replicate(), "xp"),
    "no such dimension of the tensor": lambda plan, dim, case: plan.shard("head.weight", Shard(2), dim),
    "no such argument": lambda plan, dim, case: plan.shard("<in:tokens>", Shard(0), dim),
    "no forward": lambda plan, dim, case: plan.shard("blocks.<out>", Shard(0), dim),
    "two cuts": lambda plan, dim, case: plan.shard("head.weight", Shard(0), dim).shard("head.weight", Shard(1), dim),
    "two factories": lambda plan, dim, case: plan.factory("norm", Shard(0), dim).factory("norm", Replicate(), dim),
    "segments of another size": lambda plan, dim, case: plan.segments("head.weight", (1, case["model"]["vocabulary"]), 0),
    "one phase": lambda plan, dim, case: plan.shard("head.weight", _at_first_rank(dim, case), dim, phase=INIT),
    "units of a shape": lambda plan, dim, case: plan.shard("head.weight", RaggedShard((0,), (1,) * 9), dim),
    "an element that does not divide": lambda plan, dim, case: plan.shard("temperature", _StridedShard(0, split_factor=5), dim),
    "the order of dimensions": lambda plan, dim, case: plan.shard("head.<in>", Shard(0), case["mesh"]["names"][::-1]),
    "on one rank": lambda plan, dim, case: plan.shard("hed.weight", Shard(0), dim),
    "other ranks have another": lambda plan, dim, case: plan.shard("<in:x>", Shard(0), dim),
    "an unknown mode": lambda plan, dim, case: plan,
}


def _wrong(rng: random.Random, case: dict[str, Any]) -> tuple[str, Plan]:
    """A legal plan with one change that makes it wrong."""
    kinds = [kind for kind in WRONG if kind != "the order of dimensions" or len(case["mesh"]["names"]) > 1]
    kind, plan = rng.choice(kinds), Plan(case["plan"].rules)
    WRONG[kind](plan, rng.choice(case["mesh"]["names"]), case)
    return kind, plan
