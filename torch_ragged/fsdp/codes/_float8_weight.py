"""Float8Weight: a tensor that holds 8-bit codes and computes as its dequantized values."""

from __future__ import annotations

import contextvars
import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from torch_ragged._kernels import float8
from torch_ragged._kernels.tiles import LARGEST, SMALLEST, TileTable
from torch_ragged._register._torch import (
    as_plain_tensors,
    backward_id,
    functorch_is_active,
    is_autocast,
    no_dispatch,
    recomputation_ends,
)
from torch_ragged.fsdp.codes._float8_planes import Float8Planes
from torch_ragged.fsdp.grads._weight_gradient import GradientTarget, weight_gradient
from torch_ragged.tensor._ownership import row_major

__all__ = ["Float8Weight", "float4_weight", "float8_matmul_weight", "float8_weight"]

_ALIAS_OPS = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
_MULTIPLE = 16  # Products of codes take matrices whose sizes are multiples of it.
_SCALES_MULTIPLE = 4  # On Hopper, the columns of scales begin at multiples of 16 bytes.


def float8_weight(planes: Float8Planes) -> Float8Weight:
    """A ``weight_factory`` of ``Float8Policy``: the module holds the codes, and each use of them dequantizes them::

        policy = Float8Policy(param_dtype=torch.bfloat16, weight_factory=float8_weight)
        fully_shard(block, mp_policy=policy)

    Losses and gradients have the bits that ``Float8Policy`` gives without it. Of ``F.linear``, autograd keeps the codes, not
    the values. Any other operation dequantizes its operand, as does ``F.linear`` under autocast, compilation and functorch:
    what it keeps for backward is in ``param_dtype``. Writing to the weight raises ``RuntimeError``. No communication.
    """
    return Float8Weight(planes)


def float8_matmul_weight(planes: Float8Planes) -> Float8Weight:
    """The same, and ``F.linear`` multiplies the codes where it can: on a Hopper GPU, and on a CPU.

    Inputs are quantized to float8 e4m3 with a scale for each row and each ``tile[1]`` columns; products are summed in float32.
    Gradients are computed from dequantized weights and unquantized inputs.

    It can if the weight is one matrix, the number of its columns is a multiple of the tile's width, that of its rows a multiple
    of 16, and the input has the dtype of the weight; on Hopper with tiles of 128 x 128 or 1 x 128, and CUDA 12.9 or later. On
    other GPUs, and otherwise, it dequantizes. On a CPU, each column of tiles takes a product of its own.
    """
    return Float8Weight(planes, multiplies_codes=True)


def float4_weight(planes: Float8Planes) -> Float8Weight:
    """The ``weight_factory`` of ``Float4Policy``: :func:`float8_weight` for codes of 4 bits. No communication."""
    return float8_weight(planes)


