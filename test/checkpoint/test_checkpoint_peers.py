"""A rank that dies or stops during a save or a load: every other rank ends with a CheckpointError that names it."""

import re
import signal
import tempfile
import unittest

import pytest
from checkpoint_ranks import LOAD, PUBLISH, RANKS, SAVE, kill_one, value_in


def check_named(folder, number, victim, call, point):
    texts, _ = kill_one(folder, number, victim, call, point)
    for rank, text in texts.items():
        case = (call, point[1:], victim, rank, text)
        assert text.startswith(f"CheckpointError: {'saving' if call == 'save' else 'loading'}"), case
        assert re.search(rf"rank {victim} died: process \d+ on host ", text), case
    assert any(point[3] in text for text in texts.values()), (call, point, texts)
    assert value_in(f"{folder}/run{number}") == 1, (call, point, victim)


class PeersTest(unittest.TestCase):
    def check_all(self, cases):
        with tempfile.TemporaryDirectory() as folder:
            for number, (victim, call, point) in enumerate(cases):
                with self.subTest(call=call, victim=victim, point=point[1]):
                    check_named(folder, number, victim, call, point)

    def test_a_rank_that_dies_is_named(self):
        self.check_all(
            [
                (0, "save", PUBLISH["the old one is renamed"]),
                (1, "load", LOAD["checksums"]),
            ]
        )

    @pytest.mark.slow
    def test_each_rank_may_die_at_each_point(self):
        self.check_all([(victim, "save", point) for point in SAVE.values() for victim in range(RANKS)])
        self.check_all([(0, "save", point) for point in PUBLISH.values()])
        self.check_all([(victim, "load", point) for point in LOAD.values() for victim in range(RANKS)])

    @pytest.mark.slow
    def test_a_rank_that_is_stopped_is_named_after_the_timeout(self):
        with tempfile.TemporaryDirectory() as folder:
            texts, _ = kill_one(folder, 0, 1, "save", SAVE["in a file"], signal.SIGSTOP, timeout=3)
            for text in texts.values():
                self.assertRegex(text, r"CheckpointError: saving .* rank 1 is stopped: process \d+ on host ")
