"""Weight gradients computed into their buffer: autograd's numbers, and no tensor of their own, also under fully_shard."""

import operator
import unittest
from collections import Counter
from functools import partial
from unittest import mock

import torch
import torch.nn.functional as F
from common import error_of, ranks
from moe import MoEConfig, MoETransformer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)
from weight_gradient_cases import (
    OTHERS,
    PARTS,
    PRODUCTS,
    B,
    E,
    K,
    M,
    N,
    Ops,
    Target,
    direct,
    experts,
    gradient,
    linear_case,
    run,
    tensors,
)

from torch_ragged._register._torch import fsdp2_keeps_wide_gradients
from torch_ragged.fsdp import fully_shard, plan_layout, rows
from torch_ragged.fsdp.core._dbuffer import DBuffer
from torch_ragged.fsdp.grads._weight_gradient import ComputeParameter
from torch_ragged.fsdp.layout._buffer_layout import TensorSpec

aten = torch.ops.aten


class Products(TorchDispatchMode):
    """Counts matrix products, by their names and in all."""

    def __init__(self):
        super().__init__()
        self.names = Counter()

    @property
    def count(self):
        return sum(count for name, count in self.names.items() if name.rstrip("_").endswith("mm"))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


class ProductTest(unittest.TestCase):
    def check(self, name, dtype):
        function, x_shape, w_shape, is_exact = PRODUCTS[name]
        x, data, b = tensors(x_shape, w_shape, dtype)
        plain, weight = nn.Parameter(data.clone()), direct(data)
        wanted, got = run(function, x, plain, b), run(function, x, weight, b)
        for what, one, other in zip(("output", "x", "bias"), wanted, got):
            self.assertIs(type(other), type(one))
            if one is not None:
                self.assertTrue(torch.equal(one, other), what)
        target = weight.gradient_target
        self.assertEqual((target.done_calls, target.moves, weight.grad), (1, 0, None))
        if is_exact:
            self.assertTrue(torch.equal(wanted[3], got[3]))
        tolerance = {"rtol": 2e-2, "atol": 2e-1} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
        torch.testing.assert_close(got[3], wanted[3], **tolerance)
        run(function, x, weight, b, passes=2)
        torch.testing.assert_close(target.view, 3 * wanted[3], **{key: 3 * value for key, value in tolerance.items()})
        self.assertEqual((target.done_calls, target.moves, weight.grad), (3, 0, None))

    def test_numbers_are_autograds(self):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            for name in PRODUCTS:
                with self.subTest(name, dtype=dtype):
                    self.check(name, dtype)

    def test_a_target_that_refuses_leaves_the_gradient_to_autograd(self):
        for cases in (PRODUCTS, PARTS):
            for name, (function, x_shape, w_shape, *_) in cases.items():
                x, data, b = tensors(x_shape, w_shape, torch.float32)
                plain, weight = nn.Parameter(data.clone()), direct(data)
                weight.gradient_target.refuses = True
                wanted, got = run(function, x, plain, b), run(function, x, weight, b)
                self.assertTrue(torch.equal(got[3], wanted[3]), name)
                self.assertEqual((weight.gradient_target.done_calls, weight.gradient_target.moves), (0, 1), name)