class Float8Weight(torch.Tensor):
    """A parameter whose values are the codes of ``planes``, of 8 or 4 bits, times their scales. It cannot be written to.

    Attributes:
        codes, scales: those of ``planes``; ``backward_codes`` and ``backward_scales``, if backward has others.
        planes: what it holds.
        multiplies_codes: whether ``F.linear`` quantizes its input and multiplies codes.
        gradient_target: where ``F.linear`` writes the gradient; None: autograd gets it.
    """

    planes: Float8Planes
    codes: torch.Tensor
    scales: torch.Tensor
    backward_codes: torch.Tensor
    backward_scales: torch.Tensor
    multiplies_codes: bool
    gradient_target: GradientTarget | None = None

    @staticmethod
    def __new__(cls, planes: Float8Planes, multiplies_codes: bool = False) -> Float8Weight:
        strides, device = row_major(planes.shape), planes.codes.device
        self = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, planes.shape, strides=strides, dtype=planes.dtype, device=device, requires_grad=False
        )
        self.planes, self.multiplies_codes = planes, multiplies_codes
        self.codes, self.scales = planes.codes, planes.scales
        if planes.backward is not None:
            self.backward_codes, self.backward_scales = planes.backward.codes, planes.backward.scales
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    @property
    def parameter(self) -> Float8Weight:
        """Itself: see ``weight_gradient``."""
        return self

    def planes_of(self, in_backward: bool) -> Float8Planes:
        """The planes of a phase. Raise a RuntimeError if they were not all-gathered."""
        if self.planes.backward is None:
            return self.planes
        planes = self.planes.backward if in_backward else self.planes
        if not planes.has_memory:
            raise RuntimeError(
                f"a {self._name} of shape {tuple(self.shape)} has no planes of {'backward' if in_backward else 'forward'}: "
                "use it inside of its fully_shard module, which must unshard in backward; if activations are recomputed "
                "there, or a function of yours uses the weight in its backward, give the policy recomputes=True"
            )
        return planes

    @property
    def _name(self) -> str:
        return type(self.planes).__name__.replace("Planes", "Weight")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{self._name}(shape={tuple(self.shape)}, dtype={self.dtype}, tile={self.planes.tile})"

    def __tensor_flatten__(self) -> Any:
        planes, backward = self.planes, self.planes.backward
        forms = [(type(each), each.tile) for each in (planes, backward) if each is not None]
        names = ["codes", "scales", *(["backward_codes", "backward_scales"] if backward is not None else [])]
        return names, (forms, planes.dtype, self.multiplies_codes)

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> Float8Weight:
        forms, dtype, multiplies_codes = context
        planes = None
        for prefix, (kind, tile) in reversed(list(zip(("", "backward_"), forms))):
            planes = kind(parts[f"{prefix}codes"], parts[f"{prefix}scales"], tile, dtype, planes)
        return Float8Weight(planes, multiplies_codes)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        token = _called_in.set(backward_id())  # Calls by the program, in no backward pass or in this one.
        try:
            with as_plain_tensors():
                if func is F.linear:
                    x, weight, bias = _operands(*args, **(kwargs or {}))
                    if _is_linear(x, weight, bias):
                        # Without a record, nothing is saved, and a recomputation must not end there.
                        operands = [operand for operand in (x, weight, bias) if operand is not None]
                        is_recorded = torch.is_grad_enabled() and any(operand.requires_grad for operand in operands)
                        return _Linear.apply(x, weight, bias) if is_recorded else _float8_linear(x, weight, bias)
                return func(*args, **(kwargs or {}))
        finally:
            _called_in.reset(token)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _ALIAS_OPS:
            return type(args[0])(args[0].planes, args[0].multiplies_codes)
        for argument, value in zip(func._schema.arguments, args):
            if argument.is_write and isinstance(value, Float8Weight):
                raise RuntimeError(
                    f"{func} would write to a {value._name}, an all-gathered parameter that holds codes: write to the "
                    "sharded parameter, after backward or after reshard()"
                )

        # Formulas of autograd come here straight from its engine. A program's own call is forward, also if it is recomputed.
        in_backward = backward_id() not in (-1, _called_in.get())
        args, kwargs = pytree.tree_map_only(
            Float8Weight, lambda weight: weight.planes_of(in_backward).dequantized(), (args, kwargs or {})
        )
        return func(*args, **kwargs)


_called_in: contextvars.ContextVar[int] = contextvars.ContextVar("called_in", default=-1)


