"""The placements RaggedShard and StridedRaggedShard: ownership, redistribution, operators and random numbers of their DTensors.

It maps to ``torch/distributed/tensor``. Nothing here knows of modules, parameters or optimizers.
"""
