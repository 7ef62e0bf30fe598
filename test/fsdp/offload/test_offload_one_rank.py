"""Offloaded optimizers on one rank: where states lie to the byte, and what happens between steps."""

import errno
import tempfile
import threading
from unittest import mock

import torch
from common import error_of
from fsdp_one_rank import OneRankTest
from offload_cases import chunks_of, window_tier
from torch import nn

from torch_ragged.fsdp import Offload, fully_shard, offloaded
from torch_ragged.fsdp.files import _scratch_file
from torch_ragged.fsdp.offload import _offloaded_optimizer
from torch_ragged.fsdp.offload._in_backward import BackwardStep

ADAMW = torch.optim.AdamW


class Vectors(nn.Module):
    """Parameters of given numbers of elements."""

    def __init__(self, *sizes):
        super().__init__()
        self.vectors = nn.ParameterList(torch.randn(size) for size in sizes)

    def forward(self, number):
        return sum((vector * (number + 1)).square().sum() for vector in self.vectors)


def step_of(model, optimizer, number):
    model(number).backward()
    optimizer.step()
    optimizer.zero_grad()


def values_of(optimizer):
    """Copies of all states, by the number of their parameter and their name."""
    states = optimizer.state_dict()["state"]
    return {(i, key): getattr(value, "_local_tensor", value).clone() for i in states for key, value in states[i].items()}


def windows_of(numel):
    """As on an accelerator: two windows of at most ``numel`` elements, so that small models have several chunks."""
    return mock.patch.multiple(_offloaded_optimizer, tier_of=window_tier, window_numel=lambda device: numel)


