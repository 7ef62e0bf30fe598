"""What tests on one rank of a fake process group share: models that really train."""

import unittest

import torch
from common import enter_fake_group
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from torch_ragged.fsdp import fully_shard

__all__ = ["BFLOAT16", "WIDTH", "OneRankTest", "groups_of"]

WIDTH = 6
BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)  # With it, one rank has gathered parameters beside its shards.


class OneRankTest(unittest.TestCase):
    """Models that train on one rank."""

    def setUp(self):
        enter_fake_group(self, 1)
        self.mesh = init_device_mesh("cpu", (1,))
        torch.manual_seed(0)

    def sharded(self, *modules, **knobs):
        model = nn.Sequential(*modules)
        for module in model:
            fully_shard(module, mesh=self.mesh, **knobs)
        return fully_shard(model, mesh=self.mesh, **knobs)


def groups_of(model):
    return model._ragged_groups(recurse=True)
