"""Everyday tools on ragged DTensors: pickle, deepcopy, torch.save, printing, CommDebugMode and DebugMode."""

import copy
import io
import json
import pickle
import re
import tempfile
import unittest
from pathlib import Path

import torch
from common import run_ranks
from expecttest import TestCase
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._debug_mode import DebugMode

from torch_ragged import RaggedShard

PLACEMENTS = [
    RaggedShard((0,), (1, 3)),
    RaggedShard((0, 1), (5, 7)),
    RaggedShard((), (0, 1)),
    RaggedShard((-2,), (2, 2)),
]


def same(left, right):
    """Whether two DTensors agree bitwise, and in all that a DTensor is."""
    assert isinstance(left, DTensor) and isinstance(right, DTensor), (type(left), type(right))
    local = left.to_local().detach(), right.to_local().detach()
    return (
        type(left) is type(right)
        and (left.shape, left.stride(), left.dtype, left.requires_grad)
        == (right.shape, right.stride(), right.dtype, right.requires_grad)
        and (left.device_mesh, left.placements) == (right.device_mesh, right.placements)
        and local[0].shape == local[1].shape
        and torch.equal(*local)
    )


def saved_and_loaded(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def ragged_model(mesh):
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    for name, parameter in list(model.named_parameters()):
        setattr(model, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [RaggedShard((0,), (1, 3))])))
    return model


def step(model, optimizer):
    """One optimizer step with gradients that depend on the parameters."""
    for parameter in model.parameters():
        parameter.grad = (parameter.detach() + 1) * 3
    optimizer.step()


def trained(mesh):
    model = ragged_model(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer)
    return model, optimizer


# --- copies --------------------------------------------------------------------------------------------------------


def copy_tensors():
    """Names of (copy, placement, kind) that differ from the original or share its memory."""
    mesh = init_device_mesh("cpu", (2,))
    ways = {"pickle": lambda t: pickle.loads(pickle.dumps(t)), "deepcopy": copy.deepcopy, "save": saved_and_loaded}
    wrong, count = [], 0
    for placement in PLACEMENTS:
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            tensor = distribute_tensor(torch.randn(4, 3).mul(10).to(dtype), mesh, [placement])
            originals = [tensor] if dtype == torch.int64 else [tensor, nn.Parameter(tensor.clone())]
            for original in originals:
                for name, way in ways.items():
                    other = way(original)
                    count += 1
                    if not same(original, other):
                        wrong.append((name, placement, type(original), "differs"))
                    before = original.to_local().detach().clone()
                    with torch.no_grad():
                        other.zero_()
                    if not torch.equal(original.to_local().detach(), before):
                        wrong.append((name, placement, type(original), "shares memory"))
    return wrong, count


def copy_gradient():
    mesh = init_device_mesh("cpu", (2,))
    parameter = nn.Parameter(distribute_tensor(torch.randn(4, 3), mesh, [RaggedShard((0,), (1, 3))]))
    parameter.grad = parameter.detach() * 2
    other = copy.deepcopy(parameter)
    return same(parameter, other), same(parameter.grad, other.grad), parameter.grad is not other.grad


def copy_training():
    """A deep copy of model and optimizer makes the step that the original makes, and leaves the original alone."""
    model, optimizer = trained(init_device_mesh("cpu", (2,)))
    other_model, other_optimizer = copy.deepcopy((model, optimizer))
    owners = {id(p) for p in other_model.parameters()}
    joined = all(id(p) in owners for group in other_optimizer.param_groups for p in group["params"])
    before = [p.to_local().detach().clone() for p in model.parameters()]
    step(other_model, other_optimizer)
    alone = all(torch.equal(p.to_local().detach(), b) for p, b in zip(model.parameters(), before))
    changed = not any(same(p, q) for p, q in zip(model.parameters(), other_model.parameters()) if q.to_local().numel())
    step(model, optimizer)
    agree = all(same(p, q) for p, q in zip(model.parameters(), other_model.parameters()))
    return joined, alone, changed, agree


