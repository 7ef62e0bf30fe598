"""Offloaded optimizers that step in backward: bitwise those that step after it, and errors for what needs all gradients."""

import copy
import gc
import random
import time
import unittest
from unittest import mock

import torch
import torch.distributed as dist
from common import error_of, ranks
from offload_cases import (
    ADAMW,
    BLOCKS,
    POLICY,
    SGD,
    assert_equal,
    build,
    chunks_of,
    folder_of_ranks,
    in_files,
    make,
    train,
    window_tier,
)
from tested_device import DEVICE
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from torch_ragged.fsdp import Offload, fully_shard, monitor, offloaded
from torch_ragged.fsdp.files import _scratch_file
from torch_ragged.fsdp.offload import _in_backward, _offloaded_optimizer
from torch_ragged.optim import AdamW8bit


def check(optimizer, options, fractions, dtype=torch.float32, how=(), **knobs):
    """Train without offload, and at each of ``fractions`` with steps in backward."""
    plain = build(None, dtype, **knobs)
    reference = make(plain, optimizer, None, **options)
    train(plain, reference, **dict(how))
    for fraction in fractions:
        model = build(fraction, dtype, **knobs)
        mine = make(model, optimizer, fraction, in_backward=True, **options)
        train(model, mine, **dict(how))
        assert_equal(mine, reference)


class Stack(nn.Sequential):
    """Groups that follow each other: all but the first layer's gradients are reduced before the end of backward."""

    def __init__(self, layers=4, width=32):
        super().__init__(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)))


def stack(offload=None, **knobs):
    torch.manual_seed(0)
    model, mesh = Stack(), init_device_mesh("cpu", (dist.get_world_size(),))
    options = {} if offload is None else {"offload_policy": offload}
    for block in model:
        fully_shard(block, mesh=mesh, **options, **knobs)
    return fully_shard(model, mesh=mesh, **options, **knobs)


def loss_of(model, step):
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(7 * step + dist.get_rank()))
    return model(x).square().sum()


class BitsTest(unittest.TestCase):
    @ranks(2)
    def test_each_optimizer_has_its_own_bits():
        check(*ADAMW, (0, 0.4, 1))
        check(*SGD, (0.5,))
        check(torch.optim.AdamW, {"lr": 0.05, "fused": True}, (0.6,))
        check(torch.optim.Adam, {"lr": torch.tensor(0.05)}, (0.6,), how={"schedules": False})
        check(AdamW8bit, {"lr": 0.05, "policy": POLICY}, (0.4, 1), **BLOCKS)

    @ranks(2)
    def test_accumulation_and_mixed_precision_change_no_bit():
        mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        check(*ADAMW, (0.5,), how={"passes": 3}, mp_policy=mixed)
        if DEVICE == "cpu":  # Otherwise, what is stepped on the CPU would be compared with what is stepped on the device.
            check(*ADAMW, (Offload(parameters=True),))
        check(*ADAMW, (0.5,), reshard_after_forward=False)

    @ranks(4)
    def test_hsdp_and_tensor_parallelism_change_no_bit():
        check(*ADAMW, (0.5,), mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards")))
        check(*ADAMW, (0.5,), mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), tp=True)

    @unittest.skipUnless(DEVICE == "cpu", "what is stepped on the CPU is compared with what is stepped on the device")
    @ranks(2)
    def test_files_and_windows_change_no_bit():
        with folder_of_ranks() as folder, chunks_of(300):
            check(*ADAMW, (in_files(folder, 0.5), in_files(folder, 1)))
            gc.collect()
        with mock.patch.multiple(_offloaded_optimizer, tier_of=window_tier, window_numel=lambda device: 300):
            check(*ADAMW, (0.7,))

    @unittest.skipUnless(DEVICE == "cpu", "threads of the CPU step what lies in host memory only")
    @ranks(1)
    def test_threads_of_the_cpu_change_no_bit():
        torch.set_num_threads(3)
        try:
            check(*ADAMW, (0.4,), torch.bfloat16)
        finally:
            torch.set_num_threads(1)

    @ranks(2)
    def test_parameters_that_one_rank_alone_uses_change_no_bit():
        """The other rank does not know before the end of the pass that there is a gradient."""
        rank = dist.get_rank()

        def trained(fraction, **options):
            model = build(fraction)
            optimizer = make(model, torch.optim.AdamW, fraction, lr=0.05, **options)
            for step in range(4):
                tokens = torch.randint(0, 40, (3, 5), generator=torch.Generator().manual_seed(10 * step + rank))
                model(tokens, skips=rank == step % 2).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            return optimizer

        assert_equal(trained(0.5, in_backward=True), trained(None))

    @ranks(2)
    def test_a_state_dict_loads_with_and_without_steps_in_backward():
        plain = build(None)
        reference = make(plain, torch.optim.AdamW, None, lr=0.05)
        train(plain, reference, steps=2)
        weights = {name: value.clone() for name, value in plain.state_dict().items()}
        states = copy.deepcopy(reference.state_dict())
        train(plain, reference, start=2, schedules=False)
        for in_backward in (True, False):
            model = build(0.6)
            mine = make(model, torch.optim.AdamW, 0.6, lr=0.05, in_backward=in_backward)
            train(model, mine, start=7, steps=1)
            model.load_state_dict(weights)
            mine.load_state_dict(states)
            train(model, mine, start=2, steps=3, schedules=False)
            assert_equal(mine, reference)


