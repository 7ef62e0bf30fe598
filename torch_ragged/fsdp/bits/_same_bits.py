"""SameBits: a step's loss, gradients, norm and parameters have the same bits on any number of ranks.

It decides nothing about memory or overlap, and changes nothing of a model without it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import random
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from torch_ragged._ranks.agreement import agreement, before_groups
from torch_ragged._ranks.groups import device_of, groups_of
from torch_ragged._register._torch import dynamo_disabled
from torch_ragged.fsdp._groups import module_states
from torch_ragged.fsdp.bits._cut import depends_on_cut
from torch_ragged.fsdp.bits._exact import ExactSum, reduce_exact, sum_of
from torch_ragged.fsdp.bits._sums import CorruptionFound, StillTensors
from torch_ragged.fsdp.bits._tree import TREE_VERSION, PieceCollectives, Round
from torch_ragged.fsdp.comm._collectives import ProcessGroupCollectives, WrappedCollectives
from torch_ragged.fsdp.core._fsdp_param import local_of
from torch_ragged.fsdp.core._fsdp_param_group import FSDPParamGroup
from torch_ragged.fsdp.core.encodings._plain import Encoding
from torch_ragged.fsdp.layout._planner import plan_layout
from torch_ragged.fsdp.offload._offloaded_optimizer import OffloadedOptimizer

__all__ = ["SameBits", "generators_kept", "seed_generators"]

_CALL = "SameBits"
_logger = logging.getLogger("torch_ragged.fsdp")
_CACHE_LINE = 64  # Bytes. Products of few rows depend on the offset of a matrix within so many.
_RANKS = (*range(1, 17), 24, 32, 48, 64, 96, 128, 256, 512, 1024)
"""Numbers of ranks for which layouts are compared."""

_TRAINED = (torch.float32, torch.bfloat16, torch.float64)


class SameBits:
    """Training whose numbers do not depend on the number of ranks: losses, gradients, norms, parameters and states.

    ::

        same = SameBits(model, optimizer, pieces=8)                   # after fully_shard, on every rank
        for batch in batches:                                         # the same whole batch, or its file, on every rank
            for piece in same.pieces():                               # the numbers of this rank's pieces of the step
                loss = model(batch[piece]).mean()
                loss.backward()
                same.add_loss(loss)
            norm = same.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            print(same.loss())                                        # equal to the bit on 1, 2, 3, ... ranks

    A step's batch is cut into ``pieces`` by sample. Each piece has one forward and backward, alone: what a rank computes does
    not depend on how many pieces it has. Gradients of pieces are added by one fixed binary tree, in ``reduce_dtype``, and
    divided once by the number of pieces; norms and losses are exact sums, rounded once. Random numbers of a piece begin at a
    state made of the seed, the step and the piece (torch's, Python's and NumPy's global generators), and the generators are
    as before afterwards. ``examples/same_bits.py`` has the same numbers in one process with plain torch.

    The model may move to other ranks between steps, by ``reshard_to`` or ``NeighbourCopies.recover``: this object follows it.

    With n ranks there are ``ceil(pieces / n)`` rounds. In the last one, a rank without a piece of its own repeats one that
    another rank has, and its gradient does not count: all ranks issue the same collectives. So a program's own counts of pieces
    may have some twice.

    Args:
        model: a root that ``fully_shard`` was called on, on a 1-D mesh, or a 2-D one of replicas and shards (HSDP).
        optimizer: the optimizer of its parameters, or several. If a step depends on where a shard ends, it is refused.
        pieces: how many pieces a step has, in all. It may be less than the number of ranks.
        seed: of the random numbers.
        subtree: how many consecutive pieces a rank adds itself before it sends their sum, a power of two. It sends so many
            times fewer bytes, and holds up to ``1 + log2(subtree)`` unsharded gradients. If ``pieces`` is no multiple of it
            times the ranks, there are more rounds. The bits are the same.
        verify_every: find memory and processors that change bits. Parameters, states of optimizers, buffers and reduced
            gradients have sums of bits from when they are written to when they are read: any changed bit is found there. In
            every so-many-th step, each rank repeats a piece of the next rank, and the bits of loss and gradients are compared:
            a rank that computes wrong each time is found then, a single wrong computation with a probability of one in so many
            times its pieces. None: neither.
        on_corruption: ``"raise"``: :class:`CorruptionFound` on the rank with other bits (if it is known), and an error on all
            others, so that :func:`torch_ragged.elastic.run` goes on without this rank; ``"log"``: an error in the log.
        allow_other_pieces: whether :meth:`load_state_dict` takes the state of a run with another number of pieces. From then
            on, the numbers are those of one process that changes the number of pieces at this step.

    Attributes:
        step: how many steps have ended. Set it to go on with a run.

    Each backward is an all-to-all of float32 gradients per group (of ``reduce_dtype``, if that is wider) instead of a
    reduce-scatter, with a receive buffer of the group's size; the nodes of the tree are up to ``1 + log2(pieces)`` shards.

    Raises:
        ValueError: what the model, the optimizer or this machine has would make other bits; the text has a line for each.
            Ranks differ in threads, CPU capability, torch's version or the arguments. All ranks raise.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        pieces: int,
        seed: int = 0,
        subtree: int = 1,
        verify_every: int | None = None,
        on_corruption: Literal["raise", "log"] = "raise",
        allow_other_pieces: bool = False,
    ) -> None:
        with before_groups(_CALL):
            module_states(model)
            self._optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer or ())
            self._model = model
            dp = self._model_groups()[0].dp
        self._count, self._seed, self.step = pieces, seed, 0
        self._device = device_of(dp.mesh)
        self._trees: list[PieceCollectives] = []
        self._subtree, self._verify_every, self._on_corruption = subtree, verify_every, on_corruption
        self._allow_other_pieces = allow_other_pieces
        self._still, self._changed = StillTensors(), list[str]()
        self._losses_twice: dict[bool, torch.Tensor] = {}  # Of the noted piece, and of the repeated one (True).
        self._now = Round(0, False, False, False)
        self._loop: object = None  # The loop over pieces that runs, or was left.
        self._losses: dict[int, torch.Tensor] = {}
        self._is_closed = False
        if dp.is_member:  # A rank that joins later waits for reshard_to().
            self._attach()
        hook = weakref.WeakMethod(self._before_step)
        after = weakref.WeakMethod(self._after_step)
        check_of = lambda each, *_: (check := hook()) and check(each)  # noqa: E731
        self._hooks = [each.register_step_pre_hook(check_of) for each in self._optimizers]
        if verify_every is not None:  # Of all optimizers: those run last, and one of fully_shard counts versions.
            handle = register_optimizer_step_post_hook(lambda each, *_: (note := after()) and note(each))
            self._hooks.append(handle)
            weakref.finalize(self, handle.remove)

    def _model_groups(self) -> list[FSDPParamGroup]:
        """As they are now: the program may add units, or move the model."""
        return [group for state in module_states(self._model).values() for group in state.groups]

    def _attach(self) -> None:
        """Put a tree on each group of the model, on the mesh where the model is now. All its ranks call it, or all raise."""
        groups = self._model_groups()
        dp = groups[0].dp
        if not dp.is_member:
            raise RuntimeError(
                f"SameBits: rank {dist.get_rank()} is not in {dp.mesh}, so that it does not train: to give it shards, call "
                "reshard_to() on all ranks, with a mesh that has this rank"
            )
        self._groups = groups_of(dp.mesh)
        self._shard_groups = [group for group in [dp.shard_group] if group is not None]  # Replicas have equal shards.
        with agreement(self._groups, self._device, _CALL) as claim:
            problems = list(_problems(self._model, groups, self._optimizers))
            if not isinstance(self._count, int) or isinstance(self._count, bool) or self._count < 1:
                problems.append(f"pieces={self._count!r} is no positive number of pieces")
            if not isinstance(self._seed, int):
                problems.append(f"seed={self._seed!r} is no integer")
            subtree, every = self._subtree, self._verify_every
            if not isinstance(subtree, int) or isinstance(subtree, bool) or subtree < 1 or subtree & (subtree - 1):
                problems.append(f"subtree={subtree!r} is no power of two")
            if every is not None and (not isinstance(every, int) or isinstance(every, bool) or every < 1):
                problems.append(f"verify_every={every!r} is no positive number of steps")
            if self._on_corruption not in ("raise", "log"):
                problems.append(f"on_corruption={self._on_corruption!r} is neither 'raise' nor 'log'")
            if problems:
                raise ValueError("SameBits: " + "; ".join(problems))
            claim += [f"pieces: {self._count}", f"seed: {self._seed}", f"subtree: {subtree}", *facts(self._device)]
            claim.append(f"verify_every: {every}, on_corruption: {self._on_corruption}")
        self._kernels = _kernels(self._optimizers)
        self._members: list[int] = dp.mesh.mesh.flatten().tolist()
        self._ranks, self._rank = dp.mesh.size(), self._members.index(dist.get_rank())
        known = {param: name for name, param in self._model.named_parameters()}
        self._known = set(known.values())
        self._names: dict[Any, str] = {
            param.sharded: known.get(param.sharded, param.fqn) for group in groups for param in group.params
        }
        self._trees = [
            PieceCollectives(group.collectives, group, self._present, self._count, self._subtree) for group in groups
        ]
        for tree in self._trees:
            tree.group.collectives = tree

    def _follow(self) -> None:
        """After ``reshard_to`` or ``recover``, which all ranks have called, the model has other groups: put trees on them."""
        if self._is_closed:
            raise RuntimeError("SameBits: close() was called: make a new SameBits")
        old = {id(tree.group) for tree in self._trees}
        if not any(id(group) in old for group in self._model_groups()):
            self._attach()

    def close(self) -> None:
        """The model trains as before this object was made, which is of no use any more.

        Raises:
            RuntimeError: a monitor, which was begun later, still passes collectives on to this object.
        """
        if any(tree.group.collectives is not tree and _reaches(tree) for tree in self._trees):
            raise RuntimeError("SameBits: close the monitor first, which passes collectives on to this object")
        for tree in self._trees:
            if tree.group.collectives is tree:  # Not after set_collectives().
                tree.group.collectives = tree.inner
        for hook in self._hooks:
            hook.remove()
        self._trees, self._hooks, self._optimizers = [], [], []
        self._is_closed = True

    @property
    def count(self) -> int:
        """The pieces of a step, in all."""
        return self._count

    def assigned(self, step: int) -> list[int]:
        """The piece of this rank in each round of ``step``; in the last round, perhaps one that another rank has too.

        In a step that is verified, the last one is a piece of the next rank.
        """
        pieces = [self._piece_of(self._rank, number) for number in range(self._rounds)]
        pieces = [piece if piece < self._count else 0 for piece in pieces]
        if self._verify_every is not None and (step + 1) % self._verify_every == 0:
            following = self._piece_of((self._rank + 1) % self._ranks, 0)
            pieces.append(following if following < self._count else 0)
        return pieces

    @property
    def _rounds(self) -> int:
        return self._trees[0].rounds

    def _piece_of(self, rank: int, number: int) -> int:
        """The piece of a rank in a round; too large if it has none."""
        turn, place = divmod(number, self._subtree)
        return (turn * self._ranks + rank) * self._subtree + place

    # -- a step ------------------------------------------------------------------------------------------------------

    def pieces(self) -> Iterator[int]:
        """The numbers of this rank's pieces in one step. When the loop ends, ``.grad`` has the mean over all pieces.

        The body of the loop runs one forward and one backward for each. All ranks go through the same number of rounds. If the
        body raises, call ``zero_grad()``, and begin the step again: ``step`` has not changed.

        Collectives: an all-reduce of 24 bytes per dimension of the mesh, before the first piece; with ``verify_every``, those
        of :meth:`verify`, and in a step that is verified an all-reduce of 32 bytes per parameter and rank.

        Raises:
            RuntimeError: ``.grad`` is not None; ``set_requires_gradient_sync(False)`` or a hook on a parameter is set; the
                model has other units or collectives than before; a forward has written to a buffer, as batch norm does, so
                that the next piece depends on this one; or another loop has begun meanwhile.
            ValueError: ranks are at different steps, train other parameters, or have another number of threads.
        """
        self._follow()
        self._begin()
        loop = self._loop = object()
        # A loop that was left, and is freed in a later one, must not set the generators.
        has_ended = False
        with generators_kept(lambda: has_ended or self._loop is loop):
            pieces = self.assigned(self.step)
            rounds = self._rounds
            for number, piece in enumerate(pieces):
                # A rank without a piece repeats one, in the time in which others compute: the same calls as theirs need no
                # second way to join collectives.
                is_repeat = number == rounds
                is_absent = not is_repeat and piece != self._piece_of(self._rank, number)
                self._now = Round(number, is_absent, number == 0 and len(pieces) > rounds, is_repeat)
                # Of the piece, not of the rank: it has the same numbers wherever it runs, and if it runs again.
                seed_generators(self._seed, self.step, piece)
                written = _versions(self._model)
                yield piece
                if self._loop is not loop:
                    raise RuntimeError("SameBits: another loop over pieces() has begun: one at a time")
                for name, version in _versions(self._model).items():
                    if written.get(name) != version:
                        raise RuntimeError(
                            f"SameBits: a forward has written to the buffer {name}, so that a piece depends on those before it "
                            "on this rank: keep it as it is in forward (batch norm: eval()), and update it after the step"
                        )
            if len(pieces) > rounds:
                self._compare_repeats()
            self._finish()
            has_ended = True

    def _begin(self) -> None:
        """On all ranks alike, or all raise."""
        with agreement(self._groups, self._device, f"{_CALL}.pieces") as claim:
            self._check_model()
            trained = [param.sharded.requires_grad for tree in self._trees for param in tree.group.params]
            claim += [f"step: {self.step}", f"threads: {torch.get_num_threads()}", f"trained parameters: {trained}"]
        # A forward reads no states: the step compares them.
        self._check_memory([*((name, param) for param, name in self._names.items()), *self._buffers()])
        for tree in self._trees:
            tree.start()
        self._losses, self._losses_twice = {}, {}

    def _check_model(self) -> None:
        groups = self._model_groups()
        if groups != [tree.group for tree in self._trees] or not all(map(_reaches, self._trees)):
            raise RuntimeError(
                "SameBits: the model has other units or collectives since this object was made, as after "
                "set_collectives(): make a new SameBits"
            )
        if changed := list(filter(None, map(_setting_of, groups))):
            raise RuntimeError(f"SameBits: {'; '.join(changed)}")
        if _kernels(self._optimizers) != self._kernels:
            raise RuntimeError("SameBits: foreach, fused or capturable of an optimizer has changed: make a new SameBits")
        # Ranks would not add its gradients, so that it would train apart on each of them.
        if new := {name for name, param in self._model.named_parameters() if param.requires_grad} - self._known:
            raise RuntimeError(f"SameBits: {min(new)} is a new parameter of the model: make a new SameBits")
        for state in module_states(self._model).values():
            keeps = any(not group.settings.requires_all_reduce for group in state.groups)
            if not state.requires_gradient_sync or state.accumulates or keeps:
                raise RuntimeError(
                    "SameBits: set_requires_gradient_sync(False), set_requires_all_reduce(False) and ZERO1 with "
                    "set_is_last_backward(False) would add pieces within a rank: leave them True"
                )
        for tree in self._trees:
            for param in tree.group.params:
                sharded: Any = param.sharded
                if sharded.grad is not None:
                    raise RuntimeError(
                        f"SameBits: {param.fqn} has a gradient: call zero_grad(set_to_none=True) before the pieces of a step"
                    )
                if sharded._backward_hooks or sharded._post_accumulate_grad_hooks:
                    raise RuntimeError(
                        f"SameBits: {param.fqn} has a hook, which would see no gradient of the tree: remove it, and change "
                        ".grad after the pieces"
                    )

    def _finish(self) -> None:
        """Set ``.grad``. Backward has left it None where no piece has a gradient."""
        with torch.no_grad():
            for tree in self._trees:
                mean = tree.finish()
                for param, (begin, end) in zip(tree.group.params, tree.group.reduction.intervals):
                    if mean is not None and param.sharded.grad is not None:
                        local = local_of(param.sharded.grad)
                        local.copy_(mean[begin:end].view_as(local))
        self._loop = None
        self.step += 1
        self._note_gradients()

    def _present(self) -> Round:
        if self._loop is None:
            raise RuntimeError(
                "SameBits: a backward outside of the loop over pieces() would be no part of the step: run it in the loop, one "
                "for each piece, or call close()"
            )
        return self._now

    @dynamo_disabled  # If the step is compiled: these comparisons read numbers.
    def _before_step(self, optimizer: Optimizer) -> None:
        if self._loop is not None:
            raise RuntimeError("SameBits: the loop over pieces() has not ended, so gradients are not complete: let it end")
        self._look_at_gradients()
        if self._verify_every is not None:  # What it reads, and writes anew.
            self._changed += self._still.changed([*self._params_of(optimizer), *self._states_of(optimizer)])

    # -- corruption --------------------------------------------------------------------------------------------------

    def verify(self) -> None:
        """Compare the sums of all that lies still now, as before a checkpoint. All ranks call it.

        Collectives: with ``verify_every``, an all-reduce of 24 bytes per dimension of the mesh, and one of 24 bytes per tensor;
        without, none.

        Raises:
            CorruptionFound: bits of this rank have changed; a RuntimeError on the other ranks.
        """
        self._follow()
        self._check_memory(self._still_tensors())

    def note(self) -> None:
        """The program has written to parameters, states or gradients in a way that torch does not count, as ``.data`` does.

        Writes of all ranks to one tensor need no such call. No collective.
        """
        if self._verify_every is not None:
            self._changed = []
            self._still.note(self._still_tensors())
            self._note_gradients()

    def _still_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What only a step, or a load, writes on this rank."""
        for param, name in self._names.items():
            yield name, param
        for optimizer in self._optimizers:
            yield from self._states_of(optimizer)
        yield from self._buffers()

    def _params_of(self, optimizer: Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
        params = (param for group in optimizer.param_groups for param in group["params"])
        return ((self._names[param], param) for param in params if param in self._names)

    def _states_of(self, optimizer: Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
        for held, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    yield f"{key} of {self._names.get(held)}", value

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((f"the buffer {name}", each) for name, each in self._model.named_buffers() if not each.is_inference())

    def _gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        for param, name in self._names.items():
            if param.grad is not None:
                yield f"the gradient of {name}", param.grad

    def _note_gradients(self) -> None:
        if self._verify_every is not None:
            self._still.note(self._gradients())

    def _look_at_gradients(self) -> None:
        if self._verify_every is not None:
            self._changed += self._still.changed(self._gradients())

    @dynamo_disabled
    def _after_step(self, optimizer: Optimizer) -> None:
        if any(optimizer is each for each in self._optimizers):
            self._still.note([*self._params_of(optimizer), *self._states_of(optimizer)])

    def _check_memory(self, read: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Raise on all ranks if the memory of one has changed. Of writes that torch does not count, all ranks have some."""
        if self._verify_every is None:
            return
        changed = {*self._changed, *self._still.changed(read)}
        self._changed = []
        # Names and their order are equal on all ranks, or the counts of one would meet those of another.
        # What a name begins with is its kind: a state, a gradient, a buffer, or a parameter.
        holds = {name: local_of(each).numel() > 0 for name, each in self._still_tensors()}
        holds |= {f"the gradient of {name}": holds[name] for name in self._names.values()}
        with agreement(self._groups, self._device, f"{_CALL}.verify") as claim:
            claim.append(hashlib.sha256(repr(list(holds)).encode()).hexdigest())
        counts = [[name in changed, (self._rank + 1) * (name in changed), held] for name, held in holds.items()]
        numbers = torch.tensor(counts, dtype=torch.int64, device=self._device)
        reduce_exact(numbers, self._groups, f"{_CALL}.verify")
        by_kind: dict[str, list[int]] = {}
        for name, (count, _, holders) in zip(holds, numbers.tolist()):
            total = by_kind.setdefault(name.rpartition(" ")[0], [0, 0])
            total[0], total[1] = total[0] + count, total[1] + holders
        found: dict[int, list[str]] = {}
        for name, (count, place, _) in zip(holds, numbers.tolist()):
            several, all_held = by_kind[name.rpartition(" ")[0]]
            if count == 1 and (several == 1 or 2 * several < all_held):  # A program writes to many, or on many ranks.
                found.setdefault(place - 1, []).append(name)
        if not found and changed:  # The program has written: from here on, what it wrote lies still.
            self._still.note(each for each in self._still_tensors() if each[0] in changed)
        if found:
            self._changed = [name for name in changed if name.startswith("the gradient")]  # Found until it is mended.
            text = "; ".join(
                f"memory of rank {self._members[place]} has changed, and nothing has written to it: {', '.join(names[:8])}"
                for place, names in found.items()
            )
            self._report(f"{text} (after a write through .data or a collective, call note())", self._rank in found)

    def _compare_repeats(self) -> None:
        """Each rank has repeated the noted piece of the next one: both must have the same bits."""
        names = list(self._names.values())
        rows = torch.zeros(self._ranks, 2, 2 * len(names) + 1, dtype=torch.int64, device=self._device)
        for is_repeat in (False, True):
            unused = [(0, 0)]
            sums = [
                number
                for tree in self._trees
                for pair in tree.sums.get(is_repeat, unused * len(tree.group.params))
                for number in pair
            ]
            loss = self._losses_twice.get(is_repeat, torch.zeros((), device="cpu")).to("cpu", torch.float64).view(torch.int64)
            rows[self._rank, int(is_repeat)] = torch.tensor([*sums, int(loss)], device=self._device)
        reduce_exact(rows, self._groups, f"{_CALL}.pieces")
        differs = [not rows[rank, 1].equal(rows[(rank + 1) % self._ranks, 0]) for rank in range(self._ranks)]
        if not any(differs):
            return
        # A rank that differs from both of its neighbours, which differ from no other.
        wrong = [self._members[each] for each in range(self._ranks) if self._ranks > 2 and differs[each] and differs[each - 1]]
        pairs, parts = [], dict[str, None]()
        for rank in [rank for rank, other in enumerate(differs) if other]:
            following = (rank + 1) % self._ranks
            pairs.append(f"ranks {self._members[rank]} and {self._members[following]}")
            *unequal, loss = (rows[rank, 1] != rows[following, 0]).tolist()
            parts |= {"the loss": None} if loss else {}
            wrong_names = [name for place, name in enumerate(names) if any(unequal[2 * place : 2 * place + 2])]
            parts |= {f"the gradient of {name}": None for name in wrong_names}
        listed = ", ".join([*parts][:8]) + (f" and {len(parts) - 8} more" if len(parts) > 8 else "")
        text = f"{', '.join(pairs)} compute other bits of one piece: {listed}"
        if wrong:
            text += f"; so rank {', '.join(map(str, wrong))} computes wrong"
        self._report(text, not wrong or dist.get_rank() in wrong)

    def _report(self, text: str, is_own: bool = True) -> None:
        if self._on_corruption == "log":
            _logger.error("SameBits: %s", text)
        else:
            raise (CorruptionFound if is_own else RuntimeError)(f"SameBits: {text}")

    # -- losses and norms --------------------------------------------------------------------------------------------

    def add_loss(self, loss: torch.Tensor) -> None:
        """Note the loss of the piece of this round, a tensor of one number. No collective.

        Raises:
            RuntimeError: it is called outside of the loop over :meth:`pieces`, or twice for a piece.
            TypeError: ``loss`` is no floating-point tensor of one element.
        """
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.dtype.is_floating_point:
            raise TypeError(f"SameBits.add_loss takes a floating-point tensor of one element, got {loss!r}")
        now, kept = self._now, loss.detach().reshape(()).clone()
        is_known = self._losses_twice.get(True) is not None if now.is_repeat else now.number in self._losses
        if self._loop is None or is_known:
            raise RuntimeError("SameBits.add_loss takes one loss for each piece, in the loop over pieces(): add them before")
        if now.is_noted or now.is_repeat:
            self._losses_twice[now.is_repeat] = kept
        if not now.is_absent and not now.is_repeat:
            self._losses[now.number] = kept

    def loss(self) -> float:
        """The mean of the noted losses over all pieces of the last step: their exact sum, divided by the number of pieces.

        Collectives: an all-reduce of 880 bytes. The host waits.

        Raises:
            RuntimeError: a piece has no loss, or the model has moved to another mesh since. All ranks raise.
        """
        if not self._trees or self._trees[0].group not in self._model_groups():
            raise RuntimeError("SameBits: the model has moved to another mesh: call loss() before reshard_to()")
        total = ExactSum()
        for loss in self._losses.values():
            total.add(loss)
        noted = torch.tensor([len(self._losses)], device=self._device)
        numbers = torch.cat([total.numbers(self._device), noted])
        reduce_exact(numbers, self._groups, f"{_CALL}.loss")
        if int(numbers[-1]) != self._count:
            raise RuntimeError(
                f"SameBits: {int(numbers[-1])} of {self._count} pieces have a loss: call add_loss() for each piece"
            )
        value = sum_of(numbers[:-1])
        assert value is not None  # Nothing was left out.
        return value / self._count

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> float:
        """Clip the gradients of the model by their norm, as ``torch.nn.utils.clip_grad_norm_`` does; return the norm.

        The norm is the root of an exact sum of squares (``norm_type`` 1: of absolute values; inf: the largest one), rounded to
        float32 (to float64 if gradients are). If it is not finite, gradients become what the factor makes of them, as with
        torch.

        Collectives: an all-reduce of 872 bytes, rarely two. The host waits.

        Raises:
            ValueError: another ``norm_type``: powers have other bits at the end of a shard.
        """
        self._follow()
        self._look_at_gradients()
        functions = {1.0: torch.abs, 2.0: torch.square, math.inf: torch.abs}
        with agreement(self._groups, self._device, f"{_CALL}.clip_grad_norm_") as claim:
            if norm_type not in functions:
                raise ValueError(f"SameBits.clip_grad_norm_ takes norm_type 1, 2 or inf, got {norm_type!r}")
            claim += [f"norm_type: {norm_type}", f"max_norm: {max_norm}"]
        function = functions[norm_type]
        params = [param.sharded for tree in self._trees for param in tree.group.params]
        gradients = [local_of(param.grad) for param in params if param.grad is not None]
        with torch.no_grad():
            if math.isinf(norm_type):
                norm = self._largest(gradients)
            else:
                is_wide = any(gradient.dtype == torch.float64 for gradient in gradients)
                norm = self._norm(gradients, function, torch.float64 if is_wide else torch.float32)
            factor = math.nan if math.isnan(norm) else min(1.0, max_norm / (norm + 1e-6))
            if factor != 1.0:  # A product with it would read and write all gradients, and change none.
                for gradient in gradients:
                    gradient.mul_(factor)
                self._note_gradients()
        return norm

    def _norm(self, gradients: list[torch.Tensor], function: Any, dtype: torch.dtype) -> float:
        def rounded(total: float) -> float:
            return float(torch.tensor(math.sqrt(total) if function is torch.square else total, dtype=dtype, device="cpu"))

        for add in (ExactSum.add_near, ExactSum.add):
            total = ExactSum()
            for gradient in gradients:
                add(total, gradient, function)
            numbers = total.numbers(self._device)
            reduce_exact(numbers, self._shard_groups, f"{_CALL}.clip_grad_norm_")
            # None is too near to the middle of two floats. All ranks know it alike, from the numbers that they have added.
            if (norm := sum_of(numbers, rounded)) is not None:
                return norm
        raise AssertionError("an exact sum has no error")

    def _largest(self, gradients: list[torch.Tensor]) -> float:
        parts = [gradient.abs().max().to(self._device, torch.float64) for gradient in gradients if gradient.numel()]
        largest = torch.stack(parts).max() if parts else torch.zeros((), dtype=torch.float64, device=self._device)
        # The second number: backends compare NaN in ways of their own.
        numbers = torch.stack([largest.nan_to_num(0.0, math.inf), largest.isnan().to(largest.dtype)])
        reduce_exact(numbers, self._shard_groups, f"{_CALL}.clip_grad_norm_", dist.ReduceOp.MAX)
        return math.nan if numbers[1] else float(numbers[0])

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What another run needs to go on with the same bits, on any number of ranks."""
        return {
            "pieces": self._count,
            "seed": self._seed,
            "step": self.step,
            "tree": TREE_VERSION,
            "facts": facts(self._device),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with a run.

        Raises:
            ValueError: it had other pieces (unless ``allow_other_pieces``), another seed, another rule of the tree, or ran on
                another machine or torch.
        """
        mine = self.state_dict()
        if not isinstance(state, dict) or not isinstance(state.get("step"), int):
            raise ValueError(f"SameBits.load_state_dict takes what state_dict() has returned, got {state!r}")
        for name in ("pieces", "seed", "tree", "facts"):
            if state.get(name) != mine[name] and not (name == "pieces" and self._allow_other_pieces):
                advice = ", unless SameBits has allow_other_pieces=True" if name == "pieces" else ""
                raise ValueError(
                    f"SameBits: the run had {name} {state.get(name)}, and this one has {mine[name]}: bits would differ{advice}"
                )
        self.step, self._loop = state["step"], None  # A loop that a death has ended is over, also if something holds it.
        # What is loaded beside this was perhaps written without a count.
        self._still, self._changed = StillTensors(), []


