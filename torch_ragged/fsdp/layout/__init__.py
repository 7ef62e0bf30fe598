"""The layout of a group's tensors in one buffer, and its planner: integers only, without memory and communication."""
