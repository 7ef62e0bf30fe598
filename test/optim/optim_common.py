"""What the tests of optimizers share: a set of parameters with fixed values and gradients, placed on any mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from torch_ragged import RaggedShard, StridedRaggedShard
from torch_ragged.fsdp import fully_shard
from torch_ragged.optim import matrix_groups

SHAPES = ((64, 48), (33, 65), (96, 32), (1, 7), (7, 1), (5, 40, 24), (4, 32, 32), (17,), (64, 48))
"""Matrices wide, tall, square, of one row or column; stacks; a vector."""


def value(index: int, step: int, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers that depend on the arguments only."""
    generator = torch.Generator().manual_seed(1000 * step + index)
    return torch.randn(*shape, generator=generator).to(dtype)


def uneven(numel: int, ranks: int, seed: int) -> tuple[int, ...]:
    """Units of single elements, uneven, some zero."""
    generator = torch.Generator().manual_seed(seed)
    edges = sorted(torch.randint(0, numel + 1, (ranks - 1,), generator=generator).tolist())
    return tuple(b - a for a, b in zip([0, *edges], [*edges, numel]))


def ragged(index: int, shape: tuple[int, ...], ranks: int) -> RaggedShard:
    """A cut that respects nothing: single elements."""
    numel = 1
    for size in shape:
        numel *= size
    return RaggedShard(tuple(range(len(shape))), uneven(numel, ranks, index))


def placements_for(kind: str, index: int, shape: tuple[int, ...], mesh: DeviceMesh) -> list[Any]:
    """Placements of a parameter, by the kind of the test."""
    size = mesh.size(mesh.ndim - 1)
    one = {
        "ragged": lambda: ragged(index, shape, size),
        "shard0": lambda: Shard(0),
        "shard1": lambda: Shard(min(1, len(shape) - 1)),
        "replicate": lambda: Replicate(),
        "one owner": lambda: RaggedShard((), tuple(int(rank == index % size) for rank in range(size))),
        "mixed": lambda: [ragged(index, shape, size), Shard(0), Shard(len(shape) - 1), Replicate()][index % 4],
    }
    if kind == "tensor parallel":  # (ragged, Shard): only on even shapes
        if shape[0] % size == 0 and index % 2:
            rest = 1
            for extent in (shape[0] // size, *shape[1:]):
                rest *= extent
            units = uneven(rest, mesh.size(0), index)
            return [StridedRaggedShard(tuple(range(len(shape))), units, split_factor=size), Shard(0)]
        return [Shard(0), Replicate()]
    return [Replicate()] * (mesh.ndim - 1) + [one[kind]()] if kind != "all ragged" else [one["ragged"]()]


def make_params(
    kind: str, mesh: DeviceMesh | None, shapes: Sequence[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32
) -> list[torch.nn.Parameter]:
    """Parameters of fixed values; plain without a mesh."""
    params = []
    for index, shape in enumerate(shapes):
        whole = value(index, 0, shape, dtype)
        params.append(torch.nn.Parameter(whole if mesh is None else place(whole, kind, index, mesh)))
    return params


def place(whole: torch.Tensor, kind: str, index: int, mesh: DeviceMesh) -> DTensor:
    return distribute_tensor(whole, mesh, placements_for(kind, index, tuple(whole.shape), mesh), src_data_rank=None)


def set_gradients(params: Sequence[torch.nn.Parameter], step: int, missing: Callable[[int, int], bool] | None = None) -> None:
    """The gradients of a step, placed as the parameters."""
    for index, param in enumerate(params):
        whole = value(index, step, param.shape, param.dtype)
        if missing is not None and missing(index, step):
            param.grad = None
        elif isinstance(param, DTensor):
            param.grad = distribute_tensor(whole, param.device_mesh, param.placements, src_data_rank=None)
        else:
            param.grad = whole


def whole(tensor: Any) -> Any:
    """The full tensor of a DTensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def wholes(params: Sequence[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Parameters and all states, gathered, in a fixed order."""
    result = [whole(param.detach()) for param in params]
    for param in params:
        state = optimizer.state[param]
        result += [torch.as_tensor(whole(state[name])) for name in sorted(state)]
    return [each.clone() for each in result]


def train(
    make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
    kind: str,
    mesh_shape: tuple[int, ...] | None,
    steps: int = 5,
    dtype: torch.dtype = torch.float32,
    missing: Callable[[int, int], bool] | None = None,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
) -> list[torch.Tensor]:
    """Parameters and states, gathered, after some steps with given gradients."""
    mesh = init_device_mesh("cpu", mesh_shape) if mesh_shape else None
    params = make_params(kind, mesh, shapes, dtype)
    optimizer = make(params)
    for step in range(1, steps + 1):
        set_gradients(params, step, missing)
        optimizer.step()
    return wholes(params, optimizer)


def assert_same(results: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], what: str) -> None:
    """Bitwise equality, NaNs included."""
    assert len(results) == len(expected), what
    for index, (a, b) in enumerate(zip(results, expected, strict=True)):
        a, b = a.cpu(), b.cpu()
        same = a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | ((a != a) & (b != b))).all())
        assert same, f"{what}: tensor {index} of shape {tuple(b.shape)} differs"


class Net(torch.nn.Module):
    """A stack of matrices, a matrix and a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.Parameter(torch.randn(3, 16, 16) / 4)
        self.inner = torch.nn.Linear(16, 24)


def _run(optimizer_class: Any, mesh_shape: tuple[int, ...]) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(3)
    net = fully_shard(Net(), mesh=init_device_mesh("cpu", mesh_shape))
    return net, optimizer_class(matrix_groups(net), lr=0.01, interval=2)


def _go_on(net: Net, optimizer: torch.optim.Optimizer, first: int) -> list[torch.Tensor]:
    for step in range(first, first + 3):
        set_gradients(list(net.parameters()), step)
        optimizer.step()
    return wholes(list(net.parameters()), optimizer)


def save_and_go_on(optimizer_class: Any, path: str, mesh_shape: tuple[int, ...]) -> list[torch.Tensor]:
    """Three steps of ``optimizer_class``, which has an ``interval``; a checkpoint; and the results of three more steps."""
    net, optimizer = _run(optimizer_class, mesh_shape)
    _go_on(net, optimizer, 1)
    dcp.save({"model": net.state_dict(), "optim": get_optimizer_state_dict(net, optimizer)}, checkpoint_id=path)
    return _go_on(net, optimizer, 4)


def load_and_go_on(optimizer_class: Any, path: str, mesh_shape: tuple[int, ...]) -> list[torch.Tensor]:
    """The results of three steps after the checkpoint, on any mesh."""
    net, optimizer = _run(optimizer_class, mesh_shape)
    model, optim = net.state_dict(), get_optimizer_state_dict(net, optimizer)
    dcp.load({"model": model, "optim": optim}, checkpoint_id=path)
    net.load_state_dict(model)
    set_optimizer_state_dict(net, optimizer, optim)
    return _go_on(net, optimizer, 4)
