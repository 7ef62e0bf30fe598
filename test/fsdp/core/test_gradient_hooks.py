"""Hooks on the gradients of sharded parameters run at one point of backward, the same on all ranks."""

import contextlib
import itertools
import re
import unittest
from unittest import mock

import torch
import torch.distributed as dist
from common import error_of, ranks, run_ranks
from delays import delays
from soon import soon
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from torch_ragged.fsdp import (
    HIERARCHICAL,
    ZERO1,
    ZERO2,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    Offload,
    fully_shard,
)
from torch_ragged.fsdp.comm._collectives import ProcessGroupCollectives

DIM, BLOCKS = 8, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.extra = nn.Linear(DIM, DIM, bias=False), nn.Parameter(torch.ones(DIM))

    def forward(self, x, uses_extra=True):
        x = torch.tanh(self.linear(x))
        return x * self.extra if uses_extra else x


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])

    def forward(self, x, skipped=(), without_extra=()):
        for index, block in enumerate(self.blocks):
            if index not in skipped:
                x = block(x, index not in without_extra)
        return x


def sharded(mesh, optional=(), **options):
    model = Model()
    for index, block in enumerate(model.blocks):
        fully_shard(block, mesh=mesh, optional=index in optional, **options)
    return fully_shard(model, mesh=mesh, **options)


@contextlib.contextmanager
def events_of(model):
    """The reduce-scatters, and the hooks of each block's parameters, in their order."""
    events = []
    for index, block in enumerate(model.blocks):
        for param in block.parameters():
            param.register_post_accumulate_grad_hook(lambda param, index=index: events.append(f"hook {index}"))
    issue = ProcessGroupCollectives.reduce_scatter

    def reduce_scatter(self, *arguments):
        events.append("reduce")
        return issue(self, *arguments)

    with mock.patch.object(ProcessGroupCollectives, "reduce_scatter", reduce_scatter):
        yield events


def expected(blocks, in_flight):
    """A module's hooks run when one more module than may be in flight is reduced, those of the last ones at the end."""
    order = list(reversed(blocks))
    found = []
    for at, _ in enumerate(order):
        if at >= in_flight:
            found += [f"hook {order[at - in_flight]}"] * 2
        found.append("reduce")
    return found + [f"hook {index}" for index in range(BLOCKS) if index in order[-in_flight:] for _ in range(2)]


def train(mesh, seed=None, optional=(), skipped=(), without_extra=()):
    """Three steps by an optimizer in a hook that communicates; returns the parameters and the most gradients alive."""
    model = sharded(mesh, optional)
    alive = [0]
    for param in model.parameters():

        def step(param):
            alive[0] = max(alive[0], sum(each.grad is not None for each in model.parameters()))
            norm = param.grad.norm().full_tensor()  # An all-reduce.
            with torch.no_grad():
                param.sub_(param.grad, alpha=0.1 / (1 + float(norm)))
            param.grad = None

        param.register_post_accumulate_grad_hook(step)
    rank = dist.get_rank()
    with delays(seed) if seed is not None else contextlib.nullcontext():
        for at in range(3):
            torch.manual_seed(10 * at + rank)
            x = torch.randn(2, DIM)
            model(x, skipped if rank == 1 else (), without_extra if rank == 0 else ()).sum().backward()
    return [param.full_tensor() for param in model.parameters()], alive[0]


def in_one_process(skipped=(), without_extra=()):
    model = Model()
    for at in range(3):
        losses = []
        for rank in range(2):
            torch.manual_seed(10 * at + rank)
            x = torch.randn(2, DIM)
            losses.append(model(x, skipped if rank == 1 else (), without_extra if rank == 0 else ()).sum())
        (sum(losses) / 2).backward()
        with torch.no_grad():
            for param in model.parameters():
                param.sub_(param.grad, alpha=0.1 / (1 + float(param.grad.norm())))
                param.grad = None
    return [param.detach() for param in model.parameters()]


@soon()
def a_hook_on_one_rank():
    model = sharded(init_device_mesh("cpu", (2,)))
    model(torch.ones(1, DIM)).sum().backward()
    if dist.get_rank() == 1:
        model.blocks[2].extra.register_post_accumulate_grad_hook(lambda param: None)
    return error_of(model, torch.ones(1, DIM))


