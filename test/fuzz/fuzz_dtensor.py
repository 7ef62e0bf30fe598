"""Random programs on DTensors under any placements, run on plain tensors too and compared after every operation.

Values are small integers, in float64, bfloat16 or int64: sums are then exact in any order, so results must be equal bit by bit.
Operations that round (``ROUNDING``) run in float64 only. Their results may differ by 1e-12 of the largest value, since ranks
add in another order, and no later operation uses them.
"""

from __future__ import annotations

import hashlib
import math
import random
import traceback
from typing import Any

import torch
import torch.distributed as dist
from fuzz_ops import IN_PLACE, LISTS, PLAIN, ROUNDING, Skip, bytes_of
from oracle import _StridedShard, contributions, local_of, random_placement, reduced
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from torch_ragged import StridedRaggedShard
from torch_ragged.tensor._cut_placement import has_flat
from torch_ragged.tensor.placement_types import normalize_placements

__all__ = ["random_case", "run_program", "size_of"]

MESHES = {1: ((1,), (1, 1)), 2: ((2,), (1, 2), (2, 1)), 3: ((3,),), 4: ((4,), (4,), (2, 2), (2, 2), (1, 4))}
MESHES |= {6: ((6,), (2, 3), (3, 2)), 8: ((8,), (2, 4), (4, 2), (2, 2, 2))}
RANKS = (1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 4, 4, 4, 4, 4, 4, 6, 8)
SIZES = (1, 2, 2, 3, 4, 4, 5, 6, 8)
DTYPES = {name: getattr(torch, name) for name in ("float64", "bfloat16", "int64", "complex128", "bool")}
CLEAR = (  # Refusals that name the operation and the way out, as in test/tensor/op_conformance.py.
    "is not supported on a DTensor with",
    "in-place operations that require placement changes are not supported",
    "redistribute the strided view to Replicate or Shard first",
    "got mixed torch.Tensor and DTensor",
    "is unable to be interpreted into a corresponding shard_order",  # Torch 2.11.
    "does not have a sharding strategy registered",
    "would remove or reshape sharded dimension",
    "refer to a single memory location. Please clone() the tensor",
)
EXACT = 256  # bfloat16 has all integers up to this one.
LIMIT = 60
_OLD = torch.__version__ < "2.12"
_meshes: dict[Any, DeviceMesh] = {}


def size_of(seed: int) -> int:
    """How many ranks the program of ``seed`` needs."""
    return random.Random(seed).choice(RANKS)


