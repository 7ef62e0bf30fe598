"""Optimizer states in tiers: a part on the device, the rest in host memory or in files.

``_pieces`` (what is stepped together), ``_tiers`` (where its states lie), ``_offloaded_optimizer`` (the optimizer of both).
"""
