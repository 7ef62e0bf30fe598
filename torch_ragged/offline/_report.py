"""The report of the planning tool: tables of all FSDP sizes, recommended sizes and advice, as text and as JSON.

Nothing here plans a layout, except for the advice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from torch_ragged.fsdp.layout._advice import advise
from torch_ragged.offline._fit import Fitting
from torch_ragged.offline._memory import Budget, Precision, collectives, offload_fits, weighted_memory, zero_memory
from torch_ragged.offline._model_plan import ModelPlan
from torch_ragged.offline._models import Model
from torch_ragged.offline._muon import MuonPlan

__all__ = ["Report", "bytes_text"]

_BESIDE = ("in host memory", "in files")


@dataclass(frozen=True)
class Report:
    """A model planned at several FSDP sizes.

    Attributes:
        model: the model.
        granularity: the granularity of its parameters, in words.
        precision: the dtypes, which give bytes per element.
        replicas: the number of replicas of the sharded model (HSDP). The world has ranks * replicas ranks.
        limit: a size is recommended if the padding of the whole model, relative to its parameters, is at most this.
        plans: one plan per FSDP size, in ascending order.
        budget: the bytes of each rank, for the table of offload; None: no such table.
        fitting: by FSDP size, whether a step fits; None: no such table.
        muon: Muon's matrices at each FSDP size; None: no such table.
    """

    model: Model
    granularity: str
    precision: Precision
    replicas: int
    limit: float
    plans: tuple[ModelPlan, ...]
    budget: Budget | None = None
    muon: tuple[MuonPlan, ...] | None = None
    fitting: Mapping[int, Fitting] | None = None

    @property
    def recommended(self) -> list[ModelPlan]:
        return [plan for plan in self.plans if plan.ragged.padding_fraction <= self.limit and self._may_fit(plan)]

    @property
    def fits(self) -> bool:
        """Whether a step fits in the memory, and the model in the budget, if they are given, each at one of the FSDP sizes."""
        return any(map(self._may_fit, self.plans)) and any(map(self._may_offload, self.plans))

    def _may_fit(self, plan: ModelPlan) -> bool:
        return self.fitting is None or self.fitting[plan.ranks].fits

    def _may_offload(self, plan: ModelPlan) -> bool:
        fits = offload_fits(plan.ragged, self.precision, self.budget).values() if self.budget else ()
        return self.budget is None or any(fit.used is not None for fit in fits)

    @cached_property
    def advice(self) -> list[str]:
        """Advice for the groups over the limit, at the smallest FSDP size that is not recommended."""
        over = [plan for plan in self.plans if plan.ragged.padding_fraction > self.limit and not plan.ragged.weights]
        return advise(over[0].group_layouts(), self.limit) if over else []

    def text(self) -> str:
        """The whole report as text for a terminal."""
        precision, replicas = self.precision, self.replicas
        title = [
            f"{self.model.name}: {self.model.numel:,} parameters in {self.model.num_tensors:,} tensors, "
            f"{len(self.model.groups):,} groups; {self.granularity}",
            f"{_dtype(precision.shard)} parameters under MixedPrecisionPolicy({_dtype(precision.param)}, "
            f"{_dtype(precision.reduce)}), {precision.states} optimizer values in {_dtype(precision.optimizer)}; "
            f"shards are multiples of {precision.alignment} elements",
            "For others: --shard-dtype, --param-dtype, --reduce-dtype, --states, --optimizer-dtype",
        ]
        if replicas > 1:
            title.append(f"{replicas:,} replicas: the world is {replicas:,} times the FSDP size")
        tables = [
            _grid("Padding, % of the parameters", self._padding_rows()),
            _grid("Bytes per collective: of the largest group, and of all groups together", self._collective_rows()),
            _grid("Memory per rank: torch_ragged's, and the totals of the others", self._memory_rows()),
        ]
        for plan in self.plans:
            if plan.ragged.weights:
                tables.append(_grid("Memory of each rank, ZeRO-3, in proportion to weights", self._weight_rows(plan)))
        if self.budget is not None:
            given = ", ".join(f"{bytes_text(value)} {where}" for where, value in self._tiers(self.budget).items())
            title_of_offload = f"Offload, ZeRO-3, {given} per rank: parameters of the largest model, and what this one needs"
            tables.append(_grid(title_of_offload, self._offload_rows(self.budget)))
        if self.fitting:
            tables.append(self._fitting_text(list(self.fitting.values())))
        if self.muon is not None:
            title_of_muon = "Muon's matrices under muon_policy, blocks only, modelled: ms per step, work relative to the mean"
            tables.append(_grid(title_of_muon, self._muon_rows(self.muon)))
        last = "\n".join([*self._recommendation(), *self.advice])
        return "\n\n".join(["\n".join(title), *tables, *([last] if last else [])])

    def as_dict(self) -> dict[str, Any]:
        """The whole report for JSON, with sizes in elements and bytes, and padding as fractions of the elements."""
        precision = self.precision
        return {
            "model": self.model.name,
            "parameters": self.model.numel,
            "tensors": self.model.num_tensors,
            "groups": len(self.model.groups),
            "granularity": self.granularity,
            "shard_dtype": _dtype(precision.shard),
            "param_dtype": _dtype(precision.param),
            "reduce_dtype": _dtype(precision.reduce),
            "optimizer_dtype": _dtype(precision.optimizer),
            "optimizer_states": precision.states,
            "alignment": precision.alignment,
            "replicas": self.replicas,
            "limit": self.limit,
            "offload_budget": None if self.budget is None else asdict(self.budget),
            "sizes": [self._size_dict(plan) for plan in self.plans],
            "recommended": [plan.ranks for plan in self.recommended],
            "advice": self.advice,
        }

    # -- rows of the tables ----------------------------------------------------------------------------------------

    def _padding_rows(self) -> list[dict[str, str]]:
        rows = []
        for plan in self.plans:
            row = {"FSDP size": f"{plan.ranks:,}"}
            if self.replicas > 1:
                row["world"] = f"{plan.ranks * self.replicas:,}"
            shardings = {"torch_ragged": plan.ragged, "bound": plan.bound, "FSDP2": plan.fsdp2, "LCM": plan.lcm}
            row.update({name: f"{100 * sharding.padding_fraction:,.2f}" for name, sharding in shardings.items()})
            rows.append(row)
        return rows

    def _collective_rows(self) -> list[dict[str, str]]:
        rows = []
        for plan in self.plans:
            for index, (scheme, sharding) in enumerate(plan.schemes.items()):
                row = {"FSDP size": "" if index else f"{plan.ranks:,}", "layout": scheme}
                for name, moved in collectives(sharding, self.precision, self.replicas).items():
                    name = name.replace("_", "-")
                    row.update({name: bytes_text(moved.largest), f"{name}s": bytes_text(moved.total)})
                rows.append(row)
        return rows

    def _memory_rows(self) -> list[dict[str, str]]:
        rows = []
        for plan in self.plans:
            ragged, *others = [zero_memory(sharding, self.precision) for sharding in plan.schemes.values()]
            for stage, memory in ragged.items():
                row = {"FSDP size": "" if stage > 1 else f"{plan.ranks:,}", "ZeRO": str(stage)}
                row.update({part: bytes_text(value) for part, value in asdict(memory).items()})
                row["total"] = bytes_text(memory.total)
                for name, other in zip(list(plan.schemes)[1:], others):
                    row[name] = bytes_text(other[stage].total)
                rows.append(row)
            for kind, fit in offload_fits(plan.ragged, self.precision, self.budget).items() if self.budget else ():
                if kind != "no offload":
                    on_device, *others_of = (bytes_text(nbytes) for nbytes in asdict(fit.needed).values())
                    rows.append({"ZeRO": f"3, {fit.policy}", "total": on_device, **dict(zip(_BESIDE, others_of))})
        return rows

    def _weight_rows(self, plan: ModelPlan) -> list[dict[str, str]]:
        rows = []
        for weight, memory in weighted_memory(plan.ragged, self.precision).items():
            ranks = [rank for rank, own in enumerate(plan.ragged.weights) if own == weight]
            named = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
            row = {"weight": str(weight), "ranks": named}
            row.update({part: bytes_text(value) for part, value in asdict(memory).items()})
            rows.append({**row, "total": bytes_text(memory.total)})
        return rows

    def _fitting_text(self, fittings: Sequence[Fitting]) -> str:
        setting, limit = fittings[0].setting, bytes_text(fittings[0].limit)
        reserve = f"{bytes_text(fittings[0].reserve)} of {bytes_text(fittings[0].memory)}"
        rows, verdicts = [], []
        for fitting in fittings:
            for index, (way, memory) in enumerate(fitting.ways.items()):
                row = {"FSDP size": "" if index else f"{fitting.ranks:,}", "checkpointing": way}
                row |= {part: bytes_text(nbytes) for part, nbytes in memory.parts.items()}
                fits = "fits" if memory.total <= fitting.limit else "does not fit"
                row |= {"total": bytes_text(memory.total), f"of {limit}": fits}
                rows.append({**row, "peak": memory.moment})
            verdicts += self._verdict(fitting)
        tokens = f"{setting.batch:,} x {setting.sequence:,} tokens"
        known = "" if self.model.decoder else ", WITHOUT activations, which are not known for this model"
        title = f"Peak of a step per rank, ZeRO-3, {tokens}{known}"
        uncounted = f"{reserve} are reserved for CUDA's context, NCCL's buffers and fragmentation (--reserve)."
        return "\n".join([_grid(title, rows), uncounted, *verdicts])

    @staticmethod
    def _verdict(fitting: Fitting) -> list[str]:
        first = next(iter(fitting.ways.values()))
        largest = max(first.parts, key=lambda part: first.parts[part])
        share = f"Most of {bytes_text(first.total)}: {largest}, {bytes_text(first.parts[largest])}"
        if first.total <= fitting.limit:
            known = "" if fitting.knows_activations else " without activations"
            return [f"{fitting.ranks:,} ranks: fits{known}, {bytes_text(fitting.limit - first.total)} are free. {share}."]
        verdict = "does not fit without checkpointing" if fitting.fits else "does not fit"
        lines = [f"{fitting.ranks:,} ranks: {verdict}. {share}. What to change, least harm first, each with those above:"]
        lines += [f"  {change.text}: {bytes_text(change.total)}" for change in fitting.changes]
        lines[-1] += ", fits" if fitting.changes[-1].total <= fitting.limit else ", does not fit: use tensor parallelism too"
        if fitting.enough_ranks:
            lines.append(f"  or {fitting.enough_ranks:,} ranks with checkpointing, without offload")
        return lines

    @staticmethod
    def _tiers(budget: Budget) -> dict[str, int]:
        return {"on the device": budget.device, **dict(zip(_BESIDE, (budget.host, budget.files)))}

    def _offload_rows(self, budget: Budget) -> list[dict[str, str]]:
        rows = []
        for plan in self.plans:
            fits = offload_fits(plan.ragged, self.precision, budget)
            row = {"FSDP size": f"{plan.ranks:,}"}
            row |= {kind: _count_text(fit.scale * self.model.numel) for kind, fit in fits.items()}
            first = next((fit for fit in fits.values() if fit.used is not None), None)
            row["offload_policy"] = "does not fit" if first is None else first.policy
            used = None if first is None else first.used
            row |= {where: "" if used is None else bytes_text(self._tiers(used)[where]) for where in self._tiers(budget)}
            rows.append(row)
        return rows

    @staticmethod
    def _muon_rows(plans: Sequence[MuonPlan]) -> list[dict[str, str]]:
        return [
            {
                "FSDP size": f"{plan.ranks:,}",
                "whole": f"{plan.whole:,}",
                "cut": f"{plan.cut:,}",
                "flights if all are cut": f"{1e3 * plan.flight_time_without:,.2f}",
                "flights": f"{1e3 * plan.flight_time:,.2f}",
                "padding": f"{1e3 * plan.padding_time:,.2f}",
                "padding %": f"{100 * plan.padding_fraction:,.2f}",
                "most loaded rank": f"{plan.imbalance:,.2f}",
                "bound": f"{plan.bound:,.2f}",
            }
            for plan in plans
        ]

    def _recommendation(self) -> list[str]:
        if any(plan.ragged.weights for plan in self.plans):
            return []  # One size only: that of the weights.
        good = self.recommended
        over = [plan for plan in self.plans if plan.ragged.padding_fraction > self.limit]
        lines = []
        if good:
            largest = good[-1]
            if self.fitting is None:
                memory = bytes_text(zero_memory(largest.ragged, self.precision)[3].total)
                what = f"{memory} under ZeRO-3 without activations"
            else:
                name, way = min(self.fitting[largest.ranks].ways.items(), key=lambda item: item[1].total)
                what = (
                    f"{bytes_text(way.total)} at the peak of a step ({'with' if name == 'blocks' else 'without'} checkpointing)"
                )
            lines.append(
                f"Recommended FSDP sizes: {', '.join(f'{plan.ranks:,}' for plan in good)}. Their padding is within "
                f"{100 * self.limit:g}%; {largest.ranks:,} needs the least memory per rank, {what}."
            )
        too_large = [plan for plan in self.plans if not self._may_fit(plan)]
        if too_large:
            lines.append(f"Not recommended, as a step does not fit: {', '.join(f'{plan.ranks:,}' for plan in too_large)}.")
        if over:
            sizes = ", ".join(f"{plan.ranks:,} ({100 * plan.ragged.padding_fraction:,.2f}%)" for plan in over)
            lines.append(f"Not recommended, for padding above {100 * self.limit:g}%: {sizes}. At {over[0].ranks:,}:")
        return lines

    def _size_dict(self, plan: ModelPlan) -> dict[str, Any]:
        schemes = {}
        for name, sharding in plan.schemes.items():
            moved = collectives(sharding, self.precision, self.replicas)
            memory = zero_memory(sharding, self.precision)
            schemes[name] = {
                "padding": sharding.padding_fraction,
                "collective_bytes": {kind: asdict(one) for kind, one in moved.items()},
                "memory_bytes": {f"zero{stage}": {**asdict(one), "total": one.total} for stage, one in memory.items()},
            }
        groups = [
            {
                "names": list(kind.names),
                "tensors": len(kind.tensors),
                "shard_numel": layout.shard_numel,
                "lower_bound": layout.lower_bound,
                "padding": layout.padding_fraction,
                "order": layout.order,
                "forced_by": layout.forced_by,
            }
            for kind, layout in zip(plan.kinds, plan.layouts)
        ]
        sizes: dict[str, Any] = {"ranks": plan.ranks, "world": plan.ranks * self.replicas, "bound": plan.bound.padding_fraction}
        if plan.ragged.weights:
            by_weight = weighted_memory(plan.ragged, self.precision)
            sizes["weights"] = list(plan.ragged.weights)
            sizes["memory_bytes_by_weight"] = {w: {**asdict(m), "total": m.total} for w, m in by_weight.items()}
        if self.budget is not None:
            fits = offload_fits(plan.ragged, self.precision, self.budget)
            sizes["offload"] = {kind: asdict(fit) for kind, fit in fits.items()}
        if self.fitting is not None:
            fitting = self.fitting[plan.ranks]
            sizes["step"] = {
                "batch": fitting.setting.batch,
                "sequence": fitting.setting.sequence,
                "memory": fitting.memory,
                "reserve": fitting.reserve,
                "fits": fitting.fits,
                "peaks": {way: {**asdict(one), "total": one.total} for way, one in fitting.ways.items()},
                "changes": [asdict(change) for change in fitting.changes],
                "enough_ranks": fitting.enough_ranks,
            }
        if self.muon is not None:
            sizes["muon"] = next(asdict(each) for each in self.muon if each.ranks == plan.ranks)
        return {**sizes, "layouts": schemes, "groups": groups}


def bytes_text(count: int) -> str:
    """A number of bytes for people, such as ``1.50 GiB``."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{count} B" if units[0] == "B" else f"{value:,.2f} {units[0]}"


def _count_text(count: float) -> str:
    """A number of parameters for people, such as ``70.6B``."""
    return f"{count / 1e9:,.1f}B" if count >= 1e8 else f"{count / 1e6:,.1f}M"


def _dtype(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _grid(title: str, rows: Sequence[dict[str, str]]) -> str:
    columns = dict.fromkeys(name for row in rows for name in row)
    lines = [list(columns), *([row.get(name, "") for name in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join([title, *("  ".join(map(str.rjust, line, widths)) for line in lines)])
