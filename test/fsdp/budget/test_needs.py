"""What fit counts beside the curve, to the byte, what all ranks take of it, and the table: in one process."""

import dataclasses
import tempfile
import unittest
from types import SimpleNamespace
from unittest import mock

import numpy
import torch
from common import enter_fake_group
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.two_tensor import TwoTensor

from torch_ragged.fsdp import FitUnit, MemoryFit, Offload, fully_shard
from torch_ragged.fsdp._groups import module_states
from torch_ragged.fsdp.budget import _fit
from torch_ragged.fsdp.budget._activations import ActivationOffload
from torch_ragged.fsdp.budget._choice import Choice, Needs, Offloading
from torch_ragged.fsdp.budget._dry_run import Curve, RecordedCall
from torch_ragged.fsdp.budget._unit_forward import ActivationMode, UnitForward
from torch_ragged.fsdp.files._scratch_file import ScratchFile

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BUDGETS = {"device_bytes": 1, "host_bytes": None, "file_bytes": None, "reserve_bytes": 0}
SECONDS = {"0": 1.0, "1": 2.0, "2": 3.0}
CURVE = Curve([5], [0], ["forward"], [])
STATES = 2 * 4 * 224 + 3 * 4
"""AdamW's: two of each element of the shards, and a step of each parameter."""


class Pair(TwoTensor):
    def fsdp_pre_all_gather(self, mesh):
        return (self.a, self.b), None

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        raise NotImplementedError


def made(*policies, reshards=True, ranks=2):
    """Blocks of 64, 128 and 256 elements on 2 ranks. The root has no parameters of its own."""
    model = nn.Sequential(*(nn.Linear(8, rows, bias=False) for rows in (8, 16, 32)))
    mesh = init_device_mesh("cpu", (ranks,))
    for module, policy in zip(model, policies or (None, None, None)):
        given = {} if policy is None else {"offload_policy": policy}
        fully_shard(module, mesh=mesh, reshard_after_forward=reshards, **given)
    return fully_shard(model, mesh=mesh)


def fitted(model):
    return _fit._Fitted(model, module_states(model))


def policies_of(model):
    return [group.plan.part(Offload) for state in module_states(model).values() for group in state.groups]


def needs_of(model, optimizer=None, to=None, device=CPU, **budgets):
    with mock.patch.object(_fit, "_seconds_per_byte", lambda to, device: 0.5):
        kind = _fit._class_of(optimizer, model)
        return _fit._needs(model, fitted(model), CURVE, SECONDS, optimizer, kind, {**BUDGETS, **budgets}, to, device)


