"""What is mutated, and the test files that must catch it: each wing by its folder's tests. Tests marked slow are left out."""

from __future__ import annotations

from pathlib import Path

# They take ten minutes once, before the first mutant.
_FSDP = [
    "core/test_*.py",
    "memory/test_*.py",
    "offload/test_step_in_backward.py",
    "test_fsdp*.py",
    "test_memory_report.py",
    "test_neighbour_copies.py",
    "test_optimizer_states.py",
]

GROUPS: dict[str, tuple[list[str], list[str]]] = {
    "ownership": (
        ["torch_ragged/tensor/_ownership.py"],
        ["test_ownership.py", "test_placement_types.py", "test_route.py", "test_transfer_property.py"],
    ),
    "route": (
        ["torch_ragged/tensor/_route.py", "torch_ragged/tensor/_exchange.py"],
        ["test_route.py", "test_transfer_property.py", "test_draw.py", "test_random.py"],
    ),
    "planner": (
        ["torch_ragged/fsdp/layout/*.py"],
        [
            "core/test_dbuffer.py::RowsTest",
            "core/test_fsdp_float4.py::PolicyTest::test_packed_layouts_cut_where_the_unpacked_ones_do",
            "layout/test_bound.py",
            "layout/test_weighted.py",
            "test_planner.py::PlannerTest",
            "test_plan_pictures.py::AdviceTest",
            "test_segments.py",
        ],
    ),
    "redistribute": (
        ["torch_ragged/tensor/_redistribute.py"],
        [
            "test_route.py",
            "test_redistribute.py",
            "test_redistribute_autograd.py",
        ],
    ),
    "core": (
        [f"torch_ragged/fsdp/{files}.py" for files in ("core/**/*", "grads/*", "memory/*", "_state_dict")],
        [*_FSDP, "test_parallelize.py::TrainingTest::test_a_batch_that_is_not_sharded_counts_once_in_units"],
    ),
    "checkpoint": (
        [f"torch_ragged/checkpoint/_{name}.py" for name in ("writer", "reader", "manifest", "chunks")],
        [
            "test_checkpoint.py",
            "test_checkpoint_chunks.py",
            "test_checkpoint_files.py",
            "test_checkpoint_forged.py",
            "test_checkpoint_manifest.py",
            "test_checkpoint_old.py",
            "test_checkpoint_refused.py",
            "test_checkpoint_storage.py",
            "test_checkpoint_types.py",
            "test_checkpoint_untrusted.py",
            "test_checkpoint_writers.py",
            "test_train_checkpoint.py::DamageTest",
            "test_train_checkpoint.py::ManifestTest",
            "test_train_checkpoint.py::CommandLineTest",
        ],
    ),
    "transfer": (["torch_ragged/transfer/*.py"], ["transfer/test_*.py"]),
    "optim": (["torch_ragged/optim/*.py"], ["optim/test_*.py"]),
    "random": (
        ["torch_ragged/random/*.py", *(f"torch_ragged/tensor/_{name}.py" for name in ("random", "draw", "sampler", "counter"))],
        ["random/test_*.py", "tensor/test_random.py", "tensor/test_draw.py"],
    ),
    "spmd": (["torch_ragged/spmd/*.py"], ["spmd/test_*.py"]),
    "elastic": (
        ["torch_ragged/fsdp/elastic/*.py"],
        ["elastic/test_*.py", "test_fsdp_distribution.py::RegroupTest", "test_fsdp_weights.py"],
    ),
    # Not elastic/_run.py: the ranks of its tests die, and are no forks.
    "bits": (
        ["torch_ragged/fsdp/bits/*.py", "torch_ragged/elastic/_loader.py"],
        ["bits/test_*.py", "elastic/test_piece_loader.py", "tools/test_memory_report.py"],
    ),
    "offload": (["torch_ragged/fsdp/offload/*.py", "torch_ragged/fsdp/files/*.py"], ["offload/test_*.py", "files/test_*.py"]),
    "schedule": (["torch_ragged/fsdp/schedule/*.py"], ["schedule/test_*.py"]),
    "budget": (["torch_ragged/fsdp/budget/*.py"], ["budget/test_*.py"]),
    "comm": (
        ["torch_ragged/fsdp/comm/*.py"],
        [
            "comm/test_*.py",
            "core/test_fsdp_narrow.py",
            "core/test_fsdp_optional.py::SkippedTest",
            "ranks/test_groups.py",
            "ranks/test_standstill.py::CallLogTest",
            "ranks/test_standstill.py::PredictorTest",
            "test_fsdp_knobs.py::KnobTest",
            "test_fsdp_weights.py",
        ],
    ),
    "codes": (["torch_ragged/fsdp/codes/*.py"], ["test_fsdp_float*.py"]),
    "gates": (
        ["torch_ragged/fsdp/gates/*.py", "torch_ragged/_ranks/*.py"],
        [
            "ranks/test_*.py",
            "comm/test_fsdp_peers.py",
            "core/test_fsdp_optional.py",
            "core/test_kept_tensors.py",
            "core/test_replicas.py",
            "offload/test_offload_states.py::PolicyWithoutEffectTest",
            "offload/test_offloaded_optimizer.py::OrdinaryOptimizerTest",
            "test_fsdp_meshes.py::MeshTest",
            "test_fsdp_options_of_ranks.py",
            "test_fsdp_silent_uses.py",
        ],
    ),
    "ops": (
        ["torch_ragged/tensor/_ops/*.py", "torch_ragged/tensor/_dispatch.py", "torch_ragged/tensor/_plain_ops.py"],
        ["tensor/test_*.py", "spmd/test_first_step.py::FirstStepTest::test_a_line_says_once_why_the_step_takes_long"],
    ),
    "register": (
        ["torch_ragged/_register/*.py"],
        [
            "tensor/test_*.py",
            "spmd/test_*.py",
            "checkpoint/test_checkpoint_interop.py::InteropTest::test_hugging_face_folders_hold_whole_tensors_and_load_back",
            "checkpoint/test_full_state_dicts.py",
            "core/test_fsdp_spmd_types.py",
            "core/test_kept_tensors.py",
            "core/test_weight_gradient.py::SavedTensorTest::"
            "test_a_checkpoint_recomputes_as_many_products_as_with_plain_parameters",
            "random/test_deferred_init.py::DeferredInitTest::test_initializers_of_other_tensors_stay_as_they_are",
            "random/test_deferred_writes.py::DeferredWritesTest::test_a_write_to_a_shard_before_materialize_raises_on_all_ranks",
            "test_fsdp_meshes.py::MeshTest::test_advice_to_flatten_the_joint_mesh_is_not_logged",
            "tools/test_fsdp_monitor.py::MonitorTest::test_profiler_ranges_have_the_groups_names",
        ],
    ),
    "tools": (
        ["torch_ragged/fsdp/tools/*.py"],
        [
            "tools/test_*.py",
            "offline/test_fit.py",
            "offload/test_offload_files.py::FilesTest::test_a_monitor_shows_what_moves",
            "offload/test_offload_parameters.py::MemoryTest",
        ],
    ),
    "offline": (["torch_ragged/offline/*.py"], ["offline/test_*.py"]),
}


