"""Parameter names and shapes of published model families, and what a step keeps per token, from their ``config.json``.

Names and shapes are those of the checkpoints: if a checkpoint stores each expert in a tensor of its own, this does so too. What
autograd keeps is that of the modules of Hugging Face transformers, with attention that keeps no scores (SDPA's fused kernels,
flash attention). Dropout, masks and tables of rotary embeddings are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

__all__ = ["FAMILIES", "Config", "Decoder", "Groups", "Parameter", "Saved", "gpt_oss_original"]


class Parameter(NamedTuple):
    """A parameter.

    Attributes:
        name: the fully qualified name.
        shape: the shape.
        expert: whether it is a weight matrix of an expert, routed or shared.
    """

    name: str
    shape: tuple[int, ...]
    expert: bool = False


Groups = dict[str, list[Parameter]]
"""By name of a group, its parameters: one group per transformer block, and ``"rest"`` for all other parameters."""


@dataclass(frozen=True)
class Saved:
    """What autograd keeps of a forward for the backward: elements per token.

    Attributes:
        narrow: elements in the compute dtype.
        wide: elements in float32, or in the compute dtype if that is wider: in norms, softmax and routers.
        gradients: gradients of these that exist at the same time, in the compute dtype: those of an MLP's product.
    """

    narrow: int = 0
    wide: int = 0
    gradients: int = 0

    def __add__(self, other: Saved) -> Saved:
        return Saved(self.narrow + other.narrow, self.wide + other.wide, self.gradients + other.gradients)

    def nbytes(self, itemsize: int) -> int:
        """Bytes per token, if the compute dtype has ``itemsize`` bytes."""
        return self.narrow * itemsize + self.wide * max(4, itemsize)


@dataclass(frozen=True)
class _Submodule:
    """A part of a block: its parameters, and what its forward keeps."""

    parameters: list[Parameter] = field(default_factory=list)
    saved: Saved = Saved()

    def __add__(self, other: _Submodule) -> _Submodule:
        return _Submodule(self.parameters + other.parameters, self.saved + other.saved)


@dataclass(frozen=True)
class Decoder:
    """A decoder of tokens.

    Attributes:
        groups: its parameters.
        saved: by name of a group, what its forward keeps. That of ``"rest"`` is what the last norm and the head keep.
        hidden: elements per token between blocks.
        vocabulary: logits per token.
    """

    groups: Groups
    saved: dict[str, Saved]
    hidden: int
    vocabulary: int


class Config:
    """The fields of a ``config.json``.

    Raises:
        ValueError: a method reads a field that is missing and has no default, or a field of another type.
    """

    def __init__(self, fields: Mapping[str, Any], source: str) -> None:
        self._fields, self._source = fields, source

    def count(self, name: str, default: int | None = None, least: int = 1) -> int:
        """The integer field ``name``, at least ``least``. A null counts as missing."""
        value = self._fields.get(name)
        value = default if value is None else value
        if value is None:
            raise ValueError(f"{self._source} has no field {name!r}, which its model_type needs")
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{self._source}: {name} must be an integer of at least {least}, got {value!r}")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """The boolean field ``name``."""
        value = self._fields.get(name, default)
        if not isinstance(value, bool):
            raise ValueError(f"{self._source}: {name} must be true or false, got {value!r}")
        return value

    def inner(self, name: str, **defaults: int) -> Config:
        """The configuration in the field ``name``, or this one if there is no such field, with ``defaults``."""
        value = self._fields.get(name, self._fields)
        if not isinstance(value, Mapping):
            raise ValueError(f"{self._source}: {name} must be an object, got {value!r}")
        return Config({**defaults, **value}, self._source)

    def layers(self, name: str) -> set[int]:
        """The field ``name``, a list of layer numbers. Empty if the field is missing."""
        value = self._fields.get(name) or []
        if not isinstance(value, list) or not all(isinstance(layer, int) for layer in value):
            raise ValueError(f"{self._source}: {name} must be a list of layer numbers, got {value!r}")
        return set(value)


def _linear_params(name: str, out: int, into: int, bias: bool = False, expert: bool = False) -> _Submodule:
    """Its input counts where it is made: several linears may share it."""
    weight = Parameter(f"{name}.weight", (out, into), expert)
    return _Submodule([weight, Parameter(f"{name}.bias", (out,))] if bias else [weight])


def _norm(name: str, size: int, heads: int = 1) -> _Submodule:
    """An RMSNorm of each head: it keeps its input in float32, a factor, and the normalized values for the weight's gradient."""
    return _Submodule([Parameter(f"{name}.weight", (size,))], Saved(heads * size, heads * (size + 1)))


