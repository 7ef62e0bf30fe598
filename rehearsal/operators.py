"""Gives torch's operators on "cuda" tensors the kernels of the CPU, when torch is imported in a rehearsal.

It does not replace what launches nothing: allocation, views, copies by memcpy, streams and events stay torch's own.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

BUILD = Path(__file__).parent / "build"

KEPT = frozenset(
    "empty.memory_format empty_strided resize_ set_ set_.source_Tensor set_.source_Storage_storage_offset "
    "set_.source_Storage is_set_to is_pinned _pin_memory record_stream _local_scalar_dense _copy_from "
    "_copy_from_and_resize _efficientzerotensor _has_same_storage_numel copy_ _fused_sdp_choice resize_as_ "
    "_record_function_enter _storage_size native_layer_norm_backward".split()
)
"""Operators whose CUDA kernels launch nothing, or that have a kernel of their own in operators.cpp."""


def is_view(schema: torch._C.FunctionSchema) -> bool:
    """Whether an output shares the memory of an input that the operator does not write."""
    return any(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns)


def is_null() -> bool:
    """Whether the device runs nothing."""
    return os.environ.get("REHEARSAL_NULL") == "1"


def replaced() -> list[str]:
    """The operators of ATen that get another kernel, of those with a kernel for CUDA: the CPU's, or none on the null device."""
    kept, needed = (KEPT - {"native_layer_norm_backward"}, "Meta") if is_null() else (KEPT, "CPU")
    names = []
    for full in torch._C._dispatch_get_registrations_for_dispatch_key("CUDA"):
        namespace, _, name = full.partition("::")
        operator, _, overload = name.partition(".")
        if namespace != "aten" or name in kept or "nested" in name or "sparse" in name:
            continue
        schema = torch._C._get_schema(full.partition(".")[0], overload)
        if not is_view(schema) and torch._C._dispatch_has_computed_kernel_for_dispatch_key(full, needed):
            names.append(name)
    return names


def norm_backward(
    grad: torch.Tensor,
    input: torch.Tensor,
    shape: list[int],
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    mask: list[bool],
) -> list[torch.Tensor | None]:
    """The gradients of the input, the weight and the bias of a LayerNorm, or of an RMSNorm if there is no mean."""
    wide, dims = grad.to(rstd.dtype), list(range(input.dim() - len(shape), input.dim()))
    normalized = (input.to(rstd.dtype) if mean is None else input.to(rstd.dtype) - mean) * rstd
    scaled = wide if weight is None else wide * weight
    inner = scaled - normalized * (scaled * normalized).mean(dims, keepdim=True)
    if mean is not None:
        inner = inner - scaled.mean(dims, keepdim=True)
    outer = list(range(dims[0]))
    sums = [wide * normalized if mask[1] else None, wide if mask[-1] and mean is not None else None]
    dtype = input.dtype if weight is None else weight.dtype
    of_parameters = [None if each is None else (each.sum(outer) if outer else each).to(dtype) for each in sums]
    return [(rstd * inner).to(input.dtype) if mask[0] else None, *of_parameters]


def rms_norm_backward(grad: Any, input: Any, shape: Any, rstd: Any, weight: Any, mask: Any) -> Any:
    """The CPU has no fused kernel of it."""
    return tuple(norm_backward(grad, input, shape, None, rstd, weight, mask)[:2])


def layer_norm_backward(grad: Any, input: Any, shape: Any, mean: Any, rstd: Any, weight: Any, bias: Any, mask: Any) -> Any:
    """The CPU's kernel does not take statistics that are wider than the input, as those of CUDA's forward are."""
    return tuple(norm_backward(grad, input, shape, mean, rstd, weight, mask))


def lstm_cell(input_gates: Any, hidden_gates: Any, cx: Any, input_bias: Any, hidden_bias: Any) -> tuple[torch.Tensor, ...]:
    """The hidden and the cell state, and the activated gates. The CPU has no fused kernel of it."""
    gates = input_gates + hidden_gates
    for bias in (input_bias, hidden_bias):
        gates = gates if bias is None else gates + bias
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


def lstm_cell_backward(grad_hy: Any, grad_cy: Any, cx: Any, cy: Any, workspace: Any, has_bias: bool) -> Any:
    """The gradients of the gates, the cell state and the bias."""
    if grad_hy is None and grad_cy is None:
        return None, None, None
    i, f, g, o = workspace.chunk(4, 1)
    tanh = cy.tanh()
    hy = torch.zeros_like(cy) if grad_hy is None else grad_hy
    cell = hy * o * (1 - tanh * tanh)
    cell = cell if grad_cy is None else cell + grad_cy
    parts = [cell * g * i * (1 - i), cell * cx * f * (1 - f), cell * i * (1 - g * g), hy * tanh * o * (1 - o)]
    gates = torch.cat(parts, 1)
    return gates, cell * f, gates.sum(0) if has_bias else None


_library = torch.library.Library("aten", "IMPL")


def install() -> None:
    """Replace the kernels. Called once per process, after torch is imported."""
    if str(BUILD / "libcudart") not in os.environ.get("LD_PRELOAD", ""):
        return
    torch.ops.load_library(BUILD / "operators.so")
    torch.ops.rehearsal.install(replaced())
    # The libraries behind these do not run here: torch then uses operators that the CPU has too.
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    if is_null():
        return  # It needs shapes only: flash attention stays.
    torch.backends.cuda.enable_flash_sdp(False)
    _library.impl("_fused_rms_norm_backward", rms_norm_backward, "CUDA")
    _library.impl("native_layer_norm_backward", layer_norm_backward, "CUDA")
    _library.impl("_thnn_fused_lstm_cell", lstm_cell, "CUDA")
    _library.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward, "CUDA")
