"""FSDP2's contract as small programs on 4 ranks: each runs with torch's ``fully_shard`` or with ours, and checks no value.

A program gets ``fsdp``, the module that has ``fully_shard`` and what belongs to it: ``torch.distributed.fsdp`` or
``torch_ragged.fsdp``. It uses what FSDP2's documentation names, and no name that only one of the two has.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as dcp
import torch.distributed.fsdp
import torch.utils._pytree as pytree
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

__all__ = ["PROGRAMS", "RANKS"]

RANKS = 4
WIDTH = 8
BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


# -- models and steps ------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A residual block with a buffer and a second forward. ``reentrant``: None, or how it is checkpointed inside."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))
        self.reentrant = reentrant

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """For ``register_fsdp_forward_method``."""
        return x + self.scale.to(x.dtype) * self.down(torch.relu(self.up(self.norm(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.logits(x) if self.reentrant is None else checkpoint(self.logits, x, use_reentrant=self.reentrant)


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))


def _replicas() -> DeviceMesh:
    return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))


def _blocks(number: int = 3, **options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(**options) for _ in range(number)), nn.Linear(WIDTH, WIDTH))


def _shard(fsdp: ModuleType, model: Any, mesh: DeviceMesh, **knobs: Any) -> Any:
    """A group per block, and the root."""
    for block in model[:-1]:
        fsdp.fully_shard(block, mesh=mesh, **knobs)
    return fsdp.fully_shard(model, mesh=mesh, **knobs)


def _batch(step: int = 0) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def _backward(model: Any, step: int = 0) -> None:
    model(_batch(step)).float().pow(2).mean().backward()


def _train(model: Any, steps: int = 3, backward: Callable[[Any, int], None] = _backward) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=0.01)
    for step in range(steps):
        backward(model, step)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


# -- programs --------------------------------------------------------------------------------------------------------------


def bf16_loop(fsdp: ModuleType) -> None:
    """Mixed precision; evaluation between steps; a matrix that is not tiny, as those of real models."""
    wide = nn.Sequential(nn.Linear(WIDTH, 256), nn.Linear(256, 256), nn.Linear(256, WIDTH))
    _train(_shard(fsdp, wide, _mesh(), mp_policy=BF16))
    model = _blocks()
    for block in model[:-1]:
        fsdp.fully_shard(block, mesh=_mesh(), mp_policy=BF16)
    fsdp.fully_shard(model, mesh=_mesh(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32))
    _train(model)
    with torch.no_grad():
        model.eval()(_batch())
    _train(model.train(), steps=1)
    model = fsdp.fully_shard(_blocks(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=False))
    _train(model, backward=lambda model, step: model(_batch(step).bfloat16()).sum().backward())


def hsdp(fsdp: ModuleType) -> None:
    """Replicas of shards; micro-batches that are not reduced, or within a replica only."""
    for policy in (MixedPrecisionPolicy(), BF16):
        model = _shard(fsdp, _blocks(), _replicas(), mp_policy=policy)
        _train(model)
        for step, (reduces, over_replicas) in enumerate([(True, False), (True, False), (False, False), (True, True)]):
            model.set_requires_gradient_sync(reduces)
            model.set_requires_all_reduce(over_replicas)
            _backward(model, step)


def neighbours(fsdp: ModuleType) -> None:
    """``reshard_after_forward=2``: backward all-gathers among two ranks."""
    for policy in (MixedPrecisionPolicy(), BF16):
        model = _shard(fsdp, _blocks(), _mesh(), reshard_after_forward=2, mp_policy=policy)
        _train(model)
        model(_batch())
        model.reshard()
        model.set_reshard_after_forward(True)
        _train(model)


def prefetch(fsdp: ModuleType) -> None:
    """Which all-gathers are issued ahead, in forward and backward, as users say."""
    model = _shard(fsdp, _blocks(4), _mesh(), mp_policy=BF16)
    for index, block in enumerate(model[:-1]):
        block.set_modules_to_forward_prefetch(list(model[index + 1 : index + 3])[: 3 - index])
        block.set_modules_to_backward_prefetch(list(model[max(index - 2, 0) : index])[::-1])
    _train(model)


def cpu_offload(fsdp: ModuleType) -> None:
    """Shards, gradients and optimizer on the CPU; micro-batches; a load."""
    offload = fsdp.CPUOffloadPolicy(pin_memory=False)
    for policy in (MixedPrecisionPolicy(), BF16):
        model = _shard(fsdp, _blocks(), _mesh(), offload_policy=offload, mp_policy=policy)
        _train(model)
        for step in range(2):
            _backward(model, step)
        model.load_state_dict(model.state_dict())


def shard_placements(fsdp: ModuleType) -> None:
    """``Shard(1)`` for matrices, and a mesh of its own for one parameter."""
    for mesh in (_mesh(), _replicas()):
        model = _shard(fsdp, _blocks(), mesh, shard_placement_fn=lambda param: Shard(param.ndim - 1), mp_policy=BF16)
        _train(model)
        model.load_state_dict(model.state_dict())
    info = FSDPMeshInfo(_replicas(), shard_mesh_dim=1)
    model = _blocks(1)

    def place(param: nn.Parameter) -> ShardPlacementResult | None:
        return ShardPlacementResult(Shard(0), info) if param is model[0].up.weight else None

    fsdp.fully_shard(model, mesh=_mesh(), shard_placement_fn=place)
    for step in range(2):
        _backward(model, step)


class Coded(torch.Tensor):
    """A float32 matrix that is all-gathered as bfloat16, beside one number of each rank."""

    plain: torch.Tensor

    @staticmethod
    def __new__(cls, plain: torch.Tensor) -> Coded:
        made = torch.Tensor._make_wrapper_subclass(cls, plain.shape, plain.stride(), dtype=plain.dtype, device=plain.device)
        made.plain = plain
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inner = pytree.tree_map_only(cls, lambda coded: coded.plain, (args, kwargs or {}))
        out = func(*inner[0], **inner[1])
        name = func.overloadpacket.__name__
        if name.endswith("_") and not name.endswith("__") and isinstance(args[0], cls):
            return args[0]
        moves = (
            "split",
            "slice",
            "view",
            "as_strided",
            "clone",
            "detach",
            "new_zeros",
            "empty_like",
            "_to_copy",
            "narrow",
            "alias",
        )
        return pytree.tree_map_only(torch.Tensor, cls, out) if name in (*moves, "zeros_like", "view_as") else out

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["plain"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], metadata: Any, size: Any, stride: Any) -> Coded:
        return Coded(inner["plain"])

    def fsdp_pre_all_gather(self, mesh: DeviceMesh, size: Any, stride: Any, module: nn.Module, policy: Any) -> Any:
        """What is sent."""
        return (self.plain.bfloat16(), torch.ones(1)), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        """The matrix to compute with; again into the same memory, if there is ``out``."""
        if out is None:
            made = outputs[0].float()
            return made, (made,)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(outputs[0].float())
        return None


class Direct(Coded):
    """Computes with what was all-gathered. It does not ask for the module."""

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> Any:  # type: ignore[override]
        """What is sent."""
        return (self.plain,), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        """The matrix as it came."""
        return None if out is not None else (outputs[0], outputs)


def tensor_extensions(fsdp: ModuleType) -> None:
    """Tensor types that say what is all-gathered."""
    for kind in (Coded, Direct):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        for linear in model:
            linear.weight = nn.Parameter(kind(linear.weight.detach().clone()))
        _shard(fsdp, model, _mesh())
        for step in range(3):
            _backward(model, step)
            with torch.no_grad():
                for param in model.parameters():
                    param.to_local().add_(param.grad.to_local(), alpha=-0.1)
            model.zero_grad()
        model.state_dict()


def tensor_parallel(fsdp: ModuleType) -> None:
    """Tensor parallelism inside of shards, and inside of replicas of one shard each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))
    for dp, tp in ((mesh["dp"], mesh["tp"]), (whole["replicate", "shard"], whole["tp"])):
        model = _blocks()
        for block in model[:-1]:
            parallelize_module(block, tp, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        _shard(fsdp, model, dp, mp_policy=BF16)
        for step in range(2):
            _backward(model, step)
        for norm in (param.grad.norm() for param in model.parameters()):
            norm.full_tensor()
        torch.optim.AdamW(model.parameters(), foreach=False).step()
        model.load_state_dict(model.state_dict())


def mesh_dims(fsdp: ModuleType) -> None:
    """``dp_mesh_dims``: parameters that are DTensors on the whole mesh already."""
    dims = getattr(torch.distributed.fsdp, "DataParallelMeshDims", None)
    if dims is None:
        return
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = [Replicate(), Replicate()]
    named = [dims(shard="dp"), dims(shard=("dp", "tp")), dims(replicate="dp", shard="tp"), dims(replicate=("dp", "tp"))]
    for each in named:
        cuts = [Shard(0), Shard(1)] if each.shard == "dp" and each.replicate is None else [None, None]
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)))
        for linear, cut in zip(model, cuts):
            placements = whole if cut is None else [Replicate(), cut]
            linear.weight = nn.Parameter(distribute_tensor(linear.weight.detach(), mesh, placements))
        _shard(fsdp, model, mesh, dp_mesh_dims=each)
        inputs = [Shard(0), Replicate()] if cuts[0] else [Shard(0), Shard(0)]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            model(DTensor.from_local(_batch(step), mesh, inputs, run_check=False)).to_local().sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def lists(fsdp: ModuleType) -> None:
    """Modules that form one group, one of which may be called by itself later, in chunks."""
    model = _blocks(4)
    fsdp.fully_shard([model[0], model[1]], mesh=_mesh())
    fsdp.fully_shard([model[3], model[4]], mesh=_mesh(), reshard_after_forward=True, mp_policy=BF16)
    fsdp.fully_shard(model, mesh=_mesh())
    _train(model)
    with torch.no_grad():
        model(_batch())

    class Chunked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.norm, self.head = Block(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.body(x))

    chunked = Chunked()
    fsdp.fully_shard(chunked.body, mesh=_mesh())
    fsdp.fully_shard([chunked.norm, chunked.head], mesh=_mesh())
    fsdp.fully_shard(chunked, mesh=_mesh())
    for _ in range(2):
        hidden = chunked(_batch())
        for chunk in hidden.chunk(2):
            chunked.head(chunk).sum().backward(retain_graph=True)


