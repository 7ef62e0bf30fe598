"""deferred_init and materialize: the parameters, buffers and random state of a construction on a single device, to the bit."""

import importlib.util
import itertools
import unittest
import warnings

import pytest
import torch
from common import enter_fake_group, error_of, ranks
from delays import undelayed
from soon import soon
from tested_device import DEVICE
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.utils import parametrizations
from torch.profiler import ProfilerActivity, profile

from torch_ragged import RaggedShard
from torch_ragged.fsdp import CPUOffloadPolicy, fully_shard, rows
from torch_ragged.random import deferred_init, materialize
from torch_ragged.tensor._from_meta import FromMeta


class Odd(nn.Module):
    """All ways to make tensors that we know of."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 5, padding_idx=2)
        self.tied = nn.Linear(5, 7, bias=False)
        self.tied.weight = self.embedding.weight
        self.truncated, self.partly = nn.Linear(5, 6), nn.Linear(6, 7)
        nn.init.trunc_normal_(self.truncated.weight, std=0.02)
        nn.init.trunc_normal_(self.truncated.weight, std=1.0, a=-1, b=1)
        with torch.no_grad():
            self.partly.weight[2:4].mul_(3.0)
            self.partly.weight[:, 1].zero_()
            self.partly.weight[1].normal_()
            self.partly.weight[:, 2:5].uniform_()
            self.partly.weight.t()[0].fill_(2.0)
            self.partly.bias.copy_(torch.arange(7))
            self.truncated.weight.view(torch.int32)[4].fill_(7)  # The bits of small numbers.
        self.assigned = nn.Parameter(torch.randn(5, 6) * 0.02 + 1)
        self.transposed = nn.Parameter(torch.rand(9, 8).exp().t())
        self.views = nn.ParameterList(torch.randn(6, 4).chunk(2))
        self.scaled = nn.Parameter(torch.ones(4) * torch.rand(()) + torch.rand(4))
        self.broadcast = nn.Parameter(torch.rand(3, 1) + torch.rand(1, 4))
        self.register_buffer("inverse", 1.0 / (10000 ** (torch.arange(0, 8, 2) / 8)))
        self.same_as_buffer = self.inverse
        self.rates = [x.item() for x in torch.linspace(0, 0.3, 4)] + torch.linspace(0, 1, 3).tolist()
        self.lists = {"of tensors": [torch.arange(3) * 2]}
        self.attention, self.norm, self.statistics = nn.MultiheadAttention(8, 2), nn.LayerNorm(5), nn.BatchNorm1d(4)
        self.recurrent, self.convolution = nn.LSTM(3, 4), nn.Conv2d(2, 3, 3)
        self.orthogonal, self.sparse = nn.Parameter(torch.empty(5, 6)), nn.Parameter(torch.empty(4, 4))
        nn.init.orthogonal_(self.orthogonal)
        nn.init.sparse_(self.sparse, 0.5)
        self.copies = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.forked = nn.Parameter(torch.randn(3, 3))
        with torch.random.fork_rng():
            self.before = nn.Parameter(torch.rand(4, 3))
        self.same_numbers = nn.Parameter(torch.rand(4, 3))
        self.filled = nn.ParameterList(
            [torch.full((3, 2), 2.5), torch.full_like(self.before, 3), self.before.new_full((3,), 4)]
        )
        self.from_overlapping = nn.Parameter(torch.empty_strided((2, 3), (1, 1)).copy_(torch.rand(2, 3)).contiguous())
        generator = torch.Generator(torch.get_default_device()).manual_seed(5)
        self.given = nn.ParameterList([torch.randn(20, generator=generator), torch.empty(20).normal_(generator=generator)])
        self.permuted, self.odd_count = nn.Parameter(torch.randperm(9).float()), nn.Parameter(torch.randn(17))
        self.integers, self.chosen = nn.Buffer(torch.randint(3, 9, (4, 4))), nn.Buffer(torch.bernoulli(torch.rand(5, 5)))
        self.normalized = parametrizations.weight_norm(nn.Linear(4, 4))
        self.narrow, self.wide = nn.Linear(4, 20, dtype=torch.bfloat16), nn.Linear(4, 20).double()
        self.read = nn.Parameter(torch.randn(3))
        if self.read.sum() > 0:  # A value of random numbers.
            nn.init.normal_(self.read)
        self.scalar, self.nothing = nn.Parameter(torch.rand(())), nn.Parameter(torch.empty(0, 3).normal_())


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))


def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_local_experts": 3}
    return MixtralForCausalLM(MixtralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))


def dit():
    from diffusers import DiTTransformer2DModel

    sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "num_layers": 2, "sample_size": 8}
    return DiTTransformer2DModel(**sizes, num_embeds_ada_norm=10, norm_num_groups=4)


def vit():
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4, drop_path_rate=0.1)


def random_state():
    """Of the CPU's default generator, and of the device's."""
    states = [torch.get_rng_state()]
    if DEVICE != "cpu":
        states.append(torch.get_device_module(DEVICE).get_rng_state().cpu())
    return torch.cat(states)


def on_one_device(function, seed=3):
    """The state dict, all buffers, and the random state after a construction."""
    torch.manual_seed(seed)
    torch.rand(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = function()
    return module.state_dict(), dict(module.named_buffers()), random_state()


def deferred(function, seed=3):
    torch.manual_seed(seed)
    torch.rand(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = deferred_init(function)
    assert all(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
    return module


def check_equal(module, expected, case=""):
    states, buffers, state = expected
    assert torch.equal(random_state(), state), case
    found = module.state_dict()
    assert list(found) == list(states), case
    for name, want in (*states.items(), *buffers.items()):
        got = found[name] if name in found else module.get_buffer(name)
        got = whole(got)
        assert torch.equal(got, want) and got.dtype == want.dtype, f"{case} {name}"


def whole(tensor):
    """The whole tensor; an offloaded one cannot be gathered where it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    local = tensor.to_local().to(tensor.device_mesh.device_type)
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    ).full_tensor()


