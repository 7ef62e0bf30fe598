"""A training program that uses the package's streams, events and collectives; run by faults.py, one process per rank.

It prints the bytes of all results, and the number of the sanitizer's reports.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.spare = nn.LayerNorm(32), nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.nn.functional.gelu(self.inner(self.norm(x)))


def train(name: str, wrap: Callable[[nn.Module], None], steps: int = 2, optimizer_stream: bool = False) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(4)]).cuda()
    wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    side, losses = torch.cuda.Stream(), []
    for step in range(steps):
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(10 * step + RANK)).cuda()
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
    torch.cuda.synchronize()
    return [*losses, *[parameter.to_local().detach() for parameter in model.parameters()]]


def finalized_later(wrap: Callable[[nn.Module], None]) -> list[torch.Tensor]:
    """The next backward writes gradients while the reductions of the last one are in flight."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(4)]).cuda()
    wrap(model)
    model.set_manual_backward_finalization(True)
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(RANK)).cuda()
    for _ in range(2):
        model(x).pow(2).mean().backward()
    model.finalize_backward()
    torch.cuda.synchronize()
    return [parameter.grad.to_local() for parameter in model.parameters() if parameter.grad is not None]


def variants(flavour: str) -> dict[str, Callable[[], list[torch.Tensor]]]:
    line, grid = init_device_mesh("cuda", (SIZE,)), init_device_mesh("cuda", (SIZE, 1), mesh_dim_names=("replicate", "shard"))
    if flavour == "fsdp2":
        from torch.distributed.fsdp import fully_shard
    else:
        from torch_ragged.fsdp import fully_shard

    def wrapped(mesh: DeviceMesh, divisor: float | None = None, **options: Any) -> Callable[[nn.Module], None]:
        def wrap(model: nn.Module) -> None:
            for block in model.children():
                fully_shard(block, mesh=mesh, **options)
            fully_shard(model, mesh=mesh, **options)
            if divisor is not None:
                for module in (model, *model.children()):
                    module.set_gradient_divide_factor(divisor)

        return wrap

    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    scaled = MixedPrecisionPolicy(reduce_dtype=torch.float16)
    found: dict[str, Callable[[], list[torch.Tensor]]] = {
        "float32": lambda: train("float32", wrapped(line)),
        "mixed": lambda: train("mixed", wrapped(line, mp_policy=half)),
        "float16": lambda: train("float16", wrapped(line, mp_policy=scaled)),
        "divided": lambda: train("divided", wrapped(line, 3.0)),
        "replicas": lambda: train("replicas", wrapped(grid)),
        "kept": lambda: train("kept", wrapped(line, reshard_after_forward=False)),
        "optimizer stream": lambda: train("optimizer stream", wrapped(line), 3, optimizer_stream=True),
    }
    if flavour == "ours":
        found["finalized later"] = lambda: finalized_later(wrapped(line))
        found["redistribute"] = lambda: redistribute(line)
        found["transfer"] = lambda: move(line)
    return found


def redistribute(mesh: DeviceMesh) -> list[torch.Tensor]:
    """Redistributions in flight while the current stream computes."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    from torch_ragged import RaggedShard

    whole = torch.arange(240.0, device="cuda").view(24, 10)
    ragged = distribute_tensor(whole, mesh, [RaggedShard((0,), (1, 2))])
    moved = ragged.redistribute(placements=[RaggedShard((0,), (2, 1))], async_op=True)
    product = moved * 2
    full = product.redistribute(placements=[Replicate()], async_op=True)
    answer = (full + 1).to_local()
    torch.cuda.synchronize()
    return [moved.to_local(), answer]


def move(mesh: DeviceMesh) -> list[torch.Tensor]:
    """A transfer in the background, behind what the current stream writes and before what it reads."""
    from torch.distributed.tensor import Shard, distribute_tensor

    from torch_ragged import RaggedShard, transfer

    source = {"w": distribute_tensor(torch.arange(64.0, device="cuda").view(16, 4), mesh, [Shard(0)])}
    target = {"w": distribute_tensor(torch.zeros(16, 4, device="cuda"), mesh, [RaggedShard((0,), (1, 3))])}
    plan = transfer.plan(source, target)
    torch.cuda.synchronize()
    source["w"].to_local().mul_(3)
    handle = plan.run(source, target, async_op=True)
    handle.wait()
    answer = target["w"].to_local() + 1
    torch.cuda.synchronize()
    return [answer]


def main() -> None:
    torch.cuda.set_device(RANK)
    store = dist.TCPStore("127.0.0.1", int(os.environ["STORE"]), is_master=False)
    dist.init_process_group("nccl", store=store, rank=RANK, world_size=SIZE, timeout=datetime.timedelta(seconds=60))
    flavour, *wanted = sys.argv[1:]
    digests = []
    for name, run in variants(flavour).items():
        if wanted and name not in wanted:
            continue
        before = torch.ops.rehearsal.reports()
        results = run()
        digest = hashlib.sha1(b"".join(each.double().cpu().contiguous().numpy().tobytes() for each in results))
        is_finite = all(bool(each.isfinite().all()) for each in results)
        digests.append(f"{name}={digest.hexdigest()[:10]},{is_finite},{torch.ops.rehearsal.reports() - before}")
    print("RESULT " + "; ".join(digests), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
