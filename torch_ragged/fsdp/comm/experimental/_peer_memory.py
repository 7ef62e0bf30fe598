"""PeerMemory: memory that all ranks of a process group read and write directly, with signals between the ranks.

Each rank has slots of equal size, for exchanges. All ranks make the exchanges in the same order.
"""

from __future__ import annotations

import atexit
import contextlib
import mmap
import os
import queue
import secrets
import socket
import sys
import threading
import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist

from torch_ragged._ranks.agreement import problems_of_ranks
from torch_ragged._ranks.groups import timeout_of
from torch_ragged.fsdp.comm._collectives import Work
from torch_ragged.fsdp.comm._gloo import LONGEST_STEP

__all__ = ["HostPeerMemory", "PeerMemory", "Half", "StreamWork", "SymmetricPeerMemory", "host_of"]

TURNS = 2
"""Slots per rank, which exchanges use in turn. Two are enough: a rank that begins exchange n has the signals of exchange n - 1
from all ranks, which they send after they have read exchange n - 2, so that its slot may be overwritten."""

Half = Callable[[list[torch.Tensor]], None]
"""One half of an exchange. Its argument is the slots of all ranks in the order of ranks, as flat tensors of bytes."""


def host_of() -> str:
    """An id of this host, which must be Linux. Ranks with equal ids share its kernel, network namespace and user, and can share
    CPU memory."""
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        raise OSError(f"shared memory between processes needs Linux, this is {sys.platform}")
    # A host name is no id: containers on different hosts may have the same one. Abstract sockets belong to a network namespace.
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/net')} {os.getuid()}"


class HostPeerMemory:
    """Memory that the ranks of one host share, and a Unix socket between each pair of ranks for signals.

    Neither has a name in a file system, so nothing is left after a process ends in any way. The memory is a ``memfd``: ranks
    send its descriptor over the sockets, and the kernel frees it with the last process that maps it. A thread makes the
    exchanges in the order in which they were issued, so that ranks compute meanwhile, and wait for exchanges in any order.

    All ranks must construct this together: it makes two all-gathers of objects. Every rank raises an OSError if one cannot
    share.
    """

    def __init__(self, group: dist.ProcessGroup, slot_nbytes: int) -> None:
        self._peers: dict[int, socket.socket] = {}
        self.rank, self.size, self.slot_nbytes = group.rank(), group.size(), slot_nbytes
        timeout = timeout_of(group, torch.device("cpu")).total_seconds()
        slots: list[list[torch.Tensor]] = []
        problem = ""
        try:
            _connect(self._peers, group, timeout)
            self._peers = dict(sorted(self._peers.items()))
            slots = self._shared()
        except Exception as error:  # Not raised: the other ranks wait for this rank in the all-gather below.
            problem = str(error) or type(error).__name__
            self.close()  # Before the all-gather: ranks that wait for this rank's memory get an error and reach it too.
        if problem := problems_of_ranks(problem, group):
            self.close()
            raise OSError(problem)
        self._tasks: queue.SimpleQueue[_HostExchange | None] = queue.SimpleQueue()
        signals = _Signals(f"copy engine of group {group.group_name}", self.rank, self._peers, timeout)
        # The thread has no reference to this object. So __del__ runs when the last collectives are gone, and ends the thread.
        thread = threading.Thread(target=_serve, args=(self._tasks, slots, signals), name="copy engine", daemon=True)
        _serving[thread] = (self._tasks, signals)
        thread.start()

    def _shared(self) -> list[list[torch.Tensor]]:
        """Share memory with all ranks. Returns, for each turn, the slots of all ranks."""
        nbytes = TURNS * self.slot_nbytes
        mine = os.memfd_create("torch_ragged")
        try:
            # Reserves the memory, and raises if there is none. Without this, a later write would kill the process by a signal.
            os.posix_fallocate(mine, 0, nbytes)
            # Every rank sends to all peers before it receives, so that no two ranks wait for each other.
            for peer in self._peers.values():
                socket.send_fds(peer, [b"m"], [mine])
            mapped = {self.rank: _mapped(mine, nbytes)}
        finally:
            os.close(mine)  # The mapping and the descriptors in the sockets keep the memory.
        for rank, peer in self._peers.items():
            _, descriptors, _, _ = socket.recv_fds(peer, 1, 1)
            if not descriptors:  # The peer has closed its socket: see __init__.
                raise OSError(f"rank {rank} has not shared its memory")
            try:
                mapped[rank] = _mapped(descriptors[0], nbytes)
            finally:
                os.close(descriptors[0])
        return [[mapped[rank].chunk(TURNS)[turn] for rank in range(self.size)] for turn in range(TURNS)]

    def exchange(self, write: Half, read: Half, nbytes: int) -> Work:
        """Issue an exchange: every rank calls ``write``; when all ranks have written, every rank calls ``read``.

        This returns at once. Until ``wait()``, the caller must keep the tensors that ``write`` reads and ``read`` writes alive,
        and must not use them. Both may use ``nbytes`` bytes of the slots of any rank; the same number on all ranks.

        ``wait()`` raises RuntimeError if a peer has closed its socket, as when it dies, has sent no signal within the group's
        timeout, or exchanges another number of bytes. All later exchanges then raise the same error.
        """
        exchange = _HostExchange(write, read, nbytes)
        self._tasks.put(exchange)
        return exchange

    def close(self) -> None:
        """Close the sockets after the exchanges that were issued. Later exchanges of the peers raise."""
        if hasattr(self, "_tasks"):
            self._tasks.put(None)  # The thread closes the sockets when it gets here: until then it needs them.
        else:
            for peer in self._peers.values():
                peer.close()

    __del__ = close


