"""Plans between random placements on random ranks, against brute force: every rank of a plan is simulated in this process."""

import collections
import math
import random
import unittest

import pytest
import torch
from oracle import SIZES, local_of, random_placement
from torch.distributed.tensor import Partial, Replicate, Shard

from torch_ragged import StridedRaggedShard
from torch_ragged.tensor._global_layout import GlobalLayout
from torch_ragged.tensor.placement_types import normalize_placements
from torch_ragged.transfer import BoxSpec, Spec
from torch_ragged.transfer._rounds import rounds_of, slices_of
from torch_ragged.transfer._sides import TensorSide
from torch_ragged.transfer._tiles import tiles_of

WORLD = 8
MESHES = ((1,), (2,), (3,), (4,), (5,), (6,), (8,), (2, 2), (2, 3), (2, 4), (4, 2), (2, 2, 2), (1, 4))


def random_spec(rng, shape, partial=False):
    """Random placements on random ranks, in any order. If ``partial``, some may be Partial."""
    mesh_shape = rng.choice(MESHES)
    ranks = rng.sample(range(WORLD), math.prod(mesh_shape))
    if rng.random() < 0.7:
        ranks.sort()
    while True:
        placements = [random_placement(rng, shape, mesh_shape, dim, StridedRaggedShard) for dim in range(len(mesh_shape))]
        placements = [Replicate() if isinstance(p, Partial) and not partial else p for p in placements]
        try:
            placements = normalize_placements(tuple(placements), shape, mesh_shape)
            return Spec(shape, torch.float32, torch.tensor(ranks).view(mesh_shape), placements)
        except ValueError:
            continue


def random_boxes(rng, shape):
    """Boxes that cover the tensor, on random ranks, some of which are replicas. Local tensors have padding, or none."""
    regions = [((0,) * len(shape), shape)]
    for _ in range(rng.randint(0, 6) if shape else 0):
        i, dim = rng.randrange(len(regions)), rng.randrange(len(shape))
        offsets, sizes = regions[i]
        if sizes[dim] > 1:
            at = rng.randint(1, sizes[dim] - 1)
            moved = tuple(o + at * (d == dim) for d, o in enumerate(offsets))
            low, high = (tuple(n if d == dim else size for d, size in enumerate(sizes)) for n in (at, sizes[dim] - at))
            regions[i : i + 1] = [(offsets, low), (moved, high)]
    rng.shuffle(regions)
    ranks = rng.sample(range(WORLD), rng.randint(1, WORLD))
    held = {rank: [] for rank in ranks}
    for region in regions if math.prod(shape) else ():
        held[rng.choice(ranks)].append(region)
    for rank in set(range(WORLD)) - set(ranks):
        if rng.random() < 0.3:
            held[rank] = rng.sample(of := held[rng.choice(ranks)], len(of))  # A replica, perhaps in another order.
    specs = []
    for rank, own in held.items():
        flat, end, at = rng.random() < 0.3, rng.choice((0, 0, 1)), []
        for _, sizes in own:
            at.append((end,) if flat else (end, *(0,) * (len(shape) - 1)) if shape else ())
            end += math.prod(sizes) if flat or not shape else sizes[0]
            end += rng.choice((0, 0, 2))
        layout = GlobalLayout(shape, tuple(o for o, _ in own), tuple(at), tuple(n for _, n in own))
        local_shape = (end,) if flat else (end, *shape[1:]) if shape else layout.local_shape
        specs.append(BoxSpec.of_local(torch.empty(local_shape), layout, rank))
    spec = BoxSpec(shape, torch.float32, tuple(sorted(held for spec in specs for held in spec.held)))
    assert spec.problem() is None
    return spec


def random_case(rng):
    """Some tensors whose source and target lie anywhere."""
    pairs = {}
    for i in range(rng.choice((1, 1, 2, 3))):
        shape = tuple(0 if rng.random() < 0.03 else rng.choice(SIZES) for _ in range(rng.choice((0, 1, 2, 2, 3, 3))))
        source, target = random_spec(rng, shape, rng.random() < 0.3), random_spec(rng, shape)
        source = random_boxes(rng, shape).as_source() if rng.random() < 0.25 else source
        pairs[f"t{i}"] = (source, random_boxes(rng, shape) if rng.random() < 0.25 else target)
    return pairs


def locals_of(spec, full):
    """The flat local tensor of each rank of a mesh."""
    result = {}
    for rank, local_shape, boxes in spec.held if isinstance(spec, BoxSpec) else ():
        result[rank] = torch.full((math.prod(local_shape),), -1)
        for box in boxes:
            held = full[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]
            result[rank].as_strided(box.sizes, box.local_strides, box.local_offset).copy_(held)
    for index, rank in enumerate(() if isinstance(spec, BoxSpec) else spec.mesh.ranks):
        coordinate = tuple(int(i) for i in torch.unravel_index(torch.tensor(index), spec.mesh.shape))
        result[rank] = local_of(full, spec.mesh.shape, spec.placements, coordinate).reshape(-1).clone()
    return result


