"""Ops on ragged DTensors: the single-device result with no gather, or an error that names the op and the way out."""

import copy
import math
import unittest

import torch
import torch.distributed as dist
from common import error_of, ranks, run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from torch_ragged import RaggedShard

UNITS = ((1, 1, 1, 1), (1, 2, 0, 5), (0, 0, 8, 0), (2, 2, 2, 2))

ELEMENTWISE = {
    "add scalar": lambda x, y: x + 2,
    "rsub": lambda x, y: 1 - x,
    "add": lambda x, y: torch.add(x, y, alpha=0.5),
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / (y.abs() + 1),
    "neg": lambda x, y: -x,
    "exp": lambda x, y: x.exp(),
    "rsqrt": lambda x, y: x.abs().rsqrt(),
    "pow": lambda x, y: x**2,
    "clamp": lambda x, y: x.clamp(-0.5, 0.5),
    "where": lambda x, y: torch.where(x > 0, x, y),
    "lerp": lambda x, y: torch.lerp(x, y, 0.25),
    "addcmul": lambda x, y: torch.addcmul(x, x, y, value=0.5),
    "addcdiv": lambda x, y: torch.addcdiv(x, x, y.abs() + 1),
    "compare": lambda x, y: x >= y,
    "isfinite": lambda x, y: torch.isfinite(x),
    "maximum": lambda x, y: torch.maximum(x, y),
    "sigmoid": lambda x, y: torch.sigmoid(x),
    "gelu": lambda x, y: torch.nn.functional.gelu(x),
    "bf16": lambda x, y: x.to(torch.bfloat16),
    "double": lambda x, y: x.double(),
    "clone": lambda x, y: x.clone(),
    "detach": lambda x, y: x.detach(),
    "zeros_like": lambda x, y: torch.zeros_like(x),
    "ones_like": lambda x, y: torch.ones_like(x, dtype=torch.int32),
    "full_like": lambda x, y: torch.full_like(x, 3.5),
    "add_": lambda x, y: x.clone().add_(y, alpha=2),
    "mul_": lambda x, y: x.clone().mul_(0.5),
    "copy_": lambda x, y: torch.empty_like(x).copy_(y),
    "zero_": lambda x, y: x.clone().zero_(),
    "fill_": lambda x, y: x.clone().fill_(2),
    "masked put": lambda x, y: x.index_put((y > 0,), torch.tensor(0.5)),
    "masked put_": lambda x, y: x.clone().index_put_((y > 0,), torch.tensor(0.5), accumulate=True),
    "lerp_": lambda x, y: x.clone().lerp_(y, 0.1),
    "out": lambda x, y: torch.add(x, y, out=torch.empty_like(x)),
    "foreach_add": lambda x, y: torch._foreach_add([x, y], [y, x], alpha=2)[0],
    "foreach_mul": lambda x, y: torch._foreach_mul([x, y], 3.0)[1],
    "foreach_sqrt": lambda x, y: torch._foreach_sqrt([x.abs()])[0],
    "foreach_addcdiv": lambda x, y: torch._foreach_addcdiv([x], [y], [y.abs() + 1], value=0.1)[0],
    "foreach_scalars": lambda x, y: torch._foreach_add([x, y], [1.0, 2.0])[1],
}

REDUCTIONS = {
    "sum": lambda x: x.sum(),
    "sum dims": lambda x: x.sum(dim=(0, 1), keepdim=True),
    "mean": lambda x: x.mean(),
    "norm": lambda x: x.norm(),
    "norm 1": lambda x: torch.linalg.vector_norm(x, 1),
    "norm 3": lambda x: torch.linalg.vector_norm(x, 3),
    "norm inf": lambda x: torch.linalg.vector_norm(x, math.inf),
    "norm keepdim": lambda x: torch.linalg.vector_norm(x, 2, dim=(0, 1), keepdim=True),
    "max": lambda x: x.max(),
    "amin": lambda x: x.amin(),
    "int max": lambda x: x.mul(100).int().max(),
    "nan max": lambda x: torch.where(x == x, x / 0 * 0, x).max(),
    "item": lambda x: torch.tensor(x.sum().item()) if not isinstance(x, DTensor) else x.sum().full_tensor(),
}

