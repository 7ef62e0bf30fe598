"""Which mesh dimensions are data-parallel, and how one parameter is cut over them, on ranks of a fake process group."""

import gc
import math
import unittest
from types import SimpleNamespace
from unittest import mock

import torch
from common import error_of, fake_group
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.two_tensor import TwoTensor

from torch_ragged import RaggedShard, StridedRaggedShard
from torch_ragged._ranks.groups import groups_of
from torch_ragged._register._torch import dtensor_like
from torch_ragged.fsdp import blocks, elements, fully_shard, plan_layout, rows
from torch_ragged.fsdp._fully_shard import parts_of
from torch_ragged.fsdp.comm._collectives import ProcessGroupCollectives
from torch_ragged.fsdp.comm._reduction import Reduction
from torch_ragged.fsdp.core._forward_order import Pass
from torch_ragged.fsdp.core._fsdp_param import Distribution
from torch_ragged.fsdp.core._fsdp_param_group import FSDPParamGroup
from torch_ragged.fsdp.core._fsdp_state import FSDPState
from torch_ragged.fsdp.core._grad_reduction import ReductionSettings
from torch_ragged.fsdp.core._mesh import DataParallelMesh
from torch_ragged.fsdp.elastic._reshard_to import (
    check_kept,
    check_movable,
    checked_states,
    copy_settings,
    keep_as,
    kept_by,
    mesh_of_states,
)
from torch_ragged.fsdp.grads._fsdp_grad import UnsynchronizedView


def mesh_of_groups(groups, call):
    return mesh_of_states([SimpleNamespace(groups=groups)], call)


def whole(*shape):
    return torch.arange(float(math.prod(shape))).view(shape)


def every_rank(*sizes):
    return [(size, rank) for size in sizes for rank in range(size)]


class Typed(TwoTensor):
    """A tensor type with its own all-gather."""

    @staticmethod
    def __new__(cls, a, b=None):
        return TwoTensor.__new__(cls, a, a.clone() if b is None else b)

    def __init__(self, a, b=None):
        super().__init__(a, a.clone() if b is None else b)

    def fsdp_pre_all_gather(self, mesh):
        return (self.a,), None

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        return None if out is not None else (outputs[0], outputs)


