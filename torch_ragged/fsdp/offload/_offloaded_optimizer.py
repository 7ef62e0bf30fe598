"""``offloaded``: an optimizer whose states lie where the ``Offload`` policies of ``fully_shard`` say.

It does not reduce gradients. A step communicates only to tell other ranks that a scratch file or a step in backward has failed.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torch_ragged._ranks.agreement import agree, agreement, text_of
from torch_ragged._ranks.groups import device_of, groups_of
from torch_ragged.fsdp._groups import named_groups
from torch_ragged.fsdp.core._fsdp_param import local_of
from torch_ragged.fsdp.core._fsdp_param_group import FSDPParamGroup
from torch_ragged.fsdp.core._kit import Need, PlainPart, Terms, check_pairs
from torch_ragged.fsdp.core._param_swap import load_replaced
from torch_ragged.fsdp.offload._in_backward import BackwardStep
from torch_ragged.fsdp.offload._matrices import Lent, Matrices
from torch_ragged.fsdp.offload._pieces import (
    ELEMENT_WISE,
    ElementWise,
    Piece,
    StateSizes,
    StepChunk,
    SteppedParam,
    UsedGradients,
)
from torch_ragged.fsdp.offload._policy import Offload
from torch_ragged.fsdp.offload._tiers import FILE_NUMEL, FileTier, Tier, TierPiece, host_slabs, tier_of, window_numel
from torch_ragged.tensor._stored_tensor import StoredTensor

__all__ = ["OffloadedOptimizer", "all_process_groups_of", "can_offload", "offloaded"]

_CALL = "offloaded"
# What an optimizer brings that keeps a part of the states elsewhere.
CUTS_STATES = PlainPart(
    Terms("offloaded()", {Need.PLAIN_SHARDS: ", whose states cannot be cut: shard it with Offload(optimizer=0.0)"})
)
_COUNTER = 4  # The bytes of a step counter.


def offloaded(
    optimizer: type[Optimizer],
    model: nn.Module,
    params: Iterable[Any] | None = None,
    *,
    in_backward: bool = False,
    **options: Any,
) -> OffloadedOptimizer:
    """``optimizer(params, **options)`` with a part of its states in host memory, as the ``Offload`` of each group says::

        for block in model.blocks:
            fully_shard(block, offload_policy=Offload(optimizer=0.5))
        fully_shard(model, offload_policy=Offload(optimizer=0.5))
        optimizer = offloaded(torch.optim.AdamW, model, lr=3e-4)

    Of each group's shard, the states of the first elements lie on the device and those of the last ones in host memory::

        shard      | a a a a a a b b b b b | b b b c c c c |
        states        on the device            in host memory, one slab per group and state

    Parameters, gradients and states are bitwise equal to those of ``optimizer(params, **options)``, for any fraction. Learning
    rate schedulers, ``clip_grad_norm_``, ``GradScaler``, state dicts and checkpoints see an ordinary optimizer: states are
    DTensors with the placements of their parameters, and a state dict can be loaded at another fraction, or without offload.

    Host memory is allocated in this call, page-locked if the mesh is not on the CPU. A step on an accelerator copies the states
    through two windows of device memory, each of at most 8,388,608 elements, or one matrix. If a scratch file of
    ``Offload(to=folder)`` fails on one rank, ``step`` raises on all ranks, and this optimizer must load a checkpoint before it
    goes on.

    The optimizer holds views of the groups' buffers. If these are replaced (a conversion to another dtype), its next step
    raises. ``reshard_to`` refuses such a model.

    **With** ``in_backward=True``, each backward with gradient sync is a step: a group is stepped as soon as its gradients are
    reduced, which frees their memory. ``optimizer.step()`` must follow: it steps what has other gradients, and raises the
    errors of the steps. What needs all gradients before a step is an error: ``clip_grad_norm_``, ``GradScaler``, and others.

    Collectives: one all-reduce of 24 bytes per mesh dimension, in this call; with files or ``in_backward``, also in each step,
    of matrices two. A step of matrices has its own, too.

    Args:
        optimizer: ``torch.optim.SGD``, ``Adam`` or ``AdamW``; or ``Adam8bit``, ``AdamW8bit``, ``Muon``, ``Shampoo`` or ``SOAP``
            of ``torch_ragged.optim``.
        model: a module on which ``fully_shard`` was called, or a module that contains such modules.
        params: what ``optimizer`` takes: parameters, or parameter groups, as ``matrix_groups(model)``. None:
            ``model.parameters()``.
        in_backward: step in backward. Equal on all ranks.
        options: the options of ``optimizer``.

    Raises:
        TypeError: ``optimizer`` is not one of these classes, or ``model`` is no module.
        ValueError: no group under ``model`` has an ``Offload``; ``differentiable=True``; a parameter is of a tensor type with
            its own all-gather, or has 8-bit blocks that ranks share; ``optimizer`` refuses its options; or ranks disagree. All
            ranks raise.
        OSError: a folder is missing or read-only, or has too little space.
        RuntimeError: parameters are on the meta device, this rank holds no shards, or another rank raised.
    """
    groups = list(named_groups(model).values()) if isinstance(model, nn.Module) else []
    ranks, device = all_process_groups_of(groups)
    with agreement(ranks, device, _CALL) as claim:
        for group in groups:
            group.check_awake()
        if not can_offload(optimizer):
            is_class = isinstance(optimizer, type)
            given = f"the class {optimizer.__name__}" if is_class else f"an object of {type(optimizer).__name__}"
            raise TypeError(
                "offloaded supports torch.optim.SGD, Adam and AdamW, and Adam8bit, AdamW8bit, Muon, Shampoo and SOAP of "
                f"torch_ragged.optim, got {given}: give one of these classes, not an object of it; or make the optimizer "
                "without offloaded(), all states on the device"
            )
        _check_groups(groups, model)
        if options.get("differentiable"):
            raise ValueError(f"offloaded({optimizer.__name__}) supports no differentiable=True: its steps have no graph")
        template = optimizer(model.parameters() if params is None else params, **options)
        if optimizer in ELEMENT_WISE:
            rules: Any = ElementWise(optimizer, groups)
        else:
            rules = Matrices(template, groups) if hasattr(template, "step_matrices") else template
        result = OffloadedOptimizer(template, groups, rules, in_backward)
        offload = [group.plan.part(Offload) for group in groups]
        claim += [f"optimizer: {text_of(optimizer)}", f"offload_policy: {text_of(offload)}", f"in_backward: {in_backward}"]
        claim.append(f"{len(result.param_groups)} parameter groups")
    return result


def can_offload(optimizer: Any) -> bool:
    """Whether :func:`offloaded` takes ``optimizer``, a class."""
    has_rules = hasattr(optimizer, "piece_optimizer") or hasattr(optimizer, "step_matrices")
    return isinstance(optimizer, type) and (optimizer in ELEMENT_WISE or has_rules)


def all_process_groups_of(groups: Sequence[FSDPParamGroup]) -> tuple[list[dist.ProcessGroup], torch.device]:
    """The process groups of the parameters' meshes, model parallelism included, and the device of messages."""
    meshes: dict[Any, None] = dict.fromkeys(param.sharded.device_mesh for group in groups for param in group.params)  # type: ignore
    ranks = dict.fromkeys(each for mesh in meshes for each in groups_of(mesh))
    return list(ranks), device_of(groups[0].dp.mesh) if groups else torch.device("cpu")


