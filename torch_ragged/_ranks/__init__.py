"""What ranks do beside their collectives: agree on arguments, make groups, and name a rank that died or that waits elsewhere.

Nothing here knows of tensors' placements.
"""