def random_case(seed: int) -> dict[str, Any]:
    """The mesh and the inputs of a program; its operations follow from the seed, too, and are listed if one fails."""
    rng = random.Random(seed)
    size = rng.choice(RANKS)
    mesh = rng.choice(MESHES[size])
    case: dict[str, Any] = {"seed": seed, "size": size, "mesh": mesh, "gradients": rng.random() < 0.25}
    case["dtype"] = "float64" if case["gradients"] else rng.choice(("float64", "float64", "float64", "bfloat16", "int64"))
    ndim = rng.choice((0, 1, 1, 2, 2, 2, 3, 3))
    shape = tuple(0 if rng.random() < 0.02 else rng.choice(SIZES) for _ in range(ndim))
    inputs = []
    for index in range(rng.choice((2, 3, 4))):
        this = shape
        if rng.random() < 0.3:
            this = tuple(rng.choice((size, 1)) for size in shape)[rng.randint(0, len(shape) // 2) :]
        elif rng.random() < 0.2:
            this = tuple(rng.choice(SIZES) for _ in range(rng.choice((1, 2, 3))))
        inputs.append((this, _placements(rng, this, mesh, index == 0)))
    case["inputs"], case["operations"] = inputs, rng.randint(4, 14)
    return case


def _placements(rng: random.Random, shape: tuple[int, ...], mesh: tuple[int, ...], ragged: bool = False) -> tuple[Any, ...]:
    """Placements that have a meaning for the shape; Partial ones are sums, which are exact."""
    for _ in range(50):
        chosen = [random_placement(rng, shape, mesh, dim, StridedRaggedShard) for dim in range(len(mesh))]
        chosen = [Partial() if isinstance(p, Partial) else p for p in chosen]
        try:
            placements = normalize_placements(tuple(chosen), shape, mesh)
        except ValueError:
            continue
        if has_flat(placements) or not (ragged or misleads_torch(shape, mesh, placements)):
            return tuple(placements)
    return (Replicate(),) * len(mesh)


def misleads_torch(shape: tuple[int, ...], mesh: tuple[int, ...], placements: Any) -> bool:
    """Whether torch's own redistribution can fail, or return wrong values, on some of the ranks.

    It does if all placements are torch's, and a ``_StridedShard`` cuts a dimension unevenly, or two cut the same dimension.
    Torch 2.11 takes a ``_StridedShard`` only beside the Shard of the same dimension.
    """
    if has_flat(placements):
        return False
    strided = [p.dim for p in placements if isinstance(p, _StridedShard)]
    if strided and _OLD:
        return True
    for dim, split_factor in ((p.dim, p.split_factor) for p in placements if isinstance(p, _StridedShard)):
        ways = [
            ranks for ranks, p in zip(mesh, placements, strict=True) if isinstance(p, (Shard, _StridedShard)) and p.dim == dim
        ]
        if strided.count(dim) > 1 or shape[dim] % (math.prod(ways) * split_factor):
            return True
    return False


def run_program(case: dict[str, Any]) -> tuple[str, str]:
    """Run a program. Returns a digest of its values, the same on all ranks, and how many operations were refused."""
    program = Program(case)
    for _ in range(case["operations"]):
        program.step()
    if case["gradients"]:
        program.backward()
    return program.digest.hexdigest(), f"operations {program.done} refused {program.refused} torch {program.torchs}"


class Wrong(AssertionError):
    """A DTensor has another value than the plain tensor."""


class Program:
    """A pool of pairs (plain, DTensor), to which each step applies one operation."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.case, self.rng = case, random.Random(case["seed"] + 1)
        key = (case["mesh"], id(dist.group.WORLD))
        if key not in _meshes:
            _meshes.clear() if len(_meshes) > 40 else None
            _meshes[key] = init_device_mesh("cpu", case["mesh"])
        self.mesh = _meshes[key]
        self.digest, self.lines = hashlib.sha1(), []
        self.done = self.refused = self.torchs = 0
        generator = torch.Generator().manual_seed(case["seed"])
        self.pool = [self._input(shape, placements, generator) for shape, placements in case["inputs"]]
        self.inputs = list(self.pool)
        self.rounded: list[tuple[torch.Tensor, DTensor]] = []

    def _input(self, shape: tuple[int, ...], placements: Any, generator: torch.Generator) -> tuple[torch.Tensor, DTensor]:
        coordinate, mesh_shape = tuple(self.mesh.get_coordinate()), tuple(self.mesh.shape)
        values = contributions(shape, self.mesh, placements, DTYPES[self.case["dtype"]], generator)
        nothing = (Replicate(),) * self.mesh.ndim
        plain = reduced(values, self.mesh.ndim, placements, nothing, coordinate).clone()
        mine = reduced(values, self.mesh.ndim, placements, placements, coordinate)
        local = local_of(mine, mesh_shape, placements, coordinate).clone().contiguous()
        keywords = dict(shape=torch.Size(shape), stride=torch.empty(shape).stride(), run_check=False)
        placed = DTensor.from_local(local, self.mesh, placements, **keywords)
        if self.case["gradients"]:
            plain, placed = plain.requires_grad_(), placed.detach().requires_grad_()
        return plain, placed

    # -- steps -------------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        rng, kind = self.rng, self.rng.random()
        self.pool = self.pool[-8:]
        if kind < 0.2:
            self.redistribute()
        elif kind < 0.35 and not self.case["gradients"]:
            self.in_place()
        elif kind < 0.45 and not self.case["gradients"]:
            self.lists()
        elif kind < 0.6 and self.case["dtype"] == "float64":
            name = rng.choice(list(ROUNDING))
            self.apply(name, ROUNDING[name], rounds=True)
        else:
            name = rng.choice(list(PLAIN))
            self.apply(name, PLAIN[name])

    def redistribute(self) -> None:
        plain, placed = self.rng.choice(self.pool)
        target = _placements(self.rng, tuple(plain.shape), tuple(self.mesh.shape))
        if (
            any(isinstance(p, Partial) and p != q for p, q in zip(target, placed.placements, strict=True))
            and self.case["gradients"]
        ):
            return  # The gradient of a new Partial is that of each rank's contribution.
        both = (*placed.placements, *target)
        if self.case["gradients"] and not has_flat(both) and any(isinstance(p, _StridedShard) for p in both):
            return  # DTensor's own backward of it can fail.
        self.note(f"redistribute({self.text(placed)} -> {target})")
        again = lambda twins: twins[0].redistribute(placements=target)  # noqa: E731
        moved = self.guarded(lambda: placed.redistribute(placements=target), [placed], again)
        if moved is not None:
            self.keep(plain, moved, [placed])

    def apply(self, name: str, operation: Any, rounds: bool = False) -> None:
        """An operation that makes new tensors, of up to three of the pool."""
        chosen = [self.rng.choice(self.pool) for _ in range(3)]
        state = self.rng.randrange(2**30)
        try:
            expected, used = operation(random.Random(state), [plain for plain, _ in chosen])
        except (Skip, RuntimeError, IndexError, NotImplementedError, TypeError):
            return  # The operation does not take such tensors at all. (Complex ones are a TypeError since torch 2.15.)
        if self.case["dtype"] == "bfloat16" and name.startswith(("sum", "cumsum", "matmul", "gram")):
            largest = operation(random.Random(state), [plain.float().abs() for plain, _ in chosen])[0]
            if largest.numel() and float(largest.max()) > EXACT:
                return  # A sum of parts may round in another way.
        operands = [chosen[index][1] for index in used]
        if name in ("view", "flatten") and not operands[0].numel():
            return  # DTensor's own rule for views of such tensors does not end (view_groups of torch 2.13).
        is_torchs = not any(has_flat(each.placements) for each in operands)
        if self.case["gradients"] and name.startswith("am") and (is_torchs or _OLD):
            return  # DTensor's own gradients of amax and amin are wrong: it divides by a Partial, in 2.11 of ours, too.
        if _OLD and name == "squeeze" and is_torchs:
            return  # It drops the dimensions of size 1 of the local tensor, which differ between ranks.
        self.note(f"{name}({', '.join(self.text(each) for each in operands)})  # state {state}")
        given = [placed for _, placed in chosen]
        found = self.guarded(
            lambda: operation(random.Random(state), given)[0],
            operands,
            lambda twins: operation(random.Random(state), twins)[0],
            given,
        )
        if found is None:
            return
        pairs = zip(expected, found, strict=True) if isinstance(expected, (list, tuple)) else [(expected, found)]
        for plain, placed in pairs:
            self.keep(plain, placed, operands, rounds)

    def in_place(self) -> None:
        """An operation that changes a tensor of the pool; what shares its memory leaves the pool."""
        plain, placed = self.rng.choice(self.pool)
        other, other_placed = self.rng.choice([pair for pair in self.pool if pair[0].shape == plain.shape])
        name = self.rng.choice(list(IN_PLACE))
        if plain.dtype == torch.bool or other.dtype != plain.dtype or not plain.is_contiguous():
            return
        count, operation = IN_PLACE[name]
        operands = [placed, other_placed][:count]
        self.note(f"{name}({', '.join(self.text(each) for each in operands)})")
        before = plain.clone()
        try:
            operation(*[plain, other.clone()][:count])
        except NotImplementedError:
            return  # The operation does not take such a dtype.
        found = self.guarded(lambda: operation(*operands), operands, lambda twins: operation(*twins))
        shared = plain.untyped_storage().data_ptr()
        self.pool = [pair for pair in self.pool if pair[0].untyped_storage().data_ptr() != shared]
        self.keep(plain if found is not None else before, placed, operands)

    def lists(self) -> None:
        """A foreach operation on several tensors, in place or not."""
        first = self.rng.choice(self.pool)
        chosen = [pair for pair in self.pool if pair[0].dtype == first[0].dtype and pair[0].dtype != torch.bool][:3]
        chosen = [(p, q) for p, q in chosen if p.is_contiguous()]
        names = [name for name in LISTS if "norm" not in name or self.case["dtype"] == "float64"]
        name = self.rng.choice(names)
        if len({p.untyped_storage().data_ptr() for p, _ in chosen}) < len(chosen) or not chosen:
            return
        self.note(f"{name}({', '.join(self.text(q) for _, q in chosen)})")
        plains, placeds = [p.clone() for p, _ in chosen], [q.clone() for _, q in chosen]
        expected = LISTS[name](plains)
        found = self.guarded(lambda: LISTS[name](placeds), placeds, LISTS[name])
        if found is not None:
            for one, other in zip(expected, found, strict=True):
                self.keep(one, other, placeds, rounds="norm" in name)

    def backward(self) -> None:
        """Gradients of the sum of squares of all results."""
        pairs = [(p, q) for p, q in [*self.pool, *self.rounded] if p.requires_grad and p.is_floating_point() and p.numel()]
        if not pairs:
            return
        self.note("backward of the sum of squares")
        sum(p.pow(2).sum() for p, _ in pairs).backward()
        total = self.guarded(lambda: sum(q.pow(2).sum() for _, q in pairs), [q for _, q in pairs], None)
        if total is None or self.guarded(lambda: (total.backward(), 1), [q for _, q in pairs], None) is None:
            return
        for (plain, placed), (shape, _) in zip(self.inputs, self.case["inputs"], strict=True):
            if (plain.grad is None) != (placed.grad is None):
                raise Wrong(f"{self.program()}\ngradient of the input {shape}: {placed.grad}, expected {plain.grad}")
            if plain.grad is not None:
                self.check(plain.grad, placed.grad, True)

    # -- helpers -----------------------------------------------------------------------------------------------------------

    def guarded(self, call: Any, operands: list[DTensor], twin: Any, given: Any = None) -> Any:
        """The result of ``call``; None if it was refused clearly, or if DTensor fails alike without ragged placements."""
        self.done += 1
        saved = [q.detach().clone() for q in given or operands] if twin else []
        result, error, text = None, None, ""
        try:
            result = call()
        except Exception as caught:
            error, text = caught, " ".join(str(caught).split())
        if not self.anywhere(error is not None):
            return result
        if not self.anywhere(not any(clear in text for clear in CLEAR)):
            self.refused += 1
            self.lines[-1] += "  -- refused"
            return None
        if not any(has_flat(each.placements) for each in operands) or self.anywhere(self.torch_fails(twin, saved)):
            self.torchs += 1
            self.lines[-1] += f"  -- fails in torch, too: {text[:80]}"
            return None
        where = "".join(traceback.format_exception(error))[-3000:] if error else "another rank raises"
        raise Wrong(f"{self.program()}\n{where}") from error

    def anywhere(self, condition: bool) -> bool:
        """Whether ``condition`` holds on one rank or more. All ranks go on with the same operations."""
        answer = torch.tensor(int(condition))
        dist.all_reduce(answer, dist.ReduceOp.MAX)
        return bool(answer)

    def torch_fails(self, twin: Any, operands: list[DTensor]) -> bool:
        """Whether the call fails if Replicate, or Shard(0), takes the place of ragged placements."""
        for other in (Replicate(), "shard"):
            try:
                twins = []
                for each in operands:
                    value = each.full_tensor()
                    placement = Shard(0) if other == "shard" and value.ndim else Replicate()
                    twins.append(distribute_tensor(value, self.mesh, [placement, *[Replicate()] * (self.mesh.ndim - 1)]))
                if twin is None:
                    return False
                twin(twins)
            except Exception:
                return True
        return False

    def keep(self, plain: torch.Tensor, placed: Any, operands: list[DTensor], rounds: bool = False) -> None:
        """Compare a result, and let later steps use it, unless it is rounded. Results of torch alone are not ours."""
        is_ours = any(has_flat(each.placements) for each in [*operands, placed] if isinstance(each, DTensor))
        if isinstance(placed, DTensor) and misleads_torch(tuple(placed.shape), tuple(self.mesh.shape), placed.placements):
            return  # Torch's redistribution cannot be trusted to compare it.
        pool, error = list(self.pool), None
        try:
            self.keep_checked(plain, placed, rounds)
        except Exception as caught:
            error = caught
        if not is_ours and self.anywhere(error is not None):
            self.pool, error = pool, None
            self.torchs += 1
            self.lines[-1] += "  -- wrong in torch"
        if error is not None:
            raise error

    def keep_checked(self, plain: torch.Tensor, placed: Any, rounds: bool) -> None:
        if not isinstance(plain, torch.Tensor):
            if plain != placed:
                raise Wrong(f"{self.program()}\nfound {placed}, expected {plain}")
            return
        self.check(plain, placed, rounds)
        if rounds:
            self.rounded.append((plain, placed))
            return
        if plain.dtype != torch.bool and plain.numel() and float(plain.detach().abs().max()) > LIMIT:
            if plain.is_complex():
                return  # It has no remainder; later steps would make larger numbers.
            self.note(f"remainder({self.text(placed)}, 11)")
            plain, placed = plain.remainder(11), placed.remainder(11)
            self.check(plain, placed, False)
        self.pool.append((plain, placed))

    def check(self, plain: torch.Tensor, placed: Any, rounds: bool) -> None:
        if not isinstance(placed, DTensor):
            raise Wrong(f"{self.program()}\nthe result is a {type(placed).__name__}, not a DTensor")
        if plain.shape != placed.shape or plain.dtype != placed.dtype:
            found, expected = f"{placed.dtype} {tuple(placed.shape)}", f"{plain.dtype} {tuple(plain.shape)}"
            raise Wrong(f"{self.program()}\nthe result is {found}, expected {expected}")
        expected, value = plain.detach(), placed.detach().full_tensor()
        self.digest.update(bytes_of(value))
        if torch.equal(value, expected):
            return
        if rounds and value.shape == expected.shape:
            finite = expected[expected.isfinite()].abs()
            scale = max(1.0, float(finite.max())) if finite.numel() else 1.0
            if torch.allclose(value, expected, rtol=0.0, atol=1e-12 * scale, equal_nan=True):
                return
        raise Wrong(f"{self.program()}\nresult {self.text(placed)}\n{value}\nexpected\n{expected}")

    def text(self, tensor: Any) -> str:
        return f"{tuple(tensor.shape)} {str(tensor.dtype)[6:]} {tuple(tensor.placements)}"

    def note(self, line: str) -> None:
        self.lines.append(line)

    def program(self) -> str:
        return f"rank {dist.get_rank()}, the program on a mesh of {tuple(self.mesh.shape)}:\n  " + "\n  ".join(self.lines)
