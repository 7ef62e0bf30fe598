"""All-gather and reduce-scatter by NVSwitch multicast (NVLS): one store writes to all ranks, one load returns their sum.

Importing this file must not need Triton: the kernel is compiled at its first use.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist

from torch_ragged._ranks.groups import timeout_of
from torch_ragged.fsdp.comm._collectives import ProcessGroupCollectives, ReduceScatterTraits, Work, WrappedCollectives
from torch_ragged.fsdp.comm._reduction import SUMS, Reduction
from torch_ragged.fsdp.comm.experimental._peer_memory import StreamWork

__all__ = ["MulticastCollectives", "SymmetricSlabs"]

_PACKET = 16
"""Bytes of one multimem instruction. Every shard is a multiple of it, because shards are aligned."""

_CHANNEL = 0
"""The channel of the signal pads that barriers use here, of gradient buffers. torch's all-gather uses it on gathered buffers,
which have their own pads, as each allocation has."""


class SymmetricSlabs:
    """Allocations of symmetric memory of the ranks of ``group``, by address. Persistent buffers allocate here."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self.device = group, device
        self._handles: dict[int, Any] = {}

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor in memory that all ranks can access. All ranks must call this together; it waits for the device."""
        import torch.distributed._symmetric_memory as symm_mem

        flat = symm_mem.empty(numel, dtype=dtype, device=self.device)
        # The rendezvous exchanges addresses with all ranks: they must allocate in the same order, and equal sizes.
        self._handles[flat.untyped_storage().data_ptr()] = symm_mem.rendezvous(flat, self._group)
        return flat

    def handle(self, tensor: torch.Tensor) -> Any:
        """torch's handle of the allocation that begins with ``tensor``; None if there is none."""
        # Kernels compute addresses from the start of the allocation, so a tensor with an offset has no handle.
        return self._handles.get(tensor.untyped_storage().data_ptr()) if tensor.storage_offset() == 0 else None


class MulticastCollectives(WrappedCollectives):
    """Collectives on gathered buffers and gradient buffers in :class:`SymmetricSlabs`.

    An all-gather stores each shard once, to the multicast address of the gathered buffers. A reduce-scatter loads the sum of
    all ranks' gradients of this rank's shard from that of the gradient buffers. The switch adds bfloat16 in float32, in an
    order of its own, and rounds once. The process group serves all other calls: other buffers and dtypes, custom collectives.
    """

    def __init__(self, process_groups: ProcessGroupCollectives, group: dist.ProcessGroup, slabs: SymmetricSlabs) -> None:
        super().__init__(process_groups)
        self._process_groups, self._group, self._slabs = process_groups, group, slabs
        self._timeout_ms = int(1000 * timeout_of(group, slabs.device).total_seconds())
        # All-gathers have the higher priority, because forward waits for them.
        self._gathers, self._reductions = (torch.cuda.Stream(slabs.device, priority=priority) for priority in (-1, 0))

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup | None = None) -> Work:
        is_ours = group in (None, self._group) and self._process_groups.custom_all_gather is None
        # All ranks decide alike: buffers are persistent on all ranks or on none.
        if not is_ours or self._slabs.handle(output) is None:
            return super().all_gather(output, shard, group)
        # The current stream has written the input, and has read the output's earlier contents. So it is for reductions.
        self._gathers.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), torch.cuda.stream(self._gathers):
            gathered, part = output.view(torch.uint8), shard.view(torch.uint8)
            torch.ops.symm_mem.multimem_all_gather_out(part, self._group.group_name, gathered)
            return StreamWork(self._gathers.record_event())

    def reduce_scatter(
        self, output: torch.Tensor, buffer: torch.Tensor, reduction: Reduction, group: dist.ProcessGroup | None = None
    ) -> Work:
        handle = self._slabs.handle(buffer) if buffer.dtype in _TYPES else None
        is_ours = group in (None, self._group) and self._process_groups.custom_reduce_scatter is None
        if not is_ours or handle is None:
            return super().reduce_scatter(output, buffer, reduction, group)
        _, divisor = reduction.begin(output, buffer, self._group.size(), SUMS)
        self._reductions.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._reductions):
            # Each rank's barrier is behind the kernels that write its gradients: after it, all ranks' gradients are complete.
            handle.barrier(_CHANNEL, self._timeout_ms)
            load_sum(handle.multicast_ptr + handle.rank * output.nbytes, output)
            # After wait(), a rank may overwrite its gradients. By then, all ranks must have read them.
            handle.barrier(_CHANNEL, self._timeout_ms)
            if divisor != 1:
                output.div_(divisor)
            return StreamWork(self._reductions.record_event())

    def reduce_scatter_traits(self, device: torch.device) -> ReduceScatterTraits:
        # The load instruction returns the dtype that it reads. A rank receives sums only, straight in the output.
        return ReduceScatterTraits(adds_wide=False, holds_second_buffer=False)


_LOAD_SUM = """
{
    .reg .pred %inside;
    setp.ne.s32 %inside, $5, 0;
    @%inside multimem.ld_reduce.relaxed.sys.global.add.{type} {$0, $1, $2, $3}, [$4];
}
"""
_TYPES = {torch.float32: "v4.f32", torch.bfloat16: "acc::f32.v4.bf16x2"}


def load_sum(address: int, output: torch.Tensor) -> None:
    """Fill ``output`` (float32 or bfloat16) with the sum over ranks of the memory at a multicast ``address``. No barrier."""
    packets, threads = output.nbytes // _PACKET, 512
    grid = (min(32, -(-packets // threads)),)  # A few blocks saturate the links, and leave the other SMs to compute.
    asm = _LOAD_SUM.replace("{type}", _TYPES[output.dtype])
    load_sum_kernel()[grid](address, output.view(torch.int32), packets, ASM=asm, BLOCK=threads, num_warps=threads // 32)


@functools.cache
def load_sum_kernel() -> Any:
    """The Triton kernel of :func:`load_sum`. It moves four words of 32 bits per packet, for every dtype."""
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(address, words, packets, ASM: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        for start in range(tl.program_id(0) * BLOCK, packets, tl.num_programs(0) * BLOCK):
            packet = start + tl.arange(0, BLOCK)
            # Not pure: memory changes between two loads of one address, so the compiler must not merge them.
            a, b, c, d = tl.inline_asm_elementwise(
                ASM,
                "=r,=r,=r,=r,l,r",
                args=[address + packet.to(tl.int64) * 16, (packet < packets).to(tl.int32)],
                dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
                is_pure=False,
                pack=1,
            )
            # This nesting gives the words a b c d of each packet in memory order, so that stores are contiguous.
            sums = tl.join(tl.join(a, c), tl.join(b, d)).reshape([4 * BLOCK])
            word = start * 4 + tl.arange(0, 4 * BLOCK)
            tl.store(words + word, sums, mask=word < packets * 4)

    return kernel
