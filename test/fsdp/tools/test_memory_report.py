"""memory_report: it counts what the buffers hold, and predicts the most that a step will hold."""

import contextlib
import functools
import itertools
import re
import unittest
import weakref
from unittest import mock
from weakref import WeakSet

import pytest
import torch
import torch.distributed as dist
from common import error_of, fake_group, ranks, run_ranks
from fsdp_common import batch, build, step_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard

from torch_ragged.fsdp import (
    HIERARCHICAL,
    ZERO1,
    ZERO2,
    DBuffer,
    Float8Policy,
    FSDPGrad,
    MemoryReport,
    MemoryRow,
    SameBits,
    buffer_layouts,
    elements,
    fully_shard,
    memory_report,
    monitor,
)
from torch_ragged.fsdp._groups import named_groups as groups_of
from torch_ragged.fsdp.bits._tree import PieceCollectives, TreeSum
from torch_ragged.fsdp.comm._collectives import ProcessGroupCollectives, ReduceScatterTraits
from torch_ragged.fsdp.core._dbuffer import MemoryLog
from torch_ragged.fsdp.tools._replay import high_water
from torch_ragged.offline import Model, ModelPlanner, granularity_policy
from torch_ragged.offline._memory import Precision, zero_memory
from torch_ragged.offline._models import module_groups
from torch_ragged.optim import AdamW8bit, BlockPolicy, Muon, Shampoo


class Resident:
    """The most bytes that DBuffers, ``.grad`` and kept parts hold at once: looked up at every allocation."""

    def __init__(self, model):
        self.model, self.peak, self.peak_unreduced, self.others = model, 0, 0, list
        self.buffers = WeakSet(b for group in groups_of(model).values() for kind in group.buffers().values() for b in kind)

    def sample(self):
        held = [buffer.flat.untyped_storage() for buffer in self.buffers]
        grads = [p.grad for g in groups_of(self.model).values() for p in grads_of(g)]
        grads = [grad.reduced if isinstance(grad, FSDPGrad) else grad for grad in grads]
        grads = [grad.to_local().untyped_storage() for grad in grads if grad is not None]
        sizes = {s.data_ptr(): s.nbytes() for s in [*held, *grads, *self.others()] if s.nbytes()}
        beside = sum(group.kept_nbytes for group in groups_of(self.model).values())
        # What stays gathered over nodes is a DBuffer, too.
        kept = (Replicate(), Shard(0))
        beside -= sum(buffer.nbytes for buffer in self.buffers if buffer.levels is not None and buffer.placements == kept)
        self.peak = max(self.peak, sum(sizes.values()) + beside)
        shards = [group.sharded.flat.data_ptr() for group in groups_of(self.model).values()]
        whole = [buffer.flat.untyped_storage().nbytes() for buffer in self.buffers if not buffer.is_sharded]
        self.peak_unreduced = max(self.peak_unreduced, sum(sizes.get(shard, 0) for shard in shards) + sum(whole))

    def __enter__(self):
        self.originals = DBuffer.__init__, DBuffer.allocate, MemoryLog.note
        init, allocate, note = self.originals

        def counted_init(buffer, *args, **options):
            init(buffer, *args, **options)
            self.buffers.add(buffer)
            self.sample()

        def counted_allocate(buffer):
            allocate(buffer)
            self.sample()

        def counted_note(log, nbytes):  # What is allocated beside the buffers.
            note(log, nbytes)
            if nbytes > 0 and self.model is not None:
                self.sample()

        DBuffer.__init__, DBuffer.allocate, MemoryLog.note = counted_init, counted_allocate, counted_note
        return self

    def __exit__(self, *error):
        DBuffer.__init__, DBuffer.allocate, MemoryLog.note = self.originals


def grads_of(group):
    return [param.sharded for param in group.params if param.sharded.grad is not None]


