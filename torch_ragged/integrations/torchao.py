"""torchao: what its low-bit optimizers need of the shards. It changes no number that torchao computes.

Float8 training and NF4 weights need nothing of this module. See docs/integrations/torchao.md.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from torch_ragged.fsdp import Granularity, OrigParamPolicy, rows, tensor
from torch_ragged.integrations._program import require

__all__ = ["optimizer_blocks"]

_AT_LEAST = (0, 18)

_LEAST_QUANTIZED = 4096
"""torchao quantizes the state of a local tensor with so many elements or more. (0.18)"""


def optimizer_blocks(block_size: int, policy: OrigParamPolicy | None = None) -> OrigParamPolicy:
    """An ``orig_param_policy`` for the low-bit optimizers of ``torchao.optim``: ``AdamW8bit``, ``AdamW4bit``, ``AdamWFp8``, ...

    torchao quantizes the state of each local tensor on its own, in blocks of ``block_size`` consecutive elements, if the local
    tensor has at least 4,096 elements and no incomplete block. With this policy each rank holds whole rows and whole blocks,
    the blocks of a single process. So a state has the values of a single process, and its checkpoint loads on any number of
    ranks. A parameter that a single process would not quantize may be cut anywhere.

    ::

        fully_shard(model, mesh=mesh, orig_param_policy=optimizer_blocks(256))
        optimizer = torchao.optim.AdamW8bit(model.parameters(), lr=1e-3)

    The first call gives ``OptimState4bit`` views of any shape, for checkpoints: torchao has flat views only.

    Args:
        block_size: of the optimizer: by default 256 for 8-bit and float8, 128 for 4-bit.
        policy: your own policy, asked first. If it returns None, the parameter gets blocks by this function.

    Raises:
        ValueError: ``block_size`` is not a positive even integer.
        ImportError: torchao is missing, or older than 0.18.

    No communication.
    """
    if not isinstance(block_size, int) or isinstance(block_size, bool) or block_size < 2 or block_size % 2:
        raise ValueError(f"optimizer_blocks takes the block size of the optimizer, a positive even integer, got {block_size!r}")
    _give_views()

    def chosen(fqn: str, param: torch.nn.Parameter) -> Granularity | None:
        own = policy(fqn, param) if policy is not None else None
        return own if own is not None else _whole_blocks(param.shape, block_size)

    return chosen


def _whole_blocks(shape: torch.Size, block_size: int) -> Granularity | None:
    """The fewest rows that torchao quantizes, without an incomplete block."""
    numel = shape.numel()
    if numel < _LEAST_QUANTIZED or numel % block_size:
        return None
    columns = shape[-1] if len(shape) > 1 else 1
    step = block_size // math.gcd(block_size, columns)
    count = -(-_LEAST_QUANTIZED // (step * columns)) * step
    return rows(count) if count * columns < numel else tensor()


def _give_views() -> None:
    """Have ``OptimState4bit`` view its flat codes under any shape: a ragged local tensor is flat, and DCP asks for rows."""
    require("torchao", _AT_LEAST, "whose optimizer states this module knows")
    from torchao.optim.subclass_4bit import OptimState4bit

    @OptimState4bit.implements(torch.ops.aten.view.default)
    def _(func: Any, types: Any, args: Any, kwargs: Any) -> torch.Tensor:
        state, shape = args
        inferred = torch.empty(state.shape, device="meta").view(shape).shape  # It checks the size, and replaces -1.
        return OptimState4bit(state.codes, state.scale, state.qmap, state.signed, tuple(inferred), dtype=state.dtype)
