"""transfer.plan() and Plan.run(): tensors move between any meshes of one world; errors end on every rank."""

import contextlib
import io
import itertools
import os
import pathlib
import random
import signal
import unittest
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from common import context_of_ranks, enter_fake_group, error_of, ranks, run_ranks
from doc_pages import run_page
from oracle import SIZES, local_of, random_placement
from soon import soon
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from torch_ragged import Box, RaggedShard, StridedRaggedShard, owned_boxes, transfer
from torch_ragged.fsdp import fully_shard, rows
from torch_ragged.tensor.placement_types import normalize_placements
from torch_ragged.transfer import _watch

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex128, torch.float8_e4m3fn)


def mesh_of(ranks, shape=None):
    return DeviceMesh("cpu", torch.tensor(ranks).view(shape or (len(ranks),)))


def dtensor(full, mesh, placements):
    """Without communication, also on ranks outside of the mesh."""
    return distribute_tensor(full.clone(), mesh, placements, src_data_rank=None)


def values(shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=generator).to(torch.float32).to(dtype)


def local_values(tensor):
    local = tensor.to_local().reshape(-1)
    return local.view(torch.uint8) if local.numel() else local


def check_moved(target, full):
    """Bitwise."""
    if target.device_mesh.get_coordinate() is None:
        return
    wanted = dtensor(full, target.device_mesh, target.placements)
    assert torch.equal(local_values(target), local_values(wanted)), (target.placements, target.to_local(), wanted.to_local())


def check_random(seeds):
    meshes = {}
    for seed in seeds:
        rng, tensors = random.Random(seed), ([], [])
        fulls = []
        for i in range(4):
            shape = tuple(rng.choice(SIZES) for _ in range(rng.choice((0, 1, 2, 3))))
            fulls.append(values(shape, rng.choice(DTYPES), seed * 10 + i))
        for side in tensors:
            mesh_shape = rng.choice(((1,), (3,), (4,), (8,), (2, 2), (2, 4)))
            ranks = sorted(rng.sample(range(8), torch.Size(mesh_shape).numel()))
            key = (tuple(ranks), mesh_shape)
            mesh = meshes[key] = meshes.get(key) or mesh_of(ranks, mesh_shape)
            for full in fulls:
                while True:
                    drawn = [
                        random_placement(rng, full.shape, mesh_shape, d, StridedRaggedShard) for d in range(len(mesh_shape))
                    ]
                    drawn = [Replicate() if isinstance(p, Partial) else p for p in drawn]
                    try:
                        placements = normalize_placements(tuple(drawn), full.shape, mesh_shape)
                        transfer.Spec(full.shape, full.dtype, mesh, placements)
                        break
                    except ValueError:
                        continue
                side.append(dtensor(full, mesh, placements))
        source, target = ({str(i): tensor for i, tensor in enumerate(side)} for side in tensors)
        target = {name: torch.zeros_like(tensor) for name, tensor in target.items()}
        plan = transfer.plan(source, target, max_bytes=rng.choice((512, 1 << 20)))
        for _ in range(2):
            plan.run(source, target)
            assert plan.is_complete and plan.last_peak_bytes <= plan.max_bytes
            for name, tensor in target.items():
                check_moved(tensor, fulls[int(name)])


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check_delta(how):
    """Only what differs travels, also if one element does; equal values in a new tensor do not."""
    here, there = mesh_of([0, 1]), mesh_of([1, 2, 3])
    fulls = {"a": torch.arange(40.0).view(10, 4), "b": torch.arange(30.0), "c": torch.ones(6, 2)}
    source = {name: dtensor(full, here, [Shard(0)]) for name, full in fulls.items()}
    kinds = {"a": Shard(0), "b": Replicate(), "c": _StridedShard(0, split_factor=2)}
    target = {name: dtensor(torch.zeros_like(full), there, [kinds[name]]) for name, full in fulls.items()}
    plan = transfer.plan(source, target)

    def sent():
        plan.run(source, target, delta=how)
        assert plan.is_complete
        for name, tensor in target.items():
            check_moved(tensor, fulls[name])
        total = torch.tensor([plan.last_sent_bytes])
        dist.all_reduce(total)
        return int(total)

    # Rank 1 keeps rows of a (one and a part), b's second half and c's rows itself.
    everything = sent()
    assert everything > 0 and sent() == 0
    fulls["b"][3] = -1
    if dist.get_rank() == 0:
        source["b"].to_local()[3] = -1
    only_b = sent()
    assert 0 < only_b < everything and sent() == 0
    source["a"] = dtensor(fulls["a"], here, [Shard(0)])  # Equal values in another tensor.
    assert sent() == 0
    plan.forget()
    assert sent() == everything
    target["b"] = dtensor(torch.zeros(30), there, [Replicate()])
    assert 0 < sent() < everything  # A new target gets what it lacks.
    assert sent() == 0
    plan.run(source, target)  # Without delta, everything is sent.
    total = torch.tensor([plan.last_sent_bytes])
    dist.all_reduce(total)
    assert int(total) == everything


