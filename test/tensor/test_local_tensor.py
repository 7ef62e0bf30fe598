"""All ranks in one process, by torch's LocalTensorMode: the numbers of processes, for redistributions, ops and draws."""

import itertools
import random
import unittest

import torch
import torch.distributed.tensor as dtensor
from common import enter_fake_group, error_of, run_ranks
from oracle import DTYPES, MESHES, contributions, local_of, random_case, reduced
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils import _pytree as pytree

from torch_ragged import RaggedShard, StridedRaggedShard
from torch_ragged.tensor._owned_boxes import owned_boxes

REDUCE = {"sum": lambda t: t.sum(0), "avg": lambda t: t.mean(0), "max": lambda t: t.amax(0), "min": lambda t: t.amin(0)}
SHAPE, UNITS = (6, 4), RaggedShard((0,), (1, 2, 0, 3))


def equal(one, other):
    if one.dtype == torch.float8_e4m3fn:  # torch.equal does not take it.
        one, other = one.view(torch.uint8), other.view(torch.uint8)
    return torch.equal(one, other)


def place_of(mesh, rank):
    return tuple((mesh.mesh == rank).nonzero()[0].tolist())


def locals_of(values, mesh, placements, pending):
    """The local tensors of all ranks of the mesh, by the definition of placements."""
    places = {rank: place_of(mesh, rank) for rank in mesh.mesh.flatten().tolist()}
    mine = {rank: reduced(values, mesh.ndim, pending, placements, place) for rank, place in places.items()}
    return {
        rank: local_of(mine[rank], tuple(mesh.shape), placements, place).clone().contiguous() for rank, place in places.items()
    }


def settled(local, mesh, source, target):
    """The local tensors once the reductions that only ``target`` leaves pending are done."""
    tensors = dict(local._local_tensors)
    for dim, (old, new) in enumerate(zip(source, target, strict=True)):
        if isinstance(new, Partial) and old != new:
            for group in mesh.mesh.movedim(dim, -1).reshape(-1, mesh.size(dim)).tolist():
                total = REDUCE[new.reduce_op](torch.stack([tensors[rank] for rank in group]).double())
                tensors |= {rank: total.to(local.dtype) for rank in group}
    return tensors


