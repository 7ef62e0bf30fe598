"""The offline planner: pictures of a layout, and advice on its padding."""

import itertools
import random
import re
import xml.etree.ElementTree as ElementTree
from unittest import mock

from torch.testing._internal.common_utils import TestCase

from torch_ragged.fsdp import TensorSpec, elements, plan_layout, rows, tensor
from torch_ragged.fsdp.layout import _advice
from torch_ragged.fsdp.layout._advice import _finer, _merged_groups, _smaller_sizes, _split_groups, advise, remedies
from torch_ragged.offline._drawing import _cells, draw_svg, draw_text


def spec(shape, block=1, name="t"):
    return TensorSpec(name, tuple(shape), tuple(range(len(shape))), block)


def random_layout(generator):
    tensors = []
    for index in range(generator.randint(1, 5)):
        shape = tuple(generator.randint(0, 6) for _ in range(generator.randint(1, 2)))
        granularity = generator.choice((elements(), rows(1), rows(2), tensor()))
        tensors.append(granularity.tensor_spec(f"w{index}", shape))
    return plan_layout(tensors, generator.randint(1, 9), generator.choice((1, 4)))


def owners_by_definition(layout):
    """The name of the tensor of each element of the buffer, "" for padding."""
    owners = [""] * layout.numel
    for index, one in enumerate(layout.tensors):
        for rank in range(layout.ranks):
            start, stop = layout.local_range(index, rank)
            owners[layout.offsets[index] + start : layout.offsets[index] + stop] = [one.name] * (stop - start)
    return owners