def facts(device: torch.device) -> list[str]:
    """What the bits of a computation depend on, beside its program: equal on all ranks, and in all parts of a run."""
    lines = [
        f"torch: {torch.__version__}",
        f"threads: {torch.get_num_threads()}",
        f"CPU capability: {torch.backends.cpu.get_cpu_capability()}",
        f"MKL, oneDNN: {torch.backends.mkl.is_available()}, {torch.backends.mkldnn.is_available()}",
        f"oneDNN enabled: {getattr(torch.backends.mkldnn, 'enabled', None)}",
        f"deterministic algorithms: {torch.are_deterministic_algorithms_enabled()}",
        f"float32 matmul precision: {torch.get_float32_matmul_precision()}",
    ]
    if device.type == "cuda":
        lines += [
            f"device: {torch.cuda.get_device_name(device)}",
            f"cuDNN: {torch.backends.cudnn.version()}, benchmark {torch.backends.cudnn.benchmark}",
            f"TF32 in cuDNN: {torch.backends.cudnn.allow_tf32}",
            f"attention: flash {torch.backends.cuda.flash_sdp_enabled()}, memory-efficient "
            f"{torch.backends.cuda.mem_efficient_sdp_enabled()}, cuDNN {torch.backends.cuda.cudnn_sdp_enabled()}",
        ]
    return lines