class NeedsTest(unittest.TestCase):
    def setUp(self):
        enter_fake_group(self, 2)

    def test_states_that_stay_are_counted_beside_shards_and_what_gloo_copies(self):
        fixed = 4 * 224 + 4 * 256
        needs, tier, notes = needs_of(made())
        unsharded = {"0": 4 * 64, "1": 4 * 128, "2": 4 * 256}
        self.assertEqual((needs, tier, notes), (Needs(CURVE, SECONDS, unsharded, fixed), None, []))
        needs, tier, notes = needs_of(made(), torch.optim.AdamW, reserve_bytes=3000.5)
        self.assertEqual((needs.fixed, needs.states, needs.elsewhere, tier), (fixed + STATES + 3000, 0, 0, None))
        for optimizer, note in ((torch.optim.Adagrad, "states stay on the device: give fit a class"), (None, "")):
            needs, tier, notes = needs_of(made(), optimizer, to="folder")
            self.assertEqual((needs.states, tier, len(notes)), (0, None, bool(note)))
            self.assertIn(note, "".join(notes))

    def test_states_may_lie_in_files_up_to_a_limit(self):
        for limit, elsewhere in ((None, STATES), (77, 77)):
            needs, tier, notes = needs_of(made(), torch.optim.AdamW, to="folder", file_bytes=limit)
            self.assertEqual((needs.fixed, needs.states, needs.elsewhere), (4 * 224 + 4 * 256, STATES, elsewhere))
            self.assertEqual((tier, notes, needs.seconds_per_byte), ("folder", [], 0.5))
            # Three windows, of all states of the largest shard.
            self.assertEqual(needs.window, round(3 * 128 * STATES / 224))
            self.assertEqual(needs.most_windows, round(3 * _fit.FILE_NUMEL * STATES / 224))

    def test_on_an_accelerator_states_may_lie_in_host_memory(self):
        """What lies on the CPU does not count."""
        for limit, elsewhere in ((None, STATES), (70, 70)):
            needs, tier, _ = needs_of(made(), torch.optim.AdamW, device=CUDA, host_bytes=limit)
            self.assertEqual((needs.fixed, needs.states, needs.elsewhere, tier), (0, STATES, elsewhere, "cpu"))
            self.assertEqual(needs.window, round(2 * 128 * STATES / 224))
            self.assertEqual(needs.most_windows, round(2 * _fit.WINDOW_NUMEL * STATES / 224))
        needs, tier, _ = needs_of(made(), torch.optim.AdamW, device=CUDA, host_bytes=0)
        self.assertEqual((needs.fixed, needs.states, tier), (STATES, 0, None))

    def test_groups_with_a_policy_keep_their_part(self):
        needs, tier, notes = needs_of(made(None, None, Offload(0.25)), torch.optim.AdamW, device=CUDA)
        self.assertEqual((needs.fixed, needs.states, tier), (round(0.75 * 128 / 224 * STATES), round(96 / 224 * STATES), "cpu"))
        self.assertEqual(needs.window, round(2 * 64 * needs.states / 96))
        self.assertEqual(len(notes), 1)
        self.assertIn("policy of their own keep it: Offload(optimizer=0.25", notes[0])
        needs, tier, notes = needs_of(made(*[Offload(0.25)] * 3), torch.optim.AdamW, device=CUDA)
        self.assertEqual((needs.fixed, needs.states, tier, len(notes)), (round(0.75 * STATES), 0, None, 1))

    def test_states_that_cannot_be_predicted_are_a_note(self):
        class Asking(torch.optim.SGD):
            def step(self):
                return self.param_groups[0]["params"][0].sum().item()

        notes = needs_of(made(), lambda params: Asking(params, 0.1))[2]
        self.assertRegex(notes[0], "Asking has no states yet. Those of its first step cannot be predicted")
        self.assertEqual(needs_of(made(), lambda params: torch.optim.SGD(params, 0.1))[2], [])

    def test_one_gradient_is_enough_to_refuse(self):
        model = made()
        model[1].weight.grad = torch.zeros_like(model[1].weight)
        with self.assertRaisesRegex(RuntimeError, "fit drops gradients, and parameters have some"):
            _fit._check_can_fit([], model)

    def test_a_tier_is_timed_by_one_write_and_one_read(self):
        file, moments = mock.Mock(spec=ScratchFile), iter((5.0, 7.0))
        with (
            mock.patch.object(_fit, "ScratchFile", lambda folder, rank, nbytes: file),
            mock.patch.object(_fit, "time", SimpleNamespace(perf_counter=lambda: next(moments))),
        ):
            self.assertEqual(_fit._seconds_per_byte("folder", CPU), 2.0 / _fit._TRIED_BYTES)
        self.assertEqual(
            [(call[0], call[1][0].nbytes, call[1][1]) for call in file.method_calls],
            [("write", 1 << 24, 0), ("read", 1 << 24, 0)],
        )

    def test_frozen_parameters_have_no_states(self):
        model = made(None, None, Offload())
        model[2].weight.requires_grad_(False)
        needs, tier, _ = needs_of(model, torch.optim.AdamW, device=CUDA)
        states = 2 * 4 * 96 + 2 * 4
        self.assertEqual((needs.fixed, needs.states, needs.window, tier), (0, states, round(2 * 64 * states / 96), "cpu"))

    def test_states_of_a_tensor_type_cannot_leave(self):
        """As offloaded() says, but before training."""

        def paired(**knobs):
            model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
            model[0].weight = nn.Parameter(Pair(torch.ones(8, 8), torch.ones(8, 8)))
            fully_shard(model[0], mesh=init_device_mesh("cpu", (2,)), **knobs)
            return fully_shard(model, mesh=init_device_mesh("cpu", (2,)))

        with self.assertRaisesRegex(ValueError, "whose states cannot be cut: shard it with Offload"):
            needs_of(paired(), torch.optim.AdamW, to="folder")
        model = paired(offload_policy=Offload(0.0))
        self.assertEqual(needs_of(model, torch.optim.AdamW, to="folder")[1], "folder")
        model = paired()
        model[0].weight.requires_grad_(False)
        self.assertEqual(needs_of(model, torch.optim.AdamW, to="folder")[1], "folder")

    def test_what_stays_unsharded_anyway_is_no_choice(self):
        self.assertEqual(needs_of(made(reshards=False))[0].unsharded, {})
        model = made()
        model.set_persistent_buffers()
        self.assertEqual(needs_of(model)[0].unsharded, {})
        model = nn.Sequential(nn.Linear(8, 8))
        model[0].bias = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
        fully_shard(model[0], reshard_after_forward=True)
        fully_shard(model)
        groups = module_states(model)["0"].groups
        self.assertEqual((len(groups), needs_of(model)[0].unsharded), (2, {"0": 4 * 64 + 2 * 128}))  # With padding.
        groups[0].keeper = object()
        self.assertEqual(fitted(model).keepable(), {})

    def test_parameters_in_files_are_not_in_memory(self):
        with tempfile.TemporaryDirectory() as folder:
            needs = needs_of(made(*[Offload(parameters="files", to=folder)] * 3))[0]
        self.assertEqual(needs.fixed, 4 * 256)

    def test_buffers_that_are_allocated_count(self):
        model = made()
        kinds = [group.buffers() for state in module_states(model).values() for group in state.groups]
        buffers = [each for kind in kinds for name, several in kind.items() if name != "sharded" for each in several]
        for each in buffers:
            each.allocate()
        nbytes = sum(each.nbytes for each in buffers)
        self.assertGreaterEqual(nbytes, 4 * (64 + 128 + 256))
        self.assertEqual(needs_of(model)[0].fixed, 4 * 224 + 4 * 256 + nbytes)

    def test_one_rank_sends_nothing(self):
        model = nn.Sequential(nn.Linear(8, 8, bias=False))
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))["b"])
        self.assertEqual(needs_of(model)[0].fixed, 4 * 64)

    def test_the_optimizer_may_be_a_class_or_a_function_that_makes_one(self):
        model, adam = made(), torch.optim.AdamW
        for optimizer in (adam, lambda params: adam(params)):
            self.assertIs(_fit._class_of(optimizer, model), adam)
        self.assertIsNone(_fit._class_of(adam(model.parameters()), model))
        self.assertIsNone(_fit._class_of([adam], model))
        model[0].weight.requires_grad_(False)
        _fit._class_of(lambda params: self.assertEqual(len(params), 2), model)

    def test_a_unit_has_no_other_one_inside(self):
        model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), nn.Linear(8, 8), nn.Linear(8, 8))
        for module in (model[0][1], model[0], model[1]):
            fully_shard(module)
        fully_shard(model[2], optional=True)
        fully_shard(model)
        self.assertEqual(list(fitted(model).units), ["0.1", "1"])

    def test_units_that_no_choice_changes(self):
        model = made()
        each = fitted(model)
        each.end_dry_run({"0": "its forward writes a"}, frozenset({"1"}))
        with mock.patch.object(_fit, "memory_report", lambda *_: SimpleNamespace(notes=[], peak=SimpleNamespace(optimizer=0))):
            needs = _fit._needs(model, each, CURVE, SECONDS, None, None, BUDGETS, None, CPU)[0]
        self.assertEqual(needs.seconds, {"2": 3.0})
        each.set(Choice(frozenset(), frozenset(), 0.0, (), 0, "", 0.0), None)
        self.assertEqual([module.forward.activations is ActivationMode.RECOMPUTED for module in model], [False, True, False])

    def test_inputs_of_the_model_and_of_units_are_those_of_the_dry_run(self):
        model = made()
        each = fitted(model)
        x = torch.ones(2, 8)
        hook = lambda: next(iter(model._forward_pre_hooks.values()))(model, (x,), {})  # noqa: E731
        hook()
        each.units["1"][0].inputs.look((x,), {})
        each.end_dry_run({}, frozenset())
        hook()
        x = torch.ones(3, 8)
        with torch.no_grad():
            hook()
        self.assertRaisesRegex(ValueError, "the forward of the model got", hook)
        with self.assertRaisesRegex(ValueError, "the forward of 1 got tensors of shapes"):
            model[1].forward(x)
        with self.assertRaisesRegex(ValueError, "the forward of 0 got .* and the steps of fit had no such call"):
            model[0].forward(x)

    def test_another_root_knows_what_was_fitted_to_its_units(self):
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Sequential(nn.Linear(8, 8, bias=False)))
        for module in (model[0], model[1][0], model[1], model):
            fully_shard(module)
        whole = fitted(model)
        for each in (model, model[0], model[1]):
            self.assertEqual(_fit._all_fitted(each), [whole])
        whole.remove()
        self.assertEqual(_fit._all_fitted(model), [])
        self.assertFalse(any(isinstance(vars(module).get("forward"), UnitForward) for module in model.modules()))

    def test_gradients_of_a_step_are_dropped_before_the_next_one(self):
        model = nn.Linear(2, 2)
        _fit._run_step(model, lambda: model(torch.ones(2)).sum().backward())
        self.assertTrue(all(param.grad is None for param in model.parameters()))
        for step in (lambda: None, lambda: model(torch.ones(2))):
            with self.assertRaisesRegex(ValueError, "after which no parameter has a gradient"):
                _fit._run_step(model, step)

    def test_a_choice_comes_and_goes(self):
        model, own = made(None, Offload(0.25), None), Offload(0.5)
        hooks = len(model._forward_pre_hooks)
        each = fitted(model)
        each.set(Choice(frozenset({"0"}), frozenset(), 0.5, ("1",), 0, "", 0.0), own)
        self.assertEqual([model[at].forward.activations is ActivationMode.RECOMPUTED for at in range(3)], [True, False, False])
        self.assertEqual([each.reshards(str(at)) for at in range(3)], [True, False, True])
        self.assertEqual(policies_of(model), [own, Offload(0.25), own])
        each.remove()
        self.assertFalse(any(isinstance(vars(module).get("forward"), UnitForward) for module in model))
        self.assertTrue(all(each.reshards(str(at)) for at in range(3)))
        self.assertEqual(policies_of(model), [None, Offload(0.25), None])
        self.assertEqual(len(model._forward_pre_hooks), hooks)

    def test_activations_that_may_be_tried_at_once(self):
        """The first ones of forward, as there is room for them elsewhere, and beside what a step holds."""
        calls = [RecordedCall("2", 3, 4, 5, 5, 6, 40, 40), RecordedCall("1", 2, 3, 6, 6, 7, 20, 20)]
        calls.append(RecordedCall("0", 1, 2, 7, 7, 8, 10, 10))
        curve = Curve([50] * 9, [50] * 9, [""] * 9, calls)
        for elsewhere, room, repeated, sizes in (
            (70, 110, "", {"0": [10], "1": [20], "2": [40]}),
            (69, 110, "", {"0": [10], "1": [20]}),  # 2 is in the way of nothing that comes before it.
            (50, 110, "1", {"0": [10], "2": [40]}),
            (70, 109, "", {"0": [10], "1": [20]}),
            (70, 59, "", {}),
        ):
            each, offload = fitted(made()), ActivationOffload(CPU, tempfile.gettempdir(), [])
            with mock.patch.object(
                offload.tier, "reserve", lambda given, sizes=sizes: self.assertEqual(list(given), sum(sizes.values(), []))
            ):
                tried = each.prepare_offload(dataclasses.replace(curve, repeated=frozenset(repeated)), offload, elsewhere, room)
            self.assertEqual(tried, list(sizes), (elsewhere, room))
            self.assertTrue(all(unit.offload is offload for units in each.units.values() for unit in units))
            with mock.patch.object(
                offload.tier, "keep", lambda given, sizes=sizes: self.assertEqual(list(given), sizes.get("2", []))
            ):
                each.set(Choice(frozenset("0"), frozenset("2"), 0.0, (), 0, "", 0.0), None)
            modes = [model.forward.activations.value for model in each._modules[1:]]
            self.assertEqual(modes, ["recomputed", "kept", "offloaded"])

    def test_bytes_that_move_while_the_next_unit_computes_cost_no_time(self):
        calls = [RecordedCall(unit, at, at, at, at, at, kept, 0) for unit, at, kept in (("c", 2, 9), ("a", 0, 50), ("b", 1, 7))]
        found = _fit._offloads(Curve([], [], [], calls), {"a": 1.0, "b": 2.0, "c": 4.0}, {"a": 40, "b": 8, "c": 9}, 0.5)
        self.assertEqual(found, {"a": (2 * (10.0 - 2.0), 40, 10), "b": (0.0, 8, 0), "c": (2 * 2.25, 9, 0)})

    def test_the_report_has_each_unit_with_all_its_calls(self):
        each, calls = fitted(made()), [RecordedCall("0", 0, 0, 0, 0, 0, kept, kept) for kept in (5, 7)]
        each.end_dry_run({"2": "its forward writes a"}, frozenset())
        needs = Needs(Curve([10], [0], ["forward"], calls), {"0": 1.0, "1": 2.0}, {}, fixed=3)
        choice = Choice(frozenset({"0"}), frozenset(), 0.0, (), 13, "forward", 1.0)
        found = _fit._report(needs, each, choice, None, 500, ["a note"])
        units = FitUnit("0", "recomputed", True, 12, 1.0), FitUnit("1", "kept", True, 0, 2.0)
        units += (FitUnit("2", "kept", True, 0, 0.0, "its forward writes a"),)
        self.assertEqual(found, MemoryFit(units, None, 0, 500, 13, "forward", 13, 13, 1.0, ("a note",)))


