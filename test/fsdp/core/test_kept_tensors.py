"""Losses of tensors from inside of a module, which an attribute, a hook or a list has kept."""

import unittest

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import error_of, ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from torch_ragged.fsdp import FSDPModule, fully_shard
from torch_ragged.spmd import Plan, parallelize

DIM = 8


class Scale(nn.Module):
    """Its backward reads the weight in an elementwise kernel, which would crash on freed memory."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(DIM) + 0.5)

    def forward(self, x):
        return F.gelu(x) * self.weight


class Block(nn.Module):
    """``part``: the tensor is recomputed in backward."""

    def __init__(self, part):
        super().__init__()
        self.first, self.scale, self.second, self.side = nn.Linear(DIM, DIM), Scale(), nn.Linear(DIM, DIM), nn.Linear(DIM, 3)
        self.part = part

    def feature(self, x):
        return torch.tanh(self.scale(self.first(x)))

    def forward(self, x):
        self.kept = checkpoint(self.feature, x, use_reentrant=False) if self.part else self.feature(x)
        out = self.second(self.kept)
        self.aux = self.side(self.kept)
        return out


class Model(nn.Module):
    """``whole``: the blocks are recomputed in backward."""

    def __init__(self, part=False, whole=False):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.stem, self.head = nn.Embedding(10, DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, 4)
        self.blocks, self.whole = nn.ModuleList([Block(part), Block(part)]), whole

    def forward(self, x):
        self.embedded = self.embed(x)
        hidden = self.stem(self.embedded)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False) if self.whole else block(hidden)
        return self.head(hidden)


def attribute(model, x, rank):
    model(x)
    return model.blocks[0].kept.square().mean()


def view(model, x, rank):
    return model(x).mean() + model.blocks[1].kept[:, 2:5].square().mean()


def hooked(model, x, rank):
    seen = []
    handle = model.blocks[0].scale.register_forward_hook(lambda module, args, output: seen.append(output))
    model(x)
    handle.remove()
    return seen[0].square().mean()


def side_heads(model, x, rank):
    return model(x).square().mean() + sum(block.aux.square().mean() for block in model.blocks)


def earlier_forward(model, x, rank):
    model(x)
    kept = model.blocks[0].kept
    with torch.no_grad():
        model(x)
    return kept.square().mean() + model(x).mean()


def leaf_inside(model, x, rank):
    model(x)
    leaf = model.blocks[0].kept.detach().requires_grad_()
    leaf.square().sum().backward()
    return (model.blocks[0].kept * leaf.grad).sum()


def twice(model, x, rank):
    out = model(x)
    model.blocks[0].kept.square().mean().backward(retain_graph=True)
    return out.square().mean()


def on_one_rank(model, x, rank):
    out, kept = model(x), model.blocks[0].kept.square().mean()
    return kept if rank == 1 else out.square().mean()


def recomputed(model, x, rank):
    """The recomputation has assigned ``kept`` again: its graph is used by a second backward."""
    model(x).square().mean().backward()
    return model.blocks[0].kept.square().mean()


def penalty(model, x, rank):
    """A gradient of the gradient of a tensor from inside of the model."""
    hidden = []
    handle = model.blocks[0].register_forward_hook(lambda module, args, output: hidden.append(output))
    loss = model(x).square().mean()
    handle.remove()
    (gradient,) = torch.autograd.grad(loss, hidden, create_graph=True)
    return loss + gradient.square().sum()


LOSSES = (attribute, view, hooked, side_heads, earlier_forward, leaf_inside, twice, on_one_rank)


def shard(model, stays, inner=False):
    """``stays``: parameters stay unsharded until backward; ``inner``: the layers inside of blocks are units, too."""
    for block in model.blocks:
        for layer in (block.scale, block.side) if inner else ():
            fully_shard(layer, reshard_after_forward=not stays)
        fully_shard(block, reshard_after_forward=not stays)
    fully_shard(model.embed, reshard_after_forward=not stays)
    fully_shard(model, reshard_after_forward=not stays)
    if stays:  # One backward may pass several forwards, and one forward may have several backwards.
        model.set_reshard_after_backward(False)
    return model


def compare(model, plain, what):
    for module in model.modules():
        if isinstance(module, FSDPModule):  # set_reshard_after_backward(False) has left it unsharded.
            module.reshard()
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        wanted = torch.zeros_like(expected) if expected.grad is None else expected.grad / dist.get_world_size()
        found = torch.zeros_like(wanted) if param.grad is None else param.grad.full_tensor()
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6, msg=f"{what}: {name}")


def run(loss, model, plain):
    """One step of ``loss``, and one of the model's output: both have the gradients of one process."""
    size, rank = dist.get_world_size(), dist.get_rank()
    for step, function in enumerate((loss, lambda model, x, rank: model(x).square().mean())):
        for other in range(size):
            function(plain, torch.arange(3) + other, other).backward()
        function(model, torch.arange(3) + rank, rank).backward()
        compare(model, plain, f"{loss.__name__}, step {step}")
        model.zero_grad()
        plain.zero_grad()


