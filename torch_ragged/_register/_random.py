"""What single_device changes in torch while it is on. An import changes nothing of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._C._dynamo import eval_frame
from torch._subclasses.fake_tensor import FakeTensorConverter, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import _api as dtensor_api
from torch.utils._python_dispatch import return_and_correct_aliasing

from torch_ragged._register._hook import OPERATORS, Hook, extend_in_place, has, hooks
from torch_ragged.tensor._placement_extension import extension_of, item_of_own_rank
from torch_ragged.tensor._single_device import draw_new, handle_random_op, random_ops

__all__ = ["check_before_init", "forget_tensors", "handle_random_ops"]

hooks.append(
    Hook(
        "OpDispatcher._custom_op_handlers, _api._dtensor_init_helper, while torch_ragged.random.single_device is on",
        "random ops on plain DTensors draw the numbers of a single device; torch's own depend on the number of ranks",
        OPERATORS,
        lambda: (
            isinstance(getattr(DTensor._op_dispatcher, "_custom_op_handlers", None), dict)
            and has(dtensor_api._dtensor_init_helper, "init_op", "size", "device_mesh", "placements", "kwargs")
        ),
        install=None,  # ``handle_random_ops`` installs and removes it.
    )
)
hooks.append(
    Hook(
        "FakeTensorMode.fake_tensor_converter.meta_converter.tensor_memo, while deferred_init records",
        "Module.to swaps parameters, which weak references prevent",
        OPERATORS,
        # A mode is not made here: it imports Dynamo, which takes longer than all of this package.
        lambda: (
            "fake_tensor_converter" in FakeTensorMode.__init__.__code__.co_names
            and hasattr(FakeTensorConverter().meta_converter, "tensor_memo")
        ),
        install=None,  # ``forget_tensors`` clears it.
    )
)
_SKIP_META = ("_no_grad_trunc_normal_", "dirac_", "orthogonal_", "sparse_")
hooks.append(
    Hook(
        f"torch.nn.init.{{{', '.join(_SKIP_META)}}}, after the first deferred_init",
        "they return at once for a tensor on the meta device; one of a shard whose writes are noted is an error",
        OPERATORS,
        lambda: all(has(getattr(nn.init, name, None), "tensor") for name in _SKIP_META),
        install=None,  # ``check_before_init`` installs it.
    )
)
_TRANSPOSE, _ITEM = torch.ops.aten.t_.default, torch.ops.aten._local_scalar_dense.default
_checks_made: list[Any] = []
_original_initializer: list[Any] = []
"""torch's factory helper, while it is replaced."""


def handle_random_ops(mode: bool) -> None:
    """Let random ops and factories of plain DTensors draw the numbers of a single device, or as torch does."""
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    if mode and not _original_initializer:
        for op in random_ops():
            if handlers.get(op) in (None, item_of_own_rank):  # item() may have that of spmd.parallelize.
                handlers[op] = handle_random_op
        handlers[_TRANSPOSE] = _transpose_in_place
        skip = eval_frame._FrameAction.SKIP  # Between two graphs, Dynamo would compile it.
        eval_frame.set_code_exec_strategy(handle_random_op.__code__, eval_frame._FrameExecStrategy(skip, skip))
        _original_initializer.append(dtensor_api._dtensor_init_helper)
        dtensor_api._dtensor_init_helper = _drawing_initializer(_original_initializer[0])
    elif not mode and _original_initializer:
        for op in random_ops():
            if handlers.get(op) is handle_random_op:
                del handlers[op]
        handlers.setdefault(_ITEM, item_of_own_rank)
        del handlers[_TRANSPOSE]
        dtensor_api._dtensor_init_helper = _original_initializer.pop()


def _transpose_in_place(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``t_``, which ``nn.init.orthogonal_`` calls on tensors of its own. DTensor has no rule for it."""
    (tensor,), transposed = args, args[0].t()
    tensor._local_tensor, tensor._spec = transposed._local_tensor, transposed._spec
    # It gives the tensor itself the new shape and strides.
    return return_and_correct_aliasing(op, args, kwargs, tensor)


def _drawing_initializer(original: Any) -> Any:
    @functools.wraps(original)
    def make(init_op, size, device_mesh=None, placements=None, **options):  # type: ignore[no-untyped-def]
        is_plain = placements is None or extension_of(placements) is None
        if not is_plain or init_op not in (torch.rand, torch.randn):
            return original(init_op, size, device_mesh, placements, **options)
        mesh = device_mesh or dtensor_api._mesh_resources.get_current_mesh()
        return draw_new(init_op, size, mesh, placements, **options)

    return make


def check_before_init(check: Callable[[str, Any], None]) -> None:
    """Call ``check(name, tensor)`` in those functions of ``torch.nn.init`` that do nothing to a tensor on the meta device."""

    def checked(original: Any) -> Any:
        def init(tensor: Any, *args: Any) -> Any:
            check(original.__name__, tensor)
            return original(tensor, *args)

        return init

    if not _checks_made:
        for name in _SKIP_META:
            extend_in_place(getattr(nn.init, name), "tensor.is_meta", checked)
        _checks_made.append(check)


def forget_tensors(mode: FakeTensorMode) -> None:
    """Drop the mode's weak references to fake tensors, with which ``Module.to`` could not swap parameters."""
    mode.fake_tensor_converter.meta_converter.tensor_memo.clear()
