"""Write the checkpoint of this folder, with megatron-core's model and writer: ``write.py RANK RANKS FOLDER``, on each rank.

It runs on the CPU: megatron-core asks CUDA for its device and waits for its copies, and passes results through a process.
"""

import contextlib
import os
import queue
import sys

import torch
import torch.distributed as dist
from torch.nn import functional as F


def main(rank, ranks, folder):
    torch.cuda.synchronize = lambda *args: None
    torch.cuda.current_device = lambda: "cpu"
    store = dist.FileStore(f"{folder}.store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
    from megatron.core.transformer.transformer_config import TransformerConfig

    filesystem_async._get_write_results_queue = queue.Queue
    get_cuda_rng_tracker().fork = lambda *args, **keywords: contextlib.nullcontext()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        ffn_hidden_size=24,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=4,
        use_cpu_initialization=True,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        normalization="RMSNorm",
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=ranks,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=36,
        max_sequence_length=16,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    for number, param in enumerate(model.parameters()):
        if param.ndim == 1:  # Norms, which would be ones.
            param.data.copy_(1 + 0.1 * torch.randn(param.shape, generator=torch.Generator().manual_seed(number)))
    os.makedirs(folder, exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(model.sharded_state_dict(), folder)
    tokens, mask = torch.arange(10)[None] * 3 % 32, torch.triu(torch.ones(1, 1, 10, 10, dtype=torch.bool), 1)
    with torch.no_grad():
        part = model.eval()(tokens, torch.arange(10)[None], mask)
    parts = [torch.empty_like(part) for _ in range(ranks)]
    dist.all_gather(parts, part.contiguous())
    if rank == 0:
        torch.save({"tokens": tokens, "logits": torch.cat(parts, -1)}, f"{folder}/logits.pt")
    dist.barrier()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
