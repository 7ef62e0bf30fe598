"""fully_shard's backward: groups that only some ranks use, outputs of any kind, and gradients that do not pile up."""

import collections
import copy
import itertools
import random
import unittest
from dataclasses import dataclass
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import ranks, run_ranks
from fsdp_collectives import delay_collectives
from fsdp_common import WideProduct, compare_gradients
from tested_device import DEVICE
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence
from torch.utils.checkpoint import checkpoint

from torch_ragged.fsdp import HIERARCHICAL, ZERO1, ZERO2, fully_shard
from torch_ragged.fsdp.core._hooks import map_tensors, tensors_in

DIM = 6


def shard(model, modules, fully_shard=fully_shard, **knobs):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in modules:
        fully_shard(module, mesh=mesh, **knobs)
    return fully_shard(model, mesh=mesh, **knobs)


# -- groups that only some ranks use -----------------------------------------------------------------------------------


class Nested(nn.Module):
    """A layer around another one, which is a group of its own."""

    def __init__(self):
        super().__init__()
        self.outer, self.inner = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x):
        y = self.outer(x).tanh()
        return y, self.inner(y)


class Branches(nn.Module):
    """Layers one behind the other, some of them nested, one used twice, and a head of each; returns what all heads say."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(DIM, DIM), Nested(), nn.Linear(DIM, DIM), Nested(), nn.Linear(DIM, DIM)])
        self.heads = nn.ModuleList(nn.Linear(DIM, 2) for _ in range(5))
        self.bias = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        outputs = []
        for layer, head in zip((*self.layers, self.layers[2]), (*self.heads, self.heads[0]), strict=True):
            x = layer(x.detach() if isinstance(layer, Nested) else x)
            x, inner = x if isinstance(x, tuple) else (x, x)
            outputs += [head(x) + self.bias, inner.sum(-1)]
        return outputs


def loss_of_some(model, x, used):
    return sum((output * (index + 1)).mean() for index, output in enumerate(model(x)) if index in used)


def check_ranks_use_different_groups(**knobs):
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for seed in range(4):
        generator = random.Random(seed)
        torch.manual_seed(seed)
        single = Branches()
        torch.manual_seed(seed)
        model = Branches()
        inner = [layer.inner for layer in model.layers if isinstance(layer, Nested)]
        shard(model, [*inner, *model.layers, *model.heads], reshard_after_forward=generator.choice([True, False, None]))
        model.set_max_all_gathers_ahead(generator.choice([0, 1, 2]))
        if generator.random() < 0.5:
            delay_collectives(model)
        for step in range(3):
            inputs = [torch.randn(3, DIM) for _ in range(ranks)]
            used = [generator.sample(range(12), generator.randint(1, 5)) for _ in range(ranks)]
            model.set_requires_gradient_sync(step != 1)
            loss_of_some(model, inputs[rank], used[rank]).backward()
            for x, chosen in zip(inputs, used, strict=True):
                (loss_of_some(single, x, chosen) / ranks).backward()
            if step != 1:
                compare_gradients(model, single)


# -- outputs of any kind -----------------------------------------------------------------------------------------------


class InPlace(nn.Module):
    """Changes the outputs of its groups in place, which are views where a layer makes them so."""

    def __init__(self, bias):
        super().__init__()
        self.first, self.second = nn.Linear(DIM, DIM, bias=bias), nn.Linear(DIM, DIM, bias=bias)
        self.last = nn.Linear(DIM, 2)

    def forward(self, x):
        x = F.relu(self.first(x), inplace=True)
        y = self.second(x)
        y += 1
        return self.last(y.mul_(2))


@dataclass(frozen=True)
class Hidden:
    value: torch.Tensor
    rest: dict
    label: str = "hidden"


class Objects(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, hidden):
        return Hidden(self.layer(hidden.value), {"input": hidden.rest["input"]})


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(DIM, DIM)

    def forward(self, packed):
        return self.layer(packed)[0]


# -- gradients do not pile up ------------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """A block with a group inside, recomputed in backward as one."""

    def __init__(self, reentrant):
        super().__init__()
        self.attention, self.experts, self.reentrant = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), reentrant

    def forward(self, x):
        return checkpoint(lambda x: x + self.experts(self.attention(x).relu()), x, use_reentrant=self.reentrant)


def most_gradient_buffers(model):
    """The most groups that hold gradients when backward is about to end."""
    groups, found = [g for m in model.modules() if hasattr(m, "_ragged_fsdp_state") for g in m._ragged_groups(False)], []
    x = torch.ones(2, DIM, requires_grad=True)
    x.register_hook(lambda _: found.append(sum(bool(b.resident_nbytes) for g in groups for b in g.buffers()["gradients"])))
    model(x).sum().backward()
    return max(found)


class TensorsTest(unittest.TestCase):
    def test_what_may_hide_tensors_is_told(self):
        x, y = torch.ones(1), torch.ones(2)
        cases = [
            (Hidden(x, {"y": y}), [x, y], False),
            (Hidden(x, {"y": [y, object()]}), [x, y], True),
            ((object(), 1), [], True),
            ([{x}, None, "text"], [x], False),
        ]
        for value, tensors, hides in cases:
            found, opaque = tensors_in(value)
            self.assertEqual(([id(tensor) for tensor in found], opaque), ([id(tensor) for tensor in tensors], hides))
        doubled = map_tensors(lambda t: 2 * t, Hidden(x, {"y": y}))
        self.assertEqual((doubled.value.tolist(), doubled.rest["y"].tolist(), doubled.label), ([2.0], [2.0, 2.0], "hidden"))

    def test_containers_are_new_and_of_the_same_type(self):
        Pair = collections.namedtuple("Pair", "one two")
        x = torch.ones(1)
        for value in ({"a": x, "b": 1}, [x], (x, "text"), Pair(x, None), {x}, frozenset([x]), Hidden(x, {}), [[{"a": (x,)}]]):
            mapped = map_tensors(lambda t: 2 * t, value)
            self.assertIs(type(mapped), type(value))
            self.assertEqual([t.item() for t in tensors_in(mapped)[0]], [2.0])
            self.assertEqual([t.item() for t in tensors_in(value)[0]], [1.0])

    def test_packed_sequences_move_without_their_batch_sizes(self):
        packed = pack_sequence([torch.ones(2, 3), torch.ones(4, 3)], enforce_sorted=False)
        for value in (packed, [packed], {packed}):
            (data,), hides = tensors_in(value)
            self.assertTrue(data is packed.data and not hides)
        moved = map_tensors(lambda t: t.to("meta"), (packed,))[0]
        self.assertEqual([t.device.type for t in moved], ["meta", "cpu", "meta", "meta"])
        cast = map_tensors(lambda t: t.double(), packed)
        self.assertEqual((cast.data.dtype, type(cast)), (torch.float64, PackedSequence))
        for mine, before in zip(cast[1:], packed[1:]):
            self.assertTrue(torch.equal(mine, before))


# -- where gradients are ----------------------------------------------------------------------------------------------------


class BigLinear(nn.Linear):
    def __init__(self):
        super().__init__(32, 32, bias=False)


class WideLinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32) * 0.2)

    def forward(self, x):
        return WideProduct.apply(x, self.weight)


def wide_gradients(middle, is_kept):
    """Norms' gradients are float32 beside bfloat16 ones: none is rounded, and the buffer stays narrow if they are few."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.RMSNorm(32), middle(), nn.RMSNorm(32))
    model, policy = copy.deepcopy(plain), MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    with mock.patch("torch_ragged.fsdp.core._fsdp_param_group._KEEPS_WIDE_GRADIENTS", True):
        shard(model, [], mp_policy=policy)
    (group,) = model._ragged_fsdp_state.groups
    plain.bfloat16()
    for param in plain.parameters():
        param.grad_dtype = None
    inputs = torch.randn(2, 2, 4, 32, generator=torch.Generator().manual_seed(0))  # by rank and step, which add up
    for step in range(2):
        model.set_requires_gradient_sync(step == 1)
        (model(inputs[dist.get_rank(), step]) ** 2).sum().backward()
    assert group.grad_buffer.dtype == (torch.bfloat16 if is_kept else torch.float32)
    params = list(plain.parameters())
    grads = [[torch.autograd.grad((plain(x.bfloat16()) ** 2).sum(), params) for x in mine] for mine in inputs]
    for index, (name, param) in enumerate(model.named_parameters()):
        found = param.grad.full_tensor()
        total = sum(first[index].float() + second[index].float() for first, second in grads) / 2
        assert torch.equal(found, total), (name, (found - total).abs().max())
        assert name.startswith("1") or not torch.equal(found, found.bfloat16().float()), f"{name} is rounded"


