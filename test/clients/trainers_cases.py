"""Training programs on transformers' Trainer: their own entry functions, on files as a user has them, with FSDP2 and with ours."""

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
def started(implementation: str) -> Iterator[str]:
    """A folder with the files, in ranks where accelerate shards on the CPU, with ours or with torch's.

    accelerate takes FSDP for accelerators only. It is told that several CPU processes are several GPUs, before it looks.
    """
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    start = PartialState.__init__

    def start_with_gpus(self: Any, *arguments: Any, **keywords: Any) -> None:
        start(self, *arguments, **keywords)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    with mock.patch.dict(os.environ), mock.patch.object(PartialState, "__init__", start_with_gpus):
        enter_ranks()
        with shared_folder() as folder, ours_in_accelerate(implementation):
            if dist.get_rank() == 0:
                write_files(folder)
            dist.barrier()
            yield folder


def logged(file: pathlib.Path) -> list[float]:
    """Losses and norms in a log with a JSON object per step."""
    entries = [json.loads(line) for line in file.read_text().splitlines()]
    return [float(entry[key]) for entry in entries if "loss" in entry for key in ("loss", "grad_norm")]


def ms_swift(implementation: str) -> list[float]:
    """``swift sft --fsdp fsdp2``: its preset, which also recomputes activations."""
    with started(implementation) as folder:
        from swift import sft_main

        options = {"model": f"{folder}/model", "model_type": "llama", "template": "dummy", "dataset": f"{folder}/data.jsonl"}
        options |= {"tuner_type": "full", "torch_dtype": "float32", "fsdp": "fsdp2", "use_cpu": "true"}
        options |= {"max_steps": STEPS, "logging_steps": 1, "learning_rate": 1e-2, "save_strategy": "no"}
        options |= {"output_dir": f"{folder}/out", "report_to": "none", "add_version": "false", "dataloader_num_workers": 0}
        sft_main([text for name, value in options.items() for text in (f"--{name}", str(value))])
        return logged(pathlib.Path(folder, "out", "logging.jsonl"))


CASES = [
    Case(("ms-swift", "transformers", "accelerate"), "swift sft --fsdp fsdp2, Llama", ms_swift),
]
NOT_RUN: list[NotRun] = []
