"""Muon, Shampoo and SOAP with states in tiers: bitwise those without offload, at any fraction, in host memory and in files."""

import contextlib
import copy
import errno
import gc
import os
import shutil
import tempfile
import unittest
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import error_of, ranks, run_ranks
from offload_cases import assert_equal, chunks_of, folder_of_ranks, in_files, window_tier
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from torch_ragged import checkpoint
from torch_ragged.fsdp import Offload, fully_shard, memory_report, monitor, offloaded, reshard_to
from torch_ragged.fsdp.files import _scratch_file
from torch_ragged.fsdp.offload import _offloaded_optimizer, _tiers
from torch_ragged.optim import SOAP, BlockPolicy, Muon, Shampoo, matrix_groups, muon_policy

MUON, SHAMPOO, SOAPS = (Muon, {"lr": 0.05}), (Shampoo, {"lr": 0.05, "interval": 2}), (SOAP, {"lr": 0.05, "interval": 2})
KINDS = (MUON, SHAMPOO, SOAPS)


class Experts(nn.Module):
    """A stack of three matrices."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 16, 24) / 4)

    def forward(self, x):
        return torch.einsum("eij,...j->...i", self.up, x)


class Block(nn.Module):
    def __init__(self, has_experts):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(16), nn.Linear(16, 24)
        self.down = Experts() if has_experts else nn.Linear(24, 16, bias=False)
        self.scale = nn.Parameter(torch.ones(24))  # Data may skip it.

    def forward(self, x, skips):
        inner = torch.tanh(self.up(self.norm(x)))
        return x + self.down(inner if skips else inner * self.scale)


class Net(nn.Module):
    """An embedding that AdamW trains, blocks with a stack of matrices or without, a frozen matrix, and a late layer."""

    def __init__(self):
        super().__init__()
        self.embedding, self.skipped = nn.Embedding(30, 16), nn.Linear(16, 16)
        self.blocks, self.frozen = nn.ModuleList(map(Block, (True, False, False))), nn.Linear(16, 16)
        self.frozen.requires_grad_(False)

    def forward(self, tokens, skips=False):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, skips)
        x = self.frozen(x)
        return x if skips else x + self.skipped(x)


def build(policy, dtype=torch.float32, mesh=None, **knobs):
    torch.manual_seed(0)
    model = Net().to(dtype)
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    if "policy_of_matrices" in knobs:  # One for each model.
        knobs["orig_param_policy"] = knobs.pop("policy_of_matrices")()
    if policy is not None:
        knobs["offload_policy"] = policy if isinstance(policy, Offload) else Offload(policy)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **knobs)
    return fully_shard(model, mesh=mesh, **knobs)


def make(model, kind, policy, in_backward=False, **options):
    groups = matrix_groups(model, lr=0.01)
    return kind(groups, **options) if policy is None else offloaded(kind, model, groups, in_backward=in_backward, **options)


def backward(model, step, skips=False):
    tokens = torch.randint(0, 30, (2, 3), generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
    model(tokens, skips).float().square().mean().backward()


def train(model, optimizer, start=0, steps=3, passes=1):
    for step in range(start, start + steps):
        for each in range(passes):
            model.set_requires_gradient_sync(each == passes - 1)
            backward(model, step + 10 * each, skips=step == 0)  # The late layer has no gradient in the first step.
        optimizer.step()
        optimizer.zero_grad()


def reference_of(kind, options, passes=1, **knobs):
    model = build(None, **knobs)
    optimizer = make(model, kind, None, **options)
    train(model, optimizer, passes=passes)
    return optimizer


def check(kind, options, policies, in_backward=False, passes=1, **knobs):
    reference = reference_of(kind, options, passes, **knobs)
    for policy in policies:
        model = build(policy, **knobs)
        optimizer = make(model, kind, policy, in_backward, **options)
        train(model, optimizer, passes=passes)
        assert_equal(optimizer, reference)


def check_windows(kinds, sizes):
    """As on an accelerator, with chunks of at most so many elements."""
    with folder_of_ranks() as folder:
        for kind, options in kinds:
            for most in sizes:
                windows = {"tier_of": window_tier, "window_numel": lambda _, most=most: most}
                with mock.patch.multiple(_offloaded_optimizer, **windows), chunks_of(most):
                    check(kind, options, (0.6, 1, in_files(folder)))
        gc.collect()


class BitsTest(unittest.TestCase):
    @ranks(3)
    def test_each_optimizer_has_its_own_bits_at_any_fraction():
        for kind, options in KINDS:
            check(kind, options, (0.4, 1))
        check(*MUON, (0, 1), dtype=torch.bfloat16)

    @pytest.mark.slow
    @ranks(2)
    def test_windows_and_files_change_no_bit():
        check_windows(((Muon, {"lr": 0.05, "nesterov": False}), SOAPS), (100,))

    @pytest.mark.slow
    @ranks(4)
    def test_owners_with_empty_shards_and_replicas_change_no_bit():
        check(*MUON, (0.5,), policy_of_matrices=muon_policy)
        check(*SOAPS, (1,), mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards")))

    @pytest.mark.slow
    @ranks(4)
    def test_further_cases_change_no_bit():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        for kind, options in KINDS:
            check(kind, options, (0, 0.2, 0.8), policy_of_matrices=muon_policy)
            check(kind, options, (0.5,), mesh=mesh)
            check(kind, options, (0.5, 1), dtype=torch.bfloat16)
        rows = {"lr": torch.tensor(0.05), "row_blocks": 2}
        check(Muon, rows, (0.5, 1), shard_placement_fn=lambda p: Shard(p.ndim - 1))
        check_windows((*KINDS, (Muon, {"lr": 0.05, "nesterov": False}), (Muon, rows)), (64, 1000, 10**6))

    @ranks(2)
    def test_8_bit_momentum_lies_in_tiers():
        def trained(offload):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64))
            knobs = {} if offload is None else {"offload_policy": Offload(offload)}
            fully_shard(model, mesh=init_device_mesh("cpu", (2,)), orig_param_policy=BlockPolicy((16, 16)), **knobs)
            optimizer = make(model, Muon, offload, lr=0.05, momentum_block=(16, 16))
            for step in range(3):
                model(torch.full((2, 64), 1.0 + step + dist.get_rank())).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            return optimizer

        reference = trained(None)
        for fraction in (0.5, 1):
            optimizer = trained(fraction)
            assert_equal(optimizer, reference)
        assert {"momentum_codes", "momentum_scales"} <= {name for chunk, _ in optimizer._chunks for name in chunk.sizes}

    @pytest.mark.slow
    @ranks(2)
    def test_a_matrix_that_no_unit_has_keeps_its_states_beside_it():
        def trained(policy, state=None, **how):
            model = build(policy)
            alone = nn.Parameter(torch.eye(8))
            groups = [*matrix_groups(model, lr=0.01), {"params": [alone]}]
            kind, options = SOAPS
            make_one = kind if policy is None else lambda *given, **rest: offloaded(kind, model, *given, **how, **rest)
            optimizer = make_one(groups, **options)
            if state is not None:
                optimizer.load_state_dict(state)
            for step in range(3):
                backward(model, step)
                alone.grad = torch.full((8, 8), 1.0 + step)
                optimizer.step()
                optimizer.zero_grad()
            return optimizer

        reference = trained(None)
        state = copy.deepcopy(reference.state_dict())
        for how in ({}, {"in_backward": True}):
            assert_equal(trained(1, **how), reference)
            assert_equal(trained(1, state, **how), trained(None, copy.deepcopy(state)))

    @ranks(2)
    def test_averages_of_rows_stay_on_the_device():
        """NorMuon: they are small. The momentum lies in its tier."""
        options = {"lr": 0.05, "neuron_beta": 0.9}
        reference = reference_of(Muon, options)
        model = build(1)
        optimizer = make(model, Muon, 1, **options)
        train(model, optimizer)
        want, states = reference.state_dict()["state"], optimizer.state_dict()["state"]
        assert optimizer.tier_nbytes()["device"] == sum(
            each.to_local().nbytes for state in want.values() for name, each in state.items() if name.startswith("neuron")
        )
        for index, each in want.items():
            assert states[index].keys() == each.keys()
            for name, value in each.items():
                assert torch.equal(
                    getattr(states[index][name], "_local_tensor", states[index][name]), getattr(value, "_local_tensor", value)
                )
        saved = copy.deepcopy(reference.state_dict())
        optimizer.load_state_dict(saved)
        again = optimizer.state_dict()["state"]
        assert all(again[index].keys() == each.keys() for index, each in want.items())


class InBackwardTest(unittest.TestCase):
    @ranks(3)
    def test_steps_in_backward_change_no_bit():
        with folder_of_ranks() as folder, chunks_of(300):
            check(*MUON, (0.5,), in_backward=True, passes=2)
            check(*SOAPS, (in_files(folder),), in_backward=True)
            check(*MUON, (Offload(parameters="files", to=folder),), in_backward=True)
            gc.collect()

    @pytest.mark.slow
    @ranks(4)
    def test_further_steps_in_backward_change_no_bit():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        with folder_of_ranks() as folder, chunks_of(300):
            for kind, options in KINDS:
                check(kind, options, (0, 0.5, in_files(folder, 0.5)), in_backward=True)
                check(kind, options, (0.5, in_files(folder)), in_backward=True, mesh=mesh)
                check(kind, options, (0.5,), in_backward=True, policy_of_matrices=muon_policy, passes=2)
            gc.collect()

    @ranks(2)
    def test_a_layer_that_one_rank_alone_uses_is_stepped_by_all():
        """The collectives of its step are at one point of the order that ranks share."""

        def trained(policy, **how):
            model = build(policy)
            optimizer = make(model, *MUON[:1], policy, **how, **MUON[1])
            for step in range(3):
                backward(model, step, skips=(step + dist.get_rank()) % 2 == 0)
                optimizer.step()
                optimizer.zero_grad()
            return optimizer

        assert_equal(trained(1, in_backward=True), trained(None))

    @ranks(2)
    def test_groups_are_stepped_while_backward_runs():
        model = build(1)
        optimizer = make(model, Muon, 1, in_backward=True)
        seen, real = [], _offloaded_optimizer.OffloadedOptimizer.step_group

        def step_group(self, group):
            real(self, group)
            seen.append(group.names)

        with mock.patch.object(_offloaded_optimizer.OffloadedOptimizer, "step_group", step_group):
            model.blocks[0].register_full_backward_pre_hook(lambda *_: seen.append("backward of 0"))
            before = [p.detach().clone() for p in model.blocks.parameters()]
            backward(model, 1)
        assert seen.index("backward of 0") == 1 and len(seen) == 5, seen
        changed = [
            not torch.equal(p.to_local(), q.to_local())
            for p, q in zip(model.blocks.parameters(), before)
            if p.to_local().numel()
        ]
        assert all(changed)
        optimizer.step()


def numel_of_states(reference):
    """By tensor, the elements of this rank's states without offload, step counters left out."""
    states = [value for state in reference.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    return [value.to_local().numel() for value in states if value.ndim]


class PlacesTest(unittest.TestCase):
    @ranks(2)
    def test_a_fraction_of_the_states_lies_in_host_memory():
        for kind, options in KINDS:
            reference = reference_of(kind, options)
            every = sum(value.to_local().nbytes for s in reference.state.values() for value in s.values() if value.ndim)
            for fraction in (0, 0.7, 1):
                model = build(fraction)
                optimizer = make(model, kind, fraction, **options)
                before = optimizer.tier_nbytes()
                assert before["device"] == 0 and (before["host"] > 0) is (fraction > 0), (before, fraction)
                train(model, optimizer)
                found = optimizer.tier_nbytes()
                assert found["host"] == before["host"] and every <= sum(found.values()) <= every + 2 * 12 * 4 * 64, (
                    found,
                    every,
                )
                # Exact to a half of the largest parameter, and to the padding of AdamW's pieces.
                largest = max(sum(v.to_local().nbytes for v in s.values() if v.ndim) for s in reference.state.values())
                assert abs(found["device"] - (1 - fraction) * every) <= largest / 2 + 2 * 12 * 4 * 64, (found, every, fraction)
                if fraction == 1:
                    assert found["device"] == 0

    @ranks(1)
    def test_fractions_of_small_groups_add_up():
        """A group has one matrix, which lies in one memory: what it has too much is taken from the next group."""
        for fraction in (0.1, 0.3, 0.7):
            model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(8)))
            for layer in model:
                fully_shard(layer, mesh=init_device_mesh("cpu", (1,)), offload_policy=Offload(fraction))
            for kind, options in KINDS:
                optimizer = offloaded(kind, model, **options)
                whole = offloaded(kind, fully_shard(nn.Linear(16, 16, bias=False), offload_policy=Offload()), **options)
                moved = optimizer.tier_nbytes()["host"] / whole.tier_nbytes()["host"]
                assert abs(moved - 8 * fraction) <= 0.5, (moved, fraction)

    @ranks(2)
    def test_host_memory_stays_where_it_is():
        for kind, options in KINDS:
            model = build(1)
            optimizer = make(model, kind, 1, **options)
            slabs = {id(memory): memory for _, tier in optimizer._chunks for memory in getattr(tier, "_slabs", {}).values()}
            ranges = [(t.data_ptr(), t.data_ptr() + t.nbytes) for memory in slabs.values() for t in memory.values()]
            train(model, optimizer)
            for param in model.parameters():
                for value in optimizer.state[param].values() if param in optimizer.state else ():
                    if value.ndim and value.to_local().numel() and kind is Muon:
                        assert any(a <= value.to_local().data_ptr() < b for a, b in ranges)
            assert not any(
                v.ndim and v.to_local().numel() for s in optimizer._matrices.template.state.values() for v in s.values()
            )

    @ranks(1)
    def test_a_step_holds_two_windows_and_moves_each_state_once():
        for kind, options in KINDS:
            with mock.patch.multiple(_offloaded_optimizer, tier_of=window_tier, window_numel=lambda _: 64):
                model = build(1)
                optimizer = make(model, kind, 1, **options)
            (tier,) = {tier for _, tier in optimizer._chunks if isinstance(tier, _tiers.WindowTier)}
            largest = {}
            for chunk, _ in optimizer._chunks:
                for name, (numel, _) in chunk.sizes.items():
                    largest[name] = max(numel, largest.get(name, 0))
            held = sum(t.numel() for window in tier._windows for t in window.values())
            # One matrix, or one run of elements: not a stack, a layer or the model.
            assert held == 2 * sum(largest.values()) and largest.get("momentum_buffer", 0) <= 3 * 16 * 24
            assert largest.get("left", 0) == (0 if kind is Muon else 24 * 24 + 0), largest
            with monitor(model, optimizer) as watch:
                for step in range(1, 3):
                    backward(model, step)
                    optimizer.step()
                    optimizer.zero_grad()
                row = watch.step()
            host = optimizer.tier_nbytes()["host"]
            assert row["tier_write_bytes"] == 2 * host, (kind, row, host)
            # And the first chunk of a step that does not come.
            assert 0 <= row["tier_read_bytes"] - 2 * host <= max(chunk.nbytes for chunk, _ in optimizer._chunks), (
                kind,
                row,
                host,
            )

    @ranks(2)
    def test_a_report_foresees_what_the_first_step_makes():
        for kind, options in (MUON, SOAPS):
            for fraction in (0.5, 1):
                model = build(fraction)
                optimizer = make(model, kind, fraction, **options)
                backward(model, 1)
                optimizer.zero_grad()
                peak = memory_report(model, optimizer).peak
                backward(model, 1)
                optimizer.step()
                total = memory_report(model, optimizer).total
                assert (peak.optimizer, peak.host) == (total.optimizer, total.host), (kind, fraction, peak, total)


