"""The null device: torch's allocator, streams and process groups without computing. It needs ``make rehearsal``."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import unittest
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
is_ready = torch.version.cuda is not None and (ROOT / "rehearsal/build/operators.so").exists()


def result(*command: str, **variables: str):
    """What ``python command`` prints as JSON behind the word RESULT, on the null device."""
    sys.path.insert(0, str(ROOT))
    try:
        from rehearsal.__main__ import environment
    finally:
        sys.path.pop(0)
    settings = {**os.environ, **environment(null=True), "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run([sys.executable, *command], env=settings, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert "RESULT" in done.stdout, f"{command} exited with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return json.loads(done.stdout.rpartition("RESULT")[2])


def program(name: str, **variables: str):
    return result(str(Path(__file__).with_name("null_programs.py")), name, **variables)


@unittest.skipUnless(is_ready, "make rehearsal was not run with this torch")
class NullDeviceTest(unittest.TestCase):
    def test_large_tensors_take_addresses_and_no_memory(self):
        for segments in ("False", "True"):
            with self.subTest(expandable=segments):
                found = program("large_tensors", PYTORCH_CUDA_ALLOC_CONF=f"expandable_segments:{segments}")
                self.assertEqual(found, {"values": [0.0] * 5, "reserved": 16, "flags": [3, 4], "grown": True})

    def test_the_device_has_the_memory_of_an_h100(self):
        for segments in ("False", "True"):
            with self.subTest(expandable=segments):
                self.assertEqual(program("too_large", PYTORCH_CUDA_ALLOC_CONF=f"expandable_segments:{segments}"), [60, 1])

    def test_a_shape_that_depends_on_values_is_an_error(self):
        self.assertEqual(program("values_are_needed"), "aten::nonzero needs values, and the null device has none")

    def test_what_is_issued_is_counted_and_traced(self):
        found = program("counts")
        counts = {name: found["counts"][name] for name in ("launches", "copies", "collectives", "cudaMalloc")}
        self.assertEqual(
            counts, {"launches": 3, "copies": 1, "collectives": 1, "cudaMalloc": 1}
        )  # The side stream has its own.
        product, row = 64 * 64 * 4, 64 * 32 * 4
        matmul, gather, copy, total = found["trace"]
        self.assertEqual(matmul, ["aten::mm", 0, 0, 2 * row, product, 2 * 64 * 64 * 32])
        self.assertEqual((gather[0], *gather[2:]), ("ncclAllGather", 256, row, 256 * row, 0))
        self.assertEqual((copy[0], *copy[2:]), ("memcpy", 0, product, product, 0))
        self.assertEqual(total, ["aten::sum", 0, 0, product, 4, 0])
        self.assertEqual(len({0, gather[1], copy[1]}), 3)  # Streams of their own.

    def test_attention_has_its_work(self):
        self.assertEqual(program("attention"), [4, 10, 2, 5])


@unittest.skipUnless(is_ready, "make rehearsal was not run with this torch")
class MemoryTest(unittest.TestCase):
    def test_reserved_memory_is_below_fsdp2s_and_nothing_is_allocated_after_the_second_step(self):
        for segments in ("False", "True"):
            rows = {}
            for package in ("torch_ragged", "FSDP2"):
                variables = {"PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{segments}"}
                command = ("-m", "rehearsal.memory", "--package", package, "--ranks", "128")
                rows[package] = {row["model"]: row for row in result(*command, **variables)}
            for model, most in (("gpt-oss-120b", 0.84), ("llama-3-70b", 1.0)):
                with self.subTest(expandable=segments, model=model):
                    ours, theirs = (rows[package][model] for package in rows)
                    self.assertLessEqual(ours["reserved GiB"], most * theirs["reserved GiB"])
                    self.assertLess(ours["cudaMalloc"], theirs["cudaMalloc"])
                    self.assertEqual((ours["after step 2"], ours["retries"]), (0, 0))


@unittest.skipUnless(is_ready, "make rehearsal was not run with this torch")
class HostTest(unittest.TestCase):
    def test_a_group_issues_less_than_fsdp2s(self):
        row = result("-m", "rehearsal.host_time", "--policy", "float32", "--rounds", "1", "--groups", "4")
        # Two all-gathers and a reduce-scatter per group; ours agrees on unused parameters once per backward.
        directions = ("forward", "backward")
        self.assertEqual([row[f"torch_ragged {direction} collectives"] for direction in directions], [1.0, 2.25])
        self.assertEqual([row[f"FSDP2 {direction} collectives"] for direction in directions], [1.0, 2.0])
        for direction, counted in itertools.product(directions, ("calls", "dispatches", "events", "waits", "allocations")):
            with self.subTest(direction=direction, counted=counted):
                self.assertLess(row[f"torch_ragged {direction} {counted}"], row[f"FSDP2 {direction} {counted}"])


@unittest.skipUnless(is_ready, "make rehearsal was not run with this torch")
class StepTest(unittest.TestCase):
    def test_a_recorded_step_is_replayed(self):
        found = program("steps")
        ours, theirs = found["torch_ragged"], found["FSDP2"]
        # Embedding, two blocks, and the head, which stays gathered. Backward reduces in the other order.
        forward, backward = ["AllGather"] * 4, ["AllGather"] * 3 + ["ReduceScatter"] * 4
        self.assertEqual(theirs["collectives"][:4], forward)
        self.assertEqual(sorted(theirs["collectives"][4:]), backward)
        self.assertEqual(sorted(ours["collectives"]), sorted([*forward, *backward, "AllReduce"]))
        vocabulary, block = 128256 * 4096, 2 * 4096 + 4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336
        gathered = 2 * (2 * 2 * block + 2 * vocabulary + vocabulary + 4096)
        self.assertEqual((ours["gathered"], theirs["gathered"]), (gathered, gathered))
        self.assertEqual(ours["work"], theirs["work"])
        self.assertEqual((ours["copies between buffers"], theirs["copies between buffers"]), (False, True))
        for package, each in found.items():
            with self.subTest(package=package):
                self.assertTrue(each["ordered"])
                self.assertEqual(each["of the timeline"], 1.0)  # With a host that is never late, something always runs.


if __name__ == "__main__":
    unittest.main()
