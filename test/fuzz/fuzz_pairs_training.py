"""Trains one run of ``fuzz_pairs`` on the ranks of this process group and in one process, and compares the two.

After each comparison, the plain model goes on with the sharded run's gradients and parameters, so that each tolerance is that
of one forward and backward. Where nothing is rounded (float64 models), it is some roundings of float64.
"""

from __future__ import annotations

import contextlib
import hashlib
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fuzz_ops import bytes_of
from fuzz_pairs import FEATURES, why_not
from fuzz_training import Mismatch, OnPurpose, clip, full, largest, shared_folder
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.func import functional_call
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from torch_ragged import checkpoint as ragged_checkpoint
from torch_ragged import fsdp
from torch_ragged._kernels import float4, float8
from torch_ragged._kernels.tiles import TileRun, TileTable
from torch_ragged.fsdp import FSDPModule, fully_shard
from torch_ragged.fsdp.budget import _fit
from torch_ragged.fsdp.budget._choice import Choice
from torch_ragged.fsdp.schedule import _auto
from torch_ragged.fsdp.schedule._search import Knobs, ScheduleSearch
from torch_ragged.optim import SOAP, AdamW8bit, Muon, Shampoo, matrix_groups, muon_policy

__all__ = ["PairTraining"]

SLACK = 256
SLACK_OF_LOW = 16
WORDS = 10  # A plan may cut them in two.
_LOW = {
    "bfloat16": (torch.bfloat16, None),
    "bfloat16, sums in float32": (torch.bfloat16, torch.float32),
    "float16": (torch.float16, None),
    "sums in bfloat16": (None, torch.bfloat16),
    "Float8Policy": (torch.bfloat16, torch.float32),
    "Float4Policy": (torch.bfloat16, torch.float32),
}
_meshes: dict[Any, DeviceMesh] = {}


def _half(needs: Any, device_bytes: int) -> Choice:
    """What fit might choose: all units but the first are recomputed, and that one stays unsharded."""
    return Choice(frozenset(list(needs.seconds)[1:]), 0.0, tuple(needs.unsharded)[:1], 0, "", 0.0)


