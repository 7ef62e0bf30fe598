"""Parameter groups of a checkpoint: empty ones, in another order, of several optimizers. Steps go on as without a load."""

import os
import shutil
import tempfile
import unittest
import warnings

import torch
import torch.distributed as dist
from common import error_of, ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from torch_ragged import checkpoint
from torch_ragged.fsdp import Offload, fully_shard, offloaded
from torch_ragged.optim import Muon


def make(groups, kind=torch.optim.AdamW, policy=None, **options):
    """A model, and its optimizer with a group for each word, which has a learning rate of its own.

    ``a`` and ``b`` have one half of the parameters each, ``e`` and ``f`` have no parameter, ``all`` has each one.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 4))
    knobs = {"mesh": init_device_mesh("cpu", (dist.get_world_size(),))} | ({} if policy is None else {"offload_policy": policy})
    fully_shard(model[0], **knobs)
    fully_shard(model, **knobs)
    params = list(model.parameters())
    rates = {"a": 0.01, "b": 0.02, "e": 0.03, "f": 0.04, "all": 0.05}
    parts = {"a": params[:2], "b": params[2:], "e": [], "f": [], "all": params}
    given = [{"params": list(parts[word]), "lr": rates[word], **options} for word in groups]
    return model, kind(given) if policy is None else offloaded(kind, model, given)


def steps(model, optimizers, first=0):
    for number in range(first, first + 2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(torch.full((2, 8), 0.5 + number)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()


def wholes(model):
    return [param.full_tensor().detach().clone() for param in model.parameters()]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(wholes(one), wholes(other), strict=True))


class Folder:
    """A folder of checkpoints that all ranks see."""

    def __enter__(self):
        name = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(name)
        self.name = name[0]
        return os.path.join(self.name, "run")

    def __exit__(self, *error):
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(self.name)


def check_goes_on(saved, loaded, what):
    """Save ``saved`` after some steps, load into ``loaded``: models and optimizers. Both make the same steps then."""
    (model, *optimizers), (other, *others) = saved, loaded
    steps(model, optimizers)
    with Folder() as path:
        checkpoint.save(path, checkpoint.TrainState(model, optimizers, step=2))
        checkpoint.load(path, checkpoint.TrainState(other, others))
    for each in (optimizers, others):
        steps(model if each is optimizers else other, each, first=2)
    assert same(model, other), what


class EmptyGroupsTest(unittest.TestCase):
    @ranks(2)
    def test_groups_without_parameters_change_no_step():
        cases = ((torch.optim.AdamW, {}, ("abe", "aeb", "efab")), (torch.optim.SGD, {"momentum": 0.9}, ("eab",)))
        for kind, options, orders in (*cases, (Muon, {"algorithm": "adamw"}, ("eaebf",))):
            for words in orders:
                check_goes_on(make(words, kind, **options), make(words, kind, **options), (kind.__name__, words))

    @ranks(2)
    def test_offloaded_optimizers_may_have_such_groups():
        check_goes_on(make("eab", policy=Offload(0.5)), make("eab", policy=Offload(1.0)), "offloaded")
        check_goes_on(make("aefb", policy=Offload(0.5)), make("aefb"), "no longer offloaded")

    @ranks(2)
    def test_options_of_groups_without_parameters_are_loaded_in_order():
        model, optimizer = make("eafb")
        other, mine = make("eafb")
        steps(model, [optimizer])
        optimizer.param_groups[0]["weight_decay"], optimizer.param_groups[2]["lr"] = 0.5, 0.25
        with Folder() as path:
            checkpoint.save(path, checkpoint.TrainState(model, optimizer, step=2))
            checkpoint.load(path, checkpoint.TrainState(other, mine))
        found = [{key: value for key, value in group.items() if key != "params"} for group in mine.param_groups]
        assert found == [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


class OtherGroupsTest(unittest.TestCase):
    @ranks(2)
    def test_groups_are_found_by_their_parameters():
        for saved, loaded in (("eab", "ba"), ("ab", "befa")):
            check_goes_on(make(saved), make(loaded), (saved, loaded))
        check_goes_on(make(["all"]), make("ab"), "one group becomes two")

    @ranks(2)
    def test_several_optimizers_may_have_groups_without_parameters():
        def two(words):
            model, first = make(words[0])
            params = list(model.parameters())
            first.param_groups[0]["params"] = params[:2]
            return model, first, torch.optim.AdamW([{"params": [], "lr": 0.5}, {"params": params[2:], "lr": 0.02}])

        check_goes_on(two(["a"]), two(["a"]), "two optimizers")
        check_goes_on(two(["ae"]), two(["ae"]), "two optimizers with empty groups")

    @ranks(2)
    def test_groups_with_different_options_are_not_joined():
        """Whatever they had, one group has one learning rate: an error, and nothing is changed."""
        model, optimizer = make("ab")
        other, mine = make(["all"])
        steps(model, [optimizer])
        before = wholes(other)
        with Folder() as path:
            checkpoint.save(path, checkpoint.TrainState(model, optimizer, step=2))
            text = error_of(checkpoint.load, path, checkpoint.TrainState(other, mine))
        assert "parameter group 0 has parameters of the saved groups 0 and 1, which differ in lr: make the" in text, text
        assert all(map(torch.equal, wholes(other), before)) and not mine.state
        assert mine.param_groups[0]["lr"] == 0.05

    @ranks(2)
    def test_a_rate_that_is_a_tensor_stays_one():
        def with_tensor():
            model, optimizer = make("eab")
            for group in optimizer.param_groups:
                group["lr"] = torch.tensor(group["lr"])
            return model, optimizer

        saved, loaded = with_tensor(), with_tensor()
        for group in saved[1].param_groups:
            group["lr"] *= 2
        check_goes_on(saved, loaded, "lr is a tensor")
        assert [group["lr"] for group in loaded[1].param_groups] == [group["lr"] for group in saved[1].param_groups]


class AccumulationTest(unittest.TestCase):
    @ranks(2)
    def test_a_save_while_gradients_accumulate_says_nothing_and_changes_nothing():
        """DCP makes the states of an optimizer that has made no step, by a step."""
        (model, optimizer), (other, reference) = make("ab"), make("ab")
        for each in (model, other):
            each.set_requires_gradient_sync(False)
            each(torch.ones(2, 8)).square().mean().backward()
        with Folder() as path, warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            checkpoint.save(path, checkpoint.TrainState(model, optimizer))
        assert not optimizer.state
        for each, mine in ((model, optimizer), (other, reference)):
            each.set_requires_gradient_sync(True)
            each(torch.full((2, 8), 2.0)).square().mean().backward()
            mine.step()
        assert same(model, other)


if __name__ == "__main__":
    unittest.main()
