"""Train an unchanged Qwen3 by a plan: tensor parallelism, FSDP and Muon, from a folder of Hugging Face and back to one.

    pip install '.[finetune]'  # in a clone
    torchrun --nproc-per-node 4 examples/qwen3_plan.py

The class is Qwen3ForCausalLM of transformers, as it is. Nothing is downloaded: the first step writes a tiny model with random
weights to out/qwen3/base, in place of a pre-trained one, and its tokens are bytes. The mesh has two ranks of data parallelism
and two of tensor parallelism. At the end, one process reads the result by from_pretrained, and compares logits and text.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from byte_data import ByteData, load_bytes
from example_tools import start, write_curves
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from tqdm import trange

from torch_ragged.optim import Muon, matrix_groups
from torch_ragged.spmd import deferred_init, parallelize, zoo

CONTEXT, PROMPTS = 64, (b"def main(", b"import os")  # At least as many as dp has ranks.


def write_base(folder: Path) -> None:
    """A folder as a download from Hugging Face is, but small, and with random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(7)
    Qwen3ForCausalLM(Qwen3Config(vocab_size=256, tie_word_embeddings=True, **sizes, **heads)).save_pretrained(folder)


def load(model: nn.Module, folder: Path) -> None:
    """Load a folder of safetensors. Each rank maps the files, and copies its part of each weight only."""
    from safetensors.torch import load_file

    weights = {name: weight for file in folder.glob("*.safetensors") for name, weight in load_file(file).items()}
    if model.config.tie_word_embeddings:  # Then the files have this weight under one name, and the model under two.
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights)


def save(model: nn.Module, folder: Path) -> None:
    """Write whole weights as transformers does. All ranks call it; rank 0 has the weights in host memory, and writes."""
    from transformers import Qwen3ForCausalLM

    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        if model.config.tie_word_embeddings:
            del weights["lm_head.weight"]
        with torch.device("meta"):
            Qwen3ForCausalLM(model.config).save_pretrained(folder, state_dict=weights)
    dist.barrier()


def text_of(tokens: torch.Tensor) -> list[str]:
    return [bytes(row).decode("ascii", "replace") for row in tokens.tolist()]


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--steps", type=int, default=60, help="optimizer steps (default: %(default)s)")
    add("--batch", type=int, default=16, help="sequences per step, over all ranks (default: %(default)s)")
    add("--lr", type=float, default=5e-3, help="learning rate (default: %(default)s)")
    add("--out", type=Path, default=Path("out/qwen3"), help="folder of base, tuned and loss.png (default: %(default)s)")
    return parser.parse_args(argv)


def main() -> None:
    args = parse_args()
    try:
        from transformers import AutoConfig, AutoModelForCausalLM, Qwen3ForCausalLM
        from transformers.utils.logging import disable_progress_bar
    except ImportError as error:
        raise SystemExit(f"qwen3_plan: {error}: run pip install '.[finetune]' in the clone") from error
    disable_progress_bar()
    rank, ranks = start()
    if ranks != 4 or args.steps < 1 or args.batch % 2:
        dist.destroy_process_group()
        raise SystemExit(
            f"qwen3_plan: {ranks} ranks, --steps {args.steps}, --batch {args.batch}: it is for 4 ranks, with an even batch"
        )
    base, tuned = args.out / "base", args.out / "tuned"
    if rank == 0:
        write_base(base)
    dist.barrier()

    # 1. The model, without memory; then its shards, on a mesh; then the weights of the folder, in them.
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)  # on all ranks
    model = deferred_init(Qwen3ForCausalLM, AutoConfig.from_pretrained(base))
    model = parallelize(model, zoo.qwen3(dp="dp", tp="tp", sequence_parallel=True), mesh)
    load(model, base)

    # 2. Train. The script is that of one device: the whole batch on every rank, and plain calls.
    matrices = matrix_groups(model, adamw=["lm_head"], lr=args.lr)  # embedding, head and norms: AdamW
    optimizer = Muon(matrices, lr=args.lr, adjust_lr_fn="match_rms_adamw")
    text, held_out = load_bytes(None)
    data, (test, _) = ByteData(text, CONTEXT, args.batch, seed=1), ByteData(held_out, CONTEXT, 16, seed=2).next_batch(0, 1)
    train_losses, held_out_losses, every = [], [], max(1, args.steps // 10)
    for step in trange(args.steps + 1, desc="train", disable=rank > 0):
        if step % every == 0:  # 3. Evaluate.
            model.eval()
            with torch.no_grad():
                held_out_losses.append(model(input_ids=test, labels=test).loss.item())  # on all ranks
            model.train()
        if step < args.steps:
            ids, _ = data.next_batch(0, 1)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            train_losses.append(loss.item())

    # 4. Generate. All ranks call it, with equal prompts.
    model.eval()
    prompts = torch.tensor([list(prompt) for prompt in PROMPTS])
    options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    answers = text_of(model.generate(prompts, **options))
    with torch.no_grad():
        logits = model(input_ids=test).logits.full_tensor()

    # 5. Save for from_pretrained. From here on there is one process.
    save(model, tuned)
    dist.destroy_process_group()
    if rank > 0:
        return
    alone = AutoModelForCausalLM.from_pretrained(tuned)
    with torch.no_grad():
        difference = (alone(input_ids=test).logits - logits).abs().max().item()
    same = "the same text" if text_of(alone.generate(prompts, **options)) == answers else "another text"
    print(f"generated on 4 ranks: {answers[0]!r}")
    curves = {
        "train": (range(1, args.steps + 1), train_losses),
        "held out": ([every * index for index in range(len(held_out_losses))], held_out_losses),
    }
    write_curves(args.out / "loss.png", "an unchanged Qwen3 on dp 2, tp 2", curves)
    print(
        f"loaded from {base}, trained on 4 ranks: held-out loss {held_out_losses[0]:.3f} -> {held_out_losses[-1]:.3f}; "
        f"from_pretrained('{tuned}') in one process gives {same}, and logits that differ by {difference:.1e} at most; "
        f"drawn in {args.out / 'loss.png'}"
    )


if __name__ == "__main__":
    main()