def _check_groups(groups: Sequence[FSDPParamGroup], model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"the second argument of offloaded is the model, an nn.Module, got {type(model).__name__}: write "
            "offloaded(torch.optim.AdamW, model). Parameters, or parameter groups, are the third one"
        )
    if not any(group.plan.part(Offload) for group in groups):
        what = f"{len(groups)} groups of {type(model).__name__}" if groups else f"{type(model).__name__}, which has no groups,"
        raise ValueError(
            f"offloaded found no Offload policy in {what}: call fully_shard(module, offload_policy=Offload(optimizer=0.5)) "
            "first"
        )
    for group in groups:
        if group.is_meta:
            raise RuntimeError(f"{group.names} on the meta device: materialize all parameters before offloaded()")
        policy = _policy_of(group)
        if policy.folder and group.sharded.flat.device.type != "cpu":
            raise ValueError(
                f"{group.names} is on {group.sharded.flat.device}, and Offload(to={policy.folder!r}) needs an optimizer that "
                'runs on the CPU: give Offload(parameters=True, to=...), or to="cpu"'
            )
        if group.is_trainable and policy.optimizer:
            check_pairs([CUTS_STATES, *group.plan.parts])


def _policy_of(group: FSDPParamGroup | None) -> Offload:
    return (group and group.plan.part(Offload)) or Offload(optimizer=0.0)


