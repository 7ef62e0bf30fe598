"""What programs written for FSDP2 rely on: their calls into its state, its outputs, its silence on the network."""

import copy
import gc
import itertools
import os
import unittest
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import collectives_seen, error_of, ranks, run_ranks
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.common_distributed import MultiThreadedTestCase
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from torch_ragged.fsdp import fully_shard


def stack(dim=6, layers=3):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(dim, dim), nn.Tanh()) for _ in range(layers)], nn.Linear(dim, 1))


def shard(model, fully_shard=fully_shard, **options):
    for block in model:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def local_batch(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(dist.get_rank()))


def whole_gradients(model):
    return [param.grad.full_tensor() for param in model.parameters()]


# -- outputs that have no storage of their own -------------------------------------------------------------------------


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x)


def check_wrapper_subclass_outputs():
    models = []
    for function in (torch_fully_shard, fully_shard):
        torch.manual_seed(0)
        models.append(shard(nn.Sequential(Scaled(), Scaled()), function))
        output = models[-1](TwoTensor(torch.ones(2, 4), torch.full((2, 4), 2.0)))
        assert isinstance(output, TwoTensor)
        output.sum().backward()
    for theirs, ours in zip(*map(whole_gradients, models), strict=True):
        assert torch.equal(ours, theirs)


class Weight(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(4.0))

    def forward(self):
        return TwoTensor(self.weight, self.weight)


def check_wrapped_parameter_stays_unsharded():
    """The output wraps the unsharded parameter, which is freed after backward only."""
    module = fully_shard(Weight(), reshard_after_forward=True)
    output = module()
    assert torch.equal(output.a.detach(), torch.arange(4.0))
    module.reshard()


# -- torch.compile -----------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.second(F.gelu(self.first(x)))


def check_compiled_blocks(backend, recomputes, takes_all):
    """Compiled before and after fully_shard, and gathered again or not: all combinations, or each of both once."""

    def run(block, x):
        return checkpoint(block, x, use_reentrant=False) if recomputes else block(x)

    torch.manual_seed(0)
    plain = nn.ModuleList(Block() for _ in range(2))
    once = [("before", not recomputes), ("after", recomputes)]
    for when, reshards in itertools.product(("before", "after"), (True, False)) if takes_all else once:
        torch._dynamo.reset()
        single, model = copy.deepcopy(plain), nn.Sequential(*copy.deepcopy(plain))
        blocks = list(model)
        for block in blocks if when == "before" else ():
            block.compile(backend=backend, fullgraph=True)
        shard(model, reshard_after_forward=reshards)
        for block in blocks if when == "after" else ():
            block.compile(backend=backend, fullgraph=True)
        model.forward = lambda x, blocks=blocks: run(blocks[1], run(blocks[0], x))
        for micro_batch in range(2):
            x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(micro_batch))
            model.set_requires_gradient_sync(micro_batch == 1)
            model(x[dist.get_rank()]).pow(2).mean().backward()
            (sum(single[1](single[0](part)).pow(2).mean() for part in x) / 2).backward()
        for mine, other in zip(model.parameters(), single.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), other.grad)


# -- pipelines ---------------------------------------------------------------------------------------------------------


def pipeline_layers():
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)) for _ in range(4)]


def check_pipeline(schedule):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    rank, layers = mesh.get_local_rank("pp"), pipeline_layers()
    count = 2 if schedule is ScheduleInterleaved1F1B else 1
    stages, modules = [], []
    for index in (rank + 2 * k for k in range(count)):
        length = 4 // (2 * count)
        module = nn.Sequential(*layers[index * length : (index + 1) * length])
        modules.append(shard(module, mesh=mesh["dp"], reshard_after_forward=False))
        stages.append(PipelineStage(module, index, 2 * count, torch.device("cpu"), group=mesh.get_group("pp")))
    schedule = schedule(stages if count > 1 else stages[0], 4, loss_fn=F.mse_loss)
    single = nn.Sequential(*pipeline_layers())
    expected = dict(single.named_parameters())
    optimizers = [torch.optim.SGD([p for m in modules for p in m.parameters()], 0.1), torch.optim.SGD(single.parameters(), 0.1)]
    for number in range(3):
        x, y = torch.randn(2, 2, 8, 4, generator=torch.Generator().manual_seed(number))
        data, losses = mesh.get_local_rank("dp"), []
        schedule.step(*([x[data]] if rank == 0 else []), **({"target": y[data], "losses": losses} if rank == 1 else {}))
        (sum(F.mse_loss(single(part), target) for part, target in zip(x, y, strict=True)) / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for k, module in enumerate(modules):
        first = (rank + 2 * k) * (4 // (2 * count))
        for name, param in module.named_parameters():
            layer, rest = name.split(".", 1)
            torch.testing.assert_close(param.full_tensor(), expected[f"{first + int(layer)}.{rest}"])


# -- second backward ---------------------------------------------------------------------------------------------------


def penalty(model, x):
    x = x.clone().requires_grad_()
    output = model(x).sum()
    (gradient,) = torch.autograd.grad(output, x, create_graph=True)
    return output + gradient.pow(2).sum()


def penalty_before_another_forward(model, x):
    clone = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(clone).sum(), clone, create_graph=True)
    return model(2 * x).sum() + gradient.pow(2).sum()


def penalty_after_another_backward(model, x):
    clone = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(clone).sum(), clone, create_graph=True)
    model(2 * x).sum().backward()
    return gradient.pow(2).sum()


