"""Expert weights of four dimensions, (experts, 2, width, d): optimizers see a stack of matrices, under all that cuts them."""

import tempfile
import unittest

import torch
import torch.distributed as dist
from common import ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from torch_ragged import RaggedShard, checkpoint, transfer
from torch_ragged.fsdp import blocks, fully_shard, rows
from torch_ragged.optim import SOAP, Adam8bit, BlockPolicy, Muon, Shampoo, matrix_groups, muon_policy
from torch_ragged.spmd import Plan, parallelize

EXPERTS, WIDTH, DIM = 4, 6, 5
SHAPE = (EXPERTS, 2, WIDTH, DIM)


class Experts(nn.Module):
    """Gate and up of each expert in one weight, as the package dist-moe keeps them."""

    def __init__(self):
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(SHAPE, dtype=torch.float64))
        self.down = nn.Parameter(torch.randn(EXPERTS, DIM, WIDTH, dtype=torch.float64))

    def forward(self, x):
        gate, up = torch.einsum("nd,egwd->genw", x, self.gate_up)
        return torch.einsum("enw,edw->nd", gate.sigmoid() * up, self.down)


def make():
    torch.manual_seed(0)
    return Experts()


def gradients(step):
    return torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def stepped(param, make_optimizer, like=lambda gradient: gradient):
    """The whole parameter after three steps of the same gradients."""
    optimizer = make_optimizer([param])
    for step in range(3):
        param.grad = like(gradients(step))
        optimizer.step()
    return whole(param.detach())


def as_matrices(make_optimizer):
    """The same steps of one process in which each matrix is a parameter."""
    matrices = [nn.Parameter(each.clone()) for each in make().gate_up.detach().view(-1, WIDTH, DIM)]
    optimizer = make_optimizer(matrices)
    for step in range(3):
        for each, gradient in zip(matrices, gradients(step).view(-1, WIDTH, DIM), strict=True):
            each.grad = gradient.clone()
        optimizer.step()
    return torch.stack([each.detach() for each in matrices]).view(SHAPE)


OPTIMIZERS = {
    "Muon": lambda params: Muon(params, lr=0.1),
    "NorMuon": lambda params: Muon(params, lr=0.1, neuron_beta=0.9),
    "shared": lambda params: Muon(params, lr=0.1, row_blocks=2),
    "Shampoo": lambda params: Shampoo(params, lr=0.1),
    "SOAP": lambda params: SOAP(params, lr=0.1),
}
CUTS = [(RaggedShard((0,), (3, 1)),), (RaggedShard((0, 1, 2), (31, 17)),), (RaggedShard((), (0, 1)),)]
CUTS += [(Shard(dim),) for dim in range(4)]


