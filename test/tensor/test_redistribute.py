"""Redistribution on 1-D to 3-D meshes against brute force: bitwise, with autograd, in exact collectives and bytes."""

import itertools
import warnings

import expecttest
import pytest
import torch
import torch.distributed as dist
from common import error_of, ranks, run_ranks
from oracle import MESHES, check_case, kinds_of_random_cases
from tested_device import DEVICE
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard

from torch_ragged import RaggedShard
from torch_ragged._ranks.groups import can_order_groups
from torch_ragged.tensor._redistribute import plan_of, redistribute_local
from torch_ragged.tensor._route import Exchange
from torch_ragged.tensor._units import Units


def count_collectives():
    mesh = init_device_mesh("cpu", (4,))
    even, skewed, root = RaggedShard((0,), (1, 1, 1, 1)), RaggedShard((0,), (1, 5, 0, 2)), RaggedShard((), (0, 0, 1, 0))
    grid = init_device_mesh("cpu", (2, 2))
    counts = {}
    for where, source, target in (
        (mesh, [even], [Replicate()]),
        (mesh, [skewed], [root]),
        (mesh, [root], [skewed]),
        (mesh, [skewed], [Shard(1)]),
        (mesh, [Shard(0)], [even]),
        (mesh, [root], [Replicate()]),
        (mesh, [RaggedShard((0,), (4, 4, 0, 0))], [Replicate()]),
        (mesh, [RaggedShard((0,), (5, 3, 0, 0))], [Replicate()]),
        (mesh, [Replicate()], [skewed]),
        (mesh, [skewed], [RaggedShard((0, 1), (1, 5, 0, 2))]),
        (mesh, [even], [Partial()]),
        (mesh, [Partial()], [even]),
        (mesh, [Partial()], [skewed]),
        (mesh, [Partial()], [root]),
        (mesh, [Partial()], [RaggedShard((0,), (7, 1, 0, 0))]),
        (grid, [Shard(0), Shard(0)], [RaggedShard((0,), (1, 3)), Replicate()]),
        (grid, [Shard(0), RaggedShard((0,), (1, 3))], [Replicate(), RaggedShard((0,), (1, 3))]),
        (grid, [Partial(), RaggedShard((0,), (1, 3))], [Replicate(), RaggedShard((0,), (1, 3))]),
    ):
        if isinstance(source[0], Partial):
            rest = distribute_tensor(torch.randn(8, 4), where, [Replicate(), *source[1:]])
            tensor = DTensor.from_local(rest.to_local(), where, source, shape=rest.shape, stride=rest.stride())
        else:
            tensor = distribute_tensor(torch.randn(8, 4), where, source)
        with CommDebugMode() as mode:
            tensor.redistribute(placements=target)
        names = ["".join(map(str, placements)) for placements in (source, target)]
        counts[" -> ".join(names)] = {str(op).split(".")[-1]: n for op, n in mode.get_comm_counts().items()}
    return counts


def check_groups_of_some_ranks():
    """Half of the ranks make a group of their own; others, that some of them are in too, are made after it."""
    mesh, rank = init_device_mesh("cpu", (2, 2, 2)), dist.get_rank()
    owner = RaggedShard((), (0, 1))
    numbers = torch.arange(8.0)
    few = distribute_tensor(numbers, mesh, [owner, Shard(0), Shard(0)]).redistribute(placements=[owner, Replicate(), Shard(0)])
    assert few.to_local().tolist() == (numbers.chunk(2)[rank % 2].tolist() if rank >= 4 else [])
    ragged = RaggedShard((0,), (3, 1))
    all_ranks = distribute_tensor(numbers, mesh, [Shard(0), ragged, Replicate()])
    moved = all_ranks.redistribute(placements=[ragged, Replicate(), Replicate()])
    assert moved.to_local().tolist() == (numbers[:6] if rank < 4 else numbers[6:]).tolist()
    again = init_device_mesh("cpu", (4, 2))  # Groups that every rank of the world makes: they agree on names too.
    assert torch.equal(distribute_tensor(numbers, again, [Replicate(), owner]).full_tensor(), numbers)


