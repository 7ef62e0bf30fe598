"""Rules of ``fsdp/core`` that one rank shows, in one process."""

import unittest
from unittest import mock

import torch
from common import error_of, fake_group
from fsdp_one_rank import BFLOAT16, WIDTH, OneRankTest, groups_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from torch_ragged.fsdp import ZERO2, Float8Policy, fully_shard
from torch_ragged.fsdp.core._fsdp_param_group import FSDPCommContext
from torch_ragged.random import deferred_init


class Branches(nn.Module):
    """Two layers, of which a forward runs the first only."""

    def __init__(self):
        super().__init__()
        self.used, self.skipped = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.used(x)


class Interrupted(nn.Linear):
    error: "type[BaseException] | None" = None

    def forward(self, x):
        if self.error is not None:
            raise self.error("on purpose")
        return super().forward(x)


class ReturnsWeight(nn.Linear):
    def forward(self, x):
        return self.weight.t()


class ReplacedParameterTest(OneRankTest):
    def test_a_module_that_does_not_run_registers_its_old_parameter_with_the_new_values(self):
        model = Branches()
        fully_shard(model.used, mesh=self.mesh), fully_shard(model.skipped, mesh=self.mesh), fully_shard(model, mesh=self.mesh)
        old = dict(model.named_parameters())
        new = {name: value.clone().detach() + 1 for name, value in model.state_dict().items()}
        model.load_state_dict(new, assign=True)
        model(torch.randn(2, WIDTH)).sum().backward()
        for name, parameter in model.named_parameters():
            self.assertIs(parameter, old[name])
            self.assertTrue(torch.equal(parameter.full_tensor(), new[name].full_tensor()), name)

    def test_parameters_assigned_to_a_model_on_meta_are_those_that_train(self):
        source = fully_shard(nn.Linear(WIDTH, WIDTH), mesh=self.mesh)
        with torch.device("meta"):
            model = nn.Linear(WIDTH, WIDTH)
        fully_shard(model, mesh=self.mesh)
        values = source.state_dict()
        for name, value in values.items():
            setattr(model, name, nn.Parameter(value.clone()))
        parameters = list(model.parameters())
        optimizer, x = torch.optim.SGD(parameters, lr=0.5), torch.ones(1, WIDTH)
        output = model(x)
        self.assertTrue(torch.equal(output, source(x)))
        output.sum().backward()
        before = values["bias"].full_tensor()
        optimizer.step()
        for parameter, other in zip(model.parameters(), parameters, strict=True):
            self.assertIs(parameter, other)
        self.assertTrue(torch.equal(model.bias.full_tensor(), before - 0.5))

    def test_the_forward_of_a_deferred_model_names_materialize_only(self):
        model = fully_shard(deferred_init(nn.Linear, WIDTH, WIDTH), mesh=self.mesh)
        error = error_of(model, torch.ones(1, WIDTH))
        self.assertTrue(error.endswith("materialize all parameters before forward, with materialize(model)"), error)

    def test_an_all_gather_without_memory_names_the_module_and_what_is_unsharded(self):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        for module in (model[0], model[1], model):
            fully_shard(module, mesh=self.mesh)
        full = RuntimeError("DefaultCPUAllocator: can't allocate memory")
        with mock.patch.object(model[1]._ragged_groups(False)[0].encoding, "all_gather", side_effect=full):
            error = error_of(model, torch.ones(1, WIDTH))
        self.assertRegex(
            error, "RuntimeError: DefaultCPUAllocator: can't allocate memory\nNo memory for the all-gather of weight"
        )
        self.assertIn(" of the module 1, beside 0 bytes", error)
        self.assertEqual(model(torch.ones(1, WIDTH)).shape, (1, WIDTH))

    def test_a_model_of_which_a_parameter_is_on_meta_does_not_run(self):
        source = fully_shard(nn.Linear(WIDTH, WIDTH), mesh=self.mesh).state_dict()
        with torch.device("meta"):
            model = nn.Linear(WIDTH, WIDTH)
        fully_shard(model, mesh=self.mesh)
        model.weight, meta = nn.Parameter(source["weight"].clone()), model.bias
        for bias in (meta, nn.Parameter(meta.detach().clone())):
            model.bias = bias
            self.assertRegex(error_of(model, torch.ones(1, WIDTH)), "RuntimeError: bias on the meta device: materialize all")
        model.bias = nn.Parameter(source["bias"].clone())
        expected = nn.functional.linear(torch.ones(1, WIDTH), source["weight"].full_tensor(), source["bias"].full_tensor())
        self.assertTrue(torch.equal(model(torch.ones(1, WIDTH)), expected))

    def test_a_conversion_keeps_a_value_that_was_assigned_to_one_parameter_in_the_new_dtype(self):
        model = self.sharded(nn.Linear(WIDTH, WIDTH))
        expected = model[0].weight.full_tensor().double() + 1
        model[0].weight = nn.Parameter(model[0].weight.detach().double() + 1)
        model.double()
        self.assertTrue(torch.equal(model[0].weight.full_tensor(), expected))
        model(torch.randn(2, WIDTH, dtype=torch.float64)).sum().backward()
        self.assertTrue(torch.equal(model[0].weight.full_tensor(), expected))


