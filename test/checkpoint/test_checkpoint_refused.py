"""A load that any rank refuses, for any reason, leaves parameters and optimizers of all ranks as they were."""

import os
import tempfile
import unittest
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
from checkpoint_forger import saved_unchecked
from checkpoint_model import make_state, train, values
from common import error_of, run_ranks

from torch_ragged import checkpoint
from torch_ragged.checkpoint import _api, _state


class Unloadable:
    """An object that pickles and does not unpickle, as one of a class that was renamed."""

    def __reduce__(self):
        return _raise, ()


def _raise():
    raise AttributeError("no such class")


def optimizer_of(state):
    """All that an optimizer holds, copied, and the identities of its states."""
    groups = [{key: value for key, value in group.items() if key != "params"} for group in state.optimizer.param_groups]
    identities = {id(p): id(states) for p, states in state.optimizer.state.items()}
    return [groups, identities, [p.grad for p in state.model.parameters()]]


def refused(path, state, *words, **kwargs):
    """Check that a load raises, and changes nothing, before and after training."""
    for steps in (0, 1):
        train(state, steps) if steps else None
        before, optimizer = values(state), optimizer_of(state)
        text = error_of(checkpoint.load, path, state, **kwargs)
        assert text.startswith("CheckpointError") and all(word in text for word in words), text
        now = values(state)
        assert now.keys() == before.keys(), now.keys() ^ before.keys()
        assert all(torch.equal(now[name], value) for name, value in before.items())
        assert optimizer_of(state) == optimizer


def fails_on_rank_1(where, name, error):
    """Have a function raise on rank 1; on others it does what it does."""
    return mock.patch.object(where, name, side_effect=error if dist.get_rank() == 1 else None, wraps=getattr(where, name))


def save_trained(path):
    state = make_state(0)
    train(state, 1)
    checkpoint.save(path, state)


def check_extra_on_one_rank(path):
    save_trained(path)
    state = make_state(1)
    state.extra = {"best": None} if dist.get_rank() == 0 else {"other": None}
    refused(path, state, "the checkpoint holds no extra.other", "(rank 1)")


def check_generator_on_one_rank(path):
    save_trained(path)
    state = make_state(1)
    state.rng = state.rng if dist.get_rank() == 0 else {**state.rng, "other": torch.Generator()}
    refused(path, state, "no state of the random generators ['other']", "(rank 1)")


def check_model_that_fails_on_one_rank(path):
    save_trained(path)
    state = make_state(1)
    with fails_on_rank_1(_state, "get_model_state_dict", KeyError("no model")):
        text = error_of(checkpoint.load, path, state)
        assert "no model" in text and not state.optimizer.state, text


def check_folder_that_rank_0_cannot_read(path):
    save_trained(path)
    with mock.patch.object(_api, "checkpoint_at", side_effect=PermissionError(13, "Permission denied", "here")):  # On rank 0.
        refused(path, make_state(1), "Permission denied: here (rank 0)")


def check_another_model(path):
    save_trained(path)
    group = dist.new_group(backend="gloo")
    for spread, process_group in ((True, None), (False, group)):  # Another model: DCP tells all ranks.
        refused(path, make_state(1, hidden=17), "model.inner.0.weight", spread=spread, process_group=process_group)


def check_states_that_cannot_be_made(path):
    """An optimizer that fails in the middle of the step that makes its states."""
    rank = dist.get_rank()
    save_trained(path)
    state = make_state(1)
    before = optimizer_of(state)
    step = state.optimizer.step

    def fail(*args, **kwargs):
        step(*args, **kwargs)
        raise RuntimeError("cannot step") if rank == 1 else KeyError("neither")

    for call in (checkpoint.load, checkpoint.save):
        with mock.patch.object(state.optimizer, "step", fail):
            text = error_of(call, path, state)
        assert "cannot step" in text and "(rank 1)" in text, text
        assert not state.optimizer.state and optimizer_of(state) == before


