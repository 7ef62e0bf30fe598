"""Wrong calls of every day: the error says what was given, what is expected and what to write, and nothing is changed."""

import os
import unittest
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
from common import enter_fake_group, error_of, ranks, run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from torch_ragged.fsdp import fully_shard, memory_report, monitor, rows
from torch_ragged.optim import Adam8bit, AdamW8bit, BlockPolicy, Muon, Shampoo, matrix_groups

WIDTH = 64


def linear():
    return nn.Linear(8, 8)


# -- arguments of fully_shard ------------------------------------------------------------------------------------------------

ARGUMENTS = {
    "mp_policy=torch.bfloat16 is no policy: pass mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)": {
        "mp_policy": torch.bfloat16
    },
    "param_dtype='bfloat16' of mp_policy is no floating-point dtype of torch: pass one, such as param_dtype=torch.bfloat16": {
        "mp_policy": MixedPrecisionPolicy(param_dtype="bfloat16")
    },
    "reduce_dtype=torch.int8 of mp_policy is no floating-point dtype": {
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.int8)
    },
    "orig_param_policy got <lambda>(p), which fully_shard cannot call with (fqn, parameter): too many positional arguments. "
    "Pass a function of these arguments, such as orig_param_policy=lambda fqn, parameter: rows(32)": {
        "orig_param_policy": lambda p: rows(2)
    },
    "orig_param_policy got <lambda>(a, b, c), which fully_shard cannot call with (fqn, parameter): missing a required": {
        "orig_param_policy": lambda a, b, c: rows(2)
    },
    "orig_param_policy=3 is no function: pass one of (fqn, parameter), such as": {"orig_param_policy": 3},
    "orig_param_policy=rows(2) is a granularity: pass a function": {"orig_param_policy": rows(2)},
    "shard_placement_fn got <lambda>(fqn, p), which fully_shard cannot call with (parameter): missing a required argument: "
    "'p'. Pass a function of these arguments, such as shard_placement_fn=lambda parameter: Shard(0)": {
        "shard_placement_fn": lambda fqn, p: Shard(0)
    },
    "shard_placement_fn=Shard(dim=0) is no function": {"shard_placement_fn": Shard(0)},
}


def check_arguments():
    """Each error as ranks see it if rank 1 alone is wrong."""
    found = []
    for options in ARGUMENTS.values():
        module = linear()
        found.append(error_of(fully_shard, module, **(options if dist.get_rank() == 1 else {})))
        assert type(module) is nn.Linear and not isinstance(module.weight, DTensor)
    return found


def check_calls_that_differ():
    """What differs is named by the parameter, not by the buffer that it makes."""
    rank, found = dist.get_rank(), []

    def attempt(*modules):
        found.append(error_of(lambda: [fully_shard(module) for module in modules]))
        assert not isinstance(modules[-1], TorchFSDPModule)

    model = nn.Sequential(linear(), linear())
    if rank:
        model[1].weight.data = model[1].weight.data.bfloat16()
    attempt(model)
    model = nn.Sequential(*(linear() for _ in range(2 + rank)))
    attempt(*model, model)  # Rank 1 shards a block more, rank 0 the root.
    attempt(nn.Sequential(*(linear() for _ in range(2 + rank))))
    return found


def check_meshes():
    mesh, found = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp")), []
    for given in (mesh, mesh["tp"], init_device_mesh("cpu", (2,), mesh_dim_names=("data",))):
        model = parallelize_module(nn.Sequential(linear()), mesh["tp"], {"0": ColwiseParallel()})
        found.append(error_of(fully_shard, model, mesh=given))
        assert type(model) is nn.Sequential and model[0].weight.device_mesh == mesh["tp"]
    fully_shard(model, mesh=mesh["dp"])
    return found


def check_orders():
    found = []
    model = nn.Sequential(linear(), linear())
    fully_shard(model)
    found.append(error_of(fully_shard, model[1]))
    assert type(model[1]) is nn.Linear
    model(torch.ones(2, 8)).sum().backward()
    for inside in (0, None):
        model = nn.Sequential(linear(), linear())
        torch_fully_shard(model if inside is None else model[inside])
        found.append(error_of(fully_shard, model))
    model = nn.Sequential(linear(), linear())
    torch_fully_shard(model[0])
    fully_shard(model, ignored_params=list(model[0].parameters()))  # FSDP2's parameters are its own.
    assert model[0].weight.placements == (Shard(0),)
    return found