def _wide_norm(name: str, size: int, heads: int = 1) -> _Submodule:
    """An RMSNorm that multiplies by its weight in float32, as those of Gemma 3 and GPT-OSS do."""
    return _Submodule([Parameter(f"{name}.weight", (size,))], Saved(0, heads * (2 * size + 1)))


def _gated_mlp(name: str, hidden: int, inner: int, bias: bool = False, expert: bool = False) -> _Submodule:
    """It keeps its input, both projections, the activation, and the product, the input of the last matrix."""
    linears = (
        _linear_params(f"{name}.gate_proj", inner, hidden, bias, expert)
        + _linear_params(f"{name}.up_proj", inner, hidden, bias, expert)
        + _linear_params(f"{name}.down_proj", hidden, inner, bias, expert)
    )
    return linears + _Submodule(saved=Saved(hidden + 4 * inner, gradients=2 * inner))


def _routed(
    config: Config, parameters: list[Parameter], hidden: int, inner: int, experts: int, active: int, of_inner: int = 4
) -> _Submodule:
    """Experts and their router: a copy of each token for each of its experts. An index counts as two elements.

    ``active`` is the family's default.
    """
    active = config.count("num_experts_per_tok", active)
    saved = Saved(hidden + active * (2 * hidden + of_inner * inner), experts + 11 * active, gradients=2 * active * inner)
    return _Submodule(parameters, saved)


def _expert_mlps(hidden: int, inner: int, experts: int) -> list[Parameter]:
    mlps = (_gated_mlp(f"mlp.experts.{i}", hidden, inner, expert=True) for i in range(experts))
    return [one for mlp in mlps for one in mlp.parameters]


_Norm = Callable[[str, int, int], _Submodule]


