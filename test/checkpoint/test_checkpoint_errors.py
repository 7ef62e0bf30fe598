"""What errors of checkpoints say: what to load instead of a damaged one, and what differs in a list that is short."""

import tempfile
import traceback
import unittest
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from checkpoint_model import make_state, train
from common import error_of, ranks, run_ranks
from soon import soon
from torch import nn

from torch_ragged import checkpoint
from torch_ragged._ranks.store import SharedStore
from torch_ragged.fsdp import fully_shard


def damage(file):
    """Flip one bit of a file, on rank 0."""
    if dist.get_rank() == 0:
        content = bytearray(file.read_bytes())
        content[len(content) // 3] ^= 1 << 3
        file.write_bytes(content)
    dist.barrier()


def check_damaged(path):
    path, state = Path(path), make_state(0)
    for _ in range(4):
        train(state, 1)
        checkpoint.save(path, state)
    steps = {step: path / f"step-{step:08d}" for step in (1, 2, 3, 4)}
    told = f"The newest complete checkpoint is {steps[2]}: load({str(steps[2])!r}, state) loads it"
    damage(steps[4] / "__1_0.distcp")
    damage(steps[3] / "__0_0.distcp")
    text = error_of(checkpoint.load, path, make_state(1))
    assert text.startswith("CheckpointError: ") and "__1_0.distcp is damaged" in text and told in text, text
    assert checkpoint.latest(path) == steps[4] and checkpoint.latest(path, complete=True) == steps[2]
    assert told not in error_of(checkpoint.load, steps[4], make_state(1))  # That one, and no other, was asked for.
    damage(steps[4] / ".metadata")
    text = error_of(checkpoint.load, path, make_state(1))
    assert ".metadata is damaged" in text and told in text, text
    fresh = make_state(1)
    checkpoint.load(checkpoint.latest(path, complete=True) if dist.get_rank() == 0 else path, fresh)
    assert fresh.step == 2
    damage(steps[4] / "chunks.json")
    text = error_of(checkpoint.load, path, make_state(1, hidden=17))
    assert told in text, text  # The list of its chunks is damaged, too.
    damage(steps[1] / "__0_0.distcp")
    damage(steps[2] / "__0_0.distcp")
    text = error_of(checkpoint.load, path, make_state(1))
    assert f"{path} holds no other complete checkpoint" in text, text
    assert checkpoint.latest(path, complete=True) is None


@soon()
def check_one_rank_without_a_group(path):
    """It does not know which ranks wait for it, and goes on with other work."""
    group, store, rank = dist.new_group(backend="gloo"), SharedStore("told"), dist.get_rank()
    state = make_state(0)
    checkpoint.async_save(path, state, process_group=group).result(timeout=100)
    text = error_of(checkpoint.async_save, path, state, process_group=None if rank == 1 else group)
    own = "ValueError: async_save got no process_group"
    assert text.startswith(own if rank == 1 else f"PeerRaised: async_save failed on rank 1: {own}"), text
    store.set(f"rank {rank}", "")
    assert store.wait([f"rank {each}" for each in range(dist.get_world_size())], 60)


def check_another_model(path):
    state = make_state(0)
    train(state, 1)
    checkpoint.save(path, state)
    text = error_of(checkpoint.load, path, make_state(1, hidden=17))
    assert "newest" not in text and "(13, 6) float32 in the checkpoint, (17, 6) float32 here" in text, text
    try:
        checkpoint.load(path, make_state(1, hidden=17))
    except checkpoint.CheckpointError:
        printed = traceback.format_exc()
    lists = printed.count("inner.0.weight is ")
    assert lists == 1, printed
    last = printed[printed.index("CheckpointError: loading") :].strip()
    if dist.get_rank() == 0:
        assert "... and " in last and "inner.0.bias is " in last, last
    else:
        assert "\n" not in last and last.endswith("and more: the error of rank 0 lists them"), last


def check_another_optimizer(path):
    state = make_state(0)
    train(state, 1)
    checkpoint.save(path, state)
    told = "the optimizer has the states exp_avg, exp_avg_sq, step in the checkpoint, and {} here: is it another class"
    for optimizer, states in (
        (torch.optim.RMSprop, "the states square_avg, step"),
        (torch.optim.SGD, "no states"),
        (lambda params, lr: torch.optim.SGD(params, lr, momentum=0.9), "no states"),
        (
            lambda params, lr: torch.optim.AdamW(params, lr, amsgrad=True),
            "the states exp_avg, exp_avg_sq, max_exp_avg_sq, step",
        ),
    ):
        text = error_of(checkpoint.load, path, make_state(1, optimizer=optimizer))
        assert text.startswith("CheckpointError: ") and told.format(states) in text, (states, text)
        assert "load(path, TrainState(model)) loads the model alone" in text and "was it renamed" not in text, text
    fresh = make_state(1)
    assert checkpoint.load(path, checkpoint.TrainState(fresh.model)).step == 1


class ErrorsTest(unittest.TestCase):
    def in_a_folder(self, check):
        with tempfile.TemporaryDirectory() as path:
            run_ranks(2, check, path)

    def test_a_damaged_latest_checkpoint_names_the_newest_complete_one(self):
        self.in_a_folder(check_damaged)

    def test_a_background_save_without_a_group_on_one_rank_is_an_error_on_all_ranks(self):
        self.in_a_folder(check_one_rank_without_a_group)

    def test_other_shapes_are_listed_once_on_rank_0(self):
        self.in_a_folder(check_another_model)

    def test_another_optimizer_is_named_as_such(self):
        self.in_a_folder(check_another_optimizer)

    def test_a_newer_checkpoint_with_a_truncated_file_is_told(self):
        with tempfile.TemporaryDirectory() as path:
            state = checkpoint.TrainState(nn.Linear(2, 2))
            for state.step in (1, 2):
                checkpoint.save(path, state)
            (Path(path) / "step-00000002" / "__0_0.distcp").write_bytes(b"short")
            with self.assertLogs("torch_ragged.checkpoint", "WARNING") as logs:
                self.assertEqual(checkpoint.load(path, state).step, 1)
            self.assertIn("step-00000002 is damaged: a file of it is missing or truncated", logs.output[0])

    @ranks(2)
    def test_a_save_during_accumulation_warns_of_no_step():
        with tempfile.TemporaryDirectory() as path, warnings.catch_warnings():
            warnings.simplefilter("error")
            paths = [path, None]
            dist.broadcast_object_list(paths, 0)
            model = fully_shard(nn.Linear(4, 4))
            optimizer = torch.optim.AdamW(model.parameters())
            model.set_requires_gradient_sync(False)
            model(torch.ones(2, 4)).sum().backward()
            checkpoint.save(paths[0], checkpoint.TrainState(model, optimizer))
            model.set_requires_gradient_sync(True)
            model(torch.ones(2, 4)).sum().backward()
            assert torch.equal(model.weight.grad.full_tensor(), torch.full((4, 4), 4.0))
            dist.barrier()


if __name__ == "__main__":
    unittest.main()