class ShardDimTest(unittest.TestCase):
    """Parameters cut by ``Shard(d)``: pieces, buffers and DTensors are those of ``torch.chunk``."""

    def test_pieces_are_chunks(self):
        cases = (((6, 4), 0), ((6, 4), 1), ((3, 2), 1), ((5, 3, 2), 1), ((5, 3, 2), -1), ((7,), 0))
        for ranks, rank in every_rank(1, 2, 3, 5):
            with fake_group(ranks, rank):
                dp = DataParallelMesh.of(init_device_mesh("cpu", (ranks,)))
                for shape, dim in cases:
                    with self.subTest(ranks=ranks, rank=rank, shape=shape, dim=dim):
                        self.check(dp, whole(*shape), dim)

    def check(self, dp, param, dim):
        distribution, chunks = Distribution("w", param, dp, dim), param.chunk(dp.ranks, dim)
        layout = distribution.even_layout(dp.ranks)
        self.assertEqual((layout.ranks, layout.order, layout.shard_numel), (dp.ranks, "even", chunks[0].numel()))
        self.assertEqual(layout.tensors[0].dims, (0,))
        self.assertEqual(layout.tensors[0].shape, tuple(param.shape) if dim == 0 else (param.numel(),))
        flat = distribution.flat(param)
        self.assertTrue(torch.equal(flat, torch.cat([chunk.reshape(-1) for chunk in chunks])))
        pieces = distribution.pieces(flat)
        self.assertEqual(len(pieces), len(chunks))
        for piece, chunk in zip(pieces, chunks, strict=True):
            self.assertTrue(torch.equal(piece, chunk))
        mine = flat[layout.shard_numel * dp.rank : layout.shard_numel * (dp.rank + 1)]
        sharded = distribution.sharded(mine, layout, 0)
        self.assertEqual((sharded.placements, sharded.shape), ((Shard(dim % param.ndim),), param.shape))
        self.assertEqual(sharded.stride(), param.stride())
        expected = chunks[dp.rank] if dp.rank < len(chunks) else param.narrow(dim, 0, 0)
        self.assertTrue(torch.equal(sharded.to_local(), expected))
        self.assertTrue(not mine.numel() or sharded.to_local().data_ptr() == mine.data_ptr())

    def test_parameters_without_elements_have_the_shapes_of_dtensors(self):
        for ranks, rank in every_rank(1, 2, 3, 5):
            with fake_group(ranks, rank):
                dp = DataParallelMesh.of(init_device_mesh("cpu", (ranks,)))
                for shape, dim in (((3, 0), 0), ((3, 0), 1), ((0, 3), 0), ((0, 3), 1), ((0,), 0)):
                    with self.subTest(ranks=ranks, rank=rank, shape=shape, dim=dim):
                        distribution = Distribution("w", whole(*shape), dp, dim)
                        flat = distribution.flat(whole(*shape))
                        self.assertEqual([piece.shape for piece in distribution.pieces(flat)], [shape])
                        sharded = distribution.sharded(flat, distribution.even_layout(ranks), 0)
                        expected = distribute_tensor(whole(*shape), dp.mesh, [Shard(dim)], src_data_rank=None)
                        self.assertEqual(sharded.to_local().shape, expected.to_local().shape)

    def test_a_dimension_that_does_not_exist_is_refused(self):
        with fake_group(2):
            dp = DataParallelMesh.of(init_device_mesh("cpu", (2,)))
            for dim in (2, -3):
                error = error_of(Distribution, "w", whole(3, 2), dp, dim)
                self.assertRegex(error, rf"InvalidArgument: .*Shard\({dim}\) for w of shape \(3, 2\): .* a dimension d below 2")
            for dim in (0, 1, -1, -2):
                self.assertEqual(Distribution("w", whole(3, 2), dp, dim).shard_dim, dim % 2)


