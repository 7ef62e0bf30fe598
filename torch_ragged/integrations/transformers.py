"""transformers: pretrained weights are read straight into ragged shards, and ``Trainer`` saves and resumes sharded models.

transformers is imported when a function is called, not before. Its files are not changed; while :func:`from_pretrained` runs,
names of its loading are replaced.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torch_ragged.fsdp import BufferPlacements, FSDPModule, OrigParamPolicy, fully_shard
from torch_ragged.fsdp.gates._untrained import unsharded_under
from torch_ragged.integrations._install import installed
from torch_ragged.integrations._lazy_tensor import LazyTensor
from torch_ragged.integrations._program import require
from torch_ragged.integrations._substitutes import is_ragged

__all__ = ["checkpoint_callback", "from_pretrained"]

_AT_LEAST = (5, 23)
_LOADING, _SHARDING, _PLAN = (
    "transformers.core_model_loading",
    "transformers.distributed.mixin",
    "transformers.distributed.fsdp",
)
_REPLACED_NAMES = (  # What from_pretrained replaces while it runs.
    (_LOADING, "DtensorShardOperation"),
    (_LOADING, "set_param_for_module"),
    (_SHARDING, "apply_fully_sharded_data_parallelism"),
    (_PLAN, "fully_shard"),
)


def from_pretrained(
    model_class: Any,
    folder: str | Path,
    *,
    shard: Callable[[nn.Module, DeviceMesh], Any] | None = None,
    distributed_config: Any = None,
    orig_param_policy: OrigParamPolicy | None = None,
    placements: BufferPlacements | None = None,
    **arguments: Any,
) -> Any:
    """``model_class.from_pretrained(folder)``, sharded by :func:`torch_ragged.fsdp.fully_shard` before weights are read.

    The model is made on the meta device and sharded. Then each rank allocates its shards, and reads its own intervals of each
    checkpoint tensor into them. transformers does the rest: names that differ between checkpoint and model, tied weights,
    missing weights, buffers, ``dtype``. Checkpoint tensors that make one parameter (such as the experts of an MoE layer) are
    joined without reading more than the interval, if transformers joins them by stacking, concatenating, splitting or
    transposing. For any other conversion, and for files that are not safetensors, a rank reads these tensors whole.

    ::

        model = from_pretrained(AutoModelForCausalLM, "Qwen3-30B-A3B", dtype=torch.bfloat16,
                                orig_param_policy=lambda name, param: rows(32) if param.ndim == 2 else None)

    Args:
        model_class: an auto class or a model class of transformers.
        folder: a local folder with ``config.json`` and one or several safetensors files.
        shard: ``function(model, mesh)`` which calls ``torch_ragged.fsdp.fully_shard`` on modules of ``model`` and on ``model``
            itself, in place of the FSDP plan of transformers. ``mesh`` is 1-D, or 2-D with replicas first.
        distributed_config: transformers' ``DistributedConfig``. None: ``DistributedConfig(fsdp_size=number of ranks)``.
        orig_param_policy, placements: as in ``fully_shard``, for its calls by the plan of transformers. Names are those inside
            the module that is sharded, such as ``self_attn.q_proj.weight``.
        arguments: further ones of ``model_class.from_pretrained``, such as ``dtype``.

    Modules that are added later, such as the adapters of LoRA, are sharded by a further ``fully_shard([...])`` of them. Without
    it, forward raises ``ValueError`` on all ranks, unless gradients are disabled.

    Returns:
        the model, in evaluation mode; or with ``output_loading_info=True`` the pair that transformers returns.

    Raises:
        ImportError: transformers is missing, older than 5.23, or lacks a name that is replaced here.
        FileNotFoundError: ``folder`` is no folder.
        ValueError: there are no process groups, fewer than two ranks of data parallelism, a ``device_map``, a quantized
            checkpoint, options together with ``shard``, or ``shard`` has not sharded the model.

    Collectives: those of ``fully_shard``. Reading needs none.
    """
    require("transformers", _AT_LEAST, "whose loading this module knows")
    config = _settings(folder, shard, distributed_config, orig_param_policy, placements, arguments)
    given = {"orig_param_policy": orig_param_policy, "placements": placements}
    options: Any = {name: value for name, value in given.items() if value is not None}
    with installed(**options) as installation, _Loading(shard, installation.function) as loading:
        result = model_class.from_pretrained(folder, distributed_config=config, **arguments)
    loading.check_tied()
    loading.model.register_forward_pre_hook(_refuse_late, prepend=True)
    return result


def checkpoint_callback(folder: str | Path | None = None) -> Any:
    """A ``TrainerCallback`` that saves and resumes what ``Trainer`` does not for a model of :func:`from_pretrained`.

    ``Trainer`` saves neither optimizer, scheduler nor random states of a model that was sharded while it was loaded, and wants
    ``save_only_model=True``. With this callback, each ``checkpoint-N`` has a folder ``torch_ragged`` with all of them, and
    ``trainer.train(resume_from_checkpoint=...)`` resumes from it, on any number of ranks. If that number differs, choose
    ``per_device_train_batch_size`` so that the batch of all ranks is the same.

    ::

        arguments = TrainingArguments("out", save_only_model=True, save_steps=100)
        trainer = Trainer(model, arguments, train_dataset=data, callbacks=[checkpoint_callback()])
        trainer.train(resume_from_checkpoint=True)

    Args:
        folder: the checkpoint that ``trainer.train`` resumes from, if it is not ``checkpoint-N`` in ``output_dir``: callbacks
            are not told.

    The methods of the callback raise ``ValueError`` if the model of the ``Trainer`` is not sharded by torch_ragged, or if
    accelerate shards it. They raise ``CheckpointError`` if the checkpoint has no such folder, belongs to another checkpoint
    than the one that is resumed, or does not fit the model; no parameter was changed then.

    Collectives: those of ``torch_ragged.checkpoint.save`` and ``load``, and one broadcast of a name when training begins.
    """
    require("transformers", _AT_LEAST, "whose Trainer this module knows")
    from torch_ragged.integrations._trainer_callback import CheckpointCallback

    return CheckpointCallback(folder)


# -- checks --------------------------------------------------------------------------------------------------------------


def _settings(folder: str | Path, shard: Any, config: Any, policy: Any, placements: Any, arguments: dict[str, Any]) -> Any:
    """Check the arguments of :func:`from_pretrained`; returns the DistributedConfig."""
    from transformers.distributed import DistributedConfig

    if not Path(folder).is_dir():
        raise FileNotFoundError(f"from_pretrained reads a local folder, got {str(folder)!r}: download the model first")
    if not dist.is_initialized():
        raise ValueError("from_pretrained shards over ranks, but there is no process group: call init_process_group first")
    for name in ("device_map", "quantization_config"):
        if arguments.get(name) is not None:
            raise ValueError(f"from_pretrained got {name}, which does not go with sharding: leave it out")
    if shard is not None and (policy is not None or placements is not None):
        raise ValueError("from_pretrained got shard and options of fully_shard: pass the options in shard's own calls")
    if config is None:
        config = DistributedConfig(fsdp_size=dist.get_world_size())
    elif isinstance(config, dict):
        config = DistributedConfig(**config)
    if config.dp_size < 2:
        raise ValueError(
            f"from_pretrained got {config.dp_size} rank of data parallelism (dp_replicate_size * fsdp_size), for which "
            "transformers shards nothing: use at least 2, or load with transformers alone"
        )
    return config


def _refuse_late(model: nn.Module, args: Any) -> None:
    """Before each forward. The warning of ``fully_shard`` is for programs that reduce gradients themselves."""
    if not torch.is_grad_enabled():
        return
    groups = [group for each in model.modules() if (state := fully_shard.state(each)) is not None for group in state.groups]  # type: ignore[attr-defined]
    if found := unsharded_under([model], groups):
        raise ValueError(
            f"{', '.join(list(found.values())[:3])} under {type(model).__name__} were added after from_pretrained has sharded "
            "the model: their gradients would not be reduced. Call torch_ragged.fsdp.fully_shard([...]) with the modules that "
            "have them, after get_peft_model for example, and make the optimizer after that"
        )


# -- what is replaced in transformers --------------------------------------------------------------------------------------


class _Loading:
    """As a context, replaces names of transformers' loading, so that it allocates sharded models and fills ragged parameters.

    Attributes:
        differing: of parameters that the checkpoint holds under several names, whether the values in this rank's shard differ.
    """

    def __init__(self, shard: Callable[[nn.Module, DeviceMesh], Any] | None, fully_shard: Callable[..., Any]) -> None:
        self.shard, self.fully_shard = shard, fully_shard
        self.differing: dict[str, bool] = {}
        self._filled: dict[int, str] = {}

    def __enter__(self) -> _Loading:
        self._found = [(importlib.import_module(module), name) for module, name in _REPLACED_NAMES]
        for module, name in self._found:
            if not hasattr(module, name):
                raise ImportError(
                    f"transformers has no {module.__name__}.{name}, which from_pretrained replaces: use transformers 5.23"
                )
        self._originals = [getattr(module, name) for module, name in self._found]
        self._replace([self._operation, self._set_param, self._apply, self._fully_shard_with_tied])
        return self

    def __exit__(self, *error: Any) -> None:
        self._replace(self._originals)

    def _replace(self, functions: list[Any]) -> None:
        for (module, name), function in zip(self._found, functions):
            setattr(module, name, function)

    def _operation(self, param: DTensor) -> Any:
        """In place of ``DtensorShardOperation``: the operation that reads a checkpoint tensor for ``param``."""
        return _LazyOperation() if is_ragged(param) else self._originals[0](param)

    def _set_param(self, model: nn.Module, name: str, value: Any, loading_info: Any, quantizer: Any) -> None:
        """In place of ``set_param_for_module``: fill the parameter ``name`` from ``value``, a whole tensor."""
        module_name, _, own = name.rpartition(".")
        param: Any = getattr(model.get_submodule(module_name), own, None)
        if not is_ragged(param):
            self._originals[1](model, name, value, loading_info, quantizer)
            return
        loading_info.missing_keys.discard(name)
        if tuple(value.shape) != tuple(param.shape):
            loading_info.mismatched_keys.add((name, value.shape, param.shape))
            return
        value = value if isinstance(value, LazyTensor) else LazyTensor.of(value, None)
        first = self._filled.setdefault(id(param), name)
        if first == name:
            _fill_shard(name, param, value)
            param._is_hf_initialized = True  # Or transformers initializes it anew.
        else:
            self.differing[f"{first} and {name}"] = not _fill_shard(name, param, value, compare=True)

    def _apply(self, model: Any, meshes: Any, *plans: Any) -> Any:
        """In place of ``apply_fully_sharded_data_parallelism``: shard the model on the meta device, and allocate its shards."""
        if getattr(model.config, "quantization_config", None) is not None:
            raise ValueError("the checkpoint is quantized, which from_pretrained does not support: load a dequantized one")
        self.model, mesh = model, _mesh_of_model(model, meshes)
        model.tie_weights()  # transformers ties after loading, which is too late for one group.
        if self.shard is None:
            self._originals[2](model, meshes, *plans)
        else:
            self.shard(model, mesh)
            model._is_fsdp_managed_module = True
        if not isinstance(model, FSDPModule):
            raise ValueError(
                f"{type(model).__name__} is not sharded by torch_ragged: shard must call torch_ragged.fsdp.fully_shard on the "
                "model, after its submodules"
            )
        offloaded = model.config.distributed_config.fsdp_cpu_offload  # type: ignore[attr-defined]
        model.to_empty(device="cpu" if offloaded else mesh.device_type)  # type: ignore[attr-defined]
        return model

    def _fully_shard_with_tied(self, module: Any, **options: Any) -> Any:
        """In place of ``fully_shard`` in the FSDP plan: modules that hold tied parameters come into one group."""
        modules = list(module) if isinstance(module, (list, tuple)) else [module]
        params = {param for each in modules for param in each.parameters()}
        inside = {child for each in modules for child in each.modules()}
        tied = [m for m in self.model.modules() if m not in inside and params & set(m.parameters(recurse=False))]
        return self.fully_shard(modules + tied if tied else module, **options)

    def check_tied(self) -> None:
        """Raise on every rank if the checkpoint has different values for one tied parameter.

        One all-gather of a small object, if the checkpoint has a tied parameter under several names.
        """
        if not self.differing:
            return
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, self.differing)
        names = sorted({name for each in found for name, differs in each.items() if differs})
        if names:
            raise ValueError(
                f"the checkpoint has different values for {', '.join(names)}, which the model ties: pass a config with "
                "tie_word_embeddings=False"
            )


class _LazyOperation:
    """In place of transformers' ``DtensorShardOperation``. It cuts nothing: a shard is cut when the parameter is set."""

    def shard_tensor(
        self, source: Any, tensor_idx: int | None = None, device: Any = None, dtype: torch.dtype | None = None
    ) -> LazyTensor:
        return LazyTensor.of(source, dtype)


def _mesh_of_model(model: Any, meshes: Any) -> DeviceMesh:
    """The mesh that transformers passes to fully_shard."""
    replicas = model.config.distributed_config.dp_replicate_size > 1
    return meshes.get_mesh(("dp_replicate", "fsdp") if replicas else "fsdp")


def _fill_shard(name: str, param: Any, value: LazyTensor, compare: bool = False) -> bool:
    """Read this rank's boxes of ``value`` into the shard of ``param``; or only compare: returns whether they are equal."""
    equal = True
    with torch.no_grad():
        for chunk in param.__create_chunk_list__():
            if chunk.sizes.numel():
                own, read = (
                    param.__get_tensor_shard__(MetadataIndex(name, chunk.offsets)),
                    value.read(chunk.offsets, chunk.sizes),
                )
                if compare:
                    equal = equal and torch.equal(own, read.to(own))
                else:
                    own.copy_(read)
    return equal
