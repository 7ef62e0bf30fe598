"""The patches: for each, the package's files that it adds to torch, and its tests. It must not import torch or the package.

The messages and the edits of torch's own files are in ``core/``, under the names of the patches.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

__all__ = ["ALONE", "FIRST", "RELEASES", "ROOT", "SERIES", "Step", "torch_name"]

ROOT = Path(__file__).resolve().parents[1]

RELEASES = ("2.13", "2.15")
"""The releases of torch that the series applies to."""

ALONE = 5
"""The number of patches, from the first, that work without the later ones: the placements without FSDP."""


@dataclass(frozen=True)
class Step:
    """A patch of the series.

    Attributes:
        name: the number and subject, for file names.
        sources: the package's files that the patch adds, as patterns relative to ``torch_ragged``.
        tests: the test files that the patch adds, relative to ``test``; files not named ``test_*`` are helpers. In
            torch, they are in one folder.
        documents: the files of ``upstream`` that the patch adds to torch's documentation.
    """

    name: str
    sources: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    documents: tuple[str, ...] = ()

    def source_files(self) -> list[Path]:
        return [path for pattern in self.sources for path in sorted((ROOT / "torch_ragged").glob(pattern))]

    @property
    def core(self) -> Path:
        """The file with the message and the edits of torch's own files."""
        return ROOT / "upstream/core" / f"{self.name}.diff"


SERIES = (
    Step(
        "0001-placement-extension",
        ("tensor/_placement_extension.py",),
        ("common/common.py", "tensor/test_placement_extension.py"),
    ),
    Step(
        "0002-ragged-shard",
        (
            "_ranks/groups.py",
            "tensor/_units.py",
            "tensor/_ownership.py",
            "tensor/interleaved_placement_types.py",
            "tensor/placement_types.py",
            "tensor/_route.py",
            "tensor/_redistribute.py",
            "tensor/_async_tensor.py",
            "tensor/_api.py",
        ),
        ("common/oracle.py", "tensor/test_units.py", "tensor/test_placement_types.py", "tensor/test_redistribute.py"),
    ),
    Step(
        "0003-ragged-shard-operators",
        (
            "tensor/_ops/*.py",
            "_kernels/__init__.py",
            "_kernels/_choice.py",
            "_kernels/_triton_rounding.py",
            "_kernels/_triton_philox.py",
            "_kernels/distributions.py",
            "_kernels/philox.py",
            "_kernels/regions.py",
            "tensor/_sampler.py",
            "tensor/_counter.py",
            "tensor/_draw.py",
            "tensor/_random.py",
            "tensor/_single_device.py",
            "tensor/_dispatch.py",
        ),
        (
            "tensor/test_redistribute_autograd.py",
            "tensor/test_ops.py",
            "tensor/test_row_ops.py",
            "tensor/op_conformance.py",
            "tensor/test_op_conformance.py",
        ),
    ),
    Step(
        "0004-strided-ragged-shard",
        ("tensor/strided_placement_types.py",),
        (
            "tensor/test_strided_ragged_shard.py",
            "tensor/test_ownership.py",
            "tensor/test_random.py",
            "tensor/test_compile.py",
            "tensor/test_everyday.py",
            "tensor/test_factories.py",
        ),
    ),
    Step(
        "0005-ragged-shard-checkpoint",
        (
            "tensor/_checkpoint.py",
            "tensor/_hf_storage.py",
            "tensor/_owned_boxes.py",
            "tensor/_global_layout.py",
            "tensor/_box_tensor.py",
        ),
        ("checkpoint/test_checkpoint.py",),
    ),
    Step(
        "0006-ragged-fsdp",
        (
            "_picture.py",
            "granularity.py",
            "_ranks/__init__.py",
            "_ranks/agreement.py",
            "_ranks/peers.py",
            "_ranks/process.py",
            "_ranks/standstill.py",
            "_ranks/store.py",
            "_register/_torch.py",
            "transfer/*.py",
            "_kernels/_triton_adam8bit.py",
            "_kernels/_triton_casts.py",
            "_kernels/_triton_float8.py",
            "_kernels/_triton_symmetric.py",
            "_kernels/casts.py",
            "_kernels/float8.py",
            "_kernels/symmetric.py",
            "_kernels/tiles.py",
            "fsdp/*.py",
            "fsdp/layout/*.py",
            "fsdp/comm/**/*.py",
            "fsdp/core/**/*.py",
            "fsdp/elastic/*.py",
            "fsdp/offload/*.py",
            "fsdp/tools/*.py",
        ),
        ("common/transformer.py", "fsdp/test_fsdp_training.py"),
    ),
    Step("0007-ragged-shard-documentation", documents=("distributed.tensor.ragged.md",)),
)

FIRST = Step("0000-placeholders-ask-placements")
"""The smallest first step: one patch of torch's own files, on which no other depends. docs/upstream.md says what it is for."""


def _names() -> ModuleType:
    """The module with the package's table of names, loaded without the package, which needs a torch."""
    path = ROOT / "torch_ragged/_register/_upstream.py"
    spec = importlib.util.spec_from_file_location("names", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


torch_name = _names().torch_name
