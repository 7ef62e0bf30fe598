"""What importing the package changes in torch, and whether ``registration_report()`` lists it."""

import contextlib
import io
import json
import re
import subprocess
import sys
import types
import unittest
from pathlib import Path
from unittest import mock

import torch
from torch.distributed.tensor import placement_types

import torch_ragged
from torch_ragged import RaggedShard, StridedRaggedShard
from torch_ragged._register import _upstream, hooks
from torch_ragged._register._torch import fsdp2_keeps_wide_gradients, nodes_outlive_outputs
from torch_ragged._register._upstream import OLD_NAMES, is_upstream, torch_name
from torch_ragged.tensor._cut_placement import own_types
from torch_ragged.tensor._ops import RaggedRows

ROOT = Path(__file__).resolve().parents[2]

# Imports what is named, and prints the names of torch's modules; given these, imports them first, and prints what then changed.
CHANGES = """
import collections, importlib, json, sys, types, warnings

warnings.simplefilter("ignore")
ours, theirs = json.loads(sys.argv[1])

def is_torch(value):
    return str(getattr(value, "__module__", "")).split(".")[0] == "torch"

def parts(value):
    '''The parts of a module, class, function, container or instance of torch's, by name.'''
    if isinstance(value, types.FunctionType):
        return {"__code__": value.__code__, "__defaults__": value.__defaults__}
    if isinstance(value, (types.ModuleType, type)) or is_torch(type(value)):
        inside = dict(getattr(value, "__dict__", {}))
        inside = {name: part for name, part in inside.items() if name not in ("__dict__", "__weakref__")}
    elif isinstance(value, (list, tuple, set, frozenset)):
        inside = {id(part): part for part in value}
    else:
        inside = {}
    return {**inside, **value} if isinstance(value, dict) else inside

def belongs(part):
    if isinstance(part, (type, types.FunctionType)):
        return is_torch(part)
    return not isinstance(part, (types.ModuleType, str, int, float, bytes, types.CodeType))

def snapshot():
    '''Path, value and parts of all that torch's modules reach, by the value's id.'''
    found = {}
    modules = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "torch" and module is not None}
    left = collections.deque(modules.items())
    while left:
        path, value = left.popleft()  # The shortest path first: it is where the value is at home.
        if id(value) not in found:
            inside = parts(value)
            found[id(value)] = path, value, inside
            left += [(f"{path}.{name}", part) for name, part in inside.items() if belongs(part)]
    return found

for name in theirs:
    importlib.import_module(name)
before = snapshot() if theirs else {}
for name in ours:
    importlib.import_module(name)
if not theirs:
    print(json.dumps([name for name in sys.modules if name.split(".")[0] == "torch"]))
    sys.exit()
changed = []
for path, value, old in before.values():
    new = parts(value)
    for name in {**old, **new}:
        was, is_now = old.get(name, changed), new.get(name, changed)
        if was is not is_now and not isinstance(is_now, (types.ModuleType, int)) and was != is_now:
            changed.append([path, str(name), str(is_now)])
print(json.dumps(changed))
"""

# Imports the package in a fork for each version, and prints what it has decided about this torch. Two forks run at once.
ANSWERS = """
import json, os, sys
import torch, torch.distributed.fsdp, torch.distributed.pipelining
versions = json.loads(sys.argv[1])
for number, version in enumerate(versions):
    if os.fork():
        if number:
            os.wait()
        if number == len(versions) - 1:
            os.wait()
        continue
    torch.__version__ = type(torch.__version__)(version)
    from torch_ragged.fsdp.core import _fsdp_param_group as group
    from torch_ragged.fsdp.grads._weight_gradient import allows_split_backward
    line = json.dumps([group._KEEPS_WIDE_GRADIENTS, allows_split_backward()])
    os.write(1, f"{line}\\n".encode())  # At once: two may print.
    os._exit(0)
"""
VERSIONS = ("2.11.0", "2.15.0", "2.15.0a0+git1234", "2.15.0rc1", "2.16.0a0")