class _HostExchange:
    def __init__(self, write: Half, read: Half, nbytes: int) -> None:
        self.write, self.read, self.nbytes = write, read, nbytes
        self.done = threading.Event()
        self.error: Exception | None = None

    def wait(self) -> None:
        self.done.wait()
        # A new exception for each call: several exchanges share the error, and raising one object adds to its traceback.
        if self.error is not None:
            raise RuntimeError(str(self.error)) from self.error


def _serve(tasks: queue.SimpleQueue[_HostExchange | None], slots: list[list[torch.Tensor]], signals: _Signals) -> None:
    """Make the exchanges of ``tasks`` until None comes. If one fails, all later ones fail with its error."""
    error: Exception | None = None
    with torch.inference_mode():  # Outside of it, torch refuses writes to tensors that were made in inference mode.
        number = 0
        while (exchange := tasks.get()) is not None:
            try:
                # After an error, slots are in an unknown state and signals no longer match, so nothing is exchanged any more.
                if error is None:
                    exchange.write(slots[number % TURNS])
                    # The signal says that this rank has written, so it follows write(). read() needs the writes of all ranks.
                    signals.send(exchange.nbytes)
                    signals.receive(exchange.nbytes)
                    exchange.read(slots[number % TURNS])
            except Exception as found:
                error = found
                signals.close()  # Peers that wait for a signal raise now, and not after the timeout.
            exchange.error = error  # Before the event, after which wait() reads it.
            exchange.done.set()
            del exchange  # While the thread sleeps, this variable must not keep the tensors of the exchange alive.
            number += 1
    signals.close()


_serving: weakref.WeakKeyDictionary[threading.Thread, tuple[queue.SimpleQueue[_HostExchange | None], _Signals]]
_serving = weakref.WeakKeyDictionary()
"""The threads that make exchanges, each with its tasks and its signals. Weak keys: a thread that has ended is dropped."""

# A forked child has the sockets but none of the threads. At its exit, it must not shut down the connections of its parent.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_serving.clear)


@atexit.register
def _stop_serving() -> None:
    """Stop the threads. A thread that runs torch's code while the interpreter exits would abort the process."""
    serving = dict(_serving)
    # All are stopped before the first is joined, so that they end at the same time. Interrupt first: a thread that waits for a
    # peer does not look at its tasks.
    for tasks, signals in serving.values():
        signals.interrupt()
        tasks.put(None)
    for thread in serving:
        thread.join(LONGEST_STEP)  # It ends after its last tensors are freed, which is torch's code too.


class _Signals:
    """The signals of one rank to its peers, over one socket per peer: the rank has written its bytes of an exchange."""

    def __init__(self, name: str, rank: int, peers: dict[int, socket.socket], timeout: float) -> None:
        self._name, self._rank, self._peers, self._timeout = name, rank, peers, timeout

    def send(self, nbytes: int) -> None:
        for rank, peer in self._peers.items():
            try:
                peer.sendall(nbytes.to_bytes(8, "little"))
            except OSError as error:
                raise self._lost(rank, error) from error

    def receive(self, nbytes: int) -> None:
        # A peer may have sent the signal of the next exchange already. Sockets keep the order of signals: it is read next time.
        for rank, peer in self._peers.items():
            try:
                found = int.from_bytes(_packet(peer, 8), "little")
            except OSError as error:
                raise self._lost(rank, error) from error
            if found != nbytes:  # Usually, if ranks issue different collectives.
                raise RuntimeError(
                    f"{self._name}: rank {self._rank} exchanges {nbytes} bytes, rank {rank} exchanges {found} bytes: issue the "
                    "same collectives in the same order on all ranks"
                )

    def _lost(self, rank: int, error: OSError) -> RuntimeError:
        if isinstance(error, TimeoutError):
            problem = f"sent no signal within {self._timeout:g} s: if it is only slow, raise the process group's timeout"
        else:
            problem = f"has closed its connection ({error}): it has ended or failed, see its own log"
        return RuntimeError(f"{self._name}: rank {rank} of {len(self._peers) + 1} {problem}")

    def interrupt(self) -> None:
        """Make threads that wait for signals raise now, on this rank and on its peers."""
        # shutdown() and not close(): closing a socket does not wake a thread that reads from it.
        for peer in self._peers.values():
            with contextlib.suppress(OSError):  # The thread may have closed it.
                peer.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()


