"""Random ops on ragged DTensors: the values, and the random state afterwards, of a single device."""

import math
import random
import types
import unittest
import unittest.mock

import pytest
import torch
import torch.nn.functional as F
from common import enter_fake_group, error_of, ranks, run_ranks
from oracle import local_of, random_placement
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import _random as dtensor_random
from torch.distributed.tensor.debug import CommDebugMode
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.common_utils import TestCase as ExpectTestCase

from torch_ragged import RaggedShard, StridedRaggedShard
from torch_ragged.tensor import _random
from torch_ragged.tensor._cut_placement import has_flat
from torch_ragged.tensor._ops import _rules
from torch_ragged.tensor._random import Holding, before_draw
from torch_ragged.tensor.placement_types import normalize_placements

FLOATS, INTS = (torch.float32, torch.bfloat16, torch.float64), (torch.int64, torch.int32, torch.uint8)

# Of a tensor x, another of its placements with probabilities in it, and a generator or None. Results are compared, and x.
OPS = {
    "normal_": (FLOATS, lambda x, p, g: x.normal_(0.5, 2, generator=g)),
    "uniform_": (FLOATS, lambda x, p, g: x.uniform_(-1, 3, generator=g)),
    "exponential_": (FLOATS, lambda x, p, g: x.exponential_(2.0, generator=g)),
    "log_normal_": (FLOATS, lambda x, p, g: x.log_normal_(0.1, 0.5, generator=g)),
    "cauchy_": (FLOATS, lambda x, p, g: x.cauchy_(generator=g)),
    "geometric_": (FLOATS + INTS, lambda x, p, g: x.geometric_(0.3, generator=g)),
    "random_": (FLOATS + INTS, lambda x, p, g: x.random_(generator=g)),
    "random_ to": (FLOATS + INTS, lambda x, p, g: x.random_(100, generator=g)),
    "random_ from": (FLOATS + INTS, lambda x, p, g: x.random_(3, 100, generator=g)),
    "bernoulli_": (FLOATS + INTS, lambda x, p, g: x.bernoulli_(0.3, generator=g)),
    "bernoulli_ of a tensor": (FLOATS + INTS, lambda x, p, g: x.bernoulli_(p, generator=g)),
    "bernoulli_ of a 0-D tensor": (FLOATS + INTS, lambda x, p, g: x.bernoulli_(torch.tensor(0.3), generator=g)),
    "bernoulli": (FLOATS, lambda x, p, g: torch.bernoulli(p.to(x.dtype), generator=g)),
    "bernoulli of a number": (FLOATS, lambda x, p, g: torch.bernoulli(x, 0.2, generator=g)),
    "bernoulli of a tensor": (FLOATS, lambda x, p, g: torch.ops.aten.bernoulli.Tensor(x, p, generator=g)),
    "rand_like": (FLOATS, lambda x, p, g: torch.rand_like(x)),
    "rand_like of a dtype": (FLOATS + INTS, lambda x, p, g: torch.rand_like(x, dtype=torch.float64)),
    "rand_like of a generator": (FLOATS, lambda x, p, g: torch.rand_like(x, generator=g)),
    "randn_like": (FLOATS, lambda x, p, g: torch.randn_like(x)),
    "randn_like of a generator": (INTS, lambda x, p, g: torch.randn_like(x, dtype=torch.float16, generator=g)),
    "randint_like": (FLOATS + INTS, lambda x, p, g: torch.randint_like(x, 10)),
    "randint_like from": (FLOATS + INTS, lambda x, p, g: torch.randint_like(x, 3, 10, dtype=torch.int16)),
    "randint_like of a generator": (INTS, lambda x, p, g: torch.randint_like(x, 3, 10, generator=g)),
    "randint_like below, of a generator": (INTS, lambda x, p, g: torch.randint_like(x, 10, generator=g)),
    "native_dropout": (FLOATS, lambda x, p, g: torch.native_dropout(x, 0.3, True)[0]),
    "mask of native_dropout": (FLOATS, lambda x, p, g: torch.native_dropout(x, 0.3, True)[1]),
    "native_dropout of all": (FLOATS, lambda x, p, g: torch.native_dropout(x, 1.0, True)[0]),
    "native_dropout in evaluation": (FLOATS, lambda x, p, g: torch.native_dropout(x, 0.3, False)[0]),
    "dropout": (FLOATS, lambda x, p, g: F.dropout(x, 0.3)),
    "dropout in place": (FLOATS, lambda x, p, g: F.dropout(x, 0.3, inplace=True)),
    "alpha_dropout": (FLOATS, lambda x, p, g: F.alpha_dropout(x, 0.3, training=True)),
    "again": (FLOATS, lambda x, p, g: torch.rand_like(x) + torch.rand_like(x)),
}
GATHERS = {"rrelu": (FLOATS[:1], lambda x, p, g: F.rrelu(x, training=True))}