def meta_and_assign(fsdp: ModuleType) -> None:
    """Meta device: ``to_empty``, and ``load_state_dict(assign=True)`` of sharded values."""
    with torch.device("meta"):
        model, other = _blocks(), _blocks()
    _shard(fsdp, model, _mesh()).to_empty(device="cpu")
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.LayerNorm)):
            module.reset_parameters()
        if isinstance(module, Block):
            module.scale.fill_(1.0)
    _train(model)
    _shard(fsdp, other, _mesh())
    other.load_state_dict(model.state_dict(), assign=True)
    _train(other)
    distributed = {
        name: distribute_tensor(value.full_tensor(), value.device_mesh, [Shard(0)]) if isinstance(value, DTensor) else value
        for name, value in model.state_dict().items()
    }
    other.load_state_dict(distributed)
    _train(other)


def to_dtype(fsdp: ModuleType) -> None:
    """``.to(dtype)`` before the first forward."""
    for convert in (lambda model: model.to(torch.bfloat16), lambda model: model.double()):
        model = _shard(fsdp, _blocks(), _mesh())
        convert(model)
        dtype = next(model.parameters()).dtype
        _train(model, backward=lambda model, step: model(_batch(step).to(dtype)).float().sum().backward())  # noqa: B023


def checkpointing(fsdp: ModuleType) -> None:
    """Activation checkpointing inside of a module and around it, of both kinds."""
    for reentrant in (False, True):
        for policy in (MixedPrecisionPolicy(), BF16):
            model = _shard(fsdp, _blocks(reentrant=reentrant), _mesh(), mp_policy=policy)
            _train(model, backward=lambda model, step: model(_batch(step).requires_grad_()).float().sum().backward())

        class Around(nn.Module):
            def __init__(self, inner: nn.Module, reentrant: bool) -> None:
                super().__init__()
                self.inner, self.reentrant = inner, reentrant

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return checkpoint(self.inner, x, use_reentrant=self.reentrant)

        model = nn.Sequential(*(Around(Block(), reentrant) for _ in range(2)), nn.Linear(WIDTH, WIDTH))
        for around in model[:-1]:
            fsdp.fully_shard(around.inner, mesh=_mesh())
        fsdp.fully_shard(model, mesh=_mesh())
        _train(model, backward=lambda model, step: model(_batch(step).requires_grad_()).sum().backward())


