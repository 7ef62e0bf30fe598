"""Float8Policy: matrices are gathered as 8-bit codes, the same on any number of ranks; training goes on as in bfloat16."""

import itertools
import math
import unittest

import pytest
import torch
from common import collectives_seen, error_of, fake_group, run_ranks
from float8_net import Net
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import Shard
from torch.distributed.tensor.debug import CommDebugMode

from torch_ragged._kernels import float8
from torch_ragged._kernels.tiles import TileRun, TileTable
from torch_ragged.fsdp import (
    HIERARCHICAL,
    ZERO2,
    Float4Policy,
    Float8Policy,
    blocks,
    elements,
    float8_weight,
    fully_shard,
    memory_report,
    monitor,
    plan_layout,
    rows,
    tensor,
)
from torch_ragged.fsdp._groups import named_groups
from torch_ragged.fsdp.codes._float8 import _SLICE_ALIGNMENT, Float8Encoding, keeps_tiles
from torch_ragged.granularity import TensorSpec

BFLOAT16 = Float8Policy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def by_twin(whole, tile, dtype):
    """A whole parameter quantized and dequantized, every tile by itself, in plain arithmetic."""
    result = torch.empty_like(whole, dtype=dtype)
    for out, matrix in zip(result.view(-1, *whole.shape[-2:]), whole.view(-1, *whole.shape[-2:])):
        for row in range(0, matrix.size(0), tile[0]):
            for column in range(0, matrix.size(1), tile[1]):
                part = (slice(row, row + tile[0]), slice(column, column + tile[1]))
                scale = matrix[part].abs().max() / 448
                codes = (matrix[part] * (1 / scale if scale else 0.0)).clamp(-448, 448).to(torch.float8_e4m3fn)
                out[part] = (codes.float() * scale).to(dtype)
    return result


def _net(seed=3):
    torch.manual_seed(seed)
    net = Net()
    with torch.no_grad():
        net.experts[0, :128, :128] = 0  # a tile of zeros
    return net


# --- values ---------------------------------------------------------------------------------------------------------


def test_every_code_and_its_bounds():
    """All 256 codes come back bitwise; errors stay within what the module's docstring says; special tiles as it says."""
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes.view(torch.float8_e4m3fn).float().nan_to_num(0)
    table = TileTable([TileRun(0, 0, 64, (1, 2, 128))], (128, 128))
    buffer = torch.zeros(260, dtype=torch.uint8)
    float8.quantize(values, buffer, table)
    back = torch.empty(256)
    float8.dequantize(back, buffer, table)
    assert torch.equal(back, values) and buffer.view(torch.float32)[64] == 1.0
    x = torch.randn(256) * torch.logspace(-8, 3, 256)
    float8.quantize(x, buffer, table)
    float8.dequantize(back, buffer, table)
    scale = buffer.view(torch.float32)[64]
    assert scale == x.abs().max() / 448
    assert bool(((back - x).abs() <= torch.maximum(x.abs() * 2**-4, scale * 2**-10) * (1 + 1e-6)).all())
    for special, expected in ((math.nan, math.nan), (math.inf, math.nan), (1e-31, 0.0)):
        x = torch.full((256,), 1e-32)
        x[5] = special
        float8.quantize(x, buffer, table)
        float8.dequantize(back, buffer, table)
        assert torch.equal(back.nan_to_num(7), torch.full((256,), expected).nan_to_num(7)), special


def test_each_element_is_in_one_run_of_one_rank():
    for shapes in (((5, 1),), ((7, 3),), ((4, 1), (3, 2, 5)), ((1, 1), (9, 1), (2, 2))):
        for ranks in (1, 2, 3, 4):
            specs = [TensorSpec(str(index), shape, (0,), shape[-1]) for index, shape in enumerate(shapes)]
            layout = plan_layout(specs, ranks)
            whole, encoding, scales = torch.zeros(layout.numel), Float8Encoding(layout, 0, (1, 128)), [0] * ranks
            for run in encoding._everything.runs:
                rank = run.values // layout.shard_numel
                # Scales lie behind the codes of their rank, without gaps.
                assert run.scales == (rank * encoding.slices.shard_numel + layout.shard_numel) // 4 + scales[rank]
                scales[rank] += math.prod(run.sizes[:2])
                whole[run.values : run.values + math.prod(run.sizes)] += 1
            for spec, offset in zip(layout.tensors, layout.offsets, strict=True):
                assert torch.equal(whole[offset : offset + spec.numel], torch.ones(spec.numel)), (shapes, ranks)
            assert whole.sum() == sum(spec.numel for spec in layout.tensors)
            assert 0 <= encoding.slices.shard_numel - (layout.shard_numel + 4 * max(scales)) < _SLICE_ALIGNMENT