def state_after(function, x, p, seed, with_generator):
    """A result, and the states of the default generator and of the one given, or none."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed + 1) if with_generator else None
    result = function(x, p, generator)
    return result, torch.get_rng_state(), generator.get_state() if generator else torch.empty(0)


def random_case(rng, mesh_shape):
    """A shape, possibly without dimensions or elements, and legal placements of which one is ragged and none Partial."""
    while True:
        shape = tuple(
            rng.choice((0, 1, 2, 3, 4, 6, 8) if rng.random() < 0.2 else (2, 4, 6, 8)) for _ in range(rng.randint(0, 3))
        )
        placements = tuple(random_placement(rng, shape, mesh_shape, dim, StridedRaggedShard) for dim in range(len(mesh_shape)))
        if not has_flat(placements) or any(isinstance(p, Partial) for p in placements):
            continue
        try:
            return shape, normalize_placements(placements, shape, mesh_shape)
        except ValueError:  # They have no meaning together.
            continue


def check_random_cases(mesh_shape, rounds, seed):
    """Every op under random placements. Returns what was seen of these, so that the test cannot pass on easy ones alone."""
    rng, mesh = random.Random(seed), init_device_mesh("cpu", mesh_shape)
    seen = {"empty local": 0, "units that cut rows": 0, "two cuts": 0, "strided": 0}
    coordinate = tuple(mesh.get_coordinate())
    for number in range(rounds):
        for name, (dtypes, function) in (OPS | GATHERS).items():
            shape, placements = random_case(rng, mesh_shape)
            dtype, with_generator = rng.choice(dtypes), rng.random() < 0.5
            full = torch.randn(shape).to(dtype) if dtype in FLOATS else torch.ones(shape, dtype=dtype)
            probabilities = torch.rand(shape, dtype=rng.choice((torch.float32, torch.float64)))
            x, p = (distribute_tensor(t.clone(), mesh, placements) for t in (full, probabilities))
            with CommDebugMode() as mode:
                got, *states = state_after(function, x, p, number, with_generator)
            want, *wanted_states = state_after(function, full, probabilities, number, with_generator)
            case = f"{name} of {dtype} {shape} {placements} {with_generator}"
            assert mode.get_total_counts() == 0 or name in GATHERS, case
            assert got.placements == placements and got.shape == want.shape and got.stride() == want.stride(), case
            for mine, whole in ((got, want), (x, full)):
                expected = local_of(whole, mesh_shape, placements, coordinate)
                assert mine.dtype == mine.to_local().dtype == whole.dtype and torch.equal(mine.to_local(), expected), case
            assert all(map(torch.equal, states, wanted_states)), f"states after {case}"
            seen["empty local"] += not got.to_local().numel() and bool(got.numel())
            seen["units that cut rows"] += any(len(p.dims) > 1 for p in placements if isinstance(p, RaggedShard))
            seen["two cuts"] += sum(not p.is_replicate() for p in placements) > 1
            seen["strided"] += any(isinstance(p, StridedRaggedShard) and p.split_factor > 1 for p in placements)
    return seen


INITS = {
    "uniform_": nn.init.uniform_,
    "normal_": lambda t: nn.init.normal_(t, generator=torch.Generator().manual_seed(1)),
    "trunc_normal_": lambda t: nn.init.trunc_normal_(t, std=0.5, a=-1, b=1),
    "constant_": lambda t: nn.init.constant_(t, 3.0),
    "ones_": nn.init.ones_,
    "zeros_": nn.init.zeros_,
    "eye_": nn.init.eye_,
    "xavier_uniform_": nn.init.xavier_uniform_,
    "xavier_normal_": nn.init.xavier_normal_,
    "kaiming_uniform_": lambda t: nn.init.kaiming_uniform_(t, a=math.sqrt(5)),
    "kaiming_normal_": lambda t: nn.init.kaiming_normal_(t, mode="fan_out"),
    "orthogonal_": nn.init.orthogonal_,
    "dirac_": nn.init.dirac_,
}


def elements(shape, ranks, pieces=1):
    """Units of single elements for a cut of ``pieces``: uneven, and the last rank but one has none if there are three."""
    numel = math.prod(shape) // pieces
    return (numel,) if ranks == 1 else (1, *[0] * (ranks - 2), numel - 1)


def layouts(shape, mesh_shape):
    """Name -> placements of a tensor of this shape, of the granularities that FSDP offers."""
    dims, rows = tuple(range(len(shape))), (shape[0] - 1, *[0] * (mesh_shape[0] - 2), 1)
    if len(mesh_shape) == 1:
        return {
            "rows": [RaggedShard((0,), rows)],
            "elements": [RaggedShard(dims, elements(shape, *mesh_shape))],
            "tensor": [RaggedShard((), (0, 1, *[0] * (mesh_shape[0] - 2)))],
        }
    found = {
        "replicas": [Replicate(), RaggedShard(dims, elements(shape, 2))],
        "replicas on the right": [RaggedShard((0,), rows), Replicate()],
    }
    if shape[0] % 2 == 0:
        found["strided"] = [StridedRaggedShard(dims, elements(shape, 2, 2), 2), Shard(0)]
        found["Shard(0) first"] = [Shard(0), RaggedShard(dims, elements(shape, 2, 2))]
    if len(shape) > 1:
        found["beside Shard(1)"] = [RaggedShard((0,), rows), Shard(1)]
    return found


def check_init(mesh_shape):
    mesh = init_device_mesh("cpu", mesh_shape)
    for name, init in INITS.items():
        shape = (6, 4, 3) if name == "dirac_" else (12, 10)
        for layout, placements in layouts(shape, mesh_shape).items():
            if name == "dirac_" and len(mesh_shape) > 1 and "replicas" not in layout:
                continue  # It writes to views of parts of the tensor.
            full = torch.full(shape, 7.0)
            x = nn.Parameter(distribute_tensor(full, mesh, placements))
            states = []
            for tensor in (x, full):
                torch.manual_seed(8)
                with torch.no_grad():
                    init(tensor)
                states.append(torch.get_rng_state())
            assert torch.equal(*states), f"state after {name} of {layout}"
            assert torch.equal(x.detach().full_tensor(), full), f"{name} of {layout}"


MODULES = {
    "Linear": lambda **device: nn.Linear(6, 10, **device),
    "Embedding": lambda **device: nn.Embedding(10, 6, padding_idx=3, **device),
    "EmbeddingBag": lambda **device: nn.EmbeddingBag(10, 6, padding_idx=9, **device),
    "LayerNorm": lambda **device: nn.LayerNorm(6, **device),
    "RMSNorm": lambda **device: nn.RMSNorm(6, **device),
    "MultiheadAttention": lambda **device: nn.MultiheadAttention(8, 2, **device),
    "attention with biases": lambda **device: nn.MultiheadAttention(8, 2, kdim=4, vdim=6, add_bias_kv=True, **device),
    "Conv2d": lambda **device: nn.Conv2d(4, 6, 3, **device),
    "ConvTranspose1d": lambda **device: nn.ConvTranspose1d(4, 6, 3, **device),
    "Bilinear": lambda **device: nn.Bilinear(4, 6, 8, **device),
    "GRU": lambda **device: nn.GRU(4, 6, **device),
    "TransformerEncoderLayer": lambda **device: nn.TransformerEncoderLayer(8, 2, 16, **device),
}


def reset(module):
    """Every module's own reset, in the order in which a meta-device construction does it."""
    for child in module.modules():
        for name in ("reset_parameters", "_reset_parameters"):
            getattr(child, name, lambda: None)()


