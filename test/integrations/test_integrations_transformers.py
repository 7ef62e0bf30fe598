"""transformers: from_pretrained into ragged shards, and Trainer that saves and resumes; skipped where it is not installed."""

import importlib.util
import random
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from common import error_of, run_ranks
from doc_pages import run_page
from small_models import curve, enter_ranks, make_model, make_trainer

from torch_ragged import RaggedShard
from torch_ragged.fsdp import FSDPModule, fully_shard, rows
from torch_ragged.integrations import installed
from torch_ragged.integrations._lazy_tensor import LazyTensor
from torch_ragged.integrations.transformers import checkpoint_callback, from_pretrained

HAS_TRANSFORMERS = all(importlib.util.find_spec(name) for name in ("accelerate", "transformers"))
SEVERAL = "20KB"  # The size of a checkpoint file, so that a model has several.


def row_policy(fqn, param):
    return rows(2) if param.ndim == 2 else None


def auto():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM


class CountedFile:
    """``safe_open`` that counts the bytes of what is read."""

    read = 0

    def __init__(self, *arguments, **keywords):
        from safetensors import safe_open

        self.file = safe_open(*arguments, **keywords)

    def keys(self):
        return self.file.keys()

    def get_slice(self, name):
        return CountedSlice(self.file.get_slice(name))

    def __exit__(self, *error):
        pass


class CountedSlice:
    def __init__(self, of):
        self.of, self.get_shape, self.get_dtype = of, of.get_shape, of.get_dtype

    def __getitem__(self, index):
        part = self.of[index]
        CountedFile.read += part.nbytes
        return part


def whole(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def check_loaded(folder, **options):
    """Parameters, buffers and logits are those of one process; each rank read as many bytes as its shards have."""
    import transformers.modeling_utils as modeling

    enter_ranks()
    CountedFile.read = 0
    arguments = {"dtype": options["dtype"]} if "dtype" in options else {}
    with mock.patch.object(modeling, "safe_open", CountedFile):
        model = from_pretrained(auto(), folder, **options)
    assert CountedFile.read == sum(p.to_local().numel() for p in model.parameters()) * 4, CountedFile.read  # Files are float32.
    assert isinstance(model, FSDPModule)
    reference = auto().from_pretrained(folder, **arguments)
    want, found = reference.state_dict(), model.state_dict()
    assert list(found) == list(want)
    for name, value in found.items():
        assert torch.equal(whole(value), want[name]), name
        assert value.dtype == want[name].dtype == arguments.get("dtype", torch.float32), name
    buffers = dict(reference.named_buffers())
    assert any("inv_freq" in name for name in buffers)
    for name, value in model.named_buffers():
        assert torch.equal(value, buffers[name]) and value.device.type == "cpu", name
    tokens = torch.arange(32).reshape(2, 16)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, reference(tokens).logits)
    return CountedFile.read


def check_tied(folder):
    enter_ranks()
    model = from_pretrained(auto(), folder, orig_param_policy=row_policy)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    tokens = torch.arange(32).reshape(2, 16)
    model(tokens, labels=tokens).loss.backward()
    plain = auto().from_pretrained(folder)
    plain(tokens, labels=tokens).loss.backward()
    torch.testing.assert_close(model.lm_head.weight.grad.full_tensor(), plain.lm_head.weight.grad)


def rewrite(folder, change):
    """Apply ``change`` to the state dict of the folder's one file."""
    from safetensors.torch import load_file, save_file

    file = Path(folder) / "model.safetensors"
    state = load_file(file)
    change(state)
    save_file(state, file, metadata={"format": "pt"})


def errors_of_tied(folder):
    enter_ranks()
    return error_of(from_pretrained, auto(), folder)