class ChangedParameterTest(OneRankTest):
    def test_a_change_of_an_unsharded_parameter_raises_and_is_undone(self):
        def write(layer):
            with torch.no_grad():
                layer.weight.add_(1)

        def write_by_a_view(layer):
            layer.weight.data.view(-1)[0] = 1

        def move(layer):
            layer.weight.data = layer.weight.data.clone()

        def reinterpret(layer):
            layer.weight.data = layer.weight.data.view(torch.float16)

        def replace(layer):
            layer.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))

        for change, is_seen in ((write, True), (write_by_a_view, False), (move, True), (reinterpret, True), (replace, True)):
            model = self.sharded(nn.Linear(WIDTH, WIDTH), mp_policy=BFLOAT16)
            (sharded,) = (p for name, p in model.named_parameters() if name == "0.weight")
            before, x = sharded.full_tensor(), torch.ones(1, WIDTH)
            model(x)
            expected = model(x)
            model[0].unshard()
            change(model[0])
            error = error_of(model[0].reshard)
            self.assertEqual("RuntimeError: weight changed while unsharded" in error, is_seen, change)
            self.assertIs(model[0].weight, sharded)
            self.assertTrue(torch.equal(sharded.full_tensor(), before))
            self.assertTrue(torch.equal(model(x), expected))

    def test_a_tied_embedding_that_renormalizes_may_write_to_its_weight(self):
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.head = nn.Linear(WIDTH, 3, bias=False)
                self.embedding = nn.Embedding(3, WIDTH, max_norm=0.1)
                self.embedding.weight = self.head.weight

            def forward(self, tokens):
                return self.head(self.embedding(tokens))

        single = Model()
        model = Model()
        model.load_state_dict(single.state_dict())
        fully_shard(model, mesh=self.mesh)
        tokens = torch.tensor([0, 2])
        for _ in range(2):
            self.assertTrue(torch.equal(model(tokens), single(tokens)))
            model.reshard()

    def test_storage_that_is_kept_is_kept_in_a_new_dtype(self):
        model = fully_shard(nn.Linear(WIDTH, WIDTH), mesh=self.mesh, mp_policy=BFLOAT16)
        model.set_keep_unsharded_storage(True)
        model.double()
        (group,) = groups_of(model)
        addresses = []
        for _ in range(2):
            model(torch.ones(1, WIDTH)).sum().backward()
            self.assertFalse(group.is_unsharded)
            self.assertTrue(group.encoding.buffer.is_allocated)
            addresses.append(group.encoding.buffer.flat.data_ptr())
        self.assertEqual(addresses[0], addresses[1])

    def test_a_module_around_others_has_a_slot_of_its_own(self):
        class Around(nn.Sequential):
            def __init__(self, *layers):
                super().__init__(*layers)
                self.gain = nn.Parameter(torch.ones(WIDTH))

            def forward(self, x):
                return super().forward(x) * self.gain

        inner = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
        middle = Around(*inner[:3])
        for module in (*inner, middle):
            fully_shard(module, mesh=self.mesh)
        model = fully_shard(nn.Sequential(middle, inner[3]), mesh=self.mesh)
        x = torch.ones(1, WIDTH)
        expected = model(x)
        model.set_persistent_buffers(True, places=2)
        for _ in range(2):
            self.assertTrue(torch.equal(model(x), expected))
            model(x).sum().backward()

    def test_buffers_may_be_chosen_while_a_module_is_unsharded(self):
        model = fully_shard(nn.Linear(WIDTH, WIDTH), mesh=self.mesh, mp_policy=BFLOAT16)
        expected = model(torch.ones(1, WIDTH))
        model.unshard()
        model.set_persistent_buffers(True)
        self.assertIsInstance(model.weight, DTensor)
        self.assertTrue(torch.equal(model(torch.ones(1, WIDTH)), expected))

    def test_a_conversion_to_integers_is_refused(self):
        model = self.sharded(nn.Linear(WIDTH, WIDTH))
        before = {name: value.full_tensor() for name, value in model.state_dict().items()}
        error = error_of(model._apply, lambda tensor: tensor.int())
        self.assertRegex(
            error, "ValueError: weight and 1 more is sharded in a buffer of torch.float32 and cannot become torch.int32"
        )
        for name, value in model.state_dict().items():
            self.assertTrue(torch.equal(value.full_tensor(), before[name]))


