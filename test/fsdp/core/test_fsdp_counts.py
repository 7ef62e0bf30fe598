"""The collectives that one rank of a fake process group issues, and what it waits for. No data moves."""

import gc
import itertools
import sys
import threading
import unittest
from pathlib import Path
from unittest import mock

sys.path.append(str(Path(__file__).parents[3]))  # Of the benchmarks.

import torch
import torch.distributed as dist
from common import enter_fake_group, fake_group
from fsdp_one_rank import BFLOAT16, WIDTH, groups_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

from benchmarks.common.tracker import CallCounter, DispatchCounter
from torch_ragged.fsdp import ZERO2, fully_shard
from torch_ragged.fsdp.comm._collectives import done
from torch_ragged.granularity import rows


class UnusedParameters(nn.Linear):
    def forward(self, x):
        return x * 2


def issued(mode, kind):
    return sum(count for op, count in mode.get_comm_counts().items() if kind in str(op))


class CountTest(unittest.TestCase):
    """Models and meshes of several ranks, without their data."""

    def setUp(self):
        enter_fake_group(self, 8, 7)
        torch.manual_seed(0)

    def test_what_stays_gathered_is_used_until_a_manual_finalization(self):
        mesh = init_device_mesh("cpu", (8,))
        model = fully_shard(nn.Linear(WIDTH, WIDTH), mesh=mesh, placements=ZERO2)
        model.set_manual_backward_finalization(True)
        gathers = []
        for step in range(6):
            with CommDebugMode() as mode:
                model(torch.randn(2, WIDTH, requires_grad=True)).sum().backward()
            if step % 3 == 2:
                model.finalize_backward()
            gathers.append(issued(mode, "allgather"))
        self.assertEqual(gathers, [1, 0, 0, 1, 0, 0])

    def test_a_parameter_has_a_gradient_if_another_rank_used_it(self):
        for others_use_it, frozen in ((False, False), (True, False), (True, True)):
            model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
            model.unused = nn.Parameter(torch.ones(WIDTH), requires_grad=not frozen)
            fully_shard(model, mesh=init_device_mesh("cpu", (8,)))
            (group,) = groups_of(model)
            seen = []

            def all_reduce_max(flags, seen=seen, others_use_it=others_use_it):
                seen.append(flags.tolist())
                flags[seen[-1].index(0)] = others_use_it
                return done

            with mock.patch.object(group.named, "all_reduce_max", all_reduce_max):
                model(torch.randn(2, WIDTH, requires_grad=True)).sum().backward()
            self.assertEqual(sorted(seen[0]), [0, 1, 1])
            self.assertEqual(model.unused.grad is not None, others_use_it and not frozen)
            self.assertIsNotNone(model[0].weight.grad)

    def test_a_gradient_of_half_precision_that_a_hook_has_kept_is_not_divided(self):
        half = MixedPrecisionPolicy(param_dtype=torch.float16)
        model = nn.Linear(16, 32, bias=False)  # Its gradient fills the buffer, whose reduction divides it before the sum.
        fully_shard(model, mesh=init_device_mesh("cpu", (8,)), mp_policy=half)
        model.unshard()
        kept = []
        model.weight.register_post_accumulate_grad_hook(lambda param: kept.append(param.grad))
        model(torch.full((1, 16), 2.0)).sum().backward()
        self.assertTrue(torch.equal(kept[0], torch.full((32, 16), 2.0, dtype=torch.float16)))

    def test_a_branch_whose_forward_runs_in_a_thread_is_gathered_and_reduced_once_in_backward(self):
        class Branches(nn.Module):
            def __init__(self):
                super().__init__()
                self.main, self.aside = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

            def forward(self, x):
                main, found = self.main(x * 2), []  # Backward reaches it first: autograd numbers the nodes of each thread anew.
                for _ in range(2):  # Of the second thread, which has the number of the first one.
                    thread = threading.Thread(target=lambda: found.append(self.aside(x)))
                    thread.start()
                    thread.join()
                return main + found[0] + found[1]

        model, mesh = Branches(), init_device_mesh("cpu", (8,))
        for module in (model.main, model.aside, model):
            fully_shard(module, mesh=mesh)
        for _ in range(2):
            loss = model(torch.randn(2, WIDTH, requires_grad=True)).sum()
            with CommDebugMode() as mode:
                loss.backward()
            self.assertEqual(issued(mode, "reduce_scatter"), 2)
            self.assertLessEqual(issued(mode, "allgather"), 3)  # The branch has two calls, in two threads.

    def test_a_rank_whose_own_use_of_a_parameter_has_a_gradient_issues_no_collective_alone(self):
        model = fully_shard(nn.Linear(WIDTH, WIDTH), mesh=init_device_mesh("cpu", (8,)))
        model.unshard()
        with CommDebugMode() as mode:
            model.weight.sum().backward()  # Other ranks do not.
        self.assertEqual(mode.get_total_counts(), 0)
        with CommDebugMode() as mode:
            model(torch.ones(1, WIDTH)).sum().backward()
        self.assertEqual(issued(mode, "reduce_scatter"), 1)

    def test_a_module_that_was_unsharded_by_hand_is_reduced_on_ranks_without_a_gradient_too(self):
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

            def forward(self, x, uses_head):
                self.head.unshard()
                x = self.body(x)
                return nn.functional.linear(x, self.head.weight) if uses_head else x

        model, mesh, counts = Model(), init_device_mesh("cpu", (8,)), []
        for part in (model.body, model.head, model):
            fully_shard(part, mesh=mesh)
        for uses_head in (True, False):
            with CommDebugMode() as mode:
                model(torch.randn(1, WIDTH), uses_head).sum().backward()
            counts.append(issued(mode, "reduce_scatter"))
        self.assertEqual(counts, [2, 2])

    def test_reductions_of_replicas_add_up(self):
        """Rank 7 of 8 replicas, which alone has gradients."""
        mesh = init_device_mesh("cpu", (8, 1), mesh_dim_names=("replicate", "shard"))
        model = fully_shard(nn.Linear(WIDTH, WIDTH, bias=False), mesh=mesh)
        model.set_manual_backward_finalization(True)
        (group,) = groups_of(model)
        for factor in (1, 2, 4):
            with CommDebugMode() as mode:
                model(torch.full((1, WIDTH), float(factor), requires_grad=True)).sum().backward()
            self.assertEqual(issued(mode, "allreduce"), factor > 1)  # Of the reduction before this one.
            self.assertEqual(sum(buffer.is_allocated for buffer in group.buffers()["reduced"]), {1: 1, 2: 2, 4: 3}[factor])
            reduced = [(Replicate(), Shard(0))] if factor > 1 else []
            found = {buffer.placements for buffer in group.buffers()["reduced"]}
            self.assertEqual(found, {(Partial(), Shard(0)), *reduced})
        model.finalize_backward()
        self.assertTrue(torch.equal(model.weight.grad.to_local(), torch.full((WIDTH * WIDTH,), 7 / 8)))
        self.assertEqual(group.buffers()["reduced"], [])
        for _ in range(2):
            model(torch.ones(1, WIDTH)).sum().backward()
        model.reset_iter_state()  # While an all-reduce is in flight.
        self.assertEqual(group.buffers()["reduced"], [])

    def test_pieces_of_a_later_dimension_are_freed_unless_they_are_kept(self):
        mesh = init_device_mesh("cpu", (8,))
        for kept, placements in ((False, None), (True, ZERO2), (True, None)):
            layer = nn.Linear(8, 8, bias=False)
            model = fully_shard(layer, mesh=mesh, shard_placement_fn=lambda p: Shard(1), placements=placements)
            model.set_keep_unsharded_storage(kept and placements is None)
            model.unshard()
            self.assertEqual(groups_of(model)[0].encoding.buffer.is_allocated, kept)

    def gathers(self, model, change=lambda: None):
        change()
        with CommDebugMode() as mode:
            model(torch.randn(2, WIDTH, requires_grad=True)).sum().backward()
        return issued(mode, "allgather")

    def test_what_stays_unsharded_is_gathered_again_after_a_change(self):
        model = fully_shard(nn.Linear(WIDTH, WIDTH), mesh=init_device_mesh("cpu", (8,)), reshard_after_forward=False)
        model.set_reshard_after_backward(False)
        parameter, optimizer = model.weight, torch.optim.SGD(model.parameters(), lr=0.1)

        def write():
            with torch.no_grad():
                parameter.mul_(2)

        counts = [self.gathers(model), self.gathers(model), self.gathers(model, optimizer.step), self.gathers(model)]
        self.assertEqual([*counts, self.gathers(model, write), self.gathers(model)], [1, 0, 1, 0, 1, 0])

    def test_frozen_modules_do_not_end_an_accumulation(self):
        mesh = init_device_mesh("cpu", (8,))
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH).requires_grad_(False), nn.Linear(WIDTH, WIDTH))
        for module in (*model, model):
            fully_shard(module, mesh=mesh, placements=ZERO2)
        counts = []
        for step in range(6):
            model.set_requires_gradient_sync(step % 3 == 2)
            counts.append(self.gathers(model))
        self.assertEqual(counts, [2, 0, 0, 2, 0, 0])

    def test_modules_that_backward_does_not_reach_are_reduced_in_each_pass(self):
        """Another rank may reach them."""

        class Model(nn.Sequential):
            def forward(self, x):
                self[0](x)
                return self[1](x)

        for is_manual in (False, True):
            model, mesh = Model(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), init_device_mesh("cpu", (8,))
            for module in (*model, model):
                fully_shard(module, mesh=mesh)
            model.set_manual_backward_finalization(is_manual)
            with CommDebugMode() as mode:
                model(torch.randn(2, WIDTH, requires_grad=True)).sum().backward()
            self.assertEqual(issued(mode, "reduce_scatter"), 2)

    def test_profilers_see_what_a_step_does_with_the_names_of_groups(self):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
        for module in (*model, model):
            fully_shard(module, mesh=mesh)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            model(torch.randn(2, WIDTH, requires_grad=True)).sum().backward()
        counts = {event.key: event.count for event in profile.key_averages() if event.key.startswith("torch_ragged::")}
        both = dict.fromkeys(("pre_forward", "all_gather", "all_gather_wait", "pre_backward", "post_backward"), 1)
        both |= {"all_gather": 2, "all_gather_wait": 2}
        both |= dict.fromkeys(("reduce_scatter", "reduce_scatter_wait", "all_reduce", "all_reduce_wait"), 1)
        expected = {f"torch_ragged::{what} (0)": count for what, count in both.items()}
        expected["torch_ragged::unused_parameters_all_reduce (0)"] = 1
        expected["torch_ragged::root_post_backward_callback (root)"] = 1
        self.assertLessEqual(expected.items(), counts.items())

    def test_a_reset_waits_for_the_reductions_in_flight_and_frees_their_input(self):
        waits = []

        class Work:
            def wait(self):
                waits.append(group.grad_buffer.buffers()[0].is_allocated)

        model = fully_shard(nn.Linear(WIDTH, WIDTH), mesh=init_device_mesh("cpu", (8,)))
        (group,) = groups_of(model)
        model.set_custom_reduce_scatter(lambda output, buffer, group, op, async_op: Work())
        model.set_manual_backward_finalization(True)
        model(torch.randn(2, WIDTH, requires_grad=True)).sum().backward()
        self.assertEqual(waits, [])
        model.reset_iter_state()
        self.assertEqual(waits, [True])
        self.assertFalse(any(buffer.is_allocated for buffer in group.buffers()["gradients"]))

    def test_a_module_that_runs_twice_is_sharded_between_its_backwards(self):
        class Twice(nn.Sequential):
            def forward(self, x):
                for layer in (*self, *self):
                    x = layer(x)
                return x

        mesh = init_device_mesh("cpu", (8,))
        for is_list, gathers in ((False, [4, 4]), (True, [2, 1])):  # In backward, a list is sharded after its last module.
            model = Twice(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
            for modules in [list(model)] if is_list else list(model):
                fully_shard(modules, mesh=mesh)
            fully_shard(model, mesh=mesh)
            all_gather, counts = mock.create_autospec(dist.all_gather_into_tensor, return_value=None), []
            for group in groups_of(model):
                group.process_groups.custom_all_gather = all_gather
            for _ in range(2):
                loss = model(torch.randn(2, WIDTH, requires_grad=True)).sum()
                counts.append(all_gather.call_count)
                loss.backward()
                counts.append(all_gather.call_count - counts[-1])
                all_gather.reset_mock()
            self.assertEqual(counts, 2 * gathers, is_list)

    def test_an_asynchronous_finalization_issues_the_reductions_at_once(self):
        model = fully_shard(nn.Linear(WIDTH, WIDTH), mesh=init_device_mesh("cpu", (8,)))
        model.set_manual_backward_finalization(True)
        model.set_requires_gradient_sync(False)
        counts = []
        with CommDebugMode() as mode:
            model(torch.randn(2, WIDTH, requires_grad=True)).sum().backward()
            counts.append(issued(mode, "reduce_scatter"))
            model.set_requires_gradient_sync(True)
            handle = model.finalize_backward(async_op=True)
            counts.append(issued(mode, "reduce_scatter"))
            self.assertIsNone(model.weight.grad)
            handle.wait()
            counts.append(issued(mode, "reduce_scatter"))
        self.assertEqual(counts, [0, 1, 1])
        self.assertIsNotNone(model.weight.grad)

    def test_a_group_with_frozen_parameters_is_reduced_if_this_rank_has_no_gradient(self):
        """Another rank may have one."""
        mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for frozen, policy in itertools.product(((), ("weight",), ("weight", "bias")), (MixedPrecisionPolicy(), mixed)):
            model = nn.Sequential(nn.Linear(WIDTH, WIDTH), UnusedParameters(WIDTH, WIDTH))
            for name in frozen:
                getattr(model[1], name).requires_grad_(False)
            mesh = init_device_mesh("cpu", (8,))
            for module in (*model, model):
                fully_shard(module, mesh=mesh, mp_policy=policy)
            with CommDebugMode() as mode:
                model(torch.randn(2, WIDTH, requires_grad=True)).sum().backward()
            self.assertEqual(issued(mode, "reduce_scatter"), 1 + (len(frozen) < 2), frozen)


class HostWorkTest(unittest.TestCase):
    """What a step costs the host, as numbers of Python calls and of operators."""

    def work(self, ranks, block):
        """Of one step, forward and backward: calls, then operators; and the numbers of gaps in the groups' buffers."""
        with fake_group(ranks):
            layers = [nn.Sequential(nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False)) for _ in range(3)]
            model, mesh, counts = nn.Sequential(*layers), init_device_mesh("cpu", (ranks,)), []
            for module in (*layers, model):
                fully_shard(module, mesh=mesh, mp_policy=BFLOAT16, orig_param_policy=lambda name, param: rows(block))
            for counter in (DispatchCounter(), CallCounter(), DispatchCounter()):  # The first step makes what later ones use.
                gc.collect()
                model.zero_grad()
                with counter:
                    loss = model(torch.ones(2, 32)).sum()
                counts.append(counter.count)
                with counter:
                    loss.backward()
                counts.append(counter.count - counts[-1])
            return counts[2:], [len(group.layout.gaps) for group in groups_of(model)]

    def test_it_depends_on_no_number_of_ranks_or_gaps(self):
        (calls, backward_calls, operators, backward), gaps = self.work(8, 1)
        self.assertEqual(gaps, [0, 0, 0])
        for ranks, block, expected in ((256, 1, [1, 1, 1]), (8, 24, [2, 2, 2]), (256, 5, [2, 2, 2])):
            # All gaps of a group are zeroed by one operator, and nothing else is done for them.
            counts = [calls, backward_calls, operators, backward + 3]
            self.assertEqual(self.work(ranks, block), (counts, expected), ranks)
