"""run(delta=Baseline()): only changed elements travel, and a receiver that does not hold the baseline gets all of them."""

import contextlib
import math
import unittest
from concurrent.futures import Future
from unittest import mock

import torch
import torch.distributed as dist
from common import error_of, ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from torch_ragged import RaggedShard, transfer
from torch_ragged.tensor._exchange import Part
from torch_ragged.transfer import _elements, _execution
from torch_ragged.transfer._elements import apply_delta, delta_of

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.complex128)


def dtensor(full, mesh, placements):
    """Without communication, also on ranks outside of the mesh."""
    return distribute_tensor(full.clone(), mesh, placements, src_data_rank=None)


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


def changed(full, fraction, seed):
    """Other values in about this fraction of the elements."""
    chosen = torch.rand(full.shape, generator=torch.Generator().manual_seed(seed)) < fraction
    return torch.where(chosen, full + full.abs() + 1, full)


def sent_bytes(plan):
    """By all ranks, in the last run."""
    total = torch.tensor([plan.last_sent_bytes])
    dist.all_reduce(total)
    return int(total)


def check_target(target, full):
    """Bitwise, on the ranks of the target."""
    if target.device_mesh.get_coordinate() is not None:
        wanted = dtensor(full.to(target.dtype), target.device_mesh, target.placements)
        assert torch.equal(bits(target.to_local()), bits(wanted.to_local())), target.placements


