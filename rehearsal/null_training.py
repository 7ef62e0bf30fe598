"""Training steps of one rank of many on the null device, by this package or by FSDP2. Run in a rehearsal with ``--null``.

Torch's allocator, streams, events and process groups are real; nothing is computed or sent.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard
from torch.testing._internal.distributed import fake_pg  # noqa: F401  # It registers the backend "fake".

from benchmarks.common.fake_world import PACKAGES as FULLY_SHARD
from benchmarks.common.models import build, shard
from rehearsal.__main__ import environment
from torch_ragged._ranks.store import SharedStore

PACKAGES = ("torch_ragged", "FSDP2", "FSDP2, even")
"""``FSDP2, even`` cuts a parameter on its first dimension that the ranks divide (``shard_placement_fn``), so it pads less."""

LAYERS = {"llama-3-70b": 4, "gpt-oss-120b": 3}
"""Enough for all kinds of groups."""


@contextlib.contextmanager
def alone(ranks: int) -> Iterator[DeviceMesh]:
    """Rank 0 of ``ranks``, without the others: they agree with what it says, and have the objects that it has."""
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:fake,cuda:nccl", store=dist.HashStore(), rank=0, world_size=ranks)
    try:
        # Ranks count in the store who has made a call: the others count with this one.
        with mock.patch.object(SharedStore, "add", lambda store, key, amount: ranks * amount):
            yield init_device_mesh("cuda", (ranks,))
    finally:
        torch.cuda.synchronize()
        dist.destroy_process_group()


def options_of(package: str, ranks: int, reduce_dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """What ``fully_shard`` of a package is called with: float32 shards, bfloat16 compute."""

    def even(parameter: nn.Parameter) -> Shard | None:
        return next((Shard(dim) for dim, size in enumerate(parameter.shape) if size % ranks == 0), None)

    options: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)}
    return options | ({"shard_placement_fn": even} if package == "FSDP2, even" else {})


class Training:
    """A stack of benchmarks/common/models.py: float32 shards, bfloat16 compute and gradients, fused AdamW."""

    def __init__(self, name: str, package: str, mesh: DeviceMesh, layers: int | None = None, tokens: int = 256) -> None:
        self.model = build(name, LAYERS[name] if layers is None else layers, device="meta", dtype=torch.float32)
        shard(self.model, FULLY_SHARD[package.partition(",")[0]], mesh=mesh, **options_of(package, mesh.size()))
        self.model.to_empty(device="cuda")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.tokens = torch.zeros(tokens, dtype=torch.long, device="cuda")

    def step(self) -> None:
        self.model(self.tokens).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def in_a_rehearsal(module: str, arguments: Sequence[str], **variables: str) -> Any:
    """What ``python -m module arguments`` prints as JSON behind the word RESULT, on the null device."""
    settings = {**os.environ, **environment(null=True), "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run([sys.executable, "-m", module, *arguments], env=settings, capture_output=True, text=True)
    if "RESULT" not in done.stdout:
        raise SystemExit(f"{module} {' '.join(arguments)} exited with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return json.loads(done.stdout.rpartition("RESULT")[2])
