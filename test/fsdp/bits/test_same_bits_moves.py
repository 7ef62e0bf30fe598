"""SameBits: a model that moves to other ranks between steps has the bits of one process."""

import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import one_process
import pytest
import torch
import torch.distributed as dist
from common import error_of, ranks
from one_process import Dense, adamw, bits, in_one_process, sharded, train
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torch_ragged.fsdp import NeighbourCopies, SameBits, fully_shard, monitor, reshard_to

PIECES = 5


def expected(steps):
    torch.manual_seed(0)
    model = Dense()
    return in_one_process(model, adamw(model.parameters()), PIECES, steps=range(steps)), model


def made(mesh, **options):
    torch.manual_seed(0)
    model = sharded(Dense(), mesh=mesh, **options)
    optimizer = adamw(model.parameters())
    return model, optimizer, SameBits(model, optimizer, pieces=PIECES, seed=7)


def assert_equal(model, other):
    for (name, param), wanted in zip(model.named_parameters(), other.parameters(), strict=True):
        assert bits(param).equal(bits(wanted)), name


class SameBitsMovesTest(unittest.TestCase):
    @ranks(4)
    def test_ranks_leave_and_join():
        whole, fewer, pair = init_device_mesh("cpu", (4,)), DeviceMesh("cpu", [0, 1, 2]), DeviceMesh("cpu", [1, 3])
        numbers, wanted = expected(4)
        model, optimizer, same = made(fewer)  # Rank 3 joins later: it is made there too, and waits.
        found = []
        for step, mesh in enumerate((fewer, whole, pair, whole)):
            if step:
                reshard_to(model, optimizer, mesh, stateful=[same])
            if dist.get_rank() in mesh.mesh:
                found.append((step, train(same, model, optimizer, PIECES, range(step, step + 1))[0]))
                assert same.step == step + 1
            else:
                assert "is not in" in error_of(lambda: next(same.pieces()))
        assert found == [(step, numbers[step]) for step, _ in found]
        assert len(found) == (3, 4, 3, 3)[dist.get_rank()]
        assert_equal(model, wanted)

    @ranks(2)
    def test_a_loop_that_was_left_does_not_set_generators_later():
        numbers, _ = expected(2)
        model, optimizer, same = made(init_device_mesh("cpu", (2,)))
        kept = same.state_dict()
        left = same.pieces()  # As a traceback holds it.
        next(left)
        same.load_state_dict(kept)

        with mock.patch.object(one_process, "loss_of", new=one_process.loss_of) as plain:
            one_process.loss_of = lambda *args: (left.close(), plain(*args))[1]
            assert train(same, model, optimizer, PIECES, range(2)) == numbers

    @ranks(3)
    def test_copies_bring_it_back():
        """Two steps after the copy are made again, on fewer ranks."""
        fewer = DeviceMesh("cpu", [0, 1])
        numbers, wanted = expected(4)
        model, optimizer, same = made(init_device_mesh("cpu", (3,)))
        copies = NeighbourCopies(model, optimizer, stateful=[same])
        assert train(same, model, optimizer, PIECES, range(2)) == numbers[:2]
        copies.update()
        assert train(same, model, optimizer, PIECES, range(2, 4)) == numbers[2:]
        copies.wait()
        text = error_of(lambda: [model(torch.zeros(1, 2, dtype=torch.long)).sum().backward() for _ in same.pieces()])
        if dist.get_rank() < 2:
            copies.recover(fewer)
            assert same.step == 2, text
            assert "has moved" in error_of(same.loss), error_of(same.loss)
            assert train(same, model, optimizer, PIECES, range(2, 4)) == numbers[2:]
            assert_equal(model, wanted)

    @ranks(2)
    def test_what_does_not_follow_a_model_is_refused():
        model, optimizer, same = made(init_device_mesh("cpu", (2,)))
        with monitor(model, optimizer):
            assert "close a monitor" in error_of(NeighbourCopies, model, optimizer)
        NeighbourCopies(model, optimizer)
        other = fully_shard(nn.Linear(4, 4), mesh=DeviceMesh("cpu", [0]))
        text = error_of(SameBits, other, adamw(other.parameters()), pieces=0)
        assert ("is no positive number" in text) == (dist.get_rank() == 0), text
        same.close()
        for call in (lambda: next(same.pieces()), lambda: same.clip_grad_norm_(1.0)):
            assert "close() was called" in error_of(call)


@pytest.mark.slow
class CoverTest(unittest.TestCase):
    def test_a_sample_of_make_bits(self):
        """Four configurations with pairs of features, on few and on many ranks, for twelve steps: about three minutes."""
        script = Path(__file__).with_name("run.py")
        with tempfile.TemporaryDirectory() as folder:
            options = ["--steps", "12", "--cases", "4", "--ranks", "3", "8", "--json", f"{folder}/bits.json"]
            done = subprocess.run([sys.executable, str(script), *options], capture_output=True, text=True, timeout=900)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("4 configurations on [3, 8] ranks, 12 steps each: 0 wrong", done.stdout)


if __name__ == "__main__":
    unittest.main()