def save_training(folder):
    """State dicts of model and optimizer come back from a file per rank, and training goes on as if nothing was."""
    mesh = init_device_mesh("cpu", (2,))
    model, optimizer = trained(mesh)
    path = Path(folder) / f"{mesh.get_rank()}.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    loaded = torch.load(path, weights_only=True)
    equal = all(same(value, loaded["model"][name]) for name, value in model.state_dict().items())
    state = optimizer.state_dict()["state"]
    moments = [same(state[i][k], loaded["optimizer"]["state"][i][k]) for i in state for k in ("exp_avg", "exp_avg_sq")]
    other = ragged_model(mesh)
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=0.5)
    other.load_state_dict(loaded["model"])
    other_optimizer.load_state_dict(loaded["optimizer"])
    step(model, optimizer)
    step(other, other_optimizer)
    return equal, moments, all(same(p, q) for p, q in zip(model.parameters(), other.parameters()))


class CopyTest(unittest.TestCase):
    def test_tensors_and_parameters(self):
        for wrong, count in run_ranks(2, copy_tensors):
            self.assertEqual(wrong, [])
            self.assertEqual(count, len(PLACEMENTS) * 5 * 3)

    def test_a_deep_copy_has_a_gradient_of_its_own(self):
        self.assertEqual(run_ranks(2, copy_gradient), [(True, True, True)] * 2)

    def test_a_deep_copy_trains_on_its_own(self):
        self.assertEqual(run_ranks(2, copy_training), [(True, True, True, True)] * 2)

    def test_state_dicts_through_weights_only_files(self):
        with tempfile.TemporaryDirectory() as folder:
            for equal, moments, continued in run_ranks(2, save_training, folder):
                self.assertTrue(equal)
                self.assertEqual(moments, [True] * 4)
                self.assertTrue(continued)

    def test_placements(self):
        for placement in PLACEMENTS:
            for other in (
                pickle.loads(pickle.dumps(placement)),
                copy.copy(placement),
                copy.deepcopy([placement])[0],
                saved_and_loaded({"placements": (placement, Replicate())})["placements"][0],
                eval(repr(placement)),
            ):
                self.assertEqual(other, placement)
                self.assertEqual(repr(other), repr(placement))
                self.assertEqual(hash(other), hash(placement))


# --- printing ------------------------------------------------------------------------------------------------------


def prints():
    mesh = init_device_mesh("cpu", (2,))
    tensor = distribute_tensor(torch.arange(4.0).view(2, 2), mesh, [RaggedShard((0,), (0, 2))])
    with CommDebugMode() as mode:
        texts = repr(tensor), str(nn.Parameter(tensor)), str(tensor._spec), f"{tensor.sum().full_tensor():.1f}"
    return texts, mode.get_total_counts()


class PrintTest(TestCase):
    def test_tensor_parameter_spec_and_number(self):
        (empty, _), (full, counts) = run_ranks(2, prints)
        self.assertExpectedInline(
            "\n".join(empty),
            """\
DTensor(local_tensor=tensor([]), device_mesh=DeviceMesh((2,), 'cpu', stride=(1,)), placements=(RaggedShard(dims=(0,), local_units=(0, 2)),))
DTensor(local_tensor=tensor([]), device_mesh=DeviceMesh((2,), 'cpu', stride=(1,)), placements=(RaggedShard(dims=(0,), local_units=(0, 2)),))
Spec(f32[2, 2](RS(0)[0,2]))
6.0""",
        )
        self.assertExpectedInline(
            "\n".join(full),
            """\
DTensor(local_tensor=tensor([0., 1., 2., 3.]), device_mesh=DeviceMesh((2,), 'cpu', stride=(1,)), placements=(RaggedShard(dims=(0,), local_units=(0, 2)),))
DTensor(local_tensor=tensor([0., 1., 2., 3.]), device_mesh=DeviceMesh((2,), 'cpu', stride=(1,)), placements=(RaggedShard(dims=(0,), local_units=(0, 2)),))
Spec(f32[2, 2](RS(0)[0,2]))
6.0""",
        )
        self.assertEqual(counts, 1)  # of full_tensor(): printing is local


# --- CommDebugMode and DebugMode -----------------------------------------------------------------------------------


class Gathers(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        self.weight = nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [RaggedShard((0,), (2, 2))]))

    def forward(self, x):
        moved = self.weight.redistribute(placements=[RaggedShard((0,), (1, 3))])
        moved = torch.mul(moved, 2)
        return (
            x @ self.weight.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()]).T
            + moved.sum().full_tensor()
        )


