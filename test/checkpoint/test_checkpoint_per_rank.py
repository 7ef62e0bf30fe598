"""What one rank writes for all must be the same on all ranks; what each rank has of its own is stored and restored per rank."""

import json
import os
import pickle
import tempfile
import unittest
from pathlib import Path

import torch
import torch.distributed as dist
from checkpoint_forger import saved_unchecked
from checkpoint_model import make_state, train, values
from common import error_of, run_ranks

from torch_ragged import checkpoint

FORMAT_1 = {
    *("step", "consumed_tokens", "data_position", "world_size", "tensors", "meshes", "files", "fingerprint", "rng", "objects"),
    *("torch_version", "package_version", "format"),
}


class Loader:
    """A data loader that ranks leave at different places."""

    def __init__(self, position=0):
        self.position = position

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class Plain:
    """Pickled as any object is."""

    def __init__(self, *texts):
        self.texts = texts


def check_values_that_differ_are_refused(path):
    rank = dist.get_rank()
    state = make_state(0)
    cases = (
        ("step", rank, ["step is 0 on rank 0, but 1 on rank 1"]),
        ("consumed_tokens", rank, ["consumed_tokens is 0 on rank 0, but 1 on rank 1"]),
        ("data_position", {"sample": rank}, ["data_position is {'sample': 0} on rank 0, but {'sample': 1} on rank 1"]),
        ("scheduler", Loader(rank), ["scheduler is {'position': 0}"]),
        ("extra", {"loader": Loader(rank), "same": 1}, ["extra.loader is {'position': 0}", "per_rank={'loader': loader}"]),
        ("extra", {"average": torch.tensor([1.0, rank])}, ["extra.average is a tensor (2,)"]),
        ("extra", {"deep": [{"a": torch.tensor([1.0, rank])}]}, ["extra.deep"]),
        ("extra", {"shards": {"weight": state.model.experts}}, ["extra.shards"]),  # DTensors, but in a pickle.
        ("extra", {f"name{rank}": 1}, ["extra.name0", "extra.name1"]),
        ("per_rank", {f"name{rank}": 1}, ["per_rank.name0", "per_rank.name1"]),
        ("rng", {f"name{rank}": torch.Generator()}, ["name0", "name1"]),
    )
    group = dist.new_group(backend="gloo")
    for field, value, words in cases:
        before = getattr(state, field)
        setattr(state, field, value)
        for save, kwargs in ((checkpoint.save, {}), (checkpoint.async_save, {"process_group": group})):
            text = error_of(save, path, state, **kwargs)
            assert text.startswith("CheckpointError") and all(word in text for word in words), (field, text)
            assert "must be the same on all ranks" in text and "extra.same" not in text, text
        setattr(state, field, before)
    dist.barrier()
    assert os.listdir(path) == [], os.listdir(path)


def check_equal_values_of_other_pickles_are_saved(path):
    rank = dist.get_rank()
    text, other = "".join(["te", "xt"]), "".join(["te", "xt"])
    state = make_state(0)
    state.extra |= {
        "shared": [text, text if rank else other],  # Pickled as a reference on rank 1.
        "order": {"a": 1, "b": {3, 1, 2}} if rank else {"b": {2, 1, 3}, "a": 1},
        "nan": float("nan"),
        "view": [torch.arange(4.0)[1:3] if rank else torch.tensor([1.0, 2.0])],
        "object": Plain(text, text if rank else other),
        "columns": torch.arange(8.0).view(2, 4).t() if rank else torch.arange(8.0).view(2, 4).t().contiguous(),
    }
    pickles = [None, None]
    dist.all_gather_object(pickles, {name: pickle.dumps(value) for name, value in state.extra.items()})
    alike = {name for name, value in pickles[0].items() if value == pickles[1][name]}
    assert alike == {"best", "nan"}, alike
    saved_unchecked(path, state)
    fresh = make_state(1)
    checkpoint.load(path, fresh, trust=True)  # Plain is a class of this test.
    assert fresh.extra["order"] == {"a": 1, "b": {1, 2, 3}} and fresh.extra["shared"] == ["text", "text"]


def check_an_argument_of_one_rank_leaves_none_waiting(path):
    rank = dist.get_rank()
    state = make_state(0)
    state.data_position = object() if rank == 1 else None
    for call in (checkpoint.save, checkpoint.load):
        text = error_of(call, path, state)
        assert text.startswith("TypeError" if rank == 1 else "CheckpointError"), text
        assert "that JSON can hold" in text, text
    state.data_position = None
    state.extra["bad"] = (lambda: None) if rank == 1 else None
    assert "pickling" in error_of(checkpoint.save, path, state) and os.listdir(path) == []


def with_loaders(seed=0, position=0):
    state = make_state(seed)
    state.per_rank = {"loader": Loader(position), "notes": None}
    return state