def save_on(path, policy, kind, options):
    """Save by both ways after three steps. Returns the parameters two steps later."""
    model = build(policy)
    optimizer = make(model, kind, policy, **options)
    train(model, optimizer)
    checkpoint.save(os.path.join(path, "own"), checkpoint.TrainState(model, optimizer, step=3))
    states = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(states, checkpoint_id=os.path.join(path, "dcp"))
    train(model, optimizer, start=3, steps=2)
    return [param.detach().full_tensor() for param in model.parameters()]


def load_on(path, policy, kind, options, how):
    model = build(policy)
    optimizer = make(model, kind, policy, **options)
    if policy is not None:
        train(model, optimizer, start=7, steps=1)  # Other states, which are replaced.
    if how == "own":
        checkpoint.load(os.path.join(path, "own"), checkpoint.TrainState(model, optimizer))
    else:
        states = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.load(states, checkpoint_id=os.path.join(path, "dcp"))
        model.load_state_dict(states["model"])
        set_optimizer_state_dict(model, optimizer, states["optimizer"])
    train(model, optimizer, start=3, steps=2)
    return [param.detach().full_tensor() for param in model.parameters()]


def saved_states(path, policy, kind, options):
    """Whole states after a load, without a further step: other world sizes have other batches."""
    model = build(policy)
    optimizer = make(model, kind, policy, **options)
    checkpoint.load(os.path.join(path, "own"), checkpoint.TrainState(model, optimizer))
    found = optimizer.state_dict()["state"]
    return {
        (index, name): value.full_tensor() if hasattr(value, "full_tensor") else value
        for index, states in found.items()
        for name, value in states.items()
    }