def _mapped(descriptor: int, nbytes: int) -> torch.Tensor:
    """The memory of ``descriptor`` as a tensor. The tensor keeps the memory, so the descriptor may be closed."""
    return torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8)


def _connect(peers: dict[int, socket.socket], group: dist.ProcessGroup, timeout: float) -> None:
    """Connect to all other ranks of ``group``, which call this too. ``peers`` gets the sockets by rank, also if this raises."""
    rank = group.rank()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        name, token = secrets.token_hex(16), secrets.token_bytes(16)
        problem = ""
        try:
            listener.bind(f"\0torch_ragged-{name}")  # An abstract address: it is in no file system.
            listener.listen(group.size())
            listener.settimeout(timeout)
        except OSError as error:  # Not raised: the other ranks wait for this rank in the all-gather below.
            problem = str(error)
        # After this all-gather, all ranks listen, so that connect() below does not fail.
        addresses: list[tuple[str, bytes, str]] = [("", b"", "")] * group.size()
        dist.all_gather_object(addresses, (name, token, problem), group=group)
        for other, (_, _, found) in enumerate(addresses):
            if found:
                raise OSError(f"rank {other} cannot listen: {found}")
        # Each pair of ranks has one connection, from the higher rank to the lower rank. All ranks connect before they accept.
        # This cannot deadlock, because the backlog of each listener has room for all ranks.
        for other in range(rank):
            peers[other] = peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            peer.settimeout(timeout)
            peer.connect(f"\0torch_ragged-{addresses[other][0]}")
            peer.sendall(addresses[other][1] + rank.to_bytes(4, "little"))
        while len(peers) < group.size() - 1:
            peer, _ = listener.accept()
            peer.settimeout(timeout)
            greeting = _packet(peer, len(token) + 4)
            # Any process in this network namespace can connect; only ranks of this group know the token.
            if greeting[: len(token)] != token:
                peer.close()
                continue
            peers[int.from_bytes(greeting[len(token) :], "little")] = peer


def _packet(peer: socket.socket, nbytes: int) -> bytes:
    """The next packet, of at most ``nbytes``. Sockets of this kind deliver what a peer has sent at once as a whole."""
    packet = peer.recv(nbytes)
    if not packet:
        raise ConnectionError("end of file")
    return packet


class SymmetricPeerMemory:
    """Symmetric memory (``torch.distributed._symmetric_memory``) of GPUs with peer access, and a stream for exchanges.

    An exchange is copies on this stream, with a barrier on the signal pads between them: one kernel of one warp. All ranks must
    construct this together; it waits for the device. ``priority``: of the stream, a lower number is more urgent.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, slot_nbytes: int, priority: int = -1) -> None:
        import torch.distributed._symmetric_memory as symm_mem

        self.rank, self.size, self.slot_nbytes = group.rank(), group.size(), slot_nbytes
        self._timeout_ms = int(1000 * timeout_of(group, device).total_seconds())
        nbytes = TURNS * slot_nbytes
        self._buffer = symm_mem.empty(nbytes, dtype=torch.uint8, device=device)
        self._handle = symm_mem.rendezvous(self._buffer, group)
        self._stream = torch.cuda.Stream(device, priority=priority)
        mapped = [self._handle.get_remote_tensor(rank, (nbytes,), torch.uint8) for rank in range(self.size)]
        self._slots = [[each.chunk(TURNS)[turn] for each in mapped] for turn in range(TURNS)]
        self._count = 0

    def exchange(self, write: Half, read: Half, nbytes: int) -> Work:
        """As :meth:`HostPeerMemory.exchange`. ``wait()`` blocks the current stream, not the host."""
        # Ranks issue exchanges in the same order, so they use the same slots.
        slots = self._slots[self._count % TURNS]
        self._count += 1
        # The current stream has computed the tensors that write() reads, and has used the ones that read() overwrites.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), torch.cuda.stream(self._stream):
            write(slots)
            # Each rank's barrier is behind its writes on its stream: after it, the writes of all ranks are complete.
            self._handle.barrier(0, self._timeout_ms)
            read(slots)
            return StreamWork(self._stream.record_event())


PeerMemory = HostPeerMemory | SymmetricPeerMemory


class StreamWork:
    """Work on another stream, up to an event. ``wait()`` orders the current stream behind it."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)