# No local way: gathered, as DTensor does. Of x (8, 6), its twin on the same placement as a DTensor or not.
GATHERED = {
    "matmul": lambda x, place: x @ x.mT,
    "cat of rows": lambda x, place: torch.cat([x, x]),
    "sort of rows": lambda x, place: x.sort(dim=0).values,
    "cumsum of rows": lambda x, place: x.cumsum(0),
    "softmax of rows": lambda x, place: x.softmax(0),
    "argmax": lambda x, place: x.argmax(),
    "norm of negative order": lambda x, place: torch.linalg.vector_norm(x, -1),
    "foreach on a Partial": lambda x, place: torch._foreach_add([x, x.sum()], 1.0)[1],
    "foreach max": lambda x, place: torch._foreach_max([x, -x])[1],
    "foreach 0-norm of a Partial": lambda x, place: torch._foreach_norm([x, x.sum()], 0)[0],
    "broadcast up": lambda x, place: x + place(torch.ones(2, 8, 6), Replicate()),
    "broadcast beside a Shard": lambda x, place: place(torch.zeros(8, 6), Shard(0)).addcmul_(
        x, place(torch.ones(6), Replicate())
    ),
}

UNSUPPORTED = {
    "reshape": lambda x: x.reshape(2, -1),
    "random numbers of values": lambda x: torch.poisson(x.abs()),
    "cumsum_": lambda x: x.cumsum_(0),
    "out of other placements": lambda x: torch.cumsum(x, 0, out=x.clone()),
    "view in place": lambda x: x.t_(),
}


def check_unsupported():
    mesh = init_device_mesh("cpu", (4,))
    a = distribute_tensor(torch.randn(8, 6), mesh, [RaggedShard((0,), (1, 2, 0, 5))])
    errors = {name: error_of(function, a) for name, function in UNSUPPORTED.items()}
    with torch.inference_mode():
        errors["inference"] = error_of(lambda: a.reshape(2, -1))
    return errors


def uneven(values):
    return distribute_tensor(values, init_device_mesh("cpu", (4,)), [RaggedShard((0,), (1, 2, 0, 5))])


