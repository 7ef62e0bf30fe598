"""monitor and memory_report: what they count is what the layouts say and what the buffers hold; nothing is left behind."""

import contextlib
import itertools
import unittest
from unittest import mock
from weakref import WeakSet

import torch
import torch.distributed as dist
from common import error_of, run_ranks
from test_fsdp import batch, build, loss_of
from test_fsdp_robustness import Boom
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Shard

from torch_ragged.fsdp import (
    HIERARCHICAL,
    ZERO1,
    ZERO2,
    DBuffer,
    Float8Policy,
    MemoryRow,
    buffer_layouts,
    elements,
    fully_shard,
    memory_report,
    monitor,
)
from torch_ragged.fsdp._fully_shard import named_groups as groups_of
from torch_ragged.fsdp.comm._collectives import ProcessGroupCollectives, ReduceScatterTraits
from torch_ragged.fsdp.core._memory_log import MemoryLog
from torch_ragged.fsdp.plan import Model, ModelPlanner, granularity_policy
from torch_ragged.fsdp.plan._memory import Precision, zero_memory
from torch_ragged.fsdp.plan._models import module_groups

KINDS = ("all_gather", "reduce_scatter", "other")
KEYS = {"step_s", "optimizer_s", "exposed_s", "compute_s", "buffer_bytes", "buffer_peak_bytes"}
KEYS |= {"memory_peak_bytes", "memory_reserved_bytes"}
KEYS |= {f"{kind}_{unit}" for kind in KINDS for unit in ("s", "exposed_s", "calls", "bytes")}


def step_of(model, step=0, optimizer=None):
    loss_of(model, batch(step, False)).backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


