"""Torch's validation of sharding rules (``torch/distributed/tensor/_ops/strategy_validation.py``), for ragged placements.

``PYTHONPATH=test/common python test/tensor/strategy_validation.py --op add,relu`` simulates 4 ranks in one process. It takes
each aten call of an op's samples and each combination of Replicate and ragged placements of its tensors. Torch's functions cut
the tensors, wrap the local results in DTensors with the placements that are claimed, and compare them with the call's result.

- correct: a rule takes the combination, and its local results are right.
- incorrect: a rule takes the combination, and they are wrong.
- missing: no rule takes the combination, but the op itself gives right local results under some placement of its outputs.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from common import fake_group
from op_conformance import ragged_patterns
from torch.distributed._local_tensor import LocalTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor._ops import strategy_validation as validation
from torch.distributed.tensor.placement_types import Placement
from torch.utils import _pytree as pytree

from torch_ragged.tensor import _dispatch
from torch_ragged.tensor._cut_placement import has_flat
from torch_ragged.tensor._local_tensor import on_each_rank
from torch_ragged.tensor._ops import has_ragged_rows

RANKS = 4
Placements = tuple[Placement, ...]


def answer_of(op: Any, args: Any, kwargs: Any, mesh: DeviceMesh, inputs: Placements) -> tuple[Placements, Callable] | None:
    """What a rule says of a call: the placements of the outputs, and what makes the local outputs; None if no rule takes it."""
    given = iter(inputs)

    def spec(leaf: Any) -> Any:
        meta = TensorMeta(leaf.shape, leaf.stride(), leaf.dtype)
        return DTensorSpec(mesh, (next(given),), tensor_meta=meta)

    _dispatch._hash_scalars(op)  # The caches' keys have the arguments that are no tensors, as in the dispatcher.
    info = next(table[op] for table in _dispatch._key_tables() if op in table)
    schema = OpSchema(op, *(pytree.tree_map_only(torch.Tensor, spec, part) for part in (args, kwargs)), schema_info=info)
    try:
        sharding, _ = _dispatch._local_sharding(op, schema)
    except Exception:  # The dispatcher raises it: the sizes of the outputs depend on data, or torch has no rule.
        return None
    if sharding is None:
        return None
    if sharding.redistribute_schema is not None:
        leaves = pytree.tree_leaves(sharding.redistribute_schema.args_schema)
        wanted = [leaf.placements for leaf in leaves if isinstance(leaf, DTensorSpec)]
        if wanted != [(placement,) for placement in inputs[: len(wanted)]]:
            return None  # It takes another combination.
    outputs = pytree.tree_leaves(sharding.output_spec)
    if any(output is None for output in outputs):
        return None
    run = getattr(sharding, "run", None)

    def local_results(*local_args: Any, **local_kwargs: Any) -> Any:
        if run is None:
            found = op(*local_args, **local_kwargs)
        else:
            found = on_each_rank(_dispatch._run_as_rank, op, schema, local_args, local_kwargs)
        leaves, tree = pytree.tree_flatten(found)
        return pytree.tree_unflatten([_without_views(*pair) for pair in zip(leaves, outputs, strict=True)], tree)

    claims = (Replicate() if has_ragged_rows(output.placements) else output.placements[0] for output in outputs)
    return tuple(claims), local_results


def _without_views(local: torch.Tensor, output: DTensorSpec) -> torch.Tensor:
    """A local result; the whole tensor if it is a strided view, which torch's function cannot wrap."""
    if not has_ragged_rows(output.placements):
        return local
    return DTensor(local, output, requires_grad=False).redistribute(placements=[Replicate()]).to_local()  # type: ignore[call-arg]


def calls_of(info: Any, samples: int) -> Iterator[tuple[int, Any, Any, Any, Any]]:
    """The number of the sample, the op, arguments and result of each aten call that samples of the op make."""
    for number, sample in enumerate(itertools.islice(info.sample_inputs("cpu", torch.float32), samples)):
        for op, args, kwargs, result in validation.get_aten_op_for_sample(info.op, sample, info.name).all_ops:
            tensors = tensors_of(args, kwargs)
            dense = all(t.layout is torch.strided and t.is_contiguous() and t.numel() for t in tensors)
            dense = dense and all(t.layout is torch.strided for t in tensors_of(result))
            if not tensors or not dense or op._schema.is_mutable:
                continue
            truth = validation._check_ground_truth(result)
            if truth is not None and same(op(*args, **kwargs), result):  # Later calls of the sample may have written to them.
                yield number, op, args, kwargs, truth


