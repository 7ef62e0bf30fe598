"""Where weight gradients go torch's own way, and ComputeParameter as a parameter like any other."""

import copy
import io
import unittest

import pytest
import torch
import torch.nn.functional as F
from common import error_of
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrizations
from weight_gradient_cases import B, K, M, N, direct, gradient, linear_case, run, tensors

from torch_ragged.fsdp.grads._weight_gradient import ComputeParameter


class FallbackTest(unittest.TestCase):
    """Where torch's own way has to be taken: equal results, and nothing written to the place but by the hook."""

    def same(self, act, **keywords):
        x, plain, weight, b = linear_case(**keywords)
        target = weight.gradient_target
        results = []
        for w in (plain, weight):
            x.grad = b.grad = None
            results.append(act(x, w, b))
        flat = [torch.utils._pytree.tree_leaves(result) for result in results]
        self.assertEqual(len(flat[0]), len(flat[1]))
        for one, other in zip(*flat):
            self.assertIs(type(other), type(one))
            self.assertTrue(torch.equal(one, other))
        self.assertEqual(target.done_calls, 0)
        return weight

    def test_nothing_is_written_without_gradients(self):
        for mode in (torch.no_grad(), torch.inference_mode()):
            with mode:
                weight = self.same(lambda x, w, b: (F.linear(x, w, b), x @ w.t(), w.t()))
            self.assertEqual(weight.gradient_target.moves, 0)

    def test_a_frozen_weight_takes_autograds_way(self):
        def act(x, w, b):
            w.requires_grad_(False)
            output = F.linear(x, w, b)
            output.sum().backward()
            self.assertEqual(output.grad_fn.name(), "AddmmBackward0")
            return output, x.grad, b.grad

        self.assertEqual(self.same(act).gradient_target.moves, 0)

    def test_a_weight_frozen_since_forward_gets_no_gradient(self):
        x, _, weight, b = linear_case()
        output = F.linear(x, weight, b)
        weight.gradient_target.refuses = True  # As the parameter group would.
        weight.requires_grad_(False)
        output.sum().backward()
        self.assertEqual((weight.gradient_target.done_calls, weight.gradient_target.moves, weight.grad), (0, 0, None))

    def test_without_a_place_the_gradient_is_moved_once(self):
        x, plain, weight, b = linear_case()
        weight.gradient_target.refuses = True
        wanted, got = run(F.linear, x, plain, b), run(F.linear, x, weight, b)
        self.assertTrue(torch.equal(wanted[3], got[3]))
        self.assertEqual((weight.gradient_target.done_calls, weight.gradient_target.moves), (0, 1))
        weight = ComputeParameter(plain.data)
        output = F.linear(x, weight, b)
        self.assertEqual(output.grad_fn.name(), "AddmmBackward0")
        self.assertIs(type(weight.t()), torch.Tensor)

    def test_a_place_of_another_dtype_gets_a_cast(self):
        x, plain, weight, b = linear_case(dtype=torch.float64)
        wanted, got = run(F.linear, x, plain, b), run(F.linear, x, weight, b)
        self.assertTrue(torch.equal(wanted[3].double(), got[3]))
        self.assertEqual((weight.gradient_target.done_calls, weight.gradient_target.moves), (0, 1))

    def test_autocast_gives_autograds_numbers(self):
        def act(x, w, b):
            with torch.autocast("cpu", torch.bfloat16):
                output = F.linear(x, w, b), x @ w.t()
            sum(part.float().square().sum() for part in output).backward()
            return output, x.grad, b.grad, gradient(w)

        self.assertEqual(self.same(act).gradient_target.moves, 1)

        def backward_under_autocast(x, w, b):
            output = F.linear(x, w, b).square().sum()
            with torch.autocast("cpu", torch.bfloat16):
                output.backward()
            return output, x.grad, b.grad, gradient(w)

        self.assertEqual(self.same(backward_under_autocast).gradient_target.moves, 1)

    def test_functorch_and_forward_mode_give_autograds_numbers(self):
        def transforms(x, w, b):
            def loss(w, x):
                return F.linear(x, w, b).square().sum()

            x, plain = x.detach(), w.detach()
            return (
                torch.func.grad(loss)(w, x),
                torch.func.vmap(lambda row: F.linear(row, w, b).detach())(x),
                torch.func.vmap(torch.func.grad(loss, 1), (None, 0))(plain, x),
                torch.func.jvp(lambda x: (x @ w.t()).detach(), (x,), (x,)),
            )

        self.same(transforms)

        def dual(x, w, b):
            with forward_ad.dual_level():
                output = forward_ad.make_dual(x.detach(), b.detach()[: x.shape[1]].expand(x.shape)) @ w.t()
                return [part.detach() for part in forward_ad.unpack_dual(output)]

        self.same(dual)

    def test_double_backward_gives_autograds_numbers(self):
        def act(x, w, b):
            loss = F.linear(x, w, b).pow(3).sum() + (x @ w.t()).pow(3).sum()
            of_x, of_w = torch.autograd.grad(loss, [x, w], create_graph=True)
            of_w.square().sum().backward()
            return of_x, of_w, x.grad, b.grad, gradient(w)

        x, plain, weight, b = linear_case()
        for one, other in zip(
            act(x, plain, b), act(*[x.detach().requires_grad_(), weight, b.detach().requires_grad_()]), strict=True
        ):
            torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-3)

        def keeps_graph(x, w, b):
            F.linear(x, w, b).pow(3).sum().backward(create_graph=True)
            self.assertEqual(weight.gradient_target.done_calls, 0)
            of_w = gradient(w).clone()
            of_w.square().sum().backward()
            return of_w, x.grad, gradient(w)

        x, plain, weight, b = linear_case()
        wanted, got = keeps_graph(x, plain, b), keeps_graph(x.detach().requires_grad_(), weight, b)
        for one, other in zip(wanted, got, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-3)

    def test_gradients_for_others_than_the_parameter(self):
        """torch.autograd.grad and backward(inputs=) write no gradient that nobody asked for."""

        def of_x(x, w, b):
            return torch.autograd.grad((x @ w.t()).square().sum() + F.linear(x, w, b).square().sum(), [x, b])

        def of_w(x, w, b):
            return torch.autograd.grad(F.linear(x, w, b).square().sum() + (x @ w.t()).sum(), [w, x])

        def of_view(x, w, b):
            view = w.t()
            return torch.autograd.grad((x @ view).square().sum(), [view])

        def inputs(x, w, b):
            F.linear(x, w, b).square().sum().backward(inputs=[x])
            return x.grad

        for act in (of_x, of_w, of_view, inputs):
            self.assertEqual(self.same(act).gradient_target.moves, 0)
        x, plain, weight, b = linear_case()
        for w in (plain, weight):
            F.linear(x, w, b).square().sum().backward(inputs=[w])
        self.assertTrue(torch.equal(plain.grad, weight.gradient_target.view))
        self.assertEqual((weight.gradient_target.done_calls, x.grad), (1, None))

    def test_hooks_of_the_user_see_autograds_gradients(self):
        def on_weight(x, w, b):
            seen = []
            output = F.linear(x, w, b)
            w.register_hook(lambda grad: seen.append(grad.clone()) or grad * 2)  # After forward, too.
            output.square().sum().backward()
            return seen, gradient(w)

        def on_view(x, w, b):
            seen = []
            view = w.t()
            view.register_hook(seen.append)
            (x @ view).square().sum().backward()
            return seen, gradient(w)

        def retained(x, w, b):
            view = w.t()
            view.retain_grad()
            (x @ view).square().sum().backward()
            return view.grad, gradient(w)

        for act in (on_weight, on_view, retained):
            self.assertEqual(self.same(act).gradient_target.moves, 1)

    def test_strides_are_autograds(self):
        """Hooks see gradients with the strides that torch gives them."""
        x, plain, weight, b = linear_case()
        fused, batch, seen = torch.randn(2, N, K), torch.randn(2, M, K), []
        for w, e in ((plain, nn.Parameter(fused)), (weight, direct(fused))):
            strides = []
            operands = [x.t().contiguous().t(), x * 1, w.t(), w * 1, e.mT, e * 1]
            for operand in operands:
                operand.register_hook(lambda grad, strides=strides: strides.append(grad.stride()))
            for left in operands[:2]:
                for output in (left @ operands[2], left @ w.t(), F.linear(left, w), F.linear(left, operands[3])):
                    output.sum().backward(retain_graph=True)
            (torch.bmm(batch, operands[4]) + batch @ operands[5].mT).sum().backward()
            seen.append(sorted(strides))
        self.assertEqual(*seen)
        self.assertGreater(len(set(seen[0])), 3)

    def test_other_tensor_classes_take_autograds_way(self):
        class Noted(torch.Tensor):
            calls = []

            @classmethod
            def __torch_function__(cls, func, types, args=(), kwargs=None):
                cls.calls.append((func, types))
                return super().__torch_function__(func, types, args, kwargs)

        x, plain, weight, b = linear_case()
        noted = x.detach().as_subclass(Noted)
        for w in (plain, weight):
            for function in (F.linear, torch.add):
                self.assertIs(type(function(noted, w[:, :K] if function is F.linear else w[0])), Noted)
        self.assertIn((F.linear, (Noted,)), Noted.calls)
        buffer = nn.Buffer(x.detach())
        F.linear(buffer, weight).sum().backward()
        self.assertEqual(weight.gradient_target.done_calls, 1)

    def test_other_layouts_take_autograds_way(self):
        x, plain, weight, b = linear_case()
        ragged = torch.nested.nested_tensor([x.detach()[:3], x.detach()[:5]])
        for layout in (x.detach().to_sparse(), ragged):
            got = [layout @ w.t() if layout.is_sparse else F.linear(layout, w) for w in (plain, weight)]
            self.assertEqual(got[1].grad_fn.name(), got[0].grad_fn.name())
        self.assertRaises(ValueError, ComputeParameter, torch.ones(2, 2, dtype=torch.complex64))

    def test_errors_are_torchs(self):
        x, plain, weight, b = linear_case()
        for function in (
            lambda w: F.linear(x.double(), w),
            lambda w: F.linear(x, w.t()),
            lambda w: torch.mm(x[None], w.t()),
            lambda w: torch.bmm(x, w),
            lambda w: torch.addmm(b, x[None], w.t()),
            lambda w: x @ w,
            lambda w: torch.mm(x, w.t(), out=x),
            lambda w: torch.einsum("ab,bc->ac", x, w),
            lambda w: torch.einsum("am,m1->a1", x, w),
            lambda w: torch.einsum("km,mm->km", x, w),
            lambda w: F.linear(w),
            lambda w: F.linear(x, w, b, b),
            lambda w: torch.mm(x),
            lambda w: torch.baddbmm(b, w),
            lambda w: torch.matmul(x, w.t(), b),
            lambda w: torch.select(w, 7, 7),
            lambda w: torch.t(dims=w),
            lambda w: w.t(0),
        ):
            wanted, got = error_of(function, plain), error_of(function, weight)
            self.assertEqual(got.replace("ComputeParameter", "Parameter"), wanted)
            self.assertNotEqual(wanted, "")


