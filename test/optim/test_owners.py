"""muon_policy: which matrices stay whole, on which ranks; and that the optimizer then moves nothing and changes no bit."""

import math
import unittest

import torch
from common import error_of, fake_group, ranks
from tested_device import DEVICE
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from torch_ragged.fsdp import buffer_layouts, elements, fully_shard, plan_layout
from torch_ragged.offline._models import BUILT_IN
from torch_ragged.optim import Muon, muon_policy
from torch_ragged.optim._newton_schulz import newton_schulz_cost


class Shaped:
    def __init__(self, *shape):
        self.shape = shape


def planner(params, ranks):
    """What fully_shard gives a policy."""
    return lambda chosen: plan_layout(
        [(choice or elements()).tensor_spec(name, value.shape) for (name, value), choice in zip(params, chosen)], ranks
    )


def choose(policy, params, ranks):
    return policy.choose(params, ranks, planner(params, ranks))


def owners_of(layout, index, size):
    """The rank of each matrix of a tensor; all of them must be whole."""
    starts = range(layout.offsets[index], layout.offsets[index] + layout.tensors[index].numel, size)
    assert all(start // layout.shard_numel == (start + size - 1) // layout.shard_numel for start in starts)
    return [start // layout.shard_numel for start in starts]


class PolicyTest(unittest.TestCase):
    def test_experts_that_fill_shards_stay_whole_and_a_matrix_that_needs_padding_does_not(self):
        params = [("experts", Shaped(8, 16, 32)), ("large", Shaped(64, 64)), ("bias", Shaped(16))]
        policy = muon_policy()
        layout = choose(policy, params, 4)
        (decided,) = policy.groups
        self.assertEqual((decided.whole, decided.cut), (("experts",), ("large",)))
        self.assertEqual(len(owners_of(layout, 0, 512)), 8)
        # Whole, the large one alone would fill a shard of 4,096 elements where 2,052 are enough.
        self.assertLess(decided.padding, 4 * 8 * 600)
        self.assertAlmostEqual(decided.flight_time, 4 * 64 * 64 * 3 / 16 / 50e9, delta=1e-15)
        # If padding costs nothing, it stays whole, too; if it costs a thousand times as much, nothing that needs any does.
        free, dear = muon_policy(sent_bytes=1e-9), muon_policy(sent_bytes=8e3)
        choose(free, params, 4)
        self.assertEqual(free.groups[0].cut, ())
        self.assertEqual(free.groups[0].flight_time, 0)
        self.assertEqual(choose(dear, params, 4).shard_numel, planner(params, 4)([None] * 3).shard_numel)

    def test_buffers_are_rotated_so_that_ranks_share_the_expensive_matrices(self):
        params = [("wide", Shaped(4, 256)), ("square", Shaped(32, 32)), ("wide2", Shaped(4, 256)), ("wide3", Shaped(4, 256))]
        policy, owners = muon_policy(sent_bytes=1e-9), []
        for _ in range(8):
            layout = choose(policy, params, 4)
            owners += owners_of(layout, 1, 1024)
        self.assertEqual(sorted(owners), [0, 0, 1, 1, 2, 2, 3, 3])
        self.assertEqual(policy.imbalance(4), (1.0, 1.0))

    def test_what_muon_does_not_take_or_has_other_dimensions_is_not_kept_whole(self):
        params = [("embedding", Shaped(8, 8)), ("bias", Shaped(64)), ("conv", Shaped(2, 2, 2, 2, 8)), ("w", Shaped(8, 8))]
        policy = muon_policy(lambda name, param: name != "embedding", sent_bytes=1e-9)
        choose(policy, params, 4)
        self.assertEqual(policy.groups[0].whole, ("w",))

    def test_one_rank_keeps_the_plan_without_a_policy(self):
        """All matrices are at home there: a plan that keeps them whole takes as long, and no less."""
        policy = muon_policy()
        choose(policy, [("w", Shaped(8, 8))], 1)
        self.assertEqual((policy.groups[0].whole, policy.groups[0].cut), ((), ("w",)))

    def test_ranks_without_matrices_have_even_work(self):
        policy = muon_policy(lambda name, param: False)
        choose(policy, [("w", Shaped(8, 8))], 2)
        self.assertEqual(policy.imbalance(2), (1.0, 1.0))

    def test_no_plan_of_a_model_is_worse_than_without_a_policy(self):
        for model, size in (("qwen3-30b-a3b", 8), ("gpt-oss-120b", 8), ("gpt-oss-120b", 64), ("llama-3-70b", 512)):
            policy, total, without_padding = muon_policy(lambda name, _: not name.endswith("bias")), 0.0, 0.0
            blocks = [group for name, group in BUILT_IN[model]().groups.items() if name != "rest"][:6]
            for group in blocks:
                params = [(one.name, one) for one in group]
                layout, matrices = choose(policy, params, size), [p.shape for p in group if len(p.shape) in (2, 3)]
                decided = policy.groups[-1]
                taken = sum(math.prod(p.shape) for p in group if p.name in (*decided.whole, *decided.cut))
                today = 4 * taken * (size - 1) / size**2 / 50e9
                self.assertLessEqual(decided.padding_time + decided.flight_time, today * (1 + 1e-9), (model, size))
                total, without_padding = total + decided.padding_time + decided.flight_time, without_padding + today
                self.assertGreaterEqual(layout.shard_numel, sum(map(math.prod, matrices)) // size)
            if size == 8:
                self.assertLess(total, 0.65 * without_padding, model)
            found, bound = policy.imbalance(size)
            self.assertLess(found, bound * 1.02, (model, size))

    def test_wrong_numbers_are_refused(self):
        for name in ("bandwidth", "flops", "sent_bytes"):
            for bad in (0, "50e9"):
                text = error_of(lambda name=name, bad=bad: muon_policy(**{name: bad}))
                self.assertIn(f"ValueError: muon_policy {name} must be a positive number, got {bad!r}", text)
        self.assertIn("TypeError: muon_policy takes must be a function (name, parameter) -> bool", error_of(muon_policy, ["w"]))

    @fake_group(2)
    def test_the_imbalance_of_ranks_without_buffers_is_refused(self):
        policy = muon_policy()
        self.assertIn("none yet: pass the policy to fully_shard first; got 2", error_of(policy.imbalance, 2))
        fully_shard(nn.Linear(8, 8), orig_param_policy=policy)
        self.assertIn("over which fully_shard has cut buffers, 2; got 64", error_of(policy.imbalance, 64))


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.Parameter(torch.randn(4, 16, 8) / 4)
        self.first, self.second = nn.Linear(8, 16, bias=False), nn.Linear(8, 16, bias=False)
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(sum(torch.relu(x @ w.T) @ w for w in (*self.experts, self.first.weight, self.second.weight)))


def train(mesh, policy):
    torch.manual_seed(0)
    model = nn.Sequential(*(Experts() for _ in range(3)))
    for block in model:
        fully_shard(block, mesh=mesh, orig_param_policy=policy)
    fully_shard(model, mesh=mesh)
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.ndim > 1]},
        {"params": [p for p in params if p.ndim < 2], "algorithm": "adamw"},
    ]
    optimizer = Muon(groups, lr=0.02, check_gradients=False)
    for step in range(3):
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(10 * step + mesh.get_rank()))
        model(x).square().sum().backward()
        with CommDebugMode() as mode:
            optimizer.step()
        optimizer.zero_grad()
    return model, mode.get_total_counts()


