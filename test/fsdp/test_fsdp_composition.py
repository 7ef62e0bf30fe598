"""fully_shard in programs that it does not own: calls in any order, DDP around it, modules made, taken apart and deleted.

Torch's own tests of FSDP2 check most of this too; ``docs/fsdp2_tests.md`` is about those.
"""

import copy
import gc
import unittest
import weakref

import torch
import torch.distributed as dist
from common import error_of, ranks, run_ranks
from fsdp_collectives import counted_calls
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from torch_ragged.fsdp import FSDPGrad, FSDPModule, MixedPrecisionPolicy, fully_shard, rows, share_comm_ctx
from torch_ragged.fsdp.gates._untrained import sharded_originals

WIDTH, WORDS = 8, 11


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Recomputed(Block):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class Behind(nn.Module):
    """Each checkpoint is around a block and an op behind it, which saves the output of the block."""

    def __init__(self, recomputes):
        super().__init__()
        self.blocks, self.recomputes = nn.Sequential(Block(), Block()), recomputes

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(lambda x, block=block: block(x).sin(), x, use_reentrant=False) if self.recomputes else block(x).sin()
        return x


class Language(nn.Module):
    """A head that a caller may run by itself, on parts of the hidden states."""

    def __init__(self, tied=False):
        super().__init__()
        self.embed, self.body, self.norm = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, words, without_head=False):
        hidden = self.norm(self.body(self.embed(words)))
        return hidden if without_head else self.head(hidden)


def seeded(build):
    torch.manual_seed(0)
    return build()


