"""Memory that groups share: slots at fixed addresses, and the groups that take turns in them.

It does not decide when a group allocates or frees: the group does.
"""
