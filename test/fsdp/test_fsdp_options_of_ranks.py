"""An option of ``fully_shard`` that differs on one rank is an error on all ranks, which names it and both values."""

import dataclasses
import functools
import inspect
import itertools
import unittest
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from common import error_of, ranks, run_mortal_ranks
from delays import delays
from soon import soon
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from torch_ragged._ranks.agreement import text_of
from torch_ragged.fsdp import (
    HIERARCHICAL,
    ZERO1,
    ZERO2,
    BufferPlacements,
    Float4Policy,
    Float8Policy,
    Offload,
    float8_weight,
    fully_shard,
    rows,
    token_scale,
)
from torch_ragged.transfer import stream

DIMS = SimpleNamespace(shard_names=("dp",), replicate_names=())
PLACEMENTS = BufferPlacements.__new__(BufferPlacements)  # One of no legal combination, which has other values of all fields.
PLACEMENTS.__dict__.update(parameters=(Partial(),), gradients=(Replicate(),), optimizer=(Partial(),))


def factory(planes):
    return float8_weight(planes)


# By class of options: a value, and by field another value of it.
FIELDS = {
    MixedPrecisionPolicy: (
        MixedPrecisionPolicy(),
        {
            "param_dtype": torch.bfloat16,
            "reduce_dtype": torch.bfloat16,
            "output_dtype": torch.float16,
            "cast_forward_inputs": False,
            "param_dtype_override_fn": factory,  # since torch 2.15
        },
    ),
    Float8Policy: (
        Float8Policy(weight_factory=float8_weight),
        {"tile": (1, 128), "weight_factory": factory, "backward": Float8Policy(), "recomputes": False},
    ),
    Float4Policy: (
        Float4Policy(),
        {"tile": None, "weight_factory": factory, "backward": Float8Policy(), "recomputes": False},
    ),
    OffloadPolicy: (OffloadPolicy(), {}),
    CPUOffloadPolicy: (CPUOffloadPolicy(), {"pin_memory": False}),
    Offload: (Offload(), {"optimizer": 0.5, "parameters": True, "to": "/folder"}),
    BufferPlacements: (ZERO2, {name: getattr(PLACEMENTS, name) for name in ("parameters", "gradients", "optimizer")}),
}
FOLDERS = {(Offload, "to")}
"""Fields whose values may differ between ranks."""


def with_field(value, name, other):
    """A copy of a value with another field, which may be one that the class refuses."""
    changed = object.__new__(type(value))
    changed.__dict__.update({**value.__dict__, name: other})
    return changed


# By parameter of fully_shard: values on one rank and on the others, and words of the error; None: both values.
BOTH = None
WRONG = {
    "reshard_after_forward": [(False, True, BOTH), (2, True, BOTH)],
    "shard_placement_fn": [
        (lambda p: Shard(1), None, "of weight: cut"),
        (lambda p: 3, None, "Invalid shard_placement_fn result"),
    ],
    "mp_policy": [
        (MixedPrecisionPolicy(cast_forward_inputs=False), MixedPrecisionPolicy(), BOTH),
        (Float8Policy(weight_factory=factory), Float8Policy(weight_factory=float8_weight), BOTH),
        (Float8Policy(weight_factory=factory, recomputes=False), Float8Policy(weight_factory=factory), BOTH),
        (Float8Policy(weight_factory=factory, backward=Float8Policy()), Float8Policy(weight_factory=factory), BOTH),
        (Float8Policy(), MixedPrecisionPolicy(), BOTH),
        (torch.bfloat16, MixedPrecisionPolicy(), "mp_policy=torch.bfloat16 is no policy"),
    ],
    "offload_policy": [
        (Offload(optimizer=0.5), Offload(), BOTH),
        (CPUOffloadPolicy(), OffloadPolicy(), BOTH),
        (CPUOffloadPolicy, OffloadPolicy(), "is no policy: pass offload_policy=CPUOffloadPolicy()"),
    ],
    "check_replicas": [(False, True, BOTH)],
    "ignored_params": [("all", None, "ignored_params: ("), (["weight"], None, "got 'weight' in it")],
    "orig_param_policy": [
        (lambda fqn, p: rows(2), None, "of weight: cut in"),
        (rows(2), None, "orig_param_policy=rows(2) is a granularity"),
    ],
    "placements": [(ZERO1, ZERO2, BOTH), (None, ZERO2, BOTH), ("zero1", ZERO2, "placements='zero1' is a str")],
    "optional": [(True, False, BOTH), ("yes", False, "optional must be a bool, got 'yes'")],
    "weights": [([1, 2], [2, 1], BOTH), (None, [2, 1], BOTH), (3, [2, 1], "weights=3 is no list")],
    "mesh": [],  # Here, ranks have the same one: see test_fsdp_construction and test_agreement.
    "dp_mesh_dims": [],  # On a mesh of its own, below.
}


