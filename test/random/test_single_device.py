"""single_device: random ops on plain DTensors give the values, and the generator's state, of a single device."""

import itertools
import math
import random
import unittest
import unittest.mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor as dtensor
import torch.nn.functional as F
from common import enter_fake_group, error_of, ranks, run_ranks
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils.checkpoint import checkpoint

from torch_ragged import InterleavedShard, RaggedShard, StridedRaggedShard
from torch_ragged.random import single_device
from torch_ragged.tensor import _draw, _random
from torch_ragged.tensor._random import Scope, scope

FLOATS, ALL = (torch.float32, torch.float64, torch.bfloat16, torch.float16), None
OPS = {
    "normal_": (FLOATS, lambda x, g: x.normal_(0.5, 2, generator=g)),
    "uniform_": (FLOATS, lambda x, g: x.uniform_(-1, 3, generator=g)),
    "exponential_": (FLOATS, lambda x, g: x.exponential_(2.0, generator=g)),
    "geometric_": (ALL, lambda x, g: x.geometric_(0.3, generator=g)),
    "cauchy_": (FLOATS, lambda x, g: x.cauchy_(generator=g)),
    "log_normal_": (FLOATS, lambda x, g: x.log_normal_(0.1, 0.5, generator=g)),
    "random_": (ALL, lambda x, g: x.random_(generator=g)),
    "random_ to": (ALL, lambda x, g: x.random_(100, generator=g)),
    "random_ from": (ALL, lambda x, g: x.random_(-3, 100, generator=g)),
    "bernoulli_": (ALL, lambda x, g: x.bernoulli_(0.3, generator=g)),
    "bernoulli_ of a tensor": (FLOATS, lambda x, g: x.bernoulli_(x.abs().clamp(max=1) * 0.5, generator=g)),
    "bernoulli": (FLOATS, lambda x, g: torch.bernoulli(x.abs().clamp(max=1), generator=g)),
    "bernoulli of a number": (FLOATS, lambda x, g: torch.bernoulli(x, 0.2, generator=g)),
    "rand_like": (FLOATS, lambda x, g: torch.rand_like(x)),
    "rand_like of a generator": (FLOATS, lambda x, g: torch.rand_like(x, generator=g)),
    "randn_like of a dtype": (ALL, lambda x, g: torch.randn_like(x, dtype=torch.float64)),
    "randint_like": (ALL, lambda x, g: torch.randint_like(x, 10)),
    "randint_like from": (ALL, lambda x, g: torch.randint_like(x, 3, 10, dtype=torch.int32)),
    "native_dropout": (FLOATS, lambda x, g: torch.native_dropout(x, 0.3, True)[0]),
    "mask of native_dropout": (FLOATS, lambda x, g: torch.native_dropout(x, 0.3, True)[1]),
    "dropout": (FLOATS, lambda x, g: F.dropout(x, 0.3)),
    "dropout in place": (FLOATS, lambda x, g: F.dropout(x, 0.3, inplace=True)),
    "multinomial": (FLOATS[:2], lambda x, g: torch.multinomial(x.abs() + 0.1, 1, generator=g)),
    "multinomial of two": (FLOATS[:2], lambda x, g: torch.multinomial(x.abs() + 0.1, 2, generator=g)),
    "multinomial with replacement": (FLOATS[:2], lambda x, g: torch.multinomial(x.abs() + 0.1, 3, True, generator=g)),
}
PARTIALS = ("sum", "avg", "max", "min", "product")