def no_sync(fsdp: ModuleType) -> None:
    """Micro-batches without reduction; parameters that stay gathered over them."""
    for policy in (MixedPrecisionPolicy(), BF16):
        model = _shard(fsdp, _blocks(), _mesh(), mp_policy=policy)

        def accumulate(model: Any, step: int) -> None:
            for micro in range(3):
                is_last = micro == 2
                model.set_is_last_backward(is_last)
                model.set_requires_gradient_sync(is_last)
                model.set_reshard_after_backward(is_last)
                _backward(model, 3 * step + micro)

        _train(model, backward=accumulate)
    model.set_requires_gradient_sync(False, recurse=False)
    _backward(model)


def reshard_knobs(fsdp: ModuleType) -> None:
    """Whether and when parameters are resharded or unsharded, by settings and by hand."""
    for after_forward, after_backward in ((False, False), (True, False), (False, True)):
        model = _shard(fsdp, _blocks(), _mesh(), reshard_after_forward=after_forward)
        model.set_reshard_after_forward(after_forward, recurse=True)
        model.set_reshard_after_backward(after_backward, recurse=False)
        for step in range(2):
            _backward(model, step)
        for block in model[:-1]:
            block.reshard()
    model = _shard(fsdp, _blocks(), _mesh())
    model[0].unshard(async_op=True).wait()
    model[1].unshard(async_op=True)
    model[2].unshard()
    model[0].set_unshard_in_backward(True)
    _backward(model)
    embedding = nn.Sequential(nn.Embedding(16, WIDTH), nn.Linear(WIDTH, WIDTH))
    _shard(fsdp, embedding, _mesh())
    embedding[0].set_unshard_in_backward(False)
    embedding(torch.arange(16)).sum().backward()