class GradientHooksTest(unittest.TestCase):
    @ranks(4)
    def test_hooks_run_when_the_next_module_is_reduced():
        flat = init_device_mesh("cpu", (4,))
        replicated = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        for mesh in (flat, replicated):
            for options in ({}, {"reshard_after_forward": False}, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}):
                for in_flight in (1, 2):
                    model = sharded(mesh, **options)
                    model.set_reduce_scatter_max_input_buffers(in_flight)
                    with events_of(model) as events:
                        model(torch.ones(2, DIM)).sum().backward()
                    assert events == expected(range(BLOCKS), in_flight), (mesh.ndim, options, in_flight, events)

    @ranks(2)
    def test_in_a_backward_of_several_forwards_each_hook_runs_once_at_the_end():
        model, x = sharded(init_device_mesh("cpu", (2,))), torch.ones(2, DIM, requires_grad=True)
        with events_of(model) as events:
            # The parameters of one forward only are complete at the first reduction.
            (model(x, without_extra=range(BLOCKS)).sum() + model(2 * x).sum()).backward()
        reduced = events.count("reduce")
        assert reduced > BLOCKS
        hooks = [f"hook {index}" for index in range(BLOCKS) for _ in range(2)]
        assert events == ["reduce"] * reduced + hooks, events

    @ranks(2)
    def test_what_ran_in_a_backward_is_not_used_in_the_next_one():
        model, x = sharded(init_device_mesh("cpu", (2,))), torch.ones(2, DIM)
        model.set_reduce_scatter_max_input_buffers(1)
        with events_of(model) as events:
            model(x).sum().backward()
            model.zero_grad()
            events.clear()
            model(x, without_extra=range(BLOCKS)).sum().backward()
        assert events[:2] == ["reduce", "hook 3"], events
        assert all(block.extra.grad is None and block.linear.weight.grad is not None for block in model.blocks)

    @ranks(2)
    def test_a_step_in_hooks_that_communicate_frees_each_gradient_and_gives_the_values_of_one_process():
        mesh = init_device_mesh("cpu", (2,))
        for case in ({}, {"without_extra": (1, 2)}, {"optional": (1, 2), "skipped": (1,)}):
            found, alive = train(mesh, **case)
            assert alive == 1, alive  # All others have made their step, or are not set yet.
            case_of_one = {name: value for name, value in case.items() if name != "optional"}
            torch.testing.assert_close(found, in_one_process(**case_of_one))
            for seed in range(1):
                again, _ = train(mesh, seed, **case)
                assert all(map(torch.equal, found, again)), (case, seed)

    @ranks(4)
    def test_hooks_run_once_a_pass_beside_other_features():
        flat, nodes = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("across", "within"))
        features = {
            "ZeRO-1": {"mesh": flat, "placements": ZERO1},
            "ZeRO-2": {"mesh": flat, "placements": ZERO2},
            "hierarchical": {"mesh": nodes, "placements": HIERARCHICAL},
            "HSDP": {"mesh": nodes},
            "weights": {"mesh": flat, "weights": [1, 0, 2, 1]},
            "neighbours": {"mesh": flat, "reshard_after_forward": 2},
            "host": {"mesh": flat, "offload_policy": Offload(optimizer=0.5)},
            "bfloat16": {"mesh": flat, "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
        }
        for name, options in features.items():
            found = {}
            for hooked in (True, False):
                model, seen = sharded(**options), []
                for fqn, param in model.named_parameters():
                    if hooked:
                        param.register_hook(lambda gradient, fqn=fqn, seen=seen: seen.append(fqn))
                for syncs in (True, False, True):  # The second pass leaves its gradients to the third one.
                    model.set_requires_gradient_sync(syncs)
                    seen.clear()
                    torch.manual_seed(dist.get_rank())
                    model(torch.randn(2, DIM), without_extra=(1,) if dist.get_rank() == 3 else ()).float().sum().backward()
                    names = [fqn for fqn, _ in model.named_parameters()] if syncs and hooked else []
                    assert sorted(seen) == sorted(names), (name, syncs, seen)
                found[hooked] = {fqn: param.grad.full_tensor() for fqn, param in model.named_parameters()}
            assert all(torch.equal(found[True][fqn], found[False][fqn]) for fqn in found[False]), name

    @ranks(2)
    def test_hooks_that_would_run_twice_raise():
        """Once for the gradient that autograd brings to the shard, once for the reduced one."""
        kinds = nn.Parameter.register_hook, nn.Parameter.register_post_accumulate_grad_hook
        for register, is_manual in itertools.product(kinds, (False, True)):
            model = sharded(init_device_mesh("cpu", (2,)))
            model.set_manual_backward_finalization(is_manual)
            weight, extra = model.blocks[1].linear.weight, model.blocks[1].extra
            for used, calls in ((extra, ["weight"]), (None, ["weight"]), (weight, [])):
                seen = []
                handle = register(weight, lambda given, seen=seen: seen.append("weight"))
                penalty = 0 if used is None else used.to_local().square().sum()
                loss = model(torch.ones(2, DIM)).sum() + penalty
                if used is weight:
                    text = error_of(loss.backward)
                    assert re.search(r"RuntimeError: the hooks on 'linear.weight' would run twice in this backward", text), text
                else:
                    loss.backward()
                    if is_manual:  # Outside of backward.
                        model.finalize_backward()
                    assert seen == calls, (used, seen)
                handle.remove()
                model.zero_grad()
            seen = []
            register(weight, lambda given, seen=seen: seen.append("weight"))
            weight.requires_grad_(False)  # Its hooks stay, and do not run.
            model(torch.ones(2, DIM)).sum().backward()
            if is_manual:
                model.finalize_backward()
            assert seen == [] and extra.grad is not None

    def test_a_hook_that_one_rank_alone_has_is_an_error_on_all(self):
        for error in run_ranks(2, a_hook_on_one_rank):
            self.assertRegex(
                error, r"RuntimeError: ranks called different modules in forward .*with hooks on gradients of blocks.2\)"
            )