class InterruptedForwardTest(OneRankTest):
    def test_a_module_whose_forward_raised_is_sharded(self):
        model = self.sharded(Interrupted(WIDTH, WIDTH))
        x = torch.randn(2, WIDTH)
        model(x)
        model[0].error = KeyError
        self.assertIn("on purpose", error_of(model, x))
        self.assertIsInstance(model[0].weight, DTensor)
        self.assertFalse(any(group.is_gathered for group in groups_of(model[0])))

    def test_after_a_reset_no_module_counts_as_running(self):
        model = self.sharded(Interrupted(WIDTH, WIDTH, bias=False), placements=ZERO2, mp_policy=BFLOAT16)
        x = torch.ones(2, WIDTH)
        model(x)
        model[0].error = KeyboardInterrupt  # torch calls no hooks after it.
        with self.assertRaises(KeyboardInterrupt):
            model(x)
        model.reset_iter_state()
        model[0].error = None
        model[0].weight.to_local().data.fill_(1)
        self.assertTrue(torch.equal(model[0](x), torch.full((2, WIDTH), WIDTH, dtype=torch.bfloat16)))


class MemoryTest(OneRankTest):
    def test_a_new_model_has_memory_for_its_shards_only(self):
        for policy in (MixedPrecisionPolicy(), BFLOAT16, Float8Policy(tile=(1, 128))):
            model = self.sharded(nn.Linear(WIDTH, WIDTH), mp_policy=policy)
            self.assertEqual(groups_of(model)[0].sharded.placements, (Shard(0),))
            for name, buffers in groups_of(model)[0].buffers().items():
                self.assertEqual(any(buffer.is_allocated for buffer in buffers), name == "sharded", (policy, name))

    def test_a_module_that_returns_its_weight_stays_unsharded(self):
        for is_root in (True, False):
            model = fully_shard(ReturnsWeight(WIDTH, WIDTH), mesh=self.mesh, mp_policy=BFLOAT16)
            (weight,) = (value.full_tensor() for name, value in model.state_dict().items() if name == "weight")
            if not is_root:
                model = fully_shard(nn.Sequential(model), mesh=self.mesh)
            with torch.no_grad():
                output = model(torch.ones(1))
            self.assertTrue(torch.equal(output.clone(), weight.bfloat16().t()))


class HoldsTest(unittest.TestCase):
    @fake_group(2)
    def test_a_tensor_that_wraps_a_view_of_a_parameter_holds_it(self):
        mesh, other = init_device_mesh("cpu", (2,)), torch.zeros(2, WIDTH)
        for dim in (None, 1):
            cut = None if dim is None else (lambda parameter: Shard(1))
            model = fully_shard(nn.Linear(WIDTH, 2, bias=False), mesh=mesh, shard_placement_fn=cut)
            model.unshard()
            (group,) = groups_of(model)
            self.assertTrue(group.encoding.holds(model.weight))
            self.assertTrue(group.encoding.holds(model.weight.detach().view(-1)[1:]))
            self.assertTrue(group.encoding.holds(TwoTensor(other, model.weight.detach())))
            self.assertFalse(group.encoding.holds(other))
            self.assertFalse(group.encoding.holds(TwoTensor(other, other.clone())))


