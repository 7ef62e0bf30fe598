"""Adam with 8-bit moments, quantized per block. If placements keep all blocks whole, a step has no communication.

The result must not depend on the number of ranks: every operation here rounds per element, in a fixed order.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Optional

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from torch_ragged._kernels._choice import on_device_of, runs_triton
from torch_ragged._register._torch import dtensor_of
from torch_ragged.optim._base import (
    STEP_NBYTES,
    RaggedOptimizer,
    agree_on_gradients,
    check_capture,
    check_numbers,
    check_placement,
    check_warm,
    from_flat,
    groups_on_host,
    local,
    local_shape_placed,
    mesh_of,
    names_peers,
    new_step,
    placed_of,
    run_closure,
    zeros_placed,
)
from torch_ragged.optim._block_moment import blocks_of, decoded, encode_to, matrices_of
from torch_ragged.optim._blocks import (
    BlockPolicy,
    Region,
    block_edges,
    block_layout_of,
    flat_indices,
    regions_within,
)
from torch_ragged.optim._quantize import BOOKS, code_book, hash32, round_to_bfloat16
from torch_ragged.tensor._api import spec_of

__all__ = ["Adam8bit", "AdamStep", "AdamW8bit", "Moments", "update_region"]

_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MOMENTS = (("exp_avg", True), ("exp_avg_sq", False))


@dataclass(frozen=True)
class AdamStep:
    """The scalars of one step of one parameter. If the optimizer is capturable, some are tensors, which the device computes.

    Attributes:
        shrink: the factor of the parameter (decoupled weight decay).
        decay: the multiple of the parameter that is added to the gradient (L2 penalty).
        beta1, beta2, eps: Adam's hyperparameters.
        step_size: the learning rate over the bias correction of the first moment.
        correction: one over the square root of the bias correction of the second moment.
        rounding_key: the 32-bit key of stochastic rounding; None for rounding to nearest.
    """

    shrink: float | torch.Tensor
    decay: float
    beta1: float
    beta2: float
    eps: float
    step_size: float | torch.Tensor
    correction: float | torch.Tensor
    rounding_key: Optional[int | torch.Tensor]

    def update(self, param: torch.Tensor, gradient: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> None:
        """One Adam step in place on float32 tensors; ``gradient`` is not changed.

        Uses only additions, products, quotients and square roots, each rounded once. Fused multiply-adds would round the last
        few elements of a tensor differently from the others, and the last elements of a shard are not those of the whole
        tensor.
        """
        if self.decay:
            gradient = gradient + param * self.decay
        m.mul_(self.beta1).add_(gradient * (1 - self.beta1))
        v.mul_(self.beta2).add_((gradient * gradient).mul_(1 - self.beta2))
        # On CPU, torch takes float32 roots from MKL, which sometimes errs by a unit in the last place; a float64 root does not.
        root = v.sqrt() if v.is_cuda else v.double().sqrt_().float()
        denominator = root.mul_(self.correction).add_(self.eps)
        if isinstance(self.shrink, torch.Tensor) or self.shrink != 1.0:
            param.mul_(self.shrink)
        param.sub_((m / denominator).mul_(self.step_size))


@dataclass(frozen=True)
class _MomentLayout:
    """How a parameter's moments are stored.

    Attributes:
        is_blocked: True for 8-bit codes, False for float32.
        aligned: the placements of the codes, to which parameter and gradient are redistributed; None if the placements of the
            parameter keep all blocks whole on all ranks.
        grid: the placements of the scales.
        regions: this rank's blocks.
        run: if the parameter stands for a run of another one: that one, and where the run begins and ends on this rank.
    """

    is_blocked: bool
    aligned: Optional[tuple[Placement, ...]] = None
    grid: tuple[Placement, ...] = ()
    regions: tuple[Region, ...] = ()
    run: Optional[tuple[torch.Tensor, int, int]] = None


class Moments(NamedTuple):
    """This rank's quantized moments as flat tensors: uint8 codes, one per element, and float32 scales, one per block."""

    m_codes: torch.Tensor
    m_scales: torch.Tensor
    v_codes: torch.Tensor
    v_scales: torch.Tensor