class OffloadedOptimizer(Optimizer):
    """The optimizer that :func:`offloaded` makes. It has the parameter groups of the optimizer that it stands for.

    ``state`` reads and writes the tiers: ``state[param]`` is a dict of DTensors, as without offload. If the states of a
    parameter lie in two tiers, it has copies of them.

    Attributes:
        has_failed: whether a scratch file, or a step in backward, has failed, and no states were loaded since then. Then the
            next step raises on all ranks.
    """

    follows_offload = True  # A step of any other optimizer of such a model warns.

    def __init__(self, template: Optimizer, groups: Sequence[FSDPParamGroup], rules: Any, in_backward: bool = False) -> None:
        super().__init__(template.param_groups, template.defaults)
        if hasattr(template, "_step_supports_amp_scaling"):  # Fused optimizers unscale gradients themselves.
            self._step_supports_amp_scaling = template._step_supports_amp_scaling
        self._rules, self._matrices = rules, rules if isinstance(rules, Matrices) else None
        # What must be there in a step: views of these buffers are what is stepped.
        self._buffers = {group: group.sharded.flat for group in groups}
        # A file may fail on one rank. Its step raises on all ranks, so that none waits for it in the next collective.
        self._ranks, self._device = all_process_groups_of(groups)
        policies = [_policy_of(group) for group in groups]
        self._has_files = any(policy.folder for policy in policies)
        self._form: str | None = None  # Of the states that are read now, see states_as().
        # What lies in a file, or in two tiers, is read as a copy. If a part of a state dict were copies, it would be of two
        # steps when it is kept while training goes on. Equal on all ranks, also if a rank has no such elements.
        self._copies_states = self._has_files or any(0 < policy.optimizer < 1 for policy in policies)
        self.has_failed = False
        homes = {param.sharded: (group, index) for group in groups for index, param in enumerate(group.params)}
        given = [(number, param) for number, options in enumerate(self.param_groups) for param in options["params"]]
        self._members = {
            param: SteppedParam(number, of, param, *homes.get(param, (None, 0))) for number, (of, param) in enumerate(given)
        }
        if self._matrices is not None:
            self._matrices.count_units(self._members.values())
        self._by_group: dict[FSDPParamGroup | None, list[SteppedParam]] = {}
        for member in self._members.values():
            self._by_group.setdefault(member.group, []).append(member)
        self._chunks = self._make_chunks(in_backward)
        self._tiers = list(dict.fromkeys(tier for _, tier in self._chunks))
        # Of pieces that are stepped by themselves: matrices are stepped together.
        stepped = [(chunk, tier) for chunk, tier in self._chunks if not self._is_matrix(chunk.pieces[0].member)]
        self._of_groups: dict[FSDPParamGroup | None, list[tuple[StepChunk, Tier]]] = {None: stepped}
        for chunk, tier in stepped:
            for home in chunk.homes:
                self._of_groups.setdefault(home, []).append((chunk, tier))
        self._problem: Exception | None = None  # Of a tier, in this step of matrices. It raises at the end of the step.
        self._last: StepChunk | None = None  # The chunk that was stepped last.
        self._after: dict[StepChunk, tuple[StepChunk, Tier]] = {}  # Which chunk followed, the last time.
        # In the order of the parameters, which is equal on all ranks: a full state dict gathers one after the other. The order
        # of chunks is not, since each rank has other elements.
        self._parts: dict[torch.Tensor, list[TierPiece]] = {}
        parts = [TierPiece(piece, chunk, tier) for chunk, tier in self._chunks for piece in chunk.pieces]
        for part in sorted(parts, key=lambda part: (part.piece.member.number, part.piece.start)):
            self._parts.setdefault(part.piece.member.param, []).append(part)
        # In each parameter group, a parameter by which a step sees that it needs other states; of matrices, one of each shape.
        self._samples: dict[Any, tuple[SteppedParam, set[str]]] = {}
        for *_, (piece, _, _) in self._parts.values():
            member, names = piece.member, set(piece.sizes)
            if self._is_matrix(member) and member.param.requires_grad and _policy_of(member.group).optimizer:
                # Of all, wherever this rank has their states: ranks raise together, before the collectives of a step.
                names = set(rules.piece_states(member.param, self.param_groups[member.group_number], 0, 1))
            if names:
                shape = member.param.shape if self._is_matrix(member) else None
                self._samples.setdefault((member.group_number, shape), (member, names))
        self.state = _States(self)  # type: ignore[assignment]
        for group in groups:
            group.gradient_user = None  # That of an earlier optimizer of the model.
        in_groups = {group: members for group, members in self._by_group.items() if group is not None}
        self._in_backward = BackwardStep(self, in_groups, self._matrices is not None) if in_backward else None

    def _is_matrix(self, member: SteppedParam) -> bool:
        return self._matrices is not None and self._matrices.is_matrix(member.param)

    # -- construction ----------------------------------------------------------------------------------------------

    def _make_chunks(self, in_backward: bool) -> list[tuple[StepChunk, Tier]]:
        """Cut each group where its states begin to lie elsewhere, and make the tiers."""
        beside: list[Piece] = []  # All of their states lie on the device.
        whole_matrices: list[Piece] = []  # Theirs, too.
        in_host: dict[torch.device, dict[StepChunk, dict[str, torch.Tensor]]] = {}
        in_files: dict[str, list[StepChunk]] = {}
        for group, members in self._by_group.items():
            policy, behind = _policy_of(group), []
            matrices = [member for member in members if self._is_matrix(member)]
            others = [member for member in members if not self._is_matrix(member)]
            beside += [Piece(member, 0, member.numel, member.param) for member in others if not member.param.requires_grad]
            trained = sorted((each for each in others if each.param.requires_grad), key=lambda member: member.interval)
            left = sum(member.numel for member in trained)
            left -= round(policy.optimizer * left)  # Elements whose states stay on the device.
            for member in trained:
                at = member.numel if left >= member.numel else self._rules.piece_cut(member.param, member.numel, left)
                is_whole = at == member.numel
                left = max(0, left - member.numel) if is_whole else 0
                if at or is_whole:
                    beside.append(Piece(member, 0, at, member.param if is_whole else member.leaf(0, at)))
                if not is_whole:
                    behind.append((member, at))
            device = members[0].param.device if group is None else group.sharded.flat.device
            most = FILE_NUMEL if policy.folder else window_numel(device)
            kinds = [self._chunked(behind, most)]
            if self._matrices is not None and matrices:
                stays, leaves = self._matrices.cut(matrices, policy.optimizer, most)
                whole_matrices += stays
                kinds.append([StepChunk(pieces, self.param_groups, self._rules) for pieces in leaves])
            for of_kind in filter(None, kinds):  # A slab for each: states of one name may differ in dtype.
                if policy.folder:
                    in_files.setdefault(policy.folder, []).extend(of_kind)
                else:
                    in_host.setdefault(device, {}).update(host_slabs(of_kind, is_pinned=device.type != "cpu"))
        # Parameters as DTensors, and runs of them as plain tensors: foreach kernels take either.
        together: dict[tuple[FSDPParamGroup | None, bool], list[Piece]] = {}
        for piece in sorted(beside, key=lambda piece: not piece.is_whole):
            home = piece.member.group
            has_own_chunk = home is not None and (in_backward or home.shards.file_nbytes > 0)
            together.setdefault((home if has_own_chunk else None, piece.is_whole), []).append(piece)
        on_device = Tier({})
        alike = [*together.values(), *filter(None, [whole_matrices])]
        chunks: list[tuple[StepChunk, Tier]] = [
            (StepChunk(pieces, self.param_groups, self._rules), on_device) for pieces in alike
        ]
        # One tier for all groups: they share its windows.
        for device, slabs in in_host.items():
            tier = tier_of(slabs, device)
            chunks += [(chunk, tier) for chunk in slabs]
        for folder, found in in_files.items():
            stateful = [chunk for chunk in found if chunk.nbytes]  # Not those of SGD, without momentum.
            files = FileTier(stateful, folder, dist.get_rank()) if stateful else on_device
            chunks += [(chunk, files if chunk.nbytes else on_device) for chunk in found]
        return chunks

    def _chunked(self, members: Sequence[tuple[SteppedParam, int]], most: int) -> list[StepChunk]:
        """Chunks of at most ``most`` elements of ``members``, each with its first one; of more if a parameter is not cut."""
        chunks: list[list[Piece]] = [[]]
        room = most
        for member, start in members:
            while start < member.numel:
                stop = member.numel
                if stop - start > room:
                    stop = self._rules.piece_cut(member.param, member.numel, start + room)
                    if stop <= start:
                        stop = start if chunks[-1] else member.numel
                if stop > start:
                    sizes = self._rules.piece_states(member.param, self.param_groups[member.group_number], start, stop)
                    chunks[-1].append(Piece(member, start, stop, member.leaf(start, stop), sizes))
                    room -= stop - start
                start = stop
                if room <= 0 or start < member.numel:
                    chunks.append([])
                    room = most
        return [StepChunk(pieces, self.param_groups, self._rules) for pieces in chunks if pieces]

    # -- bytes, for reports ------------------------------------------------------------------------------------------

    def tier_nbytes(self) -> dict[str, int]:
        """The bytes of states by tier: on the ``"device"`` now; in ``"host"`` memory and in ``"files"`` always.

        ``"windows"`` is the host memory through which files are read and written. Step counters do not count.
        """
        held, _ = self.state_nbytes(counters=False)
        windows = sum(tier.window_nbytes for tier in self._tiers)
        nbytes = {"device": sum(held.values()), "host": 0, "files": 0, "windows": windows}
        for chunk, tier in self._chunks:
            nbytes["files" if isinstance(tier, FileTier) else "host"] += chunk.nbytes
        return nbytes

    def watch_tiers(self, log: list[tuple[str, int, float, float]] | None) -> None:
        """Append what moves between tiers to ``log`` from now on; None: no longer. For :func:`monitor`."""
        for tier in self._tiers:
            tier.log = log

    def state_nbytes(self, counters: bool = True) -> tuple[dict[int, int], dict[int, int]]:
        """By ``id`` of a parameter, the bytes of its states on the device, and of those in host memory: for memory reports.

        The windows of files, which all parameters share, are in :meth:`tier_nbytes` only.
        """
        held, hosted = Counter[int](), Counter[int]()
        for param, parts in self._parts.items():
            # Pieces of matrices have them in common.
            found = {id(value): value for piece, chunk, _ in parts for value in chunk.own_states_of(piece).values()}
            tensors = [value for value in found.values() if isinstance(value, torch.Tensor)]
            held[id(param)] += sum(local_of(each).nbytes for each in tensors if each.ndim or counters)
            for piece, _, tier in parts:
                if not isinstance(tier, FileTier):
                    hosted[id(param)] += sum(numel * dtype.itemsize for numel, dtype in piece.sizes.values())
        return held, hosted

    def first_state_nbytes(self, param: torch.Tensor, group: dict[str, Any]) -> int:
        """The bytes on the device of the states of ``param`` that its first step makes: for memory reports."""
        member = self._members.get(param)
        if member is None or member.group is None:
            raise ValueError("a parameter is in no group of fully_shard")
        pieces = [part.piece for part in self._parts[param]]
        if self._matrices is not None and self._is_matrix(member):
            return self._matrices.first_nbytes(param, pieces)
        made = [self._rules.piece_states(param, group, piece.start, piece.stop) for piece in pieces if not piece.sizes]
        return _COUNTER * len(pieces) + sum(numel * dtype.itemsize for sizes in made for numel, dtype in sizes.values())

    # -- steps -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step of all parameters with gradients. Returns the loss of ``closure``, or None without a closure.

        Raises:
            RuntimeError: the buffer of a group was replaced, or options of this step need states that have no memory. With
                files or ``in_backward``: another rank has raised, or the steps in backward are not those of this step. Then
                there are no states any more, and a checkpoint must be loaded.
            OSError: a scratch file has failed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._prepare_step()
        if not self._has_files and self._in_backward is None:
            self._step_of(None)
            return loss
        if self._matrices is not None:
            with self._failing_together():  # Before the collectives of the step: all ranks issue them, or none.
                self._end_backward_steps()
        with self._failing_together():
            if self._matrices is None:
                self._end_backward_steps()
            self._step_of(None)
            if self._problem is not None:
                raise self._problem
            for group in self._buffers:
                group.shards.check()
        return loss

    def _end_backward_steps(self) -> None:
        if self._in_backward is not None:
            self._in_backward.take()
            if "found_inf" in vars(self):
                raise RuntimeError("GradScaler came too late: with in_backward=True, backward has stepped scaled gradients")
        self._check_states_are_valid()

    @contextlib.contextmanager
    def _failing_together(self) -> Iterator[None]:
        """A part of a step that all ranks end, or none."""
        problem = None
        try:
            yield
        except Exception as error:
            problem = error
        try:
            agree(self._ranks, self._device, "the step of an offloaded optimizer", "", problem)
        except BaseException:
            # On all ranks: what one rank has stepped does not go with what another one has not. And the optimizer loads as one
            # that has never stepped, which has equal states on all ranks.
            self.state.clear()
            self.has_failed = True
            raise

    @torch.no_grad()
    def make_states(self) -> None:
        """Make the states of all parameters, as DCP does before a load: by a step with gradients of zeros, and a ``lr`` of 0.

        One group after the other, so that gradients of all parameters are never in memory together. ``.grad`` must be None.
        """
        self._prepare_step()
        rates = [options["lr"] for options in self.param_groups]
        try:
            for options, rate in zip(self.param_groups, rates):
                options["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
            for group, members in self._by_group.items():
                for member in members:
                    is_stepped = member.param.requires_grad and not self._is_matrix(member)
                    member.param.grad = torch.zeros_like(member.param) if is_stepped else None
                self._step_chunks(self._of_groups.get(group, ()))
                for member in members:
                    member.param.grad = None
        finally:
            for options, rate in zip(self.param_groups, rates):
                options["lr"] = rate
        for part in itertools.chain.from_iterable(self._parts.values()):
            param, chunk, sizes = part.piece.member.param, part.chunk, part.piece.sizes
            if self._matrices is None or not self._is_matrix(part.piece.member) or not param.requires_grad:
                continue
            # Without a step, which would issue collectives and compute.
            self._matrices.template.init_states(param, self.param_groups[part.piece.member.group_number], sizes)
            for view in part.piece.views(part.tier.look(chunk)).values() if sizes and not part.piece.has_states else ():
                view.zero_()
                part.tier.store(chunk)
            part.piece.has_states = True

    def step_group(self, group: FSDPParamGroup) -> None:
        """Step the parameters of one group, whose gradients are complete: a part of a step in backward."""
        self._check_states_are_valid()
        self._check_memory([group])
        self._step_of(group)

    def _step_of(self, group: FSDPParamGroup | None) -> None:
        """Step what has gradients in a group; None: all."""
        late: list[torch.Tensor] = []
        if self._matrices is not None:
            self._matrices.template.param_groups = self.param_groups  # A load replaces them.
            members = self._members.values() if group is None else self._by_group[group]
            # Equal on all ranks: a step in backward has used a gradient on all of them, or on none.
            params = {member.param for member in members if not UsedGradients.has(member.param.grad)}
            lent = Lent(self._matrices, self._parts, self._fetch)
            if group is not None:
                with lent.noting():
                    group.shards.prepare(in_step=True)
            late = lent.step(params, check_gradients=group is None)
            self._problem = self._problem or lent.problem
        try:
            for param in late:
                param.grad = torch.zeros_like(param)
            self._step_chunks(self._of_groups.get(group, ()))
        except OSError as error:
            if self._matrices is None:
                raise
            self._problem = self._problem or error  # Later groups of this backward have collectives.
        finally:
            for param in late:
                param.grad = None

    def _step_chunks(self, candidates: Sequence[tuple[StepChunk, Tier]]) -> None:
        """Step those of the chunks that have gradients."""
        scaling: dict[str, Any] = {name: vars(self)[name] for name in ("grad_scale", "found_inf") if name in vars(self)}
        chunks = [(chunk, tier) for chunk, tier in candidates if chunk.has_gradients]
        for (chunk, tier), following in itertools.zip_longest(chunks, chunks[1:]):
            for home in chunk.homes:
                home.shards.prepare(in_step=True)
            memory = self._fetch(chunk, tier, following)
            try:
                chunk.step(self.param_groups, memory, scaling)
            finally:
                tier.store(chunk)

    def _fetch(self, chunk: StepChunk, tier: Tier, following: tuple[StepChunk, Tier] | None = None) -> Mapping[str, Any]:
        """The states of ``chunk``. Then the next one is read ahead: ``following``, or the one that came next the last time."""
        if self._last is not None:
            self._after[self._last] = chunk, tier
        self._last = chunk
        memory = tier.fetch(chunk)
        # After the last chunk of a step, the first one of the next step: it is read while forward and backward run.
        next_chunk, next_tier = following or self._after.get(chunk) or (chunk, tier)
        if next_chunk is not chunk:
            next_tier.fetch_ahead(next_chunk)
        return memory

    def _prepare_step(self) -> None:
        for group in self._buffers:
            load_replaced(group)  # As the next forward would, whose values would replace the result of this step.
        self._check_memory(self._buffers)

    def _check_memory(self, groups: Iterable[FSDPParamGroup]) -> None:
        """Raise if ``groups`` lie in other buffers now, or if options need states for which there is no memory."""
        for group in groups:
            if group.sharded.flat is not self._buffers[group]:
                raise RuntimeError(
                    f"{group.names} was converted after offloaded(), and lies in another buffer now: convert the model first, "
                    "then make the optimizer, and load the old one's state_dict()"
                )
        self._check_sizes(self.param_groups)

    def _check_sizes(self, options: Sequence[Mapping[str, Any]]) -> None:
        for (number, _), (member, names) in self._samples.items():
            needed = self._rules.piece_states(member.param, options[number], 0, member.numel)
            if needed.keys() != names:
                raise RuntimeError(
                    f"parameter group {number} needs the states {sorted(needed)}, and offloaded() has allocated "
                    f"{sorted(names)}: give offloaded() the options that decide which states there are (momentum, amsgrad), "
                    "and keep them"
                )

    def _check_states_are_valid(self) -> None:
        if self.has_failed:
            raise RuntimeError(
                "an earlier step of this offloaded optimizer, or a load, failed, so that parameters and states are not of one "
                "step: load a checkpoint into model and optimizer, by checkpoint.load() or load_state_dict(); before "
                "torch.distributed.checkpoint, call optimizer.state.clear()"
            )

    def _wait(self) -> None:
        """A backward that raised may have left steps to the thread."""
        if self._in_backward is not None:
            self._in_backward.wait()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise: the memory of states is allocated when the optimizer is made."""
        if hasattr(self, "_rules"):  # Otherwise, the optimizer is made now.
            raise RuntimeError(
                "an offloaded optimizer takes no further parameter group: give offloaded() all of them, "
                "params=[{'params': ...}, {'params': ...}]"
            )
        super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As ``torch.optim.Optimizer.zero_grad``, behind the steps that a backward has left to a thread when it raised."""
        self._wait()
        super().zero_grad(set_to_none)

    # -- state dicts -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As ``torch.optim.Optimizer.state_dict``. The order of parameters and states is equal on all ranks.

        With states in files, or a fraction of them in host memory, all of its states are copies in host memory, of this step.
        Otherwise they are the states themselves, as torch's, and follow later steps.

        Raises:
            RuntimeError: a step has failed, and no checkpoint was loaded since then.
            OSError: a scratch file cannot be read, or was not written.
        """
        self._wait()
        self._check_states_are_valid()
        with self._noting_losses(), self.states_as(self._form or ("copies" if self._copies_states else "views")):
            found = super().state_dict()
        for group in found["param_groups"]:
            for name in getattr(self._rules, "unsaved_options", ()):
                group.pop(name, None)
        return found

    @contextlib.contextmanager
    def states_as(self, form: str) -> Iterator[None]:
        """The form of the states that ``state_dict()`` and ``state`` have inside, for checkpoints.

        ``"copies"``: all of them. ``"views"``: of states in one piece in memory, the states themselves; copies of the others.
        ``"stored"``: the same, with a ``StoredTensor`` in place of a copy, which reads and writes the tiers. If one was written
        to, :meth:`load_state_dict` must follow.
        """
        before, self._form = self._form, form
        try:
            yield
        finally:
            self._form = before

    @contextlib.contextmanager
    def _noting_losses(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            # A read may go well at the next try. What could not be written is lost.
            self.has_failed |= any(tier.has_lost for tier in self._tiers)
            raise

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as ``torch.optim.Optimizer.load_state_dict`` does, of any fraction, and without offload. States are copied.

        Raises:
            ValueError: a state is missing, or is no DTensor with the shape and placements of its parameter. Nothing is changed.
            RuntimeError: options of ``state_dict`` need states that have no memory. Nothing is changed.
        """
        saved, given = state_dict["state"], [{**self.defaults, **group} for group in state_dict["param_groups"]]
        if len(given) == len(self.param_groups):
            self._check_sizes(given)
        params = [param for group in self.param_groups for param in group["params"]]
        for param, (index, options) in zip(params, [(index, group) for group in given for index in group["params"]]):
            member = self._members[param]
            if member.group is not None and saved.get(index):
                self._check_states(member, options, index, saved[index])
        # In a shell, torch hands them to __setstate__() as they are. Bare, it would copy all of them to the device first.
        shells = {key: _Shell(states) if isinstance(states, dict) else states for key, states in saved.items()}
        super().load_state_dict({**state_dict, "state": shells})

    def _check_states(self, member: SteppedParam, options: Mapping[str, Any], index: Any, states: Mapping[str, Any]) -> None:
        for name, (numel, dtype) in self._rules.piece_states(member.param, options, 0, member.numel).items():
            value, placements = states.get(name), tuple(self._rules.piece_placements(member.param, name))
            # With this rank's part alone, ranks would not agree: parts of other shapes may have as many elements.
            wanted = self._rules.piece_joined(member.param, name, torch.empty(numel, dtype=dtype, device="meta")).shape
            found = type(value).__name__
            if isinstance(value, DTensor):
                if value.shape == wanted and tuple(value.placements) == placements:
                    continue
                found = f"of shape {tuple(value.shape)} placed as {value.placements}"
            raise ValueError(
                f"the state {name} of parameter {index} of shape {tuple(member.param.shape)} is {found}, expected a "
                f"DTensor of shape {tuple(wanted)} placed as {placements}: load the state dict of the same model, or one that "
                "torch.distributed.checkpoint has distributed"
            )

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.param_groups = state["param_groups"]
        if self._matrices is not None:
            self._matrices.template.param_groups = self.param_groups
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
        loaded = {param: shell.states for param, shell in state["state"].items() if isinstance(shell, _Shell)}
        values = [(param, value) for param, states in loaded.items() for value in states.values()]
        if any(self.state.is_stored(param, value) for param, value in values):  # type: ignore[attr-defined]
            # A checkpoint has filled the tiers. These states stay where they are.
            if self._in_backward is not None:
                self._in_backward.reset()
            for param in self.state.keys() - loaded.keys():
                del self.state[param]
        else:
            self.state.clear()
        self.has_failed = self._has_files or self._in_backward is not None  # Until all states are set.
        for param, states in loaded.items():
            self.state[param] = states
        self.has_failed = False

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("an offloaded optimizer cannot be pickled or copied: save its state_dict()")


@dataclass(frozen=True)
class _Shell:
    """The states of one parameter, which torch's ``load_state_dict`` neither moves nor copies."""

    states: Mapping[str, Any]


class _Runs:
    """The ``Store`` of one state of one parameter: its elements lie in the pieces of the parameter, each in a tier."""

    def __init__(self, states: _States, param: torch.Tensor, name: str) -> None:
        self.states, self.param, self.name = states, param, name
        self.numel, self.dtype = states.sizes(param)[name]

    def read(self, start: int, stop: int) -> torch.Tensor:
        optimizer = self.states.optimizer
        optimizer._wait()
        result = torch.empty(stop - start, dtype=self.dtype, device="cpu")
        with optimizer._noting_losses():
            for _, elements, here in self._parts(start, stop):
                result[here].copy_(elements)
        return result

    def write(self, start: int, data: torch.Tensor) -> None:
        optimizer, width = self.states.optimizer, self.dtype.itemsize
        optimizer._wait()
        optimizer.has_failed = True  # Until load_state_dict() says that all states are there.
        for part, elements, here in self._parts(start, start + data.numel() // width):
            elements.view(torch.uint8).copy_(data[here.start * width : here.stop * width])
            part.tier.store(part.chunk)

    def _parts(self, start: int, stop: int) -> Iterator[tuple[TierPiece, torch.Tensor, slice]]:
        """The pieces of a run; of each its elements that lie in the run, valid until the next one, and where they lie there."""
        optimizer = self.states.optimizer
        for part in optimizer._parts[self.param]:
            piece = part.piece
            begin, end = optimizer._rules.piece_run(self.param, self.name, piece.start, piece.stop)
            first, last = max(start, begin), min(stop, end)
            if first < last:
                state = local_of(part.states()[self.name]).view(-1)
                yield part, state[first - begin : last - begin], slice(first - start, last - start)


class _States(MutableMapping[torch.Tensor, dict[str, Any]]):
    """By parameter, its states as the optimizer has them without offload. Parameters without states are left out."""

    def __init__(self, optimizer: OffloadedOptimizer) -> None:
        self._of, self._parts = weakref.ref(optimizer), optimizer._parts

    @property
    def optimizer(self) -> OffloadedOptimizer:
        optimizer = self._of()
        if optimizer is None:
            raise RuntimeError("the optimizer of these states was deleted")
        return optimizer

    def __getitem__(self, param: torch.Tensor) -> dict[str, Any]:
        optimizer = self.optimizer
        optimizer._wait()
        if param in self._parts and param not in self:
            return {}
        parts, form, rules = self._parts[param], optimizer._form, optimizer._rules
        first, member = parts[0], optimizer._members[param]
        is_apart = len(parts) > 1 or first.tier.is_transient
        # One order on all ranks: that in which optimizers make their states. A piece on the device has that of what was loaded.
        sizes = {} if member.group is None else self.sizes(param)
        own = first.chunk.own_states_of(first.piece)
        names = [*(name for name in own if name not in sizes), *(n for n in sizes if n in own or n in first.piece.sizes)]
        if member.group is not None and is_apart and form == "stored":
            stored = {name: StoredTensor(_Runs(self, param, name)) for name in names if name in sizes}
            return {name: rules.piece_joined(param, name, stored[name]) if name in stored else own[name] for name in names}
        # Each is copied before the next look, which replaces what a window of a tier has now.
        is_copy = is_apart or form == "copies"
        states = [_copied_to_host(found) if is_copy else found for found in map(TierPiece.states, parts)]
        result = {name: states[0][name] for name in names}
        # Between steps, the pieces of a parameter have the same states: those with elements, and counters, which are equal.
        for name, value in result.items() if not first.piece.is_whole else ():
            if isinstance(value, torch.Tensor) and value.ndim and name in sizes:
                flat = value if len(states) == 1 else torch.cat([each[name].cpu() for each in states])
                result[name] = rules.piece_joined(param, name, flat)
        return result

    def sizes(self, param: torch.Tensor) -> StateSizes:
        """The states of all elements of a parameter on this rank."""
        member = self.optimizer._members[param]
        return self.optimizer._rules.piece_states(param, self.optimizer.param_groups[member.group_number], 0, member.numel)

    def is_stored(self, param: torch.Tensor, value: Any) -> bool:
        """Whether ``value`` is a StoredTensor of these states of ``param``."""
        local = local_of(value) if isinstance(value, torch.Tensor) else None
        runs = local.store if isinstance(local, StoredTensor) else None
        return isinstance(runs, _Runs) and runs.states is self and runs.param is param

    def __setitem__(self, param: torch.Tensor, states: Mapping[str, Any]) -> None:
        given = {name: value for name, value in states.items() if not self.is_stored(param, value)}
        for part in self._parts[param]:
            found = {name: self._part_of(part.piece, name, value) for name, value in given.items()}
            mine = {name: value for name, value in found.items() if value is not None}
            if len(given) < len(states):  # The others are there already. These are counters.
                part.chunk.own_states_of(part.piece).update(mine)
            else:
                part.chunk.set_states(part.piece, mine or None, part.tier.look(part.chunk))
                part.tier.store(part.chunk)

    def _part_of(self, piece: Piece, name: str, value: Any) -> Any:
        """The part of a state for one piece, as the optimizer has it; None: it does not need the state."""
        if not isinstance(value, torch.Tensor):
            return value
        member, optimizer = piece.member, self.optimizer
        param, options = member.param, optimizer.param_groups[member.group_number]
        if name == "step":  # A copy: counters are changed in place, and ``value`` is the caller's.
            on_device = options.get("capturable") or options.get("fused")
            return value.to(torch.float32, copy=True).to(param.device) if on_device else value.clone()
        if member.group is None:
            has_own = optimizer._is_matrix(member) or not param.is_floating_point()  # States with a dtype of their own.
            dtype = value.dtype if has_own else param.dtype
            return value.to(dtype=dtype, device=param.device, copy=True)
        sizes = optimizer._rules.piece_states(param, options, piece.start, piece.stop)
        if optimizer._matrices is not None and optimizer._matrices.own(param, name):
            return value.to(param.device, copy=True)
        if name not in sizes:
            return None
        if not piece.is_whole:
            start, stop = optimizer._rules.piece_run(param, name, piece.start, piece.stop)
            value = local_of(value).reshape(-1)[start:stop]
        # Copied into its tier; or, on the device, a tensor of its own.
        return value if piece.sizes else value.to(dtype=sizes[name][1], device=param.device, copy=True)

    def __delitem__(self, param: torch.Tensor) -> None:
        if param not in self:
            raise KeyError(param)
        for part in self._parts[param]:
            part.chunk.set_states(part.piece, None, {})

    def clear(self) -> None:
        """Forget all states, and that a step has failed: the optimizer is as before its first step."""
        optimizer = self.optimizer
        if optimizer._in_backward is not None:
            optimizer._in_backward.reset()
        for tier in optimizer._tiers:
            tier.reset()
        optimizer.has_failed, optimizer._problem = False, None
        for part in itertools.chain.from_iterable(self._parts.values()):
            part.chunk.set_states(part.piece, None, {})

    def __contains__(self, param: object) -> bool:
        return param in self._parts and self._parts[param][0].chunk.has_states(self._parts[param][0].piece)  # type: ignore[index]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (param for param in self._parts if param in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _copied_to_host(states: Mapping[str, Any]) -> dict[str, Any]:
    """Copies in host memory: of the states on an accelerator, the device may have no room for a second set."""
    tensors = {name: value for name, value in states.items() if isinstance(value, torch.Tensor)}
    copies = {name: each.detach().to("cpu", copy=True) if each.ndim else each.clone() for name, each in tensors.items()}
    return {**states, **copies}