def ragged_on_meta(make, mesh, number):
    """A module on the meta device with ragged parameters; ``number`` chooses the layout of each."""
    module = make(device="meta")
    for child in module.modules():
        for name, parameter in list(child.named_parameters(recurse=False)):
            choices = list(layouts(tuple(parameter.shape), tuple(mesh.shape)).values())
            placements = choices[number % len(choices)]
            if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and mesh.ndim > 1:
                placements = choices[number % 2]  # Replicas: the padding row is a view.
            full = parameter.detach()
            local = torch.empty(local_of(full, tuple(mesh.shape), placements, mesh.get_coordinate()).shape, device="meta")
            tensor = DTensor.from_local(local, mesh, placements, shape=full.shape, stride=full.stride(), run_check=False)
            setattr(child, name, nn.Parameter(tensor))
    return module


def check_modules(mesh_shape):
    mesh = init_device_mesh("cpu", mesh_shape)
    for index, (name, make) in enumerate(MODULES.items()):
        for number in range(3) if len(mesh_shape) == 1 else (index, index + 2):
            torch.manual_seed(0)
            module, reference = ragged_on_meta(make, mesh, number), make()
            before = torch.get_rng_state()
            reset(module)
            assert torch.equal(before, torch.get_rng_state()), f"{name} on the meta device drew numbers"
            module.to_empty(device="cpu")
            states = []
            for either in (module, reference):
                torch.manual_seed(9)
                reset(either)
                states.append(torch.get_rng_state())
            assert torch.equal(*states), f"state after {name}, layout {number}"
            for (path, mine), theirs in zip(module.named_parameters(), reference.parameters(), strict=True):
                assert isinstance(mine, nn.Parameter) and has_flat(mine.placements), path
                assert torch.equal(mine.detach().full_tensor(), theirs), f"{name}.{path} {mine.placements}"


