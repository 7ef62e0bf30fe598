"""Ops on whole tensors, which every rank computes: the way that is right for every op, and moves most."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement
from torch.utils import _pytree as pytree

from torch_ragged.tensor._ops._rules import is_written
from torch_ragged.tensor._redistribute import redistribute_local

__all__ = ["on_whole_tensors", "placed_as", "with_locals"]


def on_whole_tensors(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The op on whole tensors, which every rank computes. One all-gather per tensor that is not replicated.

    A tensor that the op writes keeps its placements: each rank takes its part of the result. If the tensor is pending a sum,
    one rank takes the result, and the others zeros.
    """
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, DTensor)]
    mesh = tensors[0].device_mesh
    everywhere = [Replicate()] * mesh.ndim
    whole = {id(tensor): tensor.redistribute(placements=everywhere)._local_tensor for tensor in tensors}

    def placed(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.layout is not torch.strided:
            raise NotImplementedError(f"{op} gives a {leaf.layout} tensor, which no DTensor can be: call full_tensor() first")
        return DTensor.from_local(leaf, mesh, everywhere, run_check=False) if isinstance(leaf, torch.Tensor) else leaf

    result = op(*with_locals(args, whole), **with_locals(kwargs, whole))
    arguments = op._schema.arguments
    named = [*zip(arguments, args), *[(each, kwargs[each.name]) for each in arguments if each.name in kwargs]]
    for argument, value in named:
        if is_written(argument):
            for tensor in [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, DTensor)]:
                if whole[id(tensor)].shape != tensor.shape:
                    raise RuntimeError(
                        f"{op} would change the shape of a DTensor that it writes, from {tuple(tensor.shape)} to "
                        f"{tuple(whole[id(tensor)].shape)}: use the result of the op that writes no argument"
                    )
                mine = placed_as(placed(whole[id(tensor)]), tensor.placements)._local_tensor
                if mine is not tensor._local_tensor:
                    tensor._local_tensor.copy_(mine)
    originals = {id(leaf): leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
    originals |= {id(whole[id(tensor)]): tensor for tensor in tensors}
    return pytree.tree_map(lambda leaf: originals[id(leaf)] if id(leaf) in originals else placed(leaf), result)


def with_locals(arguments: Any, locals_: dict[int, torch.Tensor]) -> Any:
    return pytree.tree_map(lambda leaf: locals_[id(leaf)] if isinstance(leaf, DTensor) else leaf, arguments)


def placed_as(tensor: DTensor, placements: tuple[Placement, ...]) -> DTensor:
    """``tensor`` under ``placements``, below autograd: in a backward, DTensor.s method needs an op that torch 2.11 lacks."""
    if placements == tensor.placements:
        return tensor
    shape, mesh = tensor.shape, tensor.device_mesh
    local = redistribute_local(tensor._local_tensor, mesh, shape, tensor.placements, placements).wait()
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
