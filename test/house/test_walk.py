"""Calls point down: in construction, in a step and in parallelize, no file calls one that imports it."""

import inspect
import re
import sys
import unittest
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # Of the benchmarks.

from torch import nn

from benchmarks.parts.walk import imports_of, traced, walks
from torch_ragged.fsdp.core import _fsdp_state
from torch_ragged.optim import Muon


def is_of_a_subclass(caller, callee):
    """The base class issues all collectives of a step and calls its subclass, which computes and never communicates.

    Likewise a collective that has ended calls what unpacks it, and a decorator what it decorates.
    """
    file, _, function = callee.partition(":")
    return (file == "_muon.py" and re.search(rf"def {function}\(\s*self", inspect.getsource(Muon)) is not None) or (
        caller,
        callee,
    ) in {
        ("_matrix.py:_matrix_step", "_root_states.py:states_of"),
        ("_carry.py:wait", "_gather.py:unpack"),
        ("_base.py:named", "_matrix.py:step"),
        ("_gather.py:_fly", "_matrix.py:<lambda>"),
    }


class WalkTest(unittest.TestCase):
    def test_construction_and_steps_call_nothing_above(self):
        found = walks("torch_ragged")
        self.assertGreater(len(found), 9)
        for name, walk in found.items():
            if name != "the argument module":
                self.assertGreater(walk.functions.total(), 40, name)  # It has been traced.
            # Backward of an opaque output has no pre-backward: the first gradient starts it, which autograd gives to a group.
            starts = {("_fsdp_param_group.py:before_gradient", "_fsdp_state.py:start_backward")} if "opaque" in name else set()
            found_above = {pair for pair in walk.upward if name != "a step of Muon" or not is_of_a_subclass(*pair)}
            self.assertEqual(found_above, starts, name)

    def test_a_call_to_a_file_above_is_seen(self):
        core = Path(_fsdp_state.__file__).parent
        above = imports_of(core.parents[1])
        state, group, gradients = (str(core / f"{name}.py") for name in ("_fsdp_state", "_fsdp_param_group", "_grad_buffer"))
        self.assertLessEqual({group, gradients}, above[state])  # Also what it imports over others.
        self.assertNotIn(state, above[group] | above[gradients])
        names: dict = {}
        exec(compile("def calls_up(function, *arguments): return function(*arguments)", gradients, "exec"), names)
        walk = traced("torch_ragged", lambda: names["calls_up"](_fsdp_state.state_of, nn.Linear(1, 1)))
        self.assertEqual(dict(walk.upward), {("_grad_buffer.py:calls_up", "_fsdp_state.py:state_of"): 1})
        self.assertEqual(walk.row(), {"files": 2, "functions": 2, "calls": 2, "upward": 1, "depth": 2})

    def test_calls_that_get_a_module_are_counted_alone(self):
        names: dict = {}
        file = str(Path(_fsdp_state.__file__))
        exec(
            compile(
                "def keeps(*given, **named): return 1\ndef calls(x):\n keeps(x); keeps([{0: x}]); keeps(n=x); keeps(1)",
                file,
                "exec",
            ),
            names,
        )
        linear = nn.Linear(1, 1)
        self.assertEqual(traced("torch_ragged", lambda: names["calls"](linear), linear).functions.total(), 4)
        self.assertEqual(traced("torch_ragged", lambda: names["calls"](linear)).functions.total(), 5)
