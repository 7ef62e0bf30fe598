"""Pipeline schedules of torch.distributed.pipelining over stages that are sharded: parameters are those of one process."""

import unittest

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import error_of, ranks, run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.flop_counter import FlopCounterMode

from torch_ragged.fsdp import ZERO1, ZERO2, ZERO3, MixedPrecisionPolicy, fully_shard

SINGLE = ("GPipe", "1F1B")
MULTI = ("Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV", "LoopedBFS")
MICROBATCHES = 4
# The wide layers' weights are large enough that matmuls write their gradients into the buffer.
WIDTHS = (8, 260)


def make_layers(width):
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, width)) for _ in range(4)]


def stage_indices(name, rank):
    """The stages of a pipeline rank, of two: in a V, rank 0 has the first and the last one."""
    if name in SINGLE:
        return [rank]
    return [rank, 3 - rank] if name in ("ZBVZeroBubble", "DualPipeV") else [rank, rank + 2]


class Stage(PipelineStage):
    """Without torch 2.11's first messages between neighbours: in a V, a rank sends one to itself, which gloo refuses."""

    def _get_init_p2p_neighbors_ops(self):
        return []


def check_pipeline(name, width, reshard_after_forward=False, mp_policy=MixedPrecisionPolicy()):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    rank, data = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    indices, layers = stage_indices(name, rank), make_layers(width)
    count = 2 * len(indices)
    length = 4 // count
    stages, modules = [], []
    # To infer shapes, torch 2.11 sends from a rank to itself, too. Later versions would take the examples for
    # activations without gradients.
    examples = [torch.empty(2, width)] * 2 if torch.__version__ < "2.12" else []
    for index in indices:
        module = nn.Sequential(*layers[index * length : (index + 1) * length])
        for layer in module:
            fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=reshard_after_forward, mp_policy=mp_policy)
        modules.append(fully_shard(module, mesh=mesh["dp"], reshard_after_forward=reshard_after_forward, mp_policy=mp_policy))
        stages.append(Stage(module, index, count, torch.device("cpu"), *examples, group=mesh.get_group("pp")))
    schedule = get_schedule_class(name)(stages if len(stages) > 1 else stages[0], MICROBATCHES, loss_fn=F.mse_loss)
    single = nn.Sequential(*make_layers(width))
    expected = dict(single.named_parameters())
    optimizers = [torch.optim.SGD([p for m in modules for p in m.parameters()], 0.1), torch.optim.SGD(single.parameters(), 0.1)]
    is_last = count - 1 in indices
    for number in range(3):
        x, y = torch.randn(2, 2, 2 * MICROBATCHES, width, generator=torch.Generator().manual_seed(number))
        losses = []
        schedule.step(*([x[data]] if rank == 0 else []), **({"target": y[data], "losses": losses} if is_last else {}))
        loss = sum(F.mse_loss(single(part), target) for part, target in zip(x, y, strict=True)) / 2
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for index, module in zip(indices, modules, strict=True):
        for fqn, param in module.named_parameters():
            layer, rest = fqn.split(".", 1)
            torch.testing.assert_close(param.full_tensor(), expected[f"{index * length + int(layer)}.{rest}"])


def split_backward(module, x):
    """The two passes of a zero-bubble schedule; returns the matmuls of each."""
    output = module(x)
    params = list(module.parameters())
    counts = []
    for inputs in ([x], params):
        with FlopCounterMode(display=False) as flops:
            gradients = torch.autograd.grad(output.sum(), inputs, retain_graph=True)
        counts.append(flops.get_total_flops())
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient if param.grad is None else param.grad + gradient
    return counts


def as_in_a_pipeline(**options):
    """A module as the schedules of torch 2.11 to 2.13 prepare it for a micro-batch that is not the last one."""
    model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), **options)
    model.set_is_last_backward(False)
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)
    return model


def end_as_olmo_core(modules):
    """OLMo-core 3.0.0 ends a pass without the root's callback."""
    for state in fully_shard.state(modules[0])._state_ctx.all_states:
        if state._fsdp_param_group:
            state._fsdp_param_group.post_backward()


def end_as_nemo_automodel(modules):
    """NeMo AutoModel 0.7.0 calls the callback of each module that it shards."""
    for module in modules:
        state = module._get_fsdp_state()
        for each in state._state_ctx.all_states:
            if each._fsdp_param_group:
                each._fsdp_param_group.post_backward()
        state._root_post_backward_final_callback()


