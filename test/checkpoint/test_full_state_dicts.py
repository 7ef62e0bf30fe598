"""Full state dicts of torch's ``StateDictOptions``: tensors of other shapes than the model's are an error on all ranks."""

import unittest

import torch
import torch.distributed as dist
from common import ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict as optimizer_states
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from torch_ragged.fsdp import fully_shard

FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
FULL = StateDictOptions(full_state_dict=True)

SHAPES = (
    ((12, 8), (11, 8)),
    ((22, 8), (11, 8)),
    ((11, 9), (11, 8)),
    ((12,), (11,)),
    ((3, 4, 8), (3, 2, 8)),
    ((10, 8), (11, 8)),
    ((1, 8), (11, 8)),
    ((11, 1), (11, 8)),
    ((88,), (11, 8)),
    ((11, 8, 1), (11, 8)),
    ((8, 11), (11, 8)),
    ((1, 11), (11,)),
)
"""The shapes in the state dict and in the model."""


class Model(nn.Module):
    """``second`` has the shape that differs, so that a check that comes late has copied ``first``."""

    def __init__(self, shape, value=0.0):
        super().__init__()
        self.first = nn.Parameter(torch.full((4, 4), value))
        self.second = nn.Parameter(torch.full(shape, value))


def given(state_dict, options):
    """What each rank passes: with ``FROM_RANK_0``, the others pass nothing."""
    return state_dict if not options.broadcast_from_rank0 or dist.get_rank() == 0 else {}


def text_of(function, *args, **kwargs):
    try:
        return f"no error: {function(*args, **kwargs)}"
    except RuntimeError as error:
        return str(error)


def check_refused(model, shapes, options):
    text = text_of(set_model_state_dict, model, given(Model(shapes[0], 1.0).state_dict(), options), options=options)
    wanted = f"size mismatch for second: the full state dict has shape {shapes[0]}, the model has {shapes[1]}"
    assert wanted in text, (shapes, text)
    for param in model.parameters():
        assert not param.full_tensor().any(), shapes  # Nothing was copied.


class FullStateDictTest(unittest.TestCase):
    @ranks(2)
    def test_a_parameter_of_another_shape_is_named_on_all_ranks_and_nothing_is_copied():
        for options in (FROM_RANK_0, FULL):
            for shapes in SHAPES:
                check_refused(fully_shard(Model(shapes[1])), shapes, options)

    @ranks(4)
    def test_a_parameter_that_tensor_parallelism_cuts_is_named_too():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for dim in (0, 1):
            for shapes in (((16, 8), (8, 8)), ((8, 16), (8, 8)), ((4, 8), (8, 8))):
                model = Model(shapes[1])
                for name in ("first", "second"):
                    placed = distribute_tensor(getattr(model, name).detach(), mesh["tp"], [Shard(dim)])
                    setattr(model, name, nn.Parameter(placed))
                check_refused(fully_shard(model, mesh=mesh["dp"]), shapes, FROM_RANK_0)

    @ranks(2)
    def test_an_optimizer_state_of_another_shape_is_named():
        for shapes in (((12, 8), (11, 8)), ((10, 8), (11, 8))):
            for options in (FROM_RANK_0, FULL):
                model, source = fully_shard(Model(shapes[1])), Model(shapes[0], 1.0)
                optimizer, other = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(source.parameters())
                sum(param.square().sum() for param in source.parameters()).backward()
                other.step()
                states = given(optimizer_states(source, other), options)
                text = text_of(set_optimizer_state_dict, model, optimizer, states, options=options)
                assert "size mismatch for state.second.exp_avg: the full state dict has shape" in text, text
                for state in optimizer.state.values():
                    assert not state["exp_avg"].full_tensor().any()

    @ranks(2)
    def test_equal_shapes_are_loaded_and_cast():
        for options in (FROM_RANK_0, FULL):
            model, source = fully_shard(Model((11, 8))), Model((11, 8), 1.0).to(torch.float64)
            set_model_state_dict(model, given(source.state_dict(), options), options=options)
            for param in model.parameters():
                assert param.dtype == torch.float32
                assert bool((param.full_tensor() == 1).all())

    @ranks(2)
    def test_a_missing_name_is_an_error_on_all_ranks():
        model, values = fully_shard(Model((11, 8))), Model((11, 8), 1.0).state_dict()
        del values["second"]
        text = text_of(set_model_state_dict, model, given(values, FROM_RANK_0), options=FROM_RANK_0)
        assert 'Missing key(s) in state_dict: "second"' in text, text


if __name__ == "__main__":
    unittest.main()