def wide_gradients_end_a_pass():
    """The last gradient of a pass makes the buffer wide: the next pass adds nothing to it, as its memory has old sums."""
    torch.manual_seed(0)
    plain = nn.Sequential(WideLinear(), nn.RMSNorm(32))
    model, policy = copy.deepcopy(plain), MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    with mock.patch("torch_ragged.fsdp.core._fsdp_param_group._KEEPS_WIDE_GRADIENTS", True):
        shard(model, [], mp_policy=policy)
        model.set_persistent_buffers()
    plain.bfloat16()
    for param in plain.parameters():
        param.grad_dtype = None
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    expected = torch.autograd.grad((plain(x.bfloat16()) ** 2).sum(), list(plain.parameters()))
    for step in range(3):
        (model(x) ** 2).sum().backward()
        for param, gradient in zip(model.parameters(), expected, strict=True):
            assert torch.equal(param.grad.full_tensor(), gradient.float()), step
        model.zero_grad()


class TwoTables(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Embedding(64, 8), nn.Embedding(63, 8)

    def forward(self, tokens):
        return self.one(tokens).sum() + (self.two(tokens) ** 2).sum()


def adopted_gradients(policy):
    """The gradient of a lone table without padding is reduced where autograd put it; of one with padding, a copy of it."""
    torch.manual_seed(0)
    plain = TwoTables()
    model = copy.deepcopy(plain)
    shard(model, [model.one, model.two], mp_policy=policy)
    tokens = torch.arange(2 * 5).view(2, 5)[dist.get_rank()]
    kept, sources = {}, {}
    for name, table in (("one", model.one), ("two", model.two)):
        (group,) = table._ragged_fsdp_state.groups
        group.unshard()
        group.params[0].unsharded.register_hook(lambda gradient, name=name: kept.update({name: gradient.detach()}))
        inner = group.add_gradient

        def look(index, gradient, group=group, name=name, inner=inner):
            inner(index, gradient)
            sources[name] = group.grad_buffer.buffers()[0].flat.data_ptr()

        group.add_gradient = look
    for step in range(2):  # They add up.
        model.set_requires_gradient_sync(step == 1)
        model(tokens).backward()
        assert (sources["one"] == kept["one"].data_ptr()) == (step == 0 or policy.param_dtype is not None), step
        assert sources["two"] != kept["two"].data_ptr()
    totals = torch.autograd.grad(sum(2 * plain(each) for each in torch.arange(10).view(2, 5)) / 2, list(plain.parameters()))
    for param, total in zip(model.parameters(), totals, strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), total, rtol=2**-7 if policy.param_dtype else 1e-6, atol=0)
    alone = torch.autograd.grad(plain(tokens), list(plain.parameters()))
    torch.testing.assert_close(kept["one"].float(), alone[0])  # Nobody took it away.


