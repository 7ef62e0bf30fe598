import argparse
import pathlib

import torch
from matplotlib import pyplot
from torch import distributed, nn
from tqdm import trange

from torch_ragged.fsdp import fully_shard  # FSDP2: from torch.distributed.fsdp

parser = argparse.ArgumentParser(description="Train on the source of argparse.")
parser.add_argument("--steps", type=int, default=100, help="default: %(default)s")
args = parser.parse_args()
if not distributed.is_torchelastic_launched():
    parser.error("run: torchrun --nproc-per-node 2 examples/quickstart.py")
distributed.init_process_group()
rank, ranks = distributed.get_rank(), distributed.get_world_size()
torch.manual_seed(0)  # the same weights on all ranks
text = torch.tensor(list(open(argparse.__file__, "rb").read()))
windows = text.unfold(0, 33, 1)  # 32 bytes, and the next one

layers = [nn.TransformerEncoderLayer(64, 4, 256, batch_first=True) for _ in range(4)]
parts = [nn.Embedding(256, 64), *layers, nn.Flatten(), nn.Linear(32 * 64, 256)]
for layer in layers:
    fully_shard(layer)
model = fully_shard(nn.Sequential(*parts))
optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
for _ in trange(args.steps, disable=rank > 0):
    chosen = torch.randint(len(windows), (ranks, 64))[rank]  # all ranks have one seed
    batch = windows[chosen].to(model[0].weight.device)
    loss = nn.functional.cross_entropy(model(batch[:, :-1]), batch[:, -1])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
if rank == 0:
    pathlib.Path("out").mkdir(exist_ok=True)
    pyplot.plot(losses)[0].axes.set(xlabel="step", ylabel="nats per byte, rank 0")
    pyplot.savefig("out/loss.png")
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}, drawn in out/loss.png")
distributed.destroy_process_group()