class PartTest(unittest.TestCase):
    def check(self, cases, name):
        function, x_shape, w_shape = cases[name]
        x, data, b = tensors(x_shape, w_shape, torch.float32)
        plain, weight = nn.Parameter(data.clone()), direct(data)
        wanted, got = run(function, x, plain, b), run(function, x, weight, b)
        for what, one, other in zip(("output", "x", "bias"), wanted, got):
            self.assertEqual(type(other), type(one), what)
            if one is not None:
                self.assertTrue(torch.equal(one, other), what)
        torch.testing.assert_close(got[3], wanted[3])
        self.assertTrue(torch.equal(got[3] == 0, wanted[3] == 0))
        run(function, x, weight, b, passes=2)
        torch.testing.assert_close(got[3], 3 * wanted[3], rtol=1e-4, atol=1e-4)
        return weight.gradient_target

    def test_products_with_parts_of_a_weight_write_in_place(self):
        for name in PARTS:
            with self.subTest(name):
                target = self.check(PARTS, name)
                self.assertEqual(target.moves, 0)
                self.assertGreater(target.done_calls, 0)

    def test_everything_else_is_autograds(self):
        for name in OTHERS:
            with self.subTest(name):
                target = self.check(OTHERS, name)
                is_mixed = name in ("embedding and linear", "left and right", "used after a change")
                self.assertEqual((target.done_calls > 0, target.moves > 0), (is_mixed, True))

    def test_nothing_is_copied_nor_allocated_for_the_gradient(self):
        for name, (function, x_shape, w_shape, first, later) in {
            "linear": (F.linear, (M, K), (N, K), "mm.out", "addmm_"),
            "linear 3-D": (F.linear, (B, M, K), (N, K), "mm.out", "addmm_"),
            "transpose": (lambda x, w, b: x @ w.t(), (M, K), (N, K), "mm.out", "addmm_"),
            "bmm": (lambda x, w, b: x @ w, (E, M, K), (E, K, N), "bmm.out", "baddbmm_"),
            "bmm of a transpose": (lambda x, w, b: x @ w.mT, (E, M, K), (E, N, K), "bmm.out", "baddbmm_"),
            "experts": (experts(lambda w: w), (M, K), (E, N, K), None, "addmm_"),
        }.items():
            x, data, b = tensors(x_shape, w_shape, torch.float32)
            x.requires_grad_(False)
            b.requires_grad_(False)
            weight = direct(data)
            for number, op in enumerate((first, later, later)):
                output = function(x, weight, b)
                with Ops() as ops:
                    output.backward(output.detach())
                views = {"t", "transpose.int", "view", "as_strided", "slice.Tensor", "_unsafe_view", "detach"}
                computed = [op for op in ops.names if op not in views]
                wanted = [op] if name != "experts" else ["zero_", *[later] * (E - 1)] if number == 0 else [later] * (E - 1)
                self.assertEqual(computed, wanted, name)


