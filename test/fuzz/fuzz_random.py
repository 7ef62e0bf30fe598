"""Random programs of random ops on DTensors under any placements, while single_device is on, beside plain tensors.

A program draws several times in a row, from the default generator and from two others. After every step the values, and the
states of all generators, must be those of one device: a rank that draws a number too few shows in the next step, too.
"""

from __future__ import annotations

import hashlib
import random
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor as dtensor
import torch.nn.functional as F
from fuzz_dtensor import CLEAR, misleads_torch
from fuzz_ops import bytes_of
from oracle import local_of, random_placement
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.utils.checkpoint import checkpoint

from torch_ragged import StridedRaggedShard
from torch_ragged.random import single_device
from torch_ragged.tensor._cut_placement import has_flat, has_own_rules
from torch_ragged.tensor.placement_types import normalize_placements

__all__ = ["random_case", "run_program", "size_of"]

MESHES = {2: ((2,), (1, 2), (2, 1), (1, 2, 1)), 3: ((3,), (3, 1)), 4: ((4,), (2, 2), (2, 2), (2, 1, 2)), 5: ((5,),)}
MESHES |= {6: ((6,), (2, 3), (3, 2), (1, 3, 2)), 7: ((7,),), 8: ((8,), (2, 4), (4, 2), (2, 2, 2), (2, 2, 2))}
RANKS = (2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 4, 4, 4, 4, 4, 4, 5, 6, 6, 7, 8, 8)
SIZES = (1, 2, 3, 4, 4, 5, 6, 8, 8, 12)
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
ALL = (*FLOATS, torch.int64, torch.int32, torch.uint8)
PARTIALS = ("sum", "max", "min")

# Dtypes, and the op of a tensor and a generator or None. Most write to the tensor.
OPS: dict[str, tuple[tuple[torch.dtype, ...], Callable[..., Any]]] = {
    "normal_": (FLOATS, lambda x, g: x.normal_(0.5, 2, generator=g)),
    "uniform_": (FLOATS, lambda x, g: x.uniform_(-1, 3, generator=g)),
    "exponential_": (FLOATS, lambda x, g: x.exponential_(2.0, generator=g)),
    "log_normal_": (FLOATS, lambda x, g: x.log_normal_(0.1, 0.5, generator=g)),
    "cauchy_": (FLOATS, lambda x, g: x.cauchy_(generator=g)),
    "geometric_": (ALL, lambda x, g: x.geometric_(0.3, generator=g)),
    "random_": (ALL, lambda x, g: x.random_(generator=g)),
    "random_ from": (ALL, lambda x, g: x.random_(3, 100, generator=g)),
    "bernoulli_": (ALL, lambda x, g: x.bernoulli_(0.3, generator=g)),
    "bernoulli_ of a tensor": (FLOATS, lambda x, g: x.bernoulli_(torch.full_like(x, 0.25), generator=g)),
    "bernoulli": (FLOATS, lambda x, g: torch.bernoulli(torch.full_like(x, 0.25), generator=g)),
    "bernoulli of a number": (FLOATS, lambda x, g: torch.bernoulli(x, 0.2, generator=g)),
    "rand_like": (FLOATS, lambda x, g: torch.rand_like(x, generator=g) if g else torch.rand_like(x)),
    "randn_like of a dtype": (ALL, lambda x, g: torch.randn_like(x, dtype=torch.float64)),
    "randint_like": (ALL, lambda x, g: torch.randint_like(x, 10)),
    "randint_like from": (ALL, lambda x, g: torch.randint_like(x, 3, 10, dtype=torch.int32)),
    "dropout": (FLOATS, lambda x, g: F.dropout(x, 0.3)),
    "dropout in place": (FLOATS, lambda x, g: F.dropout(x, 0.3, inplace=True)),
    "mask of native_dropout": (FLOATS, lambda x, g: torch.native_dropout(x, 0.3, True)[1]),
    "multinomial": (FLOATS[:2], lambda x, g: torch.multinomial(torch.ones_like(x), 1, generator=g)),
    "multinomial of two": (FLOATS[:2], lambda x, g: torch.multinomial(torch.ones_like(x), 2, generator=g)),
    "multinomial with replacement": (FLOATS[:2], lambda x, g: torch.multinomial(torch.ones_like(x), 3, True, generator=g)),
    "kaiming_uniform_": (FLOATS, lambda x, g: nn.init.kaiming_uniform_(x, generator=g)),
    "xavier_normal_": (FLOATS, lambda x, g: nn.init.xavier_normal_(x, generator=g)),
    "trunc_normal_": (FLOATS[:2], lambda x, g: nn.init.trunc_normal_(x, std=0.5, a=-1, b=1, generator=g)),
    "orthogonal_": (FLOATS[:2], lambda x, g: nn.init.orthogonal_(x, generator=g)),
}
# Layers whose backward runs, by itself or after it was computed again.
LAYERS: dict[str, Callable[[Any], Any]] = {
    "dropout": lambda x: F.dropout(x, 0.4),
    "native_dropout": lambda x: torch.native_dropout(x, 0.2, True)[0],
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "times rand_like": lambda x: x * torch.rand_like(x),
    "plus randn_like": lambda x: x + torch.randn_like(x),
    "times bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
}
_meshes: dict[Any, DeviceMesh] = {}