class OpsTest(unittest.TestCase):
    @ranks(4)
    def test_elementwise_ops_need_no_communication():
        mesh = init_device_mesh("cpu", (4,))
        x, y = torch.randn(8, 6), torch.randn(8, 6)
        for units in UNITS:
            placements = [RaggedShard((0,), units)]
            a, b = (distribute_tensor(t, mesh, placements) for t in (x, y))
            for name, function in ELEMENTWISE.items():
                with CommDebugMode() as mode:
                    got = function(a, b)
                want = function(x, y)
                assert mode.get_total_counts() == 0, (name, mode.get_comm_counts())
                assert got.placements == a.placements and got.dtype == want.dtype and got.stride() == want.stride(), name
                assert got.to_local().dim() == 1, name
                full = got.full_tensor()
                assert torch.equal(full, want) or torch.allclose(full, want, rtol=1e-6), name
        # Other placements follow the ragged one, or the one written to; replicated ones broadcast.
        for other, comms in ((Replicate(), 0), (Shard(0), 1), (RaggedShard((0,), (3, 1, 2, 2)), 1)):
            c = distribute_tensor(y, mesh, [other])
            with CommDebugMode() as mode:
                got = a + c
            assert got.placements == a.placements and mode.get_total_counts() <= comms
            assert torch.equal(got.full_tensor(), x + y)
            assert torch.equal(c.clone().add_(a).full_tensor(), x + y)
            assert c.clone().copy_(a).placements == (other,)
        for shape in ((6,), (8, 1), (1, 6), (1, 1), (), (1,)):
            small = torch.randn(shape)
            for units in UNITS:
                a = distribute_tensor(x, mesh, [RaggedShard((0, 1), tuple(6 * u for u in units))])
                replicated = distribute_tensor(small, mesh, [Replicate()])
                with CommDebugMode() as mode:
                    got = a * replicated
                assert mode.get_total_counts() == 0 and torch.equal(got.full_tensor(), x * small), shape

    @ranks(4)
    def test_reductions_equal_plain_tensors():
        mesh = init_device_mesh("cpu", (4,))
        x = torch.randn(8, 6)
        for units in UNITS:
            a = distribute_tensor(x, mesh, [RaggedShard((0,), units)])
            for name, function in REDUCTIONS.items():
                got, want = function(a), function(x)
                full = got.full_tensor() if isinstance(got, DTensor) else got
                assert full.shape == want.shape and full.dtype == want.dtype, (name, full, want)
                assert torch.allclose(full, want, rtol=1e-5, equal_nan=True), (name, units, full, want)
            # A norm that is still pending takes part as its value.
            for got in (torch._foreach_mul([a], a.norm())[0], a * a.norm(), a.clone().mul_(a.norm())):
                assert torch.allclose(got.full_tensor(), x * x.norm()), units
            assert torch.equal(a, a.clone()) and not torch.equal(a, a + 1)
        one = distribute_tensor(torch.tensor([[7.0]]), mesh, [RaggedShard((0,), (0, 0, 1, 0))])
        assert one.item() == 7.0

    @ranks(4)
    def test_gradients_equal_plain_tensors():
        mesh = init_device_mesh("cpu", (4,))
        x, y = torch.randn(8, 6), torch.randn(8, 6)
        functions = (lambda a, b: (a * b).sum(), lambda a, b: (a * a + b.exp()).mean(), lambda a, b: (a - b).norm())
        functions += (lambda a, b: (a.sigmoid() * b).max(),)
        for function in functions:
            for units in UNITS:
                mine = [distribute_tensor(t, mesh, [RaggedShard((0,), units)]).requires_grad_() for t in (x, y)]
                plain = [t.clone().requires_grad_() for t in (x, y)]
                function(*mine).backward()
                function(*plain).backward()
                for m, p in zip(mine, plain, strict=True):
                    assert torch.allclose(m.grad.full_tensor(), p.grad, rtol=1e-5, atol=1e-7)

    @ranks(4)
    def test_optimizers_equal_plain_tensors_bitwise_with_no_communication():
        mesh = init_device_mesh("cpu", (4,))
        shapes = ((8, 6), (4, 3, 2), (5,), ())
        torch.manual_seed(3)
        values = [torch.randn(s) for s in shapes]
        gradients = [[torch.randn(s) for s in shapes] for _ in range(3)]
        placements = [
            RaggedShard((0,), (1, 2, 0, 5)),
            RaggedShard((0, 1), (0, 3, 3, 6)),
            RaggedShard((0,), (5, 0, 0, 0)),
            RaggedShard((), (0, 0, 1, 0)),
        ]
        makers = {
            "sgd": lambda p, foreach: torch.optim.SGD(
                p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, foreach=foreach
            ),
            "adam": lambda p, foreach: torch.optim.Adam(p, lr=0.1, amsgrad=True, foreach=foreach),
            "adamw": lambda p, foreach: torch.optim.AdamW(p, lr=0.1, foreach=foreach),
            "rprop": lambda p, foreach: torch.optim.Rprop([x for x in p if x.dim()], foreach=foreach),
            "fused": lambda p, foreach: torch.optim.AdamW(p, lr=0.1, fused=True),
        }
        for name, make in makers.items():
            for foreach in (False, True):
                plain = [torch.nn.Parameter(v.clone()) for v in values]
                mine = [torch.nn.Parameter(distribute_tensor(v, mesh, [p])) for v, p in zip(values, placements)]
                for parameters, place in (
                    (plain, lambda g, p: g.clone()),
                    (mine, lambda g, p: distribute_tensor(g, mesh, [p])),
                ):
                    optimizer = make(parameters, foreach)
                    for step in gradients:
                        for parameter, gradient, placement in zip(parameters, step, placements, strict=True):
                            parameter.grad = place(gradient, placement)
                        with CommDebugMode() as mode:
                            optimizer.step()
                        assert mode.get_total_counts() == 0, name
                for a, b in zip(mine, plain, strict=True):
                    got, want = a.detach().full_tensor(), b.detach()
                    # The fused kernel rounds the tail of a vector otherwise than its body.
                    assert torch.equal(got, want) or (name == "fused" and torch.allclose(got, want)), (name, foreach)

    @ranks(4)
    def test_clip_grad_norm():
        mesh = init_device_mesh("cpu", (4,))
        values = [torch.randn(8, 6), torch.randn(4, 4), torch.randn(8)]
        placements = [RaggedShard((0,), (1, 2, 0, 5)), RaggedShard((0, 1), (0, 16, 0, 0)), Shard(0)]
        for count in (2, 3):
            for order in (2.0, 1.0, math.inf):
                for foreach in (False, True):
                    plain = [torch.nn.Parameter(v.clone()) for v in values[:count]]
                    mine = [torch.nn.Parameter(distribute_tensor(v, mesh, [p])) for v, p in zip(values[:count], placements)]
                    for a, b in zip(mine, plain, strict=True):
                        a.grad, b.grad = a.detach().clone(), b.detach().clone()
                    got = torch.nn.utils.clip_grad_norm_(mine, 0.5, norm_type=order, foreach=foreach).full_tensor()
                    want = torch.nn.utils.clip_grad_norm_(plain, 0.5, norm_type=order, foreach=foreach)
                    assert torch.allclose(got, want), (order, got, want)
                    for a, b in zip(mine, plain, strict=True):
                        assert torch.allclose(a.grad.full_tensor(), b.grad), order

    @ranks(4)
    def test_dot_communicates_nothing_where_both_own_the_same():
        mesh = init_device_mesh("cpu", (4,))
        x, y = torch.randn(24), torch.randn(24)
        for units in UNITS:
            a = distribute_tensor(x, mesh, [RaggedShard((0,), units)])
            for other in (a.placements[0], Replicate(), Shard(0)):
                b = distribute_tensor(y, mesh, [other])
                with CommDebugMode() as mode:
                    got = torch.dot(a, b)
                assert mode.get_total_counts() <= (other == Shard(0)), (units, other)  # None where both own the same.
                torch.testing.assert_close(got.full_tensor(), torch.dot(x, y))

    @ranks(4)
    def test_grad_scaler_unscales_and_skips_alike_on_every_rank():
        mesh = init_device_mesh("cpu", (4,))
        placements = [RaggedShard((0,), (1, 2, 0, 5)), Shard(0), RaggedShard((0, 1), (0, 48, 0, 0))]
        for bad in (None, math.inf, math.nan):
            parameters = [torch.nn.Parameter(distribute_tensor(torch.ones(8, 6), mesh, [p])) for p in placements]
            optimizer = torch.optim.SGD(parameters, lr=0.5)
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
            scaler.scale(torch.ones(()))  # Makes the scale.
            gradient = torch.full((8, 6), 8.0)
            if bad is not None:
                gradient[7, 5] = bad  # One rank only sees it.
            for parameter, placement in zip(parameters, placements, strict=True):
                parameter.grad = distribute_tensor(gradient, mesh, [placement])
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == (4.0 if bad is None else 2.0)
            for parameter in parameters:  # Stepped on every rank, or on none.
                assert torch.equal(parameter.detach().full_tensor(), torch.full((8, 6), 0.0 if bad is None else 1.0)), bad

    @ranks(4)
    def test_a_deep_copy_is_a_tensor_of_its_own():
        a = uneven(torch.randn(8, 6))
        twin = copy.deepcopy(a)
        twin.add_(1)
        assert not torch.equal(twin, a) and twin.placements == a.placements

    @ranks(4)
    def test_copies_of_a_partial_keep_its_contributions():
        """Copies have the contributions, whose sum is the value. Other ops reduce first."""
        mesh = init_device_mesh("cpu", (2, 2))
        mine, placements = torch.full((3,), 1.0 + mesh.get_local_rank(0)), [Partial(), RaggedShard((0,), (1, 1))]
        x = DTensor.from_local(mine, mesh, placements, shape=torch.Size([6]), stride=(1,), run_check=False)
        for copied in (x.detach(), x.clone(), x.detach().requires_grad_().clone()):
            assert copied.placements == x.placements
            assert torch.equal(copied.full_tensor(), torch.full((6,), 3.0))
        parts = DTensor.from_local(mine * 0.75, mesh, placements, shape=torch.Size([6]), stride=(1,), run_check=False)
        for dtype, want in ((torch.bool, 1.0), (torch.int64, 2.0)):  # Of 0.75 + 1.5. Casts of the parts make another sum.
            assert torch.equal(parts.to(dtype).float().full_tensor(), torch.full((6,), want)), dtype
        torch.testing.assert_close(torch.exp(x).full_tensor(), torch.full((6,), 3.0).exp())
        assert "a Partial tensor must be reduced first" in error_of(x.fill_, 3.0)  # A sum of fills is another value.
        assert torch.equal(x.zero_().full_tensor(), torch.zeros(6))

    @ranks(4)
    def test_repr_shows_the_placement():
        assert "RaggedShard(dims=(0,), local_units=(1, 2, 0, 5))" in repr(uneven(torch.randn(8, 6)))

    @ranks(4)
    def test_numbers_promote_types_as_of_plain_tensors():
        integer = uneven(torch.arange(48).view(8, 6))
        assert (integer + 1).dtype == torch.int64 and (integer * 1.5).dtype == torch.float32

    @ranks(4)
    def test_a_plain_tensor_as_other_operand_is_an_error():
        a = uneven(torch.randn(8, 6))
        assert error_of(lambda: a + a.redistribute(placements=[Replicate()]).to_local()).startswith("RuntimeError")
        assert dist.get_world_size() == 4

    @unittest.skipIf(torch.__version__ < "2.13", "DTensor has no rule for batch norm")
    @ranks(4)
    def test_batch_norm_equals_plain_tensors():
        """The statistics of all rows, which are then gathered, and the running ones that it writes to, equal on all ranks."""
        mesh = init_device_mesh("cpu", (4,))
        for units in UNITS:
            whole = torch.randn(8, 6, requires_grad=True)
            mine = distribute_tensor(whole.detach(), mesh, [RaggedShard((0,), units)]).requires_grad_()
            theirs = [torch.zeros(6), torch.ones(6), torch.randn(6), torch.randn(6)]
            ours = [distribute_tensor(each.clone(), mesh, [Replicate()]) for each in theirs]
            for training in (True, False):
                outputs = [torch.nn.functional.batch_norm(x, *rest, training) for x, rest in ((mine, ours), (whole, theirs))]
                for found, wanted in zip([outputs[0], *ours], [outputs[1], *theirs], strict=True):
                    torch.testing.assert_close(found.full_tensor(), wanted)
                for output in outputs:
                    output.pow(2).sum().backward()
            torch.testing.assert_close(mine.grad.full_tensor(), whole.grad)

    @ranks(4)
    def test_an_op_that_would_write_to_a_copy_is_an_error():
        """What an op writes to is never a redistributed copy. If it would be, the op is an error and writes nothing."""
        mesh = init_device_mesh("cpu", (2, 2))
        row = (RaggedShard((0,), (1, 3)), Replicate())

        def placed(*placements):
            return distribute_tensor(torch.arange(8.0).view(4, 2), mesh, placements)

        local = torch.ones(8 if mesh.get_local_rank(0) == 0 else 0)
        pending = DTensor.from_local(local, mesh, (RaggedShard((), (1, 0)), Partial()), shape=(4, 2), stride=(2, 1))
        adam = dict(lr=1.0, beta1=0.9, beta2=0.9, weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False)
        sgd = dict(weight_decay=0.0, momentum=0.5, lr=1.0, dampening=0.0, nesterov=False, maximize=False, is_first_step=False)

        def refuses(written, op, *args, **kwargs):
            before = [t.full_tensor() for t in written]
            error = error_of(op, *args, **kwargs)
            assert "a tensor that it writes to would need a redistribution" in error or "must be reduced first" in error, error
            assert all(torch.equal(t.full_tensor(), b) for t, b in zip(written, before, strict=True))

        other = placed(RaggedShard((0, 1), (3, 1)), Replicate())
        refuses([pending, other], torch._foreach_mul_, [pending, other], 2)
        for buffer in (other, placed(Shard(0), Shard(1)), placed(Replicate(), Replicate())):
            mine, gradient, step = placed(*row), placed(*row), torch.tensor(1.0)
            refuses([mine, buffer], torch._fused_adam_, [mine], [gradient], [mine + 0], [buffer], [], [step], **adam)
            refuses([mine, buffer], torch._fused_sgd_, [mine], [gradient], [buffer], **sgd)

    @ranks(4)
    def test_ops_without_a_local_way_are_gathered():
        mesh = init_device_mesh("cpu", (4,))
        x = torch.randn(8, 6)
        for units in UNITS:
            a = distribute_tensor(x, mesh, [RaggedShard((0,), units)])
            for name, function in GATHERED.items():
                got = function(a, lambda tensor, placement: distribute_tensor(tensor, mesh, [placement]))
                want = function(x, lambda tensor, placement: tensor)
                torch.testing.assert_close(got.full_tensor(), want, rtol=1e-5, atol=1e-5, msg=f"{name} {units}")

    def test_unsupported_ops_say_so_on_every_rank(self):
        answers = run_ranks(4, check_unsupported)
        for errors in answers:
            self.assertEqual(errors, answers[0])
        for name, error in answers[0].items():
            with self.subTest(name):
                self.assertTrue(error.startswith("NotImplementedError: aten."), f"{name}: {error}")
                self.assertIn("Redistribute first", error)

    @ranks(4)
    def test_a_cast_to_another_memory_format_comes_after_one_without():
        """The dispatcher's cache must know the format: without it, the second call ran on the flat shard and raised."""
        mesh, full = init_device_mesh("cpu", (4,)), torch.randn(5, 4, 3, 2)
        x = distribute_tensor(full, mesh, [RaggedShard((0,), (0, 1, 0, 4))])
        for options in ({}, {"memory_format": torch.channels_last}):
            got, want = x.to(torch.float64, **options), full.to(torch.float64, **options)
            assert got.stride() == want.stride() and torch.equal(got.full_tensor(), want), options

    @ranks(2)
    def test_a_mean_over_the_dimension_that_a_scalar_does_not_have():
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.tensor(3.0), mesh, [RaggedShard((), (0, 1))])
        for dim in (0, -1):
            assert x.mean(dim).full_tensor() == 3.0 and x.mean(dim, keepdim=True).shape == ()
