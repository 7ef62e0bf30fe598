"""GlobalLayout against brute force: what a rank holds, in the four fields of torch and FlexShard, and back."""

import copy
import io
import itertools
import math
import types
import unittest

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import local_of, random_placement
from torch.distributed.tensor import Replicate, Shard

from torch_ragged import GlobalLayout, RaggedShard, StridedRaggedShard, owned_boxes, with_layout
from torch_ragged.tensor._global_layout import coverage_problem, global_layout_of
from torch_ragged.tensor.placement_types import normalize_placements

ROWS = ((4, 3), ((1, 0),), ((0, 0),), ((2, 3),))


@st.composite
def placed_tensors(draw):
    """A shape, a mesh shape, and placements that mean something."""
    shape = draw(st.lists(st.sampled_from((0, 1, 2, 3, 4, 4, 6, 8)), max_size=4).map(tuple))
    mesh_shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=2).map(tuple))
    random = draw(st.randoms(use_true_random=False))
    while True:
        kinds = (random_placement(random, shape, mesh_shape, dim, StridedRaggedShard) for dim in range(len(mesh_shape)))
        try:
            return shape, mesh_shape, normalize_placements(tuple(kinds), shape, mesh_shape)
        except ValueError:
            continue


@st.composite
def cut_tensors(draw):
    """A shape, cut at random into boxes that cover it: by planes, again and again."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple))
    boxes = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 5))):
        i, dim = draw(st.integers(0, len(boxes) - 1)), draw(st.integers(0, len(shape) - 1))
        offsets, sizes = boxes[i]
        if sizes[dim] > 1:
            at = draw(st.integers(1, sizes[dim] - 1))
            low, high = list(sizes), list(sizes)
            low[dim], high[dim] = at, sizes[dim] - at
            moved = list(offsets)
            moved[dim] += at
            boxes[i : i + 1] = [(offsets, tuple(low)), (tuple(moved), tuple(high))]
    return shape, boxes


def slices(offsets, sizes):
    return tuple(slice(o, o + n) for o, n in zip(offsets, sizes))


def element_at(shape, boxes):
    """How often each element is in a box."""
    counts = torch.zeros(shape, dtype=torch.int64)
    for box in boxes:
        counts[slices(box.offsets, box.sizes)] += 1
    return counts


def error_of(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("no error")


class GlobalLayoutTest(unittest.TestCase):
    @settings(max_examples=300, deadline=None)
    @given(placed_tensors())
    def test_slices_of_the_local_view_are_slices_of_the_whole(self, case):
        shape, mesh_shape, placements = case
        whole = torch.arange(math.prod(shape)).view(shape)
        for coordinate in itertools.product(*map(range, mesh_shape)):
            local = local_of(whole, mesh_shape, placements, coordinate).contiguous()
            for flat in (False, True):
                layout = GlobalLayout.of(shape, mesh_shape, placements, coordinate, flat=flat)
                self.assertEqual(layout.numel, local.numel())
                if not layout.numel:
                    self.assertEqual((layout.global_offsets, layout.boxes()), ((), ()))
                    continue
                view = local.view(layout.local_shape)  # A view: the layout has no padding.
                boxed = with_layout(local.view(-1), layout)  # Flat, as ragged shards lie.
                self.assertEqual((boxed.shape, boxed.data_ptr()), (view.shape, local.data_ptr()))
                for start, at, sizes in zip(layout.global_offsets, layout.local_offsets, layout.local_sizes):
                    held = view[at[0] : at[0] + math.prod(sizes)].view(sizes) if flat else view[slices(at, sizes)]
                    self.assertTrue(torch.equal(held, whole[slices(start, sizes)]))
                for box in layout.boxes(view.shape):
                    held = view.as_strided(box.sizes, box.local_strides, box.local_offset)
                    self.assertTrue(torch.equal(held, whole[slices(box.offsets, box.sizes)]))
                fields = types.SimpleNamespace(**{name: [*map(list, getattr(layout, name))] for name in list(vars(layout))[1:]})
                fields.global_shape = torch.Size(shape)
                self.assertEqual(GlobalLayout.of(fields), layout)
                counts = element_at(shape, layout.boxes())
                self.assertTrue(torch.equal(counts, element_at(shape, owned_boxes(shape, mesh_shape, placements, coordinate))))

    @settings(max_examples=300, deadline=None)
    @given(cut_tensors(), st.randoms(use_true_random=False))
    def test_boxes_of_padded_and_permuted_local_tensors_are_found(self, case, random):
        """The local tensor has the boxes in any order along one dimension, with padding, and any strides."""
        shape, regions = case
        random.shuffle(regions)
        ndim, dim, offsets, end = len(shape), random.randrange(len(shape)), [], 0
        for _, sizes in regions:
            end += random.randint(0, 2)
            offsets.append(tuple(end if d == dim else random.randint(0, 1) for d in range(ndim)))
            end += sizes[dim]
        local_shape = tuple(end + 1 if d == dim else shape[d] + 1 for d in range(ndim))
        layout = GlobalLayout(shape, tuple(o for o, _ in regions), tuple(offsets), tuple(n for _, n in regions))
        whole = torch.arange(math.prod(shape)).view(shape)
        local = torch.full(local_shape[::-1], -1).permute(*reversed(range(ndim)))
        for box in layout.boxes(local.shape, local.stride()):
            local.as_strided(box.sizes, box.local_strides, box.local_offset).copy_(whole[slices(box.offsets, box.sizes)])
        for (start, sizes), at in zip(regions, offsets):
            self.assertTrue(torch.equal(local[slices(at, sizes)], whole[slices(start, sizes)]))
        self.assertEqual(int((local >= 0).sum()), math.prod(shape))

    @settings(max_examples=300, deadline=None)
    @given(cut_tensors(), st.randoms(use_true_random=False))
    def test_a_gap_or_an_overlap_between_ranks_is_found(self, case, random):
        shape, regions = case
        held = {rank: [] for rank in range(3)}
        for start, sizes in regions:
            layout = GlobalLayout(shape, (start,), ((0,) * len(shape),), (sizes,))
            held[random.randrange(3)] += layout.boxes()
        held[3] = held[random.randrange(3)]  # A replica.
        self.assertIsNone(coverage_problem(shape, held))
        less = {rank: boxes for rank, boxes in held.items() if rank < 3}
        loser = random.choice([rank for rank in less if less[rank]])
        less[loser] = less[loser][1:]
        counts = sum(element_at(shape, boxes) for boxes in less.values())
        first = tuple(int(i) for i in (counts == 0).nonzero()[0])
        have = int((counts > 0).sum())
        problem = f"no rank holds the element {first}: the boxes of all ranks have {have} of {math.prod(shape)} elements"
        self.assertEqual(coverage_problem(shape, less), problem)
        if len(regions) > 1:
            more = {**held, 4: GlobalLayout.of(shape, (1,), [Replicate()], (0,)).boxes()}
            self.assertRegex(coverage_problem(shape, more), r"the box .* of rank \d and the box .* of rank 4 overlap in part")

    def test_a_ragged_local_tensor_is_few_flat_boxes_or_a_box_per_row(self):
        args = ((4, 6), (2,), [RaggedShard((0, 1), (4, 20))])
        flat, by_rows = (GlobalLayout.of(*args, (1,), flat=flat) for flat in (True, False))
        self.assertEqual(flat, GlobalLayout((4, 6), ((0, 4), (1, 0)), ((0,), (2,)), ((1, 2), (3, 6))))
        self.assertEqual(by_rows.local_sizes, ((1, 2), (1, 6), (1, 6), (1, 6)))
        self.assertEqual((flat.local_shape, by_rows.local_shape), ((20,), (1, 20)))
        whole_rows = GlobalLayout.of((4, 6), (2,), [RaggedShard((0,), (1, 3))], (1,))
        self.assertEqual(whole_rows, GlobalLayout((4, 6), ((1, 0),), ((0, 0),), ((3, 6),)))
        experts = GlobalLayout.of((3, 4, 5), (2,), [RaggedShard((0, 1), (6, 6))], (1,))
        self.assertEqual(experts.local_sizes, ((1, 2, 5), (1, 4, 5)))
        self.assertEqual(GlobalLayout.of((4, 6), (3,), [Shard(1)], (2,)).local_shape, (4, 2))

    def test_wrong_fields_name_the_box(self):
        layout = GlobalLayout(*ROWS)
        cases = (
            ((*ROWS[:1], ((1, 0), (0, 0)), *ROWS[2:]), "must have one entry per box, got (2, 1, 1) entries"),
            ((*ROWS[:1], ((3, 0),), *ROWS[2:]), "box 0 with offsets (3, 0) and sizes (2, 3) is not in the global shape (4, 3)"),
            ((*ROWS[:1], ((-1, 0),), *ROWS[2:]), "is not in the global shape"),
            ((*ROWS[:2], ((-1, 0),), ROWS[3]), "box 0 has local offsets (-1, 0)"),
            ((*ROWS[:1], ((1,),), *ROWS[2:]), "needs 2 numbers each, or one local offset"),
            (((4, 3), ((1, 0), (2, 1)), ((0, 0), (2, 0)), ((2, 3), (1, 1))), "boxes 0 and 1 overlap in the global tensor"),
            (((4, 3), ((0, 0), (2, 0)), ((0, 0), (1, 0)), ((2, 3), (1, 3))), "boxes 0 and 1 overlap in the local tensor"),
            (((4, 3), ((0, 0), (2, 0)), ((0, 0), (6,)), ((2, 3), (1, 3))), "different numbers of dimensions"),
            (((4, 3.0), *ROWS[1:]), "TypeError: GlobalLayout: global_shape must be a tuple of integers"),
            (((4, 3), [(1, 0)], *ROWS[2:]), "global_offsets must be a tuple with one tuple of integers per box"),
        )
        for fields, text in cases:
            self.assertIn(text, error_of(GlobalLayout, *fields))
        fields = types.SimpleNamespace(**dict(zip(vars(layout), ROWS)))
        fields.local_sizes = ((2, 3.5),)
        self.assertIn("TypeError: GlobalLayout: local_sizes must be made of integers", error_of(GlobalLayout.of, fields))
        fields.local_sizes = 5
        self.assertIn("TypeError: GlobalLayout: local_sizes must have one entry per box", error_of(GlobalLayout.of, fields))
        self.assertIn(
            "is not in a local tensor of shape (1, 3): give a local tensor of at least (2, 3)", error_of(layout.boxes, (1, 3))
        )
        self.assertIn("is not in a local tensor of shape (6,)", error_of(layout.boxes, (6,)))


class BoxTensorTest(unittest.TestCase):
    def test_it_shares_memory_and_keeps_its_layout_where_a_state_dict_goes(self):
        local, layout = torch.arange(6.0).view(2, 3).requires_grad_(), GlobalLayout(*ROWS)
        tensor = with_layout(local, types.SimpleNamespace(**vars(layout)))
        self.assertEqual(tensor.data_ptr(), local.data_ptr())
        self.assertEqual(
            (global_layout_of(tensor), global_layout_of(local), hasattr(local, "global_shape")), (layout, None, False)
        )
        self.assertIs(type(tensor + 1), torch.Tensor)
        self.assertFalse(tensor.requires_grad)
        file = io.BytesIO()
        torch.save(tensor, file)
        file.seek(0)
        for other in (copy.deepcopy(tensor), torch.load(file, weights_only=False)):
            self.assertEqual(global_layout_of(other), layout)
            self.assertTrue(torch.equal(other, local))
            self.assertNotEqual(other.data_ptr(), local.data_ptr())

    def test_a_tensor_with_the_four_fields_of_torch_has_a_layout(self):
        tensor = torch.zeros(2, 3)
        for name, value in zip(vars(GlobalLayout(*ROWS)), ROWS):
            setattr(tensor, name, value)
        self.assertEqual(global_layout_of(tensor), GlobalLayout(*ROWS))
        tensor.local_sizes = ((4, 3),)
        self.assertIn("not in the global shape", error_of(global_layout_of, tensor))

    def test_what_is_no_local_tensor_is_refused(self):
        self.assertIn(
            "TypeError: with_layout takes a plain local tensor, got list", error_of(with_layout, [1], GlobalLayout(*ROWS))
        )
        for other in (torch.zeros(3, 2), torch.zeros(7), torch.zeros(12)[::2]):
            self.assertIn("ValueError: GlobalLayout: the box with", error_of(with_layout, other, GlobalLayout(*ROWS)))


if __name__ == "__main__":
    unittest.main()
