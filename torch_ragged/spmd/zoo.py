"""The zoo: plans for models of transformers and diffusers, whose classes stay as they are. One function per family.

It must not import these libraries: a plan is names and placements. ``print(zoo.llama())`` shows the rules of a plan.
A model with LoRA of PEFT takes ``zoo.llama().under("base_model.model")``: its adapters are cut as the weights are.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Optional, Union

from torch.distributed.tensor import Replicate, Shard

from torch_ragged.spmd._paths import with_adapters
from torch_ragged.spmd._plan import Plan
from torch_ragged.tensor.interleaved_placement_types import InterleavedShard

__all__ = ["deepseek_v3", "dit", "flux2", "gpt_oss", "llama", "mixtral", "qwen3", "qwen3_moe", "t5", "vit"]

_Data = Union[str, tuple[str, str], None]
_LAYER = r"model\.layers\.\d+"


def llama(
    *,
    dp: _Data = "dp",
    tp: Optional[str] = "tp",
    sequence_parallel: bool = False,
    unit: bool = True,
    cp: Optional[str] = None,
) -> Plan:
    """A plan for ``LlamaForCausalLM``, and for models with the same names: Mistral, Qwen2, Olmo.

    Heads, hidden features of the feed-forward part and the vocabulary are cut over ``tp``; each layer is a unit over ``dp``.

    All functions of the zoo take these arguments, but for ``cp``, which those of dense language models take:

    Args:
        dp: the mesh dimension that cuts the batch and the units; or two, of replicas and shards: both cut the batch, and the
            second one the units (HSDP). None leaves its rules out.
        tp: the mesh dimension that cuts heads and features. None leaves its rules out. Heads, key and value heads included, are
            a multiple of its ranks.
        sequence_parallel: whether ``tp`` cuts the sequence between attention and feed-forward parts: norms, dropout and
            residuals are not computed twice, and their activations take less memory.
        unit: whether layers are units. If not, parameters are replicated over ``dp``.
        cp: the mesh dimension that cuts the sequence everywhere (context parallelism): a rank computes attention of its rows,
            with keys and values of all, which are all-gathered. With ``dp``, units are replicas over ``dp`` and shards over
            ``cp``.

    Source: "Megatron-LM" for the cuts; "Reducing Activation Recomputation" for the sequence.
    """
    plan = _decoder(sequence_parallel)
    plan.shard(rf"{_LAYER}\.mlp\.(gate|up)_proj\.weight", Shard(0), "tp")
    plan.shard(rf"{_LAYER}\.mlp\.down_proj\.weight", Shard(1), "tp")
    if cp is not None:
        plan.shard("<in:input_ids>", Shard(1), "cp")
        plan.shard("<in:labels>", Shard(1), "cp")
        plan.shard(rf"{_LAYER}\.self_attn\.(k|v)_proj\.<out>", Replicate(), "cp")
    return _on(plan, dp, tp, _LAYER if unit else None, cp)


def qwen3(**options: Any) -> Plan:
    """A plan for ``Qwen3ForCausalLM``: that of :func:`llama`, with the same arguments.

    The norms of queries and keys are replicated: each rank normalizes its heads.
    """
    return llama(**options)


def mixtral(*, dp: _Data = "dp", tp: Optional[str] = "tp", sequence_parallel: bool = False, unit: bool = True) -> Plan:
    """A plan for ``MixtralForCausalLM``. Each rank of ``tp`` has a part of the hidden features of all experts.

    The router is replicated. Tokens are sorted by expert over the whole batch, as on a single device: the layer all-gathers
    them over ``dp``, and each rank computes an equal part of the sorted tokens.

    Args: as :func:`llama`.
    """
    plan = _decoder(sequence_parallel)
    plan.shard(rf"{_LAYER}\.mlp\.experts\.gate_up_proj", InterleavedShard(1, 2), "tp")
    plan.shard(rf"{_LAYER}\.mlp\.experts\.down_proj", Shard(2), "tp")
    return _on(plan, dp, tp, _LAYER if unit else None)


def qwen3_moe(**options: Any) -> Plan:
    """A plan for ``Qwen3MoeForCausalLM`` with experts in all layers: that of :func:`mixtral`, with the same arguments."""
    return mixtral(**options)


def gpt_oss(*, dp: _Data = "dp", tp: Optional[str] = "tp", sequence_parallel: bool = False, unit: bool = True) -> Plan:
    """A plan for ``GptOssForCausalLM``. Its projections have biases, and its experts have gate and up features by turns.

    Experts and tokens are as in :func:`mixtral`.

    Args: as :func:`llama`.
    """
    plan = _decoder(sequence_parallel)
    plan.shard(rf"{_LAYER}\.self_attn\.((q|k|v)_proj\.bias|sinks)", Shard(0), "tp")
    # Matrices of experts are (in, out) here. Gate and up features come by turns, so an even cut has as many of both.
    plan.shard(rf"{_LAYER}\.mlp\.experts\.gate_up_proj", Shard(2), "tp")
    plan.shard(rf"{_LAYER}\.mlp\.experts\.(gate_up_proj_bias|down_proj)", Shard(1), "tp")
    return _on(plan, dp, tp, _LAYER if unit else None)


def deepseek_v3(*, dp: _Data = "dp", tp: Optional[str] = "tp", sequence_parallel: bool = False, unit: bool = True) -> Plan:
    """A plan for ``DeepseekV3ForCausalLM``: multi-head latent attention, dense layers, experts and shared experts.

    The projections to the latents and their norms are replicated; the heads that come out of the latents are cut. Experts and
    tokens are as in :func:`mixtral`.

    Args: as :func:`llama`.
    """
    plan = _decoder(sequence_parallel, projections="q|q_b|kv_b")
    plan.shard(rf"{_LAYER}\.mlp\.(shared_experts\.)?(gate|up)_proj\.weight", Shard(0), "tp")
    plan.shard(rf"{_LAYER}\.mlp\.(shared_experts\.)?down_proj\.weight", Shard(1), "tp")
    plan.shard(rf"{_LAYER}\.mlp\.experts\.gate_up_proj", InterleavedShard(1, 2), "tp")
    plan.shard(rf"{_LAYER}\.mlp\.experts\.down_proj", Shard(2), "tp")
    return _on(plan, dp, tp, _LAYER if unit else None)


def t5(*, dp: _Data = "dp", tp: Optional[str] = "tp", sequence_parallel: bool = False, unit: bool = True) -> Plan:
    """A plan for ``T5ForConditionalGeneration``, whose feed-forward part has one matrix ``wi``, or ``wi_0`` and ``wi_1``.

    The table of position biases has a column per head, and is cut by heads. A batch with ``attention_mask`` or
    ``decoder_input_ids`` needs a rule such as ``shard("<in:attention_mask>", Shard(0), "dp")``.

    Args: as :func:`llama`.
    """
    block = r"(encoder|decoder)\.block\.\d+"
    part = rf"{block}\.layer\.\d\.(\w+Attention|DenseReluDense)"
    plan = Plan()
    plan.shard(rf"{part}\.(q|k|v|wi|wi_\d)\.weight", Shard(0), "tp")
    plan.shard(rf"{part}\.(o|wo|relative_attention_bias)\.weight", Shard(1), "tp")
    if sequence_parallel:
        plan.shard(rf"({part}|lm_head)\.<in>", Replicate(), "tp")
        # Cross attention takes it in each block of the decoder, as another argument than <in>: it is all-gathered once.
        plan.shard(r"encoder\.<out:0>", Replicate(), "tp")
    plan.shard(rf"{part}\.<out:0>", Shard(1) if sequence_parallel else Replicate(), "tp")
    plan.shard(r"(shared|lm_head)\.weight", Shard(0), "tp")
    plan.shard(r"((en|de)coder\.embed_tokens|lm_head)\.<out>", Replicate(), "tp")
    plan.shard("<in:input_ids>", Shard(0), "dp")
    plan.shard("<in:labels>", Shard(0), "dp")
    return _on(plan, dp, tp, block if unit else None)


def vit(*, dp: _Data = "dp", tp: Optional[str] = "tp", sequence_parallel: bool = False, unit: bool = True) -> Plan:
    """A plan for ``ViTForImageClassification``.

    Args: as :func:`llama`.
    """
    layer = r"vit\.layers\.\d+"
    plan = Plan()
    plan.shard(rf"{layer}\.(attention\.(q|k|v)_proj|mlp\.fc1)\.(weight|bias)", Shard(0), "tp")
    plan.shard(rf"{layer}\.(attention\.o_proj|mlp\.fc2)\.weight", Shard(1), "tp")
    if sequence_parallel:
        plan.shard(rf"{layer}\.(attention|mlp)\.<in>", Replicate(), "tp")
    plan.shard(rf"{layer}\.(attention|mlp)\.<out:0>", Shard(1) if sequence_parallel else Replicate(), "tp")
    plan.shard("<in:pixel_values>", Shard(0), "dp")
    plan.shard("<in:labels>", Shard(0), "dp")
    return _on(plan, dp, tp, layer if unit else None)


def dit(*, dp: _Data = "dp", tp: Optional[str] = "tp", sequence_parallel: bool = False, unit: bool = True) -> Plan:
    """A plan for ``DiTTransformer2DModel`` of diffusers.

    The embedding of time and class is a unit of its own: the model calls that of the first block once more, after the blocks.

    Args: as :func:`llama`.
    """
    block = r"transformer_blocks\.\d+"
    plan = Plan()
    plan.shard(rf"{block}\.(attn1\.to_(q|k|v)|ff\.net\.0\.proj)\.(weight|bias)", Shard(0), "tp")
    plan.shard(rf"{block}\.(attn1\.to_out\.0|ff\.net\.2)\.weight", Shard(1), "tp")
    if sequence_parallel:
        plan.shard(rf"{block}\.(attn1|ff)\.<in>", Replicate(), "tp")
    plan.shard(rf"{block}\.(attn1|ff)\.<out>", Shard(1) if sequence_parallel else Replicate(), "tp")
    plan.shard("<in:hidden_states>", Shard(0), "dp")
    plan.shard("<in:timestep>", Shard(0), "dp")
    plan.shard("<in:class_labels>", Shard(0), "dp")
    return _on(plan, dp, tp, rf"{block}(\.norm1\.emb)?" if unit else None)


def flux2(
    *,
    dp: _Data = "dp",
    tp: Optional[str] = "tp",
    sequence_parallel: bool = False,
    unit: bool = True,
    mlp_ratio: int = 3,
) -> Plan:
    """A plan for ``Flux2Transformer2DModel`` of diffusers, whose single blocks have one matrix for q, k, v, gate and up.

    Args: as :func:`llama`, and
        mlp_ratio: ``mlp_ratio`` of the model's config. The segments of the fused matrices are in these proportions.
    """
    double, single = r"transformer_blocks\.\d+", r"single_transformer_blocks\.\d+"
    hidden = Shard(1) if sequence_parallel else Replicate()
    plan = Plan()
    plan.shard(rf"{double}\.attn\.(to_(q|k|v)|add_(q|k|v)_proj)\.weight", Shard(0), "tp")
    plan.shard(rf"{double}\.attn\.(to_out\.0|to_add_out)\.weight", Shard(1), "tp")
    plan.shard(rf"{double}\.ff(_context)?\.linear_in\.weight", InterleavedShard(0, 2), "tp")
    plan.shard(rf"{double}\.ff(_context)?\.linear_out\.weight", Shard(1), "tp")
    plan.shard(rf"{single}\.attn\.to_qkv_mlp_proj\.weight", InterleavedShard(0, (1, 1, 1, mlp_ratio, mlp_ratio)), "tp")
    plan.shard(rf"{single}\.attn\.to_out\.weight", InterleavedShard(1, (1, mlp_ratio)), "tp")
    if sequence_parallel:
        plan.shard(rf"({double}\.(attn|ff|ff_context)|{single}\.attn)\.<in>", Replicate(), "tp")
        plan.shard(rf"{double}\.attn\.<in:encoder_hidden_states>", Replicate(), "tp")
    plan.shard(rf"({double}\.(attn|ff|ff_context)|{single}\.attn)\.<out:0>", hidden, "tp")
    plan.shard(rf"{double}\.attn\.<out:1>", hidden, "tp")
    plan.shard("<in:hidden_states>", Shard(0), "dp")
    plan.shard("<in:encoder_hidden_states>", Shard(0), "dp")
    plan.shard("<in:timestep>", Shard(0), "dp")
    plan.shard("<in:guidance>", Shard(0), "dp")
    return _on(plan, dp, tp, rf"(single_)?{double}" if unit else None)


def _decoder(sequence_parallel: bool, projections: str = "q|k|v") -> Plan:
    """What the language models have in common: attention, vocabulary and batch."""
    plan = Plan()
    plan.shard(rf"{_LAYER}\.self_attn\.({projections})_proj\.weight", Shard(0), "tp")
    plan.shard(rf"{_LAYER}\.self_attn\.o_proj\.weight", Shard(1), "tp")
    if sequence_parallel:
        # An all-gather of the sequence before the matrices that are cut, and a reduce-scatter behind them.
        plan.shard(rf"({_LAYER}\.(self_attn|mlp)|lm_head)\.<in>", Replicate(), "tp")
    # Of attention, which returns a tuple, and of the feed-forward part: of a tensor alone, a key means the tensor.
    plan.shard(rf"{_LAYER}\.(self_attn|mlp)\.<out:0>", Shard(1) if sequence_parallel else Replicate(), "tp")
    plan.shard(r"(model\.embed_tokens|lm_head)\.weight", Shard(0), "tp")
    # Each rank has rows of the vocabulary. What the embedding looks up is added up over ranks. Logits are all-gathered, because
    # the model's own loss takes whole rows.
    plan.shard(r"(model\.embed_tokens|lm_head)\.<out>", Replicate(), "tp")
    plan.shard("<in:input_ids>", Shard(0), "dp")
    plan.shard("<in:labels>", Shard(0), "dp")
    return plan


def _on(plan: Plan, dp: _Data, tp: Optional[str], unit: Optional[str], cp: Optional[str] = None) -> Plan:
    """``plan`` with the user's names of the mesh dimensions. Rules of one that is None are left out.

    Without units, each parameter needs a rule: the default is replicated.
    """
    names = {"dp": _dim_names(dp), "tp": _dim_names(tp), "cp": _dim_names(cp)}
    rules = []
    for rule in plan.rules:
        dims = names[rule.dims[0]]  # type: ignore[attr-defined]
        if dims:
            placement = rule.placement * len(dims)  # type: ignore[attr-defined]
            module, _, leaf = rule.path.rpartition(r"\.")
            path = with_adapters(module, leaf, placement[0].dim) if leaf in ("weight", "(weight|bias)") else rule.path
            rules.append(dataclasses.replace(rule, path=path, dims=dims, placement=placement))  # type: ignore[call-arg]
    # Ranks along ``cp`` have equal parameters and other rows, as those along ``dp``: units reduce gradients over both.
    plan, data = Plan(rules), (*names["dp"], *names["cp"])
    return plan.default(Replicate()) if unit is None or not data else plan.unit(unit, data)


def _dim_names(dims: Union[str, tuple[str, ...], None]) -> tuple[str, ...]:
    return () if dims is None else (dims,) if isinstance(dims, str) else tuple(dims)
