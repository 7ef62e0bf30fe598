"""The features of ``fully_shard``, of models and of loops with their values, and which of them do not come together."""

from __future__ import annotations

import functools
from typing import Any

from fuzz_cover import Cover, Pair, Rule, find_rule

__all__ = ["COVER", "FEATURES", "random_case", "size_of", "why_not"]

FEATURES: dict[str, tuple[str, ...]] = {
    # What fully_shard gets. The first value of each is the plain one.
    "mesh": ("dp2", "dp3", "hsdp", "tp", "dp1"),
    "placements": ("", "ZERO1", "ZERO2", "ZERO3", "HIERARCHICAL"),
    "cut": ("", "rows", "blocks", "tensor", "segments", "muon_policy", "Shard(0)", "Shard(1)"),
    "precision": ("", "bfloat16", "bfloat16, sums in float32", "float16", "sums in bfloat16", "Float8Policy", "Float4Policy"),
    "offload": ("", "CPUOffloadPolicy", "Offload(parameters=True)", "files", "Offload(optimizer=0.5)"),
    "weights": ("", "uneven", "a rank without"),
    "reshard": ("", "True", "False", "2"),
    "call": ("each block", "list", "optional", "root only"),
    "knob": (
        "",
        "set_max_all_gathers_ahead",
        "set_reduce_scatter_max_input_buffers",
        "set_separate_reduce_scatter_group",
        "set_reshard_after_backward",
        "set_force_sum_reduction_for_comms",
        "set_gradient_divide_factor",
        "set_keep_unsharded_storage",
        "set_persistent_buffers",
        "set_manual_backward_finalization",
        "set_collectives",
        "prefetch",
        "set_schedule",
        "fit",
        "monitor",
    ),
    # The model.
    "ties": ("", "tied"),
    "trains": ("all", "frozen", "unused", "used on one rank", "frozen later"),
    "outputs": ("one", "several", "None", "kept", "dict"),
    "recompute": ("", "checkpoint", "reentrant checkpoint", "compiled"),
    "type": ("plain", "complex", "extension"),
    # The loop.
    "sync": ("", "no sync", "every pass", "is_last_backward", "replicas"),
    "clip": ("", "clip"),
    "scaler": ("", "scaler", "inf on one rank"),
    "between": (
        "",
        "evaluation",
        "forward raises",
        "backward raises",
        "two losses",
        "retain_graph",
        "gradient of input",
        "unshard by hand",
        "zero_grad(False)",
    ),
    "optimizer": ("SGD", "AdamW", "loop", "fused", "Muon", "AdamW8bit", "Shampoo", "SOAP", "in backward", "offloaded"),
    "state": ("", "full state dict", "DCP", "checkpoint", "reshard_to", "NeighbourCopies"),
}
SIZES = {"dp1": 1, "dp2": 2, "dp3": 3, "hsdp": 4, "tp": 4}

_MOVES = ("reshard_to", "NeighbourCopies")
# Pairs that are errors, beyond what the parts of arguments say of each other: what is raised.
REFUSED: list[Rule] = [
    (("placements", "HIERARCHICAL"), ("mesh", ("dp1", "dp2", "dp3", "tp")), "HIERARCHICAL is for a mesh with 2 dimensions"),
    (("placements", ("ZERO1", "ZERO2", "ZERO3")), ("mesh", "hsdp"), "is for a mesh with 1 dimensions"),
    (("type", "complex"), ("optimizer", ("Muon", "Shampoo", "SOAP", "AdamW8bit")), "expected a real"),
    (("mesh", "dp1"), ("state", "NeighbourCopies"), "takes a mesh of at least 2 ranks"),
    (("type", "extension"), ("optimizer", "offloaded"), "does not support the tensor type"),
    (("mesh", "tp"), ("cut", "segments"), "the model cuts segments together"),
    (("knob", ("set_persistent_buffers", "set_keep_unsharded_storage")), ("state", _MOVES), "has persistent buffers"),
    (("knob", "set_separate_reduce_scatter_group"), ("state", _MOVES), "has a second process group"),
    (("knob", ("set_collectives", "monitor")), ("state", _MOVES), "has collectives that belong to its mesh"),
    (("optimizer", "in backward"), ("state", _MOVES), "has hooks on its gradient"),
]
# Pairs without a meaning, or that the reference cannot follow: why.
LEFT_OUT: list[Rule] = [
    (("call", "optional"), ("recompute", "reentrant checkpoint"), "raises in backward, on ranks that recompute it"),
    (
        ("recompute", "reentrant checkpoint"),
        ("outputs", ("kept", "dict")),
        "torch's reentrant checkpoint gives them no gradient",
    ),
    (("recompute", "reentrant checkpoint"), ("between", "gradient of input"), "torch's reentrant checkpoint refuses it"),
    (("type", "complex"), ("scaler", ("scaler", "inf on one rank")), "torch's GradScaler has no complex numbers"),
    (("type", "complex"), ("optimizer", "fused"), "torch's fused optimizers have no complex numbers"),
    (("trains", "unused"), ("state", "DCP"), "torch's get_state_dict expects a state of each parameter"),
    (("trains", "frozen later"), ("state", "DCP"), "torch's get_state_dict leaves out states of what is frozen now"),
    (("recompute", "compiled"), ("between", "retain_graph"), "torch's compiled backward runs once"),
    (("sync", "replicas"), ("placements", FEATURES["placements"][1:]), "there are no replicas"),
    (("sync", "replicas"), ("mesh", ("dp1", "dp2", "dp3", "tp")), "there are no replicas"),
    (
        ("optimizer", "in backward"),
        ("sync", ("no sync", "every pass", "is_last_backward", "replicas")),
        "it steps in each pass",
    ),
    (("optimizer", "in backward"), ("between", ("two losses", "retain_graph", "backward raises")), "it steps in each pass"),
    (("optimizer", "in backward"), ("clip", "clip"), "gradients are used before they can be clipped"),
    (("optimizer", "in backward"), ("scaler", ("scaler", "inf on one rank")), "gradients are used before they are unscaled"),
    (("optimizer", "offloaded"), ("offload", ("", "CPUOffloadPolicy")), "there are no states elsewhere"),
    (("optimizer", "offloaded"), ("state", ("reshard_to", "NeighbourCopies")), "they refuse its policy"),
    (("reshard", "2"), ("mesh", ("dp1", "dp3")), "2 does not divide the ranks"),
    (("weights", ("uneven", "a rank without")), ("mesh", "dp1"), "there is one rank"),
]


