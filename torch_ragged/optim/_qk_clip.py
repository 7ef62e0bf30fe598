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
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from torch_ragged.optim._base import check_placement, local, placed_of

__all__ = ["HeadRows", "QKClip", "QKLayer", "attention_maxima"]


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

    Raises:
        ValueError: the rows do not fit into the weight.
    """

    weight: torch.Tensor
    heads: int
    start: int = 0
    size: Optional[int] = None
    stride: Optional[int] = None

    def __post_init__(self) -> None:
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
        """The layer of two projections, with their biases: attention with one key head per query head, or per several."""

        def rows(linear: nn.Linear, heads: int) -> tuple[HeadRows, ...]:
            return tuple(HeadRows(each, heads) for each in (linear.weight, linear.bias) if each is not None)

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
        clip.watch([block.attn for block in model.layers])   # reads the logits of scaled_dot_product_attention
        ...
        optimizer.step()
        clip.step()                                          # or clip.step(maxima), with maxima of your own

    With ``g = threshold / maximum`` per head, the key head is scaled by ``sqrt`` of the smallest ``g`` of its query heads, and
    each of these by what is left of its own ``g``. If a key head serves one query head, both get ``sqrt(g)``. Make it after
    ``fully_shard`` or ``parallelize``, which replace parameters. It has no effect on weights before a normalization of queries
    and keys.

    Source: Kimi K2 technical report (2025), section 2.1.

    Args:
        layers: the weights of each attention layer, under any placements.
        threshold: the largest logit that is legal.
        group: the ranks that share ``maxima``: all that have the parameters and different batches, or different heads. None is
            the default group; without a process group, this process alone.

    Raises:
        ValueError: there is no layer, the threshold is not positive, or a weight is a Partial DTensor.
    """

    def __init__(self, layers: Sequence[QKLayer], threshold: float = 100.0, *, group: dist.ProcessGroup | None = None) -> None:
        self.layers, self.threshold, self.group = tuple(layers), float(threshold), group
        if not self.layers or not self.threshold > 0.0:
            raise ValueError(f"QKClip needs at least one layer and a positive threshold, got {len(self.layers)}, {threshold!r}")
        for layer in self.layers:
            for rows in (*layer.query, *layer.key, *layer.query_alone):
                check_placement(rows.weight, "QKClip")
        self._watched: Optional[list[Optional[torch.Tensor]]] = None

    def watch(self, modules: Sequence[nn.Module], first_heads: Sequence[int] | int = 0) -> list[Any]:
        """Read the logits of every ``scaled_dot_product_attention`` that these modules call, without gradients.

        It costs one more product of queries and keys per layer, and its memory is that of the logits of one sequence. Use it in
        eager mode.

        Args:
            modules: the attention module of each layer, in the order of ``layers``.
            first_heads: under tensor parallelism, the first query head of this rank, for all layers or for each.

        Returns:
            the handles of the hooks, as ``register_forward_hook`` returns them.

        Raises:
            ValueError: there is not one module per layer.
        """
        if len(modules) != len(self.layers):
            raise ValueError(f"QKClip.watch needs one module per layer: got {len(modules)} for {len(self.layers)} layers")
        firsts = [first_heads] * len(modules) if isinstance(first_heads, int) else list(first_heads)
        self._watched = [None] * len(modules)
        handles = []
        for index, (module, first) in enumerate(zip(modules, firsts)):
            mode = _Watch(functools.partial(self._note, index, first))
            handles.append(module.register_forward_pre_hook(lambda *_, mode=mode: mode.__enter__() and None))
            handles.append(
                module.register_forward_hook(lambda *_, mode=mode: mode.__exit__(None, None, None), always_call=True)
            )
        return handles

    def _note(self, index: int, first: int, maxima: torch.Tensor) -> None:
        assert self._watched is not None
        noted = self._watched[index]
        if noted is None:
            noted = torch.full((self.layers[index].heads,), -torch.inf, dtype=torch.float32, device=maxima.device)
        if first + len(maxima) > len(noted):
            raise ValueError(
                f"layer {index} has {len(noted)} heads, and its module computes {len(maxima)} from head {first} on: give "
                "QKClip.watch first_heads, the first head of this rank, or the layer its number of heads"
            )
        noted[first : first + len(maxima)].copy_(torch.maximum(noted[first : first + len(maxima)], maxima))
        self._watched[index] = noted

    def _maxima(self, given: Sequence[torch.Tensor] | None) -> Sequence[torch.Tensor] | None:
        """Those given, or those that :meth:`watch` has read; None if there are none."""
        if given is not None or self._watched is None:
            return given
        return [
            torch.full((layer.heads,), -torch.inf, device="cpu") if noted is None else noted
            for layer, noted in zip(self.layers, self._watched)
        ]

    @torch.no_grad()
    def step(self, maxima: Sequence[torch.Tensor] | None = None) -> list[torch.Tensor]:
        """Scale the weights. Every rank of the group must call it. Issues one all-reduce (max) of a float32 number per head
        and one further.

        Args:
            maxima: for each layer, the largest logit of each query head on this rank since the last step, of shape (heads,);
                ``-inf`` for heads that this rank does not compute. None: those that :meth:`watch` has read.

        Returns:
            the maxima over all ranks. A head whose maximum is not finite is not scaled.

        Raises:
            ValueError: ``maxima`` have other shapes, or are None without :meth:`watch`, on any rank. Every rank of the group
                raises, and no weight is changed.
        """
        heads = [layer.heads for layer in self.layers]
        given, self._watched = self._maxima(maxima), None if self._watched is None else [None] * len(self.layers)
        shapes = None if given is None else [tuple(each.shape) for each in given]
        is_legal = shapes == [(count,) for count in heads]
        device = local(self.layers[0].key[0].weight).device
        # The last number tells all ranks of a wrong argument: no rank waits for one that has raised.
        packed = torch.full((sum(heads) + 1,), -torch.inf, device=device)
        packed[-1] = float(not is_legal)
        if given is not None and is_legal:
            # NaN becomes infinity: a maximum of NaN and a number may be either.
            values = torch.cat([each.to(device, torch.float32) for each in given])
            packed[:-1].copy_(values.nan_to_num(torch.inf, torch.inf, -torch.inf))
        if dist.is_initialized() and dist.get_world_size(self.group) > 1:
            dist.all_reduce(packed, dist.ReduceOp.MAX, group=self.group)
        # On the host, once: where nothing exceeds the threshold, no weight is touched.
        *found, is_wrong = packed.cpu().split([*heads, 1])
        if given is None:
            raise ValueError("QKClip.step has no maxima: pass them, or call watch() before the forward pass")
        if not is_legal:
            raise ValueError(
                f"QKClip.step takes one maximum per query head: expected shapes {[(count,) for count in heads]}, got {shapes}"
            )
        if is_wrong.item():
            raise ValueError("another rank has no legal maxima for QKClip.step, so no rank scales: see the error of that rank")
        for layer, largest in zip(self.layers, found):
            exceeds = (largest > self.threshold) & largest.isfinite()
            if exceeds.any():
                scale = torch.where(exceeds, self.threshold / largest, 1.0)
                of_keys = scale.view(layer.key_heads, -1).amin(1).sqrt()
                of_queries = scale / of_keys.repeat_interleave(layer.heads // layer.key_heads)
                for parts, factors in ((layer.query, of_queries), (layer.key, of_keys), (layer.query_alone, scale)):
                    for rows in parts:
                        _scale_rows(rows.weight, rows.factors(factors))
        return found


def _scale_rows(weight: torch.Tensor, factors: torch.Tensor) -> None:
    """Multiply each row by its factor: the elements of this rank, wherever they lie."""
    if isinstance(weight, DTensor) and weight.device_mesh.get_coordinate() is None:
        return
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


class _Watch(TorchFunctionMode):
    """While a module computes: notes the maxima of its attention."""

    def __init__(self, note: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self._note = note

    def start(self, *_: Any) -> None:
        """A pre-forward hook."""
        self.__enter__()

    def stop(self, *_: Any) -> None:
        """A forward hook."""
        self.__exit__(None, None, None)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
            given = {**dict(zip(names, args)), **kwargs}
            query, key = given["query"], given["key"]
            if isinstance(query, DTensor):
                raise NotImplementedError(
                    "QKClip.watch reads plain tensors, and this attention has DTensors: pass maxima to QKClip.step, for "
                    "example of attention_maxima(query.to_local(), key.to_local())"
                )
            options = {name: given[name] for name in ("attn_mask", "is_causal", "scale") if name in given}
            self._note(attention_maxima(query.detach(), key.detach(), **options))
        return func(*args, **kwargs)
