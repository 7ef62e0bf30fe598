"""The simulator of rehearsal/: streams, the allocator, NCCL, the sanitizer. It needs ``make rehearsal`` and torch for CUDA."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import unittest
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).with_name("programs.py")
is_ready = torch.version.cuda is not None and (ROOT / "rehearsal/build/operators.so").exists()


def run(name: str, *arguments: str, ranks: int = 0, order: str = "late", seed: int = 0, check: str = "off") -> list:
    """What each rank of a program returned, and the text of its stderr."""
    sys.path.insert(0, str(ROOT))
    try:
        from rehearsal.__main__ import environment
    finally:
        sys.path.pop(0)
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment(order, seed, check)}
    if ranks:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        variables.update(WORLD_SIZE=str(ranks), STORE=str(store.port))
    command = [sys.executable, str(PROGRAMS), name, *arguments]
    processes = [
        subprocess.Popen(
            command, env={**variables, "RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(max(ranks, 1))
    ]
    answers = []
    for process in processes:
        try:
            out, error = process.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            process.kill()
            out, error = process.communicate()
        assert "ANSWER" in out, f"{name} exited with {process.returncode}:\n{out}\n{error}"
        answer, reports = json.loads(out.rpartition("ANSWER")[2])
        answers.append((answer, reports, error))
    return answers


def answer(name: str, **options) -> object:
    return run(name, **options)[0][0]


@unittest.skipUnless(is_ready, "make rehearsal was not run with this torch")
class DeviceTest(unittest.TestCase):
    def test_a_missing_wait_gives_wrong_numbers(self):
        found = answer("race")
        self.assertEqual(found["True"], 12000.0)
        self.assertNotEqual(found["False"], 12000.0)

    def test_a_read_that_comes_too_late_sees_what_overwrote_it(self):
        self.assertNotEqual(answer("overwritten"), 200.0)
        self.assertEqual(answer("overwritten", order="early"), 200.0)

    def test_events_order_streams_and_are_reached_when_somebody_waits(self):
        self.assertEqual(answer("events"), [False, True, 60.0, True])
        self.assertEqual(answer("events", order="early"), [True, True, 60.0, True])

    def test_the_allocator_is_torchs(self):
        is_reused, is_kept, held, _, allocations = answer("allocator")
        self.assertEqual((is_reused, is_kept), (True, True))
        self.assertEqual(held, 8)  # MiB: a tensor in use, and one that a stream may still read.
        self.assertGreaterEqual(allocations, 2)

    def test_a_copy_to_pinned_memory_does_not_wait(self):
        self.assertEqual(answer("pinned"), [[0.0] * 4, [3.0] * 4])

    def test_operators_have_the_values_and_errors_of_the_cpu(self):
        self.assertEqual(len(answer("values")), 2)

    def test_random_numbers_follow_the_generator(self):
        self.assertEqual(answer("randoms"), [True, True, True])

    def test_a_seed_chooses_the_order_of_streams(self):
        first, again, other = (answer("order_of_streams", order="random", seed=seed) for seed in (1, 1, 2))
        self.assertEqual(first, again)
        self.assertNotEqual(first, other)
        self.assertEqual(len(set(first)), 5)  # A fresh order in each turn.


@unittest.skipUnless(is_ready, "make rehearsal was not run with this torch")
class NcclTest(unittest.TestCase):
    def test_collectives_have_their_numbers_in_every_order(self):
        for order in ("late", "early", "random"):
            with self.subTest(order=order):
                found = run("collectives", ranks=2, order=order)
                a, b = [0.0, 1.0, 2.0, 3.0], [10.0, 11.0, 12.0, 13.0]
                total = [10.0, 12.0, 14.0, 16.0]
                self.assertEqual(found[0][0], [a + b, [5.0, 6.0], total, b, [0.0, 10.0, 11.0, 12.0], a, b, a])
                self.assertEqual(found[1][0], [a + b, [7.0, 8.0], total, b, [1.0, 2.0, 3.0, 13.0], a, a, b])

    def test_ranks_that_disagree_get_both_call_sites(self):
        for what, kinds in (
            ("count", ("of 8 float32", "of 4 float32")),
            ("kind", ("ncclAllReduce", "ncclBroadcast")),
            ("dtype", ("of 8 float32", "of 8 bfloat16")),
            ("message", ("ncclSend of 8 float32", "ncclRecv of 4 float32")),
        ):
            with self.subTest(what=what):
                for text, _, _ in run("mismatch", what, ranks=2):
                    for part in ("rank 0: nccl", "rank 1: nccl", "programs.py:", *kinds):
                        self.assertIn(part, text)

    def test_a_rank_that_leaves_without_a_collective_is_named(self):
        text = run("mismatch", "left", ranks=2)[0][0]
        for part in ("was not issued by rank 1, which has left", "rank 0: ncclAllReduce of 8 float32", "programs.py:"):
            self.assertIn(part, text)

    def test_peer_memory_has_the_numbers_of_nccl_in_every_order(self):
        for order in ("late", "early", "random"):
            for found, reports, error in run("symmetric", ranks=2, order=order, check="report"):
                self.assertEqual(reports, 0, error)
                self.assertEqual(found["copy_engine"], found["nccl"])
                self.assertEqual(found["multimem"], found["nccl"])

    def test_a_result_that_is_not_waited_for_is_wrong(self):
        self.assertNotIn(2000.0, [found for found, _, _ in run("not_waited_for", ranks=2)])

    def test_a_collective_runs_while_another_host_waits_elsewhere(self):
        for found, _, _ in run("host_in_a_store", ranks=2):
            self.assertEqual(found, [2.0] * 4)


@unittest.skipUnless(is_ready, "make rehearsal was not run with this torch")
class SanitizerTest(unittest.TestCase):
    def test_unordered_accesses_are_reported_with_both_places(self):
        for order in ("late", "early"):
            _, reports, error = run("race", order=order, check="report")[0]
            self.assertEqual(reports, 1, error)
            for part in ("write by aten::copy_", "read by aten::mul", "programs.py:"):
                self.assertIn(part, error.replace("memcpy", "aten::copy_"))
        self.assertEqual(run("overwritten", check="report")[0][1], 1)

    def test_memory_that_is_given_out_again_is_reported(self):
        found, reports, error = run("freed_too_early", check="report")[0]
        self.assertGreaterEqual(reports, 1)
        self.assertIn("The allocator gave this memory out again", error)
        self.assertIn("programs.py:", error)
        self.assertEqual(found[1], 7.0)

    def test_ordered_programs_have_no_report(self):
        for name, ranks in (("events", 0), ("values", 0), ("allocator", 0), ("collectives", 2), ("host_in_a_store", 2)):
            for _, reports, error in run(name, ranks=ranks, check="report"):
                self.assertEqual(reports, 0, f"{name}: {error}")

    def test_a_collective_without_a_wait_is_reported(self):
        for _, reports, error in run("not_waited_for", ranks=2, check="report"):
            self.assertGreaterEqual(reports, 1)
            self.assertIn("ncclAllReduce", error)


@unittest.skipUnless(is_ready, "make rehearsal was not run with this torch")
class StreamsTest(unittest.TestCase):
    """Streams of the user's own, in forward and backward of sharded modules."""

    def test_gradients_may_be_written_on_a_side_stream(self):
        orders = [run("side_streams", "inside", ranks=2, order=order, check="report") for order in ("early", "late", "random")]
        for first, *others in zip(*orders):
            self.assertEqual(first[1], 0, first[2])
            self.assertEqual([found for found, _, _ in others], [first[0]] * 2)

    def test_weights_that_a_side_stream_reads_later_are_recorded_by_the_user(self):
        expected = [found for found, _, _ in run("side_streams", "inside", ranks=2)]
        for (found, reports, error), wanted in zip(run("side_streams", "recorded", ranks=2, check="report"), expected):
            self.assertEqual((found, reports), (wanted, 0), error)
        for _, reports, error in run("side_streams", "later", ranks=2, check="report"):
            self.assertGreaterEqual(reports, 1)
            self.assertIn("The allocator gave this memory out again", error)

    def test_gradients_of_small_parameters_are_copied_by_one_launch(self):
        for found, _, _ in run("copies", ranks=2):
            self.assertEqual(found, [0, 0, 0])


if __name__ == "__main__":
    unittest.main()