def data(step, rank=None):
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def words(step):
    return torch.randint(0, WORDS, (2, 8), generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def reduce(alone):
    """What DDP does with the gradients of the model of one process."""
    for param in alone.parameters():
        if param.grad is not None:
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_same(model, alone):
    for (name, param), (_, expected) in zip(model.named_parameters(), alone.named_parameters(), strict=True):
        torch.testing.assert_close(whole(param), expected, rtol=1e-4, atol=1e-6, msg=name)
        assert (param.grad is None) == (expected.grad is None), name
        if param.grad is not None:
            torch.testing.assert_close(whole(param.grad), expected.grad, rtol=1e-4, atol=1e-6, msg=name)


def chunked_step(model, step, between=lambda: None):
    """A loss by chunks: backward of the head for each of them, then that of the rest."""
    hidden, grads = model(words(step), without_head=True), []
    for chunk in hidden.detach().chunk(4, dim=1):
        chunk = chunk.contiguous().requires_grad_()
        model.head(chunk).pow(2).sum().backward()
        grads.append(chunk.grad)
        between()
    return hidden, torch.cat(grads, dim=1)


def shard_by_rows(model):
    for module in (*model[:2], model):
        fully_shard(module, orig_param_policy=lambda fqn, p: rows(3))
    return model


def tied_across_groups():
    """FSDP2 raises in the first forward; here ``fully_shard`` does, also in the call for the module around."""
    model = seeded(lambda: Language(tied=True))
    fully_shard(model.embed)
    across = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    across[1].weight = across[0].weight
    fully_shard(across[0])
    return error_of(fully_shard, model.head), error_of(fully_shard, across)


class CallOrderTest(unittest.TestCase):
    @ranks(2)
    def test_two_forwards_of_nested_groups_are_recomputed_in_one_backward():
        """Preference training: one loss of two forwards, on groups within groups, each with activation checkpointing."""
        for reshard in (True, False):
            alone = seeded(lambda: nn.Sequential(Recomputed(), Recomputed()))
            model = copy.deepcopy(alone)
            for block in model:
                for module in (block.up, block.down, block):
                    fully_shard(module, reshard_after_forward=reshard)
            fully_shard(model, reshard_after_forward=reshard)
            for each in (model, alone):
                chosen, rejected = each(data(0)), each(data(1))
                (chosen.sum() - rejected.sum()).pow(2).backward()
            reduce(alone)
            assert_same(model, alone)

    @ranks(2)
    def test_a_recomputation_for_a_node_behind_a_group_all_gathers_for_its_backward():
        """The checkpoint is around a block and an op behind it, whose node backward reaches before it reaches the block."""
        calls = {}
        for recomputes in (False, True):
            model = seeded(lambda recomputes=recomputes: Behind(recomputes))
            for block in model.blocks:
                fully_shard(block)
            fully_shard(model)
            groups = [group for block in model.blocks for group in block._ragged_fsdp_state.groups]
            calls[recomputes] = counted_calls(groups, lambda model=model: model(data(0)).sum().backward())
        assert calls[True] == calls[False] and calls[True][0] == 4, calls

    @ranks(2)
    def test_a_head_runs_in_chunks_outside_of_forward():
        """A group of which forward runs a part; the other module runs alone, several times, with a backward each."""
        for tied, reshard in ((False, True), (False, False), (True, True)):
            alone = seeded(lambda: Language(tied))
            model = copy.deepcopy(alone)
            fully_shard(model.body, reshard_after_forward=reshard)
            fully_shard([model.norm, model.head] + [model.embed] * tied, reshard_after_forward=reshard)
            fully_shard(model, reshard_after_forward=reshard)
            for step in range(3):
                for each in (model, alone):
                    each.zero_grad(set_to_none=step != 1)
                    hidden, grad = chunked_step(each, step)
                    hidden.backward(grad)
                reduce(alone)
                assert_same(model, alone)

    @ranks(2)
    def test_a_head_stays_unsharded_over_its_chunks():
        model = seeded(Language)
        fully_shard([model.norm, model.head])
        fully_shard(model)
        for step in range(2):
            model.head.set_reshard_after_forward(False)
            model.head.set_reshard_after_backward(False)
            seen = []
            hidden, grad = chunked_step(model, step, lambda: seen.append(isinstance(model.head.weight, DTensor)))
            assert seen == [False] * 4, seen
            model.head.set_reshard_after_forward(True)
            model.head.set_reshard_after_backward(True)
            model.head.reshard()
            assert isinstance(model.head.weight, DTensor)
            hidden.backward(grad)
            assert all(isinstance(param.grad, DTensor) for param in model.parameters())

    @ranks(2)
    def test_microbatches_with_all_groups_unsharded_ahead_are_reduced_in_the_last():
        """One forward, one backward per microbatch, as a pipeline's stage does; gradients are reduced in the last backward."""
        for reshard_after_backward in (False, True):
            alone = seeded(lambda: nn.Sequential(Block(), Block()))
            model = copy.deepcopy(alone)
            for module in (*model, model):
                fully_shard(module, reshard_after_forward=False)
            sharded = model[0].up.weight
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.unshard(async_op=True)
            for step in range(3):
                last = step == 2
                model.set_requires_gradient_sync(last)
                model.set_is_last_backward(last)
                if not reshard_after_backward:
                    model.set_reshard_after_backward(last)
                for each in (model, alone):
                    each(data(step)).pow(2).sum().backward()
                assert isinstance(sharded.grad, FSDPGrad) != last
                assert isinstance(sharded.grad, DTensor) == last
            reduce(alone)
            assert_same(model, alone)

    @ranks(2)
    def test_modules_may_be_unsharded_before_the_first_forward():
        alone = seeded(lambda: nn.Sequential(Block(), Block()))
        model = copy.deepcopy(alone)
        for module in (*model, model):
            fully_shard(module)
        model.unshard(async_op=True).wait()  # The root has no parameters of its own.
        model[0].unshard()
        for param, expected in zip(model[0].parameters(), alone[0].parameters(), strict=True):
            assert not isinstance(param, DTensor)
            torch.testing.assert_close(param, expected, rtol=0, atol=0)
        assert isinstance(model[1].up.weight, DTensor)

    @ranks(2)
    def test_roots_that_share_streams_run_as_one_model():
        alone = seeded(lambda: nn.Sequential(Block(), Block(), Block()))
        model = copy.deepcopy(alone)
        share_comm_ctx([fully_shard(block) for block in model])
        for each in (model, alone):
            each(data(0)).pow(2).sum().backward()
        reduce(alone)
        assert_same(model, alone)


class AroundTest(unittest.TestCase):
    @ranks(2)
    def test_ddp_reduces_what_fully_shard_ignores():
        """DDP reduces what ``fully_shard`` was told to ignore, inside the sharded module and outside of it."""
        alone = seeded(lambda: nn.Sequential(Block(), nn.Linear(WIDTH, WIDTH)))
        inner = copy.deepcopy(alone)
        fully_shard(inner[0], ignored_params=set(inner[0].norm.parameters()))
        sharded = [name for name, param in inner.named_parameters() if isinstance(param, DTensor)]
        assert sharded == ["0.up.weight", "0.up.bias", "0.down.weight", "0.down.bias"]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(inner, sharded)
        model = DistributedDataParallel(inner)
        for each in (model, alone):
            optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2, foreach=False)
            for step in range(3):
                optimizer.zero_grad()
                each(data(step)).pow(2).sum().backward()
                if each is alone:
                    reduce(alone)
                optimizer.step()
        assert_same(inner, alone)

    @ranks(2)
    def test_a_mesh_of_process_groups_is_as_one_that_is_initialized():
        """``DeviceMesh.from_group`` gives the same mesh as ``init_device_mesh`` does, for shards and for replicas of shards."""
        rank, world = dist.get_rank(), dist.get_world_size()
        replicas = [dist.new_group([r]) for r in range(world)][rank]
        names = ("replicate", "shard")
        shards = dist.distributed_c10d._get_default_group()
        meshes = [
            DeviceMesh.from_group(shards, "cpu", mesh_dim_names=("shard",)),
            DeviceMesh.from_group([replicas, shards], "cpu", mesh=torch.arange(world).view(1, world), mesh_dim_names=names),
        ]
        plain = [init_device_mesh("cpu", (world,)), init_device_mesh("cpu", (1, world), mesh_dim_names=names)]
        for mesh, expected in zip(meshes, plain, strict=True):
            grads = []
            for each in (mesh, expected):
                model = fully_shard(seeded(Block), mesh=each)
                model(data(0)).pow(2).sum().backward()
                grads.append([param.grad.full_tensor() for param in model.parameters()])
            torch.testing.assert_close(*grads, rtol=0, atol=0)

    @ranks(2)
    def test_inputs_are_cast_for_each_module_of_a_list():
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)

        class Widening(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

            def forward(self, x):
                return self.second(self.first(x).float())

        model = seeded(Widening)
        fully_shard([model.first, model.second], mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        out = model(data(0))
        assert out.dtype == torch.bfloat16
        out.sum().backward()
        assert all(param.grad is not None and param.grad.dtype == torch.float32 for param in model.parameters())


class Scaled(nn.Linear):
    """As transformers' replicated norms under tensor parallelism: forward registers a hook that changes the gradient."""

    seen = None

    def forward(self, x):
        if self.seen is None:
            self.seen = seen = []
            self.weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.mul_(3).sum().item()))
        return super().forward(x)


