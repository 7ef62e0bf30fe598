"""NeighbourCopies: after the death of a rank, the others go on with the last copy, bit by bit."""

import functools
import os
import signal
import time
import unittest
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from common import error_of, ranks, run_mortal_ranks, run_ranks
from delays import delays
from soon import soon
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torch_ragged._ranks import peers, standstill, survivors
from torch_ragged._ranks.store import SharedStore
from torch_ragged.fsdp import NeighbourCopies, Offload, fully_shard, reshard_to, rows
from torch_ragged.fsdp.elastic import _neighbour_copies
from torch_ragged.optim import AdamW8bit
from torch_ragged.transfer import _watch


def make(mesh, optimizer="adamw"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Tanh(), nn.Linear(10, 5))
    for layer in (model[0], model[3]):
        fully_shard(layer, mesh=mesh, orig_param_policy=lambda fqn, param: rows(2))
    fully_shard(model, mesh=mesh)
    kinds = {"adamw": torch.optim.AdamW, "adamw8bit": AdamW8bit}
    return model, kinds[optimizer](model.parameters(), lr=0.1)


def step(model, optimizer, number):
    optimizer.zero_grad()  # Not after the step: copies are made while there are gradients, which they do not have.
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    model(torch.randn(8, 6, generator=generator)).square().mean().backward()
    optimizer.step()


def whole(model, optimizer):
    """Parameters, buffers and optimizer states, gathered."""
    found = dict(model.state_dict())
    for name, param in model.named_parameters():
        found |= {f"{name}.{key}": value for key, value in optimizer.state[param].items()}
    return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in found.items()}


def copied(found):
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in found.items()}


def same(got, wanted):
    if set(got) != set(wanted):
        return f"{set(got) ^ set(wanted)}"
    return [name for name, value in got.items() if not torch.equal(torch.as_tensor(value), torch.as_tensor(wanted[name]))]


def train_and_die(victims, kind):
    """Trains 3 steps with copies, loses ranks in the fourth, recovers and trains on."""
    rank = dist.get_rank()
    model, optimizer = make(init_device_mesh("cpu", (4,)), kind)
    copies, states = NeighbourCopies(model, optimizer, distance=1), []
    for number in range(3):
        step(model, optimizer, number)
        copies.update()
        buffers = {name: value.clone() for name, value in model.named_buffers()}  # Each rank has its own.
        states.append(copied(whole(model, optimizer)) | buffers)
        optimizer.param_groups[0]["lr"] *= 0.5
    copies.wait()
    if rank in victims:
        handle = model[3].register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    failure = error_of(step, model, optimizer, 3)
    if rank in victims:
        handle.remove()
    left = copies.ranks_left()
    mesh = DeviceMesh.from_group(dist.new_group(left, use_local_synchronization=True), "cpu")
    lost = error_of(copies.recover, mesh)
    if lost:
        return failure, lost, None
    different = same(whole(model, optimizer), states[-1]) or optimizer.param_groups[0]["lr"] != 0.025
    step(model, optimizer, 3)
    copies = NeighbourCopies(model, optimizer)
    copies.update()
    copies.wait()
    step(model, optimizer, 4)
    return failure, "", different


class CopiedBy:
    """An option of an optimizer, which calls a function when NeighbourCopies copy it."""

    function = None

    def __deepcopy__(self, memo):
        if self.function is not None:
            self.function()
        return CopiedBy()


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def refuse():
    raise TypeError("no copy of this")


def copied_after(model, optimizer, copies):
    """Make and complete one copy; returns the state that it has."""
    copies.update()
    copies.wait()
    return copied(whole(model, optimizer)) | copied(dict(model.named_buffers()))


