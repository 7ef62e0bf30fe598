"""Features of ``fully_shard`` are parts: each is asked about each other one, and one from outside of the package works, too."""

import sys
import unittest
from dataclasses import dataclass
from pathlib import Path

import torch
from common import error_of, fake_group, ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard

from torch_ragged.fsdp import HIERARCHICAL, ZERO2, Float8Policy, Offload, fully_shard
from torch_ragged.fsdp.core._dbuffer import DBuffer
from torch_ragged.fsdp.core._kit import FeaturePart, Need, PlainPart, Terms, check_pairs
from torch_ragged.fsdp.core.encodings._plain import Encoding

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs"))
import combinations  # noqa: E402


class TruncatedEncoding(Encoding):
    """All-gathers bfloat16, and computes in the dtype of the parameters."""

    def make_buffers(self, dtype, device, pool, log):
        super().make_buffers(dtype, device, pool, log)
        self.sent = DBuffer(self._layout, Replicate(), self._rank, torch.bfloat16, device, pool=pool, log=log)
        self.sent.free()

    def buffers(self):
        return [self.buffer, self.sent]

    def all_gather(self, shards, collectives):
        self.sent.allocate()
        mine = self.sent.shard()
        mine.copy_(shards.buffer.flat)
        return collectives.all_gather(self.sent.flat, mine)

    def decode(self, shards, keeps_buffer):
        self.buffer.allocate()
        self.buffer.flat.copy_(self.sent.flat)
        self.sent.free()

    def free(self, keeps_buffer):
        super().free(keeps_buffer)
        self.sent.free()


@dataclass(frozen=True)
class Truncated(MixedPrecisionPolicy, FeaturePart):
    """The part of the encoding above, for matrices."""

    least: int = 2

    terms = Terms("Truncated", {Need.EQUAL_SHARDS: ": leave weights out"})

    def key(self, param):
        return "truncated" if param.value.ndim >= self.least else None

    def equip(self, kit):
        kit.encoding = TruncatedEncoding(kit.layout, kit.rank)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


class CombinationsTest(unittest.TestCase):
    def test_each_pair_is_asked_and_a_refusal_says_what_to_write(self):
        found = list(combinations.pairs())
        refused = [(first, second, sentence) for first, second, sentence in found if sentence is not None]
        self.assertGreater(len(found), 300)
        self.assertGreater(len(refused), 40)
        for first, second, sentence in refused:
            with self.subTest(f"{first} and {second}"):
                self.assertRegex(sentence, "^[^:]* does not support .*: .*[a-z]")
        rows = [line for line in combinations.table() if line.startswith("| ")]
        self.assertEqual(len(rows), len(refused) + 1)

    def test_each_kind_of_part_is_in_the_table(self):
        kinds = {type(part) for *_, part in combinations.features()}
        known = list(FeaturePart.__subclasses__())
        for kind in known:
            known += kind.__subclasses__()
        self.assertEqual({kind for kind in known if kind.__module__.startswith("torch_ragged")} - kinds, set())

    @fake_group(4)
    def test_fully_shard_raises_the_sentence_of_a_pair_and_changes_nothing(self):
        one, two = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
        sentences = {frozenset(pair): sentence for *pair, sentence in combinations.pairs()}
        cases = [
            (one, "`Float8Policy`", {"mp_policy": Float8Policy()}, "`ZERO2`", {"placements": ZERO2}),
            (two, "`Float8Policy`", {"mp_policy": Float8Policy()}, "`HIERARCHICAL`", {"placements": HIERARCHICAL}),
            (one, "`weights`", {"weights": [3, 2]}, "`reshard_after_forward=k`", {"reshard_after_forward": 2}),
            (one, "`weights`", {"weights": [3, 2]}, "`Float8Policy`", {"mp_policy": Float8Policy()}),
            (one, "`reshard_after_forward=k`", {"reshard_after_forward": 2}, "`ZERO2`", {"placements": ZERO2}),
            (two, "`reshard_after_forward=k`", {"reshard_after_forward": 2}, "`HIERARCHICAL`", {"placements": HIERARCHICAL}),
        ]
        for mesh, first, left, second, right in cases:
            model = net()
            wanted = sentences[frozenset((first, second))]
            self.assertEqual(error_of(fully_shard, model, mesh=mesh, **left, **right), f"ValueError: {wanted}")
            self.assertIs(type(model), nn.Sequential)
        layer, wanted = (
            nn.Linear(4, 4),
            "the placement Shard(1) of weight does not support weights=[1, 2, 1, 1]: leave weights out",
        )
        text = error_of(
            fully_shard, layer, mesh=one, weights=[1, 2, 1, 1], shard_placement_fn=lambda param: Shard(param.ndim - 1)
        )
        self.assertIn(wanted, text)
        text = error_of(fully_shard, nn.Linear(4, 4), mesh=one, weights=[1, 2, 1, 1], mp_policy=Float8Policy())
        self.assertEqual(text, "ValueError: Float8Policy does not support weights=[1, 2, 1, 1]: leave weights out")

    @fake_group(4)
    def test_equal_weights_exclude_nothing(self):
        mesh = init_device_mesh("cpu", (4,))
        model = fully_shard(net(), mesh=mesh, weights=[2, 2, 2, 2], shard_placement_fn=lambda param: Shard(0))
        model.set_custom_all_gather(lambda *args, **kwargs: None)

    def test_a_part_refuses_others_that_it_does_not_know(self):
        theirs = PlainPart(Terms("their feature", {"a clock": ": leave it out"}))
        check_pairs([theirs, Offload(), Float8Policy()])
        text = error_of(check_pairs, [Offload(), PlainPart(Terms("another one", breaks=("a clock",))), theirs])
        self.assertEqual(text, "ValueError: their feature does not support another one: leave it out")

    @ranks(2)
    def test_an_encoding_from_outside_of_the_package_trains():
        mesh = init_device_mesh("cpu", (2,))
        model, single = fully_shard(net(), mesh=mesh, mp_policy=Truncated()), net()
        groups = model._ragged_groups(recurse=True)
        assert [type(group.encoding).__name__ for group in groups] == ["TruncatedEncoding", "Encoding"]
        rounded = net()
        with torch.no_grad():
            for layer in rounded:
                layer.weight.copy_(layer.weight.bfloat16())
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
        out, expected = model(x), rounded(x)
        assert torch.equal(out, expected)
        out.sum().backward(), expected.sum().backward()
        for param, plain, start in zip(model.parameters(), rounded.parameters(), single.parameters(), strict=True):
            assert torch.equal(param.full_tensor(), start)
            torch.testing.assert_close(param.grad.full_tensor(), plain.grad)
        text = error_of(fully_shard, net(), mesh=mesh, mp_policy=Truncated(), weights=[1, 2])
        assert text == "ValueError: Truncated does not support weights=[1, 2]: leave weights out", text
        mine = Truncated(least=1 + mesh.get_rank())
        text = error_of(fully_shard, net(), mesh=mesh, mp_policy=mine)
        assert "differently on different ranks" in text and "least=1" in text, text


if __name__ == "__main__":
    unittest.main()
