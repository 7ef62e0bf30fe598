"""verl: an engine that shards with ours, and hands its weights over as flat runs. It changes nothing of verl's engines.

verl is imported when :func:`register` is called, not before. The engine is verl's FSDP engine, with other shards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from torch_ragged import RaggedShard
from torch_ragged.fsdp import OrigParamPolicy
from torch_ragged.integrations._install import installed
from torch_ragged.integrations._program import require
from torch_ragged.transfer import stream

__all__ = ["register"]

_AT_LEAST = (0, 9, 1)
_engines: dict[str, type] = {}


def register(
    *,
    orig_param_policy: OrigParamPolicy | None = None,
    max_stream_bytes: int = 1 << 30,
    backend: str = "fsdp_ragged",
    device: Sequence[str] = ("cuda", "npu"),
) -> type:
    """Register an engine for language models with verl, under the name ``backend``.

    ::

        # my_engine.py, and in verl's configuration: actor_rollout_ref.model.external_lib=my_engine
        #                                            actor_rollout_ref.actor.strategy=fsdp_ragged
        from torch_ragged.integrations.verl import register

        register()

    The engine is verl's FSDP2 engine, and reads the fields of its configuration. It differs in three points:

    - Models are sharded by :func:`torch_ragged.fsdp.fully_shard`.
    - ``get_per_tensor_param`` all-gathers the next parameters while one is sent (:func:`torch_ragged.transfer.stream`). With
      LoRA or QAT it does as verl's engine does.
    - ``get_per_tensor_param_shard`` exports each ragged shard with its flat offset, as ``ShardSpec.place``.

    Call it in each process that builds engines. A second call with the same ``backend`` replaces the options.

    Args:
        orig_param_policy: as in ``fully_shard``. Names are those inside the module that verl shards, such as
            ``self_attn.q_proj.weight`` for a decoder layer.
        max_stream_bytes: the most bytes of whole parameters, as ``max_bytes`` of ``stream``.
        backend: the name of the engine: ``strategy`` in verl's configuration.
        device: device types for which verl may choose the engine.

    Returns:
        the class of the engine.

    Raises:
        ImportError: verl is missing, or older than 0.9.1.
        ValueError: verl has an engine ``backend`` of its own.

    No communication.
    """
    require("verl", _AT_LEAST, "whose engines this module knows")
    from verl.workers.engine import EngineRegistry

    if backend not in _engines:
        if backend in EngineRegistry._engines.get("language_model", {}):
            raise ValueError(f"register(backend={backend!r}): verl has an engine of this name, choose another one")
        made = _make_engine()
        _engines[backend] = EngineRegistry.register(model_type="language_model", backend=backend, device=list(device))(made)
    engine: Any = _engines[backend]
    engine.orig_param_policy, engine.max_stream_bytes = staticmethod(orig_param_policy or _no_policy), max_stream_bytes
    return engine


def _no_policy(fqn: str, param: torch.nn.Parameter) -> None:
    return None


def _make_engine() -> type:
    from verl.utils.model import convert_weight_keys
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
    from verl.workers.engine.fsdp.utils import unfuse_moe_params

    class RaggedFSDPEngine(FSDPEngineWithLMHead):
        """verl's FSDP2 engine for language models, with ragged shards."""

        orig_param_policy: Any
        max_stream_bytes: int

        def __init__(self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any) -> None:
            # verl's code asks for the strategy by name, and does what it does for FSDP2.
            engine_config = dataclasses.replace(engine_config, strategy="fsdp2")
            super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)

        def _build_fsdp_module(self, module: Any) -> Any:
            with installed(orig_param_policy=self.orig_param_policy):
                return super()._build_fsdp_module(module)

        def get_per_tensor_param(self, layered_summon: bool = False, base_sync_done: bool = False, **options: Any) -> Any:
            if self._is_lora or self._qat_enabled or hasattr(self.module, "peft_config"):
                return super().get_per_tensor_param(layered_summon, base_sync_done, **options)
            tensors = convert_weight_keys(self.module.state_dict(), self.module)
            return unfuse_moe_params(stream(tensors, self.max_stream_bytes), self.model_config.hf_config.model_type), None

        def get_per_tensor_param_shard(self, **options: Any) -> Any:
            shards, others = super().get_per_tensor_param_shard(**options)
            return _with_offsets(shards), others

    return RaggedFSDPEngine


def _with_offsets(shards: Iterator[tuple[str, torch.Tensor, Any]]) -> Iterator[tuple[str, torch.Tensor, Any]]:
    """verl's exported shards; the specifications of ragged ones have the flat offset and the group of their shards."""
    for name, local, spec in shards:
        ragged = [(dim, placement) for dim, placement in enumerate(spec.placements or ()) if isinstance(placement, RaggedShard)]
        yield name, local, _with_offset(name, spec, *ragged[0]) if ragged else spec


def _with_offset(name: str, spec: Any, dim: int, placement: RaggedShard) -> Any:
    mesh, coordinate = spec.mesh, spec.mesh.get_coordinate()
    others = [other for other in range(mesh.ndim) if other != dim]
    if not all(spec.placements[other].is_replicate() for other in others):
        raise NotImplementedError(
            f"{name} is placed as {spec.placements}, but a shard that verl exports is one flat run: use get_per_tensor_param() "
            "or no model parallelism beside fully_shard"
        )
    units = placement.local_units
    numel = torch.Size(spec.full_shape).numel()
    return dataclasses.replace(
        spec,
        place=numel // sum(units) * sum(units[: coordinate[dim]]),
        gather_group=mesh.get_group(dim),
        contributes=not any(coordinate[other] for other in others),
    )
