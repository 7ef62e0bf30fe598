import argparse
import os

import torch
from matplotlib import pyplot
from torch import distributed, nn
from tqdm import trange

from torch_ragged.fsdp import fully_shard  # FSDP2: from torch.distributed.fsdp import fully_shard

parser = argparse.ArgumentParser(description="Train a transformer on the source of Python's argparse.")
parser.add_argument("--steps", type=int, default=100, help="optimizer steps (default: %(default)s)")
args = parser.parse_args()
mesh = distributed.init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", (int(os.environ["WORLD_SIZE"]),))
text = torch.frombuffer(bytearray(open(argparse.__file__, "rb").read()), dtype=torch.uint8).long()

blocks = [fully_shard(nn.TransformerEncoderLayer(64, 4, 256, batch_first=True), mesh=mesh) for _ in range(4)]
model = fully_shard(nn.Sequential(nn.Embedding(256, 64), *blocks, nn.Flatten(), nn.Linear(32 * 64, 256)), mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses = []
for _ in trange(args.steps, disable=mesh.get_rank() > 0):
    batch = text.unfold(0, 33, 1)[torch.randint(len(text) - 33, (64,))].to(mesh.device_type)  # 32 bytes, and the next one
    loss = nn.functional.cross_entropy(model(batch[:, :-1]), batch[:, -1])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
pyplot.plot(losses)[0].figure.savefig("loss.png")
distributed.destroy_process_group()