class Custom:
    """FSDP2's interface of a collective."""

    def __init__(self, collective: Callable[..., Any]) -> None:
        self.collective = collective

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory of the collective."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any = None, async_op: bool = False) -> Any:
        options = {} if op is None else {"op": op}
        return self.collective(output_tensor, input_tensor, group=group, async_op=async_op, **options)


def reduction_knobs(fsdp: ModuleType) -> None:
    """Divide factors, sums, hooks, events, custom collectives, buffers in flight, process groups of their own."""
    for mesh in (_mesh(), _replicas()):
        model = _shard(fsdp, _blocks(), mesh, mp_policy=BF16)
        model[0].set_gradient_divide_factor(8.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model[1].set_reduce_scatter_divide_factor(3.0)
        for block in model[:2]:  # gloo has no other reduction with a factor.
            block.set_force_sum_reduction_for_comms(True)
        model[2].set_all_reduce_hook(lambda shard: shard.mul_(0.5))
        for name, value in (("max_input_buffers", 2), ("unused_params", True)):
            if hasattr(model, f"set_reduce_scatter_{name}"):
                getattr(model, f"set_reduce_scatter_{name}")(value)
        if hasattr(model, "set_separate_reduce_scatter_group"):
            model.set_separate_reduce_scatter_group(True)
        _train(model)
        with contextlib.suppress(RuntimeError):  # FSDP2 has no event on the CPU.
            model.set_post_optim_event(torch.Event("cpu"))
            model(_batch())
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16)):
        model = _shard(fsdp, _blocks(), _mesh(), mp_policy=policy)
        model[0].set_custom_all_gather(Custom(dist.all_gather_into_tensor))
        model[0].set_custom_reduce_scatter(Custom(dist.reduce_scatter_tensor))
        for block in (model[1], model[2]):
            block.set_allocate_memory_from_process_group_for_comm(False)
        _train(model)


