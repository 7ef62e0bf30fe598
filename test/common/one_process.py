"""Training in one process with plain torch, by which SameBits is defined, and the same on ranks."""

import hashlib
import math
import random

import numpy
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._composable import checkpoint as apply_checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.func import functional_call

from torch_ragged.fsdp import MixedPrecisionPolicy, SameBits, fully_shard

STEPS, ROWS = 4, 3
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Dense(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 64)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)) for _ in range(2)
        )
        self.head = nn.Linear(64, 32, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + F.dropout(layer(x), 0.1)
        return self.head(x)


class Experts(nn.Module):
    """One of three experts for each piece: the others have no gradient there, and the last one is never used."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.head = nn.Linear(64, 32, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(x * self.layers[int(tokens[0, 0]) % 2](x))


def tokens_of(step, pieces):
    return torch.randint(0, 32, (pieces, ROWS, 9), generator=torch.Generator().manual_seed(step))


def loss_of(model, tokens):
    logits = model(tokens[:, :-1])
    noise = random.random() + numpy.random.rand()  # Of the piece, too.
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()) * (1 + noise)


def tree(leaves):
    if len(leaves) < 2:
        return leaves[0]
    left = 1 << (len(leaves) - 1).bit_length() - 1
    return tree_of(tree(leaves[:left]), tree(leaves[left:]))


def tree_of(left, right):
    return right if left is None else left if right is None else left + right


def in_one_process(model, optimizer, pieces, dtype=None, steps=range(STEPS), max_norm=0.5, norm_type=2.0):
    """Plain torch: the definition. Returns losses and norms."""
    params, numbers = dict(model.named_parameters()), []
    for step in steps:
        leaves, losses = {name: [] for name in params}, []
        for piece, tokens in enumerate(tokens_of(step, pieces)):
            seed = int.from_bytes(hashlib.sha256(repr((7, step, piece)).encode()).digest()[:8], "big")
            torch.manual_seed(seed % 2**63), random.seed(seed), numpy.random.seed(seed % 2**32)
            cast = {name: param.detach().to(dtype or param.dtype).requires_grad_() for name, param in params.items()}
            loss = loss_of(lambda inputs: functional_call(model, cast, (inputs,)), tokens)  # noqa: B023
            losses.append(loss.item())
            for name, gradient in zip(cast, torch.autograd.grad(loss, list(cast.values()), allow_unused=True)):
                leaves[name].append(None if gradient is None else gradient.float())
        for name, param in params.items():
            root = tree(leaves[name])
            param.grad = None if root is None else (root / pieces).to(param.dtype)
        gradients = [param.grad for param in params.values() if param.grad is not None]
        values = [x for gradient in gradients for x in gradient.double().flatten().tolist()]
        powers = {1.0: lambda: math.fsum(map(abs, values)), 2.0: lambda: math.sqrt(math.fsum(x * x for x in values))}
        norm = torch.tensor(powers.get(norm_type, lambda: max(map(abs, values)))(), dtype=torch.float32).item()
        for gradient in gradients:
            gradient.mul_(min(1.0, max_norm / (norm + 1e-6)))
        optimizer.step()
        optimizer.zero_grad()
        numbers.append((math.fsum(losses) / pieces, norm))
    return numbers


def sharded(model, optional=False, **options):
    mesh = options.pop("mesh", None) or init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in getattr(model, "layers", ()):
        if not isinstance(model, Experts):
            fully_shard(layer, mesh=mesh, **options)
        elif optional:
            fully_shard(layer, mesh=mesh, optional=True, **options)
    return fully_shard(model, mesh=mesh, **options)


def train(same, model, optimizer, pieces, steps=range(STEPS), max_norm=0.5, norm_type=2.0):
    numbers = []
    for step in steps:
        tokens = tokens_of(step, pieces)
        for piece in same.pieces():
            loss = loss_of(model, tokens[piece])
            loss.backward()
            same.add_loss(loss)
        norm = same.clip_grad_norm_(max_norm, norm_type)
        optimizer.step()
        optimizer.zero_grad()
        numbers.append((same.loss(), norm))
    return numbers


def adamw(params):
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True)


def adamw8bit(params):
    from torch_ragged.optim import AdamW8bit  # Not in the patches for torch, which run tests with the rest of this file.

    return AdamW8bit(params, lr=0.01)


def muon(params):
    from torch_ragged.optim import Muon

    params = list(params)
    matrices = [param for param in params if param.ndim == 2 and min(param.shape) > 40]
    others = [param for param in params if not any(param is matrix for matrix in matrices)]
    return Muon([{"params": matrices}, {"params": others, "algorithm": "adamw"}], lr=0.01)


def plain(kind, make, pieces, mp_policy=None, norm_type=2.0, steps=STEPS):
    """What ranks must find: the losses and norms of one process with plain torch, and what :func:`digests` has of its end."""
    torch.manual_seed(0)
    model = kind()
    optimizer = make(model.parameters())
    dtype = None if mp_policy is None else mp_policy.param_dtype
    return in_one_process(model, optimizer, pieces, dtype, range(steps), norm_type=norm_type), digests(model, optimizer)


def made(kind, make, pieces, mp_policy=None, recomputes=False, subtree=1, verify_every=None, **options):
    """On these ranks: the model, its optimizer and SameBits."""
    torch.manual_seed(0)
    model = kind()
    for layer in model.layers if recomputes else ():
        apply_checkpoint(layer)
    model = sharded(model, **options, **({} if mp_policy is None else {"mp_policy": mp_policy}))
    optimizer = make(model.parameters())
    return model, optimizer, SameBits(model, optimizer, pieces=pieces, seed=7, subtree=subtree, verify_every=verify_every)


def check(kind, make, pieces, mp_policy=None, norm_type=2.0, steps=STEPS, **options):
    """Train in one process and on these ranks; losses, norms, parameters and states must have the same bits."""
    numbers, ends = plain(kind, make, pieces, mp_policy, norm_type, steps)
    model, optimizer, same = made(kind, make, pieces, mp_policy, **options)
    found = train(same, model, optimizer, pieces, range(steps), norm_type=norm_type)
    assert found == numbers, (found, numbers)
    assert_ends(digests(model, optimizer), ends)


def assert_ends(found, expected):
    assert found.keys() == expected.keys(), (found.keys(), expected.keys())
    wrong = [name for name in expected if found[name] != expected[name]]
    assert not wrong, wrong


def digests(model, optimizer):
    """Of the bits of each parameter and state, on all ranks together."""
    tensors = {}
    for name, param in model.named_parameters():
        tensors[name] = param
        states = optimizer.state.get(param, {})
        tensors |= {f"{key} of {name}": value for key, value in states.items() if isinstance(value, torch.Tensor)}
    return {name: hashlib.sha256(bits(tensor).numpy()).hexdigest() for name, tensor in tensors.items()}


def bits(tensor):
    tensor = tensor.detach()
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return tensor.contiguous().reshape(-1).view(torch.uint8)