def text_of(loss, model):
    """The error of a backward, on every rank."""
    try:
        loss(model, torch.arange(3) + dist.get_rank(), dist.get_rank()).backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


class KeptTensorTest(unittest.TestCase):
    @ranks(2)
    def test_modules_that_stay_unsharded_get_the_gradients_of_one_process():
        for inner in (False, True):
            for loss in LOSSES:
                run(loss, shard(Model(), stays=True, inner=inner), Model())

    @ranks(2)
    def test_modules_that_are_recomputed_get_the_gradients_of_one_process():
        for loss in (attribute, view, hooked, side_heads, leaf_inside):
            model = Model(whole=True)
            for block in model.blocks:
                fully_shard(block)
            run(loss, fully_shard(model), Model())

    @ranks(2)
    def test_a_resharded_module_whose_backward_reads_no_parameter_gets_its_gradients():
        model = shard(Model(), stays=False)
        run(lambda model, x, rank: (model(x), model.embedded.square().mean())[1], model, Model())

    @ranks(2)
    def test_a_resharded_module_is_named_and_the_next_step_is_right():
        for loss, wanted in (
            (attribute, "first.weight and 6 more of the module blocks.0,"),
            (hooked, "first.weight and 6 more of the module blocks.0,"),
            (side_heads, "first.weight and 6 more of the module blocks.1,"),
            (earlier_forward, "first.weight and 6 more of the module blocks.0,"),
            (twice, "first.weight and 6 more of the module blocks.0,"),
        ):
            model, plain = shard(Model(), stays=False), Model()
            text = text_of(loss, model)
            assert text.startswith(f"backward needs {wanted} which is resharded"), text
            assert "reshard_after_forward=False" in text, text
            model.reset_iter_state()
            run(lambda model, x, rank: model(x).square().mean(), model, plain)

    @ranks(2)
    def test_memory_that_another_module_uses_by_turns_is_not_read():
        """Blocks take turns in slots: without the check, gradients would be those of another block's weights."""
        model = shard(Model(), stays=False)
        model.set_persistent_buffers()
        assert "first.weight and 6 more of the module blocks.0," in text_of(attribute, model)

    @ranks(2)
    def test_a_part_of_a_resharded_module_that_is_recomputed_names_it():
        model = shard(Model(part=True), stays=False)
        text = text_of(attribute, model)
        assert text.startswith("backward needs first.weight and 6 more of the module blocks.0, which is resharded"), text

    @ranks(2)
    def test_a_second_backward_of_what_a_recomputation_has_kept_names_the_module():
        """A recomputation saves tensors by hooks, and autograd compares no versions: it crashed."""
        for slots in (False, True):
            model = Model(whole=True)
            for block in model.blocks:
                fully_shard(block)
            fully_shard(model)
            if slots:
                model.set_persistent_buffers()
            text = text_of(recomputed, model)
            assert text.startswith("backward needs first.weight and 6 more of the module blocks.0, which is resharded"), text

    @ranks(2)
    def test_a_second_backward_of_what_a_checkpoint_around_the_root_has_kept_adds_its_gradients():
        """The recomputation has assigned ``kept`` and ``aux`` again. FSDP2 loses them if the root is the only unit."""

        def twice(model, x, second, params):
            checkpoint(model, x, use_reentrant=False).square().mean().backward()
            for param in params:
                param.grad = None
            second(model).backward()

        def only_root():
            model = fully_shard(Model(), reshard_after_forward=False)
            model.set_reshard_after_backward(False)
            return model

        for second in (lambda model: model.blocks[0].kept.square().mean(), lambda model: model.blocks[1].aux.square().mean()):
            plain = Model()
            for rank in range(2):  # The gradients of the first backward are dropped, so that they cannot hide missing ones.
                earlier = [param.grad for param in plain.parameters()]
                plain.zero_grad()
                twice(plain, torch.arange(3) + rank, second, list(plain.parameters()))
                for param, before in zip(plain.parameters(), earlier, strict=True):
                    param.grad = before if param.grad is None else param.grad if before is None else param.grad + before
            for make in (only_root, lambda: shard(Model(), stays=True), lambda: shard(Model(), stays=True, inner=True)):
                model = make()
                twice(model, torch.arange(3) + dist.get_rank(), second, list(model.parameters()))
                compare(model, plain, f"{make}")

    @ranks(2)
    def test_a_gradient_of_a_gradient_through_units_of_a_plan_names_a_module():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        model = parallelize(Model(), Plan().unit(r"blocks\.\d+", "dp").own_rows("<in>", "dp"), mesh)
        text = text_of(penalty, model)
        assert text.startswith("backward needs ") and "blocks.0" in text and ", which is resharded" in text, text

    @ranks(2)
    def test_gradients_of_sharded_parameters_name_them():
        def grad(model, x, rank):
            return torch.autograd.grad(model(x)[0].sum(), list(model.blocks[1].first.parameters()))[0].sum()

        text = text_of(grad, shard(Model(), stays=False))
        assert text.startswith("torch.autograd.grad or backward(inputs=) got sharded parameters"), text
        assert "blocks.1.first.weight, blocks.1.first.bias of the module blocks.1. Call backward()" in text, text
        for stays in (False, True):  # autograd would return None, or the gradient of a penalty alone.
            model = shard(Model(), stays)
            params = list(model.blocks[1].first.parameters())
            loss = model(torch.arange(3))[0].sum()
            for form, call in {
                "allow_unused": lambda: torch.autograd.grad(loss, params, allow_unused=True),
                "backward": lambda: loss.backward(inputs=params),
                "penalty": lambda: torch.autograd.grad(loss + params[0].square().sum().full_tensor(), params[0]),
            }.items():
                text = error_of(call)
                assert "got sharded parameters, and forward has computed with unsharded ones: blocks.1.first" in text, form
            text = error_of(torch.autograd.grad, loss.square() + loss, params)  # Used twice, and named once.
            assert ": blocks.1.first.weight, blocks.1.first.bias of the module blocks.1. " in text, text
            loss.backward()  # The errors came before any gradient.
            (alone,) = torch.autograd.grad(params[0].square().sum(), params[0])
            assert torch.equal(alone.full_tensor(), 2 * params[0].full_tensor())
            assert torch.autograd.grad(params[0].sum(), params, allow_unused=True)[1] is None  # It is unused.
        model = shard(Model(), stays=True)
        output = model(torch.arange(3))  # Those that stay unsharded are in the graph, and the gradient is that of this rank.
        weight, plain = model.blocks[1].first.weight, Model()
        expected = torch.autograd.grad(plain(torch.arange(3))[0].sum(), plain.blocks[1].first.weight)[0]
        torch.testing.assert_close(torch.autograd.grad(output[0].sum(), weight)[0], expected)

    @ranks(2)
    def test_other_errors_of_a_backward_stay_as_they_are():
        model = shard(Model(), stays=False)

        def changed(model, x, rank):
            kept = torch.exp(model(x))
            loss = kept.sum()
            kept.add_(1)
            return loss

        assert text_of(changed, model).startswith("one of the variables needed for gradient computation"), text_of(
            changed, model
        )


if __name__ == "__main__":
    unittest.main()