def lose_a_rank_when_states_appear():
    """The copy of a model before its first step is complete. In the next one, which has states too, rank 2 dies."""
    _watch._TRANSFER_PATIENCE = 3.0  # Seconds, for the report of the dead rank.
    if dist.get_rank() < 3:
        NeighbourCopies(*make(DeviceMesh("cpu", [0, 1, 2])))  # Rank 3 has made fewer process groups.
    model, optimizer = make(init_device_mesh("cpu", (4,)))
    option = optimizer.param_groups[0]["note"] = CopiedBy()
    copies = NeighbourCopies(model, optimizer)
    wanted = copied_after(model, optimizer, copies)
    step(model, optimizer, 0)
    option.function = die if dist.get_rank() == 2 else None
    copies.update()
    failure = error_of(copies.wait)
    recovered = copies.recover()
    different = same(whole(model, optimizer), wanted)
    step(model, optimizer, 0)  # The optimizer makes its states again.
    return failure, recovered, different


def lose_two_ranks():
    """Rank 1 dies in training, rank 3 when the others have agreed to go on with it."""
    rank = dist.get_rank()
    model, optimizer = make(init_device_mesh("cpu", (4,)))
    copies = NeighbourCopies(model, optimizer)
    step(model, optimizer, 0)
    wanted = copied_after(model, optimizer, copies)
    if rank == 1:
        die()
    error_of(step, model, optimizer, 1)
    if rank == 3:
        copies.ranks_left()
        die()
    failure = error_of(copies.recover)
    return failure, copies.recover(), same(whole(model, optimizer), wanted), next(model.parameters()).device_mesh.mesh.tolist()


def lose_a_rank_while_others_are_busy():
    """Rank 1 dies. Rank 0 is in a collective with it, rank 2 computes, rank 3 waits for rank 2 in another group."""
    rank = dist.get_rank()
    # Rank 2 is later than each of these, also than the standstill that rank 3 finds: the timeout of the group counts.
    peers.HELD, standstill._PERIOD, standstill._NOTICE = 0.5, 0.1, 0.2
    peers._PATIENCE = _watch._TRANSFER_PATIENCE = _neighbour_copies._REPORTING = 1.0
    mesh = DeviceMesh.from_group(dist.new_group([0, 1, 2, 3]), "cpu")
    copies = NeighbourCopies(*make(mesh))
    dist.barrier()
    if rank == 1:
        die()
    if rank == 2:
        time.sleep(2.5)
    failure = error_of(dist.all_reduce, torch.ones(1), group=None if rank == 3 else mesh.get_group())
    return failure, copies.ranks_left()


def lose_a_rank_and_stop_another():
    rank = dist.get_rank()
    copies = NeighbourCopies(*make(init_device_mesh("cpu", (4,))))
    dist.barrier()
    if rank in (1, 3):
        os.kill(os.getpid(), signal.SIGKILL if rank == 1 else signal.SIGSTOP)
    start = time.monotonic()
    return copies.ranks_left(4), time.monotonic() - start


def miss_an_update_and_lose_a_rank():
    """Rank 1 misses the update of step 2, and dies after it has copied step 3: its copy on rank 2 is of another step."""
    _watch._TRANSFER_PATIENCE = 3.0
    rank = dist.get_rank()
    model, optimizer = make(init_device_mesh("cpu", (4,)))
    copies, states = NeighbourCopies(model, optimizer), []
    for number in range(3):
        step(model, optimizer, number)
        states.append(copied(whole(model, optimizer)) | copied(dict(model.named_buffers())))
        if number != (1 if rank == 1 else 2):
            copies.update()
    failure = error_of(copies.wait)
    dist.barrier()
    if rank == 1:
        die()
    return failure, copies.recover(), same(whole(model, optimizer), states[0])


def delayed_copies(seed):
    """Copies of each second step, of which rank 2 misses one call, and recovery, with a scheduler."""
    with delays(seed):
        mesh = init_device_mesh("cpu", (3,))
        model, optimizer = make(mesh)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        copies, states, texts = NeighbourCopies(model, optimizer, every=2, stateful=[scheduler]), [], []
        for number in range(6):
            step(model, optimizer, number)
            scheduler.step()
            states.append(copied(whole(model, optimizer)) | copied(dict(model.named_buffers())))
            if dist.get_rank() != 2 or number != 2:
                texts.append(error_of(copies.update))
        texts.append(error_of(copies.wait))
        recovered = copies.recover(mesh)
        different = same(whole(model, optimizer), states[recovered - 1])
        return "".join(texts), recovered, different, scheduler.last_epoch, optimizer.param_groups[0]["lr"]


