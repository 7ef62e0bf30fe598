"""Loads the model to plan: a built-in one, a Hugging Face ``config.json``, or a module that is built on the meta device.

It must not allocate the model's parameters.
"""

from __future__ import annotations

import difflib
import importlib
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torch_ragged.offline._shapes import FAMILIES, Config, Decoder, Groups, Parameter, gpt_oss_original

__all__ = ["BUILT_IN", "Model", "load_model", "module_groups"]

_EXPERTS = r"experts(?!.*bias)"  # Names of expert matrices in modules. Stacked biases of experts have two dimensions too.


@dataclass(frozen=True)
class Model:
    """A model as groups of parameters: one group per transformer block, and ``"rest"`` for all other parameters.

    Attributes:
        name: how it was asked for.
        groups: its parameters.
        decoder: what a step keeps of its tokens; None if that is not known, as for ``module:callable``.
    """

    name: str
    groups: Groups
    decoder: Decoder | None = None

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(math.prod(parameter.shape) for group in self.groups.values() for parameter in group)

    @property
    def num_tensors(self) -> int:
        return sum(map(len, self.groups.values()))

    @property
    def has_experts(self) -> bool:
        return any(parameter.expert for group in self.groups.values() for parameter in group)


def load_model(source: str, experts: str | None = None) -> Model:
    """The model that ``source`` names.

    Args:
        source: a key of :data:`BUILT_IN` (in any case), a path of a ``config.json`` or of a folder with one, or
            ``module:callable``, which is called without arguments under ``torch.device("meta")`` and returns an nn.Module.
        experts: a regular expression. If it matches in the name of a parameter of two or more dimensions, this parameter is an
            expert matrix. Default: the names in the published families; for a module, names with ``experts`` that have no
            ``bias`` after it.

    Raises:
        ValueError: ``experts`` is no regular expression, there is no such model, or it cannot be read or built.
    """
    try:
        pattern = re.compile(experts or _EXPERTS)
    except re.error as error:
        raise ValueError(f"--experts {experts!r} is not a regular expression: {error}") from None
    if source.lower() in BUILT_IN:
        model = _of_decoder(source.lower(), BUILT_IN[source.lower()]())
    elif source.endswith(".json") or Path(source).is_dir():
        model = _from_config(Path(source))
    elif ":" in source:
        model = _from_callable(source)
        experts = pattern.pattern
    else:
        close = difflib.get_close_matches(source.lower(), BUILT_IN)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise ValueError(
            f"unknown model {source!r}{hint}: expected {', '.join(BUILT_IN)}, the path of a config.json, or module:callable"
        )
    if not model.numel:
        raise ValueError(f"{source} has no parameters")
    return model if experts is None else _mark_experts(model, pattern)


def _mark_experts(model: Model, pattern: re.Pattern[str]) -> Model:
    marked = {
        name: [one._replace(expert=len(one.shape) >= 2 and pattern.search(one.name) is not None) for one in group]
        for name, group in model.groups.items()
    }
    return Model(model.name, marked, model.decoder)


# --- Hugging Face config.json --------------------------------------------------------------------------------------


def _from_config(path: Path) -> Model:
    path = path / "config.json" if path.is_dir() else path
    try:
        fields = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"cannot read {path}: {reason}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"cannot read {path}: expected a JSON object, got {type(fields).__name__}")
    kind = fields.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ValueError(f"{path}: model_type must be one of {', '.join(FAMILIES)}, got {kind!r}")
    return _of_decoder(str(path), FAMILIES[kind](Config(fields, str(path))))


def _of_decoder(name: str, decoder: Decoder) -> Model:
    return Model(name, decoder.groups, decoder)


# --- any module ----------------------------------------------------------------------------------------------------


