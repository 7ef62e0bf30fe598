"""The features of ``fully_shard``, of models and of loops with their values; runs in which every legal pair of values occurs.

A run has one value of each feature. :func:`runs` makes few of them, so that each pair of values that may come together occurs
in one at least; :func:`missing` counts. (The package allpairspy made three times as many, 74 of them with pairs that are
refused: it cannot look ahead at constraints.)
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator
from typing import Any

__all__ = [
    "FEATURES",
    "Pair",
    "legal_pairs",
    "missing",
    "pairs_of",
    "random_case",
    "refused_pairs",
    "runs",
    "size_of",
    "why_not",
]

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
        "set_unshard_in_backward",
        "set_collectives",
        "prefetch",
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
PLAIN = {name: values[0] for name, values in FEATURES.items()}
_PLACE = {name: index for index, name in enumerate(FEATURES)}
SIZES = {"dp1": 1, "dp2": 2, "dp3": 3, "hsdp": 4, "tp": 4}

_MOVES = ("reshard_to", "NeighbourCopies")
Pair = tuple[tuple[str, str], tuple[str, str]]

# Pairs that are errors, beyond what the parts of arguments say of each other: what is raised.
REFUSED: list[tuple[tuple[str, Any], tuple[str, Any], str]] = [
    (("placements", "HIERARCHICAL"), ("mesh", ("dp1", "dp2", "dp3", "tp")), "HIERARCHICAL is for a mesh with 2 dimensions"),
    (("placements", ("ZERO1", "ZERO2", "ZERO3")), ("mesh", "hsdp"), "is for a mesh with 1 dimensions"),
    (("type", "complex"), ("optimizer", ("Muon", "Shampoo", "SOAP", "AdamW8bit")), "expected a real"),
    (("mesh", ("dp1", "hsdp")), ("state", "NeighbourCopies"), "takes a 1-D mesh of at least 2 ranks"),
    (("type", "extension"), ("optimizer", "offloaded"), "does not support the tensor type"),
    (("mesh", "tp"), ("cut", "segments"), "the model cuts segments together"),
    (("knob", ("set_persistent_buffers", "set_keep_unsharded_storage")), ("state", _MOVES), "has persistent buffers"),
    (("knob", "set_separate_reduce_scatter_group"), ("state", _MOVES), "has a second process group"),
    (("knob", ("set_collectives", "monitor")), ("state", _MOVES), "has collectives that belong to its mesh"),
    (("optimizer", "in backward"), ("state", _MOVES), "has hooks on its gradient"),
    (("call", "optional"), ("recompute", "reentrant checkpoint"), "is optional and is recomputed in backward"),
]
# Pairs without a meaning, or that the reference cannot follow: why.
LEFT_OUT: list[tuple[tuple[str, Any], tuple[str, Any], str]] = [
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
    (("sync", "replicas"), ("state", "NeighbourCopies"), "there are no replicas"),
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
    """Run number ``seed``: a value of each feature. From ``len(runs())`` on, one for each pair that is refused.

    Such a run has ``refused``, what is raised, and plain values of all other features.
    """
    if seed < len(runs()):
        return {"seed": seed, **runs()[seed]}
    pair, error = refused_pairs()[seed - len(runs())]
    return {"seed": seed, **_plain_around(pair), "refused": error}


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


def _find(table: list[Any], pair: Pair) -> str | None:
    for one, other, why in table:
        for first, second in (pair, pair[::-1]):
            if _is(first, one) and _is(second, other):
                return why
    return None


def _is(found: tuple[str, str], listed: tuple[str, Any]) -> bool:
    values = listed[1] if isinstance(listed[1], tuple) else (listed[1],)
    return found[0] == listed[0] and found[1] in values


@functools.cache
def why_not(pair: Pair) -> tuple[str, str] | None:
    """Why two values do not come together: ("refused", what is raised) or ("left out", the reason); None: they do."""
    for mine, others in (pair, pair[::-1]):
        theirs = _parts(*others)
        for part in _parts(*mine):
            if sentence := part.refuses(theirs):
                return "refused", sentence
    if why := _find(REFUSED, pair):
        return "refused", why
    if why := _find(LEFT_OUT, pair):
        return "left out", why
    return None


def every_pair() -> Iterator[Pair]:
    """Each two values of two features."""
    for (one, values), (other, others) in itertools.combinations(FEATURES.items(), 2):
        for value, another in itertools.product(values, others):
            yield (one, value), (other, another)


def legal_pairs() -> list[Pair]:
    return [pair for pair in every_pair() if why_not(pair) is None]


def refused_pairs() -> list[tuple[Pair, str]]:
    """Each pair that is an error, and what is raised."""
    return [(pair, why[1]) for pair in every_pair() if (why := why_not(pair)) and why[0] == "refused"]


# -- the runs ----------------------------------------------------------------------------------------------------------------


def pairs_of(run: dict[str, str]) -> set[Pair]:
    """The pairs that occur in a run."""
    return set(itertools.combinations([(name, run[name]) for name in FEATURES if name in run], 2))


def missing(made: list[dict[str, str]]) -> set[Pair]:
    """The legal pairs that occur in no run."""
    return set(legal_pairs()).difference(*map(pairs_of, made))


@functools.cache
def runs() -> list[dict[str, str]]:
    """The runs, the same ones in each process: each has a pair that is missing, and as many others as fit."""
    rng, made, left = random.Random(0), list[dict[str, str]](), set(legal_pairs())
    for pair in sorted(left):
        if pair in left:
            # The best of a few: features that are chosen first find more free places.
            best = max((_filled(pair, left, rng) for _ in range(8)), key=lambda run: len(pairs_of(run) & left))
            made.append(best)
            left -= pairs_of(best)
    return made


def _filled(pair: Pair, left: set[Pair], rng: random.Random) -> dict[str, str]:
    """A legal run with ``pair``: of each other feature, the value that brings most of the pairs that are ``left``."""
    for _ in range(100):
        run = dict(pair)
        for name in rng.sample(sorted(set(FEATURES) - set(run)), len(FEATURES) - 2):
            new = {value: [_ordered((name, value), known) for known in run.items()] for value in FEATURES[name]}
            legal = {value: pairs for value, pairs in new.items() if not any(map(why_not, pairs))}
            if not legal:
                break  # Two values that are there leave no value for this feature.
            # Else the plainest one: a failure then has less around it.
            run[name] = max(legal, key=lambda value: len(left.intersection(legal[value])))
        else:
            return {name: run[name] for name in FEATURES}
    raise AssertionError(f"{pair} has no place in any legal run: it is a pair to refuse, or to leave out with a reason")


def _plain_around(pair: Pair) -> dict[str, str]:
    """``pair``, which is refused, and the first legal values of the other features."""
    run = dict(pair)
    for name in FEATURES:
        if name not in run:
            fitting = (v for v in FEATURES[name] if not any(why_not(_ordered((name, v), known)) for known in run.items()))
            run[name] = next(fitting)
    return {name: run[name] for name in FEATURES}


def _ordered(one: tuple[str, str], other: tuple[str, str]) -> Pair:
    return (one, other) if _PLACE[one[0]] < _PLACE[other[0]] else (other, one)
