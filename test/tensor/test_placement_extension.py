"""The extension protocol, by a placement that is not ragged: DTensor asks it wherever it would look at a placement's kind."""

import tempfile
import unittest

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.tensor as dt
from common import error_of, ranks, run_ranks
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OutputSharding
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement

from torch_ragged.tensor._placement_extension import CheckpointExtension, OpExtension, PlacementExtension, extension_of


class Cyclic(Placement):
    """Rank r has rows r, r + n, r + 2n, ... of a tensor: a cut that no box describes. On meshes of one dimension."""

    def __eq__(self, other):
        return isinstance(other, Cyclic)

    def __hash__(self):
        return hash(Cyclic)

    def __str__(self):
        return "C"


class Bare(Cyclic):
    """One that brings nothing."""

    extension = PlacementExtension()


def strides(shape):
    return torch.empty(shape, device="meta").stride()


def dtensor(local, mesh, placements, shape):
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(torch.Size(shape), strides(shape), local.dtype))
    return DTensor(local, spec, requires_grad=local.requires_grad)


class Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, placements):
        ctx.placements = tensor.placements
        target = DTensorSpec(tensor.device_mesh, tuple(placements), tensor_meta=tensor._spec.tensor_meta)
        local = tensor._spec.placements[0].extension or placements[0].extension
        moved = local.redistribute_local_tensor(tensor._local_tensor, tensor._spec, target, async_op=False, is_explicit=True)
        return dtensor(moved, tensor.device_mesh, placements, tensor.shape)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.redistribute(placements=ctx.placements), None


class CyclicExtension(PlacementExtension):
    def rows(self, mesh):
        return slice(mesh.get_local_rank(), None, mesh.size())

    def from_local(self, local, mesh, placements, run_check, shape):
        count = len(range(shape[0])[self.rows(mesh)])
        if local.shape[0] != count:
            raise ValueError(f"expected {count} rows, got {local.shape[0]}")
        return tuple(placements), torch.Size(shape), strides(shape)

    def distribute_tensor(self, tensor, mesh, placements, src_data_rank):
        whole = distribute_tensor(tensor, mesh, [Replicate()], src_data_rank=src_data_rank)
        return whole.redistribute(placements=placements)

    def local_shape_and_global_offset(self, shape, mesh, placements, skip_offset):
        return (len(range(shape[0])[self.rows(mesh)]), *shape[1:]), ()

    def redistribute(self, tensor, mesh, placements, **options):
        return Redistribute.apply(tensor, tuple(placements))

    def redistribute_local_tensor(self, local, current, target, *, async_op, is_explicit):
        mesh = current.mesh
        if isinstance(current.placements[0], Cyclic):
            whole = torch.zeros(current.shape, dtype=local.dtype)
            whole[self.rows(mesh)] = local
            dist.all_reduce(whole, group=mesh.get_group())
        else:
            whole = dtensor(local, mesh, current.placements, current.shape).full_tensor()
        if isinstance(target.placements[0], Cyclic):
            return whole[self.rows(mesh)].clone()
        return distribute_tensor(whole, mesh, target.placements).to_local()

    def to_local_gradient(self, spec, placements, gradient):
        return dtensor(gradient, spec.mesh, placements or spec.placements, spec.shape)


class CyclicSharding(OutputSharding):
    def local_results(self, op, op_info):
        return op(*op_info.local_args, **op_info.local_kwargs)


class CyclicOps(OpExtension):
    """Element-wise ops of one tensor; exp by its own run, square as the dispatcher does, mul at once, sum not at all."""

    aten = torch.ops.aten

    def propagate(self, op, args, kwargs, op_info, try_cache):
        spec = op_info.flat_args_schema[0]
        if op is self.aten.mul.Tensor:
            return dtensor(op(args[0]._local_tensor, 3), spec.mesh, spec.placements, spec.shape)
        if op is self.aten.exp.default:
            return CyclicSharding(spec, needs_redistribute=True, redistribute_schema=op_info.schema)
        if op in (self.aten.pow.Tensor_Scalar, self.aten.detach.default, self.aten.copy_.default):
            return OutputSharding(spec)
        raise NotImplementedError(f"{op} on rows here and there")

    def dispatch(self, op, args, kwargs):
        return torch.tensor(-7)

    def factory(self, function, size, mesh, placements, **options):
        whole = function(size, fill_value=options["fill_value"])
        return dtensor(whole[CYCLIC.rows(mesh)], mesh, placements, size)


class CyclicCheckpoint(CheckpointExtension):
    """A chunk per row."""

    def rows(self, tensor):
        return range(tensor.shape[0])[CYCLIC.rows(tensor.device_mesh)]

    def create_chunk_list(self, tensor):
        rest = len(tensor.shape) - 1
        return [
            ChunkStorageMetadata(torch.Size((r,) + (0,) * rest), torch.Size((1, *tensor.shape[1:]))) for r in self.rows(tensor)
        ]

    def create_write_items(self, fqn, tensor):
        properties = TensorProperties.create_from_tensor(tensor.to_local())
        return [
            WriteItem(
                MetadataIndex(fqn, c.offsets), WriteItemType.SHARD, tensor_data=TensorWriteData(c, properties, tensor.shape)
            )
            for c in self.create_chunk_list(tensor)
        ]

    def get_tensor_shard(self, tensor, index):
        return tensor._local_tensor[self.rows(tensor).index(index.offset[0])][None]

    def from_full(self, tensor, full, device):
        tensor._local_tensor.copy_(full[CYCLIC.rows(tensor.device_mesh)])
        return tensor