def size_of(seed: int) -> int:
    """How many ranks the program of ``seed`` needs."""
    return random.Random(seed).choice(RANKS)


def random_case(seed: int) -> dict[str, Any]:
    """The mesh and the tensors of a program; its steps follow from the seed, too, and are listed if one fails."""
    rng = random.Random(seed)
    size = rng.choice(RANKS)
    mesh, tensors = rng.choice(MESHES[size]), []
    for index in range(rng.choice((2, 3))):
        # On a mesh of three dimensions, torch's rules for tensors of four take seconds for each arrangement of placements.
        ndim = rng.choice((0, 1, 2, 2, 2) if len(mesh) == 3 else (0, 1, 2, 2, 2, 3, 4))
        shape = tuple(0 if rng.random() < 0.02 else rng.choice(SIZES) for _ in range(ndim))
        placements = random_placements(rng, shape, mesh, needs_own=index == 0)
        order = list(range(len(shape)))
        if rng.random() < 0.3 and not has_own_rules(placements):
            rng.shuffle(order)
        tensors.append((shape, order, rng.choice(ALL if rng.random() < 0.3 else FLOATS), placements))
    return {"seed": seed, "size": size, "mesh": mesh, "tensors": tensors, "steps": rng.randint(4, 12)}


def random_placements(
    rng: random.Random, shape: tuple[int, ...], mesh: tuple[int, ...], *, partial: bool = True, needs_own: bool = False
) -> tuple[Any, ...]:
    """Placements that have a meaning for the shape."""
    for _ in range(50):
        chosen = [random_placement(rng, shape, mesh, dim, StridedRaggedShard) for dim in range(len(mesh))]
        chosen = [(Partial(rng.choice(PARTIALS)) if partial else Replicate()) if p.is_partial() else p for p in chosen]
        if len({p.reduce_op for p in chosen if isinstance(p, Partial)}) > 1:
            continue  # torch refuses most pairs.
        try:
            placements = normalize_placements(tuple(chosen), shape, mesh)
        except ValueError:
            continue
        if has_own_rules(placements) or not (needs_own or misleads_torch(shape, mesh, placements)):
            return tuple(placements)
    return (Replicate(),) * len(mesh)


def run_program(case: dict[str, Any]) -> tuple[str, str]:
    """Run a program. Returns a digest of its values, the same on all ranks, and how many steps were refused."""
    before = torch.get_rng_state()
    try:
        with single_device():
            program = Program(case)
            for _ in range(case["steps"]):
                program.step()
    finally:
        torch.set_rng_state(before)
    return program.digest.hexdigest(), f"operations {program.done} refused {program.refused}"


class Wrong(AssertionError):
    """A DTensor has another value than the plain tensor, or a generator another state."""


