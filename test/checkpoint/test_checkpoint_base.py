"""Checkpoints without frozen parameters: small, loaded onto the base at any number of ranks, and another base is named."""

import contextlib
import io
import itertools
import os
import random
import tempfile
import unittest
from pathlib import Path

import torch
import torch.distributed as dist
from common import error_of, ranks, run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from torch_ragged import GlobalLayout, InterleavedShard, RaggedShard, checkpoint, with_layout
from torch_ragged.checkpoint import TrainState, _base
from torch_ragged.checkpoint._base import digests_of, held_base
from torch_ragged.checkpoint._cli import main
from torch_ragged.fsdp import fully_shard, rows

MASK = (1 << 64) - 1


class Adapted(nn.Module):
    """A frozen base with tied weights and a fused one, adapters that train, and a buffer that changes without gradients."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.gate_up = nn.Linear(6, 10, bias=False, dtype=torch.bfloat16)
        self.down = nn.Linear(5, 6)
        self.norm = nn.BatchNorm1d(6, affine=False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.requires_grad_(False)
        self.adapter = nn.Sequential(nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False))

    def forward(self, tokens):
        x = self.norm(self.embedding(tokens))
        gate, up = self.gate_up(x.bfloat16()).float().chunk(2, -1)
        return self.head(self.down(gate * up) + self.adapter(x))


def make(seed=0, base_seed=7, base="llama", change=None, policy=rows(2), shape=None):
    """A run at its start. Adapters depend on ``seed``, the base on ``base_seed`` and ``change``."""
    torch.manual_seed(base_seed)
    model = Adapted()
    torch.manual_seed(seed)
    for layer in model.adapter:
        nn.init.normal_(layer.weight)
    if change is not None:
        with torch.no_grad():
            change(model)
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", shape or (dist.get_world_size(),))
        fully_shard(model, mesh=mesh, orig_param_policy=lambda name, param: policy if param.ndim == 2 else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return TrainState(model, optimizer, base=base)


def train(state, steps=1):
    for _ in range(steps):
        tokens = torch.randint(11, (4,), generator=torch.Generator().manual_seed(state.step))
        state.model(tokens).square().mean().backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        state.step += 1


def whole(state):
    return {
        name: value.detach().full_tensor() if hasattr(value, "full_tensor") else value.detach().clone()
        for name, value in state.model.state_dict().items()
    }


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def differ(path, what, state):
    """The first line of load's error, which the model survives unchanged; the rest of its lines."""
    before = whole(state)
    text = error_of(checkpoint.load, path, state)
    assert same(before, whole(state)), what
    return text


LEFT_OUT = ["down.bias", "down.weight", "embedding.weight", "gate_up.weight", "head.weight"]


def save_on_ranks(path):
    state = make()
    train(state, 2)
    checkpoint.save(path, state)
    return whole(state)


def load_on_ranks(path, policy, shape):
    state = make(seed=9, policy=policy, shape=shape)
    manifest = checkpoint.load(path, state)
    values = whole(state)
    checkpoint.save(Path(path) / f"again-{dist.get_world_size()}", state)
    return values, {name: record.digest for name, record in manifest.frozen.items()}


def load_other_bases(path):
    """The error of each other base, on this rank."""

    def one_element(model):
        model.down.weight[5, 4] = torch.nextafter(model.down.weight[5, 4], torch.tensor(9.0))

    def swapped(model):
        model.gate_up.weight.copy_(model.gate_up.weight.roll(5, 0))

    def of_other_dtype(model):
        model.gate_up.float()

    found = {"none": differ(path, "none", make(base_seed=8, base=None))}
    for change in (one_element, swapped, of_other_dtype):
        found[change.__name__] = differ(path, change, make(change=change))
    return found


def unequal_ranks(path):
    """Errors of saves whose ranks do not agree; nothing is written."""
    state = make(base=f"llama-{dist.get_rank()}")
    found = [error_of(checkpoint.save, path, state)]
    state = make()
    if dist.get_rank() == 1:
        state.model.down.weight.requires_grad_(True)
    found.append(error_of(checkpoint.save, path, state))
    assert not Path(path).exists() or not os.listdir(path)
    return found


def save_and_load_at_once(path):
    """A load right after async_save waits for it; training goes on from its values."""
    state, group = make(), dist.new_group(backend="gloo")
    train(state)
    want = whole(state)
    future = checkpoint.async_save(path, state, process_group=group)
    train(state)  # In the meantime: the checkpoint has the values from before.
    checkpoint.load(path, state)
    assert future.done() and same(whole(state), want) and state.step == 1
    manifest = checkpoint.read_manifest(future.result())
    assert sorted(manifest.frozen) == [f"model.{name}" for name in LEFT_OUT]