def check_missing(folder):
    """Weights that the checkpoint lacks are initialized; others are read."""
    enter_ranks()
    model, info = from_pretrained(auto(), folder, output_loading_info=True)
    assert set(info["missing_keys"]) == {"lm_head.weight"}, info
    head = model.lm_head.weight.full_tensor()
    assert 0.01 < head.std() < 0.03, head.std()  # The model's initialization, of deviation 0.02.
    assert torch.equal(model.model.norm.weight.full_tensor(), torch.ones(32))
    tokens = torch.arange(32).reshape(2, 16)
    model(tokens, labels=tokens).loss.backward()
    assert model.lm_head.weight.grad.full_tensor().abs().sum() > 0


def check_own_function(folder):
    enter_ranks()
    meshes = []

    def shard(model, mesh):
        meshes.append(mesh)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, orig_param_policy=row_policy)
        fully_shard(model, mesh=mesh)

    model = from_pretrained(auto(), folder, shard=shard, distributed_config={"fsdp_size": 2, "dp_replicate_size": 2})
    assert meshes[0].mesh_dim_names == ("dp_replicate", "fsdp") and meshes[0].shape == (2, 2)
    assert not isinstance(model.model.embed_tokens, FSDPModule) and isinstance(model.model.layers[0], FSDPModule)
    want = auto().from_pretrained(folder).state_dict()
    assert all(torch.equal(value.full_tensor(), want[name]) for name, value in model.state_dict().items())


def check_model_parallel(folder, sizes):
    """Tensor and expert parallelism by transformers, with ours on top: gradients of one process, and two ways to save."""
    from transformers.distributed import DistributedConfig

    enter_ranks()
    model = from_pretrained(auto(), folder, distributed_config=DistributedConfig(**sizes))
    plain = auto().from_pretrained(folder)
    want = plain.state_dict()
    tokens = torch.arange(32).reshape(2, 16)
    for each in (model, plain):
        each(tokens, labels=tokens).loss.backward()
    for (name, param), (_, other) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(param.full_tensor(), want[name]), name
        torch.testing.assert_close(param.grad.full_tensor(), other.grad, rtol=1e-4, atol=1e-6, msg=name)
    model.save_pretrained(f"{folder}/again")
    model.save_pretrained(f"{folder}/shards", distributed_checkpoint=True)
    dist.barrier()
    again = auto().from_pretrained(f"{folder}/again").state_dict()
    shards = from_pretrained(auto(), f"{folder}/shards", distributed_config=DistributedConfig(**sizes)).state_dict()
    for name, value in want.items():
        assert torch.equal(again[name], value) and torch.equal(whole(shards[name]), value), name


def wrong_uses(folder):
    enter_ranks()
    import transformers.core_model_loading as loading

    def unsharded(model, mesh):
        pass

    found = [
        error_of(from_pretrained, auto(), f"{folder}/none"),
        error_of(from_pretrained, auto(), folder, device_map="auto"),
        error_of(from_pretrained, auto(), folder, shard=unsharded, orig_param_policy=row_policy),
        error_of(from_pretrained, auto(), folder, shard=unsharded),
        error_of(from_pretrained, auto(), folder, distributed_config={"tp_size": 2}),
    ]
    set_param = loading.__dict__.pop("set_param_for_module")
    found.append(error_of(from_pretrained, auto(), folder))
    loading.set_param_for_module = set_param
    with mock.patch("importlib.metadata.version", return_value="5.9.0"):
        found.append(error_of(from_pretrained, auto(), folder))
    assert loading.DtensorShardOperation.__module__.startswith("transformers"), "a name stays replaced"
    return found


def train(model_folder, out, steps, resume=None, callback_folder=None, batch=4, **options):
    """Losses and norms of a natively sharded model that Trainer trains, with dropout."""
    enter_ranks()
    model = from_pretrained(auto(), model_folder, attention_dropout=options.pop("dropout", 0.1))
    options = {"save_strategy": "steps", "save_steps": 3, "save_only_model": True, **options}
    trainer = make_trainer(
        model, out, batch=batch, max_steps=steps, callbacks=[checkpoint_callback(callback_folder)], **options
    )
    trainer.train(resume_from_checkpoint=resume)
    return curve(trainer)


