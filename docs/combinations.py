"""The features of ``fully_shard``, one example of each, and what they say of each other: the table of docs/combinations.md.

``conf.py`` prints it when the site is built. It needs no process group.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace

from torch.distributed.fsdp import CPUOffloadPolicy

from torch_ragged.fsdp import HIERARCHICAL, ZERO1, ZERO2, ZERO3, Float4Policy, Float8Policy, Offload, float8_weight
from torch_ragged.fsdp._fsdp_module import part_of_collectives
from torch_ragged.fsdp._fully_shard import parts_of
from torch_ragged.fsdp._spmd_types import AnnotationPart
from torch_ragged.fsdp.core._fsdp_init import part_of_dtensor
from torch_ragged.fsdp.core._kit import FeaturePart
from torch_ragged.fsdp.core.encodings._contiguous import ShardPart
from torch_ragged.fsdp.core.encodings._tensor_types import TypePart
from torch_ragged.fsdp.elastic._dormant_group import OutsideMesh
from torch_ragged.fsdp.elastic._reshard_to import part_of_move
from torch_ragged.fsdp.memory._persistent_buffers import PERSISTENT
from torch_ragged.fsdp.offload._offloaded_optimizer import CUTS_STATES
from torch_ragged.optim import muon_policy

PHASES = Float8Policy(weight_factory=float8_weight, tile=(1, 128), backward=Float8Policy())
ARGUMENTS = (
    ("a list of modules", {"module": [None, None]}),
    ("`optional=True`", {"optional": True}),
    ("`dp_mesh_dims`", {"dp_mesh_dims": "DataParallelMeshDims(shard='dp')"}),
    ("`parallelize`", {"dp_mesh_dims": SimpleNamespace(counts_once=True)}),
    ("`CPUOffloadPolicy()`", {"offload_policy": CPUOffloadPolicy()}),
    ("`Offload()`", {"offload_policy": Offload()}),
    ("`offload_policy={name: ...}`", {"offload_policy": {"0.weight": CPUOffloadPolicy()}}),
    ('`Offload(parameters="files")`', {"offload_policy": Offload(parameters="files", to="folder")}),
    ("`Float8Policy`", {"mp_policy": Float8Policy()}),
    ("`Float4Policy`", {"mp_policy": Float4Policy()}),
    ("`Float8Policy(backward=)`", {"mp_policy": PHASES}),
    ("`weights`", {"weights": [3, 2]}),
    ("`orig_param_policy=muon_policy(...)`", {"orig_param_policy": muon_policy()}),
    ("`reshard_after_forward=k`", {"reshard_after_forward": 2}),
    ("`ZERO1`", {"placements": ZERO1}),
    ("`ZERO2`", {"placements": ZERO2}),
    ("`ZERO3`", {"placements": ZERO3}),
    ("`HIERARCHICAL`", {"placements": HIERARCHICAL}),
)
OTHERS = (
    ("a rank outside of the mesh", "", OutsideMesh(7, "DeviceMesh((4,))")),
    ("a parameter placed as `Shard(0)`", "", ShardPart("head.weight", 0)),
    ("a parameter placed as `Shard(1)`", "", ShardPart("head.weight", 1)),
    ("a tensor type with `fsdp_pre_all_gather`", "", TypePart("head.weight", "NF4Tensor")),
    ("a DTensor of tensor parallelism", "", part_of_dtensor("head.weight")),
    ("plain parameters annotated by `spmd_types`", "", AnnotationPart()),
    ("`set_persistent_buffers()`", "later", PERSISTENT),
    ('`set_collectives("copy_engine")`', "later", part_of_collectives('set_collectives("copy_engine")')),
    ("`set_custom_all_gather`", "later", part_of_collectives("set_custom_all_gather")),
    ("`reshard_to`", "later", part_of_move("reshard_to")),
    ("`NeighbourCopies`", "later", part_of_move("NeighbourCopies")),
    ("`offloaded()` with states elsewhere", "later", CUTS_STATES),
)


def features() -> list[tuple[str, str, FeaturePart]]:
    """Each feature as the page names it, the argument that brings it, and an example of its part."""
    written = [(text, next(iter(given)), parts_of(given)) for text, given in ARGUMENTS]
    return [*((text, name, part) for text, name, parts in written for part in parts), *OTHERS]


def pairs() -> Iterator[tuple[str, str, str | None]]:
    """Each two features that a program can use together: their names, and the sentence if they do not work together."""
    for (first, one, a), (second, other, b) in itertools.combinations(features(), 2):
        if one != other or not one:
            yield first, second, a.refuses([b]) or b.refuses([a])


def table() -> list[str]:
    """Lines of Markdown: the features, and the pairs that are refused, with the sentence that is raised."""
    found = list(pairs())
    refused = [f"| {first} | {second} | `{sentence}` |" for first, second, sentence in found if sentence is not None]
    names = ", ".join(name for name, *_ in features())
    counts = f"Of {len(found)} pairs, {len(found) - len(refused)} work. These do not:"
    return [f"Features: {names}.", "", counts, "", "| feature | does not work with | the error |", "|---|---|---|", *refused]