class NeighbourCopiesTest(unittest.TestCase):
    def test_the_ranks_that_are_left_go_on_with_the_last_copy(self):
        self.check_one_death("adamw")

    @pytest.mark.slow
    def test_the_states_of_other_optimizers_are_copied_too(self):
        self.check_one_death("adamw8bit")

    def check_one_death(self, kind):
        for failure, lost, different in run_mortal_ranks(4, {2}, train_and_die, {2}, kind).values():
            self.assertIn("PeerError", failure)
            self.assertEqual((lost, different), ("", False))

    @pytest.mark.slow
    def test_a_rank_that_dies_with_its_copy_is_an_error(self):
        for _, lost, _ in run_mortal_ranks(4, {1, 2}, train_and_die, {1, 2}, "adamw").values():
            self.assertEqual(lost, "CopiesLost: recover(): rank 1 with its copy on rank 2 are gone: load a checkpoint")

    @ranks(4)
    def test_copies_take_the_memory_that_is_said_and_incomplete_ones_are_not_used():
        square = init_device_mesh("cpu", (2, 2))
        assert "with replicas, leave the distance out" in error_of(NeighbourCopies, *make(square), distance=1)
        flat = init_device_mesh("cpu", (4,))
        model, optimizer = make(flat)
        for options in ({"every": 0}, {"every": "2"}, {"every": True}, {"distance": 0}, {"distance": 4}, {"distance": 1.5}):
            assert "expected integers, every >= 1 and a distance between 1 and 3" in error_of(
                NeighbourCopies, model, optimizer, **options
            )
        for mesh, other, options, factor in ((flat, square, {"distance": 3}, 4), (square, flat, {}, 2)):
            model, optimizer = make(mesh)
            copies = NeighbourCopies(model, optimizer, every=2, **options)
            assert "no complete copy" in error_of(copies.recover, other)
            for number in range(6):  # The third copy takes the place of the first one.
                step(model, optimizer, number)
                copies.update()
                if number == 3:
                    wanted = copied(whole(model, optimizer))
            copies.wait()
            # Of all ranks, two generations of two copies, or of one; each tensor starts at a multiple of 16 bytes.
            moments = [value for param in model.parameters() for value in optimizer.state[param].values() if value.numel() > 1]
            held = sum(-(-tensor.to_local().nbytes // 16) * 16 for tensor in (*model.parameters(), *moments))
            total = torch.tensor([held, copies.nbytes])
            dist.all_reduce(total)
            assert int(total[1]) == factor * int(total[0]), total
            last = copied(whole(model, optimizer))
            for each in copies._generations:  # As if a rank had died before the last copy was complete.
                if each.step == 6 and dist.get_rank() == 1:
                    each.step = -1
            assert copies.recover(other) == 4
            assert all(param.grad is None for param in model.parameters())
            buffers = [name for name, _ in model.named_buffers()]
            got = whole(model, optimizer)
            assert not [name for name in same(got, wanted) if name not in buffers], same(got, wanted)
            assert same(got, last)

    @ranks(4)
    def test_new_copies_follow_a_model_to_other_meshes():
        """4 ranks, 3, 4 again, with new copies after each. The copies that are out of date say so."""
        four, three = DeviceMesh("cpu", [0, 1, 2, 3]), DeviceMesh("cpu", [0, 1, 2])
        if dist.get_rank() < 3:  # Rank 3 has made fewer.
            NeighbourCopies(*make(three))
        model, optimizer = make(four)
        copies = NeighbourCopies(model, optimizer)
        step(model, optimizer, 0)
        copied_after(model, optimizer, copies)
        reshard_to(model, optimizer, three)
        start = time.monotonic()
        text = error_of(copies.update)
        assert text.startswith("ValueError: the model is on DeviceMesh((3,)"), text
        assert text.endswith("make new ones after reshard_to() or recover()"), text
        assert time.monotonic() - start < 5
        if dist.get_rank() < 3:
            copied_after(model, optimizer, NeighbourCopies(model, optimizer))
        reshard_to(model, optimizer, four)
        copies = NeighbourCopies(model, optimizer)
        wanted = copied_after(model, optimizer, copies)
        step(model, optimizer, 1)
        assert same(whole(model, optimizer), wanted)
        hook = "has hooks on its gradient, and is another object after"
        for register in (torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook):
            handle = register(next(model.parameters()), lambda given: None)
            assert hook in error_of(functools.partial(reshard_to, model, optimizer, three))
            assert hook in error_of(functools.partial(copies.recover, four))
            handle.remove()
        assert copies.recover(four) == 1
        assert not same(whole(model, optimizer), wanted)

    @ranks(4)
    def test_arguments_that_differ_are_an_error_on_all_ranks():
        rank = dist.get_rank()
        model, optimizer = make(init_device_mesh("cpu", (4,)))
        for options, words in (
            ({"every": 1 + rank // 3}, "rank 0 has every=1, distance=1, rank 3 has every=2, distance=1"),
            ({"distance": 1 + rank % 2}, "rank 0 has every=1, distance=1, rank 1 has every=1, distance=2"),
        ):
            text = error_of(NeighbourCopies, model, optimizer, **options)
            assert text.startswith(f"ValueError: NeighbourCopies was called differently on different ranks: {words}"), text
        text = error_of(NeighbourCopies, model, optimizer, distance=4 if rank == 1 else 1)
        assert "expected integers, every >= 1 and a distance between 1 and 3" in text, text

    @ranks(2)
    def test_models_and_optimizers_that_differ_are_an_error_on_all_ranks():
        """Copies of two models in another order, of another dtype, with another optimizer: their shards would be mixed up."""
        rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
        model, optimizer = make(mesh)
        small = fully_shard(nn.Linear(3, 3), mesh=mesh)
        other = make(mesh)[0].to(torch.bfloat16)
        for mine in (
            (small, None) if rank else (model, optimizer),
            (other, None) if rank else (model, None),
            (model, torch.optim.SGD(model.parameters())) if rank else (model, optimizer),
        ):
            text = error_of(NeighbourCopies, *mine)
            assert text.startswith("ValueError: NeighbourCopies was called differently on different ranks: rank 0 has"), text
        NeighbourCopies(model, optimizer)  # Ranks are still in step.

    @ranks(4)
    def test_a_state_that_cannot_be_copied_is_an_error_on_all_ranks():
        """The state of one rank cannot be copied: all ranks raise, and the last copy stays."""
        mesh = init_device_mesh("cpu", (4,))
        model, optimizer = make(mesh)
        option = optimizer.param_groups[0]["note"] = CopiedBy()
        copies = NeighbourCopies(model, optimizer)
        step(model, optimizer, 0)
        copied_after(model, optimizer, copies)
        step(model, optimizer, 1)
        wanted = copied_after(model, optimizer, copies)
        option.function = refuse if dist.get_rank() == 1 else None
        start = time.monotonic()
        text = error_of(copies.update)
        assert text == ("TypeError: no copy of this" if dist.get_rank() == 1 else ""), text
        text = error_of(copies.wait)
        assert "TransferError" in text and "rank 1: TypeError: no copy of this" in text, text
        assert time.monotonic() - start < 8
        option.function = None
        for _ in range(3):
            assert "RuntimeError: a copy has failed, and its process group is not usable" in error_of(copies.update)
        assert copies.recover(mesh) == 2
        assert not same(whole(model, optimizer), wanted)

    @ranks(4)
    def test_a_missed_update_is_an_error_on_all_ranks():
        """One, two or three ranks miss it, at each distance of the copies: no copy of several steps is used."""
        rank, mesh = dist.get_rank(), init_device_mesh("cpu", (4,))
        for misses, distance in (({1}, 1), ({0, 3}, 2), ({0, 1, 2}, 3)):
            model, optimizer = make(mesh)
            copies, states = NeighbourCopies(model, optimizer, distance=distance), []
            for number in range(3):
                step(model, optimizer, number)
                states.append(copied(whole(model, optimizer)) | copied(dict(model.named_buffers())))
                if number != (1 if rank in misses else 2):
                    copies.update()
            text = error_of(copies.wait)
            assert text.startswith("TransferError: NeighbourCopies.update() failed"), text
            assert "this rank copies the state after 2 optimizer steps, and rank" in text, text
            assert "call update() after the same steps on all ranks" in text, text
            assert "a copy has failed" in error_of(copies.update)
            assert copies.recover(mesh) == 1
            assert not same(whole(model, optimizer), states[0]), (misses, same(whole(model, optimizer), states[0]))

    def test_shards_of_two_steps_are_never_joined_after_a_death(self):
        for failure, *rest in run_mortal_ranks(4, {1}, miss_an_update_and_lose_a_rank).values():
            self.assertIn("call update() after the same steps on all ranks", failure)
            self.assertEqual(rest, [1, []])

    @ranks(2)
    def test_two_objects_and_a_model_that_is_resharded_in_between_recover_the_copied_step():
        """On the same mesh, with other weights: the copy of the old layout fills the new one."""
        mesh = init_device_mesh("cpu", (2,))
        (model, optimizer), other = make(mesh), make(mesh)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        stateful = [scheduler]
        copies, others = NeighbourCopies(model, optimizer, stateful=stateful), NeighbourCopies(*other)
        stateful.clear()  # The copies have a list of their own.
        wanted = []
        for number in range(3):
            step(model, optimizer, number)
            scheduler.step()
            step(*other, number + 5)
            copies.update()
            if number == 1:
                others.update()
                wanted.append(copied(whole(*other)) | copied(dict(other[0].named_buffers())))
                reshard_to(model, optimizer, mesh, weights=[3, 1])
        wanted.append(copied(whole(model, optimizer)) | copied(dict(model.named_buffers())))
        reshard_to(model, optimizer, mesh, weights=[1, 2])
        step(model, optimizer, 3)
        scheduler.step()
        assert (others.recover(mesh), copies.recover(mesh)) == (1, 3)
        assert (scheduler.last_epoch, optimizer.param_groups[0]["lr"]) == (3, 0.1 / 8)
        assert not same(whole(*other), wanted[0])
        assert not same(whole(model, optimizer), wanted[1])

    @ranks(2)
    def test_what_cannot_be_copied_is_refused_at_once_by_name():
        mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
        model = fully_shard(nn.Linear(4, 4), mesh=mesh, offload_policy=Offload())
        text = error_of(NeighbourCopies, model, None)
        assert text.startswith("ValueError: NeighbourCopies does not support Offload("), text
        model, optimizer = make(mesh)
        for wrong, right, words in (
            ({"optimizer": 3}, {"optimizer": optimizer}, "NeighbourCopies expects a torch.optim.Optimizer"),
            ({"optimizer": None, "stateful": [3]}, {"optimizer": None}, "NeighbourCopies(stateful=) takes a list of objects"),
        ):
            text = error_of(NeighbourCopies, model, **(wrong if rank else right))
            assert text.startswith("TypeError: " if rank else "RuntimeError: NeighbourCopies failed on rank 1: TypeError"), text
            assert words in text, text
        step(model, optimizer, 0)
        text = error_of(NeighbourCopies, model[0], None)
        assert "pass the root, the outermost fully_shard module, to NeighbourCopies" in text, text

    @ranks(2)
    @soon()
    def test_a_model_that_is_not_sharded_on_one_rank_is_an_error_on_all_ranks():
        """That rank does not know which ranks to tell, and goes on with other work."""
        model, optimizer = make(init_device_mesh("cpu", (2,)))
        NeighbourCopies(model, optimizer)
        text = error_of(NeighbourCopies, nn.Linear(4, 4) if dist.get_rank() else model, optimizer)
        own = "ValueError: expected a module that torch_ragged.fsdp.fully_shard was called on"
        assert text.startswith(own if dist.get_rank() else f"PeerRaised: NeighbourCopies failed on rank 1: {own}"), text
        store = SharedStore("told")  # The rank that was wrong computes until the other one has raised.
        store.set(f"rank {dist.get_rank()}", "")
        assert store.wait(["rank 0"], 60)

    def test_delays_change_nothing(self):
        self.check_delays(range(1))

    @pytest.mark.slow
    def test_no_delays_change_anything(self):
        self.check_delays(range(50))

    def check_delays(self, seeds):
        for seed in seeds:
            for text, *rest in run_ranks(3, delayed_copies, seed):
                self.assertIn("call update() after the same steps on all ranks", text, seed)
                self.assertEqual(rest, [2, [], 2, 0.025], seed)

    def test_the_last_copy_stays_until_a_larger_one_is_complete(self):
        for failure, recovered, different in run_mortal_ranks(4, {2}, lose_a_rank_when_states_appear).values():
            self.assertIn("TransferError", failure)
            self.assertIn("rank 2 died", failure)
            self.assertEqual((recovered, different), (1, []))

    @pytest.mark.slow
    def test_a_death_while_ranks_recover_is_survived_too(self):
        for failure, *rest in run_mortal_ranks(4, {1, 3}, lose_two_ranks, seconds=6).values():
            self.assertNotEqual(failure, "")
            self.assertEqual(rest, [1, [], [0, 2]])

    def test_ranks_that_live_are_left_when_they_notice_late(self):
        for failure, left in run_mortal_ranks(4, {1}, lose_a_rank_while_others_are_busy).values():
            self.assertIn("RuntimeError", failure)
            self.assertEqual(left, [0, 2, 3])

    @ranks(3)
    def test_ranks_that_wait_in_any_group_with_a_dead_rank_get_an_error():
        """Rank 2 only seems to be dead. In a forward, rank 1 waits for rank 0 in a group that the copies do not know."""
        rank, done = dist.get_rank(), SharedStore("done")
        model, optimizer = make(init_device_mesh("cpu", (3,)))
        copies, other = NeighbourCopies(model, optimizer), dist.new_group()

        def lose_rank_2(*_):
            if rank == 1:
                assert error_of(dist.broadcast, torch.ones(1), src=0, group=other).startswith("RuntimeError")
            if rank < 2:
                assert copies.ranks_left(20) == [0, 1]
                done.set(f"rank {rank}", "")
            assert done.wait(["rank 0", "rank 1"], 60)  # The connections of rank 2 stay.
            raise KeyError("the end of this forward")

        model[2].register_forward_hook(lose_rank_2)
        fates = lambda asked: {each: SimpleNamespace(is_alive=each != 2) for each in asked}  # noqa: E731
        # No rank finds the standstill first.
        with mock.patch.object(survivors, "fates_of", fates), mock.patch.object(peers, "HELD", 1000.0):
            assert error_of(model, torch.ones(2, 6)) == "KeyError: 'the end of this forward'"
        if rank == 2:
            text = error_of(copies.ranks_left)
            assert text == "LeftBehind: rank 2 has reported too late: ranks [0, 1] have gone on without it", text

    @pytest.mark.slow
    def test_a_stopped_rank_is_waited_for_as_long_as_patience_lasts(self):
        for left, seconds in run_mortal_ranks(4, {1, 3}, lose_a_rank_and_stop_another).values():
            self.assertEqual(left, [0, 2])
            self.assertLess(seconds, 12)
