"""Optional modules, which a rank may skip while others run them.

Nothing here unshards or reshards: the root does.
"""
