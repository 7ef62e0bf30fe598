"""Redistribution on 1-D meshes against brute force: bitwise, with autograd, in exact collectives and bytes."""

import random
import unittest

import torch
import torch.distributed as dist
from common import error_of, run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from torch_ragged import RaggedShard
from torch_ragged._ownership import owned
from torch_ragged._redistribute import transfer_plan
from torch_ragged.placement_types import cuts_of

DTYPES = (torch.float32, torch.bfloat16, torch.int64)


def random_units(rng, prefix, ranks):
    total = rng.choice([d for d in range(1, prefix + 1) if prefix % d == 0] or [1, 3])
    kind = rng.choice(("any", "one owner", "even"))
    if kind == "even" and prefix % ranks == 0:
        return (1,) * ranks
    if kind == "one owner":
        owner = rng.randrange(ranks)
        return tuple(int(r == owner) for r in range(ranks))
    edges = sorted([0, total] + [rng.randint(0, total) for _ in range(ranks - 1)])
    return tuple(b - a for a, b in zip(edges, edges[1:]))


def random_placement(rng, shape, ranks):
    kind = rng.choice(("ragged", "ragged", "ragged", "replicate", "shard", "partial"))
    if kind == "replicate" or (kind == "shard" and not shape):
        return Replicate()
    if kind == "shard":
        return Shard(rng.randrange(len(shape)))
    if kind == "partial":
        return Partial(rng.choice(("sum", "avg", "max", "min")))
    ndims = rng.randint(0, len(shape))
    prefix = 1
    for size in shape[:ndims]:
        prefix *= size
    return RaggedShard(tuple(range(ndims)), random_units(rng, prefix, ranks))


def local_of(full, placement, rank, ranks):
    """The local tensor by definition."""
    if isinstance(placement, Replicate):
        return full
    mine = owned(tuple(full.shape), (ranks,), cuts_of((placement,)), (rank,))
    pieces = [full[tuple(slice(o, o + s) for o, s in zip(b.offsets, b.sizes))] for b in mine.boxes]
    flat = torch.cat([p.reshape(-1) for p in pieces]) if pieces else full.new_empty(0)
    return flat.view(mine.local_shape)


def check_random_pairs(cases, seed):
    rng, rank, ranks = random.Random(seed), dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    for case in range(cases):
        shape = tuple(rng.randint(0 if rng.random() < 0.1 else 1, 6) for _ in range(rng.randint(0, 3)))
        source, target = (random_placement(rng, shape, ranks) for _ in range(2))
        if not any(isinstance(p, RaggedShard) for p in (source, target)):
            source = RaggedShard((), tuple(int(r == case % ranks) for r in range(ranks)))
        dtype = rng.choice(DTYPES)
        generator = torch.Generator().manual_seed(case)
        full = torch.randint(-8, 8, shape, generator=generator).to(dtype)
        where = f"case {case}: {shape} {dtype} {source} -> {target} on {ranks}"
        if isinstance(source, Partial):
            # Contributions whose reduction is exact: small integers.
            parts = torch.randint(-8, 8, (ranks, *shape), generator=generator).to(dtype)
            parts = parts * ranks if source.reduce_op == "avg" else parts
            full = {"sum": parts.sum(0), "avg": parts.sum(0) // ranks if dtype == torch.int64 else parts.sum(0) / ranks}.get(
                source.reduce_op, parts.amax(0) if source.reduce_op == "max" else parts.amin(0)
            ).to(dtype)
            if source.reduce_op == "avg" and dtype == torch.int64:
                continue  # torch has no integer averages
            tensor = DTensor.from_local(parts[rank], mesh, [source], shape=full.shape, stride=full.stride())
        else:
            tensor = distribute_tensor(full, mesh, [source])
            assert torch.equal(tensor.to_local(), local_of(full, source, rank, ranks)), where
        if isinstance(target, Partial) and not isinstance(source, RaggedShard):
            continue  # torch's own business
        if isinstance(target, Partial) and target.reduce_op == "avg" and dtype == torch.int64:
            continue
        moved = tensor.redistribute(placements=[target])
        assert moved.placements == (target,), where
        if isinstance(target, Partial):
            moved = moved.redistribute(placements=[Replicate()])
            assert torch.equal(moved.to_local(), full), where
        else:
            assert torch.equal(moved.to_local(), local_of(full, target, rank, ranks)), where
            assert moved.to_local().is_contiguous() or not isinstance(target, RaggedShard), where


def check_autograd():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    full, weight = torch.randn(6, 4), torch.randn(6, 4)
    ragged, other = RaggedShard((0,), (1, 2, 0, 3)), RaggedShard((0, 1), (10, 2, 12, 0))
    for source in (Replicate(), Shard(0), Shard(1), ragged):
        for target in (Replicate(), Shard(1), ragged, other):
            leaf = distribute_tensor(full, mesh, [source]).requires_grad_()
            moved = leaf.redistribute(placements=[target])
            (moved * distribute_tensor(weight, mesh, [target])).sum().backward()
            assert leaf.grad.placements == (source,), (source, target, leaf.grad.placements)
            assert torch.equal(leaf.grad.full_tensor(), weight), (source, target)
    # Partial: every rank's contribution gets the whole gradient.
    local = torch.randn(6, 4, requires_grad=True)
    partial = DTensor.from_local(local, mesh, [Partial()])
    (partial.redistribute(placements=[ragged]) * distribute_tensor(weight, mesh, [ragged])).sum().backward()
    assert torch.equal(local.grad, weight)
    # from_local and to_local.
    mine = local_of(full, ragged, rank, ranks).clone().requires_grad_()
    tensor = DTensor.from_local(mine, mesh, [ragged], shape=full.shape)
    (tensor.to_local() * 3).sum().backward()
    assert torch.equal(mine.grad, torch.full_like(mine, 3))
    leaf = distribute_tensor(full, mesh, [ragged]).requires_grad_()
    (leaf.full_tensor() * weight).sum().backward()
    assert torch.equal(leaf.grad.full_tensor(), weight) and leaf.grad.shape == full.shape