def die_or_report(rank, port, victim, pipe):
    """A process of its own: one rank dies in the middle of a run, the others report what they see."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
    here, there = mesh_of([0, 1]), mesh_of([1, 2, 3])
    source = {name: dtensor(torch.arange(64.0), here, [Shard(0)]) for name in ("a", "b", "c")}
    target = {name: dtensor(torch.zeros(64), there, [Shard(0)]) for name in source}
    plan = transfer.plan(source, target, max_bytes=512)
    _watch._TRANSFER_SLICE, _watch._TRANSFER_PATIENCE = 0.2, 2.0
    if rank == victim:
        original, calls = torch.Tensor.copy_, []

        def dying(tensor, *arguments):
            calls.append(tensor)
            if len(calls) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(tensor, *arguments)

        torch.Tensor.copy_ = dying
    text = error_of(plan.run, source, target)
    unchanged = torch.equal(source["a"].to_local(), dtensor(torch.arange(64.0), here, [Shard(0)]).to_local())
    pipe.send((text, plan.is_complete, unchanged))
    pipe.recv()  # The others may still want to know that this rank is alive.
    os._exit(0)


def check_picture():
    here, there = [mesh_of(ranks) for ranks in ([0, 1], [0])], [mesh_of(ranks) for ranks in ([1, 2], [2])]
    w, b = torch.zeros(64, 64), torch.zeros(3)
    source = {"w": dtensor(w, here[0], [Shard(0)]), "b": dtensor(b, here[1], [Shard(0)])}
    target = {"w": dtensor(w, there[0], [Shard(0)]), "b": dtensor(b, there[1], [Shard(0)])}
    plan = transfer.plan(source, target)
    text = transfer.visualize(plan, file=io.StringIO())
    assert text == transfer.visualize(plan, file=io.StringIO())
    short = transfer.visualize(plan, file=io.StringIO(), max_ranks=1)
    plan.run(source, target)
    return text, short, plan.last_sent_bytes


def boxes_of_this_rank():
    return owned_boxes(dtensor(torch.zeros(6, 2), mesh_of([0, 1]), [RaggedShard((0,), (1, 2))]))


class TransferPlanTest(unittest.TestCase):
    def test_random_tensors_move_bitwise_between_random_meshes(self):
        run_ranks(8, check_random, range(8))

    @ranks(6)
    def test_a_partial_is_reduced_on_its_way():
        """A Partial is reduced on its way, on each mesh dimension, for a tensor that other dimensions cut too."""
        rank, mesh, there = dist.get_rank(), mesh_of([0, 1, 2, 3], (2, 2)), mesh_of([3, 4, 5])
        full = torch.arange(24.0).view(4, 6)
        source, pieces = {}, {}
        for name, placements in {
            "both": (Partial(), Partial()),
            "left": (Partial(), Shard(0)),
            "right": (Shard(0), Partial("avg")),
            "ragged": (Partial(), RaggedShard((0,), (1, 3))),
            "largest": (Partial("max"), Replicate()),
        }.items():
            whole = dtensor(full, mesh, [Replicate() if isinstance(p, Partial) else p for p in placements])
            local = whole.to_local() * (1 if name in ("right", "largest") else (rank + 1))
            source[name] = DTensor.from_local(local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride())
            pieces[name] = {"both": full * 10, "left": full * 4, "ragged": full * 4}.get(name, full)
        # Ranks of one column are 0 and 2, or 1 and 3: their sums differ.
        target = {name: dtensor(torch.zeros(4, 6), there, [Shard(0)]) for name in source}
        transfer.plan(source, target).run(source, target)
        factors = torch.tensor([4.0, 4.0, 6.0, 6.0]).view(4, 1)
        pieces["left"] = full * factors
        pieces["ragged"] = full * torch.tensor([4.0, 6.0, 6.0, 6.0]).view(4, 1)
        for name, tensor in target.items():
            check_moved(tensor, pieces[name])

    @ranks(4)
    def test_casts_are_made_where_fewer_bytes_travel():
        here, there = mesh_of([0, 1]), mesh_of([1, 2, 3])
        full = torch.randn(8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        source = {
            name: dtensor(full.to(dtype), here, [Shard(0)]) for name, dtype in {"a": torch.float32, "b": torch.bfloat16}.items()
        }
        target = {"a": torch.bfloat16, "b": torch.float64}
        target = {
            name: dtensor(torch.zeros(8, 5, dtype=dtype), there, [RaggedShard((0,), (0, 3, 5))])
            for name, dtype in target.items()
        }
        plan = transfer.plan(source, target)
        plan.run(source, target)
        check_moved(target["a"], full.float().bfloat16())
        check_moved(target["b"], full.bfloat16().double())
        # Two bytes per element travel in both cases: of a rank's four rows, those that another rank owns.
        rank = dist.get_rank()
        assert plan.last_sent_bytes == (2 * 2 * 20 if rank in (0, 1) else 0), plan.last_sent_bytes

    @ranks(5)
    def test_a_rank_may_know_one_side_only():
        """Each side knows its own tensors only, and a rank of neither side takes part."""
        rank, here, there = dist.get_rank(), mesh_of([0, 1]), mesh_of([2, 3])
        source = {"w": dtensor(torch.arange(12.0), here, [Shard(0)])} if rank < 2 else None
        target = {"w": dtensor(torch.zeros(12), there, [Replicate()])} if rank in (2, 3) else None
        plan = transfer.plan(source, target)
        plan.run(source, target)
        if target:
            assert torch.equal(target["w"].to_local(), torch.arange(12.0))

    @ranks(4)
    def test_models_move_with_their_buffers():
        """A sharded model, with buffers, to another model on other ranks, and back, in the background."""
        torch.manual_seed(0)
        models = []
        for world in ([0, 1, 2], [2, 3]):
            model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
            mesh = mesh_of(world)
            if mesh.get_coordinate() is not None:
                fully_shard(model, mesh=mesh, orig_param_policy=lambda fqn, param: rows(2))
                model = model.requires_grad_(len(models) == 0)
            else:
                model = None
            models.append(model)
        wanted = None if models[0] is None else {name: full(t).clone() for name, t in models[0].state_dict().items()}
        wanted = [wanted]
        dist.broadcast_object_list(wanted, src=0)
        plan = transfer.plan(*models)
        handle = plan.run(*models, async_op=True)
        handle.wait()
        assert handle.is_completed() and plan.is_complete
        if models[1] is not None:
            for name, tensor in models[1].state_dict().items():
                assert torch.equal(full(tensor), wanted[0][name]), name
        back = transfer.plan(models[1], models[0])
        with torch.no_grad():
            for model in models:
                for tensor in () if model is None else model.state_dict().values():
                    local(tensor).add_(1 if model is models[1] else 7)
        back.run(models[1], models[0])
        if models[0] is not None:
            for name, tensor in models[0].state_dict().items():
                assert torch.equal(full(tensor), wanted[0][name] + 1), name

    @ranks(4)
    def test_bytes_sent_are_what_targets_gain():
        """What all ranks send is the sum of what targets gain, once. With few senders, receivers share the work."""
        full = torch.arange(4096.0).view(64, 64)
        cases = {
            "to one replica each": (([0, 1], [Shard(0)]), ([2, 3], [Shard(1)]), [8192, 8192, 0, 0]),
            "overlapping": (([0, 1], [Shard(0)]), ([1, 2], [Shard(0)]), [8192, 8192, 0, 0]),
            "nothing changes": (([0, 1], [Shard(0)]), ([0, 1], [RaggedShard((0,), (1, 1))]), [0, 0, 0, 0]),
            # Rank 0 sends a third of the matrix to each receiver, and each receiver passes it on to two others.
            "one to three": (([0], [Replicate()]), ([1, 2, 3], [Replicate()]), [16384, 10920, 10928, 10920]),
            "replicas send half each": (([0, 1], [Replicate()]), ([2, 3], [Shard(0)]), [8192, 8192, 0, 0]),
        }
        for name, (one, other, sent) in cases.items():
            source = {"w": dtensor(full, mesh_of(one[0]), one[1])}
            target = {"w": dtensor(torch.zeros(64, 64), mesh_of(other[0]), other[1])}
            plan = transfer.plan(source, target)
            plan.run(source, target)
            check_moved(target["w"], full)
            own = torch.tensor([plan.last_sent_bytes])
            everyone = [torch.zeros_like(own) for _ in range(4)]
            dist.all_gather(everyone, own)
            got = [int(each) for each in everyone]
            assert sum(got) == sum(sent) and all(abs(a - b) <= 16 for a, b in zip(got, sent, strict=True)), (name, got, sent)

    @ranks(4)
    def test_an_engine_gets_fused_split_and_stacked_tensors():
        """Fused, split, stacked, replicated and cut tensors, as engines hold them under tensor and expert parallelism."""
        rank, mesh = dist.get_rank(), mesh_of([0, 1])
        shapes = {
            "q": (8, 4),
            "k": (2, 4),
            "v": (2, 4),
            "experts": (4, 6, 3),
            "e0": (2, 3),
            "e1": (2, 3),
            "norm": (4,),
            "head": (6, 5),
        }
        fulls = {name: values(shape, torch.float32, i) + i / 10 for i, (name, shape) in enumerate(shapes.items())}
        source = {
            name: dtensor(full, mesh, [RaggedShard((), (0, 1)) if name == "q" else Shard(0)]) for name, full in fulls.items()
        }
        layout = transfer.EngineLayout(torch.bfloat16)
        layout.add_sharded("qkv", {name: shapes[name] for name in "qkv"}, ranks=(2, 3))
        for expert in range(4):  # Each expert is a tensor of the engine, on one rank.
            held = [(2 + expert % 2, ((0, 0), (6, 3)))]
            layout.add(f"expert.{expert}", (6, 3), held, parts=[("experts", (4, 6, 3), (-expert, 0, 0))])
        stacked = [("e0", (2, 3), (0, 0, 0)), ("e1", (2, 3), (1, 0, 0))]
        layout.add("stacked", (2, 2, 3), [(3, ((0, 0, 1), (2, 2, 2)))], parts=stacked, dtype=torch.float32)
        layout.add_sharded("norm", {"norm": (4,)}, ranks=(2, 3), dim=None)
        layout.add("head", (6, 5), [(2, (0, 17)), (3, (13, 30)), (3, ((0, 0), (1, 5)))])
        sizes = {2: {"qkv": 24, "expert.0": 18, "expert.2": 18, "norm": 4, "head": 17}}
        sizes[3] = {"qkv": 24, "expert.1": 18, "expert.3": 18, "norm": 4, "head": 22, "stacked": 8}
        target = {name: torch.zeros(n, dtype=torch.bfloat16) for name, n in sizes.get(rank, {}).items()}
        if rank == 3:
            target["stacked"] = torch.zeros(2, 2, 2)
        plan = transfer.plan(source, layout, max_bytes=256)
        small = {name: tensor[:20] if name == "qkv" and rank == 3 else tensor for name, tensor in target.items()}
        text = error_of(plan.run, source, small)
        assert "qkv has 20 elements of torch.bfloat16, and the EngineLayout gives rank 3 24" in text, text
        assert not any(tensor.any() for tensor in target.values())
        plan.run(source, target)
        wrong = transfer.EngineLayout(torch.float32)
        wrong.add("q", (8, 4), [(2, (0, 32))])
        for arguments, text in {
            ("q", (8, 4), ((2, (0, 32)),)): "q was added before",
            ("k", (2, 4), ((2, (4, 9)),)): "interval [4, 9) is not in its 8 elements",
            ("k", (2, 4), ((2, ((1, 0), (2, 4))),)): "the box ((1, 0), (2, 4)) is not in shape (2, 4)",
        }.items():
            assert text in error_of(wrong.add, *arguments), error_of(wrong.add, *arguments)
        part = [("k", (2, 4), (0, 0))]
        assert "cover 8 of its 12 elements" in error_of(wrong.add, "kk", (3, 4), [], parts=part)
        assert "overlap" in error_of(wrong.add, "kk", (3, 4), [], parts=[*part, ("v", (2, 4), (1, 0))])
        assert "does not divide into 3" in error_of(wrong.add_sharded, "v", {"v": (2, 4)}, (1, 2, 3))
        if rank < 2:
            return
        first, low = {name: full.bfloat16() for name, full in fulls.items()}, rank - 2
        qkv = torch.cat([first["q"][4 * low :][:4], first["k"][low : low + 1], first["v"][low : low + 1]])
        assert torch.equal(target["qkv"].view(6, 4), qkv)
        for expert in range(low, 4, 2):
            assert torch.equal(target[f"expert.{expert}"].view(6, 3), first["experts"][expert])
        assert torch.equal(target["norm"], first["norm"])
        head = first["head"].flatten()
        assert torch.equal(target["head"], head[:17] if rank == 2 else torch.cat([head[13:], head[:5]]))
        if rank == 3:
            assert torch.equal(target["stacked"], torch.stack([fulls["e0"], fulls["e1"]])[:, :, 1:])

    def test_only_what_changed_is_sent(self):
        run_ranks(4, check_delta, "checksum")

    @ranks(2)
    def test_specs_may_have_negative_dims():
        """A spec means the same as the DTensor that it describes."""
        mesh, full = mesh_of([0, 1]), torch.arange(16.0).view(4, 4)
        for given, placement in (
            (Shard(-2), Shard(0)),
            (RaggedShard((-2,), (1, 3)), RaggedShard((0,), (1, 3))),
            (_StridedShard(-1, split_factor=2), _StridedShard(1, split_factor=2)),
            (StridedRaggedShard((-2,), (1, 1), split_factor=2), StridedRaggedShard((0,), (1, 1), split_factor=2)),
        ):
            spec = transfer.Spec((4, 4), torch.float32, mesh, [given])
            assert spec == transfer.Spec((4, 4), torch.float32, mesh, [placement])
            source = {"w": dtensor(full, mesh, [placement])}
            target = {"w": dtensor(torch.zeros(4, 4), mesh, [Replicate()])}
            transfer.plan({"w": spec}, target).run(source, target)
            check_moved(target["w"], full)

    @ranks(4)
    def test_bad_input_is_an_error_on_all_ranks():
        """On all ranks, before any element travels; afterwards, transfers work."""
        rank, here, there = dist.get_rank(), mesh_of([0, 1]), mesh_of([1, 2])
        w = {"w": dtensor(torch.arange(12.0).view(6, 2), here, [Shard(0)])}

        def to(shape=(6, 2), name="w", dtype=torch.float32, placements=(Shard(0),), mesh=there):
            return {name: transfer.Spec(shape, dtype, mesh, placements)}

        wrong = {
            "ValueError: plan(): the target has v, which the source does not have": lambda: transfer.plan(w, to(name="v")),
            "ValueError: plan(): the source has v, which": lambda: transfer.plan({**w, "v": w["w"]}, to()),
            "ValueError: plan(): w has shape (6, 2) in the source and (6, 3)": lambda: transfer.plan(w, to((6, 3))),
            "TypeError: plan(): w is torch.float32 in the source and torch.int32": lambda: transfer.plan(
                w, to(dtype=torch.int32)
            ),
            "ValueError: plan(target=): w has placements": lambda: transfer.plan(w, to(placements=[Partial()])),
            "ValueError: plan(target=): ranks [7] hold tensors": lambda: transfer.plan(w, to(mesh=[1, 7])),
            "ValueError: transfer.plan: no rank gave a target": lambda: transfer.plan(w, None),
            "ValueError: plan(max_bytes=)": lambda: transfer.plan(w, to(), max_bytes=0),
            "ValueError: max_bytes is too small: w needs": lambda: transfer.plan(w, to(), max_bytes=1),
            "TypeError: plan(source=): w is int": lambda: transfer.plan({"w": 3}, to()),
            "TypeError: plan(source=) takes": lambda: transfer.plan([w], to()),
        }
        for text, call in wrong.items():
            assert error_of(call).startswith(text), (error_of(call), text)
        # One rank is wrong: the others name it.
        text = error_of(transfer.plan, w, to(dtype=torch.bfloat16) if rank == 3 else to())
        assert text.startswith("ValueError: plan(target=): w differs between ranks: rank 0 has shape (6, 2), torch.float32"), (
            text
        )
        assert "rank 3 has shape (6, 2), torch.bfloat16" in text, text
        text = error_of(transfer.plan, w, {**to(), **to(name="v")} if rank == 3 else to())
        assert text.startswith("ValueError: plan(target=): v is given on rank 3, and not on rank 0"), text
        text = error_of(transfer.plan, w, to(), max_bytes=-1 if rank == 2 else 1000)
        assert text.startswith(
            "ValueError: plan(max_bytes=)" if rank == 2 else "RuntimeError: transfer.plan failed on rank 2"
        ), text

        plan = transfer.plan(w, to())
        target = {"w": dtensor(torch.zeros(6, 2), there, [Shard(0)])}
        flipped = torch.zeros(2, 3).t()
        strided = DTensor.from_local(flipped, there, [Shard(0)], run_check=False) if rank in (1, 2) else target["w"]
        wrong = {
            "run(target=): w is missing": (w, {}),
            "run(source=): w has shape (6, 2), torch.float64": (
                {"w": dtensor(torch.zeros(6, 2).double(), here, [Shard(0)])},
                target,
            ),
            "run(source=): w has shape (6, 2), torch.float32, a mesh of shape (2,) of ranks 0, 1, (Shard(dim=1),)": (
                {"w": dtensor(torch.zeros(6, 2), here, [Shard(1)])},
                target,
            ),
            "run(target=): w has a local tensor that is not contiguous": (w, {"w": strided}),
            "run(target=): w is list": (w, {"w": [1]}),
        }
        for text, arguments in wrong.items():
            got = error_of(plan.run, *arguments)
            assert text in got and (got.startswith(("ValueError: run", "TypeError: run")) or "failed on rank" in got), (
                got,
                text,
            )
            assert not target["w"].to_local().any()
        both = {"w": dtensor(torch.arange(12.0).view(6, 2), here, [Shard(0)])}
        same = transfer.plan(both, both)
        assert "share memory" in error_of(same.run, both, both)
        assert "takes None" in error_of(plan.run, w, target, delta="changed")
        partial = {"w": DTensor.from_local(torch.ones(6, 2), here, [Partial()], run_check=False)} if rank < 2 else None
        reducing = transfer.plan(partial, to())
        assert "cannot reduce a Partial in the background" in error_of(
            lambda: reducing.run(partial, target, async_op=True).wait()
        )
        plan.run(w, target)
        check_moved(target["w"], torch.arange(12.0).view(6, 2))

    @ranks(4)
    @soon()
    def test_a_failure_on_the_way_is_an_error_on_all_ranks():
        """One rank fails in the middle of a run: every rank gets an error that names it. A new plan works."""
        rank, here, there = dist.get_rank(), mesh_of([0, 1]), mesh_of([2, 3])
        source = {name: dtensor(torch.arange(64.0), here, [Shard(0)]) for name in ("a", "b", "c")}
        target = {name: dtensor(torch.zeros(64), there, [Shard(0)]) for name in source}
        plan = transfer.plan(source, target, max_bytes=512, timeout=timedelta(seconds=30))
        if rank == 3:
            original, calls = torch.Tensor.copy_, []

            def failing(tensor, *arguments):
                calls.append(tensor)
                if len(calls) == 2:
                    raise MemoryError("no memory is left")
                return original(tensor, *arguments)

            torch.Tensor.copy_ = failing
        try:
            text = error_of(plan.run, source, target)
        finally:
            if rank == 3:
                torch.Tensor.copy_ = original
        assert text.startswith("TransferError: Plan.run() failed while"), text
        assert (
            "rank 3: MemoryError: no memory is left" in text and "The source is unchanged. The target is not complete" in text
        ), text
        assert not plan.is_complete and torch.equal(
            source["a"].to_local(), dtensor(torch.arange(64.0), here, [Shard(0)]).to_local()
        )
        assert "make the plan anew" in error_of(plan.run, source, target)
        plan = transfer.plan(source, target)
        plan.run(source, target)
        check_moved(target["b"], torch.arange(64.0))

    def test_a_receiver_that_dies_is_named_by_all_others(self):
        self.check_deaths(3)

    @pytest.mark.slow
    def test_a_sender_that_dies_is_named_by_all_others(self):
        self.check_deaths(0)

    def check_deaths(self, *victims):
        context, worlds = context_of_ranks(), []
        for victim in victims:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            pipes = [context.Pipe() for _ in range(4)]
            worlds.append((victim, store, {rank: ours for rank, (ours, _) in enumerate(pipes) if rank != victim}))
            for rank, (_, theirs) in enumerate(pipes):
                arguments = (rank, store.port, victim, theirs)
                context.Process(target=die_or_report, args=arguments, daemon=True).start()
        for victim, _, pipes in worlds:
            for rank, pipe in pipes.items():
                self.assertTrue(pipe.poll(100), f"rank {rank} hangs")
                text, is_complete, unchanged = pipe.recv()
                self.assertRegex(
                    text,
                    rf"TransferError: .* failed while [abc] was on its way: rank {victim} (died|lives|has not)",
                )
                self.assertFalse(is_complete)
                self.assertTrue(unchanged)
            for pipe in pipes.values():
                pipe.send("end")

    @pytest.mark.slow
    def test_the_page_of_the_documentation_runs(self):
        (picture,) = run_page("moving_weights.md")
        page = (pathlib.Path(__file__).parents[2] / "docs/moving_weights.md").read_text()
        self.assertIn(" ".join(picture.split("rank 2 has")[0].split()), " ".join(page.split()))  # The page breaks long lines.
        self.assertIn("rank 2 has (48, 32) in 1 round", picture)

    def test_a_picture_shows_what_each_rank_sends(self):
        (text, short, _), *others = run_ranks(3, check_picture)
        lines = [
            "2 tensors, from ranks 0, 1 to ranks 1, 2: 16.0 KiB in 1 round, with buffers of at most 256.0 MiB per rank",
            "from \\ to        1        2  copies",
            "0          8.0 KiB     12 B",
            "1                   8.0 KiB",
        ]
        self.assertEqual(text.splitlines(), lines)
        self.assertEqual(short.splitlines()[1:], ["from \\ to  ...  copies", "...        ...     ..."])
        self.assertEqual([sent for _, _, sent in others], [8192, 0])

    def test_a_picture_of_many_ranks_leaves_out_those_in_the_middle(self):
        enter_fake_group(self, 8)
        source = {"w": transfer.Spec((4, 256), torch.float32, [0, 1, 2, 3], [Shard(0)])}
        target = {"w": transfer.Spec((4, 256), torch.float32, [4, 5, 6, 7], [Shard(1)])}
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            text = transfer.visualize(transfer.plan(source, target), max_ranks=3)
        lines = [
            "from \\ to      4  ...      7  copies",
            "0          256 B  ...  256 B",
            "...          ...  ...    ...     ...",
            "3          256 B  ...  256 B",
        ]
        self.assertEqual(text.splitlines()[1:], lines)
        self.assertEqual(printed.getvalue(), text)


class OwnedBoxesTest(unittest.TestCase):
    def test_boxes_are_what_each_rank_holds(self):
        rng = random.Random(0)
        for _ in range(200):
            shape, mesh_shape = tuple(rng.choice(SIZES) for _ in range(rng.randint(0, 3))), rng.choice(((3,), (2, 2), (2, 3)))
            placements = [random_placement(rng, shape, mesh_shape, dim, StridedRaggedShard) for dim in range(len(mesh_shape))]
            try:
                placements = normalize_placements(tuple(placements), shape, mesh_shape)
            except ValueError:
                continue
            whole = torch.arange(torch.Size(shape).numel()).view(shape)
            for coordinate in itertools.product(*map(range, mesh_shape)):
                wanted = local_of(whole, mesh_shape, placements, coordinate)
                got = torch.full((wanted.numel(),), -1)
                for box in owned_boxes(shape, mesh_shape, placements, coordinate):
                    piece = whole[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]
                    got.as_strided(box.sizes, box.local_strides, box.local_offset).copy_(piece)
                self.assertTrue(torch.equal(got, wanted.reshape(-1)), (shape, placements, coordinate))

    def test_a_dtensor_answers_for_this_rank(self):
        everyone = run_ranks(3, boxes_of_this_rank)
        placements = [RaggedShard((0,), (1, 2))]
        self.assertEqual(everyone, [*(owned_boxes((6, 2), (2,), placements, (i,)) for i in range(2)), ()])
        self.assertEqual(everyone[1], (Box((2, 0), (4, 2), 0, (2, 1)),))

    def test_bad_arguments_are_errors(self):
        self.assertIn("needs mesh_shape", error_of(owned_boxes, (2, 2), (2,)))
        self.assertIn("coordinate (2,) is not in a mesh", error_of(owned_boxes, (2, 2), (2,), [Shard(0)], (2,)))
        self.assertTrue(error_of(owned_boxes, (2, 2), (2,), [Shard(0), Shard(1)], (1,)).startswith("ValueError"))
