"""PeerMemory: memory of all ranks of a process group that each of them reads and writes itself, with signals between them."""

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
from typing import Protocol

import torch
import torch.distributed as dist

from torch_ragged._register._torch import timeout_of
from torch_ragged.fsdp.comm._agreement import problems_of_ranks
from torch_ragged.fsdp.comm._collectives import Work

__all__ = ["HostPeerMemory", "PeerMemory", "Step", "StreamWork", "SymmetricPeerMemory", "host_of"]

TURNS = 2
"""Slots that exchanges use by turns: what the one before last left may be overwritten, since a rank that has begun the last is
through with it."""

_LONGEST_STEP = 10.0
"""Seconds that a process which ends waits for half an exchange, which are copies of memory."""

Step = Callable[[list[torch.Tensor]], None]
"""A half of an exchange, which is given the slots of all ranks, as flat tensors of bytes."""


class PeerMemory(Protocol):
    """Slots of equal size in the memory of each rank, for exchanges that all ranks make in the same order.

    Attributes:
        rank: this rank in the group.
        size: how many ranks there are.
        slot_nbytes: bytes of a slot.
    """

    rank: int
    size: int
    slot_nbytes: int

    def exchange(self, write: Step, read: Step, nbytes: int) -> Work:
        """Have every rank ``write`` to slots, then, when all have, ``read`` from them; returns at once.

        What ``write`` reads and ``read`` writes must stay alive and untouched until ``wait()``.

        Args:
            nbytes: of a slot that are used; the same on all ranks.
        """


# -- on one host ---------------------------------------------------------------------------------------------------------


def host_of() -> str:
    """What ranks must have in common to share memory of the CPU: the running kernel and its network namespace.

    Raises:
        OSError: this system has none of what is needed: it is no Linux.
    """
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        raise OSError(f"memory is shared between processes on Linux only, this is {sys.platform}")
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/net')} {os.getuid()}"


class HostPeerMemory:
    """Shared memory between the ranks of one host, and a Unix socket between each two of them for signals.

    Both have no names in any file system, so that nothing is left however a process ends: memory is a ``memfd`` whose
    descriptor goes over the socket, and the kernel frees it with the last process. A peer that dies closes its socket, and one
    that is silent for longer than the group's timeout is given up.

    A thread makes the exchanges, one after the other, and sleeps while it waits for signals: ranks may wait for what they have
    issued in different orders, and compute meanwhile.

    Making it is collective, two all-gathers of objects.

    Raises:
        OSError: the ranks cannot share memory; on every rank.
    """

    def __init__(self, group: dist.ProcessGroup, slot_nbytes: int) -> None:
        self.rank, self.size, self.slot_nbytes = group.rank(), group.size(), slot_nbytes
        timeout = timeout_of(group, torch.device("cpu")).total_seconds()
        self._peers: dict[int, socket.socket] = {}
        slots: list[list[torch.Tensor]] = []
        problem = ""
        try:
            self._peers = _connected(group, timeout)
            slots = self._shared()
        except Exception as error:  # What follows is collective: nobody leaves alone.
            problem = str(error) or type(error).__name__
            self.close()  # Ranks that wait for this one's memory get an error.
        if problem := problems_of_ranks(problem, group):
            self.close()
            raise OSError(problem)
        self._tasks: queue.SimpleQueue[_HostExchange | None] = queue.SimpleQueue()
        signals = _Signals(f"copy engine of group {group.group_name}", self.rank, self._peers, timeout)
        # The thread does not know this object, so that it ends when nobody else does.
        thread = threading.Thread(target=_serve, args=(self._tasks, slots, signals), name="copy engine", daemon=True)
        _serving[thread] = (self._tasks, signals)
        thread.start()

    def _shared(self) -> list[list[torch.Tensor]]:
        """The slots of every rank, by turn."""
        nbytes = TURNS * self.slot_nbytes
        mine = os.memfd_create("torch_ragged")
        try:
            os.posix_fallocate(mine, 0, nbytes)  # Otherwise a full /dev/shm kills the process at the first write.
            for peer in self._peers.values():
                socket.send_fds(peer, [b"m"], [mine])
            mapped = {self.rank: _mapped(mine, nbytes)}
        finally:
            os.close(mine)
        for rank, peer in self._peers.items():
            _, descriptors, _, _ = socket.recv_fds(peer, 1, 1)
            if not descriptors:
                raise OSError(f"rank {rank} has shared no memory")
            try:
                mapped[rank] = _mapped(descriptors[0], nbytes)
            finally:
                os.close(descriptors[0])
        return [[mapped[rank].chunk(TURNS)[turn] for rank in range(self.size)] for turn in range(TURNS)]

    def exchange(self, write: Step, read: Step, nbytes: int) -> Work:
        """As :meth:`PeerMemory.exchange`.

        ``wait()`` raises RuntimeError if a peer has gone, is silent, or exchanges other bytes; so do all exchanges behind.
        """
        exchange = _HostExchange(write, read, nbytes)
        self._tasks.put(exchange)
        return exchange

    def close(self) -> None:
        """Be gone, for peers too, behind the exchanges that were issued. Memory goes with the last process that has it."""
        if hasattr(self, "_tasks"):
            self._tasks.put(None)
        else:
            for peer in self._peers.values():
                peer.close()

    def __del__(self) -> None:
        if hasattr(self, "_tasks"):
            self.close()


