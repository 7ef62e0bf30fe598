"""verl's engine trains with ours as with torch's FSDP2, and hands over its weights; skipped where verl is not installed."""

import importlib.util
import pathlib
import sys
import tempfile
import types
import unittest

import torch
import torch.distributed as dist
from case import both
from common import error_of, ranks, run_ranks
from doc_pages import run_page
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from torch_ragged import RaggedShard
from torch_ragged.fsdp import FSDPModule

HAS_VERL = importlib.util.find_spec("verl") is not None


def engine_in(folder, **options):
    from verl_cases import enter_ranks, make_engine

    enter_ranks()
    return make_engine("ragged", folder, **options)


def import_deltas():
    """verl's packages of the delta engine import web servers, which rollouts need. Their modules about deltas do not."""
    import verl

    for name in ("checkpoint_engine", "checkpoint_engine.delta_sync"):
        if importlib.util.find_spec("uvicorn") is None and f"verl.{name}" not in sys.modules:
            module = sys.modules[f"verl.{name}"] = types.ModuleType(f"verl.{name}")
            module.__path__ = [str(pathlib.Path(verl.__file__).parent.joinpath(*name.split(".")))]


def whole_weights(engine):
    return {name: param.full_tensor() for name, param in engine.module.state_dict().items()}


def check_weights(folder, fsdp_size):
    """All exports of one engine: whole tensors, shards with their flat offsets, and what a step has changed."""
    from verl_cases import train_step

    import_deltas()
    engine = engine_in(folder, fsdp_size=fsdp_size)
    assert isinstance(engine.module, FSDPModule)
    whole = whole_weights(engine)
    tensors, adapters = engine.get_per_tensor_param()
    found = dict(tensors)
    assert adapters is None and list(found) == list(whole) and all(torch.equal(found[name], whole[name]) for name in whole)
    check_shards(engine, whole)
    engine._delta_shard_snap = {}
    shards, _ = engine.get_per_tensor_param_shard()
    for name, local, _ in shards:
        engine._delta_shard_snap[name] = local.detach().clone().view(-1)
    before = {name: value.bfloat16() for name, value in whole.items()}
    train_step(engine, 0)
    entries, _ = engine.get_per_tensor_param_delta_shard()
    for (name, now), entry in zip(whole_weights(engine).items(), entries, strict=True):
        ((slot, shape),), _, counts, index, value, group = entry
        assert (slot, shape, int(counts)) == (name, tuple(now.shape), index.numel())
        changed = before[name].view(-1).clone()
        gathered = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, (index.long(), value), group=group)
        replicas = [None] * dist.get_world_size()  # Each element comes from one replica of the shards.
        dist.all_gather_object(replicas, gathered)
        counted = torch.zeros(now.numel(), dtype=torch.int64)
        for positions, values in {id(pair): pair for each in replicas for pair in each}.values():
            changed[positions] = values
            counted[positions] += 1
        assert torch.equal(changed.view_as(now), now.bfloat16()), name
        assert int((changed != before[name].view(-1)).sum()) > 0


def check_shards(engine, whole):
    """Each rank's shard lies at ``place`` in the whole tensor; the shards of a group are all of it."""
    shards, _ = engine.get_per_tensor_param_shard()
    kinds = set()
    for name, local, spec in shards:
        flat = whole[name].bfloat16().view(-1)
        assert isinstance(spec.place, int) and torch.equal(local, flat[spec.place : spec.place + local.numel()]), name
        total = torch.tensor([local.numel()])
        dist.all_reduce(total, group=spec.gather_group)
        assert total.item() == flat.numel()
        contributes = torch.tensor([local.numel() * spec.contributes])
        dist.all_reduce(contributes)
        assert contributes.item() == flat.numel()
        kinds.add(local.numel() * dist.get_world_size(spec.gather_group) == flat.numel())
    assert False in kinds  # At least one parameter is cut unevenly, or the offsets would be those of Shard(0).


def check_checkpoint(folder):
    from verl_cases import train_step

    engine = engine_in(f"{folder}/model")
    train_step(engine, 0)
    engine.save_checkpoint(f"{folder}/saved", global_step=1)
    expected = [train_step(engine, step) for step in (1, 2)]
    again = engine_in(f"{folder}/model")
    again.load_checkpoint(f"{folder}/saved", del_local_after_load=False)
    found = [train_step(again, step) for step in (1, 2)]
    assert found == expected, (found, expected)


@unittest.skipUnless(HAS_VERL, "verl is not installed")
class VerlTest(unittest.TestCase):
    def test_losses_and_norms_are_those_of_fsdp2(self):
        from verl_cases import CASES

        for number, case in enumerate(CASES):
            with self.subTest(case=case.what):
                for theirs, ours in run_ranks(2, both, "verl", number):
                    self.assertEqual(len(ours), 20)  # A loss and a norm per step.
                    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-6, atol=1e-6)

    def test_weights_are_handed_over_whole_as_shards_and_as_changes(self):
        for world, fsdp_size in ((3, -1), (4, 2)):
            with tempfile.TemporaryDirectory() as folder:
                run_ranks(world, check_weights, folder, fsdp_size)

    def test_a_checkpoint_of_verl_resumes(self):
        with tempfile.TemporaryDirectory() as folder:
            run_ranks(2, check_checkpoint, folder)

    @ranks(1)
    def test_what_verl_could_not_use_is_refused():
        from verl.workers.engine.spec import ShardSpec

        from torch_ragged.integrations.verl import _with_offsets, register

        assert "verl has an engine of this name" in error_of(register, backend="fsdp2")
        assert register(device=["cuda"]) is register()
        mesh = init_device_mesh("cpu", (1, 1))
        from torch.distributed.tensor import Shard

        spec = ShardSpec((4, 4), mesh, (RaggedShard((0,), (1,)), Shard(1)))
        assert "no model parallelism beside fully_shard" in error_of(list, _with_offsets(iter([("w", torch.ones(16), spec)])))
        plain = ShardSpec.from_param(DTensor.from_local(torch.ones(4, 4), mesh, [Shard(0), Shard(1)]))
        assert list(_with_offsets(iter([("w", torch.ones(16), plain)])))[0][2] is plain

    def test_the_commands_of_the_page_run(self):
        self.assertIn("RaggedFSDPEngine", run_page("integrations/verl.md")[0])