class Adam8bit(RaggedOptimizer):
    """Adam whose moments are 8-bit codes with one float32 scale per block, for parameters under any placements.

    The global shape alone decides whether a parameter has blocks, and where they are (see :class:`BlockPolicy`). Therefore
    numerics do not depend on sharding: given equal gradients, parameters and states are bitwise equal for any number of ranks
    on the same device type. The codes (uint8, placed as the parameter) and the scales (one per block, placed as the blocks) are
    DTensors, so checkpoints reshard. Parameters without blocks have float32 moments.

    If every rank holds only whole blocks, as with ``fully_shard(..., orig_param_policy=policy)``, ``step`` issues no
    collective. If a rank holds a part of a block, parameter and gradient are redistributed to whole blocks, and the parameter
    back: three collectives per such parameter, and one per mesh that agrees on gradients. The first such step warns and
    names the cost.

    A NaN or an infinity in a gradient makes the moments of its whole block invalid. If a gradient is missing on some ranks,
    these ranks skip the parameter. If the parameter's blocks are redistributed, a missing gradient counts as zero instead.

    On CUDA one Triton kernel dequantizes, updates, quantizes and writes all parameters in one pass. Elsewhere vectorised
    tensor operations give the same bits.

    Source: Dettmers et al., ICLR 2022; section 6.3 of the RaggedShard paper.

    Args:
        params, lr, betas, eps: as in ``torch.optim.Adam``. Groups may set ``lr``, ``betas``, ``eps`` and ``weight_decay``.
        weight_decay: L2 penalty, added to the gradient (decoupled in :class:`AdamW8bit`).
        policy: a :class:`BlockPolicy`; None is the class attribute ``policy``, with blocks of 32 x 32. Pass the same policy to
            ``fully_shard`` as ``orig_param_policy``.
        code: the code book, ``"dynamic"`` or ``"linear"``.
        stochastic_rounding: round bfloat16 parameters stochastically. The random bits depend on ``seed``, the step, the index
            of the parameter in the optimizer and the global index of the element.
        seed: the seed of stochastic rounding, an int.
        capturable: a CUDA graph may capture :meth:`step`. Step counts are on the device, ``lr`` may be a tensor there that
            changes between replays, and nothing is read on the host. Ranks must not share blocks. Take a step before each
            capture, with gradients on the same parameters, and keep the optimizer as long as the graph. Numbers differ from
            those without it by roundings of a step's scalars at most.

    Raises:
        ValueError: an option is out of range; a parameter is a Partial DTensor or has no real floating-point dtype; or
            ``stochastic_rounding`` is set and a parameter is not bfloat16.
        TypeError: ``policy`` is no BlockPolicy.
    """

    policy = BlockPolicy()
    _decoupled = False
    _knobs = ("policy", "code", "stochastic_rounding", "seed")

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        policy: Optional[BlockPolicy] = None,
        code: str = "dynamic",
        stochastic_rounding: bool = False,
        seed: int = 0,
        capturable: bool = False,
    ) -> None:
        name = type(self).__name__
        if policy is not None and not isinstance(policy, BlockPolicy):
            raise TypeError(f"{name} policy must be a BlockPolicy or None, got {type(policy).__name__}")
        if code not in BOOKS:
            raise ValueError(f"{name} code must be one of {BOOKS}, got {code!r}")
        self.policy = policy if policy is not None else type(self).policy
        self.code, self.stochastic_rounding, self.seed = code, stochastic_rounding, seed
        # Assumed: a parameter keeps its placements as long as it is the same object. reshard_to, which moves parameters, makes
        # new ones and calls __setstate__().
        self._layouts: dict[torch.Tensor, _MomentLayout] = {}
        self._indices: dict[torch.Tensor, int] = {}  # Of tensors that stand for parameters of another optimizer.
        self._cuts: dict[torch.Tensor, list[tuple[int, int]]] = {}
        self._has_warned, self._graphs = False, _GraphMemory()
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "capturable": capturable}
        super().__init__(params, options)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._layouts, self._indices, self._cuts, self._has_warned = {}, {}, {}, getattr(self, "_has_warned", False)
        self._graphs = getattr(self, "_graphs", None) or _GraphMemory()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group. Raises ``ValueError`` as the constructor does, without a change of the optimizer."""
        name, group = type(self).__name__, {**self.defaults, **param_group}
        given = group["params"]
        group["params"] = [given] if isinstance(given, torch.Tensor) else list(given)
        check_numbers(name, group, "lr", "eps", "weight_decay")
        for entry in group["params"]:
            param = entry[1] if isinstance(entry, tuple) else entry
            if isinstance(param, torch.Tensor):
                check_placement(param, name)
                if not param.is_floating_point():
                    raise ValueError(f"{name} got a parameter of {param.dtype}: expected a real floating-point dtype")
                if self.stochastic_rounding and param.dtype != torch.bfloat16:
                    raise ValueError(f"{name}: stochastic_rounding takes bfloat16 parameters only, got {param.dtype}")
        super().add_param_group({**param_group, "params": group["params"]})

    @torch.no_grad()
    @names_peers
    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        """One step. Returns the loss of ``closure``, or None without a closure.

        Raises:
            PeerError: another rank died, or did not call it.
            RuntimeError: a gradient is sparse; or, for a parameter whose blocks are redistributed, the gradient is missing on
                some ranks and has other placements than the parameter on other ranks. Nothing is changed. If blocks are
                redistributed, every rank raises it. Or a CUDA graph captures the step, and it is not capturable, or no step
                was taken before.
        """
        is_captured = check_capture(self)
        loss = run_closure(closure)
        # The index counts all parameters, also those of meshes without this rank. It is a part of the key of random rounding,
        # and must be equal on all ranks that hold a part of the parameter.
        entries = [(param, group) for group in groups_on_host(self) for param in group["params"]]
        entries_here = [(i, p, g) for i, (p, g) in enumerate(entries) if (mesh := mesh_of(p)) is None or mesh.get_coordinate()]
        layouts = [self._layout(param) for _, param, _ in entries_here]
        # Equal on all ranks of a mesh, because layouts follow from global shapes and placements.
        moved = [i for i, layout in enumerate(layouts) if layout.aligned is not None]
        if moved and not self._has_warned:
            self._warn([entries_here[i][1] for i in moved])
        if any(mesh is not None and mesh.size() > 1 for mesh in (mesh_of(entries_here[i][1]) for i in moved)):
            check_capture(self, "ranks share blocks, and agree on gradients on the host: give its policy to fully_shard")
        # Only parameters whose blocks are redistributed need agreement: the others issue no collective, so ranks may differ.
        # Assumed: all replicas of a parameter have its gradient, or none. A replica that skips it has other values from then
        # on.
        found = agree_on_gradients([param for _, param, _ in entries_here], moved)
        active = [(*entry, *rest) for entry, *rest in zip(entries_here, layouts, found) if rest[1] is not None]
        if is_captured:
            check_warm(self, (param for _, param, *_ in active))
        updates, on_device = BlockUpdates(self.policy.block, self.code, self._graphs), self._numbers_on_device(active)
        for number, (index, param, group, layout, gradient) in enumerate(active):
            self._step_param(index, param, gradient, group, layout, updates, on_device.get(number))
        updates.run()
        # After the launches of this step: its tables are counted now. Pinned memory cannot be allocated within a capture.
        self._graphs.end_step()
        return loss

    def _step_param(
        self,
        index: int,
        param: torch.Tensor,
        gradient: torch.Tensor,
        group: dict[str, Any],
        layout: _MomentLayout,
        updates: BlockUpdates,
        numbers: Optional[AdamStep],
    ) -> None:
        """One step; with ``numbers``, its states are made and its step is counted already."""
        state = self.state[param]
        if numbers is None:
            self._count_step(param, group, layout)
            # + 1: the hash of 0 is 0, which would leave the first parameter's key to the step alone.
            numbers = self._numbers(group, int(state["step"].item()), hash32(self._indices.get(param, index) + 1))
        if layout.aligned is None:
            target = local(param)
            flat = target.view(-1) if target.is_contiguous() else target.contiguous().view(-1)
            if layout.is_blocked:
                self._update_blocks(flat, gradient, state, numbers, layout, updates)
            else:
                _update_plain(layout.run or (param, 0, len(flat)), flat, gradient.contiguous().view(-1), state, numbers)
            if flat.data_ptr() != target.data_ptr():
                updates.run()  # The updates of ``flat`` must have run before it is copied.
                target.copy_(flat.view(target.shape))
            return
        # Three collectives, in the order of parameters, which all ranks of the mesh have in common. All of them are here: ranks
        # agreed on the gradient, and one without it has zeros. Memory: beside its shards, a rank holds parameter and gradient
        # in whole blocks, of one parameter at a time.
        assert isinstance(param, DTensor)
        whole_blocks: Any = param.detach().redistribute(placements=layout.aligned)  # type: ignore[attr-defined]
        spec = spec_of(param.device_mesh, param.placements, param.shape, gradient.dtype, param.stride())
        source = dtensor_of(gradient, spec)
        moved: Any = source.redistribute(placements=layout.aligned)
        self._update_blocks(local(whole_blocks).view(-1), local(moved), state, numbers, layout, updates)
        updates.run()  # The parameter must be updated before it is redistributed back.
        param.copy_(whole_blocks.redistribute(placements=param.placements))

    def _update_blocks(
        self,
        param: torch.Tensor,
        gradient: torch.Tensor,
        state: dict[str, Any],
        numbers: AdamStep,
        layout: _MomentLayout,
        updates: BlockUpdates,
    ) -> None:
        """Add one step of this rank's flat parameter and its 8-bit moments to ``updates``. It is done after their ``run()``."""
        gradient = gradient.contiguous().view(-1)
        # Views of the states: the update writes to them, and returns nothing.
        names = [f"{name}_{part}" for name, _ in _MOMENTS for part in ("codes", "scales")]
        moments = Moments(*(local(state[name]).view(-1) for name in names))
        updates.add(layout.regions, numbers, param, gradient, moments)

    def _count_step(self, param: torch.Tensor, group: dict[str, Any], layout: _MomentLayout) -> None:
        if "step" not in self.state[param]:
            self._init_state(param, group, layout)
        self.state[param]["step"] += 1

    def _numbers(self, group: dict[str, Any], step: Any, of_param: Any) -> AdamStep:
        """The scalars of a step, given the hash of the parameter; of int64 tensors, of several steps, as float64 tensors."""
        lr, (beta1, beta2), decay = group["lr"], group["betas"], group["weight_decay"]
        # float64 on the device, because the host computes with Python's floats: float32 would lose digits of 1 - beta2**step.
        power = step.double() if isinstance(step, torch.Tensor) else step
        square = 1 - beta2**power
        root = square.sqrt() if isinstance(square, torch.Tensor) else math.sqrt(square)
        seed = self.seed & 0xFFFFFFFF
        # The index of the parameter is hashed before it meets the step. Otherwise, step 1 of parameter 2 and step 2 of
        # parameter 1 would round with the same noise.
        return AdamStep(
            shrink=1 - lr * decay if self._decoupled else 1.0,
            decay=0.0 if self._decoupled else decay,
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            step_size=lr / (1 - beta1**power),
            correction=1 / root,
            rounding_key=hash32(hash32(step ^ of_param) ^ seed) if self.stochastic_rounding else None,
        )

    def _numbers_on_device(self, active: Sequence[tuple[Any, ...]]) -> dict[int, AdamStep]:
        """:meth:`_numbers` of the parameters of capturable groups, without a read on the host.

        ``active`` has (index, parameter, group, layout, gradient) of each. The result is by place in it.
        """
        # One stack of steps for each group and device, so that a step launches a few small kernels for all parameters, instead
        # of a few for each.
        alike: dict[Any, list[int]] = {}
        for number, (_, param, group, layout, _) in enumerate(active):
            if group.get("capturable"):
                self._count_step(param, group, layout)
                alike.setdefault((id(group), param.device), []).append(number)
        found: dict[int, AdamStep] = {}
        for numbers in alike.values():
            params, group = [active[number][1] for number in numbers], active[numbers[0]][2]
            lr, steps = group["lr"], torch.stack([self.state[param]["step"] for param in params]).long()
            if isinstance(lr, torch.Tensor):
                lr = lr.double().reshape(()) if lr.device == steps.device else lr.item()
            hashes: Any = 0
            if self.stochastic_rounding:
                indices = [self._indices.get(param, active[number][0]) for param, number in zip(params, numbers)]
                hashes = torch.stack([self._graphs.constant(hash32(index + 1), steps.device) for index in indices])
            all_of_them: Any = self._numbers({**group, "lr": lr}, steps, hashes)
            for i, number in enumerate(numbers):
                key = None if all_of_them.rounding_key is None else all_of_them.rounding_key[i]
                step_size, correction = all_of_them.step_size[i], all_of_them.correction[i]
                found[number] = replace(all_of_them, step_size=step_size, correction=correction, rounding_key=key)
        return found

    def _init_state(self, param: torch.Tensor, group: dict[str, Any], layout: _MomentLayout) -> None:
        state = self.state[param]
        state["step"] = new_step(param, group)
        if layout.run is not None:
            whole, start, stop = layout.run
            for name, (numel, dtype) in self.piece_states(whole, group, start, stop).items():
                state[name] = torch.zeros(numel, dtype=dtype, device=param.device)
            return
        for name, _ in _MOMENTS:
            if not layout.is_blocked:
                state[name] = torch.zeros_like(param, dtype=torch.float32, memory_format=torch.contiguous_format)
                continue
            grid = self.policy.grid(tuple(param.shape))
            if isinstance(param, DTensor):
                placements = layout.aligned or param.placements
                mesh = param.device_mesh
                codes: torch.Tensor = zeros_placed(tuple(param.shape), torch.uint8, mesh, placements, param)
                scales: torch.Tensor = zeros_placed(grid, torch.float32, mesh, layout.grid, param)
            else:
                codes = torch.zeros(param.shape, dtype=torch.uint8, device=param.device)
                scales = torch.zeros(grid, dtype=torch.float32, device=param.device)
            state[f"{name}_codes"], state[f"{name}_scales"] = codes, scales

    def _follows_dtype(self, group: dict[str, Any], name: str) -> bool:
        return False  # Codes, scales, and moments in float32.

    def _state_shapes(self, param: torch.Tensor, group: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        shape = tuple(param.shape)
        if not self.policy.is_blocked(shape):
            return super()._state_shapes(param, group)
        shapes = {"codes": shape, "scales": self.policy.grid(shape)}
        return {f"{name}_{part}": shapes[part] for name, _ in _MOMENTS for part in shapes}

    def first_state_nbytes(self, param: torch.Tensor, group: dict[str, Any]) -> int:
        """As in the base class: codes of a byte and scales of 4 bytes, or float32, for each of two moments."""
        layout = self._layout(param)
        numel = local(param).numel()
        if not layout.is_blocked:
            return 2 * 4 * numel + STEP_NBYTES
        grid = self.policy.grid(tuple(param.shape))
        if isinstance(param, DTensor):
            numel = math.prod(local_shape_placed(tuple(param.shape), param.device_mesh, layout.aligned or param.placements))
            grid = local_shape_placed(grid, param.device_mesh, layout.grid)
        return 2 * (numel + 4 * math.prod(grid)) + STEP_NBYTES

    def empty_state(
        self, param: DTensor, group: dict[str, Any], name: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> DTensor:
        """As in the base class: codes are placed as whole blocks of the parameter, scales as the blocks."""
        # Not _layout(): the optimizer may not hold this parameter yet, and the cache would keep it alive if it never does.
        layout = self._make_layout(param)
        if not layout.is_blocked:
            return super().empty_state(param, group, name, shape, dtype)
        places = {"codes": (tuple(param.shape), layout.aligned or param.placements)}
        places["scales"] = (self.policy.grid(tuple(param.shape)), layout.grid)
        expected, placements = places.get(name.rpartition("_")[2], ((), ()))
        if tuple(shape) != tuple(expected):
            raise ValueError(
                f"{type(self).__name__} has no state {name} of shape {tuple(shape)} for a parameter of {tuple(param.shape)} in "
                f"blocks of {self.policy.block}"
            )
        return zeros_placed(shape, dtype, param.device_mesh, placements, param)

    # -- pieces: runs of a parameter's local tensor whose states lie in different memories, for ``fsdp.offloaded`` --------

    def piece_cut(self, param: torch.Tensor, numel: int, at: int) -> int:
        """The nearest element to ``at`` at which the local tensor of ``param``, of ``numel`` elements, can be cut.

        Raises:
            ValueError: ranks share blocks of ``param``, whose states are placed otherwise than the parameter.
        """
        edges = self._edges(param)
        if edges is None:
            return min((at + 32) // 64 * 64, numel)
        return min((element for element, _ in edges), key=lambda element: abs(element - at))

    def piece_states(
        self, param: torch.Tensor, group: dict[str, Any], start: int, stop: int
    ) -> dict[str, tuple[int, torch.dtype]]:
        """The states of a run of the local tensor: the number of elements and the dtype of each."""
        if not self.policy.is_blocked(tuple(param.shape)):
            return {name: (stop - start, torch.float32) for name, _ in _MOMENTS}
        first, last = self.piece_run(param, "scales", start, stop)
        parts = {"codes": (stop - start, torch.uint8), "scales": (last - first, torch.float32)}
        return {f"{name}_{part}": parts[part] for name, _ in _MOMENTS for part in parts}

    def piece_run(self, param: torch.Tensor, name: str, start: int, stop: int) -> tuple[int, int]:
        """Where the state ``name`` of a run of the local tensor begins and ends: scales are fewer than elements."""
        edges = self._edges(param)
        if edges is None or not name.endswith("scales"):
            return start, stop
        block_at = dict(edges)
        return block_at[start], block_at[stop]

    def piece_placements(self, param: torch.Tensor, name: str) -> tuple[Placement, ...]:
        """The placements of the state ``name`` of ``param``."""
        assert isinstance(param, DTensor)
        return self._layout(param).grid if name.endswith("scales") else tuple(param.placements)

    def piece_joined(self, param: torch.Tensor, name: str, flat: torch.Tensor) -> DTensor:
        """The state ``name`` of ``param``, given its elements on this rank."""
        assert isinstance(param, DTensor)
        shape = tuple(param.shape)
        shape = self.policy.grid(shape) if name.endswith("scales") else shape
        return from_flat(flat, shape, param.device_mesh, self.piece_placements(param, name))

    def piece_optimizer(
        self, pieces: Sequence[tuple[torch.Tensor, torch.Tensor, int, int, int]], groups: list[dict[str, Any]]
    ) -> Adam8bit:
        """An optimizer of the same options for runs of parameters, whose steps are those of this one.

        Args:
            pieces: for each run: the 1-D tensor to step, or the parameter itself; the parameter; its index in this optimizer;
                where the run begins and ends in the local tensor.
            groups: the parameter groups, of these tensors.
        """
        result = type(self)(groups, **{name: getattr(self, name) for name in self._knobs})
        for leaf, param, index, start, stop in pieces:
            result._indices[leaf] = index
            layout = self._layout(param)
            if leaf is not param:
                regions: list[Region] = []
                if layout.is_blocked:
                    block, _ = self.piece_run(param, "scales", start, stop)
                    regions = regions_within(layout.regions, self.policy, start, stop, block)
                result._layouts[leaf] = _MomentLayout(layout.is_blocked, regions=tuple(regions), run=(param, start, stop))
        return result

    def _edges(self, param: torch.Tensor) -> list[tuple[int, int]] | None:
        """The cuts of a parameter with blocks: see :func:`block_edges`. None without blocks."""
        layout = self._layout(param)
        if layout.aligned is not None:
            raise ValueError(
                f"{type(self).__name__}: blocks of a parameter of shape {tuple(param.shape)} are cut between ranks, so that "
                "its states cannot be offloaded: pass orig_param_policy=policy to fully_shard, with the policy of the optimizer"
            )
        if not layout.is_blocked:
            return None
        if param not in self._cuts:
            self._cuts[param] = block_edges(layout.regions, self.policy)
        return self._cuts[param]

    def _layout(self, param: torch.Tensor) -> _MomentLayout:
        if param not in self._layouts:
            self._layouts[param] = self._make_layout(param)
        return self._layouts[param]

    def _make_layout(self, param: torch.Tensor) -> _MomentLayout:
        # A kernel needs no limit; on the CPU, temporary tensors should stay in the cache.
        found = block_layout_of(param, self.policy, 1 << 48 if param.is_cuda else 1 << 16)
        return _MomentLayout(False) if found is None else _MomentLayout(True, found.aligned, found.grid, found.regions)

    def _warn(self, params: list[torch.Tensor]) -> None:
        self._has_warned = True
        size = sum(3 * param.numel() * param.element_size() for param in params)
        warnings.warn(
            f"{type(self).__name__}: {len(params)} parameters, the first of shape {tuple(params[0].shape)}, have blocks that "
            "are cut between ranks. Each step redistributes parameter and gradient, and the parameter back: "
            f"{3 * len(params)} collectives of up to {size:,} bytes over all ranks. Pass "
            "orig_param_policy=optimizer.policy to fully_shard, which keeps blocks whole: then no collective is needed",
            stacklevel=3,
        )


class AdamW8bit(Adam8bit):
    """:class:`Adam8bit` with decoupled weight decay (default 0.01), as ``torch.optim.AdamW``. All other options are equal."""

    _decoupled = True

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        policy: Optional[BlockPolicy] = None,
        code: str = "dynamic",
        stochastic_rounding: bool = False,
        seed: int = 0,
        capturable: bool = False,
    ) -> None:
        options: Any = {"policy": policy, "code": code, "stochastic_rounding": stochastic_rounding}
        super().__init__(params, lr, betas, eps, weight_decay, **options, seed=seed, capturable=capturable)


class BlockUpdates:
    """The updates of one step. On CUDA, :meth:`run` launches one kernel for all; elsewhere, :meth:`add` computes each.

    One launch per device, pair of dtypes (of parameter and gradient) and kind of rounding.
    """

    def __init__(self, block: tuple[int, int], code: str, graphs: Optional[_GraphMemory] = None) -> None:
        self._block, self._code, self._graphs = block, code, graphs or _GraphMemory()
        self._launches: dict[Any, list[tuple[Region, AdamStep, tuple[torch.Tensor, ...]]]] = {}

    def add(
        self, regions: Sequence[Region], numbers: AdamStep, param: torch.Tensor, gradient: torch.Tensor, moments: Moments
    ) -> None:
        """Update the ``regions`` of a flat ``param``. If a kernel does it, :meth:`run` launches this kernel."""
        if not (runs_triton(param) and param.dtype in _KERNEL_DTYPES and gradient.dtype in _KERNEL_DTYPES):
            for region in regions:
                update_region(region, self._block, self._code, numbers, param, gradient, moments)
        elif regions:
            of_scalars = numbers.rounding_key is not None, isinstance(numbers.step_size, torch.Tensor)
            key = (param.device, param.dtype, gradient.dtype, *of_scalars)
            tensors = (param, gradient, *moments)  # The kernel gets addresses: the tensors must live until the launch.
            self._launches.setdefault(key, []).extend((region, numbers, tensors) for region in regions)

    def run(self) -> None:
        """Launch the kernels for all updates that were added since the last call."""
        launches, self._launches = self._launches, {}
        for (device, dtype, gradient_dtype, is_stochastic, is_on_device), updates in launches.items():
            from torch_ragged._kernels import _triton_adam8bit as kernel  # Imported here: Triton may not be installed.

            books = code_book(self._code, True, device), code_book(self._code, False, device)
            integers = [_integers(region, numbers, tensors) for region, numbers, tensors in updates]
            scalars = [numbers for _, numbers, _ in updates]
            floats: Any = _scalar_columns(scalars, device) if is_on_device else [_floats(numbers) for numbers in scalars]
            keys = [numbers.rounding_key for numbers in scalars]
            of_rounding = _column(keys, device) if is_on_device and is_stochastic else None
            pinned = self._graphs.pinned(len(updates), device) if is_on_device else None
            with on_device_of(books[0]):
                types, is_dynamic = (dtype, gradient_dtype), self._code == "dynamic"
                read = kernel.step_regions(
                    integers, floats, books, types, self._block, is_dynamic, is_stochastic, of_rounding, pinned
                )
            self._graphs.keep(read)
            # torch does not see a kernel's writes; transfers of what has changed look at version counters.
            written = {id(tensor): tensor for _, _, (param, _, *moments) in updates for tensor in (param, *moments)}
            torch.autograd.graph.increment_version(written.values())


class _GraphMemory:
    """What a capturable optimizer holds for CUDA graphs: memory that a captured step reads again in each replay.

    A capture may copy to the device from pinned memory alone, and not allocate it. So each other step leaves as many pinned
    tables as it had launches, for a capture that may follow.
    """

    def __init__(self) -> None:
        self._spare: dict[tuple[int, torch.device], list[torch.Tensor]] = {}
        self._launches: Counter[tuple[int, torch.device]] = Counter()  # Of this step.
        self._constants: dict[tuple[int, torch.device], torch.Tensor] = {}
        self._kept: list[Any] = []

    def __getstate__(self) -> dict[str, Any]:
        return {}  # A graph is of its process.

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]

    def pinned(self, regions: int, device: torch.device) -> Optional[torch.Tensor]:
        """The table of a launch of a captured step; None in other steps, and on the CPU."""
        if device.type != "cuda":
            return None
        key = regions, device
        if torch.cuda.is_current_stream_capturing():
            if not self._spare.get(key):
                raise RuntimeError(
                    "a step of 8-bit Adam is captured, and the step before it was captured, too, or had gradients on other "
                    "parameters: take a step with gradients on the same parameters before each capture"
                )
            return self._spare[key].pop()
        self._launches[key] += 1
        return None

    def end_step(self) -> None:
        """Leave tables for a capture: as many as this step had launches, of their sizes."""
        if self._launches:
            from torch_ragged._kernels import _triton_adam8bit as kernel

            width, before, self._spare = len(kernel.INTEGER_FIELDS), self._spare, {}
            for key, count in self._launches.items():
                tables = before.get(key, [])[:count]
                missing = count - len(tables)
                empty = (torch.empty(key[0], width, dtype=torch.int64, device="cpu", pin_memory=True) for _ in range(missing))
                self._spare[key] = [*tables, *empty]
            self._launches.clear()

    def constant(self, value: int, device: torch.device) -> torch.Tensor:
        """An integer on the device, copied there in the first call."""
        # Before a capture, by the step that comes first: a copy from unpinned memory within a capture raises.
        if (value, device) not in self._constants:
            self._constants[value, device] = torch.tensor(value, dtype=torch.int64, device="cpu").to(device)
        return self._constants[value, device]

    def keep(self, tensors: Any) -> None:
        """Hold what a captured step reads."""
        # Until the optimizer is deleted: nothing tells when a graph is replayed for the last time. Each capture adds to it.
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            self._kept.append(tensors)


def _scalar_columns(scalars: Sequence[AdamStep], device: torch.device) -> torch.Tensor:
    """The floats of the kernel's ``FLOAT_FIELDS``, a row for each region, made on the device."""
    # float64 until here, rounded once: as the numbers of a step without capture, which the host gives to the kernel.
    return torch.stack([_column(values, device) for values in zip(*map(_floats, scalars))], 1).float()


def _column(values: Sequence[Any], device: torch.device) -> torch.Tensor:
    """Numbers and tensors of one element, of which many in a row are the same."""
    parts = []
    for _, same in itertools.groupby(values, key=lambda value: id(value) if isinstance(value, torch.Tensor) else value):
        value, *rest = same
        count = 1 + len(rest)
        is_tensor = isinstance(value, torch.Tensor)
        parts.append(value.expand(count) if is_tensor else torch.full((count,), value, dtype=torch.float64, device=device))
    return torch.cat(parts)


def _integers(region: Region, numbers: AdamStep, tensors: tuple[torch.Tensor, ...]) -> tuple[int, ...]:
    """The integers of a region for the kernel: its ``INTEGER_FIELDS`` without the first, ``program``."""
    firsts = (region.start, region.start, region.start, region.first_block, region.start, region.first_block)
    addresses = (tensor.data_ptr() + first * tensor.element_size() for tensor, first in zip(tensors, firsts))
    rows, columns = region.sizes[1:]
    key = numbers.rounding_key if isinstance(numbers.rounding_key, int) else 0  # A tensor is put into the table later.
    of_rounding = region.origin, *region.strides[:2], key
    return (*addresses, rows, columns, math.prod(region.grid), *of_rounding)


def _floats(numbers: AdamStep) -> tuple[Any, ...]:
    beta1, beta2 = numbers.beta1, numbers.beta2
    betas = (beta1, beta2, 1 - beta1, 1 - beta2)
    return (numbers.shrink, numbers.decay, *betas, numbers.eps, numbers.step_size, numbers.correction)


def _update_plain(
    run: tuple[torch.Tensor, int, int], flat: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], numbers: AdamStep
) -> None:
    """One step on a parameter without blocks; ``flat`` is the ``run`` (parameter, start, stop) of its local tensor."""
    wide = flat if flat.dtype == torch.float32 else flat.float()
    m, v = (local(state[name]).view(-1) for name, _ in _MOMENTS)
    numbers.update(wide, gradient.float(), m, v)
    if numbers.rounding_key is not None:
        param, start, stop = run
        mesh = mesh_of(param)
        coordinate = () if mesh is None else tuple(mesh.get_coordinate() or ())
        # 8 bytes per element of the whole local tensor, for a moment, also for a short run of it. Parameters without blocks are
        # small, unless their matrices are too narrow for blocks.
        indices = flat_indices(placed_of(param), coordinate, flat.device)[start:stop]
        flat.copy_(round_to_bfloat16(wide, indices, numbers.rounding_key))
    elif wide is not flat:
        flat.copy_(wide)


