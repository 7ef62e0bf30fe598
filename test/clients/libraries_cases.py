"""Libraries of models, each in a plain loop whose blocks are sharded by FSDP2 or by ours, and the trainers that they bring."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from case import STEPS, Case, NotRun
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from transformers_cases import shared_folder

from torch_ragged.fsdp import fully_shard, rows

os.environ["TRITON_INTERPRET"] = "1"  # fla has Triton kernels only. Ranks must have this before they import triton.


def shard(implementation: str, model: nn.Module, blocks: Iterable[nn.Module], **options: Any) -> nn.Module:
    """What a user writes: each block, then the model."""
    function: Any = torch_fully_shard
    if implementation == "ragged":
        function = functools.partial(fully_shard, orig_param_policy=lambda name, param: rows(2) if param.ndim == 2 else None)
    for block in blocks:
        function(block, **options)
    return function(model, **options)


def loop(
    implementation: str, model: nn.Module, blocks: Iterable[nn.Module], loss_of: Callable[[int], torch.Tensor]
) -> list[float]:
    """Losses and norms of STEPS steps. ``loss_of(sample)`` calls the model; each rank has its own samples.

    Norms are measured only: a norm's last bit depends on who holds what, and scaled gradients would magnify it where losses
    are near 0.
    """
    shard(implementation, model, blocks)
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer, numbers = torch.optim.AdamW(trained, lr=1e-2), []
    for step in range(STEPS):
        loss = loss_of(step * dist.get_world_size() + dist.get_rank())
        loss.backward()
        norm: Any = nn.utils.clip_grad_norm_(trained, float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        numbers += [loss.item(), float(norm.full_tensor())]
    return numbers


def tokens(sample: int, length: int = 16) -> torch.Tensor:
    """One sequence of a vocabulary of 64, which continues by a rule."""
    return ((7 * sample + 3 * torch.arange(length)) % 64)[None]


# -- sentence-transformers -----------------------------------------------------------------------------------------------


def make_encoder(folder: str) -> Any:
    """A small BERT with mean pooling; its weights and its tokenizer of ten words come from ``folder`` of all ranks."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from transformers import BertConfig, BertModel
    from trl_cases import make_tokenizer

    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if dist.get_rank() == 0:  # transformers lets no other rank save.
        BertModel(BertConfig(**sizes, **no_dropout, max_position_embeddings=16)).save_pretrained(folder)
        make_tokenizer().save_pretrained(folder)
    dist.barrier()
    return SentenceTransformer(modules=[Transformer(folder), Pooling(32)], device="cpu")


def ranking(implementation: str, loss_class: str = "MultipleNegativesRankingLoss", **options: Any) -> list[float]:
    from sentence_transformers import losses
    from trl_cases import sentence

    with shared_folder() as folder:
        model = make_encoder(folder)
    criterion = getattr(losses, loss_class)(model, **options)

    def loss_of(sample: int) -> torch.Tensor:
        texts = [[sentence(4 * sample + row, length) for row in range(4)] for length in (4, 6)]
        return criterion([model.preprocess(column) for column in texts], None)

    return loop(implementation, model, model[0].auto_model.encoder.layer, loss_of)


def ranking_across_ranks(implementation: str) -> list[float]:
    return ranking(implementation, gather_across_devices=True)


def ranking_cached(implementation: str) -> list[float]:
    """The forwards of mini-batches run twice, the second time in a hook of the backward."""
    return ranking(implementation, "CachedMultipleNegativesRankingLoss", mini_batch_size=2)


def sentence_trainer(implementation: str, **changes: Any) -> list[float]:
    from datasets import Dataset
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
    from sentence_transformers.losses import MultipleNegativesRankingLoss
    from trl_cases import curve, on_the_cpu, options, sentence

    pairs = Dataset.from_list([{"anchor": sentence(number, 4), "positive": sentence(number, 6)} for number in range(64)])
    wrap = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls_to_wrap": ["BertLayer"]}
    with shared_folder() as folder:
        arguments = options(folder, **{"fsdp_config": {"version": 2, **wrap}, **changes})
        model = make_encoder(folder)
        trainer = on_the_cpu(SentenceTransformerTrainer)(
            model, SentenceTransformerTrainingArguments(**arguments), pairs, loss=MultipleNegativesRankingLoss(model)
        )
        return curve(trainer, implementation)


# -- torch-geometric -----------------------------------------------------------------------------------------------------


def make_graphs(sample: int) -> Any:
    """A batch of two graphs: rings with chords, features and three classes of nodes."""
    from torch_geometric.data import Batch, Data

    graphs = []
    for size in (9 + sample % 3, 7):
        nodes = torch.arange(size)
        edges = torch.cat([torch.stack([nodes, (nodes + hop) % size]) for hop in (1, 3)], dim=1)
        x = torch.nn.functional.one_hot((nodes * (sample + 1)) % 16, 16).float()
        graphs.append(Data(x, edges, edge_attr=x[edges[0]], y=(nodes * (sample + 1)) % 3))
    return Batch.from_data_list(graphs)