def wrong_resumes(model_folder, out, other):
    found = [error_of(train, model_folder, f"{out}/new", 5, resume=f"{out}/checkpoint-3")]
    found.append(error_of(train, model_folder, out, 5, resume=f"{out}/checkpoint-3", callback_folder=f"{other}/checkpoint-3"))
    enter_ranks()
    found.append(error_of(make_trainer, make_model("llama"), out, callbacks=[checkpoint_callback()]))
    return found


def best_model(model_folder, out):
    """The model that Trainer has at the end is the best one, not the last: here, the one with the highest loss."""
    enter_ranks()
    options = {"save_strategy": "steps", "save_steps": 1, "save_only_model": True, "load_best_model_at_end": True}
    options |= {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "eval_loss", "greater_is_better": True}
    model = from_pretrained(auto(), model_folder)
    trainer = make_trainer(model, out, max_steps=4, callbacks=[checkpoint_callback()], **options)
    trainer.train()
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert max(losses) > losses[-1] + 0.01, losses
    assert trainer.evaluate()["eval_loss"] == max(losses), losses


def load_with_install(folder, converted):
    """transformers' own from_pretrained, while the program's names are replaced: it cuts what it need not convert."""
    enter_ranks()
    from transformers.distributed import DistributedConfig

    CountedFile.read = 0
    config = DistributedConfig(fsdp_size=dist.get_world_size())
    with installed(), mock.patch("transformers.modeling_utils.safe_open", CountedFile):
        if converted:
            return error_of(auto().from_pretrained, folder, distributed_config=config)
        model = auto().from_pretrained(folder, distributed_config=config)
    assert CountedFile.read == sum(p.to_local().numel() for p in model.parameters()) * 4, CountedFile.read
    want = auto().from_pretrained(folder).state_dict()
    assert isinstance(model.lm_head.weight.placements[0], RaggedShard)
    assert all(torch.equal(value.full_tensor(), want[name]) for name, value in model.state_dict().items())
    return ""


class LazyTensorTest(unittest.TestCase):
    def test_any_box_of_joined_tensors_is_read_from_its_parts_alone(self):
        generator = random.Random(0)
        for _ in range(200):
            sources = [torch.randn(4, 6) for _ in range(4)]
            read = []
            lazy = [self.counted(source, read) for source in sources]
            joined, plain = [
                torch.cat([torch.stack(parts[:2], 0), torch.stack(parts[2:], 0)], 1).chunk(2, 2)[1].transpose(0, 2).contiguous()
                for parts in (lazy, sources)
            ]
            self.assertIsInstance(joined, LazyTensor)
            self.assertEqual(joined.shape, plain.shape)
            box = [sorted(generator.sample(range(size + 1), 2)) for size in plain.shape]
            part = joined.read([start for start, _ in box], [stop - start for start, stop in box])
            self.assertTrue(torch.equal(part, plain[tuple(slice(*each) for each in box)]))
            self.assertEqual(sum(read), part.numel())

    def counted(self, source, read):
        def read_box(box):
            part = source[tuple(slice(each.start, each.stop) for each in box)]
            read.append(part.numel())
            return part

        return LazyTensor(source.shape, read_box)

    def test_other_functions_get_the_whole_tensor(self):
        source = torch.randn(3, 4)
        lazy = LazyTensor.of(source, torch.float64)
        self.assertTrue(torch.equal(torch.flip(lazy, [0]), source.double().flip(0)))
        self.assertTrue(torch.equal(lazy.reshape(4, 3), source.double().reshape(4, 3)))
        self.assertTrue(torch.equal(torch.stack([lazy, source.double()]).read((1, 0, 0), (1, 3, 4)), source.double()[None]))
        self.assertTrue(torch.equal(LazyTensor.of(torch.tensor(2.0), None).read((), ()), torch.tensor(2.0)))


