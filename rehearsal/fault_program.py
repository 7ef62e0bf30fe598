"""Training programs that use the package's streams, events and collectives; run by faults.py, one process per rank.

Each variant returns tensors. Their bytes are equal in every order of the streams, if no wait is missing.
"""

from __future__ import annotations

import datetime
import hashlib
import tempfile
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

Variant = Callable[[], list[torch.Tensor]]
Wrap = Callable[[nn.Module], None]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.spare = nn.LayerNorm(32), nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.nn.functional.gelu(self.inner(self.norm(x)))


def made(wrap: Wrap, is_wide: bool = False) -> nn.Module:
    """A model of four blocks; or one of two layers whose gradients are not small, so that each is written as it comes."""
    torch.manual_seed(0)
    layers = [nn.Linear(32, 1024), nn.Linear(1024, 32)] if is_wide else [Block() for _ in range(4)]
    model = nn.Sequential(*layers).cuda()
    wrap(model)
    return model


def batch(step: int = 0) -> torch.Tensor:
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(10 * step + dist.get_rank())).cuda()


def train(wrap: Wrap, steps: int = 2, optimizer_stream: bool = False) -> list[torch.Tensor]:
    model = made(wrap)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    side, losses = torch.cuda.Stream(), []
    for step in range(steps):
        x = batch(step)
        for _ in range(2):
            loss = model(x).pow(2).mean()
            loss.backward()
        if optimizer_stream:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)  # The gradients stay, and no stream has to wait for their end.
            model.set_post_optim_event(side.record_event())
        else:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *locals_of(model)]


def with_symmetric_memory(wrap: Wrap) -> list[torch.Tensor]:
    from rehearsal.symmetric import installed

    with installed():
        found = train(wrap)
        torch.cuda.synchronize()
        dist.barrier()  # Other ranks read this one's memory.
    return found


def locals_of(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.to_local().detach() for parameter in model.parameters()]


def gradients_of(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.to_local() for parameter in model.parameters() if parameter.grad is not None]


def finalized_later(wrap: Wrap, is_wide: bool = False) -> list[torch.Tensor]:
    """The next backward writes gradients while the reductions of the last one are in flight."""
    model = made(wrap, is_wide)
    model.set_manual_backward_finalization(True)
    x = batch()
    for _ in range(2):
        model(x).pow(2).mean().backward()
    model.finalize_backward()
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    return gradients_of(model)


def assigned(wrap: Wrap, is_wide: bool = False) -> list[torch.Tensor]:
    """A program assigns gradients, as a pipeline schedule does, while the reduction of an earlier pass is in flight."""
    model = made(wrap, is_wide)
    model.set_manual_backward_finalization(True)
    model.set_reshard_after_backward(False)
    model(batch()).pow(2).mean().backward()
    model.set_requires_gradient_sync(False)
    x = batch(1).requires_grad_()
    torch.autograd.grad(model(x).pow(2).mean(), [x])
    model.set_requires_gradient_sync(True)
    for layer in model:
        weight = layer.weight if is_wide else layer.inner.weight
        weight.grad = torch.ones_like(weight)
    model.finalize_backward()
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    return gradients_of(model)


def dropped(wrap: Wrap) -> list[torch.Tensor]:
    """Reductions in flight, and an all-gather in flight, are dropped; then a step."""
    model = made(wrap)
    model.set_manual_backward_finalization(True)
    model(batch()).pow(2).mean().backward()
    model.finalize_backward(async_op=True)
    numel = max(group.layout.numel for group in model._ragged_groups(True))
    model.reset_iter_state()
    later = [torch.full((numel,), 5.0, device="cuda") for _ in range(32)]  # They may get the memory of what was dropped.
    model.set_manual_backward_finalization(False)
    model[1].unshard(async_op=True)
    model[1].reshard()
    later += [torch.full((numel,), 5.0, device="cuda") for _ in range(4)]
    model[1].unshard()
    later.append(model[1].inner.weight.detach() * 2)
    model[1].reshard()
    model(batch(1)).pow(2).mean().backward()
    return [*gradients_of(model), *later]


def read_early(wrap: Wrap) -> list[torch.Tensor]:
    """Gradients of passes without gradient sync are read: copies of them are reduced."""
    model, found = made(wrap), []
    model.set_requires_gradient_sync(False)
    for step in range(2):
        model(batch(step)).pow(2).mean().backward()
        found += [parameter.grad.materialize().to_local() * 2 for parameter in model.parameters() if parameter.grad is not None]
    model.set_requires_gradient_sync(True)
    model(batch(2)).pow(2).mean().backward()
    return [*found, *gradients_of(model)]