def count_collectives():
    mesh = init_device_mesh("cpu", (4,))
    even, skewed, root = RaggedShard((0,), (1, 1, 1, 1)), RaggedShard((0,), (1, 5, 0, 2)), RaggedShard((), (0, 0, 1, 0))
    counts = {}
    for source, target in (
        (even, Replicate()),
        (skewed, root),
        (root, skewed),
        (skewed, Shard(1)),
        (Shard(0), even),
        (root, Replicate()),
        (Replicate(), skewed),
        (skewed, RaggedShard((0, 1), (1, 5, 0, 2))),
        (even, Partial()),
    ):
        tensor = distribute_tensor(torch.randn(8, 4), mesh, [source])
        with CommDebugMode() as mode:
            tensor.redistribute(placements=[target])
        counts[f"{source} -> {target}"] = {str(op).split(".")[-1]: n for op, n in mode.get_comm_counts().items()}
    return counts


def check_errors():
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    placement = [RaggedShard((0,), (1, 3))]
    good = torch.zeros(3 if rank == 0 else 9)
    errors = [
        error_of(DTensor.from_local, good, mesh, placement),
        error_of(DTensor.from_local, torch.zeros(5 if rank else 3), mesh, placement, shape=(4, 3), run_check=True),
        error_of(DTensor.from_local, good.view(-1, 3), mesh, placement, shape=(4, 3), run_check=True),
        error_of(distribute_tensor, torch.zeros(6, 3), mesh, placement),
        error_of(distribute_tensor, torch.zeros(4, 3), mesh, [RaggedShard((0,), (1, 1, 2))]),
        error_of(distribute_tensor(torch.zeros(4, 3), mesh, placement).redistribute, placements=[RaggedShard((0,), (1, 4))]),
    ]
    assert DTensor.from_local(good, mesh, placement, shape=(4, 3), run_check=True).stride() == (3, 1)
    other = init_device_mesh("cpu", (1, 2))
    errors.append(error_of(distribute_tensor(torch.zeros(4, 3), mesh, placement).redistribute, other, placement))
    return errors


class RedistributeTest(unittest.TestCase):
    def test_random_pairs_are_bitwise_right(self):
        for ranks in range(1, 9):
            with self.subTest(ranks=ranks):
                run_ranks(ranks, check_random_pairs, 60, 100 + ranks)

    def test_autograd(self):
        run_ranks(4, check_autograd)

    def test_collectives(self):
        (counts, *others) = run_ranks(4, count_collectives)
        self.assertTrue(all(other == counts for other in others))
        self.assertEqual(
            counts,
            {
                "RS(0)[1,1,1,1] -> R": {"all_gather_into_tensor": 1},
                "RS(0)[1,5,0,2] -> RS()[0,0,1,0]": {"all_to_all_single": 1},
                "RS()[0,0,1,0] -> RS(0)[1,5,0,2]": {"all_to_all_single": 1},
                "RS(0)[1,5,0,2] -> S(1)": {"all_to_all_single": 1},
                "S(0) -> RS(0)[1,1,1,1]": {},
                "RS()[0,0,1,0] -> R": {"broadcast": 1},
                "R -> RS(0)[1,5,0,2]": {},
                "RS(0)[1,5,0,2] -> RS(0,1)[1,5,0,2]": {},
                "RS(0)[1,1,1,1] -> P(sum)": {},
            },
        )

    def test_an_element_travels_only_if_its_owner_changes(self):
        rng = random.Random(5)
        for _ in range(200):
            ranks = rng.randint(1, 8)
            shape = tuple(rng.randint(1, 6) for _ in range(rng.randint(1, 3)))
            pair = []
            while len(pair) < 2:
                placement = random_placement(rng, shape, ranks)
                if isinstance(placement, (RaggedShard, Shard)):
                    pair.append(placement)
            full = torch.arange(torch.Size(shape).numel()).view(shape)
            before, after = ([set(local_of(full, p, r, ranks).flatten().tolist()) for r in range(ranks)] for p in pair)
            cuts = cuts_of(tuple(pair))
            for rank in range(ranks):
                plan, _ = transfer_plan(shape, *cuts, ranks, rank)
                received = sum(n for peer, n in enumerate(plan.receive_splits) if peer != rank)
                self.assertEqual(received, len(after[rank] - before[rank]))

    def test_errors_on_every_rank(self):
        first, second = run_ranks(2, check_errors)
        self.assertEqual(first, second)
        words = ("needs the global shape", "rank 1 gave a local tensor of shape (5,), expected (9,)", "expected (3,)")
        words += ("do not divide into 4 units", "has 3 local_units", "do not divide into 5 units", "another mesh")
        for error, text in zip(first, words):
            self.assertIn(text, error)
            self.assertTrue(error.startswith("ValueError"), error)


if __name__ == "__main__":
    unittest.main()
