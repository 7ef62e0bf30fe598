"""Programs of two ranks that end while a background save is in flight, each in its own way.

``python checkpoint_ends.py FOLDER [NAME ...]`` runs them and prints one JSON object per program: the exit codes, what each rank
wrote to stderr, and the names in its folder. Ranks are forked from this process, and end as Python programs do.
"""

import atexit
import datetime
import json
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import destroy_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from torch_ragged import RaggedShard, checkpoint
from torch_ragged.checkpoint import _files

__all__ = ["PROGRAMS"]

TIMEOUT, LIMIT = 20, 100
AT_ONCE = 3  # So many programs run at once: for the most part they wait.
SECONDS = 0.2  # What a file of a background save takes at least.
group = None


def full(value):
    """A model whose every element is one value."""
    model, units = nn.Module(), RaggedShard((0,), (3, 4))
    local = torch.full((units.local_units[dist.get_rank()] * 6,), float(value))
    mesh = init_device_mesh("cpu", (2,))
    model.weight = nn.Parameter(DTensor.from_local(local, mesh, [units], shape=(7, 6), run_check=False))
    return model


def start(folder, step=2, **options):
    return checkpoint.async_save(folder, checkpoint.TrainState(full(step), step=step), process_group=group, **options)


def with_a_full_disk(folder, **options):
    """As :func:`start`; the disk of rank 1 is full."""
    if dist.get_rank() == 1:

        def fail(self, data):
            raise OSError(28, "No space left on device")

        _files._HashingFile.write = fail
    return start(folder, **options)


def nobody_waits(folder):
    start(folder)


def groups_are_destroyed(folder):
    start(folder)
    dist.destroy_process_group()


def groups_are_destroyed_by_an_older_name(folder):
    start(folder)
    destroy_process_group()


def its_group_is_destroyed(folder):
    start(folder)
    dist.destroy_process_group(group)


def one_rank_raises(folder):
    start(folder)
    if dist.get_rank() == 1:
        raise ValueError("in the training loop")


def all_ranks_exit_with_3(folder):
    start(folder)
    sys.exit(3)


def one_rank_exits_with_0(folder):
    start(folder)
    if dist.get_rank() == 0:
        sys.exit(0)
    time.sleep(0.5)


def ctrl_c(folder):
    start(folder)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(10)


def ctrl_c_twice(folder):
    start(folder)
    signal.setitimer(signal.ITIMER_REAL, 0.1)  # While the end of the program waits.
    signal.signal(signal.SIGALRM, signal.default_int_handler)


def os_exit(folder):
    start(folder)
    os._exit(0)


def two_in_flight(folder):
    start(folder, 2)
    start(folder, 3)


def two_folders(folder):
    start(folder, 2)
    start(folder + "/other", 3)


def a_save_follows(folder):
    start(folder, 2)
    for other in (group, None):
        checkpoint.save(folder, checkpoint.TrainState(full(3), step=3), process_group=other)


def the_same_step_follows(folder):
    start(folder, 2)
    checkpoint.save(folder, checkpoint.TrainState(full(2), step=2))


def a_load_and_keep_follow(folder):
    start(folder, 2)
    state = checkpoint.TrainState(full(0))
    checkpoint.load(folder, state, process_group=group)
    assert state.step == 2, state.step
    start(folder, 3)
    assert [kept.name for kept in checkpoint.keep(folder, 2, process_group=group)] == ["step-00000002", "step-00000003"]


def a_worker_is_forked(folder):
    start(folder)
    assert sum(batch.item() for batch in DataLoader([1, 2, 3], num_workers=1, multiprocessing_context="fork")) == 6


def it_cannot_be_cancelled(folder):
    future = start(folder)
    assert not future.cancel()
    future.result()


def a_part_of_the_ranks(folder):
    groups = [dist.new_group([rank], backend="gloo") for rank in range(2)]
    if dist.get_rank() == 1:  # Both in flight one after the other, in folders of their own.
        state = checkpoint.TrainState(nn.Linear(2, 2), step=2)
        checkpoint.async_save(folder, state, process_group=groups[1])
    start(folder + "/all", 3)


def it_fails(folder):
    atexit.register(print, "an older function of atexit", file=sys.stderr)
    with_a_full_disk(folder)


def it_fails_and_groups_are_destroyed(folder):
    with_a_full_disk(folder)
    dist.destroy_process_group()


def it_fails_and_the_next_succeeds(folder):
    write = _files._HashingFile.write
    future = with_a_full_disk(folder, step=2)
    while not future.done():
        time.sleep(0.01)
    _files._HashingFile.write = write
    start(folder, 3)


def it_fails_and_is_asked(folder):
    try:
        with_a_full_disk(folder).result()
    except checkpoint.CheckpointError as error:
        assert "No space left on device" in str(error), error
    else:
        raise AssertionError("no error")
    future = with_a_full_disk(folder)
    future.add_done_callback(lambda done: done.exception())


def another_rank_dies(folder):
    if dist.get_rank() == 1:
        _files._HashingFile.write = lambda self, data: os.kill(os.getpid(), signal.SIGKILL)
    start(folder)