def update_region(
    region: Region,
    block: tuple[int, int],
    code: str,
    numbers: AdamStep,
    param: torch.Tensor,
    gradient: torch.Tensor,
    moments: Moments,
) -> None:
    """One Adam step on a region in place, vectorised over its blocks. Defines the result that the Triton kernel must equal.

    Args:
        region: the part of the flat local tensors to update.
        block: height and width of a block.
        code: the name of the code book.
        numbers: the scalars of the step.
        param, gradient: flat local tensors of any floating dtype.
        moments: flat local tensors.
    """
    wide = blocks_of(region, param, block).float()  # Shares memory with ``param`` if that is float32 and needs no padding.
    books = [(moments.m_codes, moments.m_scales, True), (moments.v_codes, moments.v_scales, False)]
    values = [decoded(region, block, codes, scales, code, signed) for codes, scales, signed in books]
    numbers.update(wide, blocks_of(region, gradient, block).float(), *values)
    for moment, (codes, scales, signed) in zip(values, books):
        encode_to(codes, scales, region, moment, code, signed)
    updated = matrices_of(region, wide)
    if numbers.rounding_key is not None:
        updated = round_to_bfloat16(updated, region.indices(param.device), numbers.rounding_key)
    if updated.data_ptr() != region.of(param).data_ptr():
        region.of(param).copy_(updated)
