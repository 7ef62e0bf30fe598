"""``RaggedCheckpoints``: torchtitan's checkpoint manager, with the files of ``torch_ragged.checkpoint``.

::

    --override.imports torch_ragged.integrations.torchtitan.checkpoints.complete
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torchtitan.components.checkpointer import AsyncMode, CheckpointManager
from torchtitan.config.override import derive, override
from torchtitan.tools import filesystem
from torchtitan.tools.utils import GarbageCollection

from torch_ragged import checkpoint

__all__ = ["RaggedCheckpoints", "complete"]

_MANIFEST = "manifest.json"


class RaggedCheckpoints(CheckpointManager):
    """torchtitan's manager. A checkpoint is complete or invisible, and damaged files are found before anything is loaded.

    What is saved, when, and how many checkpoints stay is as in torchtitan, and so are files for Hugging Face. A checkpoint is
    the folder ``step-00000120``, with checksums in its manifest. ``python -m torch_ragged.checkpoint inspect|verify|diff``
    reads it, and so does ``dcp.load``. Checkpoints that torchtitan's own manager has written are loaded, too.

    Raises:
        ValueError: the folder is not in a file system, but has an address such as ``gs://...``.
    """

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        pass

    def __init__(self, config: Config, **components: Any) -> None:
        super().__init__(config, **components)
        if self.enable and filesystem.is_remote(self.folder):
            raise ValueError(f"RaggedCheckpoints writes to a file system, got the folder {self.folder}: use CheckpointManager")

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        """Save as torchtitan does, with another writer.

        Raises:
            CheckpointException: of DCP, with the rank and the file, if the checkpoint could not be written. Every rank raises.
        """
        if to_hf:
            return super().dcp_save(state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf)
        step = int(os.path.basename(checkpoint_id).removeprefix("step-"))
        if dist.get_rank() == 0:  # What a save that died has left. DCP's plan comes first, so other ranks write later.
            shutil.rmtree(f"{checkpoint_id}.incomplete", ignore_errors=True)
        arguments: dict[str, Any] = {
            "storage_writer": checkpoint.CheckpointWriter(checkpoint_id, checkpoint.Manifest(step=step)),
        }
        result = None
        if async_mode == AsyncMode.DISABLED:
            dcp.save(state_dict, **arguments)
        else:
            if async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM:
                arguments |= {"async_checkpointer_type": AsyncCheckpointerType.PROCESS, "async_stager": self.stager}
            result = dcp.async_save(state_dict, process_group=self.pg, **arguments)
        if enable_garbage_collection:
            GarbageCollection.collect("GC collection invoked by checkpointer.")
        return result

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        """Load as torchtitan does. If the checkpoint has a manifest, all checksums are compared first.

        Raises:
            CheckpointException: of DCP, with the damaged file. Every rank raises, and no tensor is changed.
        """
        if from_hf or not os.path.exists(os.path.join(checkpoint_id, _MANIFEST)):
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        dcp.load(state_dict, storage_reader=checkpoint.CheckpointReader(checkpoint_id))
        self.states["model"].load_state_dict(state_dict)

    def _create_checkpoint_id(self, step: int, folder: str = "") -> str:
        given = super()._create_checkpoint_id(step, folder)
        ours = os.path.join(os.path.dirname(given), f"step-{step:08d}")
        return given if os.path.isdir(given) and not os.path.isdir(ours) else ours

    def _find_load_step(self, folder: str = "") -> int:
        newest = checkpoint.latest(folder or self.folder)
        return super()._find_load_step(folder) if newest is None else checkpoint.read_manifest(newest).step

    def _purge_stale_checkpoints(self) -> None:
        if self.keep_latest_k > 0:
            checkpoint.keep(self.folder, self.keep_latest_k)


@override(target=CheckpointManager.Config, exact=True, description="checkpoints that are complete or invisible")
def complete(config: CheckpointManager.Config) -> CheckpointManager.Config:
    """:class:`RaggedCheckpoints` with the fields of ``config``."""
    return derive(config, RaggedCheckpoints.Config)
