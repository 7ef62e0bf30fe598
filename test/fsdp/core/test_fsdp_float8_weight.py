"""Modules that hold all-gathered float8 codes: the bits of dequantized parameters, without these parameters."""

import unittest
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import error_of, ranks
from float8_net import Net
from tested_device import DEVICE
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from torch_ragged.fsdp import (
    Float8Planes,
    Float8Policy,
    Float8Weight,
    Offload,
    float8_matmul_weight,
    float8_weight,
    fully_shard,
    memory_report,
    offloaded,
    reshard_to,
)


def trained(factory, dtype=torch.bfloat16, mesh=None, tile=(128, 128), steps=3, passes=1, recomputes=False, **knobs):
    """Losses and parameters of a few steps."""
    torch.manual_seed(3)
    net, mesh = Net(), mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    policy = Float8Policy(dtype, torch.float32, tile=tile, weight_factory=factory)
    for module in (net.inner, net):
        fully_shard(module, mesh=mesh, mp_policy=policy, **knobs)
    optimizer, losses = torch.optim.AdamW(net.parameters(), lr=0.01), []
    for step in range(steps):
        for each in range(passes):
            net.set_requires_gradient_sync(each == passes - 1)
            generator = torch.Generator().manual_seed(100 * step + 10 * each + dist.get_rank())
            tokens = torch.randint(0, 40, (4, 6), generator=generator)
            if recomputes:
                net.inner.forward = partial(checkpoint, partial(nn.Linear.forward, net.inner), use_reentrant=False)
            loss = net(tokens).float().square().mean()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, [param.to_local().detach().clone() for param in net.parameters()]


def assert_same(one, other):
    assert one[0] == other[0], (one[0], other[0])
    assert all(torch.equal(p, q) for p, q in zip(one[1], other[1], strict=True))


