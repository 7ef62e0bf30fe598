"""The waits that rehearsal/faults.py removes: found in the source, on any torch."""

from __future__ import annotations

import ast
import sys
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class WaitsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        sys.path.insert(0, str(ROOT))
        try:
            from rehearsal import faults, waits
        finally:
            sys.path.pop(0)
        cls.faults, cls.waits, cls.found = faults, waits, waits.waits()

    def test_each_wait_stands_where_it_says(self):
        for wait in self.found:
            source = (ROOT / "torch_ragged" / wait.file).read_bytes()[wait.start : wait.end].decode()
            self.assertEqual(ast.unparse(ast.parse(source.strip(), mode="eval")), wait.text, wait)

    def test_the_waits_of_every_kind_are_found(self):
        texts = {(wait.file, wait.function): wait for wait in self.found}
        issued = texts[("tensor/_redistribute.py", "_Direct.broadcast")]
        self.assertEqual(issued.text, "group.broadcast([result], options).wait()")
        self.assertEqual(issued.removed, "group.broadcast([result], options)")  # It is issued all the same.
        recorded = texts[("fsdp/comm/experimental/_peer_memory.py", "SymmetricPeerMemory.exchange")]
        self.assertIn("Event()", recorded.removed)
        functional = texts[("tensor/_carry.py", "Pending.wait")]
        self.assertEqual(functional.text, "torch.ops._c10d_functional.wait_tensor(self.data)")
        self.assertEqual(functional.removed, "self.data")
        self.assertEqual(texts[("fsdp/core/_dbuffer.py", "order_behind")].removed, "None")

    def test_a_store_and_a_timeout_are_no_waits_of_a_stream(self):
        for wait in self.found:
            self.assertNotIn("store", wait.text)

    def test_a_mutation_changes_one_call_and_compiles(self):
        for wait in self.found:
            path = ROOT / "torch_ragged" / wait.file
            code = self.waits._Loader(wait.module, str(path), [(wait, wait.removed)]).get_code(wait.module)
            self.assertNotEqual(code, compile(path.read_bytes(), str(path), "exec", dont_inherit=True), wait)

    def test_exceptions_name_waits_that_exist(self):
        self.assertLessEqual(set(self.faults.NOT_FOUND), {(wait.file, wait.function) for wait in self.found})


if __name__ == "__main__":
    unittest.main()
