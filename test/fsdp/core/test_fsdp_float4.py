"""Matrices that are all-gathered as 4-bit codes: the values of the whole parameter's tiles, on any number of ranks."""

import unittest
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import error_of, ranks
from tested_device import DEVICE
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from torch_ragged._kernels import float4
from torch_ragged._kernels.tiles import TileRun, TileTable
from torch_ragged.fsdp import Float4Planes, Float4Policy, Float8Weight, buffer_layouts, float4_weight, fully_shard
from torch_ragged.granularity import blocks, rows

POLICY = Float4Policy(torch.bfloat16, torch.float32)


def rounded(value):
    """A whole parameter, as one device quantizes and dequantizes it."""
    *stack, height, width = value.shape
    run = TileRun(0, 0, 0, (torch.Size(stack).numel(), height, width))
    table, flat = TileTable([run], float4.TILE), value.detach().reshape(-1)
    codes, scales = torch.empty(run.numel // 2, dtype=torch.uint8), torch.empty(run.numel // 32, dtype=torch.int8)
    float4.quantize(flat, codes, table, scales)
    back = torch.empty_like(flat)
    float4.dequantize(back, codes, table, scales)
    return back.view_as(value)


class Net(nn.Module):
    """Rows of several tiles, a stack of matrices, a matrix that has no whole tiles, and vectors."""

    def __init__(self):
        super().__init__()
        self.inner, self.odd = nn.Linear(96, 70), nn.Linear(70, 64, bias=False)
        self.experts = nn.Parameter(torch.randn(3, 5, 64) / 8)

    def forward(self, x):
        return torch.tanh(self.odd(torch.tanh(self.inner(x)))) @ self.experts.flatten(0, 1).t()


def build(policy=POLICY, mesh=None, **knobs):
    torch.manual_seed(3)
    net = Net()
    return fully_shard(net, mesh=mesh or init_device_mesh("cpu", (dist.get_world_size(),)), mp_policy=policy, **knobs)


def data(step):
    return torch.randn(4, 96, generator=torch.Generator().manual_seed(step))


def trained(steps=3, recomputes=False, **knobs):
    """The outputs of a few steps, and the whole parameters after them. All ranks have the same data."""
    net = build(**knobs)
    if recomputes:
        forward = net.forward
        net.forward = partial(checkpoint, forward, use_reentrant=False)
    optimizer, outputs = torch.optim.SGD(net.parameters(), lr=0.1), []
    for step in range(steps):
        output = net(data(step))
        outputs.append(output.detach())
        output.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return outputs, [param.full_tensor().detach() for param in net.parameters()]


def by_hand(steps=3):
    """The same in one process: copies of the parameters, quantized and dequantized, compute; the parameters are stepped."""
    torch.manual_seed(3)
    net, outputs = Net(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(steps):
        copies = {
            name: (param if name in ("odd.weight", "inner.bias") else rounded(param)).detach().bfloat16().requires_grad_()
            for name, param in net.named_parameters()
        }
        output = torch.func.functional_call(net, copies, (data(step).bfloat16(),))
        outputs.append(output.detach())
        output.float().square().mean().backward()
        for name, param in net.named_parameters():
            param.grad = copies[name].grad.float()
        optimizer.step()
    return outputs, [param.detach() for param in net.parameters()]


def assert_same(one, other):
    for mine, theirs in zip(one, other, strict=True):
        assert all(torch.equal(p, q) for p, q in zip(mine, theirs, strict=True))


class BitsTest(unittest.TestCase):
    @ranks(2)
    def test_training_has_the_numbers_of_one_process():
        expected = by_hand()
        assert_same(trained(), expected)
        assert_same(trained(recomputes=True), expected)
        assert_same(trained(reshard_after_forward=False), expected)

    @ranks(4)
    def test_cuts_and_replicas_change_no_bit():
        expected = by_hand()
        assert_same(trained(), expected)
        assert_same(trained(mesh=init_device_mesh("cpu", (2, 2))), expected)
        assert_same(trained(orig_param_policy=lambda fqn, param: rows(2) if param.ndim > 1 else None), expected)
        assert_same(trained(reshard_after_forward=2), expected)

    @ranks(4)
    def test_tensor_parallelism_quantizes_this_ranks_piece():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))
        wholes = [rounded(net[0].weight).bfloat16(), rounded(net[2].weight).bfloat16()]
        biases = [net[0].bias.detach().bfloat16(), net[2].bias.detach().bfloat16()]
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(net, mesh=mesh["dp"], mp_policy=POLICY)
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
        for _ in range(2):  # The second time, with parameters that a step has changed.
            expected = F.linear(torch.tanh(F.linear(x, wholes[0], biases[0])), wholes[1], biases[1])
            torch.testing.assert_close(net(x), expected, rtol=0.02, atol=0.02)
            net.reshard()
            with torch.no_grad():
                for param in net.parameters():
                    param.neg_()
            wholes, biases = [-whole for whole in wholes], [-bias for bias in biases]