def check_pickles(path):
    """What cannot be unpickled is found before any parameter is filled."""
    state = make_state(0)
    train(state, 1)
    state.extra["strange"] = Unloadable() if dist.get_rank() == 1 else 1
    text = error_of(checkpoint.save, path, state)
    assert "extra.strange holds more than data: test_checkpoint_refused._raise" in text and "(rank 1)" in text, text
    assert not os.listdir(path)
    state.extra["strange"] = Unloadable()
    saved_unchecked(path, state)
    state = make_state(1)
    refused(path, state, "AttributeError: no such class", trust=True)
    refused(path, make_state(1), "holds more than data: test_checkpoint_refused._raise", "pass trust=True")


def check_errors_of_the_caller(path):
    """An error in a load_state_dict of the caller, or of a generator, is raised on every rank, and says where it came from."""
    state = make_state(0)
    checkpoint.save(path, state)
    state = make_state(1)
    with fails_on_rank_1(state.scheduler, "load_state_dict", KeyError("gone")):
        text = error_of(checkpoint.load, path, state)
    assert "scheduler.load_state_dict raised KeyError: 'gone' (rank 1)" in text, text
    with fails_on_rank_1(_state, "set_rng", RuntimeError("another generator")):
        text = error_of(checkpoint.load, path, state)
    assert "another generator (rank 1)" in text, text


def check_arguments(path):
    """What is no TrainState, and a checkpoint that lacks what the TrainState has."""
    state = make_state(0)
    for call in (checkpoint.save, checkpoint.load, partial(checkpoint.async_save, process_group=dist.group.WORLD)):
        text = error_of(call, path, {"model": state.model} if dist.get_rank() == 1 else state)
        start = "TypeError: " if dist.get_rank() == 1 else "CheckpointError: "
        assert text.startswith(start) and "expected a TrainState, got dict: pass checkpoint.TrainState(" in text, text
        assert os.listdir(path) == []
        # Such as what latest() returns on a rank that does not see the folder.
        text = error_of(call, None if dist.get_rank() == 1 else path, state)
        assert text.startswith(start) and "path must be a str or a path, got None: checkpoint.latest" in text, text
        assert os.listdir(path) == []
    kind = "fork" if dist.get_rank() == 1 else "thread"
    text = error_of(checkpoint.async_save, path, state, kind=kind, process_group=dist.group.WORLD)
    assert "async_save kind must be one of ['process', 'thread'], got 'fork'" in text, text
    assert os.listdir(path) == []
    checkpoint.save(path, checkpoint.TrainState(state.model, step=3))
    other = make_state(1)
    before = [param.full_tensor() for param in other.model.parameters()]
    other = checkpoint.TrainState(other.model, other.optimizer)
    text = error_of(checkpoint.load, path, other)
    assert "the checkpoint holds no optimizer, and TrainState has one" in text and "(rank 0, 1)" in text, text
    assert all(torch.equal(param.full_tensor(), old) for param, old in zip(other.model.parameters(), before, strict=True))
    checkpoint.load(path, checkpoint.TrainState(other.model))  # What the error says.
    assert all(map(torch.equal, map(full, other.model.parameters()), map(full, state.model.parameters())))


def full(param):
    return param.full_tensor()


class RefusedTest(unittest.TestCase):
    def run_check(self, check):
        with tempfile.TemporaryDirectory() as path:
            run_ranks(2, check, path)

    def test_a_load_that_one_rank_refuses_changes_nothing_on_any(self):
        for check in (
            check_extra_on_one_rank,
            check_generator_on_one_rank,
            check_model_that_fails_on_one_rank,
            check_folder_that_rank_0_cannot_read,
            check_another_model,
        ):
            with self.subTest(check.__name__):
                self.run_check(check)

    def test_states_that_cannot_be_made_leave_the_optimizer_as_it_was(self):
        self.run_check(check_states_that_cannot_be_made)

    def test_what_is_no_train_state_and_an_optimizer_that_was_not_saved_are_named(self):
        self.run_check(check_arguments)

    def test_what_cannot_be_unpickled_is_found_before_anything_is_filled(self):
        self.run_check(check_pickles)

    def test_errors_of_the_caller_are_raised_on_every_rank(self):
        self.run_check(check_errors_of_the_caller)
