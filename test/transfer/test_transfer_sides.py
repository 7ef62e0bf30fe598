"""What may be a side of a plan: modules with tensor parallelism or extra states, tensors of inference mode, any strides."""

import io
import unittest

import torch
import torch.distributed as dist
from common import error_of, ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from torch_ragged import RaggedShard, owned_boxes, transfer
from torch_ragged._ranks.groups import can_order_groups
from torch_ragged.fsdp import fully_shard
from torch_ragged.transfer._sides import RelocatedSide, TensorSide, specs_of

REDUCE = {"sum": torch.sum, "avg": torch.mean, "max": torch.amax, "min": torch.amin}
PARALLEL = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def mesh_of(ranks, shape=None):
    return DeviceMesh("cpu", torch.tensor(ranks).view(shape or (len(ranks),)))


def dtensor(full, mesh, placements):
    """Without communication, also on ranks outside of the mesh."""
    return distribute_tensor(full.clone(), mesh, placements, src_data_rank=None)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Block(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)
        self.register_buffer("steps", torch.tensor([seed]))


class Quantized(nn.Linear):
    def get_extra_state(self):
        return {"scale": 1}

    def set_extra_state(self, state):
        pass


def values(shape, dtype):
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * 50
    return numbers.to(dtype)


def strided(full, rank):
    """The same elements with other strides: a transpose, every other element, or a lazy conjugate."""
    if rank == 1:
        return full.clone()
    if full.is_complex():
        return full.conj().resolve_conj().conj()
    if full.ndim == 2:
        return full.t().contiguous().t()
    return torch.stack([full, full], dim=-1)[..., 0]


def owned_boxes_at(spec, index):
    coordinate = tuple(int(i) for i in torch.unravel_index(torch.tensor(index), spec.mesh.shape))
    return owned_boxes(spec.shape, spec.mesh.shape, spec.placements, coordinate)


