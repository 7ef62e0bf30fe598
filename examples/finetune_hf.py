"""Fine-tune a small Hugging Face causal language model, whole or by LoRA, and save it so that transformers loads it.

    pip install '.[finetune]'  # in a clone
    torchrun --nproc-per-node 2 examples/finetune_hf.py --method lora

The model is a small Llama that is made from a config and reads bytes, so that nothing is downloaded. It learns the code of
Python's standard library first, in place of a pre-trained model. Then it is fine-tuned on the English text of the
docstrings of the same library: --method full trains every weight, --method lora trains adapters of rank --lora-rank beside
frozen weights. The loss on held-out docstrings is drawn for both parts. The result is written to out/finetuned by
save_pretrained, and read by from_pretrained.
"""

from __future__ import annotations

import argparse
import ast
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from byte_data import ByteData, load_bytes
from example_tools import mean_over_ranks, start, write_curves
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from tqdm import tqdm

from torch_ragged.fsdp import fully_shard

if TYPE_CHECKING:  # transformers is imported in functions: --help works without it.
    from transformers import LlamaForCausalLM

CONTEXT = 128


def make_model() -> LlamaForCausalLM:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,  # Bytes: the tokenizer is bytes.decode.
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


class LoRA(nn.Module):
    """A frozen linear layer, and a trained product of two narrow matrices beside it. The product is zero at first."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(rank, base.in_features) * base.in_features**-0.5)
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.lora_a.t() @ self.lora_b.t()


def add_lora(model: LlamaForCausalLM, rank: int) -> None:
    """Freeze the model, and give the linear layers of attention and MLP adapters."""
    model.requires_grad_(False)
    for parent in [part for layer in model.model.layers for part in (layer.self_attn, layer.mlp)]:
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, LoRA(child, rank))


def merge_lora(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Full weights under the names of the model without adapters; each product is added to its layer."""
    merged = {name.replace(".base.", "."): weight for name, weight in weights.items() if ".lora_" not in name}
    for name in (name for name in weights if name.endswith(".lora_a")):
        layer = name.removesuffix(".lora_a")
        merged[f"{layer}.weight"] = merged[f"{layer}.weight"] + weights[f"{layer}.lora_b"] @ weights[name]
    return merged


def docstrings(files: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The docstrings of some files of the standard library, as bytes: those to train on, and those held out."""
    texts = []
    for path in sorted(Path(ast.__file__).parent.glob("*.py"))[:files]:
        tree = ast.parse(path.read_bytes())
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
        texts += [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, kinds)]
    whole = torch.frombuffer(bytearray("\n\n".join(filter(None, texts)).encode()), dtype=torch.uint8)
    cut = len(whole) - len(whole) // 10
    return whole[:cut], whole[cut:]


def shard(model: LlamaForCausalLM, mesh: DeviceMesh) -> LlamaForCausalLM:
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def loss_of(model: LlamaForCausalLM, data: ByteData) -> torch.Tensor:
    inputs, targets = data.next_batch(dist.get_rank(), dist.get_world_size())
    return nn.functional.cross_entropy(model(input_ids=inputs).logits.flatten(0, 1), targets.flatten())


def train(
    model: LlamaForCausalLM, text: torch.Tensor, held_out: torch.Tensor, name: str, args: argparse.Namespace
) -> list[float]:
    """Train on ``text``; the loss on ``held_out`` before, and after each tenth of the steps."""
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=args.lr)
    data, curve = ByteData(text, CONTEXT, args.batch, args.seed), list[float]()
    bar = tqdm(range(args.steps + 1), desc=name, disable=dist.get_rank() > 0, mininterval=1.0)
    for step in bar:
        if step % args.every == 0:
            with torch.no_grad():
                curve.append(mean_over_ranks(loss_of(model, ByteData(held_out, CONTEXT, 4 * args.batch, seed=1))))
            bar.set_postfix(held_out=f"{curve[-1]:.3f}", refresh=False)
        if step < args.steps:
            loss_of(model, data).backward()
            optimizer.step()
            optimizer.zero_grad()
    return curve


def save(model: LlamaForCausalLM, folder: Path) -> None:
    """Write the whole model as Hugging Face does. Collective; rank 0 writes."""
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        make_model().save_pretrained(folder, state_dict=merge_lora(weights))
    dist.barrier()


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--method", choices=("full", "lora"), default="full", help="what fine-tuning trains (default: %(default)s)")
    add("--lora-rank", type=int, default=8, help="rank of the adapters (default: %(default)s)")
    add("--steps", type=int, default=80, help="optimizer steps of each of the two parts (default: %(default)s)")
    add("--batch", type=int, default=8, help="sequences per step over all ranks (default: %(default)s)")
    add("--lr", type=float, default=2e-3, help="learning rate (default: %(default)s)")
    add("--seed", type=int, default=0, help="seed of weights and data (default: %(default)s)")
    add("--out", type=Path, default=Path("out"), help="folder of finetune.png, base and finetuned (default: %(default)s)")
    args = parser.parse_args(argv)
    args.every = max(1, args.steps // 10)
    return args


def main() -> None:
    args = parse_args()
    try:
        from transformers import LlamaForCausalLM
    except ImportError as error:
        raise SystemExit(f"finetune_hf: {error}: run pip install '.[finetune]' in the clone") from error
    rank, ranks = start()
    if args.batch % ranks or args.steps < 1 or args.lora_rank < 1:
        dist.destroy_process_group()
        raise SystemExit(
            f"finetune_hf: --batch {args.batch} must be a multiple of {ranks} ranks; --steps and --lora-rank at least 1"
        )
    mesh = init_device_mesh("cpu", (ranks,))
    code, (english, held_out) = load_bytes(None)[0], docstrings(files=120)
    torch.manual_seed(args.seed)
    model = shard(make_model(), mesh)
    before = train(model, code, held_out, "pre-train on code", args)
    save(model, args.out / "base")

    model = LlamaForCausalLM.from_pretrained(args.out / "base")
    torch.manual_seed(args.seed)
    if args.method == "lora":
        add_lora(model, args.lora_rank)
    trained = sum(param.numel() for param in model.parameters() if param.requires_grad)
    if rank == 0:
        print(f"{args.method}: {trained:,} of {sum(param.numel() for param in model.parameters()):,} parameters are trained")
    after = train(shard(model, mesh), english, held_out, f"fine-tune, {args.method}", args)
    save(model, args.out / "finetuned")
    if rank == 0:
        written = LlamaForCausalLM.from_pretrained(args.out / "finetuned")
        inputs, targets = ByteData(held_out, CONTEXT, 4 * args.batch, seed=1).next_batch(0, 1)
        with torch.no_grad():
            loss = nn.functional.cross_entropy(written(input_ids=inputs).logits.flatten(0, 1), targets.flatten())
        steps = [args.every * index for index in range(len(before))]
        curves = {
            "pre-training on code": (steps, before),
            f"fine-tuning ({args.method})": ([args.steps + s for s in steps], after),
        }
        write_curves(args.out / "finetune.png", "loss on held-out docstrings", curves, fine_tuning_begins=args.steps)
        print(
            f"fine-tuned on {ranks} ranks, {args.method}: loss on held-out docstrings {before[-1]:.3f} -> {after[-1]:.3f}; "
            f"from_pretrained({str(args.out / 'finetuned')!r}) has {loss:.3f} in one process; "
            f"drawn in {args.out / 'finetune.png'}"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