def _problems(model: nn.Module, groups: list[FSDPParamGroup], optimizers: Sequence[Optimizer]) -> Iterator[str]:
    """What has other bits on another number of ranks."""
    held = {id(param.sharded) for group in groups for param in group.params}
    for name, param in model.named_parameters():
        if param.requires_grad and id(param) not in held:
            yield f"{name} is outside of the units of fully_shard: ranks do not add its gradients"
    for group in groups:
        dp = group.dp
        if dp.levels is not None or dp.counts_once:
            yield f"{group.names} is cut over two mesh dimensions (HIERARCHICAL), or by a plan: this is not covered"
        elif dp.mesh != groups[0].dp.mesh:
            yield f"{group.names} is on another mesh than {groups[0].names}: pieces are counted on one"
        elif any(param.distribution.is_dtensor or param.distribution.shard_dim for param in group.params):
            yield f"{group.names} is cut by the model, or as Shard(d) with d > 0: leave it to fully_shard's ragged shards"
        elif not dp.has_shards:
            yield f"{group.names} is not cut over ranks: give fully_shard a 1-D mesh"
        if type(group.collectives) is not ProcessGroupCollectives:
            yield (
                f"{group.names} has collectives of its own (set_collectives, weights, another SameBits, or a monitor, which is "
                "begun after it): use the default ones"
            )
        if (setting := _setting_of(group)) is not None:
            yield setting
        if group.offloads_params:
            yield f"{group.names} is offloaded: this is not covered"
        if type(group.encoding) is not Encoding:
            yield f"{group.names} is all-gathered as codes or tensor types: this is not covered"
        if group.orig_dtype not in _TRAINED or group.reduce_dtype not in (torch.float32, torch.float64):
            yield (
                f"{group.names} is {group.orig_dtype}, reduced in {group.reduce_dtype}: nodes of the tree are float32 or "
                "float64; give MixedPrecisionPolicy(reduce_dtype=torch.float32)"
            )
        if (moving := _moving(group)) is not None:
            yield (
                f"{moving} begins elsewhere within {_CACHE_LINE} bytes of its buffer on other numbers of ranks, and products "
                "of few rows depend on it: give its unit no orig_param_policy, or blocks and matrices of whole multiples"
            )
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            yield f"{name} has sparse gradients: leave sparse=True out"
    if not optimizers or not all(isinstance(each, Optimizer) for each in optimizers):
        yield f"optimizer={optimizers!r} is no torch.optim.Optimizer, nor several of them"
        return
    others = [param for each in optimizers for group in each.param_groups for param in group["params"] if id(param) not in held]
    if others:
        yield f"the optimizer has parameters that are not of this model, such as one of shape {tuple(others[0].shape)}"
        return
    for optimizer in optimizers:
        if isinstance(optimizer, OffloadedOptimizer):
            yield "the optimizer is offloaded: this is not covered"
        elif (why := depends_on_cut(optimizer)) is not None:
            yield why


