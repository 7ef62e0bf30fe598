"""Matrices: how an optimizer that computes with whole matrices steps with states in tiers.

Its collectives are those of a step without offload, and no rank's tiers decide when one is issued: a tier that fails gives
zeros, so that no other rank waits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.optim import AdamW, Optimizer

from torch_ragged.fsdp.core._fsdp_param_group import FSDPParamGroup
from torch_ragged.fsdp.offload._pieces import ElementWise, Piece, StateSizes, StepChunk, SteppedParam
from torch_ragged.fsdp.offload._tiers import Tier, TierPiece

__all__ = ["Lent", "Matrices"]


class Matrices(ElementWise):
    """How parameters of ``Muon``, ``Shampoo`` or ``SOAP`` are cut. AdamW's are cut between elements.

    Of a matrix parameter, pieces count *units*: the whole local state, of Muon; the matrices at this root, of the others. So a
    rank whose shard has no element of a parameter may have pieces of it. ``template`` steps all matrices at once, as without
    offload, with the options of ``param_groups``, and has the states that lie in no tier.
    """

    def __init__(self, template: Any, groups: Sequence[FSDPParamGroup]) -> None:
        super().__init__(AdamW, groups)
        self.template = template
        self.unsaved_options = template.unsaved_options
        numbered = enumerate(template.param_groups)
        self._owed = 0  # Elements of states that fractions have sent to tiers, and that lie on the device.
        self._numbers = {param: number for number, group in numbered for param in group["params"]}

    def is_matrix(self, param: torch.Tensor, group: Mapping[str, Any] | None = None) -> bool:
        return bool((group or self.group_of(param))["algorithm"] == self.template.algorithm)

    def group_of(self, param: torch.Tensor) -> dict[str, Any]:
        return self.template.param_groups[self._numbers[param]]  # type: ignore[no-any-return]

    def count_units(self, members: Iterable[SteppedParam]) -> None:
        """Let matrix parameters have as many units as this rank has of their states. It chooses the roots that states need."""
        for member in members:
            if self.is_matrix(member.param):
                units = self.template.piece_units(member.param, self.group_of(member.param))
                member.numel = units if member.group is not None else 0

    def own(self, param: torch.Tensor, name: str) -> bool:
        """Whether the state ``name`` lies on the device at any fraction."""
        return self.is_matrix(param) and name not in self.piece_states(param, self.group_of(param), 0, 1)

    def piece_states(self, param: torch.Tensor, group: Any, start: int, stop: int) -> StateSizes:
        if self.is_matrix(param, group):
            return self.template.piece_states(param, group, start, stop)  # type: ignore[no-any-return]
        return {name: (stop - start, param.dtype) for name in ("exp_avg", "exp_avg_sq")}

    def piece_run(self, param: torch.Tensor, name: str, start: int, stop: int) -> tuple[int, int]:
        if not self.is_matrix(param):
            return start, stop
        unit = self.piece_states(param, self.group_of(param), 0, 1)[name][0]
        return start * unit, stop * unit

    def piece_placements(self, param: DTensor, name: str) -> tuple[Placement, ...]:
        if not self.is_matrix(param):
            return super().piece_placements(param, name)
        return self.template.piece_placements(param, self.group_of(param), name)  # type: ignore[no-any-return]

    def piece_joined(self, param: DTensor, name: str, flat: torch.Tensor) -> DTensor:
        if not self.is_matrix(param):
            return super().piece_joined(param, name, flat)
        return self.template.piece_joined(param, self.group_of(param), name, flat)  # type: ignore[no-any-return]

    def piece_optimizer(self, pieces: Sequence[Any], groups: list[dict[str, Any]]) -> Optimizer:
        if self.is_matrix(pieces[0][1]):
            return self.template  # type: ignore[no-any-return]
        return type(self.template)(groups, check_gradients=False)  # type: ignore[no-any-return]

    def first_nbytes(self, param: torch.Tensor, pieces: Sequence[Piece]) -> int:
        """The bytes of the states of a matrix parameter that its first step makes on the device."""
        in_tiers = [size for piece in pieces for size in piece.sizes.values()]
        nbytes: int = self.template.first_state_nbytes(param, self.group_of(param))
        return nbytes - sum(numel * dtype.itemsize for numel, dtype in in_tiers)

    def cut(self, members: Sequence[SteppedParam], fraction: float, most: int) -> tuple[list[Piece], list[list[Piece]]]:
        """Cut the states of matrix parameters: pieces on the device, and the pieces of each chunk of a tier.

        Args:
            fraction: of the states, those of the last parameters, which do not stay on the device. A parameter lies in one
                memory; what is too much or too little in one group is taken from the next one.
            most: the most elements of each state in a chunk. One matrix may have more.
        """
        beside = [Piece(member, 0, member.numel, member.param) for member in members if not member.param.requires_grad]
        chunks: list[list[Piece]] = []
        trained = sorted((each for each in members if each.param.requires_grad), key=lambda member: member.interval)
        sizes_of = {member: self._numel(member) for member in trained}
        self._owed += round(fraction * sum(sizes_of.values()))
        behind = set()
        for member, numel in reversed(sizes_of.items()):
            if numel and fraction and (2 * self._owed >= numel or fraction == 1):
                behind.add(member)
                self._owed -= numel
        room = 0
        for member in trained:
            param, group = member.param, self.group_of(member.param)
            if member not in behind:
                beside.append(Piece(member, 0, member.numel, param))
                continue
            for unit in range(member.numel):
                sizes = self.piece_states(param, group, unit, unit + 1)
                room -= max(each for each, _ in sizes.values())
                if room < 0:
                    chunks.append([])
                    room = most - max(each for each, _ in sizes.values())
                chunks[-1].append(Piece(member, unit, unit + 1, param, sizes))
        return beside, chunks

    def _numel(self, member: SteppedParam) -> int:
        """The elements of this rank's states of a matrix parameter that may lie in a tier."""
        if member.group is None:
            return 0
        sizes = self.piece_states(member.param, self.group_of(member.param), 0, member.numel)
        return sum(numel for numel, _ in sizes.values())


