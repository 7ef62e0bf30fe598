"""The replay of a recorded step: schedules that were computed by hand."""

from __future__ import annotations

import unittest

from benchmarks.predict.replay import (
    EVERYTHING,
    H100,
    HOST_WAITED,
    LAUNCHED,
    RECORDED,
    WAITED,
    Entry,
    Gpu,
    Link,
    Network,
    length,
    replay,
    with_host,
)

UNIT = Gpu(
    matmul=1,
    memory=1,
    kernel=0,
    host_copy=1,
    launch=0,
    host=0,
    network=Network(within=Link(0, 1), across=Link(0, 1), per_node=8),
)
"""A byte or an operation takes a second."""


def kernel(stream: int, number: int, seconds: float, host: float = 0.0, name: str = "kernel") -> Entry:
    return Entry(LAUNCHED, stream, name, number, read=seconds, host=host)


def gather(stream: int, number: int, seconds: float) -> Entry:
    return Entry(LAUNCHED, stream, "ncclAllGather", number, ranks=2, written=2 * seconds, read=seconds)


def times(entries: list[Entry], gpu: Gpu = UNIT) -> list[tuple[int, float, float]]:
    return [(each.entry.stream, each.begin, each.end) for each in replay(entries, gpu).intervals]


class ReplayTest(unittest.TestCase):
    def test_a_stream_runs_in_order_and_kernels_of_streams_take_turns(self):
        entries = [kernel(0, 1, 3), kernel(1, 1, 2), kernel(0, 2, 4)]
        # At 3 both streams can go on: the one that was issued first does.
        self.assertEqual(times(entries), [(0, 0, 3), (1, 3, 5), (0, 5, 9)])

    def test_a_collective_runs_beside_kernels_and_an_event_orders_them(self):
        entries = [
            kernel(0, 1, 2),
            Entry(RECORDED, 0, "record", 2),
            Entry(WAITED, 1, "wait", 2, on=0),
            gather(1, 2, 4),
            Entry(RECORDED, 1, "record", 3),
            kernel(0, 3, 3),
            Entry(WAITED, 0, "wait", 3, on=1),
            kernel(0, 5, 1),
        ]
        found = replay(entries, UNIT)
        self.assertEqual(times(entries), [(0, 0, 2), (1, 2, 6), (0, 2, 5), (0, 6, 7)])
        self.assertEqual((found.seconds, found.kernels, found.communication, found.exposed), (7, 6, 4, 1))

    def test_a_missing_wait_lets_a_kernel_overtake(self):
        entries = [gather(1, 1, 4), Entry(RECORDED, 1, "record", 2), kernel(0, 1, 1)]
        self.assertEqual(times(entries), [(1, 0, 4), (0, 0, 1)])

    def test_collectives_of_two_streams_share_the_links(self):
        self.assertEqual(times([gather(1, 1, 4), gather(2, 1, 3)]), [(1, 0, 4), (2, 4, 7)])

    def test_what_can_begin_first_has_the_device_first(self):
        entries = [
            gather(1, 1, 5),
            Entry(RECORDED, 1, "record", 2),
            Entry(WAITED, 0, "wait", 2, on=1),
            kernel(0, 2, 1),
            kernel(2, 1, 2),
            kernel(2, 2, 4),
        ]
        # The kernel of stream 0 was issued before, but is ready at 5, in the middle of stream 2's second one.
        self.assertEqual(times(entries), [(1, 0, 5), (2, 0, 2), (2, 2, 6), (0, 6, 7)])

    def test_nothing_runs_before_the_host_has_issued_it(self):
        gpu = Gpu(**{**vars(UNIT), "host": 2.0, "launch": 1.0})
        entries = [kernel(0, 1, 1, host=10), kernel(0, 2, 1, host=11), kernel(0, 3, 8, host=11.5), kernel(0, 4, 1, host=12)]
        # Issued at 1, at 1 + 2 + 1, at 4 + 1 + 1, at 6 + 1 + 1.
        self.assertEqual(times(entries, gpu), [(0, 1, 2), (0, 4, 5), (0, 6, 14), (0, 14, 15)])
        self.assertEqual(times(entries, with_host(gpu, 0)), [(0, 0, 1), (0, 1, 2), (0, 2, 10), (0, 10, 11)])

    def test_a_host_that_waits_issues_nothing(self):
        for waited in (Entry(HOST_WAITED, 0, "host wait", 2), Entry(HOST_WAITED, EVERYTHING, "host wait")):
            with self.subTest(stream=waited.stream):
                entries = [kernel(0, 1, 2), kernel(0, 2, 3), waited, kernel(1, 1, 1)]
                self.assertEqual(times(entries), [(0, 0, 2), (0, 2, 5), (1, 5, 6)])
        first = [kernel(0, 1, 2), kernel(0, 2, 3), Entry(HOST_WAITED, 0, "host wait", 1), gather(1, 1, 1)]
        self.assertEqual(times(first), [(0, 0, 2), (0, 2, 5), (1, 2, 3)])

    def test_events_from_before_the_record_are_reached_and_others_are_an_error(self):
        self.assertEqual(times([Entry(WAITED, 0, "wait", 7, on=1), kernel(0, 2, 1)]), [(0, 0, 1)])
        self.assertEqual(times([gather(1, 8, 2), Entry(WAITED, 0, "wait", 7, on=1), kernel(0, 2, 1)]), [(1, 0, 2), (0, 0, 1)])
        with self.assertRaisesRegex(ValueError, "waits for an event that is not in it"):
            replay([gather(1, 8, 2), Entry(WAITED, 0, "wait", 9, on=1), kernel(0, 2, 1)], UNIT)

    def test_costs(self):
        gpu = Gpu(
            matmul=10,
            memory=4,
            kernel=0.5,
            host_copy=2,
            launch=0,
            host=0,
            network=Network(within=Link(0.1, 8), across=Link(1, 1), per_node=2),
        )
        for entry, seconds in (
            (Entry(LAUNCHED, 0, "aten::mm", read=8, written=4, work=100), 10),  # Bound by its operations.
            (Entry(LAUNCHED, 0, "aten::mm", read=80, written=4, work=100), 21),  # By its memory.
            (Entry(LAUNCHED, 0, "aten::add", read=0.1), 0.5),  # A kernel's least.
            (Entry(LAUNCHED, 0, "aten::embedding", read=1000, written=8), 4),  # It reads what it writes.
            (Entry(LAUNCHED, 0, "memcpy", read=8, written=8), 4),  # On the device.
            (Entry(LAUNCHED, 0, "memcpy", written=8), 4),  # From the host.
            (Entry(LAUNCHED, 0, "ncclAllGather", ranks=2, read=8, written=16), 0.1 + 16 / 2 / 8),
            (Entry(LAUNCHED, 0, "ncclReduceScatter", ranks=2, read=16, written=8), 0.1 + 16 / 2 / 8),
            (Entry(LAUNCHED, 0, "ncclAllReduce", ranks=2, read=16, written=16), 2 * (0.1 + 16 / 2 / 8)),
            # Two nodes: one hop between them, two inside; both ranks' cards together.
            (Entry(LAUNCHED, 0, "ncclAllGather", ranks=4, read=8, written=32), 1 + 2 * 0.1 + 32 * 3 / 4 / 2),
        ):
            with self.subTest(entry=entry):
                self.assertAlmostEqual(gpu.seconds(entry), seconds)

    def test_overlapping_intervals_count_once(self):
        self.assertEqual(length([(0, 3), (2, 5), (7, 8), (7, 7.5)]), 6)

    def test_the_default_device_is_a_part_of_the_peaks_of_an_h100(self):
        big = Entry(LAUNCHED, 0, "aten::mm", read=3 * 2 * 8192**2, written=0, work=2 * 8192**3)
        self.assertAlmostEqual(H100.seconds(big) * 989e12 / big.work, 1 / 0.65)


if __name__ == "__main__":
    unittest.main()
