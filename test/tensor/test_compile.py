"""torch.compile: whole graphs, eager's numbers, no recompilation from step to step."""

import os
import tempfile
import unittest
import unittest.mock

import pytest
import torch
from common import fake_group, run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from torch_ragged import RaggedShard, StridedRaggedShard

SKEWED, ROOT, EVEN = RaggedShard((0,), (1, 3)), RaggedShard((), (0, 1)), RaggedShard((0,), (1, 1))


def move(*placements, **keywords):
    return lambda x: (x * 2).redistribute(placements=placements, **keywords) + 1


FUNCTIONS = {
    "element-wise": (SKEWED, lambda x: (x * x + 1).relu() - x.exp()),
    "in place": (SKEWED, lambda x: x.clone().add_(x).mul_(0.5)),
    "sum": (SKEWED, lambda x: x.sum()),
    "norm": (SKEWED, lambda x: torch.linalg.vector_norm(x).full_tensor()),
    "to Replicate": (SKEWED, move(Replicate())),
    "even to Replicate": (EVEN, move(Replicate())),
    "to Shard(1)": (SKEWED, move(Shard(1))),
    "to a root": (SKEWED, move(ROOT)),
    "from a root": (ROOT, move(SKEWED)),
    "root to Replicate": (ROOT, move(Replicate())),
    "asynchronous": (SKEWED, move(Shard(1), async_op=True)),
    "from Replicate": (Replicate(), move(SKEWED)),
    "Partial to uneven": (Partial(), lambda x: x.redistribute(placements=[SKEWED]) * 2),
    "Partial to even": (Partial(), lambda x: x.redistribute(placements=[EVEN]) * 2),
    "Partial to a root": (Partial(), lambda x: x.redistribute(placements=[ROOT]) * 2),
    "to Partial": (SKEWED, lambda x: (x * 2).redistribute(placements=[Partial()])),
}


def compiled(function, backend):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return torch.compile(function, backend=backend, fullgraph=True)


def graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def check_functions(backend, names):
    mesh = init_device_mesh("cpu", (2,))
    full = torch.randn(8, 4, dtype=torch.float64)
    for name in names:
        source, function = FUNCTIONS[name]
        if isinstance(source, Partial):
            tensor = DTensor.from_local(full, mesh, [source])
        else:
            tensor = distribute_tensor(full, mesh, [source])
        fast, expected = compiled(function, backend), function(tensor)
        for _ in range(3):
            result = fast(tensor)
            assert type(result) is type(expected), name
            if isinstance(result, DTensor):
                assert result.placements == expected.placements and result.stride() == expected.stride(), name
                result = result.to_local()
            local = expected.to_local() if isinstance(expected, DTensor) else expected
            torch.testing.assert_close(result, local, msg=f"{backend}: {name}")
        assert graphs() == 1, f"{backend}: {name}: {graphs()} graphs"


def check_backward(backend):
    mesh = init_device_mesh("cpu", (2,))
    full, other = torch.randn(8, 4, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)
    factor = distribute_tensor(other, mesh, [SKEWED])

    def loss(x):
        return ((x * factor).redistribute(placements=[Replicate()]) ** 2).sum()

    fast = compiled(loss, backend)
    for step in range(3):
        leaf = distribute_tensor(full + step, mesh, [SKEWED]).requires_grad_()
        fast(leaf).backward()
        assert leaf.grad.placements == (SKEWED,)
        torch.testing.assert_close(leaf.grad.full_tensor(), 2 * (full + step) * other**2)
    assert graphs() == 1, graphs()


def check_adamw(backend, foreach):
    """The whole step as one graph. torch's own ``step`` begins with a deliberate graph break: it is unwrapped.

    The reference is the compiled step of plain tensors: what AdamW traces corrects its bias in float32, eager in float64.
    """
    mesh = init_device_mesh("cpu", (2, 1))
    layouts = [(placement, Replicate()) for placement in (SKEWED, ROOT, RaggedShard((0, 1), (5, 27)))]
    layouts.append((StridedRaggedShard((0,), (1, 3), 1), Shard(0)))
    full = [torch.randn(8, 4, dtype=torch.float64) for _ in layouts]
    ragged = [torch.nn.Parameter(distribute_tensor(value, mesh, layout)) for value, layout in zip(full, layouts, strict=True)]
    plain = [torch.nn.Parameter(value.clone()) for value in full]
    torch._dynamo.eval_frame.TorchPatcher.patch()
    raw = torch.optim.AdamW.step
    while hasattr(raw, "__wrapped__"):
        raw = raw.__wrapped__
    for params in (plain, ragged):
        optimizer = torch.optim.AdamW(params, lr=0.1, foreach=foreach)

        def step(optimizer=optimizer):
            with torch.no_grad():
                raw(optimizer)

        fast, counts = compiled(step, backend), []
        for number in range(5):
            for param in params:
                param.grad = param.detach() * 0.3 + number
            fast()
            counts.append(graphs())
        assert counts[1:] == counts[1:2] * 4, f"graphs after each step: {counts}"  # The first step makes the states.
    for one, two in zip(ragged, plain, strict=True):
        torch.testing.assert_close(one.detach().full_tensor(), two.detach())