def slices(starts, sizes):
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


def view(flat, part):
    return flat.as_strided(part.sizes, part.strides, part.offset)


class Simulation:
    """All ranks of a plan. ``mailboxes`` are the messages of one all-to-all: a list of elements per sender and receiver."""

    def __init__(self, pairs, max_bytes, staged):
        sides = [TensorSide({name: pair[i] for name, pair in pairs.items()}) for i in (0, 1)]
        shapes = {name: pair[0].shape for name, pair in pairs.items()}
        budget, finer = max_bytes // 2, 1
        while True:
            self.slices = [slices_of(*sides, shapes, rank, budget, finer, staged) for rank in range(WORLD)]
            staging = torch.tensor([[each.staging for each in slices] for slices in self.slices]).t()
            if int(staging.max()) <= budget:
                break
            finer *= 2
        self.rounds = rounds_of([each.dtype.itemsize for each in self.slices[0]], staging, budget)
        assert all(int(staging[round_.start : round_.stop].sum(0).max()) <= budget for round_ in self.rounds)
        assert [i for round_ in self.rounds for i in round_] == list(range(len(self.slices[0])))
        self.received = collections.Counter()
        for rank, slices in enumerate(self.slices):
            for each in slices:
                check_stretches(each, rank, each.name in staged, pairs[each.name][0])
        for name in staged:  # The ranks of a reduction stage equal intervals, in the same rounds.
            spec = pairs[name][0]
            for group in groups_of(spec):
                assert len({tuple(s.stretches for s in self.slices[rank] if s.name == name) for rank in group}) == 1

    def run(self, before, after):
        for round_ in self.rounds:
            self.exchange(round_, before, after)
            for rank, slices in enumerate(self.slices):
                for i in round_:
                    for copy in slices[i].copies:
                        for box in copy.boxes:
                            flats = (before[slices[i].name][rank], after[slices[i].name][rank])
                            source, target = (
                                f.as_strided(box.sizes, s, o) for f, s, o in zip(flats, box.strides, box.offsets, strict=True)
                            )
                            target.copy_(source)

    def exchange(self, round_, before, after):
        letters = [[(i, each) for i in round_ for each in self.slices[rank][i].atoms] for rank in range(WORLD)]
        mail = collections.defaultdict(list)
        for rank in range(WORLD):
            for i, atom in letters[rank]:
                if atom.sender == rank:
                    flat = before[self.slices[rank][i].name][rank]
                    packed = torch.cat([view(flat, part).reshape(-1) for part in atom.source])
                    mail[rank, atom.receivers[0]].append((atom, packed))
        passed = collections.defaultdict(list)
        for rank in range(WORLD):
            for i, atom in letters[rank]:
                if atom.receivers[0] == rank:
                    packed = self.take(mail, atom.sender, rank, atom)
                    self.unpack(after[self.slices[rank][i].name][rank], atom, packed, rank)
                    for peer in atom.receivers[1:]:
                        passed[rank, peer].append((atom, packed))
        for rank in range(WORLD):
            for i, atom in letters[rank]:
                if rank in atom.receivers[1:]:
                    packed = self.take(passed, atom.receivers[0], rank, atom)
                    self.unpack(after[self.slices[rank][i].name][rank], atom, packed, rank)
        assert not any(mail.values()) and not any(passed.values())

    def take(self, mail, sender, rank, atom):
        """The next message, which must be the one that the receiver expects: an all-to-all has no names."""
        sent, packed = mail[sender, rank].pop(0)
        assert (sent.numel, sent.receivers, sent.target) == (atom.numel, atom.receivers, atom.target)
        return packed

    def unpack(self, flat, atom, packed, rank):
        self.received[rank] += packed.numel()
        for part, piece in zip(atom.target, packed.split([part.numel for part in atom.target]), strict=True):
            view(flat, part).copy_(piece.view(part.sizes))


def check_stretches(slice_, rank, is_staged, spec):
    """What a slice reads of a local tensor lies in the interval that is staged, and the interval is not longer than needed."""
    if not is_staged:
        assert not slice_.stretches
        return
    read = [part for atom in slice_.atoms if atom.sender == rank for part in atom.source]
    read += [box.part(0) for copy in slice_.copies for box in copy.boxes]
    assert len(slice_.stretches) <= 1 and (slice_.stretches or not read)
    for key, start, stop in slice_.stretches:
        assert key is None and 0 <= start < stop
        for part in read:
            last = part.offset + sum((size - 1) * stride for size, stride in zip(part.sizes, part.strides, strict=True))
            assert start <= part.offset and last < stop, (spec, part, start, stop)


