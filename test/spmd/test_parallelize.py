"""parallelize in eager mode: an unchanged model, under a plan, computes what it computes on one device."""

import copy
import dataclasses
import gc
import itertools
import tempfile
import unittest
import weakref

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from common import error_of, ranks, run_ranks
from delays import undelayed
from tested_device import IS_REHEARSED
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, debug
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils.checkpoint import checkpoint

from torch_ragged.fsdp import Float4Policy, Float8Policy, Offload, buffer_layouts, rows
from torch_ragged.fsdp.codes._float8_weight import float4_weight
from torch_ragged.spmd import INIT, RUN, Plan, deferred_init, parallelize
from torch_ragged.spmd._plan import FACTORY_FUNCTIONS


class MLP(nn.Module):
    def __init__(self, width=8, hidden=16):
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(0.1)

    def forward(self, x):
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.value = nn.Linear(8, 8), nn.Linear(8, 4)
        self.key = nn.Linear(8, 4, bias=False)  # The gradient of its bias would be 0.

    def forward(self, x):
        heads = [layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.query, self.key, self.value)]
        y = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return x + y.transpose(1, 2).flatten(-2)


class Net(nn.Module):
    """Two blocks between a tied embedding."""

    def __init__(self, block=MLP):
        super().__init__()
        self.embedding = nn.Embedding(24, 8)
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.head = nn.Linear(8, 24, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor(0.5))
        self.checkpointed = False

    def forward(self, ids, labels=None):
        x = self.embedding(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.checkpointed == "reentrant") if self.checkpointed else block(x)
        logits = self.head(x) * self.scale
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())


BLOCK = r"blocks\.\d+"


def tensor_parallel(plan, sequence):
    plan.shard(rf"{BLOCK}\.up\.(weight|bias)", Shard(0), "tp").shard(rf"{BLOCK}\.down\.weight", Shard(1), "tp")
    if sequence:
        plan.shard(rf"{BLOCK}\.norm.<in>", Shard(1), "tp").shard(rf"{BLOCK}\.norm.<out>", Replicate(), "tp")
        plan.shard("head.<in>", Replicate(), "tp")
    plan.redistribute(rf"{BLOCK}\.down.<out>", Shard(1) if sequence else Replicate(), "tp")
    return plan.shard("<in:ids>", Shard(0), "dp").shard("<in:labels>", Shard(0), "dp")


def make(seed=0):
    torch.manual_seed(seed)
    return Net()


def deferred(seed=0):
    torch.manual_seed(seed)
    return deferred_init(Net)