def graph_transformer(implementation: str) -> list[float]:
    from torch_geometric.nn import GINEConv, GPSConv, Sequential

    torch.manual_seed(0)
    inner = [nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 16)) for _ in range(3)]
    blocks = [GPSConv(16, GINEConv(each), heads=2, norm="layer_norm") for each in inner]
    steps = [(block, "x, edge_index, batch, edge_attr=edge_attr -> x") for block in blocks]
    model = Sequential("x, edge_index, batch, edge_attr", [*steps, (nn.Linear(16, 3), "x -> x")])

    def loss_of(sample: int) -> torch.Tensor:
        graphs = make_graphs(sample)
        return nn.functional.cross_entropy(model(graphs.x, graphs.edge_index, graphs.batch, graphs.edge_attr), graphs.y)

    return loop(implementation, model, blocks, loss_of)


def heterogeneous(implementation: str) -> list[float]:
    """Two types of nodes, and a layer per type of edge: dictionaries go in and out of the blocks."""
    from torch_geometric.nn import GAT, to_hetero

    torch.manual_seed(0)
    relations = [("user", "buys", "item"), ("item", "bought", "user"), ("user", "knows", "user")]
    model = to_hetero(GAT((-1, -1), 16, 2, 3, add_self_loops=False), (["user", "item"], relations))

    def loss_of(sample: int) -> torch.Tensor:
        graphs = make_graphs(sample)
        out = model({"user": graphs.x, "item": graphs.x[:, :8]}, dict.fromkeys(relations, graphs.edge_index))
        return sum(nn.functional.cross_entropy(each, graphs.y) for each in out.values())

    with torch.no_grad():
        loss_of(0)  # Lazy parameters get their shapes: fully_shard, FSDP2's too, needs them.
    return loop(implementation, model, [conv for layer in model.convs for conv in layer.values()], loss_of)


def relational(implementation: str) -> list[float]:
    """Weights of three dimensions: a basis, or a matrix per relation."""
    from torch_geometric.nn import HGTConv, RGCNConv

    relations = [("user", "buys", "item"), ("item", "bought", "user")]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hetero = HGTConv({"user": 16, "item": 16}, 16, (["user", "item"], relations), heads=2)
            self.basis, self.relation = RGCNConv(16, 16, 4, num_bases=3), RGCNConv(16, 3, 4)

        def forward(self, x: torch.Tensor, edges: torch.Tensor, types: torch.Tensor) -> torch.Tensor:
            both = self.hetero({"user": x, "item": x}, dict.fromkeys(relations, edges))
            return self.relation(self.basis(both["user"] + both["item"], edges, types), edges, types)

    torch.manual_seed(0)
    model = Model()

    def loss_of(sample: int) -> torch.Tensor:
        graphs = make_graphs(sample)
        types = torch.arange(graphs.num_edges) % 4
        return nn.functional.cross_entropy(model(graphs.x, graphs.edge_index, types), graphs.y)

    return loop(implementation, model, list(model.children()), loss_of)


# -- litgpt --------------------------------------------------------------------------------------------------------------


def make_litgpt(module: str = "model", **changes: Any) -> Any:
    """A GPT of two blocks, as in Llama: that of ``litgpt.model`` or of ``litgpt.lora``."""
    import importlib

    parts = importlib.import_module(f"litgpt.{module}")
    torch.manual_seed(0)
    sizes = {"block_size": 16, "n_layer": 2, "n_embd": 32, "n_head": 4, "n_query_groups": 2, "padded_vocab_size": 64}
    llama = {"bias": False, "norm_class_name": "RMSNorm", "parallel_residual": False, "mlp_class_name": "LLaMAMLP"}
    model = parts.GPT(parts.Config(**{**sizes, **llama, "intermediate_size": 64, "rotary_percentage": 1.0, **changes}))
    if module == "lora":
        parts.mark_only_lora_as_trainable(model)
    return model


def litgpt(implementation: str, *module: str, **changes: Any) -> list[float]:
    from litgpt.utils import chunked_cross_entropy

    model = make_litgpt(*module, **changes)

    def loss_of(sample: int) -> torch.Tensor:
        logits = model(tokens(sample), lm_head_chunk_size=8)  # A list of chunks.
        logits[-1] = logits[-1][:, :-1]
        return chunked_cross_entropy(logits, tokens(sample)[:, 1:], chunk_size=0)

    return loop(implementation, model, model.transformer.h, loss_of)


def litgpt_experts(implementation: str) -> list[float]:
    return litgpt(implementation, mlp_class_name="LLaMAMoE", n_expert=4, n_expert_per_token=2)


def litgpt_lora(implementation: str) -> list[float]:
    return litgpt(implementation, "lora", lora_r=4, lora_query=True, lora_value=True, lora_mlp=True)