def groups_of(spec):
    """The ranks of ``spec`` that reduce with each other."""
    if isinstance(spec, BoxSpec):
        return [[each.rank] for each in spec.held]
    table = torch.tensor(spec.mesh.ranks).view(spec.mesh.shape)
    pending = [i for i, p in enumerate(spec.placements) if isinstance(p, Partial)]
    others = [i for i in range(table.ndim) if i not in pending]
    size = math.prod(table.shape[i] for i in pending)
    return table.permute(*others, *pending).reshape(-1, size).tolist()


def check(seed):
    rng = random.Random(seed)
    pairs = random_case(rng)
    max_bytes = rng.choice((1 << 20, 1 << 20, 400, 160))
    fulls = {name: torch.arange(math.prod(source.shape)).view(source.shape) for name, (source, _) in pairs.items()}
    before = {name: locals_of(source, fulls[name]) for name, (source, _) in pairs.items()}
    wanted = {name: locals_of(target, fulls[name]) for name, (_, target) in pairs.items()}
    after = {name: {rank: torch.full_like(t, -1) for rank, t in ranks.items()} for name, ranks in wanted.items()}
    everything = rng.random() < 0.2  # As if no source were contiguous.
    simulation = Simulation(pairs, max_bytes, {name for name, (source, _) in pairs.items() if everything or source.has_partial})
    simulation.run(before, after)
    for name, ranks in wanted.items():
        for rank, tensor in ranks.items():
            assert torch.equal(after[name][rank], tensor), f"seed {seed}: {name} on rank {rank}: {pairs[name]}"
    for rank in range(WORLD):  # An element travels once to each rank that gains it.
        gains = 0
        for name in pairs:
            have, want = (set(side[name].get(rank, torch.empty(0)).tolist()) for side in (before, wanted))
            gains += len(want - have - {-1})  # -1: padding.
        assert simulation.received[rank] == gains, (
            f"seed {seed}: rank {rank} received {simulation.received[rank]}, gains {gains}"
        )


def parts_of(side, tile):
    """Each rank of a side of a tile, the box of the tensor that it holds, and the view of its flat local tensor."""
    (one, other), shards = side.mesh_shape, [p for p in side.placements if isinstance(p, Shard)]
    assert len(shards) <= 1 and len(side.local_offsets) == one * other == len(side.ranks)
    for i, rank in enumerate(side.ranks):
        starts, sizes = list(tile.offsets), list(tile.sizes)
        if shards:
            dim, index = shards[0].dim, i // other if side.placements[0] == shards[0] else i % other
            sizes[dim] = side.local_shape[dim]
            starts[dim] += index * sizes[dim]
            assert sizes[dim] * (one if side.placements[0] == shards[0] else other) == tile.sizes[dim]
        assert tuple(sizes) == side.local_shape
        yield rank, slices(starts, sizes), (tuple(sizes), side.local_strides, side.local_offsets[i])


def check_tiles(seed):
    """On each rank of the target, each element is in one tile. Tensors without tiles are named."""
    rng = random.Random(seed)
    pairs = random_case(rng)
    sides = [TensorSide({name: pair[i] for name, pair in pairs.items()}) for i in (0, 1)]
    found = tiles_of(*sides, {name: pair[0].shape for name, pair in pairs.items()}, 2)
    for name, (source, target) in pairs.items():
        assert (name in found.refused) == (source.has_partial or len(source.shape) not in (1, 2)), (seed, pairs[name])
        whole = torch.arange(math.prod(source.shape)).view(source.shape)
        before, wanted = locals_of(source, whole), locals_of(target, whole)
        after = {rank: torch.full_like(t, -1) for rank, t in wanted.items()}
        for tile in (tile for tile in found.tiles if tile.name == name):
            assert tile.is_local or set(tile.source.ranks).isdisjoint(tile.target.ranks)
            box = whole.new_full(source.shape, -2)
            for rank, where, view_of in parts_of(tile.source, tile):
                box[where] = before[rank].as_strided(*view_of)
            for rank, where, view_of in parts_of(tile.target, tile):
                assert (after[rank].as_strided(*view_of) == -1).all(), (seed, "written twice")
                after[rank].as_strided(*view_of).copy_(box[where])
        if name not in found.refused:
            for rank, tensor in wanted.items():
                assert torch.equal(after[rank], tensor), (seed, name, rank, pairs[name])


class TransferPropertyTest(unittest.TestCase):
    def test_random_plans_move_each_gained_element_once(self):
        for seed in range(300):
            check(seed)

    def test_a_tensor_that_needs_finer_windows_does_not_refuse_the_others(self):
        check(3752)

    def test_random_plans_are_regular_tiles(self):
        for seed in range(300):
            check_tiles(seed)

    @pytest.mark.slow
    def test_five_thousand_random_plans_move_each_gained_element_once(self):
        for seed in range(5000):
            check(seed)
