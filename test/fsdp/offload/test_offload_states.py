"""States of offloaded optimizers as other code sees them: state dicts, checkpoints; and gradients that a step has used."""

import os
import shutil
import tempfile
import time
import unittest
import warnings
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from common import error_of, ranks
from delays import delays
from offload_cases import ADAMW, BLOCKS, POLICY, SGD, assert_equal, build, chunks_of, folder_of_ranks, in_files, make, train
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh

from torch_ragged import checkpoint
from torch_ragged.fsdp import Offload, fully_shard, offloaded
from torch_ragged.fsdp.offload._offloaded_optimizer import OffloadedOptimizer
from torch_ragged.optim import AdamW8bit
from torch_ragged.tensor._stored_tensor import StoredTensor

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def pairs(policy, weights=None, count=6):
    """Layers without bias, two in a group, so that a rank may have no element of one of them; and their root."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(count)))
    knobs = {"mesh": init_device_mesh("cpu", (dist.get_world_size(),))}
    knobs |= ({} if policy is None else {"offload_policy": policy}) | ({} if weights is None else {"weights": weights})
    for index in range(0, count, 2):
        fully_shard([model[index], model[index + 1]], **knobs)
    return fully_shard(model, **knobs)


def step_of(model, optimizer, number):
    optimizer.zero_grad()
    model(torch.full((2, 8), 1.0 + number)).square().mean().backward()
    optimizer.step()


def trained_pairs(policy, kind=torch.optim.AdamW, weights=None, **options):
    model = pairs(policy, weights)
    optimizer = kind(model.parameters(), **options) if policy is None else offloaded(kind, model, **options)
    for number in range(2):
        step_of(model, optimizer, number)
    return model, optimizer


def assert_same_states(mine, other):
    assert list(mine) == list(other), (list(mine), list(other))
    for name, states in other.items():
        assert list(mine[name]) == list(states), (name, list(mine[name]), list(states))
        for key, value in states.items():
            assert torch.equal(mine[name][key], value), (name, key)


def values_of(states):
    """Copies of all states of a state dict, by parameter and name."""
    found = {}
    for index, each in states["state"].items():
        for name, value in each.items():
            found[index, name] = (value.to_local() if hasattr(value, "to_local") else value).detach().clone()
    return found


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def policies(folder):
    return (Offload(0.0), Offload(0.5), Offload(1.0), in_files(folder, 0.5), in_files(folder))


class OrderTest(unittest.TestCase):
    @ranks(2)
    def test_a_full_state_dict_is_that_without_offload():
        """Each rank cuts other chunks: the order of parameters must not follow them, or ranks gather different states."""
        adamw, sgd = (torch.optim.AdamW, {}), (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})
        for weights, (kind, options) in ((None, adamw), ([0, 1], adamw), ([0, 1], sgd)):
            model, optimizer = trained_pairs(None, kind, weights, **options)
            want = get_optimizer_state_dict(model, optimizer, options=FULL)
            with folder_of_ranks() as folder:
                for policy in policies(folder)[1 if kind is torch.optim.SGD else 0 :: 2]:
                    model, optimizer = trained_pairs(policy, kind, weights, **options)
                    got = get_optimizer_state_dict(model, optimizer, options=FULL)
                    assert_same_states(got.get("state", {}), want.get("state", {}))
                del model, optimizer

    @ranks(2)
    def test_states_keep_their_order_whatever_was_loaded():
        """A rank that has a parameter on the device has its states in the order of the dict; one with a tier in its own."""
        model, optimizer = trained_pairs(Offload(0.5))
        states = optimizer.state_dict()
        states["state"] = {key: dict(reversed(each.items())) for key, each in reversed(states["state"].items())}
        optimizer.load_state_dict(states)
        orders = [None] * 2
        dist.all_gather_object(orders, [(key, list(each)) for key, each in optimizer.state_dict()["state"].items()])
        assert orders[0] == orders[1] and orders[0][0] == (0, ["step", "exp_avg", "exp_avg_sq"]), orders

    @ranks(2)
    def test_rank_0_sends_states_to_other_tiers():
        model, optimizer = trained_pairs(None)
        full = get_optimizer_state_dict(model, optimizer, options=FULL)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        with folder_of_ranks() as folder:
            for policy in policies(folder):
                other, mine = trained_pairs(policy)
                step_of(other, mine, 5)
                set_optimizer_state_dict(other, mine, full if dist.get_rank() == 0 else {}, options=options)
                assert same(values_of(mine.state_dict()), values_of(optimizer.state_dict()))
            del other, mine


def check_delayed(seeds):
    """Full state dicts and a checkpoint under delays: no hang, and the states without offload."""
    model, optimizer = trained_pairs(None, weights=[1, 2])
    want = get_optimizer_state_dict(model, optimizer, options=FULL).get("state", {})  # Rank 0 has it.
    with folder_of_ranks() as folder:
        policy = (Offload(0.5), in_files(folder, 0.5))
        for seed in seeds:
            with delays(seed):
                model, optimizer = trained_pairs(policy[seed % 2], weights=[1, 2])
                found = get_optimizer_state_dict(model, optimizer, options=FULL)
                assert_same_states(found.get("state", {}), want)
        del model, optimizer


class DelaysTest(unittest.TestCase):
    @ranks(2)
    def test_ranks_that_are_late_gather_the_same_states():
        check_delayed(range(3))

    @pytest.mark.slow
    @ranks(2)
    def test_ranks_that_are_late_gather_the_same_states_for_many_seeds():
        check_delayed(range(50))


class KeptStateDictTest(unittest.TestCase):
    @ranks(2)
    def test_a_kept_state_dict_is_of_one_step():
        with folder_of_ranks() as folder:
            for policy in (*policies(folder), Offload(parameters="files", to=folder)):
                model, optimizer = trained_pairs(policy)
                kept = optimizer.state_dict()
                first = values_of(kept)
                step_of(model, optimizer, 2)
                second, now = values_of(optimizer.state_dict()), values_of(kept)
                is_copy = policy.to != "cpu" or policy.optimizer == 0.5
                assert not same(first, second) and same(now, first if is_copy else second), policy
            del model, optimizer

    @ranks(2)
    def test_a_kept_state_dict_loads_after_later_steps():
        with folder_of_ranks() as folder:
            for policy in (Offload(0.5), in_files(folder, 0.5), in_files(folder)):
                model, optimizer = trained_pairs(policy)
                kept, weights = optimizer.state_dict(), {k: v.clone() for k, v in model.state_dict().items()}
                step_of(model, optimizer, 2)
                want = values_of(optimizer.state_dict())
                for number in range(3, 6):
                    step_of(model, optimizer, number)
                optimizer.load_state_dict(kept)
                model.load_state_dict(weights)
                step_of(model, optimizer, 2)
                assert same(values_of(optimizer.state_dict()), want), policy
            del model, optimizer

    @ranks(2)
    def test_one_parameter_read_from_state_is_of_one_step():
        model, optimizer = trained_pairs(Offload(0.5))
        kept = {param: optimizer.state[param] for param in model.parameters()}
        first = {param: values_of({"state": {0: states}}) for param, states in kept.items()}
        step_of(model, optimizer, 2)
        for param, states in kept.items():
            mine, second = (values_of({"state": {0: each}}) for each in (states, optimizer.state[param]))
            assert same(mine, first[param]) or same(mine, second)


class CheckpointTest(unittest.TestCase):
    """Saved and loaded chunk by chunk."""

    @ranks(2)
    def test_a_checkpoint_reads_and_fills_files_run_by_run():
        cases = ((*ADAMW, {}), (*SGD, {}), (AdamW8bit, {"lr": 0.05, "policy": POLICY}, BLOCKS))
        with folder_of_ranks() as folder, folder_of_ranks() as checkpoints, chunks_of(300):
            path = os.path.join(checkpoints, "run")
            for step, (kind, options, knobs) in enumerate(cases):
                plain = build(None, **knobs)
                reference = make(plain, kind, None, **options)
                train(plain, reference, schedules=False)
                source = build(in_files(folder, 0.7), **knobs)
                optimizer = make(source, kind, in_files(folder, 0.7), **options)
                train(source, optimizer, schedules=False)
                checkpoint.save(path, checkpoint.TrainState(source, optimizer, step=step), read_back=True)
                assert_equal(optimizer, reference)
                for policy in (in_files(folder, 0.4), Offload(0.5)):
                    model = build(policy, **knobs)
                    mine = make(model, kind, policy, **options)
                    for is_fresh in (True, False):
                        if not is_fresh:
                            train(model, mine, start=5, steps=1, schedules=False)
                        checkpoint.load(path, checkpoint.TrainState(model, mine))
                        assert_equal(mine, reference)
                train(plain, reference, start=3, steps=1, schedules=False)
                train(model, mine, start=3, steps=1, schedules=False)
                assert_equal(mine, reference)
            del source, optimizer, model, mine
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(path)

    @ranks(4)
    def test_replicas_send_each_other_states_in_files():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        with folder_of_ranks() as folder, folder_of_ranks() as checkpoints, chunks_of(300):
            path = os.path.join(checkpoints, "run")
            model = build(in_files(folder), mesh=mesh)
            optimizer = make(model, torch.optim.AdamW, in_files(folder), lr=0.05)
            train(model, optimizer, schedules=False)
            checkpoint.save(path, checkpoint.TrainState(model, optimizer, step=3))
            other = build(in_files(folder, 0.6), mesh=mesh)
            mine = make(other, torch.optim.AdamW, in_files(folder, 0.6), lr=0.05)
            checkpoint.load(path, checkpoint.TrainState(other, mine))
            assert same(values_of(mine.state_dict()), values_of(optimizer.state_dict()))
            del model, optimizer, other, mine
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(path)

    @ranks(1)
    def test_no_more_than_some_chunks_are_in_memory():
        """Of the tensors that a save or a load reads from files, one is in memory at a time: a state of one parameter."""
        with folder_of_ranks() as folder, tempfile.TemporaryDirectory() as path, chunks_of(2048):
            model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
            for each in (*model, model):
                fully_shard(each, mesh=init_device_mesh("cpu", (1,)), offload_policy=in_files(folder))
            optimizer = offloaded(torch.optim.AdamW, model)
            model(torch.ones(1, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            real, held, most = StoredTensor.read, [], [0]

            def read(self):
                found = real(self)
                held.append(weakref.ref(found))
                most[0] = max(most[0], sum(each() is not None for each in held))
                return found

            state = checkpoint.TrainState(model, optimizer, step=1)
            with mock.patch.object(StoredTensor, "read", read):
                checkpoint.save(path, state)
                checkpoint.load(path, state)
            assert len(held) == 16 and most[0] == 1, (len(held), most)
            del model, optimizer, state

    @ranks(2)
    def test_an_asynchronous_save_has_the_states_of_its_step():
        with folder_of_ranks() as folder, folder_of_ranks() as checkpoints, chunks_of(300):
            path = os.path.join(checkpoints, "run")
            model = build(in_files(folder, 0.7))
            optimizer = make(model, torch.optim.AdamW, in_files(folder, 0.7), lr=0.05)
            train(model, optimizer, schedules=False)
            want = values_of(optimizer.state_dict())
            future = checkpoint.async_save(
                path, checkpoint.TrainState(model, optimizer, step=3), process_group=dist.new_group(backend="gloo")
            )
            train(model, optimizer, start=3, steps=1, schedules=False)
            future.result()
            checkpoint.load(path, checkpoint.TrainState(model, optimizer))
            assert same(values_of(optimizer.state_dict()), want)
            del model, optimizer
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(path)


class UsedGradientsTest(unittest.TestCase):
    @ranks(2)
    def test_zeroing_gradients_drops_those_that_a_step_has_used():
        def run(policy, how):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))
            for each in (model[0], model[2], model):
                fully_shard(each, mesh=init_device_mesh("cpu", (2,)), offload_policy=policy)
            optimizer = offloaded(torch.optim.AdamW, model, in_backward=True, lr=1e-2)
            for step in range(3):
                model(torch.full((2, 8), 1.0 + step)).square().mean().backward()
                if how == "before the step":
                    optimizer.zero_grad(set_to_none=False)
                optimizer.step()
                if how == "to None":
                    optimizer.zero_grad()
                elif how == "by the optimizer":
                    optimizer.zero_grad(set_to_none=False)
                elif how == "by the model":
                    model.zero_grad(set_to_none=False)
                elif how == "one by one":
                    for param in model.parameters():
                        param.grad.zero_()
                assert all(param.grad is None for param in model.parameters())
            return [param.to_local().clone() for param in model.parameters()]

        with folder_of_ranks() as folder:
            for policy in (Offload(), Offload(to=folder)):
                want = run(policy, "to None")
                for how in ("by the optimizer", "by the model", "before the step", "one by one"):
                    assert all(map(torch.equal, run(policy, how), want)), how

    @ranks(1)
    def test_reduced_gradients_do_not_wait_for_slow_steps():
        count = 10
        model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(count)))
        for each in (*model, model):
            fully_shard(each, mesh=init_device_mesh("cpu", (1,)), offload_policy=Offload())
        optimizer = offloaded(torch.optim.AdamW, model, in_backward=True)
        real, held = OffloadedOptimizer.step_group, []

        def slow(self, group):
            time.sleep(0.02)  # Longer than the backward of a layer.
            held.append(sum(param.grad is not None and not is_used(param.grad) for param in model.parameters()))
            real(self, group)

        def is_used(grad):
            return "this gradient was used" in repr(grad)

        with mock.patch.object(OffloadedOptimizer, "step_group", slow):
            model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        assert len(held) == count and max(held) <= 4, held


class PolicyWithoutEffectTest(unittest.TestCase):
    @ranks(2)
    def test_an_ordinary_optimizer_beside_a_policy_says_so():
        def texts(policy, make_optimizer):
            model = pairs(policy)
            optimizer = make_optimizer(model)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for number in range(3):
                    step_of(model, optimizer, number)
            return [str(each.message) for each in caught if "offload_policy" in str(each.message)]

        def ordinary(model):
            return torch.optim.AdamW(model.parameters())

        with folder_of_ranks() as folder:
            for policy in (Offload(), Offload(0.5), Offload(to=folder), Offload(parameters="files", to=folder)):
                (text,) = texts(policy, ordinary)
                assert text.startswith("AdamW keeps all of its states beside the parameters") and "0.weight" in text, text
                assert "offloaded(AdamW, model, ...)" in text, text
                assert not texts(policy, lambda model: offloaded(torch.optim.AdamW, model))
        for policy in (Offload(0.0), Offload(parameters=True), None):  # Nothing else was asked for.
            assert not texts(policy, ordinary)

    @ranks(2)
    def test_wrong_arguments_are_named():
        model = pairs(Offload(0.5))
        text = error_of(offloaded, torch.optim.AdamW, model.parameters())
        assert "TypeError: the second argument of offloaded is the model, an nn.Module, got generator" in text, text
        text = error_of(offloaded, torch.optim.AdamW(model.parameters()), model)
        assert "got an object of AdamW: give one of these classes" in text and "\n" not in text, text


if __name__ == "__main__":
    unittest.main()