class ArgumentsTest(unittest.TestCase):
    def test_a_wrong_argument_on_one_rank_is_named_on_all(self):
        for rank, errors in enumerate(run_ranks(2, check_arguments)):
            for text, error in zip(ARGUMENTS, errors, strict=True):
                self.assertIn(text, error)
                self.assertTrue(
                    error.startswith("TypeError: " if rank else "RuntimeError: fully_shard failed on rank 1: TypeErr")
                )

    @ranks(2)
    def test_every_function_of_the_right_arguments_is_a_policy():
        def variadic(*arguments):
            return rows(2)

        class Policy:
            def __call__(self, fqn, parameter, more=None):
                return rows(2)

        for policy in (variadic, Policy(), BlockPolicy(), partial(lambda size, fqn, parameter: rows(size), 2)):
            fully_shard(linear(), orig_param_policy=policy)

    def test_calls_that_differ_between_ranks_are_named_by_their_parameters(self):
        for dtype, calls, blocks in run_ranks(2, check_calls_that_differ):
            self.assertIn(
                "rank 0 has 1.weight of torch.float32 and shape (8, 8) plain, rank 1 has 1.weight of torch.bfloat16 and shape",
                dtype,
            )
            self.assertIn("rank 0 has 0 parameters, rank 1 has 2 parameters, weight to bias: give it equal modules", calls)
            self.assertIn("rank 0 has 4 parameters, 0.weight to 1.bias, rank 1 has 6 parameters, 0.weight to 2.bias", blocks)

    def test_a_mesh_with_the_dimensions_of_model_parallelism_is_named(self):
        for whole, own, other in run_ranks(2, check_meshes):
            for error in (whole, own):
                self.assertIn("ValueError: 0.weight is a DTensor on the mesh dimension 'tp', and fully_shard got", error)
                self.assertIn("pass the data-parallel dimensions only, mesh['dp']", error)
            self.assertIn("which cannot be joined with the mesh of fully_shard", other)
            self.assertIn("use its slices: mesh['tp'] for the model, mesh['dp'] for fully_shard", other)

    def test_the_root_before_its_blocks_and_torchs_own_fully_shard_are_named(self):
        for root, inside, around in run_ranks(2, check_orders):
            self.assertIn("ValueError: weight is sharded already, as 1.weight of an earlier fully_shard call", root)
            self.assertIn("call fully_shard on the inner modules first", root)
            self.assertIn("0.weight is sharded by torch.distributed.fsdp.fully_shard already, which was called on 0", inside)
            self.assertIn(
                "which was called on FSDPSequential: call the fully_shard of torch_ragged.fsdp on all modules", around
            )

    @ranks(2)
    def test_ignored_params_may_be_any_iterable():
        for kind in (list, tuple, iter, set, dict.fromkeys):
            model = nn.Sequential(linear(), linear())
            fully_shard(model, ignored_params=kind(list(model[0].parameters())))
            assert not isinstance(model[0].weight, DTensor) and isinstance(model[1].weight, DTensor)


class DefaultMeshTest(unittest.TestCase):
    def test_without_a_process_group_fully_shard_makes_it_from_the_environment_as_fsdp2(self):
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        environment = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port)}
        for shard in (torch_fully_shard, fully_shard):
            self.assertFalse(dist.is_initialized())
            with mock.patch.dict(os.environ, {**environment, "TORCHELASTIC_USE_AGENT_STORE": "True"}):
                model = shard(linear())
            self.addCleanup(lambda: dist.is_initialized() and dist.destroy_process_group())
            self.assertEqual(model.weight.device_mesh.size(), 1)
            model(torch.ones(2, 8)).sum().backward()
            dist.destroy_process_group()


# -- optimizers and tools ----------------------------------------------------------------------------------------------------


def trained(cls, params, **options):
    """An optimizer after a step."""
    optimizer = cls(params, **options)
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer


