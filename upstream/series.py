"""The patches: for each, the package's files that it adds to torch, and its tests. It must not import torch or the package.

The messages and the edits of torch's own files are in ``core/``, under the names of the patches.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

__all__ = ["ALONE", "FIRST", "MOST_LINES", "RELEASES", "ROOT", "SERIES", "Step", "torch_name"]

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
        ("common/common.py", "common/delays.py", "common/tested_device.py", "tensor/test_placement_extension.py"),
    ),
    Step(
        "0002-ragged-shard",
        (
            "_ranks/groups.py",
            "tensor/_units.py",
            "tensor/_local_tensor.py",
            "tensor/_ownership.py",
            "tensor/_exchange.py",
            "tensor/_cut_placement.py",
            "tensor/interleaved_placement_types.py",
            "tensor/placement_types.py",
            "tensor/_route.py",
            "tensor/_carry.py",
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
            "tensor/strategy_validation.py",
            "tensor/test_strategy_validation.py",
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
        ("checkpoint/test_checkpoint.py", "tensor/test_local_tensor.py"),
    ),
    Step(
        "0006-ranks-agree",
        (
            "_ranks/__init__.py",
            "_ranks/agreement.py",
            "_ranks/peers.py",
            "_ranks/process.py",
            "_ranks/standstill.py",
            "_ranks/store.py",
            "_ranks/termination.py",
            "_register/_spmd_types.py",
            "_register/_torch.py",
        ),
        ("ranks/test_agreement.py",),
    ),
    Step(
        "0007-transfer-sides",
        (
            "transfer/__init__.py",
            "transfer/_atoms.py",
            "transfer/_background.py",
            "transfer/_changes.py",
            "transfer/_elements.py",
            "transfer/_engine_layout.py",
            "transfer/_pulls.py",
            "transfer/_rounds.py",
            "transfer/_sides.py",
            "transfer/_staging.py",
            "transfer/_tiles.py",
        ),
        ("transfer/test_transfer_property.py",),
    ),
    Step(
        "0008-transfer-plans",
        (
            "_picture.py",
            "transfer/_check.py",
            "transfer/_errors.py",
            "transfer/_execution.py",
            "transfer/_plan.py",
            "transfer/_stream.py",
            "transfer/_visualize.py",
            "transfer/_watch.py",
        ),
        ("transfer/test_transfer_boxes.py", "transfer/test_transfer_run.py", "transfer/test_transfer_tiles.py"),
    ),
    Step(
        "0009-fsdp-layout",
        ("granularity.py", "fsdp/__init__.py", "fsdp/layout/*.py"),
        ("common/planner_oracle.py", "fsdp/layout/test_segments.py", "fsdp/layout/test_weighted.py"),
    ),
    Step(
        "0010-fsdp-collectives",
        (
            "_ranks/comparison.py",
            "fsdp/comm/__init__.py",
            "fsdp/comm/_call_log.py",
            "fsdp/comm/_collectives.py",
            "fsdp/comm/_gloo.py",
            "fsdp/comm/_reduction.py",
            "fsdp/comm/_wide_gradients.py",
            "fsdp/core/__init__.py",
            "fsdp/core/_mesh.py",
        ),
        ("fsdp/comm/test_process_group.py",),
    ),
    Step(
        "0011-fsdp-peer-memory",
        (
            "_kernels/_triton_casts.py",
            "_kernels/casts.py",
            "fsdp/comm/experimental/*.py",
            "fsdp/comm/_choice.py",
        ),
        ("fsdp/comm/test_cuda_paths.py",),
    ),
    Step(
        "0012-fsdp-buffers",
        (
            "fsdp/core/_dbuffer.py",
            "fsdp/core/_fsdp_param.py",
            "fsdp/core/_kit.py",
            "fsdp/core/_neighbours.py",
            "fsdp/core/encodings/__init__.py",
            "fsdp/core/encodings/_plain.py",
        ),
        ("fsdp/core/test_dbuffer.py",),
    ),
    Step(
        "0013-fsdp-gradients",
        (
            "fsdp/core/_grad_buffer.py",
            "fsdp/core/_grad_reduction.py",
            "fsdp/grads/__init__.py",
            "fsdp/grads/_fsdp_grad.py",
            "fsdp/grads/_weight_gradient.py",
        ),
        ("fsdp/core/weight_gradient_cases.py", "fsdp/core/test_weight_gradient_fallback.py"),
    ),
    Step(
        "0014-fsdp-passes",
        (
            "fsdp/core/_forward_order.py",
            "fsdp/core/_fsdp_param_group.py",
            "fsdp/core/_fsdp_state.py",
            "fsdp/core/_hooks.py",
            "fsdp/core/_param_swap.py",
        ),
        ("fsdp/core/test_forward_order.py",),
    ),
    Step(
        "0015-fsdp-states",
        (
            "fsdp/_state_dict.py",
            "fsdp/core/encodings/_contiguous.py",
            "fsdp/core/encodings/_tensor_types.py",
            "fsdp/files/*.py",
            "fsdp/gates/*.py",
            "fsdp/grads/_compute_parameter.py",
            "fsdp/memory/*.py",
            "tensor/_replaced.py",
        ),
        ("fsdp/files/test_files.py",),
    ),
    Step(
        "0016-fsdp-float8",
        (
            "_kernels/_triton_float4.py",
            "_kernels/_triton_float8.py",
            "_kernels/float4.py",
            "_kernels/float8.py",
            "_kernels/tiles.py",
            "fsdp/codes/*.py",
            "fsdp/core/_fsdp_init.py",
        ),
        ("kernels/test_float4_tiles.py", "kernels/test_float8_tiles.py"),
    ),
    Step(
        "0017-fsdp-schedule",
        (
            "fsdp/_groups.py",
            "fsdp/schedule/*.py",
            "fsdp/tools/__init__.py",
            "fsdp/tools/_replay.py",
            "fsdp/tools/_timeline.py",
        ),
        ("fsdp/schedule/test_schedule_play.py",),
    ),
    Step(
        "0018-fully-shard",
        (
            "tensor/_from_meta.py",
            "fsdp/_fsdp_module.py",
            "fsdp/_fully_shard.py",
            "fsdp/_options.py",
            "fsdp/_spmd_types.py",
            "fsdp/_upcoming.py",
            "fsdp/elastic/__init__.py",
            "fsdp/elastic/_dormant_group.py",
            "fsdp/elastic/_weights.py",
        ),
        (
            "common/transformer.py",
            "fsdp/test_fsdp_training.py",
            "fsdp/core/test_grad_buffer.py",
            "fsdp/core/test_group_state.py",
        ),
    ),
    Step(
        "0019-fsdp-elastic",
        (
            "_ranks/survivors.py",
            "fsdp/elastic/_neighbour_copies.py",
            "fsdp/elastic/_optimizer_states.py",
            "fsdp/elastic/_reshard_to.py",
        ),
        ("ranks/test_groups.py", "fsdp/elastic/test_optimizer_states.py"),
    ),
    Step("0020-fsdp-offload", ("fsdp/offload/*.py", "tensor/_stored_tensor.py"), ("fsdp/offload/test_offload_plain.py",)),
    Step(
        "0021-fsdp-tools",
        (
            "fsdp/tools/_gradient_factors.py",
            "fsdp/tools/_memory_report.py",
            "fsdp/tools/_monitor.py",
            "fsdp/tools/_peak_flops.py",
            "fsdp/tools/_token_scale.py",
        ),
        ("../examples/moe.py", "common/fsdp_common.py", "fsdp/tools/test_fsdp_monitor.py"),
    ),
    Step("0022-fsdp-budget", ("fsdp/budget/*.py",), ("fsdp/budget/test_choice.py",)),
    Step("0023-fsdp-same-bits", ("fsdp/bits/*.py",), ("common/one_process.py", "fsdp/bits/test_same_bits.py")),
    Step("0024-ragged-shard-documentation", documents=("distributed.tensor.ragged.md",)),
)

MOST_LINES = 2500
"""A patch behind the placements adds no more lines."""

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
