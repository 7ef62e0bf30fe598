"""generate() of an unchanged model of transformers under a plan: the tokens of one process, with a cache and without."""

import functools
import unittest

import pytest
import torch
from common import ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from zoo_models import HAS_LIBRARIES, batch_of, build

from torch_ragged.spmd import deferred_init, parallelize, zoo

pytestmark = pytest.mark.skipif(not HAS_LIBRARIES, reason="transformers and diffusers are not installed")


def check_tokens(shape, mode, length=6, caches=(True, False), **options):
    """Greedy tokens before training, and after a step of it, in which a static model finds its static modules."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    make = functools.partial(build, "llama", attention_dropout=0.0)
    torch.manual_seed(0)
    model = parallelize(deferred_init(make), zoo.llama(**options), mesh, mode=mode)
    torch.manual_seed(0)
    single = make()
    ids = torch.randint(0, 96, (4, 6))
    for trains in (False, True):
        if trains:
            batch = batch_of("llama")
            for each in (model, single):
                each(**batch).loss.backward()
                torch.optim.SGD(each.parameters(), lr=1.0).step()
        for use_cache in caches:
            call = {"max_new_tokens": length, "do_sample": False, "use_cache": use_cache, "pad_token_id": 0}
            tokens, expected = model.generate(ids, **call), single.generate(ids, **call)
            tokens = tokens.full_tensor() if isinstance(tokens, DTensor) else tokens
            assert torch.equal(tokens, expected), (trains, use_cache, tokens, expected)
    if mode == "static":
        assert "model.layers.1.mlp" in model.static_modules.report.modules, model.static_modules.report


class GenerateTest(unittest.TestCase):
    @ranks(2)
    def test_a_prompt_runs_with_static_modules_and_tokens_that_no_rank_can_cut_follow():
        check_tokens((1, 2), "static", length=2, caches=(True,), sequence_parallel=True)

    @pytest.mark.slow
    @ranks(4)
    def test_with_data_and_tensor_parallelism():
        check_tokens((2, 2), "static", sequence_parallel=True)
        check_tokens((2, 2), "eager")
        check_tokens((2, 2), "eager", sequence_parallel=True)
        check_tokens((2, 2), "static", unit=False)

    @pytest.mark.slow
    @ranks(2)
    def test_with_one_of_them():
        for shape in ((1, 2), (2, 1)):
            for mode in ("eager", "static"):
                check_tokens(shape, mode, sequence_parallel=True)


if __name__ == "__main__":
    unittest.main()
