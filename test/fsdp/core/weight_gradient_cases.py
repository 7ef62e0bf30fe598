"""What the tests of weight gradients share: a place for a gradient, and calls on a weight."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from torch_ragged.fsdp.grads._weight_gradient import ComputeParameter

B, M, K, N, E = 3, 37, 56, 72, 4


class Target:
    """A place for a gradient, full of garbage at first, with the hook that moves there what autograd computes."""

    def __init__(self, parameter, dtype=None):
        self.view = torch.full_like(parameter.data, torch.nan, dtype=dtype)
        self.has_gradient, self.done_calls, self.moves, self.refuses = False, 0, 0, False
        parameter.register_post_accumulate_grad_hook(self.move)

    def begin(self):
        return None if self.refuses else (self.view, self.has_gradient)

    def done(self):
        self.has_gradient = True
        self.done_calls += 1

    def move(self, parameter):
        if parameter.grad is None:  # Backward came here with no gradient.
            return
        self.view.add_(parameter.grad) if self.has_gradient else self.view.copy_(parameter.grad)
        self.has_gradient, parameter.grad = True, None
        self.moves += 1


def direct(data, **keywords):
    parameter = ComputeParameter(data.clone())
    parameter.gradient_target = Target(parameter, **keywords)
    return parameter


def gradient(parameter):
    target = getattr(parameter, "gradient_target", None)
    return parameter.grad if target is None else target.view


class Ops(TorchDispatchMode):
    """The ops that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func).removeprefix("aten.").removesuffix(".default"))
        return func(*args, **(kwargs or {}))


def grouped(x, w, b):
    return F.grouped_mm(x, w, offs=torch.tensor([2, 2, len(x) - 1, len(x)], dtype=torch.int32))