class Nest(nn.Module):
    """Groups within groups, one of them without parameters of its own, one called twice."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 64), nn.Linear(64, 4)
        self.towers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32), nn.Linear(32, 64)) for _ in range(3))
        self.shared = nn.Linear(64, 64)

    def forward(self, x):
        x = self.first(x)
        for tower in self.towers:
            x = self.shared(tower(x))
        return self.last(x)


def moe(raf, mp_policy):
    model = build("ragged", raf, mp_policy)
    return model, lambda: step_of(model)


def frozen(raf, mp_policy):
    model = build("ragged", raf, mp_policy, frozen=1)
    return model, lambda: step_of(model)


def nested(raf, mp_policy):
    torch.manual_seed(0)
    model = Nest()
    for tower in model.towers:
        fully_shard(tower[1], reshard_after_forward=raf, mp_policy=mp_policy)
        fully_shard(tower, reshard_after_forward=raf, mp_policy=mp_policy)
    fully_shard(model.shared, reshard_after_forward=raf, mp_policy=mp_policy)
    fully_shard(model, reshard_after_forward=raf, mp_policy=mp_policy)
    return model, lambda: model(torch.ones(2, 8)).float().sum().backward()


def prefetched(raf, mp_policy):
    model, run = moe(raf, mp_policy)
    first, second, third = model.blocks
    first.set_modules_to_forward_prefetch([second, third])
    third.set_modules_to_backward_prefetch([second, first])
    second.set_modules_to_backward_prefetch([])
    model.set_reduce_scatter_max_input_buffers(3)
    return model, run


@contextlib.contextmanager
def as_nccl(adds_wide=False):
    """Gloo's reductions as NCCL's: without a second buffer, whose coming and going is not predicted."""
    with (
        mock.patch.object(
            ProcessGroupCollectives, "reduce_scatter_traits", lambda self, device: ReduceScatterTraits(adds_wide, False)
        ),
    ):
        yield


def check_prediction(adds_wide, takes_all):
    """Each model with all policies, or with one, the next model with the next one."""
    bf16, fp32 = torch.bfloat16, torch.float32
    policies = [
        MixedPrecisionPolicy(),
        MixedPrecisionPolicy(bf16, fp32),
        MixedPrecisionPolicy(bf16, bf16),
        Float8Policy(bf16, fp32),
    ]
    if adds_wide:  # Only there it makes a difference.
        policies = [policy for policy in policies if policy.param_dtype != policy.reduce_dtype]
    models = [(nested, None), (nested, True), (nested, False), (moe, None), (frozen, None), (prefetched, None)]
    of_models = itertools.cycle(policies)
    with as_nccl(adds_wide):
        for kind, raf in models:
            for mp_policy in policies if takes_all else [next(of_models)]:
                check_predicted(kind, raf, mp_policy)


def check_predicted(kind, raf, mp_policy):
    """Exact, against the most that was there at any allocation; so is the monitor's peak, which has no reduced shards in it."""
    model, run = kind(raf, mp_policy)
    run()
    model.zero_grad()
    predicted = memory_report(model).peak
    with Resident(model) as resident, monitor(model) as watch:
        run()
        row = watch.step()
    case = (kind.__name__, raf, mp_policy, predicted, resident.peak, resident.peak_unreduced, row["buffer_peak_bytes"])
    # Of units that have two groups, as with Float8Policy, it is a bound.
    bound = 1.02 * resident.peak if isinstance(mp_policy, Float8Policy) else resident.peak
    assert resident.peak <= predicted.total <= bound and row["buffer_peak_bytes"] == resident.peak_unreduced, case
    assert resident.peak > 2 * memory_report(model).total.sharded, case
    # Without gradient sync, gradients of all groups add up, until a last pass reduces them.
    model.zero_grad()
    model.set_requires_gradient_sync(False)
    predicted = memory_report(model).peak
    with Resident(model) as resident:
        accumulate(model.set_requires_gradient_sync, run)
    bound = 1.02 * resident.peak if isinstance(mp_policy, Float8Policy) else resident.peak
    assert resident.peak <= predicted.total <= bound, (case, predicted, resident.peak)


def accumulate(switch, run):
    """Three passes. ``switch`` lets the last one alone reduce."""
    for step in range(3):
        switch(step == 2)
        run()


def shards_of(model):
    """Bytes of a group's shard, by its name."""
    return {name: layout.shard_numel * 4 for name, layout in buffer_layouts(model).items()}


