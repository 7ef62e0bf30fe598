"""The states of random generators, as byte tensors: each rank saves and loads the states of its own generators.

No communication: ranks share only checksums, which the writer sends.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from torch_ragged.checkpoint._errors import CheckpointError
from torch_ragged.checkpoint._manifest import Manifest

__all__ = ["DEFAULT", "rng_checksums", "rng_request", "rng_states", "set_own_rng", "set_rng"]

DEFAULT = ("torch", "accelerator", "python", "numpy")  # The generators that every program has.


def rng_states(generators: Mapping[str, torch.Generator]) -> dict[str, torch.Tensor]:
    """The state of each generator, including the default ones, as uint8 tensors on the CPU."""
    states = {"torch": torch.get_rng_state(), "python": _pack_state(random.getstate())}
    if torch.accelerator.is_available():
        states["accelerator"] = torch.get_device_module().get_rng_state()
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        states["numpy"] = _pack_state([kind, keys.tolist(), *rest])
    return {**states, **{name: generator.get_state() for name, generator in generators.items()}}


def rng_checksums(states: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """A checksum of each state. The coordinator compares them to see whether all ranks have equal states."""
    return {name: zlib.crc32(bytes(state.tolist())) for name, state in states.items()}


def rng_request(
    generators: Mapping[str, torch.Generator], manifest: Manifest, metadata: Metadata, rank: int
) -> dict[str, dict[str, torch.Tensor]]:
    """Empty tensors that ``dcp.load`` fills with this rank's states.

    If the checkpoint was saved by more than ``rank`` ranks, these are the states of the same rank; otherwise those of rank 0.

    Raises:
        CheckpointError: the checkpoint has no state of one of ``generators``.
    """
    missing = sorted(set(generators) - set(manifest.rng))
    if missing:
        raise CheckpointError(
            f"the checkpoint holds no state of the random generators {missing}; it holds states of {sorted(manifest.rng)}: "
            "leave out of TrainState.rng what it does not hold"
        )
    source = rank if rank < manifest.world_size else 0
    wanted = {}
    for name in manifest.rng:
        stored = metadata.state_dict_metadata.get(f"rng.{source}.{name}")
        if isinstance(stored, TensorStorageMetadata) and (name in DEFAULT or name in generators):
            wanted[name] = torch.empty(stored.size, dtype=torch.uint8, device="cpu")
    return {str(source): wanted}


def set_rng(
    generators: Mapping[str, torch.Generator], loaded: Mapping[str, torch.Tensor], manifest: Manifest, rank: int
) -> None:
    """Set the generators to the ``loaded`` states.

    If this rank did not exist when the checkpoint was saved, it gets rank 0's state if all saved ranks had equal states.
    Otherwise it is seeded from rank 0's state and its own rank, so that new ranks differ.
    """
    for name, state in loaded.items():
        if rank < manifest.world_size or manifest.rng[name] == "same":
            _set_state(name, generators, state)
        else:
            digest = hashlib.blake2b(bytes(state.tolist()) + str(rank).encode(), digest_size=4).digest()
            _seed(name, generators, int.from_bytes(digest, "little"))


def set_own_rng(generators: Mapping[str, torch.Generator], states: Mapping[str, torch.Tensor]) -> None:
    """Set the generators to states of this rank, as :func:`rng_states` has returned them."""
    for name, state in states.items():
        _set_state(name, generators, state)


def _set_state(name: str, generators: Mapping[str, torch.Generator], state: torch.Tensor) -> None:
    if name in generators:
        generators[name].set_state(state)
    elif name == "torch":
        torch.set_rng_state(state)
    elif name == "python":
        version, keys, gauss = _unpack(state)
        random.setstate((version, tuple(keys), gauss))
    elif name == "accelerator" and torch.accelerator.is_available():
        torch.get_device_module().set_rng_state(state)
    elif name == "numpy" and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(tuple(_unpack(state)))


def _seed(name: str, generators: Mapping[str, torch.Generator], seed: int) -> None:
    if name in generators:
        generators[name].manual_seed(seed)
    elif name == "torch":
        torch.default_generator.manual_seed(seed)
    elif name == "python":
        random.seed(seed)
    elif name == "accelerator" and torch.accelerator.is_available():
        torch.get_device_module().manual_seed(seed)
    elif name == "numpy" and "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def _pack_state(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _unpack(state: torch.Tensor) -> Any:
    return json.loads(bytes(state.tolist()))
