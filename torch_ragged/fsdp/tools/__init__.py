"""The monitor and the memory report: the time, the bytes and the memory of a training step.

Training must not depend on them: of fsdp, only ``schedule`` imports this package.
"""