class BackwardTest(unittest.TestCase):
    @ranks(2)
    def test_a_gradient_beside_the_reduction_of_its_group_waits_for_it():
        """A gradient that comes while its group is reduced waits for that, and leaves the replicas' all-reduce for later.

        It need not come to all ranks.
        """
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM))
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh).set_manual_backward_finalization(True)
        model.set_reduce_scatter_max_input_buffers(2)
        model(torch.ones(2, DIM)).sum().backward()
        groups = [layer._ragged_groups(False)[0] for layer in model]
        assert all(group.reduction._output is not None for group in groups)
        collectives = groups[0].collectives
        with mock.patch.object(collectives, "all_reduce", side_effect=AssertionError("an all-reduce")):
            if dist.get_rank() == 0:
                groups[0].is_unhooked = False  # As of a parameter that this rank alone uses after unshard().
                groups[0].before_gradient()
                assert groups[0].grad_buffer.views()
        model.finalize_backward()
        found = [param.grad.full_tensor() for param in model.parameters()]
        plain = nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(2)))
        with torch.no_grad():
            for mine, param in zip(plain.parameters(), model.parameters(), strict=True):
                mine.copy_(param.full_tensor())
        for mine, expected in zip(
            found, torch.autograd.grad(plain(torch.ones(2, DIM)).sum(), list(plain.parameters())), strict=True
        ):
            torch.testing.assert_close(mine, expected)

    def test_ranks_may_use_different_groups(self):
        run_ranks(3, check_ranks_use_different_groups)

    @ranks(2)
    def test_groups_that_no_rank_uses_have_no_gradient():
        """A group that no rank uses keeps ``.grad`` None, whether ranks agree on that beforehand or not."""
        for takes_part in (True, False):
            model = shard(branches := Branches(), [*branches.heads])
            model.set_reduce_scatter_unused_params(takes_part)
            loss_of_some(model, torch.ones(2, DIM), [0]).backward()
            assert [head.weight.grad is None for head in model.heads] == [False, True, True, True, True]

    @ranks(2)
    def test_outputs_may_be_changed_in_place():
        for bias in (False, True):
            for smallest in (1, 2**62):
                torch.manual_seed(1)
                single = InPlace(bias)
                torch.manual_seed(1)
                model = InPlace(bias)
                with mock.patch("torch_ragged.fsdp.core._fsdp_param_group.SMALLEST_WRITTEN_IN_PLACE", smallest):
                    shard(model, [model.first, model.second, model.last], reshard_after_forward=True)
                delay_collectives(model)
                for _ in range(2):
                    x = torch.randn(2, 3, DIM)
                    for each in (model, single):
                        each(x).square().sum().backward()
                    compare_gradients(model, single)

    @ranks(2)
    def test_outputs_may_be_dataclasses_and_packed_sequences():
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
        models = []
        peer = torch_fully_shard if torch.__version__ >= "2.13" else fully_shard  # In 2.11 FSDP2 does not know dataclasses.
        for each in (fully_shard, peer):
            torch.manual_seed(0)
            model = nn.Sequential(*(Objects(nn.Linear(DIM, DIM)) for _ in range(3)))
            models.append(shard(model, model, each, mp_policy=policy, reshard_after_forward=True))
        for _ in range(2):
            outputs = [model(Hidden(torch.ones(2, DIM), {"input": torch.ones(1)})) for model in models]
            for output in outputs:
                assert type(output) is Hidden and output.value.dtype == output.rest["input"].dtype == torch.float32
            assert torch.equal(outputs[0].value, outputs[1].value)
            assert all(isinstance(p, DTensor) for layer in models[0] for p in layer.parameters(recurse=True))  # resharded
            with torch.no_grad():  # Reshards, so that backward all-gathers again.
                models[0](Hidden(torch.ones(2, DIM), {"input": torch.ones(1)}))
            for output in outputs:
                output.value.sum().backward()
            for mine, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
                torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad.full_tensor())
        recurrent = shard(recurrent := Recurrent(), [recurrent.layer], mp_policy=policy, reshard_after_forward=True)
        packed = pack_padded_sequence(torch.ones(4, 2, DIM), torch.tensor([4, 2], device="cpu"))
        output = recurrent(packed)
        assert isinstance(output, PackedSequence) and output.data.dtype == torch.float32
        output.data.sum().backward()
        assert all(p.grad is not None for p in recurrent.parameters())

    @ranks(2)
    def test_gradients_are_reduced_group_by_group():
        for kind in ("plain", "not reentrant", "reentrant", "a forward without backward"):
            torch.manual_seed(0)
            model = nn.Sequential(*(Checkpointed(kind == "reentrant") for _ in range(6)))
            if kind == "plain":
                for block in model:
                    block.forward = lambda x, block=block: x + block.experts(block.attention(x).relu())
            shard(model, [*(block.experts for block in model), *model], reshard_after_forward=True)
            kept = model(torch.ones(2, DIM, requires_grad=True)) if kind == "a forward without backward" else None
            assert 1 <= most_gradient_buffers(model) <= 2, kind
            del kept

    @ranks(2)
    def test_a_group_frozen_during_accumulation_keeps_what_it_has():
        grads = []
        for each in (fully_shard, torch_fully_shard):
            torch.manual_seed(0)
            model = nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(3)))
            shard(model, model, each)
            x = torch.ones(2, DIM)
            model.set_requires_gradient_sync(False)
            model(x).sum().backward()
            model.set_requires_gradient_sync(True)
            model[1].requires_grad_(False)
            model(x).sum().backward()
            accumulated = model[1].weight.grad.full_tensor().clone()
            model.zero_grad()
            model[1].requires_grad_(True)
            model(x).sum().backward()
            grads.append((accumulated, model[1].weight.grad.full_tensor()))
        for mine, theirs in zip(*grads):
            torch.testing.assert_close(mine, theirs)

    def test_wide_gradients_are_not_rounded(self):
        run_ranks(2, wide_gradients, BigLinear, True)
        run_ranks(2, wide_gradients, WideLinear, False)
        run_ranks(2, wide_gradients_end_a_pass)

    @unittest.skipUnless(DEVICE == "cpu", "over NCCL, a reduction in flight holds no second buffer")
    @ranks(2)
    def test_no_more_gradient_buffers_are_held_than_allowed():
        """Over gloo a reduction in flight, which holds a second buffer, ends before other gradients have a buffer."""
        for reductions in (None, 1, 2):
            model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
            for layer in model:
                fully_shard(layer)
            fully_shard(model)
            if reductions is not None:
                model.set_reduce_scatter_max_input_buffers(reductions)
            logs = [layer._ragged_groups(False)[0].memory.gradients for layer in model]
            for log in logs:
                log.start()
            model(torch.ones(2, 64)).sum().backward()
            events = [nbytes for _, nbytes in sorted(event for log in logs for event in log.events)]
            held = [
                total // events[0] for total, nbytes in zip(itertools.accumulate(events), events, strict=True) if nbytes > 0
            ]
            assert held == [1, *[reductions or 1] * 3], held

    def test_a_gradient_that_fills_its_buffer_is_not_copied(self):
        for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16, torch.float32)):
            run_ranks(2, adopted_gradients, policy)


