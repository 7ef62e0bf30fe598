"""Random ``fully_shard`` cases as plain data: a model, a mesh, what each call gets, knobs, and a sequence of actions."""

from __future__ import annotations

import random
import zlib
from typing import Any

from fuzz_model import leaves_of, nodes_of, random_tree

__all__ = ["POLICIES", "granularity_of", "owner_of", "random_case", "size_of"]

MESHES = {
    1: (("dp", (1,)), ("hsdp", (1, 1))),
    2: (("dp", (2,)), ("dp", (2,)), ("hsdp", (1, 2)), ("hsdp", (2, 1)), ("tp", (1, 2)), ("tp", (2, 1))),
    3: (("dp", (3,)), ("dp", (3,)), ("hsdp", (1, 3)), ("hsdp", (3, 1))),
    4: (("dp", (4,)), ("dp", (4,)), ("hsdp", (2, 2)), ("hsdp", (2, 2)), ("hsdp", (1, 4)), ("hsdp", (4, 1)), ("tp", (2, 2)))
    + (("tp", (2, 2)), ("hsdp_tp", (2, 1, 2)), ("hsdp_tp", (1, 2, 2))),
}
RANKS = (1, 2, 2, 2, 2, 3, 4, 4, 4)
POLICIES = ("none", "elements", "rows2", "rows3", "blocks", "tensor", "mixed")
OPTIMIZERS = ("sgd", "momentum", "adamw", "adamw", "adamw_loop", "muon", "adamw8bit")


def size_of(seed: int) -> int:
    """How many ranks the case of ``seed`` needs."""
    return random.Random(seed).choice(RANKS)


def random_case(seed: int) -> dict[str, Any]:
    """The case of ``seed``: equal on all ranks, printable, and all that a replay needs."""
    rng = random.Random(seed)
    size = rng.choice(RANKS)
    kind, mesh = rng.choice(MESHES[size])
    case: dict[str, Any] = {
        "seed": seed,
        "size": size,
        "mesh": (kind, mesh),
        "width": rng.randint(2, 6),
        "rows": rng.randint(1, 3),
    }
    case["dtype"] = rng.choice(("float64", "float64", "float32"))
    case["tree"] = random_tree(rng, 2, parallel="tp" in kind)
    case["policy"], case["alike"] = rng.choice(POLICIES), rng.random() < 0.6
    case["mp"] = _random_policy(rng)
    case["placements"] = None
    if kind == "dp" and rng.random() < 0.3:
        case["placements"] = rng.choice(("ZERO1", "ZERO2", "ZERO3"))
    elif kind == "hsdp" and rng.random() < 0.3:
        case["placements"] = "HIERARCHICAL"
    case["offload"] = rng.random() < 0.15
    _choose_calls(rng, case)
    case["ties"] = _random_ties(rng, case)
    case["knobs"] = _random_knobs(rng, case)
    case["optimizer"] = rng.choice(OPTIMIZERS)
    case["actions"] = _random_actions(rng, case)
    return case


def _random_policy(rng: random.Random) -> dict[str, Any] | None:
    if rng.random() < 0.65:
        return None
    param = rng.choice((None, "bfloat16", "bfloat16", "float32"))
    policy: dict[str, Any] = {"param_dtype": param, "reduce_dtype": rng.choice((None, "float32", "float32", "bfloat16"))}
    policy |= {"output_dtype": rng.choice((None, None, "float32")), "cast_forward_inputs": rng.random() < 0.8}
    return policy


def _choose_calls(rng: random.Random, case: dict[str, Any]) -> None:
    """Mark the nodes that ``fully_shard`` is called on: ``shard`` has its options; ``list`` joins children of one parent."""
    kind, mesh = case["mesh"]
    shards = mesh[0] if kind in ("dp", "tp") else mesh[1]
    for name, node in nodes_of(case["tree"]):
        if name and (rng.random() > (0.55 if "children" in node else 0.3) or node.get("shard")):
            continue
        reshard = rng.choice((None, None, True, True, False, *[k for k in (1, 2, 3, 4) if shards % k == 0]))
        node["shard"] = {"reshard_after_forward": reshard}
        if not case["alike"]:
            node["shard"]["policy"] = rng.choice(POLICIES)
        if rng.random() < 0.08:
            node["shard"]["shard_fn"] = True
    for _, node in nodes_of(case["tree"]):
        children = node.get("children", ())
        if len(children) > 1 and rng.random() < 0.15 and all("shard" not in below for _, below in _below(children[:2])):
            node["list"] = {"reshard_after_forward": rng.choice((None, True, False))}