def check_rows():
    model = build("ragged", raf=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    whole = sum(layout.numel * 4 for layout in buffer_layouts(model).values())
    root = buffer_layouts(model)["root"].numel * 4
    shards = whole // dist.get_world_size()
    flags = sum(len(group.params) for group in groups_of(model).values())
    with monitor(model, optimizer) as watch:
        assert watch.postfix() == ""
        for step in range(3):
            step_of(model, step, optimizer)
            row = watch.step(tokens=144)
            assert set(row) == KEYS | {"tokens_per_s"} and all(type(value) is float for value in row.values())
            # Every group is gathered in forward and in backward.
            assert (row["all_gather_calls"], row["all_gather_bytes"]) == (8, 2 * whole)
            assert (row["reduce_scatter_calls"], row["reduce_scatter_bytes"]) == (4, whole)
            assert (row["other_calls"], row["other_bytes"]) == (1, flags)
            check_times(row)
            assert row["optimizer_s"] > 0 and row["tokens_per_s"] * row["step_s"] == 144 or step
            assert row["buffer_bytes"] == shards < row["buffer_peak_bytes"]  # Everything gathered is given back.
            assert row["memory_peak_bytes"] >= row["memory_reserved_bytes"] > 1e7
            assert "tokens/s, " in watch.postfix() and "% in collectives, peak " in watch.postfix()
        with torch.no_grad():
            model(batch(0, False)[:, :-1])
        row = watch.step()
        assert set(row) == KEYS and (row["all_gather_calls"], row["all_gather_bytes"]) == (4, whole)
        assert row["reduce_scatter_calls"] == row["other_calls"] == row["optimizer_s"] == row["reduce_scatter_exposed_s"] == 0
        assert " s/step, " in watch.postfix()
        model.set_requires_gradient_sync(False)
        step_of(model)
        assert watch.step()["reduce_scatter_calls"] == 0
        watch.restart()
        with watch.collective(nbytes=40):
            dist.all_reduce(torch.ones(10))
        row = watch.step()
        assert (row["other_calls"], row["other_bytes"], row["all_gather_bytes"]) == (1, 40, 0)
        assert row["exposed_s"] == row["other_exposed_s"] == row["other_s"] > 0
        model(batch(0, False)[:, :-1])
        watch.restart()
        assert watch.step()["all_gather_calls"] == 0
    model.set_requires_gradient_sync(True)
    kept = build("ragged", raf=False)
    with monitor(kept) as watch:
        step_of(kept)
        row = watch.step()
        assert row["all_gather_bytes"] == whole and row["optimizer_s"] == 0 and root < whole


def check_times(row):
    assert all(value >= 0 for value in row.values()), row
    exposed = sum(row[f"{kind}_exposed_s"] for kind in KINDS)
    assert abs(exposed - row["exposed_s"]) < 1e-9
    assert abs(row["compute_s"] + row["optimizer_s"] + row["exposed_s"] - row["step_s"]) < 1e-9
    assert all(row[f"{kind}_s"] >= row[f"{kind}_exposed_s"] for kind in KINDS)
    assert row["compute_s"] > 0


def check_closed():
    model = build("ragged")
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)
    step_of(model)
    model.zero_grad()
    before = [group.collectives for group in groups_of(model).values()]

    def closure():
        model.zero_grad()
        loss = loss_of(model, batch(0, False))
        loss.backward()
        return loss

    # A closure's collectives are exposed time, and not the optimizer's as well.
    with monitor(model, [optimizer]) as watch:
        optimizer.step(closure)
        row = watch.step()
        assert row["all_gather_calls"] >= 4 and row["optimizer_s"] > 0
        assert abs(row["compute_s"] + row["optimizer_s"] + row["exposed_s"] - row["step_s"]) < 1e-9
        assert "ValueError: another monitor watches this model" in error_of(monitor, model)
    assert_as_before(model, optimizer, before)
    assert "RuntimeError: the monitor is closed" in error_of(watch.step)
    watch.close()
    # Errors come through, and the model goes on as one that was never watched.
    for part in ("forward", "backward", "optimizer"):
        error = error_of(fail_watched, model, optimizer, part)
        assert error == f"KeyError: '{'boom' if part == 'backward' else part}'", error
        assert_as_before(model, optimizer, before)
        if part == "backward":
            model.reset_iter_state()
    model.zero_grad()
    step_of(model)
    # Work issued before the close is waited for after it.
    with monitor(model):
        handle = model.blocks[0].unshard(async_op=True)
    handle.wait()
    model.blocks[0].reshard()
    other = build("ragged")
    other.load_state_dict(model.state_dict())
    step_of(other)
    for (name, param), (_, plain) in zip(model.named_parameters(), other.named_parameters()):
        assert torch.equal(param.grad.to_local(), plain.grad.to_local()), name


def fail_watched(model, optimizer, part):
    def fail(*args):
        raise KeyError(part)

    handles = []
    with monitor(model, optimizer):
        try:
            if part == "forward":
                handles.append(model.blocks[1].register_forward_pre_hook(fail))
            if part == "backward":
                handles.append(model.blocks[0].register_forward_hook(lambda module, args, output: Boom.apply(output)))
            loss = loss_of(model, batch(0, False))
            loss.backward()
            optimizer.step(fail)
        finally:
            for handle in handles:
                handle.remove()


def assert_as_before(model, optimizer, before):
    for group, collectives in zip(groups_of(model).values(), before, strict=True):
        assert group.collectives is collectives and not group.memory.gathered.events and not group.memory.gradients.events
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks


