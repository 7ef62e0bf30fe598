"""Does a training step fit on a rank? What fills the memory, and what to change.

It must not estimate buffers: one step of ``fully_shard``'s own code runs on the meta device, as in ``memory_report``.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from torch_ragged._register._torch import fake_world
from torch_ragged.fsdp import MixedPrecisionPolicy, fully_shard
from torch_ragged.fsdp._groups import module_states
from torch_ragged.fsdp.tools._replay import Activations, Replay
from torch_ragged.offline._memory import Precision, zero_memory
from torch_ragged.offline._model_plan import ModelPlan, ModelPlanner
from torch_ragged.offline._models import Model
from torch_ragged.offline._shapes import Parameter

__all__ = ["Fitting", "Change", "Setting", "StepMemory", "fitting", "step_memory"]

_LARGEST_SIZE = 4096


@dataclass(frozen=True)
class Setting:
    """What a rank does in a step.

    Attributes:
        batch: sequences per rank and backward.
        sequence: tokens per sequence.
        checkpointing: whether each block computes its activations again in backward.
        replicas: the number of replicas (HSDP).
    """

    batch: int
    sequence: int
    checkpointing: bool = False
    replicas: int = 1

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence


@dataclass(frozen=True)
class StepMemory:
    """Bytes per rank at the peak of a step under ZeRO-3, padding included.

    Attributes:
        moment: when the peak is, such as "backward of model.layers.3".
        parameters: the shards of the parameters.
        optimizer: the optimizer's states.
        grad: the gradients that are reduced.
        gathered: gathered parameters.
        unreduced: gradients that are not reduced yet.
        activations: what autograd keeps, the logits, the loss, and a gradient before it is copied. Without ``decoder``, the
            last of these only.
    """

    moment: str
    parameters: int
    optimizer: int
    grad: int
    gathered: int
    unreduced: int
    activations: int

    @property
    def parts(self) -> dict[str, int]:
        """The bytes by what they are."""
        return {
            "parameters": self.parameters,
            "optimizer": self.optimizer,
            ".grad": self.grad,
            "gathered": self.gathered,
            "unreduced grads": self.unreduced,
            "activations": self.activations,
        }

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Change:
    """A change, on top of those before it, and the bytes of a rank with it."""

    text: str
    total: int


def step_memory(model: Model, plan: ModelPlan, precision: Precision, setting: Setting) -> StepMemory:
    """The memory of a rank at the peak of a training step of ``fully_shard`` on each block and on the model.

    It counts what ``memory_report`` counts, and activations. It does not count CUDA's context, NCCL's buffers, fragmentation,
    what kernels allocate while they run, and what the optimizer allocates in its step only (``fused=True`` allocates nothing).

    Its process must have no process group. It makes one whose collectives move nothing, and destroys it.
    """
    policy = MixedPrecisionPolicy(param_dtype=precision.param, reduce_dtype=precision.reduce)
    # One parameter as large as a buffer gives the buffers of the model's own parameters: the plan has placed these.
    sizes = {name: layout.shard_numel for name, layout in plan.group_layouts().items()}
    blocks = {name: _Sized(shard * plan.ranks, precision.shard) for name, shard in sizes.items() if name != "rest"}
    root = _Sized(sizes.get("rest", 0) * plan.ranks, precision.shard)
    root.blocks = nn.ModuleList(blocks.values())
    # A fake group counts as NCCL does: a reduce-scatter over gloo would hold a second buffer.
    with fake_world(plan.ranks * setting.replicas):
        shape = (setting.replicas, plan.ranks) if setting.replicas > 1 else (plan.ranks,)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        for module in root.blocks:
            fully_shard(module, mesh=mesh, mp_policy=policy)
        fully_shard(root, mesh=mesh, mp_policy=policy)
        states = dict(zip(["rest", *blocks], module_states(root).values()))
        moment, held = Replay(states, _activations(model, precision, setting)).play(list(states.values()))
    resident = zero_memory(plan.ragged, precision)[3]
    return StepMemory(
        moment.replace("of rest", "of the head"),
        resident.parameters,
        resident.optimizer,
        held["grad"],
        held["gathered"],
        held["gradients"],
        held["activations"],
    )


class _Sized(nn.Module):
    """In place of a block: one parameter as large as the block's buffer."""

    blocks: nn.ModuleList  # Of the root.

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        super().__init__()
        if numel:
            self.weight = nn.Parameter(torch.empty(numel, dtype=dtype, device="meta"))