class TimeTest(unittest.TestCase):
    """When groups are stepped, and what is free then."""

    @ranks(2)
    def test_groups_are_stepped_while_backward_runs():
        model = stack(Offload(0.5))
        optimizer = offloaded(torch.optim.AdamW, model, in_backward=True, lr=0.05)
        seen, names = [], {group: name for name, group in optimizer_groups(model)}
        real = _in_backward.BackwardStep.use

        def use(self, group):
            seen.append(names[group])
            real(self, group)

        with mock.patch.object(_in_backward.BackwardStep, "use", use):
            handle = model[0].register_full_backward_pre_hook(lambda *_: seen.append("backward of 0"))
            output = loss_of(model, 0)
            before = [p.detach().clone() for p in model.parameters()]
            output.backward()
            handle.remove()
        assert seen.index("backward of 0") >= 2, seen  # Of four groups, two were stepped before.
        assert sorted(seen)[:4] == ["0", "1", "2", "3"], seen
        # All are stepped when backward returns, and no gradient has memory.
        pairs = [(p.to_local(), q.to_local()) for p, q in zip(model.parameters(), before)]
        assert not any(torch.equal(p, q) for p, q in pairs if p.numel())
        after = [p.detach().clone() for p in model.parameters()]
        optimizer.step()
        assert all(torch.equal(p.to_local(), q.to_local()) for p, q in zip(model.parameters(), after))

    @ranks(2)
    def test_step_takes_what_backward_has_not_reached():
        """A plain parameter, and a gradient that a program has set."""
        model = stack(Offload(0.5))
        alone = nn.Parameter(torch.ones(3))
        params = [*model.parameters(), alone]
        optimizer = offloaded(torch.optim.SGD, model, params, in_backward=True, lr=0.5)
        alone.grad = torch.ones(3)
        weight = model[2][0].weight
        weight.grad = torch.ones_like(weight)
        before = weight.detach().clone()
        optimizer.step()
        assert torch.equal(alone.detach(), torch.full((3,), 0.5))
        assert torch.equal(weight.to_local(), before.to_local() - 0.5)

    @ranks(2)
    def test_an_optimizer_that_is_gone_steps_nothing():
        model = stack(Offload(0.5))
        optimizer = offloaded(torch.optim.AdamW, model, in_backward=True)
        del optimizer
        for _ in range(2):
            loss_of(model, 0).backward()
            assert all(torch.isfinite(p.grad.full_tensor()).all() for p in model.parameters())
        optimizer = offloaded(torch.optim.AdamW, model, in_backward=True)
        other = offloaded(torch.optim.AdamW, model)
        model.zero_grad()
        loss_of(model, 0).backward()
        other.step()
        assert optimizer.param_groups


def optimizer_groups(model):
    return [(name, group) for name, block in model.named_children() for group in block._get_fsdp_state().groups]


