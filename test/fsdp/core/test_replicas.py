"""Replicas (HSDP) that hold other parameters are an error on all ranks, in the first forward and before a checkpoint."""

import tempfile
import unittest
import warnings

import torch
import torch.distributed as dist
from common import error_of, ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.two_tensor import TwoTensor

from torch_ragged import checkpoint
from torch_ragged._ranks.groups import end_messages
from torch_ragged.fsdp import fully_shard
from torch_ragged.fsdp.gates._untrained import _parts

DIM = 8
X = torch.ones(2, DIM)


def mesh_of(*shape):
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards"))


def sharded(mesh, seed, inner=True, **options):
    """The second layer and the root; with ``inner``, also the first layer is a unit."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM), nn.Linear(DIM, 4))
    if inner:
        fully_shard(model[0], mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def text_of(function, *args):
    """The text of the error, which must be that of all ranks."""
    try:
        function(*args)
        text = "no error"
    except ValueError as error:
        text = str(error)
    texts = [None] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    assert len({*texts}) == 1, texts
    return text


def saved(model, folder):
    folders = [folder]
    dist.broadcast_object_list(folders)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = checkpoint.TrainState(model, optimizer)
    state.step = 1
    return checkpoint.save(folders[0], state)


class ReplicasTest(unittest.TestCase):
    @ranks(4)
    def test_other_seeds_raise_in_the_first_forward_and_in_a_save():
        for shape in ((2, 2), (4, 1)):
            for inner in (True, False):
                model = sharded(mesh_of(*shape), dist.get_rank() // shape[1], inner)
                for call in (lambda: model(X), lambda: saved(model, tempfile.mkdtemp())):
                    for _ in range(2):  # The second call compares again.
                        text = text_of(call)
                        first = "2.weight" if inner else "0.weight"
                        assert text.startswith(f"{first} has other values on some replicas (mesh dimension replicas)"), text
                        assert "torch.manual_seed" in text and "check_replicas=False" in text, text

    @ranks(4)
    def test_the_first_parameter_that_differs_is_named_if_only_one_shard_differs():
        for rank in (0, 3):
            model = sharded(mesh_of(2, 2), 0)
            if dist.get_rank() == rank:
                model[0].bias._local_tensor.add_(1)
                model[2].weight._local_tensor.add_(1)
            assert text_of(lambda model=model: model(X)).startswith("2.weight has other values"), rank  # Of the root's group.

    @ranks(4)
    def test_equal_replicas_cost_two_small_messages_once():
        model = sharded(mesh_of(2, 2), 0)
        counts = []
        for _ in range(3):
            with CommDebugMode() as mode:
                model(X)
            counts.append(sum(n for op, n in mode.get_comm_counts().items() if "allreduce" in str(op)))
        assert counts == [2, 0, 0], counts

    @ranks(2)
    def test_a_comparison_that_fails_is_named():
        mesh = mesh_of(2, 1)
        model = sharded(mesh, 0)
        end_messages(mesh.get_group("replicas"), torch.device("cpu"))  # As if the network between the replicas fails.
        error = error_of(model, X)
        assert error.startswith("PeerError: the comparison of replicas failed: all ranks live, so the network failed"), error

    @ranks(2)
    def test_without_replicas_nothing_is_compared():
        torch.manual_seed(dist.get_rank())
        model = fully_shard(nn.Linear(DIM, DIM))
        with CommDebugMode() as mode:
            model(X)
        assert mode.get_total_counts() == 1  # The all-gather.

    @ranks(4)
    def test_replicas_may_differ_if_they_are_not_checked():
        model = sharded(mesh_of(2, 2), dist.get_rank() // 2, check_replicas=False)
        assert text_of(lambda: model(X).sum().backward()) == "no error"
        assert text_of(saved, model, tempfile.mkdtemp()) == "no error"

    @ranks(4)
    def test_the_option_must_be_equal_on_all_ranks():
        text = text_of(lambda: sharded(mesh_of(2, 2), 0, check_replicas=dist.get_rank() != 3))
        assert "check_replicas" in text, text

    @ranks(4)
    def test_values_that_are_loaded_before_the_first_forward_count():
        source = nn.Sequential(nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM), nn.Linear(DIM, 4))
        torch.manual_seed(7)
        for assign in (False, True):
            values = {name: torch.ones_like(value) for name, value in source.state_dict().items()}
            model = sharded(mesh_of(2, 2), dist.get_rank() // 2)
            assert "other values" in text_of(lambda: model(X))
            model.load_state_dict(values, assign=assign)
            assert text_of(lambda: model(X).sum().backward()) == "no error"
            assert text_of(saved, model, tempfile.mkdtemp()) == "no error"

    @ranks(4)
    def test_a_replica_that_loads_other_values_later_is_found_by_a_save():
        model = sharded(mesh_of(2, 2), 0)
        model(X).sum().backward()
        with torch.no_grad():
            model[2].bias._local_tensor.add_(dist.get_rank() // 2)
        text = text_of(saved, model, tempfile.mkdtemp())
        assert text.startswith("2.bias has other values on some replicas"), text

    @ranks(4)
    def test_running_statistics_may_differ():
        model = sharded(mesh_of(2, 2), 0)
        model[1].running_mean.add_(dist.get_rank())
        assert text_of(lambda: model(X)) == "no error"

    @ranks(4)
    def test_replicas_of_a_tensor_parallel_model_are_compared_over_all_dimensions():
        mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicas", "shards", "tp"))
        for differs in (False, True):
            torch.manual_seed(0)
            model = nn.Linear(DIM, DIM, bias=False)
            placed = distribute_tensor(model.weight.detach(), mesh["tp"], [Shard(0)])
            if differs and dist.get_rank() == 3:  # Those of the other half of the tensor have equal replicas.
                placed.to_local().add_(1)
            model.weight = nn.Parameter(placed)
            fully_shard(model, mesh=mesh["replicas", "shards"])
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                text = text_of(lambda: model(distribute_tensor(X, mesh["tp"])))
            assert text.startswith("weight has other values" if differs else "no error"), text

    def test_the_tensors_inside_of_a_parameter_are_compared_if_they_have_values(self):
        one, other = torch.ones(2), torch.zeros(2)
        self.assertEqual([id(part) for part in _parts(TwoTensor(one, other))], [id(one), id(other)])
        (empty,) = _parts(torch.ones(2, device="meta"))
        self.assertEqual((empty.device.type, empty.numel()), ("cpu", 0))


if __name__ == "__main__":
    unittest.main()
