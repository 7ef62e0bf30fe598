"""The steps of redistributions, for all ranks of a mesh in one process, against the meaning of placements."""

import itertools
import math
import random
import types
import unittest
from unittest import mock

import pytest
import torch
from oracle import REDUCE, contributions, local_of, random_case, reduced
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from torch_ragged import RaggedShard, StridedRaggedShard
from torch_ragged.tensor._carry import copy_into, part_view
from torch_ragged.tensor._exchange import Part, merged_parts, part_of
from torch_ragged.tensor._ownership import Chunk, Whole
from torch_ragged.tensor._redistribute import _IDENTITY, _pack, _unpacking, plan_of
from torch_ragged.tensor._route import Exchange, Fill, Gather, Move, Reduce, Route, _columns
from torch_ragged.tensor._units import Units

MESHES = ((1,), (2,), (3,), (4,), (2, 2), (2, 3), (3, 2), (1, 3), (2, 2, 2))


class Ranks:
    """The flat local tensor of each coordinate of a mesh."""

    def __init__(self, mesh_shape, flats):
        self.mesh_shape, self.flats = mesh_shape, flats
        self.received = dict.fromkeys(flats, 0)

    def run(self, steps):
        """One step of each rank."""
        for where, step in steps.items():  # The ranks of one collective must all take part in it.
            if not isinstance(step, Move):
                mesh_dims = step.mesh_dims if isinstance(step, Exchange) else (step.mesh_dim,)
                assert {type(steps[peer]) for peer in self.group(where, mesh_dims)} == {type(step)}
        run = {Move: self.move, Exchange: self.exchange, Gather: self.gather, Reduce: self.reduce, Fill: self.fill}
        after = {where: run[type(step)](step, where, steps) for where, step in steps.items()}
        for where, step in steps.items():
            assert after[where].numel() == math.prod(step.local_shape)
        self.flats = after

    def group(self, where, mesh_dims):
        """The coordinates that differ from ``where`` only in ``mesh_dims``, in row-major order."""
        ranges = [range(size) if dim in mesh_dims else (where[dim],) for dim, size in enumerate(self.mesh_shape)]
        return list(itertools.product(*ranges))

    def packed(self, where, parts):
        assert not any(
            a.strides == b.strides == (1,) and a.offset + a.numel == b.offset for a, b in itertools.pairwise(parts)
        ), f"neighbours in storage are two parts: {parts}"
        assert all(part.numel for part in parts), parts
        return torch.cat([part_view(self.flats[where], part).reshape(-1) for part in (*parts,)] or [self.flats[where][:0]])

    def filled(self, step, packed, value=-999):
        assert packed.numel() == sum(part.numel for part in step.receives)
        result = torch.full((math.prod(step.local_shape),), value, dtype=packed.dtype)
        copy_into(result, packed, step.receives)
        return result

    def move(self, step, where, steps):
        return self.flats[where] if step.stays else self.filled(step, self.packed(where, step.sends))

    def exchange(self, step, where, steps):
        group, pieces = self.group(where, step.mesh_dims), []
        rank = group.index(where)
        assert len(step.receive_splits) == len(step.send_splits) == len(group)
        for peer, other in enumerate(group):
            sent = self.packed(other, steps[other].sends).split(tuple(steps[other].send_splits))[rank]
            assert sent.numel() == step.receive_splits[peer]
            self.received[where] += sent.numel() * (peer != rank)
            pieces.append(sent)
        return self.filled(step, torch.cat(pieces))

    def gather(self, step, where, steps):
        group = self.group(where, (step.mesh_dim,))
        pieces = [self.packed(other, steps[other].sends) for other in group]
        assert tuple(step.splits) == tuple(piece.numel() for piece in pieces)
        self.received[where] += sum(piece.numel() for other, piece in zip(group, pieces, strict=True) if other != where)
        return self.filled(step, torch.cat(pieces))

    def reduce(self, step, where, steps):
        group = self.group(where, (step.mesh_dim,))
        total = REDUCE[step.operation](torch.stack([self.packed(other, steps[other].sends) for other in group]))
        if step.splits is not None:
            assert len(step.splits) == len(group)
            total = total.split(tuple(step.splits))[group.index(where)]
        return self.filled(step, total)

    def fill(self, step, where, steps):
        rank = where[step.mesh_dim]
        if step.was_whole:
            own = step.operation != "sum" or rank == 0
            return self.flats[where].clone() if own else torch.zeros_like(self.flats[where])
        scale = self.mesh_shape[step.mesh_dim] if step.operation == "avg" else 1
        return self.filled(step, self.packed(where, step.sends) * scale, _IDENTITY[step.operation])