def backward_with_graph(model, x):
    loss = model(x).pow(2).sum()
    loss.backward(create_graph=True)
    return loss


def check_create_graph(dim):
    for loss in (penalty, penalty_before_another_forward, penalty_after_another_backward, backward_with_graph):
        for reshards in (True, False):
            single, ranks = stack(dim).double(), dist.get_world_size()
            model = shard(copy.deepcopy(single), reshard_after_forward=reshards)
            model.set_reshard_after_backward(reshards)
            batch = torch.randn(ranks, 4, dim, generator=torch.Generator().manual_seed(1)).double()
            for part in batch:
                loss(single, part).backward()
            loss(model, batch[dist.get_rank()]).backward()
            for block in (*model, model):
                block.reshard()
            for mine, other in zip(model.parameters(), single.parameters(), strict=True):
                torch.testing.assert_close(mine.grad.full_tensor(), other.grad / ranks)
                assert not mine.grad.requires_grad


# -- collectives -------------------------------------------------------------------------------------------------------


# -- what else FSDP2 does ----------------------------------------------------------------------------------------------


def check_replicate_leaves_sharded_modules_alone():
    torch.manual_seed(0)
    single = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model = copy.deepcopy(single)
    fully_shard(model[1])
    replicate(model)
    batch = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))
    model(batch[dist.get_rank()]).pow(2).mean().backward()
    (sum(single(part).pow(2).mean() for part in batch) / 2).backward()
    for mine, other in zip(model.parameters(), single.parameters(), strict=True):
        gradient = mine.grad.full_tensor() if isinstance(mine, DTensor) else mine.grad
        torch.testing.assert_close(gradient, other.grad)
    assert [isinstance(param, DTensor) for param in model.parameters()] == [False, False, True, True]
    return error_of(torch_fully_shard, model[1])


class Pair(TwoTensor):
    """Gathers both of its tensors."""

    def fsdp_pre_all_gather(self, mesh):
        return (self.a, self.b), None

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        if out is None:
            return Pair(*outputs), outputs


def check_extension_on_meta():
    with torch.device("meta"):
        model = nn.Linear(6, 6, bias=False)
        model.weight = nn.Parameter(Pair(torch.empty(6, 6), torch.empty(6, 6)))
    fully_shard(model)
    missing = error_of(model, torch.ones(2, 6))
    model.to_empty(device="cpu")
    assert isinstance(model.weight.to_local(), Pair) and model.weight.to_local().device.type == "cpu"
    with torch.no_grad():
        model.weight.to_local().a.fill_(2.0 + dist.get_rank())
        model.weight.to_local().b.zero_()
    output = model(torch.ones(2, 6))
    rows = 6 // dist.get_world_size()
    expected = torch.arange(6).div(rows, rounding_mode="floor").add(2).mul(6.0).expand(2, 6)
    assert torch.equal(output.a.detach(), expected)
    return missing


def check_late_extension():
    model = fully_shard(nn.Linear(4, 4, bias=False))
    local = model.weight.to_local()
    local.fsdp_pre_all_gather, local.fsdp_post_all_gather = (lambda mesh: ((local,), None)), (lambda *args, out=None: None)
    model.weight._local_tensor = local
    return error_of(model, torch.ones(2, 4))


@unittest.skipIf(torch.__version__ < "2.13", "torch 2.11 cannot destroy the process groups of threads")
class ThreadsTest(MultiThreadedTestCase):
    """Ranks that are threads, as in torch's own tests: their process groups have no backend per device."""

    @property
    def world_size(self):
        return 2

    def setUp(self):
        environment = mock.patch.dict(os.environ)  # The harness has errors show C++ stacks, in later tests too.
        environment.start()
        self.addCleanup(environment.stop)
        super().setUp()
        self._spawn_threads()

    def test_a_step_on_ranks_that_are_threads(self):
        single = nn.Linear(4, 4, bias=False)
        with torch.no_grad():
            single.weight.copy_(torch.arange(16.0).view(4, 4))
        model = fully_shard(copy.deepcopy(single), mesh=init_device_mesh("cpu", (2,)))
        model._set_unshard_async_op(True)
        batch = torch.arange(16.0).view(2, 2, 4)
        model(batch[dist.get_rank()]).pow(2).mean().backward()
        (sum(single(part).pow(2).mean() for part in batch) / 2).backward()
        torch.testing.assert_close(model.weight.grad.full_tensor(), single.weight.grad)


