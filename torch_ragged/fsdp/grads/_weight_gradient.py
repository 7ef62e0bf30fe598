"""Matmuls that write weight gradients directly into the gradient buffer, without an allocation and without a copy.

Normally autograd allocates the gradient of a parameter, and a hook copies it into the buffer. That the matmul writes there
needs another autograd node, which is made in forward: :class:`ComputeParameter` detects it by ``__torch_function__``::

    F.linear(x, W, b), x @ W.t(), x @ W[e], ...
        |   all other operations, and matmuls that torch computes in another way, are left to torch
    _Product          forward: the same call of torch
        |             backward: torch's formulas, but the weight gradient with out=, or addmm_ if there is a gradient;
        v             autograd gets None for the weight
    GradientTarget    the tensor to write to, and whether it holds a gradient

The gradient of a view of a weight, such as one expert's matrix or the transpose, is written to the same view of the target.
Backward decides whether to write to the target, so that hooks and frozen parameters work as in torch. Compiled code is left to
torch: Dynamo traces through ``__torch_function__`` without a graph break.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad

from torch_ragged._register._torch import (
    GradientUse,
    apply_of,
    as_plain_tensors,
    functorch_is_active,
    gradient_use,
    is_autocast,
    no_dispatch,
    nodes_outlive_outputs,
    recomputation_ends,
    unsafe_view,
)

__all__ = ["ComputeParameter", "GradientTarget", "allows_split_backward", "weight_gradient"]


def allows_split_backward() -> bool:
    """Whether a pipeline schedule may split a backward through these matmuls, as zero-bubble schedules do.

    Between the two passes, schedules keep only the Python objects of nodes. Before torch 2.13, the node of a matmul here is
    freed then, because it is that of a Python function. So programs that have imported pipelines get plain parameters.
    """
    return nodes_outlive_outputs() or "torch.distributed.pipelining" not in sys.modules


class GradientTarget(Protocol):
    """The destination of one parameter's gradient. Both methods are called in backward only."""

    def begin(self) -> tuple[torch.Tensor, bool] | None:
        """The tensor to write to, of the parameter's shape and strides, and whether it holds a gradient to add to.

        None: the gradient goes through autograd, to ``.grad`` and its hooks. So does one with another dtype than the tensor's.
        """

    def done(self) -> None:
        """The tensor holds the gradient now."""


class _Weight:
    """A weight whose matmuls are detected: a parameter, or a view of one."""

    parameter: ComputeParameter
    _plain: Callable[[], torch.Tensor]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():  # First, so that Dynamo traces only this.
            with as_plain_tensors():
                return func(*args, **kwargs)
        handler = _HANDLERS.get(func)
        if handler is not None and torch.is_grad_enabled():
            with as_plain_tensors():
                result = handler(func, *args, **kwargs)
            if result is not None:
                return result
        # As torch does for plain tensors and parameters.
        if len(types) > 1:  # Mostly one, and also of attributes, such as shape and dtype, which models read often.
            # Other subclasses come first: a DTensor knows what to do with a plain tensor, and this class knows no DTensors.
            others = tuple(other for other in types if not issubclass(other, _Weight))
            if others:
                return others[0].__torch_function__(func, others, args, kwargs)
        return nn.Parameter.__torch_function__(func, types, args, kwargs)

    def __repr__(self, **keywords: Any) -> str:
        return self._plain().__repr__(**keywords)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)


