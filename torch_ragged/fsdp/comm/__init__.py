"""Collectives on flat buffers, over process groups and over other transports, and the agreement of ranks on their arguments.

Nothing here knows of parameters, parameter groups or modules.
"""