def litgpt_pretrain(implementation: str) -> list[float]:
    """litgpt's loop of pretraining on a Fabric with ModelParallelStrategy: each of two micro-batches, clipping, validation."""
    import lightning
    from lightning.fabric.strategies import ModelParallelStrategy
    from lightning_cases import enter_ranks
    from litgpt.args import EvalArgs, TrainArgs
    from litgpt.pretrain import fit

    enter_ranks()
    ranks, losses = dist.get_world_size(), []
    strategy = ModelParallelStrategy(
        lambda model, mesh: shard(implementation, model, model.transformer.h, mesh=mesh["data_parallel"]), ranks, 1
    )
    fabric = lightning.Fabric(accelerator="cpu", devices=ranks, strategy=strategy)
    fabric.launch()
    model = fabric.setup(make_litgpt())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    data = torch.utils.data.DataLoader(torch.cat([tokens(sample, 17) for sample in range(64)]), batch_size=2)
    train, check = fabric.setup_dataloaders(data, data)
    fabric.log_dict = lambda metrics, step: losses.append(float(metrics.get("loss", metrics.get("val_loss"))))
    sizes = {"global_batch_size": 8, "micro_batch_size": 2, "max_tokens": 2 * STEPS * ranks * 2 * 16, "lr_warmup_steps": 2}
    fit(
        fabric=fabric, devices=ranks, train_dataloader=train, val_dataloader=check, out_dir=None, tokenizer_dir=None,
        state={"model": model, "optimizer": optimizer, "iter_num": 0, "step_count": 0},
        train=TrainArgs(**sizes, max_norm=1.0, min_lr=1e-3, save_interval=None, log_interval=1), eval=EvalArgs(max_iters=2),
    )  # fmt: skip
    return losses


# -- flash-linear-attention ----------------------------------------------------------------------------------------------


def linear_attention(implementation: str, name: str, **changes: Any) -> list[float]:
    """A language model of fla, whose Triton kernels run in the interpreter."""
    from transformers import AutoModelForCausalLM
    from triton.runtime.autotuner import Autotuner

    original = Autotuner.__init__

    def init(self: Any, fn: Any, names: Any, configs: list[Any], *args: Any, **options: Any) -> None:
        original(self, fn, names, configs[:1], *args, **options)  # To compare several, it asks for a GPU's driver.

    with mock.patch.object(Autotuner, "__init__", init):
        import fla.models

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64, "fuse_cross_entropy": False}
    model = AutoModelForCausalLM.from_config(getattr(fla.models, f"{name}Config")(**sizes, **changes))
    return loop(
        implementation,
        model,
        model.get_decoder().layers,
        lambda sample: model(input_ids=tokens(sample), labels=tokens(sample)).loss,
    )


def gla(implementation: str) -> list[float]:
    return linear_attention(implementation, "GLA", num_heads=2)


def mamba2(implementation: str) -> list[float]:
    return linear_attention(implementation, "Mamba2", num_heads=4, head_dim=16, state_size=16, chunk_size=16)


_SENTENCES, _GRAPHS, _LITGPT, _FLA = ("sentence-transformers",), ("torch-geometric",), ("litgpt",), ("flash-linear-attention",)
CASES = [
    Case(_SENTENCES, "MultipleNegativesRankingLoss", ranking, exact=False),
    Case(_SENTENCES, "MultipleNegativesRankingLoss, gather_across_devices", ranking_across_ranks, exact=False),
    Case(_SENTENCES, "CachedMultipleNegativesRankingLoss", ranking_cached, exact=False),
    Case((*_SENTENCES, "transformers", "accelerate"), "SentenceTransformerTrainer", sentence_trainer, exact=False),
    Case(_GRAPHS, "GPSConv", graph_transformer, exact=False),
    Case(_GRAPHS, "to_hetero(GAT), a unit per relation", heterogeneous, exact=False),
    Case(_GRAPHS, "HGTConv, RGCNConv", relational, exact=False),
    Case(_LITGPT, "GPT", litgpt, exact=False),
    Case(_LITGPT, "GPT, experts", litgpt_experts, exact=False),
    Case(_LITGPT, "GPT, LoRA", litgpt_lora, exact=False),
    Case((*_LITGPT, "lightning"), "litgpt.pretrain.fit, ModelParallelStrategy", litgpt_pretrain),
    Case(_FLA, "GLA, kernels in Triton's interpreter", gla, exact=False),
    Case(_FLA, "Mamba2, kernels in Triton's interpreter", mamba2, exact=False),
]
NOT_RUN = [
    NotRun(_SENTENCES, "CrossEncoderTrainer, SparseEncoderTrainer", "not tried: they have SentenceTransformerTrainer's base"),
    NotRun(
        _SENTENCES, "SentenceTransformerTrainer.save_model", "it saves shards, not what was gathered: it fails with FSDP2, too"
    ),
    NotRun(_GRAPHS, "GraphGym", "its module has no configure_model, in which Lightning's users shard"),
    NotRun(
        _LITGPT,
        "litgpt pretrain, litgpt finetune: commands",
        "Fabric's FSDPStrategy wraps with FSDP1, which calls no fully_shard",
    ),
    NotRun(_LITGPT, "Adapter", "litgpt keeps its prefix's keys: one process fails in the second step's backward, too"),
    NotRun(
        _FLA,
        "GatedDeltaNet, KDA, RWKV7, RetNet, LinearAttention",
        "their kernels fail in Triton's interpreter, without ranks, too",
    ),
    NotRun(_FLA, "fuse_cross_entropy", "it asserts a GPU"),
]
