"""The numbers of a single device on any number of devices: random ops on DTensors, and models that are built without memory."""

from torch_ragged.random._deferred import deferred_init, materialize
from torch_ragged.random._single_device import single_device

__all__ = ["deferred_init", "materialize", "single_device"]