def check_private_names(end, placements):
    """Two steps of two micro-batches that a program ends by FSDP2's private names: one reduction per module and step."""
    model = nn.Sequential(*make_layers(8))
    single = nn.Sequential(*make_layers(8))
    for layer in model:
        fully_shard(layer, placements=placements)
    modules = [fully_shard(model, placements=placements), *model]
    rank = dist.get_rank()
    for step in range(2):
        x = torch.randn(2, 2, 3, 8, generator=torch.Generator().manual_seed(step))
        for enabled in (False, True):
            for module in modules:
                module.set_is_last_backward(enabled)
                module.set_requires_gradient_sync(enabled)
                module.set_reshard_after_backward(enabled)
            if not enabled:
                for part in x[rank]:
                    model(part).square().mean().backward()
        with CommDebugMode() as comm:
            end(modules)
        reductions = sum(comm.get_comm_counts().values())
        assert reductions == len(model) + 1, comm.get_comm_counts()  # And one for the parameters that were used.
        sum(single(part).square().mean() for part in x.flatten(0, 1)).div(2).backward()
        for param, other in zip(model.parameters(), single.parameters(), strict=True):
            torch.testing.assert_close(param.grad.full_tensor(), other.grad, rtol=1e-4, atol=1e-6)
        for each in (model, single):
            torch.optim.SGD(each.parameters(), 0.01).step()
            each.zero_grad()


class PipelineTest(unittest.TestCase):
    @ranks(2)
    def test_programs_end_a_pass_by_the_private_names_of_fsdp2():
        for end in (end_as_olmo_core, end_as_nemo_automodel):
            for placements in (ZERO3, ZERO2, ZERO1):
                check_private_names(end, placements)

    def test_schedules_give_the_parameters_of_one_process(self):
        self.check_schedules(("1F1B", "Interleaved1F1B", "ZBVZeroBubble"), WIDTHS)

    @pytest.mark.slow
    def test_every_schedule_gives_the_parameters_of_one_process(self):
        self.check_schedules((*SINGLE, *MULTI), WIDTHS)

    def check_schedules(self, names, widths):
        for name in names:
            for width in widths:
                with self.subTest(schedule=name, width=width):
                    run_ranks(4, check_pipeline, name, width)

    def test_stages_may_reshard_after_forward(self):
        for name in (*SINGLE, "Interleaved1F1B"):
            with self.subTest(schedule=name):
                run_ranks(4, check_pipeline, name, 8, True)

    @ranks(2)
    def test_a_split_backward_that_would_lose_gradients_is_an_error():
        """The error of a split backward is raised before any collective of backward; other passes raise nothing."""
        x = torch.ones(1, 4, requires_grad=True)
        model = as_in_a_pipeline(reshard_after_forward=True)
        output = model(x).sum()
        with CommDebugMode() as comm:
            text = error_of(torch.autograd.grad, output, x)
        assert text.startswith("RuntimeError: 0.weight and 1 more was resharded after forward, and this backward computes"), (
            text
        )
        assert text.endswith("Pass reshard_after_forward=False to fully_shard"), text
        assert comm.get_total_counts() == 0, comm.get_comm_counts()
        (model(x) * 2).sum().backward()
        model(x.detach()).sum().backward()  # Inputs without gradients, after some with them.
        for options in ({"is_last_backward": True}, {"requires_gradient_sync": True}):
            for name, value in options.items():
                getattr(model, f"set_{name}")(value)
            torch.autograd.grad(model(x).sum(), x)
            model.reset_iter_state()
            model.set_is_last_backward(False)
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        assert gradient.requires_grad

    @ranks(1)
    def test_a_split_backward_computes_each_product_once():
        model = fully_shard(nn.Linear(260, 260), reshard_after_forward=False)
        model.set_requires_gradient_sync(False)
        model.set_reshard_after_backward(False)
        x = torch.randn(10, 260, requires_grad=True)
        assert split_backward(model, x) == [2 * 10 * 260 * 260] * 2

    @ranks(2)
    def test_assigned_gradients_are_cast_to_reduce_dtype():
        """Four micro-batches whose gradients are narrower than the reduction, with and without a split."""
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
        gradients = []
        for is_split in (False, True):
            torch.manual_seed(0)
            model = fully_shard(nn.Linear(24, 16), reshard_after_forward=False, mp_policy=policy)
            for number in range(4):
                model.set_reshard_after_backward(number == 3)
                model.set_requires_gradient_sync(number == 3)
                x = torch.randn(5, 24, generator=torch.Generator().manual_seed(number)).bfloat16().requires_grad_()
                if is_split and number < 3:
                    split_backward(model, x)
                else:
                    model(x).sum().backward()
            gradients.append(model.weight.grad.full_tensor())
        torch.testing.assert_close(*gradients, rtol=2**-6, atol=0)

    @ranks(2)
    def test_dropped_gradients_are_dropped_where_a_program_assigned_them_too():
        model = as_in_a_pipeline(reshard_after_forward=False)
        split_backward(model, torch.ones(1, 4, requires_grad=True))
        model.reset_iter_state()
        model.set_requires_gradient_sync(True)
        model.set_reshard_after_backward(True)
        model(torch.ones(1, 4)).sum().backward()
        assert model[0].weight.grad.full_tensor().abs().max() < 1.01, "two gradients"