def _setting_of(group: FSDPParamGroup) -> str | None:
    """What a program may set at any time, and a tree would leave out; None if nothing is set."""
    carrier, settings = group.process_groups, group.settings
    if carrier.wire is not None or carrier.custom_reduce_scatter is not None or settings.reduce_hook is not None:
        return f"{group.names} has a wire dtype, a custom reduce-scatter or an all-reduce hook: leave them out"
    if settings.reduction.divisor is not None:
        return f"{group.names} has a gradient divide factor, and SameBits divides by the pieces: leave it out"
    if group.gradient_user is not None:
        return f"{group.names} is stepped in backward: this is not covered"
    return None


def _reaches(tree: PieceCollectives) -> bool:
    """Whether the group's collectives are the tree, or pass calls on to it, as those of a monitor."""
    collectives: Any = tree.group.collectives
    while collectives is not tree and isinstance(collectives, WrappedCollectives):
        collectives = collectives.inner
    return collectives is tree


def _kernels(optimizers: Sequence[Optimizer]) -> list[tuple[Any, ...]]:
    """What chooses an optimizer's kernels: a checkpoint of it may bring others than those that were tried."""
    groups = [group for each in optimizers for group in each.param_groups]
    return [tuple(group.get(name) for name in ("foreach", "fused", "capturable")) for group in groups]