class NeighboursTest(unittest.TestCase):
    def test_what_ranks_keep_for_neighbours_is_no_choice(self):
        enter_fake_group(self, 4)
        self.assertEqual(needs_of(made(reshards=2, ranks=4))[0].unsharded, {})


class RanksTest(unittest.TestCase):
    def test_the_largest_numbers_of_all_ranks_count_and_the_least_room_elsewhere(self):
        calls = [RecordedCall("a", 1, 2, 3, 3, 4, 50, 60)]
        curve = Curve([7, 9, 8], [1, 2, 3], ["x", "y", "z"], calls)
        offloads = {"a": Offloading(0.5, 40, 10), "b": Offloading(0.0, 0, 0)}
        mine = Needs(curve, {"a": 1.5}, {"a": 40}, 100, 200, 300, 2.0**-30, 20, 30, offloads, 7)
        other = [[1, 10, 1, 2, 1, 1, 51, 1, 10**9, 41, 1, 201, -299, 1, 21, 1, 10**8, 39, 12, 0, 0, 0], [2] * 22]
        with (
            mock.patch.object(_fit, "device_of_messages", lambda group: CPU),
            mock.patch.object(_fit, "gather_numbers", lambda sent, group, call: {"fit": [sent.tolist(), other[group]]}[call]),
        ):
            found = _fit._of_all_ranks(mine, [0, 1])
        self.assertEqual(found.curve, Curve([7, 10, 8], [2, 2, 3], curve.labels, [calls[0]._replace(kept=51)]))
        self.assertEqual((found.seconds, found.unsharded), ({"a": 1.5}, {"a": 41}))
        self.assertEqual((found.fixed, found.states, found.elsewhere), (100, 201, -2))
        self.assertEqual((found.offloads, found.staging), ({"a": Offloading(0.5, 40, 12)}, 7))
        # One rank has tried none of its activations.
        other[1][-4] = 51
        with (
            mock.patch.object(_fit, "device_of_messages", lambda group: CPU),
            mock.patch.object(_fit, "gather_numbers", lambda sent, group, call: {"fit": [sent.tolist(), other[group]]}[call]),
        ):
            self.assertEqual(_fit._of_all_ranks(mine, [0, 1]).offloads, {})
        self.assertEqual((found.seconds_per_byte, found.window, found.most_windows), (int(2.0**-30 * 1e18) / 1e18, 21, 30))