# What Python and torch keep of modules and functions that are imported or looked up, whichever they are.
BOOKKEEPING = ("_overload_registry", "_overloadpacket", "_builtin_table", "torch.ops._dir", "__warningregistry__")


def changes(*modules):
    """What importing these modules changes in torch's own modules: path, name of the part, and the part as text."""

    def run(theirs):
        command = [sys.executable, "-c", CHANGES, json.dumps([modules, theirs])]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=ROOT)
        if done.returncode:
            raise AssertionError(done.stderr)
        return json.loads(done.stdout.splitlines()[-1])

    return run(run([]))


def reported_as(path, name, value):
    """The names under which the report may list a change."""
    if "ragged_shard" in name or value.startswith("ragged_shard"):  # Torch keeps an operator's name in several tables.
        return {"ops.ragged_shard.reduce"}
    if f"{path}.{name}".startswith("torch._weights_only_unpickler._marked_safe_globals_set"):
        return {"serialization.add_safe_globals"}
    if path.startswith("torch.utils._pytree."):
        return {"_pytree.register_constant"}
    if name in ("_extension_of", "_torch_ragged_redistributes"):  # The guards of hooks on functions of this module call them.
        return {"distribute_tensor", "compute_local_shape_and_global_offset", "redistribute_local_tensor"}
    if name == "_torch_ragged_has_ragged":
        return {"_distribute_state_dict"}
    if name in ("_torch_ragged_uncounted", "_torch_ragged_runs"):
        return {"_dispatch_fast_path_python_tail"}
    return {each.removeprefix("_torch_ragged_").removeprefix("_torch_") for each in (name, path.rpartition(".")[2])}


def targets(names):
    """What hooks name as their targets, and the last parts of these."""
    return set(names) | {name.rpartition(".")[2] for name in names}


