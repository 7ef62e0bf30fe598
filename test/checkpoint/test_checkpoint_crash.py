"""A power loss at any moment of a save leaves the old or the new checkpoint, complete; after the save, the new one."""

import functools
import tempfile
import unittest
from pathlib import Path

import pytest
import torch
from checkpoint_crash import Recorder, crash_states, write_state
from common import error_of
from torch import nn

from torch_ragged import checkpoint
from torch_ragged.checkpoint import _disk


def state_of(value, step):
    model = nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return checkpoint.TrainState(model, torch.optim.SGD(model.parameters()), step=step, extra={"value": value})


def in_place(path):
    checkpoint.save(path, state_of(1, 5))
    yield 1
    checkpoint.save(path, state_of(2, 5))
    yield 2


def next_step(path):
    checkpoint.save(path, state_of(1, 5))
    yield 1
    checkpoint.save(path, state_of(2, 6))
    yield 2


def first(path):
    yield None
    checkpoint.save(path, state_of(2, 6))
    yield 2


def in_the_background(path):
    checkpoint.save(path, state_of(1, 5))
    yield 1
    checkpoint.async_save(path, state_of(2, 5)).result(timeout=60)
    yield 2


def with_retention(path):
    for step in (3, 4, 5):
        checkpoint.save(path, state_of(1, step))
    yield 1
    checkpoint.save(path, state_of(2, 6))
    yield 2
    checkpoint.keep(path, 1)
    yield 2


class Killed(BaseException):
    """The process ends here; the power fails later."""


def killed_before_the_sync_of_the_new_name(path, then):
    checkpoint.save(path, state_of(1, 5))
    yield 1
    sync = _disk.sync_folder

    def die(folder):
        if Path(folder) == Path(path):
            raise Killed
        sync(folder)

    _disk.sync_folder = die
    try:
        checkpoint.save(path, state_of(2, 6 if then == "keep" else 5))
    except BaseException as error:  # DCP may wrap it.
        assert "Killed" in repr(error) or isinstance(error, (Killed, checkpoint.CheckpointError)), error
    finally:
        _disk.sync_folder = sync
    yield 2
    if then == "keep":
        checkpoint.keep(path, 1)
    else:
        checkpoint.save(path, state_of(3, 4))  # Removes what the dead writer left.
    yield 2


RUNS = {
    "in place": in_place,
    "next step": next_step,
    "first": first,
    "in the background": in_the_background,
    "with retention": with_retention,
    "killed, then keep": functools.partial(killed_before_the_sync_of_the_new_name, then="keep"),
    "killed, then saved": functools.partial(killed_before_the_sync_of_the_new_name, then="save"),
}


@functools.cache
def recorded(name):
    """The log of a run, the number of operations after each of its parts, and what is the newest value then."""
    with tempfile.TemporaryDirectory() as root:
        recorder = Recorder(root)
        with recorder.record():
            parts = [(len(recorder.log), value) for value in RUNS[name](f"{root}/a/run")]
        return recorder.log, parts


def value_in(state):
    """What loads from a disk: the value, None if there is no checkpoint, or the text of an error."""
    with tempfile.TemporaryDirectory() as root:
        write_state(state, root)
        path = Path(root) / "a" / "run"
        if checkpoint.latest(path) is None:
            return None
        loaded = state_of(0, 0)
        text = error_of(checkpoint.load, path, loaded)
        values = {value for parameter in loaded.model.parameters() for value in parameter.flatten().tolist()}
        return text or (loaded.extra["value"] if values == {loaded.extra["value"]} else f"torn: {values}")


def lost(name, without=None):
    """The crashes of a run that leave neither the old nor the new checkpoint: (operations done, what is left)."""
    log, parts = recorded(name)
    (before, old), *later = parts
    if without is not None:
        assert without >= before
        log = [operation if number != without else ("nothing", "") for number, operation in enumerate(log)]
    count = 0
    for done, state in crash_states(log, before):
        count += 1
        if without is not None and done <= without:
            continue  # As with the sync.
        # The value of the last part that is over, or of the one that runs.
        over = [value for end, value in parts if end <= done]
        running = [value for end, value in later if end > done][:1]
        legal = {over[-1] if over else old, *running}
        value = value_in(state)
        if value not in legal:
            yield done, value
    assert count > 20, count


SAVES = ("in place", "next step", "first", "in the background", "with retention")


class PowerLossTest(unittest.TestCase):
    @pytest.mark.slow
    def test_every_crash_point_of_a_save_in_place_leaves_the_old_or_the_new_checkpoint(self):
        self.assertEqual(list(lost("in place")), [])

    @pytest.mark.slow
    def test_every_crash_point_of_other_saves_leaves_the_old_or_the_new_checkpoint(self):
        for name in SAVES:
            with self.subTest(name):
                self.assertEqual(list(lost(name)), [])

    @pytest.mark.slow
    def test_without_any_one_sync_a_crash_point_loses_data(self):
        """So the tests above fail if the writer leaves out a sync."""
        for name in ("in place", "first"):
            log, parts = recorded(name)
            syncs = [n for n, operation in enumerate(log) if operation[0].startswith("sync") and n >= parts[0][0]]
            self.assertGreaterEqual(len(syncs), 5, log)  # Data, .metadata, manifest, the working folder, its parent.
            for number in syncs:
                with self.subTest(name, without=log[number]):
                    self.assertIsNotNone(next(lost(name, number), None))

    @pytest.mark.slow
    def test_a_name_that_a_dead_writer_did_not_sync_is_synced_before_the_older_ones_are_removed(self):
        for name in ("killed, then keep", "killed, then saved"):
            with self.subTest(name):
                log, parts = recorded(name)
                self.assertEqual(parts[1][1], 2)
                self.assertEqual([left for left in lost(name) if left[1] not in (1, 2)], [])
                last = parts[1][0]
                synced = next(n for n, op in enumerate(log) if n >= last and op == ("sync_folder", "a/run"))
                self.assertTrue(any(value is None for _, value in lost(name, synced)), name)
