"""run(delta=...): after any write to the source or the target, the target gets the source's values."""

import ctypes
import shutil
import tempfile
import unittest

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import ranks, run_ranks
from tested_device import DEVICE
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from torch_ragged import RaggedShard, transfer
from torch_ragged.fsdp import fully_shard, rows
from torch_ragged.optim import AdamW8bit, Muon, Shampoo
from torch_ragged.transfer._changes import _weights

MODES = (None, "checksum")


class Subject:
    """A source and a target on the same two ranks. ``source`` is what ``run()`` gets: a mapping of parameters, or a module."""

    def __init__(self, kind):
        mesh = init_device_mesh("cpu", (2,))
        values = torch.arange(64.0).view(8, 8) / 8
        if kind == "fully_shard":
            self.source = fully_shard(nn.Linear(8, 16), mesh=mesh, orig_param_policy=lambda fqn, param: rows(2))
        else:
            placement = {"Shard": Shard(0), "RaggedShard": RaggedShard((0,), (1, 3))}[kind]
            self.source = {name: nn.Parameter(distribute_tensor(values + i, mesh, [placement])) for i, name in enumerate("vw")}
        self.target = {name: distribute_tensor(torch.zeros(t.shape), mesh, [Replicate()]) for name, t in self.tensors().items()}

    def tensors(self):
        return self.source.state_dict() if isinstance(self.source, nn.Module) else self.source

    @property
    def params(self):
        return list(self.source.parameters()) if isinstance(self.source, nn.Module) else list(self.source.values())

    @property
    def param(self):
        return self.params[0]

    def local_values(self):
        tensors = (*self.tensors().values(), *self.target.values())
        return [tensor.to_local().detach().clone() for tensor in tensors]


def optimizer_step(make):
    def write(subject):
        params = [param for param in subject.params if param.ndim == 2]
        for param in params:
            param.grad = DTensor.from_local(
                torch.full_like(param.to_local(), 0.5),
                param.device_mesh,
                param.placements,
                shape=param.shape,
                stride=param.stride(),
            )
        make(params).step()
        for param in params:
            param.grad = None

    return write


def all_reduce(subject):
    dist.all_reduce(subject.param.to_local().detach().view(-1)[:4])


def kernel(subject):
    local = subject.param.to_local()
    ctypes.memset(local.data_ptr(), 1, local.nbytes)


def in_inference_mode(subject):
    with torch.inference_mode():
        subject.param.add_(1)


def load_state_dict(subject):
    changed = {name: tensor.detach() + 3 for name, tensor in subject.tensors().items()}
    if isinstance(subject.source, nn.Module):
        subject.source.load_state_dict(changed)
    else:
        nn.ParameterDict(subject.source).load_state_dict(changed)


def dcp_load(subject):
    changed = {name: tensor.detach() * 2 + 1 for name, tensor in subject.tensors().items()}
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    dcp.save(changed, checkpoint_id=folder[0])
    dcp.load({name: tensor.detach() for name, tensor in subject.tensors().items()}, checkpoint_id=folder[0])
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])


def new_tensor(subject):
    name = next(iter(subject.tensors()))
    changed = nn.Parameter(subject.tensors()[name].detach() - 1)
    if isinstance(subject.source, nn.Module):
        torch.utils.swap_tensors(subject.source.weight, changed)
    else:
        subject.source[name] = changed


def target_written(subject):
    next(iter(subject.target.values())).to_local().data[0] = -1


def target_replaced(subject):
    name, tensor = next(iter(subject.target.items()))
    subject.target[name] = torch.zeros_like(tensor)