class ParameterTest(unittest.TestCase):
    """A ComputeParameter serves wherever a parameter does."""

    def test_is_a_parameter(self):
        x, plain, weight, b = linear_case()
        self.assertIsInstance(weight, nn.Parameter)
        self.assertIsInstance(weight, ComputeParameter)
        self.assertEqual(repr(weight), repr(plain))
        self.assertEqual(f"{ComputeParameter(torch.ones(()))}", f"{nn.Parameter(torch.ones(()))}")
        for function in (
            lambda w: w + 1,
            lambda w: w.detach(),
            lambda w: w.data,
            lambda w: w.sum(),
            lambda w: w.t() * 2,
            lambda w: torch.cat([w, w]),
            lambda w: torch.stack([w.t()]),
            lambda w: w.t().detach(),
            lambda w: w.to(torch.float64),
            lambda w: torch.empty_like(w),
            lambda w: torch._foreach_add([w], 1)[0],
            lambda w: F.layer_norm(w, (K,)),
            lambda w: torch.linalg.vector_norm(w.t()),
        ):
            self.assertIs(type(function(weight)), torch.Tensor)
        self.assertEqual((weight.shape, weight.dtype, len(weight)), (plain.shape, plain.dtype, len(plain)))
        self.assertIs(weight.contiguous(), weight)
        for view in (weight.t(), weight[0]):
            self.assertTrue(repr(view).startswith("tensor("), repr(view))

    def test_copies_are_plain(self):
        _, plain, weight, _ = linear_case()
        twin = copy.deepcopy(weight)
        self.assertIsNone(twin.gradient_target)
        self.assertTrue(torch.equal(twin, plain))
        stream = io.BytesIO()
        torch.save([weight, weight.t()], stream)
        stream.seek(0)
        loaded = torch.load(stream, weights_only=True)
        self.assertEqual([type(tensor) for tensor in loaded], [nn.Parameter, torch.Tensor])
        self.assertTrue(torch.equal(loaded[1].t(), plain))

    def test_modules_and_utilities_see_a_plain_parameter(self):
        torch.manual_seed(0)

        def build():
            torch.manual_seed(0)
            model = nn.Sequential(
                nn.Embedding(7, K),
                parametrizations.weight_norm(nn.Linear(K, K)),
                nn.LayerNorm(K),
                nn.TransformerEncoderLayer(K, 4, N, 0.0, batch_first=True),
                nn.GRU(K, K, batch_first=True),
            )
            return model

        models = [build(), build()]
        for module in models[1].modules():
            for name, value in module._parameters.items():
                if value is not None and value.dim() > 1 and not isinstance(module, nn.GRU):
                    module._parameters[name] = direct(value.data)
        losses = []
        for model in models:
            losses.append(model(torch.arange(14).view(2, 7) % 7)[0].square().mean())
            losses[-1].backward()
        self.assertTrue(torch.equal(*losses))
        directs = 0
        for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
            torch.testing.assert_close(gradient(other), one.grad)
            if isinstance(other, ComputeParameter):
                directs += other.gradient_target.done_calls
                other.grad = other.gradient_target.view
        self.assertEqual(directs, 2)  # the feed-forward network of the layer
        norms = [nn.utils.clip_grad_norm_(model.parameters(), 0.1) for model in models]
        torch.testing.assert_close(*norms)
        for model in models:
            torch.optim.AdamW(model.parameters(), lr=0.1).step()
        for one, other in zip(models[0].state_dict().items(), models[1].state_dict().items(), strict=True):
            self.assertEqual(one[0], other[0])
            torch.testing.assert_close(one[1], other[1])

    def test_output_may_be_changed_in_place(self):
        def function(x, w, b):
            output = F.linear(x, w, b)
            output[..., 0] += 1
            output = torch.relu_(output)
            return (output @ w.relu()).mul_(2)

        for shape in ((M, K), (B, M, K), (K,)):
            x, data, b = tensors(shape, (N, K), torch.float32)
            for one, other in zip(run(function, x, nn.Parameter(data), b), run(function, x, direct(data), b), strict=True):
                torch.testing.assert_close(other, one)


