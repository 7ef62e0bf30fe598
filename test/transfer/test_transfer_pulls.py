"""PullLayout: what an engine's own loader slices and copies becomes the target of a plan."""

import random
import unittest

import torch
import torch.distributed as dist
from common import error_of, ranks, run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from torch_ragged import RaggedShard, transfer
from torch_ragged.transfer._pulls import _boxes_of_view, _Dim

SHAPES = {
    "embed": (10, 8),
    "q": (16, 8),
    "k": (8, 8),
    "v": (8, 8),
    "out": (8, 16),
    "experts.gate": (4, 6, 8),
    "experts.down": (4, 8, 6),
    "norm": (8,),
    "scale": (),
    "unused": (4, 3),
}


def weights(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


class Engine(nn.Module):
    """As engines load: a class of parameters with its own loaders, each of which takes its part of a whole weight."""

    def __init__(self, rank, size, dtype=torch.bfloat16):
        super().__init__()
        self.rank, self.size = rank, size

        def zeros(*shape):
            return nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=dtype.is_floating_point)

        self.embed, self.qkv, self.out = zeros(12 // size, 8), zeros(32 // size, 8), zeros(8, 16 // size)
        self.gate, self.down = zeros(4 // size, 8, 6), zeros(4 // size, 6, 8)
        self.norm, self.scale = zeros(8), zeros(1)

    def load_weights(self, pairs):
        starts = {"q": 0, "k": 16 // self.size, "v": 24 // self.size}
        for name, weight in pairs:
            if name in starts:
                rows = weight.shape[0] // self.size
                part = self.qkv.data.narrow(0, starts[name], rows)
                part.copy_(weight.narrow(0, self.rank * rows, rows))
            elif name == "embed":  # Rows of padding stay as they are.
                rows = len(self.embed)
                part = weight[self.rank * rows : (self.rank + 1) * rows]
                self.embed.data[: len(part)] = part.to(self.embed.dtype)
            elif name == "out":
                self.out.data.copy_(weight.chunk(self.size, dim=1)[self.rank].contiguous())
            elif name == "experts.gate":
                for expert in range(len(self.gate)):
                    with torch.no_grad():
                        self.gate[expert].copy_(weight[self.rank * len(self.gate) + expert].t())
            elif name == "experts.down":
                self.down.data.copy_(weight.transpose(1, 2).unflatten(0, (self.size, -1))[self.rank])
            elif name == "norm":
                assert weight.shape == self.norm.shape
                self.norm.data.copy_(torch.zeros(8))  # Other operations run.
                self.norm.data.copy_(weight.clone().view(2, 4).view(-1))
            elif name == "scale":
                self.scale.data.copy_(weight.reshape(1))


def check_engine(engine, wanted):
    for (name, got), (_, expected) in zip(engine.named_parameters(), wanted.named_parameters()):
        assert torch.equal(got.detach().view(torch.uint8), expected.detach().view(torch.uint8)), (name, got, expected)


def pulled(world, delta):
    """Trainers on all ranks but the last two or one, engines on the last; also on ranks of both."""
    rank, size = dist.get_rank(), 2 if world > 1 else 1
    trainers = DeviceMesh("cpu", list(range(max(world - 1, 1))))
    units = {1: (1,), 2: (1, 0), 3: (1, 0, 1)}
    cut = lambda tensor: RaggedShard((0,), units[trainers.size()]) if tensor.ndim else Replicate()  # noqa: E731
    full = weights(0)
    source = {name: distribute_tensor(t.clone(), trainers, [cut(t)], src_data_rank=None) for name, t in full.items()}
    here = rank - (world - size)
    engine = Engine(here, size) if here >= 0 else None
    known = {name: torch.empty(shape, device="meta") for name, shape in SHAPES.items()}
    pulls = None if engine is None else transfer.PullLayout(engine.load_weights, known)
    plan = transfer.plan(source if rank < trainers.size() else None, pulls, strict=False, max_bytes=1 << 12)
    sent = []
    for step in range(3):
        for name, tensor in full.items():
            changed = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(step)) < 0.1
            full[name] = torch.where(changed, tensor * 2 + 1, tensor)
            source[name] = distribute_tensor(full[name].clone(), trainers, [cut(tensor)], src_data_rank=None)
        plan.run(source if rank < trainers.size() else None, pulls, delta=delta)
        sent.append(plan.last_sent_bytes)
        if engine is not None:
            wanted = Engine(here, size)
            wanted.load_weights(full.items())
            check_engine(engine, wanted)
    return sent


def pulled_elements(world):
    return pulled(world, transfer.Baseline())


class PullTest(unittest.TestCase):
    def test_boxes_of_a_view_are_its_elements(self):
        """Any chain of views, of any shape: what the boxes copy is what the view has."""
        rng, merged = random.Random(0), 0
        for _ in range(600):
            shape = tuple(rng.choice((1, 2, 3, 4, 6)) for _ in range(rng.randint(0, 4)))
            whole = torch.arange(torch.Size(shape).numel()).view(shape)
            view = whole
            for _ in range(rng.randint(0, 5)):
                kind, dim = rng.randrange(7), rng.randrange(max(view.ndim, 1))
                if view.ndim == 0 or view.numel() == 0:
                    break
                n = view.shape[dim]
                if kind == 0:
                    start = rng.randrange(n)
                    view = view.narrow(dim, start, rng.randint(1, n - start))
                elif kind == 1:
                    view = view.select(dim, rng.randrange(n))
                elif kind == 2:
                    view = view.transpose(dim, rng.randrange(view.ndim))
                elif kind == 3 and view.is_contiguous():
                    view = view.flatten()
                elif kind == 4 and n % 2 == 0:
                    view = view.unflatten(dim, (2, -1))
                elif kind == 5:
                    view = view[(slice(None),) * dim + (slice(None, None, 2),)]
                elif kind == 6:
                    view = view.unsqueeze(dim).expand(*view.shape[:dim], rng.randint(1, 2), *view.shape[dim:])
            target = torch.full((view.numel() + 3,), -1).as_strided(view.shape, view.contiguous().stride(), 3)
            dims = [_Dim(*each) for each in zip(view.shape, view.stride(), target.stride())]
            boxes = list(_boxes_of_view(shape, view.storage_offset(), dims, 3))
            flat = torch.full((view.numel() + 3,), -1)
            for box in boxes:
                piece = whole[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes))]
                flat.as_strided(box.sizes, box.local_strides, box.local_offset).copy_(piece)
            self.assertTrue(torch.equal(flat[3:], view.reshape(-1)), (shape, view.shape, view.stride(), boxes))
            merged += len(boxes) == 1 and view.ndim < len(shape)
        self.assertGreater(merged, 50)

    def test_an_engine_gets_what_its_own_loader_reads(self):
        """Bitwise what the loader makes of whole weights: fused, cut, cast, transposed; ranks with both sides; empty shards."""
        for world in (1, 2, 3, 4):
            run_ranks(world, pulled, world, None)
        first, *later = zip(*run_ranks(4, pulled_elements, 4))
        self.assertTrue(all(0 < sum(sent) < sum(first) for sent in later), (first, later))

    @ranks(3)
    def test_replicas_that_read_alike_are_one_holder_and_columns_may_alternate():
        """Two engines pass on what both have. One copies every second column, another writes into a view with steps."""
        rank, trainer = dist.get_rank(), DeviceMesh("cpu", [0])
        full = torch.arange(48.0).view(6, 8)
        source = {"w": distribute_tensor(full.clone(), trainer, [Replicate()], src_data_rank=None)}
        memory, apart = torch.zeros(9, 8), torch.zeros(6, 4)

        def load(pairs):
            for _, weight in pairs:
                memory[3:].copy_(torch.ones(6, 8))
                memory[3:].copy_(weight)
                memory[:3, ::2].copy_(weight[:3, 1::2])
                if rank == 2:
                    apart.copy_(weight[:, ::2])

        pulls = transfer.PullLayout(load, {"w": transfer.Spec((6, 8), torch.float32, [0], [Replicate()])}) if rank else None
        memory.zero_()
        plan = transfer.plan(source, pulls)
        plan.run(source, pulls)
        assert {len(atom.receivers) for each in plan.slices_of(0) for atom in each.atoms} == {1, 2}
        if rank:
            wanted = torch.cat([torch.zeros(3, 8), full])
            wanted[:3, ::2] = full[:3, 1::2]
            assert torch.equal(memory, wanted), memory
        assert torch.equal(apart, full[:, ::2] if rank == 2 else torch.zeros(6, 4))

    @ranks(2)
    def test_what_a_plan_cannot_do_is_an_error_before_anything_is_read():
        rank = dist.get_rank()
        memory, half = torch.zeros(8, 8), torch.zeros(8, 8, dtype=torch.bfloat16)
        known = {name: torch.empty(8, 8, device="meta") for name in ("a", "b")}
        mesh = DeviceMesh("cpu", [0, 1])

        def text_of(load):
            return error_of(transfer.PullLayout, lambda pairs: load(**dict(pairs)), known)

        for load, text in (
            (lambda a, b: memory.copy_(a * 2), "the loader calls aten.mul.Tensor on a, which has no values yet"),
            (lambda a, b: memory.copy_(b).fill_(a.sum()), "on a, which has no values yet"),
            (lambda a, b: a.add_(1), "the loader calls aten.add_.Tensor on a"),
            (lambda a, b: a.copy_(memory), "the loader calls aten.copy_.default on a"),
            (lambda a, b: memory[0, 0].fill_(a[0, 0].item()), "cannot be called on meta tensors"),
            (lambda a, b: (memory.copy_(a), memory[2:4].copy_(b[2:4])), "b is copied onto a part of another copy"),
            (lambda a, b: (memory[:, :2].copy_(a[:, :2]), memory[3].copy_(b[3])), "is copied onto a part of another copy"),
            (lambda a, b: (memory.copy_(a), half.copy_(a)), "a is copied into parameters of different dtypes"),
            (lambda a, b: half.copy_(a.view(torch.bfloat16)[:, ::2]), "the loader calls aten.view.dtype on a"),
            (
                lambda a, b: memory.copy_(a.bfloat16()),
                "casts a to torch.bfloat16, and copies it into a parameter of torch.float32",
            ),
            (
                lambda a, b: half.copy_(a.double().bfloat16()),
                "casts a to torch.float64 and then to torch.bfloat16: cast it once",
            ),
            (
                lambda a, b: DTensor.from_local(memory, mesh, [Shard(0)], run_check=False).copy_(a.repeat(2, 1)),
                "which has no values yet",
            ),
            (
                lambda a, b: DTensor.from_local(memory, mesh, [Replicate()], run_check=False).copy_(a),
                "expected a plain tensor with memory of its own",
            ),
            (lambda a, b: torch.empty(8, 8, device="meta").copy_(a), "expected a plain tensor with memory of its own"),
        ):
            found = text_of(load)
            assert text in found, found
        assert not memory.any()
        # A plan would send the numbers themselves.
        numbers, known_numbers = torch.zeros(2, dtype=torch.complex64), {"a": torch.empty(2, 2, dtype=torch.complex64)}
        for load in (lambda a: numbers.copy_(a[0].conj()), lambda a: numbers.real.copy_(a[0].conj().imag)):
            text = error_of(transfer.PullLayout, lambda pairs, load=load: load(**dict(pairs)), known_numbers)
            assert "the loader calls aten._conj.default on a" in text, text
        wide = {"a": torch.empty(2, 10_000, device="meta")}
        text = error_of(transfer.PullLayout, lambda pairs: torch.zeros(2, 5000).copy_(next(iter(pairs))[1][:, ::2]), wide)
        assert "more than 4096 pieces" in text, text

        # Of copies into the same view, as of tied weights, the last counts.
        def tied(pairs):
            for _, weight in pairs:
                memory.copy_(weight)

        source = {
            name: distribute_tensor(torch.full((8, 8), float(i)), mesh, [RaggedShard((0,), (3, 5))], src_data_rank=None)
            for i, name in enumerate("ab", 1)
        }
        pulls = transfer.PullLayout(tied, known)
        text = error_of(transfer.plan, pulls, source)
        assert "a PullLayout can only be the target" in text, text
        assert "the target does not have: give strict=False" in error_of(transfer.plan, source, pulls)
        plan = transfer.plan(source, pulls, strict=False)
        text = error_of(plan.run, source, {"a": memory} if rank else pulls)
        assert "TypeError: run(target=) is dict, and was planned as a PullLayout" in text, text
        other = transfer.PullLayout(lambda pairs: memory[: 4 + rank].copy_(dict(pairs)["b"][: 4 + rank]), known)
        assert "is a PullLayout with other copies than planned" in error_of(plan.run, source, other if rank else pulls)
        assert not memory.any()
        plan.run(source, pulls)
        assert (memory == 2).all()
        half_pulls = transfer.PullLayout(lambda pairs: half.copy_(dict(pairs)["b"]), known)
        text = error_of(transfer.plan, source, half_pulls if rank else pulls)
        assert "ranks pull b as (8, 8), torch.float32 and as (8, 8), torch.bfloat16" in text, text
        text = error_of(transfer.plan, source, source if rank else pulls)
        assert "differs between ranks" in text, text


if __name__ == "__main__":
    unittest.main()
