"""Megatron-LM: which rows of its ``torch_dist`` checkpoints are the weights of a model. It imports nothing of Megatron.

Megatron's files are DCP's: ``dcp.load`` reads them with :class:`torch_ragged.checkpoint.RowPlanner`. They differ in names, in a
first dimension that stacks the layers, and in the order of the rows of a fused weight.
"""

from __future__ import annotations

from typing import Any

from torch_ragged.checkpoint import StoredRows

__all__ = ["llama_rows", "qkv_rows"]


def qkv_rows(
    name: str, index: tuple[int, ...], heads: int, groups: int, head_dim: int
) -> tuple[list[StoredRows], list[StoredRows], list[StoredRows]]:
    """The rows of queries, of keys and of values in Megatron's ``linear_qkv``: of the weight, or of the bias.

    Megatron has the query heads of a group, then its key, then its value, and so on for each group. Tensor parallelism then
    cuts between groups. Hugging Face and :class:`~torch_ragged.InterleavedShard` have all queries, all keys, all values::

        4 heads, 2 groups:    Megatron  q0 q1 k0 v0 q2 q3 k1 v1        fused here  q0 q1 q2 q3 k0 k1 v0 v1

    Args:
        name, index: as of :class:`~torch_ragged.checkpoint.StoredRows`.
        heads: of queries.
        groups: the heads of keys, ``num_query_groups``. They divide ``heads``.
        head_dim: rows of a head, ``kv_channels``.

    Returns:
        three lists; all of them in a row are one fused weight of queries, keys and values.

    Raises:
        ValueError: ``groups`` does not divide ``heads``.
    """
    if groups < 1 or heads % groups:
        raise ValueError(f"qkv_rows takes groups that divide the heads, got {heads} heads and {groups} groups")
    queries = heads // groups * head_dim
    found: tuple[list[StoredRows], list[StoredRows], list[StoredRows]] = ([], [], [])
    start = 0
    for _ in range(groups):
        for rows, count in zip(found, (queries, head_dim, head_dim)):
            rows.append(StoredRows(name, index, start, start + count))
            start += count
    return found


def llama_rows(config: Any, *, stacked: bool = True) -> dict[str, list[StoredRows]]:
    """The rows in a checkpoint of Megatron's ``GPTModel`` for each weight of Hugging Face's ``LlamaForCausalLM``.

    ::

        planner = RowPlanner(llama_rows(model.config))
        dcp.load(model.state_dict(), storage_reader=FileSystemReader("iter_0000100"), planner=planner)

    ``linear_fc1`` of SwiGLU has the rows of the gate, then those of the other factor, also if tensor parallelism has cut it.
    Rows of ``linear_qkv`` are as in :func:`qkv_rows`. The rows that pad Megatron's vocabulary are left out. The names are those
    of megatron-core 0.16. Nothing is read and nothing communicates.

    Args:
        config: a ``LlamaConfig``, or an object with its fields.
        stacked: whether layers are stacked in one tensor, Megatron's default. False: each layer has names of its own.
    """
    rows = {
        "model.embed_tokens.weight": [StoredRows("embedding.word_embeddings.weight", (), 0, config.vocab_size)],
        "model.norm.weight": [StoredRows("decoder.final_layernorm.weight")],
    }
    head = "embedding.word_embeddings.weight" if config.tie_word_embeddings else "output_layer.weight"
    rows["lm_head.weight"] = [StoredRows(head, (), 0, config.vocab_size)]
    groups, head_dim = config.num_key_value_heads, getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    for layer in range(config.num_hidden_layers):
        here, index = f"model.layers.{layer}", (layer,) if stacked else ()
        there = "decoder.layers" if stacked else f"decoder.layers.{layer}"
        for kind in ("weight", "bias") if config.attention_bias else ("weight",):
            parts = qkv_rows(f"{there}.self_attention.linear_qkv.{kind}", index, config.num_attention_heads, groups, head_dim)
            rows.update({f"{here}.self_attn.{name}.{kind}": part for name, part in zip(("q_proj", "k_proj", "v_proj"), parts)})
            rows[f"{here}.self_attn.o_proj.{kind}"] = [StoredRows(f"{there}.self_attention.linear_proj.{kind}", index)]
        for kind in ("weight", "bias") if config.mlp_bias else ("weight",):
            fused, size = f"{there}.mlp.linear_fc1.{kind}", config.intermediate_size
            rows[f"{here}.mlp.gate_proj.{kind}"] = [StoredRows(fused, index, 0, size)]
            rows[f"{here}.mlp.up_proj.{kind}"] = [StoredRows(fused, index, size, 2 * size)]
            rows[f"{here}.mlp.down_proj.{kind}"] = [StoredRows(f"{there}.mlp.linear_fc2.{kind}", index)]
        for name, norm in (("input_layernorm", "self_attention.linear_qkv"), ("post_attention_layernorm", "mlp.linear_fc1")):
            rows[f"{here}.{name}.weight"] = [StoredRows(f"{there}.{norm}.layer_norm_weight", index)]
    return rows
