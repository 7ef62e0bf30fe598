"""Checkpoints and state dicts between this package, FSDP2, one process and Hugging Face folders; model and optimizer."""

import importlib.util
import json
import tempfile
import unittest
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import error_of, ranks, run_ranks
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from torch_ragged import RaggedShard, StridedRaggedShard
from torch_ragged.fsdp import blocks, fully_shard, rows

_HAS_SAFETENSORS = importlib.util.find_spec("safetensors") is not None


class Model(nn.Module):
    """Sizes that no number of ranks divides; a tied weight, buffers, a frozen parameter."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.inner = nn.Sequential(nn.Linear(6, 13), nn.BatchNorm1d(13), nn.Linear(13, 6))
        self.experts = nn.Parameter(torch.randn(3, 5, 6))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.randn(7), requires_grad=False)

    def forward(self, tokens):
        x = self.inner(self.embedding(tokens))
        return self.head(x + torch.einsum("bd,eod->bo", x, self.experts).sum(-1, keepdim=True))


def sharded(model, kind):
    """The model under one of the ways to shard it."""
    ranks = dist.get_world_size()
    if kind == "single":
        return model
    if kind == "fsdp2":
        mesh = init_device_mesh("cpu", (ranks,))
        torch_fully_shard(model.inner, mesh=mesh)
        return torch_fully_shard(model, mesh=mesh)
    mesh = init_device_mesh("cpu", (2, ranks // 2) if kind == "hsdp" else (ranks,))
    granularity = {"rows": rows(2), "blocks": blocks(2, 3)}.get(kind)
    policy = None if granularity is None else lambda fqn, p: granularity if p.ndim == 3 else None
    fully_shard(model.inner, mesh=mesh, orig_param_policy=policy)
    return fully_shard(model, mesh=mesh, orig_param_policy=policy)


def make(kind, seed):
    torch.manual_seed(seed)
    model = sharded(Model(), kind)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model, optimizer, steps=2):
    for step in range(steps):
        torch.manual_seed(100 + step)
        model(torch.randint(11, (8,))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def values(model, optimizer):
    """Every tensor of model and optimizer, whole, by name."""
    parameters, states = get_state_dict(model, optimizer)
    found = {name: whole(value).clone() for name, value in parameters.items()}
    for name, state in states["state"].items():
        found |= {f"{name}.{key}": whole(value).clone() for key, value in state.items()}
    return found


def assert_same(got, want):
    assert got.keys() == want.keys(), (got.keys() ^ want.keys(),)
    for name, value in want.items():
        assert torch.equal(got[name], value), name


def save_with_dcp(path, kind):
    model, optimizer = make(kind, 0)
    train(model, optimizer)
    parameters, states = get_state_dict(model, optimizer)
    dcp.save({"model": parameters, "optimizer": states}, checkpoint_id=path)
    return values(model, optimizer)


def load_with_dcp(path, kinds, want):
    for kind in kinds:
        load_kind(path, kind, want)


def load_kind(path, kind, want):
    model, optimizer = make(kind, 1)
    parameters, states = get_state_dict(model, optimizer)
    state = {"model": parameters, "optimizer": states}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert_same(values(model, optimizer), want)
    train(model, optimizer, 1)  # It goes on.


def check_full_state_dicts(kind):
    """Full state dicts out of and into a sharded model and its optimizer, in every way that torch offers."""
    model, optimizer = make(kind, 0)
    train(model, optimizer)
    want = values(model, optimizer)
    rank = dist.get_rank()
    full = StateDictOptions(full_state_dict=True)
    parameters, states = get_state_dict(model, optimizer, options=full)
    assert not any(isinstance(value, DTensor) for value in parameters.values())
    assert all(torch.equal(value, want[name]) for name, value in parameters.items())
    assert torch.equal(states["state"]["experts"]["exp_avg"], want["experts.exp_avg"])

    single, single_optimizer = make("single", 2)
    set_state_dict(single, single_optimizer, model_state_dict=parameters, optim_state_dict=states)
    assert_same(values(single, single_optimizer), want)

    offload = StateDictOptions(full_state_dict=True, cpu_offload=True)
    on_zero, states_on_zero = get_state_dict(model, optimizer, options=offload)
    assert bool(on_zero) == (rank == 0)
    sharded_on_cpu = get_model_state_dict(model, options=StateDictOptions(cpu_offload=True))
    assert all(torch.equal(whole(value), want[name]) for name, value in sharded_on_cpu.items())
    assert isinstance(sharded_on_cpu["experts"], DTensor) and sharded_on_cpu["experts"].placements == model.experts.placements

    other, other_optimizer = make(kind, 3)
    pointers = [p.to_local().data_ptr() for p in other.parameters()]
    broadcast = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, on_zero if rank == 0 else {}, options=broadcast)
    set_optimizer_state_dict(other, other_optimizer, states_on_zero if rank == 0 else {}, options=broadcast)
    assert_same(values(other, other_optimizer), want)
    assert pointers == [p.to_local().data_ptr() for p in other.parameters()]

    third, third_optimizer = make(kind, 4)
    set_model_state_dict(third, parameters, options=full)
    set_optimizer_state_dict(third, third_optimizer, states, options=full)
    assert_same(values(third, third_optimizer), want)
    for each, each_optimizer in ((other, other_optimizer), (third, third_optimizer)):
        train(each, each_optimizer, 1)


def without_ties(model):
    """What safetensors can hold of a model: each tensor under one name; and torch consolidates floats only."""
    state = model.state_dict()
    return {name: value for name, value in state.items() if value.is_floating_point() and name != "head.weight"}


def with_ties(model):
    """Each of two tied parameters has its own file."""
    return {name: value for name, value in model.state_dict().items() if value.is_floating_point()}


def export(path):
    """A sharded model to a Hugging Face folder, consolidated."""
    model, _ = make("elements", 0)
    writer = HuggingFaceStorageWriter(path, save_distributed=True, enable_consolidation=True)
    state = without_ties(model)
    dcp.save(state, storage_writer=writer)
    sharded_only = HuggingFaceStorageWriter(f"{path}/sharded_only", save_distributed=True)
    dcp.save(with_ties(model), storage_writer=sharded_only)
    text = (
        error_of(dcp.save, state, storage_writer=HuggingFaceStorageWriter(f"{path}/not")) if dist.get_world_size() == 1 else ""
    )
    return {name: whole(value) for name, value in state.items()}, text


def start_from(path, want):
    """A run that starts from a Hugging Face folder, whole or in shards."""
    for folder, choose in ((path, without_ties), (f"{path}/sharded_only", with_ties)):
        model, optimizer = make("rows", 7)
        state = choose(model)
        dcp.load(state, storage_reader=HuggingFaceStorageReader(str(folder)))
        for name, value in model.state_dict().items():
            assert name not in want or torch.equal(whole(value), want[name]), name
        train(model, optimizer, 1)


def export_grid(path):
    """Tensor parallelism under FSDP to safetensors and back."""
    grid = init_device_mesh("cpu", (2, 2))
    value = torch.randn(8, 6, dtype=torch.bfloat16)
    layouts = {"strided": [StridedRaggedShard((0, 1), (5, 19), 2), Shard(0)], "columns": [RaggedShard((0,), (5, 3)), Shard(1)]}
    state = {name: distribute_tensor(value, grid, placements) for name, placements in layouts.items()}
    writer = HuggingFaceStorageWriter(path, save_distributed=True, enable_consolidation=True)
    dcp.save(state, storage_writer=writer)
    blank = {
        name: distribute_tensor(torch.zeros_like(value), grid, layouts[other])
        for name, other in zip(layouts, [*layouts][::-1], strict=True)
    }
    dcp.load(blank, storage_reader=HuggingFaceStorageReader(path))
    assert all(torch.equal(tensor.full_tensor(), value) for tensor in blank.values())


class InteropTest(unittest.TestCase):
    def test_each_kind_loads_the_checkpoints_of_the_others(self):
        self.check_kinds(
            (("fsdp2", 2), [(("elements",), 2), (("rows", "hsdp"), 4)]),
            (("single", 1), [(("blocks", "fsdp2"), 4)]),
            (("elements", 3), [(("elements", "fsdp2"), 2), (("single",), 1)]),
        )

    @pytest.mark.slow
    def test_all_kinds_load_the_checkpoints_of_all_kinds(self):
        loaded = [(("elements", "fsdp2"), 2), (("blocks", "rows", "hsdp", "fsdp2"), 4), (("single",), 1)]
        self.check_kinds(*((saved, loaded) for saved in (("fsdp2", 2), ("single", 1), ("elements", 3))))

    def check_kinds(self, *cases):
        for (kind, world), loaded in cases:
            with tempfile.TemporaryDirectory() as path:
                want = run_ranks(world, save_with_dcp, path, kind)[0]
                for others, other_ranks in loaded:
                    with self.subTest(saved=kind, loaded=others):
                        run_ranks(other_ranks, load_with_dcp, path, others, want)

    def test_full_state_dicts_go_out_and_back_in(self):
        run_ranks(3, check_full_state_dicts, "elements")
        run_ranks(4, check_full_state_dicts, "hsdp")

    @ranks(2)
    def test_partial_state_dicts_leave_the_rest_alone():
        """``strict`` and ``submodules``."""
        model, optimizer = make("elements", 0)
        train(model, optimizer)
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        part = {name: value for name, value in full.items() if not name.startswith("inner")}
        other, _ = make("elements", 1)
        before = {name: whole(value).clone() for name, value in other.state_dict().items()}
        sharded_part = {name: value for name, value in model.state_dict().items() if name in part}
        assert "inner.0.weight" in error_of(set_model_state_dict, other, sharded_part)
        set_model_state_dict(other, dict(part), options=StateDictOptions(full_state_dict=True, strict=False))
        for name, value in other.state_dict().items():
            assert torch.equal(whole(value), full[name] if name in part else before[name]), name

        inner = get_model_state_dict(model, submodules={model.inner})
        assert set(inner) == {name for name in full if name.startswith("inner")}
        assert all(torch.equal(whole(value), full[name]) for name, value in inner.items())
        flat = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
        assert isinstance(flat["state.experts.exp_avg"], DTensor)
        set_optimizer_state_dict(model, optimizer, flat, options=StateDictOptions(flatten_optimizer_state_dict=True))

    @unittest.skipUnless(_HAS_SAFETENSORS, "needs safetensors")
    def test_hugging_face_folders_hold_whole_tensors_and_load_back(self):
        from safetensors.torch import load_file

        with tempfile.TemporaryDirectory() as path:
            want, _ = run_ranks(3, export, path)[0]
            found = {}
            for file in Path(path).glob("*.safetensors"):
                found |= load_file(file)
            assert_same(found, want)
            self.assertEqual(
                set(json.loads((Path(path) / "model.safetensors.index.json").read_text())["weight_map"]), set(want)
            )
            run_ranks(2, start_from, path, want)
        with tempfile.TemporaryDirectory() as path:
            run_ranks(4, export_grid, path)