AT_IMPORT = [
    "test/tensor/test_hooks.py",
    "test/tensor/test_registration.py",
    "test/tensor/test_placement_extension.py",
    "test/tensor/test_plain_dtensor.py",
    "test/tensor/test_compile.py",
    "test/tensor/test_redistribute_autograd.py",
    "test/tensor/test_everyday.py",
    "test/checkpoint/test_checkpoint.py",
    "test/checkpoint/test_checkpoint_interop.py",
    "test/checkpoint/test_full_state_dicts.py",
    "test/fsdp/test_fsdp_composition.py",
    "test/house/test_upstream.py::VersionsTest",
    "test/house/test_upstream.py::SeriesTest::test_a_patched_torch_has_the_placements_and_the_installed_one_stays_as_it_is",
]
"""The tests for code that runs when the package is imported, the fast ones first."""


def files_of(root: Path, group: str) -> list[str]:
    """The mutated files of a group, relative to the root."""
    return [str(path.relative_to(root)) for pattern in GROUPS[group][0] for path in sorted(root.glob(pattern))]


def tests_of(root: Path, group: str) -> list[str]:
    """A group's test files, relative to the root, or classes in them as pytest names these."""
    result = []
    for pattern, colons, name in (test.partition("::") for test in GROUPS[group][1]):
        result += [f"{path.relative_to(root)}{colons}{name}" for path in sorted((root / "test").rglob(pattern))]
    return result