CYCLIC = CyclicExtension()
CYCLIC.ops, CYCLIC.checkpoint = CyclicOps(), CyclicCheckpoint()
Cyclic.extension = CYCLIC
FULL = torch.arange(15.0).view(5, 3)


def check_checkpoint(path):
    mesh = init_device_mesh("cpu", (2,))
    dcp.save({"x": distribute_tensor(FULL, mesh, [Cyclic()])}, checkpoint_id=path)
    for placement in (Cyclic(), Shard(1), Replicate()):
        state = {"x": distribute_tensor(torch.zeros(5, 3), mesh, [placement])}
        dcp.load(state, checkpoint_id=path)
        assert torch.equal(state["x"].full_tensor(), FULL), placement
    model = torch.nn.Module()
    model.x = torch.nn.Parameter(distribute_tensor(torch.zeros(5, 3), mesh, [Cyclic()]))
    full = {"x": FULL} if dist.get_rank() == 0 else {}
    set_model_state_dict(model, full, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    assert torch.equal(model.x.full_tensor(), FULL)


class PlacementExtensionTest(unittest.TestCase):
    def test_torchs_own_placements_bring_none(self):
        self.assertIsNone(extension_of((Shard(0), Replicate(), Shard(1))))
        self.assertIs(extension_of((Shard(0), Cyclic())), CYCLIC)

    @ranks(2)
    def test_a_new_placement_lays_out_and_redistributes():
        mesh = init_device_mesh("cpu", (2,))
        mine = FULL[mesh.get_local_rank() :: 2]
        tensor = distribute_tensor(FULL, mesh, [Cyclic()])
        assert torch.equal(tensor.to_local(), mine) and tensor.placements == (Cyclic(),)
        assert compute_local_shape_and_global_offset(FULL.shape, mesh, [Cyclic()]) == (tuple(mine.shape), ())
        for target in (Replicate(), Shard(0), Shard(1), Cyclic()):
            moved = tensor.redistribute(placements=[target])
            assert moved.placements == (target,) and torch.equal(moved.full_tensor(), FULL), target
            assert torch.equal(moved.redistribute(placements=[Cyclic()]).to_local(), mine), target
        assert torch.equal(DTensor.from_local(mine, mesh, [Cyclic()], shape=FULL.shape).full_tensor(), FULL)
        assert error_of(DTensor.from_local, FULL, mesh, [Cyclic()], shape=FULL.shape).startswith("ValueError: expected")
        leaf = distribute_tensor(FULL, mesh, [Cyclic()]).requires_grad_()
        (leaf.to_local() * 2).sum().backward()
        assert leaf.grad.placements == (Cyclic(),) and torch.equal(leaf.grad.full_tensor(), torch.full_like(FULL, 2))
        # Ranks share graphs on disk, and each rank's graph computes its own part: of plain DTensors, too (Replicate to Shard).
        cached = [tensor, distribute_tensor(FULL, mesh, [Replicate()])]
        for each in cached if hasattr(tensor, "_stable_hash_for_caching") else ():  # 2.11 writes none.
            hashes = [None, None]
            dist.all_gather_object(hashes, each._stable_hash_for_caching())
            assert hashes[0] != hashes[1]

    @ranks(2)
    def test_ops_run_under_a_new_placement():
        mesh = init_device_mesh("cpu", (2,))
        tensor = distribute_tensor(FULL, mesh, [Cyclic()])
        for function in (torch.exp, lambda x: x**2, lambda x: x * 3):
            for _ in range(2):  # The second time from the dispatcher's cache.
                assert torch.equal(function(tensor).full_tensor(), function(FULL))
        assert "rows here and there" in error_of(torch.sum, tensor)
        assert int(torch.argmax(tensor)) == -7  # DTensor has a handler for it.
        assert torch.ops.aten.is_same_size.default(tensor, tensor)  # And for this, which does not look at placements.

    @ranks(2)
    def test_factories_make_a_new_placement():
        mesh = init_device_mesh("cpu", (2,))
        made = dt.full((5, 3), 2.0, device_mesh=mesh, placements=[Cyclic()])
        assert made.placements == (Cyclic(),) and torch.equal(made.full_tensor(), torch.full((5, 3), 2.0))

    def test_a_new_placement_is_saved_and_loaded(self):
        with tempfile.TemporaryDirectory() as path:
            run_ranks(2, check_checkpoint, path)

    @ranks(2)
    def test_what_is_not_brought_is_an_error():
        mesh = init_device_mesh("cpu", (2,))
        tensor = dtensor(FULL, mesh, [Bare()], FULL.shape)
        errors = [
            error_of(distribute_tensor, FULL, mesh, [Bare()]),
            error_of(DTensor.from_local, FULL, mesh, [Bare()]),
            error_of(tensor.redistribute, placements=[Shard(0)]),
            error_of(compute_local_shape_and_global_offset, FULL.shape, mesh, [Bare()]),
            error_of(torch.neg, tensor),
            error_of(torch.argmax, tensor),
            error_of(dt.zeros, 5, 3, device_mesh=mesh, placements=[Bare()]),
            error_of(tensor.__create_chunk_list__),
            error_of(tensor.__get_tensor_shard__, MetadataIndex("x")),
        ]
        for error in errors:
            assert error.startswith("NotImplementedError: PlacementExtension brings no rule for "), error
        assert len(set(errors)) == 8, errors  # Both of the checkpoint's are the same.