class DiscardsGradient(torch.autograd.Function):
    """The identity, through which no gradient passes."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return None


class UnusedOutputTest(unittest.TestCase):
    def test_a_product_without_a_gradient_gives_the_weight_none(self):
        for name, (function, x_shape, w_shape, _) in PRODUCTS.items():
            x, data, b = tensors(x_shape, w_shape, torch.float32)
            plain, weight = nn.Parameter(data.clone()), direct(data)
            for w in (plain, weight):
                (DiscardsGradient.apply(function(x, w, b)).sum() + x.sum()).backward()
            self.assertIsNone(plain.grad, name)
            self.assertEqual((weight.gradient_target.done_calls, weight.gradient_target.moves, weight.grad), (0, 0, None), name)

    def test_errors_are_torchs(self):
        _, data, b = tensors((M, K), (K, N), torch.float32)
        plain, weight = nn.Parameter(data.clone()), direct(data)
        scalar, wrong = torch.ones(()), torch.ones(2, 3)
        for call in (
            lambda w: torch.matmul(scalar, w),
            lambda w: scalar @ w,
            lambda w: F.linear(scalar, w),
            lambda w: torch.mm(scalar, w),
            lambda w: torch.addmm(b, scalar, w),
            lambda w: torch.matmul(wrong, w),
            lambda w: F.linear(wrong, w),
            lambda w: torch.mm(wrong, w),
            lambda w: torch.bmm(wrong, w),
            lambda w: torch.addmm(b, wrong, w),
            lambda w: torch.einsum("mk,kn->mn", wrong, w),
            lambda w: torch.einsum("mk,kn->mx", wrong, w),
            lambda w: torch.mm(wrong, w, 3),
        ):
            self.assertEqual(error_of(call, weight).replace("ComputeParameter", "Parameter"), error_of(call, plain))
            self.assertNotEqual(error_of(call, plain), "")

    def test_options_of_a_grouped_product_are_torchs(self):
        x, data, b = tensors((M, K), (E, K, N), torch.float32)
        offsets = torch.tensor([2, 2, M - 1, M], dtype=torch.int32)
        for options in ({"bias": b}, {"out_dtype": torch.bfloat16}, {"bias": b, "out_dtype": torch.float32}):
            calls = [partial(F.grouped_mm, x, w, offs=offsets, **options) for w in (nn.Parameter(data.clone()), direct(data))]
            errors = [error_of(call) for call in calls]
            self.assertEqual(errors[0], errors[1], options)
            if not errors[0]:
                outputs = [call() for call in calls]
                self.assertTrue(torch.equal(*outputs))
                self.assertNotIn("Product", str(outputs[1].grad_fn))


class SavedTensorTest(unittest.TestCase):
    """What backward needs is saved as autograd saves it."""

    def test_changes_in_place_are_noticed(self):
        for changed in ("weight", "view", "input"):
            texts = []
            for kind in ("plain", "direct"):
                x, plain, weight, b = linear_case()
                x, w = x * 1, plain if kind == "plain" else weight
                output = F.linear(x, w, b)
                with torch.no_grad():
                    {"weight": w, "view": w.t(), "input": x}[changed].add_(1)
                texts.append(error_of(output.sum().backward))
            self.assertIn("modified by an inplace operation", texts[0])
            self.assertEqual(texts[1][:100], texts[0][:100], changed)
        x, _, weight, b = linear_case()
        output = F.linear(x.detach(), weight, b)  # Only the input is needed: torch lets the weight change, too.
        with torch.no_grad():
            weight.add_(1)
        output.sum().backward()

    def test_a_weight_may_change_if_only_the_input_is_needed(self):
        for name, (function, x_shape, w_shape, _) in PRODUCTS.items():
            x, data, b = tensors(x_shape, w_shape, torch.float32)
            errors = []
            for w in (nn.Parameter(data.clone()), direct(data)):
                output = function(x.detach(), w, b)
                with torch.no_grad():
                    w.add_(1)
                errors.append(error_of(output.backward, torch.ones_like(output)))
            self.assertEqual(errors, ["", ""], name)

    def test_saved_tensor_hooks(self):
        def act(x, w, b):
            packed = []

            def pack(tensor):
                packed.append(tensor.detach().clone())
                return len(packed) - 1

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda index: packed[index]):
                output = F.linear(x, w, b)
            with torch.no_grad():
                shapes = sorted(tuple(sorted(tensor.shape)) for tensor in packed)
            output.square().sum().backward()
            return shapes, x.grad, b.grad, gradient(w)

        x, plain, weight, b = linear_case()
        wanted, got = act(x, plain, b), act(x.detach().requires_grad_(), weight, b.detach().requires_grad_())
        self.assertEqual(got[0], wanted[0])
        for one, other in zip(wanted[1:], got[1:]):
            self.assertTrue(torch.equal(one, other))
        self.assertEqual(weight.gradient_target.done_calls, 1)

    def test_activation_checkpointing(self):
        for reentrant in (False, True):
            results, wanted = [], None
            for kind in ("plain", "direct"):
                x, plain, weight, b = linear_case()
                w = plain if kind == "plain" else weight

                def block(x, w=w, b=b):
                    return torch.relu(F.linear(x, w, b)) @ w @ w.t()

                output = checkpoint(block, x, use_reentrant=reentrant)
                output.square().sum().backward()
                results.append((output, x.grad, b.grad))
                if kind == "direct":
                    self.assertEqual((w.gradient_target.done_calls, w.gradient_target.moves), (3, 0))
                    torch.testing.assert_close(w.gradient_target.view, wanted, rtol=1e-4, atol=1e-2)
                else:
                    wanted = w.grad
            for one, other in zip(*results):
                self.assertTrue(torch.equal(one, other))

    def test_a_checkpoint_recomputes_as_many_products_as_with_plain_parameters(self):
        """It stops where the last product saves its inputs: torch's own operators save them before they compute."""

        def some(context, operation, *args, **kwargs):
            return CheckpointPolicy.MUST_SAVE if operation is aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE

        selective = partial(create_selective_checkpoint_contexts, some)
        for inputs in ("trained", "data"):
            for early in (True, False):
                for options in ({}, {"context_fn": selective}):
                    counts, grads = [], []
                    for kind in ("plain", "direct"):
                        x, plain, weight, b = linear_case()
                        x.requires_grad_(inputs == "trained")
                        w = plain if kind == "plain" else weight
                        inner = partial(checkpoint, lambda x, w=w: torch.relu(x @ w), use_reentrant=False)
                        block = [
                            lambda x, w=w, b=b: F.linear(x, w, b),
                            lambda x, w=w, b=b: F.linear(torch.relu(F.linear(x, w, b) @ w), w),
                            lambda x, w=w, b=b: torch.relu(F.linear(x, w, b)) + 1,
                            lambda x, w=w, b=b, inner=inner: inner(F.linear(x, w, b)),
                        ]
                        for function in block:
                            with Products() as products, set_checkpoint_early_stop(early):
                                output = checkpoint(function, x, use_reentrant=False, **options)
                                output.square().sum().backward(retain_graph=not options)
                                if not options:  # Selective checkpointing allows no second one.
                                    output.sum().backward()
                            counts.append((kind, products.count))
                            grads.append((kind, None if x.grad is None else x.grad.clone()))
                    for pairs, equal in ((counts, operator.eq), (grads, torch.equal)):
                        ours, theirs = ([value for kind, value in pairs if kind == each] for each in ("direct", "plain"))
                        for one, other in zip(ours, theirs, strict=True):
                            self.assertTrue(one is other is None or equal(one, other), (inputs, early, options, ours, theirs))

    def test_released_storage(self):
        """As fully_shard does: the storage is freed after forward, and allocated and filled again before backward."""
        layout = plan_layout([TensorSpec("w", (N, K), (), N * K), TensorSpec("e", (E, K, N), (), E * K * N)], 1)
        buffers = [DBuffer(layout, Replicate(), 0, torch.float32, torch.device("cpu")) for _ in range(2)]
        values = [torch.randn(N, K), torch.randn(E, K, N)]
        weights = [ComputeParameter(buffers[0].tensor(index)) for index in range(2)]
        for index, weight in enumerate(weights):
            weight.gradient_target = Target(weight)
            weight.gradient_target.view = buffers[1].tensor(index)

        def fill():
            buffers[0].allocate()
            for index, value in enumerate(values):
                buffers[0].tensor(index).copy_(value)

        def function(x, w, e):
            return torch.bmm(F.linear(x, w).relu().expand(E, -1, -1), e.mT).sum(0) @ e[1]

        x, plain = torch.randn(M, K, requires_grad=True), [nn.Parameter(value.clone()) for value in values]
        values[1] = values[1].mT.contiguous().view(E, K, N)
        plain = [nn.Parameter(value.clone()) for value in values]
        for _ in range(2):
            fill()
            output = function(x, *weights)
            buffers[0].free()
            fill()
            output.square().sum().backward()
            buffers[0].free()
            function(x, *plain).square().sum().backward()
            for weight, reference in zip(weights, plain, strict=True):
                torch.testing.assert_close(weight.gradient_target.view, reference.grad, rtol=1e-4, atol=1e-1)
        self.assertEqual([weight.gradient_target.moves for weight in weights], [0, 0])