# -- offload -----------------------------------------------------------------------------------------------------------


class OffloadTest(unittest.TestCase):
    @ranks(4)
    def test_gradients_in_host_memory_have_the_bits_of_those_on_the_device():
        """Beside what changes shards, reductions, or when gradients are set. The second pass adds to ``.grad``."""
        line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "rank"))

        def hooks(model):
            for param in model.parameters():
                param.register_hook(lambda gradient: gradient * 2)

        def dtypes(model):
            for param in list(model.parameters())[::2]:
                param.grad_dtype = torch.float64

        cases = {
            "plain": (line, {}, None),
            "HSDP": (square, {}, None),
            "HIERARCHICAL": (square, {"placements": HIERARCHICAL}, None),
            "ZERO1": (line, {"placements": ZERO1}, None),
            "ZERO2": (line, {"placements": ZERO2}, None),
            "weights": (line, {"weights": [3, 0, 1, 2]}, None),
            "bfloat16": (line, {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}, None),
            "two reductions in flight": (line, {}, lambda model: model.set_reduce_scatter_max_input_buffers(2)),
            "hooks on gradients": (line, {}, hooks),
            "dtypes of gradients": (line, {}, dtypes),
        }
        for name, (mesh, options, prepare) in cases.items():
            found = []
            for offload in ({}, {"offload_policy": CPUOffloadPolicy(pin_memory=DEVICE != "cpu")}):
                torch.manual_seed(0)
                layers = [nn.Linear(DIM, DIM) for _ in range(3)]
                model = nn.Sequential(*layers)
                for module in (*layers, model):
                    fully_shard(module, mesh=mesh, **options, **offload)
                if prepare is not None:
                    prepare(model)
                for step in range(2):
                    model(torch.full((2, DIM), 1.0 + step + dist.get_rank())).square().sum().backward()
                found.append([param.grad.to_local().cpu() for param in model.parameters()])
            assert all(map(torch.equal, *found)), name

    @unittest.skipIf(DEVICE == "cpu", "gradients are in host memory")
    @ranks(2)
    def test_gradients_are_copied_to_host_memory_while_backward_goes_on():
        def is_copied(layer):
            """Whether the reduced gradients are on their way to host memory."""
            return layer._ragged_states(False)[0].groups[0].reduction._moved is not None

        layers, copied = [nn.Linear(DIM, DIM) for _ in range(4)], []
        model = shard(nn.Sequential(*layers), layers, offload_policy=CPUOffloadPolicy())

        def look(module, inputs, output):
            output.register_hook(lambda gradient: copied.append(list(map(is_copied, layers))))

        layers[0].register_forward_hook(look)
        for _ in range(2):
            model(torch.ones(2, DIM)).sum().backward()
        # The reduction of the second layer is in flight, and the first one's has not begun.
        assert copied == [[False, False, True, True]] * 2, copied