def _operands(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    """The operands of ``F.linear``, however they are given."""
    return input, weight, bias


def _is_linear(x: Any, weight: Any, bias: Any) -> bool:
    """Whether ``F.linear`` may become a :class:`_Linear`. Otherwise it is that of dequantized values, and torch's own."""
    if not isinstance(weight, Float8Weight) or isinstance(x, (DTensor, Float8Weight)) or torch.compiler.is_compiling():
        return False
    return not is_autocast() and not functorch_is_active() and forward_ad._current_level < 0


class _Linear(torch.autograd.Function):
    """``F.linear`` that keeps the weight itself. Its codes may be freed and all-gathered again before backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Float8Weight, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.weight, ctx.is_linear = weight, True
        ctx.save_for_backward(x)
        if recomputation_ends(saves=1):
            with no_dispatch():  # Nothing reads it.
                return x.new_empty(1).expand(*x.shape[:-1], len(weight))
        return _float8_linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (x,), weight = ctx.saved_tensors, ctx.weight
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        rows = gradient.reshape(-1, gradient.shape[-1])
        of_x = of_weight = None
        if needs_x and torch.is_grad_enabled():  # In a double backward, as a function of the weight, too.
            with as_plain_tensors():  # No call of the program.
                of_x = gradient @ weight
        elif needs_x:
            of_x = gradient @ weight.planes_of(in_backward=True).dequantized()
        if needs_weight:
            of_weight = weight_gradient(ctx, x.reshape(-1, x.shape[-1]), rows, torch.mm, torch.Tensor.addmm_)
        return of_x, of_weight, rows.sum(0) if needs_bias else None


def _float8_linear(x: torch.Tensor, weight: Float8Weight, bias: torch.Tensor | None) -> torch.Tensor:
    planes = weight.planes_of(in_backward=False)
    if weight.multiplies_codes and _can_multiply(x, planes):
        product = _product_on_hopper if x.is_cuda else _product_of_codes
        return product(x.reshape(-1, x.shape[-1]), planes, bias).view(*x.shape[:-1], len(planes.codes))
    return F.linear(x, planes.dequantized(), bias)


def _can_multiply(x: torch.Tensor, planes: Float8Planes) -> bool:
    """Whether there is a product of codes. Not for operands that do not fit: ``F.linear`` raises its own error for them."""
    codes, width = planes.codes, planes.tile[1]
    if codes.dtype != torch.float8_e4m3fn:
        return False
    if codes.ndim != 2 or codes.shape[0] % _MULTIPLE or codes.shape[1] % width or width % _MULTIPLE or not x.numel():
        return False
    if x.dtype != planes.dtype or x.shape[-1] != codes.shape[1] or x.device != codes.device:
        return False
    return x.device.type == "cpu" or (planes.tile in float8.TILES and _has_block_scales(x.device))


@functools.cache
def _has_block_scales(device: torch.device) -> bool:
    """Whether ``F.scaled_mm`` takes a scale for each row, or each 128 rows, and 128 columns: by cuBLASLt 12.9, on Hopper."""
    if device.type != "cuda" or torch.version.cuda is None or not hasattr(F, "scaled_mm"):
        return False
    return torch.cuda.get_device_capability(device) == (9, 0) and tuple(map(int, torch.version.cuda.split("."))) >= (12, 9)


def _product_on_hopper(x: torch.Tensor, planes: Float8Planes, bias: torch.Tensor | None) -> torch.Tensor:
    """One product, with the scales of both operands."""
    rows, (columns, across) = len(x), (x.shape[1], planes.scales.shape[1])
    padded = -(-rows // _SCALES_MULTIPLE) * _SCALES_MULTIPLE
    if padded != rows:
        x = F.pad(x, (0, 0, 0, padded - rows))
    quantized = torch.empty(padded, columns, dtype=torch.float8_e4m3fn, device=x.device)
    of_x = torch.empty(padded, across, device=x.device)
    table = TileTable.of_one((1, padded, columns), (1, 128), x.device)
    float8.quantize(x.contiguous().view(-1), quantized.view(torch.uint8).view(-1), table, of_x.view(-1))
    # Columns of scales are contiguous; of squares, their number is a multiple of four.
    is_square = planes.tile[0] > 1
    if is_square:
        of_weight = F.pad(planes.scales, (0, -across % _SCALES_MULTIPLE)).t()
    else:
        of_weight = planes.scales.t().clone(memory_format=torch.contiguous_format).t()
    # Not in bfloat16: such results were off by up to 1.1 % of the sum of magnitudes (300 rows, H200, CUDA 13.0).
    product = F.scaled_mm(
        quantized,
        planes.codes.t(),
        of_x.t().contiguous().t(),
        F.ScalingType.BlockWise1x128,
        of_weight,
        F.ScalingType.BlockWise128x128 if is_square else F.ScalingType.BlockWise1x128,
        output_dtype=torch.float32,
    )[:rows]
    if bias is None:
        return product.to(planes.dtype)
    return torch.add(product, bias, out=torch.empty_like(product, dtype=planes.dtype))


def _product_of_codes(x: torch.Tensor, planes: Float8Planes, bias: torch.Tensor | None) -> torch.Tensor:
    """One product of codes for each column of tiles: scales change from one to the next."""
    (height, width), codes = planes.tile, planes.codes
    blocks = x.float().view(len(x), -1, width)
    largest = blocks.abs().amax(2, keepdim=True)
    scale = torch.where(largest < SMALLEST, 0.0, largest / LARGEST)
    quantized = (blocks * torch.where(scale == 0, 0.0, 1 / scale)).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    total, one = torch.zeros(len(x), len(codes), device=x.device), torch.ones((), device=x.device)
    for number in range(blocks.shape[1]):
        # Products of plain codes: the CPU has no scales of rows and columns.
        part = torch._scaled_mm(
            quantized[:, number].contiguous(),
            codes[:, number * width : (number + 1) * width].contiguous().t(),
            scale_a=one,
            scale_b=one,
            out_dtype=torch.float32,
        )
        of_rows = planes.scales[:, number].repeat_interleave(height)[: len(codes)]
        total.addcmul_(part.mul_(of_rows), scale[:, number])
    if bias is not None:
        total += bias
    return total.to(planes.dtype)
