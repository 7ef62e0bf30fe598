"""What the errors of each part of the package mean, for docs/make_errors.py.

``AREAS``: a title to the modules of the part, and what its errors mean and what to do. ``HINTS``: a piece of a message to what
the message does not say itself.
"""

AREAS: dict[str, tuple[tuple[str, ...], str]] = {
    "Import": (
        ("_register",),
        """
        `import torch_ragged` checks the version of torch and the layout of each function of torch that it extends. If
        one is unknown, the import fails, because a later answer could be wrong. Install a supported torch (2.11 to
        2.15); `torch_ragged.registration_report()` lists what an import changes.
        """,
    ),
    "Ranks that were called differently": (
        ("_ranks.agreement", "_ranks.comparison"),
        """
        Ranks compare what they were asked for before they communicate. Either a rank passed other arguments (a seed,
        a config or a branch that depends on the rank), or a call failed on the named ranks only. Mend that rank; the
        others are as they were.
        """,
    ),
    "A rank died, or does not answer": (
        ("_ranks.peers", "_ranks.store"),
        """
        A collective failed. `torch_ragged.PeerError` begins with the collective and its parameters, and then names the
        ranks: `rank 2 died: process 4711 on host a has ended`, `rank 2 is stopped`, `rank 2 is not reachable`, or
        `rank 2 lives and has not answered`. Read the log of these ranks, mend the cause, and restart the run from its
        last checkpoint. [Running](running.md) says how soon ranks find out.
        """,
    ),
    "fully_shard(): arguments": (
        (
            "fsdp",
            "fsdp._fully_shard",
            "fsdp.elastic._weights",
            "fsdp.memory._resident",
            "fsdp.core._fsdp_param",
            "fsdp.codes._float8",
            "fsdp.core._kit",
            "fsdp.core._fsdp_init",
            "fsdp.core._mesh",
            "fsdp.gates._roll_call",
            "fsdp._spmd_types",
        ),
        """
        The module, the mesh or a policy cannot be used together as they were given. Nothing was changed: correct the
        argument, and call again. [Switching from FSDP2](fsdp.md) has a table of the arguments, [meshes](meshes.md)
        what may stand beside tensor and expert parallelism.
        """,
    ),
    "Methods of a sharded module": (
        ("fsdp._fsdp_module", "fsdp.memory._persistent_buffers", "fsdp.memory._slots"),
        """
        A method of `FSDPModule` got a value that it does not take, or was called at a time when it cannot act, such
        as inside a backward. Call methods between steps, with the values that the message names.
        """,
    ),
    "load_state_dict() of a sharded model": (
        ("fsdp.core._state_dict",),
        """
        A value does not fit its parameter. All ranks raise, and no value was copied. The texts of shapes and types are
        those of `nn.Module`. [Loading a state dict](fsdp.md#loading-a-state-dict) says what may be loaded.
        """,
    ),
    "Forward, backward and step": (
        (
            "fsdp.core",
            "fsdp.core._dbuffer",
            "fsdp.elastic._dormant_group",
            "fsdp.core._fsdp_param_group",
            "fsdp.core._fsdp_state",
            "fsdp.core._weight_gradient",
        ),
        """
        The model was used in an order that its hooks cannot follow: parameters changed while they were unsharded, a
        module ran whose shards are not complete, or forward was called on an inner module first. These errors come
        where FSDP2 would lose a change or a gradient.
        """,
    ),
    "Collectives": (
        ("fsdp.comm",),
        """
        Ranks issued different collectives, or a kind of collective is not available here. If a rank waits alone, look
        at the log of the ranks that the message names: theirs is the first error. `set_collectives("nccl")` goes back
        to the default.
        """,
    ),
    "The planner and its layouts": (
        ("fsdp.layout",),
        """
        `plan_layout`, `advise` or `BufferLayout` got numbers that are no layout. `fully_shard` never raises these.
        """,
    ),
    "Granularity": (
        ("granularity",),
        """
        `rows`, `blocks` and `TensorSpec` take positive integers. [Granularity and the planner](granularity.md) says
        which to choose.
        """,
    ),
    "monitor() and memory_report()": (
        ("fsdp.tools",),
        """
        One monitor at a time watches a model, inside its `with` block.
        """,
    ),
    "reshard_to() and NeighbourCopies": (
        ("fsdp.elastic._neighbour_copies", "fsdp.elastic._reshard_to"),
        """
        The model cannot move to the other mesh as it is. Model and optimizer are unchanged on all ranks. [Moving
        weights](moving_weights.md) has the conditions; where the message asks for a checkpoint, load the last one.
        """,
    ),
    "torch-ragged plan": (
        ("offline", "_command_line"),
        """
        The command ends with status 2 and one of these lines. `torch-ragged plan --help` has examples.
        """,
    ),
    "Placements": (
        (
            "tensor._ownership",
            "tensor._units",
            "tensor._owned_boxes",
            "tensor._global_layout",
            "tensor._box_tensor",
            "tensor.placement_types",
            "tensor.strided_placement_types",
            "tensor.interleaved_placement_types",
        ),
        """
        The units do not fit the shape or the mesh, or the placements cannot stand beside each other.
        [Placements](placements.md) has the table of what goes together.
        """,
    ),
    "DTensor's functions": (
        (
            "tensor._api",
            "tensor._async_tensor",
            "_ranks.groups",
            "tensor._local_tensor",
            "tensor._redistribute",
            "tensor._route",
        ),
        """
        `distribute_tensor`, `from_local` and `redistribute` got placements that have no meaning there. The tensor is
        unchanged.
        """,
    ),
    "Operators": (
        (
            "tensor._dispatch",
            "tensor._ops",
            "tensor._plain_ops",
            "tensor._copied_view",
            "tensor._read",
            "tensor._random",
            "tensor._single_device",
            "tensor._placement_extension",
        ),
        """
        The op has no answer on shards. The message begins with the op and its placements, then has one of these
        reasons, and ends with the placement to redistribute to, mostly `x.redistribute(placements=[Replicate()])`.
        [Operators](op_coverage.md) lists every op.
        """,
    ),
    "Random numbers of a single device": (
        ("random",),
        """
        `deferred_init` or `materialize` met a construction that it cannot replay. [One device's numbers](random.md) says
        what they do.
        """,
    ),
    "Plans": (
        ("spmd",),
        """
        A call of a plan is wrong by itself, or the plan does not fit the model or the mesh. A `PlanError` lists all
        problems at once, each with the rules as they were written. It is the same on all ranks, and nothing was changed.
        """,
    ),
    "torch-ragged spmd": (
        ("spmd._cli",),
        """
        The command ends with status 2 and one of these lines. If the plan does not fit the model or the mesh, it prints the
        lines of the `PlanError`. `torch-ragged spmd --help` has examples.
        """,
    ),
    "Pictures": (
        ("debug", "_picture"),
        """
        `debug.visualize` draws DTensors, as text, `.svg` or `.png`.
        """,
    ),
    "Optimizers": (
        ("optim",),
        """
        An option or a parameter does not fit the optimizer, or a gradient cannot be used. No parameter was changed by
        this step, on any rank.
        """,
    ),
    "Kernels": (
        ("_kernels",),
        """
        `TORCH_RAGGED_KERNELS` chooses between Triton kernels and their twins in torch; the other messages are about
        calls of the kernels themselves.
        """,
    ),
    "Checkpoints": (
        ("checkpoint", "tensor._checkpoint", "tensor._hf_storage", "tensor._stored_tensor"),
        """
        A `CheckpointError` is raised on every rank, and names the file or the parameter. After an error of `save`,
        readers see the previous checkpoint. After an error of `load`, parameters and optimizer states are as they
        were. If a file is damaged, load an older step: `torch-ragged checkpoint verify FOLDER` says which steps are
        whole.
        """,
    ),
    "Transfers": (
        ("transfer",),
        """
        A wrong call of `plan()` or `run()` is a `ValueError` or `TypeError` on every rank, before any element
        travels. A `TransferError` means that a rank failed on the way: the source is unchanged, the target is not
        complete, and the plan must be made anew.
        """,
    ),
    "Integrations": (
        ("integrations",),
        """
        The other program has a version or a configuration in which its model would not be sharded by torch_ragged.
        Its page among the guides has the versions that were tested.
        """,
    ),
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
