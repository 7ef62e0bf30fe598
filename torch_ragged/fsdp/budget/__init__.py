"""One budget of memory: ``fit`` chooses what is recomputed, where optimizer states lie, and which modules stay unsharded.

Files: ``_recompute`` (a forward that runs again in backward), ``_dry_run`` (what a step holds when), ``_choice`` (arithmetic),
``_fit`` (the call).
"""