def offloaded_states(mesh: DeviceMesh, in_backward: bool) -> list[torch.Tensor]:
    """States in host memory pass through windows; their memory was that of tensors which kernels in flight still use."""
    from torch_ragged.fsdp import Offload, fully_shard, offloaded
    from torch_ragged.fsdp.offload import _offloaded_optimizer

    def wrap(model: nn.Module) -> None:
        for block in model.children():
            fully_shard(block, mesh=mesh, offload_policy=Offload(1.0))
        fully_shard(model, mesh=mesh, offload_policy=Offload(1.0))

    model, side, found = made(wrap), torch.cuda.Stream(), []
    with mock.patch.object(_offloaded_optimizer, "window_numel", lambda device: 512):
        used = [torch.full((512,), 5.0, device="cuda") * 2 for _ in range(64)]
        del used  # Windows may get its memory.
        optimizer = offloaded(torch.optim.AdamW, model, lr=0.1, in_backward=in_backward)
        for step in range(3):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):  # Backward steps there, and the program goes on here.
                loss = model(batch(step)).pow(2).mean()
            loss.backward()
            found += [each * 2 for each in locals_of(model)]
            optimizer.step()
            optimizer.zero_grad()
        states = [value for state in optimizer.state_dict()["state"].values() for value in state.values()]
        return [*found, *locals_of(model), *(getattr(value, "_local_tensor", value).clone() for value in states)]


def planned(mesh: DeviceMesh) -> list[torch.Tensor]:
    """A plan with sequence parallelism: gradients of norms are summed over the ranks of the model, too."""
    from torch_ragged.spmd import Plan, parallelize

    plan = Plan()
    plan.shard("<in:input>", Shard(0), "replicate")
    plan.shard(r"\d\.norm\.<in>", Shard(0), "shard")
    plan.shard(r"\d\.norm\.<out>", Replicate(), "shard")
    plan.unit(r"\d", "replicate")
    torch.manual_seed(0)
    model = parallelize(nn.Sequential(*[Block() for _ in range(2)]).cuda(), plan, mesh)
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(5)).cuda()
    for _ in range(2):
        model(x).pow(2).mean().backward()
    return gradients_of(model)


class Forked(nn.Module):
    """Its second layer runs on a side stream. The input of that layer has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.side = nn.Linear(32, 32), nn.Linear(32, 32), torch.cuda.Stream()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            other = self.second(x.detach())
            other.record_stream(self.side)
        first = self.first(x)
        torch.cuda.current_stream().wait_stream(self.side)
        return first + other


def forked(wrap: Wrap) -> list[torch.Tensor]:
    """Gradients that are written on a side stream."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Forked() for _ in range(3)]).cuda()
    wrap(model)
    for step in range(2):
        model(batch(step).requires_grad_()).pow(2).mean().backward()
    return gradients_of(model)


