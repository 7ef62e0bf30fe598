"""Calls point down: in a step, no file of fsdp calls one that imports it."""

import sys
import unittest
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # Last: both folders have a module ``common``.

from walk import imports_of, walks


class WalkTest(unittest.TestCase):
    def test_backward_calls_nothing_above(self):
        found = walks("torch_ragged")
        for name in ("backward of two Linears", "backward of one small parameter", "forward of one small parameter"):
            self.assertGreater(found[name].functions.total(), 50, name)  # It has been traced.
            self.assertEqual(dict(found[name].upward), {}, name)
        # A function that is passed down.
        self.assertEqual(list(found["forward of two Linears"].upward), [("_tensors.py:_map_leaf", "_fsdp_state.py:<lambda>")])

    def test_a_call_to_a_file_above_is_seen(self):
        """FSDP2's groups call their state's module, and a file knows what it imports, also over others."""
        fsdp = Path(__file__).resolve().parents[1] / "torch_ragged/fsdp/core"
        above = imports_of(fsdp.parents[1])
        state, group, gradients = (str(fsdp / f"{name}.py") for name in ("_fsdp_state", "_fsdp_param_group", "_gradients"))
        self.assertLessEqual({group, gradients}, above[state])
        self.assertNotIn(state, above[group] | above[gradients])
        self.assertGreater(walks("FSDP2")["backward of two Linears"].upward.total(), 0)


if __name__ == "__main__":
    unittest.main()
