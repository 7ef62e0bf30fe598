"""The base of a fine-tuning: frozen parameters that a checkpoint leaves out, and digests that tell if the base is there.

A digest is that of the whole tensor: it does not depend on the number of ranks or on placements. Each rank digests the boxes
that it owns; nothing here sends a tensor or writes one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from torch_ragged._ranks.comparison import mixed
from torch_ragged.checkpoint._errors import CheckpointError, listed
from torch_ragged.checkpoint._layouts import held_boxes, name_in_checkpoint
from torch_ragged.checkpoint._manifest import Manifest, TensorRecord, describe

__all__ = ["HeldBase", "base_of_save", "digests_of", "frozen_in", "held_base", "refuse_other_base", "remember_base"]

_AT_ONCE = 1 << 20  # Elements that are digested at once: their temporary memory is 16 MiB.
_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}

# By model, the digest of each parameter of its base, by name. It is set by the first save with a base, or by a load; equal on
# all ranks, because it comes from what they have gathered. A later save leaves out what still has this digest.
_bases: WeakKeyDictionary[nn.Module, dict[str, str]] = WeakKeyDictionary()


class _HeldPart(NamedTuple):
    """What a rank holds of a tensor: a hash and the number of elements of its boxes, and the sum over them."""

    record: TensorRecord
    boxes: int
    numel: int
    sum: int


class HeldBase(NamedTuple):
    """What a rank knows of the base: its parts of the frozen tensors, by name, and the names of all others of the model."""

    frozen: dict[str, _HeldPart]
    others: set[str]


def frozen_in(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> set[str]:
    """The names in a checkpoint of the parameters that do not train: they need no gradient and have no state of an optimizer.

    Buffers are not among them: those of normalizations change without gradients. They are small.
    """
    stepped = {id(param) for optimizer in optimizers for param in optimizer.state.keys()}
    return {
        f"model.{name_in_checkpoint(name)}"
        # Not named_parameters(): a wrapper, such as Fabric's, may have other names there than in its state dict.
        for name, param in model.state_dict(keep_vars=True).items()
        if isinstance(param, nn.Parameter) and not param.requires_grad and id(param) not in stepped
    }


def held_base(model_state: Mapping[str, object], names: Iterable[str]) -> HeldBase:
    """Digest this rank's boxes of the tensors ``names``, which begin with ``model.``. No communication.

    Raises:
        CheckpointError: a tensor has no values, or its type has no bits that could be compared.
    """
    named, chosen = {f"model.{name}": value for name, value in model_state.items()}, set(names)
    frozen = {
        name: _part_of(name, value) for name, value in named.items() if name in chosen and isinstance(value, torch.Tensor)
    }
    return HeldBase(frozen, named.keys() - frozen.keys())


def _part_of(name: str, tensor: torch.Tensor) -> _HeldPart:
    if tensor.device.type == "meta":
        raise CheckpointError(f"{name} has no values, it is on the meta device: load the base into the model first")
    try:
        boxes = held_boxes(name, tensor)
        total = sum(int(_sum_of(_integers_of(part), box.offsets).item()) for box, part in boxes)
    except (TypeError, RuntimeError, AttributeError) as error:  # Of a type without such views or values.
        raise CheckpointError(
            f"{name} has a type whose values cannot be compared with those of a base ({error}): pass TrainState without base"
        ) from error
    whole, region = describe(tensor), hash(tuple((box.offsets, box.sizes) for box, _ in boxes))
    return _HeldPart(TensorRecord(whole.shape, whole.dtype), region, sum(box.numel for box, _ in boxes), total)


def _integers_of(part: torch.Tensor) -> torch.Tensor:
    """The elements as integers. Of a type that has codes and scales, such as quantized weights, those of the values.

    The 32-bit words of a wider element are one more dimension: modulo 2^64, the highest bits of a factor count least.
    """
    if part.is_quantized or type(part).dequantize is not torch.Tensor.dequantize:
        part = part.dequantize()
    elif type(part) is not torch.Tensor:  # Such as torchao's NF4Tensor.
        part = part.to(torch.float32)
    if type(part) is not torch.Tensor:
        raise TypeError(f"it is a {type(part).__name__}")
    part = part.resolve_conj().resolve_neg()
    return part.view(_INTS[part.element_size()]) if part.element_size() in _INTS else part.unsqueeze(-1).view(torch.int32)


def _sum_of(bits: torch.Tensor, offsets: Sequence[int]) -> torch.Tensor:
    """The sum of ``bits[i, j, ...] * weight(0, i) * weight(1, j) * ...`` modulo 2^64, where weights are of global indices.

    The sum of the boxes of a tensor is that of the whole tensor, in any order: integers have no rounding. Weights are odd, so
    one changed element always changes the sum; they look random, so moved rows, columns or segments do, too.
    """
    dim = next((d for d, size in enumerate(bits.shape) if size > 1), None)
    if dim is not None and bits.numel() > _AT_ONCE:
        step = max(1, bits.size(dim) * _AT_ONCE // bits.numel())
        parts = bits.split(step, dim)
        starts = range(0, bits.size(dim), step)
        before, after = tuple(offsets[:dim]), tuple(offsets[dim + 1 :])
        sums = [_sum_of(part, (*before, offsets[dim] + start, *after)) for part, start in zip(parts, starts)]
        return torch.stack(sums).sum()
    total = bits.to(torch.int64, copy=True)
    for d in reversed(range(bits.ndim)):
        first = offsets[d] if d < len(offsets) else 0
        index = torch.arange(first + 1, first + bits.size(d) + 1, dtype=torch.int64, device=bits.device)
        weights = mixed(index + ((d + 1) << 48)) | 1  # Other ones in each dimension: a transpose differs.
        total = total.mul_(weights).sum(-1)
    return total


def digests_of(held: Sequence[HeldBase], what: str) -> dict[str, TensorRecord]:
    """The record, with the digest, of each frozen tensor. Every rank calls it with the same arguments.

    Args:
        held: :func:`held_base` of each rank.

    Raises:
        CheckpointError: a tensor is frozen on some of the ranks that hold it only, or replicas hold other values.
    """
    problems, found = [], {}
    for name in sorted(set().union(*(each.frozen for each in held))):
        parts = {rank: each.frozen[name] for rank, each in enumerate(held) if name in each.frozen}
        record = parts[min(parts)].record
        regions: dict[int, _HeldPart] = {}  # Replicas hold equal boxes: each counts once.
        for rank, part in parts.items():
            if part != regions.setdefault(part.boxes, part):
                problems.append(f"{name} has other values on rank {rank} than on its replicas")
        trained = [rank for rank, each in enumerate(held) if name in each.others]
        if trained:
            problems.append(f"{name} is frozen on rank {min(parts)}, but not on rank {trained[0]}")
        if (numel := sum(part.numel for part in regions.values())) != math.prod(record.shape):
            problems.append(f"{name} {record.what} has {numel} elements on all ranks together")
        total = sum(part.sum for part in regions.values())
        found[name] = replace(record, digest=f"{total % (1 << 64):016x}")
    if problems:
        raise CheckpointError(f"{what}: ranks differ in the frozen parameters:{listed(problems)}")
    return found


def base_of_save(model: nn.Module, found: Mapping[str, TensorRecord]) -> dict[str, TensorRecord]:
    """What a save leaves out: frozen tensors that still are those of the base. To a model's first save, all of them are."""
    known = _bases.setdefault(model, {name: record.digest for name, record in found.items()})
    return {name: record for name, record in found.items() if known.get(name) == record.digest}


def remember_base(model: nn.Module, found: Mapping[str, TensorRecord], is_verified: bool) -> None:
    """Before a load fills the model, its frozen tensors are the base; if it was compared with the checkpoint's, from now on."""
    digests = {name: record.digest for name, record in found.items()}
    if is_verified:
        _bases[model] = digests
    else:
        _bases.setdefault(model, digests)


def refuse_other_base(manifest: Manifest, found: Mapping[str, TensorRecord], what: str) -> None:
    """Raise if the model does not hold what the checkpoint has left out. Every rank calls it with the same arguments.

    Raises:
        CheckpointError: it holds other values. The text names the tensors.
    """
    other = [name for name, record in sorted(manifest.frozen.items()) if found[name].digest != record.digest]
    if other:
        raise CheckpointError(
            f"{what}: the checkpoint has no frozen parameters, they are in its base {manifest.base!r}, and the model holds "
            f"other values of {len(other)} of {len(manifest.frozen)}: load the base into the model first, then the checkpoint. "
            f"Other values have:{listed(other)}"
        )