OPTIMIZERS = {
    "SGD": torch.optim.SGD,
    "SGD with momentum": functools.partial(torch.optim.SGD, momentum=0.9),
    "Adam with amsgrad": lambda params: torch.optim.Adam(params, amsgrad=True),
    "AdamW, fused": lambda params: torch.optim.AdamW(params, fused=True, lr=torch.tensor(1e-3)),
    "AdamW, foreach": lambda params: torch.optim.AdamW(params, foreach=True),
    "RMSprop": lambda params: torch.optim.RMSprop(params, centered=True, momentum=0.5),
    "Adagrad": torch.optim.Adagrad,
    "NAdam": torch.optim.NAdam,
    "AdamW8bit": lambda params: AdamW8bit(params, policy=BlockPolicy((8, 8), 0)),
    "Muon": lambda params: Muon(by_shape(params, "muon")),
    "Shampoo": lambda params: Shampoo(by_shape(params, "shampoo"), max_side=20),
    "two": None,
}


def by_shape(params, algorithm):
    """Groups: matrices and stacks of matrices, and the rest by AdamW."""
    kinds = {True: [p for p in params if p.ndim in (2, 3)], False: [p for p in params if p.ndim not in (2, 3)]}
    return [{"params": kinds[True], "algorithm": algorithm}, {"params": kinds[False], "algorithm": "adamw"}]


class Odd(torch.optim.SGD):
    """Its step needs values."""

    def step(self, closure=None):
        if self.param_groups[0]["params"][0].sum().item() == 0:
            return
        super().step()


