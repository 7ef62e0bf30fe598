"""Modules that only some ranks run in forward: they train if they are optional, and are a named error if they are not."""

import contextlib
import datetime
import threading
import time
import unittest

import torch
import torch.distributed as dist
from common import collectives_seen, error_of, ranks, run_ranks
from soon import soon
from tested_device import DEVICE
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.checkpoint import checkpoint

from torch_ragged._ranks import peers
from torch_ragged.fsdp import MixedPrecisionPolicy, fully_shard
from torch_ragged.fsdp.comm import _call_log

SIZE = 6
HANGS = "over NCCL, no host waits for a collective, and looks for the calls of other ranks: NCCL hangs"


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Linear(SIZE, SIZE)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh()) for _ in range(2)])

    def forward(self, x, blocks=(0, 1)):
        x = self.patch(x)
        for index in blocks:
            x = x + self.blocks[index](x)
        return x


class Model(nn.Module):
    """A tower and experts, which a batch may skip, among layers that all batches use."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(SIZE, SIZE)
        self.tower = Tower()
        self.layers = nn.ModuleList([nn.Linear(SIZE, SIZE) for _ in range(2)])
        self.experts = nn.ModuleList([nn.Linear(SIZE, SIZE) for _ in range(3)])
        self.head = nn.Linear(SIZE, 1)

    def forward(self, x, image=None, blocks=(0, 1), experts=()):
        x = self.embed(x)
        if image is not None:
            x = x + self.tower(image, blocks)
        x = self.layers[0](x).tanh()
        for index in experts:
            x = x + self.experts[index](x).sin()
        return self.head(self.layers[1](x).tanh())


def on_purpose(*_):
    raise RuntimeError("on purpose")


def shard_model(model, optional=True, **options):
    for block in model.tower.blocks:
        fully_shard(block, **options)
    fully_shard(model.tower, optional=optional, **options)
    for expert in model.experts:
        fully_shard(expert, optional=optional, **options)
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


# What each of two ranks runs in a step: (image, blocks, experts).
STEPS = [
    ((True, (0, 1), (0,)), (False, (), (1, 2))),
    ((False, (), ()), (True, (0, 1), (2, 0))),
    ((True, (1,), (1,)), (True, (0,), (1,))),
    ((False, (), ()), (False, (), ())),
    ((True, (0, 1), (2, 1, 2)), (False, (), (0, 0))),
]


def batch(step, rank):
    generator = torch.Generator().manual_seed(10 * step + rank)
    x, image = torch.randn(2, 3, SIZE, generator=generator)
    has_image, blocks, experts = STEPS[step % len(STEPS)][rank % 2]
    return x, image if has_image else None, blocks, experts


def check_training(options, replicas=False, micro_batches=1):
    ranks = dist.get_world_size()
    if replicas:
        options = {**options, "mesh": init_device_mesh("cpu", (2, ranks // 2))}
    single, model = Model(), shard_model(Model(), **options)
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (single, model)]
    for step in range(len(STEPS)):
        for micro in range(micro_batches):
            model.set_requires_gradient_sync(micro == micro_batches - 1)
            model(*batch(step + micro, dist.get_rank())).sum().backward()
            for rank in range(ranks):
                (single(*batch(step + micro, rank)).sum() / ranks).backward()
        for (name, param), expected in zip(model.named_parameters(), single.parameters(), strict=True):
            assert (param.grad is None) == (expected.grad is None), (step, name)
            if expected.grad is not None:
                torch.testing.assert_close(param.grad.full_tensor(), expected.grad, msg=f"{step} {name}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            inputs = batch(step + 1, dist.get_rank())
            torch.testing.assert_close(model(*inputs), single(*inputs))


class Notes(nn.Linear):
    """Returns nothing."""

    def forward(self, x):
        self.noted = super().forward(x).sum()


class Retrying(nn.Module):
    """Runs an optional module in an ``except`` block, as programs do after they have run out of memory."""

    def __init__(self):
        super().__init__()
        self.notes, self.head = Notes(SIZE, SIZE), nn.Linear(SIZE, 1)

    def forward(self, x, runs):
        try:
            raise RuntimeError("out of memory")
        except RuntimeError:
            if runs:
                self.notes(x)
        return self.head(x)


class Forgiving(Retrying):
    """Goes on without an optional module that raises."""

    def forward(self, x, runs):
        with contextlib.suppress(RuntimeError):
            if runs:
                self.notes(x)
        return self.head(x)


def check_an_optional_module(model, raises):
    if raises:
        model.notes.register_forward_pre_hook(on_purpose)
    fully_shard(model.notes, optional=True)
    fully_shard(model)
    with torch.no_grad():
        model(torch.ones(1, SIZE), dist.get_rank() == 0)
    return fully_shard.state(model.notes).groups[0].is_unsharded


@soon()
def check_skipped(skips):
    """Ranks that skip a module that is not optional, at the first step and later."""
    texts = []
    for first in (True, False):
        model = shard_model(Model(), optional=False)
        x = torch.ones(2, SIZE)
        if not first:
            model(x, x).sum().backward()
        start = time.monotonic()
        texts.append(error_of(model, x, None if dist.get_rank() in skips else x))
        assert time.monotonic() - start < 30, "the error took longer than seconds"  # Far below the timeout of the group.
    return texts


@soon()
def check_roots(moment):
    """Modules without a root above them, of equal sizes: rank 1 runs two of them in another order than rank 0."""
    roots = [fully_shard(nn.Linear(SIZE, SIZE)) for _ in range(3)]
    usual, swapped = [0, 1, 2], [1, 0, 2]
    for _ in range(moment):
        for index in usual:
            roots[index](torch.ones(2, SIZE)).sum().backward()
    texts = ""
    try:
        for index in usual if dist.get_rank() == 0 else swapped:
            roots[index](torch.ones(2, SIZE))
    except RuntimeError as error:
        texts = str(error)
    return texts


def check_usual_roots():
    """Roots that follow each other as before cost no report: two that take turns, with an evaluation of one of them between."""
    # Each gathers twice in a forward.
    roots = [fully_shard(nn.Sequential(fully_shard(nn.Linear(SIZE, SIZE)), nn.Linear(SIZE, SIZE))) for _ in range(2)]
    steps = [0, 1, 0, 1, 0, 0, 1]
    reports, agree = [], _call_log.CallLog._agree

    def counted(log, position):
        reports.append(log)
        agree(log, position)

    _call_log.CallLog._agree = counted
    try:
        for period in range(12):
            for index in steps:
                roots[index](torch.ones(2, SIZE)).sum().backward()
            if period == 7:
                reports.clear()
    finally:
        _call_log.CallLog._agree = agree
    return len(reports)


class OptionalTest(unittest.TestCase):
    def test_a_module_that_returns_nothing_in_an_except_block_has_not_raised(self):
        self.assertEqual(run_ranks(2, check_an_optional_module, Retrying(), False), [False, False])

    def test_ranks_leave_a_module_that_has_raised_on_another_one(self):
        self.assertEqual(run_ranks(2, check_an_optional_module, Forgiving(), True), [False, False])

    def test_gradients_are_those_of_one_process(self):
        bf16 = MixedPrecisionPolicy(reduce_dtype=torch.float64)
        for options in ({}, {"reshard_after_forward": False}, {"reshard_after_forward": 2}, {"mp_policy": bf16}):
            with self.subTest(**options):
                run_ranks(4 if options.get("reshard_after_forward") == 2 else 2, check_training, options)

    @ranks(2)
    def test_training_goes_on_after_a_forward_that_has_raised_on_all_ranks():
        """At one place; or one rank in the tower, and the other one, which skips it, before. Both wait for no all-gather."""
        rank = dist.get_rank()
        places = [(place, place) for place in ("embed", "layers.0", "layers.1", "head")]
        for here, there in [*places, *((place, "embed") for place in ("tower.patch", "tower.blocks.1", "tower"))]:
            model, plain = shard_model(Model()), Model()
            xs = torch.arange(4.0 * SIZE).view(2, 2, SIZE).sin()
            for step in range(3):
                images = [xs[0] if (each + step) % 2 == 0 else None for each in range(2)]
                if step:
                    uses = (rank + step) % 2 == 0
                    where = model.get_submodule(here if uses else there)
                    handle = where.register_forward_hook(on_purpose)
                    assert "on purpose" in error_of(model, xs[rank], images[rank], experts=(rank,)), (here, there, step)
                    handle.remove()
                for each in range(2):
                    plain(xs[each], images[each], experts=(each,)).sum().div(2).backward()
                model(xs[rank], images[rank], experts=(rank,)).sum().backward()
                for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
                    if other.grad is not None:
                        torch.testing.assert_close(param.grad.full_tensor().cpu(), other.grad, msg=f"{here} {there} {name}")
                model.zero_grad()
                plain.zero_grad()

    def test_replicas_take_part_too(self):
        run_ranks(4, check_training, {}, True)

    def test_gradients_accumulate(self):
        run_ranks(2, check_training, {}, False, 3)

    @ranks(2)
    def test_a_frozen_tower_may_run_without_gradients():
        """A tower without gradients, in no_grad on the ranks that run it."""
        model = Model()
        model.tower.requires_grad_(False)
        model = shard_model(model)
        tower, single = model.tower.forward, Model()
        model.tower.forward = torch.no_grad()(tower)
        for step in range(len(STEPS)):
            model(*batch(step, dist.get_rank())).sum().backward()
        assert all(param.grad is None for param in model.tower.parameters())
        single.tower.requires_grad_(False)
        for step in range(len(STEPS)):
            for rank in range(2):
                (single(*batch(step, rank)).sum() / 2).backward()
        torch.testing.assert_close(model.embed.weight.grad.full_tensor(), single.embed.weight.grad)

    @ranks(2)
    def test_optional_blocks_may_be_checkpointed():
        model = shard_model(Model())
        blocks = [block.forward for block in model.tower.blocks]
        for block, forward in zip(model.tower.blocks, blocks, strict=True):
            block.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)
        single = Model()
        for step in range(len(STEPS)):
            model(*batch(step, dist.get_rank())).sum().backward()
            for rank in range(2):
                (single(*batch(step, rank)).sum() / 2).backward()
        for param, expected in zip(model.parameters(), single.parameters(), strict=True):
            torch.testing.assert_close(param.grad.full_tensor(), expected.grad)

    @ranks(2)
    def test_roll_calls_are_the_only_new_collectives():
        """Without optional modules, a step has FSDP's collectives only; with them, the roll calls."""
        counts = []
        for optional in (False, True):
            model = shard_model(Model(), optional=optional)
            inputs = (torch.ones(2, SIZE), torch.ones(2, SIZE))
            for _ in range(2):
                with CommDebugMode() as comm:
                    model(*inputs).sum().backward()
            counts.append((collectives_seen(comm), comm.get_total_counts()))
        (seen, total), (also_seen, with_roll_calls) = counts
        assert seen == also_seen, (seen, also_seen)
        # Three modules in the tower with two events each, two layers and the end.
        assert with_roll_calls - total == 2 * 3 + 2 + 1, (total, with_roll_calls)

    @ranks(2)
    def test_parameters_may_be_assigned_to_a_model_on_the_meta_device():
        """A model on the meta device, whose parameters load_state_dict assigns."""
        values = shard_model(Model()).state_dict()
        with torch.device("meta"):
            model = shard_model(Model())
        model.load_state_dict(values, assign=True)
        for step in range(2):
            model(*batch(step, dist.get_rank())).sum().backward()
        assert model.tower.patch.weight.grad is not None

    @ranks(2)
    def test_wrong_use_is_an_error_on_all_ranks():
        model = Model()
        assert "optional=True does not support a list of several modules: call fully_shard for each of them" in error_of(
            fully_shard, [model.embed, model.head], optional=True
        )
        root = fully_shard(nn.Linear(2, 2), optional=True)
        assert "the root, whose forward runs first, cannot be optional" in error_of(root, torch.ones(2, 2))
        tower = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        fully_shard(list(tower))
        listed = fully_shard(nn.Sequential(fully_shard(tower, optional=True)))
        assert "FSDPLinear, FSDPLinear are inside an optional module and have one group" in error_of(listed, torch.ones(2, 2))
        options = {"optional": dist.get_rank() == 0}
        assert "was called differently on different ranks" in error_of(fully_shard, nn.Linear(2, 2), **options)