def check_a_mesh_whose_ranks_do_not_ascend():
    """Parts are where the mesh says, by every way to make them, also on ranks whose own place is the same in both orders."""
    values, ragged = torch.arange(32.0).view(8, 4), RaggedShard((0,), (1, 5, 0, 2))
    mesh, parts = DeviceMesh("cpu", [0, 2, 1, 3]), values.split((1, 5, 0, 2))
    mine = parts[[0, 2, 1, 3][dist.get_rank()]].flatten()
    tensor = distribute_tensor(values, mesh, [ragged])
    assert torch.equal(tensor.to_local(), mine)
    pending = DTensor.from_local(values * (dist.get_rank() + 1), mesh, [Partial()])
    moves = {
        "full_tensor": lambda: torch.equal(tensor.full_tensor(), values),
        "reduced": lambda: torch.equal(pending.redistribute(placements=[ragged]).to_local(), mine * 10),
        "to Shard": lambda: torch.equal(
            tensor.redistribute(placements=[Shard(0)]).to_local(), values.chunk(4)[mesh.get_coordinate()[0]]
        ),
    }
    return {name: error_of(move) or move() for name, move in moves.items()}


def check_that_torchs_own_order_is_told():
    """What torch has distributed on such a mesh is told, once; ragged placements and other meshes are not."""
    mesh, values, ragged = DeviceMesh("cpu", [1, 0]), torch.arange(8.0), RaggedShard((0,), (3, 5))
    heard = {}
    for name, where, placement in (
        ("ascending", DeviceMesh("cpu", [0, 1]), Shard(0)),
        ("ragged", mesh, ragged),
        ("shard", mesh, Shard(0)),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            moved = error_of(distribute_tensor(values, where, [placement]).redistribute, placements=[RaggedShard((0,), (1, 7))])
        heard[name] = [str(each.message) for each in caught if "ascending" in str(each.message)], moved
    return heard


def check_errors():
    rank = dist.get_rank()
    mesh, grid = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (1, 2))
    placement = [RaggedShard((0,), (1, 3))]
    good = torch.zeros(3 if rank == 0 else 9)
    tensor = distribute_tensor(torch.zeros(4, 3), mesh, placement)
    mine = [RaggedShard((0,), (1, 3) if rank else (3, 1))]
    numbers = DTensor.from_local(torch.zeros(4, 3, dtype=torch.int64), mesh, [Partial("avg")])
    errors = [
        error_of(DTensor.from_local, good, mesh, placement),
        error_of(DTensor.from_local, torch.zeros(5 if rank else 3), mesh, placement, shape=(4, 3), run_check=True),
        error_of(DTensor.from_local, good, mesh, placement, shape=(4 + rank, 3), run_check=True),
        error_of(DTensor.from_local, torch.zeros(9), mesh, mine, shape=(4, 3), run_check=True),
        error_of(distribute_tensor, torch.zeros(6, 3), mesh, placement),
        error_of(distribute_tensor, torch.zeros(4, 3), mesh, [RaggedShard((0,), (1, 1, 2))]),
        error_of(tensor.redistribute, placements=[RaggedShard((0,), (1, 4))]),
        error_of(tensor.redistribute, grid, placement),
        error_of(distribute_tensor, torch.zeros(4, 3), grid, [RaggedShard((0,), (1,)), Shard(0)]),
        error_of(distribute_tensor, torch.zeros(4, 3), grid, [RaggedShard((0,), (1,)), RaggedShard((0,), (1, 3))]),
        error_of(numbers.redistribute, placements=placement),
        error_of(
            DTensor.from_local(torch.zeros(4, 3, dtype=torch.int16), mesh, [Partial()]).redistribute, placements=placement
        ),
    ]
    assert DTensor.from_local(good, mesh, placement, shape=(4, 3), run_check=True).stride() == (3, 1)
    return errors


