"""Foreach and fused ops over DTensors of several meshes, as an optimizer over FSDP groups on two meshes issues them."""

import itertools
import unittest

import torch
from common import error_of, ranks, run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from torch_ragged import RaggedShard, StridedRaggedShard

SHAPES = [(8, 3), (4,), (8, 2), (4, 4), (6, 2), (12,)]
OPTIMIZERS = {
    "AdamW, foreach": (torch.optim.AdamW, {"foreach": True}),
    "AdamW, fused": (torch.optim.AdamW, {"fused": True}),
    "AdamW, default": (torch.optim.AdamW, {}),
    "AdamW, one by one": (torch.optim.AdamW, {"foreach": False}),
    "AdamW with amsgrad, foreach": (torch.optim.AdamW, {"foreach": True, "amsgrad": True}),
    "SGD, foreach": (torch.optim.SGD, {"foreach": True, "momentum": 0.9}),
    "SGD, fused": (torch.optim.SGD, {"fused": True, "momentum": 0.9}),
}


def placements_by_mesh():
    """Meshes of the same four ranks, and placements of parameters there."""
    flat = init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    column = init_device_mesh("cpu", (1, 4), mesh_dim_names=("one", "all"))
    return {
        "ragged": [
            (square, (Replicate(), RaggedShard((0,), (1, 3)))),
            (flat, (RaggedShard((0,), (1, 0, 2, 1)),)),
            (square, (StridedRaggedShard((0,), (1, 3), split_factor=2), Shard(0))),
            (column, (Replicate(), RaggedShard((0,), (0, 2, 1, 1)))),
        ],
        "mixed": [
            (square, (Replicate(), Shard(0))),
            (flat, (RaggedShard((0,), (2, 1, 0, 1)),)),
            (flat, (Shard(0),)),
            (column, (Replicate(), RaggedShard((), (0, 1, 0, 0)))),
        ],
        "mixed, ragged first": [
            (column, (Replicate(), RaggedShard((0,), (2, 1, 0, 1)))),
            (flat, (Shard(0),)),
            (square, (Shard(0), Replicate())),
        ],
    }


def parameters(placed):
    """Plain parameters with gradients, and the same as DTensors on several meshes in turn."""
    torch.manual_seed(7)
    whole = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    cut = []
    for index, param in enumerate(whole):
        mesh, placements = placed[index % len(placed)]
        if any(isinstance(p, StridedRaggedShard) for p in placements) and param.shape[0] != 8:
            mesh, placements = placed[0]
        units = [sum(getattr(p, "local_units", (1,))) for p in placements]
        if any(param.shape[0] % n for n in units):  # (6, 2) in four units.
            placements = tuple(RaggedShard((0, 1), p.local_units) if isinstance(p, RaggedShard) else p for p in placements)
        param.grad = torch.randn_like(param)
        cut.append(nn.Parameter(distribute_tensor(param.detach(), mesh, placements)))
        cut[-1].grad = distribute_tensor(param.grad, mesh, placements)
    assert len({param.device_mesh for param in cut}) > 1
    return whole, cut


def check_same(whole, cut, what, rtol=0.0):
    for index, (param, mine) in enumerate(zip(whole, cut, strict=True)):
        text = f"{what}: {index}, {mine.placements}"
        torch.testing.assert_close(mine.detach().full_tensor(), param.detach(), rtol=rtol, atol=rtol, msg=text)


CLIPPING = {"default": {}, "foreach": {"foreach": True}, "infinity": {"norm_type": float("inf")}, "one": {"norm_type": 1.0}}


def check_submesh():
    """Experts that are no DTensors over expert parallelism are on a part of the ranks: scalars of it are not for all."""
    world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    flat, part = init_device_mesh("cpu", (4,)), world["dp"]
    for order in ((part, flat), (flat, part)):
        for fused in (False, True):
            torch.manual_seed(1)
            whole = [nn.Parameter(torch.randn(4, 3)) for _ in range(4)]
            cut = []
            for index, param in enumerate(whole):
                mesh = order[index % 2]
                placement = [RaggedShard((0,), (1, 3) if mesh == part else (1, 0, 2, 1))]
                param.grad = torch.randn_like(param)
                cut.append(nn.Parameter(distribute_tensor(param.detach(), mesh, placement, src_data_rank=None)))
                cut[-1].grad = distribute_tensor(param.grad, mesh, placement, src_data_rank=None)
            for params in (whole, cut):
                torch.optim.AdamW(params, fused=fused, foreach=not fused).step()
            check_same(whole, cut, (order, fused))
        scalar = distribute_tensor(torch.tensor(2.0), part, [Replicate()], src_data_rank=None)
        gradients = [param.grad for param in cut]
        errors = error_of(torch._foreach_mul_, gradients, scalar), error_of(torch.nn.utils.clip_grad_norm_, cut, 1.0)
        assert "only a scalar that is replicated on all ranks of the mesh" in errors[0], errors
        assert "same mesh" in errors[1], errors
    return errors


