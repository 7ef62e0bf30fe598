"""Moving weights out of a training run: to an inference engine, or to anything that takes whole tensors one after another.

==================  ==============================================================================
``stream()``        the whole tensors of a sharded model, in bounded memory
==================  ==============================================================================

This package never imports ``fsdp`` or ``optim``: it reads DTensors under any placements.
"""

from torch_ragged.transfer._stream import stream

__all__ = ["stream"]
