"""torch_ragged.checkpoint: resumes to the bit, is complete or invisible, and says what is wrong before it changes anything."""

import contextlib
import errno
import io
import json
import os
import random
import resource
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_model import Model, make_state, train, values
from common import error_of, run_ranks
from torch.distributed.tensor.debug import CommDebugMode

from torch_ragged import RaggedShard, StridedRaggedShard, checkpoint
from torch_ragged.checkpoint import _cli, _files
from torch_ragged.checkpoint._manifest import TensorRecord, _checksum
from torch_ragged.tensor._placement_text import placement_text


def assert_same(got, want):
    assert got.keys() == want.keys(), got.keys() ^ want.keys()
    for name, value in want.items():
        assert torch.equal(got[name], value), name


def run_whole(path, dropout):
    """Train, with a checkpoint in the middle; what came after it is what a resume must give."""
    state = make_state(0, dropout=dropout)
    train(state, 3)
    with CommDebugMode() as mode:
        folder = checkpoint.save(path, state)
    assert not any("reduce" in str(op) or "all_to_all" in str(op) for op in mode.get_comm_counts()), mode.get_comm_counts()
    saved = values(state)
    return str(folder), saved, train(state, 3), values(state)


def resume(path, dropout):
    state = make_state(1, dropout=dropout)
    manifest = checkpoint.load(path, state)
    assert (manifest.step, state.step, state.extra) == (3, 3, {"best": state.extra["best"]}) and state.extra["best"] is not None
    assert state.model.unused not in state.optimizer.state  # It never had a gradient, and has no state now either.
    loaded = values(state)
    train_before = torch.get_rng_state()
    losses = train(state, 3)
    return loaded, losses, values(state), train_before


def resume_running(path, default_device="cpu"):
    """Load into a run that has trained: its own states and gradients are replaced."""
    state = make_state(2)
    train(state, 2)
    state.model(torch.arange(4)).sum().backward()
    with torch.device(default_device):
        checkpoint.load(path, state)
    return values(state)


def saved_once(path):
    """A run that has saved a checkpoint and trained on."""
    state = make_state(0)
    train(state, 1)
    first = checkpoint.save(path, state)
    train(state, 1)
    return state, first


def assert_failed(path, first, text, *words):
    """The error is one on every rank, and nothing is left of the checkpoint."""
    assert text.startswith("CheckpointError") and all(word in text for word in words), text
    assert sorted(os.listdir(path)) == [first.name] and checkpoint.latest(path) == first, os.listdir(path)
    dist.barrier()


def assert_saves_again(path, state):
    second = checkpoint.save(path, state, read_back=True)
    assert checkpoint.latest(path) == second


class Bad:
    """An extra that has no state on rank 1."""

    def state_dict(self):
        raise KeyError("no such thing") if dist.get_rank() == 1 else None
        return {}

    def load_state_dict(self, state):
        pass


def check_save_of_a_bad_extra(path):
    state, first = saved_once(path)
    state.extra["bad"] = Bad()
    assert_failed(path, first, error_of(checkpoint.save, path, state), "no such thing", "rank 1")
    del state.extra["bad"]
    assert_saves_again(path, state)


def check_save_to_a_full_disk(path):
    state, first = saved_once(path)
    write = _files._HashingFile.write

    def full(self, data):
        if self.nbytes > 3000:
            raise OSError(errno.ENOSPC, "No space left on device", str(self.path))
        return write(self, data)

    for bad_rank, name in ((1, "__1_0.distcp"), (0, "__0_0.distcp")):
        with mock.patch.object(_files._HashingFile, "write", full if dist.get_rank() == bad_rank else write):
            text = error_of(checkpoint.save, path, state)
        assert_failed(path, first, text, "No space left on device", name, f"rank {bad_rank}")
    assert_saves_again(path, state)


