"""``token_scale``: gradients that are a mean over tokens, where ranks have batches of unequal sizes. It changes no model."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torch_ragged._ranks.agreement import agree_on_groups, agreement
from torch_ragged._ranks.groups import device_of_messages, groups_of
from torch_ragged._ranks.peers import issued_on, peers_named

__all__ = ["token_scale"]

_CALL = "token_scale"


def token_scale(tokens: int | torch.Tensor, mesh: DeviceMesh | None = None) -> float:
    """The factor for a rank's loss, summed over its tokens, that makes gradients the mean over the tokens of all ranks::

        scale = token_scale(sum(batch.numel() for batch in micro_batches), mesh)    # once per optimizer step
        for batch in micro_batches:
            (sum_of_losses(model(batch)) * scale).backward()

    FSDP divides gradients by the number of ranks. If each rank takes the mean over its own tokens, a token on a rank with few
    of them counts more than one on a rank with many. The factor is the number of ranks, divided by the tokens of all ranks. So
    the mean of the scaled losses over ranks is the loss per token. Leave ``set_gradient_divide_factor`` at its default.

    Args:
        tokens: how many tokens this rank's loss sums in the whole step, as an int or an integer tensor of one element. It may
            be 0: the rank then runs forward and backward like the others, on any input, with a loss of 0.
        mesh: the data-parallel mesh that ``fully_shard`` got, 1-D or 2-D; None: all ranks.

    Collectives: per dimension of the mesh, an all-reduce of 24 bytes and one of 8 bytes. The host waits for them.

    Raises:
        TypeError: ``tokens`` is no number of tokens. All ranks raise.
        ValueError: ``tokens`` is negative, or 0 on all ranks; this rank is not in ``mesh``; ranks pass different meshes; or
            there is no process group.
        RuntimeError: another rank raised.
        PeerError: a rank died, or did not make this call.
    """
    world = dist.group.WORLD
    if world is None:
        raise ValueError("token_scale needs a process group: call torch.distributed.init_process_group() first")
    groups = [world] if mesh is None else groups_of(mesh)
    if not groups:
        raise ValueError(f"token_scale: rank {dist.get_rank()} is not in {mesh}: call it on the ranks of the mesh")
    if mesh is not None:
        agree_on_groups(mesh, _CALL)
    device = device_of_messages(groups[0])
    with agreement(groups, device, _CALL) as claim:
        if isinstance(tokens, torch.Tensor) and tokens.numel() == 1 and not tokens.dtype.is_floating_point:
            tokens = tokens.item()  # type: ignore[assignment]
        if not isinstance(tokens, int) or isinstance(tokens, bool):
            raise TypeError(f"token_scale: tokens must be an int, or an integer tensor of one element, got {tokens!r}")
        if tokens < 0:
            raise ValueError(f"token_scale: tokens must be at least 0, got {tokens}")
        total = torch.tensor([tokens], dtype=torch.int64, device=device)
        claim.append(_CALL)
    ranks = 1
    for group in groups:
        ranks *= group.size()
        with peers_named(_CALL, "", lambda group=group: dist.get_process_group_ranks(group), [issued_on(group).issue(_CALL)]):
            dist.all_reduce(total, group=group)
    if not int(total):
        raise ValueError("token_scale: no rank has tokens, so there is no mean: skip the step on all ranks")
    return ranks / int(total)