class DrawingTest(TestCase):
    def test_drawings_agree_with_the_layout(self):
        generator = random.Random(2)
        padded = 0
        for _ in range(300):
            layout = random_layout(generator)
            drawing, legend = draw_text(layout, width=400, height=99).split("\n\n")
            names = {line.split()[0]: line.split()[1] for line in legend.splitlines()[1:]}
            drawn = []
            for line in drawing.splitlines():
                first, last, cells, note = re.fullmatch(r"ranks? (\d+)-?(\d*) +\|(.*)\|(.*)", line).groups()
                self.assertEqual(int(first), len(drawn) // layout.shard_numel)
                count = int(last or first) - int(first) + 1
                drawn += ["" if cell == "/" else names[cell] for cell in cells] * count
                padding = cells.count("/")
                self.assertEqual(note, f"  padding {padding:,}{' each' * (count > 1)}" if padding else "")
                padded += padding > 0
            self.assertEqual(drawn, owners_by_definition(layout))
        self.assertGreater(padded, 100)

    def test_svg_is_to_scale(self):
        generator = random.Random(3)
        for _ in range(50):
            layout = random_layout(generator)
            root = ElementTree.fromstring(draw_svg(layout, "a <b> & c", height=99))
            space = {"svg": "http://www.w3.org/2000/svg"}
            texts = [text.text for text in root.iterfind("svg:text", space)]
            self.assertEqual(texts[0], "a <b> & c")
            hatched = [rect for rect in root.iterfind("svg:rect", space) if rect.get("fill") == "url(#padding)"]
            widths = {float(rect.get("y")): 0.0 for rect in root.iterfind("svg:rect[svg:title]", space)}
            for rect in root.iterfind("svg:rect[svg:title]", space):
                widths[float(rect.get("y"))] += float(rect.get("width"))
            for width in widths.values():  # Every row is as wide as a shard.
                self.assertEqual(width, 960, atol=0.1, rtol=0)
            self.assertEqual(len(hatched) > 1, layout.padding_numel > 0)  # One more stands in the legend.

    def test_svg_has_only_what_every_renderer_draws(self):
        """Hexadecimal colours, no style sheet, sizes in pixels; tensors that are neighbours differ in colour."""
        document = draw_svg(random_layout(random.Random(3)), "title", height=99)
        self.assertFalse({"style", "class"} & set(re.findall(r"[<\s](\w+)[\s=>]", document)))
        colours = re.findall(r'(?:fill|stroke)="([^"]*)"', document)
        self.assertTrue(colours and all(re.fullmatch(r"#[0-9a-f]{6}|url\(#padding\)", colour) for colour in colours), colours)
        self.assertNotIn("%", document.replace("100%", ""))
        legend = re.findall(r'width="24" height="16" fill="(#\w+)"', document)
        self.assertEqual(len(set(legend)), len(legend))

    def test_many_tensors_that_differ_by_a_number_are_drawn_alike(self):
        tensors = [spec((4,), 4, f"experts.{i}.{name}") for i in range(16) for name in ("up", "down")]
        text = draw_text(plan_layout([spec((8,), 1, "norm"), *tensors], 4, 4), width=60)
        self.assertExpectedInline(
            text,
            """\
rank 0 |aaaaabbbbcccbbbbcccbbbbcccbbbb|
rank 1 |cccbbbccccbbbcccbbbbcccbbbcccc|
rank 2 |bbbcccbbbbcccbbbccccbbbcccbbbb|
rank 3 |cccbbbccccbbbccccbbbcccc//////|  padding 8

   tensor                       shape  block  elements  ranks
a  norm                         (8,)       1         8  0
b  experts.*.up (16 tensors)    (4,)       4        64  0-3
c  experts.*.down (16 tensors)  (4,)       4        64  0-3
/  padding, in 1 gap                                 8  3-3""",
        )

    def test_more_kinds_than_letters(self):
        tensors = [spec((index + 1,), 1, f"{chr(97 + index % 26)}{chr(97 + index // 26)}") for index in range(60)]
        lines = draw_text(plan_layout(tensors, 1), height=99).splitlines()
        self.assertEqual(lines[-1].split(), ["*", "others", "(8", "tensors)", "various", f"{sum(range(53, 61)):,}", "0"])
        self.assertEqual(len(lines), 1 + 1 + 1 + 52 + 1)

    def test_a_character_shows_the_tensor_in_its_middle(self):
        pieces = [(0, 0, 1), (1, 1, 3), (2, 3, 5), (3, 5, 6), (4, 6, 12)]  # The middles of three are 2, 6 and 10.
        self.assertEqual(_cells(pieces, list("abcde"), 12, 3), "bee")
        self.assertEqual(_cells([*pieces[:4], (4, 6, 11), (1, 11, 12)], list("abcde"), 12, 4), "bcee")

    def test_small_padding_is_seen_where_pieces_are_smaller_than_cells(self):
        tensors = [spec((5000,), 1, f"{name}{i}") for i in range(20) for name in "abcdefgh"]
        tensors.append(spec((248_575,), 1, "last"))
        layout = plan_layout(tensors, 1, 1 << 20)
        self.assertEqual(layout.padding_numel, 1)
        self.assertRegex(draw_text(layout, width=60).splitlines()[0], r"^rank 0 \|[a-i]{29}/\|  padding 1$")

    def test_the_middle_of_many_rows_is_left_out(self):
        layout = plan_layout([spec((7,), 7, f"w{i}") for i in range(20)], 20, 8)
        lines = draw_text(layout, height=4).splitlines()
        self.assertEqual([line.split("|")[0] for line in lines[:4]], ["rank 0  ", "rank 1  ", "... 17 more rows", "rank 19 "])
        self.assertIn("... 17 more kinds of tensors", lines)
        self.assertIn("... 17 more rows", draw_svg(layout, "", height=4))

    def test_a_layout_always_gives_these_drawings(self):
        """Three ranks and three tensors are left out; the smallest tensor is less than half a pixel."""
        tensors = [spec((1,), 1, "scale"), spec((2999,), 1, "a <b> & c"), *(spec((2500,), 2500, f"w.{name}") for name in "xyz")]
        layout = plan_layout(tensors, 5, 1000)
        self.assertExpectedInline(
            draw_text(layout, width=60, height=3),
            """\
rank 0 |abbbbbbbbbbbbbbbbbbbbbbbbbbbbb|
... 3 more rows
rank 4 |//////////////////////////////|  padding 3,000

   tensor              shape    block  elements  ranks
a  scale               (1,)         1         1  0
... 3 more kinds of tensors
e  w.z                 (2500,)  2,500     2,500  3
/  padding, in 3 gaps                     4,500  1-4""",
        )
        self.assertExpectedInline(
            draw_svg(layout, "on five ranks", height=3),
            """\
<svg xmlns="http://www.w3.org/2000/svg" width="1096" height="204" font-family="sans-serif" font-size="12">
<defs><pattern id="padding" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
<rect width="6" height="6" fill="#ffffff"/><rect width="2" height="6" fill="#000000"/></pattern></defs>
<rect width="1096" height="204" fill="#ffffff"/>
<text x="8" y="20">on five ranks</text>
<text x="8" y="50">rank 0</text>
<rect x="120.00" y="36" width="0.50" height="17" fill="#dd5f5f" stroke="#000000" stroke-width="0.3"><title>scale: elements 0 to 1 of the shard</title></rect>
<rect x="120.32" y="36" width="959.68" height="17" fill="#92e8ab" stroke="#000000" stroke-width="0.3"><title>a &lt;b&gt; &amp; c: elements 1 to 3,000 of the shard</title></rect>
<text x="8" y="70">... 3 more rows</text>
<text x="8" y="90">rank 4</text>
<rect x="120.00" y="76" width="960.00" height="17" fill="url(#padding)" stroke="#000000" stroke-width="0.3"><title>padding: elements 0 to 3,000 of the shard</title></rect>
<rect x="120" y="116" width="24" height="16" fill="#dd5f5f" stroke="#000000"/>
<text x="152" y="129">scale (1,)</text>
<text x="152" y="149">... 3 more kinds of tensors</text>
<rect x="120" y="156" width="24" height="16" fill="#5fc8dd" stroke="#000000"/>
<text x="152" y="169">w.z (2500,)</text>
<rect x="120" y="176" width="24" height="16" fill="url(#padding)" stroke="#000000"/>
<text x="152" y="189">padding, 4,500 elements</text>
</svg>
""",  # noqa: E501
        )


def sorts(layout, count, neighbours):
    """All that advice is chosen from, sort by sort."""
    return _finer(layout), _split_groups(layout), _merged_groups(layout, count, neighbours), _smaller_sizes(layout)


class AdviceTest(TestCase):
    def layouts(self, ranks, groups=3, granularity=None):
        """A third of the model is one block of rows too large for the shards."""
        granularity = granularity or rows(64)
        shape = (96, 64)
        w = granularity.tensor_spec("experts.w", shape)
        block = plan_layout([w, spec((64, 64), 1, "q")], ranks, 64)
        return {**{f"layers.{i}": block for i in range(groups)}, "rest": plan_layout([spec((80, 64), 1, "e")], ranks, 64)}

    def test_no_advice_within_the_limit(self):
        layouts = self.layouts(5)
        limit = layouts["layers.0"].padding_fraction
        self.assertGreater(limit, 0)
        self.assertEqual(advise(layouts, limit), [])
        self.assertEqual(len(advise(layouts, limit - 1e-9)), 1)

    def test_a_change_that_just_reaches_the_limit_mends(self):
        layouts = self.layouts(16, groups=1)
        reached = [remedy.padding_fraction for remedy in remedies(layouts["layers.0"], 0.05, 1)]
        (text,) = advise({"layers.0": layouts["layers.0"]}, min(reached))
        self.assertNotIn("no tried change brings it within the limit", text)
        (text,) = advise({"layers.0": layouts["layers.0"]}, min(reached) - 1e-9)
        self.assertIn("no tried change brings it within the limit", text)

    def test_a_group_may_join_its_neighbours_only(self):
        bad = self.layouts(16, groups=1)["layers.0"]
        others = {name: plan_layout([spec((size, 64))], 16, 64) for name, size in zip("abcd", (16, 32, 48, 64))}
        for place in range(5):
            names = [*list("abcd")[:place], "bad", *list("abcd")[place:]]
            layouts = {name: others.get(name, bad) for name in names}
            with mock.patch.object(_advice, "remedies", return_value=[]) as asked:
                advise(layouts, 0.05)
            self.assertEqual(
                [name for name, _ in asked.call_args.args[3]], [*names[place + 1 : place + 2], *names[:place][-1:]]
            )

    def test_every_sort_of_split_and_merge_is_offered(self):
        tensors = [spec((30,), block, f"of {block}") for block in (1, 2, 5)]
        layout = plan_layout(tensors, 4)
        texts = ["a group of its own for of 2", "a group of its own for of 5", "3 groups, one per block size"]
        self.assertEqual([remedy.text for remedy in _split_groups(layout)], texts)
        self.assertEqual(len(list(_split_groups(plan_layout(tensors[:2], 4)))), 1)
        merged = [f"one group for every {n} of these 16" for n in (2, 4, 8)]
        self.assertEqual([remedy.text for remedy in _merged_groups(layout, 16, [])], merged)
        self.assertEqual(_advice._padding([[spec((1,))]], plan_layout([spec((1,))], 4)), 3)

    def test_blocks_within_rows_become_single_elements(self):
        inside, pair = TensorSpec("inside", (2, 900), (0, 1), 450), TensorSpec("rows", (8, 4), (0,), 8)
        row = TensorSpec("a row", (3, 100), (0,), 100)
        first = next(_finer(plan_layout([row, pair], 7)))
        self.assertEqual(first.text, "cuts anywhere instead of blocks of 1 row for a row")
        steps = list(_finer(plan_layout([inside, pair], 7)))
        self.assertEqual(
            [remedy.text for remedy in steps],
            ["blocks of 1 row instead of blocks of 2 rows for rows", "cuts anywhere instead of blocks of 2 rows for rows"],
        )

    def test_equal_groups_are_reported_once(self):
        (text,) = advise(self.layouts(16), 0.05)
        self.assertEqual(text.split(": ")[0], "layers.0 and 2 more")
        (text,) = advise(self.layouts(16, groups=1), 0.05)
        self.assertEqual(text.split(": ")[0], "layers.0")

    def test_what_is_offered_was_planned(self):
        layouts = self.layouts(16)
        block, rest = layouts["layers.0"], layouts["rest"]
        w, q = block.tensors

        def padding(*groups, ranks=16):
            planned = [plan_layout(tensors, ranks, 64) for tensors in groups]
            return sum(one.padding_numel for one in planned) / sum(sum(t.numel for t in one.tensors) for one in planned)

        def finer(rows):
            return TensorSpec(w.name, w.shape, w.dims, rows * 64)

        self.assertGreater(block.padding_fraction, 1)
        offered = {
            r"blocks of (\d+) rows? instead of blocks of 64 rows for experts.w": lambda n: padding([finer(int(n)), q]),
            r"(cuts) anywhere instead of blocks of 64 rows for experts.w": lambda _: padding([spec(w.shape), q]),
            r"one group for every (\d+) of these 3": lambda n: padding(block.tensors * int(n)),
            r"one group with (rest)": lambda _: padding(block.tensors + rest.tensors),
            r"FSDP size (\d+)": lambda n: padding(block.tensors, ranks=int(n)),
            r"a group of its own for (experts.w)": lambda _: padding([w], [q]),
        }
        seen = set()
        for remedy in itertools.chain.from_iterable(sorts(block, 3, [("rest", rest)])):
            ((form, match),) = [(form, re.fullmatch(form, remedy.text)) for form in offered if re.fullmatch(form, remedy.text)]
            self.assertEqual(remedy.padding_fraction, offered[form](match[1]), remedy.text)
            seen.add(form)
        self.assertEqual(seen, set(offered))
        mending = [remedy for remedy in remedies(block, 0.05, 3, [("rest", rest)]) if remedy.padding_fraction <= 0.05]
        self.assertGreater(len(mending), 1)
        (text,) = advise(layouts, 0.05)
        lines = [f"  - {remedy.text}: {100 * remedy.padding_fraction:,.2f}%" for remedy in mending]
        self.assertEqual(text.splitlines()[1:], lines)

    def test_of_each_sort_the_first_that_mends_or_else_the_best(self):
        generator = random.Random(4)
        mended, best = 0, 0
        for _ in range(150):
            layout = random_layout(generator)
            reached = [remedy.padding_fraction for sort in sorts(layout, 4, []) for remedy in sort]
            limit = generator.choice((0, 0.1, 0.3, generator.choice(reached or [0])))
            expected = []
            for sort in sorts(layout, 4, []):
                tried = list(sort)
                within = [remedy for remedy in tried if remedy.padding_fraction <= limit]
                chosen = within[:1] or sorted(tried, key=lambda remedy: remedy.padding_fraction)[:1]
                expected += [remedy for remedy in chosen if remedy.padding_fraction < layout.padding_fraction]
                mended += len(within) > 1
                best += bool(tried) and not within and chosen[0] is not tried[-1]
            self.assertEqual(remedies(layout, limit, 4), expected)
        self.assertGreater(min(mended, best), 20)

    def test_finer_blocks_step_by_step(self):
        w, v = rows(8).tensor_spec("w", (4, 8, 6)), rows(2).tensor_spec("v", (9,))
        layout = plan_layout([w, v, tensor().tensor_spec("t", (3, 4)), rows(8).tensor_spec("n", (20,))], 5, 1)
        self.assertEqual(
            [remedy.text for remedy in _finer(layout)],
            [
                "blocks of 4 rows instead of blocks of 8 rows for w and 1 more",
                "blocks of 2 rows instead of blocks of 8 rows for w and 1 more",
                "blocks of 1 row instead of blocks of 8 rows for w, cuts anywhere instead of blocks of 2 rows for v, "
                "cuts anywhere instead of blocks of 8 rows for n",
                "blocks of 1 row instead of blocks of 8 rows for w, cuts anywhere instead of blocks of 2 rows for v, "
                "blocks of 1 row instead of whole tensors for t, cuts anywhere instead of blocks of 8 rows for n",
                "cuts anywhere instead of blocks of 8 rows for w and 1 more, cuts anywhere instead of blocks of 2 rows for v, "
                "cuts anywhere instead of whole tensors for t",
            ],
        )

    def test_which_sizes_are_tried(self):
        layout = plan_layout([spec((100, 3), 9)], 100, 1)
        sizes = [int(remedy.text.removeprefix("FSDP size ")) for remedy in _smaller_sizes(layout)]
        self.assertEqual(sizes, [80, 72, 56, 48, 40, 32, 24, 16, 8, 7, 6, 5, 4, 3, 2, 1])

    def test_groups_too_large_to_plan_are_not_merged(self):
        two, three = (plan_layout([spec((8,), 1, f"w{i}") for i in range(n)], 2, 1) for n in (2, 3))
        neighbours = [("two", two), ("three", three), ("other ranks", plan_layout(two.tensors, 3, 1))]
        with mock.patch.object(_advice, "_MOST_MERGED_TENSORS", 4):
            merged = [remedy.text for remedy in _merged_groups(two, 4, neighbours)]
        self.assertEqual(merged, ["one group for every 2 of these 4", "one group with two"])
        merged = [remedy.text for remedy in _merged_groups(two, 4, neighbours)]
        self.assertEqual(
            merged,
            [f"one group {text}" for text in ("for every 2 of these 4", "for every 4 of these 4", "with two", "with three")],
        )

    def test_the_coarsest_granularity_that_mends_is_offered(self):
        block = self.layouts(16)["layers.0"]
        ((text, fraction),) = [
            (remedy.text, remedy.padding_fraction) for remedy in remedies(block, 0.05) if remedy.text.startswith("blocks")
        ]
        rows_kept = int(re.match(r"blocks of (\d+) rows?", text)[1])
        w, q = block.tensors
        self.assertLessEqual(fraction, 0.05)
        coarser = plan_layout([TensorSpec(w.name, w.shape, w.dims, 2 * rows_kept * 64), q], 16, 64)
        self.assertGreater(coarser.padding_fraction, 0.05)

    def test_whole_tensors_may_become_rows(self):
        block = self.layouts(16, granularity=tensor())["layers.0"]
        texts = [remedy.text for remedy in remedies(block, 0.05)]
        self.assertTrue(any("instead of whole tensors for experts.w" in text for text in texts), texts)

    def test_if_nothing_mends_it_says_so(self):
        layout = plan_layout([spec((130,), 130, "bias")], 2, 64)
        lines = [
            "a: padding 195.38% on 2 ranks exceeds 5% (at least 195.38%: bias: "
            "a block of 130 elements must fit into one shard)",
            "  no tried change brings it within the limit; the best one is",
            "  - FSDP size 1: 47.69%",
        ]
        self.assertEqual(advise({"a": layout}), ["\n".join(lines)])
        (text,) = advise({"a": plan_layout([spec((65,), 1, "bias")], 2, 64)})
        self.assertRegex(text, r"\)\n  no tried change reduces it$")

    def test_neighbours_of_other_sizes_are_not_merged(self):
        layouts = self.layouts(16, groups=1)
        layouts["rest"] = plan_layout([spec((80, 64), 1, "e")], 8, 64)
        found = remedies(layouts["layers.0"], 0.0, 1, [("rest", layouts["rest"])])
        self.assertTrue(found)
        self.assertFalse([remedy for remedy in found if "rest" in remedy.text])