def of_one_device(function, x, seed, with_generator):
    """The result of one device, and the states of the default generator and of the one given."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed + 1) if with_generator else None
    result = function(x, generator)
    return result, torch.get_rng_state(), generator.get_state() if generator else torch.empty(0)


def random_tensor(rng, dtype):
    """Up to five dimensions, even or not, with none or no elements, of any order in memory."""
    shape = [rng.choice((1, 2, 3, 4, 5, 8)) if rng.random() < 0.95 else 0 for _ in range(rng.randint(0, 5))]
    order = list(range(len(shape)))
    if rng.random() < 0.3:
        rng.shuffle(order)
    values = torch.rand([shape[dim] for dim in order], generator=torch.Generator().manual_seed(rng.randrange(99))) * 4
    return values.to(dtype).permute([order.index(dim) for dim in range(len(shape))]) if shape else values.to(dtype)


def random_placements(rng, mesh_shape, tensor, kinds_of_partial):
    """One per mesh dimension, of all plain kinds. One kind of Partial per tensor."""
    partial = [Partial(rng.choice(kinds_of_partial))] if kinds_of_partial else []
    kinds = [Replicate(), *partial] + [Shard(dim) for dim in range(tensor.ndim)] * 2
    found = [rng.choice(kinds) for _ in mesh_shape]
    if len(mesh_shape) == 2 and tensor.ndim and tensor.shape[0] % math.prod(mesh_shape) == 0 and rng.random() < 0.5:
        return [_StridedShard(0, split_factor=mesh_shape[1]), Shard(0)]  # FSDP over tensor parallelism.
    return found


def distributed(tensor, mesh, placements):
    """A DTensor of these values. Of each Partial, rank 0 has the values and the others what adds nothing."""
    whole = distribute_tensor(tensor, mesh, [Replicate() if p.is_partial() else p for p in placements])
    local = whole.to_local()
    for coordinate, placement in zip(mesh.get_coordinate(), placements):
        if placement.is_partial() and coordinate and placement.reduce_op in ("sum", "product"):
            local = torch.full_like(local, placement.reduce_op == "product")
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


def check_random_cases(mesh_shape, rounds, seed):
    """Every op under random placements. Returns how many cases of a kind were seen."""
    rng, mesh = random.Random(seed), init_device_mesh("cpu", mesh_shape)
    seen = dict.fromkeys(("uneven or empty", "partial", "strided", "two shards", "not contiguous", "cases"), 0)
    single_device()
    for number in range(rounds):
        for name, (dtypes, function) in OPS.items():
            dtype, with_generator = rng.choice(dtypes or (*FLOATS, torch.int64)), rng.random() < 0.5
            full = random_tensor(rng, dtype)
            # torch itself multiplies and divides no other Partial in place; and a mean of three or of integers is not exact.
            has_mean = dtype.is_floating_point and not {3, 5}.intersection(mesh_shape) and "like" not in name
            kinds = (
                PARTIALS[: name != "dropout in place"]
                if "dropout" in name
                else [kind for kind in PARTIALS if has_mean or kind != "avg"]
            )
            placements = random_placements(rng, mesh_shape, full, kinds)
            try:
                want, *states = of_one_device(function, full.clone(), number, with_generator)
            except RuntimeError:  # Such as multinomial of five dimensions.
                continue
            x = distributed(full.clone(), mesh, placements)
            got, *got_states = of_one_device(function, x, number, with_generator)
            case = f"{name} of {dtype} {tuple(full.shape)} {full.stride()} under {placements} on {mesh_shape}, {with_generator}"
            whole = got.redistribute(placements=[Replicate()] * mesh.ndim).to_local()
            assert torch.equal(whole, want) and whole.dtype == want.dtype, case
            steps = [[step for step, size in zip(tensor.stride(), tensor.shape) if size > 1] for tensor in (got, want)]
            assert got.shape == want.shape and (steps[0] == steps[1] or not want.numel()), case
            assert all(map(torch.equal, got_states, states)), f"states after {case}"
            local = full.new_empty(full.shape)
            seen["cases"] += 1
            seen["uneven or empty"] += any(p.is_shard() and full.shape[p.dim] % n for p, n in zip(placements, mesh_shape))
            seen["partial"] += any(p.is_partial() for p in placements)
            seen["strided"] += any(isinstance(p, _StridedShard) for p in placements)
            seen["two shards"] += sum(p.is_shard() for p in placements) > 1
            seen["not contiguous"] += not full.is_contiguous() and local.numel() > 0
    single_device(False)
    return seen


INITS = {
    "uniform_": nn.init.uniform_,
    "normal_": lambda t: nn.init.normal_(t, generator=torch.Generator().manual_seed(1)),
    "trunc_normal_": lambda t: nn.init.trunc_normal_(t, std=0.5, a=-1, b=1),
    "trunc_normal_ in the tail": lambda t: nn.init.trunc_normal_(t, std=0.5, a=1.5, b=4),
    "xavier_uniform_": nn.init.xavier_uniform_,
    "xavier_normal_": nn.init.xavier_normal_,
    "kaiming_uniform_": lambda t: nn.init.kaiming_uniform_(t, a=5**0.5),
    "kaiming_normal_": lambda t: nn.init.kaiming_normal_(t, mode="fan_out"),
    "orthogonal_": nn.init.orthogonal_,
    "orthogonal_ of a wide tensor": lambda t: nn.init.orthogonal_(t.t()),
    "constant_": lambda t: nn.init.constant_(t, 3.0),
}


def check_inits(takes_all):
    """Each way to initialize under all pairs of placements; or under three of them, the next way under the next three."""
    mesh, kinds = init_device_mesh("cpu", (2, 2)), (Replicate(), Shard(0), Shard(1))
    pairs = list(itertools.product(kinds, kinds))
    with single_device():
        for number, (name, init) in enumerate(INITS.items()):
            for placements in pairs if takes_all else pairs[number % 3 :: 3]:
                results = []
                for tensor in (torch.empty(12, 10), distribute_tensor(torch.empty(12, 10), mesh, placements)):
                    torch.manual_seed(8)
                    parameter = nn.Parameter(tensor)
                    init(parameter)
                    results += [parameter.detach(), torch.get_rng_state()]
                want, state, got, got_state = results
                assert torch.equal(got.full_tensor(), want) and torch.equal(state, got_state), (name, placements)


def check_no_probability(takes_all):
    """Each op with each kind of values under all layouts, or under two, the next op under the next ones."""
    mesh, meshes = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    good = torch.full((8, 12), 0.5)
    values = {name: good.clone() for name in ("above", "nan", "negative", "inf", "zeros", "good")}
    values["above"][7, 11], values["nan"][0, 0], values["negative"][3, 3] = 1.5, math.nan, -1.0
    values["inf"][2, 2], values["zeros"][6] = math.inf, 0.0
    ops = {
        "bernoulli": torch.bernoulli,
        "bernoulli_": lambda x: torch.zeros_like(x).bernoulli_(x),
        "multinomial": lambda x: torch.multinomial(x, 2),
        "one sample": lambda x: torch.multinomial(x, 1),
        "with replacement": lambda x: torch.multinomial(x, 3, True),
    }
    layouts = [(mesh, [placement]) for placement in (Shard(0), Shard(1), Replicate(), RaggedShard((0,), (3, 1, 0, 4)))]
    layouts += [
        (mesh, [InterleavedShard(1, 3)]),
        (meshes, [Replicate(), Shard(0)]),
        (meshes, [RaggedShard((0,), (1, 3)), Replicate()]),
    ]
    refused = 0
    with single_device():
        cases = itertools.product(values.items(), ops.items(), range(len(layouts) if takes_all else 2))
        for ((kind, full), (name, op), _), (where, placements) in zip(cases, itertools.cycle(layouts)):
            wanted = error_of(op, full.clone()).partition(":")[0]
            errors = [""] * 4
            torch.manual_seed(0)
            dist.all_gather_object(errors, error_of(op, distribute_tensor(full, where, placements)).partition(":")[0])
            assert errors == [wanted] * 4, (placements, kind, name, wanted, errors)
            refused += wanted != ""
    assert refused == (len(layouts) if takes_all else 2) * 5 * 4, refused


class SingleDeviceTest(unittest.TestCase):
    @pytest.mark.slow
    def test_random_cases_on_meshes_of_one_to_three_dimensions(self):
        for mesh_shape, rounds in (((3,), 2), ((2, 1, 2), 1), ((2, 2), 2)):
            seen = run_ranks(torch.Size(mesh_shape).numel(), check_random_cases, mesh_shape, rounds, 1)[0]
            self.assertGreater(min(seen[kind] for kind in ("uneven or empty", "partial", "not contiguous")), 2, seen)
        self.assertGreater(min(seen.values()), 2, seen)

    @pytest.mark.slow
    def test_many_random_cases(self):
        for mesh_shape in ((2,), (5,), (2, 3), (2, 2, 2), (2, 1, 3)):
            seen = run_ranks(torch.Size(mesh_shape).numel(), check_random_cases, mesh_shape, 20, 7)[0]
            self.assertGreater(seen["cases"], 300)

    @pytest.mark.slow
    @ranks(4)
    def test_all_placements_of_shapes_of_two_to_five_dimensions():
        functions = (
            lambda x: x.normal_(),
            torch.rand_like,
            lambda x: F.dropout(x, 0.4),
            lambda x: F.dropout(x, 0.4, inplace=True),
        )
        with single_device():
            for sizes in ((4,), (2, 2)):
                mesh = init_device_mesh("cpu", sizes)
                for shape in ((4, 6), (3, 4, 2), (2, 3, 4, 2), (2, 1, 4, 3, 2)):
                    full = torch.rand(shape, generator=torch.Generator().manual_seed(1))
                    kinds = (Replicate(), Partial(), *map(Shard, range(len(shape))))
                    for placements in itertools.product(kinds, repeat=len(sizes)):
                        # torch multiplies no Partial in place that is cut along a dimension of size 1.
                        refuses = Partial() in placements and any(p.is_shard() and shape[p.dim] == 1 for p in placements)
                        for number, function in enumerate(functions[: 3 if refuses else 4]):
                            results = []
                            for x in (full.clone(), distributed(full.clone(), mesh, placements)):
                                torch.manual_seed(number)
                                results += [function(x), torch.get_rng_state()]
                            want, state, got, got_state = results
                            case = (number, shape, placements)
                            assert torch.equal(got.full_tensor(), want) and torch.equal(state, got_state), case

    @ranks(2)
    def test_it_is_a_context_a_switch_and_a_decorator():
        mesh = init_device_mesh("cpu", (2,))
        handlers = dict(DTensor._op_dispatcher._custom_op_handlers)

        def is_on():
            torch.manual_seed(1)
            x = distribute_tensor(torch.empty(7, 3), mesh, [Shard(1)]).normal_()
            torch.manual_seed(1)
            return torch.equal(x.full_tensor(), torch.empty(7, 3).normal_())

        assert not is_on()
        with single_device():
            assert is_on()
            with single_device(False):
                assert not is_on()
            with single_device():
                assert is_on()
            assert is_on()
        assert not is_on() and single_device()(is_on)() and not is_on()
        single_device()
        assert is_on()
        single_device(False)
        assert not is_on() and DTensor._op_dispatcher._custom_op_handlers == handlers

    @ranks(2)
    def test_off_plain_dtensors_draw_as_in_torch():
        mesh = init_device_mesh("cpu", (2,))
        with single_device():
            distribute_tensor(torch.empty(4, 4), mesh, [Shard(0)]).normal_()
        for function in (lambda x: x.normal_(), lambda x: F.dropout(x, 0.5), torch.rand_like):
            x = distribute_tensor(torch.ones(5, 3), mesh, [Shard(0)])
            torch.manual_seed(3)
            got, state = function(x.clone()).to_local(), torch.get_rng_state()
            torch.manual_seed(3)
            assert torch.equal(got, function(x.to_local().clone())) and torch.equal(state, torch.get_rng_state())

    @ranks(2)
    def test_the_first_draws_compare_states_then_every_16th_and_those_without_gradients():
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.ones(6, 4), mesh, [Shard(1)])

        def compared(draws, grad=True):
            with CommDebugMode() as mode, torch.set_grad_enabled(grad):
                for _ in range(draws):
                    F.dropout(x, 0.5)
                    torch.rand_like(x)
            return mode.get_total_counts()

        torch.manual_seed(0)
        with single_device():
            assert compared(4) == 8 and compared(4) == 0 and compared(1) == 1 and compared(7) == 0
            assert compared(3, grad=False) == 6
            with single_device():
                assert compared(1) == 0
        with single_device():  # It was off, and the generators may have come apart.
            assert compared(1) == 2

    @ranks(2)
    def test_states_that_come_apart_after_the_first_draw_raise_on_all_ranks():
        mesh = init_device_mesh("cpu", (2,))
        weight = distribute_tensor(torch.empty(4, 4), mesh, [Shard(0)])
        with single_device():
            torch.manual_seed(0)
            for number in (1, 3, 40):
                for _ in range(number):
                    nn.init.normal_(weight)
                if mesh.get_rank() == 0:
                    torch.rand(1)
                error = error_of(nn.init.normal_, weight)
                assert "and one of them has drawn more numbers" in error, error
                torch.manual_seed(number)

    @ranks(4)
    def test_states_that_differ_raise_on_all_ranks():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        rank, x = mesh.get_rank(), distribute_tensor(torch.ones(6, 4), mesh, [Replicate(), Shard(1)])
        with single_device():
            torch.manual_seed(rank == 2)
            error = error_of(lambda: x.normal_())
            assert "rank 0 has a generator of seed 0" in error and "rank 2 has a generator of seed 1" in error, error
            assert "torch.manual_seed with one seed" in error
            generator = torch.Generator().manual_seed(5 + (rank == 3))
            torch.manual_seed(0)
            assert "rank 3 has a generator of seed 6" in error_of(lambda: torch.rand_like(x, generator=generator))
            x.normal_()
            ragged = distribute_tensor(torch.ones(6, 4), mesh, [Replicate(), RaggedShard((0,), (1, 2))])
            ragged.normal_()
        with single_device():  # Anew, on ragged placements too, and for submeshes by themselves.
            torch.manual_seed(mesh["dp"].get_local_rank())
            local = distribute_tensor(torch.ones(6, 4), mesh["tp"], [Shard(0)])
            F.dropout(local, 0.5)
            assert "seed 1" in error_of(lambda: ragged.uniform_())
        ragged.uniform_()  # Off: nothing is compared.

    def test_nn_init_draws_the_numbers_of_one_process(self):
        run_ranks(4, check_inits, False)

    @pytest.mark.slow
    def test_nn_init_draws_the_numbers_of_one_process_under_all_placements(self):
        run_ranks(4, check_inits, True)

    @ranks(2)
    def test_a_value_that_is_read_is_that_of_the_whole_tensor():
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.tensor([False, False, True]), mesh, [Shard(0)])
        # Before 2.15, torch's own way is that of each rank's part: the second one has the third element.
        with single_device():
            assert bool(x.any()) and x.sum().item() == 1

    @ranks(2)
    def test_rows_of_segments_are_gathered_for_multinomial():
        mesh = init_device_mesh("cpu", (2,))
        rows = torch.rand(8, 5, generator=torch.Generator().manual_seed(1))
        for placement, samples in itertools.product((InterleavedShard(0, 2), RaggedShard((0,), (3, 5))), (1, 2)):
            with single_device():
                torch.manual_seed(samples)
                got = torch.multinomial(distribute_tensor(rows, mesh, [placement]), samples)
            torch.manual_seed(samples)
            assert torch.equal(got.full_tensor(), torch.multinomial(rows, samples)), (placement, samples)

    @ranks(4)
    def test_partials_of_two_kinds_get_the_numbers_on_every_rank():
        mesh = init_device_mesh("cpu", (2, 2))
        with single_device():
            for kinds in (("avg", "sum"), ("sum", "avg")):  # torch refuses other pairs.
                placements = [Partial(kind) for kind in kinds]
                x = DTensor.from_local(torch.ones(3, 5), mesh, placements, run_check=False)
                torch.manual_seed(2)
                x.normal_()
                torch.manual_seed(2)
                want = torch.empty(3, 5).normal_()
                owns = mesh.get_coordinate()[kinds.index("sum")] == 0
                assert torch.equal(x.to_local(), want if owns else torch.zeros_like(want)), kinds

    @ranks(2)
    def test_a_ragged_value_is_read_too():
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.tensor(3.0), mesh, [RaggedShard((), (0, 1))])
        error = error_of(x.item)
        with single_device():
            assert error_of(x.item) == error and x.sum().item() == 3.0

    @ranks(2)
    def test_meta_and_fake_tensors_draw_and_compare_nothing():
        mesh = init_device_mesh("cpu", (2,))
        torch.manual_seed(mesh.get_rank())  # It would raise.
        before = torch.get_rng_state()
        _draw._is_serial.cache_clear()  # The trial must not run with fake tensors.

        def check(device):
            for placement in (Shard(0), RaggedShard((0,), (1, 2))):
                shape = {"shape": (6, 3), "stride": (3, 1)}
                numel = 9 if placement == Shard(0) else (6, 12)[mesh.get_rank()]
                local = torch.empty((3, 3) if placement == Shard(0) else numel, device=device)
                x = DTensor.from_local(local, mesh, [placement], run_check=False, **shape)
                for y in (x.normal_(), torch.rand_like(x), F.dropout(x, 0.5), torch.native_dropout(x, 0.5, True)[1]):
                    assert y.shape == (6, 3) and y.to_local().device.type == device

        with single_device():
            check("meta")
            with FakeTensorMode():
                check("cpu")
        assert torch.equal(before, torch.get_rng_state())

    @ranks(2)
    def test_dropout_masks_backward_and_recomputation_as_forward():
        mesh = init_device_mesh("cpu", (2,))
        full = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
        layer = nn.Sequential(nn.Dropout(0.4), nn.Dropout(0.2))
        functions = {
            "module": layer,
            "recomputed": lambda x: checkpoint(layer, x, use_reentrant=False),
            "native": lambda x: torch.native_dropout(x, 0.3, True)[0],
            "alpha": lambda x: F.alpha_dropout(x, 0.3, training=True),
            "channels": lambda x: F.dropout2d(x.reshape(8, 6, 1, 1), 0.4, training=True).reshape(8, 6),
        }
        with single_device():
            for (name, function), placement in itertools.product(functions.items(), (Shard(0), Shard(1), Replicate())):
                results = []
                for x in (full.clone(), distribute_tensor(full, mesh, [placement])):
                    torch.manual_seed(5)
                    x.requires_grad_(True)
                    y = function(x)
                    (y * y).sum().backward()
                    results += [y.detach(), x.grad]
                want, wanted_gradient, got, gradient = results
                assert torch.equal(got.full_tensor(), want) and int((want == 0).sum()) in range(0, 48), (name, placement)
                assert torch.equal(gradient.full_tensor(), wanted_gradient), (name, placement)

    @pytest.mark.slow
    @ranks(2)
    def test_compiled_code_draws_the_numbers_of_eager():
        mesh, full = init_device_mesh("cpu", (2,)), torch.ones(8, 4)
        functions = (lambda x: F.dropout(x * 2, 0.4) + 1, lambda x: torch.rand_like(x) * x, lambda x: (x + 1).normal_() * 2)
        with single_device():
            for number, function in enumerate(functions):
                torch._dynamo.reset()
                fast = torch.compile(function, backend="aot_eager")
                for step in range(2):
                    torch.manual_seed(step)
                    got = fast(distribute_tensor(full, mesh, [Shard(1)]))
                    torch.manual_seed(step)
                    assert torch.equal(got.full_tensor(), function(full)), (number, step)

    @ranks(4)
    def test_factories_draw_the_numbers_of_one_process():
        mesh = init_device_mesh("cpu", (2, 2))
        for name, placements in itertools.product(("rand", "randn"), ((Shard(1), Shard(0)), (Replicate(), Shard(-1)), None)):
            with single_device():
                torch.manual_seed(2)
                got = getattr(dtensor, name)(5, 7, device_mesh=mesh, placements=placements, requires_grad=True)
            torch.manual_seed(2)
            assert torch.equal(got.full_tensor(), getattr(torch, name)(5, 7)) and got.requires_grad, (name, placements)
        with single_device():
            error = error_of(lambda: dtensor.rand(4, device_mesh=mesh, placements=[Partial(), Shard(0)]))
        assert "Replicate in place of Partial" in error, error

    @ranks(4)
    def test_a_rank_outside_of_the_mesh_moves_its_generator_as_one_device():
        line, small = init_device_mesh("cpu", (4,)), DeviceMesh("cpu", [1, 2])
        draws = (
            lambda x: x.normal_(),
            lambda x: F.dropout(torch.rand_like(x), 0.5),
            torch.bernoulli,
            lambda x: torch.multinomial(x, 2),
            lambda x: torch.multinomial(x, 3, True),
        )
        full = torch.linspace(0.1, 0.9, 16).view(4, 4)
        for placement in (Shard(0), Shard(1), Replicate(), RaggedShard((0,), (3, 1)), InterleavedShard(0, 2)):
            for number, draw in enumerate(draws):
                torch.manual_seed(number)
                draw(full.clone())
                want, state = torch.empty(8, 3).normal_(), torch.get_rng_state()
                torch.manual_seed(number)
                with single_device():
                    found = draw(distribute_tensor(full.clone(), small, [placement]))
                    got = distribute_tensor(torch.empty(8, 3), line, [Shard(0)]).normal_()
                assert torch.equal(got.full_tensor(), want) and torch.equal(torch.get_rng_state(), state), (placement, number)
                assert found.shape == draw(full.clone()).shape and (line.get_rank() in (1, 2) or not found.to_local().numel())
        with single_device():
            torch.manual_seed(1)
            dtensor.randn(5, device_mesh=small, placements=[Shard(0)])
            got = dtensor.rand(5, device_mesh=line, placements=[Shard(0)]).full_tensor()
        torch.manual_seed(1)
        assert torch.equal(got, (torch.randn(5), torch.rand(5))[1])

    @ranks(2)
    def test_forms_with_out_draw_the_numbers_of_one_device():
        mesh, aten = init_device_mesh("cpu", (2,)), torch.ops.aten
        forms = (
            lambda x, out, g: torch.bernoulli(x, out=out, generator=g),
            lambda x, out, g: aten.bernoulli.float_out(x, 0.3, out=out, generator=g),
            lambda x, out, g: aten.bernoulli.Tensor_out(x, x, out=out, generator=g),
            lambda x, out, g: aten.normal.out(x, 1.0, 2.0, out=out, generator=g),
            lambda x, out, g: aten.uniform.out(x, 0, 1, out=out, generator=g),
            lambda x, out, g: aten.exponential.out(x, out=out, generator=g),
            lambda x, out, g: aten.log_normal.out(x, out=out, generator=g),
            lambda x, out, g: aten.cauchy.out(x, out=out, generator=g),
            lambda x, out, g: aten.geometric.out(x, 0.3, out=out, generator=g),
            lambda x, out, g: aten.random.from_out(x, 0, 9, out=out, generator=g),
            lambda x, out, g: aten.rand_like.out(x, out=out),
            lambda x, out, g: aten.rand_like.generator_out(x, out=out, generator=g),
            lambda x, out, g: aten.randint_like.low_dtype_out(x, 3, 10, out=out),
            lambda x, out, g: aten.native_dropout.out(x, 0.5, True, out0=out, out1=torch.empty_like(out, dtype=torch.bool))[0],
        )
        full = torch.linspace(0.1, 0.9, 35).view(5, 7)
        with single_device():
            for placement in (Shard(0), Shard(1), Replicate(), RaggedShard((0,), (4, 1))):
                for number, form in enumerate(forms):
                    want, *states = of_one_device(lambda x, g, f=form: f(x, torch.empty_like(x), g), full, number, True)
                    x = distribute_tensor(full, mesh, [placement])
                    out = torch.zeros_like(x)
                    got, *found = of_one_device(lambda x, g, f=form, o=out: f(x, o, g), x, number, True)
                    assert got is out and torch.equal(got.full_tensor(), want), (placement, number)
                    assert all(map(torch.equal, found, states)), (placement, number)
            x = distribute_tensor(full, mesh, [Shard(0)])
            out = distribute_tensor(torch.zeros(5, 2, dtype=torch.int64), mesh, [Replicate()])
            torch.manual_seed(0)
            want = torch.multinomial(full, 2)
            torch.manual_seed(0)
            assert torch.equal(torch.multinomial(x, 2, out=out).full_tensor(), want)
            for wrong in (torch.empty(5, 7), torch.empty_like(x)[:, :3]):
                assert "give a DTensor of shape (5, 7)" in error_of(torch.bernoulli, x, out=wrong)

    def test_what_is_no_probability_raises_on_every_rank_as_on_one_device(self):
        run_ranks(4, check_no_probability, False)

    @pytest.mark.slow
    def test_what_is_no_probability_raises_under_all_layouts(self):
        run_ranks(4, check_no_probability, True)

    @ranks(4)
    def test_one_rank_gets_the_numbers_under_partial_beside_a_placement_with_own_rules():
        mesh, full = init_device_mesh("cpu", (2, 2)), torch.arange(32.0).view(8, 4) / 64
        functions = (
            lambda x: x.normal_(),
            torch.rand_like,
            lambda x: F.dropout(x, 0.5),
            lambda x: x.bernoulli_(0.3),
            torch.bernoulli,
            lambda x: torch.multinomial(x + 1, 2),
        )
        for cut in (
            RaggedShard((0,), (3, 1)),
            RaggedShard((0, 1), (5, 3)),
            StridedRaggedShard((0,), (1, 1), 2),
            InterleavedShard(0, 2),
        ):
            for placements in ([Partial(), cut], [cut, Partial()]):
                for number, function in enumerate(functions):
                    results = []
                    with single_device():
                        for x in (full.clone(), distributed(full.clone(), mesh, placements)):
                            torch.manual_seed(number)
                            results += [function(x), torch.get_rng_state()]
                    want, state, got, got_state = results
                    assert torch.equal(got.full_tensor(), want) and torch.equal(state, got_state), (placements, number)

    def test_probabilities_that_are_cut_may_be_0_and_1_but_not_more(self):
        enter_fake_group(self, 2)
        mesh = init_device_mesh("cpu", (2,))
        with single_device():
            for values, is_wrong in (([0.0, 1.0], False), ([0.0, 1.5], True), ([-0.5, 1.0], True), ([0.0, math.nan], True)):
                x = DTensor.from_local(torch.tensor(values), mesh, [Shard(0)])
                error = error_of(torch.bernoulli, x)
                self.assertEqual(error.startswith("RuntimeError: aten.bernoulli.default on a DTensor: Expected p_in"), is_wrong)
                self.assertEqual(error == "", not is_wrong, error)
            self.assertEqual(torch.bernoulli(DTensor.from_local(torch.ones(2), mesh, [Shard(0)])).to_local().tolist(), [1, 1])

    def test_weights_that_each_rank_has_are_checked_before_it_draws(self):
        """So the generators of all ranks stay as they were. Of probabilities, torch's op itself raises on each rank."""
        enter_fake_group(self, 2)
        x = DTensor.from_local(torch.tensor([[0.5, -1.0, 2.0]]), init_device_mesh("cpu", (2,)), [Replicate()])
        with single_device():
            before = torch.get_rng_state()
            self.assertIn("multinomial.default on a DTensor: probability tensor contains", error_of(torch.multinomial, x, 2))
            self.assertTrue(torch.equal(torch.get_rng_state(), before))
            self.assertNotIn("on a DTensor", error_of(torch.bernoulli, x))

    def test_in_a_call_of_a_plan_the_first_draw_alone_compares_states(self):
        """Of a default generator: the calls compare it. A generator of the user is compared as ever."""
        enter_fake_group(self, 2)
        x = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (2,)), [Shard(0)])
        generator = torch.Generator()
        with single_device(), unittest.mock.patch.object(scope, "is_compared", True):
            for expected, kwargs in ((1, {}), (0, {}), (0, {}), (1, {"generator": generator}), (1, {"generator": generator})):
                with CommDebugMode() as mode:
                    x.normal_(**kwargs)
                self.assertEqual(mode.get_total_counts(), expected, kwargs)

    def test_a_new_scope_is_off_and_knows_the_meshes_that_have_drawn(self):
        enter_fake_group(self, 4)
        meshes = [init_device_mesh("cpu", shape) for shape in ((4,), (2, 2), (1, 4))]
        new = Scope()
        self.assertFalse(new.is_on or new.is_compared)
        for mesh in meshes[:2]:
            new.default[mesh, "cpu"] = 1
        self.assertEqual([new.has_drawn(mesh) for mesh in meshes], [True, True, False])

    def test_generators_are_kept_weakly_where_torch_can(self):
        """From torch 2.12 on."""

        class Without:
            __slots__ = ()

        for kind, expected in ((type("With", (), {}), True), (Without, False)):
            with unittest.mock.patch.object(torch, "Generator", kind):
                self.assertEqual(_random._has_weak_generators(), expected)

    def test_an_object_may_be_entered_again(self):
        switch = single_device()
        for _ in range(2):
            with switch:
                self.assertTrue(scope.is_on)
            self.assertFalse(scope.is_on)

    def test_the_switch_takes_a_bool(self):
        for wrong in ("off", "on", 0, None):
            self.assertIn("takes True (on) or False (off)", error_of(single_device, wrong))
        self.assertFalse(scope.is_on)


class LocalTensorTest(unittest.TestCase):
    def test_all_ranks_in_one_process_draw_the_numbers_of_one_device(self):
        def draw(tensor):
            dropped = F.dropout(tensor, 0.5)
            return [tensor.clone().normal_(), dropped, torch.rand_like(tensor), torch.bernoulli(tensor)]

        enter_fake_group(self, 4)
        mesh, whole = init_device_mesh("cpu", (4,)), torch.arange(24.0).view(6, 4) / 24
        transposed = whole.view(4, 6).t()
        cases = [(whole, placement) for placement in (Shard(0), Shard(1), Replicate(), RaggedShard((0,), (1, 2, 0, 3)))]
        for whole, placement in (*cases, (transposed, Shard(0))):
            torch.manual_seed(3)
            expected = draw(whole)
            with single_device(), LocalTensorMode(4):
                tensor = distribute_tensor(whole, mesh, [placement])
                torch.manual_seed(3)
                found = [drawn.full_tensor() for drawn in draw(tensor)]
            found = [each.reconcile() if isinstance(each, LocalTensor) else each for each in found]
            self.assertTrue(all(map(torch.equal, found, expected)), placement)
