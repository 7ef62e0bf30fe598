"""Collectives over memory that ranks share: copy engines and multicast. No GPU has run them yet.

Users choose them with ``set_collectives``.
"""
