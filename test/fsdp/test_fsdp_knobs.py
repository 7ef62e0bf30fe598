"""fully_shard's knobs, each against FSDP2's in the same test."""

import contextlib
import unittest
from unittest import mock

import torch
import torch.distributed as dist
from common import error_of, ranks
from fsdp_blocks import WIDTH, Block, assert_same_gradients, assert_same_training, batch, both, build, full_gradients
from tested_device import DEVICE
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, register_fsdp_forward_method
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.debug import CommDebugMode

from torch_ragged import RaggedShard
from torch_ragged.fsdp import ZERO1, FSDPGrad, fully_shard


def replicas_and_shards():
    """HSDP: two replicas of two shards."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def gathered(model):
    """Whether each block's parameters are gathered, or on their way."""
    return [module._ragged_states(False)[0].groups[0].is_gathered for module in model]


class Counting:
    """FSDP2's AllGather and ReduceScatter, by torch's collectives."""

    def __init__(self, collective):
        self.collective, self.calls = collective, 0

    def allocate(self, size, *, dtype, device):
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op=None, async_op=False):
        assert async_op  # The host goes on, while it runs.
        self.calls += 1
        options = {} if op is None else {"op": op}
        return self.collective(output_tensor, input_tensor, group=group, async_op=async_op, **options)


class OffloadTest(unittest.TestCase):
    @ranks(2)
    def test_shards_in_host_memory_train_as_fsdp2s():
        """Parameters and gradients are in host memory; on a mesh of GPUs, the model computes on these."""
        for pins in (False, True) if DEVICE != "cpu" else (False,):
            models = both(init_device_mesh("cpu", (2,)), offload_policy=CPUOffloadPolicy(pin_memory=pins))
            assert_same_training(models)
            for model in models:
                model(batch(0)).sum().backward()
                found = {tensor.to_local().device.type for p in model.parameters() for tensor in (p, p.grad)}
                assert found == {"cpu"}, found

    @ranks(4)
    def test_gradients_in_host_memory_are_the_sum_of_all_passes():
        """Also if a group is reduced twice in a pass, if a pass has raised, and with replicas."""
        for mesh in (init_device_mesh("cpu", (4,)), replicas_and_shards()):
            models = both(mesh, offload_policy=CPUOffloadPolicy(pin_memory=DEVICE != "cpu"))
            for model in models:
                for step in range(2):  # The second pass adds to .grad.
                    model(batch(step)).sum().backward()
                (model(batch(2)).sum() + model(batch(3)).sum()).backward()
            assert_same_gradients(models)
            model = models[1]
            expected = full_gradients(model)
            broken = model(batch(4))
            broken.register_hook(lambda gradient: 1 / 0)
            with contextlib.suppress(ZeroDivisionError):
                broken.sum().backward()
            model.zero_grad()
            for step in range(2):
                model(batch(step)).sum().backward()
            (model(batch(2)).sum() + model(batch(3)).sum()).backward()
            assert all(map(torch.equal, full_gradients(model), expected))


class StepTest(unittest.TestCase):
    @ranks(2)
    def test_the_next_forward_notices_the_step_of_any_kernel():
        """Without resharding after backward. Foreach and fused kernels do not change the version counters of DTensors."""
        for kernels in ({"foreach": False}, {"foreach": True}, {"fused": True}):
            losses = []
            for stays in (False, True):
                model = build(fully_shard, init_device_mesh("cpu", (2,)))
                model.set_reshard_after_backward(not stays)
                optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **kernels)
                for step in range(3):
                    losses.append(model(batch(step)).pow(2).mean())
                    losses[-1].backward()
                    optimizer.step()
                    optimizer.zero_grad()
            assert losses[:3] == losses[3:] and losses[0] != losses[2], (kernels, losses)