def _activations(model: Model, precision: Precision, setting: Setting) -> dict[str, Activations]:
    """By group: what autograd keeps. In backward also the largest gradient, which autograd makes before it is copied."""
    itemsize, tokens, decoder = precision.param.itemsize, setting.tokens, model.decoder
    held = {}
    for name, group in model.groups.items():
        again = itemsize * _largest_numel(group)
        if decoder is None:
            held[name] = Activations(0, again)
            continue
        saved = decoder.saved[name]
        nbytes, again = tokens * saved.nbytes(itemsize), again + tokens * itemsize * saved.gradients
        if name == "rest":
            # Logits, which a script keeps, and their gradient. The loss: the log-softmax in float32, its gradient, its input's.
            logits = tokens * decoder.vocabulary
            of_loss = (12 - itemsize) * logits
            held[name] = Activations(nbytes + itemsize * logits, again, loss=of_loss, output=itemsize * logits)
        elif setting.checkpointing:
            held[name] = Activations(tokens * decoder.hidden * itemsize, nbytes + again)
        else:
            held[name] = Activations(nbytes, again)
    return held


def _largest_numel(group: Sequence[Parameter]) -> int:
    """Elements of the largest parameter. Experts count as one: modules keep them in one tensor, where checkpoints may not."""
    numels: Counter[str] = Counter()
    for one in group:
        numels[re.sub(r"experts\.\d+", "experts", one.name)] += math.prod(one.shape)
    return max(numels.values())


@dataclass(frozen=True)
class Fitting:
    """Whether a step fits on a rank.

    Attributes:
        ranks: the FSDP size.
        setting: what a rank does.
        memory: the bytes that the rank may use.
        reserve: those of them that a step must leave, for what is not counted.
        ways: the peak without checkpointing (``"no"``), and with it (``"blocks"``), if the model's activations are known.
        changes: if the first of these does not fit: what to change, the least harm first, each on top of those before it. The
            last one fits, or none does.
        enough_ranks: if none of these fits: the smallest of the doubled FSDP sizes with checkpointing that does, or None.
    """

    ranks: int
    setting: Setting
    memory: int
    reserve: int
    ways: dict[str, StepMemory]
    changes: tuple[Change, ...]
    enough_ranks: int | None = None

    @property
    def limit(self) -> int:
        return self.memory - self.reserve

    @property
    def knows_activations(self) -> bool:
        return "blocks" in self.ways

    @property
    def fits(self) -> bool:
        """Whether a step fits, with checkpointing if need be."""
        return any(memory.total <= self.limit for memory in self.ways.values())


def fitting(
    planner: ModelPlanner, plan: ModelPlan, precision: Precision, setting: Setting, memory: int, reserve: int = 0
) -> Fitting:
    """Whether a step leaves ``reserve`` of ``memory`` bytes per rank, and what to change if it does not."""
    limit = memory - reserve
    kinds = {"no": setting, "blocks": replace(setting, checkpointing=True)} if planner.model.decoder else {"no": setting}
    ways = {way: step_memory(planner.model, plan, precision, each) for way, each in kinds.items()}
    changes: list[Change] = []
    if ways["no"].total > limit:
        for change in _changes(planner, plan, precision, setting, ways):
            changes.append(change)
            if change.total <= limit:
                break
    found = Fitting(plan.ranks, setting, memory, reserve, ways, tuple(changes))
    return found if found.fits else replace(found, enough_ranks=_enough_ranks(planner, plan, precision, setting, limit))


def _changes(
    planner: ModelPlanner, plan: ModelPlan, precision: Precision, setting: Setting, ways: dict[str, StepMemory]
) -> Iterator[Change]:
    *_, memory = ways.values()
    if "blocks" in ways:
        setting = replace(setting, checkpointing=True)
        yield Change("checkpoint each block, about a third more compute", memory.total)
        while setting.batch > 1:
            setting = replace(setting, batch=setting.batch // 2)
            memory = step_memory(planner.model, plan, precision, setting)
            yield Change(f"batch {setting.batch}, and accumulate gradients", memory.total)
    yield Change("Offload(1.0): the optimizer's states in host memory", memory.total - memory.optimizer)
    transient = memory.total - memory.optimizer - memory.parameters - memory.grad
    yield Change("Offload(parameters=True): shards in host memory too", transient)


def _enough_ranks(planner: ModelPlanner, plan: ModelPlan, precision: Precision, setting: Setting, limit: int) -> int | None:
    """The smallest of the doubled FSDP sizes at which a step fits without offload."""
    ranks, setting = 2 * plan.ranks, replace(setting, checkpointing=planner.model.decoder is not None)
    while ranks <= _LARGEST_SIZE:
        if step_memory(planner.model, planner.plan(ranks), precision, setting).total <= limit:
            return ranks
        ranks *= 2
    return None
