"""Plans for models of transformers and diffusers, as their classes are: one function per family returns a ``Plan``.

It must not import these libraries: a plan is names and placements.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Optional

from torch.distributed.tensor import Replicate, Shard

from torch_ragged.spmd._plan import Plan, UnitRule
from torch_ragged.tensor.interleaved_placement_types import InterleavedShard

__all__ = ["deepseek_v3", "dit", "flux", "gpt_oss", "llama", "mixtral", "qwen3", "qwen3_moe", "t5", "vit"]

_LAYER = r"model\.layers\.\d+"


def llama(*, dp: Optional[str] = "dp", tp: Optional[str] = "tp", sequence_parallel: bool = False, unit: bool = True) -> Plan:
    plan = _decoder(sequence_parallel)
    plan.shard(rf"{_LAYER}\.mlp\.(gate|up)_proj\.weight", Shard(0), "tp")
    plan.shard(rf"{_LAYER}\.mlp\.down_proj\.weight", Shard(1), "tp")
    return _on(plan, dp, tp, _LAYER if unit else None)


def qwen3(**options) -> Plan:
    return llama(**options)


def mixtral(*, dp: Optional[str] = "dp", tp: Optional[str] = "tp", sequence_parallel: bool = False, unit: bool = True) -> Plan:
    plan = _decoder(sequence_parallel)
    plan.shard(rf"{_LAYER}\.mlp\.experts\.gate_up_proj", InterleavedShard(1, 2), "tp")
    plan.shard(rf"{_LAYER}\.mlp\.experts\.down_proj", Shard(2), "tp")
    return _on(plan, dp, tp, _LAYER if unit else None)


qwen3_moe = mixtral


def gpt_oss(*, dp: Optional[str] = "dp", tp: Optional[str] = "tp", sequence_parallel: bool = False, unit: bool = True) -> Plan:
    plan = _decoder(sequence_parallel)
    plan.shard(rf"{_LAYER}\.self_attn\.((q|k|v)_proj\.bias|sinks)", Shard(0), "tp")
    plan.shard(rf"{_LAYER}\.mlp\.experts\.gate_up_proj", Shard(2), "tp")
    plan.shard(rf"{_LAYER}\.mlp\.experts\.(gate_up_proj_bias|down_proj)", Shard(1), "tp")
    return _on(plan, dp, tp, _LAYER if unit else None)


def deepseek_v3(
    *, dp: Optional[str] = "dp", tp: Optional[str] = "tp", sequence_parallel: bool = False, unit: bool = True
) -> Plan:
    plan = _decoder(sequence_parallel, projections=r"(q|q_b|kv_b)_proj")
    plan.shard(rf"{_LAYER}\.mlp\.(shared_experts\.)?(gate|up)_proj\.weight", Shard(0), "tp")
    plan.shard(rf"{_LAYER}\.mlp\.(shared_experts\.)?down_proj\.weight", Shard(1), "tp")
    plan.shard(rf"{_LAYER}\.mlp\.experts\.gate_up_proj", InterleavedShard(1, 2), "tp")
    plan.shard(rf"{_LAYER}\.mlp\.experts\.down_proj", Shard(2), "tp")
    return _on(plan, dp, tp, _LAYER if unit else None)


def t5(*, dp: Optional[str] = "dp", tp: Optional[str] = "tp", unit: bool = True) -> Plan:
    block = r"(encoder|decoder)\.block\.\d+"
    plan = Plan()
    plan.shard(rf"{block}\.layer\.\d\.\w+Attention\.(q|k|v)\.weight", Shard(0), "tp")
    plan.shard(rf"{block}\.layer\.\d\.\w+Attention\.(o|relative_attention_bias)\.weight", Shard(1), "tp")
    plan.shard(rf"{block}\.layer\.\d\.DenseReluDense\.wi(_\d)?\.weight", Shard(0), "tp")
    plan.shard(rf"{block}\.layer\.\d\.DenseReluDense\.wo\.weight", Shard(1), "tp")
    plan.shard(rf"{block}\.layer\.\d\.(\w+Attention|DenseReluDense)\.<out:0>", Replicate(), "tp")
    plan.shard(r"(shared|lm_head)\.weight", Shard(0), "tp")
    plan.shard(r"((en|de)coder\.embed_tokens|lm_head)\.<out>", Replicate(), "tp")
    plan.shard("<in:input_ids>", Shard(0), "dp")
    plan.shard("<in:labels>", Shard(0), "dp")
    return _on(plan, dp, tp, block if unit else None)


def vit(*, dp: Optional[str] = "dp", tp: Optional[str] = "tp", unit: bool = True) -> Plan:
    layer = r"vit\.layers\.\d+"
    plan = Plan()
    plan.shard(rf"{layer}\.attention\.(q|k|v)_proj\.(weight|bias)", Shard(0), "tp")
    plan.shard(rf"{layer}\.attention\.o_proj\.weight", Shard(1), "tp")
    plan.shard(rf"{layer}\.mlp\.fc1\.(weight|bias)", Shard(0), "tp")
    plan.shard(rf"{layer}\.mlp\.fc2\.weight", Shard(1), "tp")
    plan.shard(rf"{layer}\.(attention|mlp)\.<out:0>", Replicate(), "tp")
    plan.shard("<in:pixel_values>", Shard(0), "dp")
    plan.shard("<in:labels>", Shard(0), "dp")
    return _on(plan, dp, tp, layer if unit else None)


def dit(*, dp: Optional[str] = "dp", tp: Optional[str] = "tp", unit: bool = True) -> Plan:
    block = r"transformer_blocks\.\d+"
    plan = Plan()
    plan.shard(rf"{block}\.attn1\.to_(q|k|v)\.(weight|bias)", Shard(0), "tp")
    plan.shard(rf"{block}\.attn1\.to_out\.0\.weight", Shard(1), "tp")
    plan.shard(rf"{block}\.ff\.net\.0\.proj\.(weight|bias)", Shard(0), "tp")
    plan.shard(rf"{block}\.ff\.net\.2\.weight", Shard(1), "tp")
    plan.shard(rf"{block}\.(attn1|ff)\.<out>", Replicate(), "tp")
    plan.shard("<in:hidden_states>", Shard(0), "dp")
    plan.shard("<in:timestep>", Shard(0), "dp")
    plan.shard("<in:class_labels>", Shard(0), "dp")
    return _on(plan, dp, tp, rf"{block}(\.norm1\.emb)?" if unit else None)


def flux(*, dp: Optional[str] = "dp", tp: Optional[str] = "tp", mlp_ratio: int = 3, unit: bool = True) -> Plan:
    double, single = r"transformer_blocks\.\d+", r"single_transformer_blocks\.\d+"
    plan = Plan()
    plan.shard(rf"{double}\.attn\.(to_(q|k|v)|add_(q|k|v)_proj)\.weight", Shard(0), "tp")
    plan.shard(rf"{double}\.attn\.(to_out\.0|to_add_out)\.weight", Shard(1), "tp")
    plan.shard(rf"{double}\.ff(_context)?\.linear_in\.weight", InterleavedShard(0, 2), "tp")
    plan.shard(rf"{double}\.ff(_context)?\.linear_out\.weight", Shard(1), "tp")
    plan.shard(rf"{single}\.attn\.to_qkv_mlp_proj\.weight", InterleavedShard(0, (1, 1, 1, mlp_ratio, mlp_ratio)), "tp")
    plan.shard(rf"{single}\.attn\.to_out\.weight", InterleavedShard(1, (1, mlp_ratio)), "tp")
    plan.shard(rf"{double}\.(attn|ff|ff_context)\.<out:0>", Replicate(), "tp")
    plan.shard(rf"{double}\.attn\.<out:1>", Replicate(), "tp")
    plan.shard(rf"{single}\.attn\.<out>", Replicate(), "tp")
    for name in ("hidden_states", "encoder_hidden_states", "timestep", "guidance"):
        plan.shard(f"<in:{name}>", Shard(0), "dp")
    return _on(plan, dp, tp, rf"(single_)?{double}" if unit else None)


def _decoder(sequence_parallel: bool, projections: str = r"(q|k|v)_proj") -> Plan:
    plan = Plan()
    plan.shard(rf"{_LAYER}\.self_attn\.{projections}\.weight", Shard(0), "tp")
    plan.shard(rf"{_LAYER}\.self_attn\.o_proj\.weight", Shard(1), "tp")
    plan.shard(r"(model\.embed_tokens|lm_head)\.weight", Shard(0), "tp")
    plan.shard(r"(model\.embed_tokens|lm_head)\.<out>", Replicate(), "tp")
    if sequence_parallel:
        plan.shard(rf"{_LAYER}\.(input|post_attention)_layernorm\.<in>", Shard(1), "tp")
        plan.shard(rf"{_LAYER}\.(input|post_attention)_layernorm\.<out>", Replicate(), "tp")
    plan.shard(rf"{_LAYER}\.(self_attn|mlp)\.<out:0>", Shard(1) if sequence_parallel else Replicate(), "tp")
    plan.shard("<in:input_ids>", Shard(0), "dp")
    return plan.shard("<in:labels>", Shard(0), "dp")


def _on(plan: Plan, dp: Optional[str], tp: Optional[str], unit: Optional[str]) -> Plan:
    """``plan`` with the names of the user's mesh dimensions. Rules of a dimension that is None are left out."""
    names = {"dp": dp, "tp": tp}
    rules = [dataclasses.replace(rule, dims=(names[rule.dims[0]],)) for rule in plan.rules if names[rule.dims[0]] is not None]
    plan = Plan(rules)
    return plan.default(Replicate()) if unit is None or dp is None else plan.unit(unit, dp)