def check_save_of_too_large_a_file(path):
    """As a full disk: the kernel takes a part, then refuses."""
    state, first = saved_once(path)
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, old[1]))
    try:
        text = error_of(checkpoint.save, path, state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert_failed(path, first, text, "File too large", "__1_0.distcp", "rank 1")
    assert_saves_again(path, state)


def check_save_that_reads_back_other_bytes(path):
    """What is on the disk is not what was written."""
    state, first = saved_once(path)
    write = _files._HashingFile.write

    def flip(self, data):
        content = bytearray(data)
        content[0] ^= dist.get_rank() == 1
        count = write(self, data)
        self.raw.seek(-len(content), os.SEEK_CUR)
        return self.raw.write(content) and count

    with mock.patch.object(_files._HashingFile, "write", flip):
        text = error_of(checkpoint.save, path, state, read_back=True)
    assert_failed(path, first, text, "reads back other bytes", "__1_0.distcp", "rank 1")
    assert_saves_again(path, state)


def check_refused(path, words, kwargs=None, make=None):
    """Loading raises on every rank, names what is wrong, and leaves model and optimizer as they were."""
    state = make() if make else make_state(3, **(kwargs or {}))
    fresh = values(state)
    text = error_of(checkpoint.load, path, state)
    assert text.startswith("CheckpointError") and all(word in text for word in words), (words, text)
    assert_same(values(state), fresh)
    assert not state.optimizer.state
    train(state, 1)  # One that has trained keeps its states.
    trained = values(state)
    assert error_of(checkpoint.load, path, state).startswith("CheckpointError")
    assert_same(values(state), trained)


def renamed():
    model = Model()
    model.specialists = torch.nn.Parameter(model.experts.detach().clone())
    del model.experts
    return make_state(3, model=model)


def check_all_refused(path, cases):
    for folder, words, kwargs in cases:
        if kwargs == "renamed":
            model = Model()
            model.inner[3] = torch.nn.Sequential(model.inner[3])
            state = make_state(3, model=model)
            text = error_of(checkpoint.load, folder, state)
            assert all(word in text for word in words), text
        else:
            check_refused(folder, words, kwargs)


def damaged_copies(folder, into):
    """Copies of a checkpoint with something wrong, and what the error must say."""
    cases = []

    def copy(name):
        target = Path(into) / name
        target.mkdir()
        for file in Path(folder).iterdir():
            (target / file.name).write_bytes(file.read_bytes())
        return target

    for name in sorted(file.name for file in Path(folder).iterdir()):
        missing, short, flipped = (copy(f"{kind}-{name.strip('.')}") for kind in ("missing", "short", "flipped"))
        (missing / name).unlink()
        content = bytearray((short / name).read_bytes())
        (short / name).write_bytes(content[: len(content) // 2])
        content[len(content) // 3] ^= 1 << 3
        (flipped / name).write_bytes(content)
        cases += [(str(missing), [name], {}), (str(short), [name], {}), (str(flipped), [name, "damaged"], {})]
    newer = copy("newer")
    document = json.loads((newer / "manifest.json").read_text())
    document["manifest"] |= {"format": 99, "package_version": "7.0", "something": "new"}
    document["crc32"] = _checksum(document["manifest"])
    (newer / "manifest.json").write_text(json.dumps(document))
    cases.append((str(newer), ["format 99", "torch_ragged 7.0", "install a newer torch_ragged"], {}))
    wrong = ["model.inner.0.weight is (13, 6) float32 in the checkpoint, (17, 6) float32 here"]
    cases.append((str(folder), wrong, {"hidden": 17}))
    cases.append(
        (
            str(folder),
            ["exp_avg_sq, step in the checkpoint, and the states square_avg, step"],
            {"optimizer": torch.optim.RMSprop},
        )
    )
    cases.append((str(folder), ["model.inner.3.0.weight", "model.inner.3.weight", "renamed"], "renamed"))
    plain = Path(into) / "plain"
    dcp.save({"x": torch.ones(2)}, checkpoint_id=plain, no_dist=True)
    cases.append((str(plain), ["plain", "torch.distributed.checkpoint.load"], {}))
    cases.append((str(Path(into) / "nothing"), ["nothing", "no folder"], {}))
    return cases


def check_fresh_optimizer(path):
    """A run that has not stepped yet: saving it does not step its optimizer, resuming starts at step one."""
    state = make_state(0)
    checkpoint.save(path, state)
    assert not state.optimizer.state
    losses = train(state, 2)
    other = make_state(1)
    checkpoint.load(path, other)
    assert not other.optimizer.state and torch.equal(train(other, 2), losses)


def check_model_alone(path):
    """A state without optimizer loads the model alone; what a state has and the checkpoint has not is named."""
    checkpoint.save(path, make_state(0))
    other, without = make_state(1), make_state(2)
    without.optimizer = without.scheduler = None
    checkpoint.load(path, without)
    folder = checkpoint.save(path + "/model", without)
    assert "the checkpoint holds no optimizer, and TrainState has one" in error_of(checkpoint.load, folder, other)
    optimizer, other.optimizer = other.optimizer, None
    assert "the checkpoint holds no scheduler" in error_of(checkpoint.load, folder, other)
    other.optimizer, other.scheduler = optimizer, None
    assert "the checkpoint holds no optimizer" in error_of(checkpoint.load, folder, other)


def check_extra(path):
    """Tensors are loaded in place, what has a state dict gets it, values are replaced."""
    state = make_state(0)
    average = {name: p.detach().clone() for name, p in state.model.named_parameters()}
    other_schedule = torch.optim.lr_scheduler.LambdaLR(state.optimizer, lambda step: 0.5**step)
    state.extra |= {"average": average["experts"], "schedule": other_schedule, "notes": {"tags": ["a"], 3: (1, 2)}}
    other_schedule.step()
    checkpoint.save(path, state)
    fresh = make_state(1)
    mine = fresh.model.experts.detach().clone()
    schedule = torch.optim.lr_scheduler.LambdaLR(fresh.optimizer, lambda step: 0.5**step)
    fresh.extra |= {"average": mine, "schedule": schedule}
    checkpoint.load(path, fresh)
    assert fresh.extra["average"] is mine and torch.equal(mine.full_tensor(), average["experts"].full_tensor())
    assert fresh.extra["schedule"] is schedule and schedule.last_epoch == 1
    assert fresh.extra["notes"] == {"tags": ["a"], 3: (1, 2)}


def check_extra_that_the_checkpoint_lacks(path):
    checkpoint.save(path, make_state(0))
    fresh = make_state(1)
    fresh.extra["unknown"] = 1
    assert "extra.unknown" in error_of(checkpoint.load, path, fresh)
    fresh.extra.pop("unknown")
    fresh.rng = {"other": torch.Generator()}
    assert "other" in error_of(checkpoint.load, path, fresh)


def three_steps(path):
    """A run with checkpoints of three steps, and their names."""
    state, names = make_state(0), []
    for step in (1, 20, 3):
        state.step = step
        names.append(checkpoint.save(path, state).name)
    return state, names


def check_step_saved_again(path):
    state, names = three_steps(path)
    assert names == ["step-00000001", "step-00000020", "step-00000003"]
    state.model.state_dict()["count"].fill_(7)
    state.step = 20
    checkpoint.save(path, state)
    assert sorted(os.listdir(path)) == sorted(names)
    fresh = make_state(1)
    checkpoint.load(path, fresh)
    assert (fresh.step, int(fresh.model.count)) == (20, 7)


def check_keep(path):
    three_steps(path)
    dist.barrier()
    kept = checkpoint.keep(path, 2)
    assert [folder.name for folder in kept] == ["step-00000003", "step-00000020"]
    assert sorted(os.listdir(path)) == ["step-00000003", "step-00000020"]
    assert "a number of checkpoints >= 1" in error_of(checkpoint.keep, path, 0)


def check_damaged_and_unfinished_checkpoints_are_passed_over(path):
    state, _ = three_steps(path)
    dist.barrier()
    if dist.get_rank() == 0:
        newest = Path(path) / "step-00000020"
        (newest / "__0_0.distcp").write_bytes(b"short")
        (Path(path) / "step-00000030.incomplete").mkdir()
        (Path(path) / "notes.txt").write_text("mine")
    dist.barrier()
    assert checkpoint.latest(path).name == "step-00000003"
    state.step = 4
    checkpoint.save(path, state)
    assert "step-00000030.incomplete" not in os.listdir(path) and "notes.txt" in os.listdir(path)


class ResumeTest(unittest.TestCase):
    def test_goes_on_bitwise_at_the_same_ranks_and_closely_at_others(self):
        with tempfile.TemporaryDirectory() as path:
            _, saved, losses, after = run_ranks(4, run_whole, path, 0.0)[0]
            for loaded, again, end, _ in run_ranks(4, resume, path, 0.0):
                assert_same(loaded, saved)
                assert_same(end, after)
                self.assertTrue(torch.equal(again, losses))
            for ranks in (1, 2):
                loaded, again, end, _ = run_ranks(ranks, resume, path, 0.0)[0]
                assert_same(loaded, saved)
                torch.testing.assert_close(again, losses, rtol=1e-5, atol=1e-6)
            for default_device in ("cpu", "meta"):
                assert_same(run_ranks(2, resume_running, path, default_device)[0], saved)
            with contextlib.redirect_stdout(io.StringIO()):
                self.assertEqual(_cli.main(["verify", path]), 0)
            assert_same(resume(path, 0.0)[0], saved)  # One process, no process group.

    def test_ranks_draw_the_same_numbers_again_and_new_ranks_draw_others(self):
        with tempfile.TemporaryDirectory() as path:
            _, _, losses, after = run_ranks(2, run_whole, path, 0.5)[0]
            _, again, end, _ = run_ranks(2, resume, path, 0.5)[0]
            self.assertTrue(torch.equal(again, losses))  # The same elements are dropped.
            assert_same(end, after)
            states = [rng for *_, rng in run_ranks(4, resume, path, 0.5)]
            self.assertEqual(len({bytes(state.tolist()) for state in states}), 4)  # New ranks draw other numbers.

    def in_a_folder(self, check):
        with tempfile.TemporaryDirectory() as path:
            run_ranks(2, check, path)

    def test_a_run_that_has_not_stepped_resumes_at_step_one(self):
        self.in_a_folder(check_fresh_optimizer)

    def test_a_model_loads_and_saves_without_its_optimizer(self):
        self.in_a_folder(check_model_alone)

    def test_extra_tensors_are_loaded_in_place_and_values_replaced(self):
        self.in_a_folder(check_extra)

    def test_extras_that_the_checkpoint_lacks_are_named(self):
        self.in_a_folder(check_extra_that_the_checkpoint_lacks)

    def test_a_step_saved_again_replaces_its_checkpoint(self):
        self.in_a_folder(check_step_saved_again)

    def test_keep_removes_all_but_the_newest(self):
        self.in_a_folder(check_keep)

    def test_damaged_and_unfinished_checkpoints_are_passed_over(self):
        self.in_a_folder(check_damaged_and_unfinished_checkpoints_are_passed_over)

    def test_a_state_that_cannot_be_saved_writes_nothing(self):
        state = make_state(0)
        for name, value, words in (
            ("step", -1, "step must be an int >= 0"),
            ("model", 3, "must be an nn.Module"),
            ("optimizer", "adam", "must be an optimizer, several optimizers or None"),
            ("scheduler", 3, "must have state_dict"),
            ("data_position", (1, 2), "that JSON can hold"),
            ("data_position", object(), "that JSON can hold"),
            ("rng", {"torch": torch.Generator()}, "other than torch, accelerator"),
        ):
            old = getattr(state, name)
            setattr(state, name, value)
            with tempfile.TemporaryDirectory() as path:
                self.assertIn(words, error_of(checkpoint.save, path, state))
                self.assertEqual(os.listdir(path), [])
            setattr(state, name, old)


class DamageTest(unittest.TestCase):
    def test_a_failed_save_leaves_nothing(self):
        for check in (
            check_save_of_a_bad_extra,
            check_save_to_a_full_disk,
            check_save_of_too_large_a_file,
            check_save_that_reads_back_other_bytes,
        ):
            with self.subTest(check.__name__), tempfile.TemporaryDirectory() as path:
                run_ranks(2, check, path)

    def test_what_is_wrong_is_said_before_anything_changes(self):
        with tempfile.TemporaryDirectory() as path, tempfile.TemporaryDirectory() as into:
            folder = run_ranks(2, run_whole, path, 0.0)[0][0]
            run_ranks(2, check_all_refused, path, damaged_copies(folder, into))

    def test_another_model_is_no_damage(self):
        """So no other checkpoint is named in its place."""
        with tempfile.TemporaryDirectory() as path:
            checkpoint.save(path, checkpoint.TrainState(torch.nn.Linear(2, 2)))
            text = error_of(checkpoint.load, path, checkpoint.TrainState(torch.nn.Linear(3, 2)))
            self.assertTrue(text.startswith("CheckpointError: ") and "complete checkpoint" not in text, text)

    def test_any_flipped_bit_is_found(self):
        with tempfile.TemporaryDirectory() as path:
            state = make_state(0)
            train(state, 1)
            folder = checkpoint.save(path, state)
            rng = random.Random(0)
            files = sorted(folder.iterdir())
            for _ in range(300):
                file = rng.choice(files)
                content = bytearray(file.read_bytes())
                place = rng.randrange(len(content))
                content[place] ^= 1 << rng.randrange(8)
                whole = file.read_bytes()
                file.write_bytes(content)
                with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
                    code = _cli.main(["verify", str(folder)])
                file.write_bytes(whole)
                if code == 0:  # Nothing but the layout of the manifest's text may change.
                    self.assertEqual(file.name, "manifest.json")
                    self.assertIn(chr(whole[place]), " \n")
                else:
                    self.assertIn(file.name, out.getvalue())
                    self.assertEqual(code, 1)

    def test_checksums_find_the_blocks_that_changed(self):
        with tempfile.TemporaryDirectory() as path:
            system = _files.HashingFileSystem(block=100)
            data = bytes(range(256)) * 3
            with system.create_stream(Path(path) / "x", "wb") as stream:
                for start, stop in ((0, 1), (1, 1), (1, 250), (250, 500), (500, 768)):
                    stream.write(data[start:stop])
            record = system.records["x"]
            self.assertEqual((record.nbytes, len(record.crc32)), (768, 8))
            self.assertEqual(_files.check_blocks(Path(path) / "x", record), [])
            changed = bytearray(data)
            changed[99] ^= 1
            changed[767] ^= 128
            (Path(path) / "x").write_bytes(changed)
            self.assertEqual(_files.check_blocks(Path(path) / "x", record), [0, 7])
            self.assertEqual(_files.check_blocks(Path(path) / "x", record, [3, 7]), [7])


class ManifestTest(unittest.TestCase):
    def record(self, *texts):
        return TensorRecord((12, 4), "float32", texts, (1000,))

    def test_placements_over_many_ranks_are_short_texts_that_are_read_back(self):
        units = (0,) * 990 + (1, 2) + (3,) * 3 + (0,) * 5
        for placement in (RaggedShard((0,), units), StridedRaggedShard((0, 1), units, 2)):
            record = self.record(placement_text(placement))
            self.assertLess(len(record.placements[0]), 120)
            self.assertEqual(record.parsed_placements()[0].local_units, units)
            self.assertEqual(record.parsed_placements(), (placement,))

    def test_texts_that_name_the_units_of_every_rank_are_read(self):
        units = (0,) * 60 + (1, 2) + (0,) * 40
        record = self.record(f"RaggedShard(dims=(0,), local_units={units})")  # As all were written once.
        self.assertEqual(record.parsed_placements(), (RaggedShard((0,), units),))

    def test_other_texts_are_refused(self):
        for units in ("(1,) ** 2", "f() * 2", "(1,) * f()"):
            with self.assertRaises(ValueError):
                self.record(f"RaggedShard(dims=(0,), local_units={units})").parsed_placements()


class CommandLineTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.path = folder.name
        cls.folder = Path(run_ranks(2, run_whole, cls.path, 0.0)[0][0])

    def run_cli(self, *arguments):
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
            code = _cli.main([*map(str, arguments)])
        return code, out.getvalue()

    def test_inspect_lists_progress_and_tensors(self):
        code, text = self.run_cli("inspect", self.path)
        self.assertEqual(code, 0)
        for line in (
            "step           3",
            "data position  {'epoch': 0, 'sample': 24}",
            "ranks          2",
            "random states  torch (each), python (",  # Python's own states are what earlier tests have left.
            ", data (same)",
        ):
            self.assertIn(line, text)
        self.assertRegex(text, r"model\.inner\.0\.weight +13 x 6 +float32 +RS\(0,1\)\[\d+,\d+\] +2\n")
        self.assertNotIn("rng.0.torch", text)

    def test_inspect_counts_tied_parameters_once(self):
        model = torch.nn.Sequential(torch.nn.Embedding(7, 5), torch.nn.Linear(5, 5), torch.nn.Linear(5, 7, bias=False))
        model[2].weight = model[0].weight
        wrapped = torch.nn.Sequential(torch.compile(model))  # Its names have a part that the checkpoint leaves out.
        with tempfile.TemporaryDirectory() as folder:
            saved = checkpoint.save(folder, checkpoint.TrainState(wrapped))
            tensors = checkpoint.read_manifest(saved).tensors
            self.assertEqual({n: t.tied_to for n, t in tensors.items() if t.tied_to}, {"model.0.2.weight": "model.0.0.weight"})
            text = self.run_cli("inspect", saved)[1]
        count = sum(param.numel() for param in model.parameters())
        self.assertIn(f"model          {count} elements (1 tied tensor not counted again), fingerprint", text)

    def test_inspect_draws_chosen_tensors(self):
        code, text = self.run_cli("inspect", self.folder, "--draw", "--tensors", "model.experts")
        self.assertIn("model.experts float32\n(3, 5, 6) under RS(", text)
        self.assertIn("ranks  elements", text)
        self.assertIn("no tensor has a name that matches none", self.run_cli("inspect", self.folder, "--tensors", "none")[1])

    def test_verify_says_that_a_checkpoint_is_whole_or_no_checkpoint(self):
        self.assertEqual(self.run_cli("verify", self.path)[0], 0)
        self.assertIn("is whole: 4 files", self.run_cli("verify", self.path)[1])
        self.assertEqual(
            self.run_cli("verify", self.path + "/none"),
            (1, f"{self.path}/none is no folder: expected a checkpoint, or a folder of checkpoints\n"),
        )

    def test_diff_tells_what_has_changed(self):
        self.assertEqual(self.run_cli("diff", self.folder, self.folder)[0], 0)
        other = tempfile.TemporaryDirectory()
        self.addCleanup(other.cleanup)
        state = make_state(0)
        checkpoint.load(self.path, state)
        with torch.no_grad():
            state.model.experts[0, 0, 0] += 1.0
        state.step = 4
        checkpoint.save(other.name, state)
        code, text = self.run_cli("diff", self.folder, other.name)
        self.assertEqual((code, "values are compared only with --values" in text), (1, True))
        code, text = self.run_cli("diff", self.folder, other.name, "--values", "--tensors", "model.*")
        self.assertEqual((code, "only with --values" in text), (1, False))
        self.assertRegex(text, r"step +3 +4\n")
        self.assertRegex(text, r"world size +2 +1\n")
        self.assertRegex(text, r"model\.experts .*1 of 90 values differ, by at most 1\n")
        self.assertEqual(text.count("values differ"), 1)