def check(shape, mesh_shape, source, target, seed):
    mesh = types.SimpleNamespace(shape=mesh_shape)
    values = contributions(shape, mesh, source, torch.float64, torch.Generator().manual_seed(seed))
    wheres = list(itertools.product(*map(range, mesh_shape)))

    def at(placements, where):
        return local_of(reduced(values, len(mesh_shape), source, placements, where), mesh_shape, placements, where)

    ranks = Ranks(mesh_shape, {where: at(source, where).reshape(-1) for where in wheres})
    plans = {where: plan_of(shape, mesh_shape, source, target, where) for where in wheres}
    assert len({len(steps) for steps in plans.values()}) == 1
    for steps in zip(*plans.values()):
        ranks.run(dict(zip(wheres, steps, strict=True)))
    for dim, (old, new) in enumerate(zip(source, target, strict=True)):
        if isinstance(new, Partial) and old != new:  # What ranks contribute must reduce to the value.
            ranks.flats = {
                where: REDUCE[new.reduce_op](torch.stack([ranks.flats[peer] for peer in ranks.group(where, (dim,))]))
                for where in wheres
            }
    numbers, stays = torch.arange(math.prod(shape)).view(shape), []
    for where in wheres:
        expected = at(target, where)
        assert torch.equal(ranks.flats[where], expected.reshape(-1)), f"{where}: {ranks.flats[where]}, not {expected}"
        if plans[where]:
            assert plans[where][-1].local_shape == tuple(expected.shape)
        held, wanted = (
            local_of(numbers, mesh_shape, placements, where).reshape(-1).tolist() for placements in (source, target)
        )
        stays.append(held == wanted)
        if not any(isinstance(p, Partial) for p in (*source, *target)):
            gains = len({*wanted} - {*held})
            assert ranks.received[where] == gains, f"{where}: received {ranks.received[where]}, gains {gains}"
    aliases = {
        all(isinstance(step, Move) and step.stays for step in steps)
        for where, steps in plans.items()
        if at(source, where).numel()  # Of nothing any tensor is an alias.
    }
    assert len(aliases) <= 1, plans  # An in-place op on the result must not change the source on some ranks only.
    if all(stays) and not any(isinstance(p, Partial) for p in (*source, *target)):  # Equal ownership costs nothing.
        assert aliases <= {True}, plans


def kinds(shape, mesh_shape, source, target):
    """The steps of the first rank as text: E an all-to-all, G all-gather, R reduce, A all-reduce, M a copy, S none, F fill."""
    letters = {Exchange: "E", Gather: "G", Reduce: "R", Move: "M", Fill: "F"}
    names = []
    for step in plan_of(shape, mesh_shape, source, target, (0,) * len(mesh_shape)):
        name = "S" if isinstance(step, Move) and step.stays else letters[type(step)]
        name = "A" if isinstance(step, Reduce) and step.splits is None else name
        dims = step.mesh_dims if isinstance(step, Exchange) else () if isinstance(step, Move) else (step.mesh_dim,)
        names.append(name + "".join(map(str, dims)))
    return " ".join(names)