class GateAndUp(nn.Module):
    """Experts with two matrices joined along dimension 1: under tensor parallelism each rank has a part of both."""

    def __init__(self, tp):
        super().__init__()
        whole = torch.arange(3 * 8 * 5.0).reshape(3, 8, 5)
        gate, up = whole.chunk(2, 1)
        rank = tp.get_local_rank()
        local = torch.cat([gate.chunk(2, 1)[rank], up.chunk(2, 1)[rank]], 1)
        placed = DTensor.from_local(local, tp, [_StridedShard(1, split_factor=2)], shape=whole.shape, stride=whole.stride())
        self.weight, self.whole = nn.Parameter(placed), whole

    def forward(self, x):
        gate, up = torch.einsum("eof,bf->beo", self.weight.to_local(), x).chunk(2, -1)
        return gate * up


class ModuleTest(unittest.TestCase):
    @unittest.skipIf(torch.__version__ < "2.13", "torch itself makes no DTensor with a _StridedShard alone")
    @ranks(4)
    def test_weights_joined_along_a_later_dimension_are_sharded_under_tensor_parallelism():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        inputs = torch.ones(2, 5)
        for granularity in (None, rows(1)):
            model = GateAndUp(mesh["tp"])
            fully_shard(model, mesh=mesh["dp"], orig_param_policy=lambda fqn, param: granularity)
            assert isinstance(model.weight.placements[1], _StridedShard), model.weight
            assert torch.equal(model.weight.full_tensor(), model.whole)
            model(inputs).sum().backward()
            plain = model.whole.clone().requires_grad_()
            gate, up = torch.einsum("eof,bf->beo", plain, inputs).chunk(2, -1)
            (gate * up).sum().backward()
            torch.testing.assert_close(model.weight.grad.full_tensor(), plain.grad)

    @ranks(2)
    def test_a_hook_that_forward_registers_on_a_parameter_sees_its_gradient():
        mesh, found = init_device_mesh("cpu", (2,)), []
        for shard in (torch_fully_shard, fully_shard):
            model = shard(seeded(lambda: nn.Sequential(Scaled(WIDTH, WIDTH), Scaled(WIDTH, 3))), mesh=mesh)
            for _ in range(2):
                model(torch.ones(2, WIDTH) * (1 + dist.get_rank())).square().sum().backward()
            found.append([*(param.grad.full_tensor() for param in model.parameters()), [torch.tensor(m.seen) for m in model]])
            assert all(len(module.seen) == 2 for module in model), [module.seen for module in model]
        torch.testing.assert_close(found[1], found[0])

    @ranks(2)
    def test_a_wrapper_is_sharded_around_a_sharded_module():
        """accelerate does this: a CheckpointWrapper answers for each attribute of the module inside it."""
        mesh, steps = init_device_mesh("cpu", (2,)), []
        for shard in (torch_fully_shard, fully_shard):
            model = seeded(lambda: nn.Sequential(*(checkpoint_wrapper(Block()) for _ in range(2))))
            for wrapper in model:
                shard(wrapper._checkpoint_wrapped_module, mesh=mesh)
                assert fully_shard.state(wrapper) is None
                shard(wrapper, mesh=mesh)
            shard(model, mesh=mesh)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(3):
                loss = model(torch.ones(2, WIDTH) * (1 + dist.get_rank())).square().sum()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                steps.append(loss.detach())
        assert [state.fqn for state in map(fully_shard.state, model[0].modules()) if state][:1] == ["0"]
        torch.testing.assert_close(steps[3:], steps[:3])
        assert steps[0] != steps[2], steps

    @ranks(2)
    def test_modules_may_be_sharded_as_they_are_made():
        """Parameters of earlier layers are freed meanwhile, and new ones get their ids: none is taken for tied."""
        model = nn.Sequential()
        for _ in range(8):
            model.append(fully_shard(Block()))
            gc.collect()
        fully_shard(model)
        model(data(0)).sum().backward()
        assert all(param.grad is not None for param in model.parameters())

    @ranks(2)
    def test_names_are_those_of_the_plain_model():
        alone = seeded(lambda: nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 5)))
        theirs, ours = copy.deepcopy(alone), copy.deepcopy(alone)
        for module in (*theirs[:2], theirs):
            torch_fully_shard(module)
        shard_by_rows(ours)
        names = [name for name, _ in alone.named_parameters()]
        assert isinstance(ours, FSDPModule) and isinstance(ours[0], Block)
        assert [n for n, _ in ours.named_parameters()] == names == list(ours.state_dict()) == list(theirs.state_dict())

    @ranks(2)
    def test_slices_of_a_sharded_container_are_plain_containers():
        """What indexing and constructing a sharded container makes is a container of the original class."""
        for shard in (torch_fully_shard, fully_shard):
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            layers = nn.ModuleDict({"list": nn.ModuleList([Block(), Block()])})
            for each in (model, *layers["list"]):
                shard(each)
            assert type(model[:1]) is nn.Sequential and model[:1][0] is model[0]
            assert type(layers["list"][1:]) is nn.ModuleList
            made = type(model)(nn.Linear(2, 2))
            assert type(made) is nn.Sequential and len(made) == 1 and type(type(model[:1])()) is nn.Sequential
            assert type(type(layers["list"][0])()) is Block

    @ranks(2)
    def test_deleted_model_releases_storage():
        model = shard_by_rows(seeded(lambda: nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 5))))
        optimizer = torch.optim.AdamW(model.parameters())
        model(data(0)).pow(2).mean().backward()
        optimizer.step()
        del optimizer
        storages = [weakref.ref(group.sharded.flat) for state in model._ragged_states(True) for group in state.groups]
        storages += [weakref.ref(group.encoding.buffer.flat) for state in model._ragged_states(True) for group in state.groups]
        assert all(each() is not None for each in storages)
        del model
        gc.collect()
        assert all(each() is None for each in storages)

    @ranks(2)
    def test_replaced_parameters_are_forgotten_once_the_user_lets_go():
        """Of what fully_shard has replaced, only what the user still holds is remembered, to refuse it as tied."""

        class Alone(nn.Module):
            def __init__(self, value):
                super().__init__()
                self.let_go = value

        value = nn.Parameter(torch.ones(4))
        fully_shard(Alone(value))
        assert "let_go is tied to let_go" in error_of(fully_shard, Alone(value))
        assert "let_go" in sharded_originals.values()
        del value
        gc.collect()
        assert "let_go" not in sharded_originals.values()

    def test_parameters_tied_across_groups_are_an_error(self):
        for in_another, around in run_ranks(2, tied_across_groups):
            self.assertIn("ValueError: weight is tied to weight, which another fully_shard has sharded", in_another)
            self.assertIn("is tied to weight, which another fully_shard has sharded", around)
