"""One budget of memory: ``fit`` chooses what is recomputed or offloaded, and which modules stay unsharded.

Files: ``_unit_forward`` (a forward and what it does with activations), ``_dry_run`` (what a step holds when), ``_choice``
(arithmetic), ``_fit`` (the call).
"""