def train(model, steps=3, accumulate=1, lengths=(6,), **options):
    """Losses and gradients; the script is that of a single device. Steps take ``lengths`` by turns."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **options)
    losses, grads = [], {}
    for step in range(steps):
        for _ in range(accumulate):
            ids = torch.randint(24, (4, lengths[step % len(lengths)]))
            labels = torch.where(torch.rand(ids.shape) < 0.3, -100, ids)
            loss = model(ids, labels=labels) / accumulate
            loss.backward()
        losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        grads = {name: whole(param.grad) for name, param in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    return losses, grads


def whole(tensor):
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()


def check_training(model, single, tolerance=1e-5, **options):
    found, expected = train(model, **options), train(single, **options)
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=tolerance)
    for name, value in expected[1].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-3, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}")
    for name, value in single.state_dict().items():
        torch.testing.assert_close(whole(model.state_dict()[name]), value, rtol=1e-3, atol=10 * tolerance, msg=name)


class TrainingTest(unittest.TestCase):
    @ranks(4)
    def test_tensor_and_data_parallel_training_equals_one_process():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for sequence in (False, True):
            plan = tensor_parallel(Plan(), sequence).default(Replicate())
            model = parallelize(deferred(), plan, mesh)
            assert model.head.weight is model.embedding.weight
            assert model.blocks[0].up.weight.placements == (Replicate(), Shard(0))
            check_training(model, make())

    @ranks(4)
    def test_units_on_top_of_tensor_parallelism_equal_one_process():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for sequence in (False, True):
            options = {"orig_param_policy": lambda name, param: rows(2)} if sequence else {}
            model = parallelize(deferred(), tensor_parallel(Plan(), sequence).unit(BLOCK, "dp", **options), mesh)
            assert not model.blocks[0].up.weight.placements[0].is_replicate()
            check_training(model, make(), accumulate=2)

    @ranks(4)
    def test_compiled_layers_with_boundaries_inside_equal_one_process():
        """Dynamo would trace hooks of boundaries, and run what it has traced of one module's hook for another module."""
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = parallelize(make(), tensor_parallel(Plan(), sequence=True).unit(BLOCK, "dp").default(Replicate()), mesh)
        torch._dynamo.reset()
        seen = []
        for block in model.blocks:
            block.compile(backend="aot_eager", dynamic=False)
            block.norm.register_forward_pre_hook(torch._disable_dynamo(lambda _, args: seen.append(args[0].placements)))
        # 7 positions on 2 ranks are 4 and 3, as many as of 6 on the second one.
        check_training(model, make(), steps=4, lengths=(6, 7))
        assert len({*seen}) == 1 and len(seen) == 8, seen  # The boundary has made them, in each step.

    @ranks(2)
    def test_parameters_that_units_leave_out_are_materialized_too():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        plan = Plan().unit(r"blocks\.0", "dp").shard("embedding.weight", Shard(0), "dp").shard("<in:ids>", Shard(0), "dp")
        model = parallelize(deferred(), plan.shard("<in:labels>", Shard(0), "dp"), mesh)
        assert model.plan_ir.tensors[0].unit is None
        check_training(model, make())

    @ranks(4)
    def test_a_batch_that_is_not_sharded_counts_once_in_units():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = parallelize(make(), Plan().unit(BLOCK, "dp"), mesh)
        check_training(model, make())

    @ranks(4)
    def test_phases_make_units():
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        plan = Plan().shard(".*", Shard(0), "dp", phase=INIT).shard(".*", Replicate(), "dp", phase=RUN)
        plan.shard("<in:ids>", Shard(0), "dp").shard("<in:labels>", Shard(0), "dp")
        model = parallelize(deferred(), plan, mesh)
        check_training(model, make())
        with CommDebugMode() as mode:
            model(torch.zeros(4, 6, dtype=torch.int64))
        assert len(model.plan_ir.units) == 3 and mode.get_total_counts() == 3, mode.get_comm_counts()

    @ranks(4)
    def test_hybrid_units_checkpointing_and_narrow_compute():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "dp"))
        plan = Plan().unit(BLOCK, ("replicas", "dp"))
        plan.shard("<in:ids>", (Shard(0), Shard(0)), ("replicas", "dp")).shard(
            "<in:labels>", (Shard(0), Shard(0)), ("replicas", "dp")
        )
        for kind in ("reentrant", "not reentrant"):
            single, model = make(), parallelize(make(), plan, mesh)
            single.checkpointed = model.checkpointed = kind
            check_training(model, single)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        narrow = parallelize(make(), tensor_parallel_bf16(policy), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
        assert abs(train(narrow)[0][-1] - train(make())[0][-1]) < 0.05

    @unittest.skipIf(torch.__version__.startswith("2.11"), "torch 2.11 refuses a linear layer of a sequence that is cut")
    @ranks(4)
    def test_context_parallel_training_equals_one_process():
        """The sequence is cut everywhere; keys and values are all-gathered at the boundary, once per layer."""
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        plan = Plan().shard("<in:ids>", Shard(0), "dp").shard("<in:ids>", Shard(1), "cp")
        plan.shard("<in:labels>", Shard(0), "dp").shard("<in:labels>", Shard(1), "cp")
        plan.shard(rf"{BLOCK}\.(key|value).<out>", Replicate(), "cp")
        torch.manual_seed(0)
        for each in (plan.default(Replicate()), plan.unit(BLOCK, ("dp", "cp"))):
            model = Net(Attention)
            check_training(parallelize(copy.deepcopy(model), each, mesh), model)

    @unittest.skipIf(IS_REHEARSED, "the simulator draws by the CPU's kernel")
    @ranks(2)
    def test_a_boundary_keeps_the_order_in_memory_in_which_dropout_draws():
        class Columns(nn.Module):
            def __init__(self):
                super().__init__()
                self.dropout = nn.Dropout(0.5)

            def forward(self, x):
                return self.dropout(x.transpose(1, 2))

        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        x, single = torch.ones(4, 6, 2, requires_grad=True), Columns()
        for placement in (Replicate(), Shard(0), Shard(1), Shard(2)):
            model = parallelize(Columns(), Plan().shard("<in>", Shard(0), "dp").shard("dropout.<in>", placement, "dp"), mesh)
            results = []
            for each in (model, single):
                torch.manual_seed(2)
                results.append(each(x))
            assert torch.equal(whole(results[0]), results[1].detach()), placement
            assert results[0].stride() == results[1].stride()

    @ranks(4)
    def test_gradients_over_several_mesh_dimensions_take_one_all_reduce():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = parallelize(make(), tensor_parallel(Plan(), True).default(Replicate()), mesh)
        ids = torch.zeros(4, 6, dtype=torch.int64)
        loss = model(ids, labels=ids)
        names = {id(param): name for name, param in model.named_parameters()}
        calls = []
        original = torch.distributed.all_reduce
        torch.distributed.all_reduce = lambda tensor, **options: calls.append(tensor.numel()) or original(tensor, **options)
        try:
            loss.backward()
        finally:
            torch.distributed.all_reduce = original
        # Norms and what is replicated over both; the weights that tp cuts, over dp only.
        assert len(calls) == 2, (calls, names)
        for param in model.parameters():
            assert param.grad.placements == param.placements

    @ranks(4)
    def test_gradients_that_accumulate_take_no_further_collective():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for mode in ("eager", "static"):
            model = parallelize(make(), tensor_parallel(Plan(), True).default(Replicate()), mesh, mode=mode).eval()
            ids = torch.arange(24).view(4, 6)
            model(ids, labels=ids).backward()
            first, counts = {name: param.grad.to_local().clone() for name, param in model.named_parameters()}, []
            for _ in range(2):
                model.zero_grad(set_to_none=not counts)
                loss = model(ids, labels=ids)
                with CommDebugMode() as comm:
                    loss.backward()
                counts.append(dict(comm.get_comm_counts()))
            assert counts[0] == counts[1], (mode, counts)
            for name, param in model.named_parameters():  # Zeros were in .grad, so the sum has the same bits.
                assert torch.equal(param.grad.to_local(), first[name]), (mode, name)
                assert param.grad.placements == param.placements

    @ranks(4)
    def test_sums_over_the_model_of_the_gradients_in_a_unit_take_one_all_reduce_of_the_shards():
        """The weights and biases of norms, and the embedding, are pending over sequence-parallel ranks."""
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = parallelize(make(), tensor_parallel(Plan(), True).unit(BLOCK, "dp"), mesh).eval()
        ids, calls = torch.arange(24).view(4, 6), []
        names = ["blocks.0.norm.weight", "blocks.0.norm.bias", "embedding.weight"]
        original = torch.distributed.all_reduce

        def count(tensor, **options):
            if tensor.is_floating_point():
                assert options["group"] is mesh.get_group("tp")
                calls.append(tensor.numel())
            return original(tensor, **options)

        for backward in range(2):  # The second one adds to .grad.
            loss = model(ids, labels=ids)
            torch.distributed.all_reduce = count
            try:
                loss.backward()
            finally:
                torch.distributed.all_reduce = original
            weight, bias, embedding = (model.get_parameter(name).to_local().numel() for name in names)
            # Torch 2.11 gathers the gradient before it reaches the embedding.
            last = [] if torch.__version__.startswith("2.11") else [embedding]
            assert calls == [weight + bias, weight + bias, *last], (backward, calls)
            calls.clear()
        whole_sums = [torch.tensor(each.to_local().numel()) for each in map(model.get_parameter, names)]
        torch.distributed.all_reduce(sizes := torch.stack(whole_sums), group=mesh.get_group("dp"))
        assert sizes.tolist() == [8, 8, 24 * 8]
        single = make().eval()
        for _ in range(2):
            single(ids, labels=ids).backward()
        for name, param in single.named_parameters():
            torch.testing.assert_close(whole(model.get_parameter(name).grad), param.grad, rtol=1e-4, atol=1e-6, msg=name)


def tensor_parallel_bf16(policy):
    return tensor_parallel(Plan(), False).unit(BLOCK, "dp", mp_policy=policy)


@dataclasses.dataclass
class Record:
    first: torch.Tensor
    second: object


class Calls(nn.Module):
    """All ways to pass an argument."""

    def forward(self, a, b=None, *rest, flag=True, named=None, **more):
        self.seen = {"a": a, "b": b, "rest": rest, "flag": flag, "named": named, **more}
        return a


class Outputs(nn.Module):
    def forward(self, x, kind):
        return {
            "tensor": x,
            "list": [x, 1, None],
            "tuple": (2, (x, x)),
            "dict": {"key": x, "other": "text"},
            "record": Record(x, 3),
            "none": None,
        }[kind]


def placed(value):
    return value.placements if isinstance(value, DTensor) else value


class BoundaryTest(unittest.TestCase):
    @ranks(2)
    def test_arguments_by_position_keyword_default_and_in_containers():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        x = torch.arange(8.0).view(4, 2)
        plan = Plan()
        for path in ("<in>", "<in:b>", "<in:2>", "<in:named>", "<in:nested.key.1>"):
            plan.shard(path, Shard(0), "tp")
        model = parallelize(Calls(), plan, mesh)
        cut = (Shard(0),)
        model(x, x, x, named=x, nested={"key": [7, x], "other": None}, flag=False)
        seen = model.seen
        assert [placed(seen[name]) for name in ("a", "b", "named")] == [cut] * 3 and placed(seen["rest"][0]) == cut
        assert placed(seen["nested"]["key"][1]) == cut and seen["nested"]["key"][0] == 7 and seen["flag"] is False
        model(b=x, a=x)
        assert placed(model.seen["a"]) == placed(model.seen["b"]) == cut and model.seen["rest"] == ()
        model(x, None)
        assert model.seen["b"] is None and torch.equal(model.seen["a"].full_tensor(), x)
        assert "missing 1 required positional argument" in error_of(model)
        layer = parallelize(nn.Linear(2, 2), Plan().shard("<in>", Shard(0), "tp").default(Replicate()), mesh)
        for call in (lambda: layer(), lambda: layer(x, x), lambda: layer(x, other=x), lambda: layer(x, input=x)):
            assert error_of(call).startswith("TypeError: Linear.forward() "), error_of(call)

    @ranks(2)
    def test_outputs_in_tensors_lists_dicts_and_dataclasses():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        x, cut = torch.arange(8.0).view(4, 2), (Shard(0),)
        for path, kind, take in (
            ("<out>", "tensor", lambda o: o),
            ("<out:0>", "list", lambda o: o[0]),
            ("<out:1.0>", "tuple", lambda o: o[1][0]),
            ("<out:key>", "dict", lambda o: o["key"]),
            ("<out:first>", "record", lambda o: o.first),
            ("<out>", "record", lambda o: o.first),
            ("<out>", "tuple", lambda o: o[1][0]),
        ):
            model = parallelize(Outputs(), Plan().shard(path, Shard(0), "tp"), mesh)
            output = model(x, kind)
            assert placed(take(output)) == cut, (path, kind)
            assert type(output) in (DTensor, list, tuple, dict, Record)
        assert parallelize(Outputs(), Plan().shard("<out>", Shard(0), "tp"), mesh)(x, "none") is None
        error = error_of(parallelize(Outputs(), Plan().shard("<out:kee>", Shard(0), "tp"), mesh), x, "dict")
        assert "dict has no 'kee', which a plan names: it has ['key', 'other']" in error, error

    @ranks(2)
    def test_negative_dimensions_count_from_the_end_of_each_tensor():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        x = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(0))
        model = parallelize(nn.Sequential(nn.Identity()), Plan().shard("0.<out>", Shard(-1), "tp"), mesh)
        for each in (x, x[0], x[0, 0]):
            found = model(each)
            assert found.placements == (Shard(each.ndim - 1),) and torch.equal(found.full_tensor(), each)

    @ranks(2)
    def test_redistributions_of_gradients_and_annotations():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        torch.manual_seed(0)
        single = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 4, bias=False))
        plan = Plan().shard("0.weight", Shard(0), "tp").shard("1.weight", Shard(1), "tp")
        plan.redistribute("<out>", Replicate(), "tp", src=Partial(), grad_dst=Replicate())
        plan.annotate("<in>", Replicate(), "tp")
        model = parallelize(copy.deepcopy(single), plan, mesh)
        x = torch.randn(3, 4)
        given, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        (model(given) ** 2).sum().backward()
        (single(other) ** 2).sum().backward()
        for name, param in single.named_parameters():
            torch.testing.assert_close(model.get_parameter(name).grad.full_tensor(), param.grad)
        wrong = Plan().default(Replicate()).redistribute("1.<in>", Replicate(), "tp", src=Partial())
        error = error_of(parallelize(copy.deepcopy(single), wrong, mesh), x)
        assert "1.<in:input> arrives as (Replicate(),), and the plan says that it is (Partial(sum),)" in error, error
        parts = Plan().default(Replicate()).annotate("<in>", Shard(0), "tp")
        mine = x[:2] if mesh.get_local_rank() == 0 else x[2:]
        output = parallelize(copy.deepcopy(single), parts, mesh)(mine[:1])  # Each rank has a row of its own.
        torch.testing.assert_close(output.full_tensor(), single(x[[0, 2]]))

    @ranks(2)
    def test_a_gradient_may_stay_pending_and_a_whole_one_stays_whole():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        torch.manual_seed(0)
        single, x = nn.Linear(4, 6), torch.randn(2, 4)
        single(x).square().sum().backward()
        for shard_input in (True, False):
            plan = Plan().shard("weight", Replicate(), "dp", grad=Partial()).annotate("bias.grad", Partial(), "dp")
            plan = plan.default(Replicate()).shard("<in>", Shard(0) if shard_input else Replicate(), "dp")
            model = parallelize(copy.deepcopy(single), plan, mesh)
            model.zero_grad()
            model(x).square().sum().backward()
            for name, param in single.named_parameters():
                grad = model.get_parameter(name).grad
                assert grad.placements == ((Partial(),) if shard_input else (Replicate(),)), (name, grad.placements)
                torch.testing.assert_close(grad.full_tensor(), param.grad)

    @ranks(2)
    def test_an_mlp_whose_weights_are_cut_in_textbook_ways_and_one_whose_weights_are_gathered():
        mesh, x = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), torch.randn(3, 4, dtype=torch.float64)
        single = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)).double()
        expected, wanted = single(x), x.clone().requires_grad_()
        single(wanted).square().sum().backward()
        textbook = Plan().shard(r"0\.(weight|bias)", Shard(0), "tp").shard(r"2\.weight", Shard(1), "tp")
        all_rows = Plan().shard(".*", Shard(0), "tp")
        phases = Plan().shard(".*", Shard(0), "tp", phase=INIT).shard(".*", Replicate(), "tp", phase=RUN)
        for plan in (textbook.shard(r"2\.bias", Replicate(), "tp"), all_rows, phases):
            model, given = parallelize(copy.deepcopy(single).requires_grad_(), plan, mesh), x.clone().requires_grad_()
            model.zero_grad()
            output = model(given)
            torch.testing.assert_close(whole(output), expected.detach())
            output.square().sum().backward()
            torch.testing.assert_close(whole(given.grad), wanted.grad)
            for name, param in single.named_parameters():
                torch.testing.assert_close(whole(model.get_parameter(name).grad), param.grad)

    @ranks(2)
    def test_second_derivatives_go_through_boundaries():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        torch.manual_seed(0)
        single = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Linear(6, 4, bias=False)).double()
        plan = Plan().shard("0.weight", Shard(0), "tp").shard("2.weight", Shard(1), "tp").shard("2.<out>", Replicate(), "tp")
        model = parallelize(copy.deepcopy(single), plan, mesh)
        x, found = torch.randn(3, 4, dtype=torch.float64), []
        for net in (single, model):
            given = x.clone().requires_grad_()
            (first,) = torch.autograd.grad(net(given).square().sum(), given, create_graph=True)
            first.square().sum().backward()
            found.append([whole(given.grad), *[whole(param.grad) for param in net.parameters()]])
        for ours, expected in zip(found[1], found[0], strict=True):
            torch.testing.assert_close(ours, expected)

    @ranks(2)
    def test_factories_make_dtensors_and_inner_modules_override():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        makers = {
            "zeros": lambda: torch.zeros(4, 2),
            "ones": lambda: torch.ones((4, 2), dtype=torch.int64),
            "empty": lambda: torch.empty(4, 2).fill_(1),
            "full": lambda: torch.full((4, 2), 3.0),
            "arange": lambda: torch.arange(4),
            "linspace": lambda: torch.linspace(0, 1, 4),
            "logspace": lambda: torch.logspace(0, 1, 4),
            "eye": lambda: torch.eye(4),
            "rand": lambda: torch.rand(4, 2),
            "randn": lambda: torch.randn(4, 2),
            "randint": lambda: torch.randint(9, (4, 2)),
            "randperm": lambda: torch.randperm(4),
        }

        class Inner(nn.Module):
            def forward(self):
                return {name: maker() for name, maker in makers.items()}

        class Outer(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner, self.replicated = Inner(), Inner()

            def forward(self):
                return self.inner(), torch.zeros(4), {name: maker() for name, maker in makers.items()}, self.replicated()

        plan = Plan().factory("", Shard(0), "tp").factory("inner", Replicate(), "tp", functions=("zeros", "rand"))
        plan.factory("replicated", Replicate(), "tp")
        model = parallelize(Outer(), plan, mesh)
        torch.manual_seed(5)
        inner, zeros, outer, replicated = model()
        assert set(makers) == set(FACTORY_FUNCTIONS)
        torch.manual_seed(5)
        expected = Outer()()
        assert zeros.placements == (Shard(0),) and type(torch.zeros(4)) is torch.Tensor
        for name in makers:
            assert outer[name].placements == (Shard(0),), name
            assert inner[name].placements == ((Replicate(),) if name in ("zeros", "rand") else (Shard(0),)), name
            assert torch.equal(outer[name].full_tensor(), expected[2][name]), name
            assert torch.equal(inner[name].full_tensor(), expected[0][name]), name
            assert replicated[name].placements == (Replicate(),), name
            assert torch.equal(replicated[name].full_tensor(), expected[3][name]), name

    @ranks(2)
    def test_segments_are_cut_each_by_itself():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))

        class Fused(nn.Module):
            def __init__(self):
                super().__init__()
                self.qkv, self.out = nn.Linear(8, 16), nn.Linear(8, 8)

            def forward(self, x):
                q, k, v = self.qkv(x).split([8, 4, 4], -1)
                return self.out(q * torch.cat([k, v], -1).sigmoid()[..., :8])

        torch.manual_seed(0)
        single = Fused()
        plan = Plan().segments(r"qkv\.\w+", (8, 4, 4), 0).shard(r"qkv\.\w+", Shard(0), "tp")
        plan.shard("out.weight", Shard(1), "tp").shard("out.bias", Replicate(), "tp")
        model = parallelize(copy.deepcopy(single), plan, mesh)
        x = torch.randn(3, 8)
        torch.testing.assert_close(model(x).full_tensor(), single(x))

    @ranks(4)
    def test_a_unit_keeps_the_blocks_of_each_segment_by_itself():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

        class Fused(nn.Module):
            def __init__(self):
                super().__init__()
                self.qkv, self.experts = nn.Linear(8, 20), nn.Parameter(torch.randn(2, 10, 8))
                self.columns = nn.Parameter(torch.randn(12, 6))

            def forward(self, x):
                q, k, v = self.qkv(x).split([12, 4, 4], -1)
                gate, up = (x @ self.experts[0].T + x @ self.experts[1].T).split([6, 4], -1)
                return (q.tanh() * (k * v).sum(-1, keepdim=True)) @ self.columns + gate * up.sum(-1, keepdim=True)

        segments = Plan().segments("qkv.weight", (12, 4, 4), 0).segments("qkv.bias", (12, 4, 4), 0)
        segments.segments("experts", (6, 4), 1).segments("columns", (4, 2), 1)
        base = segments + Plan().unit("", "dp", granularity=rows(3)).shard("<in:x>", Shard(0), "dp")
        # Rows of qkv, over two ranks of tensor parallelism or in whole: blocks are counted anew in q, k and v.
        runs = {True: ((0, 64, 24), (64, 80, 16)), False: ((0, 128, 24), (128, 160, 24))}
        for cut, expected in runs.items():
            torch.manual_seed(0)
            single = Fused()
            plan = base + Plan().shard(r"qkv\.\w+", Shard(0), "tp") if cut else base
            model = parallelize(copy.deepcopy(single), plan, mesh)
            (layout,) = buffer_layouts(model).values()
            specs = {spec.name: spec for spec in layout.tensors}
            assert specs["qkv.weight"].runs == expected, specs["qkv.weight"].runs
            assert specs["experts"].runs == ((0, 80, 24), (80, 160, 24)), specs["experts"].runs
            assert specs["columns"].block == 18 and not specs["columns"].segments  # Each row has both segments.
            x = torch.randn(4, 8)
            for net in (single, model):
                loss = net(x).pow(2).mean()
                loss.backward()
            torch.testing.assert_close(loss.full_tensor(), single(x).pow(2).mean())
            for name, param in single.named_parameters():
                torch.testing.assert_close(model.get_parameter(name).grad.full_tensor(), param.grad, msg=name)