class Program:
    """A pool of pairs (plain, DTensor), to which each step applies a random op; and two sides with generators of their own."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.rng = random.Random(case["seed"] + 1)
        key = (case["mesh"], id(dist.group.WORLD))
        if key not in _meshes:
            _meshes.clear() if len(_meshes) > 40 else None
            _meshes[key] = init_device_mesh("cpu", case["mesh"])
        self.mesh = _meshes[key]
        self.digest, self.lines, self.done, self.refused = hashlib.sha1(), list[str](), 0, 0
        torch.manual_seed(case["seed"])
        self.generators = [[torch.Generator().manual_seed(case["seed"] + n) for n in (1, 2)] for _ in ("plain", "placed")]
        values = torch.Generator().manual_seed(case["seed"])
        self.pool = [self.pair_of(*tensor, values) for tensor in case["tensors"]]

    def pair_of(self, shape: Any, order: Any, dtype: Any, placements: Any, values: torch.Generator) -> tuple[Any, DTensor]:
        """A tensor of positive values, of any order in memory, and the DTensor. Others add nothing to the first Partial."""
        plain = (torch.rand([shape[dim] for dim in order], generator=values) * 4 + 0.5).to(dtype)
        plain = plain.permute([order.index(dim) for dim in range(len(shape))]) if shape else plain
        base = [Replicate() if p.is_partial() else p for p in placements]
        here = tuple(self.mesh.get_coordinate() or ())
        if plain.is_contiguous():
            local = local_of(plain, tuple(self.mesh.shape), base, here).clone().contiguous()
        else:
            local = distribute_tensor(plain, self.mesh, base).to_local().clone()
        if any(p.is_partial("sum") and coordinate for p, coordinate in zip(placements, here)):
            local.zero_()
        placed = DTensor.from_local(local, self.mesh, placements, shape=plain.shape, stride=plain.stride(), run_check=False)
        return plain, placed

    # -- steps -------------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        kind = self.rng.random()
        self.pool = self.pool[-6:]
        if kind < 0.15:
            self.redistribute()
        elif kind < 0.4:
            self.train()
        elif kind < 0.5:
            self.make()
        else:
            self.draw()

    def draw(self) -> None:
        """One random op. A tensor that it writes to stays in the pool, with its new values."""
        index, number = self.rng.randrange(len(self.pool)), self.rng.choice((None, None, 0, 1))
        plain, placed = self.pool[index]
        name = self.rng.choice([name for name, (dtypes, _) in OPS.items() if plain.dtype in dtypes])
        with_generator = "" if number is None else f", generator {number}"
        self.note(f"{name}({self.text(placed)}{with_generator})")
        twin, function = plain.clone(), OPS[name][1]
        made = self.both(
            lambda g: function(twin, None if number is None else g[number]),
            lambda g: function(placed, None if number is None else g[number]),
        )
        if made is not None:
            self.pool[index] = (twin, placed)
            self.check(twin, placed)
            if made[0] is not twin:
                self.keep(*made)

    def make(self) -> None:
        """A factory of torch.distributed.tensor."""
        shape = tuple(self.rng.choice(SIZES) for _ in range(self.rng.choice((1, 2, 2))))
        placements = random_placements(self.rng, shape, tuple(self.mesh.shape), partial=False)
        name, dtype = self.rng.choice(("rand", "randn")), self.rng.choice(FLOATS)
        self.note(f"{name}({shape}, {dtype}, {placements})")
        made = self.both(
            lambda g: getattr(torch, name)(shape, dtype=dtype),
            lambda g: getattr(dtensor, name)(shape, dtype=dtype, device_mesh=self.mesh, placements=placements),
        )
        if made is not None:
            self.keep(*made)

    def train(self) -> None:
        """Forward and backward of some layers, of which a part may be computed again in backward."""
        pairs = [(p, q) for p, q in self.pool if p.dtype in FLOATS and not any(c.is_partial() for c in q.placements)]
        pairs = [(p, q) for p, q in pairs if not (has_flat(q.placements) and not p.is_contiguous())]
        if not pairs:
            return
        plain, placed = self.rng.choice(pairs)
        names = [self.rng.choice(list(LAYERS)) for _ in range(self.rng.randint(1, 4))]
        again = self.rng.randint(0, len(names)) if self.rng.random() < 0.5 else 0
        self.note(f"backward of {' -> '.join(names)}, the first {again} computed again, of {self.text(placed)}")

        def first(x: Any) -> Any:
            for name in names[:again]:
                x = LAYERS[name](x)
            return x

        def results(tensor: Any) -> tuple[Any, Any]:
            x = tensor.detach().clone().requires_grad_()
            y = checkpoint(first, x, use_reentrant=False) if again else x
            for name in names[again:]:
                y = LAYERS[name](y)
            (y * y).sum().backward()
            return y.detach(), x.grad

        made = self.both(lambda g: results(plain), lambda g: results(placed))
        if made is not None:
            for one, other in zip(*made):
                self.keep(one, other)

    def redistribute(self) -> None:
        index = self.rng.randrange(len(self.pool))
        plain, placed = self.pool[index]
        if not plain.is_contiguous():
            return  # Ragged placements have no strides of their own.
        target = random_placements(self.rng, tuple(plain.shape), tuple(self.mesh.shape), partial=False)
        self.note(f"redistribute({self.text(placed)} -> {target})")
        # Cloned: if no element moves, the result shares the memory.
        moved = self.both(lambda g: plain.clone(), lambda g: placed.redistribute(placements=target).clone())
        if moved is not None:
            self.check(*moved)
            self.pool[index] = moved

    # -- helpers -----------------------------------------------------------------------------------------------------------

    def both(self, of_plain: Callable[[Any], Any], of_placed: Callable[[Any], Any]) -> tuple[Any, Any] | None:
        """The results of both sides from the same states; None if one device cannot do it, or DTensors refuse it clearly."""
        plains, placeds = self.generators
        before = [torch.get_rng_state(), *(g.get_state() for g in plains)]
        try:
            expected = of_plain(plains)
        except (RuntimeError, ValueError):
            self.restore(before)
            return None
        after = [torch.get_rng_state(), *(g.get_state() for g in plains)]
        torch.set_rng_state(before[0])
        self.done += 1
        found, error = None, None
        try:
            found = of_placed(placeds)
        except Exception as caught:
            error = caught
        if self.anywhere(error is not None):
            if self.anywhere(error is None or not any(clear in " ".join(str(error).split()) for clear in CLEAR)):
                where = "".join(traceback.format_exception(error))[-3000:] if error else "another rank raises"
                raise Wrong(f"{self.program()}\n{where}") from error
            self.refused += 1
            self.lines[-1] += "  -- refused"
            self.restore(before)
            return None
        states = [torch.get_rng_state(), *(g.get_state() for g in placeds)]
        for name, one, other in zip(("the default generator", "generator 0", "generator 1"), states, after, strict=True):
            if not torch.equal(one, other):
                raise Wrong(f"{self.program()}\n{name} has another state than on one device")
        return expected, found

    def restore(self, states: list[torch.Tensor]) -> None:
        torch.set_rng_state(states[0])
        for side in self.generators:
            for generator, state in zip(side, states[1:], strict=True):
                generator.set_state(state)

    def anywhere(self, condition: bool) -> bool:
        """Whether ``condition`` holds on one rank or more. All ranks go on with the same steps."""
        answer = torch.tensor(int(condition))
        dist.all_reduce(answer, dist.ReduceOp.MAX)
        return bool(answer)

    def keep(self, plain: torch.Tensor, placed: Any) -> None:
        self.check(plain, placed)
        if plain.dtype in ALL:
            self.pool.append((plain, placed))

    def check(self, plain: torch.Tensor, placed: Any) -> None:
        if not isinstance(placed, DTensor):
            raise Wrong(f"{self.program()}\nthe result is a {type(placed).__name__}, not a DTensor")
        whole = placed.detach().redistribute(placements=[Replicate()] * self.mesh.ndim).to_local()
        self.digest.update(bytes_of(whole))
        if whole.shape != plain.shape or whole.dtype != plain.dtype or not same(whole, plain):
            raise Wrong(f"{self.program()}\nresult {self.text(placed)}\n{whole}\nexpected\n{plain}")

    def text(self, tensor: Any) -> str:
        strides = "" if tensor.is_contiguous() else f" of strides {tensor.stride()}"
        return f"{tuple(tensor.shape)}{strides} {str(tensor.dtype)[6:]} {tuple(tensor.placements)}"

    def note(self, line: str) -> None:
        self.lines.append(line)

    def program(self) -> str:
        return f"rank {dist.get_rank()}, the program on a mesh of {tuple(self.mesh.shape)}:\n  " + "\n  ".join(self.lines)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether all values are equal, of which NaN is one: an infinite value that is dropped."""
    if not one.is_floating_point():
        return torch.equal(one, other)
    return torch.allclose(one.double(), other.double(), rtol=0.0, atol=0.0, equal_nan=True)