class Block(nn.Module):
    """Each kind of call, and attributes of a weight."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.square = nn.Linear(K, K), nn.Parameter(torch.randn(K, K) / K)
        self.experts = nn.Parameter(torch.randn(2, K, K) / K)

    def forward(self, x):
        x = self.linear(x) @ self.square.t() + x * self.square.shape[0]
        return x @ self.experts[1] + torch.bmm(x.expand(2, -1, -1), self.experts).sum(0) * self.square.sum()


def make_direct(module):
    for child in module.modules():
        for name, value in child._parameters.items():
            if value is not None and value.dim() > 1:
                child._parameters[name] = direct(value.data)


class CompileTest(unittest.TestCase):
    """Compiled code leaves all to torch, as one graph, whether it was compiled for plain parameters or not."""

    def check(self, backend):
        x = torch.randn(M, K, requires_grad=True)
        for compiled_before in (True, False):
            torch._dynamo.reset()
            module, reference = Block(), Block()
            reference(x).square().sum().backward()
            of_x, x.grad = x.grad, None
            fast = torch.compile(module, backend=backend, fullgraph=True)
            if compiled_before:
                fast(x).square().sum().backward()
                x.grad = None
            make_direct(module)
            for number in range(1, 3):
                fast(x).square().sum().backward()
                torch.testing.assert_close(x.grad, number * of_x, rtol=1e-4, atol=1e-2)
            for one, other in zip(reference.parameters(), module.parameters(), strict=True):
                if isinstance(other, ComputeParameter):
                    self.assertEqual((other.gradient_target.done_calls, other.gradient_target.moves), (0, 2))
                    torch.testing.assert_close(other.gradient_target.view, 2 * one.grad, rtol=1e-4, atol=1e-2)
            x.grad = None
            module(x).square().sum().backward()  # Beside it, eager code goes its own way.
            self.assertEqual(module.linear.weight.gradient_target.done_calls, 1)
            x.grad = None

    def test_whole_graphs_compile(self):
        self.check("aot_eager")

    @pytest.mark.slow
    def test_whole_graphs_compile_by_inductor(self):
        self.check("inductor")

    def test_views_across_a_graph_break(self):
        def function(x, w):
            view, part = w.t(), w[:, :8]
            torch._dynamo.graph_break()
            return x @ view + x[:, :8] @ part.t()

        torch._dynamo.reset()
        x, plain, weight, _ = linear_case()
        for w in (plain, weight):
            torch.compile(function, backend="aot_eager")(x, w).square().sum().backward()
        torch.testing.assert_close(weight.gradient_target.view, plain.grad)
        self.assertEqual((weight.gradient_target.done_calls, weight.gradient_target.moves), (0, 1))
