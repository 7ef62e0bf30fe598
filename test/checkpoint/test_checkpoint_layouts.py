"""Checkpoints of plain local tensors with layouts: written and read by boxes, at other ranks, and into DTensors and back."""

import multiprocessing
import os
import tempfile
import unittest
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import error_of, ranks, run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from torch_ragged import GlobalLayout, RaggedShard, checkpoint, owned_boxes, with_layout

SHAPES = {"w": (6, 5), "experts": (3, 4, 2), "b": (7,), "scale": (), "none": (0, 3)}
HOW = {
    "rows": {"w": [Shard(0)], "experts": [Shard(0)], "b": [Shard(0)], "scale": [Replicate()], "none": [Shard(0)]},
    "columns": {"w": [Shard(1)], "experts": [Shard(2)], "b": [Replicate()], "scale": [Replicate()], "none": [Shard(1)]},
}


def whole(name, seed):
    """Equal on all ranks."""
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(seed + len(name)))


def units(ranks, total):
    """Runs of elements that begin and end inside of rows; the first rank has none."""
    return (0, *(total // (ranks - 1) + (i < total % (ranks - 1)) for i in range(ranks - 1)))


def placements_of(how, name, ranks):
    if how != "ragged":
        return HOW[how][name]
    shape = SHAPES[name]
    total = torch.Size(shape).numel() or 1
    return [RaggedShard(range(len(shape)), units(ranks, total))] if ranks > 1 else [Replicate()]


def local_of(value, boxes):
    """The elements of the boxes, one behind the other."""
    parts = [value[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))] for box in boxes]
    return torch.cat([part.reshape(-1) for part in parts]) if parts else value.new_zeros(0)


class Boxes(nn.Module):
    """Plain parameters, each with this rank's elements of a whole tensor. ``layouts`` says which."""

    def __init__(self, how, seed):
        super().__init__()
        rank, size = dist.get_rank(), dist.get_world_size()
        self.layouts = {}
        for name, shape in SHAPES.items():
            args = (shape, (size,), placements_of(how, name, size), (rank,))
            # Runs that cut rows are few boxes of a flat local tensor. The others are slices of a matrix.
            layout = GlobalLayout.of(*args, flat=how == "ragged")
            local = local_of(whole(name, seed), owned_boxes(*args)).view(layout.local_shape)
            self.layouts[name] = layout
            self.register_parameter(name, nn.Parameter(local))


