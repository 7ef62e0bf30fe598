"""The carrier: parts of flat local tensors, and the all-gather that receives each shard where it lies in the whole.

It must not choose what is sent: the steps come from a plan.

::

    shards in order     the whole | 0 0 0 | 1 | 2 2 |           each shard is received in its place
    columns             the whole | 0 0 1 2 : 0 0 1 2 |         slabs: each is received packed in its own memory, and put in
                                   a slab    a slab             order there, with a copy of one slab beside the whole
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from torch_ragged._ranks.groups import is_gloo, is_nccl
from torch_ragged.tensor._exchange import Part, merged_parts
from torch_ragged.tensor._route import Gather

__all__ = ["Pending", "all_gather", "copy_into", "covers", "memory_of", "pack", "packed_views", "part_view"]

_ALL_GATHER = ("all_gather_single", "all_gather_single_coalesced")
if not hasattr(dist.ProcessGroup, _ALL_GATHER[0]):  # Before torch 2.13.
    _ALL_GATHER = ("_allgather_base", "allgather_into_tensor_coalesced")


@dataclass
class Pending:
    """A local tensor whose data may still be in flight.

    Attributes:
        data: the elements of the local tensor, or the tensor that the collective fills.
        local_shape: the shape of the local tensor.
        unpack: makes the flat local tensor from the completed ``data``; None if ``data`` is that tensor.
        in_flight: whether ``data`` must be waited for.
        dtype: the dtype of the local tensor, if ``data`` carries it as another dtype.
        works: the collectives that fill ``data``; none if torch knows them, as those of its functional collectives.
        group: that of ``works``.
    """

    data: torch.Tensor
    local_shape: tuple[int, ...]
    unpack: Callable[[torch.Tensor], torch.Tensor] | None = None
    in_flight: bool = False
    dtype: torch.dtype | None = None
    works: Sequence[dist.Work] = ()
    group: dist.ProcessGroup | None = None

    def wait(self) -> torch.Tensor:
        """Wait for the data if it is in flight, and return the local tensor."""
        if self.works:
            _wait_all(self.works, self.group)
        elif self.in_flight:
            self.data = torch.ops._c10d_functional.wait_tensor(self.data)
        if self.unpack is not None:
            self.data = self.unpack(self.data)
        self.works, self.unpack, self.in_flight = (), None, False  # Memory that is put in order must not be so twice.
        return self.data.view(self.local_shape)


def _wait_all(works: Sequence[dist.Work], group: dist.ProcessGroup | None) -> None:
    """Wait for collectives of ``group``; if another rank asks for this one, ``_ranks.peers`` finds the group here."""
    for work in reversed(works):  # The last ends last, mostly: then this thread wakes up once.
        work.wait()


def part_view(flat: torch.Tensor, part: Part) -> torch.Tensor:
    """The part of a flat local tensor, without a copy."""
    if part.is_contiguous:
        return flat[part.offset : part.offset + part.numel]
    return flat.as_strided(part.sizes, part.strides, flat.storage_offset() + part.offset)


def covers(parts: Sequence[Part], numel: int) -> bool:
    """Whether the parts are the whole storage in order, so that nothing needs packing or unpacking."""
    if not parts:
        return numel == 0
    return len(parts) == 1 and parts[0].is_contiguous and parts[0].numel == numel


def packed_views(packed: torch.Tensor, parts: Sequence[Part]) -> list[torch.Tensor]:
    """Each part in ``packed``, where they lie one after another."""
    return [piece.view(part.sizes) for part, piece in zip(parts, packed.split([part.numel for part in parts]))]


def copy_into(result: torch.Tensor, packed: torch.Tensor, parts: Sequence[Part]) -> None:
    """Copy ``packed``, the parts one after another, to where they lie in the flat local tensor ``result``."""
    for part, piece in zip(parts, packed_views(packed, parts)):
        part_view(result, part).copy_(piece)


def pack(packed: torch.Tensor, flat: torch.Tensor, parts: Sequence[Part]) -> None:
    """The reverse: copy the parts of ``flat`` to ``packed``, one after another. This may cast them."""
    for part, piece in zip(parts, packed_views(packed, parts)):
        piece.copy_(part_view(flat, part))


def memory_of(steps: Sequence[Gather], like: torch.Tensor) -> list[torch.Tensor]:
    """Memory for the results of consecutive all-gathers: that of the last one, and the others' as parts of it.

    So a step finds its shard where the shard must lie. If the step has slabs, it finds it at the end of its memory: the rest of
    a shard is never longer than the rest of the whole, so no slab overwrites elements that later slabs send.
    """
    found = [like.new_empty(math.prod(steps[-1].shape))]
    for step in reversed(steps[1:]):
        whole, own = found[0], step.splits[step.rank]
        if covers(merged_parts(part for slab in step.slabs for part in slab.sends), own):
            start = sum(step.splits[: step.rank]) if step.is_straight else whole.numel() - own
            found.insert(0, whole[start : start + own])
        else:
            found.insert(0, like.new_empty(own))
    return found


def all_gather(
    step: Gather, shard: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup, *, is_async: bool = False
) -> Pending:
    """Fill ``whole``, the flat new local tensor, with the shards of all ranks of ``group``; no other rank's shard has a buffer.

    This is one all-gather if shards are even, and over NCCL one per slab if they are not. Otherwise, and always over gloo, it
    is one broadcast per slab and shard that is not empty.

    Args:
        shard: the flat old local tensor; perhaps of another dtype or device than ``whole``, or a part of it, as
            :func:`memory_of` has placed it.
        is_async: whether the collectives are in flight when this returns. The first wait puts slabs in order.
    """
    shard, over_gloo = shard.detach(), is_gloo(group, whole.device)
    is_sent_as_is = (shard.dtype, shard.device) == (whole.dtype, whole.device)
    is_within = shard.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    works: list[dist.Work] = []
    outputs: list[torch.Tensor] = []
    inputs: list[torch.Tensor] = []
    for slab in step.slabs:
        received = whole[slab.start : slab.stop]
        pieces = received.split(tuple(slab.splits))
        own = source = pieces[step.rank]
        if slab.sends:
            part = part_view(shard, slab.sends[0])
            if not is_sent_as_is or len(slab.sends) > 1 or not slab.sends[0].is_contiguous:
                pack(own, shard, slab.sends)
            elif not is_within:
                source = part
            elif part.data_ptr() != own.data_ptr():
                own.copy_(part.clone())  # The next slab may be received where the part lies; and the two may overlap.
        # As bytes: backends do not know all dtypes. The group is called itself: it takes a tenth of the host time.
        sent = source.view(torch.uint8)
        if len(set(slab.splits)) == 1 and not over_gloo:  # gloo's all-gather fills memory of its own first.
            outputs.append(received.view(torch.uint8))
            inputs.append(sent)
        elif is_nccl(group, whole.device):  # It broadcasts uneven shards in one call.
            works.append(group.allgather([[piece.view(torch.uint8) for piece in pieces]], [sent]))
        else:
            # The largest first, because it takes longest, and gloo runs two at a time. The order is equal on all ranks.
            for root in sorted(filter(slab.splits.__getitem__, range(len(pieces))), key=slab.splits.__getitem__, reverse=True):
                options = dist.BroadcastOptions()
                options.rootRank = root
                works.append(group.broadcast([sent if root == step.rank else pieces[root].view(torch.uint8)], options))
            if source is not own:
                own.copy_(source)  # While the broadcasts are in flight: they read the same.
    if len(outputs) == 1:
        works.append(getattr(group, _ALL_GATHER[0])(outputs[0], inputs[0]))
    elif outputs:  # One call for all slabs: NCCL runs it as one group.
        works.append(getattr(group, _ALL_GATHER[1])(outputs, inputs))
    if not is_async:
        _wait_all(works, group)
        works = []

    def put_in_order(whole: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():  # Outside of it, torch refuses writes to tensors that were made in inference mode.
            scratch = torch.empty_like(whole[: max(slab.stop - slab.start for slab in step.slabs)])
            for slab in step.slabs:
                received = whole[slab.start : slab.stop]
                if not covers(slab.receives, len(received)):
                    copy_into(received, scratch[: len(received)].copy_(received), slab.receives)
        return whole

    return Pending(whole, step.local_shape, None if step.is_straight else put_in_order, is_async, works=works, group=group)
