"""Codes: parameters that are all-gathered in 8 or 4 bits.

The parts of ``Float8Policy`` and ``Float4Policy``. Core does not know them.
"""
