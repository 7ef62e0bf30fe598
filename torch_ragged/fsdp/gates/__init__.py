"""Gates: what ranks agree on, or are told, around the calls and steps of sharded modules. Core calls them as ``Gate``."""
