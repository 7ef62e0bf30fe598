"""A recorded step, replayed with modelled times: what each stream does when, and how much communication is exposed.

The record (``torch.ops.rehearsal.trace``) has what the host issued, in order: kernels, copies and collectives on their streams,
events, and waits for them. It has no times but the host's. Here an operation takes what a cost model says. This file must not
know how a package works: what the package issues is all that counts.

- A stream runs its operations in order, none before the host has issued it, and waits for the events that it must wait for.
- Kernels of all streams take turns on the device, because a large kernel fills it. So do collectives on the links, and copies
  to and from the host. These three run side by side, and take nothing from each other.
- The host issues one after the other. If it waits for a stream, it issues nothing until the stream has come so far.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from benchmarks.predict.network import Link, Network

__all__ = ["H100", "Entry", "Gpu", "Interval", "Link", "Network", "Replay", "replay"]

LAUNCHED, RECORDED, WAITED, HOST_WAITED = range(4)
EVERYTHING = -1  # The stream of a host's wait for the whole device.

MOVES = frozenset("memcpy aten::copy_ aten::_foreach_copy_ aten::cat aten::_chunk_cat aten::split_with_sizes_copy".split())
"""Kernels that compute nothing, casts among them."""

LOOKUPS = frozenset(("aten::embedding", "aten::index", "aten::index_select", "aten::gather"))
"""Kernels that read as much as they write, of an input that may be larger."""


@dataclass(frozen=True)
class Entry:
    """What the host issued.

    Attributes:
        kind: ``LAUNCHED``, ``RECORDED``, ``WAITED`` (``stream`` waits for operation ``number`` of stream ``on``) or
            ``HOST_WAITED`` (the host waits for operation ``number`` of ``stream``).
        number: of the operation in its stream; operations and records are counted together.
        ranks: of a collective; else 0.
        host: the host's time, in seconds.
        read, written: bytes.
        work: floating-point operations of a matmul.
    """

    kind: int
    stream: int
    name: str
    number: int = 0
    ranks: int = 0
    on: int = 0
    host: float = 0.0
    read: float = 0.0
    written: float = 0.0
    work: float = 0.0


@dataclass(frozen=True)
class Gpu:
    """How long operations take.

    Attributes:
        matmul: floating-point operations per second of matmuls and attention.
        memory: bytes per second that kernels read and write, together.
        kernel: seconds that each kernel takes at least.
        host_copy: bytes per second between host and device.
        launch: seconds of the host per launch, beside the recorded ones.
        host: factor of the recorded times of the host; 0: the host is never late.
        network: between ranks.
    """

    matmul: float
    memory: float
    kernel: float
    host_copy: float
    launch: float
    host: float
    network: Network

    def seconds(self, entry: Entry) -> float:
        """Of an operation: the slower of its matmul and its memory; of a collective, a ring."""
        if entry.ranks:
            nbytes = max(entry.read, entry.written)
            if entry.name == "ncclAllReduce":
                return self.network.all_reduce(nbytes, entry.ranks)
            return self.network.all_gather(nbytes, entry.ranks)
        read = min(entry.read, entry.written) if entry.name in LOOKUPS else entry.read
        if resource_of(entry) == "host copy":
            return max(self.kernel, (read + entry.written) / self.host_copy)
        return max(self.kernel, entry.work / self.matmul, (read + entry.written) / self.memory)


H100 = Gpu(
    matmul=0.65 * 989e12,
    memory=0.85 * 3.35e12,
    kernel=2e-6,
    host_copy=50e9,
    launch=4e-6,
    host=1.0,
    network=Network(within=Link(2e-6, 360e9), across=Link(8e-6, 45e9)),
)
"""An H100 with HBM3, in nodes of 8 with NVLink and a 400 Gb/s card each. Rates are parts of the peaks, as large kernels reach
them; latencies are guesses. None of it was measured here."""


@dataclass(frozen=True)
class Interval:
    """An operation that ran."""

    entry: Entry
    begin: float
    end: float


def resource_of(entry: Entry) -> str:
    """What an operation occupies: it has it alone."""
    if entry.ranks:
        return "link"
    is_host_copy = entry.name == "memcpy" and (entry.read == 0 or entry.written == 0)
    return "host copy" if is_host_copy else "kernel"


@dataclass
class Replay:
    """A step that was replayed.

    Attributes:
        seconds: until the last operation ends, and the host has issued everything.
        intervals: of all operations, in the order in which they began.
    """

    seconds: float = 0.0
    intervals: list[Interval] = field(default_factory=list)

    def busy(self, wanted: Callable[[Entry], bool]) -> float:
        """Seconds in which at least one of the ``wanted`` operations runs."""
        return length(self._of(wanted))

    @property
    def kernels(self) -> float:
        return self.busy(lambda entry: resource_of(entry) == "kernel")

    @property
    def communication(self) -> float:
        return self.busy(lambda entry: entry.ranks > 0)

    @property
    def exposed(self) -> float:
        """Seconds in which a collective runs, and no kernel."""
        return self.busy(lambda entry: resource_of(entry) in ("kernel", "link")) - self.kernels

    def time_of(self, wanted: Callable[[Entry], bool]) -> float:
        """The sum of the times of the ``wanted`` operations."""
        return sum(each.end - each.begin for each in self.intervals if wanted(each.entry))

    def _of(self, wanted: Callable[[Entry], bool]) -> list[tuple[float, float]]:
        return [(each.begin, each.end) for each in self.intervals if wanted(each.entry)]


def length(intervals: Iterable[tuple[float, float]]) -> float:
    """Of the union of intervals."""
    total, last = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, last))
        last = max(last, end)
    return total


def replay(entries: Sequence[Entry], gpu: Gpu = H100) -> Replay:
    """Run what was recorded.

    Raises:
        ValueError: something waits for an event that was never recorded.
    """
    return _Device(entries, gpu).run()


class _Device:
    """Streams, the host, and what is free when. The operation that can begin first runs next; ties go to the first issued."""

    def __init__(self, entries: Sequence[Entry], gpu: Gpu) -> None:
        self._gpu, self._found = gpu, Replay()
        self._entries, self._next = entries, 0
        self._start = entries[0].host if entries else 0.0
        self._host = self._spent = 0.0  # The host's clock, and how much of the recorded time it has used.
        self._queues: dict[int, deque[tuple[float, int, Entry]]] = {}
        self._free: Counter[str] = Counter()  # When a resource is free.
        self._ends: Counter[int] = Counter()  # When a stream's last operation ends.
        self._reached: dict[tuple[int, int], float] = {}  # When an operation of a stream ends, by its number.
        self._first: dict[int, int] = {}  # Of each stream in the record. What came before has ended.
        for entry in entries:
            if entry.kind in (LAUNCHED, RECORDED):
                self._first.setdefault(entry.stream, entry.number)

    def run(self) -> Replay:
        while True:
            stream = self._earliest()
            begin = None if stream is None else self._begin(self._queues[stream][0])
            issue = self._issue_time()
            if issue is not None and (begin is None or issue <= begin):
                self._issue(issue)
            elif stream is not None:
                self._step(stream)
            elif self._next < len(self._entries) or any(self._queues.values()):
                raise ValueError("the record waits for an event that is not in it")
            else:
                break
        self._found.seconds = max([self._host, *self._ends.values()])
        return self._found

    def _earliest(self) -> int | None:
        """The stream whose first operation can begin before those of the others."""
        ready = [
            (begin, queue[0][1], stream)
            for stream, queue in self._queues.items()
            if queue and (begin := self._begin(queue[0])) is not None
        ]
        return min(ready)[2] if ready else None

    def _begin(self, item: tuple[float, int, Entry]) -> float | None:
        """When an operation at the head of its stream can begin; None if that is not known yet."""
        issued, _, entry = item
        begin = max(issued, self._ends[entry.stream])
        if entry.kind == WAITED:
            reached = self._time_of(entry.on, entry.number)
            return None if reached is None else max(begin, reached)
        if entry.kind == LAUNCHED:
            return max(begin, self._free[resource_of(entry)])
        return begin

    def _time_of(self, stream: int, number: int) -> float | None:
        """When operation ``number`` of a stream ends; None if it has not begun."""
        if number < self._first.get(stream, number + 1):
            return 0.0
        return self._reached.get((stream, number))

    def _step(self, stream: int) -> None:
        item = self._queues[stream].popleft()
        entry, begin = item[2], self._begin(item)
        assert begin is not None
        end = begin
        if entry.kind == LAUNCHED:
            end = begin + self._gpu.seconds(entry)
            self._free[resource_of(entry)] = end
            self._found.intervals.append(Interval(entry, begin, end))
        self._ends[stream] = end
        if entry.kind != WAITED:
            self._reached[stream, entry.number] = end

    def _issue_time(self) -> float | None:
        """The time of the host's next entry; None if an operation that it waits for has not begun, or if no entry is left."""
        if self._next == len(self._entries):
            return None
        entry = self._entries[self._next]
        host = self._host + self._gpu.host * max(0.0, entry.host - self._start - self._spent)
        if entry.kind != HOST_WAITED:
            return host
        if entry.stream == EVERYTHING:
            return None if any(self._queues.values()) else max([host, *self._ends.values()])
        waiting = [each for _, _, each in self._queues.get(entry.stream, ()) if each.number <= entry.number]
        ends = [end for (stream, number), end in self._reached.items() if stream == entry.stream and number <= entry.number]
        return None if waiting else max([host, *ends])

    def _issue(self, host: float) -> None:
        entry = self._entries[self._next]
        self._host, self._spent = host, max(self._spent, entry.host - self._start)
        if entry.kind == LAUNCHED:
            self._host += self._gpu.launch
        if entry.kind != HOST_WAITED:
            self._queues.setdefault(entry.stream, deque()).append((self._host, self._next, entry))
        self._next += 1


def with_host(gpu: Gpu, factor: float) -> Gpu:
    """The same device, with a host that needs ``factor`` of its recorded time. 0: launches cost nothing either."""
    return dataclasses.replace(gpu, host=factor, launch=gpu.launch if factor else 0.0)