WAYS = {
    "an operator of the DTensor: `add_`, `copy_`, `zero_`": [
        lambda s: s.param.add_(1),
        lambda s: s.param.copy_(torch.full_like(s.param, 7.0)),
        lambda s: s.param.zero_(),
    ],
    "`torch._foreach_*`": [lambda s: torch._foreach_add_(s.params, 1.0)],
    "`nn.init`": [lambda s: nn.init.constant_(s.param, 3.0)],
    "the local tensor, `detach()`, `.data`": [
        lambda s: s.param.to_local().add_(1),
        lambda s: s.param.detach().add_(1),
        lambda s: s.param.data.mul_(2),
        lambda s: s.param.to_local().data.add_(1),
        lambda s: s.param.data.to_local().data.sub_(3),
    ],
    "`torch.inference_mode()`": [in_inference_mode],
    "NumPy, a kernel that gets a pointer": [
        *([lambda s: s.param.to_local().detach().numpy().__iadd__(1)] if DEVICE == "cpu" else []),
        kernel,
    ],
    "a collective in place": [all_reduce],
    "`SGD`, `AdamW`: for-loop, foreach, fused": [
        optimizer_step(lambda params, kind=kind, options=options: kind(params, lr=0.1, **options))
        for kind, options in (
            *((kind, {"foreach": foreach}) for kind in (torch.optim.SGD, torch.optim.AdamW) for foreach in (False, True)),
            (torch.optim.AdamW, {"fused": True}),  # torch has no fused SGD of DTensors.
        )
    ],
    "`Muon`, `AdamW8bit`, `Shampoo`": [
        optimizer_step(lambda params, kind=kind: kind(params, lr=0.1)) for kind in (Muon, AdamW8bit, Shampoo)
    ],
    "`load_state_dict`": [load_state_dict],
    "`dcp.load`": [dcp_load],
    "another tensor in its place: a mapping, `swap_tensors`": [new_tensor],
    "the target is written": [target_written],
    "the target is another tensor": [target_replaced],
}
"""How users write to tensors. Each changes some value."""


def seen_ways(kind, modes):
    """For each way and mode, whether the target has the source's values after a run; and the bytes of runs without a change."""
    found, idle, changes = {}, {mode: 0 for mode in modes}, []
    for mode in modes:
        subject = Subject(kind)
        plan = transfer.plan(subject.source, subject.target)
        plan.run(subject.source, subject.target, delta=mode)
        for way, write in ((way, write) for way, writes in WAYS.items() for write in writes):
            before = subject.local_values()
            with torch.no_grad():
                write(subject)
            changes.append(any(not torch.equal(a, b) for a, b in zip(before, subject.local_values(), strict=True)))
            plan.run(subject.source, subject.target, delta=mode)
            wanted = {name: tensor.full_tensor() for name, tensor in subject.tensors().items()}
            fine = all(torch.equal(tensor.to_local(), wanted[name]) for name, tensor in subject.target.items())
            found[way, mode] = found.get((way, mode), True) and fine
            plan.run(subject.source, subject.target, delta=mode)
            idle[mode] += plan.last_sent_bytes
    return found, idle, changes