class StackedPairsTest(unittest.TestCase):
    @ranks(2)
    def test_optimizers_step_each_matrix_as_a_parameter_of_its_own():
        mesh = init_device_mesh("cpu", (2,))
        for name, optimizer in OPTIMIZERS.items():
            expected = as_matrices(optimizer)
            assert torch.equal(stepped(make().gate_up, optimizer), expected), name
            for cut in CUTS if name == "Muon" else CUTS[1:2]:
                param = nn.Parameter(distribute_tensor(make().gate_up.detach(), mesh, cut))
                after = stepped(param, optimizer, lambda gradient: distribute_tensor(gradient, mesh, cut))
                assert torch.equal(after, expected), (name, cut)

    @ranks(2)
    def test_blocks_of_8_bit_states_are_those_of_each_matrix():
        mesh, shape = init_device_mesh("cpu", (2,)), (4, 2, 40, 24)
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))

        def after(param, like):
            optimizer = Adam8bit([param], lr=0.1, policy=BlockPolicy((8, 16)))
            for step in range(3):
                param.grad = like(torch.randn(shape, generator=torch.Generator().manual_seed(step)))
                optimizer.step()
            return whole(param.detach()).view(8, 40, 24)

        expected = after(nn.Parameter(weight.view(8, 40, 24).clone()), lambda gradient: gradient.view(8, 40, 24))
        assert torch.equal(after(nn.Parameter(weight.clone()), lambda gradient: gradient), expected)
        # The last one cuts blocks: states are of whole blocks nevertheless.
        for cut in (Shard(0), Shard(1), Shard(2), RaggedShard((0, 1, 2), (8, 32)), RaggedShard((0, 1), (5, 3)), Shard(3)):
            param = nn.Parameter(distribute_tensor(weight, mesh, [cut]))
            assert torch.equal(after(param, lambda gradient: distribute_tensor(gradient, mesh, [cut])), expected), cut

    @ranks(2)
    def test_groups_checkpoints_and_granularities_of_fully_shard():
        mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
        x = torch.randn(6, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

        def train(model, data, steps):
            optimizer = Muon(matrix_groups(model), lr=0.1)
            for _ in range(steps):
                model(data).pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            return optimizer

        single = make()
        assert [each.is_matrix for each in matrix_groups(single).decisions] == [True, True]
        train(single, x, 2)
        for policy in (lambda name, param: rows(3), lambda name, param: blocks(4, 2), muon_policy()):
            model = fully_shard(make(), mesh=mesh, orig_param_policy=policy)
            optimizer = train(model, x.chunk(2)[rank], 2)
            for name, param in model.named_parameters():
                torch.testing.assert_close(whole(param.detach()), single.get_parameter(name).detach(), rtol=1e-2, atol=1e-2)
            shared = [tempfile.mkdtemp() if rank == 0 else None]
            dist.broadcast_object_list(shared)
            checkpoint.save(shared[0], checkpoint.TrainState(model, optimizer))
            other = fully_shard(make(), mesh=mesh, orig_param_policy=lambda name, param: rows(WIDTH))
            loaded = Muon(matrix_groups(other), lr=0.1)
            checkpoint.load(shared[0], checkpoint.TrainState(other, loaded))
            for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
                assert torch.equal(whole(ours.detach()), whole(theirs.detach()))
                pair = [each.state[param]["momentum_buffer"] for each, param in ((loaded, ours), (optimizer, theirs))]
                assert torch.equal(*map(whole, pair)) and pair[0].placements == ours.placements

    @ranks(4)
    def test_expert_parallelism_under_fully_shard_and_under_plans_trains_as_one_process():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
        x = torch.randn(6, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        single = make()

        def train(model, data):
            optimizer = Muon(matrix_groups(model), lr=0.1)
            for _ in range(4):
                loss = model(data).pow(2).mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            return {name: whole(param.detach()) for name, param in model.named_parameters()}

        expected = train(single, x)
        plan = Plan().shard("gate_up|down", Shard(0), "ep").shard("<in:x>", Shard(0), "dp").unit("", "dp")
        for mode in ("eager", "static"):
            model = parallelize(make(), plan, mesh, mode=mode)
            for name, value in train(model, x).items():
                torch.testing.assert_close(value, expected[name], rtol=1e-2, atol=1e-2)
        # The same placements without a plan, and an engine that holds gates and ups of each expert in one matrix.
        model = make()
        for name, param in model.named_parameters():
            setattr(model, name, nn.Parameter(distribute_tensor(param.detach(), mesh["ep"], [Shard(0)])))
        fully_shard(model, mesh=mesh["dp"])
        assert torch.equal(whole(model.gate_up.detach()), make().gate_up), model.gate_up.placements
        engine = transfer.EngineLayout(torch.float64)
        half = EXPERTS // 2
        held = [(rank, ((half * rank, 0, 0, 0), (half, 2, WIDTH, DIM))) for rank in range(2)]
        engine.add("w13", SHAPE, held, parts=[("gate_up", SHAPE, (0, 0, 0, 0))])
        flow = transfer.plan({"gate_up": model.gate_up}, engine)
        rank = dist.get_rank()
        target = {"w13": torch.zeros(half, 2, WIDTH, DIM, dtype=torch.float64)} if rank < 2 else {}
        flow.run({"gate_up": model.gate_up}, target)
        if rank < 2:
            assert torch.equal(target["w13"], make().gate_up[half * rank : half * (rank + 1)])
