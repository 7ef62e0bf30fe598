"""Optimizers with states in host memory: bitwise the optimizers without offload, at any fraction."""

import copy
import unittest
from unittest import mock

import torch
from common import error_of, ranks
from offload_cases import ADAMW, BLOCKS, POLICY, SGD, assert_equal, backward, build, check, make, train, window_tier
from tested_device import DEVICE
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard

from torch_ragged.fsdp import (
    CPUOffloadPolicy,
    Offload,
    fully_shard,
    memory_report,
    offloaded,
    reshard_to,
)
from torch_ragged.fsdp.offload import _offloaded_optimizer
from torch_ragged.optim import Adam8bit, AdamW8bit


class BitsTest(unittest.TestCase):
    @ranks(2)
    def test_each_optimizer_has_its_own_bits_at_any_fraction():
        some, all_of_them = (0.3, 1), (0, 0.25, 0.5, 0.77, 1)
        check(*ADAMW, all_of_them)
        check(*SGD, some)
        check(torch.optim.SGD, {"lr": 0.05, "momentum": 0}, (0.5,))
        if DEVICE == "cpu":  # The simulator's kernels are the CPU's, which round what is left of a vector in another way.
            check(torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "maximize": True}, (0.5,), torch.bfloat16)
        check(torch.optim.Adam, {"lr": 0.05, "weight_decay": 0.1, "amsgrad": True}, some)
        check(torch.optim.Adam, {"lr": 0.05, "weight_decay": 0.1}, some, torch.bfloat16)
        check(torch.optim.AdamW, {"lr": 0.05, "foreach": True}, (0.6,))
        check(torch.optim.AdamW, {"lr": 0.05, "fused": True}, some)
        check(torch.optim.AdamW, {"lr": torch.tensor(0.05)}, (0.6,), how={"schedules": False})

    @ranks(2)
    def test_8_bit_optimizers_are_cut_between_blocks():
        check(AdamW8bit, {"lr": 0.05, "policy": POLICY}, (0, 0.4, 1), **BLOCKS)
        rounding = {"lr": 0.05, "policy": POLICY, "stochastic_rounding": True}
        check(Adam8bit, {**rounding, "weight_decay": 0.1}, (0.4, 0.8), torch.bfloat16, **BLOCKS)

    @ranks(2)
    def test_accumulation_clipping_and_mixed_precision_change_no_bit():
        how = {"passes": 2, "clip": 0.1}
        mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        check(*ADAMW, (0.5,), how=how, mp_policy=mixed)
        check(*ADAMW, (0.5,), torch.bfloat16, how=how, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))

    @ranks(2)
    def test_parameters_in_host_memory_and_other_placements_change_no_bit():
        plain = build(None, offload_policy=CPUOffloadPolicy(pin_memory=DEVICE != "cpu"))  # The CPU steps it, too.
        model = build(Offload(parameters=True))
        reference, mine = make(plain, ADAMW[0], None, **ADAMW[1]), make(model, ADAMW[0], 1, **ADAMW[1])
        train(plain, reference)
        train(model, mine)
        assert_equal(mine, reference)
        check(*ADAMW, (0.5,), shard_placement_fn=lambda p: Shard(p.ndim - 1))
        check(*ADAMW, (0.5,), reshard_after_forward=False)

    @ranks(1)
    def test_another_default_device_changes_no_bit():
        plain, model = build(None), build(0.5)
        reference = make(plain, ADAMW[0], None, **ADAMW[1])
        with torch.device("meta"):
            mine = make(model, ADAMW[0], 0.5, **ADAMW[1])
        train(plain, reference)
        train(model, mine)
        assert_equal(mine, reference)

    @ranks(4)
    def test_hsdp_and_tensor_parallelism_change_no_bit():
        check(*ADAMW, (0.5,), mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards")))
        check(*ADAMW, (0.5,), mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), tp=True)

    @unittest.skipUnless(DEVICE == "cpu", "threads of the CPU step what lies in host memory only")
    @ranks(1)
    def test_threads_of_the_cpu_change_no_bit():
        """Threads share out a tensor at elements that are no multiples of a vector register."""

        def trained(fraction, optimizer, dtype):
            torch.manual_seed(0)
            model = nn.Linear(301, 299).to(dtype)
            knobs = {} if fraction is None else {"offload_policy": Offload(optimizer=fraction)}
            fully_shard(model, mesh=init_device_mesh("cpu", (1,)), **knobs)
            mine = (
                offloaded(*optimizer[:1], model, **optimizer[1]) if knobs else optimizer[0](model.parameters(), **optimizer[1])
            )
            for step in range(3):
                model(torch.randn(4, 301, generator=torch.Generator().manual_seed(step)).to(dtype)).float().sum().backward()
                mine.step()
                mine.zero_grad()
            return mine

        sgd = (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1})
        torch.set_num_threads(3)
        try:
            for optimizer in (ADAMW, sgd):
                for dtype, whole in ((torch.float32, False), (torch.bfloat16, True)):
                    reference = trained(None, optimizer, dtype)
                    mine = trained(0.4, optimizer, dtype)
                    assert_equal(mine, reference)
                    states, held = 1 if optimizer is sgd else 2, mine.tier_nbytes()
                    # A large parameter of 16 bits is not cut: only the bias is in host memory, in multiples of 64 elements.
                    assert held["host"] == states * (2 * 320 if whole else 4 * (35840 + 320)), held
                    assert held["device"] == states * (2 * 89999 if whole else 4 * 54208), held
        finally:
            torch.set_num_threads(1)


