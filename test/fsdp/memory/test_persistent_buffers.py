"""Persistent buffers: addresses that stay, memory that is bounded, turns that are kept."""

import unittest
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from common import error_of, ranks, run_ranks
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate

from torch_ragged.fsdp import ZERO2, BufferLayout, DBuffer, Float8Policy, TensorSpec, _fsdp_module, fully_shard
from torch_ragged.fsdp.memory._persistent_buffers import Slot, SlotRing, allocator

MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class RingTest(unittest.TestCase):
    def setUp(self):
        self.allocated: list[int] = []

        def allocate(numel: int, dtype: torch.dtype) -> torch.Tensor:
            self.allocated.append(numel)
            return torch.empty(numel, dtype=dtype)

        self.ring = SlotRing("things", 2, allocate)

    def test_members_take_turns_in_slabs_as_large_as_the_largest_of_them(self):
        places = [self.ring.join(1)[0] for _ in range(5)]
        alone = self.ring.apart(1)[0]
        self.assertEqual([places.index(place) for place in places], [0, 1, 0, 1, 0])
        self.assertNotIn(alone, places)
        for place, numel in zip((*places, alone), (10, 5, 30, 7, 20, 3), strict=True):
            place.reserve(torch.float32, numel)
        slabs = [place.slab(torch.float32, 1) for place in (*places, alone)]
        self.assertEqual(self.allocated, [30, 7, 3])
        self.assertIs(slabs[0], slabs[2])
        self.assertEqual(places[0].slab(torch.float32, 31).flat.numel(), 31)  # Larger than was reserved: a new one.

    def test_groups_of_one_member_do_not_share(self):
        first, second = self.ring.join(2), self.ring.join(1)
        third = self.ring.join(3)
        self.assertEqual(third[:2], first)
        self.assertEqual(len({*first, *second, *third}), 4)

    def test_one_holder_at_a_time(self):
        (slot,), (again,) = self.ring.join(1), self.ring.apart(1)
        form = 4, torch.float32, torch.device("cpu"), False
        one = slot.memory(*form)
        one.allocate()
        self.assertRegex(
            error_of(slot.memory, *form), "RuntimeError: slot 0 of 2 for things of .* is in use .*set_persistent_buffers"
        )
        again.memory(*form).free()
        self.assertTrue(one.is_allocated)
        one.free()
        other = slot.memory(*form)
        self.assertFalse(one.is_allocated or one.is_free)
        del other
        one.allocate()  # A holder that was deleted holds nothing.


def buffer(slot: Slot) -> DBuffer:
    layout = BufferLayout((TensorSpec("weight", (40,), (), 1),), (0,), 10, 4, 1, 0, "", "")
    return DBuffer(layout, Replicate(), 0, torch.float32, torch.device("cpu"), pool=slot)


class SlotTest(unittest.TestCase):
    def setUp(self):
        self.made = []

    def allocate(self, numel, dtype):
        self.made.append((numel, dtype))
        return torch.zeros(numel, dtype=dtype)

    def test_one_buffer_at_a_time_uses_a_slot(self):
        slot = Slot("gathered parameters", self.allocate)
        slot.reserve(torch.float32, 50)
        slot.reserve(torch.float32, 40)
        one = buffer(slot)
        self.assertEqual(self.made, [(50, torch.float32)])
        self.assertTrue(one.is_allocated and one.memory.is_free)
        text = error_of(buffer, slot)
        self.assertIn("gathered parameters of torch.float32 is in use by another group", text)
        one.free()
        two = buffer(slot)
        self.assertEqual(two.flat.data_ptr(), one.flat.data_ptr())
        self.assertFalse(one.is_allocated or one.memory.is_free)
        one.free()  # It has none: the slot stays the other's.
        self.assertTrue(two.is_allocated)
        self.assertIn("is in use by another group", error_of(one.allocate))
        two.free()
        one.allocate()
        self.assertEqual((one.is_allocated, two.is_allocated, two.memory.is_free), (True, False, False))
        self.assertEqual(self.made, [(50, torch.float32)])

    def test_a_slab_that_is_too_small_is_replaced(self):
        slot = Slot("gradients", self.allocate)
        first = slot.slab(torch.float32, 10)
        self.assertIs(slot.slab(torch.float32, 10), first)
        self.assertIs(slot.slab(torch.float32, 4), first)
        self.assertEqual(slot.slab(torch.float32, 11).flat.numel(), 11)
        slot.slab(torch.bfloat16, 3)
        self.assertEqual(self.made, [(10, torch.float32), (11, torch.float32), (3, torch.bfloat16)])