ERRORS = {
    "no rule": lambda x, p: torch.poisson(x.abs()),
    "normal of a tensor": lambda x, p: torch.normal(x),
    "rrelu in place": lambda x, p: F.rrelu_(x, training=True),
    "strided view": lambda x, p: x.t().normal_(),
    "like a strided view": lambda x, p: torch.rand_like(x.t(), generator=torch.Generator()),
    "other strides, of a generator": lambda x, p: torch.rand_like(
        x.view(8, 2, 3, 1), generator=torch.Generator(), memory_format=torch.channels_last
    ),
    "orthogonal_ of a wide tensor": lambda x, p: nn.init.orthogonal_(torch.zeros_like(x)[:3]),
    "eye of another shape": lambda x, p: torch.eye(3, out=x),
    "Partial": lambda x, p: p.normal_(),
    "like a Partial": lambda x, p: torch.rand_like(p),
    "like a Partial, of a generator": lambda x, p: torch.rand_like(p, generator=torch.Generator()),
    "dropout of a Partial": lambda x, p: F.dropout(p),
    "not ragged": lambda x, p: distribute_tensor(torch.ones(8, 6), x.device_mesh, [Replicate(), Shard(0)]).bernoulli_(x),
    "bad argument": lambda x, p: x.normal_(std=-1),
    "part of a tensor with two cuts": lambda x, p: x.redistribute(placements=[RaggedShard((0,), (3, 5)), Shard(1)])[3].zero_(),
}


def check_errors():
    """The errors, and whether all of them came before a number was drawn."""
    mesh = init_device_mesh("cpu", (2, 2))
    x = distribute_tensor(torch.ones(8, 6), mesh, [Replicate(), RaggedShard((0,), (3, 5))])
    pending = DTensor.from_local(x.to_local(), mesh, [Partial(), x.placements[1]], shape=(8, 6), stride=(6, 1))
    texts = []
    for name, function in ERRORS.items():
        before = torch.get_rng_state()
        texts.append(f"{name}\n    {error_of(function, x, pending)}")
        assert "Error: " in texts[-1] and (torch.equal(before, torch.get_rng_state()) or "orthogonal_" in name), texts[-1]
    return "\n".join(text.split(". Redistribute first")[0].split("\n\nSharding")[0] for text in texts)


COMPILED = {
    "in place": lambda x: (x * 2).normal_() + 1,
    "factories": lambda x: torch.rand_like(x) + torch.randn_like(x),
    "dropout": lambda x: F.dropout(x * 2, 0.3) + 1,
    "native_dropout": lambda x: torch.native_dropout(x * 2, 0.3, True)[0] + 1,
    "init": lambda x: nn.init.kaiming_uniform_(x.clone(), a=1.0) * 2,
}


def without_draws(graph, inputs):
    """A backend that runs graphs as they are, but refuses draws: the user's, and those of what runs between two graphs."""
    for node in graph.graph.nodes:
        if any(name in str(node.target) for name in ("normal", "uniform", "rand", "bernoulli", "dropout")):
            raise AssertionError(f"{node.target} in a graph")
    return graph


