"""Gradients beside their usual way: written by matmuls, or shown by ``.grad`` while they wait for a later reduction.

``fully_shard`` gives groups what is here; core does not import it. Nothing here decides when gradients are reduced.
"""