class LegalTest(unittest.TestCase):
    """Programs that reduce more than once, or not at all, before a step."""

    @ranks(4)
    def test_replicas_that_accumulate_shards():
        results = []
        for in_backward in (True, False):
            torch.manual_seed(0)
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
            model = Stack()
            for module in (*model, model):
                fully_shard(module, mesh=mesh, offload_policy=Offload(0.5))
            optimizer = offloaded(torch.optim.AdamW, model, in_backward=in_backward, lr=0.05)
            for step in range(4):
                model.set_requires_all_reduce(step % 2 == 1)
                loss_of(model, step).backward()
                if step % 2 == 1:
                    optimizer.step()
                    optimizer.zero_grad()
            results.append(optimizer)
        assert_equal(*results)

    @ranks(2)
    def test_gradients_of_inputs_hooks_and_iterations_that_are_dropped():
        model, plain = stack(Offload(0.5)), stack(Offload(0.5))
        optimizer = offloaded(torch.optim.AdamW, model, in_backward=True, lr=0.05)
        reference = offloaded(torch.optim.AdamW, plain, lr=0.05)
        norms = []
        for each in (model, plain):  # They communicate, at the same moment on all ranks.
            norms.append([])
            hook = lambda p, to=norms[-1]: to.append(p.grad.full_tensor().norm().item())  # noqa: E731
            each[1][0].weight.register_post_accumulate_grad_hook(hook)
        for step in range(3):
            for each, optim in ((model, optimizer), (plain, reference)):
                x = torch.ones(2, 32, requires_grad=True)
                torch.autograd.grad(each(x).sum(), x)
                loss_of(each, step).backward()
                if each is model:
                    model.reset_iter_state()
                optim.step()
                optim.zero_grad()
        assert_equal(optimizer, reference)
        assert norms[0] == norms[1] and len(norms[0]) == 3, norms

    @ranks(2)
    def test_finalized_backwards_reduce_each_micro_batch():
        results = []
        for in_backward in (True, False):
            model = stack(Offload(0.5))
            optimizer = offloaded(torch.optim.AdamW, model, in_backward=in_backward, lr=0.05)
            model.set_manual_backward_finalization(True)
            for step in range(2):
                for micro_batch in range(3):
                    loss_of(model, 3 * step + micro_batch).backward()
                model.finalize_backward()
                optimizer.step()
                optimizer.zero_grad()
            results.append(optimizer)
        assert_equal(*results)


