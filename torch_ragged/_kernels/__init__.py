"""Kernels that ``fsdp`` and ``optim`` share: each a torch twin, which defines it, and a Triton kernel that is equal to it.

Files by noun: ``casts`` (a flat tensor scaled, cast and added to another), ``float8`` (tiles of matrices as 8-bit codes with
scales), ``symmetric`` (products with their own transpose); ``tiles`` (where tiles lie in flat memory). ``_triton_*`` are the
kernels of the file they are named after, ``_triton_adam8bit`` that of :class:`torch_ragged.optim.Adam8bit`, whose twin lies
there; ``_triton_rounding`` is what they have in common. Nothing here imports the rest of the package, nor Triton before a
kernel runs.

Which of the two runs is chosen per call, by ``_choice``: the kernel for CUDA tensors where Triton is installed and the GPU can
do it, the twin everywhere else. ``TORCH_RAGGED_KERNELS=torch`` in the environment, or ``_choice.choose("torch")``, has the twin
run everywhere; ``"triton"`` the kernel, on CPU too, where ``TRITON_INTERPRET=1`` has Triton interpret it (as the tests do).
"""