class RedistributeTest(unittest.TestCase):
    def check(self, mesh, case, dtype, seed):
        shape, source, target = case
        values = contributions(shape, mesh, source, dtype, torch.Generator().manual_seed(seed))
        before, expected = (locals_of(values, mesh, placements, source) for placements in (source, target))
        with LocalTensorMode(mesh.size()):
            options = dict(shape=torch.Size(shape), stride=torch.empty(shape, device="meta").stride(), run_check=False)
            tensor = DTensor.from_local(LocalTensor(before), mesh, source, **options)
            after = tensor.redistribute(placements=target, async_op=bool(seed % 2)).to_local()
        for rank, found in settled(after, mesh, source, target).items():
            wanted = expected[rank]
            same = found.shape == wanted.shape and found.dtype == dtype and equal(found, wanted)
            self.assertTrue(same, f"rank {rank} of {mesh}: {shape} {dtype} {source} -> {target}\n{found} {wanted}")

    def test_random_redistributions_equal_the_definition(self):
        seen = set()
        for world, shapes in MESHES.items():
            enter_fake_group(self, world)
            rng, meshes = random.Random(world), [init_device_mesh("cpu", shape) for shape in shapes]
            orders = [torch.tensor(rng.sample(range(world), world)).view(shape) for shape in shapes]
            meshes += [DeviceMesh("cpu", order) for order in orders]
            for number in range(15 * len(shapes)):
                mesh = meshes[number % len(meshes)]
                case = random_case(rng, tuple(mesh.shape), StridedRaggedShard)
                pending = [p.reduce_op for placements in case[1:] for p in placements if p.is_partial()]
                dtype = rng.choice(DTYPES if pending else (*DTYPES, torch.complex64, torch.float8_e4m3fn))
                self.check(mesh, case, torch.float32 if "avg" in pending else dtype, number)
                seen |= {(type(a).__name__, type(b).__name__) for a, b in zip(*case[1:], strict=True)}
            self.doCleanups()
        kinds = ("RaggedShard", "StridedRaggedShard", "InterleavedShard", "Shard", "Replicate", "Partial")
        self.assertLessEqual({(a, b) for a, b in itertools.product(kinds, kinds) if "RaggedShard" in (a, b)}, seen)

    def test_part_of_a_mesh(self):
        enter_fake_group(self, 6)
        grid, whole = init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp")), torch.arange(24.0).view(SHAPE)
        with LocalTensorMode(6):
            for name, units in (("tp", (1, 0, 2)), ("dp", (2, 1))):
                tensor = distribute_tensor(whole, grid[name], [RaggedShard((0,), units)])
                held = [tensor.to_local()._local_tensors[rank].numel() for rank in range(6)]
                place = [place_of(grid, rank)[("dp", "tp").index(name)] for rank in range(6)]
                self.assertEqual(held, [24 // sum(units) * units[at] for at in place])
                self.assertTrue(torch.equal(tensor.full_tensor().reconcile(), whole))

    def test_gradients(self):
        enter_fake_group(self, 4)
        mesh, whole, scale = init_device_mesh("cpu", (4,)), torch.randn(SHAPE), torch.randn(SHAPE)
        with LocalTensorMode(4):
            tensor = distribute_tensor(whole, mesh, [UNITS]).requires_grad_()
            factor = distribute_tensor(scale, mesh, [Shard(1)])
            (tensor.redistribute(placements=[Shard(1)]) * factor).redistribute(
                placements=[Replicate()]
            ).to_local().sum().backward()
            self.assertEqual(tensor.grad.placements, (UNITS,))
            self.assertTrue(torch.equal(tensor.grad.full_tensor().reconcile(), scale))
            tensor.grad = None
            tensor.to_local().sum().backward()
            self.assertTrue(torch.equal(tensor.grad.full_tensor().reconcile(), torch.ones(SHAPE)))


OPS = {
    "mul": lambda t: t * 2,
    "sum": lambda t: t.sum(),
    "rows": lambda t: t.sum(1),
    "norm": lambda t: t.norm(),
    "largest": lambda t: t.amax(),
    "view": lambda t: t.view(-1),
    "slice": lambda t: t[1:4],
    "split": lambda t: t.split(2)[1],
    "transpose": lambda t: t.t() + t.t(),
    "matmul": lambda t: t @ t.t(),
    "softmax": lambda t: t.softmax(-1),
    "list": lambda t: torch._foreach_mul([t, t], 3.0)[1],
    "in place": lambda t: t.clone().add_(t),
    "uniform": torch.rand_like,
    "normal": lambda t: t.clone().normal_(),
    "generator": lambda t: t.clone().uniform_(generator=torch.Generator().manual_seed(7)),
    "twice": lambda t: (lambda g: t.clone().uniform_(generator=g) + t.clone().uniform_(generator=g))(torch.Generator()),
    "dropout": lambda t: torch.nn.functional.dropout(t, 0.5),
    "integers": lambda t: torch.randint_like(t, 9),
}


class OpsTest(unittest.TestCase):
    def setUp(self):
        enter_fake_group(self, 4)
        self.mesh, self.whole = init_device_mesh("cpu", (4,)), torch.arange(24.0).view(SHAPE) / 24

    def test_ops_and_draws_equal_one_device(self):
        for (name, op), placement in itertools.product(OPS.items(), (UNITS, RaggedShard((0, 1), (5, 0, 1, 18)))):
            with self.subTest(name, placement=placement):
                torch.manual_seed(3)
                expected = op(self.whole.clone())
                after = torch.rand(1)
                with LocalTensorMode(4):
                    tensor = distribute_tensor(self.whole, self.mesh, [placement])
                    torch.manual_seed(3)
                    found = op(tensor)
                    found, state = found.full_tensor(), torch.rand(1)
                torch.testing.assert_close(found.reconcile(), expected)
                self.assertTrue(torch.equal(state.reconcile(), after), "the generators are elsewhere")

    def test_an_op_in_the_cache_runs_as_each_rank(self):
        """Views count from a rank's offset: a plan of one rank must not serve another one, in the mode and after it."""
        for _ in range(2):
            with LocalTensorMode(4):
                part = distribute_tensor(self.whole, self.mesh, [UNITS])[2:5]
            sizes = [local.numel() for local in part.to_local()._local_tensors.values()]
            self.assertEqual(sizes, [0, 4, 0, 8])
        own = distribute_tensor(self.whole, self.mesh, [UNITS])[0:5].to_local()
        self.assertTrue(torch.equal(own, self.whole[0]))

    def test_what_is_cached_in_the_mode_is_right_after_it_on_any_rank(self):
        self.doCleanups()
        enter_fake_group(self, 4, rank=3)
        mesh = init_device_mesh("cpu", (4,))
        with LocalTensorMode(4):
            distribute_tensor(self.whole, mesh, [UNITS])[2:5]
        own = DTensor.from_local(self.whole[3:].reshape(-1), mesh, [UNITS], shape=SHAPE)
        self.assertTrue(torch.equal(own[2:5].to_local(), self.whole[3:5].reshape(-1)))

    @unittest.skipIf(torch.__version__.startswith("2.11"), "torch has no rule for multinomial")
    def test_a_generator_of_the_user_has_a_state_for_each_rank(self):
        expected = torch.multinomial(self.whole + 0.1, 2, generator=torch.Generator().manual_seed(1))
        with LocalTensorMode(4):
            tensor = distribute_tensor(self.whole + 0.1, self.mesh, [UNITS])
            found = torch.multinomial(tensor, 2, generator=torch.Generator().manual_seed(1))
        self.assertTrue(torch.equal(found.to_local().reconcile(), expected))

    def test_factories(self):
        with LocalTensorMode(4):
            torch.manual_seed(5)
            made = [
                dtensor.full(SHAPE, 3.0, device_mesh=self.mesh, placements=[UNITS]),
                dtensor.rand(SHAPE, device_mesh=self.mesh, placements=[UNITS]),
                dtensor.randn(SHAPE, device_mesh=self.mesh, placements=[UNITS]),
            ]
            made = [tensor.full_tensor().reconcile() for tensor in made]
        torch.manual_seed(5)
        expected = torch.full(SHAPE, 3.0), torch.rand(SHAPE), torch.randn(SHAPE)
        self.assertTrue(all(map(torch.equal, made, expected)))

    def test_training_step(self):
        """A layer with a ragged weight, its loss and a step of Adam: one device's numbers."""

        def step(weight, inputs):
            optimizer = torch.optim.AdamW([weight], lr=0.1)
            for _ in range(3):
                (inputs @ weight).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            return weight.detach()

        weight, inputs = torch.randn(6, 4, dtype=torch.float64), torch.randn(5, 6, dtype=torch.float64)
        expected = step(weight.clone().requires_grad_(), inputs)
        with LocalTensorMode(4):
            given = distribute_tensor(weight, self.mesh, [UNITS]).requires_grad_()
            found = step(given, distribute_tensor(inputs, self.mesh, [Replicate()]))
            self.assertEqual(found.placements, (UNITS,))
            torch.testing.assert_close(found.full_tensor().reconcile(), expected)


class ErrorsTest(unittest.TestCase):
    def setUp(self):
        enter_fake_group(self, 4)
        self.mesh, self.whole = init_device_mesh("cpu", (4,)), torch.arange(24.0).view(SHAPE)

    def test_a_rank_with_a_wrong_shape_is_named(self):
        held = {rank: torch.zeros(4 * units) for rank, units in enumerate((1, 2, 0, 3))} | {2: torch.zeros(4)}
        with LocalTensorMode(4):
            text = error_of(DTensor.from_local, LocalTensor(held), self.mesh, [UNITS], shape=SHAPE, run_check=True)
        self.assertIn("rank 2 gave a local tensor of shape (4,), expected (0,)", text)

    def test_a_missing_rank_is_named(self):
        held = {rank: torch.zeros(4 * units) for rank, units in enumerate((1, 2, 0, 3))}
        with LocalTensorMode(4):
            tensor = DTensor.from_local(LocalTensor(held), self.mesh, [UNITS], shape=SHAPE)
            del tensor._local_tensor._local_tensors[1]
            self.assertIn("no local tensors of ranks [1]", error_of(tensor.full_tensor))

    def test_a_tensor_made_outside_of_the_mode(self):
        own = distribute_tensor(self.whole, self.mesh, [UNITS])
        with LocalTensorMode(4):
            self.assertIn("rank 1 has 4 elements, expected 8", error_of(own.full_tensor))

    def test_without_the_mode(self):
        with LocalTensorMode(4):
            tensor = distribute_tensor(self.whole, self.mesh, [UNITS])
        for use in (tensor.full_tensor, lambda: tensor[2:4]):
            self.assertIn("use it under LocalTensorMode", error_of(use))

    def test_what_differs_by_rank(self):
        with LocalTensorMode(4):
            tensor = distribute_tensor(self.whole, self.mesh, [UNITS])
            self.assertIn("has another answer on each rank", error_of(owned_boxes, tensor))


def numbers_of_this_rank():
    mesh = init_device_mesh("cpu", (4,))
    return program(mesh, torch.arange(24.0).view(SHAPE))


def program(mesh, whole):
    """Redistributions with inexact sums, a matmul, views and draws: the local tensors, for each rank."""
    torch.manual_seed(1)
    tensor = distribute_tensor(whole.clone(), mesh, [UNITS])
    tensor = (tensor / 3).redistribute(placements=[Shard(1)]).redistribute(placements=[RaggedShard((0, 1), (7, 0, 16, 1))])
    drawn = torch.nn.functional.dropout(tensor, 0.25) + torch.randn_like(tensor)
    product = drawn.redistribute(placements=[UNITS]) @ distribute_tensor(whole.t().contiguous(), mesh, [Replicate()])
    return [
        tensor.to_local(),
        drawn.to_local(),
        product[1:4].to_local(),
        product.sum(0).to_local(),
        product.std().full_tensor(),
    ]


class ProcessesTest(unittest.TestCase):
    def test_ranks_of_processes_hold_the_same_bits(self):
        processes = run_ranks(4, numbers_of_this_rank)
        enter_fake_group(self, 4)
        with LocalTensorMode(4):
            everywhere = program(init_device_mesh("cpu", (4,)), torch.arange(24.0).view(SHAPE))
        for rank, expected in enumerate(processes):
            found = pytree.tree_map_only(LocalTensor, lambda local, rank=rank: local._local_tensors[rank], everywhere)
            for number, (one, other) in enumerate(zip(found, expected, strict=True)):
                self.assertTrue(torch.equal(one, other), f"rank {rank}, {number}: {one} {other}")


if __name__ == "__main__":
    unittest.main()
