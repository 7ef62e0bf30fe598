"""Parameters that a parallelism has replaced in their modules: who still holds one can find what is there now.

It holds no module and no parameter alive.
"""

from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["replaced"]

replaced = WeakTensorKeyDictionary()
"""By replaced parameter: its module (a weak reference), its name there, the call that has replaced it, and more advice."""
