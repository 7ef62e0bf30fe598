"""Row-wise ops and views of ragged DTensors: on whole rows with no communication, or an error that names the way out."""

import unittest

import torch
import torch.nn.functional as F
from common import error_of, run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.common_utils import TestCase as ExpectTestCase

from torch_ragged import RaggedShard

TOKENS = ((3, 1, 0, 4), (2, 2, 2, 2), (0, 0, 8, 0))

# Of tokens x (8, 6), with replicated weight w (5, 6), bias b (5,), row vector v (6,) and square matrix m (6, 6).
FORWARD = {
    "linear": lambda x, w, b, v, m: F.linear(x, w, b),
    "linear without bias": lambda x, w, b, v, m: F.linear(x, w),
    "mm": lambda x, w, b, v, m: x @ m,
    "addmm": lambda x, w, b, v, m: torch.addmm(v, x, m),
    "matmul of 3-D": lambda x, w, b, v, m: x.view(8, 2, 3) @ m[:3, :3].contiguous(),
    "softmax": lambda x, w, b, v, m: x.softmax(-1),
    "log_softmax": lambda x, w, b, v, m: x.log_softmax(1),
    "layer_norm": lambda x, w, b, v, m: F.layer_norm(x, (6,), v, v),
    "rms_norm": lambda x, w, b, v, m: F.rms_norm(x, (6,), v),
    "add row vector": lambda x, w, b, v, m: x + v,
    "mul row vector": lambda x, w, b, v, m: v * x,
    "gelu and gate": lambda x, w, b, v, m: F.gelu(x) * x.sigmoid(),
    "swiglu": lambda x, w, b, v, m: F.silu(x[:, :3]) * x[:, 3:],
    "sum of inner": lambda x, w, b, v, m: x.sum(-1),
    "mean of inner": lambda x, w, b, v, m: x.mean(dim=1, keepdim=True),
    "norm of inner": lambda x, w, b, v, m: torch.linalg.vector_norm(x, dim=-1),
    "amax of inner": lambda x, w, b, v, m: x.amax(1),
    "max of inner": lambda x, w, b, v, m: x.max(dim=1).values,
    "cumsum of inner": lambda x, w, b, v, m: x.cumsum(1),
    "sort of inner": lambda x, w, b, v, m: x.sort(dim=1).values,
    "topk": lambda x, w, b, v, m: x.topk(2, dim=-1).values,
    "more of topk": lambda x, w, b, v, m: x.topk(3, dim=-1).values,
    "view": lambda x, w, b, v, m: x.view(8, 2, 3),
    "flatten": lambda x, w, b, v, m: x.view(-1),
    "unsqueeze": lambda x, w, b, v, m: x.unsqueeze(1),
    "split": lambda x, w, b, v, m: sum(x.split(2, dim=1)),
    "chunk": lambda x, w, b, v, m: torch.cat(x.chunk(3, dim=1)[::-1], dim=1),
    "narrow": lambda x, w, b, v, m: x[:, 1:4],
    "transpose": lambda x, w, b, v, m: x.t(),
    "transpose of inner": lambda x, w, b, v, m: x.view(8, 2, 3).transpose(1, 2),
    "rows of all": lambda x, w, b, v, m: x[2:7],
    "one row": lambda x, w, b, v, m: x[3],
    "cat of inner": lambda x, w, b, v, m: torch.cat([x, x * 2], dim=1),
    "stack": lambda x, w, b, v, m: torch.stack([x, x * 2], dim=1),
    "masked_fill": lambda x, w, b, v, m: x.masked_fill(x > 0, 0.0),
    "attention scores": lambda x, w, b, v, m: torch.einsum("tij,tkj->tik", x.view(8, 2, 3), x.view(8, 2, 3)),
}


# Before 2.12 no DTensor takes what their backward does: a scatter into a plain tensor, a flip.
NO_BACKWARD = (
    {"cumsum of inner", "max of inner", "sort of inner", "topk", "more of topk"} if torch.__version__ < "2.12" else set()
)