class TiersTest(unittest.TestCase):
    @ranks(2)
    def test_the_fraction_of_each_shard_lies_in_host_memory():
        for fraction in (0.25, 0.5, 0.9):
            model = build(fraction)
            optimizer = make(model, fraction=fraction, optimizer=torch.optim.AdamW)
            before = optimizer.tier_nbytes()
            assert before["device"] == 0 and before["host"] > 0  # Host memory is there before the first step.
            train(model, optimizer)
            after = optimizer.tier_nbytes()
            assert after["host"] == before["host"]
            trained = [p.to_local().numel() for p in model.parameters() if p.requires_grad]
            # Cuts are at multiples of 64 elements in each of two groups, and pieces are padded to such a multiple.
            assert abs(after["host"] - 8 * fraction * sum(trained)) <= 8 * (2 * 32 + 64 * len(trained))

    @ranks(2)
    def test_host_memory_stays_where_it_is():
        model = build(1)
        optimizer = make(model, torch.optim.AdamW, 1)
        train(model, optimizer, steps=1)
        before = {id(p): s["exp_avg"].to_local().data_ptr() for p, s in optimizer.state.items()}
        train(model, optimizer, steps=2, start=1)
        optimizer.load_state_dict(optimizer.state_dict())
        after = {id(p): s["exp_avg"].to_local().data_ptr() for p, s in optimizer.state.items()}
        assert before.items() <= after.items() and len(before) > 3

    @ranks(2)
    def test_windows_change_no_bit():
        """As on an accelerator: states are copied through two windows, chunk by chunk."""

        with mock.patch.object(_offloaded_optimizer, "tier_of", window_tier):
            for most in (64, 1000, 10**6):
                with mock.patch.object(_offloaded_optimizer, "window_numel", lambda device: most):
                    check(*ADAMW, (0.7,))
                    check(*SGD, (1,))
                    check(AdamW8bit, {"lr": 0.05, "policy": POLICY}, (0.7,), **BLOCKS)

    @ranks(2)
    def test_groups_of_two_dtypes_share_the_windows():
        def trained(fraction):
            torch.manual_seed(0)
            model = nn.ModuleList([nn.Linear(24, 24), nn.Linear(24, 24).to(torch.bfloat16)])
            for layer in model:
                knobs = {} if fraction is None else {"offload_policy": Offload(fraction)}
                fully_shard(layer, mesh=init_device_mesh("cpu", (2,)), **knobs)
            options = {"lr": 0.05, "foreach": False}
            kind = torch.optim.AdamW
            optimizer = kind(model.parameters(), **options) if fraction is None else offloaded(kind, model, **options)
            for step in range(3):
                x = torch.randn(4, 24, generator=torch.Generator().manual_seed(step))
                (model[0](x).sum() + model[1](x.bfloat16()).sum().float()).backward()
                optimizer.step()
                optimizer.zero_grad()
            return optimizer

        reference = trained(None)
        with mock.patch.multiple(_offloaded_optimizer, tier_of=window_tier, window_numel=lambda device: 128):
            assert_equal(trained(0.8), reference)

    @ranks(2)
    def test_a_step_that_raised_leaves_an_optimizer_that_loads():
        plain, reference = build(None), None
        reference = make(plain, torch.optim.AdamW, None, lr=0.05)
        train(plain, reference, steps=1)
        saved = {key: value.clone() for key, value in plain.state_dict().items()}
        with mock.patch.multiple(_offloaded_optimizer, tier_of=window_tier, window_numel=lambda device: 256):
            model = build(0.8)
            optimizer = make(model, torch.optim.AdamW, 0.8, lr=0.05)
        backward(model, 3)
        wrong = next(p for p in reversed(list(model.parameters())) if p.grad is not None)
        with mock.patch.object(type(wrong), "placements", property(lambda self: 1 / 0)):
            assert "ZeroDivisionError" in error_of(optimizer.step)
        optimizer.zero_grad()
        model.load_state_dict(saved)
        optimizer.load_state_dict(reference.state_dict())
        train(plain, reference, start=1)
        train(model, optimizer, start=1)
        assert_equal(optimizer, reference)


