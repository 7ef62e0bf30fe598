"""Memory that stays allocated: slots in which groups take turns, and parameters that stay gathered between steps.

It does not decide when a group allocates or frees: the group does.
"""
