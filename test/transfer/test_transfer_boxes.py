"""Plain local tensors with a layout as a side of a plan: no mesh and no placements, each rank gives what it holds."""

import itertools
import math
import types
import unittest

import torch
import torch.distributed as dist
from common import error_of, ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from torch_ragged import RaggedShard, transfer
from torch_ragged.tensor._box_tensor import with_layout
from torch_ragged.tensor._global_layout import GlobalLayout
from torch_ragged.tensor._owned_boxes import owned_boxes

SHAPE = (6, 4)
WHOLE = torch.arange(24.0).view(SHAPE)
# Ranks 0 and 1 hold halves of the columns of rows 0 to 3, rank 2 the rest, and rank 3 what rank 1 holds.
BOXES = {0: [((0, 0), (4, 2))], 1: [((0, 2), (4, 2))], 2: [((4, 0), (2, 1)), ((4, 1), (2, 3))], 3: [((0, 2), (4, 2))]}


def slices(offsets, sizes):
    return tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))


def boxed(boxes, padding=0, dtype=torch.float32, whole=None):
    """This rank's local tensor: its boxes beside each other, each after ``padding`` columns; with the values of ``whole``."""
    offsets, end = [], 0
    for _, sizes in boxes:
        offsets.append((0, end + padding))
        end += padding + sizes[1]
    local = torch.full((max((sizes[0] for _, sizes in boxes), default=0), end), -1, dtype=dtype)
    layout = GlobalLayout(SHAPE, tuple(o for o, _ in boxes), tuple(offsets), tuple(n for _, n in boxes))
    for (start, sizes), at in zip(boxes, offsets, strict=True):
        if whole is not None:
            local[slices(at, sizes)] = whole[slices(start, sizes)].to(dtype)
    return with_layout(local, layout)


def ragged(full, world, units):
    mesh = DeviceMesh("cpu", torch.tensor(world))
    return distribute_tensor(full.clone(), mesh, [RaggedShard((0, 1), units)], src_data_rank=None)