class LossTest(unittest.TestCase):
    @ranks(2)
    def test_a_cut_vocabulary_and_loss_parallel():
        mesh, x = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), torch.randn(6, 8, dtype=torch.float64)
        labels = torch.tensor([1, 2, -100, -100, -100, 5])  # The second rank has fewer that count, if rows are cut.
        single = nn.Linear(8, 12).double()
        expected = F.cross_entropy(single(x), labels)
        expected.backward()
        vocabulary = Plan().shard("weight|bias", Shard(0), "tp")
        rows = Plan().default(Replicate()).shard("<in>", Shard(0), "tp")
        models = [parallelize(copy.deepcopy(single), plan, mesh) for plan in (vocabulary, rows)]
        with loss_parallel():
            losses = [F.cross_entropy(models[0](x), labels)]
            losses[0].backward()
        for model in models:
            model.zero_grad()
            losses.append(F.cross_entropy(model(x), labels))
            losses[-1].backward()
            torch.testing.assert_close(model.weight.grad.full_tensor(), single.weight.grad)
        for loss in losses:
            torch.testing.assert_close(whole(loss), expected.detach())
        handlers = DTensor._op_dispatcher._custom_op_handlers
        before = dict(handlers)
        with loss_parallel():
            logits = models[1](x)
            assert "loss_parallel() " in error_of(F.cross_entropy, logits, labels)  # It is for a vocabulary that is cut.
        assert handlers == before