def other_forwards(fsdp: ModuleType) -> None:
    """A second forward method, several roots, nested inputs and outputs, several forwards, a forward that raises."""

    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(WIDTH, WIDTH)

        def forward(self, pair: dict[str, torch.Tensor], *, fails: bool = False) -> dict[str, Any]:
            found = [layer(pair["x"]) for layer in self.layers]
            if fails:
                raise KeyError("fails")
            return {"loss": self.head(found[0] + found[1]).float(), "rest": (found[0], None)}

    model = Nested()
    for layer in model.layers:
        fsdp.fully_shard(layer, mesh=_mesh(), mp_policy=BF16)
    fsdp.fully_shard(model, mesh=_mesh(), mp_policy=BF16)
    losses = [model({"x": _batch(step)})["loss"].sum() for step in range(2)]
    losses[1].backward()
    losses[0].backward()
    with contextlib.suppress(KeyError):
        model({"x": _batch()}, fails=True)
    model.reset_iter_state()
    _train(model, backward=lambda model, step: model({"x": _batch(step)})["loss"].sum().backward())

    roots = [_shard(fsdp, _blocks(), _mesh()) for _ in range(2)]
    fsdp.share_comm_ctx(roots)
    for step in range(2):
        roots[1](roots[0](_batch(step))).sum().backward()

    model = _shard(fsdp, _blocks(), _mesh())
    fsdp.register_fsdp_forward_method(model[0], "logits")
    model[0].logits(_batch()).sum().backward()


def frozen_unused_tied(fsdp: ModuleType) -> None:
    """Parameters that are frozen, unused, tied, ignored; uneven shapes; a gradient that a hook changes."""

    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.unused = (nn.Linear(5, 5) for _ in range(3))
            self.second.weight, self.first.bias.requires_grad = self.first.weight, False
            self.own = nn.Parameter(torch.ones(5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.own * self.second(torch.relu(self.first(x)))

    model = nn.Sequential(*(Branch() for _ in range(2)), nn.Linear(5, 3))
    model[0].requires_grad_(False)
    ignored = {branch.own for branch in model[:-1]}
    _shard(fsdp, model, _mesh(), ignored_params=ignored)
    for param in model.parameters():
        if param.requires_grad and hasattr(param, "register_post_accumulate_grad_hook"):
            param.register_post_accumulate_grad_hook(lambda param: None)
    for _ in range(2):
        model(torch.randn(2, 5)).sum().backward()
    repr(model)


def state_dicts(fsdp: ModuleType) -> None:
    """Sharded and full state dicts of model and optimizer, by torch's functions."""
    model = _shard(fsdp, _blocks(), _mesh())
    optimizer = _train(model)
    sharded, full = dcp.StateDictOptions(), dcp.StateDictOptions(full_state_dict=True)
    broadcast = dcp.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    for options in (sharded, full):
        values, states = (
            dcp.get_model_state_dict(model, options=options),
            dcp.get_optimizer_state_dict(model, optimizer, options=options),
        )
        if options is full:
            options = broadcast
            values = values if dist.get_rank() == 0 else {}
            states = states if dist.get_rank() == 0 else {}
        other = _shard(fsdp, _blocks(), _mesh())
        dcp.set_model_state_dict(other, values, options=options)
        made = torch.optim.AdamW(other.parameters(), lr=0.01)
        dcp.set_optimizer_state_dict(other, made, states, options=options)
        _backward(other)
        made.step()


PROGRAMS: dict[str, Callable[[ModuleType], None]] = {
    program.__name__: program
    for program in (
        bf16_loop,
        hsdp,
        neighbours,
        prefetch,
        cpu_offload,
        shard_placements,
        tensor_extensions,
        tensor_parallel,
        mesh_dims,
        lists,
        meta_and_assign,
        to_dtype,
        checkpointing,
        no_sync,
        reshard_knobs,
        reduction_knobs,
        other_forwards,
        frozen_unused_tied,
        state_dicts,
    )
}
"""What FSDP2's documentation describes, by name. Its first line of documentation says what a program is about."""

assert all(inspect.getdoc(program) for program in PROGRAMS.values())
