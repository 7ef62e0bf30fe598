"""fully_shard of plain parameters that the package ``spmd_types`` has annotated; most are skipped where it is not installed."""

import contextlib
import importlib.util
import sys
import types
import unittest
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from common import error_of, fake_group, ranks, run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor, Replicate, Shard

from torch_ragged import RaggedShard, StridedRaggedShard
from torch_ragged._register._spmd_types import annotated_as, is_annotated, untyped
from torch_ragged.fsdp import fully_shard
from torch_ragged.fsdp._spmd_types import AnnotatedParam
from torch_ragged.fsdp.core._fsdp_param import Distribution
from torch_ragged.fsdp.core._hooks import map_tensors
from torch_ragged.fsdp.core._mesh import DataParallelMesh

HAS_SPMD = bool(importlib.util.find_spec("spmd_types")) and hasattr(torch_fsdp, "DataParallelMeshDims")
FSDP2_HAS_IT = hasattr(FSDPParam, "_resolve_spmd_types_for_storage")
SIZES = {"gain": (6,), "up": (512, 6), "down": (6, 512), "bias": (6,)}  # ``up`` is cut to 256 x 6, below the in-place limit.
WIDE = {"gain": (64,), "up": (4096, 64), "down": (64, 4096), "bias": (64,)}  # 2 ** 17 local elements: written in place.


def whole(sizes):
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(size, generator=generator) / size[-1] ** 0.5 for name, size in sizes.items()}


class OneProcess(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        for name, value in whole(sizes).items():
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, x):
        return ((x * self.gain) @ self.up.t()).sin() @ self.down.t() + self.bias


class Annotated(OneProcess):
    """Tensor parallelism by hand: each rank has its rows of ``up`` and columns of ``down``, as plain tensors.

    ``names`` are the mesh axes on which parameters are annotated.
    """

    def __init__(self, sizes, mesh, names=("dp", "tp")):
        import spmd_types as spmd

        super().__init__(sizes)
        self.tp, self.seen = mesh.get_group("tp"), {}
        types = {"gain": spmd.R, "up": spmd.S(0), "down": spmd.S(1), "bias": spmd.I}
        rank, ranks = self.tp.rank(), self.tp.size()
        for name, type_ in types.items():
            value = getattr(self, name).detach()
            if isinstance(type_, spmd.Shard):
                value = value.chunk(ranks, type_.dim)[rank].contiguous()
            self.register_parameter(name, nn.Parameter(value))
            by_name = {"dp": spmd.R, "tp": type_}
            with spmd.set_current_mesh(mesh):
                spmd.assert_type(getattr(self, name), {each: by_name[each] for each in names})

    def forward(self, x):
        import spmd_types as spmd

        assert not any(isinstance(p, DTensor) for p in self.parameters())
        self.seen = {name: (spmd.get_local_type(p), spmd.get_partition_spec(p)) for name, p in self.named_parameters()}
        hidden = ((x * self.gain) @ self.up.t()).sin()
        return spmd.all_reduce(hidden @ self.down.t(), self.tp, src=spmd.P, dst=spmd.I) + self.bias


def dims(**names):
    return torch_fsdp.DataParallelMeshDims(**names)