def count_gradients(model):
    """How many gradients of each parameter autograd hands over, and how many matmuls write to the buffer."""
    moved, written = Counter(), Counter()
    for number, module in enumerate([*model.blocks, model]):
        for group in module._ragged_states(recurse=False)[0].groups:
            add, names = group.add_gradient, [param.fqn for param in group.params]

            def counted_add(index, gradient, add=add, names=names):
                moved[names[index]] += 1
                add(index, gradient)

            group.add_gradient = counted_add
            for param in group.params:
                target = getattr(param.unsharded, "gradient_target", None)
                if target is None:
                    continue

                def counted_begin(begin=target.begin, name=f"{number}.{param.fqn}"):
                    place = begin()
                    written[name] += place is not None
                    return place

                target.begin = counted_begin
    return moved, written


def train(is_direct, policy, compiles=False, micro_batches=2, checkpoints=False, steps=2):
    """Losses and gradients of some steps of a small model, and how many gradients went which way."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = MoETransformer(MoEConfig(dim=24, heads=2, layers=2, experts=3, hidden=16, context=12))
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for block in model.blocks:
        if compiles:
            block.attention.compile(backend="aot_eager", fullgraph=True)
        if checkpoints:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    with mock.patch("torch_ragged.fsdp.core._fsdp_param_group.SMALLEST_WRITTEN_IN_PLACE", 1 if is_direct else 2**62):
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy, orig_param_policy=lambda fqn, p: rows(4))
        fully_shard(model, mesh=mesh, mp_policy=policy)
    moved, written = count_gradients(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    results = []
    for _ in range(steps):
        for micro_batch in range(micro_batches):
            model.set_requires_gradient_sync(micro_batch == micro_batches - 1)
            data = torch.randint(0, 256, (4, 13), generator=generator)
            loss = F.cross_entropy(model(data[:, :-1]).float().flatten(0, 1), data[:, 1:].flatten())
            loss.backward()
            results.append(loss.detach())
        results += [p.grad.full_tensor().clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return results, moved, written


class FullyShardTest(unittest.TestCase):
    @ranks(2)
    def test_training_is_that_of_copied_gradients():
        policy = MixedPrecisionPolicy()
        for knobs in ({"micro_batches": 1}, {}, {"checkpoints": True}, {"compiles": True}):
            (plain, _, _), (got, moved, written) = train(False, policy, **knobs), train(True, policy, **knobs)
            for one, other in zip(plain, got, strict=True):
                torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-6, msg=lambda m: f"{knobs}: {m}")
            passes = 2 * knobs.get("micro_batches", 2)
            by_autograd = {"embedding.weight": passes, "position": passes}  # The former is the head's weight, too.
            if "compiles" in knobs:
                by_autograd.update({"attention.qkv.weight": 2 * passes, "attention.out.weight": 2 * passes})
            assert {fqn: count for fqn, count in moved.items() if count and "norm" not in fqn} == by_autograd, moved
            wanted = {"experts.up": 3, "experts.down": 3, "experts.router.weight": 1, "embedding.weight": 1}
            if "compiles" not in knobs:
                wanted.update({"attention.qkv.weight": 1, "attention.out.weight": 1})
            for fqn, count in written.items():
                assert count == passes * wanted.get(fqn.partition(".")[2], 0), (fqn, count)
        bf16, fp32 = torch.bfloat16, torch.float32
        for param_dtype, reduce_dtype in ((bf16, bf16), (bf16, fp32), (fp32, bf16)):
            policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
            knobs = {"micro_batches": 1, "steps": 1}
            (plain, _, _), (got, moved, written) = train(False, policy, **knobs), train(True, policy, **knobs)
            # Gradients that are kept wide are not rounded before they are added: sums with those written in place differ.
            tolerance = {"rtol": 1e-2, "atol": 1e-3} if fsdp2_keeps_wide_gradients() else {"rtol": 0, "atol": 0}
            for one, other in zip(plain, got, strict=True):
                torch.testing.assert_close(other, one, **tolerance)
            is_direct = param_dtype == bf16  # Gradients that are rounded for their buffer take autograd's way.
            assert written["0.attention.qkv.weight"] == is_direct and moved["experts.up"] == 2 * (not is_direct), (
                written,
                moved,
            )

    @ranks(1)
    def test_dtensor_input():
        """What a parameter of the wrong class meets: torch's error, as for any plain parameter."""
        x, plain, weight, b = linear_case()
        distributed = DTensor.from_local(x.detach(), init_device_mesh("cpu", (1,)), [Replicate()])
        assert error_of(F.linear, distributed, weight) == error_of(F.linear, distributed, plain) != ""