def size_of(seed: int) -> int:
    """How many ranks the run needs."""
    return SIZES[random_case(seed)["mesh"]]


def random_case(seed: int) -> dict[str, Any]:
    """Run number ``seed``: see :meth:`Cover.case`."""
    return COVER.case(seed)


# -- which pairs are legal ---------------------------------------------------------------------------------------------------


def arguments(feature: str, value: str) -> dict[str, Any]:
    """What a value gives ``fully_shard``, as ``parts_of`` takes it."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    from torch_ragged import fsdp
    from torch_ragged.optim import muon_policy

    table: dict[tuple[str, str], dict[str, Any]] = {
        ("cut", "muon_policy"): {"orig_param_policy": muon_policy()},
        ("precision", "Float8Policy"): {"mp_policy": fsdp.Float8Policy()},
        ("precision", "Float4Policy"): {"mp_policy": fsdp.Float4Policy()},
        ("offload", "CPUOffloadPolicy"): {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        ("offload", "Offload(parameters=True)"): {"offload_policy": fsdp.Offload(parameters=True)},
        ("offload", "files"): {"offload_policy": fsdp.Offload(parameters="files", to="folder")},
        ("offload", "Offload(optimizer=0.5)"): {"offload_policy": fsdp.Offload(optimizer=0.5)},
        ("weights", "uneven"): {"weights": [3, 1]},
        ("weights", "a rank without"): {"weights": [1, 0]},
        ("reshard", "2"): {"reshard_after_forward": 2},
        ("call", "list"): {"module": [None, None]},
        ("call", "optional"): {"optional": True},
    }
    if feature == "placements" and value:
        return {"placements": getattr(fsdp, value)}
    return table.get((feature, value), {})


@functools.cache
def _parts(feature: str, value: str) -> list[Any]:
    from torch_ragged.fsdp._fsdp_module import part_of_collectives
    from torch_ragged.fsdp._fully_shard import parts_of
    from torch_ragged.fsdp.core._fsdp_init import part_of_dtensor
    from torch_ragged.fsdp.core.encodings._contiguous import ShardPart
    from torch_ragged.fsdp.core.encodings._tensor_types import TypePart
    from torch_ragged.fsdp.elastic._reshard_to import part_of_move
    from torch_ragged.fsdp.memory._persistent_buffers import PERSISTENT

    later = {
        ("mesh", "tp"): lambda: [part_of_dtensor("up.weight")],
        ("cut", "Shard(0)"): lambda: [ShardPart("up.weight", 0)],
        ("cut", "Shard(1)"): lambda: [ShardPart("up.weight", 1)],
        ("knob", "set_persistent_buffers"): lambda: [PERSISTENT],
        ("knob", "set_collectives"): lambda: [part_of_collectives('set_collectives("copy_engine")')],
        ("type", "extension"): lambda: [TypePart("down.weight", "Wrapped")],
        ("state", "reshard_to"): lambda: [part_of_move("reshard_to")],
        ("state", "NeighbourCopies"): lambda: [part_of_move("NeighbourCopies")],
    }
    made = later.get((feature, value))
    return made() if made is not None else parts_of(arguments(feature, value))


def why_not(pair: Pair) -> tuple[str, str] | None:
    """Why two values do not come together: ("refused", what is raised) or ("left out", the reason); None: they do."""
    for mine, others in (pair, pair[::-1]):
        theirs = _parts(*others)
        for part in _parts(*mine):
            if sentence := part.refuses(theirs):
                return "refused", sentence
    if why := find_rule(REFUSED, pair):
        return "refused", why
    if why := find_rule(LEFT_OUT, pair):
        return "left out", why
    return None


RISKY = ("mesh", "placements", "precision", "offload", "reshard", "call", "trains", "recompute", "sync", "between")
COVER = Cover(FEATURES, why_not, (*RISKY, "optimizer", "state"))
