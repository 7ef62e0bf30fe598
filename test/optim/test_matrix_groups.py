"""matrix_groups: which parameters of usual architectures are matrices, and that names overrule it."""

import importlib.util
import re
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from torch_ragged.optim import MatrixGroups, Muon, matrix_groups

WIDTH = 8


def parameter(*shape):
    return nn.Parameter(torch.zeros(shape))


class Module(nn.Module):
    """Modules and parameters by name."""

    def __init__(self, **members):
        super().__init__()
        for name, member in members.items():
            setattr(self, name, member)


class Experts(Module):
    pass


class Grouped(Module):
    """A stack whose name and class say nothing of experts."""

    def __init__(self):
        super().__init__(w1=parameter(4, 8, 16))
        self.num_experts = 4


class Router(Module):
    pass


class HeadNorm(Module):
    pass


class Conv1D(Module):
    """That of GPT-2: a linear layer."""


class TokenEmbedding(Module):
    pass


class CausalLM(Module):
    """A model of the kind of Hugging Face's."""

    def get_output_embeddings(self):
        return self.lm_head


def tied():
    model = Module(
        embed=nn.Embedding(20, WIDTH), body=nn.Linear(WIDTH, WIDTH, bias=False), head=nn.Linear(WIDTH, 20, bias=False)
    )
    model.head.weight = model.embed.weight
    return model


def tied_to_a_raw_one():
    model = Module(wte=parameter(20, WIDTH), head=nn.Linear(WIDTH, 20, bias=False))
    model.head.weight = model.wte
    return model


def linear(rows=WIDTH, columns=WIDTH):
    return nn.Linear(columns, rows, bias=False)


# By name: a model, and the names of its matrices.
ARCHITECTURES = {
    "Mamba": (
        lambda: Module(in_proj=linear(), conv1d=nn.Conv1d(8, 8, 4, groups=8), A_log=parameter(8, 16), D=parameter(8)),
        {"in_proj.weight"},
    ),
    "ViT": (
        lambda: Module(
            cls_token=parameter(1, 1, 8),
            pos_embed=parameter(1, 17, 8),
            patch_embed=nn.Conv2d(3, 8, 4),
            attn=nn.MultiheadAttention(8, 2, add_bias_kv=True),
            head=linear(),
        ),
        {"attn.in_proj_weight", "attn.out_proj.weight", "head.weight"},
    ),
    "DINOv2": (lambda: Module(mask_token=parameter(1, 8), layer_scale=parameter(8), fc1=linear()), {"fc1.weight"}),
    "T5": (lambda: Module(relative_attention_bias=nn.Embedding(32, 4), q=linear(), norm=nn.RMSNorm(8)), {"q.weight"}),
    "Swin": (
        lambda: Module(relative_position_bias_table=parameter(49, 4), logit_scale=parameter(4, 1, 1), reduction=linear(16, 32)),
        {"reduction.weight"},
    ),
    "Whisper": (
        lambda: Module(conv1=nn.Conv1d(8, 8, 3), conv2=nn.ConvTranspose1d(8, 8, 3), positions=nn.Embedding(9, 8), fc1=linear()),
        {"fc1.weight"},
    ),
    "XLNet": (
        lambda: Module(
            q=parameter(8, 2, 4), seg_embed=parameter(2, 2, 4), r_w_bias=parameter(2, 4), mask_emb=parameter(1, 1, 8)
        ),
        set(),
    ),
    "Wav2Vec2": (
        lambda: Module(pos_conv=parametrizations.weight_norm(nn.Conv1d(8, 8, 4), dim=2), masked=parameter(8), fc=linear()),
        {"fc.weight"},
    ),
    "RWKV": (lambda: Module(time_mix_key=parameter(1, 1, 8), time_decay=parameter(8), key=linear()), {"key.weight"}),
    "GPT-2": (lambda: Module(c_attn=Conv1D(weight=parameter(8, 24), bias=parameter(24))), {"c_attn.weight"}),
    "GPT-OSS": (
        lambda: Module(
            mlp=Experts(gate_up_proj=parameter(4, 8, 16), gate_up_proj_bias=parameter(4, 16), down_proj_bias=parameter(4, 8)),
            router=Router(weight=parameter(4, 8), bias=parameter(4)),
        ),
        {"mlp.gate_up_proj", "router.weight"},
    ),
    "Qwen3-MoE": (
        lambda: Module(experts=Module(up=parameter(4, 8, 16)), moe=Grouped(), shared_expert_gate=nn.Linear(8, 1, bias=False)),
        {"experts.up", "moe.w1"},
    ),
    "LoRA": (
        lambda: Module(
            lora_A=linear(2, 8), lora_B=linear(8, 2), lora_embedding_A=nn.ParameterDict({"default": parameter(2, 20)})
        ),
        {"lora_A.weight", "lora_B.weight"},
    ),
    "Cohere": (lambda: Module(q_norm=HeadNorm(weight=parameter(4, 8)), norm=nn.LayerNorm((4, 8)), q=linear()), {"q.weight"}),
    "LSTM": (lambda: nn.LSTM(8, 8), {"weight_ih_l0", "weight_hh_l0"}),
    "Bilinear": (lambda: nn.Bilinear(4, 5, 6), {"weight"}),
    "tied": (tied, {"body.weight"}),
    "tied to a raw parameter": (tied_to_a_raw_one, set()),
    "an embedding of the user's own": (lambda: Module(embed=TokenEmbedding(weight=parameter(20, 8))), set()),
    "an output head": (lambda: CausalLM(body=linear(), lm_head=linear(20)), {"body.weight"}),
}


