"""Gates: what ranks agree on, or are told, around the calls and steps of sharded modules. Core calls them as ``Gate``.

They issue collectives of their own and take part in calls of other ranks. They move no parameters.
"""