class _HostExchange:
    """An exchange, made by the thread; what it raised, ``wait()`` raises."""

    def __init__(self, write: Step, read: Step, nbytes: int) -> None:
        self.write, self.read, self.nbytes = write, read, nbytes
        self.done = threading.Event()
        self.error: Exception | None = None

    def wait(self) -> None:
        self.done.wait()
        if self.error is not None:
            raise RuntimeError(str(self.error)) from self.error


def _serve(tasks: queue.SimpleQueue[_HostExchange | None], slots: list[list[torch.Tensor]], signals: _Signals) -> None:
    """Make exchanges until None comes; behind one that failed, all fail."""
    error: Exception | None = None
    with torch.inference_mode():  # Tensors that were made in it may be written too.
        number = 0
        while (exchange := tasks.get()) is not None:
            try:
                if error is None:
                    exchange.write(slots[number % TURNS])
                    signals.send(exchange.nbytes)
                    signals.receive(exchange.nbytes)
                    exchange.read(slots[number % TURNS])
            except Exception as found:
                error = found
                signals.close()  # So that peers hear of it.
            exchange.error = error
            exchange.done.set()
            del exchange  # Not to keep its tensors until the next one comes.
            number += 1
    signals.close()


_serving: weakref.WeakKeyDictionary[threading.Thread, tuple[queue.SimpleQueue[_HostExchange | None], _Signals]]
_serving = weakref.WeakKeyDictionary()
"""The threads that make exchanges until they have ended, what they take them from, and what they wait for."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_serving.clear)  # The child has the sockets, but none of the threads.


@atexit.register
def _stop_serving() -> None:
    """Stop the threads: torch's code in a thread of an interpreter that ends aborts the process."""
    serving = dict(_serving)
    for tasks, signals in serving.values():
        signals.interrupt()
        tasks.put(None)
    for thread in serving:
        thread.join(_LONGEST_STEP)  # Until it has freed its tensors too.