def test_an_embedding_is_not_quantized_even_if_it_is_tied():
    embedding, head, norm = nn.Embedding(4, 2), nn.Linear(2, 4, bias=False), nn.LayerNorm(2)
    policy = Float8Policy()
    for places, expected in (
        ([(embedding, "weight"), (head, "weight")], elements()),
        ([(head, "weight"), (embedding, "weight")], elements()),
        ([(head, "weight")], blocks(128, 128)),
    ):
        assert policy.default_granularity(head.weight, places) == expected
    assert policy.default_granularity(norm.weight, [(norm, "weight")]) == elements()


@fake_group(2)
def test_parameters_of_other_dtypes_are_gathered_as_they_are():
    for dtype, quantizes in ((torch.float32, True), (torch.float16, True), (torch.float64, False)):
        model = fully_shard(
            nn.Linear(128, 256, bias=False, dtype=dtype), mesh=init_device_mesh("cpu", (2,)), mp_policy=BFLOAT16
        )
        (group,) = model._ragged_groups(recurse=True)
        assert isinstance(group.encoding, Float8Encoding) is quantizes, dtype
        assert not any(buffer.is_allocated for buffer in group.encoding.buffers())


@fake_group(2)
def test_a_policy_that_does_not_quantize_a_matrix_says_why():
    """An embedding is never named, nor a vector."""
    mesh, float4 = init_device_mesh("cpu", (2,)), Float4Policy(torch.bfloat16, torch.float32)
    cases = [
        (
            BFLOAT16,
            256,
            torch.float32,
            {"orig_param_policy": lambda name, param: rows(1)},
            "granularity cuts tiles of 128 x 128",
        ),
        (BFLOAT16, 256, torch.float32, {"shard_placement_fn": lambda param: Shard(0)}, "Shard(dim=0) cuts tiles"),
        (BFLOAT16, 256, torch.float64, {}, "torch.float64 is not quantized"),
        (float4, 72, torch.float32, {}, "72 columns are no multiple of 32"),
        (float4, 256, torch.float32, {}, None),
        (BFLOAT16, 256, torch.float32, {"orig_param_policy": lambda name, param: rows(128)}, None),
    ]
    case = unittest.TestCase()
    for policy, columns, dtype, options, text in cases:
        model = nn.Sequential(nn.Embedding(4, columns), nn.Linear(columns, 256)).to(dtype)
        with case.assertLogs("torch_ragged.fsdp", "DEBUG") if text else case.assertNoLogs("torch_ragged.fsdp") as logs:
            fully_shard(model, mesh=mesh, mp_policy=policy, **options)
        if text:
            (line,) = logs.output
            assert f"{type(policy).__name__} has no effect on 1.weight: " in line and text in line, line
    for layers, names in ((3, "0.weight, 1.weight, 2.weight: "), (4, "0.weight, 1.weight, 2.weight and 1 more: ")):
        model = nn.Sequential(*(nn.Linear(4, 4, dtype=torch.float64) for _ in range(layers)))
        with case.assertLogs("torch_ragged.fsdp", "DEBUG") as logs:
            fully_shard(model, mesh=mesh, mp_policy=BFLOAT16)
        (line,) = logs.output
        assert f"Float8Policy has no effect on {names}torch.float64 is not quantized" in line, line


