"""Collectives on flat buffers, over process groups and other transports. Nothing here knows of parameters or modules."""
