"""What programs do by hand with the DTensors of FSDP2: with ragged ones it is right too, or an error on every rank."""

import unittest

import torch
import torch.distributed as dist
from common import error_of, ranks, run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from torch_ragged import RaggedShard, StridedRaggedShard
from torch_ragged.fsdp import fully_shard, rows, tensor


def make_model(granularity, mesh=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 3))
    full = {name: param.detach().clone() for name, param in model.named_parameters()}
    fully_shard(model, mesh=mesh, orig_param_policy=lambda name, param: granularity)
    return model, full


def norm_by_hand(tensors):
    """As programs write it: a part of a sharded tensor counts once per rank, a whole tensor once."""
    parts = [t.to_local() for t in tensors if t.placements[-1].is_shard()]
    whole = [t.to_local() for t in tensors if not t.placements[-1].is_shard()]
    squares = sum((part.square().sum() for part in parts), torch.zeros(()))
    for dim, placement in enumerate(tensors[0].placements):
        if placement.is_shard():
            dist.all_reduce(squares, group=tensors[0].device_mesh.get_group(dim))
    return (squares + sum(part.square().sum() for part in whole)).sqrt()


PLACED = {
    "rows": (2, RaggedShard((0,), (3, 1))),
    "one owner": (2, RaggedShard((), (0, 1))),
    "elements that end at a row": (2, RaggedShard((0, 1), (18, 6))),
    "elements": (1, RaggedShard((0, 1), (5, 19))),
    "strided": (1, StridedRaggedShard((0,), (1, 1), 2)),
}
"""Placements of a (4, 6) tensor on 2 ranks: whether each rank holds one box (2), or several (1)."""


def boxes():
    """What ``compute_local_shape_and_global_offset`` says, with the elements there; or the error."""
    mesh, found = init_device_mesh("cpu", (2,)), {}
    full = torch.arange(24.0).view(4, 6)
    for name, (_, placement) in PLACED.items():
        local = distribute_tensor(full, mesh, [placement]).to_local()
        try:
            sizes, offsets = compute_local_shape_and_global_offset(full.shape, mesh, [placement])
        except ValueError as error:
            found[name] = str(error)
        else:
            part = full[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
            assert tuple(part.shape) == tuple(sizes) and torch.equal(part.reshape(-1), local), (name, sizes, offsets)
            found[name] = (sizes, offsets)
    scalar = [RaggedShard((), (0, 1))]
    found["scalar"] = error_of(compute_local_shape_and_global_offset, (), mesh, scalar)
    return found


def from_locals():
    mesh = init_device_mesh("cpu", (2,))
    placement = RaggedShard((0,), (3, 1))
    full = torch.arange(24.0).view(4, 6)
    local = full[:3] if mesh.get_rank() == 0 else full[3:]
    made = DTensor.from_local(local.reshape(-1), mesh, [placement], shape=full.shape)
    assert torch.equal(made.full_tensor(), full) and made.stride() == (6, 1)
    return (
        error_of(DTensor.from_local, local, mesh, [placement]),
        error_of(DTensor.from_local, local, mesh, [placement], shape=full.shape),
    )


class HabitsTest(unittest.TestCase):
    @ranks(4)
    def test_a_norm_that_asks_which_tensors_are_sharded_reduces_them():
        meshes = [init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))]
        for mesh in meshes:
            for granularity in (None, rows(1), tensor()):
                model, full = make_model(granularity, mesh)
                expected = torch.linalg.vector_norm(torch.cat([value.flatten() for value in full.values()]))
                torch.testing.assert_close(norm_by_hand([param.detach() for param in model.parameters()]), expected)

    @ranks(2)
    def test_a_compiled_function_asks_as_well():
        """The same question in a compiled function."""

        def local(x):
            doubled = x * 2
            return doubled.to_local() + (2 if doubled.placements[0].is_shard() else 3)

        x = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)), [RaggedShard((0,), (1, 3))])
        found = torch.compile(local, backend="aot_eager", fullgraph=True)(x)
        assert found.tolist() == [4.0] * (1, 3)[dist.get_rank()], found

    def test_one_box_per_rank_has_an_offset_and_several_are_an_error_on_every_rank(self):
        first, second = run_ranks(2, boxes)
        self.assertEqual(first["rows"], ((3, 6), (0, 0)))
        self.assertEqual(second["rows"], ((1, 6), (3, 0)))
        self.assertEqual((first["one owner"], second["one owner"]), (((0, 6), (4, 0)), ((4, 6), (0, 0))))
        self.assertEqual(first["elements that end at a row"], ((3, 6), (0, 0)))
        for name, (kind, _) in PLACED.items():
            if kind == 1:
                self.assertEqual(first[name], second[name])
                self.assertRegex(first[name], r"cuts a tensor of shape \(4, 6\) within .*: call torch_ragged.owned_boxes")
        self.assertEqual(first["scalar"], second["scalar"])
        self.assertIn("owned_boxes", first["scalar"])

    def test_from_local_says_which_shape_to_pass(self):
        for without_shape, not_flat in run_ranks(2, from_locals):
            self.assertRegex(
                without_shape, r"^ValueError: DTensor.from_local got RS\(0\)\[3,1\] without .*pass shape=, such as"
            )
            self.assertRegex(not_flat, r"gave a local tensor of shape \(., 6\), expected \(\d+,\): pass local.reshape\(-1\)$")
