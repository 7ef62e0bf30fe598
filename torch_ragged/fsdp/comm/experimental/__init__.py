"""Collectives over memory that ranks share: copy engines and multicast. Not run on several GPUs yet.

Users choose them with ``set_collectives``.
"""