# What is wrong with one rank's mesh or module, and words of the error of each rank.
WRONG_MODEL = {
    "module": "expects an nn.Module",
    "plain": "weight of torch.float32 and shape (8, 8) plain",
    "mesh": "expects a DeviceMesh",
}


def linear(mesh=None):
    """A layer of a plain weight; with ``mesh``, of one that tensor parallelism cuts in its last dimension."""
    module = nn.Linear(8, 8, bias=False)
    if mesh is not None:
        placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
        module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, placements))
    return module


def check_each_option(mesh, tp=None, odd_rank=0, names=WRONG, **options):
    """One rank has another value: all ranks raise, and stay in step."""
    for name in names:
        for own, others, words in WRONG[name]:
            module = linear(tp)
            value = own if dist.get_rank() == odd_rank else others
            text = error_of(fully_shard, module, mesh=mesh, **{**options, name: {module.weight} if value == "all" else value})
            expected = [f"{name}: ", text_of(own), text_of(others)] if words is None else [words]
            assert name in text and all(each in text for each in expected), (name, expected, text)
            assert type(module) is nn.Linear
    dist.barrier()
    fully_shard(linear(tp), mesh=mesh, **options)


@soon()
def another_mesh(call, odd, others, is_watched):
    """Rank 0 waits for ranks that wait for others, in the store, where no connection closes. Over NCCL, no thread watches."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    meshes = {"both": mesh, "all": init_device_mesh("cpu", (4,)), "dp": mesh["dp"], "tp": mesh["tp"]}
    backends = dist.get_backend_config() if is_watched else "cpu:gloo,cuda:nccl"
    with mock.patch.object(dist, "get_backend_config", return_value=backends):
        given = meshes[odd if dist.get_rank() == 0 else others]
        if call == "token_scale":
            return error_of(token_scale, torch.tensor(1), given)
        return error_of(fully_shard, linear(mesh["tp"]) if "tp" in (odd, others) else linear(), mesh=given)


def check_under_delays(seeds):
    """For each seed, another rank has another value of another option: all ranks raise, whichever comes first, then train."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for seed in seeds:
        with delays(seed):
            check_each_option(mesh["dp"], mesh["tp"], seed % 4, [list(WRONG)[seed % len(WRONG)]])
            text = error_of(lambda: list(stream(reordered(mesh["dp"], seed % 2), 1)))
            assert "transfer.stream was called differently" in text, (seed, text)


def reordered(mesh, odd_rank):
    """Two tensors, in another order on one rank of the mesh."""
    named = {name: distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]) for name in "ab"}
    return {name: named[name] for name in sorted(named, reverse=mesh.get_local_rank() == odd_rank)}