class TransferSidesTest(unittest.TestCase):
    def test_a_plain_tensor_lies_on_the_mesh_beside_it_that_has_all_ranks(self):
        """As a replicated DTensor of the only mesh; of several meshes, as one of all their ranks."""
        grid, column = (
            transfer.Spec((4,), torch.float32, torch.tensor(mesh), [Shard(0)] * 2) for mesh in ([[0, 1], [2, 3]], [[2], [0]])
        )
        plain = torch.zeros(6, dtype=torch.int64)
        found = specs_of({"a": grid, "b": grid, "plain": plain}, "source")
        self.assertEqual(found["plain"], transfer.Spec((6,), torch.int64, grid.mesh, [Replicate(), Replicate()]))
        for given in ({"a": grid, "b": column}, {"b": column, "a": grid}):
            found = specs_of({"plain": plain, **given}, "source")
            self.assertEqual(found, {"plain": transfer.Spec((6,), torch.int64, [0, 1, 2, 3], [Replicate()]), **given})

    def test_relocated_pieces_are_read_of_the_first_replica_that_has_a_holder(self):
        spec = transfer.Spec((4, 2), torch.float32, torch.tensor([[0, 1], [2, 3]]), [Replicate(), Shard(0)])
        side = RelocatedSide({"w": spec}, {2: 5, 1: 4, 3: 4})
        found = {rank: [(h.ranks, h.key, h.owned.boxes[0].offsets) for h in side.held_by("w", rank)] for rank in (0, 1, 4, 5)}
        rows = {4: [((4,), "w of rank 1", (2, 0))], 5: [((5,), "w of rank 2", (0, 0))]}
        self.assertEqual(found, {0: [], 1: [], **rows})
        (whole,) = TensorSide({"w": transfer.Spec((4, 2), torch.float32, [0], [Replicate()])}).held_by("w", 0)
        near = [(h.ranks, h.key, h.owned.boxes[0].offsets) for h in side.near("w", whole.owned)]
        self.assertEqual(sorted(near), [rows[4][0], rows[5][0]])
        self.assertEqual(side.ranks, {4, 5})

    @ranks(4)
    def test_modules_with_tensor_parallelism_move_to_and_from_others():
        """As docs/meshes.md makes it: parameters are on the mesh of all ranks, on columns of it, or on rows of it."""
        mesh, everyone = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), init_device_mesh("cpu", (4,))

        def sharded(seed, how):
            block = Block(seed)
            if how == "fsdp":
                return fully_shard(block, mesh=everyone)
            parallelize_module(block, mesh["tp"], PARALLEL)
            return fully_shard(block, mesh=mesh["dp"]) if how == "both" else block

        for source_kind in ("fsdp", "both", "tp"):
            for target_kind in ("fsdp", "both", "tp"):
                source, target = sharded(1, source_kind), sharded(2, target_kind)
                wanted = Block(1).state_dict()
                if not any(isinstance(value, DTensor) for value in source.norm.state_dict().values()):
                    wanted = {**wanted, **source.norm.state_dict(prefix="norm.")}
                plan = transfer.plan(source, target)
                for delta in (None, "checksum"):
                    plan.run(source, target, delta=delta)
                    for name, tensor in target.state_dict().items():
                        assert torch.equal(whole(tensor), wanted[name]), (source_kind, target_kind, name)
        # Rows 0, 1 and 2, 3 each have a copy, so ranks send to the other row, or nothing.
        transfer.visualize(plan, file=io.StringIO())
        assert plan.last_sent_bytes == 0

    @ranks(4)
    def test_meshes_of_different_ranks_have_copies_that_lie_alike():
        """Meshes of different ranks must have no rank in common, and tensors must lie alike on them."""
        rank, full = dist.get_rank(), torch.arange(12.0).view(6, 2)
        one, other, across, overlapping = (mesh_of(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 2]))
        target = {"w": dtensor(torch.zeros(6, 2), mesh_of([0, 1, 2, 3]), [Replicate()])}
        source = {"w": dtensor(full, one if rank < 2 else other, [Shard(0)])}
        transfer.plan(source, target).run(source, target)
        assert torch.equal(target["w"].to_local(), full)
        for mine in (
            dtensor(full, one if rank < 2 else other, [Shard(0 if rank < 2 else 1)]),
            dtensor(full, one if rank < 2 else overlapping, [Shard(0)]),
            dtensor(full[: 6 if rank < 2 else 4], one if rank < 2 else other, [Shard(0)]),
        ):
            text = error_of(transfer.plan, {"w": mine}, target)
            assert text.startswith("ValueError: plan(source=): w differs between ranks: rank 0 has shape (6, 2)"), text
        plan = transfer.plan(source, target)
        others = {"w": dtensor(full, across, [Shard(0)])}
        assert "run(source=): w has shape (6, 2)" in error_of(plan.run, others, target)

    @ranks(3)
    def test_plain_tensors_are_on_all_ranks_of_the_dtensors():
        """A plain tensor is on all ranks of the DTensors, or its ranks are not known."""
        full = torch.arange(12.0).view(6, 2)
        target = {
            name: dtensor(torch.zeros_like(t), mesh_of([0, 1, 2]), [Replicate()]) for name, t in (("w", full), ("b", full[0]))
        }
        source = {"w": dtensor(full, mesh_of([0, 1]), [Shard(0)]), "b": full[0].clone()}
        transfer.plan(source, target).run(source, target)
        assert all(torch.equal(target[name].to_local(), whole) for name, whole in (("w", full), ("b", full[0])))
        source["v"], target["v"] = dtensor(full, mesh_of([1, 2]), [Shard(0)]), target["w"]
        assert "b is a plain tensor, and of 2 meshes of the DTensors, none has all ranks" in error_of(
            transfer.plan, source, target
        )

    @ranks(3)
    def test_a_model_that_is_not_sharded_is_whole_on_each_rank_that_gives_it():
        """From shards to one process, on to two others, and back to shards: each time of the values before."""
        rank, mesh, block = dist.get_rank(), mesh_of([0, 1]), Block(1)
        whole = {name: value.clone() for name, value in block.state_dict().items()}
        for alone in ([0], [2], [1, 2]):  # The ranks with a model that is not sharded.
            shards = {name: dtensor(value, mesh, [Shard(0)]) for name, value in whole.items()}
            again = {name: dtensor(torch.zeros_like(value), mesh, [Shard(0)]) for name, value in whole.items()}
            model = Block(2) if rank in alone else None
            transfer.plan(shards, model).run(shards, model)
            if model is not None:
                assert all(torch.equal(value, whole[name]) for name, value in model.state_dict().items()), alone
            transfer.plan(model, again).run(model, again)
            if rank < 2:
                assert all(torch.equal(again[name].full_tensor(), value) for name, value in whole.items()), alone

    @ranks(2)
    def test_extra_states_are_left_out():
        mesh = init_device_mesh("cpu", (2,))
        torch.manual_seed(0)
        source, target = (fully_shard(nn.Sequential(Quantized(4, 4), nn.Linear(4, 2)), mesh=mesh) for _ in range(2))
        transfer.plan(source, target).run(source.state_dict(), target)
        for one, other in zip(source.parameters(), target.parameters(), strict=True):
            assert torch.equal(one.to_local(), other.to_local())
        assert [name for name, _ in transfer.stream(source, 1000)] == [name for name, _ in source.named_parameters()]

    @ranks(2)
    def test_tensors_of_inference_mode_move():
        """Targets and sources that were made in inference mode, here and in the background."""
        mesh, full = init_device_mesh("cpu", (2,)), torch.arange(16.0).view(4, 4)
        layout = transfer.EngineLayout(torch.float32)
        layout.add("w", (4, 4), [(1, (0, 16))])
        with torch.inference_mode():
            engine, columns = torch.empty(4, 4), {"w": dtensor(torch.zeros(4, 4), mesh, [Shard(1)])}
        rows = {"w": dtensor(full, mesh, [Shard(0)])}
        transfer.plan(rows, layout).run(rows, {"w": engine})
        assert dist.get_rank() == 0 or torch.equal(engine, full)
        plan = transfer.plan(rows, columns)
        plan.run(rows, columns, async_op=True).wait()
        assert torch.equal(columns["w"].to_local(), dtensor(full, mesh, [Shard(1)]).to_local())
        back = {"w": dtensor(torch.zeros(4, 4), mesh, [Shard(0)]).requires_grad_()}
        version = back["w"].to_local()._version
        transfer.plan(columns, back).run(columns, back)
        assert torch.equal(back["w"].to_local(), rows["w"].to_local()) and not back["w"].to_local().is_inference()
        assert back["w"].to_local()._version > version, "autograd does not see that a saved tensor has changed"

    @ranks(2)
    def test_plan_and_run_take_the_same_forms():
        """A module, a mapping and pairs, for plan() and run()."""
        mesh = init_device_mesh("cpu", (2,))
        torch.manual_seed(0)
        source = fully_shard(nn.Linear(4, 4), mesh=mesh)

        def forms(module):
            yield lambda: module
            yield lambda: dict(module.named_parameters())
            yield lambda: module.named_parameters()
            yield lambda: list(module.state_dict().items())

        for i, given in enumerate(forms(source)):
            target = fully_shard(nn.Linear(4, 4), mesh=mesh)
            planned, written = list(forms(target))[i], list(forms(target))[-i]
            transfer.plan(given(), planned()).run(given(), written())
            assert all(
                torch.equal(a.to_local(), b.to_local()) for a, b in zip(source.parameters(), target.parameters(), strict=True)
            )
        plan = transfer.plan(source, target)
        for wrong in (3, [source.weight], torch.ones(2)):
            text = "takes a module, a mapping of names to tensors, or (name, tensor) pairs, got " + type(wrong).__name__
            assert f"plan(target=) {text}" in error_of(transfer.plan, source, wrong)
            assert f"run(source=) {text}" in error_of(plan.run, wrong, target)

    @ranks(4)
    def test_sources_may_have_any_strides():
        """Sources of any strides are read, in windows, with and without casts, on some ranks or on all."""
        rank, here, there = dist.get_rank(), mesh_of([0, 1, 2]), mesh_of([1, 3], (2, 1))
        shapes = {"a": (40, 33), "b": (70,), "c": (3, 5, 4), "d": ()}
        cuts = {"a": Shard(1), "b": RaggedShard((0,), (1, 0, 4)), "c": Shard(0), "d": Replicate()}
        for dtype, target_dtype in (
            (torch.float32,) * 2,
            (torch.float32, torch.bfloat16),
            (torch.int64,) * 2,
            (torch.complex64,) * 2,
        ):
            fulls = {name: values(shape, dtype) for name, shape in shapes.items()}
            source = {}
            for name, full in fulls.items():
                if rank == 3:
                    source[name] = transfer.Spec(shapes[name], dtype, here, [cuts[name]])
                    continue
                local = strided(dtensor(full, here, [cuts[name]]).to_local(), rank)
                kept = {"shape": full.shape, "stride": full.stride(), "run_check": False}
                source[name] = DTensor.from_local(local, here, [cuts[name]], **kept)
            for max_bytes in (1 << 20, 2000):
                for delta in (None, "checksum"):
                    target = {
                        name: dtensor(torch.zeros(full.shape, dtype=target_dtype), there, [Replicate(), Replicate()])
                        for name, full in fulls.items()
                    }
                    plan = transfer.plan(source, target, max_bytes=max_bytes)
                    plan.run(source, target, delta=delta)
                    assert plan.last_peak_bytes <= max_bytes
                    for name, tensor in target.items():
                        assert rank not in (1, 3) or torch.equal(tensor.to_local(), fulls[name].to(target_dtype)), name
        plan.run(source, target, async_op=True).wait()
        small = transfer.plan(source, target, max_bytes=50)
        assert error_of(small.run, source, target).startswith("ValueError: max_bytes is too small: a needs at least")
        # The source is not copied before the run, so it may not have memory of the target either.
        memory = torch.zeros(8, 8)
        source = {"w": DTensor.from_local(memory.t(), here, [Replicate()], run_check=False)}
        target = {"w": DTensor.from_local(memory, here, [Replicate()], run_check=False)}
        assert "share memory" in error_of(transfer.plan(source, target).run, source, target)

    @ranks(4)
    def test_a_partial_on_any_mesh_is_reduced_in_windows():
        """Reduced in windows, on meshes whose ranks are in any order, beside cuts; the source is unchanged."""
        rank = dist.get_rank()
        full = torch.arange(60.0).view(10, 6)
        for world, shape in (([3, 1, 0, 2], (4,)), ([2, 0, 3, 1], (2, 2))):
            world = world if can_order_groups else sorted(world)
            mesh = mesh_of(world, shape)
            for placements in {
                (4,): ((Partial(),), (Partial("max"),), (Partial("avg"),)),
                (2, 2): ((Partial(), Shard(1)), (RaggedShard((0,), (3, 2)), Partial()), (Partial("avg"), Partial("avg"))),
            }[shape]:
                pieces = [Replicate() if isinstance(p, Partial) else p for p in placements]
                piece = dtensor(full, mesh, pieces).to_local()
                source = DTensor.from_local(
                    piece * (rank + 1), mesh, placements, shape=full.shape, stride=(6, 1), run_check=False
                )
                factors = torch.tensor([[r + 1.0 for r in world]]).view(shape)
                for dim in reversed(range(len(shape))):
                    if isinstance(placements[dim], Partial):
                        factors = REDUCE[placements[dim].reduce_op](factors, dim, keepdim=True)
                wanted = torch.zeros(10, 6)
                for factor, coordinate in zip(factors.expand(shape).flatten().tolist(), range(4)):
                    spec = transfer.Spec(full.shape, full.dtype, mesh, pieces)
                    for box in owned_boxes_at(spec, coordinate):
                        where = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
                        wanted[where] = full[where] * factor
                for max_bytes in (1 << 20, 300):
                    target = {"w": dtensor(torch.zeros(10, 6), mesh_of([0, 1, 2, 3]), [Shard(0)])}
                    before = source.to_local().clone()
                    plan = transfer.plan({"w": source}, target, max_bytes=max_bytes)
                    plan.run({"w": source}, target)
                    assert torch.equal(source.to_local(), before) and plan.last_peak_bytes <= max_bytes
                    assert torch.equal(target["w"].to_local(), dtensor(wanted, mesh_of([0, 1, 2, 3]), [Shard(0)]).to_local())
        for dtype, operation in ((torch.float8_e4m3fn, "sum"), (torch.int64, "avg"), (torch.complex64, "max")):
            wrong = {"w": transfer.Spec((4,), dtype, [0, 1, 2, 3], [Partial(operation)])}
            text = f"plan(source=): w has placements {(Partial(operation),)}: cannot reduce {dtype} by {operation}: cast it"
            assert text in error_of(transfer.plan, wrong, wrong), error_of(transfer.plan, wrong, wrong)