def check_saved(folder):
    """A checkpoint of any plan loads under any other, and under none."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plans = [
        tensor_parallel(Plan(), False).default(Replicate()),
        tensor_parallel(Plan(), True).unit(BLOCK, "dp"),
        Plan().unit("", "dp"),
    ]
    source = parallelize(deferred(3), plans[1], mesh)
    dcp.save({"model": source.state_dict()}, checkpoint_id=folder)
    expected = make(3).state_dict()
    for plan in plans:
        model = parallelize(deferred(4), plan, mesh)
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state["model"])
        for name, value in model.state_dict().items():
            assert torch.equal(whole(value), expected[name]), name
    single = {"model": make(4).state_dict()}
    dcp.load(single, checkpoint_id=folder)
    assert all(torch.equal(value, expected[name]) for name, value in single["model"].items())


class CallTest(unittest.TestCase):
    def test_checkpoints_of_a_plan_load_under_others_and_under_none(self):
        with tempfile.TemporaryDirectory() as folder:
            run_ranks(4, check_saved, folder)

    @ranks(2)
    def test_wrong_plans_and_calls_raise_on_every_rank_and_change_nothing():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = make()
        before = dict(model.named_parameters())
        error = error_of(parallelize, model, Plan().shard("blocks.0.upp.weight", Shard(0), "tp"), mesh)
        assert "PlanError" in error and "blocks.0.up.weight" in error, error
        plan = Plan().default(Shard(0) if mesh.get_local_rank() else Replicate())
        error = error_of(parallelize, model, plan, mesh)
        assert "parallelize was called differently on different ranks" in error or "does not fit" in error, error
        assert all(param is before[name] for name, param in model.named_parameters())
        assert not model._forward_pre_hooks and not hasattr(model, "plan_ir")
        good = Plan().default(Replicate())
        parallelize(model, good, mesh)
        assert "is parallelized already" in error_of(parallelize, model, good, mesh)
        del model.plan_ir
        assert "embedding.weight is a DTensor already" in error_of(parallelize, model, good, mesh)

    @ranks(2)
    def test_ranks_agree_on_equal_plans_whose_functions_and_folders_differ():
        """A function has another address in each process, and each node may have a disk of its own."""
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))

        def policy(function):
            return dataclasses.replace(Float4Policy(), weight_factory=function)

        def with_other_address(rank):
            made = [lambda *args: float4_weight(*args) for _ in range(1 + 50 * rank)]
            return made[-1]

        with tempfile.TemporaryDirectory() as own:
            offload = Offload(parameters="files", to=own)
            plan = Plan().unit(BLOCK, "dp", mp_policy=policy(with_other_address(dist.get_rank())), offload_policy=offload)
            assert " at 0x" not in repr(plan) and own in repr(plan), plan
            texts = [None, None]
            dist.all_gather_object(texts, repr(plan))
            assert texts[0] != texts[1], "the folders differ"
            model = parallelize(make(), plan.shard("<in:ids>", Shard(0), "dp"), mesh)
            model(torch.arange(8).view(2, 4)).sum().backward()
            other = Plan().unit(BLOCK, "dp", mp_policy=Float4Policy() if dist.get_rank() else Float8Policy())
            error = error_of(parallelize, make(), other, mesh)
            assert "called differently on different ranks" in error and "Float8Policy" in error, error

    @ranks(2)
    def test_a_unit_that_fully_shard_refuses_leaves_the_model_as_it_was():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        for make_model in (make, deferred):
            model = make_model()
            before, kinds = dict(model.named_parameters()), [type(module) for module in model.modules()]
            wrong = (
                Plan()
                .unit(r"blocks\.0", "dp")
                .unit(r"blocks\.1", "dp", reshard_after_forward=3)
                .shard("<in:ids>", Shard(0), "dp")
            )
            assert "reshard_after_forward" in error_of(parallelize, model, wrong, mesh)
            assert [type(module) for module in model.modules()] == kinds
            assert all(before[name] is param for name, param in model.named_parameters())
            assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
            check_training(parallelize(model, Plan().unit(BLOCK, "dp").shard("<in:ids>", Shard(0), "dp"), mesh), make())

    @ranks(2)
    def test_gradients_that_arrived_before_a_reentrant_checkpoint_are_reduced():
        """Its backward runs inside of the backward of the model: that of the head has arrived before it begins."""
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        plan = Plan().default(Replicate()).shard("<in:ids>", Shard(0), "dp").shard("<in:labels>", Shard(0), "dp")
        for mode, kind in itertools.product(("eager", "static"), ("reentrant", "not reentrant")):
            single = make()
            single.head.weight = nn.Parameter(single.head.weight.detach().clone())  # Tied, it would arrive at the end.
            model = parallelize(copy.deepcopy(single), plan, mesh, mode=mode)
            single.checkpointed = model.checkpointed = kind
            check_training(model, single)
            model(torch.arange(24).view(4, 6)).sum().backward()
            for name, param in model.named_parameters():
                assert param.grad.placements == param.placements, (mode, kind, name)

    @ranks(2)
    def test_a_boundary_whose_gradient_does_not_exist_has_none_and_sends_nothing():
        """A reentrant checkpoint that has not used its input brings none, and none goes on to what is before it."""

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.norm, self.factor = nn.Linear(8, 8), nn.LayerNorm(8), nn.Parameter(torch.randn(8))
                self.kind, self.uses = True, False

            def forward(self, x):
                y = self.norm(self.first(x))
                if self.uses:
                    x = y * 2
                return x + checkpoint(lambda h: h.detach() * self.factor, y, use_reentrant=self.kind)

        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        plan = Plan().shard("norm.<in>", Shard(0), "tp").shard("norm.<out>", Replicate(), "tp").shard("<in>", Replicate(), "tp")
        for mode, kind, uses in itertools.product(("eager", "static"), (True, False), (False, True)):
            torch.manual_seed(0)
            single = Model()
            model = parallelize(copy.deepcopy(single), plan.default(Replicate()), mesh, mode=mode)
            for step in range(4):
                for each in (single, model):
                    each.kind, each.uses = kind, uses and step != 2
                    each.zero_grad()
                    each(torch.randn(4, 8, generator=torch.Generator().manual_seed(step))).square().mean().backward()
                for one, other in zip(single.parameters(), model.parameters(), strict=True):
                    assert (one.grad is None) == (other.grad is None), (mode, kind, uses, step)
                    if one.grad is not None:
                        torch.testing.assert_close(other.grad.full_tensor(), one.grad)

    @ranks(2)
    def test_a_backward_that_raised_does_not_keep_the_next_ones_from_being_reduced():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        plan = Plan().default(Replicate()).shard("<in:ids>", Shard(0), "dp")
        model, ids = parallelize(make(), plan, mesh).eval(), torch.arange(24).view(4, 6)

        def fail(grad):
            raise RuntimeError("on purpose")

        hook = model.embedding.weight.register_hook(fail)
        assert "on purpose" in error_of(model(ids).sum().backward)
        hook.remove()
        model.zero_grad()
        model(ids).sum().backward()
        for param in model.parameters():
            assert param.grad.placements == param.placements

    @undelayed
    @ranks(2)
    def test_parameters_that_outlive_their_model_have_reduced_gradients_and_are_freed():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        plan = Plan().default(Replicate()).shard("<in:input>", Shard(0), "dp")
        for mode in ("eager", "static"):
            model = parallelize(nn.Linear(3, 1, bias=False), plan, mesh, mode=mode)
            model(torch.ones(4, 3)).sum().backward()
            weight = model.weight
            del model
            gc.collect()
            given = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)])
            for times in (2, 3):
                nn.functional.linear(given, weight).sum().backward()
                assert weight.grad.placements == (Replicate(),), (mode, weight.grad.placements)
                assert torch.equal(weight.grad.to_local(), torch.full((1, 3), 4.0 * times))
            # Asked for, a gradient is returned, and .grad stays as it is.
            (gradient,) = torch.autograd.grad(nn.functional.linear(given, weight).sum(), weight)
            assert torch.equal(gradient.full_tensor(), torch.full((1, 3), 4.0)), (mode, gradient)
            assert torch.equal(weight.grad.to_local(), torch.full((1, 3), 12.0))
            gone = weakref.ref(weight)
            del weight, gradient
            debug._clear_sharding_prop_cache()
            for _ in range(2):
                gc.collect()
            assert gone() is None, mode

    @ranks(2)
    def test_hooks_of_users_see_each_gradient_when_others_are_there():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        model = parallelize(nn.Linear(3, 1), Plan().default(Replicate()).shard("<in:input>", Shard(0), "dp"), mesh)
        seen = []
        model.weight.register_hook(lambda grad: (seen.append(grad.full_tensor()), 2 * grad)[1])
        for times in (1, 2):
            model(torch.ones(4, 3)).sum().backward()
            assert torch.equal(model.weight.grad.full_tensor(), torch.full((1, 3), 8.0 * times)), model.weight.grad
        assert all(torch.equal(each, torch.full((1, 3), 4.0)) for each in seen) and len(seen) == 2, seen

    @ranks(2)
    def test_seeds_that_differ_raise_on_every_rank():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = deferred(mesh.get_local_rank())
        error = error_of(parallelize, model, Plan().default(Replicate()), mesh)
        assert "torch.manual_seed with one seed on all ranks" in error, error