class OptionsOfRanksTest(unittest.TestCase):
    def test_every_field_of_every_option_is_compared_or_may_differ(self):
        for kind, (value, others) in FIELDS.items():
            inherited = (
                set(others)
                if kind is MixedPrecisionPolicy
                else set(others) | {name for base in kind.__mro__[1:] for name in FIELDS.get(base, (None, {}))[1]}
            )
            fields = {field.name for field in dataclasses.fields(kind)}
            self.assertLessEqual(fields, inherited, f"{kind.__name__} has a field that is not tried here")
            for name, other in others.items():
                if name in fields:
                    changed = text_of(with_field(value, name, other))
                    self.assertNotEqual(changed, text_of(value), (kind, name))

    def test_the_classes_of_options_are_those_that_fully_shard_takes(self):
        def subclasses(kind):
            return {kind}.union(*(subclasses(each) for each in kind.__subclasses__()))

        ours = {each for base in (MixedPrecisionPolicy, OffloadPolicy) for each in subclasses(base)}
        ours = {each for each in ours if each.__module__.startswith(("torch_ragged.", "torch.distributed"))}
        self.assertLessEqual(ours, set(FIELDS))
        parameters = set(inspect.signature(fully_shard).parameters)
        self.assertEqual(parameters - {"module"}, set(WRONG))

    def test_folders_of_ranks_may_differ_and_tiers_may_not(self):
        texts = [text_of(Offload(to=to)) for to in ("/a", "/b", "cpu")]
        self.assertEqual(texts[0], texts[1])
        self.assertNotEqual(texts[0], texts[2])
        declared = {(kind, field.name) for kind in FIELDS for field in dataclasses.fields(kind) if field.metadata}
        self.assertEqual(declared, FOLDERS)

    def test_functions_are_compared_by_module_and_qualified_name(self):
        self.assertEqual(text_of(factory), f"{__name__}.factory")
        self.assertEqual(text_of(functools.partial(factory, 3, bits=8)), f"partial({__name__}.factory, 3, bits=8)")
        self.assertEqual(text_of(rows), "torch_ragged.granularity.rows")
        self.assertNotIn("0x", text_of([factory, object(), {1: self.setUp}]))

    @ranks(2)
    def test_one_rank_differs_on_a_1d_mesh():
        for odd_rank in range(2):
            check_each_option(init_device_mesh("cpu", (2,)), odd_rank=odd_rank)

    @ranks(4)
    def test_one_rank_differs_under_hsdp():
        names = set(WRONG) - {"placements"}
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        check_each_option(mesh, odd_rank=2, names=names)
        placements = HIERARCHICAL if dist.get_rank() == 1 else None
        text = error_of(fully_shard, linear(), mesh=mesh, placements=placements)
        assert f"placements: None on rank 0, {text_of(HIERARCHICAL)} on rank 1" in text, text

    @ranks(4)
    def test_one_rank_differs_and_its_tensor_parallel_peers_raise():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for odd_rank in (0, 3):
            check_each_option(mesh["dp"], mesh["tp"], odd_rank)

    @ranks(4)
    @soon()
    def test_one_rank_has_a_wrong_mesh_or_module_and_its_tensor_parallel_peers_raise():
        for odd_rank, kind in ((0, "module"), (3, "module"), (1, "plain"), (2, "mesh")):
            # New groups in each round: those in which ranks have waited for the one that failed are ended. With new names:
            # torch's caches take a mesh for an equal one.
            names = (f"dp {kind} {odd_rank}", f"tp {kind} {odd_rank}")
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
            module, shards = linear(mesh[names[1]]), mesh[names[0]]
            if dist.get_rank() == odd_rank:
                module = {"module": "model", "plain": linear()}.get(kind, module)
                shards = "dp" if kind == "mesh" else shards
            text = error_of(fully_shard, module, mesh=shards)
            assert WRONG_MODEL[kind] in text, (kind, odd_rank, text)
            assert kind == "plain" or dist.get_rank() == odd_rank or f"failed on rank {odd_rank}" in text, text
            dist.barrier()

    def check_another_mesh(self, call, odd, others, is_watched, expected):
        for rank, text in run_mortal_ranks(4, set(), another_mesh, call, odd, others, is_watched).items():
            self.assertIn("PeerError", text, rank)
            self.assertRegex(text, rf"ranks? 0(, 1)? in {call} with {expected}, called in", rank)
            self.assertIn("All ranks must pass the same mesh", text, rank)

    def test_one_rank_passes_another_mesh_and_all_raise(self):
        self.check_another_mesh("fully_shard", "both", "all", False, "ranks 0, 2")

    @pytest.mark.slow
    def test_one_rank_passes_any_other_mesh_and_all_raise(self):
        waits = {"all": "ranks 0, 1, 2, 3", "dp": "ranks 0, 2", "tp": "ranks 0, 1"}  # By the mesh of rank 0.
        meets = {"both": {1, 2}, "all": {1, 2, 3}, "dp": {2}, "tp": {1}}  # By the mesh of the others: who waits for rank 0.
        for odd, others in itertools.permutations(meets, 2):
            found = run_mortal_ranks(4, set(), another_mesh, "fully_shard", odd, others, True)
            for rank in {0} | meets[others]:
                self.assertRegex(found[rank], "^(PeerError|PeerRaised|ValueError)", (odd, others, rank))
        for odd, others in (("all", "both"), ("dp", "all"), ("tp", "all"), ("tp", "dp")):
            self.check_another_mesh("fully_shard", odd, others, True, waits[odd])
        self.check_another_mesh("token_scale", "both", "all", True, "ranks 0, 2")

    @ranks(4)
    def test_one_rank_differs_and_ranks_come_at_any_time():
        check_under_delays(range(3))

    @pytest.mark.slow
    @ranks(4)
    def test_one_rank_differs_and_ranks_come_at_any_time_for_50_seeds():
        check_under_delays(range(50))

    @ranks(4)
    def test_one_rank_differs_with_dp_mesh_dims():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        check_each_option(mesh, mesh, 1, dp_mesh_dims=DIMS)
        other = SimpleNamespace(shard_names=("dp", "tp"), replicate_names=())
        dims = other if dist.get_rank() == 2 else DIMS
        assert "dp_mesh_dims: namespace(" in error_of(fully_shard, linear(), mesh=mesh, dp_mesh_dims=dims)
        fully_shard(linear(mesh), mesh=mesh, dp_mesh_dims=DIMS)


if __name__ == "__main__":
    unittest.main()
