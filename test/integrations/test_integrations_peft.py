"""PEFT: adapters are loaded into sharded models; skipped where PEFT is not installed."""

import importlib.util
import tempfile
import unittest

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
from common import error_of, ranks, run_ranks
from small_models import make_model
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from torch_ragged import RaggedShard
from torch_ragged.fsdp import fully_shard, rows, tensor
from torch_ragged.integrations import install, installed
from torch_ragged.integrations.transformers import from_pretrained
from torch_ragged.spmd import Plan, parallelize, zoo

HAS_PEFT = all(importlib.util.find_spec(name) for name in ("accelerate", "transformers", "peft"))
POLICIES = {"elements": None, "rows": rows(1), "whole": tensor()}
TOKENS = torch.arange(32).reshape(2, 16)


def adapted():
    """A Llama with LoRA on its attention, whose adapters are not zero, and whose head is trained too."""
    from peft import LoraConfig, get_peft_model

    model = make_model("llama")
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"]))
    for param in model.parameters():
        if param.requires_grad:
            torch.nn.init.normal_(param, std=0.1)
    return model


def sharded(mesh):
    model = adapted()
    for layer in model.base_model.model.model.layers:
        fsdp.fully_shard(layer, mesh=mesh)
    fsdp.fully_shard(model, mesh=mesh)
    assert isinstance(next(model.parameters()).placements[-1], RaggedShard)
    return model


def step(model):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    loss = model(TOKENS, labels=TOKENS).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def whole(state):
    return {name: value.full_tensor() if hasattr(value, "full_tensor") else value.clone() for name, value in state.items()}


def check_equal(found, expected):
    assert set(found) == set(expected), set(found) ^ set(expected)
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name