def with_shared_cache(folder, check, *arguments):
    """Ranks share one cache of compiled graphs, as on any machine: what one compiled must not serve another."""
    with unittest.mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder):
        check(*arguments)


def check_replicate_and_shard():
    """Each rank takes its rows of one of them: a graph is of one rank. The second time, graphs come from disk."""
    mesh, whole = init_device_mesh("cpu", (2,)), torch.arange(8.0)
    x = distribute_tensor(whole, mesh, [Replicate()]).requires_grad_()
    y = distribute_tensor(torch.ones(8), mesh, [Shard(0)]).requires_grad_()
    for _ in range(2):
        result = compiled(lambda x, y: (x + y) * 2, "inductor")(x, y)
        result.to_local().sum().backward()  # Only then, torch writes both graphs to disk.
        assert torch.equal(result.full_tensor(), (whole + 1) * 2), result


def assert_computes_each_shape(placement, shapes, dynamic):
    """One compiled function on tensors of several shapes, and then of the first one again."""
    mesh = init_device_mesh("cpu", (2,))
    torch._dynamo.reset()
    fast = torch.compile(lambda x: x * 2, backend="aot_eager", dynamic=dynamic)
    for shape in (*shapes, shapes[0]):
        tensor = distribute_tensor(torch.ones(shape), mesh, [placement]).requires_grad_()
        result, local = fast(tensor), tensor.to_local()
        assert result.shape == tensor.shape and result.to_local().shape == local.shape, (placement, shape, dynamic, result)
        assert result.placements == tensor.placements
        (gradient,) = torch.autograd.grad(result.to_local().sum(), tensor)
        assert gradient.shape == tensor.shape and torch.equal(gradient.to_local(), torch.full_like(local, 2))


class CompileTest(unittest.TestCase):
    def test_another_shape_of_which_a_rank_has_equally_much_is_not_taken_for_the_first_one(self):
        for rank, dynamic in ((0, False), (1, False), (1, None)):
            with self.subTest(rank=rank, dynamic=dynamic), fake_group(2, rank):
                nothing = RaggedShard((0,), (rank, 1 - rank))
                assert_computes_each_shape(nothing, ((6,), (8,)), dynamic)
                assert_computes_each_shape(EVEN, ((2, 6), (4, 3), (4, 6), (4, 8)), dynamic)
                assert_computes_each_shape(Shard(0), ((6, 5), (7, 5), (8, 4), (7, 4)), dynamic)
                assert_computes_each_shape(Shard(1), ((2, 8), (2, 7)), dynamic)

    def run_cached(self, *check):
        with tempfile.TemporaryDirectory() as folder:
            run_ranks(2, with_shared_cache, folder, *check)

    def test_functions_compile_to_one_graph(self):
        run_ranks(2, check_functions, "aot_eager", list(FUNCTIONS))

    @pytest.mark.slow
    def test_functions_under_inductor_equal_eager(self):
        self.run_cached(check_functions, "inductor", ["element-wise", "Partial to a root"])

    @pytest.mark.slow
    def test_ranks_take_no_graphs_of_other_ranks_from_disk(self):
        self.run_cached(check_replicate_and_shard)

    def test_backward_compiled_equals_eager(self):
        run_ranks(2, check_backward, "aot_eager")

    @pytest.mark.slow
    def test_backward_under_inductor_equals_eager(self):
        self.run_cached(check_backward, "inductor")

    def test_a_compiled_adamw_step_equals_that_of_plain_tensors(self):
        run_ranks(2, check_adamw, "aot_eager", False)

    @pytest.mark.slow
    def test_an_adamw_step_under_inductor_equals_that_of_plain_tensors(self):
        self.run_cached(check_adamw, "inductor", True)
