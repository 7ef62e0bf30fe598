"""gradient_factors: what it says of each parameter is what a backward does."""

import contextlib
import unittest

import torch
import torch.distributed as dist
from common import error_of, fake_group, ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from torch_ragged.fsdp import HIERARCHICAL, MixedPrecisionPolicy, SameBits, fully_shard, gradient_factors, monitor
from torch_ragged.spmd import Plan, parallelize


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.expert = nn.Linear(1, 2, bias=False), nn.Linear(2, 1, bias=False)

    def forward(self, x):
        return self.dense(x).sum() + self.expert(torch.ones(1, 2)).sum()


def two_meshes(divisor=None, **options):
    """Experts over half of the ranks, the dense layer over all; each rank's gradient of each weight is 1."""
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))
    model = nn.Sequential(Layer(), Layer())
    for layer in model:
        expert = fully_shard(layer.expert, mesh=pairs["edp"], **options)
        if divisor:
            expert.set_gradient_divide_factor(divisor)
        fully_shard(layer, mesh=init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)), **options)
    return model


class Doubling:
    """A custom reduce-scatter that adds everything twice."""

    def __call__(self, output, buffer, group, op, async_op=False):
        dist.reduce_scatter_tensor(output, buffer * 2, op, group)


class FactorTest(unittest.TestCase):
    def test_the_table_folds_equal_layers(self):
        with fake_group(4):
            text = str(gradient_factors(two_meshes(), loss_scale=0.5))
            self.assertEqual(
                text.splitlines(),
                [
                    "parameter            summed over  divided by  factor  if each rank has 1",
                    "*.dense.weight (2)   dp (4)       4           0.125   0.5",
                    "*.expert.weight (2)  edp (2)      2           0.25    0.5",
                ],
            )
            self.assertEqual(gradient_factors(two_meshes(4))["1.expert.weight"].factor, 0.25)
            self.assertIn("call fully_shard first", error_of(lambda: gradient_factors(Layer())))

    @ranks(2)
    def test_with_same_bits_it_is_a_mean_over_pieces():
        model = fully_shard(Layer(), mesh=init_device_mesh("cpu", (2,)))
        SameBits(model, torch.optim.SGD(model.parameters(), lr=0.1), pieces=6)
        for context in (contextlib.nullcontext(), monitor(model)):
            with context:
                factors = gradient_factors(model)
                assert [tuple(vars(each).values())[1:5] for each in factors] == [("pieces (6)", 6, 6.0, 1 / 6)] * 2, str(
                    factors
                )

    @ranks(4)
    def test_it_is_what_a_backward_does():
        squares = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        everyone = init_device_mesh("cpu", (4,))
        narrow = MixedPrecisionPolicy(torch.float16, torch.float16)
        models = [two_meshes(), two_meshes(4), two_meshes(mp_policy=narrow)]
        for options in (
            {"mesh": squares},
            {"mesh": squares, "placements": HIERARCHICAL},
            {"mesh": everyone, "weights": [3, 0, 2, 1]},
            {"mesh": everyone, "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)},
        ):
            models.append(fully_shard(Layer(), **options))
        for model in models[-2:]:
            model.set_gradient_divide_factor(8)
        for number, model in enumerate(models):
            found = gradient_factors(model, check=True)
            assert all(p.grad is None for p in model.parameters()), number  # Nothing has changed.
            layers = list(model) if isinstance(model, nn.Sequential) else [model]
            for layer in layers:
                layer(torch.ones(1, 1)).backward()
            for name, param in model.named_parameters():
                assert torch.equal(param.grad.full_tensor().float(), torch.full(param.shape, found[name].of_equal)), (
                    number,
                    name,
                )

        model = fully_shard(Layer(), mesh=squares, placements=HIERARCHICAL)
        model.set_reduce_wire(torch.bfloat16)
        model.set_gradient_divide_factor(3)
        gradient_factors(model, check=True)  # 2 / 3 is rounded between the two steps, which is no other factor.

    @ranks(2)
    def test_a_collective_that_adds_otherwise_is_found_on_all_ranks():
        model = fully_shard(Layer(), mesh=init_device_mesh("cpu", (2,)))
        model.set_custom_reduce_scatter(Doubling())
        assert gradient_factors(model)["dense.weight"].of_equal == 1.0
        error = error_of(lambda: gradient_factors(model, check=True))
        assert "ones of all ranks became" in error and "and not 1" in error, error
        model = fully_shard(Layer(), mesh=init_device_mesh("cpu", (2,)))
        model.set_requires_gradient_sync(False)
        model(torch.ones(1, 1)).backward()
        assert "not in .grad yet" in error_of(lambda: gradient_factors(model, check=True))

    @ranks(2)
    def test_a_plan_adds_and_does_not_divide():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        plan = Plan().shard("<in:input>", Shard(0), "dp").unit("0", "dp").default(Replicate())
        model = parallelize(nn.Sequential(nn.Linear(1, 2, bias=False)), plan, mesh)
        (found,) = gradient_factors(model, check=True)
        assert (found.divided_by, found.factor, found.ranks) == (1.0, 1.0, 2), found


if __name__ == "__main__":
    unittest.main()
