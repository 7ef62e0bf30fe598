"""``with_ragged_experts``: torchtitan's export to and import from Hugging Face, for experts that are ragged shards."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torchtitan.models.utils import MoEStateDictAdapter

from torch_ragged import RaggedShard
from torch_ragged.tensor._cut_placement import has_flat

__all__ = ["with_ragged_experts"]


def with_ragged_experts(adapter: type | None) -> type | None:
    """``adapter``, a state-dict adapter of torchtitan, for ragged experts too. None, or one of a dense model, is returned."""
    if adapter is None or not issubclass(adapter, MoEStateDictAdapter):
        return adapter
    return type(adapter.__name__, (_RaggedExperts, adapter), {"__module__": adapter.__module__, "__doc__": adapter.__doc__})


class _RaggedExperts(MoEStateDictAdapter):
    """Each expert is a slice of the ragged tensor, so a ragged tensor itself: its elements stay on the ranks that have them.

    ::

        experts (4, 2, 3), units (9, 15):     rank 0: 0 0 0 0 0 0 1 1 1     rank 1: 1 1 1 2 2 2 2 2 2 3 3 3 3 3 3
        expert 1 (2, 3), units (3, 3)

    Nothing is communicated, and no rank has more elements than before.
    """

    def __init__(self, model_config: Any, hf_assets_path: str | None) -> None:
        super().__init__(model_config, hf_assets_path)
        self._ragged: dict[tuple[str, str], DTensor] = {}
        """The ragged weights by key and layer: layers may be cut differently. torchtitan keeps one for all layers."""

    def _get_local_experts_weights(
        self, abstract_key: str, titan_abstract_key: str, layer_id: str, grouped_expert_weight: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        weight = grouped_expert_weight
        if not isinstance(weight, DTensor) or not any(map(_is_ragged, weight.placements)):
            return super()._get_local_experts_weights(abstract_key, titan_abstract_key, layer_id, weight)
        self._ragged[titan_abstract_key, layer_id] = weight
        first, end = self.local_experts_indices[titan_abstract_key] = _experts_of_this_rank(weight)
        pieces = _experts(weight, end - first)
        return {abstract_key.format(layer_id, first + index): piece for index, piece in enumerate(pieces)}

    def _concatenate_expert_weights_dtensor(
        self, expert_weights_by_layer: dict[str, dict[str, dict[int, torch.Tensor]]], abstract_key: str, layer_num: str
    ) -> torch.Tensor | None:
        weight = self._ragged.get((abstract_key, layer_num))
        if weight is None:
            return super()._concatenate_expert_weights_dtensor(expert_weights_by_layer, abstract_key, layer_num)
        experts = expert_weights_by_layer[layer_num][abstract_key]
        first, end = self.local_experts_indices[abstract_key]
        if len(experts) < end - first:
            return None
        del expert_weights_by_layer[layer_num][abstract_key]
        if not expert_weights_by_layer[layer_num]:
            del expert_weights_by_layer[layer_num]
        local = torch.cat([expert.to_local() for _, expert in sorted(experts.items()) if isinstance(expert, DTensor)])
        return DTensor.from_local(
            local, weight.device_mesh, weight.placements, shape=weight.shape, stride=weight.stride(), run_check=False
        )


def _experts(weight: DTensor, count: int) -> list[DTensor]:
    """Each expert that expert parallelism has given to this rank, as a ragged tensor. They are views of ``weight``."""
    names = weight.device_mesh.mesh_dim_names
    assert names is not None
    kept = [dim for dim, placement in enumerate(weight.placements) if not isinstance(placement, Shard)]
    (ragged,) = [dim for dim in kept if _is_ragged(weight.placements[dim])]
    mesh, rank = weight.device_mesh[tuple(names[dim] for dim in kept)], _coordinate_of_dim(weight, ragged)
    shape, bounds, local = weight.shape[1:], _bounds(weight, count), weight.to_local()
    numel, experts = shape.numel(), []
    for index in range(count):
        cuts = [min(max(bound - index * numel, 0), numel) for bound in bounds]
        units = [end - start for start, end in zip(cuts, cuts[1:])]
        start = index * numel + cuts[rank] - bounds[rank] if units[rank] else 0
        placements = [RaggedShard((0, 1), units) if dim == ragged else Replicate() for dim in kept]
        piece = local[start : start + units[rank]]
        experts.append(DTensor.from_local(piece, mesh, placements, shape=shape, stride=(shape[1], 1), run_check=False))
    return experts


def _coordinate_of_dim(weight: DTensor, dim: int) -> int:
    return (weight.device_mesh.get_coordinate() or [])[dim]


def _is_ragged(placement: Any) -> bool:
    return has_flat((placement,))


def _experts_of_this_rank(weight: DTensor) -> tuple[int, int]:
    """The experts ``[first, end)`` that expert parallelism, ``Shard(0)``, has given to this rank."""
    first, count = 0, weight.shape[0]
    for dim, placement in enumerate(weight.placements):
        if isinstance(placement, Shard):
            if placement.dim != 0:
                raise ValueError(f"experts placed as {weight.placements}: expected no other cut than Shard(0) of experts")
            count //= weight.device_mesh.size(dim)
            first += count * _coordinate_of_dim(weight, dim)
    return first, first + count


def _bounds(weight: DTensor, experts: int) -> list[int]:
    """The elements of these experts at which one rank's interval ends and the next one begins."""
    (placement,) = [each for each in weight.placements if _is_ragged(each)]
    units = placement.local_units  # type: ignore[attr-defined]
    numel = experts * weight.shape[1:].numel() // sum(units)
    bounds = [0]
    for each in units:
        bounds.append(bounds[-1] + each * numel)
    return bounds