class _Signals:
    """What tells ranks of each other that they have written, over a socket for each peer: the number of bytes.

    Ranks that have gone different ways notice it where these differ.
    """

    def __init__(self, name: str, rank: int, peers: dict[int, socket.socket], timeout: float) -> None:
        self._name, self._rank, self._peers, self._timeout = name, rank, peers, timeout

    def send(self, nbytes: int) -> None:
        for rank, peer in self._peers.items():
            try:
                peer.sendall(nbytes.to_bytes(8, "little"))
            except OSError as error:
                raise self._lost(rank, error) from error

    def receive(self, nbytes: int) -> None:
        """Wait until all peers have sent ``nbytes``."""
        for rank, peer in self._peers.items():
            try:
                found = int.from_bytes(_received(peer, 8), "little")
            except OSError as error:
                raise self._lost(rank, error) from error
            if found != nbytes:
                raise RuntimeError(
                    f"{self._name}: rank {self._rank} exchanges {nbytes} bytes, rank {rank} {found}: ranks must issue the same "
                    "collectives in the same order"
                )

    def _lost(self, rank: int, error: OSError) -> RuntimeError:
        what = f"sent no signal within {self._timeout:g} s" if isinstance(error, TimeoutError) else f"has gone ({error})"
        return RuntimeError(f"{self._name}: rank {rank} of {len(self._peers) + 1} {what}")

    def interrupt(self) -> None:
        """Have what waits for peers, here and there, raise now."""
        for peer in self._peers.values():
            with contextlib.suppress(OSError):  # It may be closed.
                peer.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()


def _mapped(descriptor: int, nbytes: int) -> torch.Tensor:
    """The memory behind a descriptor, which may be closed: the tensor keeps it."""
    return torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8)


def _connected(group: dist.ProcessGroup, timeout: float) -> dict[int, socket.socket]:
    """A socket to each other rank of ``group``, all of which call this."""
    rank, peers = group.rank(), {}
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        name, token = secrets.token_hex(16), secrets.token_bytes(16)
        problem = ""
        try:
            listener.bind(f"\0torch_ragged-{name}")  # A name that begins so is in no file system.
            listener.listen(group.size())
            listener.settimeout(timeout)
        except OSError as error:
            problem = str(error)
        addresses: list[tuple[str, bytes, str]] = [("", b"", "")] * group.size()
        dist.all_gather_object(addresses, (name, token, problem), group=group)
        for other, (_, _, found) in enumerate(addresses):
            if found:
                raise OSError(f"rank {other} cannot listen: {found}")
        try:
            for other in range(rank):
                peers[other] = peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                peer.settimeout(timeout)
                peer.connect(f"\0torch_ragged-{addresses[other][0]}")
                peer.sendall(addresses[other][1] + rank.to_bytes(4, "little"))
            while len(peers) < group.size() - 1:
                peer, _ = listener.accept()
                peer.settimeout(timeout)
                greeting = _received(peer, len(token) + 4)
                if greeting[: len(token)] != token:  # It is of another process.
                    peer.close()
                    continue
                peers[int.from_bytes(greeting[len(token) :], "little")] = peer
        except BaseException:
            for peer in peers.values():
                peer.close()
            raise
    return dict(sorted(peers.items()))


def _received(peer: socket.socket, nbytes: int) -> bytes:
    parts: list[bytes] = []
    while nbytes:
        part = peer.recv(nbytes)
        if not part:
            raise ConnectionError("its end of the socket is closed")
        parts.append(part)
        nbytes -= len(part)
    return b"".join(parts)


# -- on GPUs -------------------------------------------------------------------------------------------------------------


class SymmetricPeerMemory:
    """Symmetric memory (``torch.distributed._symmetric_memory``) of GPUs with peer access, on a stream of its own.

    An exchange is copies on that stream, around a barrier on the signal pads, one kernel of a warp: the host waits for nothing,
    and the SMs are left to compute. Making it is collective, and waits for the device.

    Args:
        priority: of the stream; lower is more urgent.
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

    def exchange(self, write: Step, read: Step, nbytes: int) -> Work:
        """As :meth:`PeerMemory.exchange`, behind what the current stream holds now; ``wait()`` has the current stream wait."""
        slots = self._slots[self._count % TURNS]
        self._count += 1
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), torch.cuda.stream(self._stream):
            write(slots)
            self._handle.barrier(0, self._timeout_ms)
            read(slots)
            return StreamWork(self._stream.record_event())


class StreamWork:
    """What was issued on another stream, up to an event; ``wait()`` orders the current stream behind it."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)