def matrices_of(groups, model):
    names = {param: name for name, param in model.named_parameters()}
    assert sum(len(group["params"]) for group in groups) == len(names), "each parameter is in one group"
    return {names[param] for group in groups if group.get("algorithm") != "adamw" for param in group["params"]}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_hidden_matrices_are_matrices_and_all_else_is_trained_by_adamw(name):
    make, expected = ARCHITECTURES[name]
    model = make()
    groups = matrix_groups(model, lr=1e-3)
    assert matrices_of(groups, model) == expected, groups
    assert {each.name for each in groups.decisions if each.is_matrix} == expected
    Muon(groups)


def test_names_modules_and_parameters_overrule():
    model = Module(
        blocks=nn.ModuleList(Module(w=parameter(8, 8), fc=linear(), bias=parameter(8)) for _ in range(2)), head=linear()
    )
    everything = {f"blocks.{i}.{name}" for i in range(2) for name in ("w", "fc.weight")} | {"head.weight"}
    for given, expected in (
        ({}, {"blocks.0.fc.weight", "blocks.1.fc.weight", "head.weight"}),
        ({"matrices": ["blocks.*.w"]}, everything),
        ({"matrices": [model]}, everything),
        ({"matrices": model.blocks[0].w}, everything - {"blocks.1.w"}),
        ({"adamw": ["head", "blocks.0.fc.weight"], "matrices": ["blocks.1"]}, {"blocks.1.w", "blocks.1.fc.weight"}),
        ({"adamw": "blocks.?", "segments": {"head.weight": ((4, 4), 0)}}, {"head.weight"}),
        ({"segments": {"blocks.0.w": ((4, 4), 1)}}, everything - {"blocks.1.w"}),
    ):
        assert matrices_of(matrix_groups(model, **given), model) == expected, given


def test_a_large_part_of_unknown_use_gets_a_warning():
    def layers(make):
        return Module(layers=nn.ModuleList(Module(moe=make(), proj=linear()) for _ in range(2)))

    model = layers(lambda: Module(w1=parameter(4, 8, 8), w2=parameter(4, 8, 8)))
    with pytest.warns(UserWarning, match="gives 4 parameters of unknown use, 89 % of the model's elements, to AdamW: ") as told:
        matrix_groups(model)
    text = str(told[0].message)
    assert r"layers.*.moe.w* (4, 8, 8) of Module. If they are" in text and "pass matrices=['layers.*.moe.w*']" in text, text
    assert told[0].filename == __file__ and len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for given in ("matrices", "adamw"):
            matrix_groups(model, **{given: ["layers.*.moe.w*"]})
        matrix_groups(layers(lambda: Module(experts=parameter(4, 8, 8))))
        matrix_groups(Module(token=parameter(1, 1, 8), table=parameter(2, 2), head=linear(16, 16)))


