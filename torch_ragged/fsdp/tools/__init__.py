"""The monitor and the memory report: the time, the bytes and the memory of a training step.

Training must not depend on them: no other part of fsdp imports this package, except for its public names.
"""
