"""Save and resume training: a checkpoint is complete or invisible, and loads at any world size under any placements.

This package imports only public DCP (torch.distributed.checkpoint), and never ``fsdp`` or ``optim``. The checkpoints of a run
are in one folder. Each checkpoint is a folder ``step-00000120`` in DCP's format, so ``dcp.load`` can read it too. Its manifest
lists the saved tensors and their placements, the versions of the writer, and the size and the checksums of every file::

    from torch_ragged import checkpoint

    state = checkpoint.TrainState(model, optimizer, scheduler)
    if checkpoint.latest("out") is not None:
        checkpoint.load("out", state)
    while state.step < steps:
        ...
        checkpoint.save("out", state)
        checkpoint.keep("out", 3)

``python -m torch_ragged.checkpoint inspect|verify|diff PATH`` looks at a checkpoint from the command line. The model can be any
module with any DTensors: only the state dicts of the model and of the optimizer are read and written.

Files: ``_api`` (save, async_save, load), ``_state`` (the contents of a checkpoint), ``_same`` (values that must be equal on all
ranks), ``_base`` (frozen parameters that are left out), ``_matching`` (does the checkpoint fit the model), ``_rows`` (rows of
other checkpoints), ``_replicas`` (each replica reads a share), ``_rng`` (random states), ``_manifest``, ``_files`` (checksums),
``_writer`` and ``_reader`` (DCP's storage), ``_folder`` (the checkpoints of a run), ``_background`` (the save in flight),
``_errors``, ``_cli``.
"""

from torch_ragged.checkpoint._api import async_save, load, save
from torch_ragged.checkpoint._errors import CheckpointError
from torch_ragged.checkpoint._folder import keep, latest
from torch_ragged.checkpoint._manifest import FileRecord, Manifest, TensorRecord, read_manifest
from torch_ragged.checkpoint._reader import CheckpointReader
from torch_ragged.checkpoint._rows import RowPlanner, StoredRows
from torch_ragged.checkpoint._state import TrainState
from torch_ragged.checkpoint._writer import CheckpointWriter

__all__ = [
    "CheckpointError",
    "CheckpointReader",
    "CheckpointWriter",
    "FileRecord",
    "Manifest",
    "RowPlanner",
    "StoredRows",
    "TensorRecord",
    "TrainState",
    "async_save",
    "keep",
    "latest",
    "load",
    "read_manifest",
    "save",
]