class Wrapped(torch.Tensor):
    """A tensor type with its own all-gather, which sends its values as they are."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.size(), inner.stride(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain_args, plain_kwargs = pytree.tree_map_only(cls, lambda each: each.inner, (args, kwargs or {}))
        result = func(*plain_args, **plain_kwargs)
        if func._schema.name.endswith("_") and isinstance(args[0], cls):
            return args[0]
        views = {"split", "slice", "view", "as_strided", "clone", "detach", "new_zeros", "empty_like", "_to_copy", "zeros_like"}
        views |= {"narrow", "alias", "view_as"}
        if func.overloadpacket.__name__ in views:
            return pytree.tree_map_only(torch.Tensor, cls, result)
        return result

    def __tensor_flatten__(self) -> Any:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, metadata: Any, size: Any, stride: Any) -> Wrapped:
        return Wrapped(inner["inner"])

    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        return (self.inner.to(mp_policy.param_dtype or self.dtype),), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        return None if out is not None else (outputs[0], outputs)


torch.serialization.add_safe_globals([Wrapped])  # Or torch's checkpoints of it cannot be loaded.


def width_of(run: dict[str, Any]) -> int:
    """Codes of 4 bits need rows of 32."""
    return 32 if run["precision"].startswith("Float") else 6


class Block(nn.Module):
    """x + down(tanh(up(x))) * gain; the second one has parameters that not every rank uses."""

    def __init__(self, run: dict[str, Any], dtype: torch.dtype, tp: DeviceMesh | None) -> None:
        super().__init__()
        self.run, self.tp, width = run, tp, width_of(run)
        self.up, self.down = nn.Linear(width, 3 * width, dtype=dtype), nn.Linear(3 * width, width, bias=False, dtype=dtype)
        self.gain = nn.Parameter(torch.rand(width, dtype=torch.float64).to(dtype) + 0.5)
        self.extra = nn.Parameter(torch.rand(5, width, dtype=torch.float64).to(dtype))
        if run["type"] == "complex":
            wide = torch.complex128 if dtype == torch.float64 else torch.complex64
            self.turn = nn.Parameter(torch.polar(torch.ones(width, dtype=torch.float64), torch.rand(width).double()).to(wide))
        self.uses_extra = run["trains"] not in ("unused", "used on one rank")
        if tp is not None:
            for module, dim in ((self.up, 0), (self.down, 1)):
                for name, param in list(module.named_parameters()):
                    module.register_parameter(name, nn.Parameter(distribute_tensor(param.data, tp, [Shard(dim)])))

    def product(self, x: torch.Tensor) -> torch.Tensor:
        if self.tp is None:
            return self.down(torch.tanh(self.up(x)))
        x = DTensor.from_local(x, self.tp, [Replicate()], run_check=False)
        return self.down(torch.tanh(self.up(x))).full_tensor()

    def forward(self, x: torch.Tensor) -> Any:
        y = self.product(x) * self.gain
        if self.uses_extra:
            y = y + self.extra.sum(0) / 8
        if self.run["type"] == "complex":
            y = torch.view_as_real(y.to(self.turn.dtype) * self.turn).sum(-1).to(x.dtype)
        x = x + y
        outputs = self.run["outputs"]
        if outputs == "kept":
            self.kept = y
        return {"several": (x, y), "None": (x, None), "dict": {"x": x, "y": y}}.get(outputs, x)


class Net(nn.Module):
    """An embedding, two blocks and a head, which may be tied to the embedding."""

    def __init__(self, run: dict[str, Any], dtype: torch.dtype, tp: DeviceMesh | None = None) -> None:
        super().__init__()
        self.run, width = run, width_of(run)
        self.table = nn.Embedding(WORDS, width, dtype=dtype)
        self.blocks = nn.ModuleList(Block(run, dtype, tp) for _ in range(2))
        self.head = nn.Linear(width, WORDS, bias=False, dtype=dtype)
        if run["ties"] == "tied":
            self.table.weight.data.mul_(0.2)  # Else a head of such weights lets the steps of SGD grow without end.
            self.head.weight = self.table.weight
        if run["trains"] == "frozen":
            self.blocks[0].up.weight.requires_grad_(False)
            self.table.weight.requires_grad_(False)
        self.skips, self.recompute = False, ""

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        x, others = x + self.table(ids), []
        for number, block in enumerate(self.blocks):
            if self.skips and number == 1:
                continue
            if self.recompute and torch.is_grad_enabled():
                result = checkpoint(block, x, use_reentrant=self.recompute == "reentrant checkpoint")
            else:
                result = block(x)
            if isinstance(result, dict):
                x, other = result["x"], result["y"]
            elif isinstance(result, tuple):
                x, other = result
            else:
                x, other = result, block.kept if self.run["outputs"] == "kept" else None
            if other is not None:
                others.append(other.mean(-1, keepdim=True))
        return torch.cat([self.head(x), *others], -1)


def mesh_of(name: str) -> DeviceMesh:
    """A mesh of the world group, made once per process group."""
    key = (name, id(dist.group.WORLD))
    if key not in _meshes:
        shape, names = {"hsdp": ((2, 2), ("replicas", "dp")), "tp": ((2, 2), ("dp", "tp"))}.get(
            name, ((dist.get_world_size(),), ("dp",))
        )
        _meshes[key] = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return _meshes[key]


class PairTraining:
    """One run. :meth:`run` raises a :class:`Mismatch` if something differs from one process."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.case, self.where, self.number = case, "at first", 0
        self.digest, self.closes = hashlib.sha1(), contextlib.ExitStack()
        whole = mesh_of(case["mesh"])
        self.tp = whole["tp"] if case["mesh"] == "tp" else None
        self.mesh = whole["dp"] if self.tp is not None else whole
        self.ranks = self.mesh.size()
        coordinate = self.mesh.get_coordinate() or [0]
        self.rank = coordinate[0] * self.mesh.size(-1) * (self.mesh.ndim - 1) + coordinate[-1]
        self.is_low = case["precision"] != ""
        self.dtype = torch.float32 if self.is_low else torch.float64
        self.param_dtype, reduce_dtype = _LOW.get(case["precision"], (None, None))
        used = [self.dtype, *filter(None, (self.param_dtype, reduce_dtype))]
        self.rounding = max(torch.finfo(each).eps for each in used)
        self.codes: dict[str, int | None] = {}  # Parameters that are gathered as codes, and the dimension the model cuts.
        self.divisor = 3.0 if case["knob"] == "set_gradient_divide_factor" else float(self.ranks)
        self.plain, self.model = self.build(None), self.build(self.tp)
        self.may_have_weights = all(
            why_not(pair) is None
            for name, value in case.items()
            if name in FEATURES and name not in ("weights", "mesh")
            for pair in [((name, value), ("weights", "uneven"))]
        )
        self.optimizers: list[Any] = []
        self.watch: Any = None
        if case["recompute"] == "compiled":  # Processes have run other cases: one may be at the limit of compilations.
            torch._dynamo.reset()

    def build(self, tp: DeviceMesh | None) -> Net:
        torch.manual_seed(self.case["seed"])
        return Net(self.case, self.dtype, tp)

    # -- the sharded model -------------------------------------------------------------------------------------------------

    def options(self) -> dict[str, Any]:
        """What all calls of ``fully_shard`` get."""
        case, shards = self.case, self.mesh.size(-1)
        options: dict[str, Any] = {"mesh": self.mesh}
        if case["placements"]:
            options["placements"] = getattr(fsdp, case["placements"])
        if case["cut"] == "muon_policy":
            options["orig_param_policy"] = muon_policy()
        elif case["cut"].startswith("Shard"):
            dim = int(case["cut"][-2])
            ranks = self.mesh.size() if case["placements"] == "HIERARCHICAL" else shards
            options["shard_placement_fn"] = lambda param: (
                Shard(dim) if param.ndim > dim and not (param.is_complex() and param.shape[dim] % ranks) else None
            )
        elif case["cut"]:
            options["orig_param_policy"] = self.granularity
        if case["precision"]:
            kind = getattr(fsdp, case["precision"], MixedPrecisionPolicy)
            param_dtype, reduce_dtype = _LOW[case["precision"]]
            options["mp_policy"] = kind(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
        if case["offload"] == "CPUOffloadPolicy":
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        elif case["offload"] == "files":
            options["offload_policy"] = fsdp.Offload(parameters="files", to=shared_folder(self.closes))
        elif case["offload"]:
            options["offload_policy"] = {
                "Offload(parameters=True)": fsdp.Offload(parameters=True),
                "Offload(optimizer=0.5)": fsdp.Offload(optimizer=0.5),
            }[case["offload"]]
        if case["weights"]:
            weights = [1] * shards
            weights[0] = 3 if case["weights"] == "uneven" else 0
            options["weights"] = weights
        if case["reshard"]:
            options["reshard_after_forward"] = {"True": True, "False": False, "2": 2}[case["reshard"]]
        return options

    def granularity(self, name: str, param: torch.Tensor) -> Any:
        cut = self.case["cut"]
        if cut == "segments":
            return fsdp.segments((width_of(self.case),) * 3, fsdp.rows(2)) if name.endswith("up.weight") else None
        return {"rows": fsdp.rows(2), "blocks": fsdp.blocks(2, 3), "tensor": fsdp.tensor()}[cut] if param.ndim > 1 else None

    def wrap(self) -> None:
        """Give some weights a type of their own."""
        if self.case["type"] == "extension":
            for block in self.model.blocks:
                owner, name = (block.down, "weight") if self.tp is None else (block, "extra")
                setattr(owner, name, nn.Parameter(Wrapped(getattr(owner, name).detach().clone())))

    def shard(self, **options: Any) -> None:
        """What recomputes, the shards, the knobs and the optimizers."""
        case, model = self.case, self.model
        self.wrap()
        if case["recompute"] == "compiled":
            for block in model.blocks:
                block.compile(backend="aot_eager")
        elif case["recompute"]:
            model.recompute = case["recompute"]
        self.distribute(**options)
        self.set_knob()
        self.find_codes()
        if case["trains"] == "frozen later":
            for each in (model, self.plain):
                each.blocks[0].gain.requires_grad_(True)
        self.optimizers = [self.optimizer(model, False), self.optimizer(self.plain, True)]

    def distribute(self, **options: Any) -> None:
        """The calls of ``fully_shard``."""
        case, model = self.case, self.model
        if case["call"] == "list":
            fully_shard(list(model.blocks), **options)
        elif case["call"] != "root only":
            for number, block in enumerate(model.blocks):
                fully_shard(block, **options, **({"optional": True} if case["call"] == "optional" and number else {}))
        fully_shard(model, **options)

    def find_codes(self) -> None:
        """Which parameters the policy has quantized."""
        names, self.codes = {id(param): name for name, param in self.model.named_parameters()}, {}
        for module in self.model.modules():
            for group in module._ragged_groups(recurse=False) if isinstance(module, FSDPModule) else ():
                for param in group.params if group.plan.part(fsdp.Float8Policy) is not None else ():
                    cuts = [each.dim for each in param.sharded.placements if type(each) is Shard]
                    self.codes[names[id(param.sharded)]] = cuts[0] if cuts else None

    def set_knob(self) -> None:
        knob, model = self.case["knob"], self.model
        parts = [module for module in model.modules() if isinstance(module, FSDPModule)]
        if knob == "prefetch":
            for index, part in enumerate(parts):
                part.set_modules_to_forward_prefetch(parts[index + 1 : index + 3])
                part.set_modules_to_backward_prefetch(parts[max(0, index - 2) : index][::-1])
        elif knob in ("set_gradient_divide_factor", "set_force_sum_reduction_for_comms"):
            for part in parts:
                getattr(part, knob)({"set_gradient_divide_factor": 3.0}.get(knob, True))
        elif knob == "set_collectives":
            model.set_collectives("copy_engine")
        elif knob == "set_schedule":
            # Found after the second step, for all times, so that the last steps run under it.
            self.closes.enter_context(mock.patch.object(_auto, "_PASSES", 1))
            wide = Knobs(forward=2**20, backward=2**20, reductions=3, unsharded=1)
            self.closes.enter_context(mock.patch.object(ScheduleSearch, "best", lambda search: wide))
            model.set_schedule("auto", extra_bytes=2**20)
        elif knob == "fit":
            self.closes.enter_context(mock.patch.object(_fit, "cheapest", _half))
            fsdp.fit(model, lambda: self.loss(self.forward(0)[0]).backward(), device_bytes=2**40)
        elif knob == "monitor":
            self.watch = self.closes.enter_context(fsdp.monitor(model))
        elif knob:
            value = {"set_max_all_gathers_ahead": 0, "set_reduce_scatter_max_input_buffers": 3}.get(
                knob, knob != "set_reshard_after_backward"
            )
            getattr(model, knob)(value)

    def optimizer(self, model: nn.Module, is_plain: bool) -> Any:
        kind, params = self.case["optimizer"], [param for param in model.parameters() if param.requires_grad]
        if kind == "SGD":
            return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01)
        if kind in ("AdamW", "loop", "fused"):
            how = {"AdamW": {}, "loop": {"foreach": False}, "fused": {"fused": True}}[kind]
            return torch.optim.AdamW(params, lr=0.01, **how)
        if kind == "AdamW8bit":
            return AdamW8bit(params, lr=0.01)
        if kind in ("Muon", "Shampoo", "SOAP"):
            groups = matrix_groups(model, lr=0.01)
            for group in groups:
                group["params"] = [param for param in group["params"] if param.requires_grad]
            return {"Muon": Muon, "Shampoo": Shampoo, "SOAP": SOAP}[kind]([g for g in groups if g["params"]], lr=0.02)
        if kind == "offloaded":
            if is_plain:
                return torch.optim.AdamW(params, lr=0.01)
            return fsdp.offloaded(torch.optim.AdamW, model, lr=0.01)
        assert kind == "in backward"
        if not is_plain:
            for param in params:
                param.register_post_accumulate_grad_hook(_step_of(torch.optim.SGD([param], lr=0.05)))
            return None
        return torch.optim.SGD(params, lr=0.05)

    # -- one process ---------------------------------------------------------------------------------------------------------

    def batch(self, number: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.case["seed"] * 1009 + number * 17 + rank)
        x = torch.randn(3, width_of(self.case), generator=generator, dtype=torch.float64).to(self.dtype)
        return torch.randint(0, WORDS, (3,), generator=generator), x

    def set_branches(self, model: Net, number: int, rank: int) -> None:
        """What differs between ranks in a forward."""
        model.skips = self.case["call"] == "optional" and (number + rank) % 2 == 1
        if self.case["trains"] == "used on one rank":
            for block in model.blocks:
                block.uses_extra = rank == self.ranks - 1

    def plain_forward(self, number: int, rank: int) -> torch.Tensor:
        ids, x = self.batch(number, rank)
        self.set_branches(self.plain, number, rank)
        low = self.param_dtype
        if low is None:
            return self.plain(ids, x)
        cast = {}
        for name, param in self.plain.named_parameters():
            cast[name] = param.to(low) if param.is_floating_point() else param
            if name in self.codes:  # The gradient goes past the codes.
                cast[name] = self.decoded(name, param.detach()).to(low) + (param - param.detach()).to(low)
        return functional_call(self.plain, cast, (ids, x.to(low)))

    def decoded(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """What a gathered parameter is after its codes: each piece of the model by itself."""
        dim, kind = self.codes[name], float8 if self.case["precision"] == "Float8Policy" else float4
        if dim is not None:
            return torch.cat([_decoded(kind, piece.contiguous()) for piece in whole.chunk(2, dim)], dim)
        return _decoded(kind, whole)

    def forward(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids, x = self.batch(number, self.rank)
        self.set_branches(self.model, number, self.rank)
        x.requires_grad_(torch.is_grad_enabled())  # A reentrant checkpoint needs an input with a gradient.
        return self.model(ids, x), x

    def loss(self, output: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return output.to(self.dtype).square().mean() * scale

    # -- steps ---------------------------------------------------------------------------------------------------------------

    def run(self) -> str:
        """All steps. Returns a digest of all values compared, which is the same on all ranks."""
        if "refused" not in self.case:
            return self.train()
        try:
            self.train()
        except Exception as error:
            # The part that tells what to do: names and numbers before it are those of an example.
            text = " ".join(str(error).split())
            if not any(wanted.rpartition(": ")[2] in text for wanted in self.case["refused"]):
                raise
        else:
            raise Mismatch(f"nothing was raised, expected {self.case['refused']!r}")
        self.reshard()
        self.check_values("after the refusal", exact=True)
        return self.digest.hexdigest()

    def train(self) -> str:
        with self.closes:
            self.shard(**self.options())
            self.check_values("after fully_shard", exact=True)
            for step in range(4):
                self.where = f"step {step}"
                if self.watch is not None:
                    self.watch.step(step)
                if step == 2:
                    getattr(self, "do_" + _method(self.case["state"]))()
                if self.case["trains"] == "frozen later":
                    for each in (self.model, self.plain):
                        each.blocks[0].gain.requires_grad_(step != 1)
                self.step(step)
            self.check_values("at the end")
        return self.digest.hexdigest()

    def step(self, step: int) -> None:
        case, model = self.case, self.model
        if step == 1:
            self.between()
        micro, scale = 1 if case["sync"] == "" else 2, 8.0 if case["scaler"] else 1.0
        has_inf = case["scaler"] == "inf on one rank" and step == 1
        for index in range(micro):
            last = index == micro - 1
            if case["sync"] == "no sync":
                model.set_requires_gradient_sync(last)
            elif case["sync"] == "is_last_backward":
                model.set_is_last_backward(last)
            elif case["sync"] == "replicas":
                model.set_requires_all_reduce(last)
            number, self.number = self.number, self.number + 1
            output, _ = self.forward(number)
            loss = self.loss(output, scale)
            if has_inf and self.rank == 0:
                loss = loss * float("inf")
            self.backward(loss, step)
            if case["knob"] == "set_manual_backward_finalization" and (last or case["sync"] == "every pass"):
                model.finalize_backward()
            times = 2 if case["between"] == "retain_graph" and step == 1 else 1
            for rank in range(self.ranks):
                expected = self.plain_forward(number, rank)
                if rank == self.rank:
                    self.compare(output, expected, "the output", largest(expected))
                (self.loss(expected) * times / self.divisor).backward()
        self.finish(scale, has_inf)

    def backward(self, loss: torch.Tensor, step: int) -> None:
        if self.case["between"] == "retain_graph" and step == 1:
            loss.backward(retain_graph=True)
        loss.backward()

    def finish(self, scale: float, has_inf: bool) -> None:
        """Unscale, clip, compare gradients, and let both optimizers step."""
        case = self.case
        self.reshard()
        params = list(self.model.parameters())
        if scale != 1.0:
            scaler = torch.amp.GradScaler("cpu", init_scale=scale)
            scaler.scale(torch.ones(()))
            scaler.unscale_(self.optimizers[0])
            states = scaler._per_optimizer_states[id(self.optimizers[0])]["found_inf_per_device"]
            found = [float(each) for each in states.values()]
            if bool(sum(found)) != has_inf:
                raise Mismatch(f"{self.where}: the scaler has found inf: {found}, expected {has_inf}")
        if has_inf:
            self.clear()
            return
        if case["optimizer"] != "in backward":
            self.check_gradients()
        if case["clip"]:
            norms = clip(params, 0.5), clip(list(self.plain.parameters()), 0.5)
            self.compare(full(norms[0]), norms[1], "the norm of gradients", float(norms[1]))
            self.check_gradients()
        for optimizer in self.optimizers:
            if optimizer is not None:
                optimizer.step()
        self.check_values("after the optimizer's step")
        self.clear()

    def reshard(self) -> None:
        """Register the sharded parameters, whose gradients are compared, if a knob has left others."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def clear(self) -> None:
        self.reshard()
        none = self.case["between"] != "zero_grad(False)"
        self.model.zero_grad(set_to_none=none)
        self.plain.zero_grad(set_to_none=none)

    def between(self) -> None:
        """What else a loop does between two steps."""
        what = self.case["between"]
        if what == "evaluation":
            with torch.no_grad():
                self.check_output()
        elif what == "unshard by hand":
            for module in self.model.modules():
                if isinstance(module, FSDPModule) and self.case["knob"] != "set_persistent_buffers":
                    module.unshard()
            self.reshard()
            if self.case["knob"] != "set_persistent_buffers":
                self.model.unshard()
        elif what in ("forward raises", "backward raises"):
            self.interrupt(what == "forward raises")
        elif what == "gradient of input":
            output, x = self.forward(self.number)
            (found,) = torch.autograd.grad(self.loss(output), [x], allow_unused=True)
            ids, other = self.batch(self.number, self.rank)
            other.requires_grad_()
            self.set_branches(self.plain, self.number, self.rank)
            if self.param_dtype is None:
                (expected,) = torch.autograd.grad(self.loss(self.plain(ids, other)), [other])
                self.compare(found, expected, "the gradient of the input", largest(expected))
        elif what == "two losses":
            output, _ = self.forward(self.number)
            other, _ = self.forward(self.number)
            self.loss(output).backward()
            self.loss(other).backward()
            if self.case["knob"] == "set_manual_backward_finalization":
                self.model.finalize_backward()
            for rank in range(self.ranks):
                (2 * self.loss(self.plain_forward(self.number, rank)) / self.divisor).backward()
            self.number += 1
            self.reshard()
            self.check_gradients()
            self.clear()

    def check_output(self) -> None:
        expected = self.plain_forward(self.number, self.rank)
        self.compare(self.forward(self.number)[0], expected, "an output", largest(expected))

    def interrupt(self, in_forward: bool) -> None:
        def fail(*args: Any) -> None:
            raise OnPurpose

        def attach(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            if output.requires_grad:
                output.register_hook(fail)

        # Compiled code does not see a hook that comes later.
        where = self.model.head if self.case["recompute"] == "compiled" else self.model.blocks[0].up
        handle = where.register_forward_hook(fail if in_forward else attach)
        try:
            with contextlib.suppress(OnPurpose):
                output, _ = self.forward(self.number)
                self.loss(output).backward()
        finally:
            handle.remove()
        self.model.reset_iter_state()
        self.clear()

    # -- states --------------------------------------------------------------------------------------------------------------

    def do_nothing(self) -> None:
        pass

    def do_full_state_dict(self) -> None:
        expected = {name: value.detach() for name, value in self.plain.state_dict().items()}
        found = self.model.state_dict()
        if list(found) != list(expected):
            raise Mismatch(f"{self.where}: names {list(found)}, expected {list(expected)}")
        for name, value in expected.items():
            self.compare(_inner(full(found[name])), value, name, 0.0)
        values = {name: (value * 0.5 + 0.1).clone() for name, value in expected.items()}
        self.model.load_state_dict(values)
        self.plain.load_state_dict(values)
        self.check_values("after load_state_dict", exact=True)

    def do_dcp(self) -> None:
        folder, optimizer = shared_folder(self.closes), self.optimizers[0]
        given = [] if optimizer is None else [optimizer]
        model_state, optimizer_state = get_state_dict(self.model, given)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
        self.disturb()
        model_state, optimizer_state = get_state_dict(self.model, given)
        dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
        # Not strict: torch misses states of parameters that had no gradient yet.
        loose = StateDictOptions(strict=False)
        set_state_dict(self.model, given, model_state_dict=model_state, optim_state_dict=optimizer_state, options=loose)
        self.check_values("after DCP", exact=True)

    def do_checkpoint(self) -> None:
        """Resume in a model of other layouts."""
        folder = shared_folder(self.closes)
        ragged_checkpoint.save(folder, ragged_checkpoint.TrainState(self.model, self.optimizers[0]))
        if self.watch is not None:
            self.watch.close()
        self.watch, self.case = None, {**self.case, "knob": "", "cut": "", "weights": "", "placements": "", "reshard": ""}
        self.divisor = float(self.ranks)
        plain_optimizer = self.optimizers[1]
        self.model = self.build(self.tp)
        with torch.no_grad():
            for param in self.model.parameters():
                param.mul_(2)
        self.shard(**self.options())
        self.optimizers[1] = plain_optimizer
        ragged_checkpoint.load(folder, ragged_checkpoint.TrainState(self.model, self.optimizers[0]))
        self.check_values("after load", exact=True)

    def do_reshard_to(self) -> None:
        """To other shares of the ranks, if the run may have weights; to a mesh of the same ranks."""
        other, shards = self.mesh, self.mesh.size(-1)
        if self.tp is None:  # All ranks make it.
            other = DeviceMesh("cpu", self.mesh.mesh, mesh_dim_names=self.mesh.mesh_dim_names)
        weights = [1] * (shards - 1) + [2] if self.may_have_weights else None
        optimizers = [] if self.optimizers[0] is None else [self.optimizers[0]]
        fsdp.reshard_to(self.model, optimizers, other, weights=weights)
        self.check_values("after reshard_to", exact=True)

    def do_neighbourcopies(self) -> None:
        copies = fsdp.NeighbourCopies(self.model, [] if self.optimizers[0] is None else [self.optimizers[0]])
        copies.update()
        copies.wait()
        if "refused" not in self.case:
            self.disturb()
        copies.recover(self.mesh)
        self.check_values("after recover", exact=True)

    def disturb(self) -> None:
        with torch.no_grad():
            for param in self.model.parameters():
                param.mul_(3)

    # -- comparisons ---------------------------------------------------------------------------------------------------------

    def check_values(self, when: str, exact: bool = False) -> None:
        for (name, param), other in zip(self.model.named_parameters(), self.plain.parameters(), strict=True):
            value = _inner(full(param.detach()))
            self.compare(value, other.detach(), f"{name} {when}", 0.0 if exact else max(1.0, largest(other)) / 16)
            other.data.copy_(value)

    def check_gradients(self) -> None:
        scale = max((largest(param.grad) for param in self.plain.parameters() if param.grad is not None), default=0.0)
        for (name, param), other in zip(self.model.named_parameters(), self.plain.parameters(), strict=True):
            if (param.grad is None) != (other.grad is None):
                raise Mismatch(f"{self.where}: {name} has {'no' if param.grad is None else 'a'} gradient, unlike one process")
            if param.grad is not None:
                value = _inner(full(param.grad))
                self.compare(value, other.grad, f"the gradient of {name}", scale)
                other.grad.copy_(value)

    def compare(self, found: torch.Tensor, expected: torch.Tensor, what: str, scale: float) -> None:
        """Raise if they differ by more than roundings of ``scale``; by anything at all if that is 0."""
        found, expected = found.detach(), expected.detach()
        if found.shape != expected.shape:
            raise Mismatch(f"{self.where}: {what} has shape {tuple(found.shape)}, expected {tuple(expected.shape)}")
        if "output" not in what and "input" not in what:
            self.digest.update(bytes_of(found))
        if torch.equal(found, expected.to(found.dtype)):
            return
        wide = torch.complex128 if found.is_complex() else torch.float64
        # Of a narrow dtype, many roundings would be as large as the values themselves.
        slack = SLACK_OF_LOW if self.is_low else SLACK
        error, limit = float((found.to(wide) - expected.to(wide)).abs().max()), slack * self.rounding * scale
        if not error <= limit:
            raise Mismatch(f"{self.where}: {what} differs by {error:.3g}, limit {limit:.3g}\n{found}\nexpected\n{expected}")


def _decoded(kind: Any, whole: torch.Tensor) -> torch.Tensor:
    """``whole`` quantized and dequantized by one call of the kernels, as if one rank had all of it."""
    run, count = TileRun(0, 0, 0, (1, *whole.shape)), whole.numel()
    if kind is float8:
        run = TileRun(0, 0, -(-count // 4), (1, *whole.shape))
        codes: list[torch.Tensor] = [torch.zeros(count + 16, dtype=torch.uint8)]
        table = TileTable([run], float8.TILES[0])
    else:
        codes = [torch.zeros(count // 2, dtype=torch.uint8)]
        table = TileTable([run], float4.TILE)
        codes.append(torch.zeros(count // 32, dtype=torch.int8))
    back = torch.empty(count)
    kind.quantize(whole.reshape(-1), codes[0], table, *codes[1:])
    kind.dequantize(back, codes[0], table, *codes[1:])
    return back.view(whole.shape)


def _method(state: str) -> str:
    return state.lower().replace(" ", "_") or "nothing"


def _step_of(optimizer: torch.optim.Optimizer) -> Any:
    def step(param: torch.Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    return step


def _inner(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.inner if isinstance(tensor, Wrapped) else tensor
