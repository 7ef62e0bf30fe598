"""What carries a buffer between ranks: collectives of process groups, and others by name; agreement between ranks.

Nothing here knows of parameters, groups or modules.
"""