def _attention(config: Config, qkv_bias: bool, out_bias: bool, qk_norm: _Norm | None = None, head_dim: int = 0) -> _Submodule:
    """Grouped-query attention. ``head_dim`` is the family's default; 0 means hidden size / heads.

    It keeps the input of the projections, queries, keys, values, its output, and one number per head.
    """
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    groups = config.count("num_key_value_heads", heads)
    head = config.count("head_dim", head_dim or hidden // heads)
    linears = (
        _linear_params("self_attn.q_proj", heads * head, hidden, qkv_bias)
        + _linear_params("self_attn.k_proj", groups * head, hidden, qkv_bias)
        + _linear_params("self_attn.v_proj", groups * head, hidden, qkv_bias)
        + _linear_params("self_attn.o_proj", hidden, heads * head, out_bias)
    )
    norms = qk_norm("self_attn.q_norm", head, heads) + qk_norm("self_attn.k_norm", head, groups) if qk_norm else _Submodule()
    return linears + norms + _Submodule(saved=Saved(hidden + 2 * (heads + groups) * head, heads))


def _latent_attention(config: Config) -> _Submodule:
    """DeepSeek's multi-head latent attention. Without ``q_lora_rank``, the query is one projection."""
    hidden, heads, bias = config.count("hidden_size"), config.count("num_attention_heads"), config.flag("attention_bias")
    nope, rope = config.count("qk_nope_head_dim"), config.count("qk_rope_head_dim")
    value, kv_rank, q_rank = config.count("v_head_dim"), config.count("kv_lora_rank"), config.count("q_lora_rank", 0, 0)
    queries = _linear_params("self_attn.q_proj", heads * (nope + rope), hidden)
    if q_rank:
        queries = (
            _linear_params("self_attn.q_a_proj", q_rank, hidden, bias)
            + _norm("self_attn.q_a_layernorm", q_rank)
            + _linear_params("self_attn.q_b_proj", heads * (nope + rope), q_rank)
        )
    return (
        queries
        + _linear_params("self_attn.kv_a_proj_with_mqa", kv_rank + rope, hidden, bias)
        + _norm("self_attn.kv_a_layernorm", kv_rank)
        + _linear_params("self_attn.kv_b_proj", heads * (nope + value), kv_rank)
        + _linear_params("self_attn.o_proj", hidden, heads * value, bias)
        + _Submodule(saved=Saved(hidden + q_rank + kv_rank + 2 * heads * (nope + rope + value), heads))
    )


_TWO_NORMS = ("input_layernorm", "post_attention_layernorm")


def _decoder_of(
    config: Config,
    block: Callable[[int], _Submodule],
    norm: _Norm = _norm,
    norms: tuple[str, ...] = _TWO_NORMS,
    tied: bool = False,
) -> Decoder:
    """An embedding, one block of ``block(layer)`` and ``norms`` per layer, a last norm, and a head unless it is tied.

    ``tied`` is the family's default.
    """
    hidden, vocabulary = config.count("hidden_size"), config.count("vocab_size")
    groups, saved = {}, {}
    for layer in range(config.count("num_hidden_layers")):
        name, own = f"model.layers.{layer}", block(layer)
        for each in norms:
            own += norm(each, hidden, 1)
        groups[name] = [one._replace(name=f"{name}.{one.name}") for one in own.parameters]
        saved[name] = own.saved
    head = _Submodule() if config.flag("tie_word_embeddings", tied) else _linear_params("lm_head", vocabulary, hidden)
    rest = _linear_params("model.embed_tokens", vocabulary, hidden) + norm("model.norm", hidden, 1) + head
    groups["rest"], saved["rest"] = rest.parameters, rest.saved + Saved(hidden)
    return Decoder(groups, saved, hidden, vocabulary)


def _llama(config: Config) -> Decoder:
    bias, mlp_bias = config.flag("attention_bias"), config.flag("mlp_bias")
    sizes = config.count("hidden_size"), config.count("intermediate_size")
    return _decoder_of(config, lambda _: _attention(config, bias, bias) + _gated_mlp("mlp", *sizes, mlp_bias))


def _qwen2(config: Config) -> Decoder:
    sizes = config.count("hidden_size"), config.count("intermediate_size")
    return _decoder_of(config, lambda _: _attention(config, True, False) + _gated_mlp("mlp", *sizes))


def _qwen3(config: Config) -> Decoder:
    bias = config.flag("attention_bias")
    sizes = config.count("hidden_size"), config.count("intermediate_size")
    return _decoder_of(config, lambda _: _attention(config, bias, bias, _norm, 128) + _gated_mlp("mlp", *sizes))


def _qwen3_moe(config: Config) -> Decoder:
    hidden, bias = config.count("hidden_size"), config.flag("attention_bias")
    # transformers 5 writes another name.
    experts = config.count("num_experts", config.count("num_local_experts", 0, 0) or None)
    inner, dense_layers = config.count("moe_intermediate_size"), config.layers("mlp_only_layers")

    def block(layer: int) -> _Submodule:
        attention = _attention(config, bias, bias, _norm)
        if layer in dense_layers or (layer + 1) % config.count("decoder_sparse_step", 1):
            return attention + _gated_mlp("mlp", hidden, config.count("intermediate_size"))
        experts_of = _routed(config, _expert_mlps(hidden, inner, experts), hidden, inner, experts, 8)
        return attention + _linear_params("mlp.gate", experts, hidden) + experts_of

    return _decoder_of(config, block)


def _mixtral(config: Config) -> Decoder:
    hidden, inner, experts = (config.count(name) for name in ("hidden_size", "intermediate_size", "num_local_experts"))
    name = "block_sparse_moe"
    matrices = [
        Parameter(f"{name}.experts.{i}.{each}.weight", shape, expert=True)
        for i in range(experts)
        for each, shape in (("w1", (inner, hidden)), ("w2", (hidden, inner)), ("w3", (inner, hidden)))
    ]
    moe = _linear_params(f"{name}.gate", experts, hidden) + _routed(config, matrices, hidden, inner, experts, 2)
    return _decoder_of(config, lambda _: _attention(config, False, False) + moe)


def _deepseek_v3(config: Config) -> Decoder:
    hidden, inner, experts = (config.count(name) for name in ("hidden_size", "moe_intermediate_size", "n_routed_experts"))
    shared, dense_layers = config.count("n_shared_experts", 0, 0), config.count("first_k_dense_replace", 0, 0)

    def block(layer: int) -> _Submodule:
        if layer < dense_layers or layer % config.count("moe_layer_freq", 1):
            return _latent_attention(config) + _gated_mlp("mlp", hidden, config.count("intermediate_size"))
        gate = [Parameter("mlp.gate.weight", (experts, hidden)), Parameter("mlp.gate.e_score_correction_bias", (experts,))]
        routed = _routed(config, _expert_mlps(hidden, inner, experts) + gate, hidden, inner, experts, 8)
        both = _gated_mlp("mlp.shared_experts", hidden, shared * inner, expert=True) if shared else _Submodule()
        # The router multiplies in float32. The shared expert has the input of the routed ones.
        return _latent_attention(config) + routed + both + _Submodule(saved=Saved(-hidden if shared else 0, hidden + experts))

    return _decoder_of(config, block)


def _gemma3(config: Config) -> Decoder:
    """The decoder of Gemma 3, without its vision tower."""
    config = config.inner("text_config", num_attention_heads=8, num_key_value_heads=4, head_dim=256, vocab_size=262208)
    sizes = config.count("hidden_size"), config.count("intermediate_size")
    norms = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
    bias = config.flag("attention_bias")

    def block(_: int) -> _Submodule:
        return _attention(config, bias, bias, _wide_norm) + _gated_mlp("mlp", *sizes)

    return _decoder_of(config, block, _wide_norm, norms, tied=True)


def _gpt_oss(config: Config) -> Decoder:
    """GPT-OSS as in Hugging Face's modules: 3-D expert weights with the input dimension before the output dimension."""
    hidden, inner, experts = (config.count(name) for name in ("hidden_size", "intermediate_size", "num_local_experts"))
    bias = config.flag("attention_bias", True)
    matrices = [
        Parameter("mlp.experts.gate_up_proj", (experts, hidden, 2 * inner), expert=True),
        Parameter("mlp.experts.gate_up_proj_bias", (experts, 2 * inner)),
        Parameter("mlp.experts.down_proj", (experts, inner, hidden), expert=True),
        Parameter("mlp.experts.down_proj_bias", (experts, hidden)),
    ]
    # Its gated activation is written as steps, each of which keeps its operands.
    moe = _linear_params("mlp.router", experts, hidden, bias=True) + _routed(config, matrices, hidden, inner, experts, 4, 7)
    sinks = _Submodule([Parameter("self_attn.sinks", (config.count("num_attention_heads"),))])
    return _decoder_of(config, lambda _: sinks + _attention(config, bias, bias, head_dim=64) + moe, _wide_norm)


def gpt_oss_original(config: Config) -> Decoder:
    """GPT-OSS as in OpenAI's checkpoint: fused attention, 3-D expert weights with the output dimension before the input's."""
    hidden, inner, experts = (config.count(name) for name in ("hidden_size", "intermediate_size", "num_local_experts"))
    heads, head = config.count("num_attention_heads"), config.count("head_dim")
    qkv = (heads + 2 * config.count("num_key_value_heads")) * head
    block = [
        Parameter("attn.sinks", (heads,)),
        Parameter("attn.norm.scale", (hidden,)),
        *_linear_params("attn.qkv", qkv, hidden, bias=True).parameters,
        *_linear_params("attn.out", hidden, heads * head, bias=True).parameters,
        Parameter("mlp.mlp1_weight", (experts, 2 * inner, hidden), expert=True),
        Parameter("mlp.mlp1_bias", (experts, 2 * inner)),
        Parameter("mlp.mlp2_weight", (experts, hidden, inner), expert=True),
        Parameter("mlp.mlp2_bias", (experts, hidden)),
        Parameter("mlp.norm.scale", (hidden,)),
        *_linear_params("mlp.gate", experts, hidden, bias=True).parameters,
    ]
    groups = {
        f"block.{layer}": [one._replace(name=f"block.{layer}.{one.name}") for one in block]
        for layer in range(config.count("num_hidden_layers"))
    }
    vocabulary = config.count("vocab_size")
    groups["rest"] = [
        *_linear_params("embedding", vocabulary, hidden).parameters,
        Parameter("norm.scale", (hidden,)),
        *_linear_params("unembedding", vocabulary, hidden).parameters,
    ]
    same = _gpt_oss(config)
    return Decoder(groups, dict(zip(groups, same.saved.values())), hidden, vocabulary)


FAMILIES: dict[str, Callable[[Config], Decoder]] = {
    "deepseek_v3": _deepseek_v3,
    "gemma3": _gemma3,
    "gemma3_text": _gemma3,
    "gpt_oss": _gpt_oss,
    "llama": _llama,
    "mistral": _llama,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
}
"""By ``model_type`` of a config.json, a function that describes its decoder."""