def check_set(shape, policy):
    """Adapters are replaced between two steps: the loss is that of one process that does the same, and objects stay."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    plain = adapted()
    first = step(plain)
    saved = {name: value + 0.01 for name, value in whole(get_peft_model_state_dict(plain)).items()}
    with installed(orig_param_policy=lambda fqn, param: policy):
        model = sharded(init_device_mesh("cpu", shape))
        params = dict(model.named_parameters())
        assert abs(step(model) - first) < 1e-5
        set_peft_model_state_dict(model, saved)
    check_equal(whole(get_peft_model_state_dict(model)), saved)
    assert all(param is params[name] for name, param in model.named_parameters())
    base = plain.base_model.model.model.layers[0].mlp.up_proj.weight
    assert torch.equal(model.base_model.model.model.layers[0].mlp.up_proj.weight.full_tensor(), base)
    set_peft_model_state_dict(plain, saved)
    for _ in range(2):
        torch.testing.assert_close(step(model), step(plain))


def check_load_adapter(folder):
    """``load_adapter``, by which Trainer resumes, fills the adapter that a sharded model has."""
    from peft import get_peft_model_state_dict, load_peft_weights

    installation = install()
    try:
        model = sharded(init_device_mesh("cpu", (2,)))
        result = model.load_adapter(folder, "default", is_trainable=True)
        assert not result.unexpected_keys and not any("lora" in key for key in result.missing_keys), result
        check_equal(whole(get_peft_model_state_dict(model)), load_peft_weights(folder, device="cpu"))
        step(model)
    finally:
        installation.uninstall()


def errors_without_install():
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    found = []
    for policy in (None, rows(1)):
        with installed(orig_param_policy=lambda fqn, param: policy):  # noqa: B023
            model = sharded(init_device_mesh("cpu", (2,)))
        found.append(error_of(set_peft_model_state_dict, model, whole(get_peft_model_state_dict(model))))
    return found


def lora(model):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM"))


def check_saved_adapter(model, base, folder):
    """As the pages say it: whole adapters on rank 0. A process alone computes the same with them."""
    from peft import PeftModel

    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    state = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict=state)
    dist.barrier()
    again = PeftModel.from_pretrained(base, folder).eval()
    with torch.no_grad():
        torch.testing.assert_close(whole({"": model.eval()(TOKENS).logits})[""], again(TOKENS).logits)


def check_after_from_pretrained(folder, sizes):
    """Adapters are sharded by a call of their own; without it, every rank raises before forward communicates."""
    from small_models import enter_ranks
    from transformers import AutoModelForCausalLM

    enter_ranks()
    single = lora(AutoModelForCausalLM.from_pretrained(folder))
    with installed():
        model = lora(from_pretrained(AutoModelForCausalLM, folder, distributed_config=sizes))
    error = error_of(model, TOKENS, labels=TOKENS)
    assert "lora_A.default.weight" in error and "were added after from_pretrained" in error, error
    with torch.no_grad():
        model(TOKENS)
    names = [name for name, param in model.named_parameters() if param.requires_grad]
    fully_shard([model.get_submodule(name.rpartition(".")[0]) for name in names])
    for _ in range(3):
        assert abs(step(model) - step(single)) < 1e-5
    check_saved_adapter(model, AutoModelForCausalLM.from_pretrained(folder), f"{folder}/adapter")


def check_under_a_plan(folder, from_zoo):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    single, model = lora(make_model("llama")), lora(make_model("llama"))
    plan = zoo.llama().under("base_model.model") if from_zoo else Plan.from_transformers(model, fsdp="dp")
    parallelize(model, plan, mesh)
    name = "base_model.model.model.layers.0.self_attn.o_proj.{}.weight"
    for part in ("base_layer", "lora_A.default"):
        assert model.get_parameter(name.format(part)).placements[1] == Shard(1)
    for _ in range(3):
        assert abs(step(model) - step(single)) < 1e-5
    check_saved_adapter(model, make_model("llama"), folder)
    plain = parallelize(make_model("llama"), zoo.llama(), mesh)
    assert 'parallelize(model, plan.under("base_model.model"), mesh)' in error_of(lora, plain)


@unittest.skipUnless(HAS_PEFT, "peft, transformers and accelerate are not installed")
class PeftTest(unittest.TestCase):
    def test_adapters_are_set_in_a_sharded_model(self):
        for name, policy in POLICIES.items():
            with self.subTest(name):
                run_ranks(2, check_set, (2,), policy)
        run_ranks(4, check_set, (2, 2), None)

    def test_an_adapter_is_loaded_into_a_sharded_model(self):
        with tempfile.TemporaryDirectory() as folder:
            adapted().save_pretrained(folder)
            run_ranks(2, check_load_adapter, folder)

    def test_lora_after_from_pretrained(self):
        for count, sizes in ((2, {"fsdp_size": 2}), (4, {"fsdp_size": 2, "dp_replicate_size": 2})):
            with tempfile.TemporaryDirectory() as folder:
                make_model("llama").save_pretrained(folder)
                run_ranks(count, check_after_from_pretrained, folder, sizes)

    def test_lora_before_a_plan(self):
        for from_zoo in (True, False):
            with tempfile.TemporaryDirectory() as folder:
                run_ranks(4, check_under_a_plan, folder, from_zoo)

    @ranks(1)
    def test_the_names_of_transformers_are_restored():
        import peft  # noqa: F401
        import transformers.core_model_loading as loading
        from transformers.distributed import sharding_utils

        original = sharding_utils.DtensorShardOperation
        with installed() as installation:
            assert sharding_utils.DtensorShardOperation is loading.DtensorShardOperation is not original
            assert issubclass(loading.DtensorShardOperation, original)
            assert "transformers.core_model_loading.DtensorShardOperation" in installation.names
            with installed():
                assert sharding_utils.DtensorShardOperation is loading.DtensorShardOperation is not original
            assert sharding_utils.DtensorShardOperation is not original
        assert sharding_utils.DtensorShardOperation is loading.DtensorShardOperation is original

    def test_without_install_every_rank_raises_and_says_what_to_call(self):
        for texts in run_ranks(2, errors_without_install):
            for text in texts:
                self.assertRegex(text, r"^ValueError: .*(call|after) torch_ragged.integrations.install\(\)$")