class OrdinaryOptimizerTest(unittest.TestCase):
    """What other code does with an optimizer."""

    @ranks(2)
    def test_a_state_dict_loads_at_another_fraction_and_without_offload():
        for optimizer, options, knobs in ((*ADAMW, {}), (*SGD, {}), (AdamW8bit, {"lr": 0.05, "policy": POLICY}, BLOCKS)):
            plain = build(None, **knobs)
            reference = make(plain, optimizer, None, **options)
            train(plain, reference)
            first = build(0.3, **knobs)
            source = make(first, optimizer, 0.3, **options)
            train(first, source)
            weights, states = first.state_dict(), source.state_dict()
            train(plain, reference, start=3)
            for fraction in (None, 0, 0.8, 1):
                model = build(fraction, **knobs)
                mine = make(model, optimizer, fraction, **options)
                train(model, mine, start=7, steps=1)  # Other states, which are replaced.
                model.load_state_dict(weights)
                mine.load_state_dict(copy.deepcopy(states) if fraction is None else states)
                train(model, mine, start=3)
                assert_equal(mine, reference) if fraction is not None else assert_equal(reference, mine)
            # What was loaded is a copy.
            check_again = build(None, **knobs)
            other = make(check_again, optimizer, None, **options)
            train(check_again, other)
            assert_equal(source, other)

    @ranks(2)
    def test_grad_scaler_skips_steps_with_infinities():
        def trained(fraction):
            model = build(fraction)
            optimizer = make(model, torch.optim.AdamW, fraction, lr=0.05)
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            for step in range(4):
                scale = scaler.scale(torch.ones(())).item()
                backward(model, step, scale=float("inf") if step == 2 else scale)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            return optimizer, scaler.get_scale()

        (mine, scale), (reference, other) = trained(0.6), trained(None)
        assert scale == other == 512.0
        assert_equal(mine, reference)

    @ranks(2)
    def test_the_next_forward_notices_the_step():
        """If parameters stay unsharded, version counters say that they have changed."""
        model, plain = build(1), build(None)
        optimizer, reference = make(model, torch.optim.SGD, 1, lr=0.5), make(plain, torch.optim.SGD, None, lr=0.5)
        for each, steps in ((model, optimizer), (plain, reference)):
            each.set_reshard_after_backward(False)
            train(each, steps)
        assert_equal(optimizer, reference)

    @ranks(2)
    def test_wrong_uses_are_errors_on_all_ranks():
        rank = torch.distributed.get_rank()
        model = build(0.5)
        optimizer = make(model, torch.optim.AdamW, 0.5, lr=0.05)
        kinds = torch.optim.Adagrad if rank else torch.optim.Adam  # Wrong on one rank only.
        assert ("TypeError" if rank else "RuntimeError: offloaded failed on rank 1: TypeError") in error_of(
            offloaded, kinds, model
        )
        text = (
            "found no Offload policy in 2 groups of FSDPTied: call fully_shard(module, offload_policy=Offload(optimizer=0.5))"
        )
        assert text in error_of(offloaded, torch.optim.Adam, build(None))
        assert "supports no differentiable=True" in error_of(offloaded, torch.optim.Adam, model, differentiable=True)
        cut = fully_shard(nn.Linear(24, 72), mesh=init_device_mesh("cpu", (2,)), offload_policy=Offload())
        text = error_of(offloaded, AdamW8bit, cut, policy=POLICY)
        assert "are cut between ranks" in text, text
        further = {"params": [nn.Parameter(torch.ones(1))]}
        assert "takes no further parameter group" in error_of(optimizer.add_param_group, further)
        optimizer.param_groups[0]["amsgrad"] = True
        assert "parameter group 0 needs the states ['exp_avg', 'exp_avg_sq', 'max_exp_avg_sq']" in error_of(optimizer.step)
        optimizer.param_groups[0]["amsgrad"] = False
        train(model, optimizer)
        states = optimizer.state_dict()
        index = next(iter(states["state"]))
        del states["state"][index]["exp_avg"]
        assert f"the state exp_avg of parameter {index}" in error_of(optimizer.load_state_dict, states)
        assert "reshard_to does not support Offload(" in error_of(reshard_to, model, optimizer, init_device_mesh("cpu", (2,)))
        assert "cannot be pickled or copied" in error_of(copy.deepcopy, optimizer)
        model.to(torch.bfloat16)
        assert "was converted after offloaded()" in error_of(optimizer.step)
        plain = build(None)
        reshard_to(plain, make(plain, torch.optim.AdamW, None), DeviceMesh("cpu", [0]))
        text = "rank 1 is not in the mesh" if rank else "offloaded found no Offload policy"
        assert text in error_of(offloaded, torch.optim.AdamW, plain)