def check_compiled(backend, all_units):
    """Graphs break at random ops: eager's numbers, though a rank that owns nothing needs none, though inductor has its own.

    Local tensors are compared: a rank must not wait in a collective for another one's compiler.
    """
    mesh, full = init_device_mesh("cpu", (2,)), torch.randn(8, 4)
    for units in all_units:
        placements = [RaggedShard((0,), units)]
        x = distribute_tensor(full, mesh, placements)
        for name, function in COMPILED.items():
            torch._dynamo.reset()
            fast = torch.compile(function, backend=backend)
            for step in range(2):
                results = []
                for run, tensor in ((fast, x.clone()), (function, full.clone())):
                    torch.manual_seed(step)
                    y = run(tensor.requires_grad_(name != "init"))
                    if "dropout" in name:
                        y.sum().backward()
                    results.append((y.detach(), tensor.grad, torch.get_rng_state()))
                (got, gradient, state), (want, wanted, wanted_state) = results
                case = f"{backend}: {name} {units}"
                assert torch.equal(got.to_local(), local_of(want, (2,), placements, mesh.get_coordinate())), case
                assert torch.equal(state, wanted_state), f"state after {case}"
                if wanted is not None:
                    assert torch.equal(gradient.to_local(), local_of(wanted, (2,), placements, mesh.get_coordinate())), case
    torch._dynamo.reset()
    whole = torch.compile(COMPILED["in place"], backend=backend, fullgraph=True)
    assert "aten.normal_.default" in error_of(whole, x), "fullgraph=True must not leave the op out of sight"


def check_memory():
    """The most bytes held above those held before."""
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.full((512, 512), 0.5), mesh, [RaggedShard((0,), (1, 3))])
    peaks = []
    for function in (x.uniform_, lambda: torch.randn_like(x), lambda: torch.bernoulli(x.fill_(0.5))):
        function()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watch:
            function()
        held = allocated_by(watch.profiler.kineto_results.experimental_event_tree())
        peaks.append(max(held) - held[0])
    return peaks


def allocated_by(events):
    """The bytes held before the first allocation of a profile, and after each one."""
    found = []
    for event in events:
        if event.tag == torch._C._profiler._EventType.Allocation:
            if not found:
                found.append(event.extra_fields.total_allocated - event.extra_fields.alloc_size)
            found.append(event.extra_fields.total_allocated)
        found += allocated_by(event.children)
    return found


def check_tracker():
    """On an accelerator, torch's tracker is made once, before the first draw; on CPU and for meta tensors it is not."""
    op, made = torch.ops.aten.normal_.default, []

    def tracker(mesh):
        made.append(mesh)
        return tracker

    def draw(device):
        local = types.SimpleNamespace(device=torch.device(device))
        before_draw(op, types.SimpleNamespace(compute_mesh="mesh", local_args=(local,), local_kwargs={}))

    with (
        unittest.mock.patch.object(dtensor_random, "_rng_tracker", None),
        unittest.mock.patch.object(dtensor_random, "is_rng_supported_mesh", lambda mesh: True),
        unittest.mock.patch.object(dtensor_random, "OffsetBasedRNGTracker", tracker),
    ):
        for device, expected in (("cpu", []), ("meta", []), ("cuda", ["mesh"]), ("cuda", ["mesh"])):
            draw(device)
            assert made == expected, (device, made)
        assert dtensor_random._rng_tracker is tracker
    assert dtensor_random._rng_tracker is None