def test_which_parameters_keep_their_tiles():
    """The rule of :func:`keeps_tiles` against every boundary that the granularity allows."""
    shapes = ((256, 3), (300, 2), (2, 256, 2), (3, 130, 2), (4, 64, 2))
    cuts = (elements(), rows(1), rows(64), rows(128), rows(256, within=0), rows(130), blocks(128, 128), tensor())
    cases = itertools.product(shapes, cuts, (1, 128))
    found = [0, 0]
    for shape, cut, height in cases:
        spec = cut.tensor_spec("w", shape)
        matrix, period = shape[-2] * shape[-1], spec.period or spec.numel
        edges = [x for x in range(spec.numel) if x % period % spec.block == 0]
        legal = all(x % matrix % (height * shape[-1]) == 0 for x in edges)
        assert keeps_tiles(spec, height) == legal, (shape, cut.text, height)
        found[legal] += 1
    assert min(found) > 10, found
    # Two segments of 2 columns: the rows of each, and where it may be cut. Tiles are counted from the start of the matrix.
    for parts, legal in (
        (((256, tensor()), (256, rows(128))), True),
        (((256, rows(128)), (128, rows(64))), False),
        (((64, tensor()), (256, rows(128))), False),
    ):
        fused = [cut.tensor_spec("s", (height, 2)) for height, cut in parts]
        spec = TensorSpec.fused("w", (sum(height for height, _ in parts), 2), fused)
        assert spec.segments and keeps_tiles(spec, 128) == legal, parts
    assert not keeps_tiles(tensor().tensor_spec("b", (256,)), 1) and not keeps_tiles(TensorSpec("e", (0, 4), (0,), 4), 1)


# --- gathered parameters --------------------------------------------------------------------------------------------


def _gathered(mesh_shape, **options):
    """Names of the quantized parameters, and all gathered ones."""
    net = fully_shard(_net(), mesh=init_device_mesh("cpu", mesh_shape), **options)
    groups = named_groups(net).values()
    quantized = {param.fqn for group in groups if isinstance(group.encoding, Float8Encoding) for param in group.params}
    net.unshard()
    values = {name: param.detach().clone() for name, param in net.named_parameters()}
    net.reshard()
    held = [buffer.resident_nbytes for group in groups for buffer in group.buffers()["gathered"]]
    assert not any(held), held
    return quantized, values


def _check_values(mesh_shape, options, expected):
    policy = options["mp_policy"]
    quantized, values = _gathered(mesh_shape, **options)
    assert quantized == expected
    for name, param in _net().named_parameters():
        dtype = policy.param_dtype or param.dtype
        wanted = by_twin(param.detach(), policy.tile, dtype) if name in expected else param.detach().to(dtype)
        assert values[name].dtype == dtype and torch.equal(values[name], wanted), name


def _check_ranks(mesh_shape):
    matrices = {"inner.weight", "experts", "head.weight"}
    _check_values(mesh_shape, {"mp_policy": BFLOAT16}, matrices)
    rowwise = {"mp_policy": Float8Policy(param_dtype=torch.bfloat16, tile=(1, 128)), "orig_param_policy": lambda fqn, p: rows()}
    _check_values(mesh_shape, rowwise, matrices | {"embedding.weight"})
    chosen = {"mp_policy": Float8Policy(), "orig_param_policy": lambda fqn, p: blocks(128, 128) if fqn == "experts" else None}
    _check_values(mesh_shape, chosen, {"experts"})
    whole = {"mp_policy": BFLOAT16, "orig_param_policy": lambda fqn, p: tensor() if fqn == "inner.weight" else elements()}
    _check_values(mesh_shape, {**whole, "offload_policy": CPUOffloadPolicy(pin_memory=False)}, {"inner.weight"})


@pytest.mark.parametrize("mesh_shape", [(3,), (2, 2)])
def test_the_same_values_on_any_number_of_ranks(mesh_shape):
    """Those of the whole parameter, where ranks have no tile at all too (three ranks, one matrix)."""
    run_ranks(math.prod(mesh_shape), _check_ranks, mesh_shape)


@pytest.mark.slow
@pytest.mark.parametrize("mesh_shape", [(1,), (2,), (8,)])
def test_the_same_values_on_any_other_number_of_ranks(mesh_shape):
    run_ranks(math.prod(mesh_shape), _check_ranks, mesh_shape)


