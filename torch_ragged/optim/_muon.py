"""Muon on DTensor parameters: momentum on the shards, Newton-Schulz at the root of each matrix.

On CPU every operation is bitwise that of ``torch.optim.Muon``: keep its order and its roundings.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Generator, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Optional, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from torch_ragged._register._torch import dtensor_like
from torch_ragged.optim._base import add_scaled, check_numbers, from_flat, local, scalar, zeros_placed
from torch_ragged.optim._block_moment import moment_nbytes, moment_shapes, update_moment, zero_moment
from torch_ragged.optim._blocks import BlockLayout, BlockPolicy, block_layout_of
from torch_ragged.optim._gather import Batch, Placed
from torch_ragged.optim._matrix import MatrixOptimizer, StatesOf
from torch_ragged.optim._newton_schulz import (
    COEFFICIENTS,
    EPS,
    STEPS,
    Coefficients,
    newton_schulz,
    newton_schulz_cost,
    newton_schulz_exchanges,
    newton_schulz_rows,
    schedule_of,
)
from torch_ragged.optim._root_states import RootState, RootStateOptimizer
from torch_ragged.optim._roots import Stack
from torch_ragged.tensor._carry import part_view
from torch_ragged.tensor._exchange import common

__all__ = ["Muon", "adjusted_lr"]

_NEURON_EPS = 1e-8
_MOST = {"cpu": 1 << 16, "cuda": 1 << 22}
"""The most elements of a momentum that are decoded at a time, with 46 bytes each. On the CPU, they should stay in the cache."""
_ADJUSTMENTS = (None, "original", "match_rms_adamw", "spectral_unclamped")
_Rate = TypeVar("_Rate", float, torch.Tensor)


def adjusted_lr(lr: _Rate, adjust_lr_fn: Optional[str], shape: Sequence[int]) -> _Rate:
    """The learning rate of a matrix whose sizes are the last two of ``shape``, adjusted as in ``torch.optim.Muon``."""
    rows, columns = shape[-2:]
    if adjust_lr_fn is None or adjust_lr_fn == "original":
        return lr * math.sqrt(max(1, rows / columns))
    if adjust_lr_fn == "match_rms_adamw":
        return lr * (0.2 * math.sqrt(max(rows, columns)))
    return lr * math.sqrt(rows / columns)


@functools.lru_cache(maxsize=256)
def _factors(
    lr: float, dtype: Optional[torch.dtype], weight_decay: float, adjust_lr_fn: Optional[str], rows: int, columns: int
) -> tuple[float, float]:
    """The factors of a matrix and of its update. With a tensor as lr, they round to its ``dtype``, as in torch."""
    # torch.optim.Muon computes with the tensor that it was given. So lr * weight_decay rounds to its dtype there.
    rate: Any = lr if dtype is None else torch.tensor(lr, dtype=dtype, device="cpu")
    return scalar(1 - rate * weight_decay), scalar(adjusted_lr(rate, adjust_lr_fn, (rows, columns)))


def _factors_of(
    lr: Any, dtype: Any, weight_decay: float, adjust_lr_fn: Optional[str], rows: int, columns: int
) -> tuple[Any, Any]:
    """The same; as tensors, without a read on the host, if ``lr`` is one."""
    if not isinstance(lr, torch.Tensor):
        return _factors(lr, dtype, weight_decay, adjust_lr_fn, rows, columns)
    rate: Any = lr.reshape(())
    return 1 - rate * weight_decay, adjusted_lr(rate, adjust_lr_fn, (rows, columns))


def _scaled(values: torch.Tensor, factor: float | torch.Tensor) -> torch.Tensor:
    """The product, rounded once: with 16-bit values, torch would round a tensor without dimensions to 16 bits first."""
    if not isinstance(factor, torch.Tensor):
        return values * factor
    # Memory: a copy of the shard in float32, for a moment, if its dtype has 16 bits.
    wide = torch.promote_types(values.dtype, torch.float32)
    return (values.to(wide) * factor.to(wide)).to(values.dtype)


def _normalized_rows(update: torch.Tensor, moment: torch.Tensor, beta: float) -> torch.Tensor:
    """NorMuon's step: each row divided by the root of its averaged mean square; the norm of the matrix stays.

    ``update`` must have new, row-major memory.
    """
    # At the root, where rows are whole: a part of a row has another mean. The moment is a view of the state, and stays there.
    moment.lerp_(update.square().mean(-1, keepdim=True), 1 - beta)
    rows = update / (moment.sqrt() + _NEURON_EPS)
    return rows * (update.norm() / rows.norm().clamp(min=_NEURON_EPS))


def _end_of(computation: Generator[torch.Tensor, None, torch.Tensor]) -> torch.Tensor:
    """The result of a computation that needs no other rank."""
    try:
        while True:
            next(computation)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


def _of_segment(
    param: torch.Tensor, placed: Placed, mine: torch.Tensor, update: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Views of the local tensors of a parameter and of its update: the part of the segment of ``placed``."""
    if not isinstance(param, DTensor):
        dim, start, size = placed.segment  # type: ignore[misc]
        yield mine.narrow(dim, start, size), update.narrow(dim, start, size)
    else:
        assert mine.is_contiguous(), "a DTensor's parts are found by their offsets"
        held = placed.owned(tuple(param.device_mesh.get_coordinate() or ()))
        for position in range(math.prod(placed.shape[:-2])):
            for shared in common(held, placed.matrix(position)):
                yield tuple([part_view(each.view(-1), shared.part(0)) for each in (mine, update)])  # type: ignore[misc]


