"""set_schedule: training has the same bits with it, all ranks set one schedule or none, and wrong calls change nothing."""

import contextlib
import logging
import os
import tempfile
import unittest
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from common import error_of, ranks, run_ranks
from fsdp_common import Boom
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from torch_ragged._ranks.peers import PeerError
from torch_ragged.fsdp import Schedule, UnitSchedule, fully_shard, reshard_to
from torch_ragged.fsdp._groups import module_states
from torch_ragged.fsdp.schedule._auto import AutoSchedule
from torch_ragged.fsdp.schedule._play import PartCosts
from torch_ragged.fsdp.schedule._search import Knobs, ScheduleSearch
from torch_ragged.fsdp.tools._timeline import Timeline

WIDTH = 12
STEPS = 7  # One that is not recorded, three that are, and three under the schedule.


class Block(nn.Module):
    def __init__(self, checkpointed=False):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.checkpointed = checkpointed

    def body(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=False) if self.checkpointed else self.body(x)


def build(mesh=None, blocks=4, checkpointed=False, **knobs):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Block(checkpointed) for _ in range(blocks)), nn.Linear(WIDTH, 3))
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model[1:-1]:
        fully_shard(block, mesh=mesh, **knobs)
    return fully_shard(model, mesh=mesh, **knobs)


def train(model, steps=STEPS, micro=1):
    """Losses, and the parameters after some steps, some micro-batches each."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(steps):
        for index in range(micro):
            model.set_requires_gradient_sync(index == micro - 1)
            seed = torch.Generator().manual_seed(100 * step + 10 * index + dist.get_rank())
            loss = model(torch.randn(5, WIDTH, generator=seed)).square().mean()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses.append(model(torch.ones(1, WIDTH)).sum().item())
    return losses, [param.full_tensor() for param in model.parameters()]


def same(one, other):
    assert one[0] == other[0]
    for a, b in zip(one[1], other[1], strict=True):
        assert torch.equal(a, b)


def log_of(function, *arguments):
    """What the logger has said."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("torch_ragged.fsdp")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        function(*arguments)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
    return lines


def settings_of(model):
    """All that a schedule decides, by module."""
    found = []
    for state in module_states(model).values():
        lists = [None if each is None else [s.fqn for s in each] for each in (state.forward_prefetch, state.backward_prefetch)]
        reductions = [group.settings.max_reductions for group in state.groups]
        found.append((state.reshard_after_forward, *lists, state.comm.max_gathers, reductions))
    return found


def choose(knobs):
    """The search finds this, for all times."""
    return mock.patch.object(ScheduleSearch, "best", lambda search: knobs)


WIDE = Knobs(10**6, 10**6, 3, 2)


