"""Kernels of ``fsdp``, ``optim`` and random numbers: a torch twin, which defines the result, and an equal Triton kernel.

Nothing here imports the rest of the package, and nothing imports Triton before a kernel runs.

Files: ``casts`` (scale and cast a flat tensor, and add it to another), ``float8`` (tiles of matrices as 8-bit codes with
scales), ``symmetric`` (products of a matrix with its transpose), ``tiles`` (offsets of tiles in flat memory). A file
``_triton_X`` has the kernels of ``X``. ``_triton_adam8bit`` has the kernel of :class:`torch_ragged.optim.Adam8bit`; its twin is
``torch_ragged.optim._adam8bit.update_region``. All kernels use ``_triton_rounding``.

``philox`` draws random numbers; ``distributions`` are those of torch, ``regions`` say which elements. Its twin is torch's own
draw on the GPU, and ``torch_ragged.tensor._counter`` compares the two before the kernel is used.

``_choice`` decides per call. If the tensor is on CUDA, Triton is installed and the GPU is new enough, the kernel runs;
otherwise the twin. ``TORCH_RAGGED_KERNELS=torch`` in the environment, or ``_choice.choose("torch")``, makes the twin run
everywhere. ``"triton"`` makes the kernel run everywhere, also on CPU. There it needs ``TRITON_INTERPRET=1``, as in the tests.
"""
