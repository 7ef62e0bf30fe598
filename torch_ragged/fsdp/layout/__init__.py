"""What lies where: the layout of a group's tensors in one buffer, and the planner that finds it.

Integers only: nothing here allocates memory or communicates.
"""
