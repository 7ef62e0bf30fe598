"""SharedStore: a part of the default process group's store. Every call ends within a time limit.

It issues no collective. A store's own calls can block for many minutes if the host of the store is not reachable.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch.distributed as dist

from torch_ragged._register._torch import default_store

__all__ = ["GROUP_ENDED", "SharedStore", "is_one_host"]

T = TypeVar("T")

GROUP_ENDED = (RuntimeError, ValueError, KeyError, TypeError)
"""What torch's functions raise if the store is lost, or if the program has destroyed the process group. A thread that works in
the background may come too late at any time."""

_STORE_LIMIT = 15.0  # Seconds.
"""How long a rank waits for the store's answer."""

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.05  # Seconds, between two questions of a wait.


def is_one_host() -> bool:
    """Whether torchrun has started all ranks of the default process group on this host; equal on all ranks."""
    return os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE") == str(dist.get_world_size())


class SharedStore:
    """The keys of the default process group's store that begin with ``name``.

    Raises:
        dist.DistError: from all methods, if the store does not answer.
    """

    def __init__(self, name: str) -> None:
        self._default = default_store()
        # torchrun keeps one store for all attempts. Of several hosts, only that of the rank that has failed counts a restart.
        attempt = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/" if is_one_host() else ""
        self._store = dist.PrefixStore(f"torch_ragged/{attempt}{name}", self._default)

    @property
    def is_current(self) -> bool:
        """Whether the default process group that this store belongs to still exists."""
        return dist.is_initialized() and default_store() is self._default

    def set(self, key: str, text: str) -> None:
        """Write ``text``; other ranks may have written another one."""
        _within_limit(_STORE_LIMIT, lambda: self._store.set(key, text))

    def first(self, key: str, text: str) -> str:
        """Write ``text`` if no rank has written this key, and return what the first rank has written."""
        return self.swap(key, "", text)

    def swap(self, key: str, old: str, new: str) -> str:
        """Write ``new`` if the key has the text ``old`` (empty: if no rank has written it), and return what it has then."""
        return _within_limit(_STORE_LIMIT, lambda: self._store.compare_set(key, old, new)).decode()

    def get(self, key: str) -> str:
        """What was written. Call it if :meth:`has` is true."""
        return _within_limit(_STORE_LIMIT, lambda: self._store.get(key)).decode()

    def has(self, *keys: str) -> bool:
        """Whether all ``keys`` were written."""
        return _within_limit(_STORE_LIMIT, lambda: self._store.check(list(keys)))

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which begins at 0, and return it."""
        return _within_limit(_STORE_LIMIT, lambda: self._store.add(key, amount))

    def append(self, key: str, text: str) -> None:
        """Add ``text`` to the end of what was written; other ranks may append at once."""
        _within_limit(_STORE_LIMIT, lambda: self._store.append(key, text))  # type: ignore[attr-defined]

    def delete(self, key: str) -> None:
        """Forget a key."""
        _within_limit(_STORE_LIMIT, lambda: self._store.delete_key(key))

    def wait(self, keys: Sequence[str], seconds: float) -> bool:
        """Whether all ``keys`` were written within so many seconds."""
        return _within_limit(seconds + _STORE_LIMIT, lambda: self._wait(keys, seconds))

    def _wait(self, keys: Sequence[str], seconds: float) -> bool:
        # The store's own wait prints two warnings each time that it ends without the keys.
        deadline, pause = time.monotonic() + seconds, _SHORTEST_PAUSE
        while not self._store.check(list(keys)):
            if time.monotonic() > deadline:
                return False
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_PAUSE)
        return True


def _within_limit(limit: float, call: Callable[[], T]) -> T:
    """The result of ``call``, which runs on a thread: a store has no time limit for most of its calls.

    If it never returns, only the thread stays behind.
    """
    results: queue.SimpleQueue[tuple[T | None, Exception | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            results.put((call(), None))
        except Exception as error:
            results.put((None, error))

    threading.Thread(target=run, name="store", daemon=True).start()
    try:
        result, error = results.get(timeout=limit)
    except queue.Empty:
        raise dist.DistStoreError(f"the store of the process group has not answered within {limit:g} s") from None
    if error is not None:
        raise error
    return result  # type: ignore[return-value]