class ReplicaTest(unittest.TestCase):
    @ranks(4)
    def test_replicas_of_shards_train_as_fsdp2s():
        mesh = replicas_and_shards()
        models = both(mesh)
        parameter = next(models[2].parameters())
        assert parameter.placements[0] == Replicate() and isinstance(parameter.placements[1], RaggedShard)
        assert_same_training(models)
        assert_same_training(
            both(mesh, reshard_after_forward=False), accumulate=lambda m, i: m.set_requires_gradient_sync(i == 1)
        )
        assert_same_training(both(mesh), accumulate=lambda m, i: m.set_requires_all_reduce(i == 1))

    @ranks(4)
    def test_replicas_load_state_dicts_of_other_granularities():
        models = both(replicas_and_shards())
        models[1](batch(0)).sum().backward()
        torch.optim.SGD(models[1].parameters(), lr=0.1).step()  # Or all models have the same values.
        state = models[1].state_dict()
        models[2].load_state_dict(state)
        for name, value in models[2].state_dict().items():
            assert torch.equal(value.full_tensor(), state[name].full_tensor()), name

    @ranks(4)
    def test_replicas_exchange_nothing_while_they_do_not_reduce():
        """While replicas do not reduce, nothing goes between them, and .grad stays as it is."""
        mesh = init_device_mesh("cpu", (2, 2))
        model = build(fully_shard, mesh, blocks=1)
        model.set_requires_all_reduce(False)
        with torch.no_grad():
            model(batch(0))  # The first forward compares the replicas.
        with CommDebugMode() as mode:
            model(batch(0)).sum().backward()
        counts = {str(op).split(".")[-1]: n for op, n in mode.get_comm_counts().items()}
        assert counts and not any("all_reduce" in op or "allreduce" in op for op in counts), counts
        assert all(isinstance(p.grad, FSDPGrad) and p.grad.reduced is None for p in model.parameters())
        model.set_requires_all_reduce(True)
        with CommDebugMode() as mode:
            model(batch(1)).sum().backward()
        assert any("all_reduce" in str(op) or "allreduce" in str(op) for op in mode.get_comm_counts())
        single = nn.Sequential(Block())
        torch.manual_seed(0)
        single[0].__init__()
        rank = dist.get_rank()
        for other in range(4):
            for step in range(2):
                data = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + other))
                (single(data).sum() / 4).backward()
        for (name, mine), theirs in zip(model.named_parameters(), single.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, msg=f"rank {rank} {name}")

    @ranks(4)
    def test_a_reset_drops_what_was_reduced_within_replicas():
        """What was reduced within replicas is dropped with the rest, and its memory is freed."""
        model = build(fully_shard, init_device_mesh("cpu", (2, 2)), blocks=1)
        model.set_requires_all_reduce(False)
        logs = [group.memory.reduced for group in model._ragged_groups(recurse=True)]
        for log in logs:
            log.start()
        model(batch(0)).sum().backward()
        model(batch(0)).sum().backward()  # It is added to the first one.
        held = [sum(nbytes for _, nbytes in log.events) for log in logs]
        assert held == [group.layout.shard_numel * 4 for group in model._ragged_groups(recurse=True)], held
        model.reset_iter_state()
        assert all(sum(nbytes for _, nbytes in log.events) == 0 for log in logs)
        model.set_requires_all_reduce(True)
        model(batch(1)).sum().backward()
        kept = full_gradients(model)
        model.zero_grad()
        model(batch(1)).sum().backward()
        for mine, want in zip(kept, full_gradients(model), strict=True):
            assert torch.equal(mine, want)


class PrefetchTest(unittest.TestCase):
    @ranks(2)
    def test_chosen_modules_are_gathered_ahead_in_forward():
        """The all-gathers of chosen modules start when this one has its parameters: seen in what is gathered in forward."""
        model, seen = build(fully_shard, init_device_mesh("cpu", (2,))), []
        first, second, third = model
        model(batch(0)).sum().backward()
        first.up.register_forward_pre_hook(lambda *_: seen.append(gathered(model)))
        model(batch(0))
        assert seen.pop() == [True, True, False]  # By the order of the step before.
        first.set_modules_to_forward_prefetch([second, third])
        model(batch(0))
        assert seen.pop() == [True, True, True]
        first.set_modules_to_forward_prefetch([])
        model(batch(0)).sum()
        assert seen.pop() == [True, False, False]

    @ranks(2)
    def test_chosen_modules_are_gathered_ahead_in_backward():
        model, seen = build(fully_shard, init_device_mesh("cpu", (2,))), []
        model(batch(0)).sum().backward()
        model[0].set_modules_to_forward_prefetch([])
        model[2].set_modules_to_backward_prefetch([model[0]])
        model[2].down.register_full_backward_pre_hook(lambda *_: seen.append(gathered(model)))
        model(batch(0)).sum().backward()
        assert seen == [[True, False, True]], seen

    @ranks(2)
    def test_prefetch_changes_no_loss():
        mesh = init_device_mesh("cpu", (2,))
        theirs = build(torch_fully_shard, mesh)
        theirs[0].set_modules_to_forward_prefetch([theirs[1], theirs[2]])
        assert_same_training([theirs, build(fully_shard, mesh)])

    @ranks(2)
    def test_modules_that_are_not_sharded_cannot_be_prefetched():
        model = build(fully_shard, init_device_mesh("cpu", (2,)))
        assert "ValueError: expected modules that fully_shard was called on, got Linear" in error_of(
            model.set_modules_to_forward_prefetch, [nn.Linear(1, 1)]
        )


