"""Everyday tools on ragged DTensors: pickle, deepcopy, torch.save, printing, CommDebugMode and DebugMode."""

import copy
import io
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

from torch_ragged import RaggedShard, StridedRaggedShard

PLACEMENTS = [
    RaggedShard((0,), (1, 3)),
    RaggedShard((0, 1), (5, 7)),
    RaggedShard((), (0, 1)),
    RaggedShard((-2,), (2, 2)),
    StridedRaggedShard((0, 1), (1, 5), split_factor=2),
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
    alone = all(torch.equal(p.to_local().detach(), b) for p, b in zip(model.parameters(), before, strict=True))
    changed = not any(
        same(p, q) for p, q in zip(model.parameters(), other_model.parameters(), strict=True) if q.to_local().numel()
    )
    step(model, optimizer)
    agree = all(same(p, q) for p, q in zip(model.parameters(), other_model.parameters(), strict=True))
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
    return equal, moments, all(same(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


class CopyTest(unittest.TestCase):
    def test_copies_are_equal_and_share_no_memory(self):
        for wrong, count in run_ranks(2, copy_tensors):
            self.assertEqual(wrong, [])
            self.assertEqual(count, len(PLACEMENTS) * 5 * 3)

    def test_a_deep_copy_has_a_gradient_of_its_own(self):
        self.assertEqual(run_ranks(2, copy_gradient), [(True, True, True)] * 2)

    def test_a_deep_copy_trains_on_its_own(self):
        self.assertEqual(run_ranks(2, copy_training), [(True, True, True, True)] * 2)

    def test_training_continues_from_weights_only_files(self):
        with tempfile.TemporaryDirectory() as folder:
            for equal, moments, continued in run_ranks(2, save_training, folder):
                self.assertTrue(equal)
                self.assertEqual(moments, [True] * 4)
                self.assertTrue(continued)

    def test_copies_of_placements_are_equal_and_print_alike(self):
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
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    # Of a shape that no other test has: torch's cache of an op's outputs gives units of placements that equal these.
    flat = distribute_tensor(torch.arange(26.0).view(2, 13), mesh["tp"], [RaggedShard((0,), (0, 2))])
    strided = distribute_tensor(torch.arange(8).view(4, 2), mesh, [StridedRaggedShard((0, 1), (1, 3), 2), Shard(0)])
    with CommDebugMode() as mode:
        texts = [repr(flat), str(nn.Parameter(flat)), str(flat._spec), repr(strided), str(strided._spec)]
    return [text.replace(", device_mesh", ",\n  device_mesh").replace(", placements", ",\n  placements") for text in texts] + [
        f"{flat.sum().full_tensor():.1f}, {mode.get_total_counts()} collectives to print"
    ]


class PrintTest(TestCase):
    def test_printing_shows_placements_and_communicates_nothing(self):
        answers = run_ranks(4, prints)
        self.assertExpectedInline(
            "\n".join(answers[0]),
            """\
DTensor(local_tensor=tensor([]),
  device_mesh=DeviceMesh((tp=2), 'cpu', stride=(1,)),
  placements=(RaggedShard(dims=(0,), local_units=(0, 2)),))
DTensor(local_tensor=tensor([]),
  device_mesh=DeviceMesh((tp=2), 'cpu', stride=(1,)),
  placements=(RaggedShard(dims=(0,), local_units=(0, 2)),))
Spec(f32[2, 13](RS(0)[0,2]))
DTensor(local_tensor=tensor([0]),
  device_mesh=DeviceMesh((dp=2, tp=2), 'cpu', stride=(2, 1)),
  placements=(StridedRaggedShard(dims=(0, 1), local_units=(1, 3), split_factor=2), Shard(dim=0)))
Spec(i64[4, 2](SRS(0,1)[1,3]/2S(0)))
325.0, 0 collectives to print""",
        )
        self.assertExpectedInline(
            "\n".join(answers[3]),
            """\
DTensor(local_tensor=tensor([ 0.,  1.,  2.,  3.,  4.,  5.,  6.,  7.,  8.,  9., 10., 11., 12., 13.,
        14., 15., 16., 17., 18., 19., 20., 21., 22., 23., 24., 25.]),
  device_mesh=DeviceMesh((tp=2), 'cpu', stride=(1,)),
  placements=(RaggedShard(dims=(0,), local_units=(0, 2)),))
DTensor(local_tensor=tensor([ 0.,  1.,  2.,  3.,  4.,  5.,  6.,  7.,  8.,  9., 10., 11., 12., 13.,
        14., 15., 16., 17., 18., 19., 20., 21., 22., 23., 24., 25.]),
  device_mesh=DeviceMesh((tp=2), 'cpu', stride=(1,)),
  placements=(RaggedShard(dims=(0,), local_units=(0, 2)),))
Spec(f32[2, 13](RS(0)[0,2]))
DTensor(local_tensor=tensor([5, 6, 7]),
  device_mesh=DeviceMesh((dp=2, tp=2), 'cpu', stride=(2, 1)),
  placements=(StridedRaggedShard(dims=(0, 1), local_units=(1, 3), split_factor=2), Shard(dim=0)))
Spec(i64[4, 2](SRS(0,1)[1,3]/2S(0)))
325.0, 0 collectives to print""",
        )

    def test_placements_print_in_full_and_in_short(self):
        shown = [f"{placement!r} {placement}" for placement in PLACEMENTS]
        self.assertExpectedInline(
            "\n".join(shown),
            """\
RaggedShard(dims=(0,), local_units=(1, 3)) RS(0)[1,3]
RaggedShard(dims=(0, 1), local_units=(5, 7)) RS(0,1)[5,7]
RaggedShard(dims=(), local_units=(0, 1)) RS()[0,1]
RaggedShard(dims=(-2,), local_units=(2, 2)) RS(-2)[2,2]
StridedRaggedShard(dims=(0, 1), local_units=(1, 5), split_factor=2) SRS(0,1)[1,5]/2""",
        )


# --- CommDebugMode and DebugMode -----------------------------------------------------------------------------------

REDISTRIBUTIONS = [
    ([RaggedShard((0,), (1, 1)), Replicate()], [Replicate(), Replicate()]),
    ([RaggedShard((0,), (1, 3)), Replicate()], [Replicate(), Replicate()]),
    ([RaggedShard((0,), (1, 3)), Replicate()], [RaggedShard((0, 1), (7, 1)), Replicate()]),
    ([Replicate(), Replicate()], [RaggedShard((0,), (1, 3)), Shard(1)]),
    ([Partial(), Replicate()], [RaggedShard((0,), (1, 1)), Replicate()]),
    ([RaggedShard((0,), (2, 2)), Replicate()], [Shard(0), Replicate()]),
    ([StridedRaggedShard((0, 1), (1, 3), 2), Shard(0)], [Replicate(), Shard(0)]),
    ([StridedRaggedShard((0, 1), (1, 3), 2), Shard(0)], [Replicate(), Replicate()]),
    ([StridedRaggedShard((0, 1), (1, 3), 2), Shard(0)], [RaggedShard((0,), (1, 3)), Replicate()]),
]


def watch_redistributions():
    """What CommDebugMode counts of each redistribution, and what DebugMode calls it."""
    mesh = init_device_mesh("cpu", (2, 2))
    seen = []
    for source, target in REDISTRIBUTIONS:
        start = [Replicate() if isinstance(p, Partial) else p for p in source]
        tensor = distribute_tensor(torch.ones(4, 2), mesh, start)
        if start != source:
            tensor = DTensor.from_local(tensor.to_local(), mesh, source)
        with CommDebugMode() as counted:
            tensor.redistribute(placements=target)
        with DebugMode() as mode:
            tensor.redistribute(placements=target)
        counts = {str(op): number for op, number in counted.get_comm_counts().items()}
        seen.append((counts, outline(mode.debug_string())))
    return seen


def outline(text):
    """The lines of DebugMode about redistributions, and below each the names of its collectives."""
    lines = []
    for line in text.splitlines():
        if "redistribute_input" in line:
            lines.append(line)
        elif "_c10d_functional" in line and "wait_tensor" not in line and "_wrap_tensor_autograd" not in line:
            lines.append(line.partition("(")[0])
    return lines


class Gathering(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        weight = torch.ones(4, 3)
        self.weight = nn.Parameter(distribute_tensor(weight, mesh["dp"], [RaggedShard((0,), (1, 3))]))
        self.strided = nn.Parameter(distribute_tensor(weight, mesh, [StridedRaggedShard((0,), (1, 1), 2), Shard(0)]))

    def forward(self, x):
        return x @ self.weight.full_tensor().T + x @ self.strided.full_tensor().T


def watch_module():
    """The table that CommDebugMode writes of a module: its lines about collectives and shardings."""
    model = Gathering(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
    with CommDebugMode() as mode:
        model(torch.ones(1, 3))
    table = mode.generate_comm_debug_tracing_table(noise_level=1)
    placed = {name: "".join(map(str, placements)) for name, placements in mode.get_sharding_info().items()}
    lines = re.sub(r"\x1b\[[\d;]*m", "", table).splitlines()
    return placed, [line.strip() for line in lines if "c10d_functional" in line]


def watch_programs(placement):
    """What DebugMode shows of programs with a DTensor under ``placement``, explicit or not, forward and backward."""
    mesh = init_device_mesh("cpu", (2,))
    tensor = distribute_tensor(torch.ones(4, 3), mesh, [placement])
    replicated = distribute_tensor(torch.ones(4, 3), mesh, [Replicate()])
    parameter = nn.Parameter(tensor)

    def backward():
        parameter.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()]).sum().backward()

    programs = {
        "explicit": lambda: tensor.redistribute(placements=[Replicate()]),
        "implicit": lambda: torch.add(tensor, replicated),
        "nothing": lambda: tensor.redistribute(placements=[placement]),
        "backward": backward,
    }
    shown = {}
    for name, program in programs.items():
        with DebugMode() as mode:
            program()
        shown[name] = outline(mode.debug_string())
    return shown


class DebugTest(TestCase):
    def test_debug_modes_see_each_collective_of_a_redistribution(self):
        answers = run_ranks(4, watch_redistributions)
        for answer in answers:
            self.assertEqual([counts for counts, _ in answer], [counts for counts, _ in answers[0]])
        shown = [f"{counts}\n" + "\n".join(lines) for counts, lines in answers[0]]
        self.assertExpectedInline(
            "\n".join(shown),
            """\
{'c10d_functional.all_gather_into_tensor': 1}
    redistribute_input [explicit] (t: f32[4], trace: RS(0)[1,1]R->RR)
      _c10d_functional::all_gather_into_tensor
{'c10d_functional.all_to_all_single': 1}
    redistribute_input [explicit] (t: f32[2], trace: RS(0)[1,3]R->RR)
      _c10d_functional::all_to_all_single
{'c10d_functional.all_to_all_single': 1}
    redistribute_input [explicit] (t: f32[2], trace: RS(0)[1,3]R->RS(0,1)[7,1]R)
      _c10d_functional::all_to_all_single
{}
    redistribute_input [explicit] (t: f32[4, 2], trace: RR->RS(0)[1,3]S(1))
{'c10d_functional.reduce_scatter_tensor': 1}
    redistribute_input [explicit] (t: f32[4, 2], trace: P(sum)R->RS(0)[1,1]R)
      _c10d_functional::reduce_scatter_tensor
{}
    redistribute_input [explicit] (t: f32[4], trace: RS(0)[2,2]R->S(0)R)
{'c10d_functional.all_to_all_single': 1}
    redistribute_input [explicit] (t: f32[1], trace: SRS(0,1)[1,3]/2S(0)->RS(0))
      _c10d_functional::all_to_all_single
{'c10d_functional.all_to_all_single': 1, 'c10d_functional.all_gather_into_tensor': 1}
    redistribute_input [explicit] (t: f32[1], trace: SRS(0,1)[1,3]/2S(0)->RR)
      _c10d_functional::all_to_all_single
      _c10d_functional::all_gather_into_tensor
{'c10d_functional.all_to_all_single': 1}
    redistribute_input [explicit] (t: f32[1], trace: SRS(0,1)[1,3]/2S(0)->RS(0)[1,3]R)
      _c10d_functional::all_to_all_single""",
        )

    def test_the_table_of_a_module_lists_its_collectives(self):
        for placed, lines in run_ranks(4, watch_module):
            self.assertEqual(placed, {"Gathering.weight": "RS(0)[1,3]", "Gathering.strided": "SRS(0)[1,1]/2S(0)"})
            self.assertExpectedInline(
                "\n".join(lines),
                """\
*c10d_functional.all_to_all_single: 1
*c10d_functional.all_gather_into_tensor: 2
*c10d_functional.all_to_all_single: 1
*c10d_functional.all_gather_into_tensor: 2""",
            )

    def test_programs_look_as_under_shard(self):
        ragged = run_ranks(2, watch_programs, RaggedShard((0,), (2, 2)))
        shard = run_ranks(2, watch_programs, Shard(0))
        for mine, theirs in zip(ragged, shard, strict=True):
            self.assertEqual([len(lines) for lines in theirs.values()], [2, 2, 0, 4])
            if torch.__version__ < "2.12":  # It calls what backward redistributes explicit.
                theirs["backward"] = [line.replace(" [explicit] (t: f32[4, 3]", "(t: f32[4, 3]") for line in theirs["backward"]]
            as_shard = {
                name: [line.replace("RS(0)[2,2]", "S(0)").replace("t: f32[6]", "t: f32[2, 3]") for line in lines]
                for name, lines in mine.items()
            }
            self.assertEqual(as_shard, theirs)