def tensors_of(*arguments: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]


def same(one: Any, other: Any) -> bool:
    pairs = zip(tensors_of(one), tensors_of(other), strict=True)
    return all(a.shape == b.shape and torch.allclose(a, b, equal_nan=True) for a, b in pairs)


def combinations_of(tensors: Sequence[torch.Tensor]) -> list[Placements]:
    """Replicate or a ragged pattern for each tensor, with at least one ragged; tensors of one shape have one pattern."""
    found: dict[Placements, None] = {}
    for cut in itertools.product((False, True), repeat=min(len(tensors), 4)):
        patterns = [ragged_patterns(tuple(t.shape)) if is_cut else [Replicate()] for t, is_cut in zip(tensors, cut)]
        patterns += [[Replicate()]] * (len(tensors) - len(patterns))
        for which in range(max(map(len, patterns))):
            found[tuple(each[which % len(each)] for each in patterns)] = None
    return [combination for combination in found if has_flat(combination)]


def compare_operator(name: str, samples: int = 3, incorrect_only: bool = False) -> validation.ComparisonStats:
    """As torch's function of this name, for combinations with a ragged placement."""
    stats = validation.ComparisonStats()
    with LocalTensorMode(RANKS):
        mesh = init_device_mesh("cpu", (RANKS,))
    for info in () if name in validation.SKIP_OPS else validation.get_opinfo_by_name(name):
        for number, op, args, kwargs, truth in calls_of(info, samples):
            compare_call(stats, mesh, number, op, args, kwargs, truth, incorrect_only)
    return stats


def compare_call(
    stats: validation.ComparisonStats, mesh: DeviceMesh, number: int, op: Any, args: Any, kwargs: Any, truth: Any, skip: bool
) -> None:
    tensors = tensors_of(args, kwargs)
    results = truth if isinstance(truth, list) else [truth]

    def is_right(run: Callable, inputs: Placements, outputs: Placements) -> bool:
        with LocalTensorMode(RANKS):
            return bool(validation.validate_aten_combination(run, args, kwargs, truth, (inputs, outputs), RANKS, mesh)[0])

    def note(kind: str, inputs: Placements, outputs: Placements) -> None:
        texts, shapes = ([str(p) for p in part] for part in (inputs, outputs)), tuple(tuple(t.shape) for t in tensors)
        found = validation.Discrepancy(*map(tuple, texts), number, shapes, kind, aten_op=op)  # type: ignore[arg-type]
        (stats.false_positives if kind == "false_positive" else stats.false_negatives).append(found)

    stats.total_samples += 1
    for inputs in combinations_of(tensors):
        stats.total_combinations += 1
        answer = answer_of(op, args, kwargs, mesh, inputs)
        if answer is not None:
            outputs, run = answer
            if is_right(run, inputs, outputs):
                stats.true_positives += 1
                stats.true_positives_by_op[str(op)] = stats.true_positives_by_op.get(str(op), 0) + 1
            else:
                note("false_positive", inputs, outputs)
        elif not skip:
            cuts = dict.fromkeys(placement for placement in inputs if has_flat((placement,)))
            for output in (*cuts, Replicate(), *map(Partial, validation.PARTIAL_REDUCE_OPS)):
                if is_right(op, inputs, (output,) * len(results)):
                    note("false_negative", inputs, (output,) * len(results))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", action="append", required=True, help="names of ops, with commas or as patterns")
    parser.add_argument("--samples", type=int, default=3, help="samples of each op")
    parser.add_argument("--incorrect-only", action="store_true", help="do not look for missing rules")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    incorrect = 0
    with fake_group(RANKS):
        for name in validation.resolve_op_names([part for given in options.op for part in given.split(",")]):
            stats = compare_operator(name, options.samples, options.incorrect_only)
            counts = f"{stats.true_positives} correct, {len(stats.false_positives)} incorrect"
            print(f"{name}: {counts}, {len(stats.false_negatives)} missing, of {stats.total_combinations}", flush=True)
            validation._print_comparison_summary(stats)
            incorrect += len(stats.false_positives)
    sys.exit(incorrect > 0)


if __name__ == "__main__":
    main()
