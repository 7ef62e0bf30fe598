"""Plain Shard and Replicate programs, run by test_plain_dtensor.py with and without torch_ragged; prints JSON."""

import gc
import json
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

if "--ragged" in sys.argv:
    import torch_ragged

    assert torch_ragged.registration_report()


def programs(mesh):
    """Name -> (function, arguments)."""
    torch.manual_seed(0)
    x, w = torch.randn(8, 6), torch.randn(6, 4)

    def place(tensor, placement):
        return distribute_tensor(tensor, mesh, [placement])

    def train():
        weight = torch.nn.Parameter(place(w, Shard(0)))
        optimizer = torch.optim.AdamW([weight], lr=0.1)
        for _ in range(2):
            (place(x, Replicate()) @ weight).pow(2).mean().backward()
            torch.nn.utils.clip_grad_norm_([weight], 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return weight.detach()

    def roundtrip():
        leaf = place(x, Shard(0)).requires_grad_()
        local = leaf.redistribute(placements=[Shard(1)]).to_local()
        again = DTensor.from_local(local, mesh, [Shard(1)])
        (again.full_tensor() ** 2).sum().backward()
        return leaf.grad

    return {
        "add": lambda: place(x, Shard(0)) + place(x, Replicate()),
        "matmul": lambda: place(x, Shard(0)) @ place(w, Replicate()),
        "partial": lambda: place(x, Shard(1)) @ place(w, Shard(0)),
        "view": lambda: place(x, Shard(0)).view(-1, 3),
        "softmax": lambda: place(x, Shard(0)).softmax(-1),
        "argmax": lambda: place(x, Shard(0)).argmax(0),
        "sum": lambda: place(x, Shard(1)).sum(0),
        "mean": lambda: place(x, Shard(0)).mean(),
        "norm": lambda: torch.linalg.vector_norm(place(x, Shard(1))),
        "cat": lambda: torch.cat([place(x, Shard(0)), place(x, Shard(0))], dim=1),
        "uneven": lambda: place(torch.arange(5.0), Shard(0)) * 2,
        "foreach": lambda: torch._foreach_mul([place(x, Shard(0)), place(w, Shard(1))], 2.0)[1],
        "new_zeros": lambda: place(x, Shard(0)).new_zeros(3),
        "normal_": lambda: place(x, Shard(0)).normal_(0.5, 2),
        "normal_ of a generator": lambda: place(x, Shard(0)).normal_(generator=torch.Generator().manual_seed(1)),
        "rand_like": lambda: torch.rand_like(place(x, Shard(0)), dtype=torch.float64),
        "native_dropout": lambda: torch.native_dropout(place(x, Shard(1)), 0.5, True)[0],
        "train": train,
        "roundtrip": roundtrip,
    }


def draw_ragged(mesh):
    """Random ops on ragged tensors first: what they leave behind in DTensor's tables must not matter to others."""
    x = distribute_tensor(torch.ones(8, 6), mesh, [torch_ragged.RaggedShard((0,), (3, 5))])
    torch.native_dropout(torch.rand_like(x.normal_()), 0.5, True)
    x.normal_(generator=torch.Generator())


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if "--ragged" in sys.argv:
        draw_ragged(mesh)
    results = {}
    for name, program in programs(mesh).items():
        with CommDebugMode() as mode:
            result = program()
        counts = {str(op): n for op, n in mode.get_comm_counts().items()}
        results[name] = [result.full_tensor().tolist(), str(result.placements), result.stride(), counts]
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    gc.collect()  # Groups that cycles still hold would end with the interpreter, whose end a thread of gloo may not survive.