def communication(folder):
    mesh = init_device_mesh("cpu", (2,))
    model = Gathers(mesh)
    with CommDebugMode() as mode:
        model(torch.ones(1, 3)).sum().backward()
    counts = {str(op): n for op, n in mode.get_comm_counts().items()}
    sharding = {name: [str(p) for p in placements] for name, placements in mode.get_sharding_info().items()}
    path = Path(folder) / str(mesh.get_rank())
    mode.generate_json_dump(f"{path}.json", noise_level=3)
    mode.log_comm_debug_tracing_table_to_file(f"{path}.txt", noise_level=3)
    text = re.sub(r"\x1b\[[\d;]*m", "", Path(f"{path}.txt").read_text())
    return (
        counts,
        sharding,
        mode.generate_comm_debug_tracing_table(noise_level=3),
        text,
        json.loads(Path(f"{path}.json").read_text()),
    )


def records():
    """The redistributions that DebugMode shows, and the collectives below each, for ragged and for Shard(0)."""
    mesh = init_device_mesh("cpu", (2,))
    shown = {}
    for key, placement in (("ragged", RaggedShard((0,), (2, 2))), ("shard", Shard(0))):
        tensor = distribute_tensor(torch.ones(4, 3), mesh, [placement]).requires_grad_()
        replicated = distribute_tensor(torch.ones(4, 3), mesh, [Replicate()])
        programs = {
            "explicit": lambda tensor=tensor: tensor.detach().redistribute(placements=[Replicate()]),
            "implicit": lambda tensor=tensor, replicated=replicated: torch.add(tensor.detach(), replicated),
            "nothing": lambda tensor=tensor: tensor.detach().redistribute(placements=tensor.placements),
            "backward": lambda tensor=tensor: (
                tensor.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()]).sum().backward()
            ),
        }
        for name, program in programs.items():
            with DebugMode() as mode:
                program()
            shown[key, name] = outline(mode.debug_string())
    with DebugMode() as mode:
        norm = torch.linalg.vector_norm(distribute_tensor(torch.ones(4, 3), mesh, [RaggedShard((0,), (1, 3))]))
        norm.redistribute(placements=[Replicate()])
        ragged = distribute_tensor(torch.ones(4, 3), mesh, [RaggedShard((0,), (0, 1))])
        ragged.redistribute(placements=[RaggedShard((0, 1), (5, 7))]).redistribute(placements=[Shard(1)])
    shown["others"] = [line for line in outline(mode.debug_string()) if "ragged" not in line]
    return shown


def outline(text):
    """Redistributions with their nesting, and the names of collectives."""
    lines = [
        re.match(r" *", line)[0] + re.split(r"\(t: |\(t\$", line.strip())[0] if "_c10d" in line else line
        for line in text.splitlines()
    ]
    kept = [line for line in lines if "redistribute_input" in line or "_c10d_functional" in line]
    return [line for line in kept if not line.endswith(("wait_tensor", "_wrap_tensor_autograd"))]


class DebugTest(TestCase):
    def test_comm_debug_mode_counts_and_writes_ragged_redistributions(self):
        with tempfile.TemporaryDirectory() as folder:
            answers = run_ranks(2, communication, folder)
        for counts, sharding, table, text, dump in answers:
            self.assertEqual(counts, {})
            self.assertEqual(sharding, {})
            self.assertIn("sharding: [(RaggedShard(dims=(0,), local_units=(1, 3)),)]", text)
            self.assertIn("*c10d_functional.all_to_all_single: 1", text)
            self.assertEqual(re.sub(r"\x1b\[[\d;]*m", "", table), text)
            self.assertIn("RaggedShard(dims=(0,), local_units=(2, 2))", json.dumps(dump))

    def test_debug_mode_names_ragged_redistributions_as_torch_does_its_own(self):
        for shown in run_ranks(2, records):
            for name in ("explicit", "implicit", "nothing", "backward"):
                ragged = [
                    line.replace("RS(0)[2,2]", "S(0)").replace("t: f32[6]", "t: f32[2, 3]") for line in shown["ragged", name]
                ]
                self.assertEqual(ragged, shown["shard", name])
            self.assertExpectedInline("\n".join(shown["ragged", "explicit"]), """""")
            self.assertExpectedInline("\n".join(shown["ragged", "implicit"]), """""")
            self.assertExpectedInline("\n".join(shown["ragged", "backward"]), """""")
            self.assertExpectedInline("\n".join(shown["others"]), """""")


if __name__ == "__main__":
    unittest.main()
