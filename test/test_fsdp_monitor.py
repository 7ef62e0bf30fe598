"""monitor and memory_report: what they count is what the layouts say and what the buffers hold; nothing is left behind."""

import contextlib
import itertools
import unittest
from unittest import mock
from weakref import WeakSet

import torch
import torch.distributed as dist
from common import error_of, run_ranks
from fsdp_common import Boom, batch, build, loss_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from torch_ragged.fsdp import DBuffer, Float8Policy, MemoryRow, buffer_layouts, elements, fully_shard, memory_report, monitor
from torch_ragged.fsdp._fully_shard import named_groups as groups_of
from torch_ragged.fsdp.comm._collectives import ProcessGroupCollectives
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


def numel_of(model):
    return sum(layout.numel for layout in buffer_layouts(model).values())


def check_row_of_a_training_step():
    model = build("ragged", raf=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    whole = numel_of(model) * 4
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


def check_row_of_an_evaluation():
    model = build("ragged", raf=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with monitor(model, optimizer) as watch:
        step_of(model, 0, optimizer)
        watch.step(tokens=144)
        with torch.no_grad():
            model(batch(0, False)[:, :-1])
        row = watch.step()
        assert set(row) == KEYS and (row["all_gather_calls"], row["all_gather_bytes"]) == (4, numel_of(model) * 4)
        assert row["reduce_scatter_calls"] == row["other_calls"] == row["optimizer_s"] == row["reduce_scatter_exposed_s"] == 0
        assert " s/step, " in watch.postfix()


def check_row_without_gradient_sync():
    model = build("ragged", raf=True)
    with monitor(model) as watch:
        model.set_requires_gradient_sync(False)
        step_of(model)
        assert watch.step()["reduce_scatter_calls"] == 0


def check_row_of_a_collective_of_the_user():
    model = build("ragged", raf=True)
    with monitor(model) as watch:
        step_of(model)
        watch.restart()
        with watch.collective(nbytes=40):
            dist.all_reduce(torch.ones(10))
        row = watch.step()
        assert (row["other_calls"], row["other_bytes"], row["all_gather_bytes"]) == (1, 40, 0)
        assert row["exposed_s"] == row["other_exposed_s"] == row["other_s"] > 0


def check_restart_drops_what_was_counted():
    model = build("ragged", raf=True)
    with monitor(model) as watch:
        model(batch(0, False)[:, :-1])
        watch.restart()
        assert watch.step()["all_gather_calls"] == 0


def check_row_of_parameters_that_stay_gathered():
    kept = build("ragged", raf=False)
    whole, root = numel_of(kept) * 4, buffer_layouts(kept)["root"].numel * 4
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


def trained_once():
    """A model that has made a step, its optimizer, and what a monitor must leave as it is."""
    model = build("ragged")
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)
    step_of(model)
    model.zero_grad()
    return model, optimizer, [(group.collectives, group.gradients.on_allocated) for group in groups_of(model).values()]


def check_collectives_of_a_closure_are_no_time_of_the_optimizer():
    model, optimizer, before = trained_once()

    def closure():
        model.zero_grad()
        loss = loss_of(model, batch(0, False))
        loss.backward()
        return loss

    with monitor(model, [optimizer]) as watch:
        optimizer.step(closure)
        row = watch.step()
        assert row["all_gather_calls"] >= 4 and row["optimizer_s"] > 0
        assert abs(row["compute_s"] + row["optimizer_s"] + row["exposed_s"] - row["step_s"]) < 1e-9
    assert_as_before(model, optimizer, before)


def check_one_monitor_at_a_time():
    model, optimizer, before = trained_once()
    with monitor(model, [optimizer]) as watch:
        assert "ValueError: another monitor watches this model" in error_of(monitor, model)
    assert_as_before(model, optimizer, before)
    assert "RuntimeError: the monitor is closed" in error_of(watch.step)
    watch.close()


def check_errors_come_through():
    """And the model goes on as one that was never watched."""
    model, optimizer, before = trained_once()
    for part in ("forward", "backward", "optimizer"):
        error = error_of(fail_watched, model, optimizer, part)
        assert error == f"KeyError: '{'boom' if part == 'backward' else part}'", error
        assert_as_before(model, optimizer, before)
        if part == "backward":
            model.reset_iter_state()
    assert_steps_as_unwatched(model)


def check_work_in_flight_is_waited_for_after_the_close():
    model, _, _ = trained_once()
    with monitor(model):
        handle = model.blocks[0].unshard(async_op=True)
    handle.wait()
    model.blocks[0].reshard()
    assert_steps_as_unwatched(model)


def assert_steps_as_unwatched(model):
    other = build("ragged")
    other.load_state_dict(model.state_dict())
    model.zero_grad()
    for each in (model, other):
        step_of(each)
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
    for group, (collectives, on_allocated) in zip(groups_of(model).values(), before, strict=True):
        assert group.collectives is collectives and group.gradients.on_allocated is on_allocated
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
        self.peak = max(self.peak, sum(sizes.values()))
        shards = [group.sharded.flat.data_ptr() for group in groups_of(self.model).values()]
        whole = [buffer.flat.untyped_storage().nbytes() for buffer in self.buffers if not buffer.is_sharded]
        self.peak_unreduced = max(self.peak_unreduced, sum(sizes[shard] for shard in shards) + sum(whole))

    def __enter__(self):
        self.originals = DBuffer.__init__, DBuffer.allocate
        init, allocate = self.originals

        def counted_init(buffer, *args, **options):
            init(buffer, *args, **options)
            self.buffers.add(buffer)
            self.sample()

        def counted_allocate(buffer):
            allocate(buffer)
            self.sample()

        DBuffer.__init__, DBuffer.allocate = counted_init, counted_allocate
        return self

    def __exit__(self, *error):
        DBuffer.__init__, DBuffer.allocate = self.originals


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
        mock.patch.object(ProcessGroupCollectives, "holds_second_buffer", lambda self, device: False),
        mock.patch.object(ProcessGroupCollectives, "adds_wide", lambda self, device: adds_wide),
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


def shards_of(model):
    """Bytes of a group's shard, by its name."""
    return {name: layout.shard_numel * 4 for name, layout in buffer_layouts(model).items()}


@as_nccl()
def check_report_of_a_new_model():
    model = build("ragged")
    layouts, shards = buffer_layouts(model), shards_of(model)
    report = memory_report(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    assert [row.name for row in report.groups] == list(layouts) == ["root", "blocks.0", "blocks.1", "blocks.2"]
    for row in report.groups:
        assert row == MemoryRow(row.name, sharded=shards[row.name])
    assert report.total == MemoryRow("total", sharded=sum(shards.values()))


@as_nccl()
def check_report_of_gathered_parameters():
    """The root's stay after forward, those of a block that was unsharded by name do not."""
    model = build("ragged")
    model.blocks[1].unshard()
    model(batch(0, False)[:, :-1])
    gathered = {row.name: row.gathered for row in memory_report(model).groups}
    root = buffer_layouts(model)["root"].numel * 4
    assert gathered == {"root": root, "blocks.0": 0, "blocks.1": 0, "blocks.2": 0}, gathered


@as_nccl()
def check_report_of_gradients():
    """They are unreduced without gradient sync, and in ``.grad`` with it."""
    model = build("ragged")
    model.set_requires_gradient_sync(False)
    step_of(model)
    report = memory_report(model)
    assert [row.gradients for row in report.groups] == [layout.numel * 4 for layout in buffer_layouts(model).values()]
    model.set_requires_gradient_sync(True)
    step_of(model)
    report = memory_report(model)
    assert [(row.gathered, row.gradients, row.grad) for row in report.groups] == [(0, 0, n) for n in shards_of(model).values()]


@as_nccl()
def check_report_of_the_optimizer():
    model = build("ragged")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    before = memory_report(model, optimizer).peak
    step_of(model)
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


@as_nccl()
def check_text_of_the_report():
    model = build("ragged")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    step_of(model, 0, optimizer)
    report = memory_report(model, optimizer)
    lines = str(report).splitlines()
    assert lines[0].split() == ["group", "sharded", "gathered", "gradients", "grad", "optimizer", "total"]
    names = [line.split()[0] for line in lines[1:]]
    assert names == [*buffer_layouts(model), "total", "peak:"] and len(set(map(len, lines))) == 1
    assert f"{report.total.sharded / 1024:.2f} KiB" in lines[-2] and f"{report.peak.total / 1024:.2f} KiB" in lines[-1]


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


def errors_of_other_models():
    plain, theirs = nn.Linear(4, 4), torch_fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return [error_of(what, model) for what in (monitor, memory_report) for model in (plain, theirs, "model")]


def check_holder_of_a_sharded_module():
    holder = nn.ModuleDict({"a": fully_shard(nn.Linear(4, 4)), "b": nn.Linear(4, 4)})  # No root, but it holds one.
    with monitor(holder) as watch:
        holder["a"](torch.ones(1, 4)).sum().backward()
        assert watch.step()["all_gather_calls"] == 1
    assert [row.name for row in memory_report(holder).groups] == ["a"]


class MonitorTest(unittest.TestCase):
    def test_the_row_of_a_step_counts_what_the_layouts_say(self):
        run_ranks(2, check_row_of_a_training_step)

    def test_the_row_of_an_evaluation_has_no_gradients(self):
        run_ranks(2, check_row_of_an_evaluation)

    def test_nothing_is_reduced_without_gradient_sync(self):
        run_ranks(2, check_row_without_gradient_sync)

    def test_a_collective_of_the_user_is_another_one(self):
        run_ranks(2, check_row_of_a_collective_of_the_user)

    def test_a_restart_drops_what_was_counted(self):
        run_ranks(2, check_restart_drops_what_was_counted)

    def test_parameters_that_stay_gathered_are_counted_once(self):
        run_ranks(2, check_row_of_parameters_that_stay_gathered)

    def test_collectives_of_a_closure_are_no_time_of_the_optimizer(self):
        run_ranks(2, check_collectives_of_a_closure_are_no_time_of_the_optimizer)

    def test_a_model_has_one_monitor_at_a_time(self):
        run_ranks(2, check_one_monitor_at_a_time)

    def test_errors_come_through_and_leave_the_model_as_it_was(self):
        run_ranks(2, check_errors_come_through)

    def test_work_in_flight_is_waited_for_after_the_close(self):
        run_ranks(2, check_work_in_flight_is_waited_for_after_the_close)

    def test_profiler_ranges_have_the_groups_names(self):
        run_ranks(2, check_profiler_ranges)

    def test_other_models_are_errors(self):
        for errors in run_ranks(2, errors_of_other_models):
            for error in errors:
                self.assertRegex(
                    error, "^ValueError: expected a module that .*fully_shard was called on.*call fully_shard first$"
                )

    def test_a_module_that_only_holds_sharded_ones_is_watched(self):
        run_ranks(2, check_holder_of_a_sharded_module)


class MemoryReportTest(unittest.TestCase):
    def test_predicted_peak_is_what_a_step_holds(self):
        for adds_wide in (False, True):
            run_ranks(2, check_prediction, adds_wide)

    def test_predicted_peak_is_a_bound(self):
        run_ranks(2, check_bound)

    def test_a_new_model_holds_its_shards(self):
        run_ranks(2, check_report_of_a_new_model)

    def test_gathered_parameters_are_counted_while_they_stay(self):
        run_ranks(2, check_report_of_gathered_parameters)

    def test_gradients_are_counted_where_they_are(self):
        run_ranks(2, check_report_of_gradients)

    def test_states_of_the_optimizer_are_counted_in_the_peak_too(self):
        run_ranks(2, check_report_of_the_optimizer)

    def test_the_text_has_a_line_for_each_group(self):
        run_ranks(2, check_text_of_the_report)

    def test_resident_memory_is_what_was_planned(self):
        run_ranks(2, check_plan)


if __name__ == "__main__":
    unittest.main()
