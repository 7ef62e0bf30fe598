"""Planes of backward: forward computes with some codes, backward with others, and each phase all-gathers its own."""

import contextlib
import dataclasses
import unittest
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import error_of, fake_group, ranks
from tested_device import DEVICE
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from torch_ragged._kernels.tiles import TileRun, TileTable
from torch_ragged.fsdp import (
    Float4Planes,
    Float4Policy,
    Float8Planes,
    Float8Policy,
    Float8Weight,
    float8_matmul_weight,
    float8_weight,
    fully_shard,
)
from torch_ragged.fsdp.codes._float8_planes import _PlaneSet
from torch_ragged.fsdp.core.encodings._plain import Phase

PAIRS = {
    "rows, then squares": Float8Policy(torch.float32, tile=(1, 128), weight_factory=float8_weight, backward=Float8Policy()),
    "squares, then rows": Float8Policy(torch.float32, weight_factory=float8_weight, backward=Float8Policy(tile=(1, 128))),
    "4 bits, then 8": Float4Policy(torch.float32, backward=Float8Policy()),
    "8 bits, then 4": Float8Policy(torch.float32, weight_factory=float8_weight, backward=Float4Policy()),
}


def rounded(value, policy):
    """The values that a policy's planes of a whole parameter have."""
    kind, tile = policy.planes, policy.tile
    rows, columns = value.shape
    run = TileRun(0, 0, 0, (1, rows, columns))
    grid = run.grid(tile)
    codes = torch.empty(value.numel() // kind.per_byte, dtype=torch.uint8)
    scales = torch.empty(torch.Size(grid).numel(), dtype=kind.scale_storage)
    kind.quantize(value.detach().reshape(-1), codes, TileTable([run], tile), scales)
    of_codes, of_scales = kind.dtypes
    planes = kind(codes.view(rows, -1).view(of_codes), scales.view(grid[-2:]).view(of_scales), tile, value.dtype)
    return planes.dequantized()


class Phased(torch.autograd.Function):
    """``F.linear`` by other values in backward."""

    @staticmethod
    def forward(ctx, x, weight, policy):
        ctx.save_for_backward(x, weight)
        ctx.policy = policy
        return F.linear(x, rounded(weight, policy))

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ rounded(weight, ctx.policy.backward), gradient.t() @ x, None


class Layer(nn.Module):
    """``F.linear`` of a weight; of the reference if ``policy`` is given."""

    def __init__(self, policy=None):
        super().__init__()
        self.weight, self.policy = nn.Parameter(torch.randn(256, 256) / 16), policy
        self.recomputes, self.seen, self.held = False, [], None

    def product(self, x):
        with torch.no_grad():
            self.seen.append((self.weight.detach() * 1).sum().item() if self.policy is None else None)
        product = F.linear(x, self.weight) if self.policy is None else Phased.apply(x, self.weight, self.policy)
        if self.held is not None:
            self.look()
            product.register_hook(self.look)
        return torch.tanh(product)

    def look(self, *_):
        planes = self.weight.planes
        self.held.append((planes.has_memory, planes.backward.has_memory))

    def forward(self, x):
        return checkpoint(self.product, x, use_reentrant=False) if self.recomputes else self.product(x)


class Checkpointed(nn.Module):
    """A checkpoint around a module: its recomputation calls the module again, with its hooks."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return checkpoint(self.module, x, use_reentrant=False)


def layers(policy=None):
    torch.manual_seed(5)
    return nn.Sequential(*(Layer(policy) for _ in range(3)))


def batch(number=0):
    return torch.randn(8, 256, generator=torch.Generator().manual_seed(number))


def sharded(policy, mesh=None, **options):
    net, mesh = layers(), mesh or init_device_mesh(DEVICE, (dist.get_world_size(),))
    for module in (*net, net):
        fully_shard(module, mesh=mesh, mp_policy=policy, **options)
    return net


def gradients(net, passes=1):
    """The loss of each pass, and the gradients of all parameters."""
    losses = []
    for number in range(passes):
        if hasattr(net, "set_requires_gradient_sync"):
            net.set_requires_gradient_sync(number == passes - 1)
        loss = net(batch(number)).square().sum()
        loss.backward()
        losses.append(loss.detach())
    return [*losses, *(getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in net.parameters())]


def assert_equal(found, expected):
    assert len(found) == len(expected) and all(map(torch.equal, found, expected)), [
        (a - b).abs().max().item() for a, b in zip(found, expected, strict=True)
    ]


@contextlib.contextmanager
def gathers():
    """The all-gathers of sets of planes: F or B, in their order."""
    order, original = [], _PlaneSet.all_gather

    def all_gather(self, shards, collectives):
        order.append("B" if (self._kind, self._tile) == (Float8Planes, (128, 128)) else "F")
        return original(self, shards, collectives)

    with mock.patch.object(_PlaneSet, "all_gather", all_gather):
        yield order


class ValuesTest(unittest.TestCase):
    @fake_group(2)
    def test_codes_that_do_not_come_in_backward_raise_and_hold_no_memory(self):
        layer = nn.Linear(256, 256, bias=False)
        policy = PAIRS["squares, then rows"]
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy, reshard_after_forward=False)
        (group,) = layer._ragged_groups(False)
        group.unshard(phase=Phase.FORWARD)
        with mock.patch.object(_PlaneSet, "decode", side_effect=RuntimeError("no room")):
            self.assertIn("no room", error_of(group.unshard, phase=Phase.BACKWARD))
        with gathers() as order:
            group.unshard(phase=Phase.BACKWARD)  # Nothing of the failed one is left in its way.
            layer.reset_iter_state()
            self.assertEqual((len(order), group.encoding.nbytes_beside), (1, 0))
            group.unshard(phase=Phase.FORWARD)
            group.unshard(phase=Phase.BACKWARD)
        self.assertEqual(len(order), 3, "what is freed is gathered again")

    def test_a_weight_is_flattened_with_both_planes(self):
        def planes(tile, backward=None):
            scales = torch.ones(-(-256 // tile[0]), 2)
            return Float8Planes(torch.ones(256, 256).to(torch.float8_e4m3fn), scales, tile, torch.float32, backward)

        weight = float8_weight(planes((128, 128), planes((1, 128))))
        names, context = weight.__tensor_flatten__()
        parts = {name: getattr(weight, name) for name in names}
        again = Float8Weight.__tensor_unflatten__(parts, context, weight.shape, weight.stride())
        for one, other in ((again.planes, weight.planes), (again.planes.backward, weight.planes.backward)):
            self.assertTrue(one.codes is other.codes and one.scales is other.scales and one.tile == other.tile)

    @ranks(2)
    def test_each_phase_computes_with_its_own_values():
        for name, policy in PAIRS.items():
            expected = gradients(layers(policy))
            assert_equal(gradients(sharded(policy)), expected)
            alike = dataclasses.replace(policy, backward=dataclasses.replace(policy, backward=None))
            other = gradients(layers(alike))
            assert torch.equal(other[0], expected[0]) and not torch.equal(other[1], expected[1]), f"{name}: no difference"

    @ranks(4)
    def test_replicas_accumulation_and_modules_that_stay_unsharded():
        policy = PAIRS["rows, then squares"]
        expected = gradients(layers(policy), passes=2)
        grid = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("replicas", "shards"))
        for net in (sharded(policy, grid), sharded(policy, reshard_after_forward=False), sharded(policy)):
            for found, wanted in zip(gradients(net, passes=2), expected, strict=True):
                torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-5)

    @ranks(2)
    def test_what_autograd_keeps_and_uses_in_backward():
        """Of a product by elements, autograd keeps the weight itself: its backward, too, uses the planes of backward."""
        policy = PAIRS["rows, then squares"]

        class Scale(nn.Module):
            def __init__(self):
                super().__init__()
                torch.manual_seed(1)
                self.weight = nn.Parameter(torch.randn(256, 256))

            def forward(self, x):
                return x * self.weight

        scale = Scale()
        whole = scale.weight.detach().clone()
        fully_shard(scale, mesh=init_device_mesh(DEVICE, (2,)), mp_policy=policy, reshard_after_forward=True)
        x = torch.ones(256, 256, requires_grad=True)
        out = scale(x)
        out.sum().backward()
        assert torch.equal(out.detach(), rounded(whole, policy))
        assert torch.equal(x.grad, rounded(whole, policy.backward)) and not torch.equal(x.grad, out.detach())

    @ranks(2)
    def test_products_of_codes():
        policy = Float8Policy(torch.float32, tile=(1, 128), weight_factory=float8_matmul_weight, backward=Float8Policy())
        for found, wanted in zip(gradients(sharded(policy)), gradients(layers(policy)), strict=True):
            assert (found - wanted).norm() <= 0.1 * wanted.norm()  # Inputs are rounded, too.


class RecomputedTest(unittest.TestCase):
    @ranks(2)
    def test_a_recomputed_forward_sees_the_planes_of_forward():
        """Also without grad mode, in a checkpoint of either kind, and in one inside of another."""
        policy, expected = PAIRS["rows, then squares"], None
        for wrap in (
            lambda function: function,
            lambda function: partial(checkpoint, function, use_reentrant=True),
            lambda function: partial(checkpoint, partial(checkpoint, function, use_reentrant=False), use_reentrant=False),
        ):
            net, seen = sharded(policy, reshard_after_forward=True), []

            def product(x, layer, seen=seen):
                with torch.no_grad():
                    seen.append((layer.weight @ layer.weight.t()).sum().item() + (layer.weight * 1).sum().item())
                return torch.tanh(F.linear(x, layer.weight))

            for layer in net:
                layer.forward = (
                    partial(wrap(product), layer=layer)
                    if wrap(product) is product
                    else partial(
                        lambda x, layer, function: wrap(partial(function, layer=layer))(x), layer=layer, function=product
                    )
                )
            x = batch().requires_grad_()
            net(x).square().sum().backward()
            found = [x.grad, *(p.grad.full_tensor() for p in net.parameters())]
            assert len(set(seen)) == 3, seen
            expected = expected or found
            assert_equal(found, expected)

    @ranks(2)
    def test_first_derivatives_that_are_differentiated():
        policy = dataclasses.replace(PAIRS["rows, then squares"], recomputes=False)
        expected, found = [], []
        for net, into in ((layers(policy), expected), (sharded(policy), found)):
            x = batch().requires_grad_()
            (first,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
            into.append(first.detach())
        assert_equal(found, expected)

    @ranks(2)
    def test_a_module_whose_output_has_no_hook_keeps_both():
        class Tied(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.ones(128, 128))

            def forward(self, x):
                return F.linear(x, self.weight), self.weight

        for recomputes in (True, False):
            tied = fully_shard(
                Tied(),
                mesh=init_device_mesh(DEVICE, (2,)),
                mp_policy=dataclasses.replace(PAIRS["rows, then squares"], recomputes=recomputes),
                reshard_after_forward=True,
            )
            x = torch.ones(2, 128, requires_grad=True)
            out, weight = tied(x)
            F.linear(out, weight).sum().backward()
            assert torch.equal(x.grad, torch.full((2, 128), 128.0**2)), x.grad


class GathersTest(unittest.TestCase):
    @ranks(2)
    def test_a_phase_gathers_its_own_planes():
        policy = Float8Policy(
            torch.float32, tile=(1, 128), weight_factory=float8_weight, backward=Float8Policy(), recomputes=False
        )
        net = sharded(policy, reshard_after_forward=True)
        for expected in ("FFFBBB", "FFFBBB"):
            with gathers() as order:
                loss = net(batch()).square().sum()
                kept = [net[0].weight.to_local().numel(), *order]
                loss.backward()
            assert "".join(order) == expected and kept[1:] == list("FFF"), (order, kept)
        with torch.no_grad(), gathers() as order:
            net(batch())
        assert order == list("FFF")
        net = sharded(policy, reshard_after_forward=False)
        with gathers() as order:
            net(batch()).sum().backward()
        assert "".join(order) == "FB" * 3
        with torch.no_grad(), gathers() as order:
            net(batch())
        assert order == list("FFF")

    @ranks(2)
    def test_recomputation():
        """Backward gathers both: the planes of forward have the same values again. Or it raises if the policy says so."""
        policy = PAIRS["rows, then squares"]
        expected = gradients(layers(policy))
        net = sharded(policy, reshard_after_forward=True)
        for layer in net:
            layer.recomputes = True
        with gathers() as order:
            assert_equal(gradients(net), expected)
        assert "".join(order) == "FFF" + "FB" * 3
        for layer in net:
            assert len(layer.seen) == 2 and layer.seen[0] == layer.seen[1], "a recomputed op without grad saw other values"
        narrow = dataclasses.replace(policy, recomputes=False)
        inside, around = (sharded(narrow, reshard_after_forward=True) for _ in range(2))
        for index in range(3):
            inside[index].recomputes = True
            around[index] = Checkpointed(around[index])
        for net in (inside, around):
            text = error_of(gradients, net)
            assert "no planes of forward" in text and "recomputes=True" in text, text

    @ranks(2)
    def test_unshard_by_hand():
        policy = Float8Policy(
            torch.float32, tile=(1, 128), weight_factory=float8_weight, backward=Float8Policy(), recomputes=False
        )
        net = sharded(policy, reshard_after_forward=False)
        net.set_unshard_in_backward(False)
        for layer in net:
            layer.unshard()
        with gathers() as order:
            found = gradients(net)
        assert_equal(found, gradients(layers(policy)))
        assert order in ([], list("FB" * 3)), order

    @ranks(2)
    def test_memory_of_one_phase_at_a_time():
        policy = Float8Policy(
            torch.float32, tile=(1, 128), weight_factory=float8_weight, backward=Float8Policy(), recomputes=False
        )
        net = sharded(policy, reshard_after_forward=True)
        for layer in net:
            layer.held = []
        net(batch()).sum().backward()
        assert [layer.held for layer in net] == [[(True, False), (False, True)]] * 3, [layer.held for layer in net]


class ErrorsTest(unittest.TestCase):
    def test_policies(self):
        self.assertIn("backward needs a weight_factory", error_of(Float8Policy, backward=Float8Policy()))
        self.assertIn("must have no backward itself", error_of(Float4Policy, backward=Float4Policy(backward=Float8Policy())))
        self.assertIn("must be a Float8Policy", error_of(Float8Policy, weight_factory=float8_weight, backward=(128, 128)))

    @ranks(2)
    def test_a_factory_that_drops_the_planes_of_backward():
        def drops(planes):
            return Float8Weight(Float8Planes(planes.codes, planes.scales, planes.tile, planes.dtype))

        net = sharded(Float8Policy(torch.float32, weight_factory=drops, backward=Float4Policy()))
        text = error_of(net, batch())
        assert "must return a tensor that holds planes.backward.codes" in text, text

    @ranks(2)
    def test_persistent_buffers():
        net = sharded(PAIRS["4 bits, then 8"])
        text = error_of(net.set_persistent_buffers)
        assert "set_persistent_buffers() does not support Float4Policy with backward=: leave backward out" in text, text
        assert_equal(gradients(net), gradients(layers(PAIRS["4 bits, then 8"])))

    def test_a_parameter_that_backward_cannot_cut_is_not_quantized(self):
        """Columns of 4-bit planes are multiples of 32: other matrices stay in the dtype of the computation."""
        found = []

        def hold(planes):
            found.append((tuple(planes.shape), type(planes.backward) is Float4Planes))
            return float8_weight(planes)

        with fake_group(1):
            train_two_widths(Float8Policy(torch.float32, weight_factory=hold, backward=Float4Policy()))
        self.assertEqual(found, [((64, 64), True), ((40, 64), True)])


def train_two_widths(policy):
    net = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 40, bias=False), nn.Linear(40, 8, bias=False))
    fully_shard(net, mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
    net(torch.ones(2, 64)).sum().backward()


if __name__ == "__main__":
    unittest.main()