class StatesTest(unittest.TestCase):
    def refused(self, optimizer, other, *words):
        before = [dict(state) for state in optimizer.state.values()]
        text = error_of(optimizer.load_state_dict, other.state_dict())
        for word in words:
            self.assertIn(word, text)
        self.assertRegex(text, f"^ValueError: {type(optimizer).__name__}(.load_state_dict expects| algorithm must be)")
        self.assertEqual([dict(state) for state in optimizer.state.values()], before)

    def test_states_of_another_optimizer_are_refused_when_they_are_loaded(self):
        params = [nn.Parameter(torch.ones(WIDTH, WIDTH))]
        adamw = trained(torch.optim.AdamW, params)
        for cls, name in (
            (AdamW8bit, "exp_avg_codes"),
            (Adam8bit, "exp_avg_codes"),
            (Muon, "momentum_buffer"),
            (Shampoo, "left"),
        ):
            optimizer = cls(params)
            self.refused(optimizer, adamw, f"{name} of shape (64, 64) for parameter 0", "missing: there are step, exp_avg")
            self.assertFalse(optimizer.state)
            self.refused(trained(cls, params), trained(Muon if cls is Shampoo else Shampoo, params))

    def test_states_of_other_blocks_are_refused(self):
        params = [nn.Parameter(torch.ones(WIDTH, WIDTH))]
        other = trained(AdamW8bit, params, policy=BlockPolicy((16, 16)))
        self.refused(AdamW8bit(params), other, "exp_avg_scales of shape (2, 2)", "which is of shape (4, 4)")

    def test_own_states_and_those_of_torchs_same_optimizer_load(self):
        for cls, shape in ((AdamW8bit, (WIDTH, WIDTH)), (AdamW8bit, (3,)), (Muon, (WIDTH, 8)), (Shampoo, (WIDTH, 8))):
            params = [nn.Parameter(torch.ones(shape))]
            other = trained(cls, params)
            optimizer = cls(params)
            optimizer.load_state_dict(other.state_dict())
            self.assertEqual(optimizer.state[params[0]].keys(), other.state[params[0]].keys())
        matrix, vector = nn.Parameter(torch.ones(WIDTH, 8)), nn.Parameter(torch.ones(3))
        optimizer = Muon([{"params": [matrix]}, {"params": [vector], "algorithm": "adamw"}])
        optimizer.load_state_dict(optimizer.state_dict())
        Muon([matrix]).load_state_dict(trained(torch.optim.Muon, [matrix]).state_dict())


class ToolsTest(unittest.TestCase):
    def setUp(self):
        enter_fake_group(self, 2)
        self.model = fully_shard(nn.Linear(8, 8))

    def test_matrix_groups_takes_the_model_and_modules_for_adamw(self):
        text = error_of(matrix_groups, self.model.parameters())
        self.assertIn("expects the model, an nn.Module, got generator: pass model, not model.parameters()", text)
        text = error_of(matrix_groups, self.model, adamw=[3])
        self.assertIn("adamw takes modules, parameters and names, got 3: pass adamw=[model.head]", text)
        text = error_of(matrix_groups, self.model, adamw=["head"])
        self.assertIn("adamw names 'head', and the FSDPLinear has no such parameter or module", text)
        text = error_of(matrix_groups, self.model, matrices=["bias"])
        self.assertIn("a parameter of shape (8,): a matrix has two dimensions, and a stack of matrices three or four", text)
        text = error_of(matrix_groups, self.model, adamw="bias", matrices=[self.model], segments={"weight": ((4, 4), 0)})
        self.assertEqual(text, "")
        text = error_of(matrix_groups, self.model, adamw=self.model, matrices="weight")
        self.assertIn("has weight in adamw and in matrices: name each parameter in one of them", text)
        self.assertEqual(len(matrix_groups(self.model, adamw=self.model)), 1)

    def test_tools_name_what_is_no_optimizer(self):
        for call in (memory_report, monitor):
            for given, named in (("adamw", "'adamw'"), (3, "3"), (["adamw"], "'adamw'")):
                text = error_of(call, self.model, given)
                self.assertIn(f"{call.__name__} got {named} as optimizer: give a torch.optim.Optimizer, such as", text)
        self.assertIn("memory_report got", error_of(memory_report, self.model, lambda params: 3))
        self.assertIn("monitor got", error_of(monitor, self.model, torch.optim.AdamW))
        monitor(self.model).close()  # No monitor is left behind.
