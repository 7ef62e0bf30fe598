"""torch_ragged.checkpoint beside types of other programs: tables of one rank as ShardedTensors, and as wrappers in DTensors."""

import tempfile
import unittest

import torch
import torch.distributed as dist
from common import run_ranks
from torch import nn
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

from torch_ragged import checkpoint
from torch_ragged.fsdp import fully_shard


class Table(nn.Module):
    """A table that rank 0 holds whole, and a state dict that has it as torchrec's have. A dense layer is sharded by ours."""

    def __init__(self, kind: str, value: float) -> None:
        super().__init__()
        mesh, mine = init_device_mesh("cpu", (dist.get_world_size(),)), dist.get_rank() == 0
        self.dense = fully_shard(nn.Linear(4, 4), mesh=mesh)
        self.weight = nn.Parameter(torch.full((6, 4) if mine else (0,), value))
        local = self.weight.detach()
        if kind == "DTensor":
            held = LocalShardsWrapper([local] if mine else [], [(0, 0)] if mine else [])
            table = DTensor.from_local(held, mesh, [Replicate()], run_check=False, shape=torch.Size((6, 4)), stride=(4, 1))
        else:
            table = sharded_tensor.empty(EnumerableShardingSpec([ShardMetadata([0, 0], [6, 4], "rank:0/cpu")]), 6, 4)
            for shard in table.local_shards():
                shard.tensor = local
        self._register_state_dict_hook(lambda module, state, prefix, _: state.update({f"{prefix}weight": table}))
        self._register_load_state_dict_pre_hook(lambda state, prefix, *_: state.update({f"{prefix}weight": local}))


def check_tables(path: str, kind: str) -> None:
    saved, loaded = Table(kind, 1.0), Table(kind, 2.0)
    folder = checkpoint.save(path, checkpoint.TrainState(saved))
    checkpoint.load(folder, checkpoint.TrainState(loaded))
    assert torch.equal(loaded.weight, saved.weight)
    assert torch.equal(loaded.dense.weight.to_local(), saved.dense.weight.to_local())


class ProgramTensorsTest(unittest.TestCase):
    def test_tables_of_one_rank_are_saved_and_loaded(self) -> None:
        for kind in ("DTensor", "ShardedTensor"):
            with self.subTest(kind), tempfile.TemporaryDirectory() as path:
                run_ranks(2, check_tables, path, kind)