class TransferBoxesTest(unittest.TestCase):
    @ranks(4)
    def test_boxes_move_to_and_from_dtensors_and_other_boxes_bitwise():
        rank = dist.get_rank()
        sides = {
            "boxes": lambda whole: boxed(BOXES[rank], 0, torch.float32, whole),
            "padded": lambda whole: boxed(BOXES[3 - rank], 1, torch.float32, whole),
            "ragged": lambda whole: ragged(torch.full(SHAPE, -1.0) if whole is None else whole, [0, 1, 2, 3], (5, 0, 11, 8)),
            "columns": lambda whole: boxed([((0, rank), (6, 1))], 0, torch.float32, whole),
            "bfloat16": lambda whole: boxed(BOXES[rank][::-1], 2, torch.bfloat16, whole),
        }
        for one, other in itertools.pairwise([*sides, "ragged", "boxes", "bfloat16"]):
            wanted = sides[other](WHOLE)
            source, target = {"w": sides[one](WHOLE)}, {"w": sides[other](None)}
            plan = transfer.plan(source, target)
            plan.run(source, target)
            local = target["w"].to_local() if other == "ragged" else target["w"]  # Padding keeps its values.
            assert torch.equal(local, wanted.to_local() if other == "ragged" else wanted), (one, other, local)
            assert plan.is_complete
            plan.run(source, target, delta="checksum")
            assert plan.last_sent_bytes == 0
            if other != "ragged":  # The layout is known now: plain tensors do.
                plain = torch.full_like(wanted, -1)
                plan.run({"w": source["w"]}, {"w": plain})
                assert torch.equal(plain, wanted)

    @ranks(3)
    def test_ranks_without_boxes_or_without_a_side_need_no_tensor():
        """Rank 2 holds nothing of the source, rank 0 gives no target; buffers are on all ranks that give them."""
        rank = dist.get_rank()
        boxes = {0: [((0, 0), (2, 4))], 1: [((2, 0), (4, 4))], 2: []}[rank]
        source = {"w": boxed(boxes, whole=WHOLE), "steps": torch.tensor(7)}
        columns = {r: GlobalLayout.of(SHAPE, (2,), [Shard(1)], (r - 1,)) for r in (1, 2)}
        scalar = {1: GlobalLayout.of((), (1,), [Replicate()], (0,))}
        target = {
            "w": transfer.BoxSpec.of(torch.float32, columns),
            "steps": transfer.BoxSpec.of(torch.int64, scalar),
        }
        plan = transfer.plan(source, target if rank == 2 else None)
        given = {"w": torch.zeros(6, 2), "steps": torch.tensor(0)}
        plan.run({"steps": source["steps"]} if rank == 2 else source, [None, given, {"w": given["w"]}][rank])
        wanted = WHOLE[:, 2 * rank - 2 : 2 * rank] if rank else torch.zeros(6, 2)
        assert torch.equal(given["w"], wanted) and int(given["steps"]) == 7 * (rank == 1)

    @ranks(3)
    def test_replicas_in_other_layouts_are_read_once():
        """Ranks 0 and 1 hold all, rank 1 with padding: rank 2 gets each element from one of them."""
        rank = dist.get_rank()
        source = {"w": boxed([((0, 0), SHAPE)] if rank < 2 else [], rank, whole=WHOLE)}
        target = {"w": boxed([((0, 0), SHAPE)] if rank == 2 else [])}
        plan = transfer.plan(source, target)
        plan.run(source, target)
        sent = torch.tensor(plan.last_sent_bytes)
        dist.all_reduce(sent)
        assert int(sent) == WHOLE.nbytes and (rank < 2 or torch.equal(target["w"], WHOLE))

    @ranks(2)
    def test_a_source_with_any_strides_and_an_engine_as_the_target():
        rank = dist.get_rank()
        layout = GlobalLayout.of(SHAPE, (2,), [Shard(1)], (rank,))
        strided = WHOLE[:, 2 * rank : 2 * rank + 2].t().contiguous().t()
        flat = GlobalLayout.of(SHAPE, (2,), [RaggedShard((0, 1), (5, 19))], (rank,), flat=True)
        run = WHOLE.view(-1)[:5] if rank == 0 else WHOLE.view(-1)[5:]
        engine = transfer.EngineLayout(torch.float32)
        engine.add("fused", (12, 4), [(0, (0, 24)), (1, (24, 48))], parts=[("a", SHAPE, (6, 0)), ("b", SHAPE, (0, 0))])
        source = {"a": with_layout(strided, layout), "b": with_layout(run, flat)}
        target = {"fused": torch.zeros(24)}
        for max_bytes in (1 << 20, 64):
            target["fused"].zero_()
            plan = transfer.plan(source, engine, max_bytes=max_bytes)
            plan.run(source, target)
            assert torch.equal(target["fused"], WHOLE.view(-1)) and plan.last_peak_bytes <= max_bytes

    @ranks(3)
    def test_wrong_boxes_are_an_error_on_every_rank_before_anything_travels():
        rank = dist.get_rank()
        target = {"w": ragged(torch.full(SHAPE, -1.0), [0, 1, 2], (1, 1, 1))}

        def refused(text, boxes, **options):
            """Every rank raises; the rank with bad fields says what is wrong with them, and the others that one did."""
            found = error_of(transfer.plan, {"w": boxed(boxes[rank], **options)}, target)
            assert text in found, found

        rows = {0: [((0, 0), (2, 4))], 1: [((2, 0), (2, 4))], 2: [((4, 0), (2, 4))]}
        text = "plan(source=): w of shape (6, 4): no rank holds the element (2, 0): the boxes of all ranks have 16 of 24"
        refused(text, {**rows, 1: []})
        refused("box ((1, 0), (3, 4)) of rank 1", {**rows, 1: [((1, 0), (3, 4))]})
        refused("overlap in part", {**rows, 1: [((1, 0), (3, 4))]})
        refused(
            "differs between ranks: rank 0 has shape (6, 4) and torch.float32, rank 1",
            rows,
            dtype=(torch.float32, torch.int64)[rank % 2],
        )
        tensor = torch.zeros(2, 4)
        outside = types.SimpleNamespace(**vars(GlobalLayout.of(SHAPE, (3,), [Shard(0)], (rank,))))
        if rank == 1:
            outside.global_offsets = ((5, 0),)
        for name, value in vars(outside).items():
            setattr(tensor, name, value)
        text = "w: GlobalLayout: box 0 with offsets (5, 0) and sizes (2, 4) is not in the global shape (6, 4)"
        found = error_of(transfer.plan, {"w": tensor}, target)
        assert found.startswith("ValueError" if rank == 1 else "RuntimeError") and text in found, found
        backwards = error_of(transfer.plan, target, {"w": boxed({**rows, 1: []}[rank])})
        assert "plan(target=): w of shape (6, 4): no rank holds the element (2, 0)" in backwards, backwards
        mixed = {"w": boxed(rows[rank])} if rank else target
        assert "plan(source=): w differs between ranks" in error_of(transfer.plan, mixed, target)
        other = {"w": transfer.BoxSpec.of(torch.float32, {0: GlobalLayout.of(SHAPE, (rank + 1,), [Shard(0)], (0,))})}
        assert "gives other boxes of rank 0 than another rank does" in error_of(transfer.plan, other, target)
        assert torch.equal(target["w"].to_local(), torch.full((8,), -1.0))

        source = {"w": boxed(rows[rank], whole=WHOLE)}
        plan = transfer.plan(source, target)
        for wrong, text in (
            (
                torch.zeros(2, 5),
                "run(source=): w has a local tensor of shape (2, 5) and torch.float32, and was planned with (2, 4)",
            ),
            (torch.zeros(2, 4).half(), "of shape (2, 4) and torch.float16, and was planned with (2, 4) and torch.float32"),
            (boxed([((0, 0), (2, 4))]) if rank == 1 else None, "and torch.float32, with other boxes, and was planned with"),
            (target["w"], "TypeError: run(source=): w is a DTensor, and was planned as boxes: give the local tensor"),
        ):
            found = error_of(plan.run, {"w": wrong if rank == 1 else source["w"]}, target)
            assert (text in found) if rank == 1 else found.startswith("RuntimeError"), found
            assert torch.equal(target["w"].to_local(), torch.full((8,), -1.0)) and not plan.is_complete
        plan.run(source, target)
        assert torch.equal(target["w"].to_local(), WHOLE.view(-1)[8 * rank : 8 * rank + 8])
        stream = transfer.stream(source, 1 << 20)
        assert "stream() gets a local tensor with a layout, of the global shape (6, 4)" in error_of(next, stream)

    def test_a_spec_of_boxes_says_what_is_wrong_with_it(self):
        layout = GlobalLayout.of(SHAPE, (1,), [Shard(0)], (0,))
        self.assertIn("TypeError: BoxSpec.of takes a mapping", error_of(transfer.BoxSpec.of, torch.float32, [layout]))
        self.assertIn("got 0 layouts", error_of(transfer.BoxSpec.of, torch.float32, {}))
        other = GlobalLayout.of((3, 4), (1,), [Shard(0)], (0,))
        self.assertIn("got 2 layouts of [(3, 4), (6, 4)]", error_of(transfer.BoxSpec.of, torch.float32, {0: layout, 1: other}))
        spec = transfer.BoxSpec.of(torch.float32, {0: layout, 3: layout})
        self.assertEqual((spec.ranks, spec.problem(), math.prod(spec.shape)), ({0, 3}, None, 24))
        self.assertEqual(spec.held[0].boxes, owned_boxes(SHAPE, (1,), [Shard(0)], (0,)))


if __name__ == "__main__":
    unittest.main()