def steps(model, batch, index):
    """Gradients, whole, and whole parameters after one step of gradient descent."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(batch[index]).pow(2).mean().backward()
        optimizer.step()
    return [t.full_tensor() for p in model.parameters() for t in (p.grad, p.detach())]


def steps_of_one(sizes, batch):
    model = OneProcess(sizes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        (sum(model(part).pow(2).mean() for part in batch) / len(batch)).backward()
        optimizer.step()
    return [t for p in model.parameters() for t in (p.grad, p.detach())]


def check_training(sizes, checks_types, names=("dp", "tp")):
    import spmd_types as spmd
    from spmd_types.checker import typecheck

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    batch = torch.randn(2, 5, sizes["gain"][0], generator=torch.Generator().manual_seed(3))
    index = mesh.get_local_rank("dp")
    model = Annotated(sizes, mesh, names)
    with spmd.set_current_mesh(mesh):
        fully_shard(model, mesh=mesh, dp_mesh_dims=dims(shard="dp"))
    placements = [type(p.placements[0]) for p in model.parameters()], [p.placements[1] for p in model.parameters()]
    assert placements[0] == [RaggedShard, StridedRaggedShard, RaggedShard, RaggedShard], placements
    assert placements[1] == [Replicate(), Shard(0), Shard(1), Replicate()], placements
    for name, value in model.state_dict().items():
        assert isinstance(value, DTensor) and torch.equal(value.full_tensor(), whole(sizes)[name]), name
    x, unsharded = batch[index].clone(), Annotated(sizes, mesh)
    with spmd.set_current_mesh(mesh), typecheck(local=True) if checks_types else contextlib.nullcontext():
        spmd.assert_type(x, {"dp": spmd.V, "tp": spmd.R})
        types = [spmd.get_local_type(each(x)) for each in (model, unsharded)]
    assert types[0] == types[1] and (types[0] or not checks_types), types
    assert model.seen == unsharded.seen and len(model.seen) == 4, (model.seen, unsharded.seen)
    model.reshard()
    ours = steps(model, batch, index)
    for mine, one in zip(ours, steps_of_one(sizes, batch), strict=True):
        torch.testing.assert_close(mine, one)
    if FSDP2_HAS_IT:
        other = Annotated(sizes, mesh, names)
        with spmd.set_current_mesh(mesh):
            torch_fsdp.fully_shard(other, mesh=mesh, dp_mesh_dims=dims(shard="dp"))
        for mine, theirs in zip(ours, steps(other, batch, index), strict=True):
            assert torch.equal(mine, theirs)


def check_errors():
    import spmd_types as spmd

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    errors = [error_of(fully_shard, Annotated(SIZES, mesh), mesh=mesh["dp"])]
    errors.append(error_of(fully_shard, Annotated(SIZES, mesh), mesh=mesh, dp_mesh_dims=dims(shard="tp")))
    missing = Annotated(SIZES, mesh)
    missing.bias = nn.Parameter(torch.ones(6))
    with spmd.set_current_mesh(mesh):
        spmd.assert_type(missing.bias, {"dp": spmd.R})
    errors.append(error_of(fully_shard, missing, mesh=mesh, dp_mesh_dims=dims(shard="dp")))
    varying = Annotated(SIZES, mesh)
    varying.bias = nn.Parameter(torch.ones(6))
    with spmd.set_current_mesh(mesh):
        spmd.assert_type(varying.bias, {"dp": spmd.R, "tp": spmd.V})
    errors.append(error_of(fully_shard, varying, mesh=mesh, dp_mesh_dims=dims(shard="dp")))
    three = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "ep", "tp"))
    reversed_order = nn.Module()
    reversed_order.weight = nn.Parameter(torch.ones(4, 2))
    with spmd.set_current_mesh(three):
        spmd.assert_type(
            reversed_order.weight, {"ep": spmd.V, "tp": spmd.V}, partition_spec=spmd.PartitionSpec(("tp", "ep"), None)
        )
    errors.append(error_of(fully_shard, reversed_order, mesh=three, dp_mesh_dims=dims(shard="dp")))
    parts = ["no whole mesh was given", "on the data-parallel axis", "annotate it on all axes", "expected R, I or S(d)"]
    parts.append("name these axes in the order")
    for error, part in zip(errors, parts, strict=True):
        assert error.startswith("InvalidArgument") and part in error, error
    return dist.get_rank()


class StandInTest(unittest.TestCase):
    """Tensors with the attributes of annotations, and a module in place of the package."""

    def test_an_annotation_goes_along_with_the_values(self):
        def tensor(**attributes):
            result = torch.ones(2)
            vars(result).update(attributes)
            return result

        both = {"_local_type": {"tp": "S(0)"}, "_partition_spec": ("tp",)}
        for given, taken, has_axes in (
            (both, both, True),
            ({"_local_type": {}}, {"_local_type": {}}, False),
            ({"_local_type": {"tp": "R"}, "note": "own"}, {"_local_type": {"tp": "R"}}, True),
            ({"note": "own"}, {}, False),
            ({}, {}, False),
        ):
            source, result = tensor(**given), torch.zeros(2)
            self.assertIs(annotated_as(source, result), result)
            self.assertEqual(vars(result), taken)
            self.assertIs(is_annotated(source), has_axes)
            self.assertIs(annotated_as(source, source), source)
            self.assertEqual(vars(source), given)
        with fake_group(2):
            placed = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (2,)), [Shard(0)])
            vars(placed).update(both)
            self.assertFalse(is_annotated(placed))

    def test_types_are_checked_outside_of_own_operations_only(self):
        checks = [True]

        @contextlib.contextmanager
        def no_typecheck():
            before, checks[0] = checks[0], False
            yield
            checks[0] = before

        @untyped
        def function(*args, **kwargs):
            """What it does."""
            return checks[0], args, kwargs

        package = types.SimpleNamespace(is_type_checking=lambda: checks[0], no_typecheck=mock.Mock(wraps=no_typecheck))
        self.assertEqual((function.__name__, function.__doc__), ("function", "What it does."))
        with mock.patch.dict(sys.modules, {"spmd_types": package}):
            self.assertEqual(function(1, two=2), (False, (1,), {"two": 2}))
            self.assertEqual(package.no_typecheck.call_count, 1)
            checks[0] = False
            self.assertEqual(function(1, two=2), (False, (1,), {"two": 2}))
            self.assertEqual(package.no_typecheck.call_count, 1)
            checks[0] = True
            self.assertEqual(function()[0], False)
        with mock.patch.dict(sys.modules):
            sys.modules.pop("spmd_types", None)
            self.assertEqual(function(1, two=2), (True, (1,), {"two": 2}))


@unittest.skipUnless(HAS_SPMD, "spmd_types is not installed, or dp_mesh_dims is newer than this torch")
class SpmdTypesTest(unittest.TestCase):
    def test_a_gradient_is_reduced_over_axes_of_model_parallelism_that_are_annotated_r(self):
        import spmd_types as spmd

        with fake_group(4):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            dp = DataParallelMesh.of(mesh, dims(shard="dp"))
            for type_, reduces in ((spmd.R, True), (spmd.I, False), (spmd.S(0), False)):
                weight = nn.Parameter(torch.ones(4, 2))
                with spmd.set_current_mesh(mesh):
                    spmd.assert_type(weight, {"dp": spmd.R, "tp": type_})
                distribution = Distribution("w", weight, dp, reading=AnnotatedParam("w", weight, dp))
                self.assertIs(distribution.reduces_gradient, reduces, type_)

    def test_a_tensor_of_the_same_values_takes_the_annotation(self):
        import spmd_types as spmd

        with fake_group(4):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            weight = torch.ones(4, 2)
            with spmd.set_current_mesh(mesh):
                spmd.assert_type(weight, {"dp": spmd.R, "tp": spmd.S(0)})
            cast = map_tensors(lambda tensor: tensor.double(), [weight])[0]
            self.assertEqual(spmd.get_local_type(cast), spmd.get_local_type(weight))
            self.assertEqual(spmd.get_partition_spec(cast), spmd.get_partition_spec(weight))
            self.assertTrue(is_annotated(cast))
            self.assertFalse(is_annotated(map_tensors(lambda tensor: tensor.double(), torch.ones(1))))

    def test_axes_of_one_rank_need_no_annotation(self):
        import spmd_types as spmd

        with fake_group(4):
            mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "ep", "tp"))
            weight = nn.Parameter(torch.ones(4, 2))
            with spmd.set_current_mesh(mesh):
                spmd.assert_type(weight, {"dp": spmd.R, "tp": spmd.S(0)})
            dp = DataParallelMesh.of(mesh, dims(shard="dp"))
            distribution = Distribution("w", weight, dp, reading=AnnotatedParam("w", weight, dp))
            self.assertEqual((distribution.shape, distribution.local_shape), ((8, 2), (4, 2)))

    def test_checkpoints_have_whole_parameters_and_training_is_that_of_one_process(self):
        run_ranks(4, check_training, SIZES, False)

    def test_matmuls_write_gradients_that_need_no_other_reduction_in_place(self):
        run_ranks(4, check_training, WIDE, False)

    def test_types_are_checked_in_forward_and_not_in_hooks(self):
        run_ranks(4, check_training, SIZES, True)
        run_ranks(4, check_training, WIDE, True)

    def test_data_parallel_axes_need_no_annotation(self):
        run_ranks(4, check_training, SIZES, True, ("tp",))

    @ranks(4)
    def test_a_mesh_of_one_parameter_keeps_its_data_parallel_dimensions():
        import spmd_types as spmd

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        info = types.SimpleNamespace(mesh=mesh["dp"], spmd_mesh=mesh, dp_mesh_dims=dims(shard="dp"))
        model = Annotated(SIZES, mesh)
        with spmd.set_current_mesh(mesh):
            fully_shard(
                model, mesh=mesh["dp"], shard_placement_fn=lambda param: types.SimpleNamespace(placement=None, mesh_info=info)
            )
        assert model.state_dict().keys() == whole(SIZES).keys()
        for name, value in model.state_dict().items():
            assert torch.equal(value.full_tensor(), whole(SIZES)[name]), name

    def test_a_piece_is_never_taken_for_the_whole_parameter(self):
        self.assertEqual(run_ranks(4, check_errors), [0, 1, 2, 3])
