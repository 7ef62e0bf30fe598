"""What listens on a rank: on which address, and that it answers nobody but ranks of the same job."""

import dataclasses
import json
import os
import secrets
import signal
import socket
import subprocess
import threading
import unittest
from pathlib import Path
from unittest import mock

import torch.distributed as dist
from common import enter_fake_group, ranks

from torch_ragged._ranks import peers
from torch_ragged._ranks.peers import _Listener, _own_address, fates_of, listen
from torch_ragged._ranks.process import Process, myself
from torch_ragged._ranks.store import SharedStore

MINE = "127.0.0.1"


def other_address():
    """An address of this host that is not a loopback address; None if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 1))
            return None if peers._is_loopback(probe.getsockname()[0]) else probe.getsockname()[0]
        except OSError:
            return None


def answer_to(address, port, sent):
    """All that a listener says to a caller that sends these bytes."""
    with socket.create_connection((address, port), timeout=20) as caller:
        try:
            caller.sendall(sent)
            caller.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: caller.recv(2**16), b""))
        except TimeoutError:
            raise
        except OSError:  # It has closed before it read all: a reset, a broken pipe, or (in shutdown) "not connected".
            return b""


class ListenerTest(unittest.TestCase):
    def setUp(self):
        enter_fake_group(self, 1)
        self.listener = _Listener()
        self.addCleanup(self.listener._stop)

    def place(self, **changes):
        """What a process that listens at ``MINE`` has announced."""
        port = self.listener._listen(MINE)
        place = {**dataclasses.asdict(myself()), "address": MINE, "port": port, "token": self.listener._token}
        return {**place, **changes}

    def test_it_answers_the_token_and_nothing_else(self):
        place = self.place()
        self.assertIn(b"text", answer_to(MINE, place["port"], place["token"].encode()))
        garbage = [
            b"",
            b"\n",
            b"GET / HTTP/1.1\r\n\r\n",
            b"\0" * 32,
            secrets.token_hex(16).encode(),
            secrets.token_bytes(2**16),
        ]
        for sent in (*garbage, place["token"][:-1].encode(), place["token"].upper().encode()):
            self.assertEqual(answer_to(MINE, place["port"], sent), b"", sent)
        self.assertIn(b"text", answer_to(MINE, place["port"], place["token"].encode()))
        self.assertIsNotNone(peers._fate(place, 3).where)
        self.assertIsNone(peers._fate({**place, "token": "0" * 32}, 3).where)

    def test_callers_that_say_nothing_do_not_keep_a_rank_from_its_answer(self):
        place = self.place()
        silent = [socket.create_connection((MINE, place["port"])) for _ in range(peers._CALLERS - 2)]
        self.assertIsNotNone(peers._fate(place, 3).where)
        silent += [socket.create_connection((MINE, place["port"])) for _ in range(20)]
        self.assertTrue(peers._fate(place, 3).is_alive)  # It lives, though it does not answer now.
        for each in silent:
            each.close()
        fates = (peers._fate(place, 3) for _ in range(20))
        self.assertTrue(any(fate.where is not None for fate in fates))

    def test_it_listens_on_one_address_only(self):
        other = other_address()
        if other is None:
            self.skipTest("this host has only a loopback address")
        port = self.listener._listen(MINE)
        self.assertEqual(self.listener._listen(MINE), port)
        with self.assertRaises(OSError):
            answer_to(other, port, b"")
        # The next process group may have another network.
        moved = self.listener._listen(other)
        self.assertIn(b"text", answer_to(other, moved, self.listener._token.encode()))
        for address, closed in ((MINE, moved), (MINE, port)):
            with self.assertRaises(OSError):
                answer_to(address, closed, b"")

    def test_the_address_is_that_of_the_network_of_the_group(self):
        other, names = other_address(), ("MASTER_ADDR", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "LOCAL_WORLD_SIZE")
        cases = [
            ({"LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "1", "MASTER_ADDR": other or MINE}, MINE),
            ({"MASTER_ADDR": "127.0.0.1"}, MINE),
            ({"GLOO_SOCKET_IFNAME": "lo,eth0"}, MINE),
            ({"NCCL_SOCKET_IFNAME": "^docker", "MASTER_ADDR": "127.0.0.1"}, MINE),
        ]
        if other is not None:  # Some rank may be on another host.
            cases += [
                ({"MASTER_ADDR": other}, other),
                ({"LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "2", "MASTER_ADDR": other}, other),
                ({"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2", "MASTER_ADDR": other}, other),  # Not of this group.
                ({}, other),
            ]
        for variables, address in cases:
            kept = {name: value for name, value in os.environ.items() if name not in names}
            with self.subTest(variables), mock.patch.dict(os.environ, {**kept, **variables}, clear=True):
                self.assertEqual(_own_address(), address)

    def test_a_loopback_address_of_another_host_says_nothing(self):
        gone = dataclasses.asdict(Process("elsewhere/boot/ns", 5, "7"))
        fate = peers._fate(self.place(**gone, port=1), 3)
        self.assertTrue(fate.is_alive)
        self.assertIn("has not answered: process 5 on host elsewhere", fate.text)

    def test_a_host_that_answers_and_refuses_has_a_dead_process(self):
        """It is in a container of its own, so that this host cannot look for it."""
        with socket.create_server((MINE, 0)) as closed:
            place = self.place(host=f"{socket.gethostname()}/boot/ns", port=closed.getsockname()[1])
        fate = peers._fate(place, 3)
        self.assertFalse(fate.is_alive)
        self.assertRegex(fate.text, rf"^died: process {os.getpid()} on host \S+ has ended$")

    def test_a_host_that_does_not_answer_is_named(self):
        place = self.place(host="elsewhere/boot/ns", address="192.0.2.1")
        with mock.patch.object(socket, "create_connection", side_effect=TimeoutError("timed out")):
            fate = peers._fate(place, 3)
        text = "is not reachable: host elsewhere (192.0.2.1) does not answer (timed out)"
        self.assertEqual((fate.is_alive, fate.text), (False, text))

    def test_its_thread_ends_with_the_program(self):
        before = threading.enumerate()
        place = self.place()
        (thread,) = (each for each in threading.enumerate() if each not in before and each.name == "whereabouts")
        answer_to(MINE, place["port"], place["token"].encode())  # It waits for the next caller now.
        self.listener._stop()
        thread.join(20)
        self.assertFalse(thread.is_alive())

    def test_a_process_that_is_stopped_is_alive(self):
        child = subprocess.Popen(["sleep", "60"])
        self.addCleanup(child.wait)
        self.addCleanup(child.kill)
        started = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19]
        os.kill(child.pid, signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        fate = peers._fate(self.place(pid=child.pid, started=started), 3)
        self.assertTrue(fate.is_alive)
        self.assertRegex(fate.text, rf"^is stopped: process {child.pid} on host \S+$")

    @ranks(1)
    def test_each_process_group_learns_once_where_a_process_is():
        listener, store = _Listener(), SharedStore("processes")
        listener.announce()
        assert store.has("rank 0")
        store.delete("rank 0")
        listener.announce()
        assert not store.has("rank 0")
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        listener.announce()
        assert SharedStore("processes").has("rank 0")
        listener._stop()

    @ranks(2)
    def test_without_a_socket_a_dead_process_of_this_host_is_known():
        with mock.patch.dict(os.environ, {"TORCH_RAGGED_WATCH": "0"}):
            listener, rank = _Listener(), dist.get_rank()
            listener.announce()
        assert listener._socket is None
        store = SharedStore("processes")
        dist.barrier()
        fate = fates_of([1 - rank])[1 - rank]
        assert fate.is_alive and fate.where is None, fate.text
        dist.barrier()
        dead = dataclasses.replace(myself(), started="0")
        store.set(f"rank {rank}", json.dumps(dataclasses.asdict(dead)))
        dist.barrier()
        fate = fates_of([1 - rank])[1 - rank]
        assert not fate.is_alive and "died: process" in fate.text, fate.text
        dist.barrier()
        listen()  # The process of the pool is used again.
        dist.barrier()


if __name__ == "__main__":
    unittest.main()