class SetScheduleTest(unittest.TestCase):
    @ranks(2)
    def test_training_has_the_same_bits_while_it_records_and_afterwards():
        check_bits({"checkpointed": True})

    @pytest.mark.slow
    @ranks(2)
    def test_other_settings_have_the_same_bits_too():
        check_bits({"reshard_after_forward": False})
        check_bits({"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)})

    @ranks(4)
    def test_replicas_and_micro_batches():
        mesh = init_device_mesh("cpu", (2, 2))
        plain, planned = build(mesh), build(mesh)
        planned.set_schedule("auto", extra_bytes=2**20)
        with choose(WIDE):
            same(train(planned, micro=3), train(plain, micro=3))
        schedule = planned.get_schedule()
        assert schedule.reductions == 3
        texts = [None] * 4
        dist.all_gather_object(texts, str(Schedule(schedule.units, schedule.reductions)))
        assert len(set(texts)) == 1

    @ranks(2)
    def test_what_was_found_is_set_and_nothing_of_the_recording_is_left():
        model = build()
        hooks = [(len(m._forward_pre_hooks), len(m._forward_hooks)) for m in model.modules()]
        inner = [group.collectives for group in model._ragged_groups(recurse=True)]
        model.set_schedule("auto", extra_bytes=2**20)
        assert model.get_schedule() is None
        with choose(WIDE):
            lines = log_of(train, model)
        schedule = model.get_schedule()
        assert any(str(schedule) in line for line in lines)
        assert [unit.name for unit in schedule.units] == ["root", "1", "2", "3", "4"]
        assert [unit.reshard for unit in schedule.units] == [None, True, True, False, False]
        assert schedule.units[0].forward == ("1", "2", "3", "4")
        assert schedule.units[0].backward == ("2", "1")  # Not of modules that stay unsharded.
        assert schedule.units[2].backward == ("1",)
        root = settings_of(model)[0]
        assert root == (False, ["1", "2", "3", "4"], ["2", "1"], 5, [3]), root
        assert [(len(m._forward_pre_hooks), len(m._forward_hooks)) for m in model.modules()] == hooks
        assert [group.collectives for group in model._ragged_groups(recurse=True)] == inner

    @ranks(2)
    def test_the_search_itself_ends_in_a_schedule_or_in_a_line():
        model = build()
        model.set_schedule("auto")
        lines = log_of(train, model)
        schedule = model.get_schedule()
        if schedule is None:
            assert any("no schedule within the memory is faster" in line for line in lines), lines
        else:
            assert 0 < schedule.bound_seconds <= schedule.seconds < schedule.start_seconds
            assert schedule.peak_bytes <= schedule.start_peak_bytes

    @ranks(2)
    def test_the_slowest_computation_counts_and_the_fastest_collective():
        model, mark, gather = build(), ("forward", "root"), ("forward", "all_gather", "root")
        model.set_schedule("auto")
        auto = model.__dict__["_ragged_schedule"]
        times = [each + dist.get_rank() for each in (1.0, 6.0, 2.0)]
        auto._costs = [PartCosts({mark: each}, {gather: 2 * each}, {gather: each / 2}) for each in times]
        groups = [model._ragged_groups(recurse=False)[0].dp.shard_group]
        assert auto._over_ranks(groups) == PartCosts({mark: 3.0}, {gather: 4.0}, {gather: 1.5})

    def test_a_schedule_as_text(self):
        root, last = UnitSchedule("root", None, ("0", "1"), ()), UnitSchedule("2", False, (), ())
        units = root, UnitSchedule("0", True, ("1",), ("root",)), UnitSchedule("1", True, ("2",), ("0",)), last
        schedule = Schedule(units, 2, 0.01, 0.008, 0.012, 1234567, 2345678)
        lines = [
            "modules     after forward  ahead in forward  ahead in backward",
            "root        as set         2                 0",
            "0 to 1 (2)  reshard        1                 1",
            "2           unsharded      0                 0",
            "reduce-scatters in flight: 2",
            "predicted forward and backward: 10.00 ms, before 12.00 ms, no schedule is below 8.00 ms",
            "predicted peak: 1,234,567 bytes, before 2,345,678",
            "the next step's all-gathers wait for the optimizer, and all reductions end in their backward",
        ]
        self.assertEqual(str(schedule).splitlines(), lines)
        self.assertEqual(str(Schedule(units, 2)).splitlines(), lines[:5] + lines[-1:])

    @ranks(2)
    def test_a_schedule_of_a_file_is_that_of_the_run_which_saved_it():
        first, second = build(), build()
        first.set_schedule("auto", extra_bytes=2**20)
        with choose(WIDE):
            train(first)
        schedule = first.get_schedule()
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "schedule.json")
            schedule.save(path)
            loaded = Schedule.load(path)
            schedule.timeline.save(os.path.join(folder, "step.json"))
            assert isinstance(schedule.timeline, Timeline)
            with open(path, "w") as file:
                file.write("[]")
            assert "holds no schedule" in error_of(Schedule.load, path)
        assert loaded == schedule
        second.set_schedule(loaded)
        assert second.get_schedule() == loaded
        second(torch.ones(1, WIDTH)).sum().backward()  # It finds the root, and the names of modules.
        assert settings_of(second) == settings_of(first)

    def test_calls_that_no_schedule_can_follow_change_nothing(self):
        for kind, reason in (
            ("twice", "is called more than once in a forward"),
            ("no backward", "a forward without a backward"),
            ("two backwards", "a forward has several backwards"),
            ("varies", "passes differ in their calls"),
            ("optional", "ranks may skip optional modules"),
            ("hooks off", "turned off"),
        ):
            with self.subTest(kind):
                run_ranks(2, check_unknown, kind, reason)

    @ranks(2)
    def test_a_backward_that_raises_while_it_is_recorded():
        model = build()
        model.set_schedule("auto", extra_bytes=2**20)
        with choose(WIDE):
            train(model, 2)
            assert "boom" in error_of(lambda: Boom.apply(model(torch.ones(2, WIDTH)).sum()).backward())
            model.reset_iter_state()
            lines = log_of(train, model, 4)
        assert any("a forward without a backward" in line for line in lines), lines
        assert model.get_schedule() is None

    @ranks(2)
    def test_a_rank_that_dies_in_the_search_is_an_error_of_training():
        model = build()
        model.set_schedule("auto")
        with mock.patch.object(AutoSchedule, "_over_ranks", side_effect=PeerError("rank 1 has ended")):
            assert error_of(train, model) == "PeerError: rank 1 has ended"

    @ranks(4)
    def test_a_model_that_moves_while_it_is_recorded_gets_no_schedule():
        for steps in (0, 2):
            model = build(init_device_mesh("cpu", (4,)))
            model.set_schedule("auto", extra_bytes=2**20)
            train(model, steps)
            reshard_to(model, None, init_device_mesh("cpu", (2, 2)))
            with choose(WIDE):
                lines = log_of(train, model, STEPS - steps)
            assert any("have moved to another mesh" in line for line in lines), lines
            assert model.get_schedule() is None

    @ranks(2)
    def test_wrong_calls_raise_on_all_ranks_and_change_nothing():
        model, rank = build(), dist.get_rank()
        before = settings_of(model)
        unit = UnitSchedule("1", True, ("9",), ())
        for error, *arguments in (
            ("takes \"auto\" or a Schedule, got 'fast'", "fast"),
            ("a number of bytes", "auto", 1.5),
            ("of 9, which are no fully_shard modules of this model, as root, 1, 2, 3 are: find", Schedule((unit,), 1)),
        ):
            got = error_of(model.set_schedule, arguments[0], **dict(zip(["extra_bytes"], arguments[1:])))
            assert error in got, got
        # One rank alone.
        assert "set_schedule" in error_of(model.set_schedule, "auto" if rank else "fast")
        assert "called differently" in error_of(model.set_schedule, "auto", extra_bytes=rank)
        other = build(blocks=2)
        other(torch.ones(1, WIDTH))
        assert "root" in error_of(other[1].set_schedule, "auto")
        assert settings_of(model) == before and model.get_schedule() is None

    @ranks(2)
    def test_persistent_buffers_come_after_it():
        model = build()
        model.set_persistent_buffers()
        assert "before set_persistent_buffers" in error_of(model.set_schedule, "auto")
        model.set_persistent_buffers(False)
        plain = build()
        model.set_schedule("auto", extra_bytes=2**20)
        with choose(Knobs(10**6, 10**6, 1, 2)):
            train(model, 5)
        model.set_persistent_buffers(places=3)
        train(plain, 5)
        same(train(model, 2), train(plain, 2))

    @ranks(2)
    def test_a_model_that_has_no_memory_yet():
        with torch.device("meta"):
            model = nn.Sequential(Block(), Block())
        mesh = init_device_mesh("cpu", (2,))
        for module in (*model, model):
            fully_shard(module, mesh=mesh)
        model.set_schedule("auto", extra_bytes=2**20)
        model.to_empty(device="cpu")
        for param in model.parameters():
            nn.init.constant_(param, 0.1)
        with choose(WIDE):
            lines = log_of(train, model)
        assert model.get_schedule() is not None, lines

    @ranks(3)
    def test_a_rank_outside_of_the_mesh_sets_nothing_and_hinders_no_other():
        group = dist.new_group([0, 1])
        mesh = DeviceMesh("cpu", [0, 1])
        assert group is not None
        model = build(mesh)
        if dist.get_rank() == 2:
            assert "mesh" in error_of(model.set_schedule, "auto")
            return
        model.set_schedule("auto", extra_bytes=2**20)

    @ranks(2)
    def test_a_second_call_ends_the_recording_of_the_first():
        model = build()
        model.set_schedule("auto", extra_bytes=2**20)
        train(model, 2)
        model.set_schedule("auto", extra_bytes=2**20)
        with choose(WIDE):
            train(model, 2)
            assert model.get_schedule() is None
            train(model, 3)
        assert model.get_schedule() is not None


def check_bits(options):
    plain, planned = build(**options), build(**options)
    planned.set_schedule("auto", extra_bytes=2**20)
    with choose(WIDE):
        same(train(planned), train(plain))
    assert planned.get_schedule() is not None, options


def check_unknown(kind, reason):
    if kind == "optional":
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        mesh = init_device_mesh("cpu", (2,))
        fully_shard(model[1], mesh=mesh, optional=True)
        fully_shard(model, mesh=mesh)
    else:
        model = build()
    calls = {"forwards": 0}
    if kind == "twice":
        model.forward = lambda x: nn.Sequential.forward(model, model[1](x))
    elif kind == "varies":

        def forward(x):
            calls["forwards"] += torch.is_grad_enabled()
            x = model[0](x)
            for block in list(model)[1:] if calls["forwards"] % 2 else [*list(model)[1:-2], model[-1]]:
                x = block(x)
            return x

        model.forward = forward
    before = settings_of(model)
    model.set_schedule("auto", extra_bytes=2**20)
    with choose(WIDE):
        if kind.endswith("backward") or kind.endswith("backwards"):

            def steps():
                for _ in range(STEPS):
                    loss = model(torch.ones(1, WIDTH)).sum()
                    if kind == "two backwards":
                        loss.backward(retain_graph=True)
                    else:
                        loss = model(torch.ones(1, WIDTH)).sum()
                    loss.backward()
                    model.zero_grad()

            lines = log_of(steps)
        else:
            off = torch.autograd.graph.disable_saved_tensors_hooks("turned off")
            with off if kind == "hooks off" else contextlib.nullcontext():
                lines = log_of(train, model)
    assert any("has found no schedule" in line and reason in line for line in lines), lines
    assert model.get_schedule() is None
    after = settings_of(model)
    # The first forward has found the root's own default.
    assert after[1:] == [(True, *rest) for _, *rest in before[1:]] and after[0][1:] == before[0][1:]
    assert isinstance(model.__dict__["_ragged_schedule"], AutoSchedule)


if __name__ == "__main__":
    unittest.main()