class KnobTest(unittest.TestCase):
    @ranks(4)
    def test_the_divide_factor_divides_gradients_as_fsdp2s():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for where in (mesh, replicas_and_shards()):
            models = both(where)
            for model in models:
                for module in (*model, model):
                    module.set_gradient_divide_factor(8.0)
                    module.set_force_sum_reduction_for_comms(True)
                model(batch(0)).sum().backward()
            assert_same_gradients(models)
        assert error_of(models[1][0].set_gradient_divide_factor, 0) == (
            "ValueError: the gradient divide factor must be a positive number, got 0"
        )

    @ranks(2)
    def test_every_backward_reduces_but_for_zero1():
        """Every backward reduces and sets ``.grad``, as FSDP2's last one does; only ZERO1 waits for the last one."""
        mesh = init_device_mesh("cpu", (2,))
        theirs, ours = build(torch_fully_shard, mesh), build(fully_shard, mesh)
        for model in (theirs, ours):
            model.set_is_last_backward(model is theirs)
            model(batch(0)).sum().backward()
        assert_same_gradients([theirs, ours])
        zero1 = build(fully_shard, mesh, placements=ZERO1)
        zero1.set_is_last_backward(False)
        zero1(batch(0)).sum().backward()
        assert all(isinstance(param.grad, FSDPGrad) for param in zero1.parameters())

    @ranks(2)
    def test_custom_collectives_are_used():
        mesh = init_device_mesh("cpu", (2,))
        theirs, ours = build(torch_fully_shard, mesh), build(fully_shard, mesh)
        gather, scatter = Counting(dist.all_gather_into_tensor), Counting(dist.reduce_scatter_tensor)
        ours[0].set_custom_all_gather(gather)
        ours[0].set_custom_reduce_scatter(scatter)
        for model in (theirs, ours):
            model(batch(0)).sum().backward()
        assert (gather.calls, scatter.calls) == (2, 1)
        assert_same_gradients([theirs, ours])

    @ranks(2)
    def test_the_all_reduce_hook_sees_the_reduced_shard():
        mesh, shards = init_device_mesh("cpu", (2,)), []
        theirs, ours = build(torch_fully_shard, mesh), build(fully_shard, mesh)

        def halve(shard):
            shards.append(shard.numel())
            shard.div_(2)

        for model in (theirs, ours):
            model[1].set_all_reduce_hook(halve)
            model(batch(0)).sum().backward()
        assert len(shards) == 2
        assert_same_gradients([theirs, ours])
        assert "pass no stream" in error_of(lambda: ours.set_all_reduce_hook(halve, stream=1))

    @ranks(2)
    def test_gradient_buffers_and_unused_parameters_change_no_loss():
        models = both(init_device_mesh("cpu", (2,)))
        for model in models[1:]:
            model.set_reduce_scatter_max_input_buffers(3)
            model.set_reduce_scatter_unused_params(True)
        assert_same_training(models)
        assert error_of(models[1].set_reduce_scatter_max_input_buffers, 0).startswith(
            "ValueError: max_input_buffers must be a positive"
        )
        assert error_of(models[1].set_reduce_scatter_max_input_buffers, True).startswith(
            "TypeError: max_input_buffers must be an int"
        )

    @ranks(2)
    def test_the_next_forward_waits_once_for_the_optimizers_event():
        model = build(fully_shard, init_device_mesh("cpu", (2,)))
        model(batch(0)).sum().backward()  # Its root is known from now on.
        event, waits = mock.Mock(spec=torch.Event), []
        event.wait.side_effect = lambda: waits.append(model[0]._ragged_states(False)[0].groups[0].is_unsharded)
        model[1].set_post_optim_event(event)
        model.set_reshard_after_forward(True)
        model(model(batch(0)))
        assert waits == [False]  # Once, before anything was gathered.

    @ranks(2)
    def test_a_module_that_backward_does_not_need_is_not_gathered_for_it():
        """A module whose parameters backward does not need is not gathered for it."""
        mesh = init_device_mesh("cpu", (2,))
        embed = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4))
        fully_shard(embed[0], mesh=mesh)
        fully_shard(embed, mesh=mesh)
        embed[0].set_unshard_in_backward(False)
        loss = embed(torch.arange(8)).sum()
        with CommDebugMode() as mode:
            loss.backward()
        counts = {str(op).split(".")[-1]: n for op, n in mode.get_comm_counts().items()}
        assert not any("all_gather" in op or "allgather" in op for op in counts), counts
        assert embed[0].weight.grad is not None

    @ranks(2)
    def test_ignored_parameters_stay_plain_and_their_gradients_local():
        mesh = init_device_mesh("cpu", (2,))
        layer = nn.Linear(4, 4)
        fully_shard(layer, mesh=mesh, ignored_params={layer.bias})
        layer(torch.full((1, 4), float(dist.get_rank()))).sum().backward()
        assert type(layer.bias) is nn.Parameter and layer.bias.grad.tolist() == [1.0] * 4
        assert layer.weight.grad.full_tensor().tolist() == [[0.5] * 4] * 4

    @ranks(2)
    def test_a_registered_method_gathers_as_forward_does():
        mesh = init_device_mesh("cpu", (2,))
        models = both(mesh)
        for model in models:
            register_fsdp_forward_method(model[0], "logits")
            model[0].logits(batch(0)).sum().backward()
            assert isinstance(model[0].up.weight, DTensor)
        assert_same_gradients(models)