def _block_of(group: dict[str, Any]) -> Any:
    """The option ``momentum_block``. A checkpoint may have a list, or no such option at all."""
    block = group.get("momentum_block")
    return tuple(block) if isinstance(block, list) else block


class Muon(RootStateOptimizer):
    """``torch.optim.Muon`` for parameters under any placements. One rank orthogonalises each matrix, once.

    This is Algorithm 2 of the RaggedShard paper. Each rank updates the momentum of its shards. The update of each matrix is
    gathered to its root, a rank that load balancing chooses from the whole mesh, including HSDP's replicas. The root runs
    Newton-Schulz and sends the result back to the shards. Parameters are plain tensors or DTensors under any placements. A
    parameter of three or four dimensions is a stack of matrices (experts), each with its own root. A group with ``segments``
    has fused weights, such as queries, keys and values in one: each segment is a matrix, as if it were a parameter of its own.

    Given equal gradients, parameters and states are bitwise equal for any number of ranks; on a GPU with ``foreach=False``. On
    CPU they are equal to ``torch.optim.Muon``, with two exceptions. First, if a bfloat16 matrix has at least as many columns as
    rows, or only one column, torch rounds its last ``numel % 64`` elements differently. Second, before 2.15, torch without
    Nesterov overwrites the momentum of bfloat16 parameters.

    Collectives per step and mesh: two all-to-alls to the roots and two back, in bfloat16. ``max_root_bytes`` can cause more. If
    each matrix is whole on one rank, there are none. A flight with shared matrices has ``2 ns_steps - 1`` more. One all-reduce
    of 8 bytes per parameter lets ranks agree on which gradients exist.

    AdamW trains parameter groups with ``algorithm="adamw"``, such as embeddings, heads, norms and biases. Their options are
    ``lr``, ``weight_decay``, ``betas`` and ``adamw_eps``. :func:`matrix_groups` makes such groups.

    Source: K. Jordan, "Muon" (2024); for ``neuron_beta`` Li et al., "NorMuon" (2025); for ``cautious_weight_decay`` Chen et
    al., "Cautious Weight Decay" (2025).

    Args:
        params, lr, weight_decay, momentum, nesterov, eps, ns_steps, adjust_lr_fn: as in ``torch.optim.Muon`` of torch 2.15.
            All of them also work on older versions of torch.
        ns_coefficients: as in ``torch.optim.Muon``; or a sequence of such triples, one per step, of which the last one is
            repeated; or ``"polar_express"``, whose steps are those that bring all singular values closest to 1.
        neuron_beta: if it is given, as 0.95, the optimizer is NorMuon: each row of an orthogonalised matrix is divided by the
            root of an average of its mean squares, of this decay, and the norm of the matrix stays. The averages are at the
            roots, one float32 number per row. Then a parameter keeps its root.
        cautious_weight_decay: decay a weight only where its update moves it towards zero, too. Groups of AdamW ignore it.
        foreach: update several tensors per kernel, and run Newton-Schulz on all matrices of one shape together. None means yes.
        algorithm: ``"muon"`` or ``"adamw"``, usually set per group.
        betas, adamw_eps: options of AdamW groups.
        row_blocks: if it is more than 1, Newton-Schulz is computed in so many blocks of rows, each with products of its own.
            Then 2, 4 or more neighbouring ranks may share one large matrix, at most ``row_blocks``. They do so where a model of
            products and exchanges says that the most loaded rank ends earlier: with few large matrices on many ranks. Bits
            depend on ``row_blocks``, but not on the ranks that share; they may differ from those of ``torch.optim.Muon``. With
            ``neuron_beta``, matrices are not shared.
        flops_per_byte: for this model, the floating-point operations in the time in which neighbours exchange one byte. The
            default is 400 TFLOP/s over 300 GB/s: ranks with consecutive numbers are on one host.
        momentum_block: None, or the ``block`` of a :class:`BlockPolicy`, as (32, 32). Parameters to which this policy gives
            blocks have a momentum of 8-bit codes with one float32 scale per block, a quarter of the bytes of float32. Others
            have a whole one. Pass ``BlockPolicy(momentum_block)`` or ``muon_policy(momentum_block=...)`` to ``fully_shard``, so
            that no block is cut. Set it before the first step. A loaded state dict brings its own, as all options.
        segments: None, or the sizes of the matrices that each parameter has side by side, and the dimension along which they
            lie, usually set per group: see :func:`matrix_groups`.
        max_root_bytes: the most bytes of gathered matrices that a rank holds per flight of transfers; two flights are in memory
            at a time. A lower limit needs more flights and collectives. None is no limit.
        check_gradients: if False, ranks do not agree on gradients, which saves the all-reduce. Legal if each gradient exists on
            all ranks or on none, as after a backward with ``fully_shard``. If ranks differ, the step hangs.
        capturable: a CUDA graph may capture :meth:`step`, with ``check_gradients=False`` on several ranks. ``lr`` may be a
            tensor on the device that changes between replays; step counts of AdamW are there. Take a step before the capture,
            with gradients on the same parameters.

    Raises:
        ValueError: an option is out of range; a parameter of a ``"muon"`` group does not have two to four dimensions, not the
            sizes of ``segments``, or blocks that are cut between ranks; or a parameter is complex or a Partial DTensor.
    """

    algorithm = "muon"
    takes_segments = True
    wire = (
        torch.bfloat16
    )  # Newton-Schulz computes in bfloat16: rounding before the transfer halves its bytes and changes no result.

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Coefficients = COEFFICIENTS,
        eps: float = EPS,
        ns_steps: int = STEPS,
        adjust_lr_fn: Optional[str] = None,
        *,
        foreach: Optional[bool] = None,
        algorithm: str = "muon",
        betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
        neuron_beta: Optional[float] = None,
        cautious_weight_decay: bool = False,
        row_blocks: int = 1,
        flops_per_byte: float = 1333.0,
        momentum_block: Optional[int | tuple[int, int]] = None,
        segments: Optional[tuple[Sequence[int], int]] = None,
        max_root_bytes: Optional[int] = None,
        check_gradients: bool = True,
        capturable: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "foreach": foreach,
            "algorithm": algorithm,
            "betas": betas,
            "adamw_eps": adamw_eps,
            "neuron_beta": neuron_beta,
            "cautious_weight_decay": cautious_weight_decay,
            "row_blocks": row_blocks,
            "flops_per_byte": flops_per_byte,
            "momentum_block": momentum_block,
            "segments": segments,
            "capturable": capturable,
        }
        super().__init__(params, defaults, max_root_bytes, check_gradients)

    def _forget_plans(self) -> None:
        super()._forget_plans()
        self._layouts: dict[Any, tuple[BlockLayout | None, BlockPolicy]] = {}

    def _kind(self, group: dict[str, Any]) -> Hashable:
        schedule = schedule_of(group["ns_coefficients"], group["ns_steps"])
        return schedule, group["eps"], group["foreach"] is not False, group["neuron_beta"], group["row_blocks"]

    def _cost(self, rows: int, columns: int, group: dict[str, Any]) -> float:
        return newton_schulz_cost(rows, columns, group["ns_steps"])

    def _stack(self, placed: Placed, group: dict[str, Any]) -> Stack:
        stack, blocks = super()._stack(placed, group), group["row_blocks"]
        # With states at the root, one rank computes the matrix: its state is on that rank alone, and NorMuon needs norms of the
        # whole update.
        if blocks == 1 or group["neuron_beta"] is not None:
            return stack
        exchanges = newton_schulz_exchanges(*stack.matrix, group["ns_steps"])
        # Each rank that shares a matrix gets it whole, too.
        sent = min(stack.matrix) * (sum(exchanges) + max(stack.matrix)) * self.wire.itemsize
        return replace(stack, blocks=blocks, exchanges=exchanges, exchange_cost=sent * group["flops_per_byte"])

    def _assign(self, indices: list[int], present: list[int], entries: list[Any], mesh: DeviceMesh | None) -> None:
        """Balance the matrices of each step anew, or keep their roots if there are states at the roots."""
        # Of ``indices`` and not of ``present``: it must not change with the gradients of a step, or states would be at old
        # roots. Assumed: neuron_beta and row_blocks do not change after the first step, because kept roots keep the number of
        # ranks that share a matrix.
        has_states = any(entries[i][1]["neuron_beta"] is not None for i in indices)
        (RootStateOptimizer if has_states else MatrixOptimizer)._assign(self, indices, present, entries, mesh)

    def init_states(self, param: torch.Tensor, group: dict[str, Any], elsewhere: Collection[str] = ()) -> None:
        """As in the base class: the momentum, and with ``neuron_beta`` its averages."""
        state, (layout, policy) = self.state[param], self._blocks(param, group)
        if layout is None and "momentum_buffer" not in (*state, *elsewhere):
            state["momentum_buffer"] = torch.zeros_like(param)
        elif layout is not None and "momentum_codes" not in (*state, *elsewhere):
            state.update(zero_moment("momentum", param, layout, policy))
        # A state that was loaded may be redistributed here, by collectives. All ranks of the mesh reach this for the same
        # parameters in the same order, before the first all-to-all of the step.
        self._place_states(param, group, elsewhere)

    def _send(self, param: torch.Tensor, group: dict[str, Any], gradient: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        """Update the local momentum. Returns the local part of the matrix to orthogonalise."""
        momentum, nesterov = group["momentum"], group["nesterov"]
        layout, policy = self._blocks(param, group)
        if layout is None:
            buffer = local(state["momentum_buffer"])
            buffer.lerp_(gradient, 1 - momentum)
            if nesterov:
                return gradient.lerp(buffer, momentum)
            # The state itself is the input, which the transfer only reads. Memory that was lent has another state by then.
            return buffer if state is self.state[param] else buffer.clone()

        def update(moment: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
            # Products and sums, each rounded once: a fused operation rounds the last elements of a tensor in another way.
            moment.mul_(momentum).add_(gradient * (1 - momentum))
            return gradient * (1 - momentum) + moment * momentum if nesterov else moment

        return update_moment("momentum", state, layout, policy, gradient, update).to(self.wire)

    def _blocks(self, param: torch.Tensor, group: dict[str, Any]) -> tuple[BlockLayout | None, BlockPolicy]:
        """The layout of the blocks in which the momentum of ``param`` is quantized; None if it is not."""
        block = _block_of(group)
        if block is None:
            return None, BlockPolicy()
        key = param, tuple(param.placements) if isinstance(param, DTensor) else (), block
        if key not in self._layouts:
            policy = BlockPolicy(block)
            # No communication: ranks find the same placements, so if blocks are cut, all of them raise.
            layout = block_layout_of(param, policy, _MOST["cuda" if param.is_cuda else "cpu"])
            if layout is not None and layout.aligned is not None:
                raise ValueError(
                    f"{type(self).__name__} momentum_block {block}: blocks of a parameter of shape {tuple(param.shape)} are "
                    "cut between ranks: pass orig_param_policy=BlockPolicy(momentum_block) to fully_shard. If another mesh "
                    "dimension cuts it (tensor parallelism), its parts must be whole blocks, too. Or put it into a group with "
                    "momentum_block=None"
                )
            self._layouts[key] = layout, policy
        return self._layouts[key]

    def piece_units(self, param: torch.Tensor, group: dict[str, Any]) -> int:
        """As in the base class: the local momentum is not cut."""
        if group["neuron_beta"] is not None:
            super().piece_units(param, group)  # It chooses the roots.
        return 1

    def piece_states(
        self, param: torch.Tensor, group: dict[str, Any], start: int, stop: int
    ) -> dict[str, tuple[int, torch.dtype]]:
        """As in the base class: the momentum. The averages of ``neuron_beta`` are small, and stay on the device."""
        numel, (layout, policy) = local(param).numel() * (stop - start), self._blocks(param, group)
        if layout is None:
            return {"momentum_buffer": (numel, param.dtype)}
        scales = (moment_nbytes(param, layout, policy) - local(param).numel()) // 4 * (stop - start)
        return {"momentum_codes": (numel, torch.uint8), "momentum_scales": (scales, torch.float32)}

    def piece_placements(self, param: DTensor, group: dict[str, Any], name: str) -> tuple[Placement, ...]:
        """As in the base class."""
        layout = self._blocks(param, group)[0] if name == "momentum_scales" else None
        return tuple(param.placements if layout is None else layout.grid)

    def piece_joined(self, param: DTensor, group: dict[str, Any], name: str, flat: torch.Tensor) -> DTensor:
        """As in the base class."""
        if name == "momentum_buffer":  # With the strides of a state that zeros_like() makes: kernels round by them.
            like = torch.empty_like(local(param), device="meta")
            return dtensor_like(flat.as_strided(like.shape, like.stride()), param)
        shape = tuple(param.shape)
        shape = self._blocks(param, group)[1].grid(shape) if name == "momentum_scales" else shape
        return from_flat(flat, shape, param.device_mesh, self.piece_placements(param, group, name))

    def _check_step(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        """Raise if the momentum is in other blocks than those of the group."""
        held = {name: tuple(each.shape) for name, each in self.state.get(param, {}).items() if name.startswith("momentum_")}
        layout, policy = self._blocks(param, group)
        shape = tuple(param.shape)
        expected = {"momentum_buffer": shape} if layout is None else moment_shapes("momentum", shape, policy)
        if held and held != expected:
            raise ValueError(
                f"{type(self).__name__} momentum_block is {_block_of(group)}, and the momentum of a parameter of shape {shape} "
                f"was made with another one: there are {held}. Set momentum_block before the first step, and do not change it"
            )

    def _root_states(self, param: torch.Tensor, group: dict[str, Any]) -> dict[str, RootState]:
        if group["neuron_beta"] is None:
            return {}
        shapes = [(*part.matrices[:-1], 1) for part in self._parts(param, group)]
        name = "neuron_second_moment"
        return {f"{name}_{part}" if len(shapes) > 1 else name: RootState(shape, part) for part, shape in enumerate(shapes)}

    def _follows_dtype(self, group: dict[str, Any], name: str) -> bool:
        return name == "momentum_buffer" or super()._follows_dtype(group, name)

    def _state_shapes(self, param: torch.Tensor, group: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        shapes = super()._state_shapes(param, group)
        if group["algorithm"] != self.algorithm:
            return shapes
        layout, policy = self._blocks(param, group)
        if layout is None:
            return {"momentum_buffer": tuple(param.shape), **shapes}
        return {**moment_shapes("momentum", tuple(param.shape), policy), **shapes}

    def first_state_nbytes(self, param: torch.Tensor, group: dict[str, Any]) -> int:
        """As in the base class: a matrix has its momentum and, with ``neuron_beta``, a number per row at its root."""
        if group["algorithm"] != self.algorithm:
            return super().first_state_nbytes(param, group)
        layout, policy = self._blocks(param, group)
        nbytes = local(param).nbytes if layout is None else moment_nbytes(param, layout, policy)
        return nbytes + (self._root_nbytes(param, group) if group["neuron_beta"] is not None else 0)

    def empty_state(
        self, param: DTensor, group: dict[str, Any], name: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> DTensor:
        """As in the base class: scales of momentum are placed as the blocks of the parameter."""
        layout, policy = self._blocks(param, group) if group["algorithm"] == self.algorithm else (None, BlockPolicy())
        if layout is not None and name == "momentum_scales" and tuple(shape) == policy.grid(tuple(param.shape)):
            return zeros_placed(shape, dtype, param.device_mesh, layout.grid, param)
        if layout is not None and name == "momentum_codes" and tuple(shape) == tuple(param.shape):
            return zeros_placed(shape, dtype, param.device_mesh, param.placements, param)
        return super().empty_state(param, group, name, shape, dtype)

    def _compute(
        self, batch: Batch, matrices: torch.Tensor, params: Sequence[torch.Tensor], states_of: StatesOf
    ) -> torch.Tensor:
        kind: Any = batch.kind
        schedule, eps, batched, beta, blocks = kind
        if blocks == 1:
            updates = newton_schulz(matrices, schedule, len(schedule), eps, batched)
        else:
            every = 0, min(batch.shape)
            # The rows are computed in the same blocks as on ranks that share a matrix: so the bits do not depend on how many
            # share it.
            updates = torch.stack([_end_of(newton_schulz_rows(each, schedule, eps, blocks, every)) for each in matrices])
        if beta is not None:
            groups = {param: group for group in self.param_groups for param in group["params"]}
            for update, spot in zip(updates, batch.spots):  # One by one: sums must not depend on the batch.
                param = params[spot.stack]
                part, index = self._of_root(params, spot)
                (moment,) = self._at_root(param, groups[param], index, part).values()
                # New row-major memory: the bits of sums depend on strides, which are those of the batch.
                rows = update.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
                update.copy_(_normalized_rows(rows, moment, beta))
        return updates

    def _share(self, batch: Batch, matrices: torch.Tensor) -> Generator[torch.Tensor, None, torch.Tensor]:
        kind: Any = batch.kind
        schedule, eps, _, _, blocks = kind
        assert batch.rows is not None
        update = yield from newton_schulz_rows(matrices[0], schedule, eps, blocks, batch.rows)
        return update.unsqueeze(0)

    def _receive(self, param: torch.Tensor, group: dict[str, Any], update: torch.Tensor) -> None:
        # On the shards, on every rank with a part: the root has the update only, and never the parameter.
        mine, segments = local(param), self._parts(param, group) if group.get("segments") is not None else []
        options = group["lr"], group["lr_dtype"], group["weight_decay"], group["adjust_lr_fn"]
        shrink, rate = _factors_of(*options, *param.shape[-2:])
        update = update.view(mine.shape)
        if group["cautious_weight_decay"]:  # Only where the update moves the weight towards zero, too.
            mine.copy_(torch.where(update * mine >= 0, _scaled(mine, shrink), mine))
        elif isinstance(shrink, torch.Tensor):
            mine.copy_(_scaled(mine, shrink))
        else:
            mine.mul_(shrink)
        # In torch, the update of a tall matrix is a transposed view. With 16 bits, the CPU's kernel for strided tensors rounds
        # the product. A view of one column counts as contiguous.
        if not segments:
            add_scaled(mine, update, -rate, rounds_product=param.shape[-2] > param.shape[-1] > 1)
        for segment in segments:
            rows, columns = segment.matrices[-2:]
            for own, change in _of_segment(param, segment, mine, update):
                add_scaled(own, change, -_factors_of(*options, rows, columns)[1], rounds_product=rows > columns > 1)

    def _check_group(self, group: dict[str, Any]) -> None:
        name = type(self).__name__
        check_numbers(name, group, "momentum", "flops_per_byte")
        if group["adjust_lr_fn"] not in _ADJUSTMENTS:
            raise ValueError(f"{name} adjust_lr_fn must be one of {_ADJUSTMENTS}, got {group['adjust_lr_fn']!r}")
        if not isinstance(group["ns_steps"], int) or not 0 <= group["ns_steps"] < 100:
            raise ValueError(f"{name} ns_steps must be an integer from 0 to 99, got {group['ns_steps']!r}")
        schedule_of(group["ns_coefficients"], group["ns_steps"])
        if not isinstance(group["row_blocks"], int) or group["row_blocks"] < 1:
            raise ValueError(f"{name} row_blocks must be a positive integer, got {group['row_blocks']!r}")
        block = _block_of(group)
        if block is not None:
            height, width = BlockPolicy(block).block
            if not BlockPolicy((height, width), min_numel=0).is_blocked((height, width)):
                raise ValueError(
                    f"{name} momentum_block {block} is too small: a block needs at least 80 elements, or its scale takes more "
                    "than 0.1 byte per element"
                )
            if group["algorithm"] == self.algorithm:
                # Now, and not in the first step: the layout follows from placements, so the error can come before training.
                for entry in group["params"]:
                    param = entry[1] if isinstance(entry, tuple) else entry
                    if isinstance(param, torch.Tensor):
                        self._blocks(param, group)
        beta = group["neuron_beta"]
        if beta is not None and not (isinstance(beta, (int, float)) and 0.0 <= beta < 1.0):
            raise ValueError(f"{name} neuron_beta must be a number in [0, 1), or None, got {beta!r}")
