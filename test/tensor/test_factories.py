"""``torch.distributed.tensor.zeros`` and the like under ragged placements: what a single device makes, cut."""

import itertools
import unittest

import torch
import torch.distributed.tensor as dt
from common import error_of, ranks, run_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.debug import CommDebugMode

from torch_ragged import RaggedShard, StridedRaggedShard

FACTORIES = {
    "zeros": lambda module, size, **options: module.zeros(size, **options),
    "ones": lambda module, size, **options: module.ones(size, **options),
    "full": lambda module, size, **options: module.full(size, 2.5, **options),
    "rand": lambda module, size, **options: module.rand(size, **options),
    "randn": lambda module, size, **options: module.randn(size, **options),
}
PLACEMENTS = {
    (4,): [
        ((8, 3), [RaggedShard((0,), (1, 0, 2, 1))]),
        ((8, 3), [RaggedShard((-2, -1), (5, 7, 0, 12))]),
        ((6,), [RaggedShard((0,), (1, 2, 2, 1))]),
        ((), [RaggedShard((), (0, 0, 1, 0))]),
        ((0, 3), [RaggedShard((0,), (1, 1, 1, 1))]),
    ],
    (2, 2): [
        ((8, 3), [Replicate(), RaggedShard((0,), (1, 3))]),
        ((8, 4), [RaggedShard((0,), (3, 1)), Shard(1)]),
        ((8, 3), [Shard(0), RaggedShard((0, 1), (5, 7))]),
        ((8, 3), [StridedRaggedShard((0, 1), (5, 7), split_factor=2), Shard(0)]),
        ((8, 3), [StridedRaggedShard((0,), (1, 3), split_factor=2), Replicate()]),
    ],
}


def check_values(mesh_shape):
    mesh = init_device_mesh("cpu", mesh_shape)
    for size, placements in PLACEMENTS[mesh_shape]:
        for (name, make), dtype in itertools.product(FACTORIES.items(), (torch.float32, torch.bfloat16)):
            case = f"{name} of {dtype} {size} {placements}"
            torch.manual_seed(4)
            want = make(torch, size, dtype=dtype)
            state = torch.get_rng_state()
            torch.manual_seed(4)
            with CommDebugMode() as mode:
                got = make(dt, size, dtype=dtype, device_mesh=mesh, placements=placements, requires_grad=True)
            assert mode.get_total_counts() == 0 and torch.equal(torch.get_rng_state(), state), case
            expected = distribute_tensor(want, mesh, placements)
            assert (got._spec, got.dtype, got.stride()) == (expected._spec, dtype, want.stride()), (case, got._spec)
            assert torch.equal(got.to_local(), expected.to_local()), case
            assert got.requires_grad and got.is_leaf, case
        local = dt.empty(*size, device_mesh=mesh, placements=placements).to_local()
        assert local.shape == expected.to_local().shape and local.dtype == torch.float32, (size, placements)
        shape = compute_local_shape_and_global_offset(size, mesh, placements, skip_offset=True)
        assert shape == (tuple(local.shape), ()), (shape, local.shape)


def check_training():
    """A parameter that is made in place of distributed."""
    mesh = init_device_mesh("cpu", (2,))
    weight = torch.nn.Parameter(dt.randn(4, 3, device_mesh=mesh, placements=[RaggedShard((0,), (1, 3))]))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    whole = torch.nn.Parameter(weight.detach().full_tensor())
    other = torch.optim.AdamW([whole], lr=0.1)
    for param, each in ((weight, optimizer), (whole, other)):
        (param * param).sum().backward()
        each.step()
    return torch.equal(weight.detach().full_tensor(), whole.detach())


