"""FSDPGrad: the ``.grad`` of a parameter while some of its gradients are not reduced over all ranks yet."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial
from torch.utils import _pytree as pytree

from torch_ragged.fsdp.core._dbuffer import Borrowed, DBuffer
from torch_ragged.fsdp.core._grad_reduction import GradReduction

__all__ = ["FSDPGrad", "UnsynchronizedView"]

_SCALES = {"aten::mul_": "mul_", "aten::div_": "div_", "aten::_foreach_mul_": "mul_", "aten::_foreach_div_": "div_"}
_ZEROS = ("aten::zero_", "aten::_foreach_zero_")
_ALIASES = ("aten::detach", "aten::alias")


class UnsynchronizedView:
    """While gradients of a group wait for a later reduction, it sets ``.grad`` of its parameters, and is read by them."""

    has_memory = True  # If not, ``zero_()`` drops the gradient, as nothing is to be filled.

    def __init__(self, reduction: GradReduction, holds_unreduced: bool) -> None:
        self._reduction, self._holds_unreduced = reduction, holds_unreduced
        self._shown: dict[int, Any] = {}  # By parameter. The same parameters on all ranks.
        self._copy: DBuffer | None = None  # What reading one of them has reduced. Equal on all ranks: reading is collective.
        # Also of parameters that this rank has not used: another rank may have, and reading is a collective of all of them.
        for index, param in enumerate(reduction.params):
            sharded: Any = param.sharded
            if sharded.requires_grad:
                self._show(index, sharded)

    def _show(self, index: int, sharded: Any) -> None:
        dtype = sharded.grad_dtype or self._reduction.buffer.reduce_dtype
        sharded.grad = self._shown[index] = FSDPGrad(self, index, sharded, dtype, sharded.grad)

    def take_back(self) -> None:
        self._copy, shown, self._shown = None, self._shown, {}
        for index, grad in shown.items():
            param = self._reduction.params[index]
            sharded: Any = param.sharded
            if isinstance(sharded.grad, FSDPGrad) and (sharded.grad._source, sharded.grad._index) == (self, index):
                sharded.grad = grad.reduced
                continue
            # The program has set another gradient, or None: that replaces the parts which wait, too.
            for part in self.local_components(index).values():
                part.zero_()
            param.has_gradient, param.was_used, param.pending = False, False, None

    def reduced(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        return gradient.reduced if isinstance(gradient, FSDPGrad) else gradient

    def shows(self, index: int) -> bool:
        return index in self._shown

    def is_incomplete(self, index: int) -> bool:
        return isinstance(self._reduction.params[index].sharded.grad, FSDPGrad)

    # -- what an FSDPGrad asks -------------------------------------------------------------------------------------

    is_published = shows

    def why_not_published(self) -> str:
        return "this FSDPGrad is out of date: a later backward or synchronization has begun. Read .grad again"

    def local_components(self, index: int) -> dict[str, torch.Tensor]:
        """The memory of "unreduced" and "partial", those that exist. Writing to it changes what is reduced later."""
        parts, reduction = {}, self._reduction
        if (unreduced := reduction.buffer.accumulated(index)) is not None:
            parts["unreduced"] = unreduced
        if reduction.kept is not None:
            begin, end = reduction.intervals[index]
            parts["partial"] = reduction.kept.flat[begin:end]
        return parts

    def component(self, index: int, name: str) -> DTensor | None:
        """ "unreduced" or "partial" as a DTensor; None if there is none."""
        part, param = self.local_components(index).get(name), self._reduction.params[index]
        if part is None:
            return None
        sums = Partial("avg" if self._reduction.settings.reduction.divisor is None else "sum")
        if name == "unreduced":
            return param.distribution.unreduced(part, param.pending or (), sums)
        return param.distribution.partial(part, param.sharded, sums)  # type: ignore[arg-type]

    def note_change(self) -> None:
        self._copy = None

    def reduced_copy(self, index: int, dtype: torch.dtype) -> DTensor:
        """Collective: what is pending, reduced over all ranks."""
        reduction = self._reduction
        if reduction.settings.reduce_hook is not None:
            raise RuntimeError(
                "reading a gradient that is not synchronized would call the hook of set_all_reduce_hook, or leave it out: call "
                "synchronize_gradients() on every rank first"
            )
        # One reduction for all parameters of the group. All ranks have a copy or none, as all of them read, and change, alike.
        if self._copy is None:
            self._copy = reduction.reduced_copy(_unreduced(reduction) if self._holds_unreduced else None)
        begin, end = reduction.intervals[index]
        flat = self._copy.flat[begin:end].to(reduction.sharded.flat.device, dtype, copy=True)
        return reduction.gradient(reduction.params[index], flat)


def _unreduced(reduction: GradReduction) -> DBuffer:
    """A copy of the gradient buffer in ``reduce_dtype``, with zeros where this rank has no gradient."""
    buffer, like = reduction.buffer, reduction.sharded
    flat = torch.zeros(like.layout.numel, dtype=buffer.reduce_dtype, device=buffer.device)
    copy = DBuffer(like.layout, Partial(), like.rank, flat.dtype, flat.device, pool=Borrowed(flat))
    for index in range(len(reduction.params)):
        if (view := buffer.accumulated(index)) is not None:
            copy.tensor(index).copy_(view)
    return copy


class FSDPGrad(torch.Tensor):
    """A gradient of which a part is not reduced over all ranks yet. It is ``.grad`` after a backward without gradient sync.

    Example::

        model.set_requires_gradient_sync(False)
        model(micro_batch).sum().backward()       # no collective of gradients
        model.weight.grad                         # an FSDPGrad: an optimizer's step would raise
        model.synchronize_gradients()             # on every rank
        model.weight.grad                         # a DTensor, as after a backward with gradient sync

    ==============  =====================================  =======================  ================================
    component       it is                                  dtype                    placements (HSDP)
    ==============  =====================================  =======================  ================================
    ``reduced``     ``.grad`` before the first such pass   ``grad_dtype``           of the parameter
    ``unreduced``   this rank's sum over such passes       ``reduce_dtype``         ``(Partial, Partial)``
    ``partial``     reduced within the replica             ``reduce_dtype``         ``(Partial, RaggedShard)``
    ==============  =====================================  =======================  ================================

    Partial is ``Partial("avg")``, or ``Partial("sum")`` if a gradient divide factor is set. A component is None if there is no
    such part on this rank. The gradient is the sum of all three, reduced: of the parameter's shape, device and ``grad_dtype``.

    - Reading it, on every rank, reduces a copy: ``materialize()``, ``full_tensor()``, ``redistribute()``, ``clone()``, norms.
      Later reads in the group use the result, until a component changes.
    - Scaling it, or setting it to zeros, acts on each component, alike on every rank. ``GradScaler.unscale_`` reads, too.
    - ``param.grad = None`` drops all components. So does another tensor, which replaces them.
    - All else raises ``RuntimeError``: other writes, views, ``to_local()``, ``placements``, an optimizer's step, and any use
      after the next backward has begun.

    The class and its words are those that torch's FSDP has in its main branch (2026). There, it is a DTensor, and
    ``to_local()`` reads by a collective. Here it is not: torch 2.11 sends some operations on subclasses to DTensor's own code.
    """

    reduced: DTensor | None
    _source: UnsynchronizedView
    _index: int
    _sharded: DTensor

    @staticmethod
    def __new__(
        cls, source: UnsynchronizedView, index: int, sharded: DTensor, dtype: torch.dtype, reduced: DTensor | None
    ) -> FSDPGrad:
        # No memory of its own: components lie in the buffers of the group, so that their reduction copies nothing.
        self = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, sharded.shape, strides=sharded.stride(), dtype=dtype, device=sharded.device, requires_grad=False
        )
        self._source, self._index, self._sharded, self.reduced = source, index, sharded, reduced
        return self

    def __init__(self, *args: Any) -> None:
        pass  # __new__ has set all; that of torch.Tensor takes no arguments.

    # -- what it is ------------------------------------------------------------------------------------------------

    @property
    def unreduced(self) -> DTensor | None:
        """This rank's sum over passes without gradient sync. It shares the memory of the group where the layout allows."""
        return self._live().component(self._index, "unreduced")

    @property
    def partial(self) -> DTensor | None:
        """The shard that is reduced within this replica only (HSDP, ``set_requires_all_reduce(False)``)."""
        return self._live().component(self._index, "partial")

    def local_components(self) -> dict[str, torch.Tensor]:
        """The memory of each component, in the form of the group's buffer. No collective."""
        parts = {} if self.reduced is None else {"reduced": self.reduced._local_tensor}
        return {**parts, **self._live().local_components(self._index)}

    @property
    def has_memory(self) -> bool:
        """Whether the memory of the components is still theirs."""
        return self._source.has_memory

    def _live(self) -> UnsynchronizedView:
        # Its components may hold the gradients of the next pass already.
        if not self._source.is_published(self._index):
            raise RuntimeError(self._source.why_not_published())
        return self._source

    def _refusal(self, what: str) -> RuntimeError:
        self._live()
        return _refusal(what)

    # -- reading ---------------------------------------------------------------------------------------------------

    def materialize(self) -> DTensor:
        """The complete gradient, placed as the parameter, in new memory. Collective: see the class."""
        with torch.no_grad():
            # On all ranks, also if this rank has no component: another rank may have one.
            pending = self._live().reduced_copy(self._index, self.dtype)
            if self.reduced is None:
                return pending
            result: Any = self.reduced.clone().add_(pending)  # In this order, as the reduction adds to ``.grad``.
            return result

    def full_tensor(self, **kwargs: Any) -> torch.Tensor:
        """The complete gradient as a plain tensor. Collective."""
        return self.materialize().full_tensor(**kwargs)

    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:
        """The complete gradient with other placements. Collective."""
        return self.materialize().redistribute(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        if not self._source.is_published(self._index):
            return f"FSDPGrad(shape={tuple(self.shape)}: {self._source.why_not_published()})"
        parts = ", ".join(f"{name} {tuple(part.shape)} {part.dtype}" for name, part in self.local_components().items())
        return f"FSDPGrad(shape={tuple(self.shape)}, dtype={self.dtype}, local components: {parts or 'none'})"

    # -- what cannot be said of several components -----------------------------------------------------------------

    @property
    def placements(self) -> Any:
        raise self._refusal("placements")

    def to_local(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise self._refusal("to_local()")

    def __tensor_flatten__(self) -> Any:
        """For torch's debug modes, which look at the tensors inside."""
        names = ("reduced", "unreduced", "partial") if self._source.is_published(self._index) else ("reduced",)
        return [name for name in names if getattr(self, name) is not None], None

    @staticmethod
    def __tensor_unflatten__(*args: Any) -> Any:
        raise _refusal("torch.compile")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise self._refusal("pickle and deepcopy")

    def data_ptr(self) -> int:
        raise self._refusal("data_ptr()")

    def untyped_storage(self) -> Any:
        raise self._refusal("untyped_storage()")

    # -- operations ------------------------------------------------------------------------------------------------

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        name, kwargs = func._schema.name, kwargs or {}
        if name in _ALIASES:  # ``grad.detach()`` and ``.data`` show the same components.
            grad = args[0]
            return FSDPGrad(grad._source, grad._index, grad._sharded, grad.dtype, grad.reduced)
        if name == "aten::detach_":
            return args[0]
        # Factors are linear: each component is scaled by itself, on each rank, and their reduced sum is scaled, too.
        is_foreach = name.startswith("aten::_foreach")
        written, result = (args[0], None) if is_foreach else (args[:1], args[0])
        if name in _ZEROS or (name == "aten::fill_" and not isinstance(args[1], torch.Tensor) and args[1] == 0):
            return _on_each(written, "zero_", [()] * len(written), result)
        if name in _SCALES and not kwargs and not isinstance(args[1], FSDPGrad):
            factors = args[1] if isinstance(args[1], (list, tuple)) else [args[1]] * len(written)
            return _on_each(written, _SCALES[name], [(_scalar(factor),) for factor in factors], result)
        if name == "aten::_amp_foreach_non_finite_check_and_unscale_":
            return _unscale(func, *args, **kwargs)
        for grad in written:  # Before the refusal: if one is out of date, that is the reason to tell.
            if isinstance(grad, FSDPGrad):
                grad._live()
        # A write or a view would reach one component only.
        if func._schema.is_mutable or any(result.alias_info is not None for result in func._schema.returns):
            raise _refusal(str(func))
        copies: dict[int, DTensor] = {}  # An operand may come twice, as in ``grad * grad``: one reduction for both.

        def read(value: Any) -> Any:
            if isinstance(value, FSDPGrad) and id(value) not in copies:
                copies[id(value)] = value.materialize()
            return copies.get(id(value), value)

        args, kwargs = pytree.tree_map(read, (args, kwargs))
        return func(*args, **kwargs)


def _refusal(what: str) -> RuntimeError:
    return RuntimeError(
        f"{what} of a gradient that is not synchronized: some of it is not reduced over all ranks yet (a backward ran with "
        "set_requires_gradient_sync(False), set_requires_all_reduce(False) or set_is_last_backward(False)). Call "
        "synchronize_gradients() of the root module on every rank first"
    )


def _scalar(factor: Any) -> Any:
    if isinstance(factor, DTensor):
        factor = factor.full_tensor()
    if isinstance(factor, torch.Tensor) and factor.numel() != 1:
        raise _refusal(f"scaling by a tensor of shape {tuple(factor.shape)}, which is not a number,")
    return factor


def _on_each(written: Any, operation: str, operands: list[tuple[Any, ...]], result: Any) -> Any:
    for grad, values in zip(written, operands):
        if operation == "zero_" and isinstance(grad, FSDPGrad) and not grad.has_memory:
            if grad._sharded.grad is grad:  # So that zero_grad(set_to_none=False) does what zero_grad() does.
                grad._sharded.grad = None
            continue
        parts = grad.local_components().values() if isinstance(grad, FSDPGrad) else [grad]
        for part in parts:
            # With offload, the reduced part is on the CPU, and the others are not.
            here = [value.to(part.device) if isinstance(value, torch.Tensor) else value for value in values]
            getattr(part, operation)(*here)
        if isinstance(grad, FSDPGrad):
            grad._source.note_change()
    return result


def _unscale(func: Any, grads: Any, found_inf: torch.Tensor, factor: torch.Tensor) -> None:
    """Of GradScaler: look for infinities in complete gradients, and scale the components."""
    # Components are scaled, not these copies. All ranks find the same infinities: they read the same sums.
    func([grad.materialize() if isinstance(grad, FSDPGrad) else grad for grad in grads], found_inf, factor)
    mine = [grad for grad in grads if isinstance(grad, FSDPGrad)]
    _on_each(mine, "mul_", [(_scalar(factor),)] * len(mine), None)