def dtensors(seed):
    model, size = nn.Module(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    for name in SHAPES:
        value = distribute_tensor(whole(name, seed), mesh, placements_of("ragged", name, size), src_data_rank=None)
        model.register_parameter(name, nn.Parameter(value))
    return model


def held(value, layout):
    """What a rank holds of a value, in the order of its local tensor."""
    boxes = layout.boxes()
    return local_of(value, boxes)


def trained(seed):
    """Two steps of AdamW in one process: weights, and both moments, by name."""
    params = {name: nn.Parameter(whole(name, seed)) for name in SHAPES}
    optimizer = torch.optim.AdamW(params.values(), lr=0.1)
    for step in range(2):
        for name, param in params.items():
            param.grad = whole(name, 100 + step)
        optimizer.step()
    return {
        name: [param.detach(), *(optimizer.state[param][key] for key in ("exp_avg", "exp_avg_sq"))]
        for name, param in params.items()
    }


def state_of(how, seed, steps=0):
    model = dtensors(seed) if how == "dtensor" else Boxes(how, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(steps):
        for name, param in model.named_parameters():
            gradient = whole(name, 100 + step)
            if how == "dtensor":
                param.grad = distribute_tensor(gradient, param.device_mesh, param.placements, src_data_rank=None)
            else:
                param.grad = held(gradient, model.layouts[name]).view(param.shape)
        optimizer.step()
    return checkpoint.TrainState(model, optimizer, layouts=getattr(model, "layouts", {}))


def check_trained(state, how):
    for name, values in trained(1).items():
        param = dict(state.model.named_parameters())[name]
        own = state.optimizer.state[param]
        assert type(own["exp_avg"]) is (torch.Tensor if how != "dtensor" else type(param.data)) and float(own["step"]) == 2
        for value, found in zip(values, (param.detach(), own["exp_avg"], own["exp_avg_sq"]), strict=True):
            if how == "dtensor":
                assert torch.equal(found.full_tensor(), value), (name, how)
            else:
                assert torch.equal(found.reshape(-1), held(value, state.model.layouts[name])), (name, how)


def save_as(path, how):
    checkpoint.save(Path(path) / how, state_of(how, 1, steps=2))


def load_all(path, written):
    for how in ("rows", "columns", "ragged", "dtensor"):
        for saved in written:
            state = state_of(how, 5)
            manifest = checkpoint.load(Path(path) / saved, state)
            check_trained(state, how)
            assert manifest.tensors["model.experts"].shape == (3, 4, 2)


def save_by_process(path):
    os.environ["MASTER_ADDR"] = "127.0.0.1"  # For torch's process that saves, which daemons as this one may not start.
    multiprocessing.current_process()._config["daemon"] = False
    try:
        group = dist.new_group(backend="gloo")
        checkpoint.async_save(path, state_of("columns", 1, steps=2), kind="process", process_group=group).result()
    finally:
        multiprocessing.current_process()._config["daemon"] = True
    state = state_of("dtensor", 5)
    checkpoint.load(path, state)
    check_trained(state, "dtensor")


class CheckpointLayoutsTest(unittest.TestCase):
    def test_boxes_load_into_other_boxes_and_dtensors_on_other_ranks(self):
        with tempfile.TemporaryDirectory() as path:
            written = ("rows", "ragged", "dtensor")
            for how in written:
                run_ranks(3, save_as, path, how)
            run_ranks(2, load_all, path, written)

    @ranks(2)
    def test_in_the_background_and_by_attributes_and_dcp():
        """Layouts survive the copy of a background save; tensors of ``extra`` and of plain DCP carry their own."""
        rank = dist.get_rank()
        paths = [tempfile.mkdtemp() if rank == 0 else None]
        dist.broadcast_object_list(paths)
        path = Path(paths[0])
        group = dist.new_group(backend="gloo")
        layout = GlobalLayout.of((6, 5), (2,), [Shard(1)], (rank,))
        state = state_of("columns", 1, steps=2)
        state.extra["average"] = local = held(whole("w", 7), layout).view(layout.local_shape)
        for name, value in vars(layout).items():
            setattr(local, name, value)
        checkpoint.async_save(path / "thread", state, process_group=group).result()
        fresh = state_of("ragged", 5)
        rows = GlobalLayout.of((6, 5), (2,), [Shard(0)], (rank,))
        fresh.extra["average"] = with_layout(torch.zeros(rows.local_shape), rows)
        checkpoint.load(path / "thread", fresh)
        check_trained(fresh, "ragged")
        assert torch.equal(fresh.extra["average"].reshape(-1), held(whole("w", 7), rows))

        dcp.save({"w": with_layout(local, layout)}, checkpoint_id=path / "dcp", process_group=group)
        target = distribute_tensor(torch.zeros(6, 5), init_device_mesh("cpu", (2,)), [RaggedShard((0, 1), (4, 26))])
        padded = torch.full((5, 7), -1.0)
        moved = GlobalLayout((6, 5), rows.global_offsets, ((1, 2),), rows.local_sizes)
        for value in (target, with_layout(padded, moved)):
            dcp.load({"w": value}, checkpoint_id=path / "dcp", process_group=group)
        assert torch.equal(target.full_tensor(), whole("w", 7))
        assert torch.equal(padded[1:4, 2:], whole("w", 7)[3 * rank : 3 * rank + 3]) and int((padded == -1).sum()) == 20

    @pytest.mark.slow
    def test_a_process_that_saves_gets_the_layouts(self):
        with tempfile.TemporaryDirectory() as path:
            run_ranks(2, save_by_process, path)

    @ranks(2)
    def test_layouts_that_are_no_whole_tensor_are_refused_on_every_rank():
        rank = dist.get_rank()
        paths = [tempfile.mkdtemp() if rank == 0 else None]
        dist.broadcast_object_list(paths)
        path = Path(paths[0])
        layouts = {r: GlobalLayout.of((6, 5), (2,), [Shard(0)], (r,)) for r in range(2)}
        empty = GlobalLayout((6, 5), (), (), ())
        overlap = GlobalLayout((6, 5), ((2, 0),), ((0, 0),), ((4, 5),))
        outside = vars(layouts[1]) | {"global_offsets": ((4, 0),)}
        wrong_state = state_of("rows", 1, steps=1)
        wrong_state.optimizer.state[wrong_state.model.w]["rows"] = torch.zeros(3)
        cases = [
            (
                with_layout(torch.zeros(0, 5), empty),
                ["extra.x: no rank holds the element (3, 0): the boxes of all ranks have 15 of 30"],
            ),
            (
                with_layout(torch.zeros(4, 5), overlap),
                ["extra.x: the box", "of rank 0 and the box", "of rank 1 overlap in part"],
            ),
            (
                with_layout(torch.zeros(3, 5).half(), layouts[1]),
                ["extra.x has shape (6, 5) and torch.float16 on rank 1, (6, 5) and torch.float32"],
            ),
            (
                torch.zeros(3, 5),
                ["x: GlobalLayout: box 0 with offsets (4, 0) and sizes (3, 5) is not in the global shape (6, 5) (rank 1)"],
            ),
        ]
        for name, value in outside.items():
            setattr(cases[-1][0], name, value)
        good = state_of("rows", 1)
        good.extra["x"] = with_layout(torch.zeros(3, 5), layouts[rank])
        checkpoint.save(path / "good", good)
        for value, words in cases:
            state = state_of("rows", 5)
            before = [param.detach().clone() for param in state.model.parameters()]
            state.extra["x"] = value if rank == 1 else with_layout(torch.zeros(3, 5), layouts[0])
            for call, folder in ((checkpoint.save, path / "new"), (checkpoint.load, path / "good")):
                text = error_of(call, folder, state)
                wrong_dtype = call is checkpoint.load and value.dtype == torch.float16
                wanted = ["extra.x is"] if wrong_dtype else words
                assert text.startswith("CheckpointError") and all(word in text for word in wanted), text
            assert all(torch.equal(a, b) for a, b in zip(before, state.model.parameters(), strict=True))
        for state, text in (
            (
                checkpoint.TrainState(Boxes("rows", 1), layouts={"v": empty}),
                "TrainState.layouts names v, which is no parameter",
            ),
            (
                checkpoint.TrainState(Boxes("rows", 1), layouts={"w": overlap}),
                "w: GlobalLayout: the box with local offsets (0, 0)",
            ),
            (
                checkpoint.TrainState(Boxes("rows", 1), layouts={"w": 1}),
                "w: GlobalLayout.of takes a DTensor, a shape, or an object with global_shape",
            ),
            (
                checkpoint.TrainState(Boxes("rows", 1), layouts=[empty]),
                "TrainState.layouts must map names of parameters to layouts",
            ),
            (wrong_state, "the state rows of w has shape (3,), and the local tensor with a layout (3, 5)"),
        ):
            found = error_of(checkpoint.save, path / "new", state)
            assert text in found, found
        dist.barrier()
        assert not (path / "new").exists() or os.listdir(path / "new") == []


if __name__ == "__main__":
    unittest.main()