class RaggedTest(unittest.TestCase):
    def test_shards_are_those_of_the_layout(self):
        for rank in range(3):
            with fake_group(3, rank):
                dp = DataParallelMesh.of(init_device_mesh("cpu", (3,)))
                distribution = Distribution("w", whole(7, 2), dp)
                layout = plan_layout([distribution.tensor_spec(rows(2))], 3)
                flat = distribution.flat(whole(7, 2))
                self.assertTrue(torch.equal(flat, whole(14)))
                units = layout.placement(0).local_units  # Of two elements.
                mine = flat.split([2 * count for count in units])[rank]
                sharded = distribution.sharded(mine, layout, 0)
                self.assertIsInstance(sharded.placements[0], RaggedShard)
                self.assertEqual(sharded.placements, (layout.placement(0),))
                self.assertEqual((sharded.shape, sharded.stride()), ((7, 2), (2, 1)))
                self.assertTrue(torch.equal(sharded.to_local(), mine))
                other = dtensor_like(distribution.local(mine + 1), sharded)
                self.assertEqual((other.placements, other.shape), (sharded.placements, sharded.shape))
                self.assertTrue(torch.equal(other.to_local(), mine + 1))

    def test_what_the_model_cuts_first_is_cut_strided(self):
        """Tensor and expert parallelism of the first dimension: each rank has parts of several stretches of the whole."""
        with fake_group(12, 5):
            mesh = init_device_mesh("cpu", (2, 2, 3), mesh_dim_names=("dp", "ep", "tp"))
            dp = DataParallelMesh.of(mesh["dp"])
            weight = distribute_tensor(whole(12, 4), mesh["ep", "tp"], [Shard(0), Shard(0)], src_data_rank=None)
            distribution = Distribution("w", weight, dp)
            self.assertEqual((distribution.shape, distribution.local_shape), ((12, 4), (2, 4)))
            layout = plan_layout([distribution.tensor_spec(elements())], 2)
            ragged = layout.placement(0)
            sharded = distribution.sharded(torch.zeros(4), layout, 0)
            strided = StridedRaggedShard(ragged.dims, ragged.units, split_factor=6)
            self.assertEqual(sharded.placements, (strided, Shard(0), Shard(0)))
            self.assertEqual(sharded.device_mesh.mesh_dim_names, ("dp", "ep", "tp"))
            later = distribute_tensor(whole(12, 4), mesh["ep"], [Shard(1)], src_data_rank=None)
            distribution = Distribution("w", later, dp)
            sharded = distribution.sharded(torch.zeros(12), plan_layout([distribution.tensor_spec(blocks(1, 1))], 2), 0)
            self.assertIsInstance(sharded.placements[0], RaggedShard)
            self.assertEqual(sharded.placements[1:], (Shard(1),))

    def test_shard_of_what_the_model_cuts_first_is_strided(self):
        with fake_group(4):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            dp = DataParallelMesh.of(mesh["dp"])
            weight = distribute_tensor(whole(8, 4), mesh["tp"], [Shard(0)], src_data_rank=None)
            for dim, placement in ((0, _StridedShard(0, split_factor=2)), (1, Shard(1))):
                sharded = Distribution("w", weight, dp, dim).shaped(torch.zeros((2, 4) if dim == 0 else (4, 2)))
                self.assertEqual(sharded.placements, (placement, Shard(0)))
                self.assertIs(type(sharded.placements[0]), type(placement))

    def test_parameters_that_cannot_be_cut_again_are_refused(self):
        with fake_group(4):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            dp = DataParallelMesh.of(mesh["dp"])
            uneven = DTensor.from_local(whole(3, 2), mesh["tp"], [Shard(0)], shape=(5, 2), stride=(2, 1), run_check=False)
            self.assertRegex(
                error_of(Distribution, "w", uneven, dp), r"ValueError: w .*is cut unevenly by .*over 2 ranks.*pad it"
            )
            both = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "ep", "tp"))
            twice = DTensor.from_local(
                whole(2, 2), both["ep", "tp"], [Shard(0)] * 2, shape=(6, 2), stride=(2, 1), run_check=False
            )
            error = error_of(Distribution, "w", twice, DataParallelMesh.of(both["dp"]))
            self.assertRegex(error, "ValueError: w .*is cut unevenly")  # Into 3 and 3, and these into 2 and 1.
            strided = [_StridedShard(1, split_factor=2)]  # Two stretches of three columns: 2 and 1.
            columns = DTensor.from_local(whole(2, 4), mesh["tp"], strided, shape=(2, 6), stride=(6, 1), run_check=False)
            self.assertRegex(error_of(Distribution, "w", columns, dp), "ValueError: w .*is cut unevenly")
            strided = [_StridedShard(0, split_factor=2)]  # Rows of both halves: no placement says the ragged cut of these.
            halves = DTensor.from_local(whole(4, 2), mesh["tp"], strided, shape=(8, 2), stride=(2, 1), run_check=False)
            error = error_of(Distribution, "w", halves, dp)
            self.assertRegex(error, "ValueError: w is a DTensor .*or _StridedShard of a later dimension than the first")
            ragged = DTensor.from_local(
                whole(3), mesh["tp"], [RaggedShard((0,), (3, 2))], shape=(5,), stride=(1,), run_check=False
            )
            self.assertRegex(
                error_of(Distribution, "w", ragged, dp), "ValueError: w is a DTensor .*sharded by fully_shard already"
            )
            self.assertEqual(error_of(Distribution, "w", distribute_tensor(whole(5), mesh["tp"], [Replicate()]), dp), "")
            data = DataParallelMesh.of(mesh, dims(("dp",)))
            other = distribute_tensor(whole(5), both, [Replicate()] * 3, src_data_rank=None)
            self.assertRegex(error_of(Distribution, "w", other, data), "ValueError: w is on .*, expected it on the mesh")
            whole_mesh = distribute_tensor(whole(4), mesh, [Shard(0), Replicate()], src_data_rank=None)
            error = error_of(Distribution, "w", whole_mesh, data)
            self.assertRegex(error, r"ValueError: Expected Replicate\(\) on data-parallel mesh dimension 0 but w is placed as")
            self.assertRegex(
                error_of(Distribution, "w", whole(4), data), "ValueError: .*all parameters must be DTensors on the full"
            )

    @fake_group(8)
    def test_a_later_dimension_that_the_model_cuts_stays_whole_in_its_shards(self):
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
        dp = DataParallelMesh.of(mesh["dp"])
        weight = distribute_tensor(torch.zeros(3, 8, 4), mesh["tp"], [Shard(1)])
        distribution = Distribution("w", weight, dp)
        self.assertEqual(distribution.local_shape, (3, 4, 4))
        self.assertTrue(distribution.reduces_gradient)
        # Of 16 elements, the model has one slice of the first dimension here.
        for granularity, block, period in (
            (elements(), 16, 0),
            (rows(2), 16, 0),
            (rows(3), 48, 0),
            (rows(3, within=0), 16, 16),  # A block ends with its period.
            (rows(2, within=0), 16, 16),
            (blocks(3, 2), 16, 16),
        ):
            spec = distribution.tensor_spec(granularity)
            self.assertEqual((spec.shape, spec.dims, spec.block, spec.period), ((3, 4, 4), (0,), block, period), granularity)
        plain = Distribution("w", torch.zeros(3, 8, 4), dp)
        self.assertFalse(plain.reduces_gradient)
        self.assertEqual(plain.tensor_spec(rows(3, within=0)), rows(3, within=0).tensor_spec("w", (3, 8, 4)))
        columns = Distribution("w", distribute_tensor(torch.zeros(6, 4, 8), mesh["tp"], [Shard(2)]), dp)
        # Blocks of 3 rows of 4 elements, counted anew in each matrix of 4 rows.
        spec = columns.tensor_spec(rows(3, within=0))
        self.assertEqual((spec.dims, spec.block, spec.period), ((0, 1), 12, 16))
        first = Distribution("w", distribute_tensor(torch.zeros(6, 4, 8), mesh["tp"], [Shard(0)]), dp)
        self.assertEqual(first.tensor_spec(rows(3)), rows(3).tensor_spec("w", (3, 4, 8)))

    @fake_group(8)
    def test_of_several_dimensions_that_the_model_cuts_the_first_decides(self):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "ep", "tp"))
        weight = distribute_tensor(torch.zeros(2, 6, 4, 8), mesh["ep", "tp"], [Shard(2), Shard(1)])
        spec = Distribution("w", weight, DataParallelMesh.of(mesh["dp"])).tensor_spec(rows(1, within=1))
        self.assertEqual((spec.shape, spec.dims, spec.block, spec.period), ((2, 3, 2, 8), (0,), 48, 0))

    def test_a_mesh_without_names_is_refused(self):
        with fake_group(4):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            unnamed = init_device_mesh("cpu", (4,))
            for dp, model in ((mesh["dp"], unnamed), (unnamed, mesh["tp"])):
                weight = distribute_tensor(whole(4, 2), model, [Replicate()], src_data_rank=None)
                error = error_of(Distribution, "w", weight, DataParallelMesh.of(dp))
                self.assertRegex(error, "ValueError: w is a DTensor on .* make both from one mesh whose dimensions have names")

    def test_a_description_is_equal_on_all_ranks(self):
        texts = set()
        for rank in range(4):
            with fake_group(4, rank):
                mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
                dp = DataParallelMesh.of(mesh["dp"])
                weight = distribute_tensor(whole(4, 2), mesh["tp"], [Shard(0)], src_data_rank=None)
                texts |= {Distribution("w", *each).text for each in ((whole(4, 2), dp), (weight, dp))}
        self.assertEqual(texts, {"(4, 2) plain", "(4, 2) placed by the model as (Shard(dim=0),) on (2,) ('tp',)"})


