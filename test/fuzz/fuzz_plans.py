"""The features of ``fully_shard`` under a plan: pairs of them with those of plans. And the training of such a run.

A plan's units are ``fully_shard`` with the options of :mod:`fuzz_pairs`. So the table is that one, without what a rank may do
alone, and with what plans add: the mode, the form of the batch, what the plan cuts, how the model is made.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import fuzz_pairs
import fuzz_pairs_training
import torch
from fuzz_cover import Cover, Pair, Rule, find_rule
from fuzz_pairs_training import Net, PairTraining
from fuzz_training import full
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from torch_ragged._register._spmd import compute_as_torch
from torch_ragged.fsdp._fully_shard import parts_of
from torch_ragged.random import single_device
from torch_ragged.spmd import Plan, deferred_init, parallelize

__all__ = ["COVER", "FEATURES", "PlanTraining", "random_case", "size_of"]

_WITHOUT = {  # What needs another program on each rank, or groups that move.
    "mesh": ("dp1",),
    "placements": ("HIERARCHICAL",),
    "cut": ("Shard(0)", "Shard(1)"),
    "call": ("list", "optional"),
    "trains": ("used on one rank",),
    "type": ("extension",),
    "scaler": ("inf on one rank",),
    "between": ("unshard by hand", "gradient of input"),
    "state": ("reshard_to", "NeighbourCopies"),
}
FEATURES: dict[str, tuple[str, ...]] = {
    "mode": ("eager", "static"),
    "batch": ("whole", "own rows"),
    "made": ("", "deferred_init"),
    "boundary": ("", "features", "vocabulary"),
    **{name: tuple([v for v in values if v not in _WITHOUT.get(name, ())]) for name, values in fuzz_pairs.FEATURES.items()},
}
REFUSED: list[Rule] = [
    (("placements", ("ZERO1", "ZERO2", "ZERO3")), ("mesh", "hsdp"), "is for 1 mesh dimensions"),
]
LEFT_OUT: list[Rule] = [
    (("boundary", ("features", "vocabulary")), ("mesh", ("dp2", "dp3", "hsdp")), "no dimension of the mesh is left for it"),
]


def size_of(seed: int) -> int:
    """How many ranks the run needs."""
    return fuzz_pairs.SIZES[random_case(seed)["mesh"]]


def random_case(seed: int) -> dict[str, Any]:
    """Run number ``seed``: see :meth:`Cover.case`."""
    return COVER.case(seed)


def why_not(pair: Pair) -> tuple[str, str] | None:
    """Why two values do not come together, as :func:`fuzz_pairs.why_not` says it."""
    for mine, others in (pair, pair[::-1]):
        if mine[0] == "boundary" and mine[1] and others[0] in fuzz_pairs.FEATURES and others[0] != "mesh":
            if fuzz_pairs.why_not((("mesh", "tp"), others)):
                return "left out", "it needs tensor parallelism, which excludes that"
        if mine[0] == "mode":
            parts = parts_of({"dp_mesh_dims": SimpleNamespace(counts_once=True)})  # As the units of a plan have them.
            theirs = fuzz_pairs._parts(*others) if others[0] in fuzz_pairs.FEATURES else []
            for one, many in [(each, theirs) for each in parts] + [(each, parts) for each in theirs]:
                if sentence := one.refuses(many):
                    return "refused", sentence
    if why := find_rule(REFUSED, pair):
        return "refused", why
    if why := find_rule(LEFT_OUT, pair):
        return "left out", why
    return fuzz_pairs.why_not(pair) if all(name in fuzz_pairs.FEATURES for name, _ in pair) else None


COVER = Cover(FEATURES, why_not)


class PlanTraining(PairTraining):
    """One run: the model is that of one process, and ``parallelize`` distributes it. The loss is that of the whole batch."""

    def __init__(self, case: dict[str, Any]) -> None:
        super().__init__(case)
        self.whole = fuzz_pairs_training.mesh_of(case["mesh"])
        if case["knob"] == "set_gradient_divide_factor":
            self.divisor *= self.ranks  # The loss is a mean over the whole batch: nothing else divides.

    def build(self, tp: DeviceMesh | None) -> Net:
        torch.manual_seed(self.case["seed"])
        make = lambda: Net(self.case, self.dtype)  # noqa: E731  # No rank cuts anything by itself.
        return deferred_init(make) if self.case["made"] and hasattr(self, "plain") else make()  # type: ignore[no-any-return]

    def plan(self, options: dict[str, Any]) -> Plan:
        case, names = self.case, self.whole.mesh_dim_names or ()
        dims = tuple([name for name in names if name != "tp"])
        plan = Plan()
        for path in ("<in:ids>", "<in:x>"):
            if case["batch"] == "own rows":
                plan.own_rows(path, dims)
            else:
                plan.shard(path, (Shard(0),) * len(dims), dims)
        if "tp" in names:
            plan.shard(r"blocks\.\d+\.up\.(weight|bias)", Shard(0), "tp").shard(r"blocks\.\d+\.down\.weight", Shard(1), "tp")
            cuts = case["boundary"] == "features"
            plan.redistribute(r"blocks\.\d+\.down.<out>", Shard(1) if cuts else Replicate(), "tp")
            if case["boundary"] == "vocabulary":
                plan.shard(r"(table|head)\.weight" if case["ties"] else r"head\.weight", Shard(0), "tp")
                plan.redistribute("head.<out>", Replicate(), "tp")
                if case["ties"]:
                    plan.redistribute("table.<out>", Replicate(), "tp")
            elif cuts:  # Between the matrices, as sequence parallelism cuts positions; inputs are not cut there.
                plan.redistribute(r"blocks\.\d+\.up.<in>", Replicate(), "tp").redistribute("head.<in>", Replicate(), "tp")
        if case["call"] != "root only":
            plan.unit(r"blocks\.\d+", dims, **options)
        return plan.unit("", dims, **options).default(Replicate())

    def distribute(self, **options: Any) -> None:
        del options["mesh"]
        parallelize(self.model, self.plan(options), self.whole, mode=self.case["mode"])

    def forward(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        own = self.case["batch"] == "own rows"
        parts = [self.batch(number, rank) for rank in ([self.rank] if own else range(self.ranks))]
        ids, x = (torch.cat(each) for each in zip(*parts))
        x.requires_grad_(torch.is_grad_enabled())
        return self.model(ids, x), x

    def compare(self, found: torch.Tensor, expected: torch.Tensor, what: str, scale: float) -> None:
        if "output" in what and isinstance(found, DTensor):
            found = full(found)[3 * self.rank : 3 * self.rank + 3]
        super().compare(found, expected, what, scale)

    def run(self) -> str:
        try:
            return super().run()
        finally:
            compute_as_torch()
            single_device(False)