def tensors():
    torch.manual_seed(5)
    return [torch.randn(s) for s in ((8, 6), (5, 6), (5,), (6,), (6, 6))]


def check_rows():
    mesh = init_device_mesh("cpu", (4,))
    plain = tensors()
    for units in TOKENS:
        for name, function in FORWARD.items():
            want_in = [t.clone().requires_grad_() for t in plain]
            want = function(*want_in)
            x = distribute_tensor(plain[0], mesh, [RaggedShard((0,), units)]).requires_grad_()
            rest = [distribute_tensor(t, mesh, [Replicate()]).requires_grad_() for t in plain[1:]]
            seed = torch.randn(want.shape)
            with CommDebugMode() as mode:
                got = function(x, *rest)
                assert not got.placements[0].is_replicate() and not got.placements[0].is_shard(), (name, got.placements)
                gradient = DTensor.from_local(seed, mesh, [Replicate()], run_check=False)
                if name not in NO_BACKWARD:
                    (got * gradient).sum().backward()
            # One all-reduce for the gradient of the sum, which is pending: none for the op or its backward.
            assert mode.get_total_counts() == 0, (name, units, mode.get_comm_counts())
            assert got.shape == want.shape and got.stride() == want.stride(), (name, got.stride(), want.stride())
            torch.testing.assert_close(got.full_tensor(), want.detach(), rtol=1e-5, atol=1e-6, msg=f"{name} {units}")
            if name not in NO_BACKWARD:
                (want * seed).sum().backward()
            for mine, theirs in zip((x, *rest), want_in):
                assert (mine.grad is None) == (theirs.grad is None), name
                if mine.grad is not None:
                    torch.testing.assert_close(
                        mine.grad.full_tensor(), theirs.grad, rtol=1e-5, atol=1e-6, msg=f"{name} {units}"
                    )


def check_embedding():
    mesh = init_device_mesh("cpu", (4,))
    tokens, table = torch.randint(0, 10, (8, 2)), torch.randn(10, 3)
    for units in TOKENS:
        mine = distribute_tensor(table, mesh, [Replicate()]).requires_grad_()
        theirs = table.clone().requires_grad_()
        with CommDebugMode() as mode:
            got = F.embedding(distribute_tensor(tokens, mesh, [RaggedShard((0,), units)]), mine)
            counts = mode.get_total_counts()
            got.sum().backward()
        want = F.embedding(tokens, theirs)
        want.sum().backward()
        assert torch.equal(got.full_tensor(), want) and torch.equal(mine.grad.full_tensor(), theirs.grad), (units, counts)


def check_aliases():
    mesh = init_device_mesh("cpu", (4,))
    plain = tensors()[0]
    for units in TOKENS:
        for view in (
            lambda t: t.view(8, 2, 3),
            lambda t: t[2:7],
            lambda t: t.t(),
            lambda t: t[:, 1:4],
            lambda t: t.unbind(1)[3],
            lambda t: t.split(2, dim=1)[0],
            lambda t: t.view(-1)[5:31],
            lambda t: t.unsqueeze(0).expand(1, 8, 6),
        ):
            whole, mine = plain.clone(), distribute_tensor(plain, mesh, [RaggedShard((0,), units)])
            view(whole).mul_(2)
            with CommDebugMode() as mode:
                view(mine).mul_(2)
            assert mode.get_total_counts() == 0
            assert torch.equal(mine.full_tensor(), whole), units


def check_views_back():
    """Strided views lead back to Replicate and Shard, forward and backward."""
    mesh = init_device_mesh("cpu", (4,))
    plain, weight = tensors()[0], torch.randn(6, 8)
    for units in TOKENS:
        for target in (Replicate(), Shard(0), Shard(1)):
            mine = distribute_tensor(plain, mesh, [RaggedShard((0,), units)]).requires_grad_()
            moved = mine.t().redistribute(placements=[target])
            assert moved.placements == (target,) and torch.equal(moved.full_tensor(), plain.t())
            (moved * distribute_tensor(weight, mesh, [target])).sum().backward()
            assert mine.grad.placements == mine.placements and torch.equal(mine.grad.full_tensor(), weight.t()), target


