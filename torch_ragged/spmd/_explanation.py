"""``Explanation``: what a plan does on a mesh, as tables, JSON and a picture.

It must not compute anything but sums: ``_explain`` has run the model.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from torch_ragged.spmd._drawing import draw_model_svg
from torch_ragged.spmd._explained import (
    Collective,
    ExplainedBoundary,
    ExplainedRule,
    ExplainedTensor,
    Memory,
    Total,
    folded,
    pattern_of,
    size,
)
from torch_ragged.spmd._resolved import MeshShape, table

__all__ = ["Explanation"]

_VERSION = 1
_MOST_MATCHES = 3  # Of one rule: the other ones are counted.


@dataclass(frozen=True)
class Explanation:
    """What :meth:`Plan.explain` found. ``str`` is a table, in which layers that are equal share a line.

    Attributes:
        mesh: names and sizes of the mesh dimensions.
        rules: every rule of the plan.
        tensors: every parameter and buffer.
        boundaries: every boundary.
        collectives: every collective of one forward and backward, in order.
        memory: bytes per rank.
    """

    mesh: MeshShape
    rules: tuple[ExplainedRule, ...]
    tensors: tuple[ExplainedTensor, ...]
    boundaries: tuple[ExplainedBoundary, ...]
    collectives: tuple[Collective, ...]
    memory: Memory

    @property
    def implicit(self) -> tuple[Collective, ...]:
        """The collectives that no rule asks for, and that DTensor adds."""
        return tuple([each for each in self.collectives if each.cause == "implicit"])

    @property
    def totals(self) -> tuple[Total, ...]:
        """The collectives of a step by kind and mesh dimensions."""
        found: dict[tuple[str, tuple[str, ...]], list[int]] = {}
        for each in self.collectives:
            found.setdefault((each.kind, each.dims), []).append(each.nbytes)
        return tuple([Total(kind, dims, len(each), sum(each)) for (kind, dims), each in sorted(found.items())])

    def to_json(self) -> str:
        """The explanation as text. :meth:`from_json` reads it."""
        return json.dumps({"version": _VERSION, **dataclasses.asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Explanation:
        """The explanation that :meth:`to_json` has written.

        Raises:
            ValueError: the text is something else.
        """
        try:
            content = json.loads(text)
            if not isinstance(content, dict) or content.get("version") != _VERSION:
                raise ValueError(f"it has no version {_VERSION}")
            return cls(
                MeshShape(**_as_tuples(content["mesh"])),
                tuple([ExplainedRule(**_as_tuples(each)) for each in content["rules"]]),
                tuple([ExplainedTensor(**_as_tuples(each)) for each in content["tensors"]]),
                tuple([ExplainedBoundary(**_as_tuples(each)) for each in content["boundaries"]]),
                tuple([Collective(**_as_tuples(each)) for each in content["collectives"]]),
                Memory(**content["memory"]),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"the text is no explanation: {error}. Pass what Explanation.to_json() returned") from error

    def svg(self, path: str | Path) -> None:
        """Draw the model to an SVG file: its blocks from top to bottom, cut weights as squares, and collectives as arrows."""
        Path(path).write_text(draw_model_svg(self.mesh, self.tensors, self.collectives))

    def __str__(self) -> str:
        ranks = math.prod(self.mesh.sizes)
        sections = [
            f"mesh: {self.mesh} ({ranks} rank{'s' * (ranks > 1)})",
            table(("rule", "matches"), [(rule.text, _matches(rule.matched)) for rule in self.rules]),
            self._tensors(),
            self._boundaries(),
            self._collectives(),
            self._sums(),
            "Gradients are those of one device, of the loss over the whole batch: factor 1." if self.collectives else "",
        ]
        return "\n\n".join(filter(None, sections))

    def _tensors(self) -> str:
        rows = [
            (
                each.name,
                "x".join(map(str, each.shape)) or "scalar",
                _placed_text(self.mesh.names, each.kept),
                _placed_text(self.mesh.names, each.run),
                size(each.kept_bytes),
                size(each.run_bytes),
            )
            for each in self.tensors
        ]
        return table(("tensor", "shape", "kept", "computed with", "bytes kept", "computed with", "times"), _folded_rows(rows))

    def _boundaries(self) -> str:
        caused: dict[tuple[str, str], list[Collective]] = {}
        for each in self.collectives:
            if each.cause == "boundary":
                caused.setdefault((each.source, each.phase), []).append(each)
        rows = [
            (
                each.path,
                each.action,
                _placed_text(self.mesh.names, each.placements),
                *[_kinds(caused.get((each.path, phase), ())) for phase in ("forward", "backward")],
            )
            for each in self.boundaries
        ]
        return table(("boundary", "action", "placements", "forward", "backward", "times"), _folded_rows(rows))

    def _collectives(self) -> str:
        rows = [
            (
                each.source or each.module or "(root)",
                each.phase,
                each.cause,
                each.op,
                each.kind,
                ", ".join(each.dims),
                size(each.nbytes),
            )
            for each in self.collectives
        ]
        head = ("collectives of", "phase", "cause", "op", "kind", "over", "bytes", "times")
        return table(head, _folded_rows(rows))

    def _sums(self) -> str:
        rows = [(each.kind, ", ".join(each.dims), str(each.count), size(each.nbytes)) for each in self.totals]
        lines = [table(("per step", "over", "count", "bytes"), rows) or "No collectives."]
        if self.implicit:
            added = size(sum(each.nbytes for each in self.implicit))
            lines.append(
                f"{len(self.implicit)} collectives, {added}, are implicit: no rule asks for them, and DTensor adds them."
            )
        memory = [(name, size(value)) for name, value in dataclasses.asdict(self.memory).items() if value]
        return "\n\n".join([*lines, table(("memory per rank", "bytes"), memory)])


def _folded_rows(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Rows whose first cells differ in numbers only, and whose other cells are equal, as one; with their count at the end."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, *others in rows:
        groups.setdefault((re.sub(r"\d+", "*", name), *others), []).append(name)
    return [(pattern_of(names), *others, f"x {len(names)}" if len(names) > 1 else "") for (_, *others), names in groups.items()]


def _placed_text(names: Sequence[str], placements: Sequence[Optional[str]]) -> str:
    """``dp=Shard(0) tp=Replicate()``; ``Replicate()`` if all are."""
    told = [f"{name}={each}" for name, each in zip(names, placements) if each not in (None, "Replicate()")]
    return " ".join(told) or "Replicate()"


def _kinds(collectives: Sequence[Collective]) -> str:
    return ", ".join([f"{each.kind} {size(each.nbytes)}" for each in collectives])


def _matches(names: Sequence[str]) -> str:
    """The number of names, and their patterns."""
    patterns = [pattern or "(root)" for pattern in folded(names)]
    rest = f", and {len(patterns) - _MOST_MATCHES} more" if len(patterns) > _MOST_MATCHES else ""
    return f"{len(names)}: {', '.join(patterns[:_MOST_MATCHES])}{rest}" if names else "nothing here"


def _as_tuples(value: Any) -> Any:
    """The fields of a record, whose lists become tuples."""
    return {name: tuple(each) if isinstance(each, list) else each for name, each in value.items()}