class Lent:
    """The states of matrices in one step: their :data:`StatesOf`. One chunk is lent at a time::

        states of      | a    b  | c       | d    e  |
        chunk            fetch     fetch     fetch
                                 store     store     store

    Args:
        parts: by parameter, where its states lie.
        fetch: brings the states of a chunk, and reads the next one ahead.

    Attributes:
        problem: the first error of a tier. The step goes on, with states of zeros: other ranks take part in its collectives.
    """

    def __init__(
        self, rules: Matrices, parts: Mapping[torch.Tensor, Sequence[TierPiece]], fetch: Callable[[StepChunk, Tier], Any]
    ) -> None:
        self._rules, self._parts, self._fetch = rules, parts, fetch
        self._chunk: StepChunk | None = None
        self._tier: Tier | None = None
        self._memory: Any = {}
        self.problem: Exception | None = None

    def step(self, params: Collection[torch.Tensor], check_gradients: bool) -> list[torch.Tensor]:
        """Step the matrices among ``params``. See ``MatrixOptimizer.step_matrices``."""
        try:
            return self._rules.template.step_matrices(  # type: ignore[no-any-return]
                params, self.states_of, check_gradients=check_gradients
            )
        finally:
            self._store()

    def states_of(self, param: torch.Tensor, group: dict[str, Any], index: int | None) -> dict[str, Any]:
        template, parts = self._rules.template, self._parts[param]
        elsewhere = parts[0].piece.sizes
        if not elsewhere:
            parts[0].piece.has_states = True
            return template.states_of(param, group, index)  # type: ignore[no-any-return]
        if index is None:
            template.init_states(param, group, elsewhere)
            if template.has_states_at_roots:
                return template.state[param]  # type: ignore[no-any-return]
        part = parts[index or 0]
        self._turn_to(part)
        part.piece.has_states = True
        views = part.piece.views(self._memory)
        if index is None:
            joined = {name: template.piece_joined(param, group, name, view) for name, view in views.items()}
            return {**template.state[param], **joined}
        return {name: template.piece_matrix(param, group, name, view) for name, view in views.items()}

    def _turn_to(self, part: TierPiece) -> None:
        if part.chunk is self._chunk:
            return
        self._store()
        with self.noting():
            self._memory = self._fetch(part.chunk, part.tier)
            self._chunk, self._tier = part.chunk, part.tier
        if self._chunk is None:
            self._memory = {
                name: torch.zeros(numel, dtype=dtype, device="cpu") for name, (numel, dtype) in part.chunk.sizes.items()
            }
        for piece in part.chunk.pieces:
            if not piece.has_states:  # Its first step: memory has what was there before.
                for view in piece.views(self._memory).values():
                    view.zero_()

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Errors of files inside become the :attr:`problem`."""
        try:
            yield
        except OSError as error:
            self.problem = self.problem or error

    def _store(self) -> None:
        if self._chunk is not None and self._tier is not None:
            self._tier.store(self._chunk)
        self._chunk = None