class ClientsTest(unittest.TestCase):
    @ranks(4)
    def test_tensor_parallel_layers_are_sharded_one_by_one():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        torch.manual_seed(0)
        single = nn.Sequential(nn.Linear(7, 12), nn.Linear(12, 7))
        model = copy.deepcopy(single)
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        for layer in model:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        batch = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(1))
        output = model(batch[mesh.get_local_rank("dp")])
        assert type(output) is not torch.Tensor  # An AsyncCollectiveTensor, which nobody has waited for.
        output.pow(2).mean().backward()
        (sum(single(part).pow(2).mean() for part in batch) / 2).backward()
        for mine, other in zip(model.parameters(), single.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), other.grad)

    def test_outputs_may_be_wrapper_subclasses(self):
        run_ranks(2, check_wrapper_subclass_outputs)
        run_ranks(2, check_wrapped_parameter_stays_unsharded)

    def test_compiled_blocks_are_one_graph_each(self):
        for recomputes in (False, True):
            run_ranks(2, check_compiled_blocks, "aot_eager", recomputes, False)

    @pytest.mark.slow
    def test_compiled_blocks_are_one_graph_each_in_all_combinations(self):
        for recomputes in (False, True):
            run_ranks(2, check_compiled_blocks, "aot_eager", recomputes, True)

    @pytest.mark.slow
    def test_blocks_compiled_by_inductor(self):
        for recomputes in (False, True):
            run_ranks(2, check_compiled_blocks, "inductor", recomputes, True, timeout=600)

    @ranks(2)
    def test_a_compiled_step_does_not_trace_hooks():
        """Forward and backward in one compiled function: Dynamo compiles the model's own code, and nothing of the hooks."""
        model, single = shard(stack()), stack()
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()  # Of earlier tests of this process.

        @torch.compile(backend="aot_eager")
        def step(x):
            model(x).sum().backward()

        x = torch.ones(2, 6)
        step(x)
        single(x).sum().backward()
        for mine, other in zip(model.parameters(), single.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), other.grad)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= len(model) + 1

    def test_pipeline_schedules_reduce_gradients(self):
        for schedule in (ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B):
            run_ranks(4, check_pipeline, schedule)

    @ranks(2)
    def test_a_second_backward_that_gives_one_rank_no_gradients_is_reduced_on_all():
        """Rank 1 reaches the module again, but no parameter: it must still issue the reduce-scatter of the other one."""

        class Either(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.ones(4))

            def forward(self, x):
                return (x * self.weight).square() if dist.get_rank() == 0 else x.square()

        for reduces_unused in (True, False):
            model, x = fully_shard(Either()), torch.full((4,), 3.0, requires_grad=True)
            model.set_reduce_scatter_unused_params(reduces_unused)
            (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            gradient.sum().backward()
            # The gradient of 2 * x * weight**2 is 4 * x * weight, and the mean over ranks half of it.
            assert torch.equal(model.weight.grad.full_tensor(), torch.full((4,), 6.0))

    def test_second_backward_through_resharded_parameters(self):
        for dim in (6, 256):  # Weights of 256 have their gradients written in place.
            run_ranks(2, check_create_graph, dim)

    @ranks(1)
    def test_one_rank_issues_no_collective():
        single = stack()
        for options in ({}, {"mesh": init_device_mesh("cpu", (1, 1))}):
            model = shard(copy.deepcopy(single), **options)
            for _ in range(2):
                model.zero_grad()
                with CommDebugMode() as mode:
                    model(torch.ones(2, 6)).sum().backward()
                assert mode.get_total_counts() == 0
            single.zero_grad()
            single(torch.ones(2, 6)).sum().backward()
            for mine, other in zip(model.parameters(), single.parameters(), strict=True):
                assert torch.equal(mine.grad.full_tensor(), other.grad)

    @ranks(2)
    def test_micro_batches_on_unsharded_parameters_issue_nothing():
        """What stays unsharded between micro-batches is used as it is, and gathered anew after an optimizer step."""
        model, single, rank = shard(stack(), reshard_after_forward=False), stack(), dist.get_rank()
        optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (model, single)]
        batch = torch.randn(2, 3, 2, 6, generator=torch.Generator().manual_seed(0))
        for step in range(2):
            seen = []
            for micro_batch in range(3):
                is_last = micro_batch == 2
                model.set_requires_gradient_sync(is_last)
                model.set_reshard_after_backward(is_last and step == 0)
                model.set_is_last_backward(is_last)
                with CommDebugMode() as mode:
                    model(batch[rank, micro_batch]).sum().backward()
                seen.append((collectives_seen(mode), mode.get_total_counts()))
                (sum(single(part[micro_batch]).sum() for part in batch) / 2).backward()
            groups = 4
            assert seen[0] == ((groups, 0), groups), seen
            assert seen[1] == ((0, 0), 0), seen
            assert seen[2][0] == (0, groups), seen
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        # The last backward left everything unsharded: the step that followed is noticed.
        torch.testing.assert_close(model(batch[rank, 0]), single(batch[rank, 0]))
        for module in (*model, model):
            module.reshard()
        for mine, other in zip(model.parameters(), single.parameters(), strict=True):
            torch.testing.assert_close(mine.full_tensor(), other)

    @ranks(2)
    def test_float8_is_gathered_over_gloo():
        """Tensors of one byte are gathered over gloo, which knows no float8: torchao's fp8 all-gather."""
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.bool):
            model = nn.Linear(4, 6, bias=False)
            rows = torch.arange(24).reshape(6, 4).float().to(dtype)
            model.scale = nn.Parameter(rows, requires_grad=False)
            del model.weight
            model.forward = lambda model=model: model.scale.clone()
            fully_shard(model)
            assert torch.equal(model().view(torch.uint8), rows.view(torch.uint8))

    def test_replicate_leaves_sharded_modules_alone(self):
        for error in run_ranks(2, check_replicate_leaves_sharded_modules_alone):
            self.assertIn("fully_shard has already been applied", error)

    @ranks(2)
    def test_parameters_cut_by_columns_are_contiguous():
        for size in (8, 7, 1):  # 7 columns do not divide by two ranks, and one leaves a rank without any.
            torch.manual_seed(0)
            single = nn.Linear(size, 5, bias=False)
            model = fully_shard(copy.deepcopy(single), shard_placement_fn=lambda param: Shard(1))
            seen = []
            model.register_forward_pre_hook(lambda module, args: seen.append(module.weight.view(-1).clone()))
            x = local_batch(3, size)
            optimizer = torch.optim.AdamW(model.parameters(), 0.1)
            for _step in range(2):
                model(x).pow(2).sum().backward()
                assert model.weight.placements == (Shard(1),)
                for tensor in (model.weight, model.weight.grad):
                    assert tensor.to_local().is_contiguous()
                whole, gradient = model.weight.full_tensor(), model.weight.grad.full_tensor()
                assert torch.equal(seen[-1], whole.reshape(-1))
                inputs = [torch.empty_like(x) for _ in range(2)]
                dist.all_gather(inputs, x)
                single.zero_grad()
                with torch.no_grad():
                    single.weight.copy_(whole)
                (sum(single(part).pow(2).sum() for part in inputs) / 2).backward()
                torch.testing.assert_close(gradient, single.weight.grad)
                optimizer.step()
                optimizer.zero_grad()

    @ranks(2)
    def test_a_block_that_outlives_its_model_keeps_its_own_shards_only():
        """A block that outlives its model keeps no other block's shards, and is a root of its own then."""
        model = shard(stack())
        model(torch.ones(2, 6)).sum().backward()
        shards = [weakref.ref(param) for param in model.parameters()]
        block = model[1]
        kept = len(list(block.parameters()))
        del model
        gc.collect()
        assert sum(ref() is not None for ref in shards) == kept
        block.zero_grad()
        block(torch.ones(2, 6)).sum().backward()
        single = stack()[1]
        single(torch.ones(2, 6)).sum().backward()
        for mine, other in zip(block.parameters(), single.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), other.grad)

    def test_extension_types_start_on_the_meta_device(self):
        for error in run_ranks(2, check_extension_on_meta):
            self.assertIn("weight on the meta device: materialize all parameters before forward", error)

    def test_extension_methods_set_after_fully_shard_raise(self):
        for error in run_ranks(2, check_late_extension):
            self.assertIn("the local tensor of weight got fsdp_pre_all_gather after fully_shard", error)

    @ranks(2)
    def test_errors_are_those_that_fsdp2_raises_too():
        module = fully_shard(nn.Linear(4, 4))
        for call in (lambda: fully_shard(module), lambda: fully_shard(nn.Linear(4, 4), shard_placement_fn=lambda p: Shard(1))):
            for kind in (AssertionError, ValueError):
                try:
                    call()
                except kind:
                    continue
                raise RuntimeError("no error")
