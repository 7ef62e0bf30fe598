"""A training run on other ranks: ``reshard_to`` another mesh, and copies of shards on neighbours for when a rank is lost.

Nothing here runs in a training step, but the copies that it sends in the background.
"""
