"""Pictures of the ranks that own parts of a tensor, as text and as files."""

import io
import itertools
import math
import random
import re
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from unittest import mock

import torch
from common import error_of, run_ranks
from expecttest import TestCase
from oracle import local_of, random_placement
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard

from torch_ragged import InterleavedShard, RaggedShard, StridedRaggedShard, debug
from torch_ragged.debug import visualize, visualize_sharding
from torch_ragged.tensor._ops import RaggedRows
from torch_ragged.tensor.placement_types import normalize_placements


def owners_by_definition(shape, mesh_shape, placements):
    """For every element, the set of ranks that own it."""
    owners = [set() for _ in range(math.prod(shape))]
    numbers = torch.arange(len(owners)).view(shape)
    for rank, coordinate in enumerate(itertools.product(*map(range, mesh_shape))):
        for element in local_of(numbers, mesh_shape, placements, coordinate).flatten().tolist():
            owners[element].add(rank)
    return owners


def bands_of(text):
    """(label, rows of cells) of each band of a drawing; a row that has no label belongs to the band above."""
    lines = text.split("\n\n")[0].splitlines()[2:]
    bands = []
    for line in lines:
        label, cells = re.fullmatch(r"((?:\d+:\d+(?:, )?)*)\s*((?:\d+ *)+)", line.rstrip()).groups()
        if label or not bands:
            bands.append((label, []))
        bands[-1][1].append([int(cell) for cell in cells.split()])
    return bands