class PlanesTest(unittest.TestCase):
    @ranks(2)
    def test_an_all_gather_sends_half_a_byte_and_a_scale():
        net = build()
        gathered = {}
        for group in net._get_fsdp_state().groups:
            names = ", ".join(param.fqn for param in group.params)
            gathered[names] = sum(buffer.nbytes for buffer in group.buffers()["gathered"])
        # 96 x 70 and 15 x 64 elements in rows of whole tiles; the rest in bfloat16.
        assert set(gathered) == {"experts, inner.weight", "inner.bias, odd.weight"}, gathered
        numel, layout = (
            96 * 70 + 15 * 64,
            next(each for each in buffer_layouts(net).values() if each.tensors[0].name == "experts"),
        )
        scales = gathered["experts, inner.weight"] - layout.numel // 2
        assert numel // 32 <= scales <= numel // 32 + 2 * 128 + 2 * 4, (gathered, layout)
        assert layout.padding_numel < 2 * 256 and layout.alignment == 256, layout

    @ranks(2)
    def test_a_factory_gets_planes_in_torchs_dtypes():
        seen = []

        def factory(planes):
            seen.append(planes)
            return float4_weight(planes)

        net = build(Float4Policy(torch.bfloat16, weight_factory=factory))
        whole = {name: param.full_tensor().detach() for name, param in net.named_parameters()}
        net(data(0)).sum().backward()
        assert [type(planes) for planes in seen] == [Float4Planes] * 2
        assert sorted((tuple(planes.codes.shape), tuple(planes.scales.shape)) for planes in seen) == [
            ((3, 5, 32), (3, 5, 2)),
            ((70, 48), (70, 3)),
        ]
        for planes in seen:
            assert (planes.codes.dtype, planes.scales.dtype) == (torch.float4_e2m1fn_x2, torch.float8_e8m0fnu)
        net.unshard()
        weight = net.inner.weight
        assert isinstance(weight, Float8Weight) and weight.shape == (70, 96) and weight.dtype == torch.bfloat16
        assert repr(weight) == "Float4Weight(shape=(70, 96), dtype=torch.bfloat16, tile=(1, 32))"
        assert torch.equal(weight + 0, rounded(whole["inner.weight"]).bfloat16())
        with torch.no_grad():
            assert "would write to a Float4Weight, an all-gathered parameter that holds codes" in error_of(weight.zero_)

    @ranks(2)
    def test_persistent_buffers_keep_their_addresses():
        net, addresses = build(), []
        net(data(0)).sum().backward()
        net.set_persistent_buffers(True)
        for _ in range(3):
            net(data(0)).sum().backward()
            net.unshard()
            planes = net.inner.weight.planes
            addresses.append((planes.codes.data_ptr(), planes.scales.data_ptr()))
            net.reshard()
        assert len(set(addresses)) == 1, addresses

    @unittest.skipUnless(DEVICE == "cpu", "a forward on a device has other rounding")
    @ranks(1)
    def test_one_rank_and_other_dtypes():
        assert_same(trained(), by_hand())
        for dtype in (torch.float32, torch.float16):
            net = build(Float4Policy(dtype))
            assert net(data(0).to(dtype)).dtype == dtype


class WeightTest(unittest.TestCase):
    @ranks(1)
    def test_a_weight_acts_as_its_values_in_derivatives_and_compiled_code():
        codes = torch.arange(64 * 32).to(torch.uint8).view(64, 32).view(torch.float4_e2m1fn_x2)
        scales = torch.full((64, 2), 120, dtype=torch.uint8).view(torch.float8_e8m0fnu)
        weight = nn.Parameter(float4_weight(Float4Planes(codes, scales, float4.TILE, torch.float32)))
        results = []
        for each in (weight, weight.planes.dequantized().requires_grad_()):
            x = torch.linspace(-1, 1, 128).view(2, 64).requires_grad_()
            (first,) = torch.autograd.grad(F.linear(x, each).pow(3).sum(), x, create_graph=True)
            second = torch.autograd.grad(first.square().sum(), (x, each))
            compiled = torch.compile(lambda x, each=each: F.linear(x, each), backend="eager", fullgraph=True)(x)
            results.append((first, *second, compiled))
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other)


class PolicyTest(unittest.TestCase):
    def test_wrong_policies_are_refused(self):
        assert "Float4Policy tile must be one of ((1, 32),)" in error_of(Float4Policy, tile=(1, 16))
        assert "Float4Policy weight_factory must be a function" in error_of(Float4Policy, weight_factory=None)
        assert "Float4Policy weight_factory must be a function" in error_of(Float4Policy, weight_factory=3)
        assert isinstance(Float4Policy(torch.bfloat16), MixedPrecisionPolicy)

    @ranks(2)
    def test_packed_layouts_cut_where_the_unpacked_ones_do():
        torch.manual_seed(0)
        for trial in range(40):
            shapes = [(int(torch.randint(1, 9, ())), 32 * int(torch.randint(1, 5, ()))) for _ in range(3)]
            net = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in shapes)
            unit = blocks(1 + trial % 3, 32)
            fully_shard(net, mesh=init_device_mesh("cpu", (2,)), mp_policy=POLICY, orig_param_policy=lambda *_, unit=unit: unit)
            for layout in buffer_layouts(net).values():
                if layout.alignment != 256:
                    continue
                packed = layout.packed(2)
                for index, tensor in enumerate(layout.tensors):
                    assert packed.tensors[index].shape == (*tensor.shape[:-1], tensor.shape[-1] // 2)
                    for rank in range(2):
                        halves = [2 * bound for bound in packed.local_range(index, rank)]
                        assert halves == list(layout.local_range(index, rank)), (layout, packed)
        odd = next(iter(buffer_layouts(fully_shard(nn.Linear(3, 3), mesh=init_device_mesh("cpu", (2,)))).values()))
        assert "must be multiples of 2 elements" in error_of(odd.packed, 2)
        assert "of shape (3, 3) in blocks of 1 cannot have 2 elements in each byte" in error_of(odd.tensors[0].packed, 2)


if __name__ == "__main__":
    unittest.main()
