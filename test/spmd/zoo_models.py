"""Tiny models of unchanged classes of transformers and diffusers, and their training on one device and under a plan.

Nothing is downloaded. Dropout is on where a class has it. ``zoo_placements.txt`` has the names of these models, and what plans
do to them. ``python test/spmd/zoo_models.py`` writes it, and needs the libraries.
"""

import copy
import functools
import importlib.util
import inspect
import math
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from torch_ragged.spmd import deferred_init, parallelize, zoo
from torch_ragged.spmd._resolve import resolve
from torch_ragged.spmd._resolved import MeshShape

__all__ = [
    "HAS_LIBRARIES",
    "MODELS",
    "SHORT",
    "TABLES",
    "adapted_like_peft",
    "assert_trains_as_one_device",
    "batch_of",
    "build",
    "named_like",
    "placements_text",
    "train_both",
]

HAS_LIBRARIES = all(importlib.util.find_spec(name) for name in ("transformers", "diffusers"))
_TEXT = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "attention_dropout": 0.1,
    "use_cache": False,
}
_EXPERTS = {**_TEXT, "head_dim": 8, "num_experts_per_tok": 2}
# The name of the class, and its config. Classes of transformers have a config class; those of diffusers take it as arguments.
MODELS = {
    "llama": ("LlamaForCausalLM", _TEXT),
    "qwen3": ("Qwen3ForCausalLM", {**_TEXT, "head_dim": 8, "tie_word_embeddings": True}),
    "mixtral": ("MixtralForCausalLM", {**_EXPERTS, "num_local_experts": 4, "output_router_logits": True}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {**_EXPERTS, "moe_intermediate_size": 48, "num_experts": 4}),
    "gpt_oss": ("GptOssForCausalLM", {**_EXPERTS, "num_local_experts": 4, "sliding_window": 8}),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        {
            **_TEXT,
            "num_key_value_heads": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "first_k_dense_replace": 1,
        },
    ),
    "t5": (
        "T5ForConditionalGeneration",
        {
            "vocab_size": 96,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "dropout_rate": 0.1,
            "use_cache": False,
            "decoder_start_token_id": 0,
        },
    ),
    "vit": (
        "ViTForImageClassification",
        {
            "image_size": 16,
            "patch_size": 4,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "hidden_dropout_prob": 0.1,
            "attention_probs_dropout_prob": 0.1,
            "num_labels": 10,
        },
    ),
    "dit": (
        "DiTTransformer2DModel",
        {
            "num_attention_heads": 4,
            "attention_head_dim": 8,
            "in_channels": 4,
            "out_channels": 8,
            "num_layers": 2,
            "sample_size": 8,
            "num_embeds_ada_norm": 10,
            "dropout": 0.1,
        },
    ),
    "flux2": (
        "Flux2Transformer2DModel",
        {
            "in_channels": 8,
            "num_layers": 1,
            "num_single_layers": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 4,
            "joint_attention_dim": 16,
            "timestep_guidance_channels": 16,
            "mlp_ratio": 3.0,
            "axes_dims_rope": (2, 2, 2, 2),
        },
    ),
}
# Configs with each kind of layer once.
SHORT = {name: {"num_hidden_layers": 1} for name in MODELS}
SHORT |= {"deepseek_v3": {}, "t5": {"num_layers": 1}, "dit": {"num_layers": 1}, "flux2": {"num_single_layers": 1}}
_FILE = Path(__file__).with_name("zoo_placements.txt")
TABLES = dict(part.split("\n", 1) for part in _FILE.read_text().split("# ")[1:]) if _FILE.exists() else {}


def placements_text(name, model):
    """What the plan of a family does to ``model`` over ``dp`` and ``tp``.

    Lines of parameters have shape, placements and unit. Those of activations have placements without and with
    ``sequence_parallel``.
    """
    mesh = MeshShape(("dp", "tp"), (2, 2))
    found = [resolve(getattr(zoo, name)(sequence_parallel=cut), model, mesh) for cut in (False, True)]
    tensors, again = (
        [
            ("=".join((each.name, *each.aliases)), "x".join(map(str, each.shape)), _text(each.run), each.unit or "root")
            for each in one.tensors
            if each.is_parameter
        ]
        for one in found
    )
    assert tensors == again
    plain, cut = ({each.path: _text(each.placements) for each in one.boundaries} for one in found)
    lines = [*tensors, *((path, plain.get(path, "none"), text) for path, text in cut.items())]
    return "".join(" ".join(line) + "\n" for line in lines) + "\n"


def _text(placements):
    return ",".join("-" if each is None else str(each).replace(" ", "") for each in placements)


def named_like(name):
    """A model on the meta device that has the names and shapes of a family, and computes nothing. It needs no library."""
    root, arguments = _Named(), {}

    def module_of(path):
        found = root
        for part in filter(None, path.split(".")):
            if part not in found._modules:
                found.add_module(part, _Named())
            found = found._modules[part]
        return found

    for line in TABLES[name].splitlines()[:-1]:
        path, shape, *_ = line.split()
        if "<" in path:
            module, _, key = path.partition("<")
            arguments.setdefault(module_of(module), []).extend([key[3:-1]] if key.startswith("in:") else [])
            continue
        param = nn.Parameter(torch.empty([int(size) for size in shape.split("x")], device="meta"))
        for each in path.split("="):
            module, _, key = each.rpartition(".")
            module_of(module).register_parameter(key, param)
    for module, names in arguments.items():
        module.takes(names)
    return root


