"""Objects from their pickles, as data unless the caller trusts the checkpoint.

Without trust, torch's weights_only unpickler reads them: it knows tensors, containers, numbers, strings, and the types of
``torch.serialization.add_safe_globals``. Nothing else is looked up or called.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem

from torch_ragged.checkpoint._errors import CheckpointError

__all__ = ["ObjectPlanner", "check_object", "load_object"]

_TRUST = (
    "If you trust the checkpoint, pass trust=True to load; or allow these types only, with torch.serialization.add_safe_globals"
)
_SAVE = (
    "Save its values, as by str(path), vars(args), dataclasses.asdict(config) or array.tolist(); or allow these types where "
    "the program saves and loads, with torch.serialization.add_safe_globals"
)


def check_object(data: bytes, name: str) -> None:
    """Check, before ``data`` is saved as ``name``, that :func:`load_object` will load it.

    Raises:
        CheckpointError: it holds more than data.
    """
    load_object(data, name, trust=False, map_location="cpu", advice=_SAVE)


def load_object(data: bytes, name: str, trust: bool, map_location: str | None = None, advice: str = _TRUST) -> Any:
    """The object that ``torch.save`` wrote as ``data``.

    Args:
        data: the bytes.
        name: what they hold, for the text of the error.
        trust: if True, unpickle any object, which can run any code. If False, read data only.
        map_location: as for ``torch.load``.
        advice: what to do if it is refused, for the text of the error.

    Raises:
        CheckpointError: ``trust`` is False, and the bytes hold more than data.
    """
    if trust:
        return torch.load(io.BytesIO(data), map_location=map_location, weights_only=False)
    _check_archive(data, name)
    try:
        return torch.load(io.BytesIO(data), map_location=map_location, weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{name} holds more than data{_types(data)}. To build such objects, a pickle runs code. {advice}"
        ) from error


def _types(data: bytes) -> str:
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(data))
    except Exception:  # The bytes are not what torch.save writes: the error has no types to name.
        return ""
    return f": {', '.join(sorted(names)[:5])}" if names else ""


def _check_archive(data: bytes, name: str) -> None:
    """Refuse an archive that would take more memory than it has bytes, and torch's format from before archives, which can.

    Raises:
        CheckpointError: it is no archive as torch.save writes it.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            records = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise CheckpointError(f"{name} is no archive as torch.save writes it: {error}") from error
    packed = any(record.compress_type != zipfile.ZIP_STORED for record in records)
    if packed or sum(record.file_size for record in records) > len(data):
        raise CheckpointError(f"{name} is no archive as torch.save writes it: its records are larger than its bytes")


class ObjectPlanner(DefaultLoadPlanner):
    """DCP's load planner, which reads objects with :func:`load_object`: DCP's own would unpickle them.

    Args:
        trust: as for :func:`load_object`.
    """

    def __init__(self, trust: bool = False) -> None:
        super().__init__(flatten_sharded_tensors=False)  # It would drop a ShardedTensor of which this rank holds no shard.
        self.trust = trust

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Set an item of the state dict to the object in ``value``.

        Raises:
            CheckpointError: it holds more than data, and ``trust`` is False.
        """
        if self.trust:
            super().load_bytes(read_item, value)
            return
        found = load_object(value.read(), read_item.dest_index.fqn, trust=False)
        again = io.BytesIO()  # Written anew, because DCP's function unpickles: these bytes hold only what was read above.
        torch.save(found, again)
        again.seek(0)
        super().load_bytes(read_item, again)