class BudgetsTest(unittest.TestCase):
    def check(self, device=CUDA, to=None, step=print, optimizer=torch.optim.AdamW, **budgets):
        _fit._check_budgets({**BUDGETS, **budgets}, to, device, step, optimizer)

    def test_numbers_of_bytes(self):
        self.check(device_bytes=0, reserve_bytes=0.5, host_bytes=0)
        self.check(device_bytes=numpy.int64(2**40), reserve_bytes=numpy.float32(1), host_bytes=2**60)
        for wrong in (float("inf"), float("nan"), 10**20, -1, True, "1"):
            for name in ("device_bytes", "host_bytes", "reserve_bytes"):
                with self.assertRaisesRegex(ValueError, rf"fit\({name}=\) takes a number of bytes"):
                    self.check(**{name: wrong})

    def test_what_makes_the_optimizer(self):
        model = nn.Linear(2, 2)
        for right in (torch.optim.AdamW, torch.optim.AdamW(model.parameters()), len, None):
            self.check(optimizer=right)
        for wrong in ("AdamW", 3, [torch.optim.AdamW]):
            with self.assertRaisesRegex(ValueError, "fit takes an optimizer, its class, or a function"):
                self.check(optimizer=wrong)
        self.check(CPU, to="folder", optimizer=None)  # For activations.

    def test_zero_bytes_in_files(self):
        self.check(CPU, file_bytes=0, to="folder")

    def test_each_kind_of_mesh_has_its_tiers(self):
        for wrong in ({"to": "folder"}, {"file_bytes": 1}):
            with self.assertRaisesRegex(ValueError, r"fit\(to=, file_bytes=\) is for meshes of CPUs"):
                self.check(**wrong)
        with self.assertRaisesRegex(ValueError, r"fit\(host_bytes=\) is for meshes of accelerators"):
            self.check(CPU, host_bytes=0)
        with self.assertRaisesRegex(ValueError, r"fit\(host_bytes=\) takes a number of bytes"):
            self.check(host_bytes=-1)


class TableTest(unittest.TestCase):
    def test_modules_in_a_row_with_the_same_choice_are_one_line(self):
        units = [FitUnit("a", "recomputed", True, 1000, 0.001), FitUnit("b", "recomputed", True, 3001, 0.002)]
        units += [FitUnit("c", "kept", False, 10, 0.5, "its forward writes d"), FitUnit("d", "kept", True, 0, 0.0)]
        report = MemoryFit(tuple(units), None, 0, 9000, 8000, "forward of a", 7000, 6000, 0.25, ("a note",))
        self.assertEqual(
            str(report).splitlines(),
            [
                "modules     activations  after forward  kept bytes  forward ms",
                "a to b (2)  recomputed   reshard        2,000       1.50",
                "c           kept         unsharded      10          500.00      its forward writes d",
                "d           kept         reshard        0           0.00",
                "optimizer states: all on the device",
                "predicted peak: 8,000 of 9,000 bytes (forward of a)",
                "least: 7,000 bytes; nothing recomputed or offloaded: 6,000 bytes",
                "predicted cost: 250.00 ms a step",
                "a note",
            ],
        )


if __name__ == "__main__":
    unittest.main()
