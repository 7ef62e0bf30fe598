"""The layout of a group's tensors in one buffer, and the planner that computes it.

This works on integers only: nothing here allocates memory or communicates.
"""
