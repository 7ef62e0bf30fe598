"""Uses of a static module that no attribute shows: what it writes into arguments, slots, weak references, caches of torch."""

import gc
import unittest
import weakref
from dataclasses import dataclass

import torch
from common import as_before, error_of, ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.utils import parametrize

from torch_ragged.fsdp import fully_shard
from torch_ragged.spmd import Plan, parallelize


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.head = self.make(), nn.Linear(8, 8)

    def make(self):
        return Inner()

    def before(self, step):
        """Between the steps of the script."""

    def forward(self, x):
        return self.head(self.inner(x))


class Inner(nn.Linear):
    def __init__(self):
        super().__init__(8, 8)


class Writes(Base):
    """A dict that is an output in disguise, and a list of auxiliary losses."""

    class Inner(Inner):
        def forward(self, given, losses):
            given["h"] = super().forward(given["h"]).relu()
            losses.append(given["h"].square().mean())

    def make(self):
        return self.Inner()

    def forward(self, x):
        given, losses = {"h": x}, []
        for _ in range(2):
            self.inner(given, losses)
        return self.head(given["h"]) + sum(losses)


class Slots(Base):
    @dataclass(slots=True)
    class Config:
        scale: float = 1.0

    class Inner(Inner):
        def __init__(self):
            super().__init__()
            self.config = Slots.Config()

        def forward(self, x):
            return super().forward(x) * self.config.scale

    def make(self):
        return self.Inner()

    def before(self, step):
        self.inner.config.scale = 1.0 + step


class Weak(Base):
    class Inner(Inner):
        def forward(self, x):
            return super().forward(x) * self.owner().scale

    def make(self):
        inner, self.scale = self.Inner(), 1.0
        inner.owner = weakref.ref(self)
        return inner

    def before(self, step):
        self.scale = 1.0 + step


class Attribute(Base):
    class Inner(Inner):
        def forward(self, x):
            return super().forward(x) * getattr(x, "scale", 1.0)

    def make(self):
        return self.Inner()

    def forward(self, x):
        h = x * 1.5
        h.scale = 3.0
        return self.head(self.inner(h))


class Half(nn.Module):
    def forward(self, weight):
        return weight * 0.5


class Cached(Base):
    def make(self):
        return parametrize.register_parametrization(Inner(), "weight", Half())

    def forward(self, x):
        with parametrize.cached():
            return self.head(self.inner(self.inner(x)))


class Answers(dict):
    """As configurations of many programs: an attribute that is missing is a KeyError."""

    __getattr__ = dict.__getitem__


class Config(Base):
    class Inner(Inner):
        def __init__(self):
            super().__init__()
            self.config = Answers(scale=2.0)

        def forward(self, x):
            return super().forward(x) * self.config.scale

    def make(self):
        return self.Inner()


class Frozen(Base):
    """A parameter is frozen between forward and backward: autograd accumulates nothing in it."""

    def after(self, step):
        self.inner.weight.requires_grad_(step % 2 == 0)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class StaticUsesTest(unittest.TestCase):
    def tearDown(self):
        as_before()

    @ranks(2)
    def test_every_use_computes_what_one_process_does():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        plan = Plan().shard("<in:x>", Shard(0), "dp").default(Replicate())
        for kind in (Writes, Slots, Weak, Attribute, Cached, Config, Frozen):
            for mode in ("eager", "static"):
                model, plain = parallelize(kind(), plan, mesh, mode=mode), kind()
                for step in range(5):
                    x, found = torch.arange(32.0).view(4, 8).sin() + step, []
                    for each in (model, plain):
                        each.before(step)
                        output = each(x)
                        getattr(each, "after", lambda step: None)(step)
                        output.square().mean().backward()
                        found.append({"output": output, **{name: p.grad for name, p in each.named_parameters()}})
                        each.zero_grad()
                        each.requires_grad_(True)
                    for name, wanted in found[1].items():
                        where = f"{kind.__name__} {mode} step {step}: {name}"
                        assert (wanted is None) == (found[0][name] is None), where
                        if wanted is not None:
                            torch.testing.assert_close(whole(found[0][name]), wanted, msg=where)


class ModelsTest(unittest.TestCase):
    def tearDown(self):
        as_before()

    @ranks(2)
    def test_units_that_cover_all_parameters_have_a_root_and_are_resharded():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        model = parallelize(nn.Sequential(*(Inner() for _ in range(3))), Plan().unit(r"\d", "dp"), mesh)
        model(torch.ones(2, 8))
        assert all("Shard" in str(p.placements) or "RS" in str(p.placements) for p in model.parameters())
        model[0].requires_grad_(False)
        before = list(model.parameters())
        model(torch.ones(2, 8)).sum().backward()
        assert all(a is b for a, b in zip(before, model.parameters(), strict=True))

    @ranks(2)
    def test_parameters_that_a_script_replaces_are_freed():
        mesh, plan = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), Plan().default(Replicate())
        for mode in ("eager", "static"):
            model, counts = parallelize(nn.Sequential(Inner(), nn.ReLU()), plan, mesh, mode=mode), []
            for step in range(31):
                model[0].weight = nn.Parameter(model[0].weight.detach() * 1.0)
                model(torch.ones(2, 8)).mean().backward()
                assert model[0].weight.grad is not None
                model.zero_grad()
                if step % 10 == 0:
                    gc.collect()
                    counts.append(sum(isinstance(t, torch.Tensor) and t.shape == (8, 8) for t in gc.get_objects()))
            assert counts[3] - counts[1] < 6, (mode, counts)

    @ranks(2)
    def test_parameters_that_share_memory_are_tied_or_refused():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))

        def made(view):
            model = Base()
            model.head.weight = nn.Parameter(view(model.inner.weight.data))
            return model

        turned, same, rows = torch.t, (lambda w: w), (lambda w: w.view(-1)[8:].view(7, 8))
        for view in (turned, same, rows):
            assert "share memory" in error_of(fully_shard, made(view), mesh=mesh)
        for view in (turned, rows):
            assert "share memory" in error_of(parallelize, made(view), Plan().default(Replicate()), mesh)
        model = parallelize(made(same), Plan().default(Replicate()), mesh)
        with torch.no_grad():
            model.head.weight.zero_()
        assert not model.inner.weight.full_tensor().any()


if __name__ == "__main__":
    unittest.main()
