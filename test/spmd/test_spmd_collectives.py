"""A tensor-parallel step under a plan issues the collectives of code by hand: their number, kind, bytes and order."""

import copy
import sys
import unittest
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # Of the benchmarks.

import torch  # noqa: E402
from common import as_before, ranks  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, debug  # noqa: E402

from benchmarks.step.spmd_collectives import (  # noqa: E402
    add_gradients_of_norms,
    collectives_of,
    sequence_by_hand,
    sequence_plan,
)
from benchmarks.step.spmd_step import Model, by_hand, plan  # noqa: E402
from torch_ragged.spmd import parallelize  # noqa: E402


class CollectivesTest(unittest.TestCase):
    def issued(self, style):
        self.addCleanup(debug._clear_sharding_prop_cache)
        self.addCleanup(as_before)
        return {name: each.order for name, each in collectives_of(style, layers=2, width=64, tokens=8, ranks=4).items()}

    def test_a_whole_sequence_takes_the_all_reduces_of_code_by_hand(self):
        found, nbytes = self.issued("whole sequence"), 8 * 64 * 4
        self.assertEqual(found["by hand"], [("all-reduce", nbytes)] * 8)  # Two in forward and two in backward of a layer.
        self.assertEqual(found["static"], found["by hand"])
        self.assertEqual(found["eager"], found["by hand"])

    def test_a_cut_sequence_takes_the_gathers_and_reductions_of_code_by_hand(self):
        found, nbytes = self.issued("cut sequence"), 8 * 64 * 4
        gather, reduce = ("all-gather", nbytes), ("reduce-scatter", nbytes)
        forward = [gather, reduce] * 4 + [gather]
        backward = [gather, reduce] * 4 + [("all-reduce", 4 * 64 * 4)]  # At last, all norms in one.
        self.assertEqual(found["by hand"], forward + backward)
        self.assertEqual(found["static"], found["by hand"])
        self.assertEqual(found["eager"], found["by hand"])

    @ranks(2)
    def test_the_code_by_hand_computes_what_plans_compute():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model, x = Model(32, 2).double(), torch.randn(2, 6, 32, dtype=torch.float64)
        losses = [model(x)]
        for by, rules in ((by_hand, plan()), (sequence_by_hand, sequence_plan(2))):
            hand, ours = by(copy.deepcopy(model), 2), parallelize(copy.deepcopy(model), rules, mesh)
            for each in (hand, ours):
                losses.append(each(x))
                losses[-1].backward()
            if by is sequence_by_hand:
                add_gradients_of_norms(hand)
            for mine, other in zip(ours.parameters(), hand.parameters(), strict=True):
                torch.testing.assert_close(mine.grad.to_local(), other.grad)
        for loss in losses[1:]:
            torch.testing.assert_close(loss.full_tensor() if isinstance(loss, DTensor) else loss, losses[0])


if __name__ == "__main__":
    unittest.main()