def check_outside_of_the_mesh():
    """A rank that is not in the mesh holds nothing. Its generator moves as that of one device, as those of the mesh do."""
    mesh = DeviceMesh("cpu", [0, 1])
    torch.manual_seed(0)
    state = torch.get_rng_state()
    made = [make(dt, (4, 3), device_mesh=mesh, placements=[RaggedShard((0,), (1, 3))]) for make in FACTORIES.values()]
    assert all(isinstance(tensor, DTensor) and tensor.shape == (4, 3) for tensor in made)
    after = torch.get_rng_state()
    assert not torch.equal(after, state)
    return [tensor.to_local().numel() for tensor in made], after.tolist()


def check_errors():
    mesh, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    ragged = RaggedShard((0,), (1, 0, 2, 1))
    return [
        error_of(dt.zeros, 7, 3, device_mesh=mesh, placements=[ragged]),
        error_of(dt.rand, 8, 3, device_mesh=mesh, placements=[RaggedShard((0,), (1, 1))]),
        error_of(dt.ones, 8, 3, device_mesh=square, placements=[Partial(), RaggedShard((0,), (1, 1))]),
        error_of(dt.zeros, 8, 3, device_mesh=mesh, placements=[ragged], layout=torch.sparse_coo),
        error_of(compute_local_shape_and_global_offset, (8, 3), mesh, [RaggedShard((0, 1), (5, 7, 12, 0))]),
    ]


def check_plain():
    """Without a ragged placement the call is torch's."""
    mesh = init_device_mesh("cpu", (4,))
    with CommDebugMode() as mode:
        tensors = [dt.full((6, 3), 2.0, device_mesh=mesh, placements=[Shard(0)]), dt.zeros(6, 3, device_mesh=mesh)]
    assert [t.placements for t in tensors] == [(Shard(0),), (Replicate(),)] and mode.get_total_counts() == 0
    return [tuple(t.to_local().shape) for t in tensors]


class FactoriesTest(unittest.TestCase):
    def test_values_and_state_are_those_of_a_single_device(self):
        for mesh_shape in PLACEMENTS:
            run_ranks(4, check_values, mesh_shape)

    @unittest.skipUnless(hasattr(dt, "linspace"), "this torch has no torch.distributed.tensor.linspace")
    @ranks(4)
    def test_sequences_are_those_of_a_single_device():
        """``linspace`` and ``logspace``, which torch has since 2.15."""
        mesh = init_device_mesh("cpu", (4,))
        options = {"device_mesh": mesh, "placements": [RaggedShard((0,), (1, 0, 2, 2))]}
        assert torch.equal(dt.linspace(0.0, 3.0, 10, **options).full_tensor(), torch.linspace(0.0, 3.0, 10))
        assert torch.equal(dt.logspace(0.0, 3.0, 10, 2.0, **options).full_tensor(), torch.logspace(0.0, 3.0, 10, 2.0))

    def test_a_tensor_made_so_is_trained(self):
        self.assertEqual(run_ranks(2, check_training), [True, True])

    def test_a_rank_outside_of_the_mesh_holds_nothing_and_draws_as_the_others(self):
        answers = run_ranks(3, check_outside_of_the_mesh)
        self.assertEqual([counts for counts, _ in answers], [[3] * 5, [9] * 5, [0] * 5])
        self.assertEqual([state for _, state in answers], [answers[0][1]] * 3)

    def test_bad_arguments_are_errors_on_every_rank(self):
        answers = run_ranks(4, check_errors)
        self.assertEqual(answers, [answers[0]] * 4)
        patterns = [
            "ValueError: .*divide",
            "ValueError: .*one number of units per rank",
            "ValueError: .*Replicate in place of Partial",
        ]
        patterns += ["ValueError: .*sparse_coo.*torch.strided", "ValueError: .*several boxes with offsets of their own"]
        for text, pattern in zip(answers[0], patterns, strict=True):
            self.assertRegex(text, pattern)

    def test_plain_placements_are_left_to_torch(self):
        self.assertEqual(run_ranks(4, check_plain), [[(2, 3), (6, 3)], [(2, 3), (6, 3)], [(2, 3), (6, 3)], [(0, 3), (6, 3)]])