def digest_by_hand(tensor):
    """The definition, with Python's integers."""

    def weight(dim, index):
        value = index + 1 + ((dim + 1) << 48)
        for factor in (-0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15):
            value = value * factor & MASK
            signed = value - (1 << 64) if value >> 63 else value
            value = (signed ^ (signed >> 29)) & MASK
        return value | 1

    size = tensor.element_size()
    of_size = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    # Of wider elements, words of 32 bits, along one more dimension.
    bits = tensor.view(of_size[size]) if size <= 4 else tensor.unsqueeze(-1).view(torch.int32)
    total = 0
    for at in itertools.product(*map(range, bits.shape)):
        term = int(bits[at])
        for dim, index in enumerate(at):
            term = term * weight(dim, index) & MASK
        total += term
    return f"{total & MASK:016x}"


def digest_of_dtensors(shape, dtype, cases):
    """The digest of one tensor under each of the placements."""
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    found = []
    for mesh_shape, placements in cases:
        mesh = init_device_mesh("cpu", mesh_shape)
        value = distribute_tensor(tensor, mesh, placements, src_data_rank=None)
        held = [None] * dist.get_world_size()
        dist.all_gather_object(held, held_base({"w": value}, ["model.w"]))
        found.append(digests_of(held, "test")["model.w"].digest)
    return found


class BaseTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = folder.name

    def test_a_checkpoint_has_what_trains_and_is_loaded_onto_the_base_on_other_ranks(self):
        want = run_ranks(2, save_on_ranks, self.path)[0]
        manifest = checkpoint.read_manifest(checkpoint.latest(self.path))
        self.assertEqual((manifest.base, manifest.format), ("llama", 2))
        self.assertEqual(sorted(manifest.frozen), [f"model.{name}" for name in LEFT_OUT])
        saved = {name.removeprefix("model.") for name in manifest.tensors if name.startswith("model.")}
        self.assertEqual(saved, want.keys() - set(LEFT_OUT))  # Adapters, and the buffers, which have changed.
        for size, policy, shape in ((1, rows(1), None), (3, rows(3), None), (4, rows(2), (2, 2))):
            found, digests = run_ranks(size, load_on_ranks, self.path, policy, shape)[-1]
            self.assertTrue(same(found, want), size)
            again = checkpoint.read_manifest(checkpoint.latest(f"{self.path}/again-{size}"))
            self.assertEqual({name: record.digest for name, record in again.frozen.items()}, digests)
        state = make(seed=9)
        checkpoint.load(self.path, state)
        self.assertTrue(same(whole(state), want))
        self.assertEqual(again.fingerprint, manifest.fingerprint)

    def test_another_base_is_named_on_all_ranks_and_nothing_changes(self):
        state = make()
        train(state)
        checkpoint.save(self.path, state)
        for found in run_ranks(2, load_other_bases, self.path):
            self.assertIn(
                "frozen parameters, they are in its base 'llama', and the model holds other values of 5 of 5", found["none"]
            )
            self.assertIn("load the base into the model first", found["none"])
            self.assertRegex(found["one_element"], "other values of 1 of 5: .*\n  model.down.weight$")
            self.assertRegex(found["swapped"], "other values of 1 of 5: .*\n  model.gate_up.weight$")
            self.assertIn(
                "model.gate_up.weight is (10, 6) bfloat16 in the checkpoint, (10, 6) float32 here", found["of_other_dtype"]
            )
        model = make().model
        model.down.to("meta")
        text = error_of(checkpoint.load, self.path, TrainState(model))
        self.assertIn("model.down.bias has no values, it is on the meta device: load the base", text)

    def test_what_has_trained_or_changed_is_never_left_out(self):
        state = make()
        train(state)
        checkpoint.save(self.path, state)  # From here on, the base is known.
        state.model.down.weight.requires_grad_(True)
        train(state)
        state.model.down.requires_grad_(False)
        state.optimizer = torch.optim.AdamW(state.model.parameters())  # One that has no state for it.
        state.model.gate_up.weight.data.view(-1)[3] += 1  # Such as the merge of an adapter: no version counts it.
        checkpoint.save(self.path, state)
        left_out = {name for name in LEFT_OUT if name not in ("down.weight", "gate_up.weight")}
        manifest = checkpoint.read_manifest(checkpoint.latest(self.path))
        self.assertEqual(manifest.frozen.keys(), {f"model.{name}" for name in left_out})
        other = make(seed=9)
        checkpoint.load(self.path, other)
        self.assertTrue(same(whole(other), whole(state)))
        checkpoint.save(f"{self.path}/other", other)  # Another process: it must not take the loaded values for the base's.
        self.assertEqual(checkpoint.read_manifest(checkpoint.latest(f"{self.path}/other")).frozen, manifest.frozen)
        unfrozen = make(seed=9)
        unfrozen.model.requires_grad_(True)
        checkpoint.load(self.path, unfrozen)
        self.assertTrue(same(whole(unfrozen), whole(state)))
        checkpoint.save(f"{self.path}/all", unfrozen)
        self.assertEqual(checkpoint.read_manifest(checkpoint.latest(f"{self.path}/all")).frozen, {})

    def test_a_parameter_with_a_state_is_saved_by_the_first_save_too(self):
        state = make()
        state.model.down.requires_grad_(True)
        train(state)
        state.model.down.requires_grad_(False)
        checkpoint.save(self.path, state)
        manifest = checkpoint.read_manifest(checkpoint.latest(self.path))
        self.assertEqual(manifest.frozen.keys(), {f"model.{name}" for name in LEFT_OUT if "down" not in name})

    def test_a_whole_checkpoint_is_loaded_over_the_base(self):
        state = make(base=None, change=lambda model: model.down.weight.add_(1))
        checkpoint.save(self.path, state)
        other = make(seed=9)
        checkpoint.load(self.path, other)
        checkpoint.save(self.path, other)
        frozen = checkpoint.read_manifest(checkpoint.latest(self.path)).frozen
        self.assertEqual(frozen.keys(), {f"model.{name}" for name in LEFT_OUT if name != "down.weight"})

    def test_the_command_line_shows_the_base_and_names_what_differs_in_it(self):
        paths = [checkpoint.save(f"{self.path}/{seed}", make(base_seed=seed)) for seed in (7, 8)]
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            self.assertEqual(main(["inspect", str(paths[0])]), 0)
            self.assertEqual(main(["diff", *map(str, paths)]), 1)
        self.assertRegex(printed.getvalue(), r"base +llama \(5 frozen tensors are there\)")
        digest = checkpoint.read_manifest(paths[1]).frozen["model.down.weight"].digest
        self.assertRegex(printed.getvalue(), rf"model.down.weight .* \(6, 5\) float32 in the base, digest {digest}")

    def test_ranks_that_differ_raise_before_anything_is_written(self):
        for rank, (base, frozen) in enumerate(run_ranks(2, unequal_ranks, f"{self.path}/none")):
            self.assertIn("base is 'llama-0' on rank 0, but 'llama-1' on rank 1", base, rank)
            self.assertIn("model.down.weight is frozen on rank 0, but not on rank 1", frozen, rank)

    def test_a_load_right_after_an_async_save_waits_for_it(self):
        run_ranks(2, save_and_load_at_once, self.path)

    def test_wrong_bases_are_refused(self):
        for base in ("", 3):
            self.assertIn("TrainState.base must be the name", error_of(checkpoint.save, self.path, make(base=base)))


