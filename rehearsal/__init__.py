"""A rehearsal of the GPU path without a GPU: torch's CUDA build on stand-ins for the CUDA runtime, NCCL and the kernels.

See README.md for what is real and what is not.
"""