ERRORS = {
    "a view that cuts rows": lambda x: x.view(6, 8),
    "a view in place": lambda x: x.t_(),
    "random numbers": lambda x: torch.poisson(x.abs()),
    "in place, across rows": lambda x: x.cumsum_(0),
    "to another ragged": lambda x: x.t().redistribute(placements=[RaggedShard((0,), (1, 1, 2, 2))]),
    "no rule in DTensor": lambda x: torch.searchsorted(x, x),
    "mixed with a plain tensor": lambda x: torch.mm(x, torch.ones(6, 2)),
}


def check_errors():
    mesh = init_device_mesh("cpu", (4,))
    x = distribute_tensor(tensors()[0], mesh, [RaggedShard((0,), (3, 1, 0, 4))])
    return "\n".join(f"{name}\n    {error_of(function, x)}" for name, function in ERRORS.items())


class RowOpsTest(ExpectTestCase):
    def test_rows_need_no_communication_forward_and_backward(self):
        run_ranks(4, check_rows)

    def test_embedding(self):
        run_ranks(4, check_embedding)

    def test_views_alias_the_tensor(self):
        run_ranks(4, check_aliases)

    def test_strided_views_lead_back(self):
        run_ranks(4, check_views_back)

    def test_errors(self):
        answers = run_ranks(4, check_errors)
        self.assertEqual(answers, [answers[0]] * 4)
        self.assertExpectedInline(
            answers[0],
            """\
a view that cuts rows
    NotImplementedError: aten.view.default is not supported on a DTensor with RaggedShard placements: a view as (6, 8) would mix owners: its dimensions would cut across slices of 6 elements that one rank holds as a whole (got (8, 6) RS(0)[3,1,0,4]). Redistribute first, as in t.redistribute(placements=[Replicate()]) or [Shard(0)], or work on t.to_local()
a view in place
    NotImplementedError: aten.t_.default is not supported on a DTensor with RaggedShard placements: it does not take rows one by one (dimensions (0,) are cut) (got (8, 6) RS(0)[3,1,0,4]). Redistribute first, as in t.redistribute(placements=[Replicate()]) or [Shard(0)], or work on t.to_local()
random numbers
    NotImplementedError: aten.poisson.default is not supported on a DTensor with RaggedShard placements: DTensor itself has no sharding rule for it (got (8, 6) RS(0)[3,1,0,4]). Redistribute first, as in t.redistribute(placements=[Replicate()]) or [Shard(0)], or work on t.to_local()
in place, across rows
    NotImplementedError: aten.cumsum_.default is not supported on a DTensor with RaggedShard placements: it does not take rows one by one (dimensions (0,) are cut) (got (8, 6) RS(0)[3,1,0,4]). Redistribute first, as in t.redistribute(placements=[Replicate()]) or [Shard(0)], or work on t.to_local()
to another ragged
    ValueError: redistribution from (RaggedRows(dims=(1,), local_units=(3, 1, 0, 4)),) to (RaggedShard(dims=(0,), local_units=(1, 1, 2, 2)),): redistribute the strided view to Replicate or Shard first
no rule in DTensor
    NotImplementedError: aten.searchsorted.Tensor is not supported on a DTensor with RaggedShard placements: DTensor itself has no sharding rule for it (got (8, 6) RS(0)[3,1,0,4], (8, 6) RS(0)[3,1,0,4]). Redistribute first, as in t.redistribute(placements=[Replicate()]) or [Shard(0)], or work on t.to_local()
mixed with a plain tensor
    RuntimeError: aten.mm.default got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to DTensor before calling distributed operators!""",  # noqa: E501
        )


if __name__ == "__main__":
    unittest.main()