class OutputDtypeTest(OneRankTest):
    def test_every_output_has_it(self):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
        returning = fully_shard(ReturnsWeight(WIDTH, WIDTH), mesh=self.mesh, mp_policy=policy)
        self.assertEqual(returning(torch.ones(1)).dtype, torch.float64)
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
        fully_shard(layers, mesh=self.mesh, mp_policy=policy)  # The first one does not reshard.
        root, x = fully_shard(nn.Sequential(*layers), mesh=self.mesh, mp_policy=policy), torch.ones(1, WIDTH)
        seen = []
        layers[1].register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype), prepend=True)
        self.assertEqual(root(x).dtype, torch.float64)
        self.assertEqual(seen, [torch.float64])

    def test_a_recomputed_output_has_it(self):
        # Backward recomputes the layer before it reaches it, or when it reaches it.
        for is_before in (True, False):
            with self.subTest(is_before=is_before), set_checkpoint_early_stop(False):
                self.assertEqual(self.recomputed(is_before), [torch.float64] * 2)

    def recomputed(self, is_before):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
        layer, dtypes = fully_shard(nn.Linear(WIDTH, WIDTH), mesh=self.mesh, mp_policy=policy), []

        class Model(nn.Sequential):
            def forward(self, x):
                return checkpoint(self.inner, x, use_reentrant=False)

            def inner(self, x):
                output = self[0](x)
                dtypes.append(output.dtype)
                return output.sin() if is_before else output

        model = fully_shard(Model(layer), mesh=self.mesh)
        model(torch.ones(1, WIDTH, requires_grad=True)).sum().backward()
        return dtypes


class CommContextTest(unittest.TestCase):
    @fake_group(2)
    def test_what_was_issued_ahead_is_known_until_it_ends(self):
        layers, mesh = [nn.Linear(2, 2) for _ in range(4)], init_device_mesh("cpu", (2,))
        first, *others = [fully_shard(layer, mesh=mesh)._ragged_states(recurse=False)[0] for layer in layers]
        self.assertFalse(others[0].end_gathering())
        started = first._prefetch([*others], None, 0, step=1)  # Two, the most.
        self.assertEqual((started, first.comm.gathers), (others[:2], 2))
        self.assertFalse(others[2].end_gathering())
        others[0].join(others[0].context, FSDPCommContext())  # The count is in the limits that have it.
        self.assertTrue(others[0].end_gathering())
        self.assertFalse(others[0].end_gathering())
        self.assertEqual((first.comm.gathers, others[0].comm.gathers), (1, 0))
        self.assertEqual(first._prefetch(others[2:], None, 0, step=1), others[2:])

    def test_reductions_are_finished_in_the_order_of_issue(self):
        context = FSDPCommContext()
        a, b, c, d = (object() for _ in range(4))  # Groups.
        for entry in ([a, b], [c], [d]):
            context.reducing.append(entry)
        self.assertEqual((context.beyond(4), context.beyond(3), context.beyond(2)), ([], [a, b], [a, b, c]))
        context.forget([c])
        self.assertEqual((context.reducing, context.beyond(2)), ([[a, b], [d]], [a, b]))
        context.forget(context.beyond(2))
        self.assertEqual(context.reducing, [[d]])
        context.forget([a])
        self.assertEqual((context.beyond(2), context.beyond(1)), ([], [d]))


class NameTest(OneRankTest):
    def test_groups_have_the_names_of_their_modules(self):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        model[1].bias.data = model[1].bias.data.double()
        model[1].forward = lambda x: x @ model[1].weight
        for module in (*model, model):
            fully_shard(module, mesh=self.mesh)
        self.assertEqual([group.fqn for group in groups_of(model)], [""] * 3)
        model(torch.randn(2, WIDTH))
        names = ["0", "1", "1[1]"]
        self.assertEqual([group.fqn for group in groups_of(model)], names)
        self.assertEqual([group.named.fqn for group in groups_of(model)], names)

    def test_a_state_of_several_modules_has_all_their_names(self):
        modules = [nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)]
        fully_shard(modules, mesh=self.mesh)
        self.assertEqual(modules[0]._ragged_states(recurse=False)[0].name, "FSDPLinear, FSDPLayerNorm")


class Observer(nn.Linear):
    """Notes, at each call, which of ``others`` have been all-gathered ahead."""

    def forward(self, x):
        self.seen.append([groups_of(other)[0].is_gathered for other in self.others])
        return super().forward(x)