class Planned(nn.Module):
    """Blocks that two ranks share with no padding."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64, bias=i == 1) for i in range(3))
        self.head = nn.Linear(64, 32, bias=False)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def four_layers(side=64, trained=slice(None), mesh=None):
    """Layers in units of their own. Only those of ``trained`` get gradients."""
    model = nn.Sequential(*(nn.Linear(side, side, bias=False) for _ in range(4))).requires_grad_(False)
    model[trained].requires_grad_(True)
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    return model


@contextlib.contextmanager
def trees_in(resident):
    """What the trees of SameBits hold is counted too, whenever one has copied nodes."""
    received, send = [], PieceCollectives._send
    to_replicas, keep, trees = PieceCollectives._send_to_replicas, TreeSum.keep, set()

    def noted(sending):
        def send(tree, *args):
            found = sending(tree, *args)
            received.append(weakref.ref(found[0]))
            resident.sample()
            return found

        return send

    def kept(tree, lent):
        keep(tree, lent)
        trees.add(tree)
        resident.sample()

    def held():
        nodes = [node for tree in trees for _, node in tree._nodes]
        lent = (each() for each in received)
        yield from (each.untyped_storage() for each in (*nodes, *lent) if each is not None)

    resident.others = held
    with (
        mock.patch.object(PieceCollectives, "_send", noted(send)),
        mock.patch.object(PieceCollectives, "_send_to_replicas", noted(to_replicas)),
        mock.patch.object(TreeSum, "keep", kept),
    ):
        yield


def step_on_ones(model, side=64):
    model(torch.ones(2, side)).sum().backward()


def storages_nbytes(tensors):
    """Bytes of the distinct storages of DTensors' locals."""
    storages = {t.to_local().untyped_storage().data_ptr(): t.to_local().untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


class MemoryReportTest(unittest.TestCase):
    def test_predicted_peak_is_what_a_step_holds(self):
        run_ranks(2, check_prediction, True, False)

    @pytest.mark.slow
    def test_predicted_peak_is_what_a_step_holds_in_all_combinations(self):
        run_ranks(2, check_prediction, True, True)

    @pytest.mark.slow
    def test_predicted_peak_is_what_a_step_without_wide_gradients_holds(self):
        run_ranks(2, check_prediction, False, True)

    @ranks(4)
    @as_nccl()
    def test_predicted_peak_has_what_stays_gathered():
        """What stays gathered, or is there twice for the moment of a copy, is in the prediction."""
        line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "rank"))
        for mesh, options in (
            (line, {"placements": ZERO1}),
            (line, {"placements": ZERO2}),
            (square, {"placements": HIERARCHICAL}),
            (line, {"reshard_after_forward": 2}),
            (line, {"weights": [3, 0, 1, 2]}),
            (line, {"shard_placement_fn": lambda param: Shard(1) if param.ndim == 2 else None}),
        ):
            torch.manual_seed(0)
            model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
            for module in (*model, model):
                fully_shard(module, mesh=mesh, **options)
            for _ in range(2):
                model.zero_grad()
                predicted = memory_report(model).peak
                with Resident(model) as resident:
                    model(torch.ones(2, 64)).sum().backward()
                assert predicted.total == resident.peak, (options, predicted, resident.peak)

    @ranks(4)
    def test_predicted_peak_has_the_trees_of_same_bits():
        """Sums of pieces on their owners, and with ``subtree`` unsharded ones, held between the backwards of a step."""
        line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "rank"))
        totals = []
        for mesh, pieces, subtree in (
            (line, 4, 1),
            (line, 16, 1),
            (line, 27, 1),
            (line, 8, 2),
            (line, 32, 8),
            (square, 12, 2),
            (square, 16, 1),
        ):
            torch.manual_seed(0)
            model = four_layers(mesh=mesh)
            same = SameBits(model, torch.optim.SGD(model.parameters(), lr=0.1), pieces=pieces, subtree=subtree)
            predicted = memory_report(model).peak
            with Resident(model) as resident, trees_in(resident):
                for _ in same.pieces():
                    step_on_ones(model)
            assert predicted.total == resident.peak, (mesh, pieces, subtree, predicted, resident.peak)
            totals.append(predicted.total)
            same.close()
        assert len({*totals}) == len(totals), totals

    @ranks(4)
    @as_nccl()
    def test_predicted_peak_has_gradients_that_accumulate():
        """Gradients that wait for a later pass, of this rank or of its replica, are in the prediction."""
        line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "rank"))
        sync, last, replicas = "set_requires_gradient_sync", "set_is_last_backward", "set_requires_all_reduce"
        for mesh, options, knob in (
            (line, {"placements": ZERO1}, sync),
            (line, {"placements": ZERO1}, last),
            (line, {"placements": ZERO2}, sync),
            (square, {"placements": HIERARCHICAL}, sync),
            (square, {}, sync),
            (square, {}, replicas),
            (line, {"reshard_after_forward": 2}, sync),
        ):
            torch.manual_seed(0)
            model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
            for module in (*model, model):
                fully_shard(module, mesh=mesh, **options)
            once = memory_report(model).peak.total
            getattr(model, knob)(False)
            for _ in range(2):
                predicted = memory_report(model).peak.total
                with Resident(model) as resident:
                    accumulate(getattr(model, knob), lambda: model(torch.ones(2, 64)).sum().backward())
                assert once < predicted == resident.peak, (options, knob, once, predicted, resident.peak)
                model.zero_grad()
                getattr(model, knob)(False)

    @fake_group(2)
    @as_nccl()
    def test_predicted_peak_knows_which_all_gathers_are_ahead(self):
        for trained, change, moment, layers in (
            (slice(1), lambda model: None, "backward of 3", 2),
            (slice(1), lambda model: model[0].set_modules_to_forward_prefetch([model[1], model[2]]), "forward of 0", 3),
            (slice(1), lambda model: model[3].set_modules_to_backward_prefetch([model[2], model[1]]), "backward of 3", 3),
            (slice(4), lambda model: None, "backward of 1", 2),
            (slice(4), lambda model: model.set_max_all_gathers_ahead(0), "backward of 0", 1),
        ):
            model = four_layers(trained=trained)
            change(model)
            peak = memory_report(model).peak
            with Resident(model) as resident:
                step_on_ones(model)
            self.assertEqual((peak.name, peak.gathered), (moment, layers * 64 * 64 * 4))
            self.assertEqual(peak.total, resident.peak)

    @fake_group(2)
    @as_nccl()
    def test_predicted_peak_may_be_at_the_end_of_backward(self):
        """There the root, which stays gathered, gets its reduced shard."""
        model = fully_shard(nn.Linear(64, 64, bias=False))
        model.set_reshard_after_backward(False)
        peak = memory_report(model).peak
        with Resident(model) as resident:
            step_on_ones(model)
        whole = 64 * 64 * 4
        expected = MemoryRow("end of backward", sharded=whole // 2, gathered=whole, gradients=whole, grad=whole // 2)
        self.assertEqual((peak, peak.total), (expected, resident.peak))

    @fake_group(2)
    def test_predicted_peak_of_a_model_without_parameters_is_before_the_step(self):
        self.assertEqual(memory_report(fully_shard(nn.Sequential(nn.ReLU()))).peak, MemoryRow("before forward"))

    @fake_group(2)
    @as_nccl()
    def test_predicted_peak_has_one_copy_of_large_gradients(self):
        """Matmuls add them to the gradient buffer; frozen parameters have none."""
        for trained in (slice(4), slice(2)):
            model = four_layers(side=256, trained=trained)
            model.set_requires_gradient_sync(False)
            predicted = memory_report(model).peak.total
            with Resident(model) as resident:
                accumulate(model.set_requires_gradient_sync, lambda: step_on_ones(model, 256))
            self.assertEqual(predicted, resident.peak, trained)

    @fake_group(4)
    @as_nccl()
    def test_predicted_peak_is_a_bound_if_one_module_waits_for_its_replicas(self):
        model = four_layers(mesh=init_device_mesh("cpu", (2, 2)))
        once = memory_report(model).peak.total
        model[0].set_requires_all_reduce(False)
        predicted = memory_report(model).peak.total
        with Resident(model) as resident:
            accumulate(model[0].set_requires_all_reduce, lambda: step_on_ones(model))
        self.assertTrue(once < resident.peak <= predicted, (once, resident.peak, predicted))

    @ranks(2)
    def test_predicted_peak_has_the_second_buffer_of_gloo():
        """Over gloo the second buffer of a reduce-scatter counts."""
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
        for module in (*model, model):
            fully_shard(module)
        model(torch.ones(2, 64)).sum().backward()
        model.zero_grad()
        whole = 64 * 64 * 4
        # The gradient of 1, a tensor of autograd's, is there while that of 2 is reduced.
        for context, gradients in ((as_nccl(), 2), (contextlib.nullcontext(), 3)):
            with context:
                peak = memory_report(model).peak
            assert (peak.name, peak.gathered, peak.gradients) == ("backward of 1", 2 * whole, gradients * whole), peak

    @ranks(2)
    @as_nccl()
    def test_predicted_peak_is_a_bound():
        """Where the gradients of a module around others come last only, the prediction is too high by their buffer at most."""
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        for layer in model[1:]:
            fully_shard(layer)
        fully_shard(model)
        for _ in range(2):
            model(torch.ones(2, 64)).sum().backward()
            model.zero_grad()
        predicted = memory_report(model).peak.total
        with Resident(model) as resident:
            model(torch.ones(2, 64)).sum().backward()
        assert resident.peak < predicted <= resident.peak + buffer_layouts(model)["root"].numel * 4

    @ranks(2)
    @as_nccl()
    def test_a_new_model_holds_its_shards():
        model = build("ragged")
        layouts, shards = buffer_layouts(model), shards_of(model)
        report = memory_report(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
        assert [row.name for row in report.groups] == list(layouts) == ["root", "blocks.0", "blocks.1", "blocks.2"]
        for row in report.groups:
            assert row == MemoryRow(row.name, sharded=shards[row.name])
        assert report.total == MemoryRow("total", sharded=sum(shards.values()))

    @ranks(2)
    @as_nccl()
    def test_gathered_parameters_are_counted_while_they_stay():
        """The root's stay after forward, those of a block that was unsharded by name do not."""
        model = build("ragged")
        model.blocks[1].unshard()
        model(batch(0, False)[:, :-1])
        gathered = {row.name: row.gathered for row in memory_report(model).groups}
        root = buffer_layouts(model)["root"].numel * 4
        assert gathered == {"root": root, "blocks.0": 0, "blocks.1": 0, "blocks.2": 0}, gathered

    @fake_group(4)
    def test_gathered_parameters_are_counted_while_neighbours_keep_them(self):
        """After forward, each of two neighbours holds a half. The monitor counts it too."""
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(2)))
        for module in (*model, model):
            fully_shard(module, reshard_after_forward=2)
        half = 64 * 64 * 4 // 2
        with monitor(model) as watch:
            model(torch.ones(2, 64))
            self.assertEqual([row.gathered for row in memory_report(model).groups], [half, half])
            self.assertEqual(watch.step()["buffer_bytes"], 2 * (half // 2 + half))

    @ranks(2)
    @as_nccl()
    def test_gradients_are_counted_where_they_are():
        """They are unreduced without gradient sync, and in ``.grad`` with it."""
        model = build("ragged")
        model.set_requires_gradient_sync(False)
        step_of(model)
        report = memory_report(model)
        assert [row.gradients for row in report.groups] == [layout.numel * 4 for layout in buffer_layouts(model).values()]
        model.set_requires_gradient_sync(True)
        step_of(model)
        report = memory_report(model)
        assert [(row.gathered, row.gradients, row.grad) for row in report.groups] == [
            (0, 0, n) for n in shards_of(model).values()
        ]

    @ranks(2)
    @as_nccl()
    def test_states_of_the_optimizer_are_counted_in_the_peak_too():
        model = build("ragged")
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        before = memory_report(model, optimizer).peak
        step_of(model)
        optimizer.step()
        report = memory_report(model, optimizer)
        assert before.total == report.peak.total and not report.notes  # It was predicted.
        for row, group in zip(report.groups, groups_of(model).values(), strict=True):
            local = sum(param.sharded.to_local().nbytes for param in group.params)
            assert row.optimizer == 2 * local + 4 * len(group.params)  # two moments, and a step count each
        assert report.total.optimizer == sum(row.optimizer for row in report.groups)
        assert report.peak.optimizer == report.total.optimizer
        with Resident(model) as resident:
            optimizer.zero_grad()
            step_of(model)
        assert report.peak.total == resident.peak + report.total.optimizer

    @ranks(2)
    @as_nccl()
    def test_states_of_the_first_step_are_predicted():
        """Before the first step, of an optimizer or of its class: the bytes that are there after it, on every rank."""
        for name, make in OPTIMIZERS.items():
            model = build("ragged")
            params = list(model.parameters())
            makers = [make]
            if make is None:
                makers = [lambda given: torch.optim.SGD(given[::2], momentum=0.9), lambda given: torch.optim.Adam(given[1::2])]
            optimizers = [make(params) for make in makers]
            of_classes, of_instances = memory_report(model, makers), memory_report(model, optimizers)
            assert of_classes.notes == of_instances.notes and of_classes.peak == of_instances.peak, name
            assert all(not one.state for one in optimizers) or name == "Adagrad"
            step_of(model)
            for one in optimizers:
                one.step()
            model.zero_grad()
            report = memory_report(model, optimizers)
            assert report.peak == of_classes.peak and report.total.optimizer == report.peak.optimizer, (
                name,
                report,
                of_classes,
            )
            assert (report.peak.optimizer > 0) == (name != "SGD") and (not report.notes or name == "SGD"), (name, report.notes)

    @ranks(2)
    def test_a_report_says_what_cannot_be_predicted():
        """Whatever an optimizer does, the report is made, and a note says what is not in it. Wrong arguments are errors."""
        model = build("ragged")
        before = [param.detach().clone() for param in model.parameters()]
        report = memory_report(model, functools.partial(Odd, momentum=0.9))
        (note,) = report.notes
        assert note.startswith("Odd has no states yet. Those of its first step cannot be predicted, and are not in the peak: ")
        assert report.peak.optimizer == 0 and str(report).endswith(note)
        usual = memory_report(model, torch.optim.AdamW)
        assert usual.notes[0].startswith("AdamW has no states yet. The peak has the ")
        # Its step cannot run here, but the states are those of other steps.
        assert memory_report(model, functools.partial(torch.optim.AdamW, capturable=True)) == usual
        assert all(torch.equal(param, old) for param, old in zip(model.parameters(), before, strict=True))
        for wrong in ("adam", lambda params: "adam", [3]):
            assert "TypeError: memory_report got " in error_of(memory_report, model, wrong), wrong

    def test_the_high_water_is_the_first_moment_of_the_largest_sum(self):
        one, two = MemoryLog(), MemoryLog()
        for log in (one, two):
            log.start()
        for log, nbytes in ((one, 10), (two, 5), (one, -10), (two, 10), (one, -3)):
            log.note(nbytes)
        kinds = (("one", one), ("two", two))
        moment, most = high_water(kinds, {"one": 4, "two": 0})
        self.assertEqual((moment, most), (two.events[0][0], {"one": 14, "two": 5}))
        self.assertEqual(high_water(kinds, {"one": 0, "two": 0})[1], {"one": 10, "two": 5})
        two.start()
        two.note(-1)
        self.assertEqual(high_water((("two", two),), {"two": 7}), (-1, {"two": 7}))

    @ranks(2)
    @as_nccl()
    def test_the_text_has_a_line_for_each_group():
        model = build("ragged")
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        step_of(model, 0, optimizer)
        report = memory_report(model, optimizer)
        lines = str(report).splitlines()
        header = "group, sharded params, gathered params, unreduced grads, .grad, optimizer states, total"
        assert re.sub(" {2,}", ", ", lines[0]) == header
        names = [line.split()[0] for line in lines[1:]]
        assert names == [*buffer_layouts(model), "total", "peak:"] and len(set(map(len, lines))) == 1
        assert f"{report.total.sharded / 1024:.2f} KiB" in lines[-2] and f"{report.peak.total / 1024:.2f} KiB" in lines[-1]

    def test_the_text_has_a_unit_for_any_number_of_bytes(self):
        rows = [MemoryRow("a", 0, 1, 1023, 1024, 1536, 2**20), MemoryRow("blocks.0", 2**30, 2**40, 2**50, host=2**60)]
        total, peak = MemoryRow("total", grad=2**20 - 1), MemoryRow("backward of a", gathered=7)
        report = MemoryReport(tuple(rows), total, peak, ("a note",))
        *lines, note = str(report).splitlines()
        expected = [
            "group, sharded params, gathered params, unreduced grads, .grad, optimizer states, states in host memory, total",
            "a, 0 B, 1 B, 1023 B, 1.00 KiB, 1.50 KiB, 1.00 MiB, 3.50 KiB",
            "blocks.0, 1.00 GiB, 1.00 TiB, 1024.00 TiB, 0 B, 0 B, 1048576.00 TiB, 1025.00 TiB",
            "total, 0 B, 0 B, 0 B, 1024.00 KiB, 0 B, 0 B, 1024.00 KiB",
            "peak: backward of a, 0 B, 7 B, 0 B, 0 B, 0 B, 0 B, 7 B",
        ]
        self.assertEqual([re.sub(" {2,}", ", ", line) for line in lines], expected)
        self.assertEqual((note, len(set(map(len, lines)))), ("a note", 1))

    @ranks(2)
    def test_a_report_is_the_same_in_inference_mode():
        """A report is the same in every mode; before the first forward, also for a list of modules that are one unit."""
        model = build("ragged")
        reports = [memory_report(model)]
        with torch.inference_mode():
            reports.append(memory_report(model))
        step_of(model)
        model.zero_grad()
        with torch.inference_mode():
            reports.append(memory_report(model))
        assert reports[0] == reports[1] == reports[2], reports
        parts = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
        fully_shard([parts[0], parts[2]])
        assert memory_report(fully_shard(parts)).peak.gradients > 0

    @ranks(2)
    @as_nccl()
    def test_every_root_of_a_model_is_in_the_prediction():
        """Each root's last forward is played: the report after it is that before it."""
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
        for layer in model:
            fully_shard(layer)
        before = memory_report(model).peak
        model(torch.ones(2, 64)).sum().backward()
        model.zero_grad()
        assert memory_report(model).peak == before
        with Resident(model) as resident:
            model(torch.ones(2, 64)).sum().backward()
        assert before.total == resident.peak, (before, resident.peak)

    @ranks(2)
    def test_resident_memory_is_what_was_planned():
        """What a training holds between steps is what the offline planner says of the model, byte for byte."""
        model = Planned()
        precision = Precision(torch.float32, torch.float32, torch.float32, states=2)
        planner = ModelPlanner(Model("", module_groups(model)), granularity_policy(elements(), False), precision.alignment)
        planned = zero_memory(planner.plan(dist.get_world_size()).ragged, precision)[3]
        for module in (*model.blocks, model):
            fully_shard(module)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        params = list(model.parameters())
        states = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
        held = [storages_nbytes(kind) for kind in (params, [param.grad for param in params], states)]
        assert held == [planned.parameters, planned.gradients, planned.optimizer], (held, planned)
        report = memory_report(model, optimizer).total
        assert [report.sharded, report.grad, report.optimizer] == [*held[:2], held[2] + 4 * len(params)]  # step counts