def check_checkpoints(kinds, pairs, ways):
    """What is saved with one policy trains on with another one, as it would have with its own."""
    with folder_of_ranks() as scratch, chunks_of(300):
        policy_of = {in_files: in_files(scratch, 0.8)}
        for kind, options in kinds:
            for source, targets in pairs:
                with folder_of_ranks() as path:
                    want = save_on(path, policy_of.get(source, source), kind, options)
                    for target in targets:
                        for how in ways:
                            found = load_on(path, policy_of.get(target, target), kind, options, how)
                            assert all(map(torch.equal, found, want)), (kind, source, target, how)
                    remove(path)
        gc.collect()


def remove(path):
    """What a checkpoint has left in a folder of all ranks."""
    dist.barrier()
    if dist.get_rank() == 0:
        for name in os.listdir(path):
            shutil.rmtree(os.path.join(path, name))
    dist.barrier()


class CheckpointTest(unittest.TestCase):
    @ranks(2)
    def test_a_checkpoint_loads_at_any_fraction_and_without_offload():
        check_checkpoints((SOAPS,), ((None, (0.5,)), (in_files, (None,))), ("own",))
        check_checkpoints((MUON,), ((0.6, (in_files, None)),), ("dcp",))

    @pytest.mark.slow
    @ranks(2)
    def test_all_checkpoints_load_everywhere():
        every = (None, 0.4, 1, in_files)
        check_checkpoints(KINDS, [(source, every) for source in every], ("own", "dcp"))

    @pytest.mark.slow
    def test_a_checkpoint_loads_on_another_number_of_ranks(self):
        self._check_sizes((SOAPS,), (0.7,), (2,))

    @pytest.mark.slow
    def test_checkpoints_load_on_other_numbers_of_ranks(self):
        self._check_sizes(KINDS, (0.7, None), (1, 2, 4))

    def _check_sizes(self, kinds, sources, sizes):
        for kind, options in kinds:
            for source in sources:
                with tempfile.TemporaryDirectory() as path:
                    run_ranks(3, save_on, path, source, kind, options)
                    (first, *_) = run_ranks(3, saved_states, path, source, kind, options)
                    for size in sizes:
                        for found in run_ranks(size, saved_states, path, None if source else 0.7, kind, options):
                            assert found.keys() == first.keys() and len(found) > 8
                            assert all(torch.equal(found[key], first[key]) for key in first)

    @ranks(2)
    def test_a_state_dict_of_another_shape_is_an_error_that_changes_nothing():
        other = reference_of(SOAP, {"lr": 0.05, "max_side": 16})
        model = build(0.5)
        optimizer = make(model, SOAP, 0.5, lr=0.05)
        train(model, optimizer)
        before = copy.deepcopy(optimizer.state_dict()["state"])
        assert "keep them" in error_of(optimizer.load_state_dict, other.state_dict())
        muon = reference_of(*MUON)
        assert error_of(optimizer.load_state_dict, muon.state_dict())
        after = optimizer.state_dict()["state"]
        for index, states in before.items():
            for name, value in states.items():
                assert torch.equal(
                    getattr(value, "_local_tensor", value), getattr(after[index][name], "_local_tensor", after[index][name])
                )