class DigestTest(unittest.TestCase):
    @ranks(4)
    def test_a_digest_is_its_definition_under_all_placements():
        ragged = RaggedShard((0, 1), (5, 0, 25, 18))
        plain = [((4,), [each]) for each in (Replicate(), Shard(0), Shard(1), ragged, InterleavedShard(0, 2))]
        meshes = [
            ((2, 2), [Replicate(), Shard(1)]),
            ((2, 2), [Shard(0), Shard(1)]),
            ((2, 2), [RaggedShard((0,), (3, 1)), Shard(1)]),
        ]
        for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64, torch.float8_e4m3fn):
            shape = (8, 6)
            tensor = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)
            cases = plain + meshes if dtype is torch.float32 else plain[:4:3]
            assert set(digest_of_dtensors(shape, dtype, cases)) == {digest_by_hand(tensor)}, dtype

    def test_parts_of_large_tensors_add_up(self):
        words, _base._AT_ONCE = _base._AT_ONCE, 10
        try:
            for shape in ((7, 9), (3, 4, 5), (31,), (1, 1, 23), (), (0, 4)):
                tensor = torch.randn(shape)
                found = digests_of([held_base({"w": tensor}, ["model.w"])], "test")["model.w"]
                self.assertEqual((found.digest, found.shape), (digest_by_hand(tensor), shape))
        finally:
            _base._AT_ONCE = words

    def test_moved_elements_change_the_digest(self):
        def digest(tensor):
            return digests_of([held_base({"w": tensor}, ["model.w"])], "test")["model.w"].digest

        square = torch.arange(64.0).view(8, 8)
        others = [
            square.T,
            square.roll(4, 0),
            square.roll(1, 1),
            square.flip(0),
            square.view(4, 2, 8).transpose(0, 1).reshape(8, 8),
        ]
        self.assertEqual(len({digest(each.contiguous()) for each in [square, *others]}), 6)
        self.assertEqual(digest(square.T), digest(square.T.contiguous()))  # Strides do not count.
        for at in random.Random(0).sample(range(64), 8):
            changed = square.clone()
            changed.view(-1)[at].mul_(-1).sub_(1)
            self.assertNotEqual(digest(changed), digest(square))
        pair = torch.complex(square, square.T).to(torch.complex128)
        self.assertNotEqual(digest(pair), digest(pair.conj()))

    def test_layouts_and_replicas_count_once_and_differences_are_named(self):
        tensor = torch.randn(4, 3)

        def part(rank, values=tensor):
            layout = GlobalLayout((4, 3), ((2 * rank, 0),), ((0, 0),), ((2, 3),))
            return held_base({"w": with_layout(values[2 * rank : 2 * rank + 2].clone(), layout)}, ["model.w"])

        found = digests_of([part(0), part(1), part(0), part(1)], "test")
        self.assertEqual(found["model.w"].digest, digest_by_hand(tensor))
        self.assertIn("has other values on rank 2", error_of(digests_of, [part(0), part(1), part(0, tensor + 1)], "test"))
        self.assertIn("has 6 elements on all ranks", error_of(digests_of, [part(0), part(0)], "test"))


if __name__ == "__main__":
    unittest.main()