def adapted_like_peft(model, targets, saved=()):
    """``model`` with the names and shapes that LoRA of PEFT gives it: of the modules ``targets``, and of ``saved``, copies of
    which are trained. It needs no library, and computes nothing."""
    for name, module in [*model.named_modules()]:
        parent, _, key = name.rpartition(".")
        if key in targets:
            outs, ins = module.weight.shape
            lora = {"lora_A": (4, ins), "lora_B": (outs, 4)}
            parts = {each: nn.ModuleDict({"default": _Named()}) for each in lora}
            for each, shape in lora.items():
                parts[each]["default"].weight = nn.Parameter(torch.empty(shape, device="meta"))
            parts["base_layer"] = module
        elif key in saved:
            parts = {"original_module": module, "modules_to_save": nn.ModuleDict({"default": copy.deepcopy(module)})}
        else:
            continue
        wrapper = _Named()
        for each, part in parts.items():
            wrapper.add_module(each, part)
        setattr(model.get_submodule(parent), key, wrapper)
    root = _Named()
    root.base_model = _Named()
    root.base_model.model = model
    root.get_base_model = lambda: model
    return root


class _Named(nn.Module):
    def forward(self):
        raise NotImplementedError

    def takes(self, names):
        def forward(*args, **kwargs):
            raise NotImplementedError

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        forward.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])
        self.forward = forward


def build(name, **changes):
    """A new model, with other values in its config if ``changes`` are given."""
    kind, config = MODELS[name]
    if name in ("dit", "flux2"):
        import diffusers

        return getattr(diffusers, kind)(**{**config, **changes})
    import transformers

    model_class = getattr(transformers, kind)
    return model_class(model_class.config_class(**{**config, **changes}))


def batch_of(name, rows=4):
    if name == "vit":
        return {"pixel_values": torch.randn(rows, 3, 16, 16), "labels": torch.randint(0, 10, (rows,))}
    if name == "dit":
        labels, timestep = torch.randint(0, 10, (rows,)), torch.randint(0, 1000, (rows,))
        return {"hidden_states": torch.randn(rows, 4, 8, 8), "timestep": timestep, "class_labels": labels}
    if name == "flux2":
        return {
            "hidden_states": torch.randn(rows, 16, 8),
            "encoder_hidden_states": torch.randn(rows, 4, 16),
            "timestep": torch.rand(rows),
            "guidance": torch.rand(rows),
            "img_ids": torch.arange(64.0).view(16, 4),
            "txt_ids": torch.zeros(4, 4),
        }
    ids = torch.randint(0, 96, (rows, 16))
    return {"input_ids": ids, "labels": ids}


def assert_trains_as_one_device(name, plan, mesh=(2, 2), tolerance=1e-5, **options):
    """Train a model under ``plan`` and on one device. Initial values are equal to the bit; losses and gradients are close.

    Returns:
        the model.
    """
    model, differences = train_both(name, plan, mesh, **options)
    for step, (loss, grad, worst) in enumerate(differences):
        assert loss <= tolerance, f"step {step}: the loss differs by {loss}"
        assert grad <= tolerance, f"step {step}: the gradient of {worst} differs by {grad} of its largest element"
    return model


def train_both(name, plan, mesh=(2, 2), steps=3, mode="eager", accumulate=1, checkpoints=False, rows=2, **changes):
    """Train a model under ``plan`` and on one device, with the same script.

    Args:
        mesh: the sizes of ``("dp", "tp")``, or of ``("replicas", "dp", "tp")``.
        accumulate: backwards per step.
        checkpoints: whether blocks are computed again for backward.
        rows: of a batch, per rank that has other ones.
        changes: of the config.

    Returns:
        the model, and for each step: how much the losses differ; how much the gradients differ, relative to the largest element
        of a parameter's gradient; and the parameter whose gradient differs most.

    Raises:
        AssertionError: initial values differ, or a parameter has a gradient in one of them only.
    """
    dims = init_device_mesh("cpu", mesh, mesh_dim_names=("replicas", "dp", "tp")[-len(mesh) :])
    torch.manual_seed(0)
    model = parallelize(deferred_init(functools.partial(build, name, **changes)), plan, dims, mode=mode)
    torch.manual_seed(0)
    single = build(name, **changes)
    for key, value in single.named_parameters():
        torch.testing.assert_close(_whole(model.get_parameter(key)), value.detach(), rtol=0, atol=0, msg=key)
    for each in (model, single) if checkpoints else ():
        (getattr(each, "gradient_checkpointing_enable", None) or each.enable_gradient_checkpointing)()
        each.train()
    rows *= math.prod(mesh[:-1])
    differences = []
    for (loss, grads), (other, expected) in zip(*(_train(each, name, steps, rows, accumulate) for each in (model, single))):
        assert grads.keys() == expected.keys(), grads.keys() ^ expected.keys()
        errors = {
            key: (grads[key] - grad).abs().max().item() / (grad.abs().max().item() + 1e-3) for key, grad in expected.items()
        }
        worst = max(errors, key=errors.get)
        differences.append((abs(loss - other), errors[worst], worst))
    return model, differences


def _train(model, name, steps, rows, accumulate):
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    history = []
    for _ in range(steps):
        total = 0.0
        for _ in range(accumulate):
            output = model(**batch_of(name, rows))
            loss = (output.loss if hasattr(output, "loss") else output.sample.square().mean()) / accumulate
            loss.backward()
            total += _whole(loss).item()
        grads = {key: _whole(param.grad) for key, param in model.named_parameters() if param.grad is not None}
        history.append((total, grads))
        optimizer.step()
        optimizer.zero_grad()
    return history


def _whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


if __name__ == "__main__":
    _FILE.write_text("".join(f"# {name}\n{placements_text(name, build(name, **SHORT[name]))}" for name in MODELS))