class RouteTest(unittest.TestCase):
    def test_which_steps_change_which_placements(self):
        whole, pending, ragged = Replicate(), Partial(), RaggedShard((0,), (1, 3))
        for source, target, steps in (
            ((whole, whole), (whole, whole), ""),
            ((whole, whole), (whole, ragged), "M"),
            ((whole, ragged), (whole, whole), "G1"),
            ((Shard(0), ragged), (whole, whole), "G1 G0"),
            ((Shard(0), Shard(1)), (whole, whole), "G1 G0"),
            ((Shard(0), ragged), (Shard(0), whole), "G1"),
            ((Shard(0), ragged), (whole, ragged), "E01"),  # The run is nested in the chunk: both change.
            ((Shard(0), Shard(0)), (Shard(0), ragged), "E1"),
            ((Shard(0), Shard(0)), (Shard(0), RaggedShard((0,), (2, 2))), "S"),
            ((Shard(1), Shard(0)), (Shard(1), ragged), "E1"),
            ((Shard(1), ragged), (Shard(0), whole), "E01"),
            ((ragged, Shard(1)), (whole, Shard(1)), "G0"),
            ((StridedRaggedShard((0,), (1, 3), 2), Shard(0)), (whole, whole), "G0 G1"),
            ((StridedRaggedShard((0,), (1, 3), 2), Shard(0)), (whole, Shard(0)), "G0"),
            ((StridedRaggedShard((), (1, 0), 2), Shard(0)), (whole, Shard(0)), "G0"),
            ((_StridedShard(0, split_factor=2), Shard(0)), (whole, whole), "G1 G0"),
            ((ragged, Shard(1)), (whole, whole), "G1 G0"),
            ((ragged, Shard(1)), (RaggedShard((0,), (3, 1)), Shard(1)), "E0"),
            ((whole, ragged), (ragged, whole), "E1"),
            ((pending, whole), (whole, whole), "A0"),
            ((Shard(0), pending), (Shard(0), ragged), "R1"),
            ((Shard(0), pending), (Shard(0), Shard(0)), "R1"),
            ((pending, Shard(0)), (ragged, whole), "A0 E1"),
            ((pending, Shard(1)), (ragged, Shard(1)), "R0"),
            ((pending, whole), (Shard(0), ragged), "R0 M"),
            ((pending, whole), (ragged, Shard(1)), "M R0"),  # A local cut first: less to reduce.
            ((pending, pending), (whole, ragged), "A0 R1"),
            ((pending, pending), (Shard(0), Shard(1)), "R0 R1"),
            ((whole, whole), (pending, whole), "F0"),
            ((ragged, whole), (pending, whole), "F0"),
            ((Shard(0), ragged), (Shard(0), pending), "F1"),
            ((Shard(0), ragged), (pending, pending), "F1 F0"),
        ):
            with self.subTest(source=source, target=target):
                self.assertEqual(kinds((8, 4), (2, 2), source, target), steps)

    def test_steps_over_three_mesh_dimensions(self):
        whole, pending, ragged = Replicate(), Partial(), RaggedShard((0,), (1, 3))
        for source, target, steps in (
            ((pending, whole, Shard(1)), (whole, Shard(0), Shard(1)), "M A0"),  # The cut of columns stays.
            ((pending, whole, Shard(1)), (whole, ragged, Shard(1)), "M A0"),
            ((pending, whole, Shard(1)), (ragged, whole, Shard(1)), "R0"),
            ((pending, whole, Shard(1)), (whole, Shard(0), whole), "A0 E2"),  # Not the unreduced elements are sent.
            ((pending, pending, whole), (Shard(0), whole, Shard(0)), "R0 A1 M"),  # The last cut lies in the first one.
            ((pending, pending, whole), (Shard(0), Shard(1), Shard(0)), "R0 R1 M"),
            ((pending, pending, whole), (whole, whole, ragged), "M A0 A1"),
        ):
            with self.subTest(source=source, target=target):
                self.assertEqual(kinds((8, 4), (2, 2, 2), source, target), steps)

    def test_parts_that_are_the_whole_storage_are_not_copied(self):
        flat = torch.arange(12.0)
        whole, half, columns = Part(0, (12,), (1,)), Part(6, (6,), (1,)), Part(0, (6, 2), (1, 6))
        self.assertIs(_pack(flat, (whole,)), flat)
        self.assertIsNone(_unpacking((whole,), (3, 4)))
        for parts in ((half,), (columns,), (half, Part(0, (6,), (1,))), ()):
            packed = _pack(flat, parts)
            self.assertNotEqual(packed.data_ptr(), flat.data_ptr())
            self.assertEqual(packed.tolist(), sum((part_view(flat, part).flatten().tolist() for part in parts), []))
            self.assertIsNotNone(_unpacking(parts, (3, 4)))

    def test_an_alias_is_one_on_every_rank(self):
        first, last, halves = RaggedShard((), (1, 0)), RaggedShard((), (0, 1)), RaggedShard((0,), (2, 2))
        equal = {frozenset({Shard(0), halves}), frozenset({last, RaggedShard((0,), (0, 4))})}
        placements = (Replicate(), Shard(0), first, last, halves, RaggedShard((0,), (0, 4)))
        for shape, (one, other) in itertools.product(((4, 2), (4,)), itertools.product(placements, repeat=2)):
            plans = [plan_of(shape, (2,), (one,), (other,), (rank,)) for rank in range(2)]
            aliases = {all(getattr(step, "stays", False) for step in steps) for steps in plans}
            self.assertEqual(aliases, {one == other or frozenset({one, other}) in equal}, (shape, one, other))

    def test_an_alias_on_two_mesh_dimensions(self):
        """Some ranks alone keep their elements: those of the first dimension's first rank, or of the second dimension's."""
        whole, first, halves = Replicate(), RaggedShard((0, 1), (1, 0)), RaggedShard((0, 1), (1, 1))
        for shape, mesh_shape, source, target, alias in (
            ((4, 2), (1, 2), (whole, whole), (Shard(0), first), False),
            ((4, 2), (1, 2), (whole, first), (Shard(0), RaggedShard((0,), (4, 0))), True),
            ((1, 4), (3, 2), (Shard(0), whole), (_StridedShard(0, split_factor=3), first), False),
            ((3, 4), (2, 2), (Shard(0), Shard(0)), (Shard(0), halves), False),  # Pieces of two rows and of one.
            ((3, 4), (2, 2), (Shard(0), Shard(0)), (Shard(0), first), False),  # The ranks with the one row keep it.
            ((4, 4), (2, 2), (Shard(0), Shard(0)), (Shard(0), halves), True),
            ((0, 4), (2, 2), (whole, whole), (Shard(0), halves), True),
        ):
            for where in itertools.product(*map(range, mesh_shape)):
                steps = plan_of(shape, mesh_shape, source, target, where)
                stays = all(isinstance(step, Move) and step.stays for step in steps)
                self.assertEqual(stays, alias, (shape, source, target, where))

    def test_an_alias_beside_even_chunks_is_planned_without_a_look_at_each_rank(self):
        ragged, chunk = RaggedShard((0,), (1,) * 128), Shard(1)
        with mock.patch.object(Route, "_all_stay", side_effect=AssertionError("each rank")):
            for source, target in (((Shard(0), chunk), (ragged, chunk)), ((ragged, Replicate()), (Shard(0), Replicate()))):
                (step,) = plan_of((512, 64), (128, 8), source, target, (3, 2))
                self.assertTrue(step.stays)

    def test_stretches_of_many_ranks_are_stored_as_runs(self):
        """A list of the splits of 100,000 ranks, or a box of each, would make a plan slow."""
        for ranks, kind in ((64, tuple), (65, Units), (100_000, Units)):
            ragged = RaggedShard((0,), Units([(1, ranks - 1), (3, 1)]))
            shape = (2 * (ranks + 2), 3)
            for source, target, fields in (
                (Shard(0), ragged, ("send_splits", "receive_splits")),
                (ragged, Shard(0), ("send_splits", "receive_splits")),
                (ragged, Replicate(), ("splits",)),
                (Shard(0), Replicate(), ("splits",)),
                (Partial(), ragged, ("splits",)),
                (Partial(), Shard(0), ("splits",)),
            ):
                (step,) = plan_of(shape, (ranks,), (source,), (target,), (ranks - 1,))
                for field in fields:
                    self.assertIs(type(getattr(step, field)), kind, (ranks, source, target))

    def test_columns_of_a_stretch(self):
        rng = random.Random(1)
        for _ in range(1500):
            shape, size = (rng.randint(2, 6), rng.randint(1, 7), rng.randint(1, 3)), rng.randint(1, 5)
            columns = _columns(shape, Chunk(1), size)
            numbers = torch.arange(math.prod(shape)).view(shape)
            owners = [local_of(numbers, (size,), (Shard(1),), (rank,)).flatten().tolist() for rank in range(size)]
            start, stop = sorted(rng.randint(0, numbers.numel()) for _ in range(2))
            expected = [[n for n in own if start <= n < stop] for own in owners]
            self.assertEqual(columns.splits(start, stop), tuple(map(len, expected)))
            parts, stretch = columns.spread(start, stop), torch.arange(start, stop)
            spread = [n for part in parts for n in part_view(stretch, part).flatten().tolist()]
            self.assertEqual(spread, sum(expected, []))
            self.assertEqual(merged_parts(parts), parts)
            self.assertTrue(all(part.numel for part in parts))
            self.assertLessEqual(len(parts), size + 4)  # Up to three of each of the two columns that the stretch cuts.
            middle = rng.randint(start, stop)
            for rank, own in enumerate(owners):
                counts = tuple(sum(a <= n < b for n in own) for a, b in ((start, middle), (middle, stop)))
                self.assertEqual(columns.counts(rank, (start, middle, stop)), counts)

    def test_a_rank_that_keeps_the_only_column(self):
        for ranks, units, kind in ((2, (1, 0), Move), (3, (1, 0, 0), Move), (2, (0, 1), Exchange), (2, (1, 1), Exchange)):
            for pair in ((Shard(1), RaggedShard((0,), units)), (RaggedShard((0,), units), Shard(1))):
                for rank in range(ranks):
                    (step,) = plan_of((4, 1, 3), (ranks,), pair[:1], pair[1:], (rank,))
                    self.assertIs(type(step), kind)
                    self.assertTrue(kind is Exchange or step.stays)

    def test_storage_without_columns(self):
        for shape, cut in (
            ((1, 4), Chunk(1)),
            ((4, 4), Chunk(0)),
            ((4, 4), Chunk(1, 2)),
            ((0, 4), Chunk(1)),
            ((4, 4), Whole()),
        ):
            self.assertIsNone(_columns(shape, cut, 2))

    def test_parts(self):
        self.assertTrue(Part(3, (5,), (1,)).is_contiguous)
        self.assertFalse(Part(3, (5,), (2,)).is_contiguous)
        self.assertEqual(part_of(2, (1, 3, 4), (50, 4, 1)), Part(2, (12,), (1,)))
        self.assertEqual(part_of(2, (2, 3, 4), (50, 4, 1)), Part(2, (2, 3, 4), (50, 4, 1)))
        self.assertEqual(part_of(2, (3, 1), (1, 7)), Part(2, (3,), (1,)))
        one, two, far = Part(0, (4,), (1,)), Part(4, (2,), (1,)), Part(7, (1,), (1,))
        strided = Part(8, (2, 2), (4, 1))
        self.assertEqual(merged_parts([one, two, far, strided]), (Part(0, (6,), (1,)), far, strided))
        self.assertEqual(merged_parts([Part(0, (2, 2), (4, 1)), Part(4, (2,), (1,))])[1], Part(4, (2,), (1,)))

    def test_strided_runs_of_whole_pieces_beside_columns(self):
        whole, columns = Replicate(), Shard(1)
        for units in ((0, 1), (1, 0)):
            pieces = StridedRaggedShard((), units, 2)
            for seed, (source, target) in enumerate(
                (
                    ((pieces, columns), (pieces, whole)),
                    ((pieces, whole), (pieces, columns)),
                    ((pieces, columns), (whole, whole)),
                    ((pieces, Shard(0)), (whole, Shard(0))),
                    ((pieces, columns), (whole, columns)),
                    ((pieces, Shard(2)), (pieces, columns)),
                )
            ):
                check((4, 6, 3), (2, 2), source, target, seed)

    def test_random_steps_move_each_gained_element_once(self):
        self.check_random_steps(400)

    @pytest.mark.slow
    def test_many_random_steps_move_each_gained_element_once(self):
        self.check_random_steps(4000)

    def check_random_steps(self, count):
        rng = random.Random(0)
        for seed in range(count):
            mesh_shape = rng.choice(MESHES)
            case = random_case(rng, mesh_shape, StridedRaggedShard)
            try:
                check(case[0], mesh_shape, *case[1:], seed)
            except Exception as error:
                raise AssertionError(f"seed {seed}, mesh {mesh_shape}: {case}") from error
