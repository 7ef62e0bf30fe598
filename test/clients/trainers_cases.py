"""Programs on transformers' Trainer: their own entry functions, on files as users have them, with FSDP2 and with ours."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch.distributed as dist
from accelerate_cases import ours_in_accelerate
from case import STEPS, Case, NotRun
from small_models import VOCABULARY, curve, enter_ranks, make_model
from transformers_cases import shared_folder

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_TEMPLATE = "{% for message in messages %}{{ message['content'] }}</s>{% endfor %}"


def write_files(folder: str) -> None:
    """Write what a user gives a trainer: a folder ``model`` with a tokenizer, and ``data.jsonl`` with conversations."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<s>", "</s>", *sorted({*_LETTERS, *map(str.upper, _LETTERS), "\n", ":"})]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    assert len(words) <= VOCABULARY
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<unk>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=_TEMPLATE, **special)
    fast.save_pretrained(f"{folder}/model")
    make_model("llama").save_pretrained(f"{folder}/model")
    with open(f"{folder}/data.jsonl", "w") as file:
        for start in range(64):
            text = "".join(_LETTERS[(start + 3 * step) % 26] for step in range(12))
            turns = [{"role": "user", "content": text[:4]}, {"role": "assistant", "content": text[4:]}]
            print(json.dumps({"messages": turns}), file=file)


@contextlib.contextmanager
def started(implementation: str) -> Iterator[tuple[str, list[Any]]]:
    """A folder with the files, and the list of Trainers that train, on ranks where accelerate shards with ours or with torch's.

    accelerate takes FSDP for accelerators only. It is told that several CPU processes are several GPUs, before it looks.
    """
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType
    from transformers import Trainer

    start, train, trainers = PartialState.__init__, Trainer.train, []

    def start_with_gpus(self: Any, *arguments: Any, **keywords: Any) -> None:
        start(self, *arguments, **keywords)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    def train_seen(self: Any, *arguments: Any, **keywords: Any) -> Any:
        trainers.append(self)
        return train(self, *arguments, **keywords)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, HF_HUB_OFFLINE="1"))
        stack.enter_context(mock.patch.object(PartialState, "__init__", start_with_gpus))
        stack.enter_context(mock.patch.object(Trainer, "train", train_seen))
        enter_ranks()
        folder = stack.enter_context(shared_folder())
        stack.enter_context(ours_in_accelerate(implementation))
        if dist.get_rank() == 0:
            write_files(folder)
        dist.barrier()
        yield folder, trainers


_OPTIONS = {"max_steps": STEPS, "logging_steps": 1, "learning_rate": 1e-2, "save_strategy": "no"}


def ms_swift(implementation: str) -> list[float]:
    """``swift sft --fsdp fsdp2``: its preset, which also recomputes activations."""
    with started(implementation) as (folder, trainers):
        from swift import sft_main

        options = {"model": f"{folder}/model", "model_type": "llama", "template": "dummy", "dataset": f"{folder}/data.jsonl"}
        options |= {"tuner_type": "full", "torch_dtype": "float32", "fsdp": "fsdp2", "use_cpu": "true", **_OPTIONS}
        options |= {"output_dir": f"{folder}/out", "report_to": "none", "add_version": "false", "dataloader_num_workers": 0}
        sft_main([text for name, value in options.items() for text in (f"--{name}", str(value))])
        return curve(trainers[0])


def llama_factory(implementation: str) -> list[float]:
    """``llamafactory-cli train``: the trainer that ``accelerate launch`` starts."""
    with started(implementation) as (folder, trainers), mock.patch.dict(os.environ, ACCELERATE_USE_FSDP="true"):
        from llamafactory.train.tuner import run_exp

        tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
        data = {"file_name": "data.jsonl", "formatting": "sharegpt", "columns": {"messages": "messages"}, "tags": tags}
        if dist.get_rank() == 0:
            pathlib.Path(folder, "dataset_info.json").write_text(json.dumps({"data": data}))
        dist.barrier()
        os.environ |= {"FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
        options = {"model_name_or_path": f"{folder}/model", "stage": "sft", "do_train": True, "finetuning_type": "full"}
        options |= {"dataset": "data", "dataset_dir": folder, "template": "default", "cutoff_len": 64, "use_cpu": True}
        options |= {"output_dir": f"{folder}/out", "report_to": "none", "per_device_train_batch_size": 2, **_OPTIONS}
        with mock.patch.object(dist, "destroy_process_group"):  # It is the test's.
            run_exp(options)
        return curve(trainers[0])


# Each has an environment of its own: run.py trainers --only "swift ", --only llamafactory-cli.
_PROGRAMS = ("transformers", "accelerate")
CASES = [
    Case(("ms-swift", *_PROGRAMS), "swift sft --fsdp fsdp2, Llama", ms_swift),
    Case(("llamafactory", *_PROGRAMS), "llamafactory-cli train, FSDP_VERSION=2, Llama", llama_factory, exact=False),
]
NOT_RUN = [
    NotRun(("axolotl",), "axolotl train", 'it makes its device mesh of "cuda" (0.19.0)'),
    NotRun(("lerobot",), "lerobot-train", "it calls policy.forward(), past FSDP2's hooks, and saves by FSDP1 (0.6.1, read)"),
]
