"""Helpers of all optimizers: local views of parameters, agreement on gradients, AdamW for parameter groups, state loading.

Only :func:`agree_on_gradients` communicates.
"""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.placement_types import Placement
from torch.optim.adamw import adamw

from torch_ragged._ranks.peers import peers_named
from torch_ragged._register._torch import dtensor_of
from torch_ragged.optim._gather import Placed
from torch_ragged.tensor._api import spec_of
from torch_ragged.tensor._cut_placement import cuts_of
from torch_ragged.tensor._redistribute import mesh_group
from torch_ragged.tensor.placement_types import normalize_placements

__all__ = [
    "STEP_NBYTES",
    "RaggedOptimizer",
    "add_scaled",
    "adamw_step",
    "agree_on_gradients",
    "by_mesh",
    "check_capture",
    "check_placement",
    "check_warm",
    "from_flat",
    "groups_on_host",
    "local",
    "local_shape_placed",
    "mesh_of",
    "names_peers",
    "new_step",
    "placed_of",
    "run_closure",
    "scalar",
    "zeros_placed",
]

_NONE, _PLACED, _ELSEWHERE, _SPARSE = range(4)
STEP_NBYTES = 4  # The step counter of a parameter, in float32.


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor of a DTensor; a plain tensor itself. The result shares memory with ``tensor``."""
    # detach() first: some callers, such as a memory report, run outside of no_grad(), where to_local() of a parameter would
    # record a graph.
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()  # type: ignore[attr-defined]


def mesh_of(tensor: torch.Tensor) -> DeviceMesh | None:
    """The mesh of a DTensor; None for a plain tensor."""
    return tensor.device_mesh if isinstance(tensor, DTensor) else None


def placed_of(param: torch.Tensor, placements: Sequence[Placement] | None = None) -> Placed:
    """How a parameter is cut over its mesh under ``placements``; by default, under its own placements."""
    if not isinstance(param, DTensor):
        return Placed(tuple(param.shape), (), ())
    mesh_shape = tuple(param.device_mesh.shape)
    normalized = normalize_placements(tuple(placements or param.placements), tuple(param.shape), mesh_shape)
    return Placed(tuple(param.shape), mesh_shape, cuts_of(normalized))


def zeros_placed(
    shape: tuple[int, ...], dtype: torch.dtype, mesh: DeviceMesh, placements: Sequence[Placement], param: torch.Tensor
) -> DTensor:
    """A DTensor of zeros of global ``shape``, on the device of ``param``, which offload may have moved. No communication."""
    numel = math.prod(local_shape_placed(shape, mesh, placements))
    return from_flat(torch.zeros(numel, dtype=dtype, device=param.device), shape, mesh, placements)


def from_flat(flat: torch.Tensor, shape: tuple[int, ...], mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """The DTensor of global ``shape`` whose local tensor is a view of the 1-D tensor ``flat``. No communication."""
    normalized = normalize_placements(tuple(placements), shape, tuple(mesh.shape))
    values = flat.view(local_shape_placed(shape, mesh, normalized))
    return dtensor_of(values, spec_of(mesh, normalized, torch.Size(shape), values.dtype))


def local_shape_placed(shape: tuple[int, ...], mesh: DeviceMesh, placements: Sequence[Placement]) -> tuple[int, ...]:
    """The shape of this rank's local tensor of a DTensor of global ``shape``."""
    mesh_shape, coordinate = tuple(mesh.shape), mesh.get_coordinate()
    if coordinate is None:  # This rank is not in the mesh.
        return (0,) * len(shape)
    cuts = cuts_of(normalize_placements(tuple(placements), shape, mesh_shape))
    return Placed(shape, mesh_shape, cuts).owned(tuple(coordinate)).local_shape


def scalar(value: float | torch.Tensor) -> float:
    """A hyperparameter as a float. It may be given as a tensor of one element."""
    return value.item() if isinstance(value, torch.Tensor) else value