# Name: (function of x, weight and bias, shape of x, of the weight, whether the weight's gradient is bitwise autograd's).
PRODUCTS = {
    "linear": (F.linear, (M, K), (N, K), True),
    "linear 3-D": (F.linear, (B, M, K), (N, K), True),
    "linear 1-D": (F.linear, (K,), (N, K), True),
    "linear 4-D": (F.linear, (2, B, M, K), (N, K), True),
    "linear without bias": (lambda x, w, b: F.linear(x, w), (M, K), (N, K), True),
    "linear without bias 3-D": (lambda x, w, b: F.linear(x, weight=w, bias=None), (B, M, K), (N, K), True),
    "linear of a transposed input": (lambda x, w, b: F.linear(x.transpose(0, 1), w, b), (B, M, K), (N, K), True),
    "linear of a part of the input": (lambda x, w, b: F.linear(x[:, 1:], w), (B, M, K), (N, K), True),
    "linear of a column-major input": (lambda x, w, b: F.linear(x.t(), w, b), (K, M), (N, K), True),
    "linear of one row": (F.linear, (1, K), (N, K), True),
    "linear of no rows": (F.linear, (0, K), (N, K), True),
    "linear of a transposed weight": (lambda x, w, b: F.linear(x, w.t(), b), (M, K), (K, N), True),
    "matmul": (lambda x, w, b: torch.matmul(x, w), (M, K), (K, N), True),
    "@": (lambda x, w, b: x @ w, (B, M, K), (K, N), True),
    "@ 1-D": (lambda x, w, b: x @ w, (K,), (K, N), True),
    "@ of a transposed input": (lambda x, w, b: x.mT @ w, (B, K, M), (K, N), True),
    "@ t()": (lambda x, w, b: x @ w.t(), (B, M, K), (N, K), True),
    "@ T": (lambda x, w, b: x @ w.T, (M, K), (N, K), True),
    "@ mT": (lambda x, w, b: x @ w.mT, (M, K), (N, K), True),
    "mm": (lambda x, w, b: torch.mm(x, w), (M, K), (K, N), True),
    "Tensor.mm transpose": (lambda x, w, b: x.mm(w.transpose(-2, -1)), (M, K), (N, K), True),
    "addmm": (lambda x, w, b: torch.addmm(b, x, w), (M, K), (K, N), True),
    "Tensor.addmm": (lambda x, w, b: b.addmm(x, w.t()), (M, K), (N, K), True),
    "bmm": (lambda x, w, b: torch.bmm(x, w), (E, M, K), (E, K, N), True),
    "bmm of a transposed weight": (lambda x, w, b: x.bmm(w.transpose(1, 2)), (E, M, K), (E, N, K), False),
    "@ of experts": (lambda x, w, b: x @ w, (E, M, K), (E, K, N), True),
    "@ of transposed experts": (lambda x, w, b: x @ w.mT, (E, M, K), (E, N, K), False),
    "baddbmm": (lambda x, w, b: torch.baddbmm(b, x, w), (E, M, K), (E, K, N), True),
    "linear of a reshaped weight": (lambda x, w, b: F.linear(x, w.view(N, K), b), (M, K), (N * K // 8, 8), True),
}


def tensors(x_shape, w_shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def tensor(shape):
        return torch.randn(shape, generator=generator).to(dtype)

    return tensor(x_shape).requires_grad_(), tensor(w_shape), tensor((N,)).requires_grad_()


def run(function, x, w, b, passes=1):
    """The output, and the gradients of all three summed over passes."""
    x.grad = b.grad = None
    for _ in range(passes):
        output = function(x, w, b)
        generator = torch.Generator().manual_seed(1)
        output.backward(torch.randn(output.shape, generator=generator).to(output.dtype))
    return output.detach(), x.grad, b.grad, gradient(w)


def experts(pick):
    """Each of three experts on its own tokens; the last is not used."""

    def function(x, w, b):
        weights = pick(w)
        return torch.cat([x[2 * e : 2 * e + 2] @ weights[e].t() for e in range(E - 1)])

    return function


# Parts of a fused weight: where others get nothing, their gradient is zero.
PARTS = {
    "index": (experts(lambda w: w), (M, K), (E, N, K)),
    "unbind": (experts(lambda w: w.unbind(0)), (M, K), (E, N, K)),
    "iteration": (experts(list), (M, K), (E, N, K)),
    "select": (experts(lambda w: [torch.select(w, 0, e) for e in range(E)]), (M, K), (E, N, K)),
    "split": (experts(lambda w: [part[0] for part in w.split(1)]), (M, K), (E, N, K)),
    "keywords": (experts(lambda w: [torch.select(w, dim=0, index=e) for e in range(E)]), (M, K), (E, N, K)),
    "view": (lambda x, w, b: x @ w.view(2, K, -1, 8)[1, :, 3], (M, K), (E, K, N)),
    "unsqueeze and squeeze": (experts(lambda w: [part.squeeze(0) for part in w.unsqueeze(1).unbind()]), (M, K), (E, N, K)),
    "one with no tokens": (lambda x, w, b: x[:0] @ w[1].t(), (M, K), (E, N, K)),
    "rows": (lambda x, w, b: F.linear(x, w[8:24]), (M, K), (N, K)),
    "columns": (lambda x, w, b: F.linear(x[:, 1:9], w[:, 8:16]), (M, K), (N, K)),
    "every other row": (lambda x, w, b: F.linear(x, w[::2]), (M, K), (N, K)),
    "columns transposed": (lambda x, w, b: x @ w[:, 8:24], (M, K), (K, N)),
    "chunks": (lambda x, w, b: torch.cat([F.linear(x, part) for part in w.chunk(3)], 1), (M, K), (N, K)),
    "chunk of experts": (lambda x, w, b: torch.bmm(x, w.chunk(2, 2)[1]), (E, M, K), (E, K, N)),
    "narrow": (lambda x, w, b: torch.bmm(x[:2], w.narrow(0, 1, 2)), (E, M, K), (E, K, N)),
    "mixed indices": (lambda x, w, b: x @ w[-1, :, 4:], (M, K), (E, K, N)),
    "the same twice": (lambda x, w, b: x @ w[1] + x @ w[1], (M, K), (E, K, N)),
    "whole and part": (lambda x, w, b: torch.bmm(x, w) + x[0] @ w[0], (E, M, K), (E, K, N)),
}
# Neither a product nor a view of one: all of them take autograd's way, or a part does.
OTHERS = {
    "keywords": (lambda x, w, b: torch.t(input=w) @ x + torch.matmul(input=x.t(), other=w), (N, K), (N, K)),
    "arithmetic": (lambda x, w, b: x * w + w.sum(), (M, K), (M, K)),
    "embedding": (lambda x, w, b: F.embedding(torch.tensor([0, 2, 2]), w), (M, K), (M, K)),
    "embedding and linear": (lambda x, w, b: F.linear(F.embedding(torch.tensor([0, 2]), w), w), (M, K), (M, K)),
    "weight on the left": (lambda x, w, b: torch.matmul(w, x), (K, N), (M, K)),
    "left and right": (lambda x, w, b: w @ w.t() @ x, (M, K), (M, K)),
    "used after a change": (lambda x, w, b: F.linear(x, w * 2) + F.linear(x, w), (M, K), (N, K)),
    "advanced indices": (lambda x, w, b: x @ w[torch.tensor([1, 1])], (M, K), (E, K, N)),
    "a batch of advanced indices": (lambda x, w, b: torch.bmm(x[:2], w[torch.tensor([1, 2])]), (E, M, K), (E, K, N)),
    "a mask": (lambda x, w, b: x @ w[torch.arange(E) == 2, 1:][0], (M, K - 1), (E, K, N)),
    "a copied view": (lambda x, w, b: x @ w.t().contiguous(), (M, K), (N, K)),
    "a factor": (lambda x, w, b: torch.addmm(b, x, w, beta=2, alpha=3), (M, K), (K, N)),
    "vector": (lambda x, w, b: x @ w[0], (M, K), (N, K)),
    "fewer inputs than experts": (lambda x, w, b: x @ w, (1, M, K), (E, K, N)),
    "one input for all experts": (lambda x, w, b: x @ w, (M, K), (E, K, N)),
    "einsum": (lambda x, w, b: torch.einsum("bmk, kn -> bmn", x, w), (B, M, K), (K, N)),
    "einsum of a transposed weight": (lambda x, w, b: torch.einsum("mi,oi->mo", x, w), (M, K), (N, K)),
    "einsum of experts": (lambda x, w, b: torch.einsum("emk,ekn->emn", x, w), (E, M, K), (E, K, N)),
    "einsum of transposed experts": (lambda x, w, b: torch.einsum("becd,ehd->bech", x, w), (B, E, M, K), (E, N, K)),
    "einsum of a vector": (lambda x, w, b: torch.einsum("k,kn->n", x, w), (K,), (K, N)),
    "einsum of three": (lambda x, w, b: torch.einsum("mk,kn,n->mn", x, w, b), (M, K), (K, N)),
    "einsum that sums": (lambda x, w, b: torch.einsum("mk,kn->n", x, w), (M, K), (K, N)),
    "einsum of size 1": (lambda x, w, b: torch.einsum("mk,kn->mn", x, w), (M, 1), (1, N)),
    "grouped_mm": (grouped, (M, K), (E, K, N)),
    "grouped_mm of a transposed weight": (lambda x, w, b: grouped(x, w.mT, b), (M, K), (E, N, K)),
    "grouped_mm of a transposed input": (lambda x, w, b: grouped(x.t(), w, b), (K, M + 3), (E, K, N)),
    "mm of a sparse input": (lambda x, w, b: torch.mm(x.to_sparse(), w), (M, K), (K, N)),
    "addmm of a sparse input": (lambda x, w, b: torch.addmm(b, x.to_sparse(), w), (M, K), (K, N)),
    "grouped_mm of two matrices": (
        lambda x, w, b: F.grouped_mm(x, w, offs=torch.tensor([16, 32, K], dtype=torch.int32)),
        (M + 3, K),
        (K, N),
    ),
    "einsum of a diagonal": (lambda x, w, b: torch.einsum("mk,kk->mk", x, w), (M, K), (K, K)),
    "einsum of an outer product": (lambda x, w, b: torch.einsum("mk,ekn->emn", x, w), (M, K), (E, K, N)),
    "multi-head attention": (
        lambda x, w, b: F.multi_head_attention_forward(
            x, x, x, K, 4, w, None, None, None, False, 0.0, torch.eye(K), None, need_weights=False
        )[0],
        (M, B, K),
        (3 * K, K),
    ),
}


def linear_case(**keywords):
    x, data, b = tensors((M, K), (N, K), torch.float32)
    return x, nn.Parameter(data.clone()), direct(data, **keywords), b
