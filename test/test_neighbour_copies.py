"""NeighbourCopies: after the death of a rank, the others go on with the last copy, bit by bit."""

import os
import signal
import unittest

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import error_of, run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torch_ragged.fsdp import NeighbourCopies, fully_shard, rows
from torch_ragged.optim import AdamW8bit


def make(mesh, optimizer="adamw"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Tanh(), nn.Linear(10, 5))
    for layer in (model[0], model[3]):
        fully_shard(layer, mesh=mesh, orig_param_policy=lambda fqn, param: rows(2))
    fully_shard(model, mesh=mesh)
    kinds = {"adamw": torch.optim.AdamW, "adamw8bit": AdamW8bit}
    return model, kinds[optimizer](model.parameters(), lr=0.1)


def step(model, optimizer, number):
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    model(torch.randn(8, 6, generator=generator)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


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


def train_and_die(rank, port, victims, kind, pipe):
    """A process of its own: trains 3 steps with copies, loses ranks in the fourth, recovers and trains on."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
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
    left = copies.ranks_left(3)
    mesh = DeviceMesh.from_group(dist.new_group(left, use_local_synchronization=True), "cpu")
    lost = error_of(copies.recover, mesh)
    if lost:
        pipe.send((failure, lost, None, None))
        pipe.recv()
        os._exit(0)
    different = same(whole(model, optimizer), states[-1]) or optimizer.param_groups[0]["lr"] != 0.025
    step(model, optimizer, 3)
    copies = NeighbourCopies(model, optimizer)
    copies.update()
    copies.wait()
    step(model, optimizer, 4)
    after = sum(value.double().sum().item() for value in whole(model, optimizer).values() if isinstance(value, torch.Tensor))
    pipe.send((failure, "", different, after))
    pipe.recv()
    os._exit(0)


def check_update():
    mesh = init_device_mesh("cpu", (2, 2))
    assert "a 1-D mesh of at least 2 ranks" in error_of(NeighbourCopies, *make(mesh))
    flat = init_device_mesh("cpu", (4,))
    model, optimizer = make(flat)
    for options in ({"every": 0}, {"distance": 0}, {"distance": 4}):
        assert "expected every >= 1 and a distance between 1 and 3" in error_of(NeighbourCopies, model, optimizer, **options)
    copies = NeighbourCopies(model, optimizer, every=2, distance=3)
    assert "no complete copy" in error_of(copies.recover, flat)
    for number in range(4):
        step(model, optimizer, number)
        copies.update()
        if number == 1:
            wanted = copied(whole(model, optimizer))
    # Of all ranks, two generations of two copies; each tensor starts at a multiple of 16 bytes.
    moments = [value for param in model.parameters() for value in optimizer.state[param].values() if value.numel() > 1]
    held = sum(-(-tensor.to_local().nbytes // 16) * 16 for tensor in (*model.parameters(), *moments))
    total = torch.tensor([held, copies.nbytes])
    dist.all_reduce(total)
    assert int(total[1]) == 4 * int(total[0]), total
    copies.wait()
    third = copied(whole(model, optimizer))
    for each in copies._generations:  # As if a rank had died before the last copy was complete.
        if each.step == 4 and dist.get_rank() == 1:
            each.step = -1
    assert copies.recover(flat) == 2
    buffers = [name for name, _ in model.named_buffers()]
    got = whole(model, optimizer)
    assert not [name for name in same(got, wanted) if name not in buffers], same(got, wanted)
    assert same(got, third)


class NeighbourCopiesTest(unittest.TestCase):
    def run_world(self, victims, kind):
        context = mp.get_context("spawn")
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        pipes = [context.Pipe() for _ in range(4)]
        for rank, (_, theirs) in enumerate(pipes):
            context.Process(target=train_and_die, args=(rank, store.port, victims, kind, theirs), daemon=True).start()
        left = [ours for rank, (ours, _) in enumerate(pipes) if rank not in victims]
        answers = []
        for pipe in left:
            self.assertTrue(pipe.poll(100), "a rank hangs")
            answers.append(pipe.recv())
        for pipe in left:
            pipe.send("end")
        return answers

    def test_the_ranks_that_are_left_go_on_with_the_last_copy(self):
        self.check_one_death("adamw")

    @pytest.mark.slow
    def test_the_states_of_other_optimizers_are_copied_too(self):
        self.check_one_death("adamw8bit")

    def check_one_death(self, kind):
        for failure, lost, different, _ in self.run_world((2,), kind):
            self.assertIn("PeerError", failure)
            self.assertEqual((lost, different), ("", False))

    @pytest.mark.slow
    def test_a_rank_that_dies_with_its_copy_is_an_error(self):
        for _, lost, *_ in self.run_world((1, 2), "adamw"):
            self.assertEqual(lost, "RuntimeError: recover(): rank 1 with its copy on rank 2 are gone: load a checkpoint")

    def test_copies_take_the_memory_that_is_said_and_incomplete_ones_are_not_used(self):
        run_ranks(4, check_update)


if __name__ == "__main__":
    unittest.main()