class RedistributeTest(expecttest.TestCase):
    def test_random_cases_are_bitwise_right_and_move_the_least(self):
        self.check_random_cases(15, 45)

    @pytest.mark.slow
    def test_many_random_cases_are_bitwise_right_and_move_the_least(self):
        self.check_random_cases(200, 600)

    def check_random_cases(self, of_one_dimension, of_more):
        kinds = set()
        for world in (1, 2, 3, 5, 7):
            kinds |= kinds_of_random_cases(((world,),), of_one_dimension, world)
        for world, mesh_shapes in MESHES.items():
            kinds |= kinds_of_random_cases(mesh_shapes, of_more, world)
        names = ("Replicate", "Shard", "_StridedShard", "Partial", "RaggedShard")
        self.assertLessEqual(set(itertools.product(names, names)), kinds)

    @ranks(8)
    def test_nested_cuts_become_pending_bitwise_right():
        mesh = init_device_mesh("cpu", (2, 2, 2))
        for nested in ((_StridedShard(0, split_factor=2), Shard(0), Shard(0)), (Replicate(), Shard(0), Shard(0))):
            owner = RaggedShard((), (0, 1))
            for operation in ("sum", "avg", "max", "min"):
                check_case(mesh, ((2,), nested, (owner, Partial(operation), Partial(operation))), torch.float32, 0)

    @ranks(4)
    def test_reductions_onto_strided_columns_are_bitwise_right():
        """The reduced piece arrives stripe by stripe; in the local tensor the stripes lie side by side."""
        mesh, ragged, strided = init_device_mesh("cpu", (2, 2)), RaggedShard((0,), (1, 3)), _StridedShard(1, split_factor=2)
        for operation in ("sum", "avg", "max"):
            check_case(mesh, ((4, 4), (ragged, Partial(operation)), (ragged, strided)), torch.float32, 0)

    def test_plans_cost_nothing_per_rank(self):
        """A step for each of so many ranks would never end."""
        many = 10**12
        one, other = (RaggedShard((0,), Units([(0, many - 3 - n), (1, 1), (2, 1), (0, 1 + n)])) for n in (0, 1))
        for source, target in ((one, other), (one, Replicate()), (Replicate(), one), (Shard(0), one), (Partial(), one)):
            (step,) = plan_of((6, 4), (many,), (source,), (target,), (many - 2,))
            if isinstance(step, Exchange):
                self.assertEqual((len(step.send_splits), len(step.receive_splits)), (many, many))
        (step,) = plan_of((6, 4), (many,), (one,), (other,), (many - 2,))
        self.assertEqual((step.send_splits[many - 3], step.receive_splits.total), (16, 0))

    @ranks(4)
    def test_dtypes_that_no_backend_sends_are_bitwise_right():
        """Complex numbers and 16-bit integers travel as reals and as bytes. Booleans have their own fills."""
        mesh = init_device_mesh("cpu", (4,))
        ragged = [RaggedShard((0,), (1, 5, 0, 2)), RaggedShard((0, 1), (0, 20, 4, 8)), Shard(1), Replicate()]
        for values in (torch.randn(8, 4, dtype=torch.complex64), torch.arange(-16, 16, dtype=torch.int16).view(8, 4)):
            for source, target in itertools.permutations(ragged, 2):
                if not any(isinstance(p, RaggedShard) for p in (source, target)):
                    continue  # Torch's own redistribution.
                placed, expected = (distribute_tensor(values, mesh, [p], src_data_rank=None) for p in (source, target))
                moved = placed.redistribute(placements=[target])
                assert torch.equal(moved.to_local(), expected.to_local()), (values.dtype, source, target)
        truths = torch.arange(32).view(8, 4) % 3 == 0
        for operation in ("min", "max"):
            pending = distribute_tensor(truths, mesh, ragged[:1]).redistribute(placements=[Partial(operation)])
            assert torch.equal(pending.redistribute(placements=ragged[1:2]).full_tensor(), truths), operation

    @ranks(4)
    def test_averages_are_right():
        """The mean over the ranks of whole numbers, onto every kind of owners; of complex numbers too."""
        mesh, rank = init_device_mesh("cpu", (4,)), dist.get_rank()
        owners = [(1, 1, 1, 1), (1, 5, 0, 2), (0, 0, 8, 0), (7, 1, 0, 0)]
        for dtype, units in itertools.product((torch.float32, torch.complex64), owners):
            mine = (torch.arange(32).view(8, 4) * (rank + 1)).to(dtype)
            pending = DTensor.from_local(mine, mesh, [Partial("avg")])
            moved = pending.redistribute(placements=[RaggedShard((0,), units)])
            assert torch.equal(moved.full_tensor(), (torch.arange(32).view(8, 4) * 2.5).to(dtype)), (dtype, units)

    @ranks(4)
    def test_ranks_outside_of_the_mesh_hold_nothing():
        """They hold nothing and communicate nothing, on a mesh of the first two of four ranks."""
        mesh, values = DeviceMesh("cpu", [0, 1]), torch.arange(32.0).view(8, 4)
        placed = distribute_tensor(values, mesh, [RaggedShard((0,), (1, 3))], src_data_rank=None)
        moved = placed.redistribute(placements=[RaggedShard((0,), (3, 1))])
        rank = dist.get_rank()
        assert torch.equal(moved.to_local(), values.view(-1).split([24, 8, 0, 0])[rank]), moved

    def test_random_cases_on_meshes_whose_ranks_do_not_ascend(self):
        for world, mesh_shapes in MESHES.items() if can_order_groups else ():
            kinds_of_random_cases(mesh_shapes, 35, world, permuted=True)

    def test_a_mesh_whose_ranks_do_not_ascend_decides_where_parts_are(self):
        for found in run_ranks(4, check_a_mesh_whose_ranks_do_not_ascend):
            for name, answer in found.items():
                refused = "NotImplementedError: redistribution over dimensions (0,) of DeviceMesh"
                self.assertTrue(answer is True if can_order_groups else answer.startswith(refused), (name, answer))

    def test_what_torch_has_distributed_in_another_order_is_told(self):
        for heard in run_ranks(2, check_that_torchs_own_order_is_told):
            self.assertEqual(
                {name: len(texts) for name, (texts, _) in heard.items()}, {"ascending": 0, "ragged": 0, "shard": 1}
            )
            self.assertIn("places its parts by mesh coordinates, as DCP does", heard["shard"][0][0])

    @ranks(4)
    def test_one_collective_is_in_flight_until_it_is_waited_for():
        """One collective is in flight until the caller waits; what several rounds or owners combine is complete."""
        mesh, rank = init_device_mesh("cpu", (4,)), dist.get_rank()
        even, skewed, root = RaggedShard((0,), (1, 1, 1, 1)), RaggedShard((0,), (1, 5, 0, 2)), RaggedShard((), (0, 0, 1, 0))
        two, values = RaggedShard((0,), (5, 3, 0, 0)), torch.arange(32.0).view(8, 4)
        for source, target, in_flight in (
            (even, Replicate(), True),
            (root, Replicate(), True),
            (two, Replicate(), False),
            (skewed, root, True),
            (Replicate(), skewed, False),
            (even, Partial(), False),
            (Partial(), Replicate(), True),
            (Partial(), even, True),
            (Partial(), RaggedShard((0,), (3, 1, 2, 2)), True),
        ):
            local = values / 4 if isinstance(source, Partial) else distribute_tensor(values, mesh, [source]).to_local()
            at_once = redistribute_local(local, mesh, (8, 4), (source,), (target,))
            pending = redistribute_local(local, mesh, (8, 4), (source,), (target,), is_async=True)
            assert (pending.in_flight, at_once.in_flight) == (in_flight, False), (source, target)
            assert torch.equal(pending.wait(), at_once.wait()), (source, target)
            result = DTensor.from_local(pending.wait(), mesh, [target], shape=(8, 4), stride=(4, 1))
            assert torch.equal(result.full_tensor(), values), (source, target, rank)

    @ranks(4)
    def test_the_traced_reduce_gives_its_root_the_result():
        """The operator that stands for ``dist.reduce`` in a traced program."""
        mesh, rank = init_device_mesh("cpu", (4,)), dist.get_rank()
        DTensor.from_local(torch.ones(4), mesh, [Partial()]).redistribute(placements=[RaggedShard((), (0, 1, 0, 0))])
        name, mine = mesh.get_group().group_name, torch.tensor([1.0, 5.0]) * (rank + 1)
        for operation, expected in (("sum", [10.0, 50.0]), ("max", [4.0, 20.0]), ("min", [1.0, 5.0])):
            result = torch.ops.ragged_shard.reduce(mine, operation, 1, name)
            assert rank != 1 or result.tolist() == expected, (operation, result)
        assert mine.tolist() == [1.0 + rank, 5.0 + 5 * rank]
        with FakeTensorMode():
            traced = torch.ops.ragged_shard.reduce(torch.empty(3, dtype=torch.bfloat16), "sum", 1, name)
        assert (traced.shape, traced.dtype) == ((3,), torch.bfloat16)

    def test_some_ranks_may_make_a_group_before_all_do(self):
        run_ranks(8, check_groups_of_some_ranks, timeout=30)

    def test_each_redistribution_takes_the_fewest_collectives(self):
        (counts, *others) = run_ranks(4, count_collectives)
        self.assertTrue(all(other == counts for other in others))
        self.assertEqual(
            counts,
            {
                "RS(0)[1,1,1,1] -> R": {"all_gather_into_tensor": 1},
                "RS(0)[1,5,0,2] -> RS()[0,0,1,0]": {"all_to_all_single": 1},
                "RS()[0,0,1,0] -> RS(0)[1,5,0,2]": {"all_to_all_single": 1},
                "RS(0)[1,5,0,2] -> S(1)": {"all_to_all_single": 1},
                "S(0) -> RS(0)[1,1,1,1]": {},
                "RS()[0,0,1,0] -> R": {"broadcast": 1},
                "RS(0)[4,4,0,0] -> R": {"all_to_all_single": 1},  # Of a buffer twice as large as the tensor, not more.
                "RS(0)[5,3,0,0] -> R": {"broadcast": 2},
                "R -> RS(0)[1,5,0,2]": {},
                "RS(0)[1,5,0,2] -> RS(0,1)[1,5,0,2]": {},
                "RS(0)[1,1,1,1] -> P(sum)": {},
                "P(sum) -> RS(0)[1,1,1,1]": {"reduce_scatter_tensor": 1},
                "P(sum) -> RS(0)[1,5,0,2]": {"all_to_all_single": 2},
                "P(sum) -> RS()[0,0,1,0]": {"reduce_": 1},
                "P(sum) -> RS(0)[7,1,0,0]": {"reduce_": 2},
                "S(0)S(0) -> RS(0)[1,3]R": {"all_to_all_single": 1},
                "S(0)RS(0)[1,3] -> RRS(0)[1,3]": {"all_to_all_single": 1},
                "P(sum)RS(0)[1,3] -> RRS(0)[1,3]": {"all_reduce": 1},
            },
        )

    def test_bad_input_is_an_error_on_every_rank(self):
        first, second = run_ranks(2, check_errors)
        self.assertEqual(first, second)
        self.assertExpectedInline(
            "\n".join(first).replace(f"on {DEVICE}", "on cpu"),
            """\
ValueError: DTensor.from_local got RS(0)[1,3] without the global shape, which does not follow from a 1-D local tensor: pass shape=, such as DTensor.from_local(local, mesh, placements, shape=param.shape)
ValueError: DTensor.from_local: shape (4, 3) under RS(0)[1,3]: rank 1 gave a local tensor of shape (5,), expected (9,)
ValueError: DTensor.from_local: RaggedShard(dims=(0,), local_units=(1, 3)) cannot cut shape (5, 3): its 5 slices over these dims do not divide into 4 units. Choose units whose sum divides 5
ValueError: DTensor.from_local: ranks gave different shapes or placements: (4, 3) (RaggedShard(dims=(0,), local_units=(1, 3)),), (4, 3) (RaggedShard(dims=(0,), local_units=(3, 1)),)
ValueError: RaggedShard(dims=(0,), local_units=(1, 3)) cannot cut shape (6, 3): its 6 slices over these dims do not divide into 4 units. Choose units whose sum divides 6
ValueError: RaggedShard(dims=(0,), local_units=(1, 1, 2)) has 3 local_units, but mesh dimension 0 has 2 ranks: give one number of units per rank
ValueError: RaggedShard(dims=(0,), local_units=(1, 4)) cannot cut shape (4, 3): its 4 slices over these dims do not divide into 5 units. Choose units whose sum divides 4
ValueError: cannot redistribute a DTensor on a mesh of (2,) on cpu to a mesh of (1, 2) on cpu: use the tensor's own mesh
ValueError: Shard(0) to the right of a ragged placement over dims (0,) would cut its units. Use (StridedRaggedShard, Shard(0)) instead, or give the ragged placement at most 0 dims
ValueError: two ragged placements on one tensor: use one RaggedShard on a flattened mesh dimension instead
ValueError: redistribution from (Partial(avg),) to (RaggedShard(dims=(0,), local_units=(1, 3)),): Partial('avg') needs floating point, got torch.int64: cast it
ValueError: redistribution from (Partial(sum),) to (RaggedShard(dims=(0,), local_units=(1, 3)),): cannot reduce torch.int16 by sum: cast it""",  # noqa: E501
        )