def check_profiler_ranges():
    model = build("ragged", raf=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step_of(model)
    counts = {event.key: event.count for event in profile.key_averages() if event.key.startswith("torch_ragged::")}
    hooks = ("pre_forward", "pre_backward", "post_backward")
    want = {f"torch_ragged::all_gather{wait} ({name})": 2 for name in buffer_layouts(model) for wait in ("", "_wait")}
    want |= {f"torch_ragged::reduce_scatter{wait} ({name})": 1 for name in buffer_layouts(model) for wait in ("", "_wait")}
    want |= {f"torch_ragged::{when} ({name})": 1 for name in buffer_layouts(model) for when in hooks}
    want |= {f"torch_ragged::{what} (root)": 1 for what in ("unused_parameters_all_reduce", "root_post_backward_callback")}
    assert counts == want, (counts, want)


class Resident:
    """The most bytes that DBuffers, and those let go that ``.grad`` lies in, hold at once: looked up at every allocation."""

    def __init__(self, model):
        self.model, self.peak, self.peak_unreduced = model, 0, 0
        self.buffers = WeakSet(b for group in groups_of(model).values() for kind in group.buffers().values() for b in kind)

    def sample(self):
        held = [buffer.flat.untyped_storage() for buffer in self.buffers]
        grads = [p.grad.to_local().untyped_storage() for g in groups_of(self.model).values() for p in grads_of(g)]
        sizes = {s.data_ptr(): s.nbytes() for s in held + grads if s.nbytes()}
        beside = sum(group.kept_nbytes for group in groups_of(self.model).values())
        self.peak = max(self.peak, sum(sizes.values()) + beside)
        shards = [group.sharded.flat.data_ptr() for group in groups_of(self.model).values()]
        whole = [buffer.flat.untyped_storage().nbytes() for buffer in self.buffers if not buffer.is_sharded]
        self.peak_unreduced = max(self.peak_unreduced, sum(sizes[shard] for shard in shards) + sum(whole))

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


def check_prediction(adds_wide):
    bf16, fp32 = torch.bfloat16, torch.float32
    policies = [
        MixedPrecisionPolicy(),
        MixedPrecisionPolicy(bf16, fp32),
        MixedPrecisionPolicy(bf16, bf16),
        Float8Policy(bf16, fp32),
    ]
    cases = [
        *itertools.product((nested,), (None, True, False), policies),
        *itertools.product((moe, frozen, prefetched), (None,), policies),
    ]
    with as_nccl(adds_wide):
        for kind, raf, mp_policy in cases:
            if not adds_wide or mp_policy.param_dtype != mp_policy.reduce_dtype:  # Only there it makes a difference.
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
    # Without gradient sync, gradient buffers add up; then the step is one of several.
    model.zero_grad()
    model.set_requires_gradient_sync(False)
    predicted = memory_report(model).peak
    with Resident(model) as resident:
        run()
    bound = 1.02 * resident.peak if isinstance(mp_policy, Float8Policy) else resident.peak
    assert resident.peak <= predicted.total <= bound and predicted.grad == 0, (case, predicted, resident.peak)


@as_nccl()
def check_prediction_of_kept_parameters():
    """What stays gathered, or is there twice for the moment of a copy, is in the prediction."""
    line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "rank"))
    for mesh, options in (
        (line, {"placements": ZERO1}),
        (line, {"placements": ZERO2}),
        (square, {"placements": HIERARCHICAL}),
        (line, {"reshard_after_forward": 2}),
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


def check_second_buffer():
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


@as_nccl()
def check_bound():
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


@as_nccl()
def check_report():
    model = build("ragged")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    layouts = buffer_layouts(model)
    shards = {name: layout.shard_numel * 4 for name, layout in layouts.items()}
    report = memory_report(model, optimizer)
    assert [row.name for row in report.groups] == list(layouts) == ["root", "blocks.0", "blocks.1", "blocks.2"]
    for row in report.groups:
        assert row == MemoryRow(row.name, sharded=shards[row.name])
    assert report.total == MemoryRow("total", sharded=sum(shards.values()))
    before = report.peak
    # In the middle: the root's and one block's parameters gathered, one more by name.
    model.blocks[1].unshard()
    model(batch(0, False)[:, :-1])
    gathered = {row.name: row.gathered for row in memory_report(model).groups}
    assert gathered == {"root": layouts["root"].numel * 4, "blocks.0": 0, "blocks.1": 0, "blocks.2": 0}, gathered
    model.set_requires_gradient_sync(False)
    step_of(model)
    report = memory_report(model)
    assert [row.gradients for row in report.groups] == [layout.numel * 4 for layout in layouts.values()]
    model.set_requires_gradient_sync(True)
    step_of(model)
    report = memory_report(model)
    assert [(row.gathered, row.gradients, row.grad) for row in report.groups] == [(0, 0, n) for n in shards.values()]
    optimizer.step()
    report = memory_report(model, optimizer)
    for row, group in zip(report.groups, groups_of(model).values()):
        local = sum(param.sharded.to_local().nbytes for param in group.params)
        assert row.optimizer == 2 * local + 4 * len(group.params)  # two moments, and a step count each
    assert report.total.optimizer == sum(row.optimizer for row in report.groups)
    assert report.peak.optimizer == report.total.optimizer
    assert report.peak.total == before.total + report.total.optimizer  # .grad there now is none when a step begins
    with Resident(model) as resident:
        optimizer.zero_grad()
        step_of(model)
    assert report.peak.total == resident.peak + report.total.optimizer
    lines = str(report).splitlines()
    assert lines[0].split() == ["group", "sharded", "gathered", "gradients", "grad", "optimizer", "total"]
    assert [line.split()[0] for line in lines[1:]] == [*layouts, "total", "peak:"] and len(set(map(len, lines))) == 1
    assert f"{report.total.sharded / 1024:.2f} KiB" in lines[-2] and f"{report.peak.total / 1024:.2f} KiB" in lines[-1]
    return str(report)


def check_report_anywhere():
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


def check_plan():
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


def storages_nbytes(tensors):
    """Bytes of the distinct storages of DTensors' locals."""
    storages = {t.to_local().untyped_storage().data_ptr(): t.to_local().untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def check_errors():
    plain, theirs = nn.Linear(4, 4), torch_fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    errors = [error_of(what, model) for what in (monitor, memory_report) for model in (plain, theirs, "model")]
    holder = nn.ModuleDict({"a": fully_shard(nn.Linear(4, 4)), "b": nn.Linear(4, 4)})  # No root, but it holds one.
    with monitor(holder) as watch:
        holder["a"](torch.ones(1, 4)).sum().backward()
        assert watch.step()["all_gather_calls"] == 1
    assert [row.name for row in memory_report(holder).groups] == ["a"]
    return errors


class MonitorTest(unittest.TestCase):
    def test_rows_count_what_the_layouts_say(self):
        run_ranks(2, check_rows)

    def test_closing_leaves_the_model_as_it_was(self):
        run_ranks(2, check_closed)

    def test_profiler_ranges_have_the_groups_names(self):
        run_ranks(2, check_profiler_ranges)

    def test_other_models_are_errors(self):
        for errors in run_ranks(2, check_errors):
            for error in errors:
                self.assertRegex(
                    error, "^ValueError: expected a module that .*fully_shard was called on.*call fully_shard first$"
                )


class MemoryReportTest(unittest.TestCase):
    def test_predicted_peak_is_what_a_step_holds(self):
        for adds_wide in (False, True):
            run_ranks(2, check_prediction, adds_wide)

    def test_predicted_peak_has_what_stays_gathered(self):
        run_ranks(4, check_prediction_of_kept_parameters)

    def test_predicted_peak_has_the_second_buffer_of_gloo(self):
        run_ranks(2, check_second_buffer)

    def test_predicted_peak_is_a_bound(self):
        run_ranks(2, check_bound)

    def test_report_counts_what_is_resident(self):
        run_ranks(2, check_report)

    def test_report_in_inference_mode_and_of_a_list_of_modules(self):
        run_ranks(2, check_report_anywhere)

    def test_resident_memory_is_what_was_planned(self):
        run_ranks(2, check_plan)


if __name__ == "__main__":
    unittest.main()