def save_per_rank(path):
    rank = dist.get_rank()
    state = with_loaders(0, 10 + rank)
    state.per_rank["notes"] = {"rank": rank, "buffer": torch.arange(rank + 1)}
    train(state, 1)
    checkpoint.save(f"{path}/sync", state)
    group = dist.new_group(backend="gloo")
    future = checkpoint.async_save(f"{path}/async", state, process_group=group)
    state.per_rank["loader"].position = 99  # What comes later is not in it.
    future.result(timeout=100)


def check_each_rank_gets_its_own(path):
    rank = dist.get_rank()
    for kind in ("sync", "async"):
        state = with_loaders(1)
        loader = state.per_rank["loader"]
        checkpoint.load(f"{path}/{kind}", state, redistribute={"loader": None})  # Not used at this number of ranks.
        assert state.per_rank["loader"] is loader and loader.position == 10 + rank
        assert state.per_rank["notes"]["rank"] == rank
        assert torch.equal(state.per_rank["notes"]["buffer"], torch.arange(rank + 1))
    without = make_state(2)
    checkpoint.load(f"{path}/sync", without)
    assert without.per_rank == {}
    more = with_loaders(3)
    more.per_rank["queue"] = None
    assert "the checkpoint holds no per_rank.queue" in error_of(checkpoint.load, f"{path}/sync", more)


def check_another_number_of_ranks(path):
    path, ranks = f"{path}/sync", dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if ranks > 1 else 0
    state = with_loaders(1, 5)
    fresh = values(state)

    def unchanged():
        assert not state.optimizer.state and state.per_rank["loader"].position == 5 and state.step == 0
        for name, value in values(state).items():
            assert torch.equal(value, fresh[name]), name

    text = error_of(checkpoint.load, path, state)
    assert "per_rank.loader was saved by 2 ranks" in text and "redistribute={'loader': function}" in text, text
    unchanged()

    def bad(states):
        return states[7] if rank == ranks - 1 else states[0]

    text = error_of(checkpoint.load, path, state, redistribute={"loader": bad, "notes": None})
    assert "the function that redistributes per_rank.loader raised IndexError" in text and f"(rank {ranks - 1})" in text, text
    unchanged()
    for wrong in ({"lodaer": None}, {"loader": 3}):
        assert error_of(checkpoint.load, path, state, redistribute=wrong).startswith("ValueError: load redistribute must map")
    unchanged()

    def spread(states):
        return {"position": sum(state["position"] for state in states) * 100 + rank}

    checkpoint.load(path, state, redistribute={"loader": spread, "notes": None})
    assert state.per_rank["loader"].position == 2100 + rank and state.per_rank["notes"] is None and state.step == 1


class SharedValuesTest(unittest.TestCase):
    def test_values_that_differ_between_ranks_are_refused_before_any_write(self):
        with tempfile.TemporaryDirectory() as path:
            run_ranks(2, check_values_that_differ_are_refused, path)

    def test_equal_values_whose_pickles_differ_are_saved(self):
        with tempfile.TemporaryDirectory() as path:
            run_ranks(2, check_equal_values_of_other_pickles_are_saved, path)

    def test_a_bad_argument_on_one_rank_leaves_no_rank_waiting(self):
        with tempfile.TemporaryDirectory() as path:
            run_ranks(2, check_an_argument_of_one_rank_leaves_none_waiting, path)


class PerRankTest(unittest.TestCase):
    def test_ranks_get_back_their_own_and_other_numbers_of_ranks_are_told_how(self):
        with tempfile.TemporaryDirectory() as path:
            run_ranks(2, save_per_rank, path)
            run_ranks(2, check_each_rank_gets_its_own, path)
            run_ranks(3, check_another_number_of_ranks, path)
            check_another_number_of_ranks(path)  # One process, no process group.

    def test_the_format_has_no_new_fields(self):
        """Readers of format 1 refuse unknown fields: they must be able to load the rest of a checkpoint with ``per_rank``."""
        with tempfile.TemporaryDirectory() as path:
            folder = checkpoint.save(path, with_loaders())
            body = json.loads((Path(folder) / "manifest.json").read_text())["manifest"]
            self.assertEqual(set(body), FORMAT_1)
            self.assertEqual(body["format"], 1)
            self.assertEqual(body["objects"], ["extra.best", "per_rank.loader", "per_rank.notes", "scheduler"])

    def test_names_must_be_text(self):
        state = make_state(0)
        state.per_rank = {3: 1}
        with tempfile.TemporaryDirectory() as path:
            self.assertIn(
                "TypeError: TrainState.per_rank must be a dict whose keys are str, got {3: 1}",
                error_of(checkpoint.save, path, state),
            )