class TextTest(TestCase):
    def test_rows_an_empty_owner_and_the_legend(self):
        self.assertExpectedInline(
            visualize_sharding((4, 3), (4,), [RaggedShard((0,), (1, 2, 0, 1))]),
            """\
(4, 3) under RS(0)[1,2,0,1] on a mesh of (4)
     0:3
0:1  0 0 0
1:3  1 1 1
     1 1 1
3:4  3 3 3

ranks  elements  share  interval  pieces
0             3    25%    [0, 3)  [0:1, 0:3]
1             6    50%    [3, 9)  [1:3, 0:3]
3             3    25%   [9, 12)  [3:4, 0:3]
rank 2 holds nothing""",
        )

    def test_units_that_cut_rows(self):
        self.assertExpectedInline(
            visualize_sharding((6, 8), (4,), [RaggedShard((0, 1), (5, 20, 0, 23))]),
            """\
(6, 8) under RS(0,1)[5,20,0,23] on a mesh of (4)
     0:8
0:1  0 0 0 0 0 1 1 1
1:3  1 1 1 1 1 1 1 1
     1 1 1 1 1 1 1 1
3:4  1 3 3 3 3 3 3 3
4:6  3 3 3 3 3 3 3 3
     3 3 3 3 3 3 3 3

ranks  elements  share  interval  pieces
0             5  10.4%    [0, 5)  [0:1, 0:5]
1            20  41.7%   [5, 25)  [0:1, 5:8] [1:3, 0:8] [3:4, 0:1]
3            23  47.9%  [25, 48)  [3:4, 1:8] [4:6, 0:8]
rank 2 holds nothing""",
        )

    def test_replicas_are_drawn_once(self):
        text = visualize_sharding((7,), (2, 2), [Replicate(), RaggedShard((0,), (3, 4))])
        self.assertExpectedInline(
            text,
            """\
(7,) under R, RS(0)[3,4] on a mesh of (2, 2)
0:7
0 0 0 1 1 1 1

ranks  elements  share  interval  pieces
0, 2          3  42.9%    [0, 3)  [0:3]
1, 3          4  57.1%    [3, 7)  [3:7]""",
        )

    def test_zero_dimensions(self):
        self.assertExpectedInline(
            visualize_sharding((), (2,), [RaggedShard((), (0, 1))]),
            """\
() under RS()[0,1] on a mesh of (2)
0:1
1

ranks  elements  share  interval  pieces
1             1   100%    [0, 1)  [()]
rank 0 holds nothing""",
        )

    def test_a_tensor_without_elements_says_so(self):
        self.assertExpectedInline(
            visualize_sharding((0, 5), (2,), [Shard(0)]),
            """\
(0, 5) under S(0) on a mesh of (2)
it has no elements""",
        )

    def test_partial_and_replicate_share_a_line(self):
        self.assertExpectedInline(
            visualize_sharding((2, 2), (2, 3), [Partial(), Replicate()]),
            """\
(2, 2) under P(sum), R on a mesh of (2, 3)
     0:2
0:2  0 0
     0 0

ranks  elements  share  interval  pieces
0-5           4   100%    [0, 4)  [0:2, 0:2]""",
        )

    def test_leading_dimensions_become_slices(self):
        self.assertExpectedInline(
            visualize_sharding((2, 3, 4), (3,), [RaggedShard((0, 1), (1, 4, 1))]),
            """\
(2, 3, 4) under RS(0,1)[1,4,1] on a mesh of (3)
          0:4
0:1, 0:1  0 0 0 0
0:1, 1:3  1 1 1 1
          1 1 1 1
1:2, 0:2  1 1 1 1
          1 1 1 1
1:2, 2:3  2 2 2 2

ranks  elements  share  interval  pieces
0             4  16.7%    [0, 4)  [0:1, 0:1, 0:4]
1            16  66.7%   [4, 20)  [0:1, 1:3, 0:4] [1:2, 0:2, 0:4]
2             4  16.7%  [20, 24)  [1:2, 2:3, 0:4]""",
        )

    def test_shard_beside_ragged(self):
        text = visualize_sharding((4, 6), (2, 2), [RaggedShard((0,), (1, 3)), Shard(1)], ranks=[4, 5, 6, 7])
        self.assertExpectedInline(
            text,
            """\
(4, 6) under RS(0)[1,3], S(1) on a mesh of (2, 2)
     0:6
0:1  4 4 4 5 5 5
1:4  6 6 6 7 7 7
     6 6 6 7 7 7
     6 6 6 7 7 7

ranks  elements  share  interval  pieces
4             3  12.5%    [0, 3)  [0:1, 0:3]
5             3  12.5%    [3, 6)  [0:1, 3:6]
6             9  37.5%         -  [1:4, 0:3]
7             9  37.5%         -  [1:4, 3:6]""",
        )

    def test_strided_beside_shard_and_alone(self):
        strided = StridedRaggedShard((0, 1), (1, 3), split_factor=2)
        self.assertExpectedInline(
            visualize_sharding((4, 2), (2, 2), [strided, Shard(0)]),
            """\
(4, 2) under SRS(0,1)[1,3]/2, S(0) on a mesh of (2, 2)
     0:2
0:1  0 2
1:2  2 2
2:3  1 3
3:4  3 3

ranks  elements  share  interval  pieces
0             1  12.5%    [0, 1)  [0:1, 0:1]
1             1  12.5%    [4, 5)  [2:3, 0:1]
2             3  37.5%    [1, 4)  [0:1, 1:2] [1:2, 0:2]
3             3  37.5%    [5, 8)  [2:3, 1:2] [3:4, 0:2]""",
        )
        self.assertExpectedInline(
            visualize_sharding((4, 2), (2, 2), [strided, Replicate()]),
            """\
(4, 2) under SRS(0,1)[1,3]/2, R on a mesh of (2, 2)
     0:2
0:1  0 2
1:2  2 2
2:3  0 2
3:4  2 2

ranks  elements  share  interval  pieces
0-1           2    25%         -  [0:1, 0:1] [2:3, 0:1]
2-3           6    75%         -  [0:1, 1:2] [1:2, 0:2] [2:3, 1:2] [3:4, 0:2]""",
        )

    def test_segments_are_cut_each_by_itself(self):
        fused = visualize_sharding((16, 4), (2,), [InterleavedShard(0, (4, 2, 2))])
        self.assertExpectedInline(
            fused,
            """\
(16, 4) under IS(0)[2,1,1] on a mesh of (2)
       0:4
0:4    0 0 0 0
       0 0 0 0
       0 0 0 0
       0 0 0 0
4:8    1 1 1 1
       1 1 1 1
       1 1 1 1
       1 1 1 1
8:10   0 0 0 0
       0 0 0 0
10:12  1 1 1 1
       1 1 1 1
12:14  0 0 0 0
       0 0 0 0
14:16  1 1 1 1
       1 1 1 1

ranks  elements  share  interval  pieces
0            32    50%         -  [0:4, 0:4] [8:10, 0:4] [12:14, 0:4]
1            32    50%         -  [4:8, 0:4] [10:12, 0:4] [14:16, 0:4]""",
        )
        over = visualize_sharding((8, 2), (2, 2), [StridedRaggedShard((0,), (1, 3), split_factor=2), InterleavedShard(0, 2)])
        self.assertExpectedInline(
            over,
            """\
(8, 2) under SRS(0)[1,3]/2, IS(0)[1,1] on a mesh of (2, 2)
     0:2
0:1  0 0
1:2  2 2
2:3  1 1
3:4  3 3
4:6  2 2
     2 2
6:8  3 3
     3 3

ranks  elements  share  interval  pieces
0             2  12.5%    [0, 2)  [0:1, 0:2]
1             2  12.5%    [4, 6)  [2:3, 0:2]
2             6  37.5%         -  [1:2, 0:2] [4:6, 0:2]
3             6  37.5%         -  [3:4, 0:2] [6:8, 0:2]""",
        )

    def test_three_mesh_dimensions(self):
        placements = [Shard(1), StridedRaggedShard((0,), (2, 0, 1), split_factor=2), Shard(0)]
        self.assertExpectedInline(
            visualize_sharding((6, 4), (2, 3, 2), placements),
            """\
(6, 4) under S(1), SRS(0)[2,0,1]/2, S(0) on a mesh of (2, 3, 2)
     0:4
0:2   0  0  6  6
      0  0  6  6
2:3   4  4 10 10
3:5   1  1  7  7
      1  1  7  7
5:6   5  5 11 11

ranks  elements  share  interval  pieces
0             4  16.7%         -  [0:2, 0:2]
1             4  16.7%         -  [3:5, 0:2]
4             2  8.33%   [8, 10)  [2:3, 0:2]
5             2  8.33%  [20, 22)  [5:6, 0:2]
6             4  16.7%         -  [0:2, 2:4]
7             4  16.7%         -  [3:5, 2:4]
10            2  8.33%  [10, 12)  [2:3, 2:4]
11            2  8.33%  [22, 24)  [5:6, 2:4]
ranks 2-3, 8-9 hold nothing""",
        )

    def test_a_huge_tensor_is_to_scale_and_keeps_small_pieces(self):
        placements = [RaggedShard((0, 1), (2**20 - 3, 1, 0, 2))]
        text = visualize_sharding((2**12, 2**12), (4,), placements, max_width=60, max_height=8)
        self.assertExpectedInline(
            text,
            """\
(4096, 4096) under RS(0,1)[1048573,1,0,2] on a mesh of (4)
           0:4096
0:4095     0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
           0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
           0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
           0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
           0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
           0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
4095:4096  0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 1 3 3
           0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 1 3 3

ranks  elements      share              interval  pieces
0      16777168       100%         [0, 16777168)  [0:4095...
1            16  9.54e-05%  [16777168, 16777184)  [4095:4...
3            32  0.000191%  [16777184, 16777216)  [4095:4...
rank 2 holds nothing""",
        )

    def test_many_ranks_leave_out_the_middle(self):
        text = visualize_sharding((1024, 64), (64,), [Shard(0)], max_width=50, max_height=5)
        self.assertExpectedInline(
            text,
            """\
(1024, 64) under S(0) on a mesh of (64)
           0:64
0:16        0  0  0  0  0  0  0  0  0  0  0  0  0
16:32       1  1  1  1  1  1  1  1  1  1  1  1  1
... 60 more bands
992:1008   62 62 62 62 62 62 62 62 62 62 62 62 62
1008:1024  63 63 63 63 63 63 63 63 63 63 63 63 63

ranks  elements  share        interval  pieces
0          1024  1.56%       [0, 1024)  [0:16, ...
1          1024  1.56%    [1024, 2048)  [16:32,...
... 60 more owners
62         1024  1.56%  [63488, 64512)  [992:10...
63         1024  1.56%  [64512, 65536)  [1008:1...""",
        )
        text = visualize_sharding((1024,), (64,), [Shard(0)], max_width=50, max_height=3)
        self.assertExpectedInline(
            text,
            """\
(1024,) under S(0) on a mesh of (64)
0:1024
 0  1  2  3  4  5  6  7 ... 57 58 59 60 61 62 63

ranks  elements  share      interval  pieces
0            16  1.56%       [0, 16)  [0:16]
... 62 more owners
63           16  1.56%  [1008, 1024)  [1008:1024]""",
        )

    def test_drawings_agree_with_the_definition_of_the_placements(self):
        generator = random.Random(0)
        seen = set()
        for _ in range(200):
            shape, mesh_shape, placements = self.random_case(generator)
            seen |= {(type(placement), len(mesh_shape)) for placement in placements}
            with self.subTest(shape=shape, placements=placements, mesh_shape=mesh_shape):
                text = visualize_sharding(shape, mesh_shape, placements, max_width=100, max_height=1500)
                self.check(text, shape, owners_by_definition(shape, mesh_shape, placements), math.prod(mesh_shape))
        kinds = (Replicate, Partial, Shard, _StridedShard, InterleavedShard, RaggedShard, StridedRaggedShard)
        self.assertEqual(seen, set(itertools.product(kinds, (1, 2, 3))))

    def random_case(self, generator):
        while True:
            shape = tuple(generator.choice((1, 2, 3, 4, 6)) for _ in range(generator.randint(1, 4)))
            mesh_shape = tuple(generator.randint(1, 3) for _ in range(generator.randint(1, 3)))
            placements = tuple(
                random_placement(generator, shape, mesh_shape, dim, StridedRaggedShard) for dim in range(len(mesh_shape))
            )
            try:
                return shape, mesh_shape, normalize_placements(placements, shape, mesh_shape)
            except ValueError:  # They have no meaning together.
                continue

    def check(self, text, shape, owners, size):
        table = torch.tensor([min(ranks) for ranks in owners]).view(shape)
        seen = torch.zeros(shape, dtype=torch.int)
        for label, rows in bands_of(text):
            index = tuple(slice(*map(int, part.split(":"))) for part in label.split(", ") if part)
            self.assertEqual(torch.tensor(rows).tolist(), table[index].reshape(-1, shape[-1]).tolist())
            seen[index] += 1
        self.assertTrue((seen == 1).all())
        legend = {line.split("  ")[0]: line for line in text.split("\n\n")[1].splitlines()[1:] if "hold" not in line}
        for ranks in set(map(frozenset, owners)):
            line = next(line for names, line in legend.items() if self.ranks(names) == ranks)
            held = {element for element, own in enumerate(owners) if own == ranks}
            self.assertEqual(int(re.search(r"  +(\d+)  +[\d.]+%", line)[1]), len(held))
            pieces = re.findall(r"\[\d+:[^]]*\]", line)
            if not line.endswith("..."):
                everything = torch.arange(len(owners)).view(shape)
                found = [e for piece in pieces for e in eval(f"t{piece}", {"t": everything}).flatten().tolist()]
                self.assertEqual(sorted(found), sorted(held))
            interval = re.search(r"\[(\d+), (\d+)\)", line)
            self.assertEqual(bool(interval), max(held) - min(held) + 1 == len(held), line)
            if interval:
                self.assertEqual((int(interval[1]), int(interval[2])), (min(held), max(held) + 1))
        idle = re.search(r"ranks? ([\d, -]+) holds? nothing", text)
        self.assertEqual(set(range(size)) - set().union(*owners), self.ranks(idle[1]) if idle else set())

    def ranks(self, names):
        result = set()
        for part in names.strip().split(", "):
            first, _, last = part.partition("-")
            result |= set(range(int(first), int(last or first) + 1))
        return result

    def test_bad_input_is_refused(self):
        ragged = RaggedShard((0,), (1, 2))
        self.assertIn("cannot cut shape (4, 3)", error_of(visualize_sharding, (4, 3), (2,), [ragged]))
        view = RaggedRows((1,), (1, 2))
        self.assertIn("is the placement of a strided view", error_of(visualize_sharding, (4, 3), (2,), [view]))
        self.assertExpectedInline(
            error_of(visualize_sharding, (3, 3), (2,), [ragged], ranks=[0]),
            """ValueError: a mesh of shape (2,) has 2 ranks, got 1: [0]""",
        )
        self.assertExpectedInline(
            error_of(visualize, torch.zeros(2)),
            """TypeError: visualize takes a DTensor, or a sequence or mapping of DTensors, got Tensor""",
        )
        self.assertExpectedInline(
            error_of(visualize, [torch.zeros(2)]),
            """TypeError: visualize takes DTensors, got Tensor: only a DTensor knows which rank owns what""",
        )
        self.assertExpectedInline(error_of(visualize, []), """ValueError: visualize got no tensor: pass at least one DTensor""")