def a_child_of_multiprocessing(folder):
    """Here each rank is a child of multiprocessing: see :func:`run`."""
    with_a_full_disk(folder)


def a_spawned_child(folder):
    """As mp.spawn starts it: such a child runs the end of a program twice."""
    with_a_full_disk(folder)


# Of each program: the exit codes, the checkpoints in its folder, and what each rank has written to stderr.
FAILED = "step 2 was not saved in the background: saving .*No space left on device.*rank 1"
TOLD = r"exit code 1: async_save failed at step 2, and the program did not ask for its result\(\)\n"
PROGRAMS = {
    nobody_waits: ([0, 0], [1, 2], "^$"),
    groups_are_destroyed: ([0, 0], [1, 2], "^$"),
    groups_are_destroyed_by_an_older_name: ([0, 0], [1, 2], "^$"),
    its_group_is_destroyed: ([0, 0], [1, 2], "^$"),
    one_rank_raises: ([0, 1], [1, 2], "^$|ValueError: in the training loop"),
    all_ranks_exit_with_3: ([3, 3], [1, 2], "^$"),
    one_rank_exits_with_0: ([0, 0], [1, 2], "^$"),
    ctrl_c: ([-signal.SIGINT] * 2, [1, 2], "KeyboardInterrupt"),
    ctrl_c_twice: ([1, 1], [1], "the wait for step 2 was interrupted by KeyboardInterrupt: it may not be saved"),
    os_exit: ([0, 0], [1], "^$"),
    two_in_flight: ([0, 0], [1, 2, 3], "^$"),
    two_folders: ([0, 0], [1, 2], "^$"),
    a_save_follows: ([0, 0], [1, 2, 3], "^$"),
    the_same_step_follows: ([0, 0], [1, 2], "^$"),
    a_load_and_keep_follow: ([0, 0], [2, 3], "^$"),
    a_worker_is_forked: ([0, 0], [1, 2], "^$"),
    it_cannot_be_cancelled: ([0, 0], [1, 2], "^$"),
    a_part_of_the_ranks: ([0, 0], [1, 2], "^$"),
    it_fails: ([1, 1], [1], f"(?s){FAILED}.*{TOLD}an older function of atexit\n$"),
    it_fails_and_groups_are_destroyed: ([1, 1], [1], f"(?s){FAILED}.*{TOLD}$"),
    it_fails_and_the_next_succeeds: ([1, 1], [1, 3], f"(?s){FAILED}.*{TOLD}$"),
    it_fails_and_is_asked: ([0, 0], [1], f"(?s){FAILED}"),
    another_rank_dies: ([1, -signal.SIGKILL], [1], "^$|step 2 was not saved in the background: saving .* rank 1 died"),
    a_child_of_multiprocessing: ([1, 1], [1], f"(?s){FAILED}.*{TOLD}$"),
    a_spawned_child: ([1, 1], [1], f"^{FAILED}[^\n]*\n{TOLD}$"),
}


def rank_main(program, folder, rank):
    """The program of one rank. Each file of its save takes a while, so that the save is in flight when the program ends."""
    global group
    os.dup2(os.open(f"{folder}/stderr{rank}", os.O_CREAT | os.O_WRONLY), 2)
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2, timeout=timeout)
    group = dist.new_group(backend="gloo")
    checkpoint.save(f"{folder}/run", checkpoint.TrainState(full(1), step=1))
    write = _files._HashingFile.write

    def slow(self, data):
        if not self.nbytes:
            time.sleep(SECONDS)
        return write(self, data)

    _files._HashingFile.write = slow
    program(f"{folder}/run")


def ranks_of(program, folder):
    """Start two ranks; returns their processes. In a rank, it returns nothing, and the caller ends as a program does."""
    if program in (a_child_of_multiprocessing, a_spawned_child):
        context = multiprocessing.get_context("spawn" if program is a_spawned_child else "fork")
        children = [context.Process(target=rank_main, args=(program, folder, rank)) for rank in range(2)]
        for child in children:
            child.start()
        return [child.pid for child in children]
    pids = []
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            multiprocessing.process._children.clear()
            rank_main(program, folder, rank)
            return []
        pids.append(pid)
    return pids


def exit_code(pid):
    """The exit code of a process; None if it hangs."""
    deadline = time.monotonic() + LIMIT
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return None
        time.sleep(0.01)


def main():
    into, *names = sys.argv[1:]
    programs = [each for each in PROGRAMS if not names or each.__name__ in names]
    for first in range(0, len(programs), AT_ONCE):
        started = {}
        for program in programs[first : first + AT_ONCE]:
            folder = f"{into}/{program.__name__}"
            os.mkdir(folder)
            started[program] = ranks_of(program, folder)
            if not started[program]:
                return
        for program, pids in started.items():
            folder = f"{into}/{program.__name__}"
            codes = [exit_code(pid) for pid in pids]
            saved = sorted(name for name in os.listdir(f"{folder}/run") if name.startswith("step-") and "." not in name)
            errors = [Path(f"{folder}/stderr{rank}").read_text() for rank in range(2)]
            print(json.dumps([program.__name__, codes, saved, errors]), flush=True)


if __name__ == "__main__":
    main()