class Blocks(nn.Module):
    def __init__(self, blocks: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(20, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 300 + i), nn.GELU(), nn.Linear(300 + i, 16)) for i in range(blocks)
        )
        self.head = nn.Linear(16, 20)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def shard(model: Blocks, **options) -> Blocks:
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


def step(model: Blocks) -> torch.Tensor:
    loss = model(torch.arange(20)).float().logsumexp(1).mean()
    loss.backward()
    return loss.detach()


def turns_not_kept() -> list[str]:
    model = shard(Blocks())
    model.set_persistent_buffers(places=2)
    for block in (model.blocks[0], model.blocks[1]):
        block.unshard()
    errors = [error_of(model.blocks[2].unshard)]
    model.reset_iter_state()
    model.set_requires_gradient_sync(False)
    errors.append(error_of(step, model))
    model.reset_iter_state()
    model.set_persistent_buffers(places=6)
    step(model)
    model.set_requires_gradient_sync(True)
    step(model)
    model.zero_grad()
    meta = Blocks()
    with torch.device("meta"):
        meta = Blocks()
    errors.append(error_of(shard(meta).set_persistent_buffers))
    return errors


class Interleaved(nn.Module):
    """Two lists of layers, used by turns: not in the order in which they are registered."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.ModuleList(nn.Linear(16, 16) for _ in range(3)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for pair in zip(self.first, self.second, strict=True):
            for layer in pair:
                x = torch.tanh(layer(x))
        return x


def gradients_of_interleaved(policy: MixedPrecisionPolicy, persistent: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Interleaved()
    for layer in (*model.first, *model.second):
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    if persistent:
        model.set_persistent_buffers(places=3)
        model.first[1].set_modules_to_forward_prefetch([model.first[0], model.second[0]])  # They share a place.
        with torch.no_grad():  # Neighbours do, too.
            for _ in range(3):
                model(torch.ones(2, 16))
        model.first[1].set_modules_to_forward_prefetch([model.second[1]])
        model.set_persistent_buffers(places=4)
    for _ in range(3):
        model.zero_grad()
        model(torch.ones(2, 16)).sum().backward()
    return [param.grad.to_local().clone() for param in model.parameters()]


def pending_and_kept() -> list[str]:
    """What is chosen while gradients wait is an error that changes nothing; kept storage and converted ZeRO-2 models go on."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    model.set_requires_gradient_sync(False)
    model(torch.ones(2, 8)).sum().backward()
    errors = [error_of(model[0].set_allocate_memory_from_process_group_for_comm, True), error_of(model.set_persistent_buffers)]
    model.set_requires_gradient_sync(True)
    model(torch.ones(2, 8)).sum().backward()
    twice = model[0].weight.grad.to_local().clone()
    model.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    assert torch.equal(twice, 2 * model[0].weight.grad.to_local())
    model.set_keep_unsharded_storage(True)
    model.set_persistent_buffers()
    model(torch.ones(2, 8)).sum().backward()
    zero2 = fully_shard(nn.Linear(8, 8), placements=ZERO2, mp_policy=MIXED)
    zero2.set_persistent_buffers()
    zero2(torch.ones(2, 8)).sum().backward()
    zero2.zero_grad()
    zero2.to(torch.float64)
    assert zero2(torch.ones(2, 8)).sum().isfinite()
    return errors