def dims(shard=(), replicate=()):
    return SimpleNamespace(shard_names=shard, replicate_names=replicate)


class MeshTest(unittest.TestCase):
    """DataParallelMesh: which mesh dimensions are shards, replicas and model parallelism."""

    def test_one_dimension_is_shards_and_two_are_replicas_and_shards(self):
        with fake_group(8, 5):
            dp = DataParallelMesh.of(init_device_mesh("cpu", (8,)))
            self.assertEqual((dp.has_replicas, dp.has_shards, dp.ranks, dp.rank, dp.spmd_dims), (False, True, 8, 5, []))
            self.assertIs(dp.shard_group, dp.mesh.get_group(0))
            self.assertIsNone(dp.replicate_group)
            self.assertEqual(dp.place(None), (dp.mesh, [None], [True]))
            mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
            dp = DataParallelMesh.of(mesh)
            self.assertEqual((dp.has_replicas, dp.has_shards, dp.ranks, dp.rank, dp.spmd_dims), (True, True, 4, 1, []))
            self.assertEqual((dp.shard_group, dp.replicate_group), (mesh.get_group(1), mesh.get_group(0)))
            self.assertEqual(dp.place(None), (mesh, [Replicate(), None], [True, True]))
            self.assertEqual(dp.shard_mesh, mesh["shard"])
            self.assertEqual(DataParallelMesh.of(mesh["shard"]).shard_mesh, mesh["shard"])
            self.assertEqual(DataParallelMesh.of(init_device_mesh("cpu", (4, 2))).shard_mesh.shape, (4, 2))

    def test_meshes_with_the_same_process_groups_have_one_key(self):
        with fake_group(4):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
            keys = [DataParallelMesh.of(each).key for each in (mesh, mesh, mesh["shard"], mesh["replicate"])]
            self.assertEqual([keys.index(key) for key in keys], [0, 0, 2, 3])
            outside = DeviceMesh("cpu", [1, 2])
            self.assertEqual(DataParallelMesh.of(outside).key, DataParallelMesh.of(outside).key)

    def test_a_rank_outside_of_the_mesh_has_no_process_group(self):
        with fake_group(4):
            for dp in map(DataParallelMesh.of, (DeviceMesh("cpu", [1, 2]), DeviceMesh("cpu", [[1], [2]]))):
                self.assertFalse(dp.is_member)
                self.assertEqual((dp.shard_group, dp.replicate_group, dp.rank), (None, None, 0))
                self.assertEqual(groups_of(dp.mesh), [])

    def test_named_dimensions_may_be_anywhere_in_the_mesh(self):
        with fake_group(16, 6):
            mesh = init_device_mesh("cpu", (2, 2, 2, 2), mesh_dim_names=("a", "tp", "b", "c"))
            weight = distribute_tensor(whole(8, 2), mesh, [Replicate(), Shard(0), Replicate(), Replicate()], src_data_rank=None)
            shard, replicate = None, Replicate()
            for given, data, placements, names, ranks in (
                (dims(("b",)), [2], [replicate, Shard(0), shard, replicate], ("a", "tp", "b", "c"), 2),
                (dims(("b",), ("a",)), [0, 2], [replicate, Shard(0), shard, replicate], ("a", "tp", "b", "c"), 2),
                (dims(("b", "c"), ("a",)), [0, 2, 3], [replicate, Shard(0), shard], ("a", "tp", "b_c"), 4),
                (dims((), ("b", "c")), [2, 3], [replicate, Shard(0), replicate], ("a", "tp", "b_c"), 1),
                (dims(("c",), ("b",)), [2, 3], [replicate, Shard(0), replicate, shard], ("a", "tp", "b", "c"), 2),
            ):
                with self.subTest(given):
                    dp = DataParallelMesh.of(mesh, given)
                    self.assertEqual((dp.has_shards, dp.has_replicas), (bool(given.shard_names), bool(given.replicate_names)))
                    self.assertEqual((dp.spmd_dims, dp.ranks), (data, ranks))
                    found, mine, is_dp = dp.place(weight)
                    self.assertEqual((found.mesh_dim_names, mine), (names, placements))
                    ours = {*given.shard_names, *given.replicate_names}
                    self.assertEqual(is_dp, [not ours.isdisjoint(name.split("_")) for name in names])
                    self.assertEqual(dp.shard_group is None, not given.shard_names)
                    self.assertEqual(dp.replicate_group is None, not given.replicate_names)
                    self.assertEqual(dp.mesh.ndim, dp.has_shards + dp.has_replicas)

    def test_model_parallel_dimensions_come_after_the_data_parallel_ones(self):
        with fake_group(8):
            mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))
            dp = DataParallelMesh.of(mesh["replicate", "shard"])
            found, placements, is_dp = dp.place(distribute_tensor(whole(4, 2), mesh["tp"], [Shard(1)], src_data_rank=None))
            self.assertEqual((found.mesh_dim_names, placements), (mesh.mesh_dim_names, [Replicate(), None, Shard(1)]))
            self.assertEqual(is_dp, [True, True, False])

    def test_a_mesh_of_torch_may_be_given_for_one_parameter(self):
        with fake_group(4):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            self.assertEqual(DataParallelMesh.of_info(SimpleNamespace(mesh=mesh["dp"])).mesh, mesh["dp"])
            info = SimpleNamespace(mesh=mesh["tp"], spmd_mesh=mesh, dp_mesh_dims=dims(("dp",)))
            dp = DataParallelMesh.of_info(info)
            self.assertEqual((dp.mesh, dp.spmd), (mesh["dp"], mesh))

    def test_meshes_that_cannot_be_data_parallel_are_refused(self):
        with fake_group(8):
            mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
            permuted = DeviceMesh("cpu", [[0, 1], [4, 5], [2, 3]], mesh_dim_names=("a", "b"))
            for given, names, text in (
                (mesh, None, r"expects a 1-D mesh, or a 2-D one \(replicas, shards\), got shape \(2, 2, 2\)"),
                (init_device_mesh("cpu", (2, 4)), dims(("a",)), "mesh must have mesh_dim_names when dp_mesh_dims is provided"),
                (mesh, dims(("a",), ("x",)), r"Mesh dim name 'x' not found in mesh.mesh_dim_names \('a', 'b', 'c'\)"),
                (mesh, dims(("x",), ("a",)), "Mesh dim name 'x' not found"),
                (
                    DeviceMesh("cpu", [1, 2], mesh_dim_names=("a",)),
                    dims(("a",)),
                    "does not support rank 0, which is not in",
                ),
                (DeviceMesh("cpu", [1, 0]), None, "does not have its ranks in ascending order"),
                (DeviceMesh("cpu", [[4, 5], [1, 0]]), None, "does not have its ranks in ascending order"),
                # The place of rank 0 is the same in both orders: its error must come, too.
                (DeviceMesh("cpu", [0, 2, 1, 3]), None, "does not have its ranks in ascending order"),
                (permuted, dims(("a",)), "does not have its ranks in ascending order"),
                (permuted, dims(("b",), ("a",)), "does not have its ranks in ascending order"),
            ):
                with self.subTest(text):
                    self.assertRegex(error_of(DataParallelMesh.check, given, names), f"ValueError: .*{text}")
                    self.assertRegex(error_of(DataParallelMesh.of, given, names), f"ValueError: .*{text}")
            self.assertEqual(error_of(DataParallelMesh.check, mesh["a"]), "")


