"""install(): programs that call torch's fully_shard call ours, and torch's again when it is undone."""

import sys
import types
import unittest

import torch
import torch.distributed.fsdp
from common import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from torch_ragged import RaggedShard
from torch_ragged.fsdp import FSDPModule, buffer_layouts, rows
from torch_ragged.integrations import install, installed

TORCHS = [torch.distributed.fsdp.fully_shard]  # In a list: a name of this module would be replaced too.

PROGRAM = """
import torch.distributed.fsdp as fsdp
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp import fully_shard as shard


def early(module, **options):
    return fully_shard(module, **options)


def late(module, **options):
    from torch.distributed.fsdp import fully_shard

    return fully_shard(module, **options)
"""


def load_program(test=None):
    """A program that has torch's function under two names, and imports it in a function too."""
    program = sys.modules["someones_program"] = types.ModuleType("someones_program")
    exec(PROGRAM, program.__dict__)
    if test is not None:
        test.addCleanup(sys.modules.pop, "someones_program")
    return program


def shard_by_the_program():
    """How modules are sharded inside and outside of the block, and with which options."""
    program, mesh = load_program(), init_device_mesh("cpu", (2,))
    found = []
    with installed(orig_param_policy=lambda fqn, param: rows(3) if param.ndim == 2 else None) as installation:
        for call in (program.early, program.late):
            model = call(nn.Sequential(nn.Linear(8, 9)), mesh=mesh)
            model(torch.ones(2, 8)).sum().backward()
            placement = model[0].weight.placements[0]
            found.append((isinstance(model, FSDPModule), isinstance(placement, RaggedShard)))
            (layout,) = buffer_layouts(model).values()
            assert layout.tensors[0].block == 3 * 8, layout
            assert program.fully_shard.state(model) is not None
            assert TORCHS[0].state(model) is not None  # Other libraries hold torch's own function.
        assert installation.calls == 2
    model = program.early(nn.Linear(8, 8), mesh=mesh)
    found.append((isinstance(model, FSDPModule), isinstance(model.weight.placements[0], RaggedShard)))
    return found


def shard_with_placements_of_the_program():
    """The program shards dimension 1 of weights, and biases on a mesh of their own; the user wants whole rows of weights."""
    program, mesh = load_program(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    own_mesh = types.SimpleNamespace(mesh=mesh["b"])

    def placement_fn(param):
        return Shard(1) if param.ndim == 2 else types.SimpleNamespace(placement=Shard(0), mesh_info=own_mesh)

    def policy(fqn, param):
        return rows(3) if param.ndim == 2 or fqn == "1.bias" else None

    with installed(orig_param_policy=policy):
        model = program.late(nn.Sequential(nn.Linear(8, 9), nn.Linear(9, 6)), mesh=mesh["a"], shard_placement_fn=placement_fn)
    model(torch.ones(2, 8)).sum().backward()
    return [(name, type(p.placements[0]).__name__, p.device_mesh.mesh_dim_names) for name, p in model.named_parameters()]


class InstallTest(unittest.TestCase):
    def test_a_program_shards_with_ours_inside_the_block_and_with_torchs_after_it(self):
        for found in run_ranks(2, shard_by_the_program):
            self.assertEqual(found, [(True, True), (True, True), (False, False)])

    def test_the_installation_lists_what_it_replaced(self):
        load_program(self)
        with installed(reshard_after_forward=False) as installation:
            self.assertIn("torch.distributed.fsdp.fully_shard", installation.names)
            self.assertIn("someones_program.fully_shard", installation.names)
            self.assertIn("someones_program.shard", installation.names)
            names = "\n    ".join(installation.names)
            text = "torch_ragged.fsdp.fully_shard with reshard_after_forward in place of torch's, called 0 times"
            self.assertEqual(str(installation), f"{text}. Names replaced:\n    {names}")
        self.assertEqual(str(installation), f"{text}, uninstalled. Names replaced:\n    {names}")

    def test_a_granularity_replaces_the_programs_placement_and_keeps_its_mesh(self):
        for found in run_ranks(4, shard_with_placements_of_the_program):
            weights = [(f"{index}.weight", "RaggedShard", ("a",)) for index in range(2)]
            biases = [("0.bias", "Shard", ("b",)), ("1.bias", "RaggedShard", ("b",))]
            self.assertEqual(sorted(found), sorted(weights + biases))

    def test_uninstalling_restores_each_name(self):
        program = load_program(self)
        installation = install()
        self.assertIsNot(program.shard, TORCHS[0])
        installation.uninstall()
        installation.uninstall()  # Nothing is left to undo.
        self.assertTrue(program.shard is program.fully_shard is torch.distributed.fsdp.fully_shard is TORCHS[0])

    def test_the_innermost_installation_holds(self):
        with installed(reshard_after_forward=True):
            outer = torch.distributed.fsdp.fully_shard
            with installed(reshard_after_forward=False) as inner:
                self.assertIs(torch.distributed.fsdp.fully_shard, inner.function)
            self.assertIs(torch.distributed.fsdp.fully_shard, outer)
        self.assertIs(torch.distributed.fsdp.fully_shard, TORCHS[0])

    def test_a_program_loaded_in_the_block_calls_torchs_after_it(self):
        with installed() as installation:
            program = load_program(self)
            self.assertIs(program.shard, installation.function)
        self.assertTrue(program.shard is program.fully_shard is TORCHS[0])

    def test_installations_end_in_any_order(self):
        program = load_program(self)
        first, second = install(), install()
        first.uninstall()
        self.assertIs(program.shard, second.function)
        second.uninstall()
        self.assertTrue(program.shard is torch.distributed.fsdp.fully_shard is TORCHS[0])

    def test_a_name_that_the_program_has_replaced_meanwhile_stays(self):
        program = load_program(self)
        with installed():
            program.shard = len
        self.assertIs(program.shard, len)
        self.assertIs(program.fully_shard, TORCHS[0])

    def test_an_unknown_option_is_an_error_and_nothing_is_replaced(self):
        with self.assertRaisesRegex(TypeError, "install.. got granularity: expected options of fully_shard, of reshard_after"):
            install(granularity=rows(3))
        self.assertIs(torch.distributed.fsdp.fully_shard, TORCHS[0])


if __name__ == "__main__":
    unittest.main()
