"""Roots follow the ranks' shares: a rank without elements computes nothing and holds no states."""

import itertools
import unittest
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from common import ranks, run_ranks
from optim_common import assert_same, set_gradients, wholes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from torch_ragged.fsdp import fully_shard
from torch_ragged.optim import SOAP, Muon, Shampoo, matrix_groups
from torch_ragged.optim._gather import Placed, shares_of
from torch_ragged.optim._roots import Stack, assign_roots
from torch_ragged.tensor._ownership import Run, Units, Whole

SHARES = (([3, 2, 1, 0], False), ([0, 1, 0, 1], True), ([3, 2, 1, 0], True), ([9, 1, 1, 1], True))
KINDS = ((Muon, {}), (Muon, {"neuron_beta": 0.9}), (Muon, {"row_blocks": 4}), (SOAP, {}), (Shampoo, {}))


def trained(kind, options, weights, mesh, apart=False):
    """Parameters, states and roots after two steps with given gradients. ``apart``: a group for each layer."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(8)))
    knobs = {"mesh": mesh} | ({} if weights is None else {"weights": weights})
    for layer in model if apart else ():
        fully_shard(layer, **knobs)
    fully_shard(model, **knobs)
    optimizer = kind(matrix_groups(model), lr=0.01, **options)
    params = list(model.parameters())
    for step in (1, 2):
        set_gradients(params, step)
        optimizer.step()
    return params, optimizer


def nbytes_of(optimizer):
    values = [value for states in optimizer.state.values() for value in states.values()]
    return sum(each.to_local().nbytes for each in values if isinstance(each, DTensor) and each.ndim)


def check_proportion(takes_all):
    """Each optimizer with all weights, or with two of them, the next optimizer with the others."""
    mesh = init_device_mesh("cpu", (4,))
    of_kinds = itertools.cycle(SHARES)
    for kind, options in KINDS:
        expected = wholes(*trained(kind, options, None, mesh))
        for weights, apart in SHARES if takes_all else [next(of_kinds), next(of_kinds)]:
            params, optimizer = trained(kind, options, weights, mesh, apart)
            held = [None] * 4
            dist.all_gather_object(held, nbytes_of(optimizer))
            what = f"{kind.__name__} {options} weights={weights}: {held}"
            for weight, mine in zip(weights, held):
                assert (mine == 0) if weight == 0 else (mine <= sum(held) * (2 * weight / sum(weights) + 0.05)), what
            roots = {r + i for of in optimizer._roots.values() for part, split in of for r in part for i in range(split)}
            assert all(weights[root] for root in roots), (what, roots)
            assert_same(wholes(params, optimizer), expected, what)


class WeightsTest(unittest.TestCase):
    def test_states_are_in_proportion_to_weights(self):
        run_ranks(4, check_proportion, False)

    @pytest.mark.slow
    def test_states_are_in_proportion_to_weights_in_all_combinations(self):
        run_ranks(4, check_proportion, True)

    @ranks(4)
    def test_replicas_with_a_rank_of_weight_0():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        for kind, options in KINDS:
            params, optimizer = trained(kind, options, [1, 0], mesh, apart=True)
            assert (nbytes_of(optimizer) == 0) is (mesh.get_coordinate()[1] == 1), (kind, options)
            assert_same(wholes(params, optimizer), wholes(*trained(kind, options, None, mesh)), kind.__name__)


class SharesTest(unittest.TestCase):
    def test_shares_are_those_of_all_elements_with_a_mean_of_one(self):
        """Units count by their elements: there are 2 on the first rank, 6 + 20 and 20 on the others."""

        def placed(shape, *units):
            return Placed(shape, (3,), (Run(len(shape), Units.of(units)),))

        first, second = placed((2, 4), 1, 3, 0), placed((5, 8), 0, 1, 1)
        self.assertEqual(shares_of([first, second]), (0.125, 1.625, 1.25))
        replicas = [replace(each, mesh_shape=(2, 3), cuts=(Whole(), *each.cuts)) for each in (first, second)]
        self.assertEqual(shares_of(replicas), (0.125, 1.625, 1.25) * 2)
        for about_equal in ([placed((4, 4), 1, 2, 1)], [placed((0, 4), 1, 3, 0)], []):
            self.assertIsNone(shares_of(about_equal))


class AssignTest(unittest.TestCase):
    def test_loads_are_in_proportion_to_shares(self):
        stacks = [Stack((8, 8), float(cost)) for cost in (5, 5, 4, 4, 3, 3, 2, 2, 1, 1)]
        self.assertEqual(assign_roots(stacks, 3), assign_roots(stacks, 3, (1.0, 1.0, 1.0)))
        loads = assign_roots(stacks, 3, (2.0, 1.0, 0.0)).loads
        self.assertEqual(loads, (20.0, 10.0, 0.0))

    def test_ranks_that_share_a_matrix_have_shares(self):
        large = [Stack((64, 64), 100.0, blocks=4)]
        self.assertEqual(assign_roots(large, 4).splits, (4,))
        roots = assign_roots(large, 4, (0.0, 0.5, 1.5, 2.0))
        self.assertEqual((roots.of, roots.splits), (((2,),), (2,)))
        self.assertEqual(assign_roots(large, 4, (0.0, 2.0, 0.0, 2.0)).splits, (1,))


if __name__ == "__main__":
    unittest.main()