def monitored(wrap: Wrap) -> list[torch.Tensor]:
    """A monitor's seconds are those between recorded events."""
    from torch_ragged.fsdp import monitor

    model = made(wrap)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with monitor(model, optimizer) as watch:
        for step in range(2):
            model(batch(step)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            row = watch.step(tokens=8)
    assert row["all_gather_s"] > 0
    return locals_of(model)


def stepped_by_muon(wrap: Wrap) -> list[torch.Tensor]:
    from torch_ragged.optim import Muon

    model = made(wrap)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    optimizer = Muon(matrices, lr=0.1, check_gradients=False)
    for step in range(2):
        model(batch(step)).pow(2).mean().backward()
        for parameter in matrices:
            if parameter.grad is None:  # Of the layer that is not used.
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    return locals_of(model)


def kept_by_neighbours(wrap: Wrap) -> list[torch.Tensor]:
    """Copies of shards are in flight while the next step changes them."""
    from torch_ragged.fsdp import NeighbourCopies

    model = made(wrap)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    copies, kept = NeighbourCopies(model, optimizer, distance=1), []
    for step in range(3):
        model(batch(step)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        copies.update()
    copies.wait()
    for generation in copies._generations:
        kept += [generation.own.buffer, generation.kept.buffer]
    return kept


def restored(wrap: Wrap) -> list[torch.Tensor]:
    """A checkpoint of replicas: each reads a share, and broadcasts it."""
    from torch_ragged import checkpoint

    model = made(wrap)
    state = checkpoint.TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    folder = [tempfile.mkdtemp(prefix="rehearsal-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder, 0)
    checkpoint.save(folder[0], state)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    checkpoint.load(folder[0], state, spread=True)
    dist.barrier()
    if dist.get_rank() == 0:
        __import__("shutil").rmtree(folder[0])
    return locals_of(model)


def redistributed(mesh: DeviceMesh) -> list[torch.Tensor]:
    """Redistributions in flight while the current stream computes, of all kinds of collectives."""
    from torch_ragged import RaggedShard
    from torch_ragged.tensor._redistribute import AllReduce

    size = mesh.size()
    even, odd, one = (1,) * size, tuple(range(1, size + 1)), (0,) * (size - 1) + (1,)
    most, rest = (1, *(0,) * (size - 2), 119), (*(1,) * (size - 1), 121 - size)  # One rank owns nearly all.
    whole = torch.arange(240.0, device="cuda").view(24, 10) * (1 + dist.get_rank())
    partial = DTensor.from_local(whole, mesh, [Partial()], run_check=False)
    found = []
    for is_async in (True, False):
        ragged = distribute_tensor(torch.arange(240.0, device="cuda").view(24, 10), mesh, [RaggedShard((0, 1), odd)])
        for source in (ragged, partial):
            for placement in (
                RaggedShard((0, 1), even),
                RaggedShard((0, 1), odd),
                RaggedShard((0, 1), one),
                RaggedShard((0, 1), most),
                RaggedShard((0, 1), rest),
                Replicate(),
            ):
                moved = source.redistribute(placements=[placement], async_op=is_async) * 2
                found.append(moved.redistribute(placements=[Replicate()], async_op=is_async).to_local() + 1)
    for operation in ("sum", "max"):
        step = AllReduce(operation, mesh, 0)
        found.append(step(whole) + 1)
        largest = DTensor.from_local(whole * 3, mesh, [Partial(operation)], run_check=False)
        found += [
            largest.redistribute(placements=[RaggedShard((0, 1), units)]).to_local() + 1 for units in (even, odd, most, rest)
        ]
    with _Watching():
        found.append(AllReduce("sum", mesh, 0)(whole) + 1)
        largest = DTensor.from_local(whole * 3, mesh, [Partial("max")], run_check=False)
        found.append(largest.redistribute(placements=[RaggedShard((0, 1), odd)]).to_local() + 1)
    return found


def redistributed_in_two(mesh: DeviceMesh) -> list[torch.Tensor]:
    """Partial sums over one mesh dimension of a tensor that is cut over another one; and one owner of nearly all."""
    from torch_ragged import RaggedShard

    found = []
    for is_async in (True, False):
        local = torch.arange(120.0, device="cuda") * (1 + dist.get_rank())
        placements = [Partial(), RaggedShard((0,), (1, 1))]
        partial = DTensor.from_local(local, mesh, placements, shape=torch.Size((24, 10)), stride=(10, 1), run_check=False)
        found.append(partial.redistribute(placements=[Replicate(), placements[1]], async_op=is_async).to_local() + 1)
    return found


class _Watching(torch.utils._python_dispatch.TorchDispatchMode):
    """A mode that sees all operators: redistributions then use functional collectives."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def moved(mesh: DeviceMesh) -> list[torch.Tensor]:
    """Transfers, behind what the current stream writes and before what it reads; in the background and not, also of changes."""
    from torch_ragged import RaggedShard, transfer

    source = {"w": distribute_tensor(torch.arange(64.0, device="cuda").view(16, 4), mesh, [Shard(0)])}
    target = {"w": distribute_tensor(torch.zeros(16, 4, device="cuda"), mesh, [RaggedShard((0,), (1, 3))])}
    plan, found = transfer.plan(source, target), []
    torch.cuda.synchronize()
    for is_async in (True, False):
        for factor in (3, 5):
            source["w"].to_local().mul_(factor)
            handle = plan.run(source, target, async_op=is_async)
            if is_async:
                handle.wait()
            found.append(target["w"].to_local() + 1)
    for step in range(2):
        source["w"].to_local()[step].mul_(7)
        plan.run(source, target, delta="checksum")
        found.append(target["w"].to_local() + 1)
    return found


def streamed(wrap: Wrap) -> list[torch.Tensor]:
    """Whole tensors that a consumer on another stream reads without a wait: the host has waited."""
    from torch_ragged import transfer

    model, found = made(wrap), []
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    for _, whole in transfer.stream(model, 1 << 20):
        with torch.cuda.stream(torch.cuda.Stream()):
            found.append(whole * 2)
            torch.cuda.current_stream().synchronize()
    closed = transfer.stream(model, 1 << 13)
    next(closed)
    closed.close()
    return found


def variants(flavour: str) -> dict[str, Variant]:
    """The programs by name, for the ranks of the default group: 2, or 4 for those that need two mesh dimensions."""
    size = dist.get_world_size()
    line = init_device_mesh("cuda", (size,))
    if flavour == "fsdp2":
        from torch.distributed.fsdp import fully_shard
    else:
        from torch_ragged.fsdp import fully_shard

    def wrapped(mesh: DeviceMesh, divisor: float | None = None, collectives: str = "", **options: Any) -> Wrap:
        def wrap(model: nn.Module) -> None:
            for block in model.children():
                fully_shard(block, mesh=mesh, **options)
            fully_shard(model, mesh=mesh, **options)
            if divisor is not None:
                for module in (model, *model.children()):
                    module.set_gradient_divide_factor(divisor)
            if collectives:
                assert model.set_collectives(collectives) == (collectives,), collectives

        return wrap

    if size == 4:
        square = init_device_mesh("cuda", (2, 2), mesh_dim_names=("replicate", "shard"))
        found: dict[str, Variant] = {"replicas of shards": lambda: train(wrapped(square))}
        if flavour == "ours":
            from torch_ragged.fsdp import HIERARCHICAL

            found["nodes"] = lambda: train(wrapped(square, placements=HIERARCHICAL))
            found["nodes, divided"] = lambda: train(wrapped(square, 3.0, placements=HIERARCHICAL))
            found["planned"] = lambda: planned(square)
            found["redistributed by four"] = lambda: [*redistributed(line), *redistributed_in_two(square)]
        return found
    grid = init_device_mesh("cuda", (size, 1), mesh_dim_names=("replicate", "shard"))
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = {
        "float32": lambda: train(wrapped(line)),
        "mixed": lambda: train(wrapped(line, mp_policy=half)),
        "float16": lambda: train(wrapped(line, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16))),
        "divided": lambda: train(wrapped(line, 3.0)),
        "replicas": lambda: train(wrapped(grid)),
        "kept": lambda: train(wrapped(line, reshard_after_forward=False)),
        "optimizer stream": lambda: train(wrapped(line), 3, optimizer_stream=True),
    }
    if flavour == "ours":

        def one(model: nn.Module) -> None:
            # Reductions have a stream of their own: a wait for the next all-gather does not order what follows behind them.
            fully_shard(model, mesh=line)
            model.set_separate_reduce_scatter_group()
            model.set_reshard_after_backward(False)

        found |= {
            "finalized later": lambda: finalized_later(wrapped(line)),
            "assigned": lambda: assigned(wrapped(line, reshard_after_forward=False)),
            "dropped": lambda: dropped(wrapped(line)),
            "finalized later, one group": lambda: finalized_later(one, is_wide=True),
            "assigned, one group": lambda: assigned(one, is_wide=True),
            "forked": lambda: forked(wrapped(line)),
            "monitored": lambda: monitored(wrapped(line)),
            "muon": lambda: stepped_by_muon(wrapped(line)),
            "read early": lambda: read_early(wrapped(line)),
            "read early, replicas": lambda: read_early(wrapped(grid)),
            "offloaded": lambda: offloaded_states(line, in_backward=False),
            "offloaded, in backward": lambda: offloaded_states(line, in_backward=True),
            "neighbours": lambda: kept_by_neighbours(wrapped(line)),
            "restored": lambda: restored(wrapped(grid)),
            "copy engine": lambda: with_symmetric_memory(wrapped(line, collectives="copy_engine")),
            "multicast": lambda: with_symmetric_memory(wrapped(line, collectives="multimem", mp_policy=half)),
            "redistributed": lambda: redistributed(line),
            "moved": lambda: moved(line),
            "streamed": lambda: streamed(wrapped(line)),
        }
    return found


def run(flavour: str, rank: int, size: int, port: int, wanted: list[str] | None) -> Iterator[tuple[str, str, int]]:
    """Run the variants, all or the ``wanted`` ones. Yields the name, the digest of the results and the sanitizer's reports."""
    torch.cuda.set_device(rank)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=size, timeout=timeout)
    for name, variant in variants(flavour).items():
        if wanted is not None and name not in wanted:
            continue
        before = torch.ops.rehearsal.reports()
        results = variant()
        torch.cuda.synchronize()
        digest = hashlib.sha1(b"".join(each.double().cpu().contiguous().numpy().tobytes() for each in results))
        yield name, digest.hexdigest()[:10], torch.ops.rehearsal.reports() - before