class RegroupTest(unittest.TestCase):
    """What ``reshard_to`` asks of groups."""

    @fake_group(8)
    def test_neighbours_keep_parts_if_they_are_neither_one_nor_all(self):
        mesh = init_device_mesh("cpu", (8,))
        names = {None: "NoneType", 1: "NoneType", 2: "Neighbours", 4: "Neighbours", 8: "NoneType", "all": "Resident"}
        for kept, name in names.items():
            (group,) = fully_shard(nn.Linear(4, 4), mesh=mesh)._ragged_groups(recurse=True)
            keep_as(group, kept)
            self.assertEqual(type(group.keeper).__name__, name, kept)
            self.assertEqual(kept_by(group), kept if name != "NoneType" else None)
            if isinstance(kept, int) and name != "NoneType":
                self.assertRegex(
                    error_of(check_kept, group, DataParallelMesh.of(DeviceMesh("cpu", [0, 1, 2]))), "divide 3 shards"
                )
            self.assertEqual(error_of(check_kept, group, DataParallelMesh.of(DeviceMesh("cpu", [0, 1, 2, 3]))), "")
            replicas = DataParallelMesh.of(init_device_mesh("cpu", (2, 4)))
            self.assertEqual("ZERO1 or ZERO2" in error_of(check_kept, group, replicas), kept == "all")

    @fake_group(4)
    def test_weights_are_refused_for_what_keeps_equal_shards(self):
        mesh = init_device_mesh("cpu", (4,))
        for options, text in (
            ({"reshard_after_forward": 2}, "reshard_after_forward=2 .*because neighbours keep equal parts"),
            ({"shard_placement_fn": lambda param: Shard(0)}, "the placement Shard.* of weight .*leave weights out"),
            ({}, ""),
        ):
            model = fully_shard(nn.Linear(4, 4), mesh=mesh, **options)
            group = model._ragged_groups(recurse=True)[0]
            self.assertEqual(error_of(check_kept, group, group.dp), "")
            self.assertRegex(error_of(check_kept, group, group.dp, [1, 2, 3, 4]), text or "^$")
            model.set_reshard_after_forward(True)  # Neighbours keep no parts any more.
            after = error_of(check_kept, group, group.dp, [1, 2, 3, 4])
            self.assertEqual("leave weights out" in after, "shard_placement_fn" in options, after)

    @fake_group(4)
    def test_what_the_user_has_set_is_copied(self):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        old, new = (fully_shard(nn.Linear(4, 4), mesh=mesh) for _ in range(2))
        gather, reduce_scatter, hook = (lambda *args, **kwargs: None for _ in range(3))
        old.set_custom_all_gather(gather), old.set_custom_reduce_scatter(reduce_scatter)
        old.set_all_reduce_hook(hook), old.set_requires_all_reduce(False), old.set_gradient_divide_factor(3.0)
        old.set_reduce_scatter_max_input_buffers(5)
        (before,), (after,) = (model._ragged_groups(recurse=True) for model in (old, new))
        before.join("layer", before.comm)
        copy_settings(before, after)
        self.assertEqual(after.fqn, "layer")
        self.assertEqual(
            (after.process_groups.custom_all_gather, after.process_groups.custom_reduce_scatter), (gather, reduce_scatter)
        )
        self.assertEqual(after.settings, before.settings)
        self.assertIsNot(after.settings, before.settings)
        self.assertEqual(after.settings, ReductionSettings(Reduction(3.0), False, hook, 5, UnsynchronizedView))

    @fake_group(4)
    def test_groups_of_several_meshes_are_refused(self):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        groups = [fully_shard(nn.Linear(4, 4), mesh=mesh[name])._ragged_groups(recurse=True)[0] for name in "aab"]
        self.assertEqual(mesh_of_groups(groups[:2], "reshard_to").mesh, mesh["a"])
        self.assertRegex(
            error_of(mesh_of_groups, groups, "reshard_to"), "ValueError: .*reshard_to takes parameters of one mesh"
        )
        for given, name in (
            (dims(("a",)), "dp_mesh_dims="),
            (SimpleNamespace(counts_once=True), "parallelize: save a checkpoint"),
        ):
            plan = SimpleNamespace(parts=parts_of({"dp_mesh_dims": given}))
            whole_mesh = SimpleNamespace(dp=DataParallelMesh.of(mesh["a"]), plan=plan)
            self.assertIn(f"reshard_to does not support {name}", error_of(mesh_of_groups, [whole_mesh], "reshard_to"))
        module = nn.Linear(4, 4, bias=False)
        module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh["b"], [Shard(0)], src_data_rank=None))
        parallel = fully_shard(module, mesh=mesh["a"])._ragged_groups(recurse=True)
        self.assertRegex(
            error_of(mesh_of_groups, parallel, "reshard_to"),
            "ValueError: reshard_to does not support the DTensor weight of tensor",
        )

    @fake_group(4)
    def test_groups_that_would_lose_something_are_refused(self):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        self.assertEqual(error_of(check_movable, self.group(mesh["dp"]), "reshard_to"), "")
        module = nn.Linear(4, 4)
        module.weight = nn.Parameter(Typed(torch.zeros(4, 4)))
        typed = fully_shard(module, mesh=mesh["dp"])._ragged_groups(recurse=True)
        error = "ValueError: reshard_to does not support the tensor type Typed of weight"
        self.assertIn(error, error_of(mesh_of_groups, typed, "reshard_to"))
        with torch.device("meta"):
            module = nn.Linear(4, 4)
        (group,) = fully_shard(module, mesh=mesh["dp"])._ragged_groups(recurse=True)
        self.assertRegex(
            error_of(check_movable, group, "reshard_to"), "RuntimeError: weight and 1 more on the meta device: materialize"
        )
        for is_here in (True, False):  # Or on another rank.
            group = self.group(mesh["dp"])
            group.add_gradient(0, torch.ones(4, 4)) if is_here else group.expect_gradients(Pass())
            self.assertRegex(
                error_of(check_movable, group, "reshard_to"), "RuntimeError: .*has gradients that are not reduced yet"
            )
        group = self.group(mesh["dp"])
        group.collectives = ProcessGroupCollectives(group.dp.shard_group, None)
        self.assertRegex(error_of(check_movable, group, "reshard_to"), "ValueError: .*has collectives that belong to its mesh")
        for method, value, text in (
            ("set_separate_reduce_scatter_group", True, "has a second process group"),
            ("set_keep_unsharded_storage", True, "has persistent buffers"),
            ("set_persistent_buffers", True, "has persistent buffers"),
        ):
            model = fully_shard(nn.Linear(4, 4), mesh=mesh["dp"])
            getattr(model, method)(value)
            (group,) = model._ragged_groups(recurse=True)
            self.assertRegex(error_of(check_movable, group, "reshard_to"), f"ValueError: .*{text}")
            getattr(model, method)(not value)
            self.assertEqual(error_of(check_movable, group, "reshard_to"), "")

    @fake_group(2)
    def test_looks_at_states_and_groups_grow_with_their_number_only(self):
        gc.collect()  # Groups of other tests may have gradients.
        mesh, count = init_device_mesh("cpu", (2,)), 24
        model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(count)))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)(torch.ones(1, 2))  # From now on, all states share what is their root's.
        optimizers = [torch.optim.SGD([param], lr=0.1) for param in model.parameters()]
        asked, compared = [], []
        is_unsynchronized = FSDPParamGroup.is_unsynchronized.fget
        for _ in range(3):
            asked.clear()
            ask = property(lambda group: (asked.append(group), is_unsynchronized(group))[1])
            with mock.patch.object(FSDPParamGroup, "is_unsynchronized", ask):
                for optimizer in optimizers:
                    optimizer.step()
            self.assertEqual(len(asked), len(optimizers))
        model.reset_iter_state()
        equal = lambda a, b: (compared.append(a), a is b)[1]  # noqa: E731
        with mock.patch.object(FSDPState, "__eq__", equal):
            self.assertEqual(len(checked_states(model, "reshard_to")), count + 1)
        self.assertLess(len(compared), 2 * count)

    def group(self, mesh):
        (group,) = fully_shard(nn.Linear(4, 4), mesh=mesh)._ragged_groups(recurse=True)
        return group
