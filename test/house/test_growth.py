"""Public objects that are made and deleted again and again leave nothing behind: what a process and a store hold stays flat."""

import enum
import gc
import importlib
import inspect
import itertools
import subprocess
import sys
import tempfile
import threading
import unittest
import weakref

import pytest
import torch
import torch.distributed as dist
from common import ranks, run_ranks
from held import held
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, debug, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from torch_ragged import RaggedShard, checkpoint, fsdp, transfer
from torch_ragged._ranks.groups import group_of
from torch_ragged.elastic import PieceLoader
from torch_ragged.fsdp import fully_shard
from torch_ragged.optim import SOAP, Adam8bit, AdamW8bit, Muon, QKClip, QKLayer, Shampoo, matrix_groups, muon_policy
from torch_ragged.random import deferred_init, materialize
from torch_ragged.spmd import Plan, parallelize

PACKAGES = ("fsdp", "optim", "transfer", "checkpoint", "spmd", "elastic")


def model_of(mesh, **options):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fully_shard(model[0], mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def train(model, optimizer):
    model(torch.ones(2, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def trained(mesh, optimizer=lambda model: torch.optim.AdamW(model.parameters()), **options):
    model = model_of(mesh, **options)
    return train(model, optimizer(model))


def of_matrices(kind):
    return lambda model: kind(matrix_groups(model, lr=0.01), lr=0.1)


def tensors(mesh):
    whole = torch.arange(64.0).view(8, 8)
    source = {"w": distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)}
    return source, {"w": DTensor.from_local(torch.zeros(64), mesh, [Replicate()]).view(8, 8)}


def copies(mesh, folder):
    found = fsdp.NeighbourCopies(*trained(mesh))
    found.update()
    found.wait()
    found.recover(mesh)


def same_bits(mesh, folder):
    model, optimizer = trained(mesh)
    same = fsdp.SameBits(model, optimizer, pieces=3)
    for _ in same.pieces():
        model(torch.ones(2, 8)).square().mean().backward()
    same.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()


def resharded(mesh, folder):
    model, optimizer = trained(mesh)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    fsdp.reshard_to(model, optimizer, mesh, weights=[3, 1], stateful=[scheduler])
    train(model, optimizer)


def monitored(mesh, folder):
    model, optimizer = trained(mesh)
    with fsdp.monitor(model, optimizer) as watch:
        watch.step(1)
        train(model, optimizer)
    fsdp.memory_report(model, optimizer)


def moved(mesh, folder):
    source, target = tensors(mesh)
    plan = transfer.plan(source, target)
    plan.run(source, target)
    plan.run(source, target, async_op=True).wait()
    plan.run(source, target, delta=transfer.Baseline())
    plan.tiles()


def streamed(mesh, folder):
    for _ in transfer.stream(model_of(mesh), 1 << 20):
        pass


def saved(mesh, folder):
    state = checkpoint.TrainState(*trained(mesh))
    checkpoint.save(f"{folder}/saved", state)
    checkpoint.load(f"{folder}/saved", state)


def saved_in_background(mesh, folder):
    group = group_of(range(dist.get_world_size()), "saves")  # Made once.
    others = threading.enumerate()
    checkpoint.async_save(f"{folder}/async", checkpoint.TrainState(*trained(mesh)), process_group=group).result()
    for thread in set(threading.enumerate()) - set(others):
        thread.join(timeout=60)  # The save's thread holds tensors for a moment after the result is there.


def clipped(mesh, folder):
    model = model_of(mesh)
    clip = QKClip([QKLayer.of(model[0], model[1], 2)], threshold=1.0)
    for handle in clip.watch([model]):
        handle.remove()


def parallelized(mesh, folder):
    plan = Plan().shard("<in:input>", Shard(0), "dp").default(Replicate())
    model = parallelize(nn.Sequential(nn.Linear(8, 8)), plan, mesh)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))


def loaded(mesh, folder):
    model = model_of(mesh)
    same = fsdp.SameBits(model, torch.optim.SGD(model.parameters(), lr=0.1), pieces=3)
    for _, batch in PieceLoader(torch.ones(9, 8), same, 2):
        model(batch).sum().backward()


def offloaded(mesh, folder):
    model = model_of(mesh, offload_policy=fsdp.Offload(optimizer=0.5))
    train(model, fsdp.offloaded(torch.optim.AdamW, model, lr=0.1))