class OffloadOnOneRankTest(OneRankTest):
    def vectors(self, *sizes, policy=None, kind=ADAMW, **options):
        """A model of one group, and its optimizer; ``policy`` None: without offload."""
        torch.manual_seed(0)
        knobs = {} if policy is None else {"offload_policy": policy}
        model = fully_shard(Vectors(*sizes), mesh=self.mesh, **knobs)
        return model, kind(model.parameters(), **options) if policy is None else offloaded(kind, model, **options)

    def assert_same(self, optimizer, reference):
        mine, other = values_of(optimizer), values_of(reference)
        self.assertEqual(list(mine), list(other))
        for key, value in other.items():
            self.assertTrue(torch.equal(mine[key], value), key)

    def folder(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        return folder.name


class SizesTest(OffloadOnOneRankTest):
    def test_a_chunk_has_as_many_parameters_as_fit(self):
        with windows_of(256):
            model, optimizer = self.vectors(100, 155, 1, 230, 100, 400, policy=Offload(1.0))
        optimizer.watch_tiers(log := [])
        step_of(model, optimizer, 0)
        # 100, 155 and 1; 230, behind which no multiple of 64 fits; 100, and 128 of 400; 256 more; and the last 16.
        elements = [128 + 192 + 64, 256, 128 + 128, 256, 64]  # Pieces are padded to multiples of 64.
        self.assertEqual([nbytes for kind, nbytes, *_ in log if kind == "tier_write"], [8 * each for each in elements])
        counters, _ = optimizer.state_nbytes()
        self.assertEqual([counters[id(p)] for p in model.parameters()], [4, 4, 4, 4, 4, 3 * 4])  # One for each piece.

    def test_all_states_behind_the_cut_leave_the_device(self):
        model, optimizer = self.vectors(128, 1, 127, policy=Offload(0.75))
        step_of(model, optimizer, 0)
        # Of 256 elements, 64 stay. Those in host memory are padded to multiples of 64 for each parameter.
        self.assertEqual(optimizer.tier_nbytes(), {"device": 8 * 64, "host": 8 * (64 + 64 + 128), "files": 0, "windows": 0})

    def test_a_model_may_have_groups_without_a_policy(self):
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
        fully_shard(model[0], mesh=self.mesh, offload_policy=Offload(1.0))
        optimizer = offloaded(ADAMW, fully_shard(model, mesh=self.mesh))
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        self.assertEqual(optimizer.tier_nbytes(), {"device": 8 * 64, "host": 8 * 64, "files": 0, "windows": 0})


class StatesTest(OffloadOnOneRankTest):
    def test_a_parameter_has_no_states_before_the_first_step(self):
        model, optimizer = self.vectors(128, policy=Offload(0.5))
        (param,) = model.parameters()
        self.assertEqual(optimizer.state[param], {})
        step_of(model, optimizer, 0)
        self.assertEqual(list(optimizer.state[param]), ["step", "exp_avg", "exp_avg_sq"])

    def test_states_in_two_tiers_are_read_as_copies_of_one_step(self):
        model, optimizer = self.vectors(128, policy=Offload(0.5))
        step_of(model, optimizer, 0)
        (param,) = model.parameters()
        kept, first = optimizer.state[param], values_of(optimizer)
        step_of(model, optimizer, 1)
        for name, value in kept.items():
            self.assertTrue(torch.equal(getattr(value, "_local_tensor", value), first[0, name]), name)

    def test_states_in_one_piece_of_host_memory_are_the_states_themselves(self):
        model, optimizer = self.vectors(128, policy=Offload(1.0))
        step_of(model, optimizer, 0)
        kept = optimizer.state_dict()["state"][0]
        step_of(model, optimizer, 1)
        for (_, name), value in values_of(optimizer).items():
            self.assertTrue(torch.equal(getattr(kept[name], "_local_tensor", kept[name]), value), name)

    def test_what_is_written_between_steps_is_stepped_though_it_was_read_ahead(self):
        with windows_of(64), chunks_of(64):
            for policy in (Offload(1.0), Offload(1.0, to=self.folder())):
                runs = []
                for each in (None, policy):
                    model, optimizer = self.vectors(64, 64, 64, policy=each)
                    for number in range(4):
                        step_of(model, optimizer, number)
                        for param in model.parameters():
                            states = optimizer.state[param]
                            optimizer.state[param] = {name: value * 2 for name, value in states.items()}
                    runs.append(optimizer)
                self.assert_same(*reversed(runs))

    def test_a_part_of_a_stored_state_is_read_and_written_alone(self):
        model, optimizer = self.vectors(256, policy=Offload(0.5))
        step_of(model, optimizer, 0)
        (param,) = model.parameters()
        want = values_of(optimizer)
        with optimizer.states_as("stored"):
            states = optimizer.state_dict()
        stored = states["state"][0]["exp_avg"].to_local()
        self.assertTrue(torch.equal(stored.store.read(100, 150), want[0, "exp_avg"][100:150]))  # They lie in both tiers.
        stored.view(16, 16)[4:12, 3:5].copy_(torch.full((8, 2), 7.0))  # No run.
        want[0, "exp_avg"].view(16, 16)[4:12, 3:5] = 7.0
        self.assertIn("or a load, failed", error_of(optimizer.state_dict))  # Until all are there.
        optimizer.load_state_dict(states)
        self.assertTrue(all(torch.equal(value, want[key]) for key, value in values_of(optimizer).items()))


class LoadTest(OffloadOnOneRankTest):
    def test_options_that_need_other_states_are_refused_and_change_nothing(self):
        model, optimizer = self.vectors(128, policy=Offload(0.5), lr=0.1)
        step_of(model, optimizer, 0)
        before, states = values_of(optimizer), optimizer.state_dict()
        mine = states["state"][0]
        for group in states["param_groups"]:
            group.update(lr=0.2, amsgrad=True)
        mine["max_exp_avg_sq"] = mine["exp_avg_sq"]
        text = error_of(optimizer.load_state_dict, states)
        self.assertIn("needs the states ['exp_avg', 'exp_avg_sq', 'max_exp_avg_sq']", text)
        states["param_groups"] += [{**group, "params": []} for group in states["param_groups"]]
        self.assertIn("different number of parameter groups", error_of(optimizer.load_state_dict, states))
        self.assertEqual((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["amsgrad"]), (0.1, False))
        self.assertTrue(all(torch.equal(value, before[key]) for key, value in values_of(optimizer).items()))

    def test_states_of_another_shape_are_refused_and_change_nothing(self):
        """One element would be broadcast, and of a longer vector the first elements would be taken."""
        for policy in (Offload(0.5), Offload(1.0)):
            model, optimizer = self.vectors(64, 128, policy=policy)
            step_of(model, optimizer, 0)
            before = values_of(optimizer)
            for wrong in (1, 192):
                other, source = self.vectors(64, wrong, policy=policy)
                step_of(other, source, 1)
                text = error_of(optimizer.load_state_dict, source.state_dict())
                self.assertIn("ValueError: the state exp_avg of parameter 1 of shape (128,) is of shape", text)
                self.assertIn(f"is of shape ({wrong},) placed as", text)
                self.assertIn("expected a DTensor of shape (128,) placed as", text)
            self.assertTrue(all(torch.equal(value, before[key]) for key, value in values_of(optimizer).items()))

    def test_loaded_states_have_the_dtypes_that_torch_gives_them(self):
        """Of a parameter that lies in no group, and of counters."""
        for fused in (False, True):
            runs = []
            for policy in (Offload(1.0), None):
                model, _ = self.vectors(64, policy=policy)
                params = [*model.parameters(), nn.Parameter(torch.ones(3, dtype=torch.bfloat16))]
                runs.append(offloaded(ADAMW, model, params, fused=fused) if policy else ADAMW(params, fused=fused))
            optimizer, reference = runs
            for param in params:
                param.grad = torch.ones_like(param)
            reference.step()
            states = reference.state_dict()
            for each in states["state"].values():
                each["step"] = each["step"].double()
            states["state"][1]["exp_avg"] = states["state"][1]["exp_avg"].float()
            for each in (optimizer, reference):
                each.load_state_dict(states)
            self.assert_same(optimizer, reference)
            dtypes = {key: value.dtype for key, value in values_of(optimizer).items()}
            self.assertEqual(dtypes, {key: value.dtype for key, value in values_of(reference).items()})
            self.assertEqual(dtypes[1, "exp_avg"], torch.bfloat16)
            self.assertEqual(dtypes[1, "step"], torch.float32 if fused else torch.float64)

    def test_a_load_that_raised_fails_the_next_step_in_backward(self):
        for in_backward in (False, True):
            model, optimizer = self.vectors(64, 64, policy=Offload(1.0), in_backward=in_backward)
            step_of(model, optimizer, 0)
            good, bad = optimizer.state_dict(), optimizer.state_dict()
            bad["state"][1] = {name: value.to("meta") if value.ndim else value for name, value in bad["state"][1].items()}
            self.assertNotEqual(error_of(optimizer.load_state_dict, bad), "")
            self.assertIs(optimizer.has_failed, in_backward)
            optimizer.load_state_dict(good)
            self.assertFalse(optimizer.has_failed)


class FilesTest(OffloadOnOneRankTest):
    """Four chunks, of one parameter each, in a file with three windows."""

    def trained(self, policy, steps=2, looks=False):
        with chunks_of(64):
            model, optimizer = self.vectors(64, 64, 64, 64, policy=policy)
        for number in range(steps):
            step_of(model, optimizer, number)
            if looks:
                optimizer.state_dict()
        return model, optimizer

    def test_states_are_read_after_each_step(self):
        _, optimizer = self.trained(Offload(1.0, to=self.folder()), steps=6, looks=True)
        self.assert_same(optimizer, self.trained(None, steps=6)[1])

    def test_a_read_ahead_ends_before_its_window_has_other_states(self):
        model, optimizer = self.trained(Offload(1.0, to=self.folder()))
        real, main, may_end, ends = _scratch_file._preadv, threading.current_thread(), threading.Event(), []

        def read(*arguments):
            is_ahead = threading.current_thread() is not main
            if is_ahead:
                may_end.wait(0.05)
            result = real(*arguments)
            ends.append(is_ahead)
            return result

        with mock.patch.object(_scratch_file, "_preadv", read):
            step_of(model, optimizer, 2)
            ends.clear()
            optimizer.state_dict()
        self.assertEqual(ends, [True, False, False, False, False])

    def test_states_that_could_not_be_written_are_lost_until_all_are_cleared(self):
        _, reference = self.trained(None)
        model, optimizer = self.trained(Offload(0.75, to=self.folder()), steps=1)
        optimizer.state_dict()  # All is written.
        real, calls = _scratch_file._pwritev, []

        def write(*arguments):
            calls.append(arguments)
            if len(calls) == 2:
                raise OSError(errno.EIO, "Input/output error")
            return real(*arguments)

        with mock.patch.object(_scratch_file, "_pwritev", write):
            step_of(model, optimizer, 1)
            self.assertIn("OSError", error_of(optimizer.state_dict))
        self.assertTrue(optimizer.has_failed)
        optimizer.state.clear()
        self.assertFalse(optimizer.has_failed)
        self.assertEqual(optimizer.state_dict()["state"], {})
        with torch.no_grad():
            for param, other in zip(model.parameters(), self.vectors(64, 64, 64, 64)[0].parameters()):
                param.copy_(other)
        for number in range(2):
            step_of(model, optimizer, number)
        self.assert_same(optimizer, reference)

    def test_a_window_that_was_read_ahead_for_another_folder_is_taken_back(self):
        """One layer's states lie in a folder of their own, and each step reads ahead in the other folder."""
        folders = [self.folder(), self.folder()]

        def trained(is_offloaded):
            torch.manual_seed(0)
            layers = nn.ModuleList(Vectors(64) for _ in range(5))
            for number, layer in enumerate(layers):
                policy = {"offload_policy": Offload(1.0, to=folders[number > 0])} if is_offloaded else {}
                fully_shard(layer, mesh=self.mesh, **policy)
            optimizer = offloaded(ADAMW, layers) if is_offloaded else ADAMW(layers.parameters())
            for step, turn in enumerate([0, 1, 0, 2, 0, 3, 0, 4] * 2):
                step_of(layers[turn], optimizer, step)
            return optimizer

        self.assert_same(trained(True), trained(False))


class InBackwardTest(OffloadOnOneRankTest):
    def stack(self):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
        for each in (*model, model):
            fully_shard(each, mesh=self.mesh, offload_policy=Offload(0.5))
        return model, offloaded(ADAMW, model, in_backward=True)

    def test_one_gradient_of_the_last_step_is_enough_to_refuse_a_backward(self):
        model, optimizer = self.stack()
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        for block in model:
            block[0].weight.grad = None
        self.assertIn("has gradients of the last step", error_of(lambda: model(torch.ones(1, 8)).sum().backward()))

    def test_step_raises_what_the_thread_raises_behind_a_backward_that_raised(self):
        model, optimizer = self.stack()
        may_step, wait = threading.Event(), BackwardStep.wait

        def step_group(self, group):
            may_step.wait(20)
            raise OSError(errno.EIO, "Input/output error")

        def waiting(self):
            may_step.set()
            wait(self)

        handle = model[0].register_full_backward_pre_hook(lambda *_: 1 / 0)
        with mock.patch.object(type(optimizer), "step_group", step_group):
            self.assertIn("ZeroDivisionError", error_of(lambda: model(torch.ones(1, 8)).sum().backward()))
            handle.remove()
            with mock.patch.object(BackwardStep, "wait", waiting), self.assertWarnsRegex(UserWarning, "are not reduced"):
                self.assertIn("Input/output error", error_of(optimizer.step))
