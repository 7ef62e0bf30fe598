"""torchtitan 0.3 with ``torch_ragged``: no patch, its own configs and its own trainer.

::

    torchrun --nproc-per-node 8 -m torchtitan.train --module torch_ragged.integrations.torchtitan --config llama3_8b

=====================  ==========================================================================================
``config_registry``    every config of torchtitan, by its name, sharded by ``torch_ragged.fsdp.fully_shard``
``ragged()``           the same for a config of your own, with a granularity per parameter
``optimizers``         ``Muon`` and ``AdamW8bit`` as ``optimizer_name`` of torchtitan's param groups
``checkpoints``        ``torch_ragged.checkpoint`` as torchtitan's checkpoint manager
=====================  ==========================================================================================

This package imports torchtitan, ``torch_ragged.integrations`` does not.
"""

import importlib.metadata

import torch.distributed as dist

if not (_version := importlib.metadata.version("torchtitan")).startswith("0.3."):
    # No ImportError: torchtitan's ConfigManager would hide its text.
    raise RuntimeError(
        f"torch_ragged.integrations.torchtitan is for torchtitan 0.3, found {_version}: install torchtitan 0.3.0"
    )
if not hasattr(dist, "set_timeout"):
    raise RuntimeError("torchtitan 0.3 calls torch.distributed.set_timeout, which this torch does not have: install torch 2.15")

from torch_ragged.integrations.torchtitan.parallelize import ragged  # noqa: E402  After the checks, which say more.

__all__ = ["ragged"]