def _from_callable(source: str) -> Model:
    module_name, _, attribute = source.partition(":")
    try:
        build: Any = importlib.import_module(module_name)
        for name in attribute.split("."):
            build = getattr(build, name)
    except Exception as error:  # The user's code may raise any error; the tool shows it in one line.
        raise ValueError(f"cannot import {source}: {type(error).__name__}: {error}") from None
    try:
        with torch.device("meta"):
            module = build()
    except Exception as error:
        raise ValueError(f"{source}() failed on the meta device: {type(error).__name__}: {error}") from None
    if not isinstance(module, nn.Module):
        raise ValueError(f"{source}() returned {type(module).__name__}, expected an nn.Module")
    return Model(source, module_groups(module))


def module_groups(module: nn.Module) -> Groups:
    """The parameters of ``module`` by group.

    Each child of an outermost nn.ModuleList or nn.ModuleDict is a group. All other parameters are in ``"rest"``. If a parameter
    is registered several times, it counts once: in the first block that has it, or in ``"rest"`` if no block has it.
    """
    groups: Groups = {}
    taken: set[nn.Parameter] = set()
    for name, block in [*_blocks(module, ""), ("rest", module)]:
        prefix = "" if block is module else f"{name}."
        own = {parameter: prefix + fqn for fqn, parameter in block.named_parameters() if parameter not in taken}
        taken.update(own)
        if own:
            groups[name] = [Parameter(fqn, tuple(parameter.shape)) for parameter, fqn in own.items()]
    return groups


def _blocks(module: nn.Module, prefix: str) -> list[tuple[str, nn.Module]]:
    children = list(module.named_children())
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return [(prefix + name, child) for name, child in children]
    return [block for name, child in children for block in _blocks(child, f"{prefix}{name}.")]


# --- built in ------------------------------------------------------------------------------------------------------


def _family(build: Callable[[Config], Decoder], **fields: Any) -> Callable[[], Decoder]:
    return lambda: build(Config(fields, "a built-in model"))


_LLAMA_8B = dict(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8)
_GPT_OSS = dict(
    hidden_size=2880,
    intermediate_size=2880,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=64,
    num_experts_per_tok=4,
    vocab_size=201088,
)

BUILT_IN: dict[str, Callable[[], Decoder]] = {
    "deepseek-v3": _family(
        FAMILIES["deepseek_v3"],
        hidden_size=7168,
        intermediate_size=18432,
        moe_intermediate_size=2048,
        n_routed_experts=256,
        num_experts_per_tok=8,
        n_shared_experts=1,
        first_k_dense_replace=3,
        num_hidden_layers=61,
        num_attention_heads=128,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        vocab_size=129280,
    ),
    "gemma-3-4b": _family(FAMILIES["gemma3"], hidden_size=2560, intermediate_size=10240, num_hidden_layers=34),
    "gpt-oss-120b": _family(gpt_oss_original, **_GPT_OSS, num_local_experts=128, num_hidden_layers=36),
    "gpt-oss-20b": _family(gpt_oss_original, **_GPT_OSS, num_local_experts=32, num_hidden_layers=24),
    "llama-3-70b": _family(
        FAMILIES["llama"],
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
    ),
    "llama-3-8b": _family(FAMILIES["llama"], **_LLAMA_8B, intermediate_size=14336, vocab_size=128256),
    "llama-3.2-1b": _family(
        FAMILIES["llama"],
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        tie_word_embeddings=True,
    ),
    "mistral-7b": _family(FAMILIES["mistral"], **_LLAMA_8B, intermediate_size=14336, vocab_size=32000),
    "mixtral-8x7b": _family(
        FAMILIES["mixtral"], **_LLAMA_8B, intermediate_size=14336, num_local_experts=8, num_experts_per_tok=2, vocab_size=32000
    ),
    "qwen3-0.6b": _family(
        FAMILIES["qwen3"],
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        vocab_size=151936,
        tie_word_embeddings=True,
    ),
    "qwen3-30b-a3b": _family(
        FAMILIES["qwen3_moe"],
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        vocab_size=151936,
    ),
    "qwen3-8b": _family(
        FAMILIES["qwen3"],
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=151936,
    ),
}
"""By name: a function that describes a published model. DeepSeek-V3 is without MTP, Gemma 3 without its vision tower."""
