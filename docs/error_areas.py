"""Which errors of the package stand under which heading of docs/errors.md, for docs/make_errors.py.

``AREAS``: a heading to the modules of the part. ``HINTS``: a piece of a message to what the message does not say itself.
"""

AREAS: dict[str, tuple[str, ...]] = {
    "Import": ("_register",),
    "Ranks that were called differently": ("_ranks.agreement", "_ranks.comparison"),
    "A rank died, or does not answer": ("_ranks.peers", "_ranks.store", "_ranks.survivors"),
    "fully_shard(): arguments": (
        "fsdp",
        "fsdp._fully_shard",
        "fsdp.elastic._weights",
        "fsdp.memory._resident",
        "fsdp.core._fsdp_param",
        "fsdp.codes._float8",
        "fsdp.core._kit",
        "fsdp.core._fsdp_init",
        "fsdp.core._mesh",
        "fsdp.gates._gate",
        "fsdp._spmd_types",
        "fsdp._upcoming",
    ),
    "Methods of a sharded module": ("fsdp._fsdp_module", "fsdp.schedule", "fsdp.memory._persistent_buffers"),
    "load_state_dict() of a sharded model": ("fsdp._state_dict",),
    "Forward, backward and step": (
        "fsdp.core",
        "fsdp.core._dbuffer",
        "fsdp.elastic._dormant_group",
        "fsdp.core._fsdp_param_group",
        "fsdp.core._fsdp_state",
        "fsdp.bits",
        "fsdp.grads._weight_gradient",
    ),
    "Collectives": ("fsdp.comm",),
    "The planner and its layouts": ("fsdp.layout",),
    "Granularity": ("granularity",),
    "monitor(), memory_report() and fit()": ("fsdp.tools", "fsdp.budget"),
    "reshard_to(), NeighbourCopies and elastic.run()": (
        "elastic",
        "fsdp.elastic._neighbour_copies",
        "fsdp.elastic._optimizer_states",
        "fsdp.elastic._reshard_to",
    ),
    "torch-ragged plan": ("offline", "_command_line"),
    "Placements": (
        "tensor._ownership",
        "tensor._units",
        "tensor._owned_boxes",
        "tensor._global_layout",
        "tensor._box_tensor",
        "tensor._cut_placement",
        "tensor._placement_text",
        "tensor.placement_types",
        "tensor.strided_placement_types",
        "tensor.interleaved_placement_types",
        "testing",
    ),
    "DTensor's functions": (
        "tensor._api",
        "tensor._async_tensor",
        "_ranks.groups",
        "tensor._local_tensor",
        "tensor._redistribute",
        "tensor._route",
    ),
    "Operators": (
        "tensor._dispatch",
        "tensor._ops",
        "tensor._plain_ops",
        "tensor._copied_view",
        "tensor._read",
        "tensor._random",
        "tensor._single_device",
        "tensor._placement_extension",
    ),
    "Random numbers of a single device": ("random",),
    "Plans": ("spmd",),
    "torch-ragged spmd": ("spmd._cli",),
    "Pictures": ("debug", "_picture"),
    "Optimizers": ("optim",),
    "Kernels": ("_kernels",),
    "Checkpoints": ("checkpoint", "tensor._checkpoint", "tensor._hf_storage", "tensor._stored_tensor"),
    "Transfers": ("transfer",),
    "Integrations": ("integrations",),
}

HINTS: dict[str, str] = {
    "changed while unsharded by fully_shard": (
        "A common cause is weight decay or EMA code inside forward. Move it after `optimizer.step()`."
    ),
    "which has no forward: shard its members": "A `ModuleList` or `ModuleDict` is such a module.",
    "is tied to <sharded_originals>": "Call `fully_shard` on the module that has both, and on neither of its parts before.",
    "became a root when it ran its forward": "A validation that calls `model.backbone(x)` before `model(x)` does this.",
    "FSDP does not support deepcopy": "Build the model again, and load its `state_dict()`.",
    "on the meta device: materialize all parameters before forward": (
        "The names in the message are those that are still missing."
    ),
    "is in use by another group": "Gradient accumulation without sync needs as many places as groups.",
    "uneven Shard(0) under a StridedRaggedShard": "Pad dimension 0, or choose another number of tensor-parallel ranks.",
    "holds a parameter of shape <shape> that is not a sharded parameter": (
        "An optimizer made before `fully_shard` holds the old parameters."
    ),
    "its DTensors are on different meshes": "For `clip_grad_norm_`, clip the parameters of each mesh on their own.",
    "must be the same on all ranks, because one rank writes it for all": "A data loader's position is the usual case.",
    "the checkpoint does not fit this model and optimizer": (
        "The list names each tensor that is missing, unknown, or of another shape or dtype."
    ),
    "could not infer output dtype": "This is torch's own message: `mean()` of integers.",
    "share memory: give a target of its own": "A target may not be a view of the source.",
    "ranks are not in ascending order": "torch sorts the ranks of a process group, so such a mesh would mix up shards.",
}