def test_the_repr_shows_each_decision_and_why():
    layers = nn.ModuleList(Module(proj=linear(), scale=parameter(8, 8)) for _ in range(12))
    groups = matrix_groups(Module(layers=layers, embed=nn.Embedding(20, 8)), adamw=["layers.3.proj"], lr=1e-3)
    assert isinstance(groups, MatrixGroups) and [len(group["params"]) for group in groups] == [11, 14]
    lines = [re.sub(" {2,}", " | ", line.strip()) for line in repr(groups).splitlines()]
    assert lines == [
        "MatrixGroups: 2 parameter groups",
        "AdamW | layers.*.scale | 12 x (8, 8) | of Module, of unknown use",
        "matrix | layers.*.proj.weight | 11 x (8, 8) | of Linear",
        "AdamW | layers.3.proj.weight | 1 x (8, 8) | given in adamw",
        "AdamW | embed.weight | 1 x (20, 8) | of Embedding, an embedding",
    ]


def _transformers():
    import transformers

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    text = {**sizes, "vocab_size": 100, "num_key_value_heads": 2, "head_dim": 8}
    one = {**sizes, "num_hidden_layers": 1}
    image = {"image_size": 32, "patch_size": 8}
    whisper = {f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("layers", "attention_heads", "ffn_dim")}
    return {
        "Mamba": (transformers.MambaConfig(hidden_size=32, num_hidden_layers=2, state_size=8, vocab_size=100), "ForCausalLM"),
        "ViT": (transformers.ViTConfig(**one, **image), "Model"),
        "Dinov2": (transformers.Dinov2Config(**one, **image), "Model"),
        "T5": (transformers.T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, vocab_size=100), "Model"),
        "Swin": (transformers.SwinConfig(embed_dim=16, depths=[1], num_heads=[2], image_size=32, patch_size=4), "Model"),
        "Whisper": (transformers.WhisperConfig(d_model=32, vocab_size=100, pad_token_id=0, **whisper), "Model"),
        "XLNet": (transformers.XLNetConfig(d_model=32, n_layer=1, n_head=4, d_inner=64, vocab_size=100), "LMHeadModel"),
        "Wav2Vec2": (transformers.Wav2Vec2Config(**one, num_conv_pos_embedding_groups=4), "Model"),
        "Rwkv": (transformers.RwkvConfig(hidden_size=32, num_hidden_layers=1, vocab_size=100), "ForCausalLM"),
        "GptOss": (transformers.GptOssConfig(**text, num_local_experts=4), "ForCausalLM"),
        "Qwen3Moe": (transformers.Qwen3MoeConfig(**text, num_experts=4, moe_intermediate_size=16), "ForCausalLM"),
        "GPT2": (transformers.GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=100), "LMHeadModel"),
    }


NO_MATRICES = re.compile(
    r"conv|emb|token|position|bias|A_log|time_|norm|layer_scale|lm_head|rel_attn|shared\.weight|wte|wpe|(?<!\w)head\.|scale"
)
"""Names in these models of what is no hidden matrix."""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
def test_matrices_of_models_of_transformers():
    import transformers

    for name, (config, suffix) in _transformers().items():
        with torch.device("meta"):
            model = getattr(transformers, name + suffix)(config)
        groups = matrix_groups(model, lr=1e-3)
        named = {name: param for name, param in model.named_parameters() if param.ndim in (2, 3)}
        expected = {name for name in named if not NO_MATRICES.search(name)}
        found = matrices_of(groups, model)
        assert found == expected, (name, found ^ expected, groups)
        assert found or name == "XLNet", "not vacuous"