class TransferDeltaTest(unittest.TestCase):
    def test_weights_of_checksums_are_the_numbers_of_splitmix64(self):
        """Its published numbers after the seed 1234567, made odd."""
        published = (6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821)
        row, other = _weights(torch.device("cpu"), 6, (1234567, 0)).tolist()
        self.assertEqual([weight % 2**64 for weight in row[1:]], [number | 1 for number in published])
        self.assertEqual(other[1] % 2**64, 0xE220A8397B1DCDAF)

    def test_every_way_to_write_is_seen(self):
        for kind, modes in {"Shard": MODES, "RaggedShard": ("checksum",), "fully_shard": ("checksum", None)}.items():
            answers = run_ranks(2, seen_ways, kind, modes)
            for changes in zip(*(changes for *_, changes in answers)):
                self.assertTrue(any(changes), "a way changes nothing")
            for seen, idle, _ in answers:
                self.assertTrue(all((sent > 0) == (mode is None) for mode, sent in idle.items()), (kind, idle))
                for key, fine in seen.items():
                    self.assertTrue(fine, f"{kind}: {key}")

    @ranks(2)
    def test_writes_to_partial_sources_are_seen():
        """Also on a mesh dimension of one rank, such as that of HSDP's replicas."""
        both, one = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("replicas", "shards"))
        for operation in ("sum", "avg", "max"):
            for mesh, placements, factor in (
                (one, [Partial(operation), Shard(0)], 1),
                (one, [Partial(operation), Replicate()], 1),
                (both, [Partial(operation)], 2 if operation == "sum" else 1),
            ):
                shape = (2, 3) if placements[-1] == Shard(0) else (4, 3)
                source = {"w": DTensor.from_local(torch.ones(shape), mesh, placements, run_check=False)}
                for to in (Replicate(), Shard(1)):
                    target = {"w": distribute_tensor(torch.zeros(4, 3), both, [to])}
                    plan = transfer.plan(source, target)
                    plan.run(source, target, delta="checksum")
                    double = [] if operation == "max" else [lambda w: w.mul_(2)]  # torch has no such operator of a maximum.
                    for write in (lambda w: w.to_local().add_(1), *double, lambda w: w.to_local().data.fill_(5)):
                        with torch.no_grad():
                            write(source["w"])
                        plan.run(source, target, delta="checksum")
                        wanted = source["w"].to_local()[0, 0] * factor
                        got = target["w"].full_tensor()
                        assert torch.equal(got, wanted.expand(4, 3)), (operation, placements, got)

    @ranks(2)
    def test_swapped_and_negated_elements_are_seen():
        """What a sum of words would not see, in every dtype, and parts of one element with any stride."""
        here, there = DeviceMesh("cpu", [0]), DeviceMesh("cpu", [1])

        def dtensor(full, mesh):
            return distribute_tensor(full.clone(), mesh, [Replicate()], src_data_rank=None)

        for dtype in (
            torch.float32,
            torch.float64,
            torch.bfloat16,
            torch.float8_e4m3fn,
            torch.uint8,
            torch.bool,
            torch.complex128,
        ):
            full = torch.arange(1, 22).to(torch.float32).to(dtype)
            negated = (-full.to(torch.complex128)).to(dtype) if dtype not in (torch.uint8, torch.bool) else ~full
            two = full.clone()
            two[3], two[4] = negated[3], negated[4]
            source, target = {"w": dtensor(full, here)}, {"w": dtensor(torch.zeros_like(full), there)}
            plan = transfer.plan(source, target)
            for values in (
                full,
                full.view(torch.uint8).flip(0).view(dtype) if dtype != torch.bool else ~full,
                full,
                negated,
                two,
            ):
                source["w"] = dtensor(values, here)
                plan.run(source, target, delta="checksum")
                if dist.get_rank() == 1:
                    got = target["w"].to_local()
                    assert torch.equal(got.view(torch.uint8), values.view(torch.uint8)), (dtype, got, values)
        mesh = DeviceMesh("cpu", [0, 1])
        for dtype in (torch.float32, torch.float64, torch.int64, torch.complex64):
            local = torch.arange(2).to(dtype)[::2] + 1 + dist.get_rank()  # One element, whose stride is 2.
            local = torch.stack([local, local]).t().reshape(-1)[::2]
            assert local.stride() == (2,) and local.is_contiguous()
            source = {"w": DTensor.from_local(local, mesh, [Shard(0)], run_check=False)}
            target = {"w": distribute_tensor(torch.zeros(2, dtype=dtype), mesh, [Replicate()])}
            for mode in MODES:
                target["w"].zero_()
                transfer.plan(source, target).run(source, target, delta=mode)
                assert target["w"].to_local().tolist() == [1, 2]

    @ranks(2)
    def test_one_changed_element_of_a_large_part_is_seen():
        """Parts of several chunks, strided on one end, cast on the way, that begin anywhere: one changed element travels."""
        here, there = DeviceMesh("cpu", [0]), DeviceMesh("cpu", [1])
        full = torch.randn(301, 1001, generator=torch.Generator().manual_seed(0))
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            local = torch.zeros(full.numel() + 1, dtype=dtype)[1:].view(full.shape)
            whole = DTensor.from_local(local, there, [Replicate()], run_check=False) if dist.get_rank() == 1 else None
            columns = distribute_tensor(
                torch.zeros_like(full, dtype=dtype), DeviceMesh("cpu", [[1], [0]]), [Shard(1), Shard(0)], src_data_rank=None
            )
            for target in (whole, columns):
                source = {"w": distribute_tensor(full.clone(), here, [Replicate()], src_data_rank=None)}
                plan = transfer.plan(source, None if target is None else {"w": target})
                for place in (None, 0, 1, 65_536, 150_001, full.numel() - 1):
                    if place is not None and dist.get_rank() == 0:
                        source["w"].to_local().view(-1)[place] += 4
                    plan.run(source, None if target is None else {"w": target}, delta="checksum")
                    values = [source["w"].to_local().clone() if dist.get_rank() == 0 else torch.empty_like(full)]
                    dist.broadcast(values[0], 0)
                    if target is not None:
                        wanted = distribute_tensor(
                            values[0].to(dtype), target.device_mesh, target.placements, src_data_rank=None
                        )
                        assert torch.equal(target.to_local(), wanted.to_local()), (dtype, place)
                    plan.run(source, None if target is None else {"w": target}, delta="checksum")
                    assert plan.last_sent_bytes == 0
