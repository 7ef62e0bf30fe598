"""accelerate: ``Accelerator.prepare`` shards with ours, and refuses what it could not do right.

accelerate is imported when :func:`use` is called, not before. Its plugin is read and never changed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.optim import Optimizer

from torch_ragged.fsdp import BufferPlacements, FSDPModule, OrigParamPolicy
from torch_ragged.integrations._install import Installation, installed
from torch_ragged.integrations._program import require

__all__ = ["use"]

_AT_LEAST = (1, 11)

# What accelerate passes to fully_shard comes from these fields of its plugin, and from its mesh.
_PLUGIN_FIELDS = {
    "reshard_after_forward": "the plugin's reshard_after_forward",
    "mp_policy": "the plugin's mixed_precision_policy",
    "offload_policy": "the plugin's cpu_offload",
    "ignored_params": "the plugin's ignored_modules",
    "mesh": "Accelerator(parallelism_config=ParallelismConfig(dp_replicate_size=..., dp_shard_size=...))",
    "dp_mesh_dims": "Accelerator(parallelism_config=ParallelismConfig(dp_replicate_size=..., dp_shard_size=...))",
}

# FSDP1's fields. With fsdp_version=2 accelerate reads none of them, so a value would have no effect.
_IGNORED = {
    "sharding_strategy": "set reshard_after_forward: True for FULL_SHARD, False for SHARD_GRAD_OP",
    "backward_prefetch": "leave it None: each group prefetches the next one in backward",
    "forward_prefetch": "leave it None, and call set_modules_to_forward_prefetch on the prepared model",
    "use_orig_params": "leave it None: parameters keep their names always",
    "sync_module_states": "leave it None, and set cpu_ram_efficient_loading=True if only rank 0 has the weights",
    "param_init_fn": "leave it None, and initialize the prepared model",
}


@contextlib.contextmanager
def use(
    *,
    orig_param_policy: OrigParamPolicy | None = None,
    placements: BufferPlacements | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    **others: Any,
) -> Iterator[Installation]:
    """In the ``with`` block, ``Accelerator.prepare`` shards models with :func:`torch_ragged.fsdp.fully_shard`.

    ::

        with use(orig_param_policy=lambda name, param: rows(32) if param.ndim == 2 else None):
            model, optimizer = accelerator.prepare(model, optimizer)

    It works for programs that call ``prepare`` themselves, such as ``Trainer``: put ``trainer.train()`` into the block. All
    other options of ``fully_shard`` come from the fields of accelerate's ``FullyShardedDataParallelPlugin``.

    Args:
        orig_param_policy: as in ``fully_shard``. Names are those inside the module that accelerate shards, such as
            ``self_attn.q_proj.weight`` for a transformer block.
        placements: as in ``fully_shard``; for every module.
        shard_placement_fn: as in ``fully_shard``.
        others: refused, with the field of the plugin that stands for the option.

    Yields:
        the installation: how often ``fully_shard`` was called, and under which names.

    Raises:
        ImportError: accelerate is missing, or older than 1.11.
        TypeError: ``others`` has an option.
        ValueError: from ``prepare``. The plugin asks for FSDP1, or sets a field that only FSDP1 reads; or the model, or a
            module inside it, is sharded already. Nothing was changed and nothing communicated. Ranks have the same plugin
            and model, so all of them raise.
        RuntimeError: from ``prepare``. accelerate has not called ``fully_shard``: this version shards in another way.

    The block itself does not communicate; ``prepare`` does what ``fully_shard`` does.
    """
    for name in others:
        where = f"set {_PLUGIN_FIELDS[name]}" if name in _PLUGIN_FIELDS else f"legal are {', '.join(_OPTIONS)}"
        raise TypeError(f"use() got {name}, which is no option of it: {where}")
    version = require("accelerate", _AT_LEAST, "whose FSDP2 this module knows")
    from accelerate import Accelerator

    prepare = Accelerator.prepare
    given = (orig_param_policy, placements, shard_placement_fn)
    options: Any = {name: value for name, value in zip(_OPTIONS, given) if value is not None}
    with installed(**options) as installation:

        @functools.wraps(prepare)
        def checked(self: Any, *objects: Any, **keywords: Any) -> Any:
            models = [each for each in objects if isinstance(each, nn.Module)]
            optimizers = [each for each in objects if isinstance(each, Optimizer)]
            if not models or not optimizers:  # A data loader, say: nothing is sharded.
                return prepare(self, *objects, **keywords)
            _check_plugin(self.state)
            for model in models:
                _check_unsharded(model)
            prepared = prepare(self, *objects, **keywords)
            if not any(isinstance(module, FSDPModule) for model in models for module in model.modules()):
                raise RuntimeError(
                    f"accelerate {version} has prepared a {type(models[0]).__name__} without a call of "
                    "torch.distributed.fsdp.fully_shard, so it is not sharded by torch_ragged: use accelerate 1.15"
                )
            return prepared

        Accelerator.prepare = checked
        try:
            yield installation
        finally:
            Accelerator.prepare = prepare


_OPTIONS = ("orig_param_policy", "placements", "shard_placement_fn")


def _check_plugin(state: Any) -> None:
    """Check that accelerate's state asks for FSDP2, and for nothing that FSDP2 has not."""
    plugin = getattr(state, "fsdp_plugin", None)
    if plugin is None:
        raise ValueError(
            f"this Accelerator has no FSDP plugin (its distributed_type is {state.distributed_type}), so prepare() would not "
            "shard: pass Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2)), and start several processes"
        )
    if plugin.fsdp_version != 2:
        raise ValueError(
            f"FullyShardedDataParallelPlugin.fsdp_version is {plugin.fsdp_version}, which does not call fully_shard: pass "
            "fsdp_version=2 (accelerate's default is 1)"
        )
    for name, instead in _IGNORED.items():
        value = getattr(plugin, name, None)
        if value is not None:
            raise ValueError(
                f"FullyShardedDataParallelPlugin.{name} is {value!r}, a field of FSDP1 that has no effect here: {instead}"
            )


def _check_unsharded(model: nn.Module) -> None:
    """Refuse a model of which something is sharded.

    accelerate leaves sharded modules alone, but it maps the optimizer's parameters by the addresses of their local tensors.
    Local tensors without elements have one address, so the optimizer would get wrong parameters, other ones on each rank.
    """
    for name, module in model.named_modules():
        if isinstance(module, TorchFSDPModule):
            whose = "torch_ragged.fsdp.fully_shard" if isinstance(module, FSDPModule) else "torch's fully_shard"
            what = f"its module {name}" if name else "it"
            raise ValueError(
                f"prepare() got a {type(model).__name__} which is sharded already: {whose} was called on {what}. prepare() "
                "would give the optimizer wrong parameters. Either pass the model unsharded, or make the optimizer after "
                "sharding and pass neither of the two to prepare()"
            )