def zeroed(module):
    nn.init.zeros_(module.first.weight)
    return module


def shard_lists(module, **options):
    for each in reversed(list(module.modules())):
        if isinstance(each, nn.ModuleList):
            for layer in each:
                fully_shard(layer, **options)
    return fully_shard(module, **options)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 3)


LAYOUTS = ([Replicate(), Shard(0)], [Shard(0), Shard(0)], [RaggedShard((), (0, 1)), Replicate()])


def check_by_hand(ways):
    """For each way, a module of which each parameter gets the next layout of the way."""
    mesh, want = init_device_mesh("cpu", (2, 2)), on_one_device(Odd)
    for number, layouts in enumerate(ways):
        module, done = deferred(Odd), {}
        for each in module.modules():
            for name, parameter in each._parameters.items():
                if parameter is not None and parameter.ndim and parameter not in done:
                    done[parameter] = nn.Parameter(distribute_tensor(parameter.detach(), mesh, next(layouts)))
                if parameter is not None and parameter.ndim:
                    each._parameters[name] = done[parameter]
        materialize(module)
        check_equal(module, want, f"way {number}")


def sharded_by_rows(function):
    """The bytes of this rank's shards of a deferred module, and the most that were allocated to make them."""
    mesh = init_device_mesh("cpu", (2,))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watch:
        module = deferred_init(function)
        for layer in module:
            for name, parameter in list(layer._parameters.items()):
                layer._parameters[name] = nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)]))
        materialize(module)
    most, total = 0, 0
    stack = list(watch.profiler.kineto_results.experimental_event_tree())
    events = []
    while stack:
        event = stack.pop()
        stack += event.children
        if event.tag == torch._C._profiler._EventType.Allocation:
            events.append((event.start_time_ns, event.extra_fields.alloc_size))
    for _, size in sorted(events):
        total += size
        most = max(most, total)
    return sum(parameter.to_local().nbytes for parameter in module.parameters()), most


