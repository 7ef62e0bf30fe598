"""Meshes that fully_shard takes: named dimensions, replicas, and tensor parallelism beside them."""

import copy
import logging
import unittest
import warnings

import torch
import torch.distributed as dist
from common import error_of, ranks, run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from torch_ragged import StridedRaggedShard
from torch_ragged._register._torch import drop_advice_to_flatten
from torch_ragged.fsdp import fully_shard, rows


def dp_and_tp():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def tensor_parallel(mesh):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    for layer, placement in zip(module, (Shard(0), Shard(1)), strict=True):
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Replicate(), placement]))
    return module


def named_dimension_errors():
    from torch.distributed.fsdp import DataParallelMeshDims

    mesh, other = dp_and_tp(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    return [
        error_of(fully_shard, nn.Linear(4, 4), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp")),
        error_of(fully_shard, nn.Linear(4, 4), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="x")),
        error_of(fully_shard, tensor_parallel(mesh), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="tp")),
        error_of(fully_shard, tensor_parallel(other), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp")),
    ]


def check_replicas_and_model_parallel():
    """Replicas, shards and tensor parallelism at once, each cut another way, for parameters that nothing divides."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))
    dp, tp = mesh["replicate", "shard"], mesh["tp"]
    torch.manual_seed(0)
    single = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 7, bias=False), nn.LayerNorm(7))
    model = copy.deepcopy(single)
    cuts = {"0.weight": Shard(0), "0.bias": Shard(0), "1.weight": Shard(1), "2.weight": Replicate(), "2.bias": Replicate()}
    for name, parameter in list(model.named_parameters()):
        module, attribute = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        setattr(module, attribute, nn.Parameter(distribute_tensor(parameter.detach(), tp, [cuts[name]])))
    fully_shard(model, mesh=dp, orig_param_policy=lambda fqn, p: rows(2) if fqn == "0.weight" else None)
    placements = {name: p.placements for name, p in model.named_parameters()}
    assert all(p.device_mesh == mesh for p in model.parameters())
    assert all(p[0] == Replicate() and p[2] == cuts[name] for name, p in placements.items()), placements
    assert isinstance(placements["0.weight"][1], StridedRaggedShard) and placements["1.weight"][1].dims == (0,)
    data = torch.randn(8, 5, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        mine = data.chunk(4)[2 * mesh.get_local_rank("replicate") + mesh.get_local_rank("shard")]
        model(DTensor.from_local(mine, tp, [Replicate()], run_check=False)).to_local().pow(2).mean().backward()
        single(data).pow(2).mean().backward()
        for (name, ours), (_, plain) in zip(model.named_parameters(), single.named_parameters(), strict=True):
            assert torch.equal(ours.full_tensor(), plain), name
            torch.testing.assert_close(
                ours.grad.full_tensor(), plain.grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
            )
    uneven = nn.Linear(4, 5)
    uneven.weight = nn.Parameter(distribute_tensor(uneven.weight.detach(), tp, [Shard(0)]))
    return [error_of(fully_shard, uneven, mesh=dp), error_of(fully_shard, model[0], mesh=mesh["shard"])]


def warnings_of_context_parallel():
    texts = []
    for names in (("dp", "cp"), ("cp", "fsdp"), ("replicate", "shard"), None):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fully_shard(nn.Linear(4, 4), mesh=mesh)
            fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (4,), mesh_dim_names=("cp",)))
        texts.append([str(each.message) for each in caught if "fully_shard" in str(each.message)])
    return texts


class MeshTest(unittest.TestCase):
    @unittest.skipIf(torch.__version__ < "2.13", "new in torch 2.13")
    @ranks(4)
    def test_a_named_mesh_dimension_beside_tensor_parallelism_trains_as_fsdp2s():
        """``dp_mesh_dims``: DTensors on the whole mesh, of which some dimensions are data-parallel."""
        from torch.distributed.fsdp import DataParallelMeshDims

        mesh, models = dp_and_tp(), []
        for shard in (torch_fully_shard, fully_shard):
            models.append(shard(tensor_parallel(mesh), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp")))
        curves = []
        for model in models:
            optimizer, curve = torch.optim.SGD(model.parameters(), lr=0.05), []
            for step in range(3):
                x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
                local = x.chunk(2)[mesh.get_local_rank("dp")]
                x = DTensor.from_local(local, mesh, [Shard(0), Replicate()], run_check=False)
                loss = model(x).pow(2).sum()
                loss.backward()
                optimizer.step(), optimizer.zero_grad()
                curve.append(loss.full_tensor().item())
            curves.append(torch.tensor(curve))
        torch.testing.assert_close(curves[1], curves[0])
        assert curves[0][0] - curves[0][-1] > 0.01
        for theirs, ours in zip(*(model.parameters() for model in models)):
            torch.testing.assert_close(ours.full_tensor(), theirs.full_tensor())

    @unittest.skipIf(torch.__version__ < "2.13", "new in torch 2.13")
    @ranks(4)
    def test_all_named_mesh_dimensions_may_be_data_parallel():
        """All dimensions flattened, replicas only, and both with names."""
        from torch.distributed.fsdp import DataParallelMeshDims

        mesh = dp_and_tp()
        for dims in (
            DataParallelMeshDims(shard=("dp", "tp")),
            DataParallelMeshDims(replicate="dp", shard="tp"),
            DataParallelMeshDims(replicate=("dp", "tp")),
        ):
            modules = []
            for shard in (torch_fully_shard, fully_shard):
                torch.manual_seed(0)
                module = nn.Linear(8, 8)
                for name, param in list(module.named_parameters()):
                    setattr(module, name, nn.Parameter(distribute_tensor(param.detach(), mesh, [Replicate()] * 2)))
                modules.append(shard(module, mesh=mesh, dp_mesh_dims=dims))
                x = torch.randn(4, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
                module(DTensor.from_local(x, mesh, [Shard(0), Shard(0)], run_check=False)).sum().backward()
            for theirs, ours in zip(*(module.parameters() for module in modules)):
                torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad.full_tensor())

    @unittest.skipIf(torch.__version__ < "2.13", "new in torch 2.13")
    def test_bad_names_of_mesh_dimensions_are_refused(self):
        for errors in run_ranks(4, named_dimension_errors):
            words = (
                "must be DTensors on the full mesh",
                "'x' not found",
                "Expected Replicate() on data-parallel mesh dimension",
                "expected it on the mesh passed to fully_shard",
            )
            for error, text in zip(errors, words, strict=True):
                self.assertIn(text, error)

    def test_context_parallelism_that_would_be_replicas_is_a_warning(self):
        for dp_cp, cp_fsdp, named, unnamed in run_ranks(4, warnings_of_context_parallel):
            self.assertIn("the ranks of dimension 'dp' are replicas, and parameters are sharded over 'cp' only", dp_cp[0])
            self.assertIn("the ranks of dimension 'cp' are replicas, and parameters are sharded over 'fsdp' only", cp_fsdp[0])
            self.assertEqual((len(dp_cp), len(cp_fsdp), named, unnamed), (1, 1, [], []))

    @ranks(4)
    def test_advice_to_flatten_the_joint_mesh_is_not_logged():
        """torch gives it once per mesh, for a sum over two dimensions. This mesh is not the user's, so nobody can follow it."""
        drop_advice_to_flatten(False)  # As in a process that has sharded nothing yet.
        logger, handler, logged = logging.getLogger("torch.distributed.tensor._redistribute"), logging.Handler(), []
        handler.emit = lambda record: logged.append(record.getMessage())
        logger.addHandler(handler)
        try:
            plain = init_device_mesh("cpu", (2, 2), mesh_dim_names=("advised", "other"))
            assert DTensor.from_local(torch.ones(()), plain, [Partial(), Partial()]).full_tensor() == 4
            assert ["sequential" in text for text in logged] == [True], logged
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("unadvised", "tp"))
            model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
            for layer, placement in zip(model, (Shard(0), Shard(1)), strict=True):
                layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh["tp"], [placement]))
            fully_shard(model, mesh=mesh["unadvised"])
            for param in model.parameters():
                param.grad = torch.ones_like(param)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
            torch.testing.assert_close(norm, torch.tensor(128**0.5))  # The last bit depends on the CPU.
            assert len(logged) == 1, logged
        finally:
            logger.removeHandler(handler)

    @ranks(4)
    def test_a_model_on_an_equal_mesh_uses_the_groups_of_its_own_mesh():
        """Each ``init_device_mesh`` makes groups. DTensor remembers ops by equal meshes, on the ranks that have called them."""
        for _ in range(2):
            mesh = dp_and_tp()
            model = fully_shard(nn.Linear(4, 4), mesh=mesh)
            optimizer = torch.optim.AdamW(model.parameters())
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            if dist.get_rank() == 0:
                (model.weight.detach() + 1).to_local()
            state = optimizer.state[model.weight]["exp_avg"]
            for tensor in (model.weight, model.weight.grad, state, model.weight.detach() + 1):
                assert tensor.device_mesh.get_all_groups() == mesh.get_all_groups()
                tensor.full_tensor()

    @ranks(1)
    def test_one_rank_has_no_second_copy_of_its_parameters():
        """On one rank, parameters keep one copy and their addresses, and train as without fully_shard."""
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(8, 300), nn.Tanh(), nn.Linear(300, 300))
        model = copy.deepcopy(plain)
        for layer in (model[0], model[2]):
            fully_shard(layer)
        fully_shard(model)
        optimizers = [torch.optim.Adam(each.parameters(), 0.01, foreach=True) for each in (plain, model)]
        addresses, seen = [param.to_local().data_ptr() for param in model.parameters()], []
        model[2].register_forward_pre_hook(lambda module, _: seen.append(module.weight.data_ptr()))
        for step in range(3):
            x = torch.randn(5, 8, generator=torch.Generator().manual_seed(step))
            for each, optimizer in zip((plain, model), optimizers, strict=True):
                each(x).pow(2).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            for param, wanted in zip(model.parameters(), plain.parameters(), strict=True):
                assert torch.equal(param.full_tensor(), wanted)
        assert [param.to_local().data_ptr() for param in model.parameters()] == addresses
        assert seen == [addresses[2]] * 3, (seen, addresses)
        groups = model._ragged_groups(recurse=True)
        assert not any(group.buffers()["gathered"] for group in groups)
        half = fully_shard(nn.Linear(4, 4), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        assert half(torch.ones(2, 4)).dtype == torch.bfloat16
        half.to(torch.bfloat16)
        half(torch.ones(2, 4)).sum().backward()
        assert half.weight.grad.dtype == torch.bfloat16

    def test_replicas_shards_and_model_parallelism_train_as_one_process(self):
        for uneven, twice in run_ranks(8, check_replicas_and_model_parallel):
            self.assertIn("weight of shape (5, 4) is cut unevenly by S(0) over 2 ranks of model parallelism", uneven)
            self.assertIn("is sharded already, as 0.weight of an earlier fully_shard call", twice)