@unittest.skipUnless(HAS_TRANSFORMERS, "transformers and accelerate are not installed")
class FromPretrainedTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def save(self, name, **options):
        make_model(name).save_pretrained(self.folder, **options)
        return self.folder

    def test_each_rank_reads_its_intervals_only(self):
        counts = run_ranks(3, check_loaded, self.save("llama", max_shard_size=SEVERAL))
        self.assertGreater(min(counts), 0)
        self.assertGreater(len(list(Path(self.folder).glob("*.safetensors"))), 2)

    def test_under_install_transformers_reads_intervals_and_refuses_what_it_converts(self):
        self.assertEqual(run_ranks(3, load_with_install, self.save("llama", max_shard_size=SEVERAL), False), [""] * 3)
        for text in run_ranks(2, load_with_install, self.save("qwen3_moe"), True):
            self.assertIn("ragged parameter of shape (4, 32, 16), for which it must be whole: load the model by", text)

    def test_experts_are_read_from_tensors_of_other_names(self):
        folder = self.save("qwen3_moe", max_shard_size=SEVERAL)
        index = (Path(folder) / "model.safetensors.index.json").read_text()
        self.assertIn("experts.3.gate_proj.weight", index)
        self.assertNotIn("gate_up_proj", index)
        run_ranks(3, check_loaded, folder)

    def test_gpt_oss_is_read_in_bfloat16(self):
        run_ranks(2, check_bfloat16, self.save("gpt_oss"))

    def test_tied_weights_are_one_parameter(self):
        run_ranks(2, check_tied, self.save("tied"))

    def test_different_values_of_tied_weights_are_an_error_on_each_rank(self):
        folder = self.save("tied")
        rewrite(folder, lambda state: state.update({"lm_head.weight": state["model.embed_tokens.weight"].clone()}))
        self.assertEqual(run_ranks(2, errors_of_tied, folder), ["", ""])
        rewrite(folder, lambda state: state["lm_head.weight"][-1, -1].add_(1))  # On the last rank only.
        for text in run_ranks(2, errors_of_tied, folder):
            self.assertIn("different values for lm_head.weight and model.embed_tokens.weight, which the model ties", text)

    def test_missing_weights_are_initialized(self):
        folder = self.save("llama")
        rewrite(folder, lambda state: state.pop("lm_head.weight"))
        run_ranks(2, check_missing, folder)

    def test_a_function_shards_with_replicas(self):
        run_ranks(4, check_own_function, self.save("llama"))

    def test_tensor_parallelism_below(self):
        run_ranks(4, check_model_parallel, self.save("qwen3_moe"), {"fsdp_size": 2, "tp_size": 2})

    def test_expert_parallelism_below(self):
        run_ranks(4, check_model_parallel, self.save("qwen3_moe"), {"fsdp_size": 4, "ep_size": 2})

    def test_tied_weights_are_saved_and_loaded(self):
        run_ranks(2, check_model_parallel, self.save("tied"), {"fsdp_size": 2})

    def test_wrong_use_says_what_to_do(self):
        for missing, device_map, both, unsharded, alone, name, old in run_ranks(2, wrong_uses, self.save("llama")):
            self.assertRegex(missing, "^FileNotFoundError: from_pretrained reads a local folder, got .*: download the model")
            self.assertIn("ValueError: from_pretrained got device_map, which does not go with sharding", device_map)
            self.assertIn("pass the options in shard's own calls", both)
            self.assertIn("LlamaForCausalLM is not sharded by torch_ragged: shard must call", unsharded)
            self.assertIn("got 1 rank of data parallelism", alone)
            self.assertIn("ImportError: transformers has no transformers.core_model_loading.set_param_for_module", name)
            self.assertIn("ImportError: transformers 5.9.0 is installed: install transformers >= 5.23", old)
        with mock.patch.object(dist, "is_initialized", return_value=False):
            self.assertIn("call init_process_group first", error_of(from_pretrained, auto(), self.folder))

    def test_a_quantized_checkpoint_is_refused(self):
        for text in run_ranks(2, error_of_quantized, self.save("llama")):
            self.assertIn("ValueError: the checkpoint is quantized", text)


