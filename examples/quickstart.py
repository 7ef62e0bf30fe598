import argparse
import pathlib

import torch
from matplotlib import pyplot
from torch import distributed, nn
from tqdm import trange

from torch_ragged.fsdp import fully_shard  # FSDP2: from torch.distributed.fsdp import fully_shard

parser = argparse.ArgumentParser(description="Train a transformer on the source of Python's argparse.")
parser.add_argument("--steps", type=int, default=100, help="optimizer steps (default: %(default)s)")
args = parser.parse_args()
distributed.is_torchelastic_launched() or parser.error("run: torchrun --nproc-per-node 2 examples/quickstart.py")
distributed.init_process_group()
torch.manual_seed(0)  # the same weights on all ranks
windows = torch.tensor(list(open(argparse.__file__, "rb").read())).unfold(0, 33, 1)  # 32 bytes, and the next one

blocks = [fully_shard(nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)) for _ in range(4)]
model = fully_shard(nn.Sequential(nn.Embedding(256, 64), *blocks, nn.Flatten(), nn.Linear(32 * 64, 256)))
optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
for _ in trange(args.steps, disable=distributed.get_rank() > 0):
    chosen = torch.randint(len(windows), (distributed.get_world_size(), 64))  # of all ranks: they have one seed
    batch = windows[chosen[distributed.get_rank()]].to(model[0].weight.device)
    loss = nn.functional.cross_entropy(model(batch[:, :-1]), batch[:, -1])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
if distributed.get_rank() == 0:
    pathlib.Path("out").mkdir(exist_ok=True)
    pyplot.plot(losses)[0].axes.set(xlabel="step", ylabel="loss of rank 0, nats per byte", title="quickstart.py")
    pyplot.savefig("out/loss.png")
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f} in {args.steps} steps, drawn in out/loss.png")
distributed.destroy_process_group()