class SkippedTest(unittest.TestCase):
    @unittest.skipUnless(DEVICE == "cpu", HANGS)
    def test_every_rank_names_the_module_and_the_ranks(self):
        for texts in run_ranks(3, check_skipped, [1]):
            for text in texts:
                self.assertIn("ranks called different modules in forward", text)
                self.assertIn("ranks 0, 2: tower", text)
                self.assertIn("rank 1: layers.0", text)
                self.assertIn("fully_shard(module, optional=True)", text)

    @ranks(2)
    def test_all_ranks_may_take_another_branch():
        """Calls that differ from the last forward on all ranks alike cost no error."""
        model = shard_model(Model(), optional=False)
        for step in range(6):
            inputs = [torch.ones(2, SIZE)] * (1 + step % 2)
            model(*inputs, experts=[step % 3]).sum().backward()

    @ranks(2)
    def test_looking_for_differences_changes_nothing():
        """Ranks that look for differences all the time find none, and lose no result."""
        slice_ = _call_log._CALL_SLICE
        _call_log._CALL_SLICE = peers._SLICE = datetime.timedelta(milliseconds=5)
        try:
            model, single = shard_model(Model(), optional=False), Model()
            for step in range(4):
                if dist.get_rank() == step % 2:
                    dist.distributed_c10d._get_default_store().wait([f"step {step}"])
                else:
                    threading.Timer(0.05, dist.distributed_c10d._get_default_store().set, (f"step {step}", "")).start()
                x = torch.full((2, SIZE), step / 4)
                (model(x, x).sum() * (1 + dist.get_rank())).backward()
                single(x, x).sum().mul(1.5).backward()
        finally:
            _call_log._CALL_SLICE = peers._SLICE = slice_
        torch.testing.assert_close(model.embed.weight.grad.full_tensor(), single.embed.weight.grad)

    @unittest.skipUnless(DEVICE == "cpu", HANGS)
    def test_roots_in_different_orders_are_an_error_on_all_ranks(self):
        for moment in (0, 3):
            for text in run_ranks(2, check_roots, moment):
                self.assertRegex(
                    text, r"rank 0: FSDPLinear with weight and 1 more in group \d+; rank 1: FSDPLinear with weight"
                )

    def test_roots_that_follow_each_other_as_before_are_not_compared(self):
        self.assertEqual(run_ranks(2, check_usual_roots), [0, 0])

    @ranks(3)
    def test_names_of_modules_may_be_numbers():
        """Modules whose names are numbers, as those of ranks are."""
        model = nn.Sequential(*[fully_shard(nn.Linear(SIZE, SIZE)) for _ in range(4)])
        fully_shard(model)
        for _ in range(2):
            model(torch.ones(2, SIZE)).sum().backward()

    @ranks(2)
    @soon()
    def test_a_late_rank_is_waited_for():
        """A rank that needs longer than others to come to a new call is waited for."""
        model = shard_model(Model(), optional=False)
        x = torch.ones(2, SIZE)
        model(x).sum().backward()
        if dist.get_rank() == 1:
            dist.distributed_c10d._get_default_store().wait(["waited"], datetime.timedelta(seconds=60))
        else:
            checks, check = [], _call_log.CallLog.check

            def counted(log):
                check(log)
                checks.append(log)
                dist.distributed_c10d._get_default_store().set("waited", "")

            _call_log.CallLog.check = counted
        model(x, x).sum().backward()
        if dist.get_rank() == 0:
            _call_log.CallLog.check = check
            assert checks