class RandomTest(ExpectTestCase):
    def check_cases(self, mesh_shape, rounds, seed):
        answers = run_ranks(math.prod(mesh_shape), check_random_cases, mesh_shape, rounds, seed)
        return {kind: sum(answer[kind] for answer in answers) for kind in answers[0]}

    def test_random_cases_on_meshes_of_one_dimension(self):
        for mesh_shape in ((2,), (3,)):
            seen = self.check_cases(mesh_shape, 2, seed=math.prod(mesh_shape))
            self.assertTrue(seen["empty local"] and seen["units that cut rows"], seen)

    def test_random_cases_on_meshes_of_two_dimensions(self):
        seen = self.check_cases((2, 2), 4, seed=22)
        self.assertTrue(all(seen.values()), seen)

    @pytest.mark.slow
    def test_many_random_cases(self):
        for mesh_shape in ((2,), (3,), (4,), (2, 2), (1, 3), (4, 1), (2, 4), (2, 2, 2)):
            seen = self.check_cases(mesh_shape, 8, seed=math.prod(mesh_shape) + 1)
            self.assertTrue(seen["empty local"], seen)

    @ranks(3)
    def test_probabilities_follow_the_tensor_that_is_drawn():
        """Probabilities that are replicated, broadcast, or placed otherwise follow the tensor that is drawn."""
        mesh = init_device_mesh("cpu", (3,))
        x = distribute_tensor(torch.zeros(8, 6), mesh, [RaggedShard((0,), (3, 0, 5))])
        for shape, placement, comms in (
            ((6,), Replicate(), 0),
            ((8, 6), Shard(0), 1),
            ((8, 6), RaggedShard((0,), (0, 8, 0)), 1),
        ):
            torch.manual_seed(1)
            p = torch.rand(shape)
            placed = distribute_tensor(p, mesh, [placement])
            with CommDebugMode() as mode:
                got, *states = state_after(lambda x, p, g: x.bernoulli_(p, generator=g), x, placed, 2, True)
            assert mode.get_total_counts() == comms, (placement, mode.get_comm_counts())
            want, *wanted = state_after(lambda x, p, g: x.bernoulli_(p, generator=g), torch.zeros(8, 6), p, 2, True)
            assert torch.equal(got.full_tensor(), want) and all(map(torch.equal, states, wanted)), placement
        if torch.__version__ >= "2.12":  # Before, DTensor itself has no rule.
            got, *states = state_after(lambda x, p, g: torch.multinomial(p, 4, generator=g), x, x + 0.5, 3, True)
            want, *wanted = state_after(lambda x, p, g: torch.multinomial(p, 4, generator=g), want, want + 0.5, 3, True)
            assert torch.equal(got.full_tensor(), want) and all(map(torch.equal, states, wanted))
            two = init_device_mesh("cpu", (1, 3))
            pending = DTensor.from_local(x.to_local(), two, [Partial(), *x.placements], shape=(8, 6), stride=(6, 1))
            assert "its random numbers would depend on the placement" in error_of(torch.multinomial, pending, 2)

    @ranks(3)
    def test_views_draw_the_numbers_of_the_view():
        """Random ops on views of whole intervals draw the numbers of the view."""
        mesh = init_device_mesh("cpu", (3,))
        views = {
            "row": lambda t: t[3],
            "rows": lambda t: t[2:7],
            "reshaped": lambda t: t.view(8, 2, 3),
            "flat": lambda t: t.view(-1)[5:40],
            "detached": lambda t: t.detach(),
        }
        for units in ((1, 5, 2), (0, 8, 0), (3, 0, 5)):
            for name, view in views.items():
                full = torch.zeros(8, 6)
                x = distribute_tensor(full, mesh, [RaggedShard((0,), units)])
                for tensor in (x, full):
                    torch.manual_seed(5)
                    view(tensor).normal_()
                assert torch.equal(x.full_tensor(), full), (name, units)
            x, full = x.view(8, 2, 3, 1), full.view(8, 2, 3, 1)  # Strides that no flat local tensor has: gathered.
            results = [
                state_after(lambda t, p, g: torch.rand_like(t, memory_format=torch.channels_last), t, t, 5, False)
                for t in (x, full)
            ]
            assert torch.equal(results[0][0].full_tensor(), results[1][0]) and torch.equal(results[0][1], results[1][1])
            assert results[0][0].stride() == results[1][0].stride() != full.stride()

    @ranks(3)
    def test_a_tensor_in_flight_is_waited_for_and_a_rank_outside_draws_nothing():
        """A tensor in flight is waited for; a rank outside of the mesh holds nothing and draws nothing."""
        mesh, full = init_device_mesh("cpu", (3,)), torch.rand(8, 6)
        for function in (lambda t, p, g: t.normal_(), lambda t, p, g: torch.bernoulli(t), lambda t, p, g: F.dropout(t)):
            x = distribute_tensor(full, mesh, [Shard(1)])
            x = x.redistribute(placements=[RaggedShard((0,), (1, 5, 2))], async_op=True)
            assert torch.equal(
                function(x, x, torch.manual_seed(4)).full_tensor(), function(full.clone(), x, torch.manual_seed(4))
            )
        numel = (9, 0, 3)[mesh.get_local_rank()]
        two = DeviceMesh("cpu", [0, 2])
        x = DTensor.from_local(torch.empty(numel), two, [RaggedShard((0,), (3, 1))], shape=(4, 3), stride=(3, 1))
        before = torch.manual_seed(5).get_state()
        mask = torch.native_dropout(torch.rand_like(x.normal_()), 0.5, True)[1]
        assert mask.to_local().shape == (numel,) and torch.equal(before, torch.get_rng_state()) == (numel == 0)

    @ranks(3)
    def test_dropout_masks_backward_as_forward():
        """Forward and backward; what is dropped forward gets no gradient."""
        mesh = init_device_mesh("cpu", (3,))
        full = torch.randn(8, 6)
        functions = {
            "dropout": lambda x: F.dropout(x, 0.4),
            "native_dropout": lambda x: torch.native_dropout(x, 0.4, True)[0],
            "feature dropout": lambda x: F.dropout1d(x, 0.4),
            "rrelu": lambda x: F.rrelu(x, training=True),
            "module": nn.Dropout(0.4),
            "checkpointed": lambda x: torch.utils.checkpoint.checkpoint(nn.Dropout(0.4), x, use_reentrant=False),
        }
        for units in ((1, 5, 2), (0, 8, 0), (3, 0, 5)):
            for name, function in functions.items():
                results = []
                for x in (distribute_tensor(full, mesh, [RaggedShard((0,), units)]), full.clone()):
                    torch.manual_seed(6)
                    y = function(x.requires_grad_())
                    (y * y).sum().backward()
                    results += [y, x.grad, torch.get_rng_state()]
                (got, gradient, state), (want, wanted_gradient, wanted_state) = results[:3], results[3:]
                assert torch.equal(got.full_tensor(), want) and 0 < int((want == 0).sum()) + (name == "rrelu") < 48, name
                assert gradient.placements == got.placements and torch.equal(gradient.full_tensor(), wanted_gradient), name
                assert torch.equal(state, wanted_state), name

    def test_nn_init_draws_the_numbers_of_one_process(self):
        run_ranks(3, check_init, (3,))

    @pytest.mark.slow
    def test_nn_init_draws_the_numbers_of_one_process_on_two_mesh_dimensions(self):
        run_ranks(4, check_init, (2, 2))

    def test_modules_built_on_the_meta_device_have_the_same_numbers(self):
        run_ranks(2, check_modules, (2,))
        run_ranks(4, check_modules, (2, 2))

    @ranks(2)
    def test_meta_and_fake_tensors_draw_nothing():
        """On meta and on fake tensors only shapes are computed, and no random state moves."""
        mesh = init_device_mesh("cpu", (2,))
        numel = (9, 3)[mesh.get_local_rank()]

        def tensor(device):
            placements = [RaggedShard((0,), (3, 1))]
            return DTensor.from_local(torch.empty(numel, device=device), mesh, placements, shape=(4, 3), stride=(3, 1))

        def check(device):
            for name, (_, function) in (OPS | GATHERS).items():
                result, *states = state_after(function, tensor(device), tensor(device), 1, "generator" in name)
                assert result.shape == (4, 3) and result.to_local().shape == (numel,), (device, name)
                assert torch.equal(states[0], torch.manual_seed(1).get_state()), (device, name)

        check("meta")
        with FakeTensorMode():
            x = tensor("cpu")
            before = torch.random.default_generator.seed()
            y = torch.native_dropout(torch.rand_like(x.normal_()), 0.5, True)[1]
            assert y.to_local().shape == (numel,) and y.to_local().dtype == torch.bool
            assert torch.random.default_generator.initial_seed() == before
        x = tensor("cpu")
        with torch.inference_mode():
            torch.manual_seed(1)
            assert torch.equal(torch.rand_like(x).full_tensor(), torch.manual_seed(1) and torch.rand(4, 3))

    def test_what_a_rank_holds_is_spread_over_zeros_and_kept_again(self):
        enter_fake_group(self, 2, rank=1)
        local = torch.arange(1.0, 10)
        x = DTensor.from_local(local, init_device_mesh("cpu", (2,)), [RaggedShard((0,), (1, 3))], shape=(4, 3), stride=(3, 1))
        holding = Holding(x._spec)
        whole = holding.spread(local)
        self.assertEqual(whole.tolist(), [[0, 0, 0], [1, 2, 3], [4, 5, 6], [7, 8, 9]])
        self.assertTrue(torch.equal(holding.keep(whole), local))

    def test_all_forms_of_random_ops_have_rules_but_those_with_out(self):
        """Those of factories that take a generator are decomposed: torch 2.11 finds no dispatch key for them."""
        with unittest.mock.patch.dict(_rules._rules, clear=True), unittest.mock.patch.dict(_rules._decompositions, clear=True):
            _random._register_rules()
            ruled, decomposed = (sorted(map(str, ops)) for ops in (_rules._rules, _rules._decompositions))
        self.assertEqual([op for op in [*ruled, *decomposed] if "out" in op.split(".")[-1]], [])
        self.assertEqual([op for op in ruled if "like" in op and "generator" in op], [])
        self.assertLessEqual({f"aten.{name}.generator" for name in _random._FACTORIES}, set(decomposed))
        self.assertLessEqual({f"aten.{name}.default" for name in _random._FACTORIES}, set(ruled))
        self.assertLessEqual({"aten.bernoulli.p", "aten.random_.default", "aten.rrelu_with_noise.default"}, set(ruled))

    def test_compiled_code_draws_the_numbers_of_eager(self):
        run_ranks(2, check_compiled, without_draws, ((0, 1),))

    @pytest.mark.slow
    def test_code_compiled_by_inductor_draws_them_too(self):
        run_ranks(2, check_compiled, "inductor", ((1, 3), (0, 1)))

    def test_drawing_holds_a_chunk_beside_the_local_tensors(self):
        """The chunk has 256 KiB and 16 elements more; the whole tensor has 1 MiB."""
        whole = 4 * 512 * 512
        for rank, peaks in enumerate(run_ranks(2, check_memory)):
            local, chunk = whole * (1 + 2 * rank) // 4, 2**18
            for peak, result in zip(peaks, (0, local, local), strict=True):
                self.assertTrue(result + chunk // 2 <= peak <= result + chunk + 512, (peak, result))

    def test_accelerators_have_the_tracker_of_torch(self):
        check_tracker()

    def test_errors_are_the_same_on_all_ranks(self):
        answers = run_ranks(4, check_errors)
        self.assertEqual(answers, [answers[0]] * 4)
        self.assertExpectedInline(
            answers[0],
            """\
no rule
    NotImplementedError: aten.poisson.default is not supported on a DTensor with RaggedShard placements: DTensor itself has no sharding rule for it (got (8, 6) RRS(0)[3,5])
normal of a tensor
    NotImplementedError: aten.normal.Tensor_float is not supported on a DTensor with RaggedShard placements: DTensor itself has no sharding rule for it (got (8, 6) RRS(0)[3,5])
rrelu in place
    NotImplementedError: aten.rrelu_with_noise_.default is not supported on a DTensor with RaggedShard placements: its random numbers would depend on the placement (got (8, 6) RRS(0)[3,5], (8, 6) RRS(0)[3,5])
strided view
    NotImplementedError: aten.normal_.default is not supported on a DTensor with RaggedShard placements: it would number the elements of a strided view in another order: use the tensor that is viewed (got (6, 8) RRR(1)[3,5])
like a strided view
    NotImplementedError: aten.uniform_.default is not supported on a DTensor with RaggedShard placements: it would number the elements of a strided view in another order: use the tensor that is viewed (got (6, 8) RRR(1)[3,5])
other strides, of a generator
    NotImplementedError: aten.uniform_.default is not supported on a DTensor with RaggedShard placements: it would number the elements of a strided view in another order: use the tensor that is viewed (got (8, 2, 3, 1) RRR(0)[3,5])
orthogonal_ of a wide tensor
    NotImplementedError: aten.t_.default is not supported on a DTensor with RaggedShard placements: it does not take rows one by one (dimensions (0,) are cut) (got (3, 6) RRS(0)[3,0])
eye of another shape
    NotImplementedError: aten.eye.out is not supported on a DTensor with RaggedShard placements: out= must have the shape of the result, (3, 3) (got (8, 6) RRS(0)[3,5])
Partial
    NotImplementedError: aten.normal_.default is not supported on a DTensor with RaggedShard placements: a Partial tensor must be reduced first (got (8, 6) P(sum)RS(0)[3,5])
like a Partial
    NotImplementedError: aten.rand_like.default is not supported on a DTensor with RaggedShard placements: a Partial tensor must be reduced first (got (8, 6) P(sum)RS(0)[3,5])
like a Partial, of a generator
    NotImplementedError: aten.uniform_.default is not supported on a DTensor with RaggedShard placements: a Partial tensor must be reduced first (got (8, 6) P(sum)RS(0)[3,5])
dropout of a Partial
    NotImplementedError: aten.bernoulli_.float is not supported on a DTensor with RaggedShard placements: a Partial tensor must be reduced first (got (8, 6) P(sum)RS(0)[3,5])
not ragged
    NotImplementedError: aten.bernoulli_.Tensor is not supported on a DTensor with RaggedShard placements: DTensor itself has no sharding rule for it (got (8, 6) RS(0), (8, 6) RRS(0)[3,5])
bad argument
    RuntimeError: normal expects std >= 0.0, but found std -1.0
part of a tensor with two cuts
    NotImplementedError: aten.select.int is not supported on a DTensor with RaggedShard placements: ranks hold more than one run of rows of its argument: no placement describes a part that only some ranks hold (got (8, 6) RS(0)[3,5]S(1))""",  # noqa: E501
        )
