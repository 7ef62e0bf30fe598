"""Parameter names and shapes of published model families, from the fields of their Hugging Face ``config.json``.

Names and shapes are those of the checkpoints: if a checkpoint stores each expert in a tensor of its own, this does so too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

__all__ = ["FAMILIES", "Config", "Groups", "Parameter", "gpt_oss_original"]


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

    def layers(self, name: str) -> set[int]:
        """The field ``name``, a list of layer numbers. Empty if the field is missing."""
        value = self._fields.get(name) or []
        if not isinstance(value, list) or not all(isinstance(layer, int) for layer in value):
            raise ValueError(f"{self._source}: {name} must be a list of layer numbers, got {value!r}")
        return set(value)


def _linear_params(name: str, out: int, into: int, bias: bool = False, expert: bool = False) -> list[Parameter]:
    weight = Parameter(f"{name}.weight", (out, into), expert)
    return [weight, Parameter(f"{name}.bias", (out,))] if bias else [weight]


def _norm(name: str, size: int) -> list[Parameter]:
    return [Parameter(f"{name}.weight", (size,))]


def _gated_mlp(name: str, hidden: int, inner: int, bias: bool = False, expert: bool = False) -> list[Parameter]:
    return [
        *_linear_params(f"{name}.gate_proj", inner, hidden, bias, expert),
        *_linear_params(f"{name}.up_proj", inner, hidden, bias, expert),
        *_linear_params(f"{name}.down_proj", hidden, inner, bias, expert),
    ]


def _attention(config: Config, qkv_bias: bool, out_bias: bool, qk_norm: bool = False, head_dim: int = 0) -> list[Parameter]:
    """Grouped-query attention. ``head_dim`` is the family's default; 0 means hidden size / heads."""
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    groups = config.count("num_key_value_heads", heads)
    head = config.count("head_dim", head_dim or hidden // heads)
    return [
        *_linear_params("self_attn.q_proj", heads * head, hidden, qkv_bias),
        *_linear_params("self_attn.k_proj", groups * head, hidden, qkv_bias),
        *_linear_params("self_attn.v_proj", groups * head, hidden, qkv_bias),
        *_linear_params("self_attn.o_proj", hidden, heads * head, out_bias),
        *(_norm("self_attn.q_norm", head) + _norm("self_attn.k_norm", head) if qk_norm else []),
    ]


def _latent_attention(config: Config) -> list[Parameter]:
    """DeepSeek's multi-head latent attention. Without ``q_lora_rank``, the query is one projection."""
    hidden, heads, bias = config.count("hidden_size"), config.count("num_attention_heads"), config.flag("attention_bias")
    nope, rope = config.count("qk_nope_head_dim"), config.count("qk_rope_head_dim")
    value, kv_rank, q_rank = config.count("v_head_dim"), config.count("kv_lora_rank"), config.count("q_lora_rank", 0, 0)
    queries = _linear_params("self_attn.q_proj", heads * (nope + rope), hidden)
    if q_rank:
        queries = [
            *_linear_params("self_attn.q_a_proj", q_rank, hidden, bias),
            *_norm("self_attn.q_a_layernorm", q_rank),
            *_linear_params("self_attn.q_b_proj", heads * (nope + rope), q_rank),
        ]
    return [
        *queries,
        *_linear_params("self_attn.kv_a_proj_with_mqa", kv_rank + rope, hidden, bias),
        *_norm("self_attn.kv_a_layernorm", kv_rank),
        *_linear_params("self_attn.kv_b_proj", heads * (nope + value), kv_rank),
        *_linear_params("self_attn.o_proj", hidden, heads * value, bias),
    ]


def _decoder_groups(config: Config, block: Callable[[int], list[Parameter]]) -> Groups:
    """An embedding, one block of ``block(layer)`` and two norms per layer, a last norm, and a head unless it is tied."""
    hidden, vocabulary = config.count("hidden_size"), config.count("vocab_size")
    groups = {}
    for layer in range(config.count("num_hidden_layers")):
        own = block(layer) + _norm("input_layernorm", hidden) + _norm("post_attention_layernorm", hidden)
        groups[f"model.layers.{layer}"] = [one._replace(name=f"model.layers.{layer}.{one.name}") for one in own]
    head = [] if config.flag("tie_word_embeddings") else _linear_params("lm_head", vocabulary, hidden)
    groups["rest"] = [*_linear_params("model.embed_tokens", vocabulary, hidden), *_norm("model.norm", hidden), *head]
    return groups


def _llama(config: Config) -> Groups:
    bias, mlp_bias = config.flag("attention_bias"), config.flag("mlp_bias")
    sizes = config.count("hidden_size"), config.count("intermediate_size")
    return _decoder_groups(config, lambda _: _attention(config, bias, bias) + _gated_mlp("mlp", *sizes, mlp_bias))


def _qwen2(config: Config) -> Groups:
    sizes = config.count("hidden_size"), config.count("intermediate_size")
    return _decoder_groups(config, lambda _: _attention(config, True, False) + _gated_mlp("mlp", *sizes))


def _qwen3(config: Config) -> Groups:
    bias = config.flag("attention_bias")
    sizes = config.count("hidden_size"), config.count("intermediate_size")
    return _decoder_groups(config, lambda _: _attention(config, bias, bias, True, 128) + _gated_mlp("mlp", *sizes))


def _qwen3_moe(config: Config) -> Groups:
    hidden, experts, bias = config.count("hidden_size"), config.count("num_experts"), config.flag("attention_bias")
    inner, dense_layers = config.count("moe_intermediate_size"), config.layers("mlp_only_layers")

    def block(layer: int) -> list[Parameter]:
        attention = _attention(config, bias, bias, True)
        if layer in dense_layers or (layer + 1) % config.count("decoder_sparse_step", 1):
            return attention + _gated_mlp("mlp", hidden, config.count("intermediate_size"))
        routed = [one for i in range(experts) for one in _gated_mlp(f"mlp.experts.{i}", hidden, inner, expert=True)]
        return attention + _linear_params("mlp.gate", experts, hidden) + routed

    return _decoder_groups(config, block)


def _mixtral(config: Config) -> Groups:
    hidden, inner, experts = (config.count(name) for name in ("hidden_size", "intermediate_size", "num_local_experts"))
    moe = _linear_params("block_sparse_moe.gate", experts, hidden)
    for i in range(experts):
        for name, out, into in (("w1", inner, hidden), ("w2", hidden, inner), ("w3", inner, hidden)):
            moe += _linear_params(f"block_sparse_moe.experts.{i}.{name}", out, into, expert=True)
    return _decoder_groups(config, lambda _: _attention(config, False, False) + moe)


def _deepseek_v3(config: Config) -> Groups:
    hidden, inner, experts = (config.count(name) for name in ("hidden_size", "moe_intermediate_size", "n_routed_experts"))
    shared, dense_layers = config.count("n_shared_experts", 0, 0), config.count("first_k_dense_replace", 0, 0)

    def block(layer: int) -> list[Parameter]:
        if layer < dense_layers or layer % config.count("moe_layer_freq", 1):
            return _latent_attention(config) + _gated_mlp("mlp", hidden, config.count("intermediate_size"))
        routed = [one for i in range(experts) for one in _gated_mlp(f"mlp.experts.{i}", hidden, inner, expert=True)]
        gate = [Parameter("mlp.gate.weight", (experts, hidden)), Parameter("mlp.gate.e_score_correction_bias", (experts,))]
        both = _gated_mlp("mlp.shared_experts", hidden, shared * inner, expert=True) if shared else []
        return _latent_attention(config) + routed + gate + both

    return _decoder_groups(config, block)


def _gpt_oss(config: Config) -> Groups:
    """GPT-OSS as in Hugging Face's modules: 3-D expert weights with the input dimension before the output dimension."""
    hidden, inner, experts = (config.count(name) for name in ("hidden_size", "intermediate_size", "num_local_experts"))
    bias = config.flag("attention_bias", True)
    moe = [
        *_linear_params("mlp.router", experts, hidden, bias=True),
        Parameter("mlp.experts.gate_up_proj", (experts, hidden, 2 * inner), expert=True),
        Parameter("mlp.experts.gate_up_proj_bias", (experts, 2 * inner)),
        Parameter("mlp.experts.down_proj", (experts, inner, hidden), expert=True),
        Parameter("mlp.experts.down_proj_bias", (experts, hidden)),
    ]
    sinks = [Parameter("self_attn.sinks", (config.count("num_attention_heads"),))]
    return _decoder_groups(config, lambda _: sinks + _attention(config, bias, bias, head_dim=64) + moe)


def gpt_oss_original(config: Config) -> Groups:
    """GPT-OSS as in OpenAI's checkpoint: fused attention, 3-D expert weights with the output dimension before the input's."""
    hidden, inner, experts = (config.count(name) for name in ("hidden_size", "intermediate_size", "num_local_experts"))
    heads, head = config.count("num_attention_heads"), config.count("head_dim")
    qkv = (heads + 2 * config.count("num_key_value_heads")) * head
    block = [
        Parameter("attn.sinks", (heads,)),
        Parameter("attn.norm.scale", (hidden,)),
        *_linear_params("attn.qkv", qkv, hidden, bias=True),
        *_linear_params("attn.out", hidden, heads * head, bias=True),
        Parameter("mlp.mlp1_weight", (experts, 2 * inner, hidden), expert=True),
        Parameter("mlp.mlp1_bias", (experts, 2 * inner)),
        Parameter("mlp.mlp2_weight", (experts, hidden, inner), expert=True),
        Parameter("mlp.mlp2_bias", (experts, hidden)),
        Parameter("mlp.norm.scale", (hidden,)),
        *_linear_params("mlp.gate", experts, hidden, bias=True),
    ]
    groups = {
        f"block.{layer}": [one._replace(name=f"block.{layer}.{one.name}") for one in block]
        for layer in range(config.count("num_hidden_layers"))
    }
    vocabulary = config.count("vocab_size")
    groups["rest"] = [
        *_linear_params("embedding", vocabulary, hidden),
        Parameter("norm.scale", (hidden,)),
        *_linear_params("unembedding", vocabulary, hidden),
    ]
    return groups


FAMILIES: dict[str, Callable[[Config], Groups]] = {
    "deepseek_v3": _deepseek_v3,
    "gpt_oss": _gpt_oss,
    "llama": _llama,
    "mistral": _llama,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
}
"""By ``model_type`` of a config.json, a function that makes its parameters by group."""