def groups_on_host(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Copies of the parameter groups with ``lr`` as a float: a step waits for a device once per group, not per parameter.

    ``lr_dtype`` is the dtype of an ``lr`` that was given as a tensor, which rounds what is computed with it; otherwise None.
    A capturable group keeps the tensor: the device computes with what it holds then.
    """
    # Copies: the user's tensor stays in the group itself, because a scheduler or a graph writes to it between steps.
    found = []
    for group in optimizer.param_groups:
        lr = group["lr"] if group.get("capturable") else scalar(group["lr"])
        # A number of NumPy has a dtype, too.
        found.append({**group, "lr": lr, "lr_dtype": group["lr"].dtype if isinstance(group["lr"], torch.Tensor) else None})
    return found


def check_capture(optimizer: torch.optim.Optimizer, reads: str | None = None) -> bool:
    """Whether a CUDA graph captures the current stream.

    Args:
        reads: what the step would read on the host; None: nothing.

    Raises:
        RuntimeError: it does, and the graph would repeat numbers of this step. Nothing is changed.
    """
    if not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
        return False
    name = type(optimizer).__name__
    # One group without it is enough: its step count is a number of the host, so each replay would repeat the same bias
    # correction.
    if not all(group.get("capturable") for group in optimizer.param_groups):
        known = "capturable" in optimizer.defaults
        raise RuntimeError(
            f"{name}.step is captured in a CUDA graph, which would repeat the step count and lr of this step: "
            + (f"make {name} with capturable=True" if known else f"capture the step without {name}, and call it after a replay")
        )
    if any(isinstance(group["lr"], torch.Tensor) and group["lr"].is_cpu for group in optimizer.param_groups):
        reads = "its lr is a tensor on the CPU, whose number the graph would repeat: give a tensor on the device"
    if reads is not None:
        raise RuntimeError(f"{name}.step is captured in a CUDA graph, and {reads}")
    return True


def check_warm(optimizer: torch.optim.Optimizer, params: Iterable[torch.Tensor]) -> None:
    """Raise ``RuntimeError`` if a captured step would make states: each replay would make them anew. Nothing is changed."""
    if not all(optimizer.state.get(param) for param in params):
        raise RuntimeError(
            f"{type(optimizer).__name__}.step is captured in a CUDA graph before the first step of a parameter: take a step "
            "before the capture, with gradients on the same parameters"
        )


def new_step(param: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    """The step counter of ``param``, of no step yet."""
    # float32 counts exactly up to 2**24 steps, as torch's own counters do. If the default dtype is float64, torch's are, too.
    return torch.zeros((), dtype=torch.float32, device=_device_of_step(param, group))


def _device_of_step(param: torch.Tensor, group: dict[str, Any]) -> torch.device:
    """The device of ``param`` if the group is capturable, otherwise the CPU."""
    return param.device if group.get("capturable") else torch.device("cpu")


def by_mesh(params: Sequence[torch.Tensor]) -> Iterator[tuple[DeviceMesh | None, list[int]]]:
    """The indices of the parameters of each mesh, in order of first appearance. Meshes without this rank are left out."""
    # Equal meshes are one key, even if they are different objects. Then the process groups of the first one serve all: it is
    # the same one on all ranks, because parameters are in equal order.
    groups: dict[DeviceMesh | None, list[int]] = {}
    for index, param in enumerate(params):
        groups.setdefault(mesh_of(param), []).append(index)
    for mesh, indices in groups.items():
        if mesh is None or mesh.get_coordinate() is not None:
            yield mesh, indices


def _gradient_code(param: torch.Tensor) -> int:
    gradient = param.grad
    if gradient is None:
        return _NONE
    if gradient.is_sparse:
        return _SPARSE
    if isinstance(param, DTensor) and isinstance(gradient, DTensor) and gradient.placements != param.placements:
        return _ELSEWHERE
    return _PLACED


def agree_on_gradients(params: Sequence[torch.Tensor], agreed: Sequence[int] | None = None) -> list[torch.Tensor | None]:
    """The local gradient of each parameter; None if no rank has a gradient of it.

    If only some ranks have a gradient, it counts as zero on the others. If a gradient has other placements than its parameter,
    for example a Partial, it is redistributed.

    Issues one all-reduce (max) per mesh, of two int32 per parameter on this mesh and one further int32. The further number
    carries an unusable gradient of a plain parameter, or of a parameter on a smaller mesh, so that no rank starts a collective
    that other ranks do not join. Meshes are visited from small to large. If the largest mesh has the ranks of all others, every
    rank learns of every unusable gradient.

    Args:
        params: the parameters, equal and in equal order on all ranks of their meshes.
        agreed: the indices of the parameters that ranks agree on; None is all. Pass ``()``, which issues no all-reduce, if each
            gradient exists on all ranks or on none, as after a backward of ``fully_shard`` or on one device.

    Returns:
        one local tensor or None per parameter, in the order of ``params``.

    Raises:
        RuntimeError: a gradient is sparse; or it is missing on some ranks and has other placements than its parameter on other
            ranks. Every rank that shares a mesh raises it, before any gradient is redistributed.
    """
    # Assumed: if ranks have a gradient with other placements than its parameter, all of them have the same placements. Nothing
    # compares them, and with different ones the ranks would issue different collectives below.
    codes = [_gradient_code(param) for param in params]
    lowest = list(codes)
    agreed = range(len(params)) if agreed is None else agreed
    of_mesh = by_mesh([params[i] for i in agreed])
    meshes = [(mesh, [agreed[i] for i in indices]) for mesh, indices in of_mesh if mesh is not None]
    elsewhere = 0  # 1 + the index of an unusable gradient that another mesh has reported; 0 if there is none.
    # Sorted by size and, among equal sizes, in the order of the parameters: all ranks visit their shared meshes in equal order.
    for mesh, indices in sorted(meshes, key=lambda each: each[0].size()):
        if mesh.size() > 1:
            mine, unusable = [codes[i] for i in indices], _unusable(codes, lowest)
            values = [*mine, *(-code for code in mine), max(elsewhere, unusable + 1)]  # A max of -code gives the minimum.
            highest = torch.tensor(values, dtype=torch.int32, device=mesh.device_type)
            # One group of all mesh dimensions: one message instead of one per dimension. Every rank of the mesh is here, also
            # one without any gradient or without elements: the loop depends on parameters and meshes only.
            dist.all_reduce(highest, dist.ReduceOp.MAX, group=mesh_group(mesh, tuple(range(mesh.ndim))))
            # The host waits for the device here, once per mesh. So a captured step cannot agree.
            *found, elsewhere = highest.tolist()
            for i, index in enumerate(indices):
                codes[index], lowest[index] = found[i], -found[len(indices) + i]
    # Errors come after the last mesh: a rank that raises earlier would leave the ranks of the next mesh in its all-reduce.
    index = _unusable(codes, lowest)
    if index >= 0:
        what = f"parameter {index} of shape {tuple(params[index].shape)}"
        if codes[index] == _SPARSE:
            raise RuntimeError(f"{what} has a sparse gradient on some rank: this optimizer takes dense gradients only")
        raise RuntimeError(
            f"{what} has no gradient on some ranks, and on other ranks a gradient with other placements than the parameter: "
            "set it to None or to a DTensor on all ranks before step()"
        )
    if elsewhere:
        raise RuntimeError(
            f"another rank cannot use the gradient of its parameter {elsewhere - 1}: no rank steps. The error of that rank "
            "says why"
        )
    # Zeros where other ranks have a gradient: this rank's part belongs to the same matrix or block, so its states decay and its
    # weights shrink as theirs do. Redistributions happen in the order of parameters, on all ranks of a mesh.
    return [
        None if code == _NONE else torch.zeros_like(local(param)) if param.grad is None else _local_gradient(param)
        for param, code in zip(params, codes)
    ]


def _unusable(codes: Sequence[int], lowest: Sequence[int]) -> int:
    """The index of the first unusable gradient; -1 if there is none. Takes each one's highest and lowest code over ranks."""
    # A gradient that is elsewhere on one rank and missing on another one: the first rank would redistribute alone, and hang.
    pairs = enumerate(zip(codes, lowest))
    return next((i for i, (high, low) in pairs if high == _SPARSE or (high == _ELSEWHERE and low == _NONE)), -1)


def _local_gradient(param: torch.Tensor) -> torch.Tensor:
    """The local tensor of a dense gradient, redistributed to the placements of the parameter."""
    gradient = param.grad
    assert gradient is not None
    if isinstance(param, DTensor) and isinstance(gradient, DTensor) and gradient.placements != param.placements:
        gradient = gradient.redistribute(placements=param.placements)
    return local(gradient)


def check_numbers(name: str, group: dict[str, Any], *options: str) -> None:
    """Raise ``ValueError`` if one of these options is no number >= 0, or ``betas`` are not two numbers in [0, 1)."""
    for option in options:
        value = group[option]
        # ``not >=`` and not ``<``: NaN must raise, too.
        if not _is_number(value) or not value >= 0.0:
            raise ValueError(f"{name} {option} must be a number >= 0, got {value!r}")
    betas = group["betas"]
    is_pair = isinstance(betas, (tuple, list)) and len(betas) == 2
    if not is_pair or not all(_is_number(beta) and 0.0 <= beta < 1.0 for beta in betas):
        raise ValueError(f"{name} betas must be two numbers in [0, 1), got {betas!r}")


def _is_number(value: Any) -> bool:
    """Whether it is a real number, or a tensor of one element."""
    return isinstance(value, numbers.Real) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def check_placement(param: torch.Tensor, name: str) -> None:
    """Raise ``ValueError`` if ``param`` is a Partial DTensor: an update of unreduced values has no meaning."""
    if isinstance(param, DTensor) and any(isinstance(p, Partial) for p in param.placements):
        raise ValueError(
            f"{name} got a parameter with placements {param.placements}. A Partial cannot be a parameter: redistribute it first"
        )


def add_scaled(param: torch.Tensor, update: torch.Tensor, alpha: float | torch.Tensor, rounds_product: bool) -> None:
    """``param += alpha * update`` in place, with a result that does not depend on where a shard starts and ends.

    On CPU, torch rounds 16-bit elements differently if they do not fill a vector register. This concerns the last few elements
    of a tensor, and all elements of a strided tensor: for them, ``alpha * update`` is rounded before the addition. Here,
    ``rounds_product`` decides for all elements whether this product is rounded. If the dtypes differ, torch adds in float32 and
    rounds every element once, which needs no correction. A tensor as ``alpha`` is not read on the host.
    """
    if isinstance(alpha, torch.Tensor):  # At least in float32: a tensor without dimensions would be rounded to 16 bits.
        wide = torch.promote_types(param.dtype, torch.float32)
        param.copy_(param.to(wide).addcmul(update.to(wide), alpha.to(wide)))
        return
    if param.device.type != "cpu" or param.dtype not in (torch.bfloat16, torch.float16) or update.dtype != param.dtype:
        param.add_(update, alpha=alpha)
        return
    # As torch does: its CPU kernels round alpha to the dtype of 16-bit tensors before they multiply.
    alpha = torch.tensor(alpha, dtype=param.dtype, device="cpu").item()
    if rounds_product:
        param.copy_(param.float().add_((update.float() * alpha).to(param.dtype)))
    else:
        param.copy_(param.float().add_(update.float(), alpha=alpha))


def adamw_step(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    params: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None],
    *,
    eps: float,
) -> None:
    """One step of ``torch.optim.AdamW`` on the local tensors of a group of :func:`groups_on_host`.

    The states have the placements of their parameters.
    """
    # On local tensors: AdamW computes element by element, so it needs no other rank. Parameters of several meshes share one
    # call.
    active = [(param, gradient) for param, gradient in zip(params, gradients) if gradient is not None]
    states = [optimizer.state[param] for param, _ in active]
    for (param, _), state in zip(active, states):
        if "exp_avg" not in state:
            state["step"] = new_step(param, group)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
    beta1, beta2 = group["betas"]
    for is_cpu in (True, False):  # Torch's capturable step takes no parameters on the CPU.
        here = [i for i, (param, _) in enumerate(active) if param.is_cpu == is_cpu]
        is_capturable = bool(group.get("capturable")) and not is_cpu
        if here:
            adamw(
                [local(active[i][0]) for i in here],
                [active[i][1] for i in here],  # type: ignore[misc]
                [local(states[i]["exp_avg"]) for i in here],
                [local(states[i]["exp_avg_sq"]) for i in here],
                [],
                [states[i]["step"] for i in here],
                foreach=group["foreach"],
                capturable=is_capturable,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"] if is_capturable else scalar(group["lr"]),
                weight_decay=group["weight_decay"],
                eps=eps,
                maximize=False,
            )


