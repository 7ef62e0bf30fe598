"""A parameter, a parameter group, its buffers and gradients, and the module hooks that unshard and reshard them.

Nothing here is called by users; :mod:`torch_ragged.fsdp` has the public names.
"""
