"""Agreement: what one rank does wrong is an error on all ranks, and nobody waits for a rank that raised."""

import unittest
from unittest import mock

import torch
import torch.distributed as dist
from common import error_of, ranks

from torch_ragged._ranks import agreement as module
from torch_ragged._ranks.agreement import agree, agreement, problems_of_ranks, text_of

CPU = torch.device("cpu")


def called(line, problem=None):
    """The error of a call whose block adds a line, or raises."""

    def call():
        with agreement([dist.group.WORLD], CPU, "call()") as claim:
            if problem is not None:
                raise problem
            claim.append(line)

    return error_of(call)


class AgreementTest(unittest.TestCase):
    def test_texts_of_sets_do_not_depend_on_their_order(self):
        for kind in (set, frozenset):
            self.assertEqual(text_of(kind([str, (3, "b"), 1])), "{(3, 'b'), 1, builtins.str}")

    @ranks(3)
    def test_equal_claims_return_and_others_raise_on_all_ranks():
        rank = dist.get_rank()
        assert called("a = 1") == ""
        error = called(f"a = {rank // 2}")
        assert error.startswith("ValueError: call() was called differently on different ranks"), error
        assert "a = 0" in error and "a = 1" in error and "give it equal modules" in error, error
        for line, expected in (
            ("a = 1" if rank else "a = 1\nb = 2", "rank 0 has b = 2, rank 1 has nothing more: give it"),
            ("a = 1\nb = 2" if rank else "a = 1", "rank 0 has nothing more, rank 1 has b = 2: give it"),
        ):
            error = called(line)
            assert expected in error, error
        assert called("a = 2") == "", "and the ranks still meet"

    @ranks(3)
    def test_an_error_of_one_rank_is_one_of_all():
        rank = dist.get_rank()
        error = called("a = 1", KeyError("mine") if rank == 1 else None)
        assert error == ("KeyError: 'mine'" if rank == 1 else "RuntimeError: call() failed on rank 1: KeyError: 'mine'"), error
        assert called("a = 1") == ""

    @ranks(4)
    def test_groups_carry_an_answer_one_after_the_other():
        """Ranks 0 and 3 share no group."""
        rows = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
        columns = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
        rank = dist.get_rank()
        groups = [rows[rank // 2], columns[rank % 2]]
        agree(groups, CPU, "call()", "same", None)
        error = error_of(agree, groups, CPU, "call()", "same", TypeError("no") if rank == 3 else None)
        assert error == ("TypeError: no" if rank == 3 else "RuntimeError: call() failed on rank 3: TypeError: no"), error
        error = error_of(agree, groups, CPU, "call()", f"rank {rank}" if rank == 0 else "others", None)
        assert "rank 0" in error and "others" in error, error

    @ranks(2)
    def test_a_rank_waits_until_all_have_named_their_mesh():
        group, store = dist.new_group([0, 1]), dist.distributed_c10d._get_default_store()

        def let_the_other_one_come():
            store.set("a rank has waited", "")

        if dist.get_rank() == 1:
            store.wait(["a rank has waited"])
            store.set("rank 1 calls", "")
        with mock.patch.multiple(module, _ANSWER_SLICE=0.01, look_for_standstill=let_the_other_one_come):
            module._agree_on_group(group, "same", "call()", 60.0)
        has_waited = store.check(["rank 1 calls"])
        let_the_other_one_come()  # Even if this one has not waited.
        assert has_waited

    @ranks(3)
    def test_problems_of_all_ranks_are_one_line():
        rank = dist.get_rank()
        assert problems_of_ranks("", dist.group.WORLD) == ""
        assert problems_of_ranks("none has memory", dist.group.WORLD) == "none has memory"
        line = problems_of_ranks(f"no memory on {rank}" if rank else "", dist.group.WORLD)
        assert line == "rank 1: no memory on 1; rank 2: no memory on 2", line


if __name__ == "__main__":
    unittest.main()
