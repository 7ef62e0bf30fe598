"""Keepers: gathered parameters that stay after reshard, so that the next all-gather is smaller.

They do not decide when: the group does.
"""