class PrefetchTest(OneRankTest):
    def observers(self, count):
        layers = [Observer(WIDTH, WIDTH) for _ in range(count)]
        for layer in layers:
            fully_shard(layer, mesh=self.mesh)
        for layer in layers:
            object.__setattr__(layer, "others", layers), object.__setattr__(layer, "seen", [])
        return layers

    def seen(self, model, layers):
        model(torch.ones(1, WIDTH))  # The first forward only learns the order.
        for layer in layers:
            layer.seen.clear()
        model(torch.ones(1, WIDTH))
        return [layer.seen for layer in layers]

    def test_one_module_is_gathered_ahead(self):
        layers = self.observers(3)
        model = fully_shard(nn.Sequential(*layers), mesh=self.mesh)
        self.assertEqual(self.seen(model, layers), [[[True, True, False]], [[False, True, True]], [[False, False, True]]])

    def test_no_more_modules_are_gathered_ahead_than_allowed(self):
        layers = self.observers(4)
        model = fully_shard(nn.Sequential(*layers), mesh=self.mesh)
        layers[0].set_modules_to_forward_prefetch(layers[1:])
        for layer in layers[1:]:
            layer.set_modules_to_forward_prefetch([])
        first, second, third, last = self.seen(model, layers)
        self.assertEqual(first, [[True, True, True, False]])
        self.assertEqual((second, third), ([[False, True, True, False]], [[False, False, True, False]]))
        self.assertEqual(last, [[False, False, False, True]])

    def test_a_module_that_runs_is_no_longer_gathered_ahead(self):
        layers = self.observers(4)
        model = fully_shard(nn.Sequential(*layers), mesh=self.mesh)
        (state,) = model._ragged_states(recurse=False)
        state.comm.max_gathers = 1
        ahead = [seen[0].count(True) for seen in self.seen(model, layers)]
        self.assertEqual(ahead, [2, 2, 2, 1])
        self.assertIs(state._comm_ctx, state.comm)  # Pipeline schedules read it under this name.

    def test_modules_of_one_group_gather_the_module_after_them_ahead(self):
        layers = [Observer(WIDTH, WIDTH) for _ in range(3)]
        fully_shard(layers[:2], mesh=self.mesh), fully_shard(layers[2], mesh=self.mesh)
        for layer in layers:
            object.__setattr__(layer, "others", layers[2:]), object.__setattr__(layer, "seen", [])
        model = fully_shard(nn.Sequential(*layers), mesh=self.mesh)
        self.assertEqual(self.seen(model, layers), [[[True]], [[True]], [[True]]])

    def test_before_its_last_call_a_module_gathers_no_other_one(self):
        class Model(nn.Sequential):
            def forward(self, x):
                return self[1](self[0](self[0](x)))

        layers = self.observers(2)
        model = fully_shard(Model(*layers), mesh=self.mesh)
        self.assertEqual(self.seen(model, layers), [[[True, False], [True, True]], [[False, True]]])

    def test_a_root_with_parameters_gathers_the_first_module_ahead(self):
        class Model(nn.Sequential):
            def forward(self, x):
                is_gathered.append(groups_of(layers[0])[0].is_gathered)
                return super().forward(x) * self.gain

        layers, is_gathered = self.observers(1), []
        model = Model(*layers)
        model.gain = nn.Parameter(torch.ones(WIDTH))
        self.seen(fully_shard(model, mesh=self.mesh), layers)
        self.assertEqual(is_gathered, [False, True])

    def test_a_module_that_was_gathered_ahead_and_did_not_run_has_new_values_later(self):
        class Skipping(nn.Sequential):
            def forward(self, x, layers):
                for layer in self[:layers]:
                    x = layer(x)
                return x

        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)]
        model = Skipping(*layers)
        for module in (*layers, model):
            fully_shard(module, mesh=self.mesh, mp_policy=BFLOAT16)
        x = torch.ones(1, WIDTH)
        model(x, 2)
        model(x, 1)
        self.assertTrue(groups_of(layers[1])[0].is_gathered)
        for layer in layers:
            layer.weight.to_local().data.fill_(1)
        self.assertTrue(torch.equal(model(x, 2), torch.full((1, WIDTH), WIDTH**2, dtype=torch.bfloat16)))