@fake_group(2)
def test_what_is_not_used_has_no_memory():
    """Nor has an all-gather that nothing waits for."""
    codes = 256 * 256
    for factory, unsharded in ((None, 2 * codes), (float8_weight, codes + 4 * 4)):  # In bfloat16; and with 4 scales.
        policy = Float8Policy(torch.bfloat16, weight_factory=factory)
        model = fully_shard(nn.Linear(256, 256, bias=False), mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
        held = [memory_report(model).total.gathered]
        model.unshard(async_op=True)
        assert memory_report(model).total.gathered > codes
        model.reshard()
        held.append(memory_report(model).total.gathered)
        model.unshard()
        held.append(memory_report(model).total.gathered)
        assert held == [0, 0, unsharded], (factory, held)


# --- training -------------------------------------------------------------------------------------------------------


def _train(policy, steps, **options):
    net = _net()
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(net.inner, mesh=mesh, mp_policy=policy, **options)
    fully_shard(net, mesh=mesh, mp_policy=policy, **options)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    tokens = torch.arange(80).view(4, 20) * 7 % 40
    losses = []
    for _ in range(steps):
        loss = nn.functional.cross_entropy(net(tokens).flatten(0, 1).float(), tokens.roll(1, 1).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return net, losses


def _check_training():
    _, plain = _train(MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32), 25)
    net, losses = _train(BFLOAT16, 25)
    assert losses[-1] < 0.3 * losses[0] and abs(losses[-1] - plain[-1]) < 0.1 * plain[0], (plain, losses)
    assert losses != plain
    _, kept = _train(BFLOAT16, 3, reshard_after_forward=2)
    assert kept == losses[:3]
    tokens = torch.zeros(1, 2, dtype=torch.int64)
    with CommDebugMode() as mode:
        net(tokens).sum().backward()
    # Codes of inner and of the rest; the bias and the embedding in bfloat16: in forward, and inner's again in backward.
    assert collectives_seen(mode) == (6, 4), mode.get_comm_counts()


def test_trains_as_in_bfloat16():
    run_ranks(2, _check_training)


def _check_memory():
    """Half the bytes are gathered, and nothing of them stays; test_fsdp_monitor has the peak of a step."""
    net, _ = _train(BFLOAT16, 1)
    groups = named_groups(net)
    coded = [group for group in groups.values() if isinstance(group.encoding, Float8Encoding)]
    assert len(coded) == 2 and len(groups) == 4
    for group in coded:
        assert group.layout.numel < group.encoding.codes.nbytes < 0.52 * group.encoding.buffer.nbytes
        assert [buffer.resident_nbytes for buffer in group.buffers()["gathered"]] == [0, 0]
    with monitor(net) as watch, torch.no_grad():
        net(torch.zeros(1, 2, dtype=torch.int64))
        row = watch.step()
    plain = sum(group.encoding.buffer.nbytes for group in groups.values() if group not in coded)
    assert row["all_gather_bytes"] == plain + sum(group.encoding.codes.nbytes for group in coded), row


def test_half_the_bytes_are_gathered():
    run_ranks(2, _check_memory)


# --- errors ---------------------------------------------------------------------------------------------------------


def _check_errors():
    mesh = init_device_mesh("cpu", (2,))
    for placements, where in ((ZERO2, mesh), (HIERARCHICAL, init_device_mesh("cpu", (2, 1)))):
        text = error_of(fully_shard, _net(), mesh=where, mp_policy=BFLOAT16, placements=placements)
        assert text.startswith("ValueError: Float8Policy does not support"), text
    policy = BFLOAT16 if mesh.get_rank() else Float8Policy(torch.bfloat16, torch.float32, tile=(1, 128))
    text = error_of(fully_shard, _net(), mesh=mesh, mp_policy=policy)
    assert text.startswith("ValueError: fully_shard was called differently on different ranks") and "(1, 128)" in text, text


def test_errors_are_raised_on_every_rank():
    assert error_of(Float8Policy, tile=(64, 64)).startswith("ValueError: Float8Policy tile must be one of")
    assert "param_dtype" in error_of(Float8Policy, torch.float64)
    assert set(Float8Policy().terms.needs.values()) == {
        ": leave weights out",
        ", which keeps parameters gathered: use ZERO3 or HSDP",
    }
    run_ranks(2, _check_errors)


def _losses(choose):
    """Of three steps, with what ``choose`` does to the model first."""
    net = _net()
    mesh = init_device_mesh("cpu", (2,))
    for layer in (net.inner, net.head):
        fully_shard(layer, mesh=mesh, mp_policy=BFLOAT16)
    fully_shard(net, mesh=mesh, mp_policy=BFLOAT16)
    choose(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        loss = net(torch.arange(8).view(2, 4) + step).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    places = [buffer.flat.data_ptr() for group in named_groups(net).values() for buffer in group.buffers()["gathered"]]
    return losses, len(set(places))


def _check_other_collectives():
    usual, _ = _losses(lambda net: None)
    persistent, places = _losses(lambda net: net.set_persistent_buffers())
    assert persistent == usual and places > 1, (persistent, usual, places)
    assert _losses(lambda net: net.set_collectives("copy_engine"))[0] == usual


def test_persistent_buffers_and_other_collectives_change_no_bit():
    run_ranks(2, _check_other_collectives)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