class RefusedTest(unittest.TestCase):
    """What needs all gradients before a step is an error, on all ranks."""

    @ranks(2)
    def test_gradients_cannot_be_read_after_backward():
        model = stack(Offload(0.5))
        optimizer = offloaded(torch.optim.AdamW, model, in_backward=True)
        loss_of(model, 0).backward()
        grad, text = model[1][0].weight.grad, "was used by the step in backward of offloaded(..., in_backward=True)"
        for read in (
            lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
            lambda: nn.utils.clip_grad_value_(model.parameters(), 1.0),
            grad.norm,
            grad.full_tensor,
            grad.to_local,
            lambda: grad.mul_(2),
            lambda: grad.add_(1),
        ):
            assert text in error_of(read), error_of(read)
        assert text in repr(grad)
        optimizer.step()
        text = "has gradients of the last step: call optimizer.zero_grad() before backward"
        assert text in error_of(lambda: loss_of(model, 1).backward())
        optimizer.zero_grad()
        loss_of(model, 1).backward()
        optimizer.step()

    @ranks(2)
    def test_a_second_backward_before_step_raises():
        model = stack(Offload(0.5))
        optimizer = offloaded(torch.optim.AdamW, model, in_backward=True)
        loss_of(model, 0).backward()
        model.zero_grad()
        assert "each backward with gradient sync is a step" in error_of(lambda: loss_of(model, 1).backward())
        assert optimizer.state  # It lives: one that is gone steps nothing.

    @ranks(2)
    def test_one_backward_through_several_forwards_raises():
        model = stack(Offload(0.5))
        optimizer = offloaded(torch.optim.AdamW, model, in_backward=True)
        text = error_of(lambda: (loss_of(model, 0) + loss_of(model, 1)).backward())
        assert optimizer.param_groups and "or by one backward through several forwards" in text, text

    @ranks(2)
    def test_other_options_after_backward_are_an_error():
        for lr in (0.1, torch.tensor(0.1)):
            model = stack(Offload(0.5))
            optimizer = offloaded(torch.optim.AdamW, model, in_backward=True, lr=lr)
            loss_of(model, 0).backward()
            if isinstance(lr, torch.Tensor):
                optimizer.param_groups[0]["lr"].mul_(2)
            else:
                optimizer.param_groups[0]["lr"] = 0.2
            text = error_of(optimizer.step)
            assert "such as lr, have changed between backward and step()" in text, text
            assert "an earlier step of this offloaded optimizer, or a load, failed" in error_of(optimizer.state_dict)

    @ranks(2)
    def test_grad_scaler_is_an_error():
        for fused in (False, True):
            model = stack(Offload(0.5))
            optimizer = offloaded(torch.optim.AdamW, model, in_backward=True, fused=fused)
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            scaler.scale(loss_of(model, 0)).backward()
            text = error_of(scaler.step, optimizer)
            assert "in_backward=True" in text and "RuntimeError" in text, text

    @ranks(1)
    def test_gradients_are_not_dropped_under_a_thread_that_steps():
        """A backward that raised has left a step to it, and torch does not bear two threads at one ``.grad``."""
        model = stack(Offload(0.5))
        optimizer = offloaded(torch.optim.AdamW, model, in_backward=True)
        loss_of(model, 0).backward()
        for drop in (optimizer.zero_grad, model.zero_grad, model[0].zero_grad, model.state_dict, optimizer.state_dict):
            with mock.patch.object(_in_backward.BackwardStep, "wait", side_effect=KeyError("waits")):
                assert "waits" in error_of(drop), drop
        optimizer.step()

    @ranks(2)
    def test_a_backward_that_raises_after_steps_is_an_error_of_the_step():
        model = stack(Offload(0.5))
        optimizer = offloaded(torch.optim.AdamW, model, in_backward=True)
        saved = {name: value.clone() for name, value in model.state_dict().items()}
        handle = model[0][0].register_full_backward_pre_hook(lambda *_: 1 / 0)
        assert "ZeroDivisionError" in error_of(lambda: loss_of(model, 0).backward())
        handle.remove()
        optimizer.zero_grad()
        with unittest.TestCase().assertWarnsRegex(UserWarning, "a backward pass raised"):
            loss_of(model, 0).backward()
        assert "parameters and states are not of one step" in error_of(optimizer.step)
        model.load_state_dict(saved)
        optimizer.state.clear()
        optimizer.zero_grad()
        loss_of(model, 1).backward()
        optimizer.step()
        # The same without the step that raises: what is loaded is valid.
        optimizer.zero_grad()
        saved = {name: value.clone() for name, value in model.state_dict().items()}
        states = copy.deepcopy(optimizer.state_dict())
        handle = model[0][0].register_full_backward_pre_hook(lambda *_: 1 / 0)
        assert "ZeroDivisionError" in error_of(lambda: loss_of(model, 2).backward())
        handle.remove()
        optimizer.zero_grad()
        model.reset_iter_state()
        model.load_state_dict(saved)
        optimizer.load_state_dict(states)
        loss_of(model, 2).backward()
        optimizer.step()

    @unittest.skipUnless(DEVICE == "cpu", "on an accelerator, the thread of autograd steps")
    @ranks(2)
    def test_no_step_runs_behind_a_state_dict_or_a_load():
        """After a backward that raised, the thread may still step what was reduced before."""
        model = stack(Offload(0.5))
        optimizer = offloaded(torch.optim.AdamW, model, in_backward=True)
        saved = {name: value.clone() for name, value in model.state_dict().items()}
        real = _offloaded_optimizer.OffloadedOptimizer.step_group

        def late(self, group):
            time.sleep(0.1)
            real(self, group)

        for loads in (False, True):
            handle = model[0][0].register_full_backward_pre_hook(lambda *_: 1 / 0)
            with mock.patch.object(_offloaded_optimizer.OffloadedOptimizer, "step_group", late):
                assert "ZeroDivisionError" in error_of(lambda: loss_of(model, 0).backward())
                handle.remove()
                if loads:
                    model.load_state_dict(saved)
                before = {name: value.clone() for name, value in model.state_dict().items()}
                time.sleep(0.4)
            for name, value in model.state_dict().items():
                assert torch.equal(value.to_local(), before[name].to_local()), (loads, name)
            optimizer.zero_grad()
            optimizer.state.clear()

    @ranks(2)
    def test_a_second_optimizer_takes_over():
        model = stack(Offload(0.5))
        first = offloaded(torch.optim.AdamW, model, in_backward=True)
        second = offloaded(torch.optim.AdamW, model, in_backward=True)
        loss_of(model, 0).backward()
        second.step()
        assert "another optimizer was made of this model after this one" in error_of(first.step)
        text = error_of(offloaded, torch.optim.AdamW, model, in_backward=dist.get_rank() == 0)
        assert "in_backward" in text, text

    @unittest.skipUnless(DEVICE == "cpu", "files are stepped on the CPU")
    @ranks(2)
    def test_a_file_that_fails_in_backward_raises_in_step_on_all_ranks():
        with folder_of_ranks() as folder, chunks_of(300):
            model = stack(in_files(folder))
            optimizer = offloaded(torch.optim.AdamW, model, in_backward=True)
            for step in range(2):
                loss_of(model, step).backward()
                optimizer.step()
                optimizer.zero_grad()
            real = _scratch_file._preadv

            def failing(*arguments):
                if dist.get_rank() == 1:
                    raise OSError(5, "Input/output error")
                return real(*arguments)

            with mock.patch.object(_scratch_file, "_preadv", failing):
                loss_of(model, 2).backward()
                text = error_of(optimizer.step)
            assert ("OSError" in text and "scratch file" in text) if dist.get_rank() else "failed on rank 1" in text, text
            assert "load a checkpoint" in error_of(optimizer.state_dict)
            del optimizer
            gc.collect()