class FullyShardTest(unittest.TestCase):
    @ranks(4)
    def test_a_step_with_all_matrices_at_home_issues_no_collective_and_changes_no_bit():
        mesh = init_device_mesh("cpu", (4,))
        policy = muon_policy(sent_bytes=1e-9)
        at_home, collectives = train(mesh, policy)
        moved, with_flights = train(mesh, None)
        assert collectives == 0 and with_flights == 4, (collectives, with_flights)
        assert [decided.cut for decided in policy.groups] == [()] * 3
        assert set(policy.groups[0].whole) == {"experts", "first.weight", "second.weight"}
        for (name, mine), theirs in zip(at_home.state_dict().items(), moved.state_dict().values()):
            if DEVICE == "cpu":  # A GPU's library chooses kernels by the addresses of parameters, which the layout gives.
                assert torch.equal(mine.full_tensor(), theirs.full_tensor()), name
            else:
                torch.testing.assert_close(mine.full_tensor(), theirs.full_tensor())
        layouts = list(buffer_layouts(at_home).values())
        assert len({layout.offsets for layout in layouts[:3]}) > 1, "equal blocks are rotated"

    @ranks(2)
    def test_a_matrix_that_tensor_parallelism_cuts_is_not_kept_whole():
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        layer = nn.Linear(8, 8, bias=False)
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh["tp"], [Shard(0)]))
        policy = muon_policy(sent_bytes=1e-9)
        fully_shard(layer, mesh=mesh["dp"], orig_param_policy=policy)
        assert policy.groups[0].whole == policy.groups[0].cut == ()

    def test_costs_are_those_of_newton_schulz(self):
        """Whole, the square matrix is on one rank, and the wide ones on the other: its work is what bounds the step."""
        policy = muon_policy(sent_bytes=1e-9, ns_steps=3)
        layout = choose(policy, [("square", Shaped(32, 32)), ("wide", Shaped(4, 128)), ("wide2", Shaped(4, 128))], 2)
        self.assertEqual(policy.groups[0].cut, ())
        (of_square,) = owners_of(layout, 0, 1024)
        self.assertEqual({*owners_of(layout, 1, 512), *owners_of(layout, 2, 512)}, {1 - of_square})
        costs = newton_schulz_cost(32, 32, 3), 2 * newton_schulz_cost(4, 128, 3)
        self.assertEqual(policy.imbalance(2), (costs[0] / (sum(costs) / 2), 1.0))