class CodeTest(unittest.TestCase):
    def check(self, dtype, sizes, strides, target_strides, chosen):
        """The elements of a part, of which the chosen are others, at places with these strides on both sides."""
        numel = math.prod(sizes)
        generator = torch.Generator().manual_seed(numel)
        old = torch.randint(0, 2, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
        new = old.clone().view(numel, -1)
        new[chosen, -1] ^= 1  # The last byte: of a sign, or of a number near zero.
        flats, parts = [], [Part(1, sizes, strides), Part(1, sizes, target_strides)]
        for packed, part in ((old, parts[0]), (new, parts[0]), (old, parts[1])):
            flat = torch.zeros(2 + sum((n - 1) * s for n, s in zip(part.sizes, part.strides)), dtype=dtype)
            flat.as_strided(part.sizes, part.strides, 1).copy_(packed.reshape(-1).view(dtype).view(sizes))
            flats.append(flat)
        delta = delta_of(flats[1], parts[:1], flats[0], parts[:1])
        if delta is not None:
            self.assertLess(len(delta), numel * dtype.itemsize)
            apply_delta(delta, flats[2], parts[1:], dtype)
            got = flats[2].as_strided(sizes, target_strides, 1).reshape(-1)
            self.assertTrue(torch.equal(got.contiguous().view(torch.uint8), new.reshape(-1)))
        return delta

    def test_a_delta_has_the_bits_of_all_changed_elements(self):
        """In any dtype, with any strides on both ends, in one chunk or in many, few changes or many, spread or in a row."""
        with mock.patch.object(_elements, "chunk_bytes", lambda device: 37):
            for dtype in DTYPES:
                for fraction in (0, 0.02, 0.5, 1):
                    chosen = torch.rand(400, generator=torch.Generator().manual_seed(0)) < fraction
                    for strides in ((1,), (2,)):
                        made = self.check(dtype, (400,), strides, (1,), chosen)
                        self.assertEqual(made is None, fraction == 1, (dtype, fraction))
                    self.check(dtype, (20, 20), (1, 20), (30, 1), chosen)
        for chosen in ([], [0], [599_999], [262_143, 262_144], range(100, 900), range(0, 600_000, 997)):
            self.assertIsNotNone(self.check(torch.int16, (600_000,), (1,), (1,), list(chosen)))

    def test_a_delta_is_close_to_the_entropy(self):
        """Values, and at most 0.15 bits more than the entropy of the positions; in a chunk of its own way each."""
        for fraction in (0.001, 0.01, 0.03, 0.3):
            chosen = torch.rand(1 << 19, generator=torch.Generator().manual_seed(1)) < fraction
            count, p = int(chosen.sum()), float(chosen.float().mean())
            entropy = (-p * math.log2(p) - (1 - p) * math.log2(1 - p)) / p
            delta = self.check(torch.bfloat16, (1 << 19,), (1,), (1,), chosen)
            self.assertLess(len(delta) * 8 / count - 16, entropy + (0.15 if count > 1000 else 1), fraction)
        chosen[: 1 << 18] = True  # A chunk that is sent whole, and one with positions.
        chosen[1 << 18 :] = torch.rand(1 << 18, generator=torch.Generator().manual_seed(2)) < 0.01
        delta = self.check(torch.bfloat16, (1 << 19,), (1,), (1,), chosen)
        self.assertLess(len(delta), (1 << 19) + int(chosen[1 << 18 :].sum()) * 3.1 + 30)


class BaselineTest(unittest.TestCase):
    @ranks(4)
    def test_only_changed_elements_travel_to_every_receiver_that_holds_the_baseline():
        """Uneven owners, one without elements, ranks of both sides, casts both ways, receivers that pass on, small buffers."""
        full = torch.randn(96, 64, generator=torch.Generator().manual_seed(0))
        trainer, engines = DeviceMesh("cpu", [0, 1, 2]), DeviceMesh("cpu", [1, 2, 3])
        for case, (cut, other, to, dtype, wire, max_bytes) in enumerate(
            (
                (trainer, DeviceMesh("cpu", [3]), Replicate(), torch.float32, 4, 1 << 28),
                (trainer, engines, Shard(1), torch.bfloat16, 2, 1 << 28),
                (trainer, engines, RaggedShard((0, 1), (1, 0, 5)), torch.float64, 4, 1 << 13),
                (DeviceMesh("cpu", [0]), engines, Replicate(), torch.bfloat16, 2, 1 << 14),
            )
        ):
            values = full
            source = {"w": dtensor(values, cut, [RaggedShard((0,), (1, 3, 0)) if cut is trainer else Replicate()])}
            target = {"w": dtensor(torch.zeros(full.shape, dtype=dtype), other, [to])}
            plan, baseline = transfer.plan(source, target, max_bytes=max_bytes), transfer.Baseline()
            plan.run(source, target, delta=baseline)
            check_target(target["w"], values)
            whole = sent_bytes(plan)
            elements = whole / wire
            for step in range(3):
                values = changed(values, 0.02, step)
                source["w"] = dtensor(values, cut, source["w"].placements)
                plan.run(source, target, delta=baseline)
                check_target(target["w"], values)
                sent = sent_bytes(plan)
                # Casts to bfloat16 may leave fewer elements changed. Chunks are small here: 12 bytes of each are much.
                assert 0 < sent < 0.03 * elements * (wire + 1.3) + 16 * 12 * plan_atoms(plan), (case, sent, whole)
                assert plan.last_peak_bytes <= max_bytes
            plan.run(source, target, delta=baseline)
            assert sent_bytes(plan) == 0
            owned = source["w"].to_local().numel() if cut.get_coordinate() is not None else 0
            assert baseline.nbytes in (0, owned * wire) and (baseline.nbytes or not owned or dist.get_rank()), baseline.nbytes

    @ranks(4)
    def test_a_receiver_with_other_values_gets_all_elements_and_the_others_only_what_changed():
        """It was written, has missed an update, is new, or has what the source has: each alone, beside one that is not."""
        full = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
        rank, trainer = dist.get_rank(), DeviceMesh("cpu", [0, 1])
        here, there = DeviceMesh("cpu", [2]), DeviceMesh("cpu", [3])
        baseline, values = transfer.Baseline(), full

        def source():
            return {"w": dtensor(values, trainer, [RaggedShard((0,), (5, 3))])}

        engines = {name: dtensor(torch.zeros(64, 64), mesh, [Replicate()]) for name, mesh in (("a", here), ("b", there))}
        layout = transfer.EngineLayout(torch.float32)
        layout.add("w", (64, 64), [(2, (0, 4096)), (3, (0, 4096))])
        target = {"w": engines["a" if rank == 2 else "b"].to_local()} if rank > 1 else None
        plan = transfer.plan(source() if rank < 2 else None, layout)

        def run(delta=baseline):
            nonlocal values
            values = changed(values, 0.01, int(values.sum()) % 1000)
            plan.run(source() if rank < 2 else None, target, delta=delta)
            if rank > 1:
                assert torch.equal(target["w"].view(64, 64), values)
            return sent_bytes(plan)

        assert run() == 2 * full.nbytes
        few = run()
        assert few < 2 * 0.02 * full.nbytes
        if rank == 3:
            target["w"].view(-1)[5] = 0  # Owned by rank 0, which has 5 of 8 rows.
        assert full.nbytes * 5 / 8 < run() < full.nbytes * 6 / 8
        run(delta="checksum")  # The baseline misses this one: all is new for both.
        assert run() == 2 * full.nbytes
        assert run() < 2 * 0.02 * full.nbytes
        if rank == 3:  # It has an update before the others do.
            target["w"].view(64, 64).copy_(changed(values, 0.01, int(values.sum()) % 1000))
        assert 0 < run() < 0.02 * full.nbytes

        # Another plan, of the same source: rank 2 stays, a new engine has columns, and rank 3 left for a while.
        more = transfer.EngineLayout(torch.float32)
        more.add("w", (64, 64), [(2, (0, 4096)), (3, ((0, 0), (64, 32)))])
        plan = transfer.plan(source() if rank < 2 else None, more)
        if rank == 3:
            target = {"w": torch.zeros(64, 32)}
        values = changed(values, 0.01, 7)
        plan.run(source() if rank < 2 else None, target, delta=baseline)
        if rank > 1:
            assert torch.equal(target["w"].view(64, -1), values if rank == 2 else values[:, :32])
        assert full.nbytes / 2 < sent_bytes(plan) < full.nbytes * 0.52

        # The trainer's shards change, too: their baselines do not fit any more.
        for units, least in (((1, 7), full.nbytes * 3 / 2), ((1, 7), 1)):
            values = changed(values, 0.01, 9 + units[0])
            resharded = {"w": dtensor(values, trainer, [RaggedShard((0,), units)])} if rank < 2 else None
            plan = transfer.plan(resharded, more)
            plan.run(resharded, target, delta=baseline)
            assert least <= sent_bytes(plan) <= max(least, full.nbytes * 0.03)
            if rank > 1:
                assert torch.equal(target["w"].view(64, -1), values if rank == 2 else values[:, :32])
        plan = transfer.plan(source() if rank < 2 else None, more)

        # Everyone may forget: all elements travel, and the baseline is right behind it.
        plan.forget()
        plan.run(source() if rank < 2 else None, target, delta=baseline)
        assert sent_bytes(plan) == full.nbytes * 3 / 2
        values = changed(values, 0.01, 8)
        plan.run(source() if rank < 2 else None, target, delta=baseline)
        assert sent_bytes(plan) < full.nbytes * 0.03

    @ranks(3)
    def test_receivers_that_pass_on_get_all_elements_if_one_of_them_is_a_stranger():
        full, engines = torch.randn(60, 40, generator=torch.Generator().manual_seed(0)), DeviceMesh("cpu", [1, 2])
        source = {"w": dtensor(full, DeviceMesh("cpu", [0]), [Replicate()])}
        target = {"w": dtensor(torch.zeros(60, 40), engines, [Replicate()])}
        plan, baseline = transfer.plan(source, target), transfer.Baseline()
        assert any(len(atom.receivers) == 2 for each in plan.slices_of(0) for atom in each.atoms)
        plan.run(source, target, delta=baseline)
        for stranger in (None, 1, 2, "ahead"):  # Ahead: rank 1 has the new values already.
            full = changed(full, 0.02, len(str(stranger)))
            if stranger == "ahead" and dist.get_rank() == 1:
                target["w"].to_local().copy_(full)
            if dist.get_rank() == 0:
                source["w"].to_local().copy_(full)
            if dist.get_rank() == stranger:
                target["w"].to_local()[0, 0] = -5
            plan.run(source, target, delta=baseline)
            check_target(target["w"], full)
            sent = sent_bytes(plan)
            assert sent < 0.08 * full.nbytes if stranger not in (1, 2) else full.nbytes < sent < 1.1 * full.nbytes, (
                stranger,
                sent,
            )

    @ranks(2)
    def test_staged_and_partial_sources_have_deltas():
        """A local tensor that is not contiguous, one that is reduced on its way, and several dtypes in one run."""
        mesh, there = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [1])
        full = torch.randn(50, 40, generator=torch.Generator().manual_seed(0))
        baseline = transfer.Baseline()
        for step in range(3):
            values = changed(full, 0.02 * bool(step), step)
            source = {
                "strided": DTensor.from_local(values.t().contiguous().t(), mesh, [Replicate()], run_check=False),
                "partial": DTensor.from_local(values / 2, mesh, [Partial("sum")], run_check=False),
                "half": DTensor.from_local(values.bfloat16(), mesh, [Replicate()], run_check=False),
                "few": DTensor.from_local(values[:1, :3].clone(), mesh, [Replicate()], run_check=False),
            }
            source["strided"] = DTensor.from_local(
                values.t().contiguous().t(), DeviceMesh("cpu", [0]), [Replicate()], run_check=False
            )
            if step == 0:
                target = {
                    name: dtensor(torch.zeros(t.shape, dtype=t.dtype), there, [Replicate()]) for name, t in source.items()
                }
                plan = transfer.plan(source, target, max_bytes=1 << 13)
            plan.run(source, target, delta=baseline)
            assert plan.last_peak_bytes <= 1 << 13
            for name, wanted in (
                ("strided", values),
                ("partial", values),
                ("half", values.bfloat16()),
                ("few", values[:1, :3]),
            ):
                check_target(target[name], wanted)
            assert (sent_bytes(plan) < 0.1 * full.nbytes) == bool(step)

    @ranks(3)
    def test_a_run_that_fails_leaves_a_baseline_that_is_found_out():
        """The sender has taken new values for sent ones, and the receivers never got them."""
        rank, here = dist.get_rank(), DeviceMesh("cpu", [0])
        full = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
        source, target = (
            {"w": dtensor(full, here, [Replicate()])},
            {"w": dtensor(torch.zeros(64, 64), DeviceMesh("cpu", [1, 2]), [Shard(1)])},
        )
        baseline, plan = transfer.Baseline(), transfer.plan(source, target)
        plan.run(source, target, delta=baseline)
        full = changed(full, 0.02, 1)
        source = {"w": dtensor(full, here, [Replicate()])}
        with (
            mock.patch.object(_execution, "apply_delta", side_effect=OSError("broken"))
            if rank == 1
            else contextlib.nullcontext()
        ):
            text = error_of(plan.run, source, target, delta=baseline)
        assert text.startswith("TransferError") and "rank 1: OSError: broken" in text, text
        plan = transfer.plan(source, target)
        full = changed(full, 0.02, 2)
        source = {"w": dtensor(full, here, [Replicate()])}
        plan.run(source, target, delta=baseline)
        check_target(target["w"], full)

    @ranks(2)
    def test_calls_that_differ_or_share_a_baseline_are_errors_on_all_ranks():
        rank, mesh, there = dist.get_rank(), DeviceMesh("cpu", [0]), DeviceMesh("cpu", [1])
        source = {"w": dtensor(torch.ones(6), mesh, [Replicate()])}
        target = {"w": dtensor(torch.zeros(6), there, [Replicate()])}
        plan, baseline = transfer.plan(source, target), transfer.Baseline()
        text = error_of(plan.run, source, target, delta=baseline if rank else "checksum")
        assert "rank 0 has delta checksum, rank 1 has delta a Baseline" in text, text
        text = error_of(plan.run, source, target, delta="elements" if rank else baseline)
        assert 'takes None, "checksum" or a transfer.Baseline, got' in text, text
        if rank:
            assert not target["w"].to_local().any()
        apart = dist.new_group([0, 1])
        other = transfer.plan(source, target, group=apart)
        handles = [plan.run(source, target, delta=baseline, async_op=True)]
        baseline._last_run = (plan._group, transfer.Handle(Future())) if rank else baseline._last_run
        text = error_of(other.run, source, target, delta=baseline)
        assert "another plan's run with this Baseline is in the background" in text, text
        handles[0].wait()
        baseline._last_run = None
        plan.run(source, target, delta=baseline)
        other.run(source, target, delta=baseline)
        check_target(target["w"], torch.ones(6))


def plan_atoms(plan):
    return sum(
        len(each.atoms)
        for rank in plan.ranks
        for each in plan._slices_of(rank, plan._schedules[False, True].finer, frozenset(), True)
    )


if __name__ == "__main__":
    unittest.main()
