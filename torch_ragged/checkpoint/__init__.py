"""Checkpoints to resume training from: complete or invisible, readable at any world size, by any placement.

A folder holds the checkpoints of a run, each a folder ``step-00000120`` in the format of torch.distributed.checkpoint (DCP), so
that ``dcp.load`` reads it too, and a manifest: what was saved, by whom, and size and checksums of every file::

    from torch_ragged import checkpoint

    state = checkpoint.TrainState(model, optimizer, scheduler)
    if checkpoint.latest("out") is not None:
        checkpoint.load("out", state)
    while state.step < steps:
        ...
        checkpoint.save("out", state)
        checkpoint.keep("out", 3)

``python -m torch_ragged.checkpoint inspect|verify|diff PATH`` shows them to people. Files by noun: ``_state`` (what is saved),
``_same`` (values that must be the same on all ranks), ``_manifest``, ``_files`` (checksums), ``_writer`` and ``_reader`` (DCP's
storage), ``_folder`` (a run's checkpoints), ``_api``, ``_cli``. Only public DCP is used, and only what a model and an optimizer
offer as state dicts: any model on any DTensors goes.
"""

from torch_ragged.checkpoint._api import async_save, load, save
from torch_ragged.checkpoint._errors import CheckpointError
from torch_ragged.checkpoint._folder import keep, latest
from torch_ragged.checkpoint._manifest import FileRecord, Manifest, TensorRecord, read_manifest
from torch_ragged.checkpoint._reader import CheckpointReader
from torch_ragged.checkpoint._state import TrainState
from torch_ragged.checkpoint._writer import CheckpointWriter

__all__ = [
    "CheckpointError",
    "CheckpointReader",
    "CheckpointWriter",
    "FileRecord",
    "Manifest",
    "TensorRecord",
    "TrainState",
    "async_save",
    "keep",
    "latest",
    "load",
    "read_manifest",
    "save",
]