class PersistentBuffersTest(unittest.TestCase):
    @ranks(2)
    def test_another_order_of_use_gives_the_same_gradients():
        """Slots are assigned in the order of modules; in another order, no all-gather is issued ahead into a slot in use."""
        for policy in (MIXED, Float8Policy(torch.bfloat16, torch.float32)):
            found = [gradients_of_interleaved(policy, persistent) for persistent in (False, True)]
            assert all(torch.equal(one, other) for one, other in zip(*found)), policy

    def test_gradients_that_wait_are_not_lost(self):
        for errors in run_ranks(2, pending_and_kept):
            for error in errors:
                self.assertRegex(error, "^RuntimeError: .*gradients.* not in .grad yet.*between steps")

    @pytest.mark.slow
    @ranks(2)
    def test_what_stays_gathered_has_memory_of_its_own():
        """What stays gathered for a step (ZeRO-2, or not resharded after forward) has places of its own."""
        losses = []
        for options in ({"placements": ZERO2}, {"reshard_after_forward": False}):
            for persistent in (False, True):
                model = shard(Blocks(), **options)
                if persistent:
                    model.set_persistent_buffers(places=2)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                for _ in range(3):
                    losses.append(step(model))
                    optimizer.step()
                    optimizer.zero_grad()
        assert torch.equal(torch.stack(losses[:3]), torch.stack(losses[3:6])), losses
        assert losses[:3] == losses[6:9] == losses[9:], losses
        addresses = {group.encoding.buffer.flat.data_ptr() for group in model._ragged_groups(recurse=True)}
        assert len(addresses) == 7, addresses

    @ranks(2)
    def test_addresses_stay_over_steps():
        model, made = shard(Blocks(), mp_policy=MIXED), []

        def counted(device: torch.device) -> Callable[..., torch.Tensor]:
            allocate = allocator(device)
            return lambda numel, dtype: made.append(dtype) or allocate(numel, dtype)

        with mock.patch.object(_fsdp_module, "allocator", counted):
            model.set_persistent_buffers(places=2)
        groups = [group for group in model._ragged_groups(recurse=True)]
        seen: list[list[int]] = []
        for _ in range(3):
            step(model)
            found = [group.encoding.buffer.flat.data_ptr() for group in groups]
            found += [buffer.flat.data_ptr() for group in groups for buffer in group.buffers()["gradients"]]
            seen.append(found)
            model.zero_grad()
        assert seen[0] == seen[1] == seen[2]
        # Two slots and the root's, as large as the largest of their groups: gathered, unreduced, in the reduce dtype.
        assert sorted(map(str, made)) == ["torch.bfloat16"] * 6 + ["torch.float32"] * 3, made
        root, *blocks = groups
        gathered = [group.encoding.buffer.flat.data_ptr() for group in blocks]
        assert gathered[0::2] == gathered[:1] * 3 and gathered[1::2] == gathered[1:2] * 3, gathered
        assert root.encoding.buffer.flat.data_ptr() not in gathered
        assert all(buffer.resident_nbytes == 0 for group in groups for buffer in group.buffers()["gathered"])
        model.set_persistent_buffers(False)
        step(model)
        assert len({group.encoding.buffer.flat.untyped_storage().nbytes() for group in blocks}) == 1  # Every slot is as large.

    @pytest.mark.slow
    @ranks(2)
    def test_a_conversion_makes_new_buffers_and_trains_on():
        """``model.to(dtype)`` makes new slabs; training goes on with the bits of one that has none."""
        losses = []
        for persistent in (False, True):
            model = shard(Blocks())
            if persistent:
                model.set_persistent_buffers()
            found = [step(model)]
            model.zero_grad()
            model.to(torch.bfloat16)
            found.append(step(model))
            losses.append(torch.stack([loss.float() for loss in found]))
        assert torch.equal(*losses), losses

    @ranks(2)
    def test_groups_of_several_dtypes_train_as_without():
        """Groups of one module, by dtype, have places of their own; results are those without."""
        losses = []
        for persistent in (False, True):
            model = Blocks(3)
            for block in model.blocks:
                block[2].double()
                block.forward = lambda x, block=block: block[2](block[1](block[0](x)).double()).float()
            shard(model)
            if persistent:
                model.set_persistent_buffers(places=2)
            for _ in range(2):
                losses.append(step(model))
                model.zero_grad()
        assert torch.equal(torch.stack(losses[:2]), torch.stack(losses[2:])), losses

    def test_turns_that_are_not_kept_are_told(self):
        for gathered, gradients, meta in run_ranks(2, turns_not_kept):
            self.assertRegex(gathered, "RuntimeError: slot 0 of 2 for gathered parameters .*set_persistent_buffers")
            self.assertRegex(gradients, "RuntimeError: slot . of 2 for gradients .*set_persistent_buffers")
            self.assertRegex(meta, "RuntimeError: .* on the meta device")