def check_errors():
    flat = init_device_mesh("cpu", (4,))
    square = init_device_mesh("cpu", (2, 2))
    ragged = distribute_tensor(torch.ones(8), flat, [RaggedShard((0,), (1, 0, 2, 1))])
    other = distribute_tensor(torch.ones(8), square, [Replicate(), RaggedShard((0,), (1, 3))])
    pending = DTensor.from_local(torch.ones(()), flat, [Partial()], run_check=False)
    return (
        error_of(torch._foreach_add, [ragged, other], [other, ragged]),
        error_of(torch._foreach_mul, [ragged, other], pending),
        error_of(torch.add, ragged, other),
    )


class ForeachMeshesTest(unittest.TestCase):
    @ranks(4)
    def test_optimizers_give_each_tensor_its_own_result():
        for placed, (name, (optimizer, options)) in itertools.product(placements_by_mesh().values(), OPTIMIZERS.items()):
            whole, cut = parameters(placed)
            steps = [optimizer(params, lr=0.1, weight_decay=0.1, **options) for params in (whole, cut)]
            with CommDebugMode() as mode:
                for _ in range(2):
                    for each in steps:
                        each.step()
            assert mode.get_total_counts() == 0, (name, mode.get_comm_counts())
            # A fused kernel rounds the last elements of a local tensor otherwise.
            check_same(whole, cut, name, rtol=1e-6 if "fused" in name else 0.0)
            for each in steps:
                each.zero_grad(set_to_none=False)
            assert not any(param.grad.full_tensor().any() for param in cut)

    @ranks(4)
    @torch.no_grad()
    def test_scalars_are_taken_on_every_mesh():
        """What capturable optimizers do: lists of scalar tensors, and scalars beside a list, plain and as DTensors."""
        number = torch.tensor(3.0)
        everywhere = distribute_tensor(number, init_device_mesh("cpu", (4,)), [Replicate()])
        for placed in placements_by_mesh().values():
            whole, cut = parameters(placed)
            for scalar in (number, everywhere):
                torch._foreach_mul_(whole, number)
                torch._foreach_mul_(cut, scalar)
                torch._foreach_div_(whole, [number] * len(whole))
                torch._foreach_div_(cut, [scalar] * len(cut))
                torch._foreach_copy_(whole, torch._foreach_add(whole, 1.5))
                torch._foreach_copy_(cut, torch._foreach_add(cut, 1.5))
            check_same(whole, cut, "scalars")
            results = torch._foreach_sqrt([param.detach() for param in cut])
            assert [(r.device_mesh, r.placements) for r in results] == [(p.device_mesh, p.placements) for p in cut]

    @ranks(4)
    def test_gradients_are_clipped_by_the_norm_of_all():
        for (kind, placed), (name, options) in itertools.product(placements_by_mesh().items(), CLIPPING.items()):
            if name == "infinity" and kind != "ragged":
                continue  # Torch's own fails for an empty shard under Shard(0).
            whole, cut = parameters(placed)
            expected = torch.nn.utils.clip_grad_norm_(whole, 0.1, **options)
            with CommDebugMode() as mode:
                norm = torch.nn.utils.clip_grad_norm_(cut, 0.1, **options)
            count = mode.get_total_counts()
            torch.testing.assert_close(norm.full_tensor(), expected)
            for param, mine in zip(whole, cut, strict=True):
                torch.testing.assert_close(mine.grad.full_tensor(), param.grad)
            assert count <= 8 or name == "infinity", (kind, mode.get_comm_counts())  # Per mesh dimension, not per tensor.

    def test_a_scalar_of_a_part_of_the_ranks_is_not_taken_for_all(self):
        answers = run_ranks(4, check_submesh)
        self.assertEqual([len(answer) for answer in answers], [2] * 4)

    @ranks(4)
    def test_a_rank_outside_of_the_first_mesh_takes_part():
        """A rank that is not in the mesh of the first tensor updates its own."""
        meshes = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])]
        rank = torch.distributed.get_rank()
        local = torch.ones(2, 3)[: rank % 2 + 1].reshape(-1)
        tensors = []
        for index, mesh in enumerate(meshes):
            mine = local if rank // 2 == index else torch.empty(0)
            tensors.append(DTensor.from_local(mine, mesh, [RaggedShard((0,), (1, 2))], run_check=False, shape=(3, 3)))
        torch._foreach_add_(tensors, 1.0)
        assert torch.equal(tensors[rank // 2].to_local(), torch.full_like(local, 2.0))
        factor = distribute_tensor(torch.tensor(3.0), init_device_mesh("cpu", (4,)), [Replicate()])
        torch._foreach_mul_(tensors, factor)  # A scalar of all ranks is on both meshes.
        assert torch.equal(tensors[rank // 2].to_local(), torch.full_like(local, 6.0))

    def test_tensors_of_one_index_on_two_meshes_are_an_error_on_every_rank(self):
        answers = run_ranks(4, check_errors)
        self.assertEqual(answers, [answers[0]] * 4)
        for text in answers[0][:2]:
            self.assertRegex(text, "ValueError: aten._foreach_.*: DTensors at one index of its lists are on different meshes")
        self.assertRegex(answers[0][2], "aten.add.Tensor: its DTensors are on different meshes")