class MemoryTest(unittest.TestCase):
    @ranks(2)
    def test_a_report_has_host_memory():
        plain = memory_report(build(None), torch.optim.AdamW)
        assert "host memory" not in str(plain) and plain.peak.host == 0
        policy = Offload(1 / 3)
        model = build(policy)
        optimizer = make(model, torch.optim.AdamW, policy)
        predicted = memory_report(model, optimizer)
        # Each of two groups is cut at the nearest multiple of 64 elements, and a counter is counted once per piece.
        stays = plain.peak.total - plain.peak.optimizer // 3
        assert abs(predicted.peak.total - stays) <= 2 * 32 * 8 + 2 * 4
        assert predicted.peak.host >= plain.peak.optimizer // 3 - 2 * 32 * 8
        train(model, optimizer)
        after = memory_report(model, optimizer)
        assert (after.total.optimizer, after.total.host) == (predicted.peak.optimizer, predicted.peak.host)
        assert "states in host memory" in str(after)


class PolicyTest(unittest.TestCase):
    def test_a_policy_is_checked_and_frozen(self):
        self.assertEqual(repr(Offload(optimizer=0.5)), "Offload(optimizer=0.5, parameters=False, to='cpu')")
        self.assertEqual(len({Offload(0.5), Offload(0.5), Offload(1)}), 2)
        for wrong in (-0.1, 1.5, float("nan"), True, "half"):
            with self.assertRaisesRegex(ValueError, "is no fraction"):
                Offload(optimizer=wrong)
        with self.assertRaisesRegex(ValueError, "must be True, False"):
            Offload(parameters=1)
        with self.assertRaisesRegex(ValueError, "keeps states on the device for an optimizer that runs on the CPU"):
            Offload(optimizer=0.5, parameters=True)
        with self.assertRaisesRegex(AttributeError, "cannot assign to field 'optimizer'"):
            Offload().optimizer = 0.5


if __name__ == "__main__":
    unittest.main()