@unittest.skipIf(is_upstream(), "this torch has the placements itself")
class RegistrationTest(unittest.TestCase):
    BESIDE = ("_torch_", "_extension_of")  # What extend_in_place adds to a function's module, beside the function's code.
    UNSEEN = ["_C._dynamo.eval_frame.set_code_exec_strategy", "_random._rng_tracker"]  # In C++; of the first draw.
    if torch.__version__.startswith("2.11"):  # It has no such hash, and no keys of this kind to complete.
        UNSEEN += ["DTensorSpec._stable_hash", "op_to_schema_info_for_single_dim_strategy"]
    if hasattr(placement_types, "_register_placements_as_opaque"):  # Then torch takes any placement.
        UNSEEN.append("_pytree.register_constant")

    def test_the_report_lists_all_that_an_import_changes_in_torch(self):
        packages = [f"torch_ragged{name}" for name in ("", ".fsdp", ".offline", ".optim", ".checkpoint", ".debug")]
        found = [change for change in changes(*packages) if not any(each in ".".join(change[:2]) for each in BOOKKEEPING)]
        lines = torch_ragged.registration_report().splitlines()[1:]
        listed = targets([name for line in lines for name in line.strip().partition(": ")[0].split(", ")])
        self.assertEqual([change for change in found if not reported_as(*change) & listed], [])
        changed = set().union(*(reported_as(*change) for change in found if not change[1].startswith(self.BESIDE)))
        at_import = [line.strip().partition(": ")[0].split(", ") for line in lines if not re.search(", (while|after) ", line)]
        unseen = [name for names in at_import for name in names if not targets([name]) & changed]
        self.assertEqual(sorted(unseen), sorted(self.UNSEEN))

    def test_a_torch_that_guards_on_constants_only_is_told_the_placements(self):
        (install,) = (hook.install for hook in hooks if hook.target == "_pytree.register_constant")
        with mock.patch("torch.utils._pytree.register_constant") as register:
            with mock.patch("torch_ragged._register._tensor.dtensor_placement_types", types.SimpleNamespace()):
                install()
            told = [call.args[0].__name__ for call in register.call_args_list]
            self.assertEqual(sorted(told), sorted(own_types))  # Those of other tests, too.
            self.assertLessEqual({"InterleavedShard", "RaggedRows", "RaggedShard", "StridedRaggedShard"}, {*told})
            install()
        takes_any = hasattr(placement_types, "_register_placements_as_opaque")
        self.assertEqual(register.call_count, len(told) if takes_any else 2 * len(told))

    def test_what_torch_calls_itself_changes_no_answer_about_it(self):
        command = [sys.executable, "-c", ANSWERS, json.dumps([torch.__version__, *VERSIONS])]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=ROOT)
        answers = done.stdout.splitlines()
        self.assertEqual(len(answers), 1 + len(VERSIONS), done.stderr)
        self.assertEqual(set(answers), {answers[0]})

    def test_fsdp2_is_asked_which_gradients_it_keeps(self):
        class Rounds:
            def to_accumulated_grad_if_needed(self): ...

        for param, keeps in ((Rounds, False), (object, True)):
            with mock.patch("torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam", param):
                self.assertEqual(fsdp2_keeps_wide_gradients(), keeps)

    def test_the_node_of_an_autograd_function_is_asked_whether_it_lives(self):
        nodes_outlive_outputs.cache_clear()
        with torch.no_grad(), torch.device("meta"):  # As a model may be sharded.
            answer = nodes_outlive_outputs()
        nodes_outlive_outputs.cache_clear()
        self.assertEqual(answer, nodes_outlive_outputs())
        self.assertIs(answer, not torch.__version__.startswith("2.11"))

        class Freed:
            @property
            def grad_fn(self):
                return self

            @property
            def next_functions(self):
                raise RuntimeError("freed")

        nodes_outlive_outputs.cache_clear()
        with mock.patch("torch_ragged._register._torch._Identity.apply", lambda x: Freed()):
            self.assertIs(nodes_outlive_outputs(), False)
        nodes_outlive_outputs.cache_clear()

    def test_torch_loads_each_placement_with_weights_only(self):
        placements = [RaggedShard((0,), (1, 2)), StridedRaggedShard((0,), (1, 2), 2), RaggedRows((1,), (1, 2))]
        file = io.BytesIO()
        torch.save(placements, file)
        file.seek(0)
        self.assertEqual(torch.load(file, weights_only=True), placements)

    def test_torch_loads_placements_of_earlier_versions_with_weights_only(self):
        placements, file = [RaggedShard((0,), (1, 2)), StridedRaggedShard((0,), (1, 2), 2)], io.BytesIO()
        with contextlib.ExitStack() as stack:
            for name, module in OLD_NAMES.items():
                old, _, kind = name.rpartition(".")
                stack.enter_context(mock.patch.object(getattr(sys.modules[module], kind), "__module__", old))
            torch.save(placements, file)
        for name in OLD_NAMES:
            self.assertIn(name.rpartition(".")[0].encode(), file.getvalue())
        file.seek(0)
        self.assertEqual(torch.load(file, weights_only=True), placements)

    def test_modules_that_torch_has_take_the_place_of_this_packages(self):
        def name_of(module):
            return "json" if module == "torch_ragged.tensor._read" else "torch.no_such_package.module"

        for is_patched in (False, True):
            with (
                mock.patch.multiple(_upstream, is_upstream=lambda is_patched=is_patched: is_patched, torch_name=name_of),
                mock.patch.dict(sys.modules),
            ):
                _upstream.use_modules_of_torch()
                self.assertIs(sys.modules["torch_ragged.tensor._read"] is json, is_patched)

    def test_modules_have_names_in_torch(self):
        for name, wanted in {
            "torch_ragged": "torch.distributed.tensor._ragged",
            "torch_ragged.tensor._ops._rows": "torch.distributed.tensor._ragged._ops._rows",
            "torch_ragged.tensor._placement_extension": "torch.distributed.tensor._placement_extension",
            "torch_ragged._ranks.groups": "torch.distributed._named_groups",
            "torch_ragged.fsdp.core": "torch.distributed.fsdp._ragged.core",
            "torch_ragged_of_others": "torch_ragged_of_others",
        }.items():
            self.assertEqual(torch_name(name), wanted)