class DeferredInitTest(unittest.TestCase):
    def test_a_module_has_the_bits_of_a_construction(self):
        want = on_one_device(Odd)
        module = deferred(Odd)
        self.assertIs(materialize(module), module)
        check_equal(module, want)
        self.assertIs(module.tied.weight, module.embedding.weight)
        self.assertTrue(torch.equal(module.same_as_buffer, module.inverse))
        self.assertEqual(module.lists["of tensors"][0].tolist(), [0, 2, 4])
        torch.manual_seed(3)
        self.assertEqual(module.rates, Odd().rates)
        strides = [(a.stride(), b.stride()) for a, b in zip(want[0].values(), module.state_dict().values())]
        self.assertTrue(all(a == b for a, b in strides), strides)

    def test_a_default_dtype_of_the_construction_holds_in_the_replay(self):
        class Rotary(nn.Module):
            def __init__(self):
                super().__init__()
                self.scale = nn.Parameter(torch.ones(3) / 3)
                for name, value in (("steps", torch.linspace(-1, 1, 8)), ("inverse", 1 / 7 ** (torch.arange(4) / 4))):
                    self.register_buffer(name, value, persistent=False)
                self.noise = nn.Parameter(torch.randn(5))

        for dtype in (torch.float64, torch.bfloat16):  # As a class of transformers is built in a dtype of its config.

            def make(dtype=dtype):
                before = torch.get_default_dtype()
                torch.set_default_dtype(dtype)
                try:
                    return Rotary()
                finally:
                    torch.set_default_dtype(before)

            check_equal(materialize(deferred(make)), on_one_device(make))
            self.assertEqual(torch.get_default_dtype(), torch.float32)

    def test_modules_one_after_another_continue_one_stream(self):
        torch.manual_seed(1)
        first, second = nn.Linear(9, 9), Two()
        after, later = random_state(), torch.rand(3)
        torch.manual_seed(1)
        lazy, lazier = deferred_init(nn.Linear, 9, 9), deferred_init(Two)
        for part in (lazier.second, lazy, lazier.first):  # In any order, and in parts.
            materialize(part)
        for a, b in ((first, lazy), (second, lazier)):
            for x, y in zip(a.parameters(), b.parameters()):
                self.assertTrue(torch.equal(x, y))
        self.assertTrue(torch.equal(random_state(), after))
        self.assertTrue(torch.equal(torch.rand(3), later))

    def test_a_generator_that_was_used_since_is_left_alone(self):
        torch.manual_seed(1)
        lazy = deferred_init(nn.Linear, 4, 4)
        torch.manual_seed(7)
        want = random_state()
        materialize(lazy)
        self.assertTrue(torch.equal(random_state(), want))
        torch.manual_seed(1)
        self.assertTrue(torch.equal(lazy.weight, nn.Linear(4, 4).weight))

    def test_two_recordings_after_one_seed_do_not_end_each_other(self):
        torch.manual_seed(1)
        first = deferred_init(nn.Linear, 4, 4)
        torch.manual_seed(1)
        second = deferred_init(nn.Linear, 9, 9)
        materialize(first)
        materialize(second)
        after = random_state()
        torch.manual_seed(1)
        self.assertTrue(torch.equal(second.weight, nn.Linear(9, 9).weight))
        self.assertTrue(torch.equal(after, random_state()))

    def test_numbers_are_those_of_the_device_of_the_construction(self):
        """The meta device stands for a GPU: it has no numbers, and the construction's generator advances as ever."""
        want = on_one_device(Two)[2]
        module = materialize(deferred(Two), device="meta")
        self.assertTrue(module.first.weight.is_meta)
        self.assertTrue(torch.equal(random_state(), want))

    def test_what_cannot_be_replayed_is_an_error(self):
        outside = torch.zeros(3)

        def writes():
            outside.normal_()
            return nn.Linear(2, 2)

        error = error_of(lambda: deferred_init(writes))
        self.assertIn("aten.normal_.default at", error)
        self.assertIn("test_deferred_init.py", error)
        self.assertIn("writes to a tensor that deferred_init has not made", error)
        self.assertEqual(outside.tolist(), [0, 0, 0])
        self.assertIn("Tensor, expected a torch.nn.Module", error_of(lambda: deferred_init(lambda: torch.ones(2))))
        module = deferred_init(Two)
        module.first.weight = nn.Parameter(torch.empty(7, 6, device="meta"))
        self.assertIn("first.weight is on the meta device, but deferred_init did not", error_of(lambda: materialize(module)))
        self.assertTrue(module.second.weight.is_meta, "nothing is allocated")
        on_meta = deferred_init(lambda: nn.Linear(2, 2, device="meta"))
        self.assertIn("weight is on the meta device, but deferred_init did not", error_of(lambda: materialize(on_meta)))

        def draws_of_no_probability():
            layer = nn.Linear(3, 3)
            layer.bias.data.copy_(torch.bernoulli(torch.full((3,), 2.0)))
            return layer

        error = error_of(lambda: materialize(deferred_init(draws_of_no_probability)))
        self.assertRegex(
            error, r"materialize: aten\.bernoulli\.default at .*test_deferred_init\.py:\d+ cannot be replayed: .*p_in"
        )

        def fails():
            nn.Linear(3, 3)
            raise KeyError("of the user")

        before = random_state()
        self.assertIn("of the user", error_of(lambda: deferred_init(fails)))
        self.assertTrue(torch.equal(random_state(), before))
        self.assertIs(type(nn.Linear(2, 2).weight), nn.Parameter, "no mode is left")

    def test_a_shard_has_its_elements_of_a_construction(self):
        """One rank of two, without the other one."""
        enter_fake_group(self, 2, rank=1)
        mesh, numbers = init_device_mesh("cpu", (2,)), torch.arange(6.0)

        def make():
            module = nn.ParameterDict({name: torch.randn(4, 6) for name in ("constant", "interval", "diagonal", "element")})
            with torch.no_grad():
                module["constant"].mul_(numbers)
                module["interval"].view(-1)[4:15].fill_(1)
                module["diagonal"].diagonal().fill_(1)
                module["element"][1, 4] = 1
            module["chosen"] = torch.empty(4, 6).bernoulli_(torch.rand(4, 6))
            generator = torch.Generator().manual_seed(5)
            for name in ("order", "next order"):
                module[name] = torch.randperm(24, generator=generator).view(4, 6).float()
            return module

        want, _, state = on_one_device(make)
        for dim in range(2):
            module = deferred(make)
            for name, param in list(module.items()):
                module[name] = nn.Parameter(distribute_tensor(param.detach(), mesh, [Shard(dim)]))
            materialize(module)
            for name, value in want.items():
                self.assertTrue(torch.equal(module[name].to_local(), value.chunk(2, dim)[1]), (name, dim))
            self.assertTrue(torch.equal(random_state(), state))

    def test_parameters_of_fully_shard_stay_the_same_objects(self):
        """An optimizer may have them already."""
        enter_fake_group(self, 2)
        module = fully_shard(deferred(Two), mesh=init_device_mesh("cpu", (2,)))
        before = list(module.parameters())
        materialize(module)
        self.assertTrue(all(a is b for a, b in zip(before, module.parameters(), strict=True)))

    @ranks(2)
    def test_sharded_modules_have_the_bits_of_a_construction():
        mesh = init_device_mesh("cpu", (2,))
        want = on_one_device(Odd)
        policies = (None, lambda name, parameter: rows(2) if parameter.ndim == 2 else None)
        for number, policy in enumerate(policies):
            module = deferred(Odd)
            shard_lists(module, mesh=mesh, orig_param_policy=policy)
            materialize(module)
            check_equal(module, want, str(number))
            assert module.tied.weight is module.embedding.weight

    @ranks(4)
    def test_tensors_distributed_by_hand_have_the_bits_of_a_construction():
        check_by_hand([itertools.cycle(LAYOUTS)])

    @pytest.mark.slow
    @ranks(4)
    def test_tensors_distributed_by_hand_in_each_way_have_the_bits_of_a_construction():
        check_by_hand(map(itertools.repeat, LAYOUTS))

    @ranks(2)
    def test_offload_and_other_ways_to_initialize_give_the_same_numbers():
        mesh, options = init_device_mesh("cpu", (2,)), {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
        want = on_one_device(Two)
        module = materialize(shard_lists(deferred(Two), mesh=mesh, **options))
        check_equal(module, want)
        assert {param.to_local().device.type for param in module.parameters()} == {"cpu"}
        if DEVICE != "cpu":  # Below, the CPU draws.
            return
        torch.manual_seed(3)
        torch.rand(3)
        with torch.device("meta"):
            module = Two()
        shard_lists(module, mesh=mesh, **options).to_empty(device="cpu")
        for each in (module.first, module.second):
            each.reset_parameters()
        check_equal(module, want)

    def test_tensors_leave_the_meta_device_for_where_they_belong(self):
        """A flat buffer of fully_shard is told; a plain tensor of a module waits for the device of its construction."""
        meta, real = torch.empty(3, device="meta"), torch.empty(3)
        self.assertIs(FromMeta()(meta), meta)
        self.assertIs(FromMeta("cpu").at("meta")(real), real)
        for each in (FromMeta().at("cpu"), FromMeta("cpu").at("meta")):
            self.assertEqual((each(meta).device.type, each(meta).shape), ("cpu", meta.shape))

    def test_initializers_of_other_tensors_stay_as_they_are(self):
        for _ in range(2):
            deferred_init(lambda: nn.Linear(2, 2))
        for name, shape, *args in (
            ("orthogonal_", (3, 5)),
            ("orthogonal_", (3, 5), 2.0),
            ("dirac_", (4, 3, 3)),
            ("dirac_", (4, 3, 3), 2),
            ("sparse_", (3, 4), 0.5),
            ("trunc_normal_", (3, 4), 1.0),
        ):
            function, meta, real = getattr(nn.init, name), torch.empty(shape, device="meta"), torch.empty(shape, device="cpu")
            self.assertIs(function(meta, *args), meta)
            self.assertIs(function(real, *args), real)
            if name == "orthogonal_":
                torch.testing.assert_close(real @ real.T, torch.eye(3) * (args or [1.0])[0] ** 2)

    @ranks(2)
    def test_seeds_that_differ_raise_on_all_ranks():
        mesh = init_device_mesh("cpu", (2,))
        module = shard_lists(deferred(Two, seed=mesh.get_rank()), mesh=mesh)
        error = error_of(lambda: materialize(module))
        called = "ValueError: torch_ragged.random.materialize was called differently on different ranks: "
        assert error.startswith(f"{called}rank 0 has random state "), error
        advice = "call torch.manual_seed with one seed on all ranks before deferred_init, and build the same module"
        assert error.endswith(f": {advice}"), error
        assert module.first.weight.is_meta, "nothing is allocated"

    @ranks(2)
    def test_ops_on_other_tensors_may_differ_between_ranks():
        """One rank imports a package in the construction, which makes constants; another rank has imported it before."""
        mesh, want = init_device_mesh("cpu", (2,)), on_one_device(Two)

        def make():
            [torch.ones(3) for _ in range(mesh.get_rank())]
            return Two()

        check_equal(materialize(shard_lists(deferred(make), mesh=mesh)), want)
        other = shard_lists(deferred(lambda: zeroed(Two()) if mesh.get_rank() else Two()), mesh=mesh)
        error, text = (
            error_of(lambda: materialize(other)),
            "differently on different ranks: first.weight: 2 ops on rank 0, 3 ops on ",
        )
        assert f"{text}rank 1: call torch.manual_seed" in error, error

    @ranks(2)
    @soon()
    def test_a_module_that_one_rank_did_not_record_raises_on_both():
        mesh = init_device_mesh("cpu", (2,))
        with torch.device("meta"):
            module = Two()
        if mesh.get_rank():
            module = deferred(Two)
        error = error_of(lambda: materialize(shard_lists(module, mesh=mesh)))
        assert "is on the meta device, but deferred_init did not make it" in error and module.first.weight.is_meta, error

    @undelayed
    @unittest.skipUnless(DEVICE == "cpu", "the profiler counts the CPU's allocations")
    @ranks(2)
    def test_it_allocates_the_local_shards_once_and_a_chunk():
        class Drawn(nn.Module):
            """Of several kinds of ops. Each tensor is too large to be made whole, with what it is made of."""

            def __init__(self):
                super().__init__()
                self.uniform, self.chosen = nn.Parameter(torch.rand(512, 512)), nn.Parameter(torch.rand(144, 512).bernoulli())
                self.scaled, self.pair = nn.Parameter(torch.randn(512, 512)), nn.Parameter(torch.empty(1 << 17, 2))
                with torch.no_grad():
                    self.scaled.mul_(0.5).add_(1)
                    self.pair[1:5].fill_(2)
                    self.pair[7, 1] = 3

        def function():
            module = nn.Sequential(*(nn.Linear(512, 513) for _ in range(4)))  # Of 513 rows, the first rank has one more.
            for layer in module:
                nn.init.normal_(layer.weight, std=0.02)
            return module.append(Drawn())

        local, most = sharded_by_rows(function)
        assert local <= most < local + 2**19, (local, most - local)

    @undelayed
    @unittest.skipUnless(DEVICE == "cpu", "the profiler counts the CPU's allocations")
    @ranks(2)
    def test_what_a_whole_tensor_is_made_of_is_freed_before_the_next_one():
        """An exponential is computed of whole tensors, of 1 MiB each."""
        local, most = sharded_by_rows(
            lambda: nn.Sequential(nn.ParameterList(nn.Parameter(torch.rand(512, 512).exp()) for _ in range(4)))
        )
        assert local + 5 * 2**20 <= most < local + 5.5 * 2**20, (local, most - local)

    @unittest.skipUnless(importlib.util.find_spec("transformers"), "needs transformers")
    @ranks(2)
    def test_models_of_transformers():
        mesh = init_device_mesh("cpu", (2,))
        for function in (llama, mixtral):
            check_equal(materialize(shard_lists(deferred(function), mesh=mesh)), on_one_device(function), function.__name__)

    @unittest.skipUnless(importlib.util.find_spec("diffusers"), "needs diffusers")
    @ranks(2)
    def test_a_model_of_diffusers():
        mesh, want = init_device_mesh("cpu", (2,)), on_one_device(dit)
        check_equal(materialize(shard_lists(deferred(dit), mesh=mesh)), want)

    @unittest.skipUnless(importlib.util.find_spec("timm") and importlib.util.find_spec("torchvision"), "needs timm")
    @ranks(2)
    def test_a_model_of_timm():
        mesh, want = init_device_mesh("cpu", (2,)), on_one_device(vit)
        check_equal(materialize(fully_shard(deferred(vit), mesh=mesh)), want)