class BitsTest(unittest.TestCase):
    @ranks(2)
    def test_training_has_the_bits_of_dequantized_parameters():
        for dtype, tile in ((torch.bfloat16, (128, 128)), (torch.float32, (1, 128)), (torch.float16, (128, 128))):
            assert_same(trained(float8_weight, dtype, tile=tile), trained(None, dtype, tile=tile))

    @ranks(4)
    def test_replicas_accumulation_and_recomputation_change_no_bit():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        assert_same(trained(float8_weight, mesh=mesh, passes=2), trained(None, mesh=mesh, passes=2))
        assert_same(trained(float8_weight, recomputes=True), trained(None))
        assert_same(trained(float8_weight, reshard_after_forward=False), trained(None))

    @ranks(4)
    def test_tensor_parallelism_changes_no_bit():
        results = []
        for factory in (float8_weight, None):
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 256))
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
            fully_shard(net, mesh=mesh["dp"], mp_policy=Float8Policy(torch.bfloat16, torch.float32, weight_factory=factory))
            optimizer, seen = torch.optim.SGD(net.parameters(), lr=1e-4), []
            for step in range(3):  # Later all-gathers fill what the first one has made.
                x = torch.randn(4, 256, generator=torch.Generator().manual_seed(2 * step + dist.get_rank() // 2))
                seen.append(net(x))
                seen[-1].float().square().sum().backward()
                seen += [p.grad.to_local() for p in net.parameters()]
                optimizer.step()
                optimizer.zero_grad()
            if factory is not None:
                net.unshard()
                for layer in (net[0], net[2]):
                    assert isinstance(layer.weight._local_tensor, Float8Weight), "codes, and no copy of values"
            results.append(seen)
        assert all(torch.equal(p, q) for p, q in zip(*results, strict=True))

    @ranks(2)
    def test_checkpoints_offload_and_other_meshes_see_ordinary_parameters():
        torch.manual_seed(0)
        net, policy = nn.Linear(256, 256), Float8Policy(torch.bfloat16, torch.float32, weight_factory=float8_weight)
        whole = net.weight.detach().clone()
        fully_shard(net, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy, offload_policy=Offload(0.5))
        optimizer = offloaded(torch.optim.AdamW, net, lr=0.1)
        net(torch.ones(2, 256)).sum().backward()
        optimizer.step()
        states = net.state_dict()
        assert states["weight"].dtype == torch.float32 and not torch.equal(states["weight"].full_tensor(), whole)
        torch.manual_seed(0)
        other = fully_shard(nn.Linear(256, 256), mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
        other.load_state_dict(states)
        assert torch.equal(other.weight.full_tensor(), net.weight.full_tensor())
        x = torch.ones(2, 256)
        with torch.no_grad():
            before = other(x)
        adamw = torch.optim.AdamW(other.parameters())
        reshard_to(other, adamw, init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards")))
        assert torch.equal(other(x), before)


class MemoryTest(unittest.TestCase):
    @ranks(2)
    def test_no_parameter_is_allocated_in_the_dtype_of_the_computation():
        peaks = {}
        policies = {
            "bfloat16": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
            "float8": Float8Policy(torch.bfloat16, torch.float32),
            "codes": Float8Policy(torch.bfloat16, torch.float32, weight_factory=float8_weight),
        }
        for name, policy in policies.items():
            net, mesh = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4))), init_device_mesh("cpu", (2,))
            for layer in net:
                fully_shard(layer, mesh=mesh, mp_policy=policy)
            fully_shard(net, mesh=mesh, mp_policy=policy)
            peak = memory_report(net, torch.optim.SGD).peak
            peaks[name] = {"gathered": peak.gathered / 512**2, "total": peak.total / 512**2}
            # Of a group that is all-gathered: codes, and the scales of 4 x 4 tiles, twice.
            net[0].unshard()
            buffers = [buffer for group in net[0]._get_fsdp_state().groups for buffer in group.buffers()["gathered"]]
            if name == "codes":
                assert sum(buffer.resident_nbytes for buffer in buffers) == 512**2
                # Each rank sends half of the codes, and 8 scales in 128 bytes.
                assert [buffer.nbytes for buffer in buffers] == [512**2, 2 * 128]
                assert isinstance(net[0].weight, Float8Weight)
            net[0].reshard()
        # In elements of a layer. What is gathered decides the peak of the others only.
        assert peaks["codes"]["gathered"] <= 1.01 and peaks["bfloat16"]["gathered"] == 4, peaks
        assert peaks["codes"]["total"] <= min(peaks["bfloat16"]["total"], peaks["float8"]["total"]), peaks

    @ranks(1)
    def test_autograd_keeps_codes_for_backward():
        policy = Float8Policy(torch.bfloat16, torch.float32, weight_factory=float8_weight)
        net = fully_shard(nn.Linear(256, 256), mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
        saved = []

        def pack(tensor):  # As hooks do that move activations elsewhere.
            saved.append(tensor)
            return tensor.clone()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor + 0):
            net(torch.ones(2, 256)).sum().backward()
        assert not any(tensor.numel() == 256**2 for tensor in saved), saved
        assert torch.equal(net.weight.grad.full_tensor(), torch.full((256, 256), 2.0))


class AutogradTest(unittest.TestCase):
    """A linear layer of codes, wherever torch's own runs."""

    @staticmethod
    def _layer(size=128):
        scales = torch.full((1, 1), 0.01)
        codes = torch.randn(size, size, generator=torch.Generator().manual_seed(1)).to(torch.float8_e4m3fn)
        planes = Float8Planes(codes, scales, (128, 128), torch.float32)
        return nn.Parameter(float8_weight(planes)), planes.dequantized().requires_grad_()

    @ranks(1)
    def test_what_a_checkpoint_recomputes_is_complete():
        """Layers that autograd does not record, before others that it does."""
        trained = torch.randn(128, 128, generator=torch.Generator().manual_seed(2))
        for is_frozen in (True, False):
            grads = []
            for weight in AutogradTest._layer():
                weight.requires_grad_(not is_frozen)
                last = trained.clone().requires_grad_()

                def block(x, weight=weight, last=last):
                    with torch.set_grad_enabled(is_frozen):  # noqa: B023
                        x = F.linear(x, weight)
                    return x @ last

                checkpoint(block, torch.ones(3, 128), use_reentrant=False).square().sum().backward()
                grads.append(last.grad)
            assert torch.equal(*grads) and grads[0].abs().sum() > 0, grads

    @ranks(1)
    def test_second_derivatives_functorch_and_compiled_code_are_torchs_own():
        results = []
        for weight in AutogradTest._layer():
            x = torch.linspace(-1, 1, 256).view(2, 128).requires_grad_()
            (first,) = torch.autograd.grad(F.linear(x, weight).pow(3).sum(), x, create_graph=True)
            second = torch.autograd.grad(first.square().sum(), (x, weight))
            mapped = torch.func.grad(lambda x, weight=weight: F.linear(x, weight).square().sum())(x.detach())
            compiled = torch.compile(lambda x, weight=weight: F.linear(x, weight), backend="eager", fullgraph=True)(x)
            results.append((first, *second, mapped, compiled))
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other)


