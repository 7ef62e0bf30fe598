"""Programs of one rank that get SIGTERM under torchrun's environment, in forked processes; run by test_termination.py.

``python terminated.py FOLDER`` writes for each program what it wrote to stderr, and the exit codes of all of them, as JSON.
"""

import json
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch.distributed as dist

from torch_ragged._ranks.peers import tracker
from torch_ragged._ranks.standstill import announce

__all__ = ["PROGRAMS", "main"]


def signalled():
    os.kill(os.getpid(), signal.SIGTERM)


def waits_in_c():
    announce()
    threading.Timer(0.2, signalled).start()
    dist.HashStore().get("never written")  # As in a collective: no handler runs meanwhile.


def runs_python():
    announce()
    tracker.forward = ("Net", 3)
    signalled()
    print("goes on", file=sys.stderr)


def finds_out_who_has_failed():
    announce()
    tracker.failed = "all-gather of weight"
    signalled()


def has_a_handler_that_exits():
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(7))
    announce()
    signalled()


def has_a_handler_that_goes_on():
    signal.signal(signal.SIGTERM, lambda number, frame: print("handled", file=sys.stderr))
    announce()
    signalled()
    signalled()


def has_a_wakeup_fd():
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    signal.set_wakeup_fd(theirs)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: None)
    announce()
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1):
        os.kill(os.getpid(), number)
        print(list(os.read(ours, 1)), file=sys.stderr)


def sets_a_handler_later():
    announce()
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *arguments: (print("mine", file=sys.stderr), before(*arguments)))
    signalled()


def ignores_it():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    announce()
    signalled()


def has_a_child_that_gets_it():
    announce()
    child = os.fork()
    if child == 0:
        time.sleep(60)
    time.sleep(0.1)
    os.kill(child, signal.SIGTERM)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
    time.sleep(0.3)  # It would be told here.


def listening():
    """The sockets of this process that listen."""
    links = [os.readlink(file) for file in Path("/proc/self/fd").iterdir() if os.path.lexists(file)]
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return set(links) & {f"socket:[{row[9]}]" for row in rows if row[3] == "0A"}


def is_switched_off():
    os.environ["TORCH_RAGGED_WATCH"] = "0"
    before = listening()  # gloo's.
    announce()
    assert listening() == before
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert [each.name for each in threading.enumerate()] == ["MainThread"], threading.enumerate()


def is_not_under_torchrun():
    del os.environ["TORCHELASTIC_RUN_ID"]
    announce()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    signalled()


SENDS, NOBODY = "^rank 0: torchrun sends SIGTERM to this process, which ", "\nrank 0: no other rank has failed: look at the "
TOLD = SENDS + r"is in {} \(terminated.py:\d+\)" + NOBODY
# Of each program: its exit code, and what it writes to stderr.
PROGRAMS = {
    waits_in_c: (-signal.SIGTERM, TOLD.format("waits_in_c")),
    runs_python: (
        -signal.SIGTERM,
        rf"{SENDS}is in signalled \(terminated.py:\d+\)\. Its last forward is number 3 of Net{NOBODY}" + "(?s:(?!goes on).)*$",
    ),
    finds_out_who_has_failed: (
        -signal.SIGTERM,
        rf"{SENDS}finds out why all-gather of weight has failed, called in signalled \(terminated.py:\d+\){NOBODY}",
    ),
    has_a_handler_that_exits: (7, TOLD.format("signalled")),
    has_a_handler_that_goes_on: (0, TOLD.format("signalled") + ".*\nhandled\nhandled\n$"),
    has_a_wakeup_fd: (0, rf"(?s)\[{signal.SIGUSR1:d}\]\n.*\[{signal.SIGTERM:d}\]\n\[{signal.SIGUSR1:d}\]\n$"),
    sets_a_handler_later: (-signal.SIGTERM, "(?s)mine.*sends SIGTERM|sends SIGTERM.*mine"),
    ignores_it: (0, "^$"),
    has_a_child_that_gets_it: (0, "^$"),
    is_switched_off: (0, "^$"),
    is_not_under_torchrun: (-signal.SIGTERM, "^$"),
}


def main(folder):
    os.environ.update(TORCHELASTIC_RUN_ID="none", RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    logging.basicConfig(format="%(message)s", force=True)
    started = {}
    for program in PROGRAMS:  # All at once: they know nothing of each other.
        started[program] = os.fork()
        if started[program] == 0:
            os.dup2(os.open(Path(folder) / program.__name__, os.O_CREAT | os.O_WRONLY), 2)
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            program()
            return
    codes = {program.__name__: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for program, pid in started.items()}
    (Path(folder) / "codes").write_text(json.dumps(codes))


if __name__ == "__main__":
    main(*sys.argv[1:])
