"""Encodings: what an all-gather reads and sends for a group's parameters, and the memory that the model computes with.

They do not decide when to all-gather or to free: the group does.
"""
