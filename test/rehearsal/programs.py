"""Programs that the tests of the rehearsal run in processes of their own, one process per rank. Not imported by pytest."""

from __future__ import annotations

import datetime
import json
import os
import sys

import torch
import torch.distributed as dist
from torch import nn

kept: list[torch.Tensor] = []


def race() -> object:
    """A stream reads what another one writes, without a wait; and with one."""
    found = {}
    for waits in (False, True):
        side = torch.cuda.Stream()
        source = torch.full((1000,), 5.0, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            written = torch.zeros(1000, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            written.copy_(source + 1)
        if waits:
            torch.cuda.current_stream().wait_stream(side)
        found[str(waits)] = (written * 2).sum().item()
        torch.cuda.synchronize()
    return found


def overwritten() -> object:
    """A stream overwrites what another one has not read yet: a fault that shows if the second stream runs first."""
    side, data = torch.cuda.Stream(), torch.ones(100, device="cuda")
    torch.cuda.synchronize()
    read = data + 1
    with torch.cuda.stream(side):
        data.fill_(100.0)
    side.synchronize()
    return read.sum().item()


def events() -> object:
    """An event orders what is before it, and says whether it was reached."""
    side, event, late = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    data = torch.zeros(10, device="cuda")
    torch.cuda.synchronize()
    event.record()
    with torch.cuda.stream(side):
        data.add_(3)
        late.record()
    issued = late.query()
    torch.cuda.current_stream().wait_event(late)
    data.mul_(2)
    total = data.sum().item()
    return [issued, late.query(), total, event.elapsed_time(late) > 0]


def allocator() -> object:
    """Torch's caching allocator reuses a block of the same stream at once, and one that another stream uses when it is done."""
    first = torch.empty(1 << 20, device="cuda")
    address = first.data_ptr()
    del first
    again = torch.empty(1 << 20, device="cuda")
    is_reused, side = again.data_ptr() == address, torch.cuda.Stream()
    with torch.cuda.stream(side):
        again.add_(1)
    again.record_stream(side)
    del again
    other = torch.empty(1 << 20, device="cuda")
    is_kept, held = other.data_ptr() != address, torch.cuda.memory_stats()["active_bytes.all.current"]
    side.synchronize()
    del other
    torch.empty(1, device="cuda")  # The allocator looks at its events here.
    after = [torch.empty(1 << 20, device="cuda").data_ptr() for _ in range(1)]
    return [is_reused, is_kept, held >> 20, after[0] is not None, torch.cuda.memory_stats()["num_device_alloc"]]


def freed_too_early() -> object:
    """The memory of a tensor that a stream still reads is given out again, for lack of a record_stream or a wait."""
    side = torch.cuda.Stream()
    data = torch.full((1 << 18,), 1.0, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        total = data.sum()
    del data
    other = torch.full((1 << 18,), 7.0, device="cuda")
    torch.cuda.current_stream().synchronize()
    side.synchronize()
    return [total.item() == 1 << 18, other[0].item()]


def pinned() -> object:
    """A copy to pinned memory does not block the host: the numbers are there after a wait only."""
    data, host = torch.full((4,), 3.0, device="cuda"), torch.zeros(4).pin_memory()
    host.copy_(data, non_blocking=True)
    before = host.tolist()
    torch.cuda.current_stream().synchronize()
    return [before, host.tolist()]


def values() -> object:
    """Operators have the CPU's values, dtypes and errors."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 5, generator=generator)
    answers = []
    for device in ("cpu", "cuda"):
        a = x.clone().to(device).requires_grad_()
        module = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.RMSNorm(4), torch.nn.GELU()).to(device)
        for index, parameter in enumerate(module.parameters()):
            torch.nn.init.constant_(parameter, 0.1 * (index + 1))
        loss = (module(a)[:, ::2].softmax(-1).bfloat16().float() * torch.arange(2.0, device=device)).sum()
        loss.backward()
        optimizer = torch.optim.AdamW(module.parameters(), fused=True)
        optimizer.step()
        picked = a.detach()[a.detach() > 0.5].sort().values
        sums = a.new_zeros(3).index_add_(0, torch.tensor([0, 2, 2], device=device), a.detach()[:3, 0])
        answers.append([loss, a.grad, picked, sums, *module.parameters(), *[p.grad for p in module.parameters()]])
    for cpu, cuda in zip(*answers):
        assert cuda.device.type == "cuda" and cpu.dtype == cuda.dtype
        torch.testing.assert_close(cuda.cpu(), cpu, rtol=1e-5, atol=1e-6)
    errors = []
    for function in (lambda: a @ a, lambda: a + x, lambda: torch.fft.fft(a.detach())):
        try:
            function()
        except (RuntimeError, NotImplementedError) as error:
            errors.append(str(error)[:30])
    return errors[:2]


def randoms() -> object:
    """Random operators follow the CUDA generator's seed and offset."""
    torch.manual_seed(3)
    first = [torch.rand(2, device="cuda").tolist() for _ in range(2)]
    torch.cuda.manual_seed(3)
    state = torch.cuda.get_rng_state()
    again = torch.rand(2, device="cuda").tolist()
    torch.cuda.set_rng_state(state)
    return [first[0] == again, first[0] != first[1], torch.rand(2, device="cuda").tolist() == again]


def order_of_streams() -> object:
    """Streams write to one place in the order that the seed chooses. What all of them wrote last is the answer."""
    streams, last = [torch.cuda.Stream() for _ in range(6)], []
    for _ in range(5):
        place = torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
        for number, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                place.mul_(7).add_(number)
        torch.cuda.synchronize()
        last.append(place.item())
    return last


def collectives() -> object:
    """Each collective of torch over NCCL has the numbers that it says."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.arange(4.0, device="cuda") + 10 * rank
    gathered, scattered = x.new_empty(4 * size), x.new_empty(4 // size, dtype=torch.bfloat16)
    dist.all_gather_into_tensor(gathered, x)
    dist.reduce_scatter_tensor(scattered, x.bfloat16(), op=dist.ReduceOp.AVG)
    summed, most = x.clone(), x.clone()
    work = dist.all_reduce(summed, async_op=True)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    work.wait()
    splits = [1, 3] if rank == 0 else [3, 1]
    exchanged = x.new_empty(4)
    dist.all_to_all_single(exchanged, x, splits if rank == 0 else [3, 1], splits)
    sent = x.clone() if rank == 0 else x.new_empty(4)
    dist.broadcast(sent, 0)
    received = x.new_empty(4)
    for request in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, x, (rank + 1) % size), dist.P2POp(dist.irecv, received, (rank - 1) % size)]
    ):
        request.wait()
    small = dist.new_group([rank], use_local_synchronization=True)
    dist.all_reduce(x, group=small)
    return [t.tolist() for t in (gathered, scattered, summed, most, exchanged, sent, received, x)]


def mismatch(what: str) -> object:
    """Ranks disagree on a collective: each raises, where NCCL hangs."""
    rank, x = dist.get_rank(), torch.ones(8, device="cuda")
    kept.append(x)  # After the error, torch ends a process that frees a tensor of another stream.
    try:
        if what == "count":
            dist.all_reduce(x[: 8 - 4 * rank])
        elif what == "kind":
            dist.all_reduce(x) if rank == 0 else dist.broadcast(x, 0)
        elif what == "dtype":
            dist.all_reduce(x if rank == 0 else x.bfloat16())
        elif what == "message":
            dist.send(x, 1) if rank == 0 else dist.recv(x[:4], 0)
        elif what == "left":
            dist.all_reduce(x)
            dist.all_reduce(x) if rank == 0 else dist.destroy_process_group()
        torch.cuda.synchronize()
    except Exception as error:
        return str(error)
    return ""


def not_waited_for() -> object:
    """A collective's result is used without a wait."""
    x = torch.ones(1000, device="cuda")
    y = torch.zeros(1000, device="cuda")
    torch.cuda.synchronize()
    work = dist.all_reduce(x, async_op=True)
    y.copy_(x * 1)
    total = y.sum().item()
    work.wait()
    torch.cuda.synchronize()
    return total


def host_in_a_store() -> object:
    """One rank's host waits in a store for another one, which waits for a collective of both."""
    store = dist.distributed_c10d._get_default_store()
    x = torch.ones(4, device="cuda")
    dist.all_reduce(x, async_op=True)
    if dist.get_rank() == 0:
        torch.cuda.synchronize()
        store.set("done", "1")
    else:
        store.wait(["done"], datetime.timedelta(seconds=40))
    torch.cuda.synchronize()
    return x.tolist()


class Forked(nn.Module):
    """Its second layer runs on a side stream: its input has no gradient, and its weight is read there."""

    def __init__(self, joins: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(256, 256), nn.Linear(256, 256)
        self.joins, self.side = joins, torch.cuda.Stream()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            for parameter in self.second.parameters() if self.joins == "recorded" else ():
                parameter.record_stream(self.side)
            other = self.second(x.detach())
            other.record_stream(self.side)
        result = self.first(x)
        if self.joins == "inside":
            torch.cuda.current_stream().wait_stream(self.side)
            return result + other
        return result, other


class Chain(nn.Module):
    def __init__(self, joins: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Forked(joins) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            if type(x) is tuple:
                torch.full((256 * 256 * 2 + 512,), 7.0, device="cuda")  # It may get the memory of the weights.
                torch.cuda.current_stream().wait_stream(block.side)
                x = x[0] + x[1]
        return x


def side_streams(joins: str) -> object:
    """Gradients that are written on a side stream, and weights that are read there, of three modules in a row."""
    from torch_ragged.fsdp import fully_shard

    torch.manual_seed(0)
    model = Chain(joins).cuda()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(3):
        x = torch.randn(16, 256, generator=torch.Generator().manual_seed(10 * step + dist.get_rank())).cuda()
        loss = model(x.requires_grad_()).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    torch.cuda.synchronize()
    return losses


def symmetric() -> object:
    """Losses with each of the collectives of peer memory: sums of two ranks have the same bits in each."""
    from rehearsal.symmetric import installed
    from torch_ragged.fsdp import fully_shard

    found = {}
    with installed():
        for name in ("nccl", "copy_engine", "multimem"):
            torch.manual_seed(0)
            model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)]).cuda()
            for layer in model:
                fully_shard(layer)
            fully_shard(model)
            assert model.set_collectives(name) == (name,), name
            optimizer, found[name] = torch.optim.SGD(model.parameters(), lr=0.1), []
            for step in range(3):
                x = torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * step + dist.get_rank())).cuda()
                loss = model(x).pow(2).mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found[name].append(loss.item())
            torch.cuda.synchronize()
            dist.barrier()  # Other ranks read this one's memory.
    return found


def copies() -> object:
    """Launches of copies, in a step of a model with many small parameters."""
    from torch_ragged.fsdp import fully_shard

    torch.manual_seed(0)
    layers = [nn.Sequential(*[each for _ in range(4) for each in (nn.Linear(8, 8), nn.LayerNorm(8))]) for _ in range(3)]
    model = nn.Sequential(*layers).cuda()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    counts = []
    for _ in range(3):
        torch.ops.rehearsal.counts(True)
        model(torch.ones(2, 8, device="cuda")).sum().backward()
        launches, moved, *_ = torch.ops.rehearsal.counts(False)
        counts.append(moved)
    return counts


def main() -> None:
    name, *arguments = sys.argv[1:]
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 0))
    torch.cuda.set_device(rank)
    if size:
        store = dist.TCPStore("127.0.0.1", int(os.environ["STORE"]), is_master=False)
        dist.init_process_group("nccl", store=store, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=60))
    answer = globals()[name](*arguments)
    print("ANSWER" + json.dumps([answer, torch.ops.rehearsal.reports()]), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