def check_fault(kind, options, in_backward):
    """A file of rank 1 fails in the second step."""
    reference = reference_of(kind, options)
    with folder_of_ranks() as scratch, folder_of_ranks() as path, chunks_of(300):
        model = build(in_files(scratch))
        optimizer = make(model, kind, in_files(scratch), in_backward, **options)
        train(model, optimizer, steps=1)
        state = checkpoint.TrainState(model, optimizer, step=1)
        checkpoint.save(f"{path}/run", state)
        broken = mock.patch.object(_scratch_file, "_preadv", side_effect=OSError(errno.EIO, "broken"))
        with broken if dist.get_rank() == 1 else contextlib.nullcontext():
            backward(model, 1)
            text = error_of(optimizer.step)
        assert ("OSError" if dist.get_rank() == 1 else "failed on rank 1: OSError") in text and scratch in text, text
        optimizer.zero_grad()
        assert "load a checkpoint" in error_of(optimizer.step)
        checkpoint.load(f"{path}/run", state)
        train(model, optimizer, start=1, steps=2)
        assert_equal(optimizer, reference)
        del model, optimizer, state
        gc.collect()
        remove(path)


class FaultsTest(unittest.TestCase):
    @ranks(2)
    def test_a_file_that_fails_on_one_rank_raises_on_all_and_training_goes_on():
        """The other ranks wait in no collective for it."""
        check_fault(*MUON, in_backward=True)
        check_fault(*SOAPS, in_backward=False)

    @ranks(2)
    def test_an_lr_that_one_rank_changes_after_backward_raises_on_all():
        model = build(1)
        optimizer = make(model, Muon, 1, in_backward=True)
        backward(model, 1)
        if dist.get_rank() == 1:
            optimizer.param_groups[0]["lr"] = 0.5
        text = error_of(optimizer.step)
        assert "such as lr, have changed between backward and step()" in text, text
        assert "load a checkpoint" in error_of(optimizer.state_dict)

    @pytest.mark.slow
    @ranks(3)
    def test_further_files_that_fail():
        for kind, options in KINDS:
            for in_backward in (False, True):
                check_fault(kind, options, in_backward)

    @ranks(2)
    def test_a_gradient_of_one_rank_alone_counts_as_zero_on_the_others():
        results = []
        for policy in (None, 0.5, 1):
            model = build(policy)
            optimizer = make(model, *MUON[:1], policy, **MUON[1])
            train(model, optimizer, steps=2)
            chosen = [model.skipped.weight, model.embedding.weight]
            for param in chosen if dist.get_rank() == 1 else ():
                param.grad = torch.ones_like(param)
            optimizer.step()
            assert all((param.grad is not None) is (dist.get_rank() == 1) for param in chosen)
            optimizer.zero_grad()
            results.append(optimizer)
        for each in results[1:]:
            assert_equal(each, results[0])

    @ranks(2)
    def test_what_is_refused():
        model = build(0.5)
        optimizer = make(model, Muon, 0.5, lr=0.05)
        train(model, optimizer)
        assert "reshard_to does not support Offload(" in error_of(reshard_to, model, optimizer, init_device_mesh("cpu", (2,)))
        assert "with matrix_groups(model)" in error_of(offloaded, Muon, model)
        model = build(0.05)
        optimizer = make(model, SOAP, 0.05)
        train(model, optimizer)
        optimizer.param_groups[0]["max_side"] = 20  # On all ranks: also where such matrices have no root.
        assert "keep them" in error_of(optimizer.step)
        train_with = dict(optimizer.param_groups[0], max_side=10000)
        optimizer.param_groups[0].update(train_with)
        train(model, optimizer)


if __name__ == "__main__":
    unittest.main()
