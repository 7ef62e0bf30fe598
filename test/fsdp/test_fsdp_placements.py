"""What stays gathered and unreduced: ZeRO by placement, hierarchical sharding, parts kept by neighbours, bounds in flight."""

import tempfile
import unittest

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import error_of, ranks, run_ranks
from fsdp_blocks import assert_same_gradients, assert_same_training, batch, build
from fsdp_collectives import counted_calls
from tested_device import DEVICE
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Replicate, Shard

from torch_ragged import RaggedShard
from torch_ragged.fsdp import (
    HIERARCHICAL,
    ZERO1,
    ZERO2,
    ZERO3,
    BufferPlacements,
    fully_shard,
    memory_report,
    rows,
    share_comm_ctx,
)


def world():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def square():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def granular(fqn, parameter):
    return rows(3)


def groups_of(model):
    return [group for state in model._ragged_states(recurse=True) for group in state.groups]


def calls(model, function):
    """(all-gathers, reduce-scatters, all-reduces) that ``function`` starts in the groups of ``model``."""
    return counted_calls(groups_of(model), function)


def step(model, number=0, optimizer=None):
    model(batch(number)).pow(2).mean().backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


def check_writes_are_seen(folder):
    """What is resident is not used after writes that no version counter shows, or one rank only knows of."""
    for placements, mesh in ((ZERO1, world()), (ZERO2, world()), (HIERARCHICAL, square())):
        model, x = build(fully_shard, mesh, placements=placements), batch(0)
        before = model(x).detach()
        checkpoint = f"{folder}/{placements == ZERO1}{mesh.ndim}"
        dcp.save({"model": model.state_dict()}, checkpoint_id=checkpoint)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.data.mul_(2)
            other = build(torch_fully_shard, world())
            for parameter in other.parameters():
                parameter.mul_(2)
            assert torch.equal(model(x), other(x))
        if dist.get_rank() == 0:
            model.state_dict()
        next(model.parameters()).detach().to_local().add_(float(dist.get_rank() == 1))
        assert not torch.equal(model(x), other(x))
        dcp.load({"model": model.state_dict()}, checkpoint_id=checkpoint)
        assert torch.equal(model(x), before)
        step(model, 1, torch.optim.SGD(model.parameters(), lr=0.1))
        model.unshard()
        with torch.no_grad():
            model.reshard()
            for parameter in model.parameters():
                parameter.data.zero_()
        model[0].unshard()
        assert not any(parameter.any() for parameter in model[0].parameters())
        model[0].reshard()


def check_placement_errors():
    linear, mesh = nn.Linear(4, 4), world()
    return [
        error_of(BufferPlacements, (Shard(0),), (Replicate(),), (Shard(0),)),
        error_of(fully_shard, linear, mesh=mesh, placements=HIERARCHICAL),
        error_of(fully_shard, linear, mesh=square(), placements=ZERO2),
        error_of(fully_shard, linear, mesh=mesh, placements="ZERO2"),
        error_of(fully_shard, linear, mesh=mesh, orig_param_policy=rows(32)),
    ]


def bound_errors():
    model = build(fully_shard, world())
    return [
        error_of(share_comm_ctx, [nn.Linear(2, 2)]),
        error_of(model.set_max_all_gathers_ahead, -1),
        error_of(model.set_reshard_after_forward, 2),
    ]


def memory_errors():
    ours = build(fully_shard, world())
    errors = [error_of(ours.set_symm_mem_for_comm, "UCC"), error_of(ours[0].set_symm_mem_for_comm)]
    ours[0].set_custom_all_gather(lambda *args, **kwargs: None)
    return [*errors, error_of(ours[0].set_allocate_memory_from_process_group_for_comm, True)]


def check_manual_finalization():
    mesh = world()
    want, model = build(torch_fully_shard, mesh), build(fully_shard, mesh)
    model.finalize_backward()  # Before any forward: nothing to do.
    model.set_manual_backward_finalization(True)
    for sync in (False, True):
        model.set_requires_gradient_sync(sync), want.set_requires_gradient_sync(sync)
        step(model, int(sync)), step(want, int(sync))
        assert all(p.grad is None for p in model.parameters() if hasattr(p, "placements"))
    errors = [error_of(model.set_manual_backward_finalization, False)]
    handle = model.finalize_backward(async_op=True)
    errors.append(error_of(model.finalize_backward))
    handle.wait(), handle.wait()
    assert_same_gradients([want, model])
    model.zero_grad(), want.zero_grad()
    step(model, 2), step(want, 2)
    model.finalize_backward()
    assert_same_gradients([want, model])
    step(model, 3)
    handle = model.finalize_backward(async_op=True)
    model.reset_iter_state()
    errors.append(error_of(handle.wait))
    model.set_manual_backward_finalization(False)
    model.zero_grad(), want.zero_grad()
    step(model, 4), step(want, 4)
    assert_same_gradients([want, model])
    return [*errors, error_of(model[0].finalize_backward)]