MAKES = {
    "FSDPModule DBuffer FSDPGrad": lambda mesh, folder: trained(mesh),
    "FSDPModule of ZeRO-2": lambda mesh, folder: trained(mesh, placements=fsdp.ZERO2),
    "UnshardHandle": lambda mesh, folder: model_of(mesh).unshard(async_op=True).wait(),
    "OffloadedOptimizer": offloaded,
    "Monitor": monitored,
    "SameBits": same_bits,
    "NeighbourCopies": copies,
    "PieceLoader": loaded,
    "reshard_to": resharded,
    "Muon MuonPolicy": lambda mesh, folder: trained(mesh, of_matrices(Muon), orig_param_policy=muon_policy()),
    "Adam8bit": lambda mesh, folder: trained(mesh, lambda m: Adam8bit(m.parameters()), orig_param_policy=Adam8bit.policy),
    "AdamW8bit BlockPolicy": lambda mesh, folder: trained(
        mesh, lambda m: AdamW8bit(m.parameters()), orig_param_policy=AdamW8bit.policy
    ),
    "Shampoo": lambda mesh, folder: trained(mesh, of_matrices(Shampoo)),
    "SOAP": lambda mesh, folder: trained(mesh, of_matrices(SOAP)),
    "QKClip": clipped,
    "Plan Handle Baseline": moved,
    "stream": streamed,
    "CheckpointWriter CheckpointReader": saved,
    "async_save": saved_in_background,
    "parallelize Explanation": parallelized,
    "deferred_init": lambda mesh, folder: materialize(fully_shard(deferred_init(nn.Linear, 8, 8), mesh=mesh)),
}
"""What makes objects, uses them and drops them, by the public classes that they are of."""

PLAIN = {
    *("OffloadPolicy", "CPUOffloadPolicy", "MixedPrecisionPolicy", "Offload", "BufferLayout", "Granularity", "Segments"),
    *("PullLayout", "RowPlanner", "Float8Planes", "Float4Planes", "Float8Weight", "EngineLayout", "MeshShape", "MatrixGroups"),
}
"""Classes of values and of tensors: they own no more than what they are made of."""


WINDOWS = 6


def growth(names, folder, times):
    """What constructions leave behind: what grows by one for each second of them, in each window of ``times / 2``.

    A leak grows in all windows. A thread that a slow moment starts, or a cache that fills late, does not: as long as one rank
    sees growth, all ranks look at one more window.
    """
    mesh, grown = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",)), {}
    for name in names:
        for _ in range(3):  # Caches fill.
            MAKES[name](mesh, folder)
        counts, more = [held()], {}
        for window in range(WINDOWS):
            for _ in range(times // 2):
                MAKES[name](mesh, folder)
            counts.append(held())
            least = {what: min(b[what] - a[what] for a, b in itertools.pairwise(counts)) for what in counts[-1]}
            # The nodes of a map of context variables: as many as their hashes, which are addresses, happen to need.
            least = {what: count for what, count in least.items() if not what.startswith("builtins.hamt_")}
            more = {what: count for what, count in least.items() if count >= max(times // 4, 2)}
            if window and not agree_on_any(bool(more)):
                break
        if more:
            grown[name] = more
    return grown


def agree_on_any(flag):
    """Whether one rank says so, on all ranks."""
    found = torch.tensor(int(flag))
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return bool(found)


class GrowthTest(unittest.TestCase):
    def check(self, times):
        with tempfile.TemporaryDirectory() as folder:
            for grown in run_ranks(2, growth, list(MAKES), folder, times, timeout=1500):
                self.assertFalse(grown, grown)

    def test_objects_that_are_made_and_deleted_leave_nothing(self):
        self.check(4)

    @pytest.mark.slow
    def test_200_objects_that_are_made_and_deleted_leave_nothing(self):
        self.check(200)

    def test_an_import_of_the_package_imports_no_compiler(self):
        """Each rank imports the package: Dynamo and Inductor would take longer than all of it."""
        code = "import sys, torch_ragged.fsdp, torch_ragged.transfer, torch_ragged.random\n"
        code += "assert not {'torch._dynamo', 'torch._inductor'} & set(sys.modules)"
        subprocess.run([sys.executable, "-c", code], check=True, timeout=100)

    def test_all_public_classes_are_made(self):
        made = {word for name in MAKES for word in name.split()}
        for package in PACKAGES:
            module = importlib.import_module(f"torch_ragged.{package}")
            for name in module.__all__:
                each = getattr(module, name)
                is_value = inspect.isclass(each) and (
                    issubclass(each, (Exception, enum.Enum, tuple, Placement))
                    or getattr(each, "_is_protocol", False)
                    or (hasattr(each, "__dataclass_params__"))
                )
                if inspect.isclass(each) and not is_value and name not in made | PLAIN:
                    self.fail(f"{package}.{name} is neither made here nor among the values")

    @ranks(2)
    def test_a_deleted_mesh_and_its_groups_are_freed():
        """The last mesh of a transfer, too."""
        mesh = init_device_mesh("cpu", (2,))
        tensor = DTensor.from_local(torch.ones(4), mesh, [RaggedShard((0,), (1, 1))], shape=(8,))
        assert transfer.Spec.of(tensor).mesh is transfer.Spec.of(tensor).mesh
        gone = weakref.ref(mesh)
        del mesh, tensor
        debug._clear_sharding_prop_cache()
        gc.collect()
        assert gone() is None, [type(each) for each in gc.get_referrers(gone())]


if __name__ == "__main__":
    unittest.main()
