"""SameBits with the optimizers of this package."""

import unittest

from common import ranks
from one_process import Dense, adamw8bit, check, muon

from torch_ragged.fsdp import rows


class SameBitsOptimTest(unittest.TestCase):
    @ranks(4)
    def test_blocks_and_matrices():
        check(Dense, adamw8bit, 4, orig_param_policy=lambda *_: rows(16), norm_type=1.0)
        check(Dense, muon, 5)


if __name__ == "__main__":
    unittest.main()
