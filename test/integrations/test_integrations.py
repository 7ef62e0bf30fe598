"""install(): programs that call torch's fully_shard call ours, and torch's again when it is undone."""

import contextlib
import dataclasses
import importlib.util
import pickle
import sys
import tempfile
import types
import unittest
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp
from common import run_ranks
from torch import nn
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
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


WRITER = "nemo_automodel.components.checkpoint._backports.hf_storage"
WRAPPED = "nemo_automodel.components.models.deepseek_v4.fsdp"


class WriterByName:
    """Keeps files as NeMo AutoModel's writer writes them: one chunk for each name of a tensor."""

    def __init__(self):
        self.files = {}

    def prepare_global_plan(self, plans):
        return [dataclasses.replace(plan, storage_data={"shard_index": i}) for i, plan in enumerate(plans, 1)]

    def write_data(self, plan, planner):
        file = {item.index.fqn: (item.index.offset, planner.resolve_data(item).clone()) for item in plan.items}
        assert self.files.setdefault(plan.storage_data["shard_index"], file) is file, "a file is written twice"
        future = torch.futures.Future()
        future.set_result(list(plan.items))
        return future


@contextlib.contextmanager
def nemo_automodel_of_names():
    """Modules with the names of NeMo AutoModel's that ``install()`` replaces names in."""
    found = {name: sys.modules.get(name) for name in (WRITER, WRAPPED)}
    writer, wrapped = types.ModuleType(WRITER), types.ModuleType(WRAPPED)
    writer._HuggingFaceStorageWriter = type("_HuggingFaceStorageWriter", (WriterByName,), {"__module__": WRITER})
    wrapped._has_fsdp_state = lambda module: False  # As torch's private function answers for our modules.
    sys.modules.update({WRITER: writer, WRAPPED: wrapped})
    try:
        yield writer, wrapped
    finally:
        for name, module in found.items():
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module


def files_by_name():
    """The files of each rank have each chunk of a model whose shards begin and end within rows, for a pickled writer too."""
    mesh = init_device_mesh("cpu", (3,))
    with nemo_automodel_of_names() as (module, wrapped), installed():
        model = nn.Sequential(nn.Linear(40, 33), nn.Linear(33, 21))
        full = {name: value.detach().clone() for name, value in model.state_dict().items()}
        assert not wrapped._has_fsdp_state(model)
        torch.distributed.fsdp.fully_shard(model, mesh=mesh)
        assert wrapped._has_fsdp_state(model) and not wrapped._has_fsdp_state(model[0])
        state = model.state_dict()
        for writer in (module._HuggingFaceStorageWriter(), pickle.loads(pickle.dumps(module._HuggingFaceStorageWriter()))):
            planner = DefaultSavePlanner()
            planner.set_up_planner(state, is_coordinator=True)
            plans = [planner.create_local_plan()] * 3
            written = writer.write_data(writer.prepare_global_plan(plans)[dist.get_rank()], planner).value()
            assert len(written) == len(plans[0].items)
            chunks = [(name, *chunk) for file in writer.files.values() for name, chunk in file.items()]
            assert sum(part.numel() for _, _, part in chunks) == sum(p.to_local().numel() for p in state.values())
            for name, offset, part in chunks:
                box = tuple(slice(o, o + n) for o, n in zip(offset, part.shape, strict=True))
                assert torch.equal(part, full[name][box]), (name, box)
    return sorted(writer.files)


def check_written_by_nemo_automodel(folder):
    """NeMo AutoModel's writer itself: its whole file and its shards have the values."""
    from nemo_automodel.components.checkpoint._backports import hf_storage
    from safetensors.torch import load_file

    mesh = init_device_mesh("cpu", (3,))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 33), nn.Linear(33, 21))
    full = {name: value.clone() for name, value in model.state_dict().items()}
    whole = Path(folder) / "whole"
    whole.mkdir(exist_ok=True)
    with installed():
        torch.distributed.fsdp.fully_shard(model, mesh=mesh)
        options = {"save_sharded": True, "consolidated_output_path": str(whole), "fqn_to_index_mapping": dict.fromkeys(full, 1)}
        dcp.save(model.state_dict(), storage_writer=hf_storage._HuggingFaceStorageWriter(path=folder, **options))
    dist.barrier()
    (file,) = whole.glob("*.safetensors")
    assert all(torch.equal(value, full[name]) for name, value in load_file(file).items())
    state = {name: torch.zeros_like(value) for name, value in full.items()}
    dcp.load(state, storage_reader=hf_storage._HuggingFaceStorageReader(path=folder))
    assert all(torch.equal(value, full[name]) for name, value in state.items())


def policies():
    mesh = init_device_mesh("cpu", (2,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    with installed():
        model = torch.distributed.fsdp.fully_shard(nn.Linear(8, 8), mesh=mesh, mp_policy=policy)
    return model._get_fsdp_state()._mp_policy == policy


class ProgramsTest(unittest.TestCase):
    """What programs read of FSDP2 beside ``fully_shard``."""

    def test_the_mixed_precision_policy_is_in_the_state(self):
        self.assertEqual(run_ranks(2, policies), [True, True])

    def test_a_writer_whose_files_key_chunks_by_name_writes_a_file_for_each_round(self):
        files = run_ranks(3, files_by_name)
        self.assertTrue(any(len(each) > 1 for each in files), files)
        names = [name for each in files for name in each]
        self.assertEqual(len(names), len(set(names)), files)

    @unittest.skipUnless(importlib.util.find_spec("nemo_automodel"), "nemo_automodel is not installed")
    def test_nemo_automodels_writer_loses_no_chunk(self):
        with tempfile.TemporaryDirectory() as folder:
            run_ranks(3, check_written_by_nemo_automodel, folder)


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
