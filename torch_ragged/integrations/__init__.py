"""torch_ragged in programs that other people wrote: each module here brings ``fully_shard`` into one of them.

Nothing is imported before it is used: ``import torch_ragged.integrations`` imports none of these programs.

==================  ==============================================================================
``installed()``     any program that calls torch's ``fully_shard``: ours is called in its place
==================  ==============================================================================
"""

from torch_ragged.integrations._install import Installation, install, installed

__all__ = ["Installation", "install", "installed"]
