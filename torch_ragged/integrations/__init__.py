"""torch_ragged in programs that other people wrote: each module here brings ``fully_shard`` into one of them.

Nothing is imported before it is used: ``import torch_ragged.integrations`` imports none of these programs.

==================  ==============================================================================
``installed()``     any program that calls torch's ``fully_shard``: ours is called in its place
``accelerate``      ``use()``: ``Accelerator.prepare`` shards with ours, and wrong use is refused
``transformers``    ``from_pretrained()`` into shards, and ``checkpoint_callback()`` for ``Trainer``
``torchao``         ``optimizer_blocks()``: the blocks of its low-bit optimizers stay whole
``trl``             ``StreamedWeights``: weights go to an inference server by ``transfer.stream()``
``verl``            ``register()``: an engine with ragged shards
==================  ==============================================================================
"""

from torch_ragged.integrations._install import Installation, install, installed

__all__ = ["Installation", "install", "installed"]
