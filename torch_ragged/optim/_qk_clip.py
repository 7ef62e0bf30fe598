"""QK-clip: after a step, scale the query and key weights of the heads whose attention logits exceed a threshold.

It changes weights by their owned elements only. It must not know an optimizer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from torch_ragged._register._torch import TorchDispatchMode
from torch_ragged.optim._base import check_placement, local, placed_of
from torch_ragged.tensor._replaced import replaced

__all__ = ["HeadRows", "QKClip", "QKLayer", "attention_maxima"]

_SOFTMAX = ("_softmax", "_safe_softmax", "softmax", "special_softmax")
"""Operations of ATen whose first argument is the logits, beside those of ``scaled_dot_product_attention``."""


@dataclass(frozen=True)
class HeadRows:
    """The rows of a weight (or the elements of a bias) that make one vector per head.

    Head ``h`` has rows ``start + h * stride`` to ``start + h * stride + size``, of the whole weight.

    Attributes:
        weight: a parameter under any placements; rows are its first dimension.
        heads: the number of heads that it has.
        start: the first row of head 0.
        size: rows per head. None: all rows from ``start`` on, divided by the heads.
        stride: rows from one head to the next. None: ``size``.
        owner: the module that has the weight, and the weight's name there, or None. :class:`QKClip` finds there what has
            replaced the weight since, such as the shards of ``fully_shard``.

    Raises:
        TypeError: the weight is no tensor, or the heads are no int.
        ValueError: the rows do not fit into the weight.
    """

    weight: torch.Tensor
    heads: int
    start: int = 0
    size: Optional[int] = None
    stride: Optional[int] = None
    owner: Optional[tuple[nn.Module, str]] = None

    def __post_init__(self) -> None:
        if not isinstance(self.weight, torch.Tensor) or not isinstance(self.heads, int):
            kind = type(self.weight).__name__
            raise TypeError(f"HeadRows takes a weight and its number of heads, an int, got {kind} and {self.heads!r}")
        rows, size = self.weight.shape[0], self.row_size
        end = self.start + (self.heads - 1) * (self.stride or size) + size
        divides = self.size is not None or (rows - self.start) % max(self.heads, 1) == 0
        if self.heads < 1 or self.start < 0 or size < 1 or end > rows or not divides:
            raise ValueError(
                f"HeadRows of {self.heads} heads, start={self.start}, size={self.size}, stride={self.stride} do not fit into a "
                f"weight of shape {tuple(self.weight.shape)}: give the heads of the whole weight, and rows within it"
            )

    @property
    def row_size(self) -> int:
        """Rows per head."""
        return self.size if self.size is not None else (self.weight.shape[0] - self.start) // max(self.heads, 1)

    def factors(self, of_heads: torch.Tensor) -> torch.Tensor:
        """The factor of each row of the weight: that of its head, or 1."""
        result = torch.ones(self.weight.shape[0], dtype=torch.float32, device=of_heads.device)
        size = (self.heads, self.row_size)
        result.as_strided(size, (self.stride or self.row_size, 1), self.start).copy_(of_heads[:, None].expand(size))
        return result


@dataclass(frozen=True)
class QKLayer:
    """The weights that make the queries and keys of one attention layer.

    :meth:`of` and :meth:`latent` make the usual ones.

    Attributes:
        query: rows of query heads. A head's logits grow with them and with those of ``key``.
        key: rows of key heads; each serves as many query heads as there are per key head, in order.
        query_alone: rows of query heads whose keys are shared by all heads, and so do not change: these take the whole factor.
    """

    query: tuple[HeadRows, ...]
    key: tuple[HeadRows, ...]
    query_alone: tuple[HeadRows, ...] = ()

    def __post_init__(self) -> None:
        heads = {rows.heads for rows in (*self.query, *self.query_alone)}
        key_heads = {rows.heads for rows in self.key}
        if len(heads) != 1 or len(key_heads) != 1 or self.heads % self.key_heads:
            raise ValueError(
                f"a QKLayer has {sorted(heads)} query heads and {sorted(key_heads)} key heads: give rows of one number of "
                "query heads, and of one number of key heads that divides it"
            )

    @property
    def heads(self) -> int:
        """Query heads."""
        return (*self.query, *self.query_alone)[0].heads

    @property
    def key_heads(self) -> int:
        """Key heads."""
        return self.key[0].heads

    @staticmethod
    def of(query: nn.Linear, key: nn.Linear, heads: int, key_heads: Optional[int] = None) -> QKLayer:
        """The layer of two projections, with their biases: attention with one key head per query head, or per several.

        Raises:
            TypeError: ``query`` or ``key`` is no module.
            ValueError: the heads do not divide the rows.
        """
        for linear in (query, key):
            if not isinstance(linear, nn.Module):
                raise TypeError(f"QKLayer.of takes the Linear modules of queries and keys, got {type(linear).__name__}")

        def rows(linear: nn.Linear, heads: int) -> tuple[HeadRows, ...]:
            named = {name: getattr(linear, name) for name in ("weight", "bias")}
            return tuple(HeadRows(each, heads, owner=(linear, name)) for name, each in named.items() if each is not None)

        return QKLayer(rows(query, heads), rows(key, key_heads or heads))

    @staticmethod
    def latent(query: torch.Tensor, key_value: torch.Tensor, heads: int, nope: int, rope: int, value: int) -> QKLayer:
        """The layer of multi-head latent attention (DeepSeek-V3, Kimi K2).

        Args:
            query: the up-projection of queries: per head ``nope`` rows, then ``rope`` rows.
            key_value: the up-projection of keys and values: per head ``nope`` rows of keys, then ``value`` rows. The rotary key
                is one for all heads, and does not change.
            heads, nope, rope, value: the number of heads, and the sizes of a head.
        """
        return QKLayer(
            (HeadRows(query, heads, 0, nope, nope + rope),),
            (HeadRows(key_value, heads, 0, nope, nope + value),),
            (HeadRows(query, heads, nope, rope, nope + rope),),
        )


class QKClip:
    """QK-clip of MuonClip: attention logits stay bounded, although the optimizer lets query and key weights grow.

    After each step, the heads whose largest logit exceeds ``threshold`` get query and key weights that are scaled, so that the
    same inputs would give logits of at most the threshold. All other heads keep their logits::

        layers = [QKLayer.of(block.attn.q_proj, block.attn.k_proj, heads=32, key_heads=8) for block in model.layers]
        clip = QKClip(layers, threshold=100.0)
        clip.watch([block.attn for block in model.layers])   # reads the logits of attention
        ...
        optimizer.step()
        clip.step()                                          # or clip.step(maxima), with maxima of your own

    With ``g = threshold / maximum`` per head, the key head is scaled by ``sqrt`` of the smallest ``g`` of its query heads, and
    each of these by what is left of its own ``g``. If a key head serves one query head, both get ``sqrt(g)``. It has no effect
    on weights before a normalization of queries and keys.

    If ``fully_shard`` or ``parallelize`` replaces a parameter, a step scales what is now in its module. If another function
    does so, such as ``reshard_to``, the module must be known: by :meth:`QKLayer.of`, the ``owner`` of :class:`HeadRows`, or
    :meth:`watch`. The layers keep a replaced parameter in memory: better make them afterwards.

    Source: Kimi K2 technical report (2025), section 2.1.

    Args:
        layers: the weights of each attention layer, under any placements.
        threshold: the largest logit that is legal.
        group: the ranks that share ``maxima``: all that have the parameters and different batches, or different heads. None is
            the default group; without a process group, this process alone.

    Raises:
        TypeError: a layer is no :class:`QKLayer`.
        ValueError: there is no layer, the threshold is not positive, or a weight is a Partial DTensor.
    """

    def __init__(self, layers: Sequence[QKLayer], threshold: float = 100.0, *, group: dist.ProcessGroup | None = None) -> None:
        self.layers, self.threshold, self.group = tuple(layers), float(threshold), group
        if not self.layers or not self.threshold > 0.0:
            raise ValueError(f"QKClip needs at least one layer and a positive threshold, got {len(self.layers)}, {threshold!r}")
        if wrong := [type(layer).__name__ for layer in self.layers if not isinstance(layer, QKLayer)]:
            raise TypeError(f"QKClip takes a list of QKLayer, got {wrong[0]}: make them with QKLayer.of(query, key, heads)")
        self._owners: dict[torch.Tensor, tuple[nn.Module, str]] = {}  # Of weights: where they were registered.
        self._current: dict[torch.Tensor, torch.Tensor] = {}  # By weights: what a step scales.
        for layer in self.layers:
            for rows in (*layer.query, *layer.key, *layer.query_alone):
                check_placement(rows.weight, "QKClip")
                self._current[rows.weight] = rows.weight
                if rows.owner is not None:
                    self._owners[rows.weight] = rows.owner
        self._modules: list[str] = []  # The classes of the watched ones.
        self._watched: Optional[list[Optional[torch.Tensor]]] = None
        # Heads without a maximum since the start. Equal on all ranks: steps set it by maxima over all ranks.
        self._unseen = [torch.ones(layer.heads, dtype=torch.bool, device="cpu") for layer in self.layers]

    def _find_owners(self, modules: Sequence[nn.Module]) -> None:
        """Note where weights are registered: in one of ``modules``, or where they were when they were replaced."""
        for weight in self._current:
            if weight in replaced and (owner := replaced[weight][0]()) is not None:
                self._owners.setdefault(weight, (owner, replaced[weight][1]))
        for module in modules:
            for each in module.modules():
                for name, param in each._parameters.items():
                    if param is not None and param in self._current:
                        self._owners.setdefault(param, (each, name))

    def watch(self, modules: Sequence[nn.Module], first_heads: Sequence[int] | int | None = None) -> list[Any]:
        """Read the logits of the attention that these modules compute, without gradients.

        It sees ``scaled_dot_product_attention`` and ``softmax``, wherever they are called: in attention by products or einsum,
        in ``nn.MultiheadAttention`` and ``nn.TransformerEncoderLayer``. Logits that enter a softmax have the shape
        (batch, heads, L, S), (batch, L, heads, S), (batch, key heads, query heads per key head, L, S) or, without
        ``first_heads``, (batch times heads, L, S). Other kernels are not seen. Use it in eager mode.

        ``scaled_dot_product_attention`` costs one more product of queries and keys, and its memory is that of the logits of one
        sequence.

        Args:
            modules: the attention module of each layer, in the order of ``layers``.
            first_heads: under tensor parallelism, the first query head of this rank, for all layers or for each. None: the
                modules compute all heads.

        Returns:
            the handles of the hooks, as ``register_forward_hook`` returns them.

        Raises:
            TypeError: ``modules`` are no list of modules.
            ValueError: there is not one module per layer; or a weight of a layer is no parameter of its module, which has
                DTensors: another library has replaced it.
        """
        if isinstance(modules, nn.Module) or not all(isinstance(module, nn.Module) for module in modules):
            raise TypeError(f"QKClip.watch takes a list of attention modules, one per layer, got {type(modules).__name__}")
        if len(modules) != len(self.layers):
            raise ValueError(f"QKClip.watch needs one module per layer: got {len(modules)} for {len(self.layers)} layers")
        self._find_owners(modules)
        for index, (layer, module) in enumerate(zip(self.layers, modules)):
            weights = [rows.weight for rows in (*layer.query, *layer.key, *layer.query_alone)]
            is_lost = any(not isinstance(each, DTensor) and each not in self._owners for each in weights)
            if is_lost and any(isinstance(param, DTensor) for param in module.parameters()):
                raise ValueError(
                    f"QKClip layer {index} has weights that are no parameters of its {type(module).__name__}, which has "
                    "DTensors: they were replaced since. Make the layers afterwards"
                )
        firsts = [first_heads] * len(modules) if isinstance(first_heads, (int, type(None))) else list(first_heads)
        self._watched, self._modules = [None] * len(modules), [type(module).__name__ for module in modules]
        handles = []
        for index, (module, first) in enumerate(zip(modules, firsts)):
            mode = _AttentionWatch(functools.partial(self._note, index, first), self.layers[index].heads, first is None)
            # ``and None``: what a pre-hook returns would replace the inputs of the module. If the module is recomputed in
            # backward, the hooks run again, and note the same maxima.
            handles.append(module.register_forward_pre_hook(lambda *_, mode=mode: mode.__enter__() and None))
            handles.append(
                # always_call: the mode must not stay on if forward raises.
                module.register_forward_hook(lambda *_, mode=mode: mode.__exit__(None, None, None), always_call=True)
            )
        return handles

    def _note(self, index: int, first: int | None, maxima: torch.Tensor) -> None:
        assert self._watched is not None
        noted, heads, start = self._watched[index], self.layers[index].heads, first or 0
        if start + len(maxima) > heads or (first is None and len(maxima) != heads):
            raise ValueError(
                f"layer {index} has {heads} heads, and its module computes {len(maxima)} from head {start} on: give "
                "QKClip.watch first_heads, the first head of this rank, or the layer its number of heads"
            )
        # On the device of the logits: no wait of the host in forward. A step reads them.
        if noted is None:
            noted = torch.full((heads,), -torch.inf, dtype=torch.float32, device=maxima.device)
        noted[start : start + len(maxima)].copy_(torch.maximum(noted[start : start + len(maxima)], maxima))
        self._watched[index] = noted

    def _maxima(self, given: Sequence[torch.Tensor] | None) -> Sequence[torch.Tensor] | None:
        """Those given, or those that :meth:`watch` has read; None if there are none."""
        if given is not None or self._watched is None:
            return given
        return [
            torch.full((layer.heads,), -torch.inf, device="cpu") if noted is None else noted
            for layer, noted in zip(self.layers, self._watched)
        ]

    def _find_current(self) -> str:
        """Look for what has replaced weights in their modules. Returns what is wrong."""
        self._find_owners(())
        for weight, (module, name) in self._owners.items():
            param, current = module._parameters.get(name), self._current[weight]
            if param is current:
                continue
            if isinstance(param, DTensor):
                check_placement(param, "QKClip")
                self._current[weight] = param
            elif not isinstance(current, DTensor):  # Of DTensors, it is the unsharded parameter of a unit.
                return (
                    f"the {name} of a {type(module).__name__}, of shape {tuple(weight.shape)}, was replaced, and not by a "
                    "DTensor: make the layers of QKClip afterwards; or its unit is unsharded: call reshard() before the step"
                )
        return ""

    @torch.no_grad()
    def step(self, maxima: Sequence[torch.Tensor] | None = None) -> list[torch.Tensor]:
        """Scale the weights. Every rank of the group must call it. Issues one all-reduce (max) of a float32 number per head
        and two further.

        Args:
            maxima: for each layer, the largest logit of each query head on this rank since the last step, of shape (heads,);
                ``-inf`` for heads that this rank does not compute. None: those that :meth:`watch` has read.

        Returns:
            the maxima over all ranks. A head whose maximum is not finite is not scaled.

        Raises:
            ValueError: ``maxima`` have other shapes, or are None without :meth:`watch`, on any rank. Every rank of the group
                raises, and no weight is changed.
            RuntimeError: :meth:`watch` has seen no logits of a head on any rank, in no step so far; or a weight was replaced by
                a tensor that is no DTensor. Every rank of the group raises, and no weight is changed.
        """
        heads = [layer.heads for layer in self.layers]
        given = self._maxima(maxima)
        # Forgotten before anything can raise: the next step counts anew, on all ranks.
        watches, self._watched = maxima is None, None if self._watched is None else [None] * len(self.layers)
        shapes: Any = type(given).__name__
        if isinstance(given, (list, tuple)):
            shapes = [tuple(each.shape) if isinstance(each, torch.Tensor) else type(each).__name__ for each in given]
        # A text and not an exception: this rank must first take part in the all-reduce, for which others wait.
        wrong = self._find_current()
        is_legal = shapes == [(count,) for count in heads] and not wrong
        device = local(self._current[self.layers[0].key[0].weight]).device
        # The last two numbers tell all ranks of a wrong argument and of watching: no rank waits for one that has raised.
        packed = torch.full((sum(heads) + 2,), -torch.inf, device=device)
        packed[-2], packed[-1] = float(watches), float(not is_legal)
        if given is not None and is_legal:
            # NaN becomes infinity: a maximum of NaN and a number may be either.
            values = torch.cat([each.to(device, torch.float32) for each in given])
            packed[:-2].copy_(values.nan_to_num(torch.inf, torch.inf, -torch.inf))
        if dist.is_initialized() and dist.get_world_size(self.group) > 1:
            dist.all_reduce(packed, dist.ReduceOp.MAX, group=self.group)
        # On the host, once: where nothing exceeds the threshold, no weight is touched.
        *found, any_watches, is_wrong = packed.cpu().split([*heads, 1, 1])
        if wrong:
            raise RuntimeError(f"QKClip.step: {wrong}")
        if given is None:
            raise ValueError("QKClip.step has no maxima: pass them, or call watch() before the forward pass")
        if not is_legal:
            raise ValueError(
                f"QKClip.step takes one maximum per query head: expected shapes {[(count,) for count in heads]}, got {shapes}"
            )
        if is_wrong.item():
            raise ValueError("another rank has no legal maxima for QKClip.step, so no rank scales: see the error of that rank")
        self._unseen = [unseen & largest.isneginf() for unseen, largest in zip(self._unseen, found)]
        if any_watches.item() and any(unseen.any() for unseen in self._unseen):
            raise RuntimeError(
                f"QKClip.watch has seen no attention logits of {self._text_of_unseen()}, on any rank, since the start: their "
                "modules were not called, or call neither scaled_dot_product_attention nor a softmax of logits (batch, heads, "
                "L, S). Watch the modules that compute attention; under tensor parallelism, give first_heads; or pass maxima "
                "to step(): attention_maxima(query, key) computes them"
            )
        # No further communication: the maxima are equal on all ranks, so all shards and replicas of a weight get the same
        # factors. Assumed: no weight is in two layers, or makes both queries and keys. It would be scaled once for each.
        for layer, largest in zip(self.layers, found):
            exceeds = (largest > self.threshold) & largest.isfinite()
            if exceeds.any():
                scale = torch.where(exceeds, self.threshold / largest, 1.0)
                of_keys = scale.view(layer.key_heads, -1).amin(1).sqrt()
                of_queries = scale / of_keys.repeat_interleave(layer.heads // layer.key_heads)
                for parts, factors in ((layer.query, of_queries), (layer.key, of_keys), (layer.query_alone, scale)):
                    for rows in parts:
                        _scale_rows(self._current[rows.weight], rows.factors(factors))
        return found

    def _text_of_unseen(self) -> str:
        """The layers and, if only some of its heads are unseen, these heads."""
        texts = []
        for index, unseen in enumerate(self._unseen):
            name = f"layer {index}" + (f" ({self._modules[index]})" if self._modules else "")
            if unseen.any():
                texts.append(name if unseen.all() else f"heads {unseen.nonzero().flatten().tolist()} of {name}")
        return ", ".join(texts)


def _scale_rows(weight: torch.Tensor, factors: torch.Tensor) -> None:
    """Multiply each row by its factor: the elements of this rank, wherever they lie."""
    if isinstance(weight, DTensor) and weight.device_mesh.get_coordinate() is None:
        return
    # The shards themselves, outside of autograd. The factors are float32, so a product is rounded once, to the dtype of the
    # weight.
    mine = local(weight)
    factors = factors.to(mine.device)
    coordinate = tuple(weight.device_mesh.get_coordinate() or ()) if isinstance(weight, DTensor) else ()
    for box in placed_of(weight).owned(coordinate).boxes:
        if box.numel:
            part = mine.as_strided(box.sizes, box.local_strides, mine.storage_offset() + box.local_offset)
            rows = factors[box.offsets[0] : box.offsets[0] + box.sizes[0]]
            part.copy_(part * rows.view(-1, *(1 for _ in box.sizes[1:])))


@torch.no_grad()
def attention_maxima(
    query: torch.Tensor,
    key: torch.Tensor,
    *,
    attn_mask: Optional[torch.Tensor] = None,
    is_causal: bool = False,
    scale: Optional[float] = None,
) -> torch.Tensor:
    """The largest logit of each head of ``scaled_dot_product_attention``, for :class:`QKClip`.

    Args:
        query: (batch, heads, L, E).
        key: (batch, key heads, S, E); each key head serves as many query heads as there are per key head.
        attn_mask, is_causal, scale: as in ``torch.nn.functional.scaled_dot_product_attention``. Masked logits do not count; a
            mask of numbers is added.

    Returns:
        (heads,), float32. Memory: the logits of one sequence. No communication.

    Raises:
        ValueError: the key heads do not divide the query heads, or there is a mask beside ``is_causal``.
    """
    if query.shape[1] % key.shape[1] or (is_causal and attn_mask is not None):
        raise ValueError(
            f"attention_maxima got {query.shape[1]} query heads, {key.shape[1]} key heads, is_causal={is_causal} and "
            f"{'a' if attn_mask is not None else 'no'} mask: give key heads that divide the query heads; is_causal or a mask"
        )
    heads, scale = query.shape[1], query.shape[-1] ** -0.5 if scale is None else scale
    key = key.repeat_interleave(heads // key.shape[1], 1) if key.shape[1] != heads else key
    if is_causal:
        attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None:
        attn_mask = attn_mask.expand(len(query), heads, query.shape[-2], key.shape[-2])
    result = torch.full((heads,), -torch.inf, dtype=torch.float32, device=query.device)
    for index in range(len(query)):
        logits = (query[index].float() @ key[index].float().mT) * scale
        if attn_mask is not None:
            mask = attn_mask[index]
            logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
        result = torch.maximum(result, logits.amax((-1, -2)))
    return result


def _maxima_of(logits: torch.Tensor) -> torch.Tensor:
    """The largest logit of each head, of shape (batch, heads, L, S); ``-inf`` if the maximum of each row was subtracted."""
    # Only attention with weights of zeros also has such rows, and no other numbers; masks have large ones.
    # On the device, as a tensor: a condition of Python would make the host wait in each forward.
    is_shifted = (logits.amax(-1) == 0).all() & ((logits < 0) & (logits > -1e3)).any()
    return torch.where(is_shifted, -torch.inf, logits.amax((0, 2, 3)).float())


class _AttentionWatch(TorchDispatchMode):
    """While a module computes: notes the maxima of its attention.

    It sees ATen operations. A function mode would not see what functions such as ``F.multi_head_attention_forward`` call: it is
    off inside of them.
    """

    def __init__(self, note: Callable[[torch.Tensor], None], heads: int, has_all_heads: bool) -> None:
        super().__init__()
        self._note, self._heads, self._has_all_heads = note, heads, has_all_heads

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, kwargs = func._schema.name.removeprefix("aten::"), kwargs or {}
        if name in _SOFTMAX:
            logits = self._by_head(args[0], args[1])
            if logits is not None:
                self._check_plain(logits)
                self._note(_maxima_of(logits))
        elif "scaled_dot_product" in name and func._schema.arguments[0].name == "query":
            given = {**{each.name: value for each, value in zip(func._schema.arguments, args)}, **kwargs}
            self._check_plain(given["query"])
            query, key = (given[each] if given[each].ndim > 3 else given[each][None] for each in ("query", "key"))
            mask = given.get("attn_mask", given.get("attn_bias"))
            self._note(
                attention_maxima(query, key, attn_mask=mask, is_causal=given.get("is_causal", False), scale=given.get("scale"))
            )
        return func(*args, **kwargs)

    def _by_head(self, logits: torch.Tensor, dim: int) -> torch.Tensor | None:
        """What enters a softmax with the heads as dimension 1; None if it does not look like logits of attention."""
        shape = logits.shape
        if len(shape) not in (3, 4, 5) or dim % len(shape) < len(shape) - 2 or not logits.numel():
            return None
        if len(shape) == 3:
            is_folded = self._has_all_heads and shape[0] % self._heads == 0
            return logits.unflatten(0, (-1, self._heads)) if is_folded else None
        logits = logits.flatten(1, 2) if len(shape) == 5 else logits
        if not self._has_all_heads:
            return logits
        # Of equal sizes, the usual order counts: heads before the sequence.
        return next((logits.transpose(1, dim) for dim in (1, 2) if logits.shape[dim] == self._heads), None)

    @staticmethod
    def _check_plain(tensor: torch.Tensor) -> None:
        if isinstance(tensor, DTensor):
            raise NotImplementedError(
                "QKClip.watch reads plain tensors, and this attention has DTensors: pass maxima to QKClip.step, for example of "
                "attention_maxima(query.to_local(), key.to_local())"
            )