def show(path):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "fsdp"))
    weight = distribute_tensor(torch.randn(4, 3), mesh, [Replicate(), RaggedShard((0,), (1, 3))])
    bias = distribute_tensor(torch.randn(3), mesh["fsdp"], [RaggedShard((), (0, 1))])
    printed, stream, both = io.StringIO(), io.StringIO(), io.StringIO()
    with CommDebugMode() as mode, redirect_stdout(printed):
        text = visualize(weight)
        returned = visualize({"weight": weight, "bias": bias}, file=stream)
        visualize([weight, bias], file=both)
        for name in ("a.svg", "b.svg", "c.png"):
            visualize([weight, bias], file=Path(path) / name)
        error = error_of(visualize, weight, file=str(Path(path) / "a.gif"))
    return text, printed.getvalue(), returned, stream.getvalue(), both.getvalue(), error, mode.get_total_counts()


class DTensorTest(TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.path = Path(folder.name)
        cls.answers = run_ranks(4, show, folder.name)

    def test_every_rank_returns_the_same_and_the_lowest_prints_it(self):
        text = self.answers[0][0]
        self.assertExpectedInline(
            text,
            """\
(4, 3) under R, RS(0)[1,3] on a mesh of (dp=2, fsdp=2)
     0:3
0:1  0 0 0
1:4  1 1 1
     1 1 1
     1 1 1

ranks  elements  share  interval  pieces
0, 2          3    25%    [0, 3)  [0:1, 0:3]
1, 3          9    75%   [3, 12)  [1:4, 0:3]""",
        )
        self.assertEqual({answer[0] for answer in self.answers}, {text})
        self.assertEqual([answer[1] for answer in self.answers], [text + "\n", "", "", ""])
        self.assertEqual([answer[6] for answer in self.answers], [0] * 4)

    def test_named_tensors_to_a_stream(self):
        returned, written = self.answers[0][2:4]
        self.assertEqual(written, returned + "\n")
        self.assertEqual(re.findall(r"^(\w+): \(.*", returned, re.M), ["weight", "bias"])
        self.assertIn("bias: (3,) under RS()[0,1] on a mesh of (fsdp=2)\n0:3\n1 1 1\n", returned)
        self.assertEqual(self.answers[0][4], returned.replace("weight: ", "").replace("bias: ", "") + "\n")

    def test_pictures_show_titles_owners_and_idle_ranks(self):
        svg = (self.path / "a.svg").read_text()
        texts = re.findall(r">([^<>\n]+)</text>", svg)
        for expected in ("(4, 3) under R, RS(0)[1,3] on a mesh of (dp=2, fsdp=2)", "0, 2", "1, 3", "rank 0 holds nothing"):
            self.assertIn(expected, texts)
        self.assertEqual(svg, (self.path / "b.svg").read_text())
        self.assertEqual((self.path / "c.png").read_bytes()[:8], b"\x89PNG\r\n\x1a\n")

    def test_an_unknown_ending_is_refused_on_every_rank(self):
        for answer in self.answers:
            self.assertIn("ValueError: visualize draws to a .svg or .png file", answer[5])

    def test_rectangles_are_to_scale(self):
        picture = debug._make_picture((6, 8), (2,), [RaggedShard((0, 1), (13, 35))], None)
        axes = mock.Mock(spec=["broken_barh", "text", "set", "set_yticks", "set_title"])
        debug._draw(axes, picture, ["red", "blue"])
        bars = [(call.args[0][0], call.args[1], call.kwargs["facecolors"][0]) for call in axes.broken_barh.call_args_list]
        expected = [((0, 8), (0, 1), "red"), ((0, 5), (1, 1), "red"), ((5, 3), (1, 1), "blue"), ((0, 8), (2, 4), "blue")]
        self.assertEqual(bars, expected)
        self.assertEqual([call.args[:3] for call in axes.text.call_args_list], [(4, 0.5, "0"), (4, 4, "1")])

    def test_without_matplotlib_the_error_names_the_extra(self):
        with mock.patch("importlib.util.find_spec", return_value=None):
            self.assertIn("run pip install matplotlib, or", error_of(debug._save, [], "a.svg", draw=True))