class PlacementsTest(unittest.TestCase):
    @ranks(2)
    def test_zero_stages_train_as_fsdp2s():
        mesh = world()
        for placements in (ZERO1, ZERO2, ZERO3):
            knobs = {"placements": placements, "orig_param_policy": granular}
            assert_same_training([build(torch_fully_shard, mesh), build(fully_shard, mesh, **knobs)])
            accumulate = lambda model, micro: model.set_requires_gradient_sync(micro == 1)  # noqa: E731
            assert_same_training([build(torch_fully_shard, mesh), build(fully_shard, mesh, **knobs)], accumulate=accumulate)

    @ranks(2)
    def test_zero_stages_gather_once_or_twice_and_keep_accordingly():
        for placements in (ZERO1, ZERO2, ZERO3):
            model = build(fully_shard, world(), placements=placements, orig_param_policy=granular)
            assert all(isinstance(p.placements[0], RaggedShard) for p in model.parameters())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            step(model, 0, optimizer)
            groups = groups_of(model)
            # Parameters of ZeRO-3 are gathered for forward and for backward, but for the root, which has none of its own here.
            gathers = 2 * len(groups) if placements is ZERO3 else len(groups)
            assert calls(model, lambda: step(model, 1, optimizer)) == (gathers, len(groups), 0)
            resident = sum(group.encoding.buffer.resident_nbytes for group in groups)
            assert resident == (0 if placements is ZERO3 else sum(group.encoding.buffer.nbytes for group in groups))
            report = memory_report(model, optimizer)
            assert report.total.gathered == resident and report.peak.total >= resident

    @ranks(2)
    def test_zero2_uses_what_is_gathered_while_it_is_current():
        """For one step, and only then."""
        model, x, other = build(fully_shard, world(), placements=ZERO2), batch(0), build(torch_fully_shard, world())
        model.set_requires_gradient_sync(False)
        assert calls(model, lambda: step(model)) == (3, 0, 0) and calls(model, lambda: step(model)) == (0, 0, 0)
        with torch.no_grad():
            model[1].up.weight.mul_(2), other[1].up.weight.mul_(2)
        assert torch.equal(model(x), other(x))
        model.set_requires_gradient_sync(True)
        assert calls(model, lambda: step(model)) == (0, 3, 0)
        model.load_state_dict({name: value * 3 for name, value in model.state_dict().items()})
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(3)
        assert torch.equal(model(x), other(x))

    @ranks(2)
    def test_zero1_reduces_in_the_last_backward():
        mesh = world()
        models = [
            build(shard, mesh, **knobs) for shard, knobs in ((torch_fully_shard, {}), (fully_shard, {"placements": ZERO1}))
        ]
        models[0].set_requires_gradient_sync(False)
        models[1].set_is_last_backward(False)
        assert calls(models[1], lambda: step(models[1], 0)) == (3, 0, 0)
        assert models[1][0].up.weight.grad.reduced is None
        step(models[0], 0)
        models[0].set_requires_gradient_sync(True)
        models[1].set_is_last_backward(True)
        assert calls(models[1], lambda: step(models[1], 1)) == (0, 3, 0)
        step(models[0], 1)
        assert_same_gradients(models)

    @ranks(4)
    def test_hierarchical_sharding_trains_as_fsdp2s():
        mesh = square()
        for policy in (None, granular):
            models = [
                build(torch_fully_shard, world()),
                build(fully_shard, mesh, placements=HIERARCHICAL, orig_param_policy=policy),
            ]
            with torch.inference_mode():  # What is kept from here on serves training too; not so in FSDP2.
                models[1](batch(0))
            assert_same_training(models)

    @ranks(4)
    def test_hierarchical_sharding_gathers_across_nodes_once():
        model = build(fully_shard, square(), placements=HIERARCHICAL, orig_param_policy=granular)
        step(model, 1)
        model.zero_grad()
        parameter = next(model.parameters())
        assert (
            len(parameter.placements) == 1 and parameter.device_mesh.size() == 4
        )  # The optimizer's state is cut over all ranks.
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step(model, 0, optimizer)
        # Per group: one gather across nodes; two nodes' worth of slots within a node, in forward and in backward; and two
        # reduce-scatters within, one across.
        assert calls(model, lambda: step(model, 1, optimizer)) == (3 * (1 + 2 + 2), 3 * (2 + 1), 0)
        model.set_requires_gradient_sync(False)
        assert calls(model, lambda: step(model)) == (3 * (1 + 2 + 2), 0, 0)
        assert calls(model, lambda: step(model)) == (3 * (2 + 2), 0, 0)
        model(batch(0))
        report = memory_report(model)
        shard = sum(group.sharded.nbytes for group in groups_of(model))
        assert report.total.sharded == shard and report.total.gathered == 2 * shard

    @ranks(4)
    def test_hierarchical_sharding_divides_gradients_as_fsdp2():
        for factor in (1.0, 8.0):
            models = [build(torch_fully_shard, world()), build(fully_shard, square(), placements=HIERARCHICAL)]
            for each in models:
                for block in each:
                    block.set_gradient_divide_factor(factor)
                    block.set_force_sum_reduction_for_comms(True)
                step(each)
            assert_same_gradients(models)

    @ranks(4)
    def test_custom_collectives_carry_every_gather_and_reduction():
        """They are called for every gather and reduction, of HIERARCHICAL and among neighbours too."""
        for knobs, mesh, gathers, reductions in (
            ({"placements": HIERARCHICAL}, square(), [2, 2, 2, 2, 2], [2, 2, 2]),
            ({"reshard_after_forward": 2}, world(), [4, 2], [4]),
        ):
            model, other, seen = build(fully_shard, mesh, blocks=1, **knobs), build(torch_fully_shard, world(), blocks=1), []
            model.set_separate_reduce_scatter_group()
            separate = set()

            def gather(output, shard, group, async_op, seen=seen):
                seen.append(group.size())
                return dist.all_gather_into_tensor(output, shard, group=group, async_op=async_op)

            def reduce(output, buffer, group, op, async_op, seen=seen, separate=separate):
                seen.append(-group.size()), separate.add(group)
                return dist.reduce_scatter_tensor(output, buffer, group=group, op=op, async_op=async_op)

            step(model)
            assert not seen
            model.zero_grad()
            model[0].set_custom_all_gather(gather), model[0].set_custom_reduce_scatter(reduce)
            step(model), step(other)
            assert [size for size in seen if size > 0] == gathers and [-size for size in seen if size < 0] == reductions, seen
            assert not separate & {mesh.get_group(dim) for dim in range(mesh.ndim)}, separate
            assert_same_gradients([other, model])
            assert "custom collective is set" in error_of(model[0].set_allocate_memory_from_process_group_for_comm, True)

    def test_writes_to_parameters_are_seen(self):
        with tempfile.TemporaryDirectory() as folder:
            run_ranks(4, check_writes_are_seen, folder)

    def test_unsupported_placements_are_refused(self):
        for errors in run_ranks(4, check_placement_errors):
            texts = ["is not supported; expected ZERO1", "with 2 dimensions", "with 1 dimensions"]
            texts += ["(placements=ZERO2)", "lambda fqn, parameter: rows(32)"]
            for error, text in zip(errors, texts, strict=True):
                self.assertIn(text, error)

    @ranks(4)
    def test_neighbours_train_as_fsdp2s():
        """``reshard_after_forward=2`` of four ranks."""
        mesh = world()
        assert_same_training(
            [build(torch_fully_shard, mesh, reshard_after_forward=2), build(fully_shard, mesh, reshard_after_forward=2)]
        )

    @ranks(4)
    def test_neighbours_keep_parts_for_backward():
        """Backward gathers between two."""
        model = build(fully_shard, world(), reshard_after_forward=2)
        model(batch(0))
        groups = groups_of(model)
        kept = sum(group.encoding.buffer.nbytes for group in groups) // 2
        assert sum(group.kept_nbytes for group in groups) == kept == memory_report(model).total.gathered
        sizes = []
        for group in groups:
            issue = group.process_groups.all_gather
            group.process_groups.all_gather = lambda out, part, among=None, issue=issue: (
                sizes.append(out.numel() // part.numel()) or issue(out, part, among)
            )
        step(model)
        assert sizes == [4, 4, 4, 2, 2, 2], sizes
        assert not any(group.kept_nbytes for group in groups)
        with torch.no_grad():
            model(batch(1))
        assert not any(group.kept_nbytes for group in groups)

    @ranks(4)
    def test_neighbours_see_a_change_after_forward():
        mesh = world()
        other = build(torch_fully_shard, mesh)
        model = build(fully_shard, mesh, reshard_after_forward=2)
        model(batch(0))
        with torch.no_grad():
            # On ours, no version counter tells it.
            model[0].up.weight.to_local().data.mul_(2), other[0].up.weight.mul_(2)
        step(model), step(other)
        assert_same_gradients([other, model])

    @ranks(4)
    def test_all_ranks_as_neighbours_reshard_and_one_rank_keeps_all():
        """They are True and False."""
        for size, gathers in ((4, 6), (1, 3)):
            model = build(fully_shard, world(), reshard_after_forward=size)
            assert calls(model, lambda model=model: step(model))[0] == gathers

    @ranks(4)
    def test_neighbours_that_reshard_keep_nothing():
        model = build(fully_shard, world(), reshard_after_forward=2)
        model.set_reshard_after_forward(True)
        model(batch(0))
        assert not any(group.kept_nbytes for group in groups_of(model))

    @ranks(2)
    def test_no_more_groups_are_gathered_ahead_than_the_bound():
        mesh, most = world(), []
        model = build(fully_shard, mesh, blocks=6)
        blocks = list(model)
        blocks[0].set_modules_to_forward_prefetch(blocks[1:])

        def look(module, args):
            most.append(sum(group.is_gathered for group in groups_of(model)))

        for bound in (2, 0, 5):
            model.set_max_all_gathers_ahead(bound)
            handle = blocks[0].up.register_forward_pre_hook(look)
            want = build(torch_fully_shard, mesh, blocks=6)
            step(model), step(want)
            assert_same_gradients([want, model])
            model.zero_grad(), handle.remove()
        assert most == [3, 1, 6], most

    @ranks(2)
    def test_roots_may_share_a_bound():
        """They hold two gradient buffers between them, not two each."""
        mesh = world()
        stages = [build(fully_shard, mesh) for _ in range(2)]
        for stage in stages:
            stage(batch(0))  # Roots before and after.
        share_comm_ctx(stages)
        assert stages[0]._ragged_states(False)[0].comm is stages[1]._ragged_states(True)[-1].comm
        plain = [build(torch_fully_shard, mesh) for _ in range(2)]
        for first, second in (stages, plain):
            second(first(batch(1))).pow(2).mean().backward()
        for mine, theirs in zip(stages, plain, strict=True):
            assert_same_gradients([theirs, mine])

    def test_bad_bounds_are_refused(self):
        words = ("expected modules that fully_shard was called on", "an int of at least 0, got -1", "must be a bool, got 2")
        for errors in run_ranks(2, bound_errors):
            for error, text in zip(errors, words, strict=True):
                self.assertIn(text, error)

    @ranks(2)
    def test_reductions_may_have_one_process_group_of_their_own():
        mesh = world()
        models = [build(torch_fully_shard, mesh), build(fully_shard, mesh)]
        ours = models[1]
        ours.set_separate_reduce_scatter_group()
        groups = {each for group in groups_of(ours) for each in group.process_groups.separate_groups.values()}
        assert len(groups) == 1 and groups.pop() is not dist.group.WORLD  # One for all, not the all-gathers'.
        assert_same_training(models)
        ours.set_separate_reduce_scatter_group(False)
        assert not any(group.process_groups.separate_groups for group in groups_of(ours))

    @ranks(2)
    def test_unsharded_storage_stays_at_its_address_while_kept():
        ours = build(fully_shard, world())
        ours.set_allocate_memory_from_process_group_for_comm(True)  # gloo has no allocator.
        ours.set_keep_unsharded_storage(True)
        step(ours)
        addresses = [group.encoding.buffer.flat.data_ptr() for group in groups_of(ours)]
        assert all(addresses) and not any(group.is_unsharded for group in groups_of(ours))
        step(ours)
        assert addresses == [group.encoding.buffer.flat.data_ptr() for group in groups_of(ours)]
        replaced = [group.encoding.buffer for group in groups_of(ours)]
        ours.set_persistent_buffers(False)  # New buffers: the old ones are freed first, also those that stay allocated.
        assert not any(buffer.is_allocated for buffer in replaced)
        ours.set_keep_unsharded_storage(False)
        step(ours)
        assert not any(group.encoding.buffer.is_allocated for group in groups_of(ours))

    @unittest.skipUnless(DEVICE == "cpu", "gloo is the backend of the CPU")
    def test_memory_that_gloo_does_not_have_is_refused(self):
        words = ("supports NCCL only, got 'UCC'", "needs NCCL, the mesh's backend is gloo", "when a custom collective is set")
        for errors in run_ranks(2, memory_errors):
            for error, text in zip(errors, words, strict=True):
                self.assertIn(text, error)

    def test_gradients_wait_for_a_manual_finalization(self):
        words = (
            "cannot change mode after backward starts",
            "wait for the handle",
            "dropped by reset_iter_state",
            "on the root",
        )
        for errors in run_ranks(2, check_manual_finalization):
            for error, text in zip(errors, words, strict=True):
                self.assertIn(text, error)
