"""Errors of ``fully_shard`` that users of FSDP2 catch under another name."""

from __future__ import annotations

__all__ = ["InvalidArgument"]


class InvalidArgument(ValueError, AssertionError):
    """A wrong argument. FSDP2 raises AssertionError for it, this package ValueError: this class is both."""