class ProductTest(unittest.TestCase):
    @unittest.skipUnless(DEVICE == "cpu", "the simulator has no float8 products")
    @ranks(2)
    def test_products_of_codes_are_as_near_as_their_inputs():
        """Codes of weights are exact here. Inputs are rounded to 4 bits, and sums of 384 products in float32."""
        for tile in ((128, 128), (1, 128)):
            outputs, grads = [], []
            for factory in (float8_matmul_weight, float8_weight):
                torch.manual_seed(0)
                net = nn.Linear(384, 272)
                policy = Float8Policy(torch.float32, torch.float32, tile=tile, weight_factory=factory)
                fully_shard(net, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
                x = torch.randn(5, 7, 384, generator=torch.Generator().manual_seed(1)).requires_grad_()
                real, calls = torch._scaled_mm, []

                def counted(*args, real=real, calls=calls, **kwargs):
                    calls.append(args[0].shape)
                    return real(*args, **kwargs)

                with mock.patch.object(torch, "_scaled_mm", counted):
                    output = net(x)
                assert calls == ([(35, 128)] * 3 if factory is float8_matmul_weight else [])
                output.sum().backward()
                net.unshard()
                exact = F.linear(x.double(), net.weight.planes.dequantized().double(), net.bias.double())
                most = F.linear(x.double().abs(), net.weight.planes.dequantized().double().abs())
                outputs.append(((output - exact).abs() / most).max().item())
                grads.append((x.grad, net.weight, net.bias))
                net.reshard()
                grads[-1] = (x.grad, net.weight.grad.to_local(), net.bias.grad.to_local())
            assert 1e-4 < outputs[0] < 2**-4 + 1e-5 and outputs[1] < 1e-5, outputs
            assert all(torch.equal(p, q) for p, q in zip(*grads, strict=True))

    @ranks(1)
    def test_shapes_that_no_product_of_codes_takes_are_dequantized():
        for rows, columns in ((256, 200), (200, 256)):
            policy = Float8Policy(torch.float32, weight_factory=float8_matmul_weight)
            net = fully_shard(nn.Linear(columns, rows), mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
            x = torch.randn(3, columns, generator=torch.Generator().manual_seed(rows)).requires_grad_()
            with mock.patch.object(torch, "_scaled_mm", None):
                output = net(x)
                output.sum().backward()
            net.unshard()
            weight, bias = net.weight.planes.dequantized(), net.bias.detach().clone()
            net.reshard()
            assert torch.equal(output, F.linear(x, weight, bias))
            assert torch.equal(x.grad, torch.ones(3, rows) @ weight)
            torch.testing.assert_close(net.weight.grad.full_tensor(), x.detach().sum(0).expand(rows, columns))

    @ranks(1)
    def test_inputs_that_do_not_fit_raise_torchs_errors():
        planes = Float8Planes(torch.ones(16, 256).to(torch.float8_e4m3fn), torch.ones(1, 2), (128, 128), torch.float32)
        weight, values = float8_matmul_weight(planes), planes.dequantized()
        for x in (torch.ones(3, 128), torch.ones(3, 384), torch.ones(3, 256, dtype=torch.bfloat16)):
            error = error_of(F.linear, x, weight)
            assert "Error" in error and error == error_of(F.linear, x, values), error


class FactoryTest(unittest.TestCase):
    @ranks(2)
    def test_a_factory_of_the_user_gets_the_planes_of_each_parameter_once():
        seen = []

        class Held(Float8Weight):
            pass

        def factory(planes):
            seen.append((tuple(planes.codes.shape), tuple(planes.scales.shape), planes.dtype, planes.tile))
            return Held(planes)

        torch.manual_seed(3)
        net, mesh = Net(), init_device_mesh("cpu", (2,))
        whole = net.experts.detach().clone()
        fully_shard(net, mesh=mesh, mp_policy=Float8Policy(torch.bfloat16, torch.float32, weight_factory=factory))
        for _ in range(2):
            net(torch.zeros(1, 2, dtype=torch.int64)).sum().backward()
        shapes = [((260, 140), (3, 2)), ((3, 130, 260), (3, 2, 3)), ((40, 130), (1, 2))]
        assert sorted(seen) == sorted((codes, scales, torch.bfloat16, (128, 128)) for codes, scales in shapes), seen
        net.unshard()
        assert type(net.experts.data) is Held
        planes = net.experts.planes
        scales = planes.scales.repeat_interleave(128, 1)[:, :130].repeat_interleave(128, 2)[..., :260]
        by_hand = (planes.codes.float() * scales).bfloat16()
        assert torch.equal(planes.dequantized(), by_hand)
        assert ((by_hand.float() - whole).abs() <= whole.abs() * 2**-4 + scales * 2**-10 + whole.abs() * 2**-8).all()

    @ranks(2)
    def test_persistent_buffers_keep_the_addresses_of_codes_and_scales():
        policy = Float8Policy(torch.bfloat16, torch.float32, weight_factory=float8_weight)
        net = nn.Sequential(*(nn.Linear(256, 256) for _ in range(2)))
        for module in (*net, net):
            fully_shard(module, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
        net(torch.ones(1, 256)).sum().backward()
        net.set_persistent_buffers(True)
        addresses = []
        for _ in range(3):
            net(torch.ones(1, 256)).sum().backward()
            net[0].unshard()
            planes = net[0].weight.planes
            addresses.append((planes.codes.data_ptr(), planes.scales.data_ptr()))
            net[0].reshard()
        assert len(set(addresses)) == 1, addresses

    @ranks(2)
    def test_what_is_no_parameter_is_an_error_on_all_ranks():
        for made, text in ((lambda planes: planes.scales, "got ((2, 2), torch.float32)"), (lambda planes: 1, "got int")):
            policy = Float8Policy(torch.bfloat16, torch.float32, weight_factory=made)
            net = fully_shard(nn.Linear(256, 256), mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
            error = error_of(net, torch.ones(1, 256))
            assert "weight_factory must return a tensor of ((256, 256), torch.bfloat16)" in error and text in error, error
        policy = Float8Policy(torch.bfloat16, torch.float32, weight_factory=lambda planes: planes.dequantized())
        net = fully_shard(nn.Linear(256, 256), mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
        assert "must return a tensor that holds planes.codes" in error_of(net, torch.ones(1, 256))
        assert "must be a function" in error_of(Float8Policy, torch.bfloat16, weight_factory="codes")

    @ranks(1)
    def test_a_weight_acts_as_its_values_and_cannot_be_written():
        scales = torch.tensor([[0.5, 2.0]])
        codes = torch.arange(256.0).view(2, 128).to(torch.float8_e4m3fn).view(1, 256).expand(2, 256).contiguous()
        weight = float8_weight(Float8Planes(codes, scales, (128, 128), torch.float32))
        values = weight.planes.dequantized()
        assert torch.equal(values[:, :128], 0.5 * codes[:, :128].float())
        assert torch.equal(weight + 0, values) and torch.equal(weight.t() @ weight, values.t() @ values)
        for left, right in ((weight, values), (weight, weight)):  # As an input of F.linear, it is its values, too.
            assert torch.equal(F.linear(left, right), values @ values.t())
        assert torch.equal(weight[1], values[1]) and weight.sum() == values.sum() and weight.shape == (2, 256)
        with torch.autocast(DEVICE, torch.bfloat16):
            assert F.linear(torch.ones(1, 256), weight).dtype == torch.bfloat16
        for write in (weight.zero_, lambda: weight.add_(1), lambda: weight.copy_(values), lambda: torch.nn.init.zeros_(weight)):
            assert "would write to a Float8Weight, an all-gathered parameter that holds codes" in error_of(write)
        assert repr(weight) == "Float8Weight(shape=(2, 256), dtype=torch.float32, tile=(128, 128))"