def _below(children: Any) -> list[tuple[str, dict[str, Any]]]:
    return [pair for child in children for pair in nodes_of(child)]


def owner_of(case: dict[str, Any], leaf: str) -> str:
    """The name of the call whose group has the parameters of ``leaf``: a module's name, with ``[list]`` for a list of its."""
    nodes, name = dict(nodes_of(case["tree"])), leaf
    while name:
        if "shard" in nodes[name]:
            return name
        parent, _, last = name.rpartition(".")
        if "list" in nodes[parent] and last in ("0", "1"):
            return parent + "[list]"
        name = parent
    return ""


def _random_ties(rng: random.Random, case: dict[str, Any]) -> list[Any]:
    """Pairs of linear leaves of one group that share their weight."""
    linear: dict[Any, list[str]] = {}
    for name, leaf in leaves_of(case["tree"]):
        if leaf["kind"] == "linear" and "frozen" not in leaf:
            linear.setdefault((owner_of(case, name), leaf.get("dtype")), []).append(name)
    ties = []
    for names in linear.values():
        if len(names) > 1 and rng.random() < 0.6:
            ties.append(((names[0] + ".main", "weight"), (names[-1] + ".main", "weight")))
    return ties


def _random_knobs(rng: random.Random, case: dict[str, Any]) -> dict[str, Any]:
    knobs: dict[str, Any] = {}

    def maybe(share: float, name: str, *values: Any) -> None:
        if rng.random() < share:
            knobs[name] = rng.choice(values)

    maybe(0.25, "set_max_all_gathers_ahead", 0, 1, 5)
    maybe(0.25, "set_reduce_scatter_max_input_buffers", 2, 3)
    maybe(0.15, "set_separate_reduce_scatter_group", True)
    maybe(0.2, "set_reshard_after_backward", False)
    maybe(0.1, "set_reshard_after_forward", True, False)
    maybe(0.1, "set_force_sum_reduction_for_comms", True)
    maybe(0.15, "prefetch", 1, 2)
    maybe(0.1, "set_keep_unsharded_storage", True)
    maybe(0.12, "set_gradient_divide_factor", 1.0, 3.0)
    maybe(0.1, "set_manual_backward_finalization", True)
    maybe(0.12, "collectives", "nccl", "copy_engine", "auto")
    maybe(0.15, "set_persistent_buffers", True)
    return knobs


def _random_actions(rng: random.Random, case: dict[str, Any]) -> list[dict[str, Any]]:
    """Two to four training steps with other things between them."""
    kind, mesh = case["mesh"]
    actions: list[dict[str, Any]] = []
    others = ("eval", "fail_forward", "fail_backward", "state_dict", "load", "knob", "unshard", "optimizer_state", "double")
    for _ in range(rng.randint(2, 4)):
        while rng.random() < 0.4:
            actions.append({"do": rng.choice(others), "choice": rng.random()})
        syncs = ["last", "last", "all"]
        if "hsdp" in kind and case["placements"] is None and "set_manual_backward_finalization" not in case["knobs"]:
            syncs += ["replicas", "replicas"]
        if case["placements"] == "ZERO1" or "set_persistent_buffers" in case["knobs"]:
            syncs = ["all"]
        step: dict[str, Any] = {"do": "train", "micro": rng.choice((1, 1, 2, 3)), "sync": rng.choice(syncs)}
        step |= {"eval_between": rng.random() < 0.15, "optimizer": rng.random() < 0.8, "empty": rng.random() < 0.05}
        step["clip"] = rng.choice((None, None, 0.1, 100.0))
        step["zero"] = rng.choice(("none", "none", "zero", "no"))
        actions.append(step)
    return actions


def granularity_of(policy: str, fqn: str) -> Any:
    """What an ``orig_param_policy`` of that name returns for a parameter."""
    from torch_ragged.fsdp import blocks, elements, rows, tensor

    table = {
        "none": None,
        "elements": elements(),
        "rows2": rows(2),
        "rows3": rows(3),
        "blocks": blocks(2, 2),
        "tensor": tensor(),
    }
    if policy == "mixed":
        return list(table.values())[zlib.crc32(fqn.encode()) % len(table)]
    return table[policy]
