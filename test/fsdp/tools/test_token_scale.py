"""token_scale: gradients are the mean over the tokens of all ranks; what is no number of tokens is an error on all ranks."""

import unittest

import torch
import torch.distributed as dist
from common import error_of, ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from torch_ragged.fsdp import fully_shard, token_scale


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 36), nn.GELU(), nn.Linear(36, 5)).double()


class TokenScaleTest(unittest.TestCase):
    @ranks(3)
    def test_gradients_are_the_mean_over_all_tokens():
        """Batches of 7, 0 and 2 rows in one micro-batch, of 1, 0 and 3 in another; on a 1-D and on a 2-D mesh."""
        single, rank = make(), dist.get_rank()
        data = torch.randn(13, 12, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        parts = [part.split([1, 0, 3] if index else [7, 0, 2]) for index, part in enumerate(data.split([9, 4]))]
        single(data).pow(2).mean(-1).mean().backward()
        for shape in ((3,), (3, 1)):
            mesh = init_device_mesh("cpu", shape)
            model = fully_shard(make(), mesh=mesh, weights=[1, 1, 4] if shape == (3,) else None)
            scale = token_scale(sum(len(part[rank]) for part in parts), mesh)
            for index, part in enumerate(parts):
                model.set_requires_gradient_sync(index == 1)
                (model(part[rank]).pow(2).mean(-1).sum() * scale).backward()
            for (name, param), plain in zip(model.named_parameters(), single.parameters(), strict=True):
                torch.testing.assert_close(param.grad.full_tensor(), plain.grad, msg=lambda m, n=name: f"{n}: {m}")
        assert token_scale(torch.tensor(2)) == 3 / 6
        for wrong in (-1, 1.5, True, None, torch.ones(1), torch.ones(2, dtype=torch.int64)):
            mine = error_of(token_scale, wrong if rank == 1 else 3)
            assert "tokens must be" in mine, (wrong, mine)
        assert "no rank has tokens" in error_of(token_scale, 0)

    @ranks(2)
    def test_different_meshes_before_any_fully_shard_are_an_error_on_all_ranks():
        meshes = [init_device_mesh("cpu", shape) for shape in ((2,), (2, 1))]
        text = error_of(token_scale, 3, meshes[dist.get_rank()])
        assert "token_scale was called with different meshes on different ranks" in text, text
        assert "tokens must be" in error_of(token_scale, -1 if dist.get_rank() else 3)
        assert token_scale(2) == 0.5


if __name__ == "__main__":
    unittest.main()