class ComputeParameter(_Weight, nn.Parameter):
    """A parameter whose gradient matmuls write into ``gradient_target``. Without a target it is an ordinary parameter.

    The matmuls are ``F.linear``, ``matmul``, ``mm``, ``bmm``, ``addmm`` and ``baddbmm`` (without factors): as functions,
    methods and operators. The weight, or a view of it, is the second factor: ``(in, out)``, or ``(experts, in, out)`` with an
    input of as many experts. Not ``einsum``, whose matmul takes long to find, nor the grouped matmul, which has no ``out=``.

    Results are plain tensors, except views. They are bitwise equal to those of a plain parameter, and so are the gradients of
    all other operands. If a weight is used once and as a whole, its first gradient is bitwise equal to autograd's, except in
    batched matmuls of its transpose. Sums of several gradients are rounded in another order. Double backward, autocast,
    functorch, forward-mode differentiation and other tensor classes are left to torch.

    A dtype that is not floating-point is a ValueError. Other differences to a plain parameter:

    - Operations on it take a few microseconds more.
    - The fast paths of ``nn.MultiheadAttention`` and ``nn.TransformerEncoderLayer`` for inference are not used.
    - Before torch 2.15, the first call of compiled code raises if it gets a view that eager code has made. Pass the parameter.
    - ``backward(inputs=...)`` with a parameter and views of it gives the views no gradient.
    """

    gradient_target: GradientTarget | None = None
    may_be_wide = False  # Its matmuls compute gradients in its own dtype.

    def __new__(cls, data: torch.Tensor, requires_grad: bool = True) -> ComputeParameter:
        if not data.is_floating_point():
            raise ValueError(f"ComputeParameter got a tensor of {data.dtype}: expected a floating-point dtype")
        return super().__new__(cls, data, requires_grad)

    @property
    def parameter(self) -> ComputeParameter:  # type: ignore[override]
        return self

    def _plain(self) -> torch.Tensor:
        return nn.Parameter(self.data, self.requires_grad)


class _WeightView(_Weight, torch.Tensor):
    """A view of a :class:`ComputeParameter` by one of ``_VIEWS``."""

    def _plain(self) -> torch.Tensor:
        return self.view_as(self)  # view_as is not one of _VIEWS.


