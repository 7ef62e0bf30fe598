"""max_bytes bounds what runs of plans and stream() allocate, as torch's allocator counts it."""

import math
import sys
import time
import unittest
from pathlib import Path

import torch
from common import ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torch_ragged import RaggedShard, StridedRaggedShard, owned_boxes, transfer

sys.path.append(str(Path(__file__).parents[2]))  # Of the benchmarks.

from benchmarks.common.peak import peak_of

SMALL = 20_000  # Bytes of counters, flags and checksums.


class Live(TorchDispatchMode):
    """The most bytes of storages that operators have made and that are alive at a time, whichever thread frees them.

    A thread of gloo drops its reference a moment after the wait: more than ``bound`` bytes count if they stay.
    """

    def __init__(self, bound):
        super().__init__()
        self.peak, self._bound, self._known = 0, bound, {}

    def bytes_now(self):
        self._known = {key: known for key, known in self._known.items() if not known.expired()}
        storages = [torch.UntypedStorage._new_with_weak_ptr(known.cdata) for known in self._known.values()]
        return sum(storage.nbytes() for storage in storages if storage is not None)

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        before = {t.untyped_storage()._cdata for t in tree_leaves((arguments, options)) if type(t) is torch.Tensor}
        result = function(*arguments, **(options or {}))
        for storage in (t.untyped_storage() for t in tree_leaves(result) if type(t) is torch.Tensor):
            if storage._cdata not in before:
                self._known[storage._cdata] = StorageWeakRef(storage)
        deadline = time.monotonic() + 2
        while self.bytes_now() > self._bound and time.monotonic() < deadline:
            time.sleep(0.0005)
        self.peak = max(self.peak, self.bytes_now())
        return result


def placed(shape, mesh, placements, value=1.0, strided=False):
    """A DTensor of equal elements, with a local tensor that is contiguous or not. No communication."""
    coordinate = tuple(mesh.get_coordinate())
    pieces = [Replicate() if isinstance(p, Partial) else p for p in placements]
    boxes = owned_boxes(shape, tuple(mesh.shape), pieces, coordinate)
    if any(isinstance(p, (RaggedShard, StridedRaggedShard)) for p in placements):
        local = torch.full((sum(math.prod(box.sizes) for box in boxes),), value)
    else:
        local = torch.full(boxes[0].sizes[::-1] if strided else boxes[0].sizes, value)
        local = local.t() if strided else local
    stride = (shape[1], 1)
    return DTensor.from_local(local, mesh, placements, shape=torch.Size(shape), stride=stride, run_check=False)


class TransferMemoryTest(unittest.TestCase):
    @ranks(4)
    def test_runs_keep_within_max_bytes():
        """Many tensors, each smaller than the bound, and one that is larger: together they would exceed it by far."""
        mesh = DeviceMesh("cpu", list(range(4)))
        shapes = [(128, 128)] * 12 + [(512, 512)]
        max_bytes = 1 << 18
        for how, placements, strided in (
            ("contiguous", [Shard(1)], False),
            ("not contiguous", [Shard(1)], True),
            ("not contiguous, straight", [Shard(0)], True),
            ("Partial", [Partial()], False),
            ("Partial, not contiguous", [Partial("avg")], True),
        ):
            source = {f"t{i}": placed(shape, mesh, placements, strided=strided) for i, shape in enumerate(shapes)}
            for cut in (Shard(0), Replicate()) if how != "contiguous" else (Shard(0),):
                target = {f"t{i}": placed(shape, mesh, [cut], 0.0) for i, shape in enumerate(shapes)}
                plan = transfer.plan(source, target, max_bytes=max_bytes)
                plan.run(source, target)  # The rounds of sources that are not contiguous are agreed on once.
                peak = peak_of(lambda plan=plan, source=source, target=target: plan.run(source, target))
                assert plan.last_peak_bytes <= max_bytes, (how, plan.last_peak_bytes)
                assert plan.last_peak_bytes <= peak <= plan.last_peak_bytes + SMALL, (how, peak, plan.last_peak_bytes)
                wanted = 4.0 if how == "Partial" else 1.0
                assert all(bool((tensor.to_local() == wanted).all()) for tensor in target.values()), how

    @ranks(4)
    def test_stream_keeps_within_max_bytes():
        """Of even and uneven shards, of columns, and beside model parallelism; the consumer drops each tensor."""
        line, square = DeviceMesh("cpu", list(range(4))), DeviceMesh("cpu", [[0, 1], [2, 3]])
        shape, nbytes = (160, 640), 160 * 640 * 4
        cases = {
            "even": (line, [RaggedShard((0,), (1, 1, 1, 1))]),
            "uneven": (line, [RaggedShard((0,), (1, 2, 3, 4))]),
            "one rank": (line, [RaggedShard((0,), (0, 1, 0, 0))]),
            "replicas": (square, [Replicate(), RaggedShard((0,), (1, 3))]),
            "columns": (line, [Shard(1)]),
            "two dimensions": (square, [RaggedShard((0,), (1, 3)), Shard(1)]),
            "strided": (square, [StridedRaggedShard((0,), (2, 3), split_factor=2), Shard(0)]),
        }
        for how, (mesh, placements) in cases.items():
            tensors = {f"t{i}": placed(shape, mesh, placements, float(i)) for i in range(8)}
            for dtype in (None, torch.bfloat16):
                for times in (1, 2, 4):
                    seen = []

                    def read(tensors=tensors, times=times, dtype=dtype, seen=seen):
                        for name, tensor in transfer.stream(tensors, times * nbytes, dtype=dtype):
                            assert tensor.shape == shape and tensor.min() == tensor.max() == float(name[1:])
                            seen.append(name)
                            del tensor

                    least = 2 * nbytes if how in ("columns", "two dimensions") else nbytes
                    bound = max(times * nbytes, least // (1 if dtype is None else 2))
                    with Live(bound + SMALL) as live:
                        read()
                    assert live.peak <= bound + SMALL, (how, dtype, times, live.peak, bound)
                    assert how == "one rank" or live.peak >= bound // 2, (how, dtype, times, live.peak, bound)
                    assert seen == list(tensors)