def _moving(group: FSDPParamGroup) -> str | None:
    """A matrix whose offset in the gathered buffer differs between numbers of ranks, modulo a line; None if there is none."""
    layout, line = group.layout, max(1, _CACHE_LINE // group.param_dtype.itemsize)
    if all(tensor.block == 1 for tensor in layout.tensors):  # One behind the other, on any number of ranks.
        return None
    for ranks in _RANKS:
        offsets = plan_layout(layout.tensors, ranks, layout.alignment).offsets
        for param, here, there in zip(group.params, layout.offsets, offsets):
            if param.sharded.ndim > 1 and (here - there) % line:
                return param.fqn
    return None


def _versions(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Each buffer and its version, by name. Tensors of inference mode have no version, and cannot be written outside of it."""
    return {name: (id(each), -1 if each.is_inference() else each._version) for name, each in model.named_buffers()}


def seed_generators(*numbers: int | str) -> None:
    """Begin at a state made of these numbers. Near numbers give independent states."""
    mixed = int.from_bytes(hashlib.sha256(repr(numbers).encode()).digest()[:8], "big")
    torch.manual_seed(mixed % 2**63)
    random.seed(mixed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(mixed % 2**32)


@contextlib.contextmanager
def generators_kept(restores: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """A block after which the global generators of torch, Python and NumPy are as before, if it ``restores`` them."""
    own, python = torch.get_rng_state(), random.getstate()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
    try:
        yield
    finally:
        if restores():
            torch.set_rng_state(own)
            random.setstate(python)
            if devices is not None:
                torch.cuda.set_rng_state_all(devices)
            if numpy is not None:
                sys.modules["numpy"].random.set_state(numpy)