class _Product(torch.autograd.Function):
    """One matmul by ``call``, which adds the bias: ``(m, in) x (in, out)``, of ``F.linear`` ``(out, in)``; or a batch."""

    @staticmethod
    def forward(ctx: Any, call: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        ctx.set_materialize_grads(False)  # An unused output has no gradient, and no products.
        # The weight itself, beside what autograd saves of it: hooks on saved tensors may return another one.
        ctx.weight, ctx.is_linear = weight, call is F.linear
        ctx.save_for_backward(x, weight if ctx.needs_input_grad[1] else None)
        if recomputation_ends(saves=1 + ctx.needs_input_grad[1]):
            # An activation checkpoint, which has the inputs that it needs: nothing reads this product.
            with no_dispatch():  # Selective checkpoints expect the operators of the first forward.
                return x.new_empty(1).expand(*x.shape[:-1], weight.shape[-2 if ctx.is_linear else -1])
        if bias is None:
            return call(x, weight)
        return call(x, weight, bias) if ctx.is_linear else call(bias, x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> Any:
        needs = ctx.needs_input_grad
        if gradient is None:
            return (None,) * len(needs)
        x, weight = ctx.saved_tensors  # This may run forward again, which needs torch functions enabled.
        with as_plain_tensors():
            multiply, add = (torch.mm, torch.Tensor.addmm_) if x.dim() == 2 else (torch.bmm, torch.Tensor.baddbmm_)
            of_weight, of_x = weight_gradient(ctx, x, gradient, multiply, add), None
            # A pass for the gradients of weights only, as in a pipeline schedule, needs none of the input.
            if needs[1] and (torch.compiler.is_compiling() or gradient_use(ctx.next_functions[0][0]) is not GradientUse.NONE):
                factor = weight if ctx.is_linear else weight.mT
                is_transposed = x.stride() == (1, x.shape[0])  # Then torch returns a transposed gradient, too.
                of_x = multiply(factor.mT, gradient.mT).mT if is_transposed else multiply(gradient, factor)
        return None, of_x, of_weight, *[gradient if need else None for need in needs[3:]]  # Autograd sums that of a bias.


_product = apply_of(_Product)


def weight_gradient(
    ctx: Any, x: torch.Tensor, gradient: torch.Tensor, multiply: Callable[..., Any], add: Callable[..., Any]
) -> torch.Tensor | None:
    """Write the gradient of ``ctx.weight`` to its target. If it has none, return the gradient, unless this pass needs none.

    ``ctx`` is of a node with the inputs ``x`` and ``ctx.weight``, which is ``(out, in)`` if ``ctx.is_linear``. ``multiply`` and
    ``add`` are ``mm`` and ``addmm_``, or what stands for them.
    """
    use = GradientUse.RETURNED
    if not torch.compiler.is_compiling():
        # Of ``ctx.weight``, and of the parameter that it may be a view of: if torch.autograd.grad returns the gradient of a
        # view, the parameter itself gets none.
        node = ctx.next_functions[1][0]
        use = of_weight = gradient_use(node)
        while of_weight is not GradientUse.NONE and node.next_functions:
            node = node.next_functions[0][0]
            use = gradient_use(node)
        use = use if use is of_weight else GradientUse.RETURNED
    if use is GradientUse.NONE:  # A pass for the gradients of inputs: a pipeline schedule computes this one later.
        return None
    weight, destination = ctx.weight, _destination(ctx) if use is GradientUse.ACCUMULATED else None
    rows, columns = (-1, -2) if ctx.is_linear else (-2, -1)  # in and out
    # As in the backward of ``mm``: of a weight that is stored transposed, the gradient is computed transposed.
    is_transposed = weight.stride(rows) == 1 and weight.stride(columns) == weight.shape[rows]
    if destination is None and multiply is torch.bmm:
        is_transposed = False  # The backward of bmm does not look at strides.
    first, second = (gradient.mT, x) if is_transposed else (x.mT, gradient)
    must_turn = is_transposed != ctx.is_linear
    if destination is None:
        product = multiply(first, second)
        return product.mT if must_turn else product
    view, holds_gradient, target = destination
    out = view.mT if must_turn else view
    if holds_gradient:
        add(out, first, second)
    else:
        multiply(first, second, out=out)
    target.done()
    return None


def _destination(ctx: Any) -> tuple[torch.Tensor, bool, GradientTarget] | None:
    """The tensor for the gradient of ``ctx.weight``, and whether to add to it. None: the gradient goes to autograd."""
    weight: _WeightView | ComputeParameter = ctx.weight
    parameter = weight.parameter
    target, is_whole = parameter.gradient_target, weight is parameter
    # A double backward needs a gradient with a graph. Under autocast, products have another dtype.
    if target is None or torch.is_grad_enabled() or is_autocast():
        return None
    # Hooks, and ``retain_grad`` of a view, must see a gradient.
    if parameter._backward_hooks or not (is_whole or (weight._backward_hooks is None and not weight.retains_grad)):
        return None
    if (begun := target.begin()) is None:
        return None
    whole, holds_gradient = begun
    if whole.dtype != weight.dtype:
        return None
    if is_whole:
        return whole, holds_gradient, target
    # The view of the gradient has the offset, shape and strides that ``weight`` has in the parameter, also after several views.
    if whole.stride() != parameter.stride():
        return None
    offset = whole.storage_offset() + weight.storage_offset() - parameter.storage_offset()
    view = whole.as_strided(weight.shape, weight.stride(), offset)
    if not holds_gradient and view.numel() < whole.numel():
        whole.zero_()  # The other parts may never get a gradient.
        holds_gradient = True
    return view, holds_gradient, target


# -- which calls are products ------------------------------------------------------------------------------------------
# A handler gets a call's arguments and returns its result, or None to leave the call to torch. If the arguments are wrong, it
# returns None, so that torch raises its own error.

_PLAIN_TYPES = {torch.Tensor, nn.Parameter, ComputeParameter, _WeightView}


def _is_product(weight: Any, x: Any, bias: Any = None) -> bool:
    return (
        isinstance(weight, _Weight)
        and weight.requires_grad  # type: ignore[attr-defined]
        and weight.parameter.gradient_target is not None
        and type(x) in _PLAIN_TYPES
        and (bias is None or type(bias) in _PLAIN_TYPES)
        and x.layout == torch.strided
        and not x.is_nested
        and not is_autocast()
        and not functorch_is_active()
        and forward_ad._current_level < 0
    )


def _linear(func: Any, input: Any = None, weight: Any = None, bias: Any = None, *others: Any) -> torch.Tensor | None:
    if others or not _is_product(weight, input, bias) or weight.dim() != 2 or input.dim() == 0:
        return None
    if bias is None:
        return _product_2d(F.linear, input, weight)
    if input.dim() <= 2 or input.is_contiguous():
        return _product_2d(F.linear, input, weight, bias)
    return _product_2d(F.linear, input, weight) + bias  # As torch does.


def _product_2d(call: Any, x: Any, weight: Any, *bias: Any) -> torch.Tensor:
    """The product of ``(..., in)`` and a 2-D weight. The input is flattened, as in torch, with a copy only if necessary."""
    if x.dim() == 2:
        return _product(call, x, weight, *bias)
    output = _product(call, x.flatten(0, -2) if x.dim() > 2 else x.unsqueeze(0), weight, *bias)
    return unsafe_view(output, (*x.shape[:-1], output.shape[-1]))


def _matmul(func: Any, *args: Any, **keywords: Any) -> torch.Tensor | None:
    if keywords or len(args) != 2 or not _is_product(args[1], args[0]):
        return None
    x, weight = args
    if weight.dim() == 2 and x.dim() > 0:
        return _product_2d(torch.mm, x, weight)
    is_batch = weight.dim() == x.dim() == 3 and x.shape[0] == weight.shape[0]  # Others broadcast: torch sums gradients then.
    return _product(torch.bmm, x, weight) if is_batch else None


def _mm(func: Any, *args: Any, **keywords: Any) -> torch.Tensor | None:
    if keywords or len(args) != 2 or not _is_product(args[1], args[0]):
        return None
    x, weight = args
    return _product(func, x, weight) if x.dim() == weight.dim() in (2, 3) else None


def _addmm(func: Any, *args: Any, **keywords: Any) -> torch.Tensor | None:
    if keywords or len(args) != 3 or not _is_product(args[2], args[1], args[0]):
        return None
    bias, x, weight = args
    return _product(func, x, weight, bias) if x.dim() == weight.dim() in (2, 3) else None


def _view(func: Any, *args: Any, **keywords: Any) -> Any:
    """Call ``func``; the views that it returns remember their parameter."""
    if not args or not isinstance(args[0], _Weight):
        return None
    result, parameter = func(*args, **keywords), args[0].parameter
    if parameter.gradient_target is not None:
        views: Any = (result,) if isinstance(result, torch.Tensor) else result
        for view in views:
            # Not a new object: autograd knows this one as a view of the parameter.
            view.__class__ = _WeightView
            view.parameter = parameter
    return result


def _getitem(func: Any, weight: Any, index: Any) -> torch.Tensor | None:
    indices = index if type(index) is tuple else (index,)
    is_view = all(type(part) in (int, slice) for part in indices)  # Others may copy.
    return _view(func, weight, index) if is_view else None


_T = torch.Tensor
_VIEWS = [torch.t, _T.t, torch.transpose, _T.transpose, torch.select, _T.select, torch.unbind, _T.unbind]
_VIEWS += [torch.narrow, _T.narrow, torch.chunk, _T.chunk, torch.split, _T.split, torch.permute, _T.permute, _T.view]
_VIEWS += [torch.squeeze, _T.squeeze, torch.unsqueeze, _T.unsqueeze]
_VIEWS += [_T.T.__get__, _T.mT.__get__]  # type: ignore[attr-defined]
_HANDLERS: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    **dict.fromkeys([torch.matmul, _T.matmul, _T.__matmul__], _matmul),
    **dict.fromkeys([torch.mm, _T.mm, torch.bmm, _T.bmm], _mm),
    **dict.fromkeys([torch.addmm, _T.addmm, torch.baddbmm, _T.baddbmm], _addmm),
    **dict.fromkeys(_VIEWS, _view),
    _T.__getitem__: _getitem,
}
