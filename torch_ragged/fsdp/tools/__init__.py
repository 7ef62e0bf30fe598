"""What a training step costs: the monitor and the memory report.

Nothing in the other wings depends on them.
"""