def check_bfloat16(folder):
    enter_ranks()
    model = from_pretrained(auto(), folder, dtype=torch.bfloat16, orig_param_policy=row_policy)
    reference = auto().from_pretrained(folder, dtype=torch.bfloat16)
    want = reference.state_dict()
    for name, value in model.state_dict().items():
        assert value.dtype == want[name].dtype == torch.bfloat16 and torch.equal(whole(value), want[name]), name
    assert isinstance(model.lm_head.weight.placements[0], RaggedShard)


def error_of_quantized(folder):
    """A quantizer that transformers has replaced by nothing yet: its config is all that this package looks at."""
    enter_ranks()
    from transformers import LlamaForCausalLM

    def with_quantization(model, *arguments):
        model.config.quantization_config = {"quant_method": "fp8"}
        return resolve(model, *arguments)

    resolve = LlamaForCausalLM._resolve_parallel_plans
    with mock.patch.object(LlamaForCausalLM, "_resolve_parallel_plans", with_quantization):
        return error_of(from_pretrained, auto(), folder)


@unittest.skipUnless(HAS_TRANSFORMERS, "transformers and accelerate are not installed")
class CheckpointCallbackTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.model, self.out = f"{folder.name}/model", f"{folder.name}/out"

    def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(self):
        for name in ("llama", "qwen3_moe"):
            make_model(name).save_pretrained(self.model)
            (whole_run, *_) = run_ranks(2, train, self.model, f"{self.out}/{name}", 7)
            self.assertEqual(len(whole_run), 14)
            (resumed, *_) = run_ranks(2, train, self.model, f"{self.out}/{name}", 7, f"{self.out}/{name}/checkpoint-3")
            self.assertEqual(resumed, whole_run)  # To the last bit, with dropout.

    def test_a_run_resumes_at_the_end_of_an_epoch(self):
        make_model("llama").save_pretrained(self.model)
        (whole_run, *_) = run_ranks(2, train_epochs, self.model, self.out)
        (resumed, *_) = run_ranks(2, train_epochs, self.model, self.out, f"{self.out}/checkpoint-4")
        self.assertEqual((resumed, len(whole_run)), (whole_run, 16))  # Two epochs of four steps.

    def test_other_numbers_of_ranks_continue_the_curve(self):
        make_model("llama").save_pretrained(self.model)
        want = run_ranks(2, train_without_dropout, self.model, self.out, 7)[0]
        for ranks in (4, 3):
            found = run_ranks(ranks, train_without_dropout, self.model, self.out, 7, f"{self.out}/checkpoint-3")[0]
            self.assertEqual(found[:6], want[:6])
            torch.testing.assert_close(torch.tensor(found[6:]), torch.tensor(want[6:]), rtol=2e-5, atol=2e-5)

    def test_the_best_model_is_loaded_at_the_end(self):
        make_model("qwen3_moe").save_pretrained(self.model)
        run_ranks(2, best_model, self.model, self.out)

    def test_wrong_use_says_what_to_do(self):
        make_model("llama").save_pretrained(self.model)
        other = f"{self.out}/other"
        for out in (self.out, other):
            run_ranks(2, train, self.model, out, 3)
        for elsewhere, another, plain in run_ranks(2, wrong_resumes, self.model, self.out, other):
            self.assertRegex(elsewhere, "^CheckpointError: Trainer resumes at step 3, but .* is no checkpoint of checkpoint")
            self.assertRegex(another, "^CheckpointError: Trainer resumes at step 3 of the run .*: pass the folder that Trainer")
            self.assertIn("ValueError: checkpoint_callback is for models of torch_ragged.integrations.transformers", plain)


def train_epochs(model_folder, out, resume=None):
    return train(model_folder, out, -1, resume, batch=16, num_train_epochs=2, save_steps=4)


def train_without_dropout(model_folder, out, steps, resume=None):
    return train(model_folder, out, steps, resume, batch=12, dropout=0.0)


class PageTest(unittest.TestCase):
    @unittest.skipUnless(HAS_TRANSFORMERS, "transformers and accelerate are not installed")
    def test_the_page_runs(self):
        first, second = run_page("integrations/transformers.md")
        self.assertIn("step 10", first)
        self.assertIn("step 20", second)
