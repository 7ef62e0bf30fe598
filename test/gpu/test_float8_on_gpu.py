"""Products of float8 codes with block scales, on Hopper, against float64."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from torch_ragged._kernels import float8
from torch_ragged._kernels.tiles import TileRun, TileTable
from torch_ragged.fsdp import Float8Planes, float8_matmul_weight

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0) and hasattr(F, "scaled_mm")
pytestmark = pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU, and torch with F.scaled_mm")


def planes_of(values: torch.Tensor, tile: tuple[int, int], dtype: torch.dtype) -> Float8Planes:
    rows, columns = values.shape
    codes = torch.empty(rows, columns, dtype=torch.uint8, device="cuda")
    scales = torch.empty(-(-rows // tile[0]), -(-columns // tile[1]), device="cuda")
    table = TileTable([TileRun(0, 0, 0, (1, rows, columns))], tile)
    float8.quantize(values.view(-1), codes.view(-1), table, scales.view(-1))
    return Float8Planes(codes.view(torch.float8_e4m3fn), scales, tile, dtype)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """``x`` as codes with a scale per row and 128 columns, and back, in float64."""
    blocks = x.double().view(len(x), -1, 128)
    scale = (x.float().view(len(x), -1, 128).abs().amax(2, keepdim=True) / 448).double()
    codes = (blocks.float() * torch.where(scale == 0, 0.0, 1 / scale.float())).clamp(-448, 448)
    return (codes.to(torch.float8_e4m3fn).double() * scale).view(x.shape)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tile", float8.TILES)
@pytest.mark.parametrize("rows", [1, 7, 16, 300])
@pytest.mark.parametrize(("out", "inner"), [(128, 128), (272, 384), (512, 1152)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_of_codes_is_that_of_the_values(dtype, tile, rows, out, inner, has_bias):
    torch.manual_seed(0)
    spread = torch.logspace(-1, 1, out, device="cuda")[:, None]  # Wrong scales would be seen.
    planes = planes_of(torch.randn(out, inner, device="cuda") * spread, tile, dtype)
    x = (torch.randn(rows, inner, device="cuda") * torch.logspace(1, -1, inner, device="cuda")).to(dtype).requires_grad_()
    bias = torch.randn(out, device="cuda", dtype=dtype) if has_bias else None
    weight = float8_matmul_weight(planes)
    with mock.patch.object(F, "scaled_mm", wraps=F.scaled_mm) as product_of_codes:
        product = F.linear(x, weight, bias)
    product_of_codes.assert_called_once()
    values = planes.codes.double() * planes.scales.double().repeat_interleave(tile[0], 0)[:out].repeat_interleave(128, 1)
    exact = F.linear(rounded(x.detach()), values, None if bias is None else bias.double())
    most = F.linear(rounded(x.detach()).abs(), values.abs(), None if bias is None else bias.double().abs())
    assert product.dtype == dtype and product.shape == (rows, out)
    # Tensor cores add float8 products with 13 bits behind the point, and cuBLAS promotes the sums to float32.
    rounds = 0 if dtype == torch.float32 else 2**-8
    excess = ((product.double() - exact).abs() - most * 2**-9 - product.double().abs() * rounds) / most
    assert excess.max() < 0, (excess.max().item(), (dtype, tile, rows, out, inner, has_bias))
    (gradient,) = torch.autograd.grad(product, x, torch.ones_like(product))
    assert torch.equal(gradient, torch.ones_like(product) @ planes.dequantized())


def test_rows_of_zeros_and_of_nan():
    planes = planes_of(torch.randn(256, 256, device="cuda"), (128, 128), torch.bfloat16)
    x = torch.randn(8, 256, device="cuda", dtype=torch.bfloat16)
    x[1], x[2, 200] = 0.0, float("nan")
    product = F.linear(x, float8_matmul_weight(planes))
    assert not product[1].any() and product[2].isnan().all() and product[[0, 3]].isfinite().all()
