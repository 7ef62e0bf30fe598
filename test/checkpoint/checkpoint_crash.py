"""A model of a disk that loses power: records what the checkpoint writer does to files, and builds what may be left of it.

As ALICE and CrashMonkey do. Data that was written and not synced may reach the disk, in whole, in part or not at all. So may
each entry of a folder that was created, renamed or removed since the folder was synced, in any order. A rename is one step.
"""

import contextlib
import os
from pathlib import Path
from unittest import mock

from torch_ragged.checkpoint import _disk

__all__ = ["Recorder", "crash_states", "write_state"]


class Recorder:
    """The operations of the writer below ``root``, in order, as tuples: (operation, path, ...)."""

    def __init__(self, root):
        self.root, self.log, self._files = Path(root), [], {}

    def name(self, path):
        return os.path.relpath(os.path.abspath(path), self.root)

    def _create(self, path):
        file = self._real["create"](path)
        self._files[id(file)] = (self.name(path), file)  # The file is kept: its id stays its own.
        self.log.append(("create", self.name(path)))
        return file

    def _write(self, file, data):
        name, content = self._files[id(file)][0], bytes(data)
        if self.log[-1][:2] == ("write", name):  # Many small writes are one: torch.save writes a zip archive in pieces.
            content = self.log.pop()[2] + content
        self.log.append(("write", name, content))
        return self._real["write"](file, data)

    def _sync(self, file):
        self._real["sync"](file)
        self.log.append(("sync", self._files[id(file)][0]))

    def _other(self, operation):
        def call(*paths):
            # Before the call for what undoes nothing: a failed operation is not in the log.
            existed = [os.path.lexists(path) for path in paths]
            self._real[operation](*paths)
            if operation == "mkdir" and existed[0] or operation == "unlink" and not existed[0]:
                return
            self.log.append((operation, *map(self.name, paths)))

        return call

    @contextlib.contextmanager
    def record(self):
        operations = ("create", "write", "sync", "sync_folder", "mkdir", "rename", "unlink", "rmdir")
        self._real = {name: getattr(_disk, name) for name in operations}
        own = {"create": self._create, "write": self._write, "sync": self._sync}
        with contextlib.ExitStack() as stack:
            for name in operations:
                stack.enter_context(mock.patch.object(_disk, name, own.get(name) or self._other(name)))
            yield self


class _Disk:
    """Inodes with what is durable of them and what is not yet. An inode is a number; folder 0 is the root."""

    def __init__(self):
        self.next = 1
        self.now = {0: {}}  # Folders as programs see them: name -> inode.
        self.data = {}  # Files: (durable bytes, all bytes).
        self.durable = {0: {}}  # Folders as they are on the disk.
        self.waiting = []  # Changes of entries that are not durable: (folders, [(folder, name, inode or None), ...]).

    def find(self, path):
        folder, parts = 0, Path(path).parts
        for part in parts:
            folder = self.now[folder][part]
        return folder

    def entry(self, path):
        return self.find(os.path.dirname(path) or "."), os.path.basename(path)

    def change(self, *changes):
        for folder, name, inode in changes:
            self.now[folder].pop(name, None) if inode is None else self.now[folder].update({name: inode})
        self.waiting.append(({folder for folder, _, _ in changes}, changes))

    def new(self, path, folder):
        inode, self.next = self.next, self.next + 1
        if folder:
            self.now[inode], self.durable[inode] = {}, {}
        else:
            self.data[inode] = (b"", b"")
        self.change((*self.entry(path), inode))

    def run(self, operation, path, *rest):
        if operation in ("create", "mkdir"):
            self.new(path, operation == "mkdir")
        elif operation == "write":
            inode = self.find(path)
            self.data[inode] = (self.data[inode][0], self.data[inode][1] + rest[0])
        elif operation == "sync":
            inode = self.find(path)
            self.data[inode] = (self.data[inode][1],) * 2
        elif operation == "rename":
            inode = self.find(path)
            self.change((*self.entry(rest[0]), inode), (*self.entry(path), None))
        elif operation in ("unlink", "rmdir"):
            self.change((*self.entry(path), None))
        elif operation == "sync_folder":
            inode = self.find(path)
            for _, changes in [each for each in self.waiting if inode in each[0]]:
                self.apply(self.durable, changes)
            self.waiting = [each for each in self.waiting if inode not in each[0]]

    @staticmethod
    def apply(folders, changes):
        for folder, name, inode in changes:
            folders[folder].pop(name, None) if inode is None else folders[folder].update({name: inode})

    def left(self, changes, content):
        """What is on the disk if these of the waiting changes reached it, and ``content(inode)`` of each file."""
        folders = {inode: dict(entries) for inode, entries in self.durable.items()}
        for number in changes:
            self.apply(folders, self.waiting[number][1])
        found = {}

        def walk(inode, path, above):
            for name, child in folders[inode].items():
                inside = os.path.join(path, name)
                if child in self.data:
                    found[inside] = content(child)
                elif child not in above:
                    found[inside] = None
                    walk(child, inside, (*above, child))

        walk(0, "", (0,))
        return found

    def states(self):
        """The disks that a power loss may leave now: a representative set of all of them."""
        every = range(len(self.waiting))
        synced, whole = (lambda inode: self.data[inode][0]), (lambda inode: self.data[inode][1])

        def torn(inode):
            durable, data = self.data[inode]
            return data[: (len(durable) + len(data)) // 2]

        def zeros(inode):  # The size of a file is on the disk, its data is not.
            durable, data = self.data[inode]
            return durable + bytes(len(data) - len(durable))

        for content in (synced, whole, torn, zeros):
            yield self.left((), content)
            yield self.left(every, content)
            for one in every:
                yield self.left([one], content)
                yield self.left([other for other in every if other != one], content)
                yield self.left(range(one), content)
        for lost in [inode for inode, (durable, data) in self.data.items() if durable != data]:
            yield self.left(every, lambda inode, lost=lost: self.data[inode][inode != lost])


def crash_states(log, before=0):
    """Each disk that a power loss may leave after each operation of ``log``, once, and the number of operations done.

    The first ``before`` operations are durable: no crash is made among them.
    """
    disk, seen = _Disk(), set()
    for number, operation in enumerate(log):
        disk.run(*operation)
        if number + 1 < before:
            continue
        if number + 1 == before:
            for inode, (_, data) in disk.data.items():
                disk.data[inode] = (data, data)
            for _, changes in disk.waiting:
                disk.apply(disk.durable, changes)
            disk.waiting = []
        for state in disk.states():
            key = (frozenset(state.items()), number + 1 == len(log))
            if key not in seen:
                seen.add(key)
                yield number + 1, state


def write_state(state, root):
    """Make the files and folders of a state below ``root``, which is empty."""
    for path, content in sorted(state.items()):
        if content is None:
            (Path(root) / path).mkdir()
        else:
            (Path(root) / path).write_bytes(content)