class ReadAheadTest(unittest.TestCase):
    """Chunks that are read ahead, and have no gradient in the next step."""

    @staticmethod
    def _trained(offload, plan=None, **options):
        torch.manual_seed(0)
        heads = nn.ModuleList(nn.Linear(24, 24) for _ in range(5))
        knobs = {} if offload is None else {"offload_policy": offload}
        for head in heads:
            fully_shard(head, mesh=init_device_mesh("cpu", (1,)), **knobs)
        make_one = torch.optim.AdamW(heads.parameters(), lr=0.1) if offload is None else None
        optimizer = make_one or offloaded(torch.optim.AdamW, heads, lr=0.1, **options)
        for step, turns in enumerate(plan or [(2 * step, 2 * step + 1) for step in range(12)]):
            for turn in turns:
                heads[turn % 5](torch.full((2, 24), 0.1 * step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer

    @unittest.skipUnless(DEVICE == "cpu", "a step on the CPU is compared with one on the CPU")
    @ranks(1)
    def test_a_window_that_is_not_used_goes_to_another_chunk():
        generator = random.Random(0)
        plans = [None, [(0, 1, 2), (0, 1, 2), (1, 2), (0, 1, 2)]]
        plans += [[generator.sample(range(5), generator.randint(1, 4)) for _ in range(8)] for _ in range(4)]
        for plan in plans:
            reference = ReadAheadTest._trained(None, plan)
            for in_backward in (False, True):
                with mock.patch.multiple(_offloaded_optimizer, tier_of=window_tier, window_numel=lambda device: 10**6):
                    assert_equal(ReadAheadTest._trained(Offload(1.0), plan, in_backward=in_backward), reference)
                with folder_of_ranks() as folder, chunks_of(10**6):
                    assert_equal(ReadAheadTest._trained(in_files(folder), plan, in_backward=in_backward), reference)
                    gc.collect()


class MonitorTest(unittest.TestCase):
    @unittest.skipUnless(DEVICE == "cpu", "files are stepped on the CPU")
    @ranks(1)
    def test_a_monitor_sees_the_traffic_of_backward():
        with folder_of_ranks() as folder, chunks_of(300):
            model = stack(in_files(folder))
            optimizer = offloaded(torch.optim.AdamW, model, in_backward=True)
            with monitor(model, optimizer) as watch:
                rows = []
                for step in range(3):
                    loss_of(model, step).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    rows.append(watch.step())
            files = optimizer.tier_nbytes()["files"]
            assert sum(row["tier_write_bytes"] for row in rows) >= 2 * files, rows
            del optimizer, watch
            gc.collect()