class RaggedOptimizer(torch.optim.Optimizer):
    """An optimizer whose states need not have the parameter's dtype. Torch's ``load_state_dict`` would cast all of them to it.

    ``_knobs`` names further attributes that a pickle or a deep copy must contain, in addition to those of
    ``torch.optim.Optimizer``. ``unsaved_options`` of a group belong to the program, and are in no state dict.
    """

    has_equal_bits = True
    """Given equal gradients, states and parameters have equal bits on any number of ranks."""

    _knobs: tuple[str, ...] = ()
    unsaved_options = ("capturable",)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self._knobs}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # A pickle or a checkpoint of an older version may lack options: they get the defaults of this program.
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    def empty_state(
        self, param: DTensor, group: dict[str, Any], name: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> DTensor:
        """An uninitialized state of ``param``, placed where :meth:`step` takes it: for functions that move states to a mesh.

        No communication. This rank must be in the mesh of ``param``.

        Args:
            param: the parameter on its new mesh. The optimizer need not hold it yet.
            group: the parameter group that it is in.
            name, shape, dtype: of the state; ``shape`` is global.

        Raises:
            ValueError: the optimizer has no state of this name and shape.
        """
        if tuple(shape) != tuple(param.shape):
            raise ValueError(
                f"{type(self).__name__} has no state {name} of shape {tuple(shape)} for a parameter of {tuple(param.shape)}"
            )
        return torch.empty_like(param.detach(), dtype=dtype)  # type: ignore[return-value]

    def first_state_nbytes(self, param: torch.Tensor, group: dict[str, Any]) -> int:
        """The bytes of this rank's state of ``param`` after the first step, for ``memory_report``. No communication."""
        return 2 * local(param).nbytes + STEP_NBYTES  # Those of AdamW.

    def _state_shapes(self, param: torch.Tensor, group: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        """The global shapes of the states of ``param`` that :meth:`step` reads, by name, without the step counter."""
        return {name: tuple(param.shape) for name in ("exp_avg", "exp_avg_sq")}  # Those of AdamW.

    def _follows_dtype(self, group: dict[str, Any], name: str) -> bool:
        """Whether the state ``name`` of a parameter of ``group`` has the parameter's dtype. Other states have their own."""
        return name in ("exp_avg", "exp_avg_sq")  # Those of AdamW.

    def _check_states(self, state_dict: dict[str, Any]) -> None:
        """Raise if ``state_dict`` has the states of another optimizer. More states than this one reads are legal."""
        params = [param for group in self.param_groups for param in group["params"]]
        saved = [(index, group) for group in state_dict["param_groups"] for index in group["params"]]
        for param, (index, group) in zip(params, saved):
            states = state_dict["state"].get(index)
            if not states:
                continue
            found = {name: tuple(value.shape) for name, value in states.items() if isinstance(value, torch.Tensor)}
            is_cut = isinstance(param, DTensor) and not all(each.is_replicate() for each in param.placements)
            whole = [name for name, value in states.items() if found.get(name) and type(value) is torch.Tensor]
            if is_cut and whole:  # A step would take this rank's part for the whole one's, in silence.
                raise ValueError(
                    f"{type(self).__name__}.load_state_dict got plain tensors as {', '.join(whole)} of parameter {index}, "
                    "which is sharded: load them with torch_ragged.checkpoint.load, or with set_state_dict of "
                    "torch.distributed.checkpoint.state_dict, or distribute each as its parameter first"
                )
            for name, shape in self._state_shapes(param, {**self.defaults, **group}).items():
                if found.get(name) != shape:
                    given = f"of shape {found[name]}" if name in found else f"missing: there are {', '.join(states)}"
                    raise ValueError(
                        f"{type(self).__name__}.load_state_dict expects {name} of shape {shape} for parameter {index} of shape "
                        f"{tuple(param.shape)}, which is {given}. Load the state dict of an optimizer of this class with these "
                        "options, or train without loading one"
                    )

    def state_dict(self) -> dict[str, Any]:
        """As ``torch.optim.Optimizer.state_dict``, without ``capturable``, and with the ``lr`` of such a group as a number."""
        found = super().state_dict()
        for group in found["param_groups"]:
            if group.pop("capturable", None):
                group["lr"] = scalar(group["lr"])
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as ``torch.optim.Optimizer.load_state_dict`` does, but keep ``capturable``, and the dtypes of quantized states.

        A capturable group keeps its tensor of ``lr``, and gets the number into it. States are new: capture again.

        Raises:
            ValueError: ``state_dict`` is of another optimizer, or of other options. Nothing is changed.
        """
        own = [(group.get("capturable"), group["lr"]) for group in self.param_groups]
        given: list[dict[str, Any]] = []

        def check(_: Any, loaded: dict[str, Any]) -> None:
            # Before torch changes groups and states: an error must leave the optimizer as it was. And behind the hooks of the
            # user, which may have renamed states.
            self._check_states(loaded)
            given.append(loaded)

        # The second one before hooks of the user, which may change what was loaded.
        handles = [
            self.register_load_state_dict_pre_hook(check),
            self.register_load_state_dict_post_hook(lambda _: self._complete_load(given[0], own), prepend=True),
        ]
        try:
            super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()

    def _complete_load(self, state_dict: dict[str, Any], own: Sequence[tuple[Any, Any]]) -> None:
        """What torch has not loaded as this optimizer needs it. ``own``: ``capturable`` and ``lr`` of each group before."""
        for group, (is_capturable, lr) in zip(self.param_groups, own):
            # It belongs to the program, not to what was saved, as does the tensor that a graph reads.
            group.pop("capturable", None)
            if is_capturable is not None:
                group["capturable"] = is_capturable
            if is_capturable and isinstance(lr, torch.Tensor):
                group["lr"] = lr.fill_(scalar(group["lr"]))
        # Torch has cast all states to the dtype of the parameter by now, codes of a byte, too. These casts are freed one by one
        # below, so for a moment they exist beside the states that replace them.
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        params = [(param, group) for group in self.param_groups for param in group["params"]]
        for index, (param, group) in zip(saved, params):
            for name, value in state_dict["state"].get(index, {}).items():
                if isinstance(value, torch.Tensor):  # A copy, so that the step counters are not shared with ``state_dict``.
                    device = param.device if name != "step" else _device_of_step(param, group)
                    dtype = param.dtype if self._follows_dtype(group, name) else value.dtype
                    self.state[param][name] = value.to(device, dtype, copy=True)


def names_peers(step: Callable[..., Any]) -> Callable[..., Any]:
    """The method ``step``, which raises a PeerError that names the ranks if one of its collectives fails."""

    @functools.wraps(step)
    def named(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        def ranks() -> list[int]:
            meshes = {mesh_of(param) for group in self.param_groups for param in group["params"]} - {None}
            return sorted({rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()})  # type: ignore[union-attr]

        # ``ranks`` is a function: it is called if a collective fails, not in each step.
        with peers_named(f"{type(self).__name__}.step", "", ranks):
            return step(self, *args, **kwargs)

    return named


def run_closure(closure: Callable[[], Any] | None) -> Any:
    """Call ``closure`` with gradients enabled and return its loss; None without a closure."""
    if closure is None:
        return None
    # step() runs in no_grad(), and a closure runs backward.
    with torch.enable_grad():
        return closure()
